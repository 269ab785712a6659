"""`ReplaceOptimizer`: another kind of optimizer in the place of the module's own."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from lightning_memfit.optim.exchange import exchange
from lightning_memfit.optim.families import family_named
from lightning_memfit.optim.replace import replace_optimizers
from lightning_memfit.techniques.base import TechniqueCallback
from lightning_memfit.techniques.wrapping import wrap_method


class ReplaceOptimizer(TechniqueCallback):
    """Exchange what `configure_optimizers` returns for an optimizer of another family, groups and schedulers kept.

    Adafactor keeps slightly over 4 bytes per parameter less than Adam, Lion keeps half as many states, torchao's have 8
    or 4 bits. Learning rates and schedules stay as the module set them. Other hyper-parameters carry over where they
    mean the same, else they must be given or dropped; nothing is guessed (`optim.exchange`).

    For 8-bit or paged states of Lion, AdEMAMix, RMSprop, SGD and AdamW put `Optimizer8bit` after this callback.

    Args:
        name: Family and class, for example `torch.Adafactor`, `bitsandbytes.Lion`, `torchao.AdamW4bit`.
        options: Hyper-parameters of the new optimizer, for every group, and its `fused` or `foreach`.
        drop: Hyper-parameters of the module's optimizer to give up where the new one has no counterpart.

    Raises:
        ModuleNotFoundError: If the family's package is not installed.
        ValueError: If there is no such family, or an option sets the learning rate.
    """

    def __init__(self, name: str, options: dict[str, Any] | None = None, drop: list[str] | None = None) -> None:
        super().__init__()
        family = family_named(name)
        if find_spec(family.package) is None:
            raise ModuleNotFoundError(
                f"ReplaceOptimizer({name!r}) needs {family.package}: pip install {family.package}"
            )
        if "lr" in (options or {}):
            raise ValueError("`options.lr` would override the module's groups and schedules. Set the rate there.")
        self.name = name
        self.options = dict(options or {})
        self.drop = list(drop or [])

    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wrap `configure_optimizers`."""

        def configure(inner: Callable[[], Any]) -> Any:
            return replace_optimizers(inner(), self._convert)

        self.on_restore(wrap_method(pl_module, "configure_optimizers", configure))

    def _convert(self, optimizer: Optimizer) -> Optimizer:
        converted = exchange(optimizer, self.name, self.options, self.drop)
        note = family_named(self.name).note
        self.announce(f"{type(optimizer).__name__} -> {self.name}" + (f"; {note}" if note else ""))
        return converted
