"""Ranks of a pipeline, one process each, that connect by Gloo.

    python -m tests.training.pipeline_runtime.pipeline_ranks FOLDER CASE,CASE… CASE…

Cases that are joined by a comma run in one process group. Each rank writes the result of each case to
``FOLDER/CASE.RANK``. The processes are forks of one that has imported torch.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Container, Mapping
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from tunebench.errors import InputError
from tunebench.training.pipeline.balance import balance, balance_at_limit
from tunebench.training.pipeline.transfers import with_transfers
from tunebench.training.pipeline_runtime.measurement import measure_pipeline
from tunebench.training.pipeline_runtime.pipelined_stages import pipelined
from tunebench.training.schedules import (
    ActionKind,
    PipelineAction,
    PipelineCosts,
    PipelineSchedule,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    schedule_of,
    simulate_pipeline,
    v_placement,
    write_schedule,
)

RANKS = 4
WORDS, WIDTH = 11, 16


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inputs = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.outputs = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU())
        self.forth = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.inputs(self.norm(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.outputs(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.forth(self.feed(x))


def parts_of_gpt(stages: int, *, transposed: bool = True) -> list[nn.Module]:
    """Return a GPT, one block in each stage; outputs of the first stage are not contiguous if transposed."""
    torch.manual_seed(0)
    parts = [nn.Sequential(Block(WIDTH)) for _ in range(stages)]
    parts[0].insert(0, nn.Embedding(WORDS, WIDTH))
    if transposed:
        parts[0].append(Transposed())
        parts[1].insert(0, Transposed())
    parts[-1].append(nn.Linear(WIDTH, WORDS))
    return list(parts)


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batch_of(microbatches: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    words = torch.randint(0, WORDS, (2 * microbatches, 7))
    return words, words.roll(1, 0)


def one_process(parts: list[nn.Module], microbatches: int) -> tuple[list[nn.Module], list[float]]:
    """Return the parts with gradients of the mean loss of the micro-batches, and these losses."""
    parts, losses = copy.deepcopy(parts), []
    inputs, targets = batch_of(microbatches)
    for x, target in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
        for part in parts:
            x = part(x)
        loss = loss_of(x, target)
        loss.backward()
        losses.append(loss.item())
    for part in parts:
        for parameter in part.parameters():
            parameter.grad.div_(microbatches)
    return parts, losses


def split_backward() -> PipelineSchedule:
    """Return a V-shaped schedule whose backward passes are split, with weight gradients at the end."""
    placement, microbatches = v_placement(RANKS), 3
    actions = []
    for rank in range(RANKS):
        first, second = (stage for stage, owner in enumerate(placement) if owner == rank)
        forward = [
            PipelineAction(first, ActionKind.FORWARD, microbatch) for microbatch in range(microbatches)
        ]
        forward += [
            PipelineAction(second, ActionKind.FORWARD, microbatch) for microbatch in range(microbatches)
        ]
        gradients = [
            PipelineAction(stage, kind, microbatch)
            for kind in (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
            for stage in (second, first)
            for microbatch in range(microbatches)
        ]
        actions.append([*forward, *gradients])
    return schedule_of("split", actions)


def balanced() -> PipelineSchedule:
    return balance(one_f_one_b(RANKS, 8), PipelineCosts.uniform(RANKS))


SCHEDULES: dict[str, Callable[[], PipelineSchedule]] = {
    "gpipe": lambda: gpipe(RANKS, 5),
    "1f1b": lambda: one_f_one_b(RANKS, 6),
    "interleaved": lambda: interleaved_1f1b(RANKS, 8, 2),
    "split": split_backward,
    "balanced": balanced,
}


def gradients(name: str, rank: int) -> dict[str, Any]:
    """Run two steps; return whether each has the gradients and losses of one process."""
    schedule = SCHEDULES[name]()
    parts = parts_of_gpt(schedule.stages)
    expected, losses = one_process(parts, schedule.microbatches)
    own_stages = [stage for stage, owner in enumerate(schedule.placement) if owner == rank]
    run = pipelined({stage: parts[stage] for stage in own_stages}, schedule, loss_fn=loss_of, timeout_s=30)
    inputs, targets = batch_of(schedule.microbatches)
    run.eval(*[inputs] * (0 in own_stages))
    equal = []
    for _ in range(2):
        losses_seen: list[Tensor] = []
        for stage in own_stages:
            parts[stage].zero_grad()
        last = schedule.stages - 1 in own_stages
        output = run.step(
            *[inputs] * (0 in own_stages),
            target=targets if last else None,
            losses=losses_seen,
            return_outputs=True,
        )
        equal.append(
            all(
                torch.equal(actual.grad, expected_parameter.grad)
                for stage in own_stages
                for actual, expected_parameter in zip(
                    parts[stage].parameters(), expected[stage].parameters(), strict=True
                )
            )
            and (not last or [loss.item() for loss in losses_seen] == losses)
            and (not last or output.shape == (*inputs.shape, WORDS))
        )
    evictions = sum(action.kind is ActionKind.EVICT for action in run.schedule.actions[rank])
    return {"equal": equal, "evictions": evictions}


def by_torch(_: str, rank: int) -> dict[str, Any]:
    """Run a step by torch's runtime, which reads the schedule from a file."""
    schedule = with_transfers(one_f_one_b(RANKS, 6), PipelineCosts.uniform(RANKS))
    path = Path(f"schedule.{rank}.csv")
    write_schedule(schedule, path)
    parts = parts_of_gpt(RANKS, transposed=False)  # torch sends contiguous tensors alone
    expected, _ = one_process(parts, schedule.microbatches)
    stage = PipelineStage(parts[rank], rank, RANKS, torch.device("cpu"))
    run = _PipelineScheduleRuntime([stage], schedule.microbatches, loss_fn=loss_of)
    run._load_csv(str(path), format="compute_comms")
    inputs, targets = batch_of(schedule.microbatches)
    run.step(*[inputs] * (rank == 0), target=targets if rank == RANKS - 1 else None)
    stage.scale_grads(schedule.microbatches)
    pairs = zip(parts[rank].parameters(), expected[rank].parameters(), strict=True)
    return {"equal": [all(torch.equal(actual.grad, reference.grad) for actual, reference in pairs)]}


class Tracker(MemTracker):
    """MemTracker without its records of modules, which allow no second call before the backward pass."""

    def _pre_fw_hook(self, *_: Any) -> None: ...
    def _post_fw_hook(self, *_: Any) -> None: ...
    def _pre_bw_hook(self, *_: Any) -> None: ...
    def _post_bw_hook(self, *_: Any) -> None: ...


def memory(_: str, rank: int) -> dict[str, Any]:
    """Return measured and simulated peaks with and without evictions, and the measured costs."""
    parts, (words, targets) = parts_of_gpt(RANKS), batch_of(8)
    keywords = {"target": targets if rank == RANKS - 1 else None, "return_outputs": False}
    inputs = [words] * (rank == 0)
    costs, measured, simulated = None, [], []
    for schedule in (one_f_one_b(RANKS, 8), balanced()):
        run = pipelined(parts[rank], schedule, loss_fn=loss_of, costs=costs, timeout_s=30)
        costs = costs or measure_pipeline(run, *inputs, target=keywords["target"], repeats=2)
        run.step(*inputs, **keywords)
        tracker = Tracker()
        tracker.track_external(parts[rank])
        with tracker:
            run.step(*inputs, **keywords)
        measured.append(sum(kinds["Total"] for kinds in tracker.get_tracker_snapshot("peak").values()))
        simulated.append(simulate_pipeline(run.schedule, costs).peak_bytes[rank])
    forward_us = [stage.forward_us for stage in costs.stages]
    return {"measured": measured, "simulated": simulated, "forward_us": forward_us}


class FirstOutput(nn.Module):
    """The first result of a module that returns several."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.module(x)[0]
        return output


def conv_layers(channels: int, outputs: int, *scale: nn.Module) -> list[nn.Module]:
    return [nn.Conv2d(channels, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU(), *scale]


def feed_layers(width: int) -> list[nn.Module]:
    return [nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()]


def normalised_layers(channels: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)


def lstm_layer(width: int) -> nn.Module:
    return FirstOutput(nn.LSTM(width, 32, batch_first=True))


Shape = tuple[int, ...]


def foreign_models() -> dict[str, tuple[list[list[nn.Module]], Shape, Shape]]:
    """Return layers of four stages, and the shapes of inputs and targets of eight micro-batches."""
    down, up = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
    image = (16, 3, 16, 16)
    convolutions = [[*normalised_layers(8), *normalised_layers(8)] for _ in range(4)]
    convolutions[0].insert(0, nn.Conv2d(3, 8, 1))
    u_net = [
        [*conv_layers(3, 8), *conv_layers(8, 8, down)],
        [*conv_layers(8, 16), *conv_layers(16, 16, down)],
        [*conv_layers(16, 16, up), *conv_layers(16, 8)],
        [*conv_layers(8, 8, up), *conv_layers(8, 4)],
    ]
    perceptrons = [[*feed_layers(64), *feed_layers(64), *feed_layers(64)] for _ in range(4)]
    encoders = [[encoder_layer(), encoder_layer()] for _ in range(4)]
    return {
        "MLP": (perceptrons, (512, 64), (512, 64)),
        "convolutions": (convolutions, image, (16, 8, 16, 16)),
        "transformer": (encoders, (16, 12, 32), (16, 12, 32)),
        "LSTM": ([[lstm_layer(width)] for width in (16, 32, 32, 32)], (16, 10, 16), (16, 10, 32)),
        "U-Net": (u_net, image, (16, 4, 16, 16)),
    }


def peaks(_: str, rank: int) -> dict[str, Any]:
    """Return the measured and the planned peak of this rank for each foreign model, without the batch.

    Besides, the bytes of its largest message.
    """
    torch.manual_seed(0)
    peak_bytes: dict[str, Any] = {}
    schedule = one_f_one_b(RANKS, 8)
    for name, (stages, input_shape, target_shape) in foreign_models().items():
        stage = nn.Sequential(*stages[rank])
        inputs = [torch.randn(input_shape)] * (rank == 0)
        target = torch.randn(target_shape) if rank == RANKS - 1 else None
        run = pipelined(stage, schedule, loss_fn=nn.functional.mse_loss, timeout_s=30)
        costs = measure_pipeline(run, *inputs, target=target, repeats=1)
        run.step(*inputs, target=target)
        tracker = Tracker()
        tracker.track_external(stage)
        with tracker:
            run.step(*inputs, target=target)
        measured = sum(kinds["Total"] for kinds in tracker.get_tracker_snapshot("peak").values())
        batch_bytes = sum(tensor.nbytes for tensor in (*inputs, target) if tensor is not None)
        planned = simulate_pipeline(run.schedule, costs).peak_bytes[rank]
        neighbours = costs.stages[max(0, rank - 1) : rank + 1]
        peak_bytes[name] = measured - batch_bytes, planned, max(stage.send_bytes for stage in neighbours)
    return peak_bytes


class Failing(nn.Module):
    """Ends the process, or raises, in a later call."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.how, self.calls = fault, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 4:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            raise ValueError("no such word")
        return x


def failure(cause: str, rank: int) -> dict[str, Any]:
    """Run a step in which rank 2 fails; return the error of this rank, and that of another step."""
    schedule = one_f_one_b(RANKS, 6)
    part = parts_of_gpt(RANKS)[rank]
    if rank == 2:
        part.append(Failing(cause))
    run = pipelined(part, schedule, loss_fn=loss_of, timeout_s=3 if cause == "stopped" else 25)
    inputs, targets = batch_of(schedule.microbatches)
    errors = []
    for _ in range(2):
        try:
            run.step(*[inputs] * (rank == 0), target=targets if rank == RANKS - 1 else None)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return {"errors": errors}


def sharded(_: str, rank: int) -> dict[str, Any]:
    """Run two stages, each sharded over two ranks; return how far gradients are from those of one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
    schedule = one_f_one_b(2, 4)
    parts = parts_of_gpt(2, transposed=False)
    expected, losses = one_process(parts, 2 * schedule.microbatches)
    stage, shard = mesh.get_local_rank("pipeline"), mesh.get_local_rank("shard")
    for block in (parts[stage][0 if stage else 1], parts[stage]):
        fully_shard(block, mesh=mesh["shard"])
    run = pipelined(parts[stage], schedule, loss_fn=loss_of, group=mesh.get_group("pipeline"), timeout_s=30)
    words, targets = (tensor.chunk(2)[shard] for tensor in batch_of(2 * schedule.microbatches))
    differences = []
    for _ in range(2):
        parts[stage].zero_grad()
        losses_seen: list[Tensor] = []
        run.step(*[words] * (stage == 0), target=targets if stage == 1 else None, losses=losses_seen)
        pairs = zip(parts[stage].parameters(), expected[stage].parameters(), strict=True)
        differences.append(
            max(
                float((actual.grad.full_tensor() - reference.grad).abs().max() / reference.grad.abs().max())
                for actual, reference in pairs
            )
        )
    share = losses[shard * schedule.microbatches :][: schedule.microbatches]
    refusals = []
    for refused in (
        lambda: measure_pipeline(run, *[words] * (stage == 0), target=targets if stage == 1 else None),
        lambda: pipelined(
            nn.Sequential(parts[stage]), schedule, loss_fn=loss_of, group=mesh.get_group("pipeline")
        ),
        lambda: pipelined(parts[stage], balanced_pair(), loss_fn=loss_of, group=mesh.get_group("pipeline")),
    ):
        try:
            refused()
        except InputError as error:
            refusals.append(str(error))
    return {
        "differences": differences,
        "losses equal": stage == 0 or [loss.item() for loss in losses_seen] == share,
        "refusals": refusals,
    }


def balanced_pair() -> PipelineSchedule:
    """Return a schedule of two ranks in which the first one evicts."""
    return balance_at_limit(one_f_one_b(2, 4), PipelineCosts.uniform(2), 1)


Case = Callable[[str, int], dict[str, Any]]

CASES: dict[str, Case] = {
    **dict.fromkeys(SCHEDULES, gradients),
    "torch": by_torch,
    "memory": memory,
    "sharded": sharded,
    "peaks": peaks,
    "killed": failure,
    "raises": failure,
    "stopped": failure,
}


def run_rank(
    folder: Path, functions: Mapping[str, Case], cases: list[str], rank: int, *, connected: bool
) -> None:
    """Connect to the other ranks, unless the cases do, and run the cases."""
    torch.set_num_threads(1)
    if connected:
        store = dist.FileStore(str(folder / f"store.{cases[0]}"), RANKS)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
        )
    os.environ["RANK"] = str(rank)
    for case in cases:
        (folder / f"{case}.{rank}").write_text(json.dumps(functions[case](case, rank)))
    os._exit(0)


def main(functions: Mapping[str, Case], unconnected: Container[str] = ()) -> None:
    """Run the cases of the command line.

    Args:
        functions: Function of each case.
        unconnected: Cases that connect by themselves, as `torchrun` lets them.
    """
    folder = Path(sys.argv[1])
    os.chdir(folder)
    for cases in sys.argv[2:]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ |= {"MASTER_PORT": str(free.getsockname()[1]), "MASTER_ADDR": "127.0.0.1"}
        os.environ["WORLD_SIZE"] = str(RANKS)
        names = cases.split(",")
        processes = [
            get_context("fork").Process(
                target=run_rank,
                args=(folder, functions, names, rank),
                kwargs={"connected": names[0] not in unconnected},
            )
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        for rank, process in enumerate(processes):
            if cases != "stopped" or rank != 2:
                process.join()
        for process in processes:
            process.kill()


if __name__ == "__main__":
    main(CASES)
