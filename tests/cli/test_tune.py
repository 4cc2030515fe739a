"""`tensorferry tune` and `tensorferry-ds-nvme-tune` as their users run them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tensorferry.transfer.settings import Settings
from tensorferry.tuning import gpus
from tests.cli.running import ended
from tests.support import commands, mounts, required, warm
from tests.support.child import ROOT

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

    Done = subprocess.CompletedProcess[str]

required.module("typer")
required.module("rich")

SMALL = {
    "io_engine": ["threads"],
    "block_size": ["256K", "1M"],
    "queue_depth": [4],
    "io_parallel": [1, 2],
}
BAD_DEFAULT = """
from tensorferry.cli import main
from tensorferry.transfer.settings import Settings
from tensorferry.tuning import tune
tune.default_settings = lambda: Settings(16 << 10, 1, False, True, 1, "threads")
main()
"""


class Place:
    """A folder to tune, a user's home, and a small sweep."""

    def __init__(self, folder: pathlib.Path, home: pathlib.Path) -> None:
        self.folder = folder
        self.home = home
        self.store = home / "profiles.json"
        self.sweep = home / "sweep.json"
        self.sweep.write_text(json.dumps(SMALL))
        # With underscores, as both commands understand them.
        self.small = ("--io_size", "16M", "--sweep_config", self.sweep)
        self.environment = {"TENSORFERRY_PROFILES": str(self.store), "COLUMNS": "120"}

    def run(self, *arguments: object, expect: int = 0) -> Done:
        return self._ended("-m", "tensorferry", "tune", *arguments, expect=expect)

    def run_small(self, *arguments: object, expect: int = 0) -> Done:
        return self.run(self.folder, *self.small, *arguments, expect=expect)

    def run_against_a_bad_default(self, *arguments: object) -> Done:
        """Run a small sweep where the default settings are so bad that any other is surely better."""
        return self._ended("-c", BAD_DEFAULT, "tune", self.folder, *self.small, *arguments)

    def run_theirs(self, *arguments: object, expect: int = 0) -> Done:
        return self._ended("-m", "tensorferry.cli.ds_nvme_tune", *arguments, expect=expect)

    def start_long(self) -> subprocess.Popen[str]:
        arguments = ["tune", str(self.folder), "--io-size", "64M", "--full"]
        return subprocess.Popen(
            [sys.executable, "-m", "tensorferry", *arguments],
            env=os.environ | self.environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _ended(self, *command: object, expect: int = 0) -> Done:
        return ended(warm.python(), *command, expect=expect, **self.environment)


@pytest.fixture
def place(directory: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    yield Place(directory, tmp_path_factory.mktemp("home"))
    assert list(directory.iterdir()) == [], "left files behind"


def test_tune_prints_what_to_use_and_stores_what_is_proven(place: Place) -> None:
    done = place.run_against_a_bad_default()
    assert "\x1b" not in done.stdout  # no control codes on a pipe
    assert re.match(r"about \d+ s\n", done.stdout)
    assert re.search(r"final \(\d+ %, \d+ s left\)", done.stdout)
    assert "Best: threads" in done.stdout
    assert re.search(r"write \d+\.\d+ GB/s \(.* % sure\)", done.stdout)
    assert re.search(r"It is \d+\.\d+ times as fast .*, 99.* % sure, \d+ times each", done.stdout)
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


def test_tune_says_that_nothing_is_proven(place: Place) -> None:
    defaults = {"io_engine": ["threads"], "block_size": ["4K"], "queue_depth": [1]}
    place.sweep.write_text(json.dumps(defaults))
    done = place.run_small()
    assert "These are the default settings: nothing else is proven to be 2 % faster" in done.stdout
    assert not place.store.exists()


def test_quick_tries_few_settings(place: Place) -> None:
    done = place.run(place.folder, "--quick", "--io-size", "32M", "--no-save")
    assert "Best: " in done.stdout
    assert re.search(r"\b\d+ settings", done.stdout) is None  # not more than finalists


def test_what_was_found_is_shown_and_forgotten(place: Place) -> None:
    assert "no settings are stored" in place.run("--show").stdout
    place.run_against_a_bad_default()
    for arguments in (["--show"], ["--show", place.folder]):
        shown = place.run(*arguments).stdout
        assert "threads" in shown
        assert str(place.store) in shown
    assert "forgotten" in place.run("--forget", place.folder).stdout
    assert not place.store.exists()
    place.run("--forget")


def test_tune_stores_nothing_where_it_must_not(place: Place) -> None:
    place.run_against_a_bad_default("--no-save", "--no-write")
    assert not place.store.exists()
    place.environment["TENSORFERRY_PROFILES"] = "0"
    assert "TENSORFERRY_PROFILES=0" in place.run_against_a_bad_default().stdout
    place.run("--show", expect=1)


def test_all_measurements_are_printed_and_the_heat_map_is_drawn_where_asked(place: Place) -> None:
    required.module("matplotlib")
    plot = place.home / "map.png"
    done = place.run_small("--json", "--plot", plot, "--no_save", "--full")
    content = json.loads(done.stdout)
    assert content["settings"]["block_size"] > 0
    assert len(content["turns"]) >= 3 * 4
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_terminal_gets_a_live_bar(place: Place) -> None:
    command = [sys.executable, "-m", "tensorferry", "tune", str(place.folder), "--io-size=16M"]
    output = commands.on_terminal(
        [*command, f"--sweep-config={place.sweep}", "--no-save"],
        env=os.environ | place.environment | {"TERM": "xterm-256color"},
        cwd=ROOT,
        streams=("stdin", "stdout", "stderr"),
    )
    assert b" left: final" in output
    assert b"Best: " in output


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ([], ["FOLDER: "]),
        (["/nonexistent"], ["FOLDER: the folder '/nonexistent' does not exist"]),
        (["/dev/null", "--io-size", "1Q"], ["FOLDER: '/dev/null' is no folder", "--io-size: '1Q'"]),
        (
            ["/", "--io-size", "1M", "--no-read", "--no-write", "--plot", "/nonexistent/x.png"],
            [
                "--io-size: 1M is less than 16M",
                "--no-read, --no-write",
                "--plot: the folder '/nonexistent'",
            ],
        ),
        (["/", "--sweep-config", "/nonexistent"], ["--sweep-config: /nonexistent: No such file"]),
        (["/", "--plot", "map.bmp"], ["--plot: map.bmp ends"]),
        (["--show", "--forget"], ["--show, --forget"]),
        (["/", "--full", "--quick"], ["--full, --quick: choose one"]),
        (["--forget", "/nonexistent"], ["FOLDER: the folder '/nonexistent' does not exist"]),
    ],
)
def test_bad_arguments_are_all_listed_at_once(
    place: Place, arguments: list[str], messages: list[str]
) -> None:
    done = place.run(*arguments, expect=2)
    assert len(done.stderr.strip().splitlines()) == len(messages), done.stderr
    for message in messages:
        assert message in done.stderr


def assert_says(done: Done, *words: str) -> None:
    (line,) = done.stderr.strip().splitlines()
    for word in words:
        assert word in line


@pytest.mark.root
def test_a_full_disk_is_one_clear_line(place: Place, tmp_path: pathlib.Path) -> None:
    with mounts.ext4(place.home, 32 << 20) as small:
        done = place.run(small, "--io-size", "64M", expect=1)
        assert_says(done, str(small), "No space left on device", "smaller --io-size")
        assert [path.name for path in small.iterdir()] == ["lost+found"]


@pytest.mark.root
def test_a_folder_that_cannot_be_written_is_one_clear_line(place: Place) -> None:
    with mounts.read_only(place.folder, place.home / "read-only") as folder:
        assert_says(place.run(folder, expect=1), str(folder), "Read-only file system")


def test_a_folder_that_nobody_may_write_to_is_one_clear_line(place: Place) -> None:
    done = place.run("/sys", expect=1)
    assert_says(done, "/sys: Permission denied", "a folder that you may write to")


def test_a_result_that_could_not_be_stored_is_known_before_the_run(place: Place) -> None:
    place.environment["TENSORFERRY_PROFILES"] = str(place.sweep / "below")
    done = place.run_small(expect=1)
    assert_says(done, f"{place.sweep}/below: ", "--no-save")
    assert done.stdout == ""
    place.run_small("--no-save")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_tune_leaves_nothing(place: Place, number: signal.Signals) -> None:
    with place.start_long() as process:
        assert process.stdout is not None
        assert "about " in process.stdout.readline()
        assert "full sweep" in process.stdout.readline()
        process.send_signal(number)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    (line,) = errors.strip().splitlines()
    assert "interrupted" in line
    assert not place.store.exists()


def test_names_are_shown_as_they_are_and_move_no_cursor(place: Place) -> None:
    """Where rich would take [/x] for the end of a style, and a terminal [31m for red."""
    home = place.home / "[/x][red]"
    home.mkdir(parents=True)
    place.store = home / "pro\x1b[31mfiles.json"
    place.environment["TENSORFERRY_PROFILES"] = str(place.store)
    shown = f"{home}/pro\\x1b[31mfiles.json"
    for option in ("--show", "--forget"):
        assert place.run(option).stdout == f"no settings are stored in {shown}\n"
    names = {"type": "tmpfs", "uuid": None, "fsid": None, "source": "x", "mount_point": "/[/y]\x1b"}
    settings = dataclasses.asdict(Settings(engine="threads"))
    rates = {"write": {"median": 10**400}, "read": {"median": 10**9}}
    entry = {"file_system": names, "settings": settings, "found": {"rates": rates, "when": "[/z]"}}
    place.store.write_text(json.dumps({"version": 1, "profiles": [entry]}))
    done = place.run("--show")
    assert "/[/y]\\x1b (tmpfs)" in done.stdout
    assert "[/z]" in done.stdout
    assert "1.00" in done.stdout
    assert done.stdout.endswith(f"in {shown}\n")
    assert place.run("--forget").stdout == "forgotten: /[/y]\\x1b\n"


def test_warnings_and_places_are_shown_as_they_are(
    place: Place, tmpfs_directory: pathlib.Path
) -> None:
    folder = tmpfs_directory / "[/x]\x1b"
    folder.mkdir(parents=True)
    done = place.run(folder, *place.small)
    assert f"Note: {tmpfs_directory}/[/x]\\x1b is in memory" in done.stdout
    done = place.run_theirs("--nvme_dir", folder, *place.small, "--log_dir", place.home)
    assert "Running DeepNVMe" in done.stdout


def test_links_that_lead_in_a_circle_are_one_clear_line(place: Place) -> None:
    circle = place.home / "circle"
    circle.symlink_to(circle)
    theirs = place.run_theirs("--nvme_dir", circle, expect=2)
    for done in (place.run(circle, expect=2), theirs):
        assert_says(done, f": the folder '{circle}' does not exist")
    place.environment["TENSORFERRY_PROFILES"] = str(circle)
    assert_says(place.run_small(expect=1), f"{circle}: ")
    assert_says(place.run("--forget", expect=1), f"{circle}: ")


# ds_nvme_tune


def test_a_log_that_cannot_be_written_costs_no_result(place: Place) -> None:
    (place.home / "tune.json").mkdir()
    arguments = ("--nvme_dir", place.folder, *place.small, "--log_dir", place.home)
    done = place.run_theirs(*arguments, expect=1)
    assert_says(done, f"--log_dir: {place.home}/tune.json: Is a directory")
    assert '"aio": {' in done.stdout


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


def test_options_of_ds_nvme_tune_that_cannot_be_are_refused_with_the_reason(place: Place) -> None:
    place.environment["TENSORFERRY_LIBCUFILE"] = "/nonexistent/libcufile.so.0"
    done = place.run_theirs(
        *("--nvme_dir", place.folder, "/nonexistent", "--gpu", "--gds", "--loops", 0),
        *("--io_size", "10", "--no_read", "--no_write"),
        expect=2,
    )
    lines = done.stderr.strip().splitlines()
    for word in ("/nonexistent", "--gds: ", "--loops: 0", "--io_size: 10", "--no_read"):
        assert any(word in line for line in lines), word
    assert len(lines) == 5


@pytest.mark.parametrize("option", ["--gpu", "--gds"])
def test_gpus_are_refused_with_the_reason_where_there_is_none(option: str, place: Place) -> None:
    if gpus.why_no_gpu() is None:
        pytest.skip("there is a GPU")
    for name, done in (
        ("tensorferry tune", place.run_small(option, expect=2)),
        (
            "tensorferry-ds-nvme-tune",
            place.run_theirs("--nvme_dir", place.folder, option, expect=2),
        ),
    ):
        assert done.stderr == f"{name}: {option}: {gpus.why_no_gpu()}\n"


@pytest.mark.gpu
@pytest.mark.parametrize("option", ["--gpu", "--gds"])
def test_tuning_with_cuda_tensors_ends_with_settings(option: str, place: Place) -> None:
    if reason := gpus.why_no_gpu() or (gpus.why_no_gds() if option == "--gds" else None):
        pytest.skip(reason)
    done = place.run_small(option)
    section = re.search(r"\{\n.*?\n\}", done.stdout, re.DOTALL)
    assert section is not None
    assert json.loads(section[0])["aio"].get("use_gds", False) is (option == "--gds")


def test_a_log_folder_of_ds_nvme_tune_that_cannot_be_made_is_one_clear_line(place: Place) -> None:
    arguments = ("--nvme_dir", place.folder, "--log_dir", place.sweep / "below")
    done = place.run_theirs(*arguments, expect=1)
    assert_says(done, "--log_dir", "Not a directory")
