"""Convolutions of volumes that are convolutions of images in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tunebench.torch as served
from tests.torch.reference_kernels import reference_kernels
from tests.torch.test_torch_compile import ran
from tunebench.graph.node import Node
from tunebench.torch.compiler.capture import capture
from tunebench.workloads import parse

PATCHES = "conv2d:n=3,c=6,h=8,w=8,k=5,r=4,s=4,stride=4,pad=0,dtype=f32,layout=nchw,epilogue=bias"
OVERLAPPING = "conv2d:n=3,c=6,h=8,w=8,k=5,r=2,s=2,stride=1,pad=0,dtype=f32,layout=nchw,epilogue=bias"
POINTS = "conv2d:n=3,c=3,h=16,w=8,k=5,r=1,s=1,stride=1,pad=0,dtype=f32,layout=nchw,epilogue=bias"
LAYERS: dict[str, tuple[dict[str, Any], str]] = {
    "patches": ({"kernel_size": (2, 4, 4), "stride": (2, 4, 4)}, PATCHES),
    "overlapping": ({"kernel_size": 2}, OVERLAPPING),
    "points": ({"kernel_size": 1}, POINTS),
}


def volumes() -> torch.Tensor:
    return torch.randn(3, 3, 2, 8, 8)


def convolution_of(options: dict[str, Any]) -> Node:
    (translation,) = capture(nn.Conv3d(3, 5, **options), [volumes()])
    (node,) = translation.graph.nodes
    return node


@pytest.mark.parametrize("name", LAYERS)
def test_kernels_compute_the_convolution(name: str) -> None:
    options, expected = LAYERS[name]
    assert convolution_of(options).workloads == (expected,)
    layer, x = nn.Conv3d(3, 5, **options).eval(), volumes()
    compiled = served.compile(layer)
    with reference_kernels() as workloads, torch.no_grad():
        y, _ = ran(lambda: compiled(x))
        assert parse(expected) in workloads
        torch.testing.assert_close(y, layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": (1, 3, 3)},
        {"kernel_size": (2, 3, 3), "padding": 1},
        {"kernel_size": 1, "stride": 2},
    ],
)
def test_other_filters_are_left_to_torch(options: dict[str, Any]) -> None:
    node = convolution_of(options)
    assert not node.workloads
    assert node.reason == "a 3-dimensional convolution that is not recognised as a 2-dimensional one"


def test_gradients_of_patches_are_convolutions_of_images() -> None:
    layer = nn.Conv3d(3, 5, **LAYERS["patches"][0])
    _, backward = capture(layer, [volumes().requires_grad_()], training=True)
    texts = [text for node in backward.graph.nodes for text in node.workloads]
    sizes = PATCHES.partition(",epilogue")[0]
    assert {f"{sizes},direction=dgrad", f"{sizes},direction=wgrad"} <= set(texts)
