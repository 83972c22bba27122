"""Draw the sample of the public measurements in this folder: `python tests/data/public/draw_sample.py DATA`.

Tables keep random rows of each group, recorded spaces random configurations and the fastest one. Files of a
few kilobytes are copied. Seeds are fixed and archives have no time stamp: the result is reproducible.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import shutil
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
ROWS, CONFIGURATIONS, FAILED = 240, 150, 15
COPIED = (
    "predict/LICENSE.neusight",
    "predict/LICENSE_NOTE.aiconfigurator.txt",
    "predict/neusight_device_configs/*.json",
    "predict/neusight_model_configs/*.json",
    "predict/neusight_models.csv",
    "recorded/LICENSE.*",
    "training/korthikanti_table5.csv",
    "training/sc21_table1.csv",
    "training/sc21_table2.csv",
)
GROUPS: dict[str, tuple[str, ...]] = {
    "neusight_ops": ("device", "op_group"),
    "library_gemm_a100_sxm": ("gemm_dtype",),
    "library_gemm_h100_sxm": ("gemm_dtype",),
    "library_gemm_b200_sxm": ("gemm_dtype",),
    "library_gemm_rtx_pro_6000": ("gemm_dtype",),
    "library_gemm_gb200": ("gemm_dtype",),
    "library_attention_a100_sxm": (),
    "library_attention_h100_sxm": (),
    "library_decode_attention_h100_sxm": (),
    "library_encoder_attention_h100_sxm": (),
    "library_moe_gb200": (),
}
"""Tables, each with the columns whose combinations have equal numbers of rows in the sample."""
RECORDED = ("convolution/RTX_2080_Ti", "convolution/RTX_3060_laptop", "gemm/RTX_2080_Ti", "gemm/RTX_3090")


def main(data: Path) -> None:
    """Write the sample of all files."""
    for pattern in COPIED:
        for path in data.glob(pattern):
            target = FOLDER / path.relative_to(data)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    for name, columns in GROUPS.items():
        draw_rows(data / "predict" / f"{name}.csv.gz", columns)
    for name in (*RECORDED, "dedispersion_milo/A100"):
        draw_configurations(data / "recorded" / f"{name}.json.gz")
    draw_configurations(
        data / "recorded/convolution_milo/A100.json.gz", data / "recorded/convolution_milo/A100_T4.json.gz"
    )
    header, *_ = (data / "training/vtrain_multi.csv").read_text().splitlines(keepends=True)
    (FOLDER / "training/vtrain_multi.csv").write_text(
        header
    )  # without rows: its licence is not among the data


def draw_rows(path: Path, columns: tuple[str, ...]) -> None:
    """Write random rows of a table, as many of each combination of the columns."""
    with gzip.open(path, "rt", newline="") as file:
        reader = csv.DictReader(file)
        names = reader.fieldnames or []
        groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
        for row in reader:
            groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    chance, text = random.Random(path.name), io.StringIO(newline="")
    count = ROWS // len(groups) if len(groups) < 10 else 20
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for rows in groups.values():
        writer.writerows(chance.sample(rows, min(count, len(rows))))
    compress(path, text.getvalue())


def draw_configurations(path: Path, results_path: Path | None = None) -> None:
    """Write random configurations of a recorded space and its fastest one, of both formats alike."""
    recorded = json.loads(gzip.decompress(path.read_bytes()))
    cache = recorded["cache"]
    ran = sorted((key for key in cache if is_time(cache[key]["time"])), key=lambda key: cache[key]["time"])
    failures: dict[str, list[str]] = {}
    for key in cache:
        if not is_time(cache[key]["time"]):
            failures.setdefault(cache[key]["time"], []).append(key)
    chance = random.Random(path.name)
    chosen = {*ran[:1], *chance.sample(ran, CONFIGURATIONS)}
    for keys in failures.values():
        chosen.update(chance.sample(keys, min(FAILED, len(keys))))
    recorded["cache"] = {key: entry for key, entry in cache.items() if key in chosen}
    compress(path, json.dumps(recorded))
    if results_path is not None:
        results = json.loads(gzip.decompress(results_path.read_bytes()))
        results["results"] = [
            result
            for result in results["results"]
            if ",".join(str(value) for value in result["configuration"].values()) in chosen
        ]
        assert len(results["results"]) == len(chosen), (len(results["results"]), len(chosen))
        compress(results_path, json.dumps(results))


def is_time(value: object) -> bool:
    """Return whether a recorded time is a number, not the name of a failure."""
    return isinstance(value, int | float)


def compress(path: Path, text: str) -> None:
    """Write a text under the name of its source, without a time stamp."""
    target = FOLDER / Path(*path.parts[-3 if path.suffixes[0] == ".json" else -2 :])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
