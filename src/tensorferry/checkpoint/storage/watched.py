"""Files that torch's own code writes: watched, as its threads and streams hide what goes wrong."""

from __future__ import annotations

import contextlib
import errno
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.checkpoint import filesystem

from tensorferry.transfer import publication

if TYPE_CHECKING:
    import io
    import os
    from collections.abc import Iterator


_MAX_WAIT_SECONDS = 60.0


class WatchedFileSystem(filesystem.FileSystem):
    """torch's files, of which failures are kept, also those of threads that nobody asks, or waits for."""

    def __init__(self, sync: bool) -> None:
        super().__init__()
        self.written: list[Path] = []
        self.failures: list[BaseException] = []
        self._sync = sync
        self._given_up = False
        self._open_count = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file."""
        with self._changed:
            if self._given_up:
                raise OSError(errno.ECANCELED, "the save has failed in another thread", str(path))
            self.written.append(Path(path))
            self._open_count += 1
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
            # Before torch 2.14, its own came before Python's buffer had been written.
            if self._sync:
                publication.sync_file(Path(path))
        except BaseException as error:
            self.failures.append(error)
            raise
        finally:
            with self._changed:
                self._open_count -= 1
                self._changed.notify_all()

    def give_up(self) -> None:
        """Open no more files, and return when those that are open have been closed."""
        with self._changed:
            self._given_up = True
            self._changed.wait_for(lambda: self._open_count == 0, _MAX_WAIT_SECONDS)
