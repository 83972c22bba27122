"""Forward attention on the CPU: blocks of rows in parallel, each with tiles of keys.

Rows are queries of all heads that share keys, query by query. A thread has a block of mr * m_panels rows and
processes tiles of nr * n_panels keys one after the other, all as f32: by products with packed k and v, or
with `direct`, for few rows, by dot products with keys in place. A bias is added to the scores of a tile. The
softmax is updated tile by tile. With a causal mask, tiles that no row of a block attends to are skipped.

Packed tiles are multiplied by the micro-kernel of `numba_product`; the exponential is a polynomial that
vectorises.

Source: Dao, "FlashAttention-2", 2023, algorithm 1; Goto and van de Geijn, "Anatomy of High-Performance
Matrix Multiplication", 2008.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
from tunebench.kernels.common.numba_cpu import address, exp2, jitted, load, rank
from tunebench.kernels.common.numba_product import (
    BUFFER_BYTES,
    LANES,
    dot_product,
    registers_hold,
    strided_product,
)
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, NumbaCpuVariant, ceil_div
from tunebench.workloads.operators.attention import Attention


def _rows(workload: Attention) -> int:
    return workload.seq_q * workload.group


def buffers_fit(mr: Any, nr: Any, m_panels: Any, n_panels: Any, workload: Attention) -> Any:
    """Rows, a tile of keys and its scores must fit in the second-level cache."""
    rows, keys, dim = mr * m_panels, nr * n_panels, workload.head_dim
    return 4 * (2 * (rows + keys) * dim + rows * keys) <= BUFFER_BYTES


SPACE = Space(
    (
        Parameter(
            "form",
            ("packed", "direct"),
            "packed: products of packed tiles; direct: dot products, for few rows",
        ),
        Parameter("mr", (1, 2, 4, 6, 8, 12), "rows in registers"),
        Parameter("nr", (16, 32, 48), "keys, or columns of results, in registers"),
        Parameter("m_panels", (1, 2, 4, 8, 16, 32), "strips of mr rows in a block"),
        Parameter("n_panels", (1, 2, 4, 8, 16), "strips of nr keys in a tile"),
    ),
    (
        registers_hold,
        buffers_fit,
        lambda form, mr, nr: (form == "packed") | ((mr == 1) & (nr == 16)),
        lambda form, mr, m_panels: (form == "packed") | (mr * m_panels <= 16),
        lambda mr, workload: (mr == 1) | (mr < 2 * _rows(workload)),
        lambda nr, workload: (nr == 16) | (nr < 2 * workload.seq_k),
        lambda mr, m_panels, workload: (m_panels == 1) | (mr * m_panels < 2 * _rows(workload)),
        lambda nr, n_panels, workload: (n_panels == 1) | (nr * n_panels < 2 * workload.seq_k),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Layout of a worker's buffer, in elements; constants of the machine code.

    Attributes:
        rows: Rows of a block.
        keys: Keys of a tile.
        dim: head_dim.
        columns: Columns of results: head_dim padded with zeros to a multiple of nr.
    """

    rows: int
    keys: int
    dim: int
    columns: int

    @property
    def k(self) -> int:
        """Offset of packed keys; rows of q start at 0."""
        return self.rows * self.dim

    @property
    def v(self) -> int:
        """Offset of packed values."""
        return self.k + self.keys * self.dim

    @property
    def scores(self) -> int:
        """Offset of scores."""
        return self.v + self.keys * self.columns

    @property
    def results(self) -> int:
        """Offset of results."""
        return self.scores + self.rows * self.keys

    @property
    def tops(self) -> int:
        """Offset of each row's maximum score so far; sums of exponentials follow after `rows` elements."""
        return self.results + self.rows * self.columns

    @property
    def size(self) -> int:
        """Elements of the buffer."""
        return self.tops + 2 * self.rows


class NumbaCpuAttention(NumbaCpuVariant[Attention]):
    """Serves every size and type, forward."""

    name = "numba_cpu"
    operator = Attention
    direction = "forward"
    space = SPACE
    fastmath = frozenset({"reassoc", "contract", "arcp", "nsz", "afn"})

    def limits(self, workload: Attention, device: Device) -> str | None:
        """Return why the variant does not support a workload, or None."""
        if 4 * (2 * 17 * workload.head_dim + 16) > BUFFER_BYTES:
            return f"{self.key} keeps tiles in a cache, which is too small for head_dim={workload.head_dim}"
        return None

    def default(self, workload: Attention, device: Device) -> Config:
        """Return tiles that fill the registers, about 128 x 128; dot products for up to 4 rows."""
        rows, few = _rows(workload), _rows(workload) <= 4
        mr, nr = {"x86_64-v4": (8, 32), "x86_64-v3": (6, 16), "aarch64": (4, 16), "arm64": (4, 16)}.get(
            device.architecture, (2, 16)
        )
        mr = 1 if few else max(m for m in (1, 2, 4, 6, 8) if m == 1 or (m <= mr and m < 2 * rows))
        nr = 16 if few or nr >= 2 * workload.seq_k else nr
        ordered = (
            Config(
                {
                    "form": "direct" if few else "packed",
                    "mr": mr,
                    "nr": nr,
                    "m_panels": m_panels,
                    "n_panels": n_panels,
                }
            )
            for m_panels in (16, 8, 4, 2, 1)
            for n_panels in (8, 4, 2, 1)
            if nr * n_panels <= 128 and self._leaves_work(workload, mr * m_panels, device)
        )
        return self.space.first_valid(ordered, workload=workload, device=device)

    def _leaves_work(self, workload: Attention, rows: int, device: Device) -> bool:
        """Return whether there are two blocks of rows for each core, if the workload allows it."""
        heads = workload.batch * workload.heads_k
        return rows <= 12 or heads * ceil_div(_rows(workload), rows) >= 2 * device.sm_count

    def costs(self, workload: Attention, table: Table, device: Device) -> Costs:
        """Count the multiply-adds of both products, for keys that are not masked."""
        return Costs(blocks=1, full_blocks=0, threads=1, fma=float(workload.flops() // 2))

    def arguments(self, workload: Attention, config: Config) -> tuple[Argument, ...]:
        """Return the tensors; q takes the place of a missing bias, and is not read as one."""
        return ("q", "k", "v", bias_name(workload), "o", "lse")

    def kernel(self, workload: Attention, config: Config) -> Callable[..., None]:
        """Return the kernel `(q, k, v, bias, o, lse)` for the workload's type and head_dim."""
        import numba
        import numpy as np

        mr, nr, dim = config["mr"], config["nr"], workload.head_dim
        rows, keys = mr * config["m_panels"], nr * config["n_panels"]
        room = Room(rows=rows, keys=keys, dim=dim, columns=ceil_div(dim, nr) * nr)
        block = _block(workload, config, room, self.fastmath)
        size, address_of = room.size, address()
        # A query within the kernel would put an address of this process into the machine code.
        workers = np.int64(numba.config.NUMBA_NUM_THREADS)

        def attention(q: Any, k: Any, v: Any, bias: Any, o: Any, lse: Any) -> None:
            heads, seq_q, seq_k = q.shape[0] * k.shape[1], q.shape[2], k.shape[2]
            group = q.shape[1] // k.shape[1]
            blocks = (seq_q * group + rows - 1) // rows
            buffers = np.empty((workers, size), np.float32)
            for worker in numba.prange(workers):
                arrays = address_of(q), address_of(k), address_of(v), address_of(o), address_of(lse)
                buffer, of_bias = address_of(buffers[worker]), address_of(bias)
                # The last rows come first: under a causal mask they are the longest.
                for task in range(np.int64(worker), heads * blocks, workers):
                    first = (blocks - 1 - task % blocks) * rows
                    block(arrays, of_bias, (seq_q, seq_k, group, q.shape[1]), task // blocks, first, buffer)

        return attention


def _block(workload: Attention, config: Config, room: Room, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the function for a block: `(arrays, bias, sizes, head of k, first row, buffer)`."""
    import numpy as np

    rows, keys, causal, window = room.rows, room.keys, workload.causal, workload.window
    begin, finish = _begin(workload, room, fastmath), _finish(workload, room, fastmath)
    packed = config["form"] == "packed"
    scores = (_packed_scores if packed else _direct_scores)(workload, config, room, fastmath)
    results = (_packed_results if packed else _direct_results)(workload, config, room, fastmath)
    exponentiate, modify = _exponentiate(room, fastmath), _modify(workload, room, fastmath)
    aligned_first = workload.align == "first"

    dim = np.int64(room.dim)

    @jitted(fastmath)
    def block(arrays: Any, bias: Any, sizes: Any, head: int, first: int, buffer: Any) -> None:
        q, k, v, o, lse = arrays
        seq_q, seq_k, group, _ = sizes
        count = min(rows, seq_q * group - first)
        begin(q, sizes, head, first, count, buffer)
        before = (1 if aligned_first else seq_k - seq_q + 1) if causal else seq_k
        last = (first + count - 1) // group if causal else 0
        start = max(0, before + first // group - window) if window else 0
        end = min(seq_k, before + last)
        for key in range(start, end, keys):
            seen = min(keys, end - key)
            at = (head * seq_k + key) * dim
            scores(k, at, count, seen, buffer)
            for row in range(count):
                query = (first + row) // group
                own = before + query if causal else before
                modify(bias, sizes, head, first + row, key, seen, min(seen, own - window - key), buffer, row)
                exponentiate(buffer, row, min(seen, own - key), seen)
            results(v, at, count, seen, buffer)
        finish(o, lse, sizes, head, first, count, buffer)

    return block


def _modify(workload: Attention, room: Room, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the function that adds the bias to the scores of a row, and hides keys ahead of its window.

    Its arguments are `(bias, sizes, head of k, row, first key, keys of the tile, keys ahead of the window,
    buffer, row of the block)`.
    """
    import numpy as np

    keys, first_score, log2_e = room.keys, room.scores, math.log2(math.e)
    biased, window, hidden = workload.has_bias, workload.window > 0, np.float32(-np.inf)
    add, line = bias_adder(workload, log2_e, fastmath), bias_line(workload)

    @jitted(fastmath)
    def modify(
        bias: Any, sizes: Any, head: int, row: int, key: int, seen: int, ahead: int, buffer: Any, own: int
    ) -> None:
        begin = first_score + own * keys
        if biased:
            seq_q, seq_k, group, heads = sizes
            at = line(head * group + row % group, row // group, heads, seq_q, seq_k)
            add(bias, at + key, 1, buffer, begin, begin + seen)
        if window:
            for j in range(ahead):
                buffer[begin + j] = hidden

    return modify


def _begin(workload: Attention, room: Room, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the function that copies rows of q to the buffer, scaled so that scores are exponents of 2."""
    import numpy as np

    read, rows, dim, tops = load(workload.dtype), room.rows, room.dim, room.tops
    first_result, all_results, clear = room.results, room.rows * room.columns, clearer(fastmath)
    unit, zero = np.float32(workload.scale * math.log2(math.e)), np.float32(0)
    lowest = np.float32(-1e30)  # finite, so that a row without keys has no NaN

    @jitted(fastmath)
    def begin(q: Any, sizes: Any, head: int, first: int, count: int, buffer: Any) -> None:
        seq_q, _, group, _ = sizes
        for row in range(count):
            source = ((head * group + (first + row) % group) * seq_q + (first + row) // group) * dim
            for d in range(dim):
                buffer[row * dim + d] = read(q[source + d]) * unit
        clear(buffer, count * dim, (rows - count) * dim)
        clear(buffer, first_result, all_results)
        for row in range(rows):
            buffer[tops + row] = lowest
            buffer[tops + rows + row] = zero

    return begin


def _exponentiate(room: Room, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the function for exponentials of scores: `(buffer, row, its keys, keys of the tile)`."""
    import numpy as np

    rows, keys, columns, tops = room.rows, room.keys, room.columns, room.tops
    first_score, first_result, zero = room.scores, room.results, np.float32(0)
    power = exp2()
    rank_of, value_of = rank()

    @jitted(fastmath)
    def highest(buffer: Any, begin: int, count: int, top: Any) -> Any:
        high = rank_of(top)
        for j in range(count):
            high = max(high, rank_of(buffer[begin + j]))
        return value_of(high)

    @jitted(fastmath)
    def raised(buffer: Any, begin: int, count: int, top: Any) -> Any:
        total = zero
        for j in range(count):
            value = power(buffer[begin + j] - top)
            buffer[begin + j] = value
            total += value
        return total

    @jitted(fastmath)
    def exponentiate(buffer: Any, row: int, seen: int, count: int) -> None:
        begin, top = first_score + row * keys, buffer[tops + row]
        high = highest(buffer, begin, seen, top)
        total = raised(buffer, begin, seen, high)
        for j in range(max(seen, 0), count):
            buffer[begin + j] = zero
        factor = power(top - high)
        buffer[tops + row] = high
        buffer[tops + rows + row] = buffer[tops + rows + row] * factor + total
        for d in range(columns):
            buffer[first_result + row * columns + d] *= factor

    return exponentiate


def _finish(workload: Attention, room: Room, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the function that divides results by sums, and stores them and the logarithms of the sums."""
    import numpy as np

    rows, dim, columns, write = room.rows, room.dim, room.columns, writer(workload.dtype, fastmath)
    first_result, tops = room.results, room.tops
    zero, one, ln_2 = np.float32(0), np.float32(1), np.float32(math.log(2))

    @jitted(fastmath)
    def finish(o: Any, lse: Any, sizes: Any, head: int, first: int, count: int, buffer: Any) -> None:
        seq_q, _, group, _ = sizes
        for row in range(count):
            place = (head * group + (first + row) % group) * seq_q + (first + row) // group
            total = buffer[tops + rows + row]
            if total == zero:  # all keys are hidden
                total = one
            factor = one / total
            lse[place] = buffer[tops + row] * ln_2 + np.log(total)
            write(buffer, first_result + row * columns, dim, o, place * dim, factor)

    return finish


# -- products -----------------------------------------------------------------------------------------------


def _packed_scores(
    workload: Attention, config: Config, room: Room, fastmath: frozenset[str]
) -> Callable[..., None]:
    """Return the function that computes scores by a product with packed keys."""
    mr, nr, keys, dim = config["mr"], config["nr"], room.keys, room.dim
    first_k, first_score, pack = room.k, room.scores, packer(workload.dtype, dim, nr, fastmath)
    multiply = strided_product(mr, nr, a_strides=(dim, 1), b_pitch=nr, adds=False)

    @jitted(fastmath)
    def scores(k: Any, at: int, count: int, seen: int, buffer: Any) -> None:
        pack(k, at, seen, buffer, first_k)
        for n in range(0, seen, nr):
            for m in range(0, count, mr):
                target = first_score + m * keys + n
                multiply(dim, buffer, m * dim, buffer, first_k + n * dim, buffer, target, keys)

    return scores


def _packed_results(
    workload: Attention, config: Config, room: Room, fastmath: frozenset[str]
) -> Callable[..., None]:
    """Return the function that adds a product with packed values to the results."""
    mr, nr, keys, dim, columns = config["mr"], config["nr"], room.keys, room.dim, room.columns
    first_v, first_score, first_result = room.v, room.scores, room.results
    widen = widener(workload.dtype, fastmath)
    multiply = strided_product(mr, nr, a_strides=(keys, 1), b_pitch=nr)

    @jitted(fastmath)
    def results(v: Any, at: int, count: int, seen: int, buffer: Any) -> None:
        for n in range(0, dim, nr):
            for key in range(seen):
                target = first_v + n * keys + key * nr
                widen(v, at + key * dim + n, min(nr, dim - n), buffer, target)
        for n in range(0, dim, nr):
            for m in range(0, count, mr):
                p, target = first_score + m * keys, first_result + m * columns + n
                multiply(seen, buffer, p, buffer, first_v + n * keys, buffer, target, columns)

    return results


def _direct_scores(
    workload: Attention, config: Config, room: Room, fastmath: frozenset[str]
) -> Callable[..., None]:
    """Return the function that computes scores key by key, without packing."""
    import numpy as np

    read, keys, dim, first_score = load(workload.dtype), room.keys, room.dim, room.scores
    whole, multiply = dim // LANES * LANES, dot_product(workload.dtype, dim)
    zero = np.float32(0)

    @jitted(fastmath)
    def dot(buffer: Any, row: int, k: Any, source: int) -> Any:
        total = zero
        for d in range(whole, dim):
            total += buffer[row * dim + d] * read(k[source + d])
        return total + multiply(buffer, row * dim, k, source)

    @jitted(fastmath)
    def scores(k: Any, at: int, count: int, seen: int, buffer: Any) -> None:
        for key in range(seen):
            for row in range(count):
                buffer[first_score + row * keys + key] = dot(buffer, row, k, at + key * dim)

    return scores


def _direct_results(
    workload: Attention, config: Config, room: Room, fastmath: frozenset[str]
) -> Callable[..., None]:
    """Return the function that adds values to results, four keys at a time, without packing."""
    read, keys, dim, columns = load(workload.dtype), room.keys, room.dim, room.columns
    first_score, first_result = room.scores, room.results

    @jitted(fastmath)
    def add_four(buffer: Any, target: int, p: int, v: Any, source: int) -> None:
        p0, p1, p2, p3 = buffer[p], buffer[p + 1], buffer[p + 2], buffer[p + 3]
        for d in range(dim):
            upper = p0 * read(v[source + d]) + p1 * read(v[source + dim + d])
            lower = p2 * read(v[source + 2 * dim + d]) + p3 * read(v[source + 3 * dim + d])
            buffer[target + d] += upper + lower

    @jitted(fastmath)
    def add_one(buffer: Any, target: int, p: int, v: Any, source: int) -> None:
        factor = buffer[p]
        for d in range(dim):
            buffer[target + d] += factor * read(v[source + d])

    @jitted(fastmath)
    def results(v: Any, at: int, count: int, seen: int, buffer: Any) -> None:
        whole = seen // 4 * 4
        for key in range(0, whole, 4):
            for row in range(count):
                target, p = first_result + row * columns, first_score + row * keys + key
                add_four(buffer, target, p, v, at + key * dim)
        for key in range(whole, seen):
            for row in range(count):
                target, p = first_result + row * columns, first_score + row * keys + key
                add_one(buffer, target, p, v, at + key * dim)

    return results


VARIANT = NumbaCpuAttention()
