"""A run that cannot start says why in one line and leaves nothing behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from stockade import errors
from stockade.client import connect
from tests.agents import open_run, write_policy
from tests.support import requires_root

pytestmark = pytest.mark.anyio


async def start(policy: Path, runs: Path, **options: object) -> None:
    async with connect(policy, runs=runs, **options):  # type: ignore[arg-type]
        pytest.fail("the run started")


async def test_a_policy_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(errors.PolicyError, match=r"nope\.yaml: cannot be read"):
        await start(tmp_path / "nope.yaml", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.promise("S6.2")
async def test_a_bad_policy_names_file_line_and_key(tmp_path: Path) -> None:
    policy = write_policy(tmp_path, "version: 1\nsandbox:\n  memroy: 1 GiB\n")
    with pytest.raises(errors.PolicyError, match=r"policy\.yaml:3: sandbox\.memroy") as caught:
        await start(policy, tmp_path / "runs")
    assert "memory" in str(caught.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.promise("S1.5")
async def test_a_policy_with_all_three_legs_is_refused(tmp_path: Path) -> None:
    policy = write_policy(tmp_path, "version: 1\negress: {allow: [{host: example.com}]}\ndata: {private: true}\n")
    with pytest.raises(errors.PolicyError, match="private data, untrusted content and external communication"):
        await start(policy, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


async def test_an_unknown_backend(tmp_path: Path) -> None:
    policy = write_policy(tmp_path, "version: 1\nsandbox: {backend: bublewrap}\n")
    with pytest.raises(errors.PolicyError, match="bubblewrap"):
        await start(policy, tmp_path / "runs")


async def test_two_runs_with_one_id(tmp_path: Path) -> None:
    async with open_run(tmp_path, run_id="twice") as first:
        with pytest.raises(errors.RunError, match="twice exists already"):
            await start(tmp_path / "policy.yaml", tmp_path / "runs", run_id="twice")
        assert await (await first.client.create()).status() == "running"


async def test_a_bad_run_id(tmp_path: Path) -> None:
    with pytest.raises(errors.StockadeError, match="is not a run ID"):
        await start(write_policy(tmp_path), tmp_path / "runs", run_id="../escape")


async def test_an_operator_file_that_is_wrong(tmp_path: Path) -> None:
    operator = tmp_path / "operator.yaml"
    operator.write_text("version: 1\nunsafe_allow_cidr: []\n", encoding="utf-8")
    with pytest.raises(errors.ConfigError, match=r"operator\.yaml:2: unsafe_allow_cidr"):
        await start(write_policy(tmp_path), tmp_path / "runs", operator=operator)


async def test_runs_directory_on_a_full_disk(tmp_path: Path) -> None:
    requires_root()
    import subprocess

    mount = tmp_path / "full"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(mount)], check=True)
    try:
        with pytest.raises(errors.RunError, match="free"):
            await start(write_policy(tmp_path), mount)
        assert list(mount.iterdir()) == []
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.promise("S6.2")
async def test_no_user_namespaces_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them no holder can be made; simulated by a bubblewrap that is not there and one that fails."""
    from stockade.sandbox import BubblewrapBackend, _tools

    def broken() -> _tools.Bubblewrap:
        return _tools.Bubblewrap(shutil.which("false") or "/bin/false", None, "", "0")

    monkeypatch.setattr(_tools, "find_bubblewrap", broken)
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    backend = BubblewrapBackend(state, uids=(0x7000_0000, 16))
    try:
        capabilities = await backend.probe()
    finally:
        await backend.aclose()
    assert not capabilities.usable
    assert "did not start" in capabilities.missing
    assert "doctor" in capabilities.hint
