"""Which optional packages are installed, and how to install one: the one place that is asked.

Importing this module imports no other package than this one; looking for a package doesn't import it.
"""

from __future__ import annotations

from importlib.util import find_spec

EXTRAS = {
    "wandb": "wandb",
    "deepspeed": "deepspeed",
    "accelerate": "deepspeed",
    "ninja": "deepspeed",
    "datasets": "text",
    "pyarrow": "text",
    "peft": "lora",
    "torchao": "torchao",
    "matplotlib": "plot",
}
"""The extra of ours that installs a package, by the package's name."""

_REQUIRED = {"bitsandbytes": "bitsandbytes>=0.50,<0.51"}
"""What the package itself requires, and may still be missing: it has no build for every platform."""


def is_installed(package: str) -> bool:
    """Whether a package can be imported here, without importing it."""
    try:
        return find_spec(package) is not None
    except ValueError:  # a module that was put together by hand has no specification
        return True


def how_to_install(package: str) -> str:
    """Return the command that installs a package, as it is typed in a shell."""
    name = f"lightning-memfit[{EXTRAS[package]}]" if package in EXTRAS else _REQUIRED.get(package, package)
    return f"pip install {name}" if name == package else f'pip install "{name}"'


def require(package: str, user: str) -> None:
    """Refuse to go on without a package.

    Args:
        package: Name of the package.
        user: What needs it, for the message.

    Raises:
        ModuleNotFoundError: If it is not installed; says what to type.
    """
    if not is_installed(package):
        raise ModuleNotFoundError(f"{user} needs {package}: {how_to_install(package)}", name=package)
