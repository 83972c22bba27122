"""Compiled models in programs: copies and pickles, modes, logs, autocast, threads, processes, memory.

Groups run by the references of their workloads, so that no test compiles a kernel.
"""

from __future__ import annotations

import copy
import gc
import io
import logging
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import tunebench.torch as served  # noqa: E402
from tests.torch.reference_kernels import reference_kernels  # noqa: E402
from tunebench.errors import InputError, UnknownName  # noqa: E402
from tunebench.torch.compiler import _compiled_graph, backend  # noqa: E402
from tunebench.torch.compiler.backend import backend_of  # noqa: E402
from tunebench.workload import Workload  # noqa: E402

R = torch.randn
LOGGER = "tunebench.torch.compiler.backend"


@pytest.fixture
def ran() -> Iterator[set[Workload]]:
    """Workloads that ran, by their references."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    with reference_kernels() as workloads, served.prefer("tunebench"):
        yield workloads
    torch._dynamo.reset()


class Perceptron(nn.Module):
    """Two products, the first with an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.relu(self.up(x)))


def by_name(model: Any) -> Any:
    return torch.compile(model, backend="tunebench")


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# -- copies, pickles, parameters ---------------------------------------------------------------------------


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("compiled", [served.compile, by_name])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
def test_copy_of_a_compiled_model_runs_by_kernels_and_has_plans(
    compiled: Callable[[Any], Any], copied: Callable[[Any], Any], ran: set[Workload]
) -> None:
    model, x = compiled(Perceptron()), R(4, 8)
    with torch.no_grad():
        expected = model(x)
        twin = copied(model)
        assert served.plans(twin) == ()
        ran.clear()
        close(twin(x), expected)
        assert len(ran) == 2
        (plan,) = served.plans(twin)
        assert len(plan.graph.nodes) == 3
        assert len(served.plans(model)) == 1
        twin._orig_mod.up.weight.zero_()
        close(model(x), expected)
        assert not torch.allclose(twin(x), expected)
    assert list(twin.state_dict()) == list(model.state_dict())


def test_state_and_moves_of_a_compiled_model_are_those_of_its_module(ran: set[Workload]) -> None:
    module, x = Perceptron(), R(4, 8)
    model = served.compile(module)
    with torch.no_grad():
        model(x)
        model.load_state_dict({name: 2 * tensor for name, tensor in model.state_dict().items()})
        close(model(x), module(x))
        ran.clear()
        half = model.to(torch.bfloat16)(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert {workload.dtype for workload in ran} == {"bf16"}
    torch.testing.assert_close(half, module(x.bfloat16()), rtol=0.05, atol=0.05)


def test_each_compiled_model_of_many_runs_by_kernels(ran: set[Workload]) -> None:
    x = R(4, 8)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(3):
            ran.clear()
            served.compile(nn.Sequential(nn.Linear(8, 8)))(x)
            assert len(ran) == 1


# -- modes, options, plans, logs ---------------------------------------------------------------------------


def test_modes_and_options_are_checked_and_passed_to_inductor(ran: set[Workload]) -> None:
    def chosen(**options_given: Any) -> tuple[bool | None, bool, dict[str, Any]]:
        made = backend_of(served.compile(**options_given)(Perceptron()))
        return made._benchmark, made._check, made._inductor

    assert chosen() == chosen(mode="default") == chosen(options={"check": False}) == (None, False, {})
    assert chosen(check=True) == chosen(options={"check": True}) == (None, True, {})
    assert chosen(benchmark=True)[:2] == chosen(options={"benchmark": True})[:2] == (True, True)
    assert chosen(benchmark=False)[:2] == (False, False)
    assert chosen(mode="reduce-overhead") == (None, False, {"triton.cudagraphs": True})
    assert chosen(mode="max-autotune-no-cudagraphs")[0]
    assert chosen(options={"epilogue_fusion": False})[2] == {"epilogue_fusion": False}
    with pytest.raises(UnknownName, match=r"unknown mode 'fast'\. Known: default, "):
        served.compile(Perceptron(), mode="fast")
    with pytest.raises(UnknownName, match=r"unknown option 'bench'. Did you mean 'benchmark'\?"):
        served.compile(Perceptron(), options={"bench": True})
    with pytest.raises(UnknownName, match=r"Did you mean 'epilogue_fusion'\?"):
        served.compile(Perceptron(), options={"epilog_fusion": True})
    with pytest.raises(InputError, match="expected option 'check' to be true or false, got 1"):
        served.compile(Perceptron(), options={"check": 1})
    with torch.no_grad():
        model, x = torch.compile(Perceptron(), backend="tunebench", mode="reduce-overhead"), R(4, 8)
        close(model(x), model._orig_mod(x))


def test_modules_that_share_a_graph_have_the_same_plans(ran: set[Workload]) -> None:
    blocks = [Perceptron() for _ in range(3)]
    for block in blocks:
        block.compile(backend="tunebench")
    with torch.no_grad():
        nn.Sequential(*blocks)(R(4, 8))
    first, *rest = (served.plans(block) for block in blocks)
    assert len(first) == 1
    assert rest == [first, first]
    with pytest.raises(InputError, match=r'torch.compile\(module, backend="tunebench"\)'):
        served.plans(Perceptron())


@pytest.mark.parametrize("compiled", [served.compile, by_name, lambda model: copy.deepcopy(by_name(model))])
def test_calls_of_compiled_models_are_reported(compiled: Callable[[Any], Any], ran: set[Workload]) -> None:
    report = served.dispatch_report(compiled(nn.Sequential(nn.Linear(8, 8))), R(4, 8))
    assert [(call.function, call.by) for call in report] == [("gemm", "tunebench")]


def test_log_names_each_group_and_the_reason_of_each_operation_left_to_torch(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        return functional.gelu(x @ w).cumsum(0)

    torch._dynamo.reset()
    monkeypatch.setenv("TUNEBENCH_CACHE", str(tmp_path))  # an earlier run has remembered the second plan
    monkeypatch.setattr(backend, "tried_operators", lambda device: {"softmax"})
    with caplog.at_level(logging.INFO, LOGGER), torch.no_grad():
        with reference_kernels(), served.prefer("tunebench"):
            served.compile(step)(R(4, 8), R(8, 8))
        served.compile(step)(R(4, 8), R(8, 8))
    head, group, cumsum, _, product, gelu, _ = (record.message for record in caplog.records)
    assert head.startswith("step inference on ")
    assert "by tunebench  mm + gelu: gemm:m=4,n=8,k=8,dtype=f32,act=gelu(x)" in group
    assert "by torch" in cumsum
    assert "cumsum: no operator of tunebench" in cumsum
    assert "(neither it nor a comparable workload was measured here)" in product
    assert "gelu: elementwise" in gelu


def test_torch_logs_shows_the_log(ran: set[Workload], capfd: pytest.CaptureFixture[str]) -> None:
    torch._logging.set_logs(modules={"tunebench": logging.INFO})  # what TORCH_LOGS=tunebench sets
    try:
        with torch.no_grad():
            served.compile(Perceptron())(R(4, 8))
    finally:
        torch._logging.set_logs()
    assert "Perceptron inference on " in capfd.readouterr().err


# -- sizes, graph breaks, types ----------------------------------------------------------------------------


def test_graph_breaks_are_those_of_torch_compile(ran: set[Workload]) -> None:
    def asking(x: Tensor, w: Tensor) -> Tensor:
        y = functional.relu(x @ w)
        return y @ w if y.sum().item() > 0 else y

    x, w = R(8, 8), R(8, 8)
    model = served.compile(asking)
    close(model(x, w), asking(x, w))
    assert [len(plan.graph.nodes) for plan in served.plans(model)] == [3, 1]
    assert len(ran) == 3
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        served.compile(asking, fullgraph=True)(x, w)


def test_torch_traces_two_graphs_for_any_number_of_sizes_and_warns_of_too_many(
    ran: set[Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_compiled_graph, "MOST_SIZES", 3)
    module = Perceptron()
    model, before = served.compile(module), torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def kernels_of(count: int) -> int:
        ran.clear()
        with torch.no_grad():
            close(model(x := R(count, 8)), module(x))
        return len(ran)

    assert [kernels_of(count) for count in (4, 5, 6, 7)] == [2] * 4
    with pytest.warns(UserWarning, match="further sizes of its inputs: it is compiled for 3"):
        assert kernels_of(8) == 0
    assert [kernels_of(count) for count in (9, 5)] == [0, 2]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 2


def test_sizes_for_which_torch_is_preferred_do_not_count(
    ran: set[Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch has one graph for all of them, so nothing is compiled and no warning is due."""
    monkeypatch.setattr(_compiled_graph, "MOST_SIZES", 1)
    module = Perceptron()
    model = served.compile(module, dynamic=True)
    with torch.no_grad():
        for count in (4, 5, 6):
            with served.prefer("torch"):
                close(model(x := R(count, 8)), module(x))
        assert not ran
        close(model(x), module(x))
        assert len(ran) == 2
        with pytest.warns(UserWarning, match="further sizes of its inputs: it is compiled for 1"):
            model(R(7, 8))
        monkeypatch.setattr(_compiled_graph, "_compiling", None)  # further calls take no lock
        close(model(x := R(7, 8)), module(x))


class Decoder(nn.Module):
    """Two layers of attention that read one token and a cache of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(16, 16) for _ in range(4)) for _ in range(2))

    def forward(self, x: Tensor, cache: list[Tensor], place: Tensor | None = None) -> list[Tensor]:
        """Return the new token and the caches, longer by one token without a place to write to."""
        kept = []
        for (q, k, v, out), (keys, values) in zip(
            self.layers, zip(cache[::2], cache[1::2], strict=True), strict=True
        ):
            hidden = None
            if place is None:
                keys, values = torch.cat((keys, k(x)), 1), torch.cat((values, v(x)), 1)
            else:
                keys, values = keys.index_copy(1, place, k(x)), values.index_copy(1, place, v(x))
                hidden = torch.where(torch.arange(keys.shape[1]) > place, -torch.inf, 0.0)[None]
            x = x + out(functional.scaled_dot_product_attention(q(x), keys, values, hidden))
            kept += [keys, values]
        return [x, *kept]


@pytest.fixture
def compiled_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """First size of the first tensor with three axes, of each graph that is compiled for constant sizes."""
    rows: list[int] = []
    original = backend.Backend._compiled

    def counted(self: Any, module: Any, inputs: Any, by_torch: Any, sizes: str = "") -> Any:
        if not sizes:
            tensors = [value for value in inputs if isinstance(value, Tensor)]
            rows.append(next(tensor.shape[0] for tensor in tensors if tensor.dim() == 3))
        return original(self, module, inputs, by_torch, sizes)

    torch._dynamo.reset()
    monkeypatch.setattr(backend.Backend, "_compiled", counted)
    return rows


@pytest.mark.parametrize(("tokens", "static"), [(100, False), (20, True)])
def test_cache_is_not_compiled_for_each_token(tokens: int, static: bool, compiled_rows: list[int]) -> None:
    module = Decoder()
    model = served.compile(module)
    x, cache = R(1, 1, 16), [torch.zeros(1, tokens, 16) if static else R(1, 3, 16) for _ in range(4)]
    with torch.no_grad():
        for token in range(tokens):
            place = torch.tensor([token]) if static else None
            expected = module(x, cache, place)
            close(model(x, cache, place), expected)
            x, cache = expected[0].clamp(-2, 2), expected[1:]
    assert len(compiled_rows) == 1  # by the first trace, whose sizes are constant


def test_sizes_that_recur_are_compiled(compiled_rows: list[int]) -> None:
    model = served.compile(Perceptron(), dynamic=True)
    with torch.no_grad():
        for rows in (4, *[5, 6] * 8, 6):
            model(R(rows, 2, 8))
    assert compiled_rows == [5, 6]  # at the second call with 5, and the fourth with 6


def test_autocast_casts_as_in_torch(ran: set[Workload]) -> None:
    module, x = Perceptron(), R(4, 8)
    model = served.compile(module)
    steps = []
    for run in (model, module):
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = run(x)
        y.float().square().sum().backward()
        steps.append([y, *(parameter.grad for parameter in module.parameters())])
    for ours, theirs in zip(*steps, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
    assert {workload.dtype for workload in ran if workload.operator == "gemm"} == {"bf16"}


@pytest.mark.parametrize("batch", [None, torch.export.Dim("batch")])
def test_exported_program_is_compiled(batch: Any, ran: set[Workload]) -> None:
    module = Perceptron()
    sizes = None if batch is None else ({0: batch},)
    model = served.compile(torch.export.export(module, (R(4, 8),), dynamic_shapes=sizes).module())
    with torch.no_grad():
        for x in (R(4, 8), R(5 if batch else 4, 8)):
            ran.clear()
            close(model(x), module(x))
            assert len(ran) == 2


# -- threads, processes, memory ----------------------------------------------------------------------------


def in_threads(count: int, run: Callable[[int], None]) -> None:
    """Run a function in several threads at once; raise the first error."""
    together, errors = threading.Barrier(count), []

    def main(index: int) -> None:
        together.wait()
        try:
            with served.prefer("tunebench"):
                run(index)
        except BaseException as error:  # any error of a thread fails the test
            errors.append(error)

    threads = [threading.Thread(target=main, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("dynamic", [False, True])
def test_threads_call_one_compiled_model(dynamic: bool, ran: set[Workload]) -> None:
    module = Perceptron()
    model = served.compile(module, dynamic=dynamic)
    inputs = [R(2 + index if dynamic else 4, 8) for index in range(4)]
    expected = [module(x).detach() for x in inputs]

    def run(index: int) -> None:
        for _ in range(5):
            with torch.no_grad():
                close(model(inputs[index]), expected[index])

    in_threads(4, run)
    assert len(served.plans(model)) >= (4 if dynamic else 1)


class Rows(torch.utils.data.Dataset):
    """A dataset that computes its rows by a compiled model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        with torch.no_grad():
            return self.model(torch.full((4, 8), float(index)))


def test_workers_of_a_data_loader_run_a_compiled_model(ran: set[Workload]) -> None:
    model = served.compile(Perceptron())
    rows = [Rows(model)[index] for index in range(4)]
    loaded = torch.utils.data.DataLoader(Rows(model), num_workers=2, batch_size=None)
    results = list(loaded)
    assert len(results) == len(rows)
    close(results, rows)


def parallel_step(rank: int, address: str, inputs: Tensor, gradients: Any) -> None:
    """Compute the averaged gradients of two processes, and return those of the first."""
    torch.set_num_threads(1)  # threads of the parent do not exist in a forked process
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    module = Perceptron()
    model = served.compile(nn.parallel.DistributedDataParallel(module))
    model(inputs[rank]).square().mean().backward()
    assert len(served.plans(model)) == 2
    torch.distributed.destroy_process_group()
    if rank == 0:
        gradients.put([parameter.grad.numpy() for parameter in module.parameters()])


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_distributed_data_parallel_averages_gradients_of_compiled_models(
    tmp_path: Path, ran: set[Workload]
) -> None:
    module, inputs = Perceptron(), R(2, 4, 8)
    forking = multiprocessing.get_context("fork")
    gradients = forking.SimpleQueue()
    torch.manual_seed(0)
    arguments = (f"file://{tmp_path / 'store'}", inputs, gradients)
    processes = [forking.Process(target=parallel_step, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)  # a busy machine takes minutes; only a hang reaches the limit
        assert process.exitcode == 0
    torch.manual_seed(0)
    module = Perceptron()
    (sum(module(x).square().mean() for x in inputs) / 2).backward()
    for parameter, gradient in zip(module.parameters(), gradients.get(), strict=True):
        close(torch.from_numpy(gradient), parameter.grad)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_does_not_grow_with_calls(ran: set[Workload], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.torch.reference_kernels.ReferenceKernel.run", lambda self, *tensors, **options: None
    )
    model, x = served.compile(Perceptron()), R(2048, 8)

    def steps(count: int) -> None:
        for call in range(count):
            if call % 10 == 0:
                model(x).sum().backward()
            with torch.no_grad():
                model(x)

    steps(100)
    gc.collect()
    before, objects = resident_bytes(), len(gc.get_objects())
    steps(1000)
    gc.collect()
    assert len(gc.get_objects()) - objects < 100
    assert resident_bytes() - before < 32e6  # the results of these calls have 72 MB
