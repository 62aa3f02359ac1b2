"""The link bills what is sent, and hands it over."""

import torch

from fsl_sage.wire.ledger import Ledger
from fsl_sage.wire.link import Link
from fsl_sage.wire.message import ACTIVATIONS, AUXILIARY, LABELS, Message, Smashed


def smashed():
    return Smashed((torch.full((2, 3), 1 / 3),), {"labels": torch.tensor([1, 2])})


def test_a_message_arrives_as_it_is_and_is_billed_in_full():
    link = Link(ledger := Ledger())
    message = Message(smashed().parts, {"step": 4})
    arrived = link.up(3, 1, message)
    assert arrived.values == {"step": 4}
    assert arrived.smashed[0] is message.smashed[0]
    assert arrived.target["labels"] is message.target["labels"]
    assert [tuple(entry) for entry in ledger.entries(3)] == [(3, 1, "up", ACTIVATIONS, 24), (3, 1, "up", LABELS, 16)]


def test_where_a_difference_is_sent_it_is_billed():
    link = Link(ledger := Ledger())
    change = {"w@float32[5]": torch.zeros(11, dtype=torch.uint8)}
    link.down(0, 0, Message({AUXILIARY: {"w": torch.ones(5)}}, changes={AUXILIARY: change}))
    assert ledger.by_kind(0) == {AUXILIARY: {"up": 0, "down": 11}}
