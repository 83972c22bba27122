"""Variants: one implementation of an operator, with its search space, costs, source and launch.

A variant is one file that defines one subclass and one instance of it, named `VARIANT`. Its base class
determines how it is compiled: `CudaVariant` (CUDA C++ through NVRTC), `NumbaCudaVariant`, `TritonVariant`,
`NumbaCpuVariant`, or not at all: `LibraryCpuVariant` and `LibraryGpuVariant` call a library. Importing a
variant needs neither CUDA, Numba, Triton nor torch.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from tunebench._command import command_line
from tunebench._deprecation import accept_renamed_attribute
from tunebench._lazy import np
from tunebench._user_code import limited
from tunebench.device import Device
from tunebench.errors import TunebenchError, VariantError, describe_error
from tunebench.space import Config, Space, Table
from tunebench.tensor_map import TENSOR_MAP_TYPES, PixelBox, TensorMap
from tunebench.workload import Tensor, Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column = NDArray[np.float64] | NDArray[np.int64] | float

__all__ = [
    "RESTORE_ENTRY",
    "TENSOR_MAP_TYPES",
    "TRITON_OPTIONS",
    "Argument",
    "Costs",
    "CppCall",
    "CudaVariant",
    "Execution",
    "Language",
    "Launch",
    "LibraryCpuVariant",
    "LibraryGpuVariant",
    "LibraryVariant",
    "NumbaCpuVariant",
    "NumbaCudaVariant",
    "NumbaVariant",
    "PixelBox",
    "Scalar",
    "TensorMap",
    "Tiling",
    "TritonVariant",
    "Variant",
    "ceil_div",
    "dumped_tree",
    "exceeds_memory",
    "including_line",
    "installed_version",
    "restore_launch",
    "strip_comments",
    "unsuitable",
]

W = TypeVar("W", bound=Workload)
OLDEST_CC = (7, 5)
"""Oldest compute capability that NVRTC and Numba-CUDA 13 compile for."""
OLDEST_TRITON_CC = (8, 0)
"""Oldest compute capability that Triton supports."""
TRITON_OPTIONS: Mapping[str, int] = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": 0}
"""Parameters of Triton's compiler, and their defaults; `maxnreg` 0 limits no registers."""
NVIDIA_LIBRARIES = ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
"""Distributions of the libraries that torch calls on a GPU; without them, torch contains or finds its own."""
NVIDIA_BINDINGS = ("nvmath-python", "nvidia-cudnn-frontend")
"""Distributions that call these libraries from Python."""
Language = Literal["cuda", "numba-cuda", "triton", "numba-cpu", "library-cpu", "library-gpu"]


RESTORE_ENTRY = "tunebench_restore_"
"""Start of the names of kernels that copy an array before another one changes it."""
RESTORE_THREADS = 256


def restore_launch(original: str, copied: str, count: int, element_bytes: int) -> Launch:
    """Return the launch that copies an array.

    Args:
        original: Name of the array that stays as it is.
        copied: Name of the array that another kernel changes afterwards.
        count: Number of elements.
        element_bytes: Size of an element.
    """
    return Launch(
        entry=f"{RESTORE_ENTRY}{element_bytes}",
        grid=(ceil_div(count, RESTORE_THREADS), 1, 1),
        block=(RESTORE_THREADS, 1, 1),
        arguments=(original, copied, Scalar("long long", count)),
    )


def ceil_div(a: Any, b: Any) -> Any:
    """Return `a / b` rounded up.

    Args:
        a: Dividend: an integer or a column of integers.
        b: Divisor: an integer or a column of integers.
    """
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number that a kernel receives by value; `ctype` is its C type."""

    ctype: Literal["int", "long long", "float"]
    value: int | float

    def number(self) -> Any:
        """Return the value as a NumPy scalar of its C type."""
        types: dict[str, Any] = {"int": np.int32, "long long": np.int64, "float": np.float32}
        return types[self.ctype](self.value)


Argument = str | Scalar
"""A kernel argument: the name of a tensor (of shape `()`: passed by value), or a `Scalar`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel launch.

    Attributes:
        entry: The kernel: a C++ name expression such as ``gemm<64, 64, 8>``, or the name of a
            function in Triton; unused by Numba.
        grid: Blocks in x, y, z.
        block: Threads per block in x, y, z.
        arguments: In the order of the kernel's parameters; tensor maps in CUDA C++ only.
        smem_bytes: Dynamic shared memory per block.
        cluster: Adjacent blocks along x that run together and can access each other's shared memory.
        blocks_per_sm: For persistent kernels, whose blocks process one tile after the other: the maximum
            number of useful blocks per SM. The grid is then the available work, and a launch has at most
            as many blocks as fit on the device. 0 launches the whole grid.
    """

    entry: str = ""
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[Argument | TensorMap, ...]
    smem_bytes: int = 0
    cluster: int = 1
    blocks_per_sm: int = 0

    def grid_on(self, sm_count: int) -> tuple[int, int, int]:
        """Return the blocks in x, y, z to launch, rounded to whole clusters.

        Args:
            sm_count: Number of SMs of the device.
        """
        if not self.blocks_per_sm:
            return self.grid
        max_blocks = max(self.cluster, self.blocks_per_sm * sm_count // self.cluster * self.cluster)
        return (min(self.grid[0], max_blocks), *self.grid[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How a block is expected to execute: counts for predicted times, which no lower bound uses.

    Every value is a column, or one number if all rows agree. Unlike `Costs`, the values are not floors: they
    are what the code is expected to do. Waits are those of one warp, one after the other; requests that are
    in flight together are one wait.

    Attributes:
        registers: Registers per thread that the code needs; more than a thread can have spill.
        instructions: Warp instructions of a block, except those of `accesses`; at least those of its `Costs`.
        accesses: Loads and stores as `Costs.accesses` counts them; at least those.
        passes: Passes of 128 bytes through shared memory and L1, bank conflicts included.
        l2_bytes: Bytes that a block moves between L2 and its SM, in whole sectors of 32 bytes.
        memory_waits: Waits for loads that memory or L2 answers.
        prefetched_waits: The same for loads that run ahead of their use: a warp computes meanwhile.
        l2_waits: Waits for loads through L1 whose lines other warps of the block request, too.
        shared_waits: Waits for loads from shared memory.
        barriers: Barriers of the block.
        code_bytes: Machine code of the longest loop, or of straight-line code.
        iterations: Times that the code uses each register, which a spilled one is stored and loaded.
        blocks: Blocks of a typical run; at least those of its `Costs`.
        at_once: Blocks of its `Costs` that one block of the launch executes at the same time: persistent
            blocks whose warps take turns with tiles execute several.
        first_waits: Waits of a block for its first loads, which nothing of the block can hide. Where
            persistent blocks take several tiles, only the first one waits.
        serial_clocks: Clocks in which a block does not multiply: it starts, or finishes and stores results.
        further_clocks: Clocks of an SM in kernels that run before the blocks or after them.
        tensor_clocks: Clocks at full rate that the tensor cores of an SM are busy with a block; at least
            those of its `Costs`.
        asynchronous: 1 where units copy and multiply by themselves (TMA, wgmma), so that no warp waits for
            one while it could occupy another; else 0.
        memory_bytes: Bytes that all blocks together move between memory and L2; at least those that any
            implementation must move.
        warp_clocks: Clocks that a warp needs for its own instructions, at peak rates, if each kind depends on
            the one before, such as products, exponentials of them, and products of those; 0 if pipes overlap.
        resident_blocks: Blocks that an SM runs at a time if the launch has no more; 0 if occupancy decides.

    Source: the attributes follow the metrics of Nsight Compute ("Warp State Statistics", "Memory Tables").
    """

    registers: Column = 32.0
    instructions: Column = 0.0
    accesses: Column = 0.0
    passes: Column = 0.0
    l2_bytes: Column = 0.0
    memory_waits: Column = 0.0
    prefetched_waits: Column = 0.0
    l2_waits: Column = 0.0
    shared_waits: Column = 0.0
    barriers: Column = 0.0
    code_bytes: Column = 0.0
    iterations: Column = 1.0
    blocks: Column = 0.0
    at_once: Column = 1.0
    first_waits: Column = 1.0
    serial_clocks: Column = 0.0
    further_clocks: Column = 0.0
    tensor_clocks: Column = 0.0
    asynchronous: Column = 0.0
    memory_bytes: Column = 0.0
    warp_clocks: Column = 0.0
    resident_blocks: Column = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Work that a configuration must execute: columns, or one number if all rows agree.

    Every value is a floor: it may be below the true value but never above it, or lower bounds derived from it
    are unsound. Per-block values are those of the cheapest block that has the full tile.

    Attributes:
        blocks: Blocks launched; edge blocks that skip work count by their area (a half-empty one is 0.5).
        full_blocks: Blocks that do the work of a full tile.
        threads: Threads per block.
        smem_bytes: Static plus dynamic shared memory per block.
        registers: Registers per thread, as known before compilation.
        fma: Multiply-adds, or other full-rate f32 instructions, per block, counted per thread lane.
        mma_flop: Tensor-core FLOPs per block.
        mma_dtype: Input type of the tensor-core instructions.
        sfu: Special-function results (exp, rsqrt, …) per block; 0 if the compiler may use polynomials.
        smem_traffic_bytes: Distinct bytes per warp access through shared memory, per block; an access is at
            least one pass of 128 bytes.
        fill_bytes: Bytes that a block must bring into its SM from L2 or beyond. Bytes that another block of
            the same SM may have left in L1 do not count; copies that bypass L1 (`cp.async.cg`, TMA) do.
        accesses: Loads and stores of shared memory or through L1 per block, each counted once for every
            participating lane, whatever its width; bulk copies and ldmatrix do not count.
        instructions: Warp instructions of all kinds that a block must issue; 0 to derive them from
            `fma`, `sfu` and `smem_traffic_bytes`.
        chain_clocks: Minimum clocks from the first to the last instruction of one full block: its longest
            chain of dependent instructions, each at the device's minimum latency; 0 if unknown.
        serial_launches: Kernels that run one after the other.
        execution: How a block is expected to execute; None lets predictions estimate it from the other
            columns. Lower bounds do not use it.
    """

    blocks: Column
    full_blocks: Column
    threads: Column
    smem_bytes: Column = 0.0
    registers: Column = 16.0
    fma: Column = 0.0
    mma_flop: Column = 0.0
    mma_dtype: str | None = None
    sfu: Column = 0.0
    smem_traffic_bytes: Column = 0.0
    fill_bytes: Column = 0.0
    accesses: Column = 0.0
    instructions: Column = 0.0
    chain_clocks: Column = 0.0
    serial_launches: Column = 1
    execution: Execution | None = None

    def figures(self, rows: int) -> dict[str, NDArray[np.float64]]:
        """Return features that distinguish configurations in addition to their parameters.

        Args:
            rows: Length of each column.

        Returns:
            One column per feature, by name.
        """
        return {
            name: np.broadcast_to(np.asarray(getattr(self, name), dtype=np.float64), rows)
            for name in ("threads", "smem_bytes", "registers")
        }


_COST_COLUMNS = tuple(
    field.name for field in dataclasses.fields(Costs) if field.name not in ("mma_dtype", "execution")
)
_EXECUTION_COLUMNS = tuple(field.name for field in dataclasses.fields(Execution))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Division of one dimension of a workload into equal tiles; the last may extend past the edge.

    Attributes:
        dimension: A dimension of the workload, or a product of some, such as ``"n*p*q"``.
        extent: Its extent.
        tile: Extent of a tile.
    """

    dimension: str
    extent: int
    tile: int

    @property
    def count(self) -> int:
        """Number of tiles along the dimension."""
        return int(ceil_div(self.extent, self.tile))

    @property
    def used(self) -> float:
        """Fraction of the tile work that is inside the workload."""
        return self.extent / (self.count * self.tile)


_RETURNS: dict[str, tuple[type, ...]] = {
    "arguments": (tuple,),
    "call": (Callable,),  # type: ignore[dict-item]
    "calls": (str,),
    "claims": (tuple,),
    "configs": (Table,),
    "constants": (Mapping,),
    "costs": (Costs,),
    "default": (Mapping,),
    "emulation_workload": (Workload,),
    "generated": (str,),
    "is_reproducible": (bool,),
    "kernel": (Callable,),  # type: ignore[dict-item]
    "launches": (tuple,),
    "limits": (str, type(None)),
    "package": (str,),
    "refuses": (str, type(None)),
    "revision": (str,),
    "scratch": (tuple,),
    "source": (str,),
    "target": (str,),
    "tensors": (dict,),
    "tiles": (tuple,),
    "trips": (tuple,),
}
"""Methods of a variant, and the types that each may return."""


def _guarded(method: Callable[..., Any], kinds: tuple[type, ...]) -> Callable[..., Any]:
    """Return a method of a variant whose exceptions and wrong results are a `VariantError`."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: Variant[Any], *arguments: Any, **named: Any) -> Any:
        try:
            with limited(f"{self.key}: {name}"):
                result = method(self, *arguments, **named)
        except TunebenchError:
            raise
        except (Exception, SystemExit) as error:
            raise VariantError(f"{self.key}: {name} raised {describe_error(error)}") from error
        if not isinstance(result, kinds):
            expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            raise VariantError(f"{self.key}: {name} must return {expected}, got {type(result).__name__}")
        if isinstance(result, Costs):
            _check_costs(self, result, named.get("table", arguments[1] if len(arguments) > 1 else ()))
        return result

    return call


def _check_costs(variant: Variant[Any], costs: Costs, table: Any) -> None:
    """Check that costs are numbers, or columns of the length of a table, and not negative.

    Raises:
        VariantError: if one is not; the message names it.
    """
    rows = len(table)
    values = {name: getattr(costs, name) for name in _COST_COLUMNS}
    if costs.execution is not None:
        values |= {f"execution.{name}": getattr(costs.execution, name) for name in _EXECUTION_COLUMNS}
    for name, value in values.items():
        if type(value) in (int, float) and value >= 0:
            continue
        try:
            column = np.asarray(value, dtype=np.float64)
            valid = column.shape in ((), (1,), (rows,)) and bool((column >= 0).all())
        except (TypeError, ValueError):
            valid = False
        if not valid:
            raise VariantError(
                f"{variant.key}: costs must return {name} as a number of 0 or more, or a column of {rows} of "
                f"them, got {str(value)[:80]!r}"
            )


class Variant(ABC, Generic[W]):
    """One implementation of an operator for a family of devices.

    Attributes:
        name: Unique among the variants of its operator.
        operator: The workload class it implements.
        language: Language of the kernel; set by the base class.
        space: Its parameters and constraints.
        direction: The only direction of its operator that it computes, or None if there is no such limit.
        is_predictable: Whether its costs predict its time. One that does not is used only where it, or a
            comparable workload, was measured.
        is_predicted_by_code: Whether the machine code of a configuration predicts its time better than costs
            that declare no execution.
    """

    name: ClassVar[str]
    operator: ClassVar[type[Workload]]
    language: ClassVar[Language]
    space: ClassVar[Space]
    direction: ClassVar[str | None] = None
    is_predictable: ClassVar[bool] = True
    is_predicted_by_code: ClassVar[bool] = False

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Wrap the methods of a subclass: check their results, and raise `VariantError` for any exception."""
        super().__init_subclass__(**arguments)
        for name, kinds in _RETURNS.items():
            method = vars(cls).get(name)
            if inspect.isfunction(method):
                setattr(cls, name, _guarded(method, kinds))

    @property
    def key(self) -> str:
        """`operator/name`, under which results are stored."""
        return f"{self.operator.operator}/{self.name}"

    @property
    def device_kind(self) -> Literal["cpu", "gpu"]:
        """Kind of the devices that it runs on."""
        return "cpu" if self.language in ("numba-cpu", "library-cpu") else "gpu"

    def __repr__(self) -> str:
        return f"<variant {self.key}>"

    def refuses(self, workload: W, device: Device) -> str | None:
        """Return why this variant cannot compute `workload` on `device`, or None if it can.

        Args:
            workload: Workload to compute.
            device: Device to run on.
        """
        if type(workload) is not self.operator:
            return f"{self.key} does not implement {workload.operator}"
        if device.kind != self.device_kind:
            return f"{self.key} does not run on a {device.kind}"
        if self.direction not in (None, getattr(workload, "direction", None)):
            return f"{self.key} supports direction={self.direction} only"
        return self.limits(workload, device)

    def limits(self, workload: W, device: Device) -> str | None:
        """Return a limit of this variant that `workload` or `device` exceeds, or None (override).

        Args:
            workload: Workload of this variant's operator.
            device: Device of a kind that this variant runs on.
        """
        return None

    @abstractmethod
    def default(self, workload: W, device: Device) -> Config:
        """Return the configuration that an expert would choose without tuning; it must be valid.

        Args:
            workload: Workload to compute.
            device: Device to run on.
        """

    @abstractmethod
    def costs(self, workload: W, table: Table, device: Device) -> Costs:
        """Return the minimum work of each configuration of a table, vectorised.

        Args:
            workload: Workload to compute.
            table: Configurations of this variant's space.
            device: Device to run on.
        """

    @abstractmethod
    def revision(self, workload: W, config: Config) -> str:
        """Return a hash of everything that determines the machine code and the launch, without comments.

        A stored result is valid until this hash changes.

        Args:
            workload: Workload to compute.
            config: Configuration of this variant's space.
        """

    def configs(self, workload: W, device: Device) -> Table:
        """Return every valid configuration for a workload on a device.

        Args:
            workload: Workload to compute.
            device: Device to run on.
        """
        with limited(f"{self.key}: a constraint of its space"):
            return self.space.enumerate(workload=workload, device=device)

    def is_reproducible(self, workload: W, config: Config) -> bool:
        """Return whether equal inputs give equal bits in every run on a device (override if not).

        Sums by atomic additions are rounded in the order in which threads arrive. Calls of torch are
        reproducible: they obey ``torch.use_deterministic_algorithms`` themselves.

        Args:
            workload: Workload to compute.
            config: Configuration of this variant's space.
        """
        return True

    def scratch(self, workload: W, config: Config) -> tuple[Tensor, ...]:
        """Return the tensors that the kernels need in addition to inputs and outputs (override).

        Args:
            workload: Workload to compute.
            config: Configuration of this variant's space.
        """
        return ()

    def tensors(self, workload: W, config: Config) -> dict[str, Tensor]:
        """Return all tensors of the kernels by name: inputs, outputs, scratch, in this order.

        Args:
            workload: Workload to compute.
            config: Configuration of this variant's space.
        """
        tensors = (*workload.inputs(), *workload.outputs(), *self.scratch(workload, config))
        return {tensor.name: tensor for tensor in tensors}

    def tiles(self, workload: W, config: Config) -> tuple[Tiling, ...]:
        """Return the tiling of each dimension that a configuration divides (override).

        Explanations use it to show the work lost at edges; without it they omit this.

        Args:
            workload: Workload to compute.
            config: Configuration of this variant's space.
        """
        return ()


class GpuVariant(Variant[W]):
    """A variant that is launched on a grid of blocks."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        accept_renamed_attribute(cls, "miniature", "emulation_workload")

    @abstractmethod
    def launches(self, workload: W, config: Config) -> tuple[Launch, ...]:
        """Return the kernel launches in execution order.

        Args:
            workload: Workload to compute.
            config: Configuration of this variant's space.
        """

    def emulation_workload(self, workload: W, config: Config) -> W:
        """Return a small workload that uses the same tile, stage and edge paths (override if large).

        Emulation runs it in place of `workload` if no GPU is available.

        Args:
            workload: Workload to compute.
            config: Configuration of this variant's space.
        """
        return workload


class CudaVariant(GpuVariant[W]):
    """A variant written in CUDA C++, compiled by NVRTC, emulated through g++.

    Attributes:
        minimum_cc: Lowest compute capability, such as ``(8, 0)``.
        maximum_cc: Highest compute capability, for instructions of a single architecture.
    """

    language = "cuda"
    minimum_cc: ClassVar[tuple[int, int]] = OLDEST_CC
    maximum_cc: ClassVar[tuple[int, int]] = (99, 9)

    @abstractmethod
    def source(self, workload: W, config: Config) -> str:
        """Return the translation unit, with headers of `tunebench.kernels` inlined and without any #include.

        Sizes that need not be compiled in are arguments instead, so that workloads share binaries.

        Args:
            workload: Workload to compute.
            config: Configuration of this variant's space.
        """

    def compiled(self, workload: W, config: Config) -> bytes | None:
        """Return compiled kernels in place of a source: a cubin, a fatbin or PTX; None to compile (override).

        Args:
            workload: Workload to compute.
            config: Configuration of this variant's space.
        """
        return None

    def flags(self, workload: W, config: Config) -> tuple[str, ...]:
        """Return options of NVRTC besides the architecture, such as ``--use_fast_math`` (override).

        Args:
            workload: Workload to compute.
            config: Configuration of this variant's space.
        """
        return ()

    def target(self, device: Device) -> str:
        """Return the architecture to compile for (override with `sm_90a` for Hopper-only instructions)."""
        return device.architecture

    def claims(self, workload: W, config: Config) -> tuple[str, ...]:
        """Return instructions that the machine code must contain, by SASS name (override).

        ``"HMMA"`` matches any modifiers; ``"UTMALDG.IM2COL"`` requires this modifier.

        A variant can lose the instructions it was written for without a wrong result: a product computed by
        other units, a copy through registers. The compile matrix checks disassembled binaries for these
        instructions.

        Args:
            workload: Workload to compute.
            config: Configuration of this variant's space.
        """
        return ()

    def refuses(self, workload: W, device: Device) -> str | None:
        """Return why this variant cannot compute `workload` on `device`, or None if it can."""
        reason = super().refuses(workload, device)
        if reason is None and not self.minimum_cc <= device.compute_capability <= self.maximum_cc:
            reason = f"{self.key} needs sm_{self.minimum_cc[0]}{self.minimum_cc[1]} or later of its family"
        return reason

    def revision(self, workload: W, config: Config) -> str:
        """Return a hash of the source without comments, of the launched entries and of the flags."""
        entries = [launch.entry for launch in self.launches(workload, config)]
        source = strip_comments(self.source(workload, config))
        return _digest(source, *entries, *self.flags(workload, config))


class NumbaVariant(Variant[W]):
    """A variant written in Python and compiled by Numba."""

    @abstractmethod
    def kernel(self, workload: W, config: Config) -> Callable[..., None]:
        """Return the plain Python kernel with `config` closed over as constants; import Numba inside.

        Args:
            workload: Workload to compute.
            config: Configuration of this variant's space.
        """

    def generated(self, workload: W, config: Config) -> str:
        """Return the Python source that the kernel is generated from, if it is not in its file (override).

        Args:
            workload: Workload to compute.
            config: Configuration of this variant's space.
        """
        return ""

    def revision(self, workload: W, config: Config) -> str:
        """Return a hash of the kernel file's syntax tree, its generated source and the configuration."""
        generated = self.generated(workload, config)
        return _digest(_syntax(type(self).__module__), *filter(None, (generated,)), str(config))


def unsuitable(workload: Workload, device: Device) -> str | None:
    """Return why no variant runs on a device, or None if some may.

    Args:
        workload: Workload to compute.
        device: A GPU or a CPU.
    """
    if device.kind == "cpu" or device.compute_capability >= OLDEST_CC:
        return None
    oldest = "an NVIDIA GPU of sm_{}{} or later".format(*OLDEST_CC)
    predict = command_line("predict", workload=workload, device=device.name)
    return (
        f"{device.name} ({device.architecture}) runs no variant, all need {oldest}; `{predict}` estimates "
        "its time with the libraries of its vendor"
    )


def exceeds_memory(workload: Workload, device: Device) -> str | None:
    """Return that the tensors of a workload do not fit into the memory of a device; None if they may.

    Args:
        workload: The workload.
        device: The device.
    """
    needed = sum(tensor.nbytes for tensor in (*workload.inputs(), *workload.outputs()))
    if not 0 < device.memory_bytes < needed:
        return None
    return (
        f"the tensors of {workload} take {needed / 2**30:.0f} GiB, and {device.name} has "
        f"{device.memory_bytes / 2**30:.0f} GiB"
    )


class NumbaCudaVariant(NumbaVariant[W], GpuVariant[W]):
    """A variant written for Numba-CUDA; its kernel takes arrays and int32 scalars."""

    language = "numba-cuda"

    def refuses(self, workload: W, device: Device) -> str | None:
        """Return why this variant cannot compute `workload` on `device`, or None if it can."""
        reason = super().refuses(workload, device)
        return reason or unsuitable(workload, device)


class TritonVariant(GpuVariant[W]):
    """A variant written in Triton; where there is no GPU, Triton's interpreter runs it.

    Parameters of its space are `tl.constexpr` arguments of the kernel, or options of Triton's compiler:
    `num_warps`, `num_stages`, `num_ctas` and `maxnreg` (0 limits no registers).
    """

    language = "triton"
    is_predicted_by_code = True

    @abstractmethod
    def source(self, workload: W, config: Config) -> str:
        """Return the text of a Python module that defines the kernel, and the functions that it calls.

        The kernel is a function at the top level of the module, decorated by `triton.jit`.

        Args:
            workload: Workload to compute.
            config: Configuration of this variant's space.
        """

    def constants(self, workload: W, config: Config) -> Mapping[str, Any]:
        """Return the values of `tl.constexpr` arguments: all parameters but options, unless overridden.

        Args:
            workload: Workload to compute.
            config: Configuration of this variant's space.
        """
        return {name: value for name, value in config.items() if name not in TRITON_OPTIONS}

    def options(self, config: Config) -> dict[str, int]:
        """Return the value of each option of Triton's compiler.

        Args:
            config: Configuration of this variant's space.
        """
        return {name: config.get(name, value) for name, value in TRITON_OPTIONS.items()}

    def trips(self, workload: W, config: Config) -> tuple[float, ...]:
        """Return how often the loops of the kernel run, for predicted times; empty if it is unknown.

        Args:
            workload: Workload to compute.
            config: Configuration of this variant's space.
        """
        return ()

    def launch(
        self, config: Config, *, entry: str, grid: tuple[int, int, int], arguments: tuple[Argument, ...]
    ) -> Launch:
        """Return a launch with the threads and the cluster that the options ask for.

        Args:
            config: Configuration of this variant's space.
            entry: Name of the kernel in its source.
            grid: Programs in x, y, z.
            arguments: Its arguments, in its order, without constants.
        """
        options = self.options(config)
        ctas = options["num_ctas"]
        return Launch(
            entry=entry,
            grid=(grid[0] * ctas, *grid[1:]),
            block=(32 * options["num_warps"], 1, 1),
            arguments=arguments,
            cluster=ctas,
        )

    def refuses(self, workload: W, device: Device) -> str | None:
        """Return why this variant cannot compute `workload` on `device`, or None if it can."""
        reason = super().refuses(workload, device) or unsuitable(workload, device)
        if reason is None and device.compute_capability < OLDEST_TRITON_CC:
            reason = "{} needs sm_{}{} or later: Triton compiles for no older GPU".format(
                self.key, *OLDEST_TRITON_CC
            )
        return reason

    def revision(self, workload: W, config: Config) -> str:
        """Return a hash of the source's syntax tree, the launches and the configuration."""
        source = dumped_tree(ast.parse(self.source(workload, config)))
        entries = [launch.entry for launch in self.launches(workload, config)]
        return _digest(source, *entries, str(config))


class NumbaCpuVariant(NumbaVariant[W]):
    """A variant written for Numba on the CPU.

    Its kernel takes `arguments`: tensors as C-contiguous arrays, scalars and tensors of shape `()` as
    numbers. It is compiled with `parallel=True`. f16 and bf16 arrays are passed as uint16 and e4m3 arrays as
    uint8, since Numba supports none of these types on a CPU; `tunebench.kernels.common.numba_cpu` converts
    them.

    Attributes:
        fastmath: LLVM fast-math flags allowed for the kernel (no `nnan` or `ninf` if it uses infinities).
    """

    language = "numba-cpu"
    fastmath: ClassVar[frozenset[str]] = frozenset({"reassoc", "contract", "arcp", "nsz"})

    def arguments(self, workload: W, config: Config) -> tuple[Argument, ...]:
        """Return the kernel's arguments: all inputs, outputs and scratch tensors, unless overridden.

        Args:
            workload: Workload to compute.
            config: Configuration of this variant's space.
        """
        return tuple(self.tensors(workload, config))


@dataclass(frozen=True, slots=True, kw_only=True)
class CppCall:
    """C++ that calls a library as a configuration does.

    Attributes:
        source: A source file that includes the library's headers and the standard library's only.
        build: Command that builds a shared object of `library_call.cpp`.
    """

    source: str
    build: str


class LibraryVariant(Variant[W]):
    """A variant that calls a library; nothing is compiled."""

    is_predictable = False

    @abstractmethod
    def package(self, config: Config) -> str:
        """Return the distribution of the library, whose version is part of the revision.

        Args:
            config: Configuration of this variant's space.
        """

    @abstractmethod
    def call(self, workload: W, config: Config, tensors: Mapping[str, Any]) -> Callable[[], object]:
        """Return a function that computes the outputs from the inputs, as often as it is called.

        Args:
            workload: Workload to compute.
            config: Configuration of this variant's space.
            tensors: Inputs and outputs by name, all arrays of NumPy or all tensors of torch, and on a GPU
                numbers for those without a shape; they are contiguous and have the workload's types. The
                function writes into the outputs; on a GPU it enqueues that work.

        Raises:
            InputError: The library does not compute the workload.
        """

    def results(self, workload: W, config: Config) -> Callable[[Mapping[str, Any]], Any] | None:
        """Return a function from inputs to outputs in new memory, which users of torch call without a copy.

        It takes all inputs by name, as contiguous tensors of torch with the workload's types, and returns
        tensors of torch that share no memory with them: one, or a tuple in the order of the outputs. Inputs
        may lack a first dimension of size 1; results may lack dimensions of size 1, and be strided. None, the
        default, if `call` alone runs the library.

        Args:
            workload: Workload to compute.
            config: Configuration of this variant's space.
        """
        return None

    def is_traceable(self, workload: W, config: Config) -> bool:
        """Return whether torch's compilers, if they trace `results`, call the same functions of the library.

        Compiled models then call the library without this package.

        Args:
            workload: Workload to compute.
            config: Configuration of this variant's space.
        """
        return False

    def cpp(self, workload: W, config: Config) -> CppCall | None:
        """Return C++ that makes the same call without Python, or None, the default, if there is none.

        Args:
            workload: Workload to compute.
            config: Configuration of this variant's space.
        """
        return None

    @abstractmethod
    def calls(self, config: Config) -> str:
        """Return the functions that a configuration calls, for its user.

        Args:
            config: Configuration of this variant's space.
        """

    def version(self, config: Config) -> str | None:
        """Return the installed version of the library; None if it is not installed.

        Args:
            config: Configuration of this variant's space.
        """
        return installed_version(self.package(config))

    def source(self, workload: W, config: Config) -> str:
        """Return source that determines what a configuration does; by default the module's syntax tree.

        Args:
            workload: Workload to compute.
            config: Configuration of this variant's space.
        """
        return _syntax(type(self).__module__)

    def revision(self, workload: W, config: Config) -> str:
        """Return a hash of the source, the configuration and the version of the library."""
        library = f"{self.package(config)} {self.version(config)}"
        return _digest(self.source(workload, config), str(config), library)


class LibraryCpuVariant(LibraryVariant[W]):
    """A variant that calls a library on the CPU."""

    language = "library-cpu"


class LibraryGpuVariant(LibraryVariant[W]):
    """A variant that calls a library on a GPU, where alone it can be verified and timed.

    The function of `call` enqueues its work on torch's current stream, and may be captured in a CUDA graph.
    """

    language = "library-gpu"

    def version(self, config: Config) -> str | None:
        """Return the versions of the library and of NVIDIA's libraries; None if it is not installed.

        Args:
            config: Configuration of this variant's space.
        """
        version = installed_version(self.package(config))
        below = ((package, installed_version(package)) for package in NVIDIA_LIBRARIES)
        parts = [f"{package} {number}" for package, number in below if number is not None]
        return version if version is None or not parts else f"{version} ({', '.join(parts)})"


@functools.cache
def installed_version(package: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def strip_comments(source: str) -> str:
    """Return C++ source without comments, blank lines and indentation; it must compile to the same code."""
    pattern = r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\')'
    text = re.sub(pattern, lambda match: match[1] or " ", source, flags=re.DOTALL)
    return "\n".join(" ".join(line.split()) for line in text.splitlines() if line.strip())


_INCLUDES = re.compile(
    r"^(?:(?:#|%:|\?\?=) ?(?:include|include_next|import|embed)\b|.*\b__has_(?:include|embed)\b).*",
    re.MULTILINE,
)


def including_line(source: str) -> str | None:
    """Return the first line of C++ source that reads another file; None if it is self-contained.

    Source must be: caches are keyed by its text, and compilers look for included files in the current folder.
    """
    line = _INCLUDES.search(strip_comments(source.replace("\\\n", "")))
    return None if line is None else line[0]


@functools.cache
def _syntax(module_name: str) -> str:
    """Return the syntax tree of a module and of the kernel modules it imports, without docstrings.

    Comments and layout are ignored, so that changes to them do not invalidate stored results.
    """
    tree = ast.parse(inspect.getsource(sys.modules[module_name]))
    helpers = []
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and len(body) > 1 and _is_docstring(body[0]):
            body.pop(0)
        if isinstance(node, ast.ImportFrom):
            helpers += [_syntax(module) for module in _kernel_modules(node)]
    return "\0".join([dumped_tree(tree), *helpers])


def dumped_tree(tree: ast.AST) -> str:
    """Return a syntax tree as Python 3.11 prints it, in later versions, too: results outlive an upgrade."""
    empty: dict[str, Any] = {"show_empty": True} if sys.version_info >= (3, 13) else {}
    return re.sub(r",? ?type_params=\[\]", "", ast.dump(tree, **empty))


def _kernel_modules(node: ast.ImportFrom) -> list[str]:
    """Return the modules of `tunebench.kernels` and `tunebench.libraries` that an import statement names."""
    package = node.module or ""
    if not package.startswith(("tunebench.kernels.", "tunebench.libraries")):
        return []
    names = [package, *(f"{package}.{alias.name}" for alias in node.names)]
    return [name for name in names if name in sys.modules and not hasattr(sys.modules[name], "__path__")]


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
