"""What the page of routes and fields says is what the server does."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tools.interface import page
from turnout.server.api.errors import ApiError
from turnout.server.api.protocol import ChatBody, parse

PAGE = page("")
FIELDS = re.findall(r"^\| `(\w+)` \| (?:yes)? \| (?:yes)? \| (ignored|400|only .*) \|$", PAGE, re.MULTILINE)


def read(**fields: Any) -> ChatBody:
    return parse(ChatBody, json.dumps({"messages": [{"role": "user", "content": "a"}]} | fields).encode())


def test_there_are_fields_of_every_kind():
    assert {said.partition(" ")[0] for _, said in FIELDS} == {"ignored", "400", "only"}
    assert len(FIELDS) > 40


@pytest.mark.parametrize(("name", "said"), FIELDS)
def test_fields_are_treated_as_the_page_says(name: str, said: str):
    assert read(**{name: None})
    if said == "ignored":
        assert read(**{name: "any"})
        return
    for value in re.findall(r"`(.*?)`", said):
        assert read(**{name: json.loads(value)})
    with pytest.raises(ApiError, match=name) as refused:
        read(**{name: "something else"})
    assert refused.value.status == 400
