import hashlib
import json
from pathlib import Path

import pytest

from lightning_memfit.data import ChatData, TextData, token_files
from lightning_memfit.data.chat_template import ChatTemplate
from lightning_memfit.data.chats import ChatEncoder
from lightning_memfit.data.text import TextEncoder
from lightning_memfit.data.tokenization import byte_tokenizer
from tests.helpers.chat_templates import chat_tokenizer

CHAT = [
    {"role": "user", "content": "How many?"},
    {"role": "assistant", "content": "  Six,   or so. "},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes"},
]
TOKENS = (3, {"text": "cb6c1022afdcf9c3", "chatml": "6709ca326d10c0c8", "prefixes": "d52346bc54a1a959"})


def test_the_format_is_raised_with_what_rows_become():
    """If this fails, rows become other tokens than before: raise `TOKENS_FORMAT`, and write down the new digests."""
    text = TextEncoder("text", byte_tokenizer()), ["  One text. ", "Grüße", ""]
    made = {}
    templates = {
        "chatml": ChatTemplate(byte_tokenizer(), "chatml"),
        "prefixes": ChatTemplate(chat_tokenizer("llama3")),
    }
    chats = {name: (ChatEncoder("messages", template), [CHAT, CHAT[:2]]) for name, template in templates.items()}
    for name, (encoder, rows) in {"text": text, **chats}.items():
        tokens = [(ids.tolist(), value) for ids, value in encoder.encode(rows, 0)]
        made[name] = hashlib.blake2b(json.dumps(tokens).encode(), digest_size=8).hexdigest()
    assert (token_files.TOKENS_FORMAT, made) == TOKENS


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
        monkeypatch.setattr(token_files, "TOKENS_FORMAT", -1)
    else:
        known = token_files.version
        monkeypatch.setattr(token_files, "version", lambda name: "0.0" if name == changed else known(name))
    assert len(files()) == 2 * len(first) == 8


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no file without room")
def test_a_full_disk_is_told(tmp_path, monkeypatch):
    """A file that is mapped before it has room ends the process with a bus error."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("uint16"))})
    rows = datasets.Dataset.from_dict({"tokens": [[1, 2], [], [3]]}, features=features)
    with pytest.raises(OSError, match="No space left"):
        token_files._fill(rows, None, "/dev/full")
    fill = token_files._fill
    monkeypatch.setattr(token_files, "_fill", lambda rows, keep, path: fill(rows, keep, "/dev/full"))
    with pytest.raises(ValueError, match=r"`cache_dir`: the tokens can't be written to .*: No space left"):
        token_files.write_tokens(rows, tmp_path, "all")
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    assert token_files.write_tokens(rows, tmp_path, "all").tolist() == [1, 2, 3]
