"""All trials: every case of the zoo with the public names that are tried on it."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_memfit import ActivationCheckpointing
from tests.helpers.trainers import quiet_trainer
from tests.zoo import CASES, THEMES, blocks, reported, settings, split_steps
from tests.zoo.base import Case
from tests.zoo.compare import examine
from tests.zoo.trial import Trial, outcome

WANTED = {"equal": "exact", "either": "exact or refused", "refused": "refused or exact", "accepted": "accepted"}


# --- MicroBatching --------------------------------------------------------------------------------------------------


def micro_batched(case: Case, theme: str) -> tuple[str, dict[str, Any]]:
    """Train by the whole batch and in parts of several sizes; the worst verdict counts."""
    row = examine(case, theme)
    verdict = row["training"].replace("equal", "exact")
    if row["logs"] in ("warned", "WRONG"):
        verdict += f", logs {row['logs']}"
    runs = [f"{size} {one}" for size, one in row["runs"].items() if one != row["training"]]
    return verdict + (f"; {', '.join(runs)}" if runs else ""), row


def of_micro_batching() -> Iterator[Trial]:
    everything = [(theme, "benchmarks/micro_batching", cases) for theme, cases in THEMES.items()]
    everything.append(("split steps", "tests/numerics/fitting/test_exactness.py", split_steps.CASES))
    for theme, source, cases in everything:
        for case in cases:
            run = partial(micro_batched, case, theme)
            yield Trial(case.name, theme, "MicroBatching", WANTED[case.wanted], source, run)


def of_settings() -> Iterator[Trial]:
    for setting in settings.SETTINGS:
        for name in settings.NAMES:
            run = partial(settings.under, name, setting)
            wanted = WANTED[CASES[name].wanted]
            yield Trial(f"{name} under {setting}", "settings", "MicroBatching", wanted, "tests/zoo/settings.py", run)


# --- ActivationCheckpointing ----------------------------------------------------------------------------------------

MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "matmul": {"mode": "selective", "keep": ("matmul",)},
    "attention": {"mode": "selective", "keep": ("attention",)},
    "offload": {"choices": ("offload",) * 3},
}


class Blocks(pl.LightningModule):
    """Trains blocks, and notes losses and gradients; one call is in evaluation mode and without gradients."""

    def __init__(self, kind: type, twice: bool) -> None:
        super().__init__()
        self.net = blocks.Net(kind, twice)
        self.noted: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            with torch.no_grad():
                self.net.eval()(torch.ones(8, blocks.WIDTH))
            self.net.train()
        loss = self.net(batch).square().mean()
        loss = loss + sum(block.aux for block in self.net.blocks if getattr(block, "aux", None) is not None)
        self.noted.append(loss.item())
        return loss

    def on_after_backward(self) -> None:
        self.noted.append([None if p.grad is None else p.grad.tolist() for p in self.net.parameters()])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.05)


def train_blocks(kind: type, twice: bool, *callbacks: pl.Callback) -> tuple[list[Any], Any]:
    blocks.reset()
    data = torch.randn(40, blocks.WIDTH)
    module = Blocks(kind, twice)
    trainer = quiet_trainer(*callbacks, max_epochs=1, num_sanity_val_steps=0)
    blocks.reset(keep_weights=True)
    trainer.fit(module, DataLoader(data, 8))
    return module.noted, blocks.state_of(module.net)


def checkpointed(kind: type) -> str:
    """Train in every mode, and with the last block called twice; the worst verdict counts."""
    found = {}
    for twice, modes in ((False, MODES), (True, {"full": {}})):
        plain = train_blocks(kind, twice)
        for name, options in modes.items():
            ours: list[Any] = []
            callback = ActivationCheckpointing(blocks="net.blocks", **options)
            train = partial(train_blocks, kind, twice, callback)
            ended = outcome(lambda train=train, ours=ours: ours.append(train()), "exact")
            verdict = ended if ended != "exact" or ours[0] == plain else "WRONG"
            found[f"{name}{' twice' if twice else ''}"] = verdict
    ranks = ("WRONG", "crashed", "refused", "exact")
    worst = min(found.values(), key=lambda one: ranks.index(one.split(":")[0]))
    others = [f"{name} {verdict}" for name, verdict in found.items() if verdict != worst]
    return worst + (f"; {', '.join(others)}" if others else "")


def of_checkpointing() -> Iterator[Trial]:
    for kind in (*blocks.EXACT, *blocks.STATEFUL):
        wanted = "exact or refused" if kind in blocks.STATEFUL else "exact"
        source = "tests/contract/checkpointing/test_recompute.py"
        yield Trial(kind.__name__, "blocks", "ActivationCheckpointing", wanted, source, partial(checkpointed, kind))


def all_trials() -> list[Trial]:
    """Every trial, in the order of the table."""
    trials = [*of_micro_batching(), *of_settings(), *of_checkpointing(), *reported.trials()]
    with contextlib.suppress(RuntimeError):
        torch.set_num_threads(1)  # more of them take longer on tensors as small as these
    return trials
