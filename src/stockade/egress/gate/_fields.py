"""The header lines of a request, sorted into those that are forwarded, read here, and left out.

What is left out: fields for one hop only, fields that only a proxy may write, and fields by which frameworks and
gateways take another method, path or host than the one that was judged (cases 60, 69, 71, 89).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stockade.egress.gate._head import HOP_BY_HOP, KEPT, USUAL_OPTIONS
from stockade.egress.gate._reason import safe_text

if TYPE_CHECKING:
    from stockade.egress.gate._head import Field, Headers

# X-Original-URL: CVE-2018-14773 (case 69).
_DROPPED = HOP_BY_HOP | {
    b"x-http-method-override",
    b"x-http-method",
    b"x-method-override",
    b"x-original-url",
    b"x-original-host",
    b"x-rewrite-url",
    b"x-host",
    b"forwarded",
    b"x-upstream-https-proxy",
    b"x-rollout-id",
}
_DROPPED_PREFIXES = (b"proxy-", b"x-forwarded-", b"x-stockade-")
_READ = frozenset({b"host", b"content-length", b"expect"})
_SPECIAL = _DROPPED | _READ
_CLAIMS = (b"x-rollout-id", b"x-stockade-")

CREDENTIALS = frozenset(
    {
        b"authorization",
        b"cookie",
        b"api-key",
        b"apikey",
        b"private-token",
        b"job-token",
        b"deploy-token",
        b"ocp-apim-subscription-key",
        b"x-auth-email",
        b"x-auth-key",
        b"x-functions-key",
    }
)
"""Fields by which servers know who is asking (case 97)."""
_CREDENTIAL_ENDS = (
    b"-api-key",
    b"-apikey",
    b"-api-token",
    b"-access-token",
    b"-auth-token",
    b"-security-token",
    b"-vault-token",
    b"-authorization",
)

_SHOWN = 96
_READ_HERE, _DROP, _CREDENTIAL = 1, 2, -1
_ONLY_CONNECTION = ("connection",)


def kind_of(key: bytes) -> int:
    """Return what becomes of a field, by its lower-case name; CGI and WSGI read ``_`` as ``-``, so such a disguise is looked through."""
    if key in _SPECIAL:
        return _READ_HERE
    plain = key.replace(b"_", b"-")
    if plain in _SPECIAL or plain.startswith(_DROPPED_PREFIXES):
        return _DROP
    return _CREDENTIAL if plain in CREDENTIALS or plain.endswith(_CREDENTIAL_ENDS) else KEPT


def _spellings() -> dict[bytes, int]:
    """Return the kinds of names that real clients send, in their two usual spellings."""
    names = (
        b"accept accept-encoding accept-language accept-charset authorization cache-control connection content-encoding "
        b"content-length content-type cookie dnt expect git-protocol host if-match if-modified-since if-none-match "
        b"if-range origin pragma priority proxy-authorization proxy-connection range referer sec-fetch-dest "
        b"sec-fetch-mode sec-fetch-site te transfer-encoding upgrade upgrade-insecure-requests user-agent x-api-key "
        b"x-requested-with"
    ).split()
    return {spelling: kind_of(name) for name in names for spelling in (name, name.title())}


KINDS = _spellings()


class RequestFields:
    """What the header lines of a request say beside those that are kept.

    ``special`` holds the values of what is read here, by lower-case name; ``dropped`` the names of what is left out.
    """

    __slots__ = ("claims", "credentials", "dropped", "special")

    def __init__(self, found: list[tuple[int, bytes, bytes]]) -> None:
        self.special: dict[bytes, list[bytes]] = {}
        self.dropped: list[bytes] = []
        self.claims: list[str] = []
        self.credentials: list[bytes] = []
        for kind, key, value in found:
            if kind == _READ_HERE:
                self.special.setdefault(key, []).append(value)
                if key in _READ:
                    continue
            elif kind == _CREDENTIAL:
                self.credentials.append(key)
                continue
            self.dropped.append(key)
            if key.startswith(_CLAIMS):
                self.claims.append(safe_text(key + b": " + value))
            elif key == b"proxy-authorization":  # credentials are no text for a record
                self.claims.append("proxy-authorization")

    def without(self, kept: list[Field], options: frozenset[bytes]) -> Headers:
        """Return what is forwarded of ``kept``: what Connection names is for this hop only (case 71)."""
        if options <= USUAL_OPTIONS:
            return tuple(kept)
        self.dropped += [name.lower() for name, _ in kept if name.lower() in options]
        return tuple(field for field in kept if field[0].lower() not in options)

    @property
    def left_out(self) -> tuple[str, ...]:
        """The names of what is not forwarded, in lower case and order."""
        if self.dropped == [b"connection"]:
            return _ONLY_CONNECTION
        return tuple(sorted({name[:_SHOWN].decode("ascii") for name in self.dropped}))
