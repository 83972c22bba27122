"""ResNet, MobileNetV2, U-Net, BERT and GPT-2 in torch, as published; of any size, with random weights.

Sources: He et al., "Deep residual learning for image recognition", 2015 (with the stride in the 3 x 3
    convolution, as in torchvision); Sandler et al., "MobileNetV2: inverted residuals and linear bottlenecks",
    2018; Ronneberger et al., "U-Net", 2015 (padded, with normalisation); Devlin et al., "BERT", 2018; Radford
    et al., "Language models are unsupervised multitask learners", 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Bert", "Gpt2", "MobileNetV2", "Resnet", "Size", "UNet"]


class Bottleneck(nn.Module):
    """A residual block of three convolutions."""

    def __init__(self, channels: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        out = width * expansion
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels != out:
            conv = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        """Return an image of `width * expansion` channels."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class Resnet(nn.Module):
    """A residual network of bottlenecks; by default ResNet-50."""

    def __init__(
        self,
        blocks: Sequence[int] = (3, 4, 6, 3),
        width: int = 64,
        expansion: int = 4,
        classes: int = 1000,
        stem: int = 7,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, stem, 2, stem // 2, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.pool = nn.MaxPool2d(3, 2, 1)
        channels, stages = width, []
        for stage, count in enumerate(blocks):
            for place in range(count):
                stride = 2 if stage and not place else 1
                stages.append(Bottleneck(channels, width << stage, stride, expansion))
                channels = (width << stage) * expansion
        self.blocks = nn.Sequential(*stages)
        self.fc = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return (n, classes) logits of (n, 3, h, w) images."""
        return self.fc(self.blocks(self.pool(self.stem(images))).mean((2, 3)))


def _conv(channels: int, out: int, size: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Return a convolution with "same" padding and its normalisation."""
    conv = nn.Conv2d(channels, out, size, stride, size // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(out)]


class InvertedResidual(nn.Module):
    """A depthwise convolution between two 1 x 1 convolutions; the input is added if shapes agree."""

    def __init__(self, channels: int, out: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = channels * expansion
        widen = [*_conv(channels, wide), nn.ReLU6(inplace=True)] if expansion != 1 else []
        by_channel = [*_conv(wide, wide, 3, stride, groups=wide), nn.ReLU6(inplace=True)]
        self.layers = nn.Sequential(*widen, *by_channel, *_conv(wide, out))
        self.adds = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        """Return an image of `out` channels."""
        return x + self.layers(x) if self.adds else self.layers(x)


class MobileNetV2(nn.Module):
    """MobileNetV2, by default table 2 of the paper; stages are expansion, channels, blocks and stride."""

    STAGES = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(
        self,
        stages: Sequence[tuple[int, int, int, int]] = STAGES,
        first: int = 32,
        last: int = 1280,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [*_conv(3, first, 3, 2), nn.ReLU6(inplace=True)]
        channels = first
        for expansion, out, count, stride in stages:
            for place in range(count):
                layers.append(InvertedResidual(channels, out, stride if not place else 1, expansion))
                channels = out
        self.layers = nn.Sequential(*layers, *_conv(channels, last), nn.ReLU6(inplace=True))
        self.dropout, self.fc = nn.Dropout(0.2), nn.Linear(last, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return (n, classes) logits of (n, 3, h, w) images."""
        return self.fc(self.dropout(self.layers(images).mean((2, 3))))


class UNet(nn.Module):
    """Double convolutions on a contracting and an expanding path, with concatenated skip connections."""

    def __init__(self, width: int = 64, levels: int = 4, channels: int = 3, classes: int = 2) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList(map(_double, [channels, *widths], widths))
        self.pool = nn.MaxPool2d(2)
        pairs = [(widths[level + 1], widths[level]) for level in reversed(range(levels))]
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, 2) for wide, narrow in pairs)
        self.up = nn.ModuleList(_double(wide, narrow) for wide, narrow in pairs)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return (n, classes, h, w) logits; h and w are multiples of `2**levels`."""
        x, skips = self.down[0](images), []
        for block in self.down[1:]:
            skips.append(x)
            x = block(self.pool(x))
        for enlarge, block, skip in zip(self.enlarge, self.up, reversed(skips), strict=True):
            x = block(torch.cat([skip, enlarge(x)], dim=1))
        return self.head(x)


def _double(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        *_conv(channels, out, 3), nn.ReLU(inplace=True), *_conv(out, out, 3), nn.ReLU(inplace=True)
    )


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of a transformer: layers, width, heads, feed-forward width, vocabulary, and longest text."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    inner: int = 3072
    words: int = 50257
    longest: int = 1024


class Attention(nn.Module):
    """Multi-head attention with separate projections of queries, keys and values, or one for all."""

    def __init__(self, size: Size, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = size.heads, causal
        self.inward = nn.Linear(size.width, 3 * size.width)
        self.outward = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, seq, width)."""
        parts = self.inward(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.outward(o.transpose(1, 2).flatten(2))


def feed_forward(size: Size, gelu: str) -> nn.Sequential:
    """Return the two feed-forward layers."""
    return nn.Sequential(
        nn.Linear(size.width, size.inner), nn.GELU(approximate=gelu), nn.Linear(size.inner, size.width)
    )


class Gpt2Layer(nn.Module):
    """A transformer layer that normalises before attention."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attention, self.inner = Attention(size, causal=True), feed_forward(size, "tanh")

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, seq, width)."""
        x = x + self.attention(self.norm1(x))
        return x + self.inner(self.norm2(x))


class Gpt2(nn.Module):
    """GPT-2, by default small; its last layer shares the weights of the embedding."""

    def __init__(self, size: Size | None = None) -> None:
        super().__init__()
        size = size or Size()
        self.words = nn.Embedding(size.words, size.width)
        self.places = nn.Embedding(size.longest, size.width)
        self.layers = nn.Sequential(*(Gpt2Layer(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.words, bias=False)
        self.apply(_draw)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        """Return (batch * seq, words) logits of (batch, seq) words."""
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        return self.head(self.norm(self.layers(x))).flatten(0, 1)


class BertLayer(nn.Module):
    """A transformer layer that normalises after attention."""

    def __init__(self, size: Size, eps: float) -> None:
        super().__init__()
        self.attention, self.inner = Attention(size, causal=False), feed_forward(size, "none")
        self.norm1, self.norm2 = (nn.LayerNorm(size.width, eps=eps) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, seq, width)."""
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.inner(x))


class Bert(nn.Module):
    """BERT, by default base, with a masked-word head; its normalisations have BERT's eps."""

    def __init__(self, size: Size | None = None, eps: float = 1e-12) -> None:
        super().__init__()
        size = size or Size(words=30522, longest=512)
        self.words = nn.Embedding(size.words, size.width)
        self.places = nn.Embedding(size.longest, size.width)
        self.norm = nn.LayerNorm(size.width, eps=eps)
        self.layers = nn.Sequential(*(BertLayer(size, eps) for _ in range(size.layers)))
        self.head = nn.Linear(size.width, size.words)
        self.apply(_draw)

    def forward(self, words: Tensor) -> Tensor:
        """Return (batch * seq, words) logits of (batch, seq) words."""
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        return self.head(self.layers(self.norm(x))).flatten(0, 1)


def _draw(module: nn.Module) -> None:
    """Initialise weights as in both papers: normal with standard deviation 0.02."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
