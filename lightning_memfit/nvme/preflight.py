"""`preflight`: check what would end or corrupt a ZeRO-Infinity run, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning_memfit.device.health import Finding, build_tools, check_direct_io
from lightning_memfit.device.host import probe_host
from lightning_memfit.device.storage import measure_storage
from lightning_memfit.estimate.deepspeed import DeepSpeedMemory
from lightning_memfit.memory import MIB, Tier, format_bytes
from lightning_memfit.nvme.folder import find_runs, parent_problem
from lightning_memfit.nvme.watermark import free_bytes

SAMPLE_BYTES = 64 * MIB
"""Size of the file written to a drive and read back to try it out."""

_HOST_FIX = "end other programs, raise the container's limit, or divide the states among more machines"
_DEVICE_FIX = "cut its largest layer into tiles (`TiledLinear`), make the reduce bucket smaller, or use more ranks"
_DISK_FIX = "free some, name a larger drive, or offload only the optimizer or only the parameters to it"
_LOCKED_FIX = "`ulimit -l unlimited`, memlock in /etc/security/limits.conf, or docker --ulimit memlock=-1"


def preflight(
    nvme_path: str | Path,
    memory: DeepSpeedMemory,
    ranks: int = 1,
    device_free_bytes: int | None = None,
    reserve_bytes: int = 0,
) -> tuple[Finding, ...]:
    """Check the folder, the drive and all memory; a file of 64 MiB is written there and removed.

    Nothing else is changed: no folder is created, and leftovers of dead runs are only counted as free.

    Args:
        nvme_path: The folder that the user named.
        memory: What one rank needs.
        ranks: Ranks on this machine.
        device_free_bytes: Free bytes of a rank's accelerator; None on the CPU, where its share is host memory.
        reserve_bytes: Bytes that stay free on the drive, by the run's `disk_reserve`.

    Returns:
        What would make the run fail, with the fix; nothing if it can start.
    """
    findings, problem = [_must_be_ok(finding) for finding in build_tools()], parent_problem(nvme_path)
    if problem is not None:
        findings.append(Finding("nvme_path", "problem", *problem))
    else:
        runs, free = find_runs(nvme_path), free_bytes(nvme_path)
        left = free + sum(run.size_bytes for run in runs if run.is_stale) - reserve_bytes
        findings.append(_enough("disk space", ranks * memory.kept.total(Tier.DISK), left, _DISK_FIX))
        if free >= 2 * SAMPLE_BYTES:  # else there is no room to try anything
            error = measure_storage(nvme_path, SAMPLE_BYTES).direct_error
            findings.append(_must_be_ok(check_direct_io(str(nvme_path), error)))
    host = probe_host()
    if device_free_bytes is not None:
        findings.append(_enough("device memory", memory.device_peak_bytes, device_free_bytes, _DEVICE_FIX))
    findings.append(host_memory(memory, ranks, host.available_bytes, _HOST_FIX))
    if host.memlock_limit_bytes is not None:  # DeepSpeed ends the process where buffers can't be locked
        pinned = memory.kept.total(Tier.PINNED_HOST)
        findings.append(_enough("locked memory", pinned, host.memlock_limit_bytes, _LOCKED_FIX))
    return tuple(finding for finding in findings if finding.level == "problem")


def require(nvme_path: str | Path, problems: Sequence[Finding]) -> None:
    """Refuse a run that can't succeed.

    Raises:
        RuntimeError: If there are problems; the message names every one.
    """
    if problems:
        lines = "\n".join(f"- {sentence(problem)}" for problem in problems)
        raise RuntimeError(f"Offloading to {nvme_path} would fail:\n{lines}")


def sentence(finding: Finding) -> str:
    """Describe a finding that is not `ok` in one sentence."""
    return f"{finding.name}: {finding.found}; {finding.fix}."


def host_memory(memory: DeepSpeedMemory, ranks: int, available_bytes: int, fix: str) -> Finding:
    """Check that there is enough host memory for the largest moment of all ranks of this machine.

    What most of it is for is named, from which a fix follows.

    Args:
        memory: Memory of one rank.
        ranks: Number of ranks on this machine.
        available_bytes: Bytes available to all of them.
        fix: What to do if it isn't enough.
    """
    moment, peak = memory.host_peak
    parts = [(f"{tier} {what}".replace("_", " "), size) for tier, what, size in peak if tier in memory.host_tiers]
    largest = sorted(parts, key=lambda part: -part[1])[:3]
    most = ", ".join(f"{format_bytes(size)} {name}" for name, size in largest)
    by = "1 rank" if ranks == 1 else f"{ranks} ranks"
    what = f" by {by} in the moment {moment!r} (each {most}), and activations"
    return _enough("host memory", ranks * memory.host_peak_bytes, available_bytes, fix, what)


def _enough(name: str, needed_bytes: int, free_bytes: int, fix: str, what: str = "") -> Finding:
    found = f"{format_bytes(needed_bytes)} needed{what}, {format_bytes(max(0, free_bytes))} free"
    return Finding(name, "ok", found) if needed_bytes <= free_bytes else Finding(name, "problem", found, fix)


def _must_be_ok(finding: Finding) -> Finding:
    """Turn a warning into a failure: the doctor only notes it, but a run with offloading can't do without it."""
    return finding if finding.level == "ok" else replace(finding, level="problem")
