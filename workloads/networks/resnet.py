"""Residual networks for images, as torchvision and HuggingFace run them.

Source: He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", 2015, table 1; version 1.5 as
in torchvision.models.resnet50 (the 3x3 convolution of a block has the stride).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tunebench.errors import InputError, quoted
from tunebench.workloads.networks.architecture import classes
from tunebench.workloads.networks.network_run import Network, NetworkRun, Operation, merged
from tunebench.workloads.networks.tape import Tape
from tunebench.workloads.operators.conv2d import Conv2d

__all__ = ["ResNet"]

MOST = 1 << 14
"""Largest depth, width and extent."""

REDUCTION = 4
"""Ratio of a block's output channels to the channels of its 3x3 convolution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A convolution of square images with its normalisation and activation.

    Attributes:
        c: Input channels.
        k: Output channels.
        size: Height and width of the input.
        taps: Height and width of the filter.
        stride: Stride in both directions.
        relu: Whether a ReLU follows the normalisation.
    """

    c: int
    k: int
    size: int
    taps: int
    stride: int = 1
    relu: bool = True

    @property
    def out(self) -> int:
        """Height and width of the output."""
        return -(-self.size // self.stride)

    @property
    def parameters(self) -> int:
        """Number of parameters of the filters and the normalisation."""
        return self.c * self.k * self.taps**2 + 2 * self.k


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualBlock:
    """Three convolutions with a skip connection, which has a convolution where shapes change."""

    convolutions: tuple[Convolution, ...]
    shortcut: Convolution | None

    @property
    def all(self) -> tuple[Convolution, ...]:
        """All convolutions of the block."""
        return (*self.convolutions, *((self.shortcut,) if self.shortcut else ()))


class ResNet(Network):
    """A residual network of bottleneck blocks; `layers` is the number of blocks."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.name = name
        self.depths: tuple[int, ...] = tuple(config.get("depths", (3, 4, 6, 3)))
        self.widths: tuple[int, ...] = tuple(config.get("hidden_sizes", (256, 512, 1024, 2048)))
        self.stem: int = config.get("embedding_size", 64)
        self.size: int = config.get("image_size", 224)
        self.classes: int = classes(config)
        if config.get("layer_type", "bottleneck") != "bottleneck":
            raise InputError(f"{name}: layer_type must be bottleneck, got {config['layer_type']!r}")
        sizes = (*self.depths, *self.widths, self.stem, self.size, self.classes)
        if len(self.depths) != len(self.widths) or not all(
            type(size) is int and 0 < size <= MOST for size in sizes
        ):
            raise InputError(
                f"{name}: depths and hidden_sizes must be as many, and all sizes from 1 to {MOST}; got "
                f"{quoted(sizes)}"
            )
        self.layers = sum(self.depths)

    def blocks(self) -> tuple[ResidualBlock, ...]:
        """Return the blocks in order."""
        return tuple(self._blocks())

    def _blocks(self) -> Iterator[ResidualBlock]:
        size, c = self.size // 4, self.stem
        for stage, (depth, k) in enumerate(zip(self.depths, self.widths, strict=True)):
            for index in range(depth):
                stride = 2 if stage and not index else 1
                inner, out = k // REDUCTION, -(-size // stride)
                yield ResidualBlock(
                    convolutions=(
                        Convolution(c=c, k=inner, size=size, taps=1),
                        Convolution(c=inner, k=inner, size=size, taps=3, stride=stride),
                        Convolution(c=inner, k=k, size=out, taps=1, relu=False),
                    ),
                    shortcut=None
                    if index
                    else Convolution(c=c, k=k, size=size, taps=1, stride=stride, relu=False),
                )
                size, c = out, k

    def stem_convolution(self) -> Convolution:
        """Return the convolution before the first block."""
        return Convolution(c=3, k=self.stem, size=self.size, taps=7, stride=2)

    def parameters(self, tensor: int = 1, layers: tuple[int, int] | None = None) -> int:
        """Return the number of parameters (see `Network.parameters`); tensor parallelism is not supported."""
        first, last = layers or (0, self.layers)
        total = sum(
            convolution.parameters for block in self.blocks()[first:last] for convolution in block.all
        )
        if first == 0:
            total += self.stem_convolution().parameters
        if last == self.layers:
            total += (self.widths[-1] + 1) * self.classes
        return total

    def boundary_elements(self, run: NetworkRun) -> int:
        """Return the output elements of the last block of a stage."""
        last = self.blocks()[self.stage(run)[1] - 1].convolutions[-1]
        return run.batch * last.k * last.out**2

    def saved_elements(self) -> tuple[int, int]:
        """Return the elements and positions that the forward pass of an image saves for the backward pass.

        Kept are the image, the output of each convolution (the input of its normalisation), and the output of
        each ReLU (the input of the convolutions after it); normalisations and ReLUs in place keep no more.

        Returns:
            Elements of activations, and positions of the largest elements of the pooling.
        """
        first = self.stem_convolution()
        elements = 3 * self.size**2 + 2 * first.k * first.out**2
        pooled = self.stem * (self.size // 4) ** 2
        elements += pooled  # input of the first block
        for block in self.blocks():
            elements += sum(
                convolution.k * convolution.out**2 * (2 if convolution.relu else 1)
                for convolution in block.all
            )
            last = block.convolutions[-1]
            elements += last.k * last.out**2  # output of the block
        return elements + self.widths[-1] + self.classes, pooled

    def operations(self, run: NetworkRun) -> tuple[Operation, ...]:
        """Return the operations of one device in one run (see `Network.operations`)."""
        if run.seq or run.tensor != 1:
            raise InputError(f"{self.name} is a network for images: leave seq and tensor out")
        first, last = self.stage(run)
        tape = Tape(run)
        convolutions = [convolution for block in self.blocks()[first:last] for convolution in block.all]
        if first == 0:
            self._add_stem(tape)
            convolutions.append(self.stem_convolution())
        for block in self.blocks()[first:last]:
            self._add_block(tape, block)
        if last == self.layers:
            self._add_head(tape)
        parameters = self.parameters(layers=(first, last))
        tape.sharded(parameters)
        tape.accumulated(parameters, 3 * len(convolutions))
        tape.updated(-(-parameters // run.shards))
        return merged(tape.operations)

    def _add_stem(self, tape: Tape) -> None:
        """Add the first convolution, whose input needs no gradient, and the pooling."""
        first = self.stem_convolution()
        _add_convolution(tape, "stem", first, input_gradient=False)
        pooled = (tape.run.batch * self.stem, (first.out // 2) ** 2)
        for phase in ("forward", "backward"):  # a quarter is written; backward needs positions
            tape.copy("stem", pooled, phase)
            tape.copy("stem", (pooled[0], 2 * pooled[1]), phase)

    def _add_block(self, tape: Tape, block: ResidualBlock) -> None:
        stage = f"stage {self.widths.index(block.convolutions[-1].k) + 1}"
        for convolution in block.all:
            _add_convolution(tape, stage, convolution)
        last = block.convolutions[-1]
        shape = (tape.run.batch * last.k, last.out**2)
        expression = "relu(x+y)" if tape.run.compiled else "x+y"
        tape.pointwise(stage, shape, expression, ("x+y",))  # backward: sum of the gradients of both paths
        if not tape.run.compiled:
            tape.activation(stage, shape, "relu")

    def _add_head(self, tape: Tape) -> None:
        run, last = tape.run, self.blocks()[-1].convolutions[-1]
        tape.summed("head", run.batch * last.k * last.out**2)
        tape.summed("head", run.batch * last.k * last.out**2, "backward")
        tape.linear("head", run.batch, self.classes, last.k)
        tape.loss("loss", run.batch, self.classes)


def _add_convolution(tape: Tape, part: str, layer: Convolution, *, input_gradient: bool = True) -> None:
    """Add a convolution, its normalisation and its activation; the last two are one kernel if fused."""
    run = tape.run
    square = {"h": layer.size, "w": layer.size, "r": layer.taps, "s": layer.taps, "pad": layer.taps // 2}
    types = {"dtype": run.dtype, "layout": "nchw" if run.dtype == "f32" else "nhwc"}  # tensor cores need nhwc
    sizes = {"n": run.batch, "c": layer.c, "k": layer.k, "stride": layer.stride, **square}
    work = Conv2d.from_dimensions({**sizes, **types})
    tape.add(f"{part} convolutions", work)
    if input_gradient:
        tape.add(f"{part} convolutions", work.changed(direction="dgrad"), "backward")
    tape.add(f"{part} convolutions", work.changed(direction="wgrad"), "backward")
    shape = (run.batch * layer.k, layer.out**2)
    if run.trains:  # statistics are sums over the batch: they read x once more, and twice for its gradient
        tape.summed(part, shape[0] * shape[1])
        for _ in range(2):
            tape.summed(part, shape[0] * shape[1], "backward")
    if run.compiled and layer.relu:
        tape.pointwise(part, shape, "relu(x*row+row)", ("dy*relu(x)",))
        return
    tape.pointwise(part, shape, "x*row+row", ("dy*x",))
    if layer.relu:
        tape.activation(part, shape, "relu")
