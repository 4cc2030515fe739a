"""Manifests from untrusted sources: every manifest that is not sound is refused."""

import json
import os
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorferry
from tensorferry.store import TensorStore, manifest, segments
from tests.store.data import LARGE
from tests.support.effort import examples

NAME = manifest.name_of(1)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch, TensorStore(path / "s") as store:
        patch.setattr(segments, "LARGE_NBYTES", LARGE)  # as the fixture of each test does
        store.write("a", np.arange(100_000, dtype=np.float32)).result()
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


def sealed(body):
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"%08x %016x\n%b\n" % (zlib.crc32(text), len(text), text)


def refused(path, what=None):
    with pytest.raises(tensorferry.StorageError, match=what) as caught:
        TensorStore.open(path)
    return caught.value


def test_the_unchanged_one_is_opened(snapshot):
    (snapshot / NAME).write_bytes(sealed(body_of(snapshot)))
    with TensorStore.open(snapshot) as store:
        assert (store.read("a").result() == np.arange(100_000, dtype=np.float32)).all()
        assert store.read("b").result() == b"bytes"
        assert store.record == b"record"


def changed(**changes):
    return lambda body: body | changes


def tensor(at, value):
    def change(body):
        body["tensors"][0][at] = value
        return body

    return change


def segment(at, value):
    def change(body):
        body["segments"][0][at] = value
        return body

    return change


CRAFTED = {
    "a path that leads out": segment(1, "../tensorferry-store-0123456789abcdef-0.segment"),
    "an absolute path": segment(1, "/etc/passwd"),
    "another file": segment(1, NAME),
    "a name with a line's end": segment(1, "tensorferry-store-0123456789abcdef-0.segment\n"),
    "a directory that does not exist": segment(0, 1),
    "a negative directory": segment(0, -1),
    "an offset before the file": tensor(5, -4096),
    "an offset beyond all files": tensor(5, (1 << 63) - 4096),
    "an offset that is not aligned": tensor(5, 1),
    "an offset that is a fraction": tensor(5, 4096.0),
    "a segment that does not exist": tensor(4, 99),
    "a segment that is a bool": tensor(4, False),
    "a negative shape": tensor(2, [-1, -50_000]),
    "too many dimensions": tensor(2, [1] * 65),
    "a dtype that is a number": tensor(1, 3),
    "a size that no file has": tensor(3, 1 << 64),
    "too few checksums": tensor(6, []),
    "checksums that are not numbers": tensor(6, ["!"] * 2),
    "checksums that are too large": tensor(6, [1 << 32] * 2),
    "a name twice": lambda body: body | {"tensors": [body["tensors"][0]] * 2},
    "a name that is not a string": tensor(0, 7),
    "no tensors": changed(tensors=None),
    "no segments": changed(segments=[]),
    "no directories": changed(directories=0),
    "no record": changed(record=None),
    "a run that is a path": changed(run="../../../../../.."),
    "another version": changed(version=2),
    "another key": changed(more=1),
    "a list": lambda _: [],
    "nothing": lambda _: b"",
    "not JSON": lambda _: b"{",
    "not UTF-8": lambda _: b"\xff",
    "nested without end": lambda _: b"[" * 200_000,
    "a huge number": lambda _: b"9" * 10_000,
}


@pytest.mark.parametrize("craft", CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_manifest_is_refused(snapshot, craft):
    (snapshot / NAME).write_bytes(sealed(craft(body_of(snapshot))))
    assert refused(snapshot, "damaged").filename == str(snapshot / NAME)
    with pytest.raises(tensorferry.StorageError, match="remedy"):
        TensorStore(snapshot, temporary=False)
    assert len(list(snapshot.glob("*.segment"))) == 2


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (1, "numpy.|O"),
        (1, "torch.nn"),
        (1, "numpy.__import__('os')"),
        (1, "numpy.[('a', '|O')]"),
        (1, "nothing"),
        (2, [100_001]),
        (2, [1 << 62] * 64),
    ],
)
def test_a_description_that_is_not_understood_concerns_its_tensor_only(snapshot, at, value):
    (snapshot / NAME).write_bytes(sealed(tensor(at, value)(body_of(snapshot))))
    with TensorStore.open(snapshot) as store:
        with pytest.raises(ValueError, match="unknown"):
            store.read("a")
        store.read("a", out=np.empty(100_000, np.float32)).result()
        assert store.read("b").result() == b"bytes"


def test_a_manifest_that_was_damaged_is_refused_and_an_incomplete_one_does_not_count(snapshot):
    whole = (snapshot / NAME).read_bytes()
    for torn in (b"", whole[: len(whole) // 2], whole[:-2], bytes(len(whole))):
        (snapshot / manifest.name_of(2)).write_bytes(torn)
        TensorStore.open(snapshot).close()
    (snapshot / manifest.name_of(2)).write_bytes(whole.replace(b"a", b"b", 1))
    error = refused(snapshot, r"damaged.*remedy: open a snapshot .* remove tensorferry-store-\*")
    assert error.filename == str(snapshot / manifest.name_of(2))
    for file in snapshot.glob("tensorferry-store-*"):
        file.unlink()
    assert refused(snapshot, "No such file").errno == 2
    with TensorStore(snapshot, temporary=False) as store:
        store.write("a", b"anew").result()
        store.commit()
    assert TensorStore.open(snapshot).read("a").result() == b"anew"


def test_stores_of_the_old_format_are_refused_and_kept(tmp_path):
    (tmp_path / "tensorferry-store.json").write_text('{"format": "tensorferry.store"}')
    (tmp_path / "tensorferry-0123456789abcdef-0-0.segment").write_bytes(b"old")
    for call in (TensorStore.open, lambda path: TensorStore(path, temporary=False)):
        with pytest.raises(tensorferry.StorageError, match=r"not supported .*another directory"):
            call(tmp_path)
    assert len(list(tmp_path.glob("tensorferry-*"))) == 2


def test_files_that_are_not_what_they_should_be_are_refused(snapshot):
    file = snapshot / body_of(snapshot)["segments"][0][1]
    file.write_bytes(file.read_bytes()[:4096])
    refused(snapshot, "regular file")
    file.unlink()
    refused(snapshot, "No such file")
    file.symlink_to(__file__)
    refused(snapshot)
    file.unlink()
    os.mkfifo(file)
    refused(snapshot)
    makes = (os.mkfifo, lambda path: path.symlink_to(__file__), os.mkdir)
    for number, make in enumerate(makes, 2):
        make(snapshot / manifest.name_of(number))
        refused(snapshot)


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
        found = manifest.from_bytes(sealed(body))
    except ValueError:
        return
    assert found is not None
    for stored in found.tensors.values():
        assert stored.offset >= 0
        assert stored.segment < len(found.segments)
    for at, name in found.segments:
        assert at < found.directories
        assert manifest.run_of(name)
    assert manifest.from_bytes(manifest.to_bytes(found)) == found
