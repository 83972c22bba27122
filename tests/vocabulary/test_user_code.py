"""Time limits of user code: loops, sleeps and waits end in every thread, and compiled code in commands."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tunebench import _user_code
from tunebench._user_code import limit_user_code, limited
from tunebench.errors import CodeTimeout, user_place

LIMIT_S = 0.2


def loop() -> None:
    while True:
        pass


def catch() -> None:
    """Catch the first interruption."""
    try:
        loop()
    except BaseException:
        loop()


def wait_for_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def call(function: Callable[[], None]) -> str:
    """Return the error of user code that never returns."""
    with limited("softmax/mine: kernel", LIMIT_S), pytest.raises(AssertionError):
        raise AssertionError  # an error of the code passes through
    with pytest.raises(CodeTimeout) as error, limited("softmax/mine: kernel", LIMIT_S):
        function()
    assert error.value.conditions["limit_s"] == LIMIT_S
    return str(error.value)


@pytest.mark.parametrize("function", [loop, catch, wait_for_lock, lambda: time.sleep(600)])
def test_code_that_never_returns_ends_in_the_main_thread(function: Callable[[], None]) -> None:
    message = call(function)
    assert message.startswith(f"softmax/mine: kernel did not return within {LIMIT_S} s ({__file__}, line ")
    assert "--timeout" in message
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("function", [loop, catch])
def test_code_that_never_returns_ends_in_other_threads(function: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as threads:
        assert "did not return within 0.2 s" in threads.submit(call, function).result(timeout=600)


def test_an_alarm_of_the_program_is_kept() -> None:
    signal.setitimer(signal.ITIMER_REAL, 600)
    try:
        call(loop)
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_code_without_a_limit_and_nested_code_have_no_limit_of_their_own() -> None:
    assert limited("outside") is _user_code.UNLIMITED
    names: list[str | None] = []
    with limit_user_code(600.0, names.append), limited("outer"):
        assert limited("inner") is _user_code.UNLIMITED
    assert names == ["outer", None]
    assert limited("outside") is _user_code.UNLIMITED


def test_clock_stops_while_the_thread_waits_for_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = iter([0.0])  # then 0.3 s for ever
    monkeypatch.setattr(_user_code, "waited_s", lambda thread: next(waits, 0.3))
    began = time.monotonic()
    call_once = pytest.raises(CodeTimeout)
    with call_once, limited("code", LIMIT_S):
        loop()
    assert time.monotonic() - began >= LIMIT_S + 0.3


COMMAND = """
import numba
from tunebench import _user_code

@numba.njit
def endless(x):
    while x > 0:
        x += 1.0

_user_code.END_S = 0.5
endless(0.0)
with _user_code.end_process(), _user_code.limited("code", 0.2):
    endless(1.0)
"""


def test_command_ends_in_compiled_code_that_never_returns() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND], capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 1
    assert 'File "<string>", line 13' in ended.stderr


@pytest.mark.parametrize(
    ("folder", "of_user"), [("site-packages", False), ("dist-packages", False), ("kernels", True)]
)
def test_package_outside_of_the_prefix_is_no_code_of_a_user(
    folder: str, of_user: bool, tmp_path: Path
) -> None:
    file = tmp_path / folder / "library.py"
    with pytest.raises(ValueError, match="no number") as raised:
        exec(compile("raise ValueError('no number')", str(file), "exec"))
    error = raised.value.with_traceback(raised.tb.tb_next)  # without this file
    assert user_place(error) == (f"{file}, line 1" if of_user else "")
