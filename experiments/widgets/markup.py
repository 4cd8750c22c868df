"""HTML parts of the panels, in JupyterLab's own colours. Every text from outside is escaped here."""

from collections.abc import Sequence
from html import escape
from typing import Any

import polars as pl

__all__ = ["badge", "error_box", "heading", "progress_text", "quiet", "table"]

_EDGE = "1px solid var(--jp-border-color2, #bdbdbd)"
_INK, _QUIET = "var(--jp-ui-font-color1, #1c2024)", "var(--jp-ui-font-color2, #5b6470)"


def heading(title: str, about: str, *, kind: str) -> str:
    """A panel's first line: its name, how its figures come about, and what it does."""
    return (
        f'<div style="line-height:1.45;color:{_INK}"><b style="font-size:16px">{escape(title)}</b> {badge(kind)}'
        f"<br>{quiet(about)}</div>"
    )


def badge(kind: str) -> str:
    """How figures came about: "measured" or "simulated"."""
    return (
        f'<span style="border:1px solid currentColor;border-radius:999px;padding:0 8px;font-size:12px;'
        f'color:{_QUIET}">{escape(kind)}</span>'
    )


def quiet(text: str) -> str:
    """A line that is less important."""
    return f'<span style="color:{_QUIET};font-size:13px">{escape(text)}</span>'


def progress_text(done: int, total: int, what: str) -> str:
    """A bar and the same in words, announced to screen readers."""
    share = f"{done} of {total}" if total else ""
    return (
        f'<div style="display:flex;gap:10px;align-items:center;color:{_INK}">'
        f'<progress aria-label="points done" max="{max(1, total)}" value="{done}" style="width:220px"></progress>'
        f'<span role="status">{escape(share)} {escape(what)}</span></div>'
    )


def error_box(title: str, lines: Sequence[tuple[str, str]], *, trace: str = "", fold: str = "traceback") -> str:
    """What went wrong: a title, named lines, and a long text (`trace`) behind a fold of that name."""
    rows = "".join(
        f'<tr><th scope="row" style="text-align:left;vertical-align:top;padding:1px 14px 1px 0;white-space:nowrap">'
        f'{escape(name)}</th><td style="text-align:left;overflow-wrap:anywhere">{escape(text)}</td></tr>'
        for name, text in lines
    )
    folded = (
        f'<details style="margin-top:6px"><summary>{escape(fold)}</summary>'
        f'<pre style="white-space:pre-wrap;font-size:12px">{escape(trace)}</pre></details>'
        if trace
        else ""
    )
    return (
        f'<div role="alert" style="border:{_EDGE};border-left:5px solid #D55E00;padding:8px 12px;line-height:1.5;'
        f'color:{_INK}"><b>{escape(title)}</b><table style="font-size:13px;margin-top:4px">{rows}</table>{folded}</div>'
    )


def table(frame: pl.DataFrame, *, caption: str = "", rows: int = 40) -> str:
    """A frame as a table; beyond so many rows it says how many are left out."""
    styles = [_cell(kind.is_numeric()) for kind in frame.dtypes]
    head = "".join(f'<th scope="col" style="{s}">{escape(n)}</th>' for s, n in zip(styles, frame.columns, strict=True))
    body = "".join(
        "<tr>" + "".join(f'<td style="{s}">{escape(_text(v))}</td>' for s, v in zip(styles, row, strict=True)) + "</tr>"
        for row in frame.head(rows).iter_rows()
    )
    more = quiet(f"{frame.height - rows} more rows") if frame.height > rows else ""
    title = f'<caption style="text-align:left;font-weight:600;padding:4px 0;color:{_INK}">{escape(caption)}</caption>'
    return (
        f'<div style="overflow-x:auto;color:{_INK}"><table style="border-collapse:collapse;font-size:13px">'
        f"{title if caption else ''}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}</div>"
    )


def _cell(number: bool) -> str:
    align = "right" if number else "left"
    return f"text-align:{align};padding:3px 14px 3px 0;border-bottom:{_EDGE};vertical-align:top;line-height:1.35"


def _text(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
