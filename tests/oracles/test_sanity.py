"""Laws that hold for the oracles themselves, checked without the package."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.oracles import ORACLES
from tests.oracles.alignment import (
    Samples,
    alignment_loss,
    alignment_targets,
    cut_batches,
    join,
    keep_newest,
    sample_gradients,
)
from tests.oracles.common import load, new_optimizer, new_part
from tests.oracles.given import Alignment, Found, Given, Target, Tensors
from tests.oracles.models import (
    GPT2Auxiliary,
    GPT2Client,
    GPT2Server,
    ResNetAuxiliary,
    ResNetClient,
    ResNetServer,
    image_loss,
    image_terms,
    text_loss,
    text_terms,
)

STEPS = 3
VOCABULARY = 50


def trained_state(module: nn.Module) -> Tensors:
    """Trained weights and buffers."""
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    return {name: tensor.clone() for name, tensor in module.state_dict().items() if name not in frozen}


def image_batch(size: int) -> tuple[Tensor, Target]:
    return torch.randn(size, 3, 32, 32, dtype=torch.float64), {"labels": torch.randint(10, (size,))}


def text_batch(size: int) -> tuple[Tensor, Target]:
    shape = (size, int(torch.randint(4, 9, ())))
    mask = torch.rand(shape) < 0.6
    mask[:, 1] = True
    labels = torch.randint(VOCABULARY, shape, dtype=torch.int32)
    return torch.randint(VOCABULARY, shape), {"labels": labels, "mask": mask}


def gpt2_base() -> Tensors:
    """Random weights under the names of Hugging Face."""
    base: Tensors = {}
    sizes = {"wte.weight": (VOCABULARY, 16), "wpe.weight": (256, 16), "ln_f.weight": (16,), "ln_f.bias": (16,)}
    for n in range(5):
        for name, inputs, outputs in [
            ("attn.c_attn", 16, 48),
            ("attn.c_proj", 16, 16),
            ("mlp.c_fc", 16, 64),
            ("mlp.c_proj", 64, 16),
        ]:
            sizes[f"h.{n}.{name}.weight"] = (inputs, outputs)
            sizes[f"h.{n}.{name}.bias"] = (outputs,)
        for name in ("ln_1", "ln_2"):
            sizes[f"h.{n}.{name}.weight"] = sizes[f"h.{n}.{name}.bias"] = (16,)
    for name, shape in sizes.items():
        scale = 0.3 * torch.randn(shape, dtype=torch.float64)
        base[f"transformer.{name}"] = 1 + scale if "ln_" in name and name.endswith("weight") else scale
    base["lm_head.weight"] = base["transformer.wte.weight"]
    return base


def federation(problem: str, **options: Any) -> Given:
    """Three clients, three rounds, client 1 away in the first, client 0 in the second."""
    torch.manual_seed(0)
    cohorts = options.pop("cohorts", [[0, 2], [1, 2], [0, 1]])
    if problem == "images":
        parts = {"client": ResNetClient, "server": ResNetServer, "auxiliary": ResNetAuxiliary}
        loss, terms, batch = image_loss, image_terms, image_batch
    else:
        base = gpt2_base()
        makers = {"client": GPT2Client, "server": GPT2Server, "auxiliary": GPT2Auxiliary}
        parts = {part: lambda maker=maker: maker(base) for part, maker in makers.items()}
        loss, terms, batch = text_loss(0.1), text_terms, text_batch
    given = Given(
        parts=parts,
        initial={part: trained_state(make()) for part, make in parts.items()},
        weights=[1.0, 2.0, 3.0],
        cohorts=cohorts,
        batches={
            (t, client, k): batch(6 if k < STEPS - 1 else 3)
            for t, cohort in enumerate(cohorts)
            for client in cohort
            for k in range(STEPS)
        },
        alignment_orders={(t, client): [0, 0] for t in range(len(cohorts)) for client in range(-1, 3)},
        loss=loss,
        terms=terms,
        rounds=len(cohorts),
        alignment=Alignment(samples=14, batch_size=4),
    )
    return replace(given, **options)


def assert_close(first: Tensors, second: Tensors, tolerance: float = 1e-12) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=tolerance, atol=tolerance, msg=name)


def size(*states: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensors in states for tensor in tensors.values())


def all_finite(found: Found) -> bool:
    states = [found.client, found.server, *found.auxiliaries.values()]
    return all(bool(tensor.isfinite().all()) for tensors in states for tensor in tensors.values())


@pytest.mark.parametrize(("problem", "optimizer"), [("images", "adam"), ("images", "sgd"), ("texts", "adamw")])
def test_one_client_of_splitfed_is_training_of_the_unsplit_model(problem, optimizer):
    given = federation(problem, cohorts=[[0], [0]], clients=1, optimizer=optimizer)
    client, server = new_part(given, "client"), new_part(given, "server")
    whole = nn.Sequential(client, server)
    one = new_optimizer(given, whole, given.lr, given.weight_decay)
    for key in sorted(given.batches):
        inputs, target = given.batches[key]
        one.zero_grad()
        given.loss(whole(inputs), target).backward()
        one.step()
    for algorithm in ("splitfed-ss", "splitfed-ms", "fedavg"):
        found = ORACLES[algorithm](given)
        assert_close(found.client, trained_state(client), 0)
        assert_close(found.server, trained_state(server), 0)


@pytest.mark.parametrize("problem", ["images", "texts"])
def test_splitfed_ms_is_fedavg(problem):
    given = federation(problem)
    fedavg, splitfed = ORACLES["fedavg"](given), ORACLES["splitfed-ms"](given)
    assert_close(fedavg.client, splitfed.client, 0)
    assert_close(fedavg.server, splitfed.server, 0)


def test_an_auxiliary_equal_to_the_server_has_alignment_loss_zero():
    given = federation("images")
    given = replace(given, parts={**given.parts, "auxiliary": ResNetServer})
    server, auxiliary = ResNetServer(), ResNetServer()
    load(auxiliary, server.state_dict())
    batches = [Samples(torch.randn(4, 16, 8, 8, dtype=torch.float64), image_batch(4)[1])]
    targets, mean_square = alignment_targets(given, server, batches)
    loss = alignment_loss(given, auxiliary, batches[0], targets[0], mean_square)
    loss.backward()
    assert mean_square > 0
    assert loss == 0
    assert all(not parameter.grad.any() for parameter in auxiliary.parameters())


def test_an_auxiliary_equal_to_the_server_makes_the_first_step_of_splitfed():
    given = federation("images", cohorts=[[0]], align_rounds=(5,))
    given = replace(
        given,
        batches={(0, 0, 0): given.batches[0, 0, 0]},
        parts={**given.parts, "auxiliary": ResNetServer},
        initial={**given.initial, "auxiliary": given.initial["server"]},
    )
    assert_close(ORACLES["fsl-sage"](given).client, ORACLES["splitfed-ss"](given).client)


@pytest.mark.parametrize("problem", ["images", "texts"])
def test_a_warm_start_of_one_round_is_cse_fsl(problem):
    given = federation(problem, cohorts=[[0, 2]], warm_start=True, align_rounds=(5,))
    sage, cse = ORACLES["fsl-sage"](given), ORACLES["cse-fsl"](given)
    assert_close(sage.client, cse.client, 0)
    assert_close(sage.server, cse.server, 0)
    assert_close(sage.auxiliaries[2], cse.auxiliaries[2], 0)
    assert sage.bytes == cse.bytes


def test_one_client_with_a_local_auxiliary_that_is_never_aligned_is_cse_fsl():
    given = federation("images", cohorts=[[0], [0]], clients=1, local_auxiliary=True, align_rounds=(5,))
    sage, cse = ORACLES["fsl-sage"](given), ORACLES["cse-fsl"](given)
    assert_close(sage.client, cse.client, 0)
    assert_close(sage.auxiliaries[0], cse.auxiliaries[0], 0)


@pytest.mark.parametrize(
    ("problem", "start", "scope", "align_at"),
    [
        ("images", "previous", "pooled", "end"),
        ("images", "server", "client", "end"),
        ("images", "previous", "client", "start"),
        ("texts", "server", "pooled", "start"),
        ("texts", "previous", "client", "end"),
    ],
)
def test_alignment_changes_the_auxiliary_and_not_the_server(problem, start, scope, align_at):
    options = Alignment(samples=14, batch_size=4, start=start, scope=scope, keeps_optimizer=True, clip=0.5)
    given = federation(problem, alignment=options, align_at=align_at, align_every=1)
    aligned, unaligned = ORACLES["fsl-sage"](given), ORACLES["fsl-sage"](replace(given, align_rounds=(9,)))
    assert all_finite(aligned)
    buffers = [name for name in given.initial["auxiliary"] if "running" in name or "num_batches" in name]
    for number in range(3):
        assert any(
            not torch.equal(aligned.auxiliaries[number][n], tensor) for n, tensor in unaligned.auxiliaries[0].items()
        )
        if start == "previous":
            assert all(torch.equal(aligned.auxiliaries[number][n], given.initial["auxiliary"][n]) for n in buffers)
    if scope == "pooled":
        assert_close(aligned.auxiliaries[0], aligned.auxiliaries[2], 0)
    one_round = replace(given, rounds=1, align_at="end")
    with_alignment = ORACLES["fsl-sage"](one_round)
    without = ORACLES["fsl-sage"](replace(one_round, align_rounds=(9,)))
    assert_close(with_alignment.server, without.server, 0)
    assert_close(with_alignment.client, without.client, 0)


@pytest.mark.parametrize("problem", ["images", "texts"])
def test_a_start_from_the_server_takes_all_that_fits(problem):
    options = Alignment(samples=14, batch_size=4, lr=0.0, start="server")
    given = federation(problem, cohorts=[[0, 1, 2]], alignment=options)
    own = {name: tensor + 1 for name, tensor in given.initial["auxiliary"].items()}
    given = replace(given, initial={**given.initial, "auxiliary": own})
    found = ORACLES["fsl-sage"](given)
    server = {**given.parts["server"]().state_dict(), **found.server}
    taken = {name: found.auxiliaries[1][name] for name in own if name != "fc.weight"}
    assert_close(taken, {name: server[name] for name in taken}, 0)
    if problem == "images":
        assert torch.equal(found.auxiliaries[1]["fc.weight"], own["fc.weight"])  # has another shape


def test_alignment_lowers_its_loss():
    given = federation("images", cohorts=[[0, 1, 2]], alignment=Alignment(samples=14, batch_size=0, lr=1e-3))
    server, auxiliary = new_part(given, "server"), new_part(given, "auxiliary")
    given = replace(given, server_lr=0.0, weight_decay=0.0, alignment_orders={(0, -1): [0] * 30})
    found = ORACLES["fsl-sage"](given)
    load(server, given.initial["server"])
    inputs, target = given.batches[0, 0, 0]
    batch = Samples(new_part(given, "client")(inputs).detach(), target)
    targets, mean_square = alignment_targets(given, server, [batch])
    before = alignment_loss(given, auxiliary, batch, targets[0], mean_square)
    load(auxiliary, found.auxiliaries[0])
    assert alignment_loss(given, auxiliary, batch, targets[0], mean_square) < 0.8 * before


def test_the_newest_samples_are_kept():
    def upload(first: int, length: int) -> Samples:
        return Samples(torch.arange(first, first + length).float(), {"labels": torch.arange(first, first + length)})

    uploads = [upload(0, 4), upload(4, 4), upload(8, 3)]
    kept = {samples: [one.z.int().tolist() for one in keep_newest(uploads, samples)] for samples in (2, 3, 4, 5, 8, 20)}
    assert kept[2] == [[9, 10]]
    assert kept[3] == [[8, 9, 10]]
    assert kept[4] == [[8, 9, 10]]  # a rest of one
    assert kept[5] == [[6, 7], [8, 9, 10]]
    assert kept[8] == [[4, 5, 6, 7], [8, 9, 10]]
    assert kept[20] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert [len(batch) for batch in cut_batches(uploads, 5)] == [5, 6]
    assert [len(batch) for batch in cut_batches(uploads, 4)] == [4, 4, 3]
    assert [len(batch) for batch in cut_batches(uploads, 0)] == [4, 4, 3]


def test_filling_up_texts_changes_no_gradient():
    given = federation("texts")
    server = new_part(given, "server")
    uploads = []
    for length in (5, 8):
        target = {"labels": torch.ones(2, length, dtype=torch.int32), "mask": torch.rand(2, length) < 0.7}
        uploads.append(Samples(torch.randn(2, length, 16, dtype=torch.float64), target))
    together = sample_gradients(given, server, join(uploads))
    for start, upload in zip((0, 2), uploads, strict=True):
        alone = sample_gradients(given, server, upload)
        length = upload.z.shape[1]
        torch.testing.assert_close(together[start : start + 2, :length], alone, rtol=1e-10, atol=1e-12)
        assert not together[start : start + 2, length:].any()


def test_gpt2_is_that_of_hugging_face():
    transformers = pytest.importorskip("transformers")
    base = gpt2_base()
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=256, n_embd=16, n_layer=5, n_head=2, attn_implementation="eager"
    )
    whole = transformers.GPT2LMHeadModel(config).double().eval()
    parts = [GPT2Client(base, rank=2, alpha=6.0), GPT2Server(base, rank=2, alpha=6.0)]
    merged = dict(base)
    for part in parts:
        for name, tensor in trained_state(part).items():
            load(part, {name: torch.randn_like(tensor)})
        for name, a in trained_state(part).items():
            if "lora_A" in name:
                b = trained_state(part)[name.replace("lora_A", "lora_B")]
                weight = name.replace("lora_A.default.weight", "weight")
                merged[weight] = base[weight] + 6.0 / 2 * (b @ a).T
    whole.load_state_dict(merged)
    inputs, _ = text_batch(3)
    torch.testing.assert_close(nn.Sequential(*parts)(inputs), whole(inputs).logits, rtol=1e-10, atol=1e-10)
    assert list(trained_state(parts[0])) == [
        "transformer.h.0.attn.c_attn.lora_A.default.weight",
        "transformer.h.0.attn.c_attn.lora_B.default.weight",
    ]


def test_bytes_of_fsl_sage():
    given = federation("images", align_every=2)  # aligns after rounds 0 and 2; steps 0 and 2 upload
    client, auxiliary = size(given.initial["client"]), size(given.initial["auxiliary"])
    expected = {}
    for number in (0, 2):
        expected[-1, number, "down", "first download"] = client + auxiliary
    for t, cohort in enumerate(given.cohorts):
        for number in cohort:
            expected[t, number, "up", "activations"] = (6 + 3) * 16 * 8 * 8 * 8
            expected[t, number, "up", "labels"] = (6 + 3) * 8
            expected[t, number, "up", "client model"] = client
            expected[t, number, "down", "client model"] = client
    for t, number in [(0, 0), (0, 2), (2, 0), (2, 1)]:
        expected[t, number, "down", "auxiliary"] = auxiliary
    expected[1, 1, "down", "client model"] += client  # comes for the first time, and gets the aligned auxiliary
    expected[1, 1, "down", "auxiliary"] = auxiliary
    expected[2, 0, "down", "client model"] += client  # was away, and has the newest auxiliary
    assert ORACLES["fsl-sage"](given).bytes == expected


def test_bytes_of_frozen_weights():
    given = federation("texts")
    base = gpt2_base()
    del base["lm_head.weight"]
    blocks = {name: tensor for name, tensor in base.items() if ".h.4." not in name and "ln_f" not in name}
    initial = {part: size(tensors) for part, tensors in given.initial.items()}
    sage, fedavg = ORACLES["fsl-sage"](given).bytes, ORACLES["fedavg"](given).bytes
    assert sage[-1, 0, "down", "first download"] == initial["client"] + initial["auxiliary"] + size(blocks)
    assert sage[1, 1, "down", "first download"] == size(blocks)
    assert fedavg[-1, 2, "down", "first download"] == initial["client"] + initial["server"] + size(base)
    assert fedavg[1, 1, "down", "full model"] == 2 * (initial["client"] + initial["server"])


def test_one_step_of_cse_fsl_by_hand():
    given = federation(
        "images", cohorts=[[1]], optimizer="sgd", momentum=0.0, weight_decay=0.1, auxiliary_weight_decay=0.0
    )
    given = replace(given, batches={(0, 1, 0): given.batches[0, 1, 0]})
    parts = {part: new_part(given, part) for part in given.parts}
    inputs, target = given.batches[0, 1, 0]
    z = parts["client"](inputs)
    given.loss(parts["auxiliary"](z), target).backward()
    given.loss(parts["server"](z.detach()), target).backward()
    found = ORACLES["cse-fsl"](given)
    results = {"client": found.client, "server": found.server, "auxiliary": found.auxiliaries[0]}
    for part, module in parts.items():
        decay = 0.0 if part == "auxiliary" else 0.1
        for name, weight in module.named_parameters():
            expected = weight - given.lr * (weight.grad + decay * weight)
            torch.testing.assert_close(results[part][name], expected.detach(), rtol=1e-12, atol=1e-12)
        assert_close({n: results[part][n] for n, _ in module.named_buffers()}, dict(module.named_buffers()))
    assert results["client"]["bn1.num_batches_tracked"] == 1
