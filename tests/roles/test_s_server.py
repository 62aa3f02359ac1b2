"""The S-server: alignment of absent and new clients, alignments that give nothing, what fidelity is measured on."""

import pytest
import torch
from torch import nn

from fsl_sage.algorithms import ALGORITHMS
from fsl_sage.algorithms.splitfed_ms import SplitFedMS
from fsl_sage.engines.local import LocalEngine
from fsl_sage.errors import InputError
from fsl_sage.experiment import Federation, run
from fsl_sage.experiment.setup import make_setup


@pytest.fixture
def federation(tiny):
    """Makes a federation on the local engine; closed afterwards."""
    made = []

    def make(**changes):
        setup = make_setup(tiny(**changes))
        made.append(LocalEngine(setup))
        return Federation(setup, made[-1])

    yield make
    for engine in made:
        engine.close()


def server_of(federation):
    return federation.engine._server.role


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# Pooled alignment with absent and new clients


def test_a_newcomer_gets_the_pooled_auxiliary(federation):
    playing = federation(alignment={"scope": "pooled"}, align_every=5)
    playing.play_round(0, [0, 1])
    newest = server_of(playing).auxiliaries.of(0)
    assert not same(newest, playing.setup.initial["auxiliary"])
    assert same(server_of(playing).auxiliaries.of(2), newest)
    assert same(playing.post.waiting[2]["auxiliary"], newest)


def test_pooled_alignment_goes_on_from_the_last_one_when_a_client_of_lower_number_comes(federation):
    """With so low a learning rate an alignment hardly moves: where it ends tells where it began."""
    playing = federation(alignment={"scope": "pooled", "start": "previous", "steps": 30})
    playing.play_round(0, [1, 2])
    first = server_of(playing).auxiliaries.of(1)
    object.__setattr__(playing.setup.settings.config.alignment, "lr", 1e-12)
    playing.play_round(1, [0])
    second = server_of(playing).auxiliaries.of(0)
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=0, atol=1e-8)


# Alignments that give nothing


class Constant(nn.Module):
    """A model whose loss does not depend on what crosses the cut."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 4, 3, stride=4)
        self.second = nn.Conv2d(4, 4, 3, stride=4)
        self.last = nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x)).flatten(1)
        return self.last(x * 0)


@pytest.mark.parametrize("scope", ["pooled", "client"])
def test_cut_gradients_of_zero_skip_the_alignment_with_a_remark(tiny, scope):
    config = tiny(
        model={"name": "tests.roles.test_s_server:Constant", "cut": "first"}, alignment={"scope": scope, "steps": 2}
    )
    result = run(config)
    owners = ["pooled"] if scope == "pooled" else ["0", "1", "2"]
    for line in result.metrics:
        assert line["aligned"] is False
        assert line["alignment_skipped"] == dict.fromkeys(owners, "the server's cut gradients are all zero")
        assert line["fidelity_cosine"] is line["fidelity_nmse"] is None
    assert (result.directory / "metrics.jsonl").read_text().count("NaN") == 0


def test_cut_gradients_beyond_all_bounds_skip_the_alignment(federation):
    playing = federation(align_every=5)
    playing.play_round(1, [0, 1, 2])
    before = server_of(playing).auxiliaries.of(0)
    weights = server_of(playing)._model.parameters()
    with torch.no_grad():
        weights["head.fc.weight"].mul_(1e25)
    assert list(server_of(playing).align([0, 1, 2])) == []
    assert server_of(playing).auxiliaries.skipped == {"pooled": "the server's cut gradients are not finite"}
    assert server_of(playing).auxiliaries.of(0) is before


def test_an_auxiliary_that_diverges_is_not_sent(federation):
    playing = federation(align_every=5, alignment={"lr": 1e30, "steps": 5})
    playing.play_round(1, [0, 1, 2])
    assert list(server_of(playing).align([0, 1, 2])) == []
    assert "infinite or NaN" in server_of(playing).auxiliaries.skipped["pooled"]


# A client that fails


@pytest.mark.parametrize("workers", [1, 2])
def test_the_server_copy_of_a_client_that_failed_is_not_averaged(federation, monkeypatch, workers):
    class Failing(SplitFedMS):
        def local_round(self, client, t):
            reply, conversation = None, super().local_round(client, t)
            for step in range(100):
                try:
                    upload = conversation.send(reply)
                except StopIteration:
                    return
                if client.id == 1 and t == 1 and step == 2:
                    raise ValueError("the disk is full")
                reply = yield upload

    monkeypatch.setitem(ALGORITHMS, "splitfed-ms", Failing)
    options = {"algorithm": "splitfed-ms", "on_client_failure": "drop", "workers": workers, "rounds": 3}
    failed, without = federation(**options), federation(**options)
    for playing, second in ((failed, [0, 1, 2]), (without, [0, 2])):
        for t, cohort in enumerate(([0, 1, 2], second, [0, 1, 2])):
            played = playing.play_round(t, cohort)
            assert played["missing"] == ([1] if cohort == [0, 1, 2] and t == 1 else [])
    assert all(same(failed.weights()[part], without.weights()[part]) for part in ("client", "server"))


# Fidelity


def test_fidelity_is_measured_on_uploads_that_the_alignment_has_not_seen(federation):
    playing = federation(align_every=5)
    lines = [playing.play_round(t, cohort) for t, cohort in enumerate(([0, 1, 2], [1], [0, 1, 2]))]
    assert all(line["fidelity_cosine"] is not None for line in lines)
    assert [line["fidelity_cosine_seen"] is None for line in lines] == [False, True, True]
    server = server_of(playing)
    list(server.align([0, 1, 2]))
    assert server.fidelity() is None, "now every upload has been seen"
    assert server.fidelity(seen=True) is not None


def test_an_upload_that_comes_once_a_round_is_seen_by_an_alignment_at_its_start(federation):
    playing = federation(align_at="start", upload_every=1000)
    line = playing.play_round(0, [0, 1, 2])
    assert line["aligned"]
    assert line["fidelity_cosine"] is None
    assert line["fidelity_cosine_seen"] is not None


# Statistics estimated anew


def test_recalibrated_statistics_are_the_means_over_the_stored_batches(federation):
    """The oracle: the layers before each BatchNorm by hand, batch after batch."""
    playing = federation(algorithm="cse-fsl", alignment={"batch_size": 16}, model={"batch_norm": "average"})
    playing.play_round(0, [0, 1, 2])
    server, weights = server_of(playing), server_of(playing).weights()
    found = server.recalibrated()
    uploads = [upload for client in (0, 1, 2) for upload in server.auxiliaries.data[client]]
    z = torch.cat([upload.z[0] for upload in uploads])
    parts = list(z.split(16)) if len(z) % 16 != 1 else [*z.split(16)[:-2], z[len(z) // 16 * 16 - 16 :]]
    assert server.weights()["block2.bn.running_mean"].equal(weights["block2.bn.running_mean"]), "the server's own stay"
    maps = parts
    for block in ("block2", "block3"):
        maps = [nn.functional.conv2d(x, weights[f"{block}.conv.weight"], stride=2, padding=1) for x in maps]
        mean = torch.stack([x.mean((0, 2, 3)) for x in maps]).mean(0)
        variance = torch.stack([x.var((0, 2, 3)) for x in maps]).mean(0)
        torch.testing.assert_close(found[f"{block}.bn.running_mean"], mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[f"{block}.bn.running_var"], variance, rtol=1e-4, atol=1e-5)
        scale, shift = weights[f"{block}.bn.weight"], weights[f"{block}.bn.bias"]
        maps = [nn.functional.batch_norm(x, None, None, scale, shift, training=True).relu() for x in maps]


def test_recalibration_is_a_metric_of_its_own(tiny):
    plain, more = run(tiny()).metrics, run(tiny(model={"recalibrate": True})).metrics
    for line, other in zip(plain, more, strict=True):
        assert line["test_accuracy"] == other["test_accuracy"]
        assert line["test_loss"] == other["test_loss"] != other["test_loss_recalibrated"]
        assert "test_loss_recalibrated" not in line


@pytest.mark.parametrize("algorithm", ["splitfed-ss", "splitfed-ms", "fedavg"])
def test_recalibration_needs_stored_uploads(tiny, algorithm):
    with pytest.raises(InputError, match=f"--model.recalibrate needs stored uploads, and {algorithm} keeps none"):
        run(tiny(algorithm=algorithm, model={"recalibrate": True}))
