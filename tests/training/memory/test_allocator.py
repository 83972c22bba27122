"""The model of PyTorch's caching allocator, by hand-derived cases and against a search without any index."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.plan_memory_reference import chain_step
from tunebench.errors import InputError
from tunebench.training.memory import (
    Allocate,
    AllocatorUse,
    CachingAllocator,
    ExpandableAllocator,
    HostLink,
    Release,
    StepOperation,
    StepTensor,
    TrainingStep,
    allocator_use,
    memory_events,
    plan_memory,
    simulate,
    unplanned,
)

KIB, MIB = 1 << 10, 1 << 20
SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 2 * MIB),
    st.integers(MIB, 12 * MIB),
    st.integers(9 * MIB, 64 * MIB),
)
REQUESTS = st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 10**6)), max_size=60)
"""Whether to release a buffer, the size of a new one otherwise, and which buffer to release."""


def _peaks(*sizes: int, expandable: bool = False) -> tuple[int, int]:
    """Return allocated and reserved bytes of buffers that are all allocated together."""
    events = (Allocate(*allocation) for allocation in enumerate(sizes))
    use = allocator_use(events, expandable_segments=expandable)
    assert use.fits
    return use.allocated_bytes, use.reserved_bytes


@pytest.mark.parametrize(
    ("sizes", "allocated", "reserved"),
    [
        ((0,), 0, 0),
        ((1,), 512, 2 * MIB),
        ((512, 513), 512 + 1024, 2 * MIB),
        ((MIB, MIB), 2 * MIB, 2 * MIB),
        ((MIB, MIB, 1), 2 * MIB + 512, 4 * MIB),
        # A remainder of a small segment is split off from 512 bytes on.
        ((2 * MIB - 512 - MIB, MIB, 1), 2 * MIB, 2 * MIB),
        # The first size of the large pool, whose segments have 20 MiB.
        ((MIB + 1,), MIB + 512, 20 * MIB),
        ((5 * MIB,) * 4, 20 * MIB, 20 * MIB),
        # What remains is at most 1 MiB, so the block is not split and counts as a whole.
        ((19 * MIB // 2, 19 * MIB // 2), 19 * MIB // 2 + 21 * MIB // 2, 20 * MIB),
        ((10 * MIB - 512, 10 * MIB - 512), 10 * MIB - 512 + 10 * MIB + 512, 20 * MIB),
        # From 10 MiB on the segment has the size of the request, in multiples of 2 MiB.
        ((10 * MIB,), 10 * MIB, 10 * MIB),
        ((10 * MIB + 1,), 10 * MIB + 512, 12 * MIB),
        ((11 * MIB,), 12 * MIB, 12 * MIB),
        # The second block takes all that the first one leaves: less than 1 MiB would remain.
        ((100 * MIB + 1, MIB + 1), 102 * MIB, 102 * MIB),
    ],
)
def test_peaks_of_buffers_that_are_allocated_together_equal_those_derived_by_hand(
    sizes: tuple[int, ...], allocated: int, reserved: int
) -> None:
    assert _peaks(*sizes) == (allocated, reserved)


@pytest.mark.parametrize(
    ("sizes", "allocated", "reserved"),
    [
        ((1,), 512, 2 * MIB),
        ((MIB, MIB, 1), 2 * MIB + 512, 4 * MIB),
        # The third block of 1 MiB less 512 bytes lies in two units.
        ((MIB - 512,) * 3, 3 * MIB - 1536, 4 * MIB),
        ((MIB + 1,), MIB + 512, 20 * MIB),
        # Every remainder from 512 bytes on is split off.
        ((19 * MIB // 2, 19 * MIB // 2), 19 * MIB, 20 * MIB),
        # A block may lie in units that were mapped for others.
        ((12 * MIB,) * 5, 60 * MIB, 60 * MIB),
        ((100 * MIB + 1, MIB + 1), 101 * MIB + 1024, 120 * MIB),
    ],
)
def test_peaks_with_expandable_segments_equal_those_derived_by_hand(
    sizes: tuple[int, ...], allocated: int, reserved: int
) -> None:
    assert _peaks(*sizes, expandable=True) == (allocated, reserved)


def test_an_expandable_segment_grows_behind_its_last_free_block() -> None:
    events = [Allocate(0, 15 * MIB), Allocate(1, 15 * MIB), Release(1), Allocate(2, 40 * MIB)]
    assert allocator_use(events, expandable_segments=True).reserved_bytes == 60 * MIB
    assert allocator_use(events).reserved_bytes == (16 + 16 + 40) * MIB
    # A hole of 20 MiB is taken rather than the smaller block at the end, which can grow.
    events = [*(Allocate(buffer, 20 * MIB) for buffer in range(3)), Allocate(3, 25 * MIB)]
    events += [Release(1), Allocate(4, 12 * MIB), Allocate(5, 30 * MIB)]
    assert allocator_use(events, expandable_segments=True).reserved_bytes == 120 * MIB


def test_the_smallest_free_block_that_is_large_enough_is_reused() -> None:
    events = [Allocate(0, 40 * MIB), Allocate(1, 12 * MIB), Allocate(2, 30 * MIB)]
    events += [Release(0), Release(1), Release(2), Allocate(3, 25 * MIB), Allocate(4, 12 * MIB)]
    use = allocator_use([*events, Allocate(5, 40 * MIB)])
    assert use == AllocatorUse(allocated_bytes=82 * MIB, reserved_bytes=82 * MIB)
    assert allocator_use([*events, Allocate(5, 40 * MIB + 1)]).reserved_bytes == 82 * MIB + 42 * MIB


def test_free_neighbours_merge_whatever_the_order_of_their_release() -> None:
    for order in itertools.permutations(range(4)):
        events = [Allocate(buffer, 5 * MIB) for buffer in range(4)]
        use = allocator_use([*events, *map(Release, order), Allocate(4, 18 * MIB)])
        assert use.reserved_bytes == 20 * MIB


def test_fragmentation_reserves_more_than_is_allocated() -> None:
    events = [Allocate(buffer, 5 * MIB) for buffer in range(8)]
    events += [Release(buffer) for buffer in (0, 2, 4, 6)]  # 20 MiB free, no two of them neighbours
    assert allocator_use([*events, Allocate(8, 6 * MIB)]).reserved_bytes == 60 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_unused_memory_is_given_back_before_it_is_exhausted(expandable: bool) -> None:
    events = [Allocate(0, 40 * MIB), Allocate(1, 5 * MIB), Release(0), Allocate(2, 60 * MIB)]
    use = allocator_use(events, capacity_bytes=80 * MIB, expandable_segments=expandable)
    assert use == AllocatorUse(allocated_bytes=65 * MIB, reserved_bytes=80 * MIB, retries=1)
    assert allocator_use(events, expandable_segments=expandable).reserved_bytes == 120 * MIB
    failed = allocator_use(events, capacity_bytes=80 * MIB - 1, expandable_segments=expandable)
    assert (failed.fits, failed.failed_event, failed.reserved_bytes) == (False, 3, 60 * MIB)


def test_a_segment_with_a_block_in_use_is_not_given_back() -> None:
    events = [Allocate(0, 12 * MIB), Release(0), Allocate(1, 5 * MIB), Allocate(2, 20 * MIB)]
    assert not allocator_use(events, capacity_bytes=31 * MIB).fits
    assert allocator_use(events, capacity_bytes=32 * MIB).fits


def _scanned(requests: list[tuple[bool, int, int]]) -> list[tuple[int, int]]:
    """Return allocated and reserved bytes after each request, by a scan of all blocks of all segments."""
    segments: list[list[list[int]]] = []  # each block is its size and its buffer, -1 if free
    peaks, live = [], []
    for number, (release, requested, choice) in enumerate(requests):
        if release and live:
            buffer = live.pop(choice % len(live))
            for blocks in segments:
                for block in blocks:
                    block[1] = -1 if block[1] == buffer else block[1]
                blocks[:] = _merged(blocks)
        elif not release:
            live.append(number)
            size = -(-requested // 512) * 512
            small = size <= MIB
            fitting = [
                (block[0], segment_index, at)
                for segment_index, blocks in enumerate(segments)
                for at, block in enumerate(blocks)
                if block[1] == -1 and block[0] >= size and (sum(b[0] for b in blocks) == 2 * MIB) == small
            ]
            if not fitting:
                new = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
                segments.append([[new, -1]])
                fitting = [(new, len(segments) - 1, 0)]
            have, segment_index, at = min(fitting)
            rest = have - size
            split = rest >= 512 if small else rest > MIB
            segments[segment_index][at : at + 1] = [[size, number], [rest, -1]] if split else [[have, number]]
        flat = [block for blocks in segments for block in blocks]
        peaks.append((sum(b[0] for b in flat if b[1] != -1), sum(b[0] for b in flat)))
    return peaks


def _merged(blocks: list[list[int]]) -> list[list[int]]:
    """Return blocks with each run of free ones as one block."""
    merged: list[list[int]] = []
    for size, buffer in blocks:
        if merged and buffer == merged[-1][1] == -1:
            merged[-1][0] += size
        else:
            merged.append([size, buffer])
    return merged


class _Addresses:
    """The addresses of a pool with expandable segments: numbers of mapped units, and ranges in use."""

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.mapped: set[int] = set()
        self.used: dict[int, tuple[int, int]] = {}

    def runs(self) -> list[tuple[str, int, int]]:
        """Return state, start and size of each range; the last one is unmapped and has no end."""
        last = (max(self.mapped, default=-1) + 1) * self.unit
        points = {0, last, *(unit * self.unit for unit in self.mapped)}
        points |= {(unit + 1) * self.unit for unit in self.mapped}
        points |= {point for start, size in self.used.values() for point in (start, start + size)}
        runs: list[tuple[str, int, int]] = []
        for start, end in itertools.pairwise(sorted(points)):
            in_use = any(begin <= start < begin + size for begin, size in self.used.values())
            state = "used" if in_use else "free" if start // self.unit in self.mapped else "unmapped"
            if runs and runs[-1][0] == state != "used":
                runs[-1] = state, runs[-1][1], runs[-1][2] + end - start
            else:
                runs.append((state, start, end - start))
        if runs and runs[-1][0] == "unmapped":
            last = runs.pop()[1]
        return [*runs, ("unmapped", last, 1 << 60)]

    def allocate(self, buffer: int, size: int) -> None:
        """Take the smallest free range with what can be mapped behind it, else the first with enough room."""
        runs = self.runs()
        free = [
            (length, start, length + (after[2] if after[0] == "unmapped" else 0))
            for (state, start, length), after in itertools.pairwise(runs)
            if state == "free" and length >= size
        ]
        free.sort()
        address = next((run[1] for run, after in itertools.pairwise(free) if after[2] >= run[2]), None)
        if address is None and free:
            address = free[-1][1]
        if address is None:
            address = next(
                first
                for at, (state, start, _) in enumerate(runs)
                if state == "unmapped"
                for first in [runs[at - 1][1] if at and runs[at - 1][0] == "free" else start]
                if size <= self._room(runs, first)
            )
        self.used[buffer] = address, size
        self.mapped.update(range(address // self.unit, -(-(address + size) // self.unit)))

    def _room(self, runs: list[tuple[str, int, int]], first: int) -> int:
        behind = itertools.takewhile(lambda run: run[0] != "used", (run for run in runs if run[1] >= first))
        return sum(length for _, _, length in behind)


def _scanned_expandable(requests: list[tuple[bool, int, int]]) -> list[tuple[int, int]]:
    """Return allocated and mapped bytes after each request, by a scan of all addresses."""
    pools = {True: _Addresses(2 * MIB), False: _Addresses(20 * MIB)}
    peaks, live = [], []
    for number, (release, requested, choice) in enumerate(requests):
        size = -(-requested // 512) * 512
        if release and live:
            small, buffer = live.pop(choice % len(live))
            del pools[small].used[buffer]
        elif not release:
            live.append((size <= MIB, number))
            pools[size <= MIB].allocate(number, size)
        used = sum(length for pool in pools.values() for _, length in pool.used.values())
        peaks.append((used, sum(len(pool.mapped) * pool.unit for pool in pools.values())))
    return peaks


@pytest.mark.parametrize(
    ("kind", "scanned"),
    [(CachingAllocator, _scanned), (ExpandableAllocator, _scanned_expandable)],
)
@given(requests=REQUESTS)
def test_random_requests_take_as_much_as_by_a_scan_of_all_blocks(
    kind: type[CachingAllocator],
    scanned: Callable[[list[tuple[bool, int, int]]], list[tuple[int, int]]],
    requests: list[tuple[bool, int, int]],
) -> None:
    allocator = kind()
    live, peaks = [], []
    for release, size, choice in requests:
        if release and live:
            allocator.release(live.pop(choice % len(live)))
        elif not release:
            live.append(allocator.allocate(size))
        peaks.append((allocator.allocated_bytes, allocator.reserved_bytes))
    assert peaks == scanned(requests)


@pytest.mark.parametrize("kind", [CachingAllocator, ExpandableAllocator])
@given(requests=REQUESTS, capacity=st.sampled_from([None, 40 * MIB, 100 * MIB]))
def test_blocks_in_use_never_overlap_and_all_are_given_back(
    kind: type[CachingAllocator], requests: list[tuple[bool, int, int]], capacity: int | None
) -> None:
    allocator = kind(capacity)
    live = []
    for release, size, choice in requests:
        if release and live:
            allocator.release(live.pop(choice % len(live)))
        elif not release and (block := allocator.allocate(size)) is not None:
            assert block.size_bytes >= size
            assert block.address % 512 == 0
            live.append(block)
        ranges = sorted((block.address, block.address + block.size_bytes) for block in live)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
        assert sum(block.size_bytes for block in live) == allocator.allocated_bytes
        assert allocator.allocated_bytes <= allocator.reserved_bytes
        assert capacity is None or allocator.reserved_bytes <= capacity
    for block in live:
        allocator.release(block)
    assert allocator.allocated_bytes == 0
    if capacity is not None:
        assert allocator.allocate(capacity) is not None  # every segment can be given back


def test_a_schedule_takes_its_simulated_peak_rounded_up_if_no_block_stays_unsplit() -> None:
    step = chain_step(6, size_bytes=2 * MIB, link=HostLink(to_host_gb_s=25, to_device_gb_s=25))
    schedule = unplanned(step)
    peak = simulate(step, schedule).peak_bytes
    use = allocator_use(memory_events(step, schedule))
    assert (use.allocated_bytes, use.reserved_bytes) == (peak, 20 * MIB)
    plan = plan_memory(step, 8 * MIB)
    assert allocator_use(memory_events(step, plan.schedule)).allocated_bytes == plan.simulation.peak_bytes


def test_workspaces_residents_and_results_of_several_steps_are_counted() -> None:
    step = TrainingStep(
        tensors=(
            StepTensor(name="weight", size_bytes=12 * MIB, resident=True),
            StepTensor(name="gradient", size_bytes=30 * MIB),
        ),
        operations=(
            StepOperation(name="op", time_us=1, inputs=(0,), outputs=(1,), workspace_bytes=50 * MIB),
        ),
        results=(1,),
    )
    events = list(memory_events(step, unplanned(step), steps=2))
    assert events == [
        Allocate(0, 12 * MIB),
        *(Allocate(1, 30 * MIB), Allocate(2, 50 * MIB), Release(2)),
        *(Release(1), Allocate(1, 30 * MIB), Allocate(2, 50 * MIB), Release(2)),
    ]
    # The gradient of the second step takes the smallest free block.
    assert allocator_use(events).reserved_bytes == 92 * MIB


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([Release(3)], "releases buffer 3, which is not allocated"),
        ([Allocate(3, 1), Allocate(3, 1)], "allocates buffer 3 again"),
        ([Allocate(3, 0), Allocate(3, 1)], "allocates buffer 3 again"),
    ],
)
def test_events_that_no_program_makes_are_refused(events: list[Allocate | Release], found: str) -> None:
    with pytest.raises(InputError, match=found):
        allocator_use(events)
