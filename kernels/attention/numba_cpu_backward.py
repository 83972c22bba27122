"""Attention gradients on the CPU: blocks of scores are recomputed, and multiplied in vector registers.

A worker owns some rows of one side, keys for dk and dv: X and Y (k and v), packed in f32, so that a row of a
block of scores is a product of a row of the other side's U and W (q and do) with them. Blocks of scores stay
in the cache: S = U X^T, P = exp(scale S + bias - lse), dP = W Y^T, dS = P * (dP - D). Gradients of the rows
are sums of P^T W (dv) and of dS^T U (dk), which need no packing, since they run along columns of a block.

With dq=by_head a worker has all keys of a head and all heads that share them, so that no other worker adds to
their dq: 5 products. With dq=second_pass it has single blocks of keys, and then of queries, whose dq are sums
of dS^T U: 7 products, and parallelism for more cores than there are heads of keys.

f16 and bf16 are converted to f32 when read; p and ds are never rounded.

Source: Dao, "FlashAttention-2: faster attention with better parallelism and work partitioning", 2023,
algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.kernels.attention._numba_attention import (
    bias_adder,
    bias_line,
    bias_name,
    clearer,
    packer,
    widener,
    writer,
)
from tunebench.kernels.common.numba_cpu import address, exp2, jitted, load
from tunebench.kernels.common.numba_product import LANES, registers_hold, strided_product
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, NumbaCpuVariant, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.operators.attention import Attention

BUFFER_BYTES = 4 << 20
"""Most bytes of a worker's blocks, about the size of a second-level cache."""


def blocks_are_useful(rows: Any, others: Any, workload: Attention) -> Any:
    """Blocks must not be twice as long as both sequences if shorter blocks exist."""
    longest = max(workload.seq_q, workload.seq_k)
    return ((rows == 32) | (rows < 2 * longest)) & ((others == 32) | (others < 2 * longest))


def buffers_fit(rows: Any, others: Any, workload: Attention) -> Any:
    """The buffer of a worker should fit in its cache, unless blocks are the smallest."""
    pitch = _pitch(workload)
    elements = rows * (2 * workload.head_dim + 3 * pitch) + others * (2 * pitch + 2 * rows)
    return (4 * elements <= BUFFER_BYTES) | ((rows == 32) & (others == 32))


SPACE = Space(
    (
        Parameter(
            "dq", ("by_head", "second_pass"), "dq: summed by the worker of a head's keys, or in a second pass"
        ),
        Parameter("rows", (32, 64, 128, 256), "keys (or queries) of a block"),
        Parameter("others", (32, 64, 128, 256), "rows of the other side in an iteration"),
        Parameter("mr", (2, 4, 8), "rows of a product in registers"),
        Parameter("nr", (16, 32), "columns of a product in registers"),
        Parameter("unroll", (1, 4), "elements of a head in an iteration of the innermost loop"),
    ),
    (
        registers_hold,
        blocks_are_useful,
        buffers_fit,
        lambda unroll, workload: (unroll == 1) | (workload.head_dim % unroll == 0),
    ),
)


def _pitch(workload: Attention) -> int:
    """Return the distance of rows of a head in f32, in elements: whole vectors."""
    return int(ceil_div(workload.head_dim, LANES)) * LANES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffer:
    """Layout of a worker's buffer, in elements."""

    rows: int
    others: int
    head_dim: int
    pitch: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of packed x and y, of x, u, w, P, dP, both gradients, and terms of queries."""
        across, own, other = self.rows * self.head_dim, self.rows * self.pitch, self.others * self.pitch
        scores = self.rows * self.others
        return (across, across, own, other, other, scores, scores, own, own, 2 * self.rows)

    @property
    def places(self) -> tuple[int, ...]:
        """Offset of each part."""
        return tuple(sum(self.sizes[:i]) for i in range(len(self.sizes)))

    @property
    def size(self) -> int:
        """Elements of the buffer."""
        return sum(self.sizes)


class NumbaCpuAttentionBackward(NumbaCpuVariant[Attention]):
    """Backward variant for every size and type: with any mask or bias, with grouped queries."""

    name = "numba_cpu_backward"
    operator = Attention
    direction = "backward"
    space = SPACE

    def default(self, workload: Attention, device: Device) -> Config:
        """Return square blocks; workers get whole heads if there are enough."""
        enough = workload.batch * workload.heads_k >= device.sm_count
        longest = max(workload.seq_q, workload.seq_k)
        edge = max(b for b in (32, 64, 128) if b == 32 or b < 2 * longest)
        values: dict[str, Any] = {"dq": "by_head" if enough else "second_pass", "rows": edge, "others": edge}
        usual = [
            Config({**values, "mr": mr, "nr": nr, "unroll": 1}) for mr, nr in ((8, 32), (4, 16), (2, 16))
        ]
        smallest = Config({**usual[-1], "rows": 32, "others": 32})
        return self.space.first_valid((*usual, smallest), workload=workload, device=device)

    def costs(self, workload: Attention, table: Table, device: Device) -> Costs:
        """Count the products of unmasked elements: five, or seven if scores are computed twice."""
        products = np.where(table["dq"] == "by_head", 5.0, 7.0)
        return Costs(blocks=1, full_blocks=0, threads=1, fma=products / 10 * workload.flops())

    def scratch(self, workload: Attention, config: Config) -> tuple[Tensor, ...]:
        """Return memory for D of each query, and for sums of dq in whole blocks of each head."""
        heads = (workload.batch, workload.heads)
        whole = ceil_div(workload.seq_q, config["others"]) * config["others"]
        kept = whole if config["dq"] == "by_head" else 1
        return (
            Tensor(name="deltas", shape=(*heads, workload.seq_q), dtype="f32"),
            Tensor(name="dq_sums", shape=(*heads, kept, _pitch(workload)), dtype="f32"),
        )

    def arguments(self, workload: Attention, config: Config) -> tuple[Argument, ...]:
        """Return the tensors; q takes the place of a missing bias, and is not read as one."""
        inputs = ("q", "k", "v", "o", "lse", "do", bias_name(workload))
        return (*inputs, "dq", "dk", "dv", "deltas", "dq_sums")

    def kernel(self, workload: Attention, config: Config) -> Callable[..., None]:
        """Return the kernel `(q, k, v, o, lse, do, bias, dq, dk, dv, deltas, dq_sums)`."""
        import numba
        import numpy as np

        size, address_of = _buffer(workload, config).size, address()
        delta = _delta(workload, self.fastmath)
        # A query within the kernel would put an address of this process into the machine code.
        workers = np.int64(numba.config.NUMBA_NUM_THREADS)
        walk = _walk(workload, config, workers, self.fastmath)

        def backward(
            q: Any,
            k: Any,
            v: Any,
            o: Any,
            lse: Any,
            do: Any,
            bias: Any,
            dq: Any,
            dk: Any,
            dv: Any,
            deltas: Any,
            dq_sums: Any,
        ) -> None:
            heads, heads_k = q.shape[0] * q.shape[1], k.shape[0] * k.shape[1]
            sizes = (q.shape[2], k.shape[2], heads // heads_k, dq_sums.shape[2], q.shape[1])
            for head in numba.prange(heads):
                delta(address_of(o), address_of(do), address_of(deltas), head, q.shape[2])
            buffers = np.empty((workers, size), np.float32)
            for worker in numba.prange(workers):
                inputs = address_of(q), address_of(k), address_of(v), address_of(do), address_of(lse)
                outputs = address_of(deltas), address_of(dq), address_of(dk), address_of(dv)
                arrays = (*inputs, *outputs, address_of(dq_sums), address_of(bias))
                walk(arrays, sizes, heads, address_of(buffers[worker]), np.int64(worker))

        return backward


def _walk(workload: Attention, config: Config, workers: Any, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the jitted `(arrays, sizes, heads, buffer, worker)` that computes a worker's part.

    `arrays` are addresses of q, k, v, do, lse, deltas, dq, dk, dv, dq_sums and bias. `sizes` are seq_q,
    seq_k, the heads that share keys, the queries of each head in dq_sums, and the heads of q in an item.
    """
    rows = config["rows"]
    if config["dq"] == "by_head":
        return _walk_heads(workload, config, workers, fastmath)
    keys, queries = (_block(workload, config, side, False, fastmath) for side in ("keys", "queries"))

    @jitted(fastmath)
    def walk(arrays: Any, sizes: Any, heads: int, buffer: Any, worker: int) -> None:
        turn = 0
        for head in range(heads // sizes[2]):
            for first in range(0, sizes[1], rows):
                if turn % workers == worker:
                    keys(arrays, sizes, head, first, min(rows, sizes[1] - first), buffer)
                turn += 1
        for head in range(heads):
            for first in range(0, sizes[0], rows):
                if turn % workers == worker:
                    queries(arrays, sizes, head, first, min(rows, sizes[0] - first), buffer)
                turn += 1

    return walk


def _walk_heads(
    workload: Attention, config: Config, workers: Any, fastmath: frozenset[str]
) -> Callable[..., None]:
    """Return that function for workers with whole heads of keys, which sum dq of their queries."""
    import numpy as np

    rows, pitch, head_dim = config["rows"], _pitch(workload), workload.head_dim
    scale = np.float32(workload.scale)
    keys = _block(workload, config, "keys", True, fastmath)
    clear, write = clearer(fastmath), _write(workload, fastmath)

    @jitted(fastmath)
    def walk(arrays: Any, sizes: Any, heads: int, buffer: Any, worker: int) -> None:
        seq_q, seq_k, group, held, _ = sizes
        for head in range(worker, heads // group, workers):
            clear(arrays[9], head * group * held * pitch, group * held * pitch)
            for first in range(0, seq_k, rows):
                keys(arrays, sizes, head, first, min(rows, seq_k - first), buffer)
            for shared in range(head * group, (head + 1) * group):
                write(arrays[9], shared * held * pitch, arrays[6], shared * seq_q * head_dim, seq_q, scale)

    return walk


def _buffer(workload: Attention, config: Config) -> _Buffer:
    return _Buffer(
        rows=config["rows"], others=config["others"], head_dim=workload.head_dim, pitch=_pitch(workload)
    )


def _block(
    workload: Attention,
    config: Config,
    side: Literal["keys", "queries"],
    adds_dq: bool,
    fastmath: frozenset[str],
) -> Callable[..., None]:
    """Return the jitted `(arrays, sizes, head, first, used, buffer)` for gradients of some rows of a side."""
    import numpy as np

    of_keys, causal, rows, others = side == "keys", workload.causal, config["rows"], config["others"]
    head_dim, scale, unit = workload.head_dim, np.float32(workload.scale), np.float32(1)
    x_across, y_across, x, _, _, _, _, of_p, of_ds, terms = _buffer(workload, config).places
    own, own_too = (1, 2) if of_keys else (0, 3)
    pack, widen = packer(workload.dtype, head_dim, config["nr"], fastmath), _widen(workload, fastmath)
    clear, write, keep_terms = clearer(fastmath), _write(workload, fastmath), _keep_terms(fastmath)
    accumulate = _accumulate(workload, config, of_keys, adds_dq, fastmath)
    aligned_first, window, line = workload.align == "first", workload.window, bias_line(workload)

    @jitted(fastmath)
    def block(arrays: Any, sizes: Any, head: int, first: int, used: int, buffer: Any) -> None:
        seq_q, seq_k, group, _, heads = sizes
        before = 0 if aligned_first else seq_k - seq_q
        length, across = (seq_k, seq_q) if of_keys else (seq_q, seq_k)
        begin = head * length + first
        pack(arrays[own], begin * head_dim, used, buffer, x_across)
        pack(arrays[own_too], begin * head_dim, used, buffer, y_across)
        if adds_dq:
            widen(arrays[own], begin * head_dim, used, buffer, x)
        if not of_keys:
            keep_terms(arrays[4], arrays[5], begin, used, buffer, terms, rows)
        clear(buffer, of_p, 2 * (of_ds - of_p))
        start, end = 0, across
        if causal and of_keys:
            start = max(0, first - before) // others * others
            end = min(across, first + used - 1 - before + window) if window else across
        if causal and not of_keys:
            start = max(0, first + 1 + before - window) // others * others if window else 0
            end = min(across, first + used + before)
        shared = head * group if of_keys else head // group
        for other in range(shared, shared + (group if of_keys else 1)):
            biases = line(other if of_keys else head, 0, heads, seq_q, seq_k)
            for at in range(start, end, others):
                accumulate(arrays, sizes, other, at, min(others, end - at), first, used, buffer, biases)
        if of_keys:
            write(buffer, of_p, arrays[8], begin * head_dim, used, unit)
        write(buffer, of_ds, arrays[7] if of_keys else arrays[6], begin * head_dim, used, scale)

    return block


def _accumulate(
    workload: Attention, config: Config, of_keys: bool, adds_dq: bool, fastmath: frozenset[str]
) -> Callable[..., None]:
    """Return the jitted function that adds the contribution of some rows of the other side.

    Its last argument is the place of the first bias of their head of q.
    """
    head_dim, pitch = workload.head_dim, _pitch(workload)
    x_across, y_across, x, u, w, p, ds, of_p, of_ds, _ = _buffer(workload, config).places
    other, other_too = (0, 3) if of_keys else (1, 2)
    multiply_scores, multiply_gradients, add_shares = _products(workload, config, fastmath)
    widen, exponentiate = _widen(workload, fastmath), _exponentiate(workload, config, of_keys, fastmath)

    @jitted(fastmath)
    def accumulate(
        arrays: Any,
        sizes: Any,
        head: int,
        at: int,
        count: int,
        first: int,
        used: int,
        buffer: Any,
        biases: int,
    ) -> None:
        begin = head * (sizes[0] if of_keys else sizes[1]) + at
        widen(arrays[other], begin * head_dim, count, buffer, u)
        widen(arrays[other_too], begin * head_dim, count, buffer, w)
        multiply_scores(buffer, u, x_across, p, count, used)
        multiply_scores(buffer, w, y_across, ds, count, used)
        exponentiate(arrays, sizes, begin, at, count, first, used, buffer, biases)
        if of_keys:
            multiply_gradients(buffer, p, w, of_p, count, used)
        multiply_gradients(buffer, ds, u, of_ds, count, used)
        if adds_dq:
            add_shares(buffer, ds, x, arrays[9], (head * sizes[3] + at) * pitch, count, used)

    return accumulate


def _products(
    workload: Attention, config: Config, fastmath: frozenset[str]
) -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    """Return the functions for scores, for gradients of the rows, and for gradients of the other side.

    Whole tiles are multiplied; elements beyond `count` or `used` never reach a result.
    """
    head_dim, pitch = workload.head_dim, _pitch(workload)
    rows, mr, nr = (config[name] for name in ("rows", "mr", "nr"))
    wide = nr if pitch % nr == 0 else LANES
    scores = strided_product(
        mr,
        nr,
        a_strides=(pitch, 1),
        b_pitch=nr,
        unroll=config["unroll"],
        adds=False,
    )
    gradients = strided_product(mr, wide, a_strides=(1, rows), b_pitch=pitch)
    shares = strided_product(mr, wide, a_strides=(rows, 1), b_pitch=pitch)

    @jitted(fastmath)
    def multiply_scores(buffer: Any, left: int, right: int, to: int, count: int, used: int) -> None:
        for n in range(0, used, nr):
            for m in range(0, count, mr):
                row, strip = left + m * pitch, right + n * head_dim
                scores(head_dim, buffer, row, buffer, strip, buffer, to + m * rows + n, rows)

    @jitted(fastmath)
    def multiply_gradients(buffer: Any, left: int, right: int, to: int, count: int, used: int) -> None:
        for n in range(0, pitch, wide):
            for m in range(0, used, mr):
                gradients(count, buffer, left + m, buffer, right + n, buffer, to + m * pitch + n, pitch)

    @jitted(fastmath)
    def add_shares(buffer: Any, left: int, right: int, sums: Any, to: int, count: int, used: int) -> None:
        for n in range(0, pitch, wide):
            for m in range(0, count, mr):
                shares(used, buffer, left + m * rows, buffer, right + n, sums, to + m * pitch + n, pitch)

    return multiply_scores, multiply_gradients, add_shares


def _exponentiate(
    workload: Attention, config: Config, of_keys: bool, fastmath: frozenset[str]
) -> Callable[..., None]:
    """Return the jitted function that turns S and dP of a block into P and dS, with masked elements zero."""
    import numpy as np

    causal, rows, zero = workload.causal, config["rows"], np.float32(0)
    _, _, _, _, _, p, ds, _, _, _ = _buffer(workload, config).places
    line = (_line_of_query if of_keys else _line_of_key)(workload, config, fastmath)
    aligned_first, window = workload.align == "first", workload.window
    biased, of_query = workload.has_bias, "q" in workload.bias
    add = bias_adder(workload, 1 / workload.scale, fastmath, hides_lowest=True)

    @jitted(fastmath)
    def hide(buffer: Any, p_at: int, ds_at: int, start: int, end: int) -> None:
        for j in range(start, end):
            buffer[p_at + j] = zero
            buffer[ds_at + j] = zero

    @jitted(fastmath)
    def exponentiate(
        arrays: Any,
        sizes: Any,
        begin: int,
        at: int,
        count: int,
        first: int,
        used: int,
        buffer: Any,
        biases: int,
    ) -> None:
        before = 0 if aligned_first else sizes[1] - sizes[0]
        pitch = sizes[1] if of_query else 0  # of the biases of neighbouring queries
        for i in range(count):
            p_at, ds_at, start, end = p + i * rows, ds + i * rows, 0, used
            if causal and of_keys:
                end = min(used, max(0, at + i + before + 1 - first))
                start = max(0, at + i + before + 1 - window - first) if window else 0
            if causal and not of_keys:
                start = min(used, max(0, at + i - before - first))
                end = min(used, at + i - before + window - first) if window else used
            start, end = min(start, used), max(end, 0)
            if biased and of_keys:
                place = biases + (at + i) * pitch + first + start
                add(arrays[10], place, 1, buffer, p_at + start, p_at + end)
            if biased and not of_keys:
                place = biases + (first + start) * pitch + at + i
                add(arrays[10], place, pitch, buffer, p_at + start, p_at + end)
            line(arrays, begin + i, buffer, p_at, ds_at, start, end)
            if causal:
                hide(buffer, p_at, ds_at, 0, start)
                hide(buffer, p_at, ds_at, end, used)

    return exponentiate


def _line_of_query(workload: Attention, config: Config, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return that function for a line of one query and several keys."""
    import numpy as np

    power, log2_e = exp2(), np.float32(np.log2(np.e))
    exponent = np.float32(workload.scale) * log2_e

    @jitted(fastmath)
    def elements(buffer: Any, p_at: int, ds_at: int, start: int, end: int, less: Any, delta: Any) -> None:
        for j in range(start, end):
            value = power(buffer[p_at + j] * exponent - less)
            buffer[p_at + j] = value
            buffer[ds_at + j] = value * (buffer[ds_at + j] - delta)

    @jitted(fastmath)
    def line(arrays: Any, row: int, buffer: Any, p_at: int, ds_at: int, start: int, end: int) -> None:
        elements(buffer, p_at, ds_at, start, end, arrays[4][row] * log2_e, arrays[5][row])

    return line


def _line_of_key(workload: Attention, config: Config, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return that function for a line of one key and several queries, whose terms are in the buffer."""
    import numpy as np

    power, rows, terms = exp2(), config["rows"], _buffer(workload, config).places[-1]
    exponent = np.float32(workload.scale) * np.float32(np.log2(np.e))

    @jitted(fastmath)
    def line(arrays: Any, row: int, buffer: Any, p_at: int, ds_at: int, start: int, end: int) -> None:
        for j in range(start, end):
            value = power(buffer[p_at + j] * exponent - buffer[terms + j])
            buffer[p_at + j] = value
            buffer[ds_at + j] = value * (buffer[ds_at + j] - buffer[terms + rows + j])

    return line


# -- loads and stores of rows --------------------------------------------------------------------------------


def _delta(workload: Attention, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the jitted function that sums do * o over the row of each query of a head."""
    import numpy as np

    read, head_dim, zero = load(workload.dtype), workload.head_dim, np.float32(0)

    @jitted(fastmath)
    def product(o: Any, do: Any, begin: int) -> Any:
        total = zero
        for d in range(begin, begin + head_dim):
            total += read(o[d]) * read(do[d])
        return total

    @jitted(fastmath)
    def delta(o: Any, do: Any, deltas: Any, head: int, seq_q: int) -> None:
        for row in range(head * seq_q, (head + 1) * seq_q):
            deltas[row] = product(o, do, row * head_dim)

    return delta


def _widen(workload: Attention, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the jitted function that copies rows as f32."""
    head_dim, pitch, widen_row = workload.head_dim, _pitch(workload), widener(workload.dtype, fastmath)

    @jitted(fastmath)
    def widen(source: Any, begin: int, used: int, buffer: Any, to: int) -> None:
        for i in range(used):
            widen_row(source, begin + i * head_dim, head_dim, buffer, to + i * pitch)

    return widen


def _keep_terms(fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the jitted function that stores lse, as an exponent of 2, and D of the queries in columns."""
    import numpy as np

    log2_e = np.float32(np.log2(np.e))

    @jitted(fastmath)
    def keep_terms(lse: Any, deltas: Any, begin: int, used: int, buffer: Any, to: int, rows: int) -> None:
        for i in range(used):
            buffer[to + i] = lse[begin + i] * log2_e
            buffer[to + rows + i] = deltas[begin + i]

    return keep_terms


def _write(workload: Attention, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the jitted function that scales and rounds rows of sums."""
    head_dim, pitch, write_row = workload.head_dim, _pitch(workload), writer(workload.dtype, fastmath)

    @jitted(fastmath)
    def write(sums: Any, at: int, target: Any, begin: int, used: int, factor: Any) -> None:
        for i in range(used):
            write_row(sums, at + i * pitch, head_dim, target, begin + i * head_dim, factor)

    return write


VARIANT = NumbaCpuAttentionBackward()
