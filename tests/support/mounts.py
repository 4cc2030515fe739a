"""Small file systems for one test: ext4 on a loop device, tmpfs, ramfs, read-only (as root)."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import tempfile
from typing import TYPE_CHECKING

from tests.support import required
from tests.support.faultfs import is_mounted

if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICE_NBYTES = 32 << 20


@contextlib.contextmanager
def mounted(path: pathlib.Path, *arguments: str) -> Iterator[pathlib.Path]:
    """Mount with `mount arguments path` during the block; skip the test if that is not possible."""
    if os.geteuid() != 0:
        required.missing("mounts", "mounting needs root")
    path.mkdir(parents=True, exist_ok=True)
    result = subprocess.run(["mount", *arguments, str(path)], capture_output=True, text=True)
    if result.returncode != 0:
        required.missing(
            "mounts", f"this machine cannot mount {arguments}: {result.stderr.strip()}"
        )
    try:
        yield path
    finally:
        for command in (["umount", str(path)], ["umount", "-l", str(path)]):
            if is_mounted(path):
                subprocess.run(command, capture_output=True, check=False)


@contextlib.contextmanager
def ext4(directory: pathlib.Path, nbytes: int) -> Iterator[pathlib.Path]:
    """Mount a new ext4 of nbytes on a file in directory."""
    if os.geteuid() != 0:
        required.missing("mounts", "mounting needs root")
    image = pathlib.Path(tempfile.mkdtemp(dir=directory)) / "ext4.img"
    with image.open("wb") as file:
        file.truncate(nbytes)
    try:
        make = ["mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=0", str(image)]
        result = subprocess.run(make, capture_output=True, text=True)
        if result.returncode != 0:
            required.missing("mounts", f"mkfs.ext4 failed: {result.stderr.strip()}")
        with mounted(image.with_suffix(".mount"), "-o", "loop", str(image)) as path:
            yield path
    finally:
        image.unlink()


@contextlib.contextmanager
def loop_device(directory: pathlib.Path, *options: str) -> Iterator[pathlib.Path]:
    """Attach a new file in directory as a loop device; skip the test if that is not possible."""
    if os.geteuid() != 0:
        required.missing("mounts", "loop devices need root")
    with tempfile.NamedTemporaryFile(dir=directory, suffix=".img") as image:
        image.truncate(DEVICE_NBYTES)
        command = ["losetup", "--find", "--show", *options, image.name]
        attached = subprocess.run(command, capture_output=True, text=True)
        if attached.returncode != 0:
            required.missing("mounts", f"no loop device: {attached.stderr.strip()}")
        device = attached.stdout.strip()
        try:
            yield pathlib.Path(device)
        finally:
            subprocess.run(["losetup", "--detach", device], check=True)


@contextlib.contextmanager
def ext4_on(device: pathlib.Path, mount_point: pathlib.Path) -> Iterator[pathlib.Path]:
    """Mount a new ext4 on a device."""
    subprocess.run(["mkfs.ext4", "-q", str(device)], check=True, capture_output=True)
    with mounted(mount_point, str(device)) as path:
        yield path


@contextlib.contextmanager
def tmpfs(path: pathlib.Path, nbytes: int) -> Iterator[pathlib.Path]:
    """Mount a new tmpfs of at most nbytes."""
    with mounted(path, "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs") as mount:
        yield mount


@contextlib.contextmanager
def ramfs(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Mount a new ramfs, which supports neither O_DIRECT nor fallocate."""
    with mounted(path, "-t", "ramfs", "ramfs") as mount:
        yield mount


@contextlib.contextmanager
def read_only(source: pathlib.Path, path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Show the directory source, read-only, at path."""
    with (
        mounted(path, "--bind", str(source)),
        mounted(path, "-o", "remount,bind,ro") as mount,
    ):
        yield mount


def free_nbytes(path: pathlib.Path) -> int:
    """Return the free bytes of the file system at path."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize
