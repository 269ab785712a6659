"""Profiles kept on disk, keyed by everything a trace depends on: code, settings, batch and library versions."""

import hashlib
import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_memfit.memory.cache_files import default_cache_folder, tell_once, write_file
from lightning_memfit.profile.fingerprint import describe, settings_of
from lightning_memfit.profile.record import ModelProfile

_log = logging.getLogger(__name__)

_PACKAGES = ("torch", "lightning", "transformers", "bitsandbytes", "torchmetrics", "lightning-memfit")


class ProfileCache:
    """A folder of profiles.

    Args:
        folder: Where they are stored; made when the first is saved.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or default_cache_folder()) / "profiles"

    def load(self, key: str) -> ModelProfile | None:
        """The profile of a key; None where there is none that can be read."""
        path = self.folder / f"{key}.npz"
        try:
            return ModelProfile.load(path) if path.is_file() else None
        except Exception as error:  # cut off, damaged, or made by something else; a file may hold anything
            tell_once(self.folder, f"{path.name} is not used: {error}")
        return None

    def save(self, key: str, profile: ModelProfile) -> None:
        """Keep a profile; a folder that can't be written is said once, and changes nothing else."""
        write_file(self.folder / f"{key}.npz", profile.write)


@cache
def package_versions() -> dict[str, str]:
    """Installed versions of the packages a trace depends on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@cache
def own_code() -> str:
    """Hash of the modules that make traces, so that a change in our code makes old profiles stale."""
    digest = hashlib.sha256()
    for folder in ("profile", "memory", "checkpointing", "techniques", "optim", "strategies"):
        for path in sorted((Path(__file__).parents[1] / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def text_key(*parts: object) -> str:
    """Key of plain values, together with the library versions and our own code."""
    digest = hashlib.sha256()
    for part in (*parts, sorted(package_versions().items()), own_code()):
        digest.update(repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def _switches() -> list[object]:
    """Settings of torch that decide which operators and kernels a step runs."""
    import torch  # other keys are made without it

    return [
        *(str(torch.get_default_device()), str(torch.get_default_dtype()), torch.get_float32_matmul_precision()),
        *(torch.get_deterministic_debug_mode(), torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu"))),
        *(torch.backends.mkldnn.enabled, torch.is_anomaly_enabled()),
        *(read() for name, read in vars(torch.backends.cuda).items() if name.endswith("_sdp_enabled")),
    ]


def profile_key(module: Any, batch: Any, *settings: Any) -> str | None:
    """Key of a module, a batch and trace settings; None if one of them can't be described, so that nothing is kept.

    It covers what `fingerprint.describe` tells of them, torch's settings in this process, and the class and simple
    attributes of a data module that the module can ask. It doesn't cover globals and attributes of classes that a
    program changes after their module was imported, and files and environment variables that the step itself reads.
    """
    try:
        data = getattr(getattr(module, "_trainer", None), "datamodule", None)
        asked = None if data is None else (type(data), settings_of(data))
        return text_key(describe((module, batch, asked, settings)), _switches())
    except Exception as error:  # a user's module, batch or callback may raise anything
        _log.info("The profile is not kept between runs, as the module or batch can't be described: %r", error)
        return None
