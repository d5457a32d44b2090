"""The page at /dashboard, its files and its feed. With --api-key a form asks for the key, once: a browser
cannot send an Authorization header on its own, so that a cookie stands for it."""

from __future__ import annotations

import hashlib
import hmac
from importlib.resources import files
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from turnout.server.api.app import carries_key
from turnout.server.api.connection import EventStream, read_body
from turnout.server.api.errors import ApiError
from turnout.server.api.routes import Routes
from turnout.server.dashboard.feed import Feed

COOKIE = "turnout_dashboard"
FORM_BYTES = 4096
WRONG_KEY = b'<p class="bad">This is not the key of this server.</p>'
MEDIA_TYPES = {
    "html": "text/html",
    "svg": "image/svg+xml",
    "js": "text/javascript",
    "css": "text/css",
    "txt": "text/plain",
}
OPEN_FILES = {"style.css", "icon.svg"}  # which the form needs
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def dashboard_routes(feed: Feed, api_key: str | None) -> list[Route]:
    router = Routes()
    pages = _load()

    def page(name: str) -> Response:
        media_type = MEDIA_TYPES[name.rpartition(".")[2]]
        return Response(pages[name], media_type=media_type, headers=HEADERS)

    def let_in(request: Request) -> bool:
        if api_key is None or carries_key(request.headers.get("authorization", ""), api_key):
            return True
        return hmac.compare_digest(request.cookies.get(COOKIE, "").encode(), session(api_key).encode())

    @router.get("/dashboard")
    async def index(request: Request) -> Response:
        if let_in(request):
            return page("index.html")
        wrong = WRONG_KEY if "wrong" in request.query_params else b""
        form = pages["login.html"].replace(b"<!-- message -->", wrong)
        return Response(form, 401, media_type="text/html", headers=HEADERS)

    @router.post("/dashboard/login")
    async def login(request: Request) -> Response:
        body = await read_body(request, FORM_BYTES, small=FORM_BYTES, on_large=_refuse)
        given = parse_qs(body.decode("utf-8", "replace")).get("key", [""])[0]
        if api_key is None or not hmac.compare_digest(given.encode(), api_key.encode()):
            return RedirectResponse("../dashboard?wrong", 303, headers=HEADERS)
        reply = RedirectResponse("../dashboard", 303, headers=HEADERS)
        reply.set_cookie(COOKIE, session(api_key), path="/", httponly=True, samesite="strict")
        return reply

    @router.get("/dashboard/events", head=False)
    async def events(request: Request) -> Response:
        _check(let_in(request))
        return EventStream(feed.watch(), on_end=_nothing)

    @router.get("/dashboard/{name}")
    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        _check(name in OPEN_FILES or let_in(request))
        if name not in pages:
            raise ApiError(404, f"GET /dashboard/{name}: Not Found")
        return page(name)

    return router.routes


def session(api_key: str) -> str:
    """What the cookie holds: proof that its owner knew the key, which it does not tell."""
    return hmac.new(api_key.encode(), b"turnout dashboard", hashlib.sha256).hexdigest()


def _load() -> dict[str, bytes]:
    """Every file of the dashboard, by its name."""
    folder = files("turnout") / "assets" / "dashboard"
    found = [*folder.iterdir(), *(folder / "vendor").iterdir()]
    return {file.name: file.read_bytes() for file in found if file.is_file()}


def _check(allowed: bool) -> None:
    if not allowed:
        raise ApiError(401, "the dashboard needs the API key: open /dashboard first", code="invalid_api_key")


async def _refuse() -> None:
    raise ApiError(413, f"the form holds more than {FORM_BYTES} bytes")


def _nothing() -> None:
    """A viewer's stream ends by itself."""
