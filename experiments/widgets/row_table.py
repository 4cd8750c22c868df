"""RowTable: a table that grows while it is read. It sorts, and a row that failed opens to its error."""

import json
import math
from collections.abc import Sequence
from typing import Any

import anywidget
import polars as pl
import traitlets

__all__ = ["RowTable"]

_MOST_ROWS = 500

# Everything from outside enters the page by textContent, so nothing in it can be markup.
_JS = """
const edge = "1px solid var(--jp-border-color2,#bdbdbd)", ink = "var(--jp-ui-font-color1,#1c2024)";
const make = (tag, style = "", text = "") => {
  const made = document.createElement(tag);
  made.style.cssText = style;
  made.textContent = text;
  return made;
};
function render({ model, el }) {
  const box = make("div", `overflow-x:auto;max-height:420px;overflow-y:auto;color:${ink}`);
  const open = new Set();
  let by = null, down = false;
  const sorted = ({ columns, rows }) => {
    const place = columns.findIndex(column => column.name === by);
    if (place < 0) return rows;
    const worth = row => row.cells[place].value;
    const order = (a, b) => a === b ? 0 : a === null ? 1 : b === null ? -1 : a < b ? -1 : 1;
    return [...rows].sort((a, b) => (down ? -1 : 1) * order(worth(a), worth(b)));
  };
  const heading = column => {
    const cell = make("th", `text-align:${column.number ? "right" : "left"};padding:0 14px 0 0;position:sticky;top:0;` +
                            `background:var(--jp-layout-color0,#fff);border-bottom:${edge}`);
    cell.scope = "col";
    const shown = column.name !== by ? "" : down ? " ↓" : " ↑";
    const sort = make("button", "all:unset;cursor:pointer;font-weight:600;padding:3px 0", column.name + shown);
    sort.type = "button";
    sort.onfocus = () => { sort.style.outline = sort.matches(":focus-visible") ? "2px solid" : ""; };
    sort.onblur = () => { sort.style.outline = ""; };
    sort.title = "sort";
    cell.setAttribute("aria-sort", column.name !== by ? "none" : down ? "descending" : "ascending");
    sort.onclick = () => { down = by === column.name && !down; by = column.name; draw(); };
    cell.append(sort);
    return cell;
  };
  const line = (row, columns) => {
    const made = make("tr");
    row.cells.forEach((cell, n) => made.append(make("td",
      `text-align:${columns[n].number ? "right" : "left"};padding:3px 14px 3px 0;border-bottom:${edge};` +
      "vertical-align:top;line-height:1.35;font-variant-numeric:tabular-nums", cell.text)));
    return made;
  };
  const failure = (row, columns) => {
    const last = make("td", `padding:3px 0;border-bottom:${edge};text-align:left;max-width:560px`);
    last.colSpan = columns.length;
    const fold = make("details"), head = make("summary", "cursor:pointer");
    fold.open = open.has(row.key);
    fold.ontoggle = () => { fold.open ? open.add(row.key) : open.delete(row.key); };
    head.append(make("span", "color:#D55E00;font-weight:600", "✗ failed "), make("span", "", row.label));
    fold.append(head, make("pre", "white-space:pre-wrap;overflow-wrap:anywhere;font-size:12px;margin:4px 0 4px 14px",
                           row.error));
    last.append(fold);
    const made = make("tr");
    made.append(last);
    return made;
  };
  const draw = () => {
    const table = JSON.parse(model.get("content"));
    const made = make("table", "border-collapse:collapse;font-size:13px");
    const caption = make("caption", "text-align:left;font-weight:600;padding:4px 0", table.caption);
    const head = make("thead"), names = make("tr"), body = make("tbody");
    names.append(...table.columns.map(heading));
    head.append(names);
    body.append(...sorted(table).map(row => row.error ? failure(row, table.columns) : line(row, table.columns)));
    made.append(caption, head, body);
    const focused = box.contains(document.activeElement) ? document.activeElement.textContent.slice(0, 8) : null;
    const top = box.scrollTop;
    box.replaceChildren(made, make("div", "font-size:13px;color:var(--jp-ui-font-color2,#5b6470)", table.more));
    box.scrollTop = top;
    if (focused) [...box.querySelectorAll("button,summary")].find(e => e.textContent.startsWith(focused))?.focus();
  };
  model.on("change:content", draw);
  el.append(box);
  draw();
  return () => model.off("change:content", draw);
}
export default { render };
"""


class RowTable(anywidget.AnyWidget):
    """A table of a frame's rows.

    Args:
        caption: Its title.
    """

    _esm = _JS
    content = traitlets.Unicode().tag(sync=True)

    def __init__(self, *, caption: str):
        self._caption = caption
        super().__init__(content=_content(pl.DataFrame(), caption, None, None, ()))
        self.layout.width = "100%"

    def show(self, frame: pl.DataFrame, *, key: str | None = None, error: str | None = None,
             label: Sequence[str] = ()) -> None:  # fmt: skip
        """Show other rows; which of them are open, the order and the place scrolled to stay.

        Args:
            frame: The rows.
            key: The column that says which row is which; not shown. By default their number does.
            error: The column with what went wrong, "" where nothing did; it is behind a fold, not among the others.
            label: The columns that name a row that failed.
        """
        self.content = _content(frame, self._caption, key, error, label)


def _content(frame: pl.DataFrame, caption: str, key: str | None, error: str | None, label: Sequence[str]) -> str:
    shown = [name for name in frame.columns if name not in (key, error)]
    columns = [{"name": name, "number": frame.schema[name].is_numeric()} for name in shown]
    rows = []
    for number, row in enumerate(frame.head(_MOST_ROWS).iter_rows(named=True)):
        named = [f"{name} {_text(row[name])}" for name in label]
        rows.append({
            "key": row[key] if key else number, "error": (row[error] or "") if error else "", "label": ", ".join(named),
            "cells": [{"text": _text(row[name]), "value": _sortable(row[name])} for name in shown],
        })  # fmt: skip
    more = frame.height - len(rows)
    return json.dumps({"caption": caption, "columns": columns, "rows": rows,
                       "more": f"{more:,} more rows" if more > 0 else ""})  # fmt: skip


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _sortable(value: Any) -> int | float | str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no such number
    return value if value is None or isinstance(value, int | float) else str(value)
