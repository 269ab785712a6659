"""What hand-written training code chooses beside the task: optimizer and activation checkpointing."""

from dataclasses import dataclass, field
from typing import Any

from lightning_memfit.bench.peers.peer import Options, check_options
from lightning_memfit.bench.peers.task import Task, named


@dataclass(frozen=True)
class ByHand:
    """The choices of a hand-written run."""

    gradient_checkpointing: bool = False
    """Call the Hugging Face model's own method for it."""
    optimizer: str = "torch.optim.AdamW"
    """Import path."""
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    """Arguments beside parameters and learning rate."""

    @classmethod
    def read(cls, peer: str, options: Options) -> "ByHand":
        """From the options of a row.

        Raises:
            ValueError: If an option is unknown.
        """
        check_options(peer, options, ("gradient_checkpointing", "optimizer", "optimizer_options"))
        return cls(**options)

    def make_optimizer(self, network: Any, task: Task) -> Any:
        """The optimizer over all parameters, at the task's learning rate and without decay."""
        make = named("options.optimizer", self.optimizer)
        return make(network.parameters(), lr=task.learning_rate, weight_decay=0.0, **self.optimizer_options)

    def import_code(self) -> None:
        """Import what the optimizer needs."""
        named("options.optimizer", self.optimizer)

    def prepare(self, network: Any) -> Any:
        """Turn activation checkpointing on, where it is chosen."""
        if self.gradient_checkpointing:
            network.gradient_checkpointing_enable()
        return network
