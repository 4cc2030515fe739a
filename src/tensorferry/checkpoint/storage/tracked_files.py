"""A file system for torch's own writer that records failures, because torch's threads and streams hide them."""

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


class TrackedFileSystem(filesystem.FileSystem):
    """torch's file system with a record of failures, including those of threads that torch neither checks nor joins."""

    def __init__(self, sync: bool) -> None:
        super().__init__()
        self.written: list[Path] = []
        self.failures: list[BaseException] = []
        self._sync = sync
        self._is_stopped = False
        self._open_count = 0
        self._condition = threading.Condition()

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file, and record its path; also record the error if writing the file fails."""
        with self._condition:
            if self._is_stopped:
                raise OSError(errno.ECANCELED, "the save has failed in another thread", str(path))
            self.written.append(Path(path))
            self._open_count += 1
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
            # fsync here: before torch 2.14, torch's own fsync ran before Python's buffer was flushed.
            if self._sync:
                publication.sync_file(Path(path))
        except BaseException as error:
            self.failures.append(error)
            raise
        finally:
            with self._condition:
                self._open_count -= 1
                self._condition.notify_all()

    def stop(self) -> None:
        """Refuse to open more files, and wait until all open files are closed, for a minute at most."""
        with self._condition:
            self._is_stopped = True
            self._condition.wait_for(lambda: self._open_count == 0, _MAX_WAIT_SECONDS)
