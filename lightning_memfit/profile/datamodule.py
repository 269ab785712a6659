"""The data module that a training step may ask through `self.trainer.datamodule`. Imports nothing heavy."""

from typing import Any


def attached_datamodule(module: Any) -> Any:
    """The data module of the trainer that a module belongs to; None without either."""
    return getattr(getattr(module, "_trainer", None), "datamodule", None)


def has_datamodule(datamodule: Any) -> Any:
    """A callback that lets a traced or measured module ask a data module, none of whose hooks is called.

    It stands there from after Lightning would prepare and set it up until before it would be torn down.
    """
    import lightning.pytorch as pl

    class HasDataModule(pl.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            trainer.datamodule = datamodule

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.datamodule = None

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            trainer.datamodule = None

    return HasDataModule()
