"""Every algorithm on texts, a tiny GPT-2 with LoRA, against its oracle in float64."""

from dataclasses import replace

import pytest
from safetensors.torch import load_file

from fsl_sage.config import from_dict
from tests.conftest import merge
from tests.oracles import FAMILY, ORACLES
from tests.oracles.models import GPT2Auxiliary, GPT2Client, GPT2Server, text_loss, text_terms
from tests.oracles.subject import compare, given_for, run_of
from tests.texts import save_all

RANK, ALPHA = 4, 32.0
ALGORITHMS = {
    "fedavg": {},
    "splitfed-ms": {},
    "splitfed-ss": {},
    "cse-fsl": {"optimizer": {"auxiliary_weight_decay": 0.0}},
    "fsl-sage": {"alignment": {"start": "previous"}},
}
TOGETHER = {
    "sl": {"hands_on_optimizer": True},
    "cpsl": {"own_reply": True},
    "splitfed-ss": {"joint_step": True},
    "local-loss": {},
    "adaptsfl": {"average_every": 2},
}
OPTIONS = {
    "start server": {"alignment": {"start": "server"}},
    "by client": {"alignment": {"scope": "client", "start": "previous"}},
    "align at start, Adam kept": {"align_at": "start", "alignment": {"optimizer_state": "kept"}},
    "local auxiliary": {"local_auxiliary": True},
}
CHANGES = {
    "rounds": 3,
    "align_every": 2,
    "workers": 1,
    "precision": "float64",
    "cohort": 0.67,
    "lora": {"rank": RANK, "alpha": ALPHA},
    "optimizer": {"schedule": "constant"},
    "alignment": {"steps": 3},
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return save_all(tmp_path_factory.mktemp("texts"))


def check(tiny, texts, algorithm, change, oracle=None):
    config = from_dict(change, tiny(**merge(texts, CHANGES), algorithm=algorithm))
    setup, found, orders = run_of(config)
    base = {
        name: x.double() for name, x in load_file(f"{config.model.name.removeprefix('hf:')}/model.safetensors").items()
    }
    makers = {"client": GPT2Client, "server": GPT2Server, "auxiliary": GPT2Auxiliary}
    parts = {part: (lambda kind=kind: kind(base, RANK, ALPHA)) for part, kind in makers.items()}
    smoothing = 0.1 if config.optimizer.label_smoothing is None else config.optimizer.label_smoothing
    given = given_for(config, setup, orders, parts, text_loss(smoothing), text_terms)
    assert any(len(set(cohort)) < config.clients for cohort in given.cohorts)
    compare(found, (oracle or ORACLES[algorithm])(given))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithm(tiny, texts, algorithm):
    check(tiny, texts, algorithm, ALGORITHMS[algorithm])


@pytest.mark.parametrize("algorithm", TOGETHER)
def test_algorithm_in_turns_or_joint_steps(tiny, texts, algorithm):
    """Both clients of a round are one cluster of CPSL, whose texts are of unequal lengths."""

    def oracle(given):
        name = "splitfed-ss-joint" if algorithm == "splitfed-ss" else algorithm
        return FAMILY[name](replace(given, clusters=[[cohort] for cohort in given.cohorts]))

    check(tiny, texts, algorithm, TOGETHER[algorithm], oracle)


@pytest.mark.parametrize("option", OPTIONS)
def test_option_of_fsl_sage(tiny, texts, option):
    check(tiny, texts, "fsl-sage", OPTIONS[option])


def test_the_oracle_notices_a_missing_loss_mask_in_alignment(tiny, texts, monkeypatch):
    from fsl_sage.alignment.dataset import AlignmentData
    from fsl_sage.wire.message import ACTIVATIONS, LABELS, Message

    add = AlignmentData.add

    def without_mask(self, smashed):
        target = {**smashed.target, "mask": smashed.target["mask"] | True}
        add(self, Message({ACTIVATIONS: smashed.parts[ACTIVATIONS], LABELS: target}, smashed.values))

    monkeypatch.setattr(AlignmentData, "add", without_mask)
    with pytest.raises(AssertionError, match="is off by"):
        check(tiny, texts, "fsl-sage", {})


def test_the_oracle_notices_a_lost_optimizer_state(tiny, texts, monkeypatch):
    from fsl_sage.roles.replica import Replica

    monkeypatch.setattr(Replica, "load_optimizer_state", lambda self, state: None)
    with pytest.raises(AssertionError, match="is off by"):
        check(tiny, texts, "fsl-sage", {})
