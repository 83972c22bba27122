"""Why a value that `--fix` gives is not possible: the limits of each parameter of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tunebench.space import Space
from tunebench.training.cluster.machine import TrainingCluster
from tunebench.training.cluster.space import (
    LEAST_TOKENS,
    MOST_CHUNKS,
    TrainingJob,
    fixed_values,
    most_head_layers,
    most_microbatch,
    plan_space,
    updates_in_host_memory,
)
from tunebench.training.pipeline.activation import architecture_of

__all__ = ["fixed_space", "refusal"]


def fixed_space(
    job: TrainingJob, machine: TrainingCluster, fixed: Mapping[str, str], *, any_nodes: bool = False
) -> Space:
    """Return the space of plans in which some parameters have one value, or few.

    Args:
        job: The network and its batch.
        machine: The cluster.
        fixed: Value of each fixed parameter as text; ``a|b`` allows two values.
        any_nodes: As in `plan_space`.

    Raises:
        UnknownName: if there is no such parameter.
        InputError: if a parameter does not have this value; the message gives the reasons.
    """
    # Uneven stages beside even ones multiply the plans, so that they are searched where a user asks for them.
    space = plan_space(job, machine, any_nodes=any_nodes, any_chunks="chunks" in fixed)
    return fixed_values(space, fixed, lambda name, value: refusal(job, machine, name, value))


def refusal(job: TrainingJob, machine: TrainingCluster, name: str, value: str) -> str:
    """Return the reasons why a parameter of the plans does not have a value; empty for no known reason.

    Args:
        job: The network and its batch.
        machine: The cluster.
        name: Name of the parameter.
        value: The value as text.
    """
    if name in _OF_TEXT:
        return "; ".join(_OF_TEXT[name](job, machine, value))
    if name in _OF_NUMBER:
        if not value.isdecimal() or int(value) < 1 - (name in _POSSIBLY_NONE):
            return "expected a whole number"
        return "; ".join(_OF_NUMBER[name](job, machine, int(value)))
    return ""


def _undivided(number: int, noun: str, size: int) -> Iterator[str]:
    if number % size:
        yield f"{size} does not divide the {number} {noun}"


def _nodes(job: TrainingJob, machine: TrainingCluster, size: int) -> Iterator[str]:
    nodes = machine.links.nodes
    if nodes % size:
        yield f"it does not divide the number of nodes, {nodes}"
    elif size != nodes:
        yield f"all {nodes} nodes are in use, unless the objective is cost"


def _tensor(job: TrainingJob, machine: TrainingCluster, size: int) -> Iterator[str]:
    yield from _undivided(machine.links.devices_per_node, "devices of a node", size)
    architecture = architecture_of(job.network)
    for noun, number in (
        ("attention heads", architecture.heads),
        ("heads of keys and values", architecture.heads_k),
        ("columns of the feed-forward layer", architecture.ffn),
        ("columns of the shared expert", architecture.shared_ffn),
        ("columns of the dense layers", architecture.dense_ffn),
    ):
        yield from _undivided(number, noun, size)


def _context(job: TrainingJob, machine: TrainingCluster, size: int) -> Iterator[str]:
    yield from _undivided(machine.devices, "devices", size)
    if not job.flash:
        yield "it needs flash attention"
    if architecture_of(job.network).decoder_layers:
        yield "it needs flash attention, which has no input for the bias of relative positions"
    if job.seq % (2 * size):
        yield f"the {job.seq} tokens of a sequence are not {2 * size} equal parts, two for each device"
    if job.seq // size < LEAST_TOKENS:
        yield f"each device needs at least {LEAST_TOKENS} tokens of a sequence, which has {job.seq}"


def _pipeline(job: TrainingJob, machine: TrainingCluster, size: int) -> Iterator[str]:
    yield from _undivided(machine.devices, "devices", size)
    if size > job.network.layers:
        yield f"the network has {job.network.layers} layers"
    if architecture_of(job.network).decoder_layers and size > 1:
        yield "every stage of a decoder also needs the output of the encoder, which no schedule here sends"


def _data(job: TrainingJob, machine: TrainingCluster, size: int) -> Iterator[str]:
    yield from _undivided(machine.devices, "devices", size)
    yield from _undivided(job.batch, "sequences of the batch", size)


def _expert(job: TrainingJob, machine: TrainingCluster, size: int) -> Iterator[str]:
    experts = architecture_of(job.network).experts
    if experts:
        yield from _undivided(experts, "experts", size)
    else:
        yield "the network has no experts"


def _expert_tensor(job: TrainingJob, machine: TrainingCluster, size: int) -> Iterator[str]:
    if architecture_of(job.network).experts:
        yield from _tensor(job, machine, size)
    else:
        yield "the network has no experts"


def _chunks(job: TrainingJob, machine: TrainingCluster, size: int) -> Iterator[str]:
    if size > MOST_CHUNKS:
        yield f"a device has up to {MOST_CHUNKS} stages"
    if size > job.network.layers:
        yield f"the network has {job.network.layers} layers"


def _embedding_layers(job: TrainingJob, machine: TrainingCluster, size: int) -> Iterator[str]:
    if size > 1:
        yield "the embedding counts as up to 1 layer"


def _head_layers(job: TrainingJob, machine: TrainingCluster, size: int) -> Iterator[str]:
    most = most_head_layers(job)
    if size > most:
        yield f"the head has products of about {most} layers"


def _microbatch(job: TrainingJob, machine: TrainingCluster, size: int) -> Iterator[str]:
    yield from _undivided(job.batch, "sequences of the batch", size)
    if size > most_microbatch(job):
        yield f"a micro-batch has up to {most_microbatch(job)} sequences"


def _recompute_layers(job: TrainingJob, machine: TrainingCluster, size: int) -> Iterator[str]:
    if size >= job.network.layers:
        yield f"the network has {job.network.layers} layers; 0 means all of them"
    elif size and architecture_of(job.network).decoder_layers:
        yield "layers of the encoder and the decoder differ; 0 means all of them"


def _recompute(job: TrainingJob, machine: TrainingCluster, value: str) -> Iterator[str]:
    if value == "experts" and not architecture_of(job.network).experts:
        yield "the network has no experts"
    if value == "operators":
        yield "it is for flash attention in layers of llama, with --framework torchtitan"


def _flash(job: TrainingJob, machine: TrainingCluster, value: str) -> Iterator[str]:
    if value == "yes" and not job.flash:
        yield "flash attention is excluded by --no-flash-attention"
    if value == "yes" and architecture_of(job.network).decoder_layers:
        yield "scores have a bias of relative positions, which flash attention has no input for"


def _sharding(job: TrainingJob, machine: TrainingCluster, value: str) -> Iterator[str]:
    if value in ("gradients", "full"):
        yield "it needs --full-sharding, or host memory in the cluster"


def _memory(job: TrainingJob, machine: TrainingCluster, memory: str) -> Iterator[str]:
    if memory != "device" and not updates_in_host_memory(job):
        yield f"processors do not update the parameters with the optimizer {job.optimizer}"
    if memory == "host" and not machine.host_bytes:
        yield "the cluster has no host memory for training: add it, such as 'host 2TB 400'"
    if memory == "nvme" and not machine.nvme_bytes:
        yield "the cluster has no NVMe for training: add it and host memory, such as 'nvme 30TB 25/12'"


_POSSIBLY_NONE = ("recompute_layers", "embedding_layers", "head_layers")
"""Parameters that are 0 or more; all others are 1 or more."""

_OF_NUMBER: dict[str, Callable[[TrainingJob, TrainingCluster, int], Iterator[str]]] = {
    "nodes": _nodes,
    "tensor": _tensor,
    "context": _context,
    "pipeline": _pipeline,
    "data": _data,
    "expert": _expert,
    "expert_tensor": _expert_tensor,
    "chunks": _chunks,
    "microbatch": _microbatch,
    "recompute_layers": _recompute_layers,
    "embedding_layers": _embedding_layers,
    "head_layers": _head_layers,
}
_OF_TEXT: dict[str, Callable[[TrainingJob, TrainingCluster, str], Iterator[str]]] = {
    "recompute": _recompute,
    "flash": _flash,
    "sharding": _sharding,
    "states": _memory,
    "parameters": _memory,
    "activations": _memory,
}
