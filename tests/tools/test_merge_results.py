"""Results measured in parts, put together."""

from __future__ import annotations

import pytest

from tools.merge_results import merge
from turnout.errors import UserError


def part(copy: float, *rows: int, **fields) -> dict:
    head = {"benchmark": "moe", "device": "GPU", "devices": 1, "driver": "5", "versions": {"torch": "2"}}
    values = {"commit": "abc", "date": "2026-11-21", "command": "one", "ceilings": {"copy_GBps": copy}}
    return head | values | {"rows": [{"tokens": row} for row in rows]} | fields


def test_rows_of_all_and_medians_of_ceilings():
    merged = merge([part(4.0, 1, 2), part(9.0, 3), part(5.0, date="2026-11-22")], "all")
    assert [row["tokens"] for row in merged["rows"]] == [1, 2, 3]
    assert merged["ceilings"] == {"copy_GBps": 5.0}
    assert (merged["date"], merged["command"], merged["commit"]) == ("2026-11-22", "all", "abc")
    assert merged.keys() == part(1.0).keys()


def test_parts_of_different_commits_do_not_belong_together():
    with pytest.raises(UserError, match='parts differ in commit: "abc", "def"'):
        merge([part(1.0), part(1.0, commit="def")], "all")
