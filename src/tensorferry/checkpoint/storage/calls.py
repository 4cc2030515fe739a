"""One call of torch's save(): the folder to which it saves, and what the hooks of the writer share during the call.

torch's save() calls the hooks of a writer one after the other in one thread, and stops at the first failure, on this
rank or on another one: no hook is certain to be called after another. A path that is given to reset() counts for the
call that follows in the same thread. Asynchronous saves have a thread or a process each, and calls may overlap.

So the state of a call belongs to its thread, and each call begins with new state: nothing relies on a later hook. The
state cannot travel in the plan, because a planner that caches plans returns the plan of an earlier save.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorferry.base.checks import checked_path
from tensorferry.checkpoint.staging import Stager, current_claim, moments, take_claim

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import StorageMeta

    from tensorferry.checkpoint.staging import Claim
    from tensorferry.checkpoint.storage.savers import Saver
    from tensorferry.safetensors.sharded import Model

# How many of the paths that a writer had are remembered, for saves that are still in the background.
_MAX_PATHS = 1024


class Call:
    """The state of one call of save().

    Attributes
    ----------
    folder : Path
        The folder, an absolute path.
    is_coordinator : bool
        Whether this rank commits the save.
    is_alone : bool
        Whether this rank is known to be the only one.
    saver : Saver or None
        The locks of a checkpoint's save, on the coordinator.
    model : Model or None
        The new files of a model, which the coordinator puts in place.
    held : ExitStack
        Releases what the call holds, when it ends.
    """

    def __init__(self, writer: FolderWriter, folder: Path, claim: Claim | None) -> None:
        self.writer = writer
        self.folder = folder
        self.is_coordinator = self.is_alone = False
        self.saver: Saver | None = None
        self.model: Model | None = None
        self.held = contextlib.ExitStack()
        self._claim = claim

    def free_state(self) -> None:
        """Declare that the state has been written: if it was staged, its memory may be used again."""
        self._claim = None

    def end(self) -> None:
        """End the call in this thread."""
        if _thread.call is self:
            _thread.call = None
        self.free_state()
        self.held.close()


class _Thread(threading.local):
    # The path that reset() got last, with its writer and the working directory of that moment.
    given: tuple[FolderWriter, str, str | None] | None = None
    begun: object = None  # the path of the call that has begun last
    call: Call | None = None


_thread = _Thread()


class FolderWriter:
    """A base class of writers that save into a folder, for many calls of save(), which may overlap."""

    # A save in the background goes to the folder that the writer had when the state was copied. So each path is kept
    # with the number of the moment (:data:`.staging.moments`) at which it was set.
    _paths: list[tuple[int, Any]]
    _stager: Stager | None = None

    @property
    def path(self) -> Any:
        """The folder of saves that get no other one."""
        return self._paths[-1][1]

    @path.setter
    def path(self, path: Any) -> None:
        paths = vars(self).get("_paths", [])
        self._paths = [*paths[1 - _MAX_PATHS :], (next(moments), path)]

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The folder of the current thread's save."""
        call = _thread.call
        return call.folder if call is not None and call.writer is self else self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for the next save, to another folder if one is given."""
        super().reset()  # type: ignore[misc]
        take_claim()  # of an earlier save, which has failed before it called this writer again
        if checkpoint_id:
            path, directory = checked_path(checkpoint_id, "checkpoint_id"), None
            with contextlib.suppress(FileNotFoundError):  # the working directory has been removed
                directory = os.getcwd()  # noqa: PTH109 (as in checks.absolute_path)
            _thread.given = self, path, directory
            # In a thread that saves a staged state, a relative path may refer to another directory: _begin_call().
            if path.startswith("/") or threading.current_thread() is threading.main_thread():
                self._resolve_path()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy a state for an asynchronous save; see :class:`Stager`."""
        if self._stager is None:
            self._stager = Stager()
        self.per_thread_copy_ahead = 0  # as in torch: staged tensors are in host memory
        staged: dict[str, Any] = self._stager.stage(state_dict)
        return staged

    def close(self) -> None:
        """Free the memory of staged states."""
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def _folder_in(self, path: Path) -> Path:
        """Return the folder for the data of a save to ``path``."""
        return path

    def storage_meta(self) -> StorageMeta | None:
        """Return the description of a save; torch's save() calls this first, before the planner can fail."""
        # The path may be that of an earlier call, which failed before it wrote.
        if _thread.given is _thread.begun:
            _thread.given = None
        self._resolve_path()
        _thread.begun = _thread.given
        meta: StorageMeta | None = super().storage_meta()  # type: ignore[misc]
        if meta is not None and meta.checkpoint_id is not None:
            # Store a string: unpickling an unknown path class would fail where its module is missing.
            meta.checkpoint_id = os.fspath(meta.checkpoint_id)
        return meta

    def _resolve_path(self) -> None:
        """Set the path that reset() got in this thread, by the working directory of the call."""
        given, claim = _thread.given, current_claim()
        if given is None or given[0] is not self:
            return
        _, path, directory = given
        if claim is not None:
            directory = claim.directory
        if directory is None and not path.startswith("/"):
            raise FileNotFoundError(
                f"checkpoint_id: {path!r} is relative, and the working directory has been removed"
            )
        path = os.fspath(Path(directory or "", path))
        _thread.given = self, path, None
        self.path = self._folder_in(Path(path))

    def _begin_call(self) -> Call:
        """Begin the state of a call in this thread, after the state of an earlier one that failed elsewhere."""
        if _thread.call is not None:
            _thread.call.end()
        self._resolve_path()
        given, _thread.given, _thread.begun = _thread.given, None, None
        claim = take_claim()
        if given is not None and given[0] is self:
            folder = self._folder_in(Path(given[1]))
        else:
            moment = self._paths[-1][0] if claim is None else claim.moment
            before = [path for number, path in self._paths if number <= moment]
            folder = Path((before or [self._paths[0][1]])[-1])
        _thread.call = call = Call(self, folder, claim)
        return call

    def _current_call(self) -> Call:
        """Return the call of this thread, also for a caller who leaves out the first hooks."""
        call = _thread.call
        return call if call is not None and call.writer is self else self._begin_call()
