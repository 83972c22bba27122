"""Facts about the best configuration, from the kernel registry: source, roofline, occupancy, gaps."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tunebench import kernels
from tunebench.binary.occupancy import occupancy
from tunebench.db.record import RECORDED, Record
from tunebench.db.recorded_space import names_of
from tunebench.device import Device
from tunebench.errors import InputError, TunebenchError
from tunebench.explanation.grid import BlockResources, Waves, blocks_and_waves
from tunebench.explanation.roofline import Roofline, roofline, roofline_of_work
from tunebench.export import stand_alone_source
from tunebench.kernels.recorded_kernel import RecordedKernel, find_recorded_kernel
from tunebench.outcome import CacheState, Resources, time_us
from tunebench.space import Config, Table
from tunebench.tuning.choice import ChosenConfig
from tunebench.tuning.proof import bound_ratios, bounded_spaces, optimality_gaps, searched_variants
from tunebench.tuning.tunable import find_variants
from tunebench.variant import CudaVariant, NumbaVariant, Variant
from tunebench.workload import Workload
from tunebench.workloads import parse

if TYPE_CHECKING:
    from tunebench.report.history import SearchHistory

__all__ = ["BestKernel", "describe_best", "recorded_roofline", "with_best_kernels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BestKernel:
    """Facts about the best configuration that need no run.

    Attributes:
        roofline: Roofline of its workload on its device; None if unknown.
        block: Resources of a thread block and occupancy, with the registers of the binary; None if unknown.
        waves: Waves of blocks on the SMs; None if unknown.
        source: Source of the kernel as it is now; empty if unknown.
        changed: Whether the source has changed since it was measured.
        gaps: Optimality gap after each record; empty if unknown.
        missing: Why something is unknown; empty if nothing is.
    """

    roofline: Roofline | None = None
    block: BlockResources | None = None
    waves: Waves | None = None
    source: str = ""
    changed: bool = False
    gaps: tuple[float | None, ...] = ()
    missing: str = ""


def with_best_kernels(histories: Sequence[SearchHistory]) -> list[SearchHistory]:
    """Return search histories with the facts about their best configurations.

    Args:
        histories: The search histories.
    """
    return [replace(history, kernel=describe_best(history)) for history in histories]


def describe_best(history: SearchHistory) -> BestKernel:
    """Return the facts about the best configuration of a search history.

    Args:
        history: The search history.
    """
    best, device = history.best, history.described
    if best is None:
        return BestKernel(missing="no configuration succeeded")
    if device is None:
        return BestKernel(missing=f"the description of {history.device} is not in the form of this version")
    if history.workload.startswith(RECORDED):
        return _of_recording(history, device)
    try:
        variant = kernels.variant(best.key.variant)
        workload = parse(history.workload)
        config = variant.space.check(best.key.config, workload=workload, device=device)
        return _of_variant(history, best, variant, workload, config, device)
    except TunebenchError as error:  # a variant or an operator that is not loaded, or has changed
        return BestKernel(missing=str(error))


def _of_variant(
    history: SearchHistory,
    best: Record,
    variant: Variant[Any],
    workload: Workload,
    config: Config,
    device: Device,
) -> BestKernel:
    table = Table(variant.space, np.array([variant.space.ordinals(config)], dtype=np.int16))
    costs = variant.costs(workload, table, device)
    block, waves = blocks_and_waves(variant, workload, config, costs, device)
    choice = ChosenConfig(
        workload=workload,
        device=device,
        variant=variant,
        config=config,
        why="best known",
        expected_us=time_us(best.result.outcome) or 0.0,
        how="measured here",
    )
    return BestKernel(
        roofline=roofline(workload, costs, device.with_meaningful_rates() or device),
        block=None if block is None else _compiled(block, best.result.resources, device),
        waves=waves,
        source=_source(choice),
        changed=variant.revision(workload, config) != best.key.revision,
        gaps=_gaps(history, best, workload, device),
    )


def _compiled(block: BlockResources, used: Resources, device: Device) -> BlockResources:
    """Return the resources of a block with those of its binary in place of the expected ones."""
    smem_bytes = block.smem_bytes
    if used.static_smem_bytes is not None:
        smem_bytes = used.static_smem_bytes + (used.dynamic_smem_bytes or 0)
    registers = used.registers if used.registers is not None else block.registers
    figures = {"threads": block.threads, "registers": registers, "smem_bytes": smem_bytes}
    resident = None if block.occupancy is None else occupancy(device, **figures)
    return BlockResources(**figures, occupancy=resident)


def _source(choice: ChosenConfig) -> str:
    """Return the source of a configuration: that which is compiled, or the file of a Numba kernel."""
    variant = choice.variant
    if isinstance(variant, CudaVariant):
        return stand_alone_source(choice)
    generated = variant.generated(choice.workload, choice.config) if isinstance(variant, NumbaVariant) else ""
    return generated or inspect.getsource(sys.modules[type(variant).__module__])


def _gaps(
    history: SearchHistory, best: Record, workload: Workload, device: Device
) -> tuple[float | None, ...]:
    names = searched_variants(history.figures.searched, history.records)
    cache: CacheState = "warm" if getattr(best.result.outcome, "cache", None) == "warm" else "cold"
    try:
        tunables, _ = find_variants(workload, device, names, cache=cache, compilable=False)
    except InputError:  # such as a variant that no longer supports the workload
        return ()
    if not device.assumed:
        return optimality_gaps(history.records, bounded_spaces(workload, tunables, cache), best, cache)
    bound_us = history.figures.bound_us
    return () if bound_us is None else bound_ratios(history.records, bound_us, best, cache)


# -- recorded tuning spaces ----------------------------------------------------------------------------------


def _of_recording(history: SearchHistory, device: Device) -> BestKernel:
    kernel, problem = names_of(history.workload)
    values: dict[str, dict[Any, None]] = {}
    for record in history.records:
        for name, value in record.key.config.items():
            values.setdefault(name, {})[value] = None
    kernel_model = find_recorded_kernel(
        kernel, {name: tuple(choices) for name, choices in values.items()}, problem
    )
    if isinstance(kernel_model, str):
        return BestKernel(missing=f"the recording has no source; {kernel_model}")
    columns = {name: np.array([record.key.config[name] for record in history.records]) for name in values}
    achieved = recorded_roofline(kernel_model, columns, device)
    return BestKernel(roofline=achieved, missing="the recording has neither source nor resources")


def recorded_roofline(
    kernel: RecordedKernel, columns: Mapping[str, np.ndarray[Any, Any]], device: Device
) -> Roofline | None:
    """Return the roofline of a recorded kernel, whose inputs are f32; None if the device is too old for it.

    The FLOPs are those of the configuration with the fewest.

    Args:
        kernel: Cost model of the kernel.
        columns: Configurations of the recorded tuning space.
        device: The device.
    """
    if device.compute_capability < kernel.minimum_cc:
        return None
    costs = kernel.costs(columns, device)
    flops = int(2 * np.min(np.asarray(costs.blocks, dtype=np.float64) * costs.fma))
    return roofline_of_work(flops=flops, traffic=kernel.traffic, dtype="f32", costs=costs, device=device)
