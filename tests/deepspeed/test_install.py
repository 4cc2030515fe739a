"""install() and uninstall(): which importers get our ops, what DeepSpeed reports, and that uninstall() undoes all."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.conftest import ROOT
from tests.deepspeed.programs import NAMES
from tests.support import standin, warm
from tests.support.warm import call

if TYPE_CHECKING:
    import pathlib

    from tests.deepspeed.conftest import Environment

PROGRAMS = "tests.deepspeed.programs"


def test_builders_imported_before_load_our_ops_and_compile_nothing(version: Environment) -> None:
    found = call(f"{PROGRAMS}:installed_after_its_importers", environment=version).result
    assert all(found["same"])
    assert found["names"] == NAMES
    assert found["utils"] == "tensorferry.deepnvme.ops"
    assert found["engine"] in ("io_uring", "libaio", "threads")
    assert found["compiled"] == []
    assert found["version"] == ("0.18.2" if "PYTHONPATH" in version else found["version"])


@pytest.mark.parametrize("look_at_the_table_first", [True, False])
def test_uninstall_restores_everything(version: Environment, look_at_the_table_first: bool) -> None:
    environment = dict(version)
    del environment["CXX"]  # DeepSpeed's own check compiles a test program
    found = call(
        f"{PROGRAMS}:restored",
        environment=environment,
        look_at_the_table_first=look_at_the_table_first,
    ).result
    assert found == {
        "installed": [True, False],
        "changed": True,
        "restored": True,
        "again": True,
    }


# A path without a driver, because the machine may have a real one.
NO_DRIVER = {"TENSORFERRY_LIBCUDA": "/nowhere/libcuda.so.1"}


def test_deepspeed_finds_async_io_compatible_and_gds_not(version: Environment) -> None:
    found = call(f"{PROGRAMS}:compatibility", environment=version | NO_DRIVER).result
    assert found["table"]["async_io"] is True
    assert not found["table"].get("gds", False)
    assert found["builders"] == [True, False]
    assert "gds: the CUDA driver cannot be opened: /nowhere" in found["printed"]
    assert found["printed"].count("provides async_io") == 1  # by verbose=True only
    assert "/nowhere" in found["refusal"]
    assert "aio_handle supports host memory" in found["refusal"]
    assert "remove use_gds" in found["refusal"]
    assert "flatten" in found["utils"]


def test_gds_is_served_where_cufile_is(newest: Environment, directory: pathlib.Path) -> None:
    environment = newest | standin.environment()
    found = call(f"{PROGRAMS}:gds", environment=environment, directory=directory).result
    assert found == {
        "in_use": False,  # before a probe is needed: a process that uses CUDA cannot fork for it
        "compatible": True,
        "engine": "cufile",
        "counts": [1, 0, 1],
        "same": True,
    }


def test_deepspeeds_report_shows_the_ops_as_available(version: Environment) -> None:
    report = subprocess.run(
        [warm.python(), "-m", "tensorferry.deepspeed", "-m", "deepspeed.env_report"],
        cwd=ROOT,
        env=os.environ | version,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert report.returncode == 0, report.stderr
    ops = ["async_io"] if "PYTHONPATH" in version else ["async_io", "pin_memory"]
    for op in ops:
        (line,) = [line for line in report.stdout.splitlines() if line.startswith(f"{op} ")]
        assert "[YES]" in line
        assert "[OKAY]" in line


def test_without_deepspeed_install_names_the_remedy() -> None:
    ended = call(f"{PROGRAMS}:without_deepspeed")
    assert "pip install deepspeed" in ended.result


def test_install_returns_where_the_variable_is_set(newest: Environment) -> None:
    environment = newest | {"TENSORFERRY_DEEPSPEED": "1"}
    found = call(f"{PROGRAMS}:installed_twice_at_once", environment=environment)
    assert found.result == [True, True, False]


@pytest.mark.parametrize("variable", ["0", "1"])
def test_install_in_threads_beside_an_import_of_deepspeed_returns(
    newest: Environment, variable: str
) -> None:
    environment = newest | {"TENSORFERRY_DEEPSPEED": variable}
    program = f"{PROGRAMS}:installed_in_threads"
    found = call(program, environment=environment, threads=3).result
    assert found == [True, True, True, True, False]


def test_install_after_deepspeeds_own_engine_was_loaded_warns(own_engine: Environment) -> None:
    ended = call(f"{PROGRAMS}:installed_after_its_own_engine", environment=own_engine)
    (warning,) = ended.result
    assert "async_io" in warning
    assert "directly after import deepspeed" in warning
