"""References in float64 on a GPU by torch: arrays that NumPy's functions compute on the device.

References are written for NumPy (`Workload.reference`). NumPy's protocols for foreign arrays let them compute
with `DeviceArray`s: elementwise functions, products and reductions run on the device, everything else runs on
the host. Float64 products on the device take milliseconds where one core takes a minute.

Source: NumPy enhancement proposals 13, 18 and 35.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from numpy.lib.mixins import NDArrayOperatorsMixin

from tunebench._lazy import np
from tunebench.libraries import torch_tensor
from tunebench.workload import Workload

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["DeviceArray", "ReferenceDevice", "reference_device"]

WORTH_WORK = 100_000_000
"""FLOPs plus bytes of a workload whose reference is computed on a device: importing torch takes seconds."""


def reference_device(name: str) -> ReferenceDevice | None:
    """Return the device on which references can be computed; None without torch, or if torch cannot use it.

    Args:
        name: Name of torch's device, such as ``"cuda:0"``.
    """
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if torch.device(name).type == "cuda" and not torch.cuda.is_available():
        return None
    return ReferenceDevice(torch, name)


class ReferenceDevice:
    """A device of torch that computes references.

    Args:
        torch: The module.
        name: Name of the device.

    Attributes:
        failures: The exceptions raised if the device has too little memory or is lost.
    """

    def __init__(self, torch: Any, name: str) -> None:
        self._torch, self._device = torch, torch.device(name)
        self.failures = (torch.OutOfMemoryError, torch.AcceleratorError)
        self.functions = _functions(torch)
        self.ufuncs = _ufuncs(torch)

    @staticmethod
    def is_worth(workload: Workload) -> bool:
        """Return whether a reference is large enough to be computed on a device."""
        return workload.flops() + workload.traffic().total_bytes >= WORTH_WORK

    def array(self, value: Array) -> Any:
        """Return a copy of an array on the device, in float64."""
        tensor = torch_tensor(np.asarray(value), self._device)
        if not isinstance(tensor, self._torch.Tensor):
            tensor = self._torch.tensor(tensor, device=self._device)
        return DeviceArray(tensor.double(), self)

    def arrays(self, values: Mapping[str, Array]) -> dict[str, Any]:
        """Return copies of arrays on the device, in float64; those of shape `()` stay on the host."""
        return {
            name: self.array(value) if np.asarray(value).shape else np.float64(value)
            for name, value in values.items()
        }

    def zeros(self, shape: tuple[int, ...]) -> DeviceArray:
        """Return an array of zeros on the device, in float64."""
        return DeviceArray(self._torch.zeros(shape, dtype=self._torch.float64, device=self._device), self)

    def release(self) -> None:
        """Free the device memory that torch keeps for later arrays."""
        if self._device.type == "cuda":
            self._torch.cuda.empty_cache()

    def tensor(self, value: Any) -> Any:
        """Return an operand as torch takes it."""
        if isinstance(value, DeviceArray):
            return value.tensor
        if isinstance(value, np.ndarray):
            return self._torch.from_numpy(np.ascontiguousarray(value)).to(self._device)
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, tuple | list):
            return type(value)(map(self.tensor, value))
        return value

    def wrap(self, result: Any) -> Any:
        """Return a result of torch as an array."""
        if isinstance(result, self._torch.Tensor):
            return DeviceArray(result, self)
        if isinstance(result, tuple | list):
            return type(result)(map(self.wrap, result))
        return result


class DeviceArray(NDArrayOperatorsMixin):
    """An array on a device, which NumPy's functions and operators accept.

    Args:
        tensor: The tensor of torch.
        on: Its device.

    Attributes:
        tensor: The tensor of torch.
        on: Its device.
    """

    def __init__(self, tensor: Any, on: ReferenceDevice) -> None:
        self.tensor, self.on = tensor, on

    # -- NumPy's protocols ---------------------------------------------------------------------------

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        host: Array = self.tensor.cpu().numpy()
        return host if dtype is None else host.astype(dtype, copy=False)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", (None,))[0]
        function = self.on.ufuncs.get((ufunc.__name__, method))
        if function is None or set(kwargs) - {"axis", "keepdims"} or kwargs.get("axis", 0) is None:
            result = getattr(ufunc, method)(*map(_on_host, inputs), **kwargs)
        else:
            result = self.on.wrap(function(*map(self.on.tensor, inputs), **kwargs))
        if out is None:
            return result
        out[...] = result
        return out

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function.__name__ == "zeros":  # np.zeros(shape, like=self)
            return self.on.zeros(*args)
        replacement = self.on.functions.get(function.__name__)
        if replacement is not None:
            moved = {name: self.on.tensor(value) for name, value in kwargs.items()}
            return self.on.wrap(replacement(*self.on.tensor(tuple(args)), **moved))
        on_host = {name: _on_host(value) for name, value in kwargs.items()}
        return function(*_on_host(tuple(args)), **on_host)

    # -- as an array of NumPy -------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def T(self) -> DeviceArray:  # noqa: N802 - NumPy's name
        return self.transpose()

    def __len__(self) -> int:
        return self.shape[0]

    def __float__(self) -> float:
        return float(self.tensor)

    def __bool__(self) -> bool:
        return bool(self.tensor)

    def __getitem__(self, at: Any) -> Any:
        if _has_negative_step(at):
            return np.asarray(self)[_on_host(at)]
        return self.on.wrap(self.tensor[self.on.tensor(at)])

    def __setitem__(self, at: Any, value: Any) -> None:
        value = self.on.tensor(value)
        self.tensor[self.on.tensor(at)] = value if not hasattr(value, "to") else value.to(self.tensor.dtype)

    def transpose(self, *axes: int) -> DeviceArray:
        order = axes or tuple(range(self.ndim))[::-1]
        return DeviceArray(self.tensor.permute(*order), self.on)

    def reshape(self, *shape: Any) -> DeviceArray:
        return DeviceArray(self.tensor.reshape(*shape), self.on)

    def copy(self) -> DeviceArray:
        return DeviceArray(self.tensor.clone(), self.on)

    def sum(self, **kwargs: Any) -> Any:
        return np.sum(self, **kwargs)

    def max(self, **kwargs: Any) -> Any:
        return np.max(self, **kwargs)

    def min(self, **kwargs: Any) -> Any:
        return np.min(self, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of a copy on the host: `astype`, `mean`, ..."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(np.asarray(self), name)


def _on_host(value: Any) -> Any:
    """Return an operand as NumPy takes it."""
    if isinstance(value, DeviceArray):
        return np.asarray(value)
    if isinstance(value, tuple | list):
        return type(value)(map(_on_host, value))
    return value


def _has_negative_step(at: Any) -> bool:
    indices = at if isinstance(at, tuple) else (at,)
    return any(isinstance(index, slice) and (index.step or 1) < 0 for index in indices)


def _ufuncs(torch: Any) -> dict[tuple[str, str], Callable[..., Any]]:
    """Return torch's functions for NumPy's elementwise functions and their methods."""
    names = {
        "add": torch.add,
        "subtract": lambda x, y: torch.subtract(x.double(), y.double()),  # truth values, too
        "multiply": torch.multiply,
        "divide": torch.divide,
        "negative": torch.negative,
        "absolute": torch.abs,
        "exp": torch.exp,
        "expm1": torch.expm1,
        "log": torch.log,
        "log1p": torch.log1p,
        "sqrt": torch.sqrt,
        "square": torch.square,
        "sin": torch.sin,
        "cos": torch.cos,
        "rint": torch.round,
        "trunc": torch.trunc,
        "tanh": torch.tanh,
        "cosh": torch.cosh,
        "less": torch.less,
        "less_equal": torch.less_equal,
        "greater": torch.greater,
        "greater_equal": torch.greater_equal,
        "equal": torch.eq,
        "not_equal": torch.ne,
        "isnan": torch.isnan,
        "isfinite": torch.isfinite,
        "matmul": torch.matmul,
    }
    functions = {(name, "__call__"): _of_tensors(torch, function) for name, function in names.items()}
    for name in ("maximum", "minimum", "power", "logical_and", "logical_or", "bitwise_and", "bitwise_or"):
        functions[name, "__call__"] = _of_tensors(
            torch, {"power": torch.pow}.get(name) or getattr(torch, name)
        )
    functions["invert", "__call__"] = torch.bitwise_not
    functions["add", "reduceat"] = _reduceat(torch)
    return functions


def _of_tensors(torch: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes numbers in place of tensors, which few functions of torch do."""
    dtypes = {bool: torch.bool, int: torch.int64, float: torch.float64}

    def call(*operands: Any) -> Any:
        device = next(operand.device for operand in operands if isinstance(operand, torch.Tensor))

        def tensor(operand: Any) -> Any:
            if isinstance(operand, torch.Tensor):
                return operand
            return torch.tensor(operand, device=device, dtype=dtypes[type(operand)])

        return function(*map(tensor, operands))

    return call


def _reduceat(torch: Any) -> Callable[..., Any]:
    def reduceat(tensor: Any, starts: Any, axis: int = 0) -> Any:
        positions = torch.arange(tensor.shape[axis], device=tensor.device)
        run = torch.searchsorted(starts, positions, right=True) - 1
        shape = list(tensor.shape)
        shape[axis] = len(starts)
        return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device).index_add_(axis, run, tensor)

    return reduceat


def _functions(torch: Any) -> dict[str, Callable[..., Any]]:
    """Return torch's functions for other functions of NumPy."""

    def reduced(function: Callable[..., Any]) -> Callable[..., Any]:
        def reduce(x: Any, axis: Any = None, keepdims: bool = False, **least: Any) -> Any:
            if axis is None:
                axis = tuple(range(x.ndim))
            if "where" in least:
                x = torch.where(least["where"], x, float(least["initial"]))
            if x.numel() == 0 and "initial" in least:
                return torch.tensor(float(least["initial"]), device=x.device)
            result = function(x, dim=axis, keepdim=bool(keepdims))
            return torch.clamp(result, min=least["initial"]) if "initial" in least else result

        return reduce

    def where(condition: Any, x: Any, y: Any) -> Any:
        device = next(t.device for t in (condition, x, y) if isinstance(t, torch.Tensor))
        return torch.where(torch.as_tensor(condition, device=device), x, y)

    return {
        "sum": reduced(torch.sum),
        "max": reduced(torch.amax),
        "amax": reduced(torch.amax),
        "min": reduced(torch.amin),
        "where": where,
        "broadcast_to": lambda x, shape: torch.broadcast_to(x, shape),
        "transpose": lambda x, axes=None: x.permute(*(axes or tuple(range(x.ndim))[::-1])),
        "reshape": lambda x, shape: x.reshape(shape),
        "concatenate": lambda parts, axis=0: torch.cat(list(parts), dim=axis),
    }
