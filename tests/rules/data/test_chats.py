import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memfit.data import ChatData
from lightning_memfit.data.chat_template import ChatTemplate
from lightning_memfit.data.chats import ChatEncoder, ConversationBlocks, _pack, without_gaps
from lightning_memfit.data.tokenization import byte_tokenizer
from tests.helpers.chat_templates import chat_tokenizer

PAD = 257


def chat(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


CHATS = [chat(f"Question {i}{'?' * (i % 9 + 1)}", f"Answer {i} " * (i % 5 + 1)) for i in range(60)]


def write(file, chats=CHATS):
    rows = [{"messages": messages} for messages in chats]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_text(json.dumps(rows) if file.suffix == ".json" else lines, encoding="utf-8")
    return str(file)


def chat_data(dataset, tmp_path, **arguments):
    arguments = {"chat_template": "chatml", "sequence_length": 256, "num_workers": 0, **arguments}
    return ChatData(dataset, "bytes", cache_dir=str(tmp_path / "cache"), **arguments)


def tokens_of(chats):
    encoder = ChatEncoder("messages", ChatTemplate(byte_tokenizer(), "chatml"))
    return np.concatenate([tokens for tokens, _ in encoder.encode([{"messages": chat} for chat in chats], 0)])


def text(ids):
    return byte_tokenizer().decode([token for token in ids if token != PAD])


# --- blocks -----------------------------------------------------------------------------------------------------------


def conversations_in(sample):
    """Ids and labels of each conversation of a block, the padding left out."""
    starts = [*(sample["position_ids"] == 0).nonzero().flatten().tolist(), len(sample["position_ids"])]
    for start, end in itertools.pairwise(starts):
        assert sample["position_ids"][start:end].tolist() == list(range(end - start))
        if sample["input_ids"][start] != PAD:
            yield sample["input_ids"][start:end], sample["labels"][start:end]


def test_every_conversation_is_whole_in_one_block_and_answers_alone_are_predicted():
    blocks = ConversationBlocks(tokens_of(CHATS), 256, PAD)
    seen = []
    for number in range(len(blocks)):
        for ids, labels in conversations_in(blocks[number]):
            seen.append((text(ids), text(labels[labels != -100])))
            assert labels[labels != -100].tolist() == ids[labels != -100].tolist()
    expected = [
        (f"<|im_start|>user\n{q['content']}<|endoftext|>\n<|im_start|>assistant\n{a['content']}<|endoftext|>\n", a)
        for q, a in CHATS
    ]
    assert sorted(seen) == sorted((whole, f"{a['content']}<|endoftext|>") for whole, a in expected)
    assert len(blocks) < 30
    assert "60 conversations in" in blocks.describe()
    with pytest.raises(IndexError):
        blocks[len(blocks)]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_packing_loses_nothing_and_fills_blocks(lengths):
    order, bounds = _pack(np.array(lengths), 40)
    assert sorted(order) == list(range(len(lengths)))
    filled = [sum(lengths[i] for i in order[start:end]) for start, end in itertools.pairwise(bounds)]
    assert max(filled) <= 40
    # Two blocks that are half empty would have been one.
    assert sum(2 * room <= 40 for room in filled) <= 1


def test_long_conversations_are_cut_and_those_without_an_answer_left():
    chats = [chat("short?", "yes " * 50), chat("long " * 50, "yes"), chat("short?", "no")]
    blocks = ConversationBlocks(tokens_of(chats), 100, PAD)
    assert (blocks.num_conversations, blocks.num_cut, blocks.num_left_out) == (2, 1, 1)
    assert "1 cut to a block's length, 1 without an answer in it left out" in blocks.describe()
    with pytest.raises(ValueError, match=r"None of the 1 training conversations has an answer.*`sequence_length=100`"):
        ConversationBlocks(tokens_of(chats[1:2]), 100, PAD)


def test_a_first_token_is_never_predicted():
    """Nothing of the same conversation stands before it, and what does is another's."""
    template = ChatTemplate(
        chat_tokenizer(
            "qwen3",
            "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}"
            "{{ message['content'] + eos_token }}{% endgeneration %}{% else %}{{ message['content'] + ' ' }}{% endif %}"
            "{% endfor %}",
        )
    )
    rows = [{"messages": CHATS[0][1:]}, {"messages": CHATS[1]}]
    tokens = np.concatenate([t for t, _ in ChatEncoder("messages", template).encode(rows, 0)])
    sample = ConversationBlocks(tokens, 64, PAD)[0]
    assert (sample["labels"][sample["position_ids"] == 0] == -100).all()


# --- the data module --------------------------------------------------------------------------------------------------


def test_second_run_reads_the_cache(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    file = write(tmp_path / "a.jsonl")
    data = chat_data(file, tmp_path)
    first = data.load_tokens(data.make_encoder())
    again = chat_data(file, tmp_path)
    encoder, changed = again.make_encoder(), chat_data(file, tmp_path, chat_template=None)
    monkeypatch.setattr(ChatEncoder, "encode", lambda *_: pytest.fail("tokenized again"))
    second = again.load_tokens(encoder)
    assert all(np.array_equal(one, two) for one, two in zip(first, second, strict=True))
    changed._tokenizer = chat_tokenizer("qwen3")
    with pytest.raises(BaseException, match="tokenized again"):
        changed.load_tokens(changed.make_encoder())


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_the_fault_is_named_through_datasets(tmp_path, name):
    pytest.importorskip("datasets")
    data = chat_data(write(tmp_path / name, [*CHATS[:30], [{"role": "user"}], *CHATS[30:]]), tmp_path)
    with pytest.raises(ValueError, match="`messages` of conversation 31, .*message 1 has nothing as 'content'"):
        data.prepare_data()


SHAREGPT = [
    {"conversations": [{"from": "human", "value": f"Q{n}?"}, {"from": "gpt", "value": f"A{n}"}]} for n in range(9)
]
ALPACA = [{"instruction": f"Q{n}?", "input": "", "output": f"A{n}"} for n in range(9)]


@pytest.mark.parametrize("rows", [SHAREGPT, ALPACA], ids=["sharegpt", "alpaca"])
def test_rows_of_other_formats_are_refused_with_the_line_that_converts_them(tmp_path, monkeypatch, rows):
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="Convert them once: ") as told:
        chat_data("a.jsonl", tmp_path).prepare_data()
    exec(str(told.value).partition("Convert them once: ")[2], {"datasets": datasets})
    assert json.loads((tmp_path / "chats.jsonl").read_text().splitlines()[3])["messages"] == chat("Q3?", "A3")
    chat_data("chats.jsonl", tmp_path, sequence_length=64).prepare_data()


def test_answers_of_weight_0_are_not_learned():
    first, second = chat("Hi?", "Wrong"), chat("And?", "Right")
    messages = [first[0], {**first[1], "weight": 0}, second[0], {**second[1], "weight": 1}]
    sample = ConversationBlocks(tokens_of([messages]), 256, PAD)[0]
    assert text(sample["labels"][sample["labels"] != -100]) == "Right<|endoftext|>"
    with pytest.raises(ValueError, match="message 2 has `weight` 0.5, where 0 or 1 is wanted"):
        tokens_of([[first[0], {**first[1], "weight": 0.5}]])


def test_calls_of_tools_and_their_descriptions_are_written(tmp_path):
    """In OpenAI's format, where arguments are text and an answer that calls has no content."""
    pytest.importorskip("datasets")
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "dry"},
        {"role": "assistant", "content": "No."},
    ]
    rows = [{"messages": messages, "tools": [tool]}, *({"messages": one, "tools": None} for one in CHATS[:9])]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = chat_data(str(tmp_path / "a.jsonl"), tmp_path, sequence_length=512, packing=False)
    data.setup("fit")
    whole = [text(ids) for side in (data._train, data._val) for ids in (one["input_ids"] for one in side)]
    (written,) = (one for one in whole if "Rain?" in one)
    assert '"name": "weather", "parameters"' in written
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>' in written
    (sample,) = (one for side in (data._train, data._val) for one in side if "Rain?" in text(one["input_ids"]))
    learned = text(sample["labels"][sample["labels"] != -100])
    assert learned.startswith("<tool_call>")
    assert learned.endswith("No.<|endoftext|>")
    assert "dry" not in learned


def test_a_template_that_leaves_tools_out_is_refused():
    encoder = ChatEncoder("messages", ChatTemplate(chat_tokenizer("qwen3")))
    call = {"function": {"name": "weather", "arguments": {}}}
    row = {"messages": [CHATS[0][0], {"role": "assistant", "content": "", "tool_calls": [call]}]}
    with pytest.raises(ValueError, match="doesn't write the tool 'weather'"):
        encoder.encode([row], 0)


def test_keys_that_only_other_rows_have_are_left_out_at_any_depth():
    """A table gives every tool call the arguments of all."""
    call = {"function": {"name": "f", "arguments": {"city": "Rome", "amount": None, "of": [{"a": 0, "b": None}]}}}
    row = [{"role": "assistant", "content": "ok", "name": None, "tool_calls": [call]}]
    [left] = without_gaps(row)
    assert left == {
        "role": "assistant",
        "content": "ok",
        "tool_calls": [{"function": {"name": "f", "arguments": {"city": "Rome", "of": [{"a": 0}]}}}],
    }
    asked = {"role": "user", "content": "Where?"}
    file = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    file += "{{ m.tool_calls | default([]) | tojson }}"
    file += "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    template = ChatTemplate(chat_tokenizer("qwen3", file))
    [(tokens, _)] = ChatEncoder("messages", template).encode([{"messages": [asked, *row]}], 0)
    assert "amount" not in template.tokenizer.decode((tokens & ((1 << 30) - 1)).tolist())
