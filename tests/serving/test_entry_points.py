"""The entry points that programs for serving models discover; test_vllm.py and test_sglang.py test their use."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support import commands

if TYPE_CHECKING:
    import pathlib

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
        ImportError, match=rf"requires .*No module named '{program}.*pip install"
    ) as info:
        importlib.import_module(f"tensorferry.serving.{program}")
    assert info.value.name == program


LOADERS = """
LOADERS = {"auto": None}


class BaseModelLoader:
    pass


def register_model_loader(name):
    def register(loader):
        assert issubclass(loader, BaseModelLoader)
        assert name not in LOADERS
        LOADERS[name] = loader

    return register


from vllm.model_executor.model_loader import default_loader
"""
# The parts of vLLM that the plug-in imports, in the modules of vLLM 0.31.
VLLM = {
    "__init__": "",
    "distributed": "def get_tp_group(): ...",
    "model_executor/__init__": "",
    "model_executor/model_loader/__init__": LOADERS,
    "model_executor/model_loader/default_loader": (
        "from vllm.model_executor.model_loader import BaseModelLoader\n"
        "class DefaultModelLoader(BaseModelLoader): ..."
    ),
    "model_executor/model_loader/ep_weight_filter": "def should_skip_weight(): ...",
}


def run_with_vllm(folder: pathlib.Path, program: str, **changed: str) -> str:
    """Run a program with VLLM as the package `vllm`, and return its output."""
    for name, text in (VLLM | changed).items():
        path = folder / "vllm" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    ended = commands.run(
        sys.executable, "-c", program, env=os.environ | {"PYTHONPATH": str(folder)}
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def test_vllms_plugin_imports_no_loaders(tmp_path: pathlib.Path) -> None:
    program = """
import sys
from tensorferry.serving.vllm import register
register()
print([name for name in sys.modules if "loader" in name and name.startswith(("vllm", "tensorferry"))])
print({"torch", "numpy", "tensorferry.safetensors", "tensorferry.serving.weights"} & {*sys.modules})
"""
    assert run_with_vllm(tmp_path, program) == "[]\nset()\n"


@pytest.mark.parametrize("first", ["register", "import"])
def test_vllms_loaders_have_ours_once_they_are_imported(tmp_path: pathlib.Path, first: str) -> None:
    imported = "import vllm.model_executor.model_loader as theirs\n"
    registered = "from tensorferry.serving.vllm import register\nregister()\n"
    parts = [registered * 2, imported] if first == "register" else [imported, registered]
    shown = "print({name: loader and loader.__module__ for name, loader in theirs.LOADERS.items()})"
    printed = run_with_vllm(tmp_path, "".join(parts) + shown)
    assert printed == "{'auto': None, 'tensorferry': 'tensorferry.serving.vllm_loader'}\n"


def test_another_vllm_keeps_its_own_loaders_and_says_what_is_missing(
    tmp_path: pathlib.Path,
) -> None:
    program = """
from tensorferry.serving.vllm import register
register()
from vllm.model_executor.model_loader import LOADERS
print(LOADERS)
"""
    printed = run_with_vllm(
        tmp_path, program, **{"model_executor/model_loader/ep_weight_filter": "other = 1"}
    )
    assert "{'auto': None}" in printed
    assert "load format 'tensorferry' requires vLLM 0.31 or later: cannot import name" in printed
