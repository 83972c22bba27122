"""Pruning of Triton configurations by their binaries and the forecast, for GPUs that are not here."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import needs_triton
from tunebench.errors import InputError

triton = pytest.importorskip("triton", reason="the extra `triton` is not installed")
import triton.language as tl  # noqa: E402 - after the check that it is installed

import tunebench.triton  # noqa: E402

pytestmark = needs_triton


@triton.jit
def scale(x, y, n, BLOCK: tl.constexpr, REPEAT: tl.constexpr = 1):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < n)
    tl.store(y + at, values / tl.sum(values) + tl.max(values), mask=at < n)


def tensor(*shape: int) -> Any:
    """Return what the pruner reads of a tensor."""
    return SimpleNamespace(shape=shape, dtype="torch.float32")


def config(block: int, **options: Any) -> Any:
    return triton.Config({"BLOCK": block}, **options)


def pruned(keep: float, configs: list[Any], *, arch: str = "sm_90", **changes: Any) -> list[Any]:
    n = 1 << 20
    prune = tunebench.triton.pruned_by(keep, arch=arch)
    assert prune.kernel(scale) is scale
    named = {"x": tensor(n), "y": tensor(n), "n": n, **changes}
    return prune(configs, named, grid=lambda meta: (triton.cdiv(n, meta["BLOCK"]),), warmup=False)


def test_configurations_that_cannot_run_are_left_out() -> None:
    small, odd, cluster = config(256), config(100), config(1024, num_ctas=2)
    on_hopper = pruned(3, [small, odd, cluster])
    assert small in on_hopper
    assert odd not in on_hopper
    assert pruned(3, [small, odd, cluster], arch="sm_80") == [small]  # no clusters there
    assert pruned(3, [odd]) == [odd]  # to fail with the reason


def test_slow_ones_are_left_out_and_the_default_is_kept() -> None:
    spilling, plain, other = config(4096, num_warps=1, maxnreg=24), config(1024), config(2048)
    assert pruned(2, [spilling, plain, other])[0] is spilling  # the default
    assert spilling not in pruned(2, [plain, spilling, other])
    assert pruned(0.3, [plain, spilling, other]) in ([plain], [plain, other])


def test_what_is_unknown_is_not_pruned() -> None:
    configs = [config(256), config(512)]
    with pytest.warns(RuntimeWarning, match="argument n is a str"):
        assert pruned(1, configs, n="text") == configs
    with pytest.raises(InputError, match=r"decorate the kernel with \.kernel"):
        tunebench.triton.pruned_by(arch="sm_90")(configs, {})
    with pytest.raises(InputError, match="above 0"):
        tunebench.triton.pruned_by(0)


def test_autotuner_of_triton_calls_it() -> None:
    prune = tunebench.triton.pruned_by(1, arch="sm_90")
    configs = [config(1024), config(100)]
    tuned = triton.autotune(configs, key=["n"], prune_configs_by={"early_config_prune": prune})(
        prune.kernel(scale)
    )
    tuned.nargs = {"x": tensor(4096), "y": tensor(4096), "n": 4096}
    assert tuned.prune_configs({"grid": (4, 1, 1), "warmup": False}) == configs[:1]
