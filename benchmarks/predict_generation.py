"""Compare predicted generation of text with published figures: `python -m benchmarks.predict_generation`.

Nothing is fitted to these figures. `--out benchmarks/results/predict/generation.md` updates the page.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

from tunebench import device
from tunebench.training.cluster.generation import predict_generation
from tunebench.workloads.networks import Network, NetworkRun, from_config, network

GPT_FAST = "gpt-fast, batch 1, A100 limited to 330 W"
FIRST = "TensorRT-LLM 0.5, first token, batch 1"
THROUGHPUT = "TensorRT-LLM 0.6.1, throughput, A100, f16"

LLAMA_2_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-5,
}
GPT_J = {"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "n_positions": 2048}
GPT_J |= {"vocab_size": 50400, "rotary_dim": 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """A published figure.

    Attributes:
        source: Where it was published.
        model: Name of the model.
        on: Name of the device.
        tensor: Tensor-parallel size.
        batch: Number of sequences.
        prompt: Tokens of each prompt.
        output: Tokens of each output.
        kind: Figure: time of a further token, of the first one, or of the whole batch.
        ms: Published time, in milliseconds.
        fp8: Whether matrices are 8-bit floats.
    """

    source: str
    model: str
    on: str
    tensor: int = 1
    batch: int = 1
    prompt: int
    output: int = 1
    kind: Literal["token", "first", "batch"]
    ms: float
    fp8: bool = False

    def predicted_ms(self) -> tuple[float, float, float]:
        """Return the low end of the 90 % interval, the expected time and the high end, in milliseconds."""
        run = NetworkRun(
            batch=self.batch,
            seq=self.prompt,
            dtype="bf16" if self.source == GPT_FAST else "f16",
            stack="serving" if self.source == GPT_FAST else "compiled",
            cuda_graphs=True,
            fp8="delayed" if self.fp8 else "none",
        )
        generated = predict_generation(
            model_named(self.model), device.find(self.on), run, self.output, tensor=self.tensor
        )
        timed = {"token": generated.decode, "first": generated.prefill, "batch": generated}[self.kind]
        return timed.low_us / 1e3, timed.time_us / 1e3, timed.high_us / 1e3


def model_named(name: str) -> Network:
    """Return a model by the name that the sources use."""
    if name == "Llama 2 7B":
        return network("llama-2-7b")
    return from_config(name, LLAMA_2_70B if name == "Llama 2 70B" else GPT_J)


def published_rows() -> Iterator[PublishedRow]:
    """Yield the published figures."""
    # pytorch-labs/gpt-fast, README; prompts of 5 tokens, and 200 new ones by default.
    rates = ((1, 104.9), (2, 168.84), (4, 254.02), (8, 328.43)), ((2, 21.32), (4, 38.01), (8, 62.50))
    for model, by_tensor in zip(("Llama 2 7B", "Llama 2 70B"), rates, strict=True):
        for tensor, rate in by_tensor:
            sizes = {"tensor": tensor, "prompt": 5, "output": 200}
            yield PublishedRow(
                source=GPT_FAST, model=model, on="a100-80-sxm", kind="token", ms=1e3 / rate, **sizes
            )
    # NVIDIA/TensorRT-LLM, docs/source/performance.md at commit 138f96d.
    first = {
        ("h100-sxm", True): (("GPT-J 6B", 1, 7, 29), ("Llama 2 7B", 1, 7, 36), ("Llama 2 70B", 4, 26, 109)),
        ("l40s", True): (("GPT-J 6B", 1, 12, 71), ("Llama 2 7B", 1, 14, 73)),
        ("a100-80-sxm", False): (
            ("GPT-J 6B", 1, 12, 129),
            ("Llama 2 7B", 1, 16, 133),
            ("Llama 2 70B", 4, 47, 377),
        ),
    }
    for (on, fp8), rows in first.items():
        for model, tensor, *times in rows:
            for prompt, ms in zip((128, 2048), times, strict=True):
                yield PublishedRow(
                    source=FIRST,
                    model=model,
                    on=on,
                    tensor=tensor,
                    prompt=prompt,
                    kind="first",
                    ms=ms,
                    fp8=fp8,
                )
    # Output tokens a second and GPU. Rows with 8-bit floats also have an 8-bit cache, which is not modelled.
    for model, batch, tensor, prompt, output, rate in (
        ("GPT-J 6B", 512, 1, 128, 128, 6374),
        ("GPT-J 6B", 120, 2, 128, 2048, 2192),
        ("GPT-J 6B", 60, 1, 2048, 128, 670),
        ("GPT-J 6B", 64, 2, 2048, 2048, 903),
        ("Llama 2 7B", 384, 1, 128, 128, 5586),
        ("Llama 2 7B", 60, 1, 128, 2048, 1928),
        ("Llama 2 7B", 52, 1, 2048, 128, 591),
        ("Llama 2 7B", 64, 2, 2048, 2048, 782),
        ("Llama 2 70B", 1280, 4, 128, 128, 670),
        ("Llama 2 70B", 240, 4, 128, 2048, 525),
        ("Llama 2 70B", 120, 4, 2048, 128, 79),
    ):
        yield PublishedRow(
            source=THROUGHPUT,
            model=model,
            on="a100-80-sxm",
            tensor=tensor,
            batch=batch,
            prompt=prompt,
            output=output,
            kind="batch",
            ms=batch * output / (rate * tensor) * 1e3,
        )


def report() -> str:
    """Return both tables as Markdown."""
    lines = [
        "| source | model | devices | batch | prompt, output | figure | published, ms | predicted, ms "
        "| error | in the 90 % interval |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    errors: dict[str, list[tuple[float, bool]]] = {}
    for row in published_rows():
        low, predicted, high = row.predicted_ms()
        inside, error = low <= row.ms <= high, predicted / row.ms - 1
        errors.setdefault(row.source, []).append((math.log(predicted / row.ms), inside))
        kind = {"token": "a token", "first": "first token", "batch": "all tokens"}[row.kind]
        fp8 = ", FP8" if row.fp8 else ""
        lines.append(
            f"| {row.source} | {row.model}{fp8} | {row.tensor} x {row.on} | {row.batch} "
            f"| {row.prompt}, {row.output} | {kind} | {row.ms:,.1f} | {predicted:,.1f} | {error:+.0%} "
            f"| {'yes' if inside else 'no'} |"
        )
    summary = ["| source | figures | mean absolute error | bias | in interval |", "|---|---|---|---|---|"]
    for source, values in errors.items():
        logs = [logarithm for logarithm, _ in values]
        size = fmean(abs(math.expm1(logarithm)) for logarithm in logs)
        summary.append(
            f"| {source} | {len(values)} | {size:.1%} | {math.expm1(fmean(logs)):+.1%} "
            f"| {fmean(inside for _, inside in values):.0%} |"
        )
    return "\n".join([*summary, "", *lines, ""])


def main() -> None:
    """Print the tables, or write them below the head of the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="Page to update below its last heading.")
    arguments = parser.parse_args()
    text = report()
    if arguments.out is None:
        print(text)
        return
    head, heading, _ = arguments.out.read_text(encoding="utf-8").partition("\n## Figures\n")
    arguments.out.write_text(f"{head}{heading}\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
