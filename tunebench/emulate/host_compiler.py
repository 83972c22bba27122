"""The host's C++ compiler, and what it makes of a CUDA C++ kernel: an executable that emulates it.

The kernel's source is compiled against shim/cuda.h and linked with the emulator's runtime, which is compiled once.
Executables are kept on disk by what reached the compiler.
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
from tunebench.compile.cache import binary_key
from tunebench.emulate.host_source import NotEmulated, as_host_cxx
from tunebench.errors import InputError
from tunebench.variant import strip_comments

__all__ = ["Mode", "build_executable", "find_compiler"]

Mode = Literal["plain", "sanitize", "watch"]
"""What is found besides results: nothing, accesses out of bounds, or races, with counts of what is done."""

OLDEST_GCC_THAT_WATCHES = 12
"""Earlier ones are not known to call what shim/watch.h defines."""

_TIMEOUT_S = 120.0
_FLAGS = (
    *("-std=c++17", "-w", "-fno-exceptions", "-fno-threadsafe-statics"),
    # Kernels see the same bytes as several types, and as the hardware they neither set errno nor trap.
    *("-fno-strict-aliasing", "-fno-math-errno", "-fno-trapping-math"),
)
_OPTIMISATION: dict[Mode, str] = {"plain": "-O1", "sanitize": "-O0", "watch": "-O1"}
"""Accesses out of bounds are looked for in small problems, which run sooner than they are optimised."""

_SANITIZE = (
    *("-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"),
    "-fsanitize=address,alignment,bounds",
)
_WATCH = (
    *("-g1", "-DTUNEBENCH_WATCH=1"),
    # The calls that the sanitizer would answer, and accesses as wide as they are written.
    *("-fsanitize=thread", "--param=tsan-distinguish-volatile=1", "-fno-tree-sra"),
)
_EXTRA: dict[Mode, tuple[str, ...]] = {"plain": (), "sanitize": _SANITIZE, "watch": _WATCH}
_FROM_STDIN = ("-x", "c++", "-")


def find_compiler() -> str | None:
    """Return the path of the host's C++ compiler (`$CXX`, g++ or c++), or None if there is none.

    Raises:
        InputError: if `$CXX` names what does not exist.
    """
    asked = _environment.cxx()
    if asked is None:
        return shutil.which("g++") or shutil.which("c++")
    found = shutil.which(asked)
    if found is None:
        raise InputError(f"$CXX is {asked!r}, which is no command here; unset it or install that compiler")
    return found


def build_executable(source: str, entries: tuple[str, ...], *, mode: Mode = "plain") -> Path:
    """Return the executable that emulates the kernels of `source`, compiled if it is not on disk yet.

    Args:
        source: CUDA C++ without any #include.
        entries: Name expressions of the kernels; a job names them by position.
        mode: What is to be found out besides the results.

    Raises:
        NotEmulated: if there is no compiler, it refuses the source, or it cannot watch.
        InputError: if the folder of executables cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise NotEmulated("no g++; install a C++ compiler, or name one in $CXX")
    unit = _translation_unit(source, entries)
    flags = _flags(compiler, mode)
    key = binary_key("emulated", strip_comments(unit), *flags, *_key_parts(compiler))
    target = _environment.cache_folder() / "emulated" / key[:2] / key
    if not target.is_file():
        runtime = _runtime(compiler, mode)
        _compile(
            [compiler, *flags, *_FROM_STDIN], unit, target, link=[compiler, *_linked(mode), str(runtime)]
        )
    return target


def _translation_unit(source: str, entries: tuple[str, ...]) -> str:
    """Return the kernel's source, private to the file so that what is unused costs nothing, and its table."""
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
    """Return the flags that a kernel is compiled with."""
    # An uninitialised local variable holds a pattern that no result survives.
    pattern = ("-ftrivial-auto-var-init=pattern",) if _gcc_version(compiler) >= 12 else ()
    if mode == "watch" and _gcc_version(compiler) < OLDEST_GCC_THAT_WATCHES:
        raise NotEmulated(f"counting needs g++ {OLDEST_GCC_THAT_WATCHES} or later, and {compiler} is not")
    return (*_FLAGS, _OPTIMISATION[mode], *pattern, *_EXTRA[mode])


def _linked(mode: Mode) -> tuple[str, ...]:
    """Return the flags that a kernel and the runtime are linked with."""
    return _SANITIZE if mode == "sanitize" else ()


def _runtime_flags(compiler: str, mode: Mode) -> tuple[str, ...]:
    """Return the flags of the runtime, which watches and is not watched."""
    return (*_FLAGS, "-O2", "-DTUNEBENCH_WATCH=1") if mode == "watch" else _flags(compiler, mode)


@functools.cache
def _version(compiler: str) -> str:
    ask = [compiler, "--version"]
    return subprocess.run(ask, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S).stdout


def _gcc_version(compiler: str) -> int:
    """Return the major version if the compiler is GCC, else 0."""
    text = _version(compiler)
    match = re.search(r"\b(\d+)\.\d+\.\d+", text)
    return int(match[1]) if match and "clang" not in text else 0


@functools.cache
def _headers() -> dict[str, str]:
    """Return the text of each header of the emulator, by file name."""
    folder = resources.files("tunebench.emulate").joinpath("shim")
    return {
        file.name: file.read_text(encoding="utf-8") for file in sorted(folder.iterdir(), key=lambda f: f.name)
    }


@functools.cache
def _key_parts(compiler: str) -> tuple[str, ...]:
    """Return what every compilation depends on: the compiler's version and the headers without comments."""
    return (_version(compiler), *map(strip_comments, _headers().values()))


def _runtime(compiler: str, mode: Mode) -> Path:
    """Return the emulator's runtime as an object file, compiled if it is not on disk yet."""
    flags = _runtime_flags(compiler, mode)
    key = binary_key("runtime", *flags, *_key_parts(compiler))
    target = _environment.cache_folder() / "emulated" / f"runtime-{key}.o"
    if not target.is_file():
        _compile([compiler, *flags, *_FROM_STDIN], '#include "shim/runtime.h"\n', target)
    return target


def _compile(command: list[str], source: str, target: Path, link: list[str] | None = None) -> None:
    """Compile `source`, and link it if it is told how; `target` appears whole or not at all.

    Raises:
        NotEmulated: with the compiler's first errors.
        InputError: if the folder cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            headers = Path(folder, "shim")
            headers.mkdir()
            for name, text in _headers().items():
                (headers / name).write_text(text, encoding="utf-8")
            unit, linked = Path(folder, "unit.o"), Path(folder, "linked")
            _run([*command, f"-I{folder}", "-c", "-o", str(unit)], source)
            if link is not None:
                _run([*link, str(unit), "-o", str(linked)])
            (unit if link is None else linked).replace(target)
    except OSError as error:
        raise InputError(f"emulation keeps executables in $TUNEBENCH_CACHE, which fails: {error}") from error


def _run(command: list[str], source: str = "") -> None:
    """Run the compiler.

    Raises:
        NotEmulated: with the compiler's first errors.
    """
    try:
        process = subprocess.run(
            command, input=source, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise NotEmulated(f"the host's compiler did not finish in {_TIMEOUT_S:g} s") from None
    if process.returncode != 0:
        errors = [line for line in process.stderr.splitlines() if "error" in line]
        told = "; ".join(errors[:5]) or process.stderr.strip()[-500:]
        raise NotEmulated(f"the host's compiler refuses it: {told}")
