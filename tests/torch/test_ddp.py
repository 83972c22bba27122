"""The training program of the guide runs in several processes with DistributedDataParallel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")


@pytest.mark.exhaustive
def test_program_of_the_guide_trains_on_two_processes(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "guide" / "serving.md"
    program = page.read_text(encoding="utf-8").partition("# file: train.py\n")[2].partition("```")[0]
    (tmp_path / "train.py").write_text(program)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*launcher, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240
    )
    assert run.returncode == 0, run.stderr[-3000:]
    ranks = sorted(line.partition(":")[0] for line in run.stdout.splitlines() if line.startswith("rank"))
    assert ranks == ["rank 0", "rank 1"]
