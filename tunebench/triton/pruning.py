"""Pruning of Triton configurations by their binaries, the lower bound and the forecast."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunebench.binary.code_forecast import forecast_code
from tunebench.binary.compiled import CompileError
from tunebench.binary.cubin import launch_refusal
from tunebench.compile.triton import compile_launch
from tunebench.compile.triton_loop import loop_trips
from tunebench.device import Device
from tunebench.dispatch.kernel import cache
from tunebench.errors import InputError, TunebenchError
from tunebench.variant import TRITON_OPTIONS, Argument, Costs, Launch, Scalar
from tunebench.workload import Tensor, Traffic

__all__ = ["ForecastPruner"]

_DTYPES = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "int8": "i8",
    "int32": "i32",
    "int64": "i64",
    "bool": "bool",
}
_TENSOR_CORES = ("f16", "bf16", "e4m3")


class ForecastPruner:
    """Leaves out configurations that cannot run, and those that are predicted to be slow.

    It is the value of `early_config_prune`. `kernel` is a decorator that names the kernel:

        prune = tunebench.triton.pruned_by(keep=0.5)

        @triton.autotune(configs, key=["n"], prune_configs_by={"early_config_prune": prune})
        @prune.kernel
        @triton.jit
        def scale(x, y, n, BLOCK: tl.constexpr): ...

    Args:
        keep: Share of the configurations to keep, or their number; the first one is always kept if it runs.
        flops: Function of the kernel's arguments by name that returns the operations of a launch; None: few.
        device: The GPU; a function, since it is found at the first call.
    """

    def __init__(
        self,
        keep: float,
        flops: Callable[..., float] | None,
        device: Callable[[], Device | None],
    ) -> None:
        self._keep, self._flops, self._device = keep, flops, device
        self._function: Any = None

    def kernel(self, function: Any) -> Any:
        """Name the kernel, and return it unchanged.

        Args:
            function: A function of `triton.jit`.
        """
        self._function = function
        return function

    def __call__(self, configs: Sequence[Any], named: Mapping[str, Any], **kwargs: Any) -> list[Any]:
        """Return the configurations to time, in their order.

        Args:
            configs: Configurations of Triton.
            named: Arguments of the launch by name.
            kwargs: Other arguments of the launch, and its `grid`.

        Raises:
            InputError: No kernel was named.
        """
        if self._function is None:
            raise InputError("decorate the kernel with .kernel of the pruning function, below autotune")
        device = self._device()
        if device is None:
            return list(configs)
        times_us: dict[int, float] = {}
        for index, config in enumerate(configs):
            try:
                times_us[index] = self.predicted_us(config, {**named, **kwargs}, device)
            except CompileError:
                continue  # it could not run
            except TunebenchError as error:
                warnings.warn(f"not pruned: {error}", RuntimeWarning, stacklevel=2)
                return list(configs)
        if not times_us:
            return list(configs)  # the reasons show when they are tried
        most = self._keep if self._keep > 1 else self._keep * len(configs)
        ranked = sorted(times_us, key=times_us.__getitem__)[: max(1, math.ceil(most))]
        kept = {*ranked, *({0} & times_us.keys())}
        return [config for index, config in enumerate(configs) if index in kept]

    def predicted_us(self, config: Any, values: Mapping[str, Any], device: Device) -> float:
        """Return the predicted time of a configuration in microseconds, at least its lower bound.

        Args:
            config: A configuration of Triton.
            values: Arguments of the launch by name, and its `grid`.
            device: The GPU.

        Raises:
            CompileError: It does not compile, or the device cannot launch it.
            InputError: An argument has a type that this package does not know.
        """
        options = {name: getattr(config, name, None) or default for name, default in TRITON_OPTIONS.items()}
        constants = {**self._constants(values), **config.kwargs}
        arguments, tensors = _described(self._function, values, constants)
        grid = values["grid"]
        extents = grid({**values, **constants, **options}) if callable(grid) else grid
        x, y, z = (*extents, 1, 1)[:3]
        ctas = options["num_ctas"]
        launch = Launch(
            entry=self._function.__name__,
            grid=(x * ctas, y, z),
            block=(32 * options["num_warps"], 1, 1),
            arguments=arguments,
            cluster=ctas,
        )
        binary = compile_launch(self._function, launch, tensors, constants, options, device, cache())
        (completed,) = binary.launches((launch,))
        if (refusal := launch_refusal(binary, (completed,), device)) is not None:
            raise CompileError(refusal)
        trips = loop_trips(
            textwrap.dedent(self._function.src), launch.entry, {**values, **constants}, launch.grid
        )
        return forecast_code(
            binary,
            self._costs(completed, tensors, values),
            Traffic(read_bytes=sum(tensor.nbytes for tensor in tensors.values()), write_bytes=0),
            device,
            trips=trips,
            stages=options["num_stages"],
        ).us

    def _constants(self, values: Mapping[str, Any]) -> dict[str, Any]:
        names = [parameter.name for parameter in self._function.params if parameter.is_constexpr]
        return {name: values[name] for name in names if name in values}

    def _costs(self, launch: Launch, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> Costs:
        """Return the blocks, and the operations of the given function."""
        blocks = math.prod(launch.grid)
        names = self._function.arg_names
        flops = self._flops(**{n: values[n] for n in names if n in values}) if self._flops else 0.0
        dtype = next((t.dtype for t in tensors.values() if t.dtype in _TENSOR_CORES), None)
        return Costs(
            blocks=blocks,
            full_blocks=blocks,
            threads=math.prod(launch.block),
            mma_flop=flops / blocks if dtype else 0.0,
            mma_dtype=dtype,
            fma=0.0 if dtype else flops / 2 / blocks,
        )


def _described(
    kernel: Any, values: Mapping[str, Any], constants: Mapping[str, Any]
) -> tuple[tuple[Argument, ...], dict[str, Tensor]]:
    """Return the arguments of a launch, and its tensors by name.

    Raises:
        InputError: An argument has a type that this package does not know.
    """
    arguments: list[Argument] = []
    tensors: dict[str, Tensor] = {}
    for parameter in kernel.params:
        if parameter.is_constexpr or parameter.name in constants:
            continue
        value = values.get(parameter.name, parameter.default)
        dtype = _DTYPES.get(str(getattr(value, "dtype", "")).rpartition(".")[2])
        if dtype is not None:
            shape = tuple(int(extent) for extent in value.shape) or (1,)
            tensors[parameter.name] = Tensor(name=parameter.name, shape=shape, dtype=dtype)  # type: ignore[arg-type]
            arguments.append(parameter.name)
        elif isinstance(value, int) and not isinstance(value, bool):
            arguments.append(Scalar("int" if -(2**31) <= value < 2**31 else "long long", value))
        elif isinstance(value, float):
            arguments.append(Scalar("float", value))
        else:
            raise InputError(f"argument {parameter.name} is a {type(value).__name__}")
    return tuple(arguments), tensors
