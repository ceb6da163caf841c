"""Compile the lists of system calls into the filters that are shipped.

``stockade.sandbox._seccomp_table`` goes into ``src/stockade/sandbox/_filters/`` (what code in a sandbox may do),
``tools/worker_calls.py`` into ``src/stockade/egress/_filters/`` (what an egress worker may do).

Usage: ``python -m tools.build_seccomp [--check]``. ``--check`` writes nothing and fails when the
shipped files differ from what would be written.

libseccomp (through pyseccomp) says which number a name has on which machine; the program is laid out
here, because libseccomp cannot say "allowed unless the low 32 bits are 0x5412" (it has no masked
not-equal), and that is the comparison that CVE-2019-7303 calls for. The layout is a binary search
over ranges of numbers with one answer each, so a call costs about eight comparisons, and none where the
kernel (5.11 and later) caches the answers that do not look at arguments.

The program is classic BPF as of seccomp(2): 8 bytes an instruction, ``struct sock_filter``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from stockade.sandbox._seccomp_table import CONDITIONAL, DEFAULT, GROUPS, LOW_32, Action, Check, Conditional, Group
from tools import worker_calls as worker

SOURCES = Path(__file__).resolve().parent.parent / "src" / "stockade"
FILTERS = SOURCES / "sandbox" / "_filters"
SIDECAR = "filters.json"

# include/uapi/linux/audit.h
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# The x32 interface carries the x86_64 architecture word and sets this bit of the number.
X32_BIT = 0x40000000

_LOAD, _AND, _JUMP, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENTS = 0, 4, 16
_FAR = 255
_MAX_INSTRUCTIONS = 4096
_RETURNS = {
    Action.ALLOW: 0x7FFF0000,
    Action.EPERM: 0x00050000 | 1,
    Action.EINVAL: 0x00050000 | 22,
    Action.ENOSYS: 0x00050000 | 38,
    Action.KILL: 0x80000000,
}

Instruction = tuple[int, int, int, int]
Leaf = Action | Conditional


@dataclass(frozen=True, slots=True)
class Listing:
    """One list, and the folder that its filters are kept in."""

    folder: Path
    groups: tuple[Group, ...]
    conditional: tuple[Conditional, ...]
    default: Action


SANDBOX = Listing(FILTERS, GROUPS, CONDITIONAL, DEFAULT)
WORKER = {
    variant: Listing(SOURCES / "egress" / "_filters" / variant, worker.GROUPS, conditional, worker.DEFAULT)
    for variant, conditional in worker.CONDITIONAL.items()
}


@dataclass(frozen=True, slots=True)
class _Label:
    number: int


@dataclass(frozen=True, slots=True)
class _Branch:
    """``if A == value goto yes else goto no``; ``None`` is the next instruction."""

    value: int
    yes: _Label | None
    no: _Label | None


def _return(action: Action) -> Instruction:
    return (_RETURN, 0, 0, _RETURNS[action])


def _compare(check: Check, failed: _Label, passed: _Label) -> list[Instruction | _Branch | _Label]:
    # Both machines are little-endian: the low word of an argument comes first.
    code: list[Instruction | _Branch | _Label] = [(_LOAD, 0, 0, _OFFSET_ARGUMENTS + 8 * check.argument)]
    if check.mask != LOW_32:
        code.append((_AND, 0, 0, check.mask))
    if not check.among:
        code += [_Branch(value, failed, None) for value in check.values]
        return code
    code += [_Branch(value, passed, None) for value in check.values[:-1]]
    code += [_Branch(check.values[-1], passed, failed), passed]
    return code


def _conditional(rule: Conditional) -> list[Instruction]:
    """One call's program; it ends in a return on every path."""
    numbers = count()
    code: list[Instruction | _Branch | _Label] = []
    for clause in rule.clauses:
        failed = _Label(next(numbers))
        for check in clause:
            code += _compare(check, failed, _Label(next(numbers)))
        code += [_return(rule.then if isinstance(rule, worker.Judged) else Action.ALLOW), failed]
    code.append(_return(rule.otherwise))
    return _resolve(code)


def _resolve(code: list[Instruction | _Branch | _Label]) -> list[Instruction]:
    places: dict[_Label, int] = {}
    position = 0
    for item in code:
        if isinstance(item, _Label):
            places[item] = position
        else:
            position += 1
    resolved: list[Instruction] = []
    for item in code:
        if isinstance(item, _Branch):
            here = len(resolved) + 1
            yes, no = (0 if target is None else places[target] - here for target in (item.yes, item.no))
            resolved.append((_IF_EQUAL, yes, no, item.value))
        elif not isinstance(item, _Label):
            resolved.append(item)
    return resolved


def leaves(machine: str, numbers: Mapping[str, int], listing: Listing = SANDBOX) -> list[tuple[int, Leaf]]:
    """Ranges of numbers with one answer each, as ``(first number, answer)`` in rising order."""
    answers: dict[int, Leaf] = {}
    rules: list[tuple[str, Leaf]] = [(name, group.action) for group in listing.groups for name in group.names]
    rules += [(rule.name, rule) for rule in listing.conditional]
    for name, leaf in rules:
        if name not in numbers:
            continue
        if answers.setdefault(numbers[name], leaf) is not leaf:
            raise SystemExit(f"{name}: number {numbers[name]} has two answers on {machine}")
    ranges: list[tuple[int, Leaf]] = []
    for number in range(max(answers) + 2):
        leaf = answers.get(number, listing.default)
        if not ranges or ranges[-1][1] is not leaf:
            ranges.append((number, leaf))
    if machine == "x86_64":
        ranges += [(X32_BIT, Action.KILL), (2 * X32_BIT, listing.default)]
    return ranges


def _search(ranges: list[tuple[int, Leaf]]) -> list[Instruction]:
    if len(ranges) == 1:
        leaf = ranges[0][1]
        return [_return(leaf)] if isinstance(leaf, Action) else _conditional(leaf)
    middle = len(ranges) // 2
    low, high, pivot = _search(ranges[:middle]), _search(ranges[middle:]), ranges[middle][0]
    if len(low) <= _FAR:
        return [(_IF_AT_LEAST, len(low), 0, pivot), *low, *high]
    return [(_IF_AT_LEAST, 0, 1, pivot), (_JUMP, 0, 0, len(low)), *low, *high]


def compile_filter(machine: str, numbers: Mapping[str, int], listing: Listing = SANDBOX) -> bytes:
    """The filter of ``machine`` as bytes; ``numbers`` maps the names that exist there to their numbers."""
    code: list[Instruction] = [
        (_LOAD, 0, 0, _OFFSET_ARCH),
        (_IF_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        _return(Action.KILL),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
        *_search(leaves(machine, numbers, listing)),
    ]
    if len(code) > _MAX_INSTRUCTIONS:
        raise SystemExit(f"{machine}: {len(code)} instructions, the kernel takes {_MAX_INSTRUCTIONS}")
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def names(listing: Listing = SANDBOX) -> dict[str, str]:
    """Every listed name with its answer in one word; a name listed twice ends the program."""
    listed: dict[str, str] = {}
    rows = [(name, str(group.action)) for group in listing.groups for name in group.names]
    for name, answer in [*rows, *((rule.name, "conditional") for rule in listing.conditional)]:
        if listed.setdefault(name, answer) is not answer or [row[0] for row in rows].count(name) > 1:
            raise SystemExit(f"{name} is listed twice")
    return dict(sorted(listed.items()))


def resolve(machine: str, listing: Listing = SANDBOX) -> dict[str, int]:
    """Names to numbers as libseccomp knows them; a name that no machine has is a spelling mistake."""
    import pyseccomp  # nothing else here needs libseccomp

    found = {
        name: {arch: int(pyseccomp.resolve_syscall(word, name)) for arch, word in AUDIT_ARCH.items()}
        for name in names(listing)
    }
    lost = [name for name, numbers in found.items() if max(numbers.values()) < 0]
    if lost:
        raise SystemExit(f"unknown to this libseccomp: {', '.join(lost)}")
    return {name: numbers[machine] for name, numbers in found.items() if numbers[machine] >= 0}


def libseccomp_version() -> str:
    """Version of the library that pyseccomp loaded, such as ``2.5.4``."""
    import ctypes
    import ctypes.util

    class Version(ctypes.Structure):
        _fields_ = (("major", ctypes.c_uint), ("minor", ctypes.c_uint), ("micro", ctypes.c_uint))

    library = ctypes.CDLL(ctypes.util.find_library("seccomp"))
    library.seccomp_version.restype = ctypes.POINTER(Version)
    version = library.seccomp_version().contents
    return f"{version.major}.{version.minor}.{version.micro}"


def build(listing: Listing = SANDBOX) -> dict[str, bytes]:
    """File name to content of everything in the listing's folder."""
    answers = names(listing)
    files: dict[str, bytes] = {}
    machines: dict[str, object] = {}
    for machine in AUDIT_ARCH:
        numbers = resolve(machine, listing)
        program = compile_filter(machine, numbers, listing)
        files[f"{machine}.bpf"] = program
        machines[machine] = {
            "digest": "sha256:" + hashlib.sha256(program).hexdigest(),
            "instructions": len(program) // 8,
            "syscalls": {
                answer: {name: numbers[name] for name in sorted(numbers) if answers[name] == answer}
                for answer in sorted(set(answers.values()))
            },
        }
    sidecar = {"libseccomp": libseccomp_version(), "default": str(listing.default), "machines": machines}
    # One line for each answer: short enough to read, and a change shows where it is.
    text = re.sub(r'\n {5,}(?="|})|(?<=\d)\n {4}(?=})', " ", json.dumps(sidecar, indent=1))
    files[SIDECAR] = (text + "\n").encode()
    return files


def main() -> int:
    """Write the files, or compare them; 1 when ``--check`` finds a difference."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    check = parser.parse_args().check
    different = 0
    for listing in (SANDBOX, *WORKER.values()):
        for name, content in build(listing).items():
            path = listing.folder / name
            shown = path.relative_to(SOURCES)
            if check:
                same = path.is_file() and path.read_bytes() == content
                different += not same
                print(f"{shown}: {'same' if same else 'DIFFERENT'}")
                continue
            listing.folder.mkdir(exist_ok=True)
            path.write_bytes(content)
            print(f"{shown}: {len(content)} bytes")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
