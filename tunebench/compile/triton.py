"""Compilation by Triton to a cubin: for any architecture, without a GPU or a driver.

The cubin is launched like any other, without Triton's launcher: the parameters follow from the binary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import linecache
import re
import tempfile
import types
import warnings
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any, NamedTuple

from tunebench.binary.compiled import Binary, CompileError
from tunebench.binary.cubin import resources, spills
from tunebench.binary.ptxas_note import ptxas_notes
from tunebench.compile.cache import BinaryCache, binary_key
from tunebench.device import Device
from tunebench.errors import BrokenDependency, MissingDependency, describe_error
from tunebench.space import Config
from tunebench.variant import RESTORE_ENTRY, Argument, Launch, Scalar, TensorMap, TritonVariant
from tunebench.workload import Tensor, Workload

__all__ = [
    "carried_key_triton",
    "compile_launch",
    "compile_triton",
    "kernel_of",
    "key_triton",
    "ptx_of_triton",
    "require_triton",
    "triton_version",
]

OLDEST = (3, 6)
"""Oldest version of Triton whose kernels have the parameters that `Binary.launches` passes."""
MAX_CLUSTER = 8
"""Most blocks of a cluster that every GPU with clusters runs. Source: CUDA C++ Programming Guide."""
HIDDEN_POINTERS = 2
"""Pointers to scratch memory that follow a kernel's arguments: for the kernel, and for Triton's profiler."""

_POINTERS = {
    "f32": "*fp32",
    "f16": "*fp16",
    "bf16": "*bf16",
    "e4m3": "*fp8e4nv",
    "i8": "*i8",
    "i32": "*i32",
    "i64": "*i64",
    "bool": "*i1",
}
_SCALARS = {"int": "i32", "long long": "i64", "float": "fp32"}
_BY_VALUE = {"f32": "fp32", "i32": "i32", "i64": "i64"}
_ALIGNED = (("tt.divisibility", 16),)


@functools.cache
def triton_version() -> str:
    """Return the installed version of Triton.

    Raises:
        MissingDependency: It is not installed.
        BrokenDependency: It is too old, or cannot be imported.
    """
    try:
        version = metadata.version("triton")
        import triton.backends.compiler
    except (metadata.PackageNotFoundError, ModuleNotFoundError) as error:
        raise MissingDependency("triton", "triton") from error
    except Exception as error:
        raise _unusable(version, f"cannot be imported ({describe_error(error)})") from error
    release = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if release < OLDEST:
        raise _unusable(version, f"is too old: {'.'.join(map(str, OLDEST))} or newer is needed")
    assert triton.backends.compiler
    return version


def _unusable(version: str, problem: str) -> BrokenDependency:
    oldest = ".".join(map(str, OLDEST))
    return BrokenDependency(f"triton {version}", "triton", problem, f"run: pip install 'triton>={oldest}'")


@functools.cache
def require_triton() -> None:
    """Check that Triton is installed and compiles for NVIDIA GPUs.

    Raises:
        MissingDependency: It is not installed.
        BrokenDependency: It is too old, or has no compiler for NVIDIA GPUs.
    """
    version = triton_version()
    from triton.backends import backends

    if "nvidia" not in backends:
        raise _unusable(version, f"compiles for no NVIDIA GPU, but for {', '.join(backends) or 'none'}")


@functools.lru_cache(maxsize=16)
def kernel_of(source: str, entry: str) -> Any:
    """Run the text of a module and return its kernel, decorated by `triton.jit`.

    Args:
        source: The module.
        entry: Name of the kernel.

    Raises:
        CompileError: The text raises, or defines no such kernel.
    """
    import triton

    file = f"<kernel {entry} {binary_key(source)[:12]}>"
    # Triton and its interpreter read the text of functions.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = types.ModuleType(entry)
    try:
        exec(compile(source, file, "exec"), vars(module))  # noqa: S102 - as importing a user's file
    except Exception as error:
        raise CompileError(f"the source of {entry} raised {describe_error(error)}") from error
    kernel: Any = getattr(module, entry, None)
    if isinstance(kernel, types.FunctionType):
        kernel = triton.jit(kernel)
    if not hasattr(kernel, "arg_names"):
        raise CompileError(f"the source defines no function {entry} that triton.jit decorates")
    kernel.module_of_source = module  # its globals must outlive this call
    return kernel


class _Specialised(NamedTuple):
    """A kernel for the arguments of one launch, as Triton specialises it.

    Attributes:
        kernel: The kernel.
        signature: Type of each parameter; ``"constexpr"`` of those whose value is compiled in.
        constants: Their values, by position.
        attributes: Divisibility of the others, by position.
        omitted: Positions among the launch's arguments that are compiled in.
        options: Options of the compiler.
        copies: Kernels that copy arrays before, in the order of their launches.
    """

    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    omitted: tuple[int, ...]
    options: dict[str, Any]
    copies: tuple[str, ...] = ()

    def text(self) -> str:
        """Return everything except the kernel as text."""
        return repr(self[1:])


def _specialised(variant: TritonVariant[Any], workload: Workload, config: Config) -> _Specialised:
    """Return the kernel with types, constants and divisibility, as of a launch of Triton.

    Memory of tensors is aligned to 16 bytes or more.

    Raises:
        CompileError: Arguments and parameters of the kernel do not match.
    """
    *copies, launch = variant.launches(workload, config)
    if not all(copy.entry.startswith(RESTORE_ENTRY) for copy in copies):
        raise CompileError(f"{variant.key} has {len(copies) + 1} launches; a Triton variant has one")
    kernel = kernel_of(variant.source(workload, config), launch.entry)
    constants, tensors = variant.constants(workload, config), variant.tensors(workload, config)
    special = _specialised_launch(kernel, launch, tensors, constants, variant.options(config))
    return special._replace(copies=tuple(copy.entry for copy in copies))


def _specialised_launch(
    kernel: Any,
    launch: Launch,
    tensors: Mapping[str, Tensor],
    constants: Mapping[str, Any],
    options: Mapping[str, int],
) -> _Specialised:
    """Return a kernel with types, constants and divisibility of a launch (see `_specialised`)."""
    _check_names(kernel, launch.entry, constants, len(launch.arguments))
    result = _Specialised(kernel, {}, {}, {}, (), _options(options))
    arguments, omitted = iter(enumerate(launch.arguments)), []
    for index, parameter in enumerate(kernel.params):
        if parameter.name in constants or parameter.is_constexpr:
            result.signature[parameter.name] = "constexpr"
            result.constants[index,] = constants.get(parameter.name, parameter.default)
            continue
        position, argument = next(arguments)
        kind, value = _typed(argument, tensors, parameter)
        result.signature[parameter.name] = kind
        if kind == "constexpr":
            result.constants[index,] = value
            omitted.append(position)
        elif value % 16 == 0 and not parameter.do_not_specialize_on_alignment:
            result.attributes[index,] = [list(attribute) for attribute in _ALIGNED]
    return result._replace(omitted=tuple(omitted))


def _check_names(kernel: Any, entry: str, constants: Mapping[str, Any], arguments: int) -> None:
    names = [parameter.name for parameter in kernel.params]
    for name in constants:
        if name not in names:
            raise CompileError(f"{entry} takes no argument {name}; it takes {', '.join(names)}")
    missing = [
        parameter.name
        for parameter in kernel.params
        if parameter.is_constexpr and parameter.name not in constants and not parameter.has_default
    ]
    if missing:
        raise CompileError(f"{entry} needs a value for {', '.join(missing)}")
    passed = [p.name for p in kernel.params if p.name not in constants and not p.is_constexpr]
    if len(passed) != arguments:
        raise CompileError(
            f"{entry} takes {len(passed)} arguments ({', '.join(passed)}), and its launch passes {arguments}"
        )


def _typed(argument: Argument | TensorMap, tensors: Mapping[str, Tensor], parameter: Any) -> tuple[str, int]:
    """Return Triton's type of an argument, and its value, or 1 if nothing is known of it.

    Source: `native_specialize_impl` of triton.runtime.jit: 1 is compiled in, multiples of 16 are noted.
    """
    declared = parameter.annotation_type
    if isinstance(argument, TensorMap):
        raise CompileError("Triton kernels accept no tensor maps: they make them from pointers")
    if isinstance(argument, Scalar):
        kind = _SCALARS[argument.ctype]
        value = int(argument.value) if kind != "fp32" and not parameter.do_not_specialize else 3
    elif tensors[argument].shape:
        kind, value = _POINTERS[tensors[argument].dtype], 0 if not parameter.do_not_specialize else 3
        kind = kind.replace("*", "*k") if parameter.is_const else kind
    else:
        kind, value = _BY_VALUE.get(tensors[argument].dtype, ""), 3
    if not kind or declared not in ("", kind):
        raise CompileError(f"argument {parameter.name} is {kind or 'of a type that is passed by address'}")
    if value == 1 and not declared:
        return "constexpr", 1
    return kind, value


def _options(given: Mapping[str, int]) -> dict[str, Any]:
    options: dict[str, Any] = dict(given)
    if options["num_ctas"] > MAX_CLUSTER:
        raise CompileError(f"num_ctas must be {MAX_CLUSTER} or less, got {options['num_ctas']}")
    if not options["maxnreg"]:
        del options["maxnreg"]
    # Triton 3.10 changes the default; results must not depend on the version.
    return options | {"enable_fp_fusion": True}


def key_triton(variant: TritonVariant[Any], workload: Workload, config: Config, device: Device) -> str:
    """Return the cache key of what reaches Triton for a configuration on an architecture.

    It contains the text of the kernel and of the functions that it calls.

    Args:
        variant: The kernel variant.
        workload: The workload to compile for.
        config: A valid point of the variant's space.
        device: The target; only its architecture counts.

    Raises:
        CompileError: Arguments and parameters of the kernel do not match.
        MissingDependency: Triton is not installed, or too old.
    """
    triton_version()
    return _key(_specialised(variant, workload, config), device)


def _key(special: _Specialised, device: Device) -> str:
    try:
        text = special.kernel.cache_key
    except Exception as error:  # the kernel calls a function that Triton does not compile
        raise CompileError(f"triton: {describe_error(error)}") from error
    return binary_key("triton", text, special.text(), device.architecture, triton_version())


def carried_key_triton(
    variant: TritonVariant[Any], workload: Workload, config: Config, device: Device
) -> str:
    """Return the key of a carried binary: what reaches Triton, whatever its version.

    Triton need not be installed: the arguments of the launch stand in for the specialisation.
    """
    revision, launches = variant.revision(workload, config), variant.launches(workload, config)
    constants = sorted(variant.constants(workload, config).items())
    arguments = repr([launch.arguments for launch in launches])
    return binary_key("carried", "triton", revision, arguments, repr(constants), device.architecture)


def compile_triton(variant: TritonVariant[Any], workload: Workload, config: Config, device: Device) -> Binary:
    """Compile one configuration for the architecture of `device`.

    Args:
        variant: The kernel variant.
        workload: The workload to compile for.
        config: A valid point of the variant's space.
        device: The target; it need not be on this machine.

    Raises:
        CompileError: Triton rejected the kernel, or it needs memory that no launch provides.
        MissingDependency: Triton is not installed, or too old.
    """
    key = key_triton(variant, workload, config, device)
    return _binary(key, _specialised(variant, workload, config), device)


def compile_launch(
    kernel: Any,
    launch: Launch,
    tensors: Mapping[str, Tensor],
    constants: Mapping[str, Any],
    options: Mapping[str, int],
    device: Device,
    cache: BinaryCache,
) -> Binary:
    """Compile a kernel for one launch, without a variant, or return its binary from the cache.

    Args:
        kernel: A function of `triton.jit`.
        launch: The launch; its arguments name tensors.
        tensors: Shape and type of each tensor.
        constants: Values of `tl.constexpr` arguments.
        options: Value of each of `TRITON_OPTIONS`.
        device: The target; it need not be on this machine.
        cache: Binaries by what reached the compiler.

    Raises:
        CompileError: As `compile_triton`.
        MissingDependency: Triton is not installed, or too old.
    """
    require_triton()
    special = _specialised_launch(kernel, launch, tensors, constants, options)
    key = _key(special, device)
    return cache.get_or_compile(key, lambda: _binary(key, special, device))


def _binary(key: str, special: _Specialised, device: Device) -> Binary:
    """Compile a specialised kernel.

    Raises:
        CompileError: As `compile_triton`.
    """
    compiled, log = _compile(special, device)
    facts = compiled.metadata
    cubin = _with_copies(compiled, special, device) if special.copies else compiled.asm["cubin"]
    _check_parameters(compiled.asm["ptx"], special)
    for kind in ("global_scratch_size", "profile_scratch_size"):
        if nbytes := getattr(facts, kind, 0):
            raise CompileError(
                f"the kernel needs {nbytes} bytes of {kind[:-5].replace('_', ' ')} memory per block, as for "
                "tensor descriptors that it makes; only Triton's own launcher provides it"
            )
    entries = (*special.copies, facts.name)
    used = resources(cubin, entries, spills(log) if log else None)
    used = dataclasses.replace(used, dynamic_smem_bytes=int(facts.shared))
    return Binary(
        key=key,
        language="triton",
        target=_target(compiled.asm["ptx"]),
        payload=cubin,
        entries=entries,
        resources=used,
        notes=ptxas_notes(log),
        compiler=f"Triton {triton_version()}",
        threads=32 * int(facts.num_warps),  # warp specialisation adds warps
        omitted=special.omitted,
        null_pointers=HIDDEN_POINTERS,
    )


def ptx_of_triton(variant: TritonVariant[Any], workload: Workload, config: Config, device: Device) -> str:
    """Return the PTX of one configuration.

    Args:
        variant: The kernel variant.
        workload: The workload to compile for.
        config: A valid point of the variant's space.
        device: The target; it need not be on this machine.

    Raises:
        CompileError: Triton rejected the kernel.
        MissingDependency: Triton is not installed, or too old.
    """
    triton_version()
    compiled, _ = _compile(_specialised(variant, workload, config), device)
    return str(compiled.asm["ptx"])


def _compile(special: _Specialised, device: Device) -> tuple[Any, str]:
    """Return what Triton compiled, and the log of ptxas."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(special.kernel, special.signature, special.constants, special.attributes)
    output = io.StringIO()
    try:
        with _private_cache(), contextlib.redirect_stdout(output), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = triton.compile(source, target=GPUTarget(*_gpu_target(device)), options=special.options)
    except Exception as error:  # Triton has no common class of errors
        raise CompileError(f"triton: {_shortened(error)}") from error
    return compiled, output.getvalue()


def _gpu_target(device: Device) -> tuple[str, int, int]:
    major, minor = device.compute_capability
    return "cuda", 10 * major + minor, 32


_COPY = """
.visible .entry {entry}(.param .u64 original, .param .u64 copied, .param .u64 count)
{{
  .reg .pred %p<2>; .reg .b{bits} %v; .reg .b32 %r<4>; .reg .b64 %rd<8>;
  ld.param.u64 %rd1, [original];
  ld.param.u64 %rd2, [copied];
  ld.param.u64 %rd3, [count];
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  cvt.u64.u32 %rd4, %r3;
  mad.wide.u32 %rd5, %r1, %r2, %rd4;
  setp.ge.u64 %p1, %rd5, %rd3;
  @%p1 ret;
  mad.lo.s64 %rd6, %rd5, {nbytes}, %rd1;
  mad.lo.s64 %rd7, %rd5, {nbytes}, %rd2;
  ld.global.b{loaded} %v, [%rd6];
  st.global.b{loaded} [%rd7], %v;
  ret;
}}
"""
"""Kernel that copies an array, for PTX of any version; a byte is loaded into a register of 16 bits."""


def _with_copies(compiled: Any, special: _Specialised, device: Device) -> bytes:
    """Return the cubin with kernels that copy arrays besides, assembled by Triton's ptxas.

    Raises:
        CompileError: ptxas failed.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    copies = ""
    for entry in dict.fromkeys(special.copies):
        nbytes = int(entry.removeprefix(RESTORE_ENTRY))
        copies += _COPY.format(entry=entry, nbytes=nbytes, loaded=8 * nbytes, bits=max(16, 8 * nbytes))
    own = re.search(r"^\s*\.visible \.entry", compiled.asm["ptx"], re.MULTILINE)
    assert own, "PTX without a kernel"
    ptx = compiled.asm["ptx"][: own.start()] + copies + compiled.asm["ptx"][own.start() :]
    target = GPUTarget(*_gpu_target(device))
    backend = make_backend(target)
    options = backend.parse_options({**special.options, "arch": f"sm{target.arch}"})
    try:
        with _private_cache(), contextlib.redirect_stdout(io.StringIO()):
            return bytes(backend.make_cubin(ptx, {}, options, target.arch))
    except Exception as error:  # Triton has no common class of errors
        raise CompileError(f"triton: {_shortened(error)}") from error


@contextlib.contextmanager
def _private_cache() -> Iterator[None]:
    """Let Triton write its files into a folder that is removed: binaries are stored by `BinaryCache`."""
    from triton import knobs

    with tempfile.TemporaryDirectory(prefix="tunebench-triton-") as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        with knobs.nvidia.scope():
            knobs.nvidia.dump_ptxas_log = True
            yield


def _shortened(error: BaseException) -> str:
    """Return class and message of an error, with its cause, which names the operation."""
    text = describe_error(error)
    if error.__cause__ is not None:
        text = f"{text}: {describe_error(error.__cause__)}"
    return text.strip()[:2000]


def _target(ptx: str) -> str:
    found = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert found, "PTX without a target"
    return found[1]


def _check_parameters(ptx: str, special: _Specialised) -> None:
    """Check that the compiled kernel has the parameters that launches pass.

    Raises:
        CompileError: It has others: this version of Triton passes hidden parameters differently.
    """
    entry = re.search(r"\.entry [^(]*\(([^)]*)\)", ptx)
    count = entry[1].count(".param ") if entry else 0
    expected = sum(kind != "constexpr" for kind in special.signature.values()) + HIDDEN_POINTERS
    if count != expected:
        raise CompileError(
            f"Triton {triton_version()} compiled a kernel of {count} parameters, expected {expected}; this "
            "version of Triton is not supported"
        )
