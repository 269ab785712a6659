import json
import os
import tracemalloc
import warnings
from dataclasses import replace

import numpy as np
import pytest

from lightning_memfit.data import PairData, TextData, sources
from lightning_memfit.data.sources import (
    PlainDocuments,
    check_texts,
    content_hash,
    files_below,
    load_documents,
    local_files,
    validation_mask,
)
from lightning_memfit.device.host import probe_host
from lightning_memfit.memory import GIB


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


@pytest.fixture
def plain(tmp_path, monkeypatch):
    """Read files as where `datasets` isn't installed, with so much host memory free."""
    monkeypatch.setattr(sources, "is_installed", lambda package: package != "datasets")
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": f"line {number} " * 100}) + "\n" for number in range(2000)))

    def with_free(available_bytes):
        state = replace(probe_host(), available_bytes=available_bytes)
        monkeypatch.setattr(sources, "probe_host", lambda: state)
        return lines

    return with_free


def tokens_of(path):
    return TextData(str(path), "bytes", sequence_length=16, num_workers=0).load_tokens()


def test_rows_are_read_one_at_a_time(plain):
    path = plain(GIB)
    size = path.stat().st_size
    tracemalloc.start()
    documents = load_documents(str(path), None, "train", None)
    assert sum(len(row["text"]) for row in documents) > 0.9 * size
    assert (len(documents), documents.column_names) == (2000, ["text"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size / 8


def test_what_does_not_fit_into_host_memory_is_refused(plain):
    path = plain(1 << 20)
    with pytest.raises(ValueError, match=r"`dataset='.*lines.jsonl'`.*its tokens take more than the 1.00 MiB.*pip"):
        tokens_of(path)
    with pytest.raises(ValueError, match=r"texts of 'text' take more than the 1.00 MiB"):
        PairData(str(path), "bytes", "text", "text", num_workers=0).load_pairs()
    text = path.with_name("one.txt")
    text.write_text("one document " * 100_000)
    with pytest.raises(ValueError, match=r"one.txt', one document, take more than.*Divide it"):
        tokens_of(text)


def test_much_text_in_host_memory_is_said(plain):
    with pytest.warns(UserWarning, match=r"its tokens take .* MiB in every process, of the 20.00 MiB of host memory"):
        tokens_of(plain(20 << 20))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens_of(plain(GIB))


def test_rows_without_text_are_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"text": "a"}, {"text": "b", "n": 1}, {"n": 2}, {"text": "c"}, {"text": 3, "only": None}]
    path.write_text("\n".join(map(json.dumps, rows)))
    documents = PlainDocuments([path])
    assert documents.column_names == ["n", "only", "text"]
    assert documents.without_text("text") == (2, 3)
    assert documents.without_text("n") == (5, 1)


FAULTS = {
    '["a"]': "line 31 is list instead of an object",
    "[1, 2]": "line 31 is list instead of an object",
    "null": "line 31 is NoneType instead of an object",
    "7": "line 31 is int instead of an object",
    '{"text": "a \\ud800 b"}': r"line 31 has half a character \(\\ud800, a lone surrogate\) in a text",
    '{"text": "a", "more": [{"b": "\\udfff"}]}': r"line 31 has half a character \(\\udfff",
    '{"text": "a", "text": "b"}': "line 31 has the key 'text' twice",
    '{"text": "a", "more": {"b": 1, "b": 1}}': "line 31 has the key 'b' twice",
}


@pytest.mark.parametrize("has_datasets", [True, False])
@pytest.mark.parametrize("line", FAULTS)
def test_a_line_with_a_fault_is_named(tmp_path, monkeypatch, line, has_datasets):
    if has_datasets:
        pytest.importorskip("datasets")
    else:
        monkeypatch.setattr(sources, "is_installed", lambda package: package != "datasets")
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n\n' * 15 + line + '\n{"text": "y"}\n')
    with pytest.raises(ValueError, match=rf"a\.jsonl', {FAULTS[line]}"):
        check_texts(load_documents(str(path), None, "train", str(tmp_path / "cache")), "text", "text_column", str(path))


def test_a_whole_pair_of_surrogates_is_a_character(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a \\ud83d\\ude00 b"}\n')
    assert PlainDocuments([path])["text"] == ["a \U0001f600 b"]


def test_another_type_deep_in_a_row_is_named(tmp_path):
    """Versions of `datasets` differ in what of it they read."""
    path = tmp_path / "a.jsonl"
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 20
    rows.append({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": 3}]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "line 21 has int as 'messages[].content', where line 1 has str" in (sources._change_in(path) or "")


@pytest.mark.parametrize("has_datasets", [True, False])
def test_a_file_of_blank_lines_is_named(tmp_path, monkeypatch, has_datasets):
    if not has_datasets:
        monkeypatch.setattr(sources, "is_installed", lambda package: package != "datasets")
    path = tmp_path / "a.jsonl"
    path.write_text("\n \n\t\r\n")
    with pytest.raises(ValueError, match=r"a\.jsonl' has blank lines only. Remove it or fill it"):
        load_documents(str(path), None, "train", str(tmp_path / "cache"))


def test_an_object_of_a_list_with_a_fault_is_named(tmp_path):
    path = tmp_path / "a.json"
    for text, told in (
        ('[{"text": "a"}, {"text": "\\udc00"}]', "object 2 has half a character"),
        ('[{"text": "a", "text": "b"}]', "the key 'text' twice"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"a\.json' cannot be read: {told}"):
            load_documents(str(path), None, "train", None)


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


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
@pytest.mark.parametrize("plainly", [True, False])
def test_a_byte_order_mark_is_no_text(tmp_path, name, plainly):
    """Editors of Windows put one at the beginning of a file."""
    text = {"a.txt": "caf\u00e9", "a.jsonl": '{"text": "caf\u00e9"}\n', "a.json": '[{"text": "caf\u00e9"}]'}[name]
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    if plainly:
        documents = PlainDocuments([tmp_path / name])
    else:
        pytest.importorskip("datasets")
        documents = load_documents(str(tmp_path / name), None, "train", str(tmp_path / "cache"))
    assert list(documents["text"]) == ["caf\u00e9"]


def test_linked_folders_and_endings_in_capitals_are_read(tmp_path):
    for name in ("data/code/a.txt", "data/code/B.TXT", "books/1.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    data = tmp_path / "data"
    (data / "books").symlink_to(tmp_path / "books")
    (data / "code" / "up").symlink_to(data)  # leads back
    files = local_files(data)
    assert [file.relative_to(data).as_posix() for file in files] == ["books/1.txt", "code/B.TXT", "code/a.txt"]
    for read in (True, False):
        texts = (
            PlainDocuments(files)["text"] if read else load_documents(str(data), None, "train", str(tmp_path))["text"]
        )
        assert list(texts) == ["books/1.txt", "data/code/B.TXT", "data/code/a.txt"]
    assert len(load_documents(str(data / "code" / "B.TXT"), None, "train", str(tmp_path))) == 1


def test_files_that_are_not_read_are_named(tmp_path):
    for name in ("a.txt", "b.jsonl.gz", "c.jsonl.gz", "LICENSE", ".hidden", ".cache/d.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    told = r"only \.txt are read, not 1 without an ending \(such as 'LICENSE'\), 2 \.gz \(such as 'b.jsonl.gz'\)\."
    with pytest.warns(UserWarning, match=told):
        assert files_below(tmp_path, [".txt"]) == [tmp_path / "a.txt"]


def test_hidden_files_are_no_data(tmp_path):
    """Jupyter's copies were trained on as well."""
    data = tmp_path / ".mine"  # which the user has named
    for name in ("a.txt", ".ipynb_checkpoints/a-checkpoint.txt", "b/._1.txt", "b/1.txt", ".git/index"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text(name)
    (data / ".lock.txt").symlink_to("gone")
    with pytest.warns(UserWarning, match=r"only \.txt are read, not 3 hidden \(such as 'a-checkpoint.txt'\)\."):
        assert files_below(data, [".txt"]) == [data / "a.txt", data / "b" / "1.txt"]


def test_a_link_whose_target_is_gone_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"the file '.*b.txt' can't be read: No such file"):
        local_files(tmp_path)
