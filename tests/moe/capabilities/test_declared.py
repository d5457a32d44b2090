"""What is declared apart from the classes is what they are."""

import pytest

from turnout.formats.spec import FORMATS
from turnout.moe.capabilities.declared import DISPATCHERS, RUNNERS
from turnout.registry import BACKENDS


@pytest.mark.parametrize("declared", [RUNNERS, DISPATCHERS], ids=["runners", "dispatchers"])
def test_every_declaration_names_the_class_that_carries_it(declared):
    for name in declared:
        assert declared.load(name).capability is declared[name]
        assert declared[name].name == name


def test_every_registered_backend_declares_something():
    for name in BACKENDS:
        backend = BACKENDS.get(name)
        assert backend.runners or backend.dispatchers


def test_declared_formats_exist():
    for runner in RUNNERS.values():
        assert runner.weight_formats <= set(FORMATS)
