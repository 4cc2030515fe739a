"""A folder of checkpoints, one for each step: listing, cleaning up after dead saves, and removal.

``step_00001000`` is a checkpoint of torch.distributed.checkpoint, which is complete once it has its ``.metadata``. From
its beginning to its end a save keeps a file ``.tensorferry-unfinished`` in that folder. If the save dies or fails, the
file stays, and a later save recognizes by it what may be removed.

To set a checkpoint aside is to rename it, so that it no longer counts as a checkpoint:

- to ``.tensorferry-removed.*`` before its files are removed: a half-removed folder is never mistaken for a checkpoint;
- to ``.tensorferry-abandoned.*`` if the training has returned to an older step, so that restore() does not prefer it.

Other files are left alone. A checkpoint also stays while it is being loaded, and while a symbolic link in the folder or
in another checkpoint refers to it. A save is alive while it holds its locks
(:class:`tensorferry.checkpoint.storage.savers.Saver`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tensorferry.base.file_locks import writer_lock
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.steps import is_permanent, name_of, step_of, superfluous
from tensorferry.checkpoint.storage import commit
from tensorferry.checkpoint.storage.metadata import metadata_path, read_metric
from tensorferry.checkpoint.storage.names import METADATA_NAME
from tensorferry.checkpoint.storage.savers import Saver
from tensorferry.transfer import publication

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable

_UNFINISHED = ".tensorferry-unfinished"
_REMOVED = ".tensorferry-removed."
_NEW_LINK = ".tensorferry-new-link"
_ABANDONED = ".tensorferry-abandoned."


class Folder:
    """A folder of checkpoints.

    Parameters
    ----------
    root : Path
        The folder.
    has_links : bool
        Whether its symbolic links ``last`` and ``best`` are ours, so that they do not keep a checkpoint in use.
    """

    def __init__(self, root: Path, *, has_links: bool = False) -> None:
        self.root = root
        self._has_links = has_links

    def path(self, step: int) -> Path:
        """Return the path of a step's checkpoint, whether it exists or not."""
        return self.root / name_of(step)

    def steps(self) -> list[int]:
        """Return the steps that have checkpoints, in order."""
        while True:
            try:
                listed = [(_step_of(path), path) for path in self.root.iterdir()]
            except FileNotFoundError:
                return []
            except NotADirectoryError as error:
                raise self._is_a_file() from error
            paths = {step: path for step, path in listed if step is not None}
            complete = {step for step, path in paths.items() if _is_complete(path)}
            # Another process that has removed a checkpoint meanwhile may have saved a newer one, which is not listed.
            if all(step in complete or path.exists() for step, path in paths.items()):
                return sorted(complete)

    def begin(self, step: int, *, replace: bool) -> Saver:
        """Clean up after dead saves, and create the folder of a step.

        The returned locks show other processes that this save is alive; the caller releases them at its end.

        Raises
        ------
        ValueError
            There is a checkpoint of this step, and it may not be replaced.
        """
        if self.root.is_file():
            raise self._is_a_file()
        publication.make_directory(self.root)
        saver, path = Saver(self.root, None), self.path(step)
        try:
            with saver.exclusive() as alone, contextlib.suppress(OSError):
                for each in list(self.root.iterdir()) if alone else ():
                    _clear_leftovers(each)
            if not replace and _is_complete(path):
                raise ValueError(
                    f"step: a checkpoint of step {step} exists: {str(path)!r} (remedies: overwrite=True; or call "
                    "restore() for an older step, after which later steps may be saved again)"
                )
            publication.make_directory(path)
            (path / _UNFINISHED).touch()
        except BaseException:
            saver.leave()
            raise
        return saver

    def _is_a_file(self) -> NotADirectoryError:
        problem = "the folder of the checkpoints cannot be here, because this is a file"
        return NotADirectoryError(errno.ENOTDIR, problem, str(self.root))

    def end(self, step: int) -> None:
        """Remove the mark of an unfinished save from a step."""
        (self.path(step) / _UNFINISHED).unlink(missing_ok=True)

    def best(self, steps: Iterable[int], sign: int) -> list[int]:
        """Return the steps whose checkpoints have a metric, the best first; ``sign`` is 1 if low ones are better."""
        metrics = {}
        for step in steps:
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                metric = read_metric(metadata_path(self.path(step)))
                if metric is not None and metric == metric:
                    metrics[step] = sign * metric
        return sorted(metrics, key=lambda step: (metrics[step], -step))

    def set_links(self, last: Collection[int], best: Collection[int]) -> None:
        """Let each of our links lead to the first of its steps, and remove one that has no step."""
        for name, steps in (("last", last), ("best", best)):
            path = self.root / name
            if not path.is_symlink() and path.exists():  # a file of the user stays
                continue
            new = self.root / _NEW_LINK
            new.unlink(missing_ok=True)  # of a save that was killed
            if steps:
                new.symlink_to(name_of(next(iter(steps))))
                publication.rename(new, path)
            else:
                path.unlink(missing_ok=True)

    def _remove_links(self, steps: Collection[int | None]) -> None:
        """Remove our links to checkpoints that are about to be set aside."""
        for name in ("last", "best") if self._has_links else ():
            path = self.root / name
            if path.is_symlink() and step_of(str(path.readlink())) in steps:
                path.unlink()

    def abandon(self, steps: Iterable[int]) -> list[int]:
        """Set checkpoints aside, so that restore() ignores them; return the steps that stay because they are in use."""
        steps = list(steps)
        self._remove_links(steps)
        links = self._links()
        return [
            step
            for step in steps
            if self._is_linked(self.path(step), links)
            or not _set_aside_unless_used(self.path(step), _ABANDONED)
        ]

    def superfluous(
        self,
        steps: Iterable[int],
        step: int,
        keep_last: int,
        keep_every: int | None,
        damaged: Container[int],
        best: Container[int],
    ) -> list[Path]:
        """Return the checkpoints of ``steps`` that may be removed once ``step`` has one, and all abandoned ones."""
        gone = superfluous(steps, step, keep_last, keep_every, damaged)
        removable = [self.path(each) for each in gone if each not in best]
        for path in self.root.iterdir():
            number = _step_of(path, _ABANDONED)
            if number is not None and not is_permanent(number, keep_every):
                removable.append(path)
        links = self._links() if removable else []
        return [path for path in removable if not self._is_linked(path, links)]

    def remove(self, paths: Iterable[Path] = ()) -> list[Exception]:
        """Remove the given checkpoints, unless in use, and all that were set aside before; return the errors."""
        problems: list[Exception] = []
        for path in paths:
            try:
                _set_aside_unless_used(path)
            except (CheckpointError, OSError) as error:
                problems.append(error)
        try:
            removable = [path for path in self.root.iterdir() if path.name.startswith(_REMOVED)]
            if removable:
                # Make the renames durable before any file is removed.
                publication.sync_directory(self.root)
        except OSError as error:
            return [*problems, error]
        for path in removable:
            try:
                shutil.rmtree(path)
            except FileNotFoundError:  # another process removes it as well
                pass
            except OSError as error:
                problems.append(error)
        return problems

    def _is_linked(self, path: Path, links: list[tuple[Path, Path]]) -> bool:
        """Return whether a checkpoint's path is a symbolic link, or a link outside the checkpoint leads into it."""
        return path.is_symlink() or any(
            link.parent != path and target.is_relative_to(os.path.realpath(path))
            for link, target in links
        )

    def _links(self) -> list[tuple[Path, Path]]:
        """Return the symbolic links in the folder and in checkpoints, with their targets."""
        links = []
        for path in self.root.iterdir():
            if path.is_symlink():
                links.append(path)
            elif _step_of(path) is not None and path.is_dir():
                links += [Path(entry.path) for entry in os.scandir(path) if entry.is_symlink()]
        return [(link, Path(os.path.realpath(link))) for link in links]


def _step_of(path: Path, prefix: str = "") -> int | None:
    """Return the step in a folder's name, or in the original name of one that was renamed with a prefix."""
    if not path.name.startswith(prefix):
        return None
    return step_of(path.name[len(prefix) :].partition(".")[0] if prefix else path.name)


def _is_complete(path: Path) -> bool:
    return (path / METADATA_NAME).exists()


def _clear_leftovers(path: Path) -> None:
    """Set aside a step's folder that has only files of an unfinished save; remove such files from a checkpoint."""
    if _step_of(path) is None or path.is_symlink() or not (path / _UNFINISHED).exists():
        return
    names = {each.name for each in path.iterdir()} - {_UNFINISHED}
    if all(map(commit.is_save_file, names)):
        _set_aside(path)
    elif METADATA_NAME in names:
        saver = Saver(path, None)
        try:
            with saver.exclusive() as alone:
                if alone:
                    commit.remove_leftovers(path)
                    (path / _UNFINISHED).unlink()
        finally:
            saver.leave()


def _set_aside(path: Path, prefix: str = _REMOVED) -> None:
    with contextlib.suppress(FileNotFoundError):  # another process has already renamed it
        path.rename(path.with_name(f"{prefix}{path.name}.{secrets.token_hex(8)}"))


def _set_aside_unless_used(path: Path, prefix: str = _REMOVED) -> bool:
    """Set a checkpoint aside unless it is being saved or loaded; return whether it is gone."""
    saver = Saver(path, None)
    try:
        with saver.exclusive() as alone, writer_lock(path, METADATA_NAME) as is_unread:
            if is_unread and (alone or not saver.reaches_all):
                _set_aside(path, prefix)
                return True
    except FileNotFoundError:  # another process has already renamed it
        return True
    finally:
        saver.leave()
    return False
