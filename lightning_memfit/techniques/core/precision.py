"""`TechniquePrecision`: the base class of techniques that are precision plugins, and how a Trainer gets them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_memfit.techniques.core.callback import Reversible, TechniqueCallback


class TechniquePrecision(Reversible, HalfPrecision):
    """Weights in bfloat16, of which a technique keeps more than the conversion leaves: `Trainer(plugins=[...])`.

    It is applied when the strategy has the module converted: after all callbacks' `setup` and `configure_model`, and
    before the optimizers are made.
    """

    depends_on_depth = False
    """As of `TechniqueCallback`."""

    def __init__(self) -> None:
        super().__init__()
        HalfPrecision.__init__(self, "bf16-true")

    @override
    def convert_module(self, module: Any) -> Any:
        """Apply the technique to a run that trains, and convert the module."""
        self.restore()
        if isinstance(module, pl.LightningModule) and module.trainer.state.fn == TrainerFn.FITTING:
            self.begin(module.trainer, module)
        return self.convert(module)

    def convert(self, module: Any) -> Any:
        """Convert a module, whether it is to be trained or not."""
        return super().convert_module(module)

    @override
    def teardown(self) -> None:
        """Restore the module, after a run and after an error."""
        self.restore()

    @contextmanager
    def taken_off(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Iterator[None]:
        """As of `TechniqueCallback`: before the model is configured nothing has changed yet."""
        yield


AnyTechnique: TypeAlias = TechniqueCallback | TechniquePrecision


def techniques_of(trainer: pl.Trainer) -> list[AnyTechnique]:
    """The techniques that a Trainer has been given: its callbacks and its precision."""
    given = (*trainer.callbacks, trainer.precision_plugin)  # type: ignore[attr-defined]
    return [one for one in given if isinstance(one, AnyTechnique)]


def split_precision(techniques: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Callbacks, and at most one plugin of precision, as a Trainer takes them."""
    callbacks: list[Any] = []
    plugins: list[Any] = []
    for one in techniques:
        (plugins if isinstance(one, TechniquePrecision) else callbacks).append(one)
    return callbacks, plugins


def trainer_options(techniques: Iterable[Any], precision: Any) -> dict[str, Any]:
    """Options of a Trainer that has techniques: one takes a precision by name, or a plugin of it."""
    callbacks, plugins = split_precision(techniques)
    return {"callbacks": callbacks, **({"plugins": plugins} if plugins else {"precision": precision})}
