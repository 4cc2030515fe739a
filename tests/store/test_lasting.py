"""Data that outlive a store or a later write: mappings, snapshots, commits."""

import contextlib
import errno
import itertools
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
from tensorferry.store import TensorStore, manifest
from tensorferry.store.folder import LOCK_NAME
from tensorferry.transfer import publication
from tests.store.data import LARGE, SMALL, assert_has, fill, full, pattern
from tests.support import leaks, mounts
from tests.support.data import long_name
from tests.support.faultfs import Fault
from tests.support.interrupts import At
from tests.support.optional import torch

PAGE = mmap.PAGESIZE
SOURCES = str(pathlib.Path(tensorferry.store.__file__).parent)


def used(path):
    return sum(file.stat().st_blocks * 512 for file in path.iterdir())


def stats_of(store):
    return store.stats()["directories"][0]


# Mappings


def test_a_mapping_is_one_piece_of_several_tensors(store):
    a, b = pattern(5 * LARGE, 1), pattern(3 * PAGE + 100, 2)
    store.write("a", a)
    store.write("b", b)
    buffer = store.map([("b", PAGE, PAGE), ("a", LARGE - PAGE, 2 * LARGE), ("b", 0, b.nbytes)])
    got = torch.frombuffer(buffer, dtype=torch.uint8).numpy()
    want = np.concatenate([b[PAGE : 2 * PAGE], a[LARGE - PAGE : 3 * LARGE - PAGE], b])
    assert (got == want).all()


@pytest.mark.parametrize("nbytes", [PAGE, 2 * LARGE])
def test_a_mapping_stays_as_it_is_and_keeps_its_space(store, nbytes):
    old = pattern(nbytes, 1)
    store.write("a", old).result()
    view = np.frombuffer(store.map([("a", 0, nbytes)]), np.uint8)
    for seed in range(5):
        store.write("a", pattern(nbytes, 2 + seed)).result()
    assert (view == old).all()
    view[:10] = 0
    assert (store.read("a").result() == pattern(nbytes, 6)).all()
    assert stats_of(store)["used_nbytes"] == 2 * nbytes
    part, view = view[10:], None
    assert stats_of(store)["used_nbytes"] == 2 * nbytes
    store.close()
    assert (part == old[10:]).all()


def test_space_of_a_mapping_is_free_after_its_last_view(store):
    store.write("a", pattern(LARGE)).result()
    view = np.frombuffer(store.map([("a", 0, LARGE)]), np.uint8)[5:]
    store.delete("a")
    assert stats_of(store)["used_nbytes"] == LARGE
    del view
    assert stats_of(store)["used_nbytes"] == 0


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


# Snapshots


def test_a_snapshot_has_what_was_stored_and_keeps_it(tmp_path, store):
    tensors = fill(store, 1)
    aligned = np.dtype([("a", "i1"), ("b", "<i4"), ("c", [("d", "i1"), ("e", "<f8")])], align=True)
    store.write("structured", np.zeros(3, aligned)).result()
    store.write("most", torch.ones([1] * 64)).result()
    store.snapshot(tmp_path / "snap", record=b"step 7")
    fill(store, 2)
    fill(store, 3)
    store.close()
    with TensorStore.open(tmp_path / "snap") as old:
        assert old.record == b"step 7"
        assert old.read("structured").result().dtype == aligned
        assert old.read("most").result().shape == (1,) * 64
        for name, tensor in tensors.items():
            assert torch.equal(old.read(name).result(), tensor)
        for action in (
            lambda: old.write("a", b""),
            lambda: old.delete("t0"),
            lambda: old.reserve({"a": 1}),
            lambda: old.snapshot(tmp_path / "other"),
            old.commit,
            old.go_back,
        ):
            with pytest.raises(ValueError, match="reading only"):
                action()
        view = old.map([("t9", 0, tensors["t9"].nbytes)])
    assert torch.equal(torch.frombuffer(view, dtype=torch.uint8), tensors["t9"])


def test_a_snapshot_links_large_tensors_and_has_no_more_than_was_stored(tmp_path, store):
    store.reserve({"a": 40 << 20})
    store.write("a", pattern(3 << 20)).result()
    store.write("b", pattern(SMALL)).result()
    before = stats_of(store)["reserved_nbytes"]
    store.snapshot(tmp_path / "snap")
    assert used(tmp_path / "snap") <= (3 << 20) + (1 << 20) + 65536
    # What the snapshot has is reserved again, and its space is freed with its directory.
    assert stats_of(store)["reserved_nbytes"] >= before
    store.write("a", pattern(3 << 20, 1)).result()
    shutil.rmtree(tmp_path / "snap")
    assert stats_of(store)["reserved_nbytes"] <= before + (4 << 20)


def test_a_file_without_names_is_copied(tmp_path, store):
    """Such a file cannot be linked again, after its snapshots were removed."""
    tensors = fill(store, 1)
    for name in ("first", "second"):
        store.snapshot(tmp_path / name)
    for name in ("first", "second"):
        shutil.rmtree(tmp_path / name)
    store.snapshot(tmp_path / "third")
    assert_has(store, tensors)
    store.close()
    with TensorStore.open(tmp_path / "third") as old:
        assert_has(old, tensors)


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
    from tensorferry.store import TensorStore, manifest

    def hang(_):
        print("made", flush=True)
        time.sleep(600)

    manifest.to_bytes = hang
    with TensorStore(sys.argv[1] + "/store") as store:
        store.write("a", bytes(1000))
        store.snapshot(sys.argv[1] + "/snap")
"""


def test_the_next_snapshot_removes_what_a_killed_one_has_left_and_no_more(tmp_path, store):
    def partial():
        return [each.name for each in tmp_path.iterdir() if each.suffix == ".partial"]

    mine = tmp_path / ".tensorferry.mine.partial"
    mine.mkdir()
    store.write("a", pattern(1000)).result()
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED), tmp_path],
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stdout.readline() == "made\n"
            store.snapshot(tmp_path / "other")
            assert len(partial()) == 2, "another process is still making it"
        finally:
            child.kill()
    store.snapshot(tmp_path / "next")
    assert partial() == [mine.name]
    assert not (tmp_path / "snap").exists()


def test_a_snapshot_without_space_for_the_next_versions_leaves_nothing(tmp_path):
    with mounts.tmpfs(tmp_path / "tmpfs", 12 << 20) as root, TensorStore(root / "s") as store:
        store.reserve({"a": 6 << 20}, in_flight_nbytes=0)
        data = pattern(6 << 20)
        store.write("a", data).result()
        (root / "other").write_bytes(bytes(3 << 20))
        with pytest.raises(tensorferry.StorageError, match="No space"):
            store.snapshot(root / "snap")
        assert sorted(file.name for file in root.iterdir()) == ["other", "s"]
        (root / "other").unlink()
        assert (store.read("a").result() == data).all()


@pytest.mark.parametrize("temporary", [True, False])
def test_a_snapshot_shares_files_and_the_store_gets_their_space_back(tmp_path, temporary):
    count, nbytes = 300, LARGE // 2
    with TensorStore(tmp_path / "s", temporary=temporary) as store:
        store.reserve({str(at): nbytes for at in range(count)}, in_flight_nbytes=count * nbytes)
        for at in range(count):
            store.write(str(at), full(1, nbytes)).result()
        free = stats_of(store)["free_nbytes"]
        store.snapshot(tmp_path / "snap")
        assert stats_of(store)["free_nbytes"] >= free
        assert max(file.stat().st_nlink for file in segments_in(tmp_path / "snap")) == 2 - temporary
        assert used(tmp_path / "snap") <= 2 * count * nbytes + (1 << 20)
        for at in range(count):
            if at % 8:  # a few are left in each file
                store.write(str(at), full(2, nbytes)).result()
        with TensorStore.open(tmp_path / "snap") as old:
            assert all((old.read(str(at)).result() == 1).all() for at in range(count))
        shutil.rmtree(tmp_path / "snap")
        frozen = [one for one in store._directories[0].segments if one.frozen]
        assert frozen
        for number in range(2):  # the first of two commits replaces one that has the old tensors
            store.snapshot(tmp_path / str(number)) if temporary else store.commit()
            shutil.rmtree(tmp_path / str(number), ignore_errors=True)
        assert not {*frozen} & {*store._directories[0].segments}
        for at in range(count):
            assert (store.read(str(at)).result() == (2 if at % 8 else 1)).all()


@pytest.mark.parametrize("letter", ["s", "字"])
def test_a_snapshot_may_have_any_name_that_the_file_system_takes(tmp_path, store, letter):
    tensors = fill(store, 1, count=3)
    for nbytes in (220, 255):
        path = tmp_path / long_name(nbytes, letter)
        store.snapshot(path)
        with TensorStore.open(path) as found:
            assert_has(found, tensors)
    before = sorted(each.name for each in tmp_path.iterdir())
    with pytest.raises(tensorferry.StorageError, match="too long"):
        store.snapshot(tmp_path / long_name(256, letter))
    assert sorted(each.name for each in tmp_path.iterdir()) == before


# Commits


def commit_number(store, number, **how):
    for name in range(3):
        store.write(str(name), pattern(LARGE, number * 10 + name))
    store.commit(str(number).encode(), **how)


def assert_has_commit(path, record, *, previous=False):
    with TensorStore.open(path, previous=previous) as old:
        assert old.record == record
        for name in old:
            assert (old.read(name).result() == pattern(LARGE, int(record) * 10 + int(name))).all()


def segments_in(path):
    return list(path.glob("*.segment"))


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_commits_use_twice_the_bytes_that_change_and_64_mib(tmp_path, nbytes):
    path = tmp_path / "s"
    count = (96 << 20) // nbytes if nbytes == LARGE else 4000
    with TensorStore(path, temporary=False) as store:
        for step in range(4):
            futures = [store.write(str(at), full(step, nbytes)) for at in range(count)]
            [future.result() for future in futures]
            store.commit(str(step).encode())
        stored = count * -(-nbytes // 4096) * 4096
        assert used(path) <= 3 * stored + (64 << 20)
        for _ in range(3):  # at rest, little changes between two commits
            store.write("0", full(9, nbytes)).result()
            store.commit(b"few")
        assert used(path) <= stored + (64 << 20)
        for at in range(10, count):
            store.delete(str(at))
        for _ in range(2):
            store.commit(b"few")
        assert used(path) <= 64 << 20
    assert len(TensorStore.open(path)) == 10


def test_a_new_store_keeps_the_old_commit_until_its_own(tmp_path):
    path = tmp_path / "named"
    with TensorStore(path, temporary=False) as first:
        old = fill(first, 1)
        first.commit(b"old")
        fill(first, 2)
    (path / "mine.txt").write_text("a stranger's")
    with TensorStore(path, temporary=False) as second:
        new = fill(second, 3)
        reader = TensorStore.open(path)
        assert reader.record == b"old"
        assert_has(reader, old)
        second.commit(b"new")
        with pytest.raises(tensorferry.StorageError, match=f"process {os.getpid()}"):
            TensorStore.open(path)
        reader.close()
    with TensorStore.open(path) as found:
        assert_has(found, new)
    assert (path / "mine.txt").read_text() == "a stranger's"
    assert len({manifest.run_of(file.name) for file in segments_in(path)}) == 1


def test_a_store_that_never_commits_leaves_no_data(tmp_path, named):
    fill(named, 1)
    named.close()
    assert [file.name for file in (tmp_path / "named").iterdir()] == [LOCK_NAME]


def test_a_second_store_is_told_which_process_has_the_directory(tmp_path, named):
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
    with TensorStore(tmp_path / "named") as temporary, pytest.raises(ValueError, match="temporary"):
        temporary.commit()
    named.close()
    TensorStore(tmp_path / "named", temporary=False).close()


def test_directories_in_another_order_are_noticed(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    with TensorStore(paths, temporary=False) as store:
        tensors = fill(store, 1)
        store.commit()
    for wrong in (paths[::-1], paths[1:], [tmp_path / "c", tmp_path / "b"]):
        with pytest.raises(tensorferry.StorageError):
            TensorStore(wrong, temporary=False)
    for wrong in (paths[::-1], paths[:1], paths[1:]):
        with pytest.raises(tensorferry.StorageError):
            TensorStore.open(wrong)
    with TensorStore.open(paths) as old:
        assert_has(old, tensors)


def test_a_commit_that_is_killed_anywhere_leaves_one_that_cannot_be_dropped(tmp_path):
    """Nor by the next store, which finds the files of a commit that has just begun, or has nearly ended."""
    last = None
    for number in itertools.count(1, 40):
        path = tmp_path / str(number)
        if (child := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                store = TensorStore(path, temporary=False)
                commit_number(store, 1, sync=True)
                for name in range(3):
                    store.write(str(name), pattern(LARGE, 20 + name)).result()
                with At(number, SOURCES, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                    store.commit(b"2", sync=True, keep_previous=True)
                os._exit(0)
            os._exit(1)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert ended in (0, -signal.SIGKILL)
        with TensorStore.open(path) as old:
            last = old.record
        with TensorStore(path, temporary=False) as store:
            store.drop_previous()
        assert_has_commit(path, last)
        assert len(segments_in(path)) == 3
        shutil.rmtree(path)
        if ended == 0:
            break
    assert last == b"2"


def test_the_only_commit_can_neither_be_dropped_nor_undone(tmp_path):
    path = tmp_path / "s"
    with TensorStore(path, temporary=False) as store:
        commit_number(store, 1)
    with TensorStore(path, temporary=False) as store:
        store.drop_previous()
        with pytest.raises(tensorferry.StorageError, match="not kept") as caught:
            store.go_back()
        assert caught.value.errno == errno.ENOENT
    assert_has_commit(path, b"1")


def test_a_closed_store_changes_nothing_of_the_next_one(tmp_path):
    path = tmp_path / "s"
    with TensorStore(path, temporary=False) as store:
        commit_number(store, 1)
    with TensorStore(path, temporary=False) as closed:
        commit_number(closed, 2, keep_previous=True)
    with TensorStore(path, temporary=False) as store:
        commit_number(store, 3, keep_previous=True)
        for action in (closed.drop_previous, closed.go_back):
            with pytest.raises(ValueError, match="is closed"):
                action()
        with pytest.raises(ValueError, match="has committed"):
            store.go_back()
        with TensorStore(path) as other, pytest.raises(ValueError, match="temporary"):
            other.go_back()
    assert_has_commit(path, b"3")
    assert_has_commit(path, b"2", previous=True)


def refusing(name):
    """Return an os.open that cannot open a file because too many files are open."""
    opens = os.open

    def refuses(file, *arguments, **options):
        if os.fspath(file).endswith(name):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opens(file, *arguments, **options)

    return refuses


@pytest.mark.parametrize("name", ["-2.json", "-1.json", LOCK_NAME])
def test_a_file_that_cannot_be_opened_now_is_not_taken_for_missing(tmp_path, monkeypatch, name):
    """No commit is removed, and a commit is not read while it is unknown whether its writer overwrites the data."""
    path = tmp_path / "s"
    with TensorStore(path, temporary=False) as store:
        for number in (1, 2):
            commit_number(store, number, keep_previous=True)
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refusing(name))
            with pytest.raises(tensorferry.StorageError, match=r"Too many|process"):
                TensorStore.open(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing(name))
        with pytest.raises(tensorferry.StorageError, match="Too many open files"):
            TensorStore(path, temporary=False)
    assert_has_commit(path, b"2")
    assert_has_commit(path, b"1", previous=True)


def test_a_commit_that_is_replaced_while_it_is_opened_is_not_used(tmp_path, monkeypatch):
    """Its space has another tensor by then."""
    store = TensorStore(tmp_path / "s", temporary=False, checksums=False)
    store.write("a", pattern(LARGE, 1)).result()
    store.commit(b"1")
    checks = []
    check = tensorferry.store.tensor_store.Folder.check_no_writer

    def ends_meanwhile(folder, run):
        if not checks:
            for seed in (2, 3):
                store.write("a", pattern(LARGE, seed)).result()
                store.commit(str(seed).encode())
            store.close()
        checks.append(run)
        return check(folder, run)

    monkeypatch.setattr(tensorferry.store.tensor_store.Folder, "check_no_writer", ends_meanwhile)
    with TensorStore.open(tmp_path / "s") as old:
        assert old.record == b"3"
        assert (old.read("a").result() == pattern(LARGE, 3)).all()
    assert len(checks) == 2


def test_a_commit_needs_the_names_of_its_directory_and_files(tmp_path):
    path = tmp_path / "s"
    with TensorStore(path, temporary=False) as store:
        commit_number(store, 1)
        path.rename(tmp_path / "moved")
        path.mkdir()
        with pytest.raises(tensorferry.StorageError) as caught:
            store.commit(b"lost")
        assert caught.value.errno == errno.ESTALE
        path.rmdir()
        (tmp_path / "moved").rename(path)
        commit_number(store, 2)
        for file in segments_in(path):
            file.unlink()
        store.write("0", pattern(LARGE, 20)).result()
        with pytest.raises(tensorferry.StorageError, match="was removed"):
            store.commit(b"lost")
    assert list(path.glob("*.json"))


def test_a_commit_is_possible_when_no_descriptor_is_left(tmp_path):
    code = f"""
        import os, resource, numpy
        from tensorferry.store import TensorStore
        store = TensorStore({os.fspath(tmp_path / "s")!r}, temporary=False)
        store.write("large", numpy.ones(300_000, numpy.uint8)).result()
        store.write("small", numpy.ones(10, numpy.uint8)).result()
        resource.setrlimit(resource.RLIMIT_NOFILE, (os.dup(0) + 20,) * 2)
        try:
            while True:
                os.dup(0)
        except OSError:
            store.commit(b"1", sync=True)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=300)
    with TensorStore.open(tmp_path / "s") as old:
        assert (old.read("large").result() == 1).all()
        assert (old.read("small").result() == 1).all()


def test_a_store_leaves_descriptors_for_its_own_commit(tmp_path):
    """However many large tensors are in flight, each in a file of its own."""
    code = f"""
        import resource, numpy
        from tensorferry.store import TensorStore
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
        with TensorStore({os.fspath(tmp_path / "s")!r}, temporary=False) as store:
            futures = [store.write(str(at), numpy.ones(300_000, "u1")) for at in range(100)]
            store.commit(b"1", sync=True)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=300)
    with TensorStore.open(tmp_path / "s") as old:
        assert len(old) == 100
        assert all((old.read(name).result() == 1).all() for name in old)


NAMES = ["", "\udc80", "\ud83d\ude00", "\U0001f600", "a\0b", '"\\\n', "ü" * 3000]


def test_every_string_is_a_name(tmp_path, named):
    for at, name in enumerate(NAMES):
        named.write(name, full(at, 10)).result()
    named.commit()
    named.close()
    with TensorStore.open(tmp_path / "named") as old:
        assert list(old) == NAMES
        for at, name in enumerate(NAMES):
            assert (old.read(name).result() == at).all()


def test_descriptors_stay_bounded(tmp_path, store):
    counts = []
    for at in range(40):
        store.write(str(at), full(at, SMALL)).result()
        store.snapshot(tmp_path / f"snapshot{at}")
        counts.append(leaks.count_descriptors())
    assert max(counts) <= counts[0]


@pytest.fixture
def nothing_tried():
    publication._renames_checked.clear()
    yield
    publication._renames_checked.clear()


@pytest.mark.usefixtures("nothing_tried")
def test_a_file_that_counts_as_open_for_a_while_is_renamed_then(faultfs):
    faultfs.order(Fault("rename_open", error=errno.EBUSY))
    with TensorStore(faultfs.path, temporary=False) as store:
        tensors = fill(store, 1)
        for _ in range(2):
            store.commit(b"", sync=True)
        store.snapshot(faultfs.path / "snapshot")
    for path in (faultfs.path, faultfs.path / "snapshot"):
        with TensorStore.open(path) as old:
            assert_has(old, tensors)
