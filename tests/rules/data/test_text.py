import json

import numpy as np
import pytest
import torch

from lightning_memfit.data import TextData

DOCUMENTS = [f"document {i} " * (i % 7 + 1) for i in range(60)]


@pytest.fixture
def cache(tmp_path):
    return str(tmp_path / "cache")


def write_folder(folder, kind):
    folder.mkdir()
    if kind == "txt":
        for i, text in enumerate(DOCUMENTS):
            (folder / f"{i:02}.txt").write_text(text)
    elif kind == "jsonl":
        (folder / "part.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    else:
        datasets = pytest.importorskip("datasets")  # which the machine that runs the GPU tests lacks
        datasets.Dataset.from_dict({"text": DOCUMENTS}).to_parquet(folder / "part.parquet")
    return str(folder)


def decode(tokens):
    return bytes(tokens[tokens < 256].astype(np.uint8)).decode()


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_every_kind_of_file_gives_the_same_documents(tmp_path, cache, kind):
    data = TextData(write_folder(tmp_path / kind, kind), "bytes", cache_dir=cache, val_fraction=0.1)
    train, val = data.load_tokens()
    assert isinstance(train, np.memmap)
    assert train.dtype == np.uint16
    assert (train == 256).sum() == 54
    assert (val == 256).sum() == 6
    assert sorted(decode(train) + decode(val)) == sorted("".join(DOCUMENTS))


def test_changed_text_is_tokenized_again(tmp_path, cache):
    folder = write_folder(tmp_path / "jsonl", "jsonl")
    first = TextData(folder, "bytes", cache_dir=cache).load_tokens()
    with (tmp_path / "jsonl" / "part.jsonl").open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    second = TextData(folder, "bytes", cache_dir=cache).load_tokens()
    assert sum(map(len, second)) == sum(map(len, first)) + len("one more") + 1


def test_a_single_document_is_cut(tmp_path, cache):
    file = tmp_path / "book.txt"
    file.write_text("0123456789" * 100)
    train, val = TextData(str(file), "bytes", cache_dir=cache, val_fraction=0.1).load_tokens()
    assert len(train) + len(val) == 1001
    assert len(val) == 100
    assert decode(train)[:5] == "01234"


def test_predictions_come_in_the_order_of_the_samples(tmp_path, cache):
    folder = write_folder(tmp_path / "txt", "txt")
    data = TextData(folder, "bytes", sequence_length=8, batch_size=2, cache_dir=cache, val_fraction=0.5)
    data.setup("predict")
    samples = data.val_dataloader().dataset.dataset
    assert len(samples) > 3
    predicted = torch.cat([batch["input_ids"] for batch in data.predict_dataloader()])
    torch.testing.assert_close(predicted, torch.stack([samples[i]["input_ids"] for i in range(len(samples))]))


def test_folder_without_text(tmp_path, cache):
    (tmp_path / "notes").mkdir()
    with pytest.raises(ValueError, match=r"has no text files. Wanted: .txt, .jsonl, .parquet"):
        TextData(str(tmp_path / "notes"), "bytes", cache_dir=cache).load_tokens()


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        ("a.jsonl", b'{"body": "x"}', "1 of 41 rows have no value, number 31"),
        ("a.jsonl", b'{"text": "x', "cannot be read as json files"),
        ("a.txt", b"caf\xe9", "is not UTF-8|cannot be read as text files"),
        ("a.parquet", b"", "cannot be read as parquet files"),
    ],
)
def test_faults_name_the_data(tmp_path, cache, name, row, words):
    """After good rows, which must not be trained on as if they were all."""
    lines = [f'{{"text": "number {number} and some more"}}'.encode() for number in range(40)]
    (tmp_path / name).write_bytes(b"\n".join([*lines[:30], row, *lines[30:]]))
    with pytest.raises(ValueError, match=words) as caught:
        TextData(str(tmp_path / name), "bytes", cache_dir=cache).load_tokens()
    assert str(tmp_path / name) in str(caught.value) or "rows have no value" in str(caught.value)
    assert "\n" not in str(caught.value)
