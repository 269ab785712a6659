import json

import pytest
import torch

from lightning_memfit.data import PreferenceData, StandardLibraryComparisons
from lightning_memfit.data.chat_template import CHATML, ChatTemplate
from lightning_memfit.data.preferences import TokenizedComparisons, comparison_of
from lightning_memfit.data.tokenization import byte_tokenizer

ASKED = {"role": "user", "content": "How many legs?"}


def said(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "row",
    [
        ("How many legs?", "Six.", "Seven, I think."),
        ([ASKED], [said("Six.")], [said("Seven, I think.")]),
        (None, [ASKED, said("Six.")], [ASKED, said("Seven, I think.")]),
    ],
    ids=["text", "messages", "whole conversations"],
)
def test_rows_of_each_kind_are_one_comparison(row):
    assert comparison_of(*row) == ([ASKED], [said("Six.")], [said("Seven, I think.")])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("?", "Six.", "Six."), "both answers are the same"),
        (("?", "Six.", None), "'rejected' has nothing"),
        (("?", "Six.", 7), "'rejected' has int"),
        (("?", [ASKED], "Seven."), "'chosen' has no answer of the assistant"),
        (("?", [{"role": "assistant"}], "Seven."), "'chosen' has a message without"),
        ((None, "Six.", "Seven."), "there is no prompt"),
        ((None, [ASKED, said("Six.")], [ASKED]), "'rejected' has no answer"),
    ],
)
def test_what_is_no_comparison_is_refused(row, message):
    with pytest.raises(ValueError, match=message):
        comparison_of(*row)


def tokenized(length, *comparisons):
    return TokenizedComparisons(comparisons, ChatTemplate(byte_tokenizer(), CHATML), length, 257)


def learned(sample):
    return [byte_tokenizer().decode(row[row >= 0]) for row in sample["labels"]]


def read(sample):
    rows = zip(sample["input_ids"], sample["attention_mask"], strict=True)
    return [byte_tokenizer().decode(ids[mask > 0]) for ids, mask in rows]


def test_labels_are_the_answers_after_the_prompt():
    """Earlier answers of the conversation are in the prompt, and don't count."""
    begun = [ASKED, said("Of what?"), {"role": "user", "content": "A beetle."}]
    sample = tokenized(256, comparison_of(begun, "Six.", "Seven."))[0]
    assert {tensor.shape for tensor in sample.values()} == {(2, 256)}
    assert learned(sample) == ["Six.<|endoftext|>", "Seven.<|endoftext|>"]
    assert read(sample)[0].startswith("<|im_start|>user\nHow many legs?")
    assert torch.equal(sample["input_ids"][sample["labels"] >= 0], sample["labels"][sample["labels"] >= 0])
    assert set(sample["input_ids"][sample["attention_mask"] == 0].tolist()) == {257}


def test_long_conversations_lose_the_beginning_of_their_prompt():
    """As much of it in both, so that both answers follow the same words; a long answer loses its end."""
    whole = tokenized(256, comparison_of("How many legs?", "Six.", "Seven, I think."))[0]
    longest = int(whole["attention_mask"].sum(dim=-1).max())
    cut = tokenized(longest - 20, comparison_of("How many legs?", "Six.", "Seven, I think."))[0]
    assert learned(cut) == learned(whole)
    assert all(full.endswith(part) for full, part in zip(read(whole), read(cut), strict=True))
    first = tokenized(8, comparison_of("How many legs?", "Six.", "Seven, I think."))[0]
    assert learned(first) == ["Six.<|endoftext|>", "Seven, "]


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_file_becomes_batches(tmp_path):
    rows = [{"prompt": f"What is {n} + 1?", "chosen": f"It is {n + 1}.", "rejected": "No idea."} for n in range(20)]
    file = write(tmp_path / "some.jsonl", *rows)
    data = PreferenceData(file, "bytes", CHATML, sequence_length=96, batch_size=4, val_fraction=0.2, num_workers=0)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    example = data.example_batch(258)
    assert {name: (t.shape, t.dtype) for name, t in batch.items()} == {
        name: (t.shape, t.dtype) for name, t in example.items()
    }
    answers = {pair for sample in data._train for pair in [tuple(learned(sample))]}
    assert len(answers) + len(data._val) == 20
    assert all(pair[1] == "No idea.<|endoftext|>" for pair in answers)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"prompt": "?", "chosen": "a", "rejected": "a"}, {}, "Row 2 of .* both answers are the same"),
        ({"prompt": None, "chosen": "a", "rejected": "b"}, {}, "Row 2 of .* has no 'prompt'"),
        ({"chosen": "a"}, {"rejected_column": "worse"}, "`rejected_column='worse'` is not in the data"),
    ],
)
def test_bad_rows_are_named(tmp_path, row, options, message):
    file = write(tmp_path / "some.jsonl", {"prompt": "?", "chosen": "a", "rejected": "b"}, row)
    with pytest.raises(ValueError, match=message):
        PreferenceData(file, "bytes", CHATML, num_workers=0, **options).setup("fit")


def test_comparisons_from_the_standard_library():
    data = StandardLibraryComparisons(sequence_length=96, batch_size=2, max_files=10, num_workers=0)
    data.setup("fit")
    for comparison in data._train.comparisons[:20]:
        assert comparison.chosen != comparison.rejected
        assert comparison.prompt[0]["content"].startswith("What does ")
