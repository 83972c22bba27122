"""A database with something for every page, hostile texts, and a client without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message

from tests.support import measured
from tunebench.db import RunStart, RunSummary, TrialKey, Verdict, new_owner, open_store
from tunebench.db.browse import open_browser
from tunebench.device import Device, described
from tunebench.outcome import Aborted, CompileFailed, Outcome, Predicted, Result, Verification
from tunebench.space import Config

HOSTILE = "<script>alert('x')</script>\"&\u202e<img src=x onerror=alert(1)>"
GPU, OTHER = described()["h100-sxm"], described()["rtx-3090"]
GEMM = "gemm:m=1024,n=1024,k=1024,dtype=f16"
SOFTMAX = "softmax:rows={},cols=64,dtype=f32"
WORKLOADS = 60
"""Workloads of softmax; a page of a list has 50 rows."""
LIBRARIES = {
    "default": {"ratio": 1.5, "low": 1.4, "high": 1.6},
    "libraries": {
        "cublas": {"ratio": 0.8, "low": 0.7, "high": 0.9},
        HOSTILE: {"ratio": 1.25, "low": 1.2, "high": 1.3},
    },
}
UNPROVED = Verification(how="not verified", detail="g++ is not installed")


def fill(db: str) -> None:
    """Write a database: measured, predicted, aborted, failed, stale and claimed trials, and five searches."""
    with open_store(db) as store:
        for rows in range(1, WORKLOADS + 1):
            _search(store, GPU, SOFTMAX.format(rows), [(1, measured(float(rows), rows + 1.0, rows + 0.5))])
        outcomes: list[tuple[int | str, Outcome]] = [
            (1, measured(20.0, 21.0, 20.5)),
            (2, measured(10.0, 10.5, 10.25, 10.75)),
            (3, Aborted(samples_us=(99.0, 98.5), above_us=20.0)),
            (4, CompileFailed(reason=HOSTILE)),
            (HOSTILE, measured(30.0, 31.0)),
        ]
        run = _search(store, GPU, GEMM, outcomes)
        verdict = Verdict(versus_default="faster", comparison=LIBRARIES)
        best = Result(outcome=measured(10.1, 10.2, 10.3))
        store.record(_key(GPU, GEMM, 2), best, purpose="finalist", bound_us=5.0, run_id=run, verdict=verdict)
        store.record(
            _key(GPU, GEMM, 1, revision="r2"), Result(outcome=measured(19.0)), bound_us=5.0, run_id=run
        )
        _search(store, OTHER, GEMM, [(1, Predicted(predicted_us=12.0, verification=UNPROVED))])
        _search(store, OTHER, f"recorded:kernel={HOSTILE}", [(1, measured(7.0, verification=UNPROVED))])
        _search(store, GPU, SOFTMAX.format(1), [(77, CompileFailed(reason=HOSTILE))])
        running = RunStart(
            device=OTHER, workload=GEMM, sampler="bound", seed=0, host=new_owner(), budget_trials=10
        )
        run = store.begin_run(running)
        for block in (5, 6, 7):
            store.record(
                _key(OTHER, GEMM, block), Result(outcome=measured(20.0 - block)), bound_us=5.0, run_id=run
            )
        store.claim(_key(OTHER, GEMM, 8), running.host)


def record_running(db: str, *, block: int, median_us: float) -> None:
    """Record another measurement of the search that runs."""
    with open_store(db) as store, open_browser(db) as browser:
        run = next(run for run in browser.unfinished_runs() if run.budget_trials == 10)
        result = Result(outcome=measured(median_us))
        store.record(_key(OTHER, GEMM, block), result, bound_us=2.0, run_id=run.id)


def _search(store: Any, on: Device, workload: str, outcomes: list[tuple[Any, Outcome]]) -> str:
    run = str(
        store.begin_run(RunStart(device=on, workload=workload, sampler="bound", seed=0, budget_trials=5))
    )
    for block, outcome in outcomes:
        store.record(_key(on, workload, block), Result(outcome=outcome), bound_us=0.5, run_id=run)
    store.finish_run(run, RunSummary(wall_s=1.0))
    return run


def _key(on: Device, workload: str, block: int | str, revision: str = "r1") -> TrialKey:
    operator = workload.partition(":")[0]
    config = Config({"block": block, "stages": 3})
    return TrialKey(
        device=on.key, workload=workload, variant=f"{operator}/a", revision=revision, config=config
    )


def workload_path(workload: str = GEMM, on: Device = GPU) -> str:
    return f"/workload?device={quote(on.key)}&workload={quote(workload)}"


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the application."""

    status: int
    headers: Mapping[str, str]
    text: str


def request(
    app: ASGIApp,
    url: str,
    *,
    method: str = "GET",
    host: str = "127.0.0.1:8642",
    headers: Mapping[str, str] = {},
) -> Answer:
    """Send one request to an application, without a server."""
    path, _, query = url.partition("?")
    sent: list[Message] = []
    names = {"host": host, **headers}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in names.items()],
        "server": ("127.0.0.1", 8642),
        "client": ("127.0.0.1", 1),
    }

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    sent_headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return Answer(sent[0]["status"], sent_headers, body.decode())
