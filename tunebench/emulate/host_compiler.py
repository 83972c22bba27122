"""Compilation of a CUDA C++ kernel by the host's C++ compiler, to an executable that emulates it.

The kernel's source is compiled against shim/cuda.h and linked with the emulator's runtime, which is compiled
once. Executables are cached on disk by what reached the compiler: the source, which includes nothing, and the
emulator's headers with all that they include, as the preprocessor prints them. The compiler runs in a folder
that contains only these headers, and finds them by their absolute path: GCC searches the current folder first
for the headers of a source that it reads from standard input.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from importlib import resources
from pathlib import Path
from typing import Literal

from tunebench import _environment
from tunebench._child import WORKING_FOLDER, find_program
from tunebench._figure import significant
from tunebench._private_file import create_folder, is_private
from tunebench.compile.cache import binary_key
from tunebench.emulate.host_source import NotEmulated, as_host_cxx
from tunebench.errors import EnvironmentFault, SuspectedFault
from tunebench.fault import names_environment, names_missing
from tunebench.variant import including_line, strip_comments

__all__ = ["Mode", "build_executable", "find_compiler", "key_parts", "shim_headers"]

Mode = Literal["plain", "sanitize", "watch"]
"""Checks of a run in addition to its results: none; out-of-bounds accesses; or races, with counts of work."""

OLDEST_GCC_THAT_WATCHES = 12
"""Earlier releases are not known to call the functions that shim/watch.h defines."""

_TIMEOUT_S = 120.0
_FLAGS = (
    *("-std=c++17", "-w", "-fno-exceptions", "-fno-threadsafe-statics"),
    # Kernels access the same bytes as several types. Like the hardware, they neither set errno nor trap.
    *("-fno-strict-aliasing", "-fno-math-errno", "-fno-trapping-math"),
)
_OPTIMISATION: dict[Mode, str] = {"plain": "-O1", "sanitize": "-Og", "watch": "-O1"}
"""Sanitized runs use small workloads, which finish sooner than an optimised compilation. `-Og` removes much
of what `-O0` would instrument, and so compiles in less time than either."""

_SANITIZE = (
    *("-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"),
    "-fsanitize=address,alignment,bounds",
)
_WATCH = (
    *("-g1", "-DTUNEBENCH_WATCH=1"),
    # Keep the sanitizer's calls, which the emulator defines, and accesses as wide as they are written.
    *("-fsanitize=thread", "--param=tsan-distinguish-volatile=1", "-fno-tree-sra"),
)
_EXTRA: dict[Mode, tuple[str, ...]] = {"plain": (), "sanitize": _SANITIZE, "watch": _WATCH}
_FROM_STDIN = ("-x", "c++", "-")
_KERNEL_HEADER, _RUNTIME_HEADER = "cuda.h", "runtime.h"


def find_compiler() -> str | None:
    """Return the path of the host's C++ compiler (`$CXX`, g++ or c++), or None if there is none.

    Raises:
        EnvironmentFault: `$CXX` names a command that does not exist.
    """
    requested = _environment.cxx()
    if requested is None:
        return find_program("g++") or find_program("c++")
    path = find_program(requested)
    if path is None:
        raise EnvironmentFault(
            f"$CXX is {requested!r}, which is no command on this machine; unset it or install that compiler"
        )
    return path


def build_executable(source: str, entries: tuple[str, ...], *, mode: Mode = "plain") -> Path:
    """Return the executable that emulates the kernels of `source`; compile it if it is not cached.

    Args:
        source: CUDA C++ without any #include.
        entries: Name expressions of the kernels; a job names them by position.
        mode: Checks of the run in addition to its results.

    Raises:
        NotEmulated: No compiler is installed, it rejects the source, or it does not support `mode`; or the
            source includes another file.
        EnvironmentFault: The cache folder cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise NotEmulated("no g++; install a C++ compiler, or name one in $CXX")
    including = including_line(source)
    if including is not None:
        raise NotEmulated(
            f"`{including}` reads another file; expected a source that contains all of its text"
        )
    unit = _translation_unit(source, entries)
    flags, linked = _flags(compiler, mode), _linked(mode)
    key = binary_key("emulated", strip_comments(unit), *flags, *linked, *key_parts(compiler, mode))
    target = _environment.cache_folder() / "emulated" / key[:2] / key
    if not is_private(target):
        command = [compiler, *flags, *_FROM_STDIN]
        link = [compiler, *linked, str(_runtime(compiler, mode))]
        _compile(command, _KERNEL_HEADER, unit, target, link=link)
    return target


@functools.lru_cache(maxsize=16)  # a kernel runs with its threads in several orders
def _translation_unit(source: str, entries: tuple[str, ...]) -> str:
    """Return the source in an unnamed namespace, so that unused code costs nothing, and its kernel table."""
    table = "\n".join(f"    emulated::entry(&{entry})," for entry in entries)
    return f"""namespace {{
#line 1 "kernel"
{as_host_cxx(source)}
}}  // namespace
#line 1 "table"
static const emulated::Entry tunebench_entries[] = {{
{table}
}};
const emulated::Entry* const emulated::entries = tunebench_entries;
const int emulated::entry_count = {len(entries)};
"""


def _flags(compiler: str, mode: Mode) -> tuple[str, ...]:
    """Return the flags of a kernel's compilation."""
    # Fill uninitialised local variables with a pattern that makes results wrong.
    pattern = ("-ftrivial-auto-var-init=pattern",) if _gcc_version(compiler) >= 12 else ()
    # Checks of accesses compile in less time as calls than in place.
    calls = ("--param=asan-instrumentation-with-call-threshold=0",) if _gcc_version(compiler) else ()
    if mode == "watch" and _gcc_version(compiler) < OLDEST_GCC_THAT_WATCHES:
        raise NotEmulated(
            f"counting needs g++ {OLDEST_GCC_THAT_WATCHES} or later; {compiler} is older or another compiler"
        )
    return (*_FLAGS, _OPTIMISATION[mode], *pattern, *(calls if mode == "sanitize" else ()), *_EXTRA[mode])


def _linked(mode: Mode) -> tuple[str, ...]:
    """Return the flags that link a kernel with the runtime, by gold if it is installed: it takes a third."""
    linker = ("-fuse-ld=gold",) if find_program("ld.gold") else ()
    return (*linker, *_SANITIZE) if mode == "sanitize" else linker


def _runtime_flags(compiler: str, mode: Mode) -> tuple[str, ...]:
    """Return the flags of the runtime's compilation; the runtime itself is not watched."""
    return (*_FLAGS, "-O2", "-DTUNEBENCH_WATCH=1") if mode == "watch" else _flags(compiler, mode)


@functools.cache
def _version(compiler: str) -> str:
    ask = [compiler, "--version"]
    return subprocess.run(
        ask, capture_output=True, text=True, check=True, cwd=WORKING_FOLDER, timeout=_TIMEOUT_S
    ).stdout


def _gcc_version(compiler: str) -> int:
    """Return the major version of GCC, or 0 for another compiler."""
    text = _version(compiler)
    match = re.search(r"\b(\d+)\.\d+\.\d+", text)
    return int(match[1]) if match and "clang" not in text else 0


@functools.cache
def shim_headers() -> dict[str, str]:
    """Return the text of each header of the emulator, by file name."""
    folder = resources.files("tunebench.emulate").joinpath("shim")
    return {
        file.name: file.read_text(encoding="utf-8") for file in sorted(folder.iterdir(), key=lambda f: f.name)
    }


@functools.cache
def key_parts(compiler: str, mode: Mode) -> tuple[str, ...]:
    """Return the compiler's version and the preprocessed headers, which every compilation depends on.

    The headers of the C++ library are part of them, wherever the compiler finds these: environment variables
    such as `CPATH` lead it to others.
    """
    with tempfile.TemporaryDirectory() as folder:
        return (
            _version(compiler),
            *(
                _run([compiler, *flags, "-E", "-P", *_FROM_STDIN], folder, _written(folder, header))
                for header, flags in (
                    (_KERNEL_HEADER, _flags(compiler, mode)),
                    (_RUNTIME_HEADER, _runtime_flags(compiler, mode)),
                )
            ),
        )


def _written(folder: str, header: str) -> str:
    """Write the emulator's headers to a folder, and return the line that includes one of them."""
    headers = Path(folder, "shim")
    headers.mkdir(exist_ok=True)
    for name, text in shim_headers().items():
        (headers / name).write_text(text, encoding="utf-8")
    return f'#include "{headers / header}"\n'


def _runtime(compiler: str, mode: Mode) -> Path:
    """Return the emulator's runtime as an object file; compile it if it is not cached."""
    flags = _runtime_flags(compiler, mode)
    key = binary_key("runtime", *flags, *key_parts(compiler, mode))
    target = _environment.cache_folder() / "emulated" / f"runtime-{key}.o"
    if not is_private(target):
        _compile([compiler, *flags, *_FROM_STDIN], _RUNTIME_HEADER, "", target)
    return target


def _compile(
    command: list[str], header: str, source: str, target: Path, link: list[str] | None = None
) -> None:
    """Compile `source` to `target`, which appears complete or not at all.

    Args:
        command: Compiler and flags.
        header: Name of the emulator's header that it includes.
        source: C++ text, passed on standard input.
        target: Object file, or executable if `link` is given.
        link: Command that links the object file; None stops after compiling.

    Raises:
        NotEmulated: The compiler failed; the message quotes its first errors.
        EnvironmentFault: The cache folder cannot be written.
    """
    try:
        cache = _environment.cache_folder()
        create_folder(cache, *target.parent.relative_to(cache).parts)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            unit, linked = Path(folder, "unit.o"), Path(folder, "linked")
            _run([*command, "-c", "-o", str(unit)], folder, _written(folder, header) + source)
            if link is not None:
                _run([*link, str(unit), "-o", str(linked)], folder)
            made = unit if link is None else linked
            made.chmod(0o700)
            made.replace(target)
    except OSError as error:
        raise SuspectedFault(
            f"cannot write emulated kernels to the folder of $TUNEBENCH_CACHE: {error}"
        ) from error


def _run(command: list[str], folder: str, source: str = "") -> str:
    """Run the compiler in a folder, and return its standard output.

    Raises:
        NotEmulated: The compiler failed; the message quotes its first errors.
        EnvironmentFault: It failed for lack of space or memory, or is not installed completely.
    """
    try:
        process = subprocess.run(
            command, input=source, capture_output=True, text=True, cwd=folder, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise NotEmulated(f"the host's compiler did not finish in {significant(_TIMEOUT_S)} s") from None
    if process.returncode != 0:
        errors = [line for line in process.stderr.splitlines() if "error" in line]
        quoted = "; ".join(errors[:5]) or process.stderr.strip()[-500:]
        if names_environment(process.stderr):
            fault = EnvironmentFault if names_missing(process.stderr) else SuspectedFault
            raise fault(f"the host's compiler failed: {quoted}")
        raise NotEmulated(f"the host's compiler rejects the kernel: {quoted}")
    return process.stdout
