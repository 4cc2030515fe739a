"""DeepSpeed's checkpoints: files of torch's own format, written and read by us, with DeepSpeed's names.

``engine.save_checkpoint`` is put into a :class:`_Save`. Its steps end on all ranks alike, for they agree on each by a
process group of their own (:class:`tensorferry.base.ranks.Ranks`):

1. Every rank has its files on the drive. A file whose name was free has it then; one that takes another's place waits,
   and so do copies of tensors on NVMe.
2. Those that wait take their places, and the directories are on the drive.
3. The first rank, with node-local storage that of each node, writes which files belong to the checkpoint (`LIST_NAME`)
   into its folder, and only then its tag into `latest`. Both are replaced atomically.

A rank that cannot write its files says so in the first step, and all raise its failure. A folder that is new, or has
files and no list, has a list before its first file changes that says the checkpoint is unfinished.

A decoupled save copies the states (:class:`tensorferry.checkpoint.Stager`), and a thread takes the steps. What fails
there is logged at once, and raised by the next save or by ``engine.destroy()``.

Loading verifies the checksums in the files, and that they are those of the list: after a crash in the middle of step 2
a folder has files of two saves with one tag. Checkpoints without a list, DeepSpeed's own, are loaded as well.
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
from torch.utils._pytree import tree_iter

import tensorferry
from tensorferry import _core
from tensorferry.base.ranks import Ranks
from tensorferry.checkpoint import Stager, load, verify
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.objects.save_load import written
from tensorferry.checkpoint.staging import saved_here
from tensorferry.deepnvme.builders import set_attribute
from tensorferry.transfer.publication import make_directory, sync_directory, sync_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import ExitStack

    from tensorferry.transfer.replacement import Target

LIST_NAME = "tensorferry.json"
_VERSION = 1
_LATEST = "latest"
_OFFLOADED = "offloaded_tensors"
_UNFINISHED = "unfinished"
_SWAPPED_SUFFIX = ".tensor.swp"
# Of an archive: its directory, with the checksum of the record that torch makes of all others, is at its end.
_END_NBYTES = 64 << 10
_READ_NBYTES = 8 << 20
# A rank that lives waits so long for one that does not answer; of one that is killed it hears at once.
_PATIENCE = datetime.timedelta(hours=1)
# Keys of "checkpoint": {"writer": ...} that only DeepSpeed's writer has a use for, and their defaults.
_WITHOUT_EFFECT = {
    "io_buffer_size": 64 << 20,
    "io_buffer_double": True,
    "io_multiplier": 1,
    "data_parallel": None,
}

_installed = False

_Entries = dict[str, dict[str, int]]  # what files are, by their names in the folder


def replace(stack: ExitStack) -> None:
    """Have DeepSpeed save and load checkpoints by us; the stack puts back what was there."""
    set_attribute(stack, sys.modules[__name__], "_installed", True)
    set_attribute(stack, TorchCheckpointEngine, "save", _save_file)
    set_attribute(stack, TorchCheckpointEngine, "load", _load_file)
    create = _creating(engine_utils.create_checkpoint_engine)
    for module in (engine_utils, engines, engine_module):
        set_attribute(stack, module, "create_checkpoint_engine", create)
    owner = engine_module.DeepSpeedEngine
    set_attribute(stack, owner, "save_checkpoint", _saving(owner.save_checkpoint))
    set_attribute(stack, owner, "load_checkpoint", _loading(owner.load_checkpoint))
    set_attribute(
        stack, owner, "_copy_recovery_script", _copying_scripts(owner._copy_recovery_script)
    )
    name = "get_fp32_state_dict_from_zero_checkpoint"
    set_attribute(stack, engine_module, name, _reading_weights(getattr(engine_module, name)))


class TensorferryCheckpointEngine(TorchCheckpointEngine):  # type: ignore[misc]
    """What DeepSpeed's engine saves and loads its files by."""

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
        self._behind: Future[None] | None = None
        unused = [
            key for key, default in _WITHOUT_EFFECT.items() if writer and writer[key] != default
        ]
        if unused:
            logger.warning(
                f"[{self.name}] {', '.join(unused)}: without effect on tensorferry's writer"
            )

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory whose name would survive a power cut."""
        if not exist_ok and Path(path).exists():
            raise FileExistsError(f"{path!r} exists")
        self.attempt(lambda: make_directory(Path(path)))

    def attempt(self, function: Callable[[], object]) -> None:
        """Do a part of a save; within ``engine.save_checkpoint`` what fails is raised by all ranks, at its end."""
        if self._save is None:
            function()
        else:
            self._save.attempt(function)

    def create(self, info: Any) -> None:
        """Begin to save what :class:`CheckpointCommitInfo` says."""
        super().create(info)
        if self._save is not None:
            self._save.begin(Path(info.save_dir), info.tag)
        else:
            self._info = info

    def save(self, state_dict: Any, path: str) -> None:
        """Save a file; within ``engine.save_checkpoint`` what fails is raised by all ranks, at its end."""
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
            It is damaged, or of another save than the files beside it.
        StorageError, OSError
            It could not be read.
        """
        return _load_file(self, path, map_location)

    def commit(self, *_: Any) -> bool:
        """End a save that is not decoupled: the checkpoint is the newest one then."""
        self._info = None
        if self._save is not None:
            self._save.end()
        return True

    def is_decoupled(self) -> bool:
        """Return whether saves are written while training goes on."""
        return self._decoupled

    def get_commit_info(self) -> Any:
        """Return what DeepSpeed has to commit: nothing, unless it saves without us after ``uninstall()``."""
        return None if _installed else self._info

    def cleanup(self) -> None:
        """Wait for a decoupled save, and raise what it failed by."""
        if self._behind is not None:
            failure = self._behind.exception()
            self._behind = None
            if failure is not None:
                raise failure

    @contextlib.contextmanager
    def saving(self, engine: Any, *, save_latest: bool) -> Iterator[None]:
        """Have the files that are saved in the block be one checkpoint."""
        self.cleanup()  # all ranks have the same failure
        self._count += 1
        ranks = Ranks(self._own_group())
        self._save = save = _Save(
            engine, ranks, self._count, save_latest, self.zipfile_serialization
        )
        try:
            with save.copying():
                yield
            if self._decoupled:
                save.attempt(save.copy_offloaded)
                self._behind = Future()
                work = functools.partial(self._write_behind, save, self._behind)
                try:
                    threading.Thread(target=work, name="tensorferry-checkpoint").start()
                except RuntimeError:  # a limit of processes
                    work()
        except BaseException:
            save.abort()
            raise
        finally:
            self._save = None
        if not self._decoupled:
            self._show_statistics(save)

    def _own_group(self) -> Any:
        """Return a group of all ranks that nothing else uses, in no thread; None where there is one rank."""
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

    def _write_behind(self, save: _Save, ended: Future[None]) -> None:
        try:
            while save.staged:
                state, path = save.staged.pop(0)
                saved_here(tree_iter(state))
                save.attempt(functools.partial(save.write, state, path))
                del state  # its memory is wanted for the next save
            save.end()
        except BaseException as error:
            save.abort()
            logger.error(f"[{self.name}] the checkpoint {str(save.folder)!r} is not saved: {error}")
            ended.set_exception(error)
        else:
            self._show_statistics(save)
            ended.set_result(None)

    def _show_statistics(self, save: _Save) -> None:
        if self._shows_statistics:
            with contextlib.suppress(OSError, ValueError):  # stdout may be closed
                print(f"[{self.name}] {save.statistics()}", flush=True)


class _Save:
    """A checkpoint that is being saved: this rank's part of it."""

    def __init__(
        self, engine: Any, ranks: Ranks, number: int, save_latest: bool, as_archive: bool
    ) -> None:
        self.folder = self._latest = Path()
        self._tag = ""
        self.staged: list[tuple[Any, str]] = []
        self._engine = engine
        self._ranks = ranks
        self._number = number
        self._save_latest = save_latest
        self._as_archive = as_archive
        self._is_local = bool(engine.use_node_local_storage())
        self._is_first = _rank_of(engine) == 0
        self._rank_folder = _rank_folder(engine)
        # DeepSpeed has no experts with an optimizer on NVMe, and says so.
        self._offloads = engine.zero_nvme_offload_optimizer() and not engine.has_moe_layers
        self._copied: Path | None = None
        self._names: list[str] = []
        self._new: list[Path] = []
        self._waiting: list[Target] = []
        self._failure: BaseException | None = None
        self._begin = time.monotonic()
        self._nbytes = 0

    def begin(self, directory: Path, tag: str) -> None:
        """Save to a folder, which may have what an earlier save left there."""
        self._latest, self._tag = directory / _LATEST, tag
        self.folder = directory / tag
        self.attempt(self._begin_folder)

    def attempt(self, function: Callable[[], object]) -> None:
        """Do a part of it; what fails is raised by all ranks, when they agree."""
        if self._failure is None:
            try:
                function()
            except Exception as error:
                traceback.clear_frames(error.__traceback__)  # which have the state
                self._failure = error

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Have DeepSpeed's engine not copy tensors on NVMe in the block."""
        name = "zero_nvme_offload_optimizer"
        if self._offloads:
            vars(self._engine)[name] = lambda: False
        try:
            yield
        finally:
            vars(self._engine).pop(name, None)

    def copy_offloaded(self) -> None:
        """Copy this rank's tensors that are on NVMe; the copy has yet to take its place."""
        if not self._offloads or self._copied is not None:
            return
        place = self.folder / self._rank_folder
        for path in place.parent.glob(f"{place.name}.*"):  # of saves that were killed
            shutil.rmtree(path)
        self._copied = place.with_name(f"{place.name}.{secrets.token_hex(8)}")
        optimizer = self._engine.optimizer
        # Engines before this one may have left theirs there.
        own = {getattr(param, "ds_id", None) for param in optimizer.fp32_partitioned_groups_flat}
        shutil.copytree(
            optimizer.optimizer_swapper.swap_folder,
            self._copied,
            ignore=lambda _, names: [name for name in names if _id_of(name) not in own],
        )

    def write(self, state: Any, path: str) -> None:
        """Write a file of this rank."""
        is_new = not os.path.lexists(path)
        new = written(state, path, sync=True, as_archive=self._as_archive)
        self._names.append(os.path.relpath(path, self.folder))
        if is_new:
            self._new.append(Path(path))
            new.commit(sync_names=False)
        else:
            self._waiting.append(new)

    def end(self) -> None:
        """Make it the newest checkpoint."""
        found = self._ranks.call(self._finish)
        numbers = sorted({number for number, _ in found})
        if len(numbers) > 1:
            raise RuntimeError(
                f"ranks are at different saves, their {numbers}th: one has failed on a rank, which went on"
            )
        if any(replaces for _, replaces in found):
            self._ranks.call(self._mark_replaced)
        entries: _Entries = {}
        for node, tag, own in self._ranks.call(self._take_places):
            # DeepSpeed lets ranks have tags of their own.
            if tag == self._tag and (not self._is_local or node == platform.node()):
                entries |= own
        self._new.clear()
        self._ranks.call(lambda: self._publish(entries))

    def abort(self) -> None:
        """Give up what is not yet a part of a checkpoint."""
        self.staged.clear()
        while self._waiting:
            self._waiting.pop().abort()
        # They would keep the space that the next save wants.
        for path in self._new:
            path.unlink(missing_ok=True)
        if self._copied is not None:
            shutil.rmtree(self._copied, ignore_errors=True)

    def statistics(self) -> str:
        """Return what was written in what time."""
        seconds = time.monotonic() - self._begin
        return f"{self._nbytes / 1e9:.3f} GB in {seconds:.3f} s: {self._nbytes / 1e9 / seconds:.3f} GB/s"

    def _begin_folder(self) -> None:
        make_directory(self.folder.parent)
        if self._is_first and not (self.folder.exists() and any(self.folder.iterdir())):
            make_directory(self.folder)
            self._mark_unfinished()

    def _mark_unfinished(self) -> None:
        _write_text(self.folder / LIST_NAME, json.dumps({"version": _VERSION, _UNFINISHED: True}))

    def _mark_replaced(self) -> None:
        # A list tells files of two saves from each other.
        if self._is_first and not (self.folder / LIST_NAME).exists():
            self._mark_unfinished()

    def _finish(self) -> tuple[int, bool]:
        """Have all files of this rank on the drive; return which save it is, and whether it replaces any."""
        self.attempt(self.copy_offloaded)
        if self._failure is not None:
            raise self._failure
        if self._copied is not None:
            for path in (*self._copied.rglob("*"), self._copied):
                sync_file(path) if path.is_file() else sync_directory(path)
        place = self.folder / self._rank_folder
        return self._number, bool(self._waiting) or (self._offloads and place.exists())

    def _take_places(self) -> tuple[str, str, _Entries]:
        while self._waiting:
            self._waiting.pop(0).commit(sync_names=False)
        if self._copied is not None:
            place = self.folder / self._rank_folder
            if place.exists():
                shutil.rmtree(place)
            self._copied.rename(place)
            self._copied = None
            sync_directory(place.parent)
            copies = [path for path in place.rglob("*") if path.is_file()]
            self._names += [os.path.relpath(path, self.folder) for path in copies]
        for folder in {(self.folder / name).parent for name in self._names} | {self.folder}:
            sync_directory(folder)
        entries = {name: _described(self.folder / name) for name in self._names}
        self._nbytes = sum(entry["nbytes"] for entry in entries.values())
        return platform.node(), self._tag, entries

    def _publish(self, entries: _Entries) -> None:
        if self._is_first:
            _write_text(
                self.folder / LIST_NAME,
                json.dumps({"version": _VERSION, "files": entries}, indent=1),
            )
            if self._save_latest:
                _write_text(self._latest, self._tag)


def _save_file(engine: Any, state_dict: Any, path: str) -> None:
    written(state_dict, path, sync=True, as_archive=engine.zipfile_serialization).commit()


def _load_file(_: Any, path: str, map_location: Any = None) -> Any:
    place = Path(path)
    entry = _listed(place.parent).get(place.name)
    if entry is not None:
        _compare(place, entry)
    return load(path, weights_only=False, map_location=map_location)


def _creating(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_checkpoint_engine(config_params: Any, *arguments: Any, **options: Any) -> Any:
        writer = None if config_params is None else config_params.checkpoint_config["writer"]
        if writer is None:
            made = create(config_params, *arguments, **options)
            if type(made) is not TorchCheckpointEngine:  # one that the configuration asks for
                return made
        elif writer["type"] == "MOCK":
            return create(config_params, *arguments, **options)
        return TensorferryCheckpointEngine(config_params)

    return create_checkpoint_engine


def _saving(save_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(save_checkpoint)

    @functools.wraps(save_checkpoint)
    def save(self: Any, *arguments: Any, **options: Any) -> Any:
        if type(self.checkpoint_engine) is TorchCheckpointEngine:  # made before install()
            self.checkpoint_engine = TensorferryCheckpointEngine(self._config)
        ours = self.checkpoint_engine
        given = signature.bind(self, *arguments, **options)
        given.apply_defaults()
        if not isinstance(ours, TensorferryCheckpointEngine) or not given.arguments["save_dir"]:
            return save_checkpoint(*given.args, **given.kwargs)
        # A thread may write to it when the process is in another directory.
        given.arguments["save_dir"] = os.path.abspath(given.arguments["save_dir"])  # noqa: PTH100
        with ours.saving(self, save_latest=bool(given.arguments["save_latest"])):
            # DeepSpeed's own way would cut `latest`, and write it when only rank 0 has saved its files.
            given.arguments["save_latest"] = False
            return save_checkpoint(*given.args, **given.kwargs)

    return save


def _loading(load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(load_checkpoint)

    @functools.wraps(load_checkpoint)
    def load_whole(self: Any, *arguments: Any, **options: Any) -> Any:
        given = signature.bind(self, *arguments, **options)
        given.apply_defaults()
        wanted = given.arguments
        if isinstance(self.checkpoint_engine, TensorferryCheckpointEngine):
            self.checkpoint_engine.cleanup()
        if self.load_universal_checkpoint():
            return load_checkpoint(*given.args, **given.kwargs)
        directory = Path(wanted["load_dir"])
        tag = _latest_tag(directory) if wanted["tag"] is None else str(wanted["tag"])
        if tag is None:  # DeepSpeed says so
            return load_checkpoint(*given.args, **given.kwargs)
        with_optimizer = bool(wanted["load_optimizer_states"] and not wanted["load_module_only"])
        wanted["tag"] = tag
        _check_whole(self, directory / tag, with_optimizer)
        token = _tag.set(tag)
        try:
            loaded = load_checkpoint(*given.args, **given.kwargs)
        finally:
            _tag.reset(token)
        if with_optimizer and loaded[0] is not None and self.zero_nvme_offload_optimizer():
            _restore_optimizer(self, directory, tag)
        return loaded

    return load_whole


def _latest_tag(directory: Path) -> str | None:
    latest = directory / _LATEST
    if not latest.is_file():
        return None
    tag = latest.read_text().strip()
    if not tag or not (directory / tag).is_dir():
        raise CheckpointError(f"it names the checkpoint {tag!r}, which is not there", str(latest))
    return tag


def _check_whole(engine: Any, folder: Path, with_optimizer: bool) -> None:
    """Check that what is to be loaded is there, and what DeepSpeed copies without looking at it."""
    is_first, own_folder = _rank_of(engine) == 0, f"{_rank_folder(engine)}/"
    for name, entry in _listed(folder).items():
        if not with_optimizer and not name.endswith("model_states.pt"):
            continue
        path = folder / name
        if is_first and not path.exists():  # others find that of what they load
            raise CheckpointError("it is missing: the checkpoint is not whole", str(path))
        if name.startswith(own_folder) and engine.zero_nvme_offload_optimizer():
            _compare(path, entry)


def _rank_of(engine: Any) -> int:
    """Return this rank's number among those that share a folder."""
    return int(engine.local_rank if engine.use_node_local_storage() else engine.global_rank)


def _rank_folder(engine: Any) -> str:
    """Return where DeepSpeed copies the tensors of this rank that are on NVMe."""
    return f"{_OFFLOADED}/rank{_rank_of(engine):02d}"


def _restore_optimizer(engine: Any, directory: Path, tag: str) -> None:
    """Load what DeepSpeed saves and does not load where the optimizer is on NVMe.

    DeepSpeed copies the files of tensors there, and uses those of parameters, if they are called as in the process that
    saved. A new optimizer has no other states yet, and begins with zeros; one that has gone on keeps what is not there.
    Nor does it load what is in memory: how many steps were taken, groups' values, loss scales, and all of those
    parameters that are too small to be on NVMe.
    """
    folder = directory / tag
    saved_ranks, own_ranks = engine.loaded_checkpoint_dp_world_size, engine.seq_dp_world_size
    if saved_ranks != own_ranks:
        raise CheckpointError(
            f"{saved_ranks} ranks have saved it, and {own_ranks} load: tensors on NVMe are each rank's own",
            str(folder),
        )
    optimizer = engine.optimizer
    states = engine._get_all_zero_checkpoints(str(directory), tag)
    saved = states[dist.get_rank(group=optimizer.dp_process_group)]
    for name in ("loss_scaler", "dynamic_loss_scale", "overflow"):
        setattr(optimizer, name, saved[name])
    optimizer.checkpoint_event_prologue()  # parameters that all ranks have whole are made of the partitions again
    own, given = optimizer.optimizer, saved["optimizer_state_dict"]
    saved_states: dict[Any, dict[str, Any]] = {}
    optimizer._set_fp32_optimizer_param_groups()
    for group, values in zip(own.param_groups, given["param_groups"], strict=True):
        for param, key in zip(group["params"], values["params"], strict=True):
            saved_states[param] = given["state"].get(key, {})
        group.update({name: value for name, value in values.items() if name != "params"})
    optimizer._clear_fp32_optimizer_param_groups()
    swapped = _Swapped(optimizer, folder / _rank_folder(engine))
    for param in optimizer.fp32_partitioned_groups_flat:  # before any is asked for ahead
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
            # What the file has of a tensor on NVMe is what DeepSpeed's buffers had at that time.
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
    """Return whose tensor a file has; a gradient's has an id that no parameter has."""
    return name.removesuffix(_SWAPPED_SUFFIX).rpartition("-")[2]


class _Swapped:
    """Files of a rank's tensors that were on NVMe, called by numbers that DeepSpeed counts anew in each process.

    Attributes
    ----------
    ids : dict of int to str
        What those of this engine's groups, by their positions, are called there.

    Raises
    ------
    CheckpointError
        They are not those of such an engine.
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
                "its tensors are not those that this engine has on NVMe", str(folder)
            )
        self.ids = dict(zip(numbers, there, strict=True))
        for name in names:  # which DeepSpeed has copied to where nobody would look for them
            if _id_of(name) not in own:
                (swaps / name).unlink(missing_ok=True)

    def has(self, number: int, name: str) -> bool:
        """Return whether a state of a group's is there."""
        return number in self.ids and self._path(number, name).exists()

    def read(self, number: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Read a state of a group's, or without a name the parameters."""
        return tensorferry.read(self._path(number, name), tensor)

    def _path(self, number: int, name: str) -> Path:
        return self._folder / f"{name and name + '-'}{self.ids[number]}{_SWAPPED_SUFFIX}"


def _copying_scripts(copy: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
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


# Of the checkpoint that is being loaded in a thread.
_tag: contextvars.ContextVar[str | None] = contextvars.ContextVar("_tag", default=None)


def _reading_weights(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def get_weights(checkpoint_dir: Any, tag: Any = None, *arguments: Any, **options: Any) -> Any:
        """Read weights out of what optimizers have, of the checkpoint that is loaded rather than the newest one."""
        tag = _tag.get() if tag is None else tag
        if tag is not None:
            folder = Path(checkpoint_dir) / tag
            for name, entry in _listed(folder).items():
                if name.endswith("optim_states.pt"):
                    _compare(folder / name, entry)
                    for problem in verify(folder / name).problems:
                        raise problem
        return read(checkpoint_dir, tag, *arguments, **options)

    return get_weights


def _content_of(folder: Path) -> dict[str, Any]:
    """Return what a folder's list says, nothing where there is none."""
    path = folder / LIST_NAME
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        version = content["version"]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"it is damaged ({error})", str(path)) from None
    if version != _VERSION:
        raise CheckpointError(f"a newer tensorferry wrote it (version {version!r})", str(path))
    return content


def _listed(folder: Path) -> _Entries:
    """Return which files belong to a checkpoint, as far as that is known."""
    content = _content_of(folder)
    if content.get(_UNFINISHED):
        raise CheckpointError("the save of this checkpoint did not come to its end", str(folder))
    return dict(content.get("files", {}))


def _described(path: Path) -> dict[str, int]:
    """Return a file's size, and a checksum that tells it from others."""
    with path.open("rb", buffering=0) as file:
        nbytes = os.fstat(file.fileno()).st_size
        is_archive = file.read(4) == b"PK\3\4"
        file.seek(max(nbytes - _END_NBYTES, 0) if is_archive else 0)
        crc = 0
        while data := file.read(_READ_NBYTES):
            crc = _core.crc32(data, crc)
    return {"nbytes": nbytes, "end_crc32" if is_archive else "crc32": crc}


def _compare(path: Path, entry: dict[str, int]) -> None:
    found = _described(path)
    if found != entry:
        what = f"it has {found['nbytes']} bytes, and {entry['nbytes']} were saved"
        if found["nbytes"] == entry["nbytes"]:
            what = "its bytes are not those that were saved"
        raise CheckpointError(
            f"{what}: it is damaged, or of another save (remedy, if it was changed on purpose: remove "
            f"{str(path.parent / LIST_NAME)!r})",
            str(path),
        )


def _write_text(path: Path, text: str) -> None:
    tensorferry.write(path, text.encode(), atomic=True, sync=True)
