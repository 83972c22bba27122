"""Tiles and times of fused attention, and predicted times of attention with a sliding window."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tunebench import device, workloads
from tunebench.forecast import predict, predict_all
from tunebench.forecast.library.attention_backend import (
    BACKENDS,
    AttentionBackend,
    Tiles,
    backend_of,
    prompt_us,
    tiles_of,
)

FLASH_2 = BACKENDS["flash-attention-2"]
DEVICES = ("h100-sxm", "h200-sxm", "a100-80-sxm", "l40s", "b200", "b300", "rtx-pro-6000-server")
PROMPT = "attention:batch=2,heads=32,heads_k=8,head_dim=128,dtype=bf16,causal=true"


def tiles(*shapes: tuple[int, int, int, int]) -> Tiles:
    """Return the tiles of masks: queries, keys, whether causal, and window."""
    return tiles_of(FLASH_2, *np.array(shapes, dtype=np.float64).T)


def counted(queries: int, keys: int, causal: int, window: int) -> tuple[float, int]:
    """Return the mean and the largest number of tiles that some query of a block sees, by enumeration."""
    counts = []
    for start in range(0, queries, FLASH_2.rows):
        rows = np.arange(start, start + FLASH_2.rows)
        end = np.minimum(rows + 1 + keys - queries, keys) if causal else np.full(len(rows), keys)
        first = np.maximum(0, end - window) if window else np.zeros(len(rows), dtype=int)
        counts.append(-(-int(end.max()) // FLASH_2.columns) - int(first.min()) // FLASH_2.columns)
    return float(np.mean(counts)), max(counts)


@pytest.mark.parametrize(
    "shape",
    [
        (128, 128, 0, 0),
        (1024, 1024, 0, 0),
        (1024, 1024, 1, 0),
        (1024, 4096, 1, 0),  # a part of a prompt
        (1, 8192, 0, 0),
        (8192, 8192, 1, 128),
        (8192, 8192, 1, 1024),
        (1024, 1024, 1, 1024),
        (1024, 8192, 1, 512),
        (200, 300, 0, 0),
    ],
)
def test_tiles_are_those_that_some_query_of_a_block_sees(shape: tuple[int, int, int, int]) -> None:
    mean, longest = counted(*shape)
    found = tiles(shape)
    assert found.mean == pytest.approx(mean)
    assert found.longest == longest


@given(
    queries=st.integers(1, 9000),
    before=st.integers(0, 9000),
    window=st.integers(1, 20000),
    more=st.integers(0, 5000),
)
@settings(max_examples=200)
def test_tiles_grow_with_the_window_up_to_the_causal_mask(
    queries: int, before: int, window: int, more: int
) -> None:
    keys = queries + before
    found = tiles(*((queries, keys, 1, size) for size in (window, window + more, 0)))
    assert (np.diff(found.mean) >= -1e-9).all()
    assert (np.diff(found.longest) >= 0).all()
    assert (found.mean >= 1).all()
    mean, _ = counted(queries, keys, 1, window)
    assert found.mean[0] == pytest.approx(mean, abs=1.5)  # blocks that are not aligned cross one tile more


def causal_us(backend: AttentionBackend, on: device.Device, **sizes: float) -> float:
    usual = {"batch": 64, "heads": 32, "heads_k": 8, "seq_q": 8192, "seq_k": 8192, "head_dim": 128}
    figures: dict[str, Any] = usual | {"causal": 1, "window": 0, "bytes": 2, "products": 2} | sizes
    columns: dict[str, NDArray[np.float64]] = {name: np.array([value]) for name, value in figures.items()}
    rate = on.mma_flop_per_clock["bf16"]
    return float(prompt_us(backend, columns, rate, on, windows=True)[0])


def test_exponentials_take_time_that_products_do_not_hide() -> None:
    """Expect half of the exponentials of small heads on B200: twice their rate saves an eighth or more."""
    b200 = device.find("b200")
    doubled = dataclasses.replace(b200, sfu_per_clock=32)
    backend = backend_of(b200)
    small, large = (
        causal_us(backend, doubled, head_dim=dim) / causal_us(backend, b200, head_dim=dim)
        for dim in (64, 256)
    )
    assert 0.75 < small < 0.875
    assert small < large < 0.95
    assert device.find("b300").sfu_per_clock == 32


def test_flash_attention_2_takes_longer_on_hopper_than_3() -> None:
    """Expect 1.5 to 2 times, as published for long prompts (FlashAttention-3, 2024, abstract)."""
    hopper = device.find("h100-sxm")
    assert 1.4 < causal_us(FLASH_2, hopper) / causal_us(backend_of(hopper), hopper) < 2.1


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_long_prompts_take_what_their_scores_take(head_dim: int) -> None:
    for name in DEVICES:
        on = device.find(name)
        longer, usual = (
            causal_us(backend_of(on), on, seq_q=n, seq_k=n, head_dim=head_dim) for n in (65536, 32768)
        )
        assert 3.8 < longer / usual < 4.0


@pytest.mark.parametrize("name", DEVICES)
def test_predicted_times_grow_with_the_window_up_to_the_causal_mask(name: str) -> None:
    windows = (1, 64, 128, 512, 1024, 4096, 8191, 8192)
    texts = [f"{PROMPT},seq_q=8192,window={window}" for window in windows] + [f"{PROMPT},seq_q=8192"]
    time_us = predict_all(map(workloads.parse, texts), device.find(name)).time_us
    assert (np.diff(time_us) >= 0).all()
    assert time_us[2] < 0.3 * time_us[-1]
    assert time_us[-2] == time_us[-1]


@pytest.mark.parametrize("name", DEVICES)
def test_predicted_time_of_a_window_is_proportional_to_the_queries(name: str) -> None:
    texts = [f"{PROMPT},seq_q={n},window=128" for n in (16384, 32768, 65536)]
    time_us = predict_all(map(workloads.parse, texts), device.find(name)).time_us
    assert time_us[1:] / time_us[:-1] == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("name", DEVICES)
def test_decoding_reads_only_its_window(name: str) -> None:
    sizes = "attention:batch=16,heads=32,heads_k=8,seq_q=1,head_dim=128,dtype=bf16"
    windowed, fewer = (
        predict(workloads.parse(f"{sizes},{more}"), device.find(name))
        for more in ("causal=true,seq_k=65536,window=1024", "causal=true,seq_k=1024")
    )
    assert windowed.time_us == pytest.approx(fewer.time_us)
    assert windowed.bound_us == pytest.approx(fewer.bound_us)
