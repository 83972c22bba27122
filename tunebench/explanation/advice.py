"""Advice: changes of the workload that are predicted to save time, with the predicted gain of each.

A gain is the ratio of two predictions: the fastest configuration of any variant without and with the change,
for the same useful work. Padding is not useful work; twice the items are twice the useful work. All gains are
predictions (see `tunebench.forecast`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tunebench._figure import significant
from tunebench.bound import bound
from tunebench.device import Device
from tunebench.dtype import DType, is_integer, itemsize, unit_roundoff
from tunebench.errors import InputError
from tunebench.explanation.alignment import ACCESS_BYTES
from tunebench.forecast import predict_us
from tunebench.forecast.predicted_space import fastest_variant
from tunebench.outcome import CacheState
from tunebench.space import Config
from tunebench.variant import Costs, ceil_div
from tunebench.workload import Tensor, Traffic, Workload

__all__ = ["Advice", "Forecaster", "PredictedBest", "Subject", "WorkloadChange", "advise"]

Subject = Literal["configuration", "padding", "batch", "precision", "fusion", "layout"]
"""What a piece of advice changes."""

LEAST_GAIN = 1.01
"""Smallest gain to report: gains are shown with two decimals, and predictions are not that accurate."""

MULTIPLES = (4, 8, 16, 32, 64, 128, 256)
"""Multiples that a dimension may be padded to: from 4 bytes of 8-bit elements up to the largest tile."""

MOST_PADDING = 4
"""Padding that multiplies the FLOPs by more than this factor is not considered."""

FACTORS = (2, 4, 8, 16, 32, 64)
"""Factors by which a batch may be increased."""

WORTHWHILE = 1.05
"""Gain per item that each doubling of the batch must bring to be advised."""

NEIGHBOUR_THREADS = 256
"""Threads per block of the assumed elementwise kernel, with one 16-byte access per thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedBest:
    """The shortest predicted time of a workload on a device.

    Attributes:
        us: Predicted time in microseconds.
        interval_us: Ends of its 90 % prediction interval; None on a processor.
        variant: Key of the variant.
        config: Configuration of the variant.
    """

    us: float
    interval_us: tuple[float, float] | None
    variant: str
    config: Config


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadChange:
    """A workload that replaces the one to explain.

    Attributes:
        text: What to do, in words.
        workload: The new workload.
        items: Useful work of the new workload, as a multiple of that of the old one.
        spared_us: Time of other kernels that the change makes unnecessary, in microseconds.
    """

    text: str
    workload: Workload
    items: int = 1
    spared_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Advice:
    """A change and its predicted gain.

    Attributes:
        subject: What the advice changes.
        change: The change.
        before_us: Predicted time of the work without the change.
        after_us: Predicted time of the same useful work with the change.
        best: Fastest predicted configuration of the changed workload.
    """

    subject: Subject
    change: WorkloadChange
    before_us: float
    after_us: float
    best: PredictedBest

    @property
    def gain(self) -> float:
        """Predicted speedup."""
        return self.before_us / self.after_us

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dictionary."""
        return {
            "subject": self.subject,
            "text": self.change.text,
            "gain": self.gain,
            "before_us": self.before_us,
            "after_us": self.after_us,
            "workload": str(self.change.workload),
            "variant": self.best.variant,
            "config": dict(self.best.config),
        }


@dataclass(frozen=True, kw_only=True)
class Forecaster:
    """Predicts the shortest time of workloads on one device; each prediction is made once.

    Attributes:
        device: The device; it does not have to be present.
        cache: Cache state of the predictions.
    """

    device: Device
    cache: CacheState = "cold"
    _known: dict[Workload, PredictedBest | None] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )

    def best(self, workload: Workload) -> PredictedBest | None:
        """Return the shortest predicted time; None if no variant supports the workload on the device."""
        if workload not in self._known:
            self._known[workload] = self._best(workload)
        return self._known[workload]

    def _best(self, workload: Workload) -> PredictedBest | None:
        try:
            fastest = fastest_variant(workload, self.device, cache=self.cache)
        except InputError:
            return None
        if fastest is None:
            return None
        row = fastest.fastest()
        return PredictedBest(
            us=fastest.predicted_us(row),
            interval_us=fastest.interval_us(row),
            variant=fastest.variant.key,
            config=fastest.table.config(row),
        )

    def elementwise_us(self, tensor: Tensor, others: Iterable[Tensor]) -> float:
        """Return the predicted time in microseconds of an elementwise kernel with warm caches.

        Args:
            tensor: First input; the output has the same shape.
            others: Other inputs.
        """
        read = tensor.nbytes + sum(other.nbytes for other in others)
        blocks = ceil_div(tensor.nbytes, NEIGHBOUR_THREADS * ACCESS_BYTES)
        costs = Costs(blocks=blocks, full_blocks=0, threads=NEIGHBOUR_THREADS)
        traffic = Traffic(read_bytes=read, write_bytes=tensor.nbytes)
        bounds = bound(costs, traffic, self.device, cache="warm", rows=1)
        return float(predict_us(bounds, costs, self.device, traffic, cache="warm")[0])


def advise(
    workload: Workload, forecaster: Forecaster, predicted_us: float | None = None
) -> tuple[Advice, ...]:
    """Return the changes that are predicted to save time, largest gain first.

    Args:
        workload: The workload.
        forecaster: Predictions for its device.
        predicted_us: Predicted time of the configuration to explain, to compare with the fastest one; None if
            there is no configuration.
    """
    now = forecaster.best(workload)
    if now is None:
        return ()
    candidates: list[Advice] = []
    if predicted_us is not None:
        text = f"tune: {now.config} is predicted to be faster"
        change = WorkloadChange(text=text, workload=workload)
        candidates.append(Advice("configuration", change, before_us=predicted_us, after_us=now.us, best=now))
    for subject, changes in _subjects(workload, forecaster):
        candidates += _first_of_best(_tried(subject, changes, now, forecaster))
    candidates += _worth_their_accuracy(workload, now, forecaster)
    gaining = (advice for advice in candidates if advice.gain >= LEAST_GAIN)
    return tuple(sorted(gaining, key=lambda advice: -advice.gain))


def _tried(
    subject: Subject, changes: Iterable[WorkloadChange], now: PredictedBest, forecaster: Forecaster
) -> list[Advice]:
    """Return the predicted gain of each change whose workload some variant supports."""
    tried = []
    for change in changes:
        then = forecaster.best(change.workload)
        if then is not None:
            before_us, after_us = now.us + change.spared_us, then.us / change.items
            tried.append(Advice(subject, change, before_us=before_us, after_us=after_us, best=then))
    return tried


def _first_of_best(tried: list[Advice]) -> list[Advice]:
    """Return the smallest change with the largest gain, up to rounding; changes are sorted by size."""
    best_gain = max((advice.gain for advice in tried), default=0.0)
    return [advice for advice in tried if advice.gain * LEAST_GAIN >= best_gain][:1]


def _worth_their_accuracy(workload: Workload, now: PredictedBest, forecaster: Forecaster) -> Iterator[Advice]:
    """Yield the best change to each less accurate type that gains more than all more accurate ones."""
    best_gain = 1.0
    for dtype in sorted(_less_accurate(workload), key=unit_roundoff):
        for advice in _first_of_best(_tried("precision", _lowered(workload, dtype), now, forecaster)):
            if advice.gain >= LEAST_GAIN * best_gain:
                best_gain = advice.gain
                yield advice


def _subjects(
    workload: Workload, forecaster: Forecaster
) -> Iterator[tuple[Subject, Iterable[WorkloadChange]]]:
    """Yield each subject with its possible changes, smallest change first."""
    yield "padding", sorted(_padded(workload), key=lambda change: change.workload.flops())
    for name in workload.may_change().items:
        yield "batch", _enlarged(workload, name, forecaster)
    for name in workload.may_change().layouts:
        yield "layout", _laid_out(workload, name)
    for name in workload.may_change().fusions:
        yield "fusion", _fused(workload, name, forecaster)


def _changed(workload: Workload, **dimensions: object) -> Workload | None:
    """Return a workload with some dimensions replaced; None if the combination is invalid."""
    try:
        return workload.changed(**dimensions)
    except InputError:
        return None


# -- the ways to change a workload -------------------------------------------------------------------


def _padded(workload: Workload) -> Iterator[WorkloadChange]:
    """Yield the workload with one or more dimensions padded to a multiple."""
    fillers = workload.may_change().padding
    seen = {workload}
    subsets = (names for n in range(1, len(fillers) + 1) for names in itertools.combinations(fillers, n))
    for names, multiple in itertools.product(list(subsets), MULTIPLES):
        sizes = {name: ceil_div(getattr(workload, name), multiple) * multiple for name in names}
        padded = _changed(workload, **sizes)
        if padded is None or padded in seen or padded.flops() > MOST_PADDING * workload.flops():
            continue
        seen.add(padded)
        longer = [name for name in names if sizes[name] != getattr(workload, name)]
        filler = " and ".join(dict.fromkeys(fillers[name] for name in longer))
        dimensions = ", ".join(f"{name} from {getattr(workload, name)} to {sizes[name]}" for name in longer)
        yield WorkloadChange(text=f"pad {dimensions} with {filler}", workload=padded)


def _enlarged(workload: Workload, name: str, forecaster: Forecaster) -> Iterator[WorkloadChange]:
    """Yield the workload with more items, doubling as long as each item becomes faster."""
    size, before = getattr(workload, name), forecaster.best(workload)
    for factor in FACTORS:
        larger = _changed(workload, **{name: factor * size})
        then = forecaster.best(larger) if larger is not None else None
        if larger is None or before is None or then is None or 2 * before.us < WORTHWHILE * then.us:
            return
        before = then
        text = f"increase the batch: {name} from {size} to {factor * size}"
        yield WorkloadChange(text=text, workload=larger, items=factor)


def _lowered(workload: Workload, dtype: DType) -> Iterator[WorkloadChange]:
    """Yield the workload in another type, in all layouts: some types are fast in one layout only."""
    layouts = [{name: value} for name in workload.may_change().layouts for value in workload.choices(name)]
    for layout in ({}, *layouts):
        lowered = _changed(workload, dtype=dtype, **layout)
        if lowered is not None:
            text = (
                f"use lower precision: {_listed(workload, lowered)}, relative rounding error "
                f"{significant(unit_roundoff(dtype), 1)}"
            )
            yield WorkloadChange(text=text, workload=lowered)


def _less_accurate(workload: Workload) -> list[DType]:
    """Return the floating-point types that are less accurate than the workload's type and not wider."""
    if "dtype" not in workload.dimensions():  # a user's kernel has the types of its arrays
        return []
    now: DType = workload.dtype
    return [
        dtype
        for dtype in workload.choices("dtype")
        if not (is_integer(dtype) or is_integer(now))
        and unit_roundoff(dtype) > unit_roundoff(now)
        and itemsize(dtype) <= itemsize(now)
    ]


def _laid_out(workload: Workload, name: str) -> Iterator[WorkloadChange]:
    """Yield the workload in other layouts."""
    for value in workload.choices(name):
        changed = _changed(workload, **{name: value})
        if changed is not None and changed != workload:
            yield WorkloadChange(text=f"change the layout: {name}={value}", workload=changed)


def _fused(workload: Workload, name: str, forecaster: Forecaster) -> Iterator[WorkloadChange]:
    """Yield the workload fused with a neighbouring elementwise operation, if it has none yet.

    The change spares the kernel of that operation: a launch, and the bytes that caches cannot hold.
    """
    (default,) = (field.default for field in dataclasses.fields(workload) if field.name == name)
    if getattr(workload, name) != default:
        return
    side = workload.may_change().fusions[name]
    tensor = (workload.inputs() if side == "before" else workload.outputs())[0]
    input_names = {t.name for t in workload.inputs()}
    values = [value for value in workload.choices(name) if value != default]
    for value in values:
        fused = _changed(workload, **{name: value})
        if fused is not None:
            added = [t for t in fused.inputs() if t.name not in input_names]
            yield WorkloadChange(
                text=f"fuse the elementwise operation {side} it: {name}={' or '.join(values)}",
                workload=fused,
                spared_us=forecaster.elementwise_us(tensor, added),
            )


def _listed(workload: Workload, changed: Workload) -> str:
    """Return the dimensions in which another workload differs, as text."""
    pairs = ((name, getattr(changed, name)) for name in workload.dimensions())
    return ", ".join(f"{name}={value}" for name, value in pairs if value != getattr(workload, name))
