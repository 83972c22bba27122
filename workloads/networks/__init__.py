"""Whole networks as lists of operations: `network("gpt2-large").operations(Run(batch=4, seq=1024))`."""

from __future__ import annotations

from tunebench.workloads.networks._network import Exchange, Network, Operation, Run, merged

__all__ = ["Exchange", "Network", "Operation", "Run", "merged"]
