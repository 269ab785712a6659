"""Bytes of optimizer state and step scratch memory, by family. Exact for the optimizers of torch and bitsandbytes."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from lightning_memfit.profile.record import ParameterInfo

_BLOCK = 256
"""Elements that share one fp32 scale in blockwise 8-bit states (bitsandbytes 0.49-0.50; Dettmers et al. 2022)."""

_BLOCK_4BIT = 128
"""Elements that share one fp32 scale in torchao's 4-bit states."""

_MIN_QUANTIZED = 4096
"""Tensors with fewer elements keep 32-bit states in bitsandbytes and torchao."""

_MAP_BYTES = 256 * 4
"""Table of the 256 values that 8-bit codes stand for: one per state and optimizer, shared by all tensors."""


@dataclass(frozen=True)
class OptimizerFamily:
    """How large the states of an optimizer are."""

    name: str
    num_states: int
    """State tensors of the parameter's shape."""
    bits: int = 32
    """Bits per element of large tensors' states."""
    scale_block: int = 0
    """Elements per fp32 scale; 0 without scales."""
    follows_parameter: bool = False
    """States have the parameter's dtype, as torch's own optimizers have; otherwise fp32."""
    factored: bool = False
    """Second moment kept as row and column means (Adafactor, Shazeer & Stern 2018; torch's form)."""
    paged: bool = False
    """States lie in unified memory that the driver moves between host and device."""
    scratch_copies: int | None = 0
    """Copies of all trained weights that a step on CUDA needs beside the states (`_foreach_` kernels); None where only
    a trace tells."""

    def tensor_bytes(self, parameter: ParameterInfo, keep_32bit: bool = False) -> list[int]:
        """Bytes of every state tensor of one trained parameter. Step counts, which lie on the host, are left out.

        Args:
            parameter: The parameter; factored states need its `shape`.
            keep_32bit: Whether it is exempt from quantization, as embeddings usually are.

        Raises:
            ValueError: If factored states are asked of a parameter without a shape.
        """
        n, itemsize = parameter.numel, parameter.itemsize if self.follows_parameter else 4
        if self.factored:
            return self._factored(parameter, itemsize)
        if self.bits == 32 or n < _MIN_QUANTIZED or keep_32bit:
            return [itemsize * n] * self.num_states
        return [-(-n * self.bits // 8), -(-n // self.scale_block) * 4] * self.num_states

    def _factored(self, parameter: ParameterInfo, itemsize: int) -> list[int]:
        if parameter.dims < 2:
            return [itemsize * parameter.numel]
        if not parameter.shape:
            raise ValueError(f"The states of {self.name} follow from the shape of {parameter.name}, which isn't known.")
        rows, columns = parameter.shape[-2:]
        return [itemsize * parameter.numel // columns, itemsize * parameter.numel // rows]

    def total_bytes(
        self, parameters: Iterable[ParameterInfo], rounding_bytes: int = 1, keep_32bit: Collection[str] = ()
    ) -> int:
        """Bytes of state of all trainable parameters, tied ones once.

        Args:
            parameters: Parameter table of a profile.
            rounding_bytes: Multiple to which the device's allocator rounds every tensor.
            keep_32bit: Names of parameters exempt from quantization.
        """
        sizes = [
            size
            for parameter in parameters
            if parameter.trainable and not parameter.shared_with
            for size in self.tensor_bytes(parameter, parameter.name in keep_32bit)
        ]
        maps = _MAP_BYTES * self.num_states if self.bits == 8 and sizes else 0
        return sum(-(-size // rounding_bytes) * rounding_bytes for size in sizes) + maps

    def bytes_per_parameter(self, itemsize: int = 4) -> float:
        """Bytes of state per parameter of a large tensor.

        Args:
            itemsize: Bytes per element of the weights that are stepped.

        Raises:
            ValueError: If it depends on shapes.
        """
        if self.factored:
            raise ValueError(f"`optimizer={self.name!r}` has no fixed bytes per parameter: use `total_bytes`.")
        if self.bits == 32:
            return float(self.num_states * (itemsize if self.follows_parameter else 4))
        return self.num_states * (self.bits / 8 + 4 / self.scale_block)


def _torch(name: str, num_states: int, scratch_copies: int | None = 0, factored: bool = False) -> OptimizerFamily:
    return OptimizerFamily(name, num_states, follows_parameter=True, factored=factored, scratch_copies=scratch_copies)


def _eight_bit(name: str, num_states: int, paged: bool = False) -> OptimizerFamily:
    return OptimizerFamily(name, num_states, 8, _BLOCK, paged=paged)


OPTIMIZER_FAMILIES: dict[str, OptimizerFamily] = {
    family.name: family
    for family in (
        _torch("sgd", 0),
        _torch("sgd_momentum", 1),
        _torch("adam", 2, 1),
        _torch("adamw", 2, 1),
        _torch("adamw_fused", 2),
        _torch("rmsprop", 1, 1),
        _torch("adafactor", 0, None, factored=True),
        OptimizerFamily("lion", 1),
        OptimizerFamily("paged_adamw", 2, paged=True),
        _eight_bit("adam_8bit", 2),
        _eight_bit("adamw_8bit", 2),
        _eight_bit("lion_8bit", 1),
        _eight_bit("sgd_8bit", 1),
        _eight_bit("rmsprop_8bit", 1),
        _eight_bit("paged_adamw_8bit", 2, paged=True),
        OptimizerFamily("adamw_4bit", 2, 4, _BLOCK_4BIT, scratch_copies=None),
    )
}
"""torch: sgd to adafactor; bitsandbytes: lion to paged_adamw_8bit; torchao: adamw_4bit."""


def optimizer_family(name: str) -> OptimizerFamily:
    """Look a family up.

    Raises:
        ValueError: If there is none of that name; lists those there are.
    """
    try:
        return OPTIMIZER_FAMILIES[name]
    except KeyError:
        raise ValueError(f"`optimizer={name!r}` is unknown. Choose from: {', '.join(OPTIMIZER_FAMILIES)}.") from None
