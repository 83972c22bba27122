"""Runner for GPUs that are not on this machine: verifies on the host, and returns a predicted time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.binary.code_forecast import forecast_code
from tunebench.binary.compiled import Binary
from tunebench.emulate.emulator import ORDERS, EmulationFailed, NotEmulated, emulate
from tunebench.emulate.numba_simulator import simulate
from tunebench.emulate.triton_interpreter import interpret
from tunebench.errors import InputError
from tunebench.measure.runner import Runner, coverage, first_errors, versions
from tunebench.measure.verify import Errors
from tunebench.outcome import Effort, Outcome, Predicted, Verification, WrongResult
from tunebench.space import Table
from tunebench.task import Task
from tunebench.variant import CudaVariant, NumbaCudaVariant, TritonVariant

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["OfflineRunner"]

EMULATION_TIMEOUT_S = 15.0
"""Time limit per order of threads, in seconds; three orders and compiling must fit a task's time limit."""
SIMULATION_TIMEOUT_S = 45.0

# Errors by which the simulator and the interpreter report features that they lack; others are the kernel's.
_LACKING = ("AttributeError", "ImportError", "ModuleNotFoundError", "NotImplementedError")


class OfflineRunner(Runner):
    """Verification of a small workload on the host that uses the same tile, stage and edge paths.

    CUDA C++ is emulated with its threads in forward, reverse and random order: if threads race, or a barrier
    is missing, the results differ. Numba-CUDA runs in Numba's simulator, Triton in its interpreter. A kernel
    that cannot be run is `not verified`, with the reason, and counts neither as correct nor as wrong.

    Args:
        protocol: Unused, since nothing is timed.
    """

    def run(self, task: Task, binary: Binary, abort_above_us: float | None) -> tuple[Outcome, Effort]:
        """Verify one configuration and return its predicted time.

        Raises:
            InputError: The task has no predicted time, or its variant is not for GPUs.
        """
        begun = time.perf_counter()
        if task.predicted_us is None:
            raise InputError(
                f"{task.variant.key}: a task for a device that is not on this machine needs predicted_us"
            )
        verified = self._verify(task)
        effort = Effort(verify_s=time.perf_counter() - begun)
        if isinstance(verified, WrongResult):
            return verified, effort
        predicted_us, interval_us = _by_code(task, binary) or (task.predicted_us, task.interval_us)
        low_us, high_us = interval_us or (None, None)
        outcome = Predicted(predicted_us=predicted_us, verification=verified, low_us=low_us, high_us=high_us)
        return outcome, effort

    def _verify(self, task: Task) -> Verification | WrongResult:
        variant = task.variant
        try:
            if isinstance(variant, CudaVariant):
                return self._emulate(variant, task)
            if isinstance(variant, NumbaCudaVariant | TritonVariant):
                return self._simulate(variant, task)
        except NotEmulated as error:
            return Verification(how="not verified", detail=str(error))
        except EmulationFailed as error:
            lacking = not isinstance(variant, CudaVariant) and any(name in error.reason for name in _LACKING)
            if error.timed_out or lacking:
                return Verification(how="not verified", detail=error.reason)
            return WrongResult(reason=error.reason)
        raise InputError(f"{variant.key} is written in {variant.language}, which does not run on a GPU")

    def _emulate(self, variant: CudaVariant[Any], task: Task) -> Verification | WrongResult:
        small = variant.emulation_workload(task.workload, task.config)
        inputs = self.input_set(small, task.seed)
        first = self.first_inputs(inputs)
        worst = Errors()
        for order, tensors in zip(ORDERS, (first, inputs, first), strict=True):
            check = self.check(tensors)
            outputs: Mapping[str, Array] = emulate(
                variant,
                small,
                task.config,
                tensors.inputs,
                order=order,
                seed=task.seed,
                timeout_s=EMULATION_TIMEOUT_S,
            )
            errors = check.errors(outputs)
            worst = worst.joined(first_errors(errors, tensors, inputs))
            if not errors.share <= 1:
                detail = check.describe(outputs, errors.share)
                reason = f"emulated on {small}, threads in {order} order: {detail}"
                return WrongResult(reason=reason)
        detail = f"{coverage(check, first, inputs)} of {small}, threads in {', '.join(ORDERS)} order"
        return Verification(how="emulated", detail=detail, **worst.fields())

    def _simulate(
        self, variant: NumbaCudaVariant[Any] | TritonVariant[Any], task: Task
    ) -> Verification | WrongResult:
        small = variant.emulation_workload(task.workload, task.config)
        inputs = self.input_set(small, task.seed)
        first = self.first_inputs(inputs)
        check = self.check(first)
        if isinstance(variant, TritonVariant):
            outputs = interpret(variant, small, task.config, first.inputs, timeout_s=SIMULATION_TIMEOUT_S)
        else:
            outputs = simulate(variant, small, task.config, first.inputs, timeout_s=SIMULATION_TIMEOUT_S)
        errors = check.errors(outputs)
        if not errors.share <= 1:
            return WrongResult(reason=f"simulated on {small}: {check.describe(outputs, errors.share)}")
        return Verification(
            how="simulated",
            detail=f"{coverage(check, first, inputs)} of {small}",
            **first_errors(errors, first, inputs).fields(),
        )

    def conditions(self) -> Mapping[str, Any]:
        """Return the versions of the compilers and simulators in use."""
        return versions("nvidia-cuda-nvrtc", "numba", "numba-cuda", "triton", "numpy")


def _by_code(task: Task, binary: Binary) -> tuple[float, tuple[float, float]] | None:
    """Return time and interval predicted from the machine code; None if the variant declares the execution.

    What blocks in Triton do is decided by its compiler, and only the binary says it.
    """
    variant, config = task.variant, task.config
    if not variant.is_predicted_by_code:
        return None
    assert isinstance(variant, TritonVariant), variant
    table = Table(variant.space, np.array([variant.space.ordinals(config)], dtype=np.int16))
    costs = variant.costs(task.workload, table, task.device)
    if costs.execution is not None:
        return None
    forecast = forecast_code(
        binary,
        costs,
        task.workload.traffic(),
        task.device,
        trips=variant.trips(task.workload, config),
        stages=variant.options(config)["num_stages"],
    )
    return forecast.us, forecast.interval_us
