"""Builds tensorferry's wheels, and repairs them so that they install on other machines.

A wheel for CPython 3.12 serves every later one (the stable ABI); 3.10, 3.11 and free-threaded
interpreters need their own. So of the interpreters at hand, one is taken for each wheel there is.
Each wheel is built in an environment of its own and repaired by auditwheel, which gives it the
oldest manylinux tag that this machine's C library allows. With --test it is then installed where
nothing else is, and the tests of installed packages run there.
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
    """Which wheel `python` would build ("cp310", "abi3", "cp314t"); None for none."""
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


def pythons_at_hand() -> list[str]:
    """Every python3.N and python3.Nt on PATH and in pyenv, oldest first, and this one."""
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


def one_for_each_wheel(pythons: list[str]) -> dict[str, str]:
    """The first interpreter for each wheel that `pythons` can build."""
    chosen: dict[str, str] = {}
    for python in pythons:
        flavour = wheel_flavour(python)
        if flavour is not None:
            chosen.setdefault(flavour, python)
    return chosen


def build_wheel(python: str, source: Path, out: Path, *, isolated: bool) -> Path:
    """Builds `source`'s wheel with `python`, repairs it and moves it into `out`."""
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


def try_wheel(python: str, wheel: Path) -> None:
    """Installs `wheel` into an empty environment of `python`; exits unless its tests pass there."""
    with tempfile.TemporaryDirectory(prefix="tensorferry-installed-") as scratch:
        venv = Path(scratch) / "venv"
        subprocess.run([python, "-m", "venv", venv], check=True)
        installed = venv / "bin/python"
        _run_quietly([installed, "-m", "pip", "--isolated", "install", "--no-index", wheel])
        _run_quietly([installed, ROOT / "tests/packaging/test_installed.py"])


def build_sdist(out: Path) -> None:
    """Packs the sources into `out`."""
    _run_quietly([sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", out, ROOT])


def _run_quietly(command: list[str | Path]) -> None:
    """Runs `command`; shows what it printed only if it failed."""
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
    """This process's environment, in which the tools beside this interpreter are found first."""
    tools = str(Path(sys.executable).parent)
    path = os.pathsep.join([tools, os.environ.get("PATH", os.defpath)])
    return {"SOURCE_DATE_EPOCH": _last_commit(), **os.environ, "PATH": path}


def _last_commit() -> str:
    """When the sources were committed, which is what their archives say; outside of a checkout, ZIP's first day."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "315532800"


def main() -> int:
    """Builds what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "pythons", nargs="*", help="interpreters to build for (default: all at hand)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the wheels")
    parser.add_argument("--sdist", action="store_true", help="pack the sources too")
    parser.add_argument("--test", action="store_true", help="install each wheel, and test it")
    parser.add_argument(
        "--no-isolation", action="store_true", help="build with what the interpreter has installed"
    )
    arguments = parser.parse_args()

    chosen = one_for_each_wheel(arguments.pythons or pythons_at_hand())
    if not chosen:
        print("no interpreter that runs and is CPython 3.10 or later", file=sys.stderr)
        return 1
    if arguments.sdist:
        build_sdist(arguments.out)
    for flavour, python in chosen.items():
        print(f"{flavour}: building with {python}", flush=True)
        wheel = build_wheel(python, ROOT, arguments.out, isolated=not arguments.no_isolation)
        print(f"{flavour}: {wheel.name}", flush=True)
        if arguments.test:
            try_wheel(python, wheel)
            print(f"{flavour}: works where it is installed alone", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
