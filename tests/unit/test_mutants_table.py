"""tests/mutants.toml names what exists; that each mutant is caught, `make mutants` shows."""

from run_mutants import faults, read_mutants


def test_every_mutant_changes_what_exists_and_names_tests_that_do() -> None:
    assert faults(read_mutants()) == []
