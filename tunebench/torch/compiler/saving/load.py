"""`load`: a model of a file, ready to run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten, treespec_loads

from tunebench._foreign_file import interpreting
from tunebench.device import local_cpu
from tunebench.errors import InputError
from tunebench.torch.compiler.saving.archive import read_archive
from tunebench.torch.compiler.saving.description import described, versions
from tunebench.torch.compiler.saving.kernel import SavedKernel

__all__ = ["LoadedModel", "load"]


class LoadedModel:
    """A model of a file; `load` returns it.

    It is called like the model that was saved, with inputs of the same sizes and types. Results have no
    gradients.

    Args:
        loader: AOTInductor's model, which has its weights.
        weights: The weights, which the model reads where they are.
        inputs: Descriptions of the inputs.
        plans: Plans of the model, as plain data.

    Attributes:
        plans: Plans of the model, as plain data: its groups, and which of them kernels run.
    """

    def __init__(
        self,
        loader: Any,
        weights: Mapping[str, Tensor],
        inputs: list[dict[str, Any]],
        plans: list[dict[str, Any]],
    ) -> None:
        self._loader, self._weights, self._inputs, self.plans = loader, weights, inputs, plans
        self._arguments, self._results = map(treespec_loads, loader.get_call_spec())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            InputError: if an input has another size, layout or type than the example, or requires gradients.
        """
        # A dict is flattened in its own order, that of the call; the package has that of the example.
        names = self._arguments.child(1).context or []
        ordered = {name: kwargs[name] for name in names if name in kwargs}
        flat, spec = tree_flatten((args, ordered if len(ordered) == len(kwargs) else kwargs))
        if spec != self._arguments:
            raise InputError(
                f"expected inputs {_call(self._arguments)}, as in the example; got {_call(spec)}"
            )
        for index, (value, wanted) in enumerate(zip(flat, self._inputs, strict=True)):
            if (actual := described(value)) != wanted:
                raise InputError(f"input {index}: expected {_text(wanted)}, got {_text(actual)}; {_REMEDY}")
        tensors = [value for value in flat if isinstance(value, Tensor)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise InputError(
                "a saved model computes no gradients, but an input requires them: call it in torch.no_grad()"
            )
        with torch.no_grad():
            results = self._loader.boxed_run(tensors)
        return tree_unflatten(results, self._results)

    def __reduce__(self) -> NoReturn:
        """Refuse copies and pickles: the loader of torch has none."""
        raise TypeError(
            "a loaded model cannot be copied or pickled: call tunebench.torch.load with its file again, also "
            "in another process"
        )


_REMEDY = "a model has the sizes it was saved with: save it again with example inputs of these"


def _call(spec: TreeSpec) -> str:
    """Return the inputs of a call as text: `(*, *, factor=*)`, where `*` is a tensor or a constant."""
    args, kwargs = tree_unflatten(["*"] * spec.num_leaves, spec)
    named = (f"{name}={value}" for name, value in kwargs.items())
    return f"({', '.join([*map(str, args), *named])})".replace("'*'", "*")


def _text(described: Mapping[str, Any]) -> str:
    if "value" in described:
        return str(described["value"])
    return f"{described['dtype']} of shape {described['shape']} and strides {described['strides']}"


def load(
    path: str | Path, weights: nn.Module | Mapping[str, Tensor], *, digest: str | None = None
) -> LoadedModel:
    """Load a model that `save` wrote. Nothing is traced, planned or compiled.

    Loading runs machine code of the file: load only files that you trust.

    Args:
        path: The file. Only this user and root may be able to write it.
        weights: A module with the parameters and buffers of the saved one, or its ``state_dict``. The model
            reads them where they are: changes of their values count.
        digest: What `save` returned, to refuse any other file; not compared by default.

    Raises:
        InputError: if the file cannot run here: it was altered, others may write it, the processor or a
            version differs, or a weight is missing or has another shape. The message has the reason.
    """
    file = Path(path)
    description, members = read_archive(file, digest)
    with interpreting(f"{file} is not a saved model"):
        _check_machine(file, description)
        tensors = _weights(file, description["weights"], weights)
        for name, constant in description["constants"].items():
            tensors[name] = _tensor(constant, members[f"constants/{name}"])
        for name, kernel in description["kernels"].items():
            shared = None if kernel["shared"] is None else members[f"shared/{name}"]
            _load_kernel(file, name, kernel, members[f"kernels/{name}"], shared)
        loader = _loader(file, members["model.pt2"])
        loader.load_constants(tensors, False, True, True, False)
        return LoadedModel(loader, tensors, description["inputs"], json.loads(members["plan.json"]))


def _check_machine(path: Path, description: Mapping[str, Any]) -> None:
    here = {**versions(), "processor": local_cpu().key, "instructions of torch": _capability()}
    saved = {
        **description["versions"],
        "processor": description["device"],
        "instructions of torch": description["capability"],
    }
    for name, value in here.items():
        if saved[name] != value:
            raise InputError(
                f"{path} was saved with {name} {saved[name]}, and this is {value}: save the model again here"
            )


def _capability() -> str:
    return str(torch.backends.cpu.get_cpu_capability())


def _weights(
    path: Path, wanted: Mapping[str, Any], weights: nn.Module | Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the weights that a model reads.

    Raises:
        InputError: if one is missing, or has another shape, layout or type.
    """
    state = weights.state_dict() if isinstance(weights, nn.Module) else weights
    if missing := [name for name in wanted if name not in state]:
        raise InputError(f"{path} needs weights that are missing: {_listed(missing)}")
    for name, described_weight in wanted.items():
        if (actual := described(state[name])) != described_weight:
            raise InputError(
                f"{path} needs {name} as {_text(described_weight)}, got {_text(actual)}; "
                "another model, or other layouts, must be saved again"
            )
    return {name: state[name].detach() for name in wanted}


def _listed(names: Iterable[str], most: int = 5) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _tensor(constant: Mapping[str, Any], content: bytes) -> Tensor:
    dtype = getattr(torch, constant["dtype"])
    shape, strides = constant["shape"], constant["strides"]
    tensor = torch.empty_strided(shape, strides, dtype=dtype)
    if tensor.numel():
        tensor.copy_(torch.frombuffer(bytearray(content), dtype=dtype).view(shape))
    return tensor


def _load_kernel(
    path: Path, name: str, data: Mapping[str, Any], payload: bytes, shared: bytes | None
) -> None:
    kernel = SavedKernel.from_json(data, payload, shared)
    if kernel.name != name:
        raise InputError(f"{path} was altered since it was saved: kernel {name} is another one")
    try:
        kernel.load()
    except InputError as error:
        raise InputError(f"{path} cannot run here: {error}") from error


def _loader(path: Path, package: bytes) -> Any:
    """Return AOTInductor's model of a package."""
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder, "model.pt2")
        copied.write_bytes(package)
        try:
            return torch._C._aoti.AOTIModelPackageLoader(str(copied), "model", False, 1, -1)
        except RuntimeError as error:
            raise InputError(f"{path} cannot be loaded by AOTInductor: {error}") from error
