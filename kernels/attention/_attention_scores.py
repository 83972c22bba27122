"""Biases and masks of the scores in the CUDA variants of attention, as text of their kernels.

Kernels have @WORDS@ where a bias or a mask adds text; without them, their source is that of plain attention.
"""

from __future__ import annotations

from collections.abc import Mapping

from tunebench.kernels.common.cuda import flag, helpers
from tunebench.kernels.common.expression import filled
from tunebench.variant import Argument, Scalar
from tunebench.workloads.operators.attention import Attention

__all__ = ["arguments", "bias_vector", "header", "with_scores"]

_PARAMETERS = """,
    const typename C::In* __restrict__ bias, i64 bias_of_batch, i64 bias_of_head, i64 bias_of_query,
    int heads"""

_BIASES = """
  const Bias<typename C::In> biases = {bias, bias_of_batch, bias_of_head, bias_of_query, heads};"""


def header(workload: Attention, plain: str, windowed: str) -> str:
    """Return the header of the mask, and that of biases if there is one.

    Args:
        workload: The workload.
        plain: Name of the header for masks with ``align=last`` and without a window.
        windowed: Name of the header for other masks.
    """
    biases = helpers("attention_bias") if workload.has_bias else ""
    if workload.has_simple_mask:
        return helpers(plain) + biases
    constants = (
        f"constexpr bool ALIGNED_FIRST = {flag(workload.align == 'first')};\n"
        f"constexpr int WINDOW = {workload.window};\n"
    )
    return constants + helpers(windowed) + biases


def with_scores(
    source: str, workload: Attention, bias: Mapping[str, str], window: Mapping[str, str], **plain: str
) -> str:
    """Return a kernel whose scores have the bias and window of the workload.

    Args:
        source: The kernel, with @PARAMETERS@, @BIASES@ and the words of the other arguments.
        workload: The workload.
        bias: Text in place of words if there is a bias.
        window: Text in place of words if there is a window, or another mask than the simple ones.
        plain: Text in place of words otherwise; default "".
    """
    words = dict.fromkeys((*bias, *window), "") | plain | {"PARAMETERS": "", "BIASES": ""}
    if workload.has_bias:
        words |= {"PARAMETERS": _PARAMETERS, "BIASES": _BIASES, **bias}
    if not workload.has_simple_mask:
        words |= window
    return filled(source, **words)


def bias_vector(workload: Attention) -> int:
    """Return how many biases of neighbouring keys one access reads: lines of biases are aligned to them."""
    return 2 if workload.seq_k % 2 == 0 else 1


def arguments(workload: Attention) -> tuple[Argument, ...]:
    """Return the arguments of @PARAMETERS@: the bias, its strides, and the heads of q."""
    if not workload.has_bias:
        return ()
    *_, (_, heads, queries, keys) = (tensor.shape for tensor in workload.inputs() if tensor.name == "bias")
    strides = {"b": heads * queries * keys, "h": queries * keys, "q": keys}
    of_axes = (stride if axis in workload.bias else 0 for axis, stride in strides.items())
    return ("bias", *(Scalar("long long", step) for step in of_axes), Scalar("int", workload.heads))
