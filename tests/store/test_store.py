"""A store compared with its model: a dictionary with values on a drive."""

import asyncio
import errno
import queue

import numpy as np
import pytest

import tensorferry
from tensorferry.store import TensorStore
from tests.store.data import SEGMENT, pattern
from tests.support.optional import torch


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 5000, SEGMENT, SEGMENT + 1, 5 * SEGMENT + 77])
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
    for ticket in [
        store.write("torch", bf16),
        store.write("numpy", big),
        store.write("bytes", b"some bytes"),
        store.write("several", [torch.arange(3.0), big]),
    ]:
        ticket.result()
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


def test_a_list_larger_than_a_segment_is_cut_where_it_must(store):
    parts = [pattern(SEGMENT // 3 + seed, seed) for seed in range(10)]
    store.write("list", parts).result()
    out = [np.zeros_like(part) for part in parts]
    store.read("list", out=out).result()
    assert all((got == part).all() for got, part in zip(out, parts, strict=True))


def test_reads_see_the_write_begun_before_them_and_no_later_one(store):
    versions = [pattern(3 * SEGMENT, seed) for seed in range(6)]
    reads = []
    for version in versions:
        store.write("a", version)
        reads.append(store.read("a"))
    for read, version in zip(reads, versions, strict=True):
        assert (read.result() == version).all()


def test_space_of_old_versions_is_used_again(store):
    data = pattern(SEGMENT // 2)
    for _ in range(50):
        store.write("a", data).result()
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


def test_a_read_that_was_begun_survives_delete(store):
    data = pattern(4 * SEGMENT)
    store.write("a", data)
    ticket = store.read("a")
    store.delete("a")
    store.write("b", pattern(8 * SEGMENT, 1)).result()
    assert (ticket.result() == data).all()


def test_unusable_arguments_are_refused_before_anything_happens(tmp_path, store):
    store.write("a", b"abc").result()
    with pytest.raises(ValueError, match="3 bytes, and out has 4"):
        store.read("a", out=bytearray(4))
    with pytest.raises(TypeError, match="name"):
        store.write(3, b"")
    with pytest.raises(ValueError, match="priority"):
        store.write("a", b"", priority="high")
    for wrong in (
        {"weights": [1, 2]},
        {"weights": [0]},
        {"segment_nbytes": 5000},
        {"segment_nbytes": 0},
        {"direct": "perhaps"},
        {"engine": "perhaps"},
        {"block_size": -1},
        {"queue_depth": -1},
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
    with TensorStore(tmp_path, segment_nbytes=SEGMENT) as store:
        store.write("a", pattern(SEGMENT)).result()
        assert list(tmp_path.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_closed_store_is_refused_and_its_tickets_stay(store):
    data = pattern(9 * SEGMENT)
    store.write("a", data)
    ticket = store.read("a")
    store.close()
    assert (ticket.result() == data).all()
    for action in (lambda: store.write("a", data), lambda: store.read("a"), lambda: len(store)):
        with pytest.raises(ValueError, match="closed"):
            action()
    store.close()


def test_tickets_are_futures(store):
    async def main():
        data = pattern(2 * SEGMENT)
        store.write("a", data)
        both = await asyncio.gather(store.read("a"), store.read("a"))
        assert all((one == data).all() for one in both)

    asyncio.run(main())
    called = queue.Queue()
    store.write("a", pattern(7 * SEGMENT))
    ticket = store.read("a")
    ticket.add_done_callback(called.put)
    assert called.get(timeout=300) is ticket
    assert ticket.done()


def test_reserve_makes_room_at_once(tmp_path):
    with TensorStore(tmp_path, segment_nbytes=SEGMENT) as store:
        store.reserve({str(at): 10_000 for at in range(100)}, in_flight_nbytes=SEGMENT)
        before = store.stats()["directories"][0]
        for _ in range(3):
            for at in range(100):
                store.write(str(at), pattern(10_000)).result()
        after = store.stats()["directories"][0]
        assert after["segments"] == before["segments"]
        assert after["used_nbytes"] == 100 * 12288
        store.reserve({str(at): 10_000 for at in range(100)}, in_flight_nbytes=0)
        assert store.stats()["directories"][0]["segments"] == before["segments"]
    with TensorStore(tmp_path) as store:
        with pytest.raises(tensorferry.StorageError) as caught:
            store.reserve(1 << 50)
        assert caught.value.errno == errno.ENOSPC
