"""Ranks that act as one: what fails on one of them is raised on all."""

from __future__ import annotations

import contextlib
import pickle
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")


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


def _portable(error: BaseException | None) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
