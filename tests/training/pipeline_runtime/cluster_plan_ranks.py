"""Runs plans of a small GPT and prints what their processes measured, as JSON.

python -m tests.training.pipeline_runtime.cluster_plan_ranks results|endless
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from benchmarks.plan_cluster_gpt import one_process_losses
from benchmarks.plan_cluster_run import Measuring, losses_of, run_plan
from tunebench.training.cluster import ClusterPlan, TrainingJob
from tunebench.training.cluster.eager_memory import EagerMemory
from tunebench.workloads.networks import from_config

NETWORK = from_config(
    "gpt-tiny",
    {
        "model_type": "gpt2",
        "n_layer": 4,
        "n_embd": 128,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": 256,
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": False,
    },
)
JOB = TrainingJob(network=NETWORK, batch=8, seq=64, dtype="f32")
STAGES = ClusterPlan(
    nodes=1,
    tensor=1,
    pipeline=2,
    data=2,
    chunks=1,
    microbatch=2,
    recompute="full",
    sequence_parallel=False,
    flash=False,
    sharding="optimizer",
    states="nvme",
)
SHARDS = ClusterPlan(
    nodes=1,
    tensor=2,
    pipeline=1,
    data=2,
    chunks=1,
    microbatch=2,
    recompute="none",
    sequence_parallel=False,
    flash=False,
    sharding="full",
)
STEPS = 3


def main() -> None:
    """Run both plans, or one for ever."""
    if sys.argv[1] == "endless":
        run_plan(JOB, STAGES, Measuring(steps=10**6))
    written = {}
    for name, plan in (("stages", STAGES), ("shards", SHARDS)):
        results = run_plan(JOB, plan, Measuring(steps=STEPS, memory=True))
        pricer = EagerMemory(JOB)
        written[name] = {
            "losses": losses_of(results, plan),
            "one process": one_process_losses(JOB, plan, STEPS),
            "ranks": [asdict(result) for result in results],
            "predicted": [pricer.of_rank(plan, result.stage).total for result in results],
            "predicted host": [pricer.of_rank(plan, result.stage).host for result in results],
            "predicted nvme": [pricer.of_rank(plan, result.stage).nvme for result in results],
        }
    sys.stdout.write(json.dumps(written))


if __name__ == "__main__":
    main()
