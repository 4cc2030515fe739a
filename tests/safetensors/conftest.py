"""Leaves out the files of this folder that need torch, if torch is not installed."""

import importlib.util
import pathlib

WITHOUT_TORCH = {"test_checksums.py", "test_header.py"}

collect_ignore = [
    each.name
    for each in pathlib.Path(__file__).parent.glob("test_*.py")
    if each.name not in WITHOUT_TORCH and importlib.util.find_spec("torch") is None
]
