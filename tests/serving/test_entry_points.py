"""What programs that serve models find of us. That they can use it, test_vllm.py and test_sglang.py see."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util

import pytest

GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}


@pytest.mark.parametrize("program", GROUPS)
def test_the_package_declares_a_plugin(program: str) -> None:
    entry_points = importlib.metadata.distribution("tensorferry").entry_points
    (ours,) = entry_points.select(group=GROUPS[program])
    assert (ours.name, ours.value) == ("tensorferry", f"tensorferry.serving.{program}:register")


@pytest.mark.parametrize("program", GROUPS)
def test_without_the_program_the_import_says_what_is_missing(program: str) -> None:
    if importlib.util.find_spec(program):
        pytest.skip(f"{program} is installed")
    with pytest.raises(
        ImportError, match=rf"needs .*No module named '{program}.*pip install"
    ) as info:
        importlib.import_module(f"tensorferry.serving.{program}")
    assert info.value.name == program
