"""The host's C++ compiler, and what it makes of a CUDA C++ kernel: an executable that emulates it.

The kernel's source is compiled against shim.h and linked with the emulator's runtime, which is compiled once.
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

from tunebench import _environment
from tunebench.compile.cache import binary_key
from tunebench.compile.host_source import NotEmulated, as_host_cxx
from tunebench.errors import InputError
from tunebench.variant import strip_comments

__all__ = ["build_executable", "find_compiler"]

_TIMEOUT_S = 120.0
_FLAGS = (
    *("-std=c++17", "-w", "-fno-exceptions", "-fno-threadsafe-statics"),
    # Kernels see the same bytes as several types, and as the hardware they neither set errno nor trap.
    *("-fno-strict-aliasing", "-fno-math-errno", "-fno-trapping-math"),
)
_OPTIMISATION = "-O1"
_SANITIZE = (
    *("-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"),
    "-fsanitize=address,alignment,bounds",
)
_FROM_STDIN = ("-x", "c++", "-", "-x", "none")


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


def build_executable(source: str, entries: tuple[str, ...], *, sanitize: bool = False) -> Path:
    """Return the executable that emulates the kernels of `source`, compiled if it is not on disk yet.

    Args:
        source: CUDA C++ without any #include.
        entries: Name expressions of the kernels; a job names them by position.
        sanitize: Whether AddressSanitizer is to watch it.

    Raises:
        NotEmulated: if there is no compiler, or it refuses the source.
        InputError: if the folder of executables cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise NotEmulated("no g++; install a C++ compiler, or name one in $CXX")
    unit = _translation_unit(source, entries)
    flags = _flags(compiler, sanitize)
    key = binary_key("emulated", strip_comments(unit), *flags, _version(compiler), *_shim().values())
    target = _environment.cache_folder() / "emulated" / key[:2] / key
    if not target.is_file():
        runtime = _runtime(compiler, sanitize)
        _compile([compiler, *flags, *_FROM_STDIN, str(runtime)], unit, target)
    return target


def _translation_unit(source: str, entries: tuple[str, ...]) -> str:
    """Return the kernel's source, private to the file so that what is unused costs nothing, and its table."""
    table = "\n".join(f"    emulated::entry(&{entry})," for entry in entries)
    return f"""#include "shim.h"
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


def _flags(compiler: str, sanitize: bool) -> tuple[str, ...]:
    # An uninitialised local variable holds a pattern that no result survives.
    pattern = ("-ftrivial-auto-var-init=pattern",) if _gcc_version(compiler) >= 12 else ()
    return (*_FLAGS, _OPTIMISATION, *pattern, *(_SANITIZE if sanitize else ()))


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
def _shim() -> dict[str, str]:
    files = (file for file in resources.files("tunebench.compile").iterdir() if file.name.endswith(".h"))
    return {file.name: file.read_text(encoding="utf-8") for file in sorted(files, key=lambda file: file.name)}


def _runtime(compiler: str, sanitize: bool) -> Path:
    """Return the emulator's runtime as an object file, compiled if it is not on disk yet."""
    flags = _flags(compiler, sanitize)
    key = binary_key("runtime", *flags, _version(compiler), *_shim().values())
    target = _environment.cache_folder() / "emulated" / f"runtime-{key}.o"
    if not target.is_file():
        _compile([compiler, *flags, "-c", *_FROM_STDIN], '#include "shim_runtime.h"\n', target)
    return target


def _compile(command: list[str], source: str, target: Path) -> None:
    """Run the compiler on `source`; `target` appears whole or not at all, whoever else makes the same.

    Raises:
        NotEmulated: with the compiler's first errors.
        InputError: if the folder cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            for name, text in _shim().items():
                Path(folder, name).write_text(text, encoding="utf-8")
            made = Path(folder, "made")
            process = subprocess.run(
                [*command, f"-I{folder}", "-o", str(made)],
                input=source,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
            if process.returncode != 0:
                errors = [line for line in process.stderr.splitlines() if "error" in line]
                told = "; ".join(errors[:5]) or process.stderr.strip()[-500:]
                raise NotEmulated(f"the host's compiler refuses it: {told}")
            made.replace(target)
    except subprocess.TimeoutExpired:
        raise NotEmulated(f"the host's compiler did not finish in {_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise InputError(f"emulation keeps executables in $TUNEBENCH_CACHE, which fails: {error}") from error
