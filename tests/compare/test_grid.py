"""Which runs a comparison consists of."""

from pathlib import Path

import pytest

from fsl_sage.algorithms import resolve
from fsl_sage.compare.grid import Grid, load_grid, parse_vary, plan_runs, refuse_overruled
from fsl_sage.config import Config, DataConfig, all_options, digest, load_preset
from fsl_sage.errors import InputError


def names(config=None, **grid):
    return [plan.name for plan in plan_runs(config or Config(), Grid(**grid))]


def test_every_combination_has_one_run_and_the_first_seed_of_everything_comes_first():
    plans = plan_runs(Config(), Grid(("fsl-sage", "cse-fsl"), (1, 2), ("iid", "0.1"), {"batch_size": (16, 32)}))
    assert len({plan.name for plan in plans}) == len({digest(plan.config) for plan in plans}) == len(plans) == 16
    assert [plan.config.seed for plan in plans] == [1] * 8 + [2] * 8
    assert plans[0].name == "fsl-sage_iid_seed1_batch-size16"


def test_an_empty_grid_is_the_configuration_itself():
    assert [plan.config for plan in plan_runs(Config(seed=7), Grid())] == [resolve(Config(seed=7))]


def test_alpha_sets_the_partition():
    one, other = plan_runs(Config(), Grid(alpha=("iid", "1e4")))
    assert (one.config.data.partition, one.name) == ("iid", "fsl-sage_iid_seed0")
    assert (other.config.data.partition, other.config.data.alpha, other.name) == (
        "dirichlet",
        1e4,
        "fsl-sage_alpha10000_seed0",
    )


def test_an_algorithm_runs_once_whatever_the_values_of_an_option_that_does_not_concern_it():
    found = names(
        algorithms=("fsl-sage", "cse-fsl", "fedavg"), vary={"align_every": (2, 5), "model.auxiliary": ("linear",)}
    )
    assert sorted(found) == [
        "cse-fsl_iid_seed0_model.auxiliary-linear",
        "fedavg_iid_seed0",
        "fsl-sage_iid_seed0_align-every2_model.auxiliary-linear",
        "fsl-sage_iid_seed0_align-every5_model.auxiliary-linear",
    ]


def test_align_until_is_the_lazy_ones_alone():
    plans = plan_runs(Config(options={"align_until": 5}), Grid(("fsl-sage", "lazy-fsl-sage", "cse-fsl")))
    assert [all_options(plan.config.options).get("align_until") for plan in plans] == [None, 5, None]
    varied = plan_runs(Config(), Grid(("fsl-sage", "lazy-fsl-sage"), vary={"align_until": (2, 4)}))
    assert [(plan.config.algorithm, plan.config.options.align_until) for plan in varied] == [
        ("fsl-sage", None),
        ("lazy-fsl-sage", 2),
        ("lazy-fsl-sage", 4),
    ]


def test_vary_reads_an_options_own_type():
    varied = parse_vary(["--align-every=2,5", "optimizer.lr=1e-3", "warm_start=true,false", "align_until=none,3"])
    assert varied == {
        "align_every": (2, 5),
        "optimizer.lr": (0.001,),
        "warm_start": (True, False),
        "align_until": (None, 3),
    }


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"algorithms": ("fsl-saga",)}, "--algorithm fsl-saga is not known"),
        ({"algorithms": ("lazy-fsl-sage",)}, "lazy-fsl-sage needs --align-until"),
        ({"alpha": ("much",)}, "--alpha much is not possible"),
        ({"alpha": ("0",)}, "--data.alpha 0 is not possible"),
        ({"seeds": (-1,)}, "--seed -1 is not possible"),
        ({"vary": {"align_evry": (1,)}}, "'align_evry' is not an option"),
        ({"vary": {"align_every": ("often",)}}, "--align-every 'often' is not possible: give a whole number"),
        ({"vary": {"data.alpha": (1.0,)}}, "give --alpha with several values"),
        (
            {"alpha": ("0.1",), "vary": {"data.partition": ("iid", "shards")}},
            "--vary data.partition is not possible beside --alpha, which gives each run its partition: give one.",
        ),
        ({"vary": {"workers": (1, 2)}}, "--workers never changes a run's numbers"),
        ({"vary": {"threads": (1, 2)}}, "--threads says how to compute, not what"),
        (
            {"algorithms": ("fedavg",), "vary": {"align_every": (1, 2)}},
            "--align-every is an option of fsl-sage and lazy-fsl-sage, not of fedavg",
        ),
        ({"vary": {"data.name": ("npz:a-b", "npz:a:b")}}, "Two runs of the grid would be called"),
    ],
)
def test_an_impossible_grid_is_refused_before_anything_runs(grid, message):
    with pytest.raises(InputError) as error:
        names(**grid)
    assert message in str(error.value)


def test_align_until_without_a_lazy_algorithm_is_refused():
    with pytest.raises(
        InputError, match="In a comparison --align-until is an option of lazy-fsl-sage, not of fsl-sage"
    ):
        names(Config(options={"align_until": 3}), algorithms=("fsl-sage",))


def test_an_auxiliary_may_be_given_as_a_number_of_bytes():
    assert names(vary=parse_vary(["model.auxiliary=500000,2000000"])) == [
        "fsl-sage_iid_seed0_model.auxiliary500000",
        "fsl-sage_iid_seed0_model.auxiliary2000000",
    ]


def test_an_option_that_the_grid_overrules_is_refused():
    grid = Grid(algorithms=("fsl-sage",), seeds=(1, 2), vary={"align_every": (2, 5)})
    refuse_overruled(Config(rounds=3), Config(), grid)
    for config, says in (
        (Config(seed=5), "--seed 5 has no effect on a grid with 1, 2: give --seeds instead"),
        (
            Config(options={"align_every": 3}),
            "--align-every 3 has no effect on a grid with 2, 5: give --vary align_every=… instead",
        ),
    ):
        with pytest.raises(InputError, match=says):
            refuse_overruled(config, Config(), grid)
    with pytest.raises(InputError, match="--vary out is not possible: --out never changes a run's numbers"):
        refuse_overruled(Config(out=Path("X")), Config(), Grid(vary={"out": ("a", "b")}))
    shards = Config(data=DataConfig(partition="shards"))
    with pytest.raises(InputError, match=r"--data\.partition shards has no .*: give --vary data\.partition=… instead"):
        refuse_overruled(shards, Config(), Grid(vary={"data.partition": ("iid", "shards")}))


def test_partitions_may_be_varied_where_no_alpha_is_given():
    assert names(vary=parse_vary(["data.partition=iid,shards"])) == ["fsl-sage_iid_seed0", "fsl-sage_shards2_seed0"]


def test_a_bracket_without_its_partner_is_refused():
    with pytest.raises(InputError, match=r"a bracket has no partner.*as in --vary 'align_rounds=\[0,1\],\[2\]'"):
        parse_vary(["align_rounds=[0,1"])


@pytest.mark.parametrize("text", ["align_every", "align_every=", "=2"])
def test_a_vary_without_option_or_values_is_refused(text):
    with pytest.raises(InputError):
        names(vary=parse_vary([text]))


PRESET = """
rounds = 3
[compare]
algorithms = ["fsl-sage", "fedavg"]
seeds = [1, 2]
alpha = ["iid", 0.1]
target = [0.5]
[compare.vary]
align_every = [2, 5]
model.auxiliary = ["linear", "full"]
"""


def test_a_preset_carries_a_grid_that_a_single_run_does_not_see(tmp_path):
    file = tmp_path / "preset.toml"
    file.write_text(PRESET)
    assert load_preset(file) == Config(rounds=3)
    vary = {"align_every": (2, 5), "model.auxiliary": ("linear", "full")}
    assert load_grid(file) == Grid(("fsl-sage", "fedavg"), (1, 2), ("iid", "0.1"), vary, (0.5,))
    assert load_grid("paper") == Grid()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("compare = 3", "[compare] is a table"),
        ("[compare]\nseed = [1]", "nothing else is accepted"),
        ("[compare]\nseeds = 1", "'seeds' in [compare] must be a list"),
        ("[compare]\nseeds = ['1']", "'seeds' in [compare] must be a list"),
        ("[compare]\nvary = ['align_every=2']", "must be a table of lists"),
        ("[compare]\nvary = {align_every = 2}", "must be a table of lists"),
    ],
)
def test_an_impossible_table_is_refused(tmp_path, table, message):
    file = tmp_path / "preset.toml"
    file.write_text(table)
    with pytest.raises(InputError) as error:
        load_grid(file)
    assert message in str(error.value)


def test_lists_and_repeated_options_are_values_too(tmp_path):
    preset = tmp_path / "p.toml"
    preset.write_text("[compare]\nvary = { align_rounds = [[0, 1], [2, 4]] }")
    rounds = [all_options(plan.config.options)["align_rounds"] for plan in plan_runs(Config(), load_grid(preset))]
    assert [tuple(each) for each in rounds] == [(0, 1), (2, 4)]
    assert parse_vary(["align_every=2", "align-every=5"]) == {"align_every": (2, 5)}
    assert parse_vary(["align_rounds=[0,1],[2, 4],[]"]) == {"align_rounds": ((0, 1), (2, 4), ())}
    with pytest.raises(InputError, match="--vary align_every has no values"):
        plan_runs(Config(), Grid(vary={"align_every": ()}))
