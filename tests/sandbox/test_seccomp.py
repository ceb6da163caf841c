"""The shipped filters, read by a small interpreter of classic BPF: what each call answers on both machines.

The interpreter knows nothing of how the programs are made. What a call should answer is written down here by hand
where arguments matter, and taken from the list where they do not.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.errors import NodeError
from stockade.sandbox import _seccomp
from stockade.sandbox._seccomp_table import CONDITIONAL, GROUPS
from tests.support import requires
from tools import build_seccomp

MACHINES = ("x86_64", "aarch64")
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL, EPERM, EINVAL, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050016, 0x00050026
ANSWERS = {"allow": ALLOW, "eperm": EPERM, "enosys": ENOSYS}
LOAD, AND, JUMP, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
HIGH = 0xABCD_EF01 << 32
"""Rubbish in the upper half of an argument, which the kernel does not look at."""

SIDECAR = json.loads((build_seccomp.FILTERS / "filters.json").read_text())
NUMBERS = {
    machine: {name: nr for group in SIDECAR["machines"][machine]["syscalls"].values() for name, nr in group.items()}
    for machine in MACHINES
}


def decode(program: bytes) -> list[tuple[int, int, int, int]]:
    return [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]


PROGRAMS = {machine: decode(_seccomp.filter_bytes(machine)) for machine in MACHINES}


def answer(machine: str, number: int, *arguments: int, arch: int | None = None) -> int:
    """Run the filter as the kernel would: ``struct seccomp_data`` in, the action out."""
    words = [value & 0xFFFF_FFFF_FFFF_FFFF for value in (*arguments, *[0] * (6 - len(arguments)))]
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, ARCH[machine] if arch is None else arch, 0, *words)
    at, accumulator, program = 0, 0, PROGRAMS[machine]
    while True:
        code, yes, no, value = program[at]
        at += 1
        if code == LOAD:
            accumulator = struct.unpack_from("<I", data, value)[0]
        elif code == AND:
            accumulator &= value
        elif code == JUMP:
            at += value
        elif code in (EQUAL, AT_LEAST):
            at += yes if (accumulator == value if code == EQUAL else accumulator >= value) else no
        elif code == RETURN:
            return value
        else:
            pytest.fail(f"instruction {code:#x} at {at - 1}")


@pytest.mark.parametrize("machine", MACHINES)
def test_the_kernel_will_take_the_program(machine):
    """What bpf_check_classic() and seccomp_check_filter() ask: known codes, jumps inside, aligned loads, a return last."""
    program = PROGRAMS[machine]
    assert 0 < len(program) <= 4096
    for at, (code, yes, no, value) in enumerate(program):
        assert code in (LOAD, AND, JUMP, EQUAL, AT_LEAST, RETURN)
        if code == LOAD:
            assert value % 4 == 0
            assert value < 64
        if code == JUMP:
            assert at + 1 + value < len(program)
        if code in (EQUAL, AT_LEAST):
            assert at + 1 + max(yes, no) < len(program)
    assert program[-1][0] == RETURN


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.title.replace(" ", "-"))
def test_every_listed_call_answers_as_listed(machine, group):
    for name in group.names:
        if name in NUMBERS[machine]:
            number = NUMBERS[machine][name]
            assert answer(machine, number) == ANSWERS[group.action], name
            assert answer(machine, number, *[0xFFFF_FFFF_FFFF_FFFF] * 6) == ANSWERS[group.action], name


@pytest.mark.parametrize("machine", MACHINES)
def test_every_number_without_a_name_answers_enosys(machine):
    named = set(NUMBERS[machine].values())
    unnamed = [number for number in range(2048) if number not in named]
    assert len(unnamed) > 1500
    assert {answer(machine, number) for number in unnamed} == {ENOSYS}
    assert answer(machine, -1) == ENOSYS
    assert answer(machine, 0x7FFF_FFFF if machine == "aarch64" else 0x3FFF_FFFF) == ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    "arch",
    [0x40000003, 0x40000028, 0x4000003E, 0, 0xFFFFFFFF, 0xC00000F3],
    ids=["i386", "arm", "x32", "0", "-1", "riscv"],
)
def test_another_architecture_is_killed(machine, arch):
    """int 0x80 from 64-bit code would reach the 32-bit table, where 16 is lchown and not ioctl."""
    for number in (0, 16, 59, 101, 165, 425):
        assert answer(machine, number, arch=arch) == KILL


def test_the_other_of_the_two_machines_is_killed():
    assert answer("x86_64", 0, arch=ARCH["aarch64"]) == KILL
    assert answer("aarch64", 0, arch=ARCH["x86_64"]) == KILL


def test_x32_numbers_are_killed():
    """x32 carries the x86_64 architecture word: without this check, 0x40000000 + 101 is ptrace unseen."""
    for number in range(600):
        assert answer("x86_64", 0x4000_0000 + number) == KILL


THREAD, FORK, VFORK = 0x003D0F00, 0x01200011, 0x00004111
OK, NO = ALLOW, EPERM
CASES = [
    ("clone", (FORK,), OK),
    ("clone", (THREAD,), OK),
    ("clone", (VFORK,), OK),
    ("clone", (0x80000000 | FORK,), OK),
    *[("clone", (FORK | flag,), NO) for flag in (1 << 17, 1 << 25, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30)],
    ("clone", (HIGH | FORK | 0x10000000,), NO),
    ("socket", (1, 1, 0), OK),
    ("socket", (1, 0o2000000 | 0o4000 | 2, 0), OK),
    ("socket", (1, 5, 0), OK),
    ("socket", (1, 3, 0), NO),
    ("socket", (2, 1, 0), OK),
    ("socket", (2, 0o2000001, 6), OK),
    ("socket", (10, 1, 0), OK),
    ("socket", (2, 2, 17), OK),
    ("socket", (HIGH | 2, HIGH | 1, HIGH | 6), OK),
    ("socket", (2, 3, 1), NO),
    ("socket", (2, 0o2000003, 255), NO),
    ("socket", (2, HIGH | 3, 255), NO),
    ("socket", (2, 10, 0x300), NO),
    ("socket", (2, 1, 132), NO),
    ("socket", (2, 1, 262), NO),
    ("socket", (2, 5, 132), NO),
    ("socket", (2, 2, 1), NO),
    ("socket", (2, 6, 33), NO),
    ("socket", (10, 3, 58), NO),
    ("socket", (16, 3, 0), OK),
    ("socket", (16, 0o2000003, 0), OK),
    ("socket", (16, 2, 0), OK),
    *[("socket", (16, 3, protocol), NO) for protocol in (1, 4, 6, 8, 9, 10, 11, 12, 15, 16, 18, 21)],
    *[("socket", (family, kind, 0), NO) for family in (0, 3, 4, 5, 9, 15, 17, *range(18, 46)) for kind in (1, 2, 3, 5)],
    ("socket", (HIGH | 17, 3, 0), NO),
    ("socket", (0xFFFFFFFF, 1, 0), NO),
    ("socketpair", (1, 1, 0), OK),
    ("socketpair", (1, 0o2000005, 0), OK),
    ("socketpair", (2, 1, 0), NO),
    ("socketpair", (30, 5, 0), NO),
    ("ioctl", (0, 0x5401), OK),
    ("ioctl", (0, 0x5421), OK),
    ("ioctl", (0, 0xFFFFFFFF_80045430), OK),
    ("ioctl", (0, 0x5412), NO),
    ("ioctl", (0, HIGH | 0x5412), NO),
    ("ioctl", (0, 0x541C), NO),
    ("ioctl", (0, HIGH | 0x541C), NO),
    ("ioctl", (0, 0x5423), NO),
    ("mknod", (0, 0o010644), OK),
    ("mknod", (0, 0o140644), OK),
    ("mknod", (0, 0o100644), OK),
    ("mknod", (0, 0o644), OK),
    ("mknod", (0, 0o020644), NO),
    ("mknod", (0, 0o060644), NO),
    ("mknod", (0, HIGH | 0o060644), NO),
    ("mknodat", (0, 0, 0o010644), OK),
    ("mknodat", (0, 0, 0o020644), NO),
    ("mknodat", (0, 0, 0o060644), NO),
    ("personality", (0,), OK),
    ("personality", (0xFFFFFFFF,), OK),
    ("personality", (0xFFFFFFFF_FFFFFFFF,), OK),
    ("personality", (0x0040000,), NO),
    ("personality", (0x0400000,), NO),
    ("personality", (8,), NO),
    *[("prctl", (option,), OK) for option in (1, 4, 15, 22, 36, 38, 0x53564D41)],
    *[("prctl", (option,), EINVAL) for option in (0, 5, 31, 32, 35, 57, 59, 62, 70, 0x7FFFFFFF)],
    ("prctl", (HIGH | 35,), EINVAL),
    ("sched_setscheduler", (0, 0), OK),
    ("sched_setscheduler", (0, 3), OK),
    ("sched_setscheduler", (0, 0x40000005), OK),
    *[("sched_setscheduler", (0, policy), NO) for policy in (1, 2, 6, 7, 0x40000001, HIGH | 1)],
    ("seccomp", (0, 0), OK),
    ("seccomp", (1, 0), OK),
    ("seccomp", (1, 1 | 2 | 4), OK),
    ("seccomp", (2, 0), OK),
    ("seccomp", (3, 0), NO),
    ("seccomp", (1, 8), NO),
    ("seccomp", (1, 8 | 32), NO),
    ("seccomp", (1, HIGH | 8), NO),
    ("seccomp", (4, 0), NO),
]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", sorted({case[0] for case in CASES}))
def test_arguments_decide(machine, name):
    if name not in NUMBERS[machine]:
        assert (machine, name) == ("aarch64", "mknod")
        return
    for _, arguments, expected in (case for case in CASES if case[0] == name):
        assert answer(machine, NUMBERS[machine][name], *arguments) == expected, [hex(value) for value in arguments]


def test_every_conditional_call_has_cases_for_both_answers():
    for rule in CONDITIONAL:
        answers = {case[2] for case in CASES if case[0] == rule.name}
        assert ALLOW in answers, rule.name
        assert len(answers) > 1, rule.name


def socket_reference(family: int, kind: int, protocol: int) -> bool:
    kind &= 15
    if family == 1:
        return kind in (1, 2, 5)
    if family in (2, 10):
        return kind in (1, 2) and protocol in (0, 6, 17)
    return family == 16 and kind in (2, 3) and protocol == 0


word = st.integers(0, 300) | st.integers(0, 2**32 - 1)


@given(machine=st.sampled_from(MACHINES), args=st.tuples(word, word, word), high=st.integers(0, 2**32 - 1))
def test_socket_agrees_with_its_definition_whatever_the_upper_halves(machine, args, high):
    allowed = answer(machine, NUMBERS[machine]["socket"], *(high << 32 | value for value in args)) == ALLOW
    assert allowed == socket_reference(*args)


@given(machine=st.sampled_from(MACHINES), flags=st.integers(0, 2**64 - 1))
def test_clone_agrees_with_its_definition(machine, flags):
    assert (answer(machine, NUMBERS[machine]["clone"], flags) == ALLOW) == (flags & 0x7E020000 == 0)


# What no program should get, whatever else the list says: written down a second time, on purpose.
NEVER = """
    acct add_key adjtimex bpf chroot clock_adjtime clock_settime clone3 delete_module fanotify_init finit_module fsconfig
    fsmount fsopen fspick init_module io_uring_enter io_uring_register io_uring_setup kcmp kexec_file_load kexec_load
    keyctl lookup_dcookie mbind memfd_secret migrate_pages mount mount_setattr move_mount move_pages name_to_handle_at
    open_by_handle_at open_tree openat2 perf_event_open pidfd_getfd pivot_root process_vm_readv process_vm_writev ptrace
    quotactl reboot request_key sched_setattr set_mempolicy setdomainname sethostname setns settimeofday shmat shmget
    swapoff swapon syslog umount2 unshare userfaultfd vhangup
"""


@pytest.mark.promise("S2.5")
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", NEVER.split())
def test_never_allowed(machine, name):
    assert answer(machine, NUMBERS[machine][name]) in (EPERM, ENOSYS)


def test_calls_only_x86_has_are_not_allowed():
    for name in ("iopl", "ioperm", "modify_ldt"):
        assert answer("x86_64", NUMBERS["x86_64"][name]) == EPERM
        assert name not in NUMBERS["aarch64"]


@pytest.mark.promise("S2.5")
@pytest.mark.parametrize("machine", MACHINES)
def test_the_shipped_bytes_come_from_the_list(machine):
    """Compiled again from the list and the numbers of the sidecar; needs no libseccomp."""
    assert build_seccomp.compile_filter(machine, NUMBERS[machine]) == _seccomp.filter_bytes(machine)
    listed = build_seccomp.names()
    for kind, numbers in SIDECAR["machines"][machine]["syscalls"].items():
        assert all(listed[name] == kind for name in numbers)


def libseccomp() -> None:
    try:
        build_seccomp.libseccomp_version()
    except (ImportError, OSError, AttributeError, TypeError):
        requires(False, "no libseccomp", must_run_in_ci=False)


@pytest.mark.parametrize("machine", MACHINES)
def test_libseccomp_knows_the_same_numbers(machine):
    """A newer libseccomp may know more names; the numbers of a name never change."""
    libseccomp()
    resolved = build_seccomp.resolve(machine)
    assert {name: resolved[name] for name in NUMBERS[machine]} == NUMBERS[machine]


def test_building_again_gives_the_shipped_files():
    libseccomp()
    version = build_seccomp.libseccomp_version()
    requires(version == SIDECAR["libseccomp"], f"libseccomp is {version}", must_run_in_ci=False)
    for name, content in build_seccomp.build().items():
        assert (build_seccomp.FILTERS / name).read_bytes() == content, name


@pytest.mark.parametrize("machine", MACHINES)
def test_the_digest_names_the_bytes(machine):
    assert _seccomp.filter_digest(machine) == SIDECAR["machines"][machine]["digest"]


def test_names_of_machines():
    assert _seccomp.filter_bytes("arm64") == _seccomp.filter_bytes("aarch64")
    assert _seccomp.filter_bytes("AMD64") == _seccomp.filter_bytes("x86_64")
    for machine in ("riscv64", "i686", "", "../x86_64"):
        with pytest.raises(NodeError, match="no seccomp filter for machine"):
            _seccomp.filter_bytes(machine)


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "_filters"
    shutil.copytree(build_seccomp.FILTERS, folder)
    monkeypatch.setattr(_seccomp, "_folder", lambda: folder)
    _seccomp._load.cache_clear()
    yield folder
    _seccomp._load.cache_clear()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [flip, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(path.read_bytes()[:-8]), Path.unlink],
    ids=["flipped", "emptied", "cut", "lost"],
)
def test_a_damaged_filter_is_refused(copied: Path, damage: Callable[[Path], object]):
    assert _seccomp.filter_bytes("x86_64")
    _seccomp._load.cache_clear()
    damage(copied / "x86_64.bpf")
    with pytest.raises(NodeError, match="filter"):
        _seccomp.filter_bytes("x86_64")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"machines": {"x86_64": {}}}', '{"machines": {"x86_64": "allow"}}'])
def test_a_damaged_sidecar_is_refused(copied: Path, text: str):
    (copied / "filters.json").write_text(text)
    with pytest.raises(NodeError, match="filter"):
        _seccomp.filter_bytes("x86_64")
