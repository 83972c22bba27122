"""Families of transformers: layers and the parts around them, as in HuggingFace's model code.

Source: transformers 4.36, `models/gpt2`, `models/opt`, `models/bert` and `models/llama`, eager attention;
the kernels of autograd were counted by a dispatch mode on the same code.
"""

from __future__ import annotations

from tunebench.errors import InputError
from tunebench.workloads.networks.architecture import Architecture
from tunebench.workloads.networks.megatron import add_megatron_layer, gate_expression
from tunebench.workloads.networks.network_run import NetworkRun
from tunebench.workloads.networks.tape import Tape
from tunebench.workloads.networks.transformer import Heads, Matrix, Transformer, joined, share

__all__ = ["Bert", "Decoder", "Gpt2", "Llama", "Opt"]

MASKED_MAXIMUM = ("x*0.5", "x*row", "dy*x", "x*row", "x*row")
"""Kernels of the gradient of max(scores, constant): half where both are equal, 0 where the score is less."""


CAP = ("x*0.02", "tanh(x)", "x*50")
CAP_GRADIENT = ("x*50", "dy*(1-y*y)", "x*0.02")
"""Kernels of a bound by tanh, and of its gradient."""


class Decoder(Transformer):
    """A stack of layers followed by the output matrix, tied to the embedding or not."""

    def matrices(self) -> tuple[Matrix, ...]:
        """Return the linear layers of a layer."""
        h, inner, ffn = self.architecture.hidden, self.architecture.inner, self.architecture.ffn
        return (
            *(Matrix(part="attention qkv", k=h, n=inner, divided="n") for _ in range(3)),
            Matrix(part="attention output", k=inner, n=h, divided="k"),
            Matrix(part="mlp up", k=h, n=ffn, divided="n"),
            Matrix(part="mlp down", k=ffn, n=h, divided="k"),
        )

    def vectors(self) -> tuple[int, int]:
        """Return weights and biases of the two normalisations."""
        return 4 * self.architecture.hidden, 4

    def _inner(self, run: NetworkRun) -> tuple[int, int]:
        return (run.batch * run.seq, self.architecture.ffn // run.tensor)

    def _heads(self, run: NetworkRun, before: tuple[str, ...], backward: tuple[str, ...]) -> Heads:
        architecture = self.architecture
        decodes = run.cached is not None and run.seq == 1  # the token sees all keys of its window
        keys = min(run.keys, architecture.window or run.keys) if decodes else run.keys
        return Heads(
            batch=run.batch,
            heads=architecture.heads // run.tensor,
            heads_k=architecture.heads_k // run.tensor,
            seq_q=run.seq,
            seq_k=keys,
            head_dim=architecture.head_dim,
            causal=architecture.causal and not decodes,
            before=before,
            backward=backward,
            reordered=architecture.family == "opt",
            wide=architecture.gated or architecture.family == "opt",
            matched=architecture.family
            == "bert",  # torch.compile's patterns match its division, sum and softmax
            dropout=architecture.attention_dropout,
            value_dim=architecture.value_dim,
            window=0 if decodes else architecture.window,
            sinks=architecture.sinks,
        )

    def _attend(self, tape: Tape, output: Matrix, before: tuple[str, ...], backward: tuple[str, ...]) -> None:
        """Add attention after three products of the same input, and the rest of its half of the layer."""
        architecture = self.architecture
        self._cached(tape)
        if architecture.score_cap:
            before, backward = (before[0], *CAP, *before[1:]), (*CAP_GRADIENT, *backward)
        self._heads(tape.run, before, backward).on(tape)
        for _ in range(0 if architecture.latent else 2):  # sum the gradients of the input of three products
            tape.elementwise("attention qkv", self._shape(tape.run), "x+y", "backward")
        output.on(tape, self._shape(tape.run)[0])
        if architecture.norms == 4:
            self._norm(tape)
        self._added(tape)

    def _cached(self, tape: Tape) -> None:
        """Add the writes to the cache: of new keys and values, or in eager PyTorch of the whole cache.

        Source: transformers 4.57, `cache_utils.py` (`DynamicLayer.update` concatenates).
        """
        run, architecture = tape.run, self.architecture
        if run.cached is None:
            return
        tokens = run.batch * (run.seq if run.compiled else min(run.keys, architecture.window or run.keys))
        widths = (architecture.inner_k // run.tensor, architecture.inner_v // run.tensor)
        for width in (sum(widths),) if run.compiled else widths:
            tape.copy("attention cache", (tokens, width))

    def _feed_forward(self, tape: Tape, up: Matrix, down: Matrix) -> None:
        """Add the second half of a layer, from its normalisation to its residual sum."""
        tokens = self._shape(tape.run)[0]
        self._norm(tape)
        up.on(tape, tokens)
        tape.activation("mlp activation", self._inner(tape.run), self.architecture.activation)
        down.on(tape, tokens)
        self._added(tape)

    def _output_layer(self, tape: Tape) -> None:
        """Add the product with the vocabulary's matrix, and the loss."""
        run, architecture = tape.run, self.architecture
        vocabulary = share(architecture.vocabulary, run.tensor)
        tokens = run.batch * (run.seq if run.cached is None else 1)
        tape.linear("head", tokens, vocabulary, architecture.embedding, bias=architecture.head_bias)
        if architecture.logit_cap:
            cap, gradient = (("tanh(x)",), ("dy*(1-y*y)",)) if run.compiled else (CAP, CAP_GRADIENT)
            for step, back in zip(cap, gradient, strict=True):
                tape.pointwise("head", (tokens, vocabulary), step, (back,))
        tape.loss("loss", tokens, vocabulary)
        if architecture.tied and run.trains:  # gradients of both uses of the tied matrix are added
            tape.elementwise("head", (vocabulary, architecture.embedding), "x+y", "backward")


class Gpt2(Decoder):
    """GPT-2, also with the sizes of GPT-3: pre-normalisation and learned positions."""

    def matrices(self) -> tuple[Matrix, ...]:
        """Return the linear layers of a layer, stored (in, out)."""
        h, inner, ffn = self.architecture.hidden, self.architecture.inner, self.architecture.ffn
        return (
            Matrix(part="attention qkv", k=h, n=3 * inner, divided="n", weight="in,out"),
            Matrix(part="attention output", k=inner, n=h, divided="k", weight="in,out"),
            Matrix(part="mlp up", k=h, n=ffn, divided="n", weight="in,out"),
            Matrix(part="mlp down", k=ffn, n=h, divided="k", weight="in,out"),
        )

    def before(self) -> int:
        """Return the embeddings of tokens and positions."""
        return (self.architecture.vocabulary + self.architecture.positions) * self.architecture.hidden

    def behind(self) -> int:
        """Return the last normalisation."""
        return 2 * self.architecture.hidden

    def _embedding(self, tape: Tape) -> None:
        architecture, shape = self.architecture, self._shape(tape.run)
        tape.lookup("embedding", *shape, share(architecture.vocabulary, tape.run.tensor))
        tape.pointwise("embedding", shape, "x+row")  # positions are the same for all sequences
        tape.dropout("embedding", shape, architecture.dropout)

    def _add_layer(self, tape: Tape, index: int) -> None:
        run, tokens = tape.run, tape.run.batch * tape.run.seq
        if run.kernels == "megatron":
            add_megatron_layer(tape, self.architecture, gated=False, rms=False, biased=True)
            return
        qkv, output, up, down = self.matrices()
        self._norm(tape)
        qkv.on(tape, tokens)
        self._cached(tape)
        self._heads(run, ("x*0.125", "max(x,row)"), ("dy*row", "x*0.125")).on(tape)
        tape.copy("attention copies", (tokens, qkv.n // run.tensor), "backward")  # concatenation
        output.on(tape, tokens)
        self._added(tape)
        self._feed_forward(tape, up, down)

    def _head(self, tape: Tape) -> None:
        self._norm(tape)
        self._output_layer(tape)


class Opt(Decoder):
    """OPT: like GPT-2, with separate products for queries, keys and values, and an additive mask."""

    def before(self) -> int:
        """Return the embeddings of tokens and positions, including two reserved positions."""
        architecture = self.architecture
        return (
            architecture.vocabulary * architecture.embedding
            + (architecture.positions + 2) * architecture.hidden
            + self._projection()
        )

    def behind(self) -> int:
        """Return the last normalisation, if there is one."""
        return 2 * self.architecture.hidden * self.architecture.norm_first + self._projection()

    def _projection(self) -> int:
        """Return the size of the matrix from embedding width to hidden width; 0 if they are equal."""
        architecture = self.architecture
        return (
            0
            if architecture.embedding == architecture.hidden
            else architecture.embedding * architecture.hidden
        )

    def _embedding(self, tape: Tape) -> None:
        architecture, shape = self.architecture, self._shape(tape.run)
        tape.lookup(
            "embedding", shape[0], architecture.embedding, share(architecture.vocabulary, tape.run.tensor)
        )
        if self._projection():
            tape.linear("embedding", shape[0], architecture.hidden, architecture.embedding, bias=False)
        tape.lookup("embedding", *shape, architecture.positions)
        tape.residual("embedding", shape)

    def _add_layer(self, tape: Tape, index: int) -> None:
        run, tokens = tape.run, tape.run.batch * tape.run.seq
        *qkv, output, up, down = self.matrices()
        self._norm(tape)
        for matrix in joined(qkv, run):
            matrix.on(tape, tokens)
        if not run.compiled:
            tape.pointwise("attention qkv", (tokens, qkv[0].n // run.tensor), "x*0.125", ("x*0.125",))
        # The mask is a tensor that each head reads again: for long sequences it fits in no cache.
        self._attend(tape, output, ("x+y", "max(x,row)"), MASKED_MAXIMUM)
        self._feed_forward(tape, up, down)

    def _head(self, tape: Tape) -> None:
        architecture, run = self.architecture, tape.run
        if architecture.norm_first:
            self._norm(tape)
        if self._projection():
            tape.linear("head", run.batch * run.seq, architecture.embedding, architecture.hidden, bias=False)
        self._output_layer(tape)


class Bert(Decoder):
    """BERT: post-normalisation.

    Inference runs a sequence classifier (encoder, pooler, classifier); training runs the pretraining heads
    (masked words, next sentence), as HuggingFace's automatic classes choose them.
    """

    def before(self) -> int:
        """Return the embeddings of words, positions and token types, and their normalisation."""
        architecture = self.architecture
        return (
            architecture.vocabulary + architecture.positions + architecture.token_types + 2
        ) * architecture.hidden

    def behind(self) -> int:
        """Return the pooler and the pretraining heads."""
        h = self.architecture.hidden
        transform = h * h + 3 * h  # including its normalisation
        return h * h + h + transform + self.architecture.vocabulary + 2 * h + 2

    def _embedding(self, tape: Tape) -> None:
        architecture, shape = self.architecture, self._shape(tape.run)
        tape.lookup("embedding", *shape, share(architecture.vocabulary, tape.run.tensor))
        tape.lookup("embedding", *shape, architecture.token_types)
        tape.residual("embedding", shape)
        tape.pointwise("embedding", shape, "x+row")
        tape.layernorm("norm", shape, eps=self.architecture.eps)
        tape.dropout("embedding", shape, architecture.dropout)

    def _add_layer(self, tape: Tape, index: int) -> None:
        *qkv, output, up, down = self.matrices()
        for matrix in qkv:
            matrix.on(tape, tape.run.batch * tape.run.seq)
        self._attend(tape, output, ("x*0.125", "x+row"), ("x*0.125",))
        self._feed_forward(tape, up, down)
        self._norm(tape)

    def _head(self, tape: Tape) -> None:
        run, h = tape.run, self.architecture.hidden
        tape.linear("head", run.batch, h, h)  # the pooler reads only the first token of a sequence
        tape.pointwise("head", (run.batch, h), "tanh(x)", ("dy*(1-y*y)",))
        tape.linear("head", run.batch, 2, h)
        if not run.trains:
            return
        tape.linear("head", run.batch * run.seq, h, h)
        tape.activation("head", self._shape(run), self.architecture.activation)
        tape.layernorm("norm", self._shape(run), eps=self.architecture.eps)
        self._output_layer(tape)


class Llama(Decoder):
    """Llama and its relatives: RMS normalisation, rotary positions, a gated feed-forward layer.

    Mistral (windows), Qwen (biased or normalised heads), Phi-3 and Gemma (four normalisations, soft caps,
    windows in some layers) differ by fields of `Architecture`. Multi-head latent attention computes keys and
    values of all heads from a narrow vector, as in training; the cache of that vector is not modelled.

    Source: transformers 4.57, `models/mistral`, `models/qwen2`, `models/qwen3`, `models/phi3`,
    `models/gemma2`, `models/gemma3`, `models/deepseek_v3`, eager attention.
    """

    def __init__(self, name: str, architecture: Architecture) -> None:
        super().__init__(name, architecture)
        self.rms = architecture.norm == "rms"

    def matrices(self) -> tuple[Matrix, ...]:
        """Return the linear layers of a layer."""
        return (*self._attention_matrices(), *self._feed_forward_matrices(self.architecture.ffn))

    def _attention_matrices(self) -> tuple[Matrix, ...]:
        architecture = self.architecture
        if architecture.key_latent:
            return self._latent_matrices()
        return (
            *(
                Matrix(
                    part="attention qkv",
                    k=architecture.hidden,
                    n=width,
                    divided="n",
                    bias=architecture.biased_qkv,
                )
                for width in (architecture.inner, architecture.inner_k, architecture.inner_k)
            ),
            self._attention_output(),
        )

    def _attention_output(self) -> Matrix:
        architecture = self.architecture
        return Matrix(
            part="attention output",
            k=architecture.inner_out,
            n=architecture.hidden,
            divided="k",
            bias=architecture.output_bias,
        )

    def _latent_matrices(self) -> tuple[Matrix, ...]:
        """Return the linear layers of multi-head latent attention, in the order in which they run."""
        architecture = self.architecture
        hidden, queries = architecture.hidden, architecture.query_latent
        part = "attention qkv"
        narrow = (Matrix(part=part, k=hidden, n=queries, bias=False),) if queries else ()
        keys_and_values = architecture.inner_k - architecture.heads_k * architecture.rotary_dim
        return (
            *narrow,
            Matrix(part=part, k=queries or hidden, n=architecture.inner, divided="n", bias=False),
            Matrix(part=part, k=hidden, n=architecture.key_latent + architecture.rotary_dim, bias=False),
            Matrix(
                part=part,
                k=architecture.key_latent,
                n=keys_and_values + architecture.inner_v,
                divided="n",
                bias=False,
            ),
            self._attention_output(),
        )

    def _feed_forward_matrices(self, width: int) -> tuple[Matrix, ...]:
        """Return the two or, if it is gated, three linear layers of a feed-forward layer of this width."""
        architecture = self.architecture
        hidden, bias = architecture.hidden, architecture.mlp_bias
        up = Matrix(part="mlp up", k=hidden, n=width, divided="n", bias=bias)
        down = Matrix(part="mlp down", k=width, n=hidden, divided="k", bias=bias)
        return (*[up] * (1 + architecture.gated), down)

    def _norm_parameters(self, width: int) -> int:
        """Return the parameters of a normalisation of vectors of this width."""
        return width * {"rms": 1, "shift": 2, "scale": 1, "plain": 0}[self.architecture.norm]

    def vectors(self) -> tuple[int, int]:
        """Return weights of the normalisations, and the sinks of attention."""
        architecture = self.architecture
        vectors = [self._norm_parameters(architecture.hidden)] * architecture.norms
        vectors += [architecture.inner, architecture.inner_k] * architecture.normalised_queries
        vectors += [architecture.head_dim] * 2 * architecture.normalised_heads
        vectors += [width for width in (architecture.query_latent, architecture.key_latent) if width]
        vectors += [architecture.heads] * architecture.sinks
        return sum(vectors), len(vectors)

    def before(self) -> int:
        """Return the embedding."""
        return self.architecture.vocabulary * self.architecture.hidden

    def behind(self) -> int:
        """Return the last normalisation, and the bias of the output layer, if there is one."""
        architecture = self.architecture
        return self._norm_parameters(architecture.hidden) + architecture.vocabulary * architecture.head_bias

    def _embedding(self, tape: Tape) -> None:
        vocabulary = share(self.architecture.vocabulary, tape.run.tensor)
        tape.lookup("embedding", *self._shape(tape.run), vocabulary)
        if self.architecture.scaled_embedding:
            tape.pointwise("embedding", self._shape(tape.run), "x*0.125", ("x*0.125",))

    def _add_fused_layer(self, tape: Tape) -> None:
        """Add a layer by the kernels of Megatron-LM."""
        if not self.architecture.fused:
            raise InputError(
                f"{self.name}: Megatron-LM's kernels are described for gated layers with two or four RMS "
                f"normalisations, not for {self.architecture.family}: use the stack eager or compiled"
            )
        add_megatron_layer(tape, self.architecture, gated=True, rms=True, biased=False)

    def _rotated(self, tape: Tape, width: int) -> None:
        """Add the rotary embedding: halves swapped and negated, two products, their sum."""
        shape = (tape.run.batch * tape.run.seq, width)
        steps = ("x*row",) if tape.run.compiled else ("x*0.5", "x", "x*row", "x*row", "x+y")
        for step in steps:
            tape.pointwise("attention rotation", shape, step, (step,))

    def _add_layer(self, tape: Tape, index: int) -> None:
        architecture = self.architecture
        if tape.run.kernels == "megatron":
            self._add_fused_layer(tape)
            return
        self._attention(tape)
        if architecture.norms != 1:
            self._norm(tape)
        matrices, tokens = self._feed_forward_matrices(architecture.ffn), self._shape(tape.run)[0]
        if not architecture.gated:
            up, down = matrices
            up.on(tape, tokens)
            tape.activation("mlp activation", self._inner(tape.run), architecture.activation)
            down.on(tape, tokens)
            self._added(tape)
            return
        self._gated(tape, tokens, matrices)
        tape.elementwise("mlp up", self._shape(tape.run), "x+y", "backward")
        if self.architecture.norms == 4:
            self._norm(tape)
        self._added(tape)

    def _attention(self, tape: Tape) -> None:
        run, architecture, tokens = tape.run, self.architecture, tape.run.batch * tape.run.seq
        *qkv, output = self._attention_matrices()
        self._norm(tape)
        if architecture.key_latent:
            self._latent_products(tape, qkv)
            self._attend(tape, output, ("x*0.125", "x+row"), ("x*0.125",))
            return
        for matrix in joined(qkv, run):
            matrix.on(tape, tokens)
        if architecture.normalised_heads:
            for heads in (architecture.heads, architecture.heads_k):
                tape.rmsnorm(
                    "norm", (tokens * heads // run.tensor, architecture.head_dim), eps=architecture.eps
                )
        for width in (architecture.inner, architecture.inner_k) if architecture.normalised_queries else ():
            tape.rmsnorm("norm", (tokens, width // run.tensor), eps=architecture.eps)
        self._rotated(tape, architecture.inner // run.tensor)
        self._rotated(tape, architecture.inner_k // run.tensor)
        self._attend(tape, output, ("x*0.125", "x+row"), ("x*0.125",))

    def _latent_products(self, tape: Tape, matrices: list[Matrix]) -> None:
        """Add the products from hidden states to queries, keys and values through narrow vectors."""
        run, architecture, tokens = tape.run, self.architecture, tape.run.batch * tape.run.seq
        if architecture.query_latent:
            matrices.pop(0).on(tape, tokens)
            tape.rmsnorm("norm", (tokens, architecture.query_latent), eps=architecture.eps)
        queries, narrow, wide = matrices
        queries.on(tape, tokens)
        narrow.on(tape, tokens)
        tape.copy("attention qkv", (tokens, narrow.n), "backward")  # concatenation of two gradients
        tape.elementwise("attention qkv", self._shape(run), "x+y", "backward")
        tape.rmsnorm("norm", (tokens, architecture.key_latent), eps=architecture.eps)
        wide.on(tape, tokens)
        self._rotated(tape, architecture.heads * architecture.rotary_dim // run.tensor)
        self._rotated(tape, architecture.rotary_dim)
        for width in (architecture.inner, architecture.inner_k):  # parts with and without positions
            tape.pointwise("attention copies", (tokens, width // run.tensor), "x", ("x",))

    def _gated(self, tape: Tape, tokens: int, matrices: tuple[Matrix, ...]) -> None:
        """Add a gated feed-forward layer, or an expert, for that many tokens."""
        gate, up, down = matrices
        for matrix in joined((gate, up), tape.run):
            matrix.on(tape, tokens)
        inner = (tokens, gate.n // tape.run.tensor)
        if tape.run.compiled:
            activated = gate_expression(self.architecture)
            backward = f"dy*{activated}", f"dy*{activated}*y"
            tape.pointwise("mlp activation", inner, f"{activated}*y", backward)
        else:
            tape.activation("mlp activation", inner, self.architecture.activation)
            tape.pointwise("mlp activation", inner, "x*y", ("dy*x", "dy*y"))
        down.on(tape, tokens)

    def _head(self, tape: Tape) -> None:
        self._norm(tape)
        self._output_layer(tape)
