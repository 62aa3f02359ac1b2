"""The dry engine runs an algorithm's own code on shapes; what it bills is what a run bills."""

import pytest

from fsl_sage import ALGORITHMS, Algorithm, CutGradients, Smashed
from fsl_sage.engines.dry import DryEngine
from fsl_sage.engines.local import LocalEngine
from fsl_sage.experiment import Federation
from fsl_sage.experiment.setup import make_dry_setup, make_setup


class Joint(Algorithm):
    """The S-server answers a step only when it has the uploads of more than one client."""

    waits = True

    def local_round(self, client, t):
        for batch in client.batches(t):
            z = client.forward(batch)
            reply = yield Smashed(z, batch.target)
            if reply is not None:
                client.backward(z, reply.cut_gradients)
            client.step()

    def on_uploads(self, server, uploads):
        gradients = {id: server.learn(id, upload, cut_gradient=True) for id, upload in uploads.items()}
        return {id: CutGradients(z) if len(uploads) > 1 else None for id, z in gradients.items()}


class InTurn(Joint):
    """Clients in turn, each handing its part on to the next."""

    def on_uploads(self, server, uploads):
        return {id: CutGradients(server.learn(id, upload, cut_gradient=True)) for id, upload in uploads.items()}

    def turns(self, t, cohort, steps):
        return [[client] for client in cohort]


def ledger_of(setup, engine, cohorts):
    federation = Federation(setup, engine(setup))
    for t, cohort in enumerate(cohorts):
        federation.play_round(t, cohort)
    federation.engine.close()
    return [federation.ledger.entries(t) for t in range(-1, len(cohorts))]


@pytest.mark.parametrize("kind", [Joint, InTurn])
def test_algorithms_that_join_clients_or_take_turns_cost_what_they_send(tiny, monkeypatch, kind):
    monkeypatch.setitem(ALGORITHMS, "own", kind)
    config = tiny(algorithm="own", on_client_failure="stop")
    cohorts = [[0, 1, 2], [0, 1, 2], [2], [0, 1]]
    dry = ledger_of(make_dry_setup(config), DryEngine, cohorts)
    assert dry == ledger_of(make_setup(config), LocalEngine, cohorts)
    replies = [sum(entry.kind == "cut gradients" for entry in entries) for entries in dry]
    assert replies == ([0, 3, 3, 0, 2] if kind is Joint else [0, 3, 3, 1, 2])


def test_a_turn_is_one_transfer_up_and_one_down(tiny, monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "own", InTurn)
    config = tiny(algorithm="own")
    setup = make_dry_setup(config)
    for entries in ledger_of(setup, DryEngine, [[0, 1, 2]] * 3)[1:]:
        models = [(entry.client, entry.direction, entry.bytes) for entry in entries if entry.kind == "client model"]
        size = models[0][2]
        assert sorted(models) == sorted((client, way, size) for client in range(3) for way in ("up", "down"))
