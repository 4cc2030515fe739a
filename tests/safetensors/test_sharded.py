"""Models in several files: the same as those of Hugging Face's libraries, and complete at every moment."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import pathlib
import resource
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.torch
import torch

import safetensors
import tensorferry
from tensorferry.base import processes
from tensorferry.base.file_locks import lock_directory
from tensorferry.checkpoint import verify
from tensorferry.safetensors import sharded
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.plans import load_files
from tensorferry.safetensors.sharded import INDEX_NAME, save_sharded
from tensorferry.safetensors.torch import load_file
from tests.safetensors.files import (
    Tied,
    assert_readers_agree,
    descriptors_of,
    failed_at,
    killed_at,
    loaded,
)
from tests.support.faultfs import Fault
from tests.support.leaks import settled
from tests.support.ranks import files_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.faultfs import FaultFS
    from tests.support.power_cuts import Cut

    State = dict[str, torch.Tensor]

MIB = 1 << 20


def random_state(seed: int, *nbytes: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"t{k}": torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
        for k, size in enumerate(nbytes)
    }


def assert_model(directory: pathlib.Path, state: State) -> None:
    assert_equal(loaded(directory), state)


def names_of(count: int) -> list[str]:
    return [f"model-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]


def test_a_model_is_split_as_huggingface_splits_it(directory: pathlib.Path) -> None:
    # The example in huggingface_hub's documentation, and a tensor that is too large.
    state = random_state(1, 6000, 6000, 2000, 6000, 2000, 2000, 11000)
    weights = save_sharded(state, directory, "10KB", {"made": "by a test"})
    files = names_of(4)
    assert [weights[name] for name in state] == [files[k] for k in (0, 1, 1, 3, 3, 3, 2)]
    index = json.loads((directory / INDEX_NAME).read_text())
    assert index == {"metadata": {"total_size": 35000}, "weight_map": weights}
    assert files_of(directory) == {INDEX_NAME, *files}
    assert_model(directory, state)
    with safetensors.safe_open(directory / files[0], "pt") as file:
        assert file.metadata() == {"format": "pt", "made": "by a test"}


def test_a_model_that_fits_one_file_has_no_index(directory: pathlib.Path) -> None:
    state, path = random_state(1, 600, 700), directory / "new" / "model"
    assert save_sharded(state, path) == dict.fromkeys(state, "model.safetensors")
    assert files_of(path) == {"model.safetensors"}
    save_sharded({}, directory / "empty")
    assert loaded(directory / "empty") == {}


@pytest.mark.parametrize(
    "view",
    [torch.t, torch.conj, lambda whole: whole[:1], lambda whole: whole.view(torch.float64)],
    ids=["transposed", "conjugated", "a part", "of another dtype"],
)
def test_other_views_of_a_saved_tensor_are_refused_and_not_lost(
    directory: pathlib.Path, view: Any
) -> None:
    whole = torch.arange(4.0).view(2, 2) * (1 + 2j)
    with pytest.raises(RuntimeError, match="different views"):
        save_sharded({"a": whole, "b": view(whole)}, directory)
    assert files_of(directory) == set()
    save_sharded({"a": whole, "b": view(whole).clone()}, directory)
    assert torch.equal(loaded(directory)["b"], view(whole))


def test_tied_weights_are_saved_once(directory: pathlib.Path) -> None:
    save_sharded(Tied(strided=True).state_dict(), directory)
    with safetensors.safe_open(directory / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "second.weight": "first.weight"}
        assert "second.weight" not in file.keys()  # noqa: SIM118 (a file is not a dict)


@pytest.mark.parametrize("limit", [0, -1, "5", "5XB", "xGB", "0GB", "infGB", True, 1.5])
def test_a_size_that_is_none_is_refused(directory: pathlib.Path, limit: Any) -> None:
    with pytest.raises(ValueError, match="max_shard_nbytes"):
        save_sharded({}, directory / "new", limit)
    assert files_of(directory) == set()


def test_more_files_than_can_be_open_are_refused(directory: pathlib.Path) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    state = {str(k): np.zeros(2, "u1") for k in range(limit + 1)}
    with pytest.raises(ValueError, match="files, and this process may write"):
        save_sharded(state, directory, 2)
    assert files_of(directory) == set()


@pytest.mark.parametrize("before", ["1KB", "2KB", "1GB"])
@pytest.mark.parametrize("after", ["1KB", "2KB", "1GB"])
def test_a_model_takes_the_place_of_another(
    directory: pathlib.Path, before: str, after: str
) -> None:
    (directory / "config.json").write_text("{}")
    (directory / "adapter.safetensors").write_text("a user's")
    save_sharded(random_state(1, *[900] * 5), directory, before)
    new = random_state(2, *[900] * 5)
    weights = save_sharded(new, directory, after)
    assert_model(directory, new)
    others = {"config.json", "adapter.safetensors", *([INDEX_NAME] if after != "1GB" else [])}
    assert files_of(directory) == {*weights.values(), *others}


def test_an_index_has_nothing_removed_that_is_not_beside_it(directory: pathlib.Path) -> None:
    outside, model = directory / "outside.safetensors", directory / "model"
    outside.write_text("precious")
    model.mkdir()
    (model / "config.json").write_text("{}")
    names = ["../outside.safetensors", str(outside), "config.json", "..", "sub/x.safetensors"]
    text = {"metadata": {}, "weight_map": {str(k): name for k, name in enumerate(names)}}
    (model / INDEX_NAME).write_text(json.dumps(text))
    save_sharded(random_state(1, 100), model)
    assert outside.read_text() == "precious"
    assert files_of(model) == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_an_index_that_is_none_is_replaced(directory: pathlib.Path, text: str) -> None:
    (directory / INDEX_NAME).write_text(text)
    state = random_state(1, 900, 900)
    save_sharded(state, directory, "1KB")
    assert_model(directory, state)


def damage_index(directory: pathlib.Path) -> None:
    save_sharded(random_state(1, *[900] * 3), directory, "1KB")
    os.truncate(directory / INDEX_NAME, 10)


BEFORE: dict[str, Callable[[pathlib.Path], object]] = {
    "nothing": lambda _: None,
    "one file": lambda path: save_sharded(random_state(1, *[900] * 3), path),
    "several files": lambda path: save_sharded(random_state(1, *[900] * 3), path, "1KB"),
    "files with a token": lambda path: [
        save_sharded(random_state(seed, *[900] * 3), path, "1KB") for seed in (0, 1)
    ],
    "a damaged index": damage_index,
}


@pytest.mark.parametrize("limit", ["1KB", "1GB"], ids=["to several files", "to one file"])
@pytest.mark.parametrize("ends", [killed_at, failed_at], ids=["killed", "failed"])
@pytest.mark.parametrize("before", BEFORE)
def test_at_every_step_there_is_the_old_model_or_the_new_one(
    directory: pathlib.Path, before: str, ends: Any, limit: str
) -> None:
    """For transformers' rule and for our readers; and the next save is complete and leaves no file behind."""
    old, new = random_state(1, *[900] * 3), random_state(2, *[900] * 3)
    for step in itertools.count():
        folder = directory / str(step)
        folder.mkdir()
        BEFORE[before](folder)
        has_ended = ends(step, lambda folder=folder: save_sharded(new, folder, limit))
        if before in ("nothing", "a damaged index"):
            with contextlib.suppress(SafetensorError, OSError):
                assert_equal(load_files(folder), new)
        else:
            found = loaded(folder)
            assert_equal(found, new if torch.equal(found["t0"], new["t0"]) else old)
            assert_equal(load_files(folder), found)
        last = random_state(3, *[900] * 2)
        weights = save_sharded(last, folder, ("1GB", "1KB")[step % 2])
        assert_model(folder, last)
        assert_equal(load_files(folder), last)
        # Without an index, or once the index has been replaced, nothing tells of files with the usual names.
        lost = 0 if before in ("one file", "files with a token") else 3
        index = {INDEX_NAME} - ({INDEX_NAME} if "model.safetensors" in weights.values() else set())
        assert files_of(folder) - {*weights.values(), *index} <= {*names_of(lost)}
        if not has_ended:
            break
    assert step >= 1


def assert_equal(found: Any, expected: State) -> None:
    found = dict(found)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def refuse_to_open(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    opens = tensorferry.open

    def refuses(path: Any, *arguments: Any, **options: Any) -> Any:
        if str(path).endswith(name):
            raise tensorferry.StorageError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return opens(path, *arguments, **options)

    monkeypatch.setattr(tensorferry, "open", refuses)


def test_an_old_model_that_cannot_be_read_now_is_kept(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many files are open, for example: without its names, it would be replaced file by file."""
    old, new = random_state(1, *[900] * 3), random_state(2, *[900] * 3)
    save_sharded(old, directory, "1KB")
    files = files_of(directory)
    with monkeypatch.context() as patch:
        refuse_to_open(patch, INDEX_NAME)
        with pytest.raises(tensorferry.StorageError, match="Too many open files"):
            save_sharded(new, directory, "1KB")
    assert files_of(directory) == files
    assert_model(directory, old)
    save_sharded(new, directory, "1KB")
    assert_model(directory, new)


def test_a_save_waits_for_another_ones_names(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = random_state(1, 900, 900), random_state(2, 900, 900)
    save_sharded(old, directory, "1KB")
    monkeypatch.setattr(sharded, "_MAX_WAIT_SECONDS", 0)
    with sharded._exclusive(directory):
        with pytest.raises(tensorferry.StorageError, match="another save"):
            save_sharded(new, directory, "1KB")
        assert_model(directory, old)
        assert files_of(directory) == {INDEX_NAME, *names_of(2)}
        if (child := os.fork()) == 0:
            os._exit(len(processes.lock_descriptors))
        assert os.waitpid(child, 0)[1] == 0
        other = os.open(directory, os.O_RDONLY)
        assert lock_directory(other) is False
        os.close(other)
    save_sharded(new, directory, "1KB")
    assert_model(directory, new)


def test_checksums_of_the_old_model_go_with_it(directory: pathlib.Path) -> None:
    save_sharded(random_state(1, 900, 900), directory, "1KB")
    assert len(verify(directory, write_checksums=True).written) == 2
    save_sharded(random_state(2, 900, 901), directory, "1KB")
    report = verify(directory, write_checksums=True)
    assert report.sound
    assert len(report.written) == 2
    save_sharded(random_state(2, 900), directory)
    assert files_of(directory) == {"model.safetensors"}


def test_a_model_that_is_dropped_keeps_no_descriptors(directory: pathlib.Path) -> None:
    model = sharded.Model(directory, sync=False)
    with model.add("a.safetensors", 10) as file:
        file.write_bytes(b"0123456789")
    del model, file
    assert settled(lambda: descriptors_of(directory) == 0)
    assert files_of(directory) == set()


def test_without_links_one_file_keeps_its_own_name(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    save_sharded(random_state(1, 900, 900), directory, "1KB")
    monkeypatch.setattr(pathlib.Path, "hardlink_to", refuse)
    state = random_state(2, 900, 900)
    [name] = set(save_sharded(state, directory).values())
    assert files_of(directory) == {INDEX_NAME, name}
    assert_model(directory, state)
    assert_readers_agree(directory, state)


@pytest.mark.parametrize("before", ["1MB", "5GB"], ids=["over several files", "over one file"])
@pytest.mark.parametrize("size", ["1MB", "5GB"], ids=["several files", "one file"])
@pytest.mark.parametrize("cut", ["ext4"], indirect=True)
def test_a_power_cut_after_a_synced_save_loses_nothing(cut: Cut, before: str, size: str) -> None:
    directory = pathlib.Path("a", "new")
    save_sharded(random_state(2, MIB, MIB), cut.path / directory, before, sync=True)
    state = random_state(1, MIB, MIB)
    save_sharded(state, cut.path / directory, size, sync=True)
    with cut.now() as after:
        assert_model(after / directory, state)
        assert files_of(after / directory) == files_of(cut.path / directory)


def test_a_weight_behind_a_link_is_as_durable_as_others(
    faultfs: FaultFS, directory: pathlib.Path
) -> None:
    """The new file gets the name of the link's target, as in Hugging Face's cache."""
    blob = faultfs.path / "0123"
    blob.write_bytes(b"old")
    (directory / "model.safetensors").symlink_to(blob)
    faultfs.clear()
    save_sharded({"a": torch.ones(1000)}, directory, sync=True)
    assert faultfs.requests("fsyncdir")
    assert load_file(blob)["a"].sum() == 1000


def test_a_directory_that_may_not_last_is_not_kept(faultfs: FaultFS) -> None:
    """Otherwise a later save that finds the directory would consider its name durable."""
    directory = faultfs.path / "new" / "model"
    for names_before in range(2):
        faultfs.order(Fault("fsyncdir", skip=names_before, times=1, error=errno.EIO))
        with pytest.raises(OSError, match="Input/output error"):
            save_sharded({"a": torch.ones(1000)}, directory, sync=True)
        assert not directory.exists()
    faultfs.clear()
    save_sharded({"a": torch.ones(1000)}, directory, sync=True)
    synced = [request.name for request in faultfs.requests("fsyncdir")]
    assert synced[0] == "new"
