"""Tensor parallelism of GPT-2's blocks: several ranks compute one model on one batch together.

`divide_blocks` divides the layers by torch's `parallelize_module`, with styles of our own: torch's know neither the
`Conv1D` of transformers nor fused `q|k|v`. A parameter is a DTensor at rest, so that FSDP2, the optimizer, clipping and
checkpoints handle it as one tensor. While its layer runs it is an ordinary local tensor, so that the layer needs no
operators for DTensors. As in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053), attention and feed-forward begin with
`Columns`, which sum the gradients of their inputs, and end with `Rows`, which sum their outputs.
"""

from copy import deepcopy
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
from lightning_memfit.strategies.upstream.torch import distribute_packed, own_parameters, packed_slice


class _Layer(ParallelStyle):
    """A layer whose own parameters are divided at rest and local while it runs."""

    mesh: DeviceMesh

    def divided(self, name: str, value: nn.Parameter) -> nn.Parameter:
        """Distribute a parameter over the ranks, with the values of the first rank."""
        whole = distribute_tensor(value.detach(), self.mesh, [self.placement(name, value)])
        return nn.Parameter(whole, requires_grad=value.requires_grad)

    def placement(self, name: str, value: Tensor) -> Placement:
        """How the ranks share the parameter."""
        raise NotImplementedError

    def local(self, name: str, parameter: DTensor) -> Tensor:
        """Local tensor of the parameter while the layer runs."""
        return parameter.to_local()

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.mesh = device_mesh
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, self.divided(name, parameter))
        kept: dict[str, nn.Parameter | None] = {}

        def before(_: nn.Module, args: Any) -> None:
            kept.update(own_parameters(module))
            for name, parameter in kept.items():
                if isinstance(parameter, DTensor):
                    own_parameters(module)[name] = self.local(name, parameter)

        def after(_: nn.Module, args: Any, output: Any) -> None:
            own_parameters(module).update(kept)
            kept.clear()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)  # recomputation in checkpoints ends with an exception
        return module


class Columns(_Layer):
    """A `Conv1D` of which each rank computes some of the outputs."""

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.parts = parts

    @override
    def divided(self, name: str, value: nn.Parameter) -> nn.Parameter:
        """Divide by outputs."""
        if self.parts == 1 or name != "weight":
            return super().divided(name, value)
        whole = distribute_packed(value.detach(), self.mesh, 1, self.parts)
        return nn.Parameter(whole, requires_grad=value.requires_grad)

    @override
    def placement(self, name: str, value: Tensor) -> Placement:
        """Divide by outputs; the small bias of a fused layer is whole, as FSDP2 can't divide packed parts further."""
        return Replicate() if self.parts > 1 else Shard(value.ndim - 1)

    @override
    def local(self, name: str, parameter: DTensor) -> Tensor:
        """Outputs of this rank."""
        if self.parts == 1 or name == "weight":
            return parameter.to_local()
        return packed_slice(_with_summed_gradient(parameter.to_local(), self.mesh), 0, self.parts, self.mesh)

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.nf = module.nf // device_mesh.size()  # type: ignore[operator, assignment]  # it shapes its output by this
        super()._apply(module, device_mesh)
        module.register_forward_pre_hook(lambda _, args: (_with_summed_gradient(args[0], device_mesh),))
        return module


class Rows(_Layer):
    """A `Conv1D` of which each rank computes a summand from some of the inputs."""

    @override
    def placement(self, name: str, value: Tensor) -> Placement:
        """Divide by inputs; every rank has the whole bias."""
        return Shard(0) if name == "weight" else Replicate()

    @override
    def local(self, name: str, parameter: DTensor) -> Tensor:
        """Inputs of this rank. The bias is left out, to be added once."""
        local = parameter.to_local()
        return local if name == "weight" else torch.zeros_like(local, requires_grad=False)

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)  # its hook runs first and puts the bias back

        def summed(layer: nn.Module, _: Any, output: Tensor) -> Tensor:
            parts = DTensor.from_local(output, device_mesh, [Partial()], run_check=False)
            announce()
            whole: Tensor = parts.redistribute(placements=[Replicate()]).to_local()
            bias: Tensor = layer.bias.to_local()  # type: ignore[operator, union-attr]
            return whole + bias.to(whole.dtype)

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
    def divided(self, name: str, value: nn.Parameter) -> nn.Parameter:
        """Divide it, or take what was made of it for another layer."""
        if value not in self.done:
            self.done[value] = super().divided(name, value)
        return self.done[value]

    @override
    def placement(self, name: str, value: Tensor) -> Placement:
        """Divide matrices by their last dimension."""
        divisible = value.ndim > 1 and value.shape[-1] % self.mesh.size() == 0
        return Shard(value.ndim - 1) if divisible else Replicate()

    @override
    def local(self, name: str, parameter: DTensor) -> Tensor:
        """The whole parameter."""
        if any(not placement.is_replicate() for placement in parameter.placements):
            announce()
        return parameter.full_tensor()


def _with_summed_gradient(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a tensor that all ranks have alike, and whose gradients they sum."""
    copies = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return announce_in_backward(copies.to_local(grad_placements=[Partial()]))


_LAYERS: dict[str, ParallelStyle] = {
    "attn.c_attn": Columns(parts=3),
    "attn.c_proj": Rows(),
    "mlp.c_fc": Columns(),
    "mlp.c_proj": Rows(),
}
"""Layers of a block of GPT-2. The plans in the configurations of transformers (`base_model_tp_plan`) have none."""


def divide_blocks(module: nn.Module, mesh: DeviceMesh) -> str:
    """Divide every block of a module, and at rest everything outside the blocks, among the ranks of a mesh.

    Returns:
        A description of what was divided.

    Raises:
        MisconfigurationException: If it has other blocks than GPT-2's, or heads that can't be divided.
    """
    names = check_blocks(module, mesh.size())
    for name in names:
        parallelize_module(module.get_submodule(name), mesh, deepcopy(_LAYERS))  # styles keep their mesh
        attention: Any = module.get_submodule(f"{name}.attn")
        attention.num_heads //= mesh.size()
        attention.split_size //= mesh.size()
    rest = Whole()
    for layer in list(module.modules()):
        own = list(layer.parameters(recurse=False))
        if own and not any(isinstance(parameter, DTensor) for parameter in own):
            parallelize_module(layer, mesh, rest)
    rest.done.clear()  # undivided parameters
    return f"{len(names)} blocks of GPT-2 among {mesh.size()} ranks each"


def check_blocks(module: nn.Module, size: int) -> list[str]:
    """Names of GPT-2's blocks in a module.

    Raises:
        MisconfigurationException: If it has other blocks, or heads that can't be divided.
    """
    plain = {name for name, layer in module.named_modules() if type(layer).__name__ == "Conv1D"}
    names = [name for name, _ in module.named_modules() if {f"{name}.{layer}" for layer in _LAYERS} <= plain]
    unknown = next((name for group in find_blocks(module) for name in group.names if name not in names), None)
    if unknown is not None or not names:
        what = f"{unknown} ({type(module.get_submodule(unknown)).__name__})" if unknown else type(module).__name__
        raise MisconfigurationException(
            f"`tensor_parallel_size={size}` divides GPT-2's blocks of plain layers only, and {what} is none. Set "
            "`tensor_parallel_size: 1` to shard by FSDP2 alone."
        )
    heads: Any = module.get_submodule(f"{names[0]}.attn").num_heads
    if heads % size:
        raise MisconfigurationException(
            f"`tensor_parallel_size={size}` can't divide the {heads} heads of {names[0]}.attn. Take a divisor of them."
        )
    return names


def share_random_state(mesh: DeviceMesh, device: torch.device) -> None:
    """Seed all ranks of a group alike, from the random state of the first one.

    Dropout on what all ranks hold must drop the same elements. On the heads that a rank holds, it drops the same
    positions as on other ranks' heads.
    """
    seed = torch.randint(2**31, (), device="cpu").to(device)
    distributed.broadcast(seed, group_src=0, group=mesh.get_group())
    torch.manual_seed(int(seed))
