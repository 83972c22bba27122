"""Published models in torch, of any size, with random weights.

Sources: He et al., "Deep residual learning for image recognition", 2015 (with the stride in the 3 x 3
    convolution, as in torchvision); Sandler et al., "MobileNetV2: inverted residuals and linear bottlenecks",
    2018; Simonyan and Zisserman, "Very deep convolutional networks", 2014; Huang et al., "Densely connected
    convolutional networks", 2016; Ronneberger et al., "U-Net", 2015 (padded, with normalisation); Devlin et
    al., "BERT", 2018; Radford et al., "Language models are unsupervised multitask learners", 2019; Rombach et
    al., "High-resolution image synthesis with latent diffusion models", 2022 (sizes of Stable Diffusion 1.5);
    Gilmer et al., "Neural message passing for quantum chemistry", 2017; van den Oord et al., "WaveNet", 2016
    (without the causal mask); Dubey et al., "The Llama 3 herd of models", 2024 (operations as of the model in
    transformers); Dosovitskiy et al., "An image is worth 16x16 words", 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = [
    "BasicBlock",
    "Bert",
    "DenseNet",
    "DiffusionUNet",
    "Gpt2",
    "GraphNetwork",
    "Llama",
    "LlamaSize",
    "MobileNetV2",
    "Recurrent",
    "Resnet",
    "Size",
    "UNet",
    "Vgg",
    "VitBlock",
    "WaveNet",
]


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


class BasicBlock(nn.Module):
    """A residual block of two convolutions of `width * expansion` channels."""

    def __init__(self, channels: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        out = width * expansion
        self.inner = nn.Sequential(
            *_conv(channels, out, 3, stride), nn.ReLU(inplace=True), *_conv(out, out, 3)
        )
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(*_conv(channels, out, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Return an image of `width * expansion` channels."""
        return functional.relu(self.inner(x) + self.downsample(x))


class Resnet(nn.Module):
    """A residual network; by default ResNet-50."""

    def __init__(
        self,
        blocks: Sequence[int] = (3, 4, 6, 3),
        width: int = 64,
        expansion: int = 4,
        classes: int = 1000,
        stem: int = 7,
        block: type[Bottleneck | BasicBlock] = Bottleneck,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, stem, 2, stem // 2, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.pool = nn.MaxPool2d(3, 2, 1)
        channels, stages = width, []
        for stage, count in enumerate(blocks):
            for index in range(count):
                stride = 2 if stage and not index else 1
                stages.append(block(channels, width << stage, stride, expansion))
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
            for index in range(count):
                layers.append(InvertedResidual(channels, out, stride if not index else 1, expansion))
                channels = out
        self.layers = nn.Sequential(*layers, *_conv(channels, last), nn.ReLU6(inplace=True))
        self.dropout, self.fc = nn.Dropout(0.2), nn.Linear(last, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return (n, classes) logits of (n, 3, h, w) images."""
        return self.fc(self.dropout(self.layers(images).mean((2, 3))))


class Vgg(nn.Module):
    """3 x 3 convolutions between poolings, and three linear layers; by default VGG-19, at 224 x 224."""

    def __init__(
        self, counts: Sequence[int] = (2, 2, 4, 4, 4), width: int = 64, inner: int = 4096, classes: int = 1000
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for stage, count in enumerate(counts):
            for _ in range(count):
                out = width << min(stage, 3)
                layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(inplace=True)]
                channels = out
            layers.append(nn.MaxPool2d(2))
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten())
        hidden = [nn.Linear(wide, inner) for wide in (49 * channels, inner)]
        self.head = nn.Sequential(
            *(part for layer in hidden for part in (layer, nn.ReLU(inplace=True), nn.Dropout())),
            nn.Linear(inner, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return (n, classes) logits of (n, 3, h, w) images."""
        return self.head(self.layers(images))


class DenseLayer(nn.Module):
    """A 1 x 1 and a 3 x 3 convolution, whose result is concatenated to the input."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            *_conv(channels, 4 * growth),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return an image of `growth` more channels."""
        return torch.cat([x, self.layers(x)], dim=1)


class DenseNet(nn.Module):
    """A densely connected network; by default DenseNet-121. Each layer copies the image that it extends."""

    def __init__(
        self,
        counts: Sequence[int] = (6, 12, 24, 16),
        growth: int = 32,
        width: int = 64,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_conv(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        channels, blocks = width, []
        for stage, count in enumerate(counts):
            if stage:
                half = nn.Conv2d(channels, channels // 2, 1, bias=False)
                blocks.append(
                    nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True), half, nn.AvgPool2d(2))
                )
                channels //= 2
            for _ in range(count):
                blocks.append(DenseLayer(channels, growth))
                channels += growth
        self.blocks, self.norm = nn.Sequential(*blocks), nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return (n, classes) logits of (n, 3, h, w) images."""
        return self.fc(torch.relu(self.norm(self.blocks(self.stem(images)))).mean((2, 3)))


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


@dataclass(frozen=True, kw_only=True)
class LlamaSize:
    """Sizes of a Llama; by default those of Llama 3 8B (its config.json)."""

    layers: int = 32
    width: int = 4096
    heads: int = 32
    key_heads: int = 8
    inner: int = 14336
    words: int = 128256
    theta: float = 500000.0

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.width // self.heads


class LlamaNorm(nn.Module):
    """RMS normalisation, computed in f32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised rows of x (..., width)."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * scaled.to(x.dtype)


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return heads (batch, heads, seq, dim) with rotary embeddings."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class LlamaLayer(nn.Module):
    """A decoder layer: attention with grouped queries, and a gated feed-forward."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.head_dim, keys = size.head_dim, size.key_heads * size.head_dim
        self.input_norm, self.attention_norm = LlamaNorm(size.width), LlamaNorm(size.width)
        self.q, self.o = (nn.Linear(size.width, size.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(size.width, keys, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(size.width, size.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Return (batch, seq, width)."""
        normed = self.input_norm(x)
        projections = [linear(normed) for linear in (self.q, self.k, self.v)]
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in projections)
        q, k = _rotated(q, cosine, sine), _rotated(k, cosine, sine)
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(o.transpose(1, 2).flatten(2))
        normed = self.attention_norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """A Llama with its logits."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.size, self.embedding = size, nn.Embedding(size.words, size.width)
        self.layers = nn.ModuleList(LlamaLayer(size) for _ in range(size.layers))
        self.norm, self.head = LlamaNorm(size.width), nn.Linear(size.width, size.words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits (batch, seq, words) of (batch, seq) indices."""
        x, dim = self.embedding(words), self.size.head_dim
        rates = self.size.theta ** (-torch.arange(0, dim, 2, device=words.device) / dim)
        angles = torch.arange(words.shape[1], device=words.device)[:, None] * rates
        angles = torch.cat((angles, angles), -1)
        for layer in self.layers:
            x = layer(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        return self.head(self.norm(x))


class VitBlock(nn.Module):
    """A block of a vision transformer; by default of ViT-B."""

    def __init__(self, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        size = Size(width=width, heads=heads, inner=4 * width)
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attention, self.inner = Attention(size, causal=False), feed_forward(size, "none")

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, patches, width)."""
        x = x + self.attention(self.norm1(x))
        return x + self.inner(self.norm2(x))


def _draw(module: nn.Module) -> None:
    """Initialise weights as in both papers: normal with standard deviation 0.02."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions behind group normalisation and SiLU; the time is added between them."""

    def __init__(self, channels: int, out: int, time: int) -> None:
        super().__init__()
        groups = min(32, channels // 4)
        self.norm1, self.norm2 = nn.GroupNorm(groups, channels), nn.GroupNorm(min(32, out // 4), out)
        self.conv1, self.conv2 = (nn.Conv2d(wide, out, 3, padding=1) for wide in (channels, out))
        self.time = nn.Linear(time, out)
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Return images of `out` channels."""
        y = self.conv1(functional.silu(self.norm1(x))) + self.time(functional.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(functional.silu(self.norm2(y)))


class CrossAttention(nn.Module):
    """Multi-head attention of pixels to pixels, or to a text."""

    def __init__(self, width: int, text: int, heads: int) -> None:
        super().__init__()
        self.heads, self.q, self.out = heads, nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(text, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        """Return (batch, pixels, width)."""
        read = (self.q(x), self.k(text), self.v(text))
        q, k, v = (projected.unflatten(-1, (self.heads, -1)).transpose(1, 2) for projected in read)
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Self-attention, attention to a text, and a GEGLU layer on the pixels of images."""

    def __init__(self, width: int, text: int, heads: int) -> None:
        super().__init__()
        self.norm, self.inward, self.outward = (
            nn.GroupNorm(min(32, width // 4), width, eps=1e-6),
            nn.Conv2d(width, width, 1),
            nn.Conv2d(width, width, 1),
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.cross = CrossAttention(width, width, heads), CrossAttention(width, text, heads)
        self.gate, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        """Return images of the same shape."""
        y = self.inward(self.norm(x)).flatten(2).transpose(1, 2)
        normalised = self.norms[0](y)
        y = y + self.own(normalised, normalised)
        y = y + self.cross(self.norms[1](y), text)
        wide, gate = self.gate(self.norms[2](y)).chunk(2, dim=-1)
        y = y + self.down(wide * functional.gelu(gate))
        return x + self.outward(y.transpose(1, 2).unflatten(2, x.shape[2:]))


class DiffusionUNet(nn.Module):
    """The U-Net of latent diffusion: residual blocks and transformer blocks at several resolutions."""

    def __init__(
        self, width: int = 320, scales: Sequence[int] = (1, 2, 4, 4), text: int = 768, heads: int = 8
    ) -> None:
        super().__init__()
        time, last = 4 * width, len(scales) - 1
        self.width, self.time = width, nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first, channels, skip_channels = nn.Conv2d(4, width, 3, padding=1), width, [width]
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for level, scale in enumerate(scales):
            for _ in range(2):
                self.down.append(self._level(channels, scale * width, time, text, heads, level < last))
                channels = scale * width
                skip_channels.append(channels)
            if level < last:
                self.down.append(nn.Conv2d(channels, channels, 3, 2, 1))
                skip_channels.append(channels)
        self.middle = self._level(channels, channels, time, text, heads, True)
        self.end = ResidualBlock(channels, channels, time)
        for level, scale in reversed(list(enumerate(scales))):
            for index in range(3):
                wide = channels + skip_channels.pop()
                self.up.append(self._level(wide, scale * width, time, text, heads, level < last))
                channels = scale * width
                if index == 2 and level:
                    self.up.append(nn.Conv2d(channels, channels, 3, padding=1))
        self.norm, self.last = nn.GroupNorm(min(32, width // 4), width), nn.Conv2d(width, 4, 3, padding=1)

    @staticmethod
    def _level(channels: int, out: int, time: int, text: int, heads: int, attends: bool) -> nn.ModuleList:
        blocks: list[nn.Module] = [ResidualBlock(channels, out, time)]
        return nn.ModuleList([*blocks, TransformerBlock(out, text, heads)] if attends else blocks)

    @staticmethod
    def _run(blocks: nn.ModuleList, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        for block in blocks:
            x = block(x, time if isinstance(block, ResidualBlock) else text)
        return x

    def forward(self, x: Tensor, step: Tensor, text: Tensor) -> Tensor:
        """Return (n, 4, h, w) noise of (n, 4, h, w) latents, (n, width) steps and (n, words, text) texts."""
        time, skips = self.time(step), [self.first(x)]
        for stage in self.down:
            is_level = isinstance(stage, nn.ModuleList)
            skips.append(self._run(stage, skips[-1], time, text) if is_level else stage(skips[-1]))
        y = self.end(self._run(self.middle, skips[-1], time, text), time)
        for stage in self.up:
            if isinstance(stage, nn.ModuleList):
                y = self._run(stage, torch.cat([y, skips.pop()], dim=1), time, text)
            else:
                y = stage(functional.interpolate(y, scale_factor=2.0, mode="nearest"))
        return self.last(functional.silu(self.norm(y)))


class GraphNetwork(nn.Module):
    """Message passing: a message for each edge from both its ends, added up at the edge's target."""

    def __init__(self, width: int = 128, layers: int = 4, kinds: int = 50) -> None:
        super().__init__()
        self.nodes = nn.Embedding(kinds, width)
        self.message, self.update = (
            nn.ModuleList(
                nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
                for _ in range(layers)
            )
            for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, kinds: Tensor, edges: Tensor) -> Tensor:
        """Return (nodes, width) of the kind of each node and the (2, edges) sources and targets of edges."""
        x, (source, target) = self.nodes(kinds), edges
        for message, update, norm in zip(self.message, self.update, self.norms, strict=True):
            sent = message(torch.cat([x[source], x[target]], dim=-1))
            received = torch.zeros_like(x).index_add(0, target, sent.to(x.dtype))
            x = norm(x + update(torch.cat([x, received], dim=-1)))
        return x


class WaveNet(nn.Module):
    """Gated convolutions over time with growing dilation; all layers add to the result."""

    def __init__(self, width: int = 128, layers: int = 20, channels: int = 80) -> None:
        super().__init__()
        self.first = nn.Conv1d(channels, width, 1)
        self.dilated = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 3, padding=2 ** (layer % 10), dilation=2 ** (layer % 10))
            for layer in range(layers)
        )
        self.mixed = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(layers))
        self.last = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, 256, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, 256, time) of (n, channels, time)."""
        x, total = self.first(x), 0
        for dilated, mixed in zip(self.dilated, self.mixed, strict=True):
            wide, gate = dilated(x).chunk(2, dim=1)
            more, skipped = mixed(torch.tanh(wide) * torch.sigmoid(gate)).chunk(2, dim=1)
            x, total = x + more, total + skipped
        return self.last(total)


class Recurrent(nn.Module):
    """A recurrent network and a linear layer."""

    def __init__(self, cell: type[nn.RNNBase], inputs: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.cells, self.head = cell(inputs, width, layers, batch_first=True), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, time, classes) of (n, time, inputs)."""
        return self.head(self.cells(x)[0])
