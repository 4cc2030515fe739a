"""Files that torch's own code writes: watched, as its threads and streams hide what goes wrong."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.checkpoint import filesystem

from tensorferry.checkpoint.storage import commit

if TYPE_CHECKING:
    import io
    import os
    from collections.abc import Iterator


class WatchedFileSystem(filesystem.FileSystem):
    """torch's files, of which failures are kept, also those of threads that nobody asks."""

    def __init__(self, sync: bool) -> None:
        super().__init__()
        self.written: list[Path] = []
        self.failures: list[BaseException] = []
        self._sync = sync

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file."""
        self.written.append(Path(path))
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
            if (
                self._sync
            ):  # before torch 2.14, its own came before Python's buffer had been written
                commit.sync_file(Path(path))
        except BaseException as error:
            self.failures.append(error)
            raise
