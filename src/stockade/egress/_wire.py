"""Messages between the node agent and an egress worker: JSON and descriptors over ``SOCK_SEQPACKET``.

A packet is one JSON object; descriptors travel with it by ``SCM_RIGHTS`` (unix(7)). The agent's requests carry
``op`` and a number ``id``; the answer repeats the ``id`` and carries ``ok`` or ``error``. Packets without an
``id`` are the worker's own news: ``event`` is ``alive`` (every second) or ``broken`` (``rollout_id``: its record failed).
Both ends belong to the custody side, yet each message is checked: a worker that was taken over must not be able to harm
the agent with one.

====================  =====================================================================================
``configure``         ``resolvers`` [ip or ip:port], ``own_addresses`` [ip], ``uid``, ``gid`` (null: keep),
                      ``place`` (its number among the workers) and ``places`` (how many there are), ``settings``
                      (see :class:`stockade.egress._settings.Settings`); ``parts`` names the descriptors that come
                      along, in order → ``landlock`` (``abi-N`` or ``unenforced``), ``seccomp``, ``nofile``,
                      ``pid``, ``uid``
``attach``            ``rollout_id``, ``context``, ``chain_start``, ``revoked``, ``own_addresses`` again, and
                      ``roles`` of its sockets; descriptors: record, ledger, rules, and the sockets → ``head``
``detach``            ``rollout_id`` → ``head``, ``broken``; the chain is left unsealed
``revoke``            ``rollout_id`` (``null``: all) → ``closed`` (connections ended)
``ping``              → ``now_ns``
``stats``             → ``rollouts``, ``connections``, ``queries``, ``faults`` and more (all counts)
``shutdown``          → ``ok``, then the worker ends
====================  =====================================================================================
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Message: TypeAlias = "dict[str, Json]"

MAX_MESSAGE_BYTES = 192 * 1024
"""Upper bound of one packet: below the kernel's default send buffer, so that no sysctl is needed."""
MAX_DESCRIPTORS = 96
"""Of one message: the kernel takes 253 (SCM_MAX_FD)."""


class WireError(Exception):
    """A packet that is not one of ours; the peer is broken or hostile."""


def encode(message: Mapping[str, Json]) -> bytes:
    """Return the packet of ``message``, or raise :class:`WireError` when it is too large."""
    packet = json.dumps(message, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    if len(packet) > MAX_MESSAGE_BYTES:
        raise WireError(f"control message of {len(packet)} bytes; at most {MAX_MESSAGE_BYTES} fit")
    return packet


def send(sock: socket.socket, packet: bytes, fds: Sequence[int] = ()) -> None:
    """Send one packet with ``fds``; raises BlockingIOError when the peer does not read."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())] if fds else []
    sock.sendmsg([packet], ancillary, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """Return the next message and its descriptors (close-on-exec), or None at the end.

    Raises BlockingIOError when there is none yet and :class:`WireError` for a packet that is cut short, is not
    a JSON object, or carries more descriptors than allowed. Whatever is raised, no descriptor leaks.
    """
    space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
    packet, ancillary, flags, _ = sock.recvmsg(MAX_MESSAGE_BYTES + 1, space, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
            fds.extend(numbers)
    try:
        if not packet and not fds:
            return None
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(packet) > MAX_MESSAGE_BYTES:
            raise WireError("truncated control message")
        return _parse(packet), fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _parse(packet: bytes) -> Message:
    try:
        message = json.loads(packet)
    except ValueError as error:
        raise WireError("control message is not JSON") from error
    if not isinstance(message, dict):
        raise WireError("control message is not an object")
    return cast("Message", message)


def text(message: Mapping[str, Json], key: str) -> str:
    """Return a string member, or raise :class:`WireError`."""
    value = message.get(key)
    if not isinstance(value, str):
        raise WireError(f"control message: {key!r} must be a string")
    return value


def number(message: Mapping[str, Json], key: str) -> int:
    """Return an integer member, or raise :class:`WireError`."""
    value = message.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise WireError(f"control message: {key!r} must be an integer")
    return value


def texts(message: Mapping[str, Json], key: str) -> tuple[str, ...]:
    """Return a list of strings, or raise :class:`WireError`."""
    value = message.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise WireError(f"control message: {key!r} must be a list of strings")
    return tuple(cast("list[str]", value))


def table(message: Mapping[str, Json], key: str) -> Message:
    """Return an object member, or raise :class:`WireError`."""
    value = message.get(key)
    if not isinstance(value, dict):
        raise WireError(f"control message: {key!r} must be an object")
    return cast("Message", value)
