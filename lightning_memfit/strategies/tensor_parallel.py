"""Tensor parallelism of blocks like GPT-2's and Llama's: several ranks compute one model on one batch together.

`divide_blocks` divides the layers by torch's `parallelize_module`, with styles of our own: torch's know neither the
`Conv1D` of transformers nor fused `q|k|v`. A parameter is a DTensor at rest, so that FSDP2, the optimizer, clipping and
checkpoints handle it as one tensor. While its layer runs it is an ordinary local tensor, so that the layer needs no
operators for DTensors. As in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053), a `Region` sums the gradients of its
inputs, and its last layer, `Rows`, sums its outputs.
"""

from copy import deepcopy
from math import gcd
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from typing_extensions import override

from lightning_memfit.checkpointing.blocks import find_blocks
from lightning_memfit.memory.collectives import announce, announce_in_backward
from lightning_memfit.strategies.upstream.torch import distribute_packed, own_parameters, packed_slice, save_plainly


class _Layer(ParallelStyle):
    """A layer whose own parameters are divided at rest and local while it runs."""

    mesh: DeviceMesh

    def divided(self, layer: nn.Module, name: str, value: nn.Parameter) -> nn.Parameter:
        """Distribute a parameter over the ranks, with the values of the first rank."""
        whole = distribute_tensor(value.detach(), self.mesh, [self.placement(layer, name, value)])
        return nn.Parameter(whole, requires_grad=value.requires_grad)

    def placement(self, layer: nn.Module, name: str, value: Tensor) -> Placement:
        """How the ranks share the parameter."""
        raise NotImplementedError

    def local(self, layer: nn.Module, name: str, parameter: DTensor) -> Tensor | None:
        """Local tensor of the parameter while the layer runs."""
        return parameter.to_local()

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.mesh = device_mesh
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, self.divided(module, name, parameter))
        kept: dict[str, nn.Parameter | None] = {}

        def before(_: nn.Module, args: Any) -> None:
            kept.update(own_parameters(module))
            for name, parameter in kept.items():
                if isinstance(parameter, DTensor):
                    own_parameters(module)[name] = self.local(module, name, parameter)

        def after(_: nn.Module, args: Any, output: Any) -> None:
            own_parameters(module).update(kept)
            kept.clear()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)  # recomputation in checkpoints ends with an exception
        return module


class Columns(_Layer):
    """A linear layer of which each rank computes some of the outputs; it comes first in a region.

    Args:
        parts: Number of equal parts that follow each other in the outputs (`q|k|v`). A rank gets its share of each.
    """

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.parts = parts

    @override
    def divided(self, layer: nn.Module, name: str, value: nn.Parameter) -> nn.Parameter:
        """Divide by outputs."""
        if self.parts == 1 or name != "weight":
            return super().divided(layer, name, value)
        whole = distribute_packed(value.detach(), self.mesh, _output_dim(layer), self.parts)
        return nn.Parameter(whole, requires_grad=value.requires_grad)

    @override
    def placement(self, layer: nn.Module, name: str, value: Tensor) -> Placement:
        """Divide by outputs; the small bias of a fused layer is whole, as FSDP2 can't divide packed parts further."""
        if self.parts > 1:
            return Replicate()
        return Shard(_output_dim(layer) if name == "weight" else 0)

    @override
    def local(self, layer: nn.Module, name: str, parameter: DTensor) -> Tensor | None:
        """Outputs of this rank."""
        if self.parts == 1 or name == "weight":
            return parameter.to_local()
        return packed_slice(_with_summed_gradient(parameter.to_local(), self.mesh), 0, self.parts, self.mesh)

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        features = _output_features(module) // device_mesh.size()
        super()._apply(module, device_mesh)
        if self.parts > 1:
            save_plainly(module)
        if not isinstance(module, nn.Linear):
            module.nf = features  # type: ignore[assignment]  # the Conv1D of transformers shapes its output by this
        return module


class Rows(_Layer):
    """A linear layer of which each rank computes a summand from some of the inputs; it comes last in a region."""

    @override
    def placement(self, layer: nn.Module, name: str, value: Tensor) -> Placement:
        """Divide by inputs; every rank has the whole bias."""
        return Shard(1 - _output_dim(layer)) if name == "weight" else Replicate()

    @override
    def local(self, layer: nn.Module, name: str, parameter: DTensor) -> Tensor | None:
        """Inputs of this rank. The bias is left out, to be added once."""
        if name == "weight":
            return parameter.to_local()
        return None if isinstance(layer, nn.Linear) else torch.zeros_like(parameter.to_local(), requires_grad=False)

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)  # its hook runs first and puts the bias back

        def summed(layer: nn.Module, _: Any, output: Tensor) -> Tensor:
            parts = DTensor.from_local(output, device_mesh, [Partial()], run_check=False)
            announce()
            whole: Tensor = parts.redistribute(placements=[Replicate()]).to_local()
            bias = layer.bias
            if bias is not None:
                whole = whole + bias.to_local().to(whole.dtype)  # type: ignore[operator, union-attr]
            return whole

        module.register_forward_hook(summed)
        return module


class Whole(_Layer):
    """A layer that every rank computes in the same way: norms, embeddings, the head.

    Matrices are still divided at rest, along their last dimension if that is a multiple of the number of ranks, and
    gathered for use. One style serves all such layers of a model, so that tied parameters stay tied.
    """

    def __init__(self) -> None:
        super().__init__()
        self.done: dict[nn.Parameter, nn.Parameter] = {}

    @override
    def divided(self, layer: nn.Module, name: str, value: nn.Parameter) -> nn.Parameter:
        """Divide it, or take what was made of it for another layer."""
        if value not in self.done:
            self.done[value] = super().divided(layer, name, value)
        return self.done[value]

    @override
    def placement(self, layer: nn.Module, name: str, value: Tensor) -> Placement:
        """Divide matrices by their last dimension."""
        divisible = value.ndim > 1 and value.shape[-1] % self.mesh.size() == 0
        return Shard(value.ndim - 1) if divisible else Replicate()

    @override
    def local(self, layer: nn.Module, name: str, parameter: DTensor) -> Tensor | None:
        """The whole parameter."""
        if any(not placement.is_replicate() for placement in parameter.placements):
            announce()
        return parameter.full_tensor()


class Region(ParallelStyle):
    """A module (attention, feed-forward) whose first layers are `Columns` and whose last is `Rows`.

    Args:
        counts: Integer attributes that count heads or widths of this rank, if the module has them.
    """

    def __init__(self, *counts: str) -> None:
        super().__init__()
        self.counts = counts

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in self.counts:
            if isinstance(getattr(module, name, None), int):
                setattr(module, name, getattr(module, name) // device_mesh.size())

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (_with_summed_gradient(args[0], device_mesh), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": _with_summed_gradient(kwargs["hidden_states"], device_mesh)}

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module


def _with_summed_gradient(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a tensor that all ranks have alike, and whose gradients they sum."""
    copies = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return announce_in_backward(copies.to_local(grad_placements=[Partial()]))


def _output_dim(layer: nn.Module) -> int:
    """Dimension of a linear layer's weight that counts outputs; the Conv1D of transformers stores it transposed."""
    return 0 if isinstance(layer, nn.Linear) else 1


def _output_features(layer: nn.Module) -> int:
    return layer.get_parameter("weight").shape[_output_dim(layer)]


# --- which layers ---------------------------------------------------------------------------------------------------

Plan = dict[str, ParallelStyle]
"""Styles of attention and feed-forward, which are regions, and of every layer in them that has parameters.

The plans in the configurations of transformers (`base_model_tp_plan`) include none for GPT-2, and work only for models
that transformers itself loads onto the mesh.
"""

PLANS: dict[str, Plan] = {
    "GPT-2": {
        "attn": Region("num_heads", "split_size"),
        "attn.c_attn": Columns(parts=3),
        "attn.c_proj": Rows(),
        "mlp": Region(),
        "mlp.c_fc": Columns(),
        "mlp.c_proj": Rows(),
    },
    "Llama": {
        "self_attn": Region("num_heads", "num_key_value_heads"),
        **{f"self_attn.{name}_proj": Columns() for name in ("q", "k", "v")},
        "self_attn.o_proj": Rows(),
        "mlp": Region(),
        "mlp.gate_proj": Columns(),
        "mlp.up_proj": Columns(),
        "mlp.down_proj": Rows(),
    },
}


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
    families = plan_blocks(module, mesh.size())
    for name, family in families.items():
        parallelize_module(module.get_submodule(name), mesh, deepcopy(PLANS[family]))  # styles keep their mesh
    rest = Whole()
    for layer in list(module.modules()):
        own = list(layer.parameters(recurse=False))
        if own and not any(isinstance(parameter, DTensor) for parameter in own):
            parallelize_module(layer, mesh, rest)
    rest.done.clear()  # undivided parameters
    return (
        f"{len(families)} blocks like {' and '.join(sorted(set(families.values())))}'s among {mesh.size()} ranks each"
    )


def plan_blocks(module: nn.Module, size: int) -> dict[str, str]:
    """Which plan each block has, by its dotted name.

    Raises:
        MisconfigurationException: If a block has no plan, or can't be divided into as many parts.
    """
    planned = {}
    for name, block in module.named_modules():
        family = next((family for family, plan in PLANS.items() if _layers_in(block, plan) == _layers_of(plan)), None)
        if family is not None:
            _check(name, block, PLANS[family], size)
            planned[name] = family
    repeated = [name for group in find_blocks(module) for name in group.names]
    unknown = next((name for name in repeated if name not in planned), None)
    if unknown is not None or not planned:
        what = f"{unknown} ({type(module.get_submodule(unknown)).__name__})" if unknown else type(module).__name__
        known = "; ".join(f"{family}'s: {', '.join(sorted(_layers_of(plan)))}" for family, plan in PLANS.items())
        raise MisconfigurationException(
            f"`tensor_parallel_size={size}`: there is no plan for {what}. Attention and feed-forward of a block must "
            f"have exactly the layers of one of these ({known}). Set `tensor_parallel_size: 1` to shard by FSDP2 alone."
        )
    return planned


def _layers_of(plan: Plan) -> set[str]:
    return {name for name, style in plan.items() if not isinstance(style, Region)}


def _layers_in(block: nn.Module, plan: Plan) -> set[str]:
    """Layers with parameters in what a plan has as regions."""
    regions = tuple(f"{name}." for name, style in plan.items() if isinstance(style, Region))
    named = ((name, layer) for name, layer in block.named_modules() if name.startswith(regions))
    return {name for name, layer in named if next(layer.parameters(recurse=False), None) is not None}


def _check(name: str, block: nn.Module, plan: Plan, size: int) -> None:
    """Refuse what can't be divided evenly, naming the sizes that can."""
    counts = {}
    for key in sorted(_layers_of(plan)):
        layer, style = block.get_submodule(key), plan[key]
        if type(layer) is not nn.Linear and type(layer).__name__ != "Conv1D":
            raise MisconfigurationException(
                f"`tensor_parallel_size={size}` can't divide {name}.{key}, a {type(layer).__name__}: only plain linear "
                "layers, without adapters or quantized weights. Leave these out, or set `tensor_parallel_size: 1`."
            )
        if isinstance(style, Columns):
            head_dim = getattr(block.get_submodule(key.partition(".")[0]), "head_dim", None)
            what = "features" if head_dim is None else "heads"
            counts[f"{what} of {name}.{key}"] = _output_features(layer) // style.parts // (head_dim or 1)
    for what, count in counts.items():
        if count % size:
            raise MisconfigurationException(
                f"`tensor_parallel_size={size}` can't divide the {count} {what}. Take a divisor of "
                f"{gcd(*counts.values())}."
            )


def share_random_state(mesh: DeviceMesh, device: torch.device) -> None:
    """Seed all ranks of a group alike, from the random state of the first one.

    Dropout on what all ranks hold must drop the same elements. On the heads that a rank holds, it drops the same
    positions as on other ranks' heads.
    """
    seed = torch.randint(2**31, (), device="cpu").to(device)
    distributed.broadcast(seed, group_src=0, group=mesh.get_group())
    torch.manual_seed(int(seed))
