"""Path globs: one meaning, matched in linear time, refused where not in normal form."""

from __future__ import annotations

import fnmatch
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.errors import PolicyError
from stockade.policy import PathGlob


@pytest.mark.parametrize(
    ("glob", "path", "expected"),
    [
        ("/", "/", True),
        ("/", "/a", False),
        ("/a", "/a", True),
        ("/a", "/a/", False),
        ("/a", "/A", False),
        ("/*", "/a", True),
        ("/*", "/", False),
        ("/*", "/a/b", False),
        ("/a*", "/a", True),
        ("/a*", "/abc", True),
        ("/a*c", "/abbc", True),
        ("/a*c", "/ac", True),
        ("/a*c", "/a/c", False),
        ("/a*a", "/a", False),
        ("/*.whl", "/x.whl", True),
        ("/*.whl", "/x.whl.exe", False),
        ("/a*b*c", "/aXbYc", True),
        ("/a*b*c", "/abc", True),
        ("/a*b*c", "/acb", False),
        ("/**", "/", True),
        ("/**", "/a/b/c", True),
        ("/simple/**", "/simple/", True),
        ("/simple/**", "/simple/x/y", True),
        ("/simple/**", "/simple", False),
        ("/simple/**", "/simplex/y", False),
        ("/a/*/c", "/a/b/c", True),
        ("/a/*/c", "/a//c", False),
        ("/a/*/c", "/a/b/b/c", False),
        ("/**/info", "/info", True),
        ("/**/info", "/x/y/info", True),
        ("/**/info", "/xinfo", False),
        ("/a/**/b", "/a/b", True),
        ("/a/**/b", "/a/x/y/b", True),
        ("/a/**/b", "/a/x/y/c", False),
        ("/a/**/b/**", "/a/x/b/y", True),
        ("/a/**/b/**", "/a/x/b", False),
        ("/a/**/b/**", "/a/b/b", True),
        ("/**/a/**/b/c", "/x/a/y/b/c", True),
        ("/**/a/**/b/c", "/b/c/a", False),
        ("/a/**/", "/a/x/", True),
        ("/a/**/", "/a/x", False),
        ("/a%20b", "/a%20b", True),
        ("/a.b", "/axb", False),
        ("/a(b", "/a(b", True),
        ("/a", "a", False),
        ("/**", "", False),
    ],
)
def test_matching(glob, path, expected):
    assert PathGlob(glob).matches(path) is expected


def test_star_stays_within_its_segment():
    assert fnmatch.fnmatch("/public/../private", "/public*"), "the usual glob crosses segments"
    assert not PathGlob("/public*").matches("/public/../private")


@pytest.mark.parametrize(
    "glob",
    [
        "",
        "simple",
        "*",
        "**",
        "/a//b",
        "//",
        "/./a",
        "/a/..",
        "/../a",
        "/a/../b",
        "/a?b",
        "/a#b",
        "/a b",
        "/a\nb",
        "/a\\b",
        "/é",
        "/a**",
        "/**a",
        "/**/**",
        "/a%",
        "/a%2",
        "/a%zz",
        "/%2f",
        "/%2F",
        "/%5c",
        "/%00",
        "/%0a",
        "/%7f",
        "/%2e%2e",
        "/%61",
        "/%c3%a9",
        "/[a]",
        "/{a}",
        '/"a"',
        "/<a>",
        "/" + "a" * 1024,
        "/" + "**/a/" * 9,
        "/" + "*a" * 9,
    ],
)
def test_not_a_glob(glob):
    with pytest.raises(PolicyError):
        PathGlob(glob)


@given(st.text(max_size=20))
def test_any_text_is_a_glob_or_refused(text):
    try:
        glob = PathGlob("/" + text)
    except PolicyError:
        return
    assert glob.text == "/" + text
    if "*" not in text:
        assert glob.matches(glob.text)


SEGMENT = st.sampled_from(["a", "b", "ab", "a*", "*b", "*", "**", ""])
PATH = st.lists(st.sampled_from(["a", "b", "ab", "ba", "", "abb"]), min_size=1, max_size=5).map(
    lambda s: "/" + "/".join(s)
)


def oracle(glob: str) -> re.Pattern[str]:
    """The same meaning as a regular expression, which the room itself avoids."""
    out = ""
    segments = glob[1:].split("/")
    for index, segment in enumerate(segments):
        last = index == len(segments) - 1
        if segment == "**":
            out += "(?:/[^/]*)+" if last else "(?:/[^/]*)*"
        elif segment == "*":
            out += "/[^/]+"
        else:
            out += "/" + re.escape(segment).replace(r"\*", "[^/]*")
    return re.compile(out)


@given(st.lists(SEGMENT, min_size=1, max_size=5).map(lambda s: "/" + "/".join(s)), PATH)
def test_matching_agrees_with_a_regular_expression(text, path):
    try:
        glob = PathGlob(text)
    except PolicyError:
        return
    assert glob.matches(path) == bool(oracle(text).fullmatch(path))


@given(st.lists(SEGMENT, min_size=1, max_size=4), st.lists(SEGMENT, min_size=1, max_size=4), PATH)
def test_what_is_covered_is_matched(one, other, path):
    try:
        left, right = PathGlob("/" + "/".join(one)), PathGlob("/" + "/".join(other))
    except PolicyError:
        return
    if left.covers(right) and right.matches(path):
        assert left.matches(path)


def test_hostile_path_costs_linear_time():
    glob = PathGlob("/**/a*a*a*a/**/b*b*b*b/**/c*c*c*c/**/d")
    begin = time.monotonic()
    for path in ("/" + "a" * 65_536, "/a" * 32_768, "/aaaa/bbbb/cccc" * 4_096, "/" * 65_536):
        assert not glob.matches(path)
    assert time.monotonic() - begin < 5
