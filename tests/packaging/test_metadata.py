"""The version and the dependencies are the same in every file that states them."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.packaging.distribution import ROOT
from tunebench import __version__

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RECIPE = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8"))


def test_version_is_that_of_the_citation_and_the_recipe() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == RECIPE["context"]["version"] == __version__


def test_recipe_has_the_dependencies_and_the_command_of_the_package() -> None:
    expected = [f"python {PROJECT['requires-python']}"]
    expected += [
        re.sub(r"([\w-]+)", lambda name: name[0].replace("-", "_"), requirement, count=1)
        for requirement in PROJECT["dependencies"]
    ]
    required = [
        requirement for requirement in RECIPE["requirements"]["run"] if not requirement.startswith("__")
    ]
    assert [requirement.replace(" ", "") for requirement in required] == [
        requirement.replace(" ", "") for requirement in expected
    ]
    commands = [f"{name} = {target}" for name, target in PROJECT["scripts"].items()]
    assert RECIPE["build"]["python"]["entry_points"] == commands


def test_every_tested_python_has_a_classifier() -> None:
    stated = {name.removeprefix("Programming Language :: Python :: ") for name in PROJECT["classifiers"]}
    source = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    (pythons,) = re.findall(r"^PYTHONS = \((.*)\)$", source, re.MULTILINE)
    assert set(re.findall(r"[\d.]+", pythons)) <= stated
