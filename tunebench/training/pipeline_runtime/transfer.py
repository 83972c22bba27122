"""Sends and receives between the ranks of a pipeline, and the failure of ranks.

A failed rank breaks its connections, so that the ranks that wait for it fail at once, and then those that
wait for them. The first rank that fails states the reason in the store of the process group.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tunebench._figure import significant
from tunebench.errors import RankFailed, TunebenchError, describe_error

__all__ = ["ConnectionLost", "FailureReport", "PendingTransfer", "Transport", "failing_together"]

_BREAKING_TAG = 0x7FFFFFFF
"""Tag that no message has."""


class ConnectionLost(RankFailed):
    """Another rank closed its connection to this rank, because it ended or failed."""


class PendingTransfer:
    """Messages that are being sent or received.

    Args:
        works: A handle of torch for each message.
        tensors: The messages, which must exist until the transfer has ended.
        peer: The other rank.
        late_peers: Ranks that did not answer in time so far, of all transfers of this rank.
    """

    def __init__(
        self, works: Sequence[Any], tensors: Sequence[Tensor], peer: int, late_peers: set[int]
    ) -> None:
        self.works, self.tensors, self.peer = list(works), list(tensors), peer
        self.late_peers = late_peers
        self.ended = threading.Event()
        self.error: Exception | None = None

    def wait(self, timeout: timedelta) -> list[Tensor]:
        """Return the messages when all have arrived.

        Raises:
            RankFailed: if the connection is lost, or the time is over.
        """
        try:
            for work in self.works:
                work.wait(timeout)
        except RuntimeError as error:
            raise self._failure(error, timeout) from error
        tensors, self.works, self.tensors = self.tensors, [], []
        return tensors

    def _failure(self, error: RuntimeError, timeout: timedelta) -> RankFailed:
        """Return the error of this transfer: a late rank is not lost."""
        if "timed out" in str(error).lower():
            self.late_peers.add(self.peer)
        else:
            # A transfer of another thread that timed out has closed the connection of this one.
            time.sleep(SETTLE_S)
        return _late(self.peer, timeout) if self.peer in self.late_peers else _lost(self.peer)

    def complete(self, timeout: timedelta) -> None:
        """Wait, release the messages, and keep an error."""
        try:
            self.wait(timeout)
        except RankFailed as error:
            self.error = error
            self.works, self.tensors = [], []
        self.ended.set()


class Transport:
    """Messages between the ranks of a process group.

    Args:
        group: The process group.
        timeout_s: Longest wait for a message, in seconds.
        device: Device of the messages.
    """

    def __init__(self, group: Any, timeout_s: float, device: torch.device) -> None:
        self.group, self.device = group, device
        self.timeout = timedelta(seconds=timeout_s)
        self.rank: int = dist.get_rank(group)
        self.ranks: int = dist.get_world_size(group)
        # Gloo does not say whether a transfer has ended, so a thread waits for it.
        self._waits_in_thread = device.type == "cpu" or dist.get_backend(group) == "gloo"
        self._sent: list[PendingTransfer] = []
        self._late_peers: set[int] = set()
        self._queue: queue.SimpleQueue[PendingTransfer | None] = queue.SimpleQueue()
        if self._waits_in_thread:
            waiter = threading.Thread(target=_complete_all, args=(self._queue, self.timeout), daemon=True)
            waiter.start()
            weakref.finalize(self, self._queue.put, None)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> PendingTransfer:
        """Start to send tensors to another rank.

        Raises:
            RankFailed: if the connection is lost.
        """
        try:
            works = [
                dist.isend(_flat(tensor), group=self.group, group_dst=peer, tag=tag + index)
                for index, tensor in enumerate(tensors)
            ]
        except RuntimeError as error:
            raise self._failure(peer) from error
        return PendingTransfer(works, tensors, peer, self._late_peers)

    def receive(self, tensors: Sequence[Tensor], peer: int, tag: int) -> PendingTransfer:
        """Start to receive into tensors from another rank.

        Raises:
            RankFailed: if the connection is lost.
        """
        try:
            works = [
                dist.irecv(_flat(tensor), group=self.group, group_src=peer, tag=tag + index)
                for index, tensor in enumerate(tensors)
            ]
        except RuntimeError as error:
            raise self._failure(peer) from error
        return PendingTransfer(works, tensors, peer, self._late_peers)

    def release_when_sent(self, transfer: PendingTransfer) -> None:
        """Release the messages of a transfer as soon as they are sent."""
        self._sent = [pending for pending in self._sent if not self._has_ended(pending)]
        self._sent.append(transfer)
        if self._waits_in_thread:
            self._queue.put(transfer)

    def require_sent(self) -> None:
        """Wait until all these transfers have ended.

        Raises:
            RankFailed: if a connection is lost, or the time is over.
        """
        for transfer in self._sent:
            self.require_ended(transfer)
        self._sent = []

    def require_ended(self, transfer: PendingTransfer) -> None:
        """Wait until a transfer of `release_when_sent` has ended.

        Raises:
            RankFailed: if the connection is lost, or the time is over.
        """
        if not self._waits_in_thread:
            if not transfer.ended.is_set():
                transfer.complete(self.timeout)
        elif not transfer.ended.wait(self.timeout.total_seconds()):
            raise _late(transfer.peer, self.timeout)
        if transfer.error is not None:
            raise transfer.error

    def break_connections(self) -> None:
        """Make this rank's transfers fail, and those of the ranks that wait for it."""
        if self._waits_in_thread:
            # A receive that ends without a message closes the connection.
            for peer in range(self.ranks):
                if peer != self.rank:
                    with contextlib.suppress(RuntimeError):
                        work = dist.irecv(torch.zeros(1), group=self.group, group_src=peer, tag=_BREAKING_TAG)
                        work.wait(timedelta(milliseconds=1))
        else:
            self.group.abort()

    def _failure(self, peer: int) -> RankFailed:
        """Return the error of a transfer that cannot start."""
        return _late(peer, self.timeout) if peer in self._late_peers else _lost(peer)

    def _has_ended(self, transfer: PendingTransfer) -> bool:
        if not self._waits_in_thread and all(work.is_completed() for work in transfer.works):
            transfer.complete(self.timeout)
        return transfer.ended.is_set() and transfer.error is None


def _complete_all(transfers: queue.SimpleQueue[PendingTransfer | None], timeout: timedelta) -> None:
    """Wait for transfers one after the other."""
    while (transfer := transfers.get()) is not None:
        transfer.complete(timeout)
        del transfer


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in the order of their memory (elements,), without a copy."""
    return tensor.as_strided((tensor.numel(),), (1,))


class FailureReport:
    """The first failure of a rank, which all ranks of a process group can read.

    Args:
        group: The process group.
    """

    def __init__(self, group: Any) -> None:
        self._store = dist.distributed_c10d._get_process_group_store(group)

    def state(self, reason: str, *, is_cause: bool) -> None:
        """State the reason of a failure, unless another one was stated.

        Args:
            reason: What happened to this rank.
            is_cause: Whether this rank failed by itself; otherwise it lost the connection to another rank.
        """
        with contextlib.suppress(RuntimeError, dist.DistError):  # the process with the store may have ended
            self._store.compare_set(_CAUSE if is_cause else _CONSEQUENCE, "", reason)

    def wait_for_readers(self, rank: int) -> None:
        """Give other ranks time to read the reason if this process may have the store, and may end now."""
        if rank == 0:
            time.sleep(GRACE_S)

    def first(self) -> str | None:
        """Return the cause of the failure, else the first lost connection; none if the store is lost."""
        cause_so_far = None
        until = time.monotonic() + GRACE_S
        with contextlib.suppress(RuntimeError, dist.DistError):
            cause_so_far = self._stated(_CONSEQUENCE)
            while (cause := self._stated(_CAUSE)) is None and time.monotonic() < until:
                time.sleep(GRACE_S / 20)
            cause_so_far = cause or cause_so_far
        return cause_so_far

    def _stated(self, key: str) -> str | None:
        return str(self._store.get(key).decode()) if self._store.check([key]) else None


@contextlib.contextmanager
def failing_together(transport: Transport, report: FailureReport, where: str) -> Iterator[None]:
    """Report an error within the context to all ranks, and break the connections so that they end.

    Contexts may be nested; the innermost one reports.

    Args:
        transport: Messages of this rank.
        report: Where the first failure is stated.
        where: What this rank does, such as an action.

    Raises:
        RankFailed: for any error.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, RankFailed) and error.is_reported:
            raise
        failure = f"rank {transport.rank} failed at {where}: {_reason(error)}"
        is_cause = not isinstance(error, ConnectionLost) and not _is_of_torch(error)
        report.state(failure, is_cause=is_cause)
        transport.break_connections()
        first = failure if is_cause else report.first() or failure
        report.wait_for_readers(transport.rank)
        rank_position = "" if first == failure else f" (rank {transport.rank} was at {where})"
        reported = RankFailed(first + rank_position)
        reported.is_reported = True
        raise reported from error


def _reason(error: BaseException) -> str:
    """Return the message of an error, or of the one that caused it."""
    if isinstance(error, TunebenchError):
        return str(error)
    if isinstance(error, Exception) and _is_of_torch(error):
        return "a connection is lost: the process of another rank ended or failed"
    while error.__cause__ is not None:
        error = error.__cause__
    return describe_error(error)


def _is_of_torch(error: Exception) -> bool:
    """Return whether a collective operation of torch lost a connection."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


SETTLE_S = 0.05
"""How long a transfer that lost its connection waits for another one to state that it timed out."""

GRACE_S = 0.5
"""How long a rank that lost a connection waits for another rank to state why, in seconds."""

_CAUSE, _CONSEQUENCE = "tunebench/pipeline/cause", "tunebench/pipeline/consequence"


def _lost(peer: int) -> RankFailed:
    return ConnectionLost(f"the connection to rank {peer} is lost: its process ended or failed")


def _late(peer: int, timeout: timedelta) -> RankFailed:
    return RankFailed(f"rank {peer} did not answer within {significant(timeout.total_seconds())} s")
