"""Reading `.metadata`: files of every version of torch are read, and other contents create no objects."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import dataclasses
import enum
import io
import pathlib
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import metadata as old_metadata
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tensorferry._core import crc32
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.storage.metadata import (
    _NAMES,
    add_safe_metadata_globals,
    chunk_of,
    data_file,
    file_checksums,
    parse_metadata,
    payload_of,
    read_metadata,
)
from tests.checkpoint.damage import flipped
from tests.checkpoint.hostile import ATTACKS, TARGET, TORCH, name_of, some_metadata
from tests.checkpoint.states import mixed_state, save

if TYPE_CHECKING:
    from tests.support.data import RandomBytes


def write(path: pathlib.Path, metadata: Any, *, trailer: bool = False) -> pathlib.Path:
    data = metadata if isinstance(metadata, bytes) else pickle.dumps(metadata, protocol=4)
    path.write_bytes(data + (b"tensorferry crc32 %08x\n" % crc32(data) if trailer else b""))
    return path


def test_torchs_metadata_is_read_as_pickle_reads_it(tmp_path: pathlib.Path) -> None:
    dcp.save(mixed_state(), storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    path = tmp_path / ".metadata"
    assert read_metadata(path) == pickle.loads(path.read_bytes())
    found = read_metadata(path)
    assert {type(entry) for entry in found.state_dict_metadata.values()} == {
        TensorStorageMetadata,
        BytesStorageMetadata,
    }
    assert type(found.state_dict_metadata["weight"].properties) is TensorProperties
    assert all(type(index) is MetadataIndex for index in found.storage_data)
    assert type(found.storage_meta) is StorageMeta
    assert file_checksums(found) == {}


def test_our_metadata_has_checksums_and_payloads(tmp_path: pathlib.Path) -> None:
    save(mixed_state(), tmp_path)
    found = read_metadata(tmp_path / ".metadata")
    (name,) = [path.name for path in tmp_path.glob("*.distcp")]
    checksums = file_checksums(found)[name]
    data = (tmp_path / name).read_bytes()
    assert checksums.nbytes == len(data)
    step = checksums.chunk_nbytes
    assert list(checksums.crcs) == [crc32(data[at : at + step]) for at in range(0, len(data), step)]
    info = found.storage_data[MetadataIndex("weight", [0, 0])]
    offset, nbytes = payload_of(info) or (0, 0)
    payload = data[info.offset + offset : info.offset + offset + nbytes]
    assert payload == mixed_state()["weight"].numpy().tobytes()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_is_read(tmp_path: pathlib.Path, protocol: int) -> None:
    data = pickle.dumps(some_metadata(), protocol=protocol)
    assert read_metadata(write(tmp_path / "m", data)) == some_metadata()


class OtherVersions(pickle.Pickler):
    """Pickles as other versions of torch and Python do."""

    strides = False
    by_name = False

    def reducer_override(self, obj: Any) -> Any:
        if self.strides and type(obj) is TensorProperties:  # torch 2.15
            state = (*obj.__getstate__()[:5], (3, 1))  # type: ignore[no-untyped-call]
            return copyreg.__newobj__, (TensorProperties,), state  # type: ignore[attr-defined]
        if self.by_name and isinstance(obj, enum.Enum):  # Python 3.12.0
            return getattr, (type(obj), obj.name)
        return NotImplemented


def pickled(metadata: Any, **versions: bool) -> bytes:
    stream = io.BytesIO()
    pickler = OtherVersions(stream, 4)
    vars(pickler).update(versions)
    pickler.dump(metadata)
    return stream.getvalue()


def test_metadata_of_torch_2_15_is_read(tmp_path: pathlib.Path) -> None:
    data = pickled(some_metadata(), strides=True)
    if "strides" not in TensorProperties.__dataclass_fields__:
        with pytest.raises(ValueError, match="too many values"):
            pickle.loads(data)
    found = read_metadata(write(tmp_path / "m", data)).state_dict_metadata["a"]
    assert type(found.properties) is TensorProperties  # type: ignore[union-attr]
    assert found.properties.dtype == torch.bfloat16  # type: ignore[union-attr]


def test_enumerations_pickled_by_name_are_read(tmp_path: pathlib.Path) -> None:
    metadata = some_metadata()
    properties = TensorProperties(torch.int8, memory_format=torch.channels_last)
    metadata.state_dict_metadata["a"].properties = properties  # type: ignore[union-attr]
    data = pickled(metadata, by_name=True)
    assert b"getattr" in data
    found = read_metadata(write(tmp_path / "m", data)).state_dict_metadata["a"]
    assert found.properties.memory_format == torch.channels_last  # type: ignore[union-attr]


@pytest.mark.parametrize("trust_pickle", [False, True])
def test_metadata_of_torch_up_to_2_2_is_read(tmp_path: pathlib.Path, trust_pickle: bool) -> None:
    metadata = some_metadata()
    old = old_metadata.TensorProperties(torch.bfloat16, memory_format=torch.channels_last)
    metadata.state_dict_metadata["a"].properties = old  # type: ignore[union-attr, assignment]
    path = write(tmp_path / "m", metadata)
    assert b"sharded_tensor.metadata" in path.read_bytes()
    found = read_metadata(path, trust_pickle=trust_pickle).state_dict_metadata["a"]
    assert type(found.properties) is TensorProperties  # type: ignore[union-attr]
    assert found.properties.dtype == torch.bfloat16  # type: ignore[union-attr]
    assert found.properties.memory_format == torch.channels_last  # type: ignore[union-attr]


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_malicious_pickles_make_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, attack: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for metadata in (attack, some_metadata(planner_data=attack), {"a": [attack]}):
        with pytest.raises(CheckpointError, match="m'"):
            read_metadata(write(tmp_path / "m", metadata))
    assert not pathlib.Path(TARGET).exists()


@pytest.mark.parametrize(
    "name",
    [
        *(
            f"{TORCH}.metadata {n}"
            for n in ("Metadata", "TensorProperties", "_MEM_FORMAT_ENCODING")
        ),
        *(f"{TORCH}.filesystem _StorageInfo", "pathlib PosixPath", "torch Size", "torch float32"),
        "collections OrderedDict",
    ],
)
def test_pickles_cannot_change_classes(tmp_path: pathlib.Path, name: str) -> None:
    # BUILD with (None, {...}) sets attributes, of a class as well.
    module, _, attribute = name.partition(" ")
    state = b"(N}X\x08\x00\x00\x00pollutedK\x01st"
    data = b"\x80\x02" + name_of(module, attribute) + state + b"b."
    with pytest.raises(CheckpointError):
        read_metadata(write(tmp_path / "m", data))
    holder = __import__(module, fromlist=[attribute])
    assert not hasattr(getattr(holder, attribute), "polluted")


def test_what_a_program_declares_safe_is_read(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "m", some_metadata(planner_data=Layout(3)))
    with pytest.raises(CheckpointError, match=r"test_metadata\.Layout"):
        read_metadata(path)
    for declared in ([Layout], {__name__: {"Layout"}}):
        add_safe_metadata_globals(declared)
        assert read_metadata(path).planner_data == Layout(3)
        del _NAMES[f"{__name__}.Layout"]


@dataclasses.dataclass
class Layout:
    """What a planner may store in metadata."""

    ranks: int


def test_trusted_pickles_may_hold_anything(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "m", some_metadata(planner_data=collections.defaultdict(list)))
    with pytest.raises(CheckpointError, match="trust_pickle=True"):
        read_metadata(path)
    assert read_metadata(path, trust_pickle=True).planner_data == {}


@pytest.mark.parametrize("trailer", [False, True])
def test_cut_short_metadata_is_refused(tmp_path: pathlib.Path, trailer: bool) -> None:
    path = write(tmp_path / "m", some_metadata(), trailer=trailer)
    data = path.read_bytes()
    ends = range(len(data)) if not trailer else range(len(data) - 26, len(data))
    for end in ends:
        path.write_bytes(data[:end])
        with pytest.raises(CheckpointError):
            read_metadata(path)


def test_every_flipped_bit_of_our_metadata_is_found(tmp_path: pathlib.Path) -> None:
    save({"a": torch.ones(3)}, tmp_path)
    data = (tmp_path / ".metadata").read_bytes()
    for bit in range(8 * len(data)):
        with pytest.raises(CheckpointError):
            parse_metadata(flipped(data, bit), ".metadata")


def test_lost_trailer_of_our_metadata_is_found(tmp_path: pathlib.Path) -> None:
    save({"a": torch.ones(3)}, tmp_path)
    path = tmp_path / ".metadata"
    path.write_bytes(path.read_bytes()[:-27])
    with pytest.raises(CheckpointError, match="checksum"):
        read_metadata(path)


def test_flipped_bits_of_torchs_metadata_do_no_harm(random_bytes: RandomBytes) -> None:
    # The file has no checksum, so some flips pass. The others are refused with a message.
    data = pickle.dumps(some_metadata(), protocol=4)
    for bit in random_bytes.generator.integers(8 * len(data), size=2000):
        with contextlib.suppress(CheckpointError):
            assert isinstance(parse_metadata(flipped(data, int(bit)), "m"), Metadata)


def info(*values: Any, **extras: Any) -> Any:
    result = filesystem._StorageInfo(*values)
    result.__dict__.update(extras)
    return result


def extras(**changes: Any) -> dict[str, Any]:
    good = {"version": 1, "chunk_nbytes": 4096, "files": {"__0_0.distcp": (5000, bytes(8))}}
    return {"tensorferry": good | changes}


INDEX = MetadataIndex("a", [0, 0], 0)
MALFORMED: dict[str, Any] = {
    "no metadata": [1, 2],
    "no tensors": some_metadata(state_dict_metadata=None),
    "no places": some_metadata(storage_data=None),
    "a name that is none": some_metadata(state_dict_metadata={1: BytesStorageMetadata()}),
    "an entry that is none": some_metadata(state_dict_metadata={"a": 1}),
    "a key that is not an index": some_metadata(storage_data={"a": info("f", 0, 1)}),
    "a place that is none": some_metadata(storage_data={INDEX: ("f", 0, 1)}),
    "a negative offset": some_metadata(storage_data={INDEX: info("f", -1, 1)}),
    "an offset beyond files": some_metadata(storage_data={INDEX: info("f", 1 << 63, 1)}),
    "a length that is not an integer": some_metadata(storage_data={INDEX: info("f", 0, 1.5)}),
    "a path that is not a string": some_metadata(storage_data={INDEX: info(b"f", 0, 1)}),
    "an empty path": some_metadata(storage_data={INDEX: info("", 0, 1)}),
    "a null in the path": some_metadata(storage_data={INDEX: info("f\0", 0, 1)}),
    "a payload beyond the blob": some_metadata(
        storage_data={INDEX: info("f", 0, 9, tensorferry=(5, 5))}
    ),
    "a negative payload": some_metadata(storage_data={INDEX: info("f", 0, 9, tensorferry=(-1, 5))}),
    "a payload that is none": some_metadata(storage_data={INDEX: info("f", 0, 9, tensorferry=3)}),
    "a negative size": some_metadata(
        state_dict_metadata={
            "a": TensorStorageMetadata(TensorProperties(torch.int8), torch.Size([-1]), [])
        }
    ),
}


@pytest.mark.parametrize("metadata", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_metadata_is_refused(tmp_path: pathlib.Path, metadata: Any) -> None:
    with pytest.raises(CheckpointError, match="m'"):
        read_metadata(write(tmp_path / "m", metadata))


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        *({"chunk_nbytes": nbytes} for nbytes in (0, 5000, 1 << 40, "4096")),
        {"files": None},
        {"files": {1: (0, b"")}},
        {"files": {"__0_0.distcp": (5000, bytes(4))}},
        {"files": {"__0_0.distcp": (-1, b"")}},
        {"files": {"__0_0.distcp": (100, bytes(4))}},  # shorter than the payloads in it
    ],
    ids=str,
)
def test_malformed_checksums_are_refused(tmp_path: pathlib.Path, changes: dict[str, Any]) -> None:
    metadata = some_metadata()
    metadata.__dict__.update(extras(**changes))
    with pytest.raises(CheckpointError):
        read_metadata(write(tmp_path / "m", metadata, trailer=True))


def test_well_formed_checksums_are_taken(tmp_path: pathlib.Path) -> None:
    metadata = some_metadata()
    metadata.__dict__.update(extras())
    found = file_checksums(read_metadata(write(tmp_path / "m", metadata, trailer=True)))
    assert list(found["__0_0.distcp"].crcs) == [0, 0]


def test_missing_metadata_is_a_missing_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_metadata(tmp_path / ".metadata")


def test_chunks_are_found_by_their_offsets() -> None:
    metadata = some_metadata()
    first, second = (ChunkStorageMetadata(torch.Size([k, 0]), torch.Size([1, 3])) for k in range(2))
    metadata.state_dict_metadata["a"].chunks = [first, second]  # type: ignore[union-attr]
    assert chunk_of(metadata, MetadataIndex("a", [1, 0])) is second
    assert chunk_of(metadata, MetadataIndex("a", [1, 0], 0)) is second  # the hint is wrong
    assert chunk_of(metadata, MetadataIndex("a", [5, 0])) is None
    assert chunk_of(metadata, MetadataIndex("b")) is None
    assert chunk_of(metadata, MetadataIndex("c", [0])) is None


@pytest.mark.parametrize(
    "name", ["../f", "a/../../f", "/etc/hostname", "..", "link", "link/f", "folder/link"]
)
def test_data_files_outside_of_the_folder_are_refused(tmp_path: pathlib.Path, name: str) -> None:
    folder = tmp_path / "checkpoint"
    (folder / "folder").mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path)
    (folder / "folder" / "link").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="outside"):
        data_file(folder, name)
    assert data_file(folder, name, trusted=True) == str(folder / name)


def test_data_files_in_the_folder_are_taken(tmp_path: pathlib.Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "checkpoint").symlink_to(tmp_path / "real")  # a link to the folder itself is fine
    (tmp_path / "real" / "inside").symlink_to("other")
    for name in ("__0_0.distcp", "folder/f", "inside", "a/../f"):
        assert data_file(tmp_path / "checkpoint", name) == str(tmp_path / "checkpoint" / name)


def test_errors_survive_pickling() -> None:
    error = CheckpointError("damaged", "/f", names=("a", "b"), begin=1, end=2)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "bytes 1 to 2 of '/f' ('a', 'b'): damaged"
    assert vars(again) == vars(error)
