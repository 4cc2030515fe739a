"""Inserts defects into a copy of the tree, one at a time, and runs the tests that must detect them: `make mutants`.

The defects, called mutants, and their tests are in tests/project/mutants.py. The copy, with a separate build of the
core, is in build/mutants. It is kept between runs, so only the files that a defect changes are compiled again. A defect
is detected (the mutant is "killed") if a test fails, the test's process crashes, or pytest stops a test that hangs. The
exit status is 1 unless all defects are detected.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.project.mutants import MUTANTS, Mutant
from tests.support.leaks import SETTLE_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build/mutants"
TREE = WORK / "tree"
CORE = WORK / "core"
LIMIT_SECONDS = int(SETTLE_TIMEOUT_S) + 100  # for each test of a mutant

# The content of sitecustomize.py. Child processes of tests must also import the copy, and not the working tree.
# Python's site module installs the import hook of the editable install, and then runs this file, which removes the
# hook.
SITE = """import sys
sys.meta_path[:] = [each for each in sys.meta_path if not type(each).__module__.startswith("_editable_")]
"""


class Outcome(NamedTuple):
    """The outcome of tests.

    The verdict is "passed" or "failed". Two other verdicts prove nothing about a mutant: "HANGS" (the tests did not
    end within the time limit) and "BROKEN" (pytest itself failed).
    """

    verdict: str
    detail: str


def main(names: Sequence[str]) -> int:
    known = {mutant.name: mutant for mutant in MUTANTS}
    if unknown := set(names) - set(known):
        print(f"unknown mutants: {', '.join(unknown)} (known: {', '.join(known)})")
        return 2
    mutants = [known[name] for name in names] or MUTANTS
    copy_tree()
    build(configure=True)
    outcome = run_tests([test for mutant in mutants for test in mutant.tests])
    print(f"without any mutant: {outcome.verdict}, {outcome.detail}", flush=True)
    if outcome.verdict != "passed":
        return 1
    alive = 0
    for mutant in mutants:
        begin = time.monotonic()
        with applied(mutant):
            build()
            outcome = run_tests(mutant.tests)
        word = {"failed": "killed", "passed": "SURVIVED"}.get(outcome.verdict, outcome.verdict)
        seconds = time.monotonic() - begin
        print(f"{word:8} {seconds:4.0f} s  {mutant.name}: {outcome.detail}", flush=True)
        alive += outcome.verdict != "failed"
    print(f"{len(mutants) - alive} of {len(mutants)} mutants were killed")
    return 1 if alive else 0


def copy_tree() -> None:
    """Update the copy to the working tree. Unchanged files keep their times, so ninja does not compile them again."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(listing, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    names = {name for name in output.split("\0") if name and (ROOT / name).is_file()}
    for folder in ("csrc", "src", "tests"):
        for path in list((TREE / folder).rglob("*.*")):
            if path.suffix in (".py", ".cpp", ".h") and str(path.relative_to(TREE)) not in names:
                path.unlink()
    for name in names:
        source, target = ROOT / name, TREE / name
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        shutil.copymode(source, target)
    (WORK / "site").mkdir(exist_ok=True)
    (WORK / "site/sitecustomize.py").write_text(SITE)


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    path = TREE / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(
            f"{mutant.name}: {mutant.file} contains its text {text.count(mutant.old)} times, not once"
        )
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        path.write_text(text)


def build(*, configure: bool = False) -> None:
    if configure:
        options = ["Python_EXECUTABLE=" + sys.executable, "TENSORFERRY_BUILD_TESTS=ON"]
        run("cmake", "-S", TREE, "-B", CORE, "-G", "Ninja", *(f"-D{option}" for option in options))
    run("cmake", "--build", CORE)
    for module in CORE.glob("_core*.so"):
        link = TREE / "src/tensorferry" / module.name
        if not link.is_symlink():
            link.symlink_to(module)


def run(*command: str | Path) -> None:
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


def run_tests(tests: Sequence[str]) -> Outcome:
    """Run tests until one fails. All Python tests run in one process."""
    in_python = [test for test in dict.fromkeys(tests) if not test.startswith("tests/cpp/")]
    in_cpp = [test for test in dict.fromkeys(tests) if test not in in_python]
    commands = []
    if in_python:
        pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        commands.append([*pytest, *in_python])
    for test in in_cpp:
        name = test.partition("::")[2].replace(",", "\\,")
        commands.append([str(CORE / "tensorferry_cpp_tests"), f"--test-case={name}"])
    outcome = Outcome("passed", "")
    for command in commands:
        outcome = run_command(command, LIMIT_SECONDS * len(tests))
        if outcome.verdict != "passed":
            break
    return outcome


def run_command(command: list[str], limit_seconds: int) -> Outcome:
    tests = subprocess.Popen(
        command,
        cwd=TREE,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = tests.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        return Outcome("HANGS", f"still running after {limit_seconds} s")
    finally:
        if tests.poll() is None:
            os.killpg(tests.pid, signal.SIGKILL)
            tests.communicate()
    if tests.returncode == 0:
        return Outcome("passed", output.splitlines()[-1])
    if tests.returncode == 1 or tests.returncode < 0:  # a test failed, or its process crashed
        lines = re.findall(r"^(?:FAILED|ERROR|TEST CASE:) .*|Timeout", output, re.MULTILINE)
        return Outcome("failed", lines[-1] if lines else f"status {tests.returncode}")
    return Outcome("BROKEN", f"status {tests.returncode}\n{output}")


def environment() -> dict[str, str]:
    """Return the environment for builds and tests of the copy."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    modules = os.pathsep.join([str(WORK / "site"), str(TREE / "src")])
    return os.environ | {"PATH": programs, "PYTHONPATH": modules}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
