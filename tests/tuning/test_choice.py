"""Choice of the configuration to show or export: the requested one, the best known one, or the default."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.support import VERIFIED, measured, needs_cuda, record_outcome
from tunebench import kernels
from tunebench.device import Device, local_cpu, representative
from tunebench.errors import ConfigError, InputError, UnknownName
from tunebench.outcome import Predicted
from tunebench.space import Config
from tunebench.tuning.choice import choose_config
from tunebench.workloads import parse

WORKLOAD = parse("softmax:rows=64,cols=128,dtype=f32")
CPU, H100 = local_cpu(), representative("sm_90")


def another(key: str, device: Device, steps: int) -> Config:
    """Return a valid configuration other than the default."""
    variant = kernels.variant(key)
    table = variant.configs(WORKLOAD, device)
    row = table.row(variant.default(WORKLOAD, device))
    assert row is not None
    return table.config((row + steps) % len(table))


def test_default_is_chosen_without_a_record(tmp_path: Path) -> None:
    chosen = choose_config(WORKLOAD, CPU, db=tmp_path / "none.db")
    assert (chosen.variant.key, chosen.why, chosen.how) == ("softmax/numba_cpu", "default", "predicted")
    assert chosen.config == chosen.variant.default(WORKLOAD, CPU)
    assert chosen.expected_us > 0


def test_the_best_known_wins(tmp_path: Path) -> None:
    db, key = tmp_path / "some.db", "softmax/numba_cpu"
    record_outcome(db, WORKLOAD, CPU, key, another(key, CPU, 1), measured(9.0))
    record_outcome(db, WORKLOAD, CPU, key, another(key, CPU, 2), measured(7.0))
    chosen = choose_config(WORKLOAD, CPU, db=db)
    assert chosen.config == another(key, CPU, 2)
    assert (chosen.why, chosen.expected_us, chosen.how) == ("best known", 7.0, "measured here")


@needs_cuda
def test_the_best_of_one_variant_is_not_the_best_of_all(tmp_path: Path) -> None:
    db = tmp_path / "some.db"
    cuda, numba = "softmax/cuda_block", "softmax/numba_cuda"
    record_outcome(db, WORKLOAD, H100, cuda, another(cuda, H100, 1), measured(5.0))
    record_outcome(db, WORKLOAD, H100, numba, another(numba, H100, 1), measured(6.0))
    assert choose_config(WORKLOAD, H100, db=db).variant.key == cuda
    for name in ("numba_cuda", numba):
        chosen = choose_config(WORKLOAD, H100, variant=name, db=db)
        assert (chosen.variant.key, chosen.config, chosen.expected_us) == (
            numba,
            another(numba, H100, 1),
            6.0,
        )


@needs_cuda
def test_choice_names_the_source_of_its_time(tmp_path: Path) -> None:
    db, key = tmp_path / "some.db", "softmax/cuda_block"
    config, h200 = another(key, H100, 1), dataclasses.replace(H100, name="h200-sxm")
    record_outcome(db, WORKLOAD, H100, key, config, Predicted(predicted_us=4.0, verification=VERIFIED))
    assert (choose_config(WORKLOAD, H100, db=db).how, choose_config(WORKLOAD, H100, db=db).expected_us) == (
        "predicted",
        4.0,
    )
    record_outcome(db, WORKLOAD, H100, key, config, measured(5.0))
    assert choose_config(WORKLOAD, h200, db=db).how == "same architecture"


@needs_cuda
def test_default_predicted_fastest_is_chosen(tmp_path: Path) -> None:
    able = [v.key for v in kernels.variants("softmax") if v.refuses(WORKLOAD, H100) is None]
    single = [choose_config(WORKLOAD, H100, variant=key, db=tmp_path / "none.db") for key in able]
    assert len(single) >= 2
    chosen = choose_config(WORKLOAD, H100, db=tmp_path / "none.db")
    assert chosen == min(single, key=lambda choice: choice.expected_us)


def test_requested_configuration_is_chosen_if_valid(tmp_path: Path) -> None:
    config = another("softmax/numba_cpu", CPU, 3)
    chosen = choose_config(WORKLOAD, CPU, variant="numba_cpu", config=str(config), db=tmp_path / "none.db")
    assert (chosen.config, chosen.why, chosen.how) == (config, "asked for", "predicted")
    with pytest.raises(ConfigError, match="is not valid; expected"):
        choose_config(WORKLOAD, CPU, variant="numba_cpu", config="passes=99")
    with pytest.raises(UnknownName, match="unknown variant of softmax 'nope'"):
        choose_config(WORKLOAD, CPU, variant="nope")


@needs_cuda
def test_a_configuration_that_breaks_a_constraint_is_refused() -> None:
    with pytest.raises(ConfigError, match="violates"):
        choose_config(
            WORKLOAD,
            H100,
            variant="cuda_block",
            config="cache=registers,row_threads=64,rows=32,vector=4,unroll=1",
        )


@needs_cuda
def test_a_configuration_needs_its_variant() -> None:
    with pytest.raises(
        InputError, match="name the variant of the configuration, one of: cuda_block, numba_cuda"
    ):
        choose_config(WORKLOAD, H100, config="threads=128")
