"""The documentation site builds without a warning, its links have targets, and each subject has a page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tunebench import workloads

pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")

ROOT = Path(__file__).resolve().parents[2]


class Links(HTMLParser):
    """The anchors of a page, and the addresses that it refers to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.anchors |= {name for name in (attributes.get("id"), attributes.get("name")) if name}
        self.targets += [target for target in (attributes.get("href"), attributes.get("src")) if target]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_link_within_the_site_has_a_target(site: Path) -> None:
    pages = {page: Links(page) for page in site.rglob("*.html")}
    broken = []
    for page, links in pages.items():
        for target in links.targets:
            if re.match(r"[a-z]+:|//", target) or page.name == "404.html":
                continue
            path, _, anchor = unquote(target).partition("#")
            target_page = (page.parent / path).resolve() if path else page
            target_page = target_page / "index.html" if target_page.is_dir() else target_page
            if not target_page.exists() or (
                anchor and target_page in pages and anchor not in pages[target_page].anchors
            ):
                broken.append((str(page.relative_to(site)), target))
    assert len(pages) > 100
    assert not broken


def test_site_has_every_operator_decision_and_page_of_results(site: Path) -> None:
    assert {page.stem for page in (site / "operators").iterdir()} == set(workloads.all_operators())
    for source, target in (("docs/decisions", "decisions"), ("benchmarks/results", "results")):
        made = {page.relative_to(site / target).as_posix() for page in (site / target).rglob("*.html")}
        sources = {page.relative_to(ROOT / source).as_posix() for page in (ROOT / source).rglob("*.md")}
        assert sources
        assert {page.replace("README.md", "index.md").replace(".md", ".html") for page in sources} <= made


def test_reference_documents_public_names_with_their_arguments(site: Path) -> None:
    page = (site / "reference" / "tunebench.training.cluster.html").read_text(encoding="utf-8")
    for name in ("TrainingCluster", "TrainingJob", "plan_training"):
        assert f'id="tunebench.training.cluster.{name}"' in page


def test_notebooks_are_pages_and_have_no_outputs(site: Path) -> None:
    notebooks = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
    assert {page.stem for page in (site / "notebooks").glob("*.html")} == {path.stem for path in notebooks}
    for notebook in notebooks:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        assert not [cell["outputs"] for cell in cells if cell.get("outputs")], notebook.name
