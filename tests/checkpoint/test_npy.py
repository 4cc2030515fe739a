"""NumPy's .npy and .npz files: read in place as NumPy reads them; damage is found."""

from __future__ import annotations

import errno
import io
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorferry import _core
from tensorferry.npy import FormatError, NumpyFile
from tests.checkpoint.damage import flip
from tests.support.effort import examples
from tests.support.faultfs import Fault
from tests.support.leaks import descriptors, settled

if TYPE_CHECKING:
    import pathlib

    from tests.support.faultfs import FaultFS

RECORD = np.dtype([("name", "S5"), ("at", ">f8", (2,)), ("ok", "?")])
DTYPES = ("<f4", ">f8", "<i2", "?", "<c16", "S7", "<U3", "M8[ns]", "V3", RECORD)


def made(dtype: Any, shape: tuple[int, ...], order: Any = "C") -> np.ndarray[Any, Any]:
    """Return an array with arbitrary bytes, or valid ones for bool."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(1).integers(0, 2 if dtype.kind == "b" else 100, count, np.uint8)
    if dtype.kind == "U":
        data = data * (np.arange(count) % 4 == 0)
    return np.asarray(np.ndarray(shape, dtype, data.astype(np.uint8)), order=order)


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    return {
        "a": made("<f4", (300, 70)),
        "b.c": made("<i8", (40, 50), "F"),
        "scalar": np.array(7, np.int32),
        "empty": np.zeros((0, 3), np.float64),
    }


def saved(directory: pathlib.Path, kind: str) -> pathlib.Path:
    path = directory / "it.npz"
    write: Any = np.savez if kind == "stored" else np.savez_compressed
    write(path, **arrays())
    return path


def same(found: Any, expected: Any) -> bool:
    return (
        type(found) is type(expected)
        and (found.dtype, found.shape) == (expected.dtype, expected.shape)
        and np.ascontiguousarray(found).tobytes() == np.ascontiguousarray(expected).tobytes()
    )


INDICES = st.one_of(
    st.integers(-9, 9),
    st.slices(9),
    st.none(),
    st.just(...),
    st.lists(st.integers(-3, 3), max_size=5),
    st.tuples(st.integers(-3, 3), st.slices(5)),
    st.tuples(st.slices(5), st.none(), st.integers(-3, 3)),
    st.tuples(st.just(...), st.slices(7)),
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)),
)


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 7), max_size=3).map(tuple),
    order=st.sampled_from("CF"),
    kind=st.sampled_from(["npy", "stored", "compressed"]),
    index=INDICES,
)
@settings(max_examples=examples(300))
def test_arrays_and_what_indices_choose_are_numpys(
    directory: pathlib.Path, dtype: Any, shape: Any, order: str, kind: str, index: Any
) -> None:
    array, path, name = made(dtype, shape, order), directory / "it", ""
    with path.open("wb") as stream:
        if kind == "npy":
            np.save(stream, array)
        else:
            name = "x"
            (np.savez if kind == "stored" else np.savez_compressed)(stream, x=array)
    with NumpyFile(path) as file:
        assert list(file) == [name]
        assert same(file[name].read(), array)
        assert same(np.asarray(file[name]), array)
        try:
            expected = array[index]
        except IndexError:
            with pytest.raises(IndexError):
                file[name][index]
        else:
            assert same(file[name][index], expected)


@pytest.mark.parametrize("order", ["C", "F"])
def test_only_the_bytes_that_are_wanted_are_read(
    directory: pathlib.Path, order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = made("<f4", (2000, 1500), order)
    np.save(directory / "it.npy", array)
    with NumpyFile(directory / "it.npy") as file:
        read: list[int] = []
        plain = type(file._file).read_into

        def counted(self: Any, wanted: Any, *args: Any, **options: Any) -> Any:
            if isinstance(wanted, _core.Segments):  # runs, with gaps between them
                read.append(sum(wanted.ranges(0)[1]))
            else:
                read.append(sum(each if isinstance(each, int) else each.nbytes for each in wanted))
            return plain(self, wanted, *args, **options)

        monkeypatch.setattr(type(file._file), "read_into", counted)
        rows = (slice(None), slice(40, 60)) if order == "F" else slice(40, 60)
        for index in (rows, 7, (slice(5, 10), slice(None, None, 400)), [3, 1999, 3]):
            assert same(file[""][index], array[index])
        assert read[0] == array[rows].nbytes
        assert max(read) < array.nbytes // 2 or order == "F"
        monkeypatch.undo()
        out = np.empty(array.shape, np.float32)
        if order == "C":
            assert file[""].read(out) is out
            assert same(out, array)
        else:
            with pytest.raises(FormatError, match="cannot be read into out= of 12000000 bytes"):
                file[""].read(out)


def test_out_is_refused_where_it_does_not_fit(directory: pathlib.Path) -> None:
    path = saved(directory, "compressed")
    with NumpyFile(path) as file, pytest.raises(FormatError, match="cannot be read into out="):
        file["a"].read(np.empty((300, 70), np.float32))
    with (
        NumpyFile(saved(directory, "stored")) as file,
        pytest.raises(FormatError, match="of 4 byt"),
    ):
        file["a"].read(np.empty(1, np.float32))


@pytest.mark.parametrize("kind", ["stored", "compressed"])
def test_every_flipped_bit_of_a_member_is_found(directory: pathlib.Path, kind: str) -> None:
    path = saved(directory, kind)
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        (begin, end) = (archive.getinfo(f"{name}.npy").header_offset for name in ("a", "b.c"))
    found = 0
    for at in np.linspace(begin + 200, end - 1, 30).astype(int):
        path.write_bytes(data)
        flip(path, 8 * int(at) + 3)
        try:
            read = NumpyFile(path)["a"].read()
        except FormatError:
            found += 1
        else:  # bits after the end of a compressed stream have no meaning
            assert kind == "compressed"
            assert same(read, arrays()["a"])
    assert found >= 29


@pytest.mark.parametrize("kind", ["npy", "stored", "compressed"])
def test_truncated_files_are_found(directory: pathlib.Path, kind: str) -> None:
    path = directory / "it.npy"
    if kind == "npy":
        np.save(path, made("<f4", (10, 10)))
    else:
        path = saved(directory, kind)
    data = path.read_bytes()
    for nbytes in (*range(150), *range(150, len(data), len(data) // 100)):
        path.write_bytes(data[:nbytes])
        with pytest.raises(FormatError):
            NumpyFile(path)


def test_what_is_behind_an_array_is_not_lost_silently(directory: pathlib.Path) -> None:
    with (directory / "two").open("wb") as stream:
        np.save(stream, np.ones(3))
        np.save(stream, np.ones(4))
    with pytest.raises(FormatError, match="160 more bytes follow it"):
        NumpyFile(directory / "two")


def test_pickled_objects_are_refused_and_other_members_read(directory: pathlib.Path) -> None:
    objects = np.array([{}], object)
    mixed = np.zeros(2, [("a", "i4"), ("b", "O")])
    np.save(directory / "it.npy", objects, allow_pickle=True)
    np.savez(directory / "it.npz", fine=np.ones(3), mixed=mixed)
    with pytest.raises(FormatError, match="pickled objects, which may run any code"):
        NumpyFile(directory / "it.npy")
    with NumpyFile(directory / "it.npz") as file:
        assert list(file) == ["fine", "mixed"]
        assert same(file["fine"].read(), np.ones(3))
        with pytest.raises(FormatError, match=r"'mixed': it has pickled objects") as caught:
            file["mixed"]
        assert (caught.value.path, caught.value.name) == (str(directory / "it.npz"), "mixed")


def test_names_outside_latin_1_are_read(directory: pathlib.Path) -> None:
    """np.save() writes version 3.0 for them."""
    array = np.array([(1.5, 2), (3, 4)], [("\u4f60\\ '\"", "f4"), ("é", "<i2")])
    with pytest.warns(UserWarning, match="3.0"):
        np.save(directory / "it.npy", array)
    with NumpyFile(directory / "it.npy") as file:
        assert same(file[""].read(), array)
        assert same(file[""][1:], array[1:])


def test_iteration_is_numpys(directory: pathlib.Path) -> None:
    array = made("<f4", (3, 2))
    np.savez(directory / "it.npz", array=array, scalar=np.array(5.0), empty=np.zeros((0, 3)))
    with NumpyFile(directory / "it.npz") as file:
        assert all(same(*rows) for rows in zip(file["array"], array, strict=True))
        assert list(file["empty"]) == []
        for use in (list, iter, lambda it: 5.0 in it):
            with pytest.raises(TypeError):
                use(file["scalar"])


@pytest.mark.parametrize("kind", ["npy", "stored", "compressed"])
@pytest.mark.parametrize("shape", [(40, 100), (100, 40)])
def test_a_file_that_was_saved_again_in_place_is_refused(
    directory: pathlib.Path, kind: str, shape: tuple[int, int]
) -> None:
    """np.save() and np.savez() write in place; the same sizes may be other arrays."""
    path = directory / f"it.{'npy' if kind == 'npy' else 'npz'}"
    write: Any = {"npy": np.save, "stored": np.savez, "compressed": np.savez_compressed}[kind]
    write(path, np.zeros((40, 100), np.float32))
    with NumpyFile(path) as file:
        array = next(iter(file.values()))
        write(path, np.ones(shape, np.int32))
        for read in (array.read, array.check, lambda: array[3:5], lambda: list(array)):
            if read == array.check and kind == "npy":
                continue
            with pytest.raises(FormatError, match=r"it\.np.*: it was changed"):
                read()


def test_members_that_are_not_arrays_are_refused_when_they_are_requested(
    directory: pathlib.Path,
) -> None:
    plain = io.BytesIO()
    np.save(plain, np.ones(3))
    with zipfile.ZipFile(directory / "it.npz", "w") as archive:
        archive.writestr("a.npy", plain.getvalue())
        archive.writestr("text", b"text")
    with NumpyFile(directory / "it.npz") as file:
        assert same(file["a"].read(), np.ones(3))
        with pytest.raises(FormatError, match="'text': this member is not"):
            file["text"]
    with zipfile.ZipFile(directory / "it.npz", "w") as archive:
        archive.writestr("a.npy", plain.getvalue())
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a.npy", plain.getvalue())
    with pytest.raises(FormatError, match="'a': two arrays have this name"):
        NumpyFile(directory / "it.npz")
    (directory / "it.npz").write_bytes(b"something else")
    with pytest.raises(FormatError, match=r"not a \.npy or \.npz file"):
        NumpyFile(directory / "it.npz")


@pytest.mark.parametrize(
    ("descr", "shape", "nbytes"),
    [
        ("()", "(3,)", 24),
        ("'<f4'", "(3", 12),
        ("'<f4'", "{[]: 1}", 12),
        ("'<f4'", "(True,)", 4),
        ("'<f4'", f"(0, {1 << 70})", 0),
        ("'<f4'", f"({'1, ' * 65})", 4),
        ("('<f4', (2,))", "(3,)", 24),  # read, it would have two dimensions
    ],
)
def test_headers_that_are_none_are_damage(
    directory: pathlib.Path, descr: str, shape: str, nbytes: int
) -> None:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    start = b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little")
    path = directory / "it.npy"
    path.write_bytes(start + header + bytes(nbytes))
    with pytest.raises(FormatError, match=r"it\.npy"):
        NumpyFile(path)


@pytest.mark.parametrize("field", [20, 42])
def test_directories_that_say_something_else_are_found(directory: pathlib.Path, field: int) -> None:
    """Wrong compressed sizes and wrong offsets of a member."""
    np.savez(directory / "it.npz", a=np.arange(10), b=np.arange(20))
    data = bytearray((directory / "it.npz").read_bytes())
    at = data.index(b"PK\1\2") + field
    data[at : at + 4] = (int.from_bytes(data[at : at + 4], "little") + (1 << 24)).to_bytes(
        4, "little"
    )
    (directory / "it.npz").write_bytes(data)
    with NumpyFile(directory / "it.npz") as file:
        assert same(file["b"].read(), np.arange(20))
        with pytest.raises(FormatError, match=r"'a': it is (not compressed but has two|truncated)"):
            file["a"]


def test_bz2_that_is_damaged_is_found(directory: pathlib.Path) -> None:
    plain = io.BytesIO()
    np.save(plain, made("<f4", (300,)))
    with zipfile.ZipFile(directory / "it.npz", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("a.npy", plain.getvalue())
    flip(directory / "it.npz", 8 * 45)
    with pytest.raises(FormatError):
        NumpyFile(directory / "it.npz")["a"].read()


def test_a_refused_file_is_closed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(b"no array")
    with pytest.raises(FormatError) as caught:
        NumpyFile(path)
    assert settled(lambda: str(path) not in descriptors())
    assert caught.traceback  # it keeps the local variables of NumpyFile() alive


@pytest.mark.parametrize("kind", ["stored", "compressed"])
def test_a_read_that_fails_once_is_not_called_damage(faultfs: FaultFS, kind: str) -> None:
    path = saved(faultfs.path, kind)

    def first() -> Any:
        with NumpyFile(path) as file:
            return file["b.c"][:]

    faultfs.order()
    first()
    for skipped in range(len(faultfs.requests("read"))):
        faultfs.order(Fault("read", error=errno.EIO, times=1, skip=skipped))
        with pytest.raises(OSError, match="Input/output error") as caught:
            first()
        assert caught.value.errno == errno.EIO
