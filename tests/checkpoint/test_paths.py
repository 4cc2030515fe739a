"""Paths are resolved at the call, so a later change of directory has no effect; URLs are not taken for folders."""

from __future__ import annotations

import functools
import os
import pathlib
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tensorferry
from tensorferry.base.checks import is_url
from tensorferry.checkpoint import (
    Checkpoints,
    FileSystemReader,
    FileSystemWriter,
    FileWriter,
    install,
    load,
    save,
    uninstall,
    verify,
)
from tensorferry.checkpoint.tools import entries
from tensorferry.safetensors import safe_open
from tensorferry.safetensors.saving import save_file
from tensorferry.safetensors.sharded import save_sharded
from tensorferry.store import TensorStore
from tests.checkpoint.damage import flip
from tests.checkpoint.states import done

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STATE = {"w": torch.arange(1000.0)}


@pytest.fixture(autouse=True)
def here(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Return the current directory of the calls; "elsewhere" is another one next to it."""
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def leave() -> None:
    os.chdir("../elsewhere")


def hugging_face() -> Any:
    return pytest.importorskip("tensorferry.checkpoint.storage.huggingface")


def save_by(writer: Any) -> None:
    dcp.save(STATE, storage_writer=writer, no_dist=True)


def loaded_by(reader: Any) -> None:
    state = {"w": torch.zeros(1000)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert torch.equal(state["w"], STATE["w"])


def reset(made: Any) -> Any:
    made.reset("saved")
    return made


WRITERS: dict[str, Callable[[], Callable[[], object]]] = {
    "writer": lambda: _then(save_by, FileSystemWriter("saved")),
    "reset writer": lambda: _then(save_by, reset(FileSystemWriter("other"))),
    "Hugging Face's": lambda: _then(save_by, hugging_face().HuggingFaceStorageWriter("saved")),
    "reset Hugging Face's": lambda: _then(
        save_by, reset(hugging_face().HuggingFaceStorageWriter("other"))
    ),
    "Checkpoints": lambda: _then(
        lambda each: each.save(1, STATE, wait=True), Checkpoints(pathlib.Path("saved"))
    ),
    "FileWriter": lambda: _then(lambda each: each.close(), FileWriter("saved")),
    "store": lambda: _then(
        lambda each: (each.write("w", STATE["w"]), each.commit()),
        TensorStore("saved", temporary=False),
    ),
    "handle": lambda: _then(lambda each: each.wait(), _validating()),
}


def _then(use: Callable[[Any], object], made: Any) -> Callable[[], object]:
    return lambda: use(made)


def _validating() -> Any:
    """A handle that compares with the file when it is waited for."""
    handle = tensorferry.aio_handle()
    handle.pwrite(STATE["w"], "saved", True, True)
    return handle


@pytest.mark.parametrize("name", WRITERS)
def test_what_was_made_before_the_directory_changed_writes_where_it_was_said(
    here: pathlib.Path, name: str
) -> None:
    finish = WRITERS[name]()
    leave()
    finish()
    assert (here / "saved").exists()
    assert not list(pathlib.Path.cwd().iterdir())


def test_what_was_made_before_the_directory_changed_reads_what_it_was_said(
    here: pathlib.Path,
) -> None:
    storage = hugging_face()
    save_by(FileSystemWriter("saved"))
    save_by(storage.HuggingFaceStorageWriter("model"))
    readers = [
        FileSystemReader("saved"),
        reset(FileSystemReader("other")),
        storage.HuggingFaceStorageReader("model"),
    ]
    checkpoints = Checkpoints("steps")
    checkpoints.save(1, STATE, wait=True)
    opened = safe_open("model/model-00001-of-00001.safetensors", "pt")
    leave()
    for reader in readers:
        loaded_by(reader)
    assert checkpoints.restore({"w": torch.zeros(1000)}) == 1
    assert torch.equal(opened.get_tensor("w"), STATE["w"])


class Held:
    """Delays saves, before they use their arguments, until the current directory has changed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any = FileSystemWriter) -> None:
        self.go = threading.Event()
        for name in ("reset", "prepare_local_plan"):
            self._hold(owner, name, monkeypatch)

    def _hold(self, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        method = getattr(owner, name)

        def held(*arguments: Any) -> Any:
            assert self.go.wait(120)
            return method(*arguments)

        monkeypatch.setattr(owner, name, held)


@pytest.fixture
def by_default() -> Iterator[None]:
    install()
    yield
    uninstall()


def begin_by_default() -> Any:
    return dcp.async_save(STATE, checkpoint_id="saved", no_dist=True)


def begin_with_both() -> Any:
    writer = FileSystemWriter("other")
    return dcp.async_save(STATE, checkpoint_id="saved", storage_writer=writer, no_dist=True)


def begin_with_a_writer() -> Any:
    return dcp.async_save(STATE, storage_writer=FileSystemWriter("saved"), no_dist=True)


def begin_with_checkpoints() -> Any:
    checkpoints = Checkpoints("saved")
    checkpoints.save(1, STATE)
    return checkpoints


@pytest.mark.usefixtures("by_default")
@pytest.mark.parametrize(
    "begin", [begin_by_default, begin_with_both, begin_with_a_writer, begin_with_checkpoints]
)
def test_a_save_in_the_background_stays_where_it_was_begun(
    here: pathlib.Path, monkeypatch: pytest.MonkeyPatch, begin: Callable[[], Any]
) -> None:
    held = Held(monkeypatch)
    saving = begin()
    leave()
    held.go.set()
    if begin is begin_with_checkpoints:
        saving.close()
        assert saving.steps() == [1]
    else:
        done(saving)
        assert (here / "saved" / ".metadata").exists()
    assert not list(pathlib.Path.cwd().iterdir())


@pytest.mark.parametrize("kind", ["torch's", "hugging face's"])
def test_a_save_in_the_background_that_resets_its_writer_stays_where_it_was_begun(
    here: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Without install(), the thread that saves is the first of our code to get the folder."""
    owner = FileSystemWriter if kind == "torch's" else hugging_face().HuggingFaceStorageWriter
    held = Held(monkeypatch, owner)
    writer = owner("other")
    saving = dcp.async_save(STATE, checkpoint_id="saved", storage_writer=writer, no_dist=True)
    leave()
    held.go.set()
    done(saving)
    assert any((here / "saved").iterdir())
    # A save that was not staged resolves paths where it begins, in any thread.
    save = functools.partial(dcp.save, STATE, checkpoint_id="later", storage_writer=writer)
    thread = threading.Thread(target=save, kwargs={"no_dist": True})
    thread.start()
    thread.join()
    assert [path.name for path in pathlib.Path.cwd().iterdir()] == ["later"]
    assert not (here / "later").exists()


@pytest.mark.parametrize(
    "url", ["s3://bucket/run", "gs://bucket", "hf://me/model", pathlib.Path("s3://bucket/run")]
)
def test_urls_are_refused_and_make_no_folder(here: pathlib.Path, url: Any) -> None:
    storage = hugging_face()
    ways: list[Callable[[Any], object]] = [
        *(Checkpoints, FileSystemWriter, FileWriter, TensorStore),
        storage.HuggingFaceStorageWriter,
        lambda path: FileSystemWriter("x").reset(path),
        lambda path: save(STATE, path),
        lambda path: save_file(STATE, path),
        lambda path: save_sharded(STATE, path),
        lambda path: tensorferry.write(path, STATE["w"]),
        lambda path: tensorferry.aio_handle().async_pwrite(STATE["w"], path),
    ]
    if not is_url(os.fspath(url)):  # URLs cannot be read
        ways += [
            *(FileSystemReader, load, storage.HuggingFaceStorageReader),
            lambda path: FileSystemReader("x").reset(path),
            lambda path: safe_open(path, "pt"),
        ]
    for way in ways:
        with pytest.raises(ValueError, match="got the URL"):
            way(url)
    assert not list(here.iterdir())


TREES: dict[str, Callable[[pathlib.Path], Any]] = {
    "checkpoint of ours": lambda at: save_by(FileSystemWriter(at)),
    "checkpoint of torch's": lambda at: save_by(dcp.FileSystemWriter(at)),
    "file of torch.save's": lambda at: save(STATE, at),
    "safetensors file": lambda at: save_file(STATE, at),
    "safetensors folder": lambda at: (at.mkdir(), save_file(STATE, at / "model.safetensors")),
    "sharded model": lambda at: save_sharded(
        {"a": torch.ones(300), **STATE}, at, max_shard_nbytes=4096
    ),
}


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("kind", TREES)
def test_a_path_may_be_written_in_any_way(here: pathlib.Path, kind: str, damaged: bool) -> None:
    TREES[kind](here / "saved")
    if damaged:
        files = [path for path in [here / "saved", *here.glob("saved/*")] if path.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size)
        flip(largest, largest.stat().st_size * 4)

    def told(path: str) -> tuple[Any, ...]:
        report = verify(path)
        problems = sorted((str(each.names), each.begin, each.end) for each in report.problems)
        listed = [] if damaged else entries(path)
        return report.entries, report.nbytes, problems, sorted(report.unverified), repr(listed)

    wanted = told(str(here / "saved"))
    for path in ("saved", "./saved", "../here/saved", f"{here}/../here/./saved"):
        assert told(path) == wanted, path
    if (here / "saved").is_dir():
        assert told("saved/") == wanted
