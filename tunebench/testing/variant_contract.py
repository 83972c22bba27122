"""Contract tests of kernel variants: subclass `VariantContract` in a test module, and pytest runs them.

    from tunebench.testing.variant_contract import VariantContract

    class TestMySoftmax(VariantContract):
        variant = my_kernel.VARIANT
        workloads = ("softmax:rows=37,cols=131,dtype=f32", "softmax:rows=5,cols=1000,dtype=f16")

Choose odd and prime sizes, so that every tile and vector is cut somewhere, and one aligned size for the
widest accesses. No GPU is needed: GPU variants are compiled for `devices` and emulated on the host.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from tunebench._environment import binary_folder
from tunebench.binary.cubin import launch_refusal
from tunebench.compile import BinaryCache, compile_config, unavailable
from tunebench.device import Device, local_cpu, representative
from tunebench.measure.cpu import CpuRunner
from tunebench.measure.offline import OfflineRunner
from tunebench.measure.timing import Protocol
from tunebench.outcome import Measured, Predicted
from tunebench.space import Config
from tunebench.task import Task
from tunebench.variant import GpuVariant, Variant
from tunebench.workload import Workload
from tunebench.workloads import parse

__all__ = ["VariantContract", "check_launches", "sample_configs"]

_ONCE = Protocol(cache="warm", warmups=0, min_samples=2, max_samples=2)


class VariantContract:
    """Tests that every variant must pass, for each of `workloads` on each of `devices`.

    Attributes:
        variant: The variant under test.
        workloads: Workloads that it supports, as text.
        devices: Architectures to compile for; default: sm_80 and sm_90, or this processor for CPU variants.
        configs: Configurations to verify per workload: the default and random ones.
    """

    variant: ClassVar[Variant[Any]]
    workloads: ClassVar[Sequence[str]]
    devices: ClassVar[Sequence[str]] = ("sm_80", "sm_90")
    configs: ClassVar[int] = 3

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise the tests over workloads and devices."""
        if "workload" in metafunc.fixturenames:
            metafunc.parametrize("workload", [*map(parse, self.workloads)], ids=self.workloads)
        if "device" in metafunc.fixturenames:
            gpu = isinstance(self.variant, GpuVariant)
            devices = [representative(name) for name in self.devices] if gpu else [local_cpu()]
            metafunc.parametrize("device", devices, ids=lambda device: device.architecture)

    @pytest.fixture
    def supported(self, workload: Workload, device: Device) -> None:
        """Skip the test if the variant refuses the workload on the device."""
        if reason := self.variant.refuses(workload, device):
            pytest.skip(reason)

    @pytest.mark.usefixtures("supported")
    def test_default_is_a_valid_configuration(self, workload: Workload, device: Device) -> None:
        table = self.variant.configs(workload, device)
        assert table.row(self.variant.default(workload, device)) is not None

    @pytest.mark.usefixtures("supported")
    def test_costs_are_finite_and_not_negative(self, workload: Workload, device: Device) -> None:
        table = self.variant.configs(workload, device)
        costs = self.variant.costs(workload, table, device)
        for name in ("blocks", "threads", "fma", "mma_flop", "sfu", "smem_bytes"):
            column = np.asarray(getattr(costs, name), dtype=np.float64)
            assert np.all(np.isfinite(column) & (column >= 0)), name
            assert column.shape in ((), (len(table),)), name

    @pytest.mark.usefixtures("supported")
    def test_revision_is_repeatable(self, workload: Workload, device: Device) -> None:
        config = self.variant.default(workload, device)
        assert self.variant.revision(workload, config) == self.variant.revision(workload, config)

    @pytest.mark.usefixtures("supported")
    def test_launches_agree_with_declared_costs(self, workload: Workload, device: Device) -> None:
        if not isinstance(self.variant, GpuVariant):
            pytest.skip("CPU variants have no launches")
        check_launches(self.variant, workload, device)

    @pytest.mark.usefixtures("supported")
    def test_binary_can_be_launched(self, workload: Workload, device: Device) -> None:
        if not isinstance(self.variant, GpuVariant):
            pytest.skip("CPU variants have no launches")
        config = self.variant.default(workload, device)
        binary = self._compiled(workload, config, device)
        launches = self.variant.launches(workload, config)
        assert launch_refusal(binary, launches, device) is None
        assert not binary.resources.spill_bytes, "the default configuration spills registers"

    @pytest.mark.usefixtures("supported")
    def test_results_are_right(self, workload: Workload, device: Device) -> None:
        gpu = isinstance(self.variant, GpuVariant)
        runner = OfflineRunner(_ONCE) if gpu else CpuRunner(_ONCE, device)
        for config in sample_configs(self.variant, workload, device, self.configs):
            task = Task(
                variant=self.variant,
                workload=workload,
                config=config,
                device=device,
                predicted_us=1.0 if gpu else None,
            )
            outcome = runner.run(task, self._compiled(workload, config, device), None)[0]
            assert isinstance(outcome, Measured | Predicted), f"{config}: {outcome}"
            if outcome.verification.how == "not verified":
                pytest.skip(outcome.verification.detail)

    def _compiled(self, workload: Workload, config: Config, device: Device) -> Any:
        if reason := unavailable(self.variant.language):
            pytest.skip(reason)
        cache = BinaryCache(binary_folder())
        return compile_config(self.variant, workload, config, device, cache)


def sample_configs(variant: Variant[Any], workload: Workload, device: Device, count: int) -> list[Config]:
    """Return the default configuration and `count - 1` random ones, the same in every run."""
    table = variant.configs(workload, device)
    rows = random.Random(str(workload)).sample(range(len(table)), min(count - 1, len(table)))
    return [variant.default(workload, device), *map(table.config, rows)]


def check_launches(variant: GpuVariant[Any], workload: Workload, device: Device, count: int = 20) -> None:
    """Assert that the launches of random configurations agree with the declared costs and tensors.

    Args:
        variant: The variant.
        workload: A workload that it supports.
        device: The device.
        count: Most configurations to check.

    Raises:
        AssertionError: A block size differs from the declared threads, an argument names an unknown tensor,
            or an output is not an argument of any launch.
    """
    table = variant.configs(workload, device)
    threads = np.broadcast_to(variant.costs(workload, table, device).threads, len(table))
    outputs = {tensor.name for tensor in workload.outputs()}
    for row in random.Random(0).sample(range(len(table)), min(count, len(table))):
        config = table.config(row)
        launches = variant.launches(workload, config)
        blocks = {x * y * z for x, y, z in (launch.block for launch in launches)}
        assert threads[row] in blocks, f"{config}: {threads[row]} threads declared, {blocks} launched"
        scratch = {tensor.name for tensor in variant.scratch(workload, config)}
        named = {name for launch in launches for name in launch.arguments if isinstance(name, str)}
        assert named <= {tensor.name for tensor in workload.inputs()} | outputs | scratch, config
        assert outputs <= named, config
