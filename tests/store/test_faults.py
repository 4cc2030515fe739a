"""Failing drives and system calls: stored tensors survive, and the error names the operation and the path."""

import contextlib
import errno
import gc
import itertools
import os
import resource
import shutil
import subprocess
import threading

import numpy as np
import pytest

import tensorferry
from tensorferry.store import TensorStore, manifest, segments
from tests.store.data import pattern
from tests.support import child, interrupts, leaks, mounts, required
from tests.support.expect import interrupted
from tests.support.faultfs import Fault
from tests.support.optional import torch

SEGMENT = 1 << 20
NBYTES = 256 << 10


@pytest.fixture
def store(faultfs):
    with TensorStore(faultfs.path, segment_nbytes=SEGMENT, temporary=False) as store:
        yield store


def test_a_write_that_fails_changes_nothing(faultfs, store):
    old, new = pattern(NBYTES, 1), pattern(NBYTES, 2)
    store.write("a", old).result()
    used = store.stats()["directories"][0]["used_nbytes"]
    faultfs.order(Fault("write", error=errno.EIO))
    ticket = store.write("a", new)
    read = store.read("a")
    with pytest.raises(tensorferry.StorageError, match="writing tensor 'a'") as caught:
        ticket.result()
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
    faultfs.order(Fault("write", hold=True, error=errno.EIO))
    ticket = store.write("a", pattern(NBYTES))
    read = store.read("a")
    faultfs.release()
    with pytest.raises(tensorferry.StorageError):
        ticket.result()
    with pytest.raises(tensorferry.StorageError, match=r"'a'.*write"):
        read.result()
    assert "a" not in store
    assert list(store) == ["b"]


def test_what_waited_for_a_failed_write_of_another_size_is_told(faultfs, store):
    store.write("a", pattern(NBYTES)).result()
    faultfs.order(Fault("write", hold=True, error=errno.EIO))
    ticket = store.write("a", pattern(2 * NBYTES))
    read = store.read("a")
    faultfs.release()
    assert ticket.exception() is not None
    with pytest.raises(tensorferry.StorageError, match="does not match"):
        read.result()
    faultfs.clear()
    assert store.read("a").result().nbytes == NBYTES


def test_the_last_write_that_ended_well_counts_whatever_their_order(faultfs, store):
    store.write("a", pattern(NBYTES, 0)).result()
    faultfs.order(Fault("write", hold=True))
    tickets = [store.write("a", pattern(NBYTES, seed)) for seed in (1, 2, 3)]
    reads = [store.read("a") for _ in range(2)]
    tickets[2].cancel()
    faultfs.await_held()
    faultfs.release()
    for ticket in tickets[:2]:
        ticket.result()
    assert leaks.settled(tickets[2].done)
    want = 2 if tickets[2].cancelled() else 3
    for read in reads:
        assert (read.result() == pattern(NBYTES, want)).all()
    assert (store.read("a").result() == pattern(NBYTES, want)).all()


def test_a_read_that_fails_names_tensor_file_and_offset(faultfs, store):
    store.write("a", pattern(NBYTES)).result()
    faultfs.order(Fault("read", error=errno.EIO))
    with pytest.raises(tensorferry.StorageError, match="reading tensor 'a'") as caught:
        store.read("a").result()
    assert caught.value.errno == errno.EIO
    assert caught.value.filename.endswith(".segment")
    faultfs.clear()
    assert (store.read("a").result() == pattern(NBYTES)).all()


def test_damage_is_found(faultfs, store):
    data = pattern(3 * SEGMENT)
    store.write("a", data).result()
    file = sorted(faultfs.backing.glob("*.segment"))[1]
    with file.open("r+b") as backing:
        backing.seek(300_000)
        byte = backing.read(1)
        backing.seek(300_000)
        backing.write(bytes([byte[0] ^ 1]))
    with pytest.raises(tensorferry.ChecksumError, match="tensor 'a'") as caught:
        store.read("a").result()
    assert caught.value.filename == str(faultfs.path / file.name)
    assert caught.value.offset <= 300_000 < caught.value.offset + caught.value.nbytes


def test_a_full_disk_is_found_when_space_is_reserved(faultfs, store):
    store.write("a", pattern(NBYTES)).result()
    before = store.stats()["directories"][0]
    faultfs.order(Fault("fallocate", error=errno.ENOSPC))
    with pytest.raises(tensorferry.StorageError) as caught:
        store.reserve(10 * SEGMENT)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(tensorferry.StorageError, match="tensor 'b'"):
        store.write("b", pattern(SEGMENT))
    faultfs.clear()
    assert store.stats()["directories"][0]["reserved_nbytes"] == before["reserved_nbytes"]
    assert (store.read("a").result() == pattern(NBYTES)).all()


@pytest.mark.parametrize("op", ["write", "fsync", "fsyncdir"])
def test_a_commit_that_fails_leaves_one_before_or_its_own(faultfs, store, op):
    store.write("a", pattern(NBYTES, 1)).result()
    store.commit(b"1", sync=True)
    store.write("a", pattern(NBYTES, 2)).result()
    faultfs.order(Fault(op, error=errno.EIO))
    with pytest.raises(OSError) as caught:
        store.commit(b"2", sync=True)
    assert caught.value.errno == errno.EIO
    faultfs.clear()
    for seed in range(3, 6):  # none of them may overwrite either one
        store.write("a", pattern(NBYTES, seed)).result()
    assert not list(faultfs.backing.glob("*.tmp"))
    store.close()
    with TensorStore.open(faultfs.path) as old:
        assert (old.read("a").result() == pattern(NBYTES, int(old.record))).all()


def test_a_segment_that_cannot_be_synced_is_no_commit(faultfs, store):
    store.write("a", pattern(3 * SEGMENT)).result()
    segment = sorted(faultfs.backing.glob("*.segment"))[1]
    faultfs.order(Fault("fsync", name=segment.name, error=errno.EIO))
    with pytest.raises(tensorferry.StorageError) as caught:
        store.commit(sync=True)
    assert (caught.value.errno, caught.value.filename) == (
        errno.EIO,
        str(faultfs.path / segment.name),
    )
    assert not (faultfs.path / "tensorferry-store.json").exists()
    store.commit()  # without a sync
    faultfs.order()
    store.commit(sync=True)  # the kernel reports an error once: a second sync of one file succeeds
    assert segment.name not in (faultfs.path / manifest.NAME).read_text()
    synced = {one.name for one in faultfs.requests("fsync")}
    assert len([name for name in synced if name.endswith(".segment")]) >= 3


def test_a_commit_after_one_that_failed(faultfs, store):
    store.write("a", pattern(NBYTES, 1)).result()
    faultfs.order(Fault("write", name=f".tensorferry-{store._run}.tmp", error=errno.ENOSPC))
    with pytest.raises(tensorferry.StorageError, match="No space"):
        store.commit()
    faultfs.clear()
    store.commit(b"again")
    store.close()
    with TensorStore.open(faultfs.path) as old:
        assert old.record == b"again"


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
    with TensorStore(faultfs.path, segment_nbytes=SEGMENT) as store:
        data = pattern(3 * SEGMENT + 5)
        store.write("a", data).result()
        assert (store.read("a").result() == data).all()
    assert list(faultfs.path.iterdir()) == []


def test_close_waits_for_what_is_on_its_way(faultfs):
    store = TensorStore(faultfs.path, segment_nbytes=SEGMENT, temporary=False)
    store.write("old", pattern(NBYTES)).result()
    faultfs.order(Fault("write", hold=True))
    write = store.write("a", pattern(NBYTES))
    read = store.read("a")
    closer = threading.Thread(target=store.close)
    closer.start()
    faultfs.await_held()
    closer.join(0.2)
    assert closer.is_alive()
    faultfs.release()
    closer.join(120)
    assert not closer.is_alive()
    assert write.done()
    assert (read.result() == pattern(NBYTES)).all()


def test_a_full_disk_in_the_middle(tmp_path):
    with (
        mounts.ext4(tmp_path, 24 << 20) as path,
        TensorStore(path, segment_nbytes=SEGMENT) as store,
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
        with pytest.raises(tensorferry.StorageError):  # no descriptor is left for the freeze
            store.snapshot(path / "snap")
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
        store = TensorStore(mount / "s", segment_nbytes=SEGMENT)
        rng = np.random.default_rng(1)
        for _ in range(4):
            tensors = {str(at): rng.integers(0, 256, at * 1009, np.uint8) for at in range(60)}
            for name, data in tensors.items():
                store.write(name, data)
            for name, data in tensors.items():
                assert (store.read(name).result() == data).all()
        store.snapshot(mount / "linked")  # syncs: EIO if the kernel has detected a collision
        shutil.rmtree(mount / "linked")
        before = shutil.disk_usage(mount).used
        store.snapshot(mount / "cloned")
        assert shutil.disk_usage(mount).used - before < SEGMENT
        store.close()
        with TensorStore.open(mount / "cloned") as old:
            for name, data in tensors.items():
                assert (old.read(name).result() == data).all()


def test_memory_file_systems_can_be_used(tmp_path):
    with mounts.mounted(tmp_path / "tmpfs", "-t", "tmpfs", "-o", "size=16m", "none") as path:
        with TensorStore(path, segment_nbytes=SEGMENT) as store:
            data = pattern(5 * SEGMENT + 3)
            store.write("a", data).result()
            store.snapshot(path / "snap")
            assert (store.read("a").result() == data).all()
        with TensorStore.open(path / "snap") as old:
            assert (old.read("a").result() == data).all()


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


def test_reserved_space_is_as_large_as_it_was_asked_for(tmp_path):
    with mounts.tmpfs(tmp_path / "tmpfs", 20 << 20) as path, TensorStore(path) as store:
        sizes = {str(at): 1 << 20 for at in range(8)}
        store.reserve(sizes, in_flight_nbytes=1 << 20)
        assert store.stats()["directories"][0]["reserved_nbytes"] == 9 << 20
        for name, nbytes in sizes.items():
            store.write(name, pattern(nbytes)).result()
        store.snapshot(path / "snapshot")
        for name, nbytes in sizes.items():
            store.write(name, pattern(nbytes, 1)).result()
        with TensorStore.open(path / "snapshot") as old:
            assert (old.read("0").result() == pattern(1 << 20)).all()


def test_descriptors_run_out(tmp_path):
    assert child.call(f"{__name__}:written_with_few_descriptors", directory=tmp_path).result > 0


def written_with_few_descriptors(directory):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.dup(0))
    with TensorStore(directory, segment_nbytes=4096) as store:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 8, hard))
        with pytest.raises(tensorferry.StorageError, match="Too many open files"):
            [store.write(str(at), pattern(4096, at)).result() for at in range(1000)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for at in range(len(store)):
            assert (store.read(str(at)).result() == pattern(4096, at)).all()
        return len(store)


def test_memory_that_goes_away_meanwhile_is_no_write(faultfs, store):
    store.write("a", torch.ones(NBYTES, dtype=torch.uint8)).result()
    faultfs.order(Fault("write", hold=True))
    tensor = torch.zeros(NBYTES, dtype=torch.uint8)
    ticket = store.write("a", tensor)
    faultfs.await_held()
    tensor.resize_(4 * NBYTES)
    faultfs.release()
    with pytest.raises(tensorferry.StorageError, match="bytes are not valid"):
        ticket.result()
    assert (store.read("a").result() == 1).all()


def test_a_sync_that_failed_is_not_forgotten(faultfs, store, tmp_path):
    """The kernel reports the error once: a second sync of the same file succeeds, but the data are lost."""
    store.write("a", pattern(NBYTES, 1)).result()
    store.write("b", np.arange(9, dtype=">f8").reshape(3, 3)).result()
    faultfs.order(Fault("fsync", error=errno.EIO, times=1))
    with pytest.raises(tensorferry.StorageError, match="Input/output error"):
        store.commit(sync=True)
    (lost,) = faultfs.backing.glob("*.segment")
    gc.collect()  # the traceback refers to stored objects
    store.snapshot(tmp_path / "snap")  # a copy, verified
    store.commit(b"2", sync=True)  # written to another file, verified
    assert store.info("b").dtype == np.dtype(">f8")
    assert store.read("b").result().tolist() == np.arange(9.0).reshape(3, 3).tolist()
    store.close()
    assert lost.name not in (faultfs.path / manifest.NAME).read_text()
    for path in (faultfs.path, tmp_path / "snap"):
        with TensorStore.open(path) as old:
            assert (old.read("a").result() == pattern(NBYTES, 1)).all()


def test_a_snapshot_does_not_copy_what_may_be_lost_and_cannot_be_verified(faultfs, tmp_path):
    with TensorStore(faultfs.path, temporary=False, checksums=False) as store:
        store.write("a", pattern(NBYTES)).result()
        faultfs.order(Fault("fsync", error=errno.EIO, times=1))
        with pytest.raises(tensorferry.StorageError):
            store.commit(sync=True)
        with pytest.raises(tensorferry.StorageError, match="write the data again"):
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
        assert "write the data again" in str(caught.value)
        store.write("a", pattern(NBYTES)).result()
        store.commit(sync=True)


def test_a_sync_that_failed_while_another_was_interrupted_is_not_forgotten(faultfs, store):
    store.write("a", pattern(3 * SEGMENT)).result()
    first, second, _ = sorted(faultfs.backing.glob("*.segment"))
    faultfs.order(
        Fault("fsync", name=first.name, hold=True),
        Fault("fsync", name=second.name, error=errno.EIO, times=1),
    )
    with interrupted(faultfs, lambda: faultfs.hits() == 2):
        store.commit(sync=True)
    faultfs.release()
    with pytest.raises(tensorferry.StorageError, match="write the data again"):
        store.commit(sync=True)


def test_a_sync_that_fails_is_not_forgotten_wherever_it_is_interrupted(faultfs):
    def interrupt():
        raise KeyboardInterrupt

    for number in itertools.count(1):
        faultfs.clear()
        with TensorStore(faultfs.path, segment_nbytes=SEGMENT, temporary=False) as store:
            store.write("a", pattern(2 * SEGMENT)).result()
            segment = sorted(faultfs.backing.glob(f"*{store._run}*.segment"))[1]
            faultfs.order(Fault("fsync", name=segment.name, error=errno.EIO, times=1))
            at = interrupts.At(number, segments.__file__, interrupt)
            with pytest.raises((KeyboardInterrupt, tensorferry.StorageError)), at:
                store.commit(sync=True)
            with contextlib.suppress(
                tensorferry.StorageError
            ):  # if the error has not been raised yet
                store.commit(sync=True)
            store.commit(sync=True)
            assert segment.name not in (faultfs.path / manifest.NAME).read_text()
        if at.happened_in is None:
            break
    assert number > 20


def test_commits_that_cannot_be_written_keep_no_space(faultfs, store):
    store.write("a", pattern(NBYTES)).result()
    faultfs.order(Fault("write", name=f".tensorferry-{store._run}.tmp", error=errno.ENOSPC))
    for seed in range(5):
        store.write("a", pattern(NBYTES, seed)).result()
        with pytest.raises(tensorferry.StorageError):
            store.commit()
    assert store.stats()["directories"][0]["used_nbytes"] == NBYTES


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


def test_names_of_new_directories_are_made_to_last_too(faultfs, tmp_path):
    path = faultfs.path / "new" / "store"
    with TensorStore(path, segment_nbytes=SEGMENT, temporary=False) as store:
        store.write("a", pattern(NBYTES)).result()
        for at, error in enumerate((errno.EIO, errno.ENOSPC)):
            faultfs.order(Fault("fsyncdir", skip=at, times=1, error=error))
            with pytest.raises(tensorferry.StorageError) as caught:
                store.commit(sync=True)
            assert caught.value.filename == str([path.parents[1], path.parent][at])
        faultfs.clear()
        store.commit(sync=True)
