"""Variants that call a library of the processor: torch (oneDNN, MKL) or NumPy (its BLAS).

A variant has some programs, one of which is its configuration. Programs write into the caller's memory, as
kernels do: where a library returns new tensors, they are copied, and the copy counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from tunebench import libraries
from tunebench._lazy import np
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, LibraryCpuVariant, installed_version
from tunebench.workload import Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["NUMPY", "TORCH", "LibraryCpu", "LibraryProgram", "copied", "is_single", "torch_baseline"]

W = TypeVar("W", bound=Workload)


@dataclass(frozen=True, slots=True)
class LibraryProgram:
    """One way to compute an operator by a library.

    Attributes:
        package: Distribution of the library.
        call: From a workload and its tensors to the function that computes the outputs; None if the library
            does not compute the workload. The tensors are arrays for NumPy, else tensors of torch; numbers if
            they have no shape.
        calls: The functions of the library that it calls.
        supports: Whether it computes a workload, as far as that is known without the library.
    """

    package: Literal["torch", "numpy"]
    call: Callable[[Any, libraries.Tensors], Callable[[], object] | None]
    calls: str
    supports: Callable[[Any], bool] = lambda workload: True


class LibraryCpu(LibraryCpuVariant[W]):
    """Programs of libraries for one operator.

    Attributes:
        programs: The programs by name; the first that supports a workload is its default.
    """

    name = "library_cpu"
    programs: ClassVar[Mapping[str, LibraryProgram]]

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Make the space of a subclass from its programs."""
        super().__init_subclass__(**arguments)
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
            if installed_version(program.package) is not None and program.supports(workload)
        ]

    def limits(self, workload: W, device: Device) -> str | None:
        """Refuse a workload that no installed library computes as exactly as required."""
        if self.supported(workload):
            return None
        absent = sorted({p.package for p in self.programs.values() if p.supports(workload)})
        if absent:
            return f"{self.key} needs {' or '.join(absent)}, which is not installed"
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

    def call(self, workload: W, config: Config, tensors: Mapping[str, Any]) -> Callable[[], object]:
        """Return the program of a configuration as a function without arguments."""
        program = self.programs[config["program"]]
        to_library = _as_torch if program.package == "torch" else _as_numpy
        call = program.call(workload, {name: to_library(tensor) for name, tensor in tensors.items()})
        if call is None:
            raise InputError(f"{program.package} does not compute {workload}")
        return _without_gradients(call) if program.package == "torch" else call


def _as_torch(tensor: Any) -> Any:
    return libraries.torch_tensor(tensor) if isinstance(tensor, np.ndarray) else tensor


def _as_numpy(tensor: Any) -> Any:
    return tensor.numpy() if hasattr(tensor, "numpy") else tensor


def _without_gradients(call: Callable[[], object]) -> Callable[[], object]:
    import torch

    def run() -> object:
        with torch.inference_mode():
            return call()

    return run


def copied(
    workload: Workload, tensors: libraries.Tensors, call: Callable[[], Any] | None
) -> Callable[[], object] | None:
    """Return a function that copies the results of another one into the outputs; None if there is none.

    Args:
        workload: The workload.
        tensors: Its tensors by name, of torch or NumPy.
        call: Returns the outputs in order; they may lack dimensions of size 1.
    """
    if call is None:
        return None
    outputs = [tensors[tensor.name] for tensor in workload.outputs()]

    def run() -> None:
        results = call()
        for output, result in zip(
            outputs, results if isinstance(results, tuple) else (results,), strict=True
        ):
            if isinstance(output, np.ndarray):
                np.copyto(output, result.reshape(output.shape), casting="unsafe")
            else:
                output.copy_(result.reshape(output.shape))

    return run


def torch_baseline(
    workload: Workload, tensors: libraries.Tensors, name: str = "torch"
) -> Callable[[], object] | None:
    """Return a program of torch that is also a baseline; None if torch has none of this name.

    Args:
        workload: The workload.
        tensors: Its tensors of torch by name.
        name: Name of the baseline.
    """
    inputs = _inputs(workload, tensors)
    if name not in libraries.torch_calls(workload, inputs):
        return None
    # Programs may read values as they are made: they are made in each run.
    return copied(workload, tensors, lambda: libraries.torch_calls(workload, inputs)[name]())


def _numpy(workload: Workload, tensors: libraries.Tensors) -> Callable[[], object] | None:
    inputs = _inputs(workload, tensors)
    if libraries.numpy_call(workload, inputs) is None:
        return None

    def run() -> object:
        call = libraries.numpy_call(workload, inputs)
        assert call is not None, workload
        return call()

    return copied(workload, tensors, run)


def _inputs(workload: Workload, tensors: libraries.Tensors) -> dict[str, Any]:
    return {tensor.name: tensors[tensor.name] for tensor in workload.inputs()}


def is_single(workload: Workload) -> bool:
    """Return whether all numbers of a workload are f32.

    Programs of several steps round other types in each of them, more often than operators allow.
    """
    tensors = (*workload.inputs(), *workload.outputs())
    return all(tensor.dtype not in ("f16", "bf16", "e4m3", "i8") for tensor in tensors)


def _suits_numpy(workload: Any) -> bool:
    """Return whether NumPy computes a workload; its gelu is less accurate than required."""
    inexact = getattr(workload, "activation", "") == "gelu" or getattr(workload, "has_pre", False)
    return is_single(workload) and not inexact


TORCH = LibraryProgram("torch", torch_baseline, "functions of torch, one after the other", is_single)
"""The program that is also the baseline, in f32."""

NUMPY = LibraryProgram("numpy", _numpy, "functions of numpy, one after the other", _suits_numpy)
"""The program that is also the baseline, in f32."""
