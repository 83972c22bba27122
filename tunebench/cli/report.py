"""`tunebench report`."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunebench._command import command_line
from tunebench.cli._file import require_folder, write_page
from tunebench.cli._option import (
    Architecture,
    Json,
    Objectives,
    ReadDatabase,
    Requirements,
    StoredDevice,
    Tolerance,
    VariantFiles,
    Workloads,
    absent_device,
)
from tunebench.cli._option_group import grouped_options
from tunebench.cli._output import console, emit, phases
from tunebench.errors import InputError

if TYPE_CHECKING:
    from tunebench.db.reader import Reader
    from tunebench.objective import Goal
    from tunebench.report import SearchHistory, SuiteCounts

__all__ = ["command"]

MOST_TRIALS = 250_000
"""Most trials of a page, which are all in memory."""

MOST_DETAILED = 40
"""Most workloads whose sources, rooflines and optimality gaps are in one page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """The arguments and options of `tunebench report`."""

    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="HTML file to write.")]
    workload: Workloads = None
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.toml",
            help="Suite or file with one: its workloads, and the time of one pass.",
            show_default=False,
        ),
    ] = None
    batch: Annotated[int, typer.Option(min=1, help="Batch size of the suite.")] = 1
    device: StoredDevice = None
    arch: Architecture = None
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B",
            help="Compare the best times of two databases (files, URLs or exported .jsonl files) instead; "
            "with --db, of two of its devices.",
            show_default=False,
        ),
    ] = None
    tolerance: Tolerance = 0.05
    objective: Objectives = None
    require: Requirements = None
    variant_file: VariantFiles = None
    db: ReadDatabase = None


@grouped_options("options", ReportOptions)
def command(
    options: ReportOptions,
    as_json: Json = False,
) -> None:
    """Write an HTML page of search histories, or a comparison of two databases or devices.

    The page loads nothing from elsewhere. It has the records of all workloads and devices of the database, or
    of those given.
    """
    require_folder(options.out)
    if options.device is not None and options.arch is not None:
        raise InputError("--device and --arch exclude each other: a device has its architecture")
    if options.compare is not None:
        if options.workload or options.suite or options.device or options.arch:
            raise InputError("--compare A B excludes --workload, --suite, --device and --arch")
        data = _write_comparison(options.out, options.compare, options.tolerance, options.db)
    elif options.workload and options.suite:
        raise InputError("--workload and --suite exclude each other")
    else:
        data = _write_histories(
            options.out,
            options.workload or [],
            _counts(options.suite, options.batch),
            options.device or options.arch,
            options.db,
            _goal(options),
        )
    lines = (f"{name.replace('_', ' ')}: {value}" for name, value in data.items())
    emit(as_json, data, lambda to: to.print("\n".join(lines), soft_wrap=True))


def _counts(suite: str | None, batch: int) -> SuiteCounts | None:
    if suite is None:
        return None
    from tunebench.report import SuiteCounts
    from tunebench.tuning import suite_workloads

    name, workloads = suite_workloads(suite, batch)
    return SuiteCounts(name=name, counts={str(layer.workload): layer.count for layer in workloads})


def _goal(options: ReportOptions) -> Goal | None:
    """Return the objectives to report; None for those of the runs."""
    from tunebench.objective import Goal

    if not options.objective and not options.require:
        return None
    return Goal.parse(objectives=options.objective or (), require=options.require or ())


def _write_histories(
    out: Path,
    workloads: list[str],
    suite: SuiteCounts | None,
    device: str | None,
    db: str | None,
    goal: Goal | None,
) -> dict[str, object]:
    from tunebench.db.record import RECORDED
    from tunebench.db.store import open_store
    from tunebench.report import history_page, search_histories
    from tunebench.workloads import parse

    texts = [text if text.startswith(RECORDED) else str(parse(text)) for text in workloads]
    texts += suite.counts if suite is not None else ()
    with phases(console(stderr=True)) as show:
        show("reading records")
        with open_store(db, read_only=True) as store:
            keys = _device_keys(store, device) if device is not None else set()
            _check_size(store, texts, keys)
            histories = search_histories(store, workloads=texts, devices=keys, goal=goal)
            database = str(store.location)
        if not histories:
            raise InputError(
                f"no record to report in {database}: expected a record of the workload and device"
            )
        show("describing the best configurations")
        page = history_page(_detailed(histories), database=database, suite=suite)
    write_page(out, page)
    records = sum(len(history.records) for history in histories)
    return {"file": str(out), "histories": len(histories), "records": records}


def _check_size(store: Reader, workloads: Collection[str], devices: Collection[str]) -> None:
    """Check that the selected trials fit into a page.

    Raises:
        InputError: if they do not.
    """
    trials = sum(
        count
        for space, count in store.spaces().items()
        if (not workloads or space.workload in workloads) and (not devices or space.device in devices)
    )
    if trials > MOST_TRIALS:
        browse = command_line("dashboard", db=store.location.option)
        raise InputError(
            f"a page has at most {MOST_TRIALS:,} trials, and {trials:,} are selected: select some by "
            f"--workload, --suite or --device; `{browse}` browses all of them"
        )


def _detailed(histories: list[SearchHistory]) -> list[SearchHistory]:
    """Return the histories, the first of them with what is known of their best configurations."""
    from tunebench.report import with_best_kernels

    return [*with_best_kernels(histories[:MOST_DETAILED]), *histories[MOST_DETAILED:]]


def _device_keys(store: Reader, name: str) -> set[str]:
    """Return the keys of the devices of a database with a name, an architecture, a key or a file."""
    from tunebench import datasheet
    from tunebench.db.exchange import device_keys

    key = absent_device(name).key if datasheet.is_file(name) else name
    return device_keys(key, {space.device for space in store.spaces()})


def _write_comparison(
    out: Path, sides: tuple[str, str], tolerance: float, db: str | None
) -> dict[str, object]:
    from tunebench.report import compare_databases, comparison_page

    with contextlib.ExitStack() as stack:
        if db is None:
            before, after = (stack.enter_context(_opened(side)) for side in sides)
            pair: tuple[str, str] | None = None
        else:
            before = after = stack.enter_context(_opened(db))
            pair = (_device_key(before, sides[0]), _device_key(before, sides[1]))
        comparison = compare_databases(before, after, pair=pair, tolerance=tolerance)
    write_page(out, comparison_page(comparison))
    regressions = len(comparison.regressions)
    return {"file": str(out), "compared": len(comparison.times), "regressions": regressions}


@contextlib.contextmanager
def _opened(database: str) -> Iterator[Any]:
    """Open a database, or an exported file in a temporary one."""
    import tempfile

    from tunebench.db.exchange import import_file
    from tunebench.db.location import locate
    from tunebench.db.store import open_store

    if not database.endswith((".jsonl", ".jsonl.gz")):
        locate(database).require()
        with open_store(database, read_only=True) as store:
            yield store
        return
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder, Path(database).name)) as store:
        import_file(store, Path(database))
        yield store


def _device_key(store: Reader, name: str) -> str:
    keys: Sequence[str] = sorted(_device_keys(store, name))
    if len(keys) > 1:
        raise InputError(f"{name} names several devices of {store.location}: {', '.join(keys)}; give a key")
    return keys[0]
