"""Transformers as HuggingFace's model code runs them, eagerly or compiled: base of all families."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from tunebench.dtype import itemsize
from tunebench.errors import InputError
from tunebench.workloads.networks.architecture import Architecture
from tunebench.workloads.networks.megatron import (
    add_converted_weights,
    add_flash,
    context_exchanges,
    megatron_collectives,
    recomputed,
    recomputed_operators,
)
from tunebench.workloads.networks.network_run import (
    ContextExchange,
    Network,
    NetworkRun,
    Operation,
    TensorCollective,
    merged,
)
from tunebench.workloads.networks.tape import Prologue, Tape, Weight

__all__ = ["Heads", "Matrix", "Transformer", "joined", "share"]

SECTOR_BYTES = 32
"""Smallest amount of memory that a GPU reads at once, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A linear layer.

    Attributes:
        part: Part of the network.
        k: Width of the input.
        n: Width of the output.
        bias: Whether the layer adds a bias.
        divided: Whether tensor parallelism divides the output (``"n"``), the input (``"k"``), or neither.
        weight: Storage order of the matrix.
    """

    part: str
    k: int
    n: int
    bias: bool = True
    divided: str = ""
    weight: Weight = "out,in"

    def parameters(self, tensor: int = 1) -> int:
        """Return the number of parameters on one of `tensor` devices."""
        n, k = self._on_device(tensor)
        return k * n + (n if self.bias else 0)

    def tensors(self) -> int:
        """Return the number of tensors that hold the parameters."""
        return 1 + self.bias

    def on(self, tape: Tape, tokens: int) -> None:
        """Add the layer to a tape, for that many tokens."""
        n, k = self._on_device(tape.run.tensor)
        tape.inner_linear(self.part, tokens, n, k, bias=self.bias, weight=self.weight)

    def _on_device(self, tensor: int) -> tuple[int, int]:
        """Return the widths of output and input on one of `tensor` devices."""
        return (
            share(self.n, tensor) if self.divided == "n" else self.n,
            share(self.k, tensor) if self.divided == "k" else self.k,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Attention of one device's heads: sizes, and the operations of a family between the two products.

    Attributes:
        batch: Number of sequences.
        heads: Number of query heads on this device.
        heads_k: Number of key heads on this device.
        seq_q: Queries per sequence.
        seq_k: Keys per sequence.
        head_dim: Width of a head.
        causal: Whether queries see no later key.
        before: Elementwise kernels on the scores before the softmax.
        backward: Elementwise kernels of the gradient of `before`.
        reordered: Whether the model code itself permutes heads before the products (OPT); otherwise
            `torch.matmul` does if the batch has more than one sequence.
        matched: Whether a compiler recognises the chain as attention and replaces it by one kernel for any
            type.
        wide: Whether softmax of half precision runs in f32, with a separate kernel that rounds the result.
        biased: Whether scores have a bias for each pair, which no attention operator here supports: either
            looked up in a table, or stored in the order of the scores.
        dropout: Dropout probability.
        value_dim: Width of a head of values; 0 for `head_dim`.
        window: Last keys that a query sees; 0 for all.
        sinks: Whether each head has a learned score that takes part in the softmax and has no value.
    """

    batch: int
    heads: int
    heads_k: int
    seq_q: int
    seq_k: int
    head_dim: int
    causal: bool
    before: tuple[str, ...]
    backward: tuple[str, ...]
    reordered: bool = False
    biased: Literal["", "looked up", "in order"] = ""
    wide: bool = False
    matched: bool = False
    dropout: float = 0.0
    value_dim: int = 0
    window: int = 0
    sinks: bool = False

    def on(self, tape: Tape) -> None:
        """Add attention to a tape: one kernel if fused, otherwise the products and all kernels between."""
        fused = tape.run.compiled and (self.matched or tape.run.dtype != "f32")
        if tape.run.context > 1 and (self.biased or not self.causal):
            raise InputError("context parallelism needs causal attention without a bias for each pair")
        if (tape.run.flash or fused) and not self.biased:
            sizes = {name: getattr(self, name) for name in ("batch", "heads", "heads_k")}
            # With the FLOPs of both products, if heads of values have another size.
            sizes["head_dim"] = (self.head_dim + (self.value_dim or self.head_dim)) // 2
            if tape.run.context > 1:
                add_flash(tape, sizes, self.window)
                return
            sizes |= {name: getattr(self, name) for name in ("seq_q", "seq_k", "causal")}
            if 0 < self.window < self.seq_k:
                sizes["window"] = self.window
            tape.attention("attention", {**sizes, "dtype": tape.run.dtype})
            return
        self._scores(tape)
        self._weights(tape)
        self._values(tape)

    @property
    def _queries(self) -> tuple[int, int]:
        return (self.batch * self.seq_q, self.heads * self.head_dim)

    @property
    def _keys(self) -> tuple[int, int]:
        return (self.batch * self.seq_k, self.heads * self.head_dim)

    @property
    def _values_shape(self) -> tuple[int, int]:
        return (self.batch * self.seq_k, self.heads * (self.value_dim or self.head_dim))

    @property
    def _results(self) -> tuple[int, int]:
        return (self.batch * self.seq_q, self.heads * (self.value_dim or self.head_dim))

    @property
    def _pairs(self) -> tuple[int, int]:
        return (self.batch * self.heads * self.seq_q, self.seq_k)

    def _scores(self, tape: Tape) -> None:
        """Add the products of queries and keys, and the copies that put heads before tokens.

        `torch.matmul` copies operands that are not views of one batch, such as heads of several sequences,
        and copies keys transposed.
        """
        copied = self.batch > 1 or self.reordered
        if copied:
            tape.copy("attention copies", self._queries)
            tape.copy("attention copies", self._keys)
        if self.heads_k != self.heads:  # keys and values are repeated for the heads that share them
            tape.copy("attention copies", self._keys)
            tape.copy("attention copies", self._keys)
        tape.product(
            "attention scores",
            self.batch * self.heads,
            self.seq_q,
            self.seq_k,
            self.head_dim,
            "nn" if copied and not self.reordered else "nt",
        )

    def _weights(self, tape: Tape) -> None:
        if not tape.run.compiled:
            self._before(tape)
        if self.sinks:  # the scores and the sink are concatenated, and the sink's weight is dropped
            tape.copy("attention softmax", self._pairs)
            tape.copy("attention softmax", self._pairs, "backward")
        prologue: Prologue = ("mask" if self.biased else "scale") if tape.run.compiled else "none"
        tape.softmax("attention softmax", self._pairs, prologue)
        if self.wide and not tape.run.compiled:
            tape.cast("attention softmax", self._pairs, up=False)
            tape.cast("attention softmax", self._pairs, up=True, phase="backward")
        tape.dropout("attention softmax", self._pairs, self.dropout)

    def _before(self, tape: Tape) -> None:
        """Add the kernels between scores and softmax.

        A looked-up bias has heads innermost, like its table: neighbours along the keys are in different
        sectors, and reading one element reads a whole sector.
        """
        if self.biased == "looked up":
            size = itemsize(tape.run.dtype)
            rows, cols = self._pairs
            tape.moved("attention scores", rows * cols * size * (2 + min(SECTOR_BYTES // size, self.heads)))
        elif self.biased:
            tape.elementwise("attention scores", self._pairs, "x+y")
        for expression in self.before:
            tape.elementwise("attention scores", self._pairs, expression)
        for expression in self.backward:
            tape.elementwise("attention scores", self._pairs, expression, "backward")

    def _values(self, tape: Tape) -> None:
        """Add the products of weights and values, and the copies around them.

        Backward permutes the gradients of queries and values; the gradient of keys needs no copy.
        """
        value_dim = self.value_dim or self.head_dim
        if self.batch > 1 or self.reordered:
            tape.copy("attention copies", self._values_shape)
            tape.copy("attention copies", self._results, "backward")
        tape.product("attention values", self.batch * self.heads, self.seq_q, value_dim, self.seq_k, "nn")
        tape.copy("attention copies", self._results)
        tape.copy("attention copies", self._results, "backward")
        tape.copy("attention copies", self._values_shape, "backward")


class Transformer(Network):
    """A transformer of one stack of layers; families define the layer and the parts around the stack."""

    rms: bool = False
    """Whether hidden states are normalised by their root mean square, without a shift."""

    divides_ends: ClassVar[bool] = True
    """Whether tensor parallelism divides the embedding and the head, as it divides a vocabulary."""

    def __init__(self, name: str, architecture: Architecture) -> None:
        self.name = name
        self.architecture = architecture
        self.layers = architecture.layers
        self._ends_apart = False
        self._networks_of_layers: dict[int, Transformer] = {}
        self._parameters_of_layers: dict[tuple[int, int], int] = {}

    # -- defined by a family --------------------------------------------------------------------

    @abstractmethod
    def matrices(self) -> tuple[Matrix, ...]:
        """Return the linear layers of a layer."""

    @abstractmethod
    def vectors(self) -> tuple[int, int]:
        """Return the number of parameters of a layer outside its matrices, and of their tensors."""

    @abstractmethod
    def before(self) -> int:
        """Return the number of parameters before the first layer: embeddings and their normalisation."""

    @abstractmethod
    def behind(self) -> int:
        """Return the number of parameters after the last layer, without the output matrix."""

    @abstractmethod
    def _embedding(self, tape: Tape) -> None:
        """Add the operations from tokens to hidden states."""

    @abstractmethod
    def _add_layer(self, tape: Tape, index: int) -> None:
        """Add a layer by its index, from 0."""

    @abstractmethod
    def _head(self, tape: Tape) -> None:
        """Add the operations after the last layer."""

    @property
    def ends_apart(self) -> bool:
        """Whether the embedding and the head are layers of their own."""
        return self._ends_apart

    def with_ends_apart(self) -> Transformer:
        """Return the network with its embedding and its head as layers of their own, the first and the last.

        Indices of all other layers are one higher wherever a range of layers is an argument.
        """
        if self._ends_apart:
            return self
        network = copy.copy(self)
        network._ends_apart, network.layers = True, self.layers + 2
        return network

    def _inner_layers(self, layers: tuple[int, int]) -> range:
        """Return the indices of the layers of a stage that are neither the embedding nor the head alone."""
        first, last = layers
        if not self._ends_apart:
            return range(first, last)
        return range(max(first, 1) - 1, min(last, self.layers - 1) - 1)

    def kind_of_layer(self, index: int) -> int:
        """Return the index of the first layer with the same operations, which identifies identical layers."""
        architecture = self.architecture
        if architecture.uniform:
            return 0
        if index < architecture.dense_layers:
            start, end = 0, index
        else:
            start, end = architecture.dense_layers, index
        return (
            start
            if not architecture.windows
            else architecture.windows.index(architecture.windows[index], start, end + 1)
        )

    def of_layer(self, index: int) -> Transformer:
        """Return the network of a layer's sizes, in which all layers are equal; this one if they are here.

        Args:
            index: Index of the layer, from 0.
        """
        if self.architecture.uniform:
            return self
        kind = self.kind_of_layer(index)
        if kind not in self._networks_of_layers:
            self._networks_of_layers[kind] = type(self)(self.name, self.architecture.layer(kind))
        return self._networks_of_layers[kind]

    def matrices_of(self, index: int) -> tuple[Matrix, ...]:
        """Return the linear layers of a layer that all tokens see, by its index from 0."""
        return self.of_layer(index).matrices()

    def attentions_of(self, index: int) -> int:
        """Return the number of attentions of a layer, by its index from 0."""
        return 1

    def _layer_parameters(self, index: int, tensor: int = 1) -> int:
        vectors, _ = self.of_layer(index).vectors()
        return sum(matrix.parameters(tensor) for matrix in self.matrices_of(index)) + vectors

    def _divided_products(self, index: int, run: NetworkRun) -> int:
        """Return the number of all-reduces of a layer in one forward pass."""
        return 2

    def _layer_tensors(self, index: int, run: NetworkRun) -> int:
        _, vectors = self.of_layer(index).vectors()
        return sum(matrix.tensors() for matrix in self.matrices_of(index)) + vectors

    # -- shared by all families -----------------------------------------------------------------

    def _shape(self, run: NetworkRun) -> tuple[int, int]:
        """Return the shape of the hidden states: tokens and width."""
        return (run.batch * run.seq, self.architecture.hidden)

    def _norm(self, tape: Tape) -> None:
        """Add a normalisation, into which a compiler fuses the residual sum ahead of it."""
        add = tape.rmsnorm if self.rms else tape.layernorm
        add("norm", self._shape(tape.run), residual=tape.run.compiled, eps=self.architecture.eps)

    def _added(self, tape: Tape) -> None:
        """Add dropout and the residual sum, which a compiler fuses into the next normalisation."""
        shape = self._shape(tape.run)
        tape.dropout("residual", shape, self.architecture.dropout)
        if not tape.run.compiled:
            tape.residual("residual", shape)

    def operations(self, run: NetworkRun) -> tuple[Operation, ...]:
        """Return the operations of one device in one run (see `Network.operations`)."""
        self._check(run)
        first, last = self.stage(run)
        inner_layers = self._inner_layers((first, last))
        recomputed_count = len(inner_layers) if run.recompute_layers is None else run.recompute_layers
        tape = Tape(run)
        if first == 0:
            self._embedding(tape)
        without_recomputation = replace(run, recompute="none", recompute_layers=None)
        kinds = [self.kind_of_layer(index) for index in inner_layers]
        counts = Counter((kind, position < recomputed_count) for position, kind in enumerate(kinds))
        for (kind, runs_again), times in counts.items():
            layer = Tape(run if runs_again else without_recomputation)
            self.of_layer(kind)._add_layer(layer, kind)
            tape.extend(layer.operations, times)
            if runs_again and run.recompute == "full" and run.kernels != "megatron":
                tape.extend(recomputed(layer.operations), times)
            if runs_again and run.recompute == "operators" and run.kernels != "megatron":
                again = recomputed_operators(layer.operations, self.architecture, run.tensor)
                tape.extend(again, times)
        if last == self.layers:
            self._head(tape)
        unrouted, routed = self.held_parameters(run, (first, last))
        # An embedding or a head alone has one tensor; beside layers they add up with these.
        tensors = sum(count * self._layer_tensors(kind, run) for kind, count in Counter(kinds).items()) or 1
        tape.sharded(unrouted + routed)
        tape.accumulated(unrouted + routed, tensors)
        updated = share(unrouted, run.shards) + share(routed, run.expert_shards)
        tape.updated(updated, self.architecture.hidden)
        add_converted_weights(tape, self.matrix_parameters(run.tensor, (first, last)) + routed)
        return merged(tape.operations)

    def parameters(self, tensor: int = 1, layers: tuple[int, int] | None = None) -> int:
        """Return the number of parameters (see `Network.parameters`)."""
        first, last = layers or (0, self.layers)
        total, counts = 0, self._parameters_of_layers
        for index in self._inner_layers((first, last)):
            if (index, tensor) not in counts:
                counts[index, tensor] = self._layer_parameters(index, tensor)
            total += counts[index, tensor]
        end_devices = tensor if self.divides_ends else 1
        if first == 0:
            total += share(self.before(), end_devices)
        if last == self.layers:
            shared = self.architecture.tied and first == 0
            total += self.behind() + (0 if shared else share(self._output(), end_devices))
        return total

    @property
    def matrices_of_a_layer(self) -> int:
        """Number of matrices of linear layers in a layer, of the last one if layers differ."""
        return len(self.matrices_of(self._inner_layers((0, self.layers))[-1]))

    def matrix_parameters(self, tensor: int = 1, layers: tuple[int, int] | None = None) -> int:
        """Return the number of parameters in the matrices of the layers (see `Network.matrix_parameters`)."""
        counts = Counter(map(self.kind_of_layer, self._inner_layers(layers or (0, self.layers))))
        return sum(
            count * replace(matrix, bias=False).parameters(tensor)
            for kind, count in counts.items()
            for matrix in self.matrices_of(kind)
        )

    def active_parameters(self) -> int:
        """Return the parameters that take part in products for one token: those of its experts only.

        An embedding that only looks up rows does not count.
        """
        architecture = self.architecture
        lookups = 0 if architecture.tied else self.before()
        unused = 0
        if architecture.experts_per_token:
            used_share = architecture.experts_per_token / architecture.experts
            unused = round(self.expert_parameters() * (1 - used_share))
        return self.parameters() - lookups - unused

    def boundary_elements(self, run: NetworkRun) -> int:
        """Return the number of elements in the hidden states of all tokens.

        In Megatron-LM, each tensor-parallel rank sends its part to one device of the next stage.
        """
        elements = run.batch * run.seq * self.architecture.hidden
        return share(elements, run.tensor) if run.kernels == "megatron" else elements

    def collectives(self, run: NetworkRun) -> tuple[TensorCollective, ...]:
        """Return the collectives of each layer, of the embedding and of the head.

        Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
        """
        if run.tensor == 1:
            return ()
        first, last = self.stage(run)
        nbytes = run.batch * run.seq * self.architecture.hidden * itemsize(run.dtype)
        inner_layers = self._inner_layers((first, last))
        kinds = Counter(map(self.kind_of_layer, inner_layers))
        products = sum(count * self._divided_products(kind, run) for kind, count in kinds.items())
        if run.kernels == "megatron":
            end_layers = first == 0, last == self.layers
            return megatron_collectives(
                run, nbytes, len(inner_layers), products, end_layers, divides_ends=self.divides_ends
            )
        collectives = [TensorCollective(nbytes=nbytes, count=products, part="layers")]
        if first == 0 and self.divides_ends:
            collectives.append(TensorCollective(nbytes=nbytes, count=1, part="embedding"))
        if run.trains:
            collectives.append(
                TensorCollective(nbytes=nbytes, count=products, part="layers", phase="backward")
            )
        if run.trains and last == self.layers and self.divides_ends:
            collectives.append(TensorCollective(nbytes=nbytes, count=1, part="head", phase="backward"))
        return tuple(collectives)

    def exchanges(self, run: NetworkRun) -> tuple[ContextExchange, ...]:
        """Return the sends of context parallelism of each layer (see `Network.exchanges`)."""
        if any(self.architecture.windows) and run.context > 1 and not run.context_gather:
            raise InputError(
                f"{self.name} has layers with a sliding window: context parallelism needs context_gather, "
                "a ring of windows is not described"
            )
        return context_exchanges(run, self.architecture, len(self._inner_layers(self.stage(run))))

    def _output(self) -> int:
        return self.architecture.vocabulary * self.architecture.embedding

    def _check(self, run: NetworkRun) -> None:
        """Refuse a run that the network does not support."""
        architecture = self.architecture
        if run.fp8 != "none" and run.dtype == "f32":
            raise InputError(f"fp8={run.fp8} needs dtype=bf16 or f16, for everything else, got {run.dtype}")
        if run.seq < 1:
            raise InputError(
                f"{self.name} needs seq, the tokens of a sequence: expected 1 or more, got {run.seq}"
            )
        if architecture.longest and run.keys * run.context > architecture.longest:
            seq = run.keys * run.context
            raise InputError(
                f"{self.name} has {architecture.longest} positions; seq={seq} must not exceed them"
            )
        described = architecture.causal and not (architecture.decoder_layers or architecture.key_latent)
        if run.cached is not None and not described:
            raise InputError(
                f"{self.name}: a cache of keys and values is described for decoders without latent attention "
                f"and without an encoder, not for {architecture.family}"
            )
        if not architecture.experts_per_token and (run.expert > 1 or run.recompute == "experts"):
            raise InputError(
                f"{self.name} has no experts to divide or to compute again: expected expert=1 and another "
                f"recomputation, got expert={run.expert} and recompute={run.recompute}"
            )
        if run.recompute == "operators" and not (run.flash and architecture.plain):
            raise InputError(
                "recompute=operators is for flash attention in layers of llama: without experts, latent "
                f"attention, or a feed-forward part that is not gated; got {self.name} with flash={run.flash}"
            )
        if (
            architecture.heads % run.tensor
            or architecture.heads_k % run.tensor
            or architecture.ffn % run.tensor
            or architecture.dense_ffn % run.tensor
        ):
            raise InputError(
                f"{self.name}: tensor={run.tensor} must divide {architecture.heads} heads of queries, "
                f"{architecture.heads_k} heads of keys, and the feed-forward width {architecture.ffn}"
                + (f" and {architecture.dense_ffn}" if architecture.dense_layers else "")
            )


def joined(matrices: Sequence[Matrix], run: NetworkRun) -> tuple[Matrix, ...]:
    """Return linear layers of the same input, as one if a serving engine runs them.

    Args:
        matrices: Linear layers that differ only by the width of their output.
        run: How the network runs.
    """
    if not run.serves:
        return tuple(matrices)
    return (replace(matrices[0], n=sum(matrix.n for matrix in matrices)),)


def share(total: int, devices: int) -> int:
    """Return the largest share of a total divided among devices."""
    return -(-total // devices)
