"""`PreferenceData`: pairs of answers to one prompt, a chosen and a rejected one, for preference tuning (DPO)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_memfit.data.batched import digest_of
from lightning_memfit.data.chat_template import ChatTemplate
from lightning_memfit.data.chats import NOT_PREDICTED, TemplatedChats, without_gaps
from lightning_memfit.data.sources import load_documents, split_by_content

_ANSWERING = "assistant"
_ASKING = ("user", "system", "developer")
_LEARNED = np.uint32(1 << 31)
"""Bit that marks the tokens that are learned."""
_WRITTEN = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking")
"""What templates write of a message; other keys, such as its number, differ where messages are the same."""
Messages = list[dict[str, Any]]

# --- rows -------------------------------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """Two ways for a conversation to go on, as lists of messages with `role`, `content` and perhaps calls of tools."""

    prompt: Messages
    chosen: Messages
    rejected: Messages


def comparison_of(prompt: Any, chosen: Any, rejected: Any) -> Comparison:
    """Return a row's comparison.

    Args:
        prompt: A question or a list of messages; None if both answers are whole conversations, which begin alike.
        chosen: The better answer or the messages with it, which may begin with those of the prompt.
        rejected: The worse one.

    Raises:
        ValueError: If it is something else, or there is nothing to compare.
    """
    ways = [_messages(value, _ANSWERING, name) for name, value in (("chosen", chosen), ("rejected", rejected))]
    if prompt is None:
        pairs = zip(*ways, strict=False)
        differ = (place for place, (one, other) in enumerate(pairs) if _said(one) != _said(other))
        shared = next(differ, min(map(len, ways)))
        begun = ways[0][:shared]
    else:
        begun = _messages(prompt, "user", "prompt")
    asked = list(map(_said, begun))
    first, second = (way[len(begun) :] if list(map(_said, way))[: len(begun)] == asked else way for way in ways)
    for name, way in (("chosen", first), ("rejected", second)):
        if not any(message["role"] == _ANSWERING for message in way):
            raise ValueError(f"{name!r} has no answer of the assistant that the other one doesn't have")
        if prompt is not None and way[0]["role"] in _ASKING:
            raise ValueError(
                f"{name!r} begins with a message of {way[0]['role']!r} and not with those of the prompt, so that there "
                "are two prompts; with `prompt_column: null` that of the conversations counts"
            )
    if first == second:
        raise ValueError("both answers are the same")
    if not begun:
        raise ValueError("there is no prompt: the answers begin with different messages")
    return Comparison(begun, first, second)


def _messages(value: Any, role: str, name: str) -> Messages:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, Sequence) or not value or not all(isinstance(one, Mapping) for one in value):
        found = "nothing" if value is None else type(value).__name__
        raise ValueError(f"{name!r} has {found}, where a text or a list of messages is wanted")
    for one in value:
        if not isinstance(one.get("role"), str) or not isinstance(one.get("content"), str):
            raise ValueError(f"{name!r} has a message without `role` and `content`, both text")
    return [without_gaps({key: one[key] for key in _WRITTEN if key in one}) for one in value]


def _said(message: dict[str, Any]) -> tuple[Any, ...]:
    """What a message says, without what may be noted beside it in one place and not in another."""
    return message["role"], message["content"], message.get("tool_calls") or None, message.get("tool_call_id") or None


# --- samples ----------------------------------------------------------------------------------------------------------


class TokenizedComparisons(Dataset[dict[str, torch.Tensor]]):
    """Comparisons, tokenized once and padded on access to one length, so that every batch needs the same memory.

    Items are `input_ids`, `attention_mask` and `labels`, `(2, sequence_length)` int64, the chosen answer first. Labels
    are -100 but on what answers say after the prompt. Of a conversation that is too long the beginning of the prompt is
    cut, as much of it in both, down to half of `sequence_length`; answers that are still too long lose their end.

    Args:
        comparisons: What is compared.
        template: The chat template.
        sequence_length: Tokens of a conversation.
        pad: Id of the padding.

    Raises:
        ValueError: If the template can't write one of the comparisons.
    """

    def __init__(
        self, comparisons: Sequence[Comparison], template: ChatTemplate, sequence_length: int, pad: int
    ) -> None:
        self.comparisons = comparisons
        self.template = template
        self.sequence_length = sequence_length
        self.pad = pad
        self.num_prompts_cut = self.num_answers_cut = 0
        rows = [row for index in range(len(comparisons)) for row in self._rows(index)]
        self._ends = np.cumsum([0, *map(len, rows)])
        self._tokens = np.concatenate(rows) if rows else np.empty(0, np.uint32)

    def content_digest(self) -> str:
        """Return a digest of some of the comparisons."""
        return digest_of(len(self.comparisons), lambda place: repr(self.comparisons[place]).encode())

    def largest_id(self) -> int:
        """Return the largest token id in the samples."""
        return max(self.pad, int((self._tokens & ~_LEARNED).max(initial=0)))

    def describe(self) -> str:
        """Say in one line how many there are, and what is missing."""
        parts = [f"{len(self):,} comparisons in {self.sequence_length} tokens for each answer"]
        if self.num_prompts_cut:
            parts.append(f"the beginning of the prompt cut in {self.num_prompts_cut:,}")
        if self.num_answers_cut:
            parts.append(f"the end of an answer cut in {self.num_answers_cut:,}")
        return ", ".join(parts)

    def __len__(self) -> int:
        return len(self.comparisons)

    @override
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        first = 2 * range(len(self))[index]
        rows = [self._padded(self._tokens[slice(*self._ends[at : at + 2])]) for at in (first, first + 1)]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def _rows(self, index: int) -> list[np.ndarray]:
        """Return the tokens of both conversations, cut to the length."""
        prompt, *ways = self.comparisons[index]
        encoded = [self._encode(prompt, way, index) for way in ways]
        begin = min(int((tokens >= _LEARNED).argmax()) for tokens in encoded)
        kept = min(begin, self.sequence_length // 2)  # an answer that follows no question teaches something else
        too_long = max(map(len, encoded)) - self.sequence_length
        cut = max(0, min(begin - kept, too_long))
        self.num_prompts_cut += cut > 0
        self.num_answers_cut += too_long > cut
        return [tokens[cut : cut + self.sequence_length] for tokens in encoded]

    def _encode(self, prompt: Messages, way: Messages, index: int) -> np.ndarray:
        """Return the ids of a conversation, with a bit that marks the answers after the prompt."""
        try:
            ids, is_answer = self.template.encode([*prompt, *way])
        except ValueError as error:
            raise ValueError(f"Comparison {index + 1:,} of the data, on {prompt}, can't be used: {error}.") from error
        starts = np.flatnonzero(np.diff(is_answer.astype(np.int8), prepend=0) == 1)
        answers = sum(message["role"] == _ANSWERING for message in way)
        learned = is_answer.copy()
        learned[: starts[-answers]] = False
        tokens: np.ndarray = ids.astype(np.uint32) | np.where(learned, _LEARNED, np.uint32(0))
        return tokens

    def _padded(self, tokens: np.ndarray) -> dict[str, torch.Tensor]:
        input_ids = torch.full((self.sequence_length,), self.pad)
        input_ids[: len(tokens)] = torch.from_numpy((tokens & ~_LEARNED).astype(np.int64))
        labels = torch.full((self.sequence_length,), NOT_PREDICTED)
        learned = torch.from_numpy(tokens >= _LEARNED)
        labels[: len(tokens)] = torch.where(learned, input_ids[: len(tokens)], NOT_PREDICTED)
        mask = (torch.arange(self.sequence_length) < len(tokens)).long()
        return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}


# --- the data modules -------------------------------------------------------------------------------------------------


class ComparedAnswers(TemplatedChats):
    """Comparisons for `PreferenceLM`. Subclasses provide them.

    Args:
        tokenizer: `bytes`, a local folder or a hub name.
        chat_template: `chatml`, a file with a Jinja template, or null for the tokenizer's own.
        template_options: Further variables of the template.
        date: Day for templates that write today's.
        sequence_length: Tokens of a conversation.
        batch_size: Comparisons in a micro-batch of one device, of two conversations each.
        global_batch_size: Comparisons in an optimizer step, accumulation and all devices included. Null: not checked.
        val_fraction: Share of the comparisons kept for validation, chosen by their prompts.
        num_workers: Loader processes.
        seed: Seed for the order of the training comparisons.

    Raises:
        ValueError: If a number is out of range, or the tokenizer or its template can't be used.
    """

    @abstractmethod
    def load_comparisons(self) -> tuple[list[Comparison], list[Comparison]]:
        """Return comparisons for training and validation."""

    @override
    def make_samples(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """Tokenize the comparisons.

        Raises:
            ValueError: If the template can't write one of them.
        """
        template = self.make_template()
        train, val = (
            TokenizedComparisons(comparisons, template, self.sequence_length, self.pad)
            for comparisons in self.load_comparisons()
        )
        rank_zero_info(f"{type(self).__name__}: {train.describe()}")
        return train, val

    @override
    def largest_id(self) -> int | None:
        """Return the largest token id in the samples; None before `setup`."""
        both = [samples for samples in (self._train, self._val) if isinstance(samples, TokenizedComparisons)]
        return max((samples.largest_id() for samples in both), default=None)

    def example_batch(self, vocab_size: int | None = None) -> dict[str, torch.Tensor]:
        """Return a training batch of the right shapes without reading data or tokenizer; see `PackedText`.

        The last conversation has padding, as models may leave out a mask without any.

        Args:
            vocab_size: Number of token ids that the model takes; None if it is not known.

        Returns:
            `input_ids`, `attention_mask` and `labels`, `(batch_size, 2, sequence_length)`, int64.
        """
        tokens = self._example_tokens(2 * self.sequence_length, vocab_size)
        input_ids = tokens.view(self.batch_size, 2, self.sequence_length)
        labels, mask = input_ids.clone(), torch.ones_like(input_ids)
        labels[..., : max(1, self.sequence_length // 2)] = NOT_PREDICTED
        labels[:, 1, -1], mask[:, 1, -1] = NOT_PREDICTED, 0
        return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}

    def split(self, comparisons: list[Comparison]) -> tuple[list[Comparison], list[Comparison]]:
        """Keep `val_fraction` for validation; equal prompts fall on the same side.

        Raises:
            ValueError: If there are too few comparisons.
        """
        return split_by_content(comparisons, lambda one: repr(one.prompt), self.val_fraction)


class PreferenceData(ComparedAnswers):
    """Comparisons for preference tuning, from local files or the Hugging Face hub.

    A row has a `prompt`, a `chosen` and a `rejected` answer, each a text or a list of messages; without a prompt both
    answers are whole conversations that begin alike. Answers that begin with the messages of the prompt, as in
    UltraFeedback, are taken without them.

    Args:
        dataset: Local file or folder of jsonl or parquet files, a json file with a list, or a hub name.
        tokenizer: A local folder or a hub name, or `bytes`.
        chat_template: `chatml`, a file with a Jinja template, or null for the tokenizer's own.
        template_options: Further variables of the template, for example `enable_thinking: false`.
        date: Day for templates that write today's, so that tokens don't change from day to day.
        prompt_column: Column with the prompt. Null: the answers are whole conversations.
        chosen_column: Column with the better answer.
        rejected_column: Column with the worse answer.
        dataset_config: Configuration of a hub data set.
        split: Split of a hub data set to train on.
        val_split: Split of a hub data set to validate with. Null: `val_fraction` of the comparisons.
        sequence_length: Tokens of a conversation. Longer ones lose the beginning of their prompt, of which half of
            these tokens are kept, and then the end of their answers; how many do is said when the data are read.
        batch_size: Comparisons in a micro-batch of one device, of two conversations each.
        global_batch_size: Comparisons in an optimizer step, accumulation and all devices included. Null: not checked.
        val_fraction: Share of the comparisons kept for validation, chosen by their prompts.
        num_workers: Loader processes.
        seed: Seed for the order of the training comparisons.
        cache_dir: Where `datasets` keeps its files.

    Raises:
        ValueError: If a number is out of range; when the data are read, if a row is no comparison.
    """

    def __init__(
        self,
        dataset: str,
        tokenizer: str,
        chat_template: str | None = None,
        template_options: dict[str, Any] | None = None,
        date: str = "2024-07-26",
        prompt_column: str | None = "prompt",
        chosen_column: str = "chosen",
        rejected_column: str = "rejected",
        dataset_config: str | None = None,
        split: str = "train",
        val_split: str | None = None,
        sequence_length: int = 1024,
        batch_size: int = 1,
        global_batch_size: int | None = None,
        val_fraction: float = 0.05,
        num_workers: int = 2,
        seed: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(
            tokenizer,
            chat_template,
            template_options,
            date,
            sequence_length,
            batch_size,
            global_batch_size,
            val_fraction,
            num_workers,
            seed,
        )
        self.dataset = dataset
        self.columns = {"prompt": prompt_column, "chosen": chosen_column, "rejected": rejected_column}
        self.dataset_config = dataset_config
        self.train_split = split
        self.val_split = val_split
        self.cache_dir = cache_dir
        self.save_hyperparameters()

    @override
    def prepare_data(self) -> None:
        """Download the data in one process."""
        load_documents(self.dataset, self.dataset_config, self.train_split, self.cache_dir)

    @override
    def load_comparisons(self) -> tuple[list[Comparison], list[Comparison]]:
        """Read the columns into memory.

        Raises:
            ValueError: If a column is missing, or a row is no comparison, with its number.
        """
        comparisons = self._read(self.train_split)
        return self.split(comparisons) if self.val_split is None else (comparisons, self._read(self.val_split))

    def _read(self, split: str) -> list[Comparison]:
        rows = load_documents(self.dataset, self.dataset_config, split, self.cache_dir)
        named = {key: column for key, column in self.columns.items() if column is not None}
        for key, column in named.items():
            if column not in rows.column_names:
                without = " Null stands for answers that are whole conversations." if key == "prompt" else ""
                there = ", ".join(rows.column_names)
                raise ValueError(f"`{key}_column={column!r}` is not in the data. Its columns: {there}.{without}")
        read = []
        for number, row in enumerate(rows, 1):
            values = {key: row.get(column) for key, column in named.items()}
            if "prompt" in named and values["prompt"] is None:
                raise ValueError(f"Row {number:,} of `dataset={self.dataset!r}` has no {named['prompt']!r}.")
            try:
                read.append(comparison_of(values.get("prompt"), values["chosen"], values["rejected"]))
            except ValueError as error:
                raise ValueError(f"Row {number:,} of `dataset={self.dataset!r}` can't be used: {error}.") from error
        return read
