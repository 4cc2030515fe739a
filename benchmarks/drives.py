"""Drives over memory, for root: ext4 on a loop device with direct I/O, as fast as processors, or held to a speed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import MIB, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

_MEMORY_DIRECTORY = Path("/dev/shm")
_TOOLS = ("losetup", "mkfs.ext4", "mount", "umount")
LIMITS = Path("/sys/fs/cgroup/blkio")


class NoLoopDeviceError(UnavailableError):
    """This machine, or this user, cannot have a loop device; the message says why."""


@contextlib.contextmanager
def loop_mounted(nbytes: int) -> Iterator[Path]:
    """An ext4 file system over memory; everything is undone afterwards."""
    if os.geteuid() != 0:
        raise NoLoopDeviceError("needs root, to attach a loop device and mount it")
    for tool in _TOOLS:
        if shutil.which(tool) is None:
            raise NoLoopDeviceError(f"needs {tool}")
    if not _MEMORY_DIRECTORY.is_dir() or shutil.disk_usage(_MEMORY_DIRECTORY).free < nbytes:
        raise NoLoopDeviceError(f"needs {nbytes / MIB:.0f} MiB free in {_MEMORY_DIRECTORY}")
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


@contextlib.contextmanager
def limited(drive: Path, nbytes_per_second: int) -> Iterator[bool]:
    """Hold a drive to a speed each way; whether that could be done."""
    number = drive.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    limits = [LIMITS / f"blkio.throttle.{way}_bps_device" for way in ("read", "write")]
    if not all(os.access(limit, os.W_OK) for limit in limits):
        yield False
        return
    try:
        for limit in limits:
            limit.write_text(f"{device} {nbytes_per_second}\n")
        yield True
    finally:
        for limit in limits:
            limit.write_text(f"{device} 0\n")


def _fill(image: Path, nbytes: int) -> None:
    """Touch every page of the image: a hole's first touch would be measured as device time."""
    block = bytes(8 * MIB)
    with open(image, "wb", buffering=0) as file:
        for start in range(0, nbytes, len(block)):
            file.write(block[: nbytes - start])


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoLoopDeviceError(f"{command[0]} failed: {done.stderr.strip()}")
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
