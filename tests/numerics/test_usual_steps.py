"""Under FSDP2 and DDP, what users do to weights and gradients in steps and hooks is as on one device, or refused."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from lightning_memfit.reliability.non_finite import NonFiniteGuard
from lightning_memfit.strategies import DataParallelStrategy, FullyShardedStrategy
from lightning_memfit.strategies.checkpoint_io import consolidated
from lightning_memfit.strategies.upstream import fsdp
from tests.helpers.ranks import num_ranks, run_ranks
from tests.helpers.trainers import quiet_trainer
from tests.zoo import usual_modules
from tests.zoo.usual_modules import Base, whole

WITH_CALLBACK = {"NotANumber": NonFiniteGuard, "Base": usual_modules.Finetuning}
REPLICATED = ["Base", "Unfrozen"]


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
    for names, kind in (
        (REPLICATED, DataParallelStrategy),
        ((*usual_modules.SHARDED, *usual_modules.REFUSED), FullyShardedStrategy),
    ):
        for name in names:
            options = usual_modules.SHARDED.get(name, {})
            try:
                found[name] = train(name, strategy=kind(process_group_backend="gloo", **options), devices=2)
            except Exception as error:
                found[name] = str(error)
    module = usual_modules.Buffers()
    strategy = FullyShardedStrategy(process_group_backend="gloo")
    trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module)
    trainer.save_checkpoint(folder / "buffers.ckpt")
    found["order"] = order_of_writes()
    return found


def order_of_writes() -> list[str]:
    """What happens in a step that writes parts of two networks: on CUDA, gathering has to wait for that."""
    order: list[str] = []

    class Written(Base):
        def __init__(self) -> None:
            super().__init__()
            self.others = torch.nn.ModuleList(usual_modules.Net().requires_grad_(False) for _ in range(2))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            order.append("step")
            with torch.no_grad():
                for weight in self.others.parameters():
                    weight.mul_(0.5)
                order.append("written")
                for other in self.others:
                    other(batch[0])
                for weight in self.net.blocks.parameters():
                    weight.data.mul_(0.5)
                order.append("written")
            return self.loss(batch)

    gather, wait = FSDPParamGroup.unshard, fsdp._let_gathering_wait

    def gathering(group: Any, *args: Any) -> None:
        order.extend([] if group.is_unsharded else ["gather"])
        gather(group, *args)

    def waiting(group: Any) -> None:
        order.append("wait")
        wait(group)

    with patch.object(FSDPParamGroup, "unshard", gathering), patch.object(fsdp, "_let_gathering_wait", waiting):
        strategy = FullyShardedStrategy(process_group_backend="gloo")
        quiet_trainer(strategy=strategy, devices=2, max_steps=2, use_distributed_sampler=False).fit(Written())
    return order


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("usual")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    ended = run_ranks(on_two_ranks, 2, folder / "ranks", folder)
    assert [one.code for one in ended] == [0, 0], ended[0].output[-3000:]
    return [one.result for one in ended]


@pytest.mark.parametrize("name", [*usual_modules.SHARDED, *REPLICATED])
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


@pytest.mark.parametrize("name", usual_modules.REFUSED)
def test_what_torch_cannot_do_with_parts_is_an_error(ranks: list[dict[str, Any]], name: str) -> None:
    assert all(isinstance(found[name], str) for found in ranks)


def test_gathering_waits_for_what_a_step_has_written(ranks: list[dict[str, Any]]) -> None:
    order = ranks[0]["order"]
    starts = [index for index, what in enumerate(order) if what == "step"]
    for start in starts:
        step = order[start + 1 : start + 10]  # once for what is written, not for each block
        assert step == [*["written", "wait", "gather", "gather"] * 2, "gather"], order
    assert len(starts) == 2


def test_a_folder_has_the_buffers_of_the_first_rank(ranks: list[dict[str, Any]], folder: Path) -> None:
    saved = consolidated(folder / "buffers.ckpt")["state_dict"]
    assert [float(saved[f"own{index}"][0]) for index in range(4)] == [1.0] * 4
    assert saved["_extra_state"] == {"rank": 1}
