"""What does not go together is refused before anything runs, with the reason; docs/algorithms/README.md lists it."""

import re
from pathlib import Path
from typing import Any

import pytest

from fsl_sage.algorithms import ALGORITHMS, make_algorithm
from fsl_sage.config import from_dict, load_preset
from fsl_sage.errors import InputError
from fsl_sage.experiment import cost

PAGES = Path(__file__).parents[2] / "docs" / "algorithms"
SGD = {"optimizer": {"name": "sgd"}}
CONTROLS = {"averaging": {"control_variates": True}}
U_SHAPE = {"model": {"cut": "layer1,layer3"}}
CUTS = {"cuts": ["layer1", "layer2"], "clients": 2}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "scaffold with Adam": ({"algorithm": "scaffold"}, "Adam's steps are not gradients"),
    "controls with AdamW": (
        {"algorithm": "cse-fsl", "optimizer": {"name": "adamw"}, **CONTROLS},
        "--optimizer.name adamw",
    ),
    "controls and another rule": ({"algorithm": "scaffold", "averaging": {"rule": "median"}, **SGD}, "let through"),
    "adaptsfl with controls": ({"algorithm": "adaptsfl", **CONTROLS, **SGD}, "without an average"),
    "locfedmix with controls": ({"algorithm": "locfedmix-sl", **CONTROLS, **SGD}, "without an average"),
    "sl with FedOpt": ({"algorithm": "sl", "averaging": {"optimizer": "yogi"}}, "hand the model on"),
    "cpsl with FedProx": ({"algorithm": "cpsl", "averaging": {"proximal": 0.1}}, "hand the model on"),
    "heron with FedProx": ({"algorithm": "heron-sfl", "averaging": {"proximal": 0.1}}, "--averaging.proximal"),
    "heron with controls": ({"algorithm": "heron-sfl", **CONTROLS, **SGD}, "--averaging.control-variates"),
    "heron in bf16": ({"algorithm": "heron-sfl", "precision": "bf16"}, "bf16"),
    "fedgkt with FedOpt": ({"algorithm": "fedgkt", "averaging": {"optimizer": "adam"}}, "--averaging.optimizer"),
    "fedyogi with adam": ({"algorithm": "fedyogi", "averaging": {"optimizer": "adam"}}, "--algorithm fedavg"),
    **{
        f"{name} with a U-shape": ({"algorithm": name, **U_SHAPE}, "takes one cut")
        for name in ("fsl-sage", "cse-fsl", "heron-sfl", "local-loss", "fedgkt", "locfedmix-sl", "cpsl")
    },
    **{
        f"{name} with a cut for each client": ({"algorithm": name, **CUTS}, f"not of {name}: {kind.one_cut_because}")
        for name, kind in ALGORITHMS.items()
        if name != "adaptsfl"
    },
    "cuts with local statistics": ({"algorithm": "adaptsfl", "model": {"batch_norm": "local"}, **CUTS}, "local"),
    "cuts with FedProx": ({"algorithm": "adaptsfl", "averaging": {"proximal": 0.1}, **CUTS}, "nothing pulls"),
    "cuts with a U-shape": ({"algorithm": "adaptsfl", **U_SHAPE, **CUTS}, "one cut for all clients"),
    "new optimizers that are handed on": (
        {"algorithm": "cpsl", "client_optimizer": "reset", "hands_on_optimizer": True},
        "--hands-on-optimizer",
    ),
    "new optimizers for each batch": (
        {"algorithm": "sl", "client_optimizer": "reset", "alternate": True},
        "start each batch",
    ),
    **{
        f"{name} with averaged optimizers": (
            {"algorithm": name, "client_optimizer": "average"},
            f"--client-optimizer average cannot run with {name}: {kind.own_optimizers_because}",
        )
        for name, kind in ALGORITHMS.items()
        if kind.own_optimizers_because is not None
    },
    "averaged optimizers and another rule": (
        {"algorithm": "fedavg", "client_optimizer": "average", "averaging": {"rule": "median"}},
        "--averaging.rule median",
    ),
    **{
        f"{name} blocked": ({"algorithm": name, "order": "blocked"}, "--order blocked")
        for name in ("cpsl", "adaptsfl", "locfedmix-sl")
    },
    "joint steps blocked": ({"algorithm": "splitfed-ss", "joint_step": True, "order": "blocked"}, "--joint-step"),
    "fedgkt on texts": ({"algorithm": "fedgkt", "data": {"name": "e2e"}}, "texts"),
    "locfedmix on texts": ({"algorithm": "locfedmix-sl", "data": {"name": "e2e"}}, "texts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_reason(case):
    values, said = REFUSED[case]
    with pytest.raises(InputError, match=re.escape(said)):
        make_algorithm(from_dict(values)).check()


def test_every_algorithm_has_its_page_and_its_row():
    """docs/algorithms/README.md has all names, links to pages that are there, and the bytes that `cost` prints."""
    costs = cost(load_preset("paper"))
    rows = [line for line in (PAGES / "README.md").read_text().splitlines() if line.startswith("| [`")]
    links = {name: (page, row) for row in rows for name, page in re.findall(r"\[`([a-z-]+)`\]\(([a-z-]+\.md)\)", row)}
    assert links.keys() == costs.keys()
    for name, (page, row) in links.items():
        assert (PAGES / page).exists()
        assert row.endswith(f"| {costs[name]['bytes_paper']:,} |")


@pytest.mark.parametrize(
    "page", [page for page in sorted(PAGES.glob("*.md")) if page.stem != "README"], ids=lambda p: p.stem
)
def test_a_page_has_its_parts(page):
    text = page.read_text()
    assert "## Metrics" in text
    assert re.search(r"^## Differences from the paper", text, re.MULTILINE)
    assert "fsl-sage run --algorithm" in text
