"""A user's file: the operator `twice`, and a variant with two configurations that compiles quickly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tunebench.device import Device
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, NumbaCpuVariant
from tunebench.workload import Reference, Size, Tensor, Tolerance, Workload


@dataclass(frozen=True, kw_only=True)
class Twice(Workload):
    """y = 2 x, for x (n,)."""

    operator: ClassVar[str] = "twice"

    n: Size
    dtype: Literal["f32"] = "f32"

    def inputs(self) -> tuple[Tensor, ...]:
        return (Tensor(name="x", shape=(self.n,), dtype="f32"),)

    def outputs(self) -> tuple[Tensor, ...]:
        return (Tensor(name="y", shape=(self.n,), dtype="f32"),)

    def flops(self) -> int:
        return self.n

    def reference(self, inputs: Mapping[str, Any]) -> dict[str, Reference]:
        doubled = 2 * inputs["x"]
        return {"y": Reference(value=doubled, scale=abs(doubled))}

    def tolerance(self) -> Tolerance:
        return Tolerance(eps_out=1e-6, eps_acc=1e-6, reason="one rounding")


class TwiceNumba(NumbaCpuVariant[Twice]):
    """A loop."""

    name = "own"
    operator = Twice
    space = Space((Parameter("step", (1, 2), "elements per iteration"),))

    def default(self, workload: Twice, device: Device) -> Config:
        return Config({"step": 1})

    def costs(self, workload: Twice, table: Table, device: Device) -> Costs:
        return Costs(blocks=1, full_blocks=0, threads=1, fma=float(workload.n) / 2)

    def kernel(self, workload: Twice, config: Config) -> Callable[..., None]:
        step = config["step"]

        def twice(x: Any, y: Any) -> None:
            for start in range(0, x.shape[0], step):
                for i in range(start, min(start + step, x.shape[0])):
                    y[i] = x[i] + x[i]

        return twice


VARIANT = TwiceNumba()
