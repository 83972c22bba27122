"""Kernels in Triton, compiled for absent GPUs, and run by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import needs_triton
from tests.toy_variants import CONFIG, TRITON_TOY, Toy, TritonToy
from tunebench.binary.compiled import Binary, CompileError
from tunebench.binary.cubin import launch_refusal
from tunebench.binary.occupancy import kernel_uses
from tunebench.compile import BinaryCache, carried_key, compile_config
from tunebench.compile.assembly import ptx
from tunebench.compile.triton import _specialised, compile_triton, kernel_of, key_triton
from tunebench.compile.triton_loop import loop_trips
from tunebench.device import find
from tunebench.emulate.emulator import EmulationFailed
from tunebench.measure import offline
from tunebench.measure.offline import OfflineRunner
from tunebench.measure.timing import Protocol
from tunebench.outcome import Predicted, Resources, WrongResult
from tunebench.task import Task
from tunebench.variant import Scalar

pytestmark = needs_triton

TOY = Toy(n=1000)
H100, A100 = find("sm_90"), find("sm_80")
TYPES = """
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["third"], do_not_specialize_on_alignment=["fourth"])
def triton_toy(x, y, first, second, third, fourth, scale, n: tl.int64, B: tl.constexpr, C: tl.constexpr = 3):
    pass
"""
DESCRIPTOR = TRITON_TOY.replace(
    "    tl.store", "    view = tl.make_tensor_descriptor(x, [n], [1], [BLOCK])\n    tl.store"
).replace("* factor", "* factor + view.load([0])")


def test_binary_has_what_a_launch_needs(tmp_path: Path) -> None:
    variant, cache = TritonToy(num_warps=2), BinaryCache(tmp_path)
    binary = compile_config(variant, TOY, CONFIG, H100, cache)
    assert cache.get(binary.key) == binary == compile_config(variant, TOY, CONFIG, H100, cache)
    assert (binary.language, binary.target, binary.entries) == ("triton", "sm_90a", ("triton_toy",))
    assert (binary.threads, binary.omitted, binary.resources.spill_bytes) == (64, (3,), 0)
    (launch,) = binary.launches(variant.launches(TOY, CONFIG))
    assert launch.arguments == ("x", "y", "factor", Scalar("int", 1000), *[Scalar("long long", 0)] * 2)
    assert (launch.grid, launch.block, launch.cluster) == ((8, 1, 1), (64, 1, 1), 2)
    assert launch_refusal(binary, (launch,), H100) is None
    (use,) = kernel_uses(binary, (launch,), H100)
    assert 0 < use.used.registers == binary.resources.registers


def test_spills_and_options_reach_the_compiler() -> None:
    heavy = TRITON_TOY.replace(
        "    tl.store(", "    a = tl.load(x + tl.arange(0, 4096))\n    b = a / tl.sum(a)\n    tl.store("
    ).replace("* factor", "* factor + tl.max(b)")
    few = compile_triton(TritonToy(heavy, num_ctas=1, num_warps=1, maxnreg=32), TOY, CONFIG, A100)
    assert few.target == "sm_80"
    assert few.resources.registers is not None
    assert few.resources.registers <= 32
    assert few.resources.spill_bytes
    text = ptx(TritonToy(num_ctas=1, num_warps=8, maxnreg=128), TOY, CONFIG, A100)
    assert ".maxnreg 128" in text
    assert ".reqntid 256" in text


def test_key_is_what_reaches_the_compiler() -> None:
    calling = TRITON_TOY.replace("* factor", "* helper(factor)") + (
        "\n\n@triton.jit\ndef helper(factor):\n    return factor\n"
    )
    variants = [
        TritonToy(),
        TritonToy(num_warps=8),
        TritonToy(BLOCK=128),
        TritonToy(calling),
        TritonToy(calling.replace("return factor", "return factor + 0")),
    ]
    keys = [key_triton(variant, TOY, CONFIG, H100) for variant in variants]
    assert len({*keys, key_triton(variants[0], TOY, CONFIG, A100)}) == 6
    assert key_triton(TritonToy(), TOY, CONFIG, H100) == keys[0]
    assert key_triton(TritonToy(), Toy(n=1001), CONFIG, H100) == key_triton(
        TritonToy(), Toy(n=1003), CONFIG, H100
    )  # sizes are arguments, specialised by 1 and 16 only
    assert key_triton(TritonToy(), Toy(n=1008), CONFIG, H100) != keys[0]
    assert carried_key(variants[3], TOY, CONFIG, H100) != carried_key(variants[4], TOY, CONFIG, H100)


@pytest.mark.parametrize("sizes", [(1, 16, 1, 16), (17, 1, 32, 1), (48, -3, 5, 0)])
def test_arguments_are_specialised_as_by_a_launch_of_triton(sizes: tuple[int, ...]) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import MockTensor, create_function_from_signature

    class Types(TritonToy):
        def constants(self, workload: Toy, config: Any) -> dict[str, int]:
            return {"B": 7}

        def launches(self, workload: Toy, config: Any) -> tuple[Any, ...]:
            scalars: tuple[Any, ...] = (
                *(Scalar("int", size) for size in sizes),
                Scalar("float", 1),
                Scalar("long long", 1),
            )
            arguments = ("x", "y", *scalars)
            return (self.launch(config, entry="triton_toy", grid=(1, 1, 1), arguments=arguments),)

    ours = _specialised(Types(TYPES), TOY, CONFIG)
    kernel, backend = kernel_of(TYPES, "triton_toy"), make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    array = MockTensor("float32")
    bound, theirs, _ = bind(array, array, *sizes, 1.0, 1, B=7)
    options = {"enable_fp_fusion": True}
    _, signature, constants, attributes = kernel._pack_args(backend, options, bound, theirs, options)
    assert ours.signature == signature
    assert ours.constants == constants
    assert ours.attributes == {at: found for at, found in attributes.items() if found}


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (TritonToy("import nowhere_at_all"), "ModuleNotFoundError"),
        (TritonToy("def other(): pass"), "defines no function triton_toy"),
        (TritonToy(TRITON_TOY.replace("BLOCK", "SIZE")), "takes no argument BLOCK"),
        (TritonToy(TRITON_TOY.replace("factor,", "factor, more,")), "takes 6 arguments"),
        (TritonToy(TRITON_TOY.replace("factor, one", "factor, one: tl.int64")), "argument one is i32"),
        (TritonToy(TRITON_TOY.replace("tl.load(", "tl.no_such(")), "no_such"),
        (TritonToy(BLOCK=100), "power of 2"),
        (TritonToy(num_ctas=16), "num_ctas must be 8 or less"),
        (TritonToy(DESCRIPTOR), "bytes of global scratch memory"),
    ],
)
def test_kernel_that_cannot_be_launched_is_refused(variant: TritonToy, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        compile_triton(variant, TOY, CONFIG, H100)


def task(variant: TritonToy) -> Task:
    return Task(variant=variant, workload=Toy(n=1000), config=CONFIG, device=H100, seed=1, predicted_us=1.0)


def outcome_of(variant: TritonToy) -> Any:
    binary = Binary(key="", language="triton", target="sm_90", payload=b"", resources=Resources(registers=40))
    return OfflineRunner(Protocol()).run(task(variant), binary, None)[0]


def test_interpreted_results_are_verified() -> None:
    right = outcome_of(TritonToy())
    assert isinstance(right, Predicted), right
    assert right.verification.how == "simulated"
    wrong = outcome_of(TritonToy(TRITON_TOY.replace("BLOCK + tl", "BLOCK * 2 + tl")))
    assert isinstance(wrong, WrongResult), wrong
    assert "simulated on toy:n=1000" in wrong.reason


def test_what_the_interpreter_lacks_is_no_failure_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise EmulationFailed("simulation: InterpreterError: NotImplementedError('inline_asm_elementwise')")

    monkeypatch.setattr(offline, "interpret", fails)
    outcome = outcome_of(TritonToy())
    assert isinstance(outcome, Predicted)
    assert outcome.verification.how == "not verified"


LOOPS = """
@triton.jit
def looping(a, m, k, BM: tl.constexpr, BK: tl.constexpr):
    tile = tl.program_id(0)
    first = tile % tl.cdiv(m, BM) * BM
    top = tl.load(a)
    for start in range(0, tl.minimum(first + BM, k), BK):
        for inner in tl.range(BK // 16, num_stages=2):
            top += start
    for unrolled in tl.static_range(4):
        top += unrolled
    for unknown in range(0, top):
        top += 1
    first = top
    for also_unknown in range(first):
        top += 1
"""


def test_trips_of_loops_follow_from_sizes_constants_and_the_middle_of_the_grid() -> None:
    values = {"m": 1000, "k": 512, "BM": 100, "BK": 64}
    assert loop_trips(LOOPS, "looping", values, (7, 1, 1)) == (7, 4)  # 400 of 512 by 64, and 64 by 16
    assert loop_trips(LOOPS, "looping", {}, (7, 1, 1)) == ()
    assert loop_trips(LOOPS, "other", values, (7, 1, 1)) == ()
