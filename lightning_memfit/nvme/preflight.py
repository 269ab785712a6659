"""`preflight`: check everything that would end or corrupt a ZeRO-Infinity run, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_memfit.device.health import Finding, build_tools, check_direct_io, check_disk_speed
from lightning_memfit.device.host import probe_host
from lightning_memfit.device.storage import measure_storage
from lightning_memfit.estimate.deepspeed import DeepSpeedMemory, DeepSpeedRun, deepspeed_memory
from lightning_memfit.estimate.deepspeed_sizes import AioSettings
from lightning_memfit.memory import GIB, MIB, MemoryBreakdown, Tier, format_bytes
from lightning_memfit.nvme.extensions import BuildLock, build_locks
from lightning_memfit.nvme.folder import RunState, find_runs, parent_problem
from lightning_memfit.nvme.traffic import Traffic
from lightning_memfit.nvme.watermark import free_bytes

# --- checks: plain facts in, a `Finding` with the fix out -------------------------------------------------------------


MIN_DAYS_OF_ENDURANCE = 30
"""A drive with a lower endurance wears out within a few runs; consumer drives can be this low."""


def must_be_ok(finding: Finding) -> Finding:
    """Turn a warning into a failure: the doctor only notes it, but a run with offloading can't do without it."""
    return finding if finding.level == "ok" else replace(finding, level="problem")


def check_parent_folder(folder: str, problem: tuple[str, str] | None) -> Finding:
    """Check the folder that the user named.

    Args:
        folder: Path as the user wrote it.
        problem: What is wrong, and the fix; None if nothing is.
    """
    if problem is None:
        return Finding("nvme_path", "ok", f"{folder!r} is a folder that can be written to")
    return Finding("nvme_path", "problem", *problem)


def check_other_runs(states: Sequence[RunState]) -> list[Finding]:
    """Check for runs that share the drive, leftovers of dead runs, and folders whose state is unknown."""
    findings = []
    for state in states:
        size = format_bytes(state.size_bytes)
        if state.is_stale:
            fix = "nothing to do, the run removes it when it starts"
            findings.append(Finding("stale runs", "note", f"{size} of a run that was killed, in {state.path}", fix))
        elif "still runs" in state.kept_because:
            fix = "its speed and its room are shared; wait for it, or take another drive"
            findings.append(Finding("other run", "note", f"{state.owner} keeps {size} in {state.path}", fix))
        else:
            fix = "look at it, and remove it by hand"
            findings.append(Finding("stale runs", "note", f"{state.path} stays, as {state.kept_because}", fix))
    return findings


def check_build_lock(lock: BuildLock) -> Finding:
    """Check a lock on kernels, for which a run would wait, forever if nobody holds it."""
    if lock.holder is not None:
        found = f"process {lock.holder} compiles or loads those in {lock.path.parent}"
        return Finding("kernels", "note", found, "nothing to do, this run waits for it")
    found = f"{lock.path} was left by a process that ended while it compiled, and each run would wait for it for ever"
    return Finding("kernels", "problem", found, "remove that file, unless another machine is compiling there")


def check_disk_room(needed_bytes: int, free_bytes: int, reserve_bytes: int) -> Finding:
    """Check the room for the swap files, and the reserve below which a run stops itself.

    Args:
        needed_bytes: Bytes for all ranks on this machine.
        free_bytes: Free bytes of the file system, with leftovers of dead runs counted as free.
        reserve_bytes: Reserve of `DiskWatermark`.
    """
    found = f"{format_bytes(needed_bytes)} of swap files and {format_bytes(reserve_bytes)} of reserve"
    if needed_bytes + reserve_bytes <= free_bytes:
        return Finding("disk space", "ok", f"{found}, {format_bytes(free_bytes)} are free")
    missing = format_bytes(needed_bytes + reserve_bytes - free_bytes)
    return Finding(
        "disk space",
        "problem",
        f"{found}, but only {format_bytes(free_bytes)} are free",
        f"free {missing} more, name a larger drive, or offload only the optimizer or only the parameters to it",
    )


def check_memory(name: str, needed_bytes: int, available_bytes: int, fix: str) -> Finding:
    """Check host or device memory.

    Args:
        name: Name of the memory.
        needed_bytes: Bytes of the states and buffers of all ranks that share it; activations come on top.
        available_bytes: Free bytes.
        fix: What to do if it isn't enough.
    """
    found = f"{format_bytes(needed_bytes)} needed, {format_bytes(available_bytes)} available"
    return Finding(name, "ok", found) if needed_bytes <= available_bytes else Finding(name, "problem", found, fix)


def check_host_memory(
    needed_bytes: int, available_bytes: int, ranks: int, moment: str, parts: Sequence[tuple[str, int]], fix: str
) -> Finding:
    """Check host memory at its peak, and name what most of it is for, from which a fix follows.

    Args:
        needed_bytes: Bytes for all ranks on this machine, beyond what they have now; activations come on top.
        available_bytes: Free bytes within the limits of this process's cgroup.
        ranks: Number of ranks on this machine.
        moment: When a rank takes most.
        parts: Uses of the memory of one rank, the largest first.
        fix: What to do if it isn't enough.
    """
    most = ", ".join(f"{format_bytes(size)} {name}" for name, size in parts)
    by = "1 rank" if ranks == 1 else f"{ranks} ranks"
    found = (
        f"{format_bytes(needed_bytes)} needed by {by} in the moment {moment!r} (each {most}), and activations; "
        f"{format_bytes(available_bytes)} free"
    )
    if needed_bytes <= available_bytes:
        return Finding("host memory", "ok", found)
    return Finding("host memory", "problem", f"{found}, {format_bytes(needed_bytes - available_bytes)} too few", fix)


def check_pinned(needed_bytes: int, limit_bytes: int | None) -> Finding:
    """Check buffers for asynchronous I/O, which are locked (`mlock`) and limited by `ulimit -l`.

    DeepSpeed ends the process if the limit is reached, so this has to be known before.

    Args:
        needed_bytes: Bytes of one rank.
        limit_bytes: Limit of each process; None without a limit.
    """
    found = f"buffers of {format_bytes(needed_bytes)}, " + (
        "no limit" if limit_bytes is None else f"limit of {format_bytes(limit_bytes)}"
    )
    if limit_bytes is None or needed_bytes <= limit_bytes:
        return Finding("locked memory", "ok", found)
    fix = "`ulimit -l unlimited`, memlock in /etc/security/limits.conf, or docker --ulimit memlock=-1"
    return Finding("locked memory", "problem", found, fix)


def check_aio_contexts(aio: AioSettings, num_handles: int, used: int, limit: int) -> Finding:
    """Check the requests that asynchronous I/O may hold in the whole system; beyond that DeepSpeed ends the process.

    Args:
        aio: Settings in use.
        num_handles: Handles of all ranks on this machine, about four each.
        used: Value of `/proc/sys/fs/aio-nr`.
        limit: Value of `/proc/sys/fs/aio-max-nr`.
    """
    wanted = num_handles * aio.intra_op_parallelism * aio.queue_depth
    found = f"{wanted} requests wanted, {limit - used} of {limit} left"
    if wanted <= limit - used:
        return Finding("aio requests", "ok", found)
    return Finding("aio requests", "problem", found, f"sysctl -w fs.aio-max-nr={2 * (wanted + used)}")


def check_step_time(traffic: Traffic, read_bytes_per_s: float, write_bytes_per_s: float) -> Finding:
    """Report the least time that a step's transfers take."""
    seconds = traffic.seconds(read_bytes_per_s, write_bytes_per_s)
    found = (
        f"at least {seconds:.1f} s per step for {format_bytes(traffic.read_bytes)} read and "
        f"{format_bytes(traffic.written_bytes)} written"
    )
    return Finding("step time", "ok", found)


def check_endurance(traffic: Traffic, seconds_per_step: float, terabytes_written: float | None) -> Finding:
    """Check bytes written per day against the drive's rating.

    Args:
        traffic: Traffic of a step.
        seconds_per_step: Step time at the drive's full speed, the worst case for its life.
        terabytes_written: Rated endurance (TBW); None if the user did not give it.
    """
    per_day = traffic.written_per_day(seconds_per_step)
    found = f"up to {per_day / 1e12:.1f} TB written per day"
    if terabytes_written is None:
        return Finding("endurance", "note", found, "compare with the TBW of the drive's data sheet (`endurance_tbw`)")
    days = traffic.days_of_endurance(terabytes_written, seconds_per_step)
    found += f", {days:.0f} days for the rated {terabytes_written:g} TB"
    if days >= MIN_DAYS_OF_ENDURANCE:
        return Finding("endurance", "ok", found)
    return Finding("endurance", "note", found, "more micro-batches per step write less; take a drive for servers")


# --- the preflight ----------------------------------------------------------------------------------------------------


SAMPLE_BYTES = 64 * MIB
"""Size of the file written to a drive and read back to measure its speed."""
_HANDLES_PER_RANK = 4  # two of the parameters' swapper, two of the pipelined optimizer's
_HOST_FIX = "end other programs, raise the container's limit, or divide the states among more machines"
_DEVICE_FIX = "cut its largest layer into tiles (`TiledLinear`), make the reduce bucket smaller, or use more ranks"


@dataclass(frozen=True)
class Needs:
    """What a run needs of one machine."""

    run: DeepSpeedRun
    traffic: Traffic
    """Traffic of all ranks on this machine."""
    ranks: int = 1
    """Number of ranks on this machine."""
    device_free_bytes: int | None = None
    """Free bytes of a rank's accelerator; None on the CPU, where the device's share is host memory."""
    reserve_bytes: int = GIB
    """Bytes that stay free on the drive, by the run's `DiskWatermark`."""
    endurance_tbw: float | None = None
    """Terabytes that the drive is rated to be written; None if unknown."""

    @cached_property
    def memory(self) -> DeepSpeedMemory:
        """Memory of one rank."""
        return deepspeed_memory(self.run)


@dataclass(frozen=True)
class PreflightReport:
    """What the preflight found. `problems` is empty if the run can start."""

    nvme_path: str
    findings: tuple[Finding, ...]
    states: MemoryBreakdown
    """Bytes that one rank needs while it computes, without activations."""
    seconds_per_step: float | None = None
    """Lower bound from the transfers; None if the drive could not be measured."""
    host_peak_bytes: int | None = None
    """Most host memory that a rank takes, without activations; on the CPU this includes the device's share."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Problems in one sentence each, with the fix."""
        return tuple(sentence(finding) for finding in self.findings if finding.level == "problem")

    def require(self) -> None:
        """Refuse a run that can't succeed.

        Raises:
            RuntimeError: If there are problems; the message names every one.
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
    """Check the folder, the drive and all memory; a file of 64 MiB is written there and removed.

    Nothing else is changed: no folder is created, and leftovers of dead runs are only counted.

    Args:
        nvme_path: The folder that the user named.
        needs: What the run needs.
    """
    problem = parent_problem(nvme_path)
    findings = [check_parent_folder(str(nvme_path), problem)]
    findings += [must_be_ok(finding) for finding in build_tools()]
    findings += [check_build_lock(lock) for lock in build_locks()]
    seconds = None
    if problem is None:
        drive, seconds = _drive(nvme_path, needs)
        findings += drive
    states, peak = needs.memory.around_passes, needs.memory.host_peak_bytes
    return PreflightReport(str(nvme_path), (*findings, *_memory(needs)), states, seconds, peak)


def sentence(finding: Finding) -> str:
    """Describe a finding that is not `ok` in one sentence."""
    return f"{finding.name}: {finding.found}; {finding.fix}."


def _drive(folder: str | Path, needs: Needs) -> tuple[list[Finding], float | None]:
    runs = find_runs(folder)
    findings = check_other_runs(runs)
    free = free_bytes(folder) + _reclaimed(runs)
    needed = needs.ranks * needs.memory.kept.total(Tier.DISK)
    findings.append(check_disk_room(needed, free, needs.reserve_bytes))
    if free_bytes(folder) < 2 * SAMPLE_BYTES:
        return findings, None  # no room to try anything
    speed = measure_storage(folder, SAMPLE_BYTES)
    findings.append(must_be_ok(check_direct_io(str(folder), speed.direct_error)))
    findings.append(check_disk_speed(speed.write_bytes_per_s, speed.read_bytes_per_s))
    seconds = needs.traffic.seconds(speed.read_bytes_per_s, speed.write_bytes_per_s)
    findings.append(check_step_time(needs.traffic, speed.read_bytes_per_s, speed.write_bytes_per_s))
    findings.append(check_endurance(needs.traffic, seconds, needs.endurance_tbw))
    return findings, seconds


def host_memory(memory: DeepSpeedMemory, ranks: int, available_bytes: int, fix: str) -> Finding:
    """Check that there is enough host memory for the largest moment of all ranks of this machine.

    Args:
        memory: Memory of one rank.
        ranks: Number of ranks on this machine.
        available_bytes: Bytes available to all of them.
        fix: What to do if it isn't enough.
    """
    moment, peak = memory.host_peak
    needed = ranks * memory.host_peak_bytes
    parts = [(f"{tier} {what}".replace("_", " "), size) for tier, what, size in peak if tier in memory.host_tiers]
    largest = sorted(parts, key=lambda part: -part[1])[:3]
    return check_host_memory(needed, available_bytes, ranks, moment, largest, fix)


def _memory(needs: Needs) -> list[Finding]:
    host, memory, findings = probe_host(), needs.memory, []
    assert needs.run.sizes is not None
    if needs.device_free_bytes is not None:
        findings.append(check_memory("device memory", memory.device_peak_bytes, needs.device_free_bytes, _DEVICE_FIX))
    findings.append(host_memory(memory, needs.ranks, host.available_bytes, _HOST_FIX))
    findings.append(check_pinned(memory.kept.total(Tier.PINNED_HOST), host.memlock_limit_bytes))
    used, limit = (int(Path(f"/proc/sys/fs/{name}").read_text()) for name in ("aio-nr", "aio-max-nr"))
    handles = needs.ranks * _HANDLES_PER_RANK
    return [*findings, check_aio_contexts(needs.run.sizes.aio, handles, used, limit)]


def _reclaimed(runs: Sequence[RunState]) -> int:
    return sum(state.size_bytes for state in runs if state.is_stale)
