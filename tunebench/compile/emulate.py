"""CUDA C++ without a GPU: the same source through the host's C++ compiler, run by the emulator of `shim_runtime.h`.

A kernel becomes an executable of its own, kept on disk by what reached the compiler, so that a crash takes nothing
along and AddressSanitizer can watch it. What it is to run (launches, tensors, order of threads) is told at run time:
one executable serves several orders and sizes.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from tunebench import _environment
from tunebench.compile.cache import binary_key
from tunebench.dtype import numpy_dtype
from tunebench.errors import InputError, TunebenchError
from tunebench.space import Config
from tunebench.variant import CudaVariant, Launch, Scalar, strip_comments
from tunebench.workload import Tensor, Workload

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["ORDERS", "EmulationFailed", "NotEmulated", "Order", "build", "emulate", "find_compiler"]

Order = Literal["forward", "reverse", "random"]
"""In which order blocks, warps and lanes run, and when asynchronous copies happen."""

ORDERS: tuple[Order, ...] = get_args(Order)

_COMPILE_TIMEOUT_S = 120.0
_SANITIZER_STATUS = 99

_FLAGS = (
    "-std=c++17",
    "-w",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-exceptions",
)
_OPTIMISATION = ("-O1",)
_SANITIZE = (
    "-g1",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,alignment,bounds",
    "-fno-sanitize-recover=all",
)


class NotEmulated(TunebenchError):
    """Nothing can be said about a kernel: there is no host compiler, or it does not know what the kernel uses."""


class EmulationFailed(TunebenchError):
    """A kernel was emulated and found to be wrong, apart from the values it computes.

    Args:
        reason: What was found, with block, thread and line of source where known.
        timed_out: Whether it merely did not finish in time.
    """

    def __init__(self, reason: str, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.timed_out = reason, timed_out

    def __reduce__(self) -> tuple[type[EmulationFailed], tuple[str, bool]]:
        return (EmulationFailed, (self.reason, self.timed_out))


def find_compiler() -> str | None:
    """Return the path of the host's C++ compiler (`$CXX`, g++ or c++), or None if there is none.

    Raises:
        InputError: if `$CXX` names what does not exist.
    """
    asked = _environment.cxx()
    if asked is not None:
        found = shutil.which(asked)
        if found is None:
            raise InputError(
                f"$CXX is {asked!r}, which is no command here; unset it or install that compiler"
            )
        return found
    return shutil.which("g++") or shutil.which("c++")


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

    Outputs are filled with NaN first, shared memory with a poison before each block (see `shim_runtime.h`).

    Args:
        variant: What to run.
        workload: At which size; a miniature, as a rule: emulation does up to some 1e9 multiply-adds a second.
        config: A valid point of the variant's space.
        inputs: One array for every tensor of `workload.inputs()`, by name, of its shape and type.
        order: Order of blocks, warps and lanes; one of two racing threads wins forward, the other in reverse.
        seed: Of the random order.
        sanitize: Whether AddressSanitizer watches every access (and compiling takes longer).
        timeout_s: Wall-clock limit of the run.

    Returns:
        One array for every tensor of `workload.outputs()`, by name.

    Raises:
        NotEmulated: if there is no compiler, or it refuses the source.
        EmulationFailed: if threads diverge or deadlock, memory is misused, or it crashes or takes too long.
        InputError: if an input has another size than its tensor.
    """
    executable = build(variant, workload, config, sanitize=sanitize)
    launches = variant.launches(workload, config)
    job = _job(workload, variant.scratch(workload, config), launches, inputs)
    header = f"order {order} {seed}\n{job}\n".encode()
    payload = b"".join(_bytes(inputs[t.name], t) for t in workload.inputs() if t.shape)
    options = f"detect_leaks=0:exitcode={_SANITIZER_STATUS}"
    try:
        process = subprocess.run(
            [executable],
            input=header + payload,
            capture_output=True,
            timeout=timeout_s,
            env={**os.environ, "ASAN_OPTIONS": options, "UBSAN_OPTIONS": options},
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"emulation did not finish in {timeout_s:g} s (order {order})"
        raise EmulationFailed(reason, timed_out=True) from None
    if process.returncode != 0:
        reason = _reason(process.returncode, process.stderr.decode(errors="replace"))
        raise EmulationFailed(_quote_lines(f"order {order}: {reason}", variant.source(workload, config)))
    return _outputs(workload, process.stdout)


def _bytes(array: Array, tensor: Tensor) -> bytes:
    data: bytes = array.tobytes()
    if len(data) != tensor.nbytes:
        raise InputError(f"input {tensor.name} must have {tensor.nbytes} bytes for {tensor}, got {len(data)}")
    return data


def _outputs(workload: Workload, data: bytes) -> dict[str, Array]:
    import numpy as np

    outputs = {}
    for tensor in workload.outputs():
        array = np.frombuffer(data, numpy_dtype(tensor.dtype), count=tensor.size).reshape(tensor.shape)
        outputs[tensor.name] = array.copy()
        data = data[tensor.nbytes :]
    return outputs


# -- what the executable is told -------------------------------------------------------------------------------


def _entries(launches: tuple[Launch, ...]) -> list[str]:
    return sorted({launch.entry for launch in launches})


def _job(
    workload: Workload,
    scratch: tuple[Tensor, ...],
    launches: tuple[Launch, ...],
    inputs: Mapping[str, Array],
) -> str:
    """Return the tensors and launches as the runtime reads them (`read_job` of shim_runtime.h)."""
    roles = [("input", workload.inputs()), ("output", workload.outputs()), ("scratch", scratch)]
    tensors = [(role, tensor) for role, group in roles for tensor in group]
    stored = [(role, tensor) for role, tensor in tensors if tensor.shape]
    index = {tensor.name: i for i, (_, tensor) in enumerate(stored)}
    by_value = {tensor.name: tensor for _, tensor in tensors if not tensor.shape}
    entries = _entries(launches)
    lines = [f"tensor {tensor.name} {tensor.nbytes} {role}" for role, tensor in stored]
    for launch in launches:
        sizes = (*launch.grid, *launch.block, launch.smem_bytes)
        lines.append(f"launch {entries.index(launch.entry)} {' '.join(map(str, sizes))}")
        for argument in launch.arguments:
            if isinstance(argument, Scalar):
                lines.append(f"value {_scalar_bytes(argument).hex()}")
            elif argument in by_value:
                lines.append(f"value {_bytes(inputs[argument], by_value[argument]).hex()}")
            else:
                lines.append(f"pointer {index[argument]}")
    return "".join(f"{line}\n" for line in lines)


def _scalar_bytes(scalar: Scalar) -> bytes:
    return struct.pack({"int": "<i", "long long": "<q", "float": "<f"}[scalar.ctype], scalar.value)


# -- what it answers --------------------------------------------------------------------------------------------


def _reason(status: int, log: str) -> str:
    """Return in one line what a failed run says about itself."""
    told = [line.removeprefix("emulation: ") for line in log.splitlines() if line.startswith("emulation: ")]
    if told:
        return told[-1]
    asan = re.search(r"ERROR: AddressSanitizer: (\S+).*", log)
    if asan:
        access = re.search(r"^(READ|WRITE) of size \d+", log, re.MULTILINE)
        where = re.search(r"is located (.*? region)", log) or re.search(
            r"(located .*? of global variable.*?) ", log
        )
        line = re.search(r"\bkernel:(\d+)", log)
        facts = [
            asan[1],
            access[0] if access else "",
            where[1] if where else "",
            f"line {line[1]}" if line else "",
        ]
        return f"AddressSanitizer: {', '.join(filter(None, facts))}"
    undefined = re.search(r"(?:kernel:(\d+))?[^\n]*runtime error: ([^\n]*)", log)
    if undefined:
        return f"{undefined[2]}{f', line {undefined[1]}' if undefined[1] else ''}"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}: an address beyond any tensor, or a stack overflow"
    return f"exit status {status}: {log.strip()[-500:] or 'no message'}"


def _quote_lines(reason: str, source: str) -> str:
    """Add the text of each line of source that a reason names."""
    lines = source.splitlines()

    def quote(match: re.Match[str]) -> str:
        number = int(match[1])
        text = lines[number - 1].strip() if 0 < number <= len(lines) else ""
        return f"line {number} ({text})" if text else match[0]

    return re.sub(r"\bline (\d+)", quote, reason)


# -- building it ----------------------------------------------------------------------------------------------------


def build(variant: CudaVariant[Any], workload: Workload, config: Config, *, sanitize: bool = False) -> Path:
    """Return the executable of a configuration, compiled if it is not on disk yet.

    Raises:
        NotEmulated: if there is no compiler, or it refuses the source.
    """
    compiler = find_compiler()
    if compiler is None:
        raise NotEmulated("not verified: no g++; install a C++ compiler or name one in $CXX")
    source = _translation_unit(variant.source(workload, config), _entries(variant.launches(workload, config)))
    flags = _flags(compiler, sanitize)
    key = binary_key("emulated", strip_comments(source), *flags, _version(compiler), *_shim().values())
    target = _environment.cache_folder() / "emulated" / key[:2] / key
    if not target.is_file():
        _compile_to(target, [compiler, *flags, *_stdin_as_cxx(), str(_runtime(compiler, sanitize))], source)
    return target


def _translation_unit(source: str, entries: list[str]) -> str:
    """Return the kernel's source within an unnamed namespace (see shim.h), and the table of its entries."""
    table = "\n".join(f"    emulated::entry(&{entry})," for entry in entries)
    return f"""#include "shim.h"
namespace {{
#line 1 "kernel"
{_dynamic_shared(source)}
}}  // namespace
#line 1 "table"
static const emulated::Entry tunebench_entries[] = {{
{table}
}};
const emulated::Entry* const emulated::entries = tunebench_entries;
const int emulated::entry_count = {len(entries)};
"""


def _dynamic_shared(source: str) -> str:
    """Turn `extern __shared__ T name[];` into a reference to the address of the block's dynamic shared memory.

    C++ would give each such array a symbol and an address of its own, whereas CUDA gives all of them one.
    """
    pattern = (
        r"extern\s+__shared__\s+((?:(?:__align__|alignas)\s*\([^)]*\)\s*)?)([\w:<> ]+?)\s+(\w+)\s*\[\s*\]\s*;"
    )
    return re.sub(
        pattern,
        lambda m: f"static {m[2]}*& {m[3]} = reinterpret_cast<{m[2]}*&>(emulated::dynamic_shared);",
        source,
    )


def _flags(compiler: str, sanitize: bool) -> tuple[str, ...]:
    gcc = _gcc_version(compiler)
    # An uninitialised local variable holds a pattern that no result survives.
    pattern = ("-ftrivial-auto-var-init=pattern",) if gcc >= 12 else ()
    # GCC leaves variables of a named section alone unless told otherwise; shared memory lies in one.
    sections = ("-fsanitize-sections=tunebench_shared",) if gcc else ()
    return (*_FLAGS, *_OPTIMISATION, *pattern, *((*_SANITIZE, *sections) if sanitize else ()))


def _stdin_as_cxx() -> tuple[str, ...]:
    return ("-x", "c++", "-", "-x", "none")


@functools.cache
def _version(compiler: str) -> str:
    ask = [compiler, "--version"]
    return subprocess.run(ask, capture_output=True, text=True, check=True, timeout=_COMPILE_TIMEOUT_S).stdout


def _gcc_version(compiler: str) -> int:
    """Return the major version if the compiler is GCC, else 0."""
    text = _version(compiler)
    match = re.search(r"\b(\d+)\.\d+\.\d+", text)
    return int(match[1]) if match and "clang" not in text else 0


@functools.cache
def _shim() -> dict[str, str]:
    folder = resources.files(__package__ or "")
    names = ("shim_interface.h", "shim.h", "shim_runtime.h")
    return {name: folder.joinpath(name).read_text(encoding="utf-8") for name in names}


def _runtime(compiler: str, sanitize: bool) -> Path:
    """Return the emulator's runtime as an object file, compiled if it is not on disk yet."""
    flags = (*_flags(compiler, sanitize), "-O2")
    key = binary_key("runtime", *flags, _version(compiler), *_shim().values())
    target = _environment.cache_folder() / "emulated" / f"runtime-{key}.o"
    if not target.is_file():
        _compile_to(target, [compiler, *flags, "-c", *_stdin_as_cxx()], '#include "shim_runtime.h"\n')
    return target


def _compile_to(target: Path, command: list[str], source: str) -> None:
    """Run the compiler on `source` and move what it makes to `target` at once, whoever else does the same.

    Raises:
        NotEmulated: with the compiler's first errors.
        InputError: if the folder cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            for name, text in _shim().items():
                Path(folder, name).write_text(text, encoding="utf-8")
            result = Path(folder, "result")
            process = subprocess.run(
                [*command[:1], f"-I{folder}", "-o", str(result), *command[1:]],
                input=source,
                capture_output=True,
                text=True,
                timeout=_COMPILE_TIMEOUT_S,
                check=False,
            )
            if process.returncode != 0:
                errors = [line for line in process.stderr.splitlines() if "error" in line][:5]
                raise NotEmulated(
                    f"the host's compiler refuses it: {'; '.join(errors) or process.stderr[-500:]}"
                )
            result.replace(target)
    except subprocess.TimeoutExpired:
        raise NotEmulated(f"the host's compiler did not finish in {_COMPILE_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise InputError(f"emulation needs a folder to write to, see $TUNEBENCH_CACHE: {error}") from error
