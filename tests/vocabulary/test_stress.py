"""Extreme inputs: each kind is what it says, and every operator states some."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import numpy as np
import pytest

from tests.kernels.cuda_cases import WORKLOADS
from tunebench.dtype import DType, numpy_dtype, unit_roundoff
from tunebench.measure.verify import draw, draw_stress
from tunebench.stress import LARGEST_OFFSET, OFFSET_RATIO, SPARSE_ELEMENTS, Stress, StressKind, stressed
from tunebench.workloads import parse


def _vectors(kind: StressKind, dtype: DType, axes: tuple[int, ...] = (-1,)) -> Any:
    """Return vectors of a kind alone, in f64."""
    rng = np.random.default_rng(5)
    normal = rng.standard_normal((64, 512)).astype(numpy_dtype(dtype))
    drawn = stressed(normal, dtype, Stress(kinds=(kind,), axes=axes), rng)
    assert (drawn.dtype, drawn.shape) == (normal.dtype, normal.shape)
    changed = (drawn.view(np.uint8) != normal.view(np.uint8)).any(axis=1)
    assert changed.sum() == 32, "half of the vectors stay as drawn"
    return drawn[changed].astype(np.float64)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_kinds_are_what_they_say(dtype: DType) -> None:
    assert np.isfinite(_vectors("large", dtype)).all()
    assert (np.abs(_vectors("logits", dtype)).max(axis=1) > 100).all(), "exp overflows f32 above 88.7"
    offset = _vectors("offset", dtype)
    assert (np.abs(offset) < LARGEST_OFFSET).all()
    assert (np.abs(offset.mean(axis=1)) > OFFSET_RATIO / 4 * offset.std(axis=1)).all()
    mixed = _vectors("mixed", dtype)
    assert np.square(mixed).mean(axis=1) == pytest.approx(1, rel=4 * unit_roundoff(dtype))
    assert (np.abs(mixed).max(axis=1) > 50 * np.median(np.abs(mixed), axis=1)).all() or dtype == "f16"
    assert 0 < np.abs(_vectors("tiny", dtype)).max() < 2.0**-14
    least = np.abs(_vectors("denormal", dtype))
    assert 0 < least.max() < (2.0**-14 if dtype == "f16" else 2.0**-126)
    assert not _vectors("zeros", dtype).any()
    constant = _vectors("constant", dtype)
    assert ((constant == constant[:, :1]) & (constant != 0)).all()
    filled = (_vectors("sparse", dtype) != 0).sum(axis=1)
    assert filled.min() > 0
    assert SPARSE_ELEMENTS / 2 < filled.mean() < 2 * SPARSE_ELEMENTS
    hidden = np.isneginf(_vectors("hidden", dtype)).mean(axis=1)
    assert ((hidden > 0) & (hidden < 1)).all()
    assert (np.isposinf(_vectors("infinite", dtype)).sum(axis=1) == 1).all()
    assert (np.isnan(_vectors("nan", dtype)).sum(axis=1) == 1).all()


def test_integers_have_their_least_number() -> None:
    normal = np.zeros((8, 8), np.int8)
    drawn = stressed(normal, "i8", Stress(kinds=("extreme",)), np.random.default_rng(0))
    assert (drawn == -128).all(axis=1).sum() == 4


def test_vectors_extend_along_their_axes() -> None:
    normal = np.random.default_rng(0).standard_normal((6, 5, 4, 3)).astype(np.float32)
    for axes in itertools.chain.from_iterable(itertools.combinations(range(4), n) for n in (1, 3)):
        drawn = stressed(normal, "f32", Stress(kinds=("zeros",), axes=axes), np.random.default_rng(1))
        zero = (drawn == 0).all(axis=axes)
        assert 0 < zero.mean() < 1
        assert ((drawn == 0).any(axis=axes) == zero).all()


def test_an_input_of_one_vector_has_the_first_kind() -> None:
    normal = np.ones((1, 16), np.float32)
    kinds: tuple[StressKind, ...] = ("zeros", "nan")
    assert not stressed(normal, "f32", Stress(kinds=kinds), np.random.default_rng(0)).any()


@pytest.mark.parametrize("operator", WORKLOADS)
def test_every_operator_draws_extreme_inputs_by_seed(operator: str) -> None:
    for text in WORKLOADS[operator]:
        workload = parse(text)
        first, again, other = (draw_stress(draw(workload, seed)) for seed in (0, 0, 1))
        if all(tensor.dtype == "bool" for tensor in workload.inputs()):
            continue
        assert first is not None
        assert again is not None
        assert other is not None
        tensors = {tensor.name: tensor for tensor in workload.inputs()}
        assert first.inputs.keys() == tensors.keys()
        for name, array in first.inputs.items():
            assert array.shape == tensors[name].shape
            assert array.dtype == numpy_dtype(tensors[name].dtype)
            assert array.tobytes() == again.inputs[name].tobytes()
        assert any(first.inputs[name].tobytes() != other.inputs[name].tobytes() for name in tensors)
        for tensor in workload.outputs():
            # Values may be infinite or NaN where inputs are; the tolerance of all others is known.
            reference = first.references[tensor.name]
            assert (np.isfinite(reference.scale) | ~np.isfinite(reference.value)).all(), text


def test_every_kind_is_used() -> None:
    used: set[str] = set()
    for text in itertools.chain.from_iterable(WORKLOADS.values()):
        for stress in parse(text).stress().values():
            used |= set(stress.kinds)
    assert used == set(get_args(StressKind))
