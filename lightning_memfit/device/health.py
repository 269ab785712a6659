"""What of a machine's software would hinder training: each check takes plain facts and gives a `Finding` with a fix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]
"""`note`: absent, but only some features need it. `problem`: hinders training on what is here."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    level: Level
    found: str
    """What is there."""
    fix: str = ""
    """What to do, empty where nothing is wrong."""

    def __post_init__(self) -> None:
        if (self.level == "ok") == bool(self.fix):
            raise ValueError(
                f"`fix={self.fix!r}` of {self.name}: say one for a note or problem, none where all is well."
            )


def hinders(findings: list[Finding]) -> bool:
    """Whether any finding is a problem."""
    return any(finding.level == "problem" for finding in findings)


def check_driver(driver: str | None, num_cards: int) -> Finding:
    """A card without a driver is a problem, a machine without a card is not.

    Args:
        driver: Version of the NVIDIA kernel driver.
        num_cards: NVIDIA display controllers on the PCI bus.
    """
    if driver is not None:
        return Finding("driver", "ok", f"NVIDIA {driver}")
    if num_cards:
        return Finding(
            "driver",
            "problem",
            f"{num_cards} NVIDIA card(s), no driver",
            "install the NVIDIA driver (Ubuntu: `ubuntu-drivers install`), then reboot; in a container start it with "
            "`--gpus all`",
        )
    return Finding("driver", "note", "no NVIDIA card", "none needed for the CPU")


def check_nvml(error: str | None, driver: str | None) -> Finding:
    """NVML tells memory use by process.

    Args:
        error: What its initialisation said; None where it worked.
        driver: Version of the kernel driver.
    """
    if error is None:
        return Finding("NVML", "ok", "answers")
    if driver is None:
        return Finding("NVML", "note", "no driver to talk to", "none needed for the CPU")
    mismatch = "mismatch" in error.lower()
    fix = "reboot, or reload the kernel module: library and driver differ" if mismatch else "pip install nvidia-ml-py"
    return Finding("NVML", "problem", error, fix)


def check_cuda(build: str | None, available: bool, driver: str | None) -> Finding:
    """Torch must be built for the card that is here, and see it.

    Args:
        build: CUDA version torch was built for; None for a CPU build.
        available: `torch.cuda.is_available()`.
        driver: Version of the kernel driver.
    """
    if available:
        return Finding("CUDA", "ok", f"runtime {build}, a device is usable")
    if driver is None:
        return Finding("CUDA", "note", f"torch built for {build or 'the CPU'}, no GPU", "none needed for the CPU")
    if build is None:
        return Finding(
            "CUDA",
            "problem",
            "a GPU is here, but torch is a CPU build",
            "reinstall torch from the CUDA index: pip install torch --index-url https://download.pytorch.org/whl/cu128",
        )
    return Finding(
        "CUDA",
        "problem",
        f"torch for CUDA {build} sees no device under driver {driver}",
        "update the driver to one for this CUDA, check CUDA_VISIBLE_DEVICES, and in a container start it with "
        "`--gpus all`",
    )


def check_bitsandbytes(error: str | None, backend: str, cuda: bool) -> Finding:
    """8-bit optimizers need its native library for the device.

    Args:
        error: Why it can't be imported; None where it can.
        backend: Name of the native library, empty where it runs without.
        cuda: Whether a CUDA device is usable.
    """
    if error is not None:
        return Finding("bitsandbytes", "problem", error, "pip install 'bitsandbytes>=0.49,<0.51'")
    if backend and (not cuda or "cuda" in backend):
        return Finding("bitsandbytes", "ok", backend)
    wanted = "CUDA" if cuda else "CPU"
    return Finding(
        "bitsandbytes",
        "problem",
        f"no native library for {wanted} (found {backend or 'none'})",
        "reinstall it for this platform, or set BNB_CUDA_VERSION to a version it ships; `python -m bitsandbytes` says "
        "which",
    )


def check_tool(name: str, path: str | None, needed_for: str, fix: str) -> Finding:
    """A program or library that only some features need.

    Args:
        name: Of the tool.
        path: Where it is; None where it isn't.
        needed_for: Which features.
        fix: How to get it.
    """
    if path:
        return Finding(name, "ok", path)
    return Finding(name, "note", f"not found; needed for {needed_for}", fix)


def check_version(name: str, installed: str | None, wanted: str, accepted: bool) -> Finding:
    """A library within the range that this package was tested with.

    Args:
        name: Of the distribution.
        installed: Its version; None where it is missing.
        wanted: The range.
        accepted: Whether the version lies in it.
    """
    if installed is not None and accepted:
        return Finding(name, "ok", installed)
    return Finding(name, "problem", installed or "not installed", f"pip install '{name}{wanted}'")


def check_versions(installed: Mapping[str, str | None], requirements: list[str]) -> list[Finding]:
    """Check every required distribution.

    Args:
        installed: Version by distribution; None where it is missing.
        requirements: As package metadata states them; those of extras are left out.
    """
    from packaging.requirements import Requirement

    findings = []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed.get(requirement.name)
        accepted = version is not None and requirement.specifier.contains(version, prereleases=True)
        findings.append(check_version(requirement.name, version, str(requirement.specifier), accepted))
    return findings
