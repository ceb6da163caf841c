"""Rules that hold for every test: a private temporary folder, nothing left behind, no must-run test skipped."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from stockade.client import BrokerClient
from tests import leaks
from tests.agents import open_run
from tests.support import OPTIONAL, must_run

_HOME_KEY = pytest.StashKey[Path]()
_LEDGER_KEY = pytest.StashKey[leaks.Ledger]()
_PROBLEMS_KEY = pytest.StashKey[list[str]]()

# Derandomised, so that one commit has one answer; `make fuzz` looks for new ones.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, database=None, max_examples=100)
hypothesis.settings.register_profile(
    "fuzz",
    deadline=None,
    database=None,
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "2000")),
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("default")


def pytest_configure(config: pytest.Config) -> None:
    """Give the session a folder of its own for every temporary file, state and home."""
    # The path is short because names of UNIX sockets end at 107 bytes.
    home = Path(tempfile.mkdtemp(prefix="sk-", dir="/tmp"))
    for name in ("tmp", "home"):
        (home / name).mkdir(mode=0o700)
    os.environ["TMPDIR"] = tempfile.tempdir = str(home / "tmp")
    os.environ["HOME"] = str(home / "home")
    os.environ["STOCKADE_STATE"] = str(home / "state")
    # A person's own settings must not decide what a test sees.
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "STOCKADE_BROKER_SOCKET", "STOCKADE_BROKER_TOKEN"):
        os.environ.pop(name, None)
    if config.option.basetemp is None:
        config.option.basetemp = str(home / "t")
    config.stash[_HOME_KEY] = home
    config.stash[_LEDGER_KEY] = leaks.Ledger()
    config.stash[_PROBLEMS_KEY] = []


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the session's folder, unless STOCKADE_KEEP_TMP asks to look at it."""
    if _HOME_KEY in config.stash and not os.environ.get("STOCKADE_KEEP_TMP"):
        shutil.rmtree(config.stash[_HOME_KEY], ignore_errors=True)


@pytest.fixture(autouse=True, scope="module")
def _nothing_left_open(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a module that ends with more descriptors, processes or mounts than it began with.

    Resources are therefore at most module-scoped: what outlives its module cannot be told from a leak.
    """
    before = leaks.take()
    yield
    home = request.config.stash[_HOME_KEY]
    found = leaks.new_since(before, all_mounts=must_run(), own=str(home))
    if found:
        pytest.fail("left behind by this module:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio, the one loop that production uses."""
    return "asyncio"


@pytest.fixture
async def broker_client(tmp_path: Path) -> AsyncIterator[BrokerClient]:
    """A client of a real broker: a run of its own, under a policy that allows no network."""
    async with open_run(tmp_path) as run:
        yield run.client


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Note the processes that are alive when the test's body ends, before its fixtures close."""
    try:
        return (yield)
    finally:
        item.config.stash[_LEDGER_KEY].note()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember a skip for :func:`pytest_sessionfinish`; a report knows no config to keep it in."""
    if report.skipped and not _reason(report).startswith(OPTIONAL):
        _must_run_skips.append(f"{report.nodeid}: {_reason(report)}")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Count skipped modules as well."""
    if report.skipped and not _reason(report).startswith(OPTIONAL):
        _must_run_skips.append(f"{report.nodeid}: {_reason(report)}")


_must_run_skips: list[str] = []


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"xfail {report.wasxfail}"
    detail = report.longrepr
    text = detail[2] if isinstance(detail, tuple) else str(detail)
    return text.removeprefix("Skipped: ")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session for skipped must-run tests, surviving processes and files left behind."""
    config = session.config
    if config.option.collectonly:
        return
    problems = [f"still alive: {line}" for line in config.stash[_LEDGER_KEY].survivors()]
    home = config.stash[_HOME_KEY]
    problems += [f"left in the temporary folder: {path.name}" for path in (home / "tmp").iterdir()]
    # Runs' indexes and a staged interpreter stay in the state folder by design; scratch and sockets do not.
    state = home / "state"
    stale = [*(state / "tmp").glob("*"), *(path for path in state.rglob("*") if path.is_socket())]
    problems += [f"left in the state folder: {path.relative_to(state)}" for path in stale]
    if must_run():
        problems += [f"must run here, but was skipped: {line}" for line in _must_run_skips]
    config.stash[_PROBLEMS_KEY] += problems
    if problems and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show what failed the session beside its tests."""
    problems = config.stash[_PROBLEMS_KEY]
    if problems:
        terminalreporter.section("the session failed", red=True)
        for problem in problems:
            terminalreporter.line(problem)
