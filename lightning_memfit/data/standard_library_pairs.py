"""`StandardLibraryPairs`: functions of Python's standard library, each with the first line of its documentation."""

from __future__ import annotations

import ast
import warnings

from lightning_memfit.data.pairs import PairedText
from lightning_memfit.data.standard_library import read_standard_library
from lightning_memfit.data.tokenization import BYTES


class StandardLibraryPairs(PairedText):
    """What a function says of itself, from its code: pairs that every machine has, without network or files.

    Args:
        tokenizer: `bytes`, a local folder or a hub name.
        source_length: Tokens of a function; longer ones are cut, shorter ones padded.
        target_length: Tokens of a line of documentation.
        batch_size: Pairs in a micro-batch of one device.
        global_batch_size: Pairs in an optimizer step, accumulation and all devices included. Null: not checked.
        val_fraction: Share of the pairs kept for validation, chosen by their sources.
        num_workers: Loader processes, which tokenize too.
        seed: Of the order of the training pairs.
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
        if max_files is not None and max_files < 1:
            raise ValueError(f"`max_files={max_files}` must be at least 1.")
        self.max_files = max_files
        self.save_hyperparameters()

    def load_pairs(self) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """Parse the files; documentation is left out of the code."""
        texts = read_standard_library()[: self.max_files]
        return self.split([pair for text in texts for pair in documented_functions(text)])


def documented_functions(text: str) -> list[tuple[str, str]]:
    """Code without documentation, and the documentation's first line, of every function that has one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes in old modules
        tree = ast.parse(text)
    pairs = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (documentation := ast.get_docstring(node)):
            node.body = node.body[1:] or [ast.Pass()]
            pairs.append((ast.unparse(node), documentation.splitlines()[0]))
    return pairs
