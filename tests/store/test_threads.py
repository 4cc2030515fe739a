"""Concurrent threads, tasks, snapshots and commits in one store."""

import asyncio
import gc
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from tensorferry.store import TensorStore, segments
from tests.store.data import LARGE, full
from tests.support import child, leaks, required, slow_calls
from tests.support.slow_calls import Rule


@pytest.mark.parametrize("temporary", [True, False])
def test_threads_do_everything_at_once(tmp_path, temporary):
    """Of each name every version has one value all over, and versions of a thread's own names only grow."""
    failures = []
    stop = threading.Event()
    store = TensorStore(tmp_path / "s", temporary=temporary)

    def work(seed):
        rng = np.random.default_rng(seed)
        version = {}
        try:
            for _ in range(150):
                own = f"{seed}-{rng.integers(3)}"
                shared = f"shared-{rng.integers(2)}"
                nbytes = int(rng.integers(1, 3 * LARGE))
                what = rng.integers(5)
                if what == 0:
                    version[own] = version.get(own, 0) + 1
                    store.write(own, full(version[own] % 251, nbytes))
                elif what == 1 and own in version:
                    assert (store.read(own).result() == version[own] % 251).all()
                elif what == 2:
                    store.write(shared, full(int(rng.integers(251)), nbytes))
                elif what == 3 and shared in store:
                    got = store.read(shared).result()
                    assert (got == got[0]).all()
                elif own in version:
                    view = np.frombuffer(store.map([(own, 0, store.info(own).nbytes)]), np.uint8)
                    assert (view == version[own] % 251).all()
        except BaseException as error:
            failures.append(error)

    def keep():
        try:
            count = 0
            while not stop.is_set():
                path = tmp_path / f"snap{count}"
                store.snapshot(path)
                if not temporary:
                    store.commit(str(count).encode())
                with TensorStore.open(path) as old:
                    for name in old:
                        got = old.read(name).result()
                        assert (got == got[0]).all()
                shutil.rmtree(path)
                count += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    keeper = threading.Thread(target=keep)
    for thread in [*threads, keeper]:
        thread.start()
    for thread in threads:
        thread.join(120)
    stop.set()
    keeper.join(120)
    assert not any(thread.is_alive() for thread in [*threads, keeper])
    store.close()
    assert failures == []


def test_futures_nobody_keeps_end_all_the_same(tmp_path):
    with TensorStore(tmp_path) as store:
        for version in range(200):
            store.write("a", full(version, LARGE + version))
            out = np.zeros(LARGE + version, np.uint8)
            store.read("a", out=out)
        last = store.read("a").result()
        assert (last == 199).all()


def test_a_cancelled_task_cancels_its_read_and_harms_nothing(tmp_path):
    async def main():
        with TensorStore(tmp_path) as store:
            for round_ in range(20):
                store.write("a", full(round_, 20 * LARGE))
                task = asyncio.create_task(store.read("a"))
                await asyncio.sleep(0.0005 * (round_ % 4))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                assert ((await store.read("a")) == round_).all()

    asyncio.run(main())


def test_nothing_is_left_of_a_store_that_is_dropped(tmp_path):
    def use():
        store = TensorStore(tmp_path, temporary=False)
        store.write("a", full(1, 5 * LARGE)).result()
        store.read("a").result()
        store.commit()

    use()
    gc.collect()
    before = leaks.count_descriptors()
    for _ in range(5):
        use()
        gc.collect()
    assert leaks.settled(lambda: leaks.count_descriptors() <= before)


def test_a_store_that_is_closed_while_it_grows_leaves_no_file(tmp_path):
    if refusal := slow_calls.why_unavailable():
        required.missing("slow calls", refusal)
    environment = slow_calls.SlowCalls(tmp_path / "slow-calls").environment()
    child.call(f"{__name__}:closed_while_it_grows", environment=environment, directory=tmp_path)


def closed_while_it_grows(directory):
    segments.LARGE_NBYTES = LARGE  # in this process, without the fixture
    calls = slow_calls.attached()
    store = TensorStore(f"{directory}/s", temporary=False)
    store.write("a", full(1, LARGE)).result()
    store.commit()
    descriptors = leaks.count_descriptors()
    calls.order(Rule("fallocate", f"{directory}/s", hold=True))
    refused = []

    def write():
        try:
            store.write("b", full(2, LARGE))
        except ValueError as error:
            refused.append(str(error))

    thread = threading.Thread(target=write)
    thread.start()
    calls.await_held()
    store.close()
    calls.release()
    thread.join()
    assert "closed" in refused[0]
    assert leaks.count_descriptors() < descriptors
    with TensorStore.open(f"{directory}/s") as old:
        assert (old.read("a").result() == 1).all()
        assert len(list(Path(directory, "s").glob("*.segment"))) == 1
