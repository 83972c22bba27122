"""BART and mBART: an encoder and a decoder with learned positions, biases, and normalisations with a shift.

Source: Lewis et al., "BART: denoising sequence-to-sequence pre-training", 2020; transformers 4.36,
`models/bart` and `models/mbart`, eager attention.
"""

from __future__ import annotations

from collections.abc import Callable

from tunebench.errors import InputError
from tunebench.workloads.networks._switch import Switch
from tunebench.workloads.networks.network_run import NetworkRun
from tunebench.workloads.networks.tape import Tape
from tunebench.workloads.networks.transformer import Heads, Matrix, share

__all__ = ["Bart"]

RESERVED_POSITIONS = 2
"""Rows of the table of positions before the first one (`BartLearnedPositionalEmbedding`)."""


class Bart(Switch):
    """BART normalises after each half of a layer; mBART before it, and again after each stack."""

    rms = False

    # -- parameters -----------------------------------------------------------------------------

    def matrices(self) -> tuple[Matrix, ...]:
        """Return the linear layers of one attention: queries, keys, values, output."""
        h = self.architecture.hidden
        qkv = Matrix(part="attention qkv", k=h, n=h, divided="n")
        return (qkv, qkv, qkv, Matrix(part="attention output", k=h, n=h, divided="k"))

    def _dense(self) -> tuple[Matrix, ...]:
        h, ffn = self.architecture.hidden, self.architecture.ffn
        return (
            Matrix(part="mlp up", k=h, n=ffn, divided="n"),
            Matrix(part="mlp down", k=ffn, n=h, divided="k"),
        )

    def _layer_parameters(self, index: int, tensor: int = 1) -> int:
        norms = 1 + self.attentions_of(index)
        products = sum(matrix.parameters(tensor) for matrix in self.matrices_of(index))
        return products + 2 * norms * self.architecture.hidden

    def _layer_tensors(self, index: int, run: NetworkRun) -> int:
        return 2 * (len(self.matrices_of(index)) + 1 + self.attentions_of(index))

    def vectors(self) -> tuple[int, int]:
        """Return the normalisation of one half of a layer."""
        return 2 * self.architecture.hidden, 2

    def before(self) -> int:
        """Return the embedding, and the positions and the normalisation ahead of each stack."""
        architecture = self.architecture
        rows = architecture.vocabulary + 2 * (architecture.positions + RESERVED_POSITIONS)
        return (rows + 4) * architecture.hidden

    def behind(self) -> int:
        """Return the last normalisation of each stack, if there is one."""
        return 4 * self.architecture.hidden * self.architecture.norm_first

    # -- operations -----------------------------------------------------------------------------

    def _embedding(self, tape: Tape) -> None:
        architecture, shape = self.architecture, self._shape(tape.run)
        for _ in range(2):  # input of the encoder and of the decoder
            tape.lookup("embedding", *shape, share(architecture.vocabulary, tape.run.tensor))
            if architecture.scaled_embedding:
                tape.pointwise("embedding", shape, "x*32", ("x*32",))
            tape.lookup("embedding", *shape, architecture.positions)
            tape.residual("embedding", shape)
            tape.layernorm("norm", shape, eps=architecture.eps)
            tape.dropout("embedding", shape, architecture.dropout)

    def _add_layer(self, tape: Tape, index: int) -> None:
        if tape.run.kernels == "megatron":
            raise InputError(
                f"{self.name}: layers of {self.architecture.family} are known for the stacks eager and "
                f"compiled, got stack={tape.run.stack}"
            )
        decodes = index >= self.architecture.layers
        self._attend(tape, causal=decodes)
        if decodes:
            self._attend(tape, causal=False)  # to the encoder's output
        self._half(tape, self._products)

    def _half(self, tape: Tape, add: Callable[[Tape], None]) -> None:
        """Add one half of a layer, with its residual sum and its normalisation before or after it."""
        if self.architecture.norm_first:
            self._norm(tape)
        add(tape)
        self._added(tape)
        if not self.architecture.norm_first:
            self._norm(tape)

    def _products(self, tape: Tape) -> None:
        self._expert(tape, self._shape(tape.run)[0])

    def _attend(self, tape: Tape, *, causal: bool) -> None:
        """Add self-attention or attention to the encoder's output; both have the same sequence length."""
        self._half(tape, lambda half: self._heads(half, causal=causal))

    def _heads(self, tape: Tape, *, causal: bool) -> None:
        run, architecture, (tokens, _) = tape.run, self.architecture, self._shape(tape.run)
        *qkv, output = self.matrices()
        for matrix in qkv:
            matrix.on(tape, tokens)
        heads = architecture.heads // run.tensor
        if not run.compiled:
            tape.pointwise("attention qkv", (tokens, heads * architecture.head_dim), "x*0.125", ("x*0.125",))
        Heads(
            batch=run.batch,
            heads=heads,
            heads_k=heads,
            head_dim=architecture.head_dim,
            seq_q=run.seq,
            seq_k=run.seq,
            causal=causal,
            before=("x+y",) if causal else (),  # the mask is a tensor
            backward=(),
            reordered=True,
            dropout=architecture.attention_dropout,
        ).on(tape)
        for _ in range(2):  # sum the gradients of the input of three products
            tape.elementwise("attention qkv", self._shape(run), "x+y", "backward")
        output.on(tape, tokens)

    def _head(self, tape: Tape) -> None:
        run, architecture, (tokens, _) = tape.run, self.architecture, self._shape(tape.run)
        for _ in range(2 * architecture.norm_first):  # output of the encoder and of the decoder
            self._norm(tape)
        vocabulary = share(architecture.vocabulary, run.tensor)
        tape.linear("head", tokens, vocabulary, architecture.hidden, bias=False)
        tape.pointwise("head", (tokens, vocabulary), "x+row")  # a constant bias, of zeros
        tape.loss("loss", tokens, vocabulary)
