"""The page at `/`: static files, and what a browser may do with them."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
# Path of the server -> file. None holds data: all are open to whoever has no key, for
# it is the page that asks for the key.
FILES = {
    "/" if file.name == "index.html" else f"/page/{file.name}": file
    for file in sorted(_FOLDER.iterdir())
    if file.suffix in _TYPES
}
# Only what comes from this server runs, is shown or is asked for; `data:` is the empty
# icon. Nobody may put the page into a frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """Routes of FILES, which are read here, once."""
    return [_route(path, file) for path, file in FILES.items()]


def _route(path: str, file: Path) -> Route:
    body, media_type = file.read_bytes(), _TYPES[file.suffix]

    async def answer(_: Request) -> Response:
        return Response(body, media_type=media_type, headers=HEADERS)

    return Route(path, answer, methods=["GET"])
