"""Output of predicted models: a JSON object, or a report with the time of each part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tunebench.cli._output import duration, plain, table

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.cli._model import ModelRequest
    from tunebench.forecast.network import NetworkPrediction, OperationTime
    from tunebench.training.cluster.device_memory import DeviceMemory
    from tunebench.training.cluster.generation import Generation
    from tunebench.training.cluster.memory_verdict import MemoryVerdict
    from tunebench.training.interconnect.cluster import Cluster
    from tunebench.training.steps.step import StepPrediction

__all__ = ["describe_generation", "describe_model", "render_generation", "render_model"]


def describe_generation(model: ModelRequest, generation: Generation) -> dict[str, Any]:
    """Return predicted generation as a JSON-serialisable dictionary."""
    prefill, decode, memory = generation.prefill, generation.decode, generation.memory
    verdict = memory.verdict(prefill.device)
    return {
        "model": prefill.network,
        "device": prefill.device.key,
        "devices": model.devices,
        "prompt": generation.prompt,
        "generated": generation.output,
        **_fields(prefill.run, "batch", "dtype", "stack", "fp8"),
        **_fields(generation, "time_us", "low_us", "high_us"),
        "first_token": _fields(prefill, "time_us", "low_us", "high_us"),
        "token": _fields(decode, "time_us", "low_us", "high_us"),
        "tokens_per_s": generation.tokens / generation.time_us * 1e6,
        "memory": {**plain(memory), "needed": memory.needed},
        "verdict": {"name": verdict.name, **plain(verdict)} if verdict else None,
        "most_sequences": generation.most_sequences,
        "parts": [plain(line) for line in _kernels(decode).parts()],
    }


def render_generation(model: ModelRequest, generation: Generation, to: Console) -> None:
    """Print predicted generation as text."""
    from tunebench.training.memory import size_text

    run, device, memory = generation.prefill.run, generation.prefill.device, generation.memory
    sequences = f"{run.batch} sequence{'s' if run.batch > 1 else ''}"
    on = f"{model.devices} x {device.name}" if model.devices > 1 else device.name
    stack = "" if run.stack == "eager" else f", {run.stack}"
    to.print(
        f"{generation.prefill.network} on {on}: {sequences} of {generation.prompt} tokens, "
        f"{generation.output} generated, in {run.dtype}{stack}",
        soft_wrap=True,
    )
    passes = (("first token", generation.prefill), ("each token", generation.decode), ("all", generation))
    for name, timed in passes:
        interval = f"{duration(timed.low_us)} to {duration(timed.high_us)}"
        to.print(f"  {name:11} {duration(timed.time_us)} (90 % interval {interval})")
    rates = (run.batch / generation.decode.time_us, generation.tokens / generation.time_us)
    to.print(
        "  throughput  {:,.0f} tokens per second, {:,.0f} with the prompts".format(*(1e6 * r for r in rates))
    )
    kinds = ", ".join(f"{name} {size_text(size)}" for name, size in plain(memory).items())
    verdict = memory.verdict(device)
    fits = "memory of the device unknown"
    if verdict is not None:
        fits = f"{verdict.name} into {size_text(verdict.usable)} usable"
        fits += f"; at most {generation.most_sequences} such sequences"
    to.print(f"  memory      {size_text(memory.needed)} per device: {kinds}; {fits}", soft_wrap=True)
    to.print(_parts(_kernels(generation.decode)))


def _kernels(prediction: NetworkPrediction | StepPrediction) -> NetworkPrediction:
    """Return the kernels of a device, without the sums of tensor parallelism."""
    from tunebench.forecast.network import NetworkPrediction

    return prediction if isinstance(prediction, NetworkPrediction) else prediction.stages[0].kernels


def describe_model(model: ModelRequest, prediction: NetworkPrediction | StepPrediction) -> dict[str, Any]:
    """Return a prediction as a JSON-serialisable dictionary."""
    from tunebench.forecast.network import NetworkPrediction

    run = prediction.run
    data: dict[str, Any] = {
        "model": prediction.network,
        "device": prediction.device.key,
        "devices": model.devices,
        **_fields(run, "mode", "batch", "seq", "dtype", "stack", "tuning", "recompute", "optimizer"),
        "fused": run.compiled,
        **_fields(prediction, "time_us", "low_us", "high_us"),
        f"{model.unit}_per_s": model.items / prediction.time_us * 1e6,
        "least_bytes": model.min_memory_bytes(prediction),
        "memory_bytes": prediction.device.memory_bytes or None,
        "usable_bytes": prediction.device.usable_memory_bytes or None,
        "memory": [_memory(memory, model, prediction) for memory in model.memory(prediction)],
        "calibration": _calibration(model, prediction),
    }
    if isinstance(prediction, NetworkPrediction):
        return {
            **data,
            **_fields(prediction, "bound_us", "host_us", "device_us", "software_us", "launches"),
            "parts": [
                {**plain(line), "limited_by": _limit(prediction, line.part)} for line in prediction.parts()
            ],
            "phases": [plain(line) for line in prediction.phases()],
            "basis": _bases(prediction),
            "operations": [_operation(timed) for timed in prediction.operations],
        }
    return {
        **data,
        **_us(prediction, "compute", "communication", "bubble", "software"),
        "division": plain(prediction.parallelism),
        "links": {"inside": prediction.cluster.inside.name, "between": prediction.cluster.between.name},
        "stages": [
            {
                "layers": list(stage.layers),
                "parameters": stage.parameters,
                **_us(stage, "forward", "backward", "optimizer", "gradients"),
                "sums_us": (stage.sums_forward + stage.sums_backward).us,
                "send_us": stage.send.us,
                "send_bytes": stage.send_bytes,
                "parts": [plain(line) for line in stage.kernels.parts()],
            }
            for stage in prediction.stages
        ],
    }


def _calibration(
    model: ModelRequest, prediction: NetworkPrediction | StepPrediction
) -> dict[str, Any] | None:
    """Return what measured steps say; None without them."""
    calibration = model.calibration(prediction)
    if calibration is None:
        return None
    kernels, communication = calibration.factors
    return {
        "kernels": kernels,
        "communication": communication,
        "measured_over_modelled": [step.ratio for step in calibration.steps],
    }


def _memory(
    memory: DeviceMemory, model: ModelRequest, prediction: NetworkPrediction | StepPrediction
) -> dict[str, Any]:
    """Return the memory of a rank by kind, its figures, a verdict, and how much is missing."""
    from tunebench.cli._memory_text import memory_json

    usable = prediction.device.usable_memory_bytes
    missing = max(0, memory.needed - usable) if usable else None
    return {**memory_json(memory, model.verdict(memory, prediction)), "missing": missing}


def _fields(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _us(value: object, *names: str) -> dict[str, float]:
    """Return the expected times of some time ranges of an object."""
    return {f"{name}_us": getattr(value, name).us for name in names}


def _operation(timed: OperationTime) -> dict[str, Any]:
    return {
        "workload": str(timed.operation.workload),
        **_fields(timed.operation, "count", "part", "phase"),
        **_fields(timed, "time_us", "bound_us"),
        "limited_by": timed.alone.binding,
    }


def _limit(prediction: NetworkPrediction, part: str) -> str:
    """Return the limiting resource of most of the time of a part."""
    times: dict[str, float] = {}
    for timed in prediction.operations:
        if timed.operation.part == part:
            times[timed.alone.binding] = times.get(timed.alone.binding, 0.0) + timed.time_us
    return max(times, key=times.__getitem__)


def _bases(prediction: NetworkPrediction) -> dict[str, float]:
    """Return the share of the time by basis of the prediction."""
    times: dict[str, float] = {}
    for timed in prediction.operations:
        times[timed.alone.basis] = times.get(timed.alone.basis, 0.0) + timed.time_us
    return {basis: us / prediction.device_us for basis, us in times.items()}


def render_model(model: ModelRequest, prediction: NetworkPrediction | StepPrediction, to: Console) -> None:
    """Print a prediction as text."""
    from tunebench.forecast.network import NetworkPrediction

    run = prediction.run
    batch_text = f"{run.batch} x {run.seq} tokens" if run.seq else f"a batch of {run.batch}"
    step = "a training step" if run.trains else "a forward pass"
    stack = "" if run.stack == "eager" else f", {run.stack}"
    on = f"{model.devices} x {prediction.device.name}" if model.devices > 1 else prediction.device.name
    to.print(f"{prediction.network} on {on}: {step} of {batch_text} in {run.dtype}{stack}", soft_wrap=True)
    low, high = duration(prediction.low_us), duration(prediction.high_us)
    to.print(f"  time        {duration(prediction.time_us)} (90 % interval {low} to {high})")
    to.print(f"  throughput  {model.items / prediction.time_us * 1e6:,.0f} {model.unit} per second")
    for line in _software_lines(model, prediction):
        to.print(line, soft_wrap=True)
    if isinstance(prediction, NetworkPrediction):
        _render_one(prediction, to)
    else:
        _render_several(prediction, to)
    _render_memory(model, prediction, to)


def _software_lines(model: ModelRequest, prediction: NetworkPrediction | StepPrediction) -> Iterator[str]:
    """Yield how much the software adds, and what measured steps changed."""
    from tunebench.cli._software_text import calibration_text, software_text

    calibration = model.calibration(prediction)
    if calibration is not None:
        yield f"  calibrated  {calibration_text(calibration)}"
    elif prediction.run.efficiency is not None:
        yield f"  software    {software_text(prediction.run.stack, prediction.run.tuning)}"


def _render_memory(model: ModelRequest, prediction: NetworkPrediction | StepPrediction, to: Console) -> None:
    """Print the memory of each rank by kind, with a verdict, and the figures of the fullest one."""
    from tunebench.cli._memory_text import memory_text
    from tunebench.training.memory import size_text

    ranks = model.memory(prediction)
    if not ranks:
        return
    kinds = [name for name in ranks[0].kinds if any(memory.kinds[name] for memory in ranks)]
    returns = any(memory.returned for memory in ranks)
    rows = (
        (
            memory.rank,
            *(size_text(memory.kinds[name]) for name in kinds),
            *((size_text(memory.returned),) if returns else ()),
            size_text(memory.needed),
            _verdict(memory, model.verdict(memory, prediction)),
        )
        for memory in ranks
    )
    given_back = (">given back",) if returns else ()
    columns = (">rank", *(f">{name}" for name in kinds), *given_back, ">memory needed", "verdict")
    to.print(table(*columns, rows=rows))
    fullest = max(ranks, key=lambda memory: memory.needed)
    to.print(memory_text(fullest, model.verdict(fullest, prediction)), soft_wrap=True)


def _verdict(memory: DeviceMemory, verdict: MemoryVerdict | None) -> str:
    from tunebench.training.memory import size_text

    if verdict is None:
        return "memory of the device unknown"
    free = verdict.usable - memory.needed
    return f"{verdict.name}, {size_text(abs(free))} {'free' if free >= 0 else 'missing'}"


def _render_one(prediction: NetworkPrediction, to: Console) -> None:
    to.print(f"  bound       {duration(prediction.bound_us)} (lower bound)")
    waits = ", longer than the GPU needs to run them" if prediction.waits_for_host else ""
    to.print(f"  host        {duration(prediction.host_us)} to launch {prediction.launches} kernels{waits}")
    if len(prediction.phases()) > 1:
        to.print(
            "  phases      " + ", ".join(f"{line.part} {line.share:.0%}" for line in prediction.phases())
        )
    to.print(
        "  basis       " + ", ".join(f"{name} {share:.0%}" for name, share in _bases(prediction).items())
    )
    to.print(_parts(prediction))


def _parts(prediction: NetworkPrediction) -> Any:
    rows = (
        (
            *(line.part, line.launches, duration(line.time_us), f"{line.share:.1%}"),
            *(duration(line.bound_us), _limit(prediction, line.part)),
        )
        for line in prediction.parts()
    )
    return table("part", ">kernels", ">time", ">share", ">lower bound", "limited by", rows=rows)


def _nodes_text(cluster: Cluster) -> str:
    """Return the nodes of a cluster, their devices, and the links."""
    inside = f"{cluster.devices_per_node} by {cluster.inside.name}"
    if cluster.nodes == 1:
        return f"1 node of {inside}"
    return f"{cluster.nodes} nodes of {inside}, {cluster.between.name} between them"


def _render_several(prediction: StepPrediction, to: Console) -> None:
    division = prediction.parallelism
    experts = f"experts among {division.expert}, " if division.expert > 1 else ""
    to.print(
        f"  division    {division.data} x data, {division.tensor} x tensor, {experts}"
        f"{division.pipeline} stages, {division.microbatches} micro-batches; "
        f"{_nodes_text(prediction.cluster)}"
    )
    shares = (
        ("kernels", prediction.compute),
        ("exposed communication", prediction.communication),
        ("pipeline bubble", prediction.bubble),
        ("software", prediction.software),
    )
    rows = ((name, duration(span.us), f"{span.us / prediction.time_us:.1%}") for name, span in shares)
    to.print(table("share of the step", ">time", ">share", rows=rows))
    to.print(table(*_STAGE, rows=_stages(prediction)))


_STAGE = (">stage", "layers", ">forward", ">backward", ">optimizer", ">all-reduce", ">gradients", ">send")


def _stages(prediction: StepPrediction) -> Iterator[tuple[object, ...]]:
    for index, stage in enumerate(prediction.stages):
        sums = stage.sums_forward + stage.sums_backward
        spans = (stage.forward, stage.backward, stage.optimizer, sums, stage.gradients, stage.send)
        first, last = stage.layers
        layers = f"{first} to {last - 1}" if first < last else "none"
        yield (index, layers, *(duration(span.us) for span in spans))
