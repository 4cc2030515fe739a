"""load_file: mapped and read tensors, the pages that stay in the page cache, and the lifetime of memory."""

from __future__ import annotations

import errno
import gc
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import safetensors
import tensorferry.safetensors.numpy as ours_numpy
import tensorferry.safetensors.torch as ours
from tensorferry import StorageError, _core
from tensorferry.safetensors import SafetensorError, deserialize, loading, safe_open
from tests.safetensors.files import (
    Tied,
    assert_same,
    cached_nbytes,
    counting,
    saved,
    tensor_of,
)
from tests.support.effort import examples
from tests.support.faultfs import Fault
from tests.support.page_cache import make_cold, make_warm
from tests.support.threads import in_threads

if TYPE_CHECKING:
    import pathlib

    from tests.support.faultfs import FaultFS

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    """About 24 MiB: large ones, and small ones between them."""
    torch.manual_seed(11)
    names = ["embed", *(f"layers.{at}" for at in range(5))]
    return {
        **{f"{name}.weight": tensor_of(torch.bfloat16, 1999, 1024) for name in names},
        **{f"{name}.norm": tensor_of(torch.bfloat16, 1024) for name in names},
        "head": tensor_of(torch.float32, 3, 1001),
        "nothing": torch.empty(3, 0),
    }


@pytest.fixture
def path(directory: pathlib.Path, tensors: dict[str, torch.Tensor]) -> pathlib.Path:
    path = saved(directory / "model.safetensors", tensors)
    make_cold(path)
    return path


def assert_all_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert_same(found[name], tensor)


def test_what_is_cold_is_read_once_and_leaves_nothing_in_the_cache(
    path: pathlib.Path, tensors: dict[str, torch.Tensor]
) -> None:
    with counting(path) as read:
        found = ours.load_file(path)
    assert_all_same(found, tensors)
    nbytes = path.stat().st_size
    assert nbytes - 64 * 1024 <= read.nbytes <= nbytes + 64 * 1024 + 2 * PAGE  # the header twice
    assert cached_nbytes(path) == 0


def test_what_is_warm_is_mapped(path: pathlib.Path, tensors: dict[str, torch.Tensor]) -> None:
    make_warm(path)
    with counting(path) as read:
        found = ours.load_file(path)
    assert read.nbytes <= 64 * 1024  # the header
    assert_all_same(found, tensors)


def test_one_file_may_be_both(path: pathlib.Path, tensors: dict[str, torch.Tensor]) -> None:
    make_warm(path, 6 * MIB, 8 * MIB)
    cached = cached_nbytes(path)
    with counting(path) as read:
        found = ours.load_file(path)
    assert path.stat().st_size - read.nbytes >= 8 * MIB - 2 * loading._RUN_NBYTES
    assert cached_nbytes(path) == cached
    assert_all_same(found, tensors)


def test_what_the_cache_lacks_little_of_is_mapped_and_brought_there(
    path: pathlib.Path, tensors: dict[str, torch.Tensor]
) -> None:
    make_warm(path)
    for begin in range(0, path.stat().st_size, 2 * MIB):
        make_cold(path, begin, MIB // 2)
    cached = cached_nbytes(path)
    assert cached < path.stat().st_size - 4 * MIB
    with counting(path) as read:
        found = ours.load_file(path)
    assert read.nbytes <= 64 * 1024  # the header
    assert_all_same(found, tensors)
    assert cached_nbytes(path) > cached


def test_to_ask_for_columns_brings_nothing_else_to_the_cache(
    path: pathlib.Path, tensors: dict[str, torch.Tensor]
) -> None:
    for begin in range(0, path.stat().st_size, 2 * MIB):
        make_warm(path, begin, MIB // 2)
    cached = cached_nbytes(path)
    name = max(tensors, key=lambda name: tensors[name].nbytes)
    with safe_open(path, "pt") as file:
        assert_same(file.get_slice(name)[..., 5:9], tensors[name][..., 5:9])
    assert cached_nbytes(path) <= cached + MIB


@given(
    ranges=st.lists(st.tuples(st.integers(0, 24 * MIB), st.integers(1, 9 * MIB)), max_size=4),
    direct=st.sampled_from(["auto", "auto", "always", "never"]),
    backend=st.sampled_from(["mmap", "pread"]),
)
@settings(max_examples=examples(40))
def test_whatever_is_cached_the_tensors_are_the_files(
    path: pathlib.Path,
    tensors: dict[str, torch.Tensor],
    ranges: list[tuple[int, int]],
    direct: str,
    backend: str,
) -> None:
    make_cold(path)
    for begin, nbytes in ranges:
        make_warm(path, begin, nbytes)
    with counting(path) as read:
        found = ours.load_file(path, backend=backend, direct=direct)
    if direct == "never":
        assert read.nbytes <= 64 * 1024
    elif direct == "always" or backend == "pread":
        assert read.nbytes >= path.stat().st_size - 64 * 1024
    assert_all_same(found, tensors)


@pytest.mark.parametrize("state", ["cold", "warm", "half"])
def test_tensors_may_be_written_to_and_the_file_stays(
    path: pathlib.Path, tensors: dict[str, torch.Tensor], state: str
) -> None:
    if state != "cold":
        make_warm(path, 0, 0 if state == "warm" else 11 * MIB)
    before = path.read_bytes() if state == "warm" else None
    for tensor in ours.load_file(path).values():
        tensor.zero_()
    assert_all_same(ours.load_file(path), tensors)
    assert before is None or path.read_bytes() == before


@pytest.mark.parametrize("state", ["cold", "warm"])
def test_each_tensor_has_a_storage_of_its_own(path: pathlib.Path, state: str) -> None:
    """Libraries detect tied weights by their storages, and torch.save writes the whole storage."""
    if state == "warm":
        make_warm(path)
    found = ours.load_file(path)
    storages = {tensor.untyped_storage().data_ptr() for tensor in found.values() if tensor.numel()}
    assert len(storages) == len(found) - 1
    for tensor in found.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.storage_offset() == 0


def resident_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


@pytest.mark.alone
def test_a_tensor_that_is_kept_keeps_no_others(
    path: pathlib.Path, tensors: dict[str, torch.Tensor]
) -> None:
    ours.load_file(path)  # the first call allocates objects that stay
    gc.collect()
    before = resident_nbytes()
    found = ours.load_file(path)
    assert resident_nbytes() - before > 20 * MIB
    kept = {name: found.pop(name) for name in ("layers.2.norm", "layers.3.weight")}
    found.clear()
    gc.collect()
    assert resident_nbytes() - before < 4 * MIB + 2 * MIB
    for name, tensor in kept.items():
        assert_same(tensor, tensors[name])


def mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum(1 for _ in file)


def test_a_file_is_a_bounded_number_of_mappings(
    path: pathlib.Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the cache is torn; a process has 65,530 of them."""
    monkeypatch.setattr(loading, "_MAX_RUNS", 4)
    for begin in range(0, path.stat().st_size, 4 * MIB):
        make_warm(path, begin, 2 * MIB)
    before = mappings()
    found = ours.load_file(path)
    assert mappings() - before <= 8
    assert_all_same(found, tensors)


def test_kernels_that_do_not_tell_what_is_cached_map_everything(
    path: pathlib.Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_core.File, "residency", lambda *_: None)
    with counting(path) as read:
        found = ours.load_file(path)
    assert read.nbytes <= 64 * 1024 + 2 * PAGE
    assert_all_same(found, tensors)


def test_where_nothing_can_be_read_past_the_cache(
    tmpfs_directory: pathlib.Path, tensors: dict[str, torch.Tensor]
) -> None:
    path = saved(tmpfs_directory / "model", tensors)
    for direct in ("auto", "always", "never"):
        assert_all_same(ours.load_file(path, direct=direct), tensors)


def test_a_file_that_is_replaced_goes_on_as_it_was(
    path: pathlib.Path, tensors: dict[str, torch.Tensor]
) -> None:
    make_warm(path)
    found = ours.load_file(path)
    with safe_open(path, "pt") as file:
        saved(path.with_name("new"), {"a": torch.ones(3)}).replace(path)
        assert_all_same(found, tensors)
        assert_all_same(file.get_tensors(), tensors)
    assert list(ours.load_file(path)) == ["a"]


def test_what_the_drive_cannot_read_is_an_error_and_can_be_tried_again(
    faultfs: FaultFS, tensors: dict[str, torch.Tensor]
) -> None:
    path = saved(faultfs.path / "model", tensors)
    make_cold(path)
    faultfs.order(Fault("read", start=9 * MIB, end=9 * MIB + 1, error=errno.EIO))
    with pytest.raises(StorageError, match="model"):
        ours.load_file(path, direct="always")
    faultfs.clear()
    assert_all_same(ours.load_file(path, direct="always"), tensors)


def test_threads_that_load_at_once(path: pathlib.Path, tensors: dict[str, torch.Tensor]) -> None:
    in_threads(4, lambda _: assert_all_same(ours.load_file(path), tensors))


def test_order_and_devices(path: pathlib.Path, tensors: dict[str, torch.Tensor]) -> None:
    assert list(ours.load_file(path)) == list(safetensors.torch.load_file(path))
    for device in ("cpu", torch.device("cpu"), "cpu:0"):
        found = ours.load_file(path, device)
        assert {tensor.device.type for tensor in found.values()} == {"cpu"}
    found = ours.load_file(path, "meta")
    assert {tensor.device.type for tensor in found.values()} == {"meta"}
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tensor.shape for name, tensor in tensors.items()
    }
    with torch.device("meta"):  # the default device must not change the requested one
        assert ours.load_file(path)["head"].device.type == "cpu"
        assert ours.load(path.read_bytes())["head"].device.type == "cpu"


# Bytes in memory


def test_bytes_are_loaded_as_files_are(
    path: pathlib.Path, tensors: dict[str, torch.Tensor]
) -> None:
    data = path.read_bytes()
    for content in (data, bytearray(data), memoryview(data)):
        found = ours.load(content)  # type: ignore[arg-type]
        assert_all_same(found, tensors)
        found["head"].zero_()
    assert data == path.read_bytes()
    assert dict(deserialize(data)) == dict(safetensors.deserialize(data))


def test_numpys_arrays(directory: pathlib.Path) -> None:
    arrays = {
        "a": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.array(True),
        "c": np.zeros((2, 0), np.uint16),
        "d": np.arange(3_000_000, dtype=np.complex64),
    }
    path = directory / "arrays"
    safetensors.numpy.save_file(arrays, path)
    for found in (ours_numpy.load_file(path), ours_numpy.load(path.read_bytes())):
        assert sorted(found) == sorted(arrays)
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(found[name], array)
            found[name][...] = 0


@pytest.mark.parametrize(
    "data", [b"", b"\x01", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{", b"\x02" + b"\0" * 7 + b"{}x"]
)
def test_bytes_that_are_no_file_are_refused(data: bytes) -> None:
    for ask in (ours.load, ours_numpy.load, deserialize):
        with pytest.raises(SafetensorError):
            ask(data)


# Models


def test_models_are_loaded_as_safetensors_does(directory: pathlib.Path) -> None:
    path = directory / "model"
    model = Tied()
    safetensors.torch.save_model(model, str(path))
    for load in (ours.load_model, safetensors.torch.load_model):
        other = Tied()
        missing, unexpected = load(other, path)
        assert (set(missing), list(unexpected)) == (set(), [])
        for name, value in model.state_dict().items():
            assert_same(other.state_dict()[name], value)


@pytest.mark.parametrize("strict", [True, False])
def test_names_that_do_not_fit_are_told_as_safetensors_does(
    directory: pathlib.Path, strict: bool
) -> None:
    state = {"first.bias": torch.ones(4), "x": torch.ones(1)}
    both = {**state, "first.weight": torch.ones(4, 4), "second.weight": torch.ones(4, 4)}
    for at, tensors in enumerate((state, both)):
        path = saved(directory / f"{at}", tensors)
        said = []
        for load in (ours.load_model, safetensors.torch.load_model):
            try:
                missing, unexpected = load(Tied(), path, strict=strict)
                said.append((set(missing), sorted(unexpected)))
            except RuntimeError as error:
                said.append((str(error),))  # type: ignore[arg-type]
        assert said[0] == said[1]
