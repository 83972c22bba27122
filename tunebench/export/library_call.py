"""Export of a library's call: a Python module or C++ that makes it, and needs the library only."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tunebench import __version__
from tunebench._lazy import np
from tunebench.dtype import storage
from tunebench.errors import InputError
from tunebench.libraries import torch_tensor, torch_type
from tunebench.variant import CppCall, LibraryVariant
from tunebench.workload import Tensor

if TYPE_CHECKING:
    from torch import fx

    from tunebench.tuning.choice import ChosenConfig

__all__ = ["CPP_FILE", "MODULE", "cpp_call", "library_module", "write_library_call"]

MODULE = "library_call.py"
CPP_FILE = "library_call.cpp"
_SEED = 0
_IMPORTS = {
    "inf": "from math import inf",
    "nan": "from math import nan",
    "device": "from torch import device",
}
"""Names that code of graphs may contain, and how to import them."""


def write_library_call(choice: ChosenConfig, folder: Path, form: Literal["py", "cpp"]) -> tuple[Path, ...]:
    """Write a library's call into a folder, replacing the files of an earlier export.

    Args:
        choice: Configuration of a variant that calls a library.
        folder: Output folder; created if it does not exist.
        form: Language of the source.

    Returns:
        The paths of the source and the manifest.

    Raises:
        InputError: The program cannot be written in that language.
    """
    name, text = (MODULE, library_module(choice)) if form == "py" else (CPP_FILE, _cpp_source(choice))
    files = {name: text, "manifest.json": json.dumps(_manifest(choice, name), indent=2) + "\n"}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return tuple(folder / name for name in files)


def library_module(choice: ChosenConfig) -> str:
    """Return the source of a module with the function `run`, which takes the inputs and returns the outputs.

    The program is traced: its operators of torch are called in order, with the sizes of the workload.

    Args:
        choice: Configuration of a variant that calls a library.

    Raises:
        InputError: The program is not of torch, or depends on values of its inputs.
    """
    variant, workload = choice.variant, choice.workload
    assert isinstance(variant, LibraryVariant), variant
    body = _body(_traced(choice))
    names = ", ".join(tensor.name for tensor in workload.inputs())
    outputs = ", ".join(tensor.name for tensor in workload.outputs())
    return "\n".join(
        [
            f'"""{workload}',
            "",
            f"{variant.key} {choice.config} for {choice.device.key}: {variant.calls(choice.config)}",
            f"of {_library(choice)}, exported by tunebench {__version__}.",
            '"""',
            "",
            "import torch",
            *(line for name, line in _IMPORTS.items() if re.search(rf"\b{name}\b", "\n".join(body))),
            "",
            "",
            "@torch.no_grad()",
            f"def run({names}):",
            f'    """Return {outputs} in new memory.',
            "",
            "    Args:",
            *(f"        {tensor.name}: {_described(tensor)}" for tensor in workload.inputs()),
            '    """',
            *(
                f"    {tensor.name} = torch.as_tensor({tensor.name}, dtype=torch.float32)"
                for tensor in workload.inputs()
                if not tensor.shape
            ),
            *body,
            "",
        ]
    )


def cpp_call(choice: ChosenConfig) -> CppCall:
    """Return the call of a library in C++.

    Args:
        choice: Configuration of a variant that calls a library.

    Raises:
        InputError: The call is not written in C++.
    """
    variant = choice.variant
    assert isinstance(variant, LibraryVariant), variant
    call = variant.cpp(choice.workload, choice.config)
    if call is None:
        raise InputError(f"{variant.key} {choice.config} has no form in C++; use --format py")
    return call


def _cpp_source(choice: ChosenConfig) -> str:
    variant, call = choice.variant, cpp_call(choice)
    assert isinstance(variant, LibraryVariant), variant
    lines = (
        f"// {choice.workload}",
        f"// {variant.key} {choice.config} for {choice.device.key}: {variant.calls(choice.config)}",
        f"// of {_library(choice)}, exported by tunebench {__version__}.",
        f"// {call.build}",
        "",
    )
    return "\n".join(lines) + "\n" + call.source


def _described(tensor: Tensor) -> str:
    return f"{tensor.shape} {tensor.dtype}, contiguous." if tensor.shape else "A number."


def _library(choice: ChosenConfig) -> str:
    variant = choice.variant
    assert isinstance(variant, LibraryVariant), variant
    return f"{variant.package(choice.config)} {variant.version(choice.config)}"


def _manifest(choice: ChosenConfig, module: str) -> dict[str, Any]:
    variant, workload, config = choice.variant, choice.workload, choice.config
    assert isinstance(variant, LibraryVariant), variant
    roles = {"input": workload.inputs(), "output": workload.outputs()}
    return {
        "tunebench": __version__,
        "workload": str(workload),
        "variant": variant.key,
        "config": dict(config),
        "revision": variant.revision(workload, config),
        "device": choice.device.key,
        "why": choice.why,
        "expected_us": choice.expected_us,
        "how": choice.how,
        "module": module,
        "calls": variant.calls(config),
        "library": _library(choice),
        "tensors": [
            {"name": tensor.name, "role": role, "dtype": tensor.dtype, "shape": list(tensor.shape)}
            for role, tensors in roles.items()
            for tensor in tensors
        ],
    }


# -- tracing -----------------------------------------------------------------------------------------------


def _traced(choice: ChosenConfig) -> fx.GraphModule:
    """Return the operators of torch that a program calls, with its inputs as placeholders.

    Fake tensors have no values: a program that reads them is refused.
    """
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    variant, workload = choice.variant, choice.workload
    assert isinstance(variant, LibraryVariant), variant
    compute = variant.results(workload, choice.config)
    if compute is None or variant.package(choice.config) != "torch":
        raise InputError(
            f"{variant.key} {choice.config} calls no functions of torch; only those are exported"
        )
    drawn = workload.draw(np.random.default_rng(_SEED))
    names = [tensor.name for tensor in workload.inputs()]
    inputs = [torch_tensor(drawn[name]) if drawn[name].shape else torch.tensor(drawn[name]) for name in names]

    def run(*tensors: Any) -> Any:
        results = compute(dict(zip(names, tensors, strict=True)))
        listed = results if isinstance(results, tuple) else (results,)
        stored = tuple(map(_stored, listed, workload.outputs()))
        return stored if len(stored) > 1 else stored[0]

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            traced = make_fx(run, tracing_mode="fake")(*inputs)
        except Exception as error:  # of any operator of torch that needs values
            reason = str(error).partition("\n")[0]
            raise InputError(
                f"{variant.key} {choice.config} depends on values of its inputs: {reason}"
            ) from error
    for node, name in zip(traced.graph.find_nodes(op="placeholder"), names, strict=True):
        node.name = node.target = name
    _write_constants(traced, choice)
    return traced


def _stored(result: Any, tensor: Tensor) -> Any:
    """Return a result with the shape and type of its tensor."""
    if result.shape != tensor.shape:
        result = result.reshape(tensor.shape)
    return result.contiguous().to(torch_type(storage(tensor.dtype)))


def _write_constants(traced: fx.GraphModule, choice: ChosenConfig) -> None:
    """Replace tensors that the program has made while it was traced by numbers."""
    import torch

    for node in traced.graph.find_nodes(op="get_attr"):
        value = getattr(traced, node.target)
        if value.numel() > 1:
            raise InputError(
                f"{choice.variant.key} {choice.config} needs a tensor of {value.numel()} constants, such "
                "as a mask; only numbers are exported"
            )
        with traced.graph.inserting_before(node):
            number = traced.graph.call_function(torch.tensor, (value.item(),), {"dtype": value.dtype})
        node.replace_all_uses_with(number)
        traced.graph.erase_node(node)


def _body(traced: fx.GraphModule) -> list[str]:
    """Return the statements of a graph; tensors are not deleted before the end."""
    code = traced.graph.python_code("self").src
    lines = code[code.index("def forward") :].splitlines()[1:]
    return [line.partition(";  ")[0].rstrip() for line in lines if line.strip()]
