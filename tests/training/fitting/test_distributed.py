"""Planned steps beside data parallelism: two processes with accumulated gradients under autocast."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.fork_server import Programs  # noqa: E402

RANKS = """
import os, torch
from torch import nn
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from tunebench.errors import InputError
from tunebench.training import fit, fitted_steps
from tunebench.training.fitting import fitter
from tunebench.training.fitting.plan_choice import PlanChoice, choices
from tunebench.training.memory import HostLink

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x))
        return x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

def weights(run, model, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        optimizer.zero_grad()
        for part in range(2):
            torch.manual_seed(100 * rank + 10 * step + part)
            with torch.autocast("cpu", torch.bfloat16):
                loss = run(torch.randn(64, 16))
            loss.backward()
        optimizer.step()
    sharded = (parameter.detach() for parameter in model.parameters())
    return [part.full_tensor() if hasattr(part, "full_tensor") else part for part in sharded]

def of_copies(planned, buckets, compiled=False):
    model = Model()
    fitted = fit(model, "80%") if planned else model
    run = DistributedDataParallel(fitted, bucket_cap_mb=25 if buckets == 1 else 25 / 2**20)
    trained = weights(torch.compile(run, backend="aot_eager") if compiled else run, model)
    assert not planned or len(fitted_steps(fitted)) == 1  # not one of each bucket
    return trained

def of_host_states():
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fitter.choices = lambda *_: [PlanChoice(host_states=4)]
    options = dict(optimizer=optimizer, host_states=True, swap_folder=os.getcwd(), host_link=link)
    fitted = fit(model, "95%", **options)
    trained = weights(DistributedDataParallel(fitted), model, optimizer)
    fitter.choices = choices
    (step,) = fitted_steps(fitted)
    assert step.host_state_bytes == 4 * 2 * 16 * 16 * 4
    return trained

def of_shards(planned, compiled=False):
    model = Model()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = fully_shard(fit(block, "85%") if planned else block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = weights(torch.compile(model, backend="aot_eager") if compiled else model, model)
    assert not planned or all(len(fitted_steps(block)) == 1 for block in model.blocks)
    return trained

def refused(make, expected):
    try:
        fit(make(), "80%")
    except InputError as error:
        assert expected in str(error), error
    else:
        raise AssertionError(f"expected a refusal: {expected}")

torch.set_num_threads(1)
child = os.fork()  # two ranks that import torch once
rank = int(child == 0)
dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
assert all(map(torch.equal, of_copies(True, 8), of_copies(False, 8)))
assert all(map(torch.equal, of_copies(True, 1, compiled=True), of_copies(False, 1)))
link = HostLink(to_host_gb_s=0.1, to_device_gb_s=0.1)
assert all(map(torch.equal, of_host_states(), of_copies(False, 1)))
shards = of_shards(False)
assert all(map(torch.equal, of_shards(True), shards))
assert all(map(torch.equal, of_shards(True, compiled=True), shards))
refused(lambda: DistributedDataParallel(Model()), "DistributedDataParallel(fit(model, budget))")
refused(lambda: fully_shard(Model(), mesh=mesh), "fully_shard(fit(module, budget))")
print("equal", rank, flush=True)
dist.destroy_process_group()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_copies_and_shards_of_fitted_models_have_the_weights_of_those_without_a_plan(
    tmp_path: Path, programs: Programs
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = programs.run(["-c", RANKS], environment=environment, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == 2
