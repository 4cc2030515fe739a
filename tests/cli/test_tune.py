"""`tensorferry tune` and `tensorferry-ds-nvme-tune` as their users run them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tensorferry.cli import ds_nvme_tune
from tensorferry.transfer import profiles
from tensorferry.transfer.settings import Settings
from tensorferry.tuning import gpus, storing
from tensorferry.tuning import tune as tuning
from tests.cli.running import Done, here, run
from tests.support import mounts, required
from tests.support.child import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

required.module("typer")
required.module("rich")

SMALL = {"io_engine": ["threads"], "block_size": ["256K", "1M"], "queue_depth": [4]}
BAD = Settings(32 << 10, 1, False, True, 1, "threads")


class Place:
    """A folder to tune, a user's home, and a small sweep."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        self.home = home
        self.store = home / "profiles.json"
        self.sweep = home / "sweep.json"
        self.sweep.write_text(json.dumps(SMALL))
        # With underscores, as both commands understand them.
        self.small = ("--io_size", "16M", "--sweep_config", self.sweep)
        self.environment = {"TENSORFERRY_PROFILES": str(self.store)}

    def run(self, *arguments: object, expect: int = 0) -> Done:
        return run("tune", *arguments, expect=expect, **self.environment)

    def run_small(self, *arguments: object, expect: int = 0, seconds: int = 1) -> Done:
        how = (*self.small, "--seconds", seconds)
        return self.run(self.folder, *how, *arguments, expect=expect)

    def run_theirs(self, *arguments: object, expect: int = 0) -> Done:
        return here(ds_nvme_tune.main, *arguments, expect=expect, **self.environment)

    def keep(self, direction: str = "read", memory: str = "host") -> None:
        system = profiles.file_system_of(self.folder)
        kept = profiles.Profile(system, BAD, direction, memory)
        storing.store(self.store, system, {kept.use: kept})


@pytest.fixture
def place(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    yield Place(directory, tmp_path_factory.mktemp("home"))
    assert list(directory.iterdir()) == [], "left files behind"


def section_of(done: Done) -> dict[str, Any]:
    section = re.search(r"\{\n.*?\n\}", done.stdout, re.DOTALL)
    assert section is not None
    found: dict[str, Any] = json.loads(section[0])["aio"]
    return found


def test_tune_prints_what_to_use_and_stores_what_is_proven(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With default settings so bad that any other is surely better."""
    monkeypatch.setattr(tuning, "default_settings", lambda: BAD)
    done = place.run_small("--no-write", seconds=300)
    assert "\x1b" not in done.stdout  # no control codes on a pipe
    assert re.match(r"0 %, at most .* left: preparing\n", done.stdout)
    assert re.search(r"left: .*: read\n", done.stdout)
    assert re.search(r"times as fast as the default, at least \d+\.\d+, in \d+ pairs", done.stdout)
    aio = section_of(done)
    assert set(aio) == set(Settings._fields) - {"engine"}
    assert aio["single_submit"] is False
    (profile,) = profiles.load(place.store)
    assert profile.use == ("read", "host")
    assert profile.settings._asdict() == aio | {"engine": "threads"}
    assert profile.found["gain"]["low"] > 1
    assert profile.found["rates"]["low"] <= profile.found["rates"]["high"]
    assert "Stored for" in done.stdout


def test_tune_says_that_nothing_is_proven_and_drops_what_was_and_nothing_else(place: Place) -> None:
    others = [("write", "host"), ("read", "gpu0")]
    for use in (("read", "host"), *others):
        place.keep(*use)
    place.sweep.write_text(json.dumps({"io_engine": ["threads"], "block_size": ["4K"]}))
    done = place.run_small("--no-write")
    assert done.stdout.count("the default settings") == 1
    assert "Dropped the stored settings for" in done.stdout
    assert [profile.use for profile in profiles.load(place.store)] == others


def test_what_was_found_is_shown_and_forgotten(place: Place) -> None:
    assert "no settings are stored" in place.run("--show").stdout
    place.keep()
    for arguments in (["--show"], ["--show", place.folder]):
        shown = place.run(*arguments).stdout
        assert "read host" in shown
        assert "threads 32K x 1" in shown
        assert str(place.store) in shown
    for folders in ([], [place.folder, place.folder.parent, place.folder]):
        (found,) = json.loads(place.run("--show", "--json", *folders).stdout)
        assert found["settings"] == BAD._asdict()
    assert "(read host)" in place.run("--forget", place.folder).stdout
    assert not place.store.exists()
    assert place.run("--forget", "--json").stdout == "[]\n"


def test_profiles_may_be_switched_off(place: Place) -> None:
    place.environment["TENSORFERRY_PROFILES"] = "0"
    assert "TENSORFERRY_PROFILES=0" in place.run_small("--quick", "--no-write").stdout
    place.run("--show", expect=1)


def test_all_measurements_are_printed_where_asked(place: Place) -> None:
    content = json.loads(place.run_small("--json", "--no_save").stdout)
    assert content["settings"]["block_size"] > 0
    assert content["deepspeed"]["aio"]["overlap_events"] is True
    assert content["rates"]["read"]["low"] <= content["rates"]["read"]["high"]
    assert {each["direction"] for each in content["measurements"]} == {"read", "write"}
    assert sum(len(each["seconds"]) for each in content["measurements"]) >= 2 * 3 * 3
    assert [each["direction"] for each in content["found"]] == ["write", "read"]
    assert not place.store.exists()


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


def test_a_result_that_could_not_be_stored_is_known_before_the_run(place: Place) -> None:
    place.environment["TENSORFERRY_PROFILES"] = str(place.sweep / "below")
    done = place.run_small(expect=1)
    assert done.stdout == "", "nothing was measured"
    assert_says(done, f"{place.sweep}/below: ", "--no-save")
    done = place.run_theirs(
        "--nvme_dir", place.folder, "--log_dir", place.sweep / "below", expect=1
    )
    assert_says(done, "--log-dir", "Not a directory")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_tune_leaves_nothing(place: Place, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "tensorferry", "tune", str(place.folder), "--seconds=3000"]
    environment = os.environ | place.environment
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, cwd=ROOT, text=True, **pipes) as process:
        assert process.stdout is not None
        while not process.stdout.readline().endswith(": write\n"):
            assert process.poll() is None
        process.send_signal(number)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    (line,) = errors.strip().splitlines()
    assert "interrupted" in line
    assert not place.store.exists()


def test_names_are_shown_as_they_are_and_move_no_cursor(place: Place) -> None:
    """rich would parse [/x] as the end of a style, and a terminal [31m as red."""
    home = place.home / "[/x][red]"
    home.mkdir(parents=True)
    place.store = home / "pro\x1b[31mfiles.json"
    place.environment["TENSORFERRY_PROFILES"] = str(place.store)
    shown = f"{home}/pro\\x1b[31mfiles.json"
    for option in ("--show", "--forget"):
        assert place.run(option).stdout == f"no settings are stored in {shown}\n"
    system = profiles.FileSystem("tmpfs", None, None, "x", "/[/y]\x1b")
    found = {"rates": {"median": 10**400}, "gain": {"median": 1.25}, "when": "[/z]"}
    odd = profiles.Profile(system, Settings(engine="threads"), "read", "[/g]", found)
    storing.store(place.store, system, {odd.use: odd})
    done = place.run("--show")
    for words in ("/[/y]\\x1b (tmpfs)", "[/z]", "1.25", "read [/g]"):
        assert words in done.stdout
    assert done.stdout.endswith(f"in {shown}\n")
    assert place.run("--forget").stdout == "forgotten: /[/y]\\x1b (read [/g])\n"


def test_links_that_lead_in_a_circle_are_one_clear_line(place: Place) -> None:
    circle = place.home / "circle"
    circle.symlink_to(circle)
    assert_says(place.run(circle, expect=2), f"the folder '{circle}' does not exist")
    place.environment["TENSORFERRY_PROFILES"] = str(circle)
    assert_says(place.run("--forget", expect=1), f"{circle}: ")


# ds_nvme_tune


def test_command_lines_of_ds_nvme_tune_work_unchanged(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ds_nvme_tune.command.make_job, "__defaults__", (1.0,))
    sweep = place.home / "theirs.json"
    content = {"block_size": ["1M"], "queue_depth": [4], "sequential_requests": [True, False]}
    content |= {"single_submit": [False, True], "io_parallel": [1]}
    sweep.write_text(json.dumps(content))
    logs = place.home / "logs"
    done = place.run_theirs(
        *("--nvme_dir", "/nonexistent"),  # the last one counts
        *("--nvme_dir", place.folder, "--io_size", "16M", "--loops", 2, "--log_dir", logs),
        *("--sweep_config", sweep, "--flush_page_cache", "--verbose", "--no_save"),
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
