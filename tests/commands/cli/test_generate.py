"""`memfit generate`: a model that was trained on chats answers, any other one continues its prompt."""

import pytest
import torch
from transformers import GenerationConfig

from cli.main import main
from lightning_memfit.data.chat_template import CHATML, ChatTemplate
from lightning_memfit.data.tokenization import byte_tokenizer
from lightning_memfit.models import CausalLM

TINY = {"model_type": "gpt2", "vocab_size": 258, "n_positions": 256, "n_embd": 8, "n_layer": 1, "n_head": 1}
TINY |= {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 257}
OF_CHATS = {"tokenizer": "bytes", "chat_template": CHATML, "date": "2024-07-26", "template_options": None}
OF_TEXT = {"tokenizer": "bytes"}


@pytest.fixture
def seen(monkeypatch):
    """What is given to a model to continue, in the place of doing so."""
    calls = []

    def continue_ids(network, tokenizer, ids, *limits, ends=()):
        calls.append((tokenizer.decode(ids), tuple(tokenizer.decode([end]) for end in ends)))
        return tokenizer("Six.<|endoftext|>")["input_ids"]

    monkeypatch.setattr("lightning_memfit.models.sampling.continue_ids", continue_ids)
    return calls


def saved(tmp_path, data):
    module = CausalLM(config=TINY)
    module.configure_model()
    checkpoint = {"state_dict": module.state_dict(), "hyper_parameters": {}, "datamodule_hyper_parameters": data}
    module.on_save_checkpoint(checkpoint)
    torch.save(checkpoint, tmp_path / "model.ckpt")
    return str(tmp_path / "model.ckpt")


def generate(*arguments):
    return main(["generate", "--prompt", "How many legs?", *arguments])


def test_a_model_of_chats_answers_in_its_template(tmp_path, seen, capsys):
    assert generate("--ckpt_path", saved(tmp_path, OF_CHATS), "--system", "Be brief.") == 0
    ((prompt, ends),) = seen
    turns = ["<|im_start|>system\nBe brief.", "<|im_start|>user\nHow many legs?", "<|im_start|>assistant\n"]
    assert prompt == "<|endoftext|>\n".join(turns)
    assert ends == ("<|endoftext|>",)
    assert capsys.readouterr().out == "Six.\n"


def test_the_prompt_is_continued_as_text_where_that_is_asked_for_or_was_trained(tmp_path, seen, capsys):
    assert generate("--ckpt_path", saved(tmp_path, OF_CHATS), "--no-chat") == 0
    assert generate("--ckpt_path", saved(tmp_path, OF_TEXT)) == 0
    assert [prompt for prompt, _ in seen] == ["How many legs?"] * 2
    assert capsys.readouterr().out == "How many legs?Six.\n" * 2


def test_an_exported_folder_has_the_template_of_the_training(tmp_path, seen, capsys):
    assert main(["export", "--ckpt_path", saved(tmp_path, OF_CHATS), "--folder", str(tmp_path / "out")]) == 0
    assert generate("--folder", str(tmp_path / "out")) == 0
    assert seen[0][0].endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (OF_TEXT, ["--chat"], "was not trained on chats, and its tokenizer has no chat template"),
        (OF_TEXT, ["--system", "Be brief."], "`--system` is for chats"),
        (OF_CHATS, ["--prompt", ""], "`--prompt` is empty"),
        (
            {**OF_CHATS, "chat_template": "gone.jinja"},
            [],
            "`chat_template='gone.jinja'` is neither 'chatml' nor a file",
        ),
    ],
)
def test_what_is_no_chat_is_refused(tmp_path, capsys, data, options, message):
    assert generate("--ckpt_path", saved(tmp_path, data), *options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("line_after", ["", "\n"])
def test_an_answer_ends_where_the_template_ends_it(tmp_path, line_after):
    """Also where the template counts the line after the end of a turn to the answer."""
    written = (
        "{% for one in messages %}{{ '[' + one['role'] + ']' }}{% if one['role'] == 'assistant' %}{% generation %}"
        "{{ one['content'] + '<|pad|>" + line_after.replace("\n", "\\n") + "' }}{% endgeneration %}"
        "{% else %}{{ one['content'] }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
    )
    (tmp_path / "template.jinja").write_text(written)
    template = ChatTemplate(byte_tokenizer(), str(tmp_path / "template.jinja"))
    assert template.tokenizer.decode([template.end_of_answer]) == "<|pad|>"
    assert template.tokenizer.decode(template.prompt([{"role": "user", "content": "Hm?"}])) == "[user]Hm?[assistant]"
    data = {**OF_CHATS, "chat_template": str(tmp_path / "template.jinja")}
    assert main(["export", "--ckpt_path", saved(tmp_path, data), "--folder", str(tmp_path / "out")]) == 0
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [256, 257]  # by which others stop, too
