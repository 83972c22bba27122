"""`save`: write a compiled model to a file."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_flatten

from tunebench._private_file import require_replaceable
from tunebench.device import local_cpu
from tunebench.errors import InputError
from tunebench.torch.compiler.capture import first_reason
from tunebench.torch.compiler.saving.archive import write_archive
from tunebench.torch.compiler.saving.description import described, versions
from tunebench.torch.compiler.saving.kernel import SavedKernel
from tunebench.torch.compiler.saving.program import ProgramWithKernels

__all__ = ["save"]

_OPTIONS = {
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,  # else short vectors of weights become part of the code
}


def save(
    model: nn.Module | ExportedProgram,
    path: str | Path,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Save a model for inference, compiled for this processor: `load` runs it without compiling anything.

    The file has the plan, the machine code of tuned kernels, and an AOTInductor package of everything else,
    but no parameters, and no buffers that the model's ``state_dict`` has.

    Args:
        model: What `compile` returned, a module, or a program of `torch.export`; in ``eval`` mode.
        path: The file to write.
        args: Example inputs of a module: the saved model accepts inputs with the same sizes and types only. A
            program has its own.
        kwargs: Example keyword inputs of a module.

    Returns:
        The digest of the file, for `load`.

    Raises:
        InputError: if the model cannot be saved; the message has the reason.
    """
    require_replaceable(Path(path))
    program = _program(model, args, kwargs)
    replaced = ProgramWithKernels(program)
    example_args, example_kwargs = program.example_inputs or ((), {})
    package = _compiled(replaced.module, example_args, example_kwargs)
    names = _constant_names(package)
    state = {name: tensor for name, tensor in program.state_dict.items() if name in names}
    constants = {name: _attribute(replaced.module, name) for name in names if name not in state}
    flat, _ = tree_flatten((example_args, dict(example_kwargs)))
    kernels = replaced.kernels
    description = {
        "versions": versions(),
        "device": local_cpu().key,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "inputs": [described(value) for value in flat],
        "weights": {name: described(tensor) for name, tensor in state.items()},
        "constants": {name: described(tensor) for name, tensor in constants.items()},
        "kernels": {name: kernel.to_json() for name, kernel in kernels.items()},
    }
    plan = json.dumps(replaced.plans, indent=1)
    members = {
        "model.pt2": package,
        "plan.json": plan.encode(),
        "cpp.txt": _for_programs(kernels, constants).encode(),
        **{f"kernels/{name}": kernel.binary.payload for name, kernel in kernels.items()},
        **{f"shared/{name}": kernel.shared.payload for name, kernel in kernels.items() if kernel.shared},
        **{f"constants/{name}": _bytes(tensor) for name, tensor in constants.items()},
    }
    return write_archive(Path(path), description, members)


def _for_programs(kernels: Mapping[str, SavedKernel], constants: Mapping[str, Tensor]) -> str:
    """Return what `saved_model.hpp` reads: kernels and constants, one a line."""
    lines = [f"kernel {name} {kernel.call_text()}" for name, kernel in kernels.items() if kernel.shared]
    for name, tensor in constants.items():
        sizes = (tensor.ndim, *tensor.shape, tensor.ndim, *tensor.stride())
        lines.append(f"constant {name} {str(tensor.dtype)[6:]} {' '.join(map(str, sizes))}")
    return "\n".join(lines) + "\n"


def _program(
    model: nn.Module | ExportedProgram, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> ExportedProgram:
    """Return a model as an exported program."""
    if isinstance(model, ExportedProgram):
        if args is not None or kwargs is not None:
            raise InputError("a program of torch.export has its own example inputs: omit args and kwargs")
        return model
    module = getattr(model, "_orig_mod", model)
    if not isinstance(module, nn.Module):
        raise InputError(f"expected a module or a program of torch.export, got {type(model).__name__}")
    if args is None and kwargs is None:
        raise InputError("expected example inputs: save(model, path, args=(...))")
    if module.training:
        raise InputError(
            "a model in training mode cannot be saved, since AOTInductor's packages have no gradients: "
            "call model.eval()"
        )
    try:
        with torch.no_grad():
            return torch.export.export(module, tuple(args or ()), dict(kwargs or {}))
    except Exception as error:  # the tracer may raise anything; its first line is the reason
        raise InputError(f"{type(module).__name__} cannot be exported: {first_reason(error)}") from error


def _compiled(module: fx.GraphModule, args: Any, kwargs: Any) -> bytes:
    """Return AOTInductor's package of a module."""
    from torch._inductor import aot_compile
    from torch._inductor.package import package_aoti

    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about torch's own specifications
        try:
            files: Any = aot_compile(module, tuple(args), dict(kwargs), options=_OPTIONS)
        except Exception as error:  # the compiler may raise anything; its first line is the reason
            raise InputError(f"AOTInductor cannot compile the model: {first_reason(error)}") from error
        package: Any = package_aoti(str(Path(folder, "model.pt2")), files)
        content: bytes = Path(package).read_bytes()
        return content


def _constant_names(package: bytes) -> list[str]:
    """Return the names of the tensors that a package must be given."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.pt2")
        path.write_bytes(package)
        loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
        return sorted(loader.get_constant_fqns())


def _attribute(module: nn.Module, name: str) -> Tensor:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    tensor: Tensor = value
    return tensor.detach()


def _bytes(tensor: Tensor) -> bytes:
    content: bytes = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return content
