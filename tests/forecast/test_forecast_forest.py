"""Sums of trees: by hand, and against the library that grows them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.forecast.hand_made import constant, forked
from tunebench.forecast.library import forest
from tunebench.forecast.library.forest import Forest

ROWS = np.array([[0.0, 0.0], [1.0, 5.0], [2.0, -2.0], [2.0, -1.9], [1.0 + 1e-9, 9.0], [1.001, 9.0]])
VALUES = [110.5, 110.5, 120.5, 130.5, 110.5, 130.5]


def test_a_row_goes_left_up_to_the_threshold_of_its_f32() -> None:
    assert forked()(ROWS).tolist() == VALUES


def test_a_leaf_alone_is_a_constant() -> None:
    assert constant(-1.5)(np.zeros((3, 0))).tolist() == [-1.5] * 3


def test_no_rows_have_no_values() -> None:
    assert forked()(np.zeros((0, 2))).shape == (0,)


@pytest.mark.parametrize("at_once", [1, 4, 6, 7])
def test_rows_go_by_chunks(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(forest, "CHUNK_ROWS", at_once)
    assert forked()(ROWS).tolist() == VALUES


def test_arrays_are_all_there_is() -> None:
    arrays = forked().arrays()
    again = Forest.from_arrays(arrays)
    assert again(ROWS).tolist() == VALUES
    assert {name: array.tolist() for name, array in again.arrays().items()} == {
        name: array.tolist() for name, array in arrays.items()
    }


@pytest.mark.usefixtures("learns")
def test_trees_are_those_that_were_grown() -> None:
    from sklearn import ensemble

    from tunebench.forecast.training import fit

    rng = np.random.default_rng(1)
    rows = rng.standard_normal((600, 5)).astype(np.float32)
    # A column whose two values lie so near that the threshold between them is none in f32.
    rows[:, 4] = np.where(rng.random(600) < 0.5, 1 + 2**-23, 1 + 2**-22)
    target = np.where(rows[:, 0] > 0, rows[:, 1], rows[:, 2] ** 2) + 3 * (rows[:, 4] == 1 + 2**-22)
    grown = ensemble.HistGradientBoostingRegressor(
        loss="absolute_error", max_iter=30, max_leaf_nodes=15, min_samples_leaf=5, random_state=0
    ).fit(rows, target)
    found = fit._forest(grown)
    asked = np.concatenate([rows, rng.standard_normal((200, 5)).astype(np.float32)])
    assert found(asked) == pytest.approx(grown.predict(asked), abs=1e-5)
    assert 1 < found.depth < 15
    assert len(found.roots) == 30
