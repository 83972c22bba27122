"""Files for import tests: valid files of every format, and random corruption of them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gzip
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from tunebench import kernels
from tunebench.device import described
from tunebench.workloads import parse

__all__ = ["FORMATS", "NAMES", "ODD", "corrupt", "damage", "good", "places"]

FORMATS = ("kernel-tuner", "t4", "jsonl")

ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1e400, -0.0, 1e-320, 5e-324, 1e308, float("nan"), 10**40, 10**18, 2**63),
    *(2**31, 2**53, -(10**30), "", "x", "\ud800", "\0", "a,b", "a=b", "\x1b[2J", "../../etc/passwd", "=1+1"),
    *([], {}, [1], {"a": 1}, "us", "é", "\u202e", "A" * 3000, [[[[[[]]]]]], "9" * 400, 1.5, "1"),
    *("2026-01-31T12:00:00+00:00", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-12:00", "measured"),
    *("softmax:rows=0,cols=1,dtype=f32", "elementwise:rows=1,cols=1,dtype=f32,expression=" + "-" * 900 + "x"),
    *("recorded:kernel=k", "gemm:n=8,m=8,k=8,dtype=f32", "resnet50/conv1", "nothing:x=1"),
)
"""Values that replace valid ones."""

NAMES = ("a b", "workload", "\ud800", "b", "n" * 3000, "__class__", "what", "time", "kind", "", "reason")
TOKENS = (
    *(
        b"NaN",
        b"-Infinity",
        b"1e999",
        b'"\\ud800"',
        b"[" * 2000,
        b'{"a":' * 2000,
        b"9" * 5000,
        b"\0",
        b"\xff",
    ),
    *(b"\n", b"\r\n", b'"', b"\\", b"{", b"}", b"]", b",", b":", b"null", b"\xef\xbb\xbf", b"\xed\xa0\x80"),
    *(b"//", b'"cache":{', b'"results":[', b'{"what":"device"}\n', b"1" * 400, b"-", b"0.", b"e5"),
    b"\x1f\x8b\x08",
)


# -- valid files -----------------------------------------------------------------------------------


def _cache() -> dict[str, Any]:
    entries = [
        {"b": b, "m": m, "f": 0.5 * b, "time": 1.0 + b, "times": [1.0 + b, 2.0], "timestamp": "2023-12-22"}
        for b in (8, 16, 64)
        for m in "xy"
    ]
    entries[1] |= {"time": "CompilationFailedConfig", "times": []}
    entries[2] |= {"compile_time": 500.0, "benchmark_time": 3.0, "strategy_time": 1, "framework_time": 2.0}
    return {
        "kernel_name": "Xgemm",
        "device_name": "NVIDIA A100-PCIE-40GB",
        "problem_size": [64, 32],
        "tune_params_keys": ["b", "m", "f"],
        "tune_params": {"b": [64, 16, 8], "m": ["y", "x"], "f": [4.0, 8.0, 32.0]},
        "objective": "time",
        "cache": {f"{e['b']},{e['m']},{e['f']}": e for e in entries},
    }


def _t4() -> dict[str, Any]:
    results = [
        {
            "configuration": {"b": b, "m": "x"},
            "times": {"compilation": 1.0, "framework": 0.5, "runtimes": [1.0, 2.0]},
            "invalidity": "correct" if b else "compile",
            "correctness": 1,
            "timestamp": "2023-12-22",
            "measurements": [{"name": "time", "value": 1.5, "unit": "ms"}],
        }
        for b in range(4)
    ]
    metadata = {
        "timeunit": "ms",
        "kernel_name": "k",
        "device_name": "NVIDIA A100-PCIE-40GB",
        "problem_size": [4],
    }
    return {"metadata": metadata, "results": results, "schema_version": "1.0.0"}


_RIGHT = {"how": "reference", "detail": "all elements", "worst": 0.25}
_OUTCOMES: tuple[dict[str, Any], ...] = (
    {
        "kind": "measured",
        "median_us": 12.5,
        "ci_us": [12.25, 12.75],
        "samples_us": [12.5, 12.25, 12.75],
        "cache": "cold",
        "verification": _RIGHT,
        "conditions": {"sm_clock_mhz": 1980},
    },
    {"kind": "predicted", "predicted_us": 3.0, "verification": _RIGHT, "low_us": 2.0, "high_us": 4.0},
    {"kind": "aborted", "samples_us": [99.0, 98.5], "above_us": 20.0},
    {"kind": "pruned", "bound_us": 8.0, "incumbent_us": 7.0},
    {"kind": "compile_failed", "reason": "error: expected ';'", "refused": True},
    {"kind": "launch_failed", "reason": "too many resources", "refused": True},
    {"kind": "wrong_result", "reason": "y[0, 3] is 7, not 0.1"},
)


@functools.cache
def _lines() -> list[dict[str, Any]]:
    """Return a device and measurements, some of installed variants with their current revision."""
    device = described()["h100-sxm"]
    lines: list[dict[str, Any]] = [
        {"what": "device", "tunebench": "0.1.0", "key": device.key, **dataclasses.asdict(device)}
    ]
    texts = ("softmax:rows=64,cols=64,dtype=f32", "gemm:m=64,n=64,k=64,dtype=f16")
    spaces = [("softmax/example", texts[0], {"tile": 1, "ratio": 0.5, "order": "nk"}, "r1")]
    for key, text in (("softmax/cuda_block", texts[0]), ("gemm/cuda_mma", texts[1])):
        variant, workload = kernels.variant(key), parse(text)
        config = variant.default(workload, device)
        spaces.append((key, text, dict(config), variant.revision(workload, config)))
    for number, outcome in enumerate(_OUTCOMES):
        variant_key, text, values, revision = spaces[number % len(spaces)]
        lines.append(
            {
                "what": "measurement",
                "device": device.key,
                "workload": text,
                "variant": variant_key,
                "revision": revision,
                "config": values,
                "purpose": ("search", "finalist", "audit")[number % 3],
                "outcome": outcome,
                "resources": {"registers": 168, "spill_bytes": 0},
                "effort": {"compile_s": 0.25, "verify_s": 0.5, "measure_s": 0.125},
                "conditions": {"driver": "580.1", "host": "node7"},
                "bound_us": 2.5,
                "seed": 7,
                "recorded_at": f"2026-01-31T12:00:0{number}.000001+00:00",
                "versus_default": None,
                "comparison": {},
            }
        )
    return lines


def good(form: str) -> Any:
    """Return the content of a valid file of a format; for ``"jsonl"`` a list of lines."""
    makers: dict[str, Callable[[], Any]] = {"kernel-tuner": _cache, "t4": _t4, "jsonl": _lines}
    return copy.deepcopy(makers[form]())


def encoded(data: Any, rng: random.Random | None = None) -> bytes:
    """Return the bytes of a file; with `rng`, sometimes with a repeated name in an object."""
    lines = data if isinstance(data, list) else [data]
    return "\n".join(_json(line, rng) for line in lines).encode("utf-8", "surrogatepass")


def _json(value: Any, rng: random.Random | None) -> str:
    if isinstance(value, dict):
        items = [f"{json.dumps(name)}: {_json(item, rng)}" for name, item in value.items()]
        if rng is not None and items and rng.random() < 0.02:
            items.append(rng.choice(items))
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_json(item, rng) for item in value) + "]"
    return json.dumps(value, ensure_ascii=rng is None or rng.random() < 0.9)


# -- corruption ------------------------------------------------------------------------------------


def corrupt(rng: random.Random) -> bytes:
    """Return a corrupt file, chosen by the random number generator."""
    form = rng.choice(FORMATS)
    data = good(form)
    if rng.random() < 0.7:
        for _ in range(rng.randint(1, 4)):
            _change(data, rng)
    if isinstance(data, list):
        _shuffle(data, rng)
    text = encoded(data, rng)
    if rng.random() < 0.5:
        for _ in range(rng.randint(1, 3)):
            text = damage(text, rng)
    if rng.random() < 0.25:
        text = _compress(text, rng)
    return text


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in keys:
        yield data, key
        yield from places(data[key])


def _change(data: Any, rng: random.Random) -> None:
    """Delete, rename or replace one random value."""
    entries = list(places(data))
    if not entries:
        return
    holder, key = rng.choice(entries)
    choice = rng.random()
    if choice < 0.5:
        holder[key] = copy.deepcopy(rng.choice(ODD))
    elif choice < 0.65:
        elsewhere, other_key = rng.choice(entries)
        holder[key] = copy.deepcopy(elsewhere[other_key])
    elif choice < 0.75 and isinstance(holder[key], int | float):
        holder[key] = rng.choice((-1, 0, 1e-9, 1e9, 1e300, -1.0)) * holder[key]
    elif choice < 0.85 or isinstance(holder, list):
        del holder[key]
    elif choice < 0.95:
        holder[rng.choice(NAMES)] = holder.pop(key)
    else:
        holder[rng.choice(NAMES)] = copy.deepcopy(rng.choice(ODD))


def _shuffle(lines: list[Any], rng: random.Random) -> None:
    choice = rng.random()
    if choice < 0.1:
        rng.shuffle(lines)
    elif choice < 0.2 and lines:
        del lines[rng.randrange(len(lines))]
    elif choice < 0.4 and lines:
        lines.insert(rng.randint(0, len(lines)), copy.deepcopy(rng.choice(lines)))
    elif choice < 0.45:
        lines *= rng.randint(2, 100)


def damage(text: bytes, rng: random.Random) -> bytes:
    at, until = sorted(rng.randint(0, len(text)) for _ in range(2))
    match rng.randrange(7):
        case 0 if text:
            position = rng.randrange(len(text))
            return text[:position] + bytes([text[position] ^ 1 << rng.randrange(8)]) + text[position + 1 :]
        case 1:
            return text[:at]
        case 2:
            return text[:at] + text[min(until, at + rng.randint(1, 20)) :]
        case 3:
            return text[:at] + rng.choice(TOKENS) + text[at:]
        case 4:
            return text[:at] + encoded(good(rng.choice(FORMATS)))[rng.randint(0, 500) :]
        case 5:
            return text[:until] + text[at:]
    return text[:at] + rng.randbytes(rng.randint(1, 8)) + text[at:]


def _compress(text: bytes, rng: random.Random) -> bytes:
    choice = rng.random()
    if choice < 0.02:  # expands to much more than its size
        text += rng.choice((b" ", b"\n", b"1\n", b"0,", b"[", b"9", b'"')) * rng.choice((1 << 20, 1 << 24))
    packed = gzip.compress(text, 1, mtime=0)
    if choice < 0.5:
        return damage(packed, rng)
    if choice < 0.6:
        return packed + gzip.compress(encoded(good(rng.choice(FORMATS))), mtime=0)
    return packed
