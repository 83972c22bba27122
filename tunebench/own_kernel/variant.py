"""Variants of a user's kernel, in any language or a function as it is; a generated module completes them."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tunebench._lazy import np
from tunebench.compile.triton_loop import loop_trips
from tunebench.device import Device
from tunebench.dtype import itemsize, numpy_dtype
from tunebench.emulate.emulator import emulate
from tunebench.emulate.triton_interpreter import interpret
from tunebench.errors import InputError, VariantError
from tunebench.own_kernel.operator import OwnOperator
from tunebench.space import Config, Constraint, Table, takes_config
from tunebench.variant import (
    TRITON_OPTIONS,
    Argument,
    Costs,
    CudaVariant,
    GpuVariant,
    Launch,
    LibraryCpuVariant,
    NumbaCpuVariant,
    NumbaCudaVariant,
    Scalar,
    TritonVariant,
    Variant,
    restore_launch,
)
from tunebench.workload import Tensor

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = [
    "OwnBinaryKernel",
    "OwnCudaKernel",
    "OwnFunction",
    "OwnNumbaCudaKernel",
    "OwnNumbaKernel",
    "OwnTritonKernel",
    "by_row",
]

RESTORE = """
extern "C" __global__ void tunebench_restore(const unsigned char* from, unsigned char* to, long long count) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < count) reinterpret_cast<WORD*>(to)[i] = reinterpret_cast<const WORD*>(from)[i];
}
"""
"""Kernel that copies an in-out array before the user's kernel changes the copy."""
_REFUSED_FLAGS = {
    "-I": "name folders of headers in includes=",
    "--include": "name folders of headers in includes=",
    "-arch": "the device decides the architecture",
    "--gpu-architecture": "the device decides the architecture",
    "-gencode": "the device decides the architecture",
}
"""Reasons why options of a compiler are not passed on, by their start."""

WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}


def by_row(holds: Callable[..., Any], names: tuple[str, ...]) -> Constraint:
    """Return a constraint on columns that calls a function of single values for each row.

    Args:
        holds: Function of parameters, and of sizes of the workload.
        names: Names of its arguments that are parameters.
    """
    sizes = tuple(name for name in inspect.signature(holds).parameters if name not in names)

    @takes_config(*names)
    def constraint(config: Mapping[str, Any], workload: Any) -> Any:
        fixed = {name: workload.sizes[name] for name in sizes}
        rows = zip(*(config[name].tolist() for name in names), strict=True)
        return np.array([bool(holds(**dict(zip(names, row, strict=True)), **fixed)) for row in rows])

    return constraint


class OwnKernel(Variant[Any]):
    """What generated variants have in common.

    Attributes:
        digest: Hash of the generated module.
        given_default: The default configuration; None takes the first valid one.
    """

    digest: ClassVar[str]
    given_default: ClassVar[Mapping[str, Any] | None] = None

    def default(self, workload: OwnOperator, device: Device) -> Config:
        """Return the given default, or the first valid configuration."""
        if self.given_default is not None:
            return self.space.check(self.given_default, workload=workload, device=device)
        table = self.space.enumerate(workload=workload, device=device)
        if not len(table):
            raise VariantError(f"no configuration of {self.key} satisfies its constraints")
        return table.config(0)

    def scratch(self, workload: OwnOperator, config: Config) -> tuple[Tensor, ...]:
        """Return the arrays for intermediate values."""
        return workload.scratch()

    def revision(self, workload: OwnOperator, config: Config) -> str:
        """Return the hash of the generated module, which contains all that the user gave."""
        return self.digest

    def _default_config(self, workload: OwnOperator) -> Config:
        """Return the default configuration for computing a reference, where no device is known."""
        if self.given_default is not None:
            return Config(self.given_default)
        return self.space.enumerate(workload=workload, device=None).config(0)


class OwnGpuKernel(OwnKernel, GpuVariant[Any]):
    """What kernels on a grid of blocks have in common.

    Attributes:
        grid_of: Names of its arguments, and the function that returns the blocks in x, y, z.
        block_of: The same for the threads of a block.
        smem_of: The same for the dynamic shared memory of a block in bytes.
        emulated_sizes: Sizes of the workload that is emulated where there is no GPU.
    """

    grid_of: ClassVar[tuple[tuple[str, ...], Callable[..., Any]]]
    block_of: ClassVar[tuple[tuple[str, ...], Callable[..., Any]]]
    smem_of: ClassVar[tuple[tuple[str, ...], Callable[..., Any]]]
    emulated_sizes: ClassVar[Mapping[str, int]] = {}

    def emulation_workload(self, workload: OwnOperator, config: Config) -> OwnOperator:
        """Return the workload with the sizes that the user gave for emulation."""
        names = {a.name: a.dimension or a.name for a in workload.kernel_arguments}
        changed = workload.changed(**{names[name]: size for name, size in self.emulated_sizes.items()})
        assert isinstance(changed, OwnOperator)
        return changed

    def _launch(self, workload: OwnOperator, config: Mapping[str, Any], entry: str) -> Launch:
        grid = _extents(_evaluated(self.grid_of, workload, config), "grid")
        block = _extents(_evaluated(self.block_of, workload, config), "block")
        smem_bytes = int(_evaluated(self.smem_of, workload, config))
        arguments = tuple(_passed(argument, workload) for argument in workload.kernel_arguments)
        return Launch(entry=entry, grid=grid, block=block, arguments=arguments, smem_bytes=smem_bytes)

    def costs(self, workload: OwnOperator, table: Table, device: Device) -> Costs:
        """Return the blocks and threads; what the blocks do is unknown."""
        grids = _column(self.grid_of, workload, table, "grid")
        blocks = _column(self.block_of, workload, table, "block")
        smem = _column(self.smem_of, workload, table, "smem_bytes")
        restored = sum(argument.role == "inout" for argument in workload.kernel_arguments)
        return Costs(
            blocks=grids, full_blocks=0, threads=blocks, smem_bytes=smem, serial_launches=1 + restored
        )


def _evaluated(
    function: tuple[tuple[str, ...], Callable[..., Any]], workload: OwnOperator, config: Mapping[str, Any]
) -> Any:
    names, call = function
    values = {**workload.sizes, **config}
    return call(**{name: values[name] for name in names})


def _extents(value: Any, role: str) -> tuple[int, int, int]:
    extents = tuple(value) if isinstance(value, tuple | list) else (value,)
    whole = all(hasattr(extent, "__index__") and extent >= 1 for extent in extents)
    if not whole or not 1 <= len(extents) <= 3:
        raise VariantError(f"{role} must be one to three whole numbers of 1 or more, got {value!r}")
    x, y, z = (*map(int, extents), 1, 1)[:3]
    return x, y, z


def _column(
    function: tuple[tuple[str, ...], Callable[..., Any]], workload: OwnOperator, table: Table, role: str
) -> Any:
    """Return the product of the extents for each configuration; equal arguments are evaluated once."""
    names = [name for name in function[0] if name in table.space.names]
    products: dict[tuple[Any, ...], int] = {}

    def product(row: tuple[Any, ...]) -> int:
        if row not in products:
            value = _evaluated(function, workload, dict(zip(names, row, strict=True)))
            x, y, z = (int(value), 1, 1) if role == "smem_bytes" else _extents(value, role)
            products[row] = x * y * z
        return products[row]

    if not names:
        return float(product(()))
    rows = zip(*(table[name].tolist() for name in names), strict=True)
    return np.array([product(row) for row in rows], dtype=np.float64)


def _passed(argument: Any, workload: OwnOperator) -> Argument:
    if argument.role == "size":
        return Scalar("long long" if argument.dtype == "i64" else "int", workload.sizes[argument.name])
    if argument.role == "number":
        return Scalar("float", argument.value)
    return str(argument.result)


class OwnCudaKernel(OwnGpuKernel, CudaVariant[Any]):
    """A kernel in CUDA C++.

    Attributes:
        text: The source.
        entry: The kernel, with its template arguments by name: ``vadd<block>``.
        flags_of: Names of its arguments, and the function that returns the options of NVRTC.
    """

    text: ClassVar[str]
    entry: ClassVar[str]
    flags_of: ClassVar[tuple[tuple[str, ...], Callable[..., Any]]] = ((), tuple)

    def flags(self, workload: OwnOperator, config: Config) -> tuple[str, ...]:
        """Return the options that define no macro: macros are part of the source."""
        return tuple(flag for flag in self._given_flags(workload, config) if not flag.startswith("-D"))

    def _given_flags(self, workload: OwnOperator, config: Mapping[str, Any]) -> list[str]:
        flags = [str(flag) for flag in _evaluated(self.flags_of, workload, config)]
        for flag in flags:
            reason = next((why for start, why in _REFUSED_FLAGS.items() if flag.startswith(start)), None)
            if reason is not None or not flag.startswith("-") or flag == "-D":
                raise InputError(f"flag {flag!r} of {self.key}: {reason or 'expected one such as -DNAME=1'}")
        return flags

    def source(self, workload: OwnOperator, config: Config) -> str:
        """Return the source after one `#define` for each parameter that is no template argument."""
        template = set(re.findall(r"\w+", self.entry))
        defines = "".join(
            f"#define {name} {_cpp(value)}\n" for name, value in config.items() if name not in template
        )
        for flag in self._given_flags(workload, config):
            if flag.startswith("-D"):
                name, equals, value = flag[2:].partition("=")
                defines += f"#define {name} {value if equals else 1}\n"
        return f"{defines}{self.text}\n{self._restoring(workload)}"

    def launches(self, workload: OwnOperator, config: Config) -> tuple[Launch, ...]:
        """Return a copy for each in-out array, and the launch of the kernel."""
        entry = re.sub(r"\w+", lambda name: _cpp(config.get(name[0], name[0])), self.entry)
        return (*_restoring_launches(workload), self._launch(workload, config, entry))

    def _restoring(self, workload: OwnOperator) -> str:
        sizes = {itemsize(a.dtype) for a in workload.kernel_arguments if a.role == "inout"}
        return "".join(
            RESTORE.replace("WORD", WORDS[size]).replace("tunebench_restore", f"tunebench_restore_{size}")
            for size in sorted(sizes)
        )

    def default_results(self, workload: OwnOperator, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the outputs of the default configuration, emulated on the host."""
        return emulate(self, workload, self._default_config(workload), inputs)


class OwnBinaryKernel(OwnCudaKernel):
    """A kernel that comes compiled; parameters select the launch, or one of several files.

    Attributes:
        files: Parameters in the name of the file, and the file in the folder of the module by their values.
    """

    text = ""
    files: ClassVar[tuple[tuple[str, ...], Mapping[tuple[Any, ...], str]]]

    def compiled(self, workload: OwnOperator, config: Config) -> bytes:
        """Return the contents of the file of a configuration."""
        return (
            Path(sys.modules[type(self).__module__].__file__ or "").with_name(self._file(config)).read_bytes()
        )

    def _file(self, config: Mapping[str, Any]) -> str:
        names, files = self.files
        return files[tuple(config[name] for name in names)]

    def source(self, workload: OwnOperator, config: Config) -> str:
        """Return a line that no compiler accepts, and that names the contents of the file."""
        return f"#error the kernel is compiled: it has no source to emulate ({self._file(config)})\n"

    def limits(self, workload: OwnOperator, device: Device) -> str | None:
        """Return that arrays changed in place are not supported."""
        if any(argument.role == "inout" for argument in workload.kernel_arguments):
            return f"{self.key}: InOut needs a source, to which the copy of the array is added"
        return None

    def default_results(self, workload: OwnOperator, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Raise: a compiled kernel runs on a GPU alone."""
        raise InputError(f"{self.key} needs a reference")


def _restoring_launches(workload: OwnOperator) -> tuple[Launch, ...]:
    """Return a copy of each in-out array."""
    return tuple(
        restore_launch(a.name, a.result, int(np.prod(workload.shape_of(a))), itemsize(a.dtype))
        for a in workload.kernel_arguments
        if a.role == "inout"
    )


def _cpp(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


class OwnCpuKernel(OwnKernel):
    """What functions for the CPU have in common.

    Attributes:
        function_of: For Numba, names of the constants, and a function of them that returns the kernel; for a
            function that is called as it is, names of its arguments, and the function.
    """

    function_of: ClassVar[tuple[tuple[str, ...], Callable[..., Any]]]

    def costs(self, workload: OwnOperator, table: Table, device: Device) -> Costs:
        """Return no work but the compulsory bytes of the workload: what the function does is unknown."""
        return Costs(blocks=1, full_blocks=0, threads=1)


class OwnFunction(OwnCpuKernel, LibraryCpuVariant[Any]):
    """A Python function that is called as it is; it may call libraries, or launch kernels by itself."""

    def package(self, config: Config) -> str:
        """Return NumPy, which is always installed: libraries that a function calls are unknown."""
        return "numpy"

    def calls(self, config: Config) -> str:
        """Return the name of the function."""
        return str(self.function_of[1].__name__)

    def revision(self, workload: OwnOperator, config: Config) -> str:
        """Return a hash of the generated module and the configuration."""
        return hashlib.sha256(f"{self.digest} {config}".encode()).hexdigest()[:16]

    def call(self, workload: OwnOperator, config: Config, tensors: Mapping[str, Any]) -> Callable[[], object]:
        """Return a call of the function, after copies of the arrays that it changes."""
        names, function = self.function_of
        values = {a.name: a.value for a in workload.kernel_arguments if a.role == "number"}
        values |= {**workload.sizes, **config}
        values |= {a.name: tensors[a.result] for a in workload.kernel_arguments if a.result in tensors}
        changed = [
            (tensors[a.result], tensors[a.name]) for a in workload.kernel_arguments if a.role == "inout"
        ]
        named = {name: values[name] for name in names}

        def launch() -> None:
            for copied, original in changed:
                np.copyto(copied, original)
            function(**named)

        return launch

    def default_results(self, workload: OwnOperator, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the outputs of the default configuration."""
        tensors = (*workload.outputs(), *workload.scratch())
        arrays = {**inputs, **{t.name: np.zeros(t.shape, numpy_dtype(t.dtype)) for t in tensors}}
        self.call(workload, self._default_config(workload), arrays)()
        return {tensor.name: arrays[tensor.name] for tensor in workload.outputs()}


class OwnNumbaKernel(OwnCpuKernel, NumbaCpuVariant[Any]):
    """A Python function that Numba compiles for the CPU, with parameters and real numbers as constants.

    Attributes:
        order: Names of the arguments of the kernel.
    """

    order: ClassVar[tuple[str, ...]]

    def kernel(self, workload: OwnOperator, config: Config) -> Callable[..., None]:
        """Return the kernel; it copies arrays that it changes first."""
        names, make = self.function_of
        numbers = {a.name: a.value for a in workload.kernel_arguments if a.role == "number"}
        values = {**numbers, **config}
        return make(**{name: values[name] for name in names})  # type: ignore[no-any-return]

    def arguments(self, workload: OwnOperator, config: Config) -> tuple[Argument, ...]:
        """Return the arguments in the order of the function, after the originals of changed arrays."""
        by_name = {argument.name: argument for argument in workload.kernel_arguments}
        originals = [name for name in self.order if by_name[name].role == "inout"]
        return (*originals, *(_passed_to_cpu(by_name[name], workload) for name in self.order))

    def default_results(self, workload: OwnOperator, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the outputs of the default configuration, compiled without fast-math.

        Raises:
            InputError: An array has a type that Numba lacks on a CPU.
        """
        config = self._default_config(workload)
        tensors = (*workload.outputs(), *workload.scratch())
        narrow = {t.dtype for t in (*workload.inputs(), *tensors)} & {"f16", "bf16", "e4m3"}
        if narrow:
            raise InputError(f"{self.key} needs a reference: Numba computes no {narrow.pop()} on a CPU")
        arrays = dict(inputs)
        arrays |= {t.name: np.zeros(t.shape, numpy_dtype(t.dtype)) for t in tensors}
        arguments = [
            argument.number() if isinstance(argument, Scalar) else arrays[argument]
            for argument in self.arguments(workload, config)
        ]
        _compiled(self, workload, config)(*arguments)
        return {tensor.name: arrays[tensor.name] for tensor in workload.outputs()}


@functools.lru_cache(maxsize=4)
def _compiled(variant: OwnNumbaKernel, workload: OwnOperator, config: Config) -> Callable[..., None]:
    """Return a configuration compiled at the first call; further input sets use it again."""
    import numba

    function: Callable[..., None] = numba.njit(variant.kernel(workload, config))
    return function


def _passed_to_cpu(argument: Any, workload: OwnOperator) -> Argument:
    if argument.role == "size":
        return Scalar("long long", workload.sizes[argument.name])
    return str(argument.result)


class OwnNumbaCudaKernel(OwnGpuKernel, NumbaCudaVariant[Any]):
    """A Python function that Numba compiles for GPUs, with parameters and real numbers as constants."""

    function_of: ClassVar[tuple[tuple[str, ...], Callable[..., Any]]]
    order: ClassVar[tuple[str, ...]]

    def kernel(self, workload: OwnOperator, config: Config) -> Callable[..., None]:
        """Return the kernel."""
        names, make = self.function_of
        numbers = {a.name: a.value for a in workload.kernel_arguments if a.role == "number"}
        values = {**numbers, **config}
        return make(**{name: values[name] for name in names})  # type: ignore[no-any-return]

    def launches(self, workload: OwnOperator, config: Config) -> tuple[Launch, ...]:
        """Return the launch of the kernel."""
        launch = self._launch(workload, config, "")
        by_name = {argument.name: argument for argument in workload.kernel_arguments}
        arguments = tuple(_passed(by_name[name], workload) for name in self.order)
        return (Launch(grid=launch.grid, block=launch.block, arguments=arguments),)

    def limits(self, workload: OwnOperator, device: Device) -> str | None:
        """Return that arrays changed in place are not supported."""
        return _changes_in_place(self.key, workload)

    def default_results(self, workload: OwnOperator, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Raise: Numba's simulator is too slow for a reference."""
        raise InputError(f"{self.key} needs a reference")


def _changes_in_place(key: str, workload: OwnOperator) -> str | None:
    """Return that arrays changed in place are not supported, if there are any."""
    names = [argument.name for argument in workload.kernel_arguments if argument.role == "inout"]
    if not names:
        return None
    return (
        f"{key} changes {', '.join(names)} in place; kernels of Numba-CUDA and compiled kernels cannot: read "
        "an Input and write an Output, or write the kernel in CUDA C++ or Triton"
    )


_NARROW_TYPES = {
    "f16": ("float16", "fp16"),
    "bf16": ("bfloat16", "bf16"),
    "e4m3": ("float8", "fp8", "e4m3", "e5m2"),
    "i8": ("int8",),
}
"""Parts of names in Triton that a kernel needs to convert values to a narrow type."""
_UNKNOWN_RATES = ("dot_scaled", "e2m1", "float4", "fp4", "int4", "gluon", "asm")
"""Parts of names of products whose rate no device here states, or that are not seen in the text."""


def _tensor_core_type(workload: OwnOperator, text: str, device: Device) -> str | None:
    """Return the fastest type of which tensor cores can multiply values in a kernel, or None if unknown.

    These are the types of its arrays, and those that its text names to convert values.

    Args:
        workload: The arrays, and the declared operations.
        text: The module that defines the kernel, with its parameters and values.
        device: The GPU.
    """
    rates, text = device.mma_flop_per_clock, text.lower()
    if not workload.flops() or any(name in text for name in _UNKNOWN_RATES):
        return None
    types = {"tf32" if a.dtype == "f32" else str(a.dtype) for a in workload.kernel_arguments if a.shape}
    types -= {"bool", "i32", "i64"}
    types |= {dtype for dtype, names in _NARROW_TYPES.items() if any(name in text for name in names)}
    return max(types, key=rates.__getitem__, default=None) if types <= rates.keys() else None


def _tensor_share(dtype: str, device: Device) -> float:
    """Return the least share of operations that tensor cores execute if both units of an SM are always busy.

    The f32 units execute up to two multiply-adds of packed values per lane: four operations.
    """
    tensor = device.mma_flop_per_clock[dtype]
    return tensor / (tensor + 4 * device.fma_per_clock)


class OwnTritonKernel(OwnGpuKernel, TritonVariant[Any]):
    """A kernel in Triton.

    Attributes:
        text: The module that defines it.
        entry: Its name.
        order: Names of its arguments that are not compile-time constants.
        constant_names: Names of the others that have no default.
    """

    text: ClassVar[str]
    entry: ClassVar[str]
    order: ClassVar[tuple[str, ...]]
    constant_names: ClassVar[tuple[str, ...]]

    def source(self, workload: OwnOperator, config: Config) -> str:
        """Return the module."""
        return self.text

    def constants(self, workload: OwnOperator, config: Config) -> Mapping[str, Any]:
        """Return parameters, sizes and numbers that are compile-time constants."""
        numbers = {a.name: a.value for a in workload.kernel_arguments if a.role == "number"}
        values = {**numbers, **workload.sizes, **config}
        return {name: values[name] for name in self.constant_names}

    def trips(self, workload: OwnOperator, config: Config) -> tuple[float, ...]:
        """Return how often the loops over ranges of sizes, constants and program ids run."""
        grid = _extents(_evaluated(self.grid_of, workload, config), "grid")
        values = {**workload.sizes, **self.constants(workload, config)}
        return loop_trips(self.text, self.entry, values, grid)

    def launches(self, workload: OwnOperator, config: Config) -> tuple[Launch, ...]:
        """Return a copy for each in-out array, and the launch of the kernel."""
        by_name = {argument.name: argument for argument in workload.kernel_arguments}
        return (
            *_restoring_launches(workload),
            self.launch(
                config,
                entry=self.entry,
                grid=_extents(_evaluated(self.grid_of, workload, config), "grid"),
                arguments=tuple(_passed(by_name[name], workload) for name in self.order),
            ),
        )

    def costs(self, workload: OwnOperator, table: Table, device: Device) -> Costs:
        """Return the blocks and threads, and declared operations that the f32 units cannot have executed.

        The type is the fastest that the kernel can multiply; where it is unknown, operations are left out.
        """
        ctas, warps = (
            table[name] if name in table.space.names else TRITON_OPTIONS[name]
            for name in ("num_ctas", "num_warps")
        )
        blocks = _column(self.grid_of, workload, table, "grid") * ctas
        dtype = _tensor_core_type(workload, f"{self.text} {self.space} {workload}", device)
        return Costs(
            blocks=blocks,
            full_blocks=0,
            threads=32.0 * warps,
            mma_flop=workload.flops() * _tensor_share(dtype, device) / blocks if dtype else 0.0,
            mma_dtype=dtype,
            serial_launches=1 + len(_restoring_launches(workload)),
        )

    def default_results(self, workload: OwnOperator, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the outputs of the default configuration by Triton's interpreter."""
        return interpret(self, workload, self._default_config(workload), inputs)
