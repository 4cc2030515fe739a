"""Drives over memory (root only).

Each is an ext4 file system on a loop device with direct I/O, over a file in /dev/shm.
"""

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


class NoLoopDeviceError(UnavailableError):
    """A loop device is not available on this machine or to this user; the message has the reason."""


@contextlib.contextmanager
def loop_mounted(nbytes: int) -> Iterator[Path]:
    """Mount an ext4 file system over memory and yield its mount point; afterwards unmount it and detach its device."""
    if os.geteuid() != 0:
        raise NoLoopDeviceError("needs root, to attach a loop device and mount it")
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise NoLoopDeviceError(f"needs {', '.join(missing)}")
    if not _MEMORY_DIRECTORY.is_dir() or shutil.disk_usage(_MEMORY_DIRECTORY).free < nbytes:
        raise NoLoopDeviceError(f"needs {nbytes / MIB:.0f} MiB free in {_MEMORY_DIRECTORY}")
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(scratch_directory(_MEMORY_DIRECTORY, "tensorferry-bench-"))
        image, mount_point = home / "image", home / "mount"
        # Write zeros instead of making a sparse file: tmpfs would allocate the pages of holes at the first write to
        # them, and that time would count as the device's.
        with open(image, "wb", buffering=0) as file:
            for start in range(0, nbytes, 8 * MIB):
                file.write(bytes(min(8 * MIB, nbytes - start)))
        mount_point.mkdir()
        device = _output("losetup", "--find", "--show", "--direct-io=on", str(image))
        stack.callback(subprocess.run, ["losetup", "--detach", device], capture_output=True)
        _output("mkfs.ext4", "-q", "-F", "-E", "nodiscard,lazy_itable_init=0", device)
        _output("mount", "-o", "nodiscard", device, str(mount_point))
        stack.callback(_unmount, str(mount_point))
        yield mount_point


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoLoopDeviceError(f"{command[0]} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def _unmount(mount_point: str) -> None:
    """Unmount; while a process has a file open, retry for ten seconds, then detach the mount lazily (umount(8))."""
    for _ in range(100):
        if subprocess.run(["umount", mount_point], capture_output=True).returncode == 0:
            return
        time.sleep(0.1)
    subprocess.run(["umount", "--lazy", mount_point], capture_output=True)
