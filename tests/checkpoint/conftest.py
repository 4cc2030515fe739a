"""Fixtures for the tests of checkpoints."""

import importlib.util

from tests.faults.conftest import _faultfs, faultfs

__all__ = ["_faultfs", "faultfs"]

# All of this needs torch, which the project's tests can do without.
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]
