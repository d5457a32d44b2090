"""Flags of SGLang and vLLM that are not ours: each is refused with one line that names ours."""

from __future__ import annotations

import re

import pytest

from tests.test_cli_flags import commands
from turnout.cli import app
from turnout.commands.other_engines import INSTEAD
from turnout.errors import UserError

OURS = {option for options in commands().values() for option in options}


def invoke(*words: str) -> None:
    app(list(words), standalone_mode=False)


@pytest.mark.parametrize("flag", INSTEAD)
def test_each_is_refused_before_anything_runs(flag):
    for words in ((flag, "x"), (f"{flag}=x",)):
        with pytest.raises(UserError, match=f"^there is no flag {flag}: ."):
            invoke("serve", "/nowhere", *words)


def test_what_is_named_instead_exists():
    named = {flag for remedy in INSTEAD.values() for flag in re.findall(r"--[a-z][\w-]*", remedy)}
    assert len(named) > 10
    assert named <= OURS


def test_none_is_a_flag_of_serve():
    assert not INSTEAD.keys() & (commands()["serve"] | commands()["shared by serve, plan, generate and eval"])


def test_a_flag_that_a_command_has_itself_is_that():
    with pytest.raises(UserError, match="no model '/nowhere'"):
        invoke("verify", "/nowhere", "--seed", "3")


def test_a_flag_of_the_server_is_refused_elsewhere():
    with pytest.raises(UserError, match="--port is a flag of `turnout serve` only: leave it out"):
        invoke("plan", "demo", "--port", "80")


def test_words_after_two_dashes_are_no_flags():
    with pytest.raises(UserError, match="no model '/nowhere'"):
        invoke("generate", "/nowhere", "--", "--model")
