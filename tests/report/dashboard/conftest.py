"""Databases of each kind with something for every page, and the application on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support import needs_postgres

pytest.importorskip("starlette", reason="the extra `dashboard` is not installed")

from tests.report.dashboard.support import Answer, fill, request
from tunebench.db.browse import open_browser
from tunebench.report.dashboard.app import create_app
from tunebench.report.dashboard.catalogue import Catalogue
from tunebench.report.dashboard.page import Pages
from tunebench.report.dashboard.prediction import prepare

Get = Callable[..., Answer]


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=needs_postgres)])
def database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Location of a database of each kind; tests of a module share it and only read it."""
    if request.param == "sqlite":
        db = str(tmp_path_factory.mktemp("dashboard") / "browsed.db")
    else:
        db = str(request.getfixturevalue("server").new_database())
    fill(db)
    return db


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan, a damaged one, and a file that is no plan."""
    folder = tmp_path_factory.mktemp("plans")
    job = '[job]\nnetwork = "gpt<b>"\nbatch = 64\nseq = 1024\ndtype = "bf16"\n'
    plan = "[plan]\ntensor = 2\npipeline = 4\n"
    plan += "[predicted]\nstep_us = 1.5e6\nmfu = 0.41\nmemory_bytes = 5368709120\n"
    megatron = '[megatron]\narguments = ["--tensor-model-parallel-size=2"]\n'
    (folder / "good.toml").write_text(job + plan + megatron)
    (folder / "damaged.toml").write_text(job + "[plan]\ntensor = \n")
    (folder / "other.toml").write_text("[tool]\nname = 1\n")
    return folder


@pytest.fixture(scope="module")
def get(database: str, plans: Path) -> Iterator[Get]:
    """Request a path of the application after everything was read."""
    with open_browser(database) as browser:
        catalogue = Catalogue(browser, prepare)
        catalogue.start()
        catalogue.wait()
        yield partial(request, create_app(Pages(browser, catalogue, plans), names=("tuner.example",)))
        catalogue.close()
