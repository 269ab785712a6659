"""No packed conversation sees another; models that let it are refused when they run."""

import lightning as L
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_memfit import CausalLM, StandardLibraryChats
from lightning_memfit.data.chats import refuse_mixing
from tests.helpers.trainers import quiet_trainer

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
KINDS = {
    "llama": SHAPE,
    "qwen3": {**SHAPE, "head_dim": 8},
    "gemma3_text": {
        **SHAPE,
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mistral": {**SHAPE, "sliding_window": 4},
}
OPT = {"model_type": "opt", "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
OPT |= {"word_embed_proj_dim": 32, "vocab_size": 258}


def made(kind, attention="sdpa", **shape):
    torch.manual_seed(0)
    # Wide weights: what other tokens do to one is then as large as in a trained model.
    config = AutoConfig.for_model(kind, vocab_size=100, initializer_range=0.3, pad_token_id=0, **shape)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.config.use_cache = False
    return model.eval()


def packed(*lengths):
    return torch.cat([torch.arange(length) for length in lengths])[None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_conversation_has_the_logits_that_it_has_alone(kind, attention, dtype):
    model = made(kind, attention, **KINDS[kind]).to(dtype)
    lengths = (7, 12, 5)
    ids = torch.randint(3, 100, (2, sum(lengths)))
    with torch.no_grad():
        together = model(input_ids=ids, position_ids=packed(*lengths).expand(2, -1)).logits
        alone = torch.cat([model(input_ids=one).logits for one in ids.split(lengths, dim=1)], dim=1)
        mixed = model(input_ids=ids).logits
    # Some models keep parts in float32, rotary angles among them.
    assert (together - alone).abs().max() <= 1e-4 * alone.abs().max()
    assert (mixed - alone).abs().max() > 0.05 * alone.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_models_that_keep_conversations_apart_pass(kind):
    model = made(kind, **KINDS[kind]).train()
    state = torch.get_rng_state()
    for rows in (1, 3):
        refuse_mixing(model, torch.arange(60).view(3, 20)[:rows])
    assert model.training
    assert all(part.training for part in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_that_ignores_positions_is_refused(attention):
    model = made("opt", attention, **{k: v for k, v in OPT.items() if k not in ("model_type", "vocab_size")})
    with pytest.raises(ValueError, match=rf"OPTForCausalLM with attention '{attention}' lets packed conversations see"):
        refuse_mixing(model, torch.arange(20)[None])
    assert not model.training


class OneAtATime(nn.Module):
    """Keeps conversations apart if there is one sample, as flash attention of transformers does; sums what it sees."""

    def __init__(self, rounding=0.0):
        super().__init__()
        self.rounding = rounding
        self.embedding = nn.Embedding(100, 8)

    def forward(self, input_ids, position_ids):
        count = torch.arange(input_ids.shape[1])
        sees = count[:, None] >= count
        if len(input_ids) == 1 or self.rounding:
            of = (position_ids == 0).cumsum(-1)
            sees = sees & (of[..., None] == of[:, None])
        seen = sees.to(self.embedding.weight.dtype).expand(len(input_ids), -1, -1) @ self.embedding(input_ids)
        return seen * (1 + self.rounding * input_ids.float().std())  # all samples together, as experts round


def test_attention_that_packs_one_sample_only_is_refused_for_several():
    model = OneAtATime()
    refuse_mixing(model, torch.arange(20)[None])
    with pytest.raises(ValueError, match=r"Set `data.packing: false`.* apart with `data.batch_size: 1`"):
        refuse_mixing(model, torch.arange(40).view(2, 20))


class Carries(nn.Module):
    """Attention that keeps conversations apart, beside a state that goes on, as Falcon-H1's."""

    def __init__(self, share):
        super().__init__()
        self.apart = OneAtATime(rounding=1e-12)
        self.share = share

    def forward(self, input_ids, position_ids):
        state = self.apart.embedding(input_ids).cumsum(dim=1)
        return self.apart(input_ids, position_ids) + self.share * state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_small_state_that_goes_on_is_refused(dtype, rows):
    """However small beside what attention would do: training may make it larger."""
    like = torch.arange(60).view(2, 30)[:rows]
    refuse_mixing(Carries(share=0.0).to(dtype), like)
    with pytest.raises(ValueError, match="Carries lets packed conversations see each other"):
        refuse_mixing(Carries(share=1e-4).to(dtype), like)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_round_by_what_else_is_there_and_pass(kind):
    experts = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    refuse_mixing(made(kind, **SHAPE, **experts), torch.arange(60).view(2, 30))


def fit(config, *callbacks, **arguments):
    trainer = quiet_trainer(*callbacks, max_steps=1, limit_val_batches=0)
    module = CausalLM(config=config, weight_decay=0.0)
    trainer.fit(module, datamodule=StandardLibraryChats(max_files=30, num_workers=0, batch_size=2, **arguments))
    return trainer


def test_a_run_is_refused_before_its_first_step():
    seen = []

    class Steps(L.Callback):
        def on_train_batch_start(self, *_):
            seen.append(1)

    with pytest.raises(ValueError, match="OPTForCausalLM"):
        fit(OPT, Steps())
    assert not seen
    assert fit(OPT, Steps(), packing=False).global_step == len(seen) == 1


def test_every_run_tries_its_own_model():
    data = StandardLibraryChats(max_files=30, num_workers=0, batch_size=2)

    def run(config):
        trainer = quiet_trainer(max_steps=1, limit_val_batches=0)
        trainer.fit(CausalLM(config=config, weight_decay=0.0), datamodule=data)

    run({"model_type": "qwen3", **KINDS["qwen3"], "vocab_size": 258})
    with pytest.raises(ValueError, match="OPTForCausalLM"):
        run(OPT)


def test_a_tokenizer_may_have_tokens_that_the_model_lacks_if_no_text_has_them():
    """Gemma 3's has one for images, which its text models leave out."""
    config = {"model_type": "qwen3", **KINDS["qwen3"]}
    assert fit({**config, "vocab_size": 258}).global_step == 1
    with pytest.raises(ValueError, match="The tokenizer has 258 tokens, the model 257"):
        fit({**config, "vocab_size": 257})  # padding is the last one


def test_the_largest_token_decides(monkeypatch):
    data = StandardLibraryChats(max_files=30, num_workers=0)
    data.setup("fit")
    data.tokenizer.add_tokens(["<image>"])
    module = CausalLM(config={"model_type": "qwen3", **KINDS["qwen3"], "vocab_size": 258})
    module.trainer = quiet_trainer()
    module.trainer.datamodule = data
    assert data.vocab_size == 259
    module.setup("fit")
