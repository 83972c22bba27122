"""Flush of the last-level cache by reading memory larger than it.

Reading evicts every line and leaves clean ones. Overwriting the memory would leave as many dirty lines as the
cache holds, and writing them back would delay the timed run that replaces them: 15 us for 60 MB at 4 TB/s.
"""

from __future__ import annotations

from typing import NamedTuple

from tunebench.variant import Launch

__all__ = ["FLUSHED_CACHES", "READ_MEMORY", "READ_PTX", "VECTOR_BYTES", "Flush"]

FLUSHED_CACHES = 2
"""Bytes read before a cold sample, as a multiple of the last-level cache."""

VECTOR_BYTES = 16
"""Bytes that a thread reads at a time."""


class Flush(NamedTuple):
    """Memory to read before each sample: larger than the last-level cache, and a multiple of 16 bytes."""

    address: int
    nbytes: int

    def __str__(self) -> str:
        return f"reading {self.nbytes} bytes"


READ_PTX = b"""\
.version 6.4
.target sm_70
.address_size 64

.visible .entry read_memory(.param .u64 address, .param .u64 nbytes)
{
  .reg .pred %p<2>;
  .reg .b32 %r<9>;
  .reg .b64 %rd<7>;

  ld.param.u64 %rd1, [address];
  ld.param.u64 %rd2, [nbytes];
  cvta.to.global.u64 %rd1, %rd1;
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mov.u32 %r4, %nctaid.x;
  mul.wide.u32 %rd3, %r1, %r2;
  cvt.u64.u32 %rd4, %r3;
  add.u64 %rd3, %rd3, %rd4;
  shl.b64 %rd3, %rd3, 4;
  mul.wide.u32 %rd5, %r4, %r2;
  shl.b64 %rd5, %rd5, 4;
NEXT:
  setp.ge.u64 %p1, %rd3, %rd2;
  @%p1 bra END;
  add.u64 %rd6, %rd1, %rd3;
  ld.volatile.global.v4.u32 {%r5, %r6, %r7, %r8}, [%rd6];
  add.u64 %rd3, %rd3, %rd5;
  bra NEXT;
END:
  ret;
}
\0"""
"""A kernel that reads memory past the first-level cache and writes nothing.

It is PTX, which the driver compiles, because a process that measures needs no compiler; every driver since
CUDA 10.1 accepts this version. A volatile read is never removed, although nothing uses its value.
"""

READ_MEMORY = Launch(
    entry="read_memory", grid=(1 << 20, 1, 1), block=(256, 1, 1), arguments=(), blocks_per_sm=8
)
"""Its launch: as many threads as the SMs hold, each with one read in flight, which saturates the memory."""
