"""Collective operations of ranks: an error of one rank is raised on all, and ranks send memory to each other.

A rank is one of the processes of a torch process group. A collective operation is complete only when all ranks of the
group have called it. So if one rank raised an error and the others did not, they would wait for it in vain.

This module imports torch.distributed, so import it only when there is a process group.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tensorferry.base.checks import is_url
from tensorferry.base.mounts import is_remote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")

Broadcast = Literal["auto", True, False]

# Votes of a rank in Relay.agree(), before memory is exchanged: no error, an error, or the end of the exchange. The
# highest vote of all ranks decides. A rank that ends early votes _LEFT plus its number, which names it to the others.
_FINE, _FAILED, _LEFT = 0, 1, 2


class Ranks:
    """The ranks of a process group; without a group, only this process."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.is_first = self.rank == 0

    def call(self, function: Callable[[], T]) -> list[T]:
        """Call a function on each rank, and return the results of all ranks; a result should be small.

        If the function raises on some ranks, all ranks raise the error of the lowest of these. So all of them take the
        same decision.
        """
        answer: list[T] = []
        own: BaseException | None = None
        try:
            answer.append(function())
        except (Exception, CheckpointException) as error:
            if self.group is None:
                raise
            own = error
        if self.group is None:
            return answer
        answers: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(answers, (answer, _portable(own)), group=self.group)
        for rank, (_, failure) in enumerate(answers):
            if failure is not None:
                raise own if rank == self.rank and own is not None else failure
        return [result for results, _ in answers for result in results]


class Relay:
    """An exchange of memory between ranks in steps; before each step all ranks agree that none has failed.

    Parameters
    ----------
    group : ProcessGroup or None
        The ranks that take part; None for all ranks.
    device : torch.device
        The device of the memory; :func:`device_of` returns the one that is best for a group.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = dist.group.WORLD if group is None else group
        self.rank = dist.get_rank(self.group)
        self._device = device

    def agree(self, failure: BaseException | None) -> None:
        """Return if no rank has failed; ``failure`` is the error of this rank, or None.

        Raises
        ------
        Exception
            The error of the lowest rank that failed.
        RuntimeError
            A rank has called :meth:`leave`.
        """
        vote = torch.empty(1, dtype=torch.int32, device=self._device)
        vote.fill_(_FINE if failure is None else _FAILED)
        dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self.group)
        outcome = int(vote.item())
        if outcome == _FINE:
            return
        if outcome >= _LEFT:
            left = f"rank {outcome - _LEFT} ended its load early, but the other ranks need its part"
            raise failure or RuntimeError(left)

        def raise_failure() -> None:
            if isinstance(failure, Exception):
                raise failure
            if failure is not None:
                raise RuntimeError(f"another rank was interrupted by {failure!r}")

        try:
            Ranks(self.group).call(raise_failure)
        except Exception as error:
            if failure is None or isinstance(failure, Exception):
                raise
            raise failure from error

    def leave(self) -> None:
        """Make the next :meth:`agree` of all other ranks fail, without waiting for them."""
        vote = torch.full((1,), _LEFT + self.rank, dtype=torch.int32, device=self._device)
        dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self.group, async_op=True)

    def exchange(
        self,
        own: torch.Tensor,
        receivers: Iterable[int],
        others: Iterable[tuple[int, torch.Tensor]],
    ) -> list[Any]:
        """Start to send ``own`` to the receivers and to fill the tensors of ``others``; return torch's work handles.

        ``others`` has pairs of a sending rank and the tensor that its message fills.
        """
        group = self.group
        assert group is not None

        def operation(function: Any, memory: torch.Tensor, rank: int) -> dist.P2POp:
            return dist.P2POp(function, memory, dist.get_global_rank(group, rank), group)

        sent = [operation(dist.isend, own, rank) for rank in receivers if rank != self.rank]
        operations = sent if own.numel() else []
        operations += [operation(dist.irecv, each, rank) for rank, each in others if each.numel()]
        return list(dist.batch_isend_irecv(operations)) if operations else []


@contextlib.contextmanager
def first_rank_error(is_last_choice: Callable[[BaseException], bool]) -> Iterator[None]:
    """Replace torch's CheckpointException, which has the errors of all ranks, with that of the first failed rank.

    Parameters
    ----------
    is_last_choice : function of an exception
        Returns whether errors of other ranks take precedence over an exception, even if their ranks are higher.
    """
    try:
        yield
    except CheckpointException as error:
        failures = [failure for _, (failure, _) in sorted(error.failures.items())]
        raise min(failures, key=is_last_choice) from error


def checked_broadcast(broadcast: Broadcast) -> Broadcast:
    """Return the argument ``broadcast``, or raise ValueError if it is invalid."""
    if not any(broadcast is each for each in ("auto", True, False)) and broadcast != "auto":
        raise ValueError(f"broadcast: {broadcast!r} is not one of 'auto', True, False")
    return broadcast


def device_of(group: dist.ProcessGroup | None) -> torch.device | None:
    """Return the device with memory that a group moves fastest; None if the group can move neither kind of memory.

    It is this rank's GPU if the group uses NCCL, else the CPU.
    """
    if can_move(group, "cuda") and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if can_move(group, "cpu") else None


def can_move(group: dist.ProcessGroup | None, kind: str) -> bool:
    """Return whether a group can send memory of "cpu" or "cuda" from rank to rank."""
    backends = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
    return kind in backends and (kind != "cuda" or backends[kind] == "nccl")


def is_worthwhile(kind: str, path: str | os.PathLike[str]) -> bool:
    """Return whether bytes that several ranks need should be read by one rank and sent to the others.

    ``kind`` is the memory that is sent, "cpu" or "cuda". For host memory this is only worthwhile for remote files,
    because gloo, which sends it, is slower than local drives and the page cache.
    """
    return kind == "cuda" or is_url(os.fspath(path)) or is_remote(Path(path))


def node_identity() -> str:
    """Return an identity of this machine that is equal for all its ranks, even in different containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return socket.gethostname()


def _portable(error: BaseException | None) -> BaseException | None:
    """Return an error itself if it can be pickled, else a RuntimeError with its type's name and its message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
