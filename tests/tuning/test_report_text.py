"""Text of a report."""

from __future__ import annotations

from tunebench.tuning.report_text import skipped_lines


def test_variants_that_share_a_reason_share_a_line() -> None:
    skipped = {
        "softmax/a": "softmax/a does not run on a cpu",
        "softmax/b": "softmax/b supports direction=backward only",
        "softmax/c": "softmax/c does not run on a cpu",
        "torch": "torch is not installed",
    }

    assert list(skipped_lines(skipped)) == [
        "does not run on a cpu: softmax/a, softmax/c",
        "softmax/b supports direction=backward only",
        "torch is not installed",
    ]
