import json

import pytest
import torch
from transformers import GenerationConfig

from lightning_memfit.adapters import lora
from lightning_memfit.adapters.checkpoint import KEY
from lightning_memfit.adapters.linears import linear_layers
from lightning_memfit.models import CausalLM, Seq2SeqLM
from lightning_memfit.models.trained import (
    ARCHITECTURE_KEY,
    GENERATION_KEY,
    export_adapters,
    export_folder,
    network_from_checkpoint,
)

IDS = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0))
QWEN = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": 64}
T5 = {
    "model_type": "t5",
    "vocab_size": 64,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
BART = {
    "model_type": "bart",
    "vocab_size": 64,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
}


def inject(module, rank=2, alpha=4.0):
    """Give the linear layers of a module adapters; return what a checkpoint says of them."""
    lora.inject(module, linear_layers(module)[0], rank, alpha, 0.0, stay_float32=True)
    return lora.describe(module)


def inputs_of(config):
    return {"input_ids": IDS, **({"decoder_input_ids": IDS} if config in (T5, BART) else {})}


def trained_adapters(folder, config, train=(), changes=None, dtype=torch.float32, but=()):
    """A checkpoint of adapters that were trained beside a saved model, and what the trained model computes."""
    kind = Seq2SeqLM if config in (T5, BART) else CausalLM
    torch.manual_seed(0)
    base = kind(config=config)
    base.configure_model()
    base.network.to(dtype).save_pretrained(folder)
    module = kind(pretrained=str(folder), config=changes)
    module.configure_model()
    module.eval()
    record = inject(module)
    for name in train:
        module.get_submodule(name).requires_grad_(True)
    for name in but:
        module.get_parameter(name).requires_grad_(False)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    named = module.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in named if not parameter.requires_grad}
    checkpoint = {
        KEY: record,
        ARCHITECTURE_KEY: module.network.config.to_dict(),
        "state_dict": {name: value for name, value in module.state_dict().items() if name not in frozen},
        "hyper_parameters": {"pretrained": str(folder)},
    }
    with torch.no_grad():
        return checkpoint, module.network(**inputs_of(config)).logits


@pytest.mark.parametrize(
    ("config", "train", "task"),
    [
        (QWEN, (), "CAUSAL_LM"),
        (QWEN, ("model.lm_head",), "CAUSAL_LM"),
        (QWEN, ("model.model.norm", "model.model.embed_tokens"), "CAUSAL_LM"),
        (GPT2, ("model.lm_head",), "CAUSAL_LM"),  # tied to the embedding
        (T5, ("model.lm_head",), "SEQ_2_SEQ_LM"),
        (BART, (), "SEQ_2_SEQ_LM"),
    ],
)
def test_merged_and_alone_adapters_compute_what_was_trained(tmp_path, config, train, task):
    from peft import PeftModel

    checkpoint, trained = trained_adapters(tmp_path / "base", config, train)
    inputs = inputs_of(config)
    with torch.no_grad():
        torch.testing.assert_close(network_from_checkpoint(checkpoint)(**inputs).logits, trained)
    folder = export_adapters(checkpoint, tmp_path / "alone")
    assert json.loads((folder / "adapter_config.json").read_text())["task_type"] == task
    base = (Seq2SeqLM if config in (T5, BART) else CausalLM)(pretrained=str(tmp_path / "base"))
    base.configure_model()
    with torch.no_grad():
        alone = PeftModel.from_pretrained(base.network, folder).eval().base_model.model(**inputs).logits
    torch.testing.assert_close(alone, trained)


def test_a_module_that_was_trained_in_part_is_not_left_out_in_silence(tmp_path):
    checkpoint, _ = trained_adapters(
        tmp_path / "base", GPT2, ("model.transformer.ln_f",), but=("model.transformer.ln_f.bias",)
    )
    with pytest.raises(ValueError, match=r"transformer\.ln_f\.bias was not trained"):
        export_adapters(checkpoint, tmp_path / "alone")


def test_what_a_model_says_of_generation_is_exported(tmp_path):
    said = {"lang_to_id": {"<|en|>": 5}, "is_multilingual": True, "begin_suppress_tokens": [4]}
    base = Seq2SeqLM(config=BART)
    base.configure_model()
    base.network.save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "generation_config.json"
    derived = {name: value for name, value in json.loads(file.read_text()).items() if name != "_from_model_config"}
    file.write_text(json.dumps(derived | said))
    module = Seq2SeqLM(pretrained=str(tmp_path / "base"))
    module.configure_model()
    checkpoint = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)
    folder = export_folder(network_from_checkpoint(checkpoint), tmp_path / "exported", None)
    exported = json.loads((folder / "generation_config.json").read_text())
    assert {name: exported[name] for name in said} == said
    del checkpoint[GENERATION_KEY]  # as an earlier version wrote them
    assert network_from_checkpoint(checkpoint).generation_config.begin_suppress_tokens != [4]


@pytest.mark.parametrize(
    ("said", "written"),
    [
        ({"temperature": 0.9, "top_p": 0.6}, {}),  # of sampling, without sampling: transformers reads and ignores it
        ({"temperature": 0.9, "do_sample": True}, {"temperature": 0.9, "do_sample": True}),
        ({"temperature": 0.9, "max_new_tokens": 7}, {"max_new_tokens": 7}),
    ],
)
def test_settings_of_generation_that_have_no_effect_end_no_export(tmp_path, said, written):
    module = CausalLM(config=GPT2)
    module.configure_model()
    module.network.generation_config = GenerationConfig(**said)
    folder = export_folder(module.network, tmp_path / "exported", None)
    exported = json.loads((folder / "generation_config.json").read_text())
    assert {
        name: exported[name] for name in ("temperature", "top_p", "do_sample", "max_new_tokens") if name in exported
    } == written
    assert module.network.generation_config.temperature == 0.9, "what runs is as it was"
