"""Sequences of saves and loads that fail in any hook, in changing working directories, with writers that are kept.

The model is a set of checkpoints: a save that succeeds replaces the one in its folder, and a save that fails changes
nothing. Torch's own writer makes the same calls, where it does not destroy the checkpoint before.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tensorferry.checkpoint import FileSystemReader, FileSystemWriter, Stager
from tests.checkpoint.states import done, metadata_of, takes_stagers
from tests.support.data import SEED
from tests.support.effort import examples
from tests.support.ranks import call_on_ranks, files_of

PLANNING = ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan"]
PATHS = ["one", "two", "deeper/three", None]


class FailingSave(dcp.DefaultSavePlanner):
    """Fails in one of its calls, if any is named."""

    def __init__(self, fails_in: str | None) -> None:
        super().__init__()
        self._fails_in = fails_in

    def _enter(self, call: str) -> None:
        if call == self._fails_in:
            raise ZeroDivisionError(call)

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self._enter("set_up_planner")
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> Any:
        self._enter("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        self._enter("create_global_plan")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: Any) -> Any:
        self._enter("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        self._enter("resolve_data")
        return super().resolve_data(write_item)


class FailingLoad(dcp.DefaultLoadPlanner):
    """Fails in one of its calls, if any is named."""

    def __init__(self, fails_in: str | None) -> None:
        super().__init__()
        self._fails_in = fails_in

    def create_local_plan(self) -> Any:
        if self._fails_in in PLANNING:
            raise ZeroDivisionError(self._fails_in)
        return super().create_local_plan()

    def resolve_tensor(self, read_item: Any) -> Any:
        if self._fails_in == "resolve_data":
            raise ZeroDivisionError(self._fails_in)
        return super().resolve_tensor(read_item)


class World:
    """Folders in which our classes, or torch's, save and load; and the model of what each folder has."""

    def __init__(self, root: pathlib.Path, writer: Any, choices: random.Random) -> None:
        self.root, self.kind, self.choices = root, writer, choices
        self.model: dict[str, float] = {}
        self.step = 0.0
        self.kept: list[Any] = []  # exceptions, whose tracebacks refer to writers and states
        self.stager = Stager()
        for name in ("here", "there"):
            (root / name).mkdir(parents=True)
        os.chdir(root / "here")
        self.writer = writer(root / "first")
        self.sticky = "first"

    def draw(self) -> dict[str, Any]:
        """Choose an operation; the same sequence of choices for our classes and torch's."""
        return {
            "folder": self.choices.choice(["here", "there"]),
            "path": self.choices.choice(PATHS),
            "is_absolute": self.choices.random() < 0.3,
            "fails_in": self.choices.choice([None, None, None, *PLANNING, "resolve_data"]),
            "how": self.choices.choice(["save", "save", "async", "stager", "load"]),
            "other": self.choices.random() < 0.3,
            "new": self.choices.random() < 0.1,
        }

    def run(self, operation: dict[str, Any]) -> None:
        os.chdir(self.root / operation["folder"])
        path, fails_in = operation["path"], operation["fails_in"]
        name = self.sticky if path is None else f"{operation['folder']}/{path}"
        # A path that torch's writer keeps stays relative, to the directory of later saves.
        is_absolute = operation["is_absolute"] or self.kind is dcp.FileSystemWriter
        given = path if path is None or not is_absolute else self.root / name
        if operation["new"]:
            self.sticky = f"{operation['folder']}/new"
            self.writer = self.kind(self.root / self.sticky if is_absolute else pathlib.Path("new"))
            name = self.sticky if path is None else name
        if operation["how"] == "load":
            self.load(name, fails_in)
            return
        self.step += 1
        self.sticky = name
        state = {"a": torch.full((1000,), self.step), "step": self.step}
        options: dict[str, Any] = {"storage_writer": self.writer, "checkpoint_id": given}
        try:
            self.save(state, operation, options)
        except BaseException as error:
            self.kept.append(error)
            if fails_in is None or fails_in not in repr(getattr(error, "failures", error)):
                raise
        else:
            assert fails_in is None
            self.model[name] = self.step

    def save(self, state: Any, operation: dict[str, Any], options: dict[str, Any]) -> None:
        options |= {"planner": FailingSave(operation["fails_in"]), "no_dist": True}
        if operation["how"] == "save":
            dcp.save(state, **options)
            return
        if operation["how"] == "stager" and not takes_stagers.args[0]:
            options["async_stager"] = self.stager
        saving = dcp.async_save(state, **options)
        if operation["other"] and self.kind is FileSystemWriter:
            os.chdir(self.root)  # the call has returned
        state["a"].zero_()
        done(saving)

    def load(self, name: str, fails_in: str | None) -> None:
        if name not in self.model:
            return
        reader, state = FileSystemReader(self.root / name), {"a": torch.zeros(1000)}
        self.kept.append(reader)
        with contextlib.suppress(dcp.api.CheckpointException):
            dcp.load(state, storage_reader=reader, planner=FailingLoad(fails_in), no_dist=True)
            assert state["a"].unique().tolist() == [self.model[name]]
            return
        assert fails_in is not None

    def check(self) -> None:
        """Compare the folders with the model; a folder has nothing but its checkpoint."""
        for name, step in self.model.items():
            state = {"a": torch.zeros(1000), "step": 0.0}
            dcp.load(state, storage_reader=dcp.FileSystemReader(self.root / name), no_dist=True)
            assert (state["a"].unique().tolist(), state["step"]) == ([step], step), name
        found = {path.parent for path in self.root.rglob(".metadata")}
        assert {str(path.relative_to(self.root)) for path in found} == self.model.keys()
        if self.kind is FileSystemWriter:
            for path in self.root.rglob("*.distcp"):
                infos = metadata_of(path.parent).storage_data.values()
                assert path.name in {info.relative_path for info in infos}, path


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("number", range(examples(8)))
def test_any_sequence_of_saves_and_loads_leaves_what_the_model_has(
    tmp_path: pathlib.Path, number: int, monkeypatch: pytest.MonkeyPatch, unlogged: None
) -> None:
    monkeypatch.chdir(tmp_path)
    worlds = []
    for kind in (FileSystemWriter, dcp.FileSystemWriter):
        world = World(tmp_path / kind.__module__, kind, random.Random(f"{SEED} {number}"))
        for _ in range(15):
            operation = world.draw()
            if kind is dcp.FileSystemWriter and operation["fails_in"] == "resolve_data":
                operation["fails_in"] = "finish_plan"  # torch's writer destroys the old checkpoint
            world.run(operation)
            if kind is FileSystemWriter:
                world.check()
        world.check()
        worlds.append(world.model)
    assert worlds[0] == worlds[1]


@takes_stagers
@pytest.mark.parametrize("first", ["one", None])
@pytest.mark.parametrize("second", ["two", None])
def test_a_save_in_the_background_goes_where_its_call_said(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, first: str | None, second: str | None
) -> None:
    """It begins when the writer has been given another folder, and the process another working directory."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    held = threading.Event()

    class Held:
        """A value of which the copy takes its time."""

        def __deepcopy__(self, memo: Any) -> str:
            assert held.wait(60)
            return "copied"

    writer, stager = FileSystemWriter("zero"), Stager(overlap=True)
    saving: Any = dcp.async_save(
        {"a": torch.ones(3), "held": Held()},
        checkpoint_id=first,
        storage_writer=writer,
        async_stager=stager,
        no_dist=True,
    )
    monkeypatch.chdir(tmp_path / "there")
    dcp.save({"a": torch.zeros(3)}, checkpoint_id=second, storage_writer=writer, no_dist=True)
    held.set()
    done(saving)
    wanted = {tmp_path / "here" / (first or "zero"): 1.0}
    other = tmp_path / "there" / second if second else tmp_path / "here" / "zero"
    wanted = {other: 0.0} | wanted
    for path, value in wanted.items():
        state = {"a": torch.full((3,), 5.0)}
        dcp.load(state, storage_reader=FileSystemReader(path), no_dist=True)
        assert state["a"].tolist() == [value] * 3
    assert {path.parent for path in tmp_path.rglob(".metadata")} == wanted.keys()


@takes_stagers
def test_the_folder_of_a_failed_save_is_not_that_of_a_later_one(tmp_path: pathlib.Path) -> None:
    writer, state = FileSystemWriter(tmp_path / "zero"), {"a": torch.ones(3)}
    options: dict[str, Any] = {"storage_writer": writer, "no_dist": True}
    planner = FailingSave("create_local_plan")
    with pytest.raises(dcp.api.CheckpointException):
        dcp.save(state, checkpoint_id=tmp_path / "one", planner=planner, **options)
    done(dcp.async_save(state, checkpoint_id=tmp_path / "two", async_stager=Stager(), **options))
    dcp.save({"a": torch.zeros(3)}, **options)
    dcp.load(state, storage_reader=FileSystemReader(tmp_path / "two"), no_dist=True)
    assert state["a"].tolist() == [0.0] * 3
    assert not (tmp_path / "one").exists()


def save_with_failures_of_one_rank(rank: int, root: str, seed: str) -> list[str]:
    """Save again and again with writers that are kept; one rank or none fails, in a call of the planner."""
    choices, model, kept = random.Random(seed), {}, []
    writers = [FileSystemWriter(f"{root}/{k}") for k in range(2)]
    for step in range(12):
        writer, path = choices.choice(writers), f"{root}/{choices.choice('abc')}"
        call = choices.choice([None, None, *PLANNING, "resolve_data"])
        failing = 0 if call == "create_global_plan" else choices.randrange(2)
        name = f"rank {rank}"
        state = {"same": torch.full((100,), float(step)), name: torch.full((50,), float(step))}
        planner = FailingSave(call if rank == failing else None)
        try:
            dcp.save(state, checkpoint_id=path, storage_writer=writer, planner=planner)
        except BaseException as error:
            kept.append(error)
            if call is None or call not in repr(getattr(error, "failures", error)):
                raise
        else:
            assert call is None
            model[path] = float(step)
        dist.barrier()
        for saved, value in model.items():
            found = {"same": torch.zeros(100), name: torch.zeros(50)}
            dcp.load(found, storage_reader=FileSystemReader(saved))
            assert all(each.unique().tolist() == [value] for each in found.values())
        dist.barrier()
    # A save of each writer's thread removes what a failed one has left.
    dcp.save(state, checkpoint_id=f"{root}/last", storage_writer=writers[0])
    for saved in [*model, f"{root}/last"]:
        dcp.save(state, checkpoint_id=saved, storage_writer=writers[0])
    dist.barrier()
    return [f"{saved}/{name}" for saved in model for name in files_of(pathlib.Path(saved))]


@pytest.mark.parametrize("number", range(examples(3)))
def test_ranks_that_fail_alone_lose_nothing_and_leave_nothing(
    tmp_path: pathlib.Path, number: int
) -> None:
    answers = call_on_ranks(2, save_with_failures_of_one_rank, str(tmp_path), f"{SEED} {number}")
    assert all(len(set(each)) % 3 == 0 for each in answers), answers  # two files and the metadata
