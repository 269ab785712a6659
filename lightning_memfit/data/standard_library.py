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

from lightning_memfit.data.batched import at_least
from lightning_memfit.data.chat_template import CHATML
from lightning_memfit.data.chats import ChatEncoder, PackedChats
from lightning_memfit.data.pairs import PairedText
from lightning_memfit.data.sources import content_hash, validation_mask
from lightning_memfit.data.text import PackedText
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
        num_workers: Loader processes.
        max_files: Take only this many files, those with the smallest hashes. Null: all of them.
        batching: Further arguments of `BatchedSamples`.

    Raises:
        ValueError: If a number is out of range, or the tokenizer cannot be read.
    """

    def __init__(
        self,
        tokenizer: str = BYTES,
        sequence_length: int = 256,
        num_workers: int = 1,
        max_files: int | None = None,
        **batching: Any,
    ) -> None:
        super().__init__(tokenizer, sequence_length, num_workers=num_workers, **batching)
        at_least(2, max_files=max_files)  # one to train on, one to validate with
        self.max_files = max_files

    @override
    def load_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Read and encode the files in memory, at 2 bytes per token."""
        texts = read_standard_library()
        hashes = np.array([content_hash(text) for text in texts], np.uint64)
        if self.max_files is not None and self.max_files < len(texts):
            kept = np.sort(np.argsort(hashes, kind="stable")[: self.max_files])
            texts, hashes = [texts[i] for i in kept], hashes[kept]
        train, val = _joined(list(zip(encode(self.tokenizer, texts), hashes, strict=True)), self.val_fraction)
        digest = hashlib.blake2b(hashes.tobytes(), digest_size=6).hexdigest()
        rank_zero_info(
            f"Standard library text {digest}: {len(texts)} files, {len(train):,} training and {len(val):,} "
            "validation tokens"
        )
        return train, val


class StandardLibraryPairs(PairedText):
    """Pairs of a function's code and the first line of its documentation, which need no network and no files.

    Args:
        tokenizer: `bytes`, a local folder or a hub name.
        target_length: Tokens of a line of documentation; longer ones are cut, shorter ones padded.
        max_files: Read only this many files, in the order of their names. Null: all of them.
        paired: Further arguments of `PairedText` and `BatchedSamples`.

    Raises:
        ValueError: If a number is out of range, or the tokenizer cannot be read.
    """

    def __init__(
        self, tokenizer: str = BYTES, target_length: int = 64, max_files: int | None = None, **paired: Any
    ) -> None:
        super().__init__(tokenizer, target_length=target_length, **paired)
        at_least(1, max_files=max_files)
        self.max_files = max_files

    @override
    def load_pairs(self) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """Parse the files and split the pairs; the code is stripped of its documentation."""
        texts = read_standard_library()[: self.max_files]
        return self.divide([pair for text in texts for pair in documented_functions(text)])


class StandardLibraryChats(PackedChats):
    """Chats about the functions of a file: what one does, and what another does. They need no network and no files.

    Args:
        tokenizer: `bytes`, a local folder or a hub name.
        chat_template: `chatml`, a file with a Jinja template, or null for the tokenizer's own.
        sequence_length: Tokens in a block; longer chats are cut.
        num_workers: Loader processes.
        max_files: Read only this many files, in the order of their names. Null: all of them.
        packed: Further arguments of `PackedChats` and `BatchedSamples`.

    Raises:
        ValueError: If a number is out of range, or the tokenizer or its template can't be used.
    """

    def __init__(
        self,
        tokenizer: str = BYTES,
        chat_template: str | None = CHATML,
        sequence_length: int = 512,
        num_workers: int = 1,
        max_files: int | None = None,
        **packed: Any,
    ) -> None:
        super().__init__(tokenizer, chat_template, sequence_length=sequence_length, num_workers=num_workers, **packed)
        at_least(1, max_files=max_files)
        self.max_files = max_files

    @override
    def load_tokens(self, encoder: ChatEncoder) -> tuple[np.ndarray, np.ndarray]:
        """Make the chats in memory, and split them."""
        chats = [
            {encoder.column: chat} for text in read_standard_library()[: self.max_files] for chat in chats_about(text)
        ]
        return _joined(encoder.encode(chats, 0), self.val_fraction)


def _joined(encoded: list[tuple[np.ndarray, int]], val_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Split tokens by the hashes beside them, and join those of each side."""
    mask = validation_mask(np.array([value for _, value in encoded], np.uint64), val_fraction)
    train, val = (
        np.concatenate([tokens for (tokens, _), is_val in zip(encoded, mask, strict=True) if is_val == side])
        for side in (False, True)
    )
    return train, val


def read_standard_library() -> list[str]:
    """Return the text of every module of the standard library, sorted by path and without empty files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if not _EXCLUDED.intersection(path.relative_to(root).parts):
            with tokenize.open(path) as file:  # honours the encoding a source file declares
                texts.append(file.read())
    return [text for text in texts if text]


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
