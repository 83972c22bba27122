"""Notes of ptxas: what they say about the time of a kernel, and that no unknown one passes."""

from __future__ import annotations

import pytest

from tests.support import needs_nvrtc
from tunebench.binary.ptxas_note import objections, ptxas_notes, verdict

ARRIVE = "by compiler to allow use of registers in GMMA in function '_Z15attention'"
LOG = f"""ptxas info    : (C7519) warpgroup.arrive is injected in around line 1673 {ARRIVE}
ptxas info    : (C7519) warpgroup.arrive is injected in around line 1700 {ARRIVE}
ptxas info    : 0 bytes gmem
ptxas info    : Function properties for _Z15attention
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
kernel(542): warning #177-D: variable "outer" was declared but never referenced
"""

SERIALIZED = "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to"
"""Start of a note. Its number and the end of its text differ between versions of ptxas."""


def test_notes_are_read_without_places_and_once() -> None:
    (note,) = ptxas_notes(LOG)
    assert note == "(C7519) warpgroup.arrive is injected by compiler to allow use of registers in GMMA"
    assert verdict(note) == "harmless"
    assert objections((note,)) == ()


@pytest.mark.parametrize(
    "text",
    [
        f"{SERIALIZED} insufficient register resources for the wgmma pipeline in the function '_Z1kv'",
        f"{SERIALIZED} ill formed pipeline stage in the function '_Z1kv'",
        f"{SERIALIZED} insufficient register resources for the pipeline in the function '_Z1kv' in line 7",
        "(C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum register requirements.",
        "(C7520) warpgroup.wait is injected in around line 7 by compiler to allow use of registers",
        "(C7520) wgmma.wait_group is injected in around line 7 by compiler to allow use of registers",
    ],
)
def test_lost_overlap_and_registers_are_costly(text: str) -> None:
    (note,) = ptxas_notes(f"ptxas info    : {text}\n")
    assert "_Z1kv" not in note
    assert "line 7" not in note
    assert verdict(note) == "costly"
    assert objections((note,)) == (f"costly note of ptxas: {note}",)


def test_unknown_notes_are_objections() -> None:
    (note,) = ptxas_notes("ptxas warning : (C9999) something new in function 'k'\n")
    assert objections((note,)) == ("unknown note of ptxas: (C9999) something new",)


@needs_nvrtc
def test_note_of_the_compiler_reaches_the_binary() -> None:
    from tests.toy_variants import CONFIG, Toy, ToyVariant
    from tunebench.compile.nvrtc import compile_cuda
    from tunebench.device import representative

    class Hopper(ToyVariant):
        """Toy whose registers ptxas cannot move: it has no launch bounds."""

        def target(self, device: object) -> str:
            return "sm_90a"

    source = (
        "__global__ void toy(const float* x, float* y, float factor, int n) {"
        ' asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); y[threadIdx.x] = x[0] * factor; }'
    )
    binary = compile_cuda(Hopper(source), Toy(n=1), CONFIG, representative("sm_90"))
    (objection,) = objections(binary.notes)
    assert "'setmaxnreg' ignored" in objection
