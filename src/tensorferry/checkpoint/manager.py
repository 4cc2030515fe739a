"""Checkpoints: those of one training, a folder for each step: saved behind it, thinned out, restored from.

A save copies the state, and a thread saves the copy. Ranks act together (:mod:`tensorferry.base.ranks`), in a
process group of their own, which nobody else uses while a save is on its way in its thread: each call waits for that
first. What is done to the folder (:mod:`tensorferry.checkpoint.folder`) is done by the first rank alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful

from tensorferry.base.checks import integer, kept_path
from tensorferry.base.ranks import Ranks, plain_failures
from tensorferry.base.reprs import once_made
from tensorferry.base.warned import warn
from tensorferry.checkpoint.errors import CheckpointError, RefusedCheckpointError
from tensorferry.checkpoint.folder import Folder
from tensorferry.checkpoint.staging import Stager
from tensorferry.checkpoint.storage import plain_objects
from tensorferry.checkpoint.storage.reader import FileSystemReader
from tensorferry.checkpoint.storage.writer import FileSystemWriter

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterator

    from obstore.store import ObjectStore

    from tensorferry.checkpoint.mirror.mirror import Mirror
    from tensorferry.checkpoint.storage.savers import Saver

# Ranks wait for the first one so long at a time: process groups have timeouts.
_WAIT_SECONDS = 60.0

# What the system says of files that are damaged or gone. Its other refusals an older checkpoint would meet as well.
_DAMAGE = frozenset(
    [
        errno.EBADMSG,
        errno.EIO,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENODATA,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EREMOTEIO,
        errno.ESTALE,
        errno.EUCLEAN,
    ]
)


class Checkpoints:
    """The checkpoints of one training, in one folder that all ranks see.

    Every rank makes one, and calls :meth:`save` and :meth:`restore` as all others do; without
    ``torch.distributed.init_process_group`` there is one rank. As a context manager it waits at the end.

    Parameters
    ----------
    root : str or PathLike
        The folder; the first save makes it. The checkpoint of step 1000 is ``root/step_00001000``.
    keep_last : int, optional
        Of how many steps checkpoints stay, at least 1; None: of all. After each save those before the last ones go.
    keep_every : int, optional
        Checkpoints of steps that are multiples of this stay for good.
    mirror : str or (store, str), optional
        A bucket that checkpoints follow to, by a process beside the training: an address, ``"s3://bucket/run"``, or a
        store of obstore's and a prefix. It needs the extra ``tensorferry[remote]``.
    mirror_keep_last : int, optional
        As ``keep_last``, for those in the bucket; ``keep_every`` holds for these, too.
    mirror_bytes_per_second : int, optional
        How much each rank uploads at most.
    trust_pickle : bool
        As for :class:`FileSystemReader`.
    process_group : ProcessGroup, optional
        The ranks that save together, if these are not all: a group with a CPU backend (gloo) that nobody else uses.

    Notes
    -----
    The drive must hold one checkpoint more than are kept, and host memory a copy of this rank's part of the state.
    A checkpoint stays, whatever else is said, while a symbolic link in ``root`` or in another checkpoint leads to it,
    and while a tensorferry reader loads it (on file systems with locks of directories, as all local ones).
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        mirror: str | tuple[ObjectStore, str] | None = None,
        mirror_keep_last: int | None = None,
        mirror_bytes_per_second: int | None = None,
        trust_pickle: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        of_mirror = {
            "mirror_keep_last": mirror_keep_last,
            "mirror_bytes_per_second": mirror_bytes_per_second,
        }
        for name, value in {"keep_last": keep_last, "keep_every": keep_every, **of_mirror}.items():
            if value is not None:
                integer(value, name, 1)
                if mirror is None and name in of_mirror:
                    raise ValueError(f"{name}: {value}, but there is no mirror")
        if keep_every is not None and keep_last is None and mirror_keep_last is None:
            raise ValueError(f"keep_every: {keep_every}, but without keep_last all stay")
        self._folder = Folder(Path(kept_path(root, "root")))
        self._keep_last, self._keep_every = keep_last, keep_every
        self._trust_pickle = trust_pickle
        self._given_group = process_group
        self._mirror: Mirror | None = None
        if mirror is not None:
            from tensorferry.checkpoint.mirror.mirror import Mirror

            self._mirror = Mirror(
                mirror,
                keep_last=mirror_keep_last,
                keep_every=keep_every,
                rate=mirror_bytes_per_second,
            )
        self._damaged: set[int] = set()
        self._damaged_there: set[int] = set()  # in the mirror
        self._restored: int | None = None
        self._abandoned: list[int] = []  # known to the first rank
        self._begin()

    def _begin(self) -> None:
        """Have no save on its way: at first, and in a forked child, where none of its parent's threads are."""
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._stager = Stager()
        self._own_group: tuple[Any, dist.ProcessGroup] | None = None
        self._flights: list[_Flight] = []  # at most one
        if self._mirror is not None:
            self._mirror.forget()
        weakref.finalize(self, _tell_unasked, self._flights, self._mirror, self._process)

    @once_made
    def __repr__(self) -> str:
        given = f"keep_last={self._keep_last}, keep_every={self._keep_every}"
        given += "" if self._mirror is None else f", mirror={self._mirror}"
        saving = [each.step for each in tuple(self._flights) if not each.done.is_set()]
        state = f": saving step {saving[0]}" if saving else ""
        return f"<tensorferry.checkpoint.Checkpoints {str(self._folder.root)!r}, {given}{state}>"

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step is, or would be."""
        return self._folder.path(integer(step, "step"))

    def steps(self, *, mirrored: bool = False) -> list[int]:
        """Return the steps of which there are checkpoints on the drive, or in the mirror, in order; none is opened."""
        return self._needed_mirror().steps() if mirrored else self._folder.steps()

    def latest(self, *, mirrored: bool = False) -> int | None:
        """Return the last of :meth:`steps`, None if there is none."""
        return max(self.steps(mirrored=mirrored), default=None)

    def save(
        self, step: int, state: dict[str, Any], wait: bool = False, *, overwrite: bool = False
    ) -> None:
        """Save a state behind the training: when this returns it has been copied, and may change.

        One that is still on its way is waited for. When the new one is whole, older ones are removed.

        Parameters
        ----------
        step : int
            The step, the same on all ranks.
        state : dict
            As for ``dcp.save``; objects with ``state_dict`` and ``load_state_dict`` are asked for theirs.
        wait : bool
            Return when it has been saved; it takes no copy then.
        overwrite : bool
            Whether it may take the place of a checkpoint of the same step, which stays until the new one is whole.
            After :meth:`restore` it may for steps behind the restored one. After ``restore(step=...)`` the first save
            behind that step sets aside all newer ones, as ``.tensorferry-abandoned.*``: :meth:`restore` would prefer
            them. With ``keep_last`` they are removed when the new one is whole.

        Raises
        ------
        ValueError
            There is a checkpoint of this step, or ranks differ in it.
        BaseException
            What the save before has failed with: this one has not begun. With ``wait``, what this one failed with.
        """
        integer(step, "step", 0)
        _check_state(state)
        with self._turn():
            self._join()
            self._tell_of_mirror()
            ranks, flight = self._ranks(), _Flight(step)
            replace = overwrite or (self._restored is not None and step > self._restored)
            held: dict[str, Any] = {}

            def prepare() -> int:
                if ranks.is_first:
                    flight.saver = self._folder.begin(step, replace=replace)
                    self._abandon(step)
                return step

            def copy() -> None:
                plain = _plain(state)
                if not self._trust_pickle:
                    plain_objects.warn_of(dict(plain_objects.refused_in(plain)), "restore()")
                held["state"] = plain if wait else self._stager.stage(plain)

            try:
                # Ranks may do state_dict() together: none begins it where another is refused.
                if len(steps := set(ranks.call(prepare))) > 1:
                    raise ValueError(f"step: ranks save different ones: {sorted(steps)}")
                ranks.call(copy)
            except BaseException:
                flight.end()
                raise
            flight.work = lambda: self._write(flight, held.pop("state"), ranks, replace)
            self._flights.append(flight)
            if wait:
                flight.run()
                self._join()
            else:
                flight.start()

    def wait(self, *, mirrored: bool = False) -> None:
        """Wait for the save that is on its way, and raise what it failed with.

        Parameters
        ----------
        mirrored : bool
            Wait until the last save is in the mirror, too, all ranks together; :class:`MirrorError` says why it will
            not be.
        """
        if mirrored:
            self._needed_mirror()
        with self._turn():
            self._join()
            if mirrored:
                ranks = self._ranks()
                while not ranks.call(lambda: self._is_mirrored(ranks))[0]:
                    pass
            self._tell_of_mirror()

    def restore(self, state: dict[str, Any], *, step: int | None = None) -> int | None:
        """Load the newest sound checkpoint into a state, in place as ``dcp.load`` does.

        Of one that is damaged it warns, with what is damaged, and takes the one before, on all ranks. With a mirror it
        is the newest of both; the drive's where both have it.

        Parameters
        ----------
        state : dict
            As for :meth:`save`, with tensors of the shapes that were saved.
        step : int, optional
            Of which step, and no other.

        Returns
        -------
        int or None
            The step that has been loaded; None: there is no checkpoint, and nothing has changed.

        Raises
        ------
        CheckpointError
            None is sound. Parts of ``state`` may have changed.
        FileNotFoundError
            There is no checkpoint of ``step``.
        MirrorError
            What is in the mirror cannot be told.
        BaseException
            What a save on its way failed with; what is no damage: a tensor that the checkpoint does not have, or an
            object that ``trust_pickle=False`` refuses, of which :meth:`save` has warned.
        """
        if step is not None:
            integer(step, "step")
        _check_state(state)
        failed: dict[tuple[int, bool], BaseException] = {}
        with self._turn():
            self._join()
            ranks = self._ranks()
            # Each time anew: another process may have removed what could not be loaded, and saved a newer one.
            while (chosen := self._choose(ranks, step, failed)) is not None:
                plain: dict[str, Any] = {}
                ranks.call(lambda: plain.update(_plain(state)))  # noqa: B023
                try:
                    self._read(ranks, *chosen, plain)
                except BaseException as error:
                    if not _is_damage(error) or (step is not None and self._mirror is None):
                        raise
                    failed[chosen] = error
                    what = f"the checkpoint of {self._said(chosen)}"
                    warn(f"{what} is damaged, and not used: {error}")
                else:
                    ranks.call(lambda: _give(state, plain))  # noqa: B023
                    self._damaged = {each for each, is_local in failed if is_local}
                    self._damaged_there = {each for each, is_local in failed if not is_local}
                    self._restored = restored = chosen[0]
                    self._abandoned = [
                        each for each in self.steps() if step is not None and each > restored
                    ]
                    if self._mirror is not None and step is not None:
                        self._mirror.go_back(step)
                    return restored
        if not failed:
            return None
        what = "; ".join(f"{self._said(each)}: {error}" for each, error in failed.items())
        raise CheckpointError(
            f"none of its checkpoints is sound, and what was to be restored is undefined now ({what})",
            str(self._folder.root),
        ) from next(iter(failed.values()))

    def close(self) -> None:
        """Wait as :meth:`wait` does, for the mirror, too; and give back the memory for copies, until a later save."""
        self._close(mirrored=self._mirror is not None)

    def _close(self, *, mirrored: bool) -> None:
        try:
            self.wait(mirrored=mirrored)
        finally:
            if self._mirror is not None:
                self._mirror.close()
                self._tell_of_mirror()
            self._stager.close()
            own, self._own_group = self._own_group, None
            if own is not None and _world() is own[0]:
                dist.destroy_process_group(own[1])

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        try:
            self._close(mirrored=self._mirror is not None and error is None)
        except Exception as failure:
            if error is None:
                raise
            warn(f"besides, a save failed: {type(failure).__name__}: {failure}")

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One call at a time."""
        if os.getpid() != self._process:
            self._begin()
        if self._owner == threading.get_ident():
            raise RuntimeError("called within another call of this thread (by a signal handler?)")
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None

    def _ranks(self) -> Ranks:
        """Return the ranks that act together, with a group of their own, which all make at the same time."""
        world = _world()
        if self._given_group is not None or world is None:
            return Ranks(self._given_group)
        if self._own_group is None or self._own_group[0] is not world:
            self._own_group = world, dist.new_group(backend="gloo")
        return Ranks(self._own_group[1])

    def _join(self) -> None:
        """Wait for the save that is on its way; who is interrupted in it waits again the next time."""
        while self._flights:
            flight = self._flights[0]
            if flight.ident is not None:
                flight.done.wait()  # before Python 3.12, a join() that is interrupted takes the thread for ended
            flight.end()
            self._flights.clear()
            for problem in flight.problems:
                warn(f"step {flight.step} has been saved, but not all could be removed: {problem}")
            if flight.error is not None:
                raise flight.error

    def _needed_mirror(self) -> Mirror:
        if self._mirror is None:
            raise ValueError("mirrored: there is no mirror")
        return self._mirror

    def _is_mirrored(self, ranks: Ranks) -> bool:
        """Wait for a while, less than process groups do, and return whether the first rank need not wait longer."""
        mirror = self._needed_mirror()
        return mirror.wait(_WAIT_SECONDS) if ranks.is_first else mirror.check()

    def _tell_of_mirror(self) -> None:
        for problem in self._mirror.problems() if self._mirror is not None else ():
            warn(problem)

    def _abandon(self, step: int) -> None:
        """Set aside what is newer than the step that was restored, now that another one follows it."""
        if not self._abandoned or self._restored is None or step <= self._restored:
            return
        going = [each for each in self._abandoned if each != step and each in self.steps()]
        self._abandoned = self._folder.abandon(going)
        if self._abandoned:
            warn(
                f"steps {self._abandoned} are newer than step {self._restored}, which was restored, and restore() "
                "will prefer them: they are being loaded or saved to, or links lead to them"
            )

    def _write(self, flight: _Flight, state: dict[str, Any], ranks: Ranks, replaces: bool) -> None:
        """Save, and remove what has become superfluous: to fail in that is no failure of the save."""
        step, folder = flight.step, self._folder
        if ranks.is_first:
            flight.problems += folder.remove()  # the save may need the space
        writer = FileSystemWriter(folder.path(step), overwrite=True)
        writer._warns_of_refusals = False  # save() has, where it was called
        with plain_failures(_is_damage):
            save(
                state,
                storage_writer=writer,
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
        self._damaged.discard(step)
        if self._mirror is not None:
            damaged = sorted(self._damaged_there - {step})
            path = folder.path(step)
            self._mirror.send(ranks.rank, step, path, replace=replaces, damaged=damaged)
        if not ranks.is_first:
            return
        try:
            folder.end(step)
            if self._keep_last is not None:
                going = folder.superfluous(step, self._keep_last, self._keep_every, self._damaged)
                flight.problems += folder.remove(going)
        except OSError as error:
            flight.problems.append(error)

    def _choose(
        self, ranks: Ranks, step: int | None, failed: dict[tuple[int, bool], BaseException]
    ) -> tuple[int, bool] | None:
        """Return what all ranks are to load next: which step, and whether it is the drive's."""

        def choose() -> tuple[int | None, tuple[int, bool] | None]:
            if not ranks.is_first:
                return step, None
            there = {(each, True) for each in self.steps()}
            if self._mirror is not None and (step, True) not in there - failed.keys():
                there |= {(each, False) for each in self._mirror.steps()}
            if step is not None:
                there = {each for each in there if each[0] == step}
                if not there:
                    raise FileNotFoundError(errno.ENOENT, "no checkpoint", str(self.path(step)))
            return step, max(there - failed.keys(), default=None)

        answers = ranks.call(choose)
        if len({asked for asked, _ in answers}) > 1:
            raise ValueError("step: ranks ask for different ones")
        return answers[0][1]

    def _said(self, chosen: tuple[int, bool]) -> str:
        return f"step {chosen[0]}{'' if chosen[1] else f' in {self._mirror}'}"

    def _read(self, ranks: Ranks, step: int, is_local: bool, plain: dict[str, Any]) -> None:
        """Do as torch's load() does, which would leave ranks waiting for one whose object raises."""
        reader = FileSystemReader(
            self.path(step) if is_local else self._needed_mirror().place(step),
            trust_pickle=self._trust_pickle,
            process_group=ranks.group,
        )

        def read() -> None:
            with plain_failures(_is_damage):
                load(
                    plain,
                    storage_reader=reader,
                    process_group=ranks.group,
                    no_dist=ranks.group is None,
                )

        try:
            ranks.call(read)
        finally:
            reader._let_go()


def _give(state: dict[str, Any], plain: dict[str, Any]) -> None:
    """Give what has been loaded to the state, and to its objects."""
    for key in plain:
        if isinstance(state[key], Stateful):
            state[key].load_state_dict(plain[key])
        else:
            state[key] = plain[key]


class _Flight(threading.Thread):
    """A save on its way. It ends before the interpreter does, whether it is waited for or not."""

    def __init__(self, step: int) -> None:
        super().__init__(name=f"tensorferry-save-{step}")
        self.step = step
        self.work: Callable[[], None] = lambda: None
        self.saver: Saver | None = None  # of the first rank
        self.error: BaseException | None = None
        self.problems: list[Exception] = []
        self.done = threading.Event()

    def run(self) -> None:
        """Save."""
        try:
            self.work()
        except BaseException as error:
            self.error = error
        finally:
            self.work = lambda: None  # it holds the state
            self.end()
            self.done.set()

    def end(self) -> None:
        """Show others that it is no longer alive."""
        if self.saver is not None:
            self.saver.leave()


def _is_damage(error: BaseException) -> bool:
    if isinstance(error, RefusedCheckpointError):
        return False
    return isinstance(error, CheckpointError) or (
        isinstance(error, OSError) and (error.errno is None or error.errno in _DAMAGE)
    )


def _world() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None


def _check_state(state: Any) -> None:
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise TypeError(f"state: a dict with names is wanted, not a {type(state).__name__}")


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with what its objects give, asked on all ranks in the same order."""
    return {
        key: value.state_dict() if isinstance(value, Stateful) else value
        for key, value in sorted(state.items())
    }


def _tell_unasked(flights: list[_Flight], mirror: Mirror | None, process: int) -> None:
    """Tell of a failure that no call is left to raise."""
    if os.getpid() != process:
        return
    for flight in flights:
        if flight.error is not None:
            warn(f"the save of step {flight.step} failed, and nobody asked: {flight.error!r}")
    if mirror is not None:
        mirror.close()
        for problem in mirror.problems():
            warn(problem)
