"""A Ray cluster of two workers on this machine, in a separate process that tests control over pipes.

It prints its address and the process ids of its nodes as JSON. Each input line adds a node; the end of the
input stops the cluster.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from ray.cluster_utils import Cluster

WORKER = {"num_cpus": 1, "object_store_memory": 80 << 20}


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)  # noqa: T201 - to the tests


def raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def main() -> None:
    head = {**WORKER, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=True)
    worker = cluster.add_node(**WORKER)
    say(address=cluster.address, head=raylet(cluster.head_node), other=raylet(worker))
    for _line in sys.stdin:
        say(other=raylet(cluster.add_node(**WORKER)))
    cluster.shutdown()


if __name__ == "__main__":
    main()
