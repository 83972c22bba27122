"""The inner loop of a trainer for a decoder with a tied head: shifted labels, and padding masked out.

Each step does what the loop of Hugging Face's ``Trainer`` does: the model returns an output object, the loss
is divided by the accumulation steps, gradients are clipped, callbacks see the state, and logs are kept.

Source: transformers, ``Trainer.training_step`` and ``GPT2LMHeadModel``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.programs import State, Step

WIDTH, HEADS, LENGTH, WORDS, ACCUMULATE = 48, 4, 24, 120, 2


class Conv1D(nn.Module):
    """A linear layer with a transposed weight, on (..., inputs)."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.02)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., outputs)."""
        shape = (*x.shape[:-1], self.bias.shape[0])
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(shape)


class Block(nn.Module):
    """Attention and a two-layer network, each behind a layer norm, on (N, L, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)
        self.c_fc, self.c_out = Conv1D(4 * WIDTH, WIDTH), Conv1D(WIDTH, 4 * WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return (N, L, WIDTH) features; the mask is added to scores."""
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(WIDTH, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.drop(self.c_proj(mixed.transpose(1, 2).flatten(2)))
        hidden = self.c_fc(self.ln_2(x))
        hidden = 0.5 * hidden * (1 + torch.tanh(0.7978845608 * (hidden + 0.044715 * torch.pow(hidden, 3.0))))
        return x + self.drop(self.c_out(hidden))


@dataclass
class Output:
    """What the model returns: the loss if there are labels, and (N, L, WORDS) logits."""

    loss: Tensor | None
    logits: Tensor


class LanguageModel(nn.Module):
    """Decoder whose head has the weights of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h, self.ln_f = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        nn.init.normal_(self.wte.weight, std=0.02)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Output:
        """Return loss and logits."""
        length = input_ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        allowed = causal & attention_mask[:, None, None, :].bool()
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
        hidden = self.wte(input_ids) + self.wpe(torch.arange(length).unsqueeze(0))
        for block in self.h:
            hidden = block(hidden, mask)
        logits = self.lm_head(self.ln_f(hidden))
        loss = None
        if labels is not None:
            shifted = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
            loss = functional.cross_entropy(logits.view(-1, WORDS), shifted.view(-1), ignore_index=-100)
        return Output(loss, logits)


@dataclass
class TrainerState:
    """What callbacks of the trainer see."""

    global_step: int = 0
    logs: list[dict[str, float]] = field(default_factory=list)


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: max(0.0, 1 - number / 100))
    progress = TrainerState()
    state = State(
        modules={"model": model},
        optimizers={"adamw": optimizer},
        batch=lambda iteration: _batch(seed, iteration),
    )
    callbacks: list[Callable[[TrainerState], None]] = [
        lambda progress: state.effects.append(("step", progress.global_step)),
        lambda progress: state.effects.append(dict(progress.logs[-1])),
    ]

    def training_step(inputs: dict[str, Any]) -> Tensor:
        model.train()
        loss = model(**inputs).loss / ACCUMULATE
        loss.backward()
        return loss.detach()

    def step(*micro_batches: dict[str, Tensor]) -> Tensor:
        total = torch.tensor(0.0)
        for inputs in micro_batches:
            loss = training_step(inputs)
            total = total + (torch.zeros(()) if torch.isnan(loss) or torch.isinf(loss) else loss)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        model.zero_grad()
        progress.global_step += 1
        if progress.global_step % 2 == 0:
            rate = schedule.get_last_lr()[0]
            progress.logs.append({"loss": round(total.item(), 4), "norm": norm.item(), "rate": rate})
            for callback in callbacks:
                callback(progress)
        return total

    return step, state


def _batch(seed: int, iteration: int) -> tuple[dict[str, Tensor], ...]:
    chance = torch.Generator().manual_seed(seed * 1000 + iteration)
    lengths = random.Random(seed * 1000 + iteration)
    made = []
    for _ in range(ACCUMULATE):
        words = torch.randint(WORDS, (4, LENGTH), generator=chance)
        mask = torch.zeros_like(words)
        for row in mask:
            row[: lengths.randint(LENGTH // 2, LENGTH)] = 1
        made.append(
            {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}
        )
    return tuple(made)
