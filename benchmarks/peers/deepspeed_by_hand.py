"""Train a row with DeepSpeed's engine, configured by hand, in the loop of its tutorials."""

import copy
import os
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from benchmarks.peers.peer import Options, Peer
from benchmarks.peers.task import Task
from benchmarks.peers.watch import Watch

_OWN = ("gradient_checkpointing",)
_ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
_HALF = {"bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16"}
"""DeepSpeed's section for each precision; it keeps half-precision weights, and a float32 copy in the optimizer."""


def train(task: Task, options: Options, watch: Watch) -> None:
    """Train with DeepSpeed's engine.

    Options are DeepSpeed's configuration; batch sizes, precision and learning rate are the task's. Without `optimizer`
    the engine gets torch's AdamW. `gradient_checkpointing` turns on that of the Hugging Face model.
    """
    if task.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.update(_ONE_PROCESS | {"MASTER_PORT": str(find_free_network_port())})
    import deepspeed

    config = configuration(task, options)
    deepspeed.init_distributed(dist_backend="gloo" if task.device.type == "cpu" else "nccl")
    task.import_model_code()
    batches = task.batches()
    watch.starts()
    watch.sees_device = task.device.type != "cpu" or not _offloads(config)
    with watch.ledger:  # the engine makes its flat buffers only here
        network = task.network()
        if options.get("gradient_checkpointing"):
            network.gradient_checkpointing_enable()
        given = {} if "optimizer" in config else {"optimizer": _adamw(network, task)}
        engine, *_ = deepspeed.initialize(model=network, config=config, **given)
    watch.follow(engine.module, engine.optimizer)
    for _ in range(task.max_steps):
        with watch.step():
            for _ in range(task.accumulate):
                batch = watch.next_batch(batches)
                loss = engine(**batch).loss
                engine.backward(loss)
                watch.clock.batch_ends(batch, loss / task.accumulate)
                del loss
                engine.step()
    watch.ends()


def configuration(task: Task, options: Options) -> dict[str, Any]:
    """Return the engine's configuration: the row's options, with what the task decides."""
    config = {name: copy.deepcopy(value) for name, value in options.items() if name not in _OWN}
    config |= {
        "train_micro_batch_size_per_gpu": task.loader.batch_size,
        "gradient_accumulation_steps": task.accumulate,
        "gradient_clipping": 0.0,  # DeepSpeed 0.19 clips at 1.0 unless told otherwise; nobody else does
        "steps_per_print": 10**9,
    }
    if task.precision in _HALF:
        config[_HALF[task.precision]] = {"enabled": True}
    if "optimizer" in config:
        parameters = {"lr": task.learning_rate, "weight_decay": 0.0, **config["optimizer"].get("params", {})}
        config["optimizer"] = {**config["optimizer"], "params": parameters}
    return config


def _offloads(config: dict[str, Any]) -> bool:
    zero = config.get("zero_optimization", {})
    return "offload_optimizer" in zero or "offload_param" in zero


def _adamw(network: torch.nn.Module, task: Task) -> torch.optim.Optimizer:
    return torch.optim.AdamW(network.parameters(), lr=task.learning_rate, weight_decay=0.0, fused=True)


PEER = Peer(("deepspeed",), "lightning-memfit[deepspeed]", train)
