"""Crashes at any moment of a save: the directory holds either the complete old or the complete new checkpoint."""

from __future__ import annotations

import random
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry.checkpoint import FileSystemWriter
from tests.checkpoint.states import assert_same, load, metadata_of, mixed_state, save, steps_in
from tests.checkpoint.steps import Steps
from tests.support import mounts
from tests.support.data import SEED
from tests.support.effort import examples
from tests.support.ranks import call_on_ranks, files_of, started

if TYPE_CHECKING:
    import pathlib

RANKS = 2
KILLS = examples(20)
OLD, NEW = 1, 2
SHAPES = [((1 << 20) + 5,), (300, 7), (1,), (0, 3)]  # the first needs two buffers

# How a save looks depends on these, and so do its steps.
LAYOUTS: list[dict[str, Any]] = [{}, {"thread_count": 2}, {"single_file_per_rank": False}]


def state_of(rank: int, step: int) -> dict[str, Any]:
    """Return the state that a rank saves; every value holds the step."""
    tensors = {f"{rank}.{k}": torch.full(shape, float(step)) for k, shape in enumerate(SHAPES)}
    return {**tensors, "common": torch.full((50,), float(step)), "step": {"number": step}}


def save_step(
    rank: int, directory: str, step: int, layout: dict[str, Any], die_at: int | None
) -> int:
    """Save on this rank, and kill the process at one of the steps; return the number of steps."""
    steps = Steps(die_at)
    steps.install()
    writer = FileSystemWriter(directory, **layout)
    dcp.save(state_of(rank, step), storage_writer=writer)
    return len(steps.names)


def save_by_torch(rank: int, directory: str) -> None:
    dcp.save(state_of(rank, OLD), storage_writer=dcp.FileSystemWriter(directory, thread_count=2))


def save_dying(
    rank: int, directory: str, layout: dict[str, Any], victim: int, die_at: int | None
) -> None:
    save_step(rank, directory, NEW, layout, die_at if rank == victim else None)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Checkpoints of before: torch's, and ours in each layout."""
    base = tmp_path_factory.mktemp("old")
    call_on_ranks(RANKS, save_by_torch, str(base / "torch"))
    for number, layout in enumerate(LAYOUTS):
        call_on_ranks(RANKS, save_step, str(base / str(number)), OLD, layout, None)
    return base


Counts = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def step_counts(old: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Counts:
    """Return the number of steps of each rank, by the previous checkpoint and the layout."""
    counts: Counts = {}
    for number, layout in enumerate(LAYOUTS):
        for before in ("torch", str(number)):
            directory = tmp_path_factory.mktemp("counted") / "checkpoint"
            shutil.copytree(old / before, directory)
            arguments = (str(directory), NEW, layout, None)
            counts[before, number] = call_on_ranks(RANKS, save_step, *arguments)
            assert step_in(directory) == NEW
    return counts


def test_killed_saves_leave_the_old_checkpoint_or_the_new_one(
    tmpfs_directory: pathlib.Path, old: pathlib.Path, step_counts: Counts
) -> None:
    found = set()
    for seed in range(KILLS):
        choices = random.Random(f"{SEED} {seed}")
        before, layout = choices.choice(list(step_counts))
        victim = choices.randrange(RANKS)
        die_at = choices.randrange(step_counts[before, layout][victim])
        checkpoint = tmpfs_directory / str(seed)  # a killed process does not lose written data
        shutil.copytree(old / before, checkpoint)
        arguments = (str(checkpoint), LAYOUTS[layout], victim, die_at)
        with started(RANKS, save_dying, *arguments) as ranks:
            ranks[victim].process.join(120)
            assert ranks[victim].process.exitcode == -9, f"seed {seed} was not killed"
        found.add(checked(checkpoint, f"seed {seed}: {arguments}, over {before}"))
        shutil.rmtree(checkpoint)
    assert OLD in found
    assert found <= {OLD, NEW}


def test_the_save_after_a_killed_one_leaves_nothing_of_it(
    directory: pathlib.Path, old: pathlib.Path
) -> None:
    checkpoint = directory / "checkpoint"
    shutil.copytree(old / "torch", checkpoint)
    for die_at in (3, 9, 12):
        with started(RANKS, save_dying, str(checkpoint), {}, 1, die_at) as ranks:
            ranks[1].process.join(120)
            assert ranks[1].process.exitcode == -9
    assert len(files_of(checkpoint)) > 1 + 2 * RANKS
    assert step_in(checkpoint) == OLD
    call_on_ranks(RANKS, save_step, str(checkpoint), NEW, {}, None)
    assert step_in(checkpoint) == NEW
    assert len(files_of(checkpoint)) == 1 + RANKS


@pytest.mark.parametrize(
    ("over", "flushed"),
    [("nothing", False), ("torch", False), ("ours", False), ("ours", True)],
    ids=["over nothing", "over torch's", "over ours", "over ours, all flushed"],
)
def test_a_power_cut_at_any_step_of_the_commit_leaves_one_checkpoint_whole_and_after_it_the_new_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, over: str, flushed: bool
) -> None:
    cuts: list[pathlib.Path] = []
    with mounts.ext4(tmp_path, 64 << 20) as mount:
        # The journal is not committed automatically during the test, so only synced data survive a power cut.
        subprocess.run(["mount", "-o", "remount,commit=3000", str(mount)], check=True)
        checkpoint = mount / "new" / "checkpoint"
        if over == "torch":
            writer = dcp.FileSystemWriter(checkpoint, thread_count=2)
            dcp.save(mixed_state(OLD), storage_writer=writer, no_dist=True)
        elif over == "ours":
            save(mixed_state(OLD), checkpoint)
        subprocess.run(["sync", "-f", str(mount)], check=True)

        class Cuts(Steps):
            """Keeps an image of the drive after a power cut at each step."""

            def step(self, name: str) -> None:
                if flushed:
                    subprocess.run(["sync", "-f", str(mount)], check=True)
                cuts.append(tmp_path / f"cut{len(cuts)}.img")
                copy = ["cp", "--sparse=always", str(mount.with_suffix(".img")), str(cuts[-1])]
                subprocess.run(copy, check=True)

        class Cut(FileSystemWriter):
            def finish(self, metadata: Any, results: Any) -> None:
                Cuts().install(monkeypatch.setattr)
                super().finish(metadata, results)

        dcp.save(mixed_state(NEW), storage_writer=Cut(checkpoint), no_dist=True)
        monkeypatch.undo()
        Cuts().step("all done")
        names = files_of(checkpoint)
    found = []
    for cut in cuts:
        with mounts.mounted(tmp_path / "after", "-o", "loop", str(cut)) as after:
            survived = after / "new" / "checkpoint"
            found.append(whole_step_in(survived))
            lost = names - files_of(survived) if found[-1] == NEW else names
        cut.unlink()
    before = 0 if over == "nothing" else OLD
    assert found == sorted(found)
    assert set(found) == {before, NEW}, found
    assert not lost
    assert found.count(NEW) > 2  # files of before are removed after the rename


def checked(checkpoint: pathlib.Path, what: str) -> int:
    """Return the step of the one checkpoint that the directory holds whole."""
    try:
        return step_in(checkpoint)
    except Exception as error:
        raise AssertionError(f"{what}: {sorted(files_of(checkpoint))}") from error


def step_in(checkpoint: pathlib.Path) -> int:
    """Load everything with torch's reader, and return the one step that every value has."""
    state: dict[str, Any] = {}
    for rank in range(RANKS):
        state |= state_of(rank, -1)
    dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    (step,) = steps_in(state)
    return int(step)


def whole_step_in(checkpoint: pathlib.Path) -> int:
    """Return the step of the complete mixed state in a directory, 0 if it has no checkpoint."""
    if not (checkpoint / ".metadata").exists():
        return 0
    loaded = load(checkpoint, mixed_state())
    step = int(loaded["nested"]["step"])
    assert_same(loaded, mixed_state(step))
    files = getattr(metadata_of(checkpoint), "tensorferry", {"files": {}})["files"]
    assert all((checkpoint / name).stat().st_size == nbytes for name, (nbytes, _) in files.items())
    return step
