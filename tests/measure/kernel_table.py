"""Table of dishonest and honest kernels with and without a judge: `python -m tests.measure.kernel_table`."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable

from tests.measure import outside_cheats
from tests.measure.kernel_worker import executor, measure
from tests.measure.test_cheating_kernels import LARGE, PRODUCT
from tunebench.measure.timing import Protocol
from tunebench.outcome import Measured, Outcome

TRUE_SHARE = 0.67
"""Share of the honest time below which a time is false."""


def finals(name: str, *, judged: bool, rounds: int) -> list[Outcome]:
    """Return the outcomes of rounds of the finals, in new processes."""
    workload = PRODUCT if "products" in name else LARGE
    with executor(Protocol(), judged=judged) as workers:
        return [measure(workers, name, workload, thorough=True) for _ in range(rounds)]


def verdict(outcomes: Iterable[Outcome], honest_us: float) -> str:
    """Return what became of a kernel: caught, served with its own time, or served with a false one."""
    outcomes = list(outcomes)
    failed = [outcome for outcome in outcomes if not isinstance(outcome, Measured)]
    if failed:
        return f"caught: {getattr(failed[0], 'reason', failed[0].kind)[:60]}"
    median_us = statistics.median(outcome.median_us for outcome in outcomes if isinstance(outcome, Measured))
    return f"{'timed' if median_us > TRUE_SHARE * honest_us else '**served falsely**'}, {median_us:.3g} us"


def main(rounds: int) -> None:
    """Print one line per kernel."""
    write = sys.stdout.write
    honest_us = {
        judged: [o.median_us for o in finals("computes", judged=judged, rounds=4) if isinstance(o, Measured)]
        for judged in (False, True)
    }
    write("| kernel | in its own process | by a judge |\n|---|---|---|\n")
    for name in outside_cheats.CHEATS:
        columns = []
        for judged in (False, True):
            try:
                outcomes = finals(name, judged=judged, rounds=rounds)
                columns.append(verdict(outcomes, statistics.median(honest_us[judged])))
            except Exception as error:  # a kernel may break the executor without a judge
                columns.append(f"the run ends: {type(error).__name__}")
        write(f"| {name} | {' | '.join(columns)} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
