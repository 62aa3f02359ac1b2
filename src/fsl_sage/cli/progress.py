"""How far a comparison is: a live table in a terminal, plain lines elsewhere. And what its grid will cost."""

import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fsl_sage.cli.report import uncut
from fsl_sage.compare.grid import Plan
from fsl_sage.compare.grid_run import GridRun, Watcher
from fsl_sage.config import all_options
from fsl_sage.units import gib_number, gib_text
from fsl_sage.wire.ledger import GIB

SUMMARY_SECONDS = 30
"""How often plain output says where the running ones are."""
_STYLES = {"waiting": "dim", "running": "bold cyan", "finished": "green", "failed": "bold red"}
_URGENCY = {"running": 0, "failed": 1, "finished": 2, "waiting": 3}


class Progress(Watcher):
    """Shows the runs of a comparison."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.runs: Sequence[GridRun] = ()
        self._live: Live | None = None
        self._said = time.monotonic()

    def start(self, runs: Sequence[GridRun]) -> None:
        """Put up the table, or say how many runs were finished before."""
        self.runs = runs
        if self.console.is_terminal:
            self._live = Live(get_renderable=self._view, console=self.console, refresh_per_second=2)
            self._live.start()
        elif before := sum(run.state == "finished" for run in runs):
            self._say(f"{before} of {len(runs)} runs were finished before")

    def stop(self) -> None:
        """Leave the last state on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def changed(self, run: GridRun) -> None:
        """A run has started or ended."""
        if self._live is None:
            ended = f"  {_outcome(run)}" if run.state != "running" else ""
            self._say(f"{run.plan.name}: {run.state}{ended}")

    def moved(self, run: GridRun) -> None:
        """A run has finished a round."""
        if self._live is None and time.monotonic() - self._said >= SUMMARY_SECONDS:
            running = [f"{each.plan.name} ({_now(each)})" for each in self.runs if each.state == "running"]
            self._say(f"{_counts(self.runs)}; {', '.join(running)}")

    def _say(self, line: str) -> None:
        self._said = time.monotonic()
        self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _view(self) -> Group:
        return Group(_table(_shown(self.runs, self.console.height - 4)), Text(_counts(self.runs), style="bold"))


def _shown(runs: Sequence[GridRun], room: int) -> list[GridRun]:
    """As many as fit, in the grid's order: those that run, then failed, finished and waiting ones."""
    urgent = sorted(runs, key=lambda run: _URGENCY[run.state])[: max(3, room)]
    return [run for run in runs if run in urgent]


def _counts(runs: Sequence[GridRun]) -> str:
    counts = Counter(run.state for run in runs)
    said = [f"{counts[state]} {state}" for state in ("running", "waiting", "failed") if counts[state]]
    return ", ".join([f"{counts['finished']} of {len(runs)} runs finished", *said])


def _table(runs: Sequence[GridRun]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="bold")
    table.add_column("run", no_wrap=True)
    titles = dict.fromkeys(run.score.title for run in runs)
    for name in ("round", " or ".join(titles), "best", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", overflow="ellipsis", no_wrap=True)
    for run in runs:
        table.add_row(
            run.plan.name, *_cells(run), Text(run.error or run.doing() or run.state, style=_STYLES[run.state])
        )
    return table


def _cells(run: GridRun) -> list[str]:
    if run.last is None:
        return [f"-/{run.plan.config.rounds}", "", "", ""]
    return [
        f"{run.last['round'] + 1}/{run.plan.config.rounds}",
        run.score.text(run.last.get(run.score.name)),
        run.score.text(run.best_score),
        gib_number(run.last["bytes_paper"] / GIB),
    ]


def _now(run: GridRun) -> str:
    return ", ".join(filter(None, (_outcome(run), run.doing())))


def _outcome(run: GridRun) -> str:
    if run.error:
        return run.error
    done, score, best, moved = _cells(run)
    return f"round {done}" + (f", {run.score.short} {score}, best {best}, {moved} GiB" if moved else "")


def print_costs_of_grid(console: Console, plans: Sequence[Plan], costs: Sequence[dict[str, int]]) -> None:
    """The grid, and what each run would move."""
    table = Table(box=None, padding=(0, 2), header_style="bold")
    table.add_column("run", no_wrap=True)
    for name in ("rounds", "bytes (paper's convention)", "bytes in all", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for plan, cost in zip(plans, costs, strict=True):
        paper, total = cost["bytes_paper"], cost["bytes_total"]
        table.add_row(plan.name, f"{cost['rounds']:,}", f"{paper:,}", f"{total:,}", gib_number(paper / GIB))
    uncut(console).print(table)
    paper, total = (sum(cost[name] for cost in costs) for name in ("bytes_paper", "bytes_total"))
    early = [plan.config for plan in plans if plan.config.target_accuracy or plan.config.max_seconds]
    most = " at most: a target or a time limit may end runs earlier" if early else ""
    runs = "1 run" if len(plans) == 1 else f"{len(plans)} runs"
    console.print(
        f"{runs}, {gib_text(paper)} by the paper's convention, {gib_text(total)} in all{most}.", highlight=False
    )
    whole = sum(cost["bytes_whole_models"] for cost in costs)
    if whole != paper:
        console.print(f"If whole models travelled, with their frozen weights: {gib_text(whole)}.", highlight=False)
    if any(cost["is_upper_bound"] for cost in costs):
        why = "every text at its greatest length: with the texts at hand they are exact"
        if any(plan.config.codec.compresses for plan in plans):
            why = "for what zstd saves depends on the numbers"
        elif any(all_options(plan.config.options).get("align_when") == "drift" for plan in plans):
            why = "for an alignment that is not needed is left out"
        console.print(f"These are upper bounds, {why}.", highlight=False)
