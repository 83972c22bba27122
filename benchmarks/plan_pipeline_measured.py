"""Pipeline schedules run by processes: gradients, memory and time against the simulation, and killed ranks.

    python -m benchmarks.plan_pipeline_measured [--ranks 4 8] [--steps 5] [--parts PART…] [--out FILE]

The ranks are processes of this machine, one thread each, which connect by Gloo over the loopback interface.
`measure_pipeline` measures the costs of the stages; each schedule then runs, and its simulation has these
costs. Nothing runs on a GPU.

- Gradients and memory: a GPT and a ResNet, cut into as many stages as there are ranks (twice as many if
  interleaved). The peak of one step is that of MemTracker, and one counted by storages, with
  parameters, buffers, gradients and the batch. MemTracker does not work with split backward passes.
- Time: stages whose passes sleep and whose messages are real, since there are more ranks than cores; and the
  GPT, whose passes wait for cores. The simulation has the times of passes that `measure_pipeline` ran while
  no other rank computed, and then the mean times of the passes in the timed steps, with waits for cores.
- Killed ranks: seconds from the kill to the end of the last process.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import functools
import itertools
import json
import os
import signal
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from benchmarks.torch_models import Gpt2Layer, Resnet, Size
from tunebench.training import measure_pipeline, pipelined
from tunebench.training.pipeline.balance import balance
from tunebench.training.pipeline.transfers import with_transfers
from tunebench.training.pipeline_runtime.measurement import NewBytes
from tunebench.training.schedules import (
    ActionKind,
    PipelineAction,
    PipelineCosts,
    PipelineSchedule,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    simulate_pipeline,
    write_schedule,
    zb_h1,
    zbv,
)

__all__ = ["counted_peak", "main", "median_ms", "run_ranks", "state_of", "table", "timed", "with_passes"]

SIZE = Size(layers=16, width=128, heads=4, inner=512, words=512, longest=64)
SLOWDOWN = 0.5
"""Share by which balanced schedules may be longer: times of a shared machine vary."""


# ----------------------------------------------------------------------------------------------- models


class Embedding(nn.Module):
    """Words and their places."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = (nn.Embedding(count, SIZE.width) for count in (SIZE.words, SIZE.longest))

    def forward(self, words: Tensor) -> Tensor:
        """Return (batch, seq, width)."""
        return self.words(words) + self.places(torch.arange(words.shape[1]))


@dataclass(frozen=True)
class Model:
    """A model in parts.

    Attributes:
        parts: Returns the modules of some stages.
        batch: Returns inputs and targets of some micro-batches.
        loss: Returns the loss of an output and a target.
    """

    parts: Callable[[int], list[nn.Module]]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]


def _cut(blocks: Sequence[nn.Module], stages: int) -> list[nn.Module]:
    """Return blocks in stages, as equal in number as possible."""
    boundaries = [len(blocks) * stage // stages for stage in range(stages + 1)]
    return [nn.Sequential(*blocks[first:end]) for first, end in itertools.pairwise(boundaries)]


def _gpt_parts(stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    parts = _cut([Gpt2Layer(SIZE) for _ in range(SIZE.layers)], stages)
    parts[0].insert(0, Embedding())
    parts[-1].extend([nn.LayerNorm(SIZE.width), nn.Linear(SIZE.width, SIZE.words), nn.Flatten(0, 1)])
    return parts


def _gpt_batch(microbatches: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    words = torch.randint(0, SIZE.words, (2 * microbatches, SIZE.longest))
    return words, words.roll(-1, 1)


def _gpt_loss(logits: Tensor, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, words.flatten())


def _resnet_parts(stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    model = Resnet(blocks=(4, 4, 4, 4), width=8, expansion=2, classes=10, stem=3)
    parts = _cut(list(model.blocks), stages)
    parts[0].insert(0, nn.Sequential(model.stem, model.pool))
    parts[-1].extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.fc])
    return parts


def _resnet_batch(microbatches: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(4 * microbatches, 3, 64, 64), torch.randint(0, 10, (4 * microbatches,))


MODELS = {
    "GPT": Model(_gpt_parts, _gpt_batch, _gpt_loss),
    "ResNet": Model(_resnet_parts, _resnet_batch, nn.functional.cross_entropy),
}


class Sleeping(nn.Module):
    """A stage whose passes sleep, and which saves activations.

    Args:
        forward_ms: Time of the forward pass; the backward pass takes twice as long.
        saved: Elements of saved activations.
    """

    def __init__(self, forward_ms: float, saved: int) -> None:
        super().__init__()
        self.forward_ms, self.saved = forward_ms, saved
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return x."""
        return _Sleep.apply(x, self.weight, self.forward_ms / 1e3, self.saved)


class _Sleep(torch.autograd.Function):
    """The identity, late."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float, saved: int) -> Tensor:
        """Return x after some seconds."""
        time.sleep(seconds)
        ctx.seconds = seconds
        ctx.save_for_backward(torch.zeros(saved))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradient after twice as many seconds."""
        time.sleep(2 * ctx.seconds)
        assert not ctx.saved_tensors[0][0]
        return grad, grad.sum().view(1), None, None


def _sleeping_parts(stages: int) -> list[nn.Module]:
    """Return stages with forward passes of 30 to 45 ms, and 1 MB of activations."""
    return [Sleeping(30 + 15 * (stage % 3) / 2, 1 << 18) for stage in range(stages)]


def _sleeping_batch(microbatches: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(microbatches, 1 << 16)
    return x, x


SLEEPING = Model(_sleeping_parts, _sleeping_batch, nn.functional.mse_loss)


# -------------------------------------------------------------------------------------------- schedules


def _schedules(
    ranks: int, costs: Callable[[PipelineSchedule], PipelineCosts], *, splits: bool = False
) -> Iterator[PipelineSchedule]:
    """Yield the schedules to run, if wanted with split backward passes; balanced 1F1B has measured costs."""
    microbatches = 2 * ranks
    yield gpipe(ranks, microbatches)
    plain = one_f_one_b(ranks, microbatches)
    yield plain
    balanced = balance(plain, costs(plain), slowdown=SLOWDOWN)
    if balanced is not plain:
        yield balanced
    yield interleaved_1f1b(ranks, microbatches, 2)
    if splits:
        yield zb_h1(ranks, microbatches)
        yield zbv(ranks, microbatches)


class Tracker(MemTracker):
    """MemTracker without its records of modules, which allow no second call before the backward pass."""

    def _pre_fw_hook(self, *_: Any) -> None: ...
    def _post_fw_hook(self, *_: Any) -> None: ...
    def _pre_bw_hook(self, *_: Any) -> None: ...
    def _post_bw_hook(self, *_: Any) -> None: ...


class Rank:
    """One rank that runs schedules of a model.

    Args:
        model: The model.
        rank: Number of the rank.
    """

    def __init__(self, model: Model, rank: int) -> None:
        self.model, self.rank = model, rank
        self._costs: dict[tuple[int, ...], PipelineCosts] = {}

    def given(self, schedule: PipelineSchedule) -> tuple[list[Tensor], dict[str, Any]]:
        """Return inputs and keyword arguments of a step."""
        inputs, targets = self.model.batch(schedule.microbatches)
        last = schedule.placement[-1] == self.rank
        keywords = {"target": targets if last else None, "return_outputs": False}
        return [inputs] * (schedule.placement[0] == self.rank), keywords

    def parts(self, schedule: PipelineSchedule) -> dict[int, nn.Module]:
        """Return the modules of the stages of this rank."""
        parts = self.model.parts(schedule.stages)
        return {index: parts[index] for index, owner in enumerate(schedule.placement) if owner == self.rank}

    def costs(self, schedule: PipelineSchedule, repeats: int = 7) -> PipelineCosts:
        """Return measured costs of the stages of a schedule."""
        if schedule.placement not in self._costs:
            run = pipelined(self.parts(schedule), schedule, loss_fn=self.model.loss, timeout_s=60)
            inputs, keywords = self.given(schedule)
            measured_costs = measure_pipeline(run, *inputs, target=keywords["target"], repeats=repeats)
            self._costs[schedule.placement] = measured_costs
        return self._costs[schedule.placement]

    def equal(self, parts: dict[int, nn.Module], schedule: PipelineSchedule) -> bool:
        """Return whether gradients and buffers are bit for bit those of one process."""
        modules = copy.deepcopy(self.model.parts(schedule.stages))
        batches = (
            batch_part.chunk(schedule.microbatches) for batch_part in self.model.batch(schedule.microbatches)
        )
        for x, target in zip(*batches, strict=True):
            for module in modules:
                x = module(x)
            self.model.loss(x, target).backward()
        for module in modules:
            for parameter in module.parameters():
                parameter.grad.div_(schedule.microbatches)
        pairs = [
            (expected, actual)
            for index, part in parts.items()
            for expected, actual in zip(_results(part), _results(modules[index]), strict=True)
        ]
        return all(torch.equal(expected, actual) for expected, actual in pairs)


def _results(module: nn.Module) -> list[Tensor]:
    """Return gradients and buffers."""
    return [*(parameter.grad for parameter in module.parameters()), *module.buffers()]


# ------------------------------------------------------------------------------------------------ cases


def memory_rows(rank: int, ranks: int, name: str) -> list[dict[str, Any]]:
    """Return gradients and memory of each schedule of a model, on one rank."""
    worker, rows = Rank(MODELS[name], rank), []
    for schedule in _schedules(ranks, lambda plain: worker.costs(plain, repeats=3), splits=True):
        costs, parts = worker.costs(schedule, repeats=3), worker.parts(schedule)
        inputs, keywords = worker.given(schedule)
        run = pipelined(parts, schedule, loss_fn=worker.model.loss, costs=costs, timeout_s=60)
        run.step(*inputs, **keywords)
        equal = worker.equal(parts, schedule)
        for part in parts.values():
            part.zero_grad(set_to_none=False)
        step = functools.partial(run.step, *inputs, **keywords)
        splits = any(action.kind is ActionKind.INPUT_GRADIENT for action in run.schedule.actions[rank])
        batch_bytes = sum(tensor.nbytes for tensor in (*inputs, keywords["target"]) if tensor is not None)
        rows.append(
            {
                "schedule": schedule.name,
                "equal": equal,
                "evictions": sum(action.kind is ActionKind.EVICT for action in run.schedule.actions[rank]),
                "simulated": simulate_pipeline(run.schedule, costs).peak_bytes[rank] + batch_bytes,
                "tracked": None if splits else _tracked_peak(parts, step),
                "counted": counted_peak(state_of(parts), step),
                "torch": None if schedule.acceptors else _peak_of_torch(worker, schedule),
            }
        )
    return rows


def _tracked_peak(parts: dict[int, nn.Module], step: Callable[[], Any]) -> int:
    """Return the most bytes of tensors in a step by MemTracker."""
    tracker = Tracker()
    tracker.track_external(*parts.values())
    with tracker:
        step()
    return sum(kinds["Total"] for kinds in tracker.get_tracker_snapshot("peak").values())


def state_of(parts: dict[int, nn.Module]) -> list[Tensor]:
    """Return parameters, gradients and buffers."""
    state = [tensor for part in parts.values() for tensor in (*part.parameters(), *part.buffers())]
    return state + [tensor.grad for tensor in state if tensor.grad is not None]


def counted_peak(state: list[Tensor], step: Callable[[], Any]) -> int:
    """Return the most bytes of storages in a step, counted by `NewBytes`, with what exists already."""
    counter = NewBytes(state)
    with counter:
        step()
    return counter.peak_bytes + sum(tensor.nbytes for tensor in state)


def _peak_of_torch(worker: Rank, schedule: PipelineSchedule) -> int:
    """Return the peak of the same schedule by torch's runtime, with its receive buffers."""
    explicit = with_transfers(schedule, PipelineCosts.uniform(schedule.stages))
    path = Path(f"schedule.{worker.rank}.csv")
    write_schedule(explicit, path)
    parts = worker.parts(schedule)
    stages = [
        PipelineStage(part, index, schedule.stages, torch.device("cpu")) for index, part in parts.items()
    ]
    run = _PipelineScheduleRuntime(stages, schedule.microbatches, loss_fn=worker.model.loss)
    run._load_csv(str(path), format="compute_comms")
    inputs, keywords = worker.given(schedule)
    run.step(*inputs, **keywords)
    buffers = [
        info.buffer
        for stage in stages
        for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
        for info in infos
        if info.buffer is not None
    ]
    return counted_peak([*state_of(parts), *buffers], functools.partial(run.step, *inputs, **keywords))


def time_rows(rank: int, ranks: int, name: str, steps: int) -> list[dict[str, Any]]:
    """Return the time of each schedule of a model, on one rank."""
    worker, rows = Rank(SLEEPING if name == "sleeping" else MODELS[name], rank), []
    for schedule in _schedules(ranks, worker.costs):
        costs = worker.costs(schedule)
        inputs, keywords = worker.given(schedule)
        run = pipelined(
            worker.parts(schedule), schedule, loss_fn=worker.model.loss, costs=costs, timeout_s=60
        )
        spans, passes = [], collections.defaultdict(list)
        for step in range(steps + 1):
            if step:
                run.observer = functools.partial(timed, passes)
            dist.barrier()
            began = time.monotonic()
            run.step(*inputs, **keywords)
            spans.append((began, time.monotonic()))
        simulation = simulate_pipeline(run.schedule, costs)
        within = simulate_pipeline(run.schedule, with_passes(costs, passes))
        rows.append(
            {
                "schedule": schedule.name,
                "spans": spans[1:],
                "simulated": simulation.step_us / 1e3,
                "within": within.step_us / 1e3,
                "evictions": sum(action.kind is ActionKind.EVICT for action in run.schedule.actions[rank]),
                "peak": simulation.peak_bytes[rank],
            }
        )
    return rows


@contextlib.contextmanager
def timed(passes: dict[Any, list[float]], action: PipelineAction) -> Iterator[None]:
    """Add the time of a pass in microseconds."""
    began = time.perf_counter()
    yield
    passes[action.stage, action.kind].append((time.perf_counter() - began) * 1e6)


def with_passes(costs: PipelineCosts, passes: dict[Any, list[float]]) -> PipelineCosts:
    """Return costs with the mean times of the passes of all ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        gathered, {key: statistics.fmean(samples_us) for key, samples_us in passes.items()}
    )
    mean = {key: us for rank_passes in gathered for key, us in rank_passes.items()}
    stages = [
        replace(
            stage,
            forward_us=mean[index, ActionKind.FORWARD],
            backward_us=mean[index, ActionKind.BACKWARD],
        )
        for index, stage in enumerate(costs.stages)
    ]
    return replace(costs, stages=tuple(stages))


class Dying(nn.Module):
    """Ends its process, or raises, in its fourth call."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.how, self.calls = fault, 0

    def forward(self, x: Tensor) -> Tensor:
        """Return x."""
        self.calls += 1
        if self.calls == 4:
            Path("failed_at").write_text(str(time.monotonic()))
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("planted")
        return x


def failing_rank(rank: int, ranks: int, how: str, failing: int) -> dict[str, Any]:
    """Run a step in which a rank fails; return the error and when it was raised."""
    schedule = one_f_one_b(ranks, 2 * ranks)
    worker = Rank(SLEEPING, rank)
    parts = worker.parts(schedule)
    if rank == failing:
        parts = {rank: nn.Sequential(parts[rank], Dying(how))}
    run = pipelined(parts, schedule, loss_fn=worker.model.loss, timeout_s=60)
    inputs, keywords = worker.given(schedule)
    try:
        run.step(*inputs, **keywords)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "at": time.monotonic()}
    return {"error": "none", "at": time.monotonic()}


# -------------------------------------------------------------------------------------------- processes


def _run_rank(folder: Path, port: int, rank: int, ranks: int, case: Callable[[int, int], Any]) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    (folder / str(rank)).write_text(json.dumps(case(rank, ranks)))
    os._exit(0)


def run_ranks(ranks: int, case: Callable[[int, int], Any]) -> tuple[list[Any], float, float]:
    """Return the result of each rank, none if it was killed, when the last one ended, and when one failed."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        folder = Path(name)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        processes = [
            get_context("fork").Process(target=_run_rank, args=(folder, port, rank, ranks, case))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        ended = time.monotonic()
        paths = [folder / str(rank) for rank in range(ranks)]
        results = [json.loads(path.read_text()) if path.exists() else None for path in paths]
        failed = folder / "failed_at"
        return results, ended, float(failed.read_text()) if failed.exists() else 0.0


def median_ms(rows: Sequence[dict[str, Any]]) -> float:
    """Return the median time from the first start to the last end of a rank, in milliseconds."""
    steps = zip(*(row["spans"] for row in rows), strict=True)
    return 1e3 * statistics.median(
        max(end for _, end in spans) - min(start for start, _ in spans) for spans in steps
    )


# --------------------------------------------------------------------------------------------- report


MEMORY_HEADER = (
    "model | ranks | schedule | gradients and buffers equal | evictions | largest simulated peak, MB "
    "| largest peak by MemTracker, MB | error of the simulation, largest of a rank "
    "| largest peak by storages, MB | error of the simulation, largest of a rank "
    "| largest peak by torch's runtime, MB"
)
TIME_HEADER = (
    "passes | ranks | schedule | evictions | measured step, ms | simulated from passes timed alone, ms "
    "| error | simulated from passes timed in the step, ms | error"
)
FAILURE_HEADER = "ranks | what happens | seconds until the last process ended | error of another rank"


def table(header: str, rows: Sequence[str]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {header} |", "|" + "---|" * (header.count("|") + 1), *(f"| {row} |" for row in rows), ""]


def _against(simulated: Sequence[int], measured: Sequence[int | None]) -> str:
    """Return the cells of the largest measured peak, and of the largest error of a rank."""
    peaks = [peak for peak in measured if peak is not None]
    if not peaks:
        return "not possible | "
    error = max(
        (simulated_peak / real - 1 for simulated_peak, real in zip(simulated, peaks, strict=True)), key=abs
    )
    return f"{max(peaks) / 1e6:.2f} | {error:+.1%}"


def _memory_table(ranks: Sequence[int]) -> list[str]:
    lines = []
    for name in MODELS:
        for count in ranks:
            rows_by_rank, _, _ = run_ranks(
                count, lambda rank, all_ranks, name=name: memory_rows(rank, all_ranks, name)
            )
            for rows in zip(*rows_by_rank, strict=True):
                simulated = [row["simulated"] for row in rows]
                by_torch = [row["torch"] for row in rows]
                lines.append(
                    f"{name} | {count} | {rows[0]['schedule']} | "
                    f"{'yes' if all(row['equal'] for row in rows) else '**no**'} | "
                    f"{sum(row['evictions'] for row in rows)} | "
                    f"{max(simulated) / 1e6:.2f} | {_against(simulated, [row['tracked'] for row in rows])} | "
                    f"{_against(simulated, [row['counted'] for row in rows])} | "
                    f"{'cannot evict' if by_torch[0] is None else f'{max(by_torch) / 1e6:.2f}'}"
                )
                print(lines[-1], flush=True)
    return table(MEMORY_HEADER, lines)


def _time_table(cases: Sequence[tuple[str, int]], steps: int) -> list[str]:
    lines = []
    for name, count in cases:
        rows_by_rank, _, _ = run_ranks(
            count, lambda rank, all_ranks, name=name: time_rows(rank, all_ranks, name, steps)
        )
        for rows in zip(*rows_by_rank, strict=True):
            measured, simulated, within = median_ms(rows), rows[0]["simulated"], rows[0]["within"]
            lines.append(
                f"{name} | {count} | {rows[0]['schedule']} | {sum(row['evictions'] for row in rows)} | "
                f"{measured:.1f} | {simulated:.1f} | {simulated / measured - 1:+.1%} | {within:.1f} | "
                f"{within / measured - 1:+.1%}"
            )
            print(lines[-1], flush=True)
    return table(TIME_HEADER, lines)


def _failure_table(ranks: Sequence[int]) -> list[str]:
    lines = []
    for count in ranks:
        for how, failing in (("killed", count // 2), ("killed", 0), ("raises", count // 2)):
            results, ended, failed = run_ranks(
                count,
                lambda rank, all_ranks, how=how, failing=failing: failing_rank(rank, all_ranks, how, failing),
            )
            neighbour = results[(failing + 2) % count]
            lines.append(
                f"{count} | rank {failing} {'is killed' if how == 'killed' else how} | "
                f"{ended - failed:.2f} | "
                f"{neighbour['error'] if neighbour else 'none'}"
            )
            print(lines[-1], flush=True)
    return table(FAILURE_HEADER, lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all cases and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[4, 8], help="numbers of ranks (default: 4 8)"
    )
    parser.add_argument("--steps", type=int, default=5, help="timed steps; the median counts (default: 5)")
    titles = ["Gradients and memory", "Time", "Failures"]
    parser.add_argument("--parts", nargs="+", choices=titles, default=titles, help="tables to make")
    parser.add_argument("--out", type=Path, help="file for the tables")
    options = parser.parse_args(arguments)
    cases = [("sleeping", count) for count in options.ranks] + [("GPT", count) for count in (2, 4)]
    tables: dict[str, Callable[[], list[str]]] = {
        "Gradients and memory": lambda: _memory_table(options.ranks),
        "Time": lambda: _time_table(cases, options.steps),
        "Failures": lambda: _failure_table(options.ranks),
    }
    lines = [
        line
        for title, make in tables.items()
        if title in options.parts
        for line in (f"## {title}", "", *make())
    ]
    if options.out:
        options.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
