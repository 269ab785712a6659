import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from lightning_memfit.data import ChatData, TextData, sources
from lightning_memfit.data.chat_template import ChatTemplate
from lightning_memfit.data.chats import ChatEncoder
from lightning_memfit.data.sources import Source, content_hash, local_files, validation_mask, write_tokens
from lightning_memfit.data.text import TextEncoder
from lightning_memfit.data.tokenization import byte_tokenizer
from tests.helpers.chat_templates import chat_tokenizer


def hashes(texts):
    return np.array([content_hash(text) for text in texts], np.uint64)


def test_split_follows_content_not_order():
    texts = [f"document {i}" for i in range(100)]
    mask = validation_mask(hashes(texts), 0.1)
    chosen = {text for text, is_val in zip(texts, mask, strict=True) if is_val}
    reversed_mask = validation_mask(hashes(texts[::-1]), 0.1)
    assert len(chosen) == 10
    assert chosen == {text for text, is_val in zip(texts[::-1], reversed_mask, strict=True) if is_val}


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    """Editors of Windows put one at the beginning of a file."""
    pytest.importorskip("datasets")
    text = {"a.txt": "caf\u00e9", "a.jsonl": '{"text": "caf\u00e9"}\n', "a.json": '[{"text": "caf\u00e9"}]'}[name]
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    rows = Source(str(tmp_path / name), cache_dir=str(tmp_path / "cache")).rows()
    assert list(rows["text"]) == ["caf\u00e9"]


def test_linked_folders_and_endings_in_capitals_are_read(tmp_path):
    for name in ("data/code/a.txt", "data/code/B.TXT", "books/1.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    data = tmp_path / "data"
    (data / "books").symlink_to(tmp_path / "books")
    files = local_files(data)
    assert [file.relative_to(data).as_posix() for file in files] == ["books/1.txt", "code/B.TXT", "code/a.txt"]


# --- tokens -----------------------------------------------------------------------------------------------------------

CHAT = [
    {"role": "user", "content": "How many?"},
    {"role": "assistant", "content": "  Six,   or so. "},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes"},
]
TOKENS = (4, {"text": "cb6c1022afdcf9c3", "chatml": "6709ca326d10c0c8", "prefixes": "99fefffe793bcd35"})


def test_the_format_is_raised_with_what_rows_become():
    """If this fails, rows become other tokens than before: raise `TOKENS_FORMAT`, and write down the new digests."""
    text = TextEncoder("text", byte_tokenizer()), [{"text": text} for text in ("  One text. ", "Grüße", "")]
    made = {}
    templates = {
        "chatml": ChatTemplate(byte_tokenizer(), "chatml"),
        "prefixes": ChatTemplate(chat_tokenizer("gemma3")),
    }
    rows = [{"messages": CHAT}, {"messages": CHAT[:2]}]
    chats = {name: (ChatEncoder("messages", template), rows) for name, template in templates.items()}
    for name, (encoder, rows) in {"text": text, **chats}.items():
        tokens = [(ids.tolist(), value) for ids, value in encoder.encode(rows, 0)]
        made[name] = hashlib.blake2b(json.dumps(tokens).encode(), digest_size=8).hexdigest()
    assert (sources.TOKENS_FORMAT, made) == TOKENS


@pytest.mark.parametrize("changed", ["format", "transformers", "tokenizers"])
def test_other_code_makes_cached_tokens_anew(changed, tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(20)))
    (tmp_path / "chat.jsonl").write_text(
        "".join(json.dumps({"messages": CHAT[2 * (n % 2) :]}) + "\n" for n in range(2))
    )

    def files():
        options = {"cache_dir": str(tmp_path / "cache"), "val_fraction": 0.3}
        TextData(str(tmp_path / "text.jsonl"), "bytes", **options).load_tokens()
        chats = ChatData(str(tmp_path / "chat.jsonl"), "bytes", "chatml", **options)
        chats.prepare_data()
        return set((tmp_path / "cache" / "memfit").iterdir())

    first = files()
    assert files() == first
    if changed == "format":
        monkeypatch.setattr(sources, "TOKENS_FORMAT", -1)
    else:
        known = sources.version
        monkeypatch.setattr(sources, "version", lambda name: "0.0" if name == changed else known(name))
    assert len(files()) == 2 * len(first) == 8


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no file without room")
def test_a_full_disk_is_told(tmp_path, monkeypatch):
    """A file that is mapped before it has room ends the process with a bus error."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"tokens": datasets.List(datasets.Value("uint16"))})
    rows = datasets.Dataset.from_dict({"tokens": [[1, 2], [], [3]]}, features=features)
    source = Source("any", cache_dir=str(tmp_path))
    monkeypatch.setattr(sources, "write_tokens", lambda *given: write_tokens(*given[:2], Path("/dev/full")))
    with pytest.raises(ValueError, match=r"`cache_dir`: the tokens can't be written to .*: No space left"):
        source._map(rows, "all")
    assert not list((tmp_path / "memfit").iterdir())
    monkeypatch.undo()
    assert source._map(rows, "all").tolist() == [1, 2, 3]
    assert source._map(rows, "odd", np.array([True, False, False])).tolist() == [1, 2]
