"""Synthetic training steps with as many operations and with tensors as large as those of known models.

Times are a simple law of floating-point operations and bytes, not measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunebench.training.memory import HostLink, StepOperation, StepTensor, TrainingStep

__all__ = ["residual_step", "transformer_step"]

LINK = HostLink(to_host_gb_s=25.0, to_device_gb_s=25.0, latency_us=10.0)

_BYTES_PER_US = 1.5e6
_FLOPS_PER_US = 2e8
_LAUNCH_US = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forward:
    """A forward operation, for its gradients.

    Attributes:
        name: The name.
        inputs: Tensors that it reads.
        output: The tensor whose gradient arrives.
        saved: Tensors that its gradients read.
        flops: Floating-point operations.
        weight_bytes: Bytes of its parameters; 0 without any.
    """

    name: str
    inputs: tuple[int, ...]
    output: int
    saved: tuple[int, ...]
    flops: float
    weight_bytes: int


class _Tape:
    """Forward operations, and the step with their gradients."""

    def __init__(self, input_bytes: int) -> None:
        self._tensors = [StepTensor(name="x", size_bytes=input_bytes, resident=True)]
        self._operations: list[StepOperation] = []
        self._forward: list[_Forward] = []

    def add(
        self,
        name: str,
        inputs: Sequence[int],
        size_bytes: int,
        *,
        saved: str = "",
        flops: float = 0.0,
        weight_bytes: int = 0,
    ) -> int:
        """Add a forward operation and return its output.

        Args:
            name: The name.
            inputs: Tensors that it reads.
            size_bytes: Bytes of its output.
            saved: What its gradients read: "i" for inputs, "o" for the output, "s" for small statistics.
            flops: Floating-point operations.
            weight_bytes: Bytes of its parameters.
        """
        sizes = (size_bytes, max(1, size_bytes // 500)) if "s" in saved else (size_bytes,)
        outputs = self._run(name, tuple(inputs), sizes, flops)
        read = (*(inputs if "i" in saved else ()), *outputs[1:], *(outputs[:1] if "o" in saved else ()))
        self._forward.append(
            _Forward(
                name=name,
                inputs=tuple(inputs),
                output=outputs[0],
                saved=read,
                flops=flops,
                weight_bytes=weight_bytes,
            )
        )
        return outputs[0]

    def step(self, link: HostLink | None) -> TrainingStep:
        """Return the forward operations and their gradients."""
        gradients: dict[int, int] = {}
        results: list[int] = []
        for forward in reversed(self._forward):
            above = gradients.pop(forward.output, forward.output)
            read = tuple(dict.fromkeys((*forward.saved, above)))
            for tensor in dict.fromkeys(forward.inputs):
                if tensor == 0:
                    continue
                size_bytes = self._tensors[tensor].size_bytes
                (gradient,) = self._run(f"{forward.name}.input", read, (size_bytes,), forward.flops)
                if tensor in gradients:
                    both = (gradients[tensor], gradient)
                    (gradient,) = self._run(f"{forward.name}.add", both, (size_bytes,), 0.0)
                gradients[tensor] = gradient
            if forward.weight_bytes:
                results += self._run(f"{forward.name}.weight", read, (forward.weight_bytes,), forward.flops)
        return TrainingStep(
            tensors=tuple(self._tensors),
            operations=tuple(self._operations),
            results=tuple(results),
            link=link,
        )

    def _run(
        self, name: str, inputs: tuple[int, ...], sizes: tuple[int, ...], flops: float
    ) -> tuple[int, ...]:
        """Add an operation and return its outputs."""
        first = len(self._tensors)
        self._tensors += [
            StepTensor(name=f"{name}.{index}", size_bytes=size) for index, size in enumerate(sizes)
        ]
        moved = sum(sizes) + sum(self._tensors[tensor].size_bytes for tensor in set(inputs))
        time_us = _LAUNCH_US + max(flops / _FLOPS_PER_US, moved / _BYTES_PER_US)
        outputs = tuple(range(first, len(self._tensors)))
        self._operations.append(StepOperation(name=name, time_us=time_us, inputs=inputs, outputs=outputs))
        return outputs


def transformer_step(
    layers: int = 48,
    *,
    width: int = 1600,
    heads: int = 25,
    tokens: int = 1024,
    batch: int = 4,
    link: HostLink | None = LINK,
) -> TrainingStep:
    """Return a step like that of GPT-2, by default GPT-2 XL, in half precision without fused attention.

    Args:
        layers: Number of layers.
        width: Width of the model.
        heads: Attention heads.
        tokens: Length of a sequence.
        batch: Number of sequences.
        link: The link to host memory.
    """
    rows = batch * tokens
    size, attention = 2 * rows * width, 2 * batch * heads * tokens * tokens
    square = 2.0 * rows * width * width
    scores = 2.0 * batch * tokens * tokens * width
    tape = _Tape(8 * rows)
    x = tape.add("embedding", (0,), size, weight_bytes=2 * 50257 * width)
    for layer in range(layers):
        name = f"layer{layer}"
        normal = tape.add(f"{name}.norm1", (x,), size, saved="is", weight_bytes=4 * width)
        heads3 = []
        for part in "qkv":
            linear = tape.add(
                f"{name}.{part}", (normal,), size, saved="i", flops=square, weight_bytes=2 * width * width
            )
            heads3.append(tape.add(f"{name}.{part}.heads", (linear,), size))
        q, k, v = heads3
        weights = tape.add(f"{name}.scores", (q, k), attention, saved="i", flops=scores)
        for operation, saved in (("scale", ""), ("mask", ""), ("softmax", "o"), ("dropout", "s")):
            weights = tape.add(f"{name}.{operation}", (weights,), attention, saved=saved)
        mixed = tape.add(f"{name}.values", (weights, v), size, saved="i", flops=scores)
        mixed = tape.add(f"{name}.merge", (mixed,), size)
        mixed = tape.add(
            f"{name}.project", (mixed,), size, saved="i", flops=square, weight_bytes=2 * width * width
        )
        x = tape.add(f"{name}.add1", (x, tape.add(f"{name}.dropout1", (mixed,), size, saved="s")), size)
        normal = tape.add(f"{name}.norm2", (x,), size, saved="is", weight_bytes=4 * width)
        wide = {"flops": 4 * square, "weight_bytes": 8 * width * width}
        up = tape.add(f"{name}.up", (normal,), 4 * size, saved="i", **wide)
        cube = tape.add(f"{name}.power", (up,), 4 * size, saved="i")
        inner = tape.add(f"{name}.sum", (up, tape.add(f"{name}.scale2", (cube,), 4 * size)), 4 * size)
        tanh = tape.add(
            f"{name}.tanh", (tape.add(f"{name}.scale3", (inner,), 4 * size),), 4 * size, saved="o"
        )
        plus_one = tape.add(f"{name}.one", (tanh,), 4 * size)
        half = tape.add(f"{name}.half", (up,), 4 * size)
        gelu = tape.add(f"{name}.product", (half, plus_one), 4 * size, saved="i")
        down = tape.add(f"{name}.down", (gelu,), size, saved="i", **wide)
        x = tape.add(f"{name}.add2", (x, tape.add(f"{name}.dropout2", (down,), size, saved="s")), size)
    normal = tape.add("norm", (x,), size, saved="is", weight_bytes=4 * width)
    tape.add("loss", (normal,), 2 * rows, saved="is", flops=2.0 * rows * width * 50257)
    return tape.step(link)


def residual_step(blocks: int = 600, *, batch: int = 128, link: HostLink | None = LINK) -> TrainingStep:
    """Return a step like that of a ResNet for CIFAR in single precision, by default ResNet-1202.

    Args:
        blocks: Residual blocks of two convolutions, a third of them at each resolution.
        batch: Number of images.
        link: The link to host memory.
    """
    tape = _Tape(4 * batch * 3 * 32 * 32)
    x = tape.add("stem", (0,), 4 * batch * 16 * 32 * 32, saved="i", weight_bytes=4 * 16 * 27)
    for block in range(blocks):
        level = 3 * block // blocks
        channels, side = 16 << level, 32 >> level
        size = 4 * batch * channels * side * side
        weight_bytes = 4 * 9 * channels * channels
        flops = 2.0 * batch * side * side * 9 * channels * channels
        inner = x
        for part in (1, 2):
            name = f"block{block}.{part}"
            inner = tape.add(
                f"{name}.conv", (inner,), size, saved="i", flops=flops, weight_bytes=weight_bytes
            )
            inner = tape.add(f"{name}.norm", (inner,), size, saved="is", weight_bytes=8 * channels)
            if part == 1:
                inner = tape.add(f"{name}.relu", (inner,), size, saved="o")
        x = tape.add(f"block{block}.relu", (inner, x), size, saved="o")
    tape.add("loss", (x,), 4 * batch, saved="i")
    return tape.step(link)
