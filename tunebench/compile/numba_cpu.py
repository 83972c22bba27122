"""Numba on the CPU: Python to object code that another process can load.

Numba's own disk cache ships compile results between processes in the same way; the key here is ours,
so that a comment in a variant's file voids nothing.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import pickle
import sys
import warnings
from collections.abc import Callable
from types import CodeType
from typing import Any

from tunebench.binary.compiled import Binary, CompileError
from tunebench.compile.cache import binary_key
from tunebench.outcome import Resources
from tunebench.space import Config
from tunebench.variant import NumbaCpuVariant, Scalar
from tunebench.workload import Workload

__all__ = ["assembly_of_numba_cpu", "compile_numba_cpu", "key_numba_cpu", "load_numba_cpu"]


def key_numba_cpu(variant: NumbaCpuVariant[Any], workload: Workload, config: Config) -> str:
    """Return the key of what reaches Numba and LLVM for this configuration on this processor."""
    import llvmlite
    import numba

    return binary_key(
        "numba-cpu 3",
        _fingerprint(variant.kernel(workload, config)),
        str(_signature(variant, workload, config)),
        ",".join(sorted(variant.fastmath)),
        f"{sys.version_info[:2]} {numba.__version__} {llvmlite.__version__} {_processor()}",
    )


def _fingerprint(value: Any) -> str:
    """Describe what Numba sees of a kernel: its bytecode, and all that it closes over, recursively.

    The module counts: code finds its globals by that name again, and that of a user's file tells its place.
    """
    function = getattr(value, "py_func", value)
    code = getattr(function, "__code__", None)
    if code is None:
        return repr(value)
    options = getattr(value, "targetoptions", {})
    parts = [
        function.__module__,
        _code(code),
        *(f"{k}={sorted(v) if isinstance(v, set) else v}" for k, v in options.items()),
    ]
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    used = [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    parts += [_fingerprint(item) for item in (*cells, *used) if not inspect.ismodule(item)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _code(code: CodeType) -> str:
    constants = [_code(c) if inspect.iscode(c) else repr(c) for c in code.co_consts]
    return repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants))


@functools.cache
def _processor() -> str:
    from llvmlite import binding

    return f"{binding.get_host_cpu_name()} {binding.get_host_cpu_features().flatten()}"


def _signature(variant: NumbaCpuVariant[Any], workload: Workload, config: Config) -> Any:
    from numba import types

    stored = {"f32": types.float32, "f16": types.uint16, "bf16": types.uint16, "i32": types.int32}
    scalars = {"int": types.int32, "long long": types.int64, "float": types.float32}
    tensors = {
        t.name: t for t in (*workload.inputs(), *workload.outputs(), *variant.scratch(workload, config))
    }
    kinds = []
    for argument in variant.arguments(workload, config):
        if isinstance(argument, Scalar):
            kinds.append(scalars[argument.ctype])
        elif tensors[argument].shape:
            tensor = tensors[argument]
            kinds.append(types.Array(stored[tensor.dtype], len(tensor.shape), "C"))
        else:
            kinds.append(types.float32)
    return types.void(*kinds)


def _dispatcher(variant: NumbaCpuVariant[Any], workload: Workload, config: Config) -> Any:
    import numba

    return numba.njit(parallel=True, fastmath=set(variant.fastmath))(variant.kernel(workload, config))


def compile_numba_cpu(variant: NumbaCpuVariant[Any], workload: Workload, config: Config) -> Binary:
    """Compile one configuration for this processor.

    Raises:
        CompileError: with Numba's first words.
    """
    from llvmlite import binding
    from numba.core import serialize

    dispatcher = _dispatcher(variant, workload, config)
    signature = _signature(variant, workload, config)
    key = key_numba_cpu(variant, workload, config)
    _name_apart(key)
    _compile(dispatcher, signature)
    result = dispatcher.overloads[signature.args]
    # Addresses of this process in the code (functions of ctypes) mean nothing in another.
    portable = not result.library.has_dynamic_globals
    return Binary(
        key=key,
        language="numba-cpu",
        target=binding.get_host_cpu_name(),
        payload=serialize.dumps(result._reduce()) if portable else b"",
        entries=(dispatcher.py_func.__name__,),
        resources=Resources(code_bytes=len(result.library._get_compiled_object())),
    )


def _name_apart(key: str) -> None:
    """Let the functions compiled next have symbols that no other binary has.

    Numba tells functions of one name apart by a count that starts anew in each process. Binaries of two
    compiling processes, loaded into one, would so share symbols, and LLVM would call the one loaded first.
    """
    from numba.core.bytecode import FunctionIdentity

    FunctionIdentity._unique_ids = itertools.count(int(key[:15], 16))


def _compile(dispatcher: Any, signature: Any) -> None:
    from numba.core import errors

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", errors.NumbaWarning)  # advice to whoever wrote the kernel
            dispatcher.compile(signature)
    except errors.NumbaError as error:
        raise CompileError(f"numba: {str(error).strip()[:2000]}") from error


def assembly_of_numba_cpu(variant: NumbaCpuVariant[Any], workload: Workload, config: Config) -> str:
    """Return the assembly that LLVM makes of one configuration for this processor.

    It is compiled anew: object code that was taken from the cache has no text any more.

    Raises:
        CompileError: with Numba's first words.
    """
    dispatcher = _dispatcher(variant, workload, config)
    signature = _signature(variant, workload, config)
    _compile(dispatcher, signature)
    assembly: str = dispatcher.inspect_asm(signature.args)
    return assembly


def load_numba_cpu(
    binary: Binary, variant: NumbaCpuVariant[Any], workload: Workload, config: Config
) -> Callable[..., None]:
    """Turn a binary of `compile_numba_cpu` back into a function.

    Nothing is compiled here, unless the code holds addresses of the process that compiled it: such a binary
    comes without payload. A payload must come from this machine's own compile step: it is unpickled.

    Raises:
        CompileError: with Numba's first words, where it must be compiled here.
    """
    from numba.core.compiler import CompileResult

    dispatcher = _dispatcher(variant, workload, config)
    if binary.payload:
        dispatcher.targetctx.refresh()
        parts = pickle.loads(binary.payload)  # noqa: S301 - written by this machine's own compile step
        dispatcher.add_overload(CompileResult._rebuild(dispatcher.targetctx, *parts))
    else:
        _compile(dispatcher, _signature(variant, workload, config))
    dispatcher.disable_compile()
    function: Callable[..., None] = dispatcher
    return function
