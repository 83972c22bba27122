"""Few long rows: split among blocks, and parts merged."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.kernel_checks import H100, exact
from tests.support import needs_compiler
from tunebench import kernels
from tunebench.emulate.emulator import emulate
from tunebench.space import Config
from tunebench.variant import CudaVariant
from tunebench.workloads import parse


def _split(key: str) -> CudaVariant[object]:
    variant = kernels.variant(key)
    assert isinstance(variant, CudaVariant)
    return variant


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("softmax:rows=528,cols=100000,dtype=f32", "528 rows keep the device busy"),
        ("softmax:rows=1,cols=255,dtype=f32", "rows of 255 elements are too short"),
        ("softmax:rows=1,cols=100000,dtype=f32,direction=backward", "supports direction=forward only"),
    ],
)
def test_split_refuses_many_and_short_rows(text: str, says: str) -> None:
    assert says in str(_split("softmax/cuda_split").refuses(parse(text), H100))


@pytest.mark.parametrize("cols", [256, 257, 1000, 50257, 1000003, 2**20, 2**30])
@pytest.mark.parametrize("rows", [1, 3, 64, 527])
def test_the_default_is_valid_and_fills_the_device(rows: int, cols: int) -> None:
    for key, text in (
        ("softmax/cuda_split", f"softmax:rows={rows},cols={cols},dtype=f16"),
        ("softmax/cuda_split_backward", f"softmax:rows={rows},cols={cols},dtype=f32,direction=backward"),
    ):
        workload, variant = parse(text), _split(key)
        config = variant.default(workload, H100)
        assert variant.configs(workload, H100).row(config) is not None, config
        launches = variant.launches(workload, config)
        assert len({launch.grid for launch in launches}) == 1
        blocks = rows * config["split"]
        assert blocks <= 8 * H100.sm_count
        if cols > 10_000_000:
            assert blocks > H100.sm_count


@needs_compiler
@pytest.mark.parametrize(
    "text", ["softmax:rows=2,cols=3111,dtype=f32", "cross_entropy:rows=2,cols=3111,dtype=f32"]
)
def test_parts_of_very_different_magnitude_are_merged(text: str) -> None:
    """Use parts that contribute nothing next to others, and more parts than a warp has threads."""
    workload = parse(text)
    inputs = workload.draw(np.random.default_rng(1))
    inputs["x"][0, :2000] -= 300
    inputs["x"][0, 3000:] += 500
    inputs["x"][1, :1600] = -np.inf
    if "target" in inputs:
        inputs["target"][1] = 3110
    config = Config({"split": 64, "threads": 64, "vector": 1, "unroll": 1})
    outputs = emulate(_split(f"{workload.operator}/cuda_split"), workload, config, inputs, sanitize=True)
    with np.errstate(invalid="ignore"):  # infinity in the scale of errors
        references = workload.reference(exact(inputs))
    for name, reference in references.items():
        np.testing.assert_allclose(outputs[name], reference.value, rtol=1e-5, atol=1e-6)
