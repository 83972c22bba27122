"""Check of results too large to compute twice: edges, sampled blocks, and sums of all elements.

Three checks complement each other. The last rows and columns, and blocks spread so that each band of rows and
of columns contains at least one, are compared element by element: they detect small errors everywhere, and
errors at edges. Sums of short runs of elements with random signs are compared with the same sums of the
reference, which linearity makes cheap. Every element is part of one sum, so that a single element that is
grossly wrong, or was never written, is detected.

Operators provide the parts by two optional methods: `reference_block(inputs, batch_index, rows, cols)`, and
`reference_sums(inputs, batch_index, signs, width)`, which returns None if the operator is not linear. The
output is (batch, rows, columns), or (rows, columns), which counts as a batch of one.

Other operators consist of independent parts (`Workload.part`: images, heads). The first, the last and some
parts between are checked in full.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tunebench._figure import significant
from tunebench._lazy import np
from tunebench.measure.verify import (
    Errors,
    EveryElement,
    InputSet,
    OutputCheck,
    error_shares,
    errors_of,
    magnitude_of,
    share_of,
)
from tunebench.workload import Part, Reference, Workload

if TYPE_CHECKING:
    import numpy

    from tunebench.workload import Array

__all__ = [
    "AFFORDABLE_FLOPS",
    "Sampled",
    "SampledParts",
    "affordable_parts",
    "check_of",
    "is_sampled",
    "spread_blocks",
]

AFFORDABLE_FLOPS = 2e10
"""FLOPs up to which the whole reference is computed: about a second of float64 products on two cores."""

EDGE = 16
"""Rows and columns checked at the end of the output: each edge tile has some of them."""
BAND = 64
"""Size of the bands of rows and of columns that each contain at least one block."""
BLOCK_ROWS = 8
"""Rows of a sampled block; it has `BAND` columns."""
WITHOUT_SUMS = 4
"""Factor by which more blocks are sampled if there are no sums."""
BATCHES = 4
"""Products of a batch from which blocks are sampled, the first and the last among them."""
RUN = 128
"""Columns per signed sum: the fewer, the smaller the detectable error of one element."""
MISTAKEN = 1e-9
"""Probability that a correct result fails because of its signed sums."""
FEWEST_PARTS = 4
"""Minimum number of independent parts that are checked in full."""
PARTS_FLOPS = 1e11
"""FLOPs of all parts checked in full together; the other parts are only checked to be written."""
ROWS_AT_ONCE = 1024
"""Rows of the output converted to float64 at a time."""


class _Place(NamedTuple):
    batch_index: int
    rows: slice
    cols: slice


@dataclass(frozen=True, slots=True)
class _Block:
    place: _Place
    reference: Reference


@dataclass(frozen=True, slots=True)
class _SignedSums:
    batch_index: int
    signs: Array
    reference: Reference


def is_sampled(workload: Workload) -> bool:
    """Return whether a workload's result is checked in pieces: it is large, and its operator supports it."""
    if _has_blocks(workload):
        return workload.flops() > AFFORDABLE_FLOPS
    return affordable_parts(workload) < workload.part_count()


def affordable_parts(workload: Workload) -> int:
    """Return how many parts of a workload the reference computes at an acceptable cost."""
    return max(FEWEST_PARTS, int(PARTS_FLOPS / max(1, workload.flops()) * workload.part_count()))


def _has_blocks(workload: Workload) -> bool:
    outputs = workload.outputs()
    return len(outputs) == 1 and len(outputs[0].shape) in (2, 3) and hasattr(workload, "reference_block")


def check_of(inputs: InputSet) -> OutputCheck:
    """Return the check of outputs computed from `inputs`."""
    if not is_sampled(inputs.workload):
        return EveryElement(inputs)
    return Sampled(inputs) if _has_blocks(inputs.workload) else SampledParts(inputs)


class SampledParts(OutputCheck):
    """Check of every element of some independent parts; all other elements must have been written.

    Args:
        inputs: Inputs of the outputs to check.
    """

    def __init__(self, inputs: InputSet) -> None:
        workload = inputs.workload
        count = workload.part_count()
        order = np.random.default_rng((inputs.secret, 2)).permutation(np.arange(1, count - 1))
        between = order[: affordable_parts(workload) - 2].tolist()
        self._parts = [workload.part(index) for index in sorted({0, count - 1, *between})]
        self._checks = [
            EveryElement(dataclasses.replace(inputs, workload=part.workload, inputs=part.of(inputs.inputs)))
            for part in self._parts
        ]
        self.detail = f"every element of {len(self._parts)} of {count} parts; all elements were written"

    def errors(self, outputs: Mapping[str, Array]) -> Errors:
        """Return the largest errors of an element of the parts."""
        if _missing(outputs):
            return Errors(share=math.inf)
        return Errors().joined(*(check.errors(part.of(outputs)) for check, part in self._each()))

    def spot(self, outputs: Mapping[str, Array], rng: numpy.random.Generator) -> Errors:
        """Return the largest errors of random elements of each part."""
        return Errors().joined(*(check.spot(part.of(outputs), rng) for check, part in self._each()))

    def describe(self, outputs: Mapping[str, Array], worst: float) -> str:
        """Return the first unwritten element, or the worst element of the worst part, with its position."""
        if missing := _missing(outputs):
            return missing
        check, part = max(self._each(), key=lambda pair: pair[0].worst(pair[1].of(outputs)))
        slices = {name: bounds for name, bounds in part.places.items() if name in outputs}
        where = "; ".join(f"{name}[{', '.join(map(_text, bounds))}]" for name, bounds in slices.items())
        return f"{check.describe(part.of(outputs), worst)}; in the part {where}"

    def _each(self) -> Iterator[tuple[EveryElement, Part]]:
        return zip(self._checks, self._parts, strict=True)


def _text(extent: slice) -> str:
    return ":" if extent == slice(None) else f"{extent.start}:{extent.stop}"


def _missing(outputs: Mapping[str, Array]) -> str:
    """Return the first element of an output that is NaN, with an explanation; empty if there is none."""
    for name, output in outputs.items():
        absent = np.isnan(output)
        if absent.any():
            at = ",".join(str(int(i)) for i in np.unravel_index(int(np.argmax(absent)), output.shape))
            return f"{name}[{at}] is NaN: it was not written, or computed from unwritten values"
    return ""


class Sampled(OutputCheck):
    """Check of edges and sampled blocks element by element, and of all elements in signed sums.

    The signs are drawn independently of the errors e_j, so that their sum exceeds ``t`` with a probability of
    at most ``2 exp(-t^2 / (2 sum e_j^2))``; `MISTAKEN` determines t.

    Args:
        inputs: Inputs of the outputs to check.

    Source: Hoeffding, "Probability inequalities for sums of bounded random variables", 1963, theorem 2.
    """

    def __init__(self, inputs: InputSet) -> None:
        workload: Any = inputs.workload
        rng = np.random.default_rng((inputs.secret, 1))
        tensor = workload.outputs()[0]
        self._name, self._shape = tensor.name, _as_batch(tensor.shape)
        self._workload, self._tolerance = workload, workload.tolerance()
        self._sums, self._blocks = inputs.compute(lambda exact: self._references(workload, exact, rng))
        self._magnitude = max(magnitude_of(block.reference) for block in self._blocks)
        # Each sum is one chance of a false alarm.
        chances = sum(sums.reference.value.size for sums in self._sums)
        self._deviations = math.sqrt(2 * math.log(2 * max(1, chances) / MISTAKEN))
        self.detail = (
            f"the last {EDGE} rows and columns and {sum(map(_is_inner, self._blocks))} blocks of "
            f"{BLOCK_ROWS} x {BAND}, every element of them; all elements were written"
        )
        if self._sums:
            self.detail += f", and are right in signed sums of {RUN}"

    def _references(
        self, workload: Any, exact: Mapping[str, Array], rng: numpy.random.Generator
    ) -> tuple[tuple[_SignedSums, ...], tuple[_Block, ...]]:
        """Return the signed sums and the blocks, on the host."""
        sums = _sums(workload, exact, rng)
        blocks = _places(self._shape, rng, 1 if sums else WITHOUT_SUMS)
        return sums, tuple(
            _Block(block, _on_host(workload.reference_block(exact, *block))) for block in blocks
        )

    def errors(self, outputs: Mapping[str, Array]) -> Errors:
        """Return the largest errors of an element of the blocks; sums count as a share of the tolerance."""
        output = self._output(outputs)
        if _missing({"": output}):
            return Errors(share=math.inf)
        sums = (Errors(share=share) for share, _ in self._sum_shares(output))
        return self._of_blocks(output).joined(*sums)

    def spot(self, outputs: Mapping[str, Array], rng: numpy.random.Generator) -> Errors:
        """Return the largest errors of the blocks, which are random, without the sums."""
        return self._of_blocks(self._output(outputs))

    def _of_blocks(self, output: Array) -> Errors:
        blocks = {str(number): block for number, block in enumerate(self._blocks)}
        return errors_of(
            self._workload,
            {name: output[block.place] for name, block in blocks.items()},
            {name: block.reference for name, block in blocks.items()},
            dict.fromkeys(blocks, self._magnitude),
        )

    def describe(self, outputs: Mapping[str, Array], worst: float) -> str:
        """Return the worst element of the blocks, or the run of columns whose sum is most wrong."""
        _, where = max(self._shares(self._output(outputs)), key=lambda block: block[0])
        return f"{significant(worst, 3)} times the tolerance; {self._name}{where}"

    def _output(self, outputs: Mapping[str, Array]) -> Array:
        return outputs[self._name].reshape(self._shape)

    def _shares(self, output: Array) -> Iterator[tuple[float, str]]:
        """Yield the largest error of each part as a share of the tolerance, and its position."""
        if missing := _missing({"": output}):
            yield math.inf, missing
        for block in self._blocks:
            yield self._block_share(block, output)
        yield from self._sum_shares(output)

    def _sum_shares(self, output: Array) -> Iterator[tuple[float, str]]:
        """Yield the error of sums of each part as a share of the tolerance, and its position."""
        for sums in self._sums:
            for start in range(0, output.shape[1], ROWS_AT_ONCE):
                yield self._sums_share(sums, output, slice(start, start + ROWS_AT_ONCE))

    def _block_share(self, block: _Block, output: Array) -> tuple[float, str]:
        (z, rows, cols), right = block.place, block.reference
        got = output[z, rows, cols]
        share = error_shares(self._workload, got, right)
        at = np.unravel_index(int(np.argmax(share)), share.shape)
        where = f"[{z},{rows.start + at[0]},{cols.start + at[1]}]"
        value, must_be = significant(got[at], 6), significant(right.value[at], 6)
        return float(share[at]), f"{where} is {value}, must be {must_be}"

    def _sums_share(self, sums: _SignedSums, output: Array, rows: slice) -> tuple[float, str]:
        got = output[sums.batch_index, rows].astype(np.float64)
        starts = np.arange(0, output.shape[2], RUN)
        right = sums.reference.value[rows]
        with np.errstate(invalid="ignore", over="ignore"):  # infinities of a wrong output: NaN never passes
            error = np.abs(np.add.reduceat(got * sums.signs, starts, axis=1) - right)
            # Rounding is relative to the correct value, which is near the value found if the result is right.
            rounded = 1.05 * np.sqrt(np.add.reduceat(np.square(got), starts, axis=1))
            allowed = self._tolerance.eps_out * rounded + self._tolerance.eps_acc * sums.reference.scale[rows]
            share = share_of(error, self._deviations * allowed)
        i, run = np.unravel_index(int(np.argmax(share)), share.shape)
        first, end = int(run) * RUN, min(int(run) * RUN + RUN, output.shape[2])
        where = f"[{sums.batch_index},{rows.start + i},{first}:{end}]"
        return float(share[i, run]), f"{where}: the signed sum is off by {significant(error[i, run], 6)}"


def _on_host(reference: Reference) -> Reference:
    return Reference(value=np.asarray(reference.value), scale=np.asarray(reference.scale))


def _as_batch(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if len(shape) == 3 else (1, *shape)


def _sums(workload: Any, exact: Mapping[str, Array], rng: numpy.random.Generator) -> tuple[_SignedSums, ...]:
    """Return the reference's signed sums of each product of the batch; empty if they are not available."""
    compute = getattr(workload, "reference_sums", None)
    batch, _, columns = _as_batch(workload.outputs()[0].shape)
    sums = []
    for z in range(batch if compute is not None else 0):
        signs = rng.choice(np.array([-1.0, 1.0]), columns)
        reference = compute(exact, z, signs, RUN)  # type: ignore[misc]
        if reference is None:
            return ()
        sums.append(_SignedSums(z, signs, _on_host(reference)))
    return tuple(sums)


def _places(shape: tuple[int, ...], rng: numpy.random.Generator, repeats: int) -> Iterator[_Place]:
    """Yield the edges and the sampled blocks of some products of the batch."""
    batch, rows, cols = shape
    chosen = {0, batch - 1, *rng.integers(0, batch, BATCHES - 2).tolist()}
    for z in sorted(chosen):
        yield _Place(z, slice(max(0, rows - EDGE), rows), slice(0, cols))
        yield _Place(z, slice(0, rows), slice(max(0, cols - EDGE), cols))
        for _ in range(repeats):
            yield from spread_blocks(z, rows, cols, rng)


def spread_blocks(z: int, rows: int, cols: int, rng: numpy.random.Generator) -> Iterator[_Place]:
    """Yield blocks so that each band of rows and each band of columns contains at least one."""
    row_bands, col_bands = -(-rows // BAND), -(-cols // BAND)
    count = max(row_bands, col_bands)
    pairs = zip(_each_once(row_bands, count, rng), _each_once(col_bands, count, rng), strict=True)
    for row_band, col_band in pairs:
        end = min(rows, (row_band + 1) * BAND)
        top = int(rng.integers(row_band * BAND, max(row_band * BAND, end - BLOCK_ROWS) + 1))
        first_column = col_band * BAND
        yield _Place(
            z, slice(top, min(rows, top + BLOCK_ROWS)), slice(first_column, min(cols, first_column + BAND))
        )


def _each_once(bands: int, count: int, rng: numpy.random.Generator) -> list[int]:
    """Return `count` bands in random order, each once before any is repeated."""
    order = [rng.permutation(bands) for _ in range(-(-count // bands))]
    return [int(band) for band in np.concatenate(order)[:count]]


def _is_inner(block: _Block) -> bool:
    rows, cols = block.place.rows, block.place.cols
    return bool(rows.stop - rows.start <= BLOCK_ROWS and cols.stop - cols.start <= BAND)
