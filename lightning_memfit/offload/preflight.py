"""`preflight`: everything that would end or corrupt a run with ZeRO-Infinity, looked at before any weight is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_memfit.device.capacity import check_direct_io, check_disk_speed
from lightning_memfit.device.examine import build_tools
from lightning_memfit.device.health import Finding
from lightning_memfit.device.probe import probe_host
from lightning_memfit.device.storage import measure_storage
from lightning_memfit.memory import GIB, MIB, MemoryBreakdown, Tier, format_bytes
from lightning_memfit.offload import checks
from lightning_memfit.offload.extensions import build_locks
from lightning_memfit.offload.folder import parent_problem
from lightning_memfit.offload.leftovers import RunState, find_runs
from lightning_memfit.offload.peaks import (
    Moments,
    device_peak_bytes,
    host_peak,
    host_peak_bytes,
    host_tiers,
    largest_parts,
)
from lightning_memfit.offload.sizing import InfinitySizes
from lightning_memfit.offload.traffic import Traffic
from lightning_memfit.offload.watermark import free_bytes

SAMPLE_BYTES = 64 * MIB
"""Written to a drive and read back, to know its speed."""
_HANDLES_PER_RANK = 4  # two each of the parameters' and of the pipelined optimizer's swapper
_HOST_FIX = "end other programs, raise the container's limit, or divide the states among more machines"
_DEVICE_FIX = "cut its largest layer into tiles (`tiling_hints`), make the reduce bucket smaller, or use more ranks"


@dataclass(frozen=True)
class Needs:
    """What a run asks of one machine."""

    states: MemoryBreakdown
    """Of one rank, from `estimate.zero_infinity`."""
    sizes: InfinitySizes
    traffic: Traffic
    """Of all ranks on this machine."""
    ranks: int = 1
    """On this machine."""
    device_free_bytes: int | None = None
    """Of a rank's accelerator; None on the CPU, where the device's share is host memory."""
    reserve_bytes: int = GIB
    """What stays free on the drive; the run's `DiskWatermark`."""
    endurance_tbw: float | None = None
    """Terabytes that the drive is rated to be written; None where unknown."""
    moments: Moments = field(default_factory=dict)
    """Of one rank, from `estimate.zero_moments`. Without, only the states are asked for."""

    @property
    def on_cpu(self) -> bool:
        """Whether the device's memory is the host's."""
        return self.device_free_bytes is None


@dataclass(frozen=True)
class PreflightReport:
    """What was found. `problems` is empty where the run can start."""

    nvme_path: str
    findings: tuple[Finding, ...]
    states: MemoryBreakdown
    """Needed by one rank."""
    seconds_per_step: float | None = None
    """A bound from below, by the transfers; None where the drive could not be measured."""
    host_peak_bytes: int | None = None
    """The most host memory that a rank takes, without activations; on the CPU with what is the device's elsewhere."""

    @property
    def problems(self) -> tuple[str, ...]:
        """One sentence each, with the fix."""
        return tuple(sentence(finding) for finding in self.findings if finding.level == "problem")

    def require(self) -> None:
        """Refuse a run that can't succeed.

        Raises:
            RuntimeError: Naming every problem.
        """
        if self.problems:
            lines = "\n".join(f"- {problem}" for problem in self.problems)
            raise RuntimeError(f"Offloading to {self.nvme_path} would fail:\n{lines}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "nvme_path": self.nvme_path,
            "problems": list(self.problems),
            "findings": [asdict(finding) for finding in self.findings],
            "bytes_per_rank": self.states.to_dict(),
            "seconds_per_step": self.seconds_per_step,
            "host_peak_bytes": self.host_peak_bytes,
        }

    def table(self) -> str:
        """Bytes by tier, then one line for each finding."""
        rows = [(str(tier), format_bytes(self.states.total(tier)), "per rank") for tier in Tier]
        rows += [(f.name, f.level, f"{f.found} ({f.fix})" if f.fix else f.found) for f in self.findings]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)


def preflight(nvme_path: str | Path, needs: Needs) -> PreflightReport:
    """Look at the folder, the drive, and all memory; a file of 64 MiB is written there and removed.

    Nothing else is changed: no folder is made, and what dead runs left is only counted.

    Args:
        nvme_path: The folder that the user named.
        needs: Of the run.
    """
    problem = parent_problem(nvme_path)
    findings = [checks.check_parent_folder(str(nvme_path), problem)]
    findings += [checks.needed(finding) for finding in build_tools()]
    findings += [checks.check_build_lock(lock) for lock in build_locks()]
    seconds = None
    if problem is None:
        drive, seconds = _drive(nvme_path, needs)
        findings += drive
    peak = host_peak_bytes(needs.moments, needs.on_cpu) if needs.moments else None
    return PreflightReport(str(nvme_path), (*findings, *_memory(needs)), needs.states, seconds, peak)


def sentence(finding: Finding) -> str:
    """A finding that is not `ok` in one sentence."""
    return f"{finding.name}: {finding.found}; {finding.fix}."


def _drive(folder: str | Path, needs: Needs) -> tuple[list[Finding], float | None]:
    runs = find_runs(folder)
    findings = checks.check_other_runs(runs)
    free = free_bytes(folder) + _reclaimed(runs)
    needed = needs.ranks * needs.states.total(Tier.DISK)
    findings.append(checks.check_disk_room(needed, free, needs.reserve_bytes))
    if free_bytes(folder) < 2 * SAMPLE_BYTES:
        return findings, None  # no room to try anything
    speed = measure_storage(folder, SAMPLE_BYTES)
    findings.append(checks.needed(check_direct_io(str(folder), speed.direct_error)))
    findings.append(check_disk_speed(speed.write_bytes_per_s, speed.read_bytes_per_s))
    seconds = needs.traffic.seconds(speed.read_bytes_per_s, speed.write_bytes_per_s)
    findings.append(checks.check_step_time(needs.traffic, speed.read_bytes_per_s, speed.write_bytes_per_s))
    findings.append(checks.check_endurance(needs.traffic, seconds, needs.endurance_tbw))
    return findings, seconds


def host_memory(moments: Moments, on_cpu: bool, ranks: int, available_bytes: int, fix: str) -> Finding:
    """Whether all ranks of this machine find the host memory of their largest moment.

    Args:
        moments: Of one rank.
        on_cpu: Whether the device's memory is the host's.
        ranks: On this machine.
        available_bytes: For all of them.
        fix: What to do where it doesn't suffice.
    """
    moment, peak = host_peak(moments, on_cpu)
    needed = ranks * host_peak_bytes(moments, on_cpu)
    parts = largest_parts(peak, host_tiers(on_cpu))
    return checks.check_host_memory(needed, available_bytes, ranks, moment, parts, fix)


def _memory(needs: Needs) -> list[Finding]:
    host, moments = probe_host(), needs.moments or {"kept": needs.states}
    findings = []
    if needs.device_free_bytes is not None:
        device = device_peak_bytes(moments)
        findings.append(checks.check_memory("device memory", device, needs.device_free_bytes, _DEVICE_FIX))
    findings.append(host_memory(moments, needs.on_cpu, needs.ranks, host.available_bytes, _HOST_FIX))
    findings.append(checks.check_pinned(needs.states.total(Tier.PINNED_HOST), host.memlock_limit_bytes))
    used, limit = (int(Path(f"/proc/sys/fs/{name}").read_text()) for name in ("aio-nr", "aio-max-nr"))
    handles = needs.ranks * _HANDLES_PER_RANK
    return [*findings, checks.check_aio_contexts(needs.sizes.aio, handles, used, limit)]


def _reclaimed(runs: Sequence[RunState]) -> int:
    return sum(state.size_bytes for state in runs if state.is_leftover)
