"""`AttentionKernel`: which implementation of attention Hugging Face models use."""

from typing import Any

import lightning.pytorch as pl
from torch import nn
from typing_extensions import override

from lightning_memfit.techniques.core.callback import TechniqueCallback
from lightning_memfit.techniques.core.facts import Run
from lightning_memfit.techniques.core.model_facts import keep_attention, outermost_pretrained
from lightning_memfit.techniques.core.technique import CallbackSpec, Options, Technique


class AttentionKernel(TechniqueCallback):
    """Make Hugging Face models compute attention with `scaled_dot_product_attention`, which never stores all scores.

    The result differs only by the order of additions. After the run the models have their own implementation again.

    Args:
        implementation: Name that `set_attn_implementation` takes: `sdpa`, `eager`, or that of an installed kernel.
    """

    def __init__(self, implementation: str = "sdpa") -> None:
        super().__init__()
        self.implementation = implementation

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set the implementation once the models are complete."""
        self.when_complete(pl_module, lambda: self._set(pl_module))

    def _set(self, module: nn.Module) -> None:
        models: list[Any] = outermost_pretrained(module)
        if not models:
            raise ValueError(f"AttentionKernel: the module {_NO_MODEL}")
        for model in models:
            self.on_restore(keep_attention(model))
            reason: object = "it keeps its own."
            try:
                model.set_attn_implementation(self.implementation)
            except (ImportError, ValueError) as error:
                reason = error
            if model.config._attn_implementation != self.implementation:
                raise ValueError(
                    f"AttentionKernel: {type(model).__name__} cannot switch to {self.implementation!r}: {reason} Leave "
                    "AttentionKernel out for this model."
                )
        self.announce(f"{', '.join(type(model).__name__ for model in models)}: {self.implementation}")


_NO_MODEL = (
    "holds no Hugging Face model whose attention could be set. Call `scaled_dot_product_attention` in the module, or "
    "leave it out."
)


def unsupported(run: Run, options: Options) -> str | None:
    """Reason and fix, or None if attention can be set."""
    facts, wanted = run.facts, str(options.get("implementation", "sdpa"))
    if facts.device == "cpu" and (wanted.startswith("flash_attention") or "/" in wanted):
        return f"`implementation={wanted!r}`: its kernels are for CUDA, and this is the CPU. Use sdpa."
    if facts.hugging_face is False:
        return f"the module {_NO_MODEL}"
    if wanted in ("sdpa", "eager") and facts.attention is not None and wanted not in facts.attention:
        return f"the module's model cannot switch its attention to {wanted!r}. Leave it out for this model."
    return None


TECHNIQUE = Technique(
    name="attention_kernel",
    kind="attention",
    summary="fused attention in Hugging Face models, without whole attention scores",
    numerics=frozenset({"exact"}),
    callbacks=(CallbackSpec("lightning_memfit.techniques.attention.AttentionKernel"),),
    unsupported=unsupported,
    changes_step=False,
)
