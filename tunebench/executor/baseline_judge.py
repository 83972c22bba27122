"""The judge of baselines: it times the programs of libraries under the conditions of finalists.

It trusts libraries: it verifies nothing, and their samples are the result.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.executor._judged_process import Ended, JudgedProcess, Late
from tunebench.executor._prepared_launches import LaunchMemory, PreparedLaunches, samples_of
from tunebench.executor.judge import JudgedCase, JudgeSetup
from tunebench.measure.baseline import Baseline, BaselineFailed, fastest_first
from tunebench.measure.fresh_inputs import FreshInputs
from tunebench.measure.judged import take_channel
from tunebench.measure.machine import keep_freed_memory
from tunebench.measure.timing import Protocol
from tunebench.outcome import TimedOut
from tunebench.workload import Workload

__all__ = ["LIMIT_S", "BaselineCase", "case_of", "start", "time_baselines"]

LIMIT_S = 180.0
"""Time limit of all runs of a round, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineCase:
    """The baselines of a workload.

    Attributes:
        judged: The workload, and the process that runs its baselines.
        setup: Device and protocol.
    """

    judged: JudgedCase
    setup: JudgeSetup


def case_of(workload: Workload, device: Device, protocol: Protocol, guard: int) -> BaselineCase:
    """Return the case of a call of `tunebench.measure.baseline.serve_baselines`.

    Args:
        workload: Its workload.
        device: Its device.
        protocol: Its protocol.
        guard: Process id of its process's guard.
    """
    return BaselineCase(
        judged=JudgedCase.of(workload, "baselines", guard),
        setup=JudgeSetup(device=device, protocol=protocol, limit_s=LIMIT_S),
    )


_rng: Any = None
_memory: LaunchMemory | None = None


def start() -> None:
    """Prepare this process: draw the secret from which all inputs follow."""
    global _rng
    keep_freed_memory()
    _rng = np.random.default_rng(secrets.randbits(128))


def time_baselines(case: BaselineCase) -> list[Baseline | BaselineFailed] | TimedOut | None:
    """Time every baseline that a process has loaded, one after the other.

    Returns:
        Timed baselines, fastest first, then those that failed; `TimedOut` after the time limit, and None if
        the process ended.
    """
    global _memory
    channel = take_channel()
    if channel is None:
        raise RuntimeError("time_baselines needs a connection to the process that runs them")
    with contextlib.closing(Connection(channel)) as connection:
        workload = case.judged.load()
        if _memory is None or _memory.fresh.workload != workload:
            _memory = None  # releases it first
            _memory = LaunchMemory(FreshInputs(workload, _rng), case.setup.device, case.setup.protocol)
        process = JudgedProcess(connection, case.judged.guard, case.setup.limit_s)
        launches = PreparedLaunches(_memory, process, _rng)
        try:
            return _timings(launches, process, case.setup.protocol)
        except Ended:
            return None
        except Late as late:
            process.kill()
            return late.outcome
        finally:
            process.resume()


def _timings(
    launches: PreparedLaunches, process: JudgedProcess, protocol: Protocol
) -> list[Baseline | BaselineFailed]:
    launches.open()
    programs, failed = _programs(process)
    for program in programs:  # loads what libraries leave until the first run, and shows what they reject
        process.ask({"do": "choose", "program": program})
        launches.run(launches.prepare(launches.batch), "launch")
    programs, failed = _programs(process)
    timed = [Baseline.of(program, _samples(program, launches, process, protocol)) for program in programs]
    return fastest_first(
        [*timed, *(BaselineFailed(name=name, reason=reason) for name, reason in failed.items())]
    )


def _programs(process: JudgedProcess) -> tuple[list[str], dict[str, str]]:
    """Return the names of the programs that run, and why others do not."""
    reply, _ = process.ask({"do": "finish"})
    return reply["conditions"]["programs"], reply["conditions"]["failed"]


def _samples(
    program: str, launches: PreparedLaunches, process: JudgedProcess, protocol: Protocol
) -> list[float]:
    """Return the times of runs of a program, in microseconds."""
    process.ask({"do": "choose", "program": program})
    samples_us: list[float] = []

    def take_batch() -> None:
        slots = launches.prepare(launches.batch)
        samples_us.extend(samples_of(launches.run(slots, "time")[0], len(slots)))

    launches.sample(protocol, samples_us, take_batch)
    return samples_us
