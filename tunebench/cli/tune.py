"""`tunebench tune`.

To add an option: add a field to `TuneOptions` here. If its name is also a field of `tunebench.tuning.Plan`,
it is passed on without further code; otherwise convert it in `_plan`, or use it in `command`. If it needs
more than its help text, describe it in `docs/guide/tuning.md`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tunebench.cli import _completion
from tunebench.cli._option import (
    Database,
    Json,
    LearnedPruner,
    Metrics,
    Objectives,
    OptionalWorkload,
    Requirements,
    StopAtGap,
    described_kernel,
    metrics_of,
    renamed_flag,
    split_devices,
    target_device,
    variant_files_option,
)
from tunebench.cli._option_group import grouped_options
from tunebench.cli._output import console, emit, note
from tunebench.errors import ClusterLost, InputError, TunebenchError, UnknownName

if TYPE_CHECKING:
    from tunebench.device import Device
    from tunebench.tuning import Plan, Progress, Report, TuningSummary
    from tunebench.tuning.workload_report import ProgressCallback
    from tunebench.workload import Workload

__all__ = ["command"]

INTERRUPTED = 130
_what, _where, _search, _measure = (
    functools.partial(typer.Option, rich_help_panel=panel)
    for panel in ("What to tune", "Where", "Search", "Measurement")
)


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """The options of `tunebench tune`."""

    workload: OptionalWorkload = None
    from_profile: Annotated[
        bool,
        _what(
            "--from-profile",
            help="Tune the workloads that programs ran under tunebench.torch.profile(), in place of "
            "--workload.",
        ),
    ] = False
    suite: Annotated[
        str | None,
        _what(
            metavar="NAME|FILE.toml",
            help="Suite, or a file with one: tune all workloads of a model with one budget, in place of "
            "--workload.",
            show_default=False,
        ),
    ] = None
    batch: Annotated[
        int | None, _what(min=1, help="Batch size of the suite. Default: 1.", show_default=False)
    ] = None
    retune: Annotated[
        bool,
        _what(
            "--retune",
            help="Tune workloads again that are tuned with the current sources, with --from-profile.",
        ),
    ] = False
    repeat: Annotated[
        str | None,
        _what(
            metavar="RUN",
            help="Run to repeat, or to continue if it was interrupted, by the id of `db runs`: the same "
            "workload, device, options and seed.",
            show_default=False,
        ),
    ] = None
    variant: Annotated[
        list[str] | None,
        _what(metavar="NAME", help="Variant, by name or key; repeatable. Default: all.", show_default=False),
    ] = None
    variant_file: Annotated[list[Path] | None, variant_files_option("What to tune")] = None
    device: Annotated[
        list[str] | None,
        _where(
            metavar="NAME|FILE",
            show_default=False,
            help="Device: cuda, cuda:1, cpu, a name, or a file; several as cuda:0,cuda:1 or with --cluster. "
            "Default: GPU, else CPU.",
            autocompletion=_completion.devices,
            callback=split_devices,
        ),
    ] = None
    arch: Annotated[
        str | None,
        _where(
            metavar="NAME",
            show_default=False,
            help="Architecture, such as sm_90, of a GPU that need not be present: compiles, verifies and "
            "predicts. With --cluster: of its devices; all tunes on every one.",
        ),
    ] = None
    cluster: Annotated[
        str | None,
        _where(
            metavar="ADDRESS",
            help="Ray cluster to measure on: ray://HOST:10001; HOST:6379 or auto from one of its nodes; "
            "local to start one here.",
            show_default=False,
        ),
    ] = None
    trials: Annotated[
        int | None,
        _search(
            help="Configurations to launch; known ones are free. Default: 50 per workload; with --suite, "
            "the sum over all workloads.",
            show_default=False,
        ),
    ] = None
    minutes: Annotated[
        float | None,
        _search(
            min=0.0,
            help="Time limit of the search in minutes; with --from-profile or --suite, of all workloads "
            "together. Default: none.",
            show_default=False,
        ),
    ] = None
    sampler: Annotated[
        str,
        _search(
            help="surrogate, bound, random, tpe, nsga2, or that of a package. Default: surrogate; with "
            "several objectives tpe.",
            show_default=False,
        ),
    ] = ""
    seed: Annotated[int, _search(help="Seed of the search and of the inputs.")] = 0
    stop_at_gap: StopAtGap = None
    audit: Annotated[
        float,
        _search(
            min=0.0,
            max=1.0,
            help="Fraction of bound-pruned configurations to run anyway, as a check of the bound.",
        ),
    ] = 0.02
    warm: Annotated[bool, _search(help="Warm-start from other devices and related workloads.")] = True
    learned_pruner: LearnedPruner = False
    retry_failed: Annotated[
        bool, _search("--retry-failed", help="Try every configuration that failed before again.")
    ] = False
    cache: Annotated[
        str, _measure(help="Cache state: cold flushes caches before each sample, warm does not.")
    ] = "cold"
    timeout: Annotated[
        float, _measure(help="Time limit of verifying and timing one configuration, in seconds.")
    ] = 60.0
    workers: Annotated[int, _measure(help="Number of compile processes; 0 is one per core.")] = 0
    objective: Objectives = None
    require: Requirements = None
    metric: Metrics = None
    observe: Annotated[
        list[str] | None,
        _measure(
            metavar="nvml|FILE.py",
            help="Observer of the search: nvml for power, energy and clocks of a GPU, or a file that defines "
            "OBSERVER; repeatable.",
            show_default=False,
        ),
    ] = None
    finalists: Annotated[int, _measure(help="Number of fastest configurations to time again.")] = 3
    baselines: Annotated[bool, _measure(help="Time NumPy and torch after the search.")] = True
    study_storage: Annotated[
        str | None,
        _where(
            metavar="URL",
            help="Optuna storage that gets the trials while they run, such as sqlite:///studies.db.",
            show_default=False,
        ),
    ] = None
    db: Database = None
    as_json: Json = False
    recorded: Annotated[
        bool, typer.Option("--recorded", hidden=True, callback=renamed_flag("--from-profile"))
    ] = False
    again: Annotated[bool, typer.Option("--again", hidden=True, callback=renamed_flag("--retune"))] = False
    calibrated: Annotated[
        bool, typer.Option("--calibrated", hidden=True, callback=renamed_flag("--learned-pruner"))
    ] = False


OF_PLAN = {
    "variant": "variants",
    "variant_file": "variant_files",
    "device": "offline",
    "arch": "offline",
    "cache": "protocol",
    "timeout": "timeout_s",
    "objective": "objectives",
    "metric": "metrics",
    "observe": "observers",
}
"""Options that set a field of `Plan` of another name; `tunebench.tuning.run_options` says what it decides."""

OUTSIDE_PLAN = {
    **dict.fromkeys(("workload", "from_profile", "suite", "batch", "retune"), "selects the workloads"),
    **dict.fromkeys(("repeat", "db"), "selects the run and its database"),
    **dict.fromkeys(("as_json", "study_storage"), "is output"),
    **dict.fromkeys(("recorded", "again", "calibrated"), "is the old name of another option"),
}
"""Options that are not stored with a run, with the reason: none of them changes how a workload is tuned."""

_WITH_REPEAT = ("repeat", "db", "as_json", "study_storage")


@grouped_options("options", TuneOptions)
def command(options: TuneOptions) -> None:
    """Find the fastest kernel and parameters for a workload, and record them.

    A size may be a range: gemm:m=1..8192,n=64,k=64,dtype=f16 tunes m = 1, 2, 4 and so on up to 8192; lookups
    return an answer for every size between. Ctrl-C ends a run early and keeps all results; the same command
    resumes it. A file in place of the workload describes a kernel of your own: TOML, or JSON in T1 format.
    """
    options = dataclasses.replace(
        options,
        from_profile=options.from_profile or options.recorded,
        retune=options.retune or options.again,
        learned_pruner=options.learned_pruner or options.calibrated,
    )
    _check(options)
    if options.repeat is not None:
        _repeat(options)
        return
    if (options.workload or "").endswith((".toml", ".json")):
        options = _described(options)
    _check_names(options)
    from tunebench import tuning
    from tunebench.workloads import parse

    text = options.workload or ""
    sizes = tuning.parse_size_range(text) if tuning.is_size_range(text) else ()
    if text and not sizes:
        parse(text)  # an invalid workload is reported before anything about devices
    local = None if options.cluster is not None else _local_device(options)
    devices = [_listed_gpus(options) or local] if local is not None else _cluster_devices(options)
    plan = _plan(options)
    single, batch = len(devices) == 1 and devices != ["all"], options.batch or 1
    if (sizes or options.suite is not None) and not single:
        raise InputError("several workloads are tuned for one device at a time: name it by --device")
    if options.suite is not None and options.trials is None:
        plan = dataclasses.replace(plan, trials=tuning.default_trials(options.suite, batch, plan))
    if options.device is None and local is not None and local.kind == "cpu":
        note("no GPU found: tuning for the CPU; --arch sm_90 tunes for an absent GPU")
    with contextlib.ExitStack() as stack:
        show = _followed(options, stack, stack.enter_context(tuning.show_progress(plan.trial_budget)))
        on: dict[str, Any] = {"db": options.db, "plan": plan, "watcher": show}
        result: TuningSummary | list[Report]
        if options.suite is not None:
            result = tuning.tune_suite(options.suite, batch=batch, device=devices[0], **on)
        elif options.from_profile:
            result = tuning.tune_from_profile(device=devices[0], retune=options.retune, **on)
        elif sizes:
            result = _tune_sizes(sizes, devices[0], options.db, plan, show)
        elif single:
            result = [tuning.tune(text, device=devices[0], **on)]
        else:
            result = tuning.tune_devices(text, devices=devices, **on)
    if isinstance(result, list):
        _print_reports(options, result, single=single, sizes=len(sizes))
    else:
        _print_summary(options, result)


def _described(options: TuneOptions) -> TuneOptions:
    """Return the options for the kernel that a file describes, with its variant file and workload."""
    from tunebench import kernels

    path = options.workload or ""
    workload, variant = described_kernel(Path(path)).load()
    file = Path(kernels.file_of(variant) or "")
    note(f"{workload}: --variant-file {path} names this kernel in other commands")
    return dataclasses.replace(
        options, workload=str(workload), variant_file=[*(options.variant_file or ()), file]
    )


def _repeat(options: TuneOptions) -> None:
    """Repeat a stored run."""
    from tunebench import tuning

    arguments = tuning.repetition(options.repeat or "", options.db)
    plan, device = arguments.plan, arguments.device
    with contextlib.ExitStack() as stack:
        show = _followed(options, stack, stack.enter_context(tuning.show_progress(plan.trial_budget)))
        report = tuning.tune(arguments.workload, device=device, db=options.db, plan=plan, watcher=show)
    _print_reports(options, [report], single=True, sizes=0)


def _followed(options: TuneOptions, stack: contextlib.ExitStack, show: ProgressCallback) -> ProgressCallback:
    """Return a progress callback that also names the workloads whose trials go to an Optuna storage."""
    if options.study_storage is None:
        return show
    from tunebench.report.optuna_export import StudyFollower

    follower = StudyFollower(options.study_storage, options.db)

    def warn(*_error: object) -> None:
        if follower.failure is not None:
            console(stderr=True).print(f"warning: {follower.failure}; all results are kept", soft_wrap=True)

    stack.push(warn)
    stack.enter_context(follower)

    def show_and_follow(progress: Progress) -> None:
        follower.watch(progress)
        show(progress)

    return show_and_follow


def _tune_sizes(
    sizes: Sequence[Workload], device: Device | str | None, db: str | None, plan: Plan, show: ProgressCallback
) -> list[Report]:
    """Tune the workloads of a size range, with their number in the progress."""
    from tunebench.tuning import tune_all

    reports: list[Report] = []

    def show_number(_workload: Workload, progress: Progress) -> None:
        show(dataclasses.replace(progress, index=len(reports) + 1, count=len(sizes)))

    for report in tune_all(sizes, device=device, db=db, plan=plan, watcher=show_number):
        reports.append(report)
    return reports


def _print_reports(options: TuneOptions, reports: list[Report], *, single: bool, sizes: int) -> None:
    """Print the reports of one workload on each device, or of a size range of `sizes` workloads."""
    from tunebench.tuning.report_text import render_reports, render_size_range, show_command

    _warn_of_violations(reports)
    data = [report.to_json() for report in reports]
    if sizes:
        emit(options.as_json, data, lambda to: render_size_range(reports, sizes, to))
    else:
        emit(options.as_json, data[0] if single else data, lambda to: render_reports(reports, to))
    _end(reports)
    for report in reports:
        if report.config is None and not sizes:
            no_trial = "no trial was left: this run resumes one of the same options; raise --trials"
            finals = f"no finalist was right in every round of the finals; `{show_command(report)}` lists why"
            why = report.failures[0] if report.failures else finals if report.trials else no_trial
            raise TunebenchError(f"no configuration succeeded on {report.device}: {why}")


def _print_summary(options: TuneOptions, summary: TuningSummary) -> None:
    from tunebench.tuning.report_text import render_summary

    _warn_of_violations([result.report for result in summary.results if result.report is not None])
    emit(options.as_json, summary.to_json(), lambda to: render_summary(summary, to))
    _end([summary])
    if summary.kind == "suite" and len(summary.without) == len(summary.results) and not summary.cut_short:
        raise TunebenchError(f"no configuration of any workload succeeded on {summary.device}")


def _check(options: TuneOptions) -> None:
    """Check that the options do not contradict each other."""
    modes = [
        options.workload is not None,
        options.from_profile,
        options.suite is not None,
        options.repeat is not None,
    ]
    if sum(modes) != 1:
        fault = "exclude one another" if any(modes) else "are all missing"
        raise InputError(
            f"--workload, --from-profile, --suite and --repeat {fault}: expected one of a workload, the "
            "workloads of a profile, those of a model, or a run to repeat"
        )
    if options.repeat is not None:
        _refuse_options_of_run(options)
    if options.retune and not options.from_profile:
        raise InputError("--retune goes with --from-profile; a workload is always tuned")
    if options.from_profile and options.cluster is not None:
        raise InputError("--from-profile tunes on this machine: leave --cluster out, or use --workload")
    if options.batch is not None and options.suite is None:
        raise InputError("--batch goes with --suite; the text of a workload has its sizes")


def _refuse_options_of_run(options: TuneOptions) -> None:
    """Refuse options next to --repeat that the run has itself."""
    extra = [
        f"--{field.name.replace('_', '-')}"
        for field in dataclasses.fields(options)
        if field.name not in _WITH_REPEAT and getattr(options, field.name) != field.default
    ]
    if extra:
        raise InputError(f"--repeat repeats a run with its own options: leave {', '.join(extra)} out")


def _check_names(options: TuneOptions) -> None:
    """Check the names of the suite, the operator, its variants, the sampler and the cache state.

    Names are reported before anything about devices, and before the modules of a search are imported.
    """
    from tunebench import kernels, workloads

    _cache(options.cache)
    if options.sampler:
        from tunebench.search.registry import samplers

        if options.sampler not in samplers():
            raise UnknownName("sampler", options.sampler, samplers())
    if options.suite is not None:
        workloads.suite(options.suite, options.batch or 1)
    text, operator = options.workload or "", ""
    if text:
        operator = text.partition(":")[0] if ":" in text else workloads.parse(text).operator
        workloads.operator(operator)
    variants = kernels.variants(operator or None) if options.variant else ()
    for name in options.variant or ():
        if all(name not in (variant.name, variant.key) for variant in variants):
            valid = {variant.name for variant in variants} if operator else {v.key for v in variants}
            raise UnknownName(f"variant of {operator}" if operator else "variant", name, valid)


def _plan(options: TuneOptions) -> Plan:
    """Return the tuning plan; options with the name of a field of `Plan` are copied."""
    from tunebench.measure.timing import Protocol
    from tunebench.tuning import Plan

    names = {field.name for field in dataclasses.fields(Plan)} - {"require"}
    same = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if field.name in names
    }
    return Plan(
        **same,
        variants=tuple(options.variant or ()),
        variant_files=tuple(str(path) for path in options.variant_file or ()),
        protocol=Protocol(cache=_cache(options.cache)),
        offline=options.device == ["offline"] or (options.arch is not None and options.cluster is None),
        timeout_s=options.timeout,
        metrics=metrics_of(options.metric),
        objectives=tuple(options.objective or ()),
        require=tuple(options.require or ()),
        observers=tuple(options.observe or ()),
    )


def _warn_of_violations(reports: Sequence[Report]) -> None:
    for violation in (violation for report in reports for violation in report.violations):
        console(stderr=True).print(f"warning: a bound is violated: {violation}", soft_wrap=True)


def _end(reports: Sequence[Report | TuningSummary]) -> None:
    """Exit with the status of a lost cluster or a failed environment, or of Ctrl-C."""
    for report in reports:
        if report.stopped is not None:
            raise ClusterLost(f"{report.stopped}; all results are kept, the same command resumes here")
    if any(report.interrupted for report in reports):
        raise typer.Exit(INTERRUPTED)


def _cache(text: str) -> Literal["cold", "warm"]:
    if text not in ("cold", "warm"):
        raise UnknownName("cache state", text, ("cold", "warm"))
    return "cold" if text == "cold" else "warm"


def _cluster_devices(options: TuneOptions) -> list[Device | str | None]:
    """Return the wanted devices of the workers; the device of a file is found by its key."""
    from tunebench import datasheet
    from tunebench.cli._option import absent_device

    if options.device and options.arch is not None:
        raise InputError("--device and --arch exclude each other: a device has its architecture")
    names: list[str | None] = [*options.device] if options.device else [options.arch]
    return [absent_device(name) if name and datasheet.is_file(name) else name for name in names]


def _listed_gpus(options: TuneOptions) -> str | None:
    """Return GPUs of this machine that are named by position, such as ``cuda:0,cuda:1``; else None."""
    names = options.device or []
    return ",".join(names) if names and all(re.fullmatch(r"cuda:\d+", name) for name in names) else None


def _local_device(options: TuneOptions) -> Device:
    from tunebench import device as devices

    if options.device is not None and len(options.device) > 1 and _listed_gpus(options) is None:
        raise InputError(
            "several --device need --cluster: this machine tunes for one kind at a time, on GPUs such as "
            "cuda:0,cuda:1"
        )
    name = options.device[0] if options.device else None
    if name == "offline" and options.arch is None:
        architectures = ", ".join(devices.architectures())
        raise InputError(f"--device offline needs --arch; known: {architectures}")
    return target_device(None if name == "offline" else name, options.arch)
