"""``stockade egress explain``: what the gate would say to one request, and by which rule."""

from __future__ import annotations

import dataclasses
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stockade.cli._output import emit, fail, out, printable, reporting

if TYPE_CHECKING:
    from stockade.egress.gate import Host, Request, Rules, Verdict
    from stockade.policy import OperatorConfig, Policy

app = typer.Typer(help="The way out of a sandbox.", no_args_is_help=True)

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?]*)(?P<target>.*)", re.DOTALL)
_PORTS = {"http": 80, "https": 443}
_LINE = re.compile(r"(?:(preset [a-z-]+) )?line ([0-9]+)\Z")


class WayIn(StrEnum):
    """How a client inside may come to the proxy."""

    CONNECT = "connect"
    HTTP = "http"
    TRANSPARENT = "transparent"
    SOCKS5 = "socks5"


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One question to the gate and its answer; ``detail`` says what could not be read, if anything."""

    verdict: Verdict
    detail: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """What the gate says: to the tunnel, if the way in needs one, and to the request, if it is seen."""

    host: str
    port: int
    way: WayIn
    tunnel: Step | None
    request: Step | None

    @property
    def deciding(self) -> Step:
        """The step that decided: the one that denied, or the last."""
        steps = [step for step in (self.tunnel, self.request) if step is not None]
        return next((step for step in steps if not step.verdict.allowed), steps[-1])


@app.command()
def explain(
    policy: Annotated[Path, typer.Argument(help="The policy that decides.")],
    method: Annotated[str, typer.Argument(help="GET, POST, …; CONNECT asks about the tunnel alone.")],
    url: Annotated[str, typer.Argument(help="http://… or https://…")],
    *,
    operator: Annotated[
        Path | None, typer.Option("--operator", help="The operator's file, if this site has one.")
    ] = None,
    way: Annotated[
        WayIn | None, typer.Option("--way", help="How the client comes; default: http for http://, else connect.")
    ] = None,
    body: Annotated[bool, typer.Option("--body", help="The request has a body.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print what the gate says to one request, why, and by which rule; nothing is sent and no name is looked up."""
    from stockade.policy import check_site, load_operator, load_policy

    match = _URL.fullmatch(url)
    if match is None or match["scheme"].lower() not in _PORTS:
        fail(f"{url[:80]!r} is not a URL of http or https", hint="write https://host/path", as_json=json_)
    with reporting(as_json=json_):
        rules_of = load_policy(policy)
        site = load_operator(operator)
        if operator is not None:
            check_site(rules_of, site, path=policy)
        rules = _rules(rules_of, site)
        answer = judge(rules, method, url, way, body=body)
    emit(_as_json(answer, policy, method, url)) if json_ else _show(answer, policy, rules_of, method, url)
    raise typer.Exit(0 if answer.deciding.verdict.allowed else 1)


def _rules(policy: Policy, operator: OperatorConfig) -> Rules:
    """Compile the policy as an agent does that can terminate TLS; no secret is read to explain a rule."""
    from stockade.egress.gate import Credential, Rules

    named = {rule.credential for rule in policy.egress.allow if rule.credential is not None}
    placeholders = [Credential(name, "authorization", "placeholder") for name in sorted(named)]
    return Rules.from_policy(policy, operator, inspection=True, credentials=placeholders)


def judge(rules: Rules, method: str, url: str, way: WayIn | None, *, body: bool = False) -> Explanation:
    """Ask the gate as the proxy does: the tunnel first, and the request inside where the tunnel is looked into.

    Raises:
        ValueError: for a URL that is not one of http or https (``Malformed`` where its host or port is none).
    """
    from stockade.egress.gate import Handling, parse_authority

    match = _URL.fullmatch(url)
    if match is None or match["scheme"].lower() not in _PORTS:
        raise ValueError("not a URL of http or https")
    scheme = match["scheme"].lower()
    where = way or (WayIn.HTTP if scheme == "http" else WayIn.CONNECT)
    authority = parse_authority(match["authority"].encode("utf-8", "surrogateescape"), default_port=_PORTS[scheme])
    host, port = authority.host, authority.port
    if where is WayIn.HTTP and method != "CONNECT":
        return Explanation(host.text, port, where, None, _absolute(rules, method, url, match["target"], body=body))
    tunnel = _tunnel(rules, where, host, port)
    inner = None
    if tunnel.verdict.allowed and tunnel.verdict.handling is Handling.INSPECT and method != "CONNECT":
        inner = _inside(rules, method, (scheme, host, port, where), match["target"], body=body)
    return Explanation(host.text, port, where, tunnel, inner)


def _tunnel(rules: Rules, way: WayIn, host: Host, port: int) -> Step:
    from stockade.egress.gate import Destination, Request, Way

    # The HTTP proxy port knows one kind of tunnel.
    came = Way.CONNECT if way is WayIn.HTTP else Way(way.value)
    return _decided(rules, Request(Destination(came, host, port), "CONNECT", "", None, ""), body=False)


def _absolute(rules: Rules, method: str, url: str, target: str, *, body: bool) -> Step:
    """Judge ``GET http://host/path`` as a client writes it to a proxy."""
    whole = url if target else url + "/"
    authority = whole.split("://", 1)[1].split("/", 1)[0].split("?", 1)[0]
    return _parsed(rules, method, whole, authority, None, body=body)


def _inside(rules: Rules, method: str, bound: tuple[str, Host, int, WayIn], target: str, *, body: bool) -> Step:
    """Judge ``GET /path`` on a connection that is bound to a host already."""
    from stockade.egress.gate import Origin, Way

    scheme, host, port, way = bound
    came = Way.TLS if scheme == "https" else Way(way.value)
    name = f"[{host.text}]" if ":" in host.text else host.text
    path = target if target.startswith("/") else "/" + target
    return _parsed(rules, method, path, f"{name}:{port}", Origin(came, scheme, host, port), body=body)


def _parsed(rules: Rules, method: str, target: str, authority: str, origin: object, *, body: bool) -> Step:
    """Parse the head that a client would send: the same parser, and so the same refusals."""
    from stockade.egress.gate import Malformed, Origin, Verdict, parse_head

    raw = f"{method} {target} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode("utf-8", "surrogateescape")
    try:
        head = parse_head(raw, rules.limits.head, origin if isinstance(origin, Origin) else None)
    except Malformed as fault:
        return Step(Verdict(allowed=False, reason=fault.reason), fault.detail)
    return _decided(rules, head.request, body=body)


def _decided(rules: Rules, request: Request, *, body: bool) -> Step:
    """Decide, and judge an address that is written as one; names are judged again once they are looked up."""
    from stockade.egress.gate import decide, judge_addresses

    verdict = decide(request, rules, body=body)
    address = request.destination.host.address
    if verdict.allowed and address is not None and verdict.pinned is None:
        judged = judge_addresses([address], rules)
        if not judged.allowed:
            return Step(judged, f"{address} is reached by no rule")
    return Step(verdict)


def _place(rule: str | None, file: Path) -> str | None:
    """Return ``file:line`` of a rule, by the name that the gate gives it."""
    found = None if rule is None else _LINE.search(rule)
    return None if found is None else f"{found[1] or file}:{found[2]}"


def _step_json(step: Step | None, file: Path) -> dict[str, object] | None:
    if step is None:
        return None
    verdict = step.verdict
    return {
        "allowed": verdict.allowed,
        "reason": verdict.reason.value,
        "handling": verdict.handling.value if verdict.allowed else None,
        "rule": verdict.rule,
        "place": _place(verdict.rule, file),
        "detail": step.detail or None,
        "terms": _terms(verdict),
    }


def _terms(verdict: Verdict) -> list[str]:
    grant = verdict.grant
    if grant is None:
        return []
    flags = ("read_only", "websocket", "strip_credentials", "store", "wildcard")
    named = [name for name in flags if getattr(grant, name)]
    return named + ([f"credential {grant.credential}"] if grant.credential is not None else [])


def _as_json(answer: Explanation, file: Path, method: str, url: str) -> dict[str, object]:
    return {
        "method": method,
        "url": url,
        "host": answer.host,
        "port": answer.port,
        "way": answer.way.value,
        **(_step_json(answer.deciding, file) or {}),
        "tunnel": _step_json(answer.tunnel, file),
        "request": _step_json(answer.request, file),
    }


def _show(answer: Explanation, file: Path, policy: Policy, method: str, url: str) -> None:
    verdict = answer.deciding.verdict
    word = "[green]allowed[/]" if verdict.allowed else "[bold red]denied[/]"
    out.print(f"{word} ", end="")
    out.print(printable(f"{method} {url} by {answer.way.value}: {verdict.reason.value}"), markup=False)
    for name, step in (("tunnel", answer.tunnel), ("request", answer.request)):
        if step is not None:
            out.print(printable(f"  {name}: {_told(step, file)}"), markup=False)
    note = _note(answer, policy)
    if note:
        out.print(f"  {note}", markup=False)


def _told(step: Step, file: Path) -> str:
    verdict = step.verdict
    said = [f"{verdict.handling.value}" if verdict.allowed else verdict.reason.value]
    if verdict.rule is not None:
        place = _place(verdict.rule, file)
        said.append(f"by '{verdict.rule}'" + (f" ({place})" if place else ""))
    said += [f"terms: {', '.join(_terms(verdict))}"] if _terms(verdict) else []
    return "; ".join(said + ([step.detail] if step.detail else []))


def _note(answer: Explanation, policy: Policy) -> str:
    from stockade.egress.gate import Handling

    if policy.egress.mode == "replay" and answer.deciding.verdict.allowed:
        return "the mode is replay: only what was recorded is answered"
    tunnel = answer.tunnel
    if tunnel is not None and tunnel.verdict.allowed and tunnel.verdict.handling in {Handling.OPAQUE, Handling.RAW}:
        return "what goes through this tunnel is not seen: no method and no path is judged"
    return ""
