"""Predicted generation of text: kernels of a pass with a cache, memory, and times near published ones."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tunebench import device
from tunebench.errors import InputError
from tunebench.forecast.network import predict_network
from tunebench.training.cluster.generation import Generation, generation_memory, predict_generation
from tunebench.workloads.networks import NetworkRun, from_config, network
from tunebench.workloads.operators.attention import Attention
from tunebench.workloads.operators.gemm import Gemm
from tunebench.workloads.operators.grouped_gemm import GroupedGemm

SERVING: dict[str, Any] = {"dtype": "bf16", "stack": "compiled", "cuda_graphs": True}
EAGER: dict[str, Any] = {"dtype": "bf16"}
H100 = device.find("h100-sxm")


def generated(
    model: str, on: str, *, batch: int = 1, prompt: int = 1024, output: int = 128, tensor: int = 1
) -> Generation:
    run = NetworkRun(batch=batch, seq=prompt, **SERVING)
    return predict_generation(network(model), device.find(on), run, output, tensor=tensor)


def test_a_pass_with_a_cache_reads_all_keys_and_has_logits_of_the_last_token() -> None:
    model = network("llama-3-8b")
    (decode,), (prefill,) = (
        {operation.workload for operation in model.operations(run) if operation.part == "attention"}
        for run in (
            NetworkRun(batch=4, seq=1, cached=2047, **SERVING),
            NetworkRun(batch=4, seq=2048, cached=0, **SERVING),
        )
    )
    assert isinstance(decode, Attention)
    assert isinstance(prefill, Attention)
    assert (decode.seq_q, decode.seq_k, decode.heads_k, decode.causal) == (1, 2048, 8, False)
    assert (prefill.seq_q, prefill.seq_k, prefill.causal) == (2048, 2048, True)
    heads = {
        operation.workload
        for operation in model.operations(NetworkRun(batch=4, seq=2048, cached=0, **SERVING))
        if operation.part == "head"
    }
    assert [work.m for work in heads if isinstance(work, Gemm)] == [4]


def test_serving_joins_products_of_the_same_input_and_eager_concatenates_the_cache() -> None:
    model = network("llama-3-8b")
    counts = {}
    for name, kind in (("serving", SERVING), ("eager", EAGER)):
        operations = model.operations(NetworkRun(batch=2, seq=1, cached=99, **kind))
        counts[name] = Counter[str]()
        for operation in operations:
            if isinstance(operation.workload, Gemm) or operation.part == "attention cache":
                counts[name][operation.part] += operation.count
        cache_bytes = sum(
            operation.count * operation.workload.traffic().write_bytes
            for operation in operations
            if operation.part == "attention cache"
        )
        tokens = 1 if name == "serving" else 100
        assert cache_bytes == 32 * 2 * tokens * 2 * 8 * 128 * 2  # layers, sequences, keys and values, bf16
    assert counts["serving"]["attention qkv"] == counts["serving"]["mlp up"] == 32
    assert (counts["eager"]["attention qkv"], counts["eager"]["mlp up"]) == (96, 64)


def test_a_window_limits_the_keys_of_a_pass_and_the_cache() -> None:
    model = network("gemma-2-9b")  # windows of 4096 in every other layer
    keys = Counter[int]()
    for operation in model.operations(NetworkRun(seq=1, cached=8191, **SERVING)):
        if isinstance(operation.workload, Attention):
            keys[operation.workload.seq_k] += operation.count
    assert keys == {4096: 21, 8192: 21}
    memory = generation_memory(model, NetworkRun(batch=3, seq=8000, **SERVING), 193)
    assert memory.cache == 3 * 21 * (4096 + 8192) * 2 * 8 * 256 * 2


def test_only_experts_with_tokens_are_read() -> None:
    model = network("mixtral-8x7b")
    groups = []
    for batch in (1, 64):
        operations = model.operations(NetworkRun(batch=batch, seq=1, cached=99, **SERVING))
        grouped = {op.workload for op in operations if isinstance(op.workload, GroupedGemm)}
        groups.append({(work.most_filled, work.m) for work in grouped})
    assert groups == [{(2, 2)}, {(8, 128)}]


def test_memory_is_that_of_weights_and_keys_divided_among_devices() -> None:
    model, run = network("llama-3-70b"), NetworkRun(batch=16, seq=1000, **SERVING)
    alone, divided = (generation_memory(model, run, 25, tensor=tensor) for tensor in (1, 8))
    assert alone.weights == model.parameters() * 2
    assert alone.cache == 16 * 1024 * 80 * 2 * 8 * 128 * 2
    assert divided.cache * 8 == alone.cache
    assert alone.needed == alone.weights + alone.cache + alone.working + alone.context
    narrow = generation_memory(model, NetworkRun(batch=16, seq=1000, fp8="delayed", **SERVING), 25)
    assert narrow.weights == alone.weights - model.matrix_parameters()
    assert not alone.verdict(H100) or alone.verdict(H100).name == "does not fit"  # type: ignore[union-attr]
    assert divided.verdict(H100).name == "fits"  # type: ignore[union-attr]


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    most = generated("llama-3-8b", "h100-sxm").most_sequences
    assert most
    usable = H100.usable_memory_bytes
    needed = [
        generation_memory(network("llama-3-8b"), NetworkRun(batch=batch, seq=1024, **SERVING), 128).needed
        for batch in (most, most + 1)
    ]
    assert needed[0] <= usable < needed[1]


def test_the_whole_is_the_first_token_and_all_others() -> None:
    generation = generated("llama-3-8b", "h100-sxm", batch=2, output=11)
    assert generation.time_us == generation.prefill.time_us + 10 * generation.decode.time_us
    assert generation.low_us <= generation.time_us <= generation.high_us
    assert (generation.batch, generation.prompt, generation.tokens) == (2, 1024, 22)
    assert generation.decode.run.cached == 1029  # halfway


PUBLISHED_MS = (
    # Time of a token of batch 1. Bounds are wide on purpose; none of these figures is fitted.
    ("llama-2-7b", "a100-80-sxm", 1, 9.5),  # gpt-fast
    ("llama-3-8b", "h100-sxm", 1, 6.5),  # serving engines: 5.5 to 7.5
    ("llama-3-8b", "rtx-4090", 1, 18.0),
    ("llama-3-70b", "a100-80-sxm", 4, 26.3),  # gpt-fast, Llama 2
    ("llama-3-70b", "h100-sxm", 8, 12.0),
)


@pytest.mark.parametrize(("model", "on", "tensor", "ms"), PUBLISHED_MS)
def test_times_of_a_token_are_near_published_ones(model: str, on: str, tensor: int, ms: float) -> None:
    decode = generated(model, on, prompt=256, output=2, tensor=tensor).decode
    assert ms / 1.4 < decode.time_us / 1e3 < ms * 1.4
    reads_ms = network(model).parameters(tensor) * 2 / (device.find(on).dram_gb_s * 1e6)
    assert decode.time_us / 1e3 > 0.95 * reads_ms  # all weights are read once


def test_more_sequences_and_longer_caches_take_longer() -> None:
    times = [
        predict_network(
            network("llama-3-8b"), H100, NetworkRun(batch=batch, seq=1, cached=cached, **SERVING)
        ).time_us
        for batch, cached in ((1, 128), (1, 4096), (16, 4096), (64, 4096), (64, 16384))
    ]
    assert times == sorted(times)
    assert times[3] < 8 * times[0]  # a batch reads the weights once


@pytest.mark.parametrize("model", ["bert-base", "vit-base-16", "t5-base", "deepseek-v3"])
def test_networks_without_a_described_cache_are_refused(model: str) -> None:
    run = NetworkRun(batch=1, seq=0 if "vit" in model else 16, cached=0, **SERVING)
    with pytest.raises(InputError, match="a cache of keys and values is described for decoders"):
        network(model).operations(run)


@pytest.mark.parametrize("kind", [{"mode": "train"}, {"stack": "megatron"}, {"context": 2, "flash": True}])
def test_runs_that_have_no_cache_are_refused(kind: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="a cache of keys and values needs mode=infer"):
        NetworkRun(batch=1, seq=16, cached=0, **kind)
    with pytest.raises(InputError, match="0 tokens or more"):
        NetworkRun(batch=1, seq=16, cached=-1)


def test_tokens_and_positions_are_limited() -> None:
    with pytest.raises(InputError, match="1 token or more"):
        predict_generation(network("gpt2"), H100, NetworkRun(seq=16, **SERVING), 0)
    with pytest.raises(InputError, match="1024 positions"):
        predict_generation(network("gpt2"), H100, NetworkRun(seq=1000, **SERVING), 26)
    assert predict_generation(network("gpt2"), H100, NetworkRun(seq=1000, **SERVING), 25).tokens == 25


def test_families_with_one_norm_or_separate_products_generate() -> None:
    gptj = {"model_type": "gptj", "n_embd": 512, "n_layer": 2, "n_head": 4, "n_positions": 128}
    for model in (from_config("gptj", {**gptj, "vocab_size": 1000, "rotary_dim": 64}), network("opt-125m")):
        for kind in (SERVING, EAGER):
            generation = predict_generation(model, H100, NetworkRun(seq=16, **kind), 4)
            assert 0 < generation.decode.time_us <= generation.prefill.time_us * 1.5


def test_a_serving_stack_sums_short_tensors_by_its_own_kernels() -> None:
    """Without a division there is nothing to sum; long prompts are summed by NCCL."""
    model, on = network("llama-2-7b"), device.find("a100-80-sxm")

    def timed(stack: str, tensor: int, prompt: int = 5) -> Generation:
        run = NetworkRun(batch=1, seq=prompt, **(SERVING | {"stack": stack}))
        return predict_generation(model, on, run, 200, tensor=tensor)

    assert timed("serving", 1).time_us == timed("compiled", 1).time_us
    fast, usual = timed("serving", 8), timed("compiled", 8)
    assert 0.7 < fast.decode.time_us / usual.decode.time_us < 0.9
    assert timed("serving", 8, 3000).prefill.time_us == timed("compiled", 8, 3000).prefill.time_us
