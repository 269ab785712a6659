"""Train a row with the Trainer of Hugging Face transformers."""

from typing import Any

from typing_extensions import override

from benchmarks.peers.peer import Options, Peer
from benchmarks.peers.task import Task
from benchmarks.peers.watch import Watch


def train(task: Task, options: Options, watch: Watch) -> None:
    """Train with `transformers.Trainer`; options are `TrainingArguments`.

    Batches come from the task's loader, so that every tool sees them in the same order.
    """
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Watching(TrainerCallback):
        @override
        def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            watch.follow(objects["model"], _inner(objects["optimizer"]))

        @override
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            watch.clock.batch_starts()
            watch.step_starts()

        @override
        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.step_ends()

    class Watched(Trainer):
        @override
        def get_train_dataloader(self) -> Any:
            return task.loader

        @override
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            inputs = watch.on_device(inputs)
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
            watch.clock.batch_ends(inputs, loss)
            return loss

    arguments = TrainingArguments(**training_arguments(task, options))
    task.import_model_code()
    loader = task.loader
    watch.starts()
    trainer = Watched(model=task.network(), args=arguments, train_dataset=loader.dataset, callbacks=[Watching()])
    trainer.train()
    watch.ends()


def training_arguments(task: Task, options: Options) -> dict[str, Any]:
    """Merge the task's arguments with the row's. Clipping is off, as for every tool."""
    return {
        "output_dir": str(task.folder / "hf_trainer"),
        "max_steps": task.max_steps,
        "per_device_train_batch_size": task.loader.batch_size,
        "gradient_accumulation_steps": task.accumulate,
        "learning_rate": task.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "seed": task.seed,
        "bf16": task.precision == "bf16-mixed",
        "fp16": task.precision == "16-mixed",
        "use_cpu": task.device.type == "cpu",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **options,
    }


def _inner(optimizer: Any) -> Any:
    """Return the optimizer that steps: accelerate's wrapper has an optimizer's class but none of its hooks."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


PEER = Peer(("accelerate",), "accelerate", train)
