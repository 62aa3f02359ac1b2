"""The whole list of hostile replies, as `python -m benchmarks.hostile` prints it."""

import pytest

pytest.importorskip("flwr")

from benchmarks.hostile import REFUSED, UNKNOWABLE, judged


def test_every_hostile_reply_has_the_verdict_that_is_expected():
    found = judged()
    assert [(kind.name, said, reason) for kind, said, reason in found if said != kind.expected] == []
    assert sum(said == REFUSED for _, said, _ in found) >= 100
    assert {said for _, said, _ in found} == {REFUSED, UNKNOWABLE}
    assert all(reason and reason.isprintable() and len(reason) < 400 for _, said, reason in found if said == REFUSED)
