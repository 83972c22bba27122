"""What the functions of torch do that a program calls: which read metadata, fetch values or change state."""

from __future__ import annotations

import enum
import importlib
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ALWAYS",
    "NATIVE",
    "Kind",
    "clear_gradients",
    "kind",
    "makes_states",
    "optimizer_classes",
    "optimizer_functions",
]


class Kind(enum.Enum):
    """How a call is run beside its graph."""

    METADATA = "answered from shapes and types"
    IGNORED = "run as it is; it concerns no tensor"
    STATE = "changes a state of the thread"
    FETCH = "reads values"
    SET_GRADIENT = "writes attributes grad"
    BACKWARD = "backward pass"
    OPTIMIZER = "update of parameters by an optimizer of torch"
    CREATE = "makes a tensor from other Python values"
    COMPUTE = "operations on tensors"
    UNKNOWN = "not understood"
    UNSEEN = "reads values that a dispatch mode does not see, and checks them only without one"


def _getters(names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names.split() if hasattr(Tensor, name)}


def _methods(names: str) -> set[Any]:
    found = set()
    for name in names.split():
        for owner in (Tensor, torch):
            if (method := getattr(owner, name, None)) is not None:
                found.add(method)
    return found


_METADATA = _getters(
    "shape dtype device layout ndim itemsize nbytes is_cpu is_cuda is_xpu is_meta is_sparse is_mkldnn is_mps "
    "is_quantized is_nested is_leaf requires_grad _backward_hooks is_sparse_csr is_vulkan is_ipu is_xla "
    "is_maia is_mtia grad"
) | _methods(
    "dim size stride numel nelement ndimension is_floating_point is_complex is_contiguous storage_offset "
    "element_size is_signed get_device __len__ has_names is_inference is_conj is_neg is_same_size"
)

_FETCH = _methods(
    "item tolist numpy __bool__ __float__ __int__ __index__ __complex__ equal allclose is_nonzero __repr__ "
    "__str__ __format__ __array__ __contains__ data_ptr __reduce_ex__ untyped_storage storage __dlpack__ "
    "__dlpack_device__"
)

_UNKNOWN = _getters("_version _base output_nr retains_grad grad_dtype") | _methods(
    "register_hook register_post_accumulate_grad_hook retain_grad set_ resize_ resize_as_ share_memory_ "
    "pin_memory __setstate__ as_subclass rename rename_ __deepcopy__ is_shared detach_ "
    "_make_subclass _make_wrapper_subclass to_sparse is_pinned apply_ map_ map2_ module_load "
    "sparse_resize_ sparse_resize_and_clear_ register_backward_hook is_set_to"
)
_UNKNOWN |= {
    getattr(Tensor, name).__set__ for name in ("data", "requires_grad", "_backward_hooks", "real", "imag")
}

_UNSEEN = _methods("cov quantile nanquantile tensor_split")


def clear_gradients(*leaves: Tensor) -> None:
    """Set the attribute ``grad`` of leaves to None, as `torch.optim.Optimizer.zero_grad` does."""
    for leaf in leaves:
        leaf.grad = None


NATIVE = frozenset(_METADATA - _getters("is_leaf requires_grad"))
"""Functions whose answer for a placeholder is that of the object itself."""

ALWAYS: dict[Any, Kind] = {
    **dict.fromkeys(_METADATA, Kind.METADATA),
    **dict.fromkeys(_FETCH, Kind.FETCH),
    **dict.fromkeys(_UNKNOWN, Kind.UNKNOWN),
    **dict.fromkeys(_UNSEEN, Kind.UNSEEN),
    torch.ops.profiler._record_function_enter_new: Kind.IGNORED,
    torch.ops.profiler._record_function_exit._RecordFunction: Kind.IGNORED,
    torch._C._set_grad_enabled: Kind.STATE,
    Tensor.grad.__set__: Kind.SET_GRADIENT,
    clear_gradients: Kind.SET_GRADIENT,
    Tensor.backward: Kind.BACKWARD,
    torch.autograd.backward: Kind.BACKWARD,
}
"""Kinds that depend on the function alone."""

SHARING = _methods("numpy __array__ data_ptr __reduce_ex__ untyped_storage storage __dlpack__")
"""Functions after which other code may read or write the memory of a tensor."""

REPRESENTING = _methods("__repr__ __str__ __format__ __reduce_ex__")
"""Functions whose result depends on the history of a tensor."""

_OPTIMIZERS = (
    "adadelta",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "asgd",
    "nadam",
    "radam",
    "rmsprop",
    "rprop",
    "sgd",
)


def kind(func: Any) -> Kind:
    """Return the kind of a call that the function alone decides, without its arguments."""
    try:
        return ALWAYS.get(func, Kind.COMPUTE)
    except TypeError:  # not hashable
        return Kind.UNKNOWN


def makes_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an update puts new tensors into its lists, as the first one of SGD with momentum does.

    A known path would put them into lists of its own.
    """
    return bool(kwargs.get("momentum")) and any(
        state is None for states in args if isinstance(states, list) for state in states
    )


def optimizer_functions() -> list[tuple[Any, str, Any]]:
    """Return the functions that update parameters: their modules, names and the functions themselves."""
    found = []
    for name in _OPTIMIZERS:
        module = importlib.import_module(f"torch.optim.{name}")
        found.append((module, name, getattr(module, name)))
    return found


def optimizer_classes() -> list[type[Any]]:
    """Return torch's optimizers that collect parameters, gradients and states in a method of their own."""
    found = []
    for name in _OPTIMIZERS:
        module = importlib.import_module(f"torch.optim.{name}")
        found += [
            each
            for each in vars(module).values()
            if isinstance(each, type) and each.__module__ == module.__name__ and "_init_group" in vars(each)
        ]
    return found
