from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from stockade.errors import RunError
from stockade.runs import _state as module
from stockade.runs import state_dir
from tests.support import requires_root


def test_the_first_candidate_that_is_set_is_used_and_made_private(tmp_path: Path) -> None:
    own, xdg = tmp_path / "deep" / "own", tmp_path / "xdg"
    assert state_dir(environ={"STOCKADE_STATE": str(own), "XDG_STATE_HOME": str(xdg)}) == own
    assert state_dir(environ={"XDG_STATE_HOME": str(xdg)}) == xdg / "stockade"
    assert state_dir(environ={"XDG_STATE_HOME": str(xdg)}) == xdg / "stockade"
    for path in (own, xdg / "stockade"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_the_environment_is_asked_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOCKADE_STATE", str(tmp_path / "own"))
    assert state_dir() == tmp_path / "own"


def test_the_default_lies_in_tmp_under_the_users_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_claimed", lambda path, _origin: path)
    assert state_dir(environ={}) == Path(f"/tmp/stockade-{os.geteuid()}")


def test_a_relative_path_is_refused() -> None:
    for environ in ({"STOCKADE_STATE": "state"}, {"XDG_STATE_HOME": "../x"}):
        with pytest.raises(RunError, match="not an absolute path"):
            state_dir(environ=environ)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    (tmp_path / "state").symlink_to(tmp_path / "theirs")
    with pytest.raises(RunError, match="it is a link"):
        state_dir(environ={"STOCKADE_STATE": str(tmp_path / "state")})


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777, 0o701, 0o1777])
def test_a_directory_that_is_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(mode)
    with pytest.raises(RunError, match="open to other users") as caught:
        state_dir(environ={"STOCKADE_STATE": str(tmp_path / "state")})
    assert caught.value.hint == f"run: chmod 700 {tmp_path / 'state'}"


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    requires_root()
    (tmp_path / "state").mkdir(mode=0o700)
    os.chown(tmp_path / "state", 12345, 12345)
    with pytest.raises(RunError, match="belongs to uid 12345"):
        state_dir(environ={"STOCKADE_STATE": str(tmp_path / "state")})


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    for value in (tmp_path / "state", tmp_path / "state" / "below"):
        with pytest.raises(RunError, match="cannot hold state"):
            state_dir(environ={"STOCKADE_STATE": str(value)})


@pytest.mark.parametrize(
    ("magic", "name"),
    [(0x6969, "NFS"), (0x0BD00BD0, "Lustre"), (0xFF534D42, "CIFS"), (0x47504653, "GPFS"), (0x65735546, "FUSE")],
)
def test_a_candidate_on_a_network_filesystem_is_skipped_with_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, magic: int, name: str
) -> None:
    own, xdg = tmp_path / "own", tmp_path / "xdg"
    own.mkdir()
    monkeypatch.setattr(module, "_filesystem_magic", lambda path: magic if path == own else 0xEF53)
    notices: list[str] = []
    found = state_dir(environ={"STOCKADE_STATE": str(own / "x"), "XDG_STATE_HOME": str(xdg)}, notice=notices.append)
    assert found == xdg / "stockade"
    assert notices == [f"{own / 'x'} ($STOCKADE_STATE) lies on {name} and is not used for state"]
    assert not (own / "x").exists()


def test_a_filesystem_that_cannot_be_told_is_skipped_and_none_left_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_filesystem_magic", lambda _path: None)
    with pytest.raises(RunError, match="every candidate"):
        state_dir(environ={"STOCKADE_STATE": str(tmp_path)})
    assert "an unknown filesystem" in caplog.text


def test_the_kernel_tells_what_a_filesystem_is(tmp_path: Path) -> None:
    assert module._filesystem_magic(Path("/proc")) == 0x9FA0
    assert module._filesystem_magic(tmp_path / "missing") is None
    assert module._filesystem_of(tmp_path / "a" / "b") is None
