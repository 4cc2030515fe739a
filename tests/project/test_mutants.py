"""The list of mutants matches the code and names existing tests; `make mutants` checks that these detect them."""

from __future__ import annotations

import pathlib
import re

import pytest

from tests.project.mutants import MUTANTS, Mutant

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place_and_names_tests_that_exist(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old
    for test in mutant.tests:
        file, _, name = test.partition("::")
        name = name.partition("[")[0]
        declared = f'TEST_CASE("{name}")' if file.endswith(".cpp") else f"\ndef {name}("
        assert declared in (ROOT / file).read_text()


def test_each_invariant_names_tests_that_detect_one_of_its_mutants() -> None:
    text = (
        (ROOT / "ARCHITECTURE.md").read_text().partition("## Invariants")[2].partition("\n## ")[0]
    )
    rows = re.findall(r"^\| (.*?) \| .* \| `?(.*?)`? \|$", text, re.MULTILINE)
    assert rows[0] == ("invariant", "tests")
    detected = {(m.invariant, test.partition("::")[0]) for m in MUTANTS for test in m.tests}
    assert set(rows[1:]) <= detected
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
