"""`profile`: the workloads that a torch program runs, with calls and times.

    with tunebench.torch.profile() as profile:
        train(model)
    print(profile)

The profiler observes every operator below autograd, backward ones included, in the thread that entered and in
autograd's threads. Calls and times go to the database, from which `tunebench tune --from-profile` tunes the
workloads with the most time first.

Not observed: other threads, forked processes, kernels that a compiler fused (library calls between them are
observed), and replays of a CUDA graph (its capture counts as one call that takes no time).
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tunebench._dataframe import Tabular, columns_of
from tunebench._deprecation import warn_renamed
from tunebench.dispatch import DispatchedCall, watching
from tunebench.errors import InputError, TunebenchError
from tunebench.torch import _aten_workload
from tunebench.torch.profiling._call_timer import CallTimer, TimedCall
from tunebench.torch.profiling._demand_counter import DemandCounter, ProfiledOperation, device_of

__all__ = ["DemandProfile", "ProfileLine", "profile"]

INTERVAL_S = 30.0
"""Default seconds between saves; a crash loses at most what was counted since the last save."""


class ProfileLine(NamedTuple):
    """Calls and time of one operation.

    Attributes:
        name: Canonical text of a workload; for others the operator, and why it is not a workload.
        device: Key of the device, or torch's name of a device that results are not stored for.
        calls: Number of calls.
        time_us: Total microseconds: wall time on a CPU, time on the stream on a GPU.
    """

    name: str
    device: str
    calls: int
    time_us: float


def profile(
    *,
    db: str | Path | None = None,
    save: bool = True,
    eager: bool = False,
    interval_s: float = INTERVAL_S,
) -> DemandProfile:
    """Profile the workloads that a torch program runs, whether or not it is patched. A context manager.

    On a CPU a call takes the wall time of its caller. On a GPU it is timed by CUDA events on its stream,
    which are awaited only at the end; if the GPU waits for the program between the two events, that wait is
    included.

    Args:
        db: Database: a path, a URL, or None for the user's database.
        save: Whether to save the demand to the database.
        eager: Whether to run functions that `torch.compile` compiled eagerly, so that all their operators are
            observed. Otherwise kernels that the compiler fused are not observed.
        interval_s: Seconds between saves; the rest is saved at the end.

    Returns:
        The profile; enter it to start, and print it afterwards.

    Raises:
        DatabaseError: on entering, if the database cannot be used. A later failure is a warning, and the next
            save includes everything.
        InputError: if the interval is not positive.
    """
    if not interval_s > 0:
        raise InputError(f"interval_s must be positive, got {interval_s}")
    return DemandProfile(db=db, save=save, eager=eager, interval_s=interval_s)


class DemandProfile(Tabular):
    """Calls and times of the operations that a program ran; `print` shows them as a table.

    It may be entered several times and adds up.
    """

    def __init__(self, *, db: str | Path | None, save: bool, eager: bool, interval_s: float) -> None:
        self._counter = DemandCounter(db)
        self._timer = CallTimer(self._counter)
        self._save, self._eager, self._interval_s = save, eager, interval_s
        self._entered: list[contextlib.ExitStack] = []

    # -- context manager --------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            if self._save and not self._entered:
                self._counter.check()
                stack.enter_context(_saving_periodically(self._counter, self._interval_s))
            if self._eager:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            mode = _ProfilingMode(self._timer)
            stack.enter_context(watching(mode.on_dispatch))
            stack.enter_context(mode)
            self._entered.append(stack.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().close()
        if not self._entered:
            self._timer.finish()
            if self._save:
                _save(self._counter)

    # -- results ----------------------------------------------------------------------------------

    @property
    def workloads(self) -> tuple[ProfileLine, ...]:
        """Workloads that can be tuned, most time first."""
        return self._lines(are_workloads=True)

    @property
    def problems(self) -> tuple[ProfileLine, ...]:
        """Deprecated name of `workloads`."""
        warn_renamed("DemandProfile.problems", "DemandProfile.workloads")
        return self.workloads

    @property
    def others(self) -> tuple[ProfileLine, ...]:
        """Operators that no operator of tunebench computes, with reasons, most time first."""
        return self._lines(are_workloads=False)

    @property
    def coverage(self) -> float:
        """Fraction of the observed time spent in workloads that can be tuned; 0 if nothing was observed."""
        tunable = sum(line.time_us for line in self.workloads)
        total = tunable + sum(line.time_us for line in self.others)
        return tunable / total if total else 0.0

    def _lines(self, *, are_workloads: bool) -> tuple[ProfileLine, ...]:
        return tuple(
            ProfileLine(entry.name, _device_text(entry.device), calls, time_us)
            for entry, calls, time_us in self._counter.entries()
            if entry.is_workload == are_workloads and calls
        )

    def _columns(self) -> Mapping[str, Sequence[object]]:
        return columns_of(
            {**line._asdict(), "tunable": tunable}
            for lines, tunable in ((self.workloads, True), (self.others, False))
            for line in lines
        )

    def to_json(self) -> dict[str, Any]:
        """Return the profile as plain data."""
        return {
            "coverage": self.coverage,
            "workloads": [line._asdict() for line in self.workloads],
            "problems": [line._asdict() for line in self.workloads],  # deprecated name
            "others": [line._asdict() for line in self.others],
        }

    def __str__(self) -> str:
        """Return a table of the workloads that can be tuned, then of all other operators."""
        workloads, untunable = self.workloads, self.others
        total_us = sum(line.time_us for line in (*workloads, *untunable))
        return "\n".join(
            (
                f"{len(workloads)} tunable workloads, {100 * self.coverage:.1f} % of the observed time",
                *_rows(workloads, total_us),
                f"{len(untunable)} other operators",
                *_rows(untunable, total_us),
            )
        )


def _rows(lines: tuple[ProfileLine, ...], total_us: float) -> list[str]:
    if not lines:
        return []
    several = len({line.device for line in lines}) > 1
    return [
        f"{'time':>12} {'share':>7} {'calls':>8}  workload or operator",
        *(
            f"{line.time_us / 1e3:>9.3f} ms {100 * line.time_us / (total_us or 1):>5.1f} % {line.calls:>8}  "
            f"{line.name}{f' on {line.device}' if several else ''}"
            for line in lines
        ),
    ]


@functools.cache
def _device_text(device: Any) -> str:
    described = device_of(device)
    return str(device) if described is None else described.key


# -- saving ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _saving_periodically(counter: DemandCounter, interval_s: float) -> Any:
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(interval_s):
            _save(counter)

    thread = threading.Thread(target=work, name="tunebench-record", daemon=True)
    thread.start()
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == pid:
            ended.set()
            thread.join()


def _save(counter: DemandCounter) -> None:
    """Save, or warn: a failure does not interrupt the profiled program."""
    try:
        counter.save()
    except TunebenchError as error:
        warnings.warn(f"the profile is not saved yet: {error}", RuntimeWarning, stacklevel=3)


# -- observation ------------------------------------------------------------------------------


class _PreviousCall(NamedTuple):
    """The previous call, which may form one workload with the next one."""

    operator: str
    call: TimedCall
    output: int  # address of its result


_SILENT = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"})
"""Operators that compute nothing, in addition to views."""


class _ProfilingMode(TorchDispatchMode):  # type: ignore[misc]
    """Observes every operator that runs in the threads it is active in."""

    def __init__(self, stopwatch: CallTimer) -> None:
        super().__init__()
        self._timer = stopwatch
        self._workloads: dict[Any, tuple[str, ...] | str] = {}
        self._thread = threading.local()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo compile, and run compiled code, without this mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(_dispatches, types)):  # the operators that such tensors call are observed
            return NotImplemented
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if _is_silent(func):
            return func(*args, **kwargs)
        if func.namespace == "tunebench":
            return self._time_dispatched(func, args, kwargs)
        return self._timed(func, args, kwargs)

    def _time_dispatched(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Time a call of a tunebench operator, which reports the operations that it runs."""
        device = _device(args, kwargs)
        call = TimedCall()

        def run() -> Any:
            dispatched = self._thread.dispatched = []
            try:
                return func(*args, **kwargs)
            finally:
                self._thread.dispatched = None
                entries = [_entry_of(call_made, device) for call_made in dispatched] or [
                    ProfiledOperation(device, _name(func), is_workload=False)
                ]
                call.shares = tuple((entry, 1, 1 / len(entries)) for entry in entries)

        return self._timer.time(call, device, run)

    def on_dispatch(self, call: DispatchedCall) -> None:
        """Keep a dispatched call if this thread is timing one."""
        dispatched: list[DispatchedCall] | None = getattr(self._thread, "dispatched", None)
        if dispatched is not None:
            dispatched.append(call)

    def _timed(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        device = _device(args, kwargs)
        call = TimedCall(*self._shares(func, device, args, kwargs))
        name = func._schema.name
        self._merge_loss(name, call, args)
        hold = name in _MERGED_FIRST
        result = self._timer.time(call, device, lambda: func(*args, **kwargs), hold=hold)
        self._thread.last = _PreviousCall(name, call, _address(result)) if hold else None
        return result

    def _shares(
        self, func: Any, device: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[tuple[ProfiledOperation, int, float]]:
        if not _aten_workload.is_known(func):
            return [(ProfiledOperation(device, _name(func), is_workload=False), 1, 1.0)]
        key = (
            func,
            torch.is_grad_enabled(),
            _precision(device),
            *map(_aten_workload.signature, (args, *kwargs.items())),
        )
        translated = self._workloads.get(key)
        if translated is None:
            translated = self._workloads[key] = _aten_workload.workloads_of(func, args, kwargs)
        if isinstance(translated, str) or not translated:
            return [
                (ProfiledOperation(device, f"{_name(func)} ({translated or ''})", is_workload=False), 1, 1.0)
            ]
        share = 1 / len(translated)
        return [(ProfiledOperation(device, text, is_workload=True), 1, share) for text in translated]

    def _merge_loss(self, name: str, call: TimedCall, args: tuple[Any, ...]) -> None:
        """Merge a log-softmax and the loss after it, or their gradients, into one cross-entropy workload."""
        last: _PreviousCall | None = getattr(self._thread, "last", None)
        if last is None or (last.operator, name) not in _MERGED or _address(args[0]) != last.output:
            return
        softmax = next((c for c in (last.call, call) if c.shares[0][0].is_workload), None)
        if softmax is not None:
            entry = softmax.shares[0][0]
            whole = ProfiledOperation(
                entry.device, _aten_workload.cross_entropy(entry.name), is_workload=True
            )
            last.call.shares = ((whole, 1, 1.0),)
            call.shares = ((whole, 0, 1.0),)


_MERGED = frozenset(
    {
        ("aten::_log_softmax", "aten::nll_loss_forward"),
        ("aten::nll_loss_backward", "aten::_log_softmax_backward_data"),
    }
)
_MERGED_FIRST = frozenset(first for first, _ in _MERGED)


def _entry_of(call: DispatchedCall, device: Any) -> ProfiledOperation:
    if call.workload is None:
        return ProfiledOperation(device, f"tunebench.{call.function} ({call.reason})", is_workload=False)
    return ProfiledOperation(device, str(call.workload), is_workload=True)


@functools.cache
def _dispatches(kind: Any) -> bool:
    """Return whether a tensor class defines its own dispatch."""
    dispatch = kind.__torch_dispatch__
    return dispatch not in (torch.Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl)


@functools.cache
def _is_composite(func: Any) -> bool:
    """Return whether an operator only calls others; inference mode does not decompose it."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return not _aten_workload.is_known(func) and bool(func.has_kernel_for_dispatch_key(key))


@functools.cache
def _is_silent(func: Any) -> bool:
    return func.is_view or func._schema.name in _SILENT


@functools.cache
def _name(func: Any) -> str:
    return str(func._schema.name).replace("::", ".")


def _precision(device: Any) -> Any:
    """Return the settings that decide whether f32 on a GPU is computed in tf32."""
    if device.type != "cuda":
        return None
    return (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)


def _device(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the device of a call: the device of its first tensor, or of its result."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            return value[0].device
    return kwargs.get("device") or torch.device("cpu")


def _address(value: Any) -> int:
    tensor = value[0] if isinstance(value, tuple) else value
    return int(tensor.data_ptr()) if isinstance(tensor, torch.Tensor) else 0
