"""Predicted generation of text: a pass over the prompts, then a pass for each further token.

All sequences of a batch begin together and are equally long (static batching). Requests that join later,
prompts in chunks between tokens, speculative tokens and caches shared by prompts are not modelled. Sampling
is left out. Sums of tensor parallelism are those of NCCL, or of the stack `serving`, which has kernels of its
own for short messages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.errors import InputError
from tunebench.forecast.network import NetworkPrediction, predict_network
from tunebench.training.cluster.device_memory import CONTEXT_BYTES, WORKSPACE_BYTES
from tunebench.training.cluster.memory_verdict import MemoryVerdict, memory_verdict
from tunebench.training.interconnect.cluster import Cluster
from tunebench.training.pipeline.activation import architecture_of
from tunebench.training.steps.parallelism import Parallelism
from tunebench.training.steps.step import StepPrediction, predict_step
from tunebench.workloads.networks import Network, NetworkRun
from tunebench.workloads.networks.architecture import Architecture

__all__ = ["Generation", "GenerationMemory", "generation_memory", "predict_generation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationMemory:
    """Memory of each device, in bytes.

    Attributes:
        weights: Parameters.
        cache: Keys and values of all tokens; of a layer with a window, those of the window.
        working: Largest tensors of the pass over the prompts.
        context: Context of CUDA and workspaces of libraries.
    """

    weights: int
    cache: int
    working: int
    context: int = CONTEXT_BYTES + WORKSPACE_BYTES

    @property
    def needed(self) -> int:
        """Sum of all kinds."""
        return self.weights + self.cache + self.working + self.context

    def verdict(self, device: Device) -> MemoryVerdict | None:
        """Return whether the memory fits a device; None if the device's memory is unknown.

        Its interval is a judgement, as for training frameworks without published peaks.
        """
        usable = device.usable_memory_bytes
        return memory_verdict(self.needed, usable, "fsdp") if usable else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Predicted generation of a batch of sequences.

    Attributes:
        output: Tokens that each sequence generates.
        prefill: Pass over the prompts, which also returns the first token.
        decode: Pass of one further token of each sequence, halfway through the output.
        memory: Memory of each device.
        most_sequences: Largest batch of such sequences that fits the device's usable memory; None if that
            is unknown.
    """

    output: int
    prefill: NetworkPrediction | StepPrediction
    decode: NetworkPrediction | StepPrediction
    memory: GenerationMemory
    most_sequences: int | None

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.prefill.run.batch

    @property
    def prompt(self) -> int:
        """Tokens of each prompt."""
        return self.prefill.run.seq

    def _total(self, prefill_us: float, decode_us: float) -> float:
        return prefill_us + (self.output - 1) * decode_us

    @property
    def time_us(self) -> float:
        """Time until all sequences are complete, in microseconds."""
        return self._total(self.prefill.time_us, self.decode.time_us)

    @property
    def low_us(self) -> float:
        """Lower end of the 90 % prediction interval; errors of both passes are taken as equal."""
        return self._total(self.prefill.low_us, self.decode.low_us)

    @property
    def high_us(self) -> float:
        """Upper end of the 90 % prediction interval."""
        return self._total(self.prefill.high_us, self.decode.high_us)

    @property
    def tokens(self) -> int:
        """Tokens that all sequences generate."""
        return self.batch * self.output


def predict_generation(
    network: Network,
    device: Device,
    run: NetworkRun,
    output: int,
    *,
    tensor: int = 1,
    cluster: Cluster | None = None,
) -> Generation:
    """Predict the generation of text by a decoder, on one device or divided by tensor parallelism.

    Args:
        network: A decoder.
        device: One of the devices; it does not have to be present.
        run: How it runs, with `batch` sequences and prompts of `seq` tokens. The stacks `compiled`
            and `serving` with `cuda_graphs` run as serving engines do, `eager` as HuggingFace's `generate`.
        output: Tokens to generate for each sequence, 1 or more.
        tensor: Tensor-parallel size.
        cluster: Devices and links; None for the usual ones of the device.

    Raises:
        InputError: if the network, the device or the division does not support this run.
    """
    if output < 1:
        raise InputError(f"output must be 1 token or more, got {output}")
    longest, tokens = architecture_of(network).longest, run.seq + output - 1
    if longest and tokens > longest:
        raise InputError(
            f"{network.name} has {longest} positions; prompts of {run.seq} tokens and {output} generated "
            f"ones need {tokens}"
        )

    def predict(pass_run: NetworkRun) -> NetworkPrediction | StepPrediction:
        if tensor == 1:
            return predict_network(network, device, pass_run)
        devices = cluster or Cluster.of(device, devices=tensor)
        return predict_step(network, device, pass_run, devices, Parallelism(tensor=tensor))

    halfway = run.seq + (output - 1) // 2
    memory = generation_memory(network, run, output, tensor=tensor)
    sequence_bytes = (memory.cache + memory.working) / run.batch
    free = device.usable_memory_bytes - memory.weights - memory.context
    return Generation(
        output=output,
        prefill=predict(replace(run, cached=0)),
        decode=predict(replace(run, cached=halfway, seq=1)),
        memory=memory,
        most_sequences=max(0, math.floor(free / sequence_bytes)) if device.usable_memory_bytes else None,
    )


def generation_memory(network: Network, run: NetworkRun, output: int, *, tensor: int = 1) -> GenerationMemory:
    """Return the memory of each device that generates text.

    Args:
        network: A decoder.
        run: How it runs, with `batch` sequences and prompts of `seq` tokens.
        output: Tokens to generate for each sequence.
        tensor: Tensor-parallel size.
    """
    architecture, size = architecture_of(network), itemsize(run.dtype)
    tokens = run.seq + output - 1  # the last token is not read again
    windows = architecture.windows or (0,) * architecture.layers
    keys = sum(min(window or tokens, tokens) for window in windows)
    token_bytes = (architecture.inner_k + architecture.inner_v) // tensor * size
    narrow = 0
    if run.fp8 != "none":  # matrices inside the layers have one byte for each parameter
        narrow = (size - 1) * (network.matrix_parameters(tensor) + network.expert_parameters(tensor))
    return GenerationMemory(
        weights=network.parameters(tensor) * size - narrow,
        cache=run.batch * keys * token_bytes,
        working=_working_bytes(architecture, run, tensor),
    )


def _working_bytes(architecture: Architecture, run: NetworkRun, tensor: int) -> int:
    """Return the bytes of the largest tensors that exist together in the pass over the prompts.

    Beside the residual and its normalisation, these are the results of the first products of a feed-forward
    layer with their activation, or queries, keys and values with their result; without one kernel of
    attention also two copies of the scores. Logits are f32.
    """
    size = itemsize(run.dtype)
    ffn = architecture.ffn * max(1, architecture.experts_per_token) + architecture.shared_ffn
    feed_forward = max(ffn, architecture.dense_ffn) * (2 + architecture.gated)
    attention = architecture.inner + architecture.inner_k + architecture.inner_v + architecture.inner_out
    widths = 2 * architecture.hidden + max(feed_forward, attention) // tensor
    one_kernel = run.flash or (run.compiled and run.dtype != "f32")
    scores = 0 if one_kernel else 2 * run.seq * architecture.heads // tensor
    logits = architecture.vocabulary // tensor * itemsize("f32")
    return run.batch * (run.seq * (widths + scores) * size + logits)
