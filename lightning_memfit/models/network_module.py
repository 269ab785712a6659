"""`NetworkModule`: one network, a cosine schedule and an exact resumption, the base of the modules that fine-tune.

A subclass says what the network is and what its loss. The random state of every rank, on the CPU and on the rank's own
device, is kept in checkpoints, so that dropout and noise continue where they stopped on as many ranks.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from lightning_memfit.memory.collectives import of_every_rank
from lightning_memfit.memory.generators import random_state, set_random_state
from lightning_memfit.models.optimizer import checked_options, cosine_with_warmup, optimizer_class, weight_decay_groups

ARCHITECTURE_KEY = "memfit_architecture"
GENERATION_KEY = "memfit_generation"
_RANDOM_STATE = "memfit_random_state"


# --- the module -------------------------------------------------------------------------------------------------------


class NetworkModule(pl.LightningModule):
    """A network that `make_network` builds once, trained by an optimizer with a cosine schedule.

    Subclasses call `save_hyperparameters` with arguments of these names.

    Args:
        learning_rate: Peak learning rate.
        min_learning_rate_fraction: Learning rate at the end of the cosine, as a fraction of the peak.
        warmup_steps: Optimizer steps of linear warm-up.
        weight_decay: Decay of weight matrices; biases and norms have none.
        optimizer: Name in `torch.optim`, or the import path of an optimizer class.
        optimizer_options: Further arguments of the optimizer, for example `betas: [0.9, 0.95]`.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        learning_rate: float,
        min_learning_rate_fraction: float,
        warmup_steps: int,
        weight_decay: float,
        optimizer: str,
        optimizer_options: dict[str, Any] | None,
    ) -> None:
        super().__init__()
        check_range("learning_rate", learning_rate, 0.0)
        check_range("min_learning_rate_fraction", min_learning_rate_fraction, 0.0, 1.0)
        check_range("warmup_steps", warmup_steps, 0)
        check_range("weight_decay", weight_decay, 0.0)
        self._optimizer_class: Callable[..., torch.optim.Optimizer] = optimizer_class(optimizer)
        self._optimizer_options = checked_options(optimizer_options)
        self.model: Any = None
        self._architecture: Any = None
        self._random_state: dict[str, Any] | None = None

    # --- the network ------------------------------------------------------------------------------------------------

    @abstractmethod
    def read_architecture(self) -> Any:
        """Return the configuration that the network is built from.

        Raises:
            ValueError: If there is none, or it is one of another kind of network.
        """

    @abstractmethod
    def make_network(self) -> nn.Module:
        """Build the network, with its weights, in torch's default dtype (which Lightning's `*-true` precisions set)."""

    @property
    def architecture(self) -> Any:
        """The network's configuration, read once."""
        if self._architecture is None:
            self._architecture = self.read_architecture()
        return self._architecture

    @override
    def configure_model(self) -> None:
        """Build the network in the precision and on the device that Lightning asks for. A second call does nothing."""
        if self.model is None:
            self.model = self.make_network()
            self.model.train()

    @property
    def network(self) -> Any:
        """The network.

        Raises:
            RuntimeError: If it is not built yet.
        """
        if self.model is None:
            raise RuntimeError("The model is built by `configure_model()`, which has not been called yet.")
        return self.model

    # --- steps ------------------------------------------------------------------------------------------------------

    counted = "labels"
    """Entry of a batch that has a row for each sample."""

    @abstractmethod
    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean loss of a batch."""

    @abstractmethod
    def _evaluate(self, stage: str, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Update the metrics of `val` or `test` with a batch, and log them."""

    @override
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the mean loss of a micro-batch."""
        loss = self._loss(batch)
        self.log("train_loss", loss.detach(), prog_bar=True, batch_size=len(batch[self.counted]))
        return loss

    @override
    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Log the loss, and what else is told of a trained network."""
        self._evaluate("val", batch, batch_idx)

    @override
    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Log the loss, and what else is told of a trained network."""
        self._evaluate("test", batch, batch_idx)

    # --- optimization -----------------------------------------------------------------------------------------------

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Make the optimizer (biases and norms undecayed) and a cosine schedule that counts optimizer steps."""
        groups = weight_decay_groups(self, self.hparams["weight_decay"])
        optimizer = self._optimizer_class(groups, lr=self.hparams["learning_rate"], **self._optimizer_options)
        factor = partial(
            cosine_with_warmup,
            warmup_steps=self.hparams["warmup_steps"],
            total_steps=self._total_steps(),
            floor=self.hparams["min_learning_rate_fraction"],
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}

    def _total_steps(self) -> int:
        total = self.trainer.estimated_stepping_batches
        if total == float("inf"):
            raise ValueError("The cosine schedule needs the run's length: set `max_steps` or `max_epochs`.")
        warmup = self.hparams["warmup_steps"]
        if warmup >= total:
            rank_zero_warn(f"`warmup_steps={warmup}`, but the run has {total} optimizer steps: it ends warming up.")
        return int(total)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add architecture (a checkpoint loads without the hub) and every rank's random state (dropout continues).

        What the pretrained model says of generation (ends, suppressed tokens, languages) goes along.

        With several processes all of them have to save, as Lightning does. While an error is handled, each may save
        alone; random numbers of several processes are drawn anew after that.
        """
        config = self.network.config
        checkpoint[ARCHITECTURE_KEY] = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        generation = getattr(self.network, "generation_config", None)
        if generation is not None:
            checkpoint[GENERATION_KEY] = generation.to_dict()
        mine = random_state(self._random_device)
        checkpoint[_RANDOM_STATE] = [mine] if self._trainer is None else of_every_rank(self._trainer, mine)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep this rank's random state for the first batch, if there are as many ranks as before.

        It is left to a callback that finds its own there (`WholeSteps`), which knows of a validation that is repeated.
        """
        callbacks: list[Any] = [] if self._trainer is None else self._trainer.callbacks  # type: ignore[attr-defined]
        if any(getattr(callback, "random_state_key", None) in checkpoint for callback in callbacks):
            return
        states = checkpoint.get(_RANDOM_STATE)
        if isinstance(states, dict):  # of a version that kept the first rank's alone
            states = [states]
        if states and len(states) == self._num_ranks:
            self._random_state = states[self.global_rank]

    @property
    def _random_device(self) -> torch.device:
        return self.device if self._trainer is None else self._trainer.strategy.root_device

    @property
    def _num_ranks(self) -> int:
        return 1 if self._trainer is None else self._trainer.world_size

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Restore the checkpoint's random state once, after everything that draws random numbers at the start."""
        if self._random_state is not None:
            set_random_state(self._random_state, self._random_device)
            self._random_state = None


def check_range(argument: str, value: float, low: float, high: float = float("inf")) -> None:
    """Refuse a number that is out of range.

    Raises:
        ValueError: If it is; infinity always is.
    """
    if not low <= value <= high or math.isinf(value):
        raise ValueError(f"`{argument}={value}` must be between {low} and {high}.")
