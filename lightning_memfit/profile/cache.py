"""Profiles kept on disk, keyed by everything a trace depends on: code, settings, batch and library versions."""

import hashlib
import inspect
import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_memfit.profile.record import ModelProfile

_PACKAGES = ("torch", "lightning", "transformers", "bitsandbytes", "torchmetrics", "lightning-memfit")


def default_cache_folder() -> Path:
    """`$MEMFIT_CACHE`, else `$XDG_CACHE_HOME/lightning-memfit`, else `~/.cache/lightning-memfit`."""
    named = os.environ.get("MEMFIT_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-memfit"


class ProfileCache:
    """A folder of profiles.

    Args:
        folder: Where they lie; made when the first is saved.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or default_cache_folder()) / "profiles"

    def load(self, key: str) -> ModelProfile | None:
        """The profile of a key; None where there is none that can be read."""
        path = self.folder / f"{key}.npz"
        if not path.is_file():
            return None
        try:
            return ModelProfile.load(path)
        except (ValueError, KeyError, OSError, TypeError):
            return None  # written by another version or cut off: traced anew and replaced

    def save(self, key: str, profile: ModelProfile) -> None:
        """Keep a profile."""
        profile.save(self.folder / f"{key}.npz")


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
    """Hash of the modules that make traces, so that a change of ours makes old profiles stale."""
    digest = hashlib.sha256()
    for folder in ("profile", "memory", "checkpointing", "techniques", "optim"):
        for path in sorted((Path(__file__).parents[1] / folder).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def text_key(*parts: object) -> str:
    """Key of plain values, together with the library versions and our own code."""
    digest = hashlib.sha256()
    for part in (*parts, sorted(package_versions().items()), own_code()):
        digest.update(repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def profile_key(module: Any, batch: Any, *settings: Any) -> str:
    """Key of a module, a batch and trace settings.

    Covers the source files of every class in the module, all simple attributes, shapes and dtypes of its tensors, and
    the batch's shapes and integer values.
    """
    parts: list[object] = [_describe_module(module), _describe(batch, values=True)]
    parts += [_describe(value, values=True) for value in settings]
    return text_key(*parts)


def _describe_module(module: Any) -> object:
    parts: list[object] = []
    sources: dict[str, str] = {}
    for name, child in module.named_modules():
        for kind in type(child).__mro__:
            path = _source_file(kind)
            if path and path not in sources:
                sources[path] = _file_hash(path)
        attributes = [(key, _describe(value)) for key, value in vars(child).items() if key not in _NOT_STATE]
        parts.append((name, type(child).__qualname__, attributes))
    for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
        parts.append((name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad))
    return parts, sorted(sources.values())


_NOT_STATE = {"_parameters", "_buffers", "_modules", "_trainer", "_fabric", "_compiler_ctx", "_jit_is_scripting"}


def _source_file(kind: type) -> str | None:
    module = inspect.getmodule(kind)
    path = getattr(module, "__file__", None)
    # torch, lightning and transformers are covered by their versions
    return path if path and not any(f"{os.sep}{name}{os.sep}" in path for name in ("torch", "lightning")) else None


@cache
def _file_hash(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return path


def _describe(value: Any, values: bool = False) -> object:
    """A stable text for settings; tensors by shape and dtype, with `values` also by integer contents."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        config = Path(value, "config.json") if isinstance(value, str) and 0 < len(value) < 1000 else None
        return (value, _file_hash(str(config))) if config is not None and config.is_file() else value
    if hasattr(value, "untyped_storage"):
        contents = ""
        if values and not value.is_floating_point() and value.device.type != "meta":
            contents = hashlib.sha256(value.cpu().numpy().tobytes()).hexdigest()
        return tuple(value.shape), str(value.dtype), contents
    if hasattr(value, "items"):
        return [(str(key), _describe(item, values)) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_describe(item, values) for item in value]
    if callable(value) and hasattr(value, "__code__"):
        closure = [_describe(cell.cell_contents) for cell in value.__closure__ or ()]
        return value.__qualname__, hashlib.sha256(value.__code__.co_code).hexdigest(), closure, repr(value.__defaults__)
    if hasattr(value, "to_diff_dict"):
        return _describe(value.to_dict())
    if hasattr(value, "named_modules"):
        return type(value).__qualname__
    if hasattr(value, "__dict__"):
        return type(value).__qualname__, [(key, _describe(item, values)) for key, item in vars(value).items()]
    return repr(value) if " at 0x" not in repr(value) else type(value).__qualname__
