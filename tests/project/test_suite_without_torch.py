"""The suite can be collected without torch, and the tests that do not need it run."""

from __future__ import annotations

import sys

from tests.support.child import ROOT
from tests.support.commands import run

# Python raises ImportError for a module that is None in sys.modules.
COLLECT = """
import sys
sys.modules["torch"] = None
import pytest
sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "tests"]))
"""


def test_the_suite_is_collected_without_torch() -> None:
    done = run(sys.executable, "-c", COLLECT, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    transfers = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/transfers/test_*.py")}
    collected = {line.partition(":")[0] for line in done.stdout.splitlines()}
    assert transfers - collected == {"tests/transfers/test_tensors.py"}
