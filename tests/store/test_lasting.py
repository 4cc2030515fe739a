"""Data that outlive a store or a later write: mappings, snapshots, commits."""

import errno
import functools
import mmap
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import tensorferry
from tensorferry.store import TensorStore, contents, manifest, ownership
from tensorferry.transfer import publication
from tests.store.data import SEGMENT, pattern
from tests.support import leaks
from tests.support.data import long_name
from tests.support.faultfs import Fault
from tests.support.forks import passes_in_child
from tests.support.optional import torch

PAGE = mmap.PAGESIZE


@pytest.fixture
def named(tmp_path):
    with TensorStore(tmp_path / "named", segment_nbytes=SEGMENT, temporary=False) as store:
        yield store


def fill(store, seed, count=20):
    tensors = {
        f"t{at}": torch.from_numpy(pattern(1 + 7919 * at * at, seed + at)) for at in range(count)
    }
    for ticket in [store.write(name, tensor) for name, tensor in tensors.items()]:
        ticket.result()
    return tensors


def assert_has(store, tensors):
    assert sorted(store) == sorted(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(store.read(name).result(), tensor)


def used(path):
    return sum(file.stat().st_blocks * 512 for file in path.iterdir())


def test_a_mapping_is_one_piece_of_several_tensors(store):
    a, b = pattern(5 * SEGMENT, 1), pattern(3 * PAGE + 100, 2)
    store.write("a", a)
    store.write("b", b)
    buffer = store.map([("b", PAGE, PAGE), ("a", SEGMENT - PAGE, 2 * SEGMENT), ("b", 0, b.nbytes)])
    got = torch.frombuffer(buffer, dtype=torch.uint8).numpy()
    want = np.concatenate([b[PAGE : 2 * PAGE], a[SEGMENT - PAGE : 3 * SEGMENT - PAGE], b])
    assert (got == want).all()


def test_a_mapping_stays_as_it_is_and_keeps_its_space(store):
    old = pattern(2 * SEGMENT, 1)
    store.write("a", old).result()
    view = np.frombuffer(store.map([("a", 0, old.nbytes)]), np.uint8)
    for seed in range(5):
        store.write("a", pattern(2 * SEGMENT, 2 + seed)).result()
    assert (view == old).all()
    view[:10] = 0
    assert (store.read("a").result() == pattern(2 * SEGMENT, 6)).all()
    assert store.stats()["directories"][0]["used_nbytes"] == 4 * SEGMENT
    store.close()
    assert (view[10:] == old[10:]).all()


def test_space_of_a_mapping_comes_back_with_its_last_view(store):
    store.write("a", pattern(SEGMENT)).result()
    view = np.frombuffer(store.map([("a", 0, SEGMENT)]), np.uint8)[5:]
    store.delete("a")
    assert store.stats()["directories"][0]["used_nbytes"] == SEGMENT
    del view
    assert store.stats()["directories"][0]["used_nbytes"] == 0


def test_ranges_that_cannot_be_mapped_are_refused(store):
    store.write("a", pattern(3 * PAGE)).result()
    for ranges in (
        [],
        [("a", 1, PAGE)],
        [("a", 0, 0)],
        [("a", 0, 3 * PAGE + 1)],
        [("a", 0, PAGE - 1), ("a", 0, PAGE)],
        [("a", -PAGE, PAGE)],
    ):
        with pytest.raises(ValueError, match=r"ranges|offset"):
            store.map(ranges)
    with pytest.raises(KeyError):
        store.map([("b", 0, PAGE)])


def test_a_snapshot_has_what_was_stored_and_keeps_it(tmp_path, store):
    tensors = fill(store, 1)
    store.write("structured", np.zeros(3, [("a", "<i4"), ("b", ">f2", (2,))])).result()
    store.snapshot(tmp_path / "snap", record=b"step 7")
    fill(store, 2)
    fill(store, 3)
    store.close()
    with TensorStore.open(tmp_path / "snap") as old:
        assert old.record == b"step 7"
        assert old.info("structured").dtype == np.dtype([("a", "<i4"), ("b", ">f2", (2,))])
        for name, tensor in tensors.items():
            assert torch.equal(old.read(name).result(), tensor)
        for action in (
            lambda: old.write("a", b""),
            lambda: old.delete("t0"),
            lambda: old.reserve(1),
            lambda: old.snapshot(tmp_path / "other"),
            old.commit,
        ):
            with pytest.raises(ValueError, match="reading only"):
                action()
        view = old.map([("t9", 0, tensors["t9"].nbytes)])
    assert torch.equal(torch.frombuffer(view, dtype=torch.uint8), tensors["t9"])


def test_a_snapshot_takes_no_copy_and_its_space_goes_with_it(tmp_path, store):
    fill(store, 1)
    before = store.stats()["directories"][0]
    store.snapshot(tmp_path / "snap")
    written = store.stats()["written_nbytes"]
    assert used(tmp_path / "snap") <= before["reserved_nbytes"] + SEGMENT
    assert all(file.stat().st_nlink == 1 for file in (tmp_path / "snap").iterdir())
    fill(store, 2)  # after this the store has no tensors in the snapshot's files
    shutil.rmtree(tmp_path / "snap")
    after = store.stats()["directories"][0]
    assert after["reserved_nbytes"] <= before["reserved_nbytes"] * 1.5
    assert store.stats()["written_nbytes"] == 2 * written


def test_snapshots_of_snapshots_files(tmp_path, store):
    """A file without any name cannot be linked again, so it is copied."""
    tensors = fill(store, 1)
    store.snapshot(tmp_path / "first")
    store.snapshot(tmp_path / "second")
    shutil.rmtree(tmp_path / "first")
    shutil.rmtree(tmp_path / "second")
    store.snapshot(tmp_path / "third")
    assert_has(store, tensors)
    store.close()
    assert_has(TensorStore.open(tmp_path / "third"), tensors)


def test_a_snapshot_elsewhere_is_a_verified_copy(tmpfs_directory, store):
    tensors = fill(store, 1)
    store.snapshot(tmpfs_directory / "elsewhere", b"x")
    with TensorStore.open(tmpfs_directory / "elsewhere") as old:
        assert old.record == b"x"
        assert_has(old, tensors)


def test_a_snapshot_never_replaces_anything(tmp_path, store):
    store.write("a", b"1").result()
    (tmp_path / "snap").mkdir()
    with pytest.raises(tensorferry.StorageError) as caught:
        store.snapshot(tmp_path / "snap")
    assert caught.value.errno == errno.EEXIST
    assert list((tmp_path / "snap").iterdir()) == []
    assert sorted(file.name for file in tmp_path.iterdir()) == ["snap", "store"]


INTERRUPTED = """
import sys, time
from tensorferry.store import TensorStore, snapshots

def finish(partial, manifest):
    print("made", flush=True)
    time.sleep(600)

snapshots.UnfinishedSnapshot.finish = finish
with TensorStore(sys.argv[1] + "/store") as store:
    store.write("a", bytes(1000))
    store.snapshot(sys.argv[1] + "/snap")
"""


def test_what_a_killed_snapshot_leaves_goes_with_the_next_one_beside_it(tmp_path, store):
    def partial():
        return [each.name for each in tmp_path.iterdir() if each.suffix == ".partial"]

    store.write("a", pattern(1000)).result()
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, tmp_path], stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout.readline() == "made\n"
            store.snapshot(tmp_path / "other")
            assert len(partial()) == 1, "another process is still making it"
        finally:
            child.kill()
    store.snapshot(tmp_path / "next")
    assert partial() == []
    assert not (tmp_path / "snap").exists()


def test_a_snapshot_without_space_for_what_it_freezes_leaves_nothing(tmp_path, store, monkeypatch):
    tensors = fill(store, 1)
    directory = store._directories[0]

    def make(*_):
        raise tensorferry.StorageError(errno.ENOSPC, "No space left on device", "somewhere")

    monkeypatch.setattr(directory, "make_segment", make)
    with pytest.raises(tensorferry.StorageError, match="No space"):
        store.snapshot(tmp_path / "snap")
    monkeypatch.undo()
    assert [file.name for file in tmp_path.iterdir()] == ["store"]
    store.snapshot(tmp_path / "snap")
    assert_has(TensorStore.open(tmp_path / "snap"), tensors)


def test_a_commit_is_found_after_the_store_has_gone(tmp_path, named):
    tensors = fill(named, 1)
    named.commit(b"one", sync=True)
    fill(named, 5, count=3)
    named.close()
    with TensorStore.open(tmp_path / "named") as old:
        assert old.record == b"one"
        assert_has(old, tensors)


def test_commits_follow_each_other_in_twice_the_space(tmp_path, named):
    for step in range(8):
        tensors = fill(named, step)
        named.commit(str(step).encode())
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert used(tmp_path / "named") < 4 * size
    named.close()
    assert_has(TensorStore.open(tmp_path / "named"), tensors)
    assert used(tmp_path / "named") < 3 * size


def test_a_new_store_keeps_the_old_commit_until_its_own(tmp_path):
    path = tmp_path / "named"
    with TensorStore(path, segment_nbytes=SEGMENT, temporary=False) as first:
        old = fill(first, 1)
        first.commit(b"old")
        fill(first, 2)
    (path / "mine.txt").write_text("a stranger's")
    with TensorStore(path, segment_nbytes=SEGMENT, temporary=False) as second:
        new = fill(second, 3)
        reader = TensorStore.open(path)
        assert reader.record == b"old"
        second.commit(b"new")
        assert_has(reader, old)  # its files are open
        with pytest.raises(tensorferry.StorageError, match=f"process {os.getpid()}"):
            TensorStore.open(path)
    assert_has(TensorStore.open(path), new)
    assert (path / "mine.txt").read_text() == "a stranger's"
    runs = {file.name.split("-")[1] for file in path.glob("*.segment")}
    assert len(runs) == 1


def test_a_store_that_never_commits_leaves_no_data(tmp_path):
    with TensorStore(tmp_path, temporary=False, segment_nbytes=SEGMENT) as store:
        fill(store, 1)
    assert [file.name for file in tmp_path.iterdir()] == [".tensorferry-store.lock"]


def test_a_second_store_is_told_whose_the_directory_is(tmp_path, named):
    code = f"""
        from tensorferry.store import TensorStore
        try:
            TensorStore({os.fspath(tmp_path / "named")!r}, temporary=False)
        except OSError as error:
            print(error)
    """
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    assert f"process {os.getpid()}" in told
    assert str(tmp_path / "named") in told
    named.close()
    TensorStore(tmp_path / "named", temporary=False).close()


def test_temporary_stores_share_a_directory(tmp_path):
    with TensorStore(tmp_path) as a, TensorStore(tmp_path) as b:
        a.write("x", b"1").result()
        b.write("x", b"2").result()
        assert a.read("x").result() == b"1"
        with pytest.raises(ValueError, match="temporary"):
            a.commit()


def test_directories_in_another_order_are_noticed(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    with TensorStore(paths, temporary=False, segment_nbytes=SEGMENT) as store:
        tensors = fill(store, 1)
        store.commit()
    assert_has(TensorStore.open(paths), tensors)
    for wrong in (paths[::-1], paths[1:], [tmp_path / "c", tmp_path / "b"]):
        with pytest.raises(tensorferry.StorageError):
            TensorStore(wrong, temporary=False)
    for wrong in (paths[::-1], paths[:1], paths[1:]):
        with pytest.raises(tensorferry.StorageError):
            TensorStore.open(wrong)
    assert_has(TensorStore.open(paths), tensors)


def test_snapshots_over_several_directories(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    with TensorStore(paths, segment_nbytes=SEGMENT) as store:
        tensors = fill(store, 1)
        store.snapshot(tmp_path / "one")
        store.snapshot([tmp_path / "a" / "two", tmp_path / "b" / "two"])
        with pytest.raises(ValueError, match="path"):
            store.snapshot([tmp_path / "x", tmp_path / "y", tmp_path / "z"])
    assert_has(TensorStore.open(tmp_path / "one"), tensors)
    assert_has(TensorStore.open([tmp_path / "a" / "two", tmp_path / "b" / "two"]), tensors)


def test_weights_say_how_much_a_directory_takes(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    with TensorStore(paths, weights=[3, 1], segment_nbytes=SEGMENT) as store:
        for at in range(80):
            store.write(str(at), pattern(SEGMENT // 4))
        one, other = (each["used_nbytes"] for each in store.stats()["directories"])
        assert one == 3 * other


def test_a_forked_child_leaves_everything_alone(tmp_path, named):
    tensors = fill(named, 1)
    named.commit()

    def child():
        for action in (
            lambda: named.write("a", b"1"),
            lambda: named.read("t1"),
            named.commit,
            named.drop_previous,
            named.go_back,
        ):
            with pytest.raises(RuntimeError, match="fork"):
                action()
        named.close()

    passes_in_child(child)
    assert_has(named, tensors)
    with pytest.raises(tensorferry.StorageError, match="process"):
        TensorStore(tmp_path / "named", temporary=False)
    named.close()
    assert_has(TensorStore.open(tmp_path / "named"), tensors)


WRITER = """
    import sys
    import numpy as np
    from tensorferry.store import TensorStore
    store = TensorStore(sys.argv[1], temporary=False, segment_nbytes=65536)
    step = 0
    while True:
        step += 1
        for name in range(10):
            store.write(str(name), np.full(9001 * (name + 1), step % 251, np.uint8))
        if step % 2:
            store.delete("3")
        store.commit(str(step).encode())
        if len(sys.argv) > 2:
            store.snapshot(f"{sys.argv[2]}/{step}", str(step).encode())
        print(step, flush=True)
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_kill_at_any_moment_leaves_the_last_commit(tmp_path, seed):
    snaps = tmp_path / "snaps"
    rng = np.random.default_rng(seed)
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), tmp_path / "s", snaps],
            stdout=subprocess.PIPE,
            text=True,
        )
        reported = 0
        for _ in range(int(rng.integers(1, 12))):
            reported = int(child.stdout.readline())
        signal.sigtimedwait([], float(rng.random()) * 0.03)
        child.send_signal(signal.SIGKILL)
        reported = int(([str(reported), *child.stdout.read().split()])[-1])
        child.wait()
        with TensorStore.open(tmp_path / "s") as old:
            step = int(old.record)
            assert step in (reported, reported + 1)
            assert_is_step(old, step)
        made = [int(each.name) for each in snaps.iterdir() if not each.name.startswith(".")]
        assert sorted(made)[:reported] == list(range(1, reported + 1))
        for number in made:
            with TensorStore.open(snaps / str(number)) as old:
                assert int(old.record) == number
                assert_is_step(old, number)
        shutil.rmtree(snaps)
    with TensorStore(tmp_path / "s", temporary=False):
        named = len(list((tmp_path / "s").glob("*.segment")))
    with TensorStore.open(tmp_path / "s") as old:
        assert len(old._directories[0].segments) == named


def assert_has_commit(path, record, *, previous=False):
    with TensorStore.open(path, previous=previous) as old:
        assert old.record == record
        for name in old:
            assert (old.read(name).result() == pattern(SEGMENT, int(record) * 10 + int(name))).all()


def commit_number(store, number, **how):
    for name in range(3):
        store.write(str(name), pattern(SEGMENT, number * 10 + name))
    store.commit(str(number).encode(), **how)


def test_a_commit_that_is_kept_is_there_until_it_is_dropped(tmp_path):
    """Also in the run after, which may go back to it, and in twice the space."""
    path = tmp_path / "s"
    with TensorStore(path, segment_nbytes=SEGMENT, temporary=False) as store:
        for number in range(1, 6):
            store.drop_previous()
            commit_number(store, number, keep_previous=True)
    assert used(path) < 7 * SEGMENT
    assert_has_commit(path, b"5")
    assert_has_commit(path, b"4", previous=True)
    with TensorStore(path, segment_nbytes=SEGMENT, temporary=False) as store:
        store.go_back()
        commit_number(store, 6, keep_previous=True)
    assert_has_commit(path, b"6")
    assert_has_commit(path, b"4", previous=True)
    with TensorStore(path, segment_nbytes=SEGMENT, temporary=False) as store:
        commit_number(store, 7)
    assert_has_commit(path, b"7")
    with pytest.raises(tensorferry.StorageError, match="No such file"):
        TensorStore.open(path, previous=True)
    assert len(list(path.glob("*.segment"))) == 3


def test_a_closed_store_changes_nothing_of_the_next_one(tmp_path):
    path = tmp_path / "s"
    with TensorStore(path, segment_nbytes=SEGMENT, temporary=False) as store:
        commit_number(store, 1)
    with TensorStore(path, segment_nbytes=SEGMENT, temporary=False) as closed:
        commit_number(closed, 2, keep_previous=True)
    with TensorStore(path, segment_nbytes=SEGMENT, temporary=False) as store:
        commit_number(store, 3, keep_previous=True)
        for action in (closed.drop_previous, closed.go_back):
            with pytest.raises(ValueError, match="is closed"):
                action()
    assert_has_commit(path, b"3")
    assert_has_commit(path, b"2", previous=True)


def test_only_the_owner_of_commits_that_has_made_none_goes_back(tmp_path):
    path = tmp_path / "s"
    with TensorStore(path, segment_nbytes=SEGMENT, temporary=False) as store:
        for number in (1, 2):
            commit_number(store, number, keep_previous=True)
        with pytest.raises(ValueError, match="has committed"):
            store.go_back()
        with TensorStore(path) as other, pytest.raises(ValueError, match="temporary"):
            other.go_back()
    with TensorStore.open(path) as old, pytest.raises(ValueError, match="reading only"):
        old.go_back()
    assert_has_commit(path, b"2")
    assert_has_commit(path, b"1", previous=True)


def test_a_commit_is_not_read_while_its_writer_is_unknown(tmp_path, monkeypatch):
    """Too many files are open, for example. A writer may overwrite the data."""
    path = tmp_path / "s"
    with TensorStore(path, segment_nbytes=SEGMENT, temporary=False) as store:
        commit_number(store, 1)
        opens = os.open

        def refuses(file, *arguments, **options):
            if os.fspath(file).endswith(ownership.LOCK_NAME):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return opens(file, *arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refuses)
            with pytest.raises(tensorferry.StorageError, match="Too many open files"):
                TensorStore.open(path)
    assert_has_commit(path, b"1")


@pytest.mark.parametrize("name", [manifest.NAME, manifest.PREVIOUS_NAME])
def test_commits_whose_manifest_cannot_be_read_now_keep_their_files(tmp_path, monkeypatch, name):
    """Too many files are open, for example, or a symbolic link's target is not mounted."""
    path = tmp_path / "s"
    with TensorStore(path, segment_nbytes=SEGMENT, temporary=False) as store:
        for number in (1, 2):
            commit_number(store, number, keep_previous=True)
    opens = manifest.open_untrusted

    def refuses(file):
        if file.endswith(name):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opens(file)

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "open_untrusted", refuses)
        with pytest.raises(tensorferry.StorageError, match="Too many open files"):
            TensorStore(path, temporary=False)
    (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "not mounted" / name)
    with pytest.raises(tensorferry.StorageError, match="No such file"):
        TensorStore(path, temporary=False)
    (path / name).unlink()
    (tmp_path / "elsewhere").rename(path / name)
    assert_has_commit(path, b"2")
    assert_has_commit(path, b"1", previous=True)


def test_a_marker_that_cannot_be_read_now_is_not_called_another_stores(tmp_path, monkeypatch):
    """The remedy for another store's marker is to delete its tensors."""
    paths = [tmp_path / "a", tmp_path / "b"]
    with TensorStore(paths, segment_nbytes=SEGMENT, temporary=False) as store:
        commit_number(store, 1)
    (paths[0] / manifest.NAME).unlink()
    opens = manifest.open_untrusted

    def refuses(file):
        if file.endswith(".part"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opens(file)

    monkeypatch.setattr(manifest, "open_untrusted", refuses)
    with pytest.raises(tensorferry.StorageError, match="Too many open files"):
        TensorStore(paths, temporary=False)


def test_the_first_commit_of_a_store_keeps_a_previous_one_that_cannot_be_read_now(
    tmp_path, monkeypatch
):
    path = tmp_path / "s"
    with TensorStore(path, segment_nbytes=SEGMENT, temporary=False) as store:
        commit_number(store, 1)

    def refuses(_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with TensorStore(path, segment_nbytes=SEGMENT, temporary=False) as store:
        monkeypatch.setattr(manifest, "open_untrusted", refuses)
        commit_number(store, 2, keep_previous=True)
    monkeypatch.undo()
    assert_has_commit(path, b"2")
    assert_has_commit(path, b"1", previous=True)


def test_a_kill_between_any_two_names_leaves_a_commit_and_the_one_before(tmp_path):
    """The names of manifests change one after the other."""
    renamed, removed = os.replace, pathlib.Path.unlink
    progress = tmp_path / "progress"

    def commit_until_killed(path, names_left):
        def name_changes(change, *arguments, **more):
            nonlocal names_left
            names_left -= 1
            if names_left < 0:
                os._exit(0)
            return change(*arguments, **more)

        os.replace = functools.partial(name_changes, renamed)
        pathlib.Path.unlink = functools.partialmethod(functools.partial(name_changes, removed))
        store = TensorStore(path, segment_nbytes=SEGMENT, temporary=False)
        for number in range(1, 6):
            store.drop_previous()
            commit_number(store, number, keep_previous=number != 4)
            progress.write_text(str(number))
        os._exit(1)

    killed = 0
    while True:
        path = tmp_path / str(killed)
        progress.write_text("0")
        child = os.fork()
        if child == 0:
            try:
                commit_until_killed(path, killed)
            finally:
                os._exit(2)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if ended:
            break
        number = int(progress.read_text())
        if number:
            with TensorStore.open(path) as old:
                found = int(old.record)
            assert found in (number, number + 1)
            assert_has_commit(path, str(found).encode())
            if (path / manifest.PREVIOUS_NAME).exists() and (path / manifest.NAME).exists():
                assert_has_commit(path, str(found - 1).encode(), previous=True)
        with TensorStore(path, segment_nbytes=SEGMENT, temporary=False) as store:
            commit_number(store, 9)
        assert_has_commit(path, b"9")
        assert len(list(path.glob("*.segment"))) == 3
        killed += 1
    assert ended == 1
    assert killed >= 10


def assert_is_step(store, step):
    assert sorted(store, key=int) == [str(n) for n in range(10) if n != 3 or step % 2 == 0]
    for name in store:
        tensor = store.read(name).result()
        assert tensor.nbytes == 9001 * (int(name) + 1)
        assert (tensor == step % 251).all()


def test_a_commit_that_is_replaced_while_it_is_read_is_not_used(tmp_path, monkeypatch):
    """Its space is another tensor's by then."""
    store = TensorStore(tmp_path / "s", segment_nbytes=SEGMENT, temporary=False, checksums=False)
    store.write("a", pattern(SEGMENT, 1)).result()
    store.commit(b"1")
    asked = []
    writer_of = contents.writer_of

    def ends_meanwhile(directory):
        if not asked:
            for seed in (2, 3):
                store.write("a", pattern(SEGMENT, seed)).result()
                store.commit(str(seed).encode())
            store.close()
        asked.append(directory)
        return writer_of(directory)

    monkeypatch.setattr(contents, "writer_of", ends_meanwhile)
    with TensorStore.open(tmp_path / "s") as old:
        assert old.record == b"3"
        assert (old.read("a").result() == pattern(SEGMENT, 3)).all()
    assert len(asked) == 2


def test_aligned_structures_come_back_as_they_were(tmp_path, named):
    dtype = np.dtype([("a", "i1"), ("b", "<i4"), ("c", [("d", "i1"), ("e", "<f8")])], align=True)
    named.write("a", np.zeros(3, dtype)).result()
    named.commit()
    named.close()
    with TensorStore.open(tmp_path / "named") as old:
        assert old.info("a").dtype.fields == dtype.fields
        assert old.read("a").result().dtype.itemsize == dtype.itemsize


def test_a_dtype_that_cannot_be_kept_is_refused_before_it_is_written(named):
    named.write("weights", np.ones(10)).result()
    array = np.zeros(3, [("a", "i4"), ("b", "f4"), ("c", "i2")])[["c", "a"]]
    with pytest.raises(ValueError, match=r"array: .*repack_fields"):
        named.write("meta", array)
    named.commit()


def test_a_tensor_with_more_dimensions_than_a_manifest_may_have_is_refused(tmp_path, named):
    named.write("most", torch.ones([1] * 64))
    with pytest.raises(ValueError, match="65 dimensions"):
        named.write("more", torch.ones([1] * 65))
    named.commit()
    named.close()
    with TensorStore.open(tmp_path / "named") as old:
        assert old.read("most").result().shape == (1,) * 64


def test_a_directory_in_the_manifests_place_costs_no_descriptor(tmp_path):
    (tmp_path / manifest.NAME).mkdir()

    def refused():
        with pytest.raises(tensorferry.StorageError, match="directory"):
            TensorStore.open(tmp_path)

    refused()  # the first call of a process opens some
    with leaks.nothing_leaks():
        for _ in range(4):
            refused()


def test_space_is_reserved_for_tensors_that_will_be_larger(store):
    for at in range(10):
        store.write(str(at), b"x").result()
    store.reserve({str(at): SEGMENT for at in range(10)}, in_flight_nbytes=0)
    assert store.stats()["directories"][0]["free_nbytes"] >= 10 * SEGMENT


def test_a_store_whose_directory_has_gone(tmp_path, store):
    (tmp_path / "store").rmdir()
    with pytest.raises(tensorferry.StorageError) as caught:
        store.reserve(1)
    assert caught.value.errno == errno.ENOENT


@pytest.mark.parametrize("letter", ["s", "字"])
def test_a_snapshot_may_have_any_name_that_the_file_system_takes(tmp_path, store, letter):
    tensors = fill(store, 1)
    for nbytes in (220, 221, 240, 255):
        path = tmp_path / long_name(nbytes, letter)
        store.snapshot(path)
        with TensorStore.open(path) as found:
            assert_has(found, tensors)
    before = sorted(each.name for each in tmp_path.iterdir())
    with pytest.raises(tensorferry.StorageError, match="too long") as caught:
        store.snapshot(tmp_path / long_name(256, letter))
    assert caught.value.filename == str(tmp_path / long_name(256, letter))
    assert sorted(each.name for each in tmp_path.iterdir()) == before


@pytest.fixture
def nothing_tried():
    publication._renames_checked.clear()
    yield
    publication._renames_checked.clear()


@pytest.mark.usefixtures("nothing_tried")
def test_a_file_that_counts_as_open_for_a_while_is_renamed_then(faultfs):
    faultfs.order(Fault("rename_open", error=errno.EBUSY))
    with TensorStore(faultfs.path, segment_nbytes=SEGMENT, temporary=False) as store:
        tensors = fill(store, 1)
        for _ in range(2):
            store.commit(b"", sync=True)
        store.snapshot(faultfs.path / "snapshot")
    for path in (faultfs.path, faultfs.path / "snapshot"):
        with TensorStore.open(path) as old:
            assert_has(old, tensors)


@pytest.mark.usefixtures("nothing_tried")
def test_where_nothing_can_be_replaced_that_is_said_before_data_are_written(faultfs):
    faultfs.order(Fault("rename_over", error=errno.EINVAL))
    with pytest.raises(tensorferry.StorageError, match="cannot rename a file over"):
        TensorStore(faultfs.path, segment_nbytes=SEGMENT, temporary=False)
    assert {request.name for request in faultfs.requests("write")} <= {".tensorferry-store.lock"}
