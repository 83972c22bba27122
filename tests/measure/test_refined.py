"""The bound of a compiled configuration: what its binary uses, and that what cannot win is left out."""

from __future__ import annotations

import pytest

from tunebench.binary.compiled import Binary
from tunebench.bound import bound, refine, refined_us
from tunebench.device import described
from tunebench.kernels import variant
from tunebench.measure import worker
from tunebench.measure.offline import OfflineRunner
from tunebench.measure.timing import Protocol
from tunebench.outcome import Resources
from tunebench.space import Config
from tunebench.task import Task
from tunebench.workloads import parse

H100 = described()["h100-sxm"]
SIMT = variant("gemm/cuda_simt")
SMALL = parse("gemm:m=1024,n=1024,k=2048,dtype=f32")
FULL = Resources(registers=255, static_smem_bytes=110_000)
"""Of which an SM holds two blocks: those of one warp leave two of its four partitions idle."""


def configurations(text: str) -> list[tuple[Config, float]]:
    problem = parse(text)
    table = SIMT.configs(problem, H100)
    costs = SIMT.costs(problem, table, H100)
    bounds = bound(costs, problem.traffic(), H100, rows=len(table))
    return [(table.config(row), float(bounds.us[row])) for row in range(0, len(table), len(table) // 300)]


def test_what_a_binary_uses_only_raises_the_bound_and_raises_some() -> None:
    raised = 0
    for config, bound_us in configurations(str(SMALL)):
        assert refined_us(SIMT, SMALL, config, H100, Resources()) == pytest.approx(bound_us)
        refined = refined_us(SIMT, SMALL, config, H100, FULL)
        assert refined >= bound_us * (1 - 1e-12)
        raised += refined > 1.05 * bound_us
    assert raised


def test_figures_of_several_kernels_are_nobodys() -> None:
    """The largest usage of two kernels may be that of the small one: it raises no bound of the other."""
    problem = parse("gemm:m=128,n=128,k=65536,dtype=f32")
    split = [
        (config, bound_us)
        for config, bound_us in configurations(str(problem))
        if len(SIMT.launches(problem, config)) > 1
    ]
    assert split
    for config, bound_us in split:
        assert refined_us(SIMT, problem, config, H100, FULL) == pytest.approx(bound_us)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> tuple[Task, Binary, float]:
    """A configuration whose binary says more than its parameters, and its refined bound."""
    monkeypatch.setattr(worker, "_runner", OfflineRunner(Protocol()))
    monkeypatch.setattr(OfflineRunner, "run", lambda *_: pytest.fail("it was run"))
    config, refined = next(
        (config, refined)
        for config, bound_us in configurations(str(SMALL))
        if (refined := refined_us(SIMT, SMALL, config, H100, FULL)) > 1.05 * bound_us
    )
    binary = Binary(key="k", language="cuda", target="sm_90a", payload=b"", entries=("k",), resources=FULL)
    return Task(variant=SIMT, workload=SMALL, config=config, device=H100, prune=True), binary, refined


def test_refined_is_refine_of_one_row(compiled: tuple[Task, Binary, float]) -> None:
    task, _, refined = compiled
    table = SIMT.configs(SMALL, H100)
    row = table.row(task.config)
    assert row is not None
    costs = SIMT.costs(SMALL, table.take([row]), H100)
    assert refine(costs, SMALL.traffic(), H100, FULL, rows=1).us[0] == refined
