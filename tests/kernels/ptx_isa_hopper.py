"""The PTX ISA's syntax of the instructions that only sm_90a has. See ptx_isa.py."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.kernels.ptx_probe import EMPTY, Operand, Probe
from tests.kernels.ptx_syntax import (
    BULK_COMMIT,
    BULK_TENSOR,
    BULK_TENSOR_STORE,
    BULK_WAIT,
    CLUSTER_ARRIVE,
    CLUSTER_WAIT,
    GUARDED_STORE,
    MAPA,
    MBARRIER_ARRIVE,
    MBARRIER_FENCE,
    MBARRIER_INIT,
    MBARRIER_TRY_WAIT,
    MOV,
    PREFETCH_MAP,
    PROXY_FENCE,
    RED_VECTOR,
    SELP,
    SETMAXNREG,
    SETP,
    SHARED_CLUSTER,
    SHARED_CTA,
    WGMMA,
    WGMMA_COMMIT,
    WGMMA_FENCE,
    WGMMA_OF_INTEGERS,
    WGMMA_WAIT,
    Step,
    Wrapper,
    listed,
    plain,
)

__all__ = ["STATEMENTS"]


def _copy(name: str, axes: int, *, pixels: bool = False, multicast: bool = False) -> Wrapper:
    """The box, or the pixels, at coordinates from the innermost dimension on."""
    coordinates = ("channel", "x", "y", "image") if pixels else ("x", "y", "z")[:axes]
    offsets = ("right", "down") if pixels else ()
    call = ", ".join(
        ["target", "map", *(f"int({at})" for at in coordinates), *offsets, "barrier", *["blocks"] * multicast]
    )
    operands = {
        "dstMem": "target",
        "tensorMap": "map",
        "tensorCoords": f"{{{','.join(coordinates)}}}",
        "mbar": "barrier",
    }
    qualifiers = {
        "dim": f"{axes}d",
        "dst": SHARED_CLUSTER,
        "src": "global",
        "load_mode": "im2col" if pixels else "tile",
        "completion_mechanism": "mbarrier::complete_tx::bytes",
    }
    if pixels:
        operands["im2colOffsets"] = f"{{{','.join(offsets)}}}"
    if multicast:
        operands["ctaMask"], qualifiers["multicast"] = "blocks", "multicast::cluster"
    narrow = (*offsets, *["blocks"] * multicast)
    words = ("target", *coordinates, "barrier")
    mode = ".IM2COL" * pixels + ".MULTICAST" * multicast
    return Wrapper(
        name=name,
        probe=Probe(
            call=f"{name}({call});",
            operands=(*(Operand(word) for word in words), *(Operand(word, "u16") for word in narrow)),
        ),
        steps=(Step(form=BULK_TENSOR, qualifiers=qualifiers, operands=operands),),
        sass=(rf"UTMALDG\.{axes}D{re.escape(mode)} ",),
    )


def _store() -> Wrapper:
    """The box at coordinates from the innermost dimension on, in the thread's bulk group."""
    return Wrapper(
        name="store_box_3d",
        probe=Probe(
            call="store_box_3d(source, map, int(x), int(y), int(z));",
            operands=tuple(Operand(word) for word in ("source", "x", "y", "z")),
        ),
        steps=(
            Step(
                form=BULK_TENSOR_STORE,
                qualifiers={
                    "dim": "3d",
                    "dst": "global",
                    "src": SHARED_CTA,
                    "load_mode": "tile",
                    "completion_mechanism": "bulk_group",
                },
                operands={"tensorMap": "map", "tensorCoords": "{x,y,z}", "srcMem": "source"},
            ),
        ),
        sass=(r"UTMASTG\.3D ",),
    )


def _wgmma(
    element: str, n: int, *, registers: bool = False, along_m: bool = False, along_n: bool = False
) -> Wrapper:
    """D = A B, plus D if `accumulate`. A or B is transposed ("imm-trans") if it is M- or N-major."""
    eight_bit, integers, tf32 = element in ("e4m3", "s8"), element == "s8", element == "tf32"
    transposes = not eight_bit and not tf32
    depth = {"e4m3": 32, "s8": 32, "tf32": 8}.get(element, 16)
    ctype = {"f16": "half_t", "bf16": "bf16_t"}.get(element, "")
    majors = [str(flag).lower() for flag in ([along_n] if registers else [along_m, along_n])]
    name = f"wgmma_m64k{depth}{'' if transposes else f'_{element}'}{'_registers' if registers else ''}"
    arguments = ", ".join([ctype, str(n), *majors]) if transposes else str(n)
    kind = "i32" if integers else "float"
    sums, a = Operand("d", kind, n // 2), Operand("a", "u32", 4) if registers else Operand("a", "u64")
    call = f"reinterpret_cast<{kind} (&)[{n // 8}][4]>(d), a, b, accumulate != 0"
    shape = f"m64n{n}k{depth}"
    trans = {"imm-trans-b": str(int(along_n))} | ({} if registers else {"imm-trans-a": str(int(along_m))})
    mode = {"f16": ".F32", "e4m3": ".F32.E4M3.E4M3", "s8": ".S8.S8"}.get(element, f".F32.{element.upper()}")
    scales = {} if integers else {"imm-scale-a": "1", "imm-scale-b": "1"}
    of_a = r"R\d+" if registers else r"gdesc\[UR\d+\]"
    majors_of = (".tnspA" * along_m) + (".tnspB" * along_n)
    size = f"64x{n}x{depth}"
    return Wrapper(
        name=name,
        probe=Probe(
            call=f"{name}<{arguments}>({call});",
            operands=(sums, a, Operand("b", "u64"), Operand("accumulate")),
            results=(sums,),
        ),
        steps=(
            Step(
                form=SETP,
                qualifiers={"CmpOp": "ne", "type": "b32"},
                operands={"p": "p", "a": "accumulate", "b": "0"},
            ),
            Step(
                form=WGMMA_OF_INTEGERS if integers else WGMMA,
                qualifiers={
                    "shape": shape,
                    "dtype": "s32" if integers else "f32",
                    "atype": element,
                    "btype": element,
                },
                operands={
                    "d": listed("d", n // 2),
                    "a": listed("a", 4) if registers else "a",
                    "b-desc": "b",
                    "scale-d": "p",
                    **scales,
                    **(trans if transposes else {}),
                },
            ),
        ),
        sass=(
            rf"{'I' if integers else 'Q' if eight_bit else 'H'}GMMA\.{size}{re.escape(mode)} (R\d+), {of_a}"
            rf"{', gdesc.UR[0-9]+.' if registers else ''}{re.escape(majors_of)}, \1, ",
        ),
    )


def _settle(kind: str) -> Wrapper:
    """No instruction; equal values are in one register unless the compiler must take each for a new one."""
    return Wrapper(
        name="settle",
        probe=Probe(
            call=f"for (int i = 0; i < 8; ++i) d[i] = x; settle(reinterpret_cast<{kind} (&)[2][4]>(d));",
            operands=(Operand("x", kind),),
            results=(Operand("d", kind, 8),),
        ),
        steps=(EMPTY, EMPTY),
        result_registers=8,
    )


def _arrival(name: str, space: str, *, expects: bool = False) -> Wrapper:
    """Arrivals release this thread's writes to the block, at a barrier of the block or of the cluster."""
    qualifiers = {"sem": "release", "scope": "cta", "space": space}
    operands = {"addr": "barrier"}
    if expects:
        qualifiers["expect_tx"], operands["tx-count"] = "expect_tx", "bytes"
    return plain(
        name,
        f"{name}({'barrier, bytes' if expects else 'barrier'});",
        MBARRIER_ARRIVE,
        r"SYNCS\.ARRIVE\.TRANS64(?:\.RED)?(?:\.A1T0|\.A0TR)? ",
        "barrier",
        *(["bytes"] if expects else []),
        qualifiers=qualifiers,
        operands=operands,
    )


def _wait() -> Wrapper:
    """Repeats until the phase of that parity has ended; acquires what arrived in it."""
    wait = Step(
        form=MBARRIER_TRY_WAIT,
        qualifiers={"sem": "acquire", "scope": "cta", "space": SHARED_CTA},
        operands={"waitComplete": "p", "addr": "barrier", "phaseParity": "parity"},
    )
    done = Step(form=SELP, qualifiers={"type": "u32"}, operands={"d": "t0", "a": "1", "b": "0", "c": "p"})
    return Wrapper(
        name="mbarrier_wait",
        probe=Probe(call="mbarrier_wait(barrier, parity);", operands=(Operand("barrier"), Operand("parity"))),
        steps=(wait, done),
        loops=True,
        sass=(r"SYNCS\.PHASECHK\.TRANS64\.TRYWAIT P\d, ",),
    )


def _computed_by_now() -> Wrapper:
    """A store that never happens, since the value is never -1: 0fBF800000 as an f32."""
    compare = Step(
        form=SETP,
        qualifiers={"CmpOp": "eq", "type": "f32"},
        operands={"p": "p", "a": "value", "b": "0fBF800000"},
    )
    store = Step(
        form=GUARDED_STORE, qualifiers={"ss": "shared", "type": "f32"}, operands={"a": "0", "b": "value"}
    )
    return Wrapper(
        name="computed_by_now",
        probe=Probe(call="computed_by_now(value);", operands=(Operand("value", "float"),)),
        steps=(compare, str(store).replace("@p.st", "@p st")),
        sass=(r"FSETP\.\w+\.AND P\d, PT, R\d+, -1, PT",),
    )


def _widths() -> Iterator[Wrapper]:
    for n in (64, 128, 192, 256):
        yield _wgmma("f16", n)
        yield _wgmma("bf16", n, along_n=True)
        yield _wgmma("f16", n, registers=True, along_n=True)
        yield _wgmma("bf16", n, registers=True)
        yield _wgmma("tf32", n, registers=True)
        yield _wgmma("e4m3", n)
        yield _wgmma("s8", n)
    yield _wgmma("f16", 64, along_m=True)
    yield _wgmma("f16", 128, along_n=True)
    yield _wgmma("bf16", 64, along_m=True)
    yield _wgmma("bf16", 64, along_m=True, along_n=True)


STATEMENTS: tuple[Wrapper, ...] = (
    plain(
        "mbarrier_init",
        "mbarrier_init(barrier, count);",
        MBARRIER_INIT,
        r"SYNCS\.EXCH\.64 ",
        "barrier",
        "count",
        qualifiers={"shared": SHARED_CTA},
        operands={"addr": "barrier"},
    ),
    plain("fence_mbarrier_init", "fence_mbarrier_init();", MBARRIER_FENCE, ""),
    plain(
        "fence_proxy_async",
        "fence_proxy_async();",
        PROXY_FENCE,
        r"FENCE\.VIEW\.ASYNC\.S ",
        qualifiers={"proxykind": "async.shared::cta"},
    ),
    _arrival("mbarrier_arrive", SHARED_CTA),
    _arrival("mbarrier_arrive_remote", SHARED_CLUSTER),
    _arrival("mbarrier_arrive_expect_tx", SHARED_CTA, expects=True),
    _wait(),
    _copy("copy_box_2d", 2),
    _copy("copy_box_3d", 3),
    _copy("copy_box_3d_multicast", 3, multicast=True),
    _copy("copy_pixels_4d", 4, pixels=True),
    _copy("copy_pixels_4d_multicast", 4, pixels=True, multicast=True),
    _store(),
    plain("commit_stores", "commit_stores();", BULK_COMMIT, "UTMACMDFLUSH "),
    plain(
        "wait_for_stores",
        "wait_for_stores<1>();",
        BULK_WAIT,
        r"DEPBAR\.LE SB0, 0x1 ",
        qualifiers={"read": "read"},
        operands={"N": "1"},
    ),
    plain(
        "prefetch_tensor_map",
        "prefetch_tensor_map(map);",
        PREFETCH_MAP,
        r"UTMACCTL\.PF ",
        operands={"a": "map"},
    ),
    plain("wgmma_fence", "wgmma_fence();", WGMMA_FENCE, r"WARPGROUP\.ARRIVE "),
    plain("wgmma_commit", "wgmma_commit();", WGMMA_COMMIT, ""),
    plain(
        "wgmma_wait", "wgmma_wait<1>();", WGMMA_WAIT, r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1 ", operands={"N": "1"}
    ),
    *map(_settle, ("float", "i32")),
    _computed_by_now(),
    *_widths(),
    Wrapper(
        name="add_to_global",
        probe=Probe(
            call="add_to_global(reinterpret_cast<float*>(target), values);",
            operands=(Operand("target", "u64"), Operand("values", "float", 4)),
        ),
        steps=(
            Step(
                form=RED_VECTOR,
                qualifiers={"sem": "relaxed", "scope": "gpu", "global": "global", "vec_32_bit": "v4"},
                operands={"a": "target", "b": listed("values", 4)},
            ),
        ),
        sass=(r"REDG\.E\.ADD\.F32x4\.FTZ\.RN\.STRONG\.GPU ",),
    ),
    plain(
        "give_registers",
        "give_registers<40>();",
        SETMAXNREG,
        r"USETMAXREG\.DEALLOC\.CTAPOOL 0x28",
        qualifiers={"action": "dec"},
        operands={"imm-reg-count": "40"},
    ),
    plain(
        "take_registers",
        "take_registers<232>();",
        SETMAXNREG,
        r"USETMAXREG\.TRY_ALLOC\.CTAPOOL UP\d, 0xe8",
        qualifiers={"action": "inc"},
        operands={"imm-reg-count": "232"},
    ),
    Wrapper(
        name="cluster_rank",
        probe=Probe(call="rank = cluster_rank();", results=(Operand("rank"),)),
        steps=(Step(form=MOV, qualifiers={"type": "u32"}, operands={"d": "rank", "a": "%cluster_ctarank"}),),
        sass=(r"S2U?R U?R\d+, SR_CgaCtaId ",),
    ),
    Wrapper(
        name="cluster_address",
        probe=Probe(
            call="there = cluster_address(address, rank);",
            operands=(Operand("address"), Operand("rank")),
            results=(Operand("there"),),
        ),
        steps=(
            Step(
                form=MAPA,
                qualifiers={"space": SHARED_CLUSTER, "type": "u32"},
                operands={"d": "there", "a": "address", "b": "rank"},
            ),
        ),
    ),
    plain(
        "cluster_arrive",
        "cluster_arrive();",
        CLUSTER_ARRIVE,
        "UCGABAR_ARV ",
        qualifiers={"sem": "release", "aligned": "aligned"},
    ),
    plain(
        "cluster_wait",
        "cluster_wait();",
        CLUSTER_WAIT,
        "UCGABAR_WAIT ",
        qualifiers={"acquire": "acquire", "aligned": "aligned"},
    ),
)
