"""Under FSDP2 and DDP, what users do to weights and gradients in steps and hooks is as on one device, or refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memfit.fitting.recovery.non_finite import NonFiniteGuard
from lightning_memfit.strategies import DataParallelStrategy, FullyShardedStrategy
from lightning_memfit.strategies.checkpoints import consolidated
from tests.helpers import usual_modules
from tests.helpers.ranks import num_ranks, run_ranks
from tests.helpers.trainers import quiet_trainer
from tests.helpers.usual_modules import Base, whole

pytestmark = pytest.mark.medium
WITH_CALLBACK = {"NotANumber": NonFiniteGuard, "Base": usual_modules.Finetuning}
SHARDED = [
    "MomentumTarget",
    "Clipped",
    "ClippedData",
    "NewData",
    "ClippedInForward",
    "Adversaries",
    "Frozen",
    "Gradients",
    "InHooks",
    "OfOptimizer",
    "WholePenalty",
    "NotANumber",
    "StepOfInstance",
    "StepOfCallback",
]
REPLICATED = ["Base", "Unfrozen"]
REFUSED = {
    "Penalty": "computed from `net.blocks.2.b.bias` outside of its block.*`term.full_tensor",
    "UsedInStep": r"`training_step` \(line \d+ of .*usual_modules.py\) computes with `net.blocks.0.a.bias` outside",
    "LayerInHook": "`on_before_optimizer_step` .* computes with `net.inp.weight` outside of its block",
    "GradientPenalty": "differentiates a gradient",
    "GradientNorms": "`on_before_optimizer_step` .* as Lightning's `grad_norm` does",
    "LostData": "`net.blocks.0.a.weight.data = ...` has no effect",
    "WrittenTwice": "`net.head.bias` was written while FSDP2 had gathered it, and its parts were changed",
}


def train(name: str, **options: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights, and what the module saw, after two epochs; the first weights are those of `Base()`."""
    module: Base = getattr(usual_modules, name)()
    callbacks = [WITH_CALLBACK[name]()] if name in WITH_CALLBACK else []
    sanity = {"limit_val_batches": 1, "num_sanity_val_steps": 1}
    trainer = quiet_trainer(*callbacks, max_epochs=2, use_distributed_sampler=False, **sanity, **options)
    trainer.fit(module)
    if name == "NotANumber":
        module.seen += callbacks[0].skipped
    return {key: whole(one).detach().clone() for key, one in module.named_parameters()}, module.seen


def on_two_ranks(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for names, kind in ((REPLICATED, DataParallelStrategy), ((*SHARDED, *REFUSED), FullyShardedStrategy)):
        for name in names:
            try:
                found[name] = train(name, strategy=kind(process_group_backend="gloo"), devices=2)
            except Exception as error:
                found[name] = str(error)
    module = usual_modules.Buffers()
    strategy = FullyShardedStrategy(process_group_backend="gloo")
    trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module)
    trainer.save_checkpoint(folder / "buffers.ckpt")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("usual")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    ended = run_ranks(on_two_ranks, 2, folder / "ranks", folder)
    assert [one.code for one in ended] == [0, 0], ended[0].output[-3000:]
    return [one.result for one in ended]


@pytest.mark.parametrize("name", [*SHARDED, *REPLICATED])
def test_steps_are_those_of_one_device(ranks: list[dict[str, Any]], name: str) -> None:
    assert num_ranks == 1
    expected, seen = train(name)
    start = dict(getattr(usual_modules, name)().named_parameters())
    for found in ranks:
        assert not isinstance(found[name], str), found[name]
        for key, weight in expected.items():
            torch.testing.assert_close(found[name][0][key], weight, atol=1e-5, rtol=0, msg=f"{key} {weight}")
        assert found[name][1] == pytest.approx(seen, abs=1e-4)
    assert max(float((weight - start[key].detach()).abs().max()) for key, weight in expected.items()) > 0.01


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused_on_all_ranks(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        assert isinstance(found[name], str)
        assert re.search(REFUSED[name], found[name]), found[name]


def test_a_folder_has_the_buffers_of_the_first_rank(ranks: list[dict[str, Any]], folder: Path) -> None:
    saved = consolidated(folder / "buffers.ckpt")["state_dict"]
    assert [float(saved[f"own{index}"][0]) for index in range(4)] == [1.0] * 4
    assert saved["_extra_state"] == {"rank": 1}
