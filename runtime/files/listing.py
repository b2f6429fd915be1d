"""What Python shows of an object: one line as its repr, and a table where it is printed and in notebooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Listing:
    """A title in one line, and the rows of a table with the names of its columns."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """The title and the table, in columns that line up."""
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        cells = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
        return "\n".join([self.title, *(line.rstrip() for line in cells)])

    def html(self) -> str:
        """The title and the table as HTML."""
        head = "".join(f"<th>{escape(column)}</th>" for column in self.columns)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self.rows)
        return f"<p>{escape(self.title)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class Listed(ABC):
    """An object that Python shows as its listing."""

    @abstractmethod
    def _listing(self) -> Listing: ...

    def __repr__(self) -> str:
        return f"<{self._listing().title}>"

    def __str__(self) -> str:
        return self._listing().text()

    def _repr_html_(self) -> str:
        return self._listing().html()
