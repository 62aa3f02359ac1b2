"""Whole runs with codecs: their bytes are known before, both ends remember the same, and nothing breaks them off."""

from dataclasses import replace

import pytest
import torch

from fsl_sage.algorithms import ALGORITHMS, resolve
from fsl_sage.config import CodecConfig, load_preset
from fsl_sage.engines.local import LocalEngine
from fsl_sage.errors import InputError
from fsl_sage.experiment import Federation, cost, draw_cohort, resume, run
from fsl_sage.experiment.costs import run_cost
from fsl_sage.experiment.setup import check_config, make_setup
from fsl_sage.wire.paths import below
from tests.engines.faulty import Raises
from tests.test_experiment import assert_same_run, interrupt_after

ALL = ("activations", "gradients", "update", "weights", "auxiliary")
SPARSE = {"activations": "randtopk:0.1", "gradients": "randtopk:0.1", "update": "topk:0.1", "weights": "topk:0.2"}
CACHED = {"activations": "cached-int4", "update": "int4", "weights": "int4", "auxiliary": "int8", "labels": "smallest"}
AWAY = {
    "cohort": 0.67,
    "rounds": 4,
    "align_every": 2,
    "local_steps": 3,
    "data": {"partition": "dirichlet", "alpha": 0.5},
}


def everywhere(word):
    return dict.fromkeys(ALL, word)


@pytest.fixture
def played():
    """A federation after all rounds of a configuration, with the metrics of each."""
    engines = []

    def play(config, algorithm=None):
        setup = make_setup(config)
        if algorithm is not None:
            object.__setattr__(setup, "algorithm", algorithm(config))
        engines.append(LocalEngine(setup))
        federation = Federation(setup, engines[-1])
        return federation, [federation.play_round(t, draw_cohort(config, t)) for t in range(config.rounds)]

    yield play
    for engine in engines:
        engine.close()


# Bytes


@pytest.mark.parametrize("algorithm", ["fsl-sage", "cse-fsl", "splitfed-ss", "sl", "fedavg", "locfedmix-sl"])
@pytest.mark.parametrize("codec", [everywhere("fp16"), CACHED, SPARSE], ids=["fp16", "cached", "sparse"])
def test_the_ledger_is_the_cost_to_the_byte(tiny, played, algorithm, codec):
    config = tiny(algorithm=algorithm, codec=codec, local_steps=3, clients=4)
    federation, _ = played(config)
    told = run_cost(config)
    assert not told["is_upper_bound"]
    assert told["bytes_total"] == federation.ledger.total
    assert told["bytes_paper"] == federation.ledger.paper


def test_with_zstd_the_cost_is_an_upper_bound_and_says_so(tiny, played):
    config = tiny(codec=everywhere("int4+zstd"), local_steps=3)
    federation, _ = played(config)
    told = run_cost(config)
    assert told["is_upper_bound"]
    assert 0.5 * told["bytes_total"] < federation.ledger.total < told["bytes_total"]
    assert cost(config)["fsl-sage"]["is_upper_bound"]


@pytest.mark.parametrize(
    ("smashed", "models", "megabytes"), [("int8", "int8", 36.8), ("int4", "int8", 26.3), ("int4", "int4", 18.4)]
)
def test_a_round_at_the_papers_setting(smashed, models, megabytes):
    codec = {"activations": smashed, "update": models, "weights": models, "auxiliary": models}
    config = replace(load_preset("paper"), codec=CodecConfig(**codec))
    told = run_cost(resolve(replace(config, rounds=10, budget_gib=None)))  # of ten rounds one aligns
    assert megabytes <= told["bytes_paper"] / 1e7 <= 1.05 * megabytes  # scales, and BatchNorm's statistics as they are


def test_labels_in_the_smallest_type(tiny):
    plain, coded = (cost(tiny(codec={"labels": word}))["fsl-sage"] for word in ("none", "smallest"))
    assert plain["by_kind"]["labels"]["up"] == 8 * coded["by_kind"]["labels"]["up"]


# The same numbers


@pytest.mark.parametrize("algorithm", ["fsl-sage", "splitfed-ss"])
def test_no_codec_and_codecs_that_lose_nothing_change_no_bit(tiny, played, algorithm):
    plain, _ = played(tiny(algorithm=algorithm))
    for codec in (everywhere("none"), {"activations": "topk:1", "gradients": "topk:1"}, everywhere("none+zstd")):
        other, _ = played(tiny(algorithm=algorithm, codec=codec))
        for part, tensors in plain.weights().items():
            close = torch.equal if codec.get("update") != "none+zstd" else torch.allclose  # a sum of differences
            assert all(close(x, other.weights()[part][name]) for name, x in tensors.items())


@pytest.mark.parametrize("algorithm", ["fsl-sage", "splitfed-ss"])
@pytest.mark.parametrize("codec", [CACHED, SPARSE], ids=["cached", "sparse"])
def test_the_number_of_workers_changes_nothing(tiny, algorithm, codec):
    one, two = (
        run(tiny(algorithm=algorithm, codec=codec, workers=workers, local_steps=3)).directory for workers in (1, 2)
    )
    assert_same_run(one, two)


@pytest.mark.parametrize(
    ("algorithm", "codec"), [("fsl-sage", CACHED), ("cse-fsl", SPARSE), ("splitfed-ms", SPARSE), ("sl", CACHED)]
)
def test_a_run_that_was_interrupted_goes_on_as_if_it_was_not(tiny, monkeypatch, algorithm, codec):
    whole = run(tiny(algorithm=algorithm, codec=codec, **AWAY)).directory
    config = tiny(algorithm=algorithm, codec=codec, **AWAY)
    for rounds in (2, 3):
        interrupt_after(monkeypatch, rounds)
        with pytest.raises(KeyboardInterrupt):
            run(config) if rounds == 2 else resume(config.out)
        monkeypatch.undo()
    assert_same_run(resume(config.out).directory, whole)


# Who has what


def ends(federation, client):
    """What a client and the S-server remember of its activations."""
    engine = federation.engine
    return below("codec/cache/", engine._clients[client]), below(f"codec/{client}/", engine._server.state())


def assert_same_memory(federation, client):
    own, servers = ends(federation, client)
    assert own.keys() == servers.keys() == {"0"}
    assert torch.equal(own["0"], servers["0"])
    assert float(own["0"].abs().sum()) > 0


@pytest.mark.parametrize("algorithm", ["fsl-sage", "splitfed-ss"])
def test_both_ends_remember_the_same_activations(tiny, played, algorithm):
    federation, metrics = played(tiny(algorithm=algorithm, codec=CACHED, **AWAY))
    for client in federation.engine._clients:
        assert_same_memory(federation, client)
    cached = sum(x.numel() * 4 for client in federation.engine._clients for x in ends(federation, client)[0].values())
    assert metrics[-1]["codec_memory_bytes"] > 2 * cached


@pytest.mark.parametrize("algorithm", ["fsl-sage", "splitfed-ss"])
def test_a_client_that_fails_is_back_with_what_it_had(tiny, played, algorithm):
    changes = {"upload_every": 1, "rounds": 4, "align_every": 2, "codec": CACHED, "on_client_failure": "drop"}
    config = tiny(algorithm=algorithm, **changes)
    federation, metrics = played(config, Raises(ALGORITHMS[algorithm]))
    assert [line["missing"] for line in metrics] == [[], [1], [], []]
    for client in range(3):
        assert_same_memory(federation, client)
    # Client 1 gets the whole weights in round 2, and differences again after it.
    down = {
        (e.round, e.client): e.bytes
        for t in range(4)
        for e in federation.ledger.entries(t)
        if e.direction == "down" and e.kind == "client model"
    }
    whole = sum(x.numel() * x.element_size() for x in federation.f_server.weights["client"].values())
    assert (1, 1) not in down
    assert down[2, 1] == whole + down[2, 0]
    assert down[3, 1] == down[3, 0] < whole / 2


def test_who_has_missed_a_version_gets_the_whole(tiny, played):
    config = tiny(algorithm="fedavg", codec={"weights": "int8"}, rounds=8, cohort=0.25, clients=4, local_steps=1)
    federation, _ = played(config)
    whole = sum(x.numel() * x.element_size() for part in federation.f_server.weights.values() for x in part.values())
    last: dict[int, int] = {}
    sorts = set()
    for t in range(config.rounds):
        (client,) = draw_cohort(config, t)
        entries = [entry for entry in federation.ledger.entries(t) if entry.direction == "down"]
        if client in last:
            away = t - last[client] - 1
            sorts.add(min(away, 2))
            size = sum(entry.bytes for entry in entries)
            # At the end of the round comes a difference; before it nothing, what one round has changed, or the whole.
            assert size < whole / 3 if away == 0 else size < whole / 1.5 if away == 1 else size > whole
        last[client] = t
    assert sorts == {0, 1, 2}


def test_what_everyone_can_read_goes_to_everyone_in_two_bytes(tiny, played):
    config = tiny(algorithm="fedavg", codec={"weights": "bf16"}, **AWAY)
    federation, _ = played(config)
    weights = federation.f_server.weights["client"]
    trained = federation.setup.settings.trained["client"]
    assert all(torch.equal(x, x.bfloat16().float()) for name, x in weights.items() if name in trained)
    halved = sum(
        x.numel() * (2 if name in federation.setup.settings.trained[part] else x.element_size())
        for part, own in federation.f_server.weights.items()
        for name, x in own.items()
    )
    seen = set(draw_cohort(config, 0))
    for t in range(1, config.rounds):
        for entry in federation.ledger.entries(t):
            if entry.direction == "down" and entry.client in seen:
                assert entry.bytes in (halved, 2 * halved)
        seen |= set(draw_cohort(config, t))


@pytest.mark.parametrize("scope", ["pooled", "client"])
def test_the_s_server_knows_the_auxiliary_that_a_client_has(tiny, played, scope):
    config = tiny(codec={"auxiliary": "int4"}, rounds=3, align_every=2, alignment={"scope": scope})
    federation, _ = played(config)
    for client in range(3):
        has = {
            **below("own/auxiliary/", federation.engine._clients[client]),
            **federation.post.waiting.get(client, {}).get("auxiliary", {}),
        }
        known = federation.engine._server.role.auxiliaries.of(client)
        assert has.keys() == known.keys()
        assert all(torch.equal(has[name], known[name]) for name in known)


def test_differences_come_from_an_auxiliary_that_the_server_knows(tiny):
    with pytest.raises(InputError, match=r"--codec.auxiliary int8 cannot run with --local-auxiliary"):
        check_config(tiny(codec={"auxiliary": "int8"}, local_auxiliary=True))


# Alignment when it is needed


@pytest.mark.parametrize("scope", ["pooled", "client"])
def test_what_never_falls_so_low_is_not_aligned_and_what_always_does_is(tiny, played, scope):
    same = {"rounds": 3, "local_steps": 2, "align_every": 2, "alignment": {"scope": scope}}
    _, never = played(tiny(align_when="drift", align_below=-1.0, **same))
    federation, always = played(tiny(align_when="drift", align_below=1.0, **same))
    assert [line["aligned"] for line in never] == [False] * 3
    assert [line["aligned"] for line in always] == [True, False, True]
    due, lines = played(tiny(**same))
    assert [line["aligned"] for line in lines] == [True, False, True]
    assert federation.ledger.total == due.ledger.total
    for part, tensors in due.weights().items():
        assert all(torch.equal(x, federation.weights()[part][name]) for name, x in tensors.items())


def test_only_auxiliaries_that_have_drifted_are_aligned(tiny, played):
    config = tiny(rounds=1, align_every=1, alignment={"scope": "client"})
    federation, _ = played(config)
    role = federation.engine._server.role
    role.auxiliaries._seen = set()
    measured = dict(zip(range(3), role.auxiliaries.fidelities(range(3), role.weights()), strict=True))
    middle = sorted(found.cosine for found in measured.values())[1]
    role.round = 1
    assert role.drifted(middle, 1) == [client for client, found in measured.items() if found.cosine < middle]
    assert len(role.drifted(middle, 1)) == 1
    assert role.drifted(middle, 2) == []  # they were aligned a round before
    role.auxiliaries._seen = {0, 1, 2}
    assert role.drifted(1.0, 1) == []  # nothing new to judge by


@pytest.mark.parametrize(
    ("options", "aligned"),
    [
        ({"align_below": 1.0, "align_every": 2}, [3, 0, 3, 0]),
        (
            {"align_below": 0.12, "align_every": 1, "cohort": 0.67, "alignment": {"scope": "client", "batch_size": 64}},
            [2, 1, 1, 0],
        ),
    ],
    ids=["pooled", "client"],
)
def test_drift_is_remembered_over_an_interruption(tiny, monkeypatch, options, aligned):
    options = {"align_when": "drift", "rounds": 4, "local_steps": 2, "codec": {"auxiliary": "int8"}, **options}
    whole = run(tiny(**options))
    config = tiny(**options)
    interrupt_after(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    assert_same_run(resume(config.out).directory, whole.directory)
    sent = [row.split(",") for row in (whole.directory / "ledger.csv").read_text().splitlines()]
    rounds = [row[sent[0].index("round")] for row in sent if "auxiliary" in row]
    assert [rounds.count(str(t)) for t in range(4)] == aligned  # auxiliaries that went down


def test_the_cost_of_drift_is_an_upper_bound(tiny, played):
    config = tiny(align_when="drift", align_below=-1.0, rounds=3)
    told = run_cost(config)
    federation, _ = played(config)
    assert told["is_upper_bound"]
    assert told["bytes_total"] > federation.ledger.total


@pytest.mark.parametrize("other", [{"align_at": "start"}, {"align_rounds": [1]}])
def test_drift_is_known_only_when_a_round_ends(tiny, other):
    with pytest.raises(InputError, match="--align-when drift cannot run with"):
        tiny(align_when="drift", **other)
