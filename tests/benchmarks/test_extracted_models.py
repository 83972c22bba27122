"""Extraction of a Llama, ResNet-18 and a ViT block for a GPU that is not present."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks.torch_models import BasicBlock, Llama, LlamaSize, Resnet, VitBlock  # noqa: E402
from tunebench import device as devices  # noqa: E402
from tunebench.graph import InputSpec, PartitionPlan, extract, plan_partition  # noqa: E402

pytestmark = pytest.mark.slow


def planned(make: Any, text: str, dtype: str) -> tuple[PartitionPlan, Counter[str]]:
    """Return the plan of an inference step on H100, and how often it has each operator with its epilogue."""
    device = devices.find("h100-sxm")

    def on_meta() -> Any:
        with torch.device("meta"):
            return make()

    (graph,) = extract(on_meta, [InputSpec.parse(text)], dtype=dtype, device=device)
    plan = plan_partition(graph, device)
    low, high = plan.interval_us or (0, 0)
    assert low < plan.us < high
    assert plan.us < plan.alone_us <= plan.torch_us
    texts = [text for offer in plan.chosen for text in offer.group.workloads]
    return plan, Counter(_kind(text) for text in texts)


def _kind(text: str) -> str:
    operator, _, dimensions = text.partition(":")
    return " ".join([operator, *(part for part in dimensions.split(",") if part.startswith("epilogue"))])


def test_a_llama_has_gated_products_residuals_and_grouped_queries() -> None:
    size = LlamaSize(layers=2, width=512, heads=8, key_heads=2, inner=1024, words=1000)
    plan, counts = planned(lambda: Llama(size), "2x256:i64", "bf16")
    assert plan.coverage == pytest.approx(1)
    assert (counts["gated_gemm"], counts["rmsnorm"], counts["attention"]) == (2, 5, 2)
    texts = [text for offer in plan.chosen for text in offer.group.workloads]
    assert sum("rmsnorm" in text and "prologue=residual" in text for text in texts) == 4
    assert sum("heads_k=2,causal=true" in text for text in texts) == 2
    rotations = [text for text in texts if "(-x2+x3)*x4" in text]
    assert len(rotations) == 4  # of queries and keys, each one kernel


def test_blocks_of_resnet18_end_in_one_convolution() -> None:
    plan, counts = planned(
        lambda: Resnet(blocks=(2, 2, 2, 2), expansion=1, block=BasicBlock).to(
            memory_format=torch.channels_last
        ),
        "32x3x224x224:f16:channels_last",
        "f16",
    )
    assert counts["conv2d epilogue=scale+bias+residual+relu"] >= 3
    assert sum(count for key, count in counts.items() if key.startswith("conv2d")) == 20
    assert plan.alternatives


def test_a_vit_block_is_seven_kernels() -> None:
    plan, counts = planned(VitBlock, "32x197x768:f16", "f16")
    assert len(plan.chosen) == 7
    assert (counts["gemm epilogue=bias+gelu"], counts["gemm epilogue=bias+residual"]) == (1, 2)
    assert (counts["layernorm"], counts["attention"]) == (2, 1)
