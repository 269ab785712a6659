"""The record of `ActivationCheckpointing`: what it goes with, and what recomputing or moving activations costs."""

import numpy as np

from lightning_memfit.memory import Category
from lightning_memfit.profile.events import CATEGORIES
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.techniques.cost import Cost, Work
from lightning_memfit.techniques.facts import Run
from lightning_memfit.techniques.technique import CallbackSpec, Options, Technique

_TRAFFIC = 3
"""Bytes moved per byte of activation that is made again: written once, inputs of about twice that size read."""

_RECOMPUTED = {"none": 0.0, "full": 1.0, "keep_attention": 1.0, "keep_matmul": 0.0, "keep_matmul_attention": 0.0}
"""Share of a block's matrix products that is computed again, by choice. Attention's own products are a few percent."""


def unsupported(run: Run, options: Options) -> str | None:
    """Reason and fix, or None where blocks can be checkpointed."""
    if run.facts.num_blocks == 0 and not options.get("blocks"):
        return "the module has no repeated blocks. Name what to checkpoint with `blocks`, or leave it out."
    if options.get("mode") == "sqrt" and run.facts.sequential_blocks is False:
        return "mode='sqrt' needs blocks in an nn.Sequential. Use mode='every' with every=2."
    if options.get("mode") == "offload" and run.facts.device == "cpu":
        return "on the CPU activations lie in host memory already. Use another mode."
    budget = options.get("budget")
    if budget is not None and run.has("MicroBatching"):
        return f"`budget={budget!r}` is planned for the whole batch, not for micro-batches. Give `choices` or a mode."
    if budget is not None and run.strategy != "SingleDeviceStrategy" and not str(budget).endswith("%"):
        return f"`budget={budget!r}`: a trace does not see what {run.strategy} shards. Give a percentage, such as 40%."
    return None


def cost(profile: ModelProfile, options: Options) -> Cost:
    """Recomputed products and traffic, or bytes that are moved to the host and back beside the computing."""
    shares = recomputed_shares(options, profile.num_blocks)
    blocks = max(1, len(shares))
    kept = block_activation_bytes(profile)
    flops = profile.block_flops.get("forward", 0) * profile.num_blocks
    recomputed = sum(_RECOMPUTED.get(choice, 0.0) for choice in shares) / blocks
    remade = sum(choice not in ("none", "offload") for choice in shares) / blocks
    moved = sum(choice == "offload" for choice in shares) / blocks
    work = Work(flops=recomputed * flops, device_bytes=remade * _TRAFFIC * kept, host_link_bytes=2.0 * moved * kept)
    return Cost(micro_batch=work, overlap=moved > 0)


def recomputed_shares(options: Options, num_blocks: int) -> list[str]:
    """One choice per block. A budget that nobody has planned for yet counts as the most it may cost."""
    if options.get("choices"):
        return list(options["choices"])
    mode = options.get("mode", "full")
    if mode == "every":
        return ["full" if index % options["every"] == 0 else "none" for index in range(num_blocks)]
    if mode == "selective":
        return ["_".join(["keep", *(name for name in ("matmul", "attention") if name in options["keep"])])] * num_blocks
    return ["full" if mode == "sqrt" else mode] * num_blocks


def block_activation_bytes(profile: ModelProfile) -> int:
    """Bytes that blocks keep from forward to backward, at the profile's micro-batch size."""
    events = profile.events
    starts = [at for at, name in events.phases if name == "backward"]
    if not starts:
        return 0
    made_in = np.full(len(events.sizes), -1)
    allocations = events.events > 0
    made_in[events.storages[allocations]] = events.event_blocks[allocations]
    alive = events.alive_at(starts[-1] - 1)
    is_kept = (events.categories[alive] == CATEGORIES.index(Category.ACTIVATION)) & (made_in[alive] >= 0)
    return int(events.sizes[alive[is_kept]].sum())


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
        {"mode": "sqrt"},
        {"mode": "offload"},
    ),
    unsupported=unsupported,
    cost=cost,
)
