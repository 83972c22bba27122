"""Connection to the head of a Ray cluster, or start of a local cluster for one run."""

from __future__ import annotations

import shutil
import socket
import tempfile
from typing import Any

from tunebench._host import cores
from tunebench.executor.message import WorkerRequest

__all__ = ["connect"]

LONGEST_SOCKET = 107
"""Limit on the length of a socket path, in bytes."""
CONNECT_S = 10.0


def connect(request: WorkerRequest) -> tuple[Any, str | None]:
    """Start or join a cluster.

    Args:
        request: The address, ``"local"`` to start a cluster here.

    Returns:
        The module `ray`, and the temporary folder to delete afterwards, if any.

    Raises:
        OSError: if nothing answers at the address.
        Exception: errors of Ray.
    """
    if request.address == "local":
        return _start_here()
    host, _, port = request.address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():  # Ray itself would retry for half a minute
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    import ray

    ray.init(address=request.address, log_to_driver=False, configure_logging=False, namespace="tunebench")
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
        num_cpus=cores(),
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        namespace="tunebench",
        object_store_memory=80 << 20,  # the minimum of Ray; tasks and results are kilobytes
        _temp_dir=folder,
        _node_ip_address="127.0.0.1",
    )
    return ray, folder
