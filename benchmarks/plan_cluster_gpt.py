"""A GPT in stages, as a `ClusterPlan` divides and recomputes it, and the same GPT trained by one process."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tunebench.errors import InputError
from tunebench.training.cluster import ClusterPlan, TrainingJob
from tunebench.training.pipeline.activation import architecture_of
from tunebench.workloads.networks.architecture import Architecture

__all__ = [
    "DIVISION",
    "LEARNING_RATE",
    "WEIGHT_DECAY",
    "batch_of",
    "loss_of",
    "one_process_losses",
    "stages_of",
]

LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.01


class Attention(nn.Module):
    """Causal attention with the heads that this process has.

    The matrix of queries, keys and values has them head by head, so that a part of its rows is a part of the
    heads.
    """

    def __init__(self, architecture: Architecture, plan: ClusterPlan) -> None:
        super().__init__()
        self.head_dim, self.plan = architecture.head_dim, plan
        self.inputs, self.output = (
            nn.Linear(architecture.hidden, 3 * architecture.inner),
            nn.Linear(architecture.inner, architecture.hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, seq, width)."""
        batch, seq, _ = x.shape
        q, k, v = self.inputs(x).view(batch, seq, -1, 3, self.head_dim).unbind(3)
        if self.plan.recompute == "selective":
            y = checkpoint(self._core, q, k, v, use_reentrant=False)
        else:
            y = self._core(q, k, v)
        return self.output(y.transpose(1, 2).reshape(batch, seq, -1))

    def _core(self, *parts: Tensor) -> Tensor:
        """Return (batch, heads, seq, head) of queries, keys and values (batch, seq, heads, head)."""
        q, k, v = (part.transpose(1, 2).contiguous() for part in parts)
        if self.plan.flash:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = (q * self.head_dim**-0.5) @ k.transpose(2, 3)
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu_(1)
        return scores.masked_fill_(later, -torch.inf).softmax(-1) @ v


class Layer(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, architecture: Architecture, plan: ClusterPlan) -> None:
        super().__init__()
        self.plan = plan
        self.norm1, self.norm2 = nn.LayerNorm(architecture.hidden), nn.LayerNorm(architecture.hidden)
        self.attention = Attention(architecture, plan)
        self.up, self.down = (
            nn.Linear(architecture.hidden, architecture.ffn),
            nn.Linear(architecture.ffn, architecture.hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, seq, width)."""
        if self.plan.recompute == "full":
            return checkpoint(self._computed, x, use_reentrant=False)
        return self._computed(x)

    def _computed(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Embedding(nn.Module):
    """Words and their positions."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.words, self.positions = (
            nn.Embedding(n, architecture.hidden) for n in (architecture.vocabulary, architecture.positions)
        )

    def forward(self, words: Tensor) -> Tensor:
        """Return (batch, seq, width)."""
        return self.words(words) + self.positions(torch.arange(words.shape[1]))


class Head(nn.Module):
    """The last normalisation and the logits."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.norm, self.logits = (
            nn.LayerNorm(architecture.hidden),
            nn.Linear(architecture.hidden, architecture.vocabulary, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (batch, seq, words of this process)."""
        return self.logits(self.norm(x))


DIVISION: dict[str, Any] = {
    "attention.inputs": ColwiseParallel,
    "attention.output": RowwiseParallel,
    "up": ColwiseParallel,
    "down": RowwiseParallel,
    "words": lambda: RowwiseParallel(input_layouts=Replicate()),
    "positions": lambda: RowwiseParallel(input_layouts=Replicate()),
    "logits": ColwiseParallel,
}
"""How tensor parallelism divides each matrix."""


def stages_of(job: TrainingJob, plan: ClusterPlan, stages: int) -> list[nn.Sequential]:
    """Return the model in stages, with the same weights for each plan."""
    architecture = architecture_of(job.network)
    if (
        architecture.family != "gpt2"
        or architecture.tied
        or architecture.dropout
        or architecture.attention_dropout
        or job.dtype != "f32"
    ):
        raise InputError(
            f"{job.network.name} cannot be run: expected a GPT-2 with a head of its own "
            "(tie_word_embeddings = false), no dropout, and dtype f32"
        )
    streams = (plan.parameters, plan.activations) != ("device", "device")
    if plan.sequence_parallel or plan.context > 1 or plan.sharding == "gradients" or streams:
        raise InputError(
            f"plan {plan} cannot be run: expected no sequence or context parallelism, sharding of none, "
            "optimizer or full, and parameters and activations on the device"
        )
    torch.manual_seed(0)
    layers = [Layer(architecture, plan) for _ in range(architecture.layers)]
    per_stage, more = divmod(architecture.layers, stages)
    boundaries = [stage * per_stage + min(stage, more) for stage in range(stages + 1)]
    parts = [nn.Sequential(*layers[first:last]) for first, last in itertools.pairwise(boundaries)]
    parts[0].insert(0, Embedding(architecture))
    parts[-1].append(Head(architecture))
    return parts


def batch_of(job: TrainingJob, step: int) -> tuple[Tensor, Tensor]:
    """Return words (batch, seq) of a step, and the word that follows each."""
    words = architecture_of(job.network).vocabulary
    drawn = torch.randint(0, words, (job.batch, job.seq + 1), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def loss_of(logits: Tensor, words: Tensor) -> Tensor:
    """Return the mean loss of logits (batch, seq, words)."""
    return functional.cross_entropy(logits.flatten(0, 1), words.flatten())


def one_process_losses(job: TrainingJob, plan: ClusterPlan, steps: int) -> list[float]:
    """Return the loss of each step of one process that runs the whole batch at once.

    Args:
        job: The network and its batch.
        plan: Only its kind of attention counts.
        steps: Number of steps.
    """
    model = stages_of(job, plan, 1)[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    losses = []
    for step in range(steps):
        words, target = batch_of(job, step)
        optimizer.zero_grad()
        loss = loss_of(model(words), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
