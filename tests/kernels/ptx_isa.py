"""The PTX ISA's syntax of each instruction that a wrapper of kernels/*.cuh contains.

`sass` is the machine code that ptxas 13.5 compiles the instruction to for sm_90a, as nvdisasm prints it. It
is recorded from the compiler, because NVIDIA does not document machine code.
"""

from __future__ import annotations

import re

from tests.kernels import ptx_isa_hopper
from tests.kernels.ptx_probe import Operand, Probe
from tests.kernels.ptx_syntax import (
    CP_ASYNC,
    CP_ASYNC_COMMIT,
    CP_ASYNC_WAIT,
    CVT,
    CVT_PACK,
    EX2,
    FMA_F16X2,
    LDMATRIX,
    MMA,
    PRMT,
    RCP,
    RSQRT,
    Form,
    Step,
    Wrapper,
    listed,
    plain,
)

__all__ = ["STATEMENTS"]


def _mma(name: str, shape: str, element: str, sass: str, sums: str = "f32") -> Wrapper:
    """D = A B + C, where C is D: A by rows, B by columns."""
    ctype = "float" if sums == "f32" else "i32"
    d, a, b = Operand("d", ctype, 4), Operand("a", "u32", 4), Operand("b", "u32", 2)
    types = {"dtype": sums, "atype": element, "btype": element, "ctype": sums}
    vectors = {"d": listed("d", 4), "a": listed("a", 4), "b": listed("b", 2), "c": listed("d", 4)}
    return Wrapper(
        name=name,
        probe=Probe(call=f"{name}(d, a, b);", operands=(d, a, b), results=(d,)),
        steps=(
            Step(
                form=MMA,
                qualifiers={"shape": shape, "alayout": "row", "blayout": "col", **types},
                operands=vectors,
            ),
        ),
        # D, A, B, C: the registers of D and C are the same.
        sass=(rf"{re.escape(sass)} (R\d+), R\d+(?:\.ROW)?, R\d+(?:\.COL)?, (?:\1|RZ) ",),
    )


def _ldmatrix(name: str, count: int, trans: bool) -> Wrapper:
    d, row = Operand("d", "u32", count), Operand("row", "u64")
    qualifiers = {"shape": "m8n8", "num": f"x{count}", "ss": "shared", "type": "b16"}
    modifier = "MT88" if trans else "M88"
    return Wrapper(
        name=name,
        probe=Probe(call=f"{name}(d, reinterpret_cast<const void*>(row));", operands=(row,), results=(d,)),
        steps=(
            Step(
                form=LDMATRIX,
                qualifiers=qualifiers | ({"trans": "trans"} if trans else {}),
                operands={"r": listed("d", count), "p": "row"},
            ),
        ),
        sass=(rf"LDSM\.16\.{modifier}\.{count} ",),
    )


def _cp_async(call: str, cop: str, size: int, sass: str) -> Wrapper:
    """The source size is an operand: the rest of `size` bytes is zeroed."""
    pointers = "reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source)"
    return Wrapper(
        name=call.partition("<")[0],
        probe=Probe(
            call=f"{call}({pointers}, bytes);",
            operands=(Operand("target", "u64"), Operand("source", "u64"), Operand("bytes", "i32")),
        ),
        steps=(
            Step(
                form=CP_ASYNC,
                qualifiers={"cop": cop, "dst": "shared", "src": "global"},
                operands={"dst": "target", "src": "source", "cp-size": str(size), "src-size": "bytes"},
            ),
        ),
        sass=(sass,),
    )


def _function(
    name: str, call: str, operand: Operand, result: Operand, *steps: Step, sass: tuple[str, ...]
) -> Wrapper:
    """A function of one register."""
    return Wrapper(
        name=name, probe=Probe(call=call, operands=(operand,), results=(result,)), steps=steps, sass=sass
    )


def _cvt(dtype: str, atype: str, d: str, a: str, **qualifiers: str) -> Step:
    return Step(
        form=CVT, qualifiers={"dtype": dtype, "atype": atype, **qualifiers}, operands={"d": d, "a": a}
    )


def _pack2(element: str, dtype: str, sass: str) -> Wrapper:
    """The first element is at the lower address: the lower half of the register."""
    return Wrapper(
        name=f"pack2<{element}>",
        probe=Probe(
            call=f"pair = pack2<{element}>(low, high);",
            operands=(Operand("low", "float"), Operand("high", "float")),
            results=(Operand("pair"),),
        ),
        steps=(
            Step(
                form=CVT_PACK,
                qualifiers={"rnd": "rn", "dtype": dtype},
                operands={"d": "pair", "a": "high", "b": "low"},
            ),
        ),
        sass=(sass,),
    )


def _from_float(ctype: str, step: Step, sass: str) -> Wrapper:
    name = f"from_float<{ctype}>"
    return _function(name, f"y = {name}(x).bits;", _X, _BITS, step, sass=(sass,))


def _float_function(name: str, *steps: Step, sass: tuple[str, ...]) -> Wrapper:
    return _function(name, f"y = {name}(x);", _X, _Y, *steps, sass=sass)


def _unary(form: Form, d: str, a: str) -> Step:
    return Step(form=form, qualifiers={"ftz": "ftz"}, operands={"d": d, "a": a})


_HALF, _X, _Y, _BITS = Operand("h", "u16"), Operand("x", "float"), Operand("y", "float"), Operand("y")
_ZERO = "0f00000000"

STATEMENTS: tuple[Wrapper, ...] = (
    _mma("mma_m16n8k16_f16", "m16n8k16", "f16", "HMMA.16816.F32"),
    _mma("mma_m16n8k16_bf16", "m16n8k16", "bf16", "HMMA.16816.F32.BF16"),
    _mma("mma_m16n8k8_tf32", "m16n8k8", "tf32", "HMMA.1688.F32.TF32"),
    # sm_90a has no instruction for it: both halves are converted to f16 and multiplied.
    _mma("mma_m16n8k32_e4m3", "m16n8k32", "e4m3", "HMMA.16816.F32"),
    _mma("mma_m16n8k32_s8", "m16n8k32", "s8", "IMMA.16832.S8.S8", "s32"),
    Wrapper(
        name="multiply_add_f16x2",
        probe=Probe(
            call="sums = multiply_add_f16x2(x, y, z);",
            operands=(Operand("x"), Operand("y"), Operand("z")),
            results=(Operand("sums"),),
        ),
        steps=(
            Step(
                form=FMA_F16X2,
                qualifiers={"rnd": "rn"},
                operands={"d": "sums", "a": "x", "b": "y", "c": "z"},
            ),
        ),
        sass=(r"HFMA2(\.MMA)? R\d+, R\d+, R\d+, R\d+ ",),
    ),
    Wrapper(
        name="pick_bytes",
        probe=Probe(
            call="picked = pick_bytes<0x6420>(low, high);",
            operands=(Operand("low"), Operand("high")),
            results=(Operand("picked"),),
        ),
        # Bytes 0 to 3 are those of a, 4 to 7 those of b; digit i of c selects byte i.
        steps=(Step(form=PRMT, operands={"d": "picked", "a": "low", "b": "high", "c": str(0x6420)}),),
        sass=(r"PRMT R\d+, R\d+, 0x6420, R\d+",),
    ),
    _ldmatrix("ldmatrix_x4", 4, trans=False),
    _ldmatrix("ldmatrix_x4_trans", 4, trans=True),
    _ldmatrix("ldmatrix_x2", 2, trans=False),
    _ldmatrix("ldmatrix_x2_trans", 2, trans=True),
    _cp_async("cp_async_ca<4>", "ca", 4, r"LDGSTS\.E\.ZFILL "),
    _cp_async("cp_async_ca<8>", "ca", 8, r"LDGSTS\.E\.64\.ZFILL "),
    _cp_async("cp_async_ca<16>", "ca", 16, r"LDGSTS\.E\.128\.ZFILL "),
    _cp_async("cp_async_cg", "cg", 16, r"LDGSTS\.E\.BYPASS\.128\.ZFILL "),
    plain("cp_async_commit", "cp_async_commit();", CP_ASYNC_COMMIT, "LDGDEPBAR "),
    plain(
        "cp_async_wait", "cp_async_wait<2>();", CP_ASYNC_WAIT, r"DEPBAR\.LE SB0, 0x2 ", operands={"N": "2"}
    ),
    _float_function("fast_exp2", _unary(EX2, "y", "x"), sass=(r"MUFU\.EX2 ",)),
    _float_function("fast_rsqrt", _unary(RSQRT, "y", "x"), sass=(r"MUFU\.RSQ ",)),
    # 1 / (1 + 2^(-x log2(e))): 0fBFB8AA3B is -log2(e), 0f3F800000 is 1.
    _float_function(
        "fast_sigmoid",
        _unary(EX2, "t0", "mul(x,0fBFB8AA3B)"),
        _unary(RCP, "y", "add(t0,0f3F800000)"),
        sass=(r"MUFU\.EX2 ", r"MUFU\.RCP "),
    ),
    _function(
        "to_float(half_t)",
        "y = to_float(half_t{h});",
        _HALF,
        _Y,
        _cvt("f32", "f16", "y", "h"),
        sass=(r"HADD2\.F32 R\d+, -RZ, R\d+\.H0_H0 ",),
    ),
    # Two e4m3 are converted to two f16; the lower one is widened.
    _function(
        "to_float(e4m3_t)",
        "y = to_float(e4m3_t{u8(h)});",
        _HALF,
        _Y,
        _cvt("f16x2", "e4m3x2", "t0", "h", rnd="rn"),
        _cvt("f32", "f16", "y", "t0"),
        sass=(r"F2FP\.F16\.E4M3\.UNPACK_B ", r"HADD2\.F32 R\d+, -RZ, R\d+\.H0_H0 "),
    ),
    _from_float("half_t", _cvt("f16", "f32", "y", "x", rnd="rn"), r"F2FP?\.F16\.F32"),
    _from_float("bf16_t", _cvt("bf16", "f32", "y", "x", rnd="rn"), r"F2FP?\.BF16\.F32"),
    # Two f32 are converted to two e4m3; the lower one is the result.
    _from_float(
        "e4m3_t",
        Step(
            form=CVT_PACK,
            qualifiers={"rnd": "rn", "sat": "satfinite", "dtype": "e4m3x2"},
            operands={"d": "y", "a": _ZERO, "b": "x"},
        ),
        r"F2FP\.SATFINITE\.E4M3\.F32\.PACK_AB_MERGE_C R\d+, RZ, R\d+, RZ ",
    ),
    _pack2("half_t", "f16x2", r"F2FP\.F16\.F32\.PACK_AB "),
    _pack2("bf16_t", "bf16x2", r"F2FP\.BF16\.F32\.PACK_AB "),
    _function(
        "to_tf32",
        "y = to_tf32(x);",
        _X,
        _BITS,
        _cvt("tf32", "f32", "y", "x", rnd="rna"),
        # No instruction of its own: half of the last place is added, and the bits below are cleared.
        sass=(r"LOP3\.LUT R\d+, R\d+, 0xffffe000, ",),
    ),
    *ptx_isa_hopper.STATEMENTS,
)
"""Every wrapper, in each form."""
