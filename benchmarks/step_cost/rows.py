"""The rows: a technique of this package, and what a user would write instead, on one small GPT-2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

import lightning_memfit as memfit
from benchmarks.step_cost.count import STEPS, Cost, StepCost
from benchmarks.training import trainer_of

_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_ATTENTION = (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,)
_LAYERS = ["c_attn", "c_proj", "c_fc"]
_SIZES = {"n_layer": 12, "n_embd": 64, "n_head": 2, "vocab_size": 128, "n_positions": 32}


class Model(pl.LightningModule):
    """GPT-2 with 12 blocks and the dropout that it has by default.

    Args:
        change: What a user does by hand once the model is built.
        optimizer: Makes the optimizer; None where steps are made elsewhere.
    """

    def __init__(self, change: Change, optimizer: MakeOptimizer) -> None:
        super().__init__()
        self._optimizer = optimizer
        config = transformers.GPT2Config(**_SIZES, bos_token_id=0, eos_token_id=0, use_cache=False)
        self.model: Any = transformers.GPT2LMHeadModel(config).train()
        change(self.model)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> Optimizer | None:
        return self._optimizer(self.model)


Change = Callable[[Any], object]
MakeOptimizer = Callable[[nn.Module], Optimizer | None]


def _adamw(module: nn.Module) -> Optimizer:
    return AdamW(module.parameters(), lr=1e-4, foreach=True)


@dataclass(frozen=True)
class Side:
    """One run of a row."""

    name: str
    callbacks: Callable[[], list[pl.Callback]] = list
    change: Change = id
    optimizer: MakeOptimizer = _adamw
    trainer: dict[str, Any] = field(default_factory=dict)
    samples: int = 2
    """Of a batch."""
    stance: str = "default"
    """Of torch.compile."""

    def cost(self) -> Cost:
        """Train, and return what a steady step cost."""
        pl.seed_everything(0, verbose=False)
        per_step = self.trainer.get("accumulate_grad_batches", 1)
        counter, module = StepCost(per_step), Model(self.change, self.optimizer)
        ids = torch.randint(0, _SIZES["vocab_size"], (self.samples, _SIZES["n_positions"]))
        batches = [{"input_ids": ids, "labels": ids}] * (STEPS * per_step)
        trainer = trainer_of(counter, *self.callbacks(), max_steps=STEPS, **self.trainer)
        with torch.compiler.set_stance(self.stance):
            trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        return counter.cost()


@dataclass(frozen=True)
class Row:
    """A technique and its peers, the one that does the same first."""

    name: str
    ours: Side
    peers: tuple[Side, ...]


def _row(name: str, make: Callable[[], pl.Callback], *peers: Side, **options: Any) -> Row:
    """A technique beside its peers, by default the run without it; options are those of ours and of that run."""
    return Row(name, Side("ours", lambda: [make()], **options), peers or (Side("plain Lightning", **options),))


def _checkpointing(name: str, *peers: Side, **options: Any) -> Row:
    return _row(name, partial(memfit.ActivationCheckpointing, **options), *peers)


def _by_hand(every: int = 1, **options: Any) -> Change:
    """Wrap the forward pass of blocks by torch's own checkpoint."""

    def change(model: Any) -> None:
        for block in model.transformer.h[::every]:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)

    return change


def _selective(name: str, keep: list[str], kept: tuple[Any, ...]) -> Row:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    peer = Side("torch's selective checkpoint by hand", change=_by_hand(context_fn=contexts))
    return _checkpointing(name, peer, mode="selective", keep=keep)


def _offload(model: Any) -> None:
    """What `mode="offload"` applies; the callback itself refuses the CPU, where all lies in host memory already."""
    from lightning_memfit.checkpointing.apply import apply_checkpointing

    blocks = list(model.transformer.h)
    apply_checkpointing(blocks, ["offload"] * len(blocks))


def _offloaded(model: Any) -> None:
    for block in model.transformer.h:
        block.forward = partial(_on_cpu, block.forward)


def _on_cpu(forward: Any, *args: Any, **kwargs: Any) -> Any:
    with save_on_cpu():
        return forward(*args, **kwargs)


def _reentrant(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": True})


def _torchao(module: nn.Module) -> Optimizer:
    from torchao.optim import _AdamW

    return _AdamW(module.parameters(), lr=1e-4, bf16_stochastic_round=True)  # type: ignore[no-any-return]


def _bitsandbytes(module: nn.Module) -> Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(module.parameters(), lr=1e-4)  # type: ignore[no-any-return]


def _released(module: nn.Module) -> None:
    """As torchtune does: an optimizer for each parameter, stepped as soon as its gradient is there."""
    for parameter in module.parameters():
        optimizer = AdamW([parameter], lr=1e-4, foreach=True)

        def step(_: Tensor, optimizer: Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


def _lora(model: Any) -> None:
    import peft

    peft.inject_adapter_in_model(peft.LoraConfig(r=8, target_modules=_LAYERS), model)


_BF16 = {"trainer": {"precision": "bf16-true"}}

ROWS = (
    _checkpointing(
        "checkpointing",
        Side("torch's checkpoint by hand", change=_by_hand()),
        Side("gradient_checkpointing_enable", change=lambda model: model.gradient_checkpointing_enable()),
        Side("gradient_checkpointing_enable, reentrant", change=_reentrant),
    ),
    _checkpointing(
        "checkpointing, every=2", Side("torch's checkpoint by hand", change=_by_hand(2)), mode="every", every=2
    ),
    _selective("checkpointing, keep=[attention]", ["attention"], _ATTENTION),
    _selective("checkpointing, keep=[matmul]", ["matmul"], _MATMULS),
    _selective("checkpointing, keep=[attention, matmul]", ["attention", "matmul"], _ATTENTION + _MATMULS),
    Row("activations on the host", Side("ours", change=_offload), (Side("save_on_cpu by hand", change=_offloaded),)),
    _row(
        "StochasticRounding",
        memfit.StochasticRounding,
        Side("plain bf16 AdamW", **_BF16),
        Side("torchao's bf16_stochastic_round, eager", optimizer=_torchao, stance="force_eager", **_BF16),
        **_BF16,
    ),
    _row("HostMasterWeights", memfit.HostMasterWeights, Side("plain bf16 AdamW", **_BF16), **_BF16),
    _row(
        "GradientRelease",
        memfit.GradientRelease,
        Side("torchtune's way by hand", change=_released, optimizer=lambda module: None),
    ),
    _row("Optimizer8bit", memfit.Optimizer8bit, Side("bitsandbytes' AdamW8bit by hand", optimizer=_bitsandbytes)),
    _row("Lora", partial(memfit.Lora, target_modules=_LAYERS), Side("peft by hand", change=_lora)),
    _row("MicroBatching, whole batch", partial(memfit.MicroBatching, micro_batch_size=4), samples=4),
    _row(
        "MicroBatching, 4 parts",
        partial(memfit.MicroBatching, micro_batch_size=1),
        Side("Lightning, 4 batches of a quarter", trainer={"accumulate_grad_batches": 4}, samples=1),
        samples=4,
    ),
    *(
        _row(kind.__name__, kind)
        for kind in (
            memfit.ChunkedLoss,
            memfit.ZeroGradAfterStep,
            memfit.MemoryMonitor,
            memfit.DataWaitMonitor,
            memfit.FlopsMonitor,
            memfit.NonFiniteGuard,
            memfit.WholeSteps,
            memfit.OutOfMemoryReport,
        )
    ),
)
