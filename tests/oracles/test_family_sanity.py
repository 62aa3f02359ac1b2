"""Laws of the family that hold between the oracles themselves, checked without the package, on a tiny model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracles import FAMILY, ORACLES
from tests.oracles.alignment import Samples
from tests.oracles.averaging import FedOpt
from tests.oracles.common import backward_and_step, cut_gradient, new_optimizer, new_part, trained
from tests.oracles.cpsl import serve_cluster
from tests.oracles.fedgkt import divergence, evaluate
from tests.oracles.given import Distillation, Found, FServerOptimizer, Given, Target, Tensors
from tests.oracles.test_sanity import federation as texts_or_images

CLASSES = 3
BATCH = 4
PLAIN_SGD = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "auxiliary_weight_decay": 0.0}

# ------------------------------------------------------------------------------------------------------- the problem


def norm_of(kind: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(1, channels)


def blocks(norm: str) -> nn.Sequential:
    """Images [B, 1, 6, 6] to logits [B, 3]."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), norm_of(norm, 3), nn.Tanh()),
        nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), norm_of(norm, 3), nn.Tanh()),
        nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), norm_of(norm, 4), nn.Tanh()),
        nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES)),
    ).double()


def makers(norm: str) -> dict[str, Callable[[], nn.Module]]:
    return {
        "client": lambda: blocks(norm)[:2],
        "server": lambda: nn.Sequential(*blocks(norm)[2:]),
        "auxiliary": lambda: nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(27, CLASSES)).double(),
        "decoder": lambda: nn.Conv2d(3, 1, 3, padding=1).double(),
        "blocks": lambda: blocks(norm),
    }


def copied(module: nn.Module) -> Tensors:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def batch(size: int) -> tuple[Tensor, Target]:
    return torch.randn(size, 1, 6, 6, dtype=torch.float64), {"labels": torch.randint(CLASSES, (size,))}


def federation(norm: str = "batch", steps: int = 3, last: int = BATCH - 1, **options: Any) -> Given:
    """Three clients, three rounds, each client away in one. The last batch is smaller, and client 2 has one more."""
    torch.manual_seed(0)
    cohorts = options.pop("cohorts", [[0, 2], [1, 2], [0, 1]])
    parts = makers(norm)
    parts = {part: parts[part] for part in options.pop("parts", ("client", "server", "auxiliary"))}
    given = Given(
        parts=parts,
        initial={part: copied(make()) for part, make in parts.items()},
        weights=[1.0, 2.0, 3.0],
        cohorts=cohorts,
        batches={
            (t, client, k): batch(BATCH if k < steps - 1 else last)
            for t, cohort in enumerate(cohorts)
            for client in cohort
            for k in range(steps + (client == 2 and steps > 1))
        },
        alignment_orders={},
        loss=lambda output, target: F.cross_entropy(output, target["labels"]),
        terms=lambda target: len(target["labels"]),
        rounds=len(cohorts),
        lr=1e-2,
        server_lr=1e-2,
    )
    return replace(given, **options)


def everybody(rounds: int = 3, **options: Any) -> Given:
    """All clients in each round, with one full batch each."""
    return federation(cohorts=[[0, 1, 2]] * rounds, steps=1, last=BATCH, **options)


def same(first: Tensors, second: Tensors, tolerance: float = 0) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=tolerance, atol=tolerance, msg=name)


def same_run(first: Found, second: Found, tolerance: float = 0) -> None:
    same(first.client, second.client, tolerance)
    same(first.server, second.server, tolerance)


def differs(first: Tensors, second: Tensors) -> bool:
    return any(not torch.equal(first[name], second[name]) for name in first)


def size(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def kinds(found: Found) -> set[str]:
    return {kind for _, _, _, kind in found.bytes}


def unsplit(given: Given) -> nn.Sequential:
    return nn.Sequential(new_part(given, "client"), new_part(given, "server"))


def halves(whole: nn.Sequential) -> tuple[Tensors, Tensors]:
    return copied(whole[0]), copied(whole[1])


def train_unsplit(given: Given, keys: list[tuple[int, int, int]]) -> nn.Sequential:
    """Centralised training on these batches, one after the other."""
    whole = unsplit(given)
    optimizer = new_optimizer(given, whole, given.lr, given.weight_decay)
    for key in keys:
        inputs, target = given.batches[key]
        backward_and_step(given.loss(whole(inputs), target), [optimizer])
    return whole


def train_on_large_batches(given: Given) -> nn.Sequential:
    """One step a round, on the batches of all clients together."""
    whole = unsplit(given)
    optimizer = new_optimizer(given, whole, given.lr, given.weight_decay)
    for t, cohort in enumerate(given.cohorts):
        inputs = torch.cat([given.batches[t, client, 0][0] for client in cohort])
        labels = torch.cat([given.batches[t, client, 0][1]["labels"] for client in cohort])
        backward_and_step(given.loss(whole(inputs), {"labels": labels}), [optimizer])
    return whole


def gradients(given: Given, number: int) -> list[Tensor]:
    """Of a client's first mean loss, by weight of the unsplit initial model."""
    whole = unsplit(given)
    inputs, target = given.batches[0, number, 0]
    return list(torch.autograd.grad(given.loss(whole(inputs), target), trained(whole)))


# ---------------------------------------------------------------------------------------------------- split learning


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("alternate", [False, True])
def test_sl_with_its_optimizer_handed_on_is_centralised_training(optimizer, alternate):
    given = federation(optimizer=optimizer, hands_on_optimizer=True, alternate=alternate)
    order = sorted(given.batches, key=(lambda key: (key[0], key[2], key[1])) if alternate else None)
    client, server = halves(train_unsplit(given, order))
    found = FAMILY["sl"](given)
    same(found.client, client)
    same(found.server, server)
    assert differs(FAMILY["sl"](replace(given, hands_on_optimizer=False)).client, client)


@pytest.mark.parametrize("hands_on", [False, True])
def test_sl_of_one_client_is_splitfed_ss(hands_on):
    given = federation(cohorts=[[0], [0]], clients=1, hands_on_optimizer=hands_on)
    same_run(FAMILY["sl"](given), ORACLES["splitfed-ss"](given))


@pytest.mark.parametrize(("optimizer", "times"), [("adam", 2), ("sgd", 1)])
@pytest.mark.parametrize("alternate", [False, True])
def test_bytes_of_sl(optimizer, times, alternate):
    given = federation(optimizer=optimizer, hands_on_optimizer=True, alternate=alternate)
    model = size(given.initial["client"])
    trained_bytes = 8 * sum(weight.numel() for weight in new_part(given, "client").parameters())
    found = FAMILY["sl"](given).bytes
    for t, cohort in enumerate(given.cohorts):
        for number in cohort:
            visits = (3 + (number == 2)) if alternate else 1
            assert found[t, number, "up", "client model"] == visits * model
            assert found[t, number, "down", "client model"] == visits * model
            assert found[t, number, "up", "optimizer state"] == visits * times * trained_bytes
            down = visits - ((t, number) == (0, 0))
            assert found.get((t, number, "down", "optimizer state"), 0) == down * times * trained_bytes
            samples = sum(len(given.batches[t, number, k][0]) for k in range(3 + (number == 2)))
            assert found[t, number, "up", "activations"] == samples * 3 * 36 * 8
            assert found[t, number, "down", "cut gradients"] == samples * 3 * 36 * 8
            assert found[t, number, "up", "labels"] == samples * 8
    assert not any(kind == "first download" for _, _, _, kind in found)
    plain = FAMILY["sl"](replace(given, optimizer="sgd", momentum=0.0))
    assert "optimizer state" not in kinds(plain)


# -------------------------------------------------------------------------------------------------- local-loss SplitFed


def test_local_loss_with_one_shared_server_is_cse_fsl():
    given = federation(shared_server=True)
    local, cse = FAMILY["local-loss"](given), ORACLES["cse-fsl"](replace(given, upload_every=1))
    same_run(local, cse)
    same(local.auxiliaries[1], cse.auxiliaries[1])
    assert local.bytes == cse.bytes
    assert "cut gradients" not in kinds(local)
    copies = FAMILY["local-loss"](replace(given, shared_server=False))
    assert copies.bytes == local.bytes
    same(copies.client, local.client)
    assert differs(copies.server, local.server)


def test_local_loss_averages_the_servers_copies_by_weights():
    given = federation(cohorts=[[0, 2], [1]])
    one_round = FAMILY["local-loss"](replace(given, rounds=1))
    alone = {i: FAMILY["local-loss"](replace(given, rounds=1, cohorts=[[i]])) for i in (0, 2)}
    for name, tensor in one_round.server.items():
        if tensor.is_floating_point():
            mean = (alone[0].server[name] + 3 * alone[2].server[name]) / 4
            torch.testing.assert_close(tensor, mean, rtol=1e-12, atol=1e-12)
    start = replace(given, initial={**given.initial, "client": one_round.client, "server": one_round.server})
    start = replace(start, initial={**start.initial, "auxiliary": one_round.auxiliaries[1]}, cohorts=[[], [1]])
    same_run(FAMILY["local-loss"](given), FAMILY["local-loss"](start))  # also the absent client's copy is the mean


def test_local_loss_with_the_server_as_auxiliary_is_centralised_training():
    given = federation(cohorts=[[0], [0]], clients=1)
    given = replace(
        given,
        parts={**given.parts, "auxiliary": given.parts["server"]},
        initial={**given.initial, "auxiliary": given.initial["server"]},
    )
    client, server = halves(train_unsplit(given, sorted(given.batches)))
    found = FAMILY["local-loss"](given)
    same(found.client, client)
    same(found.auxiliaries[0], server)
    same(found.server, server)


# ---------------------------------------------------------------------------------------------------------- joint steps


@pytest.mark.parametrize("algorithm", ["splitfed-ss-joint", "adaptsfl", "locfedmix-sl"])
def test_joint_steps_are_steps_on_large_batches(algorithm):
    given = everybody(norm="group", optimizer="sgd", weights=[1.0] * 3)
    client, server = halves(train_on_large_batches(given))
    found = FAMILY[algorithm](given)
    same(found.client, client, 1e-12)
    same(found.server, server, 1e-12)


def test_joint_steps_of_one_client_are_splitfed_ss():
    given = federation(cohorts=[[0], [0]], clients=1)
    joint, plain = FAMILY["splitfed-ss-joint"](given), ORACLES["splitfed-ss"](given)
    same_run(joint, plain)
    assert joint.bytes == plain.bytes


def test_joint_steps_have_the_bytes_of_splitfed_ss():
    given = federation()
    joint, plain = FAMILY["splitfed-ss-joint"](given), ORACLES["splitfed-ss"](given)
    assert joint.bytes == plain.bytes
    assert differs(joint.server, plain.server)


# --------------------------------------------------------------------------------------------------------- LocFedMix-SL

MIXING = {
    (t, k): {i: [(j, 0.3 + 0.1 * i), (i, 0.2)] for i, j in (pair, pair[::-1])}
    for t, pair in enumerate([(0, 2), (1, 2), (0, 1)])
    for k in range(3)
}


def test_locfedmix_without_mixing_and_decoder_is_joint_steps():
    given = federation(weights=[2.0] * 3)
    mix, joint = FAMILY["locfedmix-sl"](given), FAMILY["splitfed-ss-joint"](given)
    same_run(mix, joint, 1e-12)
    assert mix.bytes == joint.bytes


def test_in_step_one_a_decoder_changes_no_bit_of_the_server_and_mixing_none_of_the_client():
    given = federation(parts=("client", "server", "decoder"), mixing=MIXING, cohorts=[[0, 2]], steps=1)
    without_decoder = replace(given, parts={part: given.parts[part] for part in ("client", "server")})
    everything, mixed, plain = (
        FAMILY["locfedmix-sl"](one) for one in (given, without_decoder, replace(without_decoder, mixing={}))
    )
    same(everything.server, mixed.server)
    assert differs(everything.client, mixed.client)
    same(mixed.client, plain.client)
    assert differs(mixed.server, plain.server)
    statistics = [name for name in plain.server if "running" in name]
    assert statistics
    same({name: mixed.server[name] for name in statistics}, {name: plain.server[name] for name in statistics})


def test_mixing_with_share_one_doubles_the_servers_gradient():
    own_only = {
        (t, k): {i: [(j, 1.0) for j in range(3) if j != i] for i in range(3)} for t in range(3) for k in range(1)
    }
    given = everybody(norm="group", **PLAIN_SGD, mixing=own_only)
    plain = replace(given, mixing={}, server_lr=2 * given.server_lr)
    same_run(FAMILY["locfedmix-sl"](given), FAMILY["locfedmix-sl"](plain), 1e-12)


def test_mixed_losses_are_cross_entropies_of_mixed_labels():
    given = everybody(rounds=1, **PLAIN_SGD, mixing={(0, 0): {0: [(1, 0.3)], 2: [(0, 0.6)]}})
    client, server = new_part(given, "client"), new_part(given, "server")
    with torch.no_grad():
        s = [client(given.batches[0, i, 0][0]) for i in range(3)]
    y = [F.one_hot(given.batches[0, i, 0][1]["labels"], CLASSES).double() for i in range(3)]

    def soft(s: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(server(s), y)

    total = sum(weight / 6 * soft(s[i], y[i]) for i, weight in enumerate(given.weights))
    total = total + 1 / 6 * soft(0.3 * s[0] + 0.7 * s[1], 0.3 * y[0] + 0.7 * y[1])
    total = total + 3 / 6 * soft(0.6 * s[2] + 0.4 * s[0], 0.6 * y[2] + 0.4 * y[0])
    total.backward()
    found = FAMILY["locfedmix-sl"](given)
    for name, weight in server.named_parameters():
        expected = (weight - given.server_lr * weight.grad).detach()
        torch.testing.assert_close(found.server[name], expected, rtol=1e-12, atol=1e-12)


def test_one_step_of_a_client_with_a_decoder_is_a_step_on_the_sum_of_both_losses():
    given = federation(parts=("client", "server", "decoder"), cohorts=[[1]], steps=1, **PLAIN_SGD)
    parts = {part: new_part(given, part) for part in given.parts}
    inputs, target = given.batches[0, 1, 0]
    s = parts["client"](inputs)
    loss = given.loss(parts["server"](s), target) + (inputs - parts["decoder"](s)).square().mean()
    loss.backward()
    found = FAMILY["locfedmix-sl"](given)
    results = {"client": found.client, "server": found.server, "decoder": found.decoders[0]}
    for part, module in parts.items():
        lr = given.decoder_lr if part == "decoder" else given.lr
        for name, weight in module.named_parameters():
            expected = (weight - lr * weight.grad).detach()
            torch.testing.assert_close(results[part][name], expected, rtol=1e-12, atol=1e-12)


def test_bytes_of_locfedmix_that_averages_every_second_round():
    cohorts = [[0, 1], [0, 2], [0, 1, 2], [1]]
    given = federation(parts=("client", "server", "decoder"), cohorts=cohorts, average_every=2)
    found = FAMILY["locfedmix-sl"](given)
    model, decoder = size(given.initial["client"]), size(given.initial["decoder"])
    expected = {(-1, i, "down", "first download"): model + decoder for i in (0, 1)}
    # round 1 averages over 0 and 2, and 2 comes for the first time; 1 missed it and pays in round 2; 3 averages over 1
    for key, times in {
        (1, 0, "up"): 1,
        (1, 0, "down"): 1,
        (1, 2, "up"): 1,
        (1, 2, "down"): 2,
        (2, 1, "down"): 1,
    }.items():
        expected |= {(*key, "client model"): times * model, (*key, "decoder"): times * decoder}
    for direction in ("up", "down"):
        expected |= {(3, 1, direction, "client model"): model, (3, 1, direction, "decoder"): decoder}
    models = {
        key: value for key, value in found.bytes.items() if key[3] in ("first download", "client model", "decoder")
    }
    assert models == expected
    for number in (0, 1, 2):
        same(found.clients[number], found.client)  # the last round averages
        same(found.decoders[number], found.decoders[0])
    local = FAMILY["locfedmix-sl"](replace(given, average_every=3))
    assert differs(local.clients[1], local.client)
    same(local.clients[0], local.client)


# ----------------------------------------------------------------------------------------------------------------- CPSL


@pytest.mark.parametrize("hands_on", [False, True])
@pytest.mark.parametrize("own_reply", [False, True])
def test_clusters_of_one_are_sl(hands_on, own_reply):
    given = federation(hands_on_optimizer=hands_on, own_reply=own_reply)
    given = replace(given, clusters=[[[number] for number in cohort] for cohort in given.cohorts])
    clusters, turns = FAMILY["cpsl"](given), FAMILY["sl"](given)
    same_run(clusters, turns)
    assert clusters.bytes == turns.bytes


def test_one_cluster_of_all_with_own_replies_is_joint_steps():
    given = federation(norm="group", own_reply=True)
    given = replace(given, clusters=[[cohort] for cohort in given.cohorts])
    same_run(FAMILY["cpsl"](given), FAMILY["splitfed-ss-joint"](given), 1e-10)


def test_a_slice_is_a_share_of_the_own_reply():
    given = everybody(norm="group", rounds=1, **PLAIN_SGD, clusters=[[[0, 1, 2]]])
    slices, own = FAMILY["cpsl"](given), FAMILY["cpsl"](replace(given, own_reply=True, lr=given.lr / 3))
    same_run(slices, own, 1e-12)


def test_a_cluster_hands_on_its_mean_state():
    given = federation(cohorts=[[0, 1, 2]] * 2, hands_on_optimizer=True, clusters=[[[0, 2], [1]], [[1, 2], [0]]])
    handed_on, kept = FAMILY["cpsl"](given), FAMILY["cpsl"](replace(given, hands_on_optimizer=False))
    assert differs(handed_on.client, kept.client)
    trained_bytes = 8 * sum(weight.numel() for weight in new_part(given, "client").parameters())
    downs = {key[:2] for key in handed_on.bytes if key[2:] == ("down", "optimizer state")}
    assert downs == {(0, 1), (1, 0), (1, 1), (1, 2)}  # the first cluster finds no state
    for t in range(2):
        for number in range(3):
            assert handed_on.bytes[t, number, "up", "optimizer state"] == 2 * trained_bytes
            assert handed_on.bytes[t, number, "down", "client model"] == size(given.initial["client"])


def test_replies_of_a_cluster_on_texts_of_unequal_lengths():
    given = replace(texts_or_images("texts", cohorts=[[0, 1, 2]]), own_reply=True)
    server = new_part(given, "server")
    optimizer = new_optimizer(given, server, 0.0, 0.0)
    uploads = []
    for number in range(3):
        inputs, target = given.batches[0, number, 0]
        uploads.append(Samples(new_part(given, "client")(inputs).detach(), target))
    assert len({upload.z.shape[1] for upload in uploads}) > 1
    for upload, reply in zip(uploads, serve_cluster(given, server, optimizer, uploads), strict=True):
        own = cut_gradient(given, server, upload.z, upload.target)
        torch.testing.assert_close(reply, own, rtol=1e-10, atol=1e-12)


def test_turns_on_texts_with_frozen_weights():
    given = replace(texts_or_images("texts"), hands_on_optimizer=True)
    given = replace(given, clusters=[[[number] for number in cohort] for cohort in given.cohorts])
    found = FAMILY["sl"](given)
    whole = train_unsplit(given, sorted(given.batches))
    same(found.client, {name: whole[0].state_dict()[name] for name in found.client})
    same(found.server, {name: whole[1].state_dict()[name] for name in found.server})
    same_run(found, FAMILY["cpsl"](given))
    frozen = ORACLES["splitfed-ss"](given).bytes[-1, 0, "down", "first download"] - size(given.initial["client"])
    assert found.bytes[-1, 0, "down", "first download"] == found.bytes[1, 1, "down", "first download"] == frozen > 0


# ------------------------------------------------------------------------------------------------------------- AdaptSFL


def with_cuts(given: Given, cuts: list[int]) -> Given:
    """The same model as one row of blocks, from the same weights."""
    shifted = {f"{int(name[0]) + 2}{name[1:]}": tensor for name, tensor in given.initial["server"].items()}
    return replace(given, cuts=cuts, initial={**given.initial, "blocks": {**given.initial["client"], **shifted}})


def numbered_from_two(tensors: Tensors) -> Tensors:
    return {f"{int(name[0]) + 2}{name[1:]}": tensor for name, tensor in tensors.items()}


ALL_PARTS = ("client", "server", "blocks")


def test_adaptsfl_that_averages_each_round_is_joint_steps():
    given = federation()
    adapt, joint = FAMILY["adaptsfl"](given), FAMILY["splitfed-ss-joint"](given)
    same_run(adapt, joint)
    assert adapt.bytes == joint.bytes


@pytest.mark.parametrize("every", [1, 2])
def test_equal_cuts_are_one_cut_for_all(every):
    given = federation(parts=ALL_PARTS, average_every=every)
    one, cuts = FAMILY["adaptsfl"](given), FAMILY["adaptsfl"](with_cuts(given, [2, 2, 2]))
    same(one.client, cuts.client, 1e-12)
    same(numbered_from_two(one.server), cuts.server, 1e-12)
    for number in range(3):
        same(one.clients[number], cuts.clients[number], 1e-12)
    assert one.bytes == cuts.bytes


@pytest.mark.parametrize("cuts", [[1, 2, 3], [3, 1, 1], [2, 2, 1]])
def test_with_any_cuts_it_is_large_batch_sgd(cuts):
    given = everybody(norm="group", parts=ALL_PARTS, **PLAIN_SGD, weights=[1.0] * 3)
    client, server = halves(train_on_large_batches(given))
    whole = {**client, **numbered_from_two(server)}
    found = FAMILY["adaptsfl"](with_cuts(given, cuts))
    same(found.client, {name: whole[name] for name in found.client}, 1e-12)
    same(found.server, {name: whole[name] for name in found.server}, 1e-12)


def test_a_block_between_the_cuts_is_averaged_by_weights():
    given = everybody(norm="group", rounds=1, parts=ALL_PARTS, **PLAIN_SGD)  # weights 1, 2, 3
    found = FAMILY["adaptsfl"](with_cuts(given, [1, 2, 3]))
    g = [gradients(given, number) for number in range(3)]
    shares = {
        0: (1 / 6, 2 / 6, 3 / 6),  # held by all
        1: (1 / 6, 2 / 6, 3 / 6),  # the server's copy serves client 0 alone
        2: (3 / 6 / 2, 3 / 6 / 2, 3 / 6),  # it serves 0 and 1, on their uniform mean, with the weight of both
        3: (1 / 3, 1 / 3, 1 / 3),  # the server's alone
    }
    whole = unsplit(given)
    names = [*given.initial["client"], *numbered_from_two(given.initial["server"])]
    for n, (name, weight) in enumerate(zip(names, trained(whole), strict=True)):
        step = sum(share * one[n] for share, one in zip(shares[int(name[0])], g, strict=True))
        expected = (weight - given.lr * step).detach()
        both = [tensors[name] for tensors in (found.client, found.server) if name in tensors]
        assert both
        for tensor in both:
            torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-12)


def test_blocks_nobody_present_holds_are_the_servers_own():
    given = with_cuts(federation(parts=ALL_PARTS, cohorts=[[0], [0]]), [1, 2, 3])
    found = FAMILY["adaptsfl"](given)
    shared = [name for name in found.client if name in found.server]
    assert {name[0] for name in shared} == {"1", "2"}
    same({name: found.client[name] for name in shared}, {name: found.server[name] for name in shared})
    assert differs({name: found.client[name] for name in shared}, dict(given.initial["blocks"]))
    for number in range(3):
        assert {int(name[0]) for name in found.clients[number]} == set(range(number + 1))


def test_bytes_with_cuts():
    given = with_cuts(federation(parts=ALL_PARTS, average_every=2), [1, 2, 3])  # cohorts 02, 12, 01: round 1 averages
    found = FAMILY["adaptsfl"](given).bytes
    own = {i: sum(size({n: x}) for n, x in given.initial["blocks"].items() if int(n[0]) <= i) for i in range(3)}
    z = {0: 3 * 36 * 8, 1: 3 * 36 * 8, 2: 4 * 9 * 8}
    expected = {(-1, i, "down", "first download"): own[i] for i in (0, 2)}
    expected |= {(1, i, "up", "client model"): own[i] for i in (1, 2)}
    expected |= {(1, 1, "down", "client model"): 2 * own[1], (1, 2, "down", "client model"): own[2]}
    expected[2, 0, "down", "client model"] = own[0]
    for t, cohort in enumerate(given.cohorts):
        for i in cohort:
            samples = sum(len(given.batches[t, i, k][0]) for k in range(3 + (i == 2)))
            expected[t, i, "up", "activations"] = expected[t, i, "down", "cut gradients"] = samples * z[i]
            expected[t, i, "up", "labels"] = samples * 8
    assert found == expected


@pytest.mark.parametrize("cuts", [[], [1, 2, 3]])
def test_client_parts_stay_local_if_they_are_never_averaged(cuts):
    given = federation(parts=ALL_PARTS, average_every=9, server_lr=0.0, weight_decay=0.0, norm="group")
    given = with_cuts(given, cuts)
    found = FAMILY["adaptsfl"](given)
    same(found.client, {name: given.initial["blocks" if cuts else "client"][name] for name in found.client})
    assert not any(kind == "client model" and t == 0 for t, _, _, kind in found.bytes)
    alone = FAMILY["adaptsfl"](replace(given, cohorts=[[0], [], [0]]))
    same(found.clients[0], alone.clients[0])  # with a server that stays, nobody influences anybody
    assert differs(found.clients[0], found.client)


# --------------------------------------------------------------------------------------------------------------- FedGKT


def distilling(cohorts: list[list[int]], ids: Callable[[int], int] = lambda n: n, **options: Any) -> Given:
    """Five examples for each client, batches of 2 and 3, one epoch at the client and two at the server."""
    given = federation(cohorts=cohorts, steps=0)
    examples = {(i, ids(n)): batch(1) for i in range(3) for n in range(5)}
    orders = {(t, i): torch.randperm(5).tolist() for t in range(len(cohorts)) for i in range(3)}
    client_batches = {key: [[ids(n) for n in order[:2]], [ids(n) for n in order[2:]]] for key, order in orders.items()}
    server_batches = {}
    for t, cohort in enumerate(cohorts):
        everything = [(i, ids(n)) for n in range(5) for i in cohort]
        shuffled = [everything[place] for place in torch.randperm(len(everything)).tolist()]
        server_batches[t] = [shuffled[:4], shuffled[4:], shuffled[5:], shuffled[:5]]
    return replace(given, distillation=Distillation(examples, client_batches, server_batches, **options))


def test_fedgkt_without_kl_is_local_training_and_a_server_on_frozen_features():
    given = distilling([[0, 1, 2]] * 2, client_kl=0.0, server_kl=0.0)
    options = given.distillation
    found = FAMILY["fedgkt"](given)
    clients = [(new_part(given, "client"), new_part(given, "auxiliary")) for _ in range(3)]
    optimizers = [[new_optimizer(given, part, given.lr, given.weight_decay) for part in own] for own in clients]
    server = new_part(given, "server")
    server_optimizer = new_optimizer(given, server, given.server_lr, given.weight_decay)

    def labels(some: list[tuple[int, int]]) -> Target:
        return {"labels": torch.cat([options.examples[one][1]["labels"] for one in some])}

    for t in range(2):
        for i, (x_c, head) in enumerate(clients):
            for ids in options.client_batches[t, i]:
                inputs = torch.cat([options.examples[i, n][0] for n in ids])
                backward_and_step(given.loss(head(x_c(inputs)), labels([(i, n) for n in ids])), optimizers[i])
        for some in options.server_batches[t]:
            features = torch.cat([evaluate(clients[i][0], options.examples[i, n][0]) for i, n in some])
            backward_and_step(given.loss(server(features), labels(some)), [server_optimizer])
    for i, (x_c, head) in enumerate(clients):
        same(found.clients[i], copied(x_c))
        same(found.auxiliaries[i], copied(head))
    same(found.server, copied(server))


def test_fedgkt_with_kl_begins_to_differ_at_the_client_in_its_second_round():
    given = distilling([[0, 1], [1, 2]])
    without = replace(given, distillation=replace(given.distillation, client_kl=0.0))
    distilled, plain = FAMILY["fedgkt"](given), FAMILY["fedgkt"](without)
    for number in (0, 2):
        same(distilled.clients[number], plain.clients[number])
    assert differs(distilled.clients[1], plain.clients[1])


def test_fedgkt_knows_examples_by_id():
    torch_numbers = FAMILY["fedgkt"](distilling([[0, 1, 2]] * 2))
    renamed = FAMILY["fedgkt"](distilling([[0, 1, 2]] * 2, ids=lambda n: 100 - 7 * n))
    same(torch_numbers.server, renamed.server)
    for i in range(3):
        same(torch_numbers.clients[i], renamed.clients[i])
        for n in range(5):
            assert torch.equal(torch_numbers.logits[i, n], renamed.logits[i, 100 - 7 * n])


def test_the_divergence_is_torchs():
    student, teacher = torch.randn(2, 4, CLASSES, dtype=torch.float64)
    options = Distillation({}, {}, {}, temperature=3.0)
    logits = {(0, n): teacher[n : n + 1] for n in range(4)}
    expected = F.kl_div((student / 3).log_softmax(1), (teacher / 3).softmax(1), reduction="batchmean")
    bare = divergence(replace(options, temperature_squared=False), student, logits, list(logits))
    torch.testing.assert_close(bare, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(divergence(options, student, logits, list(logits)), 9 * expected, rtol=1e-12, atol=1e-12)
    assert divergence(options, teacher, logits, list(logits)) == 0


def test_bytes_of_fedgkt():
    given = distilling([[0, 1], [1, 2]])
    first = size(given.initial["client"]) + size(given.initial["auxiliary"])
    expected = {(-1, i, "down", "first download"): first for i in (0, 1)} | {(1, 2, "down", "first download"): first}
    for t, cohort in enumerate(given.cohorts):
        for i in cohort:
            expected[t, i, "up", "activations"] = 5 * 3 * 36 * 8
            expected[t, i, "up", "labels"] = 5 * 8
            expected[t, i, "up", "logits"] = expected[t, i, "down", "logits"] = 5 * CLASSES * 8
    assert FAMILY["fedgkt"](given).bytes == expected


# ---------------------------------------------------------------------------------------------------------------- HERON


class Shift(nn.Module):
    """z + b, so that the mean output is linear in all weights."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, z: Tensor) -> Tensor:
        return z + self.b


def basis(length: int) -> Callable[[int, int, int], Tensor]:
    """Step k goes along axis k."""
    return lambda t, client, k: torch.eye(length, dtype=torch.float64)[k]


def test_heron_is_exact_on_linear_losses():
    def linear() -> nn.Module:
        return nn.Linear(3, 2).double()

    given = federation(cohorts=[[1]], steps=0, parts=())
    x = torch.randn(5, 3, dtype=torch.float64)
    parts = {"client": linear, "auxiliary": Shift, "server": Shift}
    given = replace(
        given,
        parts=parts,
        initial={part: copied(make()) for part, make in parts.items()},
        loss=lambda output, target: (output * target["slope"]).sum(),
        batches={(0, 1, k): (x, {"slope": torch.ones(5, 2, dtype=torch.float64)}) for k in range(10)},
        direction=basis(10),
        smoothing=0.5,
        lr=0.01,
    )
    found = FAMILY["heron-sfl"](given)  # all 10 axes, with the factor d = 10: ten steps of gradient descent in one
    expected = given.initial["client"]["weight"] - 0.01 * 10 * x.sum(dim=0)
    torch.testing.assert_close(found.client["weight"], expected.expand(2, 3), rtol=1e-10, atol=1e-10)
    expected = given.initial["client"]["bias"] - 0.01 * 10 * 5
    torch.testing.assert_close(found.client["bias"], expected, rtol=1e-10, atol=1e-10)
    expected = torch.full((2,), -0.01 * 10 * 5, dtype=torch.float64)
    torch.testing.assert_close(found.auxiliaries[0]["b"], expected, rtol=1e-10, atol=1e-10)


def test_the_mean_over_all_axes_of_herons_steps_is_the_step_of_cse_fsl():
    given = federation(cohorts=[[0]], steps=1, **PLAIN_SGD, smoothing=1e-6)
    length = sum(weight.numel() for part in ("client", "auxiliary") for weight in new_part(given, part).parameters())
    axes = torch.eye(length, dtype=torch.float64)
    runs = [FAMILY["heron-sfl"](replace(given, direction=lambda t, i, k, u=u: u)) for u in axes]
    cse = ORACLES["cse-fsl"](given)
    for name, tensor in cse.client.items():
        if tensor.is_floating_point():
            mean = torch.stack([run.client[name] for run in runs]).mean(dim=0)
            torch.testing.assert_close(mean, tensor, rtol=1e-6, atol=1e-6)
        else:
            assert all(torch.equal(run.client[name], tensor) for run in runs)
    mean = torch.stack([run.auxiliaries[0]["2.weight"] for run in runs]).mean(dim=0)
    torch.testing.assert_close(mean, cse.auxiliaries[0]["2.weight"], rtol=1e-6, atol=1e-6)
    same(runs[0].server, cse.server)
    assert differs(cse.client, dict(given.initial["client"]))


def test_heron_has_the_bytes_of_cse_fsl_and_leaves_statistics_alone_in_its_perturbed_pass():
    given = federation(lr=1e-4)
    length = sum(weight.numel() for part in ("client", "auxiliary") for weight in new_part(given, part).parameters())

    def direction(t: int, client: int, k: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * t + 10 * client + k)
        u = torch.randn(length, dtype=torch.float64, generator=generator)
        return u / u.norm()

    heron, cse = FAMILY["heron-sfl"](replace(given, direction=direction)), ORACLES["cse-fsl"](given)
    assert heron.bytes == cse.bytes
    for name in ("0.1.num_batches_tracked", "1.1.num_batches_tracked"):
        assert heron.client[name] == cse.client[name]
    still = FAMILY["heron-sfl"](replace(given, direction=direction, lr=0.0))
    first = "0.1.running_mean"  # of what no weight influences but the first layer's, which stay
    again = ORACLES["cse-fsl"](replace(given, lr=0.0, weight_decay=0.0, auxiliary_weight_decay=0.0))
    torch.testing.assert_close(still.client[first], again.client[first], rtol=0, atol=0)


# --------------------------------------------------------------------------------------------- averages and corrections

AVERAGING = ["fedavg", "splitfed-ss", "splitfed-ms", "cse-fsl"]


@pytest.mark.parametrize("algorithm", AVERAGING)
def test_corrections_that_are_nothing_change_nothing(algorithm):
    given = federation()
    plain = ORACLES[algorithm](given)
    for options in ({"proximal": 0.0}, {"f_server_optimizer": FServerOptimizer()}):
        found = ORACLES[algorithm](replace(given, **options))
        same_run(found, plain)
        assert found.bytes == plain.bytes
    proximal = ORACLES[algorithm](replace(given, proximal=0.5))
    assert differs(proximal.client, plain.client)
    assert proximal.bytes == plain.bytes


def test_the_proximal_term_begins_in_the_second_step():
    given = federation(norm="group", cohorts=[[1]], steps=2, **PLAIN_SGD, proximal=0.7)
    whole = unsplit(given)
    start = [weight.detach().clone() for weight in trained(whole)]
    for k in range(2):
        inputs, target = given.batches[0, 1, k]
        steps = torch.autograd.grad(given.loss(whole(inputs), target), trained(whole))
        with torch.no_grad():
            for weight, step, old in zip(trained(whole), steps, start, strict=True):
                weight -= given.lr * (step + 0.7 * (weight - old))
    client, server = halves(whole)
    found = ORACLES["fedavg"](given)
    same(found.client, client, 1e-12)
    same(found.server, server, 1e-12)


def test_two_sided_learning_rates():
    given = federation(cohorts=[[0, 2]])
    mean = ORACLES["fedavg"](given)
    half = ORACLES["fedavg"](replace(given, f_server_optimizer=FServerOptimizer(lr=0.5)))
    for name, start in given.initial["client"].items():
        optimised = name.endswith(("weight", "bias"))
        expected = start + 0.5 * (mean.client[name] - start) if optimised else mean.client[name]
        torch.testing.assert_close(half.client[name], expected, rtol=1e-12, atol=1e-12)


def test_fedopt_with_momentum_is_torchs_sgd_on_minus_delta():
    options = FServerOptimizer("sgd", lr=0.3, beta1=0.9)
    fed_opt = FedOpt(federation(f_server_optimizer=options), "auxiliary")
    x = {name: torch.randn_like(zeros) for name, zeros in fed_opt.m.items()}
    weights = [nn.Parameter(tensor.clone()) for tensor in x.values()]
    optimizer = torch.optim.SGD(weights, lr=0.3, momentum=0.9)
    for _ in range(4):
        mean = {name: torch.randn_like(tensor) for name, tensor in x.items()}
        for weight, new in zip(weights, mean.values(), strict=True):
            weight.grad = weight.detach() - new
        optimizer.step()
        x = fed_opt.step(x, mean)
    same(x, {name: weight.detach() for name, weight in zip(x, weights, strict=True)}, 1e-12)


@pytest.mark.parametrize(
    ("kind", "v"),
    [
        ("adagrad", lambda v, square: v + square),
        ("adam", lambda v, square: 0.99 * v + 0.01 * square),
        ("yogi", lambda v, square: v - 0.01 * square * (1 if v > square else -1)),
    ],
)
def test_adaptive_fedopt_number_by_number(kind, v):
    options = FServerOptimizer(kind, lr=0.01, beta1=0.9, tau=1e-3)
    given = federation(f_server_optimizer=options)
    fed_opt = FedOpt(given, "auxiliary")
    x = {name: torch.randn_like(tensor) for name, tensor in given.initial["auxiliary"].items()}
    one, m, second = float(x["2.bias"][0]), 0.0, 1e-6
    for scale in (1.0, 1e-4, 3.0, 1e-2):  # so that Δ² is now above v, now below it
        mean = {name: tensor + scale * torch.randn_like(tensor) for name, tensor in x.items()}
        delta = float(mean["2.bias"][0]) - one
        m, second = 0.9 * m + 0.1 * delta, v(second, delta * delta)
        one += 0.01 * m / (second**0.5 + 1e-3)
        x = fed_opt.step(x, mean)
        assert float(x["2.bias"][0]) == pytest.approx(one, abs=1e-12)


def test_fedopt_steps_from_the_newest_average():
    given = federation(cohorts=[[0, 2]])
    mean = ORACLES["cse-fsl"](given)
    found = ORACLES["cse-fsl"](replace(given, f_server_optimizer=FServerOptimizer("adagrad", lr=0.1, tau=0.01)))
    for name, _ in new_part(given, "client").named_parameters():
        start = given.initial["client"][name]
        delta = mean.client[name] - start
        expected = start + 0.1 * delta / ((1e-4 + delta**2).sqrt() + 0.01)
        torch.testing.assert_close(found.client[name], expected, rtol=1e-12, atol=1e-12)
    same(found.server, mean.server)  # the S-server's own, which no F-server averages


def test_fedopt_averages_buffers():
    given = federation(cohorts=[[0, 2]])
    adam = ORACLES["fedavg"](replace(given, f_server_optimizer=FServerOptimizer("adam", lr=0.1)))
    mean = ORACLES["fedavg"](given)
    buffers = [name for name in mean.client if "running" in name or "tracked" in name]
    assert buffers
    same({name: adam.client[name] for name in buffers}, {name: mean.client[name] for name in buffers})
    assert differs(adam.client, mean.client)


def test_scaffold_of_one_client_is_fedavg():
    given = federation(cohorts=[[0]] * 3, clients=1, optimizer="sgd")
    same_run(ORACLES["fedavg"](replace(given, scaffold=True)), ORACLES["fedavg"](given), 1e-12)


@pytest.mark.parametrize("algorithm", AVERAGING)
def test_the_common_control_is_the_mean_of_the_clients(algorithm):
    given = federation(optimizer="sgd", scaffold=True)
    found = ORACLES[algorithm](given)
    for part, control in found.controls[-1].items():
        assert set(control) == {name for name, _ in new_part(given, part).named_parameters()}
        for name, c in control.items():
            mean = sum(found.controls[number][part][name] for number in range(3)) / 3
            torch.testing.assert_close(c, mean, rtol=1e-12, atol=1e-14)
            assert c.any()
    assert differs(found.client, ORACLES[algorithm](replace(given, scaffold=False)).client)


def test_scaffold_line_by_line():
    """Algorithm 1 of Karimireddy et al. with option II, on the weights of the unsplit model in one row."""
    given = federation(norm="group", **PLAIN_SGD, lr=0.1)
    whole = unsplit(given)

    def gradient(y: list[Tensor], key: tuple[int, int, int]) -> list[Tensor]:
        inputs, target = given.batches[key]
        with torch.no_grad():
            for weight, value in zip(trained(whole), y, strict=True):
                weight.copy_(value)
        return list(torch.autograd.grad(given.loss(whole(inputs), target), trained(whole)))

    x = [weight.detach().clone() for weight in trained(whole)]
    c = [torch.zeros_like(tensor) for tensor in x]
    c_i = [[torch.zeros_like(tensor) for tensor in x] for _ in range(3)]
    for t, cohort in enumerate(given.cohorts):
        results, changes = [], []
        for i in cohort:
            y, steps = x, 3 + (i == 2)
            for k in range(steps):
                y = [
                    a - 0.1 * (g - own + all_)
                    for a, g, own, all_ in zip(y, gradient(y, (t, i, k)), c_i[i], c, strict=True)
                ]
            new = [own - all_ + (a - b) / (steps * 0.1) for own, all_, a, b in zip(c_i[i], c, x, y, strict=True)]
            changes.append([a - b for a, b in zip(new, c_i[i], strict=True)])
            c_i[i] = new
            results.append(y)
        shares = [given.weights[i] / sum(given.weights[j] for j in cohort) for i in cohort]
        x = [sum(share * y[n] for share, y in zip(shares, results, strict=True)) for n in range(len(x))]
        c = [old + sum(change[n] for change in changes) / 3 for n, old in enumerate(c)]
    found = ORACLES["fedavg"](replace(given, scaffold=True))
    for tensor, expected in zip((*found.client.values(), *found.server.values()), x, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-10, atol=1e-12)
    own = found.controls[1]
    for tensor, expected in zip((*own["client"].values(), *own["server"].values()), c_i[1], strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-10, atol=1e-12)


def test_with_one_step_a_round_controls_are_gradients_and_scaffold_is_fedavg():
    given = everybody(**PLAIN_SGD, weights=[1.0] * 3)
    same_run(ORACLES["fedavg"](replace(given, scaffold=True)), ORACLES["fedavg"](given), 1e-12)
    one_round = ORACLES["fedavg"](replace(given, scaffold=True, rounds=1))
    for number in range(3):
        control = one_round.controls[number]
        own = [*control["client"].values(), *control["server"].values()]
        for c, gradient in zip(own, gradients(given, number), strict=True):
            torch.testing.assert_close(c, gradient, rtol=1e-10, atol=1e-12)


def test_scaffold_sends_twice_the_model():
    given = federation(norm="group", optimizer="sgd", scaffold=True)
    found = ORACLES["fedavg"](given).bytes
    models = {key[:3]: value for key, value in found.items() if key[3] == "full model"}
    controls = {key[:3]: value for key, value in found.items() if key[3] == "control"}
    assert models == controls
    assert models[1, 1, "down"] == 2 * models[1, 1, "up"]  # comes for the first time
    assert not any(t == -1 for t, _, _ in controls)
    with pytest.raises(ValueError, match="SCAFFOLD"):
        ORACLES["fedavg"](replace(given, optimizer="adam"))


def test_corrections_leave_frozen_weights_alone():
    given = replace(texts_or_images("texts"), optimizer="sgd")
    corrected = replace(given, scaffold=True, proximal=0.1, f_server_optimizer=FServerOptimizer("adam", lr=0.01))
    found = ORACLES["cse-fsl"](corrected)
    assert found.bytes[0, 0, "up", "control"] == size(given.initial["client"]) + size(given.initial["auxiliary"])
    assert differs(found.client, ORACLES["cse-fsl"](given).client)


def test_all_of_the_family_runs_on_all_corrections():
    given = federation(
        optimizer="sgd", proximal=0.1, scaffold=True, f_server_optimizer=FServerOptimizer("yogi", lr=0.01)
    )
    for algorithm in ("local-loss", "splitfed-ss-joint", "locfedmix-sl", "adaptsfl"):
        found = FAMILY[algorithm](given)
        assert all(bool(tensor.isfinite().all()) for tensor in (*found.client.values(), *found.server.values()))
        assert "control" in kinds(found)
