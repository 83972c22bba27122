"""Registers, shared memory, stack and code size of the kernels in a cubin, read from its ELF sections.

Source: the ELF-64 format, and NVIDIA's `.nv.info` sections as ptxas writes them: a list of attributes, each
with a format byte, an attribute byte and a 16-bit value or size; numbers as `cuobjdump -elf` names them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tunebench.binary.compiled import Binary
from tunebench.device import Device
from tunebench.outcome import Resources
from tunebench.variant import Launch, ceil_div

__all__ = [
    "ElfSection",
    "KernelResources",
    "compute_capability",
    "elf_sections",
    "info_attributes",
    "launch_refusal",
    "read_cubin",
    "resources",
    "spills",
]

_REGISTER_COUNT = 0x2F
_FRAME_BYTES = 0x11
_MAX_THREADS = 0x05
_SIZED = 4
"""Format byte of an attribute with a 16-bit size and that many bytes of data."""

_RESERVED_SMEM_BYTES = 1024
"""Shared memory in bytes that `.nv.shared` of sm_90 and later includes for the system.

Source: CUDA C++ Programming Guide, "Compute Capability 9.0: Shared Memory"; ptxas includes it, too.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelResources:
    """Resources of one kernel.

    Attributes:
        registers: 32-bit registers per thread.
        static_smem_bytes: Static shared memory per block, without the bytes reserved for the system.
        stack_bytes: Local memory per thread: arrays indexed at run time, and spills.
        max_threads: Maximum number of threads per block (`__launch_bounds__`), or None.
        code_bytes: Size of the machine code.
    """

    registers: int = 0
    static_smem_bytes: int = 0
    stack_bytes: int = 0
    max_threads: int | None = None
    code_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ElfSection:
    """A section of an ELF file.

    Attributes:
        name: Its name, such as ``".nv.info.kernel"``.
        data: Its bytes in the file; empty for memory without initial values.
        size: Its size in bytes.
        link: Index of the section that it refers to, such as that of names for a table of symbols.
    """

    name: str
    data: bytes
    size: int
    link: int


def read_cubin(cubin: bytes) -> dict[str, KernelResources]:
    """Return the resources of every kernel of a cubin, by symbol.

    Raises:
        ValueError: The bytes are not a complete 64-bit little-endian ELF file.
    """
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError("the bytes are not a cubin: expected the header of a 64-bit little-endian ELF file")
    try:
        facts = _facts(elf_sections(cubin))
    except (struct.error, LookupError, ValueError) as error:
        raise ValueError(f"the bytes are not a cubin, or are truncated: {error}") from error
    reserved = _RESERVED_SMEM_BYTES if compute_capability(cubin) >= 90 else 0
    for entry in facts.values():
        entry["static_smem_bytes"] = max(0, entry.get("static_smem_bytes", 0) - reserved)
    return {name: KernelResources(**entry) for name, entry in facts.items() if "code_bytes" in entry}


def _facts(sections: list[ElfSection]) -> dict[str, dict[str, int]]:
    """Return the fields of `KernelResources` found in the sections, by symbol."""
    symbols = _symbols(sections)
    facts: dict[str, dict[str, int]] = {}
    for section in sections:
        kind, name = _kernel_of(section.name)
        if kind == ".text":
            facts.setdefault(name, {})["code_bytes"] = section.size
        elif kind == ".nv.shared":
            facts.setdefault(name, {})["static_smem_bytes"] = section.size
        elif kind == ".nv.info":
            for attribute, data in info_attributes(section.data):
                if attribute == _MAX_THREADS:
                    x, y, z = struct.unpack("<3I", data)
                    facts.setdefault(name, {})["max_threads"] = x * y * z
        elif section.name == ".nv.info":
            for attribute, data in info_attributes(section.data):
                if attribute in (_REGISTER_COUNT, _FRAME_BYTES):
                    symbol, value = struct.unpack("<2I", data)
                    field = "registers" if attribute == _REGISTER_COUNT else "stack_bytes"
                    facts.setdefault(symbols[symbol], {})[field] = value
    return facts


def compute_capability(cubin: bytes) -> int:
    """Return 80 for sm_80, from the flags of the ELF header; their position depends on the ABI version."""
    flags: int = struct.unpack_from("<I", cubin, 0x30)[0]
    return flags >> 8 & 0xFF if cubin[8] >= 8 else flags & 0xFF


def elf_sections(cubin: bytes) -> list[ElfSection]:
    """Return the sections of a cubin.

    Raises:
        ValueError: A section ends behind the end of the file.
    """
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQII", cubin, table + i * entry_bytes) for i in range(count)]
    names_at = headers[names_index][4]
    sections = []
    for name, kind, _, _, at, size, link, _ in headers:
        # A section of type 8 (SHT_NOBITS), such as shared memory, has a size and no bytes in the file.
        data = b"" if kind == 8 else cubin[at : at + size]
        if kind != 8 and len(data) < size:
            raise ValueError(f"a section ends at byte {at + size} of {len(cubin)}")
        sections.append(ElfSection(_text(cubin, names_at + name), data, size, link))
    return sections


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(0, at)].decode()


def _symbols(sections: list[ElfSection]) -> list[str]:
    for section in sections:
        if section.name == ".symtab":
            names = sections[section.link].data
            return [_text(names, at) for (at,) in struct.iter_unpack("<I20x", section.data)]
    return []


def _kernel_of(section_name: str) -> tuple[str, str]:
    """Split `.nv.shared.kernel` into the kind of section and the kernel."""
    match = re.fullmatch(r"(\.text|\.nv\.shared|\.nv\.info)\.(.+)", section_name)
    return (match[1], match[2]) if match else ("", "")


def info_attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the attributes of a section `.nv.info` that have data, each with its number."""
    at = 0
    while at + 4 <= len(data):
        layout, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if layout == _SIZED:
            yield attribute, data[at : at + value]
            at += value


def spills(log: str) -> dict[str, int]:
    """Return the bytes of spill stores plus loads per kernel, from the log of `ptxas -v`."""
    entries = re.findall(r"Function properties for (\S+)\s[^,]*, (\d+) bytes spill stores, (\d+)", log)
    return {name: int(stores) + int(loads) for name, stores, loads in entries}


def resources(cubin: bytes, symbols: tuple[str, ...], spill_bytes: Mapping[str, int] | None) -> Resources:
    """Return the maximum of each resource over the kernels that are launched.

    Args:
        cubin: Machine code.
        symbols: The kernels.
        spill_bytes: From `spills`; None without a log.
    """
    entries = read_cubin(cubin)
    used = [entries[symbol] for symbol in symbols]
    return Resources(
        registers=max(entry.registers for entry in used),
        static_smem_bytes=max(entry.static_smem_bytes for entry in used),
        spill_bytes=None if spill_bytes is None else max(spill_bytes.get(symbol, 0) for symbol in symbols),
        code_bytes=max(entry.code_bytes for entry in used),
    )


def launch_refusal(binary: Binary, launches: tuple[Launch, ...], device: Device) -> str | None:
    """Return why the driver of `device` would reject a launch, or None if it would not.

    Args:
        binary: Compiled from a `CudaVariant` or a `NumbaCudaVariant`.
        launches: Launches of the same configuration.
        device: The GPU to run on; it need not be on this machine.

    Source: CUDA C++ Programming Guide, "Compute Capabilities": registers per warp come in units of 256.
    """
    entries = read_cubin(binary.payload)
    for symbol, launch in zip(binary.entries, launches, strict=True):
        entry = entries[symbol]
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        allowed = min(entry.max_threads or 1024, 1024)
        if threads > allowed:
            return f"a block of {threads} threads exceeds the {allowed} that the kernel is compiled for"
        registers = ceil_div(32 * entry.registers, 256) * 256 * ceil_div(threads, 32)
        if registers > device.registers_per_sm:
            return f"a block needs {registers} registers; {device.name} has {device.registers_per_sm}"
        smem_bytes = entry.static_smem_bytes + launch.smem_bytes
        if smem_bytes > device.smem_per_block_bytes:
            max_bytes = device.smem_per_block_bytes
            return f"a block needs {smem_bytes} bytes of shared memory; {device.name} allows {max_bytes}"
    return None
