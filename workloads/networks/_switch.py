"""T5's encoder and decoder, and Switch transformers with a mixture of experts in some feed-forward layers.

Source: Fedus, Zoph and Shazeer, "Switch Transformers", 2021; transformers 4.36, `models/t5` and
`models/switch_transformers`, eager attention;
Raffel et al., "Exploring the limits of transfer learning", 2020.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from tunebench.dtype import itemsize
from tunebench.errors import InputError
from tunebench.workloads.networks.architecture import Architecture
from tunebench.workloads.networks.megatron import add_megatron_layer
from tunebench.workloads.networks.network_run import NetworkRun, TensorCollective
from tunebench.workloads.networks.tape import Tape
from tunebench.workloads.networks.transformer import Heads, Matrix, Transformer, share

__all__ = ["Switch"]

ROUTING_KERNELS = 12
"""Number of small routing kernels of a layer: maximum, one-hot, running count, comparison, product."""

EXPERT_KERNELS = 8
"""Number of small kernels per expert in addition to those on its tokens: selection, count and positions of
the tokens, before and after its layers. The host waits for their results, so they run in an empty queue.
"""

BUCKET_BYTES = 150
"""Bytes moved per pair of positions to find its bucket: about fifteen kernels on 64-bit integers."""


class Switch(Transformer):
    """An encoder and a decoder; `layers` counts the encoder's layers, then the decoder's.

    The expert of each token is data. The operations assume that tokens spread evenly, up to the capacity of
    an expert per sequence; tokens above the capacity skip the layer. HuggingFace's code runs the experts one
    by one.
    """

    rms = True

    def __init__(self, name: str, architecture: Architecture) -> None:
        super().__init__(name, architecture)
        self.layers = architecture.layers + architecture.decoder_layers

    def with_ends_apart(self) -> Transformer:
        """Raise: a decoder also needs the output of the encoder, which no stage without layers passes on."""
        return super(Transformer, self).with_ends_apart()  # type: ignore[return-value]

    def expert_tokens(self, run: NetworkRun) -> int:
        """Return the number of tokens per expert."""
        architecture = self.architecture
        return run.batch * min(architecture.capacity, share(run.seq, architecture.experts))

    # -- parameters -----------------------------------------------------------------------------

    def matrices(self) -> tuple[Matrix, ...]:
        """Return the linear layers of one attention: queries, keys, values, output."""
        h, inner = self.architecture.hidden, self.architecture.inner
        qkv = Matrix(part="attention qkv", k=h, n=inner, divided="n", bias=False)
        return (qkv, qkv, qkv, Matrix(part="attention output", k=inner, n=h, divided="k", bias=False))

    def _dense(self) -> tuple[Matrix, ...]:
        """Return the linear layers of a feed-forward layer, or of an expert: two if it is gated, and one."""
        h, ffn = self.architecture.hidden, self.architecture.ffn
        up = Matrix(part="mlp up", k=h, n=ffn, divided="n", bias=False)
        down = Matrix(part="mlp down", k=ffn, n=h, divided="k", bias=False)
        return (*[up] * (1 + self.architecture.gated), down)

    def is_sparse(self, index: int) -> bool:
        """Return whether a layer, counted from the encoder's first, has experts."""
        architecture = self.architecture
        decodes = index >= architecture.layers
        layers = architecture.decoder_layers if decodes else architecture.layers
        sparse = architecture.sparse_decoders if decodes else architecture.sparse_encoders
        if not sparse or not architecture.experts:
            return False
        step = layers // sparse
        return step <= 1 or (index - architecture.layers * decodes) % step == 1

    def of_layer(self, index: int) -> Transformer:
        """Return this network: all its layers have equal sizes, and their kind follows from the index."""
        return self

    def attentions_of(self, index: int) -> int:
        """Return the number of attentions of a layer: 2 in the decoder."""
        return 1 + (index >= self.architecture.layers)

    def matrices_of(self, index: int) -> tuple[Matrix, ...]:
        """Return the linear layers of a layer that all tokens see: none of its experts."""
        return (
            *self.matrices() * self.attentions_of(index),
            *(() if self.is_sparse(index) else self._dense()),
        )

    def _layer_parameters(self, index: int, tensor: int = 1) -> int:
        architecture = self.architecture
        norms = (1 + self.attentions_of(index)) * architecture.hidden
        dense = sum(matrix.parameters(tensor) for matrix in self.matrices_of(index))
        if not self.is_sparse(index):
            return norms + dense
        per_expert = sum(matrix.parameters(tensor) for matrix in self._dense())
        return norms + dense + architecture.experts * (per_expert + architecture.hidden)

    def _divided_products(self, index: int, run: NetworkRun) -> int:
        return 1 + self.attentions_of(index)

    def _layer_tensors(self, index: int, run: NetworkRun) -> int:
        routed = len(self._dense()) * self.architecture.experts + 1 if self.is_sparse(index) else 0
        return len(self.matrices_of(index)) + 1 + self.attentions_of(index) + routed

    def collectives(self, run: NetworkRun) -> tuple[TensorCollective, ...]:
        """Return the collectives of tensor parallelism (see `Network.collectives`).

        The decoder embeds tokens of its own, and each of its layers adds to the gradient of the encoder's
        output.
        """
        if run.tensor == 1:
            return ()
        first, last = self.stage(run)
        nbytes = run.batch * run.seq * self.architecture.hidden * itemsize(run.dtype)
        summed = TensorCollective(nbytes=nbytes, count=1, part="layers")
        decoders = last - max(first, self.architecture.layers)
        return (
            *super().collectives(run),
            *((summed,) if first == 0 else ()),
            *((replace(summed, count=decoders, phase="backward"),) if run.trains and decoders > 0 else ()),
        )

    def vectors(self) -> tuple[int, int]:
        """Return the normalisation of one half of a layer."""
        return self.architecture.hidden, 1

    def before(self) -> int:
        """Return the embedding."""
        return self.architecture.vocabulary * self.architecture.hidden

    def behind(self) -> int:
        """Return the last normalisations and the relative biases of both stacks."""
        return 2 * (self.architecture.hidden + self.architecture.buckets * self.architecture.heads)

    def kind_of_layer(self, index: int) -> int:
        """Return the index of the first layer with the same operations."""
        return next(i for i in range(index + 1) if self._kind(i) == self._kind(index))

    def _kind(self, index: int) -> tuple[int, bool]:
        return (self.attentions_of(index), self.is_sparse(index))

    def boundary_elements(self, run: NetworkRun) -> int:
        """Return the elements of all hidden states; within the decoder also those of the encoder's output."""
        _, last = self.stage(run)
        return run.batch * run.seq * self.architecture.hidden * (1 + (last > self.architecture.layers))

    # -- operations -----------------------------------------------------------------------------

    def _embedding(self, tape: Tape) -> None:
        for _ in range(2):  # input of the encoder and of the decoder
            vocabulary = share(self.architecture.vocabulary, tape.run.tensor)
            tape.lookup("embedding", *self._shape(tape.run), vocabulary)
            tape.dropout("embedding", self._shape(tape.run), self.architecture.dropout)
            self._bias(tape)  # beside the embedding, so that all layers of a stack are equal

    def _add_layer(self, tape: Tape, index: int) -> None:
        if tape.run.kernels == "megatron":
            if self.is_sparse(index):
                raise InputError(
                    f"{self.name}: experts of a Switch transformer are known for the stacks eager and "
                    f"compiled, got stack={tape.run.stack}"
                )
            architecture, decodes = self.architecture, index >= self.architecture.layers
            add_megatron_layer(
                tape, architecture, gated=architecture.gated, rms=True, biased=False, decodes=decodes
            )
            return
        self._attention(tape, "looked up")
        if index >= self.architecture.layers:
            self._attention(tape, "in order")  # attention to the encoder's output, with a bias of zeros
        self._feed_forward(tape, self.is_sparse(index))

    def _bias(self, tape: Tape) -> None:
        """Add the look-up of relative position biases and the mask; once for each stack."""
        run = tape.run
        heads = self.architecture.heads // run.tensor
        tape.moved("attention bias", BUCKET_BYTES * run.seq * run.seq)
        tape.lookup("attention bias", run.seq * run.seq, heads, self.architecture.buckets)
        tape.elementwise("attention bias", (run.batch * heads * run.seq, run.seq), "x+row")

    def _attention(self, tape: Tape, biased: Literal["looked up", "in order"]) -> None:
        """Add self-attention or attention to the encoder's output; both have the same sequence length."""
        run, architecture, tokens = tape.run, self.architecture, tape.run.batch * tape.run.seq
        *qkv, output = self.matrices()
        self._norm(tape)
        for matrix in qkv:
            matrix.on(tape, tokens)
        heads = architecture.heads // run.tensor
        Heads(
            batch=run.batch,
            heads=heads,
            heads_k=heads,
            head_dim=architecture.head_dim,
            seq_q=run.seq,
            seq_k=run.seq,
            causal=False,
            biased=biased,
            wide=True,
            before=(),
            backward=("x+y",),
            dropout=architecture.attention_dropout,
        ).on(tape)
        for _ in range(2):
            tape.elementwise("attention qkv", self._shape(run), "x+y", "backward")
        output.on(tape, tokens)
        self._added(tape)

    def _feed_forward(self, tape: Tape, sparse: bool) -> None:
        self._norm(tape)
        if sparse:
            self._experts(tape)
        else:
            self._expert(tape, tape.run.batch * tape.run.seq)
        self._added(tape)

    def _expert(self, tape: Tape, tokens: int) -> None:
        *ups, down = self._dense()
        for up in ups:
            up.on(tape, tokens)
        inner = (tokens, self.architecture.ffn // tape.run.tensor)
        tape.activation("mlp activation", inner, self.architecture.activation)
        if self.architecture.gated:
            tape.pointwise("mlp activation", inner, "x*y", ("dy*x", "dy*y"))
        tape.dropout("mlp activation", inner, self.architecture.dropout)
        down.on(tape, tokens)

    def _experts(self, tape: Tape) -> None:
        """Add the router, then each expert: gather its tokens, apply its layers, scatter the results."""
        run, architecture, shape = tape.run, self.architecture, self._shape(tape.run)
        tape.linear("router", shape[0], architecture.experts, architecture.hidden, bias=False)
        tape.softmax("router", (shape[0], architecture.experts))
        for _ in range(ROUTING_KERNELS):
            tape.elementwise("router", (shape[0], architecture.experts), "x")
        tape.copy("router", shape)
        taken = (self.expert_tokens(run), architecture.hidden)
        for _ in range(architecture.experts):
            for _ in range(EXPERT_KERNELS):
                tape.elementwise("router", (shape[0], architecture.experts), "x", alone=True)
            tape.elementwise("router", taken, "x", alone=True)
            tape.elementwise("router", taken, "x", "backward")
            self._expert(tape, taken[0])
            tape.elementwise("router", taken, "x", alone=True)
            tape.elementwise("router", taken, "x", "backward")
        tape.pointwise("router", shape, "x*row", ("dy*row", "dy*x"))

    def _head(self, tape: Tape) -> None:
        run, architecture = tape.run, self.architecture
        for _ in range(2):  # output of the encoder and of the decoder
            self._norm(tape)
        if architecture.tied:
            tape.pointwise("head", self._shape(run), "x*0.03", ("x*0.03",))
        vocabulary = share(architecture.vocabulary, run.tensor)
        tape.linear("head", run.batch * run.seq, vocabulary, architecture.hidden, bias=False)
        tape.loss("loss", run.batch * run.seq, vocabulary)
