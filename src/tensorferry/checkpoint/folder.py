"""A folder of checkpoints, one for each step: what is in it, what dead saves left, and taking away what may go.

``step_00001000`` is a checkpoint of torch.distributed.checkpoint, and counts from when it has its ``.metadata``. Until
then it has a file ``.tensorferry-unfinished``, by which a later save knows what is left of one that died. What is to go
gets another name first, ``.tensorferry-removed.*``: nothing half removed is ever taken for a checkpoint. Checkpoints
behind one that a training went back to are called ``.tensorferry-abandoned.*``. All else is left alone, and so is what
symbolic links in the folder, or in its checkpoints, lead to, and what is being loaded.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tensorferry.base.file_locks import unread
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.steps import name_of, stays, step_of, superfluous
from tensorferry.checkpoint.storage import commit
from tensorferry.checkpoint.storage.names import METADATA_NAME
from tensorferry.checkpoint.storage.savers import Saver
from tensorferry.transfer import publication

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

_UNFINISHED = ".tensorferry-unfinished"
_REMOVED = ".tensorferry-removed."
_ABANDONED = ".tensorferry-abandoned."


class Folder:
    """A folder of checkpoints."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step is, or would be."""
        return self.root / name_of(step)

    def steps(self) -> list[int]:
        """Return the steps of which there are checkpoints, in order."""
        try:
            paths = list(self.root.iterdir())
        except FileNotFoundError:
            return []
        return sorted(
            step for path in paths if (step := _step_of(path)) is not None and _is_whole(path)
        )

    def begin(self, step: int, *, replace: bool) -> Saver:
        """Set aside what dead saves left, and make place for a step; the result shows others that it is alive.

        Raises
        ------
        ValueError
            There is a checkpoint of this step, and it may not be replaced.
        """
        publication.make_directory(self.root)
        saver, path = Saver(self.root, None), self.path(step)
        try:
            with saver.alone() as alone, contextlib.suppress(OSError):
                for each in list(self.root.iterdir()) if alone else ():
                    _clear_leftovers(each)
            if not replace and _is_whole(path):
                raise ValueError(
                    f"step: there is a checkpoint of step {step}, {str(path)!r}; restore() an older one before, or "
                    "overwrite=True"
                )
            publication.make_directory(path)
            (path / _UNFINISHED).touch()
        except BaseException:
            saver.leave()
            raise
        return saver

    def end(self, step: int) -> None:
        """Take the mark of an unfinished save off a step."""
        (self.path(step) / _UNFINISHED).unlink(missing_ok=True)

    def abandon(self, steps: Iterable[int]) -> list[int]:
        """Set checkpoints aside, so that none of them is restored; return the steps of those that must stay."""
        links = self._links()
        return [
            step
            for step in steps
            if self._is_linked(self.path(step), links)
            or not _set_aside_unless_used(self.path(step), _ABANDONED)
        ]

    def superfluous(
        self, step: int, keep_last: int, keep_every: int | None, damaged: Container[int]
    ) -> list[Path]:
        """Return which checkpoints may go now that there is one of a step, and those that were set aside."""
        gone = superfluous(self.steps(), step, keep_last, keep_every, damaged)
        going = [self.path(each) for each in gone]
        for path in self.root.iterdir():
            number = _step_of(path, _ABANDONED)
            if number is not None and not stays(number, keep_every):
                going.append(path)
        links = self._links() if going else []
        return [path for path in going if not self._is_linked(path, links)]

    def remove(self, paths: Iterable[Path] = ()) -> list[Exception]:
        """Remove checkpoints into which nobody saves, and what was set aside before; return what stays, and why."""
        problems: list[Exception] = []
        for path in paths:
            try:
                _set_aside_unless_used(path)
            except (CheckpointError, OSError) as error:
                problems.append(error)
        try:
            going = [path for path in self.root.iterdir() if path.name.startswith(_REMOVED)]
            if going:
                publication.sync_directory(self.root)  # before any of their files goes
        except OSError as error:
            return [*problems, error]
        for path in going:
            try:
                shutil.rmtree(path)
            except FileNotFoundError:  # another process removes it, too
                pass
            except OSError as error:
                problems.append(error)
        return problems

    def _is_linked(self, path: Path, links: list[tuple[Path, Path]]) -> bool:
        return path.is_symlink() or any(
            link.parent != path and target.is_relative_to(os.path.realpath(path))
            for link, target in links
        )

    def _links(self) -> list[tuple[Path, Path]]:
        """Return the symbolic links here and in checkpoints, with what they lead to."""
        links = []
        for path in self.root.iterdir():
            if path.is_symlink():
                links.append(path)
            elif _step_of(path) is not None and path.is_dir():
                links += [Path(entry.path) for entry in os.scandir(path) if entry.is_symlink()]
        return [(link, Path(os.path.realpath(link))) for link in links]


def _step_of(path: Path, prefix: str = "") -> int | None:
    """Return the step that a checkpoint is of by its name, or was of before it got a name with that prefix."""
    if not path.name.startswith(prefix):
        return None
    return step_of(path.name[len(prefix) :].partition(".")[0] if prefix else path.name)


def _is_whole(path: Path) -> bool:
    return (path / METADATA_NAME).exists()


def _clear_leftovers(path: Path) -> None:
    """Set aside what a dead save of ours began, if nothing else is in it; from a checkpoint, remove it."""
    if _step_of(path) is None or path.is_symlink() or not (path / _UNFINISHED).exists():
        return
    names = {each.name for each in path.iterdir()} - {_UNFINISHED}
    if all(map(commit.is_of_a_save, names)):
        _set_aside(path)
    elif METADATA_NAME in names:
        saver = Saver(path, None)
        try:
            with saver.alone() as alone:
                if alone:
                    commit.remove_leftovers(path)
                    (path / _UNFINISHED).unlink()
        finally:
            saver.leave()


def _set_aside(path: Path, prefix: str = _REMOVED) -> None:
    with contextlib.suppress(FileNotFoundError):  # another process has
        path.rename(path.with_name(f"{prefix}{path.name}.{secrets.token_hex(8)}"))


def _set_aside_unless_used(path: Path, prefix: str = _REMOVED) -> bool:
    """Set a checkpoint aside unless somebody saves to it or loads it; return whether it has gone."""
    saver = Saver(path, None)
    try:
        with saver.alone() as alone, unread(path, METADATA_NAME) as is_unread:
            if is_unread and (alone or not saver.reaches_all):
                _set_aside(path, prefix)
                return True
    except FileNotFoundError:  # another process has
        return True
    finally:
        saver.leave()
    return False
