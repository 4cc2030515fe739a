"""Fixtures for the fault tests: file systems that fail."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.support import mounts, required
from tests.support.faultfs import FaultFS, FaultFSUnavailableError, why_unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = pathlib.Path(__file__).parent
TIMEOUT_S = 120
EXT4_NBYTES = 32 << 20


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A hang ends the run with every thread's stack, also where no Python code runs any more."""
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S, method="thread"))


def empty(directory: pathlib.Path) -> None:
    """Delete what is in directory."""
    for entry in directory.iterdir():
        if entry.name != "lost+found":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


@pytest.fixture(scope="module")
def _faultfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultFS]:
    reason = why_unavailable()
    if reason:
        required.missing("fuse", reason)
    with contextlib.ExitStack() as stack:
        try:
            fs = stack.enter_context(FaultFS(tmp_path_factory.mktemp("faultfs")))
        except FaultFSUnavailableError as unavailable:
            required.missing("fuse", str(unavailable))
        yield fs


@pytest.fixture
def faultfs(_faultfs: FaultFS) -> Iterator[FaultFS]:
    """A FUSE file system that fails on demand."""
    yield _faultfs
    _faultfs.clear()
    empty(_faultfs.backing)


@pytest.fixture(scope="module")
def _ext4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    with mounts.ext4(tmp_path_factory.mktemp("ext4"), EXT4_NBYTES) as path:
        yield path


@pytest.fixture
def small_ext4(_ext4: pathlib.Path) -> Iterator[pathlib.Path]:
    """An empty ext4 of less than 32 MiB."""
    yield _ext4
    empty(_ext4)


@pytest.fixture
def small_tmpfs(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """An empty tmpfs of 8 MiB."""
    with mounts.tmpfs(directory / "tmpfs", 8 << 20) as path:
        yield path


@pytest.fixture
def ramfs(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """An empty ramfs: no O_DIRECT, no fallocate."""
    with mounts.ramfs(directory / "ramfs") as path:
        yield path
