"""Functions called by several processes at once, as the ranks of a process group over gloo.

A server that has imported torch and done nothing else forks them, which makes their start fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

TIMEOUT_SECONDS = 240.0

# Processes of gloo sometimes fail to connect on a busy machine, with one of these messages; the group then tries again.
NOT_MET = "connectFullMesh"
MAX_MEETINGS = 3

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "pytest",
        "torch.distributed.checkpoint",
        "torch.distributed.tensor",
        "tensorferry.checkpoint.storage.writer",
    ]
)


@dataclasses.dataclass
class Rank:
    """One of the processes."""

    process: BaseProcess
    answers: Connection

    def kill(self) -> None:
        """End it as the kernel would, when memory is short."""
        if self.process.pid is not None and self.process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


@dataclasses.dataclass
class Answer:
    """A message of one rank: first that it has joined the group, then how its call ended."""

    result: Any = None
    failure: str | None = None


def call_on_ranks(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> list[Any]:
    """Call `function(rank, *arguments)` on each rank of a group, and return the results by rank.

    The function, of a module's top level, runs in a process group of `world_size`. An exception fails the test.
    """
    failed = ""
    for _ in range(MAX_MEETINGS):
        with started(world_size, function, *arguments) as ranks:
            answers = _answers(ranks, timeout_seconds)
            if not (failed := _failures(answers)):
                for rank in ranks:
                    rank.process.join(timeout_seconds)
                return [answer.result for answer in answers]
        if NOT_MET not in failed:  # as other groups may not, that the function makes
            break
    raise AssertionError(failed)


def _answers(ranks: list[Rank], timeout_seconds: float) -> list[Answer]:
    answers: list[Answer] = []
    deadline = time.monotonic() + timeout_seconds
    for rank in ranks:
        answers.append(_answer(rank, max(0.0, deadline - time.monotonic())))
        if answers[-1].failure is not None:  # others may wait for it
            deadline = min(deadline, time.monotonic() + 5)
    return answers


def _answer(rank: Rank, timeout_seconds: float) -> Answer:
    if not rank.answers.poll(timeout_seconds):
        return Answer(failure=f"no answer in {timeout_seconds:.0f} s")
    try:
        answer: Answer = rank.answers.recv()
    except EOFError:
        rank.process.join()
        return Answer(failure=f"dead with exit code {rank.process.exitcode}")
    return answer


def _failures(answers: list[Answer]) -> str:
    return "\n".join(
        f"rank {rank}: {answer.failure}" for rank, answer in enumerate(answers) if answer.failure
    )


@contextlib.contextmanager
def started(world_size: int, function: Callable[..., Any], *arguments: Any) -> Iterator[list[Rank]]:
    """Start the ranks and wait until they have joined the group; kill those that still run at the end of the block."""
    failed = ""
    for _ in range(MAX_MEETINGS):
        with _begun(world_size, function, arguments) as ranks:
            if not (failed := _failures(_answers(ranks, TIMEOUT_SECONDS))):
                yield ranks
                return
    raise AssertionError(failed)


@contextlib.contextmanager
def _begun(
    world_size: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Iterator[list[Rank]]:
    ranks: list[Rank] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        try:
            for number in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_run,
                    args=(sender, number, world_size, f"{directory}/store", function, arguments),
                )
                process.start()
                sender.close()
                ranks.append(Rank(process, receiver))
            yield ranks
        finally:
            for rank in ranks:
                rank.kill()
                rank.answers.close()


def _run(
    answers: Connection,
    rank: int,
    world_size: int,
    store: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import faulthandler

    import torch
    import torch.distributed as dist

    faulthandler.dump_traceback_later(TIMEOUT_SECONDS, exit=True)
    torch.set_num_threads(1)
    answer = Answer()
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
        )
        answers.send(Answer())
        answer.result = function(rank, *arguments)
    except BaseException:
        answer.failure = traceback.format_exc()
    answers.send(answer)
    answers.close()
    if answer.failure is None:
        dist.destroy_process_group()


def files_of(directory: pathlib.Path) -> set[str]:
    """Return the names in a directory."""
    return {path.name for path in directory.iterdir()}
