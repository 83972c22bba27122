"""Extraction of a model's steps as graphs, and of the workloads of their groups as a suite."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebench.device import Device
from tunebench.errors import InputError, MissingDependency
from tunebench.graph.node import Graph
from tunebench.graph.partition_plan import PartitionPlan
from tunebench.workloads import parse

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["InputSpec", "extract", "extract_onnx", "load_factory", "make_model", "suite_of"]

DTYPES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f64": "float64",
    "i64": "int64",
    "i32": "int32",
    "bool": "bool",
}

_INPUT = re.compile(r"(?P<shape>\d+(?:x\d+)*)(?::(?P<dtype>[a-z]+\d*))?(?P<last>:channels_last)?", re.ASCII)

_MOST_ELEMENTS = 2**48
"""Most elements of an input: sizes in bytes of larger tensors are no 64-bit numbers in torch."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """Shape, type and layout of a model's input.

    Texts are ``1x3x224x224:f16``, ``8x512:i64`` or ``1x3x224x224:f32:channels_last``.

    Attributes:
        shape: Extents.
        dtype: Type, as workloads name it.
        channels_last: Whether channels are innermost in memory.
    """

    shape: tuple[int, ...]
    dtype: str = "f32"
    channels_last: bool = False

    @classmethod
    def parse(cls, text: str) -> InputSpec:
        """Parse the text of an input.

        Raises:
            InputError: if the text is not SHAPE:TYPE[:channels_last], or the input is empty or too large.
        """
        match = _INPUT.fullmatch(text.strip())
        dtype = (match and match["dtype"]) or "f32"
        if match is None or dtype not in DTYPES:
            raise InputError(
                f"input {text!r} is not SHAPE:TYPE, such as 1x3x224x224:f16 or 8x512:i64, optionally with "
                f":channels_last at the end; types: {', '.join(DTYPES)}"
            )
        shape = tuple(map(int, match["shape"].split("x")))
        if 0 in shape:
            raise InputError(f"input {text!r} is empty; every extent must be 1 or more")
        if math.prod(shape) > _MOST_ELEMENTS:
            raise InputError(f"input {text!r} has too many elements: expected at most {_MOST_ELEMENTS}")
        if match["last"] and len(shape) != 4:
            raise InputError(f"input {text!r}: channels_last needs 4 axes, got {len(shape)}")
        return cls(shape, dtype, bool(match["last"]))

    def tensor(self, device: str = "cpu") -> Tensor:
        """Return a tensor of zeros with this shape, type and layout.

        Args:
            device: Its device; on ``meta`` it takes no memory.

        Raises:
            InputError: if it does not fit into memory.
        """
        import torch

        try:
            made = torch.zeros(self.shape, dtype=getattr(torch, DTYPES[self.dtype]), device=device)
        except RuntimeError as error:
            extents = "x".join(map(str, self.shape))
            raise InputError(
                f"input {extents}:{self.dtype} does not fit into the memory of this machine: make it smaller"
            ) from error
        return made.contiguous(memory_format=torch.channels_last) if self.channels_last else made


def load_factory(text: str) -> Callable[[], Any]:
    """Return the function that makes a model: ``model.py:make_model``, or ``package.module:make_model``.

    The file is executed: load only files that you trust.

    Args:
        text: FILE.py:FUNCTION or MODULE:FUNCTION.

    Raises:
        MissingDependency: if torch is not installed.
        InputError: if the file, module or function does not exist, or loading it fails.
    """
    module_or_file, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        raise InputError(f"model {text!r} is not FILE.py:FUNCTION or MODULE:FUNCTION")
    _require_torch()
    try:
        module = (
            _module_in(Path(module_or_file))
            if module_or_file.endswith(".py")
            else importlib.import_module(module_or_file)
        )
    except InputError:
        raise
    except Exception as error:  # user code may raise anything; the message keeps the reason
        raise InputError(f"model {text!r} cannot be loaded: {type(error).__name__}: {error}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        own = (known for known, value in vars(module).items() if _is_of(module, value))
        raise InputError(
            f"{module_or_file} has no function {name}. Its functions: {', '.join(own) or 'none'}"
        )
    typed: Callable[[], Any] = factory
    return typed


def _is_of(module: Any, value: Any) -> bool:
    """Return whether a module defines a function or a class."""
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency("torch", "torch")


def _module_in(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        problem = "is not a Python file" if file.exists() else "does not exist"
        raise InputError(f"{file} {problem}: expected FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.resolve().parent))  # a program can import modules next to it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def extract(
    factory: Callable[[], Any],
    inputs: Sequence[InputSpec],
    *,
    training: bool = False,
    dtype: str | None = None,
    name: str = "",
    device: Device | None = None,
) -> tuple[Graph, ...]:
    """Return the graphs of a model's step without computing it.

    Args:
        factory: Returns the model, a `torch.nn.Module` or a `torch.export.ExportedProgram`.
        inputs: The model's inputs.
        training: Whether the step is a training step: forward, and the gradients of everything the model
            returns.
        dtype: Type of the parameters; by default that of the first f16 or bf16 input.
        name: Name of the graphs; by default the model's class.
        device: Device that will run the step; it need not be in this machine. torch has one operator for
            attention and for RMS normalisation on a GPU, and may have several on a CPU.

    Returns:
        One graph for inference; for training the forward and the backward graph. If torch cannot trace the
        model as a whole, it has several of each, and a warning lists the reasons.

    Raises:
        MissingDependency: if torch is not installed.
        InputError: if the model cannot be made or traced.
    """
    model = make_model(factory, inputs, dtype)
    return _traced(model, [spec.tensor() for spec in inputs], device, training=training, name=name)


def extract_onnx(
    path: str | Path, sizes: Mapping[str, int] | None = None, *, device: Device | None = None
) -> tuple[Graph, ...]:
    """Return the graph of an inference step of an ONNX model, without its weights.

    A node for which torch has no function is left to torch, with the node's name in the reason.

    Args:
        path: The file.
        sizes: Extent of each dynamic axis, by its name in the file; `INPUT.AXIS` if it has none.
        device: Device that will run the step (see `extract`).

    Raises:
        MissingDependency: if torch or onnx is not installed.
        InputError: if the file cannot be read, a dynamic axis has no size, or a node that torch lacks has
            results of unknown shapes.
    """
    _require_torch()
    from tunebench.torch.onnx.model import load_onnx

    model = load_onnx(path, sizes)
    return _traced(model.module, model.inputs, device, name=Path(path).stem)


def _traced(
    model: nn.Module,
    inputs: Sequence[Tensor],
    device: Device | None,
    *,
    training: bool = False,
    name: str = "",
) -> tuple[Graph, ...]:
    """Return the graphs of a step of a model on a device."""
    from tunebench.torch.compiler.capture import capture
    from tunebench.torch.compiler.decomposition import attention_as_on_gpu

    is_gpu = device is not None and device.kind == "gpu"
    with attention_as_on_gpu() if is_gpu else contextlib.nullcontext():
        translations = capture(model, inputs, training=training, name=name)
    return tuple(translation.graph for translation in translations)


def make_model(
    factory: Callable[[], Any], inputs: Sequence[InputSpec], dtype: str | None = None
) -> nn.Module:
    """Return a model with the parameter type and memory layout of its inputs.

    Args:
        factory: Returns the model, a `torch.nn.Module` or a `torch.export.ExportedProgram`.
        inputs: The model's inputs.
        dtype: Type of the parameters; by default that of the first f16 or bf16 input.

    Raises:
        MissingDependency: if torch is not installed.
        InputError: if the model cannot be made, or `factory` returns something else.
    """
    _require_torch()
    from torch import nn
    from torch.export import ExportedProgram

    try:
        model = factory()
    except Exception as error:  # user code may raise anything
        raise InputError(f"cannot make the model: {type(error).__name__}: {error}") from error
    if isinstance(model, ExportedProgram):
        model = model.module()
    if not isinstance(model, nn.Module):
        raise InputError(f"expected the function to return a torch.nn.Module, got {type(model).__name__}")
    return _converted(model, inputs, dtype)


def _converted(model: nn.Module, inputs: Sequence[InputSpec], dtype: str | None) -> nn.Module:
    """Convert a model to the parameter type and memory layout of its inputs."""
    import torch

    target = dtype or next((spec.dtype for spec in inputs if spec.dtype in ("f16", "bf16")), None)
    if target is not None:
        if target not in ("f32", "f16", "bf16"):
            raise InputError(f"parameters must be f32, f16 or bf16, got {target}")
        model = model.to(getattr(torch, DTYPES[target]))
        for module in model.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                module.float()  # mixed precision keeps batch normalisation in f32
    if any(spec.channels_last for spec in inputs):
        model = model.to(memory_format=torch.channels_last)
    return model


# -- suites ---------------------------------------------------------------------------------------------

_SCALES = {
    "attention": "batch",
    "conv2d": "n",
    "gated_gemm": "m",
    "gemm": "m",
    "grouped_gemm": "m",
}
"""Dimension that grows with a network's batch, by operator; rows for all others."""


def suite_of(plans: Iterable[PartitionPlan], *, alternatives: bool = False) -> str:
    """Return the workloads of plans as a suite in TOML, each workload once with its count per step.

    Args:
        plans: Plans of the graphs of one model.
        alternatives: Whether to return the workloads of groups that were not chosen, but may be faster.
    """
    chosen = list(plans)
    workloads = sum(
        (plan.alternative_workloads if alternatives else plan.workloads for plan in chosen), Counter[str]()
    )
    names = ", ".join(dict.fromkeys(f"{plan.graph.name} ({plan.graph.phase})" for plan in chosen))
    lines = [
        f"# {names}: workloads of {'groups that may be faster' if alternatives else 'its groups'} on "
        f"{chosen[0].device.name}.",
        "# Written by `tunebench extract`; `count` is the number of launches per step.",
        "",
        "batches = [1]",
    ]
    numbers = Counter[str]()
    for text, count in workloads.items():
        operator = parse(text).operator
        numbers[operator] += 1
        lines += [
            "",
            f"[layer.{operator}_{numbers[operator]}]",
            f'workload = "{text}"',
            f"count = {count}",
            f'scales = "{_SCALES.get(operator, "rows")}"',
        ]
    return "\n".join(lines) + "\n"
