"""What `memfit export` writes of models that were trained on chats and on pairs of languages."""

import pytest
import torch
from transformers import GenerationConfig

from cli import export
from cli.main import main
from lightning_memfit.data.chat_template import CHATML, ChatTemplate
from lightning_memfit.data.tokenization import byte_tokenizer
from lightning_memfit.models import CausalLM
from tests.helpers.framing import translating

TINY = {"model_type": "gpt2", "vocab_size": 258, "n_positions": 256, "n_embd": 8, "n_layer": 1, "n_head": 1}
TINY |= {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 257}
OF_CHATS = {"tokenizer": "bytes", "chat_template": CHATML, "template_options": None}


def saved(tmp_path, data):
    module = CausalLM(config=TINY)
    module.configure_model()
    checkpoint = {"state_dict": module.state_dict(), "hyper_parameters": {}, "datamodule_hyper_parameters": data}
    module.on_save_checkpoint(checkpoint)
    torch.save(checkpoint, tmp_path / "model.ckpt")
    return str(tmp_path / "model.ckpt")


def test_a_template_that_is_gone_is_named(tmp_path, capsys):
    path = saved(tmp_path, {**OF_CHATS, "chat_template": "gone.jinja"})
    assert main(["export", "--ckpt_path", path, "--folder", str(tmp_path / "out")]) == 2
    assert "`chat_template='gone.jinja'` is neither 'chatml' nor a file" in capsys.readouterr().err


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
    data = {**OF_CHATS, "chat_template": str(tmp_path / "template.jinja")}
    assert main(["export", "--ckpt_path", saved(tmp_path, data), "--folder", str(tmp_path / "out")]) == 0
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [256, 257]  # by which others stop, too


def test_the_languages_of_the_training_are_set(monkeypatch):
    asked = {"tokenizer": "nllb", "source_language": "deu", "target_language": "eng"}
    monkeypatch.setattr(export, "load_tokenizer", lambda _: translating())
    tokenizer = export.tokenizer_of({"datamodule_hyper_parameters": asked}, "nllb")
    assert tokenizer.decode(tokenizer("a")["input_ids"]) == "deua<|endoftext|>"
    assert tokenizer.decode(tokenizer(text_target="a")["input_ids"]) == "enga<|endoftext|>"
