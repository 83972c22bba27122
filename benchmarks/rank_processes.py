"""Processes that form a process group on this machine, and end with their parent: `run_ranks`."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tunebench._signal import ending_like_ctrl_c
from tunebench.errors import TunebenchError

__all__ = ["TIMEOUT_S", "RunFailed", "run_ranks"]

TIMEOUT_S = 60.0
"""Longest wait for another process, in seconds."""

PR_SET_PDEATHSIG = 1


class RunFailed(TunebenchError):
    """A process of a run ended without a result."""


def _end_with_parent(parent: int) -> None:
    """Kill this process when the one that started it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _run_rank(parent: int, folder: Path, rank: int, ranks: int, case: Callable[[Path], Any]) -> None:
    _end_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    (folder / f"{rank}.json").write_text(json.dumps(case(folder)))
    dist.barrier()  # nobody leaves while others still connect
    os._exit(0)


def run_ranks(ranks: int, case: Callable[[Path], Any]) -> list[Any]:
    """Return the result of a case in each process of a group.

    Args:
        ranks: Number of processes.
        case: Returns a value for JSON; it runs in each process, with a temporary folder that is removed.

    Raises:
        RunFailed: if a process ends without a result; the others are killed then.
        KeyboardInterrupt: at Ctrl-C, SIGTERM or SIGHUP; the processes are killed and the folder is removed.
    """
    with ending_like_ctrl_c(), tempfile.TemporaryDirectory(prefix="tunebench-plan-") as name:
        folder = Path(name)
        fork = get_context("fork")
        processes = [
            fork.Process(target=_run_rank, args=(os.getpid(), folder, rank, ranks, case))
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            while any(process.is_alive() for process in processes):
                failed = [rank for rank, process in enumerate(processes) if process.exitcode]
                if failed:
                    code = processes[failed[0]].exitcode
                    raise RunFailed(f"process {failed[0]} of {ranks} ended with {code}: see its error above")
                time.sleep(0.02)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            for process in processes:
                if process.pid is not None:
                    process.join()
        results = [folder / f"{rank}.json" for rank in range(ranks)]
        if not all(path.exists() for path in results):
            raise RunFailed("a process ended without a result: see its error above")
        return [json.loads(path.read_text()) for path in results]
