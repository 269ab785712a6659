"""`PlanLock`: a plan saved in a file with everything it depends on. Reading one needs neither torch nor Lightning."""

from __future__ import annotations

import hashlib
import json
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from lightning_memfit.memory.cache_files import opened, sealed

_PACKAGES = ("torch", "lightning", "transformers", "bitsandbytes", "peft", "torchao", "lightning-memfit")
_OWN = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class PlanKey:
    """Everything that a plan depends on, part by part."""

    parts: Mapping[str, str]

    @property
    def digest(self) -> str:
        """Short hash of all parts."""
        return hashlib.sha256(json.dumps(dict(self.parts), sort_keys=True).encode()).hexdigest()[:24]

    def differences(self, other: Mapping[str, str]) -> list[str]:
        """Names of the parts that differ."""
        return sorted(name for name in {*self.parts, *other} if self.parts.get(name) != other.get(name))


def plan_key(recipes: Sequence[Path], overrides: Sequence[str], device: str, limits: Mapping[str, Any]) -> PlanKey:
    """Key of a recipe, its overrides, the requested device and the limits, with versions and our own code.

    Args:
        recipes: Files behind `--config`, in order.
        overrides: The other arguments of the recipe.
        device: The device as the user named it.
        limits: Everything else that a plan depends on.
    """
    return PlanKey(
        {
            "recipe": _digest(path.read_bytes() for path in recipes),
            "overrides": json.dumps(list(overrides)),
            "device": device,
            "limits": json.dumps(dict(limits), sort_keys=True),
            "versions": json.dumps(_versions(), sort_keys=True),
            "lightning-memfit": _digest(path.read_bytes() for path in sorted(_OWN.rglob("*.py"))),
        }
    )


class _Content(BaseModel):
    """What a lock file says, beside its checksum."""

    model_config = ConfigDict(extra="forbid", strict=True)

    key: dict[str, str]
    files: dict[str, str]
    plan: dict[str, Any]


class PlanLock:
    """A file with a plan, its key, and the user's code and data from which it was made.

    Args:
        path: The file; written by `save`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, key: PlanKey) -> tuple[dict[str, Any] | None, list[str]]:
        """The plan, if everything it depends on is unchanged; otherwise None and what changed.

        Raises:
            ValueError: If the file is not a plan lock, or was changed.
        """
        if not self.path.exists():
            return None, []
        try:
            content = opened(json.loads(self.path.read_text(encoding="utf-8")))
            lock = _Content.model_validate(content)
        except (OSError, ValueError, RecursionError) as error:
            reason = "it doesn't say what a lock says" if isinstance(error, ValidationError) else str(error)
            raise ValueError(
                f"`--lock {self.path}` is no lock file of a plan as it was written ({reason}). Name another file, or "
                "delete it to plan anew."
            ) from error
        known, files, plan = lock.key, lock.files, lock.plan
        changed = key.differences(known)
        changed += [path for path, stamp in files.items() if _stamp(Path(path)) != stamp]
        return (None, changed) if changed else (plan, [])

    def save(self, key: PlanKey, plan: Mapping[str, Any], files: Iterable[Path]) -> None:
        """Write a plan with the files from which it was made, replacing an older one.

        Raises:
            OSError: If it can't be written; then the older one stays.
        """
        content = {
            "key": dict(key.parts),
            "files": {str(path): stamp for path in files if (stamp := _stamp(path)) is not None},
            "plan": dict(plan),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.partial")
        try:
            partial.write_text(json.dumps(sealed(content), indent=1) + "\n", encoding="utf-8")
            partial.replace(self.path)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


def imported_user_files() -> list[Path]:
    """Source files of imported modules that no package manager installed: the user's own model and data code."""
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed += [Path(folder).resolve() for folder in (*site.getsitepackages(), site.getusersitepackages())]
    found = set()
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if isinstance(name, str) and name.endswith(".py"):
            path = Path(name).resolve()
            if not any(path.is_relative_to(folder) for folder in (*installed, _OWN)):
                found.add(path)
    return sorted(found)


def paths_in(values: Any) -> list[Path]:
    """Files and folders that a configuration names: data, tokenizers, models."""
    if isinstance(values, Mapping):
        return [path for value in values.values() for path in paths_in(value)]
    if isinstance(values, (list, tuple)):
        return [path for value in values for path in paths_in(value)]
    if isinstance(values, str) and 0 < len(values) < 4096 and ("/" in values or os.sep in values):
        path = Path(values).expanduser()
        return [path.resolve()] if path.exists() else []
    return []


def _stamp(path: Path) -> str | None:
    """Size and time of a file, or of all files directly in a folder; None if there is neither."""
    try:
        if path.is_dir():
            entries = sorted((e.name, e.stat().st_size, e.stat().st_mtime_ns) for e in os.scandir(path) if e.is_file())
            return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:24]
        status = path.stat()
    except OSError:
        return None
    return f"{status.st_size}-{status.st_mtime_ns}"


def _digest(contents: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()[:24]


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
