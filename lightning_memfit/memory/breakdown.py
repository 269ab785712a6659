"""`MemoryBreakdown`: integer bytes by category and by tier of the machine."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from typing_extensions import override


class Category(str, Enum):
    """What a byte is used for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"
    INPUT = "input"
    COMMUNICATION = "communication"
    RUNTIME_CONTEXT = "runtime_context"
    FRAGMENTATION = "fragmentation"

    @override
    def __str__(self) -> str:
        return self.value


class Tier(str, Enum):
    """Where a byte is stored."""

    DEVICE = "device"
    PINNED_HOST = "pinned_host"
    HOST = "host"
    DISK = "disk"

    @override
    def __str__(self) -> str:
        return self.value


def pinned_block_bytes(size_bytes: int) -> int:
    """Bytes that torch page-locks for a buffer: powers of two (`CachingHostAllocator`, `roundSize`)."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes by `(tier, category)`. Immutable; breakdowns add up entry by entry.

    Raises:
        ValueError: If an entry is negative.
    """

    entries: Mapping[tuple[Tier, Category], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for (tier, category), size in self.entries.items():
            if size < 0:
                raise ValueError(f"`entries[{tier}, {category}]={size}` is negative; bytes cannot be.")
        kept = {key: int(size) for key, size in self.entries.items() if size}
        object.__setattr__(self, "entries", kept)

    @classmethod
    def on(cls, tier: Tier, by_category: Mapping[Category, int]) -> "MemoryBreakdown":
        """Put bytes by category on one tier."""
        return cls({(tier, category): size for category, size in by_category.items()})

    @classmethod
    def device(cls, by_category: Mapping[Category, int]) -> "MemoryBreakdown":
        """Put bytes by category on the device."""
        return cls.on(Tier.DEVICE, by_category)

    @classmethod
    def pinned(cls, category: Category, sizes_bytes: Iterable[int]) -> "MemoryBreakdown":
        """Put buffers into page-locked memory; what their blocks have beyond their sizes is fragmentation.

        Args:
            category: What the buffers are used for.
            sizes_bytes: Size of each.
        """
        sizes = tuple(sizes_bytes)
        unused = sum(pinned_block_bytes(size) - size for size in sizes)
        return cls.on(Tier.PINNED_HOST, {category: sum(sizes), Category.FRAGMENTATION: unused})

    def by_category(self, tier: Tier = Tier.DEVICE) -> dict[Category, int]:
        """Bytes of one tier by category, in the order of `Category`, zero entries left out."""
        return {c: self.entries[tier, c] for c in Category if (tier, c) in self.entries}

    def total(self, tier: Tier = Tier.DEVICE) -> int:
        """Sum of one tier in bytes."""
        return sum(size for (where, _), size in self.entries.items() if where is tier)

    def get(self, category: Category, tier: Tier = Tier.DEVICE) -> int:
        """Bytes of one entry, 0 where there is none."""
        return self.entries.get((tier, category), 0)

    def tensors(self) -> "MemoryBreakdown":
        """Without what no ledger of tensors sees: libraries, and holes in the heap."""
        unseen = (Category.RUNTIME_CONTEXT, Category.FRAGMENTATION)
        return MemoryBreakdown({key: size for key, size in self.entries.items() if key[1] not in unseen})

    def replace(self, category: Category, size_bytes: int, tier: Tier = Tier.DEVICE) -> "MemoryBreakdown":
        """Return a copy with one entry set."""
        return MemoryBreakdown({**self.entries, (tier, category): size_bytes})

    def __add__(self, other: "MemoryBreakdown") -> "MemoryBreakdown":
        keys = {*self.entries, *other.entries}
        return MemoryBreakdown({k: self.entries.get(k, 0) + other.entries.get(k, 0) for k in keys})

    def __iter__(self) -> Iterator[tuple[Tier, Category, int]]:
        for tier in Tier:
            for category, size in self.by_category(tier).items():
                yield tier, category, size

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Nested plain dict `{tier: {category: bytes}}`, ready for JSON."""
        return {
            tier.value: {category.value: size for category, size in self.by_category(tier).items()}
            for tier in Tier
            if self.total(tier)
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Mapping[str, int]]) -> "MemoryBreakdown":
        """Inverse of `to_dict`."""
        return cls({(Tier(t), Category(c)): size for t, entries in data.items() for c, size in entries.items()})
