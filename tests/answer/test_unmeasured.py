"""What lookup, explain, export and an offline search name where nothing was measured: one configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import VERIFIED, InstantExecutor
from tunebench import device as devices
from tunebench import tuning
from tunebench.answer import lookup_workload
from tunebench.forecast.execution import CALL_US
from tunebench.forecast.predicted_space import WORTH_A_CHANGE, best_space, fastest_variant
from tunebench.outcome import Outcome, Predicted
from tunebench.task import Task
from tunebench.tuning import Plan, tune
from tunebench.tuning.choice import choose_config
from tunebench.tuning.tunable import find_variants
from tunebench.workloads import parse

WORKLOADS = (
    "gemm:m=64,n=7168,k=2048,dtype=bf16,trans=nt",
    "gemm:m=1000,n=1023,k=1023,dtype=f16",
    "grouped_gemm:groups=4,m=1024,n=1024,k=512,dtype=f16",
    "attention:batch=2,heads=8,seq_q=1024,head_dim=64,dtype=f16,causal=true",
    "conv2d:n=8,c=64,h=28,w=28,k=64,r=3,s=3,stride=1,pad=1,dtype=f16,layout=nhwc",
    "softmax:rows=4096,cols=1000,dtype=f16",
    "layernorm:rows=512,cols=768,dtype=bf16,direction=backward",
    "elementwise:rows=1024,cols=4096,dtype=bf16,expression=relu(x)",
    "reduction:rows=4096,cols=512,dtype=f32,axis=rows,expression=x,reduce=sum",
)
CASES = [
    *((text, "h100-sxm") for text in WORKLOADS),
    *(pytest.param(text, "a100-80-sxm", marks=pytest.mark.slow) for text in WORKLOADS[::2]),
    *(pytest.param(text, "rtx-4090", marks=pytest.mark.slow) for text in WORKLOADS[1::2]),
]


class Predictor(InstantExecutor[Task]):
    """Executor of a device that is not present: every configuration is verified."""

    def __init__(self) -> None:
        super().__init__(self._answer)

    def _answer(self, task: Task) -> Outcome:
        assert task.predicted_us is not None
        return Predicted(predicted_us=task.predicted_us, verification=VERIFIED)


@pytest.mark.parametrize(("text", "name"), CASES)
def test_every_command_names_the_configuration_predicted_best(
    text: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, workload, db = devices.find(name), parse(text), tmp_path / "a.db"
    monkeypatch.setattr("tunebench.tuning.tunable.unavailable", lambda language: None)
    monkeypatch.setattr(tuning, "start_workers", lambda *start: Predictor())
    answer = lookup_workload(text, device=device, db=db, quiet=True)
    space = fastest_variant(workload, device)
    assert space is not None
    row = space.fastest()
    named = (space.variant.key, space.table.config(row), space.predicted_us(row))
    assert (answer.variant, answer.config, answer.expected_us) == named
    assert answer.interval_us == space.interval_us(row)
    choice = choose_config(workload, device, db=db, compilable=False)
    assert (choice.variant.key, choice.config, choice.expected_us) == named
    report = tune(text, device=name, db=db, plan=Plan(trials=10, sampler="random", offline=True))
    assert (report.variant, report.config, report.median_us) == named
    assert (answer.variant, answer.config, answer.expected_us) == named
    recorded = lookup_workload(text, device=device, db=db, quiet=True)
    assert (recorded.variant, recorded.config, recorded.expected_us) == named


def test_answer_says_whether_it_is_the_default(tmp_path: Path) -> None:
    attention = "attention:batch=8,heads=16,seq_q=2048,head_dim=128,dtype=f16"
    for text, is_default in ((WORKLOADS[1], False), (attention, True)):
        answer = lookup_workload(text, device="h100-sxm", db=tmp_path / "a.db", quiet=True)
        assert ("default configuration" in answer.because) == is_default
        assert "fastest by how its blocks execute" in answer.because
        spaces, _ = find_variants(parse(text), devices.find("h100-sxm"), compilable=False)
        best = best_space(spaces)
        assert best.default_row is not None
        gain = best.predicted_us(best.default_row) / best.times_us.min()
        assert (gain <= WORTH_A_CHANGE) == is_default


def test_processors_use_the_default(tmp_path: Path) -> None:
    cpu, text = devices.local_cpu(), "gemm:m=64,n=256,k=128,dtype=f32"
    answer = lookup_workload(text, device=cpu, db=tmp_path / "a.db", quiet=True)
    spaces, _ = find_variants(parse(text), cpu, compilable=False)
    defaults = {space.variant.key: space.table.config(space.default_row or 0) for space in spaces}
    assert {space.interval_us(0) for space in spaces} == {None}
    assert answer.config == defaults[answer.variant]
    assert (answer.interval_us, answer.expected_us > CALL_US) == (None, True)


def test_processors_are_predicted_at_the_rates_that_were_measured(tmp_path: Path) -> None:
    """The tests store 250 GFLOP/s: a product of 2 * 256**3 operations takes 134 us or a little more."""
    answer = lookup_workload(
        "gemm:m=256,n=256,k=256,dtype=f32", device="cpu", db=tmp_path / "a.db", quiet=True
    )
    chosen = choose_config(parse(answer.workload), devices.local_cpu(), db=tmp_path / "a.db")
    assert answer.expected_us == chosen.expected_us == pytest.approx(2 * 256**3 / 250e3, rel=0.01)
