"""Kernels of saved models, and the operator of torch that runs them: `torch.ops.tunebench.saved_kernel`.

The kernel is part of the file: neither a database nor a choice decides what runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tunebench.binary.compiled import Binary, CompileError
from tunebench.compile.numba_cpu import key_numba_cpu
from tunebench.compile.shared_object import shared_object
from tunebench.dispatch import BoundKernel
from tunebench.dispatch.cpu import SharedCpuKernel, binary_of, bind_cpu, key_of_shared
from tunebench.dispatch.shared_kernel import call_text, shared_key
from tunebench.dispatch.shared_kernel import load as load_shared
from tunebench.errors import InputError, TunebenchError
from tunebench.kernels import variant as find_variant
from tunebench.space import Config
from tunebench.torch._tensor import launch
from tunebench.torch.compiler._kernel_operator import layouts_of
from tunebench.torch.functional.custom_op import LIBRARY
from tunebench.variant import NumbaCpuVariant
from tunebench.workload import Workload
from tunebench.workloads import parse

__all__ = ["SavedKernel", "require_kernel"]

_KERNELS: dict[str, BoundKernel] = {}
"""Loaded kernels by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedKernel:
    """A kernel in the file of a model.

    Attributes:
        workload: Canonical text of its workload.
        variant: `Variant.key`.
        config: Its configuration.
        binary: Its machine code.
        shared: Its machine code as a shared object, which is loaded without Numba; None if it has none.
    """

    workload: str
    variant: str
    config: Config
    binary: Binary
    shared: Binary | None = None

    @classmethod
    def of(cls, kernel: BoundKernel) -> SavedKernel:
        """Return a loaded kernel with its machine code.

        Raises:
            InputError: if another process cannot load it.
        """
        if not isinstance(kernel.variant, NumbaCpuVariant):
            raise InputError(f"{kernel.variant.key} is not machine code of this processor")
        binary = binary_of(kernel.workload, kernel.variant, kernel.config)
        if not binary.payload:
            raise InputError(f"the machine code of {kernel.variant.key} has addresses of this process")
        return cls(
            workload=str(kernel.workload),
            variant=kernel.variant.key,
            config=kernel.config,
            binary=binary,
            shared=_shared(kernel.workload, kernel.variant, kernel.config, binary),
        )

    @property
    def name(self) -> str:
        """Name of the kernel: a hash of everything that it computes."""
        parts = (self.workload, self.variant, str(sorted(self.config.items())), self.binary.key)
        return hashlib.sha256("\0".join(parts).encode() + self.binary.payload).hexdigest()[:32]

    def call_text(self) -> str:
        """Return how a C++ program calls the shared object (see `shared_kernel.call_text`)."""
        workload, variant = parse(self.workload), find_variant(self.variant)
        assert isinstance(variant, NumbaCpuVariant)
        return call_text(variant, workload, self.config)

    def to_json(self) -> dict[str, Any]:
        """Return everything but the machine code as plain data."""
        return {
            "workload": self.workload,
            "variant": self.variant,
            "config": dict(self.config),
            "key": self.binary.key,
            "target": self.binary.target,
            "entries": list(self.binary.entries),
            "shared": None if self.shared is None else self.shared.key,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], payload: bytes, shared: bytes | None = None) -> SavedKernel:
        """Return the kernel that `to_json` described.

        Args:
            data: The description.
            payload: The machine code.
            shared: The shared object.
        """
        binary = Binary(
            key=data["key"],
            language="numba-cpu",
            target=data["target"],
            payload=payload,
            entries=tuple(data["entries"]),
        )
        return cls(
            workload=data["workload"],
            variant=data["variant"],
            config=Config(data["config"]),
            binary=binary,
            shared=None
            if shared is None
            else dataclasses.replace(binary, key=data["shared"], payload=shared),
        )

    def load(self) -> None:
        """Load the machine code, for calls of the operator.

        Raises:
            InputError: if this processor, or the installed versions, would compile it differently.
        """
        name = self.name
        if name in _KERNELS:
            return
        try:
            workload, variant = parse(self.workload), find_variant(self.variant)
            assert isinstance(variant, NumbaCpuVariant)
            config = Config({name: self.config[name] for name in variant.space.names})
            kernel = self._loaded_shared(workload, variant, config)
            here = self.binary.key if kernel is not None else key_numba_cpu(variant, workload, config)
        except (AssertionError, KeyError, TunebenchError) as error:
            raise InputError(f"{self.variant} for {self.workload} is not installed: {error}") from error
        if here != self.binary.key:
            raise InputError(
                f"{self.variant} was compiled for {self.binary.target} by other versions of Numba, LLVM or "
                "tunebench, or for other features of the processor; save the model again on this machine"
            )
        _KERNELS[name] = kernel or bind_cpu(workload, variant, config, self.binary)

    def _loaded_shared(
        self, workload: Workload, variant: NumbaCpuVariant[Any], config: Config
    ) -> BoundKernel | None:
        """Return the kernel of the shared object; None if Numba must load it."""
        here = key_of_shared(workload, variant, config)
        if self.shared is None or here is None or here != self.shared.key:
            return None
        digest = hashlib.sha256(self.shared.payload).hexdigest()
        loaded = load_shared(dataclasses.replace(self.shared, key=f"{here} {digest}"))
        return None if loaded is None else SharedCpuKernel(workload, variant, config, loaded)


def _shared(
    workload: Workload, variant: NumbaCpuVariant[Any], config: Config, binary: Binary
) -> Binary | None:
    """Return the shared object of a binary, or None if it has none."""
    key = shared_key(variant, workload, config)
    try:
        return None if key is None else dataclasses.replace(binary, key=key, payload=shared_object(binary))
    except CompileError:  # no linker: Numba loads the kernel
        return None


def require_kernel(name: str) -> BoundKernel:
    """Return a loaded kernel.

    Args:
        name: `SavedKernel.name`.

    Raises:
        InputError: if it was not loaded.
    """
    kernel = _KERNELS.get(name)
    if kernel is None:
        raise InputError(f"kernel {name} is not loaded: load the model by tunebench.torch.load")
    return kernel


def _run(inputs: list[Tensor], kernel: str, layouts: str) -> list[Tensor]:
    bound, (read, written) = require_kernel(kernel), layouts_of(layouts)
    tensors = [spec.read(tensor) for spec, tensor in zip(read, inputs, strict=True)]
    outputs = [spec.empty(inputs[0].device) for spec in written]
    launch(bound, [*tensors, *outputs])
    return outputs


def _fake(inputs: list[Tensor], kernel: str, layouts: str) -> list[Tensor]:
    return [spec.empty(inputs[0].device) for spec in layouts_of(layouts)[1]]


LIBRARY.define(
    "saved_kernel(Tensor[] inputs, str kernel, str layouts) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides,),
)
LIBRARY.impl("saved_kernel", _run, "CPU")
torch.library.register_fake("tunebench::saved_kernel", _fake, lib=LIBRARY)
