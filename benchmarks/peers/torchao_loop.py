"""Train a row with torchao's optimizers in a hand-written loop."""

import os

from benchmarks.peers.by_hand import ByHand
from benchmarks.peers.peer import Options, Peer
from benchmarks.peers.task import Task
from benchmarks.peers.torch_loop import run_steps
from benchmarks.peers.watch import Watch
from lightning_memfit.bench.record import UnsupportedError
from lightning_memfit.memory.kind import DeviceKind

_OFFLOADING = "torchao.optim.CPUOffloadOptimizer"


def train(task: Task, options: Options, watch: Watch) -> None:
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
    by_hand.import_code()
    task.import_model_code()
    batches = task.batches()
    watch.starts()
    network = by_hand.prepare(task.network())
    optimizer = by_hand.make_optimizer(network, task)
    watch.follow(network, None if on_host else optimizer)
    run_steps(task, watch, batches, network, optimizer, follow_optimizer=False)
    watch.ends()


PEER = Peer(("torchao",), "lightning-memfit[torchao]", train)
