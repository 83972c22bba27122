"""Machine code to carry to the GPU: compiled here, and used there whatever compiler that machine has.

Where a compiler refuses a whole family of kernels, their defaults are timed anyway, and `tune` chooses among
the carried configurations. The key of a carried binary is a hash of source, flags and architecture.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tests.gpu.acceptance_run import gpu_candidates
from tests.gpu.acceptance_workloads import HEADLINE, SANITIZED_FIRST, WGMMA, small_workloads
from tests.gpu.wrapper_case import WrapperVariant
from tests.gpu.wrapper_cases_hopper import CASES
from tunebench import device as devices
from tunebench import kernels
from tunebench._environment import binary_folder
from tunebench.compile import BinaryCache, carried_key, compile_config
from tunebench.device import Device
from tunebench.errors import TunebenchError
from tunebench.space import Config
from tunebench.tuning.tunable import TunableVariant
from tunebench.workload import Workload
from tunebench.workloads import parse

__all__ = ["CARRIED", "CarriedKernel", "candidates", "is_carried", "kernels_to_carry", "write_carried"]

CARRIED = "carried"
"""Folder of the binaries in the tar file."""
CANDIDATES = 8
"""Configurations of each headline workload to carry: the fastest ones of its first variant, as predicted."""


class CarriedKernel(NamedTuple):
    """A configuration to compile for another machine."""

    variant: Any
    workload: Workload
    config: Config
    device: Device

    @property
    def key(self) -> str:
        """Key of its carried binary."""
        return carried_key(*self)


def devices_of(architecture: str) -> list[Device]:
    """Return the described products of an architecture: their defaults may differ."""
    return [device for device in devices.described().values() if device.architecture == architecture]


def candidates(candidate: TunableVariant) -> list[int]:
    """Return the rows of a variant's configurations to carry, the one predicted fastest first."""
    return sorted(range(len(candidate.table)), key=candidate.predicted_us)[:CANDIDATES]


def kernels_to_carry(device: Device) -> Iterator[CarriedKernel]:
    """Yield what run A and the checks of run B compile: defaults, wrappers, configurations to choose from."""
    for text in (*WGMMA, *HEADLINE):
        workload = parse(text)
        searched = [
            c for c in gpu_candidates(text, device)[0] if text in HEADLINE or "wgmma" in c.variant.key
        ]
        for candidate in searched:
            default = candidate.variant.default(workload, device)
            yield CarriedKernel(candidate.variant, workload, default, device)
        if text in HEADLINE:
            fastest = min(searched, key=functools.partial(_predicted_default_us, text=text))
            for row in candidates(fastest):
                yield CarriedKernel(fastest.variant, workload, fastest.table.config(row), device)
    for key in SANITIZED_FIRST:
        variant = kernels.variant(key)
        for text in small_workloads(variant, device):
            workload = parse(text)
            yield CarriedKernel(variant, workload, variant.default(workload, device), device)
    for case in CASES:
        if case.runs_on(device):
            wrapper = WrapperVariant(case)
            yield CarriedKernel(wrapper, wrapper.workload, Config({"unused": 0}), device)


def _predicted_default_us(candidate: TunableVariant, text: str) -> float:
    row = candidate.table.row(candidate.variant.default(parse(text), candidate.device))
    return float("inf") if row is None else candidate.predicted_us(row)


def is_carried(folder: Path, kernel: CarriedKernel) -> bool:
    """Return whether the binary of a configuration is in a folder."""
    return BinaryCache(folder).get(kernel.key) is not None


def write_carried(
    folder: Path, products: Sequence[Device], say: Callable[[str], object], workers: int | None = None
) -> list[str]:
    """Compile what is carried to GPUs, and return a line for each configuration that does not compile.

    Args:
        folder: Folder of the binaries.
        products: The GPUs, which share an architecture.
        say: Called with progress.
        workers: Number of concurrent compilations; None is one per core.
    """
    by_key = {kernel.key: kernel for product in products for kernel in kernels_to_carry(product)}
    target, compiled = BinaryCache(folder), BinaryCache(binary_folder())

    def write(keyed: tuple[str, CarriedKernel]) -> str | None:
        key, kernel = keyed
        try:
            target.put(dataclasses.replace(compile_config(*kernel, compiled), key=key))
        except TunebenchError as error:
            return f"{kernel.variant.key} {kernel.config} {kernel.workload}: {error}"
        return None

    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        problems = [problem for problem in pool.map(write, by_key.items()) if problem is not None]
    say(f"compiled {len(by_key) - len(problems)} of {len(by_key)} kernels to carry")
    return problems
