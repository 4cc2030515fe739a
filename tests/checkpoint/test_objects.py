"""save() and load(): files equal torch's byte for byte, and loaded objects equal the saved ones."""

from __future__ import annotations

import collections
import errno
import io
import os
import pathlib
import pickle
import struct
import tempfile
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorferry
from tensorferry.checkpoint import CheckpointError, load, save
from tests.checkpoint.archives import saved
from tests.checkpoint.damage import flipped
from tests.checkpoint.states import assert_same, mixed_state
from tests.support import mounts
from tests.support.effort import examples
from tests.support.faultfs import Fault, FaultFS

if TYPE_CHECKING:
    from tests.support.data import RandomBytes


def tied() -> dict[str, Any]:
    weight = torch.randn(1 << 10)
    return {
        "weight": weight,
        "same": weight,
        "view": weight[10:20],
        "transposed": weight.view(2, -1).t(),
    }


OBJECTS: dict[str, Any] = {
    "tensor": lambda: torch.arange(10),
    "large tensor": lambda: torch.randn(3, 1 << 20),
    "all kinds": mixed_state,
    "shared storages": tied,
    "module": lambda: torch.nn.Linear(30, 40).state_dict(),
    "no tensors": lambda: {"a": [1, 2.5, "x", None], "b": (True, b"bytes")},
    "many small": lambda: {str(k): torch.full((k,), k) for k in range(500)},
    "thousands of small": lambda: {str(k): torch.full((k % 60,), k) for k in range(1500)},
    "many of one size": lambda: {str(k): torch.full((4,), float(k)) for k in range(12)},
    "small between large": lambda: [torch.ones(n) for n in (3, 1 << 19, 5, 1, 1 << 19, 6, 7, 0)],
    "storages": lambda: [torch.ones(100).untyped_storage()],
    "bytes of an odd length": lambda: torch.ones((1 << 20) + 1, dtype=torch.uint8),
    "empty": lambda: torch.zeros(0),
    "sparse": lambda: torch.eye(100).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(10), 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_save_writes_what_torch_would(directory: pathlib.Path, name: str) -> None:
    obj = OBJECTS[name]()
    save(obj, directory / "object.pt")
    assert (directory / "object.pt").read_bytes() == saved(obj)


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("how", ["ours", "torch"])
def test_load_returns_what_was_saved(directory: pathlib.Path, name: str, how: str) -> None:
    obj, path = OBJECTS[name](), directory / "object.pt"
    (save if how == "ours" else torch.save)(obj, path)
    ours, theirs = load(path), torch.load(path, weights_only=True)
    assert saved(ours) == saved(theirs)


@settings(max_examples=examples(40))
@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex128]),
            st.one_of(st.integers(0, 40), st.integers((1 << 17) - 2, (1 << 17) + 2)),
        ),
        max_size=12,
    )
)
def test_any_sizes_in_any_order(sizes: list[tuple[torch.dtype, int]]) -> None:
    obj = [torch.ones(count, dtype=dtype) * k for k, (dtype, count) in enumerate(sizes)]
    with tempfile.TemporaryDirectory(prefix="tensorferry-test-", dir="/dev/shm") as folder:
        path = pathlib.Path(folder) / "object.pt"
        save(obj, path)
        assert path.read_bytes() == saved(obj)
        assert saved(load(path)) == saved(obj)


def test_tensors_that_share_memory_still_do(directory: pathlib.Path) -> None:
    save(tied(), directory / "tied.pt")
    state = load(directory / "tied.pt")
    state["weight"].zero_()
    assert all(bool((tensor == 0).all()) for tensor in state.values())


def test_loaded_tensors_outlive_the_file_and_can_be_changed(directory: pathlib.Path) -> None:
    path = directory / "object.pt"
    save({"large": torch.ones(1 << 20), "scalar": torch.tensor(2.0)}, path)
    state = load(path)
    path.write_bytes(bytes(path.stat().st_size))
    path.unlink()
    state["large"] += 1
    state["scalar"] += 1
    assert bool((state["large"] == 2).all())
    assert state["scalar"] == 3


class Nested:
    """An object that loads another file while it is loaded."""

    def __init__(self, path: str, tensor: torch.Tensor) -> None:
        self.path = path
        self.tensor = tensor

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        self.inner = [torch.load(self.path), load(self.path)]


def test_any_object_can_be_saved_and_may_load_others(directory: pathlib.Path) -> None:
    save(torch.arange(100), directory / "inner.pt")
    obj = [torch.ones(100), Nested(str(directory / "inner.pt"), torch.ones(200)), torch.ones(300)]
    save(obj, directory / "outer.pt")
    first, nested, last = load(directory / "outer.pt", weights_only=False)
    assert [torch.equal(tensor, torch.arange(100)) for tensor in nested.inner] == [True, True]
    assert [len(t) for t in (first, nested.tensor, last)] == [100, 200, 300]
    assert all(bool((t == 1).all()) for t in (first, nested.tensor, last))


def test_weights_only_refuses_what_could_run_code(directory: pathlib.Path) -> None:
    save({"tensor": torch.ones(100), "code": Nested}, directory / "object.pt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        load(directory / "object.pt")
    assert load(directory / "object.pt", weights_only=False)["code"] is Nested


@pytest.mark.parametrize(
    "map_location",
    [
        "cpu",
        torch.device("cpu"),
        {"cpu": "cpu"},
        lambda storage, location: storage,
        lambda storage, location: None,
    ],
)
def test_map_location_is_torchs(directory: pathlib.Path, map_location: Any) -> None:
    state = mixed_state()
    save(state, directory / "object.pt")
    assert_same(load(directory / "object.pt", map_location=map_location), state)


def test_map_location_sees_the_bytes_and_may_change_them(directory: pathlib.Path) -> None:
    save([torch.ones(100), torch.ones(1 << 20)], directory / "object.pt")

    def negative(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        tensor = torch.empty(0).set_(storage)
        return (-tensor).untyped_storage()

    tensors = load(directory / "object.pt", map_location=negative)
    assert [bool((tensor == -1).all()) for tensor in tensors] == [True, True]


def test_tensors_on_meta_are_not_read(directory: pathlib.Path) -> None:
    save(torch.ones(1 << 20), directory / "object.pt")
    tensor = load(directory / "object.pt", map_location="meta")
    assert tensor.is_meta
    assert len(tensor) == 1 << 20


def test_mmap_maps_the_file(directory: pathlib.Path) -> None:
    save(torch.ones(1 << 20), directory / "object.pt")
    tensor = load(directory / "object.pt", mmap=True)
    with open("/proc/self/maps") as maps:
        assert any(line.rstrip().endswith("object.pt") for line in maps)
    assert bool((tensor == 1).all())


@pytest.mark.parametrize("mmap", [False, True])
def test_other_formats_of_torch_are_read_by_torch(directory: pathlib.Path, mmap: bool) -> None:
    path = directory / "old.pt"
    torch.save(torch.arange(10), path, _use_new_zipfile_serialization=False)
    if mmap:
        with pytest.raises(RuntimeError, match="mmap can only be used"):
            load(path, mmap=True)
    else:
        assert torch.equal(load(path), torch.arange(10))


def zipped_again(archive: bytes, path: pathlib.Path, **changed: bytes) -> None:
    """Write an archive as other programs than torch do, some records changed."""
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, changed.get(name.partition("/")[2], old.read(name)))


def test_archives_of_other_programs_are_read(directory: pathlib.Path) -> None:
    state = mixed_state()
    zipped_again(saved(state), directory / "object.pt")
    assert_same(load(directory / "object.pt"), state)


def test_files_of_the_other_byte_order_are_read_by_torch(directory: pathlib.Path) -> None:
    swapped = torch.from_numpy(np.arange(10).byteswap())
    zipped_again(saved(swapped), directory / "other.pt", byteorder=b"big")
    assert torch.equal(load(directory / "other.pt"), torch.arange(10))


def without_checksums(archive: bytes) -> bytes:
    """Return the archive with all CRC-32s zero, as torch writes it on request."""
    data = bytearray(archive)
    for signature, at in ((b"PK\7\10", 4), (b"PK\1\2", 16)):
        position = data.find(signature)
        while position >= 0:
            data[position + at : position + at + 4] = bytes(4)
            position = data.find(signature, position + 4)
    return bytes(data)


def test_files_without_checksums_are_read(directory: pathlib.Path) -> None:
    state = mixed_state()
    path = directory / "object.pt"
    path.write_bytes(without_checksums(saved(state)))
    assert_same(load(path), state)


def test_objects_that_no_pickle_takes_are_refused_and_leave_nothing(
    directory: pathlib.Path,
) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        save({"tensor": torch.ones(10), "f": lambda: None}, directory / "object.pt")
    assert list(directory.iterdir()) == []


@pytest.mark.root
def test_what_torch_must_write_tells_of_a_full_disk_as_such(tmp_path: pathlib.Path) -> None:
    with mounts.tmpfs(tmp_path / "small", 2 << 20) as mount:
        save({"step": 1}, mount / "object.pt")
        before = (mount / "object.pt").read_bytes()
        # Quantized tensors cannot be saved without payloads.
        obj = torch.quantize_per_tensor(torch.zeros(4 << 20), 0.1, 0, torch.qint8)
        with pytest.raises(tensorferry.StorageError) as caught:
            save(obj, mount / "object.pt")
        assert caught.value.errno == errno.ENOSPC
        assert str(caught.value.filename) == str(mount / "object.pt")
        assert (mount / "object.pt").read_bytes() == before
        assert [path.name for path in mount.iterdir()] == ["object.pt"]


def test_missing_file_is_reported_as_such(directory: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(directory / "nothing.pt")


BITS_APART = int(os.environ.get("TENSORFERRY_TEST_BITS_APART", "31"))


@pytest.mark.parametrize("name", ["a few", "thousands of small"])
def test_any_flipped_bit_is_found_or_harmless(
    directory: pathlib.Path, random_bytes: RandomBytes, name: str
) -> None:
    few = {"a": torch.arange(7), "b": torch.ones(2), "step": 3}
    obj = few if name == "a few" else OBJECTS[name]()
    wanted, path = saved(obj), directory / "object.pt"
    outcomes: collections.Counter[str] = collections.Counter()
    apart = BITS_APART if name == "a few" else len(wanted) * 8 // 40
    first = int(random_bytes.generator.integers(apart))
    for bit in range(first, len(wanted) * 8, apart):
        path.write_bytes(flipped(wanted, bit))
        try:
            got = load(path)
        except Exception as error:  # torch's own complaints are of many kinds
            outcomes[type(error).__name__] += 1
        else:
            outcomes["harmless"] += 1
            assert saved(got) == wanted, f"bit {bit}"
    # Changes of padding, and of times and versions in headers, are harmless.
    assert outcomes["CheckpointError"] > 0.3 * outcomes.total()
    assert outcomes["harmless"] < 0.6 * outcomes.total()


@pytest.mark.parametrize("directory_begins_at", [1 << 24, 1 << 34, 1 << 62])
def test_an_archive_whose_directory_lies_elsewhere_is_damaged(
    directory: pathlib.Path, directory_begins_at: int
) -> None:
    path = directory / "object.pt"
    save({"a": torch.arange(7)}, path)
    data = bytearray(path.read_bytes())
    struct.pack_into("<Q", data, data.rindex(b"PK\6\6") + 48, directory_begins_at)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        load(path)


def test_damage_names_the_record_and_the_bytes(directory: pathlib.Path) -> None:
    path = directory / "object.pt"
    save({"small": torch.zeros(100), "large": torch.zeros(1 << 20)}, path)
    data = path.read_bytes()
    begin = data.index(b"archive/data/1")
    path.write_bytes(flipped(data, 8 * (begin + (3 << 20))))
    with pytest.raises(CheckpointError, match="CRC-32") as caught:
        load(path)
    error = caught.value
    assert error.path == str(path)
    assert error.names == ("archive/data/1",)
    assert error.begin is not None
    assert error.end is not None
    assert error.begin <= begin + (3 << 20) < error.end


@pytest.mark.parametrize("part", [1, 100, 5000, 1 << 20, 4 << 20])
def test_files_cut_short_are_refused(directory: pathlib.Path, part: int) -> None:
    path = directory / "object.pt"
    save([torch.zeros(1 << 20), torch.ones(10)], path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - part)
    with pytest.raises(CheckpointError, match="cut short"):
        load(path)


def test_a_pickle_that_claims_another_size_is_refused(directory: pathlib.Path) -> None:
    path = directory / "object.pt"
    data = saved(torch.arange(1000))
    # The number of elements, as pickle writes it, twice: of the storage, and of the tensor.
    lying = data.replace(b"M\xe8\x03", b"M\xd0\x07")
    path.write_bytes(without_checksums(lying))
    with pytest.raises(
        CheckpointError, match="its size of 8000 bytes is not the one in the pickle"
    ):
        load(path)


@pytest.mark.parametrize("where", ["the payload", "the directory"])
def test_failed_reads_are_told_as_such(faultfs: FaultFS, where: str) -> None:
    path = faultfs.path / "object.pt"
    save(torch.zeros(1 << 20), path)
    size = path.stat().st_size
    begin = 1 << 20 if where == "the payload" else size - 100
    faultfs.order(Fault("read", start=begin, end=begin + 50, error=errno.EIO))
    with pytest.raises(OSError, match=r"object\.pt") as caught:
        load(path)
    assert caught.value.errno == errno.EIO
    assert str(caught.value.filename) == str(path)


def test_a_read_that_fails_once_is_not_called_damage(faultfs: FaultFS) -> None:
    """zipfile says "not a zip file" where the drive fails at its end, and load() says what the drive did."""
    path = faultfs.path / "object.pt"
    save(torch.zeros(1000), path)
    faultfs.order()
    load(path)
    for skipped in range(len(faultfs.requests("read"))):
        faultfs.order(Fault("read", error=errno.EIO, times=1, skip=skipped))
        with pytest.raises(OSError, match=r"object\.pt") as caught:
            load(path)
        assert caught.value.errno == errno.EIO
