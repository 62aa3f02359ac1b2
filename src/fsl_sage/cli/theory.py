"""`fsl-sage theory`: a run beside the paper's theory, as tables and as a figure."""

from rich.console import Console
from rich.table import Table

from fsl_sage.report.theory import Theory

_CONSTANTS = (
    ("clients", "m", "clients"),
    ("local_steps", "K", "local steps of a round"),
    ("uploads", "Q", "uploads of a client in a round"),
    ("client_lr", "eta_L", "learning rate of the clients"),
    ("server_lr", "eta", "learning rate of the S-server"),
    ("smoothness", "L_c", "gradient, largest secant"),
    ("estimate_smoothness", "L_hat_c", "estimated gradient, largest secant"),
    ("client_lipschitz", "L_zf", "smashed data, largest secant"),
    ("variance", "sigma_L²", "variance of a batch's gradient"),
    ("estimate_variance", "sigma_hat_L²", "variance of a batch's estimated gradient"),
    ("heterogeneity", "sigma_G²", "largest distance of a client's gradient from the mean, squared"),
)


def print_theory(console: Console, theory: Theory) -> None:
    """Constants, conditions and bounds."""
    for remark in theory.remarks:
        console.print(remark, style="yellow", highlight=False, soft_wrap=True)
    console.print(_constants(theory), _conditions(theory), _bounds(theory), highlight=False)
    if theory.constants.factors() is None:
        console.print(
            "The step sizes are too large for the theory: its bounds say nothing about this run. Smaller "
            "--optimizer.lr and --optimizer.server-lr, within the limits above, would be covered.",
            highlight=False,
            soft_wrap=True,
        )
    console.print(
        "Constants are the largest that were measured on probe batches, so lower bounds of the true ones. The paper's "
        "Phi/T is a slip for Phi, which is what stands here. docs/theory.md explains each line.",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )


def _constants(theory: Theory) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="bold", title="Constants", title_justify="left")
    for name in ("", "value", "what it is"):
        table.add_column(name, justify="right" if name == "value" else "left")
    for field, symbol, meaning in _CONSTANTS:
        table.add_row(symbol, _number(getattr(theory.constants, field)), meaning)
    return table


def _conditions(theory: Theory) -> Table:
    table = Table(
        box=None, padding=(0, 2), header_style="bold", title="\nConditions on step sizes", title_justify="left"
    )
    for name in ("condition", "step size", "limit", "holds"):
        table.add_column(name)
    for condition in theory.constants.conditions():
        stated = "" if condition.in_paper else " (needed by the proof, not stated)"
        holds = "yes" if condition.holds else "[bold red]no[/]"
        table.add_row(condition.name + stated, _number(condition.value), _number(condition.limit), holds)
    return table


def _bounds(theory: Theory) -> Table:
    title = f"\nAfter {theory.rounds} rounds: the least squared gradient, and the bound"
    table = Table(box=None, padding=(0, 2), header_style="bold", title=title, title_justify="left")
    for name in ("", "measured", "bound", "made of"):
        table.add_column(name)
    for bound in theory.bounds:
        terms = ", ".join(f"{name} {_number(value)}" for name, value in (bound.terms or {}).items())
        table.add_row(bound.name, _number(bound.left), _number(bound.right), terms)
    return table


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
