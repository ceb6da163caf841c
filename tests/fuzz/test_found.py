"""What fuzzing has found, told in words; the inputs themselves are in the corpus."""

from __future__ import annotations

import pytest

from stockade.egress.gate import HeadLimits, Malformed, find_head

LIMITS = HeadLimits()


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_first_line_in_two_pieces_is_refused_once_it_is_whole(cut: int) -> None:
    """It was looked at only where it came in one piece: another protocol's banner in two kept its connection waiting."""
    banner = b"SSH-2.0-xy\r\n"
    assert find_head(banner[:cut], LIMITS) is None
    with pytest.raises(Malformed):
        find_head(banner, LIMITS, scanned=cut)


def test_a_first_line_is_looked_at_once() -> None:
    line = b"GET http://a.test/ HTTP/1.1\r\n"
    assert find_head(line + b"A: b", LIMITS) is None
    assert find_head(line + b"A: bc", LIMITS, scanned=len(line) + 4) is None
    assert find_head(line + b"A: bc\r\n\r\n", LIMITS, scanned=len(line) + 5) == len(line) + 9
