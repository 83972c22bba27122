"""Kernels of a transformer layer in Megatron-LM, where each device has a part of every layer.

The layer is that of GPT-2 or Llama, or has experts in place of the feed-forward part. Bias and gelu, bias and
dropout and residual sum, and scale and mask and softmax are one kernel each; tensors are stored (sequence,
batch, width), so that heads are views. With sequence parallelism, devices divide the tokens of all kernels
that tensor parallelism does not divide.

Experts: each device routes its tokens, puts a copy of each token for each of its experts in their order, and
exchanges them with the devices that have these experts (all-to-all); devices that share an expert gather the
tokens of all of them. The experts of a device are grouped products; with 8-bit floats, each expert has its
own products and conversions, of a padded number of tokens. The results go back the same way and are added.
Each token has `experts_per_token` rows on the way, which are all that the passes between need.

Source: NVIDIA/Megatron-LM, `megatron/core/transformer` and `megatron/core/fusions`; Korthikanti et al.,
"Reducing activation recomputation in large transformer models", 2022, sections 3 to 5. 8-bit floats:
NVIDIA/TransformerEngine, `pytorch/module`. Kernels of the router and the exchange were counted by a dispatch
mode on megatron-core 0.16.1; the permutation is the fused one of Transformer Engine.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from tunebench.dtype import itemsize
from tunebench.errors import InputError
from tunebench.workloads.networks.architecture import Architecture
from tunebench.workloads.networks.layer_division import Recompute
from tunebench.workloads.networks.network_run import (
    ContextExchange,
    NetworkRun,
    Operation,
    Phase,
    TensorCollective,
)
from tunebench.workloads.networks.tape import Tape
from tunebench.workloads.operators.attention import Attention
from tunebench.workloads.operators.gemm import Gemm

__all__ = [
    "add_converted_weights",
    "add_flash",
    "add_megatron_layer",
    "context_exchanges",
    "expert_collectives",
    "gate_expression",
    "megatron_collectives",
    "recomputed",
    "recomputed_operators",
    "routed_rows",
    "tokens_outside",
]

ROUTER_KERNELS = {"forward": 24, "backward": 13}
"""Small kernels of a router after its product: the choice of experts, the loss that balances them, the count
of tokens of each expert."""

GROUP_KERNELS = 7
"""Small kernels that choose groups of experts before the experts: the two best scores of each group and their
sum, the best groups, and the mask of the others (`group_limited_topk`)."""

COUNT_BYTES, SCORE_BYTES = 8, 4
"""Bytes of a number of tokens, and of the score of a token."""


def tokens_outside(run: NetworkRun) -> int:
    """Return the tokens of one device in kernels that tensor parallelism does not divide."""
    tokens = run.batch * run.seq
    return -(-tokens // run.tensor) if run.sequence_parallel else tokens


def routed_rows(run: NetworkRun, architecture: Architecture) -> int:
    """Return the rows that the busiest device sends to experts, and receives for them."""
    return round(tokens_outside(run) * architecture.experts_per_token * run.expert_load)


def gate_expression(architecture: Architecture) -> str:
    """Return the activation of a gated feed-forward layer as an expression in x."""
    name = architecture.activation
    return f"{'gelu' if name.startswith('gelu') else name}(x)"


def add_megatron_layer(
    tape: Tape, architecture: Architecture, *, gated: bool, rms: bool, biased: bool, decodes: bool = False
) -> None:
    """Add a layer: attention and feed-forward part, each after a normalisation and before a residual sum.

    Args:
        tape: Tape that receives the kernels.
        architecture: Sizes of the network.
        gated: Whether the feed-forward part multiplies two products (SwiGLU).
        rms: Whether normalisations have no shift.
        biased: Whether linear layers add a bias.
        decodes: Whether the layer also has attention to the output of an encoder.
    """
    layer = Tape(tape.run)
    core, experts = Tape(tape.run), Tape(tape.run)
    _add_attention(layer, core, architecture, rms=rms, biased=biased)
    if decodes:
        _add_cross_attention(layer, core, architecture, biased=biased)
    if architecture.experts_per_token:
        _add_experts(layer, experts, architecture)
    else:
        _add_feed_forward(layer, architecture, gated=gated, rms=rms, biased=biased)
    tape.extend(layer.operations)
    recomputed_parts = {
        "none": [],
        "selective": core.operations,
        "experts": experts.operations,
        "full": layer.operations,
    }
    if tape.run.recompute == "operators":
        tape.extend(recomputed_operators(layer.operations, architecture, tape.run.tensor))
    else:
        tape.extend(recomputed(recomputed_parts[tape.run.recompute]))


def recomputed(operations: list[Operation]) -> list[Operation]:
    """Return the forward kernels as part of the backward pass."""
    return [
        replace(operation, phase="backward", part="recomputation")
        for operation in operations
        if operation.phase == "forward"
    ]


def recomputed_operators(
    operations: list[Operation], architecture: Architecture, tensor: int
) -> list[Operation]:
    """Return the kernels that recomputation by operators runs again, as part of the backward pass.

    The results of attention and of every second product are kept: of queries, values, the first product of
    the feed-forward part and its last one.

    Args:
        operations: Operations of a layer.
        architecture: Its sizes.
        tensor: Tensor-parallel size.

    Source: pytorch/torchtitan, `apply_ac` (`selective_ac_option = "op"`).
    """
    columns = {
        "attention qkv": architecture.inner_k // tensor,
        "attention output": architecture.hidden,
        "mlp up": architecture.ffn // tensor,
        "mlp down": 0,
    }
    repeated = []
    for operation in operations:
        workload = operation.workload
        if operation.phase != "forward" or isinstance(workload, Attention):
            continue
        if not isinstance(workload, Gemm):
            repeated += recomputed([operation])
        elif width := columns.pop(operation.part, 0):
            repeated += recomputed([replace(operation, workload=replace(workload, n=width), count=1)])
    return repeated


def _add_attention(layer: Tape, core: Tape, architecture: Architecture, *, rms: bool, biased: bool) -> None:
    run, tokens = layer.run, layer.run.batch * layer.run.seq
    inner, keys = architecture.inner // run.tensor, architecture.inner_k // run.tensor
    _norm(layer, architecture, rms)
    bias = biased or architecture.biased_qkv
    if architecture.key_latent:
        _add_latent_products(layer, architecture)
        _add_core(core, architecture)
        layer.extend(core.operations)
        _add_attention_output(layer, architecture, biased)
        return
    layer.inner_linear("attention qkv", tokens, inner + 2 * keys, architecture.hidden, bias=bias)
    if architecture.normalised_heads:
        for width in (inner, keys):
            layer.fused_rmsnorm(
                "norm", (tokens * width // architecture.head_dim, architecture.head_dim), eps=architecture.eps
            )
    if rms and not architecture.decoder_layers:  # rotary positions
        layer.pointwise("attention rotation", (tokens, inner + keys), "x*row", ("x*row",))
    layer.copy("attention copies", (tokens, inner + 2 * keys), "backward")  # concatenate three gradients
    _add_core(core, architecture)
    layer.extend(core.operations)
    _add_attention_output(layer, architecture, biased)


def _add_attention_output(layer: Tape, architecture: Architecture, biased: bool) -> None:
    tokens, inner = layer.run.batch * layer.run.seq, architecture.inner_out // layer.run.tensor
    layer.inner_linear("attention output", tokens, architecture.hidden, inner, bias=False)
    _norm_after(layer, architecture)
    _residual(layer, architecture, biased or architecture.output_bias)


def _add_cross_attention(layer: Tape, core: Tape, architecture: Architecture, *, biased: bool) -> None:
    """Add attention of a decoder's tokens to as many of the encoder, whose scores have no bias.

    Source: NVIDIA/Megatron-LM, `megatron/core/transformer/attention.py` (`CrossAttention`).
    """
    run, hidden = layer.run, architecture.hidden
    tokens, inner = run.batch * run.seq, architecture.inner // run.tensor
    _norm(layer, architecture, rms=True)
    layer.inner_linear("attention qkv", tokens, inner, hidden, bias=biased)
    layer.inner_linear("attention qkv", tokens, 2 * inner, hidden, bias=biased)
    layer.elementwise(
        "attention qkv", (tokens, hidden), "x+y", "backward"
    )  # gradients of the encoder's output
    layer.copy("attention copies", (tokens, 2 * inner), "backward")  # concatenate two gradients
    cross = Tape(run)
    _add_core(cross, replace(architecture, buckets=0))
    core.extend(cross.operations)
    layer.extend(cross.operations)
    _add_attention_output(layer, architecture, biased)


def _add_latent_products(layer: Tape, architecture: Architecture) -> None:
    """Add the products of multi-head latent attention from hidden states to queries, keys and values.

    Tensor parallelism divides heads, and not the narrow vectors.

    Source: NVIDIA/Megatron-LM, `megatron/core/transformer/multi_latent_attention.py`.
    """
    run, part, hidden = layer.run, "attention qkv", architecture.hidden
    tokens, outside = run.batch * run.seq, tokens_outside(layer.run)
    queries, keys = architecture.query_latent, architecture.key_latent
    if queries:
        layer.inner_linear(part, outside, queries, hidden, bias=False)
        layer.fused_rmsnorm("norm", (outside, queries), eps=architecture.eps)
    layer.inner_linear(part, tokens, architecture.inner // run.tensor, queries or hidden, bias=False)
    layer.inner_linear(part, outside, keys + architecture.rotary_dim, hidden, bias=False)
    layer.fused_rmsnorm("norm", (outside, keys), eps=architecture.eps)
    wide = architecture.inner_k - architecture.heads_k * architecture.rotary_dim + architecture.inner_v
    layer.inner_linear(part, tokens, wide // run.tensor, keys, bias=False)
    rotated = architecture.heads * architecture.rotary_dim // run.tensor + architecture.rotary_dim
    layer.pointwise("attention rotation", (tokens, rotated), "x*row", ("x*row",))
    for width in (architecture.inner, architecture.inner_k):  # parts with and without positions
        layer.pointwise("attention copies", (tokens, width // run.tensor), "x", ("x",))


def _add_core(core: Tape, architecture: Architecture) -> None:
    """Add scores, softmax and values, or one kernel of flash attention."""
    run = core.run
    heads, heads_k = architecture.heads // run.tensor, architecture.heads_k // run.tensor
    if run.flash and not architecture.buckets:
        _add_flash(core, architecture, heads, heads_k)
        return
    if architecture.buckets and run.context > 1:
        raise InputError(
            f"context parallelism needs scores without a bias for each pair: expected context=1, got "
            f"{run.context}"
        )
    pairs = (run.batch * heads * run.seq, run.seq)
    core.product("attention scores", run.batch * heads, run.seq, run.seq, architecture.head_dim, "nt")
    if architecture.score_cap:
        core.pointwise("attention scores", pairs, "tanh(x)", ("dy*(1-y*y)",))
    if architecture.buckets:  # relative positions; their gradient is added to that of the layers behind
        core.pointwise("attention scores", pairs, "x+y", ("x+y",))
    if _softmax_is_fused(run, heads):
        core.softmax("attention softmax", pairs, "scale")
    else:
        _softmax_in_parts(core, pairs, masked=architecture.causal)
    _dropout(core, "attention softmax", pairs, architecture.attention_dropout)
    value_dim = architecture.value_dim or architecture.head_dim
    core.product("attention values", run.batch * heads, run.seq, value_dim, run.seq, "nn")
    core.copy("attention copies", (run.batch * run.seq, heads * value_dim))  # heads behind tokens
    core.copy("attention copies", (run.batch * run.seq, heads * value_dim), "backward")


def _add_flash(core: Tape, architecture: Architecture, heads: int, heads_k: int) -> None:
    dimensions = {"batch": core.run.batch, "heads": heads, "heads_k": heads_k}
    dimensions["head_dim"] = architecture.attention_dim
    causal = architecture.causal and not architecture.decoder_layers  # an encoder's output has no later token
    add_flash(core, dimensions, architecture.window, causal=causal)


def add_flash(core: Tape, sizes: Mapping[str, int], window: int, *, causal: bool = True) -> None:
    """Add flash attention: with context parallelism, a kernel for the keys of each device of the ring.

    A device has two parts of a sequence, one from each end, so that all devices have equal work: half of the
    pairs of its tokens, and half of those with each other device's.

    Args:
        core: Tape that receives the kernels.
        sizes: Dimensions of `Attention` on the device, but those of sequences.
        window: Last keys that a query sees; 0 for all.
        causal: Whether tokens see no later token, as context parallelism needs.
    """
    run = core.run
    if not causal and run.context > 1:
        raise InputError(f"context parallelism needs causal attention: expected context=1, got {run.context}")
    dimensions: dict[str, Any] = {**sizes, "dtype": run.dtype}
    window = window if window < run.seq * run.context else 0

    def add(seq_q: int, seq_k: int, times: int, *, causal: bool = False) -> None:
        kernel = Tape(run)
        work = {**dimensions, "seq_q": seq_q, "seq_k": seq_k, "causal": causal}
        work |= {"window": window} if window and causal else {}
        kernel.attention("attention", work)
        core.extend(kernel.operations, times)

    ring_steps = run.context - 1
    if ring_steps and run.context_gather:  # on average, a token sees half of the gathered keys
        seen = run.seq * run.context // 2
        add(run.seq, min(seen, window or seen), 1)
        return
    add(run.seq, run.seq, 1, causal=causal)
    if not ring_steps:
        return
    add(run.seq, run.seq // 2, (ring_steps + 1) // 2)  # keys of devices before, in the sequence
    if ring_steps > 1:
        add(run.seq // 2, run.seq, ring_steps // 2)  # keys of devices behind
    merged = Tape(run)
    elements = run.batch * run.seq * sizes["heads"] * sizes["head_dim"]
    merged.moved("attention merge", 3 * elements * itemsize(run.dtype))  # partial sums by their maxima
    core.extend(merged.operations, ring_steps)


def context_exchanges(
    run: NetworkRun, architecture: Architecture, layers: int
) -> tuple[ContextExchange, ...]:
    """Return the sends of keys and values round the ring, and of their gradients in the backward pass.

    Args:
        run: How the network runs.
        architecture: Sizes of the network.
        layers: Layers of the stage.

    Source: Liu et al., "Ring attention with blockwise transformers for near-infinite context", 2023; NVIDIA
    Transformer Engine, `attention` with `cp_comm_type="p2p"`.
    """
    if run.context == 1:
        return ()
    widths = architecture.inner_k + architecture.inner_v
    keys = run.batch * run.seq * widths // run.tensor * itemsize(run.dtype)
    if run.context_gather:
        return _gathered_contexts(run, keys * run.context, layers)
    count = layers * (run.context - 1)
    exchanges = [ContextExchange(nbytes=keys, count=count)]
    if run.trains:
        exchanges.append(ContextExchange(nbytes=2 * keys, count=count, phase="backward", behind="backward"))
        recomputed_layers = layers if run.recompute_layers is None else min(layers, run.recompute_layers)
        if run.recompute in ("selective", "full") and recomputed_layers:
            exchanges.append(
                ContextExchange(nbytes=keys, count=recomputed_layers * (run.context - 1), phase="backward")
            )
    return tuple(exchanges)


def _gathered_contexts(run: NetworkRun, nbytes: int, layers: int) -> tuple[ContextExchange, ...]:
    """Return the all-gathers of keys and values, and the reduce-scatters of their gradients.

    Source: Llama team, "The Llama 3 herd of models", 2024, section 3.3.2 (context parallelism).
    """
    gathered = ContextExchange(nbytes=nbytes, count=layers, collective="all-gather")
    if not run.trains:
        return (gathered,)
    recomputed_layers = layers if run.recompute_layers is None else min(layers, run.recompute_layers)
    back = replace(gathered, phase="backward")  # keys and values are not kept whole
    repeats = run.recompute not in ("none", "operators") and recomputed_layers
    repeated = (replace(back, count=recomputed_layers),) if repeats else ()
    return (gathered, back, replace(back, collective="reduce-scatter"), *repeated)


def _softmax_is_fused(run: NetworkRun, heads: int) -> bool:
    """Return whether Megatron-LM has a kernel that scales, masks and normalises these scores.

    Source: `FusedScaleMaskSoftmax.is_kernel_available`, for causal masks.
    """
    return run.dtype != "f32" and 16 < run.seq <= 16384 and run.seq % 4 == 0 and run.batch * heads % 4 == 0


def _softmax_in_parts(core: Tape, pairs: tuple[int, int], *, masked: bool) -> None:
    """Add PyTorch's separate kernels, in f32, for the scale, the mask and the softmax."""
    part, wide = "attention softmax", Tape(replace(core.run, dtype="f32"))
    wide.pointwise(part, pairs, "x*0.125", ("x*0.125",))
    if masked:
        wide.pointwise(part, pairs, "max(x,row)", ("dy*row",))
    wide.softmax(part, pairs)
    core.cast(part, pairs, up=True)
    core.cast(part, pairs, up=True, phase="backward")
    core.extend(wide.operations)
    core.cast(part, pairs, up=False)
    core.cast(part, pairs, up=False, phase="backward")


def _add_feed_forward(
    layer: Tape, architecture: Architecture, *, gated: bool, rms: bool, biased: bool
) -> None:
    run, tokens = layer.run, layer.run.batch * layer.run.seq
    width = architecture.ffn // run.tensor
    _norm(layer, architecture, rms)
    if gated:
        _add_gated(layer, tokens, width, architecture)
    else:
        layer.inner_linear("mlp up", tokens, width, architecture.hidden, bias=False)
        layer.pointwise("mlp activation", (tokens, width), "gelu(x+row)", ("dy*gelu(x+row)",))
        if biased:
            layer.summed("mlp activation", tokens * width, "backward")  # gradient of the bias
        layer.inner_linear("mlp down", tokens, architecture.hidden, width, bias=False)
    _norm_after(layer, architecture)
    _residual(layer, architecture, biased or architecture.mlp_bias)


def add_converted_weights(tape: Tape, parameters: int) -> None:
    """Add the conversion of matrices to 8-bit floats, and of their transposes: once a step, after the update.

    Source: NVIDIA/TransformerEngine, `pytorch/module/linear.py` (`is_first_microbatch`).
    """
    if tape.run.fp8 == "none" or tape.run.optimizer == "none" or not parameters:
        return
    size = itemsize(tape.run.dtype)
    if tape.run.fp8 == "current":
        tape.moved("fp8 weights", parameters * size, "optimizer")
    tape.moved("fp8 weights", parameters * (size + 2), "optimizer")


def _add_gated(tape: Tape, tokens: int, width: int, architecture: Architecture) -> None:
    hidden, gate = architecture.hidden, gate_expression(architecture)
    tape.inner_linear("mlp up", tokens, 2 * width, hidden, bias=False)
    tape.pointwise("mlp activation", (tokens, width), f"{gate}*y", (f"dy*{gate}", f"dy*{gate}*y"))
    tape.inner_linear("mlp down", tokens, hidden, width, bias=False)


def _add_experts(layer: Tape, experts: Tape, architecture: Architecture) -> None:
    """Add the normalisation, the router, the experts and the residual sum.

    Args:
        layer: Tape of the layer.
        experts: Tape that receives what follows the normalisation, up to the residual sum.
        architecture: Sizes of the network.
    """
    run, tokens = layer.run, tokens_outside(layer.run)
    _norm(layer, architecture, rms=True)
    if architecture.shared_ffn:
        _add_gated(experts, run.batch * run.seq, architecture.shared_ffn // run.tensor, architecture)
    if architecture.shared_gate:
        experts.linear("router", tokens, 1, architecture.hidden, bias=False)
        experts.pointwise("experts", (tokens, architecture.hidden), "x*row", ("dy*row", "dy*x"))
    _add_routing(experts, architecture, tokens)
    rows, local_experts = (
        routed_rows(run, architecture) * run.devices_per_expert,
        architecture.experts // run.expert,
    )
    width = architecture.ffn // run.devices_per_expert
    sorts = local_experts > 1 and run.expert * run.devices_per_expert > 1
    if sorts:
        experts.pointwise("expert exchange", (rows, architecture.hidden), "x", ("x",))  # by expert
    if run.fp8 != "none":
        _add_padding(experts, rows, architecture.hidden)
    experts.inner_linear("experts", rows, 2 * width, architecture.hidden, bias=False, groups=local_experts)
    experts.pointwise("experts", (rows, width), "silu(x)*y", ("dy*silu(x)", "dy*silu(x)*y"))
    experts.inner_linear("experts", rows, architecture.hidden, width, bias=False, groups=local_experts)
    if run.fp8 != "none":
        _add_padding(experts, rows, architecture.hidden)
    if sorts:
        experts.pointwise("expert exchange", (rows, architecture.hidden), "x", ("x",))
    moved = (tokens + routed_rows(run, architecture)) * architecture.hidden * itemsize(run.dtype)
    for phase in ("forward", "backward"):
        experts.moved("expert exchange", moved, phase)  # sums of the rows of each token
    if architecture.shared_ffn:
        experts.elementwise("experts", (tokens, architecture.hidden), "x+y")
    layer.extend(experts.operations)
    layer.elementwise(
        "experts", (tokens, architecture.hidden), "x+y", "backward"
    )  # gradients of router and experts
    _residual(layer, architecture, biased=False)


def _add_padding(tape: Tape, rows: int, hidden: int) -> None:
    """Add the copy that pads the tokens of each expert to a multiple of 16, or undoes that.

    Source: NVIDIA/Megatron-LM, `megatron/core/transformer/moe/experts.py` (`quantization_padding`).
    """
    tape.pointwise("experts", (rows, hidden), "x", ("x",))


def _add_routing(tape: Tape, architecture: Architecture, tokens: int) -> None:
    """Add the router, and the kernel that makes a row for each expert of a token.

    That kernel waits for the host, which reads how many tokens each expert has.
    """
    tape.linear("router", tokens, architecture.experts, architecture.hidden, bias=False)
    scores = (tokens, architecture.experts)
    for phase, count in ROUTER_KERNELS.items():
        once = Tape(tape.run)
        once.elementwise("router", scores, "x", phase)  # type: ignore[arg-type]
        tape.extend(once.operations, count)
    for _ in range(GROUP_KERNELS if architecture.expert_groups else 0):
        tape.elementwise("router", scores, "x")
    rows = routed_rows(tape.run, architecture)
    nbytes = (tokens + rows) * architecture.hidden * itemsize(tape.run.dtype)
    width = max(1, round(nbytes / (2 * tokens * itemsize(tape.run.dtype))))
    tape.elementwise("expert exchange", (tokens, width), "x", alone=True)
    tape.elementwise("expert exchange", (tokens, width), "x", "backward")


def _norm(tape: Tape, architecture: Architecture, rms: bool) -> None:
    """Add a normalisation, always in one kernel."""
    shape = (tokens_outside(tape.run), architecture.hidden)
    (tape.fused_rmsnorm if rms else tape.layernorm)("norm", shape, eps=architecture.eps)
    tape.elementwise("norm", shape, "x+y", "backward")  # gradients of the two branches


def _norm_after(tape: Tape, architecture: Architecture) -> None:
    """Add the normalisation of a result before the residual sum, if layers have four."""
    if architecture.norms == 4:
        shape = (tokens_outside(tape.run), architecture.hidden)
        tape.fused_rmsnorm("norm", shape, eps=architecture.eps)


def _residual(tape: Tape, architecture: Architecture, biased: bool) -> None:
    """Add bias, dropout and residual sum in one kernel, which also stores the mask of dropout."""
    rows, size = tokens_outside(tape.run), itemsize(tape.run.dtype)
    elements = rows * architecture.hidden
    mask = elements if architecture.dropout and tape.run.trains else 0
    tape.moved("residual", 3 * elements * size + mask)
    if mask:
        tape.moved("residual", 2 * elements * size + mask, "backward")
    if biased:
        tape.summed("residual", elements, "backward")


def _dropout(tape: Tape, part: str, shape: tuple[int, int], probability: float) -> None:
    """Add dropout as a separate kernel with a mask of one byte per element."""
    if tape.run.trains and probability:
        nbytes = shape[0] * shape[1] * (2 * itemsize(tape.run.dtype) + 1)
        tape.moved(part, nbytes)
        tape.moved(part, nbytes, "backward")


def expert_collectives(
    run: NetworkRun, architecture: Architecture, layers: int
) -> tuple[TensorCollective, ...]:
    """Return the collectives that bring tokens to their experts and back, in each pass.

    The backward pass sends gradients the other way round: a gather becomes a reduce-scatter, and the reverse.
    The exchange of scores goes with that of tokens, and the counts of tokens are gathered before it.

    Args:
        run: How the network runs.
        architecture: Sizes of the network.
        layers: Layers of the stage.
    """
    shared = run.devices_per_expert
    if run.kernels != "megatron" or run.expert * shared == 1:
        return ()
    rows, size = routed_rows(run, architecture), itemsize(run.dtype)
    counts = COUNT_BYTES * architecture.experts * run.expert
    listed: list[TensorCollective] = []

    def add(collective: Any, nbytes: int, group: Any, phase: Phase, count: int) -> None:
        listed.append(
            TensorCollective(
                nbytes=nbytes,
                count=count,
                part="experts",
                phase=phase,
                collective=collective,
                group=group,
            )
        )

    def add_exchange(phase: Phase, times: int, *, counted: bool) -> None:
        if run.expert > 1 and times:
            add("all-to-all", rows * architecture.hidden * size, "expert", phase, 2 * times)
            add("all-to-all", rows * SCORE_BYTES, "expert", phase, times)
            if counted:
                add("all-gather", counts, "expert", phase, times)
        if shared > 1 and times:
            for collective in ("all-gather", "reduce-scatter"):
                add(collective, shared * rows * architecture.hidden * size, "expert tensor", phase, times)

    add_exchange("forward", layers, counted=True)
    if run.trains:
        add_exchange("backward", layers, counted=False)
        if run.recompute in ("experts", "full"):
            recomputed_layers = layers if run.recompute_layers is None else min(layers, run.recompute_layers)
            add_exchange("backward", recomputed_layers, counted=True)
    return tuple(listed)


def megatron_collectives(
    run: NetworkRun,
    nbytes: int,
    layers: int,
    products: int,
    end_layers: tuple[bool, bool],
    *,
    divides_ends: bool = True,
) -> tuple[TensorCollective, ...]:
    """Return the collectives of tensor parallelism of a stage.

    The gradient of a divided product's input is summed while the gradient of its weights is computed. With
    sequence parallelism, an all-reduce is a reduce-scatter and an all-gather, and the backward pass gathers
    the input of each product again. All-gathers inside layers carry 8-bit floats if products multiply them.

    Args:
        run: How the network runs.
        nbytes: Bytes of the hidden states of all tokens.
        layers: Layers of the stage.
        products: Number of divided products whose results are summed in a forward pass: those of attention,
            and of feed-forward layers or shared experts.
        end_layers: Whether the stage has the embedding, and whether it has the head.
        divides_ends: Whether tensor parallelism divides these.
    """
    return _divided_collectives(
        _DividedStage(
            nbytes=nbytes,
            gathered_bytes=nbytes // (1 if run.fp8 == "none" else itemsize(run.dtype)),
            layers=layers,
            products=products,
            has_embedding=end_layers[0],
            has_head=end_layers[1],
            divides_ends=divides_ends,
            trains=run.trains,
            sequence_parallel=run.sequence_parallel,
            recompute=run.recompute,
            recompute_layers=run.recompute_layers,
        )
    )


class _DividedStage(NamedTuple):
    """What the collectives of tensor parallelism of a stage depend on, see `megatron_collectives`."""

    nbytes: int
    gathered_bytes: int
    layers: int
    products: int
    has_embedding: bool
    has_head: bool
    divides_ends: bool
    trains: bool
    sequence_parallel: bool
    recompute: Recompute
    recompute_layers: int | None


@functools.lru_cache(maxsize=2**12)
def _divided_collectives(stage: _DividedStage) -> tuple[TensorCollective, ...]:
    divided = {"attention qkv": stage.layers, "mlp up": stage.products - stage.layers}
    forward = _forward_collectives(stage, divided)
    if stage.has_embedding:
        forward += _unbound(stage) if stage.divides_ends else []
    elif not stage.sequence_parallel:  # each device received its part from the stage before
        forward.append(TensorCollective(nbytes=stage.nbytes, count=1, part="stage", collective="all-gather"))
    if not stage.trains:
        return tuple(forward)
    backward = list(_recomputed_collectives(stage, divided))
    for part, count in (*divided.items(), ("head", int(stage.has_head and stage.divides_ends))):
        if count:
            backward += _backward_collectives(stage, part, count)
    return (*forward, *backward)


_AFTER = {"attention qkv": "attention output", "mlp up": "mlp down"}
"""The product whose result is summed, for each product whose input is gathered."""


def _unbound(stage: _DividedStage, count: int = 1) -> list[TensorCollective]:
    """Return collectives that no product needs to run in parts."""
    kinds = ("all-gather", "reduce-scatter") if stage.sequence_parallel else ("all-reduce",)
    return [
        TensorCollective(nbytes=stage.nbytes, count=count, part="layers", collective=kind)  # type: ignore[arg-type]
        for kind in kinds
    ]


def _forward_collectives(stage: _DividedStage, divided: Mapping[str, int]) -> list[TensorCollective]:
    """Return the collectives of a forward pass, given the number of divided products by part."""
    if not stage.sequence_parallel:
        return _unbound(stage, sum(divided.values())) if any(divided.values()) else []
    collectives = []
    for gathered, summed in _AFTER.items():
        if not divided[gathered]:
            continue
        collective = TensorCollective(nbytes=stage.nbytes, count=divided[gathered], part="layers")
        collectives += [
            replace(
                collective,
                nbytes=stage.gathered_bytes,
                collective="all-gather",
                beside=(gathered, "forward"),
            ),
            replace(collective, collective="reduce-scatter", beside=(summed, "forward")),
        ]
    return collectives


def _recomputed_collectives(stage: _DividedStage, divided: Mapping[str, int]) -> list[TensorCollective]:
    """Return the collectives that the backward pass repeats; those of a shared expert with all experts."""
    parts = {"full": tuple(divided), "experts": ("mlp up",)}.get(stage.recompute, ())
    max_layers = max(divided.values()) if stage.recompute_layers is None else stage.recompute_layers
    counts = {part: min(count, max_layers) if part in parts else 0 for part, count in divided.items()}
    repeated = _forward_collectives(stage, counts)
    return [replace(collective, phase="backward", part="recomputation") for collective in repeated]


def _backward_collectives(stage: _DividedStage, part: str, count: int) -> list[TensorCollective]:
    reduction = TensorCollective(
        nbytes=stage.nbytes, count=count, part=part, phase="backward", behind=(part, "weights")
    )
    if not stage.sequence_parallel:
        return [reduction]
    after = _AFTER.get(part)
    gathered = replace(
        reduction, nbytes=stage.gathered_bytes if after else stage.nbytes, collective="all-gather"
    )
    return [
        replace(reduction, collective="reduce-scatter"),
        replace(gathered, behind=(part, "input")),
        # the gradient of the output, for both products
        replace(gathered, behind=None, beside=(after, "input") if after else None),
    ]
