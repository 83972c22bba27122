"""Pages of the documentation site that are made from the repository (a hook of MkDocs; see mkdocs.yml).

Adds to docs/: the README and CHANGELOG, the READMEs of packages, every page of benchmarks/results, a page for
each operator with the parameters of its variants, and a reference of the public packages. Links between files
of the repository become links between pages; the names of other files stay as text.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tunebench import kernels, workloads
from tunebench.variant import Variant
from tunebench.workload import Workload

ROOT = Path(__file__).resolve().parents[1]

PACKAGES = (
    "tunebench",
    "tunebench.answer",
    "tunebench.bound",
    "tunebench.cache_file",
    "tunebench.datasheet",
    "tunebench.db",
    "tunebench.device",
    "tunebench.dispatch",
    "tunebench.dtype",
    "tunebench.errors",
    "tunebench.executor",
    "tunebench.explanation",
    "tunebench.export",
    "tunebench.forecast",
    "tunebench.graph",
    "tunebench.kernels",
    "tunebench.numba",
    "tunebench.outcome",
    "tunebench.search",
    "tunebench.space",
    "tunebench.torch",
    "tunebench.training",
    "tunebench.training.cluster",
    "tunebench.training.interconnect",
    "tunebench.training.memory",
    "tunebench.training.pipeline",
    "tunebench.training.schedules",
    "tunebench.training.steps",
    "tunebench.tuning",
    "tunebench.variant",
    "tunebench.workload",
    "tunebench.workloads",
    "tunebench.workloads.networks",
)
"""Packages and modules of the public interface."""

_TEXT = r"(?P<text>(?:[^\[\]]|\[[^\]]*\])*)"
_LINK = re.compile(rf"(?P<image>!?)\[{_TEXT}\]\((?P<target>[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def _repository_pages() -> dict[str, str]:
    """Return the path in the site of each page outside docs/, by its path in the repository."""
    pages = {
        "README.md": "readme.md",
        "CHANGELOG.md": "changelog.md",
        "db/README.md": "packages/db.md",
        "tests/gpu/README.md": "gpu-acceptance.md",
    }
    for path in sorted((ROOT / "tunebench").rglob("README.md")):
        room = path.parent.relative_to(ROOT / "tunebench").as_posix()
        target = "emulator.md" if room == "emulate" else f"packages/{room.replace('/', '-')}.md"
        pages[f"tunebench/{room}/README.md"] = target
    for path in sorted((ROOT / "benchmarks" / "results").rglob("*.md")):
        at = path.relative_to(ROOT).as_posix()
        pages[at] = at.removeprefix("benchmarks/")
    return pages


REPOSITORY_PAGES = _repository_pages()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those of docs/, and all of them to the navigation."""
    made = {target: (ROOT / path).read_text(encoding="utf-8") for path, target in REPOSITORY_PAGES.items()}
    operators = {
        f"operators/{name}.md": _operator_page(cls) for name, cls in workloads.all_operators().items()
    }
    reference = {f"reference/{name}.md": _reference_page(name) for name in PACKAGES}
    for path, text in {**made, **operators, **reference}.items():
        files.append(File.generated(config, path, content=text))
    decisions = sorted(file.src_uri for file in files if file.src_uri.startswith("decisions/0"))
    results = [path for path in made if path.startswith("results/")]
    rooms = [path for path in made if path.startswith("packages/")]
    config.nav = [
        *(config.nav or []),
        {"Operators": ["guide/operators.md", *operators]},
        {"Measurements": ["figures.md", *results]},
        {
            "Reference": [
                *("cli.md", "bound.md", "search.md", "predictor.md", "security.md", "emulator.md"),
                {"Python": list(reference)},
            ]
        },
        {
            "Development": [
                "development.md",
                "gpu-acceptance.md",
                {"Packages": rooms},
                {"Decisions": ["decisions/README.md", *decisions]},
            ]
        },
    ]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    at = page.file.src_uri
    source = {site: path for path, site in REPOSITORY_PAGES.items()}.get(at, f"docs/{at}")
    parts = _FENCED.split(markdown)
    return "".join(
        _block(part) if part.startswith("```") else _with_site_links(part, source, at) for part in parts
    )


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links of notebooks to pages of docs/, which MkDocs does not see, into links between pages."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    return re.sub(r'href="(?![a-z]+:)([^"#]+)\.md(#[^"]*)?"', r'href="\1.html\2"', html)


def _block(text: str) -> str:
    """Return a fenced block with its language alone: the word after it is for the test that runs it."""
    return re.sub(r"^```(\w+) \w+$", r"```\1", text, count=1, flags=re.MULTILINE)


def _with_site_links(text: str, source: str, at: str) -> str:
    folder = PurePosixPath(source).parent

    def replaced(link: re.Match[str]) -> str:
        target, anchor = link["target"], link["anchor"] or ""
        shown = _LINK.sub(replaced, link["text"])  # an image may be a link
        if not target or ":" in target:
            return link[0]
        path = os.path.normpath(folder / target).replace(os.sep, "/")
        if path in REPOSITORY_PAGES:
            site = REPOSITORY_PAGES[path]
        elif path.startswith("docs/") and path.endswith((".md", ".svg", ".png", ".ipynb")):
            site = path.removeprefix("docs/")
        else:  # a source file or a folder, which is no page
            return shown
        return f"{link['image']}[{shown}]({os.path.relpath(site, PurePosixPath(at).parent)}{anchor})"

    return _LINK.sub(replaced, text)


def _reference_page(name: str) -> str:
    return f"# {name}\n\n::: {name}\n"


def _operator_page(cls: type[Workload]) -> str:
    """Return the page of an operator: its text form, its tensors, and its variants with their parameters."""
    parts = [f"# {cls.operator}", f"```text\n{cls.usage()}\n```", _prose(cls)]
    for variant in kernels.variants(cls.operator):
        parts += [f"## {variant.key}", _prose(sys.modules[type(variant).__module__]), _parameters(variant)]
    return "\n\n".join(parts) + "\n"


def _prose(documented: object) -> str:
    """Return a docstring as text, with its sections of arguments and attributes as lists."""
    text = inspect.getdoc(documented) or ""
    text = re.sub(r"^(Attributes|Source|Raises):\n?", r"**\1**\n\n", text, flags=re.MULTILINE)
    return re.sub(r"^ {4}(?=\S)", "- ", text, flags=re.MULTILINE)


def _parameters(variant: Variant[Any]) -> str:
    rows = [
        f"| `{one.name}` | {', '.join(map(str, one.values))} | {one.about.replace('|', '&#124;')} |"
        for one in variant.space.parameters
    ]
    size = f"{variant.space.size:,} configurations before constraints"
    head = [f"Language: {variant.language}. Search space: {size}.", ""]
    return "\n".join([*head, "| parameter | values | meaning |", "|---|---|---|", *rows])
