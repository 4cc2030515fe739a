"""Each public operation meets each fault; then the same object does the next operation, and nothing is left over.

A fault strikes at a random place of the operation, counted in one without faults. TENSORFERRY_TEST_SEED repeats it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import os
import random
import re
import resource
import shutil
import signal
import warnings
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch

import tensorferry
from tensorferry.checkpoint import CheckpointError
from tests.matrix.operations import OPERATIONS, Distributed, Manager, Operation
from tests.support import effort, mounts
from tests.support.data import SEED
from tests.support.faultfs import Fault
from tests.support.forks import assert_exits_with_zero, in_child
from tests.support.interrupts import At
from tests.support.leaks import descriptors, settled

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator

    from tests.support.faultfs import FaultFS

SOURCES = os.path.dirname(tensorferry.__file__)  # noqa: PTH120
OLD, NEW, NEXT = 1, 2, 3
# The kinds of requests of a file system that fail.
REQUESTS = (
    "open",
    "write",
    "read",
    "fsync",
    "flush",
    "fallocate",
    "truncate",
    "rename",
    "fsyncdir",
)
# What an operation may raise: it says that it failed. torch puts the errors of ranks into a CheckpointException, which
# is a BaseException.
FAILURES: tuple[type[BaseException], ...] = (
    OSError,
    KeyboardInterrupt,
    torch.distributed.checkpoint.api.CheckpointException,
    CheckpointError,
)
TIMES = effort.examples(4)

# Loops run one operation at a time, so their functions see the current one.
# ruff: noqa: B023

pytestmark = [
    pytest.mark.in_turn,
    pytest.mark.usefixtures("default_engine"),
    pytest.mark.parametrize("kind", OPERATIONS, ids=lambda kind: kind.__name__),
]


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(f"{SEED} {request.node.nodeid}")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Ignore warnings of failures that nobody retrieved: the operation has raised another."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def files_in(folder: pathlib.Path) -> list[str]:
    """Return the names of the files without their numbers, some of which are random."""
    names = [path.name for path in folder.rglob("*") if not path.is_dir()]
    # Shards with plain names may be a user's, so only the save that replaces them removes them.
    names = [name for name in names if not re.match(r"model-\d{5}-", name)]
    return sorted(re.sub(r"tf[0-9a-f]{16}|[0-9a-f]{16}|[0-9]+", "N", name) for name in names)


def failed(call: Callable[[], object]) -> str:
    """Return what a call raises, without references to its frames; "" if nothing."""
    try:
        call()
    except FAILURES as error:
        message = repr(error)
    except RuntimeError as error:
        assert "unexpected pos" in str(error)  # noqa: PT017  (torch's own, in place of the cause)
        message = repr(error)
    else:
        return ""
    gc.collect()  # frames of the failure, in cycles with it, may have what an interrupt kept from being released
    return message


def assert_found(op: Operation, failure: str) -> None:
    """After a save of the new version the operation's promise holds."""
    if not failure:
        assert op.found() == {NEW}
    elif op.keeps_parts:
        found = op.found()
        assert found <= {OLD, NEW}, (found, failure)
        assert len(found) == 1 or not op.keeps_all, (found, failure)


def assert_goes_on(op: Operation, failure: str, expected: list[str] | None) -> None:
    """The same object saves the next version, and leaves nothing else behind."""
    try:
        op.save(NEXT)
    except tensorferry.StorageError as error:
        # The kernel reports a failed sync once, so what was written before may be lost: the file has to be reopened.
        if "sync" not in failure or "an earlier sync failed: reopen the file" not in str(error):
            raise
        assert op.is_reopened
        op.close()
        op = type(op)(op.folder)
        op.save(NEXT)
    assert op.load() == {NEXT}
    assert op.found() == {NEXT}
    op.close()
    assert op.found() == {NEXT}
    gc.collect()
    # An interrupt may come between open() and the assignment of its result: then nothing closes or unlocks the file.
    if "KeyboardInterrupt" not in failure:
        assert expected in (None, files_in(op.folder)), failure
        assert settled(lambda: not any(str(op.folder) in each for each in descriptors()))


def failure_of(op: Operation, doing: str, fault: contextlib.AbstractContextManager[object]) -> str:
    """Save the new version, or load the old one, while there is a fault; then see what is there."""
    loaded: list[Any] = []
    act = (lambda: op.save(NEW)) if doing == "save" else (lambda: loaded.append(op.load()))
    with fault:
        failure = failed(act)
    if doing == "save":
        assert_found(op, failure)
    else:
        assert failure or loaded == [{OLD}], loaded
        assert op.load() == {OLD}, failure
    return failure


@contextlib.contextmanager
def ordered(faultfs: FaultFS, fault: Fault) -> Iterator[None]:
    faultfs.order(fault)
    yield
    faultfs.clear()


@pytest.fixture
def new(kind: type[Operation], tmp_path: pathlib.Path) -> Callable[[pathlib.Path], Operation]:
    def made(folder: pathlib.Path) -> Operation:
        folder.mkdir()
        op = kind(folder)
        op.save(OLD)
        return op

    return made


def files_without_faults(op: Operation) -> list[str]:
    op.save(NEW)
    op.save(NEXT)
    op.close()
    return files_in(op.folder)


@pytest.mark.parametrize("doing", ["save", "load"])
def test_requests_that_fail(new: Any, doing: str, faultfs: FaultFS, chance: random.Random) -> None:
    op = new(faultfs.path / "clean")
    faultfs.order()
    op.save(NEW) if doing == "save" else op.load()
    places = [each.op for each in faultfs.requests() if each.op in REQUESTS]
    expected = files_without_faults(op)
    if isinstance(op, Distributed | Manager):
        expected = None  # on FUSE, where locks may not reach other machines, these do not look for leftovers
    for number in range(TIMES):
        at = chance.randrange(len(places))
        how = chance.choice([{"error": errno.EIO}, {"error": errno.ENOSPC}, {"short": 100}])
        times = 3 if "short" in how else chance.choice([1, 1, -1])
        fault = Fault(places[at], times=times, skip=places[:at].count(places[at]), **how)
        op = new(faultfs.path / f"faulty-{number}")
        failure = failure_of(op, doing, ordered(faultfs, fault))
        assert_goes_on(op, failure, expected)


@pytest.mark.parametrize("doing", ["save", "load"])
def test_interrupts(new: Any, doing: str, directory: pathlib.Path, chance: random.Random) -> None:
    expected, count = clean(new, directory, doing)
    for number in range(TIMES):
        op = new(directory / f"interrupted-{number}")
        interrupt = functools.partial(signal.raise_signal, signal.SIGINT)
        failure = failure_of(op, doing, At(chance.randint(1, count), SOURCES, interrupt))
        assert_goes_on(op, failure, expected)


def clean(new: Any, directory: pathlib.Path, doing: str) -> tuple[list[str], int]:
    """Return the files after operations without faults, and how many moments one has."""
    op = new(directory / "clean")
    with At(0, SOURCES, lambda: None) as at:
        op.save(NEW) if doing == "save" else op.load()
    return files_without_faults(op), at.count


def test_forks(new: Any, directory: pathlib.Path, chance: random.Random) -> None:
    """A child that is forked within a save uses the library and ends; the save goes on."""
    expected, count = clean(new, directory, "save")
    for number in range(TIMES):
        op = new(directory / f"forked-{number}")
        other = directory / f"child-{number}"
        children = []

        def fork() -> None:
            if not (child := os.fork()):
                signal.alarm(100)
                in_child(lambda: tensorferry.write(other, b"child", atomic=True))
            children.append(child)

        with At(chance.randint(1, count), SOURCES, fork):
            op.save(NEW)
        for child in children:  # none if this save had fewer moments
            assert_exits_with_zero(child)
            assert other.read_bytes() == b"child"
        assert_found(op, "")
        assert_goes_on(op, "", expected)


def test_kills(
    kind: type[Operation], new: Any, directory: pathlib.Path, chance: random.Random
) -> None:
    expected, count = clean(new, directory, "save")
    for number in range(TIMES):
        folder = directory / f"killed-{number}"
        op = new(folder)
        op.close()
        moment = chance.randint(1, count)
        if not (child := os.fork()):
            with At(moment, SOURCES, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                in_child(lambda: kind(folder).save(NEW))
        assert os.waitpid(child, 0)[1] in (0, signal.SIGKILL)
        assert_found(op, "killed")
        assert_goes_on(kind(folder), "", expected)


def test_a_full_table_of_descriptors(
    new: Any, directory: pathlib.Path, chance: random.Random
) -> None:
    expected = files_without_faults(new(directory / "clean"))
    for number in range(TIMES):
        op = new(directory / f"short-{number}")
        failure = failure_of(op, "save", few_descriptors(chance.randint(0, 6)))
        assert_goes_on(op, failure, expected)


@pytest.mark.root
def test_a_full_disk(new: Any, tmp_path: pathlib.Path, chance: random.Random) -> None:
    with mounts.ext4(tmp_path, 48 << 20) as mount:
        expected = files_without_faults(new(mount / "clean"))
        shutil.rmtree(mount / "clean")
        for _ in range(TIMES):
            op = new(mount / "short")
            free = mounts.free_nbytes(mount)
            with open(mount / "taken", "wb") as file:
                os.posix_fallocate(file.fileno(), 0, free - chance.randrange(4096, 1_400_000))
                failure = failed(lambda: op.save(NEW))
            (mount / "taken").unlink()
            assert re.search("^$|28|No space|unexpected pos", failure), failure
            assert_found(op, failure)
            assert_goes_on(op, failure, expected)
            shutil.rmtree(mount / "short")


@contextlib.contextmanager
def few_descriptors(free: int) -> Iterator[None]:
    """Let the process open so many descriptors more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()
    taken, held = {int(name) for name in os.listdir("/proc/self/fd")}, []  # noqa: PTH208
    limit = max(taken) + 1 + free
    # The limit is on the number of a descriptor, so those between are taken.
    while (made := os.dup(0)) < max(taken):
        held.append(made)
    os.close(made)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in held:
            os.close(each)


def test_replaced_while_it_is_loaded(
    kind: type[Operation], new: Any, directory: pathlib.Path, chance: random.Random
) -> None:
    """A load that meets a save of another object has one version, or says so."""
    expected, count = clean(new, directory, "load")
    if not kind.keeps_all or kind.__name__ == "Store":
        pytest.skip("a reader of these sees what is there")
    for number in range(TIMES):
        op = new(directory / f"replaced-{number}")
        other, loaded = kind(op.folder), []
        with At(chance.randint(1, count), SOURCES, lambda: other.save(NEW)) as at:
            failure = failed(lambda: loaded.append(op.load()))
        assert failure or loaded in ([{OLD}], [{NEW}]), (loaded, at.happened_in)
        other.close()
        assert op.load() == {NEW if at.happened_in else OLD}  # this load may have had fewer moments
        assert_goes_on(op, failure, expected)
