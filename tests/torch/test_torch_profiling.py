"""`tunebench.torch.profile`: observed workloads, their times, and saving them to the database."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")

import torch.nn.functional as F  # noqa: E402, N812
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import tunebench.torch as served  # noqa: E402
from tests.fork_server import Programs  # noqa: E402
from tests.support import until  # noqa: E402
from tunebench.db import Demand, open_store  # noqa: E402
from tunebench.device import local_cpu  # noqa: E402
from tunebench.errors import DatabaseError, InputError  # noqa: E402
from tunebench.torch.profiling import _call_timer  # noqa: E402
from tunebench.torch.profiling._call_timer import CallTimer, TimedCall  # noqa: E402
from tunebench.torch.profiling._demand_counter import DemandCounter, ProfiledOperation  # noqa: E402
from tunebench.torch.profiling.profiler import DemandProfile  # noqa: E402

MM = "gemm:m=4,n=6,k=8,dtype=f32"


def seen(program: Callable[[], Any]) -> DemandProfile:
    with served.profile(save=False) as profile:
        program()
    return profile


def counts(profile: DemandProfile) -> dict[str, int]:
    return {line.name: line.calls for line in profile.workloads}


def stored(db: Path | None = None) -> dict[str, int]:
    with open_store(db) as store:
        return {demand.workload: demand.calls for demand in store.demand(local_cpu().key)}


def product() -> Any:
    return torch.ones(4, 8) @ torch.ones(8, 6)


# -- workloads --------------------------------------------------------------------------------------


def test_training_step_is_profiled_with_its_gradients() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 10))
    x, target = torch.randn(2, 3, 8), torch.zeros(6, dtype=torch.long)

    def steps() -> None:
        for _ in range(3):
            F.cross_entropy(model(x).flatten(0, 1), target).backward()

    assert counts(seen(steps)) == dict.fromkeys(
        (
            "gemm:m=6,n=16,k=8,dtype=f32,trans=nt,epilogue=bias",
            "layernorm:rows=6,cols=16,dtype=f32,stats=true",
            "gemm:m=6,n=10,k=16,dtype=f32,trans=nt,epilogue=bias",
            "cross_entropy:rows=6,cols=10,dtype=f32",
            "cross_entropy:rows=6,cols=10,dtype=f32,direction=backward",
            "gemm:m=6,n=16,k=10,dtype=f32",
            "gemm:m=10,n=16,k=6,dtype=f32,trans=tn",
            "layernorm:rows=6,cols=16,dtype=f32,direction=backward",
            "gemm:m=16,n=8,k=6,dtype=f32,trans=tn",
        ),
        3,
    )


def _grad(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def _attend(**options: Any) -> None:
    q, k, v = _grad(2, 4, 3, 8), _grad(2, 2, 3, 8), _grad(2, 2, 3, 8)
    F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options).sum().backward()


CONV = "conv2d:n=2,c=4,h=5,w=5,k=6,r=3,s=3,stride=2,pad=1,dtype=f32,layout="


def _convolve(layout: Any) -> None:
    x, w = (_grad(*shape).to(memory_format=layout) for shape in ((2, 4, 5, 5), (6, 2, 3, 3)))
    F.conv2d(x, w, stride=2, padding=1, groups=2).sum().backward()


KNOWN: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "transposed": (
        lambda: torch.randn(8, 4).t() @ torch.randn(6, 8).t(),
        {"gemm:m=4,n=6,k=8,dtype=f32,trans=tt"},
    ),
    "transposed convolution": (
        lambda: F.conv_transpose2d(torch.randn(1, 2, 5, 5), torch.randn(2, 3, 3, 3)),
        {"conv2d:n=1,c=3,h=7,w=7,k=2,r=3,s=3,stride=1,pad=0,dtype=f32,layout=nchw,direction=dgrad"},
    ),
    "batch": (
        lambda: torch.randn(3, 4, 8) @ torch.randn(3, 6, 8).transpose(1, 2),
        {"gemm:m=4,n=6,k=8,dtype=f32,batch=3,trans=nt"},
    ),
    "residual": (
        lambda: torch.addmm(torch.randn(4, 6), torch.randn(4, 8), torch.randn(8, 6)),
        {f"{MM},epilogue=residual"},
    ),
    "baddbmm": (
        lambda: torch.baddbmm(torch.randn(3, 4, 6), torch.randn(3, 4, 8), torch.randn(3, 8, 6)),
        {f"{MM},batch=3,epilogue=residual"},
    ),
    "relu": (
        lambda: torch._addmm_activation(torch.randn(6), torch.randn(4, 8), torch.randn(8, 6)),
        {f"{MM},epilogue=bias+relu"},
    ),
    "bf16": (
        lambda: torch.randn(4, 8, dtype=torch.bfloat16) @ torch.randn(8, 6, dtype=torch.bfloat16),
        {MM.replace("f32", "bf16")},
    ),
    "channels first": (
        lambda: _convolve(torch.contiguous_format),
        {f"{CONV}nchw,groups=2{d}" for d in ("", ",direction=dgrad", ",direction=wgrad")},
    ),
    "channels last": (
        lambda: _convolve(torch.channels_last),
        {f"{CONV}nhwc,groups=2{d}" for d in ("", ",direction=dgrad", ",direction=wgrad")},
    ),
    "softmax": (
        lambda: F.softmax(_grad(2, 3, 7), -1).pow(2).sum().backward(),
        {f"softmax:rows=6,cols=7,dtype=f32{d}" for d in ("", ",direction=backward")},
    ),
    "log softmax": (
        lambda: F.log_softmax(_grad(2, 7), 1).sum().backward(),
        {f"softmax:rows=2,cols=7,dtype=f32,log=true{d}" for d in ("", ",direction=backward")},
    ),
    "attention": (
        lambda: _attend(is_causal=True),
        {
            f"attention:batch=2,heads=4,seq_q=3,head_dim=8,dtype=f32,heads_k=2,causal=true{d}"
            for d in ("", ",direction=backward")
        },
    ),
    "attention with a mask": (
        lambda: _attend(attn_mask=torch.zeros(2, 1, 1, 3).expand(2, 4, 3, 3), scale=1.0),
        {
            f"attention:batch=2,heads=4,seq_q=3,head_dim=8,dtype=f32,heads_k=2{d},bias=bk,scale=1.0"
            for d in ("", ",direction=backward")
        },
    ),
    "attention aligned with the first key": (
        lambda: F.scaled_dot_product_attention(_grad(1, 1, 2, 8), *[_grad(1, 1, 3, 8)] * 2, is_causal=True),
        {"attention:batch=1,heads=1,seq_q=2,head_dim=8,dtype=f32,seq_k=3,causal=true,align=first"},
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_operators_are_profiled_as_workloads(name: str) -> None:
    program, workloads = KNOWN[name]
    assert counts(seen(program)) == dict.fromkeys(workloads, 1)


UNKNOWN: dict[str, tuple[Callable[[], Any], str]] = {
    "double": (
        lambda: torch.randn(4, 8, dtype=torch.float64) @ torch.randn(8, 6, dtype=torch.float64),
        "aten.mm (float64)",
    ),
    "alpha": (
        lambda: torch.addmm(torch.randn(6), torch.randn(4, 8), torch.randn(8, 6), alpha=2),
        "aten.addmm (alpha=2, beta=1)",
    ),
    "addend": (
        lambda: torch.addmm(torch.randn(4, 1), torch.randn(4, 8), torch.randn(8, 6)),
        "aten.addmm (an addend of shape (4, 1))",
    ),
    "stride": (
        lambda: F.conv2d(torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3), stride=(1, 2)),
        "aten.convolution (stride of 1 and 2)",
    ),
    "three-dimensional": (
        lambda: F.conv3d(torch.randn(1, 2, 5, 5, 5), torch.randn(3, 2, 3, 3, 3)),
        "aten.convolution (a 3-dimensional convolution that is not recognised as a 2-dimensional one)",
    ),
    "columns": (
        lambda: F.softmax(torch.randn(2, 3, 4), 1),
        "aten._softmax (not over the last axis)",
    ),
    "eps": (
        lambda: F.layer_norm(torch.randn(2, 8), (8,), torch.ones(8), torch.ones(8), eps=-0.5),
        "aten.native_layer_norm (eps=-0.5)",
    ),
    "no weights": (
        lambda: F.layer_norm(torch.randn(2, 8), (8,)),
        "aten.native_layer_norm (without weights)",
    ),
    "elsewhere": (lambda: F.gelu(torch.randn(8)), "aten.gelu"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_operators_have_a_reason(name: str) -> None:
    program, name_and_reason = UNKNOWN[name]
    profile = seen(program)
    assert profile.workloads == ()
    assert {line.name: line.calls for line in profile.others}[name_and_reason] == 1
    assert profile.coverage == 0.0


def test_empty_product_is_not_a_workload() -> None:
    profile = seen(lambda: torch.ones(0, 8) @ torch.ones(8, 6))
    assert profile.workloads == ()
    assert any(line.name.startswith("aten.mm (") for line in profile.others)


@pytest.mark.parametrize("how", [{"dropout_p": 0.5}, {"attn_mask": torch.zeros(3, 3, requires_grad=True)}])
def test_unsupported_attention_is_not_a_workload(how: dict[str, Any]) -> None:
    assert not any(line.name.startswith("attention") for line in seen(lambda: _attend(**how)).workloads)


def test_inference_mode_has_the_same_workloads() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16))
    x = torch.randn(2, 3, 8)

    def under(mode: Any) -> dict[str, int]:
        with mode:
            return counts(seen(lambda: (model(x), F.cross_entropy(x[0], torch.zeros(3, dtype=torch.long)))))

    assert under(torch.inference_mode()) == under(torch.no_grad())
    assert len(under(torch.inference_mode())) == 3


def test_unrelated_loss_is_not_merged() -> None:
    target = torch.zeros(4, dtype=torch.long)

    def apart() -> None:
        y = F.log_softmax(torch.randn(4, 5), 1)
        z = F.log_softmax(torch.randn(4, 5), 1)
        F.nll_loss(y, target)
        F.nll_loss(z, target)

    assert counts(seen(apart)) == {"softmax:rows=4,cols=5,dtype=f32,log=true": 2}


def test_dispatched_calls_are_profiled_as_their_workloads() -> None:
    x, w, b = _grad(4, 8), _grad(6, 8), _grad(6)
    profile = seen(lambda: served.linear(x, w, b).sum().backward())
    double = seen(lambda: served.matmul(torch.ones(2, 2).double(), torch.ones(2, 2).double()))
    assert counts(profile) == {
        f"{MM},trans=nt,epilogue=bias": 1,
        "gemm:m=4,n=8,k=6,dtype=f32": 1,
        "gemm:m=6,n=8,k=4,dtype=f32,trans=tn": 1,
    }
    assert double.workloads == ()
    assert [line.calls for line in double.others if "mm" in line.name] == [1]


# -- with modes, subclasses and torch.compile -------------------------------------------------------


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_profiles_and_other_modes_nest() -> None:
    with served.profile(save=False) as outer, _Counting() as mode:
        product()
        with served.profile(save=False) as inner:
            product()
        with inner, inner:
            product()
    assert mode.count >= 9
    assert counts(outer) == {MM: 3}
    assert counts(inner) == {MM: 3}  # entered twice, it observes a call twice


class _Wrapper(torch.Tensor):
    """A tensor subclass with its own dispatch around another tensor."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.wrapped = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [getattr(arg, "wrapped", arg) for arg in args]
        return func(*plain, **(kwargs or {})) + func(*plain, **(kwargs or {}))


def test_operators_of_tensor_subclasses_are_profiled() -> None:
    assert counts(seen(lambda: _Wrapper(torch.ones(4, 8)) @ torch.ones(8, 6))) == {MM: 2}


@pytest.mark.parametrize("compiled_before", [False, True])
def test_compiled_programs_stay_compiled(compiled_before: bool) -> None:
    def program(x: Any, w: Any) -> Any:
        return torch.sin(x @ w).sum()

    torch._dynamo.reset()
    compiled = torch.compile(program, backend="eager", fullgraph=True)
    x, w = torch.randn(4, 8), torch.randn(8, 6, requires_grad=True)
    if compiled_before:
        compiled(x, w)
    assert MM in counts(seen(lambda: compiled(x, w).backward()))
    with served.profile(save=False, eager=True) as profile:
        compiled(x, w)
    assert counts(profile) == {MM: 1}
    torch._dynamo.reset()


# -- times ------------------------------------------------------------------------------------------


def test_wall_time_is_divided_between_two_gradients() -> None:
    began = time.perf_counter()
    profile = seen(lambda: _convolve(torch.contiguous_format))
    wall_us = 1e6 * (time.perf_counter() - began)
    lines = {line.name: line.time_us for line in profile.workloads}
    assert all(us > 0 for us in lines.values())
    assert sum(lines.values()) < wall_us
    d, w = (lines[f"{CONV}nchw,groups=2,direction={d}"] for d in ("dgrad", "wgrad"))
    assert d == w


class _Event:
    """A CUDA event that happens when the test says so."""

    happened = 0
    made: list[_Event] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        _Event.made.append(self)
        self.at = -1
        self.waited = False

    def record(self, stream: Any) -> None:
        _Event.clock += 10
        self.at = _Event.clock

    def query(self) -> bool:
        return self.at <= _Event.happened

    def synchronize(self) -> None:
        self.waited = True
        _Event.happened = max(_Event.happened, self.at)

    def elapsed_time(self, end: _Event) -> float:
        assert end.query()
        return (end.at - self.at) / 1e3

    clock = 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    _Event.clock = _Event.happened = 0
    _Event.made = []
    monkeypatch.setattr(_call_timer.torch.cuda, "Event", _Event)
    monkeypatch.setattr(_call_timer.torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(_call_timer.torch.cuda, "is_current_stream_capturing", lambda: False)
    return torch.device("cuda", 0)


def test_gpu_calls_are_timed_by_events_without_waiting(gpu: Any) -> None:
    ledger = DemandCounter(None)
    stopwatch = CallTimer(ledger)
    entries = [ProfiledOperation(gpu, name, is_workload=True) for name in "abc"]
    for entry in entries[:2]:
        assert stopwatch.time(TimedCall((entry, 1, 1.0)), gpu, lambda: 42) == 42
    assert ledger.entries() == []
    _Event.happened = 1000
    last = TimedCall((entries[2], 1, 1.0))
    stopwatch.time(last, gpu, lambda: None)
    assert [(entry.name, calls, us) for entry, calls, us in ledger.entries()] == [("a", 1, 10.0)]
    last.shares = ((entries[1], 2, 0.5),)  # the shares of the last call may still change
    assert not any(event.waited for event in _Event.made)
    stopwatch.finish()
    assert {entry.name: (calls, us) for entry, calls, us in ledger.entries()} == {
        "a": (1, 10.0),
        "b": (3, 15.0),
    }
    for _ in range(10):
        stopwatch.time(TimedCall((entries[0], 1, 1.0)), gpu, lambda: None)
        stopwatch.finish()
    assert len(_Event.made) == 6  # events are reused


def test_captured_calls_take_no_time(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_call_timer.torch.cuda, "is_current_stream_capturing", lambda: True)
    ledger = DemandCounter(None)
    CallTimer(ledger).time(
        TimedCall((ProfiledOperation(gpu, "a", is_workload=True), 1, 1.0)), gpu, lambda: None
    )
    assert [(calls, us) for _, calls, us in ledger.entries()] == [(1, 0.0)]
    assert _Event.made == []


# -- saving -----------------------------------------------------------------------------------------


def test_demand_is_saved_after_exceptions_and_adds_up() -> None:
    with served.profile() as profile:
        product()
    assert stored() == {MM: 1}
    with pytest.raises(ZeroDivisionError), profile:
        1 / (0 * len(product()))
    assert stored() == {MM: 2}
    with open_store() as store:
        [demand] = store.demand(local_cpu().key)
    [line] = profile.workloads
    assert (line.calls, line.time_us) == (2, pytest.approx(demand.time_us))
    assert line.device == local_cpu().key
    with served.profile(save=False):
        product()
    assert stored() == {MM: 2}


def test_unusable_database_is_reported_before_the_program_runs(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="folder"), served.profile(db=tmp_path):
        pytest.fail("it ran")
    with pytest.raises(InputError, match="positive"):
        served.profile(interval_s=0)


def test_failed_save_is_a_warning_and_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db = tmp_path / "a.db"

    def refuse(self: Any, device: Any, demands: list[Demand]) -> None:
        raise DatabaseError("the disk is full")

    profile = served.profile(db=db)
    with monkeypatch.context() as patch:
        patch.setattr("tunebench.db.store.Store.add_demand", refuse)
        with pytest.warns(RuntimeWarning, match="not saved yet: the disk is full"), profile:
            product()
    assert stored(db) == {}
    with profile:
        product()
    assert stored(db) == {MM: 2}


KILLED = """
import os, sys, time
import torch, tunebench.torch
with tunebench.torch.profile(interval_s=0.1) as seen:
    a, b = torch.ones(4, 8), torch.ones(8, 6)
    a @ b
    if os.fork() == 0:
        a @ b
        sys.exit(seen.workloads[0].calls - 1)  # leaves the profile as an exception does
    assert os.wait()[1] == 0
    a @ b
    print("ran", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_killed_program_has_saved_and_fork_saves_nothing(tmp_path: Path, programs: Programs) -> None:
    db, output = tmp_path / "a.db", tmp_path / "output"
    with output.open("wb") as stream:
        environment = {**os.environ, "TUNEBENCH_DB": str(db)}
        program = programs.start(["-c", KILLED], output=stream, errors=stream, environment=environment)
    try:
        until(lambda: output.read_text() == "ran\n", "the program ran")
        until(lambda: stored(db) == {MM: 2}, "the profile was saved")
    finally:
        program.kill()
        program.wait()
    assert stored(db) == {MM: 2}


# -- printing ---------------------------------------------------------------------------------------


def test_profile_prints_workloads_and_other_operators() -> None:
    profile = seen(lambda: (product(), F.gelu(torch.ones(4))))
    text = str(profile)
    assert text.startswith("1 tunable workloads, ")
    assert f"       1  {MM}\n" in text
    assert text.splitlines()[3].endswith("other operators")
    assert "       1  aten.gelu" in text
    assert 0 < profile.coverage < 1
    shown = profile.to_json()
    assert [line["name"] for line in shown["workloads"]] == [MM]
    assert shown["problems"] == shown["workloads"]
    with pytest.warns(FutureWarning, match="DemandProfile.workloads"):
        assert profile.problems == profile.workloads
    assert shown["coverage"] == profile.coverage
    assert str(served.profile(save=False)) == (
        "0 tunable workloads, 0.0 % of the observed time\n0 other operators"
    )
