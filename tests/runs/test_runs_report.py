from __future__ import annotations

import base64
import errno
import hashlib
import html
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.errors import RecordError, RunError
from stockade.runs import RunDirectory, Section, write_report
from stockade.runs._curves import read_curves
from stockade.runs._report import human_bytes, human_duration, utc, visible
from tests.runs.sample import HOSTILE, START_NS, Sample, busy_run

VOID = {"meta", "link", "br", "img", "input", "hr"}
ALLOWED_TAGS = {
    "html",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "header",
    "div",
    "h1",
    "p",
    "ul",
    "li",
    "main",
    "b",
    "span",
    "section",
    "h2",
    "i",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "code",
    "dl",
    "dt",
    "dd",
    "footer",
    "svg",
    "rect",
    "line",
    "text",
    "tspan",
    "g",
    "circle",
    "polyline",
}


class Page(HTMLParser):
    """What a browser would make of the page: its elements, its attributes and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return busy_run(tmp_path)


def metrics(path: Path, field: str = "reward", steps: int = 10) -> Path:
    path.write_text("".join(json.dumps({"step": step, field: step / steps}) + "\n" for step in range(steps)))
    return path


def test_the_page_shows_what_happened(run: RunDirectory, tmp_path: Path) -> None:
    files = write_report(
        run.path,
        metrics=metrics(tmp_path / "m.jsonl"),
        control=metrics(tmp_path / "c.jsonl"),
        extra=[Section("Verdicts", [("ok", "12")], ("verdict", "samples"), "Graded in fresh sandboxes.")],
        notices=["trainer isolation: unenforced"],
    )
    assert files == (run.path / "report.html", run.path / "report.json")
    page = Page(files.html)
    for shown in (
        run.run_id,
        "record verified",
        "unwitnessed",
        "unsafe exemptions: 1",
        "package mirror of the site",
        "trifecta waived by ada",
        "trainer isolation: unenforced",
        "Reward over steps",
        "control",
        "Verdicts",
        "metadata_address",
        "169.254.169.254:443/latest/meta-data/",
        "abc.test",
        "memory_limit",
        "asked for a drill",
        "412 ms",
        "signal 31 (SIGSYS)",
        "HumanEval/0",
    ):
        assert shown in page.text, shown


@pytest.mark.promise("S1.6")
def test_unsafe_options_are_shown(run: RunDirectory) -> None:
    files = write_report(run.path)
    shown = "unsafe_allow_cidrs 10.20.0.0/24: package mirror of the site"
    page = Page(files.html)
    assert f"Unsafe: {shown}" in page.text
    assert page.text.index("unsafe exemptions: 1") < page.text.index(shown) < page.text.index("How rollouts ended")
    assert json.loads(files.json.read_bytes())["unsafe"] == [shown]


def test_the_page_loads_nothing_and_runs_nothing(run: RunDirectory, tmp_path: Path) -> None:
    page = Page(write_report(run.path, metrics=metrics(tmp_path / "m.jsonl")).html)
    assert page.tags <= ALLOWED_TAGS, page.tags - ALLOWED_TAGS
    assert not {name for name in page.attributes if name.startswith("on")}
    assert not page.attributes & {"href", "src", "srcset", "style", "action", "xlink:href", "background"}
    assert "url(" not in page.source
    assert "@import" not in page.source
    assert not re.search(r"https?://", page.source)


def test_its_policy_allows_one_style_sheet_and_nothing_else(run: RunDirectory) -> None:
    source = write_report(run.path).html.read_text(encoding="utf-8")
    style = re.search("<style>(.*?)</style>", source, re.DOTALL)
    policy = re.search('Content-Security-Policy" content="([^"]*)"', source)
    assert style is not None
    assert policy is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert policy[1] == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert source.index("Content-Security-Policy") < source.index("<style>")


def test_text_from_inside_stays_text(run: RunDirectory, tmp_path: Path) -> None:
    extra = [Section(HOSTILE, [(HOSTILE,)], (HOSTILE,), HOSTILE)]
    files = write_report(run.path, extra=extra, notices=[HOSTILE])
    page = Page(files.html)
    spelled = HOSTILE.replace("\u202e", r"\u{202e}").replace("\x1b", r"\u{1b}")
    assert page.text.count(spelled) >= 8
    assert "script" not in page.tags
    assert html.escape(HOSTILE[:30]) in page.source
    assert all(character.isprintable() or character == "\n" for character in page.source)
    assert "49" not in re.findall(r"\{\{.*?\}\}|\b49\b", page.text.replace("HumanEval/49", ""))


@given(st.text(st.characters()))
def test_visible_text_is_printable_and_plain_text_is_left_alone(text: str) -> None:
    shown = visible(text)
    assert shown.isprintable()
    assert (shown == text) == text.isprintable()


def test_the_json_says_the_same(run: RunDirectory, tmp_path: Path) -> None:
    files = write_report(
        run.path, metrics=metrics(tmp_path / "m.jsonl", steps=3), extra=[Section("S", [("\udcff",)])], notices=["n"]
    )
    report = json.loads(files.json.read_bytes())
    assert report["schema"] == "stockade.report/1"
    assert report["record"]["ok"] is True
    assert report["record"]["witness"] == "unwitnessed"
    assert report["denied"] == len(report["denials"])
    assert sum(row["count"] for row in report["exits"]) == len(report["rollouts"])
    assert report["curves"]["training"]["reward"] == [[0, 0.0], [1, 1 / 3], [2, 2 / 3]]
    assert report["notices"] == ["n"]
    assert report["sections"][0]["rows"] == [["\\udcff"]]


def test_an_empty_run_has_a_report(tmp_path: Path) -> None:
    sample = Sample(tmp_path)
    with sample.running():
        pass
    page = Page(write_report(sample.run.path).html)
    assert "None has ended." in page.text
    assert "No rollout asked for anything" in page.text
    assert "Read this first" not in page.text


def test_a_record_that_does_not_verify_is_loud(run: RunDirectory) -> None:
    path = next((run.path / "events/node-1").glob("*.egress.jsonl"))
    path.write_bytes(path.read_bytes().replace(b"abc.test", b"pypj.org", 1))
    page = Page(write_report(run.path).html)
    assert "record does not verify" in page.text
    assert "record verified" not in page.text
    assert f"{path.name}:1: was edited" in page.text


def test_a_live_run_is_shown_as_not_sealed(tmp_path: Path) -> None:
    sample = Sample(tmp_path)
    with sample.running(seal=False):
        page = Page(write_report(sample.run.path).html)
    assert "record not sealed" in page.text
    assert "running" in page.text


def test_a_long_run_shows_the_rollouts_that_need_a_look_first(tmp_path: Path) -> None:
    sample = Sample(tmp_path)
    with sample.running() as control:
        for _ in range(310):
            sample.rollout(control, commands=0)
        last = sample.rollout(control, exit_="memory_limit", fault="candidate")
    page = Page(write_report(sample.run.path).html)
    assert "11 more are in report.json" in page.text
    assert page.text.index(last) < page.text.index("ep_" + "1".zfill(22))


def test_writing_again_replaces_and_a_full_disk_leaves_the_old_one(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_report(run.path, notices=["first"])
    assert "second" in write_report(run.path, notices=["second"]).html.read_text()
    before = files.html.read_bytes()
    names = sorted(os.listdir(run.path))

    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(RunError, match="No space left"):
        write_report(run.path, notices=["third"])
    monkeypatch.undo()
    assert files.html.read_bytes() == before
    assert sorted(os.listdir(run.path)) == names


def test_a_planted_link_is_replaced_and_not_written_through(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (run.path / "report.html").symlink_to(tmp_path / "precious")
    write_report(run.path)
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (run.path / "report.html").is_symlink()


def test_no_record_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError):
        write_report(tmp_path / "missing")


# --------------------------------------------------------------------------------------------- metrics


def test_metrics_are_read_as_text_that_may_be_anything(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 0, "reward": 0.5}\ngarbage\n{"step": 1, "reward": null}\n{"step": "2", "reward": 1}\n'
        b'{"step": 3, "reward": 1e400}\n{"step": 4, "reward": true}\n{"reward": 1}\n\xff\n[]\n'
        b'{"step": 5, "reward": 1, "passed": 0.25}\n{"step": 6, "reward": 1e300}\n{"step": 7, "reward": '
        + b"9" * 400
        + b"}\n"
        + b"[" * 100_000
    )
    curves = read_curves(path, None)
    assert curves.main == {"reward": [(0, 0.5), (5, 1)], "passed": [(5, 0.25)]}
    assert [chart.title for chart in curves.charts()] == ["Reward over steps", "Programs that pass their hidden tests"]
    assert curves.control == {}


def test_no_metrics_no_chart(tmp_path: Path) -> None:
    assert read_curves(None, None).charts() == []
    (tmp_path / "empty").write_bytes(b"")
    assert read_curves(tmp_path / "empty", None).charts() == []


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "missing"])
def test_metrics_are_only_read_from_a_regular_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "metrics"
    match kind:
        case "link":
            path.symlink_to(metrics(tmp_path / "secret"))
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
    with pytest.raises(RunError, match="metrics"):
        read_curves(path, None)


# --------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (781 * 1024, "781 KiB"),
        (5 << 30, "5.0 GiB"),
        (1 << 60, "1048576 TiB"),
    ],
)
def test_sizes(size: int, shown: str) -> None:
    assert human_bytes(size) == shown


@pytest.mark.parametrize(
    ("duration_ns", "shown"),
    [
        (0, "0 ms"),
        (412_000_000, "412 ms"),
        (2_200_000_000, "2.2 s"),
        (95_000_000_000, "1 min 35 s"),
        (3_660_000_000_000, "1 h 01 min"),
    ],
)
def test_durations(duration_ns: int, shown: str) -> None:
    assert human_duration(duration_ns) == shown


def test_times() -> None:
    assert utc(START_NS) == "2026-01-01 00:00:00"
    assert utc(10**30) == str(10**30)
