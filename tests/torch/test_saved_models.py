"""Models in files: the same results in a new process that compiles nothing, and refusals with reasons."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")

from torch import nn  # noqa: E402

import tunebench.torch as served  # noqa: E402
from tests.support import needs_compiler  # noqa: E402
from tests.torch.test_torch_compile import _record  # noqa: E402
from tunebench.device import local_cpu  # noqa: E402
from tunebench.errors import InputError  # noqa: E402
from tunebench.torch.compiler.saving import description, kernel, load, program, save  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.inductor]

SIZES = (4, 16)

QUICK_PACKAGE = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
"""Options of AOTInductor that compile one package in less time: to precompile headers pays for several."""


class Model(nn.Module):
    """An operation by a tuned kernel, others by torch, parameters, a constant, and a buffer without state."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(16))
        self.register_buffer("shift", torch.arange(16.0), persistent=False)

    def forward(self, x: Any, *, factor: float = 1.0) -> Any:
        sums = torch.softmax(x, -1).cumsum(-1) * self.scale * factor + self.shift
        return {"sums": sums, "last": sums[:, -1] + torch.tensor([1.5])}


def exported(**options: Any) -> Any:
    torch.manual_seed(0)
    return torch.export.export(Model().eval(), (torch.randn(SIZES),), {"factor": 2.0}, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a saved model, from a file of `torch.export`, and its digest."""
    folder = tmp_path_factory.mktemp("saved")
    path = folder / "model.tb"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNEBENCH_DB", str(folder / "some.db"))
        patch.setenv("TUNEBENCH_CACHE", str(folder / "cache"))
        patch.setattr(save, "_OPTIONS", {**save._OPTIONS, **QUICK_PACKAGE})
        _record("softmax:rows=4,cols=16,dtype=f32", ratio=2.0)
        torch.export.save(exported(), folder / "model.pt2")
        digest = served.save(torch.export.load(folder / "model.pt2"), path)
    return path, digest


NEW_PROCESS = """
import sys
import torch
import tunebench.torch
from tests.torch.test_saved_models import Model, SIZES
torch.manual_seed(1)
model, x = Model().eval(), torch.randn(SIZES)
loaded = tunebench.torch.load(sys.argv[1], model)
calls = []
results = [loaded(x, factor=2.0)]
with torch.no_grad():
    expected = [model(x, factor=2.0)]
    model.scale.mul_(3)  # the model reads its weights where they are
    expected.append(model(x, factor=2.0))
results.append(loaded(x, factor=2.0))
torch.testing.assert_close(results, expected)
assert not results[0]["sums"].requires_grad
compilers = ("torch._inductor.compile_fx", "tunebench.torch.compiler._group_planner", "sqlalchemy", "numba")
assert not [name for name in compilers if name in sys.modules]
groups = [group for plan in loaded.plans for group in plan["groups"]]
print(*(group["by"] for group in groups if "softmax" in str(group["workloads"])))
"""


def test_a_new_process_runs_a_saved_model_without_compiling(saved: tuple[Path, str], tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "TUNEBENCH_CACHE": str(tmp_path / "cache"),
        "TUNEBENCH_DB": str(tmp_path / "some.db"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "PATH": "",  # no C++ compiler
    }
    source = NEW_PROCESS.replace("from tests.torch.test_saved_models import Model, SIZES", _definition())
    command = [sys.executable, "-c", source, str(saved[0])]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["tunebench"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]  # nothing was compiled or planned


def _definition() -> str:
    """Return the source of the model, since importing this file imports the compiler."""
    lines = Path(__file__).read_text(encoding="utf-8").partition("class Model")[2].partition("def exported")
    return f"from typing import Any\nfrom torch import nn\nSIZES = {SIZES}\nclass Model{lines[0]}"


WARM = """
import sys
import torch
import tunebench.torch as served

model = lambda x: torch.softmax(x, -1) + x
compiled, x = served.compile(model), torch.randn(4, 16)
with torch.no_grad():
    torch.testing.assert_close(compiled(x), model(x))
heavy = {"numba", "llvmlite", "optuna", "sqlalchemy", "alembic", "highspy", "rich", "typer", "ray"}
print(*sorted({name.partition(".")[0] for name in sys.modules} & heavy))
print(*(group.price.by for plan in served.plans(compiled) for group in plan.chosen))
"""


@pytest.mark.exhaustive  # two processes with torch's compiler
def test_a_warm_compilation_imports_neither_numba_nor_the_planner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNEBENCH_DB", str(tmp_path / "some.db"))
    monkeypatch.setenv("TUNEBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    _record("softmax:rows=4,cols=16,dtype=f32", ratio=2.0)
    for _ in range(2):
        run = subprocess.run([sys.executable, "-c", WARM], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
    imported, runs = run.stdout.split("\n")[:2]
    assert (imported, "tunebench" in runs) == ("", True)


def weights() -> dict[str, Any]:
    return dict(Model().state_dict())


def refused(path: Path, state: Any = None, **options: Any) -> str:
    with pytest.raises(InputError) as refusal:
        served.load(path, weights() if state is None else state, **options)
    return str(refusal.value)


def rewritten(path: Path, target: Path, name: str, change: Any) -> Path:
    """Write a file with another content of one member."""
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(target, "w") as changed:
        for member in archive.namelist():
            content = archive.read(member)
            changed.writestr(member, change(content) if member == name else content)
    return target


def test_altered_files_are_refused(saved: tuple[Path, str], tmp_path: Path) -> None:
    path, digest = saved
    target = tmp_path / "model.tb"
    content = path.read_bytes()
    target.write_bytes(content[: len(content) // 2])
    assert "is not a saved model, or it is damaged" in refused(target)
    middle = len(content) // 2
    target.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    assert "is not a saved model, or it is damaged" in refused(target)
    with zipfile.ZipFile(path) as archive:
        members = [name for name in archive.namelist() if name != "description.json"]
    for name in members:
        rewritten(path, target, name, lambda old: old + b"0")
        assert refused(target) == f"{target} was altered since it was saved: {name}"
    rewritten(path, target, "description.json", lambda old: old.replace(b"float32", b"float64"))
    assert "its description has another hash" in refused(target)
    rewritten(path, target, "description.json", lambda old: b"{}")
    assert "is not a saved model" in refused(target)
    assert f"expected {digest[::-1]}: it is another file" in refused(path, digest=digest[::-1])
    assert served.load(path, weights(), digest=digest)


def test_files_of_another_format_or_that_others_may_write_are_refused(
    saved: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model.tb"
    target.write_bytes(saved[0].read_bytes())
    target.chmod(0o666)
    assert "can be written by other users" in refused(target)
    assert "cannot be read: No such file" in refused(tmp_path / "missing.tb")
    monkeypatch.setattr("tunebench.torch.compiler.saving.archive.FORMAT", 3)
    assert "has format 2, this version reads 3: save the model again" in refused(saved[0])


def test_another_machine_or_version_is_refused(
    saved: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved[0]
    with monkeypatch.context() as patch:
        patch.setattr(description.torch, "__version__", "2.0.0")
        assert f"saved with torch {torch.__version__[:1]}" in refused(path)
    with monkeypatch.context() as patch:
        patch.setattr(description, "__version__", "0.0.1")
        assert "and this is 0.0.1: save the model again here" in refused(path)
    with monkeypatch.context() as patch:
        other = type("Other", (), {"key": "another processor"})
        patch.setattr(load, "local_cpu", other)
        assert f"processor {local_cpu().key}, and this is another processor" in refused(path)
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        assert "and this is DEFAULT" in refused(path)
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "_KERNELS", {})
        patch.setattr(kernel, "key_numba_cpu", lambda *_: "another key")
        patch.setattr(kernel, "key_of_shared", lambda *_: "another key")
        assert "softmax/numba_cpu was compiled for" in refused(path)


def test_missing_and_other_weights_are_refused(saved: tuple[Path, str]) -> None:
    path = saved[0]
    assert refused(path, {}).endswith("needs weights that are missing: scale")
    assert "scale as float32 of shape [16] and strides [1], got float32 of shape [8]" in refused(
        path, {"scale": torch.ones(8)}
    )
    assert "got float64" in refused(path, {"scale": torch.ones(16, dtype=torch.float64)})


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_copies_and_pickles_of_loaded_models_are_refused(
    saved: tuple[Path, str], copied: Callable[[Any], Any]
) -> None:
    with pytest.raises(TypeError, match=r"call tunebench\.torch\.load with its file again"):
        copied(served.load(saved[0], weights()))


def test_other_inputs_are_refused(saved: tuple[Path, str]) -> None:
    loaded, x = served.load(saved[0], weights()), torch.randn(SIZES)
    for args, kwargs, reason in (
        ((torch.randn(5, 16),), {"factor": 2.0}, "input 0: expected float32 of shape [4, 16]"),
        ((x.double(),), {"factor": 2.0}, "got float64"),
        ((torch.randn(16, 4).t(),), {"factor": 2.0}, "strides [1, 4]"),
        ((x,), {"factor": 3.0}, "input 1: expected 2.0, got 3.0"),
        ((x.clone().requires_grad_(),), {"factor": 2.0}, "call it in torch.no_grad()"),
        ((x,), {}, "expected inputs (*, factor=*), as in the example; got (*)"),
        ((x, [x]), {"factor": 2.0}, "got (*, [*], factor=*)"),
        ((x,), {"factor": 2.0, "other": 1}, "expected inputs"),
    ):
        with pytest.raises(InputError) as refusal:
            loaded(*args, **kwargs)
        assert reason in str(refusal.value)


class Counting(nn.Module):
    """A model that changes its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Any) -> Any:
        self.count.add_(1)
        return x * self.count


def test_models_that_cannot_be_saved_are_refused_with_the_reason(tmp_path: Path) -> None:
    path, x = tmp_path / "model.tb", torch.randn(SIZES)
    rows = torch.export.Dim("rows", min=2, max=8)
    sizes = exported(dynamic_shapes={"x": {0: rows}, "factor": None})
    for model, options, reason in (
        (Model(), {"args": (x,)}, "call model.eval()"),
        (Model().eval(), {}, "expected example inputs"),
        (exported(), {"args": (x,)}, "has its own example inputs"),
        (sizes, {}, "sizes that change"),
        (Counting().eval(), {"args": (x,)}, "changes its buffers or inputs (count)"),
        (lambda x: x, {"args": (x,)}, "expected a module or a program of torch.export, got function"),
    ):
        with pytest.raises(InputError) as refusal:
            served.save(model, path, **options)
        assert reason in str(refusal.value)
    assert not path.exists()
    for missing, reason in (
        (tmp_path / "no" / "model.tb", "there is no folder"),
        (tmp_path, "it is a folder"),
    ):
        with pytest.raises(InputError, match=reason):
            served.save(exported(), missing)  # before it is compiled


def test_torch_runs_groups_whose_kernels_cannot_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: tuple[Path, str]
) -> None:
    def of(bound: Any) -> Any:
        raise InputError("a call of a library")

    with zipfile.ZipFile(saved[0]) as archive:
        package = archive.read("model.pt2")
    monkeypatch.setattr(save, "_compiled", lambda *_: package)
    monkeypatch.setattr(program.SavedKernel, "of", of)
    monkeypatch.setenv("TUNEBENCH_DB", str(saved[0].parent / "some.db"))
    monkeypatch.setenv("TUNEBENCH_CACHE", str(saved[0].parent / "cache"))
    served.save(exported(), tmp_path / "model.tb")
    with zipfile.ZipFile(tmp_path / "model.tb") as archive:
        (plan,) = json.loads(archive.read("plan.json"))
        assert not [name for name in archive.namelist() if name.startswith("kernels/")]
    (group,) = [group for group in plan["groups"] if "softmax" in str(group["workloads"])]
    assert (group["by"], group["reason"]) == ("torch", "a call of a library")


def test_a_compiled_module_is_saved_like_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: tuple[Path, str]
) -> None:
    """The package is that of the other tests, since compiling another one takes seconds."""
    with zipfile.ZipFile(saved[0]) as archive:
        package = archive.read("model.pt2")
    monkeypatch.setattr("tunebench.torch.compiler.saving.save._compiled", lambda *_: package)
    compiled = served.compile(Model().eval())
    served.save(compiled, tmp_path / "model.tb", (torch.randn(SIZES),), {"factor": 2.0})
    with zipfile.ZipFile(tmp_path / "model.tb") as archive:
        text = json.loads(json.loads(archive.read("description.json"))["description"])
    assert list(text["weights"]) == ["scale"]
    assert "shift" in text["constants"]
    assert [wanted.get("shape") for wanted in text["inputs"]] == [list(SIZES), None]


@pytest.mark.exhaustive  # compiles a program with torch's headers
@needs_compiler
def test_a_program_in_cpp_runs_a_saved_model(saved: tuple[Path, str], tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs/guide/saved-models.md").read_text(encoding="utf-8")
    (tmp_path / "main.cpp").write_text(guide.partition("```cpp\n")[2].partition("```")[0], encoding="utf-8")
    block = guide.partition("$ python -m zipfile")[2].partition("```")[0]
    command = f"python -m zipfile{block}".replace("\n$ ", "\n")
    torch.manual_seed(1)
    model, x = Model().eval(), torch.randn(SIZES)
    torch.save(dict(model.state_dict()), tmp_path / "model.weights")
    torch.save(x, tmp_path / "x.pt")
    (tmp_path / "model.tb").write_bytes(saved[0].read_bytes())
    bin_folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    run = subprocess.run(
        ["bash", "-ec", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "kernel " in (tmp_path / "folder" / "cpp.txt").read_text(encoding="utf-8")
    with torch.no_grad():
        expected = model(x, factor=2.0)
    printed = [float(word) for word in run.stdout.split() if re.fullmatch(r"-?\d+\.\d+(e[-+]\d+)?", word)]
    values = torch.cat([expected["sums"].flatten(), expected["last"]])
    assert len(printed) == values.numel()
    torch.testing.assert_close(torch.tensor(sorted(printed)), values.sort().values, rtol=1e-3, atol=1e-3)
