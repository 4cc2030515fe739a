"""Builds tensorferry's wheels, and repairs them for installation on other machines.

A wheel for CPython 3.12 works with all later versions (stable ABI). Versions 3.10 and 3.11, and
free-threaded interpreters, need separate wheels. For each wheel, one of the available interpreters
is used. Each wheel is built in a separate environment. auditwheel then adds the oldest manylinux
tag that this machine's C library allows. With --test, each wheel is installed in an empty
environment, where the tests for installed packages run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST_STABLE_ABI = (3, 12)
OLDEST_SUPPORTED = (3, 10)

_DESCRIBE = """
import sys, sysconfig
gil_disabled = sysconfig.get_config_var("Py_GIL_DISABLED") or 0
print(sys.implementation.name, *sys.version_info[:2], gil_disabled)
"""


def wheel_flavour(python: str) -> str | None:
    """Return the kind of wheel that `python` builds ("cp310", "abi3", "cp314t"), or None if it cannot build a wheel."""
    try:
        done = subprocess.run(
            [python, "-c", _DESCRIBE], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    name, major, minor, gil_disabled = done.stdout.split()
    version = (int(major), int(minor))
    if name != "cpython" or version < OLDEST_SUPPORTED:
        return None
    if gil_disabled == "1":
        return f"cp{major}{minor}t"
    return "abi3" if version >= FIRST_STABLE_ABI else f"cp{major}{minor}"


def available_pythons() -> list[str]:
    """Return every python3.N and python3.Nt on PATH and in pyenv, oldest first, and at the end this interpreter."""
    folders = [Path(folder) for folder in os.get_exec_path()]
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=False)
        folders += Path(root.stdout.strip()).glob("versions/*/bin")
    found = [
        entry
        for folder in folders
        for entry in folder.glob("python3.*")
        if re.fullmatch(r"python3\.\d+t?", entry.name)
    ]
    found.sort(key=lambda entry: int(entry.name.rstrip("t").partition(".")[2]))
    return [*map(str, found), sys.executable]


def select_pythons(pythons: list[str]) -> dict[str, str]:
    """Return the first interpreter for each kind of wheel that `pythons` can build."""
    chosen: dict[str, str] = {}
    for python in pythons:
        flavour = wheel_flavour(python)
        if flavour is not None:
            chosen.setdefault(flavour, python)
    return chosen


def build_wheel(python: str, source: Path, out: Path, *, isolated: bool) -> Path:
    """Build the wheel of `source` with `python`, repair it, and move it to `out`."""
    with tempfile.TemporaryDirectory(prefix="tensorferry-wheel-") as scratch_name:
        scratch = Path(scratch_name)
        builder = python
        if isolated:
            subprocess.run([python, "-m", "venv", scratch / "venv"], check=True)
            builder = str(scratch / "venv/bin/python")
        command: list[str | Path] = [builder, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        if not isolated:
            command.append("--no-build-isolation")
        _run_quietly([*command, "--wheel-dir", scratch / "raw", source])
        (raw,) = (scratch / "raw").glob("*.whl")
        _run_quietly(
            [sys.executable, "-m", "auditwheel", "repair", "-w", scratch / "repaired", raw]
        )
        (repaired,) = (scratch / "repaired").glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(repaired, out / repaired.name))


def check_wheel(python: str, wheel: Path) -> None:
    """Install `wheel` in an empty environment of `python`, and run the tests there. Exit if they fail."""
    with tempfile.TemporaryDirectory(prefix="tensorferry-installed-") as scratch:
        venv = Path(scratch) / "venv"
        subprocess.run([python, "-m", "venv", venv], check=True)
        installed = venv / "bin/python"
        _run_quietly([installed, "-m", "pip", "--isolated", "install", "--no-index", wheel])
        _run_quietly([installed, ROOT / "tests/packaging/test_installed.py"])


def build_sdist(out: Path) -> None:
    """Build the source distribution in `out`."""
    _run_quietly([sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", out, ROOT])


def _run_quietly(command: list[str | Path]) -> None:
    """Run `command`, and print its output only if it fails."""
    done = subprocess.run(
        command,
        env=_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.stderr.write(done.stdout)
        sys.exit(f"failed: {' '.join(map(str, command))}")


def _env() -> dict[str, str]:
    """Return this process's environment, with the folder of this interpreter first on PATH."""
    tools = str(Path(sys.executable).parent)
    path = os.pathsep.join([tools, os.environ.get("PATH", os.defpath)])
    return {"SOURCE_DATE_EPOCH": _last_commit(), **os.environ, "PATH": path}


def _last_commit() -> str:
    """Return the time of the last commit, as the time of files in archives. Without Git, it is ZIP's earliest date."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "315532800"


def main() -> int:
    """Run the command line, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "pythons", nargs="*", help="interpreters to build for (default: all available)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the wheels")
    parser.add_argument("--sdist", action="store_true", help="also build the source distribution")
    parser.add_argument("--test", action="store_true", help="install each wheel, and test it")
    parser.add_argument(
        "--no-isolation",
        action="store_true",
        help="build with the packages that the interpreter has installed",
    )
    arguments = parser.parse_args()

    chosen = select_pythons(arguments.pythons or available_pythons())
    if not chosen:
        print("no working interpreter of CPython 3.10 or later was found", file=sys.stderr)
        return 1
    if arguments.sdist:
        build_sdist(arguments.out)
    for flavour, python in chosen.items():
        print(f"{flavour}: building with {python}", flush=True)
        wheel = build_wheel(python, ROOT, arguments.out, isolated=not arguments.no_isolation)
        print(f"{flavour}: {wheel.name}", flush=True)
        if arguments.test:
            check_wheel(python, wheel)
            print(f"{flavour}: the tests pass in an empty environment", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
