"""The whole report on machines and in containers of several kinds, and its advice."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import tensorferry
from tensorferry.tuning.advice import LEVELS, advise
from tensorferry.tuning.report import report
from tests.support import child, libraries, mounts

LOOK = "tests.tuning.report_programs:look"
LOOK_AS_NOBODY = "tests.tuning.report_programs:look_as_nobody"


@pytest.fixture(autouse=True)
def no_libraries(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the report query libraries that answer at once."""
    for name, value in libraries.broken(tmp_path_factory.mktemp("libraries")).items():
        monkeypatch.setenv(name, value)


def about(facts: dict[str, Any], what: str) -> list[dict[str, Any]]:
    """The advice on one part of the report."""
    return [advice for advice in facts["advice"] if advice["about"] == what]


def test_every_part_is_there_and_advice_comes_in_order_of_importance(
    tmpfs_directory: Path,
) -> None:
    facts = report(tmpfs_directory)
    parts = {"versions", "engines", "system", "limits", "file_system", "devices", "gpu"}
    assert parts | {"path", "libraries", "advice"} == set(facts)
    assert facts["path"] == str(tmpfs_directory)
    assert facts["engines"]["available"] == tensorferry.engines()
    assert facts["libraries"]["torch"]["unknown"].endswith("left out")
    assert about(facts, "file_system")
    levels = [LEVELS.index(advice["level"]) for advice in facts["advice"]]
    assert levels == sorted(levels)
    for advice in facts["advice"]:
        assert advice["finding"].endswith(".")
        assert advice["meaning"].endswith(".")
        assert advice["remedy"]
    assert list(tmpfs_directory.iterdir()) == []


def test_an_engine_forced_by_the_environment_is_told(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORFERRY_ENGINE", "threads")
    facts = child.call(LOOK, path=directory).result
    assert facts["engines"]["chosen"] == "threads"
    assert facts["engines"]["forced"] == "threads"
    monkeypatch.setenv("TENSORFERRY_ENGINE", "steam")
    facts = child.call(LOOK, path=directory).result
    assert "steam" in facts["engines"]["chosen"]["unknown"]
    assert facts["versions"]["kernel"] == os.uname().release


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_an_ordinary_user_is_told_first_of_what_cannot_be_written(open_directory: Path) -> None:
    facts = child.call(LOOK_AS_NOBODY, path=open_directory).result
    assert facts["file_system"]["space"]["writable"] is True
    open_directory.chmod(0o755)
    facts = child.call(LOOK_AS_NOBODY, path=open_directory).result
    assert "Permission denied" in facts["file_system"]["direct_io"]["unknown"]
    assert facts["advice"][0]["level"] == "stops"
    assert "not writable" in facts["advice"][0]["finding"]


@pytest.mark.root
def test_a_read_only_file_system_comes_first(directory: Path) -> None:
    (directory / "source").mkdir()
    with mounts.read_only(directory / "source", directory / "mount") as path:
        facts = report(path)
    assert facts["file_system"]["space"]["read_only"] is True
    first = facts["advice"][0]
    assert (first["level"], first["remedy"]) == ("stops", f"mount -o remount,rw {path}")


# Reports of other machines: facts in, advice out.

DRIVE: dict[str, Any] = {
    "name": "nvme0n1",
    "number": "259:0",
    "kind": "NVMe drive",
    "model": "FASTDRIVE",
    "scheduler": "none",
    "max_sectors_kb": 1024,
    "max_hw_sectors_kb": 1024,
    "numa_node": None,
    "pcie": [],
}


UNKNOWN = {"unknown": "for a test"}
EVERYTHING = ("engines", "system", "limits", "file_system", "devices", "gpu")
SYSTEM = {"type": "ext4", "options": "rw", "in_memory": False, "direct_io": UNKNOWN}
FULL = {"nbytes": 1 << 40, "free_nbytes": 4 << 20, "read_only": False, "writable": True}
JOURNAL = {"options": "rw,data=journal", "direct_io": {"works": False, "reason": "it says so"}}
LINK = {"address": "0000:01:00.0", "link": "8.0 GT/s PCIe x2", "gb_per_second": 1.97}
LINK |= {"link_max": "16.0 GT/s PCIe x4", "gb_per_second_max": 7.88}
THROTTLES = [{"device": "259:0", "rbps": 50_000_000, "wiops": 1000}, {"device": "8:0", "rbps": 1}]
FEW_CONTEXTS = {"aio_max_nr": 65536, "aio_nr": 65000}
NO_GPUS = {"torch": {"version": "2.13.0+cpu", "gpus": {"unknown": "built for processors only"}}}
BROKEN = {"usable": False, "reason": "cuInit: CUDA_ERROR_NO_DEVICE (no device)"}
NO_CUFILE = {"usable": False, "reason": "libcufile.so.0: not found; remedy: something general"}


def drive(**changes: Any) -> dict[str, Any]:
    """Return the facts of a machine with a drive that has only this problem."""
    return {"devices": [DRIVE | changes]}


def engine(name: str) -> dict[str, Any]:
    """A machine with this engine and few contexts left for Linux AIO."""
    engines = {"chosen": name, "forced": None, "available": {}}
    return {"engines": engines, "system": FEW_CONTEXTS}


def far(**on_their_way: int | None) -> dict[str, Any]:
    """A machine with a network mount."""
    return {"file_system": SYSTEM | {"type": "fuse.s3", "device": "0:45", "far": on_their_way}}


def gpu(
    *, driver: Any = None, cufile: Any = None, version: str | None = None, vendor: str = "NVIDIA"
) -> dict[str, Any]:
    """Return the facts of a machine with a GPU that has only this problem."""
    usable = {"usable": True, "reason": None, "mode": "native"}
    cards = {"vendors": [vendor], "nvidia_driver": version}
    return {"gpu": cards | {"cuda": driver or usable, "cufile": cufile or usable}}


# The known facts of a machine, and words of the one piece of advice that follows from them, or "".
ADVICE: dict[str, tuple[dict[str, Any], str]] = {
    "nothing is known": (dict.fromkeys(EVERYTHING, UNKNOWN), ""),
    "little is known": ({"file_system": SYSTEM | {"space": UNKNOWN}}, ""),
    "torch is unknown": ({"libraries": {"torch": UNKNOWN}}, ""),
    "nearly full": ({"file_system": SYSTEM | {"space": FULL}}, "^stops 4 MiB are free"),
    "in memory": ({"file_system": SYSTEM | {"in_memory": True}}, "^speed /data is in memory"),
    "a good drive": (drive(), ""),
    "a loop device": (
        drive(kind="loop device", direct_io=False),
        "losetup --direct-io=on /dev/nvme0n1",
    ),
    "a loop device past the page cache": (drive(kind="loop device", direct_io=True), ""),
    "blocks are split": (
        drive(max_sectors_kb=256, max_hw_sectors_kb=2048),
        "echo 2048 > /sys/block/nvme0n1/queue/max_sectors_kb",
    ),
    "a scheduler": (
        drive(scheduler="mq-deadline"),
        "echo none > /sys/block/nvme0n1/queue/scheduler",
    ),
    "a slow link": (
        drive(pcie=[LINK]),
        "1.97 of 7.88 GB/s.*lspci -vv -s 0000:01:00.0",
    ),
    "another socket": (
        drive(numa_node=1) | {"system": {"numa_nodes": 2}},
        "numactl --cpunodebind=1 --membind=1 python",
    ),
    "one socket": (drive(numa_node=0) | {"system": {"numa_nodes": 1}}, ""),
    "a throttle": (
        drive() | {"limits": THROTTLES},
        "50 MB/s of reads and 1,000 writes a second",
    ),
    "encryption": (drive(kind="dm-crypt", model="data"), "cryptsetup refresh .* data"),
    "a server behind FUSE": (
        far(read_ahead_kb=4096, fuse_max_background=12),
        "^speed FUSE has at most 12 requests.*1.3 GB/s.*connections/45/max_background",
    ),
    "a server for which the kernel reads little ahead": (
        far(read_ahead_kb=128, fuse_max_background=64),
        "^speed The kernel reads 128 KiB ahead.*echo 4096 > /sys/class/bdi/0:45/read_ahead_kb",
    ),
    "a server of which nothing is told": (far(read_ahead_kb=None, fuse_max_background=None), ""),
    "a journal of data": ({"file_system": SYSTEM | JOURNAL}, "mount it without data=journal"),
    "small pages": ({"system": {"transparent_huge_pages": "never"}}, "echo madvise"),
    "few contexts": (engine("libaio"), "sysctl -w fs.aio-max-nr=1048576"),
    "few contexts that none wants": (engine("io_uring"), ""),
    "a good GPU": (gpu(), ""),
    "torch without GPUs": (gpu() | {"libraries": NO_GPUS}, "CUDA"),
    "no nvidia-fs": (gpu(cufile={"usable": True, "mode": "compat"}), "modprobe nvidia-fs"),
    "no driver": (gpu(driver=BROKEN, cufile=BROKEN), "^stops .*CUDA_ERROR_NO_DEVICE.*--gpus all"),
    "no driver and no need": (gpu(driver=BROKEN, cufile=BROKEN, vendor="AMD"), ""),
    "no cuFile": (gpu(cufile=NO_CUFILE, version="580.65"), "not found. .*nvidia-cufile$"),
    "an old driver": (
        gpu(cufile=NO_CUFILE, version="535.104.05"),
        "pip install nvidia-cufile-cu12",
    ),
    "some driver": (
        gpu(cufile=NO_CUFILE),
        "drivers from 580 on.* or pip install nvidia-cufile-cu12",
    ),
    "DeepSpeed's own engine": (
        {"libraries": {"deepspeed": {"version": "0.19.8", "served_by": "deepspeed"}}},
        "^hint DeepSpeed uses its own async_io.*TENSORFERRY_DEEPSPEED=1",
    ),
}


@pytest.mark.parametrize(("facts", "words"), ADVICE.values(), ids=ADVICE)
def test_what_other_machines_would_be_told(facts: dict[str, Any], words: str) -> None:
    found = advise({"path": "/data"} | facts)
    told = [f"{each.level} {each.finding} {each.meaning} {each.remedy}" for each in found]
    assert len(told) == bool(words), told
    assert all(re.search(words, text) for text in told), told


def test_what_the_kernel_says_of_itself_is_no_place_to_tune_or_measure() -> None:
    for path in ("/proc", "/sys"):
        facts = report(Path(path))
        (advice,) = about(facts, "file_system")
        assert advice["level"] == "stops"
        assert "tensorferry tune" not in advice["remedy"]
