"""Bytes of optimizer states, by the records of `optim.optimizers`. Exact for torch's and bitsandbytes' optimizers."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from lightning_memfit.optim.optimizers import StateLayout, find_optimizer
from lightning_memfit.profile.record import ParameterInfo

_MIN_QUANTIZED = 4096
"""Tensors with fewer elements keep 32-bit states in bitsandbytes and torchao."""

_MAP_BYTES = 256 * 4
"""Table of the 256 values that 8-bit codes represent: one per state and optimizer, shared by all tensors."""


@dataclass(frozen=True, kw_only=True)
class OptimizerFamily(StateLayout):
    """The states of an optimizer, with their bytes for a table of parameters."""

    name: str

    def tensor_bytes(self, parameter: ParameterInfo, keep_32bit: bool = False) -> list[int]:
        """Bytes of every state tensor of one trained parameter. Step counts, which are on the host, are left out.

        Args:
            parameter: The parameter; factored states need its `shape`.
            keep_32bit: Whether it is exempt from quantization, as embeddings usually are.

        Raises:
            ValueError: If the states are factored and the parameter has no shape.
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


def optimizer_family(name: str) -> OptimizerFamily:
    """The states of an optimizer that has a record.

    Raises:
        ValueError: If there is none of that name; lists those there are.
    """
    return OptimizerFamily(name=name, **vars(find_optimizer(name).states))
