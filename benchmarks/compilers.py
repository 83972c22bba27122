"""Default configurations of every GPU variant, compiled for every architecture by each compiler of users.

    python -m benchmarks.compilers [--nvrtc 13.0.48 --nvrtc 13.0.88 ...] [--arch sm_80,sm_90] [--types]
                                   [--workers 2] [--out benchmarks/results/compilers.md]

One default of each variant is compiled; with `--types`, one for each type of its operator. Each must compile,
be launchable, not spill registers, contain the instructions that its variant claims, and get no costly or
unknown note of ptxas.

Without `--nvrtc`, the compilers of this environment are used, that of Numba-CUDA variants included. Each
`--nvrtc` installs that version of NVRTC in a temporary folder and compiles the CUDA C++ variants with it. No
GPU is needed. Exit status: 0, or 1 if a default has a problem.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compile_matrix import ARCHITECTURES, Item, Record, compile_all, defaults
from tunebench import kernels
from tunebench.variant import GpuVariant

NVRTC = Path("nvidia", "cu13", "lib", "libnvrtc.so.13")
"""Library of the package nvidia-cuda-nvrtc, below the folder it is installed in."""


FIGURES = ("defaults", "compiled", "spilling", "claims unmet", "objections", "harmless notes")
"""Columns of the table: numbers of defaults."""


def variants(languages: Collection[str]) -> list[GpuVariant[Any]]:
    """Return the variants for GPUs of the given languages."""
    return [v for v in kernels.variants() if isinstance(v, GpuVariant) and v.language in languages]


def family(variant: str) -> str:
    """Return the family of a variant by its key: the unit that multiplies, or the language."""
    name = variant.partition("/")[2]
    if name.startswith("numba"):
        return "Numba-CUDA"
    units = {"wgmma": "wgmma and TMA", "mma": "mma.sync"}
    words = name.split("_")
    return next((text for unit, text in units.items() if unit in words), "CUDA C++ without tensor cores")


def compile_defaults(items: Sequence[Item], workers: int) -> list[Record]:
    """Compile defaults with the compilers of this process's environment, and return their records."""
    with tempfile.TemporaryDirectory() as folder:
        return list(compile_all(items, Path(folder, "records.jsonl"), workers))


def compile_with(version: str, arguments: Sequence[str]) -> list[Record]:
    """Compile the defaults of CUDA C++ variants with a version of NVRTC, and return their records.

    Args:
        version: Version of the package nvidia-cuda-nvrtc.
        arguments: Arguments of this command that select defaults.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder]
        subprocess.run([*command, f"nvidia-cuda-nvrtc=={version}"], check=True)
        command = [sys.executable, "-m", "benchmarks.compilers", "--records", *arguments]
        environment = environment_of(Path(folder))
        completed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    records: list[Record] = json.loads(completed.stdout)
    return records


def environment_of(folder: Path) -> dict[str, str]:
    """Return the environment of processes that use the NVRTC installed in a folder.

    Its metadata come first on the path. The bindings use a library that is loaded already, and that finds its
    built-in functions on the library path.
    """
    libraries = folder / NVRTC.parent
    first = {"PYTHONPATH": folder, "LD_LIBRARY_PATH": libraries}
    paths = {
        name: os.pathsep.join(filter(None, (str(path), os.environ.get(name)))) for name, path in first.items()
    }
    return {**os.environ, **paths, "LD_PRELOAD": str(libraries / NVRTC.name)}


def table(records: Collection[Record]) -> str:
    """Return a Markdown table with a row per compiler, family and architecture."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        row = (record["compiler"], family(record["variant"]), record["architecture"])
        groups.setdefault(row, []).append(record)
    rows = [f"| {' | '.join(row)} | {_figures(group)} |" for row, group in groups.items()]
    head = " | ".join(("compiler", "family", "architecture", *FIGURES))
    return "\n".join([f"| {head} |", "|---" * (3 + len(FIGURES)) + "|", *rows])


def _figures(records: Collection[Record]) -> str:
    problems = [problem for record in records for problem in record["problems"]]
    compiled = [record for record in records if "seconds" in record]
    counts = (
        len(records),
        len(compiled),
        sum(bool(record["spill_bytes"]) for record in compiled),
        sum("the default configuration has no" in problem for problem in problems),
        sum("note of ptxas" in problem for problem in problems),
        sum(bool(record["notes"]) for record in compiled)
        - sum(any("note of ptxas" in text for text in record["problems"]) for record in compiled),
    )
    return " | ".join(map(str, counts))


def page(records: Collection[Record], arguments: Sequence[str]) -> str:
    """Return the Markdown page of the results.

    Args:
        records: Records of all compilers.
        arguments: Arguments of the command that made them.
    """
    skipped = {at for start, word in enumerate(arguments) if word == "--out" for at in (start, start + 1)}
    selection = [word for at, word in enumerate(arguments) if at not in skipped]
    notes = Counter(
        (r["compiler"], family(r["variant"]), note) for r in records for note in r.get("notes", ())
    )
    problems = [
        f"- {r['compiler']}: {r['variant']} on {r['architecture']}, `{r['workload']}`: {problem}"
        for r in records
        for problem in r["problems"]
    ]
    noted = [
        f"- {compiler}, {kind}, in {count} defaults: {note}"
        for (compiler, kind, note), count in notes.items()
    ]
    return "\n".join(
        [
            "# Compilers",
            "",
            f"Made by `python -m benchmarks.compilers {' '.join(selection)}`, without a GPU.",
            "The default of each variant is compiled for each architecture, for one workload, or with",
            "`--types` for one of each type. *claims unmet* counts defaults whose machine code lacks an",
            "instruction that the variant claims. *objections* counts costly or unknown notes of ptxas, such",
            "as serialized products. *harmless notes* counts defaults with other notes",
            "(`tunebench/binary/ptxas_note.py`).",
            "",
            table(records),
            "",
            "## Problems",
            "",
            *(problems or ["None."]),
            "",
            "## Notes of ptxas",
            "",
            *(noted or ["None."]),
            "",
        ]
    )


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--nvrtc",
        action="append",
        default=[],
        metavar="VERSION",
        help="version of NVRTC to install; repeatable",
    )
    parser.add_argument("--arch", default=",".join(ARCHITECTURES), help="architectures, comma-separated")
    parser.add_argument("--types", action="store_true", help="a default for each type of an operator")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--out", type=Path, help="Markdown page to write")
    parser.add_argument(
        "--records", action="store_true", help="print records of CUDA C++ variants as JSON only"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Compile the defaults, print the table and return the exit status."""
    options = _arguments(arguments)
    languages = ("cuda",) if options.records else ("cuda", "numba-cuda")
    if options.nvrtc:
        selection = ["--arch", options.arch, "--workers", str(options.workers), *["--types"] * options.types]
        records = [record for version in options.nvrtc for record in compile_with(version, selection)]
    else:
        items = defaults(options.arch.split(","), variants(languages), each_type=options.types)
        records = compile_defaults(list(items), options.workers)
    if options.records:
        json.dump(records, sys.stdout)
        return 0
    order = {architecture: position for position, architecture in enumerate(ARCHITECTURES)}
    records.sort(key=lambda r: (r["compiler"], family(r["variant"]), order.get(r["architecture"], 0)))
    text = page(records, sys.argv[1:] if arguments is None else arguments)
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    return int(any(record["problems"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
