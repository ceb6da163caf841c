"""Runs in the candidate's grading sandbox: loads the artifact and answers calls.

``python3 -I -S -B <this file> <solution.py> <entry point>``; descriptor 3 brings ``(number, arguments, keywords)``,
descriptor 4 takes ``(number, "value", value)`` or ``(number, "error", type name, message)``. Everything in this
process belongs to the candidate as soon as it is loaded. It may answer what it likes, and that is all it can do:
the tests, their expected values and the verdict are in another sandbox.
"""

from __future__ import annotations

import posix
import sys

from stockade.rewards._guest._codec import Channel, Gone, WireError

_MAX_MESSAGE = 500


def main() -> None:
    """Answer calls until the tests close the pipe."""
    path, name = sys.argv[1], sys.argv[2]
    channel = Channel(3, 4)
    function, failure = _load(path, name)
    try:
        while True:
            _answer(channel, function, failure)
    except (Gone, WireError):
        # No atexit, no waiting for threads: a candidate that is done has nothing left to say.
        posix._exit(0)  # noqa: SLF001


def _load(path: str, name: str) -> tuple[object, BaseException | None]:
    module = type(sys)("candidate")
    sys.modules["candidate"] = module
    # After the standard library: other declared artifacts can be imported, none can shadow it.
    sys.path.append(path.rpartition("/")[0])
    try:
        with open(path, "rb") as file:
            source = file.read()
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)  # noqa: S102
        return module.__dict__[name], None
    except BaseException as error:  # noqa: BLE001 (whatever it raises is its answer)
        return None, error


def _answer(channel: Channel, function: object, failure: BaseException | None) -> None:
    # The tests' side is trusted to ask in the agreed form; what it asks is the candidate's to read anyway.
    call: tuple[int, tuple[object, ...], dict[str, object]] = channel.receive()  # type: ignore[assignment]
    number, arguments, keywords = call
    try:
        if failure is not None:
            raise failure
        channel.send((number, "value", function(*arguments, **keywords)))  # type: ignore[operator]
    except Gone:
        raise
    except BaseException as error:  # noqa: BLE001 (whatever it raises is its answer)
        channel.send((number, "error", type(error).__name__, _message(error)))


def _message(error: BaseException) -> str:
    try:
        return str(error)[:_MAX_MESSAGE]
    except BaseException:  # noqa: BLE001 (a message that fails to print)
        return ""


main()
