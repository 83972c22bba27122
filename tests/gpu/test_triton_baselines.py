"""Correctness of the Triton baselines, by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support import needs_triton_on_gpu

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import torch
from tests.gpu import triton_attention as attention
from tests.gpu import triton_rows as rows

torch.manual_seed(0)
x, gamma, beta = torch.randn(5, 33), torch.randn(33), torch.randn(33)
y = torch.empty_like(x)
functional, close = torch.nn.functional, torch.testing.assert_close
rows.softmax(x, y, 0.5)
close(y, (x * 0.5).softmax(1))
rows.layernorm(x, gamma, beta, y, 1e-5)
close(y, functional.layer_norm(x, (33,), gamma, beta, 1e-5))
rows.rmsnorm(x, gamma, y, 1e-5)
close(y, functional.rms_norm(x, (33,), gamma, 1e-5))
for causal in (False, True):
    q, (k, v) = torch.randn(2, 4, 37, 40).half(), torch.randn(2, 2, 2, 53, 40).half()
    o, lse = torch.empty_like(q), torch.empty(2, 4, 37)
    attention.attention(q, k, v, o, lse, causal=causal, kernel=attention._forward, BM=16, BN=16)
    k, v = (part.float().repeat_interleave(2, dim=1) for part in (k, v))
    scores = q.float() @ k.transpose(2, 3) * 40**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones(37, 53, dtype=torch.bool).triu(1 + 16), -torch.inf)
    close(o.float(), scores.softmax(3) @ v, atol=2e-3, rtol=2e-3)
    close(lse, scores.logsumexp(3))
print("all right")
"""


@needs_triton_on_gpu
def test_triton_baselines_are_correct() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.stdout == "all right\n", done.stderr
