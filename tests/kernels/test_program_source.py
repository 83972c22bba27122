"""Records of a library's program depend on what the program uses, and on nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import package_variants
from tunebench import kernels
from tunebench.kernels.common import program_source
from tunebench.kernels.common.library import LibraryPrograms
from tunebench.space import Config
from tunebench.variant import LibraryVariant
from tunebench.workload import Workload
from tunebench.workloads import parse

GEMM, SOFTMAX = parse("gemm:m=8,n=8,k=8,dtype=f32"), parse("softmax:rows=8,cols=8,dtype=f32")
ONEDNN, TORCH = Config({"program": "onednn"}), Config({"program": "torch"})
OF_GEMM, OF_ALL = "tunebench.kernels.gemm.library_cpu", "tunebench.kernels.common.library"
Edit = Callable[[str, str, str], None]


@pytest.fixture
def edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Edit:
    """Return a function that replaces text of a module, as far as sources of programs are concerned."""
    files: dict[str, Path] = {}
    find = program_source._file

    def replace(module: str, text: str, by: str) -> None:
        file = files.get(module) or find(module)
        source = "" if file is None else file.read_text(encoding="utf-8")
        assert text in source, f"{module} has no {text!r}"
        files[module] = tmp_path / module
        files[module].write_text(source.replace(text, by), encoding="utf-8")
        forget()

    monkeypatch.setattr(program_source, "_file", lambda name: files.get(name) or find(name))
    return replace


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Forget replaced text after each test."""
    yield
    forget()


def forget() -> None:
    program_source._module.cache_clear()
    program_source.source_of.cache_clear()


def revision(workload: Workload, config: Config) -> str:
    return kernels.variant(f"{workload.operator}/library_cpu").revision(workload, config)


@pytest.mark.parametrize(
    ("module", "text", "by"),
    [
        (OF_GEMM, "class LibraryGemm", "OTHER = 1\n\n\nclass LibraryGemm"),
        (OF_GEMM, '        "torch": TORCH,\n', ""),
        (OF_GEMM, "workload.batch == 1 and rounded_once and offered", "False"),
        (OF_GEMM, "torch.ops.mkldnn._linear_pointwise", "oneDNN"),
        (OF_GEMM, "def _onednn(workload: Gemm) -> Compute:", "def _onednn(workload):"),
        (OF_GEMM, '    """Return the primitive with one post-operation."""\n', "    # A comment\n"),
        (OF_ALL, "is_traceable: bool = False", "is_traceable: bool = False\n    other: int = 1"),
        (OF_ALL, "if self.supported(workload):\n            return None", "pass"),
        ("tunebench.libraries.gemm", "def numpy_call", "def other(): ...\n\n\ndef numpy_call"),
        ("tunebench.libraries.softmax", "z.softmax(dim=1)", "z.softmax(1)"),
    ],
    ids=str,
)
def test_other_code_keeps_the_records_of_a_program(edit: Edit, module: str, text: str, by: str) -> None:
    before = revision(GEMM, ONEDNN)
    edit(module, text, by)
    assert revision(GEMM, ONEDNN) == before


def test_definition_may_move_to_another_module(edit: Edit) -> None:
    before = revision(GEMM, ONEDNN)
    moved = "def _adds_last(workload: Gemm) -> bool:"
    module = "tunebench.kernels.gemm._torch_product"
    file = program_source._file(OF_GEMM)
    assert file is not None
    source = file.read_text(encoding="utf-8")
    body = source[source.index(moved) : source.index("def _linear(")]
    edit(OF_GEMM, body, "")
    edit(OF_GEMM, "import TORCH_MM, matrix", "import TORCH_MM, _adds_last, matrix")
    edit(module, "TORCH_MM = LibraryProgram(", f"{body}\n\nTORCH_MM = LibraryProgram(")
    assert revision(GEMM, ONEDNN) == before


@pytest.mark.parametrize(
    ("workload", "config", "module", "text", "by"),
    [
        (GEMM, ONEDNN, OF_GEMM, "filters = filters.t()", "filters = filters.t().contiguous()"),
        (GEMM, ONEDNN, OF_GEMM, 'and workload.activation != "none"', ""),
        (GEMM, ONEDNN, "tunebench.kernels.gemm._torch_product", "tensor.dim() == 2", "tensor.ndim == 2"),
        (GEMM, ONEDNN, OF_ALL, "with torch.inference_mode():", "with torch.no_grad():"),
        (GEMM, ONEDNN, "tunebench.libraries", "np.ascontiguousarray(value)", "value"),
        (SOFTMAX, TORCH, "tunebench.libraries.softmax", "z.softmax(dim=1)", "z.softmax(1)"),
        (SOFTMAX, TORCH, OF_ALL, "return call()", "return call().clone()"),
    ],
    ids=str,
)
def test_what_a_program_uses_makes_its_records_stale(
    edit: Edit, workload: Workload, config: Config, module: str, text: str, by: str
) -> None:
    before = revision(workload, config)
    edit(module, text, by)
    assert revision(workload, config) != before


def test_every_program_of_the_package_has_a_source() -> None:
    """Each program is written as an entry of a table, so that no other program is a part of its source."""
    for chosen in package_variants(LibraryPrograms):
        assert isinstance(chosen, LibraryVariant)
        module, name = type(chosen).__module__, type(chosen).__name__
        entries = {program_source.program(module, name, program) for program in chosen.programs}
        assert len(entries) == len(chosen.programs), chosen.key
