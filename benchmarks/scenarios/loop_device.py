"""A fast block device: ext4 on a loop device with direct I/O over a file in memory (root only)."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import fio
from benchmarks.harness import MIB, Outcome, Settings, UnavailableError
from benchmarks.scenarios import large
from benchmarks.worker import workers

if TYPE_CHECKING:
    from collections.abc import Iterator

DEPTH = 32
_MEMORY_DIRECTORY = Path("/dev/shm")
_TOOLS = ("losetup", "mkfs.ext4", "mount", "umount")


def run(settings: Settings) -> Outcome:
    size = 3 * (settings.nbytes + 2 * large.ODD_NBYTES) + 64 * MIB
    try:
        with loop_mounted(size) as directory, workers() as make:
            quick = replace(settings, directory=directory)
            return large.transfers(
                quick,
                directory,
                make,
                "loop",
                {"queue_depth": DEPTH},
                _configs(settings),
                locked_target=0.95,
                ordinary_target=None,
            )
    except UnavailableError as reason:
        return Outcome(notes=[str(reason)])


def _configs(settings: Settings) -> list[fio.Config]:
    return [c for c in fio.large_configs(settings) if c.depth == DEPTH]


@contextlib.contextmanager
def loop_mounted(nbytes: int) -> Iterator[Path]:
    """An ext4 file system over memory; everything is undone afterwards."""
    if os.geteuid() != 0:
        raise UnavailableError("needs root, to attach a loop device and mount it")
    for tool in _TOOLS:
        if shutil.which(tool) is None:
            raise UnavailableError(f"needs {tool}")
    if not _MEMORY_DIRECTORY.is_dir() or shutil.disk_usage(_MEMORY_DIRECTORY).free < nbytes:
        raise UnavailableError(f"needs {nbytes / MIB:.0f} MiB free in {_MEMORY_DIRECTORY}")
    with contextlib.ExitStack() as stack:
        home = Path(tempfile.mkdtemp(prefix="tensorferry-bench-", dir=_MEMORY_DIRECTORY))
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        image, mount_point = home / "image", home / "mount"
        _fill(image, nbytes)
        mount_point.mkdir()
        device = _output("losetup", "--find", "--show", "--direct-io=on", str(image))
        stack.callback(_quietly, "losetup", "--detach", device)
        _output("mkfs.ext4", "-q", "-F", "-E", "nodiscard,lazy_itable_init=0", device)
        _output("mount", "-o", "nodiscard", device, str(mount_point))
        stack.callback(_unmount, mount_point)
        yield mount_point


def _fill(image: Path, nbytes: int) -> None:
    """Touch every page of the image: a hole's first touch would be measured as device time."""
    block = bytes(8 * MIB)
    with open(image, "wb", buffering=0) as file:
        for start in range(0, nbytes, len(block)):
            file.write(block[: nbytes - start])


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UnavailableError(f"{command[0]} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def _unmount(mount_point: Path) -> None:
    """Somebody may hold a file a moment longer; after ten seconds the mount goes when they do."""
    for _ in range(100):
        if subprocess.run(["umount", str(mount_point)], capture_output=True).returncode == 0:
            return
        time.sleep(0.1)
    _quietly("umount", "--lazy", str(mount_point))


def _quietly(*command: str) -> None:
    subprocess.run(command, capture_output=True)
