"""Who may read the page: on loopback everybody on this machine, elsewhere those who have the token. A foreign name in the Host header is refused,
so that no website can have a browser read the page under the website's own name (DNS rebinding)."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie

from phalanx.spec.check_watch import is_loopback


def new_token() -> str:
    return secrets.token_urlsafe(24)


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one server."""

    host: str
    """The address that it listens at."""
    token: str | None = field(default=None, repr=False)
    """None: no token is demanded."""

    @property
    def cookie(self) -> str:
        """Name of the cookie with the token. Servers of one machine share their cookies, so that each needs a name of its own."""
        return f"phalanx_watch_{hashlib.sha256((self.token or '').encode()).hexdigest()[:8]}"

    def knows_host(self, header: str | None) -> bool:
        """Whether the Host header names this machine. Ports may differ: a tunnel has its own."""
        if not header:
            return False
        name = header.rpartition(":")[0] if header.rpartition(":")[2].isdecimal() and not header.endswith("]") else header
        name = name.lower().rstrip(".")
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name in {"localhost", self.host.lower(), *([] if is_loopback(self.host) else _own_names())}
        # An address is no name that somebody else's DNS answers for.
        return not is_loopback(self.host) or is_loopback(name)

    def admits(self, token: str | None) -> bool:
        """Whether a token is the right one, in a time that does not depend on how much of it is right."""
        return self.token is None or (token is not None and hmac.compare_digest(token.encode(), self.token.encode()))

    def token_of(self, headers: Mapping[str, str]) -> str | None:
        """The token of a request: from its cookie, or as `Authorization: Bearer`."""
        scheme, _, value = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return value.strip()
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return None
        return None if morsel is None else morsel.value


def _own_names() -> set[str]:
    name = socket.gethostname().lower()
    return {name, name.partition(".")[0], socket.getfqdn().lower()}
