"""Every row of DeepNVMe's fault table has a test here, and that test runs on every engine."""

from __future__ import annotations

import importlib
import inspect
import pathlib

import pytest

from tests.faults.table import ROWS, tests_of

ON_EVERY_ENGINE = {"engine", "handle", "make_handle", "blocks_handle"}


@pytest.fixture(scope="module", autouse=True)
def _all_tests_are_imported() -> None:
    for module in sorted(pathlib.Path(__file__).parent.glob("test_*.py")):
        importlib.import_module(f"tests.faults.{module.stem}")


def test_there_are_106_rows() -> None:
    assert len(set(ROWS)) == len(ROWS) == 106


@pytest.mark.parametrize("row", ROWS)
def test_row_has_a_test_on_every_engine(row: str) -> None:
    assert tests_of[row], f"no test covers {row}"
    for test in tests_of[row]:
        fixtures = set(inspect.signature(test).parameters)
        assert fixtures & ON_EVERY_ENGINE, f"{test.__name__} does not run on every engine"
