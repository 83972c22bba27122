"""Summary of a JUnit report by file: `python -m tests.summary REPORT.xml RESULT.json`.

Exit status 1 if a test failed.
"""

from __future__ import annotations

import json
import platform
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

from tunebench import __version__

KINDS = ("failure", "error", "skipped")
"""Elements of a test case that did not pass."""


def summary(report: Path) -> dict[str, Any]:
    """Return tests, outcomes and seconds by file, and the names of the tests that failed."""
    files: dict[str, Counter[str]] = {}
    failed = []
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("classname", "").replace(".", "/")
        outcomes = [kind for kind in KINDS if case.find(kind) is not None]
        row = files.setdefault(file, Counter())
        row.update(["tests", *outcomes])
        row["milliseconds"] += round(1000 * float(case.get("time", 0)))
        if {"failure", "error"} & {*outcomes}:
            failed.append(f"{file}::{case.get('name')}")
    return {
        "tunebench": __version__,
        "python": platform.python_version(),
        "tests": sum(row["tests"] for row in files.values()),
        "failed": failed,
        "files": {file: dict(files[file]) for file in sorted(files)},
    }


def main(arguments: list[str]) -> int:
    """Write the summary of a report, and return the exit status."""
    report, result = map(Path, arguments)
    made = summary(report)
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return 1 if made["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
