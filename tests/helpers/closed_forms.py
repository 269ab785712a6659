"""Closed forms of the papers, against which traces are held.

Activations: Korthikanti et al. 2022, equations 1 to 4, table 2. They assume half precision, attention without a fused
kernel, a feed-forward width of four times the hidden size and dropout after attention and feed-forward, with masks of
one byte. Fused attention keeps neither scores nor probabilities, which is the `selective` case.

Model states: Rajbhandari et al. 2020 (ZeRO, table 1 and section 3), Rajbhandari et al. 2021 (ZeRO-Infinity).
"""

from dataclasses import dataclass
from typing import Literal

from lightning_memfit.estimate.deepspeed import OffloadTarget
from lightning_memfit.memory import Category, MemoryBreakdown, Tier
from lightning_memfit.optim.optimizers import StateLayout as OptimizerStates
from lightning_memfit.optim.optimizers import find_optimizer


def layer_activation_bytes(
    micro_batch_size: int,
    sequence_length: int,
    hidden_size: int,
    num_heads: int,
    recompute: Literal["none", "selective", "full"] = "none",
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = False,
) -> int:
    """Bytes that one layer keeps for backward, per rank.

    Args:
        micro_batch_size: Samples, b.
        sequence_length: Tokens per sample, s.
        hidden_size: Width, h.
        num_heads: Attention heads, a.
        recompute: `none` keeps all, `s·b·h·(34 + 5·a·s/h)`; `selective` recomputes attention, `34·s·b·h`; `full`
            keeps the layer's input, `2·s·b·h`.
        tensor_parallel_size: Ranks t that compute the layer together. They divide what lies inside attention and
            feed-forward, `24·s·b·h` and the scores, and each keep the other `10·s·b·h`.
        sequence_parallel: The others are divided, too, along the sequence. Our strategies don't; Megatron-LM does.

    Raises:
        ValueError: If a size is not positive, `recompute` is unknown, or t does not divide the heads.
    """
    sizes = {
        "micro_batch_size": micro_batch_size,
        "sequence_length": sequence_length,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "tensor_parallel_size": tensor_parallel_size,
    }
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"`{name}={value}` must be at least 1.")
    if num_heads % tensor_parallel_size:
        raise ValueError(f"`tensor_parallel_size={tensor_parallel_size}` must divide `num_heads={num_heads}`.")
    tokens = micro_batch_size * sequence_length * hidden_size
    scores = 5 * num_heads * sequence_length * sequence_length * micro_batch_size
    if recompute == "full":
        return 2 * tokens
    if recompute not in ("none", "selective"):
        raise ValueError(f"`recompute={recompute!r}` must be none, selective or full.")
    outside, inside = 10 * tokens, 24 * tokens + (scores if recompute == "none" else 0)
    if sequence_parallel:
        return -(-(outside + inside) // tensor_parallel_size)
    return outside + -(-inside // tensor_parallel_size)


_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}


@dataclass(frozen=True)
class StateLayout:
    """Bytes per parameter of weights and gradients, and whether an fp32 master copy is kept."""

    weight_bytes: int
    gradient_bytes: int
    master_bytes: int
    """fp32 copy that the optimizer steps; 0 where the weights themselves are stepped."""


STATE_LAYOUTS: dict[str, StateLayout] = {
    "32-true": StateLayout(4, 4, 0),
    # Lightning and torch autocast: fp32 weights and gradients, half copies only while in use.
    "bf16-mixed": StateLayout(4, 4, 0),
    "16-mixed": StateLayout(4, 4, 0),
    "bf16-true": StateLayout(2, 2, 0),
    "16-true": StateLayout(2, 2, 0),
    # DeepSpeed and the ZeRO papers: half weights and gradients, fp32 master in the optimizer (K = 12 with Adam).
    "half-master": StateLayout(2, 2, 4),
    # The 18 bytes of Hugging Face's guide: half and fp32 weights, fp32 gradients.
    "amp-copy": StateLayout(6, 4, 0),
}


def model_states(
    num_parameters: int,
    precision: str = "32-true",
    optimizer: str | OptimizerStates = "adamw",
    zero_stage: int = 0,
    world_size: int = 1,
    offload_optimizer: OffloadTarget = "none",
    offload_parameters: OffloadTarget = "none",
    num_trainable: int | None = None,
) -> MemoryBreakdown:
    """Bytes of model states per rank.

    Args:
        num_parameters: Elements of all parameters, tied ones once.
        precision: A Lightning precision, `half-master` (DeepSpeed) or `amp-copy`.
        optimizer: Family name.
        zero_stage: 0 replicates everything; 1 shards optimizer states (and the master copy), 2 gradients too,
            3 parameters too. FSDP2's `reshard_after_forward` is stage 3.
        world_size: Ranks that share the states.
        offload_optimizer: Where optimizer states and master copy lie; gradients follow them.
        offload_parameters: Where the stage 3 shards lie.
        num_trainable: Elements that are trained; all by default. The rest has no gradient and no state.

    Raises:
        ValueError: If an argument is out of range, or offloaded at a stage that can't.
    """
    family = optimizer if isinstance(optimizer, OptimizerStates) else find_optimizer(optimizer).states
    _check(num_parameters, precision, zero_stage, world_size, offload_optimizer, offload_parameters)
    layout = STATE_LAYOUTS[precision]
    trained = num_parameters if num_trainable is None else num_trainable
    share = {level: (world_size if zero_stage >= level else 1) for level in (1, 2, 3)}
    stepped = layout.master_bytes or min(4, layout.weight_bytes)  # bytes per element of the weights that are stepped
    states = trained * (family.bytes_per_parameter(stepped) + layout.master_bytes) / share[1]
    host = Tier.HOST if family.paged and offload_optimizer == "none" else _TIERS[offload_optimizer]
    return MemoryBreakdown(
        {
            (_TIERS[offload_parameters], Category.PARAMETER): round(num_parameters * layout.weight_bytes / share[3]),
            (_TIERS[offload_optimizer], Category.GRADIENT): round(trained * layout.gradient_bytes / share[2]),
            (host, Category.OPTIMIZER_STATE): round(states),
        }
    )


def check_placement(stage: int, world_size: int) -> None:
    """Raise a `ValueError` unless there are such a ZeRO stage and number of ranks."""
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"`zero_stage={stage}` must be 0, 1, 2 or 3.")
    if world_size < 1:
        raise ValueError(f"`world_size={world_size}` must be at least 1.")


def _check(
    num_parameters: int,
    precision: str,
    zero_stage: int,
    world_size: int,
    offload_optimizer: OffloadTarget,
    offload_parameters: OffloadTarget,
) -> None:
    if num_parameters < 1:
        raise ValueError(f"`num_parameters={num_parameters}` must be at least 1.")
    if precision not in STATE_LAYOUTS:
        raise ValueError(f"`precision={precision!r}` is unknown. Choose from: {', '.join(STATE_LAYOUTS)}.")
    check_placement(zero_stage, world_size)
    for name, target in (("offload_optimizer", offload_optimizer), ("offload_parameters", offload_parameters)):
        if target not in _TIERS:
            raise ValueError(f"`{name}={target!r}` must be none, cpu or nvme.")
    if offload_optimizer != "none" and zero_stage == 0:
        raise ValueError(f"`offload_optimizer={offload_optimizer!r}` needs `zero_stage` 1, 2 or 3 (found 0).")
    if offload_optimizer == "nvme" and zero_stage != 3:
        raise ValueError(
            f"`offload_optimizer='nvme'` needs `zero_stage=3` (found {zero_stage}): below it DeepSpeed keeps the "
            "states in host memory without saying so."
        )
    if offload_parameters != "none" and zero_stage != 3:
        raise ValueError(f"`offload_parameters={offload_parameters!r}` needs `zero_stage=3` (found {zero_stage}).")
