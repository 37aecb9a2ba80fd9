"""Requests and responses of HTTP/1.1, as far as a page that is only read needs them: GET and HEAD without a body, keep-alive, gzip, ETag."""

from __future__ import annotations

import gzip
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from urllib.parse import parse_qs, unquote, urlsplit

MAX_HEAD = 16 << 10
"""Bytes of a request."""
_MAX_FIELDS = 32
"""Fields of a query."""
_WORTH_GZIP = 4 << 10
_SECURITY = (
    ("Content-Security-Policy", "default-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cache-Control", "no-cache"),
)  # fmt: skip


class BadRequest(Exception):
    """A request that is answered with an error, after which the connection is closed."""

    def __init__(self, status: HTTPStatus, text: str):
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """One request."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    """By lower-case name."""
    keep_alive: bool

    def value(self, name: str) -> str | None:
        """The last value of a field of the query."""
        return self.query.get(name, [None])[-1]


def parse_request(head: bytes) -> Request:
    """The request line and headers. Raises BadRequest."""
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise BadRequest(HTTPStatus.BAD_REQUEST, "This is no HTTP/1.1 request.")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        if line:
            name, colon, value = line.partition(":")
            if not colon or name != name.strip() or not name:
                raise BadRequest(HTTPStatus.BAD_REQUEST, "A header has no name.")
            if name.lower() == "host" and "host" in headers:
                raise BadRequest(HTTPStatus.BAD_REQUEST, "There are two Host headers.")
            headers[name.lower()] = value.strip()
    method, target, version = words
    if method not in ("GET", "HEAD"):
        raise BadRequest(HTTPStatus.METHOD_NOT_ALLOWED, "This page is only read: GET and HEAD are allowed.")
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise BadRequest(HTTPStatus(413), "A request has no body.")
    try:
        parts = urlsplit(target)
        query = parse_qs(parts.query, max_num_fields=_MAX_FIELDS, keep_blank_values=True)
        path = unquote(parts.path, errors="strict")
    except ValueError:
        raise BadRequest(HTTPStatus.BAD_REQUEST, "The address cannot be read.") from None
    keep = headers.get("connection", "").lower() != "close" and version != "HTTP/1.0"
    return Request(method, path, query, headers, keep)


@dataclass(frozen=True, slots=True)
class Response:
    """An answer. `etag`: identifies the content; a browser that has it gets none again."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    etag: str | None = None
    more: tuple[tuple[str, str], ...] = ()
    packed: bytes | None = field(default=None, repr=False)
    """The body in gzip, if that is worth it."""

    @staticmethod
    def of(body: bytes, content_type: str, etag: str) -> Response:
        packed = gzip.compress(body, 1, mtime=0) if len(body) >= _WORTH_GZIP else None
        return Response(body, content_type, etag=etag, packed=packed)

    @property
    def size(self) -> int:
        return len(self.body) + len(self.packed or b"")

    def encode(self, request: Request | None) -> bytes:
        """The bytes to send; an error before a request was read closes the connection."""
        keep = request is not None and request.keep_alive
        status, body, fields = self.status, self.body, [("Content-Type", self.content_type), *_SECURITY, *self.more]
        if self.etag is not None:
            fields += [("ETag", self.etag), ("Vary", "Accept-Encoding")]
            if request is not None and self.etag in [
                tag.strip() for tag in request.headers.get("if-none-match", "").split(",")
            ]:
                status, body = HTTPStatus.NOT_MODIFIED, b""
        if body and self.packed is not None and request is not None and "gzip" in request.headers.get("accept-encoding", ""):
            body = self.packed
            fields.append(("Content-Encoding", "gzip"))
        if status != HTTPStatus.NOT_MODIFIED:
            fields.append(("Content-Length", str(len(body))))
        fields.append(("Date", formatdate(usegmt=True)))
        fields.append(("Connection", "keep-alive" if keep else "close"))
        head = "".join(f"{name}: {value}\r\n" for name, value in fields)
        start = f"HTTP/1.1 {status.value} {status.phrase}\r\n{head}\r\n".encode("latin-1")
        return start if request is not None and request.method == "HEAD" else start + body
