"""Checkpoints and models in buckets: every function with a path returns the same as for the files in a folder."""

from __future__ import annotations

import shutil
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import tensorferry.checkpoint as tc
from tensorferry.checkpoint import tools
from tensorferry.checkpoint.tools.convert import convert
from tensorferry.errors import StorageError
from tensorferry.npy import NumpyFile
from tensorferry.offload import stream_weights
from tensorferry.safetensors import SafetensorError, checksums, safe_open
from tensorferry.safetensors.numpy import load_file as load_numpy
from tensorferry.safetensors.plans import load_files
from tensorferry.safetensors.sharded import save_sharded
from tensorferry.safetensors.torch import load_file, save_file
from tests.support import buckets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.buckets import Bucket
    from tests.support.fault_proxy import FaultProxy

MIB = 1 << 20


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "large": torch.randn(600, 1024, generator=generator),
        "small": torch.arange(10),
        "other": {"step": 5, "rates": [0.5, 0.25]},
    }


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {f"t{at:02}": torch.randn(500 + at, 64, generator=generator) for at in range(40)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Files of every kind."""
    root = tmp_path_factory.mktemp("kinds")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state(), storage_writer=tc.FileSystemWriter(root / "ours"), no_dist=True)
        dcp.save(state(), checkpoint_id=root / "torchs", no_dist=True)
    tc.save(state(), root / "ours.pt")
    torch.save(state(), root / "torchs.pt")
    torch.save(state(), root / "old.pt", _use_new_zipfile_serialization=False)
    np.savez(root / "some.npz", a=np.arange(1000), b=np.ones((3, 4)))
    save_sharded(tensors(), root / "model", max_shard_nbytes="1MB")
    save_file(tensors(), root / "whole.safetensors", metadata={"from": "here"})
    checksums.write(root / "whole.safetensors")
    yield root
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def uploaded(s3: str, folder: Path) -> Bucket:
    bucket = buckets.Bucket.new(s3)
    for path in folder.rglob("*"):
        if path.is_file():
            bucket.write(f"run/{path.relative_to(folder)}", path.read_bytes())
    return bucket


@pytest.fixture(params=["url", "pair"])
def place(
    request: pytest.FixtureRequest, uploaded: Bucket, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Any]:
    """Return a function that maps a file of the folder to its place in the bucket."""
    if request.param == "pair":
        return lambda name: (uploaded.store(), f"run/{name}")
    for name, value in uploaded.environment().items():
        monkeypatch.setenv(name, value)
    return lambda name: uploaded.url(f"run/{name}")


def same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]) if torch.is_tensor(value) else value == other[name]


@pytest.mark.parametrize("name", ["ours", "torchs"])
def test_checkpoints(place: Callable[[str], Any], name: str) -> None:
    found = {
        "large": torch.zeros(600, 1024),
        "small": torch.zeros(10, dtype=torch.int64),
        "other": {"step": 0, "rates": [0.0, 0.0]},
    }
    for verify in ("read", "before"):
        reader = tc.FileSystemReader(place(name), verify=verify)  # type: ignore[arg-type]
        dcp.load(found, storage_reader=reader, no_dist=True)
        same(found, state())


@pytest.mark.parametrize("name", ["ours.pt", "torchs.pt", "old.pt"])
def test_files_of_torch_save(place: Callable[[str], Any], name: str) -> None:
    same(tc.load(place(name)), state())
    with pytest.raises(ValueError, match="mmap"):
        tc.load(place(name), mmap=True)


KINDS = ["ours", "torchs", "ours.pt", "model", "whole.safetensors"]


@pytest.mark.parametrize("name", KINDS)
def test_what_looks_at_files(
    place: Callable[[str], Any], folder: Path, name: str, tmp_path: Path
) -> None:
    here, there = tc.verify(folder / name), tc.verify(place(name))
    assert there.problems == []
    assert (there.entries, there.nbytes, there.unverified) == (
        here.entries,
        here.nbytes,
        here.unverified,
    )
    assert tools.entries(place(name)) == tools.entries(folder / name)
    convert(folder / name, tmp_path / "here", tensors_only=True)
    convert(place(name), tmp_path / "there", tensors_only=True)
    listed = [[*map(_what, tools.entries(tmp_path / each))] for each in ("here", "there")]
    assert listed[0] == listed[1] != []
    here, there = tc.verify(tmp_path / "here"), tc.verify(tmp_path / "there")
    assert (there.problems, there.nbytes) == ([], here.nbytes)


def _what(entry: Any) -> tuple[Any, ...]:
    return entry.name, entry.dtype, entry.shape


def test_safetensors(place: Callable[[str], Any], folder: Path) -> None:
    expected = tensors()
    same(load_file(place("whole.safetensors")), expected)
    assert all(
        np.array_equal(array, expected[name].numpy())
        for name, array in load_numpy(place("whole.safetensors")).items()
    )
    same(dict(load_files(place("model"))), expected)
    same(dict(load_files(place("model/model.safetensors.index.json"))), expected)
    same(dict(load_files(place("whole.safetensors"), verify=True)), expected)
    plan = {"t03": None, "t07": (slice(None, None, 7), slice(3, 9)), "t09": slice(20, 30)}
    chosen = {
        name: expected[name] if at is None else expected[name][at] for name, at in plan.items()
    }
    same(dict(load_files(place("model"), plan)), chosen)
    with safe_open(place("whole.safetensors"), "pt") as file:
        assert file.metadata() == {"from": "here"}
        for name in file.offset_keys():
            assert torch.equal(file.get_tensor(name), expected[name])
        assert torch.equal(file.get_slice("t11")[[5, 1, 400]], expected["t11"][[5, 1, 400]])
        same(dict(file.prefetch()), expected)
    reader = tc.HuggingFaceStorageReader(place("model"))
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(found, storage_reader=reader, no_dist=True)
    same(found, expected)
    with NumpyFile(place("some.npz")) as held:
        assert np.array_equal(held["a"][5:9], np.arange(5, 9))
        assert np.array_equal(held["b"].read(), np.ones((3, 4)))


class Product(torch.nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(count, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


def test_streamed_weights(uploaded: Bucket, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    weights = {f"{at}.weight": torch.randn(900, 64, generator=generator) for at in range(30)}
    save_file(weights, tmp_path / "x.safetensors")
    uploaded.write("streamed.safetensors", (tmp_path / "x.safetensors").read_bytes())
    with torch.device("meta"):
        model = torch.nn.ModuleList(Product(900) for _ in weights).requires_grad_(False)
    x = torch.randn(64, generator=generator)
    source = (uploaded.store(), "streamed.safetensors")
    with stream_weights(model, source, memory_budget="2MiB"), torch.no_grad():
        for _ in range(2):
            for module, weight in zip(model, weights.values(), strict=True):
                assert torch.equal(module(x), x @ weight.T)


def test_a_model_on_the_web(folder: Path) -> None:
    """Folders of the web cannot be listed: the usual names are tried."""
    with buckets.file_server(folder) as web:
        same(dict(load_files(f"{web}/model")), tensors())
        same(load_file(f"{web}/whole.safetensors"), tensors())
        found = state() | {"large": torch.zeros(600, 1024)}
        dcp.load(found, storage_reader=tc.FileSystemReader(f"{web}/ours"), no_dist=True)
        same(found, state())
        with pytest.raises(FileNotFoundError):
            tc.verify(f"{web}/nothing")


def test_only_what_is_wanted_comes(uploaded: Bucket, s3_proxy: FaultProxy, tmp_path: Path) -> None:
    """One tensor of a hundred, and half of the rows of one."""
    hundred = {f"t{at:03}": torch.full((256, 1024), float(at)) for at in range(100)}
    save_file(hundred, tmp_path / "x.safetensors")
    bucket = uploaded.by_way_of(s3_proxy.address)
    bucket.write("x.safetensors", (tmp_path / "x.safetensors").read_bytes())
    header_nbytes = 64 << 10
    for plan, nbytes in (({"t050": None}, MIB), ({"t051": slice(0, 128)}, MIB // 2)):
        s3_proxy.requests.clear()
        ((_, found),) = load_files((bucket.store(), "x.safetensors"), plan)
        assert found.nbytes == nbytes
        sent = sum(each.sent_nbytes for each in s3_proxy.asked("GET"))
        assert nbytes <= sent <= 1.1 * nbytes + header_nbytes


def test_a_checkpoint_that_is_replaced_meanwhile_is_no_mixture(
    uploaded: Bucket, folder: Path
) -> None:
    bucket = buckets.Bucket.new(uploaded.endpoint)
    for path in (folder / "model").iterdir():
        bucket.write(f"m/{path.name}", path.read_bytes())
    tensors_of_it = load_files((bucket.store(), "m"), memory_budget="256KiB")
    next(tensors_of_it)  # of the first file
    for path in (folder / "model").iterdir():
        bucket.write(f"m/{path.name}", path.read_bytes()[::-1])
    with pytest.raises((StorageError, SafetensorError), match="m/"):
        list(tensors_of_it)


def test_names_that_lead_out_of_a_checkpoint_are_refused(folder: Path, uploaded: Bucket) -> None:
    from tensorferry.checkpoint.storage.metadata import data_file

    for name in ("../x", "a/../../x", "/x", "./x", "a//b", ""):
        with pytest.raises(tc.CheckpointError, match="outside"):
            data_file(uploaded.url("run/ours"), name)
    assert data_file(uploaded.url("run/ours"), "a/b.distcp").endswith("ours/a/b.distcp")


@pytest.mark.parametrize("name", ["nothing", "ours/__0_0.distcp"])
def test_what_is_no_checkpoint(uploaded: Bucket, name: str) -> None:
    pair = (uploaded.store(), f"run/{name}")
    with pytest.raises((FileNotFoundError, tc.CheckpointError), match="run/"):
        tc.verify(pair)
    with pytest.raises((FileNotFoundError, CheckpointException), match="run/"):
        dcp.load({"large": torch.zeros(1)}, storage_reader=tc.FileSystemReader(pair), no_dist=True)
