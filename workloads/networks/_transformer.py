"""Transformers as HuggingFace's model code runs them, eagerly or compiled: what all families share."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from tunebench.dtype import itemsize
from tunebench.errors import InputError
from tunebench.workloads.networks._architecture import Architecture
from tunebench.workloads.networks._network import AllReduce, Network, NetworkRun, Operation, merged
from tunebench.workloads.networks._tape import Prologue, Tape, Weight
from tunebench.workloads.operators.attention import Attention

__all__ = ["Heads", "Matrix", "Transformer", "share"]

SECTOR_BYTES = 32
"""Least that a GPU reads of its memory at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A linear layer.

    Attributes:
        part: What it belongs to.
        k: Width of its input.
        n: Width of its output.
        bias: Whether it adds one.
        divided: Whether devices that share a layer divide its output (``"n"``), its input (``"k"``), or
            each have all of it.
        weight: How it is stored.
    """

    part: str
    k: int
    n: int
    bias: bool = True
    divided: str = ""
    weight: Weight = "out,in"

    def parameters(self, tensor: int = 1) -> int:
        """Return the numbers that one of the devices holds."""
        n = share(self.n, tensor) if self.divided == "n" else self.n
        k = share(self.k, tensor) if self.divided == "k" else self.k
        return k * n + (n if self.bias else 0)

    def tensors(self) -> int:
        """Return how many tensors hold its parameters."""
        return 1 + self.bias

    def on(self, tape: Tape, tokens: int) -> None:
        """Add it to a tape, for that many tokens."""
        tensor = tape.run.tensor
        n = share(self.n, tensor) if self.divided == "n" else self.n
        k = share(self.k, tensor) if self.divided == "k" else self.k
        tape.linear(self.part, tokens, n, k, bias=self.bias, weight=self.weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Attention of one device's heads: sizes, and what a family's code does between the two products.

    Attributes:
        batch: Sequences.
        heads: Of queries, on this device.
        heads_k: Of keys, on this device.
        seq_q: Queries of a sequence.
        seq_k: Keys of a sequence.
        head_dim: Width.
        causal: Whether queries see no later key.
        before: Elementwise kernels on the scores before the softmax.
        backward: Those of their gradient.
        reordered: Whether the code itself orders heads before it multiplies (OPT); else `torch.matmul` does,
            if the batch has more than one sequence.
        matched: Whether a compiler recognises the chain as attention, and puts a kernel there for any type.
        wide: Whether the softmax of half precision is written in f32, and rounded by a kernel of its own.
        biased: Whether scores have a bias for each pair, which no attention kernel here knows: one that was
            looked up, or one in the order of scores.
        dropout: Probability.
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

    def on(self, tape: Tape) -> None:
        """Add it to a tape: one kernel where there is one, or the chain of products and kernels between."""
        if tape.run.fused and (self.matched or tape.run.dtype != "f32") and not self.biased:
            work = Attention(
                batch=self.batch,
                heads=self.heads,
                heads_k=self.heads_k,
                seq_q=self.seq_q,
                seq_k=self.seq_k,
                head_dim=self.head_dim,
                dtype=tape.run.dtype,
                causal=self.causal,
            )
            tape.attention("attention", work)
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
    def _pairs(self) -> tuple[int, int]:
        return (self.batch * self.heads * self.seq_q, self.seq_k)

    def _scores(self, tape: Tape) -> None:
        """Add the products of queries and keys, and the copies that put heads before tokens.

        `torch.matmul` copies what it cannot see as one batch: heads of several sequences; keys it copies
        transposed.
        """
        copied = self.batch > 1 or self.reordered
        if copied:
            tape.copy("attention copies", self._queries)
            tape.copy("attention copies", self._keys)
        if self.heads_k != self.heads:  # keys and values repeated for the heads they serve
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
        if not tape.run.fused:
            self._before(tape)
        prologue: Prologue = ("mask" if self.biased else "scale") if tape.run.fused else "none"
        tape.softmax("attention softmax", self._pairs, prologue)
        if self.wide and not tape.run.fused:
            tape.cast("attention softmax", self._pairs, up=False)
            tape.cast("attention softmax", self._pairs, up=True, phase="backward")
        tape.dropout("attention softmax", self._pairs, self.dropout)

    def _before(self, tape: Tape) -> None:
        """Add the kernels between scores and softmax.

        A bias that was looked up has heads innermost, as the table has: its neighbours along the keys lie
        in different sectors, of which all is read for one element.
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

        Backward orders the gradients of queries and values anew; that of keys comes as it is read.
        """
        if self.batch > 1 or self.reordered:
            tape.copy("attention copies", self._keys)
            tape.copy("attention copies", self._queries, "backward")
        tape.product("attention values", self.batch * self.heads, self.seq_q, self.head_dim, self.seq_k, "nn")
        tape.copy("attention copies", self._queries)
        tape.copy("attention copies", self._queries, "backward")
        tape.copy("attention copies", self._keys, "backward")


class Transformer(Network):
    """A transformer of one stack of layers; families say what is in a layer, before and behind them."""

    def __init__(self, name: str, architecture: Architecture) -> None:
        self.name = name
        self.architecture = architecture
        self.layers = architecture.layers

    # -- what a family says ---------------------------------------------------------------------

    @abstractmethod
    def matrices(self) -> tuple[Matrix, ...]:
        """Return the linear layers of a layer."""

    @abstractmethod
    def vectors(self) -> tuple[int, int]:
        """Return the parameters of a layer that are in no matrix, and the tensors that hold them."""

    @abstractmethod
    def before(self) -> int:
        """Return the parameters before the first layer: embeddings, and what normalises them."""

    @abstractmethod
    def behind(self) -> int:
        """Return the parameters behind the last layer, the output's matrix left out if it is tied."""

    @abstractmethod
    def _embedding(self, tape: Tape) -> None:
        """Add what turns tokens into hidden states."""

    @abstractmethod
    def _add_layer(self, tape: Tape, index: int) -> None:
        """Add a layer, counted from 0."""

    @abstractmethod
    def _head(self, tape: Tape) -> None:
        """Add what follows the last layer."""

    def kind_of_layer(self, index: int) -> int:
        """Return the first layer that is like this one, by which alike ones are known."""
        return 0

    def _layer_parameters(self, index: int, tensor: int = 1) -> int:
        return sum(each.parameters(tensor) for each in self.matrices()) + self.vectors()[0]

    def _divided_products(self, index: int) -> int:
        """Return how often a layer's inner width, or its heads, are summed up."""
        return 2

    def _layer_tensors(self, index: int) -> int:
        return sum(each.tensors() for each in self.matrices()) + self.vectors()[1]

    # -- what follows from it -------------------------------------------------------------------

    def operations(self, run: NetworkRun) -> tuple[Operation, ...]:
        """Return what one device does in one run (see `Network.operations`)."""
        self._check(run)
        first, last = self.stage(run)
        tape = Tape(run)
        if first == 0:
            self._embedding(tape)
        for kind, times in Counter(map(self.kind_of_layer, range(first, last))).items():
            layer = Tape(run)
            self._add_layer(layer, kind)
            tape.extend(layer.operations, times)
        if last == self.layers:
            self._head(tape)
        held = self.parameters(run.tensor, (first, last))
        tape.accumulated(held, sum(map(self._layer_tensors, range(first, last))))
        tape.updated(held)
        return merged(tape.operations)

    def parameters(self, tensor: int = 1, layers: tuple[int, int] | None = None) -> int:
        """Return how many numbers are learned (see `Network.parameters`)."""
        first, last = layers or (0, self.layers)
        total = sum(self._layer_parameters(index, tensor) for index in range(first, last))
        if first == 0:
            total += share(self.before(), tensor)
        if last == self.layers:
            shared = self.architecture.tied and first == 0
            total += self.behind() + (0 if shared else share(self._output(), tensor))
        return total

    def boundary_elements(self, run: NetworkRun) -> int:
        """Return hidden states of all tokens."""
        return run.batch * run.seq * self.architecture.hidden

    def all_reduces(self, run: NetworkRun) -> tuple[AllReduce, ...]:
        """Return the sums that follow each layer's divided products, and those of the embedding and the head.

        Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
        """
        if run.tensor == 1:
            return ()
        first, last = self.stage(run)
        nbytes = self.boundary_bytes(run)
        layers = sum(map(self._divided_products, range(first, last)))
        found = [AllReduce(nbytes=nbytes, count=layers, part="layers")]
        if first == 0:
            found.append(AllReduce(nbytes=nbytes, count=1, part="embedding"))
        if run.trains:
            found.append(AllReduce(nbytes=nbytes, count=layers, part="layers", phase="backward"))
        if run.trains and last == self.layers:
            found.append(AllReduce(nbytes=nbytes, count=1, part="head", phase="backward"))
        return tuple(found)

    def _output(self) -> int:
        return self.architecture.vocabulary * self.architecture.embedding

    def _check(self, run: NetworkRun) -> None:
        """Refuse what the network cannot do."""
        of = self.architecture
        if run.seq < 1:
            raise InputError(f"{self.name} needs seq, the tokens of a sequence")
        if of.positions and run.seq > of.positions:
            raise InputError(f"{self.name} has {of.positions} positions; seq={run.seq} must not exceed them")
        if of.heads % run.tensor or of.heads_k % run.tensor or of.ffn % run.tensor:
            raise InputError(
                f"{self.name}: tensor={run.tensor} must divide {of.heads} heads, {of.heads_k} of keys, and "
                f"an inner width of {of.ffn}"
            )


def share(total: int, devices: int) -> int:
    """Return the largest share of something divided among devices."""
    return -(-total // devices)
