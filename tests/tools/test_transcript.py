"""The documentation's transcript is of real answers: the demo model calls the tool, and tells its result."""

from __future__ import annotations

import pytest

from tools import transcript
from turnout.config import ServerConfig
from turnout.server.launch import launch


def test_what_is_run_is_what_was_asked_for():
    assert transcript.run("calculator", '{"expression": "2 * 3"}') == "6"
    assert transcript.run("calculator", '{"expr').startswith("error: the arguments are not JSON")
    assert transcript.run("other", "{}") == "error: there is no tool other"


@pytest.mark.more
def test_every_client_gets_through_the_loop():
    with launch(ServerConfig(model="demo", port=0), show=False) as base_url:
        written = transcript.document(base_url)
    for title in transcript.LOOPS:
        said = written.split(f"## {title}")[1].split("##")[0].splitlines()
        assert 'model   calls calculator: {"' in "\n".join(said)
        assert "tool    1266871" in said
        assert "1266871" in said[-3].replace("|", "")
