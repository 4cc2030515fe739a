"""The facts about the machine: those of this one, and those of others with simulated /sys files."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tensorferry.base.mounts import mounts as mounts_of_this
from tensorferry.tuning import machine
from tensorferry.tuning.advice import advise
from tensorferry.tuning.machine import devices, limits, storage
from tensorferry.tuning.machine.libraries import asking
from tensorferry.tuning.machine.probe import attempt, is_unknown
from tests.conftest import file_system_type
from tests.support import mounts, processes, required
from tests.support.leaks import Holdings, count_descriptors, settled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.faultfs import FaultFS


@pytest.mark.root
def test_a_file_system_on_a_loop_device_is_followed_to_the_drive(directory: Path) -> None:
    with (
        mounts.loop_device(directory, "--direct-io=on") as device,
        mounts.ext4_on(device, directory / "mount") as path,
    ):
        bare, found = storage.file_system(device), storage.file_system(path)
        assert (bare["type"], bare["direct_io"]["works"]) == ("block device", True)
        assert bare["device_number"] == found["device_number"]
        assert (found["type"], found["mount_point"]) == ("ext4", str(path))
        assert found["direct_io"] == {"works": True, "writes": True}
        loop, *below = devices.behind(found["device_number"])
        assert (loop["name"], loop["kind"]) == (device.name, "loop device")
        assert loop["direct_io"] is True
        if (under := storage.device_number(storage.mount_of(directory))) is not None:
            assert under in {lower["number"] for lower in below}


def test_a_file_system_in_memory_is_said_to_be_one_and_to_have_no_direct_io(
    tmpfs_directory: Path,
) -> None:
    found = storage.file_system(tmpfs_directory)
    assert found["type"] == "tmpfs"
    assert found["in_memory"] is True
    assert found["direct_io"]["works"] is False
    assert "is in memory" in found["direct_io"]["reason"]
    assert devices.behind(found["device_number"]) == []


def test_of_fuse_it_is_told_how_reads_and_writes_go(faultfs: FaultFS) -> None:
    found = storage.file_system(faultfs.path)
    assert (found["direct_io"]["works"], found["direct_io"]["writes"]) == (True, False)
    bdi = Path("/sys/class/bdi") / found["device"] / "read_ahead_kb"
    assert found["far"]["read_ahead_kb"] == int(bdi.read_text())
    assert "fuse_max_background" in found["far"]
    assert storage.file_system(faultfs.backing)["far"] is None


@pytest.mark.root
def test_a_file_system_that_takes_no_direct_io_says_so(directory: Path) -> None:
    with mounts.ramfs(directory / "mount") as path:
        found = storage.file_system(path)
        assert found["direct_io"]["works"] is False
        assert found["direct_io"]["reason"]


def test_looking_at_a_folder_leaves_neither_file_nor_descriptor(directory: Path) -> None:
    storage.file_system(directory)
    before = Holdings.now().descriptors
    for _ in range(10):
        storage.file_system(directory)
    assert list(directory.iterdir()) == []
    assert count_descriptors() <= before


def test_looking_at_a_file_changes_nothing_of_it(directory: Path) -> None:
    path = directory / "file"
    path.write_bytes(bytes(range(256)) * 64)
    path.chmod(0o400)
    before = path.stat()
    found = storage.file_system(path)
    assert found["direct_io"]["works"] is True
    after = path.stat()
    assert (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size)
    assert path.read_bytes() == bytes(range(256)) * 64


@pytest.mark.root
def test_of_mounts_at_one_place_the_visible_one_is_named(directory: Path) -> None:
    point = directory / "with blank\\and backslash"
    with mounts.tmpfs(point, 1 << 20), mounts.tmpfs(point, 2 << 20) as path:
        found = storage.mount_of(path)
        assert found["mount_point"] == str(path)
        assert f"size={(2 << 20) >> 10}k" in found["options"]
        assert storage.mount_of(directory)["type"] == file_system_type(directory)


@pytest.fixture
def sysfs(tmp_path: Path) -> Callable[[str, dict[str, str]], Path]:
    """A function that makes files of a sysfs; a text "-> target" makes a symbolic link."""

    def make(folder: str, files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if text.startswith("-> "):
                path.symlink_to(tmp_path / text[3:])
            else:
                path.write_text(text + "\n")
        return tmp_path

    return make


Sysfs = "Callable[[str, dict[str, str]], Path]"
PCIE = {"current_link_speed": "8.0 GT/s PCIe", "current_link_width": "4", "numa_node": "1"}
PCIE |= {"max_link_speed": "16.0 GT/s PCIe", "max_link_width": "4"}
CONTROLLER = {"model": "FASTDRIVE 1.92T  "}
DRIVE = {"dev": "259:0", "queue/scheduler": "[none] mq-deadline", "queue/max_sectors_kb": "256"}


def test_a_partition_of_an_nvme_drive_is_followed_to_the_drive_and_its_pcie_link(
    sysfs: Sysfs,
) -> None:
    slot = "devices/pci0000:00/0000:00:01.0/0000:01:00.0"
    sysfs(slot, PCIE)
    sysfs(f"{slot}/nvme/nvme0", CONTROLLER)
    drive = f"{slot}/nvme/nvme0/nvme0n1"
    sysfs(drive, DRIVE | {"device": f"-> {slot}/nvme/nvme0"})
    sysfs(f"{drive}/nvme0n1p2", {"partition": "2", "dev": "259:2"})
    root = sysfs("dev/block", {"259:0": f"-> {drive}", "259:2": f"-> {drive}/nvme0n1p2"})
    partition, found = devices.behind("259:2", root)
    assert (partition["name"], partition["kind"]) == ("nvme0n1p2", "partition")
    assert (found["name"], found["kind"]) == ("nvme0n1", "NVMe drive")
    assert found["model"] == "FASTDRIVE 1.92T"
    assert found["numa_node"] == 1
    assert (found["scheduler"], found["max_sectors_kb"]) == ("none", 256)
    (link,) = found["pcie"]
    assert link["address"] == "0000:01:00.0"
    assert (link["link"], link["link_max"]) == ("8.0 GT/s PCIe x4", "16.0 GT/s PCIe x4")
    assert link["gb_per_second"] == pytest.approx(3.94, abs=0.01)
    assert link["gb_per_second_max"] == pytest.approx(7.88, abs=0.01)


def test_an_nvme_drive_with_several_paths_has_the_link_of_each(sysfs: Sysfs) -> None:
    subsystem = "devices/virtual/nvme-subsystem/nvme-subsys0"
    for number in (0, 1):
        controller = f"devices/pci0000:00/0000:0{number}:00.0/nvme/nvme{number}"
        sysfs(f"devices/pci0000:00/0000:0{number}:00.0", PCIE)
        sysfs(controller, CONTROLLER)
        sysfs(subsystem, {f"nvme{number}": f"-> {controller}"})
    drive = f"{subsystem}/nvme0n1"
    sysfs(drive, DRIVE | {"device": f"-> {subsystem}"})
    root = sysfs("dev/block", {"259:0": f"-> {drive}"})
    (found,) = devices.behind("259:0", root)
    assert [link["address"] for link in found["pcie"]] == ["0000:00:00.0", "0000:01:00.0"]
    assert found["model"] == "FASTDRIVE 1.92T"


def test_an_encrypted_volume_on_an_array_is_followed_to_both_drives(sysfs: Sysfs) -> None:
    block = "devices/virtual/block"
    for number, name in (("8:0", "sda"), ("8:16", "sdb")):
        sysfs(f"devices/{name}", {"dev": number, "device/model": "DISK"})
        sysfs("dev/block", {number: f"-> devices/{name}"})
        sysfs(f"{block}/md0/slaves", {name: f"-> devices/{name}"})
    sysfs(f"{block}/md0", {"dev": "9:0", "md/level": "raid0"})
    sysfs(f"{block}/dm-0", {"dev": "253:0", "dm/uuid": "CRYPT-LUKS2-0123-data", "dm/name": "data"})
    sysfs(f"{block}/dm-0/slaves", {"md0": f"-> {block}/md0"})
    root = sysfs("dev/block", {"253:0": f"-> {block}/dm-0", "9:0": f"-> {block}/md0"})
    found = devices.behind("253:0", root)
    assert [(device["name"], device["kind"], device["model"]) for device in found] == [
        ("dm-0", "dm-crypt", "data"),
        ("md0", "MD array", "raid0"),
        ("sda", "SCSI or SATA disk", "DISK"),
        ("sdb", "SCSI or SATA disk", "DISK"),
    ]


def test_a_device_that_sysfs_does_not_know_is_unknown_with_a_reason(tmp_path: Path) -> None:
    (found,) = devices.behind("259:7", tmp_path)
    assert "No such file" in found["unknown"]
    assert advise({"path": "/", "devices": [found]}) == []


def test_devices_that_lie_on_each_other_in_a_circle_come_to_an_end(sysfs: Sysfs) -> None:
    sysfs("devices/dm-0", {"dev": "253:0", "slaves/dm-0": "-> devices/dm-0"})
    root = sysfs("dev/block", {"253:0": "-> devices/dm-0"})
    assert len(devices.behind("253:0", root)) == 1


def test_limits_of_the_control_group_are_found(directory: Path) -> None:
    with control_group(directory) as (prefix, expected):
        program = (
            "import json; from tensorferry.tuning.machine import limits; "
            "print(json.dumps({'memory': limits.available_nbytes(), 'io': limits.io_limits()}))"
        )
        ended = subprocess.run(
            [*prefix, sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        found = json.loads(ended.stdout)
        if "memory" in expected:
            assert found["memory"] <= expected["memory"]
        if "io" in expected:
            assert expected["io"] in found["io"]


@pytest.mark.parametrize("root", ["/", "/docker/abc"], ids=["whole tree", "a container's part"])
def test_of_nested_control_groups_of_version_2_the_tightest_limits_count(
    root: str, tmp_path: Path
) -> None:
    top = tmp_path / "cgroup"
    outer = top if root != "/" else top / "docker/abc"
    inner = outer / "job"
    inner.mkdir(parents=True)
    process = tmp_path / "process"
    process.mkdir()
    (process / "mountinfo").write_text(
        f"31 23 0:28 {root} {top} rw,relatime - cgroup2 cgroup2 rw\n"
    )
    (process / "cgroup").write_text("0::/docker/abc/job\n")
    (outer / "memory.max").write_text("1048576\n")
    (outer / "memory.current").write_text("4096\n")
    (inner / "memory.max").write_text("max\n")
    (outer / "io.max").write_text("259:0 rbps=2000 wbps=max riops=max wiops=max\n")
    (inner / "io.max").write_text("259:0 rbps=3000 wbps=max riops=10 wiops=max\n")
    assert limits.available_nbytes(process) == (1 << 20) - 4096
    assert limits.io_limits(process) == [{"device": "259:0", "rbps": 2000, "riops": 10}]


@pytest.mark.parametrize("version", [1, 2])
def test_memory_of_a_control_group_is_all_there_is_to_be_had(version: int, tmp_path: Path) -> None:
    process, group = tmp_path / "process", tmp_path / "cgroup"
    process.mkdir()
    group.mkdir()
    kind = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,memory"
    (process / "mountinfo").write_text(f"31 23 0:28 / {group} rw,relatime - {kind}\n")
    (process / "cgroup").write_text("0::/\n" if version == 2 else "4:memory:/\n")
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        2: ("memory.max", "memory.current", ""),
    }[version]
    (group / names[0]).write_text(f"{64 << 20}\n")
    (group / names[1]).write_text(f"{40 << 20}\n")
    (group / "memory.stat").write_text(
        f"anon 7\n{names[2]}inactive_file {12 << 20}\n{names[2]}active_file {4 << 20}\n"
    )
    assert limits.available_nbytes(process) == 40 << 20
    (group / names[0]).write_text("max\n" if version == 2 else f"{(1 << 63) - 4096}\n")
    assert limits.available_nbytes(process) > 40 << 20


@contextlib.contextmanager
def control_group(directory: Path) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Make control groups with limits; yield a command prefix that runs in them, and the limits."""
    if os.geteuid() != 0:
        required.missing("mounts", "control groups need root")
    device = storage.device_number(storage.mount_of(directory))
    settings: dict[str, dict[str, str]] = {
        "memory": {"memory.limit_in_bytes": str(1 << 30)},
        "blkio": {"blkio.throttle.read_bps_device": f"{device} 123000000"},
    }
    second = {
        "memory.max": str(1 << 30),
        "io.max": f"{device} rbps=123000000",
    }
    expected = {
        "memory": 1 << 30,
        "io": {"device": device, "rbps": 123000000},
    }
    name = f"tensorferry-test-{os.getpid()}"
    made: list[Path] = []
    limited: dict[str, Any] = {}

    def try_to_set(group: Path, file: str, value: str) -> None:
        with contextlib.suppress(OSError):
            (group / file).write_text(value)
            what = "memory" if file.startswith("memory") else "io"
            limited[what] = expected[what]

    try:
        for mount in mounts_of_this():
            first = [part for part in mount["options"].split(",") if part in settings]
            if mount["type"] == "cgroup" and first:
                files = settings[first[0]]
            elif mount["type"] == "cgroup2":
                files = second
            else:
                continue
            group = Path(mount["mount_point"]) / name
            with contextlib.suppress(OSError):
                group.mkdir()
                made.append(group)
                for file, value in files.items():
                    try_to_set(group, file, value)
        if not limited:
            required.missing("mounts", "no control group can be made here")
        script = "; ".join(f"echo $$ > {group}/cgroup.procs" for group in made) + '; exec "$@"'
        yield ["sh", "-c", script, "sh"], limited
    finally:
        for group in made:
            group.rmdir()


def test_facts_of_the_system_are_told_or_unknown_with_a_reason() -> None:
    facts = [machine.versions(), machine.system(), machine.graphics()]
    assert json.loads(json.dumps(facts)) == facts
    assert facts[0]["kernel"] == os.uname().release
    assert facts[1]["transparent_huge_pages"] in ("always", "madvise", "never")
    assert facts[1]["numa_nodes"] >= 0
    for fact in facts[2].values():
        assert not is_unknown(fact) or len(fact["unknown"]) > 10


def test_a_probe_that_fails_is_unknown_with_the_reason() -> None:
    assert attempt(Path("/proc/nothing").read_text) == {
        "unknown": "/proc/nothing: No such file or directory"
    }
    assert attempt(int, "many")["unknown"].startswith("ValueError: ")


@pytest.fixture
def torch_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that replaces torch by a program, and returns the variable that its importers have."""

    def install(program: str) -> str:
        (tmp_path / "torch.py").write_text(program)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return f"PYTHONPATH={tmp_path}"

    return install


@pytest.mark.parametrize(
    ("program", "reason", "seconds"),
    [
        ("import os; os.abort()", "SIGABRT", 300.0),
        ("raise ImportError('libcudart.so.13 is missing')", "libcudart.so.13 is missing", 300.0),
        ("import time; time.sleep(600)", "within the time limit", 0.5),
        ("import sys; sys.exit('no reason')", "no reason", 300.0),
        ("import sys; sys.exit()", "its process ended with 0", 300.0),
    ],
)
def test_a_library_that_breaks_is_unknown_with_the_reason_and_leaves_no_process(
    torch_is: Callable[[str], str], program: str, reason: str, seconds: float
) -> None:
    variable = torch_is(program)
    with asking("torch") as answer:
        assert reason in answer(seconds)["unknown"]
    assert processes.with_variable(variable) == []


def test_processes_that_a_library_starts_end_with_the_question(
    torch_is: Callable[[str], str],
) -> None:
    variable = torch_is("import subprocess; subprocess.run(['sleep', '600'])")
    with asking("torch") as answer:
        assert settled(lambda: len(processes.with_variable(variable)) == 2)
        assert is_unknown(answer(0.0))
    assert settled(lambda: processes.with_variable(variable) == [])


def test_a_library_that_is_not_installed_has_no_version() -> None:
    with asking("a_library_that_nobody_has") as answer:
        assert answer(300.0) == {"version": None}


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
    assert facts["served_by"] == ("tensorferry" if served else "deepspeed")
    advice = advise({"path": "/", "libraries": {"deepspeed": facts}})
    assert bool(advice) is not served


def test_what_a_measurement_was_made_on_is_told_in_json(directory: Path) -> None:
    description = machine.describe(directory)
    assert json.loads(json.dumps(description)) == description
    assert description["file_system"]["type"]
    assert list(directory.iterdir()) == []
