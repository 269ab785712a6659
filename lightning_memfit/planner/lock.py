"""`PlanLock`: a plan saved in a file with everything it depends on. Reading one needs neither torch nor Lightning."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from lightning_memfit.device.runtime import WORKSPACE_VARIABLES
from lightning_memfit.memory.cache_files import opened, sealed
from lightning_memfit.profile.culprit import owner_of
from lightning_memfit.profile.files import digest_of, file_digest, stamp_of
from lightning_memfit.profile.fingerprint import PROCESSOR_VARIABLES, variables_in

_PACKAGES = ("torch", "lightning", "transformers", "bitsandbytes", "deepspeed", "peft", "torchao", "lightning-memfit")
_OWN = Path(__file__).resolve().parents[1]
"""The package's commands in a checkout; installed, they are in the package."""


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
            "recipe": digest_of(path.read_bytes() for path in recipes),
            "overrides": json.dumps(list(overrides)),
            "device": device,
            "limits": json.dumps(dict(limits), sort_keys=True),
            "versions": json.dumps(_versions(), sort_keys=True),
            "lightning-memfit": digest_of(path.read_bytes() for path in sorted(_OWN.rglob("*.py"))),
        }
    )


class _Content(BaseModel):
    """What a lock file says, beside its checksum."""

    model_config = ConfigDict(extra="forbid", strict=True)

    key: dict[str, str]
    made_from: dict[Literal["modules", "files", "variables"], dict[str, str | None]]
    free_bytes: int | None
    device_bytes: list[int] | None = None
    plan: dict[str, Any]


class PlanLock:
    """A file with a plan, its key, and the user's code, data and environment from which it was made.

    Code is known by the names of its modules, data by their names in the recipe, each with its content, and environment
    variables by a digest of what they hold, as that may be a secret. All are looked up anew where a plan is read, so
    that a plan made in another folder counts only if the same is found here.

    Args:
        path: The file; written by `save`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(
        self,
        key: PlanKey,
        free_bytes: int | None = None,
        room_of: Callable[[Mapping[str, Any]], Sequence[int]] | None = None,
    ) -> tuple[dict[str, Any] | None, list[str]]:
        """The plan, if everything it depends on is unchanged; otherwise None and what changed.

        Args:
            key: What is asked.
            free_bytes: Host memory that is free now, if the user left its limit to that.
            room_of: Returns what is usable now of the devices of this machine for a plan, if it is for these.

        Raises:
            ValueError: If the file is not a plan lock, or was changed.
        """
        if not self.path.exists():
            return None, []
        try:
            content = opened(json.loads(self.path.read_text(encoding="utf-8")))
            lock = _Content.model_validate(content)
            changed = key.differences(lock.key) + Sources(**lock.made_from).changed()
            if free_bytes is not None and not _host_memory_is_alike(lock.plan, lock.free_bytes, free_bytes):
                changed.append("free host memory")
            if room_of is not None and not _device_memory_is_alike(lock.plan, lock.device_bytes, room_of(lock.plan)):
                changed.append("free memory of the device")
        except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
            reason = "it doesn't say what a lock says" if not isinstance(error, OSError) else str(error)
            raise ValueError(
                f"`--lock {self.path}` is no lock file of a plan as it was written ({reason}). Name another file, or "
                "delete it to plan anew."
            ) from error
        return (None, changed) if changed else (lock.plan, [])

    def save(
        self,
        key: PlanKey,
        plan: Mapping[str, Any],
        sources: Sources,
        free_bytes: int | None = None,
        device_bytes: Sequence[int] | None = None,
    ) -> None:
        """Write a plan with what it was made from, replacing an older one.

        Raises:
            OSError: If it can't be written; then the older one stays.
        """
        content = {
            "key": dict(key.parts),
            "made_from": asdict(sources),
            "free_bytes": free_bytes,
            "device_bytes": None if device_bytes is None else list(device_bytes),
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


_MORE_ROOM = 1.25
"""With this much more memory than at planning a faster plan may exist, so that one is looked for."""


def _host_memory_is_alike(plan: Mapping[str, Any], then: int | None, now: int) -> bool:
    """Whether a plan made with so much free host memory is still the one for what is free now.

    Within less memory the fastest plan stays the fastest while it fits.
    """
    if then is None:
        return False
    if not plan["fits"]:
        return now <= then
    tiers = (plan["breakdown"].get(tier, {}) for tier in ("host", "pinned_host"))
    setting = plan["setting"]
    machines = max((options.get("num_nodes", 1) for options in setting["techniques"].values()), default=1)
    needed = setting["world_size"] // machines * sum(sum(tier.values()) for tier in tiers)
    return bool(needed <= now <= _MORE_ROOM * then)


def _device_memory_is_alike(plan: Mapping[str, Any], then: Sequence[int] | None, now: Sequence[int]) -> bool:
    """Whether a plan made with so much usable of each device is still the one for what is usable of them now.

    Any of them may be the one that the plan is for.
    """
    if then is None or len(then) != len(now):
        return False
    if not plan["fits"]:
        return all(one <= before for before, one in zip(then, now, strict=True))
    usable, spare = plan["usable_bytes"], plan["usable_bytes"] - plan["needed_bytes"]
    return all(
        (one >= usable or before - one <= spare) and one <= _MORE_ROOM * before
        for before, one in zip(then, now, strict=True)
    )


_VARIABLES = (*WORKSPACE_VARIABLES, *PROCESSOR_VARIABLES)
"""Environment variables that this package asks for while it plans, beside those that are options of the command."""


@dataclass(frozen=True)
class Sources:
    """Digests of the code, data, variables and measurements that a plan was made from; None for what was not there."""

    modules: Mapping[str, str | None] = field(default_factory=dict)
    """The user's modules by name, as an import would find them."""
    files: Mapping[str, str | None] = field(default_factory=dict)
    """Files and folders as the recipe writes them; relative ones are looked up in the working directory."""
    variables: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables that the user's modules or this package may ask for."""

    @classmethod
    def now(cls, named: Iterable[str] = (), environment: Mapping[str, str] = os.environ) -> Sources:
        """What is imported, what files hold and variables say, at this moment.

        Args:
            named: Files and folders besides the modules' own, of which some may not exist.
            environment: Variables as they were before the user's modules were imported, which may set some.
        """
        modules, files, variables = {}, set(named), set(_VARIABLES)
        for name, path in imported_user_modules().items():
            variables |= _variables_of(path)
            if source_of(name) == path:
                modules[name] = file_digest(path)
            else:  # loaded by its path, not by its name
                files.add(str(path))
        return cls(
            modules,
            {name: stamp_of(name) for name in sorted(files)},
            {name: _variable(name, environment) for name in sorted(variables)},
        )

    def changed(self) -> list[str]:
        """Names of what is different here and now."""
        return [
            *(name for name, digest in self.modules.items() if file_digest(source_of(name)) != digest),
            *(name for name, stamp in self.files.items() if stamp_of(name) != stamp),
            *(f"${name}" for name, digest in self.variables.items() if _variable(name, os.environ) != digest),
        ]


def _variables_of(path: Path) -> frozenset[str]:
    """Variables that a file of Python may ask for."""
    try:
        return variables_in(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return frozenset()


def _variable(name: str, environment: Mapping[str, str]) -> str | None:
    """Digest of what a variable says; None if it isn't set."""
    value = environment.get(name)
    return None if value is None else digest_of([value.encode(errors="surrogateescape")])


# --- the user's modules -----------------------------------------------------------------------------------------------

_NOT_IMPORTED_BY_NAME = ("__main__", "sitecustomize", "usercustomize")
"""The script itself, and what Python runs at its start."""


def imported_user_modules() -> dict[str, Path]:
    """Imported modules that no package manager installed, with their files: the user's own model and data code."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        name = getattr(module, "__file__", None)
        # Modules that torch makes without a file (`torch.ops`) have a relative path that leads nowhere.
        if not isinstance(name, str) or not os.path.isabs(name):
            continue
        if name.endswith(".py") and module_name not in _NOT_IMPORTED_BY_NAME and owner_of(name) == "user":
            path = Path(name).resolve()
            if owner_of(str(path)) == "user":
                found[module_name] = path
    return dict(sorted(found.items()))


def source_of(name: str) -> Path | None:
    """File of a module as an import would find it, without running any code of the module or its packages."""
    folders: Sequence[str] | None = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        spec = _find_spec(".".join(parts[:count]), folders)
        if spec is None:
            return None
        folders = spec.submodule_search_locations
        if folders is None and count < len(parts):
            return None
    return Path(spec.origin).resolve() if spec is not None and spec.origin and spec.has_location else None


def _find_spec(name: str, folders: Sequence[str] | None) -> ModuleSpec | None:
    """Ask the finders of the import system in turn, as an import does; `find_spec` would import the parents."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = None if find is None else find(name, folders)
        if spec is not None:
            return spec
    return None


def names_in(values: Any) -> list[str]:
    """Texts of a configuration that may name files or folders: data, tokenizers, models."""
    if isinstance(values, Mapping):
        return [name for value in values.values() for name in names_in(value)]
    if isinstance(values, (list, tuple)):
        return [name for value in values for name in names_in(value)]
    if not isinstance(values, str) or not 0 < len(values) < 4096 or "\0" in values:
        return []
    # Unlike `Path.exists`, `exists` takes texts that are too long for a path.
    return [values] if "/" in values or os.sep in values or os.path.exists(values) else []


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
