"""Signal handlers and finalizers that call a store during another call of it, and Ctrl-C at such moments."""

import contextlib
import gc
import itertools
from pathlib import Path

import pytest

import tensorferry.store
from tensorferry.store import TensorStore
from tests.store.data import LARGE, full
from tests.support import leaks
from tests.support.effort import EFFORT
from tests.support.interrupts import At

SOURCES = str(Path(tensorferry.store.__file__).parent)
# A run of `work` has about 3000 moments; one in so many of them is tried.
STEP = 200 if EFFORT < 2 else 89


def begun(path):
    store = TensorStore(path / "s", temporary=False)
    store.write("a", full(1, LARGE)).result()
    store.write("b", full(2, 100)).result()
    store.commit(b"begun")
    return store


def work(store, path):
    future = store.write("a", full(3, LARGE))
    read = store.read("a")
    store.write("c", full(4, 5_000))
    read.result()
    future.result()
    store.commit(b"work")
    store.reserve({"a": 80_000})
    store.snapshot(path / "snap")
    store.delete("c")
    store.write("a", full(3, LARGE))
    store.commit(b"work")
    store.stats()


def assert_sound(store, path):
    """All of it is as it was once written, space adds up, and everything works."""
    sizes = {}
    for name in store:
        got = store.read(name).result()
        assert (got == got[0]).all(), name
        sizes[name] = got.nbytes
    for value in (21, 22):
        for name, nbytes in sizes.items():
            store.write(name, full(value, nbytes))
        for name in sizes:
            assert (store.read(name).result() == value).all()
    store.commit(b"end")
    want = sum(map(store._directories[0].rounded, sizes.values()))

    def used():
        gc.collect()
        return store.stats()["directories"][0]["used_nbytes"]

    leaks.settled(lambda: used() == want)  # the callback thread may still have references
    assert used() == want
    assert store.stats()["in_flight"] == 0
    store.close()
    with TensorStore.open(path / "s") as old:
        assert old.record == b"end"
        for name in old:
            assert (old.read(name).result() == 22).all()
        assert len(list((path / "s").glob("*.segment"))) == len(old._directories[0].segments)
    if (path / "snap").exists():
        with TensorStore.open(path / "snap") as old:
            for name in old:
                got = old.read(name).result()
                assert (got == got[0]).all()
    # The next snapshot removes the files that an interrupted one has left.
    with TensorStore(path / "other") as other:
        other.write("x", b"x")
        other.snapshot(path / "next")
    assert {each.name for each in path.iterdir()} <= {"s", "snap", "handled", "other", "next"}


ACTIONS = {
    "write": lambda store, path: store.write("h", full(9, 20_000)).result(),
    "commit": lambda store, path: (store.write("h", full(9, 20_000)), store.commit(b"h")),
    "snapshot": lambda store, path: store.snapshot(path / "handled"),
    "delete": lambda store, path: store.delete("b"),
    "stats": lambda store, path: (store.stats(), store.reserve({"a": 100_000})),
}


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("action", ACTIONS)
def test_a_handler_is_served_or_refused(tmp_path, action):
    tried, served, refused = [], [], []
    some = itertools.count(2 + list(ACTIONS).index(action) * 11, STEP)
    for number in itertools.chain([1], some):  # at 1 the call has not begun
        tried.append(number)
        path = tmp_path / str(number)
        store = begun(path)

        def handler(store=store, path=path):
            try:
                ACTIONS[action](store, path)
            except RuntimeError as error:
                refused.append(str(error))
            else:
                served.append(action)

        with At(number, SOURCES, handler) as at:
            work(store, path)
        assert_sound(store, path)
        if at.happened_in is None:
            break
    assert len(served) + len(refused) == len(tried) - 1 > 10
    assert served
    assert all("in the middle" in error for error in refused)
    assert bool(refused) == (action != "delete")


def test_close_can_be_interrupted_anywhere_and_called_again(tmp_path):
    for number in itertools.count(1, 5):
        path = tmp_path / str(number)
        store = begun(path)
        future = store.write("b", full(7, 40_000))
        with At(number, SOURCES, interrupt) as at, contextlib.suppress(KeyboardInterrupt):
            store.close()
        store.close()
        assert store.closed
        future.result()
        # The directory is unlocked, and the commit is there.
        TensorStore(path / "s", temporary=False).close()
        with TensorStore.open(path / "s") as old:
            assert (old.read("a").result() == 1).all()
            assert len(list((path / "s").glob("*.segment"))) == len(old._directories[0].segments)
        if at.happened_in is None:
            break
    assert number > 20


def test_a_handler_cannot_close_what_it_has_interrupted(tmp_path):
    store = begun(tmp_path)
    with pytest.raises(RuntimeError, match="in the middle"), store._lock:
        store.close()
    store.close()
