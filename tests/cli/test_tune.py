"""`tensorferry tune` and `tensorferry-ds-nvme-tune` as their users run them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import tensorferry
from tensorferry.cli import ds_nvme_tune
from tensorferry.transfer.settings import Settings
from tensorferry.tuning import gpus
from tensorferry.tuning import tune as tuning
from tests.cli.running import Done, here, run
from tests.support import mounts, required
from tests.support.child import ROOT
from tests.support.leaks import descriptors, settled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

required.module("typer")
required.module("rich")

SMALL = {"io_engine": ["threads"], "block_size": ["1M"], "queue_depth": [4]}
BAD = Settings(32 << 10, 1, False, True, 1, "threads")


class Place:
    """A folder to tune, a user's home, and a small sweep."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        self.home = home
        self.sweep = home / "sweep.json"
        self.sweep.write_text(json.dumps(SMALL))
        # With underscores, as both commands understand them.
        self.small = ("--io_size", "16M", "--sweep_config", self.sweep)

    def run(self, *arguments: object, expect: int = 0) -> Done:
        return run("tune", *arguments, expect=expect)

    def run_small(self, *arguments: object, expect: int = 0, seconds: int = 1) -> Done:
        how = (*self.small, "--seconds", seconds)
        return self.run(self.folder, *how, *arguments, expect=expect)

    def run_theirs(self, *arguments: object, expect: int = 0) -> Done:
        return here(ds_nvme_tune.main, *arguments, expect=expect)


@pytest.fixture
def place(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    yield Place(directory, tmp_path_factory.mktemp("home"))
    assert list(directory.iterdir()) == [], "left files behind"


def section_of(done: Done) -> dict[str, Any]:
    section = re.search(r"\{\n.*?\n\}", done.stdout, re.DOTALL)
    assert section is not None
    found: dict[str, Any] = json.loads(section[0])["aio"]
    return found


def test_tune_prints_what_is_proven_in_each_form(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With default settings so bad that any other is surely better."""
    monkeypatch.setattr(tuning, "default_settings", lambda: BAD)
    done = place.run_small("--no-write", seconds=300)
    assert "\x1b" not in done.stdout  # no control codes on a pipe
    assert done.stdout.startswith("This takes at most 5:00 minutes")
    assert re.search(r"times as fast as the default, at least \d+\.\d+, in \d+ pairs", done.stdout)
    aio = section_of(done)
    assert set(aio) == set(Settings._fields) - {"engine"}
    assert aio["single_submit"] is False
    variables = dict(re.findall(r"(TENSORFERRY_\w+)=(\S+)", done.stdout))
    assert variables["TENSORFERRY_ENGINE"] == "threads"
    assert int(variables["TENSORFERRY_BLOCK_SIZE"]) == aio["block_size"]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    arguments = re.findall(r"^tensorferry\.(?:open\(path, |aio_handle\()(.*)\)$", done.stdout, re.M)
    of_open, of_handle = (eval(f"dict({each})") for each in arguments)
    with tensorferry.aio_handle(**of_handle) as given, tensorferry.aio_handle() as default:
        assert given._settings._asdict() == aio | {"engine": "threads"}
        assert default._settings[:2] == given._settings[:2]
        assert default.engine == "threads"
    path = place.home / "file"
    path.touch()
    with tensorferry.open(path, **of_open) as file:
        assert file.engine == "threads"


def test_tune_says_that_nothing_is_proven(place: Place) -> None:
    place.sweep.write_text(json.dumps({"io_engine": ["threads"], "block_size": ["4K"]}))
    done = place.run_small("--no-write")
    assert done.stdout.count("the default settings") == 1
    assert "the defaults are the best choice" in done.stdout
    assert "TENSORFERRY_BLOCK_SIZE" not in done.stdout


def test_all_measurements_are_printed_where_asked(place: Place) -> None:
    content = json.loads(place.run_small("--json", seconds=60).stdout)
    assert content["settings"]["block_size"] > 0
    assert content["deepspeed"]["aio"]["overlap_events"] is True
    assert content["rates"]["read"]["low"] <= content["rates"]["read"]["high"]
    assert {each["direction"] for each in content["measurements"]} == {"read", "write"}
    assert all(len(each["seconds"]) >= 3 for each in content["measurements"])
    assert [each["direction"] for each in content["found"]] == ["write", "read"]
    assert content["environment"]["TENSORFERRY_QUEUE_DEPTH"].isdigit()


def assert_says(done: Done, *words: str) -> None:
    (line,) = done.stderr.strip().splitlines()
    for word in words:
        assert word in line


@pytest.mark.root
def test_a_full_disk_is_one_clear_line(place: Place) -> None:
    with mounts.ext4(place.home, 32 << 20) as small:
        done = place.run(small, "--io-size", "64M", expect=1)
        assert_says(done, str(small), "No space left on device", "smaller --io-size")
        assert [path.name for path in small.iterdir()] == ["lost+found"]


@pytest.mark.root
def test_a_folder_that_cannot_be_written_is_one_clear_line(place: Place) -> None:
    with mounts.read_only(place.folder, place.home / "read-only") as folder:
        assert_says(place.run(folder, expect=1), str(folder), "Read-only file system")
    assert_says(place.run("/sys", expect=1), "/sys: ", "choose a writable folder")


def test_a_log_that_cannot_be_written_is_known_before_the_run(place: Place) -> None:
    done = place.run_theirs(
        "--nvme_dir", place.folder, "--log_dir", place.sweep / "below", expect=1
    )
    assert_says(done, "--log-dir", "Not a directory")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_tune_leaves_nothing(place: Place, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "tensorferry", "tune", str(place.folder), "--seconds=3000"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("This takes at most 50:00 minutes")
        assert settled(lambda: any(str(place.folder) in name for name in descriptors(process.pid)))
        process.send_signal(number)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    (line,) = errors.strip().splitlines()
    assert "interrupted" in line


def test_links_that_lead_in_a_circle_are_one_clear_line(place: Place) -> None:
    circle = place.home / "circle"
    circle.symlink_to(circle)
    assert_says(place.run(circle, expect=2), f"the folder '{circle}' does not exist")


# ds_nvme_tune


def test_command_lines_of_ds_nvme_tune_work_unchanged(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_job = ds_nvme_tune.command.make_job
    monkeypatch.setattr(
        ds_nvme_tune.command, "make_job", lambda given: make_job(given | {"seconds": 1.0})
    )
    sweep = place.home / "theirs.json"
    content = {"block_size": ["1M"], "queue_depth": [4], "sequential_requests": [True, False]}
    content |= {"single_submit": [False, True], "io_parallel": [1]}
    sweep.write_text(json.dumps(content))
    logs = place.home / "logs"
    done = place.run_theirs(
        *("--nvme_dir", "/nonexistent"),  # the last one counts
        *("--nvme_dir", place.folder, "--io_size", "16M", "--loops", 2, "--log_dir", logs),
        *("--sweep_config", sweep, "--flush_page_cache", "--verbose"),
    )
    assert f"Running DeepNVMe performance tuning on ['{place.folder}']" in done.stdout
    best, _, section = done.stdout.partition("Best performance (GB/sec): ")[2].partition("\n")
    assert re.fullmatch(r"read = +\d+\.\d\d, write = +\d+\.\d\d", best)
    aio = json.loads(section)["aio"]
    assert aio["block_size"] == 1 << 20
    assert isinstance(aio["single_submit"], bool)  # whichever was faster
    content = json.loads((logs / "tune.json").read_text())
    told = [float(rate) for rate in re.findall(r"\d+\.\d\d", best)]
    found = [content["rates"][name]["median"] / (1 << 30) for name in ("read", "write")]
    assert told == pytest.approx(found, abs=0.006)  # DeepSpeed's GB are 2^30 bytes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nvme_dir", "/nonexistent"], "/nonexistent"),
        (["--nvme_dir", "/", "--loops", 0], "--loops"),
        (["--io_size", "16M"], "--nvme-dir"),
    ],
)
def test_options_of_ds_nvme_tune_that_cannot_be_are_refused_with_the_reason(
    place: Place, arguments: list[object], words: str
) -> None:
    assert_says(place.run_theirs(*arguments, expect=2), "tensorferry-ds-nvme-tune: ", words)


@pytest.mark.parametrize("option", ["--gpu", "--gds"])
def test_gpus_are_refused_with_the_reason_where_there_is_none(option: str, place: Place) -> None:
    if gpus.gpu_refusal() is None:
        pytest.skip("there is a GPU")
    done = place.run_small(option, expect=2)
    assert done.stderr == f"tensorferry tune: {option}: {gpus.gpu_refusal()}\n"


@pytest.mark.gpu
@pytest.mark.parametrize("option", ["--gpu", "--gds"])
def test_tuning_with_cuda_tensors_ends_with_settings(option: str, place: Place) -> None:
    if reason := gpus.gpu_refusal() or (gpus.gds_refusal() if option == "--gds" else None):
        pytest.skip(reason)
    assert section_of(place.run_small(option)).get("use_gds", False) is (option == "--gds")
