"""Child processes of the acceptance run: their answers, failures and time limits."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.child import ChildLimits, last_answer, run_child
from tests.support import until


def asked(script: str, **limits: Any) -> list[dict[str, Any]]:
    instead = [sys.executable, "-c", f"from pathlib import Path; import time, subprocess\n{script}"]
    return list(run_child([], ChildLimits(**{"total_s": 60.0, **limits}), before=instead))


def test_failed_process_is_a_problem_with_its_last_lines() -> None:
    answers = list(
        run_child(
            ["small", "softmax/nothing", "softmax:rows=64,cols=100,dtype=f32"], ChildLimits(total_s=60.0)
        )
    )
    assert answers[-1]["problem"].startswith("exit status 1: ")
    assert len(answers) == 1


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("print('{\"rows\": 1}')", [{"rows": 1}]),
        ("print('noise'); print('{\"a\": 1}'); print('{\"b\": 2}'); print('noise')", [{"a": 1}, {"b": 2}]),
        ("pass", [{"problem": "the process printed no answer"}]),
        ("print('{\"a\": 1}'); raise SystemExit(3)", [{"a": 1}, {"problem": "exit status 3: "}]),
        (
            "subprocess.Popen(['sleep', '600']); raise SystemExit('gone')",
            [{"problem": "exit status 1: gone"}],
        ),
    ],
)
def test_answers_of_a_process_come_with_its_failure(script: str, expected: list[dict[str, Any]]) -> None:
    assert asked(script) == expected


def test_slow_answer_ends_the_process_and_keeps_the_answers_before_it(tmp_path: Path) -> None:
    ready = tmp_path / "pid"
    script = f"""print('{{"a": 1}}', flush=True)
child = subprocess.Popen(['sleep', '600'])
Path({str(ready)!r}).write_text(str(child.pid))
time.sleep(600)"""
    begun = time.monotonic()
    first, last = asked(script, answer_s=1.0, start_s=30.0)
    assert time.monotonic() - begun < 25
    assert (first, last["timed_out"]) == ({"a": 1}, True)
    assert last["problem"].startswith("no answer within 1 s, ")
    state = Path(f"/proc/{ready.read_text()}/stat")
    until(lambda: not state.exists() or " Z " in state.read_text(), "the child of the process was killed")


def test_last_answer_has_the_failure() -> None:
    assert last_answer(iter([{"a": 1}, {"a": 2}, {"problem": "late"}])) == {"a": 2, "problem": "late"}
    assert last_answer(iter([])) == {}


def test_first_answer_has_its_own_time_limit() -> None:
    limits = ChildLimits(total_s=100.0, answer_s=10.0, start_s=30.0)
    assert [limits.next_s(0, 0.0), limits.next_s(1, 20.0), limits.next_s(5, 95.0)] == [30.0, 10.0, 5.0]
