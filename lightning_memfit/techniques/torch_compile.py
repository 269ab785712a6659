"""`TorchCompile`: torch compiles the repeated blocks of a module, for one run.

Undoing `nn.Module.compile` needs the private attribute `_compiled_call_impl` (torch 2.11 to 2.13), which has no public
counterpart: `tests/contract/test_torch_compile.py` fails if it moves.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import lightning.pytorch as pl
from torch import nn
from typing_extensions import override

from lightning_memfit.checkpointing.blocks import find_blocks, select_blocks
from lightning_memfit.techniques.core.callback import ReversibleCallback, describe
from lightning_memfit.techniques.core.cost import Cost
from lightning_memfit.techniques.core.facts import Run
from lightning_memfit.techniques.core.technique import CallbackSpec, Options, Technique

if TYPE_CHECKING:
    from lightning_memfit.profile.record import ModelProfile


class TorchCompile(ReversibleCallback):
    """Compile each repeated block: elementwise operations fuse, which takes less time and a little less memory.

    Equal blocks share one compilation, which takes seconds; compiling a whole model takes minutes. Names in checkpoints
    stay the same. Results differ by the order of additions, and dropout draws other random numbers.

    Args:
        blocks: As in `ActivationCheckpointing`: class name or dotted names; by default blocks are found by structure.
        mode: Mode of `torch.compile`, for example `max-autotune-no-cudagraphs`.
        dynamic: As in `torch.compile`; None compiles for the first shapes and, once they change, for any shape.

    Raises:
        ValueError: If this run can't be compiled; the message says why.
    """

    def __init__(
        self, blocks: str | Sequence[str] | None = None, mode: str | None = None, dynamic: bool | None = None
    ) -> None:
        super().__init__()
        self.blocks = blocks
        self.mode = mode
        self.dynamic = dynamic

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compile once the module is complete."""
        self.when_complete(pl_module, lambda: self._compile(pl_module))

    def _compile(self, module: nn.Module) -> None:
        groups = select_blocks(module, self.blocks) if self.blocks is not None else find_blocks(module)
        if not groups:
            raise ValueError(f"TorchCompile: the module {_NO_BLOCKS}")
        for group in groups:
            for block in group.modules:
                if block._compiled_call_impl is not None:
                    raise ValueError(f"TorchCompile: {type(block).__name__} is compiled already. Leave it out.")
                self.on_restore(partial(vars(block).pop, "_compiled_call_impl", None))  # the class has None
                block.compile(mode=self.mode, dynamic=self.dynamic)
        counts = {group.class_name: len(group.modules) for group in groups}
        self.announce(f"{describe(counts)} compiled when first called")


_NO_BLOCKS = "has no repeated blocks. Name what to compile with `blocks`: a class, or dotted names such as `model`."


def unsupported(run: Run, options: Options) -> str | None:
    """Reason and fix, or None if blocks can be compiled."""
    facts = run.facts
    if facts.compiler is False:
        needed = "Triton" if facts.device_kind.compiles_with_triton else "a C++ compiler"
        return f"torch.compile finds no {needed}. Install one (pip install triton; apt install g++), or leave it out."
    if run.has("MemoryLimit") and facts.device == "cpu":
        return "compiled code allocates past the simulated device, whose MemoryLimit would not hold. Leave one out."
    if run.strategy.startswith("DeepSpeed"):
        return f"{run.strategy} hooks modules, which stops compilation at every one. Leave it out."
    if facts.num_blocks == 0 and not options.get("blocks"):
        return f"the module {_NO_BLOCKS}"
    return None


_FUSED_SHARE = 0.8
"""Share of a step's elementwise traffic that fusing saves, by speeds of others (docs/benchmarks/sharded_traces.md)."""
_SECONDS_TO_COMPILE = 30.0


def _cost(profile: "ModelProfile", options: Options) -> Cost:
    return Cost(once_seconds=_SECONDS_TO_COMPILE, fused_share=_FUSED_SHARE)


TECHNIQUE = Technique(
    name="torch_compile",
    kind="compile",
    summary="compiles the repeated blocks, so that elementwise operations fuse",
    numerics=frozenset({"exact"}),
    callbacks=(CallbackSpec("lightning_memfit.techniques.torch_compile.TorchCompile"),),
    unsupported=unsupported,
    cost=_cost,
    traced=False,
    changes_step=False,
)
