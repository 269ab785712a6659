"""Tensor parallelism of blocks like GPT-2's and Llama's: several ranks compute one model on one batch together.

`divide_blocks` divides the layers. `share_random_state` and `check_same_batch` ensure what such ranks must have in
common: the random numbers of dropout and the batch.

Plans follow from the blocks' structure. The plans in the configurations of transformers (`base_model_tp_plan`) include
none for GPT-2, and work only for models that transformers itself loads onto the mesh.
"""

from copy import deepcopy
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lightning_memfit.checkpointing.blocks import find_blocks
from lightning_memfit.memory.kind import DeviceKind
from lightning_memfit.strategies.tensor_parallel_styles import Columns, Region, Rows, Whole, output_features
from lightning_memfit.strategies.upstream.torch import is_imagined


@dataclass(frozen=True)
class BlockPlan:
    """How the blocks of one family are divided."""

    family: str
    attention: str
    feed_forward: str
    styles: dict[str, ParallelStyle]
    """Styles of attention and feed-forward, and of every layer in them that has parameters."""
    heads: tuple[str, ...]
    """Layers of the attention whose outputs are whole heads, `parts` times."""
    parts: int = 1

    @property
    def layers(self) -> set[str]:
        """Layers that are divided."""
        return set(self.styles) - {self.attention, self.feed_forward}

    def matches(self, block: nn.Module) -> bool:
        """Whether a block has these layers in its attention and feed-forward, and no others."""
        owners = {
            name
            for name, child in block.named_modules()
            if name.startswith((f"{self.attention}.", f"{self.feed_forward}."))
            and any(True for _ in child.parameters(recurse=False))
        }
        return owners == self.layers

    def num_heads(self, block: nn.Module, layer: str) -> int:
        """Heads that a layer of the attention computes."""
        head_dim = block.get_submodule(self.attention).head_dim
        return output_features(block.get_submodule(layer)) // self.parts // int(head_dim)  # type: ignore[arg-type]


PLANS = (
    BlockPlan(
        family="GPT-2",
        attention="attn",
        feed_forward="mlp",
        styles={
            "attn": Region("num_heads", "split_size"),
            "attn.c_attn": Columns(parts=3),
            "attn.c_proj": Rows(),
            "mlp": Region(),
            "mlp.c_fc": Columns(),
            "mlp.c_proj": Rows(),
        },
        heads=("attn.c_attn",),
        parts=3,
    ),
    BlockPlan(
        family="Llama",
        attention="self_attn",
        feed_forward="mlp",
        styles={
            "self_attn": Region("num_heads", "num_key_value_heads"),
            "self_attn.q_proj": Columns(),
            "self_attn.k_proj": Columns(),
            "self_attn.v_proj": Columns(),
            "self_attn.o_proj": Rows(),
            "mlp": Region(),
            "mlp.gate_proj": Columns(),
            "mlp.up_proj": Columns(),
            "mlp.down_proj": Rows(),
        },
        heads=("self_attn.q_proj", "self_attn.k_proj"),
    ),
)


def divide_blocks(module: nn.Module, mesh: DeviceMesh) -> str:
    """Divide every block of a module, and at rest everything outside the blocks, among the ranks of a mesh.

    Args:
        module: Whole and identical on all ranks; the parameters of rank 0 are used.
        mesh: One-dimensional mesh of the ranks that compute together.

    Returns:
        A description of what was divided.

    Raises:
        MisconfigurationException: If a block has no plan, or can't be divided into as many parts.
    """
    plans = plan_blocks(module, mesh.size())
    for name, plan in plans.items():
        parallelize_module(module.get_submodule(name), mesh, deepcopy(plan.styles))  # styles keep their mesh
    rest = Whole()
    for layer in list(module.modules()):
        own = list(layer.parameters(recurse=False))
        if own and not any(isinstance(parameter, DTensor) for parameter in own):
            parallelize_module(layer, mesh, rest)
    rest.forget_wholes()
    families = " and ".join(sorted({plan.family for plan in plans.values()}))
    return f"{len(plans)} blocks like {families}'s among {mesh.size()} ranks each"


def plan_blocks(module: nn.Module, size: int) -> dict[str, BlockPlan]:
    """Plan of each block, by its dotted name.

    Raises:
        MisconfigurationException: If a block has no plan, or can't be divided into as many parts.
    """
    planned = {}
    for name, child in module.named_modules():
        plan = next((plan for plan in PLANS if plan.matches(child)), None)
        if plan is not None:
            _check(name, child, plan, size)
            planned[name] = plan
    repeated = [name for group in find_blocks(module) for name in group.names]
    unknown = next((name for name in repeated if name not in planned), None)
    if unknown is not None or not planned:
        what = f"{unknown} ({type(module.get_submodule(unknown)).__name__})" if unknown else type(module).__name__
        known = "; ".join(f"{plan.family}'s: {', '.join(sorted(plan.layers))}" for plan in PLANS)
        raise MisconfigurationException(
            f"`tensor_parallel_size={size}`: there is no plan for {what}. Attention and feed-forward of a block must "
            f"have exactly the layers of one of these ({known}). Set `tensor_parallel_size: 1` to shard by FSDP2 alone."
        )
    return planned


def _check(name: str, block: nn.Module, plan: BlockPlan, size: int) -> None:
    """Refuse what can't be divided evenly, naming the sizes that can."""
    for key in sorted(plan.layers):
        layer = block.get_submodule(key)
        if type(layer) is not nn.Linear and type(layer).__name__ != "Conv1D":
            raise MisconfigurationException(
                f"`tensor_parallel_size={size}` can't divide {name}.{key}, a {type(layer).__name__}: only plain linear "
                "layers, without adapters or quantized weights. Leave these out, or set `tensor_parallel_size: 1`."
            )
    attention = f"{name}.{plan.attention}"
    if not hasattr(block.get_submodule(plan.attention), "head_dim"):
        raise MisconfigurationException(
            f"`tensor_parallel_size={size}`: {attention} doesn't say its `head_dim`, so that its heads aren't known. "
            "Set `tensor_parallel_size: 1`."
        )
    counts = {f"heads of {name}.{key}": plan.num_heads(block, key) for key in plan.heads}
    for key in sorted(plan.layers):
        if key.startswith(f"{plan.feed_forward}.") and isinstance(plan.styles[key], Columns):
            counts[f"features of {name}.{key}"] = output_features(block.get_submodule(key))
    common = gcd(*counts.values())
    for what, count in counts.items():
        if count % size:
            sizes = [str(divisor) for divisor in range(1, min(common, 64) + 1) if common % divisor == 0]
            raise MisconfigurationException(
                f"`tensor_parallel_size={size}` can't divide the {count} {what}. Take one of {', '.join(sizes)}."
            )


def share_random_state(mesh: DeviceMesh, device: torch.device) -> None:
    """Give all ranks of a group the random state of its first one, of the CPU and of the device.

    Dropout on what all ranks hold must drop the same elements. On the heads that a rank holds, it drops the same
    positions as on other ranks' heads.
    """
    if is_imagined(mesh):
        return
    first = distributed.get_global_rank(mesh.get_group(), 0)
    state = torch.get_rng_state().to(device)
    distributed.broadcast(state, first, group=mesh.get_group())
    torch.set_rng_state(state.cpu())
    if DeviceKind.of(device).has_own_generator:
        state = torch.cuda.get_rng_state(device).to(device)
        distributed.broadcast(state, first, group=mesh.get_group())
        torch.cuda.set_rng_state(state.cpu(), device)


def check_same_batch(batch: Any, mesh: DeviceMesh, device: torch.device, stage: str) -> None:
    """Compare a batch across the ranks of a group by number of elements, sum and weighted sum of its tensors.

    Raises:
        MisconfigurationException: On every rank of the group, if the ranks were given different batches.
    """
    if is_imagined(mesh):
        return
    mine = _fingerprint(batch).to(device)
    all_of_them = [torch.empty_like(mine) for _ in range(mesh.size())]
    distributed.all_gather(all_of_them, mine, group=mesh.get_group())
    if any(not torch.equal(theirs, mine) for theirs in all_of_them):
        raise MisconfigurationException(
            f"`tensor_parallel_size={mesh.size()}`: ranks that compute one model together were given different batches "
            f"in {stage}. Leave the sampler to Lightning (`use_distributed_sampler: true`), or make your own with "
            "`trainer.distributed_sampler_kwargs` instead of `world_size` and `global_rank`; draw nothing at random "
            "from a generator that is seeded by rank."
        )


def _fingerprint(batch: Any) -> Tensor:
    total = torch.zeros(3, dtype=torch.float64, device="cpu")

    def add(tensor: Tensor) -> Tensor:
        values = tensor.detach().reshape(-1).to("cpu", torch.float64)
        weights = torch.arange(1, len(values) + 1, dtype=torch.float64, device="cpu") % 8191
        total.add_(torch.stack([torch.tensor(float(len(values)), device="cpu"), values.sum(), values @ weights]))
        return tensor

    apply_to_collection(batch, Tensor, add)
    return torch.nan_to_num(total)
