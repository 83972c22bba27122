"""An `Autotuner` of Triton whose results are stored, verified and shared.

Source: `triton.runtime.autotuner.Autotuner` of Triton 3.6 to 3.9, whose hooks and pruning this class uses.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import re
import statistics
import sys
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebench import device as devices
from tunebench import space
from tunebench.compile.triton import triton_version
from tunebench.db.record import AUTOTUNED
from tunebench.device import Device
from tunebench.errors import InputError, TunebenchError, describe_error
from tunebench.outcome import CompileFailed, LaunchFailed, Measured, Outcome, Verification, WrongResult
from tunebench.own_kernel.triton_text import triton_module
from tunebench.triton.history import KernelHistory, attempts, open_history, record_crash
from tunebench.triton.tensors import WrittenTensors
from tunebench.variant import TRITON_OPTIONS

triton_version()  # explains what is missing
import triton  # noqa: E402
from triton.runtime.autotuner import Autotuner, Config  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402
from triton.runtime.errors import AutotunerError  # noqa: E402

__all__ = ["PersistentAutotuner", "Policy", "configs_of"]

_QUANTILES = (0.5, 0.2, 0.8)
_ROUNDS = 2
"""Times that the fastest configuration and the default are timed again, in turn."""
_COMPILING = ("CompilationError", "CompileTimeAssertionFailure", "PTXASError", "OutOfResources")
"""Errors of Triton that concern a configuration before it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Arguments of `tunebench.triton.autotune` that `triton.autotune` does not have."""

    trials: int | None = None
    reference: Callable[..., Any] | None = None
    tolerance: float | None = None
    verify: bool = True
    db: str | Path | None = None
    wait_s: float = 600.0


def configs_of(values: Mapping[str, Sequence[Any]], constraint: Callable[..., bool] | None) -> list[Config]:
    """Return the configurations of a space that satisfy a constraint.

    Args:
        values: Values of each `tl.constexpr` argument and option.
        constraint: Function of the parameters by name; None accepts all.

    Raises:
        InputError: No configuration satisfies it.
    """
    rows = [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]
    valid = [row for row in rows if constraint is None or constraint(**row)]
    if not valid:
        raise InputError("no configuration of space satisfies the constraint")
    return [
        Config(
            {name: value for name, value in row.items() if name not in TRITON_OPTIONS},
            **{name: value or None for name, value in row.items() if name in TRITON_OPTIONS},
        )
        for row in valid
    ]


class PersistentAutotuner(Autotuner):  # type: ignore[misc]
    """A kernel that is tuned at its first call for each key; see `tunebench.triton.autotune`.

    Args:
        function: A function of `triton.jit`.
        configs: Configurations; the first one is the default.
        key: Names of arguments.
        policy: Arguments that `triton.autotune` does not have.
        common: Arguments of `triton.autotune`, by name.

    Attributes:
        failures: Why configurations were left out, by key and configuration.
    """

    def __init__(
        self,
        function: Any,
        configs: list[Config],
        key: list[str],
        policy: Policy,
        common: Mapping[str, Any],
    ) -> None:
        arguments = {"reset_to_zero": None, "restore_value": None, **common, "cache_results": False}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of warmup, rep and use_cuda_graph
            super().__init__(function, function.arg_names, configs, key, **arguments)
        self.nargs: Any = None
        self.policy = policy
        self.failures: dict[Hashable, dict[str, str]] = {}
        self._said: set[str] = set()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch the best configuration; the first call with a key tunes."""
        named = dict(zip(self.arg_names, args, strict=False))
        values = {**named, **kwargs} if kwargs else named
        key = tuple(
            [values.get(name) for name in self.keys]
            + [value.dtype for name, value in values.items() if hasattr(value, "dtype")]
        )
        config = self.cache.get(key)
        if config is None:
            self.nargs = named
            try:
                config = self._choose(key, args, kwargs)
            finally:
                self.nargs = None
        self.best_config = config
        if config.pre_hook is not None:
            config.pre_hook({**named, **kwargs, **config.all_kwargs()})
        return self.fn.run(*args, **kwargs, **config.all_kwargs())

    def _choose(self, key: Hashable, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Config:
        """Return the configuration of a key, and keep it unless it is the default for want of tuning."""
        configs = self.prune_configs(kwargs) if len(self.configs) > 1 else self.configs
        default = next((config for config in configs if config is self.configs[0]), configs[0])
        if len(configs) == 1:
            self.cache[key] = default
            return default
        if _is_capturing():
            self._say("not tuned while a CUDA graph is captured: call it once before")
            return default
        if triton.knobs.runtime.interpret and self._do_bench is None:
            return default
        tuning = _Tuning(self, key, configs, default, args, dict(kwargs))
        best = tuning.result()
        if best is None:
            return default
        self.cache[key] = best
        full = {**self.nargs, **kwargs, **best.all_kwargs()}
        self.pre_hook(full, reset_only=True)
        return best

    def _say(self, text: str) -> None:
        """Warn once for each text."""
        if text not in self._said:
            self._said.add(text)
            warnings.warn(f"{self.base_fn.__name__}: {text}", RuntimeWarning, stacklevel=2)


class _Tuning:
    """Tuning of one kernel for one key."""

    def __init__(
        self,
        tuner: PersistentAutotuner,
        key: Hashable,
        configs: list[Config],
        default: Config,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._tuner, self._policy = tuner, tuner.policy
        self._default, self._args, self._kwargs = default, args, kwargs
        self._configs = {str(stored_config(config)): config for config in configs}
        self._default_name = str(stored_config(default))
        self._key = key
        self._failures = tuner.failures.setdefault(key, {})
        self._written: WrittenTensors | None = None
        self._outcomes: dict[str, Outcome] = {}

    def result(self) -> Config | None:
        """Return the best configuration; None if another process tunes this key for too long."""
        device = current_device()
        if device is None:
            return self._tuned(None)
        name = f"triton_{self._tuner.base_fn.__name__}"
        workload = f"{name}:{self._key_text()}"
        try:
            with open_history(
                self._policy.db, device, workload, f"{name}{AUTOTUNED}", revision_of(self._tuner.base_fn)
            ) as history:
                return self._shared(history)
        except TunebenchError as error:
            self._tuner._say(f"results are not stored: {error}")
            return self._tuned(None)

    def _key_text(self) -> str:
        values = {**self._tuner.nargs, **self._kwargs}
        parts = {name: values.get(name) for name in self._tuner.keys}
        kinds = [str(v.dtype).rpartition(".")[2] for v in values.values() if hasattr(v, "dtype")]
        parts["dtypes"] = "+".join(kinds) or "none"
        plain = {name: re.sub(r"[^\w.+-]", "_", str(value)) for name, value in parts.items()}
        return ",".join(f"{name}={value}" for name, value in plain.items())

    def _shared(self, history: KernelHistory) -> Config | None:
        """Return the best known configuration, or tune when it is this process's turn."""
        self._outcomes = history.outcomes()
        if not self._untimed(history):
            return self._fastest()
        with history.turn(self._policy.wait_s) as own_turn:
            record_crash(history)
            self._outcomes = history.outcomes()  # another process may have tuned in the meantime
            if not self._untimed(history):
                return self._fastest()
            if not own_turn:
                self._tuner._say("another process tunes it: the default configuration runs until then")
                return None
            return self._tuned(history)

    def _untimed(self, history: KernelHistory | None) -> list[str]:
        """Return the configurations to time: the default, those fast for other keys, and the others."""
        fast = history.fast_elsewhere() if history is not None else []
        order = dict.fromkeys((self._default_name, *fast, *self._configs))
        names = [name for name in order if name in self._configs]
        if self._policy.trials is not None:
            names = names[: max(1, self._policy.trials)]
        return [name for name in names if name not in self._outcomes]

    def _tuned(self, history: KernelHistory | None) -> Config:
        """Time what is not known, and return the fastest.

        Raises:
            AutotunerError: Every configuration failed; the message has the reasons.
        """
        self._learn()
        for name in self._untimed(history):
            if history is None:
                self._outcomes[name] = self._outcome(self._configs[name])
                continue
            history.renew()
            config = stored_config(self._configs[name])
            with attempts(history, config):
                self._outcomes[name] = self._outcome(self._configs[name])
            self._record(history, name)
            self._stop_after_fault(name)
        return self._settled(history)

    def _record(self, history: KernelHistory | None, name: str) -> None:
        """Store an outcome, unless memory was short, which is no property of the configuration."""
        outcome = self._outcomes[name]
        if history is not None and "OutOfMemoryError" not in getattr(outcome, "reason", ""):
            history.record(stored_config(self._configs[name]), outcome)

    def _fastest(self) -> Config:
        for name in self._configs:
            outcome = self._outcomes.get(name)
            if outcome is not None and not isinstance(outcome, Measured):
                self._failures[name] = getattr(outcome, "reason", outcome.kind)
        times = {
            name: outcome.median_us
            for name, outcome in self._outcomes.items()
            if name in self._configs and isinstance(outcome, Measured)
        }
        if not times:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._failures.items())
            raise AutotunerError(f"every configuration of {self._tuner.base_fn.__name__} failed: {reasons}")
        return self._configs[min(times, key=times.__getitem__)]

    def _settled(self, history: KernelHistory | None) -> Config:
        """Time the fastest configuration and the default again, in turn, until the fastest stays."""
        for _ in self._configs:
            best = self._fastest()
            default = self._outcomes.get(self._default_name)
            if best is self._default or not isinstance(default, Measured):
                return best
            self._time_again(history, best)
            if self._fastest() is best:
                return best
        return self._default

    def _time_again(self, history: KernelHistory | None, best: Config) -> None:
        """Replace the times of a configuration and the default by those of rounds in turn."""
        rounds: dict[str, list[tuple[float, float, float]]] = {}
        try:
            for _ in range(_ROUNDS):
                for config in (best, self._default):
                    rounds.setdefault(str(stored_config(config)), []).append(self._times_ms(config))
        finally:
            self._restore()
        for name, times in rounds.items():
            former = self._outcomes[name]
            assert isinstance(former, Measured)
            median, low, high = (1000 * statistics.median(column) for column in zip(*times, strict=True))
            self._outcomes[name] = dataclasses.replace(
                former, median_us=median, ci_us=(low, high), samples_us=(median, low, high)
            )
            self._record(history, name)

    # -- one configuration ----------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Find what the kernel writes, with the default configuration or the first that runs."""
        values = {**self._tuner.nargs, **self._kwargs}
        tensors = {name: value for name, value in values.items() if _is_tensor(value)}
        if not self._policy.verify or not tensors:
            return
        try:
            written = WrittenTensors(tensors, self._policy.tolerance)
        except RuntimeError as error:  # of PyTorch, if memory is short
            self._tuner._say(f"results are not verified: {describe_error(error)}")
            return
        for config in (self._default, *self._configs.values()):
            try:
                written.learn(functools.partial(self._launch, config))
                break
            except Exception:  # its turn comes, and records why it fails
                written.restore()
        if self._policy.reference is not None:
            names = {name: value for name, value in values.items() if name in self._tuner.arg_names}
            written.expect(self._policy.reference(**names))
        self._written = written

    def _launch(self, config: Config) -> None:
        """Launch once, with the hooks that prepare a launch."""
        full = {**self._tuner.nargs, **self._kwargs, **config.all_kwargs()}
        if config.pre_hook is not None:
            config.pre_hook(full)
        self._tuner.pre_hook(full, reset_only=True)
        self._tuner.fn.run(*self._args, **self._kwargs, **config.all_kwargs())

    def _outcome(self, config: Config) -> Outcome:
        """Verify and time a configuration; any exception is its failure."""
        try:
            if self._written is not None:
                wrong = self._written.check(lambda: self._launch(config))
                if wrong is not None:
                    return WrongResult(reason=wrong)
            times_ms = self._times_ms(config)
        except Exception as error:
            kind = CompileFailed if type(error).__name__ in _COMPILING else LaunchFailed
            return kind(reason=describe_error(error)[:2000])
        finally:
            self._restore()
        median, low, high = (1000 * time for time in times_ms)
        how, detail = ("compared", "with the default configuration")
        if self._written is None:
            how, detail = "not verified", "tensors were not compared"
        elif self._policy.reference is not None:
            how, detail = "reference", "the tensors of the first call"
        return Measured(
            median_us=median,
            ci_us=(low, high),
            samples_us=(median, low, high),
            cache="cold",
            verification=Verification(how=how, detail=detail),  # type: ignore[arg-type]
            conditions={"timed_by": "do_bench of Triton: median, 20 % and 80 % quantile"},
        )

    def _times_ms(self, config: Config) -> tuple[float, float, float]:
        """Return median, 20 % and 80 % quantile in milliseconds, with the hooks of each launch."""
        tuner = self._tuner
        current = {**self._kwargs, **config.all_kwargs()}
        full = {**tuner.nargs, **current}

        def call() -> None:
            if config.pre_hook is not None:
                config.pre_hook(full)
            tuner.pre_hook(full)
            try:
                tuner.fn.run(*self._args, **current)
            except Exception as error:
                tuner.post_hook(full, exception=error)
                raise
            tuner.post_hook(full, exception=None)

        times = tuner.do_bench(call, quantiles=_QUANTILES)
        median, low, high = times if isinstance(times, list | tuple) else (times, times, times)
        return float(median), float(low), float(high)

    def _restore(self) -> None:
        if self._written is not None:
            self._written.restore()

    def _stop_after_fault(self, name: str) -> None:
        """Raise if the device is unusable since a configuration ran.

        Raises:
            AutotunerError: It is; the configuration is recorded, so that a new process leaves it out.
        """
        torch = sys.modules.get("torch")
        if not isinstance(self._outcomes[name], LaunchFailed) or torch is None:
            return
        try:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except RuntimeError as error:
            raise AutotunerError(
                f"{self._tuner.base_fn.__name__} with {name} made the GPU unusable for this process "
                f"({describe_error(error)}). It is recorded: start the program again, and it is left out"
            ) from None


def stored_config(config: Config) -> space.Config:
    """Return a configuration as it is stored.

    Args:
        config: A configuration of Triton.
    """
    values = {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in sorted(config.kwargs.items())
    }
    for name, default in TRITON_OPTIONS.items():
        values[name] = getattr(config, name, None) or default
    if getattr(config, "ir_override", None):
        values["ir_override"] = str(config.ir_override)
    if config.pre_hook is not None:
        values["pre_hook"] = getattr(config.pre_hook, "__qualname__", type(config.pre_hook).__name__)
    return space.Config(values)


def revision_of(function: Any) -> str:
    """Return a hash of a kernel's text and of Triton's version.

    The text has no comments, and no position in a file: only changes of the code void timings.

    Args:
        function: The function that Triton decorates.
    """
    try:
        text = triton_module(function, "kernel")
    except InputError:  # it uses a value without text: any change of its bytecode counts
        text = repr((function.__code__.co_code, function.__code__.co_consts))
    return hashlib.sha256(f"{triton_version()} {text}".encode()).hexdigest()[:16]


def current_device() -> Device | None:
    """Return the GPU that Triton launches on; None if this package does not know it, such as AMD's."""
    gpus = devices.local_gpus()
    try:
        index = driver.active.get_current_device()
    except RuntimeError:  # no driver
        return None
    return gpus[index] if index < len(gpus) else None


def _is_capturing() -> bool:
    torch = sys.modules.get("torch")
    return bool(torch and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
