"""Runs DeepSpeed's own tests of checkpoints, async I/O, pinned memory and NVMe offload, with both engines.

The tests come from a checkout of DeepSpeed, and test the installed DeepSpeed. The exit status is 1 if a test passes
with DeepSpeed's engine, but fails or is skipped with tensorferry.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

# Files and folders in tests/unit of newer and older checkouts, each with a keyword for the relevant tests. An empty
# keyword selects all tests.
SUITES = {
    "checkpoint": "",
    "v1/nvme": "",
    "v1/pin_memory": "",
    "ops/aio": "",
    "utils/test_byte_cast.py": "",
    "utils/test_pin_memory_tracker.py": "",
    "runtime/zero/test_nvme_checkpointing.py": "",
    "runtime/zero/test_zero_tensor_fragment.py": "nvme",
    "v1/zero/test_zero_user_backward.py": "Nvme",
    "v1/compile/test_compile_zero.py": "nvme",
    "inference/quantization/test_intX_quantization.py": "nvme",
}

ENGINES = {"DeepSpeed": "0", "tensorferry": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path, help="a checkout of DeepSpeed")
    parser.add_argument(
        "suites", nargs="*", help="files or folders in tests/unit (default: all relevant ones)"
    )
    options = parser.parse_args()
    tests = options.source.resolve() / "tests"
    suites = {name: SUITES.get(name, "") for name in options.suites} or SUITES
    found = {name: keyword for name, keyword in suites.items() if (tests / "unit" / name).exists()}
    if not found:
        parser.error(f"source: {tests / 'unit'} contains none of {', '.join(suites)}")

    outcomes: dict[str, dict[str, str]] = {}
    for engine, variable in ENGINES.items():
        outcomes[engine] = {}
        for name, keyword in found.items():
            print(f"== {name} on {engine}", flush=True)
            outcomes[engine] |= run(tests, name, keyword, variable)
    return report(outcomes["DeepSpeed"], outcomes["tensorferry"])


def run(tests: Path, name: str, keyword: str, variable: str) -> dict[str, str]:
    """Run a file or folder of tests, and return the outcome of each test."""
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.xml"
        command = [sys.executable, "-m", "pytest", f"unit/{name}", f"--junitxml={result}", "-q"]
        # DeepSpeed's pytest.ini deselects tests that must not run concurrently with others. Here all tests run one
        # after the other, so "addopts=" drops that option.
        command += ["-p", "no:cacheprovider", "-o", "addopts=", f"--basetemp={scratch}/files"]
        environment = {"PYTHONPATH": str(tests), "TENSORFERRY_DEEPSPEED": variable}
        done = subprocess.run(
            [*command, *(["-k", keyword] if keyword else [])],
            cwd=tests,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        print(done.stdout.rstrip().rpartition("\n")[2], flush=True)
        cases = ElementTree.parse(result).iter("testcase") if result.exists() else []
        found = {f"{case.get('classname')}::{case.get('name')}": outcome(case) for case in cases}
        return found or {name: f"failed: pytest ended with {done.returncode}"}


def outcome(case: ElementTree.Element) -> str:
    for kind in ("failure", "error", "skipped"):
        element = case.find(kind)
        if element is not None:
            return f"{kind}: {(element.get('message') or '').partition(chr(10))[0]}"
    return "passed"


def report(theirs: dict[str, str], ours: dict[str, str]) -> int:
    """Print the counts, and the tests with a worse outcome with tensorferry. Return the exit status."""
    for engine, outcomes in (("DeepSpeed", theirs), ("tensorferry", ours)):
        kinds = [text.partition(":")[0] for text in outcomes.values()]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        print(f"{engine}: {counts}")
    worse = [
        f"{name}: {theirs[name]} with DeepSpeed's engine, {ours.get(name, 'missing')} with tensorferry"
        for name in theirs
        if ours.get(name) != "passed"
        and (theirs[name] == "passed" or not ours.get(name, "").startswith(theirs[name][:7]))
    ]
    print("\n".join(worse) if worse else "No test has a worse outcome with tensorferry.")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
