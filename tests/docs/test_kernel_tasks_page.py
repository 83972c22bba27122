"""The page of forty tasks: its counts, its links, and the tests that it names are true."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tests.docs.test_examples import ROOT, blocks

PAGE = ROOT / "docs" / "guide" / "kernel-tasks.md"
_ROW = re.compile(r"^\| (\d+) \| (.+?) \| (done|awkward|impossible) \| (.+?) \| (.*?) ?\|$", re.MULTILINE)
_LINK = re.compile(r"\]\(([\w./-]+\.md)(?:#([\w-]+))?\)")


def rows() -> list[tuple[str, ...]]:
    return _ROW.findall(PAGE.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {re.sub(r"-+$", "", title.replace(" ", "-")) for title in plain}


def test_forty_tasks_are_counted_by_state() -> None:
    assert [row[0] for row in rows()] == [str(number) for number in range(1, 41)]
    counts = Counter(row[2] for row in rows())
    text = f"{counts['done']} are done, {counts['awkward']} are awkward and {counts['impossible']} is"
    assert text in " ".join(PAGE.read_text(encoding="utf-8").split())


def test_each_task_that_is_done_is_shown_by_blocks_that_run_or_by_a_test() -> None:
    tests = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    for _, task, state, how, checked in rows():
        links = [(PAGE.parent / page, anchor) for page, anchor in _LINK.findall(how)]
        for page, anchor in links:
            assert not anchor or anchor in anchors(page), (task, anchor)
        if checked == "page":
            run = [
                b
                for page, _ in links
                for b in blocks(page)
                if b.language in ("console", "python", "python triton")
            ]
            assert run, task
        elif checked or state == "done":
            assert checked.strip("`") in tests, task
