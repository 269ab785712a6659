import lightning.pytorch as pl
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lightning_memfit.data.text import PackedBlocks
from lightning_memfit.models import CausalLM
from tests.helpers.trainers import quiet_trainer

TINY = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 16,
    "n_head": 2,
    "n_positions": 32,
    "vocab_size": 258,
    "bos_token_id": 256,
    "eos_token_id": 256,
}


class Blocks(pl.LightningDataModule):
    def __init__(self, sequence_length=16, vocab_size=258):
        super().__init__()
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size

    def train_dataloader(self):
        tokens = torch.randint(258, (8 * self.sequence_length,), generator=torch.Generator().manual_seed(0))
        return DataLoader(PackedBlocks(tokens.numpy(), self.sequence_length), batch_size=2)

    val_dataloader = train_dataloader


def make_trainer(tmp_path, **options):
    return quiet_trainer(**{"default_root_dir": tmp_path, "num_sanity_val_steps": 0, "max_steps": 2} | options)


def test_labels_are_shifted_and_masked():
    module = CausalLM(config=TINY)
    module.configure_model()
    module.eval()
    ids = torch.randint(258, (2, 8))
    labels = ids.clone()
    labels[:, :5] = -100
    loss = module(ids, labels=labels).loss
    logits = module(ids).logits[:, 4:-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 5:].flatten())
    torch.testing.assert_close(loss, expected)


def test_fit_logs_loss_and_perplexity(tmp_path):
    module = CausalLM(config=TINY, learning_rate=1e-3)
    trainer = make_trainer(tmp_path, max_epochs=1, max_steps=-1)
    trainer.fit(module, datamodule=Blocks())
    metrics = trainer.callback_metrics
    assert metrics["val_perplexity"] == pytest.approx(metrics["val_loss"].exp().item(), rel=1e-5)
    assert "train_loss" in metrics


def test_batches_without_labels_leave_the_metrics_alone(tmp_path):
    torch.manual_seed(0)
    module, ids = CausalLM(config=TINY), torch.randint(258, (2, 16))
    batches = [{"input_ids": ids, "labels": labels} for labels in (torch.full_like(ids, -100), ids)]
    trainer = make_trainer(tmp_path)
    both, one = (trainer.test(module, DataLoader(b, batch_size=None), verbose=False)[0] for b in (batches, batches[1:]))
    assert both == pytest.approx(one, rel=1e-6)


def test_schedule_counts_optimizer_steps(tmp_path):
    module = CausalLM(config=TINY, learning_rate=1.0, warmup_steps=2, min_learning_rate_fraction=0.0)
    rates = []
    module.on_before_zero_grad = lambda optimizer: rates.append(optimizer.param_groups[0]["lr"])
    make_trainer(tmp_path, max_epochs=3, max_steps=-1, accumulate_grad_batches=2).fit(module, datamodule=Blocks())
    assert sorted(set(rates)) == pytest.approx(sorted({0.5, 1.0, 0.8535533906, 0.1464466094}))


def test_weight_decay_only_on_matrices(tmp_path):
    module = CausalLM(config=TINY, weight_decay=0.3)
    trainer = make_trainer(tmp_path)
    trainer.fit(module, datamodule=Blocks())
    [optimizer] = trainer.optimizers
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    network = module.network.transformer
    assert decays[id(network.wte.weight)] == decays[id(network.h[0].attn.c_attn.weight)] == 0.3
    assert decays[id(network.ln_f.weight)] == decays[id(network.h[0].attn.c_attn.bias)] == 0.0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Blocks(sequence_length=64), r"`sequence_length=64` is longer than the model's 32 positions"),
        (Blocks(vocab_size=50257), r"The tokenizer has 50257 tokens, the model 258"),
    ],
)
def test_unfitting_data_is_refused_before_the_model_is_built(tmp_path, data, message):
    module = CausalLM(config=TINY)
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path).fit(module, datamodule=data)
    assert module.model is None


SEEING = {
    "model_type": "gemma3",
    "text_config": {
        "vocab_size": 258,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 16,
    },
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
}


@pytest.mark.parametrize(
    ("data", "message"),
    [(Blocks(vocab_size=300), "300 tokens, the model 258"), (Blocks(sequence_length=17), "the model's 16 positions")],
)
def test_models_that_see_as_well_have_the_bounds_of_their_text(tmp_path, data, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path).fit(CausalLM(config=SEEING), datamodule=data)


def test_what_balances_experts_is_trained_but_no_part_of_the_perplexity():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    module = CausalLM(config={"model_type": "mixtral", **sizes, **heads, "output_router_logits": True})
    module.configure_model()
    with torch.no_grad():
        for weights in module.network.parameters():
            weights.mul_(20)  # so that experts are far from balanced
    tokens = torch.randint(64, (4, 8))
    module.on_validation_epoch_start()
    module.log = lambda *arguments, **options: None
    with torch.no_grad():
        module._evaluate("val", {"input_ids": tokens, "labels": tokens}, 0)
        outputs = module(input_ids=tokens)
        trained = module._loss({"input_ids": tokens, "labels": tokens})
    expected = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert float(trained) > float(expected) + 1e-3
    torch.testing.assert_close(module.val_loss.compute(), expected)
    torch.testing.assert_close(module.val_perplexity.compute(), expected.exp())
