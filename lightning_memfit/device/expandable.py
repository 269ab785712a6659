"""`ExpandableSegment`: one range of addresses per pool that gets memory page by page (`expandable_segments:True`)."""

from lightning_memfit.device.blocks import Block, Pool

ADDRESSES = 1 << 50
"""Size of the range; more than any device."""


class ExpandableSegment:
    """The growing segment of one pool.

    Args:
        pool: Where its free blocks are cached.
        address: Start of the range.
        page_bytes: Memory is mapped and unmapped in whole pages of this size.
    """

    def __init__(self, pool: Pool, address: int, page_bytes: int) -> None:
        self._pool = pool
        self._address = address
        self._page_bytes = page_bytes
        self._first = Block(address, ADDRESSES, pool, mapped=False)

    def grow(self, size_bytes: int) -> tuple[Block, int]:
        """Map pages at the lowest place where `size_bytes` fit.

        Returns:
            The block, no longer cached, and the bytes that were mapped for it.
        """
        block = self._lowest_room(size_bytes)
        total = 0
        if not block.mapped:
            block, total = self._map(block, min(block.size_bytes, size_bytes))
        while block.size_bytes < size_bytes:
            following = block.next
            assert following is not None
            block, mapped = self._map(following, min(size_bytes - block.size_bytes, following.size_bytes))
            total += mapped
        self._pool.discard(block)
        return block, total

    def unmap(self, block: Block) -> int:
        """Give the whole pages inside a cached block back; returns their bytes."""
        page, base = self._page_bytes, self._address
        start = base + -(-(block.address - base) // page) * page
        end = base + (block.address + block.size_bytes - base) // page * page
        if end <= start:
            return 0
        self._pool.discard(block)
        if start > block.address:
            head, block = block, block.cut(start - block.address)
            self._pool.add(head)
        if block.address + block.size_bytes > end:
            self._pool.add(block.cut(end - block.address))
        block.mapped = False
        if block.next is not None and not block.next.mapped:
            block.absorb_next()
        if block.previous is not None and not block.previous.mapped:
            block.previous.absorb_next()
        return end - start

    def _lowest_room(self, size_bytes: int) -> Block:
        block: Block | None = self._first
        while block is not None:
            start, room = block, 0
            while block is not None and block.free and room < size_bytes:
                room += block.size_bytes
                block = block.next
            if room >= size_bytes:
                return start
            while block is not None and not block.free:
                block = block.next
        raise AssertionError("an expandable segment ends in unmapped addresses")

    def _map(self, block: Block, size_bytes: int) -> tuple[Block, int]:
        mapped = min(-(-size_bytes // self._page_bytes) * self._page_bytes, block.size_bytes)
        if mapped < block.size_bytes:
            block.cut(mapped)
        block.mapped = True
        return self._pool.merge(block), mapped
