"""The presets of experiments/: every experiment of the paper, and the same questions scaled to a CPU."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from fsl_sage.compare.dry import costs_of_runs
from fsl_sage.compare.grid import load_grid, plan_runs
from fsl_sage.config import load_preset
from fsl_sage.config.directories import data_directory
from fsl_sage.models.language import MINILM, SMOLLM2, model_path
from fsl_sage.report.load import load_runs
from fsl_sage.report.study import make_study
from fsl_sage.report.tables import make_tables
from fsl_sage.wire.ledger import GIB
from tests.report.made_up import made_up_config, write_grid, write_run

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
PAPER, CPU = (sorted((EXPERIMENTS / name).glob("*.toml")) for name in ("paper", "cpu"))
RUNS = {
    "alignment-interval-cifar10": 5,
    "alignment-interval-cifar100": 5,
    "auxiliary-size-cifar10": 2 * 4,
    "auxiliary-size-cifar100": 2 * 4,
    "cifar10": 5 * 2 * 4,
    "cifar10-two-cores": 2,
    "cifar100": 5 * 2 * 4,
    "dirichlet": 5 * 6,
    "latency": 5,
    "cifar10-10k-alignment-interval": 4 + 1,
    "cifar10-10k-auxiliary-size": 2 * 3,
    "cifar10-10k-images": 6 * 3 * 3,
    "cifar100-9999-test-images": 6,
    "family": 15 * 2,
    "fewer-bytes": 3 * 2,
    "fewer-bytes-texts": 1,
    "family-sgd": 3 * 2,
    "gpt2-medium-e2e": 4,
    "imdb-minilm": 3,
    "theory": 1,
    "niid-bench": 3 * 2,
    "smollm2_e2e": 4,
    "smollm2_e2e_ridge": 2,
}


def dry_run(file):
    plans = plan_runs(load_preset(file), load_grid(file))
    data = plans[0].config.data.name
    name = plans[0].config.model.name
    if name in (f"hf:{SMOLLM2}", f"hf:{MINILM}") and model_path(name) is None:
        pytest.skip(f"{name} is not here")
    if data == "experiments.niid_bench:cifar10" and not (data_directory() / "cifar10.npz").exists():
        pytest.skip("CIFAR-10 is not here, and a problem of one's own is priced with its data")
    if data.startswith("npz:") and not Path(data.removeprefix("npz:")).exists():
        pytest.skip(f"{data.removeprefix('npz:')} is not here")
    return plans, costs_of_runs([plans[0], plans[-1]])


def grid_of(file):
    """The parameter of a test; to trace GPT-2 medium takes seconds."""
    marks = [pytest.mark.slow] if file.stem == "gpt2-medium-e2e" else []
    return pytest.param(file, id=f"{file.parent.name}/{file.stem}", marks=marks)


@pytest.mark.parametrize("file", [grid_of(file) for file in [*PAPER, *CPU]])
def test_every_preset_is_a_grid_that_can_be_priced(file, monkeypatch):
    monkeypatch.chdir(EXPERIMENTS.parent)
    plans, costs = dry_run(file)
    assert len(plans) == RUNS[file.stem]
    for cost in costs:
        config = plans[0].config
        spent = config.budget_gib is not None and cost["bytes_paper"] >= config.budget_gib * GIB
        assert spent or cost["rounds"] == config.rounds


WITH_A_GPU = [file for file in PAPER if "cifar" in file.read_text() and file.stem != "cifar10-two-cores"]


@pytest.mark.parametrize("file", WITH_A_GPU, ids=lambda file: file.stem)
def test_the_papers_settings_are_those_of_the_preset_paper(file):
    """They differ in the data and in what ends a run, and in nothing else."""
    paper, config = load_preset("paper"), load_preset(file)
    assert config.data.name in ("cifar10", "cifar100")
    same = replace(config, data=paper.data, rounds=paper.rounds, budget_gib=paper.budget_gib)
    assert replace(same, model=replace(same.model, auxiliary=paper.model.auxiliary)) == paper


def test_the_papers_setting_on_two_cores_has_a_cheaper_alignment_and_fewer_rounds():
    paper, config = load_preset("paper"), load_preset(EXPERIMENTS / "paper" / "cifar10-two-cores.toml")
    same = replace(config, rounds=paper.rounds, budget_gib=paper.budget_gib, device=paper.device)
    same = replace(same, alignment=paper.alignment)
    assert replace(same, model=replace(same.model, auxiliary=paper.model.auxiliary)) == paper


def test_gpt2_is_fine_tuned_as_the_lora_paper_does_it():
    config = load_preset(EXPERIMENTS / "paper" / "gpt2-medium-e2e.toml")
    assert (config.clients, config.model.cut, config.model.auxiliary) == (3, "transformer.h.0", "blocks:3")
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (4, 32, ("c_attn",))
    assert (config.batch_size, config.data.sequence_length) == (8, 512)
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.label_smoothing) == ("adamw", 2e-4, 0.1)


@pytest.mark.parametrize("file", CPU, ids=lambda file: file.stem)
def test_a_scaled_experiment_says_that_it_is_not_the_papers(file):
    assert file.read_text().startswith("# Not the paper's experiment: ")
    assert load_preset(file).device == "cpu"


def test_what_is_kept_of_a_comparison_makes_the_same_report(tmp_path):
    runs, kept = write_grid(tmp_path / "runs", seeds=1, partitions=("iid",)), tmp_path / "kept"
    write_run(runs / "unfinished", made_up_config("fedavg", seed=9, clients=10, align_every=5), finished=False)
    (runs / "fedavg_iid_1" / "model.safetensors").write_bytes(b"large")
    for name in ("figures", "tables"):
        (runs / "report" / name).mkdir(parents=True)
    (runs / "report" / "figures" / "latency.png").write_bytes(b"a figure")
    collect = runpy.run_path(str(EXPERIMENTS / "collect.py"))["collect"]
    assert collect(runs, kept) == 6
    assert not list(kept.rglob("*.safetensors"))
    assert (kept / "report" / "figures" / "latency.png").exists()
    before, after = (make_tables(make_study(load_runs(folder)[0]), ()) for folder in (runs, kept))
    for name in ("best-accuracy", "to-target"):
        one, other = (next(table for table in tables if table.name == name) for tables in (before, after))
        assert one == other
