"""A child process that uses the GPU, with a time limit for each of its answers.

Anything on a new GPU may hang or crash: only children of the acceptance run open the device. A child prints a
line of JSON before and after each piece of work, so that its parent knows what ran when it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

__all__ = ["ChildLimits", "RunChild", "last_answer", "run_child"]

START_S = 60.0
"""Time limit of the first answer, in seconds: Python starts, imports its packages and opens the device."""
END_S = 5.0
"""Time in which a killed process must end; one that the driver keeps is left behind."""

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildLimits:
    """Time limits of a child process, in seconds.

    Attributes:
        total_s: Limit of the whole process.
        answer_s: Limit between two answers; None for no other limit than `total_s`.
        start_s: Limit of the first answer.
    """

    total_s: float
    answer_s: float | None = None
    start_s: float = START_S

    def next_s(self, answers: int, spent_s: float) -> float:
        """Return the time limit of the next answer.

        Args:
            answers: Number of answers so far.
            spent_s: Time since the start of the process, in seconds.
        """
        left_s = self.total_s - spent_s
        if self.answer_s is None:
            return left_s
        return min(left_s, self.answer_s if answers else max(self.start_s, self.answer_s))


class RunChild(Protocol):
    """Function that runs `tests.gpu.gpu_process` in a child process."""

    def __call__(
        self, arguments: Sequence[str], limits: ChildLimits, before: Sequence[str] = ()
    ) -> Iterator[Answer]:
        """Yield the answers of the process as they come.

        Args:
            arguments: Its command line.
            limits: Time limits; the process group is killed at the first that is exceeded.
            before: Command that runs the process, such as a checker.

        Yields:
            Each line of JSON. If the process fails, the last answer has `problem`, and `timed_out` if it was
            killed for a time limit.
        """


def run_child(arguments: Sequence[str], limits: ChildLimits, before: Sequence[str] = ()) -> Iterator[Answer]:
    """Run `tests.gpu.gpu_process` in a child process (see `RunChild`)."""
    command = [*before, sys.executable, "-m", "tests.gpu.gpu_process", *arguments]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=Path(__file__).resolve().parents[2],
            start_new_session=True,  # so that its children can be killed with it
        )
        try:
            yield from _answers(process, limits, errors)
        finally:
            _kill(process)
            assert process.stdout is not None
            process.stdout.close()


def _answers(process: subprocess.Popen[bytes], limits: ChildLimits, errors: IO[bytes]) -> Iterator[Answer]:
    """Yield the answers of a process, then its failure."""
    with contextlib.closing(_Lines(process)) as lines:
        yield from _read(process, lines, limits, errors)


def _read(
    process: subprocess.Popen[bytes], lines: _Lines, limits: ChildLimits, errors: IO[bytes]
) -> Iterator[Answer]:
    begun, count, noise = time.monotonic(), 0, list[str]()
    while True:
        limit_s = limits.next_s(count, time.monotonic() - begun)
        line = lines.next(limit_s)
        if line is None:
            spent_s = time.monotonic() - begun
            yield {"problem": f"no answer within {limit_s:.3g} s, {spent_s:.3g} s in all", "timed_out": True}
            return
        if not line:
            break
        if answer := _parsed(line):
            count += 1
            yield answer
        else:
            noise.append(line)
    if not lines.process_ended(limits.next_s(count, time.monotonic() - begun)):
        yield {"problem": "the process closed its output and did not end", "timed_out": True}
        return
    status = _kill(process)
    if status != 0:
        errors.seek(0)
        output_lines = [*noise, *errors.read().decode(errors="replace").splitlines()]
        last = [line.strip() for line in output_lines if line.strip()][-12:]
        reason = " | ".join([*last[-1:], *last[:-1]])  # the last line has the error
        yield {"problem": f"exit status {status}: {reason}"[:2000]}
    elif not count:
        yield {"problem": "the process printed no answer"}


class _Lines:
    """Lines of the standard output of a process, each awaited for a limited time."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._descriptor, self._buffer, self._ended = process.stdout.fileno(), b"", False
        self._process = os.pidfd_open(process.pid)

    def process_ended(self, limit_s: float) -> bool:
        """Return whether the process ends within a time limit; its process id stays reserved."""
        return bool(select.select([self._process], [], [], max(0.0, limit_s))[0])

    def close(self) -> None:
        """Close the descriptor of the process."""
        os.close(self._process)

    def next(self, limit_s: float) -> str | None:
        """Return the next line, an empty text at the end of the output, or None after the time limit."""
        end = time.monotonic() + limit_s
        while b"\n" not in self._buffer and not self._ended:
            left_s = end - time.monotonic()
            ready = select.select([self._descriptor, self._process], [], [], left_s)[0] if left_s > 0 else []
            if not ready:
                return None
            # A child of the process may hold the output open after the process has ended.
            chunk = os.read(self._descriptor, 1 << 16) if self._descriptor in ready else b""
            self._buffer, self._ended = self._buffer + chunk, not chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return f"{line.decode(errors='replace')}\n" if line or not self._ended else ""


def _parsed(line: str) -> Answer | None:
    line = line.strip()
    if not (line.startswith("{") and line.endswith("}")):
        return None
    try:
        answer: Answer = json.loads(line)
    except json.JSONDecodeError:
        return None
    return answer


def _kill(process: subprocess.Popen[bytes]) -> int | None:
    """Kill a process and its children and return its exit status; its end is awaited for `END_S` only."""
    if process.returncode is None:  # else its id may belong to another process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    return process.returncode


def last_answer(answers: Iterator[Answer]) -> Answer:
    """Return the last answer of a child process, with `problem` and `timed_out` if it failed."""
    last: Answer = {}
    for answer in answers:
        last = {**last, **answer} if "problem" in answer else answer
    return last
