"""What is declared apart from the backends is what they are."""

import pytest

from turnout.formats.spec import FORMATS
from turnout.moe.backends.declarations import DISPATCHER_CAPABILITIES, RUNNER_CAPABILITIES
from turnout.registry import DISPATCHERS, RUNNERS


@pytest.mark.parametrize(
    ("registry", "declared"),
    [
        (RUNNERS, RUNNER_CAPABILITIES),
        (DISPATCHERS, DISPATCHER_CAPABILITIES),
    ],
    ids=["runners", "dispatchers"],
)
def test_every_backend_is_declared_once(registry, declared):
    assert registry.names() == list(declared)
    for name in registry:
        assert registry.get(name).capability is declared[name]
        assert declared[name].name == name


def test_declared_formats_exist():
    for runner in RUNNER_CAPABILITIES.values():
        assert runner.weight_formats <= set(FORMATS)
