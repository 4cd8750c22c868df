"""The cache engine: lookup, store, retrieve. Read this file first.

    store     tokens -> chunks -> room (control) -> gather (kernel) -> arena -> slower tiers -> resident
    retrieve  tokens -> chunks -> find (control) -> arena or slower tier -> checked -> scatter (kernel) -> pages

`CacheEngine` joins the control plane, which decides, and the data plane, which moves, by a direct call. Under vLLM the
same two planes live in different processes, joined by the connector's messages (workbench/connectors/vllm.py).
"""

import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import astuple, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kernels.pages import PageTable
from workbench.chunks import Boundaries, ChunkChain, ChunkScope
from workbench.codecs import resolve_codec
from workbench.config import CacheConfig
from workbench.control import ControlPlane, Deadlines
from workbench.errors import InvalidInputError, LayoutError
from workbench.events import Event, Recorder
from workbench.explain import Explanation, explain_chain
from workbench.layout import Identity, KVLayout
from workbench.orders import Done, Load, Order, Store
from workbench.survey import Survey
from workbench.tiers.base import Tier, TierIndex, TierUse
from workbench.tiers.encoded import EncodedTier
from workbench.tiers.memory import MemoryTier
from workbench.tiers.presence import Presence
from workbench.transfers import DataPlane
from workbench.turns import Turns

if TYPE_CHECKING:
    from workbench.metrics import EngineMetrics, Snapshot

__all__ = ["CacheEngine", "EventFile", "HitTokens", "Pin", "build_control", "build_data", "encoded_identity",
           "survey_tiers"]  # fmt: skip

_START_SECONDS = 1.0  # that a start waits for a look through a directory


def build_control(identity: Identity, config: CacheConfig, tiers: Sequence[Tier], *, record: Recorder | None = None,
                  recompute_seconds: Callable[[int, int], float] = lambda a, b: 0.0) -> ControlPlane:  # fmt: skip
    """The control plane that a configuration describes. Takes over nothing yet: see `survey_tiers`.

    Args:
        identity: What the KV is.
        config: Settings.
        tiers: The tiers below memory, from `build_tiers`; asked about sizes, and shared ones about their contents.
        record: Takes the events.
        recompute_seconds: See `ControlPlane`.
    """
    layout, indexes, shared = identity.layout, [], {}
    arena = bool(memory_slots(layout, config))
    if arena:
        indexes.append(TierIndex("memory", 0, int(config.memory_bytes), chunk_nbytes=layout.chunk_nbytes,
                                 policy=config.policy))  # fmt: skip
    for level, tier in enumerate(tiers, len(indexes)):
        nbytes = tier.nbytes_of(layout.chunk_nbytes, layout.chunk_tokens)
        capacity = int(getattr(config, f"{tier.name}_bytes"))
        policy = config.policy if tier.name == "memory" else getattr(config, f"{tier.name}_policy")
        if capacity < nbytes:
            raise InvalidInputError(f"{tier.name}_bytes is {capacity}; one chunk takes {nbytes} bytes there")
        indexes.append(TierIndex(tier.name, level, capacity, chunk_nbytes=nbytes, policy=policy))
        if tier.shared:
            shared[level] = Presence(tier)
    deadlines = Deadlines(config.deadline_seconds, config.request_deadline_seconds)
    return ControlPlane(layout, indexes, arena=arena, write=config.write, shared=shared, record=record,
                        recompute_seconds=recompute_seconds, deadlines=deadlines,
                        partial_hits=config.partial_hits)  # fmt: skip


def build_data(identity: Identity, config: CacheConfig, *, threads: int = 2) -> DataPlane:
    """The data plane that a configuration describes."""
    layout = identity.layout
    return DataPlane(
        layout,
        memory_slots=memory_slots(layout, config),
        tiers=build_tiers(identity, config),
        staging_slots=max(1, int(config.staging_bytes) // layout.chunk_nbytes),
        threads=threads,
        load_seconds=config.load_deadline_seconds,
        verify=config.verify,
    )


def survey_tiers(tiers: Sequence[Tier], control: ControlPlane, config: CacheConfig, *, in_turn: Callable,
                 carry_out: Callable[[Sequence[Order]], None]) -> list[Survey]:  # fmt: skip
    """Take over what tiers that survive a restart hold, and look after it from then on; see `Survey`.

    A small directory is taken over when this returns; a large one goes on in the background.
    """
    first = len(control.tiers) - len(tiers)
    surveys = [
        Survey(tier, level, control, in_turn=in_turn, carry_out=carry_out, every_seconds=config.disk_survey_seconds)
        for level, tier in enumerate(tiers, first)
        if tier.survives
    ]
    deadline = time.monotonic() + _START_SECONDS
    for survey in surveys:
        survey.wait(max(0.0, deadline - time.monotonic()))
    return surveys


def encoded_identity(identity: Identity, config: CacheConfig) -> Identity:
    """The identity of KV that may have gone through the configured codecs: nobody else's chunks, and its own alone."""
    memory, below = (repr(resolve_codec(spec)) for spec in (config.memory_codec, config.codec))
    if not config.memory_bytes:
        memory = "raw"
    if memory == below == "raw":
        return identity
    given = "" if identity.codec == "raw" else f"{identity.codec}, "
    return replace(identity, codec=f"{given}memory {memory}, below {below}")


def memory_slots(layout: KVLayout, config: CacheConfig) -> int:
    """Chunks that the arena holds; 0 without a memory tier, or when its chunks are encoded.

    Raises:
        InvalidInputError: There is a budget, but not even one chunk fits, or there is no tier at all.
    """
    if config.memory_bytes and config.memory_codec != "raw":
        if config.write == "back":
            raise InvalidInputError('write="back" writes down what the arena evicts; with memory_codec '
                                    f'{config.memory_codec!r} there is none. Use write="through"')  # fmt: skip
        return 0
    slots = int(config.memory_bytes) // layout.chunk_nbytes
    if config.memory_bytes and not slots:
        raise InvalidInputError(
            f"memory_bytes is {int(config.memory_bytes)}; one chunk of {layout.chunk_tokens} tokens takes "
            f"{layout.chunk_nbytes} bytes. Give at least that, or 0 for no memory tier"
        )
    if not slots and not (config.disk_path or config.redis_url or config.object_store_url):
        raise InvalidInputError("no tier: memory_bytes is 0 and there is no disk_path, redis_url or object_store_url")
    return slots


def build_tiers(identity: Identity, config: CacheConfig) -> list[Tier]:
    """The tiers below the arena, fastest first: those with a codec encode and decode."""
    layout, below = identity.layout, resolve_codec(config.codec)
    tiers = [tier if repr(below) == "raw" else EncodedTier(tier, below, layout) for tier in _media(identity, config)]
    if config.memory_bytes and config.memory_codec != "raw":
        tiers.insert(0, EncodedTier(MemoryTier(), resolve_codec(config.memory_codec), layout))
    return tiers


def _media(identity: Identity, config: CacheConfig) -> list[Tier]:
    tiers: list[Tier] = []
    if config.disk_path is not None:
        from workbench.tiers.disk import DiskTier

        tiers.append(DiskTier(config.disk_path, identity=identity.digest, durable=config.disk_durable))
    if config.redis_url is not None:
        from workbench.tiers.redis import RedisTier
        from workbench.tiers.sealed import seal_from_environment

        tiers.append(RedisTier(
            config.redis_url, identity=identity.digest, password_file=config.redis_password_file,
            ca_file=config.redis_ca_file, timeout_seconds=config.redis_timeout_seconds,
            expire_seconds=config.redis_expire_seconds, seal=seal_from_environment(),
        ))  # fmt: skip
    if config.object_store_url is not None:
        from workbench.tiers.object_store import ObjectStoreTier
        from workbench.tiers.sealed import seal_from_environment

        tiers.append(ObjectStoreTier(
            config.object_store_url, identity=identity.digest, options=config.object_store_options,
            client_options=config.object_store_client_options, timeout_seconds=config.object_store_timeout_seconds,
            seal=seal_from_environment(),
        ))  # fmt: skip
    return tiers


class EventFile:
    """Writes each event as one line of JSON. Flushed by `flush`, so that a reader sees whole steps."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")

    def __call__(self, event: Event) -> None:
        self._file.write(json.dumps(event) + "\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class HitTokens(int):
    """How many leading tokens were retrieved: an integer that also knows the prompt's length."""

    def __new__(cls, hit: int, prompt: int):
        number = super().__new__(cls, hit)
        number.prompt_tokens = prompt
        return number

    @property
    def mask(self) -> np.ndarray:
        """bool[prompt tokens]: true where the token's KV was retrieved."""
        return np.arange(self.prompt_tokens) < int(self)


@dataclass
class Pin:
    """A prefix that is kept from eviction."""

    hit_tokens: int
    holds: Sequence[tuple[TierIndex, int]]
    released: bool = False


def _in_turn(method):
    """Run in the engine's own thread, call after call: an interrupt of the caller leaves no count half-changed."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        if not self.is_open:
            return method(self, *args, **kwargs)
        return self._turns.run(lambda: method(self, *args, **kwargs))

    return call


class CacheEngine:
    """Keeps chunks of KV in tiers and gives back the longest stored prefix.

    Args:
        identity: What the KV is; see `workbench.layout.Identity`.
        config: Settings; or give them as keywords: `CacheEngine(identity, memory_bytes="2GiB")`.
        record: Takes the events; by default a `Recorder` of its own.

    The engine may be called from several threads; calls take turns. Use it as a context manager or call `close`. Once
    closed, and in a child that a fork made, it holds nothing: it finds and stores 0 tokens.
    """

    def __init__(self, identity: Identity, config: CacheConfig | None = None, *, record: Recorder | None = None,
                 **settings):  # fmt: skip
        self.config = config if config is not None else CacheConfig(**{"chunk_tokens": identity.layout.chunk_tokens,
                                                                       **settings})  # fmt: skip
        self.identity = identity = encoded_identity(identity, self.config)
        if self.config.chunk_tokens != identity.layout.chunk_tokens:
            raise InvalidInputError(
                f"chunk_tokens is {self.config.chunk_tokens} in the settings and {identity.layout.chunk_tokens} "
                f"in the layout; they must agree"
            )
        layout, config = identity.layout, self.config
        self._boundaries = Boundaries.of(layout, config.boundary_tokens, config.min_chunk_tokens)
        self._event_file = EventFile(self.config.events_path) if record is None and self.config.events_path else None
        self.record = record if record is not None else Recorder(sink=self._event_file)
        self.data = build_data(identity, self.config)  # first: it knows whether the machine has the memory
        try:
            self.control = build_control(identity, self.config, self.data.tiers, record=self.record)
        except Exception:
            self.data.close()
            raise
        self._digest = identity.digest
        self._adapters: dict[str, set[tuple[str, ...]]] = {}  # salt -> adapters that chunks were stored for
        self._serial = 0
        self._process = os.getpid()
        self._closed = False
        self._turns = Turns("kv-engine")
        self._surveys = survey_tiers(self.data.tiers, self.control, self.config, in_turn=self._turns.run,
                                     carry_out=self.data.run)  # fmt: skip

    # ---------------------------------------------------------------- the path

    def lookup(self, tokens: Sequence[int], *, scope: ChunkScope = ChunkScope()) -> int:
        """How many leading tokens could be retrieved now. Changes nothing.

        With nothing to take note of it only reads, so it is answered in the caller's thread and waits for no turn:
        what another call changes meanwhile makes it at most a nomination that the load will not confirm.
        """
        chain = self._chain(tokens, scope)
        if not self.is_open:
            return 0
        if self.control.asks_others or self.data.has_report:
            return self._turns.run(lambda: self._lookup(chain))
        return self.control.lookup(chain)

    def _lookup(self, chain: ChunkChain) -> int:
        self._settle_report()
        return self.control.lookup(chain) if self.is_open else 0

    @_in_turn
    def store(self, tokens: Sequence[int], pages: PageTable, *, blocks: Sequence[int],
              scope: ChunkScope = ChunkScope(), partial: bool | None = None) -> int:  # fmt: skip
        """Save the KV of every chunk that is not saved yet.

        Args:
            tokens: Token ids from the start of the prompt.
            pages: The paged KV cache that holds their KV.
            blocks: Block table: block i holds tokens i*block_size to (i+1)*block_size.
            scope: Salt, LoRA and multimodal inputs of the request.
            partial: Save the tail behind the last whole chunk, too, to the last token. By default as in the settings.

        Returns:
            Tokens whose KV this call took over from the pages: into the memory tier, or, without room there, on its
            way to the next one (see `flush`).

        Raises:
            InvalidInputError: A token id or block id that cannot be, or fewer blocks than the tokens need.
            LayoutError: Pages of another shape than the layout says.
        """
        chain = self._chain(tokens, scope)
        tail = self.config.stores_tails if partial is None else partial
        self._check_pages(pages, blocks, chain.num_tokens if tail else chain.end(len(chain)))
        if not self.is_open:
            return 0
        if scope.lora:
            self._adapters.setdefault(scope.salt, set()).add(tuple(scope.lora))
        request = self._begin(chain, reuse_tokens=None)
        try:
            orders = self.control.plan_stores(request, chain.num_tokens, blocks, tail=tail)
            report = self._carry_out(orders, pages)
        finally:
            self._end(request)
        failed = {(done.key, done.level) for done in report if done.reason not in ("", "dedup")}
        return sum(
            order.chunk.num_tokens
            for order in orders
            if isinstance(order, Store) and (order.chunk.key, order.first_level) not in failed
        )

    @_in_turn
    def retrieve(self, tokens: Sequence[int], pages: PageTable, *, blocks: Sequence[int],
                 scope: ChunkScope = ChunkScope()) -> "HitTokens":  # fmt: skip
        """Fill blocks with the longest saved prefix; returns its length in tokens: whole chunks and perhaps a tail, or
        what another prompt's chunk begins with.

        Blocks, and slots of the last block, beyond the returned length may have been written to. A chunk that turns
        out damaged ends the prefix. The returned number's `mask` says the same token by token.
        """
        chain = self._chain(tokens, scope)
        hit = self._lookup(chain)
        self._check_pages(pages, blocks, hit)
        return HitTokens(self._load(chain, hit, blocks, pages) if hit else self._miss(chain), chain.num_tokens)

    @_in_turn
    def prefetch(self, tokens: Sequence[int], *, scope: ChunkScope = ChunkScope()) -> int:
        """Bring the longest saved prefix up into the memory tier before it is asked for.

        Returns:
            Leading tokens that lie in the memory tier afterwards; 0 without a memory tier. Counts as no lookup.
        """
        chain = self._chain(tokens, scope)
        hit = self._lookup(chain)
        if not hit or self.control.memory is None:
            return 0
        nowhere = [-1] * self.identity.layout.blocks_of(hit)
        self._load(chain, hit, nowhere, self.data.any_pages(), counted=False)
        return self.control.in_memory(chain, hit)

    @_in_turn
    def pin(self, tokens: Sequence[int], *, scope: ChunkScope = ChunkScope()) -> "Pin":
        """Keep the longest saved prefix from eviction, in every tier that has it, until `unpin`."""
        chain = self._chain(tokens, scope)
        hit = self._lookup(chain)
        return Pin(hit, self.control.hold_prefix(chain, hit) if hit else ())

    @_in_turn
    def unpin(self, pin: "Pin") -> None:
        """Give back what `pin` held; a second time is a mistake of the caller's, and an InvalidInputError."""
        if pin.released:
            raise InvalidInputError("this pin was given back already")
        pin.released = True
        if self.is_open:
            self.control.release_prefix(pin.holds)

    @_in_turn
    def explain(self, tokens: Sequence[int], *, scope: ChunkScope = ChunkScope()) -> Explanation:
        """Why so many tokens would hit, and no more."""
        chain = self._chain(tokens, scope)
        self._settle_report()
        return explain_chain(self.control, chain)

    # ---------------------------------------------------------------- the rest

    def clear(self, namespace: str | ChunkScope | None = None) -> None:
        """Remove every chunk, or those of one namespace, from every tier. What a pin or a running call holds stays.

        Args:
            namespace: A salt: what was stored under it, for the base model and for each adapter that this engine has
                stored for since it started. A scope: what was stored under exactly this salt and adapter.

        A tier that others share is cleared of what this engine knows to be there.
        """
        for survey in self._surveys:
            survey.wait(self.config.deadline_seconds)  # what is not taken over yet would be left out
        self._clear(namespace)

    @_in_turn
    def _clear(self, namespace: str | ChunkScope | None) -> None:
        if not self.is_open:
            return
        self.data.flush()
        self._settle_report()
        self.data.run(self.control.clear(None if namespace is None else self._roots(namespace)))
        self.data.flush()

    def _roots(self, namespace: str | ChunkScope) -> set[bytes]:
        if isinstance(namespace, ChunkScope):
            return {namespace.root_under(self._digest)}
        if not isinstance(namespace, str):
            raise InvalidInputError(f"a namespace is a salt or a ChunkScope; got {type(namespace).__name__}")
        adapters = {(), *self._adapters.get(namespace, ())}
        return {ChunkScope(namespace, lora).root_under(self._digest) for lora in adapters}

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until what was stored has reached every tier; False when the time ran out first."""
        if not self.is_open:
            return True
        self.tiers()  # a call whose caller was interrupted may still have its turn
        done = self.data.flush(timeout)
        self.tiers()
        return done

    @_in_turn
    def tiers(self) -> list[TierUse]:
        """How full each tier is now."""
        return self._tier_uses()

    def _tier_uses(self) -> list[TierUse]:
        self._settle_report()
        return [tier.use for tier in self.control.tiers]

    @_in_turn
    def stats(self) -> dict[str, object]:
        """Hit rates and failures so far, and how full each tier is; all derived from the events."""
        uses, totals = self._tier_uses(), self.record.totals
        return {
            **totals.hit_rates(),
            "lookups": totals.count("lookup"),
            "looked_up_tokens": totals.tokens["lookup"],
            "hit_tokens": totals.tokens["reuse"],
            "failed_loads": totals.failures("load"),
            "failed_stores": totals.failures("store"),
            "dropped": totals.failures("drop"),
            "tiers": {tier.name: vars(tier) for tier in uses},
        }

    def metrics(self) -> "EngineMetrics":
        """The figures for Prometheus: `REGISTRY.register(engine.metrics())`, or `print(engine.metrics())`."""
        from workbench.metrics import EngineMetrics

        return EngineMetrics(self._snapshot)

    @_in_turn
    def _snapshot(self) -> "Snapshot":
        from workbench.metrics import Snapshot, TierState

        slower: list[Tier | None] = [None] * self.data.first_level + self.data.tiers
        states = []
        for level, (use, tier) in enumerate(zip(self._tier_uses(), slower, strict=True)):
            breaker = tier.breaker if tier is not None else None
            found = (None, 0) if breaker is None else (not breaker.allows, breaker.trips)
            states.append(TierState(*astuple(use), self.data.queued(level), *found))
        return Snapshot(deepcopy(self.record.totals), states)

    @property
    def is_open(self) -> bool:
        return not self._closed and os.getpid() == self._process

    def close(self) -> None:
        """Finish what is queued, within seconds, and release memory, threads and files; twice is fine."""
        if self.is_open:
            for survey in self._surveys:
                survey.close()
            self._turns.run(self._close)
            self._turns.close()

    def _close(self) -> None:
        if self._closed:
            return
        self.data.close()
        self._settle_report()
        self._closed = True
        if self._event_file is not None:
            self._event_file.close()

    def __enter__(self) -> "CacheEngine":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    # ---------------------------------------------------------------- parts of the path

    def _load(self, chain: ChunkChain, hit: int, blocks: Sequence[int], pages: PageTable, counted: bool = True) -> int:
        """Carry out the loads of a hit; returns the tokens that arrived from the first one on."""
        request = self._begin(chain, reuse_tokens=hit if counted else None)
        try:
            orders = self.control.plan_loads(request, 0, hit, blocks)
            report = self._carry_out(orders, pages)
        finally:
            self._end(request)
        loaded = {done.key for done in report if done.request == request and not done.reason}
        arrived = takewhile(lambda chunk: chunk.key in loaded, (o.chunk for o in orders if isinstance(o, Load)))
        # A chunk that came since the lookup may reach further than the blocks that were asked for.
        return min(hit, max((chunk.stop for chunk in arrived), default=0))

    def _miss(self, chain: ChunkChain) -> int:
        if self.is_open:
            self._end(self._begin(chain, reuse_tokens=0))
        return 0

    def _chain(self, tokens: Sequence[int], scope: ChunkScope) -> ChunkChain:
        root = scope.root_under(self._digest)
        return ChunkChain(root, self.identity.layout.chunk_tokens, scope, self._boundaries).extend(tokens)

    def _begin(self, chain: ChunkChain, reuse_tokens: int | None) -> str:
        self._settle_report()
        self._serial += 1
        request = f"call-{self._serial}"
        if reuse_tokens is None:
            self.control.begin(request, chain)
        else:
            self.control.admit(request, chain, reuse_tokens=reuse_tokens)
        return request

    def _end(self, request: str) -> None:
        self.control.finish(request)
        self.data.forget_request(request)
        if self._event_file is not None:
            self._event_file.flush()

    def _check_pages(self, pages: PageTable, blocks: Sequence[int], num_tokens: int) -> None:
        layout = self.identity.layout
        needed = layout.blocks_of(num_tokens)
        used = list(blocks[:needed])
        if len(pages.pages) != layout.num_layers or pages.page_nbytes != layout.page_nbytes:
            raise LayoutError(
                f"{len(pages.pages)} layers with pages of {pages.page_nbytes} bytes; this engine was built for "
                f"{layout.num_layers} layers with pages of {layout.page_nbytes} bytes"
            )
        if len(used) < needed:
            raise InvalidInputError(f"{len(used)} blocks for {needed} blocks of tokens")
        if used and not 0 <= min(used) <= max(used) < pages.num_blocks:
            raise InvalidInputError(f"block ids {min(used)}..{max(used)}; allowed are 0 to {pages.num_blocks - 1}")
        if len(set(used)) < needed:
            raise InvalidInputError("a block id stands twice in the block table")

    def _carry_out(self, orders: list[Order], pages: PageTable) -> list[Done]:
        self.data.attach(pages)
        self.data.begin_step()
        self.data.run(orders)
        report = self.data.take_report()
        self.control.apply(report)
        return report

    def _settle_report(self) -> None:
        if self.is_open:
            self.control.apply(self.data.take_report())
