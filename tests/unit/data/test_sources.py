import json
import os

import numpy as np
import pytest

from lightning_memfit.data.sources import check_texts, content_hash, load_documents, validation_mask


def hashes(texts):
    return np.array([content_hash(text) for text in texts], np.uint64)


def test_split_follows_content_not_order():
    texts = [f"document {i}" for i in range(100)]
    mask = validation_mask(hashes(texts), 0.1)
    chosen = {text for text, is_val in zip(texts, mask, strict=True) if is_val}
    reversed_mask = validation_mask(hashes(texts[::-1]), 0.1)
    assert len(chosen) == 10
    assert chosen == {text for text, is_val in zip(texts[::-1], reversed_mask, strict=True) if is_val}


def test_equal_documents_stay_together():
    texts = [f"document {i % 20}" for i in range(100)]
    mask = validation_mask(hashes(texts), 0.05)
    train = {text for text, is_val in zip(texts, mask, strict=True) if not is_val}
    val = {text for text, is_val in zip(texts, mask, strict=True) if is_val}
    assert val
    assert not train & val


def test_hash_is_the_same_on_every_machine():
    assert (
        content_hash("import os\n").to_bytes(8, "little").hex() == "56f310887826c0b0"
    )  # printf 'import os\\n' | b2sum -l 64


@pytest.mark.parametrize("texts", [[], ["same", "same"], ["one"]])
def test_what_cannot_be_split_is_refused(texts):
    with pytest.raises(ValueError, match="cannot be split"):
        validation_mask(hashes(texts), 0.5)


@pytest.mark.parametrize("fraction", [0, 1, -0.1])
def test_fraction_out_of_range(fraction):
    with pytest.raises(ValueError, match="val_fraction"):
        validation_mask(hashes(["a", "b"]), fraction)


class Watched:
    """A column that notes when all of it is looked at."""

    def __init__(self, column, noted):
        self._column, self._noted = column, noted

    def __getattr__(self, name):
        return getattr(self._column, name)

    def validate(self, full):
        self._noted.append(full)
        self._column.validate(full=full)


def test_texts_are_looked_at_once(tmp_path, monkeypatch):
    table = pytest.importorskip("datasets.table")
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "memfit"))
    path, looked = tmp_path / "a.jsonl", []
    column = table.Table.column
    monkeypatch.setattr(table.Table, "column", lambda self, name: Watched(column(self, name), looked))

    def check(name="text"):
        documents = load_documents(str(path), None, "train", str(tmp_path / "cache"))
        check_texts(documents, name, "text_column", str(path))
        return len(looked)

    path.write_text("".join(json.dumps({"text": f"one {number}", "more": "b"}) + "\n" for number in range(30)))
    assert [check(), check(), check("more"), check()] == [1, 1, 2, 2]
    with path.open("a") as file:
        file.write(json.dumps({"text": "one more", "more": "b"}) + "\n")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))
    assert [check(), check()] == [3, 3]
