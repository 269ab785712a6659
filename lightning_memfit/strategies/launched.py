"""Check arguments, processes, callbacks and optimizers before a strategy starts."""

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn
from torch import distributed, nn
from torch.optim import Optimizer

from lightning_memfit.reliability.rank_watch import watch_ranks
from lightning_memfit.strategies.checkpoint_io import use_atomic_checkpoints
from lightning_memfit.strategies.integrity import gathered

_AVERAGES = (
    "can't average weights under `strategy={}`: checkpoints would hold others than the averages. Train with "
    "`EMAWeightAveraging` under `strategy=memfit_fsdp2`, with `strategy=memfit_ddp`, or without it."
)
STOCHASTIC_AVERAGES = (StochasticWeightAveraging,), _AVERAGES
"""It copies the module in the midst of training, when its parameters are parts."""
AVERAGES = (WeightAveraging, StochasticWeightAveraging), _AVERAGES
"""They copy the module's parameters one by one, where DeepSpeed saves and steps master weights of its own."""


def refuse_callbacks(trainer: Trainer, strategy: str, *refused: tuple[tuple[type, ...], str]) -> None:
    """Refuse callbacks that a strategy can't take."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kinds, words in refused:
            if isinstance(callback, kinds):
                raise MisconfigurationException(f"`{type(callback).__name__}` {words.format(strategy)}")


DIVIDED = {"Lbfgs": "it joins all weights in one vector, and a rank has parts of weights"}
"""Classes that can't step parts of weights, by name, and why."""

FLAT = {
    **DIVIDED,
    **dict.fromkeys(
        ("Adafactor", "Came", "Galoreadamw", "Lamb", "Lars", "Muon", "Shampoo", "Sm3", "Soap"),
        "it steps by rows or by the norm of a weight, and DeepSpeed gives it one vector for many weights",
    ),
    "Adagrad": "DeepSpeed constructs another one, which has the first group's options and no schedule",
}
"""Classes that DeepSpeed 0.19 makes step otherwise than the weights one by one, and why."""


def check_optimizer(optimizer: Optimizer, strategy: str, refused: dict[str, str]) -> None:
    """Refuse an optimizer that would train other weights than on one device. Subclasses count as what they derive from.

    Raises:
        MisconfigurationException: If it is known to do so.
    """
    names = (kind.__name__.capitalize() for kind in type(optimizer).__mro__)
    because = next((refused[name] for name in names if name in refused), None)
    if because is not None:
        raise MisconfigurationException(
            f"`{type(optimizer).__name__}` would give other weights than on one device under `strategy={strategy}`: "
            f"{because}. Train with `strategy=memfit_ddp`, or choose another optimizer."
        )


def may_accumulate(trainer: Trainer) -> bool:
    """Whether a step may take several backward passes: by the Trainer, by a schedule, or by micro-batches."""
    kinds = (kind for one in trainer.callbacks for kind in type(one).__mro__)  # type: ignore[attr-defined]
    accumulating = any(
        kind is GradientAccumulationScheduler or kind.__module__.startswith("lightning_memfit.fitting.")
        for kind in kinds
    )
    return accumulating or trainer.accumulate_grad_batches > 1


def is_traced() -> bool:
    """Whether the run is that of a trace, in which tensors have no values, and ranks answer at once."""
    return distributed.is_initialized() and distributed.get_backend() == "fake"


def synchronize_batch_norms(trainer: Trainer, module: nn.Module) -> None:
    """Let batch norms take their statistics over all ranks if `Trainer(sync_batchnorm=True)` asks for it.

    Lightning does so under DDP alone. It has to be done before a strategy takes hold of the module's layers, and stays.
    On the CPU, torch refuses the first step.
    """
    connector: Any = trainer._accelerator_connector
    layer_sync, is_fitting = connector._layer_sync, trainer.state.fn == TrainerFn.FITTING
    if layer_sync is not None and trainer.world_size > 1 and is_fitting and not is_traced():  # a trace is on the CPU
        layer_sync.apply(module)


class EqualBatches:
    """Base of strategies whose ranks tell each other when one of them fails, so that none waits for it forever.

    They refuse loaders with more batches on some ranks than on others, which would wait for these without end.
    Lightning divides samples to be predicted without repeating any. Loaders whose length isn't known can't be compared.

    Raises:
        MisconfigurationException: When a stage begins, on all ranks alike.
    """

    def _configure_launcher(self: Any) -> None:
        """Refuse a Trainer that knows of other processes than torchrun, SLURM or another launcher has started.

        Lightning asks the environment only where it starts processes itself.
        """
        environment = self.cluster_environment
        if environment is not None and environment.creates_processes_externally:
            environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        super()._configure_launcher()  # type: ignore[misc]

    def setup_environment(self: Any) -> None:
        """Start the processes' communication, and watch who leaves it."""
        use_atomic_checkpoints(self)
        super().setup_environment()  # type: ignore[misc]
        watch_ranks(self)

    def waiting_ranks(self, evaluates: bool) -> int | None:
        """How many neighbouring ranks wait for each other in a stage; None for all.

        Args:
            evaluates: Whether nothing is trained in it.
        """
        return None

    def on_train_start(self) -> None:
        """Compare the loaders of training."""
        self._compare(False)

    def on_validation_start(self) -> None:
        """Compare the loaders of what trains nothing."""
        self._compare(True)

    on_test_start = on_predict_start = on_validation_start

    def _compare(self: Any, evaluates: bool) -> None:
        trainer = self.lightning_module.trainer
        if trainer.world_size == 1 or is_traced():
            return
        stage, argument, counts = _batches(trainer)
        found: list[list[float]] = gathered(counts)
        size = self.waiting_ranks(evaluates) or len(found)
        for begin in range(0, len(found), size):
            for of_loader in zip(*found[begin : begin + size], strict=True):
                least, most = min(of_loader), max(of_loader)
                if least < most < float("inf"):
                    few, many = (begin + of_loader.index(one) for one in (least, most))
                    elsewhere = " Or predict on one device or with `strategy=memfit_ddp`." * trainer.predicting
                    raise MisconfigurationException(
                        f"Rank {few} has {least} batches for {stage}, rank {many} has {most}: under `strategy="
                        f"{self.strategy_name}` the ranks would wait for each other without end. Choose a batch size "
                        f"with which all have equally many; `Trainer({argument}={least})` leaves out what only some "
                        f"have.{elsewhere}"
                    )


def _batches(trainer: Trainer) -> tuple[str, str, list[float]]:
    """What the Trainer does now, the argument that limits it, and the number of batches of each of its loaders."""
    if trainer.predicting:
        return "prediction", "limit_predict_batches", trainer.num_predict_batches
    if trainer.testing:
        return "the test", "limit_test_batches", trainer.num_test_batches
    if trainer.sanity_checking:
        return "validation", "num_sanity_val_steps", trainer.num_sanity_val_batches
    if not trainer.training:
        return "validation", "limit_val_batches", trainer.num_val_batches
    batches: float = trainer.num_training_batches
    if trainer.max_steps > 0:  # the run may end before the ranks part
        batches = min(batches, (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
    return "training", "limit_train_batches", [batches]
