"""Train a row in a loop written by hand, with torch alone or with torchao's optimizers."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint

from benchmarks.peers.peer import Options, Peer
from benchmarks.peers.task import Task, named
from benchmarks.peers.watch import Watch
from lightning_memfit.bench.record import UnsupportedError
from lightning_memfit.memory.kind import DeviceKind

_OFFLOADING = "torchao.optim.CPUOffloadOptimizer"


@dataclass(frozen=True)
class ByHand:
    """What hand-written code chooses in addition to the task: optimizer and activation checkpointing."""

    gradient_checkpointing: bool = False
    """Whether to call the Hugging Face model's own method for it."""
    checkpoint: str = ""
    """Dotted name of a list of blocks, such as `transformer.h`, each of which runs under `torch.utils.checkpoint`."""
    optimizer: str = "torch.optim.AdamW"
    """Import path of the optimizer's class."""
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    """Arguments other than parameters and learning rate."""

    @classmethod
    def read(cls, peer: str, options: Options) -> "ByHand":
        """Read the options of a row, and import what the optimizer needs.

        Raises:
            ValueError: If an option is unknown, or the optimizer can't be imported.
        """
        try:
            by_hand = cls(**options)
        except TypeError as error:
            raise ValueError(f"`options` of peer {peer!r}: {error}.") from error
        named("options.optimizer", by_hand.optimizer)
        return by_hand

    def make_optimizer(self, network: Any, task: Task) -> Any:
        """Make the optimizer over all parameters, at the task's learning rate and without decay."""
        make = named("options.optimizer", self.optimizer)
        return make(network.parameters(), lr=task.learning_rate, weight_decay=0.0, **self.optimizer_options)

    def prepare(self, network: Any) -> Any:
        """Turn on activation checkpointing if it is chosen."""
        if self.gradient_checkpointing:
            network.gradient_checkpointing_enable()
        for block in network.get_submodule(self.checkpoint) if self.checkpoint else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return network


def train_torch(task: Task, options: Options, watch: Watch) -> None:
    """Train with a plain loop."""
    _train(task, ByHand.read("torch", options), watch)


def train_torchao(task: Task, options: Options, watch: Watch) -> None:
    """Train with one of torchao's optimizers, by default `AdamW8bit`.

    The optimizer's step is compiled, which torch refuses while tensors are tracked: states are counted, but the step's
    temporaries aren't.
    """
    # The cache on disk mixes up torchao's kinds of states.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(task.folder / "inductor"))
    by_hand = ByHand.read("torchao", {"optimizer": "torchao.optim.AdamW8bit", **options})
    on_host = by_hand.optimizer == _OFFLOADING
    if on_host and not DeviceKind.of(task.device).has_own_memory:
        raise UnsupportedError(f"`{by_hand.optimizer}` moves tensors between a GPU and the host: it needs CUDA.")
    _train(task, by_hand, watch, on_host, follow_step=False)


def _train(task: Task, by_hand: ByHand, watch: Watch, on_host: bool = False, follow_step: bool = True) -> None:
    """Run the loop, in which gradients are freed right after each update.

    Args:
        task: What is trained.
        by_hand: How.
        watch: Measures it.
        on_host: Whether the optimizer's states are in host memory.
        follow_step: Whether tensors are tracked in the optimizer's step, which compiled ones refuse.
    """
    task.import_model_code()
    batches: Iterator[Any] = task.batches()
    watch.starts()
    network = by_hand.prepare(task.network())
    optimizer = by_hand.make_optimizer(network, task)
    watch.follow(network, None if on_host else optimizer)
    for _ in range(task.max_steps):
        with watch.step():
            for _ in range(task.accumulate):
                batch = watch.next_batch(batches)
                with task.autocast():
                    loss = network(**batch).loss / task.accumulate
                loss.backward()
                watch.clock.batch_ends(batch, loss)
                del loss
            with nullcontext() if follow_step else watch.unfollowed():
                optimizer.step()
            optimizer.zero_grad()
    watch.ends()


TORCH = Peer((), "torch", train_torch)
TORCHAO = Peer(("torchao",), "lightning-memfit[torchao]", train_torchao)
