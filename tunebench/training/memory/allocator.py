"""A model of PyTorch's caching allocator for CUDA: the memory that a schedule takes, with fragmentation.

    use = allocator_use(memory_events(step, plan.schedule), capacity_bytes=16 * 2**30)
    use.allocated_bytes, use.reserved_bytes, use.fits

The allocator requests segments from the driver, splits them into blocks, and keeps freed blocks for later
requests. On a processor each tensor has its own memory of the requested size; `Simulation.peak_bytes` states
that peak, which `torch.distributed._tools.mem_tracker.MemTracker` reports.

The model has one stream and no limit of split sizes. Of equal free blocks the allocator takes the one at the
lowest address. The driver chooses the addresses of segments; here they grow with time. Not compared with a
GPU.

With ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`` (`ExpandableAllocator`), each pool has one range of
addresses, into which memory is mapped in units of 2 MiB for small blocks and of 20 MiB for large ones. A
block may span units that were mapped at different times, and every unit without a block in use can be given
back. PyTorch reserves addresses of 9/8 of the memory for a range, and makes another range when they are used
up; here ranges have no end.

Source: `c10/cuda/CUDACachingAllocator.cpp` of PyTorch (commit 001074d25084), and the sizes in
`c10/core/AllocatorConfig.h` of PyTorch 2.13.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tunebench.errors import InputError
from tunebench.training.memory.schedule import Action, Compute, CopyIn, Free
from tunebench.training.memory.step import TrainingStep

__all__ = [
    "Allocate",
    "AllocatorUse",
    "Block",
    "CachingAllocator",
    "ExpandableAllocator",
    "Release",
    "allocator_use",
    "memory_events",
]

MIN_BLOCK_BYTES = 512
"""Sizes are multiples of this."""

SMALL_BYTES = 1 << 20
"""The largest size in the pool of small blocks; a larger remainder of a large block is split off."""

SMALL_SEGMENT_BYTES = 2 << 20
"""Size of the segments of small blocks."""

OWN_SEGMENT_BYTES = 10 << 20
"""The least size for which a segment of this size, rounded up, is requested."""

LARGE_SEGMENT_BYTES = 20 << 20
"""Size of the segments that are requested for large blocks below `OWN_SEGMENT_BYTES`."""

SEGMENT_MULTIPLE_BYTES = 2 << 20
"""Sizes of the other segments are multiples of this."""


@dataclass(frozen=True, slots=True)
class Allocate:
    """A request for memory.

    Attributes:
        buffer: A number that no other memory has at the same time.
        size_bytes: Requested bytes; for 0 the allocator does nothing.
    """

    buffer: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Release:
    """The return of memory to the allocator."""

    buffer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorUse:
    """The memory that a sequence of requests takes.

    Attributes:
        allocated_bytes: Most bytes in blocks in use, as `torch.cuda.max_memory_allocated` reports.
        reserved_bytes: Most bytes in segments, as `torch.cuda.max_memory_reserved` reports.
        retries: Number of times that the allocator gave all unused segments back to the driver, because a
            new one did not fit.
        failed_event: Place of the request that ran out of memory; none if all succeeded.
    """

    allocated_bytes: int
    reserved_bytes: int
    retries: int = 0
    failed_event: int | None = None

    @property
    def fits(self) -> bool:
        """Whether no request ran out of memory."""
        return self.failed_event is None


class Block:
    """A range of a segment.

    Attributes:
        address: Address of the first byte.
        size_bytes: Bytes.
        small: Whether the segment is in the pool of small blocks.
        previous: The block before it in the segment.
        next: The block behind it in the segment.
        free: Whether the block has memory and is not in use.
        mapped: Whether the block has memory. Without it, the block is an address range of an expandable
            segment.
    """

    __slots__ = ("address", "free", "mapped", "next", "previous", "size_bytes", "small")

    def __init__(self, address: int, size_bytes: int, *, small: bool, mapped: bool = True) -> None:
        self.address, self.size_bytes, self.small = address, size_bytes, small
        self.previous: Block | None = None
        self.next: Block | None = None
        self.free = False
        self.mapped = mapped


class _Pool:
    """The free blocks of one kind, by size and then by address."""

    def __init__(self) -> None:
        self._order: list[tuple[int, int]] = []
        self._blocks: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        """Add a free block."""
        block.free = True
        insort(self._order, (block.size_bytes, block.address))
        self._blocks[block.address] = block

    def remove(self, block: Block) -> None:
        """Remove a free block."""
        block.free = False
        del self._order[bisect_left(self._order, (block.size_bytes, block.address))]
        del self._blocks[block.address]

    def at_least(self, size_bytes: int) -> Iterator[Block]:
        """Yield the blocks of at least this size, the smallest first."""
        for position in range(bisect_left(self._order, (size_bytes, -1)), len(self._order)):
            yield self._blocks[self._order[position][1]]


class CachingAllocator:
    """The allocator of one device.

    Attributes:
        allocated_bytes: Bytes in blocks in use.
        reserved_bytes: Bytes in segments.
        retries: Number of times that unused segments were given back because a new one did not fit.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        """Make an allocator without segments.

        Args:
            capacity_bytes: Most bytes in segments; none for no limit.
        """
        self.allocated_bytes = self.reserved_bytes = self.retries = 0
        self._capacity_bytes = capacity_bytes
        self._next_address = 0
        self._small, self._large = _Pool(), _Pool()

    def allocate(self, size_bytes: int) -> Block | None:
        """Return a block of at least this size, or none if memory is exhausted.

        Args:
            size_bytes: Requested bytes, at least 1.
        """
        size = max(MIN_BLOCK_BYTES, _rounded_up(size_bytes, MIN_BLOCK_BYTES))
        small = size <= SMALL_BYTES
        pool = self._pool(small)
        block = self._best_fit(pool, size)
        if block is None:
            block = self._new_block(size, small) or self._new_block_after_return(size, small)
        if block is None:
            return None
        pool.remove(block)
        if block.size_bytes - size >= self._least_remainder(small):
            pool.add(_split(block, size))
        self.allocated_bytes += block.size_bytes
        return block

    def release(self, block: Block) -> None:
        """Return a block that `allocate` returned, and merge it with free neighbours."""
        self.allocated_bytes -= block.size_bytes
        self._add_free(block)

    def _pool(self, small: bool) -> _Pool:
        return self._small if small else self._large

    def _add_free(self, block: Block) -> Block:
        """Merge a block with free neighbours, and return the free block."""
        pool = self._pool(block.small)
        before, after = block.previous, block.next
        if before is not None and before.free:
            pool.remove(before)
            _merge(before, block)
            block = before
        if after is not None and after.free:
            pool.remove(after)
            _merge(block, after)
        pool.add(block)
        return block

    def _best_fit(self, pool: _Pool, size_bytes: int) -> Block | None:
        """Return the smallest free block that is large enough; none if there is none."""
        return next(pool.at_least(size_bytes), None)

    def _least_remainder(self, small: bool) -> int:
        """Return the least bytes that are split off a block: below them, a block counts as a whole."""
        return MIN_BLOCK_BYTES if small else SMALL_BYTES + 1

    def _new_block(self, size_bytes: int, small: bool) -> Block | None:
        """Return a free block in new memory of the driver; none if it does not fit."""
        segment_bytes = _segment_bytes(size_bytes)
        if not self._fits(segment_bytes):
            return None
        self.reserved_bytes += segment_bytes
        block = Block(self._next_address, segment_bytes, small=small)
        # Addresses are never used again: they only order blocks of equal size.
        self._next_address += segment_bytes
        return self._add_free(block)

    def _new_block_after_return(self, size_bytes: int, small: bool) -> Block | None:
        """Give unused memory back to the driver, and return a free block in new memory."""
        self.retries += 1
        for pool in (self._large, self._small):
            for block in list(pool.at_least(0)):
                self._give_back(block, pool)
        return self._new_block(size_bytes, small)

    def _fits(self, size_bytes: int) -> bool:
        return self._capacity_bytes is None or self.reserved_bytes + size_bytes <= self._capacity_bytes

    def _give_back(self, block: Block, pool: _Pool) -> None:
        """Give the segment of a free block back to the driver, if the block is all of it."""
        if block.previous is None and block.next is None:
            pool.remove(block)
            self.reserved_bytes -= block.size_bytes


class ExpandableAllocator(CachingAllocator):
    """The allocator of one device with expandable segments: see the description of this module."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        """Make an allocator without memory.

        Args:
            capacity_bytes: Most bytes that are mapped; none for no limit.
        """
        super().__init__(capacity_bytes)
        self._unmapped = {
            small: [Block(start, _ADDRESSES, small=small, mapped=False)]
            for small, start in ((True, 0), (False, _ADDRESSES))
        }
        """Ranges of addresses without memory, by pool, in ascending order."""

    def _best_fit(self, pool: _Pool, size_bytes: int) -> Block | None:
        """Return the smallest free block that is large enough, with the addresses behind it that are free."""
        best = None
        for block in pool.at_least(size_bytes):
            if best is not None and _expandable_bytes(block) >= _expandable_bytes(best):
                break
            best = block
        return best

    def _least_remainder(self, small: bool) -> int:
        return MIN_BLOCK_BYTES

    def _new_block(self, size_bytes: int, small: bool) -> Block | None:
        """Map memory behind a free block, or at the first addresses with enough room; return a free block."""
        block = self._first_room(size_bytes, small)
        while not block.mapped or block.size_bytes < size_bytes:
            hole = block.next if block.mapped else block
            missing_bytes = size_bytes - (block.size_bytes if block.mapped else 0)
            assert hole is not None
            extended = self._map(hole, min(hole.size_bytes, missing_bytes))
            if extended is None:
                return None
            block = extended
        return block

    def _first_room(self, size_bytes: int, small: bool) -> Block:
        """Return the first block of the first addresses without a block in use that have enough room."""
        for hole in self._unmapped[small]:
            first = hole.previous if hole.previous is not None and hole.previous.free else hole
            room = 0
            block: Block | None = first
            while block is not None and room < size_bytes and (block.free or not block.mapped):
                room += block.size_bytes
                block = block.next
            if room >= size_bytes:
                return first
        raise AssertionError("the last range of addresses has no end")

    def _map(self, hole: Block, size_bytes: int) -> Block | None:
        """Map memory at the start of a range, and return the free block; none if it does not fit."""
        mapped_bytes = _rounded_up(size_bytes, _unit_bytes(hole))
        if not self._fits(mapped_bytes):
            return None
        self.reserved_bytes += mapped_bytes
        ranges = self._unmapped[hole.small]
        position = ranges.index(hole)
        ranges[position : position + 1] = (
            [_split(hole, mapped_bytes)] if mapped_bytes < hole.size_bytes else []
        )
        hole.mapped = True
        return self._add_free(hole)

    def _give_back(self, block: Block, pool: _Pool) -> None:
        """Unmap the units that lie within a free block."""
        unit = _unit_bytes(block)
        begin = _rounded_up(block.address, unit)
        end = (block.address + block.size_bytes) // unit * unit
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            hole = _split(block, begin - block.address)
            pool.add(block)
        else:
            hole = block
        if end < hole.address + hole.size_bytes:
            pool.add(_split(hole, end - hole.address))
        hole.mapped = False
        self.reserved_bytes -= hole.size_bytes
        self._add_unmapped(hole)

    def _add_unmapped(self, hole: Block) -> None:
        """Add a range without memory, merged with its neighbours."""
        ranges = self._unmapped[hole.small]
        before, after = hole.previous, hole.next
        if before is not None and not before.mapped:
            ranges.remove(before)
            _merge(before, hole)
            hole = before
        if after is not None and not after.mapped:
            ranges.remove(after)
            _merge(hole, after)
        insort(ranges, hole, key=lambda block: block.address)


_ADDRESSES = LARGE_SEGMENT_BYTES << 40
"""Bytes of a range of addresses: a multiple of both units, and more than any device has."""


def _unit_bytes(block: Block) -> int:
    """Return the bytes of the units in which memory of an expandable segment is mapped."""
    return SMALL_SEGMENT_BYTES if block.small else LARGE_SEGMENT_BYTES


def _expandable_bytes(block: Block) -> int:
    """Return the bytes of a free block and of the addresses behind it that can be mapped."""
    after = block.next
    return block.size_bytes + (after.size_bytes if after is not None and not after.mapped else 0)


def memory_events(
    step: TrainingStep, schedule: Sequence[Action], *, steps: int = 1
) -> Iterator[Allocate | Release]:
    """Yield the requests of a schedule, in order.

    Resident tensors are allocated first. A workspace is allocated behind the outputs of its operation, and
    released after it. The results of a step are released before the next step.

    Args:
        step: The training step.
        schedule: Actions in order.
        steps: Number of times that the schedule is executed. A step begins with the free blocks that the one
            before it left, so several steps can reserve more memory than the first one alone.
    """
    workspace = len(step.tensors)
    for index, tensor in enumerate(step.tensors):
        if tensor.resident:
            yield Allocate(index, tensor.size_bytes)
    for repetition in range(steps):
        if repetition:
            yield from (Release(tensor) for tensor in step.movable(step.results))
        for action in schedule:
            if isinstance(action, Compute):
                operation = step.operations[action.operation]
                yield from (Allocate(tensor, step.tensors[tensor].size_bytes) for tensor in operation.outputs)
                if operation.workspace_bytes:
                    # One number for all workspaces: two are never allocated at the same time.
                    yield Allocate(workspace, operation.workspace_bytes)
                    yield Release(workspace)
            elif isinstance(action, CopyIn):
                yield Allocate(action.tensor, step.tensors[action.tensor].size_bytes)
            elif isinstance(action, Free):
                yield Release(action.tensor)


def allocator_use(
    events: Iterable[Allocate | Release],
    *,
    capacity_bytes: int | None = None,
    expandable_segments: bool = False,
) -> AllocatorUse:
    """Return the memory that a sequence of requests takes; it ends at a request that runs out of memory.

    Args:
        events: Requests and returns, in order.
        capacity_bytes: Most bytes that the allocator can reserve; none for no limit.
        expandable_segments: Whether segments are expandable, as with
            ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.

    Raises:
        InputError: A buffer is allocated twice, or released without being allocated.
    """
    allocator = (ExpandableAllocator if expandable_segments else CachingAllocator)(capacity_bytes)
    blocks: dict[int, Block | None] = {}
    allocated = reserved = 0
    failed = None
    for index, event in enumerate(events):
        if isinstance(event, Release):
            if event.buffer not in blocks:
                raise InputError(
                    f"memory event {index} releases buffer {event.buffer}, which is not allocated"
                )
            block = blocks.pop(event.buffer)
            if block is not None:
                allocator.release(block)
            continue
        if event.buffer in blocks:
            raise InputError(f"memory event {index} allocates buffer {event.buffer} again before its release")
        block = allocator.allocate(event.size_bytes) if event.size_bytes else None
        if block is None and event.size_bytes:
            failed = index
            break
        blocks[event.buffer] = block
        allocated = max(allocated, allocator.allocated_bytes)
        reserved = max(reserved, allocator.reserved_bytes)
    return AllocatorUse(
        allocated_bytes=allocated, reserved_bytes=reserved, retries=allocator.retries, failed_event=failed
    )


def _segment_bytes(size_bytes: int) -> int:
    """Return the size of the segment that is requested for a block."""
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return _rounded_up(size_bytes, SEGMENT_MULTIPLE_BYTES)


def _rounded_up(size_bytes: int, multiple: int) -> int:
    return -(-size_bytes // multiple) * multiple


def _split(block: Block, size_bytes: int) -> Block:
    """Shorten a block and return the rest as another one."""
    rest = Block(
        block.address + size_bytes, block.size_bytes - size_bytes, small=block.small, mapped=block.mapped
    )
    rest.previous, rest.next = block, block.next
    if rest.next is not None:
        rest.next.previous = rest
    block.next, block.size_bytes = rest, size_bytes
    return rest


def _merge(block: Block, after: Block) -> None:
    """Extend a block by the one behind it."""
    block.size_bytes += after.size_bytes
    block.next = after.next
    if block.next is not None:
        block.next.previous = block
