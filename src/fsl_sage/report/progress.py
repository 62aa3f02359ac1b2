"""How far a comparison is: a live table in a terminal, plain lines elsewhere; and its grid with costs beforehand."""

import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fsl_sage.report.grid import Plan
from fsl_sage.report.jobs import Job
from fsl_sage.report.tables import Table as ReportTable
from fsl_sage.report.write import Report
from fsl_sage.units import gib_text
from fsl_sage.wire.ledger import GIB

SUMMARY_SECONDS = 30
"""How often plain output says where the running ones are."""
_STYLES = {"waiting": "dim", "running": "bold cyan", "finished": "green", "failed": "bold red"}
_URGENCY = {"running": 0, "failed": 1, "finished": 2, "waiting": 3}


class Progress:
    """Shows the jobs while they run."""

    def __init__(self, console: Console, jobs: Sequence[Job]) -> None:
        self.console = console
        self.jobs = jobs
        self._live: Live | None = None
        self._said = time.monotonic()

    def __enter__(self) -> "Progress":
        if self.console.is_terminal:
            self._live = Live(get_renderable=self._view, console=self.console, refresh_per_second=2)
            self._live.start()
        elif before := sum(job.state == "finished" for job in self.jobs):
            self._say(f"{before} of {len(self.jobs)} runs were finished before")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def changed(self, job: Job) -> None:
        """A run has started or ended."""
        if self._live is None:
            ended = f"  {_outcome(job)}" if job.state != "running" else ""
            self._say(f"{job.plan.name}: {job.state}{ended}")

    def moved(self, job: Job) -> None:
        """A run has played a round."""
        if self._live is None and time.monotonic() - self._said >= SUMMARY_SECONDS:
            running = [f"{each.plan.name} ({_outcome(each)})" for each in self.jobs if each.state == "running"]
            self._say(f"{_counts(self.jobs)}; {', '.join(running)}")

    def _say(self, line: str) -> None:
        self._said = time.monotonic()
        self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _view(self) -> Group:
        return Group(_table(_shown(self.jobs, self.console.height - 4)), Text(_counts(self.jobs), style="bold"))


def _shown(jobs: Sequence[Job], room: int) -> list[Job]:
    """As many as fit, in the grid's order: those that run, then failed, finished and waiting ones."""
    urgent = sorted(jobs, key=lambda job: _URGENCY[job.state])[: max(3, room)]
    return [job for job in jobs if job in urgent]


def _counts(jobs: Sequence[Job]) -> str:
    counts = Counter(job.state for job in jobs)
    said = [f"{counts[state]} {state}" for state in ("running", "waiting", "failed") if counts[state]]
    return ", ".join([f"{counts['finished']} of {len(jobs)} runs finished", *said])


def _table(jobs: Sequence[Job]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="bold")
    table.add_column("run", no_wrap=True)
    for name in ("round", "test accuracy", "best", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", overflow="ellipsis", no_wrap=True)
    for job in jobs:
        table.add_row(job.plan.name, *_cells(job), Text(job.error or job.state, style=_STYLES[job.state]))
    return table


def _cells(job: Job) -> list[str]:
    if job.last is None:
        return [f"-/{job.plan.config.rounds}", "", "", ""]
    return [
        f"{job.last['round'] + 1}/{job.plan.config.rounds}",
        _percent(job.last.get("test_accuracy")),
        _percent(job.best_accuracy),
        f"{job.last['bytes_paper'] / GIB:.3f}",
    ]


def _percent(accuracy: float | None) -> str:
    return "" if accuracy is None else f"{accuracy:.1%}"


def _outcome(job: Job) -> str:
    if job.error:
        return job.error
    done, accuracy, best, moved = _cells(job)
    return f"round {done}" + (f", accuracy {accuracy}, best {best}, {moved} GiB" if moved else "")


def print_costs_of_grid(console: Console, plans: Sequence[Plan], costs: Sequence[dict[str, int]]) -> None:
    """The grid, and what each run would move."""
    table = Table(box=None, padding=(0, 2), header_style="bold")
    table.add_column("run", no_wrap=True)
    for name in ("rounds", "bytes (paper's convention)", "bytes in all", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for plan, cost in zip(plans, costs, strict=True):
        paper, total = cost["bytes_paper"], cost["bytes_total"]
        table.add_row(plan.name, f"{cost['rounds']:,}", f"{paper:,}", f"{total:,}", f"{paper / GIB:.3f}")
    _uncut(console).print(table)
    paper, total = (sum(cost[name] for cost in costs) for name in ("bytes_paper", "bytes_total"))
    early = [plan.config for plan in plans if plan.config.target_accuracy or plan.config.max_seconds]
    most = " at most: a target accuracy or a time limit may end runs earlier" if early else ""
    runs = "1 run" if len(plans) == 1 else f"{len(plans)} runs"
    console.print(
        f"{runs}, {gib_text(paper)} by the paper's convention, {gib_text(total)} in all{most}.", highlight=False
    )
    whole = sum(cost["bytes_whole_models"] for cost in costs)
    if whole != paper:
        console.print(f"If whole models travelled, with their frozen weights: {gib_text(whole)}.", highlight=False)
    if any(cost["is_upper_bound"] for cost in costs):
        console.print(
            "These are upper bounds, every text at its greatest length: with the texts at hand they are exact.",
            highlight=False,
        )


def _uncut(console: Console) -> Console:
    """Wide enough for every table where no screen sets a limit."""
    return console if console.is_terminal else Console(file=console.file, width=200)


def print_report(console: Console, report: Report) -> None:
    """The main table and where the rest is."""
    for note in report.notes:
        console.print(note, style="yellow", highlight=False, soft_wrap=True, markup=False)
    for table in report.tables[:1]:
        console.print(f"\n{table.caption}:", highlight=False, soft_wrap=True, markup=False)
        _uncut(console).print(_for_terminal(table))
    console.print(
        f"\nThe report is {report.page}; figures and tables are beside it.",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )


def _for_terminal(table: ReportTable) -> Table:
    shown = Table(box=None, padding=(0, 2), header_style="bold")
    for name in table.head:
        shown.add_column(name)
    for row in table.rows:
        shown.add_row(
            *(
                Text(cell.text, style=("", "bold", "underline")[cell.rank]) + Text(cell.spread and f" ± {cell.spread}")
                for cell in row
            )
        )
    return shown
