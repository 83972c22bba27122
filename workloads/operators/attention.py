"""attention: o = softmax(scale q k^T + bias) v for each head, and its gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tunebench._lazy import np
from tunebench.dtype import numpy_dtype, underflow, unit_roundoff
from tunebench.errors import InputError
from tunebench.stress import Stress, StressKind
from tunebench.workload import (
    AllowedChanges,
    Category,
    Count,
    Part,
    Positive,
    Reference,
    Size,
    Tensor,
    Tolerance,
    Traffic,
    Workload,
    defaults_to,
)
from tunebench.workloads.common.accumulation import F32, excess_rounding, sum_error

if TYPE_CHECKING:
    import numpy

    from tunebench.workload import Array, Array64

__all__ = ["HIDDEN_ROW_LSE", "LOWEST_BIAS", "Attention"]

ROWS_AT_ONCE = 512
"""Number of queries whose scores the reference holds at a time."""

OF_KEYS = ("k", "v", "dk", "dv")
"""Tensors with a row for each key; all others have a row for each query."""

LOWEST_BIAS = -1e29
"""Lowest finite bias: lower ones, such as the most negative f32, count as this one."""

HIDDEN_ROW_LSE = -1e30 * math.log(2)
"""lse of a query whose keys all have the bias minus infinity."""

HIDDEN_SHARE = 0.125
"""Fraction of the elements of a random bias that are minus infinity."""


@dataclass(frozen=True, kw_only=True)
class Attention(Workload):
    """Scaled dot-product attention of a batch of heads, summed in f32.

    Tensors, C-contiguous: q and o (batch, heads, seq_q, head_dim); k and v (batch, heads_k, seq_k, head_dim),
    each of whose heads serves heads / heads_k neighbouring heads of q (grouped queries); lse (batch, heads,
    seq_q) f32, the natural logarithm of the sum of exponentials of a query's scores. Scores are
    scale * q k^T + bias; `scale` is 1 / sqrt(head_dim) by default.

    `bias` names the axes of the bias: b(atch), h(eads), q(ueries), k(eys). The tensor is (batch or 1, heads
    or 1, seq_q or 1, seq_k), and is broadcast along axes of extent 1. A bias of minus infinity hides a key.
    A query whose keys are all hidden has o = 0, zero gradients and the lse `HIDDEN_ROW_LSE`; torch's kernels
    return zeros, too. Finite biases below `LOWEST_BIAS` count as `LOWEST_BIAS`, and pass no gradient.

    If causal, query i sees the keys up to i + seq_k - seq_q: the last query sees all. With ``align=first``,
    as torch's `is_causal`, it sees the keys up to i. With a `window`, it sees only the last `window` of them
    (0: all).

    ========= =========================== ===========
    direction reads                       writes
    ========= =========================== ===========
    forward   q, k, v, bias               o, lse
    backward  q, k, v, o, lse, do, bias   dq, dk, dv
    ========= =========================== ===========

    With s the scores, backward computes p = exp(s - lse), dp = do v^T, d = sum of do * o over a row,
    ds = p * (dp - d); dq = scale * ds k, dk = scale * ds^T q, dv = p^T do. Kernels may round p and ds to the
    type of the tensors before they multiply them. The bias has no gradient.

    Source: Vaswani et al., "Attention is all you need", 2017; Dao, "FlashAttention-2", 2023, algorithms 1, 2;
    Beltagy, Peters and Cohan, "Longformer", 2020 (windows).
    """

    operator: ClassVar[str] = "attention"
    category: ClassVar[Category | None] = "dot product"
    allowed_changes: ClassVar[AllowedChanges] = AllowedChanges(items=("batch",))

    batch: Size
    heads: Size
    seq_q: Size
    head_dim: Size
    dtype: Literal["f32", "f16", "bf16"]
    seq_k: Size = defaults_to("seq_q")
    heads_k: Size = defaults_to("heads")
    causal: bool = False
    direction: Literal["forward", "backward"] = "forward"
    bias: Literal["none", "k", "qk", "hk", "hqk", "bk", "bqk", "bhk", "bhqk"] = "none"
    scale: Positive = defaults_to("head_dim")
    align: Literal["last", "first"] = "last"
    window: Count = 0

    def default_of(self, dimension: str, followed: Any) -> Any:
        """Return 1 / sqrt(head_dim) for the scale."""
        return 1.0 / math.sqrt(followed) if dimension == "scale" else followed

    def check(self) -> None:
        """Refuse heads that do not share keys evenly, and queries that see no key."""
        if self.heads % self.heads_k:
            raise InputError(f"attention: heads_k={self.heads_k} must divide heads={self.heads}")
        if not self.causal and (self.align == "first" or self.window):
            raise InputError(
                f"attention: align={self.align} and window={self.window} describe a causal mask; "
                "give causal=true, or leave them out"
            )
        if self.causal and self.before < 0:
            raise InputError(
                f"attention: causal=true needs seq_q={self.seq_q} up to seq_k={self.seq_k}: "
                "the first queries would see no key; align=first lets query i see the keys up to i"
            )
        if self.window and self.seq_q + self.before - self.window >= self.seq_k:
            raise InputError(
                f"attention: seq_q={self.seq_q} must be less than seq_k={self.seq_k} plus "
                f"window={self.window}: the last queries would see no key"
            )

    @property
    def group(self) -> int:
        """Number of heads of q that share one head of k and v."""
        return self.heads // self.heads_k

    @property
    def has_bias(self) -> bool:
        """Whether a bias is added to the scores."""
        return self.bias != "none"

    @property
    def before(self) -> int:
        """Number of keys before the first query's own key, under a causal mask."""
        return 0 if self.align == "first" else self.seq_k - self.seq_q

    @property
    def has_simple_mask(self) -> bool:
        """Whether there is no mask, or a causal mask with ``align=last`` and without a window."""
        return self.align == "last" and self.window == 0

    def keys_of(self, queries: Any) -> tuple[Any, Any]:
        """Return the first and the end of the keys that the mask lets queries see; a bias may hide more.

        Args:
            queries: Index of a query, or an array of them.
        """
        if not self.causal:
            return 0 * queries, 0 * queries + self.seq_k
        end = queries + 1 + self.before
        first = np.maximum(0, end - self.window) if self.window else 0 * queries
        return first, np.minimum(end, self.seq_k)

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key that the mask lets it see, per head."""
        if not self.causal:
            return self.seq_q * self.seq_k
        if self.has_simple_mask:
            return self.seq_q * self.before + self.seq_q * (self.seq_q + 1) // 2
        first, end = self.keys_of(np.arange(self.seq_q))
        return int((end - first).sum())

    def _queries(self, name: str) -> Tensor:
        return Tensor(name=name, shape=(self.batch, self.heads, self.seq_q, self.head_dim), dtype=self.dtype)

    def _keys(self, name: str) -> Tensor:
        return Tensor(
            name=name, shape=(self.batch, self.heads_k, self.seq_k, self.head_dim), dtype=self.dtype
        )

    def _lse(self) -> Tensor:
        return Tensor(name="lse", shape=(self.batch, self.heads, self.seq_q), dtype="f32")

    def _bias(self) -> Tensor:
        extents = {"b": self.batch, "h": self.heads, "q": self.seq_q, "k": self.seq_k}
        shape = tuple(extent if axis in self.bias else 1 for axis, extent in extents.items())
        return Tensor(name="bias", shape=shape, dtype=self.dtype)

    def inputs(self) -> tuple[Tensor, ...]:
        """Return q, k and v, for the gradients o, lse and do, and the bias if there is one."""
        bias = (self._bias(),) if self.has_bias else ()
        forward = (self._queries("q"), self._keys("k"), self._keys("v"))
        if self.direction == "forward":
            return (*forward, *bias)
        return (*forward, self._queries("o"), self._lse(), self._queries("do"), *bias)

    def outputs(self) -> tuple[Tensor, ...]:
        """Return o and lse, or the gradients of q, k and v."""
        if self.direction == "forward":
            return (self._queries("o"), self._lse())
        return (self._queries("dq"), self._keys("dk"), self._keys("dv"))

    def flops(self) -> int:
        """Count the matrix products only, as is customary: two forward, five backward."""
        products = 2 if self.direction == "forward" else 5
        return 2 * products * self.batch * self.heads * self.pairs * self.head_dim

    def traffic(self) -> Traffic:
        """Count keys that some query sees, and biases of keys that their query sees."""
        total = super().traffic()
        first, end = int(self.keys_of(0)[0]), int(self.keys_of(self.seq_q - 1)[1])
        unread = (self.seq_k - (end - first)) * self._keys("k").nbytes // self.seq_k * 2
        if self.has_bias:
            bias = self._bias()
            queries = bias.shape[2]
            seen = self.pairs if queries == self.seq_q else end - first
            unread += bias.nbytes - bias.nbytes // (queries * self.seq_k) * seen
        return dataclasses.replace(total, read_bytes=total.read_bytes - unread)

    def part_count(self) -> int:
        """Return the number of heads of k and v in the whole batch."""
        return self.batch * self.heads_k

    def part(self, index: int) -> Part:
        """Return one head of k and v, with the heads of q that it serves.

        Args:
            index: Index of the head in the whole batch, from 0.

        Raises:
            IndexError: If there is no such head.
        """
        if not 0 <= index < self.part_count():
            raise IndexError(f"index {index} is out of range: {self} has {self.part_count()} parts")
        b, h = divmod(index, self.heads_k)
        keys = (slice(b, b + 1), slice(h, h + 1))
        queries = (slice(b, b + 1), slice(h * self.group, (h + 1) * self.group))
        slices: dict[str, tuple[slice, ...]] = {
            tensor.name: keys if tensor.name in OF_KEYS else queries
            for tensor in (*self.inputs(), *self.outputs())
        }
        if self.has_bias:
            of_bias = zip("bh", queries, strict=True)
            slices["bias"] = tuple(part if axis in self.bias else slice(0, 1) for axis, part in of_bias)
        return Part(workload=self.changed(batch=1, heads=self.group, heads_k=1), places=slices)

    def draw_by_rule(self, tensor: Tensor, rng: numpy.random.Generator) -> Array | None:
        """Draw tensors so that scores are about standard normal, some hidden, and p are probabilities."""
        if tensor.name == "q" and self.scale != self.default_of("scale", self.head_dim):
            deviation = 1 / min(64.0, max(1 / 64, self.scale * math.sqrt(self.head_dim)))
            return (deviation * rng.standard_normal(tensor.shape)).astype(numpy_dtype(tensor.dtype))
        if tensor.name == "bias":
            return self._draw_bias(tensor, rng)
        if tensor.name != "lse":
            return None
        first, end = self.keys_of(np.arange(self.seq_q))
        # Scores are standard normal; the mean of their exponentials is exp(1/2), with a normal bias exp(1).
        expected = np.log(end - first) + (1.0 if self.has_bias else 0.5)
        drawn: Array = (expected + 0.1 * rng.standard_normal(tensor.shape)).astype(np.float32)
        return drawn

    def stress(self) -> Mapping[str, Stress]:
        """Return queries with large or equal scores, keys far from 0, and values and gradients of any size.

        Gradients have moderate scores, since their lse is drawn.
        """
        rows: tuple[StressKind, ...] = ("mixed", "zeros", "offset", "tiny", "sparse")
        if self.direction == "backward":
            return {"do": Stress(kinds=rows), "v": Stress(kinds=("mixed", "zeros", "sparse"))}
        return {
            "q": Stress(kinds=("logits", "zeros", "large", "constant", "tiny", "sparse")),
            "k": Stress(kinds=("offset", "zeros", "sparse")),
            "v": Stress(kinds=rows),
        }

    def _draw_bias(self, tensor: Tensor, rng: numpy.random.Generator) -> Array:
        """Draw normal biases, of which some are minus infinity; one query in 16 sees no key."""
        drawn = rng.standard_normal(tensor.shape)
        drawn[rng.random(tensor.shape) < HIDDEN_SHARE] = -np.inf
        drawn[:, :, 7::16] = -np.inf
        return drawn.astype(numpy_dtype(tensor.dtype))

    # -- reference -------------------------------------------------------------------------------

    def reference(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        """Compute the heads one by one, some queries at a time."""
        value = {tensor.name: np.zeros(tensor.shape) for tensor in self.outputs()}
        error = {tensor.name: np.zeros(tensor.shape) for tensor in self.outputs()}
        compute = self._forward if self.direction == "forward" else self._backward
        for b in range(self.batch):
            for h in range(self.heads):
                for start in range(0, self.seq_q, ROWS_AT_ONCE):
                    rows = slice(start, min(self.seq_q, start + ROWS_AT_ONCE))
                    compute(inputs, (b, h, rows), value, error)
        eps_acc = self.tolerance().eps_acc
        return {
            tensor.name: self._allowed(tensor, value[tensor.name], error[tensor.name], eps_acc)
            for tensor in self.outputs()
        }

    def _allowed(self, tensor: Tensor, value: Array64, error: Array64, eps_acc: float) -> Reference:
        """Return a reference whose scale allows `error` and the rounding to the type of the tensor."""
        return Reference(value=value, scale=(error + excess_rounding(value, tensor.dtype)) / eps_acc)

    def _scores(
        self, inputs: Mapping[str, Array64], block: tuple[int, int, slice]
    ) -> tuple[Array64, Array64, Array64]:
        """Return the scores of some queries (minus infinity where masked), their errors, and the mask."""
        b, h, rows = block
        q, k = inputs["q"][b, h, rows], inputs["k"][b, h // self.group]
        scores = self.scale * (q @ k.T)
        # Roundings: a sum of head_dim products in f32, the scale, and the argument of exp.
        error = 2 * math.sqrt(self.head_dim) * F32 * self.scale * (
            np.abs(q) @ np.abs(k).T
        ) + 4 * F32 * np.abs(scores)
        seen = np.ones(scores.shape, bool)
        if self.causal:
            first, end = self.keys_of(np.arange(rows.start, rows.stop)[:, None])
            keys = np.arange(self.seq_k)
            seen = (first <= keys) & (keys < end)
        if self.has_bias:
            bias = inputs["bias"]
            bias = bias[b % len(bias), h % bias.shape[1], rows if bias.shape[2] > 1 else slice(1)]
            seen = seen & (bias != -np.inf)
            bias = np.where(seen, np.maximum(bias, LOWEST_BIAS), 0.0)
            scores = scores + bias
            error = error + 4 * F32 * (np.abs(bias) + np.abs(scores))
        return np.where(seen, scores, -np.inf), error, seen

    def _forward(
        self,
        inputs: Mapping[str, Array64],
        block: tuple[int, int, slice],
        value: dict[str, Array64],
        error: dict[str, Array64],
    ) -> None:
        b, h, rows = block
        v = inputs["v"][b, h // self.group]
        scores, off, _ = self._scores(inputs, block)
        top = np.maximum(scores.max(axis=1, keepdims=True), HIDDEN_ROW_LSE)
        e = np.exp(scores - top)
        total = e.sum(axis=1, keepdims=True)
        total[total == 0] = 1.0  # of a row that sees no key
        p = e / total
        mean_off = (p * off).sum(axis=1, keepdims=True)
        value["o"][b, h, rows] = p @ v
        value["lse"][b, h, rows] = (top + np.log(total))[:, 0]
        # Error of each probability: its rounding, that of the sums, and the effect of the error of exp's
        # argument.
        relative = self._of_products(self.seq_k) + off + mean_off
        error["o"][b, h, rows] = (p * relative) @ np.abs(v) + underflow(self.dtype) / total * np.abs(v).sum(
            axis=0
        )
        error["lse"][b, h, rows] = (mean_off + sum_error(self.seq_k) + 4 * F32 * np.abs(top))[:, 0]

    def _backward(
        self,
        inputs: Mapping[str, Array64],
        block: tuple[int, int, slice],
        value: dict[str, Array64],
        error: dict[str, Array64],
    ) -> None:
        b, h, rows = block
        shared = h // self.group
        q, do, o, lse = (inputs[name][b, h, rows] for name in ("q", "do", "o", "lse"))
        k, v = inputs["k"][b, shared], inputs["v"][b, shared]
        scores, off, seen = self._scores(inputs, block)
        p = np.where(scores > 0.5 * LOWEST_BIAS, np.exp(scores - lse[:, None]), 0.0)
        dp, d = do @ v.T, (do * o).sum(axis=1, keepdims=True)
        ds = p * (dp - d)
        dp_off = np.abs(do) @ np.abs(v).T + np.abs(do * o).sum(axis=1, keepdims=True)
        # Errors of p and of ds, by element: the effect of the error of exp's argument, sums in f32, and
        # rounding.
        relative = off + 4 * F32 * np.abs(lse)[:, None] + 8 * F32
        p_off = p * (relative + self._of_products(self.terms)) + underflow(self.dtype) * seen
        ds_off = p * (np.abs(dp - d) * relative + 2 * math.sqrt(self.head_dim) * F32 * dp_off)
        ds_off += np.abs(ds) * self._of_products(self.terms) + underflow(self.dtype) * seen
        value["dq"][b, h, rows] = self.scale * (ds @ k)
        error["dq"][b, h, rows] = self.scale * (ds_off @ np.abs(k))
        value["dk"][b, shared] += self.scale * (ds.T @ q)
        error["dk"][b, shared] += self.scale * (ds_off.T @ np.abs(q))
        value["dv"][b, shared] += p.T @ do
        error["dv"][b, shared] += p_off.T @ np.abs(do)

    @property
    def terms(self) -> int:
        """Largest number of products summed for one element of a gradient."""
        return max(self.seq_k, self.group * self.seq_q)

    def _of_products(self, terms: int) -> float:
        """Return the relative error of an f32 sum of products whose left factor is rounded to the type."""
        return unit_roundoff(self.dtype) + sum_error(terms)

    def tolerance(self) -> Tolerance:
        """Allow probabilities rounded to the type, and f32 sums in any order; scales hold the rest."""
        terms = self.seq_k if self.direction == "forward" else self.terms
        return Tolerance(
            eps_out=F32,
            eps_acc=self._of_products(terms),
            reason=f"probabilities and their gradients rounded to {self.dtype} before they are multiplied; "
            "f32 sums of n products err by 2 sqrt(n) u with overwhelming probability; exp turns the absolute "
            "error of a score into a relative one; each output rounded once to its type",
        )
