"""The configuration to show, export or explain: the given one, the best known one, or that predicted best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunebench.cli._option import (
    Architecture,
    ConfigText,
    DeviceName,
    ReadDatabase,
    VariantFiles,
    VariantName,
    WorkloadText,
    target_device,
)

if TYPE_CHECKING:
    from tunebench.device import Device
    from tunebench.tuning.choice import ChosenConfig

__all__ = ["ConfigRequest", "describe", "in_words"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRequest:
    """Command-line options that select a configuration; None for an option that was not given."""

    workload: WorkloadText
    device: DeviceName = None
    arch: Architecture = None
    variant: VariantName = None
    variant_file: VariantFiles = None
    config: ConfigText = None
    db: ReadDatabase = None

    def target(self) -> Device:
        """Return the device that was given, or this machine's."""
        return target_device(self.device, self.arch)

    def variant_key(self) -> str | None:
        """Return the variant that was given, or that of a single variant file."""
        from tunebench.kernels import load_file

        if self.variant is None and self.variant_file is not None and len(self.variant_file) == 1:
            return load_file(self.variant_file[0]).key
        return self.variant

    def choice(self) -> ChosenConfig:
        """Return the configuration."""
        from tunebench.tuning.choice import choose_config
        from tunebench.workloads import parse

        return choose_config(
            parse(self.workload), self.target(), variant=self.variant_key(), config=self.config, db=self.db
        )


def in_words(choice: ChosenConfig) -> str:
    """Return variant, configuration and the reason of a choice, in one line."""
    why = f"{choice.why}: {choice.because}" if choice.because else choice.why
    return f"{choice.variant.key} {choice.config} ({why})"


def describe(choice: ChosenConfig) -> dict[str, Any]:
    """Return a choice as a JSON-serialisable dictionary."""
    return {
        "workload": str(choice.workload),
        "device": choice.device.key,
        "variant": choice.variant.key,
        "config": dict(choice.config),
        "why": choice.why,
        "because": choice.because,
        "expected_us": choice.expected_us,
        "how": choice.how,
    }
