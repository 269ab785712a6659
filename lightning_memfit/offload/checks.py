"""Each thing that would hinder a run with ZeRO-Infinity: plain facts in, a `Finding` with the fix out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_memfit.device.health import Finding
from lightning_memfit.memory import format_bytes
from lightning_memfit.offload.extensions import BuildLock
from lightning_memfit.offload.leftovers import RunState
from lightning_memfit.offload.sizing import AioSettings
from lightning_memfit.offload.traffic import Traffic

MIN_DAYS_OF_ENDURANCE = 30
"""Below this a drive is worn out within a few runs; consumer drives reach it."""

_SECONDS_PER_DAY = 86400


def needed(finding: Finding) -> Finding:
    """What the doctor only notes because not everybody needs it, a run with offloading can't do without."""
    return finding if finding.level == "ok" else replace(finding, level="problem")


def check_parent_folder(folder: str, problem: tuple[str, str] | None) -> Finding:
    """The folder that the user named.

    Args:
        folder: As the user wrote it.
        problem: What is wrong, and the fix; None where nothing is.
    """
    if problem is None:
        return Finding("nvme_path", "ok", f"{folder!r} is a folder that can be written to")
    return Finding("nvme_path", "problem", *problem)


def check_other_runs(states: Sequence[RunState]) -> list[Finding]:
    """Runs that share the drive, what dead ones left, and what can't be told."""
    findings = []
    for state in states:
        size = format_bytes(state.size_bytes)
        if state.is_leftover:
            fix = "nothing to do, the run removes it when it starts"
            findings.append(Finding("leftovers", "note", f"{size} of a run that was killed, in {state.path}", fix))
        elif "still runs" in state.kept_because:
            fix = "its speed and its room are shared; wait for it, or take another drive"
            findings.append(Finding("other run", "note", f"{state.owner} keeps {size} in {state.path}", fix))
        else:
            fix = "look at it, and remove it by hand"
            findings.append(Finding("leftovers", "note", f"{state.path} stays, as {state.kept_because}", fix))
    return findings


def check_build_lock(lock: BuildLock) -> Finding:
    """A lock on kernels, for which a run would wait, for ever if nobody holds it."""
    if lock.holder is not None:
        fix = "nothing to do, this run waits for it"
        return Finding("kernels", "note", f"process {lock.holder} compiles or loads those in {lock.path.parent}", fix)
    found = f"{lock.path} was left by a process that ended while it compiled, and each run would wait for it for ever"
    return Finding("kernels", "problem", found, "remove that file, unless another machine is compiling there")


def check_disk_room(needed_bytes: int, free_bytes: int, reserve_bytes: int) -> Finding:
    """Room for the swap files, and the reserve below which a run stops itself.

    Args:
        needed_bytes: By all ranks on this machine.
        free_bytes: Of the file system, with dead runs' leftovers counted as free.
        reserve_bytes: Of `DiskWatermark`.
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
    """Host or device memory.

    Args:
        name: Which.
        needed_bytes: By the states and buffers of all ranks that share it; activations come on top.
        available_bytes: What is free of it.
        fix: What to do where it doesn't suffice.
    """
    found = f"{format_bytes(needed_bytes)} needed, {format_bytes(available_bytes)} available"
    return Finding(name, "ok", found) if needed_bytes <= available_bytes else Finding(name, "problem", found, fix)


def check_host_memory(
    needed_bytes: int, available_bytes: int, ranks: int, moment: str, parts: Sequence[tuple[str, int]], fix: str
) -> Finding:
    """Host memory at its peak, and what most of it is for, of which a fix follows.

    Args:
        needed_bytes: By all ranks on this machine, beyond what they have now; activations come on top.
        available_bytes: Free, and within the limits of this process's cgroup.
        ranks: On this machine.
        moment: When a rank takes most.
        parts: What for, the largest first, of one rank.
        fix: What to do where it doesn't suffice.
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
    """Buffers for asynchronous I/O, which are locked (`mlock`) and bound by `ulimit -l`.

    DeepSpeed ends the process where the limit is reached, so this has to be known before.

    Args:
        needed_bytes: By one rank.
        limit_bytes: Of each process; None without a limit.
    """
    found = f"buffers of {format_bytes(needed_bytes)}, " + (
        "no limit" if limit_bytes is None else f"limit of {format_bytes(limit_bytes)}"
    )
    if limit_bytes is None or needed_bytes <= limit_bytes:
        return Finding("locked memory", "ok", found)
    fix = "`ulimit -l unlimited`, memlock in /etc/security/limits.conf, or docker --ulimit memlock=-1"
    return Finding("locked memory", "problem", found, fix)


def check_aio_contexts(aio: AioSettings, num_handles: int, used: int, limit: int) -> Finding:
    """Requests that asynchronous I/O may hold in the whole system; beyond that DeepSpeed ends the process.

    Args:
        aio: Settings in use.
        num_handles: Of all ranks on this machine, about four each.
        used: `/proc/sys/fs/aio-nr`.
        limit: `/proc/sys/fs/aio-max-nr`.
    """
    wanted = num_handles * aio.intra_op_parallelism * aio.queue_depth
    found = f"{wanted} requests wanted, {limit - used} of {limit} left"
    if wanted <= limit - used:
        return Finding("aio requests", "ok", found)
    return Finding("aio requests", "problem", found, f"sysctl -w fs.aio-max-nr={2 * (wanted + used)}")


def check_step_time(traffic: Traffic, read_bytes_per_s: float, write_bytes_per_s: float) -> Finding:
    """How long a step's transfers take at least."""
    seconds = traffic.seconds(read_bytes_per_s, write_bytes_per_s)
    found = (
        f"at least {seconds:.1f} s per step for {format_bytes(traffic.read_bytes)} read and "
        f"{format_bytes(traffic.written_bytes)} written"
    )
    return Finding("step time", "ok", found)


def check_endurance(traffic: Traffic, seconds_per_step: float, terabytes_written: float | None) -> Finding:
    """Bytes written per day against what the drive is rated for.

    Args:
        traffic: Of a step.
        seconds_per_step: As fast as the drive allows, the worst case for its life.
        terabytes_written: Rated endurance (TBW); None where the user did not say.
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
