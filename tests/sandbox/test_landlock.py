"""Landlock as this kernel enforces it, at every ABI it offers, against the same attempts without it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from stockade.errors import ConfigError, NodeError
from stockade.sandbox import _landlock
from stockade.sandbox._landlock import Access, Enforcement, Level, Right, Rule, abi, around, handled, restrict
from stockade.sandbox._launch import LaunchSpec, parse_spec
from tests.support import ROOT, requires

ABI = abi()
LEVELS = [level for level in range(1, 8) if level <= ABI]
BATTERY = Path(__file__).parent / "landlock_battery.py"
ENV = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}


def allow(path: str, access: str, *, optional: bool = False) -> dict[str, object]:
    return {"path": path, "access": access, "optional": optional}


SYSTEM = [allow(path, "read_exec", optional=True) for path in ("/usr", "/bin", "/lib", "/lib64", "/proc")]


def needs_landlock() -> None:
    requires(ABI >= 1, "this kernel has no Landlock")


@dataclass
class World:
    """A tree to attack, and a process, an abstract socket and a TCP port outside."""

    root: Path
    outside: subprocess.Popen[bytes]
    abstract: socket.socket
    tcp: socket.socket

    def rules(self) -> list[dict[str, object]]:
        interpreter = {sys.prefix, sys.base_prefix, str(ROOT / "src")}
        access = [(str(self.root / str(name)), str(name)) for name in list(Access)[:4]]
        return [
            *SYSTEM,
            *(allow(path, "read_exec") for path in sorted(interpreter)),
            *(allow(path, name) for path, name in access),
            allow(str(self.root / "one" / "file"), "read"),
            allow("/dev/null", "devices"),
            allow("/dev/pts", "write", optional=True),
            allow(str(self.root / "absent"), "write", optional=True),
        ]

    def attempt(self, max_abi: int | None, *, scope: bool = True, net: bool = True) -> dict[str, dict[str, int]]:
        spec = {
            "root": str(self.root),
            "rules": self.rules(),
            "scope": scope,
            "net": net,
            "max_abi": max_abi,
            "outside": self.outside.pid,
            "abstract": self.abstract.getsockname()[1:].decode(),
            "port": self.tcp.getsockname()[1],
        }
        done = subprocess.run(
            [sys.executable, str(BATTERY), json.dumps(spec)], capture_output=True, env=ENV, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        answer: dict[str, dict[str, int]] = json.loads(done.stdout)
        return answer


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    for name in ("hidden", "read", "read_exec", "write", "write/deeper", "write_exec", "one"):
        (tmp_path / name).mkdir()
    for name in ("hidden/secret", "hidden/victim", "read/file", "write/file", "one/file", "one/other"):
        (tmp_path / name).write_text("content")
    for name in ("read", "read_exec", "write", "write_exec"):
        shutil.copy("/bin/true", tmp_path / name / "program")
    (tmp_path / "write" / "link").symlink_to(tmp_path / "hidden" / "secret")
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket() as tcp:
        abstract.bind("")  # the kernel picks an abstract name
        abstract.listen(8)
        tcp.bind(("127.0.0.1", 0))
        tcp.listen(8)
        with subprocess.Popen(["/bin/sleep", "60"]) as outside:
            yield World(tmp_path, outside, abstract, tcp)
            outside.kill()


HIDDEN = {
    "read hidden",
    "list hidden",
    "read hidden by ..",
    "read hidden by link",
    "read hidden by /proc",
    "write hidden",
    "create in hidden",
    "delete hidden",
    "move out of hidden",
    "link out of hidden",
}
FORBIDDEN = HIDDEN | {"write read", "create in read", "execute read", "execute write", "read beside one file"}
ALLOWED = {
    "read read",
    "list read",
    "execute read_exec",
    "execute write_exec",
    "read write",
    "write write",
    "truncate write",
    "create in write",
    "fifo in write",
    "symlink in write",
    "remove from write",
    "move within write",
    "read one file",
    "write device",
    "signal own child",
}
SINCE = {
    "truncate hidden": 3,
    "truncate read": 3,
    "connect tcp": 4,
    "bind tcp": 4,
    "ioctl unlisted device": 5,
    "signal outside": 6,
    "abstract socket outside": 6,
}


def test_every_attempt_works_without_landlock(world):
    did = world.attempt(None)["did"]
    # "delete hidden" and "move out of hidden" change the tree, so what follows them may miss a file, nothing else.
    assert {name for name, got in did.items() if got} <= {"link out of hidden"}
    assert set(did) == FORBIDDEN | ALLOWED | set(SINCE) | {"move between directories"}


@pytest.mark.parametrize("level", LEVELS or [pytest.param(1, id="none")])
def test_each_abi_forbids_what_it_can(world, level):
    needs_landlock()
    answer = world.attempt(level)
    did = answer["did"]
    for name in FORBIDDEN:
        assert did[name] in (errno.EACCES, errno.EXDEV, errno.EPERM), name
    for name in ALLOWED:
        assert did[name] == 0, name
    for name, since in SINCE.items():
        # Below that ABI the right does not exist, so nothing restricts it: this is what "missing" has to say.
        assert (did[name] in (errno.EACCES, errno.EPERM)) == (level >= since), name
    # ABI 1 refuses every move between directories; from ABI 2 on it is a right, and granted.
    assert did["move between directories"] == (errno.EXDEV if level == 1 else 0)
    enforcement = answer["enforcement"]
    assert enforcement["abi"] == level
    assert enforcement["level"] == ("full" if level >= 6 else "partial")
    assert enforcement["skipped"] == [str(world.root / "absent")]


MISSING = ["truncation of files", "ioctl on devices", "TCP", "signals and abstract sockets"]


@pytest.mark.parametrize("level", LEVELS or [pytest.param(1, id="none")])
def test_what_is_missing_is_named(world, level):
    needs_landlock()
    known = {"truncation of files": 3, "ioctl on devices": 5, "TCP": 4, "signals and abstract sockets": 6}
    asked = world.attempt(level)["enforcement"]["missing"]
    assert asked == [name for name in MISSING if level < known[name]]
    unasked = world.attempt(level, scope=False, net=False)["enforcement"]["missing"]
    assert unasked == [name for name in MISSING[:2] if level < known[name]]


def test_net_and_scope_are_off_unless_asked(world):
    needs_landlock()
    did = world.attempt(7, scope=False, net=False)["did"]
    assert [did[name] for name in ("connect tcp", "bind tcp", "signal outside", "abstract socket outside")] == [0] * 4


@pytest.mark.promise("S8.3")
def test_a_kernel_without_landlock_is_reported(world):
    """``max_abi=0`` is what an older kernel looks like: nothing is restricted, and nothing claims to be."""
    answer = world.attempt(0)
    assert answer["enforcement"]["level"] == "unenforced"
    assert answer["enforcement"]["abi"] == 0
    assert answer["enforcement"]["missing"][0] == "files"
    assert answer["did"]["read hidden"] == 0


@pytest.mark.parametrize(
    ("level", "bits"), [(0, 0), (1, 13), (2, 14), (3, 15), (4, 15), (5, 16), (6, 16), (7, 16), (99, 16)]
)
def test_handled_rights_per_abi(level, bits):
    """landlock(7): 13 rights in ABI 1, REFER from 2, TRUNCATE from 3, IOCTL_DEV from 5."""
    assert handled(level) == (1 << bits) - 1


def test_no_preset_makes_devices():
    for rights in _landlock._RIGHTS.values():
        assert not rights & (Right.MAKE_CHAR | Right.MAKE_BLOCK)


def test_required_path_missing_is_an_error(tmp_path):
    with pytest.raises(NodeError, match=r"cannot allow .*absent"):
        restrict([Rule(str(tmp_path / "absent"), Access.READ)], scope=False)
    with pytest.raises(NodeError, match="cannot allow"):
        restrict([Rule("/", Access.READ), Rule("/etc/passwd/x", Access.READ)], scope=False)


def test_several_threads_are_refused():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with pytest.raises(NodeError, match="several"):
            restrict([Rule("/", Access.READ)], scope=False)
    finally:
        stop.set()
        thread.join()


def test_enforcement_has_no_truth_value():
    with pytest.raises(TypeError, match="three levels"):
        bool(Enforcement(Level.UNENFORCED, 0, (), ()))


# ------------------------------------------------------------------------------------------------- around


def test_around_allows_the_siblings_only(tmp_path):
    for name in ("a/x", "a/hidden/deep", "b", "c"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "a" / "file").touch()
    (tmp_path / "a" / "alias").symlink_to("hidden")
    (tmp_path / "up").symlink_to("a")
    rules = around(str(tmp_path), [str(tmp_path / "a" / "hidden"), str(tmp_path / "c")], Access.WRITE)
    assert [rule.path for rule in rules] == [str(tmp_path / name) for name in ("a/file", "a/x", "b")]
    assert all(rule.optional and rule.access is Access.WRITE for rule in rules)


def test_around_judges_real_paths(tmp_path):
    (tmp_path / "real" / "hidden").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    assert around(str(tmp_path / "link"), [str(tmp_path / "real" / "hidden")], Access.READ) == ()
    assert around(str(tmp_path / "real"), [str(tmp_path / "link" / "hidden")], Access.READ) == ()
    assert around(str(tmp_path / "real" / "hidden"), [str(tmp_path / "link")], Access.READ) == ()


def test_around_takes_names_whole(tmp_path):
    for name in ("run", "run2"):
        (tmp_path / name).mkdir()
    assert [rule.path for rule in around(str(tmp_path), [str(tmp_path / "run")], Access.READ)] == [
        str(tmp_path / "run2")
    ]
    assert around("/usr", ["/nowhere/at/all"], Access.READ) == (Rule("/usr", Access.READ, optional=True),)


# ------------------------------------------------------------------------------------------------- launch


def start(spec: Mapping[str, object], *, report: bool = False) -> tuple[subprocess.CompletedProcess[bytes], bytes]:
    reader, writer = os.pipe()
    told, tell = os.pipe()
    canary = os.open("/etc/passwd", os.O_RDONLY)
    try:
        os.write(writer, json.dumps({**spec, **({"report_fd": tell} if report else {})}).encode())
        os.close(writer)
        done = subprocess.run(
            [sys.executable, "-m", "stockade.sandbox._launch", str(reader)],
            pass_fds=(reader, tell, canary),
            capture_output=True,
            env={**ENV, "SECRET": "canary"},
            timeout=60,
            check=False,
        )
        os.close(tell)
        return done, os.read(told, 65536)
    finally:
        for fd in (reader, told, canary):
            os.close(fd)


@pytest.mark.promise("S8.3")
def test_launch_starts_a_program_that_cannot_open_the_record(tmp_path):
    needs_landlock()
    for name in ("work", "record"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(f"content of {name}")
    script = f"cat {tmp_path}/work/file; cat {tmp_path}/record/file; ls {tmp_path}/record; echo; env; ls /proc/self/fd"
    spec = {
        "argv": ["sh", "-c", script],
        "env": {"PATH": "/usr/bin:/bin", "ONLY": "this"},
        "cwd": str(tmp_path / "work"),
        "rules": [*SYSTEM, {"path": str(tmp_path / "work"), "access": "write"}],
        "hidden": [str(tmp_path / "record")],
    }
    done, line = start(spec, report=True)
    out = done.stdout.decode()
    assert out.startswith("content of work")
    assert "content of record" not in out
    assert done.stderr.decode().count("Permission denied") == 2
    assert "ONLY=this" in out
    assert "canary" not in out
    assert out.split()[-4:] == ["0", "1", "2", "3"]  # 3 is ls reading the directory
    assert json.loads(line)["level"] == ("full" if ABI >= 6 else "partial")


def test_launch_refuses_rules_that_allow_what_is_to_be_hidden(tmp_path):
    """The rule is for a directory above, under another name: only trying finds out."""
    needs_landlock()
    (tmp_path / "real" / "record").mkdir(parents=True)
    (tmp_path / "alias").symlink_to("real")
    rules = [*SYSTEM, {"path": str(tmp_path / "alias"), "access": "read"}]
    spec = {"argv": ["/bin/true"], "env": {}, "rules": rules, "hidden": [str(tmp_path / "real" / "record")]}
    done, line = start(spec, report=True)
    assert done.returncode == 125
    assert b"still allows" in done.stderr
    assert line == b""


def test_launch_keeps_the_descriptors_it_is_told_to():
    reader, writer = os.pipe()
    told, tell = os.pipe()
    argv = (sys.executable, "-S", "-c", f"import os; os.write({tell}, b'kept')")
    spec = LaunchSpec(argv, {}, (Rule("/", Access.READ_EXEC),), keep_fds=(tell,))
    with open(writer, "wb") as stream:
        stream.write(spec.to_json())
    command = [sys.executable, "-m", "stockade.sandbox._launch", str(reader)]
    subprocess.run(command, pass_fds=(reader, tell), env=ENV, check=True, timeout=60)
    os.close(reader)
    os.close(tell)
    with open(told, "rb") as stream:
        assert stream.read() == b"kept"


GOOD: dict[str, object] = {"argv": ["/bin/true"], "env": {}, "rules": [{"path": "/", "access": "read_exec"}]}


@pytest.mark.parametrize(
    "change",
    [
        {"argv": []}, {"argv": "true"}, {"argv": [1]}, {"env": None}, {"env": {"a": 1}}, {"rules": None}, {"rules": [1]},
        {"rules": [{"path": "/"}]}, {"rules": [{"path": "relative", "access": "read"}]},
        {"rules": [{"path": "/", "access": "everything"}]}, {"rules": [{"path": "/", "access": "read", "more": 1}]},
        {"rules": [{"path": "/", "access": "read", "optional": "yes"}]}, {"scope": 1}, {"net": "no"}, {"require": None},
        {"keep_fds": [2]}, {"keep_fds": 5}, {"report_fd": 1}, {"report_fd": True}, {"cwd": 7}, {"hidden": "/x"},
        {"surprise": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_spec_is_refused(change):
    assert parse_spec(json.dumps(GOOD).encode()).argv == ("/bin/true",)
    with pytest.raises(ConfigError, match="not a launch spec"):
        parse_spec(json.dumps({**GOOD, **change}).encode())


def test_a_spec_survives_the_trip():
    spec = LaunchSpec(
        ("a", "b"), {"K": "v"}, (Rule("/x", Access.DEVICES, True),), "/", False, True, True, ("/h",), (7,), 9
    )
    assert parse_spec(spec.to_json()) == spec


@pytest.mark.parametrize("words", [[], ["x"], ["-1"], ["999"], ["3", "4"]], ids=str)
def test_own_errors_are_one_line_and_status_125(words):
    done = subprocess.run(
        [sys.executable, "-m", "stockade.sandbox._launch", *words],
        capture_output=True,
        env=ENV,
        check=False,
        timeout=60,
    )
    assert done.returncode == 125
    assert done.stderr.startswith(b"stockade: ")
    assert done.stderr.count(b"\n") == 1


def test_a_program_that_is_not_there_is_an_own_error():
    done, _ = start({**GOOD, "argv": ["/nowhere/program"]})
    assert (done.returncode, done.stderr.count(b"\n")) == (125, 1)
