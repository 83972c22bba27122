"""Expected times of the configurations predicted best, next to published times of library kernels.

    python -m benchmarks.published_kernels [--data DIR] [--rows] [--ranks]

Published rates are in `benchmarks/published_kernels.toml`, with their sources. DIR holds measured cuBLAS
products (`library_gemm_*.csv.gz` of ai-dynamo/aiconfigurator), of which `SAMPLE` for each device are drawn.
The expected time is what `lookup` answers for a device without records. Tables list, for each set of rows and
each regime:

- factor: geometric mean of expected over published time; error: mean of |expected / published - 1|;
- covered: share of published times within the 90 % prediction interval.

A regime has one row for each workload and device: the fastest published kernel. `--rows` lists every row.

`--ranks` instead ranks configurations of 20 bf16 products: the rank of the default, and of the first one
whose tile is among those that CUTLASS ships. It also lists ties: the share of a space whose predicted time is
within 0.1 % of the shortest.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.sampler_replays import markdown
from tunebench import device as devices
from tunebench.device import Device
from tunebench.forecast.predicted_space import TIE, PredictedSpace, best_space
from tunebench.outcome import CacheState
from tunebench.tuning.tunable import find_variants
from tunebench.workload import Workload
from tunebench.workloads import parse

FILE = Path(__file__).with_suffix(".toml")
DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "predict"
CUBLAS = {"h100_sxm": "h100-sxm", "a100_sxm": "a100-80-sxm", "rtx_pro_6000": "rtx-pro-6000-server"}
"""Devices of the measured cuBLAS products, by file."""

SAMPLE = 42
"""Products of each device, a third of them for each of three ranges of m."""

TURN = 6
"""Products, each with its own b, that were measured in turn. Source: `collect_gemm.py` of aiconfigurator."""

FEW_ROWS, MANY_ROWS = 64, 1024
"""Limits of the ranges of m."""

RANKED = ("h100-sxm", "a100-80-sxm")
"""Devices whose configurations are ranked."""

SQUARES = (4096, 8192)
"""Sizes of square products that are ranked beside those of DeepGEMM."""

CUTLASS_TILES = {(64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256), (256, 64), (256, 128)}
"""Rows and columns of tiles. Source: defaults of the CUTLASS profiler for sm_80 and sm_90."""

CUTLASS_STAGES = 3
"""Fewest stages of these tiles."""

TIED = (
    "elementwise:rows=8192,cols=4096,dtype=bf16,expression=relu(x)",
    "elementwise:rows=1024,cols=1024,dtype=f32,expression=x*2",
    "elementwise:rows=16384,cols=8192,dtype=bf16,expression=gelu(x)",
    "softmax:rows=8192,cols=4096,dtype=bf16",
    "layernorm:rows=8192,cols=4096,dtype=bf16",
    "attention:batch=8,heads=16,seq_q=2048,head_dim=128,dtype=f16",
    "attention:batch=4,heads=32,seq_q=1024,head_dim=64,dtype=bf16,causal=true",
    "attention:batch=32,heads=16,seq_q=512,head_dim=128,dtype=f16",
    "attention:batch=1,heads=8,seq_q=16384,head_dim=256,dtype=f16,causal=true",
)
"""Workloads whose ties are counted."""

TOKENS, WIDTH = 16384, 2048
"""Tokens of a batch, and elements of all heads together, of published attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedKernel:
    """A published time.

    Attributes:
        kernels: Name of the set of rows.
        workload: The workload.
        device: The device.
        measured_us: Time in microseconds.
        cache: Whether the last-level cache held the operands.
        variant: Key of the only variant to compare with; empty for all.
    """

    kernels: str
    workload: Workload
    device: Device
    measured_us: float
    cache: CacheState = "cold"
    variant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A published time and the prediction of our best configuration.

    Attributes:
        published: The published time.
        tunable: The variant with the shortest predicted time.
        row: Row of its configuration that is predicted best.
    """

    published: PublishedKernel
    tunable: PredictedSpace
    row: int

    @property
    def factor(self) -> float:
        """Expected over published time."""
        return self.tunable.predicted_us(self.row) / self.published.measured_us

    @property
    def is_covered(self) -> bool:
        """Whether the 90 % interval contains the published time."""
        low, high = self.tunable.interval_us(self.row) or (0.0, 0.0)
        return low <= self.published.measured_us <= high

    @property
    def regimes(self) -> tuple[str, str]:
        """Regime by the sizes of the workload, and by the resource with the highest floor."""
        floors = {name: floor[self.row] for name, floor in self.tunable.bounds.floors.items()}
        limit = "memory" if max(floors, key=lambda name: floors[name]) == "dram" else "compute"
        return size_regime(self.published.workload), f"{limit} bound"


def size_regime(workload: Any) -> str:
    """Return the regime of a product by its rows, and of attention by its head dimension.

    Args:
        workload: A workload of gemm, grouped_gemm or attention.
    """
    if workload.operator == "attention":
        return f"attention, head_dim {workload.head_dim}"
    if workload.operator == "grouped_gemm":
        return "grouped products"
    if workload.m <= FEW_ROWS:
        return f"products, m <= {FEW_ROWS}"
    return f"products, m {'<' if workload.m < MANY_ROWS else '>='} {MANY_ROWS}"


def compared(published: PublishedKernel) -> Comparison:
    """Return a published time with the prediction of the best configuration of our variants.

    Args:
        published: The published time.
    """
    names = (published.variant,) if published.variant else ()
    tunables, _ = find_variants(
        published.workload, published.device, names, cache=published.cache, compilable=False
    )
    tunable = best_space(tunables)
    return Comparison(published=published, tunable=tunable, row=tunable.unmeasured())


# -- published times -----------------------------------------------------------------------------------------


def published_rates() -> Iterator[PublishedKernel]:
    """Yield the rows of `published_kernels.toml`."""
    for dataset in tomllib.loads(FILE.read_text(encoding="utf-8"))["set"]:
        for row in dataset["rows"]:
            sizes = dict(zip(dataset["columns"], row, strict=True))
            workload = parse(dataset["workload"].format(**_texts(sizes)))
            yield PublishedKernel(
                kernels=dataset["name"],
                workload=workload,
                device=devices.find(dataset["device"]),
                measured_us=workload.flops() / sizes["tflop_s"] / 1e6,
                variant=dataset.get("variant", ""),
            )


def _texts(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a row with those that follow from them, as a workload's text has them."""
    derived = {name: str(value).lower() for name, value in sizes.items()}
    if "rows" in sizes:
        derived["m"] = str(sizes["groups"] * sizes["rows"])
    if "seq" in sizes:
        derived |= {"batch": str(TOKENS // sizes["seq"]), "heads": str(WIDTH // sizes["dim"])}
    return derived


def cublas_products(folder: Path) -> Iterator[PublishedKernel]:
    """Yield measured bf16 products, drawn with a seed; the same number for each range of m.

    Args:
        folder: Folder of `library_gemm_*.csv.gz`.
    """
    for file, name in CUBLAS.items():
        with gzip.open(folder / f"library_gemm_{file}.csv.gz", "rt") as text:
            rows = [row for row in csv.DictReader(text) if row["gemm_dtype"] == "bfloat16"]
        rng, device = np.random.default_rng(0), devices.find(name)
        for low, high in ((1, FEW_ROWS), (FEW_ROWS + 1, MANY_ROWS - 1), (MANY_ROWS, 1 << 31)):
            within = [row for row in rows if low <= int(row["m"]) <= high]
            for index in sorted(rng.choice(len(within), SAMPLE // 3, replace=False).tolist()):
                row = within[index]
                workload = parse(f"gemm:m={row['m']},n={row['n']},k={row['k']},dtype=bf16,trans=nt")
                yield PublishedKernel(
                    kernels=f"cuBLAS, {name}",
                    workload=workload,
                    device=device,
                    measured_us=float(row["latency_ms"]) * 1e3,
                    cache=_measured_cache(workload, device),
                )


def _measured_cache(workload: Workload, device: Device) -> CacheState:
    """Return whether the last-level cache held all matrices of the products that were measured in turn.

    Each has a matrix b of its own; a and c are the same.

    Args:
        workload: The product.
        device: Device whose last-level cache applies.
    """
    a, b = workload.inputs()
    nbytes = a.nbytes + TURN * b.nbytes + workload.outputs()[0].nbytes
    return "warm" if nbytes <= device.l2_bytes else "cold"


# -- tables --------------------------------------------------------------------------------------------------


def fastest_published(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """Return the comparison with the fastest published kernel for each workload, device and variant.

    Args:
        comparisons: All comparisons.
    """
    fastest: dict[tuple[str, str, str], Comparison] = {}
    for comparison in comparisons:
        published = comparison.published
        key = (str(published.workload), published.device.key, published.variant)
        if key not in fastest or published.measured_us < fastest[key].published.measured_us:
            fastest[key] = comparison
    return list(fastest.values())


def summary(name: str, comparisons: Sequence[Comparison]) -> list[str]:
    """Return a row of a table: name, count, geometric mean, mean absolute error and coverage.

    Args:
        name: First cell.
        comparisons: At least one.
    """
    factors = np.array([comparison.factor for comparison in comparisons])
    covered = np.mean([comparison.is_covered for comparison in comparisons])
    return [
        name,
        str(len(comparisons)),
        f"{np.exp(np.log(factors).mean()):.2f}",
        f"{np.abs(factors - 1).mean():.1%}",
        f"{covered:.0%}",
    ]


def tables(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield the Markdown tables of sets and regimes.

    Args:
        comparisons: All comparisons.
    """
    head = ["rows", "factor", "error", "covered"]
    groups: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault(comparison.published.kernels, []).append(comparison)
    yield markdown(["kernels", *head], [summary(*group) for group in groups.items()])
    regimes: dict[str, list[Comparison]] = {}
    for comparison in fastest_published(comparisons):
        for regime in comparison.regimes:
            regimes.setdefault(regime, []).append(comparison)
    yield markdown(["regime", *head], [summary(*group) for group in sorted(regimes.items())])


def row_table(comparisons: Iterable[Comparison]) -> str:
    """Return a Markdown table of every comparison.

    Args:
        comparisons: All comparisons.
    """
    rows = [
        [
            comparison.published.kernels,
            str(comparison.published.workload),
            f"{comparison.published.measured_us:.1f}",
            f"{comparison.tunable.predicted_us(comparison.row):.1f}",
            f"{comparison.factor:.2f}",
            comparison.tunable.variant.name,
        ]
        for comparison in comparisons
    ]
    return markdown(["kernels", "workload", "published, us", "expected, us", "factor", "variant"], rows)


# -- ranks ---------------------------------------------------------------------------------------------------


def best_tunable(workload: Workload, device: Device) -> PredictedSpace:
    """Return the variant with the shortest predicted time.

    Args:
        workload: The workload.
        device: The device.
    """
    tunables, _ = find_variants(workload, device, compilable=False)
    return best_space(tunables)


def tie_share(tunable: PredictedSpace) -> float:
    """Return the share of configurations whose predicted time equals the shortest within 0.1 %."""
    return float((tunable.times_us <= TIE * tunable.times_us.min()).mean())


def rank_rows() -> Iterator[list[str]]:
    """Yield a row for each ranked product: ranks, from 1, of the default and of a CUTLASS tile."""
    shapes = [(row["m"], row["n"], row["k"]) for row in _dense_sizes()]
    for m, n, k in (*shapes, *((size, size, size) for size in SQUARES)):
        cells = [f"{m} x {n} x {k}"]
        for name in RANKED:
            device, workload = devices.find(name), parse(f"gemm:m={m},n={n},k={k},dtype=bf16,trans=nt")
            tunable = best_tunable(workload, device)
            table, predicted = tunable.table, tunable.times_us
            order = np.argsort(predicted, kind="stable")
            default = table.row(tunable.variant.default(workload, device))
            tiles = zip(table["bm"][order].tolist(), table["bn"][order].tolist(), strict=True)
            shipped = np.array([tile in CUTLASS_TILES for tile in tiles])
            shipped &= table["stages"][order] >= CUTLASS_STAGES
            first = table.config(int(order[0]))
            cells += [
                f"{first['bm']} x {first['bn']}",
                str(1 + int(shipped.argmax())),
                str(1 + int((predicted < predicted[default]).sum())),
                f"{predicted[default] / predicted.min() - 1:.0%}",
            ]
        yield cells


def _dense_sizes() -> Iterator[dict[str, Any]]:
    dense = next(d for d in tomllib.loads(FILE.read_text(encoding="utf-8"))["set"] if d["name"] == "DeepGEMM")
    for row in dense["rows"]:
        yield dict(zip(dense["columns"], row, strict=True))


def tie_rows() -> Iterator[list[str]]:
    """Yield a row of `TIED` for each workload: the share of ties on each device."""
    for text in TIED:
        tunables = [best_tunable(parse(text), devices.find(name)) for name in RANKED]
        yield [f"`{text}`", *(f"{tie_share(t):.1%} of {len(t.table)}" for t in tunables)]


def print_ranks() -> None:
    """Print the tables of ranks and of ties."""
    of_device = [
        "tile predicted best",
        "rank of the first CUTLASS tile",
        "rank of the default",
        "default slower by",
    ]
    head = [f"{column}, {name}" for name in RANKED for column in of_device]
    print(markdown(["m x n x k", *head], rank_rows()))
    print(f"\n{markdown(['workload', *(f'ties, {name}' for name in RANKED)], tie_rows())}")


def main() -> None:
    """Compare all published times, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of measured cuBLAS products")
    parser.add_argument("--rows", action="store_true", help="list every row")
    parser.add_argument("--ranks", action="store_true", help="rank configurations instead, and count ties")
    options = parser.parse_args()
    if options.ranks:
        print_ranks()
        return
    published = list(published_rates())
    if options.data.is_dir():
        published += cublas_products(options.data)
    else:
        print(f"no measured cuBLAS products in {options.data}\n")
    comparisons = [compared(row) for row in published]
    print("\n\n".join(tables(comparisons)))
    if options.rows:
        print(f"\n{row_table(comparisons)}")


if __name__ == "__main__":
    main()
