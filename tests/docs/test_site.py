"""The documentation site builds without a warning, its links have targets, and each subject has a page."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

from tunebench import workloads

pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")

ROOT = Path(__file__).resolve().parents[2]


SCRIPT = re.compile(r"(<script\b[^>]*>).*?</script>", re.DOTALL)
TAG = re.compile(r"<[a-zA-Z][^>]*>")
ATTRIBUTE = re.compile(r"""\s(id|name|href|src)=(?:"([^"]*)"|'([^']*)'|([^\s>"']+))""")


class Links:
    """The anchors of a page, and the addresses that it refers to."""

    def __init__(self, page: Path) -> None:
        self.anchors: set[str] = set()
        self.targets: set[str] = set()
        text = SCRIPT.sub(r"\1", page.read_text(encoding="utf-8"))
        for name, *values in ATTRIBUTE.findall("".join(TAG.findall(text))):
            addresses = self.anchors if name in ("id", "name") else self.targets
            addresses.add(unescape("".join(values)))
        self.targets.discard("")


@functools.cache
def target_page(folder: Path, path: str) -> Path:
    """Return the file that an address means on the pages of a folder."""
    target = (folder / path).resolve()
    return target / "index.html" if target.is_dir() else target


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
            linked = target_page(page.parent, path) if path else page
            if not linked.exists() or (anchor and linked in pages and anchor not in pages[linked].anchors):
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
