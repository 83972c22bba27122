"""The description of a user's kernel, checked.

Workers are other processes: they import a module that is generated from the description, and never the
user's program. The module contains everything that was given (source, functions as text, values), and its
name a hash of that.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunebench import kernels
from tunebench._environment import cache_folder
from tunebench._private_file import create_folder
from tunebench.own_kernel._generated_module import GeneratedModule
from tunebench.variant import Variant
from tunebench.workload import Workload
from tunebench.workloads import parse

__all__ = ["KernelDescription"]


@dataclass(frozen=True, kw_only=True)
class KernelDescription:
    """A user's kernel, with everything that is needed to tune it.

    Attributes:
        source: CUDA C++: a path that ends with ``.cu``, or text; or a compiled kernel: a path that ends with
            ``.cubin``, ``.fatbin`` or ``.ptx``, in which ``{block}`` is the value of a parameter; or
            a Python function for Numba or Triton, or a path that ends with ``.py``. A function is for Triton
            if `triton.jit` decorates it, or an argument is annotated `tl.constexpr`.
        name: Name of the kernel; with template arguments by name of parameter: ``vadd<block>``.
        args: Arguments by name, in the order of the kernel: `Input`, `Output`, `InOut`, `Scratch`, an array
            (an input with these values), or a number.
        space: Values of each parameter; for Triton, of constants, `num_warps`, `num_stages`, `num_ctas`, and
            `maxnreg` (0: no limit).
        grid: Blocks in x, y, z, as a function or an expression of parameters and sizes; GPUs only.
        block: Threads of a block in the same form. Default: parameters named `block`, or `block_x`,
            `block_y`, `block_z`, or `block_size_x` and so on.
        constraints: Functions or expressions of parameters and sizes that a valid configuration satisfies.
        reference: Function or expression of inputs (in float64), sizes and numbers that returns the outputs:
            one array, a tuple in their order, or a mapping by name; or arrays by the name of their output; or
            a `ReferenceKernel` with the same arguments.
        tolerance: Largest error, as a share of the largest magnitude in an output. Default: by its type.
        default: The configuration to compare with. Default: the first valid one.
        smem_bytes: Dynamic shared memory of a block, as a number, a function or an expression.
        flops: Floating-point operations, as a number, a function or an expression of sizes.
        emulate: Smaller sizes to verify with where there is no GPU.
        includes: Folders of headers that a source in CUDA C++ includes, besides its own folder.
        flags: Options of NVRTC, such as ``--use_fast_math``, ``-DNAME=VALUE`` or ``--std=c++20``: a list, or
            a function or an expression of parameters and sizes that returns one.
        label: Name of the workload. Default: that of the kernel. Kernels of one name need different labels
            in one database, because each voids the records of the other.
        compiled: Whether Numba compiles a function. Otherwise it is called as it is on the CPU, with
            arguments and parameters by name: it calls libraries, or compiles and launches by itself.

    Raises:
        InputError: Something is missing or contradicts the rest; the message names it.
    """

    source: Any
    name: str | None = None
    args: Mapping[str, Any]
    space: Mapping[str, Sequence[Any]]
    grid: Any = None
    block: Any = None
    constraints: Any = ()
    reference: Any = None
    tolerance: float | None = None
    default: Mapping[str, Any] | None = None
    smem_bytes: Any = 0
    flops: Any = None
    emulate: Mapping[str, int] = field(default_factory=dict)
    includes: Sequence[str | Path] = ()
    flags: Any = ()
    label: str | None = None
    compiled: bool = True

    def write(self) -> tuple[Path, str]:
        """Write the generated module into the cache, and return its path and the text of the workload."""
        generated = GeneratedModule(self)
        text = generated.text()
        stem = f"tunebench_user_{generated.operator}_{_hash(text)}"
        folder = create_folder(cache_folder(), "own_kernels")
        for name, data in generated.files.items():
            _write(folder / name, data)
        path = folder / f"{stem}.py"
        _write(path, text.replace("DIGEST", _hash(text), 1).encode())
        return path, generated.workload

    def load(self) -> tuple[Workload, Variant[Any]]:
        """Write and import the generated module, and return the workload and the variant.

        A kernel of the same name that was loaded before is replaced.
        """
        path, text = self.write()
        variant = kernels.replace_file(path, text.partition(":")[0])
        return parse(text), variant


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _write(path: Path, data: bytes) -> None:
    """Write a file whose name contains a hash of its contents, unless it is there."""
    if path.is_file() and path.read_bytes() == data:
        return
    partial = path.with_suffix(f".{os.getpid()}.partial")  # another process may write the same file
    partial.write_bytes(data)
    partial.replace(path)
