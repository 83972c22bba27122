"""`python -m tunebench.forecast.model_training`: train the model of library kernels and report its error."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from tunebench.errors import InputError, TunebenchError
from tunebench.forecast.library.model import Skill
from tunebench.forecast.model_training import data, evaluation, fit

BUNDLED = Path(__file__).parents[1] / "library" / "model.npz"


def main() -> int:
    """Train and write the model, and on request its errors on devices left out."""
    arguments = _arguments()
    try:
        rows = data.read_public(arguments.data) if arguments.data else []
        for path in arguments.measured:
            rows += data.read_file(path)
        experts = _kept(rows)
        if not experts:
            raise InputError("no measurements to train on; give --data or --measured")
        fit.assemble_model(experts).save(arguments.out)
        _say(f"{arguments.out}: {arguments.out.stat().st_size / 1024:.0f} KiB")
        if arguments.errors:
            _evaluate(experts, arguments.errors)
    except TunebenchError as error:
        _say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        _say("interrupted; files written before are complete")
        return 130
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tunebench.forecast.model_training", description=__doc__)
    parser.add_argument("--data", type=Path, help="folder of the public measurements")
    parser.add_argument(
        "--measured",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="own measurements: a CSV file with columns device, workload and time_us, or the output of "
        "`tunebench db export --format jsonl`; may be repeated",
    )
    parser.add_argument(
        "--out", type=Path, default=BUNDLED, help="model file to write (default: the bundled model)"
    )
    parser.add_argument("--errors", type=Path, help="JSON file for the errors on devices left out")
    return parser.parse_args()


def _kept(measured: list[data.KernelMeasurement]) -> dict[Skill, list[fit.TrainedExpert]]:
    experts: dict[Skill, list[fit.TrainedExpert]] = {}
    for table in data.group_by_device(measured):
        rows = int(table.visible.sum())
        if rows < fit.FEWEST:
            _say(f"{table.skill} on {table.device.name}: skipped, {rows} rows are too few")
            continue
        trained = fit.train_expert(table)
        experts.setdefault(table.skill, []).append(trained)
        near = trained.expert.near
        _say(f"{table.skill} on {table.device.name}: {rows} rows, {near.low:+.3f} to {near.high:+.3f}")
    return experts


def _evaluate(experts: dict[Skill, list[fit.TrainedExpert]], path: Path) -> None:
    errors = []
    for error in evaluation.evaluate_holdouts(experts):
        errors.append(error)
        alternatives = ", ".join(f"{name} {percent:.1f}" for name, percent in error.others_percent.items())
        _say(
            f"without {error.device}: {error.group}: {error.percent:.1f} % ({error.bias_percent:+.1f}), "
            f"{error.within_percent:.0f} % in the interval; {alternatives}"
        )
    _say(f"coverage of the 90 % interval: {evaluation.coverage(errors):.1f} %")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([dataclasses.asdict(error) for error in errors], indent=1) + "\n")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - a command's progress


if __name__ == "__main__":
    sys.exit(main())
