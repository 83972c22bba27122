"""Training steps of models of transformers and timm, unmodified and with labels, by memory plans.

    python -m benchmarks.fit_foreign_models [--model gpt2 ...] [--budget 60%] [--out FILE]

The models are those of the packages, of small width and few layers, with random weights, in training mode
and in f32. Each step runs by eager torch, as torch traces it (a budget of 100 %), and within a budget a
quarter of the way from the least one for which a plan is known to the peak without a plan, or of `--budget`
if that is larger. The table says which steps were planned, the bytes of all storages that are alive at once
over the peak of the plan, and what losses and gradients are equal to; or where a step was refused. The exit
status is 1 if gradients of a plan differ from those of the same operations without a plan, or if a measured
peak is above 1.005 of that of the plan.

It needs `transformers` and `timm`, which no extra of this package installs.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.planned_peaks import LiveStorages
from tunebench.errors import InputError
from tunebench.training import fit, fitted_steps
from tunebench.training.memory import PlanEffort, budget_bytes, least_budget, simulate, unplanned

__all__ = ["MODELS", "Foreign"]

EFFORT = PlanEffort(exact_operations=0, rounds=0, relaxed_size=0)


@dataclass(frozen=True, slots=True)
class Foreign:
    """A model of another package, and a step that returns its loss.

    Attributes:
        name: The class, with its package.
        model: The model.
        step: The model, or a function that calls it.
        inputs: Keyword inputs of the step.
    """

    name: str
    model: nn.Module
    step: Callable[..., Any]
    inputs: Mapping[str, Any]


_HEADS: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4}
_USUAL: dict[str, Any] = {**_HEADS, "hidden_size": 32, "intermediate_size": 64}
_GROUPED = {**_USUAL, "num_key_value_heads": 2}
_T5 = {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 64, "d_kv": 8, "decoder_start_token_id": 0}
_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 1,
}
_EXPERTS = {
    **_GROUPED,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA2 = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 8,
    "num_heads": 4,
    "head_dim": 16,
    "n_groups": 2,
    "chunk_size": 16,
}
_OPT = {**_HEADS, "hidden_size": 32, "ffn_dim": 64, "word_embed_proj_dim": 32, "pad_token_id": 1}

_TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_layer": 2, "n_embd": 32, "n_head": 2}),
    "llama": ("LlamaForCausalLM", _GROUPED),
    "qwen2": ("Qwen2ForCausalLM", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", {**_GROUPED, "head_dim": 8}),
    "gemma": ("GemmaForCausalLM", {**_GROUPED, "head_dim": 8, "pad_token_id": 0}),
    "mistral": ("MistralForCausalLM", {**_GROUPED, "sliding_window": 8}),
    "mixtral": ("MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4}),
    "phi": ("PhiForCausalLM", _USUAL),
    "gpt-neox": ("GPTNeoXForCausalLM", _USUAL),
    "bloom": ("BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "opt": ("OPTForCausalLM", _OPT),
    "mamba": ("MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "bert": ("BertForMaskedLM", _USUAL),
    "roberta": ("RobertaForMaskedLM", _USUAL),
    "electra": ("ElectraForMaskedLM", {**_USUAL, "embedding_size": 32}),
    "distilbert": ("DistilBertForMaskedLM", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}),
    "t5": ("T5ForConditionalGeneration", _T5),
    "bart": ("BartForConditionalGeneration", _BART),
    "pegasus": ("PegasusForConditionalGeneration", _BART),
    "falcon": ("FalconForCausalLM", {**_HEADS, "hidden_size": 32}),
    "olmo2": ("Olmo2ForCausalLM", {**_GROUPED, "pad_token_id": 0}),
    "gemma2": ("Gemma2ForCausalLM", {**_GROUPED, "head_dim": 8, "sliding_window": 8, "pad_token_id": 0}),
    "qwen2-moe": ("Qwen2MoeForCausalLM", _EXPERTS),
    "mamba2": ("Mamba2ForCausalLM", _MAMBA2),
    "albert": ("AlbertForMaskedLM", {**_USUAL, "embedding_size": 16}),
    "deberta-v2": (
        "DebertaV2ForMaskedLM",
        {**_USUAL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "gptj": ("GPTJForCausalLM", {"n_layer": 2, "n_embd": 32, "n_head": 4, "rotary_dim": 4}),
    "phi3": ("Phi3ForCausalLM", {**_GROUPED, "pad_token_id": 0}),
    "cohere": ("CohereForCausalLM", {**_GROUPED, "pad_token_id": 0}),
    "mpt": ("MptForCausalLM", {"d_model": 32, "n_layers": 2, "n_heads": 4}),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", {"n_layer": 2, "n_embd": 32, "n_head": 4}),
    "roformer": ("RoFormerForMaskedLM", {**_USUAL, "embedding_size": 32}),
    "fnet": ("FNetForMaskedLM", {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}),
    "xlnet": ("XLNetLMHeadModel", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}),
    "longformer": ("LongformerForMaskedLM", {**_USUAL, "attention_window": 16}),
}
"""Class and options of each language model."""

_PICTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", {**_USUAL, "image_size": 32, "patch_size": 8}),
    "swin": (
        "SwinForImageClassification",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 4,
        },
    ),
    "convnext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1]},
    ),
    "dinov2": ("Dinov2ForImageClassification", {**_USUAL, "image_size": 32, "patch_size": 8}),
    "segformer": (
        "SegformerForImageClassification",
        {"hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 2]},
    ),
}

_TIMM = {
    "resnet18": 64,
    "mobilenetv3_small_050": 64,
    "efficientnet_b0": 64,
    "regnetx_002": 64,
    "convnext_atto": 64,
    "vit_tiny_patch16_224": 64,
    "mixer_s32_224": 64,
    "densenet121": 64,
    "edgenext_xx_small": 64,
    "poolformer_s12": 64,
}
"""Extent of the pictures of each model of timm."""


def _transformer(class_name: str, options: Mapping[str, Any]) -> nn.Module:
    made = getattr(transformers, class_name)
    model: nn.Module = made(made.config_class(**options))
    return model


def _text(class_name: str, options: Mapping[str, Any]) -> Foreign:
    model = _transformer(class_name, {"vocab_size": 100, **options})
    words = torch.randint(0, 90, (2, 48))
    return Foreign(f"transformers {class_name}", model, model, {"input_ids": words, "labels": words})


def _picture(class_name: str, options: Mapping[str, Any]) -> Foreign:
    model = _transformer(class_name, {"num_labels": 4, **options})
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    return Foreign(f"transformers {class_name}", model, model, inputs)


def _speech() -> Foreign:
    convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
    options = {
        **_USUAL,
        **convolutions,
        "num_feat_extract_layers": 2,
        "vocab_size": 32,
        "mask_time_prob": 0.0,
    }
    model = _transformer("Wav2Vec2ForCTC", options)
    inputs = {"input_values": torch.randn(2, 800), "labels": torch.randint(1, 20, (2, 10))}
    return Foreign("transformers Wav2Vec2ForCTC", model, model, inputs)


def _spectra() -> Foreign:
    options = {**_BART, "vocab_size": 100, "num_mel_bins": 8, "max_source_positions": 32, "eos_token_id": 2}
    model = _transformer("WhisperForConditionalGeneration", {**options, "decoder_start_token_id": 2})
    words = torch.randint(3, 90, (2, 16))
    return Foreign(
        "transformers WhisperForConditionalGeneration",
        model,
        model,
        {"input_features": torch.randn(2, 8, 64), "labels": words},
    )


def _pairs() -> Foreign:
    vision = {**_USUAL, "image_size": 32, "patch_size": 8}
    text = {**_USUAL, "vocab_size": 100, "eos_token_id": 2}
    options = {"text_config": text, "vision_config": vision, "projection_dim": 16}
    model = _transformer("CLIPModel", options)
    inputs = {"input_ids": torch.randint(3, 90, (2, 8)), "pixel_values": torch.randn(2, 3, 32, 32)}
    return Foreign("transformers CLIPModel", model, model, {**inputs, "return_loss": True})


def _timm(name: str, extent: int) -> Foreign:
    sized = {"img_size": extent} if name.startswith(("vit", "mixer")) else {}
    model = timm.create_model(name, num_classes=4, **sized)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model(x), y)

    inputs = {"x": torch.randn(2, 3, extent, extent), "y": torch.tensor([0, 1])}
    return Foreign(f"timm {name}", model, step, inputs)


MODELS: dict[str, Callable[[], Foreign]] = {
    **{name: lambda made=made: _text(*made) for name, made in _TEXTS.items()},  # type: ignore[misc]
    **{name: lambda made=made: _picture(*made) for name, made in _PICTURES.items()},  # type: ignore[misc]
    "wav2vec2": _speech,
    "clip": _pairs,
    "whisper": _spectra,
    **{name: lambda made=made: _timm(*made) for made in _TIMM.items() for name in made[:1]},  # type: ignore[misc]
}
"""The models by short names."""


def _trained(run: Callable[..., Any], foreign: Foreign) -> list[Tensor]:
    """Return loss and gradients of a step with the same random numbers each time."""
    torch.manual_seed(1)
    result = run(**foreign.inputs)
    loss = result if isinstance(result, Tensor) else result.loss
    loss.backward()
    gradients = [weight.grad for weight in foreign.model.parameters() if weight.grad is not None]
    foreign.model.zero_grad()
    return [loss.detach(), *gradients]


def _fresh(name: str) -> Foreign:
    torch._dynamo.reset()
    torch.manual_seed(0)
    foreign = MODELS[name]()
    foreign.model.train()
    return foreign


def _difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the largest difference of loss and gradients, over the largest element of each."""
    assert len(ours) == len(theirs)
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) for a, b in pairs)


def _peak_bytes(run: Callable[..., Any], foreign: Foreign) -> int:
    """Return the most bytes of storages that are alive at once in a step."""
    inputs = [value for value in foreign.inputs.values() if isinstance(value, Tensor)]
    with LiveStorages([*foreign.model.parameters(), *foreign.model.buffers(), *inputs]) as counted:
        _trained(run, foreign)
    return counted.peak_bytes


def _row(name: str, share: str | None) -> tuple[str, bool]:
    """Return the row of a model, and whether its plan keeps its peak, and the gradients without a plan."""
    foreign = _fresh(name)
    eager = _trained(foreign.step, foreign)
    foreign = _fresh(name)
    whole = fit(foreign.step, "100%", effort=EFFORT)
    try:
        traced = _trained(whole, foreign)
    except InputError as error:
        return f"| {foreign.name} | refused: {_shortened(str(error))} | | | | | |", True
    (unplanned_step,) = fitted_steps(whole)
    step = unplanned_step.plan.step
    peak = simulate(step, unplanned(step)).peak_bytes
    least = least_budget(step, effort=EFFORT).budget_bytes
    foreign = _fresh(name)
    budget = max(least + (peak - least) // 4, budget_bytes(share, peak) if share else 0)
    fitted = fit(foreign.step, budget, effort=EFFORT)
    planned = _trained(fitted, foreign)
    (fitted_step,) = fitted_steps(fitted)
    plan = fitted_step.plan
    same = all(map(torch.equal, planned, traced))
    repeated = sum(bool(tensor.recomputed_before) for tensor in plan.tensors)
    memory = f"{plan.simulation.peak_bytes / peak:.0%}"
    over = _peak_bytes(fitted, foreign) / plan.simulation.peak_bytes
    return (
        f"| {foreign.name} | planned | {len(step.operations)} | {repeated}, {memory} | {over:.4f} "
        f"| {'yes' if same else 'NO'} | {_equality(_difference(planned, eager))} |",
        same and over <= 1.005,
    )


def _equality(difference: float) -> str:
    return "yes" if difference == 0 else f"to {difference:.0e}"


def _shortened(reason: str) -> str:
    """Return a reason with paths from the folder of installed packages."""
    folder = Path(inspect.getfile(transformers)).parents[1]
    return reason.replace(f"{folder}{os.sep}", "").replace("|", "/").replace("\n", " ")


def _lines(names: list[str], share: str | None) -> Iterator[tuple[str, bool]]:
    packages = ", ".join(f"{package} {version(package)}" for package in ("torch", "transformers", "timm"))
    yield f"{packages}\n", True
    yield (
        "| model | result | operations | recomputed, peak over that without a plan | measured peak over the "
        "plan's | equal to its operations without a plan | equal to eager torch |",
        True,
    )
    yield "|---|---|---|---|---|---|---|", True
    for name in names:
        yield _row(name, share)


def main() -> int:
    """Run the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, action="append", help="models (default: all)")
    parser.add_argument("--budget", help="least budget, such as 60%% of the peak without a plan")
    parser.add_argument("--out", type=Path, help="file for the table (default: only the terminal)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    text, all_same = "", True
    for line, same in _lines(arguments.model or list(MODELS), arguments.budget):
        print(line, flush=True)
        text, all_same = f"{text}{line}\n", all_same and same
        if arguments.out:
            arguments.out.write_text(text)
    return 0 if all_same else 1


if __name__ == "__main__":
    sys.exit(main())
