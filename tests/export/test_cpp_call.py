"""Export of calls of libraries as C++: compiled, run, and compared with the references of the workloads.

BLAS is that of NumPy. cuBLASLt is a stand-in with its names and numbers on memory of the host.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kernels import kernel_checks as checks
from tunebench.device import Device, find, local_cpu
from tunebench.errors import InputError
from tunebench.export import build_lines, default_format, write_export
from tunebench.export.library_call import cpp_call
from tunebench.kernels.gemm import library_cpu, library_cublaslt, library_gpu
from tunebench.measure.verify import poisoned
from tunebench.space import Config
from tunebench.tuning.choice import ChosenConfig
from tunebench.variant import LibraryVariant
from tunebench.workloads.operators.gemm import Gemm

gemm = checks.parser(Gemm)
STAND_IN = Path(__file__).with_name("cublaslt")
NO_BINARY: Any = None
OF_BLAS = [
    "m=17,n=19,k=23,dtype=f32",
    "m=17,n=19,k=23,dtype=f32,trans=tt,epilogue=bias+relu",
    "m=17,n=19,k=23,dtype=f32,batch=3,trans=nt,epilogue=bias+silu+residual",
    "m=1,n=19,k=23,dtype=f32,trans=tn,epilogue=residual",
]
OF_CUBLASLT = [
    "m=17,n=19,k=23,dtype=f32",
    "m=17,n=19,k=23,dtype=bf16,trans=tt,epilogue=bias+relu",
    "m=17,n=19,k=23,dtype=tf32,batch=3,trans=nt,epilogue=bias+residual",
    "m=1,n=19,k=1,dtype=f32,trans=tt,epilogue=residual",
    "m=17,n=1,k=23,dtype=bf16,trans=tn,epilogue=bias,act=gelu_tanh(x)",
]


def choice_of(variant: LibraryVariant[Any], workload: Gemm, config: Config, device: Device) -> ChosenConfig:
    return ChosenConfig(
        workload=workload,
        device=device,
        variant=variant,
        config=config,
        why="best known",
        expected_us=1.5,
        how="measured here",
    )


def of_blas(text: str) -> ChosenConfig:
    return choice_of(library_cpu.VARIANT, gemm(text), Config({"program": "numpy"}), local_cpu())


def of_cublaslt(text: str, rank: int) -> ChosenConfig:
    return choice_of(library_cublaslt.VARIANT, gemm(text), Config({"rank": rank}), find("h200-sxm"))


def build(folder: Path, source: str, *options: str) -> ctypes.CDLL:
    (folder / "all.cpp").write_text(source, encoding="utf-8")
    command = [
        "g++",
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-shared",
        "-fPIC",
        "-o",
        "all.so",
        "all.cpp",
    ]
    built = subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return ctypes.CDLL(str(folder / "all.so"))


def addresses(arrays: Mapping[str, Any]) -> list[ctypes.c_void_p]:
    return [array.ctypes.data_as(ctypes.c_void_p) for array in arrays.values()]


def arrays_of(workload: Gemm) -> dict[str, Any]:
    drawn = workload.draw(np.random.default_rng(5))
    return {name: np.array(array, order="C") for name, array in drawn.items()}


# -- BLAS ----------------------------------------------------------------------------------------------------


def blas_of_numpy() -> Path:
    """Return the library that NumPy multiplies with."""
    folder = Path(np.__file__).parents[1] / "numpy.libs"
    for library in folder.glob("libscipy_openblas64_*.so"):
        return library
    pytest.skip("NumPy was built with another BLAS, whose names of functions are unknown")


CBLAS = """\
#pragma once
enum CBLAS_ORDER { CblasRowMajor = 101 };
enum CBLAS_TRANSPOSE { CblasNoTrans = 111, CblasTrans = 112 };
extern "C" void scipy_cblas_sgemm64_(CBLAS_ORDER, CBLAS_TRANSPOSE, CBLAS_TRANSPOSE, long, long, long, float,
                                     const float*, long, const float*, long, float, float*, long);
#define cblas_sgemm scipy_cblas_sgemm64_
"""
"""NumPy's OpenBLAS has 64-bit sizes and names of its own."""


@pytest.mark.slow
def test_exported_calls_of_blas_compute_their_workloads(tmp_path: Path) -> None:
    library = blas_of_numpy()
    (tmp_path / "cblas.h").write_text(CBLAS)
    parts = []
    for index, text in enumerate(OF_BLAS):
        files = write_export(of_blas(text), NO_BINARY, tmp_path / str(index), "cpp")
        assert [path.name for path in files] == ["library_call.cpp", "manifest.json"]
        manifest = json.loads(files[1].read_text())
        assert (manifest["module"], manifest["library"]) == ("library_call.cpp", f"numpy {np.__version__}")
        parts.append(
            f'#define library_call call{index}\n#include "{index}/library_call.cpp"\n#undef library_call'
        )
    linked = (f"-L{library.parent}", f"-l:{library.name}", f"-Wl,-rpath,{library.parent}")
    calls = build(tmp_path, "\n".join(parts), "-I.", *linked)
    for index, text in enumerate(OF_BLAS):
        workload = gemm(text)
        arrays, outputs = arrays_of(workload), poisoned(workload)
        getattr(calls, f"call{index}")(*addresses(arrays), *addresses(outputs))
        checks.assert_right(workload, arrays, outputs, text)


def test_form_in_cpp_is_the_default_where_python_has_none() -> None:
    choice = of_blas(OF_BLAS[0])
    assert default_format(choice) == "cpp"
    (command,) = build_lines(choice, "cpp")
    assert command.endswith("library_call.cpp -lopenblas")
    assert default_format(of_cublaslt(OF_CUBLASLT[0], 0)) == "cpp"


@pytest.mark.parametrize(
    ("variant", "text", "program"),
    [
        (library_cpu.VARIANT, "m=17,n=19,k=23,dtype=f32", "torch_mm"),
        (library_cpu.VARIANT, "m=17,n=19,k=23,dtype=f32,act=max(min(x,6),0)", "numpy"),
        (library_gpu.VARIANT, "m=17,n=19,k=23,dtype=f32", "torch_mm"),
    ],
)
def test_call_that_is_not_written_is_refused(
    variant: LibraryVariant[Any], text: str, program: str, tmp_path: Path
) -> None:
    choice = choice_of(variant, gemm(text), Config({"program": program}), local_cpu())
    with pytest.raises(InputError, match="has no form in C\\+\\+; use --format py"):
        write_export(choice, NO_BINARY, tmp_path, "cpp")
    assert not list(tmp_path.iterdir())


# -- cuBLASLt ------------------------------------------------------------------------------------------------


HEADERS = ("cublasLt.h", "cuda_runtime_api.h", "algorithm", "cstdint", "stdexcept", "string")
CALL = """
}  // namespace
extern "C" int call@(@arguments) {
  try {
    of@::LibraryCall call(of@::Tensors{@names});
    of@::Tensors tensors{@names};
    call(tensors, nullptr);
    call(tensors, nullptr);
  } catch (const std::runtime_error& error) {
    std::printf("%s\\n", error.what());
    return 1;
  }
  return 0;
}
"""


def callable_source(choice: ChosenConfig, index: int) -> str:
    """Return an exported call in a namespace of its own, and a function in C that makes it twice."""
    workload = choice.workload
    names = [tensor.name for tensor in (*workload.inputs(), *workload.outputs())]
    call = CALL.replace("@arguments", ", ".join(f"{'const ' * (n != 'c')}void* {n}" for n in names))
    listed = ["a", "b", *(n if n in names else "nullptr" for n in ("bias", "residual")), "c"]
    call = call.replace("@names", ", ".join(listed)).replace("@", str(index))
    return f"namespace of{index} {{\n{cpp_call(choice).source}{call}"


@pytest.mark.slow
def test_exported_calls_of_cublaslt_compute_their_workloads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cases = [
        *(of_cublaslt(text, rank) for rank, text in enumerate(OF_CUBLASLT)),
        of_cublaslt(OF_CUBLASLT[0], 5),
    ]
    headers = "\n".join(f"#include <{header}>" for header in HEADERS)
    sources = (callable_source(choice, index) for index, choice in enumerate(cases))
    calls = build(tmp_path, "\n".join((headers, *sources)), f"-I{STAND_IN}")
    libc = ctypes.CDLL(None)
    for index, choice in enumerate(cases):
        workload = choice.workload
        assert isinstance(workload, Gemm)
        arrays, outputs = arrays_of(workload), poisoned(workload)
        status = getattr(calls, f"call{index}")(*addresses(arrays), *addresses(outputs))
        libc.fflush(None)
        printed = capfd.readouterr().out
        if choice.config["rank"] == 5:
            assert (status, printed) == (1, "cuBLASLt lists 5 algorithms, none of rank 5\n")
            continue
        compute = 77 if workload.dtype == "tf32" else 68
        assert (status, printed) == (0, f"rank {choice.config['rank']} compute {compute}\n" * 2)
        checks.assert_right(workload, arrays, outputs, str(workload))
