"""Emulation of CUDA C++ without a GPU: the host's C++ compiler compiles the same source.

Each kernel becomes a separate executable (see `host_compiler`), so that a crash ends that process only and
AddressSanitizer can check it. The executable reads launches, tensors and the order of threads at run time, so
that one executable serves several orders and sizes. README.md in this folder describes the emulator.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from tunebench._child import WORKING_FOLDER, find_program
from tunebench._figure import significant
from tunebench.dtype import itemsize, numpy_dtype
from tunebench.emulate.counts import Counts, read_counts
from tunebench.emulate.host_compiler import Mode, build_executable, find_compiler
from tunebench.emulate.host_source import NotEmulated
from tunebench.emulate.limited_child import run_limited
from tunebench.errors import InputError, TunebenchError
from tunebench.space import Config
from tunebench.variant import CudaVariant, Launch, Scalar, TensorMap
from tunebench.workload import Tensor, Workload

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = [
    "ORDERS",
    "EmulationFailed",
    "NotEmulated",
    "Order",
    "Watched",
    "build",
    "emulate",
    "find_compiler",
    "watch",
]

Order = Literal["forward", "reverse", "random"]
"""Order in which blocks, warps and lanes run, and in which asynchronous copies happen."""

ORDERS: tuple[Order, ...] = get_args(Order)

SM_COUNT = 2
"""SMs of the emulated device: few, so that persistent blocks process several tiles of small workloads."""

_SANITIZER_STATUS = 99
"""Exit status of a sanitizer's finding; the emulator's own findings exit with 3."""


class EmulationFailed(TunebenchError):
    """The emulated kernel is wrong in another way than by the values it computes.

    Args:
        reason: The finding, with block, thread and source line where known.
        timed_out: Whether the run merely exceeded its time limit.
    """

    def __init__(self, reason: str, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.timed_out = reason, timed_out

    def __reduce__(self) -> tuple[type[EmulationFailed], tuple[str, bool]]:
        return (EmulationFailed, (self.reason, self.timed_out))


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Result of `watch`.

    Attributes:
        outputs: One array for every tensor of `workload.outputs()`, by name.
        counts: Instructions and bytes of every launch.
    """

    outputs: dict[str, Array]
    counts: Counts


def emulate(
    variant: CudaVariant[Any],
    workload: Workload,
    config: Config,
    inputs: Mapping[str, Array],
    *,
    order: Order = "forward",
    seed: int = 0,
    sanitize: bool = False,
    timeout_s: float = 60.0,
) -> dict[str, Array]:
    """Run one configuration on the host and return its outputs.

    Outputs are filled with NaN beforehand, and shared memory with a poison before each block.

    Args:
        variant: The kernel variant.
        workload: The workload, usually small (see `GpuVariant.emulation_workload`).
        config: A valid point of the variant's space.
        inputs: One array for every tensor of `workload.inputs()`, by name, of its shape and type.
        order: Order of threads. Of two threads that race, one comes first in ``"forward"`` order and last in
            ``"reverse"``.
        seed: Seed of the random order.
        sanitize: Whether AddressSanitizer checks every access.
        timeout_s: Limit of the run in seconds, without waits for a busy processor.

    Returns:
        One array for every tensor of `workload.outputs()`, by name.

    Raises:
        NotEmulated: No compiler is installed, or it rejects the source; the kernel may still be correct.
        EmulationFailed: Threads diverge or deadlock, memory is misused, or the run crashes or takes too long.
        InputError: An input differs in size from its tensor.
    """
    executable = build(variant, workload, config, sanitize=sanitize)
    job = _job(variant, workload, config, inputs, f"{order} {seed}")
    data = _execute(executable, job, order, timeout_s, variant.source(workload, config))
    return _outputs(workload, data)[0]


def watch(
    variant: CudaVariant[Any],
    workload: Workload,
    config: Config,
    inputs: Mapping[str, Array],
    *,
    order: Order = "forward",
    seed: int = 0,
    timeout_s: float = 120.0,
) -> Watched:
    """Run one configuration as `emulate` does, detect races, and count the work that a GPU would execute.

    Every access to memory is checked, so that one run in one order detects what `emulate` detects only if
    results differ: threads that access the same byte of shared memory without a barrier between, blocks that
    write the same byte of a tensor, shared memory that is read before it is written.

    Args:
        variant: The kernel variant.
        workload: The workload, usually small.
        config: A valid point of the variant's space.
        inputs: One array for every tensor of `workload.inputs()`, by name.
        order: Order of threads.
        seed: Seed of the random order.
        timeout_s: Limit of the run in seconds, without waits for a busy processor.

    Returns:
        The outputs, and the counts.

    Raises:
        NotEmulated: No suitable g++ is installed, or it rejects the source.
        EmulationFailed: Threads race, or for the reasons of `emulate`.
        InputError: An input differs in size from its tensor.
    """
    executable = _build(variant, workload, config, "watch")
    job = _job(variant, workload, config, inputs, f"{order} {seed}")
    data = _execute(executable, job, order, timeout_s, variant.source(workload, config))
    outputs, report = _outputs(workload, data)
    return Watched(outputs=outputs, counts=read_counts(report.decode()))


def _execute(executable: Path, job: bytes, order: Order, timeout_s: float, source: str) -> bytes:
    """Run an executable on a job and return its standard output: outputs, then counts if it watches.

    Args:
        executable: From `build_executable`.
        job: Its standard input.
        order: Order of threads, for messages.
        timeout_s: Limit in seconds, without waits for a busy processor.
        source: Source of the kernel, for lines quoted in messages.
    """
    options = f"detect_leaks=0:exitcode={_SANITIZER_STATUS}"
    try:
        process = run_limited(
            [executable], job, timeout_s=timeout_s, ASAN_OPTIONS=options, UBSAN_OPTIONS=options
        )
    except subprocess.TimeoutExpired:
        reason = f"order {order}: emulation did not finish in {significant(timeout_s)} s"
        raise EmulationFailed(reason, timed_out=True) from None
    if process.returncode != 0:
        reason = _reason(process.returncode, process.stderr.decode(errors="replace"))
        raise EmulationFailed(f"order {order}: {_quote_lines(_name_lines(reason, executable), source)}")
    return process.stdout


def build(variant: CudaVariant[Any], workload: Workload, config: Config, *, sanitize: bool = False) -> Path:
    """Return the executable that emulates a configuration; compile it if it is not cached.

    Args:
        variant: The kernel variant.
        workload: The workload to compile for.
        config: A valid point of the variant's space.
        sanitize: Whether AddressSanitizer checks every access.

    Raises:
        NotEmulated: No compiler is installed, or it rejects the source.
    """
    return _build(variant, workload, config, "sanitize" if sanitize else "plain")


def _build(variant: CudaVariant[Any], workload: Workload, config: Config, mode: Mode) -> Path:
    entries = _entries(variant.launches(workload, config))
    return build_executable(variant.source(workload, config), entries, mode=mode)


def _entries(launches: tuple[Launch, ...]) -> tuple[str, ...]:
    return tuple(sorted({launch.entry for launch in launches}))


# -- input of the executable ---------------------------------------------------------------------------


def _job(
    variant: CudaVariant[Any], workload: Workload, config: Config, inputs: Mapping[str, Array], order: str
) -> bytes:
    """Return order, tensors, launches and inputs in the form that `read_job` of shim/job.h parses."""
    launches = variant.launches(workload, config)
    tensors = [
        *(("input", tensor) for tensor in workload.inputs()),
        *(("output", tensor) for tensor in workload.outputs()),
        *(("scratch", tensor) for tensor in variant.scratch(workload, config)),
    ]
    stored = [(role, tensor) for role, tensor in tensors if tensor.shape]
    index = {tensor.name: i for i, (_, tensor) in enumerate(stored)}
    by_value = {tensor.name: tensor for _, tensor in tensors if not tensor.shape}
    entries = _entries(launches)
    lines = [f"order {order}", *(f"tensor {tensor.name} {tensor.nbytes} {role}" for role, tensor in stored)]
    for launch in launches:
        sizes = (*launch.grid_on(SM_COUNT), *launch.block, launch.smem_bytes, launch.cluster)
        lines.append(f"launch {entries.index(launch.entry)} {' '.join(map(str, sizes))}")
        for argument in launch.arguments:
            if isinstance(argument, Scalar):
                lines.append(f"value {argument.number().tobytes().hex()}")
            elif isinstance(argument, TensorMap):
                lines.append(_map_line(argument, index[argument.tensor]))
            elif argument in by_value:
                lines.append(f"value {_bytes(inputs[argument], by_value[argument]).hex()}")
            else:
                lines.append(f"pointer {index[argument]}")
    text = "".join(f"{line}\n" for line in (*lines, ""))
    return text.encode() + b"".join(_bytes(inputs[t.name], t) for role, t in stored if role == "input")


def _map_line(tensor_map: TensorMap, tensor: int) -> str:
    """Return a tensor map in the form that `read_tensor_map` of shim/job.h parses."""
    pixels = tensor_map.pixel_box
    kind = (
        itemsize(tensor_map.dtype),
        tensor_map.swizzle_bytes,
        len(tensor_map.extents),
        int(pixels is not None),
    )
    form = (*tensor_map.extents, *tensor_map.strides_bytes, *tensor_map.box)
    pixel_form = (*pixels.lower, *pixels.upper, *pixels.strides) if pixels else ()
    return f"map {' '.join(map(str, (tensor, *kind, *form, *pixel_form)))}"


def _bytes(array: Array, tensor: Tensor) -> bytes:
    data: bytes = array.tobytes()
    if len(data) != tensor.nbytes:
        raise InputError(f"expected {tensor.nbytes} bytes for input {tensor.name}, got {len(data)}: {tensor}")
    return data


# -- output of the executable ---------------------------------------------------------------------------


def _outputs(workload: Workload, data: bytes) -> tuple[dict[str, Array], bytes]:
    """Return the outputs, and the bytes that follow them."""
    import numpy as np

    outputs = {}
    at = 0
    for tensor in workload.outputs():
        array = np.frombuffer(data, numpy_dtype(tensor.dtype), count=tensor.size, offset=at)
        outputs[tensor.name] = array.reshape(tensor.shape).copy()
        at += tensor.nbytes
    return outputs, data[at:]


def _reason(status: int, log: str) -> str:
    """Return the reason of a failed run in one line."""
    findings = [
        line.removeprefix("emulation: ") for line in log.splitlines() if line.startswith("emulation: ")
    ]
    if findings:
        return findings[-1]
    undefined = re.search(r"(?:kernel:(\d+))?[^\n]*runtime error: ([^\n]*)", log)
    if undefined:
        return f"{undefined[2]}{f', line {undefined[1]}' if undefined[1] else ''}"
    error = re.search(r"ERROR: AddressSanitizer: (\S+)", log)
    if error:
        access = re.search(r"^(READ|WRITE) of size \d+", log, re.MULTILINE)
        where = re.search(r"is located (.*? region|.*? global variable '\w+)", log)
        line = re.search(r"\bkernel:(\d+)", log)
        facts = [error[1], access and access[0], where and where[1], line and f"line {line[1]}"]
        return f"AddressSanitizer: {', '.join(fact for fact in facts if fact)}"
    if status < 0:
        name = signal.Signals(-status).name
        return f"killed by {name}: memory overwritten, a wild or misaligned address, or a stack overflow"
    return f"exit status {status}: {log.strip()[-500:] or 'no message'}"


def _name_lines(reason: str, executable: Path) -> str:
    """Replace each `pc 0x…` by the source line of the access and of the kernel's line that led to it."""
    tool = find_program("addr2line")
    if tool is None:
        return reason

    def lines(match: re.Match[str]) -> str:
        # The return address follows the call: the byte before it belongs to the call.
        command = [tool, "-i", "-e", str(executable), hex(int(match[1], 16) - 1)]
        listing = subprocess.run(
            command, capture_output=True, text=True, cwd=WORKING_FOLDER, check=False
        ).stdout
        numbers = re.findall(r"(?:\bkernel|<stdin>):(\d+)", listing)
        outer = f" (by way of line {numbers[-1]})" if len(numbers) > 1 else ""
        return f"line {numbers[0]}{outer}" if numbers else match[0]

    return re.sub(r"\bpc (0x[0-9a-f]+)", lines, reason)


def _quote_lines(reason: str, source: str) -> str:
    """Quote the text of each source line that a reason names."""
    lines = source.splitlines()

    def quote(match: re.Match[str]) -> str:
        number = int(match[1])
        text = lines[number - 1].strip() if 0 < number <= len(lines) else ""
        return f"line {number} `{text}`" if text else match[0]

    return re.sub(r"\bline (\d+)", quote, reason)
