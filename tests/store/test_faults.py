"""Failing drives and system calls: stored tensors survive, and the error names the operation and the path."""

import contextlib
import errno
import itertools
import os
import shutil
import subprocess
import threading

import numpy as np
import pytest

import tensorferry
from tensorferry.store import TensorStore, manifest, segments
from tests.store.data import pattern
from tests.support import interrupts, mounts, required
from tests.support.expect import interrupted
from tests.support.faultfs import Fault
from tests.support.optional import torch

SEGMENT = 1 << 20
NBYTES = 256 << 10


def last_manifest(path):
    return (path / manifest.names_in(path)[0]).read_text()


@pytest.fixture
def store(faultfs):
    with TensorStore(faultfs.path, temporary=False) as store:
        yield store


def test_a_write_that_fails_changes_nothing(faultfs, store):
    old, new = pattern(NBYTES, 1), pattern(2 * NBYTES, 2)
    store.write("a", old).result()
    used = store.stats()["directories"][0]["used_nbytes"]
    faultfs.order(Fault("write", error=errno.EIO))
    future = store.write("a", new)
    read = store.read("a")
    with pytest.raises(tensorferry.StorageError, match="writing tensor 'a'") as caught:
        future.result()
    assert caught.value.errno == errno.EIO
    assert caught.value.filename.startswith(str(faultfs.path))
    assert (read.result() == old).all()
    faultfs.clear()
    assert (store.read("a").result() == old).all()
    assert store.stats()["directories"][0]["used_nbytes"] == used
    store.write("a", new).result()
    assert (store.read("a").result() == new).all()


def test_the_first_write_of_a_name_fails(faultfs, store):
    store.write("b", b"x").result()
    faultfs.order(Fault("write", error=errno.EIO))
    future = store.write("a", pattern(NBYTES))
    with pytest.raises(KeyError):
        store.read("a")
    with pytest.raises(tensorferry.StorageError):
        future.result()
    assert "a" not in store
    assert list(store) == ["b"]


def test_the_last_of_several_writes_that_ended_well_counts(faultfs, store):
    faultfs.order(Fault("write", error=errno.EIO, skip=2, times=1))
    futures = [store.write("a", pattern(NBYTES, seed)) for seed in range(3)]
    assert (store.read("a").result() == pattern(NBYTES, 1)).all()
    assert [future.exception() is None for future in futures] == [True, True, False]


def test_a_read_that_fails_names_tensor_file_and_offset(faultfs, store):
    store.write("a", pattern(NBYTES)).result()
    faultfs.order(Fault("read", error=errno.EIO))
    with pytest.raises(tensorferry.StorageError, match="reading tensor 'a'") as caught:
        store.read("a").result()
    assert caught.value.errno == errno.EIO
    assert caught.value.filename.endswith(".segment")
    faultfs.clear()
    assert (store.read("a").result() == pattern(NBYTES)).all()


def test_damage_is_found_and_is_not_copied(faultfs, store, tmp_path):
    data = pattern(3 * SEGMENT)
    store.write("a", data).result()
    store.write("b", pattern(100)).result()
    for file in faultfs.backing.glob("*.segment"):
        with file.open("r+b") as backing:
            at = 300_000 if os.fstat(backing.fileno()).st_size >= data.nbytes else 50
            byte = os.pread(backing.fileno(), 1, at)
            os.pwrite(backing.fileno(), bytes([byte[0] ^ 1]), at)
    with pytest.raises(tensorferry.ChecksumError, match="tensor 'a'") as caught:
        store.read("a").result()
    assert caught.value.filename.startswith(str(faultfs.path / "tensorferry-store-"))
    assert caught.value.offset <= 300_000 < caught.value.offset + caught.value.nbytes
    for name in "ab":
        with pytest.raises(tensorferry.ChecksumError, match=f"tensor '{name}'"):
            store.snapshot(tmp_path / "snap")
        store.delete(name)
    assert not (tmp_path / "snap").exists()


def test_a_failed_write_that_was_not_noticed_fails_the_next_barrier(faultfs, store):
    store.write("a", pattern(NBYTES)).result()
    store.commit(b"1")
    barriers = [store.commit, lambda: store.snapshot(faultfs.path / "snap"), store.close]
    for barrier in barriers:
        faultfs.order(Fault("write", error=errno.EIO, times=1))
        future = store.write("a", pattern(NBYTES, 1))
        with pytest.raises(tensorferry.StorageError, match="writing tensor 'a'") as caught:
            barrier()
        assert caught.value.errno == errno.EIO
        assert future.exception().errno == errno.EIO
        assert not (faultfs.path / "snap").exists()
        if barrier != store.close:
            faultfs.order(Fault("write", error=errno.EIO, times=1))
            with pytest.raises(tensorferry.StorageError):
                store.write("a", pattern(NBYTES, 1)).result()
            store.commit(b"1")  # the error is known
    with TensorStore.open(faultfs.path) as old:
        assert (old.read("a").result() == pattern(NBYTES)).all()


def test_a_full_disk_is_found_when_space_is_reserved(faultfs, store):
    store.write("a", pattern(NBYTES)).result()
    before = store.stats()["directories"][0]
    faultfs.order(Fault("fallocate", error=errno.ENOSPC))
    with pytest.raises(tensorferry.StorageError) as caught:
        store.reserve({"b": 10 * SEGMENT})
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(tensorferry.StorageError, match="tensor 'b'"):
        store.write("b", pattern(SEGMENT))
    faultfs.clear()
    assert store.stats()["directories"][0]["reserved_nbytes"] == before["reserved_nbytes"]
    assert (store.read("a").result() == pattern(NBYTES)).all()


@pytest.mark.parametrize(
    ("op", "skip"), [("write", 0), ("fsync", 0), ("fsyncdir", 0), ("fsyncdir", 1)]
)
def test_a_commit_that_fails_leaves_one_before_or_its_own(faultfs, store, op, skip):
    store.write("a", pattern(NBYTES, 1)).result()
    store.commit(b"1", sync=True)
    store.write("a", pattern(NBYTES, 2)).result()
    faultfs.order(Fault(op, skip=skip, error=errno.EIO))
    with pytest.raises(OSError) as caught:
        store.commit(b"2", sync=True)
    assert caught.value.errno == errno.EIO
    faultfs.clear()
    for seed in range(3, 6):  # none of them may overwrite either one
        store.write("a", pattern(NBYTES, seed)).result()
    store.close()
    with TensorStore.open(faultfs.path) as old:
        assert (old.read("a").result() == pattern(NBYTES, int(old.record))).all()


def test_a_snapshot_that_cannot_read_leaves_nothing(faultfs, store, tmp_path):
    store.write("a", pattern(NBYTES, 1)).result()
    faultfs.order(Fault("read", error=errno.EIO))
    with pytest.raises(tensorferry.StorageError):
        store.snapshot(tmp_path / "snap")
    assert list(tmp_path.iterdir()) == []
    faultfs.clear()
    store.snapshot(tmp_path / "snap")
    with TensorStore.open(tmp_path / "snap") as old:
        assert (old.read("a").result() == pattern(NBYTES, 1)).all()


def test_a_file_system_without_unnamed_files(faultfs):
    with TensorStore(faultfs.path) as store:
        data = pattern(3 * SEGMENT + 5)
        store.write("a", data).result()
        assert (store.read("a").result() == data).all()
    assert list(faultfs.path.iterdir()) == []


def test_close_waits_for_what_is_on_its_way(faultfs):
    store = TensorStore(faultfs.path, temporary=False)
    store.write("old", pattern(NBYTES)).result()
    faultfs.order(Fault("write", hold=True))
    write = store.write("a", pattern(NBYTES))
    closer = threading.Thread(target=store.close)
    closer.start()
    faultfs.await_held()
    closer.join(0.2)
    assert closer.is_alive()
    faultfs.release()
    closer.join(120)
    assert not closer.is_alive()
    assert write.done()


def test_a_full_disk_in_the_middle(tmp_path):
    with (
        mounts.ext4(tmp_path, 24 << 20) as path,
        TensorStore(path) as store,
    ):
        kept = {}

        def fill():
            for at in range(100):
                store.write(str(at), pattern(SEGMENT, at)).result()
                kept[str(at)] = at

        with pytest.raises(tensorferry.StorageError) as caught:
            fill()
        assert caught.value.errno == errno.ENOSPC
        assert len(kept) > 10
        assert sorted(store) == sorted(kept)
        for name, seed in kept.items():
            assert (store.read(name).result() == pattern(SEGMENT, seed)).all()
        store.delete("0")
        store.delete("1")
        store.write("new", pattern(2 * SEGMENT)).result()


@pytest.mark.parametrize("block_nbytes", [4 << 10, 16 << 10, 64 << 10])
def test_ragged_neighbours_on_xfs_with_large_blocks_and_its_reflinks(tmp_path, block_nbytes):
    image = tmp_path / "xfs.img"
    with image.open("wb") as file:
        file.truncate(320 << 20)
    make = [required.command("mkfs.xfs"), "-q", "-b", f"size={block_nbytes}", str(image)]
    made = subprocess.run(make, capture_output=True, text=True)
    if made.returncode != 0:
        required.missing("mounts", f"mkfs.xfs failed: {made.stderr.strip()}")
    with mounts.mounted(tmp_path / "xfs", "-o", "loop", str(image)) as mount:
        store = TensorStore(mount / "s")
        rng = np.random.default_rng(1)
        for _ in range(4):
            tensors = {str(at): rng.integers(0, 256, at * 7919, np.uint8) for at in range(50)}
            for name, data in tensors.items():
                store.write(name, data)
            for name, data in tensors.items():
                assert (store.read(name).result() == data).all()
        store.snapshot(mount / "linked")  # syncs: EIO if the kernel has detected a collision
        shutil.rmtree(mount / "linked")
        before = shutil.disk_usage(mount).used
        store.snapshot(mount / "cloned")
        small = [data.nbytes for data in tensors.values() if data.nbytes < NBYTES]
        copied = sum(-(-nbytes // 65536) * 65536 for nbytes in small)
        assert shutil.disk_usage(mount).used - before < copied + 8 * SEGMENT
        store.close()
        with TensorStore.open(mount / "cloned") as old:
            for name, data in tensors.items():
                assert (old.read(name).result() == data).all()


@pytest.mark.parametrize("mib", [1, 16, 48])
def test_a_small_drive_is_filled_with_what_is_written(tmp_path, mib):
    with (
        mounts.tmpfs(tmp_path / "tmpfs", mib << 20) as path,
        TensorStore(path) as store,
    ):
        nbytes = (mib << 20) // 8
        for name in "abcdefg":
            store.write(name, pattern(nbytes, ord(name))).result()
        with pytest.raises(tensorferry.StorageError) as caught:
            store.write("h", pattern(2 * nbytes))
        free = mounts.free_nbytes(path)
        assert caught.value.errno == errno.ENOSPC
        assert f"0 of {2 * nbytes} bytes moved; {free} bytes are free" in str(caught.value)
        assert caught.value.filename == str(path)
        for name in "abcdefg":
            assert (store.read(name).result() == pattern(nbytes, ord(name))).all()
        with pytest.raises(tensorferry.StorageError, match=f"0 of {3 * nbytes} bytes moved"):
            store.reserve({"b": 3 * nbytes}, in_flight_nbytes=0)


def test_memory_that_goes_away_meanwhile_is_no_write(faultfs, store):
    store.write("a", torch.ones(NBYTES, dtype=torch.uint8)).result()
    faultfs.order(Fault("write", hold=True))
    tensor = torch.zeros(NBYTES, dtype=torch.uint8)
    future = store.write("a", tensor)
    faultfs.await_held()
    tensor.resize_(4 * NBYTES)
    faultfs.release()
    with pytest.raises(tensorferry.StorageError, match="bytes are not valid"):
        future.result()
    assert (store.read("a").result() == 1).all()


@pytest.mark.parametrize("alone", [False, True])
def test_a_sync_that_failed_is_not_forgotten(faultfs, store, tmp_path, alone):
    """The kernel reports the error once: a second sync of the same file succeeds, but the data are lost."""
    store.write("b", np.arange(9, dtype=">f8").reshape(3, 3)).result()
    store.write("a", pattern(NBYTES if alone else 100, 1)).result()
    lost = max(faultfs.backing.glob("*.segment"))
    faultfs.order(Fault("fsync", name=lost.name, error=errno.EIO, times=1))
    with pytest.raises(tensorferry.StorageError, match="Input/output error"):
        store.commit(sync=True)
    store.snapshot(tmp_path / "snap")  # a copy, verified
    store.commit(b"2", sync=True)  # written to another file, verified
    assert store.info("b").dtype == np.dtype(">f8")
    assert store.read("b").result().tolist() == np.arange(9.0).reshape(3, 3).tolist()
    store.close()
    assert lost.name not in last_manifest(faultfs.path)
    for path in (faultfs.path, tmp_path / "snap"):
        with TensorStore.open(path) as old:
            assert (old.read("a").result() == pattern(NBYTES if alone else 100, 1)).all()


def test_a_snapshot_does_not_copy_what_may_be_lost_and_cannot_be_verified(faultfs, tmp_path):
    with TensorStore(faultfs.path, temporary=False, checksums=False) as store:
        store.write("a", pattern(NBYTES)).result()
        faultfs.order(Fault("fsync", error=errno.EIO, times=1))
        with pytest.raises(tensorferry.StorageError):
            store.commit(sync=True)
        with pytest.raises(
            tensorferry.StorageError, match="an earlier sync of the file has failed"
        ):
            store.snapshot(tmp_path / "snap")
        assert not (tmp_path / "snap").exists()
        store.write("a", pattern(NBYTES)).result()
        store.snapshot(tmp_path / "snap")


def test_what_a_failed_sync_has_lost_is_not_committed(faultfs, store):
    store.write("a", pattern(NBYTES)).result()
    faultfs.order(Fault("fsync", error=errno.EIO, times=1))
    with pytest.raises(tensorferry.StorageError, match="Input/output error"):
        store.commit(sync=True)
    (lost,) = faultfs.backing.glob("*.segment")
    with lost.open("r+b") as file:  # simulates that the kernel has dropped the failed pages
        file.write(bytes(4096))
    for _ in range(2):
        with pytest.raises(tensorferry.ChecksumError, match="'a'"):
            store.commit(sync=True)
    store.write("a", pattern(NBYTES, 1)).result()
    store.commit(sync=True)


def test_without_checksums_what_a_failed_sync_may_have_lost_must_be_written_again(faultfs):
    with TensorStore(faultfs.path, temporary=False, checksums=False) as store:
        store.write("a", pattern(NBYTES)).result()
        faultfs.order(Fault("fsync", error=errno.EIO, times=1))
        for _ in range(3):
            with pytest.raises(tensorferry.StorageError) as caught:
                store.commit(sync=True)
        assert "an earlier sync of the file has failed" in str(caught.value)
        store.write("a", pattern(NBYTES)).result()
        store.commit(sync=True)


def test_a_sync_that_failed_while_another_was_interrupted_is_not_forgotten(faultfs, store):
    for name in "abc":
        store.write(name, pattern(NBYTES)).result()
    first, second, _ = sorted(faultfs.backing.glob("*.segment"))
    faultfs.order(
        Fault("fsync", name=first.name, hold=True),
        Fault("fsync", name=second.name, error=errno.EIO, times=1),
    )
    with interrupted(faultfs, lambda: faultfs.hits() == 2):
        store.commit(sync=True)
    faultfs.release()
    store.commit(sync=True)  # written to other files, verified
    assert all(name not in last_manifest(faultfs.path) for name in (first.name, second.name))


def test_a_sync_that_fails_is_not_forgotten_wherever_it_is_interrupted(faultfs):
    def interrupt():
        raise KeyboardInterrupt

    for number in itertools.count(1):
        faultfs.clear()
        with TensorStore(faultfs.path, temporary=False) as store:
            store.write("a", pattern(NBYTES)).result()
            store.write("b", b"x").result()
            segment = max(faultfs.backing.glob(f"*{store._commits.run}*.segment"))
            faultfs.order(Fault("fsync", name=segment.name, error=errno.EIO, times=1))
            at = interrupts.At(number, segments.__file__, interrupt)
            with pytest.raises((KeyboardInterrupt, tensorferry.StorageError)), at:
                store.commit(sync=True)
            with contextlib.suppress(
                tensorferry.StorageError
            ):  # if the error has not been raised yet
                store.commit(sync=True)
            store.commit(sync=True)
            assert segment.name not in last_manifest(faultfs.path)
        if at.happened_in is None:
            break
    assert number > 20


def test_commits_that_cannot_be_written_keep_no_space(faultfs, store):
    store.write("a", pattern(NBYTES)).result()
    faultfs.order(
        *[Fault("write", name=manifest.name_of(n), error=errno.ENOSPC) for n in range(1, 11)]
    )
    for seed in range(5):
        store.write("a", pattern(NBYTES, seed)).result()
        with pytest.raises(tensorferry.StorageError):
            store.commit()
    assert store.stats()["directories"][0]["used_nbytes"] == NBYTES
    faultfs.clear()
    store.commit(b"again")
    store.close()
    with TensorStore.open(faultfs.path) as old:
        assert old.record == b"again"


def test_a_snapshot_whose_name_cannot_be_kept_is_not_there(faultfs, store):
    store.write("a", pattern(NBYTES)).result()
    faultfs.order(Fault("fsyncdir", skip=1, error=errno.EIO))
    with pytest.raises(tensorferry.StorageError) as caught:
        store.snapshot(faultfs.path / "snap")
    assert caught.value.errno == errno.EIO
    assert not [each for each in faultfs.backing.iterdir() if each.is_dir()]


def test_a_file_system_that_cannot_sync_directories_takes_commits(faultfs, store):
    """EINVAL means that the file system cannot sync directories, which is accepted, as for checkpoints and weights."""
    store.write("a", pattern(NBYTES)).result()
    faultfs.order(Fault("fsyncdir", error=errno.EINVAL))
    store.commit(sync=True)
    store.snapshot(faultfs.path / "snap")
    assert faultfs.hits() > 1


def test_names_of_new_directories_are_made_to_last_too(faultfs):
    path = faultfs.path / "new" / "store"
    for skip in (0, 1):
        faultfs.order(Fault("fsyncdir", skip=skip, times=1, error=errno.EIO))
        with pytest.raises(tensorferry.StorageError):
            TensorStore(path, temporary=False)
    faultfs.clear()
    TensorStore(path, temporary=False).close()
