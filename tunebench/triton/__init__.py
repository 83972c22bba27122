"""Drop-in replacements for `triton.autotune`, whose results persist, and for functions that prune its search.

>>> import tunebench.triton
>>> @tunebench.triton.autotune(configs=[...], key=["n"])  # doctest: +SKIP
... @triton.jit
... def kernel(x, y, n, BLOCK: tl.constexpr): ...

Importing this package imports neither Triton nor PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebench.errors import InputError

if TYPE_CHECKING:
    from tunebench.triton.autotuner import PersistentAutotuner
    from tunebench.triton.pruning import ForecastPruner

__all__ = ["autotune", "pruned_by"]


def autotune(
    configs: Sequence[Any] | None = None,
    key: Sequence[str] = (),
    *,
    space: Mapping[str, Sequence[Any]] | None = None,
    constraint: Callable[..., bool] | None = None,
    trials: int | None = None,
    reference: Callable[..., Any] | None = None,
    tolerance: float | None = None,
    verify: bool = True,
    db: str | Path | None = None,
    wait_s: float = 600.0,
    **common: Any,
) -> Callable[[Any], PersistentAutotuner]:
    """Tune a function of `triton.jit` at its first call for each key, as `triton.autotune` does.

    Results are stored in the database, and later programs use them. See docs/guide/triton.md.

    Args:
        configs: Configurations, as for `triton.autotune`. The first one is the default.
        key: Names of arguments whose values decide the best configuration.
        space: Values of each `tl.constexpr` argument, `num_warps`, `num_stages`, `num_ctas` and `maxnreg`, in
            place of `configs`; the first value of each is the default.
        constraint: Function of the parameters of `space` that a valid configuration satisfies.
        trials: Most configurations to time for a key; those that were fast for other keys come first.
            None times all.
        reference: Function of the kernel's arguments by name that returns what it must write: a tensor, a
            tuple in the order of the arguments, or a mapping by name. Default: what the first configuration
            writes.
        tolerance: Largest error, as a share of the largest magnitude in an output. Default: 64 roundings of
            its type; integers must be equal.
        verify: Whether to compare results; it needs memory for two copies of the tensors.
        db: As for `tunebench.tune`.
        wait_s: Most seconds to wait for another process that tunes the same key, in seconds; the default
            configuration runs afterwards. 0 does not wait.
        common: Other arguments of `triton.autotune`: `prune_configs_by`, `reset_to_zero`, `restore_value`,
            `pre_hook`, `post_hook`, `warmup`, `rep`, `use_cuda_graph`, `do_bench`, `cache_results`. The last
            one has no effect.

    Returns:
        A decorator for a function of `triton.jit`, also below `triton.heuristics`.

    Raises:
        InputError: Neither or both of `configs` and `space` are given.
        MissingDependency: Triton is not installed, or too old.
    """
    from tunebench.compile.triton import triton_version

    triton_version()
    from tunebench.triton.autotuner import PersistentAutotuner, Policy, configs_of

    if (configs is None) == (space is None):
        raise InputError("autotune needs either configs= or space=")
    chosen = list(configs) if configs is not None else configs_of(space or {}, constraint)
    policy = Policy(
        trials=trials, reference=reference, tolerance=tolerance, verify=verify, db=db, wait_s=wait_s
    )

    def decorate(function: Any) -> PersistentAutotuner:
        return PersistentAutotuner(function, chosen, list(key), policy, common)

    return decorate


def pruned_by(
    keep: float = 0.5, *, flops: Callable[..., float] | None = None, arch: str | None = None
) -> ForecastPruner:
    """Return a function for `early_config_prune` that leaves out what cannot run or is predicted to be slow.

    Each configuration is compiled, without a driver; see `tunebench.triton.pruning.ForecastPruner`.

    Args:
        keep: Share of the configurations to keep, or their number if above 1.
        flops: Function of the kernel's arguments that returns the operations of a launch.
        arch: Architecture or name of the GPU. Default: the one that Triton launches on.

    Raises:
        InputError: `keep` is not above 0.
        UnknownName: There is no such device.
    """
    from tunebench.device import find
    from tunebench.triton.pruning import ForecastPruner

    if not keep > 0:
        raise InputError(f"keep must be above 0, got {keep}")
    device = None if arch is None else find(arch)

    def current() -> Any:
        if device is not None:
            return device
        from tunebench.triton.autotuner import current_device

        return current_device()

    return ForecastPruner(keep, flops, current)
