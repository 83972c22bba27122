"""Software stacks by name: kernels, framework, version, and how long steps take beside their prediction.

A network is predicted from its kernels, its collectives and its schedule. Programs take longer: they launch
what is not listed, wait where nothing is modelled, and run on machines that their users do not tune. Each
stack has an `Efficiency` for steps that its authors published (`tuned`) and for those of others (`typical`),
learned from published steps. `python -m benchmarks.predict_stacks` prints how they were learned, and their
errors on sources that were left out.

To add a stack, add a `SoftwareStack` to `STACKS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Literal

from tunebench.errors import InputError, UnknownName

__all__ = [
    "STACKS",
    "Efficiency",
    "Kernels",
    "SoftwareStack",
    "Tuning",
    "efficiency_of",
    "find_stack",
    "quantile_95",
]

Kernels = Literal["eager", "compiled", "megatron"]
"""Kinds of kernels that a network runs: PyTorch's, those of a compiler, or the fused ones of Megatron-LM."""

Tuning = Literal["tuned", "typical"]
"""Whether a program runs as the authors of its stack publish it, or as others run it."""

_QUANTILES = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
"""95 % quantiles of Student's t distribution with 1, 2, … degrees of freedom."""


def quantile_95(freedom: int) -> float:
    """Return the 95 % quantile of Student's t distribution; from 10 degrees of freedom on, that of 10.

    Args:
        freedom: Degrees of freedom, at least 1.
    """
    return _QUANTILES[min(freedom, len(_QUANTILES)) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """How long steps of a stack take beside their prediction: the logarithm of measured over predicted time.

    A source is a cluster with its program, of which several steps were published.

    Attributes:
        mean: Mean over sources.
        between: Standard deviation of the means of sources.
        within: Standard deviation of the steps of a source.
        sources: Number of sources, at least 2.
    """

    mean: float
    between: float
    within: float
    sources: int

    @classmethod
    def of_sources(cls, logarithms: Mapping[str, Sequence[float]]) -> Efficiency:
        """Learn from measured steps, with equal weight for each source.

        Args:
            logarithms: Logarithm of measured over predicted time of each step, by source.

        Raises:
            InputError: if there are fewer than two sources.
        """
        if len(logarithms) < 2:
            raise InputError(f"an efficiency needs steps of at least 2 sources, got {len(logarithms)}")
        means = [fmean(values) for values in logarithms.values()]
        squares = [
            fmean((value - mean) ** 2 for value in values)
            for values, mean in zip(logarithms.values(), means, strict=True)
            if len(values) > 1
        ]
        within = math.sqrt(fmean(squares)) if squares else 0.0
        return cls(mean=fmean(means), between=stdev(means), within=within, sources=len(means))

    @property
    def width(self) -> float:
        """Half-width of the 90 % interval of a step of another source, as a logarithm.

        It contains the error of the mean of few sources: the quantile is that of Student's t distribution.
        """
        spread = math.hypot(self.between * math.sqrt(1 + 1 / self.sources), self.within)
        return quantile_95(self.sources - 1) * spread

    def apply(self, low_us: float, us: float, high_us: float) -> tuple[float, float, float]:
        """Return the 90 % interval and the expected time of a step with this efficiency.

        The errors of the prediction and of the efficiency are independent.

        Args:
            low_us: Lower end of the 90 % interval without it.
            us: Expected time without it.
            high_us: Upper end without it.
        """
        if not us:
            return low_us, us, high_us
        below = math.hypot(math.log(us / max(low_us, us / 1e3)), self.width)
        above = math.hypot(math.log(max(high_us, us) / us), self.width)
        expected_us = us * math.exp(self.mean)
        return expected_us * math.exp(-below), expected_us, expected_us * math.exp(above)


TUNED_MEGATRON = Efficiency(mean=0.0, between=0.023, within=0.051, sources=5)
"""Steps that NVIDIA published, on A100, H100 and B200. Their mean, 0.011, is not different from 0 (its
standard error is 0.010), so 0 is taken."""

TYPICAL_MEGATRON = Efficiency(mean=0.148, between=0.096, within=0.063, sources=4)
"""Steps that others published, with Megatron-DeepSpeed and GPT-NeoX on A100."""

PYTORCH = Efficiency(mean=0.038, between=0.066, within=0.029, sources=6)
"""Steps of PyTorch with FSDP, eager and compiled. Those of torchtitan's authors do not differ from others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareStack:
    """What is known of a software stack.

    Attributes:
        name: Name in options, with a version after `@` if it is not the latest one.
        about: What it is, as text.
        kernels: Kind of kernels that a network runs.
        framework: Framework whose buffers count in memory.
        tuned: Efficiency of steps that its authors published; None if no published step shows a difference.
        typical: Efficiency of steps of others.
        usual: Which of both is taken by default.
        optimizer_sharding_sum: Collective by which data-parallel ranks that shard only the states of the
            optimizer (ZeRO-1) sum gradients.
        direct_sums: Whether devices of a node read each other's memory to sum short tensors, by kernels of
            its own instead of NCCL's.
    """

    name: str
    about: str
    kernels: Kernels
    framework: Literal["megatron", "deepspeed", "fsdp", "torchtitan"]
    typical: Efficiency
    tuned: Efficiency | None = None
    usual: Tuning = "typical"
    optimizer_sharding_sum: Literal["reduce-scatter", "all-reduce"] = "reduce-scatter"
    direct_sums: bool = False


STACKS: Mapping[str, SoftwareStack] = MappingProxyType(
    {
        stack.name: stack
        for stack in (
            SoftwareStack(
                name="eager",
                about="eager PyTorch",
                kernels="eager",
                framework="fsdp",
                typical=PYTORCH,
            ),
            SoftwareStack(
                name="compiled",
                about="PyTorch with operations fused, as by torch.compile",
                kernels="compiled",
                framework="fsdp",
                typical=PYTORCH,
            ),
            SoftwareStack(
                name="serving",
                about="compiled, with all-reduce kernels of its own for short tensors",
                kernels="compiled",
                framework="fsdp",
                typical=PYTORCH,
                # Sources: gpt-fast (`ENABLE_INTRA_NODE_COMM`); vllm, `custom_all_reduce.py`.
                direct_sums=True,
            ),
            SoftwareStack(
                name="fsdp",
                about="eager PyTorch with FSDP",
                kernels="eager",
                framework="fsdp",
                typical=PYTORCH,
            ),
            SoftwareStack(
                name="torchtitan",
                about="torchtitan, compiled",
                kernels="compiled",
                framework="torchtitan",
                typical=PYTORCH,
            ),
            SoftwareStack(
                name="megatron",
                about="Megatron-LM and NeMo",
                kernels="megatron",
                framework="megatron",
                tuned=TUNED_MEGATRON,
                typical=TYPICAL_MEGATRON,
                usual="tuned",
            ),
            SoftwareStack(
                name="megatron@2022",
                about="Megatron-DeepSpeed and GPT-NeoX of 2022",
                kernels="megatron",
                framework="deepspeed",
                tuned=TUNED_MEGATRON,
                typical=TYPICAL_MEGATRON,
                # Source: deepspeedai/DeepSpeed, `runtime/engine.py` (stage 1 disables `contiguous_gradients`)
                # and `runtime/zero/stage_1_and_2.py` (then `buffered_reduce_fallback` sums whole buckets);
                # `_bf16_reduce_grads` of its pipeline engine does the same.
                optimizer_sharding_sum="all-reduce",
            ),
        )
    }
)
"""Stacks by name."""


def find_stack(name: str) -> SoftwareStack:
    """Return the record of a stack.

    Raises:
        UnknownName: There is no such stack.
    """
    if name not in STACKS:
        raise UnknownName("stack", name, STACKS)
    return STACKS[name]


def efficiency_of(name: str, tuning: str = "") -> Efficiency:
    """Return the efficiency of 16-bit training steps of a stack.

    Args:
        name: Name of the stack.
        tuning: `tuned`, `typical`, or empty for the usual one of the stack.

    Raises:
        UnknownName: There is no such stack or tuning.
        InputError: Published steps show no difference between tuned and typical runs of the stack.
    """
    stack = find_stack(name)
    choices = {"tuned": stack.tuned, "typical": stack.typical}
    if tuning and tuning not in choices:
        raise UnknownName("tuning", tuning, choices)
    efficiency = choices[tuning or stack.usual]
    if efficiency is None:
        raise InputError(
            f"published steps show no difference between tuned and typical runs of {name}: leave "
            f"tuning={tuning} out"
        )
    return efficiency
