"""`CachingAllocator`: what torch's CUDA caching allocator would hold and reserve, without a GPU.

The rules are those of torch's native backend, one stream (`c10/cuda/CUDACachingAllocator.cpp` and
`c10/core/AllocatorConfig.h`, torch 2.9 to 2.13). Addresses are made up: new segments lie above older ones, where a
driver may place them otherwise. That decides between free blocks of equal size and nothing else.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator

from lightning_memfit.memory import MIB

_MIN_BLOCK = 512
_SMALL_SIZE = MIB
_SMALL_BUFFER = 2 * MIB
_MIN_LARGE_ALLOCATION = 10 * MIB
_ROUND_LARGE = 2 * MIB
_ADDRESS_GAP = 1 << 30  # between segments, so that they never touch


class Block:
    """A piece of a segment; `previous` and `next` are its neighbours in the segment."""

    __slots__ = ("address", "free", "mapped", "next", "pool", "previous", "size_bytes")

    def __init__(self, address: int, size_bytes: int, pool: "_Pool") -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.pool = pool
        self.free = False
        self.mapped = True
        self.previous: Block | None = None
        self.next: Block | None = None


class _Pool:
    """The cached free blocks of small or of large requests, ordered by size, then address."""

    __slots__ = ("blocks", "expandable", "is_small")

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.blocks: list[tuple[int, int, Block]] = []
        self.expandable: Block | None = None  # first block of the pool's expandable segment

    def add(self, block: Block) -> None:
        block.free = True
        insort(self.blocks, (block.size_bytes, block.address, block))

    def discard(self, block: Block) -> None:
        del self.blocks[bisect_left(self.blocks, (block.size_bytes, block.address))]


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
        self._small = _Pool(is_small=True)
        self._large = _Pool(is_small=False)
        self._owners: dict[Hashable, Block | None] = {}
        self._next_address = 0

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
            self._split(block, size)
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
        self._cache(block)

    def empty_cache(self) -> None:
        """Give unused segments (pages of expandable ones) back to the driver, as `torch.cuda.empty_cache`."""
        for pool in (self._large, self._small):
            for _, _, block in list(pool.blocks):
                if not self.expandable_segments and block.previous is None and block.next is None:
                    self._release(block)
                elif self.expandable_segments:
                    self._unmap(block)

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

    def _cached_block(self, pool: _Pool, size: int) -> Block | None:
        """The smallest cached block that is large enough, the lowest of several."""
        blocks = pool.blocks
        index = bisect_left(blocks, (size,))
        if index == len(blocks):
            return None
        if self.expandable_segments:
            index = self._before_growth(blocks, index)
        found = blocks[index][0]
        limit = self.max_split_size_bytes
        if limit is not None:
            if size < limit <= found:
                return None  # an oversize block is kept for oversize requests
            if size >= limit and found >= size + self.large_segment_bytes:
                return None
        return blocks.pop(index)[2]

    def _before_growth(self, blocks: list[tuple[int, int, Block]], index: int) -> int:
        """Count a block at the end of an expandable segment as large as it could grow, so that others go first."""
        while index + 1 < len(blocks) and _could_grow_to(blocks[index + 1][2]) < _could_grow_to(blocks[index][2]):
            index += 1
        return index

    # --- segments ---------------------------------------------------------------------------------------------------

    def _new_block(self, pool: _Pool, size: int) -> Block | None:
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

    def _from_driver(self, pool: _Pool, size: int, segment_bytes: int) -> Block:
        if self.expandable_segments:
            return self._grow(pool, size)
        block = Block(self._take_addresses(segment_bytes), segment_bytes, pool)
        self._reserve(segment_bytes)
        return block

    def _take_addresses(self, size_bytes: int) -> int:
        address = self._next_address
        self._next_address += size_bytes + _ADDRESS_GAP
        return address

    def _reserve(self, size_bytes: int) -> None:
        self.reserved_bytes += size_bytes
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes

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
        index = bisect_left(blocks, (wanted,))
        if index < len(blocks):
            self._release(blocks[index][2])
            return True
        released = 0
        while released < wanted and blocks and blocks[-1][0] >= limit:
            released += blocks[-1][0]
            self._release(blocks[-1][2])
        return released >= wanted

    # --- splitting and merging --------------------------------------------------------------------------------------

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size_bytes - size, block.pool)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next = rest
        block.size_bytes = size
        block.pool.add(rest)

    def _cache(self, block: Block) -> Block:
        pool = block.pool
        following = block.next
        if following is not None and following.free and following.mapped:
            pool.discard(following)
            _absorb(block, following)
        previous = block.previous
        if previous is not None and previous.free and previous.mapped:
            pool.discard(previous)
            _absorb(previous, block)
            block = previous
        pool.add(block)
        return block

    # --- expandable segments ----------------------------------------------------------------------------------------

    def _page(self, pool: _Pool) -> int:
        return _SMALL_BUFFER if pool.is_small else self.large_segment_bytes

    def _grow(self, pool: _Pool, size: int) -> Block:
        """Map pages at the lowest place of the pool's segment where `size` fits, and take the block off the cache."""
        block = self._place_to_grow(pool, size)
        if not block.mapped:
            block = self._map(block, min(block.size_bytes, size))
        while block.size_bytes < size:
            assert block.next is not None
            assert not block.next.mapped
            block = self._map(block.next, min(size - block.size_bytes, block.next.size_bytes))
        pool.discard(block)
        return block

    def _place_to_grow(self, pool: _Pool, size: int) -> Block:
        if pool.expandable is None:
            pool.expandable = Block(self._take_addresses(1 << 50), 1 << 50, pool)
            pool.expandable.free, pool.expandable.mapped = True, False
        block: Block | None = pool.expandable
        while block is not None:
            start = block
            room = 0
            while block is not None and block.free and room < size:
                room += block.size_bytes
                block = block.next
            if room >= size:
                return start
            while block is not None and not block.free:
                block = block.next
        raise AssertionError("an expandable segment ends in unmapped addresses")

    def _map(self, block: Block, size: int) -> Block:
        page = self._page(block.pool)
        mapped = min(-(-size // page) * page, block.size_bytes)
        if mapped < block.size_bytes:
            rest = Block(block.address + mapped, block.size_bytes - mapped, block.pool)
            rest.free, rest.mapped = True, False
            rest.previous, rest.next = block, block.next
            if block.next is not None:
                block.next.previous = rest
            block.next, block.size_bytes = rest, mapped
        block.mapped = True
        self._reserve(mapped)
        return self._cache(block)

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages inside a free block."""
        page = self._page(block.pool)
        base = 0 if block.pool.expandable is None else block.pool.expandable.address
        start = base + -(-(block.address - base) // page) * page
        end = base + (block.address + block.size_bytes - base) // page * page
        if end <= start:
            return
        block.pool.discard(block)
        if start > block.address:
            self._split(block, start - block.address)
            head, block = block, block.next  # type: ignore[assignment]
            head.pool.discard(block)
            head.pool.add(head)
        if block.address + block.size_bytes > end:
            self._split(block, end - block.address)
        self.reserved_bytes -= block.size_bytes
        block.mapped = False
        following, previous = block.next, block.previous
        if following is not None and not following.mapped:
            _absorb(block, following)
        if previous is not None and not previous.mapped:
            _absorb(previous, block)


def _could_grow_to(block: Block) -> int:
    following = block.next
    return block.size_bytes + (following.size_bytes if following is not None and not following.mapped else 0)


def _absorb(block: Block, following: Block) -> None:
    block.size_bytes += following.size_bytes
    block.next = following.next
    if following.next is not None:
        following.next.previous = block
