"""Bytes of optimizer state per parameter, by family."""

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_memfit.profile.record import ParameterInfo

_BLOCK = 256
"""Elements that share one fp32 scale in blockwise 8-bit states (bitsandbytes 0.49-0.50; Dettmers et al. 2022)."""

_BLOCK_4BIT = 128
"""Elements that share one fp32 scale in torchao's 4-bit states."""


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
    min_quantized: int = 0
    """Smaller tensors keep 32-bit states."""
    factored: bool = False
    """Second moment kept as row and column sums (Adafactor, Shazeer & Stern 2018)."""
    paged: bool = False
    """States lie in unified memory that the driver moves between host and device."""

    def state_bytes(self, parameter: ParameterInfo, shape: tuple[int, int] | None = None) -> int:
        """Bytes of state for one trainable parameter.

        Args:
            parameter: The parameter.
            shape: Its last two dimensions, needed by factored states only.
        """
        n = parameter.numel
        if self.factored:
            rows, columns = shape or (n, 0)
            return 4 * (n // max(rows * columns, 1) * (rows + columns) if columns else n)
        if self.bits == 32 or n < self.min_quantized:
            return 4 * n * self.num_states
        scales = -(-n // self.scale_block) * 4 if self.scale_block else 0
        return (n * self.bits // 8 + scales) * self.num_states

    def total_bytes(self, parameters: Iterable[ParameterInfo]) -> int:
        """Bytes of state of all trainable parameters, tied ones once."""
        return sum(self.state_bytes(p) for p in parameters if p.trainable and not p.shared_with)

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of state per parameter of a large tensor."""
        if self.factored:
            return 0.0
        return self.num_states * (self.bits / 8 + (4 / self.scale_block if self.scale_block and self.bits < 32 else 0))


def _eight_bit(name: str, num_states: int, paged: bool = False) -> OptimizerFamily:
    return OptimizerFamily(name, num_states, 8, _BLOCK, 4096, paged=paged)


OPTIMIZER_FAMILIES: dict[str, OptimizerFamily] = {
    family.name: family
    for family in (
        OptimizerFamily("sgd", 0),
        OptimizerFamily("sgd_momentum", 1),
        OptimizerFamily("adam", 2),
        OptimizerFamily("adamw", 2),
        OptimizerFamily("lion", 1),
        OptimizerFamily("rmsprop", 1),
        OptimizerFamily("adafactor", 0, factored=True),
        _eight_bit("adam_8bit", 2),
        _eight_bit("adamw_8bit", 2),
        _eight_bit("lion_8bit", 1),
        _eight_bit("sgd_8bit", 1),
        _eight_bit("rmsprop_8bit", 1),
        _eight_bit("paged_adamw_8bit", 2, paged=True),
        OptimizerFamily("paged_adamw", 2, paged=True),
        OptimizerFamily("adamw_4bit", 2, 4, _BLOCK_4BIT, 4096),
    )
}


def optimizer_family(name: str) -> OptimizerFamily:
    """Look a family up.

    Raises:
        ValueError: If there is none of that name; lists those there are.
    """
    try:
        return OPTIMIZER_FAMILIES[name]
    except KeyError:
        raise ValueError(f"`optimizer={name!r}` is unknown. Choose from: {', '.join(OPTIMIZER_FAMILIES)}.") from None
