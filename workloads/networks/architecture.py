"""Sizes of transformers, read from a configuration in HuggingFace's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, cast, get_args

from tunebench.activation import ACTIVATIONS
from tunebench.errors import InputError, UnknownName, quoted
from tunebench.workloads.common.norm import EPS
from tunebench.workloads.networks._config_keys import (
    COMMON,
    DEFAULTS,
    KEYS,
    PHASED_WINDOWS,
    UNDESCRIBED,
    WINDOWS,
    Family,
)

__all__ = ["Architecture", "Family", "classes"]

KNOWN = (*get_args(Family), "resnet")
"""Values of `model_type`; residual networks have a separate class."""

_POSITIVE = ("layers", "hidden", "heads", "vocabulary", "ffn", "heads_k", "head_dim", "embedding")
_SHARES = ("dropout", "attention_dropout", "eps")
_CAPS = ("score_cap", "logit_cap")
_SWITCHES = (
    "tied",
    "gated",
    "biased_qkv",
    "output_bias",
    "mlp_bias",
    "router_bias",
    "shared_gate",
    "normalised_heads",
    "normalised_queries",
    "norm_first",
    "head_bias",
    "sinks",
    "scaled_embedding",
)
_MOST = {"layers": 10_000, "decoder_layers": 10_000, "experts": 1 << 16}
MOST_EXPERTS = 1 << 17
"""Most experts of all layers together, of which each has operations of its own."""

_MOST_OF_A_SIZE = 1 << 30
"""Largest size of any other kind."""

_ACTIVATIONS = {"gelu_new": "gelu_new", "relu2": "relu"} | {
    spelling: name for name, record in ACTIVATIONS.items() for spelling in (name, *record.aliases)
}
"""Activations by their names in configurations; gelu_new is gelu_tanh in eight kernels, and relu2,
the square of relu, is priced as relu."""


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
        shared_gate: Whether a gate for each token scales the result of the shared expert.
        expert_groups: Groups of experts, of which the router chooses `groups_per_token` before it chooses
            experts (node-limited routing); 0 if it chooses among all experts.
        groups_per_token: Groups that the experts of a token are in.
        router_bias: Whether the router has a bias for each expert.
        dense_layers: First layers with a dense feed-forward part, in models with experts in the others.
        dense_ffn: Inner width of the feed-forward part of these layers.
        gated: Whether feed-forward layers multiply two products (SwiGLU, GEGLU).
        biased_qkv: Whether the products of queries, keys and values add a bias, in families with a choice.
        output_bias: Whether the output product of attention of a gated model adds a bias.
        mlp_bias: Whether feed-forward layers or experts of a gated model add biases.
        normalised_heads: Whether queries and keys are normalised head by head.
        norm_first: Whether layers normalise their input, and the output of the last one is
            normalised again (OPT).
        normalised_queries: Whether all queries of a token, and all keys, are normalised together (OLMo 2).
        norm: Normalisation of the relatives of Llama: by the root mean square (`"rms"`), or to mean 0 and
            variance 1 with weights and biases (`"shift"`), with weights (`"scale"`), or with neither
            (`"plain"`).
        norms: Normalisations of a layer: 2; 1 if attention and the feed-forward part see the same input; or 4
            with those after both.
        head_bias: Whether the output layer adds a bias.
        windows: For each layer, the last keys that a query sees (sliding window); 0 for all. Empty if all
            layers see all keys.
        sinks: Whether each head has a learned score that takes part in the softmax and has no value.
        score_cap: Bound of the scores of attention, by tanh (soft cap); 0 for none.
        logit_cap: Bound of the logits, by tanh; 0 for none.
        scaled_embedding: Whether hidden states start as a multiple of the embedding.
        query_latent: Width of the vector that queries are products of; 0 if they are products of hidden
            states.
        key_latent: Width of the vector that keys and values are products of (multi-head latent attention);
            0 if they are products of hidden states.
        rotary_dim: Part of a head with rotary positions, which all heads of keys share, with `key_latent`.
        value_dim: Size of a head of values; 0 for `head_dim`.
        image: Height and width of an image, in pixels; 0 for text.
        patch: Height and width of a patch of an image.
        channels: Channels of an image.
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
    shared_gate: bool = False
    expert_groups: int = 0
    groups_per_token: int = 0
    router_bias: bool = False
    dense_layers: int = 0
    dense_ffn: int = 0
    gated: bool = False
    biased_qkv: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    normalised_heads: bool = False
    normalised_queries: bool = False
    norm: str = "rms"
    norm_first: bool = True
    head_bias: bool = False
    norms: int = 2
    windows: tuple[int, ...] = ()
    sinks: bool = False
    score_cap: float = 0.0
    logit_cap: float = 0.0
    scaled_embedding: bool = False
    query_latent: int = 0
    key_latent: int = 0
    rotary_dim: int = 0
    value_dim: int = 0
    image: int = 0
    patch: int = 0
    channels: int = 0
    capacity: int = 0
    sparse_encoders: int = 0
    sparse_decoders: int = 0
    buckets: int = 0
    eps: float = EPS

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name not in ("family", "windows"):
                _check(self.family, field.name, getattr(self, field.name))
        if self.windows and len(self.windows) != self.layers:
            raise InputError(
                f"{self.family}: expected a window for each of {self.layers} layers, got {len(self.windows)}"
            )
        if self.dense_layers > self.layers:
            raise InputError(
                f"{self.family}: expected up to {self.layers} dense layers, got {self.dense_layers}"
            )
        if self.patch and self.image % self.patch:
            raise InputError(
                f"{self.family}: patches of {self.patch} pixels must divide an image of {self.image}"
            )
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
    def uniform(self) -> bool:
        """Whether all layers have equal sizes and masks."""
        return not (self.dense_layers or self.decoder_layers) and len(set(self.windows)) < 2

    @property
    def attentions(self) -> float:
        """Attentions of a layer: 1, or the mean over encoder and decoder, whose layers have two."""
        return 1 + self.decoder_layers / (self.layers + self.decoder_layers)

    @property
    def window(self) -> int:
        """Window of the first layer; 0 for none."""
        return self.windows[0] if self.windows else 0

    @property
    def longest(self) -> int:
        """Longest sequence: learned positions limit it, rotary ones do not; 0 for any."""
        return self.positions if self.family in ("gpt2", "opt", "bert", "bart", "mbart") else 0

    def layer(self, index: int) -> Architecture:
        """Return the sizes of one layer, as those of a network of this layer.

        Args:
            index: Index of the layer, from 0.
        """
        windows = self.windows[index : index + 1]
        layer = replace(self, layers=1, windows=windows, dense_layers=0)
        if index >= self.dense_layers:
            return layer
        return replace(
            layer, ffn=self.dense_ffn, experts=0, experts_per_token=0, shared_ffn=0, router_bias=False
        )

    @property
    def inner(self) -> int:
        """Total width of all query heads."""
        return self.heads * self.head_dim

    @property
    def inner_k(self) -> int:
        """Total width of all key heads."""
        return self.heads_k * self.head_dim

    @property
    def inner_v(self) -> int:
        """Total width of all value heads."""
        return self.heads_k * (self.value_dim or self.head_dim)

    @property
    def inner_out(self) -> int:
        """Total width of the results of all query heads."""
        return self.heads * (self.value_dim or self.head_dim)

    @property
    def key_share(self) -> float:
        """Share of keys in the width of queries, keys and values."""
        return self.inner_k / (self.inner + self.inner_k + self.inner_v)

    @property
    def plain(self) -> bool:
        """Whether layers are those of Llama: gated, without experts and latent attention."""
        return self.fused and self.gated and not (self.experts or self.key_latent or self.decoder_layers)

    @property
    def fused(self) -> bool:
        """Whether Megatron-LM's kernels are described for these layers, of the kind of Llama or T5."""
        usual = self.norm == "rms" and self.norms != 1 and not self.normalised_queries
        return usual and (self.gated or bool(self.decoder_layers))

    @property
    def attention_dim(self) -> int:
        """Head size with which the two products of attention have the FLOPs that they have."""
        return (self.head_dim + (self.value_dim or self.head_dim)) // 2

    @property
    def latent(self) -> int:
        """Width of the vectors that queries, keys and values are products of; 0 if there are none."""
        return self.query_latent + self.key_latent + self.rotary_dim

    @property
    def tokens(self) -> int:
        """Tokens of an image: its patches and one for the class; 0 for text."""
        return (self.image // self.patch) ** 2 + 1 if self.patch else 0

    @property
    def causal(self) -> bool:
        """Whether tokens see no later token."""
        return self.family not in ("bert", "vit")

    def head_tokens(self, seq: int) -> int:
        """Return how many tokens of a sequence the head sees: that of the class of an image, or all."""
        return 1 if self.patch else seq

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Architecture:
        """Return the architecture of a configuration; unknown keys are ignored.

        Raises:
            InputError: if the family is unknown, a size is missing, or sizes are inconsistent.
        """
        family = config.get("model_type")
        if family is None:
            raise InputError(f"a configuration must have model_type, one of {', '.join(KNOWN)}")
        if "text_config" in config and family not in KEYS:
            raise InputError(
                f"{quoted(family)} is a configuration of several models: expected one model; write its "
                "text_config with its model_type to a file of its own (the other models, such as that of "
                "images, are not counted)"
            )
        if isinstance(family, str) and family in UNDESCRIBED:
            raise InputError(
                f"{family} has {UNDESCRIBED[family]}, which no family here describes: expected model_type "
                f"{', '.join(KNOWN)}; plan cluster also takes a module as FILE.py:FUNCTION"
            )
        if not isinstance(family, str) or family not in KEYS:
            raise UnknownName("model_type", str(family), KNOWN)
        _refuse_unsupported(family, config)
        sizes = dict(DEFAULTS[family])
        keys = {**COMMON, **KEYS[family]}
        for name, spellings in keys.items():
            value = next((config[key] for key in spellings if config.get(key) is not None), None)
            if value is not None:
                sizes[name] = value
        needed = (
            "layers",
            "hidden",
            "heads",
            "vocabulary",
            *(() if family in ("gpt2", "gptj") else ("ffn",)),
        )
        for name in needed:
            if name not in sizes:
                raise InputError(f"a configuration of {family} must have {' or '.join(keys[name])}")
        _derive(family, config, sizes)
        for name, value in sizes.items():
            _check(family, name, value)
        windows = _windows(family, config, sizes["layers"])
        return cls(family=cast("Family", family), windows=windows, **_completed(family, sizes))


def _check(family: str, name: str, value: Any) -> None:
    """Check the type and range of a value of a configuration."""
    if name in ("activation", "norm"):
        return
    if name in _SWITCHES:
        right, expected = isinstance(value, bool), "true or false"
    elif isinstance(value, bool):
        right, expected = False, "a number"
    elif name in _CAPS:
        right, expected = isinstance(value, int | float) and 0 <= value <= 1e6, "a number of at least 0"
    elif name in _SHARES:
        right, expected = isinstance(value, int | float) and 0 <= value <= 1, "a number from 0 to 1"
    else:
        least, most = int(name in _POSITIVE), _MOST.get(name, _MOST_OF_A_SIZE)
        right = isinstance(value, int) and least <= value <= most
        expected = f"a whole number from {least} to {most}"
    if not right:
        raise InputError(f"{family}: {name} must be {expected}, got {quoted(value)}")


def _refuse_unsupported(family: str, config: Mapping[str, Any]) -> None:
    """Refuse configurations of a known family with layers that it does not describe."""
    dense = config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers")
    if dense and "experts_per_token" in KEYS[family]:
        raise InputError(
            f"{family}: expected experts in every layer, got decoder_sparse_step="
            f"{config.get('decoder_sparse_step', 1)} and mlp_only_layers="
            f"{config.get('mlp_only_layers') or []}: such models are not supported"
        )
    for keyed, key, expected in _EXPECTED:
        if family.startswith(keyed) and config.get(key) not in (None, expected):
            raise InputError(
                f"{family}: expected {key}={expected}, got {quoted(config[key])}: layers of another kind are "
                "not described"
            )
    for size in ("attention_heads", "ffn_dim"):
        encoder, decoder = config.get(f"encoder_{size}"), config.get(f"decoder_{size}")
        if family in ("bart", "mbart") and decoder not in (None, encoder):
            raise InputError(
                f"{family}: expected decoder_{size} to be encoder_{size}, {quoted(encoder)}, got "
                f"{quoted(decoder)}: layers of two sizes are not described"
            )
    sparse = config.get("moe_layers")
    if (
        family == "llama4_text"
        and isinstance(sparse, list)
        and len(sparse) < config.get("num_hidden_layers", 0)
    ):
        raise InputError(f"{family}: expected moe_layers to list every layer, got {quoted(sparse)}")
    kinds = config.get("layer_types") or ()
    for kind in kinds if isinstance(kinds, list | tuple) else (kinds,):
        if kind not in _LAYER_TYPES:
            raise UnknownName(f"kind of layer of {family} in layer_types", str(kind), _LAYER_TYPES)


_EXPECTED: tuple[tuple[str, str, Any], ...] = (
    ("bart", "add_final_layer_norm", False),
    ("bart", "normalize_before", False),
    ("bart", "is_encoder_decoder", True),
    ("bart", "tie_word_embeddings", True),
    ("bert", "add_cross_attention", False),
    ("bert", "is_decoder", False),
    ("bert", "position_embedding_type", "absolute"),
    ("bert", "tie_word_embeddings", True),
    ("cohere", "use_qk_norm", False),
    ("deepseek", "attention_bias", False),
    ("deepseek", "mlp_bias", False),
    ("deepseek", "moe_layer_freq", 1),
    ("gemma", "use_bidirectional_attention", False),
    ("gpt2", "add_cross_attention", False),
    ("llama4", "interleave_moe_layer_step", 1),
    ("mbart", "is_encoder_decoder", True),
    ("mbart", "normalize_before", True),
    ("mbart", "tie_word_embeddings", True),
    ("mt5", "is_encoder_decoder", True),
    ("olmoe", "head_dim", None),
    ("opt", "_remove_final_layer_norm", False),
    ("opt", "enable_bias", True),
    ("opt", "layer_norm_elementwise_affine", True),
    ("phi", "qk_layernorm", False),
    ("stablelm", "qk_layernorm", False),
    ("switch_transformers", "is_encoder_decoder", True),
    ("switch_transformers", "tie_word_embeddings", True),
    ("t5", "is_encoder_decoder", True),
)
"""Keys of families that begin so, with the value without which their layers are not described."""

_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


def _windows(family: str, config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the window of each layer, 0 for none; nothing if no layer has one."""
    key = "attention_chunk_size" if family == "llama4_text" else "sliding_window"
    size = config.get(key, WINDOWS.get(family))
    if family not in WINDOWS or not size:
        return ()
    if family.startswith(("qwen", "smollm")) and not config.get("use_sliding_window", False):
        return ()
    _check(family, key, size)
    kinds, rotated = config.get("layer_types"), config.get("no_rope_layers")
    if kinds:
        slides = tuple(kind != "full_attention" for kind in kinds)
    elif family == "llama4_text" and isinstance(rotated, list) and rotated:
        slides = tuple(map(bool, rotated))  # 1 for a layer with rotary positions, whose keys are in chunks
    elif family.startswith("qwen"):
        slides = tuple(index >= config.get("max_window_layers", 28) for index in range(layers))
    else:
        pattern = PHASED_WINDOWS.get(family, (True,))
        if (period := config.get("sliding_window_pattern")) and len(pattern) > 1:
            _check(family, "sliding_window_pattern", period)
            pattern = (*(True for _ in range(period - 1)), False)
        slides = tuple(pattern[index % len(pattern)] for index in range(layers))
    return tuple(size * slide for slide in slides)


def _derive(family: str, config: Mapping[str, Any], sizes: dict[str, Any]) -> None:
    """Replace sizes that configurations state in other terms."""
    if family in ("t5", "mt5") and (projection := config.get("feed_forward_proj")):
        gate, _, activation = str(projection).rpartition("gated-")
        sizes["gated"] = bool(gate or str(projection).startswith("gated-"))
        sizes["activation"] = "gelu_new" if sizes["gated"] and activation == "gelu" else activation
    if family == "vit":
        sizes["vocabulary"] = classes(config)
    if family == "stablelm" and config.get("use_parallel_residual"):
        sizes["norms"] = 1
    if "plain_dim" in KEYS[family]:
        if config.get("q_lora_rank", 0) is None:
            sizes["query_latent"] = 0
        if config.get("n_group", 0) is None:
            sizes["expert_groups"] = sizes["groups_per_token"] = 0
        for name in ("plain_dim", "shared_experts"):
            _check(family, name, sizes[name])
        sizes["head_dim"] = sizes.pop("plain_dim") + sizes["rotary_dim"]
        sizes["shared_ffn"] = sizes.pop("shared_experts") * sizes["ffn"]
        sizes.setdefault("dense_ffn", 11008)
    if family == "llama4_text":
        sizes["shared_ffn"] = sizes["ffn"]


def classes(config: Mapping[str, Any]) -> Any:
    """Return the number of classes of a classifier: HuggingFace's configurations name them, 2 by default."""
    return config.get("num_labels") or len(config.get("id2label") or "01")


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
    if family in ("switch_transformers", "t5", "mt5", "bart", "mbart"):
        sizes.setdefault("decoder_layers", sizes["layers"])
    return sizes
