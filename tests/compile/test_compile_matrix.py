"""Compile matrix: a sample without failing configurations, and tests of its checks."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compile_matrix
from benchmarks.compile_matrix import Item
from tests.support import needs_disassembler, needs_nvrtc
from tests.toy_variants import SPILLING, Toy, ToyVariant
from tunebench import kernels, workloads
from tunebench.device import Device
from tunebench.errors import MissingDependency
from tunebench.space import Config, Parameter, Space
from tunebench.variant import CudaVariant

pytestmark = [needs_nvrtc, needs_disassembler, pytest.mark.slow]

SAMPLED = ("sm_75", "sm_80", "sm_90", "sm_100")
"""Architectures of the sample."""
EVERY = 23
"""Step of the sample: one of this many items is compiled."""


@functools.cache
def sample() -> tuple[Item, ...]:
    """Return default and random configurations of all variants, the same in every run.

    Each variant is compiled for every second architecture that it supports.
    """
    variants = compile_matrix.cuda_variants()
    sampled = list(compile_matrix.items(SAMPLED, variants, configs=24, seed=1))[::EVERY]
    chosen: list[Item] = []
    for number, variant in enumerate(variants):
        items = [item for item in sampled if item.variant == variant.key]
        supported = list(dict.fromkeys(item.architecture for item in items))
        compiled = supported[number % 2 :: 2] or supported
        chosen += [item for item in items if item.architecture in compiled]
    return tuple(chosen)


@functools.cache
def one_per_variant() -> dict[str, Item]:
    """Return an item of each variant, if possible no default, because other tests compile defaults."""
    return {item.variant: item for item in sorted(sample(), key=lambda item: not item.default)}


# Named by variants, because collection would take seconds to choose configurations.
VARIANTS = [variant.key for variant in compile_matrix.cuda_variants()]
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def with_tensor_cores_and_half_of_others() -> list[Any]:
    """Return the variants; half of those without tensor cores are marked `exhaustive`."""
    sweep = [pytest.mark.exhaustive]
    is_left_out = [number % 2 == 1 and "mma" not in key for number, key in enumerate(VARIANTS)]
    return [pytest.param(key, marks=sweep * out) for key, out in zip(VARIANTS, is_left_out, strict=True)]


def check(item: Item) -> None:
    record = compile_matrix.examine(item)
    assert record["problems"] == [], item
    assert record["registers"] > 0, item


@pytest.mark.parametrize("variant", with_tensor_cores_and_half_of_others())
def test_sampled_configuration_has_no_problems(variant: str) -> None:
    check(one_per_variant()[variant])


@pytest.mark.exhaustive
@each_variant
def test_further_sampled_configurations_have_no_problems(variant: str) -> None:
    for item in sample():
        if item.variant == variant and item != one_per_variant()[variant]:
            check(item)


def test_sample_covers_every_variant_and_architecture() -> None:
    chosen = sample()
    assert {item.variant for item in chosen} == {variant.key for variant in compile_matrix.cuda_variants()}
    assert {item.default for item in chosen} == {True, False}
    for items in (chosen, one_per_variant().values()):
        assert {item.architecture for item in items} == set(SAMPLED)


# -- configurations to compile -------------------------------------------------------------------------------


def few(configs: int = 10, seed: int = 0) -> list[Item]:
    variants = [kernels.variant("softmax/cuda_block"), kernels.variant("gemm/cuda_mma")]
    return list(compile_matrix.items(("sm_75", "sm_90"), variants, configs, seed))  # type: ignore[arg-type]


def test_items_cover_all_workloads_each_with_its_default() -> None:
    listed = few(configs=10)
    softmax = [
        item for item in listed if item.variant == "softmax/cuda_block" and item.architecture == "sm_90"
    ]
    assert len(softmax) == 10
    forward = [text for text in compile_matrix.WORKLOADS["softmax"] if "backward" not in text]
    assert [item.workload for item in softmax if item.default] == forward
    assert len({item.identity for item in listed}) == len(listed)
    assert not any(item.variant == "gemm/cuda_mma" and item.architecture == "sm_75" for item in listed)


def test_items_depend_only_on_the_seed() -> None:
    assert few() == few()
    assert few() != few(seed=1)


def test_every_item_is_a_valid_configuration() -> None:
    for item in few():
        variant = kernels.variant(item.variant)
        device = compile_matrix.representative(item.architecture)
        workload = workloads.parse(item.workload)
        variant.space.check(variant.space.parse(item.config), workload=workload, device=device)


def test_every_workload_is_supported_by_some_variant() -> None:
    device = compile_matrix.representative("sm_90")
    for text in (text for group in compile_matrix.WORKLOADS.values() for text in group):
        workload = workloads.parse(text)
        variants = [v for v in kernels.variants(workload) if isinstance(v, CudaVariant)]
        assert any(variant.refuses(workload, device) is None for variant in variants), text


def test_shards_are_disjoint_and_complete() -> None:
    whole = few()
    parts = [compile_matrix.shard(whole, f"{i}/3") for i in (1, 2, 3)]
    assert sorted(str(item) for part in parts for item in part) == sorted(map(str, whole))
    for wrong in ("0/3", "4/3", "3", "a/b"):
        with pytest.raises(SystemExit, match="--shard"):
            compile_matrix.shard(whole, wrong)


# -- checks --------------------------------------------------------------------------------------------------

PLAIN = (
    "__global__ void toy(const float* x, float* y, float factor, int n) { y[threadIdx.x] = x[0] * factor; }"
)


class Broken(ToyVariant):
    """Toy variant that claims an instruction that its source does not have."""

    name = "broken"
    space = Space((Parameter("unused", (0, 1), "nothing"),))

    def claims(self, workload: Any, config: Config) -> tuple[str, ...]:
        return ("FMUL", "HMMA")

    def default(self, workload: Toy, device: Device) -> Config:
        return Config({"unused": 1})


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return a function that examines a toy variant with the given source and returns its problems."""

    def examine(text: str, *, default: bool = True, **launch: Any) -> list[str]:
        variant = Broken(text, **launch)
        monkeypatch.setattr(compile_matrix.kernels, "variant", lambda key: variant)
        monkeypatch.setattr(compile_matrix, "parse", lambda text: Toy(n=64))
        item = Item(
            architecture="sm_90",
            variant="toy/broken",
            workload="toy:n=64",
            config="unused=1",
            default=default,
        )
        problems: list[str] = compile_matrix.examine(item)["problems"]
        return problems

    return examine


def test_compile_error_is_a_problem(broken: Any) -> None:
    (problem,) = broken(PLAIN.replace("x[0]", "x[no_such_name]"))
    assert problem.startswith("does not compile: NVRTC for sm_90: ")
    assert "no_such_name" in problem


def test_launch_refusal_is_a_problem(broken: Any) -> None:
    (problem,) = broken(PLAIN, default=False, smem_bytes=240_000)
    assert problem == (
        "cannot be launched: a block needs 240000 bytes of shared memory; h100-sxm allows 232448"
    )


def test_spills_and_missing_instructions_are_problems_of_defaults_only(broken: Any) -> None:
    spilled, missing = broken(SPILLING)
    assert spilled.startswith("the default configuration spills ")
    assert missing == "the default configuration has no HMMA instruction"
    assert broken(SPILLING, default=False) == []


# -- saved results -------------------------------------------------------------------------------------------


def run(out: Path, *arguments: str) -> int:
    basic = ("--variant", "softmax/cuda_block", "--arch", "sm_80", "--configs", "5", "--workers", "1")
    return compile_matrix.main([*basic, "--out", str(out), *arguments])


def test_interrupted_run_continues_and_compiles_changed_sources(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "matrix.jsonl"
    five = compile_matrix.WORKLOADS["softmax"][:5]  # each with its default configuration
    monkeypatch.setitem(compile_matrix.WORKLOADS, "softmax", five)
    assert run(out, "--shard", "1/2") == 0
    assert "3 of 3 configurations to compile" in capfd.readouterr().err
    with out.open("a") as file:
        file.write('{"architecture": "sm_80", "vari')  # incomplete line of an interrupted run
    lines = out.read_text().splitlines()
    changed = json.loads(lines[1]) | {"revision": "earlier revision"}
    out.write_text("\n".join([lines[0], json.dumps(changed), *lines[2:]]))
    assert run(out) == 0
    printed = capfd.readouterr()
    assert "3 of 5 configurations to compile" in printed.err
    assert "| softmax/cuda_block | sm_80 | 5 | 0 | 0 |" in printed.out
    assert run(out) == 0
    assert "0 of 5 configurations to compile" in capfd.readouterr().err


def test_interrupted_results_are_saved(tmp_path: Path) -> None:
    out = tmp_path / "matrix.jsonl"
    todo = [item for item in few() if item.variant == "softmax/cuda_block"]
    results = compile_matrix.compile_all(todo, out, workers=1)
    first = next(results)
    with pytest.raises(KeyboardInterrupt):
        results.throw(KeyboardInterrupt())  # type: ignore[attr-defined]
    assert list(compile_matrix.load(out).values()) == [first]


def test_timeout_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_matrix, "TIMEOUT_S", 0.01)
    (record,) = compile_matrix.compile_all(few()[:1], tmp_path / "matrix.jsonl", workers=1)
    assert record["problems"] == ["not compiled within 0.01 s"]


def test_table_statistics_skip_failed_compilations() -> None:
    item = dataclasses.asdict(few()[0])
    seconds = [0.1, 0.2, 0.3, 0.4]
    records = [
        {**item, "seconds": s, "spill_bytes": 8 * (s > 0.3), "registers": 32, "problems": []} for s in seconds
    ]
    table = compile_matrix.summary([*records, {**item, "problems": ["does not compile"]}])
    assert "| 5 | 1 | 1 | 32 | 0.25 | 0.39 |" in table.splitlines()[2]
    assert (
        compile_matrix.summary([{**item, "problems": ["x"]}])
        .splitlines()[-1]
        .endswith("| 1 | 1 | - | - | - | - |")
    )


def test_missing_disassembler_exits_with_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(compile_matrix, "find_disassembler", lambda: None)
    assert run(tmp_path / "matrix.jsonl") == MissingDependency.exit_code
    assert "pip install" in capsys.readouterr().err
