"""Reaching Ray: the head of a cluster that is there, or one that is started for a run."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from typing import Any

from tunebench.executor._message import Look

__all__ = ["connect"]

LONGEST_SOCKET = 107
"""Bytes that the path of a socket may have, less those that Ray appends to its folder for one."""
CONNECT_S = 10.0


def connect(look: Look) -> tuple[Any, str | None]:
    """Start or join a cluster; returns Ray, and the folder it may leave behind.

    Raises:
        OSError: if nothing answers at the address.
        Exception: whatever Ray raises.
    """
    if look.address == "local":
        return _start_here()
    host, _, port = look.address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():  # Ray itself would try for half a minute
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    import ray

    ray.init(address=look.address, log_to_driver=False, configure_logging=False, namespace="tunebench")
    return ray, None


def _start_here() -> tuple[Any, str]:
    import ray

    folder = tempfile.mkdtemp(prefix="tb-")
    if len(folder) > LONGEST_SOCKET - len(
        "/session_2000-01-01_00-00-00_000000_0000000/sockets/plasma_store.1"
    ):
        shutil.rmtree(folder)
        folder = tempfile.mkdtemp(prefix="tb-", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        namespace="tunebench",
        object_store_memory=80 << 20,  # the least that Ray takes; tasks and results are kilobytes
        _temp_dir=folder,
        _node_ip_address="127.0.0.1",
    )
    return ray, folder
