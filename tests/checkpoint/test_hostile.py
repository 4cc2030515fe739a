"""Files made by an attacker, and files damaged at random: no code runs, and the process neither changes nor crashes.

TENSORFERRY_TEST_MUTATIONS sets the number of mutations, TENSORFERRY_TEST_SEED chooses them.
"""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import datetime
import enum
import fractions
import functools
import io
import json
import mmap
import os
import pathlib
import pickle
import resource
import types
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tensorferry.checkpoint import (
    CheckpointError,
    FileSystemReader,
    load,
    verify,
)
from tensorferry.checkpoint.storage import safe_objects
from tensorferry.checkpoint.storage.metadata import parse_metadata, trailer_of
from tensorferry.checkpoint.tools import audit
from tensorferry.checkpoint.zipformat import blobs, unpickling
from tensorferry.checkpoint.zipformat.unpickling import MalformedError, RefusedError
from tests.checkpoint.archives import archive_with, pickle_in, saved
from tests.checkpoint.canary import nothing_happens
from tests.checkpoint.damage import run
from tests.checkpoint.hostile import (
    CODES,
    SYSTEM,
    TARGET,
    Calling,
    mutated,
    name_of,
    some_metadata,
    text,
)
from tests.checkpoint.loads import fails
from tests.checkpoint.states import bits_of
from tests.support.data import SEED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.filterwarnings("ignore")

HARMLESS_CODES = {"class", "defaultdict"}  # in objects of a checkpoint


def placed(path: pathlib.Path, blob: bytes, entry: Any, **changes: Any) -> pathlib.Path:
    """Make a checkpoint with one entry, "a", and the given blob."""
    path.mkdir(exist_ok=True)
    (path / "__0_0.distcp").write_bytes(blob)
    offset = None if isinstance(entry, BytesStorageMetadata) else [0]
    info = filesystem._StorageInfo("__0_0.distcp", 0, len(blob))
    info.__dict__.update(changes)
    metadata = Metadata({"a": entry}, {"a": ("a",)}, {MetadataIndex("a", offset): info})
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


def a_tensor() -> TensorStorageMetadata:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))
    return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([3]), [chunk])


def load_checkpoint(path: pathlib.Path, value: Any, **options: Any) -> Any:
    state = {"a": value}
    dcp.load(state, storage_reader=FileSystemReader(path, **options), no_dist=True)
    return state["a"]


@pytest.fixture(autouse=True)
def in_a_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, warm: None, unlogged: None
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have everything imported that a load needs."""
    tmp_path = tmp_path_factory.mktemp("warm")
    "zip".encode("cp437")
    value = {"a": np.float64(1), "b": torch.ones(2), "c": {1}}
    path = placed(tmp_path / "first", saved(value), BytesStorageMetadata())
    assert load_checkpoint(path, 0)["a"] == 1
    tensor = saved(torch.ones(3))
    load_checkpoint(placed(tmp_path / "first", tensor, a_tensor()), torch.zeros(3))
    (tmp_path / "first.pt").write_bytes(tensor)
    load(tmp_path / "first.pt")
    verify(tmp_path / "first")
    for pickled in (b"\x80\2" + SYSTEM + b".", b"no pickle"):
        for file in (archive_with(pickled), pickled):
            (tmp_path / "first.pt").write_bytes(file)
            with contextlib.suppress(Exception):
                load(tmp_path / "first.pt")


def deed_of_pickle() -> None:
    pickle.loads(b"cos\ngetpid\n)R.")


def change_of_a_member() -> None:
    vars(_MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST)["polluted"] = 1


@pytest.mark.parametrize(
    "deed",
    [
        lambda: os.system("true"),
        lambda: exec("1"),
        lambda: pathlib.Path(TARGET).touch(),
        deed_of_pickle,
        change_of_a_member,
    ],
)
def test_the_canary_notices_what_happens(deed: Any) -> None:
    with pytest.raises(AssertionError), nothing_happens():
        deed()
    vars(_MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST).pop("polluted", None)


@pytest.mark.parametrize("code", CODES.values(), ids=CODES.keys())
def test_hostile_metadata_does_nothing(tmp_path: pathlib.Path, code: bytes) -> None:
    good = pickle.dumps(some_metadata(planner_data="here"), 4)
    place = good.index(b"\x8c\x04here")
    whole = b"\x80\4" + code + b"."
    inside = b"\x80\4" + good[11:place] + code + b"0N" + good[place + 6 :]
    for data in (whole, inside, b"\x80\4" + code + b"0" + good[11:]):
        for pickled in (data, data + trailer_of(data)):
            (tmp_path / ".metadata").write_bytes(pickled)
            with nothing_happens(), pytest.raises(CheckpointError):
                parse_metadata(pickled, ".metadata")
            with nothing_happens():
                assert not verify(tmp_path).sound


@pytest.mark.parametrize("name", CODES)
def test_hostile_objects_do_nothing(tmp_path: pathlib.Path, name: str) -> None:
    code = CODES[name]
    for pickled in (b"\x80\2" + code + b".", b"\x80\2" + code + b"0N."):
        path = placed(tmp_path / "c", archive_with(pickled), BytesStorageMetadata())
        for value in (0, torch.zeros(3)):
            refused = pytest.raises(dcp.api.CheckpointException)
            harmless = contextlib.suppress(dcp.api.CheckpointException)
            with nothing_happens(), harmless if name in HARMLESS_CODES else refused:
                load_checkpoint(path, value)


@pytest.mark.parametrize("code", CODES.values(), ids=CODES.keys())
def test_hostile_tensors_and_files_of_torch_do_nothing(tmp_path: pathlib.Path, code: bytes) -> None:
    blob = archive_with(b"\x80\2" + code + b".")
    path = placed(tmp_path / "c", blob, a_tensor())
    with nothing_happens(), pytest.raises(dcp.api.CheckpointException):
        load_checkpoint(path, torch.zeros(3))
    for file in (blob, b"\x80\2" + code + b"."):
        (tmp_path / "file.pt").write_bytes(file)
        with nothing_happens(), contextlib.suppress(Exception):
            load(tmp_path / "file.pt")


def test_refused_class_and_remedy_are_named_and_trust_is_one(tmp_path: pathlib.Path) -> None:
    data = saved({"a": Calling(complex, "1j"), "b": pathlib.PurePath})
    path = placed(tmp_path / "c", data, BytesStorageMetadata())
    with fails(CheckpointError):
        load_checkpoint(path, 0)
    path = placed(tmp_path / "c", saved(Calling(os.path.basename, "a/b")), BytesStorageMetadata())
    with fails(CheckpointError, "posixpath.basename") as reasons:
        load_checkpoint(path, 0)
    assert "trust_pickle=True" in str(reasons[0])
    assert "'a'" in str(reasons[0])
    assert load_checkpoint(path, 0, trust_pickle=True) == "b"


Point = collections.namedtuple("Point", ["x", "y"])


class Span(NamedTuple):
    """With methods that pickle never calls."""

    begin: int
    end: Any = None

    def length(self) -> int:
        return self.end - self.begin


class Counted(NamedTuple):
    """A class with a method that is called if an object is a key."""

    number: int

    def __hash__(self) -> int:
        return self.number


class Phase(enum.Enum):
    WARM = 1


@dataclasses.dataclass
class Settings:
    phase: Phase
    since: datetime.date


def streams() -> list[Any]:
    """Bytes and text that have been read in part; of the last one, attributes were asked for."""
    made: list[Any] = [io.BytesIO(b"some bytes"), io.StringIO("text\n"), io.BytesIO(b"x")]
    for stream in made:
        stream.read(1)
    assert vars(made[2]) == {}
    return made


def plain_values() -> dict[str, Any]:
    """Return values that programs put into their checkpoints."""
    import argparse
    import decimal
    import random

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "numbers": [1, -1, 10**50, 2.5, float("inf"), True, None, 1j, "text", b"bytes"],
        "containers": (
            {1, 2},
            frozenset([3]),
            {"a": [(), {}]},
            range(3),
            slice(1, 2),
            bytearray(b"b"),
        ),
        "collections": [
            collections.ChainMap({1: 2}, {3: 4}),
            collections.UserDict(a=1),
            collections.UserList([1]),
            collections.UserString("x"),
            collections.OrderedDict(a=1),
            collections.Counter("aab"),
            collections.defaultdict(list, {1: [2]}),
            collections.deque([1, 2], 5),
        ],
        "torch": [torch.Size([2, 3]), torch.float32, torch.strided, torch.device("cuda", 1)],
        "numpy": [np.float64(2.5), np.int32(3), np.bool_(True), np.dtype(">f8"), np.str_("ab")],
        "times": [now, now.date(), datetime.timedelta(1, 2, 3), datetime.datetime(2020, 1, 2)],
        "others": [
            decimal.Decimal("1.50"),
            pathlib.PurePath("a/b"),
            argparse.Namespace(lr=1, b=[2]),
            types.SimpleNamespace(lr=1, b=[2]),
            uuid.UUID(int=5),
            uuid.uuid1(),
            fractions.Fraction(-3, 7),
            fractions.Fraction(5),
            datetime.time(1, 2, 3, 4),
            datetime.time(1, 2, tzinfo=datetime.timezone.utc),
            *(array.array(code, [1, 2]) for code in "bBhHiIlLqQfd"),
            array.array("u", "text"),
        ],
        "named tuples": [Point(1, [2]), Span(1), Span(1, Span(2, 3))],
        "keys": {
            datetime.date(2020, 1, 2): 1,
            np.int64(3): 2,
            Span(1, 2): 3,
            uuid.UUID(int=5): 4,
            pathlib.PurePath("a"): 5,
            torch.device("cpu"): 6,
            fractions.Fraction(1, 3): 7,
        },
        "NumPy's times": [
            *(np.datetime64("2020-01-02", unit) for unit in ("Y", "D", "ns")),
            *(np.timedelta64(7, unit) for unit in ("25s", "M", "generic")),
            np.datetime64("nat"),
        ],
        "random": [random.getstate(), repr(np.random.get_state())],
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }


@pytest.mark.parametrize("name", plain_values())
def test_what_programs_save_is_loaded_as_it_was(tmp_path: pathlib.Path, name: str) -> None:
    value = plain_values()[name]
    found = load_checkpoint(placed(tmp_path / "d", saved(value), BytesStorageMetadata()), 0)
    assert repr(found) == repr(value)
    assert type(found) is type(value)


def test_streams_are_loaded_as_they_were(tmp_path: pathlib.Path) -> None:
    for stream in streams():
        path = placed(tmp_path / "d", saved(stream), BytesStorageMetadata())
        found = load_checkpoint(path, 0)
        assert type(found) is type(stream)
        assert (found.getvalue(), found.tell()) == (stream.getvalue(), stream.tell())


@pytest.mark.parametrize(
    "made",
    [
        np.array(["2020-01", "nat"], "M8[M]"),
        np.arange(3).astype("m8[25s]"),
        np.zeros(2, "V5"),
        np.array(["a", "bc"]),
    ],
    ids=str,
)
def test_times_and_text_of_numpy_are_loaded_as_they_were(made: Any) -> None:
    for value in (made, made[0], made.dtype):
        found = harmlessly(value)
        assert type(found) is type(value)
        assert getattr(found, "dtype", found) == getattr(value, "dtype", value)
        assert repr(found) == repr(value)


def harmlessly(value: Any) -> Any:
    """Return the object that a planner gets for an object in a file."""
    return torch.load(io.BytesIO(safe_objects.sanitize_pickle(saved([value]))), weights_only=False)[
        0
    ]


@pytest.mark.parametrize(
    "value",
    [
        *(Counted(1), Phase.WARM, functools.partial(print), Span),
        *(np.array([{}]), np.zeros(2, [("a", "i4")]), torch.nn.Linear(2, 2)),
    ],
)
def test_what_could_run_code_is_refused(value: Any) -> None:
    with pytest.raises(RefusedError):
        harmlessly(value)
    assert safe_objects.refusal(saved([value])) is not None


def test_what_is_declared_safe_is_loaded_as_by_torch_load(tmp_path: pathlib.Path) -> None:
    value = Settings(Phase.WARM, datetime.date(2020, 1, 2))
    path = placed(tmp_path / "d", saved([value, Counted(1)]), BytesStorageMetadata())
    with fails(CheckpointError, "add_safe_globals"):
        load_checkpoint(path, 0)
    with torch.serialization.safe_globals([Settings, Phase, Counted]):
        assert load_checkpoint(path, 0) == [value, Counted(1)]
        assert safe_objects.refusal(saved(value)) is None
    with fails(CheckpointError, "Settings"):  # the permission ends with the block
        load_checkpoint(path, 0)


def test_what_is_declared_safe_gets_no_stand_in() -> None:
    with (
        torch.serialization.safe_globals([functools.partial]),
        pytest.raises(RefusedError),
    ):
        harmlessly(functools.partial(int, "7"))


def test_arrays_and_tensors_in_objects_are_loaded_as_they_were(tmp_path: pathlib.Path) -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    value = {
        "arrays": [
            np.arange(6).reshape(2, 3),
            np.asfortranarray(np.ones((2, 3))),
            np.array(["a", "bc"]),
        ],
        "matrix": matrix,
        "row": matrix.t()[1],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "empty": torch.empty(0, 3),
        "byte": torch.get_rng_state(),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "float8": torch.ones(2).to(torch.float8_e4m3fn),
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }
    found = load_checkpoint(placed(tmp_path / "d", saved(value), BytesStorageMetadata()), 0)
    assert found.keys() == value.keys()
    for mine, theirs in zip(found.pop("arrays"), value.pop("arrays"), strict=True):
        assert np.array_equal(mine, theirs)
        assert (mine.dtype, mine.flags.f_contiguous) == (theirs.dtype, theirs.flags.f_contiguous)
    for key, tensor in value.items():
        assert bits_of(found[key]) == bits_of(tensor)
        assert type(found[key]) is type(tensor)
        assert found[key].stride() == tensor.stride()
    assert found["conjugate"].is_conj()
    found["matrix"][0, 1] = 77
    assert found["row"][0] == 77  # they share their memory, as before


def test_tensors_beyond_their_storage_are_refused(tmp_path: pathlib.Path) -> None:
    for size, stride in (
        ((4,), (1,)),
        ((1 << 40,), (0,)),
        ((2,), (1 << 62,)),
        ((1 << 62, 0), (1, 1)),
    ):
        code = name_of("torch._utils", "_rebuild_tensor_v2") + b"((" + text("storage")
        code += name_of("torch", "FloatStorage") + text("0") + text("cpu") + b"K\3tQK\0"
        for numbers in (size, stride):
            code += b"(" + b"".join(pickle.dumps(n, 2)[2:-1] for n in numbers) + b"t"
        pickled = b"\x80\2" + code + b"\x89}tR."
        assert archive_with(pickled)
        with pytest.raises((MalformedError, RefusedError)):
            safe_objects.sanitize_pickle(archive_with(pickled))


def test_metadata_that_asks_for_endless_lists_or_odd_files_is_refused(
    tmp_path: pathlib.Path,
) -> None:
    def place(name: str) -> Any:
        return {MetadataIndex("a", [0]): filesystem._StorageInfo(name, 0, 1)}

    for changes in (
        {"planner_data": {"a": ("list", 1 << 62)}},
        {"storage_data": place("\ud800")},
        {"storage_meta": 5},
        {
            "state_dict_metadata": {
                "a": TensorStorageMetadata(
                    TensorProperties(torch.float32), torch.Size([1 << 62] * 20), []
                )
            }
        },
    ):
        with pytest.raises(CheckpointError):
            parse_metadata(pickle.dumps(some_metadata(**changes), 4), "m")


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_pipe_among_the_files_is_refused_and_not_waited_for(
    tmp_path: pathlib.Path, name: str
) -> None:
    path = placed(tmp_path / "c", b"", BytesStorageMetadata())
    (path / name).unlink()
    os.mkfifo(path / name)
    (problem,) = verify(path).problems
    assert "not a regular file" in str(problem)
    with pytest.raises(dcp.api.CheckpointException, match="not a regular file"):
        load_checkpoint(path, 0)


def test_names_that_a_terminal_would_obey_are_escaped(tmp_path: pathlib.Path) -> None:
    path = placed(tmp_path / "c", saved(1), BytesStorageMetadata())
    info = filesystem._StorageInfo("\x1b[2Jfile", 0, 5)
    name = "\x1b]0;title\x07\ud800"
    metadata = Metadata({name: BytesStorageMetadata()}, None, {MetadataIndex(name): info})
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    for command in (("ls", path, "--shards"), ("verify", path)):
        result = run(*command)
        assert "\x1b" not in result.output
        assert "\\x1b" in result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)
    assert json.loads(run("ls", path, "--json").stdout)[0]["name"] == name


# --- at random ---

MUTATIONS = int(os.environ.get("TENSORFERRY_TEST_MUTATIONS", "1000"))
OBJECT = {"a": [1, 2.5, "text"], "b": np.arange(4.0), "c": {1, 2}, "d": torch.Size([2])}


_WATCHED_TOGETHER = 50


def attempt_metadata(data: bytes, path: pathlib.Path) -> None:
    for pickled in (data, data + trailer_of(data)):
        with contextlib.suppress(CheckpointError):
            audit.entries_of(parse_metadata(pickled, "m"))


def attempt_object(data: bytes, path: pathlib.Path) -> None:
    with contextlib.suppress(MalformedError, RefusedError):
        safe = safe_objects.sanitize_pickle(archive_with(data))
        torch.load(io.BytesIO(safe), weights_only=False)


def attempt_blob(data: bytes, path: pathlib.Path) -> None:
    blobs.examine(io.BytesIO(data))
    blobs.parse(data[: blobs.HEAD_NBYTES], data[-blobs.TAIL_NBYTES :], len(data))
    with contextlib.suppress(MalformedError, RefusedError):
        safe_objects.sanitize_pickle(data)


def attempt_description(data: bytes, path: pathlib.Path) -> None:
    blob = archive_with(data)
    blobs.parse(blob, blob, len(blob))


def attempt_file(data: bytes, path: pathlib.Path) -> None:
    (path / "file.pt").write_bytes(data)
    with contextlib.suppress(Exception):
        load(path / "file.pt")


def attempt_checkpoint(data: bytes, path: pathlib.Path) -> None:
    (path / "c" / ".metadata").write_bytes(data)
    assert isinstance(verify(path / "c").problems, list)
    with contextlib.suppress(dcp.api.CheckpointException):
        load_checkpoint(path / "c", 0)


# Every nth mutation is one of them.
ATTEMPTS: list[tuple[int, str, Callable[[bytes, pathlib.Path], None]]] = [
    (100, "metadata", attempt_checkpoint),
    (25, "file", attempt_file),
    (5, "file", attempt_blob),
    (4, "tensor", attempt_description),
    (2, "object", attempt_object),
    (1, "metadata", attempt_metadata),
]


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """Let what asks for much memory fail."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def test_mutated_files_do_nothing(tmp_path: pathlib.Path, bounded_memory: None) -> None:
    file = saved(OBJECT)
    placed(tmp_path / "c", file, BytesStorageMetadata())
    sources = {
        "metadata": pickle.dumps(some_metadata(storage_meta=StorageMeta("x")), 4),
        "object": pickle.dumps(OBJECT | {"d": np.float32(1)}, 2),
        "file": file,
        "tensor": pickle_in(saved(torch.ones(3))),
    }
    for first in range(0, MUTATIONS, _WATCHED_TOGETHER):
        with nothing_happens():
            for number in range(first, min(first + _WATCHED_TOGETHER, MUTATIONS)):
                random = np.random.default_rng([SEED, number])
                _, source, attempt = next(each for each in ATTEMPTS if number % each[0] == 0)
                data = mutated(sources[source], random)
                try:
                    attempt(data, tmp_path)
                except Exception as error:
                    note = f"TENSORFERRY_TEST_SEED={SEED}, mutation {number}: {attempt.__name__}({data!r})"
                    raise AssertionError(note) from error


def test_mutated_pickles_never_ask_for_much_memory(bounded_memory: None) -> None:
    """Python's unpickler would use gigabytes for a number that four damaged bytes can make."""
    sources = [*CODES.values(), *(pickle.dumps(OBJECT, protocol)[:-1] for protocol in range(6))]
    for number in range(10 * MUTATIONS):
        random = np.random.default_rng([SEED, number])
        source = sources[number % len(sources)] * (1 + number % 2)
        data = mutated(source + b"r" + random.bytes(4) + b".", random)
        assert "MemoryError" not in problem_of(data), (number, data)


def problem_of(data: bytes) -> str:
    try:
        unpickling.Unpickler(data, unpickling.inert).load()
    except (MalformedError, RefusedError) as error:
        return str(error)
    return ""


def test_the_sizes_of_sound_pickles_are_accepted() -> None:
    many = [(number, str(number), float(number), b"x" * 300, {number}) for number in range(70_000)]
    for value in (plain_values(), OBJECT, many, ["é" * 300, 1 << 5000, bytearray(9)]):
        for protocol in range(2, 6):
            unpickling.check_sizes(pickle.dumps(value, protocol))
    for protocol in range(2):
        unpickling.check_sizes(pickle.dumps(OBJECT, protocol))


@pytest.mark.parametrize("mmap", [False, True])
def test_names_that_torch_would_take_for_its_own_are_refused(
    tmp_path: pathlib.Path, mmap: bool
) -> None:
    """torch finds records by names in any case: another pickle than the one that was looked at."""
    path = tmp_path / "s.pt"
    for old, new in ((b"data.pkl", b"DATA.PKL"), (b"byteorder", b"Byteorder")):
        path.write_bytes(saved({"a": torch.ones(3)}).replace(old, new))
        with pytest.raises(CheckpointError, match=f"the record '{new.decode()}' differs"):
            load(path, mmap=mmap)


def test_of_the_other_byte_order_only_tensors_are_refused() -> None:
    """No class needs to be trusted for them, and pickles have the same bytes on all machines."""
    value = {"a": [1, 2.5, "text"]}
    safe = safe_objects.sanitize_pickle(saved(value).replace(b"little", b"big   "))
    assert torch.load(io.BytesIO(safe), weights_only=False) == value
    with pytest.raises(MalformedError, match="the other byte order"):
        safe_objects.sanitize_pickle(saved([torch.ones(3)]).replace(b"little", b"big   "))


def test_dtypes_may_be_keys(tmp_path: pathlib.Path) -> None:
    value = {torch.float32: 1, (torch.int8, "a"): {2}, ("b", (1, 2)): {torch.bool, (3, 4)}}
    torch.save(value, tmp_path / "s.pt")
    assert load(tmp_path / "s.pt") == torch.load(tmp_path / "s.pt") == value


def test_a_number_does_not_take_memory() -> None:
    numbers = name_of("builtins", "range") + pickle.dumps(10**12, 2)[2:-1] + b"\x85R"
    storage = b"(" + text("storage") + name_of("torch", "FloatStorage") + text("0") + text("cpu")
    for code in (
        name_of("torch", "Size") + numbers + b"\x85R",
        name_of("torch._utils", "_rebuild_tensor_v2") + b"(K\0K\0" + numbers + b")\x89}tR",
        name_of("torch._utils", "_rebuild_tensor_v2")
        + storage
        + b"K\0tQK\0"
        + numbers
        + b")\x89}tR",
    ):
        with pytest.raises((MalformedError, RefusedError)):
            safe_objects.sanitize_pickle(archive_with(b"\x80\2" + code + b"."))


def test_a_sparse_tensor_in_a_set_is_loaded(tmp_path: pathlib.Path) -> None:
    (found,) = harmlessly({torch.eye(2).to_sparse()})
    assert torch.equal(found.to_dense(), torch.eye(2))


def test_a_storage_whose_name_has_no_end_is_refused() -> None:
    code = name_of("torch._utils", "_rebuild_tensor_v2") + b"((" + text("storage")
    code += name_of("torch", "FloatStorage") + b"N" + b"q\1h\1\x86" * 100 + text("cpu")
    code += b"K\1tQK\0K\1\x85K\1\x85\x89}tR"
    blob = archive_with(b"\x80\2" + code + b".")
    assert blobs.parse(blob, blob, len(blob)) is None


def test_storages_and_empty_tensors_stay_as_they_are() -> None:
    tensor = torch.arange(4.0)
    found, view = harmlessly((tensor.storage(), tensor[1:]))
    assert found.tolist() == tensor.tolist()
    view[0] = 7.0
    assert found.tolist() == [0.0, 7.0, 2.0, 3.0]
    found = harmlessly(torch.empty_strided((0, 3), (1, 7)).requires_grad_())
    assert found.stride() == (1, 7)
    assert found.requires_grad


def test_what_a_module_and_a_clock_give_is_read(tmp_path: pathlib.Path) -> None:
    state = torch.nn.Linear(2, 2).state_dict()
    zone = datetime.timezone(datetime.timedelta(hours=1), "CET")
    safe = safe_objects.sanitize_pickle(saved((state, zone)))
    found, found_zone = torch.load(io.BytesIO(safe), weights_only=False)
    assert found._metadata == state._metadata
    assert found.keys() == state.keys()
    assert repr(found_zone) == repr(zone)
