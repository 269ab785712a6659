"""What hand-written training code chooses in addition to the task: optimizer and activation checkpointing."""

from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.peer import Options
from benchmarks.peers.task import Task, named


@dataclass(frozen=True)
class ByHand:
    """The choices of a hand-written run."""

    gradient_checkpointing: bool = False
    """Whether to call the Hugging Face model's own method for it."""
    optimizer: str = "torch.optim.AdamW"
    """Import path of the optimizer's class."""
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    """Arguments other than parameters and learning rate."""

    @classmethod
    def read(cls, peer: str, options: Options) -> "ByHand":
        """Read the options of a row.

        Raises:
            ValueError: If an option is unknown.
        """
        try:
            return cls(**options)
        except TypeError as error:
            raise ValueError(f"`options` of peer {peer!r}: {error}.") from error

    def make_optimizer(self, network: Any, task: Task) -> Any:
        """Make the optimizer over all parameters, at the task's learning rate and without decay."""
        make = named("options.optimizer", self.optimizer)
        return make(network.parameters(), lr=task.learning_rate, weight_decay=0.0, **self.optimizer_options)

    def import_code(self) -> None:
        """Import what the optimizer needs."""
        named("options.optimizer", self.optimizer)

    def prepare(self, network: Any) -> Any:
        """Turn on activation checkpointing if it is chosen."""
        if self.gradient_checkpointing:
            network.gradient_checkpointing_enable()
        return network
