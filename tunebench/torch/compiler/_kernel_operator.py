"""The operator of torch that runs the tuned kernel of a workload: `torch.ops.tunebench.kernel`.

Compilers of torch see one opaque operator. Its arguments describe the workload and its tensors completely, so
a compiled graph that contains it can be cached.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tunebench.dispatch import BoundKernel, LibraryKernel, dispatcher, is_deterministic
from tunebench.dispatch.choice import BoundChoice
from tunebench.dispatch.cpu import SharedCpuKernel
from tunebench.dispatch.watch import is_watched
from tunebench.errors import InputError
from tunebench.torch._layout import has_strides
from tunebench.torch._tensor import device_of, launch, library_results
from tunebench.torch.compiler._kernel_check import store_wrong_result, wrong_result
from tunebench.torch.functional.custom_op import LIBRARY
from tunebench.workloads import parse

__all__ = [
    "KEEPS_PRIMITIVES",
    "KernelTensor",
    "check_later_kernels",
    "compiled_call",
    "keep_primitives",
    "layouts_of",
    "layouts_text",
    "require_layouts",
    "run_kernel",
]


@dataclass(frozen=True, slots=True)
class KernelTensor:
    """A tensor as a kernel reads or writes it.

    Attributes:
        shape: Shape in torch.
        strides: Strides in elements.
        dtype: Type.
        extent: Number of elements of its memory, which a kernel with an index map reads; 0 if kernels read
            the tensor itself.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    extent: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> KernelTensor:
        """Return the description of a tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def empty(self, device: torch.device) -> Tensor:
        """Allocate the tensor."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def view(self, result: Tensor) -> Tensor:
        """Return a view with this shape of a contiguous tensor in the same order of memory."""
        order = sorted(range(len(self.strides)), key=self.strides.__getitem__, reverse=True)
        stored = result.view([self.shape[axis] for axis in order])
        restored = [order.index(axis) for axis in range(len(order))]
        return stored if order == restored == sorted(order) else stored.permute(restored)

    def read(self, tensor: Tensor) -> Tensor:
        """Return a tensor with these strides and this type, copied if it has others.

        On a GPU, tensors whose memory is not aligned to 16 bytes are copied too: loads are 16 bytes wide.
        """
        has_layout = tensor.stride() == self.strides or has_strides(tensor, self.strides)
        if tensor.dtype != self.dtype or not has_layout or (tensor.is_cuda and tensor.data_ptr() % 16):
            return self.empty(tensor.device).copy_(tensor)
        return tensor

    def flat(self, tensor: Tensor) -> Tensor:
        """Return the memory of a tensor if a kernel reads that by an index map, else the tensor."""
        return tensor.as_strided((self.extent,), (1,)) if self.extent else tensor


def layouts_text(inputs: Iterable[KernelTensor], outputs: Iterable[KernelTensor]) -> str:
    """Return the layouts of a kernel's tensors, the operator's argument `layouts`.

    The text is JSON with apostrophes for quotes, which inductor does not escape in the C++ that it generates.
    """
    layouts = [[(t.shape, t.strides, str(t.dtype)[6:], t.extent) for t in part] for part in (inputs, outputs)]
    return json.dumps(layouts, separators=(",", ":")).replace('"', "'")


@functools.cache
def layouts_of(text: str) -> tuple[tuple[KernelTensor, ...], ...]:
    """Return the tensors that a kernel reads, and those that it writes.

    Args:
        text: Text that `layouts_text` returned.
    """
    return tuple(
        tuple(
            KernelTensor(tuple(shape), tuple(strides), getattr(torch, dtype), extent)
            for shape, strides, dtype, extent in part
        )
        for part in json.loads(text.replace("'", '"'))
    )


class _KernelCall:
    """A workload with the layouts of its tensors, on a device."""

    __slots__ = ("_device", "_dispatcher", "_inputs", "_made", "_outputs", "_refused")

    def __init__(self, workload: str, layouts: str, device: torch.device) -> None:
        where = device_of(device)
        if isinstance(where, str):
            raise InputError(where)
        self._device, self._dispatcher = device, dispatcher(parse(workload), *where)
        self._inputs, self._outputs = layouts_of(layouts)
        self._made: BoundChoice | None = None
        self._refused: BoundKernel | None = None

    def __call__(self, *tensors: Tensor) -> None:
        """Run on the inputs and into the outputs, which have exactly the layout that the kernel writes."""
        kernel, count = self._kernel(), len(self._inputs)
        launch(kernel, [*self._read(kernel, tensors[:count]), *tensors[count:]])

    def results(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run on the inputs, and return new outputs."""
        kernel = self._kernel()
        read = self._read(kernel, tensors)
        results = library_results(kernel, read)
        if results is not None:
            return [spec.view(result) for spec, result in zip(self._outputs, results, strict=True)]
        written = [spec.empty(self._device) for spec in self._outputs]
        launch(kernel, [*read, *written])
        return written

    @property
    def allocates(self) -> bool:
        """Whether the kernel is a library's call that allocates its results, so that outputs cost a copy."""
        kernel = self._dispatcher.bound_choice("tunebench").kernel
        return isinstance(kernel, LibraryKernel) and kernel.results is not None

    def _kernel(self) -> BoundKernel:
        """Return the kernel to run now, and report the call to watchers."""
        made = self._dispatcher.bound_choice("tunebench")
        if made is not self._made:
            made = self._changed(made)
        if is_watched():
            self._dispatcher.notify(made)
        assert made.kernel is not None
        return made.kernel

    def _read(self, kernel: BoundKernel, tensors: Sequence[Tensor]) -> list[Tensor]:
        read = [spec.read(tensor) for spec, tensor in zip(self._inputs, tensors, strict=True)]
        if isinstance(kernel, SharedCpuKernel):  # takes addresses
            return read
        return [spec.flat(tensor) for spec, tensor in zip(self._inputs, read, strict=True)]

    def _changed(self, made: BoundChoice) -> BoundChoice:
        """Return the dispatcher's new choice, or the previous one if the new one must not run."""
        before, kernel = self._made, made.kernel
        if kernel is not None and (before is None or kernel is before.kernel or not self._is_refused(kernel)):
            self._made = made
            return made
        why = made.choice.reason if kernel is None else f"{kernel.variant.key} must not run yet"
        reason = f"no kernel runs {self._dispatcher.workload}: {why}; compile the model again"
        if before is None:  # for example because the database was deleted
            raise InputError(reason)
        if is_deterministic() and not before.is_reproducible:
            if not torch.is_deterministic_algorithms_warn_only_enabled():
                raise InputError(reason)
            warnings.warn(reason, stacklevel=2)
        return before

    def _is_refused(self, kernel: BoundKernel) -> bool:
        """Return whether a kernel that replaces another one, for example after tuning, must not run."""
        if kernel is self._refused:  # as at every call until the dispatcher chooses another one
            return True
        if str(self._dispatcher.workload) not in _checked:
            return False
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return True  # for now: a CUDA graph under capture cannot wait for the check
        reason = wrong_result(kernel, self._device)
        if reason:
            self._refused = kernel
            store_wrong_result(kernel, self._dispatcher.device, reason)
            warnings.warn(
                f"{kernel.variant.key} with {kernel.config} is not used for {kernel.workload}: {reason}",
                stacklevel=2,
            )
        return bool(reason)


_checked: set[str] = set()


def check_later_kernels(workload: str) -> None:
    """Verify every kernel that replaces another one of a workload in this process, before it runs.

    Args:
        workload: Canonical text of the workload.
    """
    _checked.add(workload)


_call = functools.cache(_KernelCall)


def _run(inputs: list[Tensor], workload: str, layouts: str) -> list[Tensor]:
    return _call(workload, layouts, inputs[0].device).results(inputs)


def _fake(inputs: list[Tensor], workload: str, layouts: str) -> list[Tensor]:
    return [spec.empty(inputs[0].device) for spec in layouts_of(layouts)[1]]


def compiled_call(workload: str, layouts: str, device: str) -> _KernelCall:
    """Return the call of a workload's kernel, for code that a compiler generates.

    Args:
        workload: Canonical text of the workload.
        layouts: Text that `layouts_text` returned.
        device: Name of the tensors' device.
    """
    return _call(workload, layouts, torch.device(device))


LIBRARY.define(
    "kernel(Tensor[] inputs, str workload, str layouts) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides,),
)
for _backend in ("CPU", "CUDA"):
    LIBRARY.impl("kernel", _run, _backend)
torch.library.register_fake("tunebench::kernel", _fake, lib=LIBRARY)


def run_kernel(inputs: Sequence[Tensor], workload: str, layouts: str) -> list[Tensor]:
    """Run the tuned kernel of a workload on its inputs, and return its outputs.

    Args:
        inputs: The inputs; those with other strides or types than the kernel reads are copied.
        workload: Canonical text of the workload.
        layouts: Text that `layouts_text` returned.
    """
    return torch.ops.tunebench.kernel.default(list(inputs), workload, layouts)  # type: ignore[no-any-return]


KEEPS_PRIMITIVES = torch.torch_version.TorchVersion(torch.__version__) >= (2, 13)
"""Whether inductor can be made to call an operator as it is; it refuses oneDNN's with variable weights."""


def keep_primitives(graph: fx.Graph) -> None:
    """Make inductor call oneDNN's primitives, which calls of libraries contain, as they are.

    Inductor's patterns add post-operations to calls by position, and then require a constant weight.
    """
    for node in graph.nodes:
        if getattr(node.target, "namespace", "") == "mkldnn":
            node.meta["custom"] = {**node.meta.get("custom", {}), "fallback_to_eager": True}
            last = len(node.args) - 1
            node.kwargs = {**node.kwargs, node.target._schema.arguments[last].name: node.args[last]}
            node.args = node.args[:last]


def require_layouts(graph: fx.Graph) -> None:
    """Make inductor pass tensors with exactly the strides that the kernels of a graph read."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.tunebench.kernel.default):
        inputs, workload, layouts = node.args
        read: list[Any] = []
        for value, spec in zip(
            (read_node.meta["val"] for read_node in inputs), layouts_of(layouts)[0], strict=True
        ):
            with value.fake_mode:
                read.append(
                    torch.empty_strided(spec.shape, spec.strides, dtype=value.dtype, device=value.device)
                )
        node.meta["eager_input_vals"] = ((read, workload, layouts), {})
