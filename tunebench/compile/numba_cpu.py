"""Compilation by Numba for the CPU, to object code that another process can load.

Numba's own disk cache moves compile results between processes in the same way. The key used here ignores
comments, so that editing one does not invalidate binaries.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import pickle
import secrets
import sys
import warnings
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

from tunebench.binary.compiled import Binary, CompileError
from tunebench.compile.cache import binary_key
from tunebench.outcome import Resources
from tunebench.space import Config
from tunebench.variant import NumbaCpuVariant, Scalar
from tunebench.workload import Workload

__all__ = ["assembly_of_numba_cpu", "compile_numba_cpu", "fingerprint_of", "key_numba_cpu", "load_numba_cpu"]


_SYMBOL_BITS = 60
"""Bits of the random number from which functions of a binary are counted."""


def key_numba_cpu(variant: NumbaCpuVariant[Any], workload: Workload, config: Config) -> str:
    """Return the cache key of what reaches Numba and LLVM for a configuration on this processor.

    Args:
        variant: The kernel variant.
        workload: The workload to compile for.
        config: A valid point of the variant's space.
    """
    import llvmlite
    import numba

    return binary_key(
        "numba-cpu 5",
        fingerprint_of(variant.kernel(workload, config)),
        str(_signature(variant, workload, config)),
        ",".join(sorted(variant.fastmath)),
        f"{sys.version_info[:2]} {numba.__version__} {llvmlite.__version__} {_processor()}",
    )


def fingerprint_of(value: Any) -> str:
    """Return a hash of Numba's input for a kernel: its bytecode and, recursively, all values it closes over.

    An intrinsic counts by the function that generates its code, a cached function by the function itself.
    The module name is part of the hash: compiled code finds its globals by that name, and the name of a
    user's file contains its path.
    """
    return _fingerprint(value, frozenset())


def _fingerprint(value: Any, callers: frozenset[int]) -> str:
    function = inspect.unwrap(getattr(value, "py_func", value))
    code = getattr(function, "__code__", None)
    if code is None:
        import numpy as np

        with np.printoptions(threshold=sys.maxsize, floatmode="unique"):  # every element, with all digits
            return repr(value)
    if id(function) in callers:  # it calls itself
        return str(function.__qualname__)
    options = getattr(value, "targetoptions", {})
    parts = [
        function.__module__,
        _code(code),
        *(f"{k}={sorted(v) if isinstance(v, set) else v}" for k, v in options.items()),
    ]
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    used = [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    for item in (*cells, *used):
        values = _named_values(item, code) if inspect.ismodule(item) else [item]
        parts += [_fingerprint(named, callers | {id(function)}) for named in values]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _named_values(module: ModuleType, code: CodeType) -> list[Any]:
    """Return the values of a user's module that code may name; the key has the versions of libraries."""
    if module.__name__.partition(".")[0] in {*sys.stdlib_module_names, "llvmlite", "numba", "numpy"}:
        return []
    named = (vars(module)[name] for name in code.co_names if name in vars(module))
    return [value for value in named if not inspect.ismodule(value)]


def _code(code: CodeType) -> str:
    constants = [_code(c) if inspect.iscode(c) else repr(c) for c in code.co_consts]
    return repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants))


_SETTINGS = {
    "OPT": 3,
    "LOOP_VECTORIZE": 1,
    "SLP_VECTORIZE": 0,
    "ENABLE_AVX": 1,
    "BOUNDSCHECK": 0,
    "DEBUGINFO_DEFAULT": 0,
    "DISABLE_INTEL_SVML": 0,
}
"""Settings of Numba that change machine code, and their defaults (`numba.core.config`)."""


@functools.cache
def _processor() -> str:
    from llvmlite import binding
    from numba.core import config

    host = f"{binding.get_host_cpu_name()} {binding.get_host_cpu_features().flatten()}"
    # Numba compiles for another processor, and in another way, if its environment variables say so.
    changed = [f"{name}={value}" for name, usual in _SETTINGS.items() if (value := _setting(name)) != usual]
    return " ".join(str(part) for part in (host, config.CPU_NAME, config.CPU_FEATURES, *changed) if part)


def _setting(name: str) -> int:
    from numba.core import config

    return int(getattr(config, name) or 0)


def _signature(variant: NumbaCpuVariant[Any], workload: Workload, config: Config) -> Any:
    import numba
    from numba import types

    stored = {"f32": types.float32, "f16": types.uint16, "bf16": types.uint16, "i32": types.int32}
    stored |= {"i64": types.int64, "bool": types.boolean, "i8": types.int8, "e4m3": types.uint8}
    tensors = variant.tensors(workload, config)
    kinds = []
    for argument in variant.arguments(workload, config):
        if isinstance(argument, Scalar):
            kinds.append(numba.typeof(argument.number()))
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

    Args:
        variant: The kernel variant.
        workload: The workload to compile for.
        config: A valid point of the variant's space.

    Raises:
        CompileError: Numba rejected the kernel; the message is shortened to 2000 characters.
    """
    from llvmlite import binding
    from numba.core import serialize

    dispatcher = _dispatcher(variant, workload, config)
    signature = _signature(variant, workload, config)
    key = key_numba_cpu(variant, workload, config)
    _compile(dispatcher, signature)
    result = dispatcher.overloads[signature.args]
    # Code with addresses of this process (ctypes functions) is useless in another process.
    portable = not result.library.has_dynamic_globals
    return Binary(
        key=key,
        language="numba-cpu",
        target=binding.get_host_cpu_name(),
        payload=serialize.dumps(result._reduce()) if portable else b"",
        entries=(dispatcher.py_func.__name__,),
        resources=Resources(code_bytes=len(result.library._get_compiled_object())),
    )


def _name_apart() -> None:
    """Give the functions compiled next symbols that no other binary has, not even one of the same kernel.

    Numba distinguishes functions of the same name by a counter that starts at the same value in each process.
    A process that loads two binaries with a symbol in common calls the function loaded first, in both. Two
    compilations of one kernel number its functions differently if one of them had to compile functions of
    Numba's own as well, so that equal symbols may be different functions.
    """
    from numba.core.bytecode import FunctionIdentity

    FunctionIdentity._unique_ids = itertools.count(secrets.randbits(_SYMBOL_BITS))


def _compile(dispatcher: Any, signature: Any) -> None:
    from numba.core import errors

    from tunebench.compile.numba_linking import linked_once

    _name_apart()
    codegen = dispatcher.targetctx.codegen()
    try:
        with warnings.catch_warnings(), linked_once(codegen, dispatcher.py_func.__qualname__):
            warnings.simplefilter("ignore", errors.NumbaWarning)  # advice to the author of the kernel
            dispatcher.compile(signature)
    except errors.NumbaError as error:
        raise CompileError(f"numba: {str(error).strip()[:2000]}") from error


def assembly_of_numba_cpu(variant: NumbaCpuVariant[Any], workload: Workload, config: Config) -> str:
    """Return the assembly that LLVM generates for one configuration on this processor.

    The kernel is compiled again: object code from the cache has no assembly text.

    Args:
        variant: The kernel variant.
        workload: The workload to compile for.
        config: A valid point of the variant's space.

    Raises:
        CompileError: Numba rejected the kernel.
    """
    dispatcher = _dispatcher(variant, workload, config)
    signature = _signature(variant, workload, config)
    _compile(dispatcher, signature)
    assembly: str = dispatcher.inspect_asm(signature.args)
    return assembly


def load_numba_cpu(
    binary: Binary, variant: NumbaCpuVariant[Any], workload: Workload, config: Config
) -> Callable[..., None]:
    """Return a callable function from a binary of `compile_numba_cpu`.

    A binary without payload contained addresses of the process that compiled it: it is compiled again here.

    Args:
        binary: The binary, compiled by this user: Numba can rebuild its machine code only by unpickling it.
        variant: The variant the binary was compiled from.
        workload: The workload it was compiled for.
        config: The configuration it was compiled for.

    Raises:
        CompileError: The binary had to be compiled here, and Numba rejected the kernel.
    """
    from numba.core.compiler import CompileResult

    dispatcher = _dispatcher(variant, workload, config)
    if binary.payload:
        dispatcher.targetctx.refresh()
        parts = pickle.loads(binary.payload)  # noqa: S301 - machine code of this user (see `BinaryCache`)
        dispatcher.add_overload(CompileResult._rebuild(dispatcher.targetctx, *parts))
    else:
        _compile(dispatcher, _signature(variant, workload, config))
    dispatcher.disable_compile()
    function: Callable[..., None] = dispatcher
    return function
