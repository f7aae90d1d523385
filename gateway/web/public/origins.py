"""Which web pages may read a routed reply; Starlette's middleware does the rest (`site.cors`)."""

from __future__ import annotations

from gateway.config.listeners import CorsSpec
from gateway.request import Headers
from gateway.web.public.heads import EXPOSED

_EXPOSED = ", ".join(EXPOSED).encode()


def allowed_origin(cors: CorsSpec, headers: Headers) -> Headers:
    """The fields that let the page of this request read its reply; none if it may not."""
    origin = next((value for name, value in headers if name == b"origin"), None)
    if origin is None:
        return []
    anywhere = "*" in cors.origins
    if not anywhere and origin.decode("latin-1") not in cors.origins:
        return [(b"vary", b"Origin")]
    fields = [(b"access-control-expose-headers", _EXPOSED)]
    if anywhere and not cors.credentials:
        fields.append((b"access-control-allow-origin", b"*"))
    else:
        fields += [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
    if cors.credentials:
        fields.append((b"access-control-allow-credentials", b"true"))
    return fields
