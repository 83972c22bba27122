"""Plans of PyTorch modules on clusters: a vision transformer and a U-Net.

python -m benchmarks.plan_modules > benchmarks/results/plan_modules.md

The modules also serve as examples of `tunebench plan cluster --model benchmarks.plan_modules:vit`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import nn

from benchmarks.activation_memory import Vit
from benchmarks.plan_memory_models import WithLoss
from benchmarks.torch_models import UNet
from tunebench.graph import InputSpec
from tunebench.training.cluster import ModuleJob, TrainingCluster, plan_module
from tunebench.training.fitting.model_plan import ModelProfiler

__all__ = ["unet", "vit"]


def vit() -> nn.Module:
    """Return ViT-B/16 with its loss."""
    return WithLoss(Vit(768, 12, heads=12, inner=3072, patch=16, classes=1000), classes=True)


def unet() -> nn.Module:
    """Return a U-Net with its loss."""
    return WithLoss(UNet(), classes=True)


CASES: tuple[tuple[str, Callable[[], nn.Module], tuple[str, ...], str, int], ...] = (
    ("ViT-B/16", vit, ("32x3x224x224:bf16", "32:i64"), "8 x h100-sxm", 1024),
    ("ViT-B/16", vit, ("32x3x224x224:bf16", "32:i64"), "4 x l4", 512),
    ("U-Net", unet, ("4x3x256x256:f32", "4x256x256:i64"), "4 x l4", 64),
    ("U-Net", unet, ("4x3x256x256:bf16", "4x256x256:i64"), "8 x h100-sxm", 512),
)


def main() -> None:
    """Print the plans as Markdown."""
    print("# Plans of PyTorch modules\n")
    print(
        "By `python -m benchmarks.plan_modules`. Times and memory are predicted from traced steps of eager "
        "PyTorch; no plan was run. Seconds are those of the process, most of them for tracing.\n"
    )
    print(
        "| module | parameters | cluster | batch | type | micro-batch | sharding | step, ms | samples/s | "
        "memory, GB | exposed comm. | plans that fit, do not | seconds to plan |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for name, factory, texts, cluster, batch in CASES:
        machine, specs = TrainingCluster.parse(cluster), [InputSpec.parse(text) for text in texts]
        start = time.process_time()
        profiler = ModelProfiler(factory, specs, machine.device, optimizer="none")
        answer = plan_module(ModuleJob(profiler=profiler, batch=batch), machine)
        seconds, best = time.process_time() - start, answer.plans[0]
        print(
            f"| {name} | {profiler.elements / 1e6:.1f} M | {cluster} | {batch} | {profiler.dtype} | "
            f"{best.microbatch} | {best.sharding} | {best.step_us / 1e3:.1f} | {best.samples_per_s:.0f} | "
            f"{best.memory_bytes / 1e9:.1f} | {best.communication_us / best.step_us:.1%} | "
            f"{len(answer.plans)}, {answer.too_large} | {seconds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
