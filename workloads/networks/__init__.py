"""Networks as lists of operations: `network("gpt2-large").operations(NetworkRun(batch=4, seq=1024))`."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from tunebench._deprecation import renamed
from tunebench._foreign_file import interpreting, read_table, read_text
from tunebench.errors import UnknownName
from tunebench.workloads import suite, suites
from tunebench.workloads.networks._bart import Bart
from tunebench.workloads.networks._experts import Mixture
from tunebench.workloads.networks._families import Bert, Gpt2, Llama, Opt
from tunebench.workloads.networks._switch import Switch
from tunebench.workloads.networks._vit import Vit
from tunebench.workloads.networks.architecture import Architecture
from tunebench.workloads.networks.listed import ListedNetwork, from_csv, from_list
from tunebench.workloads.networks.network_run import (
    Network,
    NetworkRun,
    Operation,
    Phase,
    TensorCollective,
    merged,
)
from tunebench.workloads.networks.resnet import ResNet

__all__ = [
    "Network",
    "NetworkRun",
    "Operation",
    "Phase",
    "TensorCollective",
    "from_config",
    "merged",
    "network",
    "networks",
]

_FAMILIES: dict[str, Callable[[str, Architecture], Network]] = {
    "gpt2": Gpt2,
    "opt": Opt,
    "bert": Bert,
    "vit": Vit,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text"), Llama),
    **dict.fromkeys(("ministral", "granite", "smollm3", "arcee", "olmo", "olmo2", "glm", "glm4"), Llama),
    **dict.fromkeys(("hunyuan_v1_dense", "ernie4_5", "seed_oss", "phi", "gpt_neox", "gptj"), Llama),
    **dict.fromkeys(("stablelm", "starcoder2", "cohere", "nemotron"), Llama),
    **dict.fromkeys(("olmoe", "granitemoe", "granitemoeshared"), Mixture),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "llama4_text"), Mixture),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), Mixture),
    **dict.fromkeys(("switch_transformers", "t5", "mt5"), Switch),
    **dict.fromkeys(("bart", "mbart"), Bart),
}


def networks() -> tuple[str, ...]:
    """Return the names of the bundled networks: configurations, and suites without a configuration."""
    folder = resources.files(__name__)
    configured = {f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")}
    return tuple(sorted({*configured, *suites()}))


def network(name: str) -> Network:
    """Return a network by its name, or from a file.

    Args:
        name: Name of a bundled network; or path of a configuration (JSON or TOML with `model_type`, such as
            HuggingFace's `config.json`, or a folder with this file) or of a list of workloads (TOML or CSV).

    Raises:
        UnknownName: if there is no such network.
        InputError: if the file is invalid.
    """
    path = Path(name)
    if path.suffix.lower() in {".json", ".toml", ".csv"}:
        return _from_file(path)
    if name not in networks():
        if (path / "config.json").is_file():
            return _from_file(path / "config.json")
        raise UnknownName("network", name, networks())
    file = resources.files(__name__).joinpath(f"{name}.toml")
    if file.is_file():
        return from_config(name, tomllib.loads(file.read_text(encoding="utf-8")))
    return ListedNetwork(name, suite(name))


def from_config(name: str, config: dict[str, Any]) -> Network:
    """Return the network of a configuration.

    Args:
        name: Name of the network.
        config: Keys of HuggingFace's `config.json`; keys that do not change shapes are ignored.

    Raises:
        InputError: if `model_type` is missing or unknown, or sizes are missing or inconsistent.
    """
    if config.get("model_type") == "resnet":
        return ResNet(name, config)
    architecture = Architecture.of(config)
    return _FAMILIES[architecture.family](name, architecture)


def _from_file(path: Path) -> Network:
    """Read a configuration or a list of workloads. A `config.json` is named after its folder."""
    name = path.parent.name if path.stem == "config" and path.parent.name else path.stem
    if path.suffix.lower() == ".csv":
        return from_csv(name, read_text(path, "network "))
    content = read_table(path, "network ")
    with interpreting(f"network {path}"):
        return from_list(name, content["operation"]) if "operation" in content else from_config(name, content)


__getattr__ = renamed(
    __name__, {"Run": "NetworkRun", "AllReduce": "TensorCollective", "Exchange": "TensorCollective"}
)
