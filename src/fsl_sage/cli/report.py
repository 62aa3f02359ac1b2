"""A report in the terminal: its main table, and where the rest is."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsl_sage.cli.consoles import Output
from fsl_sage.report.table_forms import Table as ReportTable
from fsl_sage.report.write import Report


def uncut(console: Console) -> Console:
    """Wide enough for every table where no screen sets a limit."""
    return console if console.is_terminal else Output(like=console, width=200)


def print_report(console: Console, report: Report) -> None:
    """The main table and where the rest is."""
    for note in report.notes:
        console.print(note, style="yellow", highlight=False, soft_wrap=True, markup=False)
    for table in report.tables[:1]:
        console.print(f"\n{table.caption}:", highlight=False, soft_wrap=True, markup=False)
        uncut(console).print(_for_terminal(table))
    console.print(
        f"\nThe report is {report.page}; figures and tables are beside it.",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )


def _for_terminal(table: ReportTable) -> Table:
    shown = Table(box=None, padding=(0, 2), header_style="bold")
    for name in table.columns:
        shown.add_column(name)
    for row in table.rows:
        shown.add_row(
            *(
                Text(cell.text, style=("", "bold", "underline")[cell.rank]) + Text(cell.spread and f" ± {cell.spread}")
                for cell in row
            )
        )
    return shown
