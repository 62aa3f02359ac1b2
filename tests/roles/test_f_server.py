import pytest
import torch

from fsl_sage.config import AveragingConfig
from fsl_sage.engines.local import LocalEngine
from fsl_sage.experiment import run
from fsl_sage.roles.f_server import FServer
from fsl_sage.roles.protocols import Update
from fsl_sage.wire.message import CONTROL, OPTIMIZER_STATE
from fsl_sage.wire.paths import flat


def update(client):
    draw = torch.Generator().manual_seed(client)
    w, m, c = torch.randn(3, 50, generator=draw)
    remembered = {"client/w/exp_avg": m, "client/w/step": torch.tensor(float(client % 3))}
    return Update(client, {"client": {"w": w}}, extra={OPTIMIZER_STATE: remembered, CONTROL: {"client/w": c}})


def test_what_comes_with_updates_is_summed_as_it_comes_to_the_same_bits():
    """The oracle is the mean as it is written on paper, of all at once; two rounds, so that sums do not leak."""
    weights, options = [3.0, 7.0, 11.0, 0.3], AveragingConfig(control_variates=True)
    start = {"client": {"w": torch.zeros(50)}}
    servers = [FServer(start, ["client"], {"client": frozenset("w")}, weights, options) for _ in range(2)]
    for first in (0, 4):
        updates = [update(client) for client in range(first, first + 4)]
        updates = [Update(client, each.parts, extra=each.extra) for client, each in enumerate(updates)]
        for server, comes in zip(servers, (True, False), strict=True):
            brought = updates
            if comes:
                server.expect(range(4))
                brought = [server.fold(each) for each in updates]
                assert all(x.is_meta for each in brought for x in flat({**each.parts, **each.extra}).values())
            server.take(server.mean(brought), brought)
        one, other = (server.state() for server in servers)
        assert list(one) == list(other)
        assert all(torch.equal(tensor, other[path]) for path, tensor in one.items())
        moments = [each.extra[OPTIMIZER_STATE]["client/w/exp_avg"].double() for each in updates]
        mean = sum(m * (w / sum(weights)) for m, w in zip(moments, weights, strict=True))
        torch.testing.assert_close(one[f"sends/{OPTIMIZER_STATE}/client/w/exp_avg"], mean.float())
        assert one[f"sends/{OPTIMIZER_STATE}/client/w/step"] == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "fedavg", "client_optimizer": "average"},
        {"algorithm": "scaffold", "client_optimizer": "reset", "optimizer": {"name": "sgd", "momentum": 0.0}},
    ],
    ids=lambda changes: changes["algorithm"],
)
def test_no_updates_extras_stay_in_memory(tiny, monkeypatch, changes):
    train, kept = LocalEngine.train, []

    def looked_at(self, *given):
        updates = train(self, *given)
        kept.extend(x for each in updates for own in (each.parts, each.extra) for x in flat(own).values())
        return updates

    monkeypatch.setattr(LocalEngine, "train", looked_at)
    run(tiny(rounds=1, **changes))
    assert kept
    assert all(x.is_meta for x in kept)
