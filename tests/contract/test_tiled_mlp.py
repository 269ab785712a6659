from typing import Any

import pytest
import torch
from torch import nn

from lightning_memfit.estimate.estimate import predict_peak_bytes
from lightning_memfit.profile.build import measure_step, profile_module
from lightning_memfit.profile.trace import Emulation
from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from lightning_memfit.techniques.chunked_loss import ChunkedLoss
from lightning_memfit.techniques.core.facts import Facts, Run
from lightning_memfit.techniques.core.model_facts import find_mlps, mlp_width, read_facts
from lightning_memfit.techniques.tiled_mlp import TECHNIQUE, TiledMLP
from tests.contract.checkpointing.models import gpt2, llama, t5
from tests.contract.runs import LanguageModel, fit

QUIET = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


@pytest.mark.parametrize(("make", "name", "number"), [(gpt2, "GPT2MLP", 4), (llama, "LlamaMLP", 3), (t5, "T5", 5)])
def test_layers_are_found_by_their_class(make, name, number):
    model = make()
    found = find_mlps(model)
    assert len(found) == number
    assert all(type(layer).__name__.startswith(name) for layer in found)
    assert read_facts(model).mlp_width == min(map(mlp_width, found)) > 0


def test_one_tile_keeps_activations_at_a_time():
    """Of four times the width; predicted as measured, with checkpointing of blocks, too."""
    batch = torch.randint(0, 64, (2, 256), generator=torch.Generator().manual_seed(0))
    peaks = []
    recomputed = [ActivationCheckpointing(), ChunkedLoss(16)]
    for callbacks in ([], [TiledMLP(8)], recomputed, [TiledMLP(8), *recomputed]):
        model = LanguageModel(None, n_positions=256, n_embd=64, n_inner=1024, n_head=1, **QUIET)
        given: dict[str, Any] = {"callbacks": tuple(callbacks)}
        traced = profile_module(model, batch, emulation=Emulation(device="cpu"), any_micro_batch=False, **given)
        measured = predict_peak_bytes(measure_step(model, batch, **given), 2)
        assert predict_peak_bytes(traced, 2) == pytest.approx(measured, rel=0.01)
        peaks.append(measured)
    plain, tiled, checkpointed, both = peaks
    assert tiled < 0.7 * plain
    assert both < 0.8 * checkpointed


class Shifted(nn.Module):
    """Mixes each token with the one before it, as the feed-forward layers of RWKV do."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden):
        before = nn.functional.pad(hidden, (0, 0, 1, -1))
        return self.down(self.up(hidden + before).relu())


class Paired(Shifted):
    def forward(self, hidden):
        return self.down(self.up(hidden).relu()), None


class Statistics(Shifted):
    def forward(self, hidden):
        return self.down(self.up(hidden - hidden.mean(-2, keepdim=True)).relu())


@pytest.mark.parametrize(
    ("kind", "said"),
    [(Shifted, "it mixes tokens"), (Statistics, "it mixes tokens"), (Paired, "returns something else")],
)
def test_layers_that_mix_tokens_are_refused(kind, said):
    class Mixed(LanguageModel):
        def __init__(self):
            super().__init__(None, **QUIET)
            for block in self.model.transformer.h:
                block.mlp = kind(self.model.config.n_embd)

    with pytest.raises(ValueError, match=f"{kind.__name__} .*{said}.* Name other layers in `modules`"):
        fit([TiledMLP(2, modules=kind.__name__)], Mixed)


def test_layers_without_a_known_class_are_named():
    class Other(LanguageModel):
        def __init__(self):
            super().__init__(None, **QUIET)
            width = self.model.config.n_embd
            for block in self.model.transformer.h:
                block.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    with pytest.raises(ValueError, match="Name its feed-forward layers in `modules`"):
        fit([TiledMLP()], Other)
    layers = [f"model.transformer.h.{number}.mlp" for number in range(4)]
    tiled, plain = fit([TiledMLP(4, modules=layers)], Other), fit([], Other)
    assert torch.stack(tiled.losses).allclose(torch.stack(plain.losses), rtol=1e-6)


def test_short_sequences_are_not_planned_with_it():
    short = Run(Facts(mlp_width=64, sequence_length=64))
    assert "run in one tile" in str(TECHNIQUE.unsupported(short, {}))
    assert TECHNIQUE.unsupported(short, {"num_tiles": 2}) is None
    assert TECHNIQUE.unsupported(Run(Facts(mlp_width=64, sequence_length=65)), {}) is None


def test_no_fewer_than_one_tile():
    with pytest.raises(ValueError, match="`num_tiles=0`"):
        TiledMLP(0)
