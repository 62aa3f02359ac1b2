"""How things look and are called in every figure, table and page."""

from typing import Literal, NamedTuple

from fsl_sage.algorithms import ALGORITHMS
from fsl_sage.records.figures import colour_of
from fsl_sage.report.options import HETEROGENEITY, IID, dirichlet_alpha

NAMES = {
    "fsl-sage": "FSL-SAGE",
    "lazy-fsl-sage": "Lazy FSL-SAGE",
    "cse-fsl": "CSE-FSL",
    "splitfed-ms": "SplitFed-MS",
    "splitfed-ss": "SplitFed-SS",
    "fedavg": "FedAvg",
}
# Shapes and dashes beside the colours: a figure must also be readable in grey.
_MARKERS = ("o", "D", "s", "^", "v", "P", "X", "*", "<", ">", "p", "h")
_DASHES = ("solid", "dash", "solid", "solid", "dash", "dot")
LineStyle = Literal["-", "--", ":", "-."]
_MATPLOTLIB: dict[str, LineStyle] = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}


class Style(NamedTuple):
    """One look for each algorithm."""

    name: str
    colour: str
    marker: str
    dash: str
    """plotly's name of the line's dashes."""

    @property
    def line(self) -> LineStyle:
        """The same for matplotlib."""
        return _MATPLOTLIB[self.dash]


def rank(algorithm: str) -> int:
    """The place of an algorithm in every legend and table."""
    known = list(ALGORITHMS)
    return known.index(algorithm) if algorithm in known else len(known)


def style(algorithm: str) -> Style:
    """An algorithm's look, the same in every figure."""
    place = rank(algorithm)
    colour = colour_of(algorithm, ALGORITHMS)
    dash = _DASHES[place] if place < len(_DASHES) else "dashdot"
    return Style(NAMES.get(algorithm, algorithm), colour, _MARKERS[place % len(_MARKERS)], dash)


_OPTIONS = {HETEROGENEITY: "partition", "data.name": "data", "align_every": "alignment interval"}
_TELLING = ("alignment", "lora", "optimizer")  # without these, two options would have the same name
_UNITS = {
    "align_every": "rounds",
    "align_until": "rounds",
    "upload_every": "steps",
    "local_steps": "steps",
    "alignment.steps": "steps",
    "batch_size": "samples",
    "alignment.samples": "samples",
    "alignment.batch_size": "samples",
}


def option_axis(path: str) -> str:
    """An option's name with its unit, for an axis."""
    return f"{option_name(path)}, {_UNITS[path]}" if path in _UNITS else option_name(path)


def option_name(path: str) -> str:
    """An option's name for people, no other's."""
    if path in _OPTIONS:
        return _OPTIONS[path]
    group, _, name = path.rpartition(".")
    return f"{group if group in _TELLING else ''} {name}".replace("_", " ").strip()


def value_name(path: str, value: object) -> str:
    """An option's value for people, readable where it stands alone."""
    if path == HETEROGENEITY:
        alpha = dirichlet_alpha(str(value))
        if str(value).startswith("shards"):
            return f"{str(value)[6:]} shards"
        return f"α = {alpha:g}" if alpha is not None and value != IID else str(value)
    if path in ("data.name", "model.name"):
        return str(value)
    return f"{option_name(path)} {value_text(path, value)}"


def value_text(path: str, value: object) -> str:
    """An option's value for people, beside the option's name."""
    if value is None:
        return "usual" if path in ("model.auxiliary", "model.cut") else "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
