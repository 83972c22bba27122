"""The configuration of a command line: given, best known or default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebench.cli._option import target_device

if TYPE_CHECKING:
    from tunebench.tuning.choice import ChosenConfig

__all__ = ["ConfigRequest", "describe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRequest:
    """The options that select a configuration; None without the option."""

    workload: str
    device: str | None
    arch: str | None
    variant: str | None
    variant_file: Path | None
    config: str | None
    db: str | None

    def choice(self) -> ChosenConfig:
        """Return the configuration; the user file is loaded first, because it may define the operator."""
        from tunebench.kernels import load_file
        from tunebench.tuning.choice import choose_config
        from tunebench.workloads import parse

        loaded = load_file(self.variant_file).key if self.variant_file is not None else None
        return choose_config(
            parse(self.workload),
            target_device(self.device, self.arch),
            variant=self.variant or loaded,
            config=self.config,
            db=self.db,
        )


def describe(choice: ChosenConfig) -> dict[str, Any]:
    """Return a configuration as plain data."""
    return {
        "workload": str(choice.workload),
        "device": choice.device.key,
        "variant": choice.variant.key,
        "config": dict(choice.config),
        "why": choice.why,
        "expected_us": choice.expected_us,
        "how": choice.how,
    }
