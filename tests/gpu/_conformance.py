"""Does every instruction do on the GPU what its emulated twin does? A tiny kernel a wrapper, random operands.

The kernels of this package are proved by emulation, and emulation rests on our reading of the PTX ISA. Here
each wrapper around inline assembly runs on the GPU and, from the same file, on the host; every element of
every lane must agree. What differs is told by wrapper, lane and register, so that a wrong lane map needs no
search.

`_wrapper` finds the wrappers by reading the .cuh files; `_cases` (of Hopper: `_cases_hopper`) says what is to
be done with each. A wrapper without a case is a problem, here and in a test.

    python -m tests.gpu._conformance      # lists the cases, and what they cover
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.gpu._case import SEED, Case, CaseVariant, Words, differences, draw
from tests.gpu._cases import CASES as OF_ALL
from tests.gpu._cases_hopper import CASES as OF_HOPPER
from tests.gpu._items import Session, child
from tests.gpu._wrapper import files, wrappers
from tunebench.device import Device
from tunebench.emulate.emulator import emulate, find_compiler
from tunebench.errors import DeviceError, TunebenchError
from tunebench.space import Config

__all__ = ["Run", "answers", "by_name", "conform", "conformance", "on_device", "on_host", "uncovered"]

STARTING_S, SECONDS_EACH = 30.0, 5.0
"""Time that a process gets to start, and on top of it for each case: compiled twice, run twice."""
NOT_STARTED = "before any case"

CASES: tuple[Case, ...] = tuple(case for case in (*OF_ALL, *OF_HOPPER) if files().issuperset(case.files))
"""Those whose helpers are in this checkout."""


def uncovered() -> list[str]:
    """Return the wrappers that no case calls, and what cases call that is no wrapper."""
    there, called = set(wrappers()), {name for case in CASES for name in case.wrappers}
    missing = [f"{name} has no case" for name in sorted(there - called)]
    return [*missing, *(f"{name} is called by a case and is no wrapper" for name in sorted(called - there))]


# -- one case ------------------------------------------------------------------------------------------------

Run = Callable[[CaseVariant, Words, Config, Mapping[str, Any]], Mapping[str, Any]]
"""Runs a case: on the GPU, or, in tests, on an emulator."""


def on_host(
    variant: CaseVariant, workload: Words, config: Config, inputs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Run a case by emulation."""
    return emulate(variant, workload, config, inputs)


def on_device(device: Device) -> Run:
    """Return what runs cases on a GPU of this machine."""
    from tunebench.compile.nvrtc import compile_cuda
    from tunebench.measure._device_memory import DeviceMemory
    from tunebench.measure._gpu import open_gpu
    from tunebench.measure.cuda import kernel_arguments
    from tunebench.measure.verify import InputSet

    gpu = open_gpu(device)
    memory = DeviceMemory(gpu)

    def run(
        variant: CaseVariant, workload: Words, config: Config, inputs: Mapping[str, Any]
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


def conform(case: Case, run: Run) -> str | None:
    """Run a case, hold it against its emulation, and return what differs, or None."""
    variant = CaseVariant(case)
    workload, config, inputs = variant.workload, Config({"unused": 0}), draw(case)
    right = on_host(variant, workload, config, inputs)["given"]
    return differences(case, run(variant, workload, config, inputs)["given"], right)


def by_name() -> dict[str, Case]:
    """Return the cases by name."""
    return {case.name: case for case in CASES}


# -- the step of an acceptance run ---------------------------------------------------------------------------


def answers(names: Sequence[str], run: Run) -> Iterator[dict[str, Any]]:
    """Run cases by name; yield which one is running, and what was found of those before it."""
    found: dict[str, str | None] = {}
    for name in names:
        yield {"running": name, "found": found}
        try:
            found[name] = conform(by_name()[name], run)
        except TunebenchError as error:
            found[name] = f"{type(error).__name__}: {error}"
            if isinstance(error, DeviceError):  # the device may be lost to this process: another goes on
                yield {"found": found}
                return
    yield {"found": found}


def conformance(session: Session) -> None:
    """Run every case in processes of their own: one that hangs or crashes is named, and the others go on."""
    report = session.report
    if find_compiler() is None:
        report.say("conformance: no C++ compiler, which the emulated twins need")
        report.put("conformance", complete=True, skipped="no C++ compiler for the emulated twins")
        return
    pending = [case.name for case in CASES if case.runs_on(session.device)]
    others = [case.name for case in CASES if case.name not in pending]
    found: dict[str, str | None] = {}
    problems = uncovered()
    while pending and session.left_s > 1:
        limit_s = min(session.left_s, STARTING_S + SECONDS_EACH * len(pending))
        now = _found(child(["conformance", *pending], timeout_s=limit_s))
        found |= now
        problems += [f"{name}: {text}" for name, text in now.items() if text is not None]
        pending = [name for name in pending if name not in now]
        report.put("conformance", cases=found, problems=problems, undone=pending, not_here=others)
        if NOT_STARTED in now:
            break
    for problem in problems:
        report.say(f"conformance: WRONG: {problem}"[:400])
    passed = sum(text is None for text in found.values())
    report.say(f"conformance: {passed} cases do as their emulation does; not done: {len(pending)}")
    report.put("conformance", cases=found, problems=problems, undone=pending, complete=not pending)


def _found(answer: Mapping[str, Any]) -> dict[str, str | None]:
    """Return what a process found of each case; the one it ended in did not pass."""
    found = dict(answer.get("found", {}))
    if "problem" in answer:
        found[answer.get("running", NOT_STARTED)] = str(answer["problem"])
    return found


def main() -> None:
    """List the cases, and what they cover."""
    files = wrappers()
    for case in CASES:
        print(f"{case.name}: {', '.join(f'{name} ({files.get(name)})' for name in case.wrappers)}")
    for problem in uncovered():
        print(f"WRONG: {problem}")


if __name__ == "__main__":
    main()
