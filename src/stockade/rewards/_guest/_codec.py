"""Values across the pipe between the tests and the candidate: literals of exact type, or nothing.

The same source runs on both ends, in whatever Python (3.8 or newer) the sandbox has, under ``-I -S -B``. It
imports one built-in module: ``import json`` alone would double the start-up of both processes (23 against 12 ms
of CPU, measured), so the format is a length-prefixed one that needs no scanner.

A frame is eight hexadecimal digits, the number of payload bytes, and the payload, one tagged value::

    N T F            None, True, False
    i<hex>;          int (i-ff;)                f<float.hex()>;       float (inf, -inf, nan, -0x0.0p+0)
    c<re>,<im>;      complex                    s<n>:<UTF-8>          str    b<n>:<bytes>          bytes
    l<n>:… t<n>:…    list, tuple of n values    S<n>:… Z<n>:…         set, frozenset
    d<n>:…           dict, n times key and value

The receiving end trusts nothing: caps on frame, depth and digits; one spelling a value; no subclass, no eval, no
pickle, no import (CWE-502). What comes out is made of true builtins, so ``==`` on it is honest: an object that
claims to equal everything has no encoding.
"""

from __future__ import annotations

import posix

MAX_FRAME_BYTES = 1 << 20
MAX_JOB_BYTES = 1 << 24  # tests and helpers, on the tests' stdin: trusted, so only bounded
MAX_DEPTH = 64
MAX_INT_DIGITS = 1 << 14  # hexadecimal; parsing them is linear, unlike decimal ones
HEADER_BYTES = 8
MAX_COUNT_DIGITS = 8
_MAX_TOKEN = 64
_READ_BYTES = 1 << 16
_SEQUENCES = {b"l": list, b"t": tuple, b"S": set, b"Z": frozenset}
_TAGS = {list: b"l", tuple: b"t", set: b"S", frozenset: b"Z"}


class WireError(Exception):
    """A value that has no encoding, or bytes that are not one."""


class Gone(Exception):
    """The other end closed its pipe."""


def encode(value: object, limit: int = MAX_FRAME_BYTES) -> bytes:
    """Return the frame of ``value``; raise WireError where it is not a literal of exact type or too large."""
    out: list[bytes] = []
    _put(value, out, 0)
    payload = b"".join(out)
    if len(payload) > limit:
        raise WireError(f"a value of {len(payload)} bytes; at most {limit} travel")
    return b"%08x" % len(payload) + payload


def _put(value: object, out: list[bytes], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise WireError(f"nested deeper than {MAX_DEPTH}")
    if type(value) is list or type(value) is tuple or type(value) is set or type(value) is frozenset:
        out.append(_TAGS[type(value)] + b"%d:" % len(value))
        for item in value:
            _put(item, out, depth + 1)
    elif type(value) is dict:
        out.append(b"d%d:" % len(value))
        for key, item in value.items():
            _put(key, out, depth + 1)
            _put(item, out, depth + 1)
    else:
        out.append(_scalar(value))


def _scalar(value: object) -> bytes:
    if value is None:
        return b"N"
    if type(value) is bool:
        return b"T" if value else b"F"
    if type(value) is int:
        digits = b"%x" % value
        if len(digits) > MAX_INT_DIGITS:
            raise WireError(f"an int of more than {MAX_INT_DIGITS} hexadecimal digits")
        return b"i" + digits + b";"
    if type(value) is float:
        return b"f" + value.hex().encode() + b";"
    if type(value) is str:
        data = value.encode("utf-8", "surrogatepass")
        return b"s%d:" % len(data) + data
    if type(value) is bytes:
        return b"b%d:" % len(value) + value
    if type(value) is complex:
        return b"c" + value.real.hex().encode() + b"," + value.imag.hex().encode() + b";"
    raise WireError(f"a value of type {type(value).__name__}, which is not a plain literal")


def decode(payload: bytes) -> object:
    """Return the one value that ``payload`` spells; raise WireError for anything else."""
    value, end = _take(payload, 0, 0)
    if end != len(payload):
        raise WireError("bytes after the value")
    return value


def _take(data: bytes, at: int, depth: int) -> tuple[object, int]:
    if depth > MAX_DEPTH:
        raise WireError(f"nested deeper than {MAX_DEPTH}")
    tag = data[at : at + 1]
    at += 1
    if tag == b"N":
        return None, at
    if tag == b"T":
        return True, at
    if tag == b"F":
        return False, at
    if tag == b"i":
        token, at = _token(data, at, b";", MAX_INT_DIGITS)
        return _int(token), at
    if tag == b"f":
        token, at = _token(data, at, b";", _MAX_TOKEN)
        return _float(token), at
    if tag == b"c":
        real, at = _token(data, at, b",", _MAX_TOKEN)
        imag, at = _token(data, at, b";", _MAX_TOKEN)
        return complex(_float(real), _float(imag)), at
    if tag in (b"s", b"b"):
        return _string(tag, data, at)
    if tag == b"d":
        return _dict(data, at, depth)
    if tag in _SEQUENCES:
        return _sequence(tag, data, at, depth)
    raise WireError("an unknown tag")


def _string(tag: bytes, data: bytes, at: int) -> tuple[object, int]:
    size, at = _count(data, at)
    raw = data[at : at + size]
    if tag == b"b":
        return raw, at + size
    try:
        text = raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise WireError("text that is not UTF-8") from None
    return text, at + size


def _sequence(tag: bytes, data: bytes, at: int, depth: int) -> tuple[object, int]:
    count, at = _count(data, at)
    items = []
    for _ in range(count):
        item, at = _take(data, at, depth + 1)
        items.append(item)
    if tag == b"l":
        return items, at
    try:
        made = _SEQUENCES[tag](items)
    except TypeError:
        raise WireError("a set of values that have no hash") from None
    if len(made) != count:
        raise WireError("a set that holds a value twice")
    return made, at


def _dict(data: bytes, at: int, depth: int) -> tuple[object, int]:
    count, at = _count(data, at)
    made: dict[object, object] = {}
    for _ in range(count):
        key, at = _take(data, at, depth + 1)
        item, at = _take(data, at, depth + 1)
        try:
            made[key] = item
        except TypeError:
            raise WireError("a key that has no hash") from None
    if len(made) != count:
        raise WireError("a dict that holds a key twice")
    return made, at


def _token(data: bytes, at: int, stop: bytes, limit: int) -> tuple[bytes, int]:
    end = data.find(stop, at, at + limit + 1)
    if end < 0:
        raise WireError("a token without an end, or too long")
    return data[at:end], end + 1


def _count(data: bytes, at: int) -> tuple[int, int]:
    token, at = _token(data, at, b":", MAX_COUNT_DIGITS)
    if not token.isdigit() or (token[:1] == b"0" and token != b"0"):
        raise WireError("a count that is not one")
    count = int(token)
    # Each item takes a byte at least: a count of more than what is left is a lie, refused before memory is used.
    if count > len(data) - at:
        raise WireError("a count larger than what follows")
    return count, at


def _int(token: bytes) -> int:
    # int() also takes blanks, underscores and prefixes, so the value must spell itself the same way again.
    try:
        value = int(token, 16)
    except ValueError:
        raise WireError("an int that is not one") from None
    if b"%x" % value != token:
        raise WireError("an int in another spelling")
    return value


def _float(token: bytes) -> float:
    try:
        text = token.decode("ascii")
        value = float.fromhex(text)
    except (ValueError, OverflowError):
        raise WireError("a float that is not one") from None
    if value.hex() != text:
        raise WireError("a float in another spelling")
    return value


class Channel:
    """Frames over two descriptors: one to read from, one to write to."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads = reads
        self._writes = writes

    def send(self, value: object) -> None:
        """Write one frame; raise WireError or Gone."""
        frame = encode(value)
        try:
            while frame:
                frame = frame[posix.write(self._writes, frame) :]
        except OSError:
            raise Gone("the pipe is closed") from None

    def receive(self, limit: int = MAX_FRAME_BYTES) -> object:
        """Read one frame; raise WireError when it is not one, Gone at the end of the pipe."""
        header = self._exactly(HEADER_BYTES)
        try:
            size = int(header, 16)
        except ValueError:
            raise WireError("a frame without a length") from None
        if b"%08x" % size != header:
            raise WireError("a frame length in another spelling")
        if size > limit:
            raise WireError(f"a frame of {size} bytes; at most {limit} are read")
        return decode(self._exactly(size))

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            try:
                part = posix.read(self._reads, min(size, _READ_BYTES))
            except OSError:
                raise Gone("the pipe is broken") from None
            if not part:
                raise Gone("the pipe ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)
