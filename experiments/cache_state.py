"""What a cache holds and how a prompt met it, read from its events alone.

events -> CacheState -> tiers, the chunks of a prompt, the prefix tree -> figures
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import plotly.graph_objects as go
import polars as pl

from experiments.plots._style import PALETTE, bar_fill, label_text, new_figure, no_data_figure
from experiments.units import bytes_text
from workbench.events import Event, events_frame

__all__ = ["CacheState", "plot_prefix_tree", "plot_prompt", "read_events", "tiers_text"]

_ARRIVES, _LEAVES = ("store", "promote", "demote"), ("evict", "remove")
_CHAIN = ("hit", "miss", "store", "dedup")
_TREE_CHUNKS = 400  # drawn at most; the first that were met
_GONE = "not stored"
_TIER_STYLES = ((PALETTE[5], ""), (PALETTE[3], "/"), (PALETTE[2], "x"), (PALETTE[7], "."))
_MISS_STYLE = (PALETTE[1], "\\")


def read_events(path: Path) -> pl.DataFrame:
    """The events of a file that an engine writes (`events_path`), as far as they are whole; none if it is not there."""
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    return events_frame(Event(*json.loads(line)) for line in whole.splitlines())


@dataclass
class CacheState:
    """What the events of one cache add up to.

    Args:
        events: As `workbench.events.events_frame` makes them, in order, of one engine.
    """

    events: pl.DataFrame
    where: dict[str, set[str]] = field(default_factory=dict)  # key -> tiers that hold it
    nbytes: dict[str, Counter[str]] = field(default_factory=dict)  # tier -> key -> bytes
    chains: dict[str, list[str]] = field(default_factory=dict)  # request -> keys of its chunks, prefix first
    parent: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    uses: Counter[str] = field(default_factory=Counter)

    def __post_init__(self):
        columns = ("kind", "tier", "request", "key", "start", "tokens", "nbytes", "reason")
        seen: dict[str, dict[str, int]] = {}
        for kind, tier, request, key, start, tokens, nbytes, reason in self.events.select(columns).iter_rows():
            if request:
                seen.setdefault(request, {})  # a lookup comes before what is written for it later
            if not key:
                continue
            self._move(kind, tier, key, nbytes, failed=bool(reason) and kind in _ARRIVES)
            if kind in _CHAIN and request:
                seen[request].setdefault(key, start)
                self.tokens.setdefault(key, tokens)
                self.uses[key] += kind == "hit"
        for request, starts in ((name, starts) for name, starts in seen.items() if starts):
            self.chains[request] = sorted(starts, key=starts.__getitem__)  # stable: equal starts stay in order
            for above, key in zip(["", *self.chains[request]], self.chains[request], strict=False):
                self.parent.setdefault(key, above)

    def _move(self, kind: str, tier: str, key: str, nbytes: int, *, failed: bool) -> None:
        if kind in _ARRIVES and not failed:
            self.where.setdefault(key, set()).add(tier)
            self.nbytes.setdefault(tier, Counter())[key] = nbytes
        elif kind in _LEAVES:
            self.where.get(key, set()).discard(tier)
            self.nbytes.get(tier, Counter()).pop(key, None)

    @property
    def requests(self) -> list[str]:
        """Requests with at least one chunk, in order."""
        return list(self.chains)

    def tiers(self) -> pl.DataFrame:
        """tier, chunks, bytes: what each tier holds now."""
        rows = [(tier, len(held), sum(held.values())) for tier, held in self.nbytes.items()]
        return pl.DataFrame(rows, schema={"tier": pl.String, "chunks": pl.Int64, "bytes": pl.Int64}, orient="row")

    def prompt(self, request: str) -> pl.DataFrame:
        """number, key, tokens, outcome ("hit", "miss" or "stored"), tier, reason: a row a chunk of a request."""
        met = self.events.filter(pl.col("request") == request, pl.col("kind").is_in(["hit", "miss"]))
        outcomes = {
            key: (kind, tier, reason)
            for key, kind, tier, reason in met.select("key", "kind", "tier", "reason").iter_rows()
        }
        rows = [
            (number, key, self.tokens[key], *outcomes.get(key, ("stored", "", "")))
            for number, key in enumerate(self.chains.get(request, []))
        ]
        names = ["number", "key", "tokens", "outcome", "tier", "reason"]
        types = [pl.Int64, pl.String, pl.Int64, *[pl.String] * 3]
        return pl.DataFrame(rows, schema=dict(zip(names, types, strict=True)), orient="row")

    def tree(self) -> pl.DataFrame:
        """key, parent, tokens, uses, tier (fastest that holds it, or "not stored"): every chunk that was met."""
        order = list(self.nbytes)
        rows = [
            (
                key,
                above,
                self.tokens[key],
                self.uses[key],
                next((tier for tier in order if tier in self.where.get(key, ())), _GONE),
            )
            for key, above in self.parent.items()
        ]
        schema = {"key": pl.String, "parent": pl.String, "tokens": pl.Int64, "uses": pl.Int64, "tier": pl.String}
        return pl.DataFrame(rows, schema=schema, orient="row")


def plot_prompt(prompt: pl.DataFrame, request: str, *, template: str = "light", badge: str = "measured") -> go.Figure:
    """The chunks of a prompt from left to right; colour and hatching say hit or miss, the hover says why."""
    title = f"Chunks of request {label_text(request)}"
    if prompt.is_empty():
        return no_data_figure(title, "no request with a chunk yet", template=template, badge=badge)
    hit = prompt.filter(pl.col("outcome") == "hit")["tokens"].sum()
    figure = new_figure(
        title,
        f"{label_text(badge)} · {hit:,} of {prompt['tokens'].sum():,} tokens in whole chunks hit",
        template=template,
        height=210,
    )
    prompt = prompt.with_columns(begin=pl.col("tokens").cum_sum() - pl.col("tokens"))
    styles = _outcome_styles(prompt)
    for (label,), group in prompt.with_columns(label=_label()).group_by("label", maintain_order=True):
        color, pattern = styles[str(label)]
        figure.add_bar(
            base=group["begin"].to_list(),
            x=group["tokens"].to_list(),
            y=[""] * group.height,
            orientation="h",
            name=label_text(label),
            marker={**bar_fill(color, pattern), "line": {"color": "white", "width": 1}},
            hovertext=[
                f"chunk {n}: {label_text(label)}<br>{t} tokens, key {k[:12]}…"
                for n, t, k in group.select("number", "tokens", "key").iter_rows()
            ],
            hoverinfo="text",
        )
    figure.update_xaxes(title="position in the prompt (tokens)")
    figure.update_layout(barmode="overlay", showlegend=True, bargap=0.1)
    return figure


def plot_prefix_tree(tree: pl.DataFrame, *, template: str = "light", badge: str = "measured") -> go.Figure:
    """The prefix tree from left to right; a box is a chunk, as high as the prompts below it are many."""
    if tree.is_empty():
        return no_data_figure("Prefix tree", "no chunk has been met yet", template=template, badge=badge)
    shown = tree.head(_TREE_CHUNKS)  # a parent is always met before its child
    leaves = set(shown["key"]) - set(shown["parent"])
    left_out = f" · {tree.height - shown.height:,} more chunks not drawn" if shown.height < tree.height else ""
    figure = new_figure(
        "Prefix tree",
        f"{label_text(badge)} · {tree.height:,} chunks, {len(leaves):,} ends{left_out}",
        template=template,
        height=420,
    )
    styles = _tier_styles(tree["tier"].unique(maintain_order=True).to_list())
    figure.add_trace(_icicle(shown, leaves, styles))
    for tier, (color, pattern) in styles.items():  # an icicle has no legend of its own
        figure.add_bar(x=[None], y=[None], name=label_text(tier), marker=bar_fill(color, pattern))
    figure.update_xaxes(visible=False).update_yaxes(visible=False)
    figure.update_layout(showlegend=True, margin_b=50)
    return figure


def _icicle(shown: pl.DataFrame, leaves: set[str], styles: dict[str, tuple[str, str]]) -> go.Icicle:
    keys, tiers = shown["key"].to_list(), shown["tier"].to_list()
    told = shown.select("tier", "tokens", "uses").iter_rows()
    hatching = {"fgcolor": "white", "solidity": 0.15, "size": 7}
    return go.Icicle(
        ids=["all", *keys],
        parents=["", *(above or "all" for above in shown["parent"])],
        labels=["prompts", *(key[:6] for key in keys)],
        values=[0, *(int(key in leaves) for key in keys)],
        branchvalues="remainder",
        tiling={"orientation": "h", "pad": 1},
        marker={
            "colors": ["rgba(128,128,128,0.35)", *(styles[tier][0] for tier in tiers)],
            "pattern": {"shape": ["", *(styles[tier][1] for tier in tiers)], **hatching},
        },
        hovertext=["", *(f"{label_text(tier)}<br>{tokens} tokens, {uses} hits" for tier, tokens, uses in told)],
        hoverinfo="text",
        textinfo="label",
        leaf={"opacity": 1},
    )


def tiers_text(tiers: pl.DataFrame) -> str:
    """What each tier holds, in words."""
    parts = [f"{tier}: {chunks:,} chunks, {bytes_text(nbytes)}" for tier, chunks, nbytes in tiers.iter_rows()]
    return "; ".join(parts) or "nothing is stored"


def _label() -> pl.Expr:
    hit = pl.format("hit in {}", pl.col("tier"))
    return (
        pl.when(pl.col("outcome") == "hit")
        .then(hit)
        .when(pl.col("outcome") == "miss")
        .then(pl.format("miss: {}", pl.col("reason")))
        .otherwise(pl.lit("stored, never looked up"))
    )


def _outcome_styles(prompt: pl.DataFrame) -> dict[str, tuple[str, str]]:
    labels = prompt.select(label=_label())["label"].unique(maintain_order=True).to_list()
    tiers = iter(_TIER_STYLES)
    misses = iter([_MISS_STYLE, (PALETTE[6], "|"), (PALETTE[8], "-"), (PALETTE[4], "+")] * len(labels))
    return {label: next(tiers) if label.startswith("hit") else next(misses) for label in labels}


def _tier_styles(tiers: list[str]) -> dict[str, tuple[str, str]]:
    stored = [tier for tier in tiers if tier != _GONE]
    styles = {tier: _TIER_STYLES[number % len(_TIER_STYLES)] for number, tier in enumerate(stored)}
    return styles | ({_GONE: ("#c9ccd1", "")} if _GONE in tiers else {})
