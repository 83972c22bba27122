"""Tuning of a user's own kernel from a description, without an operator class."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebench import kernels
from tunebench._lazy import np
from tunebench.answer import Answer, lookup_workload
from tunebench.device import Device, local_gpus
from tunebench.errors import InputError, UnknownName
from tunebench.objective import MetricSource
from tunebench.own_kernel import UNVERIFIED, KernelDescription
from tunebench.tuning import Plan, tune
from tunebench.tuning.workload_report import ProgressCallback, Report

if TYPE_CHECKING:
    from tunebench.own_kernel.operator import OwnOperator

__all__ = ["KernelResult", "lookup_kernel", "tune_kernel"]

_CHECKED_BYTES = 16 << 20
"""Largest arrays for which the reference is called once before the run, so that its errors show at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelResult:
    """Result of tuning a user's kernel.

    Attributes:
        best: The best configuration, by parameter; None if none succeeded.
        time_us: Its measured or predicted time, in microseconds.
        how: ``"measured"`` or ``"predicted"``; None if none succeeded.
        workload: Text of the workload: the kernel and its sizes, such as ``vadd:n=1000``.
        file: The generated variant file, for commands: ``--variant-file``.
        verified: How results were verified.
        report: The report of the run.
    """

    best: Mapping[str, Any] | None
    time_us: float | None
    how: str | None
    workload: str
    file: Path
    verified: str
    report: Report

    def __str__(self) -> str:
        """Return the report, and how results were verified."""
        return f"{self.report}\nverified: {self.verified}\nvariant file: {self.file}"

    def _repr_html_(self) -> str:
        """Return the report for notebooks."""
        return self.report._repr_html_()


def tune_kernel(
    source: Any,
    name: str | None = None,
    *,
    device: Device | str | None = None,
    arch: str | None = None,
    db: str | Path | None = None,
    plan: Plan | None = None,
    watcher: ProgressCallback | None = None,
    metrics: Mapping[str, MetricSource] | None = None,
    objectives: Sequence[str] = (),
    require: Sequence[str] = (),
    observers: Sequence[str] = (),
    **description: Any,
) -> KernelResult:
    """Find the fastest configuration of a kernel, or the best by other objectives; verify it and record it.

    The same call resumes an interrupted run, and measures nothing twice. Records are valid until the
    source or any other part of the description changes.

    Args:
        source: CUDA C++, as a path that ends with ``.cu`` or as text; or a Python function for Numba or
            Triton, or a path that ends with ``.py``. A function with `grid` is for a GPU, one without for the
            processor.
        name: Name of the kernel; with template arguments by name of parameter: ``"vadd<block>"``. Other
            parameters are macros.
        device: As for `tunebench.tune`. Default: the first GPU, or the processor for a function without
            `grid`.
        arch: Architecture, such as ``"sm_90"``, of a GPU that need not be present: compiles, verifies by
            emulation, predicts.
        db: As for `tunebench.tune`.
        plan: As for `tunebench.tune`.
        watcher: As for `tunebench.tune`.
        metrics: `Plan.metrics`, in place of those of `plan`.
        objectives: `Plan.objectives`, in place of those of `plan`.
        require: `Plan.require`, in place of those of `plan`.
        observers: `Plan.observers`, in place of those of `plan`.
        description: `args`, `space`, `grid`, `block`, `constraints`, `reference`, `tolerance`, `default`,
            `smem_bytes`, `flops`, `emulate`, `includes`, `flags`, `label` and `compiled`, as for
            `tunebench.own_kernel.KernelDescription`.

    Returns:
        The best configuration, and the report.

    Raises:
        InputError: if the description is incomplete or contradictory; the message names the part.
        TunebenchError: as `tunebench.tune`.
    """
    workload, variant = _load(source, name, description)
    file = kernels.file_of(variant)
    assert file is not None, variant
    _check_reference(workload)
    place = _device(variant, device, arch)
    chosen = _with_goal(
        plan,
        metrics=dict(metrics or {}),
        objectives=tuple(objectives),
        require=tuple(require),
        observers=tuple(observers),
    )
    report = tune(
        workload,
        device=place,
        db=db,
        plan=_with_file(chosen, file, offline=arch is not None),
        watcher=watcher,
    )
    return KernelResult(
        best=None if report.config is None else dict(report.config),
        time_us=report.median_us,
        how=report.how,
        workload=str(workload),
        file=Path(file),
        verified=_verified(workload, report),
        report=report,
    )


def lookup_kernel(
    source: Any,
    name: str | None = None,
    *,
    device: Device | str | None = None,
    arch: str | None = None,
    db: str | Path | None = None,
    strict: bool = False,
    **description: Any,
) -> Answer:
    """Return the best known configuration of a kernel as it was described to `tune_kernel`.

    Args:
        source: As for `tune_kernel`.
        name: As for `tune_kernel`.
        device: As for `tune_kernel`.
        arch: As for `tune_kernel`.
        db: As for `tune_kernel`.
        strict: As for `tunebench.lookup`.
        description: As for `tune_kernel`.

    Raises:
        InputError: as `tune_kernel`.
        LookupMiss: if nothing is known of it.
    """
    workload, variant = _load(source, name, description)
    answer = lookup_workload(workload, device=_device(variant, device, arch), db=db, strict=strict)
    if not workload.expected.is_reference and answer.verification is not None:
        return dataclasses.replace(answer, verification=UNVERIFIED)
    return answer


def _verified(workload: OwnOperator, report: Report) -> str:
    if report.config is None:
        return "no configuration succeeded"
    if not workload.expected.is_reference:
        return UNVERIFIED
    return f"against the reference; error up to {workload.tolerance().reason}"


def _load(source: Any, name: str | None, description: Mapping[str, Any]) -> tuple[OwnOperator, Any]:
    """Write and load the generated module; return the workload and the variant."""
    for missing in ("args", "space"):
        if missing not in description:
            raise InputError(f"tune_kernel needs {missing}=, see tunebench.own_kernel.KernelDescription")
    parts = [field.name for field in dataclasses.fields(KernelDescription)]
    for part in description:
        if part not in parts:
            raise UnknownName("argument of tune_kernel", part, parts)
    workload: Any
    workload, variant = KernelDescription(source=source, name=name, **description).load()
    return workload, variant


def _device(variant: Any, device: Device | str | None, arch: str | None) -> Device | str | None:
    """Return the device to tune on.

    Raises:
        InputError: The kernel is for a GPU, and there is none, or device and architecture are both given.
    """
    if arch is not None and device is not None:
        raise InputError(f"name a device or an architecture, not both: {device} and {arch}")
    if device is not None or arch is not None:
        return device or arch
    if variant.device_kind == "cpu":
        return "cpu"
    if not local_gpus():
        raise InputError(
            "this machine has no GPU; arch='sm_90' compiles, verifies by emulation and predicts for one that "
            "is absent"
        )
    return None


def _with_file(plan: Plan, file: str, *, offline: bool) -> Plan:
    return dataclasses.replace(plan, variant_files=(file,), variants=(), offline=plan.offline or offline)


def _with_goal(plan: Plan | None, **goal: Any) -> Plan:
    """Return a plan with parts of a goal; several objectives have another default sampler."""
    given = {name: value for name, value in goal.items() if value}
    if plan is None or not given:
        return plan or Plan(**given)
    was_default = plan.sampler == Plan().sampler and len(plan.objectives) < 2
    return dataclasses.replace(plan, **given, sampler="" if was_default else plan.sampler)


def _check_reference(workload: OwnOperator) -> None:
    """Call the reference once if that is quick.

    Raises:
        InputError: It raises, or returns other shapes than those of the outputs.
    """
    nbytes = sum(tensor.nbytes for tensor in (*workload.inputs(), *workload.outputs()))
    if workload.expected.compute is None or nbytes > _CHECKED_BYTES:
        return
    inputs = workload.draw(np.random.default_rng(0))
    exact = {name: np.asarray(value, dtype=np.float64) for name, value in inputs.items()}
    try:
        with np.errstate(all="ignore"):
            workload.reference(exact)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"reference raised {type(error).__name__}: {error}") from error
