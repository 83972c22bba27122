"""Output of `tunebench show` for a binary: machine code, PTX, or resources."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tunebench import _environment
from tunebench.binary.disassembly import count_instructions
from tunebench.binary.occupancy import KernelUse, kernel_uses
from tunebench.binary.ptxas_note import objections
from tunebench.cli._choice import describe, in_words
from tunebench.cli._output import emit, printable, table
from tunebench.compile import BinaryCache, compile_config
from tunebench.compile.assembly import machine_code, ptx
from tunebench.variant import CudaVariant, GpuVariant

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.tuning.choice import ChosenConfig

__all__ = ["inspect"]


def inspect(choice: ChosenConfig, view: str, as_json: bool) -> None:
    """Compile a configuration, or read it from the cache, and print one view of it.

    Args:
        choice: The configuration.
        view: ``"sass"``, ``"ptx"`` or ``"resources"``.
        as_json: Whether to print JSON.
    """
    {"sass": _show_sass, "ptx": _show_ptx, "resources": _show_resources}[view](choice, as_json)


def _cache() -> BinaryCache:
    return BinaryCache(_environment.binary_folder())


def _title(choice: ChosenConfig) -> str:
    return f"{choice.workload} on {choice.device.key}: {in_words(choice)}"


def _show_sass(choice: ChosenConfig, as_json: bool) -> None:
    variant, workload, config = choice.variant, choice.workload, choice.config
    code = machine_code(variant, workload, config, choice.device, _cache())
    counts = count_instructions(code)
    claims = variant.claims(workload, config) if isinstance(variant, CudaVariant) else ()
    data = {
        **describe(choice),
        "instructions": counts,
        "claims": {name: counts.get(name, 0) for name in claims},
        "code": code,
    }
    summary = ", ".join(f"{name} {count}" for name, count in counts.items())
    mark = "//" if isinstance(variant, GpuVariant) else "#"
    lines = f"{mark} {_title(choice)}\n{code}{mark} {sum(counts.values())} instructions: {summary}\n"
    emit(as_json, data, lambda to: _write(lines))


def _show_ptx(choice: ChosenConfig, as_json: bool) -> None:
    code = ptx(choice.variant, choice.workload, choice.config, choice.device)
    lines = f"// {_title(choice)}\n{code.rstrip()}\n"
    emit(as_json, {**describe(choice), "code": code}, lambda to: _write(lines))


def _write(text: str) -> None:
    sys.stdout.write(printable(text))  # rich would measure every line


def _show_resources(choice: ChosenConfig, as_json: bool) -> None:
    binary = compile_config(choice.variant, choice.workload, choice.config, choice.device, _cache())
    uses: tuple[KernelUse, ...] = ()
    if isinstance(choice.variant, GpuVariant):
        launches = binary.launches(choice.variant.launches(choice.workload, choice.config))
        uses = kernel_uses(binary, launches, choice.device)
    data = {
        **describe(choice),
        "target": binary.target,
        "spill_bytes": binary.resources.spill_bytes,
        "code_bytes": binary.resources.code_bytes,
        "objections": objections(binary.notes),
        "kernels": [_plain(use, choice.device.sm_count) for use in uses],
    }

    def render(to: Console) -> None:
        to.print(_title(choice), soft_wrap=True)
        spills = (
            "" if binary.resources.spill_bytes is None else f", {binary.resources.spill_bytes} bytes spilled"
        )
        size = binary.resources.code_bytes
        code = "a library, nothing is compiled" if size is None else f"{size} bytes of code"
        to.print(f"  {binary.target}: {code}{spills}")
        for objection in data["objections"]:
            to.print(f"  {objection}", soft_wrap=True)
        for use in data["kernels"]:
            to.print(f"  {use['kernel']}", soft_wrap=True)
            to.print(table("", "", rows=_rows(use)))

    emit(as_json, data, render)


def _plain(use: KernelUse, sm_count: int) -> dict[str, Any]:
    occupancy = use.occupancy
    return {
        "kernel": use.entry or use.symbol,
        "symbol": use.symbol,
        "grid": use.launch.grid_on(sm_count),
        "cluster": use.launch.cluster,
        "block": use.launch.block,
        "registers": use.used.registers,
        "static_smem_bytes": use.used.static_smem_bytes,
        "dynamic_smem_bytes": use.launch.smem_bytes,
        "stack_bytes": use.used.stack_bytes,
        "code_bytes": use.used.code_bytes,
        "blocks_per_sm": occupancy.blocks,
        "warps_per_sm": occupancy.warps,
        "most_warps_per_sm": occupancy.most_warps,
        "occupancy": occupancy.warps / occupancy.most_warps,
        "limited_by": occupancy.limited_by,
    }


def _rows(use: dict[str, Any]) -> list[tuple[str, str]]:
    grid, block = (" x ".join(map(str, use[name])) for name in ("grid", "block"))
    smem = f"{use['static_smem_bytes']} static, {use['dynamic_smem_bytes']} dynamic"
    resident = f"{use['blocks_per_sm']} blocks, {use['warps_per_sm']} of {use['most_warps_per_sm']} warps"
    return [
        ("  grid", grid),
        ("  block", block),
        *([("  cluster", str(use["cluster"]))] if use["cluster"] > 1 else []),
        ("  registers per thread", str(use["registers"])),
        ("  shared memory per block", f"{smem} bytes"),
        ("  local memory per thread", f"{use['stack_bytes']} bytes"),
        ("  code", f"{use['code_bytes']} bytes"),
        (
            "  resident per SM",
            f"{resident} ({use['occupancy']:.0%}), limited by {', '.join(use['limited_by'])}",
        ),
    ]
