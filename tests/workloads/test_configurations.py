"""Configurations of published models: parameters, layers that differ, and refused configurations."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest

from tunebench.errors import InputError
from tunebench.workloads.networks import NetworkRun, from_config, network
from tunebench.workloads.networks.architecture import Architecture
from tunebench.workloads.operators.attention import Attention
from tunebench.workloads.operators.gemm import Gemm

COUNTED: dict[str, tuple[dict[str, Any], float, float]] = {
    "Qwen2 0.5B": (
        {
            "model_type": "qwen2",
            "num_hidden_layers": 24,
            "hidden_size": 896,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
        494.03,
        494.03,
    ),
    "Qwen3 30B-A3B": (
        {
            "model_type": "qwen3_moe",
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
        },
        30532.12,
        3041.86,
    ),
    "Gemma 7B": (
        {
            "model_type": "gemma",
            "num_hidden_layers": 28,
            "hidden_size": 3072,
            "num_attention_heads": 16,
            "intermediate_size": 24576,
            "vocab_size": 256000,
        },
        8537.68,
        8537.68,
    ),
    "Gemma 2 27B": (
        {
            "model_type": "gemma2",
            "num_hidden_layers": 46,
            "hidden_size": 4608,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "intermediate_size": 36864,
            "vocab_size": 256000,
        },
        27227.13,
        27227.13,
    ),
    "Phi-3 mini": (
        {
            "model_type": "phi3",
            "num_hidden_layers": 32,
            "hidden_size": 3072,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "intermediate_size": 8192,
            "sliding_window": 2047,
        },
        3821.08,
        3722.58,
    ),
    "gpt-oss-20b": (
        {
            "model_type": "gpt_oss",
            "num_hidden_layers": 24,
            "hidden_size": 2880,
            "num_attention_heads": 64,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "vocab_size": 201088,
        },
        20914.76,
        3608.31,
    ),
    "Llama 4 Scout": (
        {
            "model_type": "llama4_text",
            "num_hidden_layers": 48,
            "hidden_size": 5120,
            "num_attention_heads": 40,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "interleave_moe_layer_step": 1,
            "vocab_size": 202048,
        },
        107769.86,
        16138.41,
    ),
    "DeepSeek-V2-Lite": (
        {
            "model_type": "deepseek_v2",
            "num_hidden_layers": 27,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "vocab_size": 102400,
        },
        15706.48,
        2451.44,
    ),
    "T5 1.1 base": (
        {
            "model_type": "t5",
            "num_layers": 12,
            "d_model": 768,
            "num_heads": 12,
            "d_kv": 64,
            "d_ff": 2048,
            "vocab_size": 32128,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
        },
        247.58,
        222.90,
    ),
}
"""Configurations with millions of parameters, in all and in the products of a token, as counted by this code.

Models' cards round them, and count embeddings of a token in other ways.
"""


@pytest.mark.parametrize(
    ("name", "billions", "active", "digits"),
    [
        ("gpt-oss-20b", 20.9, 3.6, 1),
        ("Llama 4 Scout", 108, 16, 0),
        ("gpt-oss-120b", 116.8, 5.1, 1),
        ("deepseek-v3", 671, 37, 0),
    ],
)
def test_parameters_round_to_those_published(name: str, billions: float, active: float, digits: int) -> None:
    """Source: gpt-oss model card, arXiv 2508.10925; DeepSeek-V3 technical report, arXiv 2412.19437."""
    model: Any = from_config(name, COUNTED[name][0]) if name in COUNTED else network(name)
    assert round(model.parameters() / 1e9, digits) == billions
    assert round(model.active_parameters() / 1e9, digits) == active


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_of_configurations_do_not_change(name: str) -> None:
    config, millions, active = COUNTED[name]
    model: Any = from_config(name, config)
    assert model.parameters() / 1e6 == pytest.approx(millions, abs=0.01)
    assert model.active_parameters() / 1e6 == pytest.approx(active, abs=0.01)


@pytest.mark.parametrize(
    ("name", "millions", "active"),
    [
        ("qwen2-7b", 7615.62, 7070.62),
        ("qwen3-8b", 8190.74, 7568.41),
        ("gemma-2-9b", 9241.71, 9241.71),
        ("gemma-3-1b", 999.89, 999.89),
        ("phi-4", 14659.51, 14145.70),
        ("mistral-7b", 7241.73, 7110.66),
        ("deepseek-v3", 671026.40, 36625.6),
        ("gpt-oss-120b", 116829.16, 5132.8),
        ("t5-base", 222.90, 222.90),
        ("vit-base-16", 86.57, 85.83),
    ],
)
def test_parameters_of_bundled_models_do_not_change(name: str, millions: float, active: float) -> None:
    model: Any = network(name)
    assert model.parameters() / 1e6 == pytest.approx(millions, abs=0.01)
    assert model.active_parameters() / 1e6 == pytest.approx(active, abs=0.05)


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("gemma-2-9b", (4096, 0, 4096, 0, 4096, 0, 4096)),
        ("gemma-3-1b", (512, 512, 512, 512, 512, 0, 512)),
        ("Llama 4 Scout", (8192, 8192, 8192, 0, 8192, 8192, 8192)),
        ("gpt-oss-120b", (128, 0, 128, 0, 128, 0, 128)),
        ("mistral-7b", (4096,) * 7),
        ("qwen2-7b", ()),
    ],
)
def test_windows_of_layers_follow_the_family(name: str, windows: tuple[int, ...]) -> None:
    model: Any = from_config(name, COUNTED[name][0]) if name in COUNTED else network(name)
    assert model.architecture.windows[:7] == windows


def attentions(name: str, seq: int, stack: Any) -> dict[int, int]:
    """Return the number of forward kernels of attention by their window."""
    run = NetworkRun(batch=1, seq=seq, mode="train", dtype="bf16", stack=stack, flash=True)
    counts: Counter[int] = Counter()
    for operation in network(name).operations(run):
        if isinstance(operation.workload, Attention) and operation.phase == "forward":
            counts[operation.workload.window] += operation.count
    return dict(counts)


@pytest.mark.parametrize("stack", ["compiled", "megatron"])
def test_only_layers_with_a_window_have_kernels_with_one(stack: str) -> None:
    assert attentions("gemma-2-9b", 8192, stack) == {4096: 21, 0: 21}
    assert attentions("gemma-3-1b", 8192, stack) == {512: 22, 0: 4}
    assert attentions("gemma-2-9b", 4096, stack) == {0: 42}  # windows of all keys are none


def test_layer_types_override_the_pattern_of_a_family() -> None:
    config = {**COUNTED["gpt-oss-20b"][0], "num_hidden_layers": 3}
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    assert Architecture.of({**config, "layer_types": kinds}).windows == (0, 128, 0)
    assert Architecture.of({**config, "sliding_window": None}).windows == ()
    qwen = {
        **COUNTED["Qwen2 0.5B"][0],
        "num_hidden_layers": 3,
        "sliding_window": 64,
        "max_window_layers": 2,
    }
    assert Architecture.of(qwen).windows == ()
    assert Architecture.of({**qwen, "use_sliding_window": True}).windows == (0, 0, 64)
    scout = {**COUNTED["Llama 4 Scout"][0], "num_hidden_layers": 3, "attention_chunk_size": 64}
    assert Architecture.of({**scout, "no_rope_layers": [1, 0, 1]}).windows == (64, 0, 64)
    kinds = ["full_attention", "chunked_attention", "full_attention"]
    assert Architecture.of({**scout, "layer_types": kinds}).windows == (0, 64, 0)


def test_eager_experts_of_llama4_see_all_tokens() -> None:
    scout: Any = from_config("scout", {**COUNTED["Llama 4 Scout"][0], "num_hidden_layers": 1})
    run = NetworkRun(batch=1, seq=1024, mode="train", dtype="bf16")
    flops = {
        stack: sum(
            operation.count * operation.workload.flops()
            for operation in scout.operations(dataclasses.replace(run, stack=stack))
            if operation.part in ("experts", "mlp up", "mlp down") and "gemm" in str(operation.workload)
        )
        for stack in ("eager", "megatron")
    }
    # 16 experts and the shared one, or the expert of each token and the shared one.
    assert flops["eager"] / flops["megatron"] == pytest.approx(17 / 2)


def test_first_layers_of_deepseek_are_dense_and_route_nothing() -> None:
    model: Any = network("deepseek-v3")
    assert [model.kind_of_layer(index) for index in range(5)] == [0, 0, 0, 3, 3]
    run = NetworkRun(batch=1, seq=4096, mode="train", dtype="bf16", stack="megatron", flash=True, expert=8)
    for layers, routed in (((0, 3), 0), ((2, 5), 2)):
        stage = dataclasses.replace(run, layers=layers)
        routers = [o for o in model.operations(stage) if o.part == "router" and o.phase == "forward"]
        assert bool(routers) == bool(routed)
        exchanged = [c for c in model.collectives(stage) if c.collective == "all-to-all"]
        assert sum(c.count for c in exchanged) == routed * 2 * 3
    per_expert = 3 * 7168 * 2048
    assert model.expert_parameters(1, (0, 5)) == 2 * 256 * per_expert
    queries = 7168 * 1536 + 1536 * 128 * 192
    keys_and_values = 7168 * (512 + 64) + 512 * 128 * (128 + 128)
    attention = queries + keys_and_values + 128 * 128 * 7168
    assert model.parameters(1, (1, 2)) == attention + 2 * 7168 + 1536 + 512 + 3 * 7168 * 18432


def test_latent_attention_multiplies_heads_of_two_sizes() -> None:
    model: Any = network("deepseek-v3")
    run = NetworkRun(batch=2, seq=512, layers=(1, 2), dtype="bf16")
    products: dict[str, Any] = {
        o.part: o.workload for o in model.operations(run) if isinstance(o.workload, Gemm)
    }
    assert products["attention scores"].k == 192
    assert products["attention values"].n == 128
    assert Architecture.of(COUNTED["DeepSeek-V2-Lite"][0]).query_latent == 0


def test_rotary_positions_do_not_limit_sequences() -> None:
    assert network("gemma-2-9b").operations(NetworkRun(batch=1, seq=65536, dtype="bf16", stack="compiled"))
    with pytest.raises(InputError, match="1024 positions; seq=2048"):
        network("gpt2").operations(NetworkRun(batch=1, seq=2048))


def test_images_have_a_sequence_of_their_own() -> None:
    model = network("vit-base-16")
    run = NetworkRun(batch=4, mode="train")
    assert model.operations(run) == model.operations(dataclasses.replace(run, seq=197))
    with pytest.raises(InputError, match="197 tokens"):
        model.operations(dataclasses.replace(run, seq=128))


def test_tensor_parallel_images_see_all_patches_and_have_whole_ends() -> None:
    model = network("vit-base-16")
    run = NetworkRun(batch=4, mode="train", stack="megatron", dtype="bf16", flash=True, tensor=2)
    works = [operation.workload for operation in model.operations(run)]
    assert {work.causal for work in works if isinstance(work, Attention)} == {False}
    heads = [work for work in works if isinstance(work, Gemm) and (work.m, work.n) == (4, 1000)]
    assert [work.k for work in heads] == [768]
    divided = model.parameters(1, (1, 11)) - model.parameters(2, (1, 11))
    assert model.parameters() - model.parameters(2) == divided * 12 // 10
    # The sums of two products of each layer in each pass; the embedding and the head have none.
    run = dataclasses.replace(run, seq=197)
    assert [(sent.part, sent.count) for sent in model.collectives(run)] == [
        ("layers", 24),
        ("attention qkv", 12),
        ("mlp up", 12),
    ]


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("Qwen2 0.5B", {"layer_types": ["linear_attention"]}, "unknown kind of layer of qwen2"),
        ("DeepSeek-V2-Lite", {"moe_layer_freq": 2}, "expected moe_layer_freq=1"),
        ("DeepSeek-V2-Lite", {"attention_bias": True}, "expected attention_bias=False"),
        ("Llama 4 Scout", {"interleave_moe_layer_step": 2}, "expected interleave_moe_layer_step=1"),
        ("Gemma 7B", {"model_type": "gemma3", "text_config": {}}, "several models"),
        ("Gemma 7B", {"model_type": "llama4"}, "unknown model_type 'llama4'"),
        ("Gemma 2 27B", {"sliding_window": "all"}, "sliding_window must be a whole number"),
        ("Gemma 2 27B", {"layer_types": ["full_attention"]}, "a window for each of 46 layers, got 1"),
        ("Gemma 2 27B", {"attn_logit_softcapping": -1}, "score_cap must be a number of at least 0"),
    ],
)
def test_layers_that_are_not_described_are_refused(name: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_config(name, {**COUNTED[name][0], **changed})
