"""How tensor parallelism divides the parameters of one layer, and what they are while the layer computes.

A parameter is a DTensor at rest, so that FSDP2, the optimizer, clipping and checkpoints handle it as one tensor. While
its layer runs it is an ordinary local tensor, so that the layer needs no operators for DTensors. As in Megatron-LM
(Shoeybi et al. 2019, arXiv 1909.08053), a `Region` sums the gradients of its inputs, and its last layer, `Rows`, sums
its outputs.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from typing_extensions import override

from lightning_memfit.memory.collectives import announce, announce_in_backward
from lightning_memfit.strategies.upstream.torch import distribute_packed, own_parameters, packed_slice, save_plainly


class _Layer(ParallelStyle):
    """A layer whose own parameters are divided at rest and local while it runs."""

    mesh: DeviceMesh

    def divided(self, layer: nn.Module, name: str, value: Tensor) -> DTensor:
        """Distribute a parameter over the ranks, with the values of the first rank."""
        return distribute_tensor(value, self.mesh, [self.placement(layer, name, value)])

    def placement(self, layer: nn.Module, name: str, value: Tensor) -> Placement:
        """How the ranks share the parameter."""
        raise NotImplementedError

    def local(self, layer: nn.Module, name: str, parameter: DTensor) -> Tensor | None:
        """Local tensor of the parameter while the layer runs."""
        return parameter.to_local()

    def _divided(self, layer: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        divided = self.divided(layer, name, parameter.detach())
        return nn.Parameter(divided, requires_grad=parameter.requires_grad)

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.mesh = device_mesh
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, self._divided(module, name, parameter))
        _use_while_running(module, self)
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
    def divided(self, layer: nn.Module, name: str, value: Tensor) -> DTensor:
        """Divide by outputs."""
        if self.parts > 1 and name == "weight":
            return distribute_packed(value, self.mesh, output_dim(layer), self.parts)
        return super().divided(layer, name, value)

    @override
    def placement(self, layer: nn.Module, name: str, value: Tensor) -> Placement:
        """Divide by outputs; the small bias of a fused layer is whole, as FSDP2 can't divide packed parts further."""
        if self.parts > 1:
            return Replicate()
        return Shard(output_dim(layer) if name == "weight" else 0)

    @override
    def local(self, layer: nn.Module, name: str, parameter: DTensor) -> Tensor | None:
        """Outputs of this rank."""
        if self.parts == 1 or name == "weight":
            return parameter.to_local()
        return packed_slice(_with_summed_gradient(parameter.to_local(), self.mesh), 0, self.parts, self.mesh)

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        if self.parts > 1:
            save_plainly(module)
        _set_outputs(module, output_features(module) // device_mesh.size())
        return module


class Rows(_Layer):
    """A linear layer of which each rank computes a summand from some of the inputs; it comes last in a region."""

    @override
    def placement(self, layer: nn.Module, name: str, value: Tensor) -> Placement:
        """Divide by inputs; every rank has the whole bias."""
        return Shard(1 - output_dim(layer)) if name == "weight" else Replicate()

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
        self._done: dict[nn.Parameter, nn.Parameter] = {}

    @override
    def _divided(self, layer: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if parameter not in self._done:
            self._done[parameter] = super()._divided(layer, name, parameter)
        return self._done[parameter]

    def forget_wholes(self) -> None:
        """Let go of the undivided parameters, once no layer is left that may share one."""
        self._done.clear()

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

        def enter(hidden: Tensor) -> Tensor:
            return _with_summed_gradient(hidden, device_mesh)

        def before(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if args:
                return (enter(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": enter(kwargs["hidden_states"])}

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module


def _with_summed_gradient(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a tensor that all ranks have alike, and whose gradients they sum."""
    copies = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return announce_in_backward(copies.to_local(grad_placements=[Partial()]))


def output_dim(layer: nn.Module) -> int:
    """Dimension of a linear layer's weight that counts outputs; the Conv1D of transformers stores it transposed."""
    return 0 if isinstance(layer, nn.Linear) else 1


def output_features(layer: nn.Module) -> int:
    """Outputs of a linear layer over all ranks."""
    return layer.get_parameter("weight").shape[output_dim(layer)]


def _set_outputs(layer: nn.Module, features: int) -> None:
    if not isinstance(layer, nn.Linear):
        layer.nf = features  # type: ignore[assignment]  # the Conv1D of transformers shapes its output by this


def _use_while_running(layer: nn.Module, style: _Layer) -> None:
    """Replace a layer's parameters with local tensors for the duration of each call."""
    kept: dict[str, nn.Parameter | None] = {}

    def before(_: nn.Module, args: Any) -> None:
        kept.update(own_parameters(layer))
        for name, parameter in kept.items():
            if isinstance(parameter, DTensor):
                own_parameters(layer)[name] = style.local(layer, name, parameter)

    def after(_: nn.Module, args: Any, output: Any) -> None:
        own_parameters(layer).update(kept)
        kept.clear()

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after, always_call=True)  # recomputation in checkpoints ends with an exception
