"""Conformance of PTX wrappers: the same small kernels on the GPU and by emulation must agree.

Kernels are verified by emulation, and emulation relies on our reading of the PTX ISA. Each wrapper of inline
PTX runs on the GPU and, from the same source file, on the host; every register of every lane must agree.
Differences are reported by wrapper, lane and register.

`ptx_wrappers` finds the wrappers in the .cuh files; `wrapper_cases` and `wrapper_cases_hopper` hold their
cases. A wrapper without a case is a problem, here and in a test.

    python -m tests.gpu.wrapper_conformance      # prints the cases and the wrappers they cover
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.gpu.acceptance_run import AcceptanceRun, run_gpu_process
from tests.gpu.ptx_wrappers import files, wrappers
from tests.gpu.wrapper_case import SEED, WrapperCase, WrapperVariant, WrapperWorkload, differences, draw
from tests.gpu.wrapper_cases import CASES as GENERAL_CASES
from tests.gpu.wrapper_cases_hopper import CASES as HOPPER_CASES
from tunebench.device import Device
from tunebench.emulate.emulator import emulate, find_compiler
from tunebench.errors import DeviceError, TunebenchError
from tunebench.space import Config

__all__ = ["RunCase", "answers", "by_name", "conform", "conformance", "on_device", "on_host", "uncovered"]

STARTING_S, SECONDS_EACH = 30.0, 5.0
"""Time limit of a process: for its start, plus for each case (compiled twice, run twice)."""
NOT_STARTED = "before any case"

CASES: tuple[WrapperCase, ...] = tuple(
    case for case in (*GENERAL_CASES, *HOPPER_CASES) if files().issuperset(case.files)
)
"""Cases whose helper files exist in this checkout."""


def uncovered() -> list[str]:
    """Return a message for each wrapper without a case, and for each case of an unknown wrapper."""
    wrapped, called = set(wrappers()), {name for case in CASES for name in case.wrappers}
    missing = [f"{name} has no case" for name in sorted(wrapped - called)]
    return [*missing, *(f"{name} has a case but is no wrapper" for name in sorted(called - wrapped))]


# -- one case ------------------------------------------------------------------------------------------------

RunCase = Callable[[WrapperVariant, WrapperWorkload, Config, Mapping[str, Any]], Mapping[str, Any]]
"""Function that runs a case, on the GPU or (in tests) by emulation, and returns its outputs."""


def on_host(
    variant: WrapperVariant, workload: WrapperWorkload, config: Config, inputs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Run a case by emulation."""
    return emulate(variant, workload, config, inputs)


def on_device(device: Device) -> RunCase:
    """Return the function that runs cases on a GPU of this machine."""
    from tunebench.compile.nvrtc import compile_cuda
    from tunebench.measure._device_memory import DeviceMemory
    from tunebench.measure._gpu import open_gpu
    from tunebench.measure.cuda import kernel_arguments
    from tunebench.measure.verify import InputSet

    gpu = open_gpu(device)
    memory = DeviceMemory(gpu)

    def run(
        variant: WrapperVariant, workload: WrapperWorkload, config: Config, inputs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        binary = compile_cuda(variant, workload, config, device)
        read, written = workload.inputs(), workload.outputs()
        addresses = memory.hold(read, written)
        memory.upload(InputSet(workload=workload, seed=SEED, inputs=inputs))
        memory.poison(written)
        tensors = {tensor.name: tensor for tensor in (*read, *written)}
        (kernel,) = gpu.load(binary.payload, binary.entries)
        (launch,) = variant.launches(workload, config)
        arguments = kernel_arguments(variant, launch.arguments, tensors, addresses, inputs)
        gpu.launch([gpu.prepare(kernel, launch, arguments)])
        gpu.synchronize()
        return {tensor.name: memory.download(tensor) for tensor in written}

    return run


def conform(case: WrapperCase, run: RunCase) -> str | None:
    """Run a case, compare it with its emulation, and return the differences, or None."""
    variant = WrapperVariant(case)
    workload, config, inputs = variant.workload, Config({"unused": 0}), draw(case)
    right = on_host(variant, workload, config, inputs)["outputs"]
    return differences(case, run(variant, workload, config, inputs)["outputs"], right)


def by_name() -> dict[str, WrapperCase]:
    """Return the cases by name."""
    return {case.name: case for case in CASES}


# -- the step of an acceptance run ---------------------------------------------------------------------------


def answers(names: Sequence[str], run: RunCase) -> Iterator[dict[str, Any]]:
    """Run cases by name; yield the case that is running and the results of those before it."""
    found: dict[str, str | None] = {}
    for name in names:
        yield {"running": name, "found": found}
        try:
            found[name] = conform(by_name()[name], run)
        except TunebenchError as error:
            found[name] = f"{type(error).__name__}: {error}"
            if isinstance(error, DeviceError):  # the context may be lost: a new process continues
                yield {"found": found}
                return
    yield {"found": found}


def conformance(session: AcceptanceRun) -> None:
    """Run every case in separate processes, so that a hang or crash is reported and the others still run."""
    report = session.report
    if find_compiler() is None:
        report.say("conformance: skipped: emulation needs a C++ compiler")
        report.put("conformance", complete=True, skipped="no C++ compiler for the emulated twins")
        return
    pending = [case.name for case in CASES if case.runs_on(session.device)]
    others = [case.name for case in CASES if case.name not in pending]
    found: dict[str, str | None] = {}
    problems = uncovered()
    while pending and session.left_s > 1:
        limit_s = min(session.left_s, STARTING_S + SECONDS_EACH * len(pending))
        now = _found(run_gpu_process(["conformance", *pending], timeout_s=limit_s))
        found |= now
        problems += [f"{name}: {text}" for name, text in now.items() if text is not None]
        pending = [name for name in pending if name not in now]
        report.put("conformance", cases=found, problems=problems, undone=pending, not_here=others)
        if NOT_STARTED in now:
            break
    for problem in problems:
        report.say(f"conformance: WRONG: {problem}"[:400])
    passed = sum(text is None for text in found.values())
    report.say(f"conformance: {passed} cases agree with emulation; not run: {len(pending)}")
    report.put("conformance", cases=found, problems=problems, undone=pending, complete=not pending)


def _found(answer: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the result of each case that a process ran; a case that ended the process failed."""
    found = dict(answer.get("found", {}))
    if "problem" in answer:
        found[answer.get("running", NOT_STARTED)] = str(answer["problem"])
    return found


def main() -> None:
    """Print the cases and the wrappers they cover."""

    files = wrappers()
    for case in CASES:
        print(f"{case.name}: {', '.join(f'{name} ({files.get(name)})' for name in case.wrappers)}")
    for problem in uncovered():
        print(f"WRONG: {problem}")


if __name__ == "__main__":
    main()
