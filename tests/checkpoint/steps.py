"""Dying at any step: counts the calls by which a save touches the file system, and kills the process at one of them."""

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

# What a save calls to change something, or to make a change durable.
CALLS: list[tuple[Any, str]] = [
    (tensorferry.File, "__init__"),
    (tensorferry.File, "stream"),
    (tensorferry.File, "close"),
    (tensorferry.Stream, "append"),
    (tensorferry.Stream, "append_made"),
    (tensorferry.Stream, "begin_to_finish"),
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
        self._lock = threading.Lock()  # the save's threads take steps as well
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
        """Count, and die if the time has come."""
        with self._lock:
            if len(self.names) == self._die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.names.append(name)
