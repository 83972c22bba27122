"""What fusing gains: a fused workload against its parts, each tuned and timed by itself, and against torch.

    python benchmarks/fusion.py [--device cpu] [--trials 30] [--workload TEXT ...] [--finest]
                                [--cache warm] [--db FILE] [--out FILE.json]

The parts are what `Workload.unfused` says: a product and its epilogue as one elementwise chain, say. With
`--finest` elementwise parts are divided further, an operation a kernel, as programs run without a compiler.

Caches are flushed before each run, so that a part reads what the one before it has written from memory:
where that would still be in the last-level cache the gain is flattered. With `--cache warm` all that fits is
in the cache, inputs too, for the whole and for its parts.

What was tuned is in the database, and is not tuned again: the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tunebench import tune
from tunebench.device import find
from tunebench.errors import InputError
from tunebench.measure.timing import Protocol
from tunebench.tuning import Plan, Report
from tunebench.workload import Workload
from tunebench.workloads import parse

CONV = "conv2d:n=8,c=64,h=56,w=56,k=64,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc"

WORKLOADS = (
    "gemm:m=512,n=3072,k=768,dtype=f32,epilogue=bias+gelu",
    "gemm:m=512,n=768,k=3072,dtype=f32,epilogue=bias+silu+residual",
    f"{CONV},epilogue=bias+relu",
    f"{CONV},epilogue=scale+bias+residual+relu",
    "softmax:rows=4096,cols=1024,dtype=f32,prologue=scale+mask",
    "layernorm:rows=4096,cols=1024,dtype=f32,prologue=bias+residual",
    "gated_gemm:m=512,n=2048,k=768,dtype=f32",
    "elementwise:rows=4096,cols=1024,dtype=f32,expression=gelu(x+bias)*y+z,vectors=bias",
)
RESULTS = Path(__file__).parent / "results" / "fusion"

Row = dict[str, Any]
Tune = Callable[[Workload], Report]


def parsed(texts: Iterable[str], skipped: dict[str, str]) -> Iterator[Workload]:
    """Yield those that are fused workloads; tell of the others why they are not."""
    for text in texts:
        try:
            workload = parse(text)
        except InputError as error:
            skipped[text] = str(error)
            continue
        if workload.unfused():
            yield workload
        else:
            skipped[text] = "nothing is fused, or no operator does a part of it alone"


def parts_of(workload: Workload, finest: bool) -> tuple[Workload, ...]:
    """Return the parts; if asked, elementwise ones an operation each."""
    parts = workload.unfused()
    if not finest:
        return parts
    return tuple(single for part in parts for single in part.unfused() or (part,))


def row(workload: Workload, finest: bool, tuned: Tune) -> Row:
    """Tune a workload and its parts, each different part once, and return what they take.

    Raises:
        InputError: if no variant can do one of them on the device.
    """
    whole, parts = tuned(workload), parts_of(workload, finest)
    reports = {part: tuned(part) for part in dict.fromkeys(parts)}
    times = [_us(reports[part]) for part in parts]
    torch = next((one.median_us for one in whole.baselines if one.name == "torch"), None)
    return {
        "workload": str(workload),
        "whole": _found(whole),
        "parts": [{"workload": str(part), **_found(reports[part])} for part in parts],
        "parts_us": sum(times),
        "gain": sum(times) / _us(whole),
        "torch_us": torch,
        "gain_over_torch": torch / _us(whole) if torch is not None else None,
    }


def _us(report: Report) -> float:
    if report.median_us is None:
        raise InputError(f"no configuration of {report.workload} succeeded on {report.device}")
    return report.median_us


def _found(report: Report) -> dict[str, Any]:
    return {
        "us": _us(report),
        "ci_us": report.ci_us,
        "how": report.how,
        "variant": report.variant,
        "config": str(report.config),
    }


def lines(found: Row) -> Iterator[str]:
    """Yield a row as text."""
    torch = found["torch_us"]
    yield found["workload"]
    against = f", torch {torch:.0f} us ({found['gain_over_torch']:.2f}x)" if torch is not None else ""
    yield (
        f"  {found['whole']['us']:.0f} us fused, {found['parts_us']:.0f} us in parts: "
        f"{found['gain']:.2f}x{against}"
    )
    for part in found["parts"]:
        yield f"    {part['us']:.0f} us {part['workload']}"


def tuner(given: argparse.Namespace) -> Tune:
    """Return what tunes a workload by the one plan that all share."""
    protocol = dataclasses.replace(Plan().protocol, cache=given.cache)
    plan = Plan(trials=given.trials, protocol=protocol)
    return lambda workload: tune(workload, device=given.device, db=given.db, plan=plan)


def save(path: Path, given: argparse.Namespace, rows: list[Row], skipped: Mapping[str, str]) -> None:
    """Write all that is known so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"device": find(given.device).key, "trials": given.trials, "cache": given.cache}
    data = {**facts, "finest": given.finest, "rows": rows, "skipped": skipped}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Tune each workload and its parts, and print what fusing gains as it comes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="where; a device that is not here is predicted")
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--workload", action="append", help="instead of the usual ones")
    parser.add_argument("--finest", action="store_true", help="divide elementwise parts into operations")
    parser.add_argument("--cache", choices=("cold", "warm"), default=Protocol().cache)
    parser.add_argument("--db", type=Path, default=Path(tempfile.gettempdir()) / "tunebench-fusion.db")
    parser.add_argument("--out", type=Path, help=f"default: a file of the architecture in {RESULTS}")
    given = parser.parse_args(arguments)
    out = given.out or RESULTS / f"{find(given.device).architecture}.json"
    tuned, rows, skipped = tuner(given), list[Row](), dict[str, str]()
    for workload in parsed(given.workload or WORKLOADS, skipped):
        try:
            rows.append(row(workload, given.finest, tuned))
        except InputError as error:
            skipped[str(workload)] = str(error)
            continue
        print("\n".join(lines(rows[-1])), flush=True)
        save(out, given, rows, skipped)
    save(out, given, rows, skipped)
    for text, reason in skipped.items():
        print(f"skipped: {text}: {reason}")


if __name__ == "__main__":
    main()
