"""Parameters and products of published models of every family, and configurations that are refused."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

from tunebench.errors import InputError, UnknownName
from tunebench.workloads.networks import NetworkRun, from_config
from tunebench.workloads.networks._config_keys import KEYS, UNDESCRIBED, Family
from tunebench.workloads.operators.attention import Attention
from tunebench.workloads.operators.gemm import Gemm

MODELS: list[dict[str, Any]] = tomllib.loads(
    (Path(__file__).parents[1] / "data" / "published_models.toml").read_text(encoding="utf-8")
)["model"]


def config_of(model: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a model, in which TOML has no null."""
    return {key: None if value == "null" else value for key, value in model["config"].items()}


CONFIGS = {model["name"]: config_of(model) for model in MODELS}
DENSE = [name for name, config in CONFIGS.items() if not any("expert" in key for key in config)]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["name"])
def test_parameters_are_those_that_transformers_counts(model: dict[str, Any]) -> None:
    assert from_config(model["name"], config_of(model)).parameters() == model["parameters"]


def test_every_family_has_a_published_model() -> None:
    assert {config["model_type"] for config in CONFIGS.values()} | {"llama4_text"} == set(get_args(Family))
    assert not set(KEYS) & set(UNDESCRIBED)


@pytest.mark.parametrize("name", DENSE)
def test_products_have_two_flops_for_each_parameter_and_token(name: str) -> None:
    batch, seq = 2, 64
    model: Any = from_config(name, CONFIGS[name])
    sizes = model.architecture
    seq = sizes.tokens or seq
    run = NetworkRun(batch=batch, seq=seq, mode="infer", dtype="bf16")
    products = sum(
        operation.count * operation.workload.flops()
        for operation in model.operations(run)
        if isinstance(operation.workload, Gemm) and operation.part not in ("head", "embedding")
    )
    attentions = sum(model.attentions_of(index) for index in range(model.layers))
    scores = 4 * batch * seq * seq * sizes.heads * sizes.attention_dim * attentions
    assert products == 2 * batch * seq * model.matrix_parameters() + scores


@pytest.mark.parametrize("name", CONFIGS)
def test_longer_contexts_and_scaled_rotations_have_the_same_layers(name: str) -> None:
    config = CONFIGS[name]
    if config["model_type"] in ("gpt2", "opt", "bert", "vit", "bart", "mbart"):
        pytest.skip("learned positions")
    scaled = {
        **config,
        "max_position_embeddings": 1 << 20,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    }
    run = NetworkRun(batch=1, seq=1 << 14, dtype="bf16", stack="compiled", layers=(0, 2))
    model, longer = from_config(name, config), from_config(name, scaled)
    assert model.parameters() == longer.parameters()
    assert model.operations(run) == longer.operations(run)


@pytest.mark.parametrize("model_type", UNDESCRIBED)
def test_models_of_other_layers_are_refused_with_the_reason(model_type: str) -> None:
    with pytest.raises(InputError, match=f"{model_type} has .*, which no family here describes"):
        from_config("other", {"model_type": model_type, "hidden_size": 512})


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        (
            "bert-base",
            {"position_embedding_type": "relative_key"},
            "expected position_embedding_type=absolute",
        ),
        ("bert-base", {"is_decoder": True}, "expected is_decoder=False"),
        ("gpt2", {"add_cross_attention": True}, "expected add_cross_attention=False"),
        ("opt-350m", {"enable_bias": False}, "expected enable_bias=True"),
        ("DeepSeek-V2-Lite", {"mlp_bias": True}, "expected mlp_bias=False"),
        ("Gemma 3 1B", {"use_bidirectional_attention": True}, "expected use_bidirectional_attention=False"),
        ("Phi-2", {"qk_layernorm": True}, "expected qk_layernorm=False"),
        ("Command R 35B", {"use_qk_norm": True}, "expected use_qk_norm=False"),
        ("T5 base", {"is_encoder_decoder": False}, "expected is_encoder_decoder=True"),
        ("BART base", {"normalize_before": True}, "expected normalize_before=False"),
        ("mBART-50 large", {"normalize_before": False}, "expected normalize_before=True"),
        (
            "BART base",
            {"decoder_ffn_dim": 1024},
            "expected decoder_ffn_dim to be encoder_ffn_dim, 3072, got 1024",
        ),
        ("BART base", {"encoder_layers": None}, "must have encoder_layers"),
        ("Switch base 8", {"tie_word_embeddings": False}, "expected tie_word_embeddings=True"),
        ("Llama 3.1 8B", {"intermediate_size": None}, "must have intermediate_size"),
    ],
)
def test_keys_that_change_parameters_are_read_or_refused(
    name: str, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        from_config(name, {**CONFIGS[name], **changed})


def test_spellings_and_defaults_are_those_of_transformers() -> None:
    def parameters(name: str, **changed: Any) -> int:
        return from_config(name, {**CONFIGS[name], **changed}).parameters()

    # transformers 5 writes num_local_experts for Qwen3-MoE, and latent attention has all heads of keys.
    config = {**CONFIGS["Qwen3 30B-A3B"], "num_local_experts": 128}
    del config["num_experts"]
    assert from_config("qwen", config).parameters() == parameters("Qwen3 30B-A3B")
    assert parameters("DeepSeek-V2-Lite", num_key_value_heads=2) == parameters("DeepSeek-V2-Lite")
    assert parameters("Qwen3 30B-A3B", attention_bias=True) - parameters("Qwen3 30B-A3B") == 48 * (
        5120 + 2048
    )
    assert parameters("Qwen1.5-MoE A2.7B") - parameters("Qwen1.5-MoE A2.7B", qkv_bias=False) == 24 * 3 * 2048
    vit = "ViT-B/16 of 21,843 classes"
    assert parameters(vit) - parameters(vit, qkv_bias=False) == 12 * 3 * 768
    assert parameters(vit, num_labels=None) == parameters(vit, num_labels=2)
    assert parameters(vit, num_labels=None, id2label={str(i): "" for i in range(10)}) == parameters(
        vit, num_labels=10
    )
    with pytest.raises(UnknownName, match="model_type 'lama'"):
        from_config("other", {"model_type": "lama"})


@pytest.mark.parametrize("name", ["OLMo 2 7B", "OLMoE 7B"])
def test_layers_that_megatron_has_no_kernels_for_are_refused(name: str) -> None:
    run = NetworkRun(batch=1, seq=128, mode="train", dtype="bf16", stack="megatron", flash=True)
    with pytest.raises(InputError, match="use the stack eager or compiled"):
        from_config(name, CONFIGS[name]).operations(run)


def test_the_decoder_of_bart_has_one_causal_attention_and_one_to_the_encoder() -> None:
    """Eager and compiled stacks; the kernels of Megatron-LM are not described."""
    model: Any = from_config("DistilBART", CONFIGS["DistilBART 12-6"])
    run = NetworkRun(batch=2, seq=64, dtype="bf16", stack="compiled")
    kinds = {
        operation.workload.causal: operation.count
        for operation in model.operations(run)
        if isinstance(operation.workload, Attention)
    }
    assert kinds == {True: 6, False: 12 + 6}
    with pytest.raises(InputError, match="known for the stacks eager and compiled"):
        model.operations(NetworkRun(batch=2, seq=64, dtype="bf16", stack="megatron"))
    with pytest.raises(InputError, match="1024 positions"):
        model.operations(NetworkRun(batch=2, seq=1025))
