"""Why did time to first token not fall? A stored run's requests and events, looked at cause by cause.

    run -> facts of each arm that reuses -> findings, each with its number and what mends it -> RunExplanation

    print(explain_run(run))                 # the causes, worst first
    explain_run(run, arm="memory").frame()  # every check, those that found nothing too

A check that lacks what it needs says so and does not guess.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import polars as pl

from experiments.intervals import Interval
from experiments.paired import ratio_interval
from experiments.runs import Run
from experiments.summary import NO_REUSE, PREFIX_CACHE, answered, arm_labels, paired_requests
from experiments.units import seconds_text, share_text, times_text
from workbench.errors import UnknownNameError

__all__ = ["ArmExplanation", "Finding", "RunExplanation", "explain_run"]

State = Literal["cause", "fine", "unknown"]
_LARGE = 0.5  # the share from which something counts as the cause
_FEW = 0.1  # the share of a prompt up to which what it has in common with others is no repetition
_SMALLER = "partial_hits=True, which also finds parts of a chunk, or chunk_tokens below {}."
NO_CAUSE = "None of the known causes stands in its way."
_STATE_TEXT = {"cause": "this is it", "fine": "not this", "unknown": "cannot tell"}


@dataclass(frozen=True)
class Finding:
    """One possible cause.

    Args:
        name: The cause, in a few words.
        state: "cause", "fine" or "unknown".
        weight: How large a part it may explain, 0 to 1; sorts the causes.
        number: What was counted.
        mend: The setting to change, "" where there is nothing to mend.
    """

    name: str
    state: State
    weight: float
    number: str
    mend: str


@dataclass(frozen=True)
class ArmExplanation:
    """One arm: what reuse did to its TTFT, and every check."""

    arm: str
    label: str
    outcome: str
    findings: tuple[Finding, ...]

    @property
    def causes(self) -> list[Finding]:
        """Those that were found, the largest first."""
        return sorted((f for f in self.findings if f.state == "cause"), key=lambda f: -f.weight)

    def __str__(self) -> str:
        lines = [f"{self.label}: {self.outcome}"]
        lines += [f"  - {f.name}: {f.number}. {f.mend}" for f in self.causes] or [f"  {NO_CAUSE}"]
        return "\n".join(lines)


@dataclass(frozen=True)
class RunExplanation:
    """Every arm of a run that reuses something."""

    run_id: str
    arms: tuple[ArmExplanation, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.arms)) or "No arm of this run reuses anything."

    def frame(self) -> pl.DataFrame:
        """arm, cause, verdict, number, mend: every check of every arm."""
        rows = [(arm.arm, f.name, _STATE_TEXT[f.state], f.number, f.mend) for arm in self.arms for f in arm.findings]
        return pl.DataFrame(
            rows, schema=dict.fromkeys(["arm", "cause", "verdict", "number", "mend"], pl.String), orient="row"
        )


def explain_run(run: Run | str | Path, *, arm: str | None = None) -> RunExplanation:
    """Say why the arms of a run are as fast as they are.

    Args:
        run: A run or its folder.
        arm: One arm; by default every one with an engine, or else vLLM's prefix cache.

    Raises:
        UnknownNameError: The run has no such arm.
        InvalidInputError: The folder holds no run.
    """
    run = run if isinstance(run, Run) else Run(Path(run))
    labels = {name: label for name, label in arm_labels(run.requests).items() if name != NO_REUSE}
    if arm is not None and arm not in labels:
        raise UnknownNameError("arm that reuses", arm, labels)
    engines = [name for name in labels if name != PREFIX_CACHE]
    wanted = {name: labels[name] for name in ([arm] if arm is not None else engines or labels)}
    return RunExplanation(run.run_id, tuple(_explain(_Facts(run, name, label)) for name, label in wanted.items()))


@dataclass
class _Facts:
    """What the checks of one arm read, each computed once."""

    run: Run
    arm: str
    label: str

    @cached_property
    def requests(self) -> pl.DataFrame:
        return answered(self.run.requests).filter(pl.col("arm") == self.arm)

    @cached_property
    def events(self) -> pl.DataFrame:
        return self.run.events.filter(pl.col("arm") == self.arm)

    @cached_property
    def repeated(self) -> pl.DataFrame:
        """The requests that an unlimited cache would find more for than a few words that many prompts begin with."""
        return self.requests.filter(pl.col("expected_hit_tokens").fill_null(0) > _FEW * pl.col("prompt_tokens"))

    @cached_property
    def chunk_tokens(self) -> int | None:
        sizes = self.events.filter(pl.col("kind").is_in(["hit", "miss", "store"]))["tokens"]
        return None if sizes.is_empty() else int(sizes.max())  # type: ignore[arg-type]

    @cached_property
    def prefill_seconds(self) -> float | None:
        """Seconds of prefill a token, of requests that computed everything."""
        cold = answered(self.run.requests).filter(pl.col("cached_tokens") == 0, pl.col("prefill_s") > 0)
        preferred = cold.filter(pl.col("arm") == NO_REUSE)
        rows = preferred if preferred.height else cold.filter(pl.col("arm") == self.arm)
        return None if rows.is_empty() else _quotient(rows, "prefill_s", "prompt_tokens")

    @cached_property
    def load_seconds(self) -> float | None:
        """Seconds of load a token, of requests that loaded something."""
        loaded = self.requests.filter(pl.col("load_s") > 0, pl.col("external_hit_tokens") > 0)
        return None if loaded.is_empty() else _quotient(loaded, "load_s", "external_hit_tokens")

    @cached_property
    def speedup(self) -> Interval | None:
        """TTFT without reuse / with it, over requests that could reuse something; None without a baseline."""
        pairs = paired_requests(self.run.requests).filter(pl.col("arm") == self.arm)
        pairs = pairs.join(self.repeated.select("request_id", "repeat"), on=["request_id", "repeat"], how="semi")
        return ratio_interval(pairs["baseline_ttft_s"], pairs["ttft_s"]) if pairs.height else None

    def tokens_of(self, kind: str) -> dict[str, int]:
        """Tokens of an event kind, by tier."""
        good = self.events.filter(pl.col("kind") == kind, pl.col("reason") == "")
        return dict(good.group_by("tier", maintain_order=True).agg(pl.col("tokens").sum()).iter_rows())

    @cached_property
    def tokens_evicted_first(self) -> int:
        """Tokens of missed chunks that had been there: evicted from some tier and not stored since."""
        tokens, gone = 0, set()
        for kind, key, size in self.events.select("kind", "key", "tokens").iter_rows():
            if kind in ("evict", "drop"):
                gone.add(key)
            elif kind in ("store", "promote", "hit"):
                gone.discard(key)
            elif kind == "miss" and key in gone:
                tokens += size
        return tokens

    @cached_property
    def tokens_behind(self) -> int:
        """Tokens of chunks that are there, of no use behind one that is not."""
        return int(self.events.filter(pl.col("kind") == "miss", pl.col("reason") == "prefix missing")["tokens"].sum())


def _explain(facts: _Facts) -> ArmExplanation:
    return ArmExplanation(facts.arm, facts.label, _outcome(facts), tuple(check(facts) for check in _CHECKS))


def _outcome(facts: _Facts) -> str:
    hit, possible = int(facts.requests["cached_tokens"].sum()), int(facts.requests["expected_hit_tokens"].sum())
    tiers = ", ".join(f"{tokens:,} from {tier}" for tier, tokens in facts.tokens_of("load").items())
    reused = f"{hit:,} tokens reused of {possible:,} possible{f' ({tiers})' if tiers else ''}"
    if facts.speedup is None:
        return f"{reused}; nothing to compare its TTFT with (run it beside the arm {NO_REUSE!r})"
    ratio = facts.speedup
    spread = f" (95 % interval {times_text(ratio.low)} to {times_text(ratio.high)})" if ratio.n > 1 else ""
    seen = "sooner" if ratio.low > 1 else "later" if ratio.high < 1 else "no difference is shown"
    return (
        f"repeated prompts: {seen}. TTFT without reuse is {times_text(ratio.mean)} times that with it{spread}, "
        f"n = {ratio.n}; {reused}"
    )


# ---------------------------------------------------------------- the checks, in the order in which to think of them


def _only_cold(facts: _Facts) -> Finding:
    """Every prompt is new: there is nothing to reuse, and what is measured is the cost of storing."""
    total, cold = facts.requests.height, facts.requests.height - facts.repeated.height
    share = cold / total if total else 1.0
    number = f"{cold} of {total} measured requests are the first with their text"
    mend = "Ask about the same documents again (questions=2 or more), or send the trace you serve."
    return _finding("only cold requests measured", share > 0.9, share, number, mend)


def _short_prompts(facts: _Facts) -> Finding:
    """Where only whole chunks are stored, a shorter prompt finds nothing."""
    name = "prompt too short"
    if facts.chunk_tokens is None:
        return _unknown(name, "no event tells the chunk size")
    short = facts.requests.filter(pl.col("prompt_tokens") <= facts.chunk_tokens, pl.col("cached_tokens") == 0).height
    share = short / max(1, facts.requests.height)
    number = f"{short} of {facts.requests.height} prompts found nothing and are no longer than a chunk of "
    number += f"{facts.chunk_tokens} tokens"
    return _finding(name, share >= _LARGE, share, number, _SMALLER.format(facts.chunk_tokens))


def _chunk_too_large(facts: _Facts) -> Finding:
    """vLLM's own cache shares more of the same prompts, because its blocks are smaller than a chunk."""
    name = "chunk larger than the shared prefix"
    finer = answered(facts.run.requests).filter(pl.col("arm") == PREFIX_CACHE)
    pairs = facts.requests.join(
        finer.select("request_id", "repeat", finer="cached_tokens"), on=["request_id", "repeat"]
    )
    if facts.arm == PREFIX_CACHE or pairs.is_empty() or facts.chunk_tokens is None:
        return _unknown(name, f"needs the arm {PREFIX_CACHE!r} beside it, whose blocks are smaller")
    lost = pairs.filter(pl.col("finer") > pl.col("expected_hit_tokens"))
    gap = int((lost["finer"] - lost["expected_hit_tokens"]).sum())
    share = gap / max(1, int(pairs["finer"].sum()))
    number = f"{gap:,} shared tokens in {lost.height} requests do not fill a chunk of {facts.chunk_tokens} tokens"
    return _finding(name, share >= _LARGE, share, number, _SMALLER.format(facts.chunk_tokens))


def _own_cache_hits(facts: _Facts) -> Finding:
    """vLLM's prefix cache answers first; the engine only sees what that one lacks."""
    name = "vLLM's own cache already hits"
    if facts.arm == PREFIX_CACHE:
        return _finding(name, False, 0.0, "it is the arm's own cache", "")
    local, total = int(facts.requests["local_hit_tokens"].sum()), int(facts.requests["cached_tokens"].sum())
    share = local / total if total else 0.0
    number = f"{local:,} of {total:,} reused tokens came from vLLM's prefix cache"
    mend = "Measure what it cannot keep: a restart, more prompts than its memory holds, or enable_prefix_caching=False."
    return _finding(name, share >= _LARGE, share, number, mend)


def _slow_load(facts: _Facts) -> Finding:
    """Loading a token costs as much as computing it."""
    name = "load slower than prefill"
    load, prefill = facts.load_seconds, facts.prefill_seconds
    if load is None or prefill is None:
        return _unknown(name, "nothing was loaded" if load is None else "no request computed its whole prompt")
    ratio = load / prefill
    number = (
        f"a token takes {seconds_text(load)} to load and {seconds_text(prefill)} to compute: {share_text(ratio)} of it"
    )
    mend = "A faster tier (memory_bytes up, a local disk_path), a codec that makes KV smaller, or larger chunk_tokens."
    return _finding(name, ratio >= _LARGE, min(1.0, ratio), number, mend)


def _evicted_first(facts: _Facts) -> Finding:
    """A chunk was there and had to go before it was asked for again."""
    name = "eviction before reuse"
    if facts.events.is_empty():
        return _unknown(name, "no events of this arm")
    lost, behind, found = facts.tokens_evicted_first, facts.tokens_behind, sum(facts.tokens_of("hit").values())
    share = (lost + behind) / max(1, lost + behind + found)
    evictions = facts.events.filter(pl.col("kind") == "evict").height
    number = (
        f"{lost:,} tokens were missed because they had been evicted, {behind:,} more lie behind those; "
        f"{evictions:,} evictions"
    )
    mend = "memory_bytes up, a tier below it (disk_path), or another policy: `kvworkbench replay` shows which."
    return _finding(name, lost > 0 and share >= 0.1, share, number, mend)


def _other_keys(facts: _Facts) -> Finding:
    """The text was seen before, nothing was evicted, and still the first chunk is unknown."""
    name = "keys do not match"
    if facts.events.is_empty() or facts.repeated.is_empty():
        return _unknown(name, "no events of this arm" if facts.events.is_empty() else "no prompt was repeated")
    nothing = facts.repeated.filter(pl.col("cached_tokens") == 0).height
    explained = facts.tokens_evicted_first > 0 or not facts.tokens_of("store")
    share = nothing / facts.repeated.height
    number = f"{nothing} of {facts.repeated.height} repeated prompts found nothing"
    mend = (
        "Salt, LoRA adapter, model revision, dtype and chunk_tokens are part of a key: keep them equal, also across "
        "processes. `engine.explain(tokens)` says where two prompts part."
    )
    return _finding(name, share >= _LARGE and not explained, share, number, mend)


def _not_stored(facts: _Facts) -> Finding:
    """Stores or loads failed, or nothing was stored at all."""
    name = "stores or loads failed"
    if facts.events.is_empty():
        return _unknown(name, "no events of this arm")
    counted = facts.events.filter(pl.col("kind").is_in(["load", "store", "drop"]), pl.col("reason") != "")
    counted = (
        counted.filter(pl.col("reason") != "evicted").group_by("kind", "reason").len().sort("len", descending=True)
    )
    total = facts.events.filter(pl.col("kind").is_in(["load", "store"])).height
    failed = int(counted["len"].sum())
    share = failed / max(1, total)
    reasons = "; ".join(f"{n} x {kind}: {reason}" for kind, reason, n in counted.head(3).iter_rows())
    number = f"{failed} of {total} stores and loads failed{f' ({reasons})' if reasons else ''}"
    return _finding(
        name, share >= 0.05 or total == 0, share if total else 1.0, number, "Look at the tier: `kvworkbench doctor`."
    )


def _queueing(facts: _Facts) -> Finding:
    """The request waited for its turn, which no cache shortens."""
    rows = facts.requests.filter(pl.col("queue_s").is_not_null())
    if rows.is_empty():
        return _unknown("waiting for a turn", "no queue times")
    share = _quotient(rows, "queue_s", "ttft_s")
    number = f"{share_text(share)} of TTFT is the wait for the scheduler"
    return _finding("waiting for a turn", share >= _LARGE, share, number, "Fewer requests at a time, or more engines.")


_CHECKS: tuple[Callable[[_Facts], Finding], ...] = (
    _only_cold, _short_prompts, _chunk_too_large, _other_keys, _not_stored, _evicted_first, _own_cache_hits, _slow_load,
    _queueing,
)  # fmt: skip


def _quotient(rows: pl.DataFrame, part: str, whole: str) -> float:
    return float(rows[part].to_numpy().sum() / rows[whole].to_numpy().sum())


def _finding(name: str, is_cause: bool, weight: float, number: str, mend: str) -> Finding:
    return Finding(name, "cause" if is_cause else "fine", weight, number, mend if is_cause else "")


def _unknown(name: str, why: str) -> Finding:
    return Finding(name, "unknown", 0.0, why, "")
