"""Fuzzing of the files that describe models, devices, clusters, suites, stages and graphs.

    python -m tests.fuzz.foreign_files [--files 100000] [--seed 0] [--first 0] [--out DIR]

Files are valid ones whose values are exchanged for others of another type or size, whose tables are nested or
lose a name, and whose bytes are damaged. Each is read as a command reads it, and what it describes is used:
within the time limit it gives a result or a `TunebenchError` with a printable message of bounded length.

File N of a seed is always the same. Failing files are kept in DIR, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz import command
from tests.fuzz.corrupt_files import NAMES, ODD, damage, places
from tunebench import datasheet
from tunebench.device import find
from tunebench.errors import TunebenchError
from tunebench.forecast.network import predict_network
from tunebench.graph.node import Graph
from tunebench.training.cluster.machine import TrainingCluster
from tunebench.training.cluster.mixed_machine import MixedCluster, is_mixed
from tunebench.training.interconnect.cluster import cluster_from_file
from tunebench.training.pipeline.given import read_stages
from tunebench.workloads import suite
from tunebench.workloads.networks import NetworkRun, network

__all__ = ["KINDS", "fuzz", "written"]

TIME_LIMIT_S = 20.0
"""Time limit of one file, on a busy machine."""

LONGEST_MESSAGE = 3000
"""Longest message of a refusal, in characters."""

_LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_RESNET = {"model_type": "resnet", "depths": [1, 1], "hidden_sizes": [64, 128], "image_size": 32}
_SWITCH = {
    "model_type": "switch_transformers",
    "num_layers": 2,
    "d_model": 64,
    "num_heads": 4,
    "vocab_size": 99,
}
_SWITCH |= {"num_experts": 4, "num_sparse_encoder_layers": 1, "d_ff": 64}
_LIST = {
    "operation": [{"workload": "gemm:m=8,n=8,k=8,dtype=f32", "count": 3, "part": "first", "scales": "m"}]
}
_DEVICE = {
    "name": "my gpu",
    "sm_count": 100,
    "boost_mhz": 1500,
    "memory_gb_s": 1000,
    "memory_gb": 40,
    "l2_mb": 40,
    "tdp_w": 300,
    "architecture": "sm_90",
    "tflops": {"fp32": 40, "fp16": 300},
}
_LINKS = {"inside": "nvlink4", "between": {"gb_s": 50, "latency_us": 2.5}, "devices_per_node": 8, "nodes": 2}
_CLUSTER = {
    "product": "h100-sxm",
    "memory": "70GB",
    "price_per_hour": 2.5,
    "host_memory": "1TB",
    "host_gb_s": 400,
    **_LINKS,
}
_GROUPS = {
    "group": [{"product": "h100-sxm", "nodes": 2}, {"product": "a100-sxm-80", "nodes": 1}],
    "between": "net-400",
}
_SUITE = {"layer": {"first": {"workload": "gemm:m=8,n=8,k=8,dtype=f32", "count": 2, "scales": "m"}}}
_STAGES = {
    "ranks": 2,
    "stage": [{"forward_us": 10, "backward_us": 20, "activation_bytes": "1MB", "count": 4}],
    "interconnect": {"link": "nvlink4", "ranks_per_node": 2},
}
_GRAPH = {
    "format": 1,
    "name": "g",
    "phase": "inference",
    "values": [{"name": name, "shape": [4, 4], "dtype": "f32", "inner": 4} for name in "ab"],
    "nodes": [
        {
            "name": "n",
            "target": "aten.relu",
            "reads": ["a"],
            "writes": ["b"],
            "workloads": [],
            "joins": [],
            "roles": {},
            "expression": "max(a, 0)",
            "operands": {
                "a": {"value": "a", "place": "strided", "index": {"shape": [4], "strides": [1], "start": 0}}
            },
        }
    ],
    "outputs": ["b"],
}


def _predict(path: str, seq: int = 8) -> None:
    run = NetworkRun(batch=1, seq=seq, mode="infer", dtype="f16", optimizer="none")
    predict_network(network(path), find("h100-sxm"), run)


def _cluster(path: str) -> None:
    (MixedCluster if is_mixed(path) else TrainingCluster).read(path)


KINDS: dict[str, tuple[dict[str, Any], str, Callable[[str], object]]] = {
    "llama": (_LLAMA, "json", _predict),
    "switch": (_SWITCH, "json", _predict),
    "resnet": (_RESNET, "json", partial(_predict, seq=0)),
    "list": (_LIST, "json", partial(_predict, seq=0)),
    "device": (_DEVICE, "json", datasheet.read),
    "device in TOML": (_DEVICE, "toml", datasheet.read),
    "links": (_LINKS, "toml", cluster_from_file),
    "cluster": (_CLUSTER, "toml", _cluster),
    "groups": (_GROUPS, "toml", _cluster),
    "suite": (_SUITE, "toml", lambda path: suite(Path(path))),
    "stages": (_STAGES, "json", read_stages),
    "graph": (_GRAPH, "json", Graph.load),
}
"""A valid content, the suffix and the reader of each kind of file."""

_NESTED = ("[" * 3000, "[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000)


def written(folder: Path, kind: str, content: Any) -> Path:
    """Write a valid content as a file of its kind, and return the file."""
    suffix = KINDS[kind][1]
    path = folder / f"file.{suffix}"
    text = json.dumps(content) if suffix == "json" else _toml(content)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


def _toml(table: Any) -> str:
    return "".join(f"{json.dumps(str(name))} = {_toml_value(value)}\n" for name, value in table.items())


def _toml_value(value: Any) -> str:
    match value:
        case dict():
            return "{" + ", ".join(f"{json.dumps(str(n))} = {_toml_value(v)}" for n, v in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_toml_value, value)) + "]"
        case float():
            return repr(value).replace("nan", "nan")
        case None:
            return '"none"'
    return json.dumps(value)


def _corrupt(folder: Path, rng: random.Random) -> tuple[str, Path]:
    kind = rng.choice(list(KINDS))
    content = copy.deepcopy(KINDS[kind][0])
    for _ in range(rng.randint(0, 3)):
        where = [*places(content)]
        if not where:
            break
        container, key = rng.choice(where)
        if rng.random() < 0.15 and isinstance(container, dict):
            del container[key]
        elif rng.random() < 0.1 and isinstance(container, dict):
            container[rng.choice(NAMES)] = container.pop(key)
        else:
            container[key] = copy.deepcopy(rng.choice((*ODD, 0, -1, 2**30, 10**6, "4096", 1e-300)))
    path = written(folder, kind, content)
    if rng.random() < 0.3:
        data = path.read_bytes()
        nested = rng.choice(_NESTED).encode() if rng.random() < 0.3 else None
        path.write_bytes(damage(data, rng) if nested is None else data.replace(b"4", nested, 1))
    return kind, path


def _outcome(kind: str, path: Path) -> str:
    try:
        KINDS[kind][2](str(path))
    except TunebenchError as error:
        text = str(error)
        assert text
        assert len(text) < LONGEST_MESSAGE, f"a message of {len(text)} characters: {text[:200]}"
        return "refused"
    return "read"


def fuzz(folder: Path, seed: int, numbers: range, failed: Path | None = None) -> Counter[str]:
    """Read corrupt files and count their outcomes; failures are printed.

    Args:
        folder: Folder for the files.
        seed: Seed of the files.
        numbers: Numbers of the files.
        failed: Folder that keeps the failing files; None keeps none.

    Returns:
        Number of files by outcome: read, refused, failed.
    """
    last: dict[str, Path] = {}

    def check(number: int) -> list[str]:
        kind, path = _corrupt(folder, random.Random(f"{seed}:{number}"))
        last.clear()
        last[kind] = path
        return [_outcome(kind, path)]

    def fail(number: int) -> str:
        (kind, path) = next(iter(last.items()))
        if failed is not None:
            failed.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, failed / f"{seed}-{number}{path.suffix}")
        return f"file {number} of seed {seed} ({kind})"

    return command.count_outcomes(numbers, check, fail, limit_s=TIME_LIMIT_S)


def _fuzz(folder: Path, arguments: argparse.Namespace) -> Counter[str]:
    return fuzz(folder, arguments.seed, arguments.numbers, arguments.out)


main = partial(command.main, __doc__, "files", 100_000, _fuzz, keeps=True)

if __name__ == "__main__":
    sys.exit(main())
