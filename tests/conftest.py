"""Fixtures for all tests: the engines, places for files, random bytes, handles."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tensorferry
from tests.support.data import SEED, SEED_VARIABLE, RandomBytes

# Settings that this machine's user has stored must not decide what is tested; child processes inherit this.
os.environ["TENSORFERRY_PROFILES"] = "0"

# A shell starts what runs in the background with Ctrl-C ignored, which child processes would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ENGINES = ["io_uring", "libaio", "threads"]
REQUIRE_ENGINES_VARIABLE = "TENSORFERRY_TEST_REQUIRE_ENGINES"
ROOT = pathlib.Path(__file__).parents[1]


def pytest_report_header() -> list[str]:
    refused = {name: reason for name, reason in tensorferry.engines().items() if reason}
    lines = [f"tensorferry random seed: {SEED} (repeat with {SEED_VARIABLE}={SEED})"]
    return lines + [f"tensorferry engine {name} refused: {why}" for name, why in refused.items()]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """Each engine that this process may use; others are skipped, or fail if all are required."""
    name: str = request.param
    refusal = tensorferry.engines()[name]
    if refusal and os.environ.get(REQUIRE_ENGINES_VARIABLE) == "1":
        pytest.fail(f"engine {name} is required, but refused: {refusal}")
    if refusal:
        pytest.skip(f"engine {name}: {refusal}")
    return name


MakeHandle = Callable[..., "tensorferry.aio_handle"]


@pytest.fixture
def make_handle(engine: str) -> Iterator[MakeHandle]:
    """A function that makes handles on the engine, with any options; they are closed at the end."""
    with contextlib.ExitStack() as handles:

        def make(**options: Any) -> tensorferry.aio_handle:
            return handles.enter_context(tensorferry.aio_handle(**{"engine": engine} | options))

        yield make


@pytest.fixture
def handle(make_handle: MakeHandle) -> tensorferry.aio_handle:
    """A handle on the engine with default options."""
    return make_handle()


@pytest.fixture
def random_bytes(request: pytest.FixtureRequest) -> RandomBytes:
    """A function that gives arrays of random bytes; see tests/support/data.py."""
    return RandomBytes(request.node.nodeid)


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A new directory on the disk: one that takes O_DIRECT wherever there is one."""
    if takes_direct_io(tmp_path):
        yield tmp_path
        for entry in tmp_path.iterdir():  # pytest keeps old directories; big files must not stay
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        return
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="test-", dir=build) as path:
        yield pathlib.Path(path)


@pytest.fixture
def tmpfs_directory() -> Iterator[pathlib.Path]:
    """A new directory on a tmpfs."""
    with tempfile.TemporaryDirectory(prefix="tensorferry-test-", dir="/dev/shm") as path:
        yield pathlib.Path(path)


def takes_direct_io(directory: pathlib.Path) -> bool:
    """Return whether files in directory are read from a drive where O_DIRECT asks for it."""
    if file_system_type(directory) in ("tmpfs", "ramfs"):  # tmpfs ignores it from Linux 6.6 on
        return False
    path = directory / "direct-probe"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def file_system_type(directory: pathlib.Path) -> str:
    """Return the type of the file system that directory lies on."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == number:
                return rest.split()[0]
    return "unknown"
