"""Output of predicted models: a JSON object, or a report with the time of each part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tunebench.cli._output import duration, plain, table

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.cli._model import ModelRequest
    from tunebench.forecast.network import NetworkPrediction, OperationTime
    from tunebench.training.cluster.device_memory import DeviceMemory
    from tunebench.training.steps.step import StepPrediction

__all__ = ["describe_model", "render_model"]


def describe_model(model: ModelRequest, found: NetworkPrediction | StepPrediction) -> dict[str, Any]:
    """Return a prediction as a JSON-serialisable dictionary."""
    from tunebench.forecast.network import NetworkPrediction

    run = found.run
    data: dict[str, Any] = {
        "model": found.network,
        "device": found.device.key,
        "devices": model.devices,
        **_fields(run, "mode", "batch", "seq", "dtype", "stack", "recompute", "optimizer"),
        "fused": run.compiled,
        **_fields(found, "time_us", "low_us", "high_us"),
        f"{model.unit}_per_s": model.items / found.time_us * 1e6,
        "least_bytes": model.min_memory_bytes(found),
        "memory_bytes": found.device.memory_bytes or None,
        "memory": [_memory(each, found.device.memory_bytes) for each in model.memory(found)],
    }
    if isinstance(found, NetworkPrediction):
        return {
            **data,
            **_fields(found, "bound_us", "host_us", "device_us", "launches"),
            "parts": [{**plain(line), "limited_by": _limit(found, line.part)} for line in found.parts()],
            "phases": [plain(line) for line in found.phases()],
            "basis": _bases(found),
            "operations": [_operation(each) for each in found.operations],
        }
    return {
        **data,
        **_us(found, "compute", "communication", "bubble"),
        "division": plain(found.parallelism),
        "links": {"inside": found.cluster.inside.name, "between": found.cluster.between.name},
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
            for stage in found.stages
        ],
    }


def _memory(each: DeviceMemory, limit_bytes: int) -> dict[str, Any]:
    """Return the memory of a rank by kind, and how much is missing."""
    missing = max(0, each.total - limit_bytes) if limit_bytes else None
    return {"rank": each.rank, **each.kinds, "total": each.total, "missing": missing}


def _fields(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _us(value: object, *names: str) -> dict[str, float]:
    """Return the expected times of some time ranges of an object."""
    return {f"{name}_us": getattr(value, name).us for name in names}


def _operation(each: OperationTime) -> dict[str, Any]:
    return {
        "workload": str(each.operation.workload),
        **_fields(each.operation, "count", "part", "phase"),
        **_fields(each, "time_us", "bound_us"),
        "limited_by": each.alone.binding,
    }


def _limit(found: NetworkPrediction, part: str) -> str:
    """Return the limiting resource of most of the time of a part."""
    times: dict[str, float] = {}
    for each in found.operations:
        if each.operation.part == part:
            times[each.alone.binding] = times.get(each.alone.binding, 0.0) + each.time_us
    return max(times, key=times.__getitem__)


def _bases(found: NetworkPrediction) -> dict[str, float]:
    """Return the share of the time by basis of the prediction."""
    times: dict[str, float] = {}
    for each in found.operations:
        times[each.alone.basis] = times.get(each.alone.basis, 0.0) + each.time_us
    return {basis: us / found.device_us for basis, us in times.items()}


def render_model(model: ModelRequest, found: NetworkPrediction | StepPrediction, to: Console) -> None:
    """Print a prediction as text."""
    from tunebench.forecast.network import NetworkPrediction

    run = found.run
    what = f"{run.batch} x {run.seq} tokens" if run.seq else f"a batch of {run.batch}"
    step = "a training step" if run.trains else "a forward pass"
    stack = "" if run.stack == "eager" else f", {run.stack}"
    on = f"{model.devices} x {found.device.name}" if model.devices > 1 else found.device.name
    to.print(f"{found.network} on {on}: {step} of {what} in {run.dtype}{stack}", soft_wrap=True)
    low, high = duration(found.low_us), duration(found.high_us)
    to.print(f"  time        {duration(found.time_us)} (90 % interval {low} to {high})")
    to.print(f"  throughput  {model.items / found.time_us * 1e6:,.0f} {model.unit} per second")
    if isinstance(found, NetworkPrediction):
        _render_one(found, to)
    else:
        _render_several(found, to)
    _render_memory(model.memory(found), found.device.memory_bytes, to)


def _render_memory(ranks: Sequence[DeviceMemory], limit_bytes: int, to: Console) -> None:
    """Print the memory of each rank by kind, with a verdict."""
    from tunebench.training.memory import size_text

    if not ranks:
        return
    kinds = [name for name in ranks[0].kinds if any(each.kinds[name] for each in ranks)]
    rows = (
        (
            each.rank,
            *(size_text(each.kinds[name]) for name in kinds),
            size_text(each.total),
            _verdict(each.total, limit_bytes),
        )
        for each in ranks
    )
    columns = (">rank", *(f">{name}" for name in kinds), ">memory", "verdict")
    to.print(table(*columns, rows=rows))


def _verdict(total: int, limit_bytes: int) -> str:
    from tunebench.training.memory import size_text

    if not limit_bytes:
        return "memory of the device unknown"
    if total <= limit_bytes:
        return f"fits, {size_text(limit_bytes - total)} free"
    return f"does not fit, {size_text(total - limit_bytes)} missing"


def _render_one(found: NetworkPrediction, to: Console) -> None:
    to.print(f"  bound       {duration(found.bound_us)} (lower bound)")
    waits = ", longer than the GPU needs to run them" if found.waits_for_host else ""
    to.print(f"  host        {duration(found.host_us)} to launch {found.launches} kernels{waits}")
    if len(found.phases()) > 1:
        to.print("  phases      " + ", ".join(f"{line.part} {line.share:.0%}" for line in found.phases()))
    to.print("  basis       " + ", ".join(f"{name} {share:.0%}" for name, share in _bases(found).items()))
    to.print(_parts(found))


def _parts(found: NetworkPrediction) -> Any:
    rows = (
        (
            *(line.part, line.launches, duration(line.time_us), f"{line.share:.1%}"),
            *(duration(line.bound_us), _limit(found, line.part)),
        )
        for line in found.parts()
    )
    return table("part", ">kernels", ">time", ">share", ">lower bound", "limited by", rows=rows)


def _render_several(found: StepPrediction, to: Console) -> None:
    division = found.parallelism
    experts = f"experts among {division.expert}, " if division.expert > 1 else ""
    to.print(
        f"  division    {division.data} x data, {division.tensor} x tensor, {experts}"
        f"{division.pipeline} stages, {division.microbatches} micro-batches; "
        f"{found.cluster.nodes} node(s) of "
        f"{found.cluster.devices_per_node}, {found.cluster.inside.name} inside"
    )
    shares = (
        ("kernels", found.compute),
        ("exposed communication", found.communication),
        ("pipeline bubble", found.bubble),
    )
    rows = ((name, duration(span.us), f"{span.us / found.time_us:.1%}") for name, span in shares)
    to.print(table("share of the step", ">time", ">share", rows=rows))
    to.print(table(*_STAGE, rows=_stages(found)))


_STAGE = (">stage", "layers", ">forward", ">backward", ">optimizer", ">all-reduce", ">gradients", ">send")


def _stages(found: StepPrediction) -> Iterator[tuple[object, ...]]:
    for index, stage in enumerate(found.stages):
        sums = stage.sums_forward + stage.sums_backward
        spans = (stage.forward, stage.backward, stage.optimizer, sums, stage.gradients, stage.send)
        yield (index, f"{stage.layers[0]} to {stage.layers[1] - 1}", *(duration(span.us) for span in spans))
