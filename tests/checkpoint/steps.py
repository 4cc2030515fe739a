"""Crashes at any step: counts the calls with which a save changes the file system, and kills the process at one."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
from typing import TYPE_CHECKING, Any

import tensorferry
from tensorferry.transfer import publication

if TYPE_CHECKING:
    from collections.abc import Callable

# The functions by which a save changes files, or makes a change durable.
CALLS: list[tuple[Any, str]] = [
    (tensorferry.File, "__init__"),
    (tensorferry.File, "stream"),
    (tensorferry.File, "close"),
    (tensorferry.Stream, "append"),
    (tensorferry.Stream, "append_with_fields"),
    (tensorferry.Stream, "begin_finish"),
    (tensorferry.Stream, "wait"),
    (publication, "sync_open_directory"),
    (publication, "_write_all"),
    (os, "fsync"),
    (pathlib.Path, "mkdir"),
    (os, "replace"),
    (pathlib.Path, "unlink"),
]


class Steps:
    """Counts steps, two for each call: before it and after it."""

    def __init__(self, die_at: int | None = None) -> None:
        self.names: list[str] = []  # of the call that each step is before or after
        self._lock = threading.Lock()  # threads of the save make steps, too
        self._die_at = die_at

    def install(self, patch: Callable[..., None] = setattr) -> None:
        """Count from now on, in all of this process."""
        for owner, name in CALLS:
            patch(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.step(function.__name__)
            result = function(*arguments, **options)
            self.step(function.__name__)
            return result

        return counted

    def step(self, name: str) -> None:
        """Count the step, and kill the process if it is the chosen one."""
        with self._lock:
            if len(self.names) == self._die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.names.append(name)
