"""Predicted and measured memory of activations: published formulas of a layer, and steps of five models.

    python -m benchmarks.activation_memory [--out FILE]

Layers: what a layer keeps between the passes, by formulas (`tunebench.training.pipeline.activation`), and
by MemTracker in a layer written as the formulas assume, on this processor. A layer's bytes are the difference
between four layers and three, so that the ends of the network do not count.

Models: the peak of a step that `tunebench.training.fit` extracts from the model, without a plan, and by
MemTracker in eager torch, both with the loss, parameters, gradients and inputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.fit_models import Loss, measured_peak
from benchmarks.torch_models import Bert, Gpt2, Resnet, Size
from tunebench.training import fit, fitted_steps
from tunebench.training.memory import simulate, unplanned
from tunebench.training.pipeline.activation import ActivationMemory, architecture_of
from tunebench.workloads.networks import from_config

__all__ = ["kept_bytes", "layer_bytes"]

WIDTH, HEADS, SEQ, BATCH, FFN = 128, 4, 64, 4, 384


class Layer(nn.Module):
    """A layer of GPT-2 or Llama, with one kernel for each tensor that the formulas count."""

    def __init__(self, family: str, *, dropout: float, flash: bool) -> None:
        super().__init__()
        self.gated, self.flash = family == "llama", flash
        self.dropout = dropout
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=not self.gated) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=not self.gated)
        self.out = nn.Linear(WIDTH, WIDTH, bias=not self.gated)
        self.up = nn.Linear(WIDTH, FFN, bias=not self.gated)
        self.gate = nn.Linear(WIDTH, FFN, bias=False) if self.gated else None
        self.down = nn.Linear(FFN, WIDTH, bias=not self.gated)

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states (batch, seq, width) after the layer."""
        x = x + self._dropped(self.out(self._attention(self.norms[0](x))))
        inner = self.norms[1](x)
        up = self.up(inner)
        up = functional.silu(self.gate(inner)) * up if self.gate else functional.gelu(up)
        return x + self._dropped(self.down(up))

    def _attention(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, HEADS, -1).permute(2, 0, 3, 1, 4).contiguous().unbind(0)
        if self.flash:
            values = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = torch.softmax(q @ k.transpose(-1, -2), dim=-1)
            values = functional.dropout(scores, self.dropout) @ v if self.dropout else scores @ v
        return values.transpose(1, 2).reshape(batch, seq, -1)

    def _dropped(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout) if self.dropout else x


class Vit(nn.Module):
    """A vision transformer: patches, encoder layers of torch, and a classifier of the mean."""

    def __init__(
        self,
        width: int = 96,
        layers: int = 4,
        *,
        heads: int = 4,
        inner: int = 256,
        patch: int = 8,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        encoder = nn.TransformerEncoderLayer(
            width, heads, inner, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(encoder, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images (batch, 3, height, width)."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.layers(tokens).mean(dim=1))


def kept_bytes(layers: nn.ModuleList, x: Tensor, *, recompute: bool) -> int:
    """Return the bytes of tensors that are kept after the forward pass, by MemTracker.

    Args:
        layers: The layers.
        x: Input, of shape (batch, seq, width); it needs a gradient.
        recompute: Whether each layer keeps its input alone.
    """
    tracker = MemTracker()
    tracker.track_external(layers, x)
    with tracker:
        y = x
        for layer in layers:
            y = checkpoint(layer, y, use_reentrant=False) if recompute else layer(y)
        now = tracker.get_tracker_snapshot("current")
        activation_bytes = sum(by_kind["Total"] - by_kind["Parameter"] for by_kind in now.values())
        y.sum().backward()
    return int(activation_bytes)


def layer_bytes(family: str, dtype: torch.dtype, *, dropout: float, flash: bool, recompute: bool) -> int:
    """Return the bytes that a layer keeps, measured."""

    def kept(count: int) -> int:
        torch.manual_seed(0)
        layers = nn.ModuleList(Layer(family, dropout=dropout, flash=flash) for _ in range(count)).to(dtype)
        return kept_bytes(
            layers, torch.randn(BATCH, SEQ, WIDTH, dtype=dtype, requires_grad=True), recompute=recompute
        )

    return kept(4) - kept(3)


def formula_bytes(family: str, dtype: str, *, dropout: float, flash: bool, recompute: bool) -> int:
    """Return the bytes that a layer keeps by the formulas."""
    config: dict[str, object] = {
        "model_type": family,
        "vocab_size": 512,
        **(
            {"n_layer": 4, "n_embd": WIDTH, "n_head": HEADS, "n_inner": FFN, "n_positions": SEQ}
            if family == "gpt2"
            else {
                "num_hidden_layers": 4,
                "hidden_size": WIDTH,
                "num_attention_heads": HEADS,
                "intermediate_size": FFN,
                "max_position_embeddings": SEQ,
            }
        ),
    }
    if family == "gpt2":
        config |= {"resid_pdrop": dropout, "attn_pdrop": dropout, "embd_pdrop": dropout}
    return ActivationMemory(
        architecture=architecture_of(from_config("layer", config)),
        batch=BATCH,
        seq=SEQ,
        dtype=dtype,  # type: ignore[arg-type]
        recompute="full" if recompute else "none",
        flash_attention=flash,
    ).layer_bytes


def layer_rows() -> Iterator[str]:
    """Yield a row for each kind of layer."""
    yield "| layer | dtype | dropout | attention | recomputed | formula, bytes | MemTracker, bytes | ratio |"
    yield "|---|---|---|---|---|---|---|---|"
    dtypes = {"f32": torch.float32, "bf16": torch.bfloat16}
    for family, dropout in (("gpt2", 0.1), ("gpt2", 0.0), ("llama", 0.0)):
        for dtype, torch_dtype in dtypes.items():
            for flash, recompute in ((False, False), (True, False), (False, True)):
                if flash and dropout:
                    continue
                settings = {"dropout": dropout, "flash": flash, "recompute": recompute}
                formula = formula_bytes(family, dtype, **settings)  # type: ignore[arg-type]
                measured = layer_bytes(family, torch_dtype, **settings)  # type: ignore[arg-type]
                cells = (
                    family,
                    dtype,
                    dropout,
                    "flash" if flash else "stored scores",
                    "yes" if recompute else "no",
                )
                yield f"| {' | '.join(map(str, cells))} | {formula} | {measured} | {formula / measured:.3f} |"


def models() -> Iterator[tuple[str, nn.Module, Tensor, Tensor]]:
    """Yield the name, the model, its input and its classes."""
    text = Size(layers=4, width=64, heads=4, inner=256, words=500, longest=128)
    words, classes = torch.randint(500, (8, 128)), torch.randint(500, (8 * 128,))
    yield "GPT-2", Gpt2(text), words, classes
    yield "BERT", Bert(text), words, classes
    yield "Llama", _Decoder(), words, classes
    yield "ViT", Vit(), torch.randn(16, 3, 64, 64), torch.randint(10, (16,))
    yield (
        "ResNet",
        Resnet((1, 2, 2, 1), width=16, classes=10),
        torch.randn(16, 3, 64, 64),
        torch.randint(10, (16,)),
    )


class _Decoder(nn.Module):
    """Layers of Llama between an embedding and an output matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, WIDTH)
        self.layers = nn.ModuleList(Layer("llama", dropout=0.0, flash=True) for _ in range(4))
        self.head = nn.Linear(WIDTH, 500, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).flatten(0, 1)


def model_rows() -> Iterator[str]:
    """Yield a row for each model."""
    yield "| model | extracted step, bytes | MemTracker, bytes | ratio |"
    yield "|---|---|---|---|"
    for name, model, x, y in models():
        torch.manual_seed(0)
        step = Loss(model)
        measured = measured_peak(step, step, (x, y))
        fitted = fit(step, "100%")
        fitted(x, y).backward()
        (planned,) = fitted_steps(fitted)
        predicted = simulate(planned.plan.step, unplanned(planned.plan.step)).peak_bytes
        yield f"| {name} | {predicted} | {measured} | {predicted / measured:.3f} |"


def main(arguments: list[str] | None = None) -> None:
    """Print the tables, or write them to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for the tables; default: standard output")
    out = parser.parse_args(arguments).out
    lines = ["## Layers", "", *layer_rows(), "", "## Models", "", *model_rows(), ""]
    if out is None:
        print("\n".join(lines))
    else:
        out.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
