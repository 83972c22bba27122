"""Predicted times from machine code: loops, widths, and what distinguishes binaries of equal grids."""

from __future__ import annotations

import pytest

from tunebench.binary.code_forecast import code_costs
from tunebench.outcome import Resources
from tunebench.variant import Costs

CODE = """
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_0:
        /*0010*/                   LDGSTS.E.BYPASS.128 [R21], desc[UR14][R4.64], P0 ;
        /*0020*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0030*/                   LDSM.16.M88.4 R8, [R9] ;
        /*0040*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0050*/                   MUFU.EX2 R1, R2 ;
        /*0060*/              @!P1 FADD R1, R2, R3 ;
        /*0070*/                   LDS.64 R2, [R3] ;
        /*0080*/                   IADD3 R0, R0, 0x1, RZ ;
        /*0090*/               @P0 BRA `(.L_x_0) ;
        /*00a0*/                   STG.E.U16 desc[UR4][R2.64], R1 ;
        /*00b0*/                   EXIT ;
.L_x_1:
        /*00c0*/                   NANOSLEEP 0x1 ;
        /*00d0*/                   BRA `(.L_x_0) ;
"""
PLAIN = Costs(blocks=10, full_blocks=0, threads=64)
USED = Resources(registers=40, static_smem_bytes=16, dynamic_smem_bytes=2048)


def test_instructions_of_loops_count_as_often_as_they_run() -> None:
    costs = code_costs(PLAIN, CODE, USED, warps=2, trips=(5,), stages=3)
    execution = costs.execution
    assert execution is not None
    assert execution.accesses == 2 * 32 * (1 + 5 * 2 + 1)  # without matrix loads
    assert execution.instructions == 2 * (1 + 5 * 9 + 4) - execution.accesses / 32
    assert execution.passes == 2 * 5 * (4 + 4 + 2)
    assert execution.l2_bytes == 2 * 32 * (16 + 5 * 16 + 2)
    assert (execution.memory_waits, execution.prefetched_waits, execution.barriers) == (0, 5 / 2, 5)
    assert execution.code_bytes == 9 * 16  # a branch back from code out of line is no loop
    assert (costs.sfu, costs.registers, costs.smem_bytes) == (2 * 32 * 5, 40, 2064)


def test_code_without_a_disassembler_has_its_resources() -> None:
    costs = code_costs(PLAIN, "", USED, warps=2, trips=(5,), stages=3)
    assert (costs.registers, costs.smem_bytes, costs.sfu) == (40, 2064, 0)


def test_loops_that_compilers_add_run_as_often_as_the_longest() -> None:
    body = CODE.partition("EXIT")[0]
    twice = code_costs(PLAIN, body + body.replace("L_x_0", "L_x_9"), USED, warps=1, trips=(5, 3, 2), stages=2)
    assert twice.execution is not None
    assert twice.execution.barriers == pytest.approx(10)
