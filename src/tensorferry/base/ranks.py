"""Ranks that act as one: what fails on one of them is raised on all, and memory goes from one to another.

Imports torch.distributed: only those import this who have a process group.
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

# What a rank says before memory goes around; of what ranks say the highest counts.
_FINE, _FAILED, _LEFT = 0, 1, 2


class Ranks:
    """The ranks of a process group; without a group, this process."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.is_first = self.rank == 0

    def call(self, function: Callable[[], T]) -> list[T]:
        """Call a function on each rank, and return what each returned, which should be small.

        The failure of the first rank that has one is raised on all, so that they decide alike.
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
    """Memory that ranks hand to each other, in steps; before each of them all ranks agree that nothing has failed.

    Parameters
    ----------
    group : ProcessGroup or None
        Who takes part; None for all ranks.
    device : torch.device
        Whose memory it is; :func:`device_of` says what a group can move.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = dist.group.WORLD if group is None else group
        self.rank = dist.get_rank(self.group)
        self._device = device

    def agree(self, failure: BaseException | None) -> None:
        """Return if nothing has failed on any rank; ``failure`` is what has on this one.

        Raises
        ------
        Exception
            The failure of the first rank that has one.
        RuntimeError
            A rank has left.
        """
        vote = torch.empty(1, dtype=torch.int32, device=self._device)
        vote.fill_(_FINE if failure is None else _FAILED)
        dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self.group)
        outcome = int(vote.item())
        if outcome == _FINE:
            return
        if outcome >= _LEFT:
            left = f"rank {outcome - _LEFT} has ended its load early, and the others need its part"
            raise failure or RuntimeError(left)

        def tell() -> None:
            if isinstance(failure, Exception):
                raise failure
            if failure is not None:
                raise RuntimeError(f"another rank was stopped by {failure!r}")

        try:
            Ranks(self.group).call(tell)
        except Exception as error:
            if failure is None or isinstance(failure, Exception):
                raise
            raise failure from error

    def leave(self) -> None:
        """Have the next :meth:`agree` of all other ranks fail. Does not wait for them."""
        vote = torch.full((1,), _LEFT + self.rank, dtype=torch.int32, device=self._device)
        dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self.group, async_op=True)

    def hand_on(
        self,
        own: torch.Tensor,
        receivers: Iterable[int],
        others: Iterable[tuple[int, torch.Tensor]],
    ) -> list[Any]:
        """Begin to send memory to ranks, and to fill that of others with theirs; return what to wait for."""
        group = self.group
        assert group is not None

        def operation(function: Any, memory: torch.Tensor, rank: int) -> dist.P2POp:
            return dist.P2POp(function, memory, dist.get_global_rank(group, rank), group)

        sent = [operation(dist.isend, own, rank) for rank in receivers if rank != self.rank]
        operations = sent if own.numel() else []
        operations += [operation(dist.irecv, each, rank) for rank, each in others if each.numel()]
        return list(dist.batch_isend_irecv(operations)) if operations else []


@contextlib.contextmanager
def plain_failures(is_last_choice: Callable[[BaseException], bool]) -> Iterator[None]:
    """Raise, in the place of torch's exception for all ranks, what failed on the first one.

    Parameters
    ----------
    is_last_choice : function of an exception
        Whether failures of other ranks are to be raised before it.
    """
    try:
        yield
    except CheckpointException as error:
        failures = [failure for _, (failure, _) in sorted(error.failures.items())]
        raise min(failures, key=is_last_choice) from error


def checked_broadcast(broadcast: Broadcast) -> Broadcast:
    """Return what was given as ``broadcast=``, or raise ValueError."""
    if not any(broadcast is each for each in ("auto", True, False)) and broadcast != "auto":
        raise ValueError(f"broadcast: {broadcast!r} is none of 'auto', True, False")
    return broadcast


def device_of(group: dist.ProcessGroup | None) -> torch.device | None:
    """Return whose memory a group moves fastest: this rank's GPU with NCCL, else the host's."""
    if moves(group, "cuda") and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if moves(group, "cpu") else None


def moves(group: dist.ProcessGroup | None, kind: str) -> bool:
    """Return whether a group moves memory of "cpu" or "cuda" from rank to rank."""
    backends = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
    return kind in backends and (kind != "cuda" or backends[kind] == "nccl")


def is_worthwhile(kind: str, path: str | os.PathLike[str]) -> bool:
    """Return whether to read once what several ranks want, and hand it on in memory of "cpu" or "cuda".

    By gloo, memory of CPUs goes from rank to rank more slowly than local drives and the page cache give it.
    """
    return kind == "cuda" or is_url(os.fspath(path)) or is_remote(Path(path))


def node() -> str:
    """Return what ranks of the same machine have in common, in whatever containers they are."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return socket.gethostname()


def _portable(error: BaseException | None) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
