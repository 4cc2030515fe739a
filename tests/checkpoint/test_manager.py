"""Checkpoints: asynchronous saves, removal of old steps, and restores, with crashes at any moment."""

from __future__ import annotations

import datetime
import enum
import errno
import gc
import io
import os
import pathlib
import random
import shutil
import signal
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

from tensorferry.base import file_locks
from tensorferry.base.mounts import mount_of
from tensorferry.checkpoint import (
    CheckpointError,
    Checkpoints,
    FileSystemReader,
    FileSystemWriter,
    verify,
)
from tensorferry.checkpoint.folder import Folder
from tensorferry.checkpoint.storage import commit
from tensorferry.checkpoint.storage.contents import Contents
from tensorferry.checkpoint.storage.savers import Saver
from tests.checkpoint.damage import flip
from tests.checkpoint.states import metadata_of, steps_in
from tests.checkpoint.steps import Steps
from tests.support import child
from tests.support.child import ROOT
from tests.support.data import SEED
from tests.support.forks import assert_exits_with_zero, in_child
from tests.support.interrupts import At
from tests.support.leaks import settled
from tests.support.ranks import call_on_ranks, files_of, started
from tests.support.threads import InThread, no_new_threads, threads_in

if TYPE_CHECKING:
    from collections.abc import Callable

UNFINISHED = ".tensorferry-unfinished"


def state_of(step: int) -> dict[str, Any]:
    """Return a state in which every value is the step."""
    sizes = [(1 << 18) + 5, 300, 1]
    tensors = {str(k): torch.full((n,), float(step)) for k, n in enumerate(sizes)}
    return {"tensors": tensors, "step": step}


def step_in(state: dict[str, Any]) -> int:
    """Return the step that every value holds."""
    (step,) = steps_in(state)
    return int(step)


def restored(checkpoints: Checkpoints, step: int | None = None) -> int | None:
    state = state_of(-1)
    found = checkpoints.restore(state, step=step)
    if found is not None:
        assert step_in(state) == found
    return found


def save_all(root: pathlib.Path, *steps: int, **options: Any) -> None:
    with Checkpoints(root, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, state_of(step))


def data_of(checkpoints: Checkpoints, step: int) -> pathlib.Path:
    return next(iter(checkpoints.path(step).glob("*.distcp")))


def damage(checkpoints: Checkpoints, step: int) -> None:
    flip(data_of(checkpoints, step), 8 * 100_000)


class Hold:
    """Lets saves wait before their commit until release()."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        finish = FileSystemWriter.finish

        def held(writer: Any, metadata: Any, results: Any) -> None:
            self.reached.set()
            assert self.go.wait(120)
            finish(writer, metadata, results)

        monkeypatch.setattr(FileSystemWriter, "finish", held)


def test_what_is_saved_is_the_state_of_the_call_and_counts_when_it_is_whole(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, hold = Checkpoints(directory / "run"), Hold(monkeypatch)
    assert checkpoints.steps() == []
    assert checkpoints.latest() is None
    assert restored(checkpoints) is None
    state = state_of(7)
    checkpoints.save(7, state)
    for tensor in state["tensors"].values():
        tensor.zero_()
    assert hold.reached.wait(120)
    assert files_of(directory / "run") == {"step_00000007", ".tensorferry.lock"}
    assert checkpoints.steps() == []
    hold.go.set()
    checkpoints.wait()
    assert checkpoints.latest() == 7
    assert restored(checkpoints) == 7
    checkpoints.close()
    assert files_of(directory / "run") == {"step_00000007"}
    assert len(files_of(checkpoints.path(7))) == 2
    assert verify(checkpoints.path(7)).sound


def test_a_second_save_waits_for_the_first(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, hold = Checkpoints(directory), Hold(monkeypatch)
    checkpoints.save(1, state_of(1))
    assert hold.reached.wait(120)
    second = threading.Thread(target=checkpoints.save, args=(2, state_of(2)))
    second.start()
    second.join(0.1)
    assert second.is_alive()
    assert not checkpoints.path(2).exists()
    hold.go.set()
    second.join(120)
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2]


@pytest.mark.parametrize("wait", [False, True])
def test_the_last_ones_and_every_so_manyeth_stay(directory: pathlib.Path, wait: bool) -> None:
    checkpoints = Checkpoints(directory, keep_last=2, keep_every=4)
    for step in range(11):
        checkpoints.save(step, state_of(step), wait)
        if wait:
            assert checkpoints.latest() == step
    checkpoints.close()
    assert checkpoints.steps() == [0, 4, 8, 9, 10]
    assert files_of(directory) == {f"step_{step:08d}" for step in checkpoints.steps()}
    for step in checkpoints.steps():
        assert restored(checkpoints, step) == step


def test_without_keep_last_all_stay_and_newer_ones_always_do(directory: pathlib.Path) -> None:
    save_all(directory, 10, 20, 30)
    save_all(directory, 5, keep_last=2)
    assert Checkpoints(directory).steps() == [5, 10, 20, 30]
    save_all(directory, 25, keep_last=2)
    assert Checkpoints(directory).steps() == [20, 25, 30]


def test_other_things_in_the_folder_are_left_alone(directory: pathlib.Path) -> None:
    save_all(directory, 1)
    names = ["step_1", "step_000000002", "step_00000002.bak", "best", "step_0000000a"]
    for name in names:
        shutil.copytree(directory / "step_00000001", directory / name)
    (directory / "step_00000000").mkdir()  # another program's, with a file that no save made
    (directory / "step_00000000" / "model.pt").touch()
    (directory / "step_00000000" / UNFINISHED).touch()
    (directory / "step_00000003").mkdir()  # another program is copying a checkpoint to it
    (directory / "step_00000003" / "__0_0.distcp").touch()
    (directory / "step_00000004").touch()
    save_all(directory, 8, 9, keep_last=1)
    there = {"step_00000000", "step_00000003", "step_00000004", "step_00000009"}
    assert files_of(directory) == {*names, *there}
    assert Checkpoints(directory).steps() == [9]


def test_what_links_lead_to_stays(directory: pathlib.Path) -> None:
    root, archive = directory / "run", directory / "archive"
    save_all(root, 1, 2, 3, 4)
    checkpoints = Checkpoints(root)
    (root / "best").symlink_to("step_00000001")
    # A checkpoint with links to files of another one, as deduplicating tools make them; and one in another folder.
    data = data_of(checkpoints, 4)
    data.unlink()
    shutil.copy(data_of(checkpoints, 2), checkpoints.path(4) / "copy")
    data.symlink_to(data_of(checkpoints, 2))
    shutil.move(checkpoints.path(3), archive)
    checkpoints.path(3).symlink_to(archive)
    os.link(data_of(checkpoints, 1), directory / "hard")
    save_all(root, 5, keep_last=2)
    assert checkpoints.steps() == [1, 2, 3, 4, 5]
    assert restored(checkpoints, 3) == 3
    (root / "best").unlink()
    content = (directory / "hard").read_bytes()
    save_all(root, 6, keep_last=3)
    assert checkpoints.steps() == [2, 3, 4, 5, 6]
    assert (directory / "hard").read_bytes() == content
    assert len(files_of(archive)) == 2


def test_nothing_is_removed_for_a_checkpoint_that_the_drive_has_damaged(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(directory, 1)
    end = Folder.end

    def damage(self: Folder, step: int) -> None:
        monkeypatch.undo()
        (data,) = self.path(step).glob("*.distcp")
        flip(data, 8 * (data.stat().st_size // 2))
        end(self, step)

    monkeypatch.setattr(Folder, "end", damage)
    with Checkpoints(directory, keep_last=1) as checkpoints:
        checkpoints.save(2, state_of(2))
        with pytest.raises(CheckpointError, match="step_00000002"):
            checkpoints.wait()
        assert checkpoints.steps() == [1, 2]
        checkpoints.save(3, state_of(3))
        checkpoints.wait()
        assert checkpoints.steps() == [3]


def test_a_checkpoint_into_which_somebody_saves_is_not_removed(directory: pathlib.Path) -> None:
    save_all(directory, 1)
    saver = Saver(directory / "step_00000001", None)
    save_all(directory, 2, keep_last=1)
    assert Checkpoints(directory).steps() == [1, 2]
    saver.leave()
    save_all(directory, 3, keep_last=1)
    assert Checkpoints(directory).steps() == [3]


def load_held(_rank: int, path: str, marks: str) -> float:
    """Load a checkpoint by a planner that waits for leave when it has begun, and live on."""

    class Waiting(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> Any:
            pathlib.Path(marks, "begun").touch()
            assert settled(pathlib.Path(marks, "go").exists)
            return super().resolve_tensor(read_item)

    state = state_of(-1)
    dcp.load(state, storage_reader=FileSystemReader(path), planner=Waiting())
    pathlib.Path(marks, "loaded").touch()
    assert settled(pathlib.Path(marks, "end").exists)
    return step_in(state)


def test_a_checkpoint_that_another_process_is_loading_is_not_removed(
    directory: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    save_all(directory, 1)
    with started(1, load_held, str(directory / "step_00000001"), str(marks)) as ranks:
        assert settled((marks / "begun").exists)
        save_all(directory, 2, keep_last=1)
        assert Checkpoints(directory).steps() == [1, 2]
        (marks / "go").touch()
        assert settled((marks / "loaded").exists)
        save_all(directory, 3, keep_last=1)  # by a process that lives on
        assert Checkpoints(directory).steps() == [3]
        (marks / "end").touch()
        assert ranks[0].answers.poll(60)
        answer = ranks[0].answers.recv()
        assert (answer.failure, answer.result) == (None, 1)


def test_a_checkpoint_that_another_machine_is_loading_is_not_removed(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS other machines see locks of files, but not of directories."""
    monkeypatch.setattr(file_locks, "REMOTE", frozenset([mount_of(directory)["type"]]))
    monkeypatch.setattr(file_locks.fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(file_locks, "_MAX_OTHER_SAVE_SECONDS", 0.0)
    save_all(directory, 1)
    reader = FileSystemReader(directory / "step_00000001")
    with reader.holding_folder():
        save_all(directory, 2, keep_last=1)
        assert Checkpoints(directory).steps() == [1, 2]
    save_all(directory, 3, keep_last=1)
    assert Checkpoints(directory).steps() == [3]


def test_what_is_replaced_while_it_is_loaded_is_loaded_whole(directory: pathlib.Path) -> None:
    save_all(directory, 1)
    path = directory / "step_00000001"
    before = files_of(path)
    with FileSystemReader(path).holding_folder(), Checkpoints(directory) as checkpoints:
        checkpoints.save(1, state_of(7), overwrite=True, wait=True)
        assert before <= files_of(path)
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(1, state_of(8), overwrite=True)
    assert files_of(path) & before == {".metadata"}
    assert len(files_of(path)) == len(before)


def test_a_checkpoint_that_is_gone_is_told_as_such(directory: pathlib.Path) -> None:
    save_all(directory, 1)
    path = directory / "step_00000001"
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    contents = Contents(path, metadata)
    shutil.rmtree(path)
    with pytest.raises(FileNotFoundError, match="has been removed"), reader.holding_folder():
        pass
    name = next(iter(metadata.storage_data.values())).relative_path
    with pytest.raises((OSError, CheckpointError), match="has been removed"):
        contents.open(name)


def aside(directory: pathlib.Path) -> set[str]:
    return {name.split(".")[2] for name in files_of(directory) if "-abandoned." in name}


@pytest.mark.parametrize("wait", [False, True])
def test_steps_that_were_gone_back_from_are_set_aside_by_the_first_save_behind(
    directory: pathlib.Path, wait: bool
) -> None:
    save_all(directory, 1, 2, 3, 4)
    checkpoints = Checkpoints(directory)
    assert restored(checkpoints, 2) == 2
    assert checkpoints.steps() == [1, 2, 3, 4]  # restoring an older one does not remove others
    checkpoints.save(3, state_of(30), wait=wait)
    checkpoints.close()
    assert checkpoints.steps() == [1, 2, 3]
    assert aside(directory) == {"step_00000004"}
    state = state_of(-1)
    assert Checkpoints(directory).restore(state) == 3
    assert step_in(state) == 30
    checkpoints.save(4, state_of(40), wait=True)
    assert checkpoints.steps() == [1, 2, 3, 4]


def test_steps_that_were_gone_back_from_go_where_not_all_stay(directory: pathlib.Path) -> None:
    save_all(directory, 1, 2, 4, 6)
    (directory / "best").symlink_to("step_00000006")
    checkpoints = Checkpoints(directory, keep_last=2, keep_every=4)
    restored(checkpoints, 1)
    with pytest.warns(RuntimeWarning, match=r"steps \[6\] are newer than step 1"):
        checkpoints.save(2, state_of(20), wait=True)
    assert checkpoints.steps() == [1, 2, 6]  # a link leads there
    assert aside(directory) == {"step_00000004"}  # keep_every=4 keeps it permanently
    (directory / "best").unlink()
    checkpoints.save(3, state_of(30), wait=True)
    assert checkpoints.steps() == [2, 3]
    assert aside(directory) == {"step_00000004"}


def test_a_save_that_is_not_behind_leaves_newer_steps(directory: pathlib.Path) -> None:
    save_all(directory, 1, 5, 6)
    checkpoints = Checkpoints(directory)
    restored(checkpoints, 5)
    checkpoints.save(2, state_of(2), wait=True)
    assert checkpoints.steps() == [1, 2, 5, 6]
    assert restored(checkpoints) == 6  # the newest one: no steps are abandoned any more
    checkpoints.save(7, state_of(7), wait=True)
    assert checkpoints.steps() == [1, 2, 5, 6, 7]


def test_a_step_is_saved_again_only_if_that_is_said_or_an_older_one_was_restored(
    directory: pathlib.Path,
) -> None:
    save_all(directory, 1, 2, 3)
    checkpoints = Checkpoints(directory)
    with pytest.raises(ValueError, match=r"step 2.*overwrite=True"):
        checkpoints.save(2, state_of(2))
    checkpoints.save(2, state_of(-5), overwrite=True)
    checkpoints.wait()
    state = state_of(0)
    assert checkpoints.restore(state, step=2) == 2
    assert step_in(state) == -5
    checkpoints.save(3, state_of(-6), wait=True)
    with pytest.raises(ValueError, match="step 2"):
        checkpoints.save(2, state_of(2))
    assert checkpoints.restore(state) == 3
    assert step_in(state) == -6
    assert files_of(directory) == {f"step_0000000{step}" for step in (1, 2, 3)}


@pytest.mark.parametrize("what", ["a flipped bit", "a missing file", "metadata", "a cut file"])
def test_from_a_damaged_one_it_falls_back_with_a_warning_that_names_the_damage(
    directory: pathlib.Path, what: str
) -> None:
    save_all(directory, 1, 2, 3)
    checkpoints = Checkpoints(directory)
    path = data_of(checkpoints, 3)
    if what == "metadata":
        path = checkpoints.path(3) / ".metadata"
        flip(path, 800)
    elif what == "a missing file":
        path.unlink()
    elif what == "a cut file":
        os.truncate(path, 1000)
    else:
        damage(checkpoints, 3)
    with pytest.warns(RuntimeWarning, match=f"step 3.*{path.name}"):
        assert restored(checkpoints) == 2
    with pytest.raises((CheckpointError, OSError), match=path.name):
        restored(checkpoints, 3)
    # The training continues from there, and reaches the step of the damaged checkpoint again.
    checkpoints.save(3, state_of(3), wait=True)
    assert restored(Checkpoints(directory)) == 3


def test_damaged_ones_do_not_count_among_those_that_are_kept(directory: pathlib.Path) -> None:
    save_all(directory, 1, 2, 3)
    checkpoints = Checkpoints(directory, keep_last=2)
    damage(checkpoints, 3)
    with pytest.warns(RuntimeWarning, match="step 3"):
        restored(checkpoints)
    checkpoints.save(4, state_of(4), wait=True)
    assert checkpoints.steps() == [2, 3, 4]
    checkpoints.save(5, state_of(5), wait=True)
    assert checkpoints.steps() == [4, 5]


def test_if_none_is_sound_it_says_so_with_what_is_wrong_in_each(directory: pathlib.Path) -> None:
    save_all(directory, 1, 2)
    checkpoints = Checkpoints(directory)
    names = [data_of(checkpoints, step).name for step in (1, 2)]
    damage(checkpoints, 1)
    data_of(checkpoints, 2).unlink()
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(CheckpointError, match=f"undefined.*step 2.*{names[1]}.*step 1.*{names[0]}"),
    ):
        restored(checkpoints)


def test_what_is_no_damage_is_raised_at_once(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(directory, 1, 2)
    checkpoints = Checkpoints(directory)
    with pytest.raises(ValueError, match="missing in the checkpoint: more"):
        checkpoints.restore({**state_of(0), "more": torch.ones(3)})
    with pytest.raises(FileNotFoundError, match="step_00000005"):
        checkpoints.restore(state_of(0), step=5)

    def refuse(*_: Any) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr("tensorferry.checkpoint.manager.load", refuse_by_name := refuse_all(refuse))
    with pytest.raises(OSError, match="too many"):
        checkpoints.restore(state_of(0))
    assert refuse_by_name.calls == 1


class Phase(enum.Enum):
    COOLDOWN = 1


class Failing(Stateful):
    """An object that cannot load its state, because a file that it needs is missing."""

    def state_dict(self) -> dict[str, Any]:
        return {"a": torch.ones(1)}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        raise FileNotFoundError(errno.ENOENT, "no such vocabulary", "vocabulary.txt")


@pytest.mark.parametrize("wait", [False, True])
def test_an_object_that_is_refused_is_told_by_the_save_and_is_no_damage(
    directory: pathlib.Path, wait: bool
) -> None:
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, {**state_of(1), "phase": None})
    with pytest.warns(RuntimeWarning, match=r"phase.*Phase.*trust_pickle") as told:
        checkpoints.save(2, {**state_of(2), "phase": [Phase.COOLDOWN]}, wait=wait)
    assert [each.filename for each in told if "phase" in str(each.message)] == [__file__]
    checkpoints.wait()
    with pytest.raises(CheckpointError, match=r"phase.*Phase.*trust_pickle=True"):
        checkpoints.restore({**state_of(-1), "phase": None})
    state: dict[str, Any] = {**state_of(-1), "phase": None}
    assert Checkpoints(directory, trust_pickle=True).restore(state) == 2
    assert state["phase"] == [Phase.COOLDOWN]
    with torch.serialization.safe_globals([Phase]):
        assert checkpoints.restore({**state_of(-1), "phase": None}) == 2
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            checkpoints.save(3, {**state_of(2), "phase": [Phase.COOLDOWN]}, wait=True)


class Deeper(dict[str, Any]):
    """A subclass of dict that torch flattens."""


@pytest.mark.parametrize(
    ("value", "is_refused"),
    [
        (Phase.COOLDOWN, True),
        ({"a": (1, Phase.COOLDOWN)}, True),
        ([torch.ones(1), Phase.COOLDOWN], True),
        ((1, torch.eye(2).to_sparse()), False),
        ({Phase.COOLDOWN: 1}, False),  # torch makes text of keys
        ([{Phase.COOLDOWN: 1}], False),
        (({Phase.COOLDOWN: 1},), True),
        (Deeper(a=1), False),
        (io.BytesIO(b"x"), False),
        ({"a": [1, 2.5, None, {"b": (torch.float32, datetime.time(1))}]}, False),
    ],
    ids=lambda value: type(value).__name__,  # of all workers the same
)
def test_a_save_warns_of_just_what_is_refused(
    directory: pathlib.Path, value: Any, is_refused: bool
) -> None:
    checkpoints = Checkpoints(directory)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        checkpoints.save(1, {"value": value}, wait=True)
    assert len([each for each in told if "will refuse" in str(each.message)]) == is_refused
    try:
        assert checkpoints.restore({"value": value}) == 1
    except CheckpointError:
        assert is_refused
    else:
        assert not is_refused


def test_what_an_object_fails_with_when_it_gets_its_state_is_no_damage(
    directory: pathlib.Path,
) -> None:
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, {"a": Failing()})
    checkpoints.save(2, {"a": Failing()})
    with pytest.raises(FileNotFoundError, match="vocabulary"):
        checkpoints.restore({"a": Failing()})


def test_files_that_were_moved_and_linked_to_are_no_damage(
    directory: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    save_all(directory, 1, 2)
    checkpoints = Checkpoints(directory)
    path = data_of(checkpoints, 2)
    shutil.move(path, tmp_path / path.name)
    path.symlink_to(tmp_path / path.name)
    with pytest.raises(CheckpointError, match="outside of its folder"):
        restored(checkpoints)


class refuse_all:  # noqa: N801
    """Counts calls."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.calls, self._function = 0, function

    def __call__(self, *arguments: Any, **options: Any) -> None:
        self.calls += 1
        self._function()


def test_one_that_was_removed_while_it_was_loaded_gives_way_to_a_newer_one(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(directory, 1)
    checkpoints, read = Checkpoints(directory), Checkpoints._read

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(Checkpoints, "_read", read)
        save_all(directory, 2, keep_last=1)
        return read(*arguments)

    monkeypatch.setattr(Checkpoints, "_read", meanwhile)
    with pytest.warns(RuntimeWarning, match="step 1"):
        assert restored(checkpoints) == 2


class Counter:
    """A stateful object, as defined by torch."""

    def __init__(self) -> None:
        self.weight = torch.zeros(1000)
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight, self.steps = state["weight"], state["steps"]


def test_objects_with_state_dict_are_saved_and_restored(directory: pathlib.Path) -> None:
    counter = Counter()
    with Checkpoints(directory) as checkpoints:
        for step in (1, 2):
            counter.weight.fill_(step)
            counter.steps = step
            checkpoints.save(step, {"counter": counter})
    other = Counter()
    assert checkpoints.restore({"counter": other}) == 2
    assert other.steps == 2
    assert torch.equal(other.weight, counter.weight)


def fail(*_: Any, **__: Any) -> None:
    raise OSError(errno.EIO, "the drive is gone")


def test_the_error_of_a_save_is_raised_once_by_the_next_call(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(directory)
    calls: list[Callable[[], Any]] = [
        lambda: checkpoints.save(2, state_of(2)),
        checkpoints.wait,
        checkpoints.close,
        lambda: checkpoints.restore(state_of(0)),
        lambda: checkpoints.__exit__(None, None, None),
    ]
    for call in calls:
        with monkeypatch.context() as patch:
            patch.setattr(FileSystemWriter, "write_data", fail)
            checkpoints.save(1, state_of(1))
            with pytest.raises(OSError, match="the drive is gone"):
                call()
        checkpoints.wait()
    assert checkpoints.steps() == []
    checkpoints.save(2, state_of(2), wait=True)
    assert files_of(directory) == {"step_00000002"}  # no files of the failed saves


def test_an_error_of_the_block_is_not_replaced_by_that_of_a_save(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileSystemWriter, "write_data", fail)

    def block() -> None:
        with Checkpoints(directory) as checkpoints:
            checkpoints.save(1, state_of(1))
            raise ZeroDivisionError

    with pytest.warns(RuntimeWarning, match="drive is gone"), pytest.raises(ZeroDivisionError):
        block()


def test_an_error_that_nobody_asks_for_is_told(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileSystemWriter, "write_data", fail)
    kept = [Checkpoints(directory)]
    kept[0].save(1, state_of(1))
    [flight] = kept[0]._running_saves
    flight.join()
    flight.error = flight.error.with_traceback(None)  # type: ignore[union-attr]
    flight.error.__cause__ = flight.error.__context__ = None
    del flight

    def drop() -> None:
        kept.clear()
        gc.collect()

    with pytest.warns(
        RuntimeWarning, match=r"step 1 failed, and no call has raised its error.*drive is gone"
    ):
        drop()


def test_the_first_save_warns_if_the_drive_is_too_small(small_tmpfs: pathlib.Path) -> None:
    state = {"weight": torch.zeros(1 << 18), "step": 1}  # 1 MiB, on 8 MiB
    with Checkpoints(small_tmpfs / "enough", keep_last=3, keep_best=3) as checkpoints:
        checkpoints.save(1, state)
    with Checkpoints(small_tmpfs / "small", keep_last=4, keep_best=3) as checkpoints:
        with pytest.warns(
            RuntimeWarning, match=r"8 more checkpoints of 1048576 bytes need 8388608"
        ):
            checkpoints.save(1, state)
        checkpoints.save(2, state)  # warns once
    checkpoints = Checkpoints(small_tmpfs / "small", keep_last=4)  # has room for three more
    checkpoints.save(3, state, wait=True)


def test_what_cannot_be_removed_is_told_and_fails_no_save(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(directory, 1)
    monkeypatch.setattr(shutil, "rmtree", fail)
    checkpoints = Checkpoints(directory, keep_last=1)
    with pytest.warns(RuntimeWarning, match="step 2 has been saved.*the drive is gone"):
        checkpoints.save(2, state_of(2), wait=True)
    assert checkpoints.steps() == [2]
    monkeypatch.undo()
    checkpoints.save(3, state_of(3), wait=True)
    assert files_of(directory) == {"step_00000003"}


def test_a_forked_child_has_no_save_on_its_way(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, hold = Checkpoints(directory), Hold(monkeypatch)
    checkpoints.save(1, state_of(1))
    assert hold.reached.wait(120)
    pid = os.fork()
    if pid == 0:

        def work() -> None:
            monkeypatch.undo()
            checkpoints.wait()
            checkpoints.close()
            assert checkpoints.steps() == []
            assert (directory / ".tensorferry.lock").exists()

        in_child(work)
    assert_exits_with_zero(pid)
    hold.go.set()
    checkpoints.close()
    assert restored(checkpoints) == 1


def test_ctrl_c_while_waiting_leaves_the_save_on_its_way(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, hold = Checkpoints(directory), Hold(monkeypatch)
    checkpoints.save(1, state_of(1))
    assert hold.reached.wait(120)

    def interrupt() -> None:
        assert settled(lambda: threads_in(Checkpoints._wait_for_save) > 0)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = InThread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(2, state_of(2))
    interrupting.result()
    hold.go.set()
    checkpoints.wait()
    assert checkpoints.steps() == [1]


def test_a_signal_handler_that_calls_in_the_middle_of_a_call_is_refused(
    directory: pathlib.Path,
) -> None:
    checkpoints = Checkpoints(directory)

    class Calling:
        def state_dict(self) -> dict[str, Any]:
            checkpoints.wait()
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(RuntimeError, match="signal handler"):
        checkpoints.save(1, {"a": Calling()})
    checkpoints.save(2, state_of(2), wait=True)
    assert files_of(directory) == {"step_00000002"}


def leave_without_waiting(root: str) -> None:
    """Begin a save, and leave."""
    Checkpoints(root).save(1, state_of(1))


def test_a_save_is_made_where_no_thread_can_be_started(directory: pathlib.Path) -> None:
    """As in a container with a limit of processes."""
    checkpoints = Checkpoints(directory)
    with no_new_threads():
        checkpoints.save(1, state_of(1))
    assert checkpoints.steps() == [1]
    checkpoints.close()
    assert restored(checkpoints) == 1


def test_a_save_ends_before_the_interpreter_does(directory: pathlib.Path) -> None:
    child.call(
        f"{__name__}:leave_without_waiting",
        imports=["torch.distributed.checkpoint"],
        root=directory,
    )
    assert restored(Checkpoints(directory)) == 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: Checkpoints("x", keep_last=0), ValueError, "keep_last: 0"),
        (lambda c: Checkpoints("x", keep_last=True), TypeError, "keep_last: True"),
        (lambda c: Checkpoints("x", keep_last=1.5), TypeError, "keep_last: 1.5"),
        (lambda c: Checkpoints("x", keep_every=5), ValueError, "keep_every: 5"),
        (lambda c: Checkpoints("x", keep_last=1, keep_every=0), ValueError, "keep_every: 0"),
        (lambda c: c.save(-1, {}), ValueError, "step: -1"),
        (lambda c: c.save(1.0, {}), TypeError, "step: 1.0"),
        (lambda c: c.save("1", {}), TypeError, "step: '1'"),
        (lambda c: c.save(1, torch.nn.Linear(2, 2)), TypeError, "state: .*Linear"),
        (lambda c: c.save(1, {1: torch.ones(2)}), TypeError, "state: "),
        (lambda c: c.restore([]), TypeError, "state: .*list"),
        (lambda c: c.restore({}, step="1"), TypeError, "step: '1'"),
        (lambda c: c.path("1"), TypeError, "step: '1'"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_done(
    directory: pathlib.Path, call: Callable[[Any], Any], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        call(Checkpoints(directory / "run"))
    assert files_of(directory) == set()


# Kills.


def save_steps(rank: int, root: str, first: int, steps: int, die_at: int | None) -> list[str]:
    """Save steps, keeping two, and kill the process at one call that changes files; return the names of the calls."""
    counted = Steps(die_at)
    counted.install()
    counted_functions = [(pathlib.Path, "rename"), (pathlib.Path, "touch"), (os, "rmdir")]
    for owner, name in [*counted_functions, (os, "unlink")]:
        setattr(owner, name, counted._counted(getattr(owner, name)))
    with Checkpoints(root, keep_last=2) as checkpoints:
        for step in range(first, first + steps):
            checkpoints.save(step, state_of(step))
    return counted.names


def check_folder(root: pathlib.Path, at_least: int) -> int:
    """Check that all listed steps are complete, and that the next save removes all other files; return the newest."""
    checkpoints = Checkpoints(root, keep_last=2)
    steps = checkpoints.steps()
    for step in steps:
        assert restored(checkpoints, step) == step
        assert verify(checkpoints.path(step)).sound
    newest = restored(checkpoints)
    assert newest is not None
    assert newest >= at_least
    checkpoints.save(newest + 1, state_of(newest + 1), wait=True)
    assert files_of(root) == {f"step_{step:08d}" for step in (newest, newest + 1)}
    for step in checkpoints.steps():
        path = checkpoints.path(step)
        assert files_of(path) == {".metadata", *metadata_of(path).tensorferry["files"]}
    return newest


def test_killed_at_any_step_of_saving_and_removing_no_half_checkpoint_counts_and_nothing_stays(
    directory: pathlib.Path,
) -> None:
    save_all(directory / "0", 1, 2, 3, keep_last=2)
    shutil.copytree(directory / "0", directory / "counted")
    [names] = call_on_ranks(1, save_steps, str(directory / "counted"), 4, 2, None)
    removal = range(names.index("rename"), names.index("rmdir") + 2)  # every step of it
    others = [step for step in range(1, len(names)) if step not in removal]
    found = set()
    steps = [0, *removal, *random.Random(f"{SEED} kills").sample(others, 5)]
    for number, die_at in enumerate(steps):
        root = directory / f"k{number}"
        shutil.copytree(directory / "0", root)
        with started(1, save_steps, str(root), 4, 2, die_at) as ranks:
            ranks[0].process.join(120)
            assert ranks[0].process.exitcode == -9, f"step {die_at} of {names}"
        found.add(check_folder(root, 3))
        shutil.rmtree(root)
    assert {3, 4} <= found <= {3, 4, 5}


# Several ranks.


def save_and_restore(rank: int, root: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))

    def state(step: int) -> dict[str, Any]:
        rows = distribute_tensor(torch.full((3000, 50), float(step)), mesh, [Shard(0)])
        return {"rows": rows, "step": step}

    def check(wanted: int) -> None:
        loaded = state(-1)
        assert checkpoints.restore(loaded) == wanted
        assert loaded["step"] == wanted
        assert bool((loaded["rows"].to_local() == wanted).all())

    with Checkpoints(root, keep_last=3) as checkpoints:
        assert checkpoints.restore(state(-1)) is None
        for step in range(1, 6):
            current = state(step)
            checkpoints.save(step, current)
            current["rows"].to_local().fill_(-1)
        check(5)
        assert checkpoints.steps() == [3, 4, 5]
        torch.distributed.barrier()
        if rank == 1:  # of one rank's data alone
            [path] = checkpoints.path(5).glob("__1_*.distcp")
            flip(path, 8 * 100_000)
            [path] = checkpoints.path(4).glob("__0_*.distcp")
            path.unlink()
        torch.distributed.barrier()
        with pytest.warns(RuntimeWarning, match=r"step 4") as warned:
            check(3)
        assert "__1_" in str(warned[0].message)
        for step in (4, 5):
            checkpoints.save(step, state(step))
        check(5)
    assert len(files_of(pathlib.Path(root))) == 3


def test_two_ranks_save_fall_back_and_go_on_together(directory: pathlib.Path) -> None:
    call_on_ranks(2, save_and_restore, str(directory / "run"))


def fail_together(rank: int, root: str) -> None:
    checkpoints = Checkpoints(root)

    class Failing:
        def state_dict(self) -> dict[str, Any]:
            if rank == 1:
                raise ZeroDivisionError("on rank 1")
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if rank == 1:
                raise ZeroDivisionError("on rank 1")

    mine = {str(rank): torch.full((1000,), float(rank))}
    with pytest.raises(ValueError, match=r"different.*\[0, 1\]"):
        checkpoints.save(rank, mine)
    with pytest.raises(ZeroDivisionError):
        checkpoints.save(1, {"a": Failing()})
    checkpoints.save(2, mine)
    checkpoints.wait()
    with pytest.raises(ValueError, match="overwrite"):
        checkpoints.save(2, mine)
    with pytest.raises(ValueError, match="different"):
        checkpoints.restore(mine, step=rank + 2)
    with pytest.raises(FileNotFoundError):
        checkpoints.restore(mine, step=7)
    write = FileSystemWriter.write_data
    if rank == 1:
        FileSystemWriter.write_data = fail  # type: ignore[assignment, method-assign]
    checkpoints.save(3, mine)
    with pytest.raises(OSError, match="the drive is gone"):
        checkpoints.save(4, mine)
    FileSystemWriter.write_data = write  # type: ignore[method-assign]
    checkpoints.save(4, mine)
    state = {str(rank): torch.zeros(1000)}
    assert checkpoints.restore(state) == 4
    assert torch.equal(state[str(rank)], mine[str(rank)])
    if rank == 1:
        checkpoints.steps = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="the drive is gone"):
        checkpoints.restore(state, step=4)
    vars(checkpoints).pop("steps", None)
    with pytest.raises(ZeroDivisionError):
        checkpoints.restore({"a": Failing()})
    checkpoints.close()
    torch.distributed.barrier()
    assert files_of(pathlib.Path(root)) == {"step_00000002", "step_00000004"}


def test_what_fails_on_one_rank_is_raised_on_all(directory: pathlib.Path) -> None:
    call_on_ranks(2, fail_together, str(directory / "run"))


# Another process in the same folder.


def test_another_process_in_the_same_folder_loses_nothing(directory: pathlib.Path) -> None:
    with started(1, save_steps, str(directory), 1001, 8, None) as ranks:
        with Checkpoints(directory) as checkpoints:
            for step in range(1, 9):
                checkpoints.save(step, state_of(step))
        assert ranks[0].answers.poll(60)
        assert ranks[0].answers.recv().failure is None
        ranks[0].process.join(120)
        assert ranks[0].process.exitcode == 0
    # It keeps its own last two steps, and the steps saved after its last removal.
    assert checkpoints.steps()[-2:] == [1007, 1008]
    for step in checkpoints.steps():
        assert restored(checkpoints, step) == step
    save_all(directory, 2000, keep_last=1)
    assert files_of(directory) == {"step_00002000"}


def test_what_an_alive_save_has_begun_is_no_leftover(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, hold = Checkpoints(directory), Hold(monkeypatch)
    alive.save(1, state_of(1))
    assert hold.reached.wait(120)
    monkeypatch.undo()
    save_all(directory, 2, 3)
    assert (directory / "step_00000001").is_dir()
    hold.go.set()
    alive.close()
    assert alive.steps() == [1, 2, 3]
    assert restored(alive, 1) == 1


def test_names_of_what_saves_leave() -> None:
    for name in ("__0_0.distcp", ".tensorferry.lock", f".tensorferry-new-{'0' * 16}.tmp"):
        assert commit.is_save_file(name)
    for name in (".metadata", "__0.metadata", "model.pt", UNFINISHED, ""):
        assert not commit.is_save_file(name)


def test_while_another_process_replaces_the_only_checkpoint_there_is_one(
    directory: pathlib.Path,
) -> None:
    """Otherwise a restore beside it returns None, and a training begins anew without a word."""
    reader, writer = Checkpoints(directory), Checkpoints(directory, keep_last=1)
    writer.save(1, {"x": 1}, wait=True)
    with At(0, str(ROOT / "src"), lambda: None) as moments:
        reader.latest()
    for moment in range(1, moments.count + 1):
        newer = moment + 1
        with At(moment, str(ROOT / "src"), lambda: writer.save(newer, {"x": 1}, wait=True)):  # noqa: B023
            assert reader.latest() in (moment, newer)
