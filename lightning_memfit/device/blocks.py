"""Blocks of memory and the pools that cache them: what `CachingAllocator` is made of."""

from bisect import bisect_left, insort


class Block:
    """A piece of a segment; `previous` and `next` are its neighbours there.

    `mapped` is False for addresses of an expandable segment without memory behind them.
    """

    __slots__ = ("address", "free", "mapped", "next", "pool", "previous", "size_bytes")

    def __init__(self, address: int, size_bytes: int, pool: "Pool", *, mapped: bool = True) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.pool = pool
        self.free = True
        self.mapped = mapped
        self.previous: Block | None = None
        self.next: Block | None = None

    def cut(self, size_bytes: int) -> "Block":
        """Keep the first `size_bytes` and return the rest as a block of its own."""
        rest = Block(self.address + size_bytes, self.size_bytes - size_bytes, self.pool, mapped=self.mapped)
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next = rest
        self.size_bytes = size_bytes
        return rest

    def absorb_next(self) -> None:
        """Become one with the next block."""
        following = self.next
        assert following is not None
        self.size_bytes += following.size_bytes
        self.next = following.next
        if following.next is not None:
            following.next.previous = self

    def could_grow_to(self) -> int:
        """Size with the unmapped addresses behind it."""
        following = self.next
        return self.size_bytes + (following.size_bytes if following is not None and not following.mapped else 0)


class Pool:
    """Cached free blocks of small or of large requests, ordered by size, then address."""

    __slots__ = ("blocks", "is_small")

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.blocks: list[tuple[int, int, Block]] = []

    def index_of_fit(self, size_bytes: int) -> int:
        """Place of the smallest block that is large enough, the lowest of several; the length if there is none."""
        return bisect_left(self.blocks, (size_bytes,))

    def add(self, block: Block) -> None:
        """Cache a free block as it is."""
        block.free = True
        insort(self.blocks, (block.size_bytes, block.address, block))

    def discard(self, block: Block) -> None:
        """Take a block out of the cache."""
        del self.blocks[bisect_left(self.blocks, (block.size_bytes, block.address))]

    def merge(self, block: Block) -> Block:
        """Cache a block, one with its free neighbours; returns what it became."""
        following = block.next
        if following is not None and following.free and following.mapped:
            self.discard(following)
            block.absorb_next()
        previous = block.previous
        if previous is not None and previous.free and previous.mapped:
            self.discard(previous)
            previous.absorb_next()
            block = previous
        self.add(block)
        return block
