"""Every technique there is, in one tuple. A new one is a file with its record, and a line here."""

from difflib import get_close_matches

from lightning_memfit.techniques import (
    activation_checkpointing,
    attention,
    bf16_stochastic_rounding,
    chunked_loss,
    data_loading,
    gradient_release,
    host_master_weights,
    lora,
    micro_batching,
    mixed_precision,
    optimizer,
    optimizer_8bit,
    strategies,
    tf32,
    torch_compile,
    zero_grad_after_step,
)
from lightning_memfit.techniques.core.technique import Technique

TECHNIQUES: tuple[Technique, ...] = (
    lora.LORA,
    lora.QLORA,
    lora.LORA_8BIT,
    optimizer_8bit.OPTIMIZER_8BIT,
    optimizer_8bit.PAGED_OPTIMIZER,
    optimizer_8bit.PAGED_OPTIMIZER_8BIT,
    optimizer.FUSED_ADAMW,
    optimizer.ADAFACTOR,
    optimizer.LION,
    optimizer.LION_8BIT,
    optimizer.TORCHAO_8BIT,
    optimizer.TORCHAO_4BIT,
    optimizer.TORCHAO_FP8,
    mixed_precision.BF16_MIXED,
    mixed_precision.FP16_MIXED,
    mixed_precision.BF16_TRUE,
    bf16_stochastic_rounding.STOCHASTIC_ROUNDING,
    bf16_stochastic_rounding.KAHAN_SUMMATION,
    host_master_weights.TECHNIQUE,
    gradient_release.TECHNIQUE,
    zero_grad_after_step.TECHNIQUE,
    chunked_loss.TECHNIQUE,
    activation_checkpointing.TECHNIQUE,
    attention.TECHNIQUE,
    torch_compile.TECHNIQUE,
    tf32.TECHNIQUE,
    data_loading.TECHNIQUE,
    micro_batching.TECHNIQUE,
)


STRATEGIES: tuple[Technique, ...] = strategies.STRATEGIES
"""Every strategy. They are techniques of one kind, and apart because none is a callback that a trace would show."""

_BY_NAME = {technique.name: technique for technique in (*TECHNIQUES, *STRATEGIES)}


def find_technique(name: str) -> Technique:
    """Look a technique or a strategy up.

    Raises:
        ValueError: If there is none of that name; lists the closest.
    """
    found = _BY_NAME.get(name)
    if found is not None:
        return found
    names = list(_BY_NAME)
    closest = get_close_matches(name, names, n=3, cutoff=0.5) or names
    raise ValueError(f"`technique={name!r}` is not known. Closest: {', '.join(closest)}.")
