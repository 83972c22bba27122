"""Text that a bias or a mask adds to the CUDA kernels of attention.

Kernels contain @WORDS@ in the places of that text. Words that a workload does not need become empty or plain
text, so that the source of attention without a bias or window does not depend on them.
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
    """Return the text of the header for the mask, and of the header for biases if the workload has one.

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
    """Return a kernel with the text for the bias and the mask of a workload in place of its @WORDS@.

    Args:
        source: The kernel, with @PARAMETERS@, @BIASES@ and the words in `bias`, `window` and `plain`.
        workload: The workload.
        bias: Text of each word if the workload has a bias.
        window: Text of each word if the workload has no `has_simple_mask`.
        plain: Text of each word otherwise; default "".
    """
    words = dict.fromkeys((*bias, *window), "") | plain | {"PARAMETERS": "", "BIASES": ""}
    if workload.has_bias:
        words |= {"PARAMETERS": _PARAMETERS, "BIASES": _BIASES, **bias}
    if not workload.has_simple_mask:
        words |= window
    return filled(source, **words)


def bias_vector(workload: Attention) -> int:
    """Return the number of biases that a thread loads at once: 2 if rows of the bias are aligned to 2."""
    return 2 if workload.seq_k % 2 == 0 else 1


def arguments(workload: Attention) -> tuple[Argument, ...]:
    """Return the arguments for @PARAMETERS@: the bias, its strides (0: broadcast), and the heads of q."""
    if not workload.has_bias:
        return ()
    *_, (_, heads, queries, keys) = (tensor.shape for tensor in workload.inputs() if tensor.name == "bias")
    strides = {"b": heads * queries * keys, "h": queries * keys, "q": keys}
    of_axes = (stride if axis in workload.bias else 0 for axis, stride in strides.items())
    return ("bias", *(Scalar("long long", step) for step in of_axes), Scalar("int", workload.heads))
