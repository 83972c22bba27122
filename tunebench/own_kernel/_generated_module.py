"""The module that is generated from a description: an operator, a variant, and the user's functions."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import io
import itertools
import keyword
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.errors import InputError, UnknownName, quoted
from tunebench.own_kernel._portable import Portable, portable
from tunebench.own_kernel._source import Language, operator_name, read_source
from tunebench.own_kernel.argument import ROLES, Argument, array_of, check_range
from tunebench.own_kernel.reference_kernel import ReferenceKernel
from tunebench.own_kernel.triton_text import triton_module
from tunebench.variant import TRITON_OPTIONS, Scalar
from tunebench.workload import Workload

if TYPE_CHECKING:
    from tunebench.own_kernel.description import KernelDescription
    from tunebench.workload import Array

__all__ = ["GeneratedModule"]

_BASES: Mapping[Language, str] = {
    "cuda": "OwnCudaKernel",
    "binary": "OwnBinaryKernel",
    "numba-cpu": "OwnNumbaKernel",
    "numba-cuda": "OwnNumbaCudaKernel",
    "triton": "OwnTritonKernel",
    "library-cpu": "OwnFunction",
}
_BLOCK_NAMES = (
    ("block",),
    ("block_x", "block_y", "block_z"),
    ("block_size_x", "block_size_y", "block_size_z"),
)
"""Parameters that are the threads of a block if the caller does not state the block."""


class GeneratedModule:
    """The text of a generated module, from a checked description."""

    def __init__(self, given: KernelDescription) -> None:
        self.given = given
        self.files: dict[str, bytes] = {}
        self.language, self.code, self.entry = read_source(given)
        self.operator = operator_name(given.label or self.entry)
        self.space = _space(given.space)
        self.sizes = _sizes(given.args, self.space)
        self.arguments = tuple(self._argument(name, value) for name, value in self._ordered().items())
        if not any(argument.role in ("output", "inout") for argument in self.arguments):
            raise InputError(f"{self.operator} has no Output or InOut argument: nothing could be verified")
        self._dimensions = {a.dimension: a for a in self.arguments if a.dimension is not None}
        for name in given.emulate:
            if name not in self.sizes:
                raise UnknownName(
                    "size in emulate", name, self.sizes, "Sizes are whole-number arguments of the kernel."
                )

    def _ordered(self) -> Mapping[str, Any]:
        """Return the arguments; of a function, in its order, after checking its names."""
        if self.language in ("cuda", "binary"):
            return self.given.args
        names = _signature(self.code)
        optional, options = self._not_in_signature()
        for name in names:
            if name not in self.given.args and name not in self.space and name not in optional:
                raise InputError(
                    f"{self.operator} takes {name}, which is neither in args ({', '.join(self.given.args)}) "
                    f"nor in space ({', '.join(self.space)})"
                )
        for name in (*self.given.args, *self.space):
            if name not in names and name not in options:
                raise UnknownName(f"argument of {self.operator}", name, [*names, *options])
        return {name: self.given.args[name] for name in names if name in self.given.args}

    def _not_in_signature(self) -> tuple[set[str], Collection[str]]:
        """Return arguments that may be missing, and parameters that are no arguments; for Triton only."""
        if self.language != "triton":
            return set(), ()
        defaults = self.code.__defaults__ or ()
        names = _signature(self.code)
        return {*names[len(names) - len(defaults) :]}, TRITON_OPTIONS

    def _argument(self, name: str, value: Any) -> Argument:
        if name in self.sizes:
            wide = _ctype(value) == "long long"
            return Argument(name=name, role="size", dtype="i64" if wide else "i32", dimension=_field(name))
        number = value.value if isinstance(value, Scalar) else value
        if isinstance(number, int | float | np.generic):
            return Argument(name=name, role="number", dtype="f32", value=float(number))
        array, shape, dtype = array_of(value, name)
        extents = tuple(self._extent(name, extent) for extent in shape)
        argument = Argument(
            name=name,
            role=ROLES.get(type(value), "input"),
            dtype=dtype,
            shape=extents,
            dimension=None if any(isinstance(e, str) for e in extents) else self._shared(extents, name),
            file=None if array is None else self._saved(array),
            low=getattr(value, "low", None),
            high=getattr(value, "high", None),
            partly=getattr(value, "partly", False),
        )
        check_range(argument)
        return argument

    def _extent(self, name: str, extent: int | str) -> int | str:
        """Return an extent; a number that is the value of exactly one size becomes its name."""
        if isinstance(extent, str):
            portable(extent, f"shape of {name}", self.sizes, {})
            return extent
        equal = [size for size, value in self.sizes.items() if value == extent]
        return equal[0] if len(equal) == 1 else extent

    def _shared(self, shape: tuple[int | str, ...], name: str) -> str:
        """Return the dimension of a shape: that of the first array with it."""
        shapes: dict[tuple[int | str, ...], str] = self.__dict__.setdefault("_shapes", {})
        return shapes.setdefault(shape, _field(name))

    def _saved(self, array: Array) -> str:
        stream = io.BytesIO()
        np.save(stream, array.view(f"u{array.dtype.itemsize}"), allow_pickle=False)
        name = f"{hashlib.sha256(stream.getvalue()).hexdigest()[:16]}.npy"
        self.files[name] = stream.getvalue()
        return name

    @property
    def workload(self) -> str:
        """Text of the workload: the kernel and its sizes."""
        parts = []
        for dimension, argument in self._dimensions.items():
            extents = "x".join(map(str, argument.shape))
            parts.append(f"{dimension}={self.sizes[argument.name] if argument.role == 'size' else extents}")
        return f"{self.operator}:{','.join(dict.fromkeys(parts))}"

    # -- text ---------------------------------------------------------------------------------------------

    def text(self) -> str:
        """Return the module."""
        functions: dict[str, Portable] = {}
        operator = self._operator_lines(functions)
        kernel = [*self._kernel_lines(functions), *self._reference_lines(functions)]
        defined = "\n\n".join(function.written(name) for name, function in functions.items())
        return "\n".join(
            [
                f'"""The kernel {self.operator} as `tunebench.tune_kernel` got it; generated."""',
                "",
                "from dataclasses import dataclass",
                "from typing import Annotated, Any, ClassVar",
                "",
                "from tunebench.own_kernel.argument import Argument",
                "from tunebench.own_kernel.operator import Expected, OwnOperator",
                f"from tunebench.own_kernel.variant import {_BASES[self.language]}, by_row",
                "from tunebench.space import Parameter, Space",
                "from tunebench.workload import AtLeast",
                "\n",
                defined,
                "",
                *operator,
                "\n",
                *kernel,
                "\n",
                "VARIANT = Kernel()\n",
            ]
        )

    def _call(self, functions: dict[str, Portable], name: str, value: Any, names: Sequence[str]) -> str:
        """Return the text of a function with the names of its arguments, and add its definition."""
        if isinstance(value, int | tuple | list):
            value = repr(value)
        function = portable(value, name.strip("_"), names, self.sizes)
        functions[name] = function
        return f"({function.arguments!r}, {name}())"

    def _operator_lines(self, functions: dict[str, Portable]) -> list[str]:
        fields = [
            f"    {name}: Annotated[int, AtLeast(-(2**31))]"
            if a.role == "size"
            else f'    {name}: Annotated[str, "shape"]'
            for name, a in self._dimensions.items()
        ]
        lines = [
            "@dataclass(frozen=True, kw_only=True)",
            "class Operator(OwnOperator):",
            f"    operator: ClassVar[str] = {self.operator!r}",
            "    kernel_arguments: ClassVar[Any] = (",
            *(f"        {argument.written()}," for argument in self.arguments),
            "    )",
            f"    expected: ClassVar[Any] = {self._expected(functions)}",
        ]
        if self.given.flops is not None:
            call = self._call(functions, "_flops", self.given.flops, tuple(self.sizes))
            lines.append(f"    declared_flops: ClassVar[Any] = {call}")
        return [*lines, *dict.fromkeys(fields)]

    def _expected(self, functions: dict[str, Portable]) -> str:
        """Return the text of the reference and the tolerance."""
        tolerance = f"tolerance={self.given.tolerance!r}"
        reference = self.given.reference
        if reference is None:
            return f"Expected({tolerance})"
        if isinstance(reference, ReferenceKernel):
            return f"Expected(by_kernel=True, {tolerance})"
        if isinstance(reference, Mapping) or hasattr(reference, "dtype"):
            return f"Expected({self._arrays(functions, reference)}, {tolerance})"
        names = [a.name for a in self.arguments if a.role in ("input", "inout", "size", "number")]
        function = portable(reference, "reference", names, self.sizes)
        functions["_reference"] = function
        return f"Expected(compute=_reference(), arguments={function.arguments!r}, {tolerance})"

    def _arrays(self, functions: dict[str, Portable], reference: Any) -> str:
        """Return the text of a reference that is given as arrays; its inputs must be, too."""
        drawn = [a.name for a in self.arguments if a.role in ("input", "inout") and a.file is None]
        if drawn:
            raise InputError(
                f"a reference of arrays needs arrays as inputs, and {', '.join(drawn)} would be drawn at "
                "random"
            )
        results = [argument.name for argument in self.arguments if argument.role in ("output", "inout")]
        by_name = reference if isinstance(reference, Mapping) else {results[0]: reference}
        for name in by_name:
            if name not in results:
                raise UnknownName("output in reference", name, results)
        files = {name: self._saved_number(np.asarray(value)) for name, value in by_name.items()}
        body = [
            "import numpy, pathlib",
            "folder = pathlib.Path(__file__).parent",
            f"return lambda: {{name: numpy.load(folder / file) for name, file in {files!r}.items()}}",
        ]
        functions["_reference"] = Portable(arguments=(), body="\n".join(body))
        return "compute=_reference()"

    def _saved_number(self, array: Any) -> str:
        stream = io.BytesIO()
        np.save(stream, array.astype(np.float64), allow_pickle=False)
        name = f"{hashlib.sha256(stream.getvalue()).hexdigest()[:16]}.npy"
        self.files[name] = stream.getvalue()
        return name

    def _kernel_lines(self, functions: dict[str, Portable]) -> list[str]:
        names = (*self.space, *self.sizes)
        parameters = (f"Parameter({name!r}, {values!r}, {name!r})," for name, values in self.space.items())
        lines = [
            f"class Kernel({_BASES[self.language]}):",
            f"    name = {self.language.replace('-', '_').replace('library', 'function')!r}",
            "    operator = Operator",
            '    digest = "DIGEST"',
            f"    given_default = {self._default()!r}",
            "    space = Space(",
            f"        ({' '.join(parameters)}),",
            f"        ({''.join(self._constraints(functions, names))}),",
            "    )",
        ]
        if self.language in ("cuda", "binary", "numba-cuda", "triton"):
            parts = _launch(self.given, self.operator, self.space, threads=self.language != "triton")
            for attribute, value in parts.items():
                lines.append(f"    {attribute} = {self._call(functions, f'_{attribute[:-3]}', value, names)}")
            lines.append(f"    emulated_sizes = {dict(self.given.emulate)!r}")
        if self.language == "triton":
            return [*lines, *self._triton()]
        if self.language == "binary":
            return [*lines, f"    entry = {self.entry!r}", f"    files = {self._binaries()}"]
        if self.language == "cuda":
            flags = self._call(functions, "_flags", self.given.flags, names)
            return [
                *lines,
                f"    entry = {self.entry!r}",
                f"    text = {self.code!r}",
                f"    flags_of = {flags}",
            ]
        return [*lines, *self._function(functions)]

    def _binaries(self) -> str:
        """Return the text of the files of a compiled kernel, by the parameters in the name of the file."""
        path = str(self.code)
        names = tuple(name for name in self.space if f"{{{name}}}" in path)
        files = {}
        for values in itertools.product(*(self.space[name] for name in names)):
            file = Path(functools.reduce(_filled, zip(names, values, strict=True), path))
            if not file.is_file():
                raise InputError(f"compiled kernel {file} does not exist")
            data = file.read_bytes()
            stored = f"{hashlib.sha256(data).hexdigest()[:16]}{file.suffix}"
            self.files[stored] = data
            files[values] = stored
        return f"({names!r}, {files!r})"

    def _reference_lines(self, functions: dict[str, Portable]) -> list[str]:
        """Return the class of a reference that is another kernel."""
        reference = self.given.reference
        if not isinstance(reference, ReferenceKernel):
            return []
        given = dataclasses.replace(
            self.given,
            source=reference.source,
            name=reference.name,
            grid=reference.grid,
            block=reference.block,
            smem_bytes=reference.smem_bytes,
        )
        language, code, entry = read_source(given)
        if self.language != "cuda" or language != "cuda":
            raise InputError(
                "a ReferenceKernel is CUDA C++, for a kernel in CUDA C++; use a function otherwise"
            )
        names = (*reference.parameters, *self.sizes)
        launch = _launch(given, self.operator, reference.parameters)
        return [
            "\n",
            "class Reference(OwnCudaKernel):",
            "    name = 'reference'",
            "    operator = Operator",
            "    space = Kernel.space",
            f"    given_default = {dict(reference.parameters)!r}",
            *(
                f"    {attribute} = {self._call(functions, f'_reference_{attribute[:-3]}', value, names)}"
                for attribute, value in launch.items()
            ),
            f"    entry = {entry!r}",
            f"    text = {code!r}",
            *(["    flags_of = Kernel.flags_of"] if isinstance(self.given.flags, list | tuple) else []),
        ]

    def _function(self, functions: dict[str, Portable]) -> list[str]:
        """Return the attributes of a kernel in Python, whose parameters and numbers become constants."""
        if self.language == "library-cpu":
            names = (*(argument.name for argument in self.arguments), *self.space)
            function = portable(self.code, "kernel", names, {})
            functions["_kernel"] = function
            return [f"    function_of = ({function.arguments!r}, _kernel())"]
        numbers = tuple(argument.name for argument in self.arguments if argument.role == "number")
        constants = (*self.space, *numbers)
        every = tuple(argument.name for argument in self.arguments)
        on_cpu = self.language == "numba-cpu"
        changed = [a.name for a in self.arguments if a.role == "inout" and on_cpu]
        function = portable(self.code, "kernel", (*every, *self.space), {}, constants, changed)
        inner = function.written("_inner").rstrip()
        inner = textwrap.indent(f"{inner}\nreturn _inner()", "    ")
        body = f"def outer({', '.join(constants)}):\n{inner}\nreturn outer"
        functions["_kernel"] = Portable(arguments=constants, body=body)
        order = tuple(name for name in every if name not in numbers)
        return [f"    function_of = ({constants!r}, _kernel())", f"    order = {order!r}"]

    def _triton(self) -> list[str]:
        """Return the attributes of a kernel in Triton.

        Raises:
            InputError: A parameter is no compile-time constant.
        """
        text = triton_module(self.code, "kernel")
        (kernel,) = (
            node
            for node in ast.parse(text).body
            if isinstance(node, ast.FunctionDef) and node.name == self.entry
        )
        written = (*kernel.args.posonlyargs, *kernel.args.args, *kernel.args.kwonlyargs)
        constant = {a.arg for a in written if a.annotation and "constexpr" in ast.unparse(a.annotation)}
        for name in self.space:
            if name not in constant and name not in TRITON_OPTIONS:
                raise InputError(f"parameter {name} must be annotated in {self.entry}: {name}: tl.constexpr")
        passed = (*(argument.name for argument in self.arguments), *self.space)
        arrays = {a.name for a in self.arguments if a.role not in ("size", "number")}
        if wrong := arrays & constant:
            raise InputError(f"{self.entry}: the array {wrong.pop()} cannot be a tl.constexpr")
        return [
            f"    entry = {self.entry!r}",
            f"    text = {text!r}",
            f"    order = {tuple(a.name for a in self.arguments if a.name not in constant)!r}",
            f"    constant_names = {tuple(name for name in passed if name in constant)!r}",
        ]

    def _constraints(self, functions: dict[str, Portable], names: Sequence[str]) -> list[str]:
        constraints = self.given.constraints
        if isinstance(constraints, str) or callable(constraints):
            constraints = (constraints,)
        texts = []
        for number, constraint in enumerate(constraints):
            function = portable(constraint, f"constraint {number + 1}", names, self.sizes)
            functions[f"_constraint_{number}"] = function
            used = tuple(name for name in function.arguments if name in self.space)
            if not used:
                raise InputError(
                    f"constraint {number + 1} uses no parameter; they are: {', '.join(self.space)}"
                )
            texts.append(f"by_row(_constraint_{number}(), {used!r}), ")
        return texts

    def _default(self) -> dict[str, Any] | None:
        given = self.given.default
        if given is None:
            return None
        for name in given:
            if name not in self.space:
                raise UnknownName("parameter in default", name, self.space)
        return {name: given.get(name, values[0]) for name, values in self.space.items()}


def _launch(
    given: KernelDescription, operator: str, parameters: Mapping[str, Any], *, threads: bool = True
) -> dict[str, Any]:
    """Return grid, and threads and shared memory if they are given, by attribute of the variant."""
    if given.grid is None:
        raise InputError(f"{operator} needs grid: blocks in x, y, z as a function of parameters and sizes")
    block = given.block
    if not threads:
        if block is not None or given.smem_bytes:
            raise InputError("Triton decides threads and shared memory: leave block and smem_bytes out")
        return {"grid_of": given.grid}
    if block is None:
        named = next((names for names in _BLOCK_NAMES if names[0] in parameters), None)
        if named is None:
            raise InputError(
                f"{operator} needs block: threads as a function of parameters, or a parameter named "
                f"block, block_x or block_size_x; got {', '.join(parameters)}"
            )
        block = "(" + "".join(f"{name}, " for name in named if name in parameters) + ")"
    return {"grid_of": given.grid, "block_of": block, "smem_of": given.smem_bytes}


def _filled(path: str, parameter: tuple[str, Any]) -> str:
    """Return a path with the value of a parameter in place of its name in braces."""
    name, value = parameter
    return path.replace(f"{{{name}}}", str(value))


# -- checks -----------------------------------------------------------------------------------------------


def _space(space: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    parameters = {}
    for name, values in space.items():
        if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
            raise InputError(
                f"parameter {name} must be a list of values, such as [{values!r}]; got {values!r}"
            )
        items = values.tolist() if hasattr(values, "tolist") else list(values)
        plain = tuple(item.item() if hasattr(item, "item") else item for item in items)
        wrong = [item for item in plain if not isinstance(item, int | float | str)]
        if wrong:
            raise InputError(f"parameter {name}: values must be numbers or text, got {quoted(wrong[0])}")
        parameters[name] = plain
    if not any(len(values) > 1 for values in parameters.values()):
        raise InputError(
            "space has a single configuration: give at least one parameter two values or more, such as "
            'space={"block": [64, 128, 256]}'
        )
    return parameters


def _sizes(args: Mapping[str, Any], space: Mapping[str, Any]) -> dict[str, int]:
    """Return the whole-number arguments by name, after checking the names of all."""
    sizes = {}
    for name, value in args.items():
        if not name.isidentifier() or keyword.iskeyword(name):
            raise InputError(f"argument {quoted(name)} must have a Python identifier as its name")
        if name in space:
            raise InputError(f"{name} is an argument and a parameter; use another name for one of them")
        number = value.value if isinstance(value, Scalar) else value
        if isinstance(number, bool):
            raise InputError(f"argument {name} is {number}: pass 0 or 1, or use a parameter")
        if isinstance(number, int | np.integer):
            if not -(2**31) <= int(number) < 2**31:
                raise InputError(f"argument {name} must be a 32-bit number, got {number}")
            if not (isinstance(value, Scalar) and value.ctype == "float"):
                sizes[name] = int(number)
        elif isinstance(value, str) or value is None:
            raise InputError(
                f"argument {name} must be Input, Output, InOut, Scratch, an array or a number, got {value!r}"
            )
    return sizes


def _ctype(value: Any) -> str:
    if isinstance(value, Scalar):
        return value.ctype
    return "long long" if isinstance(value, np.integer) and value.dtype.itemsize == 8 else "int"


def _field(name: str) -> str:
    """Return the dimension for an argument: its name, unless workloads use that for something else."""
    return (
        f"{name}_" if hasattr(Workload, name) or name in ("dtype", "operator", "sizes", "expected") else name
    )


def _signature(function: FunctionType) -> tuple[str, ...]:
    code = function.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
