import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lightning_memfit.data.chat_template import ChatTemplate
from lightning_memfit.data.tokenization import byte_tokenizer, load_tokenizer
from tests.helpers.chat_templates import GEMMA3, MISTRAL, QWEN3, TEMPLATES, chat_tokenizer


def said(*texts, system=None):
    first = [] if system is None else [{"role": "system", "content": system}]
    roles = ["user", "assistant"]
    return first + [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]


def learned(template, messages):
    """The texts of what is learned, joined by a bar."""
    ids, is_answer = template.encode(messages)
    runs, text = [], ""
    for token, is_learned in zip(ids.tolist(), is_answer.tolist(), strict=True):
        if is_learned:
            text = [*text, token] if text else [token]
        elif text:
            runs, text = [*runs, text], ""
    return [template.tokenizer.decode(run) for run in ([*runs, text] if text else runs)]


CHAT = said("Hi!", " Hello, you. ", "Bye?", "Bye: <b>é</b>")
EXPECTED = {
    "llama3": ["Hello, you.<|eot_id|>", "Bye: <b>é</b><|eot_id|>"],
    "qwen3": [" Hello, you. <|im_end|>", "<think>\n\n</think>\n\nBye: <b>é</b><|im_end|>"],
    "gemma3": ["Hello, you.<end_of_turn>", "Bye: <b>é</b><end_of_turn>"],
    "mistral": [" Hello, you.<|endoftext|>", " Bye: <b>é</b><|endoftext|>"],
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_answers_are_found_by_prefixes(kind):
    template = ChatTemplate(chat_tokenizer(kind))
    assert not template.marks_answers
    assert learned(template, CHAT) == EXPECTED[kind]


def test_prompts_that_are_no_beginning_of_the_conversation_are_refused():
    """Without thinking, Qwen3's prompt ends with an empty thought, which earlier answers don't have before them."""
    with pytest.raises(ValueError, match="writes what stands before answer 1 otherwise"):
        ChatTemplate(chat_tokenizer("qwen3"), options={"enable_thinking": False})


def test_a_thought_that_the_template_changes_is_named():
    template = ChatTemplate(chat_tokenizer("qwen3"))
    [answer] = learned(template, said("Hi!", "<think>\nWho?\n</think>\n\nHello"))
    assert answer == "<think>\nWho?\n</think>\n\nHello<|im_end|>"
    with pytest.raises(ValueError, match="answer 1 isn't followed by .* or .* changes its words"):
        template.encode(said("Hi!", "<think>Who?</think>Hello", "Bye?", "Bye"))


def test_marks_of_the_template_are_followed():
    marked = GEMMA3.replace("message['content'] | trim + '<end_of_turn>\n' }}", "'' }}").replace(
        "{% endfor %}",
        "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim + '<end_of_turn>' }}"
        "{% endgeneration %}{% else %}{{ message['content'] | trim + '<end_of_turn>' }}{% endif %}{{ '\n' }}"
        "{% endfor %}",
    )
    template, other = ChatTemplate(chat_tokenizer("gemma3", marked)), ChatTemplate(chat_tokenizer("gemma3"))
    assert template.marks_answers
    for one, two in zip(template.encode(CHAT), other.encode(CHAT), strict=True):
        assert one.tolist() == two.tolist()


def test_answers_before_which_another_text_would_stand_are_refused():
    """The model would see the system's words elsewhere when it answers the first question."""
    template = ChatTemplate(chat_tokenizer("mistral"))
    assert learned(template, said("Hi!", "Hello", system="Be short.")) == [" Hello<|endoftext|>"]
    with pytest.raises(ValueError, match="writes what stands before answer 1 otherwise once the conversation goes on"):
        template.encode(said("Hi!", "Hello", "Bye?", "Bye", system="Be short."))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (QWEN3.replace("<|im_end|>", "."), "answer 1 isn't followed by a special token"),
        (QWEN3.replace("parts[-1].lstrip('\n')", "parts[-1] | upper"), "changes its words"),
        (QWEN3.replace("{% if add_generation_prompt %}", "{% if false %}"), "takes other tokens than its answers'"),
        (
            QWEN3.replace("{{ parts[-1]", "{% generation %}{{ parts[-1]").replace(
                "{% endfor %}", "{% endgeneration %}{% endfor %}"
            ),
            "shows 4 of 2 answers",
        ),
        (MISTRAL.replace("'[INST] ' +", "'[INST] ' + messages | length | string +"), "otherwise once"),
        (QWEN3 + "{% if %}", "refuses the conversation"),
    ],
)
def test_templates_that_hide_their_answers_are_refused(template, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        ChatTemplate(chat_tokenizer("qwen3" if "im_" in template else "mistral", template))
    assert "chatml" in str(caught.value)


def test_a_tokenizer_without_a_template_is_refused_and_chatml_serves_any():
    with pytest.raises(ValueError, match=r"has no chat template.*`chat_template: chatml`"):
        ChatTemplate(byte_tokenizer())
    assert learned(ChatTemplate(byte_tokenizer(), "chatml"), CHAT) == [
        " Hello, you. <|endoftext|>",
        "Bye: <b>é</b><|endoftext|>",
    ]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "expected a list of messages, got list"),
        ("Hello", "expected a list of messages, got str"),
        ([{"from": "human", "value": "Hi"}], "message 1 has nothing as 'role'"),
        ([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "message 1 has list as 'content'"),
        ([{"role": "assistant", "content": "Hi"}], "begins with an answer"),
        (said("Hi", "Hello")[::-1], "begins with an answer"),
        ([{"role": "user", "content": "Hi"}] * 2, "refuses the conversation: Roles must alternate"),
    ],
)
def test_conversations_that_are_none(messages, reason):
    with pytest.raises(ValueError, match=reason):
        ChatTemplate(chat_tokenizer("gemma3")).encode(messages)


def test_the_first_word_after_a_space_is_learned(tmp_path):
    """Tokenizers in the manner of SentencePiece write a word together with the space before it."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    texts = ["How many legs has a beetle? It walks on six of them. And a crab? Ten, two with pincers."] * 20
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=MISTRAL
    )
    tokenizer.save_pretrained(tmp_path)
    template = ChatTemplate(load_tokenizer(str(tmp_path)))
    ids, is_answer = template.encode(said("How many legs", "It walks"))
    assert tokenizer.convert_ids_to_tokens(ids[is_answer]) == ["▁It", "▁walks", "</s>"]


TRIMMING = {
    "bytes": processors.ByteLevel(trim_offsets=True),
    "sequence": processors.Sequence([processors.ByteLevel(trim_offsets=True)]),
    "roberta": processors.RobertaProcessing(("<|endoftext|>", 256), ("<|bos|>", 258), trim_offsets=True),
}
CHATML_BY_HAND = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("source", [CHATML_BY_HAND, None], ids=["prefixes", "marks"])
@pytest.mark.parametrize("kind", TRIMMING)
def test_spaces_of_answers_are_learned_where_offsets_are_trimmed(kind, source):
    """Trimmed offsets have no characters for a token of spaces (GPT-NeoX, RoBERTa)."""
    tokenizer = chat_tokenizer("qwen3", source)
    tokenizer.backend_tokenizer.post_processor = TRIMMING[kind]
    template = ChatTemplate(tokenizer, None if source else "chatml")
    end = "<|im_end|>" if source else "<|endoftext|>"
    for answer in ("    return x", "return x      ", "a    =\n    b"):
        assert learned(template, said("Code", answer)) == [answer + end]


def word_tokenizer(before_answers, text, before_the_last="", trims=False, splitter=None):
    """Tokens of the words of a text, and a template that writes as much before answers as before it lets one begin."""
    backend = Tokenizer(models.BPE())
    if splitter:
        backend.pre_tokenizer = splitter
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=trims)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([text] * 20, trainer)
    source = (
        "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'Human:' + message['content'] + '\n' }}"
        f"{{% else %}}{{{{ '{before_answers}' }}}}{{% if loop.last %}}{before_the_last}{{% endif %}}"
        "{{ message['content'] + eos_token + '\n' }}{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}{{{{ '{before_answers}' }}}}{{% endif %}}"
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=source)


@pytest.mark.parametrize("trims", [True, False])
def test_a_prompt_may_end_in_the_space_of_the_first_word(trims):
    """Tokenizers like that of GPT-NeoX write both as one token."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = word_tokenizer("Assistant: ", "Assistant: Paris is it", trims=trims, splitter=splitter)
    chat = said("Where?", "Paris is", "Where?", "  it")
    assert learned(ChatTemplate(tokenizer), chat) == [" Paris is</s>", "  it</s>"]


def test_an_end_of_turn_that_takes_in_spaces_behind_it_is_learned():
    """As those of Phi-3 do (`rstrip`)."""
    tokenizer = byte_tokenizer()
    special = ["<|im_start|>", AddedToken("<|im_end|>", rstrip=True, special=True)]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = CHATML_BY_HAND
    assert learned(ChatTemplate(tokenizer), said("Hi!", "Hello")) == ["Hello<|im_end|>"]


CALLING = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST]' + m['content'] + '[/INST]' }}"
    "{% elif m['role'] == 'tool' %}{{ '[RESULT]' + m['content'] + '[/RESULT]' }}"
    "{% else %}{{ m['content'] }}{% if m['tool_calls'] %}{{ '[CALL]' + m['tool_calls'][0] }}{% endif %}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)


def calling(template, content):
    """A template of a tokenizer with marks of tools, and an answer that calls one."""
    tokenizer = chat_tokenizer("mistral", template)
    marks = ["[INST]", "[/INST]", "[CALL]", "[RESULT]", "[/RESULT]"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    return ChatTemplate(tokenizer), {"role": "assistant", "content": content, "tool_calls": ["f(1)"]}


@pytest.mark.parametrize("mark", ["[CALL]", "call "])
@pytest.mark.parametrize("content", ["", "I look."])
def test_calls_of_tools_are_learned_to_their_end(mark, content):
    """The mark before a call, where it is a special token (Mistral, Llama 3), was taken for the end of the answer."""
    template, calls = calling(CALLING.replace("[CALL]", mark), content)
    chat = [*said("Hi!", "Hello", "How many?"), calls, {"role": "tool", "content": "6"}, *said("", "Six")[1:]]
    expected = ["Hello<|endoftext|>", f"{content}{mark}f(1)<|endoftext|>", "Six<|endoftext|>"]
    assert learned(template, chat) == expected
    assert learned(template, chat[:4]) == expected[:2]
