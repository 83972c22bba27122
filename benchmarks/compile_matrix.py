"""Compilation of random valid configurations of every CUDA C++ variant for every architecture.

    python -m benchmarks.compile_matrix [--configs 200] [--arch sm_80,sm_90] [--variant gemm/cuda_mma]
                                        [--shard 1/8] [--out compile_matrix.jsonl] [--workers 2]

No GPU is needed. Every valid configuration must compile, and the device must be able to launch it with the
registers and the shared memory of the compiled binary. In addition, a default configuration must not spill
registers, ptxas must have no objection to it (`tunebench.binary.ptxas_note`), and its disassembled code must
contain the instructions that its variant claims.

Each result is saved as one line. The same command compiles only what is missing, also after Ctrl-C, and
compiles again what has changed since. Shards are disjoint and cover everything. Exit status: 0 if no
configuration fails, 1 if one does, 6 without nvdisasm, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import random
import signal
import sys
import time
import tomllib
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from pebble import ProcessExpired, ProcessPool

from tunebench import kernels
from tunebench.binary.compiled import Binary, CompileError
from tunebench.binary.cubin import launch_refusal
from tunebench.binary.disassembly import find_disassembler, sass, unmet_claims
from tunebench.binary.ptxas_note import objections
from tunebench.compile.numba_cuda import compile_numba_cuda, numba_cuda_versions
from tunebench.compile.nvrtc import compile_cuda, nvrtc_version
from tunebench.device import representative
from tunebench.variant import CudaVariant, GpuVariant, NumbaCudaVariant
from tunebench.workload import Workload
from tunebench.workloads import parse

WORKLOADS: dict[str, list[str]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
"""Workloads by operator."""

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")

TIMEOUT_S = 180.0
"""Time limit for one configuration; the slowest configurations seen took some seconds."""

IDENTITY = ("architecture", "variant", "workload", "config")
"""Fields that identify a configuration."""

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One configuration to compile; `default` marks the default configuration of its variant."""

    architecture: str
    variant: str
    workload: str
    config: str
    default: bool

    @property
    def identity(self) -> tuple[str, ...]:
        """Values of the `IDENTITY` fields."""
        return tuple(getattr(self, name) for name in IDENTITY)


# -- configurations to compile -------------------------------------------------------------------------------


def cuda_variants() -> tuple[CudaVariant[Any], ...]:
    """Return every variant that NVRTC compiles."""
    return tuple(variant for variant in kernels.variants() if isinstance(variant, CudaVariant))


def items(
    architectures: Iterable[str], variants: Iterable[CudaVariant[Any]], configs: int, seed: int
) -> Iterator[Item]:
    """Yield configurations of each variant for each architecture, spread over the operator's workloads.

    The default configuration of every workload is included. The items depend only on the arguments and the
    spaces.

    Args:
        architectures: Names of architectures, for example ``"sm_80"``.
        variants: The variants.
        configs: Number of configurations per variant and architecture.
        seed: Seed of the random choice.
    """
    variants = tuple(variants)
    for architecture in architectures:
        device = representative(architecture)
        for variant in variants:
            candidates = [parse(text) for text in workloads_of(variant.operator.operator)]
            supported = [workload for workload in candidates if variant.refuses(workload, device) is None]
            for i, workload in enumerate(supported):
                share = configs // len(supported) + (i < configs % len(supported))
                yield from _items(variant, workload, architecture, max(1, share), seed)


def defaults(
    architectures: Iterable[str], variants: Iterable[GpuVariant[Any]], *, each_type: bool
) -> Iterator[Item]:
    """Yield the default configuration of each variant for the first workload it supports.

    Args:
        architectures: Names of architectures, for example ``"sm_80"``.
        variants: The variants.
        each_type: Whether to yield the default for the first workload of each type instead.
    """
    variants = tuple(variants)
    for architecture in architectures:
        device = representative(architecture)
        for variant in variants:
            types: dict[str, Workload] = {}
            for workload in map(parse, workloads_of(variant.operator.operator)):
                if variant.refuses(workload, device) is None:
                    types.setdefault(workload.dtype if each_type else "", workload)
            for workload in types.values():
                yield Item(
                    architecture=architecture,
                    variant=variant.key,
                    workload=str(workload),
                    config=str(variant.default(workload, device)),
                    default=True,
                )


def workloads_of(operator: str) -> list[str]:
    """Return the workloads of an operator.

    Raises:
        SystemExit: if compile_matrix.toml has no entry for the operator.
    """
    if operator not in WORKLOADS:
        raise SystemExit(f"operator {operator} has no workloads: add some to benchmarks/compile_matrix.toml")
    return WORKLOADS[operator]


def _items(
    variant: CudaVariant[Any], workload: Workload, architecture: str, count: int, seed: int
) -> Iterator[Item]:
    device = representative(architecture)
    table = variant.configs(workload, device)
    default = table.row(variant.default(workload, device))
    chance = random.Random(f"{seed} {architecture} {variant.key} {workload}")
    drawn = [row for row in chance.sample(range(len(table)), min(count, len(table))) if row != default]
    for row in ([] if default is None else [default]) + drawn[: count - 1]:
        yield Item(
            architecture=architecture,
            variant=variant.key,
            workload=str(workload),
            config=str(table.config(row)),
            default=row == default,
        )


def shard(all_items: Iterable[Item], which: str) -> list[Item]:
    """Return every n-th item, starting with the i-th, for `which` in the form i/n, for example ``"1/8"``."""
    i, _, n = which.partition("/")
    if not (i.isdecimal() and n.isdecimal() and 1 <= int(i) <= int(n)):
        raise SystemExit(f"--shard: expected i/n with 1 <= i <= n, for example 1/8, got {which}")
    return list(all_items)[int(i) - 1 :: int(n)]


# -- one configuration ---------------------------------------------------------------------------------------


def examine(item: Item) -> Record:
    """Compile one configuration and return its record; the field `problems` lists the failed checks."""
    variant, workload, device = (
        kernels.variant(item.variant),
        parse(item.workload),
        representative(item.architecture),
    )
    assert isinstance(variant, CudaVariant | NumbaCudaVariant)
    config = variant.space.parse(item.config)
    record: Record = {**dataclasses.asdict(item), **_version(item), "problems": []}
    started = time.perf_counter()
    try:
        if isinstance(variant, CudaVariant):
            binary = compile_cuda(variant, workload, config, device)
        else:
            binary = compile_numba_cuda(variant, workload, config, device)
    except CompileError as error:
        return {**record, "problems": [f"does not compile: {error}"]}
    record |= {"seconds": time.perf_counter() - started, **dataclasses.asdict(binary.resources)}
    record["notes"] = list(binary.notes)
    launches = variant.launches(workload, config)
    record["dynamic_smem_bytes"] = max(launch.smem_bytes for launch in launches)
    refusal = launch_refusal(binary, launches, device)
    if refusal is not None:
        record["problems"].append(f"cannot be launched: {refusal}")
    if item.default:
        record["problems"] += _problems_of_default(variant, workload, item, binary)
    return record


def _problems_of_default(
    variant: CudaVariant[Any] | NumbaCudaVariant[Any], workload: Workload, item: Item, binary: Binary
) -> list[str]:
    problems = list(objections(binary.notes))
    # The table counts spills of Numba-CUDA, too: each of its compilers allocates registers differently.
    if binary.resources.spill_bytes and isinstance(variant, CudaVariant):
        problems.append(f"the default configuration spills {binary.resources.spill_bytes} bytes")
    config = variant.space.parse(item.config)
    if isinstance(variant, CudaVariant) and variant.claims(workload, config):
        missing = unmet_claims(variant, workload, config, sass(binary.payload))
        problems += [f"the default configuration has no {name} instruction" for name in missing]
    return problems


def _version(item: Item) -> dict[str, str]:
    """Return the versions of source and compiler that a saved result depends on."""
    variant = kernels.variant(item.variant)
    revision = variant.revision(parse(item.workload), variant.space.parse(item.config))
    compiler = nvrtc_version() if isinstance(variant, CudaVariant) else numba_cuda_versions()
    return {"revision": revision, "compiler": compiler}


# -- all configurations --------------------------------------------------------------------------------------


def load(path: Path) -> dict[tuple[str, ...], Record]:
    """Return the saved results of a file by item; an incomplete line counts as absent."""
    records = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
            records[tuple(record[name] for name in IDENTITY)] = record
        except (ValueError, KeyError):
            continue
    return records


def stands(record: Record | None, item: Item) -> bool:
    """Return whether a saved result was made from the current source by the current compiler."""
    return record is not None and all(record[name] == value for name, value in _version(item).items())


def compile_all(todo: Collection[Item], out: Path, workers: int) -> Iterator[Record]:
    """Compile in worker processes and yield each result after it is saved.

    Args:
        todo: Configurations to compile.
        out: File to which results are appended, one line each.
        workers: Number of processes.
    """
    context = multiprocessing.get_context("forkserver")
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        ProcessPool(max_workers=workers, initializer=_ignore_interrupts, context=context) as pool,
        out.open("a", encoding="utf-8") as file,
    ):
        if file.tell() and not out.read_bytes().endswith(b"\n"):
            file.write("\n")  # end an incomplete line of an interrupted run
        running: dict[Future[Record], Item] = {}
        waiting = iter(todo)
        try:
            while True:
                for item in waiting:
                    running[pool.schedule(examine, args=[item], timeout=TIMEOUT_S)] = item
                    if len(running) >= 2 * workers:
                        break
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    record = _result(future, running.pop(future))
                    file.write(json.dumps(record) + "\n")
                    file.flush()
                    yield record
        except BaseException:  # Ctrl-C, or the caller stopped the generator
            pool.stop()
            raise


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _result(future: Future[Record], item: Item) -> Record:
    """Return the record of a worker, or a record of its timeout or crash."""
    try:
        return future.result()
    except TimeoutError:
        problem = f"not compiled within {TIMEOUT_S:g} s"
    except ProcessExpired as error:
        problem = f"the compiler crashed: {error}"
    return {**dataclasses.asdict(item), **_version(item), "problems": [problem]}


# -- report --------------------------------------------------------------------------------------------------


class Progress:
    """Progress lines on stderr, one every few seconds."""

    def __init__(self, total: int, every_s: float = 10.0) -> None:
        self._total, self._every_s = total, every_s
        self._started = self._reported = time.monotonic()
        self._done = self._wrong = 0

    def count(self, record: Record) -> None:
        """Count one result, and print a progress line if one is due."""
        self._done += 1
        self._wrong += bool(record["problems"])
        now = time.monotonic()
        if now - self._reported >= self._every_s:
            self._reported = now
            print(self.line(now - self._started), file=sys.stderr, flush=True)

    def line(self, seconds: float) -> str:
        """Return the progress line after this many seconds."""
        minutes = (self._total - self._done) * seconds / max(1, self._done) / 60
        rate = 60 * self._done / max(1e-9, seconds)
        pace = f"{rate:.0f} per minute, {minutes:.0f} min left"
        return f"{self._done}/{self._total}, {self._wrong} failing, {pace}"


def summary(records: Collection[Record]) -> str:
    """Return a Markdown table with a row per variant and architecture, and the totals."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["variant"], record["architecture"]), []).append(record)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], int(item[0][1].removeprefix("sm_"))))
    rows = [
        f"| {variant} | {architecture} | {_figures(group)} |" for (variant, architecture), group in ordered
    ]
    head = (
        "| variant | architecture | configurations | failing | spilling | most registers | median s | p95 s |"
    )
    return "\n".join([head, "|---" * 8 + "|", *rows, f"| all | | {_figures(records)} |"])


def _figures(records: Collection[Record]) -> str:
    compiled = [record for record in records if "seconds" in record]
    wrong = sum(bool(record["problems"]) for record in records)
    if not compiled:
        return f"{len(records)} | {wrong} | - | - | - | -"
    seconds = [record["seconds"] for record in compiled]
    p95 = quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
    spilling = sum(bool(record["spill_bytes"]) for record in compiled)
    registers = max(record["registers"] for record in compiled)
    return f"{len(records)} | {wrong} | {spilling} | {registers} | {median(seconds):.2f} | {p95:.2f}"


# -- command line --------------------------------------------------------------------------------------------


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    keys = [variant.key for variant in cuda_variants()]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--configs", type=int, default=200, help="configurations per variant and architecture, default 200"
    )
    parser.add_argument("--arch", default=",".join(ARCHITECTURES), help="architectures, comma-separated")
    parser.add_argument(
        "--variant", action="append", choices=keys, help="compile only this variant; repeatable"
    )
    parser.add_argument(
        "--shard", default="1/1", help="part of the work as i/n, for example 1/8; default 1/1"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choice, default 0")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("compile_matrix.jsonl"),
        help="file of the results, default compile_matrix.jsonl",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Compile the missing configurations, print the table and return the exit status."""
    options = _arguments(arguments)
    if find_disassembler() is None:
        print("nvdisasm not found: pip install 'tunebench[cuda]'", file=sys.stderr)
        return 6
    variants = [v for v in cuda_variants() if options.variant is None or v.key in options.variant]
    chosen = shard(items(options.arch.split(","), variants, options.configs, options.seed), options.shard)
    records_by_item = load(options.out)
    todo = [item for item in chosen if not stands(records_by_item.get(item.identity), item)]
    print(f"{len(todo)} of {len(chosen)} configurations to compile", file=sys.stderr)
    progress, status, begun = Progress(len(todo)), 0, time.monotonic()
    try:
        for record in compile_all(todo, options.out, options.workers):
            progress.count(record)
    except KeyboardInterrupt:
        status = 130
    seconds = time.monotonic() - begun
    print(progress.line(seconds), file=sys.stderr)
    records_by_item = load(options.out)
    records = [records_by_item[item.identity] for item in chosen if item.identity in records_by_item]
    print(summary(records))
    for record in records:
        for problem in record["problems"]:
            print(*(record[name] for name in IDENTITY), problem)
    return status or int(any(record["problems"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
