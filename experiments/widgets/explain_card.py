"""ExplainCard: "I turned the cache on and time to first token did not fall"."""

from html import escape
from pathlib import Path

import ipywidgets as widgets

from experiments.explain_run import NO_CAUSE, ArmExplanation, RunExplanation, explain_run
from experiments.runs import Run
from experiments.widgets import markup

__all__ = ["ExplainCard"]

_MARKS = {
    "cause": ("●", "#D55E00", "this is it"),
    "fine": ("✓", "var(--jp-success-color1,#00704f)", "not this"),
    "unknown": ("?", "var(--jp-ui-font-color2,#5b6470)", "cannot tell"),
}


class ExplainCard(widgets.HTML):
    """What stands between a run's hits and its time to first token.

    Args:
        run: A run or its folder.
        arm: One arm; by default every one that reuses.
    """

    def __init__(self, run: Run | str | Path, *, arm: str | None = None):
        self.explanation = explain_run(run, arm=arm)
        super().__init__(card_html(self.explanation), layout={"width": "100%"})


def card_html(explanation: RunExplanation) -> str:
    """The card as HTML; every check stands in it, causes first."""
    title = markup.heading(
        "Why did TTFT not fall?", f"Run {explanation.run_id}: every known cause, with its number.", kind="measured"
    )
    return title + "".join(map(_arm_html, explanation.arms))


def _arm_html(arm: ArmExplanation) -> str:
    rest = [finding for finding in arm.findings if finding.state != "cause"]
    rows = "".join(_row(*_MARKS[f.state], f.name, f.number, f.mend) for f in (*arm.causes, *rest))
    none = "" if arm.causes else f"<div>{markup.quiet(NO_CAUSE)}</div>"
    return (
        f'<section style="margin:10px 0;line-height:1.45;color:var(--jp-ui-font-color1,#1c2024)">'
        f"<b>{escape(arm.label)}</b>: {escape(arm.outcome)}{none}"
        f'<table style="font-size:13px;border-collapse:collapse;margin-top:4px">{rows}</table></section>'
    )


def _row(mark: str, color: str, verdict: str, name: str, number: str, mend: str) -> str:
    cell = (
        "padding:3px 14px 3px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--jp-border-color2,#ddd)"
    )
    weight = "font-weight:600" if mend else ""
    advice = f"<br><b>Mend:</b> {escape(mend)}" if mend else ""
    return (
        f'<tr><td style="{cell};white-space:nowrap"><span aria-hidden="true" style="color:{color}">{mark}</span> '
        f"{verdict}</td>"
        f'<th scope="row" style="{cell};{weight or "font-weight:400"}">{escape(name)}</th>'
        f'<td style="{cell}">{escape(number)}{advice}</td></tr>'
    )
