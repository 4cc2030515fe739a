"""install(): libraries that import safetensors get our functions, before or after the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.safetensors.files import saved
from tests.support import required
from tests.support.child import call

if TYPE_CHECKING:
    import pathlib

PROGRAMS = "tests.safetensors.installed_programs"
THEIRS = {
    "safe_open": "builtins",
    "in_torch": "builtins",
    "in_numpy": "builtins",
    "torch": "safetensors.torch",
    "load": "safetensors.torch",
    "numpy": "safetensors.numpy",
}
OURS = {
    "safe_open": "tensorferry.safetensors.opened",
    "in_torch": "tensorferry.safetensors.opened",
    "in_numpy": "tensorferry.safetensors.opened",
    "torch": "tensorferry.safetensors.torch",
    "load": "tensorferry.safetensors.torch",
    "numpy": "tensorferry.safetensors.numpy",
}


@pytest.mark.parametrize(("value", "found"), [("", THEIRS), ("0", THEIRS), ("1", OURS)])
def test_the_variable_reaches_whoever_imports_safetensors(
    value: str, found: dict[str, str]
) -> None:
    environment = {"TENSORFERRY_SAFETENSORS": value}
    assert call(f"{PROGRAMS}:names", environment=environment).result == found


def test_install_reaches_what_was_imported_before_and_uninstall_undoes_it() -> None:
    result = call(f"{PROGRAMS}:names_after_install").result
    assert result == {
        "installed": OURS | {"by_name": "tensorferry.safetensors.torch"},
        "after": THEIRS | {"by_name": "safetensors.torch"},
        "same": True,
        "variable": None,
    }


def test_install_reaches_processes_started_later() -> None:
    assert call(f"{PROGRAMS}:children").result == "tensorferry.safetensors.torch"


def test_installed_functions_can_be_sent_to_another_process(directory: pathlib.Path) -> None:
    path = saved(directory / "a", {"a": torch.ones(1)})
    assert call(f"{PROGRAMS}:sent_to_another_process", path=path).result == [[1.0], [1.0]]


def test_who_catches_safetensors_errors_catches_ours(directory: pathlib.Path) -> None:
    path = saved(directory / "a", {"a": torch.ones(1)})
    assert call(f"{PROGRAMS}:errors_are_kin", path=path).result == ["theirs", "ours"]


def test_other_frameworks_stay_with_safetensors(directory: pathlib.Path) -> None:
    path = saved(directory / "a", {"a": torch.ones(1)})
    assert call(f"{PROGRAMS}:other_frameworks", path=path).result == "builtins"


def test_transformers(directory: pathlib.Path) -> None:
    required.module("transformers")
    result = call(f"{PROGRAMS}:transformers_model", folder=directory / "model").result
    assert result["same"]
    assert result["tokens"] == 5
    assert result["shards"] > 1
    assert result["safe_open"] >= result["shards"]
    assert result["slices"] > 10


def test_accelerate(directory: pathlib.Path) -> None:
    required.module("accelerate")
    assert call(f"{PROGRAMS}:accelerate_model", folder=directory / "model").result


def test_diffusers(directory: pathlib.Path) -> None:
    required.module("diffusers")
    assert call(f"{PROGRAMS}:diffusers_model", folder=directory / "model").result
