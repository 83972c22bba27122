"""Conformance run with an emulator in place of the GPU: the report names each wrong wrapper."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gpu import acceptance_run
from tests.gpu import wrapper_conformance as conformance
from tests.gpu.acceptance_report import AcceptanceReport
from tests.gpu.ptx_wrappers import wrappers_in
from tests.gpu.wrapper_case import Operand, WrapperCase, WrapperVariant, WrapperWorkload, differences, draw
from tests.gpu.wrapper_conformance import CASES, by_name, conform, uncovered
from tests.support import needs_compiler, needs_nvrtc
from tunebench import device
from tunebench.device import representative
from tunebench.dtype import numpy_dtype
from tunebench.emulate.emulator import emulate
from tunebench.measure import _gpu
from tunebench.space import Config

H100 = device.find("h100-sxm")

# -- list of wrappers --------------------------------------------------------------------------------


def test_every_wrapper_has_a_case_and_every_case_a_wrapper() -> None:
    assert uncovered() == [], "add a case to tests/gpu/wrapper_cases.py"


def test_names_of_cases_are_unique() -> None:
    assert len(by_name()) == len(CASES)


SOURCE = """
// asm in a comment is none
#define LOAD(x) asm("ld %0;" : "=r"(x))
#define LOAD_TWICE(x) \\
  LOAD(x); \\
  LOAD(x)
__device__ __forceinline__ u32 plain(u32 x) { return x; }
template <int N>
__device__ __forceinline__ void waits(const u32 (&d)[4]) {
#ifdef TUNEBENCH_EMULATE
  emulated::wait(N);
#else
  if (N) { asm volatile("wait %0;" ::"n"(N) : "memory"); }
#endif
}
__device__ __forceinline__ float as(half_t x) { asm("a;"); }
__device__ __forceinline__ float as(const bf16_t& x, int) { asm("b;"); }
template <>
__device__ __forceinline__ half_t of<half_t>(float x) { asm("c;"); }
struct Pair {
  __device__ __forceinline__ void take() const { u32 x; LOAD_TWICE(x); }
};
__device__ __forceinline__ const u32* pointer(u64 a,
                                              u64 b) { asm("d;"); }
"""


def test_wrappers_are_found_by_reading() -> None:
    assert wrappers_in(SOURCE) == [
        "waits",
        "as(half_t)",
        "as(const bf16_t&)",
        "of<half_t>",
        "take",
        "pointer",
    ]


def test_unparsed_inline_assembly_is_an_error() -> None:
    with pytest.raises(ValueError, match="found 1 uses outside"):
        wrappers_in('void odd() { asm("x;"); }')


def test_a_wrapper_without_a_case_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "CASES", CASES[1:])
    assert uncovered() == ["mma_m16n8k16_f16 has no case"]
    added = dataclasses.replace(CASES[0], name="of nothing")
    monkeypatch.setattr(conformance, "CASES", (*CASES, added))
    assert uncovered() == ["of nothing has a case but is no wrapper"]


# -- running -------------------------------------------------------------------------------------------------


def faulty(old: str, new: str) -> conformance.RunCase:
    """Return an emulator with faulty wrappers, in place of a GPU."""

    class Faulty(WrapperVariant):
        def source(self, workload: WrapperWorkload, config: Config) -> str:
            text = super().source(workload, config)
            assert text.count(old) == 1, old
            return text.replace(old, new)

    def run(variant: WrapperVariant, workload: Any, config: Config, inputs: Mapping[str, Any]) -> Any:
        return emulate(Faulty(variant.case), workload, config, inputs, order="reverse")

    return run


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_emulator_conforms_to_itself_in_another_order(case: WrapperCase) -> None:
    assert conform(case, faulty("#define EACH", "#define  EACH")) is None


FAULTS = {
    # lanes of D are exchanged with those of the other half of the group
    "mma_m16n8k16_f16": (
        "d[i] = D[lane / 4 + 8 * (i / 2)]",
        "d[i] = D[lane / 4 + 8 * (1 - i / 2)]",
        ("lane 0, d[0]: ", "512 registers differ"),
    ),
    "ldmatrix_x4_trans": ("ldmatrix<4, true>", "ldmatrix<4, false>", ("lane 0, d[",)),
    "cp_async_ca<8>, 8 bytes": ("source, BYTES, source_bytes)", "source, BYTES, BYTES)", ("first[",)),
    "from_float<half_t>": ("magnitude + 0xfffu", "magnitude + 0x1000u", ("r[",)),
    "to_tf32": ("bits + 0x1000u", "bits + 0xfffu", ("r[",)),
    "wgmma_m64k32_e4m3<128>": (
        '"e4m3", 1, N, false, false,',
        '"e4m3", 1, N / 2, false, false,',
        ("d[32]: ",),
    ),
    "copy_box_2d at (0, 0)": ("corner[] = {x, y};", "corner[] = {x, y + 1};", ("lane 0, r[",)),
    "fast_rsqrt": ("return 1.0f / sqrtf(x);", "return 1.000001f / sqrtf(x);", ("r[0]",)),
}


@needs_compiler
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_with_lane_and_register(name: str) -> None:
    old, new, reported = FAULTS[name]
    found = conform(by_name()[name], faulty(old, new))
    assert found is not None
    assert found.startswith(", ".join(by_name()[name].wrappers))
    assert "lane " in found
    assert ", expected 0x" in found
    for part in reported:
        assert part in found


def test_one_wrong_register_is_reported() -> None:
    case = WrapperCase("some", (), "", (Operand("d", 2, "f32"), Operand("e", 1)), threads=32)
    right = np.zeros((128, 3), np.int32)
    got = right.copy()
    got[32 + 5, 1] = np.float32(1.5).view(np.int32)
    text = "some: 1 of 384 registers differ: lane 5, d[1]: 0x3fc00000 (1.5), expected 0x00000000 (0)"
    assert differences(case, got, right) == text
    got = right.copy()
    got[31, 2] = 255
    assert "lane 31, e[0]: 0x000000ff, expected 0x00000000" in str(differences(case, got, right))


def test_any_nan_equals_nan_and_zeros_have_signs() -> None:
    case = WrapperCase("some", (), "", (Operand("d", 1, "f16"),))
    words = np.array([[0x7E007C00], [0x00008000]], np.uint32)
    other_nan, other_zero = words.copy(), words.copy()
    other_nan[0, 0], other_zero[1, 0] = 0x7FFF7C00, 0
    assert differences(case, other_nan, words) is None
    assert "lane 1, d[0]" in str(differences(case, other_zero, words))


def test_operands_are_repeatable_and_of_their_kind() -> None:
    for case in CASES:
        one, other = draw(case), draw(case)
        assert np.array_equal(one["inputs"], other["inputs"])
        workload = WrapperVariant(case).workload
        assert one["inputs"].shape == (workload.threads, workload.in_words)
    inputs = draw(by_name()["mma_m16n8k16_f16"])["inputs"]
    halves = np.ascontiguousarray(inputs[:, 4:]).view(np.float16)
    assert set(np.unique(halves)) == set(range(-8, 9))


@needs_compiler
@pytest.mark.parametrize("case", [c for c in CASES if c.name.startswith("wgmma")], ids=lambda case: case.name)
def test_wgmma_cases_compute_matrix_products(case: WrapperCase) -> None:
    """Compare the case with a product computed without descriptors and fragments."""
    variant = WrapperVariant(case)
    inputs = draw(case)
    words = conformance.on_host(variant, variant.workload, Config({"unused": 0}), inputs)["outputs"]
    element = numpy_dtype(case.inputs[0].kind)  # type: ignore[arg-type]
    blocks = inputs["inputs"].view(element).astype(np.float32)
    blocks = blocks.reshape(-1, case.threads, 128 // element.itemsize)
    n, a_along_m, b_along_n = case.threads - 64, "true, " in case.name, "true>" in case.name
    fragments = words.view(np.float32).reshape(-1, case.threads, n // 8, 2, 2)[:, :128]
    # Thread (warp, g, t) has rows g and g + 8 of its warp, and columns 2 t and 2 t + 1 of each 8.
    parts = fragments.reshape(-1, 4, 8, 4, n // 8, 2, 2).transpose(0, 1, 5, 2, 4, 3, 6)
    for lines, product in zip(blocks, parts.reshape(-1, 64, n), strict=True):
        a = lines[:64].T if a_along_m else lines[:64]
        b = np.hstack(np.split(lines[64:], n // 64)) if b_along_n else lines[64:].T
        assert np.array_equal(product, a @ b)


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_89", "sm_90", "sm_100"])
def test_every_case_compiles_for_the_device(architecture: str) -> None:
    from tunebench.compile.nvrtc import compile_cuda

    gpu, config = representative(architecture), Config({"unused": 0})
    here = [case for case in CASES if case.runs_on(gpu)]
    assert len(here) >= (8 if architecture == "sm_75" else 15)
    for case in here:
        variant = WrapperVariant(case)
        binary = compile_cuda(variant, variant.workload, config, gpu)
        assert binary.target == ("sm_90a" if architecture == "sm_90" else architecture)
        assert len(binary.entries) == 1


# -- launches on the GPU -----------------------------------------------------------------------------


class Host:
    """Replacement of a GPU: memory is NumPy arrays, and a launch emulates the given case."""

    def __init__(self, case: WrapperCase) -> None:
        self._variant, self._memory, self._next = WrapperVariant(case), {}, itertools.count(4096, 1 << 20)

    def allocate(self, nbytes: int) -> int:
        address = next(self._next)
        self._memory[address] = np.zeros(nbytes, np.uint8)
        return address

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        self._memory[address][:nbytes] = byte

    def upload(self, address: int, array: Any) -> None:
        self._memory[address][: array.nbytes] = array.reshape(-1).view(np.uint8)

    def download(self, address: int, array: Any) -> None:
        array.reshape(-1).view(np.uint8)[:] = self._memory[address][: array.nbytes]

    def load(self, cubin: bytes, symbols: Any) -> Any:
        assert cubin[:4] == b"\x7fELF"
        return symbols

    def prepare(self, kernel: str, launch: Any, arguments: Any) -> Any:
        assert "conform" in kernel
        return launch, arguments

    def launch(self, launches: Any) -> None:
        ((_, (inputs, outputs)),) = launches
        workload = self._variant.workload
        words = np.empty((workload.threads, workload.in_words), np.int32)
        self.download(inputs, words)
        result = emulate(self._variant, workload, Config({"unused": 0}), {"inputs": words})
        self.upload(outputs, result["outputs"])

    def synchronize(self) -> None: ...


@needs_compiler
@needs_nvrtc
def test_data_is_copied_to_the_gpu_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    case = by_name()["mma_m16n8k8_tf32"]
    monkeypatch.setattr(_gpu, "open_gpu", lambda _: Host(case))
    assert conform(case, conformance.on_device(H100)) is None
    # A GPU that runs something else:
    assert "mma_m16n8k8_tf32: " in str(
        conform(case, lambda *a: {"outputs": conformance.on_host(*a)["outputs"][::-1]})
    )


def session(folder: Path) -> acceptance_run.AcceptanceRun:
    return acceptance_run.AcceptanceRun(
        H100, AcceptanceReport(folder, say=lambda text: None), folder, until=float("inf")
    )


@needs_compiler
def test_hanging_case_is_named_and_the_others_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = [case.name for case in CASES if case.runs_on(H100)]
    asked: list[list[str]] = []

    def run_gpu_process(arguments: list[str], *, timeout_s: float) -> dict[str, Any]:
        asked.append(arguments)
        passed = dict.fromkeys(names[:2]) if len(asked) == 1 else dict.fromkeys(arguments[1:])
        if len(asked) == 1:
            return {
                "running": names[2],
                "found": passed,
                "problem": "late",
                "timed_out": True,
            }
        return {"found": passed | {names[-1]: "lane 3, d[0]: 1, expected 2"}}

    monkeypatch.setattr(conformance, "run_gpu_process", run_gpu_process)
    here = session(tmp_path)
    conformance.conformance(here)
    assert asked == [["conformance", *names], ["conformance", *names[3:]]]
    step = here.report.steps["conformance"]
    assert step["problems"] == [
        f"{names[2]}: late",
        f"{names[-1]}: lane 3, d[0]: 1, expected 2",
    ]
    assert (step["complete"], step["undone"]) == (True, [])


@needs_compiler
def test_process_that_does_not_start_is_not_retried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        conformance, "run_gpu_process", lambda *_, **__: {"problem": "exit status 1: no driver"}
    )
    run = session(tmp_path)
    conformance.conformance(run)
    step = run.report.steps["conformance"]
    assert step["problems"] == ["before any case: exit status 1: no driver"]
    assert not step["complete"]
    assert len(step["undone"]) > 10


@needs_compiler
def test_answers_name_the_running_case_and_results() -> None:
    names = ["fast_exp2", "fast_rsqrt"]
    answers = [dict(answer) for answer in conformance.answers(names, conformance.on_host)]
    assert [answer.get("running") for answer in answers] == [*names, None]
    assert answers[-1]["found"] == dict.fromkeys(names)
