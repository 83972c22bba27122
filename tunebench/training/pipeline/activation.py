"""Activations that a transformer keeps between the forward and the backward pass, per layer and device.

Elements per token of a layer of width h, a heads, inner width f and sequences of length s, as autograd saves
them: inputs of two normalisations and of the products after them (4 h); queries, keys and values (3 h);
softmax, its dropout, and a mask of it (a s each); inputs of the output product (h) and of the second product
of the feed-forward layer (f), and of its activation (f; a gated layer keeps 4 f in all); two masks of dropout
(h each). For numbers of two bytes, masks of one byte and f = 4 h that is ``s b h (34 + 5 a s / h)`` bytes.

Tensor parallelism by t divides all but the inputs of normalisations, of the products after them, and the two
masks: ``s b h (10 + 24/t + 5 a s / (h t))``. Sequence parallelism divides those too. Selective recomputation
and flash attention keep nothing of size a s. Full recomputation keeps the input of each layer.

Multi-head latent attention also keeps the inputs of the normalisations of its narrow vectors and of the
products after them; four normalisations keep 2 h more. Soft caps and sinks keep nothing with flash attention.

A layer of a decoder behind an encoder (T5) has a second attention with its normalisation; activations are
those of the mean layer of both stacks. Relative positions add a bias to the scores, which flash attention has
no input for: the scores are kept.

Recomputation by operators keeps the results of attention and of every second product (torchtitan).

In a layer with experts, the feed-forward layer has a row for each expert of a token, and keeps its input
(h) and 3 f per row, as Megatron-LM's grouped products and fused activation do.

Source: Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022
(arXiv 2205.05198), sections 4 and 5; bytes kept for the gradient of the weights: Qi et al., "Zero bubble
pipeline parallelism", 2023, which counts 32 s b h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from tunebench.dtype import itemsize
from tunebench.errors import InputError, UnknownName
from tunebench.workloads.networks import Network
from tunebench.workloads.networks.architecture import Architecture
from tunebench.workloads.networks.network_run import DType, Recompute
from tunebench.workloads.networks.transformer import Transformer

__all__ = ["LOGIT_BYTES", "ActivationMemory", "architecture_of"]

MASK_BYTES = 1

FP8_BYTES = 1
ROUTER_TENSORS, ROUTER_BYTES = 3, 4
"""Tensors of a router with a number in f32 for each token and expert: logits, and two sets of scores."""

LOG_SUM_BYTES = 4
"""Bytes of the logarithm of a sum of exponentials, which flash attention keeps for each head and token."""

LOGIT_BYTES = 4
"""Bytes of a logit in the loss, which is computed in f32."""


def architecture_of(network: Network) -> Architecture:
    """Return the sizes of a transformer's layers.

    Raises:
        InputError: if the network is no transformer, or its activations are not known.
    """
    if isinstance(network, Transformer) and network.architecture.family == "switch_transformers":
        raise InputError(
            f"activations of {network.name} are not known, whose experts have a capacity: expected another "
            "transformer, such as t5; give the costs of the stages (plan pipeline), or the module as "
            "FILE.py:FUNCTION (plan cluster)"
        )
    if not isinstance(network, Transformer):
        raise InputError(
            f"activations of {network.name} are not known: expected a transformer, such as gpt2, bert, vit, "
            "llama, mixtral or t5; for other models give the costs of the stages (plan pipeline), or the "
            "module as FILE.py:FUNCTION (plan cluster)"
        )
    return network.architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationMemory:
    """How the activations of a transformer are kept on each device.

    Attributes:
        architecture: Sizes of the transformer.
        batch: Sequences in a micro-batch.
        seq: Tokens in a sequence.
        dtype: Dtype of activations.
        tensor: Degree of tensor parallelism.
        sequence_parallel: Whether tokens are divided where heads and inner widths are not.
        recompute: Activation recomputation in the backward pass.
        flash_attention: Whether attention keeps nothing of the size of its scores.
        fp8: Whether linear layers keep their inputs in 8 bits. The input of the output product is also the
            result of attention, which is kept in `dtype` besides.
        expert_tensor: Tensor-parallel size of each expert: `tensor` or 1.
        expert_load: Tokens of the busiest device of expert parallelism, relative to the mean.
    """

    architecture: Architecture
    batch: int = 1
    seq: int
    dtype: DType = "f16"
    tensor: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    flash_attention: bool = False
    fp8: bool = False
    expert_tensor: int = 1
    expert_load: float = 1.0

    def __post_init__(self) -> None:
        if self.recompute not in get_args(Recompute):
            raise UnknownName("recomputation", self.recompute, get_args(Recompute))
        if min(self.batch, self.seq, self.tensor) < 1:
            raise InputError(f"batch, seq and tensor must be at least 1, got {self}")

    @property
    def layer_bytes(self) -> int:
        """Bytes that a layer keeps for each micro-batch."""
        if self.recompute == "experts":
            return self.computed_bytes - self.expert_bytes
        if self.recompute == "operators":
            return self._kept_operators
        return self.input_bytes if self.recompute == "full" else self.computed_bytes

    @property
    def computed_bytes(self) -> int:
        """Bytes of a layer's activations once its forward pass has run, or has run again."""
        size, architecture = itemsize(self.dtype), self.architecture
        mask = MASK_BYTES if architecture.dropout else 0
        # Tensor parallelism divides `divided`, and only sequence parallelism also `whole`. The module's
        # docstring has the terms.
        halves = 1 + architecture.attentions
        whole = (2 * halves + architecture.norms - 2) * size * architecture.hidden
        whole += halves * mask * architecture.hidden
        whole += 2 * size * architecture.latent
        divided = size * (self._attention + self._feed_forward)
        if self.fp8:
            whole -= halves * (size - FP8_BYTES) * architecture.hidden
            divided += FP8_BYTES * architecture.attentions * architecture.inner_out
            divided -= (size - FP8_BYTES) * self._width
        scores = 0 if self.recompute == "selective" else self._scores
        return self._tokens(whole, divided + scores) + self.expert_bytes

    @property
    def expert_bytes(self) -> int:
        """Bytes of the router and the experts, with a row for each expert of a token.

        Megatron-LM keeps the input of an expert, its two products, and their product after the activation. A
        device that shares an expert has the rows of all that share it, and its part of the products.
        """
        size, architecture = itemsize(self.dtype), self.architecture
        if not architecture.experts_per_token:
            return 0
        input_size = FP8_BYTES if self.fp8 else size
        # Devices that share experts gather the rows of all of them, and divide only the inner width.
        row = (
            input_size * self.expert_tensor * architecture.hidden + (2 * size + input_size) * architecture.ffn
        )
        rows = architecture.experts_per_token * self.expert_load
        return self._tokens(ROUTER_TENSORS * ROUTER_BYTES * architecture.experts + rows * row, 0)

    @property
    def recomputed_bytes(self) -> int:
        """Bytes of the recomputed activations of a layer; one layer at a time has them."""
        if self.recompute == "selective":
            return self._tokens(0, self._scores)
        if self.recompute == "experts":
            return self.expert_bytes
        if self.recompute == "operators":
            return max(0, self.computed_bytes - self._kept_operators)
        return self.computed_bytes if self.recompute == "full" else 0

    @property
    def _kept_operators(self) -> int:
        """Bytes that recomputation by operators keeps: the input, and results of attention and products.

        Those of queries, values, the first product of the feed-forward part and its last one. With tensor
        parallelism, the last one is a part of a sum, of the width of a layer on each device, and the sums
        after attention and the feed-forward part are kept too.
        """
        size, architecture = itemsize(self.dtype), self.architecture
        divided = architecture.inner + architecture.inner_v + architecture.inner_out + self._width
        sums, parts = (2, 1) if self.tensor > 1 else (1, 0)
        kept = self._tokens((1 + sums) * size * architecture.hidden, size * divided)
        kept += self._tokens(0, LOG_SUM_BYTES * architecture.heads)
        return kept + parts * self.batch * self.seq * size * architecture.hidden

    @property
    def backward_bytes(self) -> int:
        """Bytes of gradients of activations that exist at once in the backward pass of a layer.

        The gradient of a layer's output, that of a dropout or normalisation, and that of the inner width; or,
        if they are larger, two of the size of the scores, when the feed-forward layer is free.
        """
        size, architecture = itemsize(self.dtype), self.architecture
        inner = self._tokens(0, size * (2 if architecture.gated else 1) * self._width)
        scores = 0
        if not self.flash_attention:
            freed = self._tokens(0, size * self._feed_forward)
            scores = self._tokens(0, 2 * size * architecture.heads * self.seq) - freed
        return 2 * self.input_bytes + max(inner, scores)

    @property
    def weight_gradient_bytes(self) -> int:
        """Bytes that a layer keeps from the gradient of its input to that of its weights.

        Inputs of the products, and gradients of their results.
        """
        size, architecture = itemsize(self.dtype), self.architecture
        inner_tensors = 3 if architecture.gated else 2
        divided = self._attention + inner_tensors * self._width
        whole: float = 4 * architecture.hidden + 2 * architecture.latent
        if architecture.experts_per_token:
            rows = architecture.experts_per_token * self.expert_load
            whole += rows * (2 * self.expert_tensor * architecture.hidden + inner_tensors * architecture.ffn)
        return self._tokens(size * whole, size * divided)

    @property
    def input_bytes(self) -> int:
        """Bytes of the input of a layer."""
        return self._tokens(itemsize(self.dtype) * self.architecture.hidden, 0)

    @property
    def head_bytes(self) -> int:
        """Bytes of the last normalisation, the output product and logits in f32."""
        size, architecture = itemsize(self.dtype), self.architecture
        if not architecture.patch:
            return self._tokens(2 * size * architecture.hidden, LOGIT_BYTES * architecture.vocabulary)
        class_token = size * architecture.hidden + LOGIT_BYTES * architecture.vocabulary
        return self._tokens(size * architecture.hidden, 0) + self.batch * class_token

    @property
    def head_gradient_bytes(self) -> int:
        """Bytes of the head that the gradient of its weights needs."""
        size, architecture = itemsize(self.dtype), self.architecture
        if architecture.patch:
            return self.batch * size * (architecture.hidden + architecture.vocabulary)
        return self._tokens(size * architecture.hidden, size * architecture.vocabulary)

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the mask of dropout after the embedding, and of the patches of images.

        With an encoder and a decoder: of both masks, of the encoder's output, and of both biases of scores.
        """
        architecture = self.architecture
        masked = architecture.dropout and architecture.family != "opt"
        pixels = architecture.image**2 * architecture.channels
        patches = self.batch * pixels * itemsize(self.dtype)
        mask = MASK_BYTES * architecture.hidden if masked else 0
        if not architecture.decoder_layers:
            return self._tokens(mask, 0) + patches
        size = itemsize(self.dtype)
        return self._tokens(2 * mask + size * architecture.hidden, 2 * size * architecture.heads * self.seq)

    @property
    def _attention(self) -> float:
        """Elements per token of queries, keys, values and results of the attentions of a layer."""
        architecture = self.architecture
        widths = architecture.inner + architecture.inner_k + architecture.inner_v + architecture.inner_out
        return architecture.attentions * widths

    @property
    def _feed_forward(self) -> int:
        """Elements per token inside the feed-forward layer: a gated one keeps both factors of the product."""
        return (4 if self.architecture.gated else 2) * self._width

    @property
    def _width(self) -> int:
        """Inner width of the feed-forward layer that all tokens see."""
        architecture = self.architecture
        return architecture.shared_ffn if architecture.experts_per_token else architecture.ffn

    @property
    def _scores(self) -> float:
        """Bytes per token that have the size of the scores of the attentions of a layer."""
        if self.flash_attention:
            return 0
        size, architecture = itemsize(self.dtype), self.architecture
        score_bytes = 2 * size + MASK_BYTES if architecture.attention_dropout else size
        return architecture.attentions * score_bytes * architecture.heads * self.seq

    def _tokens(self, whole: float, divided: float) -> int:
        """Return the bytes of all tokens, given those per token that are on each device or are divided."""
        per_token = whole / (self.tensor if self.sequence_parallel else 1) + divided / self.tensor
        return round(self.batch * self.seq * per_token)
