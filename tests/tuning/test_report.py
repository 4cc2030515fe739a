"""The report as a whole, in machines and containers of several kinds, and the advice that follows from it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import tensorferry
from tensorferry.tuning.advice import LEVELS, advise, known
from tensorferry.tuning.machine.libraries import asking
from tensorferry.tuning.report import report
from tests.support import child, libraries, mounts, required

LOOK = "tests.tuning.report_programs:look"
LOOK_AS_NOBODY = "tests.tuning.report_programs:look_as_nobody"


@pytest.fixture
def no_libraries(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the report ask libraries that answer at once."""
    for name, value in libraries.broken(tmp_path_factory.mktemp("libraries")).items():
        monkeypatch.setenv(name, value)


def about(facts: dict[str, Any], what: str) -> list[dict[str, Any]]:
    """The advice on one part of the report."""
    return [advice for advice in facts["advice"] if advice["about"] == what]


@pytest.mark.usefixtures("no_libraries")
def test_every_part_is_there_and_advice_comes_in_order_of_importance(
    tmpfs_directory: Path,
) -> None:
    facts = report(tmpfs_directory)
    parts = {"engines", "kernel", "processors", "memory", "limits", "control_groups", "file_system"}
    parts |= {"devices", "profile", "gpu", "gpudirect_storage", "libraries", "advice"}
    assert parts <= set(facts)
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


def test_a_path_that_is_missing_is_an_error_before_anything_is_looked_at(
    tmp_path: Path,
) -> None:
    with pytest.raises(FileNotFoundError):
        report(tmp_path / "missing")


@pytest.mark.usefixtures("no_libraries")
def test_an_engine_forced_by_the_environment_is_told(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORFERRY_ENGINE", "threads")
    facts = child.call(LOOK, path=directory).result
    assert facts["engines"]["chosen"] == "threads"
    assert "TENSORFERRY_ENGINE=threads" in about(facts, "engines")[-1]["finding"]
    monkeypatch.setenv("TENSORFERRY_ENGINE", "steam")
    facts = child.call(LOOK, path=directory).result
    assert "steam" in facts["engines"]["chosen"]["unknown"]
    assert facts["kernel"]["release"] == os.uname().release


@pytest.mark.root
@pytest.mark.alone  # limits count for all of a user's processes
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.usefixtures("no_libraries")
def test_an_ordinary_users_small_limits_are_advised_on(open_directory: Path) -> None:
    facts = child.call(
        LOOK_AS_NOBODY, path=open_directory, locked_nbytes=64 << 10, descriptors=1000
    ).result
    assert facts["limits"]["locked_memory"] == {"soft": 65536, "hard": 65536, "exempt": False}
    (locked,) = about(facts, "limits")
    assert "64 KiB" in locked["finding"]
    assert "memlock" in locked["remedy"]
    assert facts["file_system"]["space"]["writable"] is True


@pytest.mark.root
@pytest.mark.alone  # limits count for all of a user's processes
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.usefixtures("no_libraries")
def test_a_folder_that_this_user_cannot_write_comes_first(open_directory: Path) -> None:
    open_directory.chmod(0o755)
    arguments = {"locked_nbytes": 8 << 20, "descriptors": 1000}
    facts = child.call(LOOK_AS_NOBODY, path=open_directory, **arguments).result
    assert "Permission denied" in facts["file_system"]["direct_io"]["unknown"]
    assert facts["advice"][0]["level"] == "stops"
    assert "not writable" in facts["advice"][0]["finding"]


@pytest.mark.root
@pytest.mark.usefixtures("no_libraries")
def test_a_read_only_file_system_comes_first(directory: Path) -> None:
    (directory / "source").mkdir()
    with mounts.read_only(directory / "source", directory / "mount") as path:
        facts = report(path)
    assert facts["file_system"]["space"]["read_only"] is True
    first = facts["advice"][0]
    assert (first["level"], first["remedy"]) == ("stops", f"mount -o remount,rw {path}")


@pytest.mark.root
@pytest.mark.usefixtures("no_libraries")
def test_a_nearly_full_file_system_in_memory_is_advised_on(directory: Path) -> None:
    with mounts.tmpfs(directory / "mount", 4 << 20) as path:
        facts = report(path)
    full, in_memory = about(facts, "file_system")
    assert (full["level"], in_memory["level"]) == ("stops", "speed")
    assert "4 MiB are free" in full["finding"]
    assert "lies in memory (tmpfs)" in in_memory["finding"]


@pytest.mark.root
@pytest.mark.usefixtures("no_libraries")
def test_a_loop_device_through_the_page_cache_is_advised_on_until_it_is_switched(
    directory: Path,
) -> None:
    with mounts.loop_device(directory) as device:
        loops = [
            advice for advice in about(report(device), "devices") if "loop" in advice["finding"]
        ]
        assert loops[0]["remedy"] == f"losetup --direct-io=on {device}"
        switched = subprocess.run(loops[0]["remedy"].split(), capture_output=True)
        if switched.returncode != 0:
            required.missing("mounts", "this loop device cannot do direct I/O")
        assert not [
            advice for advice in about(report(device), "devices") if "loop" in advice["finding"]
        ]


@pytest.mark.usefixtures("no_libraries")
def test_profiles_that_cannot_be_used_are_unknown_with_the_reason(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profiles.json"
    monkeypatch.setenv("TENSORFERRY_PROFILES", str(path))
    facts = child.call(LOOK, path=directory).result
    assert facts["profile"] == {"file": str(path), "settings": None}
    assert about(facts, "profile")[0]["remedy"] == f"tensorferry tune {directory}"
    path.write_text("no JSON")
    facts = child.call(LOOK, path=directory).result
    assert str(path) in facts["profile"]["unknown"]
    assert about(facts, "profile") == []


def test_torch_says_what_it_is_and_why_it_has_no_gpu() -> None:
    torch = pytest.importorskip("torch")
    with asking("torch") as answer:
        facts = answer(300.0)
    assert facts["version"] == torch.__version__
    if not torch.cuda.is_available():
        assert facts["gpus"]["unknown"]
    else:
        assert len(facts["gpus"]) == torch.cuda.device_count()


@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize("served", [False, True])
def test_it_says_whether_tensorferry_serves_deepspeed(
    served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORFERRY_DEEPSPEED", str(int(served)))
    with asking("deepspeed") as answer:
        facts = answer(300.0)
    operation = facts["ops"]["async_io"]
    assert operation["served_by"] == ("tensorferry" if served else "deepspeed")
    assert operation["reason"] is None or not operation["built"]
    advice = advise({"path": "/", "libraries": {"deepspeed": facts}})
    assert bool(advice) is not served


# What other machines would show: facts in, advice out.

DRIVE: dict[str, Any] = {
    "name": "nvme0n1",
    "number": "259:0",
    "kind": "NVMe drive",
    "model": "FASTDRIVE",
    "rotational": False,
    "numa_node": None,
    "queue": {"scheduler": "none", "max_sectors_kb": 1024, "max_hw_sectors_kb": 1024},
    "controllers": [],
    "below": [],
}


def advice_on(**facts: Any) -> list[str]:
    """The remedies that follow from these facts alone."""
    return [advice.remedy for advice in advise({"path": "/data"} | facts)]


def test_nothing_is_advised_where_nothing_is_known_or_all_is_well() -> None:
    assert advice_on() == []
    assert advice_on(devices=[DRIVE]) == []
    unknown = {"unknown": "for a test"}
    parts = (
        "engines",
        "kernel",
        "processors",
        "memory",
        "control_groups",
        "file_system",
        "devices",
    )
    parts += ("profile", "gpu", "gpudirect_storage")
    assert advice_on(**dict.fromkeys(parts, unknown)) == []
    nested = {"direct_io": unknown, "space": unknown, "in_memory": False, "type": "ext4"}
    assert advice_on(file_system=nested | {"options": "rw"}, libraries={"torch": unknown}) == []


def test_a_queue_that_splits_blocks_is_to_take_larger_ones() -> None:
    queue = DRIVE["queue"] | {"max_sectors_kb": 256, "max_hw_sectors_kb": 2048}
    assert advice_on(devices=[DRIVE | {"queue": queue}]) == [
        "echo 2048 > /sys/block/nvme0n1/queue/max_sectors_kb"
    ]


def test_a_scheduler_in_front_of_an_nvme_drive_is_to_go() -> None:
    queue = DRIVE["queue"] | {"scheduler": "mq-deadline"}
    assert advice_on(devices=[DRIVE | {"queue": queue}]) == [
        "echo none > /sys/block/nvme0n1/queue/scheduler"
    ]


@pytest.mark.usefixtures("no_libraries")
def test_what_the_kernel_says_of_itself_is_no_place_to_tune_or_measure() -> None:
    for path in ("/proc", "/sys"):
        (advice,) = [
            each
            for each in report(Path(path))["advice"]
            if each["about"] in ("file_system", "profile")
        ]
        assert advice["level"] == "stops"
        assert "belongs to the kernel" in advice["finding"]
        assert "tensorferry tune" not in advice["remedy"]


def test_a_link_slower_than_the_drive_is_told() -> None:
    link = {"address": "0000:01:00.0", "speed": "8.0 GT/s PCIe", "width": 2, "gb_per_second": 1.97}
    link |= {"speed_max": "16.0 GT/s PCIe", "width_max": 4, "gb_per_second_max": 7.88}
    (advice,) = advise({"path": "/", "devices": [DRIVE | {"controllers": [{"pcie": link}]}]})
    assert "1.97 of 7.88 GB/s" in advice.meaning
    assert "lspci -vv -s 0000:01:00.0" in advice.remedy


def test_a_drive_at_another_socket_is_told() -> None:
    drive = DRIVE | {"numa_node": 1}
    nodes = {"0": "0-15", "1": "16-31"}
    assert advice_on(devices=[drive], processors={"numa_nodes": nodes}) == [
        "numactl --cpunodebind=1 --membind=1 python ..."
    ]
    assert advice_on(devices=[drive], processors={"numa_nodes": {"0": "0-15"}}) == []


def test_a_throttle_is_told_for_the_drive_behind_the_path_only() -> None:
    limits = [{"device": "259:0", "rbps": 50_000_000, "wiops": 1000}, {"device": "8:0", "rbps": 1}]
    (advice,) = advise({"path": "/", "devices": [DRIVE], "control_groups": {"io": limits}})
    assert "50 MB/s of reads and 1,000 writes a second" in advice.finding


def test_encryption_a_journal_of_data_and_small_pages_are_told() -> None:
    crypt = DRIVE | {"kind": "dm-crypt", "model": "data"}
    assert "cryptsetup refresh" in advice_on(devices=[crypt])[0]
    direct = {"works": False, "reason": "it says so"}
    system = {"type": "ext4", "options": "rw,data=journal", "in_memory": False, "direct_io": direct}
    assert advice_on(file_system=system) == ["mount it without data=journal"]
    assert "madvise" in advice_on(memory={"huge_pages": {"transparent": "never"}})[0]


def test_linux_aio_that_runs_out_of_contexts_is_told_where_it_is_used() -> None:
    kernel = {"aio_max_nr": 65536, "aio_nr": 65000}
    libaio = {"chosen": "libaio", "forced": None, "available": {}}
    assert advice_on(kernel=kernel, engines=libaio) == ["sysctl -w fs.aio-max-nr=1048576"]
    assert advice_on(kernel=kernel, engines=libaio | {"chosen": "io_uring"}) == []


def test_graphics_without_a_driver_module_or_the_right_torch_are_told() -> None:
    card = {"name": "H200", "memory_nbytes": 1, "driver": "580", "address": "0"}
    missing = {"unknown": "the kernel module nvidia-fs is not loaded"}
    torch = {"version": "2.13.0+cpu", "gpus": {"unknown": "built for processors only"}}
    cufile = {"usable": True, "reason": None, "mode": "compat", "detail": "libcufile.so.0"}
    driver = {"usable": True, "reason": None}
    facts = {
        "gpu": {"nvidia": [card], "cuda": driver},
        "gpudirect_storage": {"nvidia_fs": missing, "cufile": cufile},
    }
    remedies = advice_on(**facts, libraries={"torch": torch})
    assert "CUDA" in remedies[0]
    assert "modprobe nvidia-fs" in remedies[1]
    torch["gpus"] = [card]
    assert len(advice_on(**facts, libraries={"torch": torch})) == 1
    cufile["mode"] = "native"
    assert advice_on(**facts, libraries={"torch": torch}) == []


def test_a_gpu_whose_driver_cannot_be_used_stops_cuda_tensors() -> None:
    driver = {"usable": False, "reason": "cuInit: CUDA_ERROR_NO_DEVICE (no device)"}
    cufile = {"usable": False, "reason": "the same", "mode": None, "detail": None}
    facts = {
        "path": "/data",
        "gpu": {"on_pci": [{"address": "0", "vendor": "NVIDIA"}], "cuda": driver},
        "gpudirect_storage": {"cufile": cufile},
    }
    (advice,) = advise(facts)
    assert advice.level == "stops"
    assert "CUDA_ERROR_NO_DEVICE" in advice.finding
    assert "--gpus all" in advice.remedy
    facts["gpu"]["on_pci"] = [{"address": "0", "vendor": "AMD"}]
    assert advise(facts) == []


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        ("580.65", "pip install nvidia-cufile"),
        ("535.104.05", "pip install nvidia-cufile-cu12"),
        ("", "pip install nvidia-cufile (for drivers from 580 on, CUDA 13), or"),
    ],
)
def test_cufile_is_to_be_had_from_the_wheel_that_suits_the_driver(
    version: str, remedy: str
) -> None:
    reason = "cuFile cannot be opened: libcufile.so.0: not found; remedy: something general"
    facts = {
        "path": "/data",
        "gpu": {
            "nvidia": [{"name": "H200", "driver": version}],
            "cuda": {"usable": True, "reason": None},
        },
        "gpudirect_storage": {"cufile": {"usable": False, "reason": reason}},
    }
    (advice,) = advise(facts)
    assert advice.remedy.startswith(remedy)
    assert advice.remedy.endswith("cu12") or version.startswith("580")
    assert advice.finding.endswith("not found.")


def test_what_deepspeed_lacks_for_its_own_engine_stops_it() -> None:
    operation = {"served_by": "deepspeed", "built": False, "reason": "ninja is not installed"}
    libraries = {"deepspeed": {"version": "0.19.8", "ops": {"async_io": operation}}}
    (advice,) = advise({"path": "/", "libraries": libraries})
    assert advice.level == "stops"
    assert "ninja is not installed" in advice.finding
    assert "TENSORFERRY_DEEPSPEED=1" in advice.remedy
    assert "libaio-dev" in advice.remedy


def test_known_gives_none_for_what_is_unknown_or_not_there() -> None:
    facts = {"a": {"b": 1, "c": {"unknown": "why"}}}
    assert known(facts, "a", "b") == 1
    assert known(facts, "a", "c") is None
    assert known(facts, "a", "c", "d") is None
    assert known(facts, "x", "y") is None
