"""What can go wrong, in sentences for a person: what was given, what is accepted, what to do."""

from collections.abc import Iterable


class InputError(ValueError):
    """An option, a file or a directory that cannot be used. The command line exits with 2."""


class TrainingError(RuntimeError):
    """A training that started and failed, by a NaN loss for instance. The command line exits with 1."""


class MissingExtra(InputError):  # noqa: N818
    """A part of the package that needs an extra which is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(
            f"{what} needs the extra '{extra}': pip install -c constraints.txt -e '.[{extra}]' in the clone"
        )


def nearest(given: object, known: Iterable[str], otherwise: str) -> str:
    """The end of a sentence on a name that is not known: the one that was probably meant, or else all there are.

    Args:
        given: The name.
        known: Those that are accepted.
        otherwise: What comes before them, such as "; there are".
    """
    from difflib import get_close_matches

    names = list(known)
    near = get_close_matches(str(given)[:100], names, n=1)
    return f": did you mean {near[0]}?" if near else f"{otherwise}: {', '.join(names)}."


def place_of(error: BaseException) -> str:
    """Where in the user's own code an error arose: "mine.py, line 7"; empty where none of it was running."""
    import sysconfig
    import traceback
    from pathlib import Path

    ours = (str(Path(__file__).parent), *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*ours, "<")):
            return f"{Path(frame.filename).name}, line {frame.lineno}"
    return ""


def described(error: BaseException) -> str:
    """An error of the user's own code: its kind, what it says, and where it arose."""
    place = place_of(error)
    return f"{type(error).__name__}: {error}" + (f" ({place})" if place else "")


class RunWarning(UserWarning):
    """What a person should know of a run that goes on or has ended all the same."""


def listed(names: Iterable[str], word: str = "and") -> str:
    """Names as a person lists them: a, b and c."""
    *most, last = names
    return f"{', '.join(most)} {word} {last}" if most else last


def sentence(text: str) -> str:
    """A text that another sentence may follow: with a full stop, unless it has its own end."""
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."
