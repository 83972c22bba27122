"""Cluster plans with host memory and NVMe, and times of sharded copies next to published ones.

    python -m benchmarks.plan_storage > benchmarks/results/plan_storage.md

The bandwidth of updates in host memory is fitted to two published times, and nothing else to a published
figure. Seconds of the search are those of the process on one core.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.plan_cluster import gpt, plan_text
from tunebench import device as devices
from tunebench.forecast.network import predict_network
from tunebench.training.cluster import ClusterPlan, ClusterSearch, PricedPlan, TrainingCluster, TrainingJob
from tunebench.training.cluster.machine import HOST_UPDATE_GB_S
from tunebench.training.cluster.storage import ADD_BYTES, StorageLayout, StorageTimes
from tunebench.training.steps.step import Parallelism, predict_step
from tunebench.workloads.networks import Network, NetworkRun, from_config, network

H100 = "16 x h100-sxm"
V100 = devices.find("v100-sxm2")
STORED = "host 2TB 400, nvme 30TB 25/12"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageCase:
    """A model to train with storage."""

    name: str
    network: Network
    cluster: str
    batch: int
    seq: int = 2048


def cases() -> tuple[StorageCase, ...]:
    """Return the models and their clusters."""
    large = gpt("gpt-1t", 128, 25600, 160)
    small = network("llama-2-7b")
    return (
        StorageCase(name="1T", network=large, cluster=f"{H100}, {STORED}", batch=512),
        StorageCase(name="1T", network=large, cluster=f"{H100}, {STORED}", batch=4096),
        StorageCase(name="1T", network=large, cluster=f"{H100}, host 2TB 400, nvme 30TB 50/40", batch=512),
        StorageCase(name="1T", network=large, cluster=f"{H100}, host 10TB 400", batch=512),
        StorageCase(name="1T", network=large, cluster=f"{H100}, host 2TB 400", batch=512),
        StorageCase(name="1T", network=large, cluster=f"{H100}, host 2TB 400, nvme 6TB 25/12", batch=512),
        StorageCase(name="1T", network=large, cluster=H100, batch=512),
        StorageCase(name="175B", network=network("gpt3-175b"), cluster=f"8 x h100-sxm, {STORED}", batch=512),
        StorageCase(name="7B", network=small, cluster="1 x l4, 24GB, host 256GB 150", batch=64),
        StorageCase(name="7B", network=small, cluster="1 x l4, 24GB, host 32GB 80, nvme 2TB 6/4", batch=64),
        StorageCase(name="7B", network=small, cluster="1 x l4, 24GB", batch=64),
        StorageCase(name="1T", network=large, cluster=f"512 x h100-sxm, {STORED}", batch=1536),
        StorageCase(name="1T", network=large, cluster=f"10000 x h100-sxm, {STORED}", batch=10000),
    )


def main() -> None:
    """Print the tables as Markdown."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print("# Cluster plans with host memory and NVMe, and sharded copies\n")
    print(
        "By `python -m benchmarks.plan_storage`, with seconds of a busy machine. Everything but the "
        "published figures is predicted; no plan was run.\n"
    )
    _print_cases()
    _print_updates()
    _print_update_designs()
    _print_sharding(_print_offloading())
    _print_without_offloading()
    _print_fsdp()


def _print_cases() -> None:
    print("## Plans\n")
    print(
        "`host` and `nvme` of a cluster are sizes and GB/s of each node (NVMe: read/write). Memory: of a "
        "device, then host memory and NVMe of a node. t, c, p, d: tensor, context, pipeline and data "
        "parallelism; v: stages of a device; b: sequences in a micro-batch. 1T is a GPT with 128 layers of "
        "width 25600, whose parameters, gradients and states are 16 TB. Times with full sharding are "
        "optimistic, see below: a plan without it may be faster than the 1T plan on 512 GPUs.\n"
    )
    print(
        "| model | cluster | batch, seq | best plan | step, s | MFU | kernels | optimizer | exposed "
        "storage | "
        "exposed comm. | GB of device, host, NVMe | plans | too large | simulated | search, s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for case in cases():
        job = TrainingJob(network=case.network, batch=case.batch, seq=case.seq)
        machine = TrainingCluster.parse(case.cluster)
        start = time.process_time()
        result = ClusterSearch(job, machine).run(1, front=False)
        seconds = time.process_time() - start
        best = result.best[0] if result.best else result.least_memory
        shown = _figures(best) if best.fits else "| | | | | |"
        print(
            f"| {case.name} | {case.cluster} | {case.batch}, {case.seq} | {plan_text(best.plan)}"
            f"{'' if best.fits else _missing(best, machine)} | {shown} | {_memory(best, machine)} | "
            f"{result.proof.plans} | {result.proof.too_large} | {result.proof.simulated} | {seconds:.1f} |",
            flush=True,
        )


def _figures(priced: PricedPlan) -> str:
    step = priced.step
    parts = (step.compute_us, step.optimizer_us, step.storage_us, step.communication_us)
    shares = " | ".join(f"{us / step.time_us:.1%}" for us in parts)
    return f"{step.time_us / 1e6:.1f} | {priced.mfu:.1%} | {shares}"


def _memory(priced: PricedPlan, machine: TrainingCluster) -> str:
    count = machine.links.devices_per_node
    sizes = (priced.memory.needed, count * priced.memory.host, count * priced.memory.nvme)
    return ", ".join(f"{size / 1e9:.0f}" for size in sizes)


def _missing(priced: PricedPlan, machine: TrainingCluster) -> str:
    count, size = machine.links.devices_per_node, priced.memory
    lacks = {
        "GB of each device": size.needed - machine.limit_bytes,
        "GB of host memory of each node": count * size.host - machine.host_bytes,
        "GB of NVMe of each node": count * size.nvme - machine.nvme_bytes,
    }
    texts = [f"{size / 1e9:.0f} {storage}" for storage, size in lacks.items() if size > 0]
    return f": **nothing fits; the least that is missing: {', '.join(texts)}**"


# -------------------------------------------------------------------------------------- published figures


UPDATES = (
    ("DeepSpeed, pull request 735: GPT-2, host not stated", "fitted", 11.6, 1, 1, 8.2, None),
    ("DeepSpeed, `blogs/zenflow-corebinding`: Qwen2.5-1.5B, 2 x EPYC 7742", "fitted", 1.54, 2, 1, 1.125, 410),
    ("DeepSpeed, issue 6695: Llama 1.2B, host not stated", "left out", 1.2, 1, 1, 1.5, None),
    ("the same, 0.3B", "left out", 0.3, 1, 1, 0.31, None),
    ("gist chenyaofo/d4cd6a20: LLaMA-7B, ZeRO-3, 2 x Xeon 8358", "left out", 6.74, 8, 4, 16.8, 410),
    ("the same, ZeRO-2", "left out", 6.74, 8, 8, 20.1, 410),
    ("ISEEKYAN/Megatron-LM, issue 188: half of 35B, host not stated", "left out", 17.5, 8, 1, 15.5, None),
)
"""Source, whether it was fitted, 1e9 parameters of a node, its devices, micro-batches, seconds of an update
or those that states in host memory add to a step, and GB/s of the host by its datasheet: 16 channels of
DDR4-3200."""

UPDATE_BYTES = 28
"""Bytes that an update reads and writes per parameter."""


def _print_updates() -> None:
    """Print published times of updates in host memory beside predictions."""
    print("\n## Published updates in host memory\n")
    print(
        "Seconds of an update, or those that a step takes longer than with states on the devices: "
        "1365 and 240 ms (blog); 64 sequences at 2.05 and 4.45, and at 1.81 and 4.19 a second (gist). "
        "*By bandwidth*: at that of the host memory, 300 GB/s. Copies of parameters to the devices "
        "over PCI Express 4 are included, sums of gradients of 4 and 8 micro-batches (gist) are not.\n\n"
        "The rate of 40 GB/s is fitted to two rows. A rate that follows from the bandwidth of the "
        "host was tried and is not used: the two hosts that are stated have the same bandwidth, of "
        "which published updates reach 9 % and 2 to 3 %, so that a share fitted to the first predicts "
        "the second as far off as the constant does. Updates in programs are not bound by memory. "
        "Known to matter is how processors are given to ranks: binding cores to ranks makes steps on "
        "the first host 1.16 times as fast (the blog), and eight ranks that share two processors "
        "update 10 times as slowly as one (issue 188). Other sources do not state it. "
        "`host_update_gb_s` in the file of a cluster is the rate of a host where it was measured.\n"
    )
    print(
        "| source | | parameters, 1e9 | devices | published, s | predicted, s | published / predicted | "
        "by bandwidth, s | share of the host's bandwidth reached |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for source, use, billions, count, _, published, host_gb_s in UPDATES:
        machine = TrainingCluster.parse(f"{count} x a100-80-sxm, host 1TB 300")
        layout = StorageLayout(
            pipeline=1,
            copies=count,
            sharding="optimizer",
            states="host",
            parameters="device",
            activations="device",
        )
        share = [int(billions * 1e9 / count)]
        seconds = [
            StorageTimes(host).update_us(share, layout) / 1e6
            for host in (machine, replace(machine, host_update_gb_s=300.0))
        ]
        reached = f"{UPDATE_BYTES * billions / published / host_gb_s:.0%}" if host_gb_s else ""
        print(
            f"| {source} | {use} | {billions} | {count} | {published} | {seconds[0]:.2f} | "
            f"{published / seconds[0]:.1f} | {seconds[1]:.2f} | {reached} |"
        )


def update_errors() -> dict[str, dict[str, float]]:
    """Return the mean error of each source by design, each source predicted by what the others say.

    Errors are magnitudes of the logarithm of published over predicted seconds.
    """
    sources: dict[str, list[tuple[float, int, float, float]]] = {}
    for source, _, billions, count, microbatches, published_s, _ in UPDATES:
        name = source if not source.startswith("the same") else list(sources)[-1]
        nbytes, summed = UPDATE_BYTES * billions, ADD_BYTES * billions * (microbatches - 1)
        sources.setdefault(name, []).append((nbytes, count, published_s, summed))

    def errors(
        counts_sums: bool, rate: Callable[[list[tuple[float, float]], int], float]
    ) -> dict[str, float]:
        """Return the error of each source. `rate` has the size and log of the rate of each other source."""
        by_source = {}
        for left_out, rows in sources.items():
            rates = [
                (
                    math.log(other_rows[0][1]),
                    statistics.fmean(
                        math.log((nbytes + counts_sums * summed) / seconds)
                        for nbytes, _, seconds, summed in other_rows
                    ),
                )
                for name, other_rows in sources.items()
                if name != left_out
            ]
            by_source[left_out] = statistics.fmean(
                abs(math.log(seconds * rate(rates, count) / (nbytes + counts_sums * summed)))
                for nbytes, count, seconds, summed in rows
            )
        return by_source

    def mean(rates: list[tuple[float, float]], count: int) -> float:
        return math.exp(statistics.fmean(log_rate for _, log_rate in rates))

    def by_ranks(rates: list[tuple[float, float]], count: int) -> float:
        slope, intercept = statistics.linear_regression(*zip(*rates, strict=True))
        return math.exp(intercept + slope * math.log(count))

    return {
        "one rate, of two sources": errors(False, lambda rates, count: HOST_UPDATE_GB_S),
        "one rate, of all other sources": errors(False, mean),
        "rate by the number of ranks of a node": errors(False, by_ranks),
        "one rate, of two sources, with sums that wait": errors(True, lambda rates, count: HOST_UPDATE_GB_S),
        "one rate, of all other sources, with sums that wait": errors(True, mean),
    }


def _print_update_designs() -> None:
    """Print how far each source is off by the design of the rate."""
    print(
        "\n### Designs of the rate\n\n"
        "Published over predicted seconds, or the reverse if that is larger, by source, each predicted by "
        "the others (the first design: fitted to the first two sources). *Sums that wait*: processors add "
        "gradients of the micro-batches of the gist at the rate of updates, while nothing else runs. "
        "DeepSpeed adds them on the device between two copies that do not block "
        "(`async_accumulate_grad_in_cpu_via_gpu` of `zero/stage_1_and_2.py`): the last two designs are "
        "better by an assumption that its program contradicts, and are not used. Of the others, the first "
        "has the smallest mean and the largest worst error. No stated property of the hosts sets them "
        "apart.\n"
    )
    errors = update_errors()
    names = [source.split(":")[0] for source in next(iter(errors.values()))]
    print(f"| design | {' | '.join(names)} | mean | worst |\n|---|{'---|' * (len(names) + 2)}")
    for design, by_source in errors.items():
        off = list(by_source.values())
        cells = " | ".join(f"{math.exp(error):.2f}" for error in (*off, statistics.fmean(off), max(off)))
        print(f"| {design} | {cells} |")


def _print_offloading() -> float:
    """Print the two figures that the abstracts of ZeRO-Offload and ZeRO-Infinity state.

    Returns:
        Seconds that storage adds to a step of the last row: the update, and what passes wait for.
    """
    print("\n## Published TFLOPS with offloading on V100\n")
    print(
        "Published: abstracts of arXiv 2101.06840 (ZeRO-Offload) and arXiv 2104.07857 (ZeRO-Infinity: "
        "over 25 "
        "petaflops on 512 V100). Batch, sequences of 1024 tokens, and the host (one GPU: 1.5 TB at 100 "
        "GB/s; DGX-2: "
        "1.5 TB at 200 GB/s, NVMe 28 TB at 25/25 GB/s, 4 GPUs on a link) are assumed. Whether published "
        "FLOPs count "
        "recomputation is not stated, so both are shown, as tuned and as typical programs of "
        "Megatron-DeepSpeed of 2022 run. A DGX-2 has eight adapters of 100 Gb/s for 16 GPUs (datasheet).\n"
    )
    print(
        "| model | GPUs | plan | published TFLOPS per GPU | predicted, tuned | with recomputation | "
        "predicted, typical | with recomputation |"
    )
    print("|---|---|---|---|---|---|---|---|")
    small = gpt("gpt-10b", 50, 4096, 32, 1024)
    large = gpt("gpt-1t", 128, 25600, 160, 1024)
    single_gpu = TrainingCluster.parse("1 x v100-sxm2, 32GB, host 1.5TB 100")
    many = TrainingCluster.parse(
        "512 x v100-sxm2, 16 a node, 32GB, nvlink2, net-50, host 1.5TB 200, nvme 28TB 25/25"
    )
    many = replace(many, devices_per_host_link=4)
    offload = {"states": "host", "parameters": "device", "recompute": "full"}
    infinity = {"sharding": "full", "states": "nvme", "parameters": "host", "tensor": "4"}
    for name, net, batch, machine, fixed, published in (
        ("10B", small, 8, single_gpu, offload, "40"),
        ("10B", small, 64, single_gpu, offload, "40"),
        ("1T", large, 2560, many, infinity, "over 49"),
    ):
        job = TrainingJob(network=net, batch=batch, seq=1024, dtype="f16", flash=False)
        search = ClusterSearch(job, machine, fixed=fixed).run(1, front=False)
        best = search.best[0] if search.best else search.least_memory
        typical = ClusterSearch(replace(job, stack="megatron@2022", tuning="typical"), machine)
        figures = "".join(
            f" {tflops:.0f} | {tflops * 4 / 3:.0f} |"
            for priced in (best, typical.priced(best.plan))
            for tflops in (job.model_flops / priced.step.time_us / 1e6 / best.plan.devices,)
        )
        verdict = "" if best.fits else _missing(best, machine)
        print(
            f"| {name} | {machine.devices} | batch {batch}, {plan_text(best.plan)}{verdict} | {published} |"
            f"{figures}",
            flush=True,
        )
    return (best.step.optimizer_us + best.step.storage_us) / 1e6


def _print_sharding(storage_s: float) -> None:
    """Print steps of 1T with full sharding alone, for each way of gathering parameters.

    Args:
        storage_s: Seconds that storage adds to a step.
    """
    print(
        "\n### The same step with full sharding alone\n\n"
        "DeepSpeed gathered parameters by lists, each matrix while nothing else runs, until pull requests "
        "1188 and 1453, after these papers: steps of ZeRO-3 in "
        "[sc21_table2.csv](predict/training.md#sc21_table2csv-zero-3-of-deepspeed-in-2021) show it. TFLOPS "
        "with recomputation; published: over 49. Nothing is fitted; states are on the devices, without the "
        f"update in host memory, but for the last two columns, which add the {storage_s:.1f} s that storage "
        "adds to the step of the plan above. Sequences in a micro-batch are assumed.\n"
    )
    print(
        "| sequences in a micro-batch | gathered a layer ahead: tuned | typical | by lists: tuned "
        "| typical | by lists, with storage: tuned | typical |\n|---|---|---|---|---|---|---|"
    )
    network = gpt("gpt-1t", 128, 25600, 160, 1024)
    links = TrainingCluster.parse("512 x v100-sxm2, 16 a node, 32GB, nvlink2, net-50").links
    flops = TrainingJob(network=network, batch=2560, seq=1024, dtype="f16", flash=False).model_flops * 4 / 3
    run = NetworkRun(
        batch=2560, seq=1024, mode="train", dtype="f16", optimizer="adamw", stack="megatron", recompute="full"
    )
    parallelism = Parallelism(data=128, tensor=4, sharding="full", tensor_overlap=False)
    for count in (4, 1):
        ways = (
            replace(parallelism, microbatches=count, gathering=gathering) for gathering in ("ahead", "lists")
        )
        seconds = [
            predict_step(network, V100, replace(run, stack=stack), links, way).time_us / 1e6
            for way in ways
            for stack in ("megatron", "megatron@2022")
        ]
        seconds += [time_s + storage_s for time_s in seconds[2:]]
        figures = " | ".join(f"{flops / time_s / 1e12 / 512:.0f}" for time_s in seconds)
        print(f"| {2560 // 128 // count} | {figures} |")


def _llama(name: str, layers: int, ffn: int, heads_k: int) -> Network:
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": heads_k,
        "intermediate_size": ffn,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }
    return from_config(name, {"model_type": "llama", **sizes})


WITHOUT_OFFLOADING = {
    "of the paper of 2019": 1.288 * 62.4 / 39,
    "1.0, DGX-2H, whose V100 have 450 W": 1.288,
}
"""Seconds of a step of GPT-2 with 1.2B parameters on one V100, by version of Megatron-LM: 1,288 ms with 62.4
TFLOPS, and 39 TFLOPS before (nv-adlr.github.io/MegatronLMV1)."""


def _print_without_offloading() -> None:
    """Print steps on V100 without storage, which divide the errors above into two parts."""
    print(
        "\n### V100 without offloading\n\n"
        "GPT-2 of 40 layers of width 1536 (arXiv 1909.08053), 8 sequences of 1024 tokens, with "
        "recomputation: 1,288 ms at 62.4 TFLOPS, and 39 TFLOPS before (nv-adlr.github.io/MegatronLMV1). So "
        "these FLOPs, 80 TFLOP in a step, do count recomputation: there are 66 without. Nothing is fitted. "
        "The version of the paper is predicted 1.2 times too fast as a typical program.\n"
    )
    print("| Megatron-LM | published step, s | predicted, tuned | predicted, typical |\n|---|---|---|---|")
    net = gpt("gpt-1.2b", 40, 1536, 16, 1024)
    sizes = NetworkRun(batch=8, seq=1024, mode="train", dtype="f16", optimizer="adamw", recompute="full")
    tuned, typical = (
        predict_network(net, V100, replace(sizes, stack="megatron@2022", tuning=tuning)).time_us / 1e6
        for tuning in ("tuned", "typical")
    )
    for version, seconds in WITHOUT_OFFLOADING.items():
        print(f"| {version} | {seconds:.2f} | {tuned:.2f} | {typical:.2f} |")


def _print_fsdp() -> None:
    """Print published throughputs of PyTorch FSDP beside predictions."""
    print("\n## Published throughput of PyTorch FSDP on A100 (2024)\n")
    print(
        "Sources: `docs/performance.md` of pytorch/torchtitan (64 GPUs; the network is not stated, 25 "
        "GB/s per GPU "
        "is assumed) and the README of foundation-model-stack/fms-fsdp (128 GPUs; 400 Gb/s a node). The "
        "sizes of 34B "
        "are those of Code Llama, assumed. Its kernels are PyTorch's, those of the prediction "
        "Megatron-LM's.\n"
    )
    print("| model | GPUs | batch per GPU, seq | recompute | tokens/s per GPU | predicted | time ratio |")
    print("|---|---|---|---|---|---|---|")
    titan, ibm = "64 x a100-80-sxm", "128 x a100-80-sxm, nvlink3, 6.25"
    large = _llama("llama-2-70b", 80, 28672, 8)
    for name, net, seq, batch, recompute, cluster, published in (
        ("Llama 2 13B", network("llama-2-13b"), 4096, 2, "none", titan, 2162),
        ("Llama 2 70B", large, 4096, 2, "full", titan, 353),
        ("Llama 3 70B", network("llama-3-70b"), 8192, 1, "full", titan, 331),
        ("34B", _llama("llama-34b", 48, 22016, 8), 4096, 8, "full", ibm, 772),
        ("Llama 2 70B", large, 4096, 6, "full", ibm, 380),
    ):
        machine = TrainingCluster.parse(cluster)
        job = TrainingJob(network=net, batch=batch * machine.devices, seq=seq)
        priced = ClusterSearch(job, machine).priced(_sharded(machine, batch, recompute, True))
        predicted = batch * seq / (priced.step.time_us / 1e6)
        print(
            f"| {name} | {machine.devices} | {batch}, {seq} | {recompute} | {published} | {predicted:.0f} | "
            f"{published / predicted:.2f} |",
            flush=True,
        )


def _sharded(machine: TrainingCluster, batch: int, recompute: str, flash: bool) -> ClusterPlan:
    return ClusterPlan(
        nodes=machine.links.nodes,
        tensor=1,
        pipeline=1,
        data=machine.devices,
        chunks=1,
        microbatch=batch,
        recompute=recompute,  # type: ignore[arg-type]
        sequence_parallel=False,
        flash=flash,
        sharding="full",
    )


if __name__ == "__main__":
    main()
