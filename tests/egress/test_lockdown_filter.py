"""The worker's shipped filters, read by a small interpreter of classic BPF: what each call answers on both machines."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.egress import _filters
from stockade.egress._filters import VARIANTS
from stockade.errors import NodeError
from tests.support import requires
from tools import build_seccomp
from tools.build_seccomp import WORKER
from tools.worker_calls import CONDITIONAL, GROUPS

MACHINES = ("x86_64", "aarch64")
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
ANSWERS = {"allow": ALLOW, "eperm": EPERM, "enosys": ENOSYS, "kill": KILL}
LOAD, AND, JUMP, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
HIGH = 0xABCD_EF01 << 32
"""Rubbish in the upper half of an argument, which the kernel does not look at."""

SIDECARS = {variant: json.loads((WORKER[variant].folder / "filters.json").read_text()) for variant in VARIANTS}
EVERY = pytest.mark.parametrize(("variant", "machine"), [(one, other) for one in VARIANTS for other in MACHINES])


def numbers(variant: str, machine: str) -> dict[str, int]:
    groups = SIDECARS[variant]["machines"][machine]["syscalls"].values()
    return {name: number for group in groups for name, number in group.items()}


NUMBERS = {(variant, machine): numbers(variant, machine) for variant in VARIANTS for machine in MACHINES}


def program(variant: str, machine: str) -> list[tuple[int, int, int, int]]:
    data = (WORKER[variant].folder / f"{machine}.bpf").read_bytes()
    return [struct.unpack_from("=HBBI", data, at) for at in range(0, len(data), 8)]


PROGRAMS = {(variant, machine): program(variant, machine) for variant in VARIANTS for machine in MACHINES}


def answer(variant: str, machine: str, number: int, *arguments: int, arch: int | None = None) -> int:
    """Run the filter as the kernel would: ``struct seccomp_data`` in, the action out."""
    words = [value & 0xFFFF_FFFF_FFFF_FFFF for value in (*arguments, *[0] * (6 - len(arguments)))]
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, ARCH[machine] if arch is None else arch, 0, *words)
    at, accumulator, code = 0, 0, PROGRAMS[variant, machine]
    while True:
        operation, yes, no, value = code[at]
        at += 1
        if operation == LOAD:
            assert value % 4 == 0
            accumulator = struct.unpack_from("<I", data, value)[0]
        elif operation == AND:
            accumulator &= value
        elif operation == JUMP:
            at += value
        elif operation in (EQUAL, AT_LEAST):
            at += yes if (accumulator == value if operation == EQUAL else accumulator >= value) else no
        elif operation == RETURN:
            return value
        else:
            pytest.fail(f"instruction {operation:#x} at {at - 1}")


@EVERY
def test_every_listed_call_answers_as_listed(variant: str, machine: str) -> None:
    known = NUMBERS[variant, machine]
    for group in GROUPS:
        for name in group.names:
            if name in known:
                for arguments in ((), [0xFFFF_FFFF_FFFF_FFFF] * 6):
                    assert answer(variant, machine, known[name], *arguments) == ANSWERS[group.action], name


@EVERY
def test_what_is_named_nowhere_answers_enosys(variant: str, machine: str) -> None:
    named = set(NUMBERS[variant, machine].values())
    assert {answer(variant, machine, number) for number in range(2048) if number not in named} == {ENOSYS}
    assert answer(variant, machine, -1) == ENOSYS


@EVERY
def test_other_architectures_are_killed(variant: str, machine: str) -> None:
    for arch in (0x40000003, 0x40000028, 0, 0xFFFFFFFF, *(set(ARCH.values()) - {ARCH[machine]})):
        assert {answer(variant, machine, number, arch=arch) for number in (0, 1, 59, 221, 425)} == {KILL}
    if machine == "x86_64":
        assert {answer(variant, machine, 0x4000_0000 + number) for number in range(600)} == {KILL}


THREAD, FORK, VFORK = 0x003D0F00, 0x01200011, 0x00004111
CASES = [
    ("clone", (THREAD,), EPERM),
    ("clone", (HIGH | THREAD,), EPERM),
    ("clone", (FORK,), KILL),
    ("clone", (VFORK,), KILL),
    ("clone", (HIGH | FORK,), KILL),
    ("clone", (0x10000011,), KILL),
    ("socket", (2, 1, 0), ALLOW),
    ("socket", (10, 0o2004001, 6), ALLOW),
    ("socket", (2, 0o2004002, 0), ALLOW),
    ("socket", (HIGH | 2, HIGH | 2, HIGH | 17), ALLOW),
    *[("socket", (family, kind, 0), EPERM) for family in (0, *range(3, 10), *range(11, 46)) for kind in (1, 2, 3, 5)],
    *[("socket", (2, kind, protocol), EPERM) for kind, protocol in ((3, 1), (3, 255), (1, 132), (1, 262), (5, 132))],
    ("socket", (1, 2, 0), EPERM),
    ("socket", (1, 5, 0), EPERM),
    ("mmap", (0, 4096, 3, 0x22), ALLOW),
    ("mmap", (0, 4096, 5, 0x22), EPERM),
    ("mmap", (0, 4096, HIGH | 7, 0x22), EPERM),
    ("mprotect", (0, 4096, 1), ALLOW),
    ("mprotect", (0, 4096, 4), EPERM),
    ("mprotect", (0, 4096, 0x01000005), EPERM),
    *[("fcntl", (3, command), ALLOW) for command in (0, 1, 2, 3, 4, 6, 37, 1030, 1034, HIGH | 3)],
    *[("fcntl", (3, command), EPERM) for command in (8, 9, 10, 11, 15, 16, 1024, 1026, HIGH | 8)],
    *[("ioctl", (3, request), ALLOW) for request in (0x5421, 0x541B, 0x5451, 0x5450)],
    *[("ioctl", (3, request), EPERM) for request in (0x5401, 0x5412, 0x5452, 0x8901, 0x8902, 0x8927, HIGH | 0x5412)],
    *[("setsockopt", (3, level, name), ALLOW) for level, name in ((1, 13), (6, 1), (6, 18))],
    *[
        ("setsockopt", (3, level, name), EPERM)
        for level, name in ((1, 26), (1, 50), (1, 25), (6, 31), (6, 19), (0, 64), (41, 64), (1, 1), (270, 1))
    ],
    *[("getsockopt", (3, level, 4), ALLOW) for level in (1, 6)],
    *[("getsockopt", (3, level, 80), EPERM) for level in (0, 41, 263, 17)],
    ("prlimit64", (0, 7), ALLOW),
    ("prlimit64", (1, 7), EPERM),
]


@EVERY
@pytest.mark.parametrize("name", sorted({case[0] for case in CASES}))
def test_arguments_decide(variant: str, machine: str, name: str) -> None:
    for _, arguments, expected in (case for case in CASES if case[0] == name):
        found = answer(variant, machine, NUMBERS[variant, machine][name], *arguments)
        assert found == expected, [hex(value) for value in arguments]


@pytest.mark.parametrize("machine", MACHINES)
def test_unix_streams_make_the_whole_difference(machine: str) -> None:
    plain, unix = ({rule.name: rule for rule in CONDITIONAL[variant]} for variant in VARIANTS)
    assert {name for name in plain if plain[name] != unix[name]} == {"socket"}
    number = NUMBERS["plain", machine]["socket"]
    for kind in (1, 0o2004001):
        assert answer("plain", machine, number, 1, kind, 0) == EPERM
        assert answer("unix", machine, number, 1, kind, 0) == ALLOW


def test_every_judged_call_has_cases_for_both_answers() -> None:
    for rule in CONDITIONAL["plain"]:
        assert len({case[2] for case in CASES if case[0] == rule.name}) == 2, rule.name


@given(
    st.sampled_from(VARIANTS),
    st.sampled_from(MACHINES),
    st.tuples(*[st.integers(0, 20) | st.integers(0, 2**64 - 1)] * 3),
)
def test_socket_agrees_with_its_definition(variant: str, machine: str, arguments: tuple[int, int, int]) -> None:
    family, kind, protocol = (value & 0xFFFFFFFF for value in arguments)
    inet = family in (2, 10) and kind & 15 in (1, 2) and protocol in (0, 6, 17)
    expected = inet or (variant == "unix" and family == 1 and kind & 15 == 1)
    assert (answer(variant, machine, NUMBERS[variant, machine]["socket"], *arguments) == ALLOW) == expected


# What a worker must never get, whatever else the list says: written down a second time, on purpose.
NEVER = """
    acct add_key bpf chroot delete_module execve execveat fanotify_init finit_module fork fsconfig fsmount fsopen fspick
    init_module io_uring_enter io_uring_register io_uring_setup kcmp kexec_file_load kexec_load keyctl mount
    mount_setattr move_mount name_to_handle_at open_by_handle_at open_tree perf_event_open pidfd_getfd pivot_root
    process_vm_readv process_vm_writev ptrace quotactl reboot request_key setns swapoff swapon umount2 unshare
    userfaultfd vfork
"""


@EVERY
@pytest.mark.parametrize("name", NEVER.split())
def test_what_nobody_does_by_mistake_is_killed(variant: str, machine: str, name: str) -> None:
    known = NUMBERS[variant, machine]
    if name not in known:
        assert (machine, name) in {("aarch64", "fork"), ("aarch64", "vfork")}
        return
    assert answer(variant, machine, known[name]) == KILL


# ------------------------------------------------------------------------------------- shipped bytes


@pytest.mark.promise("S3.18")
@EVERY
def test_the_shipped_bytes_come_from_the_list(variant: str, machine: str) -> None:
    """Compiled again from the list and the numbers of the sidecar; needs no libseccomp."""
    listing = WORKER[variant]
    compiled = build_seccomp.compile_filter(machine, NUMBERS[variant, machine], listing)
    assert compiled == (listing.folder / f"{machine}.bpf").read_bytes()
    listed = build_seccomp.names(listing)
    for kind, known in SIDECARS[variant]["machines"][machine]["syscalls"].items():
        assert all(listed[name] == kind for name in known)


@pytest.mark.parametrize("variant", VARIANTS)
def test_building_again_gives_the_shipped_files(variant: str) -> None:
    try:
        version = build_seccomp.libseccomp_version()
    except (ImportError, OSError, AttributeError, TypeError):
        version = ""
    shipped = SIDECARS[variant]["libseccomp"]
    requires(version == shipped, f"libseccomp is {version or 'not here'}", must_run_in_ci=False)
    for name, content in build_seccomp.build(WORKER[variant]).items():
        assert (WORKER[variant].folder / name).read_bytes() == content, name


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "filters"
    for variant in VARIANTS:
        shutil.copytree(WORKER[variant].folder, folder / variant)
    monkeypatch.setattr(_filters, "_FOLDER", folder)
    _filters.load.cache_clear()
    yield folder
    _filters.load.cache_clear()


@pytest.mark.parametrize("damage", ["flip", "empty", "cut", "lose", "lose the list", "spoil the list"])
def test_a_damaged_filter_is_refused(copied: Path, damage: str) -> None:
    loaded = _filters.load("plain")
    assert loaded is not None
    _filters.load.cache_clear()
    sidecar = copied / "plain" / "filters.json"
    machine = next(name for name in MACHINES if SIDECARS["plain"]["machines"][name]["digest"] == loaded.digest)
    path = copied / "plain" / f"{machine}.bpf"
    content = path.read_bytes()
    if damage == "flip":
        path.write_bytes(content[:-1] + bytes((content[-1] ^ 1,)))
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "cut":
        path.write_bytes(content[:-8])
    elif damage == "lose":
        path.unlink()
    elif damage == "lose the list":
        sidecar.unlink()
    else:
        sidecar.write_text("[]")
    with pytest.raises(NodeError, match="seccomp"):
        _filters.load("plain")
    assert _filters.load("unix") is not None


def test_a_machine_without_a_filter_has_none(copied: Path) -> None:
    for sidecar in copied.glob("*/filters.json"):
        sidecar.write_text('{"machines": {"riscv64": {"digest": "sha256:0"}}}')
    assert _filters.load("plain") is None
