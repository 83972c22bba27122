"""Summary of the exhaustive run by file."""

from __future__ import annotations

import json
from pathlib import Path

from tests.summary import main

REPORT = """<testsuites><testsuite>
<testcase classname="tests.kernels.test_a" name="test_x" time="0.5"/>
<testcase classname="tests.kernels.test_a" name="test_y[1]" time="0.25"><failure message="no"/></testcase>
<testcase classname="tests.db.test_b" name="test_z" time="1"><skipped/></testcase>
</testsuite></testsuites>
"""


def test_summary_has_outcomes_and_time_by_file(tmp_path: Path) -> None:
    report, result = tmp_path / "report.xml", tmp_path / "results" / "tests.json"
    report.write_text(REPORT, encoding="utf-8")
    assert main([str(report), str(result)]) == 1
    summary = json.loads(result.read_text(encoding="utf-8"))
    assert (summary["tests"], summary["failed"]) == (3, ["tests/kernels/test_a::test_y[1]"])
    assert summary["files"] == {
        "tests/db/test_b": {"tests": 1, "skipped": 1, "milliseconds": 1000},
        "tests/kernels/test_a": {"tests": 2, "failure": 1, "milliseconds": 750},
    }
    report.write_text(REPORT.replace("failure", "skipped"), encoding="utf-8")
    assert main([str(report), str(result)]) == 0
