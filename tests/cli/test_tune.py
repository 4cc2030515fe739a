"""`tensorferry tune` and `tensorferry-ds-nvme-tune` as their users run them."""

from __future__ import annotations

import json
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tensorferry.tuning import gpus
from tests.support import mounts

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("typer")
pytest.importorskip("rich")

ROOT = pathlib.Path(__file__).parents[2]
SMALL = {
    "io_engine": ["threads"],
    "block_size": ["256K", "1M"],
    "queue_depth": [4],
    "io_parallel": [1, 2],
}


class Place:
    """A folder to tune, a user's home, and a small sweep."""

    def __init__(self, folder: pathlib.Path, home: pathlib.Path) -> None:
        self.folder = folder
        self.home = home
        self.store = home / "profiles.json"
        self.sweep = home / "sweep.json"
        self.sweep.write_text(json.dumps(SMALL))
        self.environment = os.environ | {
            "TENSORFERRY_PROFILES": str(self.store),
            "XDG_STATE_HOME": str(home / "state"),
            "COLUMNS": "120",
        }

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return self._run([sys.executable, "-m", "tensorferry", "tune", *map(str, arguments)])

    def run_small(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return self.run(self.folder, "--io-size", "16M", "--sweep-config", self.sweep, *arguments)

    def run_theirs(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        module = "tensorferry.cli.ds_nvme_tune"
        return self._run([sys.executable, "-m", module, *map(str, arguments)])

    def start_long(self) -> subprocess.Popen[str]:
        arguments = ["tune", str(self.folder), "--io-size", "64M", "--full"]
        return subprocess.Popen(
            [sys.executable, "-m", "tensorferry", *arguments],
            env=self.environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )


@pytest.fixture
def place(directory: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    yield Place(directory, tmp_path_factory.mktemp("home"))
    assert list(directory.iterdir()) == [], "left files behind"


def test_tune_prints_what_to_use_and_stores_it(place: Place) -> None:
    done = place.run_small()
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout  # no control codes on a pipe
    assert "Best: threads" in done.stdout
    assert re.search(r"write \d+\.\d+ GB/s \(.* % sure\)", done.stdout)
    assert "threads, read, GB/s" in done.stdout
    section = re.search(r"\{\n.*?\n\}", done.stdout, re.DOTALL)
    assert section is not None
    aio = json.loads(section[0])["aio"]
    assert set(aio) == {
        "block_size",
        "queue_depth",
        "single_submit",
        "overlap_events",
        "intra_op_parallelism",
    }
    assert aio["single_submit"] is False
    (profile,) = json.loads(place.store.read_text())["profiles"]
    assert profile["settings"] == aio | {"engine": "threads"}
    assert not list((place.home / "state" / "tensorferry").iterdir())


def test_what_was_found_is_shown_and_forgotten(place: Place) -> None:
    assert "no settings are stored" in place.run("--show").stdout
    place.run_small()
    for arguments in (["--show"], ["--show", place.folder]):
        shown = place.run(*arguments).stdout
        assert "threads" in shown
        assert str(place.store) in shown
    assert "forgotten" in place.run("--forget", place.folder).stdout
    assert not place.store.exists()
    assert place.run("--forget").returncode == 0


def test_tune_stores_nothing_where_it_must_not(place: Place) -> None:
    done = place.run_small("--no-save", "--no-write")
    assert done.returncode == 0, done.stderr
    assert not place.store.exists()
    place.environment["TENSORFERRY_PROFILES"] = "0"
    assert "TENSORFERRY_PROFILES=0" in place.run_small().stdout
    assert place.run("--show").returncode == 1


def test_result_log_and_heat_map_are_kept_where_asked(place: Place) -> None:
    pytest.importorskip("matplotlib")
    result, log, plot = (place.home / name for name in ("out.json", "log.jsonl", "map.png"))
    done = place.run_small("--json", result, "--log", log, "--plot", plot, "--no_save", "--full")
    assert done.returncode == 0, done.stderr
    content = json.loads(result.read_text())
    assert content["settings"]["engine"] == "threads"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[0]["tensorferry_tune"] == 1
    assert sum("measured" in line for line in lines) == 2 * len(content["turns"])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_terminal_gets_a_live_table(place: Place) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tensorferry", "tune", str(place.folder), "--io-size=16M"]
    with subprocess.Popen(
        [*command, f"--sweep-config={place.sweep}", "--no-save"],
        env=place.environment | {"TERM": "xterm-256color"},
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        output = b""
        while True:
            try:
                output += os.read(ours, 65536)
            except OSError:  # the terminal is gone with the last process that had it open
                break
    os.close(ours)
    assert process.returncode == 0, output
    assert b"measurements" in output
    assert b"Best: " in output


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ([], ["PATHS"]),
        (["/nonexistent"], ["/nonexistent: no such folder"]),
        (["/dev/null", "--io-size", "1Q"], ["/dev/null: no folder", "--io-size: '1Q'"]),
        (
            ["/", "--io-size", "1M", "--no-read", "--no-write", "--json", "/nonexistent/x"],
            ["--io-size: 1M is less", "--no-read, --no-write", "--json: /nonexistent"],
        ),
        (["/", "--sweep-config", "/nonexistent"], ["--sweep-config: /nonexistent: No such file"]),
        (["/", "--plot", "map.bmp"], ["--plot: map.bmp ends"]),
        (["--show", "--forget"], ["--show, --forget"]),
        (["--forget", "/nonexistent"], ["/nonexistent: no such folder"]),
    ],
)
def test_bad_arguments_are_all_listed_at_once(
    place: Place, arguments: list[str], messages: list[str]
) -> None:
    done = place.run(*arguments)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == len(messages), done.stderr
    for message in messages:
        assert message in done.stderr
    assert "Traceback" not in done.stderr


def assert_failed(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()
    for word in words:
        assert word in line


@pytest.mark.root
def test_a_full_disk_is_one_clear_line(place: Place, tmp_path: pathlib.Path) -> None:
    with mounts.ext4(place.home, 32 << 20) as small:
        done = place.run(small, "--io-size", "64M")
        assert_failed(done, str(small), "No space left on device", "smaller --io-size")
        assert [path.name for path in small.iterdir()] == ["lost+found"]


@pytest.mark.root
def test_a_folder_that_cannot_be_written_is_one_clear_line(place: Place) -> None:
    with mounts.read_only(place.folder, place.home / "read-only") as folder:
        assert_failed(place.run(folder), str(folder), "Read-only file system")


def test_a_folder_that_nobody_may_write_to_is_one_clear_line(place: Place) -> None:
    assert_failed(place.run("/sys"), "/sys: Permission denied", "a folder that you may write to")


def test_a_result_that_cannot_be_stored_is_printed_all_the_same(place: Place) -> None:
    place.environment["TENSORFERRY_PROFILES"] = str(place.sweep / "below")
    done = place.run_small()
    assert_failed(done, "not stored", str(place.sweep))
    assert "Best: threads" in done.stdout


def test_a_state_folder_that_cannot_be_written_is_done_without(place: Place) -> None:
    place.environment["XDG_STATE_HOME"] = str(place.sweep / "below")
    done = place.run_small()
    assert done.returncode == 0, done.stderr
    assert "Best: threads" in done.stdout


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130)])
def test_an_interrupted_tune_leaves_nothing_but_its_log_and_goes_on(
    place: Place, number: signal.Signals, code: int
) -> None:
    with place.start_long() as process:
        assert process.stdout is not None
        assert "full sweep" in process.stdout.readline()
        log_folder = place.home / "state" / "tensorferry"
        deadline = time.monotonic() + 60
        while sum(path.stat().st_size for path in log_folder.glob("*")) < 5000:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    (line,) = errors.strip().splitlines()
    assert "goes on where it ended" in line
    (log,) = log_folder.iterdir()
    assert str(log) in line
    assert not place.store.exists()


# ds_nvme_tune


def test_command_lines_of_ds_nvme_tune_work_unchanged(place: Place) -> None:
    sweep = place.home / "theirs.json"
    content = {
        "block_size": ["1M"],
        "queue_depth": [4, 8],
        "sequential_requests": [True, False],
        "single_submit": [False, True],
        "io_parallel": [1],
    }
    sweep.write_text(json.dumps(content))
    logs = place.home / "logs"
    done = place.run_theirs(
        *("--nvme_dir", place.folder, "--io_size", "16M", "--loops", 2, "--log_dir", logs),
        *("--sweep_config", sweep, "--flush_page_cache", "--verbose"),
    )
    assert done.returncode == 0, done.stderr
    assert f"Running DeepNVMe performance tuning on ['{place.folder}']" in done.stdout
    best, _, section = done.stdout.partition("Best performance (GB/sec): ")[2].partition("\n")
    assert re.fullmatch(r"read = +\d+\.\d\d, write = +\d+\.\d\d", best)
    aio = json.loads(section)["aio"]
    assert aio["block_size"] in (1 << 20,)
    assert aio["single_submit"] is False
    assert (logs / "tune.jsonl").exists()
    assert json.loads(place.store.read_text())["profiles"]


def test_options_of_ds_nvme_tune_that_cannot_be_are_refused_with_the_reason(place: Place) -> None:
    place.environment["TENSORFERRY_LIBCUFILE"] = "/nonexistent/libcufile.so.0"
    done = place.run_theirs(
        *("--nvme_dir", place.folder, "/nonexistent", "--gpu", "--gds", "--loops", 0),
        *("--io_size", "10", "--no_read", "--no_write"),
    )
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    for word in ("/nonexistent", "--gds: ", "--loops: 0", "--io_size: 10", "--no_read"):
        assert any(word in line for line in lines), word
    assert len(lines) == 5


@pytest.mark.parametrize("option", ["--gpu", "--gds"])
def test_gpus_are_refused_with_the_reason_where_there_is_none(option: str, place: Place) -> None:
    if gpus.why_no_gpu() is None:
        pytest.skip("there is a GPU")
    for done in (place.run_small(option), place.run_theirs("--nvme_dir", place.folder, option)):
        assert done.returncode == 2
        assert done.stderr == f"Error: {option}: {gpus.why_no_gpu()}\n"


@pytest.mark.gpu
@pytest.mark.parametrize("option", ["--gpu", "--gds"])
def test_tuning_with_cuda_tensors_ends_with_settings(option: str, place: Place) -> None:
    if reason := gpus.why_no_gpu() or (gpus.why_no_gds() if option == "--gds" else None):
        pytest.skip(reason)
    done = place.run_small(option)
    assert done.returncode == 0, done.stderr
    section = re.search(r"\{\n.*?\n\}", done.stdout, re.DOTALL)
    assert section is not None
    assert json.loads(section[0])["aio"].get("use_gds", False) is (option == "--gds")


def test_a_log_folder_of_ds_nvme_tune_that_cannot_be_made_is_one_clear_line(place: Place) -> None:
    done = place.run_theirs("--nvme_dir", place.folder, "--log_dir", place.sweep / "below")
    assert_failed(done, "--log_dir", "Not a directory")
