"""Optimality proofs, audits and finalist comparisons of `tune`, with synthetic times; all else is real."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import InstantExecutor, measured
from tunebench import device, lookup, tune, tuning
from tunebench._console import console
from tunebench._figure import ratio
from tunebench.cli import run as command_line
from tunebench.db.integrity import examine
from tunebench.db.store import open_store
from tunebench.errors import InputError
from tunebench.executor.judged_call import JudgedCaller
from tunebench.kernels import load_file
from tunebench.measure.baseline import Baseline
from tunebench.outcome import Aborted, Crashed, Outcome, Pruned, WrongResult
from tunebench.space import Config
from tunebench.task import Task
from tunebench.tuning import Plan, Report, tunable
from tunebench.tuning.finalist import ROUNDS
from tunebench.tuning.report_text import comparison_rows, render_reports

BOUNDED = str(Path(__file__).parents[1] / "data" / "bounded_variant.py")
DIMENSIONS = {"rows": 33, "cols": 65, "dtype": "f32"}
WORKLOAD = "softmax:rows=33,cols=65,dtype=f32"

Answer = Callable[[Task, int], Outcome]


def copy(task: Task) -> int:
    return int(task.config["copy"])


class MadeUp(InstantExecutor[Task]):
    """Executor that answers from the task and the number of its earlier thorough timings."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(lambda task: answer(task, self._turn(task)))

    def _turn(self, task: Task) -> int:
        return sum(task.thorough and done.thorough and copy(done) == copy(task) for done in self.tasks)


Go = Callable[..., tuple[Report, MadeUp]]
"""Tunes with an answer and changes of the plan."""


def slow(task: Task, _turn: int) -> Outcome:
    """Return a time 15 % above the bound; the best is copy=0 with 11.5 us."""
    return measured(*[1.15 * (10 + copy(task)) * noise for noise in (1.0, 1.001, 1.002)])


def best(report: Report) -> int:
    assert report.config is not None
    return int(report.config["copy"])


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Go:
    load_file(BOUNDED)

    def run(answer: Answer = slow, **changes: object) -> tuple[Report, MadeUp]:
        executor = MadeUp(answer)
        monkeypatch.setattr(tuning, "start_workers", lambda *start: executor)
        options = {"variants": ("bounded",), "baselines": False, "sampler": "random", "trials": 40}
        plan = Plan(**options | changes)  # type: ignore[arg-type]
        return tune(WORKLOAD, device="cpu", db=tmp_path / "a.db", plan=plan), executor

    return run


def served(tmp_path: Path) -> int:
    return int(lookup("softmax", **DIMENSIONS, device="cpu", db=tmp_path / "a.db").config["copy"])


# -- optimality proof --------------------------------------------------------------------------------


def test_complete_run_proves_its_best_and_names_the_scope(go: Go) -> None:
    report, _ = go(trials=1000)
    proof = report.optimality_proof
    assert proof is not None
    assert (proof.proved, proof.gap, report.gap) == (True, 1, 1)
    assert best(report) == 0
    assert proof.timed + proof.bounded == 40
    assert proof.bounded == report.masked > 20
    assert "softmax/numba_cpu" in report.outside
    assert "softmax/bounded" not in report.outside


def test_report_prints_as_the_command_does(go: Go, capsys: pytest.CaptureFixture[str]) -> None:
    report, _ = go(trials=5)
    render_reports([report], console())
    assert str(report) == capsys.readouterr().out.rstrip("\n")
    assert "default configuration" in str(report)
    assert f">{report.variant}</td>" in report._repr_html_()


def test_limited_budget_leaves_an_optimality_gap(go: Go) -> None:
    report, executor = go(trials=5)
    tried = {copy(task) for task in executor.tasks}
    floor = min(10 + row for row in range(40) if row not in tried)
    assert report.median_us is not None
    assert report.optimality_proof is not None
    assert report.optimality_proof.gap == pytest.approx(report.median_us / floor)
    assert not report.optimality_proof.proved
    assert report.to_json()["optimality_proof"]["open_count"] == report.optimality_proof.open_count > 0


def test_search_ends_at_the_requested_optimality_gap(go: Go) -> None:
    report, _ = go(stop_at_gap=1.2, sampler="bound")
    assert report.optimality_proof is not None
    assert report.optimality_proof.gap is not None
    assert report.optimality_proof.gap <= 1.2
    assert sum(report.trials.values()) == 2  # the default, then 11.5 us; the lowest open bound is 11 us


def test_crashed_and_aborted_configurations_stay_open_wrong_ones_do_not(go: Go) -> None:
    def answer(task: Task, turn: int) -> Outcome:
        return {
            1: Crashed(reason="x"),
            2: Aborted(samples_us=(99.0,), above_us=11.5),
            0: WrongResult(reason="y"),
        }.get(copy(task), slow(task, turn))

    report, _ = go(answer, trials=1000)
    proof = report.optimality_proof
    assert proof is not None
    assert proof.open == {"aborted": 1, "crashed": 1}
    assert proof.impossible == 1
    assert proof.gap == pytest.approx(1.15 * 13 * 1.001 / 11, rel=1e-6)


@pytest.mark.parametrize("share", [None, 0.9, 0.1])
def test_gap_of_a_processor_rests_on_measured_rates_or_is_absent(
    go: Go, monkeypatch: pytest.MonkeyPatch, share: float | None
) -> None:
    """The lowest bound is 10 us at the assumed rates; all times beat that at a tenth of them."""
    cpu = device.local_cpu()
    gflop_s = 2 * cpu.sm_count * cpu.fma_per_clock * cpu.max_clock_mhz / 1e3
    rates = {"measured_gb_s": share and 499.0, "measured_gflop_s": share and share * gflop_s}
    monkeypatch.setattr(tunable, "with_measured_rates", lambda device: dataclasses.replace(device, **rates))
    report, _ = go(trials=5)
    assert report.median_us is not None
    text, proof = str(report), report.to_json()["optimality_proof"]
    assert not proof["proved"]
    assert proof["gap"] is None
    if share is None:
        assert report.gap is None
        assert "no gap, since the device's rates are assumed" in text
        return
    assert report.bound_us == pytest.approx(min(report.median_us, 10 / share))
    assert report.gap == pytest.approx(report.median_us / report.bound_us)
    assert (report.gap > 1) == (share == 0.9)
    assert f"gap {ratio(report.gap)} to measured rates" in text
    assert "at measured 499 GB/s, " in text
    assert "optimal" not in text


def test_ties_are_named(go: Go) -> None:
    def answer(task: Task, turn: int) -> Outcome:
        return measured(*[60.0 + 0.01 * (copy(task) % 2) + noise for noise in (0.0, 0.5, 1.0)])

    report, _ = go(answer, trials=6, finalists=1)
    assert len(report.ties) == 5
    assert all(tie.config != report.config for tie in report.ties)


def test_configuration_faster_only_in_an_earlier_run_is_a_tie(go: Go) -> None:
    def answer(task: Task, turn: int) -> Outcome:
        drift = 1.5 if task.thorough else 1.0
        return measured(*[drift * (60 + copy(task) / 40 + noise) for noise in (0.0, 0.001, 0.002)])

    report, _ = go(answer, trials=4, finalists=1)
    assert len(report.ties) == 2  # the two searched configurations that are neither the best nor the default


def test_predicted_times_give_no_optimality_proof() -> None:
    with pytest.raises(InputError, match="needs measured times"):
        tune("gemm:m=64,n=64,k=64,dtype=f32", device="h100-sxm", plan=Plan(stop_at_gap=1.1))


@pytest.mark.parametrize("changes", [{"stop_at_gap": 0.9}, {"audit": -0.1}, {"audit": 1.5}])
def test_a_plan_with_such_shares_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Plan(**changes)  # type: ignore[arg-type]


# -- audits and violations -------------------------------------------------------------------------


def test_audits_are_few_and_marked(go: Go, tmp_path: Path) -> None:
    report, executor = go(trials=1000, audit=0.2)
    with open_store(tmp_path / "a.db") as store:
        audits = [entry for entry in store.history(WORKLOAD) if entry.purpose == "audit"]
    searched = sum(report.trials.values())
    assert len(audits) == report.audited
    assert 1 <= report.audited <= 0.2 * searched + 1
    assert all(entry.bound_us > report.median_us for entry in audits)
    assert report.optimality_proof is not None
    assert report.optimality_proof.proved
    assert not report.violations
    pruning = {copy(task) for task in executor.tasks if not task.prune and not task.thorough}
    assert pruning == {entry.key.config["copy"] for entry in audits}


LIARS = set(range(2, 40)) - {20}


def fast(task: Task, turn: int) -> Outcome:
    """As `slow`, but configurations in `LIARS` have a fastest sample of 2 us and a median of 60 us."""
    return measured(2.0, 60.0, 60.0) if copy(task) in LIARS else slow(task, turn)


def test_wrong_bound_found_by_an_audit_no_longer_prunes_in_this_or_later_runs(go: Go, tmp_path: Path) -> None:
    report, executor = go(fast, trials=1000, audit=0.01, sampler="bound")
    first = copy(executor.tasks[2])
    with open_store(tmp_path / "a.db") as store:
        purposes = [entry.purpose for entry in store.history(WORKLOAD)]
        assert store.stats().violations >= len(LIARS)
    assert purposes[:5] == ["search", "search", "audit", "search", "search"]
    assert first in LIARS
    assert {violation.config["copy"] for violation in report.violations} == LIARS
    first_violation = report.violations[0]
    assert (first_violation.fastest_us, first_violation.bound_us, first_violation.known) == (
        2.0,
        pytest.approx(10 + first_violation.config["copy"]),
        False,
    )
    assert best(report) == 0
    assert report.masked == 0
    assert report.optimality_proof is not None
    assert report.optimality_proof.timed == 40
    assert report.bound_us == 0
    later, _ = go(fast, trials=1)
    assert all(violation.known for violation in later.violations)
    assert later.bound_us == 0


def test_median_below_its_bound_is_a_finding_and_no_result(go: Go, tmp_path: Path) -> None:
    def impossible(task: Task, turn: int) -> Outcome:
        return measured(2.0, 2.1, 2.2) if copy(task) == 0 else slow(task, turn)

    report, executor = go(impossible, trials=40)
    assert [violation.config["copy"] for violation in report.violations] == [0]
    assert (best(report), served(tmp_path)) == (1, 1)
    assert not any(task.thorough and copy(task) == 0 for task in executor.tasks)
    assert report.trials["measured"] >= 39  # it was no incumbent that prunes others
    with open_store(tmp_path / "a.db") as store:
        assert examine(store).counts["bound"] == 1
    go(slow, trials=41)  # measured again, since it had no result
    assert served(tmp_path) == 0


def test_finalist_with_a_median_below_its_bound_fails(go: Go, tmp_path: Path) -> None:
    def impossible(task: Task, turn: int) -> Outcome:
        return measured(2.0) if copy(task) == 0 and task.thorough else slow(task, turn)

    report, _ = go(impossible, trials=40)
    assert (best(report), served(tmp_path)) == (1, 1)


def test_without_audits_a_wrong_bound_goes_unnoticed(go: Go) -> None:
    report, _ = go(fast, trials=1000, audit=0.0, sampler="bound")
    assert (report.violations, report.audited) == ((), 0)


def test_violation_leaves_open_configurations_without_a_bound(go: Go) -> None:
    def answer(task: Task, turn: int) -> Outcome:
        return measured(5.0, 35.0, 35.0) if copy(task) == 20 else slow(task, turn)  # the default

    report, _ = go(answer, trials=3)
    assert len(report.violations) == 1
    assert report.gap is None
    assert report.optimality_proof is not None
    assert report.optimality_proof.open_count == 37


def test_violation_is_resolved_when_the_corrected_bound_agrees(
    go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(fast, trials=1000, sampler="bound")
    variant = load_file(BOUNDED)
    costs = type(variant).costs

    def corrected(self: object, workload: object, table: object, device: object) -> object:
        too_high = costs(variant, workload, table, device)  # type: ignore[arg-type]
        return type(too_high)(blocks=1, full_blocks=0, threads=1, fma=too_high.fma / 50)

    monkeypatch.setattr(type(variant), "costs", corrected)
    report, _ = go(fast, trials=1)
    assert report.violations == ()
    assert report.bound_us > 0


# -- configurations pruned after compilation ---------------------------------------------------------


def test_pruning_by_binary_is_stored_and_reversed_when_its_bound_no_longer_holds(
    go: Go, tmp_path: Path
) -> None:
    def answer(task: Task, turn: int) -> Outcome:
        if task.prune and copy(task) < 10:
            return Pruned(bound_us=30.0, incumbent_us=25.0)
        return slow(task, turn)

    report, executor = go(answer, trials=1000, audit=0.0)
    assert report.trials["pruned"] == 10
    assert report.optimality_proof is not None
    assert report.optimality_proof.proved
    assert best(report) == 10
    assert all(task.prune for task in executor.tasks if not task.thorough)
    resumed, _ = go(slow, trials=1000, audit=0.0)  # bounds without register counts no longer exclude them
    assert best(resumed) == 0
    with open_store(tmp_path / "a.db") as store:
        kinds = [e.result.outcome.kind for e in store.history(WORKLOAD) if e.key.config["copy"] == 3]
    assert kinds[0] == "pruned"


# -- finalists -------------------------------------------------------------------------------------


def rounds(**drifts: tuple[float, ...]) -> Answer:
    """Return an answer for three finalists, 20 (the default), 1 and 2, with their times in each round."""
    search = {20: 40.0, 1: 39.0, 2: 38.0}

    def answer(task: Task, turn: int) -> Outcome:
        us = drifts[f"c{copy(task)}"][turn] if task.thorough else search.get(copy(task), 60.0)
        return measured(us, us * 1.001, us * 1.002)

    return answer


CALM = (40.0, 41.0, 40.0, 41.0)


def test_gain_within_noise_is_neither_reported_nor_looked_up(go: Go, tmp_path: Path) -> None:
    noisy = (39.0, 42.0, 38.0, 40.5)
    report, _ = go(rounds(c20=CALM, c1=noisy, c2=noisy), finalists=2, sampler="bound")
    assert best(report) == 20
    assert report.is_default
    assert report.versus["runner_up"].tied
    assert {tie.config["copy"] for tie in report.ties} >= {1, 2}
    assert served(tmp_path) == 20


CERTAIN = "100.0 % probability that best is faster"


def test_a_small_gain_in_every_round_counts_although_the_machine_drifts(go: Go, tmp_path: Path) -> None:
    tuned = tuple(0.98 * us for us in CALM)
    report, _ = go(rounds(c20=CALM, c1=tuned, c2=CALM), finalists=2, sampler="bound")
    assert best(report) == 1
    assert not report.is_default
    versus = report.versus["default"]
    assert versus.faster
    assert versus.probability > 0.99
    assert versus.ratio == pytest.approx(1 / 0.98, rel=1e-3)
    for drifted in (report, dataclasses.replace(report, default_us=99.0)):  # the machine drifted
        row = [*comparison_rows(drifted, drifted.median_us or 0.0)][1]
        assert row[2:] == ("1.02x", f"[{versus.low:.2f}, {versus.high:.2f}], {CERTAIN}")
    assert served(tmp_path) == 1
    with open_store(tmp_path / "a.db") as store:
        verdicts = {
            e.key.config["copy"]: e.verdict for e in store.history(WORKLOAD) if e.purpose == "finalist"
        }
    assert {number: verdict.versus_default for number, verdict in verdicts.items()} == {
        1: "faster",
        2: "not faster",
        20: "itself",
    }
    assert verdicts[1].comparison.keys() == {"default", "runner_up", "ties", "bound_us", "searched"}
    assert verdicts[1].comparison["default"] == versus.to_json()
    assert "ties" not in verdicts[2].comparison


def test_every_second_round_goes_backwards(go: Go) -> None:
    _, executor = go(rounds(c20=CALM, c1=CALM, c2=CALM), finalists=2, sampler="bound")
    order = [copy(task) for task in executor.tasks if task.thorough]
    assert len(order) == 12
    assert order[3:6] == order[2::-1]
    assert order[6:] == order[:6]


def test_baselines_are_timed_between_the_rounds_and_compared(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    timed_before: list[int] = []
    executor_of: list[MadeUp] = []

    def call(_: JudgedCaller, *_arguments: object) -> object:
        timed_before.append(sum(task.thorough for task in executor_of[0].tasks))
        if len(timed_before) == 4:
            return Crashed(reason="SIGSEGV")
        return [Baseline.of("numpy", [60.0, 61.0, 62.0])]

    answer = rounds(c20=CALM, c1=CALM, c2=CALM)
    made = MadeUp.__init__

    def remember(self: MadeUp, timed_answer: Answer) -> None:
        made(self, timed_answer)
        executor_of.append(self)

    monkeypatch.setattr(MadeUp, "__init__", remember)
    monkeypatch.setattr(JudgedCaller, "call", call)
    report, _ = go(answer, finalists=2, sampler="bound", baselines=True)
    assert timed_before == [3, 6, 9, 12]
    assert report.baselines[0].samples_us == (60.0, 61.0, 62.0) * 3
    assert report.versus["baseline"].ratio == pytest.approx(1.5, rel=0.02)
    assert "SIGSEGV" in report.skipped["baselines"]
    assert "samples_us" not in report.to_json()["baselines"][0]


def test_failed_finalist_is_stored_and_leaves_the_comparison(go: Go, tmp_path: Path) -> None:
    steady = rounds(c20=CALM, c1=tuple(0.5 * us for us in CALM), c2=CALM)

    def answer(task: Task, turn: int) -> Outcome:
        late = task.thorough and copy(task) == 1 and turn == 1
        return WrongResult(reason="after timing") if late else steady(task, turn)

    report, executor = go(answer, finalists=2, sampler="bound")
    assert best(report) == 20
    assert served(tmp_path) == 20
    assert sum(task.thorough and copy(task) == 1 for task in executor.tasks) == 2
    with open_store(tmp_path / "a.db") as store:
        last = [e for e in store.history(WORKLOAD) if e.key.config["copy"] == 1][-1]
    assert (last.result.outcome.kind, last.purpose) == ("wrong_result", "finalist")


def test_aborted_default_is_timed_as_a_finalist(go: Go) -> None:
    def answer(task: Task, turn: int) -> Outcome:
        if copy(task) == 20 and not task.thorough:
            return Aborted(samples_us=(90.0, 91.0), above_us=30.0)
        return measured(90.0, 90.1, 90.2) if copy(task) == 20 else slow(task, turn)

    report, _ = go(answer, trials=5)
    assert report.default_us == pytest.approx(90.1)
    assert not report.is_default
    assert report.versus["default"].faster


def test_intervals_decide_without_finalists_and_the_report_names_the_answer(go: Go, tmp_path: Path) -> None:
    def answer(task: Task, turn: int) -> Outcome:
        if task.thorough:
            raise KeyboardInterrupt
        return measured(20.0, 30.0, 40.0) if copy(task) == 20 else measured(19.0, 29.0, 30.0)

    report, _ = go(answer, trials=4)
    assert report.interrupted
    assert best(report) == 20
    assert served(tmp_path) == 20


def test_interrupted_finalist_comparison_decides_nothing(go: Go, tmp_path: Path) -> None:
    def answer(task: Task, turn: int) -> Outcome:
        if task.thorough and turn == 2:
            raise KeyboardInterrupt
        us = 60.0 if copy(task) == 20 else 50.0
        return measured(us, us + 0.1, us + 0.2)

    report, _ = go(answer, trials=4)
    assert report.interrupted
    assert not report.is_default
    assert report.versus == {}
    assert served(tmp_path) == best(report) != 20
    with open_store(tmp_path / "a.db") as store:
        assert {entry.purpose for entry in store.history(WORKLOAD)} == {"search"}


def test_failed_default_is_reported_with_its_reason(go: Go) -> None:
    def crashing(task: Task, turn: int) -> Outcome:
        return Crashed(reason="worker killed by SIGSEGV") if copy(task) == 20 else slow(task, turn)

    report, _ = go(crashing, trials=4)
    assert (report.default_us, report.default_failure) == (None, "crashed: worker killed by SIGSEGV")
    resumed, _ = go(crashing, trials=1)
    assert resumed.default_failure == report.default_failure


def test_default_that_fails_in_the_finals_is_reported_with_its_reason(go: Go) -> None:
    def crashing(task: Task, turn: int) -> Outcome:
        failing = task.thorough and copy(task) == 20
        return WrongResult(reason="y[0] is 1") if failing else slow(task, turn)

    report, _ = go(crashing, trials=4)
    assert report.default_failure == "wrong_result: y[0] is 1"


def test_default_outside_of_the_space_is_an_error_of_the_variant(
    go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = load_file(BOUNDED)
    monkeypatch.setattr(type(variant), "default", lambda *_: Config({"copy": 99}))
    with pytest.raises(InputError, match=r"softmax/bounded: default must return a valid .*copy=99"):
        go()


def test_finals_that_disagree_with_the_search_are_repeated_once(go: Go) -> None:
    def busy(task: Task, turn: int) -> Outcome:
        us = 60.0 + copy(task)
        return measured(40 * us if task.thorough and turn < ROUNDS else us)

    report, executor = go(busy, trials=4, finalists=2)
    assert max(Counter(copy(task) for task in executor.tasks if task.thorough).values()) == 2 * ROUNDS
    assert report.noise == ()
    assert report.median_us is not None
    assert report.median_us < 100


def test_finals_that_still_disagree_are_reported_and_marked(go: Go, tmp_path: Path) -> None:
    def busy(task: Task, turn: int) -> Outcome:
        conditions = {"busy_elsewhere": 0.5 - turn / 100, "reference_us": 10.0 * (turn + 1)}
        us = (60.0 + copy(task)) * (40 if task.thorough else 1)
        return measured(us, conditions=conditions if task.thorough else {})

    report, _ = go(busy, trials=4)
    load, drift, disagreement = report.noise
    assert load.startswith("other programs used 46 % of the processor")
    assert drift == "a reference kernel took up to 1.6 times as long in one round as in another"
    assert disagreement.endswith("us in the finals, which were repeated")
    answer = lookup("softmax", **DIMENSIONS, device="cpu", db=tmp_path / "a.db")
    assert "while other programs used 46 % of the processor; the search measured " in answer.because


# -- command line ------------------------------------------------------------------------------------


def test_command_line_prints_proof_and_finalists(
    go: Go, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "start_workers", lambda *start: MadeUp(fast))
    database = str(tmp_path / "a.db")
    words = ["tune", "--workload", WORKLOAD, "--device", "cpu", "--variant", "bounded", "--no-baselines"]
    words += ["--db", database, "--trials", "9", "--sampler", "random"]
    assert command_line([*words, "--audit", "1", "--stop-at-gap", "1.0"]) == 0
    printed = capsys.readouterr()
    assert "  proof    " in printed.out
    assert "outside  not searched" in printed.out
    assert command_line([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["optimality_proof"].keys() >= {"gap", "proved", "open", "open_count", "timed", "bounded"}
    assert data["versus"].keys() <= {"default", "runner_up", "baseline"}
    assert isinstance(data["violations"], list)


def test_a_violation_is_a_warning_and_shown(
    go: Go, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    go(fast, trials=1000, sampler="bound")
    monkeypatch.setattr(tuning, "start_workers", lambda *start: MadeUp(fast))
    database = ["--workload", WORKLOAD, "--device", "cpu", "--db", str(tmp_path / "a.db")]
    assert command_line(["tune", *database, "--variant", "bounded", "--no-baselines", "--json"]) == 0
    printed = capsys.readouterr()
    assert "warning: a bound is violated: softmax/bounded with copy=" in printed.err
    assert json.loads(printed.out)["violations"][0]["config"]["copy"] in LIARS
    assert command_line(["show", *database, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {violation["config"] for violation in shown["violations"]} == {
        f"copy={number}" for number in LIARS
    }
    assert command_line(["db", "stats", "--db", str(tmp_path / "a.db"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["violations"] >= 1


def test_tune_and_lookup_show_the_same_speedup_over_each_baseline(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"numpy": [60.0, 61.0, 62.0], "torch": [30.0, 31.0, 32.0]}
    timed = [Baseline.of(name, samples_us) for name, samples_us in times.items()]
    monkeypatch.setattr(JudgedCaller, "call", lambda *_: timed)
    report, _ = go(rounds(c20=CALM, c1=CALM, c2=CALM), finalists=2, sampler="bound", baselines=True)
    speedups = {name: versus.ratio for name, versus in report.versus_baselines.items()}
    assert speedups == {"numpy": pytest.approx(1.5, rel=0.02), "torch": pytest.approx(0.76, rel=0.02)}
    answer = lookup("softmax", **DIMENSIONS, device="cpu", db=tmp_path / "a.db")
    assert {name: versus.ratio for name, versus in answer.baselines.items()} == pytest.approx(speedups)
    assert report.median_us is not None
    rows = {str(row[0]): row[2] for row in comparison_rows(report, report.median_us)}
    assert rows["numpy"] == f"{speedups['numpy']:.2f}x"
    assert rows["torch"] == f"{speedups['torch']:.2f}x"
