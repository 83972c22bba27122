"""A model's steps as files: the graphs, and a suite of the problems that their groups are."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebench.errors import InputError, MissingDependency
from tunebench.graph.node import Graph
from tunebench.graph.plan import PartitionPlan
from tunebench.workloads import parse

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["InputSpec", "extract", "load_factory", "make_model", "suite_of"]

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


@dataclass(frozen=True, slots=True)
class InputSpec:
    """What a model is called with: ``1x3x224x224:f16``, ``8x512:i64``, ``1x3x224x224:f32:channels_last``.

    Attributes:
        shape: Extents.
        dtype: As workloads name types.
        channels_last: Whether channels lie innermost in memory.
    """

    shape: tuple[int, ...]
    dtype: str = "f32"
    channels_last: bool = False

    @classmethod
    def parse(cls, text: str) -> InputSpec:
        """Read one.

        Raises:
            InputError: saying what one looks like.
        """
        found = _INPUT.fullmatch(text.strip())
        dtype = (found and found["dtype"]) or "f32"
        if found is None or dtype not in DTYPES:
            raise InputError(
                f"input {text!r} is not SHAPE:TYPE, such as 1x3x224x224:f16 or 8x512:i64, with channels_last "
                f"after another colon where they lie so; types: {', '.join(DTYPES)}"
            )
        shape = tuple(map(int, found["shape"].split("x")))
        if 0 in shape:
            raise InputError(f"input {text!r} is empty; every extent must be 1 or more")
        if found["last"] and len(shape) != 4:
            raise InputError(f"input {text!r}: channels_last takes 4 axes, not {len(shape)}")
        return cls(shape, dtype, bool(found["last"]))

    def tensor(self) -> Tensor:
        """Return a tensor of zeros of this kind: values do not count."""
        import torch

        made = torch.zeros(self.shape, dtype=getattr(torch, DTYPES[self.dtype]))
        return made.contiguous(memory_format=torch.channels_last) if self.channels_last else made


def load_factory(text: str) -> Callable[[], Any]:
    """Return the function that makes a model: ``model.py:make_model``, or ``package.module:make_model``.

    The file is run: it must be one's own.

    Raises:
        MissingDependency: if torch is not installed, which any such file needs.
        InputError: if there is no such file, module or function, or it fails when it is loaded.
    """
    place, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        raise InputError(f"model {text!r} is not FILE.py:FUNCTION or MODULE:FUNCTION")
    _require_torch()
    try:
        module = _module_in(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except InputError:
        raise
    except Exception as error:  # a user's file may raise anything; the reason is kept
        raise InputError(f"model {text!r} cannot be loaded: {type(error).__name__}: {error}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise InputError(f"{place} has no function {name}")
    found: Callable[[], Any] = factory
    return found


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency("torch", "torch")


def _module_in(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise InputError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.resolve().parent))  # what lies beside it is imported, as a program's is
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
) -> tuple[Graph, ...]:
    """Return what a step of a model computes; nothing is computed meanwhile.

    Args:
        factory: Makes the model, a `torch.nn.Module`.
        inputs: What it is called with.
        training: Whether it is a training step: forward, and gradients of all that the model returns.
        dtype: Type of the parameters; that of the first input with a short floating type if it is None.
        name: Of the graphs; the model's class if it is empty.

    Raises:
        MissingDependency: if torch is not installed.
        InputError: if the model cannot be made, is none, or cannot be traced as a whole.
    """
    model = make_model(factory, inputs, dtype)
    from tunebench.torch.compiler.capture import capture

    found = capture(model, [spec.tensor() for spec in inputs], training=training, name=name)
    return tuple(translation.graph for translation in found)


def make_model(
    factory: Callable[[], Any], inputs: Sequence[InputSpec], dtype: str | None = None
) -> nn.Module:
    """Return a model whose parameters have the type and the layout that its inputs tell.

    Args:
        factory: Makes the model, a `torch.nn.Module`.
        inputs: What it is called with.
        dtype: Type of the parameters; that of the first input with a short floating type if it is None.

    Raises:
        MissingDependency: if torch is not installed.
        InputError: if the model cannot be made, or is none.
    """
    _require_torch()
    from torch import nn

    try:
        model = factory()
    except Exception as error:  # likewise
        raise InputError(f"the model cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"what makes the model gives a {type(model).__name__}, not a torch.nn.Module")
    return _like_its_inputs(model, inputs, dtype)


def _like_its_inputs(model: nn.Module, inputs: Sequence[InputSpec], dtype: str | None) -> nn.Module:
    """Let parameters have the type and the layout that the inputs tell."""
    import torch

    wanted = dtype or next((spec.dtype for spec in inputs if spec.dtype in ("f16", "bf16")), None)
    if wanted is not None:
        if wanted not in ("f32", "f16", "bf16"):
            raise InputError(f"parameters are f32, f16 or bf16, not {wanted}")
        model = model.to(getattr(torch, DTYPES[wanted]))
        for module in model.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                module.float()  # as mixed precision has it
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
"""The dimension that the batch of a network multiplies, by operator; rows of all others."""


def suite_of(plans: Iterable[PartitionPlan]) -> str:
    """Return the problems of some plans as a suite: TOML, each problem once with how often a step runs it."""
    chosen = list(plans)
    problems = sum((one.problems for one in chosen), Counter[str]())
    names = ", ".join(dict.fromkeys(f"{one.graph.name} ({one.graph.phase})" for one in chosen))
    lines = [
        f"# {names}: what its groups compute on {chosen[0].device.name}.",
        "# Written by `tunebench extract`; `count` is how often a step runs a problem.",
        "",
        "batches = [1]",
    ]
    numbers = Counter[str]()
    for text, count in problems.items():
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
