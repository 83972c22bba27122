"""Predicted memory of training steps against published peaks, and fragmentation of simulated requests.

    python -m benchmarks.predict_memory [--data FOLDER] [--before FILE.csv] > results/predict/memory.md
    python -m benchmarks.predict_memory --frameworks
    python -m benchmarks.predict_memory --fragmentation

The peaks are what nvidia-smi showed for GPT models on A100 with Megatron-DeepSpeed (`bigscience_grid.csv`,
FOLDER/README.md). No constant is fitted to them. FILE has an earlier prediction of each row, `id,gib`.

The second command compares memory that other frameworks report (`published_memory.toml`).

The third command simulates the requests of pipeline stages in PyTorch's allocator, and prints how much it
reserves and does not use, as a share of activations, and the least memory with which no request fails: the
sources of `FRAGMENTATION` and `RETAINED` in `tunebench.training.cluster.device_memory`.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from benchmarks.plan_cluster import gpt
from benchmarks.predict_published import published_network, published_rows
from benchmarks.predict_training import DATA
from tunebench import device as devices
from tunebench.training.cluster import ClusterPlan, DeviceMemory, TrainingJob
from tunebench.training.cluster.device_memory import MemoryPricer
from tunebench.training.cluster.memory_verdict import MemoryVerdict, memory_verdict
from tunebench.training.memory.allocator import Allocate, AllocatorUse, Release, allocator_use
from tunebench.workloads.networks.network_run import Recompute

GIB = 2**30
FILE = "bigscience_grid.csv"
FRAMEWORK_FILE = Path(__file__).with_name("published_memory.toml")


# -- published peaks -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakRow:
    """A published run and its predicted memory.

    Attributes:
        name: Name of the run.
        plan: How it was divided.
        peak_gib: Memory that nvidia-smi showed; infinite if the run ran out of it, None if it is not
            published.
        memory: Predicted memory of the fullest device.
        verdict: Whether it is predicted to fit.
    """

    name: str
    plan: ClusterPlan
    peak_gib: float | None
    memory: DeviceMemory
    verdict: MemoryVerdict

    @property
    def ran_out(self) -> bool:
        """Whether the run ran out of memory."""
        return self.peak_gib == math.inf

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None without a published peak."""
        if self.peak_gib is None or self.ran_out:
            return None
        return self.memory.total / GIB / self.peak_gib - 1


def peak_rows(folder: Path) -> list[PeakRow]:
    """Return the rows of the file of published peaks.

    Args:
        folder: Folder with the file.
    """
    with (folder / FILE).open(newline="", encoding="utf-8") as file:
        return [_peak_row(row) for row in csv.DictReader(file)]


def _peak_row(row: dict[str, str]) -> PeakRow:
    names = (
        "layers",
        "hidden",
        "heads",
        "seq",
        "vocab",
        "gpus",
        "tp",
        "pp",
        "dp",
        "micro_batch",
        "global_batch",
    )
    number = {name: int(row[name]) for name in names}
    network = gpt(
        row["id"],
        number["layers"],
        number["hidden"],
        number["heads"],
        number["seq"],
        vocabulary=number["vocab"],
    )
    wide = row["f32_gradients"] == "1"
    job = TrainingJob(
        network=network,
        batch=number["global_batch"],
        seq=number["seq"],
        dtype="bf16" if wide else "f16",
        wide_gradients=wide,
        framework="deepspeed",
    )
    plan = ClusterPlan(
        nodes=number["gpus"] // 8,
        tensor=number["tp"],
        pipeline=number["pp"],
        data=number["dp"],
        chunks=1,
        microbatch=number["micro_batch"],
        recompute=row["recompute"],  # type: ignore[arg-type]
        sequence_parallel=False,
        flash=False,
        sharding="optimizer",
    )
    peak = math.inf if row["peak_gib"] == "OOM" else float(row["peak_gib"]) if row["peak_gib"] else None
    memory = MemoryPricer(job).of(plan)
    usable = devices.find("a100-80-sxm").usable_memory_bytes
    return PeakRow(
        name=row["id"],
        plan=plan,
        peak_gib=peak,
        memory=memory,
        verdict=memory_verdict(memory.total, usable, job.framework),
    )


def print_peaks(listed: list[PeakRow], before: dict[str, float]) -> None:
    """Print the predicted memory of each row with its error, and the errors of all.

    Args:
        listed: The rows.
        before: Earlier predictions in GiB by name; may be empty.
    """
    measured = [row for row in listed if row.error is not None]
    errors = [row.error for row in measured if row.error is not None]
    inside = [row.verdict.low <= row.peak_gib * GIB <= row.verdict.high for row in measured if row.peak_gib]
    spread = math.sqrt(fmean(math.log1p(error) ** 2 for error in errors))
    _header("", "published peaks", "mean absolute error", "bias", "worst", "in the 90 % interval")
    if before:
        old = [before[row.name] / row.peak_gib - 1 for row in measured if row.peak_gib]
        print(f"| before | {_errors(old)} | |")
    print(f"| now | {_errors(errors)} | {fmean(inside):.0%} |")
    print(f"\nRoot mean square of the logarithm of measured over predicted memory: {spread:.3f}.\n")
    verdicts = {
        group: [row.verdict.name for row in listed if row.ran_out == (group == "ran out of memory")]
        for group in ("ran out of memory", "ran")
    }
    for group, names in verdicts.items():
        counts = ", ".join(f"{names.count(name)} {name}" for name in ("fits", "tight", "does not fit"))
        print(f"Runs that {group}: {counts}.\n")
    columns = [
        "run",
        "tensor",
        "pipeline",
        "data",
        "micro-batch",
        "nvidia-smi, GiB",
        "before",
        "now",
        "error",
    ]
    _header(*columns, "reserved", "allocated", "verdict", "probability")
    for row in listed:
        print(_peak_line(row, before))


def _peak_line(row: PeakRow, before: dict[str, float]) -> str:
    peak = "out of memory" if row.ran_out else "" if row.peak_gib is None else f"{row.peak_gib:.0f}"
    cells = (
        row.name,
        *(row.plan.tensor, row.plan.pipeline, row.plan.data, row.plan.microbatch),
        peak,
        f"{before[row.name]:.1f}" if row.name in before else "",
        f"{row.memory.total / GIB:.1f}",
        "" if row.error is None else f"{row.error:+.1%}",
        *(f"{size / GIB:.1f}" for size in (row.memory.reserved, row.memory.allocated)),
        row.verdict.name,
        f"{row.verdict.probability:.0%}",
    )
    return f"| {' | '.join(map(str, cells))} |"


# -- memory that frameworks report ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedMemory:
    """A step whose memory its framework reported, and the predicted one.

    Attributes:
        source: Set of the row.
        about: Model, devices and division, as text.
        figure: What was reported, reserved or allocated memory.
        measured_gib: Reported memory of the fullest device.
        memory: Predicted memory of the fullest device.
    """

    source: str
    about: str
    figure: str
    measured_gib: float
    memory: DeviceMemory

    @property
    def predicted_gib(self) -> float:
        """The predicted figure."""
        return float(getattr(self.memory, self.figure)) / GIB

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_gib / self.measured_gib - 1


def reported_rows() -> list[ReportedMemory]:
    """Return the rows of memory that frameworks reported, with predictions."""
    data = tomllib.loads(FRAMEWORK_FILE.read_text(encoding="utf-8"))
    return [_reported_row(row, data) for dataset in data["set"] for row in published_rows(dataset)]


def _reported_row(row: dict[str, Any], data: dict[str, Any]) -> ReportedMemory:
    tensor, pipeline, context, chunks = (row.get(name, 1) for name in "tpcv")
    copies = row["gpus"] // (tensor * pipeline * context)
    microbatches = pipeline * chunks if pipeline > 1 else 1
    job = TrainingJob(
        network=published_network(row["model"], row["seq"], data),
        batch=row["batch"] * copies,
        seq=row["seq"],
        wide_gradients=row["framework"] == "torchtitan",
        fused_loss=row.get("fused_loss", False),
        framework=row["framework"],
    )
    plan = ClusterPlan(
        nodes=max(1, row["gpus"] // 8),
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        context_gather=context > 1,
        data=copies,
        chunks=chunks,
        microbatch=row["batch"] // microbatches,
        recompute=row["recompute"],
        sequence_parallel=tensor > 1,
        flash=True,
        sharding="none" if row["gpus"] == 1 else "optimizer" if pipeline > 1 else "full",
    )
    memory = MemoryPricer(job).of(plan)
    if row.get("bf16_states"):
        memory = _in_16_bits(memory)
    degrees = "".join(f" {name}{row[name]}" for name in "tpcv" if row.get(name, 1) > 1)
    return ReportedMemory(
        source=row["name"],
        about=f"{row['model']} on {row['gpus']}{degrees}, {row['batch']} x {row['seq']}, {row['about']}, "
        f"recomputation {row['recompute']}",
        figure=row["figure"],
        measured_gib=row["measured"],
        memory=memory,
    )


def _in_16_bits(memory: DeviceMemory) -> DeviceMemory:
    """Return the memory with moments of AdamW in 16 bits and no f32 parameters: 4 bytes in place of 12."""
    return replace(memory, optimizer=memory.optimizer // 3)


def print_frameworks(rows: list[ReportedMemory], before: dict[str, float]) -> None:
    """Print the errors of each source, and of each row.

    Args:
        rows: The rows.
        before: Earlier predictions in GiB by text of the row; may be empty.
    """
    _header("source", "figure", "rows", "mean absolute error", "bias", "worst", "before")
    for source in dict.fromkeys(row.source for row in rows):
        listed = [row for row in rows if row.source == source]
        old = [before[row.about] / row.measured_gib - 1 for row in listed if row.about in before]
        cells = f"{source} | {listed[0].figure} | {_errors([row.error for row in listed])}"
        print(f"| {cells} | {fmean(map(abs, old)):.1%} |" if old else f"| {cells} | |")
    print()
    _header("step", "measured, GiB", "before", "now", "error", "allocated", "reserved", "nvidia-smi")
    for row in rows:
        figures = (row.memory.allocated, row.memory.reserved, row.memory.total)
        old_text = f"{before[row.about]:.1f}" if row.about in before else ""
        now = f"{row.predicted_gib:.1f} | {row.error:+.1%}"
        cells = f"{row.about} | {row.measured_gib:.1f} | {old_text} | {now}"
        print(f"| {cells} | {' | '.join(f'{size / GIB:.1f}' for size in figures)} |")


def _header(*columns: str) -> None:
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")


def _errors(errors: list[float]) -> str:
    worst = max(errors, key=abs)
    return f"{len(errors)} | {fmean(map(abs, errors)):.1%} | {fmean(errors):+.1%} | {worst:+.1%}"


# -- simulated requests of a stage ---------------------------------------------------------------------------


@dataclass(kw_only=True)
class StageRequests:
    """Requests for memory of a pipeline stage of a GPT model in 1F1B, in the order of eager PyTorch.

    Attributes:
        hidden: Width of a layer.
        heads: Attention heads.
        seq: Tokens of a sequence.
        microbatch: Sequences in a micro-batch.
        tensor: Tensor-parallel size.
        layers: Layers of the stage.
        in_flight: Micro-batches in flight.
        vocabulary: Rows of the embedding, which the stage has; 0 for none.
        shards: Devices that divide the states of the optimizer.
        recompute: Activation recomputation: none, selective or full.
        flash: Whether attention keeps no scores.
        contiguous: Whether gradients are sums in a buffer that exists from the start.
        copies: Whether these are in 16 bits, and the step copies each gradient to f32 and makes the moments
            when it runs for the first time (Megatron-LM); else sums are in f32, and moments exist from the
            start.
        bucket_bytes: Bucket of the step of the optimizer, behind which it converts the gradients of its shard
            (DeepSpeed); 0 for neither.
    """

    hidden: int
    heads: int
    seq: int = 2048
    microbatch: int
    tensor: int
    layers: int
    in_flight: int
    vocabulary: int = 51200
    shards: int = 8
    recompute: Recompute = "full"
    flash: bool = False
    contiguous: bool = False
    copies: bool = False
    bucket_bytes: int = 0
    _events: list[Allocate | Release] = field(default_factory=list)
    _gradients: dict[tuple[int, str], int] = field(default_factory=dict)
    _buffers: Iterator[int] = field(default_factory=itertools.count)

    def use(self, steps: int = 3) -> AllocatorUse:
        """Return the memory that the requests of some steps take.

        Args:
            steps: Number of steps; later ones start with the free blocks of those before.
        """
        return allocator_use(self.requests(steps))

    def requests(self, steps: int = 3) -> list[Allocate | Release]:
        """Return the requests of some steps."""
        self._events.clear()
        self._take(2 * self.parameters)
        if self.contiguous:
            self._take((2 if self.copies else 4) * self.parameters)
        for _ in range(1 if self.copies else 3):
            self._wide_shard()
        for step in range(steps):
            self._step()
            if self.copies:
                gradients = self._wide_shard()
                if step == 0:
                    self._wide_shard()
                    self._wide_shard()
                self._free(*gradients)
        return self._events

    def least_bytes(self) -> int:
        """Return the least memory with which no request fails, within 0.5 %."""
        requests, use = self.requests(), self.use()
        fails, fits = use.allocated_bytes - 1, use.reserved_bytes
        while fits - fails > fails // 200:
            middle = (fails + fits) // 2
            if allocator_use(requests, capacity_bytes=middle).fits:
                fits = middle
            else:
                fails = middle
        return fits

    def _wide_shard(self) -> list[int | None]:
        """Take 4 bytes for each parameter of the shard, matrix by matrix if the step copies them."""
        sizes = [self.parameters]
        if self.copies:
            sizes = [*self.layers * [*self.matrices.values()], self.table]
        return [self._take(4 * size // self.shards) for size in sizes]

    @property
    def matrices(self) -> dict[str, int]:
        """Elements of the matrices of a layer."""
        square = self.hidden * self.hidden // self.tensor
        return {"qkv": 3 * square, "out": square, "up": 4 * square, "down": 4 * square}

    @property
    def table(self) -> int:
        """Elements of the embedding."""
        return self.vocabulary * self.hidden // self.tensor

    @property
    def parameters(self) -> int:
        """Parameters of the stage."""
        return self.layers * sum(self.matrices.values()) + self.table

    @property
    def kept_bytes(self) -> int:
        """Bytes of parameters, gradients and states."""
        sums = 4 if self.contiguous and not self.copies else 2
        return (2 + sums) * self.parameters + 12 * self.parameters // self.shards

    @property
    def step_bytes(self) -> int:
        """Bytes of the tensors that only the step of the optimizer has, by the formula of the predictor."""
        update = 6 * self.parameters // self.shards
        return self.bucket_bytes and self.bucket_bytes + (update if update > self.bucket_bytes else 0)

    def _take(self, nbytes: int) -> int | None:
        if not nbytes:
            return None
        buffer = next(self._buffers)
        self._events.append(Allocate(buffer, nbytes))
        return buffer

    def _free(self, *buffers: int | None) -> None:
        self._events += [Release(buffer) for buffer in buffers if buffer is not None]

    def _add_gradient(self, layer: int, name: str, elements: int) -> None:
        """Allocate a gradient of weights, and free it again if there is a sum to add it to."""
        if self.contiguous or not elements:
            return
        buffer = self._take(2 * elements)
        assert buffer is not None
        if (layer, name) in self._gradients:
            self._free(buffer)
        else:
            self._gradients[layer, name] = buffer

    def _step(self) -> None:
        count, live = 2 * self.in_flight + 3, list[tuple[list[int | None], list[list[int | None]]]]()
        for _ in range(self.in_flight - 1):
            live.append(self._forward())
        for _ in range(count - self.in_flight + 1):
            live.append(self._forward())
            self._backward(*live.pop(0))
        for _ in range(self.in_flight - 1):
            self._backward(*live.pop(0))
        sums = [*self._gradients.values()]
        self._gradients.clear()
        if self.bucket_bytes:
            self._free(self._take(self.bucket_bytes))
            flat, wide = (self._take(size * self.parameters // self.shards) for size in (2, 4))
            self._free(flat, *sums, wide, self._take(self.bucket_bytes))
        else:
            self._free(*sums)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Bytes: a tensor of the width of a layer, its part for each device, and scores of attention."""
        whole = 2 * self.microbatch * self.seq * self.hidden
        scores = 2 * self.microbatch * self.heads // self.tensor * self.seq**2
        return whole, whole // self.tensor, 0 if self.flash else scores

    def _forward(self) -> tuple[list[int | None], list[list[int | None]]]:
        """Run a micro-batch forward; return the inputs of layers and the output, and what layers keep."""
        inputs: list[int | None] = [self._take(self._sizes[0])]
        kept = []
        for _ in range(self.layers):
            output, saved = self._layer(keeps=self.recompute != "full")
            inputs.append(output)
            kept.append(saved)
        return inputs, kept

    def _scores(self, *, keeps: bool) -> list[int | None]:
        """Compute the scores of attention; return the softmax, its dropout and the mask if they are kept."""
        scores = self._sizes[2]
        empty, product = self._take(scores), self._take(scores)
        self._free(empty)
        softmax = self._take(scores)
        self._free(product)
        saved = [softmax, self._take(scores), self._take(scores // 2)]
        if not keeps:
            self._free(*saved)
            return []
        return saved

    def _layer(self, *, keeps: bool) -> tuple[int | None, list[int | None]]:
        """Run a layer forward; return its output and what it keeps."""
        whole, part, _ = self._sizes
        saved: list[int | None] = []

        def last_use(*buffers: int | None) -> None:
            if keeps:
                saved.extend(buffers)
            else:
                self._free(*buffers)

        normal = self._take(whole)
        qkv = self._take(3 * part)
        last_use(normal)
        scores = self._scores(keeps=keeps and self.recompute != "selective")
        context = self._take(part)
        last_use(qkv)
        projected = self._take(whole)
        last_use(context)
        residual = self._take(whole)
        self._free(projected)
        normal = self._take(whole)
        inner = self._take(4 * part)
        last_use(normal)
        activated = self._take(4 * part)
        last_use(inner)
        projected = self._take(whole)
        last_use(activated)
        output = self._take(whole)
        self._free(projected)
        last_use(residual)
        return output, saved + scores

    def _backward(self, inputs: list[int | None], kept: list[list[int | None]]) -> None:
        gradient = self._take(self._sizes[0])
        output = inputs.pop()
        for layer in reversed(range(self.layers)):
            saved = kept[layer]
            if self.recompute == "full":
                again, saved = self._layer(keeps=True)
                self._free(again)
            gradient = self._layer_backward(layer, gradient, saved)
            if layer:
                self._free(inputs[layer])
        self._free(inputs[0], output)
        self._add_gradient(-1, "table", self.table)
        self._free(gradient)

    def _layer_backward(self, layer: int, gradient: int | None, saved: list[int | None]) -> int | None:
        """Run a layer backward; return the gradient of its input."""
        whole, part, size = self._sizes
        first, qkv, context, second, inner, activated, residual, *scores = saved
        matrices = self.matrices
        d_activated = self._take(4 * part)
        self._add_gradient(layer, "down", matrices["down"])
        self._free(activated)
        d_inner = self._take(4 * part)
        self._free(d_activated, inner)
        d_normal = self._take(whole)
        self._add_gradient(layer, "up", matrices["up"])
        self._free(d_inner, second)
        d_residual = self._take(whole)
        self._free(d_normal, residual, gradient)
        d_context = self._take(part)
        self._add_gradient(layer, "out", matrices["out"])
        self._free(context)
        softmax, dropped, mask = scores or self._scores(keeps=True)
        d_dropped, d_values = self._take(size), self._take(part)
        self._free(d_context, dropped)
        d_softmax = self._take(size)
        self._free(d_dropped, mask)
        d_scores = self._take(size)
        self._free(d_softmax, softmax)
        d_queries, d_keys = self._take(part), self._take(part)
        self._free(d_scores)
        d_qkv = self._take(3 * part)
        self._free(d_queries, d_keys, d_values, qkv)
        d_normal = self._take(whole)
        self._add_gradient(layer, "qkv", matrices["qkv"])
        self._free(d_qkv, first)
        d_input = self._take(whole)
        self._free(d_normal, d_residual)
        return d_input


LEAST_ACTIVATIONS = 2**30
"""Stages with fewer bytes of activations are left out: their share is no share of activations."""


def fragmentation_shares(
    recompute: Recompute, *, flash: bool, contiguous: bool, few: bool = False
) -> list[float]:
    """Return the share of activations that the allocator reserves and does not use, for a family of stages.

    Args:
        recompute: Activation recomputation.
        flash: Whether attention keeps no scores.
        contiguous: Whether gradients are sums in a buffer; else each is a tensor that the step frees.
        few: Whether to simulate few stages.
    """
    shares = []
    for stage in _stages(7 if few else 1, recompute=recompute, flash=flash, contiguous=contiguous):
        use = stage.use()
        activations = use.allocated_bytes - stage.kept_bytes
        if activations > LEAST_ACTIVATIONS:
            shares.append((use.reserved_bytes - use.allocated_bytes) / activations)
    return shares


def retained_shares(recompute: Recompute, *, flash: bool, sharded: bool, few: bool = False) -> list[float]:
    """Return what stages need beside the larger of activations and the step's tensors, as a share of it.

    Gradients are sums in 16 bits in a contiguous buffer, and the memory is the least that does not fail.

    Args:
        recompute: Activation recomputation.
        flash: Whether attention keeps no scores.
        sharded: Whether 8 devices divide the states of the optimizer.
        few: Whether to simulate few stages.
    """
    shares = []
    shards = 8 if sharded else 1
    for stage in _stages(
        17 if few else 3, recompute=recompute, flash=flash, contiguous=True, copies=True, shards=shards
    ):
        passes = replace(stage, copies=False)
        activations = passes.use().allocated_bytes - passes.kept_bytes
        if activations > LEAST_ACTIVATIONS:
            most = max(activations, 4 * stage.parameters // shards)
            shares.append((stage.least_bytes() - stage.kept_bytes) / most - 1)
    return shares


def _stages(every: int, **values: Any) -> Iterator[StageRequests]:
    """Yield every so many stages of a family, with these fields."""
    widths = ((4096, 32), (8192, 64), (14336, 112))
    family = itertools.product(widths, (1, 4, 8), (4, 12), (1, 2, 8), (1, 4))
    for (hidden, heads), tensor, layers, in_flight, microbatch in itertools.islice(family, 0, None, every):
        if hidden * layers <= 100_000 * tensor:
            yield StageRequests(
                hidden=hidden,
                heads=heads,
                microbatch=microbatch,
                tensor=tensor,
                layers=layers,
                in_flight=in_flight,
                **values,
            )


def print_fragmentation() -> None:
    """Print the shares of fragmentation of all families, and what stages need when memory is short."""
    _header("recomputation", "flash attention", "gradients", "stages", "median", "10 %", "90 %")
    recomputations: tuple[Recompute, ...] = ("full", "selective", "none")
    for recompute, flash, contiguous in itertools.product(recomputations, (False, True), (False, True)):
        if recompute == "selective" and flash:
            continue
        shares = fragmentation_shares(recompute, flash=flash, contiguous=contiguous)
        deciles = quantiles(shares, n=10)
        print(
            f"| {recompute} | {'yes' if flash else 'no'} | {'contiguous' if contiguous else 'separate'} | "
            f"{len(shares)} | {median(shares):.1%} | {deciles[0]:.1%} | {deciles[-1]:.1%} |"
        )
    print()
    _header("recomputation", "flash attention", "states of the optimizer", "stages", "median", "10 %", "90 %")
    pooled: dict[bool, list[float]] = {False: [], True: []}
    for recompute, flash, sharded in itertools.product(recomputations, (False, True), (False, True)):
        if recompute == "selective" and flash:
            continue
        shares = retained_shares(recompute, flash=flash, sharded=sharded)
        pooled[sharded] += shares
        _print_retained(f"{recompute} | {'yes' if flash else 'no'}", sharded, shares)
    for sharded, shares in pooled.items():
        _print_retained("all | both", sharded, shares)


def _print_retained(family: str, sharded: bool, shares: list[float]) -> None:
    deciles = quantiles(shares, n=10)
    print(
        f"| {family} | {'of 8 devices' if sharded else 'whole'} | {len(shares)} | {median(shares):.1%} | "
        f"{deciles[0]:.1%} | {deciles[-1]:.1%} |",
        flush=True,
    )


def main() -> None:
    """Print the errors of predicted memory, or the shares of fragmentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--frameworks", action="store_true")
    parser.add_argument("--fragmentation", action="store_true")
    options = parser.parse_args()
    if options.fragmentation:
        print_fragmentation()
        return
    before = {}
    if options.before:
        with options.before.open(newline="", encoding="utf-8") as file:
            before = {row["id"]: float(row["gib"]) for row in csv.DictReader(file)}
    if options.frameworks:
        print_frameworks(reported_rows(), before)
        return
    print_peaks(peak_rows(options.data), before)


if __name__ == "__main__":
    main()
