"""Start a program under Landlock: ``python -m stockade.sandbox._launch FD``.

For processes that may not import this package themselves (the learning side), and for those that load threads before
they could restrict themselves. FD is a descriptor from which one JSON object is read to its end::

    {"argv": ["/usr/bin/python3", "train.py"],       # looked up in env's PATH when it has no slash
     "env": {"PATH": "/usr/bin:/bin"},               # all of the environment: nothing is inherited
     "rules": [{"path": "/usr", "access": "read_exec"},
               {"path": "/dev/nvidia0", "access": "devices", "optional": true}],
     "cwd": "/work",                                 # optional; default: unchanged
     "scope": true, "net": false,                    # optional; see restrict()
     "require": false,                               # optional; true: do not start unless fully enforced
     "hidden": ["/home/me/runs/r1/events"],          # optional; do not start if a rule allows these
     "keep_fds": [5], "report_fd": 6}                # optional

``access`` is one of read, read_exec, write, write_exec, devices. Descriptors above 2 are closed except ``keep_fds``: what
is open escapes Landlock. ``hidden`` is tried after restricting: a rule for a directory above, or for another name of the
same place, is found out by opening it. ``report_fd`` gets one line of JSON, the :class:`Enforcement`, and is closed just
before the program starts. Own errors end with status 125 and one line on standard error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from stockade.errors import ConfigError, NodeError, StockadeError
from stockade.sandbox._landlock import Access, Level, Rule, restrict

OWN_ERROR = 125
_SPEC_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchSpec:
    """The JSON object that :func:`main` reads."""

    argv: tuple[str, ...]
    env: dict[str, str]
    rules: tuple[Rule, ...]
    cwd: str | None = None
    scope: bool = True
    net: bool = False
    require: bool = False
    hidden: tuple[str, ...] = ()
    keep_fds: tuple[int, ...] = ()
    report_fd: int | None = None

    def to_json(self) -> bytes:
        """The bytes to write on the descriptor."""
        return json.dumps(dataclasses.asdict(self)).encode()


def parse_spec(data: bytes) -> LaunchSpec:
    """Read a spec strictly: an unknown key, a missing one or a wrong type is a ConfigError."""
    try:
        raw = json.loads(data)
        rules = tuple(_rule(item) for item in raw["rules"])
        spec = LaunchSpec(**{**raw, "rules": rules})
        _check(spec)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"not a launch spec: {error}") from error
    return dataclasses.replace(spec, argv=tuple(spec.argv), hidden=tuple(spec.hidden), keep_fds=tuple(spec.keep_fds))


def _rule(raw: dict[str, object]) -> Rule:
    path, access, optional = raw["path"], raw["access"], raw.get("optional", False)
    if len(raw) - ("optional" in raw) != 2 or not isinstance(path, str) or type(optional) is not bool:
        raise ValueError(f"not a rule: {raw}")
    if not path.startswith("/"):
        raise ValueError(f"not an absolute path: {path!r}")
    return Rule(path, Access(str(access)), optional)


def _check(spec: LaunchSpec) -> None:
    right = {
        "argv": bool(spec.argv) and _texts(spec.argv),
        "env": isinstance(spec.env, dict) and all(isinstance(value, str) for value in spec.env.values()),
        "cwd": spec.cwd is None or isinstance(spec.cwd, str),
        "scope": type(spec.scope) is bool,
        "net": type(spec.net) is bool,
        "require": type(spec.require) is bool,
        "hidden": _texts(spec.hidden),
        "keep_fds": isinstance(spec.keep_fds, list | tuple) and all(type(fd) is int and fd > 2 for fd in spec.keep_fds),
        "report_fd": spec.report_fd is None or (type(spec.report_fd) is int and spec.report_fd > 2),
    }
    wrong = [key for key, fine in right.items() if not fine]
    if wrong:
        raise ValueError(f"wrong type or value: {', '.join(wrong)}")


def _texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)


def _read_all(fd: int) -> bytes:
    with open(fd, "rb") as stream:
        data = stream.read(_SPEC_BYTES + 1)
    if len(data) > _SPEC_BYTES:
        raise ConfigError(f"the launch spec is longer than {_SPEC_BYTES} bytes")
    return data


def close_all_but(keep: Sequence[int]) -> None:
    """Close every descriptor above 2 that is not in ``keep``, and let exec inherit those."""
    kept = set(keep)
    for fd in sorted(int(name) for name in os.listdir("/proc/self/fd")):
        if fd in kept:
            os.set_inheritable(fd, True)
        elif fd > 2:
            with contextlib.suppress(OSError):  # the one that listed the directory is closed already
                os.close(fd)


def launch(spec: LaunchSpec) -> NoReturn:
    """Close, restrict, report, exec. Raises StockadeError or OSError; the process must end then."""
    report = () if spec.report_fd is None else (spec.report_fd,)
    close_all_but((*spec.keep_fds, *report))
    if spec.cwd is not None:
        os.chdir(spec.cwd)
    enforcement = restrict(spec.rules, scope=spec.scope, net=spec.net)
    if spec.require and enforcement.level is not Level.FULL:
        raise NodeError(f"Landlock cannot restrict {', '.join(enforcement.missing)} on this kernel")
    if enforcement.level is not Level.UNENFORCED:
        _try_hidden(spec.hidden)
    for fd in report:
        os.write(fd, json.dumps(enforcement.to_json()).encode() + b"\n")
        os.close(fd)
    os.execvpe(spec.argv[0], list(spec.argv), dict(spec.env))


def _try_hidden(hidden: Sequence[str]) -> None:
    for path in hidden:
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        except OSError:
            continue
        raise NodeError(f"a Landlock rule still allows {path}", hint="allow the directories beside it: around()")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns only on failure."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        if len(words) != 1 or not words[0].isdecimal():
            raise ConfigError("usage: python -m stockade.sandbox._launch FD")
        launch(parse_spec(_read_all(int(words[0]))))
    except (StockadeError, OSError) as error:
        print(f"stockade: {error}", file=sys.stderr)  # noqa: T201 -- the one line promised
    return OWN_ERROR


if __name__ == "__main__":
    sys.exit(main())
