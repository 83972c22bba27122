"""cuDNN by its frontend: graphs, plans and refusals, computed on tensors of the processor."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from tests.kernels import fake_cudnn
from tests.kernels import kernel_checks as checks
from tests.kernels.cudnn_validation import GRAPHS
from tests.kernels.test_library_cublaslt import pretend
from tunebench import kernels
from tunebench.device import find
from tunebench.dispatch import LibraryKernel, bind
from tunebench.dtype import numpy_dtype
from tunebench.errors import InputError
from tunebench.kernels.common.library_gpu import LibraryPlans
from tunebench.libraries import torch_tensor
from tunebench.measure.verify import poisoned
from tunebench.space import Config
from tunebench.torch._tensor import bits_of
from tunebench.tuning.tunable import find_variants
from tunebench.workloads import parse

pytestmark = pytest.mark.torch

GPU = find("h200-sxm")
PRESENT = {"torch": "9.9.9+cu130", "nvidia-cudnn-frontend": "1.32.0", "nvidia-cudnn-cu13": "9.20"}
RANK = Config({"rank": 1})
CONVOLUTION = "conv2d:n=2,c=8,h=11,w=9,k=16,r=3,s=3,stride=1,pad=1"


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cudnn.install(monkeypatch)
    pretend(monkeypatch, PRESENT)


def library_of(text: str) -> LibraryPlans[Any]:
    chosen = kernels.variant(f"{parse(text).operator}/library_cudnn")
    assert isinstance(chosen, LibraryPlans)
    return chosen


def arrays_of(text: str) -> dict[str, Any]:
    drawn = parse(text).draw(np.random.default_rng(3))
    return {name: np.array(array, order="C") for name, array in drawn.items()}


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("text", GRAPHS)
def test_plan_writes_the_right_results(text: str) -> None:
    workload, arrays = parse(text), arrays_of(text)
    outputs = poisoned(workload)
    tensors = {name: torch_tensor(array).clone() for name, array in (arrays | outputs).items()}
    run = library_of(text).call(workload, RANK, tensors)
    assert not fake_cudnn.log, "a plan is built before its first call"
    run()
    run()
    assert fake_cudnn.log == [1, 1]
    written = {
        spec.name: bits_of(tensors[spec.name]).numpy().view(numpy_dtype(spec.dtype))
        for spec in workload.outputs()
    }
    checks.assert_right(workload, arrays, written, text)
    assert "DOWN_CONVERT_INPUTS" in fake_cudnn.excluded
    assert ("TENSOR_CORE" in fake_cudnn.excluded) == ("dtype=f32" in text)


@pytest.mark.usefixtures("_installed")
def test_users_of_torch_receive_new_results_and_handles_are_destroyed() -> None:
    text = next(text for text in GRAPHS if "attention" in text)
    kernel = bind(parse(text), library_of(text), RANK, GPU)
    assert isinstance(kernel, LibraryKernel)
    assert kernel.results is not None
    inputs = {name: torch_tensor(array).clone() for name, array in arrays_of(text).items()}
    o, lse = kernel.results(inputs)
    assert o.dtype == inputs["q"].dtype
    assert lse.dtype == torch.float32
    assert len(fake_cudnn.log) == 1
    del kernel
    gc.collect()
    assert not fake_cudnn.handles


@pytest.mark.usefixtures("_installed")
def test_rank_beyond_the_list_and_unaligned_memory_fail_alone() -> None:
    text = f"{CONVOLUTION},dtype=f32,layout=nhwc"
    workload = parse(text)
    tensors = {n: torch_tensor(a).clone() for n, a in (arrays_of(text) | poisoned(workload)).items()}
    with pytest.raises(InputError, match="cuDNN lists 3 plans, none of rank 3"):
        library_of(text).call(workload, Config({"rank": fake_cudnn.PLANS}), tensors)
    tensors["x"] = torch.zeros(tensors["x"].numel() + 1)[1:].view(tensors["x"].shape)
    with pytest.raises(InputError, match="multiples of 16"):
        library_of(text).call(workload, RANK, tensors)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    "text",
    [
        f"{CONVOLUTION},dtype=f32,layout=nhwc,direction=wgrad",
        f"{CONVOLUTION},dtype=f32,layout=nhwc,pre=relu(x)",
        f"{CONVOLUTION},dtype=f32,layout=nhwc,act=max(min(x,5),1)",
        "attention:batch=2,heads=4,seq_q=37,head_dim=32,dtype=f32",
        "attention:batch=2,heads=4,seq_q=37,head_dim=20,dtype=bf16",
        "attention:batch=2,heads=4,seq_q=37,head_dim=32,dtype=bf16,causal=true,window=5",
        "attention:batch=2,heads=4,seq_q=37,head_dim=32,dtype=bf16,direction=backward",
    ],
)
def test_workload_without_a_graph_is_refused(text: str) -> None:
    reason = library_of(text).refuses(parse(text), GPU)
    assert reason is not None
    assert "has no plans for such a workload" in reason


@pytest.mark.parametrize("absent", ["nvidia-cudnn-frontend", "nvidia-cudnn-cu13"])
def test_absent_package_is_named(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {name: version for name, version in PRESENT.items() if name != absent})
    with pytest.raises(InputError, match=f"conv2d/library_cudnn needs {absent}"):
        find_variants(parse(f"{CONVOLUTION},dtype=bf16,layout=nhwc"), GPU, ["library_cudnn"])


STUB = """\
extern "C" unsigned long cudnnGetVersion() { return 91000; }
extern "C" const char* cudnnGetErrorString(int) { return ""; }
extern "C" int cudnnCreate(void** handle) { return *handle = (void*)1, 0; }
extern "C" int cudnnDestroy(void*) { return 0; }
"""


@pytest.mark.slow
def test_installed_package_validates_all_graphs(tmp_path: Path) -> None:
    """The package checks operations, shapes and types without a GPU, if some cuDNN states its version."""
    pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    (tmp_path / "stub.cpp").write_text(STUB)
    build = ["g++", "-shared", "-fPIC", "-o", "libcudnn.so.9", "stub.cpp"]
    subprocess.run(build, cwd=tmp_path, check=True)
    ran = subprocess.run(
        [sys.executable, "-m", "tests.kernels.cudnn_validation"],
        env=dict(os.environ, LD_PRELOAD=str(tmp_path / "libcudnn.so.9"), LD_LIBRARY_PATH=str(tmp_path)),
        capture_output=True,
        text=True,
    )
    assert ran.stdout == f"{len(GRAPHS)} graphs are valid, 1 is refused\n", ran.stderr
