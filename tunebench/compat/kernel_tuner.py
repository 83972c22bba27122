"""Kernel Tuner's `tune_kernel` and `run_kernel`, for scripts that were written for it.

    from tunebench.compat.kernel_tuner import tune_kernel

The arguments have Kernel Tuner's names and meanings. Roles of arrays follow from the source: a `const`
pointer is an input; any other one is an output if the kernel only assigns its elements and it starts with
zeros, and else an array that is restored before each launch. Arguments without a counterpart are refused.

Source: https://kerneltuner.github.io/kernel_tuner/stable/user-api.html.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tunebench import kernels
from tunebench._lazy import np
from tunebench.db import open_store
from tunebench.db.record import Record
from tunebench.device import Device
from tunebench.device import find as find_device
from tunebench.emulate.emulator import emulate
from tunebench.errors import InputError
from tunebench.outcome import CompileFailed, Measured, Predicted
from tunebench.own_kernel import InOut, Input, KernelDescription, Output
from tunebench.own_kernel.foreign import OfMapping, block_of, device_flags, grid_of, with_constants
from tunebench.space import Config
from tunebench.tuning import Plan
from tunebench.tuning.own_kernel import tune_kernel as _tune_kernel

__all__ = [
    "CompilationFailedConfig",
    "ErrorConfig",
    "InvalidConfig",
    "RuntimeFailedConfig",
    "run_kernel",
    "tune_kernel",
]

_BLOCK_NAMES = ("block_size_x", "block_size_y", "block_size_z")
_RTOL = 1e-5
"""Relative tolerance that `numpy.allclose` adds to `atol`."""

_IGNORED = {"verbose", "quiet", "log", "iterations", "platform", "compiler"}
"""Arguments that change no result: the samples of a configuration follow from their spread."""


class ErrorConfig(str):
    """In place of a time: the configuration failed."""

    __slots__ = ()

    def __new__(cls) -> ErrorConfig:
        """Return the name of the failure."""
        return str.__new__(cls, cls.__name__)


class InvalidConfig(ErrorConfig):
    """The configuration had a wrong result, or cannot run."""


class CompilationFailedConfig(ErrorConfig):
    """The configuration did not compile."""


class RuntimeFailedConfig(ErrorConfig):
    """The configuration failed while it ran."""


def tune_kernel(
    kernel_name: str,
    kernel_source: Any,
    problem_size: Any,
    arguments: Sequence[Any],
    tune_params: Mapping[str, Sequence[Any]],
    *,
    answer: Sequence[Any] | None = None,
    atol: float = 1e-6,
    metrics: Mapping[str, Any] | None = None,
    strategy: str | None = None,
    strategy_options: Mapping[str, Any] | None = None,
    cache: str | Path | None = None,
    device: int = 0,
    arch: str | None = None,
    db: str | Path | None = None,
    **options: Any,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Tune a kernel as Kernel Tuner's `tune_kernel` does.

    Args:
        kernel_name: Name of the kernel.
        kernel_source: CUDA C++ as text, or a path.
        problem_size: Extents of the problem: numbers, expressions, or a function of the parameters.
        arguments: NumPy arrays and numbers in the order of the kernel.
        tune_params: Values of each parameter.
        answer: Right contents of the arrays, None for each argument that is not compared.
        atol: Largest absolute error, beside a relative one of 1e-5, of the largest value of `answer`.
        metrics: Functions of a result, or expressions of its fields, by name.
        strategy: ``"brute_force"`` (default) tries all configurations, ``"random_sample"`` random ones; any
            other name selects the default sampler.
        strategy_options: `max_fevals`, `fraction`, `time_limit` in seconds.
        cache: File beside which the database is kept, with the suffix ``.db``.
        device: Number of the GPU.
        arch: Architecture, such as ``"sm_90"``, of a GPU that need not be present; an addition.
        db: Database, if `cache` is not given; an addition.
        options: `grid_div_x`, `grid_div_y`, `grid_div_z`, `block_size_names`, `restrictions`, `smem_args`,
            `cmem_args`, `compiler_options`, `defines`, `lang` and `seed`.

    Returns:
        A result for each configuration that was tried (its parameters, `time` in milliseconds, `times`,
        metrics, times of each phase), and a dictionary with the device and `best_config`.

    Raises:
        InputError: An argument has no counterpart, or is malformed.
        TunebenchError: As `tunebench.tune_kernel`.
    """
    request = _Request(kernel_name, kernel_source, problem_size, arguments, tune_params, options)
    description = request.description(answer, atol)
    where: dict[str, Any] = {"arch": arch} if arch is not None else {"device": f"cuda:{device}"}
    database = Path(cache).with_suffix(".db") if cache is not None else db
    plan = _plan(request, strategy, dict(strategy_options or {}), options.get("seed"))
    tuned = _tune_kernel(**_fields(description), **where, db=database, plan=plan)
    target = find_device(arch) if arch is not None else find_device(where["device"])
    results = _results(tuned.workload, target, database, metrics or {})
    timed = [result for result in results if not isinstance(result["time"], ErrorConfig)]
    environment = {
        "device_name": target.name,
        "compute_capability": target.architecture.removeprefix("sm_"),
        "compiler_options": list(options.get("compiler_options") or ()),
        "best_config": min(timed, key=lambda result: result["time"], default={}),
        "workload": tuned.workload,
        "verified": tuned.verified,
        "report": tuned.report,
    }
    return results, environment


def run_kernel(
    kernel_name: str,
    kernel_source: Any,
    problem_size: Any,
    arguments: Sequence[Any],
    params: Mapping[str, Any],
    **options: Any,
) -> list[Any]:
    """Run a kernel once on the processor, by emulation, as a reference or to try it.

    Args:
        kernel_name: As for `tune_kernel`.
        kernel_source: As for `tune_kernel`.
        problem_size: As for `tune_kernel`.
        arguments: As for `tune_kernel`.
        params: Value of each parameter.
        options: As for `tune_kernel`.

    Returns:
        The arguments after the run.

    Raises:
        InputError: As `tune_kernel`.
        NotEmulated: The kernel uses what the emulator lacks.
    """
    space = {name: [value] for name, value in params.items()}
    request = _Request(kernel_name, kernel_source, problem_size, arguments, space, options)
    description = dataclasses.replace(
        request.description(None, 0.0),
        space={**space, "tunebench_run": [0, 1]},  # a space has a choice
    )
    workload: Any
    variant: Any
    workload, variant = description.load()
    inputs = {
        argument.name: workload.draw_by_rule(tensor, np.random.default_rng(0))
        for argument, tensor in zip(
            [a for a in workload.kernel_arguments if a.role in ("input", "inout")],
            workload.inputs(),
            strict=True,
        )
    }
    outputs = emulate(variant, workload, Config({**params, "tunebench_run": 0}), inputs)
    results = []
    for argument, given in zip(workload.kernel_arguments, arguments, strict=True):
        computed = outputs.get(argument.result)
        results.append(given if computed is None else computed.view(given.dtype).reshape(given.shape))
    return results


# -- the description ----------------------------------------------------------------------------------------


class _Parameter(NamedTuple):
    """A parameter of the kernel's signature."""

    name: str
    is_pointer: bool
    is_const: bool


class _Request:
    """Kernel Tuner's arguments, checked."""

    def __init__(
        self,
        name: str,
        source: Any,
        problem_size: Any,
        arguments: Sequence[Any],
        space: Mapping[str, Sequence[Any]],
        options: Mapping[str, Any],
    ) -> None:
        self.name, self.problem_size, self.arguments, self.options = name, problem_size, arguments, options
        self.space = {key: list(values) for key, values in space.items()}
        for option, value in options.items():
            if option not in _IGNORED and option not in _OPTIONS and value not in (None, False):
                raise InputError(
                    f"{option}= has no counterpart here; known: {', '.join(sorted(_OPTIONS))}. See "
                    "docs/guide/kernel-tuner.md"
                )
        if str(options.get("lang") or "CUDA").upper() not in ("CUDA", "CUPY", "NVCUDA"):
            raise InputError(f"lang={options['lang']!r} is not supported: tunebench compiles CUDA C++")
        text, self.includes = _text_of(source)
        constants = options.get("cmem_args") or {}
        self.source = with_constants(text, {key: np.asarray(value) for key, value in constants.items()})

    @property
    def block_names(self) -> tuple[str, ...]:
        return tuple(self.options.get("block_size_names") or _BLOCK_NAMES)

    def description(self, answer: Sequence[Any] | None, atol: float) -> KernelDescription:
        """Return the description of the kernel."""
        args = self._args(answer)
        divisors = [self.options.get(f"grid_div_{axis}") for axis in "xyz"]
        right = self._right(args, answer)
        return KernelDescription(
            source=self.source,
            name=self._entry(),
            args=args,
            space=self.space,
            grid=grid_of(self.problem_size, divisors, self.block_names, tuple(self.space)),
            block=block_of(self.block_names, tuple(self.space)),
            constraints=_restrictions(self.options.get("restrictions")),
            reference=right or None,
            tolerance=_tolerance(right, atol) if right else None,
            smem_bytes=self._smem_bytes(),
            flags=self._flags(),
            includes=self.includes,
        )

    def _entry(self) -> str:
        """Return the kernel; parameters of a template that are parameters of the space instantiate it."""
        pattern = rf"template\s*<([^>]*)>\s*__global__[^{{;]*?\b{re.escape(self.name)}\s*\("
        template = re.search(pattern, self.source)
        if "<" in self.name or template is None:
            return self.name
        names = [item.split()[-1] for item in template[1].split(",")]
        if any(name not in self.space for name in names):
            raise InputError(f"{self.name} is a template of {', '.join(names)}; all must be in tune_params")
        return f"{self.name}<{', '.join(names)}>"

    def _args(self, answer: Sequence[Any] | None) -> dict[str, Any]:
        parameters = _signature(self.source, self.name.partition("<")[0])
        if len(parameters) != len(self.arguments):
            names = ", ".join(parameter.name for parameter in parameters)
            raise InputError(
                f"{self.name} has {len(parameters)} parameters ({names}), got {len(self.arguments)} arguments"
            )
        if answer is not None and len(answer) != len(self.arguments):
            raise InputError(f"answer must have {len(self.arguments)} items, got {len(answer)}")
        return {
            parameter.name: self._arg(parameter, value)
            for parameter, value in zip(parameters, self.arguments, strict=True)
        }

    def _arg(self, parameter: _Parameter, value: Any) -> Any:
        if not hasattr(value, "dtype") or (np.ndim(value) == 0 and not parameter.is_pointer):
            return value
        array = _stored(np.asarray(value), parameter.name)
        if parameter.is_const:
            return Input(array)
        is_assigned_only = _is_assigned_only(_body(self.source, self.name.partition("<")[0]), parameter.name)
        if is_assigned_only and not array.any():
            return Output(array.shape, array.dtype)
        return InOut(array)

    def _right(self, args: Mapping[str, Any], answer: Sequence[Any] | None) -> dict[str, Any]:
        """Return the right contents of each array that the kernel writes."""
        right = {}
        for name, given, value in zip(args, self.arguments, answer or [None] * len(args), strict=True):
            if value is None:
                continue
            if not isinstance(args[name], Output | InOut):
                raise InputError(f"answer has values of {name}, which the kernel does not write")
            if np.size(value) != np.size(given):
                raise InputError(
                    f"answer of {name} has {np.size(value)} elements, expected {np.size(given)}; without a "
                    "counterpart of verify=, compute all elements"
                )
            right[name] = np.asarray(value).reshape(np.shape(given))
        if answer is None:
            return {}
        written = [name for name, arg in args.items() if isinstance(arg, Output | InOut)]
        missing = [name for name in written if name not in right]
        if missing:
            raise InputError(
                f"answer lacks {', '.join(missing)}, which the kernel writes; declare what it does not write "
                "as const, or use tunebench.tune_kernel with Scratch"
            )
        return right

    def _smem_bytes(self) -> Any:
        size = (self.options.get("smem_args") or {}).get("size", 0)
        return OfMapping(functions={"size": size}, expression="size(parameters)") if callable(size) else size

    def _flags(self) -> list[str]:
        defines = self.options.get("defines") or {}
        if any(callable(value) for value in defines.values()):
            raise InputError("defines= with functions has no counterpart; parameters are macros already")
        flags = device_flags(self.options.get("compiler_options") or ())
        return [*flags, *(f"-D{name}={value}" for name, value in defines.items())]


_OPTIONS = {
    *("grid_div_x", "grid_div_y", "grid_div_z", "block_size_names", "restrictions", "smem_args"),
    "cmem_args",
    *("compiler_options", "defines", "lang", "seed"),
}
"""Further arguments that have a counterpart."""


def _fields(description: KernelDescription) -> dict[str, Any]:
    """Return the arguments of `tunebench.tune_kernel`."""
    return {field.name: getattr(description, field.name) for field in dataclasses.fields(description)}


def _text_of(source: Any) -> tuple[str, list[Path]]:
    """Return the text of a source and the folder of its headers."""
    if isinstance(source, list | tuple):
        source = source[0]
    if callable(source):
        raise InputError("a function as kernel_source has no counterpart; use macros or a Python variant")
    if isinstance(source, Path) or ("\n" not in source and "(" not in source):
        path = Path(source)
        if not path.is_file():
            raise InputError(f"kernel source {path} does not exist")
        return path.read_text(encoding="utf-8"), [path.parent]
    return str(source), []


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def _signature(source: str, name: str) -> list[_Parameter]:
    """Return the parameters of a kernel, from its definition."""
    plain = _COMMENT.sub(" ", source)
    match = re.search(rf"__global__[^{{;]*?\b{re.escape(name)}\s*\(([^()]*)\)\s*\{{", plain)
    if match is None:
        raise InputError(f"the definition of kernel {name} is not in the source")
    parameters = []
    for text in filter(None, map(str.strip, match[1].split(","))):
        words = re.findall(r"\w+", text.partition("[")[0])
        pointee = text.rpartition("*")[0]
        is_pointer = "*" in text or "[" in text
        is_const = re.search(r"\bconst\b", pointee or text) is not None
        parameters.append(_Parameter(words[-1], is_pointer, is_const))
    return parameters


def _body(source: str, name: str) -> str:
    """Return the text of a kernel after its parameters, up to the end of its braces."""
    plain = _COMMENT.sub(" ", source)
    match = re.search(rf"__global__[^{{;]*?\b{re.escape(name)}\s*\([^()]*\)\s*\{{", plain)
    assert match is not None, name
    depth, start = 1, match.end()
    for at in range(start, len(plain)):
        depth += {"{": 1, "}": -1}.get(plain[at], 0)
        if depth == 0:
            return plain[start:at]
    return plain[start:]


def _is_assigned_only(body: str, name: str) -> bool:
    """Return whether a kernel uses an array only on the left of assignments to elements."""
    word = re.compile(rf"\b{re.escape(name)}\b")
    uses = [body[use.end() :].lstrip() for use in word.finditer(body)]
    for rest in uses:
        index = rest[: _closing_bracket(rest)]
        if not index or word.search(index) or not re.match(r"\s*=[^=]", rest[len(index) :]):
            return False
    return bool(uses)


def _closing_bracket(text: str) -> int:
    """Return the position after the bracket that closes the first character; 0 if that opens none."""
    depth = 0
    for position, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth == 0:
            return position + 1 if position else 0
    return 0


def _stored(array: Any, name: str) -> Any:
    """Return an array in a supported type; unsigned integers have the bits of signed ones."""
    if array.dtype.kind == "u":
        return array.view(f"i{array.dtype.itemsize}")
    if array.dtype == np.float64:
        raise InputError(f"{name} has 64-bit floats, which are not supported; use numpy.float32")
    return array


def _restrictions(restrictions: Any) -> list[Any]:
    if restrictions is None:
        return []
    each = restrictions if isinstance(restrictions, list | tuple) else [restrictions]
    return [
        OfMapping(functions={"holds": item}, expression="holds(parameters)") if callable(item) else item
        for item in each
    ]


def _tolerance(right: Mapping[str, Any], atol: float) -> float:
    """Return the tolerance as a share of the largest magnitude of an output."""
    scales = [float(np.abs(np.asarray(value, np.float64)).max(initial=0.0)) for value in right.values()]
    return _RTOL + min((atol / scale for scale in scales if scale > 0), default=0.0)


# -- the run ------------------------------------------------------------------------------------------------


def _plan(request: _Request, strategy: str | None, options: dict[str, Any], seed: int | None) -> Plan:
    """Return the plan of a strategy."""
    size = math.prod(len(values) for values in request.space.values())
    trials = int(options.pop("max_fevals", 0) or size)
    if "fraction" in options:
        trials = max(1, math.ceil(size * float(options.pop("fraction"))))
    seconds = options.pop("time_limit", None)
    every = strategy in (None, "brute_force")
    return Plan(
        sampler="random" if every or strategy == "random_sample" else "surrogate",
        trials=trials,
        minutes=None if seconds is None else float(seconds) / 60,
        audit=1.0 if every else 0.02,
        seed=seed or 0,
        baselines=False,
    )


def _results(
    workload: str, device: Device, db: str | Path | None, metrics: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the newest result of each configuration, in the order of the first ones."""
    revision = kernels.variants(workload.partition(":")[0])[0].digest  # type: ignore[attr-defined]
    with open_store(db, read_only=True) as store:
        records = store.history(workload, device.key)
    newest = {record.key.config: record for record in records if record.key.revision == revision}
    return [_with_metrics(_result(record), metrics) for record in newest.values()]


def _result(record: Record) -> dict[str, Any]:
    outcome, effort = record.result.outcome, record.result.effort
    time_ms: Any = InvalidConfig()
    times: Iterable[float] = ()
    if isinstance(outcome, Measured):
        time_ms, times = outcome.median_us / 1e3, [us / 1e3 for us in outcome.samples_us]
    elif isinstance(outcome, Predicted):
        time_ms = outcome.predicted_us / 1e3
    elif isinstance(outcome, CompileFailed):
        time_ms = CompilationFailedConfig()
    elif outcome.kind != "wrong_result":
        time_ms = RuntimeFailedConfig()
    return {
        **record.key.config,
        "time": time_ms,
        "times": list(times),
        "compile_time": 1e3 * effort.compile_s,
        "verification_time": 1e3 * effort.verify_s,
        "benchmark_time": 1e3 * effort.measure_s,
        "timestamp": record.recorded_at.isoformat(),
    }


def _with_metrics(result: dict[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Add the metrics, each of which may use those before it."""
    if isinstance(result["time"], ErrorConfig):
        return result
    for name, metric in metrics.items():
        value: Callable[..., Any] | str = metric
        result[name] = value(result) if callable(value) else eval(value, {"math": math}, dict(result))  # noqa: S307
    return result
