"""Real text that every machine has: the source files of Python's standard library.

`StandardLibraryText` packs the files for causal language models. `StandardLibraryPairs` pairs each documented function
with the first line of its documentation, for encoder-decoder models, and `StandardLibraryChats` asks for that line.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import tokenize
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_memfit.data.chat_template import CHATML
from lightning_memfit.data.chats import ChatEncoder, PackedChats
from lightning_memfit.data.packed import PackedText, join
from lightning_memfit.data.pairs import PairedText
from lightning_memfit.data.sources import content_hash, validation_mask
from lightning_memfit.data.tokenization import BYTES, encode

# Folders that are left out: installed packages, and tests, some of which are deliberately broken files.
_EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class StandardLibraryText(PackedText):
    """Source files of the running Python's standard library: a small corpus that needs no network or files.

    Files are sorted by name and split by content; each is one document. The text depends on the Python version; its
    hash is printed.

    Args:
        tokenizer: `bytes`, a local folder or a hub name.
        sequence_length: Tokens in a block.
        batch_size: Blocks in a micro-batch of one device.
        global_batch_size: Blocks in an optimizer step, accumulation and all devices included. Null: not checked.
        val_fraction: Share of the files kept for validation, chosen by their content.
        num_workers: Loader processes.
        seed: Seed for the order of the training blocks.
        max_files: Take only this many files, those with the smallest hashes. Null: all of them.

    Raises:
        ValueError: If a number is out of range, or the tokenizer cannot be read.
    """

    def __init__(
        self,
        tokenizer: str = BYTES,
        sequence_length: int = 256,
        batch_size: int = 8,
        global_batch_size: int | None = None,
        val_fraction: float = 0.05,
        num_workers: int = 1,
        seed: int = 0,
        max_files: int | None = None,
    ) -> None:
        super().__init__(tokenizer, sequence_length, batch_size, global_batch_size, val_fraction, num_workers, seed)
        if max_files is not None and max_files < 2:
            raise ValueError(f"`max_files={max_files}` must be at least 2: one to train on, one to validate with.")
        self.max_files = max_files
        self.save_hyperparameters()

    @override
    def load_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Read and encode the files in memory, at 2 bytes per token."""
        texts = read_standard_library()
        hashes = np.array([content_hash(text) for text in texts], np.uint64)
        if self.max_files is not None and self.max_files < len(texts):
            kept = np.sort(np.argsort(hashes, kind="stable")[: self.max_files])
            texts, hashes = [texts[i] for i in kept], hashes[kept]
        mask = validation_mask(hashes, self.val_fraction)
        documents = encode(self.tokenizer, texts)
        train = join([document for document, is_val in zip(documents, mask, strict=True) if not is_val])
        val = join([document for document, is_val in zip(documents, mask, strict=True) if is_val])
        digest = hashlib.blake2b(hashes.tobytes(), digest_size=6).hexdigest()
        rank_zero_info(
            f"Standard library text {digest}: {len(texts)} files, {len(train):,} training and {len(val):,} "
            "validation tokens"
        )
        return train, val


def _checked_max_files(max_files: int | None) -> int | None:
    if max_files is not None and max_files < 1:
        raise ValueError(f"`max_files={max_files}` must be at least 1.")
    return max_files


def read_standard_library() -> list[str]:
    """Return the text of every module of the standard library, sorted by path and without empty files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if not _EXCLUDED.intersection(path.relative_to(root).parts):
            with tokenize.open(path) as file:  # honours the encoding a source file declares
                texts.append(file.read())
    return [text for text in texts if text]


# --- pairs of a function and its documentation ------------------------------------------------------------------------


class StandardLibraryPairs(PairedText):
    """Pairs of a function's code and the first line of its documentation, which need no network and no files.

    Args:
        tokenizer: `bytes`, a local folder or a hub name.
        source_length: Tokens of a function; longer ones are cut, shorter ones padded.
        target_length: Tokens of a line of documentation; longer ones are cut, shorter ones padded.
        batch_size: Pairs in a micro-batch of one device.
        global_batch_size: Pairs in an optimizer step, accumulation and all devices included. Null: not checked.
        val_fraction: Share of the pairs kept for validation, chosen by their sources.
        num_workers: Loader processes, which tokenize too.
        seed: Seed for the order of the training pairs.
        max_files: Read only this many files, in the order of their names. Null: all of them.

    Raises:
        ValueError: If a number is out of range, or the tokenizer cannot be read.
    """

    def __init__(
        self,
        tokenizer: str = BYTES,
        source_length: int = 128,
        target_length: int = 64,
        batch_size: int = 8,
        global_batch_size: int | None = None,
        val_fraction: float = 0.05,
        num_workers: int = 2,
        seed: int = 0,
        max_files: int | None = None,
    ) -> None:
        super().__init__(
            tokenizer, source_length, target_length, batch_size, global_batch_size, val_fraction, num_workers, seed
        )
        self.max_files = _checked_max_files(max_files)
        self.save_hyperparameters()

    @override
    def load_pairs(self) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """Parse the files and split the pairs; the code is stripped of its documentation."""
        texts = read_standard_library()[: self.max_files]
        return self.split([pair for text in texts for pair in documented_functions(text)])


def documented_functions(text: str) -> list[tuple[str, str]]:
    """Return code without documentation, and the documentation's first line, for every documented function."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old modules have invalid escapes
        tree = ast.parse(text)
    pairs = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (documentation := ast.get_docstring(node)):
            node.body = node.body[1:] or [ast.Pass()]
            pairs.append((ast.unparse(node), documentation.splitlines()[0]))
    return pairs


# --- chats about a module's functions ---------------------------------------------------------------------------------


class StandardLibraryChats(PackedChats):
    """Chats about the functions of a file: what one does, and what another does. They need no network and no files.

    Args:
        tokenizer: `bytes`, a local folder or a hub name.
        chat_template: `chatml`, a file with a Jinja template, or null for the tokenizer's own.
        template_options: Further variables of the template.
        date: Day for templates that write today's.
        sequence_length: Tokens in a block; longer chats are cut.
        batch_size: Blocks in a micro-batch of one device.
        global_batch_size: Blocks in an optimizer step, accumulation and all devices included. Null: not checked.
        packing: Put as many chats into a block as fit; otherwise one.
        val_fraction: Share of the chats kept for validation, chosen by their content.
        num_workers: Loader processes.
        seed: Seed for the order of the training blocks.
        max_files: Read only this many files, in the order of their names. Null: all of them.

    Raises:
        ValueError: If a number is out of range, or the tokenizer or its template can't be used.
    """

    def __init__(
        self,
        tokenizer: str = BYTES,
        chat_template: str | None = CHATML,
        template_options: dict[str, Any] | None = None,
        date: str = "2024-07-26",
        sequence_length: int = 512,
        batch_size: int = 8,
        global_batch_size: int | None = None,
        packing: bool = True,
        val_fraction: float = 0.05,
        num_workers: int = 1,
        seed: int = 0,
        max_files: int | None = None,
    ) -> None:
        super().__init__(
            tokenizer,
            chat_template,
            template_options,
            date,
            sequence_length,
            batch_size,
            global_batch_size,
            packing,
            val_fraction,
            num_workers,
            seed,
        )
        self.max_files = _checked_max_files(max_files)
        self.save_hyperparameters()

    @override
    def load_tokens(self, encoder: ChatEncoder) -> tuple[np.ndarray, np.ndarray]:
        """Make the chats in memory, and split them."""
        texts = read_standard_library()[: self.max_files]
        encoded = encoder.encode([chat for text in texts for chat in chats_about(text)], 0)
        hashes = np.array([value for _, value in encoded], np.uint64)
        mask = validation_mask(hashes, self.val_fraction)
        train, val = (
            join([tokens for (tokens, _), is_val in zip(encoded, mask, strict=True) if is_val == side])
            for side in (False, True)
        )
        return train, val


def chats_about(text: str) -> list[list[dict[str, str]]]:
    """Return chats of one or two questions and answers about the documented functions of a file."""
    pairs = documented_functions(text)
    chats = []
    for start in range(0, len(pairs), 2):
        chat = []
        for code, line in pairs[start : start + 2]:
            head = next(part for part in code.splitlines() if part.startswith("def "))
            chat += [{"role": "user", "content": f"What does {head[4:-1]} do?"}, {"role": "assistant", "content": line}]
        chats.append(chat)
    return chats
