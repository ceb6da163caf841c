"""From what a rollout was denied to the smallest rules that would have let it through, for a person to approve.

A learning run (``stockade egress learn``) meets what it denies: a tunnel of its rule ``learn`` was asked for by name, and
so was a name that had an address by that rule; what was asked for inside is denied as ever.

Pure: events in, text out. What came from inside is text: each host is checked as a host, each path as a glob, and what
is neither is shown as a comment, escaped. Nothing is widened but a folder of which many files were asked for.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from stockade.errors import PolicyError

SIBLINGS = 8
"""More distinct names than this in one folder are written as ``/**``."""
MAX_HOSTS = 500
"""As many rules as a policy may list; whoever asks for more hosts is not fetching."""

Site: TypeAlias = tuple[str, int]
"""Host and port."""

_CURED = frozenset(
    ("host_not_allowed", "port_not_allowed", "method_not_allowed", "path_not_allowed", "query_not_allowed")
)
"""Reasons for which a rule was missing; for all others a rule is there or would not help."""
_TUNNELS = frozenset({"host_not_allowed", "port_not_allowed", "inspection_required"})
_LEARN = "learn"
_NO_HTTP = frozenset({"malformed_request", "header_timeout"})
"""What becomes of bytes that are neither TLS nor HTTP, and of a client that waits for its server to speak first."""
_TLS_PORT = 443
_CLEAR_PORTS = frozenset({80, 8080})
_SHOWN = 120
_MAX_PATH = 1000
_PATHS_PER_RULE = 100
_MAX_PATHS = 5000
_MOST_ODD = 20


@dataclass(slots=True)
class _Asked:
    """What was asked of one host and port.

    ``raw``: how often bytes came that are neither TLS nor HTTP; ``refused``: how often the client hung up on the run's
    own certificate.
    """

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    odd: Counter[tuple[str, str]] = field(default_factory=Counter)
    tunnels: int = 0
    raw: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class _Draft:
    """One rule before its ports are known; ``count`` is how many requests it is for.

    ``odd`` are paths that were asked for too and that no rule can name. ``raw`` and ``opaque`` are rules under which
    nothing is seen of what passes, so they are only proposed.
    """

    host: str
    methods: tuple[str, ...]
    paths: tuple[str, ...]
    raw: bool = False
    opaque: bool = False
    odd: tuple[str, ...] = ()
    count: int = 0


def smallest_rules(events: Iterable[Mapping[str, object]], *, siblings: int = SIBLINGS) -> str:
    """Return YAML: the rules under ``egress.allow`` for what ``net.*`` events say was denied for want of a rule.

    Hosts are exact; methods, paths and ports are those that were asked for; each rule has a comment with a count.
    Queries are not on record, so rules do not speak of them. A rule that no policy may hold stands there as a comment
    with the reason, as does what a rule would not change. ``siblings``: how many names of one folder are listed one by
    one. The text is a whole policy where anything was denied.
    """
    asked, named, other = _collected(events)
    lines = ["version: 1", "egress:"]
    rules = _fitting(_rules(asked, siblings), other)
    written = [line for ports, draft in rules for line in _written(draft, ports)]
    lines += ["  allow:", *written] if any(line.startswith("    - ") for line in written) else ["  allow: []", *written]
    reached = {host for host, _ in asked}
    lines += [
        f"  # asked for by name only, {_times(n)}: {_text(name)}" for name, n in _most(named) if name not in reached
    ]
    lines += [f"  # not for want of a rule, {_times(n)}: {_text(what)}" for what, n in _most(other)]
    return "\n".join(lines) + "\n"


def _fitting(rules: list[_Ported], other: Counter[str]) -> list[_Ported]:
    """Return the rules that a policy has room for; whoever asks for more is not fetching."""
    paths = itertools.accumulate(len(draft.paths) for _, draft in rules)
    fit = sum(index < MAX_HOSTS and total <= _MAX_PATHS for index, total in enumerate(paths))
    if fit < len(rules):
        other["more rules than a policy has room for were left out"] += len(rules) - fit
    return rules[:fit]


def _collected(
    events: Iterable[Mapping[str, object]],
) -> tuple[dict[Site, _Asked], Counter[str], Counter[str]]:
    asked: dict[Site, _Asked] = {}
    named: Counter[str] = Counter()
    other: Counter[str] = Counter()
    for event in events:
        kind = str(event.get("kind", ""))
        count = _number(event.get("count")) or 1
        reason = str(event.get("reason", ""))
        if kind == "net.end" or event.get("verdict") == "allowed":
            _met(event, kind, reason, asked, named)
            continue
        if kind not in {"net.connect", "net.request", "net.dns"} or event.get("verdict") != "denied":
            continue
        if kind == "net.dns":
            name = event.get("dns.question.name")
            if reason == "host_not_allowed" and isinstance(name, str):
                named[name] += count
            else:
                other[f"{reason} (the name {name})"] += count
            continue
        host, port = event.get("server.address"), _number(event.get("server.port"))
        if isinstance(host, str) and "*" in host:
            other[f"{reason} (no host: {host})"] += count  # a record that was tampered with: the gate takes none such
        elif not isinstance(host, str) or port is None:
            other[f"{reason} (folded: hosts beyond the first of a second are not on record)"] += count
        elif kind == "net.connect" and reason in _TUNNELS:
            asked.setdefault((host, port), _Asked()).tunnels += count
        elif kind == "net.request" and reason in _CURED:
            _request(asked.setdefault((host, port), _Asked()), event, count)
        elif kind == "net.request" and reason in _NO_HTTP and event.get("http.request.method") is None:
            asked.setdefault((host, port), _Asked()).raw += count
        else:
            rule = event.get("rule")
            other[f"{reason} ({host}:{port}" + (f" by {rule})" if rule else ")")] += count
    return asked, named, other


def _met(event: Mapping[str, object], kind: str, reason: str, asked: dict[Site, _Asked], named: Counter[str]) -> None:
    """Take what a learning run allowed only to see what would come, and how that ended."""
    host, port = event.get("server.address"), _number(event.get("server.port"))
    name = event.get("dns.question.name")
    if kind == "net.dns" and event.get("rule") == _LEARN and isinstance(name, str):
        named[name] += 1
    elif not isinstance(host, str) or "*" in host or port is None:
        return
    elif kind == "net.connect" and event.get("rule") == _LEARN:
        asked.setdefault((host, port), _Asked()).tunnels += 1
    elif kind == "net.end" and reason == "client_tls" and (host, port) in asked:
        asked[host, port].refused += 1


def _request(asked: _Asked, event: Mapping[str, object], count: int) -> None:
    method, path = event.get("http.request.method"), event.get("url.path")
    if isinstance(method, str) and isinstance(path, str):
        counted = asked.requests if _is_plain(path) else asked.odd
        counted[method, path] += count
    else:
        asked.tunnels += count  # folded: that something was asked is all that is known


def _is_plain(path: str) -> bool:
    """Tell whether a rule can name the path: servers disagree about the others, so no rule with paths takes them."""
    from stockade.policy import PathGlob

    try:
        PathGlob(_glob(path))
    except PolicyError:
        return False
    return ";" not in path and len(path) <= _MAX_PATH


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _most(counted: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counted.items(), key=lambda one: (-one[1], one[0]))[:MAX_HOSTS]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


# ---------------------------------------------------------------------------------------- rules


_Ported: TypeAlias = tuple[tuple[int, ...], _Draft]


def _rules(asked: Mapping[Site, _Asked], siblings: int) -> list[_Ported]:
    """Return the drafts with their ports: what two ports of a host have in common is one rule."""
    ports: dict[_Draft, list[int]] = {}
    counts: Counter[_Draft] = Counter()
    for (host, port), one in sorted(asked.items()):
        for draft, count in _drafts(host, port, one, siblings):
            ports.setdefault(draft, []).append(port)
            counts[draft] += count
    return [(tuple(sorted(ports[draft])), replace(draft, count=counts[draft])) for draft in ports]


def _drafts(host: str, port: int, asked: _Asked, siblings: int) -> list[tuple[_Draft, int]]:
    """Return one rule for each set of methods, with how many requests it is for."""
    if not asked.requests:
        odd = tuple(sorted({path for _, path in asked.odd}))[:_MOST_ODD]
        other = port != _TLS_PORT and port not in _CLEAR_PORTS and not asked.refused
        raw = not asked.odd and (other or asked.raw > 0)
        draft = _Draft(host, (), (), raw, opaque=asked.refused > 0 and not raw, odd=odd)
        return [(draft, max(asked.tunnels, asked.raw) + asked.odd.total())]
    methods_of: dict[str, set[str]] = {}
    counts: Counter[str] = Counter()
    for (method, path), count in asked.requests.items():
        methods_of.setdefault(path, set()).add(method)
        counts[path] += count
    drafts: list[tuple[_Draft, int]] = []
    for methods in sorted({tuple(sorted(found)) for found in methods_of.values()}):
        paths = [path for path, found in methods_of.items() if tuple(sorted(found)) == methods]
        globs = _globs(paths, siblings)
        count = sum(counts[path] for path in paths)
        pieces = [globs[first : first + _PATHS_PER_RULE] for first in range(0, len(globs), _PATHS_PER_RULE)]
        drafts += [(_Draft(host, methods, tuple(piece)), count) for piece in pieces]
    odd = tuple(sorted({path for _, path in asked.odd}))[:_MOST_ODD]
    return [(replace(drafts[0][0], odd=odd), drafts[0][1]), *drafts[1:]]


@dataclass(slots=True)
class _Folder:
    """A place in the tree of paths; ``ends`` says that a path ends here."""

    below: dict[str, _Folder] = field(default_factory=dict)
    ends: bool = False


def _globs(paths: Iterable[str], siblings: int) -> list[str]:
    """Return globs for paths: themselves, or ``/a/b/**`` where more than ``siblings`` names stand below ``/a/b``."""
    root = _Folder()
    for path in paths:
        place = root
        for segment in path.removeprefix("/").split("/"):
            place = place.below.setdefault(segment, _Folder())
        place.ends = True
    return sorted(_walk(root, "", siblings))


def _walk(folder: _Folder, at: str, siblings: int) -> list[str]:
    found = [at] if folder.ends else []
    if len(folder.below) > siblings:
        return [*found, f"{at}/**"]
    for name, below in folder.below.items():
        found += _walk(below, f"{at}/{name}", siblings)
    return found


# ----------------------------------------------------------------------------------------- text


def _written(draft: _Draft, ports: Sequence[int]) -> list[str]:
    """Return the lines of one rule, or a comment where no policy may hold it."""
    keys, notes = _keys(draft, ports)
    text = "{" + ", ".join(keys) + "}"
    problem = _problem(text)
    comments = [f"    # {_text(draft.host)}: asked for {_times(draft.count)}" + "".join(f"; {note}" for note in notes)]
    comments += [f"    # no rule can name the path {_text(path)}" for path in draft.odd]
    if problem is not None:
        return [*comments, f"    # refused: {_text(problem)}", f"    # - {_text(text, limit=4000)}"]
    if draft.raw or draft.opaque:
        return [*comments, f"    # - {text}"]
    return [*comments, f"    - {text}"]


def _keys(draft: _Draft, ports: Sequence[int]) -> tuple[list[str], list[str]]:
    keys, notes = [f"host: {_quoted(draft.host)}"], []
    listed = list(ports)
    if draft.raw:
        notes.append("only bytes were sent; if they are not TLS, a person must accept that nothing is seen of them")
        return [*keys, f"ports: {listed}", "tcp: true"], notes
    if draft.opaque:
        notes.append("the client refused the run's own certificate; a person must accept that nothing is seen of it")
        return [*keys, f"ports: {listed}", "tls: opaque"], notes
    if listed != [_TLS_PORT] or ":" in draft.host or draft.host.replace(".", "").isdigit():
        keys.append(f"ports: {listed}")
    if not draft.methods:
        notes.append("only a tunnel was asked for, so what it was for is not known: run again with this rule")
        return [*keys, "read_only: true"], notes
    globs = [_glob(path) for path in draft.paths]
    keys.append("methods: [" + ", ".join(map(_quoted, draft.methods)) + "]")
    keys.append("paths: [" + ", ".join(_quoted(glob) for glob in dict.fromkeys(globs)) + "]")
    if any("%2F" in path for path in draft.paths):
        keys.append("encoded_slash: true")
        notes.append("'*' stands for a name with an encoded slash")
    if any(path.endswith("**") for path in draft.paths):
        notes.append("'/**' stands for many names")
    return keys, notes


def _glob(path: str) -> str:
    """Return a path as a glob: no glob spells an encoded slash, so its name is a pattern."""
    return path.replace("%2F", "*")


def _quoted(text: str) -> str:
    """Return a YAML scalar: single quotes hold any printable text."""
    return "'" + _text(text, limit=4000).replace("'", "''") + "'"


def _text(text: str, *, limit: int = _SHOWN) -> str:
    """Return printable ASCII on one line: it comes from inside and goes to a terminal and into a file."""
    cut = text[:limit].replace("§", "section ")
    plain = "".join(char if " " <= char <= "~" else ascii(char)[1:-1] for char in cut)
    return plain + ("..." if len(text) > limit else "")


def _problem(rule: str) -> str | None:
    """Return why no policy may hold the rule, None if one may."""
    from stockade.policy import parse_policy

    try:
        parse_policy(f"version: 1\negress:\n  allow:\n    - {rule}\n", source="rule")
    except PolicyError as error:
        return error.message.partition(": ")[2].partition(": ")[2] + (f" ({error.hint})" if error.hint else "")
    return None
