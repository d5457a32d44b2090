"""Pictures of the dashboard for the documentation, in Debian's Chromium.

    python -m tools.screenshots          write docs/dashboard-light.webp, -dark.webp and -narrow.webp

A server of the demo model with two ranks answers requests for a while, and then is looked at. Needs Chromium
(apt-get install chromium).
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import httpx

from tests.browser import CHROMIUM, Browser
from turnout.config import ServerConfig
from turnout.errors import UserError
from turnout.server.launch import launch

DOCS = Path(__file__).parents[1] / "docs"
LOOKS = (("light", 1280, False), ("dark", 1280, True), ("narrow", 390, False))
SECONDS, CLIENTS = 45, 4
QUESTION = (
    "Anna has 3 boxes with 12 apples in each box. She gives {n} apples to Tom. How many apples are left?"
)


def main() -> None:
    if CHROMIUM is None:
        raise SystemExit("there is no Chromium: apt-get install chromium")
    config = ServerConfig(
        model="demo", port=0, tp_size=2, dp_size=2, ep_size=2, enable_dp_attention=True, num_threads=1
    )
    with tempfile.TemporaryDirectory() as profile, launch(config, show=False) as url:
        done = threading.Event()
        clients = [threading.Thread(target=_ask, args=(url, n, done)) for n in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            with Browser(Path(profile)) as page:
                page.look(1280)
                page.open(url.removesuffix("/v1") + "/dashboard")
                page.until(f"Number(document.body?.dataset.ticks ?? 0) >= {SECONDS}", 10 * SECONDS)
                for name, width, dark in LOOKS:
                    page.look(width, dark=dark)
                    seen = "Number(document.body.dataset.ticks)"
                    page.until(f"{seen} >= {page.js(seen) + 2}", SECONDS)
                    file = DOCS / f"dashboard-{name}.webp"
                    file.write_bytes(page.screenshot("webp"))
                    print(f"{file.name}: {file.stat().st_size} bytes")
        finally:
            done.set()
            for client in clients:
                client.join()


def _ask(url: str, n: int, done: threading.Event) -> None:
    """One client, which asks one question after another."""
    with httpx.Client(timeout=120) as http:
        while not done.is_set():
            n += CLIENTS
            messages = [{"role": "user", "content": QUESTION.format(n=n % 30 + 2)}]
            http.post(f"{url}/chat/completions", json={"messages": messages, "max_tokens": 120})


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(str(error)) from None
