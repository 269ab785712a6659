"""Train a row with torch alone, in a loop written by hand."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint

from benchmarks.peers.by_hand import ByHand
from benchmarks.peers.peer import Options, Peer
from benchmarks.peers.task import Task
from benchmarks.peers.watch import Watch


def train(task: Task, options: Options, watch: Watch) -> None:
    """Train with a plain loop.

    Options are those of other hand-written runs, and `checkpoint`: the dotted name of a list of blocks, such as
    `transformer.h`, each of which then runs under `torch.utils.checkpoint`.
    """
    rest = dict(options)
    blocks = rest.pop("checkpoint", None)
    by_hand = ByHand.read("torch", rest)
    by_hand.import_code()
    task.import_model_code()
    batches = task.batches()
    watch.starts()
    network = by_hand.prepare(task.network())
    if blocks is not None:
        _checkpoint_each(network, blocks)
    optimizer = by_hand.make_optimizer(network, task)
    watch.follow(network, optimizer)
    run_steps(task, watch, batches, network, optimizer)
    watch.ends()


def run_steps(
    task: Task, watch: Watch, batches: Iterator[Any], network: Any, optimizer: Any, follow_optimizer: bool = True
) -> None:
    """Run the loop, in which gradients are freed right after each update.

    Args:
        task: What is trained.
        watch: Measures it.
        batches: Micro-batches without end.
        network: A Hugging Face model.
        optimizer: Its optimizer.
        follow_optimizer: Whether tensors are tracked in the optimizer's step, which compiled ones refuse.
    """
    for _ in range(task.max_steps):
        with watch.step():
            for _ in range(task.accumulate):
                batch = watch.next_batch(batches)
                with task.autocast():
                    loss = network(**batch).loss / task.accumulate
                loss.backward()
                watch.clock.batch_ends(batch, loss)
                del loss
            with nullcontext() if follow_optimizer else watch.unfollowed():
                optimizer.step()
            optimizer.zero_grad()


def _checkpoint_each(network: Any, name: str) -> None:
    for block in network.get_submodule(name):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


PEER = Peer((), "torch", train)
