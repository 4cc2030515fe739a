"""Checkpoints mirrored to a bucket: complete at every moment, also after failures; objects of others are unchanged."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import random
import subprocess
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tensorferry.checkpoint import CheckpointError, Checkpoints, MirrorError
from tests.checkpoint import mirrors
from tests.checkpoint.mirrors import (
    LARGE,
    PREFIX,
    data_in,
    folder_of,
    has_ended,
    mirrored,
    process_of,
    state_of,
    whole_steps,
)
from tests.checkpoint.states import steps_in
from tests.support import required
from tests.support.child import ROOT
from tests.support.data import SEED
from tests.support.effort import examples
from tests.support.forks import passes_in_child
from tests.support.leaks import settled
from tests.support.ranks import call_on_ranks

if TYPE_CHECKING:
    import pathlib

    from tests.support.buckets import Bucket
    from tests.support.fault_proxy import FaultProxy

required.module("obstore")

META = "*/.metadata"
# The process lists the folder of a step when all of its data files are in the bucket.
LISTING = "*prefix=*step_00000001*"


@pytest.fixture
def by_proxy(bucket: Bucket, s3_proxy: FaultProxy) -> Bucket:
    """The bucket, by way of the proxy."""
    return bucket.by_way_of(s3_proxy.address)


def save_all(checkpoints: Checkpoints, *steps: int, numbers: int = mirrors.SMALL) -> None:
    """Save, and wait for each in the mirror."""
    for step in steps:
        checkpoints.save(step, state_of(step, numbers))
        checkpoints.wait(mirrored=True)


def has_failed(checkpoints: Checkpoints) -> bool:
    """Return whether the mirror has, without a word about it."""
    mirror = mirrors.mirror_of(checkpoints)
    mirror._receive()
    return mirror._failure != ""


def left_open(checkpoints: Checkpoints) -> None:
    """End a training that will not wait for its mirror."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        leave_by_exception(checkpoints)


def leave_by_exception(checkpoints: Checkpoints) -> None:
    with contextlib.suppress(ZeroDivisionError), checkpoints:
        raise ZeroDivisionError


def test_what_is_in_the_bucket_is_what_is_on_the_drive(
    directory: pathlib.Path, bucket: Bucket
) -> None:
    with mirrored(directory / "run", bucket) as checkpoints:
        assert checkpoints.latest(mirrored=True) is None
        save_all(checkpoints, 5, numbers=LARGE)
        local = {path.name: path.read_bytes() for path in checkpoints.path(5).iterdir()}
        assert f"'{PREFIX}'" in repr(checkpoints)
        assert checkpoints.steps(mirrored=True) == [5]
        checkpoints.save(6, state_of(6, LARGE))
    assert checkpoints.latest(mirrored=True) == 6  # leaving waits
    assert {key.rpartition("/")[2]: bucket.read(key) for key in bucket.keys(folder_of(5))} == local
    assert len(local) == 2
    assert whole_steps(bucket, LARGE) == [5, 6]
    assert bucket.uploads() == 0


def test_an_address_finds_its_settings_in_the_environment(
    directory: pathlib.Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    with Checkpoints(directory / "run", mirror=f"s3://{bucket.name}/{PREFIX}/") as checkpoints:
        save_all(checkpoints, 1)
        assert checkpoints.steps(mirrored=True) == [1]
        assert f"mirror=s3://{bucket.name}" in repr(checkpoints)
    assert whole_steps(bucket) == [1]


def test_metadata_comes_last_and_is_conditional(
    directory: pathlib.Path, by_proxy: Bucket, s3_proxy: FaultProxy
) -> None:
    held = s3_proxy.on(method="PUT", path=META, hold=threading.Event())
    with mirrored(directory / "run", by_proxy) as checkpoints:
        checkpoints.save(1, state_of(1))
        assert held.met.wait(300)
        data = data_in(by_proxy)
        assert [by_proxy.read(key) for key in data] == [
            path.read_bytes() for path in checkpoints.path(1).glob("*.distcp")
        ]
        assert checkpoints.steps(mirrored=True) == []
        s3_proxy.clear()
    (commit,) = s3_proxy.asked("PUT", META)
    assert commit.headers["if-none-match"] == "*"
    assert whole_steps(by_proxy) == [1]


def test_a_step_saved_anew_takes_the_old_ones_place_at_one_stroke(
    directory: pathlib.Path, by_proxy: Bucket, s3_proxy: FaultProxy
) -> None:
    with mirrored(directory / "run", by_proxy) as checkpoints:
        save_all(checkpoints, 1)
        old = by_proxy.keys(folder_of(1))
        held = s3_proxy.on(method="PUT", path=META, hold=threading.Event())
        checkpoints.save(1, {"weights": torch.full((7,), 1.0)}, overwrite=True)
        assert held.met.wait(300)
        assert set(old) < set(by_proxy.keys(folder_of(1)))
        assert len(data_in(by_proxy)) == 2
        s3_proxy.clear()
        checkpoints.wait(mirrored=True)
        assert "if-match" in s3_proxy.asked("PUT", META)[-1].headers
        new = by_proxy.keys(folder_of(1))
        assert len(new) == 2
        assert set(new) & set(old) == {f"{folder_of(1)}/.metadata"}


def test_the_newest_goes_first_and_what_was_left_out_is_said(
    directory: pathlib.Path, by_proxy: Bucket, s3_proxy: FaultProxy
) -> None:
    checkpoints = mirrored(directory / "run", by_proxy, keep_last=1)
    held = s3_proxy.on(method="PUT", path="*.distcp", hold=threading.Event())
    checkpoints.save(1, state_of(1), wait=True)
    assert held.met.wait(300)
    for step in (2, 3, 4):
        checkpoints.save(step, state_of(step), wait=True)
    assert checkpoints.steps() == [1, 4]  # the step that is being uploaded stays
    s3_proxy.clear()
    with pytest.warns(RuntimeWarning, match=r"step [23] is not .*step 4 was saved before") as told:
        checkpoints.close()
    assert len(told) == 2
    assert whole_steps(by_proxy) == [1, 4]


def test_older_ones_are_removed_and_nothing_that_others_put_there(
    directory: pathlib.Path, by_proxy: Bucket, s3_proxy: FaultProxy
) -> None:
    others = [
        f"{folder_of(1)}/.metadata",
        f"{folder_of(1)}/__0_0123456789abcdef_0.distcp",
        f"{folder_of(3)}/notes.txt",
        f"{PREFIX}/other",
        "elsewhere",
    ]
    for key in others:
        by_proxy.write(key, b"another's")
    with mirrored(
        directory / "run", by_proxy, mirror_keep_last=2, keep_every=5, retries=0
    ) as checkpoints:
        save_all(checkpoints, 3, 5, 6, 7, 8)
        assert checkpoints.steps() == [3, 5, 6, 7, 8]
        assert checkpoints.steps(mirrored=True) == [1, 5, 7, 8]
    kept = set(by_proxy.keys())
    assert kept >= {*others}
    assert {key for key in kept if key.startswith(folder_of(3))} == {others[2]}
    deleted = [each for each in s3_proxy.asked("POST") if each.query.startswith("delete")]
    assert deleted


def test_a_checkpoint_of_the_step_that_is_not_the_trainings_is_left_alone(
    directory: pathlib.Path, bucket: Bucket
) -> None:
    bucket.write(f"{folder_of(1)}/.metadata", b"another's")
    checkpoints = mirrored(directory / "run", bucket)
    for overwrite in (False, True):
        checkpoints.save(1, state_of(1), overwrite=overwrite)
        with pytest.raises(MirrorError, match=f"{folder_of(1)}/.metadata.*no mirror made"):
            checkpoints.wait(mirrored=True)
    assert bucket.read(f"{folder_of(1)}/.metadata") == b"another's"
    save_all(checkpoints, 2)
    checkpoints.close()
    again = mirrored(directory / "another", bucket)
    again.save(2, state_of(2))
    with pytest.raises(MirrorError, match=r"another checkpoint of this step .*restore"):
        again.close()
    assert data_in(bucket) == [key for key in bucket.keys(folder_of(2)) if ".distcp" in key]


def test_a_commit_that_meets_anothers_leaves_it(
    directory: pathlib.Path, by_proxy: Bucket, s3_proxy: FaultProxy, bucket: Bucket
) -> None:
    held = s3_proxy.on(method="PUT", path=META, hold=threading.Event())
    checkpoints = mirrored(directory / "run", by_proxy)
    checkpoints.save(1, state_of(1))
    assert held.met.wait(300)
    bucket.write(f"{folder_of(1)}/.metadata", b"another's")
    s3_proxy.clear()
    with pytest.raises(MirrorError, match=f"{bucket.name}/{folder_of(1)}/.metadata.*(412|409)"):
        checkpoints.close()
    assert bucket.keys(PREFIX) == [f"{folder_of(1)}/.metadata"]
    assert bucket.read(f"{folder_of(1)}/.metadata") == b"another's"


def test_a_commit_whose_answer_is_lost_is_one(
    directory: pathlib.Path, by_proxy: Bucket, s3_proxy: FaultProxy
) -> None:
    lost = s3_proxy.on(method="PUT", path=META, lose=True, times=1)
    with mirrored(directory / "run", by_proxy) as checkpoints:
        save_all(checkpoints, 1)
    assert lost.met.is_set()
    assert whole_steps(by_proxy) == [1]


@pytest.mark.parametrize(
    ("path", "query", "numbers"),
    [("*.distcp", "*partNumber=2*", LARGE), ("*.distcp", "*partNumber*", 10), (META, "", 10)],
)
def test_bytes_that_change_on_their_way_are_found(
    directory: pathlib.Path,
    by_proxy: Bucket,
    s3_proxy: FaultProxy,
    path: str,
    query: str,
    numbers: int,
) -> None:
    altered = s3_proxy.on(method="PUT", path=path, query=query, alter=True, times=1)
    checkpoints = mirrored(directory / "run", by_proxy)
    checkpoints.save(1, state_of(1, numbers))
    with pytest.raises(MirrorError, match=f"{folder_of(1)}/.*(not|differs) .*uploaded"):
        checkpoints.wait(mirrored=True)
    assert altered.met.is_set()
    assert settled(lambda: by_proxy.keys(PREFIX) == [])
    save_all(checkpoints, 2)
    checkpoints.close()
    assert whole_steps(by_proxy) == [2]


def test_where_etags_are_other_things_objects_are_read_again(
    directory: pathlib.Path, by_proxy: Bucket, s3_proxy: FaultProxy
) -> None:
    s3_proxy.on(method="HEAD", path="*.distcp", etag='"another kind"')
    checkpoints = mirrored(directory / "run", by_proxy)
    save_all(checkpoints, 1, numbers=LARGE)
    (nbytes,) = [path.stat().st_size for path in checkpoints.path(1).glob("*.distcp")]
    assert sum(each.sent_nbytes for each in s3_proxy.asked("GET", "*.distcp")) == nbytes
    altered = s3_proxy.on(method="PUT", query="*partNumber=3*", alter=True)
    checkpoints.save(2, state_of(2, LARGE))
    with pytest.raises(MirrorError, match=r"bytes [0-9]+ to [0-9]+ are not those"):
        checkpoints.close()
    assert altered.met.is_set()


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_store_that_refuses_for_a_while_is_asked_again_and_one_that_goes_on_is_named(
    directory: pathlib.Path, by_proxy: Bucket, s3_proxy: FaultProxy, status: int
) -> None:
    s3_proxy.on(method="P*", path="*.distcp", status=status, times=2)
    checkpoints = mirrored(directory / "run", by_proxy, retries=3)
    save_all(checkpoints, 1)
    s3_proxy.on(method="P*", path="*.distcp", status=status)
    checkpoints.save(2, state_of(2))
    with pytest.raises(MirrorError, match=f"{by_proxy.name}/{folder_of(2)}/.*distcp.*{status}"):
        checkpoints.wait(mirrored=True)
    checkpoints.save(3, state_of(3), wait=True)
    assert settled(lambda: has_failed(checkpoints))
    s3_proxy.clear()
    with pytest.warns(RuntimeWarning, match=f"step 3 .*{status}"):
        checkpoints.save(4, state_of(4))
    checkpoints.close()
    assert checkpoints.steps() == [1, 2, 3, 4]
    assert whole_steps(by_proxy) == [1, 4]
    assert len(data_in(by_proxy)) == 2


def test_wrong_credentials_and_a_bucket_that_is_not_there_are_said_and_fail_no_save(
    directory: pathlib.Path, bucket: Bucket
) -> None:
    for store, status in (
        (bucket.store(key="another", retries=0), 403),
        (bucket.__class__("nowhere", bucket.endpoint).store(retries=0), 404),
    ):
        checkpoints = Checkpoints(directory / str(status), mirror=(store, PREFIX))
        checkpoints.save(1, state_of(1))
        name = "nowhere" if status == 404 else bucket.name
        with pytest.raises(MirrorError, match=f"{name}.*{status}"):
            checkpoints.wait(mirrored=True)
        with pytest.raises(MirrorError, match=f"{status}"):
            checkpoints.steps(mirrored=True)
        with pytest.raises(MirrorError, match=f"{status}"):
            checkpoints.restore(state_of(1))  # it might be an older one than that in the bucket
        assert checkpoints.restore(state_of(-1), step=1) == 1
        checkpoints.close()  # wait() has raised the failure
        assert checkpoints.steps() == [1]


def test_a_full_local_disk_leaves_the_mirror_as_it_is(
    small_tmpfs: pathlib.Path, bucket: Bucket
) -> None:
    checkpoints = mirrored(small_tmpfs / "run", bucket)
    save_all(checkpoints, 1)
    checkpoints.save(2, state_of(2, LARGE))
    with pytest.raises(OSError, match="No space"):
        checkpoints.close()
    assert whole_steps(bucket) == [1]


def test_leaving_by_an_exception_gives_up_what_is_on_its_way_and_the_next_start_clears_it_up(
    directory: pathlib.Path, by_proxy: Bucket, s3_proxy: FaultProxy
) -> None:
    checkpoints = mirrored(directory / "run", by_proxy)
    # Some parts are there, and one waits for its answer until the training is on its way out.
    held = s3_proxy.on(method="PUT", query="*partNumber=2*", hold_answer=threading.Event())
    checkpoints.save(1, state_of(1, 4 * LARGE))
    assert held.met.wait(300)
    process = process_of(checkpoints)
    releasing = threading.Timer(0.2, s3_proxy.clear)
    releasing.start()
    with pytest.warns(RuntimeWarning, match=r"step 1 .*the training ended before"):
        leave_by_exception(checkpoints)
    releasing.join()
    assert has_ended(process)
    assert by_proxy.uploads() == 0  # given up in order
    assert by_proxy.keys(folder_of(1)) == []
    with mirrored(directory / "run", by_proxy) as again:
        save_all(again, 2)
    assert whole_steps(by_proxy) == [2]


def test_a_training_that_is_dropped_says_what_is_not_in_its_mirror(
    directory: pathlib.Path, by_proxy: Bucket, s3_proxy: FaultProxy
) -> None:
    held = s3_proxy.on(method="PUT", path=META, hold=threading.Event())
    kept = [mirrored(directory / "run", by_proxy)]
    kept[0].save(1, state_of(1), wait=True)
    assert held.met.wait(300)
    process = process_of(kept[0])
    releasing = threading.Timer(0.2, s3_proxy.clear)
    releasing.start()
    with pytest.warns(RuntimeWarning, match=r"step 1 .*the training ended before"):
        kept.clear()
    releasing.join()
    assert has_ended(process)


def test_a_mirror_that_is_killed_is_said_and_the_next_save_starts_another(
    directory: pathlib.Path, by_proxy: Bucket, s3_proxy: FaultProxy
) -> None:
    checkpoints = mirrored(directory / "run", by_proxy)
    held = s3_proxy.on(method="GET", query=LISTING, hold=threading.Event())
    checkpoints.save(1, state_of(1))
    assert held.met.wait(300)
    os.kill(process_of(checkpoints), 9)
    with pytest.raises(MirrorError, match=r"step 1 .*process has ended with -9"):
        checkpoints.wait(mirrored=True)
    s3_proxy.clear()
    assert len(data_in(by_proxy)) == 1
    save_all(checkpoints, 2)
    checkpoints.close()
    assert len(data_in(by_proxy)) == 1
    assert whole_steps(by_proxy) == [2]


def test_what_else_is_printed_in_the_mirrors_process_fails_no_save(
    directory: pathlib.Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "site").mkdir()
    (directory / "site" / "sitecustomize.py").write_text("print('Hello'); print(3, end='')")
    monkeypatch.setenv("PYTHONPATH", str(directory / "site"))
    with mirrored(directory / "run", bucket) as checkpoints:
        save_all(checkpoints, 1, 2)
    assert whole_steps(bucket) == [1, 2]


def test_what_an_upload_has_left_is_removed_when_it_is_old(
    directory: pathlib.Path, by_proxy: Bucket, s3_proxy: FaultProxy
) -> None:
    held = s3_proxy.on(method="GET", query=LISTING, hold=threading.Event())
    dying = mirrored(directory / "one", by_proxy)
    dying.save(1, state_of(1))
    assert held.met.wait(300)
    os.kill(process_of(dying), 9)
    left_open(dying)
    s3_proxy.clear()
    assert settled(lambda: by_proxy.keys(folder_of(1)) == data_in(by_proxy))
    with mirrored(directory / "other", by_proxy, keeps_leftovers=True) as checkpoints:
        save_all(checkpoints, 2)
    assert len(data_in(by_proxy)) == 2
    with mirrored(directory / "other", by_proxy) as checkpoints:
        save_all(checkpoints, 3)
    assert whole_steps(by_proxy) == [2, 3]
    assert len(data_in(by_proxy)) == 2


@pytest.mark.parametrize("change", ["flip", "cut", "grow", "gone"])
def test_what_the_drive_has_damaged_is_not_uploaded_and_older_ones_stay(
    directory: pathlib.Path, by_proxy: Bucket, s3_proxy: FaultProxy, change: str
) -> None:
    with mirrored(directory / "run", by_proxy, mirror_keep_last=1) as checkpoints:
        save_all(checkpoints, 1, numbers=LARGE)
        kept = by_proxy.keys(PREFIX)
        # The process waits before it reads the data.
        held = s3_proxy.on(method="GET", path=f"*{folder_of(2)}/.metadata", hold=threading.Event())
        checkpoints.save(2, state_of(2, LARGE), wait=True)
        assert held.met.wait(300)
        (data,) = checkpoints.path(2).glob("*.distcp")
        content = data.read_bytes()
        at = len(content) - 300_000
        damaged = {
            "flip": content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :],
            "cut": content[:-1],
            "grow": content + b"more",
        }
        data.write_bytes(damaged[change]) if change in damaged else data.unlink()
        s3_proxy.clear()
        with pytest.raises(MirrorError, match=data.name):
            checkpoints.wait(mirrored=True)
    assert by_proxy.keys(PREFIX) == kept
    assert by_proxy.uploads() == 0
    assert whole_steps(by_proxy, LARGE) == [1]


def test_a_removal_that_was_killed_is_completed(
    directory: pathlib.Path, by_proxy: Bucket, s3_proxy: FaultProxy
) -> None:
    checkpoints = mirrored(directory / "run", by_proxy, mirror_keep_last=1)
    save_all(checkpoints, 1)
    # The first one no longer counts, and its data are there.
    held = s3_proxy.on(method="DELETE", skip=1, hold=threading.Event())
    more = s3_proxy.on(method="POST", query="delete*", skip=1, hold=threading.Event())
    checkpoints.save(2, state_of(2))
    assert settled(lambda: held.met.is_set() or more.met.is_set())
    os.kill(process_of(checkpoints), 9)
    s3_proxy.clear()
    assert settled(lambda: whole_steps(by_proxy) == [2])
    left_open(checkpoints)
    with mirrored(directory / "run", by_proxy, mirror_keep_last=1) as again:
        save_all(again, 3)
    assert whole_steps(by_proxy) == [3]
    assert len(data_in(by_proxy)) == 1


def test_the_mirror_ends_with_the_training_though_a_child_of_that_lives(
    directory: pathlib.Path, by_proxy: Bucket, s3_proxy: FaultProxy
) -> None:
    s3_proxy.on(method="PUT", path=META, hold=threading.Event())
    program = (
        "import os, sys, time\nfrom tests.checkpoint import mirrors\n"
        f"bucket = mirrors.Bucket({by_proxy.name!r}, {by_proxy.endpoint!r})\n"
        f"checkpoints = mirrors.mirrored({str(directory / 'run')!r}, bucket)\n"
        "checkpoints.save(1, mirrors.state_of(1), wait=True)\n"
        "child = os.fork()\n"
        "if child == 0:\n    time.sleep(600)\n"
        "mirrors.say('began', mirrors.process_of(checkpoints), child, os.getpid())\ntime.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as training:
        mirror, child, pid = mirrors.heard(training.stdout, "began")
        assert os.getpgid(mirror) == mirror  # Ctrl-C is not for it
        assert settled(lambda: os.getpriority(os.PRIO_PROCESS, mirror) == 19)
        os.kill(pid, 9)
        assert settled(lambda: has_ended(mirror))
        assert not has_ended(child)
        os.kill(child, 9)


def test_a_forked_child_has_a_mirror_of_its_own(directory: pathlib.Path, bucket: Bucket) -> None:
    checkpoints = mirrored(directory / "run", bucket)
    save_all(checkpoints, 1)

    def save() -> None:
        save_all(checkpoints, 2)
        checkpoints.close()

    passes_in_child(save)
    save_all(checkpoints, 3)
    checkpoints.close()
    assert whole_steps(bucket) == [1, 2, 3]


def test_a_training_goes_on_from_the_bucket_when_the_disk_has_gone(
    directory: pathlib.Path, bucket: Bucket
) -> None:
    with mirrored(directory / "run", bucket, mirror_keep_last=2) as checkpoints:
        save_all(checkpoints, 1, 2, 3)
    again = mirrored(directory / "another disk", bucket, mirror_keep_last=2)
    state = state_of(-1)
    assert again.restore(state) == 3
    assert steps_in(state) == {3.0}
    assert again.steps() == []
    assert again.restore(state, step=2) == 2
    assert steps_in(state) == {2.0}
    with pytest.raises(FileNotFoundError, match="step_00000001"):
        again.restore(state, step=1)
    save_all(again, 3)  # replaces the earlier step 3, which the restore has abandoned
    again.close()
    assert whole_steps(bucket) == [2, 3]
    assert len(data_in(bucket)) == 2


def test_restore_takes_the_newest_sound_one_of_the_drive_and_the_bucket(
    directory: pathlib.Path, by_proxy: Bucket, s3_proxy: FaultProxy
) -> None:
    with mirrored(directory / "run", by_proxy) as checkpoints:
        save_all(checkpoints, 1, 2, 3)
        (data,) = checkpoints.path(3).glob("*.distcp")
        s3_proxy.requests.clear()
        assert checkpoints.restore(state_of(-1)) == 3
        assert not s3_proxy.asked("GET", "*.distcp")  # the drive has it
        content = data.read_bytes()
        data.write_bytes(content[:-8])
        state = state_of(-1)
        with pytest.warns(RuntimeWarning, match="step 3 is damaged"):
            assert checkpoints.restore(state) == 3
        assert steps_in(state) == {3.0}
        assert s3_proxy.asked("GET", f"*{data.name}")
        with pytest.warns(RuntimeWarning, match="step 3 is damaged"):
            assert checkpoints.restore(state, step=3) == 3
        by_proxy.write(f"{folder_of(3)}/{data.name}", content[:100] + b"!" + content[101:])
        with pytest.warns(RuntimeWarning, match="step 3 (in .*)?is damaged") as told:
            assert checkpoints.restore(state) == 2
        assert len([each for each in told if "damaged" in str(each.message)]) == 2
        assert steps_in(state) == {2.0}
        with (
            pytest.warns(RuntimeWarning, match="step 3 (in .*)?is damaged"),
            pytest.raises(CheckpointError, match="in S3Store"),
        ):
            checkpoints.restore(state, step=3)


def test_damaged_ones_are_not_counted_among_those_that_stay(
    directory: pathlib.Path, bucket: Bucket
) -> None:
    with mirrored(directory / "run", bucket, mirror_keep_last=2) as checkpoints:
        save_all(checkpoints, 1, 2)
    bucket.write(data_in(bucket)[-1], b"not what was written")
    with mirrored(directory / "another disk", bucket, mirror_keep_last=2) as again:
        with pytest.warns(RuntimeWarning, match="step 2 in .* is damaged"):
            assert again.restore(state_of(-1)) == 1
        save_all(again, 3)
        assert again.steps(mirrored=True) == [1, 2, 3]


def test_whatever_is_killed_and_whenever_the_bucket_has_the_newest_that_was_committed(
    directory: pathlib.Path, bucket: Bucket
) -> None:
    newest = 0
    for number in range(examples(4)):
        choices = random.Random(f"{SEED} mirror {number}")
        newest = mirrors.killed(bucket, directory, choices, newest)
    with mirrored(directory / "run", bucket, mirror_keep_last=1) as checkpoints:
        assert (checkpoints.restore(state_of(-1, mirrors.TWO_PARTS)) or 0) == newest
        save_all(checkpoints, newest + 1, numbers=mirrors.TWO_PARTS)
    assert whole_steps(bucket, mirrors.TWO_PARTS) == [newest + 1]
    assert len(data_in(bucket)) == 1


@pytest.mark.parametrize("keep_last", [None, 2])
def test_going_back_sets_newer_ones_aside_and_no_moment_has_none(
    directory: pathlib.Path, bucket: Bucket, keep_last: int | None
) -> None:
    checkpoints = mirrored(directory / "run", bucket, mirror_keep_last=keep_last)
    save_all(checkpoints, 1, 2, 3)
    data = data_in(bucket)
    assert checkpoints.restore(state_of(-1), step=1) == 1
    checkpoints.save(2, state_of(2))
    checkpoints.wait(mirrored=True)
    assert checkpoints.steps(mirrored=True) == ([1, 2] if keep_last is None else [2])
    save_all(checkpoints, 3, 4)
    checkpoints.close()
    steps = checkpoints.steps(mirrored=True)
    assert steps == ([1, 2, 3, 4] if keep_last is None else [3, 4])
    assert whole_steps(bucket) == steps
    kept = set(data) & set(data_in(bucket))
    assert len(kept) == (2 if keep_last is None else 0)
    aside = [key for key in bucket.keys(PREFIX) if ".tensorferry-abandoned." in key]
    assert len(aside) == (1 if keep_last is None else 0)


def test_the_first_rank_uploads_the_files_of_all_ranks(
    directory: pathlib.Path, bucket: Bucket
) -> None:
    found = call_on_ranks(2, save_on_rank, str(directory / "run"), bucket.name, bucket.endpoint)
    assert found == [[1, 2, 3]] * 2
    assert {key.rpartition("/")[2][:4] for key in data_in(bucket)} == {"__0_", "__1_"}
    assert len(data_in(bucket)) == 6


def test_ranks_restore_what_they_need_from_the_bucket(
    directory: pathlib.Path, bucket: Bucket
) -> None:
    arguments = (bucket.name, bucket.endpoint)
    call_on_ranks(2, save_on_rank, str(directory / "run"), *arguments)
    found = call_on_ranks(2, restore_on_rank, str(directory / "another disk"), *arguments)
    assert found == [[3, 3.0]] * 2


def restore_on_rank(rank: int, root: str, name: str, endpoint: str) -> list[Any]:
    state = {f"weights {rank}": torch.zeros(LARGE)}
    step = mirrored(root, mirrors.Bucket(name, endpoint)).restore(state)
    return [step, *steps_in(state)]


def save_on_rank(rank: int, root: str, name: str, endpoint: str) -> list[int]:
    bucket = mirrors.Bucket(name, endpoint)
    with mirrored(root, bucket) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {f"weights {rank}": torch.full((LARGE,), float(step))})
            checkpoints.wait(mirrored=True)
    return checkpoints.steps(mirrored=True)


def test_a_failure_is_raised_on_all_ranks_and_leaves_nothing(
    directory: pathlib.Path, by_proxy: Bucket, s3_proxy: FaultProxy
) -> None:
    s3_proxy.on(method="P*", path="*/__1_*", status=403, times=1)
    arguments = (str(directory / "run"), by_proxy.name, by_proxy.endpoint)
    found = call_on_ranks(2, fail_on_rank, *arguments)
    assert all("403" in each for each in found)
    assert len(data_in(by_proxy)) == 2


def fail_on_rank(rank: int, root: str, name: str, endpoint: str) -> str:
    bucket = mirrors.Bucket(name, endpoint)
    checkpoints = mirrored(root, bucket)
    checkpoints.save(1, {f"weights {rank}": torch.full((10,), 1.0)})
    with pytest.raises(MirrorError) as failure:
        checkpoints.wait(mirrored=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoints.save(2, {f"weights {rank}": torch.full((10,), 2.0)})
        checkpoints.close()
    return str(failure.value)


def test_a_throttle_lets_so_many_bytes_pass() -> None:
    from tensorferry.checkpoint.mirror.uploading import Throttle  # it imports obstore

    now = 0.0

    def pause(seconds: float) -> None:
        nonlocal now
        now += seconds

    throttle = Throttle(1000, pause, lambda: now)
    for _ in range(5):
        throttle.wait(3000)
    assert now == pytest.approx(12)  # the last one passes when those before it have
    now += 100
    throttle.wait(1000)
    throttle.wait(1000)
    assert now == pytest.approx(113)  # unused time gives no credit


def test_a_mirror_uploads_at_its_rate(
    directory: pathlib.Path, by_proxy: Bucket, s3_proxy: FaultProxy
) -> None:
    checkpoints = mirrored(directory / "run", by_proxy, mirror_bytes_per_second=1)
    checkpoints.save(1, state_of(1, LARGE))

    def parts() -> list[str]:
        return [each.state for each in s3_proxy.asked("PUT") if "partNumber" in each.query]

    assert settled(lambda: parts() == ["answered"])
    assert not mirrors.mirror_of(checkpoints).wait(
        1
    )  # the second one would be there, and all of it
    left_open(checkpoints)
    assert parts() == ["answered"]


def test_what_is_no_mirror_is_refused(directory: pathlib.Path, bucket: Bucket) -> None:
    store = required.module("obstore.store")
    with pytest.raises(TypeError, match=r"mirror: .*cannot be pickled"):
        Checkpoints(directory, mirror=(store.MemoryStore(), "run"))
    with pytest.raises(TypeError, match=r"mirror: .*got 5"):
        Checkpoints(directory, mirror=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mirror: 'no address'"):
        Checkpoints(directory, mirror="no address")
    with pytest.raises(ValueError, match="mirror_keep_last: only valid with a mirror"):
        Checkpoints(directory, mirror_keep_last=2)
    with pytest.raises(ValueError, match="mirror_bytes_per_second: 0"):
        mirrored(directory, bucket, mirror_bytes_per_second=0)
    checkpoints = Checkpoints(directory)
    for call in (checkpoints.wait, checkpoints.steps, checkpoints.latest):
        with pytest.raises(ValueError, match="mirrored: the checkpoints have no mirror"):
            call(mirrored=True)


def test_without_obstore_the_extra_is_named_and_nothing_else_imports_it(
    directory: pathlib.Path,
) -> None:
    program = (
        "import sys, tensorferry, tensorferry.checkpoint.manager\n"
        "assert 'obstore' not in sys.modules\n"
        "sys.modules['obstore'] = None\n"
        "from tensorferry.checkpoint import Checkpoints\n"
        "Checkpoints('run')\n"
        "try:\n    Checkpoints('run', mirror='s3://bucket/run')\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=directory, capture_output=True, text=True, timeout=300
    )
    assert "tensorferry[remote]" in done.stdout, done.stderr


def test_the_mirrors_process_ends_with_its_input_in_the_middle_of_a_line(
    directory: pathlib.Path,
) -> None:
    local = required.module("obstore.store").LocalStore(directory)
    store = base64.b64encode(pickle.dumps(local)).decode()
    settings = {"store": store, "prefix": "", "rate": None, "keep_last": None, "keep_every": None}
    # The process that it watches for the end does not end.
    settings |= {"leftover_age": 1.0, "process": os.getpid()}
    program = "from tensorferry.checkpoint.mirror.process import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=f'{json.dumps(settings)}\n{{"step": ',
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_the_mirrors_process_imports_no_torch(directory: pathlib.Path) -> None:
    program = "import sys, tensorferry.checkpoint.mirror.process; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == "False\n"
