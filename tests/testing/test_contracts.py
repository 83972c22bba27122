"""The contract suites of tunebench.testing, run on the package's samplers and on one variant per language."""

from __future__ import annotations

from collections.abc import Callable

import optuna
from optuna.samplers import BaseSampler

from tests.support import needs_compiler, needs_numba_cuda, needs_nvrtc
from tunebench.kernels import variant
from tunebench.search.sampler import BoundSampler, RandomTableSampler
from tunebench.search.surrogate_sampler import SurrogateSampler
from tunebench.testing.sampler_contract import SamplerContract, objective
from tunebench.testing.variant_contract import VariantContract


class TestSurrogateSampler(SamplerContract):
    sampler_class = SurrogateSampler


class TestBoundSampler(SamplerContract):
    sampler_class = BoundSampler


class TestRandomTableSampler(SamplerContract):
    sampler_class = RandomTableSampler

    def test_raise_error_for_samplers_during_multi_objectives(
        self, sampler: Callable[[], BaseSampler]
    ) -> None:
        """Expect proposals, because a random sample reads no values."""
        study = optuna.create_study(directions=["minimize", "maximize"], sampler=sampler())
        study.optimize(lambda trial: (objective(trial), 0.0), n_trials=3)
        assert len(study.best_trials) >= 1


class TestCpuVariant(VariantContract):
    variant = variant("softmax/numba_cpu")
    workloads = (
        "softmax:rows=11,cols=131,dtype=f32",
        "softmax:rows=11,cols=131,dtype=f16,prologue=scale+mask",
    )


@needs_compiler
@needs_nvrtc
class TestCudaVariant(VariantContract):
    variant = variant("softmax/cuda_block")
    workloads = ("softmax:rows=3,cols=131,dtype=f32",)
    devices = ("sm_90",)
    configs = 2


@needs_numba_cuda
class TestNumbaCudaVariant(VariantContract):
    variant = variant("softmax/numba_cuda")
    workloads = ("softmax:rows=3,cols=131,dtype=f32",)
    devices = ("sm_90",)
    configs = 2
