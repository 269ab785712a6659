import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lightning_memfit.data import PreferenceData, StandardLibraryComparisons
from lightning_memfit.data.chat_template import CHATML, ChatTemplate
from lightning_memfit.data.preferences import TokenizedComparisons, comparison_of
from lightning_memfit.data.tokenization import byte_tokenizer
from lightning_memfit.models import PreferenceLM

ASKED = {"role": "user", "content": "How many legs?"}


def said(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "row",
    [
        ("How many legs?", "Six.", "Seven, I think."),
        ([ASKED], [said("Six.")], [said("Seven, I think.")]),
        (None, [ASKED, said("Six.")], [ASKED, said("Seven, I think.")]),
        ("How many legs?", [ASKED, said("Six.")], [ASKED, said("Seven, I think.")]),
        ([ASKED], [ASKED, said("Six.")], "Seven, I think."),
    ],
    ids=["text", "messages", "whole conversations", "both, as in UltraFeedback", "both, in one answer"],
)
def test_rows_of_each_kind_are_one_comparison(row):
    assert comparison_of(*row) == ([ASKED], [said("Six.")], [said("Seven, I think.")])


@pytest.mark.parametrize("noted", [{"tool_calls": []}, {"name": "Ann"}, {"thinking": ""}])
@pytest.mark.parametrize("prompt", [[ASKED], None])
def test_what_is_noted_beside_a_question_in_one_place_only_makes_no_other(prompt, noted):
    chosen, rejected = [{**ASKED, **noted}, said("Six.")], [ASKED, said("Seven, I think.")]
    _, *answers = comparison_of(prompt, chosen, rejected)
    assert answers == [[said("Six.")], [said("Seven, I think.")]]


def test_calls_of_tools_are_compared():
    """Only `role` and `content` were read: calls were learned by nobody, and answers that differ in them were one."""
    call = {"function": {"name": "legs", "arguments": {"of": "beetle", "not": None}}}
    given = {**said(""), "tool_calls": [call], "id": 3}
    prompt, chosen, rejected = comparison_of([{**ASKED, "id": 1}], [{**ASKED, "id": 2}, given], [said("")])
    assert (prompt, rejected) == ([ASKED], [said("")])
    assert chosen == [{**said(""), "tool_calls": [{"function": {"name": "legs", "arguments": {"of": "beetle"}}}]}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("?", "Six.", "Six."), "both answers are the same"),
        (("?", "Six.", None), "'rejected' has nothing"),
        (("?", "Six.", 7), "'rejected' has int"),
        (("?", [ASKED], "Seven."), "'chosen' has no answer of the assistant"),
        (("?", [{"role": "assistant"}], "Seven."), "'chosen' has a message without"),
        ((None, "Six.", "Seven."), "there is no prompt"),
        (
            ("How many arms?", [ASKED, said("Six.")], "Seven."),
            "'chosen' begins with a message of 'user' .* null`",
        ),
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
    """As much of it in both, so that both answers follow the same words"""
    whole = tokenized(256, comparison_of("How many legs?", "Six.", "Seven, I think."))[0]
    longest = int(whole["attention_mask"].sum(dim=-1).max())
    cut = tokenized(longest - 20, comparison_of("How many legs?", "Six.", "Seven, I think."))[0]
    assert learned(cut) == learned(whole)
    assert all(full.endswith(part) for full, part in zip(read(whole), read(cut), strict=True))


def test_answers_keep_half_of_the_room_for_their_prompt():
    """Answers that follow no question would be compared for what they are, not for what they answer."""
    samples = tokenized(96, comparison_of("How many legs?", "Six. " * 30, "Seven. " * 30))
    assert all("How many legs?<|endoftext|>\n<|im_start|>assistant\nS" in text for text in read(samples[0]))
    assert [len(text) for text in learned(samples[0])] == [48, 48]
    short = tokenized(96, comparison_of("How many legs?", "Six.", "Seven. " * 30))[-1]
    assert learned(short)[0] == "Six.<|endoftext|>"


def test_what_is_cut_is_counted():
    fits, long = ("Legs?", "Six.", "Seven."), ("How many legs has a beetle of the usual kind?", "Six.", "Seven.")
    samples = tokenized(80, *(comparison_of(*row) for row in (fits, long, ("Legs?", "Six. " * 30, "Seven."))))
    assert samples.describe() == (
        "3 comparisons in 80 tokens for each answer, the beginning of the prompt cut in 2, "
        "the end of an answer cut in 1"
    )
    assert tokenized(80, comparison_of(*fits)).describe() == "1 comparisons in 80 tokens for each answer"
    with pytest.raises(IndexError):
        samples[3]


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


def test_a_comparison_that_the_template_refuses_is_named_before_training(tmp_path):
    template = tmp_path / "strict.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    rows = [{"prompt": f"{n}?", "chosen": [said("Six.")], "rejected": [said("Seven.")]} for n in range(20)]
    rows[5]["chosen"].append({"role": "tool", "content": "6"})
    data = PreferenceData(write(tmp_path / "some.jsonl", *rows), "bytes", str(template), num_workers=0)
    with pytest.raises(ValueError, match=r"Comparison .* can't be used: .*no tools here"):
        data.setup("fit")


def test_a_tokenizer_may_have_more_tokens_than_the_model_if_none_occurs(tmp_path):
    rows = [{"prompt": f"{n}?", "chosen": "Six.", "rejected": "Seven."} for n in range(20)]
    data = PreferenceData(write(tmp_path / "some.jsonl", *rows), "bytes", CHATML, sequence_length=64, num_workers=0)
    assert data.largest_id() is None
    data.setup("fit")
    largest = max(int(sample["input_ids"].max()) for samples in (data._train, data._val) for sample in samples)
    assert data.largest_id() == largest
    tiny = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "n_positions": 64}
    data.tokenizer.add_tokens(["<image>"])
    assert data.vocab_size == largest + 2
    for size in (largest + 1, largest):
        module = PreferenceLM(config={**tiny, "vocab_size": size})
        module._trainer = SimpleNamespace(datamodule=data)
        with nullcontext() if size > largest else pytest.raises(ValueError, match="larger `config.vocab_size`"):
            module.setup("fit")


def test_comparisons_from_the_standard_library():
    data = StandardLibraryComparisons(sequence_length=96, batch_size=2, max_files=10, num_workers=0)
    data.setup("fit")
    for comparison in data._train.comparisons[:20]:
        assert comparison.chosen != comparison.rejected
        assert comparison.prompt[0]["content"].startswith("What does ")
