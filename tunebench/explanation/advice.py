"""What would take less time: the workload is changed, and the best of all variants' spaces predicted again.

No gain is a constant. Both times are the least that the model predicts for any configuration of any variant,
with and without the change, for the same useful work: padding is not useful, twice the items are twice as
useful. All of it is belief (see `tunebench.forecast`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tunebench.bound import bound
from tunebench.device import Device
from tunebench.dtype import DType, is_integer, itemsize, unit_roundoff
from tunebench.errors import InputError
from tunebench.explanation.alignment import ACCESS_BYTES
from tunebench.forecast import predict_us
from tunebench.outcome import CacheState
from tunebench.space import Config
from tunebench.tuning import candidate
from tunebench.variant import Costs, ceil_div
from tunebench.workload import Tensor, Traffic, Workload

__all__ = ["Advice", "Forecaster", "PredictedBest", "Subject", "WorkloadChange", "advise"]

Subject = Literal["configuration", "padding", "batch", "precision", "fusion", "layout"]
"""What an advice is about."""

LEAST_GAIN = 1.01
"""Less is nothing: figures are shown by the hundredth, and predictions are not good to one."""

MULTIPLES = (4, 8, 16, 32, 64, 128, 256)
"""To which a dimension may be padded: 4 bytes of 8-bit elements up to the largest tile."""

MOST_PADDING = 4
"""Padding that multiplies the FLOPs by more is not looked at."""

FACTORS = (2, 4, 8, 16, 32, 64)
"""By which a batch may be enlarged."""

WORTHWHILE = 1.05
"""What enlarging a batch once more must gain an item to be advised."""

NEIGHBOUR_THREADS = 256
"""Threads of a block of an elementwise kernel, each of which has one access of 16 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedBest:
    """The least time that is predicted for a workload on a device.

    Attributes:
        us: That time.
        variant: Key of the variant that takes it.
        config: Its configuration.
    """

    us: float
    variant: str
    config: Config


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadChange:
    """A workload in place of the one at hand.

    Attributes:
        text: What to do.
        workload: What it comes to.
        items: How many times the useful work of the one at hand it does.
        spared_us: Time of what else is not needed any more.
    """

    text: str
    workload: Workload
    items: int = 1
    spared_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Advice:
    """A change, and what it is predicted to gain.

    Attributes:
        subject: What it is about.
        change: What to do.
        before_us: Predicted time of the work without the change.
        after_us: Predicted time of as much useful work with it.
        best: What is predicted fastest for the changed workload.
    """

    subject: Subject
    change: WorkloadChange
    before_us: float
    after_us: float
    best: PredictedBest

    @property
    def gain(self) -> float:
        """How many times as fast."""
        return self.before_us / self.after_us

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
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
    """Predicts the least time of workloads on one device, each once.

    Attributes:
        device: The device; it need not be here.
        cache: Cache state that the times are for.
    """

    device: Device
    cache: CacheState = "cold"
    _known: dict[Workload, PredictedBest | None] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )

    def best(self, workload: Workload) -> PredictedBest | None:
        """Return the least time; None if no variant can do the workload on the device."""
        if workload not in self._known:
            self._known[workload] = self._best(workload)
        return self._known[workload]

    def _best(self, workload: Workload) -> PredictedBest | None:
        try:
            found, _ = candidate.find(workload, self.device, cache=self.cache, compilable=False)
        except InputError:
            return None
        one = min(found, key=lambda one: one.predicted_us(one.fastest()))
        row = one.fastest()
        return PredictedBest(us=one.predicted_us(row), variant=one.variant.key, config=one.table.config(row))

    def elementwise_us(self, tensor: Tensor, others: Iterable[Tensor]) -> float:
        """Return the expected time of a kernel that reads some tensors and writes one like the first.

        Caches are warm: its neighbour has just used them.
        """
        read = tensor.nbytes + sum(other.nbytes for other in others)
        blocks = ceil_div(tensor.nbytes, NEIGHBOUR_THREADS * ACCESS_BYTES)
        costs = Costs(blocks=blocks, full_blocks=0, threads=NEIGHBOUR_THREADS)
        traffic = Traffic(read_bytes=read, write_bytes=tensor.nbytes)
        bounds = bound(costs, traffic, self.device, cache="warm", rows=1)
        return float(predict_us(bounds, costs, self.device)[0])


def advise(
    workload: Workload, forecaster: Forecaster, predicted_us: float | None = None
) -> tuple[Advice, ...]:
    """Return what would take less time, greatest gain first; what gains nothing is left out.

    Args:
        workload: The problem.
        forecaster: Of the device where it is computed.
        predicted_us: Expected time of the configuration at hand, to be held against the best one; None if
            there is none.
    """
    now = forecaster.best(workload)
    if now is None:
        return ()
    found: list[Advice] = []
    if predicted_us is not None:
        text = f"tune: {now.config} is predicted faster"
        change = WorkloadChange(text=text, workload=workload)
        found.append(Advice("configuration", change, before_us=predicted_us, after_us=now.us, best=now))
    for subject, changes in _subjects(workload, forecaster):
        found += _first_of_best(_tried(subject, changes, now, forecaster))
    found += _worth_their_accuracy(workload, now, forecaster)
    gaining = (advice for advice in found if advice.gain >= LEAST_GAIN)
    return tuple(sorted(gaining, key=lambda advice: -advice.gain))


def _tried(
    subject: Subject, changes: Iterable[WorkloadChange], now: PredictedBest, forecaster: Forecaster
) -> list[Advice]:
    """Return what each change is predicted to gain, if any variant can do the changed workload."""
    tried = []
    for change in changes:
        then = forecaster.best(change.workload)
        if then is not None:
            before_us, after_us = now.us + change.spared_us, then.us / change.items
            tried.append(Advice(subject, change, before_us=before_us, after_us=after_us, best=then))
    return tried


def _first_of_best(tried: list[Advice]) -> list[Advice]:
    """Return the first of those that gain most, hundredths aside: changes come least first."""
    most = max((advice.gain for advice in tried), default=0.0)
    return [advice for advice in tried if advice.gain * LEAST_GAIN >= most][:1]


def _worth_their_accuracy(workload: Workload, now: PredictedBest, forecaster: Forecaster) -> Iterator[Advice]:
    """Yield the best of each type of fewer bits that gains more than all that are more accurate."""
    most = 1.0
    for dtype in sorted(_less_accurate(workload), key=unit_roundoff):
        for advice in _first_of_best(_tried("precision", _lowered(workload, dtype), now, forecaster)):
            if advice.gain >= LEAST_GAIN * most:
                most = advice.gain
                yield advice


def _subjects(
    workload: Workload, forecaster: Forecaster
) -> Iterator[tuple[Subject, Iterable[WorkloadChange]]]:
    """Yield what may be changed, each with the ways to change it, the least change first."""
    yield "padding", sorted(_padded(workload), key=lambda change: change.workload.flops())
    for name in workload.may_change().items:
        yield "batch", _enlarged(workload, name, forecaster)
    for name in workload.may_change().layouts:
        yield "layout", _laid_out(workload, name)
    for name in workload.may_change().fusions:
        yield "fusion", _fused(workload, name, forecaster)


def _changed(workload: Workload, **dimensions: object) -> Workload | None:
    """Return a workload with some dimensions replaced; None if they do not go together."""
    try:
        return workload.changed(**dimensions)
    except InputError:
        return None


# -- the ways to change a workload -------------------------------------------------------------------


def _padded(workload: Workload) -> Iterator[WorkloadChange]:
    """Yield the workload with one or several dimensions padded to a multiple of some elements."""
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
    """Yield the workload with more items, twice as many as long as that gains something an item."""
    size, before = getattr(workload, name), forecaster.best(workload)
    for factor in FACTORS:
        larger = _changed(workload, **{name: factor * size})
        then = forecaster.best(larger) if larger is not None else None
        if larger is None or before is None or then is None or 2 * before.us < WORTHWHILE * then.us:
            return
        before = then
        text = f"enlarge the batch: {name} from {size} to {factor * size}"
        yield WorkloadChange(text=text, workload=larger, items=factor)


def _lowered(workload: Workload, dtype: DType) -> Iterator[WorkloadChange]:
    """Yield the workload in another type, and in other layouts too: some types are fast in one alone."""
    layouts = [{name: value} for name in workload.may_change().layouts for value in workload.choices(name)]
    for layout in ({}, *layouts):
        lowered = _changed(workload, dtype=dtype, **layout)
        if lowered is not None:
            text = f"lower precision: {_listed(workload, lowered)}, accurate to {unit_roundoff(dtype):.1g}"
            yield WorkloadChange(text=text, workload=lowered)


def _less_accurate(workload: Workload) -> list[DType]:
    """Return the floating-point types that are less accurate than a workload's, and no wider."""
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
        other = _changed(workload, **{name: value})
        if other is not None and other != workload:
            yield WorkloadChange(text=f"another layout: {name}={value}", workload=other)


def _fused(workload: Workload, name: str, forecaster: Forecaster) -> Iterator[WorkloadChange]:
    """Yield the workload with a neighbouring operation done by the way, if none is yet.

    What is spared is that operation's own kernel: a launch, and the bytes that caches cannot hold.
    """
    (default,) = (field.default for field in dataclasses.fields(workload) if field.name == name)
    if getattr(workload, name) != default:
        return
    side = workload.may_change().fusions[name]
    tensor = (workload.inputs() if side == "before" else workload.outputs())[0]
    own = {t.name for t in workload.inputs()}
    values = [value for value in workload.choices(name) if value != default]
    for value in values:
        fused = _changed(workload, **{name: value})
        if fused is not None:
            others = [t for t in fused.inputs() if t.name not in own]
            yield WorkloadChange(
                text=f"fuse the elementwise operation {side} it: {name}={' or '.join(values)}",
                workload=fused,
                spared_us=forecaster.elementwise_us(tensor, others),
            )


def _listed(workload: Workload, other: Workload) -> str:
    """Return the dimensions in which another workload differs, as text."""
    pairs = ((name, getattr(other, name)) for name in workload.dimensions())
    return ", ".join(f"{name}={value}" for name, value in pairs if value != getattr(workload, name))
