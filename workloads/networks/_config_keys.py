"""Keys of HuggingFace's configurations by model code, and the defaults of its configuration classes.

Source: transformers 4.57, `models/*/configuration_*.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

__all__ = ["COMMON", "DEFAULTS", "KEYS", "PHASED_WINDOWS", "UNDESCRIBED", "WINDOWS", "Family"]

Family = Literal[
    "gpt2",
    "opt",
    "bert",
    "vit",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "llama4_text",
    "deepseek_v2",
    "deepseek_v3",
    "phi",
    "gpt_neox",
    "gptj",
    "stablelm",
    "starcoder2",
    "cohere",
    "nemotron",
    "olmo",
    "olmo2",
    "granite",
    "smollm3",
    "seed_oss",
    "ministral",
    "arcee",
    "glm",
    "glm4",
    "hunyuan_v1_dense",
    "ernie4_5",
    "olmoe",
    "granitemoe",
    "granitemoeshared",
    "switch_transformers",
    "t5",
    "mt5",
    "bart",
    "mbart",
]

UNDESCRIBED: Mapping[str, str] = {
    **dict.fromkeys(
        ("mamba", "mamba2", "falcon_mamba", "rwkv", "jamba", "bamba", "zamba", "zamba2", "recurrent_gemma"),
        "layers that carry a state from token to token",
    ),
    **dict.fromkeys(
        ("nemotron_h", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "qwen3_next", "minimax"),
        "layers that carry a state from token to token beside those of attention",
    ),
    **dict.fromkeys(
        ("pegasus", "marian", "blenderbot", "m2m_100", "plbart", "led"),
        "an encoder and a decoder of another kind than those of T5 and BART",
    ),
    "whisper": "an encoder of sounds, whose length is not that of the decoder",
    **dict.fromkeys(("umt5", "longt5", "t5gemma"), "another attention or other normalisations than T5"),
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "camembert", "distilbert", "electra", "albert", "deberta", "deberta-v2"),
        "an encoder of other embeddings or another head than BERT",
    ),
    "modernbert": "an encoder of gated layers",
    **dict.fromkeys(
        ("swin", "convnext", "deit", "beit", "dinov2"), "another network of images than ViT and ResNet"
    ),
    **dict.fromkeys(("falcon", "bloom", "mpt"), "linear biases of positions or a normalised embedding"),
    **dict.fromkeys(
        ("dbrx", "phimoe", "jetmoe"), "another attention or other normalisations beside its experts"
    ),
    **dict.fromkeys(("glm4_moe", "dots1", "ernie4_5_moe", "longcat_flash"), "experts in some layers only"),
}
"""Why a well-known `model_type` is refused: what it has that no family here describes."""

WINDOWS: Mapping[str, int | None] = {
    "mistral": 4096,
    "ministral": 4096,
    "mixtral": None,
    "phi3": None,
    "qwen2": 4096,
    "qwen3": 4096,
    "qwen2_moe": 4096,
    "qwen3_moe": 4096,
    "smollm3": None,
    "starcoder2": None,
    "gemma2": 4096,
    "gemma3_text": 4096,
    "gpt_oss": 128,
    "llama4_text": 8192,
}
"""Default of `sliding_window` in the families that have it; Qwen's also need `use_sliding_window`.

Llama 4 has `attention_chunk_size` in its place: a query sees the keys of its chunk, at most as many."""

PHASED_WINDOWS: Mapping[str, tuple[bool, ...]] = {
    "gemma2": (True, False),
    "gemma3_text": (True, True, True, True, True, False),
    "gpt_oss": (True, False),
    "llama4_text": (True, True, True, False),
}
"""Which of successive layers have a sliding window, in families that alternate; the pattern repeats."""

_LLAMA: Mapping[str, tuple[str, ...]] = {
    "heads_k": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "activation": ("hidden_act",),
    "attention_dropout": ("attention_dropout",),
    "eps": ("rms_norm_eps",),
}
_EXPERTS = ("num_experts", "num_local_experts")
"""Spellings of the number of experts, which differ by the version of transformers that wrote the file."""

_BIASED_PRODUCTS: Mapping[str, tuple[str, ...]] = {**_LLAMA, "biased_qkv": ("attention_bias",)}
_BIASED_ATTENTION: Mapping[str, tuple[str, ...]] = {**_BIASED_PRODUCTS, "output_bias": ("attention_bias",)}
_BIASED_LAYERS: Mapping[str, tuple[str, ...]] = {**_BIASED_ATTENTION, "mlp_bias": ("mlp_bias",)}
_GEMMA: Mapping[str, tuple[str, ...]] = {**_BIASED_ATTENTION, "activation": ("hidden_activation",)}
_DEEPSEEK: Mapping[str, tuple[str, ...]] = {
    **_LLAMA,
    "heads_k": (),  # latent attention has keys and values for every head, whatever num_key_value_heads says
    "head_dim": (),
    "ffn": ("moe_intermediate_size",),
    "experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "shared_experts": ("n_shared_experts",),
    "expert_groups": ("n_group",),
    "groups_per_token": ("topk_group",),
    "dense_layers": ("first_k_dense_replace",),
    "dense_ffn": ("intermediate_size",),
    "query_latent": ("q_lora_rank",),
    "key_latent": ("kv_lora_rank",),
    "rotary_dim": ("qk_rope_head_dim",),
    "plain_dim": ("qk_nope_head_dim",),
    "value_dim": ("v_head_dim",),
}
_QWEN: Mapping[str, tuple[str, ...]] = {
    **_LLAMA,
    "ffn": ("moe_intermediate_size",),
    "experts": _EXPERTS,
    "experts_per_token": ("num_experts_per_tok",),
}
_GRANITE: Mapping[str, tuple[str, ...]] = {
    **_BIASED_ATTENTION,
    "experts": _EXPERTS,
    "experts_per_token": ("num_experts_per_tok",),
    "shared_ffn": ("shared_intermediate_size",),
}
_T5: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_layers",),
    "decoder_layers": ("num_decoder_layers",),
    "hidden": ("d_model",),
    "heads": ("num_heads",),
    "head_dim": ("d_kv",),
    "ffn": ("d_ff",),
    "dropout": ("dropout_rate",),
    "attention_dropout": ("dropout_rate",),
    "buckets": ("relative_attention_num_buckets",),
    "eps": ("layer_norm_epsilon",),
    "positions": (),
}
_BART: Mapping[str, tuple[str, ...]] = {
    "layers": ("encoder_layers",),
    "decoder_layers": ("decoder_layers",),
    "hidden": ("d_model",),
    "heads": ("encoder_attention_heads",),
    "ffn": ("encoder_ffn_dim",),
    "activation": ("activation_function",),
    "dropout": ("dropout",),
    "attention_dropout": ("attention_dropout",),
    "scaled_embedding": ("scale_embedding",),
}
_GPT2 = {
    "layers": ("n_layer", "num_hidden_layers"),
    "hidden": ("n_embd", "hidden_size"),
    "heads": ("n_head", "num_attention_heads"),
    "ffn": ("n_inner",),
    "positions": ("n_positions", "max_position_embeddings"),
    "activation": ("activation_function",),
    "dropout": ("resid_pdrop",),
    "attention_dropout": ("attn_pdrop",),
    "eps": ("layer_norm_epsilon",),
}
KEYS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gpt2": _GPT2,
    "opt": {
        "ffn": ("ffn_dim",),
        "activation": ("activation_function",),
        "dropout": ("dropout",),
        "attention_dropout": ("attention_dropout",),
        "embedding": ("word_embed_proj_dim",),
        "norm_first": ("do_layer_norm_before",),
    },
    "bert": {
        "activation": ("hidden_act",),
        "dropout": ("hidden_dropout_prob",),
        "attention_dropout": ("attention_probs_dropout_prob",),
        "token_types": ("type_vocab_size",),
        "eps": ("layer_norm_eps",),
    },
    "vit": {
        "activation": ("hidden_act",),
        "dropout": ("hidden_dropout_prob",),
        "attention_dropout": ("attention_probs_dropout_prob",),
        "eps": ("layer_norm_eps",),
        "vocabulary": (),
        "image": ("image_size",),
        "patch": ("patch_size",),
        "channels": ("num_channels",),
        "biased_qkv": ("qkv_bias",),
        "positions": (),
        "tied": (),
    },
    **dict.fromkeys(("llama", "granite", "smollm3", "arcee"), _BIASED_LAYERS),
    **dict.fromkeys(("olmo", "olmo2", "hunyuan_v1_dense"), _BIASED_ATTENTION),
    **dict.fromkeys(("glm", "glm4"), _BIASED_PRODUCTS),
    "mistral": _LLAMA,
    "ministral": _LLAMA,
    "ernie4_5": {
        **_LLAMA,
        "biased_qkv": ("use_bias",),
        "output_bias": ("use_bias",),
        "mlp_bias": ("use_bias",),
    },
    "seed_oss": {
        **_LLAMA,
        "biased_qkv": ("attention_bias",),
        "output_bias": ("attention_out_bias",),
        "mlp_bias": ("mlp_bias",),
        "dropout": ("residual_dropout",),
    },
    "phi": {**_LLAMA, "dropout": ("resid_pdrop",), "eps": ("layer_norm_eps",)},
    "gpt_neox": {
        **_LLAMA,
        "heads_k": (),
        "head_dim": (),
        "biased_qkv": ("attention_bias",),
        "output_bias": ("attention_bias",),
        "dropout": ("hidden_dropout",),
        "eps": ("layer_norm_eps",),
    },
    "gptj": _GPT2,
    "stablelm": {
        **_LLAMA,
        "head_dim": (),
        "biased_qkv": ("use_qkv_bias",),
        "dropout": ("hidden_dropout",),
        "eps": ("layer_norm_eps",),
    },
    "starcoder2": {
        **_LLAMA,
        "biased_qkv": ("use_bias",),
        "output_bias": ("use_bias",),
        "mlp_bias": ("use_bias",),
        "dropout": ("residual_dropout",),
        "eps": ("norm_epsilon",),
    },
    "cohere": {
        **_BIASED_ATTENTION,
        "eps": ("layer_norm_eps",),
    },
    "nemotron": {
        **_BIASED_ATTENTION,
        "mlp_bias": ("mlp_bias",),
        "eps": ("norm_eps",),
    },
    "qwen2": _LLAMA,
    "qwen3": _BIASED_ATTENTION,
    "phi3": {**_LLAMA, "dropout": ("resid_pdrop",)},
    "gemma": _GEMMA,
    "gemma2": {
        **_GEMMA,
        "score_cap": ("attn_logit_softcapping",),
        "logit_cap": ("final_logit_softcapping",),
    },
    "gemma3_text": {
        **_GEMMA,
        "score_cap": ("attn_logit_softcapping",),
        "logit_cap": ("final_logit_softcapping",),
    },
    "gpt_oss": {
        **_LLAMA,
        "experts": _EXPERTS,
        "experts_per_token": ("num_experts_per_tok", "experts_per_token"),
        "biased_qkv": ("attention_bias",),
        "output_bias": ("attention_bias",),
    },
    "llama4_text": {
        **_BIASED_ATTENTION,
        "experts": _EXPERTS,
        "experts_per_token": ("num_experts_per_tok",),
    },
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "mixtral": {
        **_LLAMA,
        "experts": _EXPERTS,
        "experts_per_token": ("num_experts_per_tok",),
    },
    "qwen2_moe": {
        **_QWEN,
        "shared_ffn": ("shared_expert_intermediate_size",),
        "biased_qkv": ("qkv_bias",),
    },
    "qwen3_moe": {**_QWEN, "biased_qkv": ("attention_bias",), "output_bias": ("attention_bias",)},
    "olmoe": {
        **_BIASED_ATTENTION,
        "experts": _EXPERTS,
        "experts_per_token": ("num_experts_per_tok",),
    },
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "t5": _T5,
    "mt5": _T5,
    "bart": _BART,
    "mbart": _BART,
    "switch_transformers": {
        **_T5,
        "activation": ("dense_act_fn",),
        "experts": ("num_experts",),
        "capacity": ("expert_capacity",),
        "sparse_encoders": ("num_sparse_encoder_layers",),
        "sparse_decoders": ("num_sparse_decoder_layers",),
    },
}
COMMON: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "ffn": ("intermediate_size",),
    "vocabulary": ("vocab_size",),
    "positions": ("max_position_embeddings",),
    "tied": ("tie_word_embeddings",),
}
_GATED: Mapping[str, Any] = {"activation": "silu", "gated": True, "tied": False, "eps": 1e-6}
_SHIFTED: Mapping[str, Any] = {"norm": "shift", "tied": False, "eps": 1e-5}
_BIASED: Mapping[str, Any] = {"biased_qkv": True, "output_bias": True, "mlp_bias": True}
_GRANITE_DEFAULTS: Mapping[str, Any] = {
    **_GATED,
    "experts": 8,
    "experts_per_token": 2,
    "scaled_embedding": True,
}
_GLM: Mapping[str, Any] = {
    **_GATED,
    "heads_k": 2,
    "head_dim": 128,
    "biased_qkv": True,
    "eps": 1.5625e-7,
}
_GEMMA_DEFAULTS: Mapping[str, Any] = {
    "activation": "gelu_pytorch_tanh",
    "gated": True,
    "tied": True,
    "eps": 1e-6,
    "head_dim": 256,
    "scaled_embedding": True,
}
_DEEPSEEK_DEFAULTS: Mapping[str, Any] = {
    **_GATED,
    "query_latent": 1536,
    "key_latent": 512,
    "rotary_dim": 64,
    "plain_dim": 128,
    "value_dim": 128,
}
_T5_DEFAULTS: Mapping[str, Any] = {
    "activation": "relu",
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "positions": 0,
    "buckets": 32,
    "eps": 1e-6,
}
_BART_DEFAULTS: Mapping[str, Any] = {
    "positions": 1024,
    "activation": "gelu",
    "dropout": 0.1,
    "norm": "shift",
    "norm_first": False,
    "eps": 1e-5,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"positions": 1024, "activation": "gelu_new", "dropout": 0.1, "attention_dropout": 0.1},
    "opt": {"positions": 2048, "activation": "relu", "dropout": 0.1},
    "bert": {
        "positions": 512,
        "activation": "gelu",
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "token_types": 2,
        "head_bias": True,
        "eps": 1e-12,
    },
    "vit": {
        "activation": "gelu",
        "eps": 1e-12,
        "vocabulary": 2,
        "image": 224,
        "patch": 16,
        "channels": 3,
        "biased_qkv": True,
        "tied": False,
    },
    "llama": _GATED,
    "mistral": {**_GATED, "heads_k": 8},
    "ministral": {**_GATED, "heads_k": 8},
    "granite": {**_GATED, "scaled_embedding": True},
    "smollm3": {**_GATED, "heads_k": 4, "tied": True},
    "arcee": {**_GATED, "activation": "relu2", "gated": False, "eps": 1e-5},
    "olmo": {**_GATED, "norm": "plain", "eps": 1e-5},
    "olmo2": {**_GATED, "normalised_queries": True, "eps": 1e-5},
    "hunyuan_v1_dense": {**_GATED, "normalised_heads": True, "eps": 1e-5},
    "glm": {**_GLM},
    "glm4": {**_GLM, "norms": 4},
    "ernie4_5": {**_GATED, "heads_k": 2, "head_dim": 128, "tied": True, "eps": 1e-5},
    "seed_oss": {
        **_GATED,
        "heads_k": 8,
        "head_dim": 128,
        "biased_qkv": True,
        "dropout": 0.1,
        "attention_dropout": 0.1,
    },
    "phi": {**_SHIFTED, "activation": "gelu_new", "norms": 1, **_BIASED, "head_bias": True},
    "gpt_neox": {**_SHIFTED, "activation": "gelu", **_BIASED},
    "gptj": {
        **_SHIFTED,
        "positions": 2048,
        "activation": "gelu_new",
        "norms": 1,
        "mlp_bias": True,
        "head_bias": True,
    },
    "stablelm": {**_SHIFTED, "activation": "silu", "gated": True, "heads_k": 32},
    "starcoder2": {
        **_SHIFTED,
        "activation": "gelu_pytorch_tanh",
        "heads_k": 2,
        "tied": True,
        **_BIASED,
    },
    "cohere": {**_SHIFTED, "activation": "silu", "gated": True, "norms": 1, "norm": "scale", "tied": True},
    "nemotron": {**_SHIFTED, "activation": "relu2"},
    "qwen2": {**_GATED, "heads_k": 32, "biased_qkv": True},
    "qwen3": {**_GATED, "heads_k": 32, "head_dim": 128, "normalised_heads": True},
    "phi3": {**_GATED, "eps": 1e-5, "vocabulary": 32064},
    "gemma": {**_GEMMA_DEFAULTS, "heads_k": 16},
    "gemma2": {
        **_GEMMA_DEFAULTS,
        "heads_k": 4,
        "norms": 4,
        "score_cap": 50.0,
        "logit_cap": 30.0,
    },
    "gemma3_text": {
        **_GEMMA_DEFAULTS,
        "heads": 8,
        "heads_k": 4,
        "norms": 4,
        "normalised_heads": True,
        "vocabulary": 262208,
    },
    "gpt_oss": {
        **_GATED,
        "eps": 1e-5,
        "heads_k": 8,
        "head_dim": 64,
        "experts": 128,
        "experts_per_token": 4,
        "biased_qkv": True,
        "output_bias": True,
        "mlp_bias": True,
        "router_bias": True,
        "sinks": True,
    },
    "llama4_text": {
        **_GATED,
        "eps": 1e-5,
        "heads_k": 8,
        "head_dim": 128,
        "ffn": 8192,
        "experts": 16,
        "experts_per_token": 1,
    },
    "deepseek_v2": {
        **_DEEPSEEK_DEFAULTS,
        "ffn": 1407,
        "experts": 64,
        "shared_experts": 2,
        "dense_layers": 0,
    },
    "deepseek_v3": {
        **_DEEPSEEK_DEFAULTS,
        "ffn": 2048,
        "experts": 256,
        "experts_per_token": 8,
        "expert_groups": 8,
        "groups_per_token": 4,
        "shared_experts": 1,
        "dense_layers": 3,
    },
    "mixtral": {**_GATED, "eps": 1e-5, "heads_k": 8, "experts": 8, "experts_per_token": 2},
    "qwen2_moe": {
        **_GATED,
        "ffn": 1408,
        "experts": 60,
        "experts_per_token": 4,
        "shared_ffn": 5632,
        "shared_gate": True,
        "biased_qkv": True,
    },
    "qwen3_moe": {
        **_GATED,
        "ffn": 768,
        "experts": 128,
        "experts_per_token": 8,
        "normalised_heads": True,
    },
    "olmoe": {
        **_GATED,
        "ffn": 2048,
        "experts": 64,
        "experts_per_token": 8,
        "normalised_queries": True,
        "eps": 1e-5,
    },
    "granitemoe": _GRANITE_DEFAULTS,
    "granitemoeshared": _GRANITE_DEFAULTS,
    "bart": _BART_DEFAULTS,
    "mbart": {**_BART_DEFAULTS, "norm_first": True},
    "t5": _T5_DEFAULTS,
    "mt5": {**_T5_DEFAULTS, "activation": "gelu_new", "gated": True, "tied": False},
    "switch_transformers": {
        **_T5_DEFAULTS,
        "experts": 8,
        "capacity": 64,
        "sparse_encoders": 3,
        "sparse_decoders": 3,
    },
}
"""Defaults of HuggingFace's configuration classes."""
