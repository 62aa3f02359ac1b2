"""Averages and corrections that combine with any algorithm: their laws, their bytes, their states, what is refused."""

import json

import pytest
import torch

from fsl_sage import ALGORITHMS
from fsl_sage.cli import main
from fsl_sage.cli.arguments import RunArguments
from fsl_sage.cli.parsing import parse
from fsl_sage.compare.grid import make_grid, plan_runs
from fsl_sage.config import AveragingConfig, Config, digest, from_dict, load_preset
from fsl_sage.engines.dry import DryEngine
from fsl_sage.engines.local import LocalEngine
from fsl_sage.errors import InputError, RunWarning
from fsl_sage.experiment import Federation, cost, resume, run, run_cost
from fsl_sage.experiment.federation import draw_cohort
from fsl_sage.experiment.setup import make_dry_setup, make_setup
from fsl_sage.records.files import load_tensors
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.report.options import written_options
from fsl_sage.roles.averaging import RULES
from fsl_sage.roles.f_server import FServer
from fsl_sage.roles.protocols import Update
from fsl_sage.wire.paths import below
from tests.engines.faulty import Fault

from ..test_experiment import assert_same_run, interrupt_after

SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.0}
SKEWED = {"partition": "dirichlet", "alpha": 0.5}
EVERYTHING = {
    "optimizer": SGD,
    "averaging": {"control_variates": True, "proximal": 0.1, "optimizer": "yogi", "weighting": "uniform"},
}


def played(config, rounds=None):
    """The roles after the run's rounds."""
    setup = make_setup(config)
    federation = Federation(setup, LocalEngine(setup))
    for t in range(rounds or config.rounds):
        federation.play_round(t, draw_cohort(config, t))
    federation.engine.close()
    return federation


def ledgers_of(federation, rounds):
    return [federation.ledger.entries(t) for t in range(-1, rounds)]


def assert_same_weights(a, b):
    first, second = a.weights(), b.weights()
    assert first.keys() == second.keys()
    for part, tensors in first.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, second[part][name]), f"{part} {name}"


# Laws


@pytest.mark.parametrize("algorithm", ["fsl-sage", "splitfed-ms", "fedavg"])
def test_without_a_pull_and_with_the_plain_step_it_is_the_algorithm_itself(tiny, algorithm):
    averaging = {"proximal": 0.0, "optimizer": "sgd", "lr": 1.0, "momentum": 0.0}
    assert_same_weights(played(tiny(algorithm=algorithm)), played(tiny(algorithm=algorithm, averaging=averaging)))


@pytest.mark.parametrize(
    ("name", "averaging"),
    [
        ("fedprox", {"proximal": 0.01}),
        ("fedadam", {"optimizer": "adam", "lr": 0.01}),
        ("fedyogi", {"optimizer": "yogi", "lr": 0.01}),
        ("scaffold", {"control_variates": True}),
    ],
)
def test_names_are_fedavg_with_an_option(tiny, name, averaging):
    named = played(tiny(algorithm=name, optimizer=SGD))
    spelled = played(tiny(algorithm="fedavg", optimizer=SGD, averaging=averaging))
    assert_same_weights(named, spelled)
    assert ledgers_of(named, 2) == ledgers_of(spelled, 2)
    plain = played(tiny(algorithm="fedavg", optimizer=SGD)).weights()["client"]
    assert any(not torch.equal(x, plain[n]) for n, x in named.weights()["client"].items())


def test_a_name_takes_what_is_given():
    assert make_setup_of("fedprox", {"proximal": 0.5}).averaging.proximal == 0.5
    assert make_setup_of("fedprox", {"proximal": 0.0}).averaging.proximal == 0
    assert make_setup_of("fedadam", {"lr": 0.3}).averaging.rate == 0.3


def make_setup_of(algorithm, averaging):
    return make_dry_setup(from_dict({"algorithm": algorithm, "averaging": averaging})).algorithm


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_scaffold_of_one_client_is_fedavg_bit_for_bit(tiny, momentum):
    """c and c_1 are the same numbers, so what is added is 0."""
    same = {"clients": 1, "rounds": 3, "optimizer": {**SGD, "momentum": momentum}}
    assert_same_weights(played(tiny(algorithm="scaffold", **same)), played(tiny(algorithm="fedavg", **same)))


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("scaffold", {}),
        ("scaffold", {"cohort": 0.67, "rounds": 4}),
        ("fsl-sage", {"averaging": {"weighting": "uniform"}}),
    ],
)
def test_c_is_the_mean_of_the_c_i_of_all_clients(tiny, algorithm, changes):
    """Whatever the weighting, and whoever was away."""
    averaging = {"control_variates": True, **changes.get("averaging", {})}
    base = {"algorithm": algorithm, "data": SKEWED, "precision": "float64", "optimizer": SGD, "rounds": 3}
    federation = played(tiny(**{**base, **changes, "averaging": averaging}))
    own = [below("extra/control/", state) for state in federation.engine._clients.values()]
    for path, c in federation.f_server.sends["control"].items():
        mean = sum(each[path] for each in own) / 3
        assert float((c - mean).abs().max()) <= 1e-14 * max(1.0, float(mean.abs().max()))
        assert float(c.abs().max()) > 0
    trained = federation.f_server._trained
    assert federation.f_server.sends["control"].keys() == trained, "buffers have no controls"


def test_a_client_that_fails_moves_no_control(tiny, monkeypatch):
    class Fails(Fault):
        def strike(self, client):
            raise AssertionError

        def __call__(self, config):
            algorithm = self.algorithm(config)
            on_update = algorithm.on_update

            def fail(client, t):
                if client.id == 1 and t == 1:
                    raise ValueError("the disk is full")
                return on_update(client, t)

            algorithm.on_update = fail
            return algorithm

    monkeypatch.setitem(ALGORITHMS, "scaffold", Fails(ALGORITHMS["scaffold"]))
    config = tiny(
        algorithm="scaffold", rounds=2, optimizer=SGD, precision="float64", on_client_failure="drop", workers=1
    )
    setup = make_setup(config)
    federation = Federation(setup, LocalEngine(setup))
    federation.play_round(0, [0, 1, 2])
    before = below("extra/control/", federation.engine._clients[1])
    assert federation.play_round(1, [0, 1, 2])["missing"] == [1]
    federation.engine.close()
    own = [below("extra/control/", federation.engine._clients[client]) for client in range(3)]
    for path, c in federation.f_server.sends["control"].items():
        assert torch.equal(own[1][path], before[path])
        assert torch.allclose(c, sum(each[path] for each in own) / 3, rtol=0, atol=1e-14)


def test_a_control_is_the_mean_gradient_by_the_learning_rates_that_were_used(tiny):
    """Of one client without momentum and decay: x - x_1 = (sum of lr) c_1, also with a learning rate that falls."""
    schedule = {**SGD, "weight_decay": 0.0, "schedule": "cosine"}
    config = tiny(algorithm="scaffold", clients=1, rounds=2, optimizer=schedule, precision="float64")
    setup = make_setup(config)
    federation = Federation(setup, LocalEngine(setup))
    lr = setup.settings.client_schedule()
    assert lr(0, 0) > lr(0, 5) > lr(1, 5)
    for t in range(2):
        x = dict(federation.f_server.weights)
        federation.play_round(t, [0])
        used = sum(lr(t, k) for k in range(setup.settings.steps))
        for path, own in below("extra/control/", federation.engine._clients[0]).items():
            part, name = path.split("/", 1)
            assert torch.allclose(x[part][name] - federation.f_server.weights[part][name], used * own, atol=1e-12)
    federation.engine.close()


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_controls_move_the_weights_beside_the_momentum(tiny, momentum):
    """With one local step a round c_i+ = c_i - c + (x - x_i) / lr is then the momentum itself, without c and c_i."""
    config = tiny(
        algorithm="scaffold",
        rounds=3,
        local_steps=1,
        precision="float64",
        data=SKEWED,
        optimizer={**SGD, "momentum": momentum, "weight_decay": 0.01},
    )
    for state in played(config).engine._clients.values():
        for path, own in below("extra/control/", state).items():
            buffer = state[f"optimizer/{path}/momentum_buffer"]
            assert torch.allclose(own, buffer, rtol=0, atol=1e-12 * max(1.0, float(buffer.abs().max())))


# Rules that survive poisoned updates


@pytest.mark.parametrize("rule", ["trimmed-mean", "median"])
def test_splitfed_ms_is_fedavg_by_these_rules_too(tiny, rule):
    """The copies of the server-side model are averaged as the F-server averages the full model."""
    same = {"averaging": {"rule": rule}, "data": SKEWED, "clients": 4}
    own, full = played(tiny(algorithm="splitfed-ms", **same)), played(tiny(algorithm="fedavg", **same))
    assert_same_weights(own, full)
    mean = played(tiny(algorithm="fedavg", data=SKEWED, clients=4)).weights()["server"]
    assert any(not torch.equal(x, mean[n]) for n, x in own.weights()["server"].items())


def f_server(rule, clients=4):
    initial = {"client": {"w": torch.zeros(2)}, "server": {"v": torch.zeros(2)}}
    trained = {part: frozenset(tensors) for part, tensors in initial.items()}
    return FServer(initial, ("client", "server"), trained, [1.0] * clients, AveragingConfig(rule=rule))


@pytest.mark.parametrize("rule", RULES)
def test_the_f_server_averages_by_the_rule(rule):
    numbers = [1.0, 2.0, 4.0, 100.0]
    updates = [Update(n, {"client": {"w": torch.full((2,), x)}}) for n, x in enumerate(numbers)]
    expected = {"mean": 26.75, "clipped": (1 + 2 + 3 + 3) / 4, "trimmed-mean": 3.0, "median": 3.0}[rule]
    assert f_server(rule).mean(updates)["client"]["w"].tolist() == pytest.approx([expected] * 2)


def test_a_client_is_clipped_by_the_norm_of_its_whole_change():
    """Not part by part: a client whose server part went far is scaled down in its client part too."""
    changes = [(1.0, 0.0), (1.0, 0.0), (1.0, 7.0)]
    updates = [
        Update(n, {"client": {"w": torch.tensor([a, 0.0])}, "server": {"v": torch.tensor([b, 0.0])}})
        for n, (a, b) in enumerate(changes)
    ]
    found = f_server("clipped", 3).mean(updates)
    share = 1 / 50**0.5
    assert found["client"]["w"][0].item() == pytest.approx((2 + share) / 3)
    assert found["server"]["v"][0].item() == pytest.approx(7 * share / 3)


def test_a_warm_start_is_clipped_and_stepped_too(tiny):
    """Its auxiliaries are averaged once, though the F-server held none before."""
    clipped = tiny(algorithm="fsl-sage", warm_start=True, averaging={"rule": "clipped", "optimizer": "yogi"})
    assert set(played(clipped).weights()) == {"client", "auxiliary", "server"}


# Bytes, states


@pytest.mark.parametrize("algorithm", ["fedavg", "fsl-sage"])
def test_bytes_are_those_of_a_dry_run(tiny, algorithm):
    config = tiny(algorithm=algorithm, rounds=3, cohort=0.67, **EVERYTHING)
    federation = played(config)
    setup = make_dry_setup(config)
    dry = Federation(setup, DryEngine(setup))
    for t in range(3):
        dry.play_round(t, draw_cohort(config, t))
    assert ledgers_of(dry, 3) == ledgers_of(federation, 3)
    assert run_cost(config)["bytes_total"] == federation.ledger.total


@pytest.mark.parametrize("rule", RULES)
def test_the_other_options_cost_nothing(tiny, rule):
    changes = {"rule": rule, "optimizer": "adam", "proximal": 0.1}
    assert run_cost(tiny(averaging=changes)) == run_cost(tiny())


def test_costs_list_the_names(tiny):
    costs = cost(tiny(), algorithms=["fedavg", "fedprox", "fedadam", "fedyogi", "scaffold"])
    assert costs["fedprox"] == costs["fedadam"] == costs["fedyogi"] == costs["fedavg"]
    kinds = costs["scaffold"]["by_kind"]
    assert kinds["full model"] == costs["fedavg"]["by_kind"]["full model"]
    model = make_dry_setup(tiny(algorithm="scaffold")).modules
    trained = sum(p.numel() * 4 for part in ("client", "server") for p in model[part].parameters())
    assert kinds["control"] == {"up": 3 * trained, "down": 3 * trained}
    assert costs["scaffold"]["bytes_first_download"] == costs["fedavg"]["bytes_first_download"]


@pytest.mark.parametrize("algorithm", ["fedavg", "fsl-sage"])
def test_states_are_resumed(tiny, monkeypatch, algorithm):
    changes = {"algorithm": algorithm, "rounds": 4, "cohort": 0.67, "keep_checkpoint": True, **EVERYTHING}
    whole = run(tiny(**changes)).directory
    config = tiny(**changes)
    interrupt_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    resume(config.out)
    assert_same_run(whole, config.out)
    kept, other = (load_tensors(path / "checkpoint.safetensors")[0] for path in (config.out, whole))
    assert kept.keys() == other.keys()
    assert all(torch.equal(kept[path], other[path]) for path in kept)
    assert any(path.startswith("f_server/extra/optimizer/v/client/") for path in kept)
    assert any(path.startswith("f_server/extra/control/client/") for path in kept)
    assert any(path.startswith("engine/clients/0/extra/control/client/") for path in kept)


# What is refused


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"algorithm": "scaffold"}, "Control variates cannot run with --optimizer.name adam: .* --optimizer.name sgd"),
        ({"averaging": {"control_variates": True}}, "Control variates cannot run with --optimizer.name adam"),
        (
            {"averaging": {"control_variates": True, "rule": "median"}, "optimizer": SGD},
            "cannot run with --averaging.rule median: the mean of the controls",
        ),
        (
            {"algorithm": "fedadam", "averaging": {"optimizer": "yogi"}},
            "fedadam is FedAvg with --averaging.optimizer adam: with yogi give --algorithm fedavg",
        ),
        ({"averaging": {"proximal": -0.1}}, "--averaging.proximal -0.1 is not possible: give a number from 0 up"),
        ({"averaging": {"lr": 0.0}}, "--averaging.lr 0 is not possible: give a number above 0"),
        ({"averaging": {"tau": 0.0}}, "--averaging.tau 0 is not possible: give a number above 0"),
        ({"averaging": {"beta2": 1.0}}, "--averaging.beta2 1 is not possible: give a number from 0 to below 1"),
        ({"averaging": {"rule": "krum"}}, "--averaging.rule 'krum' is not possible: give mean, clipped, trimmed-mean"),
        ({"weighting": "uniform", "averaging": {"weighting": "examples"}}, "'weighting' is an older spelling"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(tiny, changes, reason):
    with pytest.raises(InputError, match=reason):
        run(tiny(**changes))


def test_a_comparison_refuses_before_anything_runs():
    with pytest.raises(InputError, match="Control variates cannot run with"):
        plan_runs(Config(), make_grid(["fedavg", "scaffold"]))
    sgd = from_dict({"optimizer": SGD})
    plans = plan_runs(sgd, make_grid(["fedavg", "scaffold"], vary={"averaging.proximal": (0, 0.1)}))
    assert [plan.config.averaging.proximal for plan in plans] == [0, 0, 0.1, 0.1]


def test_momentum_runs_with_a_remark(tiny):
    with pytest.warns(RunWarning, match="Control variates with --optimizer.momentum 0.9: .* up to 10 times"):
        run(tiny(algorithm="scaffold", rounds=1, optimizer={**SGD, "momentum": 0.9}))


# The older spelling


@pytest.mark.parametrize("words", [["--weighting", "uniform"], ["--weighting=uniform"]])
def test_weighting_is_a_spelling_on_the_command_line(words):
    assert parse(RunArguments, "run", words).config.averaging.weighting == "uniform"
    assert parse(RunArguments, "run", ["--averaging.weighting", "uniform"]).config.averaging.weighting == "uniform"


def test_weighting_is_a_spelling_in_toml_and_in_a_comparison(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('weighting = "uniform"\n')
    assert load_preset(file).averaging.weighting == "uniform"
    plans = plan_runs(Config(), make_grid(vary={"weighting": ("examples", "uniform")}))
    assert [plan.config.averaging.weighting for plan in plans] == ["examples", "uniform"]


def test_a_run_that_was_written_with_the_older_spelling_goes_on(tiny, monkeypatch):
    config = tiny(weighting="uniform", rounds=2)
    interrupt_after(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    file = RunDirectory(config.out).config_file
    written = json.loads(file.read_text())
    written["config"]["weighting"] = written["config"]["averaging"]["weighting"]
    del written["config"]["averaging"]
    file.write_text(json.dumps(written))
    assert resume(config.out).config.averaging.weighting == "uniform"
    assert written_options(written["config"])["averaging.weighting"] == "uniform"
    assert "weighting" not in written_options(written["config"])


def test_the_digest_of_a_run_is_as_it_was_before_the_group():
    """As recorded by an earlier version, so that its checkpoints are taken."""
    assert digest(from_dict({"weighting": "uniform"})) == "33305129178db4f2"
    assert digest(Config()) == "44136fa355b3678a"


def test_the_command_line_refuses_before_it_writes(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["run", "--algorithm", "scaffold", "--model.name", "small-cnn", "--out", str(tmp_path / "run")])
    assert stop.value.code == 2
    assert "--optimizer.name sgd" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()
