"""Checkpoints of one training, in a folder for each step: saved in the background, pruned, and restored.

A save copies the state, and a thread writes the copy. Ranks act together (:mod:`tensorferry.base.ranks`) through a
process group that only this module uses. The thread that saves and the caller's thread never use this group at the same
time, because each call first waits for the running save. Only the first rank changes the folder
(:mod:`tensorferry.checkpoint.folder`).

The mirror is an optional copy of the checkpoints in a bucket (:mod:`tensorferry.checkpoint.mirror`). Texts in this file
say "on the drive" of checkpoints in the folder, and "in the mirror" of those in the bucket.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils._pytree import tree_leaves

from tensorferry.base.caller_warnings import warn
from tensorferry.base.checks import absolute_path, integer
from tensorferry.base.ranks import Ranks, first_rank_error
from tensorferry.base.reprs import safe_repr
from tensorferry.checkpoint.errors import CheckpointError, MirrorError, RefusedCheckpointError
from tensorferry.checkpoint.folder import Folder
from tensorferry.checkpoint.staging import Stager
from tensorferry.checkpoint.storage import rank_values, safe_objects
from tensorferry.checkpoint.storage.contents import Contents
from tensorferry.checkpoint.storage.metadata import file_checksums
from tensorferry.checkpoint.storage.reader import FileSystemReader
from tensorferry.checkpoint.storage.writer import FileSystemWriter
from tensorferry.checkpoint.training import Parts, Restored

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Collection, Iterator

    from obstore.store import ObjectStore
    from torch.distributed.checkpoint.metadata import Metadata

    from tensorferry.checkpoint.mirror.mirror import Mirror
    from tensorferry.checkpoint.storage.savers import Saver

# While the first rank waits for the mirror, the other ranks wait in a collective, which has a timeout. So the first
# rank waits for at most this time before the ranks begin another collective.
_WAIT_SECONDS = 60.0

# The errno values of damaged or missing files, after which restore() tries an older checkpoint. It raises any other
# error (no permission, for example), which an older checkpoint would meet as well.
_DAMAGE = frozenset(
    [
        *(errno.EBADMSG, errno.EIO, errno.ENODATA, errno.EREMOTEIO, errno.ESTALE, errno.EUCLEAN),
        *(errno.EISDIR, errno.ELOOP, errno.ENOENT, errno.ENOTDIR),
    ]
)


class Checkpoints:
    """The checkpoints of one training, in one folder that all ranks share.

    Every rank creates an instance, and all ranks call :meth:`save` and :meth:`restore` together; without
    ``torch.distributed.init_process_group`` there is one rank. The end of a ``with`` block waits for the last save.

    Parameters
    ----------
    root : str or PathLike
        The folder; the first save creates it. The checkpoint of step 1000 is ``root/step_00001000``.
    keep_last : int, optional
        The number of steps, at least 1, whose checkpoints are kept; None keeps all. Each save removes older ones.
    keep_every : int, optional
        Checkpoints of steps that are multiples of this are kept permanently.
    keep_best : int, optional
        The number of checkpoints with the best ``metric`` that are kept beside those of ``keep_last``. The symbolic
        links ``root/best`` and ``root/last`` then always lead to complete checkpoints. The mirror has no best ones.
    best_is : str
        Whether the "lowest" or the "highest" metric is the best.
    mirror : str or (store, str), optional
        A bucket to which a separate process copies the checkpoints: an address, ``"s3://bucket/run"``, or an obstore
        store and a prefix. It needs the extra ``tensorferry[remote]``.
    mirror_keep_last : int, optional
        As ``keep_last``, for the bucket; ``keep_every`` applies to the bucket, too.
    mirror_bytes_per_second : int, optional
        The maximum upload rate.
    per_rank : collection of str
        The keys of a state whose values each rank keeps, such as a dataloader's position. :class:`RandomState` and
        ``torch.Generator`` are always kept for each rank.
    trust_pickle : bool
        As for :class:`FileSystemReader`.
    process_group : ProcessGroup, optional
        The ranks that save together, if not all: a group with a CPU backend (gloo) that is used for nothing else.

    Notes
    -----
    The drive needs space for one checkpoint more than are kept, and host memory for a copy of this rank's part of the
    state. The first save warns if the drive is too small. Independently of the limits, a checkpoint is kept while a
    symbolic link in ``root`` or in another checkpoint refers to it, and while a tensorferry reader loads it (on file
    systems that support locks on directories, which all local file systems do).
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        best_is: Literal["lowest", "highest"] = "lowest",
        mirror: str | tuple[ObjectStore, str] | None = None,
        mirror_keep_last: int | None = None,
        mirror_bytes_per_second: int | None = None,
        per_rank: Collection[str] = (),
        trust_pickle: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        limits = {
            "keep_last": keep_last,
            "keep_every": keep_every,
            "keep_best": keep_best,
            "mirror_keep_last": mirror_keep_last,
            "mirror_bytes_per_second": mirror_bytes_per_second,
        }
        for name, value in limits.items():
            if value is not None:
                integer(value, name, 1)
                if mirror is None and name.startswith("mirror"):
                    raise ValueError(f"{name}: only valid with a mirror (got {value})")
        if keep_every is not None and keep_last is None and mirror_keep_last is None:
            raise ValueError(
                f"keep_every: {keep_every} has no effect without keep_last or mirror_keep_last, which limit the kept "
                "checkpoints (remedy: pass one of them, or leave out keep_every)"
            )
        if keep_best is not None and keep_last is None:
            raise ValueError(f"keep_best: {keep_best} has no effect without keep_last")
        if best_is not in ("lowest", "highest"):
            raise ValueError(f"best_is: {best_is!r} is not one of 'lowest', 'highest'")
        self._keep_best, self._sign = keep_best, 1 if best_is == "lowest" else -1
        self._folder = Folder(
            Path(absolute_path(root, "root")), has_links=self._keep_best is not None
        )
        self._keep_last, self._keep_every = keep_last, keep_every
        self._trust_pickle = trust_pickle
        self._per_rank = frozenset(per_rank)
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
        # Whether wait() has raised that the last save is not in the mirror.
        self._has_raised_of_mirror = False
        # The steps of the checkpoints that the last restore() found to be damaged, on the drive and in the mirror.
        self._damaged: set[int] = set()
        self._damaged_in_mirror: set[int] = set()
        self._is_signalled = False
        self._signal_ranks: Ranks | None = None  # in a block of on_signal()
        self._last_step: int | None = None  # the step of the last save that has begun
        self._restored: int | None = None  # the step that the last restore() loaded
        # Steps after the one that restore(step=...) loaded; the first rank renames their checkpoints at the next save.
        self._abandoned: list[int] = []
        self._reset()

    def _reset(self) -> None:
        """Set the attributes of an object without a running save.

        Used by the constructor, and in a forked child, where the parent's threads do not exist.
        """
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._stager = Stager()
        self._own_group: tuple[Any, dist.ProcessGroup] | None = None
        self._running_saves: list[_RunningSave] = []  # at most one
        if self._mirror is not None:
            self._mirror.detach()
        weakref.finalize(self, _warn_of_failures, self._running_saves, self._mirror, self._process)

    @safe_repr
    def __repr__(self) -> str:
        given = f"keep_last={self._keep_last}, keep_every={self._keep_every}"
        given += "" if self._mirror is None else f", mirror={self._mirror}"
        saving = [each.step for each in tuple(self._running_saves) if not each.done.is_set()]
        state = f": saving step {saving[0]}" if saving else ""
        return f"<tensorferry.checkpoint.Checkpoints {str(self._folder.root)!r}, {given}{state}>"

    def path(self, step: int) -> Path:
        """Return the path of a step's checkpoint, whether it exists or not."""
        return self._folder.path(integer(step, "step"))

    def steps(self, *, mirrored: bool = False) -> list[int]:
        """Return the steps that have checkpoints on the drive, or in the mirror, in order; no checkpoint is opened."""
        return self._require_mirror().steps() if mirrored else self._folder.steps()

    def latest(self, *, mirrored: bool = False) -> int | None:
        """Return the last step of :meth:`steps`, or None if there is none."""
        return max(self.steps(mirrored=mirrored), default=None)

    def save(
        self,
        step: int,
        state: dict[str, Any],
        wait: bool = False,
        *,
        overwrite: bool = False,
        metric: float | None = None,
    ) -> None:
        """Save a state in the background: when this returns, the state has been copied and may change.

        If the previous save is still running, the call waits for its end before it copies the state. When the new
        checkpoint is complete, older ones are removed.

        Parameters
        ----------
        step : int
            The step, the same on all ranks.
        state : dict
            As for ``dcp.save``: models, optimizers, and other objects with ``state_dict`` and ``load_state_dict``;
            tensors, plain values and dicts of them; :class:`RandomState` and ``torch.Generator``.
        wait : bool
            Return only when the state has been saved; no copy is made in this case.
        overwrite : bool
            Whether a checkpoint of the same step may be replaced; it is kept until the new one is complete. After
            :meth:`restore`, checkpoints of steps after the restored one may always be replaced. After
            ``restore(step=...)`` the first save of a later step renames all checkpoints after the restored one to
            ``.tensorferry-abandoned.*``, as :meth:`restore` would prefer them. With ``keep_last`` the renamed
            checkpoints are removed when the new checkpoint is complete.
        metric : float, optional
            For ``keep_best``: the value by which checkpoints are compared; that of the first rank counts. A checkpoint
            without a metric, or whose metric is NaN, is not among the best.

        Raises
        ------
        ValueError
            There is a checkpoint of this step, or ranks pass different steps.
        BaseException
            The error of the previous save, in which case this save has not begun. With ``wait``, also the error of this
            save.
        """
        if isinstance(step, dict):
            raise TypeError(
                f"step: expected an integer, got {type(step).__name__} (the step comes first, then the state)"
            )
        integer(step, "step", 0)
        _check_state(state)
        if metric is not None:
            if self._keep_best is None:
                raise ValueError(f"metric: {metric!r} has no effect without keep_best")
            metric = float(metric)
        with self._exclusive_call():
            self._wait_for_save()
            self._warn_of_mirror()
            ranks, running = self._ranks(), _RunningSave(step)
            self._has_raised_of_mirror = False
            replace = overwrite or (self._restored is not None and step > self._restored)
            copies: dict[str, Any] = {}
            own: list[dict[str, rank_values.Description]] = []

            def prepare() -> int:
                if ranks.is_first:
                    running.saver = self._folder.begin(step, replace=replace)
                    self._abandon(step)
                    # An earlier save may have been killed before it set the links.
                    if self._last_step is None:
                        with running.collecting_problems():
                            self._set_links(self.steps())
                return step

            def copy() -> None:
                plain = self._parts(state, ranks).stored()
                if ranks.is_first and self._last_step is None:
                    self._warn_of_room(plain)
                if not self._trust_pickle:
                    safe_objects.warn_of_refusals(
                        dict(safe_objects.refusals_in(plain)), "restore()"
                    )
                if ranks.group is not None:
                    own.append(rank_values.describe(flatten_state_dict(plain)[0]))
                copies["state"] = plain if wait else self._stager.stage(plain)

            try:
                # state_dict() may be a collective operation: no rank may call it unless all ranks will.
                if len(steps := set(ranks.call(prepare))) > 1:
                    raise ValueError(f"step: ranks save different steps: {sorted(steps)}")
                ranks.call(copy)
                # Compare one number first: the descriptions are larger, and most trainings have equal ones.
                if own and len(set(ranks.call(lambda: rank_values.checksum(own[0])))) > 1:
                    rank_values.compare(ranks.call(lambda: own[0]))
            except BaseException:
                running.end()
                raise
            running.work = lambda: self._write(running, copies.pop("state"), ranks, replace, metric)
            self._running_saves.append(running)
            self._last_step = step
            if wait:
                running.run()
                self._wait_for_save()
            else:
                try:
                    running.start()
                except RuntimeError:  # the limit of threads is reached: save in this thread
                    running.run()

    def wait(self, *, mirrored: bool = False) -> None:
        """Wait for the running save, and raise its error if it fails.

        Parameters
        ----------
        mirrored : bool
            Wait also, on all ranks, until the last save is in the mirror; :class:`MirrorError` if it was not mirrored.
        """
        mirror = self._require_mirror() if mirrored else None
        with self._exclusive_call():
            self._wait_for_save()
            if mirror is not None:
                ranks = self._ranks()

                def is_mirrored() -> bool:
                    return not ranks.is_first or mirror.wait(_WAIT_SECONDS)

                try:
                    while not ranks.call(is_mirrored)[0]:
                        pass
                except MirrorError:
                    self._has_raised_of_mirror = True
                    raise
            self._warn_of_mirror()

    @overload
    def restore(
        self, state: dict[str, Any], *, step: int | None = None, strict: Literal[True] = True
    ) -> int | None: ...

    @overload
    def restore(
        self, state: dict[str, Any], *, step: int | None = None, strict: Literal[False]
    ) -> Restored: ...

    def restore(
        self, state: dict[str, Any], *, step: int | None = None, strict: bool = True
    ) -> int | Restored | None:
        """Load the newest intact checkpoint into a state, in place as ``dcp.load`` does.

        If a checkpoint is damaged, all ranks warn of the damage and load the checkpoint before it. With a mirror, the
        newest checkpoint of both places is loaded, from the drive if both have it.

        Parameters
        ----------
        state : dict
            As for :meth:`save`, with tensors of the saved sizes.
        step : int, optional
            Load the checkpoint of this step only.
        strict : bool
            Whether any difference between state and checkpoint is an error. Keys of the checkpoint that the state
            leaves out are no difference.

        Returns
        -------
        int or None, or Restored
            The loaded step, or None if the folder and the mirror have no checkpoint; ``state`` is then unchanged. With
            ``strict=False`` the step and the differences.

        Raises
        ------
        CheckpointError
            All checkpoints are damaged. Parts of ``state`` may have changed.
        FileNotFoundError
            There is no checkpoint of ``step``.
        MirrorError
            The contents of the mirror cannot be determined.
        BaseException
            The error of a running save, or an error other than damage: a ValueError that names all differences between
            state and checkpoint, raised before anything has been loaded, or an object that ``trust_pickle=False``
            refuses (:meth:`save` has warned of it).
        """
        if step is not None:
            integer(step, "step")
        _check_state(state)
        failed: dict[tuple[int, bool], BaseException] = {}
        with self._exclusive_call():
            self._wait_for_save()
            ranks = self._ranks()
            # Choose again after each failure: another process may have replaced checkpoints meanwhile.
            while (chosen := self._choose(ranks, step, failed)) is not None:
                parts = self._parts(state, ranks)
                try:
                    self._read(ranks, *chosen, parts, strict)
                except BaseException as error:
                    if not _is_damage(error) or (step is not None and self._mirror is None):
                        raise
                    failed[chosen] = error
                    what = f"the checkpoint of {self._describe(chosen)}"
                    warn(f"{what} is damaged and is skipped: {error}")
                else:
                    restored = chosen[0]
                    ranks.call(parts.set_loaded)
                    newer = ranks.call(self.steps)[0] if step is not None else []
                    self._abandoned = [each for each in newer if each > restored]
                    self._damaged = {each for each, is_local in failed if is_local}
                    self._damaged_in_mirror = {each for each, is_local in failed if not is_local}
                    self._restored = restored
                    if self._mirror is not None and step is not None:
                        self._mirror.go_back(step)
                    if strict:
                        return restored
                    found = map(tuple, (parts.missing, parts.unexpected, parts.changed))
                    return Restored(restored, *found)
        if not failed:
            return None if strict else Restored(None)
        what = "; ".join(f"{self._describe(each)}: {error}" for each, error in failed.items())
        raise CheckpointError(
            f"all checkpoints are damaged, and the state to be restored is undefined now ({what})",
            str(self._folder.root),
        ) from next(iter(failed.values()))

    @contextlib.contextmanager
    def on_signal(self, *signals: int) -> Iterator[None]:
        """Note signals in the block, such as ``signal.SIGTERM`` before a preemption, for :meth:`due`.

        All ranks enter the block together, in their main threads. At its end the previous handlers are set again.
        """
        group = None
        if (saving := self._ranks().group) is not None:
            # Not the group of saves, which a save in the background uses.
            members = dist.get_process_group_ranks(saving)
            group = dist.new_group(members, backend="gloo", use_local_synchronization=True)

        def note(_number: int, _frame: object) -> None:
            self._is_signalled = True

        previous = {}
        try:
            for number in signals:
                previous[number] = signal.signal(number, note)
            self._is_signalled, self._signal_ranks = False, Ranks(group)
            yield
        finally:
            self._signal_ranks = None
            for number, handler in previous.items():
                signal.signal(number, handler)
            if group is not None:
                dist.destroy_process_group(group)

    def due(self, step: int, state: dict[str, Any] | None = None) -> bool:
        """Return whether a rank has received a signal of :meth:`on_signal`, so that the training should end now.

        All ranks call this after each step, and get the same answer. If it is True and ``state`` is given, the state
        has been saved, unless :meth:`save` has already begun to save this step.
        """
        integer(step, "step", 0)
        if self._signal_ranks is None:
            raise ValueError("due() was called outside of a block of on_signal()")
        if not any(self._signal_ranks.call(lambda: self._is_signalled)):
            return False
        if self._last_step == step:
            self.wait()
        elif state is not None:
            self.save(step, state, wait=True)
        return True

    def close(self) -> None:
        """Wait as :meth:`wait` does, also for the mirror, and free the memory for copies. A later save allocates it.

        A failure of the mirror that :meth:`wait` has raised is not raised again.
        """
        self._close(mirrored=True)

    def _close(self, *, mirrored: bool) -> None:
        try:
            has_mirror = self._mirror is not None
            self.wait(mirrored=mirrored and has_mirror and not self._has_raised_of_mirror)
        finally:
            if self._mirror is not None:
                self._mirror.close()
                self._warn_of_mirror()
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
            self._close(mirrored=error is None)
        except Exception as failure:
            if error is None:
                raise
            warn(
                f"the with block raised an error, and a save failed, too: {type(failure).__name__}: {failure}"
            )

    @contextlib.contextmanager
    def _exclusive_call(self) -> Iterator[None]:
        """Let one call at a time run; raise in a call inside another one of the same thread, which would never end."""
        if os.getpid() != self._process:
            self._reset()
        if self._owner == threading.get_ident():
            raise RuntimeError(
                "called during another call in the same thread, and would wait for it forever (likely cause: a signal "
                "handler; remedy: `with checkpoints.on_signal(signal.SIGTERM):`, and in the training `if "
                "checkpoints.due(step, state): break`, which saves between two steps)"
            )
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None

    def _ranks(self) -> Ranks:
        """Return the ranks that act together, with a separate process group; all ranks create the group together."""
        world = _world()
        if self._given_group is not None or world is None:
            return Ranks(self._given_group)
        if self._own_group is None or self._own_group[0] is not world:
            self._own_group = world, dist.new_group(backend="gloo")
        return Ranks(self._own_group[1])

    def _warn_of_room(self, plain: dict[str, Any]) -> None:
        """Warn if the drive has no room for the checkpoints that will be kept and the one that is being saved."""
        tensors = [each for each in tree_leaves(plain) if isinstance(each, torch.Tensor)]
        nbytes = sum(each.numel() * each.element_size() for each in tensors)
        kept = (self._keep_last or 0) + (self._keep_best or 0)
        count = max(1, kept + 1 - len(self.steps()))
        if count * nbytes > (free := shutil.disk_usage(self._folder.root).free):
            warn(
                f"the drive of {str(self._folder.root)!r} has {free} free bytes, but {count} more checkpoints of "
                f"{nbytes} bytes need {count * nbytes}: keep_last={self._keep_last}, keep_best={self._keep_best}, and "
                "one that is being saved"
            )

    def _wait_for_save(self) -> None:
        """Wait for the running save and raise its error; after an interruption the next call waits again."""
        while self._running_saves:
            running = self._running_saves[0]
            if running.ident is not None:
                # Not join(): before Python 3.12, an interrupted join() marks the thread as ended.
                running.done.wait()
            running.end()
            self._running_saves.clear()
            for problem in running.problems:
                warn(f"step {running.step} has been saved, but a removal failed: {problem}")
            if running.error is not None:
                raise running.error

    def _require_mirror(self) -> Mirror:
        if self._mirror is None:
            raise ValueError("mirrored: the checkpoints have no mirror")
        return self._mirror

    def _warn_of_mirror(self) -> None:
        for problem in self._mirror.problems() if self._mirror is not None else ():
            warn(problem)

    def _abandon(self, step: int) -> None:
        """Set aside the checkpoints newer than the restored step, when the save of a later step begins."""
        if not self._abandoned or self._restored is None or step <= self._restored:
            return
        removable = [each for each in self._abandoned if each != step and each in self.steps()]
        self._abandoned = self._folder.abandon(removable)
        if self._abandoned:
            warn(
                f"steps {self._abandoned} are newer than step {self._restored}, which was restored, and restore() "
                "will prefer them: they are being loaded or saved, or links refer to them"
            )

    def _write(
        self,
        running: _RunningSave,
        state: dict[str, Any],
        ranks: Ranks,
        replaces: bool,
        metric: float | None,
    ) -> None:
        """Save, and remove superfluous checkpoints; an error in the removal does not fail the save."""
        step, folder = running.step, self._folder
        if ranks.is_first:
            running.problems += folder.remove()  # the save may need the space
        writer = FileSystemWriter(folder.path(step), overwrite=True)
        writer._warns_of_refusals = writer._compares_ranks = False  # save() has already done it
        writer._metric = metric
        with first_rank_error(_is_damage):
            metadata: Metadata = save(
                state,
                storage_writer=writer,
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
        self._damaged.discard(step)
        if ranks.is_first:
            if self._mirror is not None:
                damaged = sorted(self._damaged_in_mirror - {step})
                self._mirror.send(step, folder.path(step), replace=replaces, damaged=damaged)
            with running.collecting_problems():
                folder.end(step)
        if self._keep_last is None:
            return
        keep_last, gone = self._keep_last, list[Path]()

        def choose() -> bool:
            if ranks.is_first:
                with running.collecting_problems():
                    steps = folder.steps()
                    best = self._set_links(steps)
                    gone.extend(
                        folder.superfluous(
                            steps, step, keep_last, self._keep_every, self._damaged, best
                        )
                    )
            return bool(gone)

        # Nothing goes before the new checkpoint has been read back and compared with its checksums.
        if ranks.call(choose)[0]:
            try:
                ranks.call(lambda: _verify_share(folder.path(step), metadata, ranks))
            except BaseException as error:
                if _is_damage(error):
                    self._damaged.add(step)
                raise
            running.problems += folder.remove(gone) if ranks.is_first else []

    def _set_links(self, steps: list[int]) -> list[int]:
        """Let the links lead to the last and the best of the steps, if they are wanted; return the best ones."""
        if self._keep_best is None:
            return []
        sound = (step for step in steps if step not in self._damaged)
        best = self._folder.best(sound, self._sign)[: self._keep_best]
        self._folder.set_links(steps[-1:], best)
        return best

    def _choose(
        self, ranks: Ranks, step: int | None, failed: dict[tuple[int, bool], BaseException]
    ) -> tuple[int, bool] | None:
        """Return the step that all ranks load next, and whether it is on the drive; None if no checkpoint is left."""

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
            raise ValueError("step: ranks restore different steps")
        return answers[0][1]

    def _describe(self, chosen: tuple[int, bool]) -> str:
        return f"step {chosen[0]}{'' if chosen[1] else f' in {self._mirror}'}"

    def _parts(self, state: dict[str, Any], ranks: Ranks) -> Parts:
        size = 1 if ranks.group is None else dist.get_world_size(ranks.group)
        return Parts(state, self._per_rank, ranks.rank, size)

    def _read(self, ranks: Ranks, step: int, is_local: bool, parts: Parts, strict: bool) -> None:
        """Compare the state with the checkpoint, and load by torch's load().

        ranks.call() runs both, so that all ranks raise the error of any one. torch's load() alone would leave the
        other ranks waiting if an object of the state raises an error on one rank.
        """
        place = self.path(step) if is_local else self._require_mirror().place(step)
        reader = _Reader(place, trust_pickle=self._trust_pickle, process_group=ranks.group)

        def read_objects(objects: dict[str, Any]) -> None:
            alone = FileSystemReader(place, trust_pickle=self._trust_pickle, broadcast=False)
            load(objects, storage_reader=alone, no_dist=True)

        def compare() -> None:
            held.enter_context(reader.holding_folder())
            with first_rank_error(_is_damage):
                parts.compare(reader.read_metadata(), read_objects)
            if strict:
                parts.check()

        def read() -> None:
            with first_rank_error(_is_damage):
                load(
                    parts.loaded,
                    storage_reader=reader,
                    process_group=ranks.group,
                    no_dist=ranks.group is None,
                )

        # Hold the folder from before the metadata is read: the first rank may remove no checkpoint that others load.
        with contextlib.ExitStack() as held:
            ranks.call(compare)
            ranks.call(read)


class _Reader(FileSystemReader):
    """A reader that reads the metadata once."""

    _kept: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._kept is None:
            self._kept = super().read_metadata(*args, **kwargs)
        return self._kept


class _RunningSave(threading.Thread):
    """A save, as a thread. It is not a daemon: the interpreter waits for it at exit, even if no call has.

    ``save(wait=True)`` calls :meth:`run` in the caller's thread, and never starts this one.
    """

    def __init__(self, step: int) -> None:
        super().__init__(name=f"tensorferry-save-{step}")
        self.step = step
        self.work: Callable[[], None] = lambda: None
        self.saver: Saver | None = None  # on the first rank only
        self.error: BaseException | None = None
        self.problems: list[Exception] = []  # errors of removals, which do not fail the save
        self.done = threading.Event()

    def run(self) -> None:
        """Save."""
        try:
            self.work()
        except BaseException as error:
            self.error = error
        finally:
            self.work = lambda: None  # free the state
            self.end()
            self.done.set()

    @contextlib.contextmanager
    def collecting_problems(self) -> Iterator[None]:
        """Keep an error of the file system, which does not fail the save."""
        try:
            yield
        except OSError as error:
            self.problems.append(error)

    def end(self) -> None:
        """Release the locks that mark the save as alive."""
        if self.saver is not None:
            self.saver.leave()


def _verify_share(folder: Path, metadata: Metadata, ranks: Ranks) -> None:
    """Read this rank's share of a new checkpoint's files, and compare them with the checksums in the metadata."""
    contents = Contents(folder, metadata)
    size = 1 if ranks.group is None else dist.get_world_size(ranks.group)
    for name in sorted(file_checksums(metadata))[ranks.rank :: size]:
        contents.verify_file(name)


def _is_damage(error: BaseException) -> bool:
    """Return whether an error means that this checkpoint is damaged, so that an older one may still be loaded."""
    if isinstance(error, RefusedCheckpointError):
        return False
    return isinstance(error, CheckpointError) or (
        isinstance(error, OSError) and (error.errno is None or error.errno in _DAMAGE)
    )


def _world() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None


def _check_state(state: Any) -> None:
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise TypeError(f"state: must be a dict with str keys (got {type(state).__name__})")


def _warn_of_failures(
    running_saves: list[_RunningSave], mirror: Mirror | None, process: int
) -> None:
    """Warn of failures that no later call has raised, and let the program end with a code that is not 0."""
    if os.getpid() != process:
        return
    for running in running_saves:
        if running.error is not None:
            warn(
                f"the save of step {running.step} failed, and no call has raised its error: {running.error!r}"
            )
            if sys.stderr is not None and not isinstance(sys.stderr, _FailingStream):
                sys.stderr = _FailingStream(sys.stderr)
    if mirror is not None:
        mirror.close()
        for problem in mirror.problems():
            warn(problem)


class _FailingStream:
    """Standard error that the end of the interpreter cannot flush.

    Python ends with code 120 in this case, after all exit handlers have run (Py_FinalizeEx of its C API). There is no
    other way to change the code of a program that ends, except os._exit(), which leaves out what has yet to run.
    """

    closed = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        # This raises a ValueError if the caller is not Python code but the end of the interpreter.
        sys._getframe(1)
