"""The gate's path globs mean what ``stockade.policy.PathGlob`` means, and cost what they should."""

from __future__ import annotations

import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stockade.egress.gate._glob import compile_glob
from stockade.errors import PolicyError
from stockade.policy import PathGlob

SEGMENTS = st.sampled_from(["", "a", "b", "ab", "aab", "a.b", "*", "**", "a*", "*b", "a*b", "a*a*b", "*a*"])
PATHS = st.lists(st.sampled_from(["", "a", "b", "ab", "aab", "abab", "a.b", "xb", "axb"]), min_size=1, max_size=7)


@given(st.lists(SEGMENTS, min_size=1, max_size=6), PATHS)
def test_same_meaning_as_the_policy(segments, path):
    glob, path = "/" + "/".join(segments), "/" + "/".join(path)
    try:
        expected = PathGlob(glob).matches(path)
    except PolicyError:
        assume(False)
    assert bool(compile_glob(glob).fullmatch(path)) == expected


@pytest.mark.parametrize(
    ("glob", "yes", "no"),
    [
        ("/", ["/"], ["/a", "//"]),
        ("/simple/*", ["/simple/x"], ["/simple/", "/simple/x/", "/simple/x/y"]),
        ("/a/**", ["/a/", "/a/x", "/a/x/y/"], ["/a", "/ab", "/b/a/"]),
        ("/**", ["/", "/a", "/a/b"], []),
        ("/**/info", ["/info", "/x/info", "/x/y/info"], ["/xinfo", "/info/", "/info/x"]),
        ("/a/**/b/**/c", ["/a/b/c", "/a/x/b/y/z/c", "/a/b/b/c/c"], ["/a/c/b", "/a/b/xc", "/a/xb/c"]),
        ("/v*.tar.gz", ["/v1.tar.gz", "/v.tar.gz"], ["/v1.tar.gzz", "/v1/.tar.gz", "/v1xtarxgz"]),
        ("/**/b/**", ["/b/", "/a/b/c"], ["/b", "/a/b"]),
    ],
)
def test_table(glob, yes, no):
    pattern = compile_glob(glob)
    assert [path for path in yes if not pattern.fullmatch(path)] == []
    assert [path for path in no if pattern.fullmatch(path)] == []


def test_folding_is_for_deny_rules_only():
    assert compile_glob("/Secret/**", fold=True).fullmatch("/sECRET/x")
    assert not compile_glob("/Secret/**").fullmatch("/secret/x")


@pytest.mark.parametrize("text", ["", "a", "a/b", "/a**", "/***"])
def test_what_is_no_glob(text):
    with pytest.raises(ValueError, match="glob"):
        compile_glob(text)


@pytest.mark.parametrize(
    ("glob", "path"),
    [
        ("/" + "a*" * 8 + "b", "/" + "a" * 60_000),
        ("/**" + "/a/**" * 7 + "/b", "/a" * 30_000),
        ("/**" + "/*a*/**" * 7 + "/b", "/aaa" * 15_000),
        ("/**/" + "*a" * 8, "/a" * 30_000),
    ],
)
def test_a_long_path_costs_no_more_than_its_length(glob, path):
    pattern = compile_glob(glob)
    start = time.process_time()
    assert not pattern.fullmatch(path) or glob.endswith("*a" * 8)
    assert time.process_time() - start < 0.5, "a backtracking pattern takes hours here"
