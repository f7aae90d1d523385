"""Pages for browsers: files that are held in memory and sent under a strict content policy.

They hold no data and need no key: what a page shows, its scripts ask for with the key that somebody
types into it. There is no build step, and nothing is loaded from elsewhere.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from gateway import errors

# By suffix; files with another one are not served.
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

# No inline script or style, no other origin, and no text that becomes markup but lit's own
# templates.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types lit-html"
)

SECURITY_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    # A browser asks each time, so that an upgrade is seen at once.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file in memory."""

    content: bytes
    content_type: str
    etag: str


@functools.cache
def load_files(folder: Path) -> Mapping[str, StaticFile]:
    """The files of pages by their path below `folder`, read once. Raises: OSError."""
    found = {}
    for path in sorted(folder.rglob("*")):
        content_type = CONTENT_TYPES.get(path.suffix)
        if content_type is not None and path.is_file():
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[path.relative_to(folder).as_posix()] = StaticFile(content, content_type, etag)
    return found


@dataclass(frozen=True, slots=True)
class StaticPage:
    """One page: `name` is that of its HTML among `files`."""

    name: str
    files: Mapping[str, StaticFile]

    async def page(self, request: Request) -> Response:
        """The page itself."""
        return self._response(request, self.name)

    async def file(self, request: Request) -> Response:
        """A file that the page needs. Raises: GatewayError 404."""
        return self._response(request, request.path_params["file"])

    def _response(self, request: Request, name: str) -> Response:
        file = self.files.get(name)
        if file is None:
            raise errors.not_found(request.scope["path"], None)
        headers = {**SECURITY_HEADERS, "etag": file.etag}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers={**headers, "content-type": file.content_type})
