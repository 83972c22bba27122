"""Conformance run with an emulator in place of the GPU: the report names each wrong wrapper."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.emulate.ptx_layouts import FRAGMENTS, ldmatrix_element, wgmma_sum
from tests.gpu import acceptance_run
from tests.gpu import wrapper_conformance as conformance
from tests.gpu.acceptance_report import AcceptanceReport
from tests.gpu.child import ChildLimits
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
    monkeypatch.setattr(conformance, "CASES", [case for case in CASES if case.name != "mma_m16n8k16_f16"])
    assert uncovered() == ["mma_m16n8k16_f16 has no case"]
    added = dataclasses.replace(by_name()["pick_bytes"], name="of nothing")
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
        '({a, b, value, "e4m3"',
        '({b, a, value, "e4m3"',
        ("lane 0, d[",),
    ),
    "copy_box_2d at (0, 0)": ("corner[] = {x, y};", "corner[] = {x, y + 1};", ("lane 0, r[",)),
    "fast_rsqrt": ("return 1.0f / sqrtf(x);", "return 1.000001f / sqrtf(x);", ("r[0]",)),
}


@needs_compiler
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_with_lane_and_register(name: str) -> None:
    old, new, reported = FAULTS[name]
    fault = conform(by_name()[name], faulty(old, new))
    assert fault is not None
    assert fault.startswith(", ".join(by_name()[name].wrappers))
    assert "lane " in fault
    assert ", expected 0x" in fault
    for part in reported:
        assert part in fault


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
        first, second = draw(case), draw(case)
        assert np.array_equal(first["inputs"], second["inputs"])
        workload = WrapperVariant(case).workload
        assert first["inputs"].shape == (workload.threads, workload.in_words)
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
    summed = np.int32 if case.outputs[0].kind == "i32" else np.float32
    sums = words.view(summed).reshape(-1, case.threads, n // 2)[:, :128]
    rows, columns = np.moveaxis([[wgmma_sum(t, i) for i in range(n // 2)] for t in range(128)], -1, 0)
    for lines, product in zip(blocks, sums, strict=True):
        a = lines[:64].T if a_along_m else lines[:64]
        b = np.hstack(np.split(lines[64:], n // 64)) if b_along_n else lines[64:].T
        assert np.array_equal(product, (a @ b)[rows, columns])


@needs_compiler
@pytest.mark.parametrize("case", [c for c in CASES if c.name.startswith("mma_")], ids=lambda case: case.name)
def test_mma_fragments_are_where_the_isa_states(case: WrapperCase) -> None:
    fragment = FRAGMENTS[int(case.name.split("k")[1].split("_")[0])]
    for lanes, result in warps(case):
        a, b = np.zeros((16, fragment.k)), np.zeros((fragment.k, 8))
        for lane in range(32):
            for i in range(4 * fragment.per_register):
                a[fragment.a(lane, i)] = lanes[1][lane, i]
            for i in range(2 * fragment.per_register):
                b[fragment.b(lane, i)] = lanes[2][lane, i]
        product = a @ b
        for lane in range(32):
            for i in range(4):
                assert result[lane, i] == lanes[0][lane, i] + product[fragment.d(lane, i)]


@needs_compiler
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name.startswith("ldmatrix")], ids=lambda case: case.name
)
def test_ldmatrix_elements_are_where_the_isa_states(case: WrapperCase) -> None:
    trans, matrices = "trans" in case.name, 2 if "x2" in case.name else 4
    for (words, permutation), result in warps(case):
        rows = np.ascontiguousarray(words).view(np.uint16)  # row of 8 elements of each thread
        elements = np.ascontiguousarray(result).view(np.uint16).reshape(32, matrices, 2)
        for lane, matrix, half in np.ndindex(elements.shape):
            row, column = ldmatrix_element(lane, half, trans)
            assert elements[lane, matrix, half] == rows[permutation[8 * matrix + row, 0], column]


def warps(case: WrapperCase) -> Iterator[tuple[list[Any], Any]]:
    """Yield the operands and the result of each warp of a case, as elements by lane."""
    variant, inputs = WrapperVariant(case), draw(case)
    outputs = conformance.on_host(variant, variant.workload, Config({"unused": 0}), inputs)["outputs"]
    boundaries = np.cumsum([operand.count for operand in case.inputs])[:-1]
    for words, result in zip(
        inputs["inputs"].reshape(-1, 32, variant.workload.in_words),
        outputs.reshape(-1, 32, variant.workload.out_words),
        strict=True,
    ):
        parts = zip(case.inputs, np.split(words, boundaries, axis=1), strict=True)
        yield [_elements(part, operand) for operand, part in parts], _elements(result, case.outputs[0])


def _elements(words: Any, operand: Operand) -> Any:
    kind = {"u32": "i32", "rows": "i32", "tf32": "f32", "i8": "i8"}.get(operand.kind, operand.kind)
    return (
        np.ascontiguousarray(words).view(numpy_dtype(kind)).astype(np.int32 if kind == "i32" else np.float64)
    )


@needs_nvrtc
@pytest.mark.parametrize(
    "architecture",
    ["sm_75", "sm_80", pytest.param("sm_89", marks=pytest.mark.exhaustive), "sm_90", "sm_100"],
)
def test_every_case_compiles_for_the_device(architecture: str) -> None:
    from tunebench.compile.nvrtc import compile_cuda

    gpu, config = representative(architecture), Config({"unused": 0})
    runnable = [case for case in CASES if case.runs_on(gpu)]
    assert len(runnable) >= (8 if architecture == "sm_75" else 15)
    for case in runnable:
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


@needs_compiler
def test_expected_outputs_are_emulated_once_and_again_when_a_case_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, cases = tmp_path / "expected.npz", [by_name()["pick_bytes"], by_name()["to_tf32"]]
    emulated: list[str] = []

    def on_host(variant: WrapperVariant, *rest: Any) -> Any:
        emulated.append(variant.case.name)
        return emulate(variant, *rest)

    monkeypatch.setattr(conformance, "on_host", on_host)
    assert conformance.write_expected(file, cases) == []
    assert conformance.write_expected(file, cases) == []
    assert emulated == ["pick_bytes", "to_tf32"]
    changed = dataclasses.replace(cases[1], body="EACH(8) r[i] = 2 * to_tf32(x[i]);")
    assert conformance.write_expected(file, [cases[0], changed]) == []
    assert emulated == ["pick_bytes", "to_tf32", "to_tf32"]
    monkeypatch.setattr(conformance, "find_compiler", lambda: None)
    assert conformance.write_expected(file, [*cases, changed]) == ["to_tf32"]


def test_outputs_are_emulated_for_a_part_of_the_step_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now, emulated = [0.0], list[str]()

    def on_host(variant: WrapperVariant, *_: Any) -> Any:
        now[0] += 3.0
        emulated.append(variant.case.name)
        return {"outputs": np.zeros((1, 1), np.int32)}

    monkeypatch.setattr(conformance, "on_host", on_host)
    monkeypatch.setattr(conformance, "find_compiler", lambda: "g++")
    child = Child()
    current = session(tmp_path, child)
    current.clock, current.until = lambda: now[0], 20.0
    conformance.conformance(current)
    assert len(emulated) == 3  # 40 % of 20 s
    assert child.asked == [emulated]
    step = current.report.steps["conformance"]
    assert not step["complete"]
    assert sum("no expected outputs" in problem for problem in step["problems"]) > 40


@needs_compiler
def test_answers_name_the_running_case_and_its_result(tmp_path: Path) -> None:
    names = ["fast_exp2", "fast_rsqrt"]
    conformance.write_expected(tmp_path / "expected.npz", [by_name()[name] for name in names])
    answers = list(conformance.answers(tmp_path / "expected.npz", names, conformance.on_host))
    assert answers == [
        {"running": "fast_exp2"},
        {"case": "fast_exp2", "found": None},
        {"running": "fast_rsqrt"},
        {"case": "fast_rsqrt", "found": None},
    ]


def session(folder: Path, child: Any) -> acceptance_run.AcceptanceRun:
    report = AcceptanceReport(folder, say=lambda text: None)
    return acceptance_run.AcceptanceRun(H100, report, until=float("inf"), child=child)


class Child:
    """Child process whose cases pass, except for those that hang, crash or differ."""

    def __init__(self, **faults: str) -> None:
        self.faults, self.asked = faults, list[list[str]]()

    def __call__(self, arguments: Any, limits: ChildLimits, before: Any = ()) -> Any:
        assert limits.answer_s == 10.0
        names = list(arguments[2:])
        self.asked.append(names)
        for name in names:
            yield {"running": name}
            fault = self.faults.get(name)
            if fault in ("hang", "crash"):
                yield {"problem": fault} | ({"timed_out": True} if fault == "hang" else {})
                return
            yield {"case": name, "found": fault}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(conformance, "write_expected", lambda path, cases, in_time: [])
    return [case.name for case in CASES if case.runs_on(H100)]


def test_hopper_cases_come_first_from_barrier_to_multicast(names: list[str]) -> None:
    order = [
        "mbarrier",
        "setmaxnreg",
        "copy_box_2d",
        "wgmma_m64k16<",
        "wgmma_m64k16_registers",
        "copy_pixels_4d",
        "cluster",
        "copy_box_3d_multicast",
        "mma_m16n8k16_f16",
    ]
    first = [next(i for i, name in enumerate(names) if name.startswith(start)) for start in order]
    assert first == sorted(first)
    along_k = ["true" not in name for name in names if name.startswith(("wgmma_m64k16<", "wgmma_m64k32"))]
    assert along_k == sorted(along_k, reverse=True)


def test_cases_share_a_process_until_one_of_them_ends_it(names: list[str], tmp_path: Path) -> None:
    child = Child(**{names[2]: "lane 3 differs", names[4]: "hang", names[6]: "crash"})
    current = session(tmp_path, child)
    conformance.conformance(current)
    assert child.asked == [names, *([name] for name in names[5:])]
    step = current.report.steps["conformance"]
    assert step["problems"] == [f"{names[2]}: lane 3 differs", f"{names[4]}: hang", f"{names[6]}: crash"]
    assert (step["complete"], step["undone"]) == (True, [])


def test_second_run_repeats_only_what_did_not_pass(names: list[str], tmp_path: Path) -> None:
    current = session(tmp_path, Child(**{names[2]: "differs", names[4]: "hang"}))
    conformance.conformance(current)
    second_child = Child()
    current.child = second_child
    current.report.begin("conformance")
    conformance.conformance(current)
    assert second_child.asked == [[names[2], names[4]]]
    step = current.report.steps["conformance"]
    assert (step["problems"], step["complete"]) == ([], True)
    assert step["cases"] == dict.fromkeys(names)


def test_process_that_does_not_start_is_tried_twice(names: list[str], tmp_path: Path) -> None:
    current = session(tmp_path, lambda *_: iter([{"problem": "exit status 1: no driver"}]))
    conformance.conformance(current)
    step = current.report.steps["conformance"]
    assert step["problems"] == ["before any case: exit status 1: no driver"] * 2
    assert not step["complete"]
    assert step["undone"] == names
