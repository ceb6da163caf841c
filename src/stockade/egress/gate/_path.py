r"""The one spelling of a path and query that rules see and the upstream gets (case 66).

Servers disagree about ``..``, ``%2e``, ``%2f``, ``\`` and double encoding (CVE-2019-9901 in Envoy
and its many kin), so a path with any of these is refused. What no server can read differently is
brought to the normal form of RFC 3986 section 6.2.2 (hex digits upper case, unreserved characters
decoded), and that one form is both judged and forwarded.
"""

from __future__ import annotations

import re

from stockade.egress.gate._reason import Malformed, Reason, safe_text

# Nothing encoded, no parameters, no empty segment, no segment that starts with a dot.
_PLAIN = re.compile(r"(?:/[A-Za-z0-9_~!$&'()*+,=:@-][A-Za-z0-9._~!$&'()*+,=:@-]*)++/?|/", re.ASCII)
_PCHARS = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*+", re.ASCII)
_QUERY = re.compile(r"[!-\"$-\[\]-~]*", re.ASCII)  # all visible ASCII but '#' and '\'
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_DOUBLE = re.compile(r"%25[0-9A-Fa-f]{2}")
_DOTS = re.compile(r"/\.{1,2}(?:[/;]|\Z)")  # Tomcat reads '..;x' as '..'
_OVERLONG = re.compile(r"%C[01]|%E0%[89]|%F0%8")  # never valid UTF-8, but a slash or dot to some decoders
_DECODED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_~")
_FORBIDDEN = frozenset(b".\\") | frozenset(range(0x20)) | {0x7F}
_SLASH = "%2F"
_SHOWN = 96


def normal_path(raw: str) -> str:
    """Return the normal form of an absolute path, or raise Malformed(malformed_path).

    ``;`` and empty segments stay (see :func:`ambiguous`), and so does ``%2F`` (see :func:`encodes_slash`). ``""`` is
    ``/``.
    """
    if not raw:
        return "/"
    if _PLAIN.fullmatch(raw):
        return raw
    if not _PCHARS.fullmatch(raw):
        raise _malformed("a character that no path has", raw)
    path = _ESCAPE.sub(_decode, raw)
    if _DOUBLE.search(path):
        raise _malformed("double encoding", raw)
    if _OVERLONG.search(path):
        raise _malformed("overlong UTF-8", raw)
    if _DOTS.search(path.replace(_SLASH, "/")):
        raise _malformed("dot segment", raw)
    return path


def checked_query(raw: str) -> str:
    """Return the query as it is, or raise Malformed(malformed_path)."""
    if not _QUERY.fullmatch(raw):
        raise _malformed("a character that no query has", raw)
    return raw


def ambiguous(path: str) -> bool:
    """Say whether servers may take a normal path for another one: ``//`` and ``;`` parameters.

    Harmless where any path is allowed; never let through where rules name paths. An encoded slash counts as a slash.
    """
    if "%" in path:
        path = path.replace(_SLASH, "/")
    return "//" in path or ";" in path


def encodes_slash(path: str) -> bool:
    """Say whether a normal path has a ``%2F``: two servers in a row read it in two ways, so a rule must ask for it."""
    return _SLASH in path


def _decode(match: re.Match[str]) -> str:
    code = int(match[1], 16)
    if code in _FORBIDDEN:
        raise _malformed("an encoded dot, backslash or control", match.string)
    return chr(code) if code in _DECODED else match[0].upper()


def _malformed(what: str, raw: str) -> Malformed:
    return Malformed(Reason.MALFORMED_PATH, f"{what}: {safe_text(raw, limit=_SHOWN)}")
