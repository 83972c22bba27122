"""Sizes of transformers, read from a configuration in HuggingFace's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, cast, get_args

from tunebench.activation import ACTIVATIONS
from tunebench.errors import InputError, UnknownName, quoted
from tunebench.workloads.common.norm import EPS

__all__ = ["Architecture", "Family"]

Family = Literal["gpt2", "opt", "bert", "llama", "mixtral", "qwen2_moe", "qwen3_moe", "switch_transformers"]

KNOWN = (*get_args(Family), "resnet")
"""Values of `model_type`; residual networks have a separate class."""

_LLAMA: Mapping[str, tuple[str, ...]] = {
    "heads_k": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "activation": ("hidden_act",),
    "attention_dropout": ("attention_dropout",),
    "eps": ("rms_norm_eps",),
}
_QWEN: Mapping[str, tuple[str, ...]] = {
    **_LLAMA,
    "ffn": ("moe_intermediate_size",),
    "experts": ("num_experts",),
    "experts_per_token": ("num_experts_per_tok",),
}
_KEYS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
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
    },
    "bert": {
        "activation": ("hidden_act",),
        "dropout": ("hidden_dropout_prob",),
        "attention_dropout": ("attention_probs_dropout_prob",),
        "token_types": ("type_vocab_size",),
        "eps": ("layer_norm_eps",),
    },
    "llama": _LLAMA,
    "mixtral": {
        **_LLAMA,
        "experts": ("num_local_experts",),
        "experts_per_token": ("num_experts_per_tok",),
    },
    "qwen2_moe": {**_QWEN, "shared_ffn": ("shared_expert_intermediate_size",)},
    "qwen3_moe": _QWEN,
    "switch_transformers": {
        "layers": ("num_layers",),
        "decoder_layers": ("num_decoder_layers",),
        "hidden": ("d_model",),
        "heads": ("num_heads",),
        "head_dim": ("d_kv",),
        "ffn": ("d_ff",),
        "activation": ("dense_act_fn",),
        "dropout": ("dropout_rate",),
        "attention_dropout": ("dropout_rate",),
        "experts": ("num_experts",),
        "capacity": ("expert_capacity",),
        "sparse_encoders": ("num_sparse_encoder_layers",),
        "sparse_decoders": ("num_sparse_decoder_layers",),
        "buckets": ("relative_attention_num_buckets",),
        "eps": ("layer_norm_epsilon",),
        "positions": (),
    },
}
_COMMON: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "ffn": ("intermediate_size",),
    "vocabulary": ("vocab_size",),
    "positions": ("max_position_embeddings",),
    "tied": ("tie_word_embeddings",),
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"activation": "gelu_new", "dropout": 0.1, "attention_dropout": 0.1},
    "opt": {"activation": "relu", "dropout": 0.1},
    "bert": {
        "activation": "gelu",
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "token_types": 2,
        "eps": 1e-12,
    },
    "llama": {"activation": "silu", "tied": False, "eps": 1e-6},
    "mixtral": {"activation": "silu", "tied": False, "eps": 1e-5, "experts": 8, "experts_per_token": 2},
    "qwen2_moe": {
        "activation": "silu",
        "tied": False,
        "eps": 1e-6,
        "ffn": 1408,
        "experts": 60,
        "experts_per_token": 4,
        "shared_ffn": 5632,
        "biased_qkv": True,
    },
    "qwen3_moe": {
        "activation": "silu",
        "tied": False,
        "eps": 1e-6,
        "ffn": 768,
        "experts": 128,
        "experts_per_token": 8,
        "normalised_heads": True,
    },
    "switch_transformers": {
        "activation": "relu",
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "positions": 0,
        "capacity": 64,
        "sparse_encoders": 0,
        "sparse_decoders": 0,
        "buckets": 32,
        "eps": 1e-6,
    },
}
"""Defaults of HuggingFace's configuration classes."""

_POSITIVE = ("layers", "hidden", "heads", "vocabulary", "ffn", "heads_k", "head_dim", "embedding")
_SHARES = ("dropout", "attention_dropout", "eps")
_SWITCHES = ("tied", "biased_qkv", "normalised_heads")
_MOST = {"layers": 10_000, "decoder_layers": 10_000, "experts": 1 << 16}
MOST_EXPERTS = 1 << 17
"""Most experts of all layers together, of which each has operations of its own."""

_MOST_OF_A_SIZE = 1 << 30
"""Largest size of any other kind."""

_ACTIVATIONS = {"gelu_new": "gelu_new"} | {
    spelling: name for name, record in ACTIVATIONS.items() for spelling in (name, *record.aliases)
}
"""Activations by their names in configurations; gelu_new is gelu_tanh in eight kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes of a transformer.

    Attributes:
        family: Model code, as HuggingFace's `model_type`.
        layers: Number of blocks; of the encoder in an encoder-decoder.
        hidden: Hidden size.
        heads: Number of query heads.
        vocabulary: Vocabulary size.
        ffn: Inner width of the feed-forward layers.
        positions: Longest sequence; 0 for any.
        activation: Activation of the feed-forward layers: a name of `tunebench.activation`, or gelu_new.
        heads_k: Number of key and value heads.
        head_dim: Size of a head.
        dropout: Dropout probability of hidden states.
        attention_dropout: Dropout probability of attention weights.
        tied: Whether the output layer shares the matrix of the embedding.
        embedding: Width of the embedding; if it is not `hidden`, matrices project to `hidden` and back.
        token_types: Number of token types with an embedding.
        decoder_layers: Number of decoder blocks of an encoder-decoder.
        experts: Number of experts of a sparse feed-forward layer; 0 if all layers are dense.
        experts_per_token: Experts that each token is routed to, in models whose layers are all sparse; 0 in
            others.
        shared_ffn: Inner width of an expert that sees all tokens; 0 if there is none.
        biased_qkv: Whether only the products of queries, keys and values add a bias.
        normalised_heads: Whether queries and keys are normalised head by head.
        capacity: Most tokens per sequence for one expert.
        sparse_encoders: Number of encoder blocks with experts.
        sparse_decoders: Number of decoder blocks with experts.
        buckets: Number of relative position buckets.
        eps: Epsilon of the normalisations.
    """

    family: Family
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    ffn: int
    positions: int
    activation: str
    heads_k: int
    head_dim: int
    dropout: float = 0.0
    attention_dropout: float = 0.0
    tied: bool = True
    embedding: int
    token_types: int = 0
    decoder_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    shared_ffn: int = 0
    biased_qkv: bool = False
    normalised_heads: bool = False
    capacity: int = 0
    sparse_encoders: int = 0
    sparse_decoders: int = 0
    buckets: int = 0
    eps: float = EPS

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "family":
                _check(self.family, field.name, getattr(self, field.name))
        if self.heads % self.heads_k:
            raise InputError(
                f"{self.family}: {self.heads_k} heads of keys must divide {self.heads} of queries"
            )

        if self.experts * (self.layers + self.decoder_layers) > MOST_EXPERTS:
            raise InputError(
                f"{self.family}: expected {MOST_EXPERTS} experts in all layers at most, "
                f"got {self.experts} in each"
            )
        if self.experts_per_token and not 0 < self.experts_per_token <= self.experts:
            raise InputError(
                f"{self.family}: expected 1 to {self.experts} experts per token, got {self.experts_per_token}"
            )

    @property
    def gated(self) -> bool:
        """Whether feed-forward layers multiply two products (SwiGLU), and normalisations have no shift."""
        return self.family in ("llama", "mixtral", "qwen2_moe", "qwen3_moe")

    @property
    def inner(self) -> int:
        """Total width of all query heads."""
        return self.heads * self.head_dim

    @property
    def inner_k(self) -> int:
        """Total width of all key heads."""
        return self.heads_k * self.head_dim

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Architecture:
        """Return the architecture of a configuration; unknown keys are ignored.

        Raises:
            InputError: if the family is unknown, a size is missing, or sizes are inconsistent.
        """
        family = config.get("model_type")
        if family is None:
            raise InputError(f"a configuration must have model_type, one of {', '.join(KNOWN)}")
        if not isinstance(family, str) or family not in _KEYS:
            raise UnknownName("model_type", str(family), KNOWN)
        dense = config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers")
        if dense and "experts_per_token" in _KEYS[family]:
            raise InputError(
                f"{family}: expected experts in every layer, got decoder_sparse_step="
                f"{config.get('decoder_sparse_step', 1)} and mlp_only_layers="
                f"{config.get('mlp_only_layers') or []}: such models are not supported"
            )
        sizes = dict(_DEFAULTS[family])
        keys = {**_COMMON, **_KEYS[family]}
        for name, spellings in keys.items():
            value = next((config[key] for key in spellings if config.get(key) is not None), None)
            if value is not None:
                sizes[name] = value
        for name in ("layers", "hidden", "heads", "vocabulary"):
            if name not in sizes:
                raise InputError(f"a configuration of {family} must have {' or '.join(keys[name])}")
        for name, value in sizes.items():
            _check(family, name, value)
        return cls(family=cast("Family", family), **_completed(family, sizes))


def _check(family: str, name: str, value: Any) -> None:
    """Check the type and range of a value of a configuration."""
    if name == "activation":
        return
    if name in _SWITCHES:
        right, expected = isinstance(value, bool), "true or false"
    elif isinstance(value, bool):
        right, expected = False, "a number"
    elif name in _SHARES:
        right, expected = isinstance(value, int | float) and 0 <= value <= 1, "a number from 0 to 1"
    else:
        least, most = int(name in _POSITIVE), _MOST.get(name, _MOST_OF_A_SIZE)
        right = isinstance(value, int) and least <= value <= most
        expected = f"a whole number from {least} to {most}"
    if not right:
        raise InputError(f"{family}: {name} must be {expected}, got {quoted(value)}")


def _completed(family: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Add sizes that follow from other sizes."""
    hidden, heads = sizes["hidden"], sizes["heads"]
    if "head_dim" not in sizes:
        if hidden % heads:
            raise InputError(f"{family}: {heads} heads must divide a hidden width of {hidden}")
        sizes["head_dim"] = hidden // heads
    activation = sizes["activation"]
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise UnknownName("activation", str(activation), _ACTIVATIONS)
    sizes["activation"] = _ACTIVATIONS[activation]
    sizes.setdefault("ffn", 4 * hidden)
    sizes.setdefault("positions", 0)
    sizes.setdefault("heads_k", heads)
    sizes.setdefault("embedding", hidden)
    if family == "switch_transformers":
        sizes.setdefault("decoder_layers", sizes["layers"])
    return sizes
