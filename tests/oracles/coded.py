"""FSL-SAGE with codecs, number by number: uniform levels for activations, differences with error feedback for models.

A number x of a group is sent as the code floor((x - zero) / step + u), from 0 to 2^bits - 1, and read as
zero + code · step. zero is the least number of the group as a float32, step the distance of the greatest from it over
2^bits - 1, so that no number lies outside: zero is rounded down and step up. u is (w + 2^15 + 1/2) / 2^16 with a random
w from -2^15 to 2^15 - 1, or 1/2. Groups are a channel of a batch, and an output channel of a weight; of fewer than 16
numbers none is made, the array is then one. A group costs 8 bytes, a code its bits.

Left open by the specification, chosen here:
1. What is sent of a model is C(x - y + e), with y what the receiver has and e what earlier codings have lost; e is then
   x - y + e minus what was decoded. Auxiliaries have no e: the difference from what the client has contains it.
2. The F-server holds what clients have decoded; so there is one y and one e for all, and clients start from y.
3. BatchNorm's statistics and counters are not coded. Nor is the whole model, which goes to newcomers and to those who
   have missed more than one average.
4. The S-server goes on with the auxiliary as the client has decoded it.
5. An auxiliary reaches a client with its next round. One that has been replaced before that has never reached it, so
   what then comes is whole; as it is to a newcomer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.oracles.averaging import trained_names
from tests.oracles.common import Client, FServer, average, cut_gradient, interleaved, load, state, step_on_cut_gradient
from tests.oracles.fsl_sage import POOLED, Federation
from tests.oracles.given import Found, Given, Tensors

Words = Callable[[str, Tensor], Tensor]
"""(name, array) to the random w of each of its numbers."""
Noise = Callable[[str, int, int, int, str, tuple[int, ...]], Tensor]
"""(what, client, round, step, name, shape) to the random w of each number of an array."""


@dataclass(frozen=True)
class Coding:
    """Bits of a number, and whether it goes to the nearest code."""

    activations: tuple[int, bool]
    update: tuple[int, bool]
    weights: tuple[int, bool]
    auxiliary: tuple[int, bool]
    noise: Noise


def coded_fsl_sage(given: Given, coding: Coding) -> Found:
    return CodedFederation(given, coding).run()


# ------------------------------------------------------------------------------------------------- one number at a time


def down(x: float) -> float:
    """The greatest float32 that is not above x."""
    near = torch.tensor(x, dtype=torch.float64).float()
    return float(near if float(near) <= x else torch.nextafter(near, torch.tensor(-math.inf)))


def code_group(numbers: list[float], words: list[int], bits: int, nearest: bool) -> list[float]:
    """What a receiver reads of a group."""
    highest = 2**bits - 1
    zero = down(min(numbers))
    step = -down(-(max(numbers) - zero) / highest)
    if step == 0:
        return [zero] * len(numbers)
    read = []
    for x, word in zip(numbers, words, strict=True):
        u = 0.5 if nearest else (word + 2**15 + 0.5) / 2**16
        code = math.floor((x - zero) / step + u)
        read.append(zero + min(max(code, 0), highest) * step)
    return read


def code(x: Tensor, words: Tensor, how: tuple[int, bool], along: int) -> tuple[Tensor, int]:
    """What a receiver reads of an array whose groups lie along a dimension, and the bytes."""
    read = torch.empty_like(x)
    groups = range(x.shape[along]) if x.dim() > 1 and x.numel() // x.shape[along] >= 16 else [None]
    for group in groups:
        place = (slice(None),) * along + (group,) if group is not None else (...,)
        numbers, drawn = x[place].flatten().tolist(), words[place].flatten().tolist()
        read[place] = torch.tensor(code_group(numbers, drawn, *how), dtype=x.dtype).view(x[place].shape)
    return read, 8 * len(groups) + math.ceil(x.numel() * how[0] / 8)


def code_model(
    x: Tensors,
    held: Tensors,
    lost: Tensors,
    names: list[str],
    how: tuple[int, bool],
    noise: Words,
) -> tuple[Tensors, Tensors, int]:
    """What the receiver has then, what was lost, and the bytes."""
    decoded, left, size = {}, {}, 0
    for name, new in x.items():
        if name not in names:
            decoded[name] = new
            size += new.numel() * new.element_size()
            continue
        wanted = new - held[name] + lost.get(name, 0)
        read, bytes = code(wanted, noise(name, new), how, along=0)
        decoded[name], left[name], size = held[name] + read, wanted - read, size + bytes
    return decoded, left, size


# ------------------------------------------------------------------------------------------------------------ the roles


class CodedFederation(Federation):
    def __init__(self, given: Given, coding: Coding) -> None:
        super().__init__(given)
        self.coding = coding
        kinds = {"client model": ("client",)}
        self.f_server = CodedFServer(given, self.ledger, kinds, ("client", "auxiliary"))
        self.f_server.coding = coding
        self.auxiliary_bytes: dict[int, int] = {}
        """By client for which an auxiliary waits: what sending it costs."""
        self.under_way: set[int] = set()
        """The clients that have not taken part since an auxiliary was made for them."""

    def start(self, t: int, client: Client) -> None:
        comes_first = client.last_round is None
        auxiliary = self.next_auxiliary(client)
        if t > 0 and (comes_first or client.number in self.waiting):
            whole = sum(x.numel() * x.element_size() for x in auxiliary.values())
            size = whole if comes_first else self.auxiliary_bytes[client.number]
            self.ledger.bytes[t, client.number, "down", "auxiliary"] += size
        load(client.parts["auxiliary"], auxiliary)
        self.waiting.pop(client.number, None)
        self.under_way.discard(client.number)
        self.f_server.send_newest(t, client)

    def local_steps(self, t: int, cohort: list[Client]) -> None:
        given, coding = self.given, self.coding
        for k, present in interleaved(given, cohort, t):
            z: dict[int, Tensor] = {}
            for client in present:
                inputs, target = given.batches[t, client.number, k]
                z[client.number] = client.parts["client"](inputs)
                if k % given.upload_every == 0:
                    sent = z[client.number].detach()
                    words = coding.noise("up/activations", client.number, t, k, "0", tuple(sent.shape))
                    arrived, size = code(sent, words, coding.activations, along=1)
                    self.ledger.bytes[t, client.number, "up", "activations"] += size
                    self.ledger.bill(t, client.number, "up", "labels", target.values())
                    self.s_server.learn(client.number, arrived, target)
            for client in present:
                _, target = given.batches[t, client.number, k]
                estimate = cut_gradient(given, client.parts["auxiliary"], z[client.number], target)
                step_on_cut_gradient(client, z[client.number], estimate)

    def align(self, t: int) -> None:
        given, coding, s_server = self.given, self.coding, self.s_server
        before = {owner: state(given, "auxiliary", module) for owner, module in s_server.auxiliaries.items()}
        names = trained_names(self.clients[0].parts["auxiliary"])
        sent: dict[int, tuple[Tensors, int]] = {}
        for number, aligned in s_server.align(t).items():
            owner = POOLED if given.alignment.scope == "pooled" else number
            if owner not in sent:
                held = before.get(owner, s_server.unaligned)

                def noise(name: str, x: Tensor, owner: int = owner) -> Tensor:
                    return coding.noise("auxiliary", owner, t, -1, name, tuple(x.shape))

                decoded, _, size = code_model(aligned, held, {}, names, coding.auxiliary, noise)
                load(s_server.auxiliaries[owner], decoded)
                if owner == POOLED:
                    s_server.unaligned = decoded
                sent[owner] = decoded, size
            decoded, size = sent[owner]
            if number in self.under_way or self.clients[number].last_round is None:
                size = sum(x.numel() * x.element_size() for x in decoded.values())
            if number in given.cohorts[t]:
                load(self.clients[number].parts["auxiliary"], decoded)
                self.ledger.bytes[t, number, "down", "auxiliary"] += size
            else:
                self.waiting[number], self.auxiliary_bytes[number] = decoded, size
            self.under_way.add(number)


class CodedFServer(FServer):
    coding: Coding

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.lost: Tensors = {}
        self.lost_of: dict[int, Tensors] = {}
        self.change_bytes = 0

    def aggregate(self, t: int, cohort: list[Client]) -> None:
        given, coding, held = self.given, self.coding, self.newest["client"]
        names = trained_names(cohort[0].parts["client"])
        arrived = []
        for client in cohort:

            def noise(name: str, x: Tensor, client: Client = client) -> Tensor:
                return coding.noise("update", client.number, t, -1, f"client/{name}", tuple(x.shape))

            trained = state(given, "client", client.parts["client"])
            lost = self.lost_of.get(client.number, {})
            decoded, self.lost_of[client.number], size = code_model(trained, held, lost, names, coding.update, noise)
            self.ledger.bytes[t, client.number, "up", "client model"] += size
            arrived.append(decoded)
        mean = average(arrived, [given.weights[client.number] for client in cohort])
        self.newest["client"], self.lost, self.change_bytes = code_model(
            mean,
            held,
            self.lost,
            names,
            coding.weights,
            lambda name, x: coding.noise("weights/client", -1, t, -1, name, tuple(x.shape)),
        )
        for client in cohort:
            self.ledger.bytes[t, client.number, "down", "client model"] += self.change_bytes

    def send_newest(self, t: int, client: Client) -> None:
        away = None if client.last_round is None else t - client.last_round - 1
        client_was_new = client.last_round is None
        load(client.parts["client"], self.newest["client"])
        whole = sum(x.numel() * x.element_size() for x in self.newest["client"].values())
        if t > 0 and (client_was_new or away):
            self.ledger.bytes[t, client.number, "down", "client model"] += self.change_bytes if away == 1 else whole
        client.last_round = t
