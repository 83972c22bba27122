"""Variants that call a library: what those of processors and those of GPUs share.

A variant has some programs, one of which is its configuration. A program returns new tensors, which users
of torch receive without a copy. For callers that pass memory, as to kernels, it writes into that memory:
directly where the library can, else by a copy, which counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from tunebench import libraries
from tunebench._lazy import np
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.kernels.common.program_source import method, program, source_of
from tunebench.libraries import Tensors
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, LibraryVariant, installed_version
from tunebench.workload import Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "TORCH",
    "Compute",
    "LibraryProgram",
    "LibraryPrograms",
    "Write",
    "as_array",
    "bound_baseline",
    "copied",
    "is_single",
    "torch_baseline",
]

W = TypeVar("W", bound=Workload)

Compute = Callable[[Tensors], Any]
"""From inputs by name to the outputs: a new tensor, or a tuple of them in the order of `Workload.outputs`.

The tensors are arrays for NumPy, else tensors of torch; numbers if they have no shape. Outputs may lack
dimensions of size 1.
"""

Write = Callable[..., object]
"""From inputs by name, and then the outputs in order, which it overwrites."""


@dataclass(frozen=True, slots=True)
class LibraryProgram:
    """One way to compute an operator by a library.

    Attributes:
        package: Distribution of the library.
        compute: Returns from a workload the function that computes its outputs, in every call from values
            that it reads then.
        calls: The functions of the library that it calls.
        supports: Whether it computes a workload, as far as that is known without the library.
        write: The same for a function that writes into the outputs; by default results are copied.
        bind: Returns from a workload, inputs and outputs the function that writes into these outputs, in
            every call from values that these inputs have then. What can be prepared for them is prepared
            once. Inputs are f32.
        accepts_matrices: Whether inputs may lack a first dimension of size 1.
        is_traceable: Whether torch's compilers, if they trace the function, call the same functions of the
            library.
    """

    package: Literal["torch", "numpy"]
    compute: Callable[[Any], Compute]
    calls: str
    supports: Callable[[Any], bool] = lambda workload: True
    write: Callable[[Any], Write] | None = None
    bind: Callable[..., Callable[[], object]] | None = None
    accepts_matrices: bool = False
    is_traceable: bool = False


class LibraryPrograms(LibraryVariant[W]):
    """Programs of libraries for one operator.

    Attributes:
        programs: The programs by name; the first that supports a workload is its default.
    """

    programs: ClassVar[Mapping[str, LibraryProgram]]

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Make the space of a subclass from its programs."""
        super().__init_subclass__(**arguments)
        if not hasattr(cls, "programs"):  # a base class
            return
        about = "; ".join(f"{name}: {program.calls}" for name, program in cls.programs.items())
        parameter = Parameter("program", tuple(cls.programs), about)

        def is_supported(program: NDArray[np.str_], workload: W) -> NDArray[np.bool_]:
            return np.isin(program, cls.supported(workload))

        cls.space = Space((parameter,), (is_supported,))

    @classmethod
    def supported(cls, workload: W) -> list[str]:
        """Return the programs that compute a workload and whose library is installed."""
        return [
            name
            for name, program in cls.programs.items()
            if cls.absence(program) is None and program.supports(workload)
        ]

    @classmethod
    def absence(cls, program: LibraryProgram) -> str | None:
        """Return why the library of a program cannot be called on this machine, or None if it can."""
        return None if installed_version(program.package) is not None else "is not installed"

    def limits(self, workload: W, device: Device) -> str | None:
        """Refuse a workload that no installed library computes as exactly as required."""
        if self.supported(workload):
            return None
        suitable = [program for program in self.programs.values() if program.supports(workload)]
        if suitable:
            absent = " or ".join(sorted({program.package for program in suitable}))
            return f"{self.key} needs {absent}, which {self.absence(suitable[0])}"
        return f"{self.key} has no program that computes such a workload as exactly as required"

    def default(self, workload: W, device: Device) -> Config:
        """Return the first program that supports the workload."""
        return Config({"program": self.supported(workload)[0]})

    def costs(self, workload: W, table: Table, device: Device) -> Costs:
        """Count what any algorithm and any instruction needs."""
        return Costs(blocks=1, full_blocks=0, threads=1, fma=self.least_fma(workload))

    def least_fma(self, workload: W) -> float:
        """Return the f32 multiply-adds that no algorithm of a library saves (override)."""
        return 0.0

    def package(self, config: Config) -> str:
        """Return the distribution of the program."""
        return self.programs[config["program"]].package

    def calls(self, config: Config) -> str:
        """Return the functions that the program calls."""
        return self.programs[config["program"]].calls

    def source(self, workload: W, config: Config) -> str:
        """Return the syntax of what the program uses, and of the way in which it is called."""
        cls = next(cls for cls in type(self).__mro__ if "programs" in vars(cls))
        stated = program(cls.__module__, cls.__name__, config["program"])
        calling = method(__name__, "LibraryPrograms", "call")
        return source_of(self.operator.operator, (cls.__module__, stated), (__name__, calling))

    def call(self, workload: W, config: Config, tensors: Mapping[str, Any]) -> Callable[[], object]:
        """Return the program of a configuration as a function without arguments."""
        program = self.programs[config["program"]]
        to_library = _as_torch if program.package == "torch" else as_array
        inputs = {tensor.name: to_library(tensors[tensor.name]) for tensor in workload.inputs()}
        outputs = [to_library(tensors[tensor.name]) for tensor in workload.outputs()]
        if program.bind is not None and all(tensor.dtype == "f32" for tensor in workload.inputs()):
            run = program.bind(workload, inputs, *outputs)
        elif program.write is not None:
            run = functools.partial(program.write(workload), inputs, *outputs)
        else:
            run = copied(functools.partial(program.compute(workload), inputs), *outputs)
        return _without_gradients(run) if program.package == "torch" else run

    def results(self, workload: W, config: Config) -> Compute:
        """Return the program of a configuration as a function from tensors of torch to new ones."""
        program = self.programs[config["program"]]
        compute = program.compute(workload)
        if program.package != "torch":
            compute = _on_tensors(compute)
        return compute if program.accepts_matrices else _on_shaped(workload, compute)

    def is_traceable(self, workload: W, config: Config) -> bool:
        """Return whether compilers keep the functions of the program."""
        return self.programs[config["program"]].is_traceable


def _as_torch(tensor: Any) -> Any:
    return libraries.torch_tensor(tensor) if isinstance(tensor, np.ndarray) else tensor


def as_array(tensor: Any) -> Any:
    """Return a tensor of the host as an array of NumPy on its memory."""
    return tensor.numpy() if hasattr(tensor, "numpy") else tensor


def _on_shaped(workload: Workload, compute: Compute) -> Compute:
    """Return a program as a function of inputs that may lack a first dimension of size 1."""
    shapes = {tensor.name: tensor.shape for tensor in workload.inputs() if tensor.shape}

    def run(tensors: Tensors) -> Any:
        return compute(
            {
                name: tensor.reshape(shapes[name])
                if name in shapes and tensor.shape != shapes[name]
                else tensor
                for name, tensor in tensors.items()
            }
        )

    return run


def _on_tensors(compute: Compute) -> Compute:
    """Return a program of NumPy as a function of tensors; its results are tensors on the arrays' memory."""

    def run(tensors: Tensors) -> tuple[Any, ...]:
        results = compute({name: as_array(tensor) for name, tensor in tensors.items()})
        return tuple(libraries.torch_tensor(array) for array in _listed(results))

    return run


def _without_gradients(call: Callable[[], object]) -> Callable[[], object]:
    import torch

    def run() -> object:
        with torch.inference_mode():
            return call()

    return run


def _listed(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def copied(compute: Callable[[], Any], *outputs: Any) -> Callable[[], object]:
    """Return a function that copies the results of a program into outputs.

    Args:
        compute: The program.
        outputs: Arrays or tensors for its results, in order.
    """

    def run() -> None:
        for output, result in zip(outputs, _listed(compute()), strict=True):
            if isinstance(output, np.ndarray):
                np.copyto(output, result.reshape(output.shape), casting="unsafe")
            else:
                output.copy_(result.reshape(output.shape))

    return run


def torch_baseline(workload: Workload, name: str = "torch") -> Compute:
    """Return a program of torch that is also a baseline.

    Args:
        workload: The workload.
        name: Name of the baseline.
    """
    # Programs may read integers as they are made: they are made in each run.
    return lambda inputs: _torch_call(workload, inputs, name)()


def bound_baseline(
    workload: Workload, inputs: Tensors, *outputs: Any, name: str = "torch"
) -> Callable[[], object]:
    """Return a program of torch that is also a baseline for inputs and outputs, into which it is copied.

    Args:
        workload: The workload.
        inputs: f32 inputs by name.
        outputs: The outputs, in order.
        name: Name of the baseline.
    """
    return copied(_torch_call(workload, inputs, name), *outputs)


def _torch_call(workload: Workload, inputs: Tensors, name: str) -> libraries.LibraryCall:
    call = libraries.torch_calls(workload, inputs).get(name)
    if call is None:
        raise InputError(f"torch does not compute {workload}")
    return call


def is_single(workload: Workload) -> bool:
    """Return whether all numbers of a workload are f32.

    Programs of several steps round other types in each of them, more often than operators allow.
    """
    tensors = (*workload.inputs(), *workload.outputs())
    return all(tensor.dtype not in ("f16", "bf16", "e4m3", "i8") for tensor in tensors)


TORCH = LibraryProgram(
    "torch", torch_baseline, "functions of torch, one after the other", is_single, bind=bound_baseline
)
"""The program that is also the baseline, in f32."""
