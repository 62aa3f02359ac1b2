"""What a role's step takes: against what theory says of a model small enough to do by hand."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fsl_sage.experiment.runs import run
from fsl_sage.models import MODELS, ResNet18
from fsl_sage.models.conv import Conv2d
from fsl_sage.models.flops import FlopCounter
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.roles.footprint import Footprint, Meter

B, PIXELS, CUT, HIDDEN, CLASSES = 15, 32 * 32, 4 * 16 * 16, 8, 10
FLOAT, LABEL = 4, 8


@pytest.fixture
def by_hand(tiny, monkeypatch):
    """Plays two rounds of a model of three layers, the first of them at the client; returns metrics and result."""

    def stack(classes, channels):
        return nn.Sequential(
            nn.Conv2d(channels, 4, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(CUT, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, classes),
        )

    monkeypatch.setitem(MODELS, "stack", stack)

    def play(algorithm, **changes):
        config = tiny(
            algorithm=algorithm, model={"name": "stack", "cut": "1", "auxiliary": "full"}, batch_size=B, **changes
        )
        return run(replace(config, rounds=2))

    return play


def of(line, role):
    """What a line of the metrics says of a role."""
    return tuple(line[f"{role}_{name}"] for name in ("static_bytes", "working_bytes", "step_flops"))


# The weights in bytes, and how many tensors they are in.
CLIENT, BEHIND = (4 * 3 * 9 + 4) * FLOAT, (CUT * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES) * FLOAT
CLIENT_TENSORS, BEHIND_TENSORS = 2, 4


def trained(weights, tensors):
    """Weights, gradients, two moments of Adam, and its counter of steps for each tensor."""
    return weights * 4 + FLOAT * tensors


# What autograd keeps. A convolution keeps its input. ReLU keeps its output, which is what crosses.
CLIENT_GRAPH = FLOAT * B * (3 * PIXELS + CUT)
# Of linear layers the inputs are kept, both of which someone keeps already: z, and ReLU's output. The loss keeps the
# logarithms, the labels and their number.
LOSS = FLOAT * B * CLASSES + LABEL * B + FLOAT
BEHIND_GRAPH = FLOAT * B * HIDDEN + LOSS

# A multiplication and an addition for each weight that meets a number, in each pass that computes it.
CONVOLUTION, FIRST, LAST = 2 * B * 27 * CUT, 2 * B * CUT * HIDDEN, 2 * B * HIDDEN * CLASSES


def test_the_client_of_fsl_sage_holds_an_auxiliary_that_it_does_not_train(by_hand):
    line = by_hand("fsl-sage").metrics[0]
    # Forward, and backward: the convolution's weights; of the auxiliary only the inputs of its layers get gradients.
    flops = 2 * CONVOLUTION + 2 * FIRST + 2 * LAST
    assert of(line, "client") == (trained(CLIENT, CLIENT_TENSORS) + BEHIND, CLIENT_GRAPH + BEHIND_GRAPH, flops)
    # The server computes no cut gradient, but it keeps z for its first layer's weights.
    assert of(line, "server") == (
        trained(BEHIND, BEHIND_TENSORS),
        FLOAT * B * CUT + BEHIND_GRAPH,
        2 * FIRST + 3 * LAST,
    )


def test_the_client_of_cse_fsl_trains_its_auxiliary(by_hand):
    line = by_hand("cse-fsl").metrics[0]
    static = trained(CLIENT, CLIENT_TENSORS) + trained(BEHIND, BEHIND_TENSORS)
    assert of(line, "client") == (static, CLIENT_GRAPH + BEHIND_GRAPH, 2 * CONVOLUTION + 3 * (FIRST + LAST))


def test_the_client_of_fedavg_has_the_whole_model_and_there_is_no_server(by_hand):
    line = by_hand("fedavg").metrics[0]
    static = trained(CLIENT + BEHIND, CLIENT_TENSORS + BEHIND_TENSORS)
    assert of(line, "client") == (static, CLIENT_GRAPH + BEHIND_GRAPH, 2 * CONVOLUTION + 3 * (FIRST + LAST))
    assert "server_static_bytes" not in line


def test_the_client_of_splitfed_keeps_its_graph_while_it_waits(by_hand):
    line = by_hand("splitfed-ss").metrics[0]
    assert of(line, "client") == (trained(CLIENT, CLIENT_TENSORS), CLIENT_GRAPH, 2 * CONVOLUTION)
    server = trained(BEHIND, BEHIND_TENSORS), FLOAT * B * CUT + BEHIND_GRAPH, 3 * (FIRST + LAST)
    assert of(line, "server") == server


def test_splitfed_ms_has_a_server_side_model_for_each_client(by_hand):
    result = by_hand("splitfed-ms")
    copies = result.config.clients
    # The model that they are averaged into is not trained itself; gradients there are of one copy at a time.
    static = BEHIND + copies * (3 * BEHIND + FLOAT * BEHIND_TENSORS) + BEHIND
    assert of(result.metrics[0], "server")[0] == static


def test_the_client_of_heron_sfl_needs_a_pass_that_is_alive_and_two_vectors_as_long_as_its_weights(by_hand):
    """It keeps nothing for a backward pass. But its second pass needs the direction, the weights as they were, and z.

    The pass itself needs at most the convolution's output and that of ReLU.
    """
    line = by_hand("heron-sfl").metrics[0]
    batch = FLOAT * B * 3 * PIXELS + LABEL * B
    z = FLOAT * B * CUT
    loss = FLOAT  # the first one
    working = batch + loss + z + 2 * (CLIENT + BEHIND) + 2 * z
    assert of(line, "client") == (CLIENT + BEHIND, working, 2 * (CONVOLUTION + FIRST + LAST))


def test_a_client_that_trains_by_sgd_has_no_moments(by_hand):
    line = by_hand("splitfed-ss", optimizer={"name": "sgd", "lr": 0.01, "momentum": 0.0}).metrics[0]
    assert of(line, "client")[0] == 2 * CLIENT


def test_it_is_measured_once_and_is_in_the_result(by_hand):
    result = by_hand("fsl-sage")
    names = {f"{role}_{name}" for role in ("client", "server") for name in Footprint.__dataclass_fields__}
    assert names <= result.metrics[0].keys()
    assert not names & result.metrics[1].keys()
    written = RunDirectory(result.directory).result()
    assert {name: written[name] for name in names} == {name: result.metrics[0][name] for name in names}


@pytest.mark.parametrize("algorithm", ["fsl-sage", "splitfed-ss", "locfedmix-sl", "fedgkt"])
def test_it_changes_no_bit_of_the_run(tiny, monkeypatch, algorithm):
    measured = run(tiny(algorithm=algorithm, workers=2))
    monkeypatch.setattr(Meter, "begin", lambda self, held: None)
    plain = run(tiny(algorithm=algorithm))
    assert measured.metrics[0]["client_working_bytes"] > 0
    assert "client_working_bytes" not in plain.metrics[0]
    assert measured.model_file.read_bytes() == plain.model_file.read_bytes()


def test_a_fast_convolution_counts_as_the_direct_one(monkeypatch):
    def flops():
        torch.manual_seed(0)
        model = ResNet18()
        inputs = torch.randn(64, 3, 32, 32, requires_grad=True)
        with FlopCounter() as counter:
            model(inputs).square().mean().backward()
        return counter.flops

    fast = flops()
    monkeypatch.setattr(Conv2d, "_pays", lambda self, x: False)
    assert fast == flops()


def test_nothing_is_counted_outside_of_a_step():
    meter = Meter()
    weight = torch.randn(3, 3, requires_grad=True)
    with meter.watching():
        (weight @ weight).sum().backward()
        meter.begin([weight])
        product = weight @ weight
    (weight @ weight).sum().backward()
    with meter.watching():
        product.sum().backward()
        meter.end()
        (weight @ weight).sum().backward()
    assert meter.is_done
    assert (meter.flops, meter.working_bytes) == (3 * 2 * 27, 0)
