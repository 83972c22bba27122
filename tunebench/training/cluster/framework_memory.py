"""What frameworks keep on a device beside the tensors of a plan: `FrameworkMemory`, `FRAMEWORKS`.

Mixed precision has 2 bytes per parameter, 2 per gradient, and with AdamW 12 of f32 states. Frameworks differ
in what comes on top:

- Megatron-LM sums gradients in contiguous buffers. With 16-bit sums its optimizer needs an f32 copy of the
  gradients of its shard: 4 + 16/d bytes per parameter on d devices, and 6 + 12/d with f32 sums, which its
  kernels of weight gradients add to directly.
- DeepSpeed (ZeRO-1 and 2) reduces gradients in a bucket of 5e8 numbers and gathers parameters in another one.
  Its step flattens the gradients of the shard, then converts them to f32. `BF16_Optimizer` keeps 16-bit
  gradients beside f32 sums.
- PyTorch (FSDP2, pipelines) keeps the outputs of a stage until their backward pass, as DeepSpeed does;
  Megatron-LM frees them.
- Full sharding of FSDP2 gathers a layer at a time, and the embedding and the head together, for the whole
  step. Gathered parameters are copied out of a buffer that is allocated on a stream of its own; other
  streams cannot use its memory, nor that of gradients.
- The loss of an eager program has three tensors in f32 of the size of the logits at once: the logarithms of
  probabilities, their gradient, and that of the logits. With tensor parallelism there is a fourth. They do
  not fit where the 16-bit logits were. Programs of Hugging Face also keep the 16-bit logits.
- torchtitan starts with expandable segments, which do not fragment.

Source: NVIDIA/Megatron-LM, `docs/api-guide/dist_optimizer.md` (bytes per parameter) and
`megatron/core/pipeline_parallel/schedules.py` (`deallocate_output_tensor`); microsoft/DeepSpeed,
`runtime/zero/stage_1_and_2.py`, `runtime/bf16_optimizer.py`, `runtime/zero/config.py` (the
bucket sizes) and `runtime/pipe/engine.py`; pytorch/pytorch, `torch/distributed/pipelining/stage.py`,
`torch/distributed/fsdp/_fully_shard` and `torch/distributed/tensor/parallel/loss.py`; pytorch/torchtitan,
`run_train.sh`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tunebench._lazy import np
from tunebench.errors import UnknownName

__all__ = ["FRAMEWORKS", "Framework", "FrameworkMemory", "framework_memory"]

Framework = Literal["megatron", "deepspeed", "fsdp", "torchtitan"]
"""Frameworks: Megatron-LM, DeepSpeed, PyTorch's FSDP2 by Accelerate, and torchtitan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkMemory:
    """Memory that a framework needs beside parameters, gradients, states and activations.

    Attributes:
        name: The framework.
        kept_gradient_bytes: Bytes per parameter of 16-bit gradients that stay beside f32 sums.
        update_bytes: Bytes per parameter of a shard that only the step needs, with 16-bit gradients.
        bucket_bytes: Bucket of gradients or parameters in the step.
        contiguous: Whether gradients are sums in buffers that exist from the start.
        fused_sums: Whether kernels add gradients of weights to f32 sums directly.
        keeps_outputs: Whether outputs of a stage are kept until their backward pass.
        logit_bytes: Bytes per logit in the loss beside the f32 logits and the 16-bit gradient.
        parallel_logit_bytes: The same with tensor parallelism.
        unused_logit_bytes: Bytes per logit that the allocator reserves and does not use in the loss.
        keeps_gathered: Whether the input of the head that sequence parallelism gathers is kept.
        gathers_ends: Whether full sharding gathers the embedding and the head together for the whole step,
            and layers one by one.
        expandable: Whether the allocator has expandable segments.
        pairs: Communicators of each rank of a pipeline for its neighbours; 0 if they share that of the
            pipeline.
    """

    name: Framework
    kept_gradient_bytes: int = 0
    update_bytes: int = 0
    bucket_bytes: int = 0
    contiguous: bool = False
    fused_sums: bool = False
    keeps_outputs: bool = False
    logit_bytes: int = 0
    parallel_logit_bytes: int = 0
    unused_logit_bytes: int = 0
    keeps_gathered: bool = False
    gathers_ends: bool = False
    expandable: bool = False
    pairs: int = 0

    def step_bytes(self, states: Any, *, wide: bool) -> Any:
        """Return the bytes of tensors that only the step of the optimizer needs; of many plans, as columns.

        Those that fit into the bucket do not come on top of it.

        Args:
            states: Parameters whose states a device has.
            wide: Whether gradients are summed in f32.
        """
        update = 0 if wide else self.update_bytes * states
        return self.bucket_bytes + np.where(update > self.bucket_bytes, update, 0)


FRAMEWORKS: Mapping[str, FrameworkMemory] = {
    framework.name: framework
    for framework in (
        FrameworkMemory(name="megatron", update_bytes=4, contiguous=True, fused_sums=True),
        FrameworkMemory(
            name="deepspeed",
            kept_gradient_bytes=2,
            update_bytes=6,
            bucket_bytes=1_000_000_000,
            keeps_outputs=True,
            pairs=2,
        ),
        FrameworkMemory(
            name="fsdp",
            keeps_outputs=True,
            logit_bytes=8,
            parallel_logit_bytes=8,
            gathers_ends=True,
        ),
        FrameworkMemory(
            name="torchtitan",
            keeps_outputs=True,
            logit_bytes=6,
            parallel_logit_bytes=10,
            unused_logit_bytes=2,
            keeps_gathered=True,
            gathers_ends=True,
            expandable=True,
        ),
    )
}
"""Frameworks by name."""


def framework_memory(name: str) -> FrameworkMemory:
    """Return the record of a framework.

    Raises:
        UnknownName: There is no such framework.
    """
    if name not in FRAMEWORKS:
        raise UnknownName("framework", name, FRAMEWORKS)
    return FRAMEWORKS[name]
