"""Fixtures for all tests: the engines, places for files, random bytes, handles."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib.util
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest

import tensorferry
from tests.support import buckets, deepspeed_gcc, effort, mounts, page_cache, power_cuts, required
from tests.support.data import SEED, SEED_VARIABLE, RandomBytes
from tests.support.fault_proxy import FaultProxy
from tests.support.faultfs import FaultFS, FaultFSUnavailableError, why_unavailable

# Settings of this machine's user must not change the tests; child processes inherit this.
for name in ("ENGINE", "BLOCK_SIZE", "QUEUE_DEPTH", "INTRA_OP_PARALLELISM"):
    os.environ.pop(f"TENSORFERRY_{name}", None)
# torch's threads spin while they wait, by default, which takes the processors from the tests of other workers.
os.environ["OMP_WAIT_POLICY"] = "passive"

# A shell starts background jobs with SIGINT ignored, which child processes would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Property tests check results, not the speed of a busy machine, nor the scope of their fixtures.
hypothesis.settings.register_profile(
    "tensorferry",
    max_examples=effort.examples(100),
    deadline=None,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.function_scoped_fixture,
    ],
)
hypothesis.settings.load_profile("tensorferry")

SMALL_EXT4_NBYTES = 32 << 20
ENGINES = ["io_uring", "libaio", "threads"]
ROOT = pathlib.Path(__file__).parents[1]


# Cached, because the availability of engines does not change during the tests, and probing costs 30 milliseconds.
refusals = functools.cache(tensorferry.engines)


def pytest_report_header() -> list[str]:
    required.required()
    refused = {name: reason for name, reason in refusals().items() if reason}
    lines = [f"tensorferry random seed: {SEED} (repeat with {SEED_VARIABLE}={SEED})"]
    return lines + [f"tensorferry engine {name} refused: {why}" for name, why in refused.items()]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that name their engine; tests of minutes run first, tests that must be alone run last."""
    items[:] = [item for item in items if not item.get_closest_marker("in_turn") or _its_turn(item)]
    for item in items:
        if "engine" in getattr(item, "fixturenames", ()):
            item.add_marker("engine")
        if "own_engine" in getattr(item, "fixturenames", ()):
            item.add_marker("minutes")
            item.add_marker(pytest.mark.timeout(900))
        if item.get_closest_marker("alone"):
            item.add_marker(pytest.mark.timeout(900), append=False)  # waiting for the others counts
    items.sort(
        key=lambda item: (
            item.get_closest_marker("alone") is not None,
            item.get_closest_marker("minutes") is None,
        )
    )


def pytest_collection_finish() -> None:
    """Freeze existing objects: with torch and thousands of tests each garbage collection would take 0.4 seconds."""
    gc.collect()
    gc.freeze()


def _its_turn(item: pytest.Item) -> bool:
    """Return whether the combination of item's other parameters is for its engine: their names choose one."""
    callspec: Any = item.callspec  # type: ignore[attr-defined]
    others = callspec.id.replace(callspec.params["engine"], "", 1)
    chosen = zlib.crc32(f"{item.originalname}{others}".encode()) % len(ENGINES)  # type: ignore[attr-defined]
    return effort.EVERY_COMBINATION or ENGINES[chosen] == callspec.params["engine"]


@pytest.fixture(autouse=True)
def _alone_or_beside_others(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Make a test with the mark `alone` wait until no other worker's test runs, and delay all other tests meanwhile."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    folder = tmp_path_factory.getbasetemp().parent  # one for all workers
    how = fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH
    with (
        open(folder / "turnstile.lock", "w") as turnstile,
        open(folder / "tests.lock", "w") as running,
    ):
        # A test that waits for the exclusive lock holds the turnstile, so no other test can begin meanwhile.
        fcntl.flock(turnstile, fcntl.LOCK_EX)
        fcntl.flock(running, how)
        fcntl.flock(turnstile, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(running, fcntl.LOCK_UN)  # a forked child may still have it open


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Seed torch's random numbers from the session's seed and the test's name only."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(SEED + zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def _page_cache_let_go() -> Iterator[None]:
    """Release the pages that a test holds in the page cache."""
    yield
    page_cache.let_go()


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """Each engine that this process may use; others are skipped."""
    name: str = request.param
    if refusal := refusals()[name]:
        required.missing("engines", f"engine {name}: {refusal}")
    return name


@pytest.fixture
def default_engine(engine: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each engine in turn, for calls and files that name none."""
    monkeypatch.setenv("TENSORFERRY_ENGINE", engine)
    monkeypatch.setattr(tensorferry.transfer.runtime, "_default", None)
    return engine


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


@pytest.fixture(scope="session")
def newest() -> dict[str, str]:
    """Return the environment of a child that imports the newest DeepSpeed; torch must not compile anything in it."""
    if importlib.util.find_spec("deepspeed") is None:
        required.missing("deepspeed", "DeepSpeed is not installed (make deepspeed)")
    return {"TENSORFERRY_DEEPSPEED": "0", "CXX": "false", "DS_ACCELERATOR": "cpu"}


@pytest.fixture(scope="session")
def own_engine(newest: dict[str, str]) -> dict[str, str]:
    """Return the environment in which DeepSpeed uses its own engine, compiled once and cached in build/."""
    environment = newest | deepspeed_gcc.ENVIRONMENT
    folder = deepspeed_gcc.EXTENSIONS
    folder.mkdir(parents=True, exist_ok=True)
    compiled = folder / ".compiled"
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not compiled.exists():
            # A process that was killed while it compiled has left lock files, and torch would wait for them. Removing
            # them is safe, because the lock above lets only one process compile.
            for left in folder.glob("*/lock"):
                left.unlink()
            _compile(environment)
            compiled.touch()
    return environment


def _compile(environment: dict[str, str]) -> None:
    program = "import deepspeed.ops.op_builder as b; b.AsyncIOBuilder().load().aio_handle()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
    )
    if done.returncode != 0:
        last = done.stdout.strip().rpartition("\n")[2]
        required.missing("deepspeed", f"its own engine does not compile here: {last}")


@pytest.fixture
def random_bytes(request: pytest.FixtureRequest) -> RandomBytes:
    """A function that gives arrays of random bytes; see tests/support/data.py."""
    return RandomBytes(request.node.nodeid)


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Return a new directory on the disk, on a file system with O_DIRECT if there is one."""
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
def open_directory() -> Iterator[pathlib.Path]:
    """A directory that every user can enter and write."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="tensorferry-test-"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def tmpfs_directory() -> Iterator[pathlib.Path]:
    """A new directory on a tmpfs."""
    with tempfile.TemporaryDirectory(prefix="tensorferry-test-", dir="/dev/shm") as path:
        yield pathlib.Path(path)


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
    _empty(_faultfs.backing)


@pytest.fixture(scope="module")
def _ext4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    with mounts.ext4(tmp_path_factory.mktemp("ext4"), SMALL_EXT4_NBYTES) as path:
        yield path


@pytest.fixture
def small_ext4(_ext4: pathlib.Path) -> Iterator[pathlib.Path]:
    """An empty ext4 of less than 32 MiB."""
    yield _ext4
    _empty(_ext4)


@pytest.fixture(params=list(power_cuts.FILE_SYSTEMS))
def cut(request: pytest.FixtureRequest, directory: pathlib.Path) -> Iterator[power_cuts.Cut]:
    """A new file system that power cuts are made of."""
    with power_cuts.file_system(request.param, directory) as cut:
        yield cut


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


def _empty(directory: pathlib.Path) -> None:
    for entry in directory.iterdir():
        if entry.name != "lost+found":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def takes_direct_io(directory: pathlib.Path) -> bool:
    """Return whether reads with O_DIRECT of files in directory access a drive."""
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
    """Return the type of the file system of directory."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == number:
                return rest.split()[0]
    return "unknown"


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The address of an S3 server on loopback."""
    required.module("obstore")
    with buckets.s3_server() as address:
        yield address


@pytest.fixture
def bucket(s3: str) -> buckets.Bucket:
    """A new bucket."""
    return buckets.Bucket.new(s3)


@pytest.fixture
def s3_proxy(s3: str) -> Iterator[FaultProxy]:
    """A proxy in front of the S3 server, which fails on demand."""
    with FaultProxy(s3) as proxy:
        yield proxy
