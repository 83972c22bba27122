"""Sums of trees, by hand and compared with scikit-learn."""

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


def test_forest_returns_no_values_for_no_rows() -> None:
    assert forked()(np.zeros((0, 2))).shape == (0,)


@pytest.mark.parametrize("at_once", [1, 4, 6, 7])
def test_forest_evaluates_rows_in_chunks(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(forest, "CHUNK_ROWS", at_once)
    assert forked()(ROWS).tolist() == VALUES


def test_forest_round_trips_through_arrays() -> None:
    arrays = forked().arrays()
    reread = Forest.from_arrays(arrays)
    assert reread(ROWS).tolist() == VALUES
    assert {name: array.tolist() for name, array in reread.arrays().items()} == {
        name: array.tolist() for name, array in arrays.items()
    }


@pytest.mark.usefixtures("learns")
def test_forest_predicts_like_scikit_learn() -> None:
    from sklearn import ensemble

    from tunebench.forecast.model_training import fit

    rng = np.random.default_rng(1)
    rows = rng.standard_normal((600, 5)).astype(np.float32)
    # A column with two values so close that no f32 lies between them.
    rows[:, 4] = np.where(rng.random(600) < 0.5, 1 + 2**-23, 1 + 2**-22)
    target = np.where(rows[:, 0] > 0, rows[:, 1], rows[:, 2] ** 2) + 3 * (rows[:, 4] == 1 + 2**-22)
    grown = ensemble.HistGradientBoostingRegressor(
        loss="absolute_error", max_iter=30, max_leaf_nodes=15, min_samples_leaf=5, random_state=0
    ).fit(rows, target)
    converted = fit.forest_of(grown)
    asked = np.concatenate([rows, rng.standard_normal((200, 5)).astype(np.float32)])
    assert converted(asked) == pytest.approx(grown.predict(asked), abs=1e-5)
    assert 1 < converted.depth < 15
    assert len(converted.roots) == 30
