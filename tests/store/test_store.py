"""A store compared with its model: a dictionary with values on a drive."""

import asyncio
import errno
import os
import queue

import numpy as np
import pytest

import tensorferry
from tensorferry.store import TensorStore
from tests.store.data import LARGE, assert_has, fill, pattern
from tests.support.forks import held_by_another_thread, passes_in_child
from tests.support.optional import torch


@pytest.mark.parametrize(
    "nbytes", [0, 1, 4095, 4096, 5000, LARGE - 1, LARGE, LARGE + 1, 5 * LARGE + 77]
)
def test_what_is_written_is_read(store, nbytes):
    data = pattern(nbytes)
    assert store.write("a", data).result() is data
    assert (store.read("a").result() == data).all()
    out = np.zeros_like(data)
    assert store.read("a", out=out).result() is out
    assert (out == data).all()


def test_tensors_come_back_as_what_they_were(store):
    bf16 = torch.randn(3, 5).to(torch.bfloat16)
    big = np.arange(6, dtype=">f4").reshape(2, 3)
    for future in [
        store.write("torch", bf16),
        store.write("numpy", big),
        store.write("bytes", b"some bytes"),
        store.write("several", [torch.arange(3.0), big]),
    ]:
        future.result()
    assert torch.equal(store.read("torch").result(), bf16)
    read = store.read("numpy").result()
    assert read.dtype == big.dtype
    assert (read == big).all()
    assert store.read("bytes").result() == b"some bytes"
    assert store.info("torch") == (torch.bfloat16, (3, 5), 30)
    assert store.info("several") == (None, (36,), 36)
    a, b = torch.empty(3), np.empty((2, 3), ">f4")
    store.read("several", out=[a, b]).result()
    assert torch.equal(a, torch.arange(3.0))
    assert (b == big).all()


def test_reads_see_the_write_begun_before_them_and_no_later_one(store):
    versions = [pattern(3 * LARGE, seed) for seed in range(6)]
    reads = []
    for version in versions:
        store.write("a", version)
        reads.append(store.read("a"))
    for read, version in zip(reads, versions, strict=True):
        assert (read.result() == version).all()


@pytest.mark.parametrize("nbytes", [100, LARGE // 2, LARGE])
def test_space_of_old_versions_is_used_again(store, nbytes):
    for _ in range(50):
        store.write("a", pattern(nbytes)).result()
    assert store.stats()["directories"][0]["segments"] <= 2
    store.delete("a")
    stats = store.stats()["directories"][0]
    assert stats["used_nbytes"] == 0
    assert stats["free_nbytes"] == stats["reserved_nbytes"]


def test_names(store):
    for name in ("b", "a", "ü/x"):
        store.write(name, b"x")
    assert list(store) == ["b", "a", "ü/x"]
    assert len(store) == 3
    assert "a" in store
    store.delete("a")
    assert "a" not in store
    for action in (store.delete, store.info, store.read):
        with pytest.raises(KeyError, match="a"):
            action("a")


def test_unusable_arguments_are_refused_before_anything_happens(tmp_path, store):
    store.write("a", b"abc").result()
    with pytest.raises(ValueError, match="3 bytes, and out has 4"):
        store.read("a", out=bytearray(4))
    with pytest.raises(TypeError, match="name"):
        store.write(3, b"")
    with pytest.raises(ValueError, match="path: expected one path"):
        store.snapshot([tmp_path / "x", tmp_path / "y"])
    for wrong in (
        {"weights": [1, 2]},
        {"weights": [0]},
        {"engine": "perhaps"},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            TensorStore(tmp_path / "other", **wrong)
    assert not (tmp_path / "other").exists()
    with pytest.raises(ValueError, match="empty"):
        TensorStore([])
    with pytest.raises(ValueError, match="twice"):
        TensorStore([tmp_path / "x", tmp_path / "x" / "."])
    with pytest.raises(ValueError, match="1025 are more than the limit"):
        TensorStore([tmp_path / f"other{at}" for at in range(1025)])
    assert not (tmp_path / "other0").exists()


def test_nothing_is_left_in_the_directory(tmp_path):
    with TensorStore(tmp_path) as store:
        store.write("a", pattern(LARGE)).result()
        assert list(tmp_path.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_closed_store_is_refused_and_its_futures_stay(store):
    data = pattern(9 * LARGE)
    store.write("a", data)
    future = store.read("a")
    store.close()
    assert (future.result() == data).all()
    for action in (lambda: store.write("a", data), lambda: store.read("a"), lambda: len(store)):
        with pytest.raises(ValueError, match="closed"):
            action()
    store.close()


def test_reads_can_be_awaited_and_have_callbacks(store):
    async def main():
        data = pattern(2 * LARGE)
        store.write("a", data)
        both = await asyncio.gather(store.read("a"), store.read("a"))
        assert all((one == data).all() for one in both)

    asyncio.run(main())
    called = queue.Queue()
    store.write("a", pattern(7 * LARGE))
    future = store.read("a")
    future.add_done_callback(called.put)
    assert called.get(timeout=300) is future
    assert future.done()


@pytest.mark.parametrize("nbytes", [10_000, LARGE])
def test_reserve_makes_room_at_once(store, nbytes):
    sizes = {str(at): nbytes for at in range(30)}
    store.reserve(sizes, in_flight_nbytes=4 * nbytes)
    before = store.stats()["directories"][0]
    assert before["reserved_nbytes"] >= 34 * nbytes
    for _ in range(3):
        for name in sizes:
            store.write(name, pattern(nbytes)).result()
    after = store.stats()["directories"][0]
    assert after["segments"] == before["segments"]
    assert after["used_nbytes"] == 30 * -(-nbytes // 4096) * 4096
    store.reserve(sizes, in_flight_nbytes=0)
    assert store.stats()["directories"][0]["segments"] == before["segments"]
    with pytest.raises(tensorferry.StorageError) as caught:
        store.reserve({"more": 1 << 42})
    assert caught.value.errno == errno.ENOSPC
    assert store.stats()["directories"][0]["reserved_nbytes"] == after["reserved_nbytes"]


def test_space_is_reserved_for_tensors_that_will_be_larger(store):
    for at in range(10):
        store.write(str(at), b"x").result()
    store.reserve({str(at): LARGE for at in range(10)}, in_flight_nbytes=0)
    assert store.stats()["directories"][0]["free_nbytes"] >= 10 * LARGE


def test_reserved_space_stays(tmp_path, store):
    store.reserve({"a": 80 << 20}, in_flight_nbytes=80 << 20)
    store.write("a", b"x").result()
    store.snapshot(tmp_path / "snapshot")
    for _ in range(3):
        store.write("b", pattern(LARGE)).result()
    assert store.stats()["directories"][0]["free_nbytes"] >= 2 * 80 << 20


def test_weights_say_how_much_a_directory_gets(tmp_path):
    with TensorStore([tmp_path / "a", tmp_path / "b"], weights=[3, 1]) as store:
        for at in range(80):
            store.write(str(at), pattern(LARGE // 4))
        one, other = (each["used_nbytes"] for each in store.stats()["directories"])
        assert one == 3 * other


def test_a_dtype_that_cannot_be_described_is_refused(store):
    array = np.zeros(3, [("a", "i4"), ("b", "f4"), ("c", "i2")])[["c", "a"]]
    with pytest.raises(ValueError, match=r"array: .*repack_fields"):
        store.write("meta", array)
    with pytest.raises(ValueError, match="65 dimensions"):
        store.write("more", torch.ones([1] * 65))


def test_a_forked_child_leaves_everything_alone(tmp_path, named):
    tensors = fill(named, 1)
    named.commit()

    def child():
        calls = [lambda: named.write("a", b"1"), lambda: named.read("t1")]
        for call in (*calls, named.commit, named.drop_previous, named.go_back):
            with pytest.raises(RuntimeError, match="fork"):
                call()
        named.close()

    passes_in_child(child)
    assert_has(named, tensors)
    with pytest.raises(tensorferry.StorageError, match=f"process {os.getpid()}"):
        TensorStore(tmp_path / "named", temporary=False)


def test_a_child_cancels_its_parents_future_without_a_lock(store):
    store.write("a", pattern(4 * LARGE)).result()
    read = store.read("a")
    with held_by_another_thread(store._lock):
        passes_in_child(read._request.cancel)
    read.result()
