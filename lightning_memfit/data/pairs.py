"""`PairData`: pairs of texts, such as a question and its answer, for encoder-decoder models."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_memfit.data.batched import BatchedSamples, at_least
from lightning_memfit.data.sources import Source, content_hash, validation_mask
from lightning_memfit.data.tokenization import surroundings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NOT_PREDICTED = -100


class TokenizedPairs(Dataset[dict[str, torch.Tensor]]):
    """Pairs tokenized on access and cut or padded to two fixed lengths, so that every batch needs the same memory.

    Items are `input_ids` and `attention_mask`, `(source_length,)`, and `labels`, `(target_length,)`, int64, with -100
    where nothing is predicted. Sources are tokenized as by `tokenizer(text)`, targets as by
    `tokenizer(text_target=text)`, each with all its special tokens, even if it is cut, and with
    the end-of-sequence token.
    """

    def __init__(
        self,
        pairs: list[tuple[str, str]],
        tokenizer: PreTrainedTokenizerBase,
        source_length: int,
        target_length: int,
    ) -> None:
        if tokenizer.pad_token_id is None:
            raise ValueError("The tokenizer has no padding token. Use one of an encoder-decoder model.")
        self.pairs = pairs
        self.tokenizer = tokenizer
        self.source_length = source_length
        self.target_length = target_length
        self._around = {False: surroundings(tokenizer), True: surroundings(tokenizer, is_target=True)}
        for is_target, argument, length in (
            (False, "source_length", source_length),
            (True, "target_length", target_length),
        ):
            special = sum(map(len, self._around[is_target]))
            if length <= special:
                raise ValueError(
                    f"`{argument}={length}` leaves no room for a text: the tokenizer puts {special} special tokens "
                    f"around it. Set it to at least {special + 1}."
                )

    def __len__(self) -> int:
        return len(self.pairs)

    @override
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        source, target = self.pairs[index]
        input_ids, is_source = self._padded(self._encoded(source, False, self.source_length), self.source_length)
        labels, is_label = self._padded(self._encoded(target, True, self.target_length), self.target_length)
        labels[~is_label] = _NOT_PREDICTED
        return {"input_ids": input_ids, "attention_mask": is_source.long(), "labels": labels}

    def _encoded(self, text: str, is_target: bool, length: int) -> list[int]:
        """Return at most so many ids of a text, whole at both ends; an end of sequence within it is left out."""
        before, after = self._around[is_target]
        given = {"text_target" if is_target else "text": text}
        ids = self.tokenizer(**given, add_special_tokens=False, verbose=False)["input_ids"]
        room = length - len(before) - len(after)
        return [*before, *[token for token in ids if token != self.tokenizer.eos_token_id][:room], *after]

    def _padded(self, ids: list[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids, and a mask that is true where they are not padding."""
        padded = torch.full((length,), self.tokenizer.pad_token_id)
        padded[: len(ids)] = torch.tensor(ids)
        return padded, torch.arange(length) < len(ids)


def set_languages(
    tokenizer: PreTrainedTokenizerBase, source_language: str | None, target_language: str | None
) -> PreTrainedTokenizerBase:
    """Set the languages of a tokenizer that marks them (NLLB, mBART, M2M100), and return it."""
    wanted = {"source_language": ("src_lang", source_language), "target_language": ("tgt_lang", target_language)}
    for argument, (attribute, language) in wanted.items():
        if not hasattr(tokenizer, attribute):
            if language is not None:
                raise ValueError(f"`{argument}={language!r}`: the tokenizer has no marks for languages. Leave it out.")
        elif language is not None:
            try:
                setattr(tokenizer, attribute, language)
                before, after = surroundings(tokenizer, is_target=argument == "target_language")
                marks = {*before, *after} - {tokenizer.eos_token_id}
                is_known = marks.isdisjoint({None, tokenizer.unk_token_id})
            except (KeyError, ValueError, TypeError):
                is_known = False
            if not is_known:
                raise ValueError(
                    f"`{argument}={language!r}` is no language of the tokenizer. Name it as its model's card does."
                )
        elif getattr(tokenizer, attribute) is None:
            raise ValueError(
                f"The tokenizer marks languages, and `{argument}` is not set. Name it as its model's card does "
                "(`deu_Latn` for NLLB, `de_DE` for mBART)."
            )
    return tokenizer


class PairedText(BatchedSamples):
    """Pairs of texts for encoder-decoder models. Subclasses provide the pairs.

    Args:
        tokenizer: `bytes`, a local folder or a hub name.
        source_length: Tokens of a source; longer ones are cut, shorter ones padded.
        target_length: Tokens of a target.
        source_language: What a tokenizer that marks languages calls that of the sources: `eng_Latn` (NLLB), `en_XX`
            (mBART), `en` (M2M100). Null: the tokenizer's own setting.
        target_language: The same for the targets.
        batching: Arguments of `BatchedSamples`; a sample is a pair. Workers tokenize, too.

    Raises:
        ValueError: If a number is out of range, or the tokenizer cannot be read.
    """

    def __init__(
        self,
        tokenizer: str,
        source_length: int = 128,
        target_length: int = 128,
        source_language: str | None = None,
        target_language: str | None = None,
        **batching: Any,
    ) -> None:
        super().__init__(tokenizer=tokenizer, **batching)
        at_least(2, source_length=source_length, target_length=target_length)
        self.source_length = source_length
        self.target_length = target_length
        self._languages = source_language, target_language

    @abstractmethod
    def load_pairs(self) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """Return source and target texts for training and validation."""

    @override
    def make_samples(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """Make data sets that tokenize the pairs on access."""
        tokenizer = set_languages(self.tokenizer, *self._languages)
        train, val = (
            TokenizedPairs(pairs, tokenizer, self.source_length, self.target_length) for pairs in self.load_pairs()
        )
        return train, val

    def example_batch(self, vocab_size: int | None = None) -> dict[str, torch.Tensor]:
        """Return a training batch of the right shapes without reading data or tokenizer; see `PackedText`.

        The first pair has padding, as models may leave out a mask without any.
        """
        input_ids = self.example_tokens(self.source_length, vocab_size)
        attention_mask, labels = torch.ones_like(input_ids), self.example_tokens(self.target_length, vocab_size)
        attention_mask[0, -1], labels[0, -1] = 0, _NOT_PREDICTED
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}

    def divide(self, pairs: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """Keep `val_fraction` for validation; equal sources fall on the same side."""
        hashes = np.array([content_hash(source) for source, _ in pairs], np.uint64)
        sides: tuple[list[tuple[str, str]], list[tuple[str, str]]] = ([], [])
        for pair, is_val in zip(pairs, validation_mask(hashes, self.val_fraction).tolist(), strict=True):
            sides[is_val].append(pair)
        return sides


class PairData(PairedText):
    """Pairs from two columns of one data set, read from local files or the Hugging Face hub.

    Args:
        dataset: Local file or folder of jsonl or parquet files, or a hub name.
        tokenizer: A local folder or a hub name, or `bytes`.
        source_column: Column with the text that the encoder reads.
        target_column: Column with the text that the decoder learns to write.
        dataset_config: Configuration of a hub data set.
        split: Split of a hub data set to train on.
        val_split: Split of a hub data set to validate with. Null: `val_fraction` of the pairs.
        cache_dir: Where `datasets` keeps its files.
        paired: Further arguments of `PairedText` and `BatchedSamples`.

    Raises:
        ModuleNotFoundError: When the data are read, if `datasets` isn't installed.
        ValueError: If a number is out of range, or data or tokenizer cannot be read.
    """

    def __init__(
        self,
        dataset: str,
        tokenizer: str,
        source_column: str = "source",
        target_column: str = "target",
        dataset_config: str | None = None,
        split: str = "train",
        val_split: str | None = None,
        cache_dir: str | None = None,
        **paired: Any,
    ) -> None:
        super().__init__(tokenizer, **paired)
        self.source = Source(dataset, dataset_config, split, val_split, cache_dir=cache_dir)
        self._columns = {"source_column": source_column, "target_column": target_column}

    @override
    def prepare_data(self) -> None:
        """Download the data in one process."""
        self.load_pairs()

    @override
    def load_pairs(self) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """Read both columns into memory."""
        pairs = self._read(self.source.split)
        return self.divide(pairs) if self.source.val_split is None else (pairs, self._read(self.source.val_split))

    def _read(self, split: str) -> list[tuple[str, str]]:
        rows, columns = self.source.rows(split), []
        for argument, name in self._columns.items():
            self.source.check_texts(rows, name, argument)
            columns.append(list(rows[name]))
        return list(zip(*columns, strict=True))
