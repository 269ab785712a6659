"""`ActivationCheckpointing`: recompute blocks in the backward pass instead of keeping their activations."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import lightning.pytorch as pl
from torch import nn
from typing_extensions import override

from lightning_memfit.checkpointing import apply as checkpointing
from lightning_memfit.checkpointing.blocks import find_blocks, select_blocks
from lightning_memfit.checkpointing.policies import Choice, Keep, Mode, check_mode, choices_for
from lightning_memfit.checkpointing.recompute import in_trace
from lightning_memfit.techniques.core.callback import TechniqueCallback, describe
from lightning_memfit.techniques.core.facts import Run, run_of
from lightning_memfit.techniques.core.technique import CallbackSpec, Options, Technique

if TYPE_CHECKING:
    from lightning_memfit.profile.record import ModelProfile
    from lightning_memfit.techniques.checkpointing_budget import ResolvedBudget
    from lightning_memfit.techniques.core.cost import Cost


class ActivationCheckpointing(TechniqueCallback):
    """Checkpoint the repeated blocks of the module: exact gradients, less memory, up to a third more time.

    With a budget, each block gets its own choice, so that the step stays within the budget at the least extra time.
    The plan is made when `fit` begins, from traces of the step on one real batch. Where no process can be had for these
    traces, every block is recomputed, and a warning says so.

    Args:
        mode: `full` (keep only each block's inputs), `every` (one block in `every`), `selective` (keep also the outputs
            named by `keep`), `offload` (keep everything, in pinned host memory), `offload_inputs` (recompute each block
            from inputs in pinned host memory) or `none`.
        every: With mode `every`: checkpoint one block in this many.
        keep: With mode `selective`: `attention` (fused kernels' outputs), `matmul` (products with weights) or both.
        blocks: Class name, or dotted names of blocks or of their containers; by default they are found by structure.
        choices: Instead of a mode, one of `none`, `full`, `keep_attention`, `keep_matmul`, `keep_matmul_attention`,
            `offload`, `offload_inputs` for each block, as a plan gives them.
        budget: Instead of a mode: the peak of the whole step (`6GiB`; on CUDA `torch.cuda.max_memory_allocated`), the
            share of its activations at the peak that may stay (`40%`), or `auto` for all the memory that the device has
            left (on the CPU, up to the limit of a `MemoryLimit`).

    Attributes:
        resolved: The plan made for the budget of the current or last run, if there is one.

    Raises:
        ValueError: If the arguments do not fit together.
    """

    def __init__(
        self,
        mode: Mode = "full",
        every: int | None = None,
        keep: Sequence[Keep] = (),
        blocks: str | Sequence[str] | None = None,
        choices: Sequence[Choice] | None = None,
        budget: str | int | None = None,
    ) -> None:
        super().__init__()
        check_mode(mode, every, tuple(keep))
        if choices is not None and mode != "full":
            raise ValueError(f"`choices` replaces a mode; leave `mode={mode!r}` out.")
        if budget is not None and (mode != "full" or choices is not None):
            raise ValueError(f"`budget={budget!r}` chooses for each block by itself: leave mode and choices out.")
        self.budget = None if budget is None else check_budget(budget)
        self.resolved: ResolvedBudget | None = None
        self.mode = mode
        self.every = every
        self.keep = tuple(keep)
        self.blocks = blocks
        self.choices = None if choices is None else tuple(choices)
        self._applied: checkpointing.AppliedCheckpointing | None = None

    @property
    @override
    def depends_on_depth(self) -> bool:
        """Whether some blocks are checkpointed differently from others."""
        return self.choices is not None or self.budget is not None or self.mode == "every"

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Make the plan for a budget, then apply."""
        if stage == "fit" and self.budget is not None:
            if not self.in_trace:
                self.refuse_unsupported(run_of(trainer, pl_module))
            self._resolve(trainer, pl_module)
        super().setup(trainer, pl_module, stage)

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Checkpoint once the module is complete, and not yet wrapped by the strategy."""
        self.when_complete(pl_module, lambda: self._checkpoint(pl_module))

    def _checkpoint(self, module: nn.Module) -> None:
        # `EMAWeightAveraging` and Lightning both call `configure_model`.
        if self._applied is not None and self._applied.is_on(module):
            return
        checkpointing.refuse_checkpointed(module)
        groups = select_blocks(module, self.blocks) if self.blocks is not None else find_blocks(module)
        if not groups:
            raise ValueError(f"ActivationCheckpointing: {_NO_BLOCKS}")
        self.on_restore(checkpointing.disable_caches(module))
        blocks = [block for group in groups for block in group.modules]
        applied = self._applied = checkpointing.apply_checkpointing(blocks, self._choices(len(blocks)))
        self.on_restore(partial(setattr, self, "_applied", None))
        self.on_restore(applied.remove)
        found = Counter(group.class_name for group in groups for _ in group.modules)
        self.announce(f"{self._label()}, {describe(found)} found, {applied.num_blocks} checkpointed")

    def _resolve(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the plan, unless this is a copy, inside a trace, of a callback that already has one."""
        assert self.budget is not None
        if not in_trace():  # a measured step makes its own plan, too
            # Traces, which only a budget needs, are most of this package.
            from lightning_memfit.techniques.checkpointing_budget import resolve_budget

            self.restore()
            self.resolved = resolve_budget(self.budget, trainer, pl_module, ActivationCheckpointing, self.blocks)
        elif self.resolved is None:
            raise ValueError(
                f"`budget={self.budget!r}` has no plan yet. Put ActivationCheckpointing before the callback that "
                "predicts the run, or predict it with the `choices` of a plan."
            )

    def _choices(self, num_blocks: int) -> tuple[Choice, ...]:
        if self.resolved is not None:
            return self.resolved.plan.choices
        return self.choices or choices_for(self.mode, num_blocks, self.every, self.keep)

    def _label(self) -> str:
        if self.resolved is not None:
            from lightning_memfit.memory import format_bytes

            plan = self.resolved.plan
            share = 100 * plan.seconds / self.resolved.plain_seconds
            return (
                f"budget {self.budget}: {describe(Counter(plan.choices))}, predicted peak "
                f"{format_bytes(plan.peak_bytes)} of {format_bytes(self.resolved.limit_bytes)}, {share:.1f} % more time"
            )
        if self.choices is not None:
            return "choices " + describe(Counter(self.choices))
        detail = self.every if self.every is not None else "+".join(self.keep)
        return f"mode {self.mode}{f' ({detail})' if detail else ''}"


def check_budget(budget: str | int) -> str:
    """Normalise a budget: `auto`, a percentage or a size.

    Raises:
        ValueError: If it is none of these.
    """
    text = str(budget).strip()
    if text.endswith("%"):
        try:
            fits = 0 <= float(text[:-1]) <= 100
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(f"`budget={budget!r}` must be a percentage from 0% to 100%, a size such as 6GiB, or auto.")
    elif text != "auto":
        from lightning_memfit.memory import parse_bytes  # which budgets alone need

        parse_bytes(text, "budget")
    return text


# --- technique --------------------------------------------------------------------------------------------------------

_TRAFFIC = 3
"""Bytes moved per byte of recomputed activation: written once, after reading inputs of about twice that size."""

_RECOMPUTED = {"full": 1.0, "offload_inputs": 1.0, "keep_attention": 1.0}
"""Share of a block's matrix products that is recomputed, by choice; 0 by others. Attention's own are a few percent."""


_NO_BLOCKS = "the module has no repeated blocks. Name what to checkpoint with `blocks`, or leave it out."


def unsupported(run: Run, options: Options) -> str | None:
    """Reason and fix, or None if blocks can be checkpointed."""
    if options.get("mode") in ("offload", "offload_inputs") and run.facts.device == "cpu":
        return "on the CPU activations lie in host memory already. Use another mode."
    budget = options.get("budget")
    if budget is not None and run.has("MicroBatching"):
        return f"`budget={budget!r}` is planned for the whole batch, not for micro-batches. Give `choices` or a mode."
    if budget == "auto" and run.facts.device == "cpu" and not run.has("MemoryLimit"):
        return (
            "on the CPU `auto` needs a MemoryLimit callback (or the fragment `memory_limit`), whose limit it keeps. Or "
            "give a size or a percentage, such as 40%."
        )
    if budget is not None and run.strategy != "SingleDeviceStrategy" and not str(budget).endswith("%"):
        return f"`budget={budget!r}`: a trace does not see what {run.strategy} shards. Give a percentage, such as 40%."
    if run.facts.num_blocks == 0 and not options.get("blocks"):
        return _NO_BLOCKS
    return None


def cost(profile: "ModelProfile", options: Options) -> "Cost":
    """Recomputed products and traffic, or bytes that are moved to the host and back during computation."""
    from lightning_memfit.techniques.core.cost import Cost, Work  # which plans alone need

    # A budget without a plan yet counts as the most that it may cost.
    mode, every, keep = options.get("mode", "full"), options.get("every"), tuple(options.get("keep", ()))
    shares = options.get("choices") or choices_for(mode, profile.num_blocks, every, keep)
    blocks = max(1, len(shares))
    kept = profile.events.bytes_kept_by_blocks()
    flops = profile.block_flops.get("forward", 0) * profile.num_blocks
    recomputed = sum(_RECOMPUTED.get(choice, 0.0) for choice in shares) / blocks
    remade = sum(choice not in ("none", "offload") for choice in shares) / blocks
    moved = kept * sum(choice == "offload" for choice in shares) / blocks
    moved += profile.events.bytes_between_blocks() * sum(choice == "offload_inputs" for choice in shares) / blocks
    work = Work(flops=recomputed * flops, device_bytes=remade * _TRAFFIC * kept, host_link_bytes=2.0 * moved)
    return Cost(micro_batch=work, overlap=moved > 0)


def options_for(choices: Sequence[Choice]) -> Options | None:
    """The shortest options that make blocks follow these choices, one per block; None if there is nothing to do."""
    kinds = set(choices)
    if kinds <= {"none"}:
        return None
    if kinds == {"full"}:
        return {}
    if kinds == {"keep_matmul_attention"}:
        return {"mode": "selective", "keep": ["matmul", "attention"]}
    return {"choices": list(choices)}


TECHNIQUE = Technique(
    name="activation_checkpointing",
    kind="checkpointing",
    summary="recomputes repeated blocks in backward, or offloads them, instead of keeping their activations",
    numerics=frozenset({"exact"}),
    callbacks=(CallbackSpec("lightning_memfit.techniques.activation_checkpointing.ActivationCheckpointing"),),
    presets=(
        {"mode": "selective", "keep": ["matmul", "attention"]},
        {"mode": "selective", "keep": ["matmul"]},
        {"mode": "every", "every": 2},
        {},
        {"mode": "offload_inputs"},
        {"mode": "offload"},
    ),
    unsupported=unsupported,
    cost=cost,
    changes_step=False,
)
