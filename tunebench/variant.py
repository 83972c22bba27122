"""How an operator may be done: one implementation, its space, its costs, its source and its launch.

A variant is one file that defines one subclass and one instance of it, named `VARIANT`. Which class it
derives from says how it is compiled: `CudaVariant` (CUDA C++ through NVRTC), `NumbaCudaVariant` or
`NumbaCpuVariant`. Importing a variant needs neither CUDA nor Numba.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from tunebench._deprecation import accept_renamed_attribute
from tunebench._lazy import np
from tunebench.device import Device
from tunebench.space import Config, Space, Table
from tunebench.tensor_map import TENSOR_MAP_TYPES, PixelBox, TensorMap
from tunebench.workload import Tensor, Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column = NDArray[np.float64] | NDArray[np.int64] | float

__all__ = [
    "TENSOR_MAP_TYPES",
    "Argument",
    "Costs",
    "CudaVariant",
    "Language",
    "Launch",
    "NumbaCpuVariant",
    "NumbaCudaVariant",
    "NumbaVariant",
    "PixelBox",
    "Scalar",
    "TensorMap",
    "Tiling",
    "Variant",
    "ceil_div",
]

W = TypeVar("W", bound=Workload)
Language = Literal["cuda", "numba-cuda", "numba-cpu"]


def ceil_div(a: Any, b: Any) -> Any:
    """Return `a / b` rounded up, for integers or columns of them."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number passed by value; `ctype` is its C type."""

    ctype: Literal["int", "long long", "float"]
    value: int | float


Argument = str | Scalar
"""A kernel argument: the name of a tensor (of shape `()`: its value), or a `Scalar`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel launch.

    Attributes:
        entry: The kernel: a C++ name expression such as ``gemm<64, 64, 8>``; unused by Numba.
        grid: Blocks in x, y, z.
        block: Threads of a block in x, y, z.
        arguments: In the order of the kernel's parameters; tensor maps in CUDA C++ alone.
        smem_bytes: Dynamic shared memory a block.
        cluster: Neighbouring blocks along x that run together and see each other's shared memory.
        blocks_per_sm: For kernels whose blocks stay and take one tile after the other: the most blocks that
            are of use on each SM. The grid is then what there is work for, and a launch has no more blocks
            than the device holds. 0 launches all of the grid.
    """

    entry: str = ""
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[Argument | TensorMap, ...]
    smem_bytes: int = 0
    cluster: int = 1
    blocks_per_sm: int = 0

    def grid_on(self, sm_count: int) -> tuple[int, int, int]:
        """Return the blocks in x, y, z to launch on a device of that many SMs: whole clusters."""
        if not self.blocks_per_sm:
            return self.grid
        most = max(self.cluster, self.blocks_per_sm * sm_count // self.cluster * self.cluster)
        return (min(self.grid[0], most), *self.grid[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a configuration must really execute; columns, or one number where all rows agree.

    Every figure is a floor: it may be lower than the truth and never higher, or bounds made from it are
    unsound. Per-block figures are of the cheapest block that has the full tile.

    Attributes:
        blocks: Blocks launched; edge blocks that skip work count by their area (a half-empty one is 0.5).
        full_blocks: Blocks that do the work of a full tile.
        threads: Threads a block.
        smem_bytes: Static plus dynamic shared memory a block.
        registers: Registers a thread, before the compiler has told.
        fma: Multiply-adds, or other full-rate f32 instructions, per thread lane, a block.
        mma_flop: Tensor-core FLOPs a block.
        mma_dtype: Input type of those.
        sfu: Special-function results (exp, rsqrt, …) a block; 0 if the compiler may use polynomials instead.
        smem_traffic_bytes: Distinct bytes per warp access through shared memory, a block; an access is at
            least one pass of 128 bytes.
        fill_bytes: Bytes a block must bring into its SM from L2 or beyond. Bytes that another block of the
            same SM may have left in L1 do not count: copies past L1 (`cp.async.cg`, TMA) do.
        accesses: Loads and stores of shared memory or through L1, each counted once for every lane that takes
            part and however wide it is, a block; bulk copies and ldmatrix are none.
        instructions: Warp instructions a block must issue, of every kind together; 0 leaves it to what
            `fma`, `sfu` and `smem_traffic_bytes` imply.
        chain_clocks: Clocks that one full block takes from its first instruction to its last however fast
            everything else is: its longest chain of instructions that each need the one before, every one
            at the device's least latency; 0 if unknown.
        serial_launches: Kernels that run one after the other.
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

    def figures(self, rows: int) -> dict[str, NDArray[np.float64]]:
        """Return what tells configurations apart besides their parameters: one column each, of `rows`."""
        return {
            name: np.broadcast_to(np.asarray(getattr(self, name), dtype=np.float64), rows)
            for name in ("threads", "smem_bytes", "registers")
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How one dimension of a problem is cut into equal tiles, of which the last may stick out.

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
        """Tiles along the dimension."""
        return int(ceil_div(self.extent, self.tile))

    @property
    def used(self) -> float:
        """The share of all tiles that lies inside the problem."""
        return self.extent / (self.count * self.tile)


class Variant(ABC, Generic[W]):
    """One implementation of an operator for a family of devices.

    Attributes:
        name: Unique among the variants of its operator.
        operator: The workload class it implements.
        language: How it is written; set by the base class it derives from.
        space: Its parameters and constraints.
    """

    name: ClassVar[str]
    operator: ClassVar[type[Workload]]
    language: ClassVar[Language]
    space: ClassVar[Space]

    @property
    def key(self) -> str:
        """`operator/name`, under which its results are stored."""
        return f"{self.operator.operator}/{self.name}"

    def __repr__(self) -> str:
        return f"<variant {self.key}>"

    def refuses(self, workload: W, device: Device) -> str | None:
        """Return why this variant cannot do `workload` on `device`, or None if it can."""
        if type(workload) is not self.operator:
            return f"{self.key} does not implement {workload.operator}"
        if device.kind != ("cpu" if self.language == "numba-cpu" else "gpu"):
            return f"{self.key} does not run on a {device.kind}"
        return self.limits(workload, device)

    def limits(self, workload: W, device: Device) -> str | None:
        """Return a limit of this variant that `workload` or `device` breaks, or None (override)."""
        return None

    @abstractmethod
    def default(self, workload: W, device: Device) -> Config:
        """Return the configuration an expert would ship untuned; it must be valid."""

    @abstractmethod
    def costs(self, workload: W, table: Table, device: Device) -> Costs:
        """Return what each configuration of `table` must really execute (a floor, vectorised)."""

    @abstractmethod
    def revision(self, workload: W, config: Config) -> str:
        """Return a hash of what decides the machine code and the launch, comments left out.

        A stored result stands for as long as this does not change.
        """

    def configs(self, workload: W, device: Device) -> Table:
        """Return every valid configuration for `workload` on `device`."""
        return self.space.enumerate(workload=workload, device=device)

    def scratch(self, workload: W, config: Config) -> tuple[Tensor, ...]:
        """Return tensors the kernels need besides inputs and outputs (override)."""
        return ()

    def tiles(self, workload: W, config: Config) -> tuple[Tiling, ...]:
        """Return how a configuration cuts the problem, one dimension after the other (override).

        It is for explaining what is lost at edges. Saying nothing costs no more than that.
        """
        return ()


class GpuVariant(Variant[W]):
    """A variant that is launched on a grid of blocks."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        accept_renamed_attribute(cls, "miniature", "emulation_workload")

    @abstractmethod
    def launches(self, workload: W, config: Config) -> tuple[Launch, ...]:
        """Return the kernel launches that do the work, in order."""

    def emulation_workload(self, workload: W, config: Config) -> W:
        """Return a small workload that takes the same tile, stage and edge paths (override if large).

        Emulation runs it in place of `workload` where no GPU is at hand.
        """
        return workload


class CudaVariant(GpuVariant[W]):
    """A variant written in CUDA C++, compiled by NVRTC, emulated through g++.

    Attributes:
        minimum_cc: Lowest compute capability, such as ``(8, 0)``.
        maximum_cc: Highest, for instructions that only one architecture has.
    """

    language = "cuda"
    minimum_cc: ClassVar[tuple[int, int]] = (7, 5)
    maximum_cc: ClassVar[tuple[int, int]] = (99, 9)

    @abstractmethod
    def source(self, workload: W, config: Config) -> str:
        """Return the translation unit, helpers of `tunebench.kernels` included, with no #include left.

        Sizes that need not be compiled in are arguments instead, so that workloads share binaries.
        """

    def target(self, device: Device) -> str:
        """Return the architecture to compile for (override with `sm_90a` for Hopper-only instructions)."""
        return device.architecture

    def claims(self, workload: W, config: Config) -> tuple[str, ...]:
        """Return instructions that its machine code must have, as SASS names them (override).

        ``"HMMA"`` is one with any modifiers, ``"UTMALDG.IM2COL"`` one that has this among them.

        What a variant is for is easily lost without a wrong result: a product done by other units, a copy
        by way of registers. The compile matrix holds disassembled binaries to this.
        """
        return ()

    def refuses(self, workload: W, device: Device) -> str | None:
        """Return why this variant cannot do `workload` on `device`, or None if it can."""
        reason = super().refuses(workload, device)
        if reason is None and not self.minimum_cc <= device.compute_capability <= self.maximum_cc:
            reason = f"{self.key} needs sm_{self.minimum_cc[0]}{self.minimum_cc[1]} or later of its family"
        return reason

    def revision(self, workload: W, config: Config) -> str:
        """Hash the source without comments, and the entries it is called by."""
        entries = [launch.entry for launch in self.launches(workload, config)]
        return _digest(strip_comments(self.source(workload, config)), *entries)


class NumbaVariant(Variant[W]):
    """A variant written in Python and compiled by Numba."""

    @abstractmethod
    def kernel(self, workload: W, config: Config) -> Callable[..., None]:
        """Return the plain Python kernel, `config` closed over as constants; import Numba inside."""

    def generated(self, workload: W, config: Config) -> str:
        """Return the Python text that the kernel is compiled from, where it is not in its file (override)."""
        return ""

    def revision(self, workload: W, config: Config) -> str:
        """Hash the syntax tree of the file that defines the kernel, what it generates, the configuration."""
        generated = self.generated(workload, config)
        return _digest(_syntax(type(self).__module__), *filter(None, (generated,)), str(config))


class NumbaCudaVariant(NumbaVariant[W], GpuVariant[W]):
    """A variant written for Numba-CUDA; its kernel takes arrays and int32 scalars."""

    language = "numba-cuda"

    def refuses(self, workload: W, device: Device) -> str | None:
        """Return why this variant cannot do `workload` on `device`, or None if it can."""
        reason = super().refuses(workload, device)
        if reason is None and device.compute_capability == (0, 0):
            reason = f"{self.key} needs a GPU of NVIDIA, not {device.architecture}"
        return reason


class NumbaCpuVariant(NumbaVariant[W]):
    """A variant written for Numba on the CPU.

    Its kernel takes `arguments`: tensors as C-contiguous arrays, scalars and tensors of shape `()` as
    numbers. It is compiled with `parallel=True`. f16 and bf16 arrays arrive as uint16, since Numba knows
    neither on a CPU; `tunebench.kernels.common.numba_cpu` converts.

    Attributes:
        fastmath: LLVM fast-math flags the kernel may have (no `nnan` or `ninf` where it uses infinities).
    """

    language = "numba-cpu"
    fastmath: ClassVar[frozenset[str]] = frozenset({"reassoc", "contract", "arcp", "nsz"})

    def arguments(self, workload: W, config: Config) -> tuple[Argument, ...]:
        """Return what the kernel takes: all inputs, outputs and scratch, unless overridden."""
        tensors = (*workload.inputs(), *workload.outputs(), *self.scratch(workload, config))
        return tuple(tensor.name for tensor in tensors)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def strip_comments(source: str) -> str:
    """Return C++ source without comments, blank lines and indentation (it must compile the same)."""
    pattern = r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\')'
    text = re.sub(pattern, lambda match: match[1] or " ", source, flags=re.DOTALL)
    return "\n".join(" ".join(line.split()) for line in text.splitlines() if line.strip())


@functools.cache
def _syntax(module_name: str) -> str:
    """Return the syntax tree of a module and of the kernel helpers it imports, without docstrings.

    Comments and layout do not count, so that they void no stored result.
    """
    tree = ast.parse(inspect.getsource(sys.modules[module_name]))
    helpers = []
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and len(body) > 1 and _is_docstring(body[0]):
            body.pop(0)
        if isinstance(node, ast.ImportFrom):
            helpers += [_syntax(module) for module in _kernel_modules(node)]
    return "\0".join([ast.dump(tree), *helpers])


def _kernel_modules(node: ast.ImportFrom) -> list[str]:
    """Return the modules of `tunebench.kernels` that an import statement names."""
    package = node.module or ""
    if not package.startswith("tunebench.kernels."):
        return []
    names = [package, *(f"{package}.{alias.name}" for alias in node.names)]
    return [name for name in names if name in sys.modules and not hasattr(sys.modules[name], "__path__")]


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
