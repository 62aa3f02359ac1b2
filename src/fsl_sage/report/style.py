"""How things look and are called in every figure, table and page."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from fsl_sage.algorithms import ALGORITHMS, option_fields
from fsl_sage.algorithms.looks import algorithm_of, colour_of, place_of, title_of
from fsl_sage.report.options import HETEROGENEITY, IID, dirichlet_alpha

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


def style(algorithm: str) -> Style:
    """An algorithm's look, the same in every figure."""
    place = place_of(algorithm)
    dash = _DASHES[place] if place < len(_DASHES) else "dashdot"
    if algorithm != algorithm_of(algorithm):  # a variant has the algorithm's colour alone
        place, dash = place + len(_MARKERS) // 2, "dot"
    return Style(title_of(algorithm), colour_of(algorithm), _MARKERS[place % len(_MARKERS)], dash)


_OPTIONS = {HETEROGENEITY: "partition", "data.name": "data"}
_TELLING = (
    "alignment",
    "averaging",
    "codec",
    "lora",
    "optimizer",
)  # without these, two options would have the same name
_UNITS = {
    "local_steps": "steps",
    "alignment.steps": "steps",
    "batch_size": "samples",
    "alignment.samples": "samples",
    "alignment.total_samples": "samples",
    "alignment.batch_size": "samples",
}


def option_axis(path: str) -> str:
    """An option's name with its unit, for an axis."""
    unit = _UNITS.get(path) or _said_of(path).get("unit")
    return f"{option_name(path)}, {unit}" if unit else option_name(path)


def option_name(path: str) -> str:
    """An option's name for people; no other option has it."""
    if path in _OPTIONS:
        return _OPTIONS[path]
    if "label" in (said := _said_of(path)):
        return str(said["label"])
    group, _, name = path.rpartition(".")
    return f"{group if group in _TELLING else ''} {name}".replace("_", " ").strip()


def _said_of(path: str) -> Mapping[str, Any]:
    """What an algorithm says of an option of its own: a label and a unit."""
    found = (option_fields(kind).get(path) for kind in ALGORITHMS.values())
    return next((each.metadata for each in found if each is not None), {})


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
