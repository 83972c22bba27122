"""Conformance of PTX wrappers: the same small kernels on the GPU and by emulation must agree.

Kernels are verified by emulation, and emulation relies on our reading of the PTX ISA. Each wrapper of inline
PTX runs on the GPU and, from the same source file, on the host; every register of every lane must agree.
Differences are reported by wrapper, lane and register.

`ptx_wrappers` finds the wrappers in the .cuh files; `wrapper_cases` and `wrapper_cases_hopper` hold their
cases. A wrapper without a case is a problem, here and in a test. `write_expected` emulates the cases on any
machine with a C++ compiler, so that no time on the GPU is spent on it.

    python -m tests.gpu.wrapper_conformance      # prints the cases and the wrappers they cover
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.acceptance_run import AcceptanceRun
from tests.gpu.child import ChildLimits
from tests.gpu.ptx_wrappers import files, wrappers
from tests.gpu.wrapper_case import SEED, WrapperCase, WrapperVariant, WrapperWorkload, differences, draw
from tests.gpu.wrapper_cases import CASES as GENERAL_CASES
from tests.gpu.wrapper_cases_hopper import CASES as HOPPER_CASES
from tunebench import kernels
from tunebench._environment import binary_folder
from tunebench.compile import BinaryCache, compile_config
from tunebench.device import Device
from tunebench.emulate.emulator import emulate, find_compiler
from tunebench.errors import DeviceError, TunebenchError
from tunebench.kernels import include
from tunebench.space import Config
from tunebench.workloads import parse

__all__ = [
    "EXPECTED",
    "RunCase",
    "answers",
    "by_name",
    "called_wrappers",
    "conform",
    "conformance",
    "on_device",
    "on_host",
    "uncovered",
    "write_expected",
]

START_S, CASE_S = 30.0, 10.0
"""Time limits of the start of a process and of a case (compiled, run and compared), in seconds."""
NOT_STARTED = "before any case"
MOST_STARTS = 2
"""Processes that may end in a row before their first case."""
EMULATION_SHARE = 0.4
"""Largest share of the step for outputs that `--prepare` did not compute, or that changed since."""
EXPECTED = "conformance_expected.npz"

CASES: tuple[WrapperCase, ...] = tuple(
    case for case in (*HOPPER_CASES, *GENERAL_CASES) if files().issuperset(case.files)
)
"""Cases whose helper files exist in this checkout; those of Hopper, the least proven ones, first."""


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
    from tunebench.measure._device_memory import DeviceMemory
    from tunebench.measure._gpu import open_gpu
    from tunebench.measure.cuda import kernel_arguments
    from tunebench.measure.verify import InputSet

    gpu = open_gpu(device)
    memory = DeviceMemory(gpu)

    def run(
        variant: WrapperVariant, workload: WrapperWorkload, config: Config, inputs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        binary = compile_config(variant, workload, config, device, BinaryCache(binary_folder()))
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


def conform(case: WrapperCase, run: RunCase, right: Any = None) -> str | None:
    """Run a case, compare it with its emulation, and return the differences, or None.

    Args:
        case: The case.
        run: Function that runs it.
        right: The expected outputs; emulated if None.
    """
    variant = WrapperVariant(case)
    workload, config, inputs = variant.workload, Config({"unused": 0}), draw(case)
    if right is None:
        right = on_host(variant, workload, config, inputs)["outputs"]
    return differences(case, run(variant, workload, config, inputs)["outputs"], right)


def by_name() -> dict[str, WrapperCase]:
    """Return the cases by name."""
    return {case.name: case for case in CASES}


# -- expected outputs ----------------------------------------------------------------------------------------


def _key(case: WrapperCase) -> str:
    """Return the key of a case's expected outputs, which changes with the kernel source and the emulator."""
    variant = WrapperVariant(case)
    source = variant.source(variant.workload, Config({"unused": 0}))
    return hashlib.sha256(f"{source}{_emulator()}".encode()).hexdigest()


@functools.cache
def _emulator() -> str:
    shim = resources.files("tunebench.emulate") / "shim"
    texts = [file.read_text(encoding="utf-8") for file in sorted(shim.iterdir(), key=lambda f: f.name)]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def write_expected(
    path: Path, cases: Sequence[WrapperCase] = CASES, *, in_time: Callable[[], bool] = lambda: True
) -> list[str]:
    """Emulate the cases whose outputs are not in a file yet, and write them to it.

    Args:
        path: The file; outputs of cases that changed are dropped.
        cases: The cases.
        in_time: Returns whether there is time to emulate another case.

    Returns:
        The names of the cases without outputs: there is no C++ compiler, or no time.
    """
    earlier = _read_expected(path)
    outputs = {key: earlier[key] for key in map(_key, cases) if key in earlier}
    missing = [case for case in cases if _key(case) not in outputs]
    for case in missing:
        if find_compiler() is None or not in_time():
            break
        variant = WrapperVariant(case)
        inputs = draw(case)
        outputs[_key(case)] = on_host(variant, variant.workload, Config({"unused": 0}), inputs)["outputs"]
    if outputs.keys() != earlier.keys():
        half = path.with_suffix(".tmp")
        with half.open("wb") as file:
            np.savez_compressed(file, **outputs)
        half.replace(path)
    return [case.name for case in missing if _key(case) not in outputs]


def _read_expected(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with np.load(path) as file:
        return dict(file)


# -- the step of an acceptance run ---------------------------------------------------------------------------


def answers(expected: Path, names: Sequence[str], run: RunCase) -> Iterator[dict[str, Any]]:
    """Run cases by name; yield each before it runs, and its differences, which are None if it conforms."""
    right = _read_expected(expected)
    for name in names:
        yield {"running": name}
        case = by_name()[name]
        try:
            yield {"case": name, "found": conform(case, run, right[_key(case)])}
        except DeviceError:  # the context may be lost: a new process continues
            raise
        except TunebenchError as error:
            yield {"case": name, "found": f"{type(error).__name__}: {error}"}


def conformance(session: AcceptanceRun) -> None:
    """Run every case that has not passed in an earlier run, those of wrappers in failed variants first.

    The cases share a process until one of them ends it; from then on each case has its own process, because
    the fault may outlive it.
    """
    report = session.report
    failed = _suspects(session)
    cases = sorted(
        (case for case in CASES if case.runs_on(session.device)),
        key=lambda case: failed.isdisjoint(case.wrappers),
    )
    elsewhere = [case.name for case in CASES if not case.runs_on(session.device)]
    earlier = report.before.get("conformance", {}).get("cases", {})
    problems_by_case: dict[str, str | None] = {
        case.name: None for case in cases if earlier.get(case.name, "") is None
    }
    end_s = session.left_s * (1 - EMULATION_SHARE)
    unknown = write_expected(session.folder / EXPECTED, cases, in_time=lambda: session.left_s > end_s)
    pending = [case.name for case in cases if case.name not in problems_by_case and case.name not in unknown]
    problems = uncovered() + [f"{name}: no expected outputs, and no C++ compiler or time" for name in unknown]
    alone, starts = False, 0
    while pending and session.left_s > 1 and starts < MOST_STARTS:
        asked = pending[:1] if alone else pending
        now = _in_a_process(session, asked)
        starts = starts + 1 if NOT_STARTED in now else 0
        alone = alone or len(now) < len(asked)
        problems_by_case |= now
        problems += [f"{name}: {text}" for name, text in now.items() if text is not None]
        pending = [name for name in pending if name not in now]
        report.put(
            "conformance", cases=problems_by_case, problems=problems, undone=pending, not_here=elsewhere
        )
    for problem in problems:
        report.say(f"conformance: WRONG: {problem}"[:400])
    passed = sum(text is None for text in problems_by_case.values())
    session.measured += passed
    report.say(f"conformance: {passed} cases agree with emulation; not run: {len(pending)}")
    facts = {"cases": problems_by_case, "problems": problems, "undone": pending, "not_here": elsewhere}
    report.put("conformance", **facts, complete=not pending and not unknown)


def _suspects(session: AcceptanceRun) -> set[str]:
    """Return the wrappers in the sources of the variants that failed in `wgmma` or `headline`."""
    names = set[str]()
    for step in ("wgmma", "headline"):
        entry = session.report.steps.get(step, {})
        texts = {row["variant"]: row["workload"] for row in entry.get("rows", [])}
        for key in entry.get("failed", []):
            variant: Any = kernels.variant(key)
            workload = parse(texts[key]) if key in texts else None
            if workload is not None and hasattr(variant, "source"):
                source = variant.source(workload, variant.default(workload, session.device))
                names |= called_wrappers(source)
    return names


def called_wrappers(source: str) -> set[str]:
    """Return the wrappers that a kernel source calls outside the files that define wrappers."""
    defined = wrappers()
    for file in set(defined.values()):
        source = source.replace(include(file).strip(), "")
    # The name of an overload is followed by the type of its parameter.
    return {
        name for name in defined if re.search(rf"(?<!\w){re.escape(name.partition('(')[0])}\s*\(", source)
    }


def _in_a_process(session: AcceptanceRun, names: Sequence[str]) -> dict[str, str | None]:
    """Run cases in one process and return the differences of those that ran; the one that ended it failed."""
    problems_by_case: dict[str, str | None] = {}
    running = NOT_STARTED
    limits = ChildLimits(total_s=session.left_s, answer_s=CASE_S, start_s=START_S)
    arguments = ["conformance", str(session.folder / EXPECTED), *names]
    for answer in session.child(arguments, limits):
        if "case" in answer:
            problems_by_case[answer["case"]] = answer["found"]
        elif "running" in answer:
            running = answer["running"]
        elif running not in problems_by_case and session.left_s > 0:
            problems_by_case[running] = str(answer["problem"])
    return problems_by_case


def main() -> None:
    """Print the cases and the wrappers they cover."""
    file = wrappers()
    for case in CASES:
        print(f"{case.name}: {', '.join(f'{name} ({file.get(name)})' for name in case.wrappers)}")
    for problem in uncovered():
        print(f"WRONG: {problem}")


if __name__ == "__main__":
    main()
