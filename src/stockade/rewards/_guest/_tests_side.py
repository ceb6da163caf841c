"""Runs in the tests' grading sandbox: runs ``check`` with a stub for the candidate, and reports.

``python3 -I -S -B <this file>``; one frame on stdin brings a dict of nonce, tests (marked, see ``gym``) and
helpers. The candidate answers on descriptor 3, calls go out on descriptor 4. No code of the candidate ever runs
here, and what it answers are bytes that become literals of exact type or end the tests.

The report is one JSON line on the real stdout, which the tests cannot print to: they get stderr instead.
"""

from __future__ import annotations

import posix

from stockade.rewards._guest._codec import MAX_JOB_BYTES, Channel, Gone, WireError

MAX_CALLS = 100_000
_MAX_DETAIL = 300
_NAME = "<tests>"


class CandidateError(Exception):
    """The candidate raised; tests may expect it. ``kind`` is the name of its exception's type."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind + ": " + message)
        self.kind = kind
        self.message = message


class Broken(BaseException):
    """No answer, or not an answer. Not an Exception: tests that swallow exceptions must not swallow this."""


class Stub:
    """Stands in for the candidate: each call is one question over the pipe.

    Arguments travel as copies. What the candidate does to its copy stays there, so it cannot empty the list
    that the expected value is computed from after the call.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.calls = 0
        self.broken = ""

    def __call__(self, *arguments: object, **keywords: object) -> object:
        if self.broken:
            raise Broken(self.broken)
        if self.calls >= MAX_CALLS:
            raise self._broken(f"the tests make more than {MAX_CALLS} calls")
        self.calls += 1
        try:
            self._channel.send((self.calls, arguments, keywords))
        except WireError as error:
            raise self._broken("the tests pass " + str(error)) from None
        except Gone:
            raise self._broken("the candidate's process ended without an answer") from None
        try:
            answer = self._channel.receive()
        except WireError as error:
            raise self._broken("the candidate answered " + str(error)) from None
        except Gone:
            raise self._broken("the candidate's process ended without an answer") from None
        return self._open(answer)

    def _open(self, answer: object) -> object:
        if type(answer) is tuple and len(answer) == 3 and answer[:2] == (self.calls, "value"):
            return answer[2]
        if (
            type(answer) is tuple
            and len(answer) == 4
            and answer[:2] == (self.calls, "error")
            and type(answer[2]) is str
            and type(answer[3]) is str
        ):
            raise CandidateError(answer[2], answer[3])
        raise self._broken("the candidate answered another question")

    def _broken(self, why: str) -> Broken:
        # Remembered, so that tests which swallow even this cannot go on to pass.
        self.broken = why
        return Broken(why)


def main() -> None:
    """Run the tests that stdin brings and write the report."""
    report = posix.dup(1)
    posix.dup2(2, 1)
    job: dict[str, str] = Channel(0, -1).receive(MAX_JOB_BYTES)  # type: ignore[assignment]
    stub = Stub(Channel(3, 4))
    held: set[int] = set()
    outcome, detail, line = _run(job, stub, held)
    if stub.broken:
        outcome, detail = "broken", stub.broken
    text = (
        f'{{"nonce":"{job["nonce"]}","outcome":"{outcome}","calls":{stub.calls},'
        f'"held":[{",".join(map(str, sorted(held)))}],"line":{line},"detail":"{_plain(detail)}"}}\n'
    )
    data = text.encode("ascii")
    while data:
        data = data[posix.write(report, data) :]
    # What the tests registered for their end (atexit, threads) must not run after the report.
    posix._exit(0)  # noqa: SLF001


def _run(job: dict[str, str], stub: Stub, held: set[int]) -> tuple[str, str, int]:
    space: dict[str, object] = {"__name__": "tests", "CandidateError": CandidateError, job["marker"]: held.add}
    try:
        exec(compile(job["helpers"], "<helpers>", "exec", dont_inherit=True), space)  # noqa: S102
        exec(compile(job["tests"], _NAME, "exec", dont_inherit=True), space)  # noqa: S102
        space["check"](stub)  # type: ignore[operator]
    except BaseException as error:  # noqa: BLE001 (whatever ends the tests is reported)
        return "failed", type(error).__name__ + ": " + _message(error), _line(error)
    return "completed", "", 0


def _message(error: BaseException) -> str:
    try:
        return str(error)[:_MAX_DETAIL]
    except BaseException:  # noqa: BLE001 (a message that fails to print)
        return "(no message)"


def _line(error: BaseException) -> int:
    line = 0
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _NAME:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _plain(text: str) -> str:
    out = []
    for character in text[:_MAX_DETAIL]:
        if " " <= character <= "~" and character not in '"\\':
            out.append(character)
        else:
            out.append("\\\\x{" + format(ord(character), "x") + "}")
    return "".join(out)


main()
