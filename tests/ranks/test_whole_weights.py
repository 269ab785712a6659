"""Where ranks divide weights, copies of networks, exports and checkpoints have whole ones."""

from copy import deepcopy

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel
from safetensors.torch import load_file
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import lightning_memfit.strategies  # noqa: F401  registers the names
from lightning_memfit.memory.collectives import whole_state_dict
from lightning_memfit.models import CausalLM
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import quiet_trainer

TINY = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 64}
TINY |= {"bos_token_id": 0, "eos_token_id": 0}


class Copied(LightningModule):
    """Has a network's copies as modules make them, and keeps how far these are from it."""

    def configure_model(self):
        if hasattr(self, "net"):
            return
        self.net, self.target = self.made(), self.made()
        self.target.load_state_dict(self.net.state_dict())
        self.average = deepcopy(self.net)
        self.differences = []

    def made(self):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        result, copies = self.net(batch), (self.target, self.average)
        self.differences += [float((result - copy(batch)).detach().abs().max()) for copy in copies]
        return result.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), 0.1)


class Initialized(LightningModule):
    """Initializes layers that are made, as modules do."""

    def configure_model(self):
        if hasattr(self, "layers"):
            return
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(4, 6) for _ in range(6))
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.translating = nn.Transformer(6, 2, 1, 1, 8, dropout=0.0)  # whose constructor writes what others have made

    def on_train_start(self):
        self.seen = whole_state_dict(self) if torch.distributed.is_initialized() else deepcopy(dict(self.state_dict()))

    def training_step(self, batch, batch_idx):
        values = sum(layer(batch) for layer in self.layers)
        return self.translating(values, values).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def initialized_under(strategy, **options):
    module = Initialized()
    quiet_trainer(strategy=strategy, max_steps=1, **options).fit(module, torch.utils.data.DataLoader(torch.ones(4, 4)))
    return module.seen


def test_what_a_module_writes_into_layers_it_has_made_is_kept(tmp_path):
    """`nn.init.zeros_` of a weight that is put away succeeded and did nothing."""
    pytest.importorskip("deepspeed")
    (plain,) = run_ranks(initialized_under, 1, tmp_path / "plain", "auto")
    first, _ = run_ranks(lambda: initialized_under("memfit_zero_3", devices=2), 2, tmp_path / "ranks")
    assert not first.error, first.output
    torch.testing.assert_close(first.result, plain.result, rtol=0, atol=0)


class Normed(BoringModel):
    """A hook computes weights from others before a layer's forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        normed = [torch.nn.utils.weight_norm(nn.Linear(32, 32)) for _ in range(3)]
        self.layer = nn.Sequential(nn.Linear(32, 32), *normed, nn.Linear(32, 2))
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def resumed_under(strategy, path, **options):
    rows = torch.utils.data.DataLoader(torch.ones(8, 32))
    options = {"strategy": strategy, "limit_val_batches": 0, **options}
    trained, resumed = Normed(), Normed()
    trainer = quiet_trainer(max_steps=2, **options)
    trainer.fit(trained, rows)
    trainer.save_checkpoint(path)
    quiet_trainer(max_steps=4, **options).fit(resumed, rows, ckpt_path=path)
    return trained.losses + resumed.losses


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_hooks_before_a_forward_find_whole_weights(tmp_path):
    """With `torch.nn.utils.weight_norm` a run that was resumed ended in a signal (SIGFPE)."""
    pytest.importorskip("deepspeed")
    (plain,) = run_ranks(resumed_under, 1, tmp_path / "plain", "auto", tmp_path / "plain.ckpt")
    zero = lambda: resumed_under("memfit_zero_3", tmp_path / "zero.ckpt", devices=2)  # noqa: E731
    for ended in run_ranks(zero, 2, tmp_path / "ranks"):
        assert ended.code == 0, ended.output
        assert ended.result == pytest.approx(plain.result, abs=1e-5)


def copies_under(strategy):
    torch.manual_seed(torch.distributed.is_initialized())
    module, data = Copied(), torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    options = {"strategy": strategy, "devices": 2, "max_steps": 1}
    quiet_trainer(**options).fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    return module.differences


def test_copies_of_partitioned_networks_are_whole(tmp_path):
    """A partitioned weight looks empty: state dicts matched, and nothing was copied."""
    pytest.importorskip("deepspeed")
    for ended in run_ranks(copies_under, 2, tmp_path, "memfit_zero_3"):
        assert not ended.error, ended.output
        assert ended.result == [0.0, 0.0]


def exports_under(strategy, folder):
    torch.manual_seed(1)
    words = torch.randint(1, 64, (8, 12), generator=torch.Generator().manual_seed(1))
    module, rows = CausalLM(config=TINY, optimizer="SGD"), [{"input_ids": one, "labels": one} for one in words]
    trainer = quiet_trainer(strategy=strategy, devices=2, max_steps=1)
    trainer.fit(module, torch.utils.data.DataLoader(rows))
    assert module.export(folder / "exported") == folder / "exported"
    trainer.strategy.barrier()
    if strategy != "memfit_ddp":
        with pytest.raises(ValueError, match="is not empty"):
            module.export(folder / "exported")


def test_exports_have_whole_weights_and_one_writer(tmp_path):
    """A rank's part of a weight is no weight, and a folder that all ranks write to is damaged."""
    pytest.importorskip("deepspeed")
    found = {}
    for strategy in ("memfit_ddp", "memfit_zero_3", "memfit_fsdp2"):
        for ended in run_ranks(exports_under, 2, tmp_path / f"ranks_{strategy}", strategy, tmp_path / strategy):
            assert not ended.error, ended.output
        found[strategy] = {
            f"{path.relative_to(tmp_path / strategy)}/{name}": weight
            for path in sorted((tmp_path / strategy).rglob("*.safetensors"))
            for name, weight in load_file(path).items()
        }
    expected = found.pop("memfit_ddp")
    assert len(expected) > 10
    for weights in found.values():
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-4)


class Pretrained(LightningModule):
    """Loads a mixture of experts, whose weights transformers puts together from those of single experts."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def configure_model(self):
        if not hasattr(self, "net"):
            self.net = MixtralForCausalLM.from_pretrained(self.folder)

    def training_step(self, batch, batch_idx):
        return self.net(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), 0.0)


def pretrained_under(strategy, folder):
    module, data = Pretrained(folder), torch.randint(1, 32, (4, 6), generator=torch.Generator().manual_seed(1))
    quiet_trainer(strategy=strategy, devices=2, max_steps=1).fit(module, torch.utils.data.DataLoader(data))
    return whole_state_dict(module.net)


def test_mixtures_of_experts_load_under_zero_3(tmp_path):
    """Transformers loads one of an expert layer's weights at a time, on the first rank alone."""
    pytest.importorskip("deepspeed")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_local_experts": 2, "vocab_size": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    plain = MixtralForCausalLM(MixtralConfig(**sizes))
    plain.save_pretrained(tmp_path / "model")
    first, _ = run_ranks(pretrained_under, 2, tmp_path / "ranks", "memfit_zero_3", str(tmp_path / "model"))
    assert not first.error, first.output
    expected = plain.state_dict()
    assert first.result.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(first.result[name], value), name
