"""A table and its forms: Markdown, CSV, LaTeX and HTML. The best is bold, the second best underlined."""

import csv
import html
import io
from dataclasses import dataclass
from typing import Any, NamedTuple

DASH = "–"


class Cell(NamedTuple):
    """A number and its spread, or a text."""

    text: str
    spread: str = ""
    rank: int = 0
    """1 for the best, 2 for the second best of those it is compared with."""


@dataclass(frozen=True)
class Table:
    """A table for people, and the same numbers for machines."""

    name: str
    caption: str
    columns: list[str]
    rows: list[list[Cell]]
    data: list[dict[str, Any]]
    """For CSV: one dict a line, with means and deviations apart."""


def _is_number(cell: Cell) -> bool:
    return cell.text[:1].isdigit() or cell.text[:1] in (">", DASH)


def to_markdown(table: Table) -> str:
    """For READMEs."""

    def cell(each: Cell) -> str:
        marks = {0: "{}", 1: "**{}**", 2: "<u>{}</u>"}
        return marks[each.rank].format(each.text).replace("|", "\\|") + (f" ± {each.spread}" if each.spread else "")

    lines = [table.columns, ["---"] * len(table.columns), *([cell(each) for each in row] for row in table.rows)]
    return f"{table.caption}.\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def to_csv(table: Table) -> str:
    """For machines: means and deviations in columns of their own."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table.data[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table.data)
    return text.getvalue()


def to_latex(table: Table) -> str:
    """For papers; needs booktabs."""

    def cell(each: Cell) -> str:
        marks = {0: "{}", 1: "\\textbf{{{}}}", 2: "\\underline{{{}}}"}
        spread = f" {{\\scriptsize $\\pm$ {each.spread}}}" if each.spread else ""
        return marks[each.rank].format(_latex(each.text)) + spread

    justified = "".join("r" if _is_number(each) else "l" for each in table.rows[0])
    body = [" & ".join(cell(each) for each in row) + " \\\\" for row in table.rows]
    titles = " & ".join(_latex(name) for name in table.columns) + " \\\\"
    lines = [
        "\\begin{tabular}{" + justified + "}",
        "\\toprule",
        titles,
        "\\midrule",
        *body,
        "\\bottomrule",
        "\\end{tabular}",
    ]
    return f"% {table.caption}.\n" + "\n".join(lines) + "\n"


_LATEX = {"\\": r"\textbackslash{}", "α": r"$\alpha$", "×": r"$\times$", "–": "--", ">": "$>$", "“": "``", "”": "''"}
_LATEX |= {mark: f"\\{mark}" for mark in "%&_#${}"}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def to_html(table: Table) -> str:
    """For the page."""

    def cell(each: Cell) -> str:
        marks = {0: "{}", 1: "<b>{}</b>", 2: "<u>{}</u>"}
        spread = f" <small>± {each.spread}</small>" if each.spread else ""
        number = ' class="number"' if _is_number(each) else ""
        return f"<td{number}>{marks[each.rank].format(html.escape(each.text))}{spread}</td>"

    titles = "".join(f"<th>{html.escape(name)}</th>" for name in table.columns)
    body = "".join(f"<tr>{''.join(cell(each) for each in row)}</tr>\n" for row in table.rows)
    return f"<table>\n<thead><tr>{titles}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>"
