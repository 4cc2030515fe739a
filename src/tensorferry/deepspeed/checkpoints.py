"""DeepSpeed's checkpoints, written and read by tensorferry: files in torch's own format with DeepSpeed's names.

DeepSpeed has two kinds of engine. In this file "DeepSpeed's engine" is the DeepSpeedEngine, which trains; its
checkpoint engine saves and loads single files, and is our :class:`TensorferryCheckpointEngine`. A tag is the name of a
checkpoint's folder, and `latest` is a file with the tag of the newest one.

``engine.save_checkpoint`` runs inside a :class:`_Save`. The ranks agree on the outcome of each of its steps through a
separate process group (:class:`tensorferry.base.ranks.Ranks`), so a step succeeds on all ranks or fails on all:

1. Every rank writes its files and makes them durable. A file with a new name gets its name immediately. A file that
   replaces an existing one is not yet renamed. Neither is the folder with the copies of this rank's tensors on NVMe
   (those of an optimizer that DeepSpeed has offloaded).
2. What is left is renamed, and the directories are made durable.
3. The first rank (with node-local storage, the first rank of each node) writes the list of the checkpoint's files
   (`LIST_NAME`) into the folder, and after that the tag into `latest`. Both files are replaced atomically.

If a rank cannot write its files, the first step fails on all ranks with its error. In a folder that is new, or that has
files but no list, a list that marks the checkpoint as unfinished is written before the first file changes.

A decoupled save (DeepSpeed's setting ``checkpoint.writer.decoupled``) copies the states
(:class:`tensorferry.checkpoint.Stager`), and a thread executes the steps. An error in that thread is logged
immediately, and raised by the next save or by ``engine.destroy()``.

Loading verifies the checksums in the files, and that the files match the list: after a crash during step 2 a folder has
files of two saves with the same tag. Checkpoints without a list, such as DeepSpeed's own, can be loaded, too.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import functools
import inspect
import json
import os
import platform
import secrets
import shutil
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed.runtime import checkpoint_engine as engines
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.checkpoint_engine import utils as engine_utils
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.utils import logger

import tensorferry
from tensorferry import _core
from tensorferry.base.ranks import Ranks
from tensorferry.checkpoint import Stager, load, verify
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.objects.save_load import write_uncommitted
from tensorferry.deepnvme.builders import set_attribute
from tensorferry.transfer.publication import make_directory, sync_directory, sync_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import ExitStack

    from tensorferry.checkpoint.staging import StagedState
    from tensorferry.transfer.replacement import Target

LIST_NAME = "tensorferry.json"
_VERSION = 1
_LATEST = "latest"
_OFFLOADED = "offloaded_tensors"
_UNFINISHED = "unfinished"
_SWAPPED_SUFFIX = ".tensor.swp"
# A file in zip format is identified by the checksum of its last _END_NBYTES bytes. They contain the zip directory,
# which has the checksums of all records, and a record of torch with a hash of these checksums.
_END_NBYTES = 64 << 10
_READ_NBYTES = 8 << 20
# The time limit of the process group for a rank that does not respond. If a rank is killed, gloo fails immediately.
_PATIENCE = datetime.timedelta(hours=1)
# Keys of "checkpoint": {"writer": ...} that only DeepSpeed's own writer uses, and their defaults.
_WITHOUT_EFFECT = {
    "io_buffer_size": 64 << 20,
    "io_buffer_double": True,
    "io_multiplier": 1,
    "data_parallel": None,
}

# Whether replace() is in effect: it sets this variable, and closing its stack resets the variable.
_installed = False

_Entries = dict[str, dict[str, int]]  # size and checksum of each file, by its name in the folder


def replace(stack: ExitStack) -> None:
    """Make DeepSpeed save and load checkpoints with tensorferry; closing the stack restores the originals."""
    set_attribute(stack, sys.modules[__name__], "_installed", True)
    set_attribute(stack, TorchCheckpointEngine, "save", _save_file)
    set_attribute(stack, TorchCheckpointEngine, "load", _load_file)
    create = _wrap_create(engine_utils.create_checkpoint_engine)
    for module in (engine_utils, engines, engine_module):
        set_attribute(stack, module, "create_checkpoint_engine", create)
    owner = engine_module.DeepSpeedEngine
    set_attribute(stack, owner, "save_checkpoint", _wrap_save(owner.save_checkpoint))
    set_attribute(stack, owner, "load_checkpoint", _wrap_load(owner.load_checkpoint))
    for name in ("_load_checkpoint", "_get_all_zero_checkpoints"):
        set_attribute(stack, owner, name, _wrap_read(getattr(owner, name)))
    copy_scripts = _wrap_copy_scripts(owner._copy_recovery_script)
    set_attribute(stack, owner, "_copy_recovery_script", copy_scripts)
    name = "get_fp32_state_dict_from_zero_checkpoint"
    set_attribute(stack, engine_module, name, _wrap_read_weights(getattr(engine_module, name)))


class TensorferryCheckpointEngine(TorchCheckpointEngine):  # type: ignore[misc]
    """The checkpoint engine with which DeepSpeed's engine saves and loads its files."""

    def __init__(self, config_params: Any = None) -> None:
        super().__init__(config_params)
        self.name = type(self).__name__
        writer = None if config_params is None else config_params.checkpoint_config["writer"]
        self._decoupled = bool(writer and writer["decoupled"])
        self._shows_statistics = bool(writer and writer["show_statistics"])
        self._stagers: list[Stager] = []
        self._group: tuple[Any, Any] | None = None
        self._count = 0
        self._save: _Save | None = None
        self._info: Any = None
        self._background_save: Future[None] | None = None
        if unused := [
            key for key, value in _WITHOUT_EFFECT.items() if writer and writer[key] != value
        ]:
            logger.warning(
                f"[{self.name}] {', '.join(unused)}: these settings of the checkpoint writer have no effect, because "
                "tensorferry writes the checkpoints"
            )

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create a directory and make its name durable."""
        if not exist_ok and Path(path).exists():
            raise FileExistsError(f"{path!r} exists")
        self.attempt(lambda: make_directory(Path(path)))

    def attempt(self, function: Callable[[], object]) -> None:
        """Call a function; within ``engine.save_checkpoint`` its error is raised on all ranks when the save ends."""
        if self._save is None:
            function()
        else:
            self._save.attempt(function)

    def create(self, info: Any) -> None:
        """Start to save the checkpoint that a :class:`CheckpointCommitInfo` describes."""
        super().create(info)
        if self._save is not None:
            self._save.begin(Path(info.save_dir), info.tag)
        else:
            self._info = info

    def save(self, state_dict: Any, path: str) -> None:
        """Save a file; within ``engine.save_checkpoint`` an error is raised on all ranks when the save ends."""
        if self._save is None:
            _save_file(self, state_dict, path)
        elif self._decoupled:
            self._save.attempt(lambda: self._stage(state_dict, path))
        else:
            self._save.attempt(lambda: self._save.write(state_dict, path))  # type: ignore[union-attr]

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load a file.

        Raises
        ------
        CheckpointError
            The file is damaged, or belongs to another save than the other files of the checkpoint.
        StorageError, OSError
            The file could not be read.
        """
        return _load_file(self, path, map_location)

    def commit(self, *_: Any) -> bool:
        """Complete a save that is not decoupled: the checkpoint is then the newest one."""
        self._info = None
        if self._save is not None:
            self._save.end()
        return True

    def is_decoupled(self) -> bool:
        """Return whether saves are written in the background while the training continues."""
        return self._decoupled

    def get_commit_info(self) -> Any:
        """Return the description of a save that DeepSpeed has to commit, or None if there is none.

        While tensorferry is installed there is none, because a decoupled save commits itself in the background.
        """
        return None if _installed else self._info

    def cleanup(self) -> None:
        """Wait for a decoupled save, and raise its error if it failed."""
        if self._background_save is not None:
            failure = self._background_save.exception()
            self._background_save = None
            if failure is not None:
                raise failure

    @contextlib.contextmanager
    def saving(self, engine: Any, *, save_latest: bool) -> Iterator[None]:
        """Make one checkpoint of the files that DeepSpeed's engine saves in the block."""
        self.cleanup()  # raises the same error on all ranks, if an earlier save failed
        self._count += 1
        ranks = Ranks(self.own_group())
        self._save = save = _Save(
            engine, ranks, self._count, save_latest, self.zipfile_serialization
        )
        try:
            with save.copying():
                yield
            if self._decoupled:
                save.attempt(save.copy_offloaded)
                self._background_save = Future()
                work = functools.partial(self._write_in_background, save, self._background_save)
                try:
                    threading.Thread(target=work, name="tensorferry-checkpoint").start()
                except RuntimeError:  # the process cannot start another thread (RLIMIT_NPROC)
                    work()
        except BaseException:
            save.abort()
            raise
        finally:
            self._save = None
        if not self._decoupled:
            self._show_statistics(save)

    def own_group(self) -> Any:
        """Return a process group of all ranks, which only this object uses, or None if there is only one rank."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        if self._group is None or self._group[0] is not dist.group.WORLD:
            self._group = dist.group.WORLD, dist.new_group(backend="gloo", timeout=_PATIENCE)
        return self._group[1]

    def _stage(self, state: Any, path: str) -> None:
        assert self._save is not None
        staged = self._save.staged
        if len(staged) == len(self._stagers):
            self._stagers.append(Stager())
        staged.append((self._stagers[len(staged)].stage(state), path))

    def _write_in_background(self, save: _Save, ended: Future[None]) -> None:
        try:
            while save.staged:
                state, path = save.staged.pop(0)
                try:
                    save.attempt(functools.partial(save.write, dict(state), path))
                finally:
                    state.release()
            save.end()
        except BaseException as error:
            try:
                save.abort()
            finally:  # otherwise cleanup() would wait forever
                folder = str(save.folder)
                logger.error(f"[{self.name}] the checkpoint {folder!r} was not saved: {error}")
                ended.set_exception(error)
        else:
            self._show_statistics(save)
            ended.set_result(None)

    def _show_statistics(self, save: _Save) -> None:
        if self._shows_statistics:
            with contextlib.suppress(OSError, ValueError):  # a closed stdout must not fail the save
                print(f"[{self.name}] {save.statistics()}", flush=True)


class _Save:
    """One save of a checkpoint, on this rank. Its steps are those in the module's description."""

    def __init__(
        self, engine: Any, ranks: Ranks, number: int, save_latest: bool, as_archive: bool
    ) -> None:
        self.folder = self._latest = Path()
        self._tag = ""
        self.staged: list[tuple[StagedState, str]] = []
        self._engine = engine
        self._ranks = ranks
        self._number = number
        self._save_latest = save_latest
        self._as_archive = as_archive
        self._is_local = bool(engine.use_node_local_storage())
        self._is_first = _rank_of(engine) == 0
        self._rank_folder = _rank_folder(engine)
        # DeepSpeed does not support mixture of experts with an optimizer on NVMe, and raises an error for it.
        self._offloads = engine.zero_nvme_offload_optimizer() and not engine.has_moe_layers
        self._copy_folder: Path | None = None
        self._names: list[str] = []  # all files of this rank, relative to the folder
        self._new: list[Path] = []  # files that did not exist before; abort() removes them
        self._waiting: list[Target] = []  # files that will replace existing ones, not yet renamed
        self._failure: BaseException | None = None
        self._begin = time.monotonic()
        self._nbytes = 0

    def begin(self, directory: Path, tag: str) -> None:
        """Start to save into a folder, which may have files of an earlier save."""
        self._latest, self._tag = directory / _LATEST, tag
        self.folder = directory / tag
        self.attempt(self._begin_folder)

    def attempt(self, function: Callable[[], object]) -> None:
        """Call a function and record its error, which all ranks raise in the next collective step.

        After an error, do nothing: the save has failed, and only the first error is raised.
        """
        if self._failure is None:
            try:
                function()
            except Exception as error:
                # The variables of the frames would keep the state in memory.
                traceback.clear_frames(error.__traceback__)
                self._failure = error

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Prevent DeepSpeed's engine from copying tensors on NVMe during the block; copy_offloaded() copies them."""
        name = "zero_nvme_offload_optimizer"
        if self._offloads:
            vars(self._engine)[name] = lambda: False
        try:
            yield
        finally:
            vars(self._engine).pop(name, None)

    def copy_offloaded(self) -> None:
        """Copy this rank's tensors on NVMe into a temporary folder, which is renamed in the second step."""
        if not self._offloads or self._copy_folder is not None:
            return
        place = self.folder / self._rank_folder
        for path in place.parent.glob(f"{place.name}.*"):  # left by saves that were killed
            shutil.rmtree(path)
        self._copy_folder = place.with_name(f"{place.name}.{secrets.token_hex(8)}")
        optimizer = self._engine.optimizer
        # The folder on NVMe may still have files of tensors of earlier engines; these are not copied.
        own = {getattr(param, "ds_id", None) for param in optimizer.fp32_partitioned_groups_flat}
        shutil.copytree(
            optimizer.optimizer_swapper.swap_folder,
            self._copy_folder,
            ignore=lambda _, names: [name for name in names if _id_of(name) not in own],
        )

    def write(self, state: Any, path: str) -> None:
        """Write a file of this rank. If the file replaces an existing one, it is renamed only in the second step."""
        is_new = not os.path.lexists(path)
        new = write_uncommitted(state, path, sync=True, as_archive=self._as_archive)
        self._names.append(os.path.relpath(path, self.folder))
        if is_new:
            self._new.append(Path(path))
            new.commit(sync_names=False)
        else:
            self._waiting.append(new)

    def end(self) -> None:
        """Complete the save on all ranks: the checkpoint is then the newest one."""
        found = self._ranks.call(self._finish)
        numbers = sorted({number for number, _ in found})
        if len(numbers) > 1:
            raise RuntimeError(
                f"the ranks have made different numbers of saves ({numbers}): an earlier save failed on one rank, and "
                "that rank continued to train"
            )
        if any(replaces for _, replaces in found):
            self._ranks.call(self._mark_replaced)
        entries: _Entries = {}
        for node, tag, own in self._ranks.call(self._rename_files):
            # DeepSpeed allows a different tag on each rank.
            if tag == self._tag and (not self._is_local or node == platform.node()):
                entries |= own
        self._new.clear()
        self._ranks.call(lambda: self._publish(entries))

    def abort(self) -> None:
        """Discard the files that are not yet part of a checkpoint."""
        while self.staged:
            self.staged.pop()[0].release()
        while self._waiting:
            self._waiting.pop().abort()
        # Remove the new files, because they would occupy the space that the next save needs.
        for path in self._new:
            path.unlink(missing_ok=True)
        if self._copy_folder is not None:
            shutil.rmtree(self._copy_folder, ignore_errors=True)

    def statistics(self) -> str:
        """Return a text with the amount of data, the time and the throughput."""
        seconds = time.monotonic() - self._begin
        return f"{self._nbytes / 1e9:.3f} GB in {seconds:.3f} s: {self._nbytes / 1e9 / seconds:.3f} GB/s"

    def _begin_folder(self) -> None:
        make_directory(self.folder.parent)
        if self._is_first and not (self.folder.exists() and any(self.folder.iterdir())):
            make_directory(self.folder)
            self._mark_unfinished()

    def _mark_unfinished(self) -> None:
        self._write_list({_UNFINISHED: True})

    def _write_list(self, content: dict[str, Any]) -> None:
        text = json.dumps({"version": _VERSION, **content}, indent=1)
        _write_text(self.folder / LIST_NAME, text)

    def _mark_replaced(self) -> None:
        # Without a list, a load after a crash could not tell files of this save from those of an earlier save with the
        # same tag. The list that is written here marks the checkpoint as unfinished, so it is refused.
        if self._is_first and not (self.folder / LIST_NAME).exists():
            self._mark_unfinished()

    def _finish(self) -> tuple[int, bool]:
        """Make all files of this rank durable; return the number of the save and whether it replaces any files."""
        self.attempt(self.copy_offloaded)
        if self._failure is not None:
            raise self._failure
        if self._copy_folder is not None:
            for path in (*self._copy_folder.rglob("*"), self._copy_folder):
                sync_file(path) if path.is_file() else sync_directory(path)
        place = self.folder / self._rank_folder
        return self._number, bool(self._waiting) or (self._offloads and place.exists())

    def _rename_files(self) -> tuple[str, str, _Entries]:
        while self._waiting:
            self._waiting.pop(0).commit(sync_names=False)
        if self._copy_folder is not None:
            place = self.folder / self._rank_folder
            if place.exists():
                shutil.rmtree(place)
            self._copy_folder.rename(place)
            self._copy_folder = None
            sync_directory(place.parent)
            copies = [path for path in place.rglob("*") if path.is_file()]
            self._names += [os.path.relpath(path, self.folder) for path in copies]
        for folder in {(self.folder / name).parent for name in self._names} | {self.folder}:
            sync_directory(folder)
        entries = {name: _describe(self.folder / name) for name in self._names}
        self._nbytes = sum(entry["nbytes"] for entry in entries.values())
        return platform.node(), self._tag, entries

    def _publish(self, entries: _Entries) -> None:
        if self._is_first:
            self._write_list({"files": entries})
            if self._save_latest:
                _write_text(self._latest, self._tag)


def _save_file(engine: Any, state_dict: Any, path: str) -> None:
    write_uncommitted(state_dict, path, sync=True, as_archive=engine.zipfile_serialization).commit()


def _load_file(_: Any, path: str, map_location: Any = None) -> Any:
    place = Path(path)
    entry = _files_in_list(place.parent).get(place.name)
    if entry is not None:
        _compare(place, entry)
    return load(path, weights_only=False, map_location=map_location)


def _wrap_create(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_checkpoint_engine(config_params: Any, *arguments: Any, **options: Any) -> Any:
        writer = None if config_params is None else config_params.checkpoint_config["writer"]
        if writer is None:
            made = create(config_params, *arguments, **options)
            if type(made) is not TorchCheckpointEngine:  # one that the configuration selects
                return made
        elif writer["type"] == "MOCK":
            return create(config_params, *arguments, **options)
        return TensorferryCheckpointEngine(config_params)

    return create_checkpoint_engine


def _own_engine(engine: Any) -> TensorferryCheckpointEngine | None:
    """Return the checkpoint engine of DeepSpeed's engine if it is ours, otherwise None.

    An engine that was created before install() still has DeepSpeed's default checkpoint engine: ours takes its place.
    """
    if type(engine.checkpoint_engine) is TorchCheckpointEngine:
        engine.checkpoint_engine = TensorferryCheckpointEngine(engine._config)
    ours = engine.checkpoint_engine
    return ours if isinstance(ours, TensorferryCheckpointEngine) else None


def _wrap_save(save_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(save_checkpoint)

    @functools.wraps(save_checkpoint)
    def save(self: Any, *arguments: Any, **options: Any) -> Any:
        ours = _own_engine(self)
        given = signature.bind(self, *arguments, **options)
        given.apply_defaults()
        if ours is None or not given.arguments["save_dir"]:
            return save_checkpoint(*given.args, **given.kwargs)
        # Make the path absolute: the process may change its directory before a background thread writes the files.
        given.arguments["save_dir"] = os.path.abspath(given.arguments["save_dir"])  # noqa: PTH100
        with ours.saving(self, save_latest=bool(given.arguments["save_latest"])):
            # DeepSpeed would truncate and rewrite `latest` when rank 0 has saved its files, but other ranks have not.
            given.arguments["save_latest"] = False
            return save_checkpoint(*given.args, **given.kwargs)

    return save


def _wrap_load(load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(load_checkpoint)

    @functools.wraps(load_checkpoint)
    def load_complete(self: Any, *arguments: Any, **options: Any) -> Any:
        given = signature.bind(self, *arguments, **options)
        given.apply_defaults()
        wanted = given.arguments
        ours = _own_engine(self)
        if ours is not None:
            ours.cleanup()
        if self.load_universal_checkpoint():
            return load_checkpoint(*given.args, **given.kwargs)
        directory = Path(wanted["load_dir"])
        with_optimizer = bool(wanted["load_optimizer_states"] and not wanted["load_module_only"])

        def checked_tag() -> str | None:
            tag = _latest_tag(directory) if wanted["tag"] is None else str(wanted["tag"])
            if tag is not None:
                _check_complete(self, directory / tag, with_optimizer)
            return tag

        # If a rank raised alone, the others would load the checkpoint that it refuses.
        ranks = Ranks(None if ours is None else ours.own_group())
        tag = wanted["tag"] = ranks.call(checked_tag)[ranks.rank]
        if tag is None:  # DeepSpeed warns that `latest` is missing
            return load_checkpoint(*given.args, **given.kwargs)
        token = _tag.set(tag)
        try:
            loaded = load_checkpoint(*given.args, **given.kwargs)
        finally:
            _tag.reset(token)
        if with_optimizer and loaded[0] is not None and self.zero_nvme_offload_optimizer():
            _restore_optimizer(self, directory, tag)
        return loaded

    return load_complete


def _wrap_read(read: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``read``, a method of DeepSpeed's engine that reads files: an error of one rank is raised on all ranks.

    DeepSpeed's ranks communicate after the method has returned. If one rank alone raised, the others would wait for it.
    """

    @functools.wraps(read)
    def read_alike(self: Any, *arguments: Any, **options: Any) -> Any:
        found: list[Any] = []
        ours = _own_engine(self)
        # With this setting DeepSpeed's ranks read one after the other: a rank that waited here for all ranks to agree
        # would wait forever, because the next rank begins only when this one has ended.
        takes_turns = self._config.zero_config.pipeline_loading_checkpoint
        ranks = Ranks(None if ours is None or takes_turns else ours.own_group())
        ranks.call(lambda: found.append(read(self, *arguments, **options)))
        return found[0]

    return read_alike


def _latest_tag(directory: Path) -> str | None:
    latest = directory / _LATEST
    if not latest.is_file():
        return None
    tag = latest.read_text().strip()
    if not tag or not (directory / tag).is_dir():
        raise CheckpointError(
            f"it names the checkpoint {tag!r}, which does not exist (remedy: pass tag=)",
            str(latest),
        )
    return tag


def _check_complete(engine: Any, folder: Path, with_optimizer: bool) -> None:
    """Check that the files to load exist, and verify this rank's copies of tensors on NVMe.

    DeepSpeed copies these tensors back without a check. Only the first rank looks for missing files.
    """
    is_first, own_folder = _rank_of(engine) == 0, f"{_rank_folder(engine)}/"
    for name, entry in _files_in_list(folder).items():
        if not with_optimizer and not name.endswith("model_states.pt"):
            continue
        path = folder / name
        if is_first and not path.exists():  # all ranks raise its error
            raise CheckpointError("the file is missing: the checkpoint is incomplete", str(path))
        if name.startswith(own_folder) and engine.zero_nvme_offload_optimizer():
            _compare(path, entry)


def _rank_of(engine: Any) -> int:
    """Return this rank's number among the ranks that share a folder."""
    return int(engine.local_rank if engine.use_node_local_storage() else engine.global_rank)


def _rank_folder(engine: Any) -> str:
    """Return the subfolder into which DeepSpeed copies this rank's tensors on NVMe."""
    return f"{_OFFLOADED}/rank{_rank_of(engine):02d}"


def _restore_optimizer(engine: Any, directory: Path, tag: str) -> None:
    """Load the optimizer state that DeepSpeed saves but does not load when the optimizer is on NVMe.

    DeepSpeed copies the tensor files back to NVMe. Of these files it uses only those of the parameters, and only if
    their names are the same as in the process that saved them. The other states, such as the moments of Adam, are not
    restored: a new optimizer would start with zeros, and an optimizer that has already made steps would keep its
    present states. DeepSpeed also does not load the part of the state that is in memory: the number of steps, the
    values of the parameter groups, the loss scales, and the complete state of parameters that are too small to be on
    NVMe.
    """
    folder = directory / tag
    saved_ranks, own_ranks = engine.loaded_checkpoint_dp_world_size, engine.seq_dp_world_size
    if saved_ranks != own_ranks:
        raise CheckpointError(
            f"saved by {saved_ranks} ranks, but loaded by {own_ranks}: the numbers must be equal, because each rank "
            "has its own tensors on NVMe",
            str(folder),
        )
    optimizer = engine.optimizer
    states = engine._get_all_zero_checkpoints(str(directory), tag)
    saved = states[dist.get_rank(group=optimizer.dp_process_group)]
    for name in ("loss_scaler", "dynamic_loss_scale", "overflow"):
        setattr(optimizer, name, saved[name])
    # Partition all parameters. checkpoint_event_epilogue() below gathers the persistent parameters again, from the
    # loaded partitions.
    optimizer.checkpoint_event_prologue()
    own, given = optimizer.optimizer, saved["optimizer_state_dict"]
    saved_states: dict[Any, dict[str, Any]] = {}
    optimizer._set_fp32_optimizer_param_groups()
    for group, values in zip(own.param_groups, given["param_groups"], strict=True):
        for param, key in zip(group["params"], values["params"], strict=True):
            saved_states[param] = given["state"].get(key, {})
        group.update({name: value for name, value in values.items() if name != "params"})
    optimizer._clear_fp32_optimizer_param_groups()
    swapped = _SwapFiles(optimizer, folder / _rank_folder(engine))
    # Clear all states now: _prepare_sub_group() below may already prefetch the state of the next group.
    for param in optimizer.fp32_partitioned_groups_flat:
        own.state[param].clear()
    optimizer.optimizer_swapper.purge_state()
    params = zip(optimizer.fp32_partitioned_groups_flat, saved["fp32_flat_groups"], strict=True)
    for number, (param, value) in enumerate(params):
        if number in swapped.ids:
            optimizer._prepare_sub_group(number, set())
            swapped.read(number, "", param.data)
        else:
            param.data.copy_(value.data)
        on_nvme = []
        for name, state in saved_states.get(param, {}).items():
            # For a tensor on NVMe the saved state is the content of a swap buffer, not of the tensor. Read its file.
            if isinstance(state, torch.Tensor) and swapped.has(number, name):
                state = swapped.read(number, name, torch.empty_like(param.data))
                on_nvme.append(state)
            own.state[param][name] = state
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
        if number in swapped.ids:
            optimizer._release_sub_group(number, set())
        for state in on_nvme:
            state.data = state.data.new_empty(0)
    optimizer.checkpoint_event_epilogue()


def _id_of(name: str) -> str:
    """Return the id in the name of a swap file (the file of one tensor on NVMe).

    It is the id of a parameter, except in the names of gradients, whose ids are those of no parameter.
    """
    return name.removesuffix(_SWAPPED_SUFFIX).rpartition("-")[2]


class _SwapFiles:
    """The saved files of a rank's tensors on NVMe, found although their names differ in each process.

    A group is a part of the parameters (DeepSpeed's sub-group) that is one flat tensor. A file's name contains the id
    of its group's flat tensor, and DeepSpeed assigns these ids anew in each process.

    Attributes
    ----------
    ids : dict of int to str
        For each group of this engine that is on NVMe, by the group's position: the id in the names of its saved files.

    Raises
    ------
    CheckpointError
        The files do not belong to an engine with the same groups.
    """

    def __init__(self, optimizer: Any, folder: Path) -> None:
        self._folder = folder
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
        there = [name.removesuffix(_SWAPPED_SUFFIX) for name in names if "-" not in name]
        there.sort(key=lambda name: int(name.partition("_")[0]))
        flat = optimizer.fp32_partitioned_groups_flat
        numbers = [k for k in range(len(flat)) if optimizer._swappable_optimizer_subgroup(k)]
        own = [flat[number].ds_id for number in numbers]
        swaps = Path(optimizer.optimizer_swapper.swap_folder)
        if set(own) <= set(there):
            there = own
        sizes = [(swaps / (name + _SWAPPED_SUFFIX)).stat().st_size for name in own]
        if sizes != [(folder / (name + _SWAPPED_SUFFIX)).stat().st_size for name in there]:
            raise CheckpointError(
                "the saved tensors on NVMe have other sizes, or another number, than those of this engine (likely "
                "cause: another model or another partitioning)",
                str(folder),
            )
        self.ids = dict(zip(numbers, there, strict=True))
        # Remove the files with ids of another process, which DeepSpeed has copied to NVMe, too, but will never use.
        for name in names:
            if _id_of(name) not in own:
                (swaps / name).unlink(missing_ok=True)

    def has(self, number: int, name: str) -> bool:
        """Return whether there is a file for a state of a group."""
        return number in self.ids and self._path(number, name).exists()

    def read(self, number: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Read a state of a group into a tensor; an empty name reads the group's parameters."""
        return tensorferry.read(self._path(number, name), tensor)

    def _path(self, number: int, name: str) -> Path:
        return self._folder / f"{name and name + '-'}{self.ids[number]}{_SWAPPED_SUFFIX}"


def _wrap_copy_scripts(copy: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    """Return a function that writes DeepSpeed's recovery script atomically, which ``copy`` would write in place."""

    @functools.wraps(copy)
    def copy_recovery_script(self: Any, save_path: str) -> None:
        def copy_whole() -> None:
            with tempfile.TemporaryDirectory() as scratch:
                copy(self, scratch)
                for source in Path(scratch).iterdir():
                    target = Path(save_path) / source.name
                    text = source.read_text()
                    if not target.exists() or target.read_text() != text:
                        _write_text(target, text)
                    shutil.copymode(source, target)

        ours = self.checkpoint_engine
        if isinstance(ours, TensorferryCheckpointEngine):
            ours.attempt(copy_whole)
        else:
            copy_whole()

    return copy_recovery_script


# The tag of the checkpoint that the current thread is loading.
_tag: contextvars.ContextVar[str | None] = contextvars.ContextVar("_tag", default=None)


def _wrap_read_weights(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def get_weights(checkpoint_dir: Any, tag: Any = None, *arguments: Any, **options: Any) -> Any:
        """Read the weights from the files of the optimizer states, after verifying these files.

        Without a tag DeepSpeed would read the newest checkpoint; this function reads the checkpoint that is being
        loaded.
        """
        tag = _tag.get() if tag is None else tag
        if tag is not None:
            folder = Path(checkpoint_dir) / tag
            for name, entry in _files_in_list(folder).items():
                if name.endswith("optim_states.pt"):
                    _compare(folder / name, entry)
                    for problem in verify(folder / name).problems:
                        raise problem
        return read(checkpoint_dir, tag, *arguments, **options)

    return get_weights


def _files_in_list(folder: Path) -> _Entries:
    """Return the files of a checkpoint from its list; an empty dict if the list is missing."""
    path = folder / LIST_NAME
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        version = content["version"]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"it is damaged ({error})", str(path)) from None
    if version != _VERSION:
        reason = f"it was written by a newer tensorferry (version {version!r})"
        raise CheckpointError(reason, str(path))
    if content.get(_UNFINISHED):
        raise CheckpointError("the save of this checkpoint was not completed", str(folder))
    return dict(content.get("files", {}))


def _describe(path: Path) -> dict[str, int]:
    """Return a file's size and a checksum: of its end if it is an archive, else of the whole file."""
    with path.open("rb", buffering=0) as file:
        nbytes = os.fstat(file.fileno()).st_size
        is_archive = file.read(4) == b"PK\3\4"
        file.seek(max(nbytes - _END_NBYTES, 0) if is_archive else 0)
        crc = 0
        while data := file.read(_READ_NBYTES):
            crc = _core.crc32(data, crc)
    return {"nbytes": nbytes, "end_crc32" if is_archive else "crc32": crc}


def _compare(path: Path, entry: dict[str, int]) -> None:
    found = _describe(path)
    if found != entry:
        what = f"it has {found['nbytes']} bytes, but {entry['nbytes']} were saved"
        if found["nbytes"] == entry["nbytes"]:
            what = "its bytes differ from those that were saved"
        raise CheckpointError(
            f"{what}: it is damaged, or belongs to another save (remedy, if it was changed on purpose: remove "
            f"{str(path.parent / LIST_NAME)!r})",
            str(path),
        )


def _write_text(path: Path, text: str) -> None:
    tensorferry.write(path, text.encode(), atomic=True, sync=True)
