"""Plans on nodes of different products, of a residual network, and next to published training steps.

    python -m benchmarks.plan_mixed [--data FOLDER] > benchmarks/results/plan_mixed.md

Published steps are public (FOLDER/README.md). Times and memory are predicted; no plan was run.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.plan_cluster import DATA, gpt, plan_text
from tunebench.training.cluster import (
    ClusterSearch,
    CopiesJob,
    MixedCluster,
    PricedMixedPlan,
    PricedPlan,
    TrainingCluster,
    TrainingJob,
    plan_copies,
    plan_mixed,
)
from tunebench.workloads.networks import network

MIXED = (
    ("gpt3-xl", "8 x a100-80-sxm + 8 x h100-sxm, 8 a node, net-200", 256, 2048),
    ("llama-2-7b", "8 x a100-80-sxm + 8 x h100-sxm, 8 a node, net-200", 128, 4096),
    ("llama-2-7b", "32 x a100-80-sxm + 32 x h100-sxm, 8 a node, net-200", 512, 4096),
    ("llama-2-13b", "8 x a100-80-sxm + 8 x h100-sxm, 8 a node, net-100", 128, 4096),
    ("gpt3-6.7b", "8 x l4 + 8 x a100-80-sxm, 8 a node, net-100", 64, 2048),
)

MT_NLG = {280: 60.1, 350: 50.2, 420: 44.4}
"""Seconds of a step of MT-NLG 530B by number of nodes with 8 A100, t8 p35, batch 1920.

Source: Smith et al., "Using DeepSpeed and Megatron to train Megatron-Turing NLG 530B", 2022, section 2.4.
"""

PUBLISHED = ("sc21_table1.csv", "sc21_table2.csv", "korthikanti_table5.csv")


def main() -> None:
    """Print the tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of published steps")
    parser.add_argument(
        "--only", nargs="*", choices=("mixed", "residual", "published"), help="parts to print"
    )
    options = parser.parse_args()
    parts = options.only or ("mixed", "residual", "published")
    print("# Plans on different products, of a residual network, and next to published steps\n")
    print("By `python -m benchmarks.plan_mixed`. Times and memory are predicted; no plan was run.\n")
    if "mixed" in parts:
        _print_mixed()
    if "residual" in parts:
        _print_residual()
    if "published" in parts and options.data.is_dir():
        _print_published(options.data)


def _print_mixed() -> None:
    """Print plans with unequal layers beside equal layers and each product alone."""
    print("## Nodes of different products\n")
    print(
        "t, c, p, d: tensor, context, pipeline and data parallelism; v: stages of a device; b: sequences in "
        "a micro-batch. Time of a step in seconds. `alone`: the best plan on each product alone, in the "
        "order of the cluster. Bound gap: 0, since each best plan is proved optimal for the model of time "
        "and memory. Seconds are those of the process for the best plan, on a machine with other load.\n"
    )
    print(
        "| model | cluster | batch, seq | best plan | layers of stages | step | equal layers | alone | "
        "memory, GB | MFU | plans | bounded | divisions | too large | bounded by stage | by step | "
        "simulated | search, s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for name, cluster, batch, seq in MIXED:
        job, machine = TrainingJob(network=network(name), batch=batch, seq=seq), MixedCluster.parse(cluster)
        start = time.process_time()
        plan_mixed(job, machine, top=1, reasons=False)
        search_s = time.process_time() - start
        answer = plan_mixed(job, machine, top=1)
        best, proof = answer.best[0], answer.proof
        equal = "does not fit" if answer.equal_layers is None else f"{answer.equal_layers.step_us / 1e6:.2f}"
        alone = ", ".join(
            "does not fit" if priced is None else f"{priced.step.time_us / 1e6:.2f}"
            for priced in answer.alone
        )
        memory = ", ".join(f"{size / 1e9:.1f}" for size in best.memory_bytes)
        print(
            f"| {name} | {cluster} | {batch}, {seq} | {plan_text(best.mixed.plan)} | "
            f"{_layers(machine, best)} | "
            f"{best.step_us / 1e6:.2f} | {equal} | {alone} | {memory} | {best.mfu:.1%} | {proof.plans} | "
            f"{proof.bounded} | {proof.divisions} | {proof.too_large} | {proof.bounded_by_layers} | "
            f"{proof.bounded_by_step} | {proof.simulated} | {search_s:.1f} |",
            flush=True,
        )


def _layers(machine: MixedCluster, best: PricedMixedPlan) -> str:
    """Return the product and the layers of each stage."""
    pairs = zip(best.mixed.stage_groups, best.mixed.stage_layers, strict=True)
    return ", ".join(f"{machine.groups[group].device.name} {count}" for group, count in pairs)


def _print_residual() -> None:
    """Print the best micro-batch of ResNet-50."""
    print("\n## ResNet-50 on 4 GPUs, AdamW, data parallelism\n")
    print(
        "| cluster | batch | stack | dtype | micro-batch | step, ms | images/s | memory, GB | "
        "exposed comm. | fit, do not |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for cluster in ("4 x l4", "4 x a100-80-sxm", "4 x h100-sxm"):
        for stack, dtype in (("eager", "f32"), ("eager", "bf16"), ("compiled", "bf16")):
            job = CopiesJob(network=network("resnet50"), batch=1024, dtype=dtype, stack=stack)  # type: ignore[arg-type]
            answer = plan_copies(job, TrainingCluster.parse(cluster))
            best = answer.plans[0]
            print(
                f"| {cluster} | {job.batch} | {stack} | {dtype} | {best.microbatch} | "
                f"{best.step_us / 1e3:.1f} | {best.samples_per_s:.0f} | "
                f"{best.memory_bytes / 1e9:.1f} | {best.communication_us / best.step_us:.1%} | "
                f"{len(answer.plans)}, {answer.too_large} |",
                flush=True,
            )


def _rows(folder: Path) -> Iterator[dict[str, str]]:
    for name in PUBLISHED:
        with (folder / name).open(newline="", encoding="utf-8") as file:
            yield from csv.DictReader(file)
    for nodes, seconds in MT_NLG.items():
        sizes = {"layers": 105, "hidden": 20480, "heads": 128, "seq": 2048, "vocab": 50304}
        plan = {"tp": 8, "pp": 35, "dp": nodes // 35, "micro_batch": 1, "interleave": 1, "seq_parallel": 0}
        values = {**sizes, **plan, "gpus": 8 * nodes, "global_batch": 1920, "measured_s": seconds}
        text = {"id": f"MT-NLG 530B, {nodes} nodes", "model": "530B", "recompute": "full", "schedule": "1f1b"}
        yield {**text, **{name: str(value) for name, value in values.items()}}


def _print_published(folder: Path) -> None:
    """Print published steps beside the prediction of their plan, and the best plans."""
    print("\n## Published steps on A100\n")
    print(
        "SC21: Narayanan et al., 2021, tables 1 and 2, with full recomputation; steps follow from rounded "
        "TFLOP/s. Korthikanti et al., 2022, table 5. MT-NLG: Smith et al., 2022, section 2.4. Interleaving "
        "is not published for table 2: the best one is taken. `then`: the best plan with the software of the "
        "source (no flash attention, no overlap of gradients, no sharded optimizer, and, except in "
        "Korthikanti et al., only full recomputation and no sequence parallelism); `today`: with all. "
        "Batch and sequence are those of the source. Times in seconds.\n"
    )
    print("| step | GPUs | published plan | published | predicted | then | plan | today | plan |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in _rows(folder):
        if row["schedule"] == "zero3":
            continue
        machine = TrainingCluster.parse(f"{row['gpus']} x a100-80-sxm, net-200")
        sizes = [int(row[name]) for name in ("layers", "hidden", "heads", "seq", "vocab")]
        today = TrainingJob(
            network=gpt(row["model"], *sizes),
            batch=int(row["global_batch"]),
            seq=int(row["seq"]),
            dtype="f16",
        )
        then = replace(today, flash=False, gradient_overlap=False, tensor_overlap=row["id"].startswith("kor"))
        measured = row.get("measured_s") or row["step_s_from_tflops"]
        same = _same_plan(then, machine, row)
        old = {"sharding": "none", "schedule": "1f1b", "context_gather": "no"}
        if not row["id"].startswith("kor"):
            old |= {"recompute": "full", "sequence_parallel": "no"}
        bests = [
            ClusterSearch(job, machine, fixed=fixed).run(1, front=False).best
            for job, fixed in ((then, old), (today, {}))
        ]
        cells = " | ".join(
            f"{best[0].step.time_us / 1e6:.2f} | {plan_text(best[0].plan)}" if best else "nothing fits | "
            for best in bests
        )
        print(
            f"| {row['id']} | {row['gpus']} | {plan_text(same.plan)} | {float(measured):.2f} | "
            f"{same.step.time_us / 1e6:.2f} | {cells} |",
            flush=True,
        )


def _same_plan(job: TrainingJob, machine: TrainingCluster, row: dict[str, str]) -> PricedPlan:
    """Return the plan of a row, with the best interleaving if that is not known."""
    fixed = {
        "tensor": row["tp"],
        "pipeline": row["pp"],
        "data": row["dp"],
        "microbatch": row["micro_batch"],
        "recompute": row["recompute"],
        "sequence_parallel": "yes" if row["seq_parallel"] == "1" else "no",
        "sharding": "none",
        "schedule": "1f1b",
        "recompute_layers": "0",
        "context_gather": "no",
    }
    if row["interleave"]:
        fixed["chunks"] = row["interleave"]
    search = ClusterSearch(job, machine, fixed=fixed)
    return min(map(search.priced, search.plans), key=lambda priced: priced.step.time_us)


if __name__ == "__main__":
    main()
