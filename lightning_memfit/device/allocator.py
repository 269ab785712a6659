"""`CachingAllocator`: what torch's CUDA caching allocator would hold and reserve, without a GPU.

The rules are those of torch's native backend, one stream (`c10/cuda/CUDACachingAllocator.cpp` and
`c10/core/AllocatorConfig.h`, torch 2.9 to 2.13). Addresses are made up: new segments lie above older ones, where a
driver may place them otherwise. That decides between free blocks of equal size and nothing else.
"""

from collections.abc import Hashable, Iterator

from lightning_memfit.device.blocks import Block, Pool
from lightning_memfit.device.expandable import ADDRESSES, ExpandableSegment
from lightning_memfit.memory import MIB

_MIN_BLOCK = 512
_SMALL_SIZE = MIB
_SMALL_BUFFER = 2 * MIB
_MIN_LARGE_ALLOCATION = 10 * MIB
_ROUND_LARGE = 2 * MIB
_ADDRESS_GAP = 1 << 30  # between segments, so that they never touch


class CachingAllocator:
    """Simulate the caching allocator of one device and one stream.

    Args:
        limit_bytes: What may be reserved. None never runs out.
        max_split_size_bytes: Blocks of this size and more are not split (`max_split_size_mb`). None splits all.
        large_segment_bytes: Segment for requests between 1 and 10 MiB (`large_segment_size_mb`).
        roundup_power2_divisions: Round requests up to one of that many steps between powers of two; 0 does not.
        expandable_segments: One growing segment per pool, mapped in pages of 2 MiB and `large_segment_bytes`.

    Attributes:
        allocated_bytes: Bytes of blocks in use, as `torch.cuda.memory_allocated`.
        reserved_bytes: Bytes taken from the driver, as `torch.cuda.memory_reserved`.
        peak_allocated_bytes: Largest `allocated_bytes` so far.
        peak_reserved_bytes: Largest `reserved_bytes` so far.
        num_alloc_retries: Requests that made the allocator give its cached blocks back.
        num_ooms: Requests that were refused.

    Raises:
        ValueError: If `roundup_power2_divisions` is no power of two, or a size is not positive.
    """

    def __init__(
        self,
        limit_bytes: int | None = None,
        *,
        max_split_size_bytes: int | None = None,
        large_segment_bytes: int = 20 * MIB,
        roundup_power2_divisions: int = 0,
        expandable_segments: bool = False,
    ) -> None:
        for name, size in (("limit_bytes", limit_bytes), ("large_segment_bytes", large_segment_bytes)):
            if size is not None and size <= 0:
                raise ValueError(f"`{name}={size}` must be positive.")
        if max_split_size_bytes is not None and max_split_size_bytes < large_segment_bytes:
            raise ValueError(
                f"`max_split_size_bytes={max_split_size_bytes}` must be at least one segment, {large_segment_bytes}."
            )
        if roundup_power2_divisions & (roundup_power2_divisions - 1):
            raise ValueError(f"`roundup_power2_divisions={roundup_power2_divisions}` must be 0 or a power of two.")
        self.limit_bytes = limit_bytes
        self.max_split_size_bytes = max_split_size_bytes
        self.large_segment_bytes = large_segment_bytes
        self.roundup_power2_divisions = roundup_power2_divisions
        self.expandable_segments = expandable_segments
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self._small = Pool(is_small=True)
        self._large = Pool(is_small=False)
        self._next_address = 0
        self._expandable: dict[Pool, ExpandableSegment] = {}
        if expandable_segments:
            for pool, page in ((self._small, _SMALL_BUFFER), (self._large, large_segment_bytes)):
                self._expandable[pool] = ExpandableSegment(pool, self._take_addresses(ADDRESSES), page)
        self._owners: dict[Hashable, Block | None] = {}

    # --- what a program asks for ------------------------------------------------------------------------------------

    def malloc(self, identity: Hashable, size_bytes: int) -> bool:
        """Allocate under a name of the caller's choice.

        Returns:
            False where the limit does not allow it: then nothing is held for `identity`, and `free` must not be called.

        Raises:
            ValueError: If `identity` is allocated already.
        """
        if identity in self._owners:
            raise ValueError(f"`identity={identity!r}` is allocated already; free it first.")
        if size_bytes == 0:  # upstream hands out a null pointer and counts nothing
            self._owners[identity] = None
            return True
        size = self._rounded(size_bytes)
        pool = self._small if size <= _SMALL_SIZE else self._large
        block = self._cached_block(pool, size) or self._new_block(pool, size)
        if block is None:
            self.num_ooms += 1
            return False
        block.free = False
        if self._should_split(block, size):
            block.pool.add(block.cut(size))
        self._owners[identity] = block
        self.allocated_bytes += block.size_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return True

    def free(self, identity: Hashable) -> None:
        """Give an allocation back to the cache; free neighbours become one block.

        Raises:
            ValueError: If `identity` is not allocated.
        """
        try:
            block = self._owners.pop(identity)
        except KeyError:
            raise ValueError(f"`identity={identity!r}` is not allocated.") from None
        if block is None:
            return
        self.allocated_bytes -= block.size_bytes
        block.pool.merge(block)

    def empty_cache(self) -> None:
        """Give unused segments (pages of expandable ones) back to the driver, as `torch.cuda.empty_cache`."""
        for pool in (self._large, self._small):
            for _, _, block in list(pool.blocks):
                if pool in self._expandable:
                    self.reserved_bytes -= self._expandable[pool].unmap(block)
                elif block.previous is None and block.next is None:
                    self._release(block)

    def reset_peak(self) -> None:
        """Start new peaks at what is held now."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def __contains__(self, identity: Hashable) -> bool:
        return identity in self._owners

    def blocks_in_use(self) -> Iterator[tuple[Hashable, int, int]]:
        """`(identity, address, size_bytes)` of everything allocated."""
        for identity, block in self._owners.items():
            if block is not None:
                yield identity, block.address, block.size_bytes

    def cached_blocks(self) -> Iterator[tuple[int, int]]:
        """`(address, size_bytes)` of every free block."""
        for pool in (self._small, self._large):
            for size, address, _ in pool.blocks:
                yield address, size

    # --- rules ------------------------------------------------------------------------------------------------------

    def _rounded(self, size_bytes: int) -> int:
        divisions = self.roundup_power2_divisions
        if divisions > 1 and size_bytes > _MIN_BLOCK * divisions:
            step = (1 << (size_bytes.bit_length() - 1)) // divisions
            return -(-size_bytes // step) * step
        return -(-size_bytes // _MIN_BLOCK) * _MIN_BLOCK

    def _segment_size(self, size: int) -> int:
        if size <= _SMALL_SIZE:
            return _SMALL_BUFFER
        if size < _MIN_LARGE_ALLOCATION:
            return self.large_segment_bytes
        return -(-size // _ROUND_LARGE) * _ROUND_LARGE

    def _should_split(self, block: Block, size: int) -> bool:
        remaining = block.size_bytes - size
        if block.pool.is_small or self.expandable_segments:
            return remaining >= _MIN_BLOCK
        if self.max_split_size_bytes is not None and size >= self.max_split_size_bytes:
            return False
        return remaining > _SMALL_SIZE

    def _cached_block(self, pool: Pool, size: int) -> Block | None:
        blocks = pool.blocks
        index = pool.index_of_fit(size)
        if index == len(blocks):
            return None
        if self.expandable_segments:
            # a block that can still grow counts as large as it could become, so that others go first
            while index + 1 < len(blocks) and blocks[index + 1][2].could_grow_to() < blocks[index][2].could_grow_to():
                index += 1
        found = blocks[index][0]
        limit = self.max_split_size_bytes
        if limit is not None:
            if size < limit <= found:
                return None  # an oversize block is kept for oversize requests
            if size >= limit and found >= size + self.large_segment_bytes:
                return None
        return blocks.pop(index)[2]

    # --- segments ---------------------------------------------------------------------------------------------------

    def _new_block(self, pool: Pool, size: int) -> Block | None:
        segment = self._segment_size(size)
        if self._admits(segment):
            return self._from_driver(pool, size, segment)
        if self._release_oversize(size) and self._admits(segment):
            return self._from_driver(pool, size, segment)
        self.empty_cache()
        self.num_alloc_retries += 1
        return self._from_driver(pool, size, segment) if self._admits(segment) else None

    def _admits(self, segment_bytes: int) -> bool:
        return self.limit_bytes is None or self.reserved_bytes + segment_bytes <= self.limit_bytes

    def _from_driver(self, pool: Pool, size: int, segment_bytes: int) -> Block:
        if self.expandable_segments:
            block, mapped_bytes = self._expandable[pool].grow(size)
        else:
            block, mapped_bytes = Block(self._take_addresses(segment_bytes), segment_bytes, pool), segment_bytes
        self.reserved_bytes += mapped_bytes
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes
        return block

    def _take_addresses(self, size_bytes: int) -> int:
        address = self._next_address
        self._next_address += size_bytes + _ADDRESS_GAP
        return address

    def _release(self, block: Block) -> None:
        block.pool.discard(block)
        self.reserved_bytes -= block.size_bytes

    def _release_oversize(self, size: int) -> bool:
        """With a split limit: give back one oversize block that suffices, otherwise the largest ones until they do."""
        limit = self.max_split_size_bytes
        if limit is None:
            return False
        wanted = max(size, limit)
        blocks = self._large.blocks
        index = self._large.index_of_fit(wanted)
        if index < len(blocks):
            self._release(blocks[index][2])
            return True
        released = 0
        while released < wanted and blocks and blocks[-1][0] >= limit:
            released += blocks[-1][0]
            self._release(blocks[-1][2])
        return released >= wanted
