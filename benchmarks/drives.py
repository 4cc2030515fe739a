"""Drives over memory, for root: ext4 on a loop device with direct I/O, as fast as processors, or held to a speed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tensorferry.tuning.scratch import scratch_directory
from tensorferry.tuning.workers import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
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
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise NoLoopDeviceError(f"needs {', '.join(missing)}")
    if not _MEMORY_DIRECTORY.is_dir() or shutil.disk_usage(_MEMORY_DIRECTORY).free < nbytes:
        raise NoLoopDeviceError(f"needs {nbytes / MIB:.0f} MiB free in {_MEMORY_DIRECTORY}")
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(scratch_directory(_MEMORY_DIRECTORY, "tensorferry-bench-"))
        image, mount_point = home / "image", home / "mount"
        with open(
            image, "wb", buffering=0
        ) as file:  # a hole's first touch would count as the device's time
            for start in range(0, nbytes, 8 * MIB):
                file.write(bytes(min(8 * MIB, nbytes - start)))
        mount_point.mkdir()
        device = _output("losetup", "--find", "--show", "--direct-io=on", str(image))
        stack.callback(subprocess.run, ["losetup", "--detach", device], capture_output=True)
        _output("mkfs.ext4", "-q", "-F", "-E", "nodiscard,lazy_itable_init=0", device)
        _output("mount", "-o", "nodiscard", device, str(mount_point))
        stack.callback(_unmount, str(mount_point))
        yield mount_point


@contextlib.contextmanager
def limited(drive: Path, nbytes_per_second: int) -> Iterator[bool]:
    """Hold a drive to a speed each way; whether that could be done."""
    number = drive.stat().st_dev
    limits = [LIMITS / f"blkio.throttle.{way}_bps_device" for way in ("read", "write")]
    possible = all(os.access(limit, os.W_OK) for limit in limits)
    for limit in limits if possible else ():
        limit.write_text(f"{os.major(number)}:{os.minor(number)} {nbytes_per_second}\n")
    try:
        yield possible
    finally:
        for limit in limits if possible else ():
            limit.write_text(f"{os.major(number)}:{os.minor(number)} 0\n")


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoLoopDeviceError(f"{command[0]} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def _unmount(mount_point: str) -> None:
    """Somebody may hold a file a moment longer; after ten seconds the mount goes when they do."""
    for _ in range(100):
        if subprocess.run(["umount", mount_point], capture_output=True).returncode == 0:
            return
        time.sleep(0.1)
    subprocess.run(["umount", "--lazy", mount_point], capture_output=True)
