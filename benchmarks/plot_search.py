"""Plot of search efficiency on recorded tuning spaces: the figure of the README.

    python -m benchmarks.plot_search [--results FILE.json] [--out FILE.svg]

Reads the results that `python -m benchmarks.search compare` wrote. Each point is the mean over seeds, and
over the spaces that every sampler of the figure searched.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import matplotlib

ROOT = Path(__file__).resolve().parents[1]

NAMES = {
    "surrogate": "tunebench (default)",
    "surrogate-blind": "tunebench without the bound",
    "adaptive_tabu_greywolf": "Kernel Tuner: adaptive_tabu_greywolf",
    "hybrid_vndx": "Kernel Tuner: hybrid_vndx",
    "genetic_algorithm": "Kernel Tuner: genetic_algorithm",
    "tpe": "Optuna: TPE, valid configurations only",
    "random_sample": "random search",
}


def mean_efficiency(results: Path) -> dict[str, dict[int, float]]:
    """Return the mean efficiency by sampler and number of configurations, cold starts only."""
    samples: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    searches = json.loads(results.read_text(encoding="utf-8"))["searches"]
    spaces_of = {
        name: {search["space"] for search in searches if search["sampler"] == name} for name in NAMES
    }
    common = set.intersection(*spaces_of.values())
    for search in searches:
        if not search["elsewhere"] and search["space"] in common:
            for asked, efficiency in search["efficiency"].items():
                samples[search["sampler"]][int(asked)].append(efficiency)
    return {
        sampler: {asked: sum(values) / len(values) for asked, values in sorted(curve.items())}
        for sampler, curve in samples.items()
    }


def main(arguments: list[str] | None = None) -> int:
    """Draw the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/search/compare.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images/search-efficiency.svg")
    chosen = parser.parse_args(arguments)
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "tunebench"  # the same bytes for the same figures
    curves = mean_efficiency(chosen.results)
    figure, axes = plt.subplots(figsize=(7.2, 3.8), facecolor="white")
    for sampler, name in NAMES.items():
        ours = sampler.startswith("surrogate")
        curve = curves[sampler]
        axes.plot(
            list(curve),
            list(curve.values()),
            marker="o",
            markersize=4,
            linewidth=2.4 if ours else 1.2,
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks([25, 50, 100, 200], ["25", "50", "100", "200"])
    axes.minorticks_off()
    axes.set_xlabel("distinct configurations measured")
    axes.set_ylabel("optimum / best so far")
    axes.set_title("Search efficiency on six recorded tuning spaces (mean of 20 seeds)", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7.5, loc="lower right")
    figure.tight_layout()
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(chosen.out, metadata={"Date": None})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
