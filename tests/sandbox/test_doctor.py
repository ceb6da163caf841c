"""The doctor: what it finds here is true, what it cannot find is said, and no probe can break the others."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import stat
import subprocess
import time
from pathlib import Path

import pytest

from stockade.errors import NodeError
from stockade.sandbox import _landlock, _seccomp
from stockade.sandbox._doctor import Finding, Report, Status, _diagnose, _host, _kernel, _tools, diagnose
from stockade.sandbox._tools import Bubblewrap, find_bubblewrap
from tests.support import requires

NAMES = [
    *(
        "kernel",
        "user namespaces",
        "bubblewrap",
        "interpreter",
        "seccomp",
        "landlock",
        "cgroup",
        "sized tmpfs",
        "overlay",
    ),
    *("kvm", "gvisor", "apptainer", "firecracker", "slurm", "internet", "state directory", "memory", "swap", "cpus"),
    *("processes", "open files"),
]
NEEDED = {"user namespaces", "bubblewrap", "seccomp", "sized tmpfs"}
TRIAL = {"userns": "ok", "netns": "ok", "tmpfs": "ok", "overlay": "ok"}


@pytest.fixture(scope="module")
def timed() -> tuple[Report, float]:
    before = time.monotonic()
    report = diagnose()
    return report, time.monotonic() - before


def test_the_report_names_every_probe_once_and_is_json(timed):
    report, _ = timed
    assert [finding.name for finding in report.findings] == NAMES
    assert {finding.name for finding in report.findings if finding.needed} == NEEDED
    again = json.loads(json.dumps(report.to_json()))
    assert again["ready"] is report.ready
    assert [finding["name"] for finding in again["findings"]] == NAMES
    assert all("\n" not in str(value) for finding in again["findings"] for value in finding.values())


def test_it_is_quick(timed):
    assert timed[1] < 3


def test_this_machine_is_ready_exactly_when_a_sandbox_can_be_made(timed):
    """The other tests of this folder need what the doctor calls needed: both must tell the same story."""
    report, _ = timed
    requires(report.ready, f"not ready: {[finding.detail for finding in report.obstacles]}")
    assert report["user namespaces"].status is Status.OK
    assert report["bubblewrap"].status is Status.OK
    assert report["kvm"].status is not Status.OK, "that a guest boots is never proven by opening the device"


def test_every_ask_is_one_sentence(timed):
    for finding in timed[0].findings:
        if finding.ask:
            assert finding.ask.startswith("Please ")
            assert finding.ask.endswith(".")
            assert ". " not in finding.ask


def test_nothing_is_left_behind(tmp_path):
    state = tmp_path / "state"
    mounts, here = Path("/proc/self/mountinfo").read_text(), sorted(os.listdir("/tmp"))
    diagnose(state_dir=state)
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert not state.exists()
    assert [name for name in os.listdir("/tmp") if name not in here and name.startswith("inode")] == []


def test_one_broken_probe_does_not_hide_the_others(monkeypatch):
    def broken() -> Finding:
        raise ValueError("no such thing")

    monkeypatch.setattr(_kernel, "seccomp", broken)
    monkeypatch.setattr(_host, "swap", broken)
    report = diagnose()
    assert [finding.name for finding in report.findings] == NAMES
    assert report["seccomp"].status is report["swap"].status is Status.MISSING
    assert report["seccomp"].detail == "the probe failed: ValueError: no such thing"
    assert not report.ready
    assert report["cpus"].status is Status.OK


@pytest.mark.parametrize(
    "error",
    [OSError(2, "gone"), subprocess.TimeoutExpired("python", 2), MemoryError()],
    ids=lambda error: type(error).__name__,
)
def test_a_trial_that_cannot_run_is_not_a_pass(monkeypatch, error):
    def run(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(_tools, "run", run)
    report = diagnose()
    assert not report.ready
    for name in ("user namespaces", "sized tmpfs", "overlay"):
        assert report[name].status is Status.MISSING
        assert "the trial did not run" in report[name].detail


@pytest.mark.parametrize("output", [b"", b"[]", b"{}", b'{"userns": "ok"}', b"not json"])
def test_a_trial_that_answers_nonsense_is_not_a_pass(monkeypatch, output):
    done = subprocess.CompletedProcess([], 0, output, b"")
    monkeypatch.setattr(_tools, "run", lambda *_, **__: done)
    assert all(answer.startswith("the trial did not run") for answer in _diagnose._trial().values())


def test_the_trial_sees_that_namespaces_are_shut():
    """Run where nested user namespaces are off (bwrap --disable-userns), as on a node that forbids them."""
    python = "/usr/bin/python3"
    requires(os.path.exists(python), "no /usr/bin/python3")
    source = (Path(_diagnose.__file__).parent / "_trial.py").read_bytes()
    with open(find_bubblewrap().path, "rb") as program:
        command = [f"/proc/self/fd/{program.fileno()}", "--unshare-user", "--disable-userns", "--ro-bind", "/", "/"]
        command += ["--proc", "/proc", "--dev", "/dev", "--", python, "-I", "-S", "-"]
        done = _tools.run(command, data=source, fds=[program.fileno()], drop=True)
    assert done.returncode == 0, done.stderr.decode()
    answers = json.loads(done.stdout)
    assert "unshare" in answers["userns"]
    assert all(answers[name].startswith("not tried") for name in ("netns", "tmpfs", "overlay"))
    finding = _kernel.user_namespaces(answers, "uid 1")
    assert finding.status is Status.MISSING
    assert "unprivileged user namespaces" in finding.ask


@pytest.mark.parametrize(
    ("path", "value", "setting"),
    [
        ("user/max_user_namespaces", "0", "user.max_user_namespaces=15000"),
        ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
    ],
)
def test_the_switch_that_shuts_namespaces_is_named(monkeypatch, path, value, setting):
    files = {f"/proc/sys/{path}": value}
    monkeypatch.setattr(_kernel, "read_or", files.get)
    monkeypatch.setattr(_kernel, "read", files.__getitem__)
    finding = _kernel.user_namespaces({**TRIAL, "userns": "Operation not permitted"}, "uid 1")
    assert (finding.status, finding.needed) == (Status.MISSING, True)
    assert setting in finding.ask
    assert f"{path.replace('/', '.')}={value}" in finding.detail


def test_user_namespaces_without_network_are_not_enough():
    assert _kernel.user_namespaces({**TRIAL, "netns": "no"}, "uid 1").status is Status.MISSING


def test_old_kernels_are_named(monkeypatch):
    monkeypatch.setattr(platform, "release", lambda: "5.10.0-9-amd64")
    assert _kernel.kernel().status is Status.LIMITED
    monkeypatch.setattr(platform, "release", lambda: "5.14.0-503.el9")
    assert _kernel.kernel().status is Status.OK
    monkeypatch.setattr(platform, "release", lambda: "strange")
    assert _kernel.kernel().status is Status.LIMITED


@pytest.mark.parametrize(("abi", "status"), [(0, "missing"), (1, "limited"), (5, "limited"), (6, "ok"), (9, "ok")])
def test_landlock_by_abi(monkeypatch, abi, status):
    monkeypatch.setattr(_landlock, "abi", lambda: abi)
    assert _kernel.landlock().status == status


def test_seccomp_without_a_filter_for_this_machine(monkeypatch):
    def missing() -> str:
        raise NodeError("there is no seccomp filter for machine 's390x'")

    monkeypatch.setattr(_seccomp, "filter_digest", missing)
    assert (_kernel.seccomp().status, _kernel.seccomp().needed) == (Status.MISSING, True)


@pytest.mark.parametrize(
    ("actions", "status"),
    [
        ("kill_process errno user_notif", "ok"),
        ("kill_process errno", "limited"),
        ("kill_thread errno user_notif", "missing"),
    ],
)
def test_seccomp_actions(monkeypatch, actions, status):
    monkeypatch.setattr(_kernel, "read", lambda _: actions)
    assert _kernel.seccomp().status == status


# ------------------------------------------------------------------------------------------------- programs


def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, body: str) -> Path:
    program = tmp_path / name
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return program


def test_a_setuid_bubblewrap_is_refused(tmp_path, monkeypatch):
    """CVE-2026-41163: only a setuid bubblewrap is affected, and none needs to be setuid."""
    copy = tmp_path / "bwrap"
    shutil.copy(find_bubblewrap().path, copy)
    monkeypatch.setattr(_tools, "find_bubblewrap", lambda: Bubblewrap(str(copy), None, "", "0.11.0"))
    assert "setuid: refused" not in _tools.bubblewrap().detail
    copy.chmod(0o755 | stat.S_ISUID)
    finding = _tools.bubblewrap()
    assert finding.status is Status.MISSING
    assert "setuid: refused" in finding.detail
    assert "CVE-2026-41163" in finding.ask


def test_a_bubblewrap_that_makes_no_sandbox_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(_tools, "find_bubblewrap", lambda: Bubblewrap("/bin/false", None, "", "0.11.0"))
    finding = _tools.bubblewrap()
    assert (finding.status, finding.needed) == (Status.MISSING, True)


@pytest.mark.parametrize(
    ("version", "asks"), [("apptainer version 1.4.4", True), ("apptainer version 1.4.5-2", False), ("?", True)]
)
def test_an_apptainer_with_a_known_escape_is_named(tmp_path, monkeypatch, version, asks):
    fake(tmp_path, monkeypatch, "apptainer", f"echo '{version}'")
    assert bool(_tools.apptainer().ask) is asks


def test_what_programs_print_is_made_harmless(tmp_path, monkeypatch):
    fake(tmp_path, monkeypatch, "runsc", r"printf '\033[2Jrunsc\a release-1\nsecond line'")
    detail = _tools.gvisor().detail
    assert "?[2Jrunsc? release-1 at " in detail
    assert "second" not in detail


def test_a_program_that_hangs_is_a_finding(tmp_path, monkeypatch):
    fake(tmp_path, monkeypatch, "firecracker", "exec /bin/sleep 60")
    monkeypatch.setattr(_tools, "TIMEOUT_S", 0.2)
    finding = _diagnose._guarded("firecracker", _tools.firecracker, needed=False)
    assert finding.status is Status.MISSING
    assert "TimeoutExpired" in finding.detail


def test_probed_programs_get_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "canary")
    fake(tmp_path, monkeypatch, "runsc", "echo env: $HF_TOKEN.")
    assert "env: ." in _tools.gvisor().detail


@pytest.mark.parametrize(
    ("job", "said"), [("4711", "inside job 4711"), ("1;x", "not inside a job"), ("", "not inside a job")]
)
def test_slurm(tmp_path, monkeypatch, job, said):
    monkeypatch.setenv("SLURM_JOB_ID", job)
    fake(tmp_path, monkeypatch, "sbatch", "exit 0")
    finding = _tools.slurm()
    assert (finding.status, finding.detail) == (Status.OK, f"sbatch; {said}")


# ------------------------------------------------------------------------------------------------- the host


MOUNTS = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:30 / /home rw,relatime - nfs4 server:/home rw
31 30 0:31 / /home/me/with\040space rw - lustre mgs:/l rw
32 22 0:32 / /tmp rw - ext4 /dev/sdb rw
33 22 0:33 / /tmp rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", ("/", "ext4")),
        ("/homework", ("/", "ext4")),
        ("/home/me", ("/home", "nfs4")),
        ("/home/me/with space/x", ("/home/me/with space", "lustre")),
        ("/tmp/x", ("/tmp", "tmpfs")),
    ],
)
def test_mount_of(monkeypatch, path, expected):
    monkeypatch.setattr(_host, "read", lambda _: MOUNTS)
    assert _host.mount_of(path) == expected


def test_a_state_directory_on_a_network_file_system_is_named(tmp_path, monkeypatch):
    assert _host.state_directory(tmp_path / "a" / "b").status is Status.OK
    assert not (tmp_path / "a").exists()
    monkeypatch.setattr(_host, "mount_of", lambda _: ("/home", "nfs4"))
    finding = _host.state_directory(tmp_path)
    assert finding.status is Status.LIMITED
    assert "STOCKADE_STATE" in finding.ask


@pytest.mark.parametrize(
    ("cgroup", "files", "status"),
    [
        ("0::/job\n", {"/sys/fs/cgroup/job/cgroup.controllers": "cpu memory pids"}, "limited"),
        ("0::/job\n", {"/sys/fs/cgroup/job/cgroup.controllers": "cpu"}, "limited"),
        ("4:memory:/x\n0::/\n", {}, "limited"),
        ("0::/\n", {}, "missing"),
        ("", {}, "missing"),
    ],
)
def test_cgroups(monkeypatch, cgroup, files, status):
    monkeypatch.setattr(_kernel, "read", lambda _: cgroup.strip())
    monkeypatch.setattr(_kernel, "read_or", files.get)
    monkeypatch.setattr(_kernel, "_unified_root", lambda: "/sys/fs/cgroup")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert _kernel.cgroups().status == status
    assert _kernel.cgroups().ask.startswith("Please delegate")
    if "memory pids" in str(files):
        monkeypatch.setattr(os, "access", lambda *_: True)
        assert _kernel.cgroups().status is Status.OK


ROUTE4 = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\neth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\n"
ROUTE6_LO = f"{'0' * 32} 00 {'0' * 32} 00 {'0' * 32} ffffffff 00000001 00000000 00200200 lo\n"


@pytest.mark.parametrize(
    ("files", "status"),
    [
        ({}, "missing"),
        ({"/etc/resolv.conf": "nameserver 10.0.0.1\n"}, "limited"),
        ({"/proc/net/route": ROUTE4}, "limited"),
        ({"/proc/net/ipv6_route": ROUTE6_LO}, "missing"),
        ({"/etc/resolv.conf": "# x\nnameserver\nnameserver 10.0.0.1\n", "/proc/net/route": ROUTE4}, "ok"),
    ],
    ids=["nothing", "resolver", "route", "unreachable6", "both"],
)
def test_internet_is_read_from_the_configuration(monkeypatch, files, status):
    monkeypatch.setattr(_host, "read_or", files.get)
    finding = _host.internet()
    assert finding.status == status
    assert "nothing was contacted" in finding.detail


def test_swap_and_small_limits_are_named(monkeypatch):
    monkeypatch.setattr(_host, "_meminfo", lambda: {"SwapTotal": 1 << 31})
    assert _host.swap().status is Status.LIMITED
    monkeypatch.setattr(resource, "getrlimit", lambda _: (200, 500))
    assert _host.processes().status is Status.LIMITED
    assert "ulimit -u" in _host.processes().ask
    assert _host.open_files().status is Status.LIMITED


# ------------------------------------------------------------------------------------------------- the report


def test_obstacles_come_first_among_the_asks():
    report = Report(
        (
            Finding("a", Status.LIMITED, "", "Please a."),
            Finding("b", Status.MISSING, "", "Please b.", needed=True),
            Finding("c", Status.MISSING, "", "Please a."),
        )
    )
    assert report.asks == ("Please b.", "Please a.")
    assert not report.ready
    with pytest.raises(TypeError, match="ready"):
        bool(report)
    with pytest.raises(KeyError):
        report["d"]
