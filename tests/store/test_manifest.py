"""Manifests from untrusted sources: every manifest that is not sound is refused."""

import base64
import json
import os
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorferry
from tensorferry.store import TensorStore, manifest
from tensorferry.store.manifest import from_bytes
from tests.store.data import SEGMENT
from tests.support.effort import examples

NAME = "tensorferry-store.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("store")
    with TensorStore(path / "s", segment_nbytes=SEGMENT) as store:
        store.write("a", np.arange(50_000, dtype=np.float32)).result()
        store.write("b", b"bytes").result()
        store.snapshot(path / "snap", b"record")
    return path / "snap"


@pytest.fixture
def snapshot(original, tmp_path):
    """Return a snapshot with a manifest that a test may change."""
    path = tmp_path / "snap"
    path.mkdir()
    for file in original.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def body_of(path):
    return json.loads((path / NAME).read_bytes().split(b"\n")[1])


def names_in(path):
    return sorted(file.name for file in path.iterdir())


def sealed(body, **head):
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    told = {"format": "tensorferry.store", "version": 1, "nbytes": len(text)}
    told |= {"crc32": zlib.crc32(text)} | head
    return json.dumps(told).encode() + b"\n" + text + b"\n"


def refused(path, what):
    with pytest.raises(tensorferry.StorageError, match=what) as caught:
        TensorStore.open(path)
    return caught.value


def test_the_unchanged_one_is_opened(snapshot):
    (snapshot / NAME).write_bytes(sealed(body_of(snapshot)))
    with TensorStore.open(snapshot) as store:
        assert (store.read("a").result() == np.arange(50_000, dtype=np.float32)).all()
        assert store.read("b").result() == b"bytes"
        assert store.record == b"record"


def changed(body, **changes):
    return {**body, **changes}


def tensor(body, at, value):
    body["tensors"][0][at] = value
    return body


def piece(body, at, value):
    body["tensors"][0][4][0][at] = value
    return body


def segment(body, at, value):
    body["segments"][0][at] = value
    return body


CRAFTED = {
    "a path that leads out": lambda body: segment(
        body, 1, "../tensorferry-0123456789abcdef-0-0.segment"
    ),
    "an absolute path": lambda body: segment(body, 1, "/etc/passwd"),
    "another file": lambda body: segment(body, 1, "tensorferry-store.json"),
    "a name with a line's end": lambda body: segment(body, 1, body["segments"][0][1] + "\n"),
    "a directory that is none": lambda body: segment(body, 0, 1),
    "a negative directory": lambda body: segment(body, 0, -1),
    "a size that no file has": lambda body: segment(body, 2, 1 << 63),
    "a piece before the file": lambda body: piece(body, 1, -4096),
    "a piece beyond the file": lambda body: piece(body, 1, SEGMENT),
    "a piece beyond all files": lambda body: piece(body, 1, (1 << 63) - 4096),
    "a piece that is not aligned": lambda body: piece(body, 1, 1),
    "a piece without bytes": lambda body: piece(body, 2, 0),
    "a piece of too many bytes": lambda body: piece(body, 2, SEGMENT + 4096),
    "a segment that is none": lambda body: piece(body, 0, 99),
    "a segment by truth": lambda body: piece(body, 0, False),
    "a fraction": lambda body: piece(body, 1, 4096.0),
    "a shape of other bytes": lambda body: tensor(body, 2, [50_001]),
    "a negative shape": lambda body: tensor(body, 2, [-1, -50_000]),
    "a huge shape": lambda body: tensor(body, 2, [1 << 62] * 64),
    "too many dimensions": lambda body: tensor(body, 2, [1] * 65),
    "a dtype of objects": lambda body: tensor(body, 1, "numpy.|O"),
    "a dtype that is none": lambda body: tensor(body, 1, "torch.nn"),
    "a dtype of code": lambda body: tensor(body, 1, "numpy.__import__('os')"),
    "a dtype of fields of objects": lambda body: tensor(body, 1, [["a", "|O"]]),
    "a dtype of numbers": lambda body: tensor(body, 1, 3),
    "other bytes": lambda body: tensor(body, 3, 1 << 64),
    "no pieces": lambda body: tensor(body, 4, []),
    "pieces that are none": lambda body: tensor(body, 4, 3),
    "too few checksums": lambda body: tensor(body, 5, []),
    "checksums that are none": lambda body: tensor(body, 5, ["!"] * len(body["tensors"][0][4])),
    "checksums of other sizes": lambda body: tensor(
        body, 5, [base64.b64encode(bytes(8)).decode()] * len(body["tensors"][0][4])
    ),
    "a name twice": lambda body: changed(body, tensors=[body["tensors"][0]] * 2),
    "a name that is not a string": lambda body: tensor(body, 0, 7),
    "no tensors": lambda body: changed(body, tensors=None),
    "no segments": lambda body: changed(body, segments=[]),
    "no directories": lambda body: changed(body, directories=0),
    "chunks that are too small": lambda body: changed(body, chunk_nbytes=1),
    "no record": lambda body: changed(body, record=None),
    "a run that is none": lambda body: changed(body, run="../../../../../.."),
    "a list": lambda _: [],
    "nothing": lambda _: b"",
    "no JSON": lambda _: b"{",
    "no UTF-8": lambda _: b"\xff",
    "nested without end": lambda _: b"[" * 200_000,
    "a huge number": lambda _: b"9" * 10_000,
}


@pytest.mark.parametrize("craft", CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_manifest_is_refused(snapshot, craft):
    (snapshot / NAME).write_bytes(sealed(craft(body_of(snapshot))))
    error = refused(snapshot, None)
    assert error.filename == str(snapshot / NAME)


def test_pieces_of_several_sizes_are_refused(snapshot):
    body = body_of(snapshot)
    first, second = body["tensors"][0][4][:2]
    first[2], second[2] = 4096, 2 * SEGMENT - 4096 - 4096
    (snapshot / NAME).write_bytes(sealed(body))
    refused(snapshot, "piece")


def test_manifests_that_are_not_whole_are_refused(snapshot):
    whole = (snapshot / NAME).read_bytes()
    for at in (0, 10, len(whole) // 2, len(whole) - 2):
        (snapshot / NAME).write_bytes(whole[:at])
        refused(snapshot, "manifest")
    (snapshot / NAME).write_bytes(bytes(len(whole)))
    refused(snapshot, "manifest")
    (snapshot / NAME).write_bytes(whole)
    (snapshot / NAME).write_bytes(sealed(body_of(snapshot), version=2))
    refused(snapshot, "version 2")
    (snapshot / NAME).unlink()
    refused(snapshot, "No such file")


def test_a_store_does_not_write_where_it_does_not_understand_what_is_there(snapshot):
    (snapshot / NAME).write_bytes(sealed(body_of(snapshot), version=2))
    before = names_in(snapshot)
    with pytest.raises(tensorferry.StorageError, match="version 2"):
        TensorStore(snapshot, temporary=False)
    assert [name for name in names_in(snapshot) if ".lock" not in name] == before


def test_files_that_are_not_what_they_should_be_are_refused(snapshot):
    file = snapshot / body_of(snapshot)["segments"][0][1]
    data = file.read_bytes()
    file.write_bytes(data[:4096])
    refused(snapshot, "regular file")
    file.unlink()
    refused(snapshot, "No such file")
    file.symlink_to(__file__)
    refused(snapshot, None)
    file.unlink()
    os.mkfifo(file)
    refused(snapshot, None)


def test_a_manifest_that_is_a_pipe_is_refused(snapshot):
    (snapshot / NAME).unlink()
    os.mkfifo(snapshot / NAME)
    refused(snapshot, "manifest")


@settings(max_examples=examples(300))
@given(data=st.data())
def test_a_manifest_with_any_value_anywhere_is_refused_or_sound(original, data):
    """With any value at any place of a manifest, the store raises ValueError or can be used."""
    body = body_of(original)
    places = []

    def walk(value, path):
        places.append(path)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            if isinstance(inner, (dict, list)):
                walk(inner, [*path, key])
            else:
                places.append([*path, key])

    walk(body, [])
    place = data.draw(st.sampled_from(places))
    value = data.draw(
        st.one_of(
            st.integers(-(1 << 70), 1 << 70),
            st.text(max_size=20),
            st.none(),
            st.booleans(),
            st.floats(),
            st.lists(st.integers(-5, 5), max_size=3),
            st.dictionaries(st.text(max_size=3), st.none(), max_size=2),
        )
    )
    if place:
        inner = body
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
    else:
        body = value
    try:
        told = from_bytes(sealed(body))
    except ValueError:
        return
    for stored in told.tensors.values():
        assert sum(size for _, _, size in stored.pieces) == stored.info.nbytes
        for number, offset, size in stored.pieces:
            assert 0 <= offset <= offset + size <= told.segments[number].nbytes
    for one in told.segments:
        assert manifest.run_of(one.name)


def test_who_has_a_torn_manifest_is_told_what_to_do(snapshot, tmp_path):
    whole = (snapshot / NAME).read_bytes()
    for torn in (b"", whole[: len(whole) // 2], bytes(len(whole))):
        (snapshot / NAME).write_bytes(torn)
        error = refused(snapshot, r"remedy: open a snapshot .* remove tensorferry-\* from it")
        assert error.filename == str(snapshot / NAME)
        with pytest.raises(tensorferry.StorageError, match="remedy"):
            TensorStore(snapshot, temporary=False)
    for file in snapshot.glob("tensorferry-*"):
        file.unlink()
    with TensorStore(snapshot, temporary=False) as store:
        store.write("a", b"anew").result()
        store.commit()
    with TensorStore.open(snapshot) as store:
        assert store.read("a").result() == b"anew"
