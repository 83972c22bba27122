"""Keys of HuggingFace's configurations by model code, and the defaults of its configuration classes.

Source: transformers 4.57, `models/*/configuration_*.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

__all__ = ["COMMON", "DEFAULTS", "KEYS", "PHASED_WINDOWS", "WINDOWS", "Family"]

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
    "switch_transformers",
    "t5",
    "mt5",
]

WINDOWS: Mapping[str, int | None] = {
    "mistral": 4096,
    "mixtral": None,
    "phi3": None,
    "qwen2": 4096,
    "qwen3": 4096,
    "qwen2_moe": 4096,
    "qwen3_moe": 4096,
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

_GEMMA: Mapping[str, tuple[str, ...]] = {
    **_LLAMA,
    "activation": ("hidden_activation",),
    "biased_qkv": ("attention_bias",),
    "output_bias": ("attention_bias",),
}
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
KEYS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gpt2": {
        "layers": ("n_layer", "num_hidden_layers"),
        "hidden": ("n_embd", "hidden_size"),
        "heads": ("n_head", "num_attention_heads"),
        "ffn": ("n_inner",),
        "positions": ("n_positions", "max_position_embeddings"),
        "activation": ("activation_function",),
        "dropout": ("resid_pdrop",),
        "attention_dropout": ("attn_pdrop",),
        "eps": ("layer_norm_epsilon",),
    },
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
    "llama": {
        **_LLAMA,
        "biased_qkv": ("attention_bias",),
        "output_bias": ("attention_bias",),
        "mlp_bias": ("mlp_bias",),
    },
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, "biased_qkv": ("attention_bias",), "output_bias": ("attention_bias",)},
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
        **_LLAMA,
        "experts": _EXPERTS,
        "experts_per_token": ("num_experts_per_tok",),
        "biased_qkv": ("attention_bias",),
        "output_bias": ("attention_bias",),
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
    "t5": _T5,
    "mt5": _T5,
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
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"positions": 1024, "activation": "gelu_new", "dropout": 0.1, "attention_dropout": 0.1},
    "opt": {"positions": 2048, "activation": "relu", "dropout": 0.1},
    "bert": {
        "positions": 512,
        "activation": "gelu",
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "token_types": 2,
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
    "t5": _T5_DEFAULTS,
    "mt5": {**_T5_DEFAULTS, "activation": "gelu_new", "gated": True, "tied": False},
    "switch_transformers": {**_T5_DEFAULTS, "experts": 8, "capacity": 64, "sparse_encoders": 3, "sparse_decoders": 3},
}
"""Defaults of HuggingFace's configuration classes."""
