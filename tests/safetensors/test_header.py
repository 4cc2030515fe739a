"""Headers of safetensors files: exactly those that the reference accepts are accepted; others raise a named error.

TENSORFERRY_TEST_HEADERS sets the number of headers that are compared with the reference, TENSORFERRY_TEST_SEED
chooses them.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import pickle
import subprocess
import sys
import threading
import tracemalloc
from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorferry
from tensorferry.safetensors import dtypes, header
from tensorferry.safetensors.errors import SafetensorError
from tests.safetensors.headers import VALUES, Random, file_of, info, mutated
from tests.support.data import SEED
from tests.support.effort import examples

if TYPE_CHECKING:
    import pathlib

HEADERS = int(os.environ.get("TENSORFERRY_TEST_HEADERS", "5000"))
F32 = info("F32", [2], 0, 8)


def entries(*pairs: tuple[str, str]) -> str:
    """Return a header with names and their raw values."""
    return "{" + ",".join(f'"{name}":{value}' for name, value in pairs) + "}"


def parsed(file: bytes) -> header.Header:
    return header.parse(file, len(file), "f")


def refusal(file: bytes) -> SafetensorError:
    with pytest.raises(SafetensorError) as caught:
        parsed(file)
    assert caught.value.path == "f"
    return caught.value


def same_as_the_reference(file: bytes) -> bool:
    """Compare with the reference, and return whether both accept."""
    try:
        expected = dict(safetensors.deserialize(file))
    except safetensors.SafetensorError as error:
        try:
            found = parsed(file)
        except SafetensorError:
            return False
        raise AssertionError(f"{file!r} is {found}, and the reference says {error}") from None
    found = parsed(file)
    got = {
        name: {
            "dtype": each.dtype,
            "shape": list(each.shape),
            "data": bytearray(file[each.begin : each.end]),
        }
        for name, each in found.tensors.items()
    }
    assert got == expected, file
    return True


# --- against the reference ---------------------------------------------------------------------------------------


def test_mutated_files_are_accepted_where_the_reference_accepts_them_and_refused_elsewhere() -> (
    None
):
    accepted = 0
    for index in range(HEADERS):
        file = mutated(Random(SEED, index))
        try:
            accepted += same_as_the_reference(file)
        except BaseException as error:
            raise AssertionError(f"seed {SEED}, number {index}: {file!r}") from error
    assert 0.1 * HEADERS < accepted < 0.9 * HEADERS  # both sides are tried


@pytest.mark.parametrize(
    "template",
    [
        '{"a":%s}',
        '{"a":{"dtype":%s,"shape":[2],"data_offsets":[0,8]}}',
        '{"a":{"dtype":"F32","shape":%s,"data_offsets":[0,8]}}',
        '{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,8]}}',
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":%s}}',
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[%s,8]}}',
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,%s]}}',
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":%s}}',
        '{"a":["F32",%s,[0,8]]}',
        '{"__metadata__":%s}',
        '{"__metadata__":{"a":%s}}',
        "%s",
        "{}%s",
    ],
)
def test_any_value_anywhere_is_judged_as_by_the_reference(template: str) -> None:
    for value, data in itertools.product(VALUES, (b"", bytes(8))):
        try:
            same_as_the_reference(file_of(template % value, data))
        except BaseException as error:
            raise AssertionError(f"value {value[:100]}, {len(data)} bytes of data") from error


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        " \n\r\t{}\n ",
        entries(("a", info("F32", [9], 7, 9)), ("a", F32)),
        entries(("a", "5"), ("a", F32)),
        entries(("a", F32), ("a", "5")),
        '{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        '{"a":{"dtype":"F32","x":1,"x":2,"shape":[2],"data_offsets":[0,8]}}',
        '{"a":["F32",[2],[0,8],1]}',
        '{"a":["F32",[2]]}',
        '{"__metadata__":{"a":"b","a":"c"}}',
        '{"__metadata__":null,"__metadata__":null}',
        '{"__metadata__":{},"\\u005f_metadata__":{}}',
        entries(("b", info("F32", [0], 0, 0)), ("a", F32)),
        entries(("b", info("F32", [0], 8, 8)), ("a", F32)),
        entries(("b", info("F32", [0], 4, 4)), ("a", F32)),
        entries(("a", F32), ("b", F32)),
    ],
)
@pytest.mark.parametrize("nbytes", [0, 7, 8, 9])
def test_oddities_are_judged_as_by_the_reference(text: str, nbytes: int) -> None:
    same_as_the_reference(file_of(text, bytes(nbytes)))


@pytest.mark.timeout(60)
def test_a_shape_of_many_large_numbers_is_refused_at_once() -> None:
    """Their product has millions of digits."""
    shape = ",".join(["9223372036854775807"] * 200_000)
    text = entries(("a", f'{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,8]}}'))
    refusal(len(text).to_bytes(8, "little") + text.encode() + bytes(8))


def test_of_several_tensors_with_one_name_the_last_one_counts() -> None:
    found = parsed(file_of(entries(("a", info("F32", [9], 7, 9)), ("a", F32)), bytes(8)))
    assert found.tensors["a"].shape == (2,)


def test_metadata_are_those_that_safe_open_has(tmp_path: pathlib.Path) -> None:
    for text in (
        "{}",
        '{"__metadata__":null}',
        '{"__metadata__":{}}',
        '{"__metadata__":{"a":"b","c":"\\u00e9\\ud83d\\ude00","a":"z"}}',
    ):
        path = tmp_path / "f.safetensors"
        path.write_bytes(file_of(text))
        with safetensors.safe_open(path, "np") as theirs, tensorferry.open(path) as file:
            assert header.read(file).metadata == theirs.metadata()


# --- named errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (b"", "the header's length alone"),
        (b"1234567", "the header's length alone"),
        ((100_000_001).to_bytes(8, "little"), "100000001 bytes, more than"),
        (((1 << 64) - 1).to_bytes(8, "little"), "18446744073709551615 bytes, more than"),
        (file_of("{}")[:-1], "cut short"),
        (file_of(b"\xff{}"), "not UTF-8"),
        (file_of(""), "is not an object, at byte 8"),
        (file_of("[]"), "is not an object, at byte 8"),
        (file_of("{} x"), "after the closing brace, at byte 11"),
        (file_of("{1: 2}"), "a name is missing"),
        (file_of('{"a"}'), "a colon"),
        (file_of('{"__metadata__": {"a": 1}}'), "has 1 for 'a'"),
        (file_of('{"__metadata__": 1}'), "not a JSON object"),
        (file_of("{}", b"x"), "1 bytes belong to no tensor"),
    ],
)
def test_a_broken_rule_of_the_file_is_named(file: bytes, reason: str) -> None:
    error = refusal(file)
    assert reason in str(error)
    assert error.name is None


@pytest.mark.parametrize(
    ("entry", "nbytes", "reason"),
    [
        ("7", 0, "7 is not an object with dtype"),
        ("", 0, "Expecting value, at byte 20"),
        ('{"dtype":"F32","shape":[2]}', 8, "it has no data_offsets"),
        (info("C128", [2], 0, 8), 8, "'C128' is not a dtype"),
        ('{"dtype":"F32","shape":2,"data_offsets":[0,8]}', 8, "its shape is 2"),
        ('{"dtype":"F32","shape":[true],"data_offsets":[0,4]}', 4, "its shape is [True]"),
        ('{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}', 8, "its shape is [-2]"),
        ('{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}', 8, "its shape is [2.0]"),
        ('{"dtype":"F32","shape":[2],"data_offsets":[8]}', 8, "not two offsets"),
        (info("F32", [1 << 62, 4], 0, 8), 8, "larger than any file"),
        (info("F32", [(1 << 62) - 1], 0, 8), 8, "larger than any file"),
        (info("F4", [3], 0, 2), 2, "12 bits, which is not a number of whole bytes"),
        (info("F32", [2], 8, 0), 8, "the end precedes the begin"),
        (info("F32", [2], 1, 9), 9, "the 1 bytes before belong to no tensor"),
        (info("F32", [3], 0, 8), 8, "(3,) of F32 has 12 bytes, and its data_offsets 0 to 8 have 8"),
        (info("F32", [2], 0, 8), 7, "cut short"),
        (info("U8", [1 << 60], 0, 1 << 60), 7, "cut short"),
        (info("U8", [0], 1 << 63, 1 << 63), 8, "9223372036854775808 bytes before"),
        ('{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}', 8, "NaN is not JSON"),
        ('{"dtype":"F32","dtype":"F32"}', 8, "dtype twice"),
        ("[" * 100_000, 0, "nested more than 127 deep"),
        ('{"x":%s,"dtype":"F32"}' % ("[" * 126 + "]" * 126), 0, "nested more than 127 deep"),
        ("9" * 5000, 0, "out of range"),
    ],
)
def test_a_broken_rule_of_a_tensor_names_it(entry: str, nbytes: int, reason: str) -> None:
    error = refusal(file_of(entries(("a.weight", entry)), bytes(nbytes)))
    assert reason in str(error)
    assert error.name == "a.weight"
    assert "'f': tensor 'a.weight': " in str(error)


def test_an_overlap_names_the_second_tensor() -> None:
    error = refusal(file_of(entries(("a", F32), ("b", info("F32", [2], 4, 12))), bytes(12)))
    assert "bytes up to 8 belong to another tensor" in str(error)
    assert error.name == "b"


def test_half_a_surrogate_pair_is_refused_wherever_it_stands() -> None:
    for half in ("\\ud800", "\\uDC00", "\\udbff\\ud800\\udc00", "\\\\\\ud800"):
        assert "surrogate" in str(refusal(file_of(f'{{"__metadata__":{{"a":"{half}"}}}}')))


def test_an_error_shows_little_of_a_file_and_survives_pickling() -> None:
    error = refusal(file_of(entries(("n" * 10_000_000, '"' + "x" * 10_000_000 + '"'))))
    assert len(str(error)) < 500
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_deep_nesting_is_an_error_however_deep_python_may_go() -> None:
    # Python's own limit would let its parser run through the stack.
    program = (
        "import sys; sys.setrecursionlimit(10**9)\n"
        "from tensorferry.safetensors import header\n"
        'text = b\'{"a":{"x":"[\\\\\\\\","y":\' + b\'[\'*7_000_000\n'
        "file = len(text).to_bytes(8, 'little') + text\n"
        "try: header.parse(file, len(file), 'f')\n"
        "except header.SafetensorError as error: print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "nested more than 127 deep" in run.stdout


@pytest.mark.minutes
@pytest.mark.parametrize(
    "body",
    [
        """'{"a":{"x":[' + '[[]],' * 975_000 + '"ab",' * 4_000_000 + '0]}}'""",
        """'{"a":{"x":[' + '[],' * 8_250_000 + '0]}}'""",
        """'{"a":{' + '"x":[1,{"a":[]}],' * 1_450_000 + '"x":0}}'""",
        """'{"a":{"x":' + '9' * 24_750_000 + '}}'""",
        """'{"a":{"x":[' + r'"\\u0041",' * 2_750_000 + '0]}}'""",
        # Their attack: many names for the same bytes.
        """'{' + ','.join(f'"w{i}":{F32}' for i in range(375_000)) + '}'""",
    ],
    ids=["pairs", "lists", "fields", "digits", "escapes", "overlapping"],
)
def test_a_header_of_25_mb_is_judged_in_bounded_memory(body: str) -> None:
    program = (
        "from tensorferry.safetensors import header\n"
        "from tensorferry.tuning.stopwatch import Stopwatch\n"
        f"F32 = {F32!r}\ntext = ({body}).encode()\n"
        "file = len(text).to_bytes(8, 'little') + text\n"
        "del text\n"
        "with Stopwatch() as watch:\n"
        "  try: header.parse(file, len(file) + 16, 'f')\n"
        "  except header.SafetensorError as error: print(type(error).__name__)\n"
        "print(len(file), watch.peak_growth_nbytes)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    error, nbytes, more = run.stdout.split()
    assert error == "SafetensorError"
    assert int(nbytes) > 20_000_000
    assert int(more) < 24 * int(nbytes)


# --- reading -----------------------------------------------------------------------------------------------------


@pytest.fixture
def model(directory: pathlib.Path) -> pathlib.Path:
    path = directory / "model.safetensors"
    safetensors.numpy.save_file(
        {f"layer.{index:05}": np.full((index % 3, 2), index, np.float32) for index in range(2000)},
        path,
        {"format": "np"},
    )
    return path


def test_a_header_is_read_from_a_file(model: pathlib.Path) -> None:
    with tensorferry.open(model) as file:
        found = header.read(file)
    assert found.nbytes > 100_000  # more than is read at first
    assert found.file_nbytes == model.stat().st_size
    assert found.metadata == {"format": "np"}
    data = model.read_bytes()
    for name, array in safetensors.numpy.load_file(model).items():
        tensor = found.tensors[name]
        assert data[tensor.begin : tensor.end] == array.tobytes()
        assert (tensor.shape, tensor.nbytes) == (array.shape, array.nbytes)
    begins = [each.begin for each in found.tensors.values()]
    assert begins == sorted(begins)


def test_every_shortened_file_is_refused(model: pathlib.Path) -> None:
    size = model.stat().st_size
    for nbytes in (size - 1, size // 2, 65_537, 65_536, 65_535, 9, 8, 7, 1, 0):
        os.truncate(model, nbytes)
        with (
            tensorferry.open(model) as file,
            pytest.raises(SafetensorError, match=r"model\.safetensors"),
        ):
            header.read(file)


def test_a_longer_file_is_refused(model: pathlib.Path) -> None:
    os.truncate(model, model.stat().st_size + 1)
    with (
        tensorferry.open(model) as file,
        pytest.raises(SafetensorError, match="1 bytes belong to no"),
    ):
        header.read(file)


def test_a_header_that_its_length_denies_is_not_allocated(directory: pathlib.Path) -> None:
    path = directory / "f.safetensors"
    path.write_bytes((99_999_999).to_bytes(8, "little") + b"{}")
    tracemalloc.start()
    try:
        with tensorferry.open(path) as file, pytest.raises(SafetensorError, match="cut short"):
            header.read(file)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("change", [-3, 3, -(1 << 17), 1 << 20])
def test_a_file_that_changes_its_size_meanwhile_is_refused(
    model: pathlib.Path, change: int
) -> None:
    class Changing(tensorferry.File):
        def read(self, array, offset=0, **how):  # type: ignore[no-untyped-def]
            os.truncate(model, max(0, model.stat().st_size + change))
            return super().read(array, offset, **how)

    with Changing(model) as file, pytest.raises(SafetensorError, match=r"cut short|had \d+ bytes"):
        header.read(file)


def test_directories_and_fifos_are_no_files(directory: pathlib.Path) -> None:
    with pytest.raises(OSError) as caught:
        tensorferry.open(directory)
    assert caught.value.errno == errno.EISDIR or "directory" in str(caught.value)
    os.mkfifo(directory / "fifo")
    done = threading.Event()

    def look() -> None:
        with pytest.raises(OSError):
            tensorferry.open(directory / "fifo")
        done.set()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    assert done.wait(120), "opening a FIFO waits for its writer"


# --- building ----------------------------------------------------------------------------------------------------


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
    lambda name: name != header.METADATA
)
SHAPES = st.lists(st.integers(0, 3), max_size=3)


@settings(max_examples=examples(300))
@given(
    st.dictionaries(NAMES, st.tuples(st.sampled_from(list(dtypes.DTYPES)), SHAPES), max_size=6),
    st.none() | st.dictionaries(NAMES, NAMES, max_size=1),
)
def test_headers_are_those_of_the_reference_to_the_byte(
    tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str] | None
) -> None:
    specs = {}
    written = []
    for name, (dtype, shape) in tensors.items():
        kind = dtypes.DTYPES[dtype]
        if kind.torch is None:  # which the reference cannot be given either
            continue
        if dtype == "F4" and not shape:
            continue
        specs[name] = safetensors.TensorSpec(
            dtype=kind.torch,
            shape=shape,
            data_ptr=SOURCE.ctypes.data,
            data_len=math.prod(shape) * (1 if dtype == "F4" else kind.bits // 8),
        )
        if dtype == "F4":  # given in pairs
            shape = [*shape[:-1], 2 * shape[-1]]
        written.append((name, dtype, shape))
    if not specs and metadata == {}:  # of which the reference makes a file that it cannot read
        metadata = None
    expected = bytes(safetensors.serialize(specs, metadata))
    begin, order = header.build(written, metadata)
    assert expected[: len(begin)] == begin
    found = header.parse(begin, len(expected), "f")
    assert found.nbytes == len(begin)
    assert sorted(found.tensors, key=order.index) == list(found.tensors)
    assert found.metadata == metadata


SOURCE = np.zeros(8 * 64, np.uint8)


def test_files_are_those_of_torch_and_numpy_to_the_byte() -> None:
    torch, by_torch = map(pytest.importorskip, ("torch", "safetensors.torch"))
    kinds = [each for each in dtypes.DTYPES.values() if each.torch]
    state = {
        f"t.{index % 3}.{kind.name}": torch.zeros(index % 4, 3, dtype=torch.uint8)
        .repeat(1, 8)
        .view(dtypes.torch_dtype(kind.name))
        for index, kind in enumerate(kinds)
    }
    expected = by_torch.save(state, {"format": "pt"})
    begin, order = header.build(
        [
            (
                name,
                dtypes.of_library(tensor.dtype),
                [*tensor.shape[:-1], tensor.shape[-1] * (2 if name.endswith(".F4") else 1)],
            )
            for name, tensor in state.items()
        ],
        {"format": "pt"},
    )
    data = b"".join(state[name].view(torch.uint8).numpy().tobytes() for name in order)
    assert begin + data == expected
    arrays = {
        kind.name: np.zeros((2, 3), dtypes.numpy_dtype(kind.name)) for kind in kinds if kind.numpy
    }
    begin, order = header.build(
        [(name, dtypes.of_library(array.dtype), array.shape) for name, array in arrays.items()],
        None,
    )
    data = b"".join(arrays[name].tobytes() for name in order)
    assert begin + data == safetensors.numpy.save(arrays)


def test_several_metadata_are_written_in_one_order() -> None:
    one, _ = header.build([], {"b": "1", "a": "2"})
    assert one == header.build([], {"a": "2", "b": "1"})[0]
    assert json.loads(one[8:]) == {"__metadata__": {"a": "2", "b": "1"}}
    assert len(one) % 8 == 0


@pytest.mark.parametrize(
    ("tensors", "metadata", "reason"),
    [
        ([("a", "F33", [1])], None, "'F33' is not a dtype"),
        ([("a", "F32", [1]), ("a", "F32", [1])], None, "two tensors of this name"),
        ([("__metadata__", "F32", [1])], None, "reserves this name"),
        ([("a", "F32", [-1])], None, "its shape contains -1"),
        ([("a", "F32", [1 << 62])], None, "larger than any file"),
        ([(str(index), "U8", [1 << 60]) for index in range(16)], None, "exceeds the 2\\*\\*64"),
        ([("a", "F6_E3M2", [3])], None, "not a number of whole bytes"),
        ([("a\ud800", "F32", [1])], None, "surrogate"),
        ([], {"a": 1}, "metadata must be strings"),
        ([], {1: "a"}, "metadata must be strings"),
        ([], {"a": "x" * 100_000_000}, "more than the 100000000"),
    ],
)
def test_what_cannot_be_written_is_refused(tensors, metadata, reason) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SafetensorError, match=reason):
        header.build(tensors, metadata)


# --- dtypes ------------------------------------------------------------------------------------------------------


def test_dtypes_of_torch_and_numpy_are_found_both_ways() -> None:
    torch = pytest.importorskip("torch")
    for name, dtype in dtypes.DTYPES.items():
        if dtype.torch is None:
            with pytest.raises(SafetensorError, match=name):
                dtypes.torch_dtype(name)
        else:
            assert dtypes.of_library(dtypes.torch_dtype(name)) == name
        if dtype.numpy is None:
            with pytest.raises(SafetensorError, match=name):
                dtypes.numpy_dtype(name)
        else:
            found = dtypes.numpy_dtype(name)
            assert found.itemsize * 8 == dtype.bits
            assert dtypes.of_library(found) == dtypes.of_library(found.newbyteorder(">")) == name
    for dtype in (torch.complex128, torch.qint8):
        with pytest.raises(SafetensorError, match="no dtype"):
            dtypes.of_library(dtype)
    for kind in (np.complex128, "U3", object, "datetime64[s]"):
        with pytest.raises(SafetensorError, match="no dtype"):
            dtypes.of_library(np.dtype(kind))
    for unknown in (dtypes.torch_dtype, dtypes.numpy_dtype):
        with pytest.raises(SafetensorError, match="'F33' is not a dtype"):
            unknown("F33")


def test_headers_need_neither_torch_nor_numpy() -> None:
    program = (
        "import sys; from tensorferry.safetensors import header\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["False", "False"]
