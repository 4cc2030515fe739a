"""Simulates power cuts: mounts a copy of a device's contents at one moment."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from typing import TYPE_CHECKING

from tests.support import mounts, required

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

# The mount options of each, which keep the kernel from committing automatically during a test.
FILE_SYSTEMS = {"ext4": "loop,commit=3000", "ext2": "loop"}
DEVICE_NBYTES = 48 << 20


class Cut:
    """A file system, and its state after a power cut."""

    def __init__(self, image: pathlib.Path, mount: pathlib.Path) -> None:
        self.path = mount
        self._image = image

    @contextlib.contextmanager
    def now(self) -> Iterator[pathlib.Path]:
        """Mount a copy of the device's contents at this moment."""
        image = self._image.with_suffix(".cut")
        shutil.copyfile(self._image, image)
        # A file system without a journal is mended first, as it is when a machine starts again.
        subprocess.run(["fsck.ext4", "-fy", str(image)], capture_output=True, check=False)
        with mounts.mounted(self._image.with_suffix(".after"), "-o", "loop", str(image)) as after:
            yield after
        image.unlink()


@contextlib.contextmanager
def file_system(name: str, directory: pathlib.Path) -> Iterator[Cut]:
    """Mount a new file system, of 48 MiB, that power cuts are made of."""
    image = directory / "device.img"
    with image.open("wb") as file:
        file.truncate(DEVICE_NBYTES)
    made = subprocess.run([f"mkfs.{name}", "-q", str(image)], capture_output=True, text=True)
    if made.returncode != 0:
        required.missing("mounts", f"mkfs.{name} failed: {made.stderr.strip()}")
    how = ("-t", name, "-o", FILE_SYSTEMS[name], str(image))
    with mounts.mounted(directory / "device.mount", *how) as mount:
        yield Cut(image, mount)
