"""Cases of the PTX wrappers for sm_75 to sm_89."""

from __future__ import annotations

from typing import Any

from tests.gpu.wrapper_case import Kind, Operand, WrapperCase

__all__ = ["CASES"]

FLOATS_8 = Operand("x", 8, "floats")


def _mma(name: str, kind: Kind, sums: Kind = "f32", **more: Any) -> WrapperCase:
    d, a, b = Operand("d", 4, sums), Operand("a", 4, kind), Operand("b", 2, kind)
    return WrapperCase(name, (d, a, b), f"{name}(d, a, b);", (d,), **more)


def _ldmatrix(name: str, registers: int) -> WrapperCase:
    # Rows are permuted among lanes, so that a wrong lane-to-address map changes the result.

    body = f"""__shared__ __align__(16) u32 rows[32 * 4];
  for (int i = 0; i < 4; ++i) rows[4 * threadIdx.x + i] = m[i];
  __syncthreads();
  {name}(d, rows + 4 * row[0]);"""
    inputs = (Operand("m", 4), Operand("row", 1, "rows"))
    return WrapperCase(name, inputs, body, (Operand("d", registers),), minimum_cc=(7, 5))


def _cp_async(call: str, name: str, size: int) -> WrapperCase:
    """Copy the thread's operands, zero-filling the rest, in two groups awaited in turn."""
    body = f"""__shared__ __align__(16) u32 copied[2][32][4];
  const u32* const here = inputs + at * IN_WORDS;
  const int asked = min(int(bytes[0]), {size});
  for (int i = 0; i < 4; ++i) copied[0][threadIdx.x][i] = copied[1][threadIdx.x][i] = ~0u;
  {call}(copied[0][threadIdx.x], here, asked);
  cp_async_commit();
  {call}(copied[1][threadIdx.x], here + 4);
  cp_async_commit();
  cp_async_wait<1>();
  __syncthreads();
  for (int i = 0; i < 4; ++i) first[i] = copied[0][31 - threadIdx.x][i];
  cp_async_wait<0>();
  __syncthreads();
  for (int i = 0; i < 4; ++i) second[i] = copied[1][31 - threadIdx.x][i];"""
    # Padded to a multiple of 16 bytes a thread, which the copies are aligned to.
    inputs = (Operand("m", 4), Operand("n", 4), Operand("bytes", 1, "bytes"), Operand("unused", 3))
    covers = (name, "cp_async_commit", "cp_async_wait")
    return WrapperCase(
        f"{call}, {size} bytes", inputs, body, (Operand("first", 4), Operand("second", 4)), covers
    )


def _convert(name: str, inputs: Operand, body: str, outputs: Operand, **more: Any) -> WrapperCase:
    return WrapperCase(name, (inputs,), body, (outputs,), files=("types",), **more)


def _from_float(element: str, kind: Kind, **more: Any) -> WrapperCase:
    name = f"from_float<{element}>"
    return _convert(name, FLOATS_8, f"EACH(8) r[i] = {name}(x[i]).bits;", Operand("r", 8, kind), **more)


def _to_float(element: str, bits: str, **more: Any) -> WrapperCase:
    name, body = f"to_float({element})", f"EACH(8) r[i] = to_float({element}{{{bits}(h[i])}});"
    return _convert(name, Operand("h", 8), body, Operand("r", 8, "floats"), **more)


def _pack2(element: str, kind: Kind) -> WrapperCase:
    name = f"pack2<{element}>"
    body = f"EACH(4) r[i] = {name}(x[2 * i], x[2 * i + 1]);"
    return _convert(name, FLOATS_8, body, Operand("r", 4, kind))


def _approximate(name: str, argument: str, file: str = "reduce") -> WrapperCase:
    body = f"EACH(8) r[i] = {name}({argument});"
    inputs, outputs = (Operand("x", 8, "numbers"),), (Operand("r", 8, "approx"),)
    return WrapperCase(name, inputs, body, outputs, minimum_cc=(7, 5), files=("types", file))


CASES: tuple[WrapperCase, ...] = (
    _mma("mma_m16n8k16_f16", "f16"),
    _mma("mma_m16n8k16_bf16", "bf16"),
    _mma("mma_m16n8k8_tf32", "tf32"),
    _mma("mma_m16n8k32_e4m3", "e4m3", minimum_cc=(8, 9)),
    _mma("mma_m16n8k32_by_f16", "e4m3", covers=("multiply_add_f16x2",)),
    _mma("mma_m16n8k32_s8", "i8", "i32"),
    WrapperCase(
        "multiply_add_f16x2",
        (Operand("m", 3, "f16"),),
        "r[0] = multiply_add_f16x2(m[0], m[1], m[2]);",
        (Operand("r", 1, "f16"),),
        minimum_cc=(7, 5),
    ),
    WrapperCase(
        "pick_bytes",
        (Operand("m", 2),),
        "r[0] = pick_bytes<0x6420>(m[0], m[1]), r[1] = pick_bytes<0x7531>(m[0], m[1]), "
        "r[2] = pick_bytes<0x0371>(m[1], m[0]);",
        (Operand("r", 3),),
        minimum_cc=(7, 5),
    ),
    _ldmatrix("ldmatrix_x4", 4),
    _ldmatrix("ldmatrix_x4_trans", 4),
    _ldmatrix("ldmatrix_x2", 2),
    _ldmatrix("ldmatrix_x2_trans", 2),
    *(_cp_async(f"cp_async_ca<{size}>", "cp_async_ca", size) for size in (4, 8, 16)),
    _cp_async("cp_async_cg", "cp_async_cg", 16),
    _from_float("half_t", "f16", minimum_cc=(7, 5)),
    _from_float("bf16_t", "bf16"),
    _pack2("half_t", "f16"),
    _pack2("bf16_t", "bf16"),
    _convert("to_tf32", FLOATS_8, "EACH(8) r[i] = to_tf32(x[i]);", Operand("r", 8, "floats")),
    _to_float("half_t", "u16", minimum_cc=(7, 5)),
    _to_float("e4m3_t", "u8", minimum_cc=(8, 9)),
    _from_float("e4m3_t", "e4m3", minimum_cc=(8, 9)),
    _approximate("fast_exp2", "x[i]"),
    _approximate("fast_rsqrt", "fabsf(x[i])"),
    _approximate("fast_sigmoid", "x[i]", "epilogue"),
)
"""One case per wrapper, or one per form of a wrapper."""
