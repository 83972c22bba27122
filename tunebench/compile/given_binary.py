"""Kernels that come compiled, as a cubin, a fatbin or PTX: their cubin for one architecture."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tunebench.binary.compiled import Binary, CompileError
from tunebench.binary.cubin import compute_capability, read_cubin, resources
from tunebench.errors import MissingDependency

__all__ = ["binary_of"]

_ELF, _FATBIN = b"\x7fELF", b"\x50\xed\x55\xba"
"""First bytes of a cubin and of a fatbin; anything else is PTX."""


def binary_of(key: str, data: bytes, entries: tuple[str, ...], target: str) -> Binary:
    """Return the binary of kernels that come compiled; PTX is assembled by nvJitLink.

    Args:
        key: Key of the binary.
        data: A cubin, a fatbin or PTX.
        entries: Symbols of the launched kernels.
        target: Architecture, such as ``"sm_90"``.

    Raises:
        CompileError: It is for another architecture, is no such file, or lacks a kernel.
        MissingDependency: nvJitLink is not installed.
    """
    asked = int(target.removeprefix("sm_").rstrip("af"))
    if data.startswith(_FATBIN):
        data = _selected(data, asked)
    is_cubin = data.startswith(_ELF)
    cubin = data if is_cubin else _linked(data, target)
    try:
        made_for, symbols = compute_capability(cubin), tuple(read_cubin(cubin))
    except Exception as error:  # any bytes may be wrong
        raise CompileError(f"the compiled kernel cannot be read: {error}") from None
    if not _runs(made_for, asked):
        raise CompileError(f"the compiled kernel is for sm_{made_for}, which does not run on {target}")
    for entry in entries:
        if entry not in symbols:
            raise CompileError(f"the compiled kernel has no symbol {entry}; it has {', '.join(symbols)}")
    return Binary(
        key=key,
        language="cuda",
        target=target,
        payload=cubin,
        entries=entries,
        resources=resources(cubin, entries, None),
        compiler="as given" if is_cubin else "as given, assembled by nvJitLink",
    )


def _runs(made_for: int, asked: int) -> bool:
    """Return whether machine code for one compute capability, such as 80, runs on another."""
    return made_for // 10 == asked // 10 and made_for <= asked


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One kernel file within a fatbin."""

    is_cubin: bool
    made_for: int
    is_compressed: bool
    data: bytes


def _entries(fatbin: bytes) -> Iterator[_Entry]:
    """Yield the cubins and PTX of a fatbin, up to where it is truncated.

    Source: what `nvfatbin` of CUDA 13 writes. The file and each entry begin with the sizes of their header
    and contents; 28 bytes behind the start of an entry is its compute capability, 40 bytes its flags.
    """
    _, _, at, _ = struct.unpack_from("<IHHQ", fatbin.ljust(16, b"\0"))
    while at + 64 <= len(fatbin):
        kind, _, header, size = struct.unpack_from("<HHIQ", fatbin, at)
        (made_for,) = struct.unpack_from("<I", fatbin, at + 28)
        (flags,) = struct.unpack_from("<Q", fatbin, at + 40)
        if kind in (_PTX, _CUBIN):
            data = fatbin[at + header : at + header + size]
            is_cubin, is_compressed = kind == _CUBIN, bool(flags & _COMPRESSED)
            yield _Entry(is_cubin=is_cubin, made_for=made_for, is_compressed=is_compressed, data=data)
        at += max(64, header + size)


def _selected(fatbin: bytes, asked: int) -> bytes:
    """Return the newest cubin of a fatbin that runs on a compute capability, else its newest PTX."""
    fitting = [
        entry
        for entry in _entries(fatbin)
        if (_runs(entry.made_for, asked) if entry.is_cubin else entry.made_for <= asked)
    ]
    if not fitting:
        raise CompileError(f"the compiled kernel is a fatbin without code for sm_{asked}")
    best = max(fitting, key=lambda entry: (not entry.is_compressed, entry.is_cubin, entry.made_for))
    if best.is_compressed:
        raise CompileError("the fatbin is compressed: `cuobjdump -xelf all FILE` extracts its cubins")
    return best.data if best.is_cubin else best.data.rstrip(b"\0\n ")


_PTX, _CUBIN = 1, 2
_COMPRESSED = 0x2000 | 0x8000
"""Flags of entries that are compressed by LZ4 or Zstandard."""


def _linked(data: bytes, target: str) -> bytes:
    """Return the cubin of PTX."""
    try:
        from cuda.bindings import nvjitlink
    except ImportError as error:
        raise MissingDependency("nvJitLink", "cuda") from error
    try:
        handle = nvjitlink.create(1, [f"-arch={target}"])
    except RuntimeError as error:  # the library is loaded at its first use
        raise MissingDependency("nvJitLink", "cuda") from error
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, data, len(data), "kernel")
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
    except nvjitlink.nvJitLinkError as error:
        raise CompileError(f"nvJitLink for {target}: {_log(nvjitlink, handle) or error}") from None
    finally:
        nvjitlink.destroy(handle)
    return bytes(cubin)


def _log(nvjitlink: Any, handle: Any) -> str:
    log = bytearray(nvjitlink.get_error_log_size(handle))
    nvjitlink.get_error_log(handle, log)
    return " ".join(log.decode(errors="replace").rstrip("\0").split())[:500]
