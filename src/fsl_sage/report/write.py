"""Writing a report: from the raw metrics of run directories to figures, tables and the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fsl_sage.errors import InputError
from fsl_sage.records.files import write_bytes
from fsl_sage.report.load import load_runs
from fsl_sage.report.study import Study, make_study
from fsl_sage.report.table_forms import Table, to_csv, to_latex, to_markdown
from fsl_sage.report.tables import make_tables


@dataclass(frozen=True)
class ReportOptions:
    """The options of a report."""

    target: tuple[float, ...] = ()
    """Test accuracies (0 to 1), or values of another headline score, to which bytes and rounds are counted; chosen for
    each setting if not given."""
    bandwidth: float = 100.0
    """Mbit/s of each client, for the time that communication takes."""

    def __post_init__(self) -> None:
        for target in self.target:
            if not 0 < target < float("inf"):
                raise InputError(f"--target {target:g} is not possible: give numbers above 0.")
        if not 0 < self.bandwidth < float("inf"):
            raise InputError(f"--bandwidth {self.bandwidth:g} is not possible: give Mbit/s above 0.")


class Report(NamedTuple):
    """What was written."""

    page: Path
    """The HTML page."""
    runs: int
    """The number of runs in it."""
    tables: list[Table]
    notes: list[str]
    """Sentences on what is missing, such as runs that are not finished."""


def report(
    folder: Path | str, out: Path | str | None = None, *, target: Sequence[float] = (), bandwidth: float = 100.0
) -> Report:
    """Write figures, tables and report.html from run directories.

    Args:
        folder: A run directory, or a folder with run directories in it, such as a comparison's.
        out: Where to write; `folder`/report if not given.
        target: Values of the headline score to which bytes and rounds are counted; chosen for each setting if empty.
        bandwidth: Mbit/s of each client, for the time that communication takes.

    Returns:
        What was written: `page` is the HTML page, `tables` are the tables, `notes` say what is missing.
    """
    there = Path(folder)
    return write_report(there, Path(out) if out else there / "report", ReportOptions(tuple(target), bandwidth))


def write_report(folder: Path, out: Path, options: ReportOptions) -> Report:
    """As `report`: write figures (PNG, PDF), tables (Markdown, CSV, LaTeX) and report.html to `out`."""
    # matplotlib and plotly take a second to import, which importing this package should not take.
    from fsl_sage.report.figures import draw_figures
    from fsl_sage.report.html import make_page
    from fsl_sage.report.panels import save

    runs, notes = load_runs(folder)
    study = make_study(runs)
    for target in options.target:
        study.score.check_target(target, "--target")
    notes += [*_unfinished(study), *_repeated(study), *study.unequal()]
    tables = make_tables(study, options.target)
    try:
        for name in ("figures", "tables"):
            (out / name).mkdir(parents=True, exist_ok=True)
        _write_tables(tables, out / "tables")
        # The page has these as interactive curves.
        interactive = tuple(f"{metric.file_name}-{axis}" for metric in study.curves for axis in ("gib", "rounds"))
        shown = []
        for drawing in draw_figures(study, options.bandwidth):
            png = save(drawing, out / "figures")
            if not drawing.name.startswith(interactive):
                shown.append((drawing, png))
        title = folder.resolve().name.replace("-", " ").replace("_", " ")
        page = make_page(title, study, tables, shown, notes, options.bandwidth)
        write_bytes(out / "report.html", page.encode())
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror}.") from None
    return Report(out / "report.html", len(runs), tables, notes)


def _unfinished(study: Study) -> list[str]:
    names = [run.name for run in study.runs if run.stopped is None and run.failure is None]
    told = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return [f"Not finished yet, as far as they are: {told}."] if names else []


def _repeated(study: Study) -> list[str]:
    return [
        f"{run.name} is not counted: {first.name} has the same options and the same seed."
        for run, first in study.repeated
    ]


def _write_tables(tables: Sequence[Table], folder: Path) -> None:
    for table in tables:
        for kind, form in (("md", to_markdown), ("csv", to_csv), ("tex", to_latex)):
            write_bytes(folder / f"{table.name}.{kind}", form(table).encode())
