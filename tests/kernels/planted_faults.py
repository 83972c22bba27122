"""Faults planted in wrappers, kernels and the emulator, each with the check that must find it.

A fault replaces one text. `python -m tests.kernels.planted_faults` runs all of them and prints what found
each; the suite runs those that take little time. A fault that nothing finds is a gap of the checks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from tests.emulate import test_emulate_hopper as hopper
from tests.gpu import test_gpu_conformance as conformance
from tests.gpu.wrapper_conformance import by_name
from tests.kernels.planted_fault_checks import PlantedFault, found

__all__ = ["FAULTS"]

MOST_SAID = 170
"""Characters of a report in the table."""


def _case(test: Callable[[Any], object], name: str) -> Callable[[], object]:
    return lambda: test(by_name()[name])


def _wrapper(name: str, subject: str, right: str, wrong: str, **more: Any) -> PlantedFault:
    return PlantedFault(
        name=name, subject=subject, right=right, wrong=wrong, check="golden PTX", quick=True, **more
    )


def _kernel(name: str, subject: str, right: str, wrong: str, **more: Any) -> PlantedFault:
    return PlantedFault(
        name=name, subject=subject, right=right, wrong=wrong, check="watched emulation", **more
    )


def _shim(name: str, subject: str, right: str, wrong: str, *tests: Callable[[], object]) -> PlantedFault:
    return PlantedFault(name=name, subject=subject, right=right, wrong=wrong, check="tables", tests=tests)


BACKWARD, CONV = "attention/cuda_wgmma_backward", "conv2d/cuda_wgmma"

FAULTS: tuple[PlantedFault, ...] = (
    _wrapper(
        "wgmma: tnspA and tnspB swapped",
        "wgmma_m64k16",
        '"n"(int(A_ALONG_M)), "n"(int(B_ALONG_N))',
        '"n"(int(B_ALONG_N)), "n"(int(A_ALONG_M))',
        missed_before=True,
    ),
    _wrapper(
        "wgmma: descriptors of A and B swapped",
        "wgmma_m64k16",
        ': "l"(a), "l"(b), "r"(int(accumulate)), "n"',
        ': "l"(b), "l"(a), "r"(int(accumulate)), "n"',
        missed_before=True,
    ),
    _wrapper(
        "mma: registers 1 and 2 of A swapped",
        "mma_m16n8k16_f16",
        '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0])',
        '"r"(a[0]), "r"(a[2]), "r"(a[1]), "r"(a[3]), "r"(b[0])',
        missed_before=True,
    ),
    _kernel(
        "attention backward: no proxy fence before products read dS and copies overwrite terms",
        BACKWARD,
        "fence_proxy_async();  // products read dS",
        "// products read dS",
        missed_before=True,
    ),
    _kernel(
        "gemm: no settle() after the last wait",
        "gemm/cuda_wgmma",
        "for (int i = 0; i < COUNT; ++i) settle(sums[i][0]);",
        "for (int i = 0; i < COUNT; ++i) {}",
        missed_before=True,
        quick=True,
    ),
    _kernel(
        "gemm: setmaxnreg of 65536 registers, with 64512 launched",
        "gemm/cuda_wgmma",
        "take_registers<C::CONSUMER_REGISTERS>()",
        "take_registers<C::CONSUMER_REGISTERS + 8>()",
        missed_before=True,
        quick=True,
    ),
    _wrapper("ldmatrix_x2_trans: no .trans", "ldmatrix_x2_trans", "m8n8.x2.trans.shared", "m8n8.x2.shared"),
    _wrapper(
        "mma of bf16: f16 in the instruction",
        "mma_m16n8k16_bf16",
        "f32.bf16.bf16.f32",
        "f32.f16.f16.f32",
    ),
    _wrapper(
        "copy_pixels_4d: offsets of width and height swapped",
        "copy_pixels_4d",
        '"h"(right), "h"(down)\n',
        '"h"(down), "h"(right)\n',
    ),
    _wrapper(
        "copy_box_3d_multicast: coordinates x and y swapped",
        "copy_box_3d_multicast",
        '"r"(x), "r"(y), "r"(z), "r"(barrier), "h"(blocks)',
        '"r"(y), "r"(x), "r"(z), "r"(barrier), "h"(blocks)',
    ),
    _wrapper(
        "mbarrier_arrive_remote: the barrier of this block",
        "mbarrier_arrive_remote",
        "release.cta.shared::cluster",
        "release.cta.shared::cta",
    ),
    _wrapper("pack2 of f16: halves swapped", "pack2<half_t>", '"f"(high), "f"(low)', '"f"(low), "f"(high)'),
    _wrapper(
        "cp_async_ca: whole size in place of the source's",
        "cp_async_ca",
        '"n"(BYTES),\n               "r"(source_bytes)',
        '"n"(BYTES),\n               "r"(BYTES)',
    ),
    _wrapper(
        "wgmma: operands of n = 192 one register late",
        "wgmma_m64k16_registers",
        '"{%96,%97,%98,%99}"',
        '"{%97,%98,%99,%96}"',
    ),
    _wrapper(
        "settle: the last sum is left out",
        "settle",
        '"+f"(sums[j][2]), "+f"(sums[j][3])::"memory"',
        '"+f"(sums[j][2])::"memory"',
    ),
    _wrapper(
        "fence_proxy_async: of global memory",
        "fence_proxy_async",
        "fence.proxy.async.shared::cta",
        "fence.proxy.async.global",
    ),
    _wrapper("mbarrier_wait: tries once", "mbarrier_wait", "while (!done);", "while (false);"),
    _wrapper("take_registers: releases them", "take_registers", "setmaxnreg.inc.sync", "setmaxnreg.dec.sync"),
    _wrapper(
        "wgmma_wait: no clobber of memory",
        "wgmma_wait",
        'wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory")',
        'wgmma.wait_group.sync.aligned %0;" ::"n"(N))',
    ),
    _wrapper(
        "ldmatrix_x4: not volatile, no clobber of memory",
        "ldmatrix_x4",
        'asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"\n'
        '               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])\n'
        '               : "r"(shared_address(row))\n               : "memory")',
        'asm("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"\n'
        '               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])\n'
        '               : "r"(shared_address(row)))',
    ),
    _wrapper(
        "mbarrier_wait: not volatile",
        "mbarrier_wait",
        'asm volatile(\n        "{\\n.reg .pred p;\\nmbarrier.try_wait',
        'asm(\n        "{\\n.reg .pred p;\\nmbarrier.try_wait',
    ),
    _kernel(
        "gemm: launch bounds name no blocks per SM, so that ptxas ignores setmaxnreg",
        "gemm/cuda_wgmma",
        "__launch_bounds__(C::THREADS, C::MIN_BLOCKS)",
        "__launch_bounds__(C::THREADS)",
    ),
    _kernel(
        "gemm: the barrier expects 128 bytes less than arrive",
        "gemm/cuda_wgmma",
        "mbarrier_arrive_expect_tx(place.full(), BYTES);",
        "mbarrier_arrive_expect_tx(place.full(), BYTES - 128);",
    ),
    _kernel(
        "ring: parity is not advanced by skipped stages",
        "gemm/cuda_wgmma, pingpong",
        "stage = reached % STAGES, parity ^= reached / STAGES & 1;",
        "stage = reached % STAGES;",
    ),
    _kernel(
        "gemm: no fence before the products of a stage",
        "gemm/cuda_wgmma",
        "mbarrier_wait(place.full(), place.parity);\n    wgmma_fence();",
        "mbarrier_wait(place.full(), place.parity);\n    if (step == 0) wgmma_fence();",
    ),
    _kernel(
        "gemm: no proxy fence before copies overwrite what a prologue has read",
        "gemm/cuda_wgmma, prologue",
        "fence_proxy_async();  // a copy",
        "// a copy",
        quick=True,
    ),
    _kernel(
        "gemm of tf32: no proxy fence before products read what warps have rounded",
        "gemm/cuda_wgmma, tf32",
        "fence_proxy_async();  // products",
        "// products",
        quick=True,
    ),
    _kernel(
        "gemm of tf32: a stage is multiplied before it has been rounded",
        "gemm/cuda_wgmma, tf32",
        "mbarrier_wait(rounded<C>(place_of_b), place_of_b.parity);",
        "",
    ),
    _kernel(
        "gemm of tf32: a stage is multiplied before all warps have rounded it",
        "gemm/cuda_wgmma, tf32",
        "mbarrier_init(barriers + 8 * (2 * STAGES + CONSUMERS + i), HELPERS);",
        "mbarrier_init(barriers + 8 * (2 * STAGES + CONSUMERS + i), HELPERS - 1);",
    ),
    _kernel(
        "gemm of tf32: lanes overwrite a square before all have read it",
        "gemm/cuda_wgmma, tf32",
        "    __syncwarp();\n#pragma unroll\n    for (int i = 0; i < 4; ++i)",
        "#pragma unroll\n    for (int i = 0; i < 4; ++i)",
    ),
    _wrapper(
        "wgmma of tf32: registers 1 and 2 of A swapped",
        "wgmma_m64k8_tf32_registers",
        '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate))             \\\n',
        '"r"(a[0]), "r"(a[2]), "r"(a[1]), "r"(a[3]), "l"(b), "r"(int(accumulate))             \\\n',
    ),
    _kernel(
        "gemm with bulk stores: no proxy fence before a copy reads the box",
        "gemm/cuda_wgmma, bulk stores",
        "fence_proxy_async();  // a copy reads",
        "// a copy reads",
        quick=True,
    ),
    _kernel(
        "gemm with bulk stores: a box is filled again before it has been copied",
        "gemm/cuda_wgmma, bulk stores",
        "        wait_for_stores<0>();  // the last box",
        "        wait_for_stores<1>();  // the last box",
        quick=True,
    ),
    _kernel(
        "gemm with bulk stores: a copy starts before all lanes have filled the box",
        "gemm/cuda_wgmma, bulk stores",
        "lanes have written\n    __syncwarp();",
        "lanes have written\n",
    ),
    _wrapper(
        "wait_for_stores: waits for the writes, too, without .read",
        "wait_for_stores",
        "cp.async.bulk.wait_group.read",
        "cp.async.bulk.wait_group",
    ),
    _wrapper(
        "store_box_3d: coordinates x and y swapped",
        "store_box_3d",
        '"r"(x), "r"(y), "r"(z), "r"(source)',
        '"r"(y), "r"(x), "r"(z), "r"(source)',
    ),
    _kernel(
        "gemm by mma.sync: one group of copies too few is waited for",
        "gemm/cuda_mma",
        "cp_async_wait<STAGES - 2>();",
        "cp_async_wait<STAGES - 1>();",
    ),
    _kernel(
        "attention backward: dS is released before all lanes have stored it",
        BACKWARD,
        "overwrites the terms\n      __syncwarp();",
        "overwrites the terms\n",
    ),
    _kernel(
        "attention: q is released while the last scores are computed",
        "attention/cuda_wgmma",
        "if (i == tile.keys.end - 1) release<1>(q_empty);",
        "if (i == tile.keys.end - 2) release<1>(q_empty);",
    ),
    _kernel(
        "conv2d: distances of a tap swapped",
        CONV,
        "pixel.image, tap.right, tap.down, barrier);",
        "pixel.image, tap.down, tap.right, barrier);",
    ),
    _shim(
        "emulator: swizzle of 64 bytes permutes eight chunks",
        "box.h",
        "(swizzle_bytes / 16 - 1)",
        "7u",
        lambda: hopper.test_swizzle_permutes_chunks_by_line_number(64),
    ),
    _shim(
        "emulator: halves of a transposed ldmatrix register swapped",
        "ptx.cuh",
        "const u16 low = TRANSPOSED ? M[2 * t][g] : M[g][2 * t], high = TRANSPOSED ? M[2 * t + 1][g]",
        "const u16 low = TRANSPOSED ? M[2 * t + 1][g] : M[g][2 * t], high = TRANSPOSED ? M[2 * t][g]",
        _case(conformance.test_ldmatrix_elements_are_where_the_isa_states, "ldmatrix_x4_trans"),
    ),
    _shim(
        "emulator and kernels: offsets of a matrix descriptor swapped",
        "ptx_hopper.cuh",
        "u64(leading >> 4) << 16 | u64(stride >> 4) << 32",
        "u64(leading >> 4) << 32 | u64(stride >> 4) << 16",
        hopper.test_matrix_descriptor_encodes_fields_as_the_isa_states,
    ),
    _shim(
        "emulator: rows of wgmma sums swapped by halves",
        "warpgroup.h",
        "t % 32 / 4 + i % 4 / 2 * 8, column = i / 4 * 8",
        "t % 32 / 4 + (1 - i % 4 / 2) * 8, column = i / 4 * 8",
        _case(conformance.test_wgmma_cases_compute_matrix_products, "wgmma_m64k32_e4m3<64>"),
    ),
    _shim(
        "emulator: im2col copies ignore the stride between pixels",
        "box.h",
        "at[d] += map.steps[d];",
        "at[d] += 1;",
        lambda: hopper.test_im2col_copy_gathers_pixels_of_filter_tap(hopper.COLUMNS[1], "forward"),
    ),
)


def _said(report: str) -> str:
    """Return the start of a report, without where in the emulated grid it was."""
    text = re.sub(r"^order \w+: block \([\d,]+\)(?:, thread \([\d,]+\))?: ", "", report)
    text = re.sub(r"(\bline \d+) `[^`]*`", r"\1", text)
    return text if len(text) <= MOST_SAID else text[:MOST_SAID].rsplit(" ", 1)[0] + " …"


def main() -> int:
    """Print a table of faults and findings; return how many were missed."""
    missed = 0
    sys.stdout.write("| fault | in | check | found |\n|---|---|---|---|\n")
    for fault in FAULTS:
        if sys.argv[1:] and not re.search(sys.argv[1], fault.name):
            continue
        report = found(fault)
        missed += report is None
        short = (report or "**missed**").replace("|", "\\|").replace("\n", " ")
        name = f"{fault.name}{' (missed before)' if fault.missed_before else ''}"
        sys.stdout.write(f"| {name} | `{fault.subject}` | {fault.check} | {_said(short)} |\n")
    return missed


if __name__ == "__main__":
    sys.exit(main())
