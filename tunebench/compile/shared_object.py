"""Shared objects of CPU kernels, which run without Numba.

The machine code is that of Numba's binary, so that results are the same bit for bit. It is linked with
definitions of what it calls of Numba: allocation by that of C, a status in place of Python's errors, and
threads by a table of functions that the loader fills. A shared object exports

- `tunebench_bind(table)`, called once: takes the addresses of the functions `THREADING`, in this order.
- `tunebench_run(constants, values)`: runs the kernel and returns 0, or another number if memory is short.
  `values` has 8 bytes for each argument: the address of an array, an integer, or a double. `constants` has
  64-bit integers for each array: number of elements, bytes of an element, shape, and strides in bytes.
"""

from __future__ import annotations

import pickle
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tunebench._child import find_program
from tunebench.binary.compiled import Binary, CompileError

__all__ = ["THREADING", "shared_object"]

THREADING = (
    "numba_parallel_for",
    "do_scheduling_signed",
    "do_scheduling_unsigned",
    "allocate_sched",
    "deallocate_sched",
    "get_num_threads",
    "get_thread_id",
    "set_parallel_chunksize",
    "get_parallel_chunksize",
    "get_sched_size",
)
"""Functions of Numba's threads that kernels call, in the order of the table."""

_ALLOCATION = """
declare ptr @malloc(i64)
declare void @free(ptr)
@tunebench_table = internal global ptr null
@tunebench_failed = internal global i32 0

define hidden ptr @NRT_MemInfo_alloc_aligned(i64 %bytes, i32 %align) {
  %wide = zext i32 %align to i64
  %room = add i64 %bytes, %wide
  %total = add i64 %room, 48
  %info = call ptr @malloc(i64 %total)
  %is_null = icmp eq ptr %info, null
  br i1 %is_null, label %end, label %fill
fill:
  store i64 1, ptr %info
  %begin = getelementptr i8, ptr %info, i64 48
  %address = ptrtoint ptr %begin to i64
  %rest = urem i64 %address, %wide
  %gap = sub i64 %wide, %rest
  %data = getelementptr i8, ptr %begin, i64 %gap
  %field = getelementptr i8, ptr %info, i64 24
  store ptr %data, ptr %field
  br label %end
end:
  ret ptr %info
}

define hidden void @NRT_MemInfo_call_dtor(ptr %info) {
  call void @free(ptr %info)
  ret void
}

define void @tunebench_bind(ptr %table) {
  store ptr %table, ptr @tunebench_table
  ret void
}
"""
"""Numba's allocations have a header: references at byte 0, the address at byte 24 (`nrt.cpp` of Numba)."""

_DEFINED = frozenset({"NRT_MemInfo_alloc_aligned", "NRT_MemInfo_call_dtor"})
_LOCK = re.compile(r"numba_gil_\w+|PyEval_(?:Save|Restore)Thread")
_OF_PYTHON = re.compile(r"_?Py\w+|numba_\w+|NRT_\w+|printf")
_DECLARATION = re.compile(r"declare (?P<result>.*?)@\w+\((?P<arguments>.*?)\)(?: |$)")
_EXPORTS = "{ global: tunebench_bind; tunebench_run; local: *; };"


def shared_object(binary: Binary) -> bytes:
    """Return the shared object of a kernel.

    Args:
        binary: Binary of `compile_numba_cpu`, compiled by this user: it is unpickled.

    Raises:
        CompileError: The kernel calls what exists in Numba only, or the linker is missing or fails.
    """
    from llvmlite import binding

    (_, _, (code, bitcode)), described, *_ = pickle.loads(binary.payload)  # noqa: S301 - (see `BinaryCache`)
    module = binding.parse_bitcode(bitcode)
    types = [str(argument.type) for argument in module.get_function(described.llvm_func_name).arguments]
    parts = [
        f'target triple = "{module.triple}"',
        _ALLOCATION,
        *_definitions(module),
        _entry(described, types),
    ]
    try:
        runtime = binding.parse_assembly("\n".join(parts))
        runtime.verify()
    except RuntimeError as error:
        raise CompileError(f"no shared object of {described.qualname}: {str(error)[:500]}") from error
    machine = binding.Target.from_triple(module.triple).create_target_machine(reloc="pic", codemodel="small")
    return _linked(code, machine.emit_object(runtime))


def _definitions(module: Any) -> Iterator[str]:
    """Yield definitions of the functions and variables that a module expects from Numba and Python."""
    for variable in module.global_variables:
        if variable.is_declaration and _OF_PYTHON.fullmatch(variable.name):
            yield f"@{variable.name} = hidden global i64 0"
    for function in module.functions:
        if not function.is_declaration or function.name in _DEFINED:
            continue
        define = _from_table if function.name in THREADING else _stub
        if define is _stub and not _OF_PYTHON.fullmatch(function.name):
            continue
        text = next(line for line in str(function).splitlines() if line.startswith("declare"))
        declaration = _DECLARATION.match(text)
        assert declaration is not None, text
        arguments = [part.split()[0] for part in declaration["arguments"].split(",") if part.strip()]
        yield define(function.name, declaration["result"].split()[-1], arguments)


def _from_table(name: str, result: str, types: Sequence[str]) -> str:
    """Return the definition of a function that calls one of the table."""
    values = ", ".join(f"{kind} %{index}" for index, kind in enumerate(types))
    assigned, returned = ("", "void") if result == "void" else ("%result = ", f"{result} %result")
    return f"""define hidden {result} @{name}({values}) {{
  %table = load ptr, ptr @tunebench_table
  %slot = getelementptr ptr, ptr %table, i64 {THREADING.index(name)}
  %function = load ptr, ptr %slot
  {assigned}call {result} %function({values})
  ret {returned}
}}"""


def _stub(name: str, result: str, types: Sequence[str]) -> str:
    """Return the definition of a function of Python's, which is called to take the lock or after an error."""
    body = "" if _LOCK.fullmatch(name) else "  store atomic i32 1, ptr @tunebench_failed monotonic, align 4\n"
    returned = "void" if result == "void" else f"{result} zeroinitializer"
    return f"define hidden {result} @{name}({', '.join(types)}) {{\n{body}  ret {returned}\n}}"


def _entry(described: Any, types: Sequence[str]) -> str:
    """Return the definition of `tunebench_run`."""
    lines, passed = [], ["ptr %result", "ptr %error"]
    remaining = iter(types[2:])
    constant = 0
    for index, argument in enumerate(described.argtypes):
        lines.append(f"  %at{index} = getelementptr i64, ptr %values, i64 {index}")
        rank = getattr(argument, "ndim", 0)
        if not rank:
            kind = next(remaining)
            lines += _number(index, kind)
            passed.append(f"{kind} %value{index}")
            continue
        lines.append(f"  %value{index} = load ptr, ptr %at{index}")
        fields = [next(remaining) for _ in range(5 + 2 * rank)]
        assert fields == ["ptr", "ptr", "i64", "i64", "ptr", *["i64"] * 2 * rank], fields
        names = [f"%field{constant + offset}" for offset in range(2 + 2 * rank)]
        for offset, name in enumerate(names):
            lines.append(f"  {name}a = getelementptr i64, ptr %constants, i64 {constant + offset}")
            lines.append(f"  {name} = load i64, ptr {name}a")
        constant += len(names)
        passed += ["ptr null", "ptr null", f"i64 {names[0]}", f"i64 {names[1]}", f"ptr %value{index}"]
        passed += [f"i64 {name}" for name in names[2:]]
    declared, passed_text = ", ".join(types), ", ".join(passed)
    name = described.llvm_func_name
    return _ENTRY.format(loads="\n".join(lines), name=name, declared=declared, passed=passed_text)


_ENTRY = """
declare i32 @"{name}"({declared})

define i32 @tunebench_run(ptr %constants, ptr %values) {{
  %result = alloca ptr
  %error = alloca ptr
  store ptr null, ptr %error
{loads}
  %status = call i32 @"{name}"({passed})
  %failed = load atomic i32, ptr @tunebench_failed monotonic, align 4
  %both = or i32 %status, %failed
  ret i32 %both
}}
"""


def _number(index: int, kind: str) -> Iterator[str]:
    """Yield the lines that read a number."""
    if kind in ("float", "double"):
        wide = f"%value{index}" if kind == "double" else f"%wide{index}"
        yield f"  {wide} = load double, ptr %at{index}"
        if kind == "float":
            yield f"  %value{index} = fptrunc double {wide} to float"
    else:
        wide = f"%value{index}" if kind == "i64" else f"%wide{index}"
        yield f"  {wide} = load i64, ptr %at{index}"
        if kind != "i64":
            yield f"  %value{index} = trunc i64 {wide} to {kind}"


def _linked(*objects: bytes) -> bytes:
    """Return the shared object of relocatable objects, linked with libraries of C only."""
    linker = find_program("ld")
    if linker is None:
        raise CompileError("no shared object without the linker `ld`: install binutils")
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{index}.o" for index in range(len(objects))]
        for name, content in zip(names, objects, strict=True):
            Path(folder, name).write_bytes(content)
        Path(folder, "exports").write_text(_EXPORTS, encoding="ascii")
        # Numba's code has absolute addresses, which the loader writes into it.
        command = [linker, "-shared", "--no-undefined", "--strip-all", "-z", "notext", "-z", "now"]
        command += ["-z", "noexecstack", "--version-script=exports", "-o", "kernel.so", *names]
        command += ["-l:libm.so.6", "-l:libc.so.6"]
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if run.returncode:
            raise CompileError(f"no shared object: {run.stderr.strip()[:500]}")
        return Path(folder, "kernel.so").read_bytes()
