"""Requests, as raw bytes, whose end two parsers may see in different places.

RFC 9112, sections 2 to 7, and RFC 9110, section 7; the forms are those of the known studies of
request smuggling (CL.TE, TE.CL, TE.TE, TERM.EXT, ...). `SMUGGLED` is what a deceived parser would
take for another request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from gateway.callers.keys import new_key
from tests.web.raw_client import CHAT


def chat(text: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 1}).encode()


def marked(text: str, credentials: str, *lines: str) -> bytes:
    """A valid request with `mark` as its id and prompt."""
    body = chat(text)
    head = [
        f"POST {CHAT} HTTP/1.1",
        "Host: localhost",
        credentials,
        f"X-Request-ID: {text}",
        f"Content-Length: {len(body)}",
        *lines,
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


ANNA = new_key("anna")
"""The key of the caller that sends the forms."""
CREDENTIALS = f"Authorization: Bearer {ANNA.text}"
SMUGGLED = marked("smuggled", CREDENTIALS)
BODY = chat("first")
N = len(BODY)
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (N, BODY)
MINE = f"Host: localhost\r\n{CREDENTIALS}\r\nX-Request-ID: first\r\n"
POST = f"POST {CHAT} HTTP/1.1\r\n"
TE = "Transfer-Encoding: chunked\r\n"


def form(lines: str, body: bytes = b"", *, start: str = POST, more: str = MINE) -> bytes:
    """A request with these header lines besides the usual ones."""
    return f"{start}{more}{lines}\r\n".encode("latin-1") + body


def clte(lines: str) -> bytes:
    """A parser that goes by the chunks takes the rest for another request."""
    body = b"0\r\n\r\n" + SMUGGLED
    return form(f"Content-Length: {len(body)}\r\n{lines}", body)


def tecl(lines: str) -> bytes:
    """A parser that goes by the length takes the rest for another request."""
    return form(
        f"Content-Length: 4\r\n{lines}", b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED)
    )


def unclear(length: str) -> bytes:
    """A parser may accept this length or not."""
    return form(length, BODY + SMUGGLED)


def chunks(body: bytes) -> bytes:
    return form(TE, body)


def trailing(lines: str) -> bytes:
    return chunks(CHUNKED[:-2] + lines.encode("latin-1") + b"\r\n")


REFUSED: Mapping[str, bytes] = {
    # Both a length and chunks.
    "CL.TE": clte(TE),
    "TE.CL": tecl(TE),
    "CL.TE, the coding first": form(TE + "Content-Length: 5\r\n", b"0\r\n\r\n" + SMUGGLED),
    "CL.TE in upper case": clte("TRANSFER-ENCODING: CHUNKED\r\n"),
    "CL.TE behind a tab": clte("Transfer-Encoding:\tchunked\r\n"),
    # A coding that some parsers accept.
    "TE before a colon": clte("Transfer-Encoding : chunked\r\n"),
    "TE in a folded line": clte("X: x\r\n Transfer-Encoding: chunked\r\n"),
    "TE with a folded value": clte("Transfer-Encoding:\r\n chunked\r\n"),
    "TE in quotes": tecl('Transfer-Encoding: "chunked"\r\n'),
    "TE unknown": form("Transfer-Encoding: xchunked\r\n", CHUNKED + SMUGGLED),
    "TE identity": form("Transfer-Encoding: identity\r\n", CHUNKED + SMUGGLED),
    "TE empty": form("Transfer-Encoding:\r\n", CHUNKED + SMUGGLED),
    "TE chunked, identity": form("Transfer-Encoding: chunked, identity\r\n", CHUNKED + SMUGGLED),
    "TE gzip, chunked": form("Transfer-Encoding: gzip, chunked\r\n", CHUNKED + SMUGGLED),
    "TE chunked, chunked": form("Transfer-Encoding: chunked, chunked\r\n", CHUNKED + SMUGGLED),
    "TE with a comma before it": form("Transfer-Encoding: ,chunked\r\n", CHUNKED + SMUGGLED),
    "TE with a parameter": form("Transfer-Encoding: chunked;q=1\r\n", CHUNKED + SMUGGLED),
    "TE twice": form(TE + TE, CHUNKED + SMUGGLED),
    "TE twice, an unknown one first": form(f"Transfer-Encoding: cow\r\n{TE}", CHUNKED + SMUGGLED),
    "TE behind a vertical tab": form("Transfer-Encoding:\x0bchunked\r\n", CHUNKED + SMUGGLED),
    "TE with a NUL": form("Transfer-Encoding: chunked\0\r\n", CHUNKED + SMUGGLED),
    "TE behind a bare LF": clte("X: x\nTransfer-Encoding: chunked\r\n"),
    "TE behind a bare CR": clte("X: x\rTransfer-Encoding: chunked\r\n"),
    "TE of HTTP/1.0": form(TE, CHUNKED + SMUGGLED, start=POST.replace("1.1", "1.0")),
    # A length that some parsers accept.
    "CL twice, different": unclear(f"Content-Length: {N}\r\nContent-Length: 0\r\n"),
    "CL twice, the same": unclear(f"Content-Length: {N}\r\n" * 2),
    "CL with a comma": unclear(f"Content-Length: {N}, {N}\r\n"),
    "CL with a plus sign": unclear(f"Content-Length: +{N}\r\n"),
    "CL negative": unclear(f"Content-Length: -{N}\r\n"),
    "CL in hex": unclear(f"Content-Length: 0x{N:x}\r\n"),
    "CL with an exponent": unclear("Content-Length: 1e2\r\n"),
    "CL in two words": unclear(f"Content-Length: {N} {N}\r\n"),
    "CL with an underscore": unclear(f"Content-Length: {N}_\r\n"),
    "CL beyond 64 bits": unclear(f"Content-Length: {2**64 + N}\r\n"),
    "CL empty": unclear("Content-Length:\r\n"),
    "CL with a NUL": unclear(f"Content-Length: {N}\0\r\n"),
    "CL folded": unclear(f"Content-Length:\r\n {N}\r\n"),
    "CL before a space and a colon": unclear(f"Content-Length : {N}\r\n"),
    # Lines.
    "a head with bare LF": unclear(f"Content-Length: {N}\r\n").replace(b"\r\n", b"\n"),
    "a head that ends with LF": form(f"Content-Length: {N}\r\n")[:-2] + b"\n" + BODY + SMUGGLED,
    "a head that ends with LF LF": form("X: y\r\n")[:-4] + b"\n\n" + SMUGGLED,
    "a head that ends with CR CR": form("X: y\r\n")[:-4] + b"\r\r" + SMUGGLED,
    "a line with a bare CR": form("X: a\rb\r\n", SMUGGLED),
    "a NUL in a value": form("X: a\0b\r\n", SMUGGLED),
    "a control character in a name": form("X\x7f: a\r\n", SMUGGLED),
    "a space in a name": form("X Y: a\r\n", SMUGGLED),
    "a name that is not ASCII": form("X\xe4: a\r\n", SMUGGLED),
    "an empty name": form(": a\r\n", SMUGGLED),
    "a line without a colon": form("nothing\r\n", SMUGGLED),
    "a first line that is folded": form("", SMUGGLED, more=" X: y\r\n" + MINE),
    # Request lines.
    "HTTP/0.9": f"POST {CHAT}\r\n\r\n".encode() + SMUGGLED,
    "HTTP/0.9 that looks like a target": form("", start=f"POST {CHAT}\n\r\nx HTTP/1.0\r\n"),
    "HTTP/2.0": form("", SMUGGLED, start=POST.replace("1.1", "2.0")),
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SMUGGLED,
    "http/1.1 in lower case": form("", SMUGGLED, start=POST.replace("HTTP", "http")),
    "RTSP": form("", SMUGGLED, start=POST.replace("HTTP/1.1", "RTSP/1.0")),
    "a method in lower case": form("", SMUGGLED, start=POST.lower()),
    "tabs in the request line": form("", SMUGGLED, start=POST.replace(" ", "\t")),
    "a space behind the version": form("", SMUGGLED, start=POST.replace("1.1", "1.1 ")),
    "a space in the target": form("", SMUGGLED, start=f"POST {CHAT} /x HTTP/1.1\r\n"),
    "a request line in the target": form(
        "", SMUGGLED, start=f"POST {CHAT}\rHTTP/1.1\r\nPOST {CHAT} HTTP/1.1\r\n"
    ),
    "a NUL in the target": form("", SMUGGLED, start=f"POST {CHAT}\0 HTTP/1.1\r\n"),
    "a fragment": form("", SMUGGLED, start=f"POST {CHAT}#a HTTP/1.1\r\n"),
    "no target": form("", SMUGGLED, start="POST HTTP/1.1\r\n"),
    "CONNECT": form("", SMUGGLED, start="CONNECT localhost:80 HTTP/1.1\r\n"),
    "a user in the target": form("", SMUGGLED, start=f"POST http://u@localhost{CHAT} HTTP/1.1\r\n"),
    # Host.
    "Host twice": form("Host: evil.example\r\n", SMUGGLED),
    "Host before a colon": form("Host : evil.example\r\n", SMUGGLED),
    "no Host": form("", SMUGGLED, more=MINE.partition("\r\n")[2]),
    "several names in Host": form("", SMUGGLED, more=MINE.replace("localhost", "a, b")),
    # Chunks.
    "a chunk size that is no number": chunks(b"g\r\n" + SMUGGLED),
    "a chunk size with a plus sign": chunks(b"+%x\r\n%b\r\n0\r\n\r\n" % (N, BODY)),
    "a chunk size behind 0x": chunks(b"0x%x\r\n%b\r\n0\r\n\r\n" % (N, BODY)),
    "a chunk size before a space": chunks(b"%x \r\n%b\r\n0\r\n\r\n" % (N, BODY)),
    "a chunk size of 17 digits": chunks(b"%017x\r\n%b\r\n0\r\n\r\n" % (N, BODY)),
    "an empty chunk size": chunks(b"\r\n" + SMUGGLED),
    "a chunk size that ends with LF": chunks(b"%x\n%b\r\n0\r\n\r\n" % (N, BODY)),
    "a chunk that ends with LF": chunks(b"%x\r\n%b\n0\r\n\r\n" % (N, BODY)),
    "a chunk that ends with CR": chunks(b"%x\r\n%b\r0\r\n\r\n" % (N, BODY)),
    "a chunk without its end": chunks(b"%x\r\n%b0\r\n\r\n" % (N, BODY)),
    "a chunk longer than its size": chunks(b"%x\r\n%b\r\n0\r\n\r\n" % (N - 5, BODY)),
    "an extension with LF": chunks(b"%x;a\nb\r\n%b\r\n0\r\n\r\n" % (N, BODY)),
    "an extension with CR": chunks(b"%x;a\rb\r\n%b\r\n0\r\n\r\n" % (N, BODY)),
    "an extension with NUL": chunks(b"%x;\0\r\n%b\r\n0\r\n\r\n" % (N, BODY)),
    "a last chunk that ends with LF": chunks(CHUNKED[:-4] + b"\n\r\n" + SMUGGLED),
    "trailers that end with LF": chunks(CHUNKED[:-2] + b"X: y\n\n" + SMUGGLED),
    "a trailer that is folded": trailing("X: y\r\n z\r\n"),
    "a trailer with a space before its colon": trailing("X : y\r\n"),
    "a trailer without a colon": trailing("nothing\r\n"),
}  # fmt: skip
"""Answered with 4xx, and nothing behind them is read."""

LENGTH = f"Content-Length: {N}\r\n"
SERVED: Mapping[str, bytes] = {
    "an underscore in place of a dash": form(LENGTH + "Transfer_Encoding: chunked\r\n", BODY),
    "CL between spaces": form(f"Content-Length: \t {N} \t\r\n", BODY),
    "CL with zeros before it": form(f"Content-Length: 00{N}\r\n", BODY),
    "TE in upper case": form("TRANSFER-ENCODING: CHUNKED\r\n", CHUNKED),
    "TE between spaces": form("Transfer-Encoding: \tchunked \r\n", CHUNKED),
    "a chunk for each byte": chunks(b"".join(b"1\r\n%c\r\n" % x for x in BODY) + b"0\r\n\r\n"),
    "a last chunk of many zeros": chunks(b"%x\r\n%b\r\n0000\r\n\r\n" % (N, BODY)),
    "extensions": chunks(b'%x;a=b;c="d"\r\n%b\r\n0;e\r\n\r\n' % (N, BODY)),
    "a trailer of a length": trailing("Content-Length: 500\r\n"),
    "a trailer of a key": trailing("Authorization: Bearer lg_other_key\r\nX-Api-Key: x\r\n"),
    "a trailer of an address": trailing("X-Forwarded-For: 192.0.2.1\r\nX-Priority: batch\r\n"),
    "a trailer that closes": trailing("Connection: close\r\n"),
    "a target with another host": form(LENGTH, BODY, start=f"POST http://a.b{CHAT} HTTP/1.1\r\n"),
    "line ends before it": b"\r\n\r\n" + form(LENGTH, BODY),
    "a line end behind it": form(LENGTH, BODY) + b"\r\n",
    "an upgrade to h2c": form(LENGTH + "Connection: Upgrade\r\nUpgrade: h2c\r\n", BODY),
    "an upgrade, chunked": form(TE + "Connection: upgrade\r\nUpgrade: websocket\r\n", CHUNKED),
    "Expect with its body": form(LENGTH + "Expect: 100-continue\r\n", BODY),
    "Connection that names a length": form(LENGTH + "Connection: content-length, host\r\n", BODY),
    "a key that the connection names": form(LENGTH + "Connection: authorization\r\n", BODY),
}  # fmt: skip
"""The one request that RFC 9112 sees, and then the next."""

LAST: Mapping[str, bytes] = {
    "Connection: close": form(LENGTH + "Connection: close\r\n", BODY) + SMUGGLED,
    "HTTP/1.0": form(LENGTH, BODY, start=POST.replace("1.1", "1.0")) + SMUGGLED,
}  # fmt: skip
"""The one request, and nothing behind it."""

WITHOUT_A_NODE: Mapping[str, bytes] = {
    "a GET with a body": form(
        f"Content-Length: {len(SMUGGLED)}\r\n", SMUGGLED, start="GET /health HTTP/1.1\r\n"
    ),
    "a GET with chunks": form(
        TE, b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED), start="GET /health HTTP/1.1\r\n"
    ),
    "a body of no JSON": form(f"Content-Length: {len(SMUGGLED)}\r\n", SMUGGLED),
    "a path that is not there": form(
        f"Content-Length: {len(SMUGGLED)}\r\n", SMUGGLED, start="POST /nowhere HTTP/1.1\r\n"
    ),
}  # fmt: skip
"""One request that no node gets, whose body is no request, and then the next."""
