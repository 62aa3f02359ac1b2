"""What `cuts` says that a step takes, against what a run measures."""

import json
from dataclasses import asdict, replace

import pytest

from fsl_sage.algorithms import resolve
from fsl_sage.algorithms.fsl_sage import FSLSAGEOptions
from fsl_sage.config import Config, DataConfig, ModelConfig, OptimizerConfig
from fsl_sage.experiment.cuts import Limits, cuts_of
from fsl_sage.experiment.planning import Planner
from fsl_sage.experiment.role_plan import plan_of
from fsl_sage.experiment.runs import run
from fsl_sage.models import usual_auxiliary
from fsl_sage.models.small_cnn import SmallCNN
from fsl_sage.problems.make import make_dry_problem
from fsl_sage.problems.parts import META, build_model
from fsl_sage.split import Analysis, AuxiliaryStates
from tests.conftest import merge
from tests.texts import WORDS, save_all, save_model, save_tokenizer

BATCH = 16


def config_of(model, algorithm, **changes):
    data = DataConfig(name="cifar10-mini", train_images=2 * BATCH, test_images=10)
    never = FSLSAGEOptions(align_rounds=(1,)) if algorithm == "fsl-sage" else None  # an alignment is in no step
    plain = Config(algorithm=algorithm, options=never, model=ModelConfig(name=model), data=data, **changes)
    return resolve(replace(plain, clients=2, rounds=1, batch_size=BATCH, workers=1))


@pytest.fixture(scope="module")
def analysed():
    """By name, a model's problem, its analysis and its auxiliaries: the same for all algorithms."""
    known = {}

    def make(name):
        if name not in known:
            config = config_of(name, "fsl-sage")
            problem = make_dry_problem(config)
            model = build_model(config, problem, META)
            analysis = Analysis(model, problem.largest_example(BATCH, META))
            known[name] = problem, analysis, AuxiliaryStates(analysis, usual_auxiliary(model))
        return known[name]

    return make


@pytest.fixture
def both(analysed, tmp_path):
    """Plans and measures; returns for each figure of a role (planned, measured)."""

    def compare(model, algorithm, cut, **changes):
        config = config_of(model, algorithm, **changes)
        problem, analysis, auxiliaries = analysed(model)
        planned = Planner(config, problem, analysis, auxiliaries).at(plan_of(config, problem, cut), cut)
        config = replace(config, model=replace(config.model, cut=cut), out=str(tmp_path / "run"))
        line = run(config).metrics[0]
        return {
            f"{role}_{name}": (value, line[f"{role}_{name}"])
            for role, step in planned.items()
            for name, value in asdict(step).items()
        }

    return compare


def assert_close(pairs, rel):
    assert {"client_static_bytes", "client_working_bytes", "client_step_flops"} <= pairs.keys()
    for name, (planned, measured) in pairs.items():
        assert planned == pytest.approx(measured, rel=rel), name


@pytest.mark.parametrize(
    ("algorithm", "cut"),
    [
        ("fsl-sage", "layer2"),
        ("fsl-sage", "layer3.0.conv2"),
        ("cse-fsl", "layer2"),
        ("fedavg", "layer2"),
        ("splitfed-ss", "layer1.1.bn1"),
        ("heron-sfl", "layer2"),
    ],
)
def test_the_plan_of_resnet18_is_what_a_run_measures(both, algorithm, cut):
    assert_close(both("resnet18", algorithm, cut), rel=0.1)


@pytest.mark.parametrize(
    "algorithm",
    ["fsl-sage", "cse-fsl", "splitfed-ms", "sl", "cpsl", "adaptsfl", "local-loss", "heron-sfl", "fedgkt", "fedprox"],
)
def test_every_algorithm_is_planned_by_its_own_code(both, algorithm):
    assert_close(both("small-cnn", algorithm, "block2"), rel=0.01)


@pytest.mark.parametrize("options", [{}, {"hold": 0.1}], ids=["free", "held"])
@pytest.mark.parametrize("auxiliary", ["ridge", "ridge:30"])
def test_a_ridge_and_a_hold_are_planned(auxiliary, options, tmp_path):
    own = FSLSAGEOptions(align_rounds=(1,), **options)
    config = replace(config_of("small-cnn", "fsl-sage"), options=own, out=str(tmp_path / "run"))
    config = replace(config, model=ModelConfig(name="small-cnn", auxiliary=auxiliary, cut="block2"))
    (row,) = [row for row in cuts_of(config) if row.point.name == "block2"]
    line = run(config).metrics[0]
    assert asdict(row.client) == {name: line[f"client_{name}"] for name in asdict(row.client)}


def test_other_optimizers_remember_other_things(both):
    sgd = replace(Config().optimizer, name="sgd", lr=0.01, momentum=0.9)
    assert_close(both("small-cnn", "cse-fsl", "block1", optimizer=sgd), rel=0.01)


@pytest.mark.slow
def test_what_does_not_fit_with_an_auxiliary_is_told():
    """The part of ResNet-18 up to layer2 fits 50 MB with a batch of 32; with the auxiliary it does not."""
    table = cuts_of(replace(config_of("resnet18", "fsl-sage"), batch_size=32))
    (row,) = [row for row in table if row.point.name == "layer2"]
    assert row.point.client_memory < 50e6 < row.client.memory < 51e6
    assert row.obstacles(Limits(client_memory=50e6)) == ["memory"]


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """GPT-2 in small, with dropout as it comes, and texts of one length, a third of each a prompt."""
    directory, prompt = tmp_path_factory.mktemp("language"), 15
    words = WORDS.split()
    drops = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    save_model(directory / "gpt2", "gpt2", 2000, **drops, n_embd=64, n_head=4)
    save_tokenizer(directory / "gpt2")
    texts = directory / "texts"
    texts.mkdir()
    for file, count in (("train", 16), ("test", 4)):
        rows = ([words[2 + (place * row) % (len(words) - 2)] for place in range(47)] for row in range(1, count + 1))
        lines = [{"prompt": " ".join(row[:prompt]), "completion": " ".join(row[prompt:])} for row in rows]
        (texts / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = DataConfig(name=f"jsonl:{texts}", sequence_length=100)
    return Config(
        clients=2,
        rounds=1,
        batch_size=8,
        workers=1,
        data=data,
        model=ModelConfig(name=f"hf:{directory / 'gpt2'}", cut="transformer.h.0"),
        optimizer=OptimizerConfig("adamw", lr=1e-3),
    )


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fsl-sage", "cse-fsl", "splitfed-ss", "fedavg", "heron-sfl"])
def test_the_plan_of_a_language_model_with_adapters_is_what_a_run_measures(language, tmp_path, algorithm):
    """Also where a client's pass through the auxiliary has no dropout, and only completions are decoded."""
    never = FSLSAGEOptions(align_rounds=(1,)) if algorithm == "fsl-sage" else None
    config = resolve(replace(language, algorithm=algorithm, options=never, out=str(tmp_path / "run")))
    (row,) = [row for row in cuts_of(config) if row.point.name == config.model.cut]
    line = run(config).metrics[0]
    steps = {"client": row.client, "server": row.server}
    assert_close(
        {
            f"{role}_{name}": (value, line[f"{role}_{name}"])
            for role, step in steps.items()
            if step is not None
            for name, value in asdict(step).items()
        },
        rel=0.05,
    )


@pytest.mark.slow
def test_the_plan_of_a_step_on_texts_is_an_upper_bound(tiny, tmp_path):
    config = tiny(**merge(save_all(tmp_path), {"algorithm": "fsl-sage", "rounds": 1, "align_rounds": [1]}))
    (row,) = [row for row in cuts_of(config) if row.point.name == "transformer.h.0"]
    line = run(config).metrics[0]
    for role, step in (("client", row.client), ("server", row.server)):
        assert step.static_bytes == line[f"{role}_static_bytes"]
        assert step.working_bytes > line[f"{role}_working_bytes"]


@pytest.mark.parametrize(("algorithm", "copies"), [("fedavg", 0), ("fedprox", 1), ("scaffold", 3)])
def test_a_client_holds_what_its_corrections_need(both, algorithm, copies):
    """FedProx: the weights that came down; SCAFFOLD: these, c and c_i."""
    sgd = replace(Config().optimizer, name="sgd", lr=0.01, momentum=0.0)
    found = both("small-cnn", algorithm, "block2", optimizer=sgd)
    assert_close(found, rel=0.01)
    module = SmallCNN()
    weights = sum(parameter.nbytes for parameter in module.parameters())
    buffers = sum(buffer.nbytes for buffer in module.buffers())
    own, gradients = weights + buffers, weights
    assert found["client_static_bytes"] == (own + gradients + copies * weights,) * 2
