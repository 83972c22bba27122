"""Balanced memory of pipelines for GPT-3 of 96 and 134 billion parameters on A100, from predicted times.

    python -m benchmarks.plan_pipeline_gpt3 [--out FILE.md]

Published: Kim et al., "BPipe: memory-balanced pipeline parallelism for training large language models", ICML
2023: 1.25 to 2.17 times the speed of Megatron-LM on 48 A100 in six nodes with HDR InfiniBand. Huang et al.,
"Re-evaluating the memory-balanced pipeline parallelism: BPipe", 2024 (arXiv 2401.02088): for GPT-3 96B, 128
sequences and 8 stages, the MFU of a stage rises from 37.8 to 55.2 % between micro-batches of 1 and 2, and
flash attention leaves a negligible gain.

Sizes of the models (96B: 80 layers, width 9984, 104 heads; 134B: 88 layers, width 11264, 88 heads) and a
sequence of 2048 tokens agree with these numbers of parameters; the papers' text could not be read. Their
divisions into stages and their batches, other than the example above, could not be verified: the tables
have several.

The kernels are those of Megatron-LM (stack megatron of `tunebench.workloads.networks`). Its kernel that
scales, masks and normalises scores runs if the number of sequences times heads on a device is a multiple of
4; otherwise PyTorch's separate kernels run in f32 (`FusedScaleMaskSoftmax.is_kernel_available`).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunebench import device
from tunebench.device import Device
from tunebench.training.interconnect.cluster import Cluster, find_link
from tunebench.training.pipeline import (
    ComparedSchedule,
    PredictedStages,
    compare_schedules,
    estimate_microbatches,
    microbatch_speedup,
)
from tunebench.workloads.networks import Network, NetworkRun, from_config
from tunebench.workloads.networks.network_run import Recompute

__all__ = ["CASES", "Case", "gpt3", "outcomes"]

OUT = Path(__file__).parent / "results" / "plan_pipeline" / "gpt3.md"
BATCH, SEQ = 128, 2048
CONTEXT_BYTES = 1 << 30
"""Bytes that the CUDA context and workspaces of libraries are assumed to take."""
STATE_BYTES = 16
"""Bytes per parameter of mixed precision with AdamW."""
HDR = "25:2.7"
"""Network adapter of each GPU: HDR InfiniBand, 200 Gb/s."""
SIZES = (1, 2, 4, 8)


def gpt3(name: str, layers: int, hidden: int, heads: int, vocabulary: int = 51200) -> Network:
    """Return a GPT of a given size; 51,200 words are those of Megatron-LM, padded."""
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": SEQ}
    config = {"model_type": "gpt2", "vocab_size": vocabulary, **sizes}
    return from_config(name, config)


MODELS = {
    "96B": gpt3("gpt3-96b", 80, 9984, 104),
    "134B": gpt3("gpt3-134b", 88, 11264, 88),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How a model is trained.

    Attributes:
        name: What is recomputed, and how attention runs.
        recompute: Activation recomputation in the backward pass.
        sequence_parallel: Whether tokens are divided too.
        flash_attention: Whether attention is one kernel.
    """

    name: str
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    flash_attention: bool = False

    def stages(self, network: Network, ranks: int, tensor: int, size: int, on: Device) -> PredictedStages:
        """Return the stages of a model."""
        cluster = Cluster(
            inside=find_link("nvlink3"),
            between=find_link(HDR),
            devices_per_node=8,
            nodes=-(-ranks * tensor // 8),
        )
        return PredictedStages(
            network=network,
            device=on,
            cluster=cluster,
            ranks=ranks,
            tensor=tensor,
            microbatch=size,
            seq=SEQ,
            dtype="f16",
            state_bytes=STATE_BYTES,
            recompute=self.recompute,
            sequence_parallel=self.sequence_parallel,
            flash_attention=self.flash_attention,
        )


CASES = (
    Case(name="no recomputation"),
    Case(name="selective", recompute="selective"),
    Case(name="selective, sequence parallel", recompute="selective", sequence_parallel=True),
    Case(name="full recomputation", recompute="full"),
    Case(name="flash attention", flash_attention=True),
    Case(name="flash, sequence parallel", flash_attention=True, sequence_parallel=True),
)
DIVISIONS = ((8, 4), (16, 2), (6, 8), (12, 4))
"""Stages and tensor parallelism: 32 GPUs, and 48 with layers divided unevenly."""


def outcomes(
    case: Case, network: Network, ranks: int, tensor: int, on: Device, sizes: Sequence[int] = SIZES
) -> dict[int, tuple[ComparedSchedule, ComparedSchedule | None]]:
    """Return 1F1B without and with balanced memory by the size of micro-batches."""
    pairs = {}
    for size in sizes:
        stages = case.stages(network, ranks, tensor, size, on)
        limit = on.memory_bytes - CONTEXT_BYTES
        compared = compare_schedules(stages, BATCH // size, names=["1f1b"], memory_bytes=limit).schedules
        pairs[size] = (compared[0], compared[1] if len(compared) > 1 else None)
    return pairs


def report(on: Device) -> Iterator[str]:
    """Yield the lines of the report."""
    yield "# GPT-3 with balanced pipeline memory: predicted, next to published figures\n"
    yield "`python -m benchmarks.plan_pipeline_gpt3`. All times are predicted, **none was run on a GPU**.\n"
    for paragraph in (__doc__ or "").strip().split("\n\n")[2:]:
        yield " ".join(paragraph.split("\n")) + "\n"
    yield from _stage_table(on)
    yield from _fit_table(on)
    yield from _schedule_table(on)


def _stage_table(on: Device) -> Iterator[str]:
    """Yield MFU of a stage and the estimate, beside the published ones."""
    yield "## Stage MFU of GPT-3 96B, 8 stages, 128 sequences, on 4 devices per stage (assumed)\n"
    yield "| attention | MFU, micro-batch 1 | 2 | 4 | estimated speedup of 1F1B, 2 over 1 | 4 over 1 |"
    yield "|---|---|---|---|---|---|"
    published = microbatch_speedup(BATCH, 8, 2, 1, 55.2 / 37.8)
    yield f"| published (Huang et al.) | 37.8 % | 55.2 % | | {published:.3f} | |"
    network, ranks, tensor = MODELS["96B"], 8, 4
    for case in (*CASES[:3], *CASES[4:]):
        estimates = estimate_microbatches(
            lambda size, case=case: case.stages(network, ranks, tensor, size, on).costs(range(ranks)),
            BATCH,
            SIZES[:3],
        )
        share = [
            _stage_mfu(network, tensor, ranks, estimate.microbatch, estimate.stage_us, on)
            for estimate in estimates
        ]
        speedups = [f"{estimate.speedup:.3f}" for estimate in estimates[1:]]
        yield f"| {case.name} | {' | '.join(f'{mfu:.1%}' for mfu in share)} | {' | '.join(speedups)} |"
    yield ""


def _stage_mfu(network: Network, tensor: int, ranks: int, size: int, stage_us: float, on: Device) -> float:
    """Return model FLOPs of a stage of equal layers over the peak of its devices."""
    hidden = network.boundary_elements(NetworkRun(batch=1, seq=1, mode="train"))
    flops = 72 * size * SEQ * hidden**2 * (1 + SEQ / (6 * hidden)) * network.layers / ranks
    return flops / tensor / (stage_us * 1e-6 * PEAK_FLOPS)


PEAK_FLOPS = 312e12
"""Dense f16 operations of A100 per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A model and its division, with one kind of recomputation and attention."""

    model: str
    ranks: int
    tensor: int
    case: Case
    found: dict[int, tuple[ComparedSchedule, ComparedSchedule | None]]

    @property
    def plain(self) -> ComparedSchedule | None:
        """The fastest micro-batch that fits without balanced memory."""
        return _best([schedule for schedule, _ in self.found.values()])

    @property
    def both(self) -> ComparedSchedule | None:
        """The fastest micro-batch that fits, with balanced memory or without."""
        return _best([schedule for pair in self.found.values() for schedule in pair if schedule is not None])

    @property
    def gain(self) -> float | None:
        """Speedup by balancing; None if nothing fits without it."""
        return self.plain.step_us / self.both.step_us if self.plain and self.both else None

    def line(self, full: _Row) -> str:
        """Return the row of the table."""
        both, plain = self.both, self.plain
        gain = f"{self.gain:.2f}" if self.gain else "only balanced fits" if both else ""
        over = f"{full.plain.step_us / both.step_us:.2f}" if both and full.plain else ""
        peaks = " / ".join(f"{schedule.peak_bytes / 1e9:.0f}" for schedule, _ in self.found.values())
        balanced = " / ".join(f"{(pair[1] or pair[0]).peak_bytes / 1e9:.0f}" for pair in self.found.values())
        cells = (
            *(self.model, f"{self.ranks} x {self.tensor}", self.case.name, peaks, balanced),
            *(_named(plain, self.found), _named(both, self.found), gain, over),
        )
        return f"| {' | '.join(cells)} |"


def _fit_table(on: Device) -> Iterator[str]:
    """Yield the largest micro-batches that fit, and the gain of balancing."""
    yield f"## 1F1B of {BATCH} sequences on {on.name}\n"
    yield (
        f"Memory of 80 GiB less 1 GiB, {STATE_BYTES} bytes per parameter. Peaks are of micro-batches of "
        "1, 2, 4 and 8. The fastest micro-batch that fits is given with its step, without and with balanced "
        "memory (a balanced schedule is used where it is faster), and their ratio; the last column is the "
        "ratio to full recomputation without balanced memory.\n"
    )
    headings = (
        *("model", "stages x tensor", "attention and recomputation", "peak, GB", "balanced peak, GB"),
        *("best without", "best with", "speedup of balancing", "speedup over full recomputation"),
    )
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * len(headings)}"
    rows = []
    for (name, network), (ranks, tensor) in itertools.product(MODELS.items(), DIVISIONS):
        group = [
            _Row(
                model=name,
                ranks=ranks,
                tensor=tensor,
                case=case,
                found=outcomes(case, network, ranks, tensor, on),
            )
            for case in CASES
        ]
        full = next(row for row in group if row.case.recompute == "full")
        yield from (row.line(full) for row in group)
        rows += group
    yield ""
    yield from _summary(rows)


def _summary(rows: Sequence[_Row]) -> Iterator[str]:
    """Yield when balancing gains."""
    yield "## When balancing gains\n"
    for flash, title in ((False, "Without flash attention"), (True, "With flash attention")):
        mine = [row for row in rows if row.case.flash_attention == flash]
        gains = sorted(row.gain for row in mine if row.gain is not None and row.gain > 1.005)
        only = sum(row.both is not None and row.plain is None for row in mine)
        spread = f" ({', '.join(f'{gain:.2f}' for gain in gains)} times)" if gains else ""
        yield (
            f"- {title}: in {len(gains)} of {len(mine)} rows the step is faster{spread}; in {only} a "
            "step fits only with balanced memory."
        )
    yield (
        "- The gain needs a larger micro-batch that makes stages much faster, here by a fused softmax. 104 "
        "heads on 4 devices (26 each) and 88 on 4 (22 each) do not allow it for one sequence, and allow "
        "it for two. Where the smaller micro-batch has it too (2 devices), or flash attention replaces it, a "
        "larger one gains little, and the longer bubble takes that back."
    )
    yield (
        "- Selective recomputation with sequence parallelism needs so little memory that the larger "
        "micro-batch often fits without balancing."
    )
    yield (
        "- The published 1.25 to 2.17 were measured with batches, divisions and baselines that could not be "
        "verified here; the ratios above are not a reproduction of them."
    )


def _schedule_table(on: Device) -> Iterator[str]:
    """Yield all schedules of one division, without balanced memory and with it."""
    ranks, tensor = 8, 4
    yield "\n## All schedules of GPT-3 96B, 8 x 4, selective recomputation\n"
    yield "Steps with their largest peaks; **bold** if it fits.\n"
    compared = {
        size: compare_schedules(
            CASES[1].stages(MODELS["96B"], ranks, tensor, size, on),
            BATCH // size,
            memory_bytes=on.memory_bytes - CONTEXT_BYTES,
        ).schedules
        for size in SIZES[:3]
    }
    yield f"| schedule | {' | '.join(f'micro-batch {size}' for size in compared)} |"
    yield f"|---|{'---|' * len(compared)}"
    for name in dict.fromkeys(schedule.name for schedules in compared.values() for schedule in schedules):
        cells = []
        for schedules in compared.values():
            schedule = next((schedule for schedule in schedules if schedule.name == name), None)
            text = f"{schedule.step_us / 1e6:.2f} s, {schedule.peak_bytes / 1e9:.0f} GB" if schedule else ""
            cells.append(f"**{text}**" if schedule and schedule.fits else text)
        yield f"| {name} | {' | '.join(cells)} |"


def _best(compared: Sequence[ComparedSchedule]) -> ComparedSchedule | None:
    fitting = [schedule for schedule in compared if schedule.fits]
    return min(fitting, key=lambda schedule: (schedule.step_us, schedule.evictions), default=None)


def _named(
    schedule: ComparedSchedule | None, pairs: dict[int, tuple[ComparedSchedule, ComparedSchedule | None]]
) -> str:
    """Return the micro-batch size of a schedule, and its time."""
    if schedule is None:
        return "none fits"
    size = next(size for size, pair in pairs.items() if schedule in pair)
    balanced = ", balanced" if schedule.evictions else ""
    return f"{size}{balanced}: {schedule.step_us / 1e6:.2f} s"


def main() -> None:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="file to write")
    chosen = parser.parse_args()
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    lines = list(report(device.find("a100-80-sxm")))
    chosen.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
