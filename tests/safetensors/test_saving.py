"""Saving: the same bytes and refusals as safetensors, and after every failure either the old or the new file."""

from __future__ import annotations

import errno
import os
import pathlib
import stat
import subprocess
import sys
import tempfile
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import safetensors
from tensorferry.checkpoint.tools import verify
from tensorferry.safetensors import checksums, saving
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.saving import TensorSpec, save, save_file, save_model
from tensorferry.transfer import sidecars
from tests.safetensors.files import Tied
from tests.support import child
from tests.support.data import long_name
from tests.support.expect import storage_error
from tests.support.faultfs import Fault, FaultFS
from tests.support.ranks import files_of

if TYPE_CHECKING:
    from tests.support.power_cuts import Cut

MIB = 1 << 20

TORCH_NAMES = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 float8_e4m3fn "
    "float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
)
TORCH_DTYPES = [getattr(torch, name) for name in TORCH_NAMES.split() if hasattr(torch, name)]
NUMPY_DTYPES = [*"?bBhHiIqQefdF", ">h", ">f", ">F"]

names = st.text(st.characters(exclude_categories=("Cs",)), max_size=12).filter(
    lambda name: name != "__metadata__"  # refused: readers take it for the metadata of the file
)
shapes = st.lists(st.integers(0, 5), max_size=4)
# safetensors writes several metadata entries in varying order, and writes an empty dict as a file it cannot read.
texts = st.dictionaries(names, names, min_size=1, max_size=1)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Contiguous tensors of all dtypes, parts of others among them."""
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    packed = str(dtype).endswith("_x2")
    shape = draw(shapes.filter(bool) if packed else shapes)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    begin = draw(st.sampled_from([0, 64]))
    content = bytearray(begin) + draw(st.binary(min_size=nbytes + 1, max_size=nbytes + 1))
    memory = torch.frombuffer(content, dtype=torch.uint8).clone()
    return memory[begin : begin + nbytes].view(dtype).view(shape)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """C-contiguous arrays of all dtypes and byte orders."""
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    shape = draw(shapes)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(draw(st.binary(min_size=nbytes, max_size=nbytes)), dtype).reshape(shape)


def file_bytes(state: Any, metadata: Any) -> bytes:
    with tempfile.TemporaryDirectory(prefix="tensorferry-test-", dir="/dev/shm") as folder:
        path = pathlib.Path(folder) / "file"
        save_file(state, path, metadata)
        return path.read_bytes()


@given(st.dictionaries(names, tensors(), max_size=8), st.none() | texts)
def test_torchs_tensors_become_safetensors_bytes(state: dict[str, Any], metadata: Any) -> None:
    expected = safetensors.torch.save(state, metadata)
    assert save(state, metadata) == expected
    assert file_bytes(state, metadata) == expected


@given(st.dictionaries(names, arrays(), max_size=8), st.none() | texts)
def test_numpys_arrays_become_safetensors_bytes(state: dict[str, Any], metadata: Any) -> None:
    expected = safetensors.numpy.save(state, metadata)
    assert save(state, metadata) == expected
    assert file_bytes(state, metadata) == expected


@pytest.mark.parametrize("sync", [True, False])
def test_large_and_small_tensors_become_one_file(directory: pathlib.Path, sync: bool) -> None:
    state = {f"small {k}": torch.full((k,), k) for k in range(2000)}
    state |= {f"large {k}": torch.randn(MIB + k) for k in range(4)}
    save_file(state, directory / "ours", {"a": "b"}, sync=sync)
    safetensors.torch.save_file(state, directory / "theirs", {"a": "b"})
    assert (directory / "ours").read_bytes() == (directory / "theirs").read_bytes()
    assert files_of(directory) == {"ours", "theirs"}


def test_several_metadata_are_all_there_in_one_order(directory: pathlib.Path) -> None:
    metadata, state = {"z": "1", "a": "ä\n", "m": ""}, {"t": torch.ones(2)}
    save_file(state, directory / "file", metadata)
    with safetensors.safe_open(directory / "file", "pt") as file:
        assert file.metadata() == metadata
    assert (directory / "file").read_bytes() == save(state, dict(reversed(metadata.items())))


def test_serialize_takes_their_specs_and_ours(directory: pathlib.Path) -> None:
    array = np.arange(6, dtype="f4")
    options: dict[str, Any] = {"dtype": "float32", "shape": [2, 3]}
    options |= {"data_ptr": array.ctypes.data, "data_len": array.nbytes}
    theirs, ours = safetensors.TensorSpec(**options), TensorSpec(**options)
    assert repr(ours) == repr(theirs)
    expected = safetensors.serialize({"a": theirs}, {"b": "c"})
    assert saving.serialize({"a": ours}, {"b": "c"}) == expected
    assert saving.serialize({"a": theirs}, {"b": "c"}) == expected
    saving.serialize_file({"a": ours}, directory / "file", {"b": "c"})
    assert (directory / "file").read_bytes() == expected
    with pytest.raises(SafetensorError, match="data_len is 20"):
        saving.serialize({"a": TensorSpec(**options | {"data_len": 20})})
    with pytest.raises(SafetensorError, match='Unknown dtype "foo"'):
        TensorSpec(**options | {"dtype": "foo"})
    packed = options | {"dtype": "float4_e2m1fn_x2", "data_len": 6}
    assert TensorSpec(**packed).shape == safetensors.TensorSpec(**packed).shape == [2, 6]
    with pytest.raises(TypeError, match="not a TensorSpec"):
        saving.serialize({"a": {"dtype": "F32"}})  # type: ignore[dict-item]


WHOLE = torch.arange(10)
REFUSED: dict[str, Any] = {
    "no dict": [torch.ones(1)],
    "no tensor": {"a": 1},
    "sparse": {"a": torch.eye(3).to_sparse(), "b": torch.ones(1)},
    "shared": {"whole": WHOLE, "same": WHOLE, "part": WHOLE[2:5], "other": torch.ones(3)},
    "overlapping": {"a": WHOLE[:6], "b": WHOLE[5:]},
    "transposed": {"a": torch.ones(2, 3).t()},
    "every second": {"a": torch.ones(6)[::2]},
    "a name": {1: torch.ones(1)},
    "meta": {"a": torch.ones(1, device="meta")},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_safetensors_refuses_is_refused_as_there(directory: pathlib.Path, name: str) -> None:
    (directory / "file").write_bytes(b"old")
    with pytest.raises(Exception) as theirs:
        safetensors.torch.save(REFUSED[name])
    for action in (save, lambda state: save_file(state, directory / "file")):
        with pytest.raises(theirs.type) as ours:
            action(REFUSED[name])
        if name in ("no dict", "no tensor"):
            assert str(ours.value) == str(theirs.value)
        elif name == "meta":
            assert str(ours.value) == f"{theirs.value} (tensor 'a')"
        elif name != "a name":
            assert str(ours.value).split()[:4] == str(theirs.value).split()[:4]
    assert (directory / "file").read_bytes() == b"old"


def test_parts_of_one_tensor_that_do_not_overlap_are_saved() -> None:
    state = {"a": WHOLE[:5], "b": WHOLE[5:]}
    assert save(state) == safetensors.torch.save(state)


@pytest.mark.parametrize(
    ("state", "metadata", "error", "match"),
    [
        ({"a": torch.ones(1, dtype=torch.complex128)}, None, SafetensorError, "'a'.*complex128"),
        ({"a": np.ones(1, "M8[s]")}, None, SafetensorError, "'a'.*datetime64"),
        ({"a": np.array([object()])}, None, SafetensorError, "'a'.*object"),
        ({"__metadata__": torch.ones(1)}, None, SafetensorError, "metadata"),
        ({"a": torch.ones(1)}, {"a": 1}, TypeError, "1.*not a string"),
        ({"a": torch.ones(1)}, ["a"], TypeError, "not a dict"),
        ({"a": np.ones((2, 3)).T}, None, ValueError, "non contiguous tensor: `a`"),
        ({"a": torch.empty(3, device="meta")}, None, RuntimeError, "meta tensor.*'a'"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(
    directory: pathlib.Path, state: Any, metadata: Any, error: Any, match: str
) -> None:
    with pytest.raises(error, match=match):
        save_file(state, directory / "file", metadata)
    assert files_of(directory) == set()
    with pytest.raises(error, match=match):
        save(state, metadata)


def test_lazily_conjugated_tensors_are_saved_as_what_they_are(directory: pathlib.Path) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    save_file({"a": tensor.conj()}, directory / "file")
    assert (directory / "file").read_bytes() == save({"a": tensor.conj()})
    found = safetensors.torch.load_file(directory / "file")
    assert torch.equal(found["a"], tensor.conj().resolve_conj())


def test_a_model_with_tied_weights_is_saved_as_by_safetensors(directory: pathlib.Path) -> None:
    model, other = Tied(), Tied()
    save_model(model, directory / "ours")
    safetensors.torch.save_model(model, str(directory / "theirs"))
    assert (directory / "ours").read_bytes() == (directory / "theirs").read_bytes()
    safetensors.torch.load_model(other, directory / "ours")
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    save_model(model, directory / "ours", {"second.weight": "mine"})
    with safetensors.safe_open(directory / "ours", "pt") as file:
        assert file.metadata() == {"second.weight": "mine"}


def test_a_model_with_strided_weights_is_saved_as_if_it_had_none(directory: pathlib.Path) -> None:
    model = Tied(strided=True)
    save_model(model, directory / "ours")
    safetensors.torch.save_model(model, str(directory / "theirs"))
    assert (directory / "ours").read_bytes() == (directory / "theirs").read_bytes()
    with pytest.raises(ValueError, match="force_contiguous=True"):
        save_model(model, directory / "ours", force_contiguous=False)


def test_an_expanded_buffer_is_not_saved_in_place_of_the_whole_one(directory: pathlib.Path) -> None:
    model, whole = torch.nn.Module(), torch.arange(4.0)
    model.register_buffer("a", whole[:1].expand(4))
    model.register_buffer("b", whole)
    save_model(model, directory / "file")
    found = safetensors.torch.load_file(directory / "file")
    assert found.keys() == {"b"}
    assert torch.equal(found["b"], whole)
    with safetensors.safe_open(directory / "file", "pt") as file:
        assert file.metadata() == {"a": "b"}


def test_a_model_of_which_nothing_is_whole_is_refused(directory: pathlib.Path) -> None:
    model, whole = torch.nn.Module(), torch.arange(10.0)
    model.register_buffer("a", whole[:6])
    model.register_buffer("b", whole[3:])
    for function in (save_model, safetensors.torch.save_model):
        with pytest.raises(RuntimeError, match="None is covering the entire storage"):
            function(model, str(directory / "file"))


def test_permissions_and_links_stay(directory: pathlib.Path) -> None:
    path, link = directory / "file", directory / "link"
    path.write_bytes(b"old")
    path.chmod(0o640)
    link.symlink_to("file")
    save_file({"a": torch.ones(3)}, link, sync=True)
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.read_bytes() == safetensors.torch.save({"a": torch.ones(3)})


@pytest.mark.parametrize("sync", [True, False])
def test_no_file_is_found_beside_checksums_of_the_one_before(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    (directory / "blobs").mkdir()
    path, link = directory / "blobs" / "0123", directory / "model.safetensors"
    link.symlink_to("blobs/0123")
    save_file({"a": torch.ones(3)}, link)
    old = checksums.write([path, link])
    replace, sums, replaced = os.replace, checksums.read(link), []

    def watched(*arguments: Any, **options: Any) -> None:
        replaced.append(any(map(os.path.exists, old)))
        replace(*arguments, **options)
        if len(replaced) == 1:  # another writer, which began earlier, writes its checksums now
            checksums.keep(link, sums)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", watched)
        save_file({"a": torch.zeros(3)}, link, sync=sync)
    assert replaced == [False, False]  # the file, and those checksums
    assert files_of(directory) == {"blobs", "model.safetensors"}
    assert files_of(directory / "blobs") == {"0123"}


def test_places_where_no_file_can_be_are_refused(directory: pathlib.Path) -> None:
    state = {"a": torch.ones(3)}
    with pytest.raises(IsADirectoryError, match=str(directory)):
        save_file(state, directory)
    with pytest.raises(FileNotFoundError):
        save_file(state, directory / "missing" / "file")
    with pytest.raises(ValueError, match="not a regular file"):
        save_file(state, "/dev/null")
    (directory / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        save_file(state, directory / "file" / "file")


def test_a_mapped_file_may_be_saved_over(directory: pathlib.Path) -> None:
    path = directory / "file"
    save_file({"a": torch.arange(MIB)}, path)
    state = safetensors.torch.load_file(path)
    save_file(state, path)
    assert torch.equal(state["a"], torch.arange(MIB))
    assert torch.equal(safetensors.torch.load_file(path)["a"], torch.arange(MIB))


def test_tensors_that_change_meanwhile_leave_a_sound_file(directory: pathlib.Path) -> None:
    state = {str(k): torch.zeros(MIB) for k in range(16)}
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            for tensor in state.values():
                tensor += 1

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(3):
            save_file(state, directory / "file")
    finally:
        stop.set()
        thread.join()
    found = safetensors.torch.load_file(directory / "file")
    assert all(bool((tensor == tensor.round()).all()) for tensor in found.values())


@pytest.mark.parametrize("operation", ["write", "fsync"])
def test_a_failing_drive_leaves_the_old_file(faultfs: FaultFS, operation: str) -> None:
    path = faultfs.path / "file"
    save_file({"a": torch.ones(10)}, path)
    old = path.read_bytes()
    faultfs.order(Fault(operation, error=errno.EIO))
    with storage_error(errno.EIO, path):
        save_file({"a": torch.ones(4 * MIB)}, path, sync=True)
    faultfs.clear()
    assert path.read_bytes() == old
    assert files_of(faultfs.path) == {"file"}


def test_a_power_cut_after_a_synced_save_loses_nothing(cut: Cut) -> None:
    state = {"a": torch.arange(MIB)}
    save_file({"a": torch.ones(10)}, cut.path / "file", sync=True)
    save_file(state, cut.path / "file", sync=True)
    with cut.now() as after:
        assert torch.equal(safetensors.torch.load_file(after / "file")["a"], state["a"])


def test_numpys_arrays_need_no_torch(directory: pathlib.Path) -> None:
    code = f"from tests.safetensors import programs; print(programs.save_numpy({str(directory / 'f')!r}))"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=child.ROOT, capture_output=True, check=True, text=True)
    assert ended.stdout == "False\n"


def test_memory_beyond_the_state_is_bounded(directory: pathlib.Path) -> None:
    function = "tests.safetensors.programs:peak_of_save"
    ended = child.call(function, path=directory / "f", nbytes=400 * MIB)
    assert ended.result <= 160 * MIB  # of 400


@pytest.mark.parametrize("letter", ["m", "字"])
@pytest.mark.parametrize("nbytes", [249, 250, 255])
def test_any_name_that_the_file_system_takes_is_taken(
    directory: pathlib.Path, nbytes: int, letter: str
) -> None:
    """The file of checksums has a longer name; if that is too long, checksums are left out."""
    path = directory / long_name(nbytes, letter, ".safetensors")
    for value in range(2):
        save_file({"a": torch.full((1000,), value)}, path)
        assert torch.equal(safetensors.torch.load_file(path)["a"], torch.full((1000,), value))
        report = verify(path)
        assert not report.problems
        if nbytes > 255 - len(sidecars.SUFFIX):
            with pytest.raises(FileNotFoundError):
                checksums.read(path)
            with pytest.raises(OSError, match="too long"):
                checksums.write(path)
        else:
            checksums.write(path)
    assert files_of(directory) <= {path.name, path.name + sidecars.SUFFIX}


def test_checksums_whose_name_is_too_long_are_refused_before_a_file_is_read(
    faultfs: FaultFS,
) -> None:
    paths = [faultfs.path / "short", faultfs.path / long_name(250, "m")]
    for path in paths:
        save_file({"a": torch.ones(1000)}, path)
    faultfs.order(Fault("read", error=errno.EIO))
    with pytest.raises(OSError, match="too long"):
        checksums.write(paths)
