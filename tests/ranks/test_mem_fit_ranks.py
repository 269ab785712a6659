"""`MemFit` on two ranks that torchrun or SLURM has started: one plan, made by the first rank."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import free_port
from tests.helpers.strategy_launch import finish, launch_anew, start

PLANNED = "tests.helpers.strategy_scenarios.planned"
TIGHT = 2_600_000
"""Bytes of live tensors of a rank: too few for the plain step of 2 samples."""
STRATEGIES: dict[str, Any] = {
    "memfit_ddp": {},
    "ddp": {"limit": 3_000_000},  # gradients beside the buckets
    "memfit_fsdp2": {},
    "memfit_zero_2": {"limit": 200_000_000},  # the libraries of a process are counted
}
CASES = {
    name: {"scenario": PLANNED, "strategy": name, "devices": 2, "limit": TIGHT, **options}
    for name, options in STRATEGIES.items()
}
TOO_TIGHT = {"scenario": PLANNED, "strategy": "memfit_ddp", "devices": 2, "limit": 200_000}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    options = ("--nproc_per_node=2", "--master_addr=127.0.0.1", f"--master_port={free_port()}")
    folder = tmp_path_factory.mktemp("torchrun")
    cases = CASES | {"too tight": TOO_TIGHT}
    return launch_anew(folder, cases, sys.executable, "-m", "torch.distributed.run", *options)


def check(found: dict[str, Any]) -> None:
    first, second = found["ranks"]
    assert first["error"] == second["error"] == ""
    assert (first["made"], second["made"]) == (1, 0)
    assert first["plan"] == second["plan"]
    assert first["plan"]["setting"]["world_size"] == 2
    assert found["losses"] == pytest.approx(found["plain"], abs=2e-6, rel=0)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_the_first_rank_plans_for_all_under_torchrun(results: dict[str, Any], name: str) -> None:
    check(results[name])
    chosen = results[name]["ranks"][0]["plan"]["setting"]["techniques"]
    assert name.removeprefix("memfit_") in chosen


@pytest.mark.nightly
def test_what_fits_nowhere_ends_every_rank_with_the_reason(results: dict[str, Any]) -> None:
    first, second = (rank["error"] for rank in results["too tight"]["ranks"])
    assert first.startswith("MisconfigurationException: `MemFit`: Nothing fits")
    assert second.startswith("PeerFailed: rank 0 can't plan this run")
    assert first in second


@pytest.mark.nightly
def test_the_first_rank_plans_for_all_under_slurm(tmp_path: Path) -> None:
    job = {"JOB_ID": free_port(), "NTASKS": 2, "NTASKS_PER_NODE": 2, "NNODES": 1, "NODEID": 0}
    job |= {"NODELIST": "localhost", "JOB_NAME": "train"}
    tasks = []
    for rank in range(2):
        variables = {**job, "PROCID": rank, "LOCALID": rank}
        named = [f"SLURM_{name}={value}" for name, value in variables.items()]
        tasks.append(start(tmp_path, {"fsdp2": CASES["memfit_fsdp2"]}, "env", *named, sys.executable))
    check(finish(tmp_path, *tasks)["fsdp2"])
