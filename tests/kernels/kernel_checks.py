"""Checks for tests of single kernels: valid defaults, right results, planted faults, machine code."""

from __future__ import annotations

import collections
import functools
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import pytest

from tunebench import workloads
from tunebench.binary import cubin
from tunebench.binary.ptxas_note import objections, ptxas_notes
from tunebench.device import Device, described, representative
from tunebench.emulate.emulator import ORDERS, EmulationFailed, emulate
from tunebench.measure.cpu import kernel_argument
from tunebench.measure.verify import GuardedArray, InputSet, draw, draw_stress, poisoned, worst_error
from tunebench.space import Config
from tunebench.variant import CudaVariant, NumbaCpuVariant
from tunebench.workload import Reference, Workload

K = TypeVar("K", bound=Workload)

A100, H100 = representative("sm_80"), representative("sm_90")
GPUS = [device for device in described().values() if device.architecture.startswith("sm_")]
GENERATIONS = [representative(architecture) for architecture in ("sm_75", "sm_80", "sm_90", "sm_120")]

HGMMA, IGMMA, QGMMA, UTMALDG, UTMASTG, USETMAXREG = 0x1F0, 0x1F1, 0x1F3, 0x1B4, 0x1B5, 0x1C8
"""Lower 9 bits of an instruction of 128, as nvdisasm decodes them for sm_90a."""


def on_devices(cases: Iterable[Any]) -> list[Any]:
    """Return cases of a variant and a workload, each with A100 or H100 in turn; H100 if A100 is refused."""
    parameters = []
    for index, case in enumerate(cases):
        variant, workload = case.values
        device = H100 if index % 2 or variant.refuses(workload, A100) else A100
        parameters.append(pytest.param(variant, workload, device, id=f"{case.id}-{device.architecture}"))
    return parameters


# -- workloads and inputs ---------------------------------------------------------------------------------


def parser(kind: type[K]) -> Callable[[str], K]:
    """Return the function that parses the dimensions of a workload of this operator."""

    def parse(text: str) -> K:
        workload = workloads.parse(f"{kind.operator}:{text}")
        assert isinstance(workload, kind)
        return workload

    return parse


def exact(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs in float64, from which references are computed."""
    return {name: np.asarray(value, np.float64) for name, value in inputs.items()}


def drawn(workload: Workload, seed: int = 0) -> tuple[dict[str, Any], Mapping[str, Reference]]:
    """Return random inputs and their references."""
    input_set = draw(workload, seed)
    return dict(input_set.inputs), input_set.references


def with_extremes(workload: Workload, seed: int = 0) -> dict[str, Any]:
    """Return random inputs of which about half are extreme, if the operator states any."""
    return dict((draw_stress(draw(workload, seed)) or draw(workload, seed)).inputs)


# -- results ----------------------------------------------------------------------------------------------


def worst(workload: Workload, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> float:
    """Return the largest error of any output as a share of its tolerance; NaN counts as infinite."""
    references = InputSet(workload=workload, seed=0, inputs=inputs).references
    return worst_error(workload, outputs, references)


def assert_right(
    workload: Workload, inputs: Mapping[str, Any], outputs: Mapping[str, Any], what: str = ""
) -> None:
    """Check every element of every output against the operator's tolerance; NaN is always wrong."""
    error = worst(workload, inputs, outputs)
    assert error <= 1, f"{what or workload}: {error:.3g} times the tolerance"


def assert_emulates_right(
    variant: CudaVariant[Any],
    workload: Workload,
    config: Config,
    inputs: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Emulate a configuration with these options of `emulate`, check the results, and return them."""
    inputs = workload.draw(np.random.default_rng(1)) if inputs is None else inputs
    outputs = emulate(variant, workload, config, inputs, **options)
    assert_right(workload, inputs, outputs, f"{variant.key} {workload} {config} {options}")
    return outputs


def assert_right_in_every_order(
    variant: CudaVariant[Any],
    workload: Workload,
    config: Config,
    inputs: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Emulate a configuration with threads in each order, and check the results.

    Without `inputs` the first order reads extreme ones, and the others normal ones.
    """
    sets = [with_extremes(workload, 1) if inputs is None else inputs]
    sets += [workload.draw(np.random.default_rng(1))] if inputs is None else []
    references = [InputSet(workload=workload, seed=0, inputs=tensors).references for tensors in sets]
    for index, order in enumerate(ORDERS):
        tensors, right = sets[min(index, len(sets) - 1)], references[min(index, len(sets) - 1)]
        outputs = emulate(variant, workload, config, tensors, order=order, seed=1, **options)
        error = worst_error(workload, outputs, right)
        case = f"{variant.key} {workload} {config} {order} {options}"
        assert error <= 1, f"{case}: {error:.3g} times the tolerance"


@functools.lru_cache(maxsize=4)
def _serial(variant: NumbaCpuVariant[Any], workload: Workload, config: Config) -> Callable[..., None]:
    import numba

    kernel: Callable[..., None] = numba.njit(fastmath=set(variant.fastmath))(variant.kernel(workload, config))
    return kernel


def run_on_cpu(
    variant: NumbaCpuVariant[Any], workload: Workload, config: Config, inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the outputs of a configuration, compiled without its parallel loop."""
    outputs = poisoned(workload)
    scratch = {tensor.name: GuardedArray(tensor).array for tensor in variant.scratch(workload, config)}
    arrays = {**inputs, **outputs, **scratch}
    arguments = [kernel_argument(argument, arrays) for argument in variant.arguments(workload, config)]
    _serial(variant, workload, config)(*arguments)
    return outputs


def assert_order_does_not_matter(
    variant: CudaVariant[Any], workload: Workload, config: Config, **options: Any
) -> None:
    """Check that results are right, and the same bits with threads in each order."""
    first, *reordered = (
        assert_emulates_right(variant, workload, config, order=order, **options) for order in ORDERS
    )
    for outputs in reordered:
        assert {name: output.tobytes() for name, output in outputs.items()} == {
            name: output.tobytes() for name, output in first.items()
        }


# -- planted faults ---------------------------------------------------------------------------------------


def planted(variant: Any, old: str, new: str) -> Any:
    """Return the variant with `new` in place of `old` in its source, a fault on purpose.

    If `old` does not occur exactly once, `source` raises LookupError, which no test takes for a wrong result.
    """

    class Changed(type(variant)):  # type: ignore[misc]
        def source(self, workload: Any, config: Config) -> str:
            text = super().source(workload, config)
            if text.count(old) != 1:
                raise LookupError(f"{text.count(old)} places to plant a fault, not one: {old!r}")
            return str(text.replace(old, new))

    return Changed()


def sampled_faults(faults: Iterable[Any]) -> list[Any]:
    """Return parameters for planted faults: every third one, and the others marked `exhaustive`.

    They show that a test finds faults, which changes with the test, the emulator or the text of a kernel;
    `assert_faults_have_a_place` checks the text for all of them.
    """
    sweep = [pytest.mark.exhaustive]
    return [pytest.param(fault, marks=sweep if index % 3 else []) for index, fault in enumerate(faults)]


def assert_faults_have_a_place(faults: Iterable[tuple[Any, Workload, Config]]) -> None:
    """Check that each variant with a planted fault has a source for its workload and configuration."""
    for wrong, workload, config in faults:
        wrong.source(workload, config)


def assert_fault_is_found(
    wrong: Any,
    workload: Workload,
    config: Config,
    inputs: Mapping[str, Any] | None = None,
    *,
    sanitize: bool = False,
) -> None:
    """Check that a planted fault makes emulation fail in some order of threads, or a result wrong."""
    inputs = workload.draw(np.random.default_rng(2)) if inputs is None else inputs
    references = InputSet(workload=workload, seed=0, inputs=inputs).references
    for order in ORDERS:
        try:
            outputs = emulate(wrong, workload, config, inputs, order=order, sanitize=sanitize, timeout_s=20)
        except EmulationFailed as error:
            if not error.timed_out:
                return
        else:
            if worst_error(workload, outputs, references) > 1:
                return
    raise AssertionError("no order of threads shows the planted fault")


# -- configurations ---------------------------------------------------------------------------------------


def pick(variant: Any, workload: Workload, choices: Mapping[str, Any], device: Device) -> Config:
    """Return a valid configuration with the given choices, the same one in every run."""
    table = variant.configs(workload, device)
    names = [name for name in choices if name in variant.space.names]
    rows = np.flatnonzero(np.all([table[name] == choices[name] for name in names], axis=0))
    assert len(rows), f"no configuration has {choices}"
    return table.config(rows[len(rows) // 2])  # type: ignore[no-any-return]


def assert_default_is_valid(variants: Iterable[Any], workload: Workload, device: Device) -> None:
    """Check the defaults of all variants that support a workload on a device."""
    for variant in variants:
        if variant.refuses(workload, device) is None:
            config = variant.default(workload, device)
            assert variant.space.check(config, workload=workload, device=device) == config


def costs_of(variant: Any, workload: Workload, config: Config, device: Device) -> Any:
    """Return the costs of one configuration, which must be valid."""
    table = variant.configs(workload, device)
    row = table.row(config)
    assert row is not None, f"{config} is not a valid configuration"
    return variant.costs(workload, table.take(np.array([row])), device)


def assert_work_is_not_overstated(workload: Workload, costs: Any) -> None:
    """Check that the work of all blocks does not exceed the total work, for any configuration."""
    assert np.all(costs.full_blocks <= costs.blocks * (1 + 1e-9))
    assert np.all(costs.fma * costs.blocks <= workload.flops() * (1 + 1e-9))


# -- machine code -----------------------------------------------------------------------------------------


def compiled(variant: Any, workload: Workload, device: Device, config: Config | None = None) -> Any:
    """Return the binary of a configuration, or of the default, which must not spill registers."""
    from tunebench.compile.nvrtc import compile_cuda

    config = config or variant.default(workload, device)
    binary = compile_cuda(variant, workload, config, device)
    assert binary.resources.spill_bytes == 0, config
    return binary


def assert_default_compiles_without_spills(variant: Any, workload: Workload, device: Device) -> Any:
    """Return the binary of the default, which must use the declared registers or more, and not spill."""
    binary = compiled(variant, workload, device)
    costs = costs_of(variant, workload, variant.default(workload, device), device)
    assert np.all(costs.registers <= binary.resources.registers)
    return binary


def compiled_for_hopper(variant: Any, workload: Workload, config: Config) -> Any:
    """Return the cubin and symbols of a variant for sm_90a, compiled without spills and costly notes."""
    from tunebench.compile.nvrtc import compile_source

    entries = tuple(launch.entry for launch in variant.launches(workload, config))
    made = compile_source(variant.source(workload, config), entries, variant.target(H100))
    assert cubin.spills(made.log) == dict.fromkeys(made.symbols, 0)
    assert not objections(ptxas_notes(made.log))
    return made


def opcodes(payload: bytes, bits: int) -> collections.Counter[int]:
    """Return the number of instructions of a cubin by their `bits` lower bits; each has 128 bits."""
    counts: collections.Counter[int] = collections.Counter()
    for section in cubin.elf_sections(payload):
        if section.name.startswith(".text."):
            counts.update(word % 2**bits for word, _ in struct.iter_unpack("<QQ", section.data))
    return counts
