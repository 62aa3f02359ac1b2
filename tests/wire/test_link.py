"""The link encodes, bills what was encoded, and hands over what was decoded."""

import torch

from fsl_sage.wire.ledger import Ledger
from fsl_sage.wire.link import Link
from fsl_sage.wire.message import ACTIVATIONS, LABELS, Message, Smashed


class Halves:
    """Half the bytes: a codec with a loss that is easy to see."""

    def encode(self, tensors):
        return {name: tensor.half() for name, tensor in tensors.items()}

    def decode(self, sent):
        return {name: tensor.float() for name, tensor in sent.items()}


def smashed():
    return Smashed((torch.full((2, 3), 1 / 3),), {"labels": torch.tensor([1, 2])})


def test_without_codecs_a_message_arrives_as_it_is_and_is_billed_in_full():
    link = Link(ledger := Ledger())
    message = Message(smashed().parts, {"step": 4})
    arrived = link.up(3, 1, message)
    assert arrived.values == {"step": 4}
    assert arrived.smashed[0] is message.smashed[0]
    assert arrived.target["labels"] is message.target["labels"]
    assert [tuple(entry) for entry in ledger.entries(3)] == [(3, 1, "up", ACTIVATIONS, 24), (3, 1, "up", LABELS, 16)]


def test_what_is_encoded_is_billed_and_what_is_decoded_arrives():
    link = Link(ledger := Ledger(), {ACTIVATIONS: Halves()})
    arrived = link.down(0, 0, smashed())
    assert ledger.by_kind(0) == {ACTIVATIONS: {"up": 0, "down": 12}, LABELS: {"up": 0, "down": 16}}
    assert arrived.smashed[0].dtype == torch.float32
    assert torch.equal(arrived.smashed[0], torch.full((2, 3), 1 / 3).half().float())
