"""Advice is what was solved: it never contradicts the refusal above it."""

import re
from dataclasses import replace
from typing import Any

import pytest

from lightning_memfit.device.runtime import safety_margin_bytes
from lightning_memfit.estimate.target import named_target
from lightning_memfit.planner import make as module
from lightning_memfit.planner.make import make_plan
from lightning_memfit.planner.plan import Plan
from lightning_memfit.planner.workload import Limits, Workload
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.techniques.core.setting import Setting

from .made import MIB, MadeTraceStore, made_workload

EXACT = frozenset({"exact"})


def planned(workload: Workload, monkeypatch: pytest.MonkeyPatch, store: type[MadeTraceStore] = MadeTraceStore) -> Plan:
    monkeypatch.setattr(module, "TraceStore", lambda changed, *_: store(changed))
    return make_plan(workload)


def refused(workload: Workload, monkeypatch: pytest.MonkeyPatch, store: Any = MadeTraceStore) -> list[str]:
    plan = planned(workload, monkeypatch, store)
    assert not plan.fits
    return list(plan.advice)


class Heavy(MadeTraceStore):
    """Weights and states need 31 GiB and more, little less than an RTX 5090 has in all."""

    @staticmethod
    def grown(profile: ModelProfile) -> ModelProfile:
        factor = 30
        events = replace(profile.events, sizes=profile.events.sizes * factor)
        slopes = None if profile.slopes is None else profile.slopes * factor
        (weight,) = profile.parameters
        weight = replace(weight, numel=weight.numel * factor)
        return replace(profile, events=events, slopes=slopes, parameters=(weight,))

    def plain(self) -> ModelProfile:
        return self.grown(super().plain())

    def passes(self, setting: Setting, choice: str) -> ModelProfile:
        return self.grown(super().passes(setting, choice))


def test_no_device_is_said_to_fit_what_does_not_fit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reserve that plans leave free was not counted: "Nothing fits RTX 5090 ... A RTX 5090 would do"."""
    needed = []
    for name in ("RTX 3060", "RTX 3090", "RTX 5090", "A100 40GB"):
        target = named_target(name)
        workload = replace(made_workload(1000, allow=EXACT, limits=Limits(host_bytes=0)), target=target)
        plan = planned(workload, monkeypatch, Heavy)
        if plan.fits:
            continue
        [line] = [line for line in plan.advice if "would do" in line]
        other = re.match(r"A (.*) would do", line)
        assert other is not None
        assert named_target(other[1]).capacity_bytes > target.capacity_bytes  # type: ignore[operator]
        assert planned(replace(workload, target=named_target(other[1])), monkeypatch, Heavy).fits
        needed.append(name)
    assert needed == ["RTX 3060", "RTX 3090", "RTX 5090"]


def test_a_limit_on_the_host_is_raised_and_no_gpu_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_workload(400, allow=EXACT)
    target = replace(made.target, kind="cpu", runtime=None, name="CPU", margin_bytes=safety_margin_bytes(400 * MIB))
    workload = replace(made, target=target, limits=Limits())
    [line] = [line for line in refused(workload, monkeypatch) if "would do" in line]
    found = re.match(r"A limit of ([\d.]+) (MiB|GiB) would do", line)
    assert found is not None
    capacity = round(float(found[1]) * {"MiB": MIB, "GiB": 1 << 30}[found[2]])
    raised = replace(target, capacity_bytes=capacity + MIB, margin_bytes=safety_margin_bytes(capacity))
    assert planned(replace(workload, target=raised), monkeypatch).fits


def _of(mib: int, workload: Workload) -> Any:
    return replace(workload.target, capacity_bytes=mib * MIB)


def test_host_memory_is_advised_where_it_helps_and_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = made_workload(800, allow=EXACT, limits=Limits(host_bytes=100 * MIB), samples_per_step=1)
    [line] = [line for line in refused(workload, monkeypatch) if "--host-memory" in line]
    assert line.startswith("With 512.00 MiB (`--host-memory`) it would fit: 32-true + paged_optimizer")
    assert planned(replace(workload, limits=Limits(host_bytes=512 * MIB)), monkeypatch).fits
    tiny = replace(workload, target=_of(300, workload))
    assert not any("--host-memory" in line for line in refused(tiny, monkeypatch))


class ByLength(MadeTraceStore):
    """Activations grow with the length of the sequences."""

    def passes(self, setting: Setting, choice: str) -> ModelProfile:
        found = super().passes(setting, choice)
        share = self.workload.batch["input_ids"].size(1) / 16
        assert found.slopes is not None
        slopes = found.slopes * share
        sizes = found.events.sizes - (2 * (found.slopes - slopes)).astype(found.events.sizes.dtype)
        return replace(found, events=replace(found.events, sizes=sizes), slopes=slopes)


def test_a_shorter_sequence_is_advised_that_fits_and_only_if_activations_are_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states_alone = made_workload(300, allow=EXACT, limits=Limits(host_bytes=0))
    assert not any("Sequences" in line for line in refused(states_alone, monkeypatch, ByLength))
    nearly = replace(states_alone, target=_of(1260, states_alone))
    [line] = [line for line in refused(nearly, monkeypatch, ByLength) if "Sequences" in line]
    found = re.match(r"Sequences of (\d+) tokens instead of 16 would fit: ", line)
    assert found is not None
    assert 1 <= int(found[1]) < 16
    shorter = {"input_ids": nearly.batch["input_ids"][:, : int(found[1])]}
    assert planned(replace(nearly, batch=shorter), monkeypatch, ByLength).fits


def test_permissions_are_named_with_what_fits_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told from weights and states alone, and the rest was not worked out."""
    workload = made_workload(1000, allow=EXACT, limits=Limits(host_bytes=0), samples_per_step=1)
    [line] = [line for line in refused(workload, monkeypatch) if "--allow" in line]
    found = re.match(
        r"`--allow ([\w,]+)` \(`allow` of `MemFit`\) would let in .*, which needs .* and fits. It changes .+\.", line
    )
    assert found is not None
    allow = frozenset(found[1].split(","))
    assert planned(replace(workload, allow=allow), monkeypatch).fits
    assert not any("--allow" in line for line in refused(replace(workload, target=_of(40, workload)), monkeypatch))
