"""The dashboard as a person sees it, in Debian's Chromium: numbers, experts, ranks that die, a server that
restarts, small and large windows."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.browser import CHROMIUM, Browser
from tests.server.api.test_service import expert_tokens
from tests.server.processes import (
    Background,
    await_reports,
    eventually,
    free_port,
    is_ready,
    ranks_of,
    started,
)
from tests.server.test_metrics import total
from turnout.server.launch import ServerProcess

pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]
KEY = "s3cret"
TWO_RANKS = {"tp_size": 2, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True}
TICKS = "Number(document.body?.dataset.ticks ?? 0)"  # while a page loads there is no body
STATE = "document.querySelector('#state').textContent"
# However short the page shows it: the browser may take several ticks in between two looks of a test.
NOTE_THE_DEAD = """void new MutationObserver(() => {
    window.seenDead ||= document.querySelectorAll('#ranks .dead').length > 0
        && document.querySelector('#banner').textContent.includes('SIGKILL');
}).observe(document.body, { childList: true, subtree: true })"""


@pytest.fixture(scope="module")
def port() -> int:
    """One that a second server can take after the first."""
    return free_port()


@pytest.fixture(scope="module")
def served(tiny_folder: Path, port: int) -> Iterator[tuple[ServerProcess, str]]:
    with started(tiny_folder, **TWO_RANKS, port=port) as both:
        yield both


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Browser]:
    """Whatever a test does, nothing comes from elsewhere, and nothing is wrong on the page."""
    with Browser(tmp_path / "profile") as opened:
        opened.look(1280)
        yield opened
        assert {re.match(r"https?://([^/:]*)", url)[1] for url in opened.requests} == {"127.0.0.1"}
        complaints = [line for line in opened.console if "ERR_CONNECTION_REFUSED" not in line]
        complaints = [line for line in complaints if "ERR_INCOMPLETE_CHUNKED" not in line]
        assert not complaints


def ticked(page: Browser, more: int = 2) -> None:
    page.until(f"{TICKS} >= {page.js(TICKS) + more}")


def shown(page: Browser, metric: str) -> float:
    return float(page.js(f"document.querySelector('[data-metric={metric}]').dataset.value"))


def complete(root: str, **fields: object) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 30, "ignore_eos": True} | fields
    assert httpx.post(f"{root}/v1/completions", json=body, timeout=60).status_code == 200


def test_numbers_are_those_of_metrics_and_the_map_follows_the_experts(
    page: Browser, served: tuple[ServerProcess, str]
):
    _, root = served
    page.open(f"{root}/dashboard")
    with httpx.Client(base_url=root, timeout=60) as http:
        ticked(page, 3)
        await_reports(root, ranks=2)
        before = expert_tokens(http)
        for i in range(3):
            complete(root, prompt=[5 + i] * 40)
        due = 3 * (40 + 30 - 1) * 2 * 2  # two experts in each of two layers; nothing follows the last token
        page.until(f"document.querySelector('#map').dataset.total === '{due}'")
        ticked(page)
        after = expert_tokens(http)
        for metric in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert shown(page, metric) == total(http, metric)
        assert shown(page, "engine_restarts_total") == total(http, "engine_restarts_total")
        written = page.js("document.querySelector('.tile .detail').textContent")
        assert written == f"{total(http, 'generation_tokens_total'):,.0f} in all"
    gained = np.array([[after[f"{x}", f"{e}"] - before[f"{x}", f"{e}"] for e in range(8)] for x in range(2)])
    cells = """(async () => {
        const { shade } = await import(new URL('dashboard/heatmap.js', location.href));
        const map = document.querySelector('#map'), context = map.getContext('2d');
        const width = map.clientWidth, cell = (width - 34 - 74) / 8, seen = [];
        const counts = COUNTS, sums = counts.map((row) => row.reduce((a, b) => a + b));
        for (let layer = 0; layer < 2; layer++) for (let expert = 0; expert < 8; expert++) {
            const at = [34 + (expert + 0.5) * cell, layer * 24 + 12];
            const [r, g, b] = context.getImageData(...at.map(Math.round), 1, 1).data;
            seen.push([`rgb(${r},${g},${b})`, shade(counts[layer][expert] * 8 / sums[layer])]);
        }
        return JSON.stringify(seen);
    })()""".replace("COUNTS", json.dumps(gained.tolist()))
    pairs = json.loads(page.js(cells))
    assert len({painted for painted, _ in pairs}) > 4
    empty = page.js("getComputedStyle(document.documentElement).getPropertyValue('--empty').trim()")
    assert [p for p, due in pairs if due != empty] == [due for _, due in pairs if due != empty]
    assert gained.sum() == due
    assert "numba" in page.js("document.querySelector('#plan').textContent")


def test_a_dead_rank_turns_red_and_its_stream_goes_on(page: Browser, served: tuple[ServerProcess, str]):
    server, root = served
    page.open(f"{root}/dashboard")
    ticked(page)
    assert page.js("document.querySelectorAll('#ranks .dead').length") == 0
    page.js(NOTE_THE_DEAD)
    stream = Background(root, tokens=400)
    ranks_of(server)[1].send_signal(signal.SIGKILL)
    page.until("window.seenDead")
    page.until(f"{STATE} === 'ready' && !document.querySelector('#ranks .dead')")
    assert stream.result()[-1] == "[DONE]"
    page.until("document.querySelector('[data-metric=engine_restarts_total] .detail').textContent[0] === '1'")
    assert page.js("document.querySelector('#banner').hidden")


def test_the_page_survives_another_server(page: Browser, tiny_folder: Path):
    with started(tiny_folder) as (_, root):
        page.open(f"{root}/dashboard")
        ticked(page)
        assert page.js("document.querySelector('#slices').offsetHeight") == 0  # of a single rank
    page.until(f"{STATE} === 'no connection'")
    with started(tiny_folder, port=int(root.rpartition(":")[2])) as (_, again):
        assert again == root
        page.until(f"{STATE} === 'ready'")
        ticked(page)
        assert page.js("document.querySelector('#banner').hidden")


def test_the_form_lets_a_browser_in(page: Browser, tiny_folder: Path):
    with started(tiny_folder, api_key=KEY) as (_, root):
        page.open(f"{root}/dashboard")
        for given, then in (
            ("wrong", "document.body?.textContent.includes('not the key')"),
            (KEY, f"{TICKS} > 1"),
        ):
            page.js(f"document.querySelector('#key').value = '{given}'")
            page.js("document.querySelector('button').click()")
            page.until(then)
        assert KEY not in page.js("document.cookie")
        page.console[:] = [line for line in page.console if "401" not in line]  # of the form, as it must


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_everything_fits_and_can_be_read(
    page: Browser, served: tuple[ServerProcess, str], width: int, dark: bool
):
    _, root = served
    assert eventually(lambda: is_ready(root))
    page.look(width, dark=dark)
    page.open(f"{root}/dashboard")
    complete(root)
    ticked(page, 3)
    assert page.js("document.documentElement.scrollWidth") <= width
    cut = """[...document.querySelectorAll('.tile *, h1, h2, .keys span, .pill')]
        .filter((e) => getComputedStyle(e).display !== 'inline')
        .filter((e) => e.scrollWidth > e.clientWidth + 1).length"""
    assert page.js(cut) == 0
    contrast = """(() => {
        const light = (c) => c.match(/\\d+/g).slice(0, 3).map((v) => v / 255)
            .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
            .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
        const card = light(getComputedStyle(document.querySelector('.card')).backgroundColor);
        return Math.min(...['.value', '.label', '.detail', 'h2', '.keys', '.pill', 'th', 'li'].map((s) => {
            const text = light(getComputedStyle(document.querySelector(s)).color);
            return (Math.max(text, card) + 0.05) / (Math.min(text, card) + 0.05);
        }));
    })()"""
    assert page.js(contrast) >= 4.5  # as WCAG asks for
    assert len(page.screenshot()) > 20_000
