"""strided_reduction on the CPU: parts of the reduced axes in parallel, then a join of their results.

Loops are generated from the index maps, with sizes and strides as constants. With `lanes=reduced` the inner
loop reduces elements of one result, in registers. With `lanes=kept` it adds one element to each of up to
`block` adjacent results, `unroll` times; results are in memory that stays in the cache. In both cases the
inner loop is along the axis along which operands are contiguous. The longest reduced loop is split into
`parts`, so that few results keep all cores busy. Parts are joined in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tunebench.device import Device
from tunebench.index_map import row_major
from tunebench.kernels.common.expression import compiled, filled, function_text, variable
from tunebench.kernels.common.numba_cpu import jitted, rank
from tunebench.kernels.common.numba_expression import PRINTER, has_two_forms
from tunebench.kernels.common.numba_reduction import exact, join_of, neutral_of
from tunebench.kernels.common.numba_strided import (
    Nest,
    Part,
    addressed,
    affine,
    decoded,
    indented,
    strided_scope,
)
from tunebench.kernels.common.strided import best_lanes, lane_axis, least_of_element
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, NumbaCpuVariant
from tunebench.workload import Tensor
from tunebench.workloads.operators.strided_reduction import StridedReduction

LEAST_PART = 64
"""Least elements of a part."""
LEAST_BLOCK = 16
"""Least adjacent results of a task."""


def _lanes(workload: StridedReduction) -> int:
    """Return the extent of the best axis that is not reduced; 0 if there is none."""
    axis = lane_axis(workload, reduced=False)
    return 0 if axis is None else workload.extents[axis]


SPACE = Space(
    (
        Parameter(
            "lanes", ("reduced", "kept"), "axis of the inner loop: a reduced one, or one of the results"
        ),
        Parameter("block", tuple(2**n for n in range(4, 15)), "results of a task, with lanes=kept"),
        Parameter("parts", tuple(2**n for n in range(11)), "parts that the reduced axes are split into"),
        Parameter("unroll", (1, 2, 4, 8), "elements that are added to a result at a time, with lanes=kept"),
        Parameter("functions", ("poly", "libm"), "poly: polynomials, which vectorise; libm: calls"),
    ),
    (
        lambda lanes, workload: (lanes == "reduced") | (_lanes(workload) > 0),
        lambda lanes, block, workload: (
            (block == LEAST_BLOCK) | ((lanes == "kept") & (block < 2 * _lanes(workload)))
        ),
        lambda parts, workload: (parts == 1) | (parts * LEAST_PART <= workload.terms),
        lambda lanes, unroll, workload: (unroll == 1) | ((lanes == "kept") & (unroll <= workload.terms)),
        lambda functions, workload: (functions == "poly") | has_two_forms(workload),
    ),
)

VALUE = """
def value_@RUN@(@VALUES@):
    @ASSIGNMENTS@
    return @RESULT@
"""

SUM = """
def @RUN@(@PARAMETERS@rows, count):
    total = f32(0)
    for i in range(rows):
        @HOISTED@
        for j in range(count):
            @LOADS@
            total += value_@RUN@(@VALUES@)
    return total
"""

# The maximum of integers vectorises; NaN is tracked separately.
EXTREME = """
def @RUN@(@PARAMETERS@rows, count):
    found, broken = rank_of(neutral), np.int32(0)
    for i in range(rows):
        @HOISTED@
        for j in range(count):
            @LOADS@
            each = value_@RUN@(@VALUES@)
            broken |= np.int32(each != each)
            found = extreme(found, rank_of(each))
    return f32(np.nan) if broken else value_of(found)
"""

KEPT = """
def @RUN@(@PARAMETERS@totals, to, rows, count):
    whole = rows - rows % @UNROLL@
    for i in range(0, whole, @UNROLL@):
        @HOISTED_TOGETHER@
        for j in range(count):
            total = totals[to + j]
            @TOGETHER@
            totals[to + j] = total
    for i in range(whole, rows):
        @HOISTED@
        for j in range(count):
            @LOADS@
            totals[to + j] = join(totals[to + j], value_@RUN@(@VALUES@))
"""

OF_LANES = """
def finish(in_x):
    @ENDING@
    return @ENDED@

def put(out_at, at, total):
    out_at[at] = write(finish(total * f32(@FACTOR@)))

def reduction(@NAMES@, out@PARTIAL@):
    @BEGIN@
    for task in numba.prange(@RESULTS@ * @PARTS@):
        @MARKED@
        part, result = task % @PARTS@, task // @PARTS@
        @DECODE@
        total = neutral
        for r in range(@OUTER@):
            @DECODE_REDUCED@
            total = join(total, block(@PASSED@, @LOCATED@, @SECOND@, @LANE@))
        @KEEP@
    @END@
"""
END_OF_LANES = """for result in numba.prange(@RESULTS@):
    total = partial[result, 0]
    for part in range(1, @PARTS@):
        total = join(total, partial[result, part])
    put(@OUT@, result, total)
"""

OF_KEPT = """
def finish(in_x):
    @ENDING@
    return @ENDED@

def clear(totals, to, count):
    for j in range(count):
        totals[to + j] = neutral

def put(totals, to, out_at, out_from, count):
    for part in range(1, @PARTS@):
        for j in range(to, to + count):
            totals[j] = join(totals[j], totals[part * @RESULTS@ + j])
    for j in range(count):
        out_at[out_from + j * @STEP@] = write(finish(totals[to + j] * f32(@FACTOR@)))

def reduction(@NAMES@, out, partial):
    @BEGIN@
    for task in numba.prange(@TASKS@ * @PARTS@):
        @MARKED@
        part, of_all = task % @PARTS@, task // @PARTS@
        first_lane, outer = of_all % @BLOCKS@ * @BLOCK@, of_all // @BLOCKS@
        count = min(@BLOCK@, @LANES@ - first_lane)
        to = part * @RESULTS@ + outer * @LANES@ + first_lane
        @DECODE@
        clear(address_of(partial), to, count)
        for r in range(@OUTER@):
            @DECODE_REDUCED@
            block(@PASSED@, @LOCATED@, @SECOND@, @LANE@, address_of(partial), to - first_lane)
        @KEEP@
    @END@
"""
END_OF_KEPT = """for task in numba.prange(@TASKS@):
    first_lane, outer = task % @BLOCKS@ * @BLOCK@, task // @BLOCKS@
    count = min(@BLOCK@, @LANES@ - first_lane)
    to = outer * @LANES@ + first_lane
    @DECODE@
    put(address_of(partial), to, @OUT@, @PLACE@, count)
"""


class NumbaCpuStridedReduction(NumbaCpuVariant[StridedReduction]):
    """Variant for every expression, layout and type."""

    name = "numba_cpu"
    operator = StridedReduction
    space = SPACE

    def default(self, workload: StridedReduction, device: Device) -> Config:
        """Return lanes along which operands are contiguous, and parts if there are too few results."""
        lanes, block, tasks = best_lanes(workload), LEAST_BLOCK, workload.results
        if lanes == "kept":
            block = max(b for b in (16, 64, 256, 1024) if b == LEAST_BLOCK or b < 2 * _lanes(workload))
            tasks = workload.results // _lanes(workload) * -(-_lanes(workload) // block)
        parts = 1
        while parts < 1024 and parts * tasks < 16 and 2 * parts * 4 * LEAST_PART <= workload.terms:
            parts *= 2
        unroll = max(u for u in (1, 2, 4) if u <= workload.terms) if lanes == "kept" else 1
        return Config({"lanes": lanes, "block": block, "parts": parts, "unroll": unroll, "functions": "poly"})

    def costs(self, workload: StridedReduction, table: Table, device: Device) -> Costs:
        """Count the products or the sums, whichever are more; one instruction may compute one of each."""
        least, counts = least_of_element(workload, may_be_0=False)
        # Elements that are 0 need not be added.
        joins = not any(operand.index.guards for operand in workload.maps.values())
        each = max(least, counts.get("add", 0) + joins if workload.is_sum else float(joins))
        return Costs(blocks=1, full_blocks=0, threads=1, fma=each * workload.elements)

    def scratch(self, workload: StridedReduction, config: Config) -> tuple[Tensor, ...]:
        """Return memory for results of parts: (results, parts), or (parts, results) in the order of tasks."""
        parts, results = config["parts"], workload.results
        if config["lanes"] == "reduced":
            return (Tensor(name="partial", shape=(results, parts), dtype="f32"),) if parts > 1 else ()
        return (Tensor(name="partial", shape=(parts, results), dtype="f32"),)

    def generated(self, workload: StridedReduction, config: Config) -> str:
        """Return the functions of elements, the loops over them, and the kernel that calls them."""
        nest, kept = _nest(workload, config), config["lanes"] == "kept"
        call = "{run}({at}" + ("totals, to + j, rows, count)" if kept else "rows, count)")
        if kept:
            functions = nest.text(call, state=", totals, to")
        else:
            functions = nest.text(
                f"total = join(total, {call})", state="", before=["total = neutral"], after=["return total"]
            )
        return functions + (_of_kept if kept else _of_lanes)(workload, config, nest)

    def kernel(self, workload: StridedReduction, config: Config) -> Callable[..., None]:
        """Return the kernel of this workload, which takes operands, out, and memory for parts, if any."""
        text = self.generated(workload, config)
        scope = strided_scope(workload, config["functions"])
        scope |= {"neutral": neutral_of(workload), "join": join_of(workload)}
        scope["rank_of"], scope["value_of"] = rank()
        scope["extreme"] = min if workload.reduce == "min" else max
        nest = _nest(workload, config)
        for name in ("finish", *(f"value_{run}" for run in nest.names.values())):
            scope[name] = exact(compiled(function_text(text, name), name, dict(scope)))
        nest.compile(text, scope, self.fastmath)
        for name in ("put", *(("clear",) if config["lanes"] == "kept" else ())):
            scope[name] = jitted()(compiled(function_text(text, name), name, dict(scope)))
        return compiled(function_text(text, "reduction"), "reduction", scope)


def _nest(workload: StridedReduction, config: Config) -> Nest:
    """Return the loops over the lane axis and the longest other reduced axis."""
    lane = lane_axis(workload, reduced=config["lanes"] == "reduced")
    assert lane is not None
    extents = workload.extents
    others = [axis for axis in range(len(extents) - workload.axes, len(extents)) if axis != lane]
    second = max(others, key=lambda axis: extents[axis], default=None)
    template = KEPT if config["lanes"] == "kept" else SUM if workload.is_sum else EXTREME

    def write(part: Part) -> str:
        assignments, result = part.expression()
        hoisted, loads = (part.loads(hoisted=hoisted) for hoisted in (True, False))
        together: dict[bool, list[str]] = {True: [], False: []}
        for n in range(config["unroll"]):
            for once in (True, False):
                together[once] += part.loads(hoisted=once, row=f"i + {n}", suffix=f"_{n}")
            together[False].append(f"total = join(total, value_@RUN@({part.values(f'_{n}')}))")
        return indented(
            filled(
                VALUE + template,
                PARAMETERS=part.parameters,
                VALUES=part.values(),
                RESULT=result,
                UNROLL=str(config["unroll"]),
            ),
            HOISTED=hoisted,
            LOADS=loads,
            ASSIGNMENTS=assignments,
            HOISTED_TOGETHER=together[True],
            TOGETHER=together[False],
        )

    return Nest(workload, lane, second, write)


def _reduced_loops(
    workload: StridedReduction, config: Config, nest: Nest
) -> tuple[dict[str, str], list[str], dict[int, str]]:
    """Return the ranges of the reduced loops, and how to decode the outer one; parts split the longest."""
    extents, first = workload.extents, len(workload.extents) - workload.axes
    outer = [axis for axis in range(first, len(extents)) if axis not in (nest.lane, nest.second)]
    lengths = {
        "OUTER": math.prod(extents[axis] for axis in outer),
        "SECOND": 1 if nest.second is None else extents[nest.second],
    }
    if config["lanes"] == "reduced":
        lengths["LANE"] = extents[nest.lane]
    longest = max(lengths, key=lambda name: lengths[name])
    ranges = {name: f"0, {length}" for name, length in lengths.items()}
    if config["parts"] > 1:
        length, parts = lengths[longest], config["parts"]
        ranges[longest] = f"{length} * part // {parts}, {length} * (part + 1) // {parts}"
    return (ranges, *decoded(outer, extents, "r"))


def _of_lanes(workload: StridedReduction, config: Config, nest: Nest) -> str:
    """Return the kernel whose tasks have a result, or a part of it."""
    kept = range(len(workload.extents) - workload.axes)
    ranges, decode_reduced, reduced = _reduced_loops(workload, config, nest)
    decode, index = decoded(kept, workload.extents, "result")
    single = config["parts"] == 1
    ending, ended = PRINTER.write(workload.end)
    text = indented(
        OF_LANES,
        ENDING=[line.strip() for line in ending],
        DECODE=decode,
        DECODE_REDUCED=decode_reduced,
        KEEP=["put(@OUT@, result, total)" if single else "partial[result, part] = total"],
        BEGIN=nest.begin,
        MARKED=nest.marked,
        END=[*([] if single else END_OF_LANES.splitlines()), *nest.end],
    )
    return filled(
        text,
        **_pieces(workload, config, ended),
        **ranges,
        PARTIAL="" if single else ", partial",
        PASSED=nest.passed,
        LOCATED=nest.located({**index, **reduced}),
    )


def _of_kept(workload: StridedReduction, config: Config, nest: Nest) -> str:
    """Return the kernel whose tasks have adjacent results, or a part of them."""
    extents, rank_of_result = workload.extents, len(workload.extents) - workload.axes
    ranges, decode_reduced, reduced = _reduced_loops(workload, config, nest)
    decode, index = decoded([axis for axis in range(rank_of_result) if axis != nest.lane], extents, "outer")
    single, steps = config["parts"] == 1, row_major(extents[:rank_of_result])
    blocks = -(-extents[nest.lane] // config["block"])
    ending, ended = PRINTER.write(workload.end)
    text = indented(
        OF_KEPT,
        KEEP=["put(address_of(partial), to, @OUT@, @PLACE@, count)"] if single else [],
        BEGIN=nest.begin,
        MARKED=nest.marked,
        END=[*([] if single else END_OF_KEPT.splitlines()), *nest.end],
    )
    text = indented(
        text,
        ENDING=[line.strip() for line in ending],
        DECODE=decode,
        DECODE_REDUCED=decode_reduced,
    )
    return filled(
        text,
        **_pieces(workload, config, ended),
        **ranges,
        LANE="first_lane, first_lane + count",
        PLACE=affine(steps, {**index, nest.lane: "first_lane"}, 0),
        STEP=str(steps[nest.lane]),
        LANES=str(extents[nest.lane]),
        BLOCK=str(config["block"]),
        BLOCKS=str(blocks),
        TASKS=str(workload.results // extents[nest.lane] * blocks),
        PASSED=nest.passed,
        LOCATED=nest.located({**index, **reduced}),
    )


def _pieces(workload: StridedReduction, config: Config, ended: str) -> dict[str, str]:
    """Return the pieces that both kernels have."""
    return {
        "NAMES": ", ".join(map(variable, workload.input_names)),
        "OUT": addressed("out", workload.dtype),
        "RESULTS": str(workload.results),
        "PARTS": str(config["parts"]),
        "FACTOR": repr(workload.factor),
        "ENDED": ended,
    }


VARIANT = NumbaCpuStridedReduction()
