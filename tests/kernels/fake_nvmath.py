"""A stand-in for `nvmath.linalg.advanced` that multiplies tensors of the processor.

Its `Matmul` has the parameters of nvmath-python 1.0.0 that this package uses, and refuses what that one
refuses: operands without a contiguous dimension, a result in place whose shape differs, a bias that does not
belong to the rows, execution before planning or after operands were released.
"""

from __future__ import annotations

import enum
import logging
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest
import torch

__all__ = ["ALGORITHMS", "Algorithm", "Matmul", "MatmulComputeType", "MatmulEpilog", "install"]

ALGORITHMS = 5


class MatmulEpilog(enum.IntEnum):
    """Epilogues, numbered as in cublasLt.h."""

    RELU = 2
    BIAS = 4
    RELU_BIAS = 6
    GELU = 32
    GELU_BIAS = 36


class MatmulComputeType(enum.IntEnum):
    """Types of sums, numbered as in cublas_api.h."""

    COMPUTE_32F = 68
    COMPUTE_32F_FAST_TF32 = 77


class Algorithm:
    """An algorithm of the list."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


class Matmul:
    """A product on memory of the processor; `log` has the algorithm and epilogue of each execution."""

    log: list[tuple[int, str]] = []
    alive: set[int] = set()

    def __init__(
        self,
        a: Any,
        b: Any,
        /,
        c: Any = None,
        *,
        alpha: Any = None,
        beta: Any = None,
        qualifiers: Any = None,
        quantization_scales: Any = None,
        options: Any = None,
        stream: Any = None,
    ) -> None:
        assert set(options) <= {"inplace", "memory_limit", "logger", "compute_type"}
        assert options["inplace"]
        assert beta is not None
        assert options["memory_limit"] > 0
        assert not options["logger"].isEnabledFor(logging.INFO)
        for operand in (a, b, c):
            assert 1 in operand.stride()[-2:]
            assert operand.dtype in (torch.float32, torch.float16, torch.bfloat16)
        assert c.shape == (*a.shape[:-1], b.shape[-1])
        assert a.shape[:-2] == b.shape[:-2]
        self.precision = options.get("compute_type", MatmulComputeType.COMPUTE_32F)
        assert self.precision != MatmulComputeType.COMPUTE_32F_FAST_TF32 or a.dtype == torch.float32
        self.operands, self.beta, self.shapes = [a, b, c], beta, [t.shape for t in (a, b, c)]
        self.strides = [t.stride() for t in (a, b, c)]
        self.epilog: MatmulEpilog | None = None
        self.inputs: dict[str, Any] = {}
        self.algorithms: list[Algorithm] = []
        self.alive.add(id(self))

    def plan(
        self,
        *,
        preferences: Any = None,
        algorithms: Any = None,
        epilog: Any = None,
        epilog_inputs: Any = None,
        stream: Any = None,
    ) -> list[Algorithm]:
        assert set(preferences) == {"limit"}
        self.epilog = epilog
        self._epilogue(epilog_inputs)
        self.algorithms = [Algorithm(rank) for rank in range(min(preferences["limit"], ALGORITHMS))]
        return self.algorithms

    def _epilogue(self, inputs: Mapping[str, Any] | None) -> None:
        needed = {"bias"} if self.epilog is not None and "BIAS" in self.epilog.name else set()
        assert set(inputs or {}) == needed
        self.inputs = dict(inputs or {})
        for bias in self.inputs.values():
            assert (bias.shape, bias.stride()) == (self.shapes[0][-2:-1], (1,))
            assert bias.dtype == self.operands[2].dtype

    def reset_operands_unchecked(
        self,
        *,
        a: Any = None,
        b: Any = None,
        c: Any = None,
        alpha: Any = None,
        beta: Any = None,
        quantization_scales: Any = None,
        epilog_inputs: Any = None,
        stream: Any = None,
    ) -> None:
        self.operands = [a, b, c]
        assert [t.shape for t in self.operands] == self.shapes
        assert [t.stride() for t in self.operands] == self.strides
        self._epilogue(epilog_inputs)

    def execute(self, *, algorithm: Any = None, release_workspace: Any = False, stream: Any = None) -> Any:
        assert algorithm in self.algorithms
        assert release_workspace
        a, b, c = (operand.float() for operand in self.operands)
        result = a @ b + (self.beta * c if self.beta else 0)
        if self.inputs:
            result += self.inputs["bias"].float()[:, None]
        name = "" if self.epilog is None else self.epilog.name
        if "RELU" in name:
            result = result.relu()
        if "GELU" in name:
            result = torch.nn.functional.gelu(result, approximate="tanh")
        self.log.append((algorithm.rank, name))
        return self.operands[2].copy_(result)

    def release_operands(self) -> None:
        self.operands, self.inputs = [], {}

    def free(self) -> None:
        self.alive.discard(id(self))


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs import this module in place of `nvmath.linalg.advanced`, without an earlier log."""
    for name in ("nvmath", "nvmath.linalg"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "nvmath.linalg.advanced", sys.modules[__name__])
    monkeypatch.setattr(Matmul, "log", [])
    monkeypatch.setattr(Matmul, "alive", set())
