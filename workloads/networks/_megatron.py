"""Kernels of a transformer layer in Megatron-LM, where each device has a part of every layer.

The layer is that of GPT-2 or Llama. Bias and gelu, bias and dropout and residual sum, and scale and mask and
softmax are one kernel each; tensors are stored (sequence, batch, width), so that heads are views. With
sequence parallelism, devices divide the tokens of all kernels that tensor parallelism does not divide.

Source: NVIDIA/Megatron-LM, `megatron/core/transformer` and `megatron/core/fusions`; Korthikanti et al.,
"Reducing activation recomputation in large transformer models", 2022, sections 3 to 5. 8-bit floats:
NVIDIA/TransformerEngine, `pytorch/module`.
"""

from __future__ import annotations

from dataclasses import replace

from tunebench.dtype import itemsize
from tunebench.workloads.networks._architecture import Architecture
from tunebench.workloads.networks._network import ContextExchange, NetworkRun, Operation, TensorCollective
from tunebench.workloads.networks._tape import Tape
from tunebench.workloads.operators.attention import Attention

__all__ = [
    "add_converted_weights",
    "add_megatron_layer",
    "context_exchanges",
    "megatron_collectives",
    "recomputed",
    "tokens_outside",
]


def tokens_outside(run: NetworkRun) -> int:
    """Return the tokens of one device in kernels that tensor parallelism does not divide."""
    tokens = run.batch * run.seq
    return -(-tokens // run.tensor) if run.sequence_parallel else tokens


def add_megatron_layer(
    tape: Tape, architecture: Architecture, *, gated: bool, rms: bool, biased: bool
) -> None:
    """Add a layer: attention and feed-forward part, each after a normalisation and before a residual sum.

    Args:
        tape: Tape that receives the kernels.
        architecture: Sizes of the network.
        gated: Whether the feed-forward part multiplies two products (SwiGLU).
        rms: Whether normalisations have no shift.
        biased: Whether linear layers add a bias.
    """
    layer = Tape(tape.run)
    core = Tape(tape.run)
    _add_attention(layer, core, architecture, rms=rms, biased=biased)
    _add_feed_forward(layer, architecture, gated=gated, rms=rms, biased=biased)
    tape.extend(layer.operations)
    again = {"none": [], "selective": core.operations, "full": layer.operations}[tape.run.recompute]
    tape.extend(recomputed(again))


def recomputed(operations: list[Operation]) -> list[Operation]:
    """Return the forward kernels as part of the backward pass."""
    return [
        replace(each, phase="backward", part="recomputation")
        for each in operations
        if each.phase == "forward"
    ]


def _add_attention(layer: Tape, core: Tape, of: Architecture, *, rms: bool, biased: bool) -> None:
    run, tokens = layer.run, layer.run.batch * layer.run.seq
    inner, keys = of.inner // run.tensor, of.inner_k // run.tensor
    _norm(layer, of, rms)
    layer.inner_linear("attention qkv", tokens, inner + 2 * keys, of.hidden, bias=biased)
    if rms:  # rotary positions
        layer.pointwise("attention rotation", (tokens, inner + keys), "x*row", ("x*row",))
    layer.copy("attention copies", (tokens, inner + 2 * keys), "backward")  # concatenate three gradients
    _add_core(core, of)
    layer.extend(core.operations)
    layer.inner_linear("attention output", tokens, of.hidden, inner, bias=False)
    _residual(layer, of, biased)


def _add_core(core: Tape, of: Architecture) -> None:
    """Add scores, softmax and values, or one kernel of flash attention."""
    run = core.run
    heads, heads_k = of.heads // run.tensor, of.heads_k // run.tensor
    if run.flash:
        _add_flash(core, of, heads, heads_k)
        return
    pairs = (run.batch * heads * run.seq, run.seq)
    core.product("attention scores", run.batch * heads, run.seq, run.seq, of.head_dim, "nt")
    if _softmax_is_fused(run, heads):
        core.softmax("attention softmax", pairs, "scale")
    else:
        _softmax_in_parts(core, pairs)
    _dropout(core, "attention softmax", pairs, of.attention_dropout)
    core.product("attention values", run.batch * heads, run.seq, of.head_dim, run.seq, "nn")
    core.copy("attention copies", (run.batch * run.seq, heads * of.head_dim))  # heads behind tokens
    core.copy("attention copies", (run.batch * run.seq, heads * of.head_dim), "backward")


def _add_flash(core: Tape, of: Architecture, heads: int, heads_k: int) -> None:
    """Add flash attention: with context parallelism, a kernel for the keys of each device of the ring.

    A device has two parts of a sequence, one from each end, so that all devices have equal work: half of the
    pairs of its tokens, and half of those with each other device's.
    """
    run = core.run
    given = {
        "batch": run.batch,
        "heads": heads,
        "heads_k": heads_k,
        "head_dim": of.head_dim,
        "dtype": run.dtype,
    }

    def add(seq_q: int, seq_k: int, times: int, *, causal: bool = False) -> None:
        kernel = Tape(run)
        work = {**given, "seq_q": seq_q, "seq_k": seq_k, "causal": causal}
        kernel.attention("attention", Attention.from_dimensions(work))
        core.extend(kernel.operations, times)

    add(run.seq, run.seq, 1, causal=True)
    others = run.context - 1
    if not others:
        return
    add(run.seq, run.seq // 2, (others + 1) // 2)  # keys of devices before, in the sequence
    if others > 1:
        add(run.seq // 2, run.seq, others // 2)  # keys of devices behind
    merged = Tape(run)
    elements = run.batch * run.seq * heads * of.head_dim
    merged.moved("attention merge", 3 * elements * itemsize(run.dtype))  # partial sums by their maxima
    core.extend(merged.operations, others)


def context_exchanges(run: NetworkRun, of: Architecture, layers: int) -> tuple[ContextExchange, ...]:
    """Return the sends of keys and values round the ring, and of their gradients in the backward pass.

    Args:
        run: How the network runs.
        of: Sizes of the network.
        layers: Layers of the stage.

    Source: Liu et al., "Ring attention with blockwise transformers for near-infinite context", 2023; NVIDIA
    Transformer Engine, `attention` with `cp_comm_type="p2p"`.
    """
    if run.context == 1:
        return ()
    keys = 2 * run.batch * run.seq * of.inner_k // run.tensor * itemsize(run.dtype)
    count = layers * (run.context - 1)
    found = [ContextExchange(nbytes=keys, count=count)]
    if run.trains:
        found.append(ContextExchange(nbytes=2 * keys, count=count, phase="backward", behind="backward"))
        again = layers if run.recompute_layers is None else min(layers, run.recompute_layers)
        if run.recompute != "none" and again:
            found.append(ContextExchange(nbytes=keys, count=again * (run.context - 1), phase="backward"))
    return tuple(found)


def _softmax_is_fused(run: NetworkRun, heads: int) -> bool:
    """Return whether Megatron-LM has a kernel that scales, masks and normalises these scores.

    Source: `FusedScaleMaskSoftmax.is_kernel_available`, for causal masks.
    """
    return run.dtype != "f32" and 16 < run.seq <= 16384 and run.seq % 4 == 0 and run.batch * heads % 4 == 0


def _softmax_in_parts(core: Tape, pairs: tuple[int, int]) -> None:
    """Add PyTorch's separate kernels, in f32, for the scale, the mask and the softmax."""
    part, wide = "attention softmax", Tape(replace(core.run, dtype="f32"))
    wide.pointwise(part, pairs, "x*0.125", ("x*0.125",))
    wide.pointwise(part, pairs, "max(x,row)", ("dy*row",))
    wide.softmax(part, pairs)
    core.cast(part, pairs, up=True)
    core.cast(part, pairs, up=True, phase="backward")
    core.extend(wide.operations)
    core.cast(part, pairs, up=False)
    core.cast(part, pairs, up=False, phase="backward")


def _add_feed_forward(layer: Tape, of: Architecture, *, gated: bool, rms: bool, biased: bool) -> None:
    run, tokens = layer.run, layer.run.batch * layer.run.seq
    width = of.ffn // run.tensor
    _norm(layer, of, rms)
    layer.inner_linear("mlp up", tokens, width * (2 if gated else 1), of.hidden, bias=False)
    if gated:
        layer.pointwise("mlp activation", (tokens, width), "silu(x)*y", ("dy*silu(x)", "dy*silu(x)*y"))
    else:
        layer.pointwise("mlp activation", (tokens, width), "gelu(x+row)", ("dy*gelu(x+row)",))
        if biased:
            layer.summed("mlp activation", tokens * width, "backward")  # gradient of the bias
    layer.inner_linear("mlp down", tokens, of.hidden, width, bias=False)
    _residual(layer, of, biased)


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


def _norm(tape: Tape, of: Architecture, rms: bool) -> None:
    """Add a normalisation, always in one kernel."""
    shape = (tokens_outside(tape.run), of.hidden)
    (tape.fused_rmsnorm if rms else tape.layernorm)("norm", shape, eps=of.eps)
    tape.elementwise("norm", shape, "x+y", "backward")  # gradients of the two branches


def _residual(tape: Tape, of: Architecture, biased: bool) -> None:
    """Add bias, dropout and residual sum in one kernel, which also stores the mask of dropout."""
    rows, size = tokens_outside(tape.run), itemsize(tape.run.dtype)
    elements = rows * of.hidden
    mask = elements if of.dropout and tape.run.trains else 0
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


def megatron_collectives(
    run: NetworkRun, nbytes: int, products: int, ends: tuple[bool, bool]
) -> tuple[TensorCollective, ...]:
    """Return the collectives of tensor parallelism of a stage.

    The gradient of a divided product's input is summed while the gradient of its weights is computed. With
    sequence parallelism, an all-reduce is a reduce-scatter and an all-gather, and the backward pass gathers
    the input of each product again. All-gathers inside layers carry 8-bit floats if products multiply them.

    Args:
        run: How the network runs.
        nbytes: Bytes of the hidden states of all tokens.
        products: Number of divided products whose results are summed in a forward pass: two per layer.
        ends: Whether the stage has the embedding, and whether it has the head.
    """
    has_embedding, has_head = ends
    forward = _forward_collectives(run, nbytes, products)
    if has_embedding:
        forward += _unbound(run, nbytes)
    elif not run.sequence_parallel:  # each device received its part from the stage before
        forward.append(TensorCollective(nbytes=nbytes, count=1, part="stage", collective="all-gather"))
    if not run.trains:
        return tuple(forward)
    backward = list(_recomputed_collectives(run, nbytes, products))
    each = products // 2
    for part, count in (("attention qkv", each), ("mlp up", each), ("head", int(has_head))):
        if count:
            backward += _backward_collectives(run, nbytes, part, count)
    return (*forward, *backward)


_AFTER = {"attention qkv": "attention output", "mlp up": "mlp down"}
"""The product whose result is summed, for each product whose input is gathered."""


def _unbound(run: NetworkRun, nbytes: int, count: int = 1) -> list[TensorCollective]:
    """Return collectives that no product needs to run in parts."""
    kinds = ("all-gather", "reduce-scatter") if run.sequence_parallel else ("all-reduce",)
    return [
        TensorCollective(nbytes=nbytes, count=count, part="layers", collective=kind)  # type: ignore[arg-type]
        for kind in kinds
    ]


def _gathered_bytes(run: NetworkRun, nbytes: int) -> int:
    return nbytes // (1 if run.fp8 == "none" else itemsize(run.dtype))


def _forward_collectives(run: NetworkRun, nbytes: int, products: int) -> list[TensorCollective]:
    if not run.sequence_parallel:
        return _unbound(run, nbytes, products)
    found = []
    for gathered, summed in _AFTER.items():
        each = TensorCollective(nbytes=nbytes, count=products // 2, part="layers")
        found += [
            replace(
                each,
                nbytes=_gathered_bytes(run, nbytes),
                collective="all-gather",
                beside=(gathered, "forward"),
            ),
            replace(each, collective="reduce-scatter", beside=(summed, "forward")),
        ]
    return found


def _recomputed_collectives(run: NetworkRun, nbytes: int, products: int) -> list[TensorCollective]:
    if run.recompute != "full":
        return []
    count = products if run.recompute_layers is None else min(products, 2 * run.recompute_layers)
    again = _forward_collectives(run, nbytes, count) if count else []
    return [replace(each, phase="backward", part="recomputation") for each in again]


def _backward_collectives(run: NetworkRun, nbytes: int, part: str, count: int) -> list[TensorCollective]:
    found = TensorCollective(
        nbytes=nbytes, count=count, part=part, phase="backward", behind=(part, "weights")
    )
    if not run.sequence_parallel:
        return [found]
    after = _AFTER.get(part)
    gathered = replace(
        found, nbytes=_gathered_bytes(run, nbytes) if after else nbytes, collective="all-gather"
    )
    return [
        replace(found, collective="reduce-scatter"),
        replace(gathered, behind=(part, "input")),
        # the gradient of the output, for both products
        replace(gathered, behind=None, beside=(after, "input") if after else None),
    ]
