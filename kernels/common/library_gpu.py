"""Variants that call a library of a GPU.

`LibraryGpu` calls cuBLAS, cuDNN and torch's own kernels by torch, which chooses their algorithms.
`LibraryPlans` calls one library by NVIDIA's binding, which lists the algorithms.
"""

from __future__ import annotations

import functools
import inspect
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol, TypeVar

from tunebench.device import Device
from tunebench.kernels.common.library import (
    Compute,
    LibraryProgram,
    LibraryPrograms,
    bound_baseline,
    torch_baseline,
)
from tunebench.kernels.common.program_source import method, source_of
from tunebench.libraries import Tensors, torch_type
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, LibraryGpuVariant, installed_version
from tunebench.workload import Workload

__all__ = ["TORCH", "LibraryGpu", "LibraryPlan", "LibraryPlans", "benchmarked"]

W = TypeVar("W", bound=Workload)

TORCH = LibraryProgram(
    "torch", torch_baseline, "functions of torch, one after the other", bind=bound_baseline
)
"""The program that is also the baseline. Verification refuses it where it rounds too often."""


class LibraryGpu(LibraryPrograms[W], LibraryGpuVariant[W]):
    """Programs of libraries of the GPU for one operator.

    Attributes:
        multiplies: Whether programs multiply matrices, for which torch has settings of precision.
    """

    name = "library_gpu"
    multiplies: ClassVar[bool] = False

    @classmethod
    def absence(cls, program: LibraryProgram) -> str | None:
        """Return why torch cannot run on a GPU of this machine, or None if it may."""
        return _absence(program.package)

    def call(self, workload: W, config: Config, tensors: Mapping[str, Any]) -> Callable[[], object]:
        """Return the program of a configuration as a function without arguments."""
        return self._precise(workload, super().call(workload, config, tensors))

    def results(self, workload: W, config: Config) -> Compute:
        """Return the program of a configuration as a function from tensors of torch to new ones."""
        return self._precise(workload, super().results(workload, config))

    def is_traceable(self, workload: W, config: Config) -> bool:
        """Return whether compilers keep the functions of the program, which need no setting of torch."""
        return super().is_traceable(workload, config) and not self._depends_on_precision(workload)

    def source(self, workload: W, config: Config) -> str:
        """Return the syntax of what the program uses, with that of torch's settings where it needs them."""
        source = super().source(workload, config)
        if not self._depends_on_precision(workload):
            return source
        precise = method(__name__, "LibraryGpu", "_precise")
        return f"{source}\0{source_of(self.operator.operator, (__name__, precise))}"

    def _depends_on_precision(self, workload: W) -> bool:
        return self.multiplies and getattr(workload, "dtype", None) in ("f32", "tf32")

    def _precise(self, workload: W, call: Callable[..., Any]) -> Callable[..., Any]:
        if not self._depends_on_precision(workload):
            return call
        return _with_tf32(call, allowed=getattr(workload, "dtype", None) == "tf32")


class LibraryPlans(LibraryGpuVariant[W]):
    """The plans that a library offers for one operator, in the order in which the library ranks them.

    A binding of NVIDIA calls the library on tensors of torch. How many plans there are, and which, depends on
    the device: a rank that the library does not have fails as a configuration.

    Attributes:
        binding: Distribution of the binding.
        libraries: Distributions of the library, of which one must be installed: records contain its version.
        ranks: Number of ranks to try.
    """

    binding: ClassVar[str]
    libraries: ClassVar[tuple[str, ...]]
    ranks: ClassVar[int]

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Make the space of a subclass from its number of ranks."""
        super().__init_subclass__(**arguments)
        if hasattr(cls, "ranks"):
            rank = Parameter("rank", tuple(range(cls.ranks)), "position in the library's list")
            cls.space = Space((rank,))

    def limits(self, workload: W, device: Device) -> str | None:
        """Refuse a workload that the library does not compute, and a machine without it."""
        if not self.supports(workload):
            return f"{self.key} has no plans for such a workload"
        for package in ("torch", self.binding):
            reason = _absence(package)
            if reason is not None:
                return f"{self.key} needs {package}, which {reason}"
        if all(installed_version(library) is None for library in self.libraries):
            return f"{self.key} needs {' or '.join(self.libraries)}, whose version is part of its records"
        return None

    @abstractmethod
    def supports(self, workload: W) -> bool:
        """Return whether the library computes a workload as exactly as required.

        Args:
            workload: The workload.
        """

    @abstractmethod
    def plan(self, workload: W, rank: int, tensors: Tensors) -> LibraryPlan:
        """Return a plan of the library for tensors of torch, and those of their shape and alignment.

        Args:
            workload: The workload.
            rank: Position of the plan in the library's list.
            tensors: Inputs and outputs by name, contiguous, on one GPU.

        Raises:
            InputError: The library has fewer plans.
        """

    def default(self, workload: W, device: Device) -> Config:
        """Return the library's first plan."""
        return Config({"rank": 0})

    def costs(self, workload: W, table: Table, device: Device) -> Costs:
        """Count what any algorithm and any instruction needs."""
        return Costs(blocks=1, full_blocks=0, threads=1)

    def source(self, workload: W, config: Config) -> str:
        """Return the syntax of what makes a plan, and of the way in which it is called."""
        cls, operator = type(self), self.operator.operator
        planning = method(cls.__module__, cls.__name__, "plan")
        calling = method(__name__, "LibraryPlans", "call")
        return source_of(operator, (cls.__module__, planning), (__name__, calling))

    def package(self, config: Config) -> str:
        """Return the distribution of the binding."""
        return self.binding

    def call(self, workload: W, config: Config, tensors: Tensors) -> Callable[[], object]:
        """Return a plan as a function without arguments; it is made now, since graphs cannot capture that."""
        return functools.partial(self.plan(workload, config["rank"], tensors), tensors)

    def results(self, workload: W, config: Config) -> Compute:
        """Return a plan as a function from tensors of torch to new ones."""
        return _planned(self, workload, config["rank"])


class LibraryPlan(Protocol):
    """A plan of a library. It is not safe to call one from several threads."""

    def __call__(self, tensors: Tensors) -> object:
        """Enqueue the call on torch's current stream.

        Args:
            tensors: Inputs and outputs by name, shaped and aligned as those it was made for.
        """


def _planned(library: LibraryPlans[W], workload: W, rank: int) -> Compute:
    """Return a function that makes a plan for each thread, device and alignment, and calls it."""
    import torch

    shapes = {tensor.name: tensor.shape for tensor in workload.inputs()}
    outputs = workload.outputs()
    of_thread = threading.local()

    def run(inputs: Tensors) -> Any:
        tensors = {name: _shaped(tensor, shapes[name]) for name, tensor in inputs.items()}
        device = tensors[next(iter(shapes))].device
        tensors |= {
            output.name: torch.empty(output.shape, dtype=torch_type(output.dtype), device=device)
            for output in outputs
        }
        alignments = tuple(_alignment(tensor.data_ptr()) for tensor in tensors.values())
        plans: dict[Any, LibraryPlan] = vars(of_thread)
        key = f"{device} {alignments}"
        if key not in plans:
            plans[key] = library.plan(workload, rank, tensors)
        plans[key](tensors)
        results = tuple(tensors[output.name] for output in outputs)
        return results if len(results) > 1 else results[0]

    return run


def _shaped(tensor: Any, shape: tuple[int, ...]) -> Any:
    return tensor if tensor.shape == shape else tensor.reshape(shape)


_ALIGNMENT = 256
"""Bytes beyond which no library distinguishes alignments."""


def _alignment(address: int) -> int:
    return min(_ALIGNMENT, address & -address) or _ALIGNMENT


def _absence(package: str) -> str | None:
    """Return why a package of the GPU cannot be called on this machine, or None if it may."""
    version = installed_version(package)
    if version is None:
        return "is not installed"
    without_cuda = package == "torch" and version.partition("+")[2].startswith("cpu")
    return f"is installed without CUDA ({version})" if without_cuda else None


def _with_tf32(call: Callable[..., Any], *, allowed: bool) -> Callable[..., Any]:
    """Return a function that runs with tf32 allowed or not, whatever the setting of the process is."""
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn

    @functools.wraps(call)
    def run(*arguments: Any) -> Any:
        if matmul.allow_tf32 is allowed and cudnn.allow_tf32 is allowed:
            return call(*arguments)
        before = torch.get_float32_matmul_precision()
        with _cudnn_settings(allow_tf32=allowed):
            try:
                torch.set_float32_matmul_precision("high" if allowed else "highest")
                return call(*arguments)
            finally:
                torch.set_float32_matmul_precision(before)

    return run


def benchmarked(compute: Compute) -> Compute:
    """Return a program for which cuDNN times its algorithms at the first call of each size.

    Args:
        compute: The program.
    """

    def run(tensors: Mapping[str, Any]) -> Any:
        import torch

        if torch.backends.cudnn.benchmark:
            return compute(tensors)
        with _cudnn_settings(benchmark=True):
            return compute(tensors)

    return run


def _cudnn_settings(**changed: bool) -> AbstractContextManager[None]:
    """Change settings of cuDNN for a block, also after `torch.backends.disable_global_flags`."""
    import torch

    cudnn = torch.backends.cudnn
    present = {name: getattr(cudnn, name) for name in inspect.signature(cudnn.flags).parameters}
    flags: Callable[..., AbstractContextManager[None]] = cudnn.flags
    return flags(**present | changed)
