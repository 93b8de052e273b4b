"""Tables as text for the terminal, Markdown, LaTeX and HTML."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from pflight.messages import markdown, one_line

DASH = "\N{EN DASH}"
_GAP = 3  # columns of a terminal between two of a table
_NARROW = 26  # width of a column of words in a table that is wider than the terminal
_LONG = 50  # characters of a cell that has to be broken into lines
MARK = "* "  # mark of bold cells if nothing can be bold

_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{character: f"{{{character}}}" for character in "[]*"},  # these may follow a line's end
    "±": r"$\pm$",
    DASH: "--",
    "…": r"\ldots{}",
    "\n": " ",
}
_STYLE = """
body { font-family: system-ui, sans-serif; color: #222; max-width: 80rem; margin: 2rem auto;
       padding: 0 1rem; line-height: 1.45; }
div { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 0.5rem 0 1.5rem; }
caption { text-align: left; font-weight: bold; padding: 0.3rem 0; }
th, td { padding: 0.2rem 0.6rem; text-align: right; white-space: nowrap; }
th.text, td.text { text-align: left; }
td.long { white-space: normal; }
thead { border-top: 2px solid; border-bottom: 1px solid; }
tbody { border-bottom: 2px solid; }
li { max-width: 50rem; }
img { max-width: 100%; }
"""


class Bold(str):
    """A cell that is set in bold."""

    __slots__ = ()


@dataclass(frozen=True)
class Table:
    """A table with text in its cells.

    Args:
        title: The title of the table.
        columns: The heading of each column.
        rows: The cells of each row.
        text: Number of first columns with words, aligned on the left.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: int = 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table in parts of whole columns that fit the terminal."""
        widths = []
        for place, heading in enumerate(self.columns):  # which is broken between words
            cells = (_marked(row[place]) for row in self.rows)
            widths.append(max(map(cell_len, (*heading.split(), *cells))))
        room = options.max_width - 1
        words, numbers = [*range(self.text)], [*range(self.text, len(widths))]
        if numbers and sum(widths) + _GAP * len(widths) > room:
            widths[: self.text] = (min(width, _NARROW) for width in widths[: self.text])
            room -= sum(widths[: self.text]) + _GAP * self.text
        first = True
        while first or numbers:
            taken: list[int] = []
            while numbers and (
                not taken or sum(widths[p] + _GAP for p in [*taken, numbers[0]]) <= room
            ):
                taken.append(numbers.pop(0))
            yield self._part([*words, *taken], widths, "" if first else ", continued")
            first = False

    def _part(self, places: Sequence[int], widths: Sequence[int], more: str) -> RichTable:
        """Return some of the columns; bold cells also have an asterisk."""
        table = RichTable(
            box=SIMPLE_HEAD, title=Text(one_line(self.title + more), "bold"), title_justify="left"
        )
        for place in places:
            table.add_column(
                Text(self.columns[place]),
                justify="left" if place < self.text else "right",
                overflow="fold",
                max_width=widths[place],
                vertical="bottom",
            )
        for row in self.rows:
            cells = [row[place] for place in places]
            table.add_row(*(Text(_marked(c), "bold" if _bold(c) else "") for c in cells))
        return table

    def to_markdown(self) -> str:
        """Return the table as Markdown, under a heading of the second level."""
        lines = [[markdown(column) for column in self.columns]]
        lines.append(["---" if place < self.text else "---:" for place in range(len(lines[0]))])
        for row in self.rows:
            lines.append([f"**{markdown(c)}**" if _bold(c) else markdown(c) for c in row])
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return f"## {markdown(self.title)}\n\n{table}"

    def to_latex(self) -> str:
        """Return the table as a float, for a document that uses the package ``booktabs``.

        With names in other than Latin letters it needs LuaLaTeX or XeLaTeX.
        """
        kinds = ["l" if place < self.text else "r" for place in range(len(self.columns))]
        for place, cells in enumerate(zip(*self.rows, strict=True)):
            if max(map(len, cells)) > _LONG:
                kinds[place] = r"p{0.4\linewidth}"
        lines = [[*map(_latex_heading, self.columns, kinds)]]
        for row in self.rows:
            lines.append([rf"\textbf{{{latex(c)}}}" if _bold(c) else latex(c) for c in row])
        head, *body = (f"    {' & '.join(cells)} \\\\" for cells in lines)
        return "\n".join(
            [
                r"\begin{table}[htbp]",
                r"  \centering\footnotesize\setlength{\tabcolsep}{4pt}",
                rf"  \caption{{{latex(self.title)}}}",
                rf"  \begin{{tabular}}{{{''.join(kinds)}}}",
                r"    \toprule",
                head,
                r"    \midrule",
                *body,
                r"    \bottomrule",
                r"  \end{tabular}",
                r"\end{table}",
            ]
        )

    def to_html(self) -> str:
        """Return the table as an element of HTML."""
        head = _html_row("th", self.columns, self.text)
        body = "\n".join(_html_row("td", row, self.text) for row in self.rows)
        caption = html.escape(self.title)
        return (
            f"<div><table>\n<caption>{caption}</caption>\n<thead>\n{head}\n</thead>\n"
            f"<tbody>\n{body}\n</tbody>\n</table></div>"
        )


def html_page(title: str, body: str) -> str:
    """Return a page of HTML that needs no other file."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{html.escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def markdown_notes(notes: Sequence[str]) -> str:
    """Return sentences as a list in Markdown."""
    return "\n".join(f"- {markdown(note)}" for note in notes)


def html_notes(notes: Sequence[str]) -> str:
    """Return sentences as a list in HTML."""
    return "\n".join(["<ul>", *(f"<li>{html.escape(note)}</li>" for note in notes), "</ul>"])


def latex_notes(notes: Sequence[str]) -> str:
    """Return sentences as a list in LaTeX."""
    items = (rf"  \item {{}}{latex(note)}" for note in notes)
    return "\n".join([r"\begin{itemize}\footnotesize", *items, r"\end{itemize}"])


def latex(text: str) -> str:
    r"""Return a text as LaTeX shows it.

    Example:
        >>> latex("FeSEM, num_clusters=4: 93.8 ± 0.5 %")
        'FeSEM, num\\_clusters=4: 93.8 $\\pm$ 0.5 \\%'
    """
    escaped = "".join(_LATEX.get(character, character) for character in text)
    return re.sub(r"(?<![\w.-])-(?=\d)", "$-$", escaped)


def _latex_heading(text: str, kind: str) -> str:
    """Return a heading in short lines, so that it is not wider than the numbers below it."""
    if kind != "r":
        return latex(text)
    lines = map(latex, textwrap.wrap(text, 10, break_long_words=False))
    return r"\shortstack[r]{" + r"\\".join(lines) + "}"


def _marked(cell: str) -> str:
    return f"{MARK}{one_line(cell)}" if _bold(cell) else one_line(cell)


def _bold(cell: str) -> bool:
    return isinstance(cell, Bold)


def _html_row(tag: str, cells: Sequence[str], text: int) -> str:
    written = []
    for place, cell in enumerate(cells):
        kinds = ["text"] * (place < text) + ["long"] * (len(cell) > _LONG)
        kind = f' class="{" ".join(kinds)}"' if kinds else ""
        shown = html.escape(cell)
        written.append(f"<{tag}{kind}>{f'<b>{shown}</b>' if _bold(cell) else shown}</{tag}>")
    return f"<tr>{''.join(written)}</tr>"
