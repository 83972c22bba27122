"""Measured kernel times for training: public data sets, and the user's own files.

The public data sets are in `data/predict` of the shared folder (`TUNEBENCH_SHARED`):

- `neusight_ops.csv.gz`: f32 operators of PyTorch 2.1 on seven devices. Source: sitar-lab/NeuSight (MIT).
- `library_*.csv.gz`: 16-bit and 8-bit matrix products, 16-bit layers of experts, and 16-bit attention over
  prompts, of one new query per sequence and without a mask, of serving frameworks on five devices.
  Source: ai-dynamo/aiconfigurator (Apache-2.0).
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tunebench import device as devices
from tunebench import workloads
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.forecast.library.kernel import COLUMNS, Arithmetic, Family, LibraryKernel, library_kernels
from tunebench.forecast.library.model import Skill, skill_of
from tunebench.forecast.library.roofline_model import roofline_times
from tunebench.forecast.model_training.host import FLOOR_NOISE, NO_HOST, HostTime, OperatorTable, separate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = [
    "KernelMeasurement",
    "MeasuredKernels",
    "group_by_device",
    "operator_tables",
    "read_file",
    "read_public",
    "read_windows",
]

DEVICES = {
    "AMD Instinct MI100": "mi100",
    "AMD Instinct MI210": "mi210",
    "NVIDIA A100-PCIE-40GB": "a100-40-pcie",
    "NVIDIA A100-SXM4-80GB": "a100-80-sxm",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000-server",
    "Tesla P100-PCIE-16GB": "p100-pcie",
    "Tesla P4": "p4",
    "Tesla T4": "t4",
    "Tesla V100-PCIE-32GB": "v100-pcie",
}
"""Name of each device in this project, by its name in the data sets."""

BINARY = ("add", "mul", "div", "pow")
"""Elementwise operators with two input arrays; all others have one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredKernels:
    """Measured kernels of one kind on one device.

    Attributes:
        skill: Kind of kernel that an expert is trained for.
        family: Family of all kernels.
        arithmetic: Arithmetic of all kernels.
        device: Device of the measurements.
        figures: (R, C), with the columns of the family.
        us: (R,) measured times in microseconds.
        kernel_us: (R,) times without the host; NaN if unknown.
        group: (R,) group under which errors are reported, such as ``"bmm, test"``.
        floor_us: (R,) shortest time that the host of the measurement allows; 0 if `us` excludes the host.
        lead_us: (R,) time of the host before the kernel starts; 0 if `us` excludes the host.
    """

    skill: Skill
    family: Family
    arithmetic: Arithmetic
    device: Device
    figures: Array
    us: Array
    kernel_us: Array
    group: NDArray[np.str_]
    floor_us: Array
    lead_us: Array

    @property
    def visible(self) -> NDArray[np.bool_]:
        """(R,) whether the measured time depends on the kernel: it is clearly above the floor."""
        above: NDArray[np.bool_] = self.us > FLOOR_NOISE * self.floor_us
        return above


@dataclass(frozen=True, slots=True)
class KernelMeasurement:
    """One measured kernel.

    Attributes:
        device: The device.
        kernel: The kernel.
        us: Measured time in microseconds.
        group: Group for error reports.
        host: The host's part in the measured time.
        kernel_us: Time without the host; NaN if unknown, None if it is the measured time.
    """

    device: Device
    kernel: LibraryKernel
    us: float
    group: str
    host: HostTime = NO_HOST
    kernel_us: float | None = None


def read_public(folder: Path) -> list[KernelMeasurement]:
    """Read every public data set in a folder, without devices that are not in `DEVICES`.

    Raises:
        InputError: if one of them is missing.
    """
    try:
        return [
            *_operators(folder),
            *_products(folder),
            *_attentions(folder),
            *_decodes(folder),
            *_encoders(folder),
            *_experts(folder),
        ]
    except OSError as error:
        raise InputError(f"{folder} must contain all public data sets: {error}") from error


def read_file(path: Path) -> list[KernelMeasurement]:
    """Read the user's own measurements.

    A workload that takes several library kernels is skipped: its total time does not determine theirs.

    Args:
        path: A CSV file with columns device, workload and time_us; or, if its name ends in ``.jsonl``, the
            output of `tunebench db export --format jsonl`. Only the fastest time of each workload in it is
            used.

    Raises:
        InputError: with the line that cannot be read.
    """
    read = _exported if path.name.endswith(".jsonl") else _table
    rows = []
    try:
        for device, text, us in read(path):
            workload = workloads.parse(text)
            kernels = list(library_kernels(workload, device))
            if len(kernels) == 1:
                rows.append(KernelMeasurement(device, kernels[0], us, workload.operator))
    except OSError as error:
        raise InputError(f"{path}: {error}") from error
    return rows


def _table(path: Path) -> Iterator[tuple[Device, str, float]]:
    with path.open(newline="", encoding="utf-8") as file:
        for line, entry in enumerate(csv.DictReader(file), start=2):
            try:
                us = _positive(entry["time_us"])
                # A missing field is None, which `find` would resolve to this machine's own GPU.
                device = devices.find(entry["device"] or "")
                text = str(workloads.parse(entry["workload"] or ""))
                if device.kind != "gpu":
                    raise InputError(f"{device.name} is not a GPU")
                yield device, text, us
            except KeyError as error:
                raise InputError(f"{path}: missing column {error}") from error
            except (InputError, TypeError, ValueError) as error:
                raise InputError(f"{path}, line {line}: {error}") from error


def _exported(path: Path) -> Iterator[tuple[Device, str, float]]:
    device_of: dict[str, Device] = {}
    fastest: dict[tuple[str, str], float] = {}
    fields = {field.name for field in dataclasses.fields(Device)}
    with path.open(encoding="utf-8") as file:
        for line, text in enumerate(file, start=1):
            try:
                entry = json.loads(text)
                if entry["what"] == "device":
                    facts = {name: value for name, value in entry.items() if name in fields}
                    device_of[entry["key"]] = Device(**facts)
                elif entry["what"] == "measurement" and entry["outcome"]["kind"] == "measured":
                    us, pair = _positive(entry["outcome"]["median_us"]), (entry["device"], entry["workload"])
                    if device_of[pair[0]].kind == "gpu":
                        fastest[pair] = min(us, fastest.get(pair, us))
            except (InputError, KeyError, TypeError, ValueError) as error:
                raise InputError(f"{path}, line {line}: {error}") from error
    for (device, workload), us in fastest.items():
        yield device_of[device], workload, us


def _positive(value: str | float) -> float:
    us = float(value)
    if not 0 < us < float("inf"):
        raise ValueError(f"a time must be positive, got {value}")
    return us


def group_by_device(rows: list[KernelMeasurement]) -> list[MeasuredKernels]:
    """Return one table for each kind of kernel, arithmetic and device."""
    tables: dict[tuple[str, Family, Arithmetic], list[KernelMeasurement]] = {}
    for row in rows:
        tables.setdefault((row.device.name, row.kernel.family, row.kernel.arithmetic), []).append(row)
    return [
        MeasuredKernels(
            skill=skill_of(family, arithmetic),
            family=family,
            arithmetic=arithmetic,
            device=table[0].device,
            figures=np.array([row.kernel.figures for row in table], dtype=np.float64),
            us=np.array([row.us for row in table]),
            kernel_us=np.array([row.us if row.kernel_us is None else row.kernel_us for row in table]),
            group=np.array([row.group for row in table]),
            floor_us=np.array([row.host.floor_us for row in table]),
            lead_us=np.array([row.host.lead_us for row in table]),
        )
        for (_, family, arithmetic), table in tables.items()
    ]


def _lines(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a data set whose devices have a description."""
    with gzip.open(path, "rt", newline="", encoding="utf-8") as file:
        yield from (row for row in csv.DictReader(file) if row["device"] in DEVICES)


@functools.cache
def _device(name: str) -> Device:
    return devices.find(DEVICES[name])


def _operators(folder: Path) -> Iterator[KernelMeasurement]:
    """Yield f32 operators, with the host time that is estimated from all of them."""
    tables = _operator_entries(folder)
    for entries, times in zip(tables, separate(list(map(_timed, tables))), strict=True):
        device, group = _device(entries[0]["device"]), "{op_group}, {split}".format(**entries[0])
        for entry, us in zip(entries, times.kernel_us, strict=True):
            yield KernelMeasurement(device, _operator(entry), _us(entry), group, times.host, float(us))


def operator_tables(folder: Path) -> list[OperatorTable]:
    """Return the f32 operators of the public data, one table for each device, operator and part."""
    return [_timed(entries) for entries in _operator_entries(folder)]


def _operator_entries(folder: Path) -> list[list[dict[str, str]]]:
    entries: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for entry in _lines(folder / "neusight_ops.csv.gz"):
        entries.setdefault((entry["device"], entry["op"], entry["split"]), []).append(entry)
    return list(entries.values())


def _us(entry: dict[str, str]) -> float:
    return 1e3 * float(entry["latency_ms"])


def _operator(entry: dict[str, str]) -> LibraryKernel:
    """Return the kernel of an f32 operator: B x (M x N) @ (N x K), or B rows of H."""
    names: dict[str, Family] = {"elem": "elementwise", "softmax": "softmax", "ln": "norm"}
    batch, name = float(entry["B"]), entry["op_group"]
    if name in names:
        cols = float(entry["H"])
        nbytes = 4 * batch * cols
        read = nbytes * (1 + (entry["op"] in BINARY))
        return LibraryKernel(names[name], "f32", (batch, cols, read, nbytes))
    m, k, n = (float(entry[column]) for column in "MNK")
    return LibraryKernel("product", "f32", (batch, m, n, k, 4, 4, 0))


def _timed(entries: list[dict[str, str]]) -> OperatorTable:
    """Return the measurements of one operator on one device, for the estimate of the host time."""
    first, device = entries[0], _device(entries[0]["device"])
    kernels = list(map(_operator, entries))
    family, figures = kernels[0].family, np.array([kernel.figures for kernel in kernels])
    unlimited = dataclasses.replace(device, tdp_w=None)  # short kernels do not reach the power limit
    work, waves = zip(*map(functools.partial(_work, device), entries, kernels), strict=True)
    return OperatorTable(
        device=device.name,
        operator=first["op"],
        part=first["split"],
        family=family,
        us=np.array([_us(entry) for entry in entries]),
        peak_us=roofline_times(family, "f32", figures, unlimited).us,
        work=np.array(work),
        waves=np.array(waves),
        kind=np.array([entry["kernel"] if family == "product" else first["op"] for entry in entries]),
    )


def _work(device: Device, entry: dict[str, str], kernel: LibraryKernel) -> tuple[float, float]:
    """Return the quantity that the time of a kernel is proportional to (NaN if unknown), and its waves.

    It is the bytes of an elementwise operator. The blocks of a product that run at the same time take equally
    many steps over the reduction dimension, unless that dimension is divided among blocks.
    """
    if kernel.family == "elementwise":
        return sum(kernel.figures[2:]), 1.0
    if kernel.family != "product" or not entry["grid_x"] or float(entry["grid_z"]) != kernel.figures[0]:
        return np.nan, np.nan
    blocks = float(entry["grid_x"]) * float(entry["grid_y"]) * float(entry["grid_z"])
    if entry["vendor"] == "amd":  # grids of AMD count threads
        blocks /= float(entry["block_x"])
    return kernel.figures[3], float(np.ceil(blocks / device.sm_count))


def _products(folder: Path) -> Iterator[KernelMeasurement]:
    types: dict[str, tuple[Arithmetic, str]] = {"bfloat16": ("bf16", "bf16"), "fp8": ("e4m3", "fp8")}
    for path in sorted(folder.glob("library_gemm_*.csv.gz")):
        for entry in _lines(path):
            m, n, k = (float(entry[column]) for column in "mnk")
            arithmetic, name = types[entry["gemm_dtype"]]
            eight = arithmetic == "e4m3"
            figures = (1.0, m, n, k, 1.0 if eight else 2.0, 2.0, 3 * m * k if eight else 0.0)
            kernel = LibraryKernel("product", arithmetic, figures)
            yield KernelMeasurement(
                _device(entry["device"]), kernel, 1e3 * float(entry["latency_ms"]), f"{name} gemm"
            )


def read_windows(folder: Path) -> list[KernelMeasurement]:
    """Read causal prefill with a sliding window, which no model is trained on.

    Raises:
        InputError: if there is no data set of causal prefill.
    """
    try:
        return [row for row in _all_attentions(folder) if _window(row)]
    except OSError as error:
        raise InputError(f"{folder} must contain causal prefill: {error}") from error


def _attentions(folder: Path) -> Iterator[KernelMeasurement]:
    """Yield causal prefill without a sliding window."""
    for row in _all_attentions(folder):
        if not _window(row):
            yield row


def _window(row: KernelMeasurement) -> float:
    return dict(zip(COLUMNS[row.kernel.family], row.kernel.figures, strict=True))["window"]


def _all_attentions(folder: Path) -> Iterator[KernelMeasurement]:
    """Yield causal prefill with 16-bit keys and values, with and without a sliding window."""
    for path in sorted(folder.glob("library_attention_*.csv.gz")):
        for entry in _lines(path):
            if entry["kv_cache_dtype"] != "bfloat16":
                continue
            names = ("batch_size", "num_heads", "num_key_value_heads", "isl", "isl", "head_dim")
            sizes, window = (float(entry[name]) for name in names), float(entry.get("window_size", 0))
            figures = (*sizes, 1.0, window, 2.0, 2.0)
            kernel = LibraryKernel("attention", "bf16", figures)
            yield KernelMeasurement(
                _device(entry["device"]), kernel, 1e3 * float(entry["latency"]), "attention"
            )


def _decodes(folder: Path) -> Iterator[KernelMeasurement]:
    """Yield attention of one new query per sequence over `step` keys and its own."""
    for path in sorted(folder.glob("library_decode_attention_*.csv.gz")):
        for entry in _lines(path):
            names = ("batch_size", "num_heads", "num_key_value_heads", "isl")
            sizes = tuple(float(entry[name]) for name in names)
            keys = sizes[-1] + float(entry["step"])
            figures = (*sizes, keys, float(entry["head_dim"]), 0.0, 0.0, 2.0, 2.0)
            yield _attention_row("decode attention", entry, figures)


def _encoders(folder: Path) -> Iterator[KernelMeasurement]:
    """Yield attention without a mask, as in encoders of text and images."""
    for path in sorted(folder.glob("library_encoder_attention_*.csv.gz")):
        for entry in _lines(path):
            names = ("batch_size", "num_heads", "num_heads", "isl", "isl", "head_dim")
            figures = (*(float(entry[name]) for name in names), 0.0, 0.0, 2.0, 2.0)
            yield _attention_row("encoder attention", entry, figures)


def _experts(folder: Path) -> Iterator[KernelMeasurement]:
    """Yield one of the two grouped products of each measured layer of experts, with its share of the time.

    The first product has twice the inner size as columns (gate and up), the second the hidden size. Shares
    are those of the roofline times. What else a layer does (order of tokens, activation, sums) counts as part
    of the products. The product is drawn, so that no layer is both trained on and tested on. Groups and rows
    are those of one device of expert parallelism, in the mean.
    """
    rng = np.random.default_rng(0)
    for path in sorted(folder.glob("library_moe_*.csv.gz")):
        for entry in _lines(path):
            names = ("num_tokens", "topk", "num_experts", "hidden_size", "inter_size")
            tokens, topk, experts, hidden, inner = (float(entry[name]) for name in names)
            parallel, inner = float(entry["moe_ep_size"]), inner / float(entry["moe_tp_size"])
            groups, rows = max(1.0, experts // parallel), max(1.0, tokens * topk / parallel)
            skewed = float(entry["distribution"] != "balanced")
            sizes = ((2 * inner, hidden), (hidden, inner))
            figures = np.array([(groups, rows, n, k, 2.0, 2.0, skewed) for n, k in sizes])
            device = _device(entry["device"])
            roofline_us = roofline_times("grouped product", "bf16", figures, device).us
            each_us = 1e3 * float(entry["latency_ms"]) * roofline_us / roofline_us.sum()
            group = f"layers of experts, {'skewed' if skewed else 'balanced'}"
            drawn = rng.integers(2)
            kernel = LibraryKernel("grouped product", "bf16", tuple(map(float, figures[drawn])))
            yield KernelMeasurement(device, kernel, float(each_us[drawn]), group)


def _attention_row(family: Family, entry: dict[str, str], figures: tuple[float, ...]) -> KernelMeasurement:
    kernel = LibraryKernel(family, "bf16", figures)
    return KernelMeasurement(_device(entry["device"]), kernel, 1e3 * float(entry["latency_ms"]), family)
