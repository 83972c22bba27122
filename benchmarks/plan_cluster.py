"""Plans of training on clusters: the best plan of known models, and the choice among measured plans.

    python -m benchmarks.plan_cluster [--data FOLDER] [--only NAME …] > benchmarks/results/plan_cluster.md

Measured plans are public (FOLDER/README.md); no figure of the prediction is fitted to their choice. Seconds
are those of the process on one core, without the time in which other programs ran.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tunebench.training.cluster import (
    ClusterAnswer,
    ClusterPlan,
    ClusterSearch,
    PricedPlan,
    TrainingCluster,
    TrainingJob,
    plan_training,
)
from tunebench.workloads.networks import Network, from_config, network

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "training"

NOTE = """\
t, c, p, d: tensor, context, pipeline and data parallelism; v: stages of a device; b: sequences in a
micro-batch; ends as 1 + 2 layers: the embedding counts as one layer and the head as two. Batch is in
sequences. `search`: seconds to find the best plan. `with reasons`: also ten best plans, the front, and five
plans with other memory, links, batch and times. MFU counts all scores of attention, of which a causal kernel
computes half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model to train on a cluster."""

    name: str
    network: Network
    cluster: str
    batch: int
    seq: int


def gpt(name: str, layers: int, hidden: int, heads: int, seq: int = 2048, vocabulary: int = 51200) -> Network:
    """Return a GPT with these sizes."""
    sizes = {
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "n_positions": seq,
        "vocab_size": vocabulary,
    }
    return from_config(name, {"model_type": "gpt2", **sizes})


def long_llama() -> Network:
    """Return Llama 3 8B with 128k positions."""
    sizes = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    }
    return from_config("llama-8b-128k", {"model_type": "llama", **sizes})


def cases() -> tuple[Case, ...]:
    """Return the models and their clusters."""
    gpt3 = gpt("gpt-175b", 96, 12288, 96)
    return (
        Case(name="7B", network=network("llama-2-7b"), cluster="8 x h100-sxm", batch=256, seq=4096),
        Case(name="70B", network=network("llama-3-70b"), cluster="64 x h100-sxm", batch=512, seq=4096),
        Case(name="175B", network=gpt3, cluster="1024 x a100-80-sxm", batch=1536, seq=2048),
        Case(
            name="530B",
            network=gpt("gpt-530b", 105, 20480, 128),
            cluster="2240 x a100-80-sxm",
            batch=2240,
            seq=2048,
        ),
        Case(name="1.3B", network=network("gpt3-xl"), cluster="8 x l4", batch=64, seq=2048),
        Case(name="8B, 128k", network=long_llama(), cluster="16 x h100-sxm", batch=16, seq=131072),
        Case(name="175B-512", network=gpt3, cluster="512 x a100-80-sxm", batch=1536, seq=2048),
        Case(
            name="1T",
            network=gpt("gpt-1t", 128, 25600, 160),
            cluster="10000 x h100-sxm",
            batch=10000,
            seq=2048,
        ),
    )


ELSEWHERE = """Weak scaling of Megatron-LM on H100, steps of ZeRO-3, and other published steps are next to
predictions in [training steps](predict/training.md)."""


FITTING = """\
All of these plans ran. The least memory with which a run does not fail decides whether a plan fits: before
memory runs out, PyTorch's allocator gives back what activations have freed, so that these and the f32
gradients of the optimizer's step do not count both. Rows below, in GB, are the plans that exceed the limit
of 79.0 (93 % of 85.0 usable) by what nvidia-smi shows on a device with room, which decided before. Plans
that are predicted not to fit now exceed the margin of 7 % only. No constant is fitted to these runs, but
that medians of simulated stages decide was chosen with them in view: they are no independent test. The
source does not state the optimizer, nor whether its states are divided: its configurations have no such
value, and the update that it profiles is of all parameters, so that they are taken as whole. Divided ones
(ZeRO-1) would need less. The time to give memory back is not predicted."""


def main() -> None:
    """Print the tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of measured steps")
    parser.add_argument("--only", nargs="*", help="names of cases (default: all)")
    options = parser.parse_args()
    print("# Plans of training on clusters\n")
    print("By `python -m benchmarks.plan_cluster`. Times and memory are predicted; no plan was run.\n")
    print(
        "| model | cluster | batch, seq | best plan | step, s | MFU | memory, GB | bubble | exposed comm. | "
        "plans | too large | bounded | simulated | search, s (process) | with reasons, s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    answers = {}
    for case in cases():
        if not options.only or case.name in options.only:
            answers[case.name] = _print_case(case)
    print(f"\n{NOTE}")
    for name, answer in answers.items():
        _print_reasons(name, answer)
    if options.data.is_dir():
        print("\n## Choice among measured plans (vTrain, full recomputation, no overlap)\n")
        print_measured(options.data)
        print(f"\n{ELSEWHERE}")


def _print_case(case: Case) -> ClusterAnswer:
    job = TrainingJob(network=case.network, batch=case.batch, seq=case.seq)
    machine = TrainingCluster.parse(case.cluster)
    start = time.process_time()
    ClusterSearch(job, machine).run(1, front=False)
    search_s = time.process_time() - start
    start = time.process_time()
    answer = plan_training(job, machine)
    all_s = time.process_time() - start
    best, proof = answer.best, answer.result.proof
    priced = best or answer.result.least_memory
    step = priced.step
    verdict = "" if best else f" (does not fit: {answer.missing_bytes / 1e9:.1f} GB missing)"
    print(
        f"| {case.name} | {case.cluster} | {case.batch}, {case.seq} | {plan_text(priced.plan)}{verdict} | "
        f"{step.time_us / 1e6:.2f} | {priced.mfu:.1%} | {priced.memory.needed / 1e9:.1f} | "
        f"{step.bubble_us / step.time_us:.1%} | {step.communication_us / step.time_us:.1%} | {proof.plans} | "
        f"{proof.too_large} | {proof.bounded_by_passes + proof.bounded_by_step} | {proof.simulated} | "
        f"{search_s:.1f} | {all_s:.1f} |",
        flush=True,
    )
    return answer


def _print_reasons(name: str, answer: ClusterAnswer) -> None:
    if answer.best is None:
        return
    print(f"\n## {name}\n")
    for gain in answer.gains:
        if gain.plan is None or gain.speedup is None:
            continue
        changed = gain.plan.plan.differences(answer.best.plan) or "the same plan"
        print(f"- twice the {gain.resource}: {gain.speedup:.3f} times the sequences per second, {changed}")
    for sensitivity in answer.sensitivity:
        changed = sensitivity.plan.differences(answer.best.plan) or "the same choice"
        print(f"- {sensitivity.slower} 10 % slower: {changed}; regret {sensitivity.regret:.2%}")
    front = answer.result.front_outline
    points = ", ".join(
        f"{priced.step.time_us / 1e6:.2f} s in {priced.memory.needed / 1e9:.0f} GB" for priced in front
    )
    print(f"- front of time and memory: {points}")


def plan_text(plan: ClusterPlan) -> str:
    """Return a plan in a few characters, with what is switched on."""
    text = f"t{plan.tensor} c{plan.context} p{plan.pipeline} d{plan.data} v{plan.chunks} b{plan.microbatch}"
    storage = {"states": plan.states, "parameters": plan.parameters, "activations": plan.activations}
    extra = {
        f"e{plan.expert}": plan.expert > 1,
        f"experts shared by {plan.expert_tensor}": plan.expert_tensor > 1,
        f"ends as {plan.embedding_layers} + {plan.head_layers} layers": plan.head_layers > 0,
        plan.schedule: plan.splits_backward,
        f"recompute {plan.recompute} {plan.recompute_layers or ''}".rstrip(): plan.recompute != "none",
        "gathered keys": plan.context_gather,
        "sequence parallel": plan.sequence_parallel,
        "flash": plan.flash,
        f"sharded {plan.sharding}": plan.sharding != "none",
        **{f"{state} on {location}": location != "device" for state, location in storage.items()},
    }
    return ", ".join([text, *(name for name, on in extra.items() if on)])


# ------------------------------------------------------------------------------------- measured plans


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _measured_plan(row: dict[str, str], nodes: int) -> ClusterPlan:
    return ClusterPlan(
        nodes=nodes,
        tensor=int(row["tp"]),
        pipeline=int(row["pp"]),
        data=int(row["dp"]),
        chunks=1,
        microbatch=int(row["micro_batch"]),
        recompute=row["recompute"],  # type: ignore[arg-type]
        sequence_parallel=False,
        flash=False,
        sharding="none",
    )


def _job(row: dict[str, str]) -> TrainingJob:
    sizes = [int(row[name]) for name in ("layers", "hidden", "heads", "seq", "vocab")]
    return TrainingJob(
        network=gpt(row["model"], *sizes),
        batch=int(row["global_batch"]),
        seq=int(row["seq"]),
        dtype="f16",
        flash=False,
        gradient_overlap=False,
        tensor_overlap=False,
    )


def measured_plans(folder: Path) -> Iterator[tuple[dict[str, str], float, PricedPlan]]:
    """Yield the row, the measured step in seconds, and the prediction of each measured plan.

    Args:
        folder: Folder of measured steps.
    """
    searches: dict[str, ClusterSearch] = {}
    for row in _rows(folder / "vtrain_multi.csv"):
        if row["model"] not in searches:
            machine = TrainingCluster.parse(f"{row['gpus']} x a100-80-sxm, nvlink3, 12.5:2.7")
            searches[row["model"]] = ClusterSearch(_job(row), machine)
        search = searches[row["model"]]
        plan = _measured_plan(row, search.machine.links.nodes)
        yield row, float(row["measured_s"]), search.priced(plan)


def print_measured(folder: Path) -> None:
    """Print the regret of choosing the predicted best among the measured plans of a model."""
    groups: dict[tuple[str, str], list[tuple[float, PricedPlan]]] = defaultdict(list)
    for row, measured_s, priced in measured_plans(folder):
        groups[f"{row['params_b']}B", row["gpus"]].append((measured_s, priced))
    print(
        "| model | GPUs | plans | predicted best | measured best | regret | mean regret of a random choice | "
        "Spearman | predicted not to fit | tight | above the limit by nvidia-smi with room |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for (model, gpus), entries in groups.items():
        measured = np.array([measured_s for measured_s, _ in entries])
        listed = [priced for _, priced in entries]
        predicted = np.array([priced.step.time_us / 1e6 for priced in listed])
        chosen, best = int(predicted.argmin()), int(measured.argmin())
        print(
            f"| {model} | {gpus} | {len(listed)} | {_parallel(listed[chosen].plan)} | "
            f"{_parallel(listed[best].plan)} | "
            f"{measured[chosen] / measured[best] - 1:.1%} | {measured.mean() / measured[best] - 1:.1%} | "
            f"{_spearman(predicted, measured)} | {sum(not priced.fits for priced in listed)} | "
            f"{sum(priced.verdict.name == 'tight' for priced in listed)} | "
            f"{sum(priced.memory.total > priced.limit_bytes for priced in listed)} |"
        )
    print(f"\n{FITTING}\n")
    print(
        "| model | plan | parameters, gradients, states | activations and working | step | fragmentation | "
        "nvidia-smi with room | needed | probability | verdict |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for (model, _), entries in groups.items():
        for _, priced in entries:
            if priced.memory.total > priced.limit_bytes:
                print(f"| {model} | {_parallel(priced.plan)} | {_memory_cells(priced)} |")


def _memory_cells(priced: PricedPlan) -> str:
    """Return the parts of a plan's memory in GB, and whether it fits."""
    memory, verdict = priced.memory, priced.verdict
    sizes = (
        memory.parameters + memory.gradients + memory.optimizer,
        memory.activations + memory.working,
        memory.step,
        memory.fragmentation,
        memory.total,
        memory.needed,
    )
    figures = " | ".join(f"{size / 1e9:.1f}" for size in sizes)
    return f"{figures} | {verdict.probability:.0%} | {verdict.name}"


def _parallel(plan: ClusterPlan) -> str:
    return f"t{plan.tensor} p{plan.pipeline} d{plan.data} b{plan.microbatch}"


def _spearman(left: np.ndarray, right: np.ndarray) -> str:
    """Return the rank correlation; ties do not occur."""
    if len(left) < 3:
        return "-"
    ranks = [values.argsort().argsort() for values in (left, right)]
    return f"{np.corrcoef(*ranks)[0, 1]:.3f}"


if __name__ == "__main__":
    main()
