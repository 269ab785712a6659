"""`ChatData`: conversations for instruction tuning, with the loss on the answers alone.

Conversations are packed whole into blocks (`ConversationBlocks`), in which none sees another: position ids start anew
with each, from which transformers makes a block-diagonal attention mask. Whether it does so for the user's model, with
its kind of attention, is tried before the first batch (`refuse_mixing`).
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_memfit.data.batched import BatchedSamples, at_least
from lightning_memfit.data.chat_template import ChatTemplate
from lightning_memfit.data.sources import RowEncoder, Source, check_column, content_hash
from lightning_memfit.data.text import MappedTokens
from lightning_memfit.memory.modes import evaluating

if TYPE_CHECKING:
    import datasets

NOT_PREDICTED = -100

# A conversation's tokens lie in one flat array with those of all others: an id, with two flags above it.
_ANSWER = 1 << 31
_FIRST = 1 << 30
_ID = _FIRST - 1

_TOOLS = "tools"
_CONVERSIONS = {
    "conversations": """{"messages": [{"role": {"human": "user", "gpt": "assistant"}.get(m["from"], m["from"]), """
    """"content": m["value"]} for m in r["conversations"]]}""",
    "instruction": """{"messages": [{"role": "user", "content": (r["instruction"] + "\\n" + (r.get("input") or ""))"""
    """.strip()}, {"role": "assistant", "content": r["output"]}]}""",
}
"""How rows of ShareGPT and of Alpaca, known by a column, become messages."""

# --- from messages to tokens ------------------------------------------------------------------------------------------


class ChatEncoder(RowEncoder):
    """Rows have a conversation, a list of messages, and perhaps the tools that it uses; their tokens have flags."""

    dtype = np.dtype(np.uint32)

    def __init__(self, column: str, template: ChatTemplate) -> None:
        self.column, self.template = column, template

    @property
    @override
    def identity(self) -> list[str]:
        return [self.column, self.template.fingerprint]

    @override
    def check(self, rows: datasets.Dataset, source: Source) -> None:
        """Refuse data without the column; rows of ShareGPT and Alpaca with the line that converts them."""
        known = next((name for name in _CONVERSIONS if name in rows.column_names), None)
        if self.column not in rows.column_names and known is not None:
            raise ValueError(
                f"`messages_column={self.column!r}` is not in the data, which have {known!r}. Convert them once: "
                f"datasets.load_dataset('json', data_files={source.dataset!r}, split='train').map(lambda r: "
                f"{_CONVERSIONS[known]}).select_columns(['messages']).to_json('chats.jsonl')"
            )
        check_column(rows, self.column, "messages_column")

    @override
    def encode(self, rows: Sequence[dict[str, Any]], first: int) -> list[tuple[np.ndarray, int]]:
        return [self._encode(row, number) for number, row in enumerate(rows, first + 1)]

    def _encode(self, row: Mapping[str, Any], number: int) -> tuple[np.ndarray, int]:
        found = row.get(self.column)
        try:
            messages = [without_gaps(one) for one in found or ()]
            tools = row.get(_TOOLS) or None
            tools = without_gaps(json.loads(tools) if isinstance(tools, str) else tools)
            ids, is_answer = self.template.encode(messages, tools)
        except (ValueError, TypeError) as error:
            text = repr(found)
            text = text if len(text) <= 80 else f"{text[:77]}..."
            raise ValueError(
                f"`{self.column}` of conversation {number:,}, {text}, can't be used: {error}. "
                f'Wanted: a list of messages such as {{"role": "user", "content": "Hello"}}.'
            ) from error
        codes = ids.astype(np.uint32)
        codes[is_answer] |= _ANSWER
        codes[:1] |= _FIRST
        return codes, content_hash(json.dumps(messages, sort_keys=True))


def without_gaps(value: Any) -> Any:
    """Leave out the keys, at any depth, that a reader of tables fills with None as only other rows have them."""
    if isinstance(value, Mapping):
        return {key: without_gaps(inner) for key, inner in value.items() if inner is not None}
    return [without_gaps(inner) for inner in value] if isinstance(value, list) else value


# --- blocks -----------------------------------------------------------------------------------------------------------


class ConversationBlocks(MappedTokens):
    """Blocks of `sequence_length` tokens with whole conversations, and padding behind the last one.

    Items are `input_ids` and `labels`, `(sequence_length,)` int64; labels are -100 but on answers. With packing
    `position_ids` of the same shape start anew with every conversation, and with the padding. Longer conversations are
    cut; what has no answer then is left out. `tokens` are flagged ones of `ChatEncoder`.
    """

    def __init__(
        self, tokens: np.ndarray, sequence_length: int, pad: int, packing: bool = True, name: str = "training"
    ) -> None:
        super().__init__(tokens)
        self.sequence_length = sequence_length
        self.pad = pad
        self.packing = packing
        starts = np.flatnonzero(tokens & np.uint32(_FIRST))
        lengths = np.diff(starts, append=len(tokens))
        used = np.minimum(lengths, sequence_length)
        answers = np.array(
            [
                np.count_nonzero(tokens[start + 1 : start + length] & np.uint32(_ANSWER))
                for start, length in zip(starts.tolist(), used.tolist(), strict=True)
            ],
            np.int64,
        )
        kept = answers > 0
        self.num_conversations = int(kept.sum())
        if not self.num_conversations:
            raise ValueError(
                f"None of the {len(starts)} {name} conversations has an answer within `sequence_length="
                f"{sequence_length}`. Give a longer one, or other conversations."
            )
        self.num_cut = int((kept & (lengths > sequence_length)).sum())
        self.num_left_out = len(starts) - self.num_conversations
        self.num_answer_tokens, self.num_tokens = int(answers.sum()), int(used[kept].sum())
        self._starts, self._lengths = starts[kept], used[kept]
        self._order, self._bounds = _pack(self._lengths, sequence_length if packing else 0)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @override
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"Block {index} of {len(self)}.")
        conversations = self._order[self._bounds[index] : self._bounds[index + 1]]
        codes, positions = [], []
        for conversation in conversations:
            start, length = self._starts[conversation], self._lengths[conversation]
            codes.append(np.asarray(self.tokens[start : start + length], np.int64))
            positions.append(np.arange(length))
        rest = self.sequence_length - sum(map(len, codes))
        if rest:
            codes.append(np.full(rest, self.pad))
            positions.append(np.arange(rest))
        block = np.concatenate(codes)
        # Nothing stands before a conversation's first token from which it could be predicted.
        is_predicted = (block & _ANSWER > 0) & (block & _FIRST == 0)
        ids = torch.from_numpy(block & _ID)
        labels = torch.where(torch.from_numpy(is_predicted), ids, NOT_PREDICTED)
        sample = {"input_ids": ids, "labels": labels}
        if self.packing:
            sample["position_ids"] = torch.from_numpy(np.concatenate(positions))
        return sample

    def describe(self) -> str:
        """Say in one line how many there are, how full the blocks are, and what is missing."""
        size = len(self) * self.sequence_length
        parts = [
            f"{self.num_conversations:,} conversations in {len(self):,} blocks of {self.sequence_length} tokens",
            f"{self.num_tokens / size:.0%} filled, {self.num_answer_tokens / size:.0%} predicted",
        ]
        if self.num_cut:
            parts.append(f"{self.num_cut:,} cut to a block's length")
        if self.num_left_out:
            parts.append(f"{self.num_left_out:,} without an answer in it left out")
        return ", ".join(parts)


def _pack(lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack by best fit, longest first: into the fullest block that has room, else into a new one."""
    if not size:
        return np.arange(len(lengths)), np.arange(len(lengths) + 1)
    blocks: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(size + 1)]
    rooms = 0  # bit n: some block has room for n more tokens
    for conversation in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[conversation])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            block = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, block = size, len(blocks)
            blocks.append([])
        blocks[block].append(conversation)
        with_room[room - length].append(block)
        rooms |= 1 << (room - length)
    bounds = np.cumsum([0, *map(len, blocks)])
    return np.concatenate([np.array(block) for block in blocks]), bounds


# --- whether a model keeps packed conversations apart -----------------------------------------------------------------

# Which attention does so depends on the model, on transformers' version and on the size of the micro-batch (its flash
# attention reads packing off position ids for one sample only), so that it is tried on the model itself.
_LENGTH = 8


def refuse_mixing(module: nn.Module, like: torch.Tensor) -> None:
    """Try a pair of short conversations: if the first one changes, the second one's logits must not.

    Kernels that group the tokens of several samples, as those of experts do, round by what else is there. That rounding
    is measured with another sample of the batch; conversations count as mixed if the effect is ten times larger.

    The model is called as `module(input_ids=..., position_ids=...)` in evaluation mode, without gradients or
    compilation; nothing of it changes.
    """
    ids, num_ids = torch.arange(_LENGTH, device=like.device, dtype=like.dtype), max(2, int(like.max()) + 1)
    first, other, second = ids % num_ids, torch.full_like(ids, num_ids - 1), (3 * ids + 1) % num_ids
    others = [other, torch.zeros_like(ids), first.flip(0)]

    def moved(beginnings: list[torch.Tensor], changed: list[torch.Tensor]) -> float:
        """Return by how much the first sample's second conversation changes, beyond the last digit of its logits."""
        before, after = (
            _logits(module, [torch.cat([one, second]) for one in begin]) for begin in (beginnings, changed)
        )
        change, last_digit = (before - after).abs().max(), torch.finfo(before.dtype).eps * before.abs().max()
        return float(change) if change > last_digit else 0.0

    with evaluating(module), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        size = min(2, len(like))
        effect = moved([first] * size, [other, first][:size])
        rounding = max(moved([first, first], [first, one]) for one in others)  # in any case: ranks run alike
    if effect > 10 * rounding:
        attention = getattr(getattr(getattr(module, "network", module), "config", None), "_attn_implementation", None)
        name = type(getattr(module, "network", module)).__name__
        raise ValueError(
            f"`packing=True`: {name}{f' with attention {attention!r}' if attention else ''} lets packed conversations "
            "see each other: the second of two changes with the first. Set `data.packing: false`, which gives every "
            "conversation a block of its own, or `model.attn_implementation: sdpa` if it is another one; flash "
            "attention keeps them apart with `data.batch_size: 1`."
        )


def _logits(module: nn.Module, rows: list[torch.Tensor]) -> torch.Tensor:
    """Return logits of the second conversation of the first sample, `(length, vocabulary)`."""
    ids = torch.stack(rows)
    positions = torch.arange(_LENGTH, device=ids.device).repeat(2).expand(len(ids), -1).contiguous()
    try:
        output: Any = module(input_ids=ids, position_ids=positions)
        logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    except (TypeError, NotImplementedError, AttributeError) as error:
        raise ValueError(
            f"`packing=True`: whether {type(module).__name__} keeps packed conversations apart can't be tried "
            f"({error}). Give it a `forward(input_ids, position_ids)` that returns logits, or set `packing: false`."
        ) from error
    return logits[0, _LENGTH:]


# --- the data modules -------------------------------------------------------------------------------------------------


class PackedChats(BatchedSamples):
    """Conversations in blocks, for causal language models. Subclasses provide the tokens.

    Args:
        tokenizer: `bytes`, a local folder or a hub name.
        chat_template: `chatml`, a file with a Jinja template, or null for the tokenizer's own.
        template_options: Further variables of the template, for example `enable_thinking: false`.
        sequence_length: Tokens in a block; longer conversations are cut.
        packing: Put as many conversations into a block as fit; otherwise one.
        batching: Arguments of `BatchedSamples`; a sample is a block.

    Raises:
        ValueError: If a number is out of range, or the tokenizer or its template can't be used; before the first batch,
            if the model lets packed conversations see each other.
    """

    def __init__(
        self,
        tokenizer: str,
        chat_template: str | None = None,
        template_options: dict[str, Any] | None = None,
        sequence_length: int = 2048,
        packing: bool = True,
        **batching: Any,
    ) -> None:
        super().__init__(tokenizer=tokenizer, **batching)
        at_least(2, sequence_length=sequence_length)
        self.sequence_length = sequence_length
        self.packing = packing
        self._template = chat_template, template_options
        self._is_tried = False

    messages_column = "messages"

    @abstractmethod
    def load_tokens(self, encoder: ChatEncoder) -> tuple[np.ndarray, np.ndarray]:
        """Return flagged tokens for training and validation, each `(tokens,)`, by the encoder."""

    def make_encoder(self) -> ChatEncoder:
        """Return what turns rows into tokens."""
        return ChatEncoder(self.messages_column, ChatTemplate(self.tokenizer, *self._template))

    @override
    def make_samples(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """Pack the conversations."""
        pad = self.tokenizer.pad_token_id
        pad = int(self.tokenizer.eos_token_id if pad is None else pad)
        train, val = (
            ConversationBlocks(tokens, self.sequence_length, pad, self.packing, name)
            for tokens, name in zip(self.load_tokens(self.make_encoder()), ("training", "validation"), strict=True)
        )
        rank_zero_info(f"{type(self).__name__}: {train.describe()}")
        return train, val

    @override
    def setup(self, stage: str) -> None:
        """Pack the conversations, and let the run that begins try its model; see `on_after_batch_transfer`."""
        super().setup(stage)
        self._is_tried = False

    def largest_id(self) -> int | None:
        """Return the largest token id that occurs; None before `setup`."""
        made = [blocks for blocks in (self._train, self._val) if isinstance(blocks, ConversationBlocks)]
        return max(max(blocks.pad, blocks.largest(_ID)) for blocks in made) if made else None

    def example_batch(self, vocab_size: int | None = None) -> dict[str, torch.Tensor]:
        """Return a training batch of the right shapes without reading data or tokenizer; see `PackedText`.

        With packing every block has two conversations, so that attention gets the mask that it gets in training.
        """
        tokens = self.example_tokens(self.sequence_length, vocab_size)
        labels, half = tokens.clone(), max(1, self.sequence_length // 2)
        labels[:, :half] = NOT_PREDICTED
        batch = {"input_ids": tokens, "labels": labels}
        if self.packing:
            positions = torch.arange(self.sequence_length)
            positions[half:] -= half
            batch["position_ids"] = positions.expand(self.batch_size, -1).clone()
        return batch

    @override
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Before the first batch of a run, try whether its model keeps packed conversations apart."""
        module = getattr(self.trainer, "lightning_module", None)
        if self.packing and not self._is_tried and isinstance(module, torch.nn.Module):
            self._is_tried = True
            precision = self.trainer.precision_plugin  # type: ignore[union-attr]
            with precision.forward_context():
                refuse_mixing(module, batch["input_ids"])
        return batch


class ChatData(PackedChats):
    """Conversations for instruction tuning, tokenized once by a chat template, with the loss on the answers alone.

    A row is a list of messages, `{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}, ...]}`,
    as OpenAI's format has it: answers with `weight: 0` are not learned, answers may call tools (`tool_calls`), and a
    column `tools` has their descriptions. Conversations are split into training and validation by their content, and
    packed into blocks in which none sees another.

    Args:
        dataset: Local file or folder of jsonl or parquet files, a json file with a list, or a hub name.
        tokenizer: A local folder or a hub name, or `bytes`.
        chat_template: `chatml`, a file with a Jinja template, or null for the tokenizer's own.
        messages_column: Column with the messages.
        dataset_config: Configuration of a hub data set.
        split: Split of a hub data set to train on.
        val_split: Split of a hub data set to validate with. Null: `val_fraction` of the conversations.
        batch_size: Blocks in a micro-batch of one device.
        tokenize_workers: Processes that tokenize.
        cache_dir: Folder for tokenized data. Null: the cache of `datasets`.
        packed: Further arguments of `PackedChats` and `BatchedSamples`.

    Raises:
        ModuleNotFoundError: When the data are read, if `datasets` isn't installed.
        ValueError: If a number is out of range; when the data are read, if a row is no conversation or the template
            doesn't show which tokens are answers; before the first batch, if the model lets packed conversations see
            each other.
    """

    def __init__(
        self,
        dataset: str,
        tokenizer: str,
        chat_template: str | None = None,
        messages_column: str = "messages",
        dataset_config: str | None = None,
        split: str = "train",
        val_split: str | None = None,
        batch_size: int = 1,
        tokenize_workers: int = 1,
        cache_dir: str | None = None,
        **packed: Any,
    ) -> None:
        super().__init__(tokenizer, chat_template, batch_size=batch_size, **packed)
        self.messages_column = messages_column
        self.source = Source(dataset, dataset_config, split, val_split, self.val_fraction, tokenize_workers, cache_dir)

    @override
    def prepare_data(self) -> None:
        """Download, tokenize and write the token files in one process."""
        self.load_tokens(self.make_encoder())

    @override
    def load_tokens(self, encoder: ChatEncoder) -> tuple[np.ndarray, np.ndarray]:
        """Map the token files, and write those that are missing."""
        train, val = self.source.tokens(encoder)
        if val is None:
            raise ValueError(
                f"`dataset={self.source.dataset!r}` has one conversation, which can't be split into training and "
                "validation. Give more."
            )
        return train, val
