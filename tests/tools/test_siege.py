"""A short siege of the tests' server: attacks come to an end and are counted."""

from __future__ import annotations

import httpx
import pytest

import tools.siege
from tools.siege import main, parse_options, siege
from turnout.errors import UserError

EXPECTED = {
    "none": set(),
    "messages": {"400"},
    "chunks": {"400"},
    "slow heads": {"still open"},
    "flood": {"200"},
}


def test_attacks_are_counted_and_survived(base_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools.siege, "SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(tools.siege, "TOKENS", 20)
    words = ["--base-url", base_url, "--clients", "2", "--streams", "1", "--seconds", "0.5", "--attacks"]
    rows = siege(base_url, parse_options([*words, *(name for name in EXPECTED if name != "none")]))
    assert [row["attack"] for row in rows] == list(EXPECTED)
    for row in rows:
        assert set(row["answers"]) == EXPECTED[row["attack"]], row
        assert row["answer_count"] == sum(row["answers"].values())
        assert 0 < row["health_p50_ms"] <= row["health_p99_ms"] <= row["health_max_ms"]
        assert row["pause_count"] >= 19
        assert 0 < row["rss_before_mb"] <= row["rss_peak_mb"] + 1
    assert httpx.get(base_url.replace("/v1", "/ready"), timeout=60).status_code == 200


@pytest.mark.parametrize("url", ["http://192.0.2.1/v1", "http://0.0.0.0:30000/v1"])
def test_other_machines_are_not_attacked(url: str) -> None:
    with pytest.raises(UserError, match="not on this machine"):
        siege(url, parse_options(["--base-url", url]))


@pytest.mark.parametrize("words", [["--seconds", "601"], ["--clients", "0"], ["--attacks", "rockets"]])
def test_sieges_are_bounded(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["siege", *words])
    with pytest.raises(SystemExit):
        main()
