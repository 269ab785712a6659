"""All trials: every case of the zoo with the public names that are tried on it."""

import contextlib
import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_memfit import (
    ActivationCheckpointing,
    DataParallelStrategy,
    FullyShardedStrategy,
    NonFiniteGuard,
    estimate_step,
    measure_step,
    profile_module,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import quiet_trainer
from tests.zoo import (
    CASES,
    THEMES,
    blocks,
    reported,
    schedules,
    settings,
    side_effects,
    split_steps,
    surroundings,
    usual_modules,
)
from tests.zoo.base import Case
from tests.zoo.classifier import Classifier, batch, true_peak
from tests.zoo.compare import examine, is_refusal
from tests.zoo.trial import Trial, outcome
from tests.zoo.unchanged import changes, described

PROFILES = {"profile_module": profile_module, "measure_step": measure_step}
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


# --- profile_module and measure_step --------------------------------------------------------------------------------


def profiled(profile: Callable[..., Any], make: Callable[[], Any]) -> str:
    """Whether the step is traced, and whether everything is as it was."""
    folder = Path.cwd()
    tempfile.tempdir = str(folder / "temporary")
    work = folder / "work"
    (work / "old").mkdir(parents=True)
    os.mkdir(tempfile.tempdir)
    (work / "old.txt").write_text("old")
    (work / "old" / "inner.txt").write_text("inner")
    os.chdir(work)
    with side_effects.open_before(checks=False):
        profile(Classifier(), batch())  # what libraries set up once
        module = make()
        surroundings.mask(2), surroundings.small_mask(2)
        before = described(module)
        found = outcome(lambda: profile(module, batch()), "traced")
        gc.collect()  # what the error of a refusal held
        return f"{found}, {changes(before, described(module))}"


def peak(profile: Callable[..., Any], make: Callable[[], Any], batches: int) -> str:
    """Whether the predicted peak is that of a plain run of so many batches."""
    torch.manual_seed(0)
    truth = true_peak(make, batch, batches)
    torch.manual_seed(0)
    found: list[int] = []
    ended = outcome(lambda: found.append(estimate_step(profile(make(), batch())).allocated_bytes), "peak")
    if ended != "peak":
        return ended
    off = found[0] / truth - 1
    return "peak" if abs(off) < 1e-3 else f"other peak; {100 * off:+.1f} %"


def on_the_cpu(module: Any, batch: Any) -> Any:
    """Trace for the CPU, where a plain run can be measured everywhere."""
    from lightning_memfit.profile.trace import Emulation

    return profile_module(module, batch, emulation=Emulation("cpu"), any_micro_batch=False)


def endless(profile: Callable[..., Any], make: Callable[[], Any]) -> str:
    """Whether a run that doesn't end is refused, under lower limits than usual."""
    from lightning_memfit.profile.course import TraceLimits

    limits = TraceLimits(seconds=5, batches=40)
    return outcome(lambda: profile(make(), batch(), limits=limits), "traced")


def of_profiles() -> Iterator[Trial]:
    for tried, profile in PROFILES.items():
        isolated, course = (f"tests/truth/profile/test_{name}.py" for name in ("process", "course"))
        for acts, wanted in ((side_effects.HARMFUL, "unchanged"), (side_effects.ALLOWED, "traced, unchanged")):
            for name, act in acts.items():
                run = partial(profiled, profile, partial(side_effects.Doing, act))
                yield Trial(name, "side effects", tried, wanted, isolated, run)
        more = [surroundings.set_threads] if profile is profile_module else []
        for act in [*surroundings.ALL_CHANGES, *more]:
            run = partial(profiled, profile, partial(surroundings.Doing, act))
            yield Trial(act.__name__, "surroundings", tried, "traced, unchanged", isolated, run)
        for kind, batches in schedules.PEAKS.items():
            run = partial(peak, on_the_cpu if profile is profile_module else profile, kind, batches)
            wanted = "peak or refused" if (kind, tried) == (schedules.Quasi, "profile_module") else "peak"
            yield Trial(kind.__name__, "schedules", tried, wanted, course, run)
        for kind in schedules.REFUSED:
            run = partial(endless, profile, kind)
            yield Trial(kind.__name__, "schedules", tried, "refused", course, run)


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
    for kind in blocks.ALL:
        wanted = "exact or refused" if kind in blocks.STATEFUL else "exact"
        source = "tests/contract/checkpointing/test_recompute.py"
        yield Trial(kind.__name__, "blocks", "ActivationCheckpointing", wanted, source, partial(checkpointed, kind))


# --- strategies -----------------------------------------------------------------------------------------------------


def train_usual(name: str, **options: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    module = getattr(usual_modules, name)()
    with_callback = {"NotANumber": NonFiniteGuard, "Base": usual_modules.Finetuning}
    callbacks = [with_callback[name]()] if name in with_callback else []
    options = {"max_epochs": 2, "limit_val_batches": 1, "num_sanity_val_steps": 1} | options
    quiet_trainer(*callbacks, use_distributed_sampler=False, **options).fit(module)
    return {key: usual_modules.whole(one).detach().clone() for key, one in module.named_parameters()}, module.seen


def on_a_rank(name: str, kind: type, options: dict[str, Any]) -> Any:
    try:
        return train_usual(name, strategy=kind(process_group_backend="gloo", **options), devices=2)[0]
    except Exception as error:
        return "refused" if is_refusal(error) else "raised"  # torch's own error, maybe in our words


def on_two_ranks(name: str, kind: type, options: dict[str, Any]) -> str:
    """Train on two processes, and compare with one."""
    ended = run_ranks(on_a_rank, 2, Path("ranks"), name, kind, options)
    if any(one.code for one in ended):
        return "ended"
    found = [one.result for one in ended]
    words = [one for one in found if isinstance(one, str)]
    if words:
        return min(words)
    expected, _ = train_usual(name)
    same = all(torch.allclose(one[key], w, atol=1e-5, rtol=0) for one in found for key, w in expected.items())
    return "exact" if same else "WRONG"


def of_strategies() -> Iterator[Trial]:
    for kind, wanted, names in (
        (FullyShardedStrategy, "exact", usual_modules.SHARDED),
        (FullyShardedStrategy, "refused or raised", usual_modules.REFUSED),
        (DataParallelStrategy, "exact", usual_modules.REPLICATED),
        (DataParallelStrategy, "refused or raised", usual_modules.NOT_REPLICATED),
    ):
        for name, options in names.items():
            run = partial(on_two_ranks, name, kind, options)
            yield Trial(name, "usual modules", kind.__name__, wanted, "tests/numerics/test_usual_steps.py", run)


def all_trials() -> list[Trial]:
    """Every trial, in the order of the table."""
    trials = [
        *of_micro_batching(),
        *of_settings(),
        *of_profiles(),
        *of_checkpointing(),
        *of_strategies(),
        *reported.trials(),
    ]
    with contextlib.suppress(RuntimeError):
        torch.set_num_threads(1)  # more of them take longer on tensors as small as these
    return trials
