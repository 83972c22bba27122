"""Compilation of a CUDA C++ kernel by the host's C++ compiler, to an executable that emulates it.

The kernel's source is compiled against shim/cuda.h and linked with the emulator's runtime, which is compiled
once. Executables are cached on disk by what reached the compiler.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path
from typing import Literal

from tunebench import _environment
from tunebench._figure import significant
from tunebench._private_file import create_folder, is_private
from tunebench.compile.cache import binary_key
from tunebench.emulate.host_source import NotEmulated, as_host_cxx
from tunebench.errors import EnvironmentFault, SuspectedFault
from tunebench.fault import names_environment, names_missing
from tunebench.variant import strip_comments

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


def find_compiler() -> str | None:
    """Return the path of the host's C++ compiler (`$CXX`, g++ or c++), or None if there is none.

    Raises:
        EnvironmentFault: `$CXX` names a command that does not exist.
    """
    requested = _environment.cxx()
    if requested is None:
        return shutil.which("g++") or shutil.which("c++")
    path = shutil.which(requested)
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
        NotEmulated: No compiler is installed, it rejects the source, or it does not support `mode`.
        EnvironmentFault: The cache folder cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise NotEmulated("no g++; install a C++ compiler, or name one in $CXX")
    unit = _translation_unit(source, entries)
    flags = _flags(compiler, mode)
    key = binary_key("emulated", strip_comments(unit), *flags, *key_parts(compiler))
    target = _environment.cache_folder() / "emulated" / key[:2] / key
    if not is_private(target):
        runtime = _runtime(compiler, mode)
        _compile(
            [compiler, *flags, *_FROM_STDIN], unit, target, link=[compiler, *_linked(mode), str(runtime)]
        )
    return target


def _translation_unit(source: str, entries: tuple[str, ...]) -> str:
    """Return the source in an unnamed namespace, so that unused code costs nothing, and its kernel table."""
    table = "\n".join(f"    emulated::entry(&{entry})," for entry in entries)
    return f"""#include "shim/cuda.h"
namespace {{
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
    linker = ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()
    return (*linker, *_SANITIZE) if mode == "sanitize" else linker


def _runtime_flags(compiler: str, mode: Mode) -> tuple[str, ...]:
    """Return the flags of the runtime's compilation; the runtime itself is not watched."""
    return (*_FLAGS, "-O2", "-DTUNEBENCH_WATCH=1") if mode == "watch" else _flags(compiler, mode)


@functools.cache
def _version(compiler: str) -> str:
    ask = [compiler, "--version"]
    return subprocess.run(ask, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S).stdout


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
def key_parts(compiler: str) -> tuple[str, ...]:
    """Return the compiler's version and the headers without comments, which every compilation depends on."""
    return (_version(compiler), *map(strip_comments, shim_headers().values()))


def _runtime(compiler: str, mode: Mode) -> Path:
    """Return the emulator's runtime as an object file; compile it if it is not cached."""
    flags = _runtime_flags(compiler, mode)
    key = binary_key("runtime", *flags, *key_parts(compiler))
    target = _environment.cache_folder() / "emulated" / f"runtime-{key}.o"
    if not is_private(target):
        _compile([compiler, *flags, *_FROM_STDIN], '#include "shim/runtime.h"\n', target)
    return target


def _compile(command: list[str], source: str, target: Path, link: list[str] | None = None) -> None:
    """Compile `source` to `target`, which appears complete or not at all.

    Args:
        command: Compiler and flags.
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
            headers = Path(folder, "shim")
            headers.mkdir()
            for name, text in shim_headers().items():
                (headers / name).write_text(text, encoding="utf-8")
            unit, linked = Path(folder, "unit.o"), Path(folder, "linked")
            _run([*command, f"-I{folder}", "-c", "-o", str(unit)], source)
            if link is not None:
                _run([*link, str(unit), "-o", str(linked)])
            made = unit if link is None else linked
            made.chmod(0o700)
            made.replace(target)
    except OSError as error:
        raise SuspectedFault(
            f"cannot write emulated kernels to the folder of $TUNEBENCH_CACHE: {error}"
        ) from error


def _run(command: list[str], source: str = "") -> None:
    """Run the compiler.

    Raises:
        NotEmulated: The compiler failed; the message quotes its first errors.
        EnvironmentFault: It failed for lack of space or memory, or is not installed completely.
    """
    try:
        process = subprocess.run(
            command, input=source, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
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
