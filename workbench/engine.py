"""The cache engine: lookup, store, retrieve. Read this file first.

    store     tokens -> chunks -> room (control) -> gather (kernel) -> arena -> slower tiers -> resident
    retrieve  tokens -> chunks -> find (control) -> arena or slower tier -> checked -> scatter (kernel) -> pages

`CacheEngine` joins the control plane, which decides, and the data plane, which moves, by a direct call. Under vLLM the
same two planes live in different processes, joined by the connector's messages (workbench/connectors/vllm.py).
"""

import functools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import numpy as np

from kernels.pages import PageTable
from workbench.chunks import ChunkChain, ChunkScope, token_array
from workbench.codecs import resolve_codec
from workbench.config import CacheConfig
from workbench.control import ControlPlane
from workbench.errors import InvalidInputError, LayoutError
from workbench.events import Event, Recorder
from workbench.explain import Explanation, explain_chain
from workbench.layout import Identity, KVLayout
from workbench.orders import Done, Order, Store
from workbench.tiers.base import Tier, TierIndex
from workbench.tiers.encoded import EncodedTier
from workbench.tiers.memory import MemoryTier
from workbench.tiers.presence import Presence
from workbench.transfers import DataPlane
from workbench.turns import Turns

__all__ = ["CacheEngine", "EventFile", "HitTokens", "Pin", "build_control", "build_data", "encoded_identity"]


def build_control(identity: Identity, config: CacheConfig, tiers: Sequence[Tier], *, record: Recorder | None = None,
                  recompute_seconds: Callable[[int, int], float] = lambda a, b: 0.0) -> ControlPlane:  # fmt: skip
    """The control plane that a configuration describes. Takes over nothing yet: see `ControlPlane.adopt`.

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
    return ControlPlane(layout, indexes, arena=arena, write=config.write, shared=shared, record=record,
                        recompute_seconds=recompute_seconds)  # fmt: skip


def build_data(identity: Identity, config: CacheConfig, *, threads: int = 2) -> DataPlane:
    """The data plane that a configuration describes."""
    layout = identity.layout
    return DataPlane(
        layout,
        memory_slots=memory_slots(layout, config),
        tiers=build_tiers(identity, config),
        staging_slots=max(1, int(config.staging_bytes) // layout.chunk_nbytes),
        threads=threads,
        verify=config.verify,
    )


def encoded_identity(identity: Identity, config: CacheConfig) -> Identity:
    """The identity of KV that may have gone through the configured codecs: nobody else's chunks, and its own alone."""
    memory, below = (repr(resolve_codec(spec)) for spec in (config.memory_codec, config.codec))
    if not config.memory_bytes:
        memory = "raw"
    codec = "raw" if memory == below == "raw" else f"memory {memory}, below {below}"
    return replace(identity, codec=codec) if identity.codec == "raw" else identity


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


@dataclass(frozen=True)
class TierUse:
    """How full one tier is."""

    name: str
    chunks: int
    used_bytes: int
    capacity_bytes: int
    high_water_bytes: int
    holds: int


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
        self._event_file = EventFile(self.config.events_path) if record is None and self.config.events_path else None
        self.record = record if record is not None else Recorder(sink=self._event_file)
        self.data = build_data(identity, self.config)  # first: it knows whether the machine has the memory
        try:
            self.control = build_control(identity, self.config, self.data.tiers, record=self.record)
        except Exception:
            self.data.close()
            raise
        self._serial = 0
        self._process = os.getpid()
        self._closed = False
        self._turns = Turns("kv-engine")
        for level, tier in enumerate(self.data.tiers, self.data.first_level):
            self.data.run(self.control.adopt(level, tier.scan()))

    # ---------------------------------------------------------------- the path

    @_in_turn
    def lookup(self, tokens: Sequence[int], *, scope: ChunkScope = ChunkScope()) -> int:
        """How many leading tokens could be retrieved now. Changes nothing."""
        chain = self._chain(tokens, scope)
        self._settle_report()
        return self.control.lookup(chain) if self.is_open else 0

    @_in_turn
    def store(self, tokens: Sequence[int], pages: PageTable, *, blocks: Sequence[int],
              scope: ChunkScope = ChunkScope()) -> int:  # fmt: skip
        """Save the KV of every full chunk that is not saved yet.

        Args:
            tokens: Token ids from the start of the prompt.
            pages: The paged KV cache that holds their KV.
            blocks: Block table: block i holds tokens i*block_size to (i+1)*block_size.
            scope: Salt, LoRA and multimodal inputs of the request.

        Returns:
            Tokens whose KV this call took over from the pages: into the memory tier, or, without room there, on its
            way to the next one (see `flush`).

        Raises:
            InvalidInputError: A token id or block id that cannot be, or fewer blocks than full chunks need.
            LayoutError: Pages of another shape than the layout says.
        """
        chain = self._chain(tokens, scope)
        self._check_pages(pages, blocks, len(chain) * self.identity.layout.blocks_per_chunk)
        if not self.is_open:
            return 0
        request = self._begin(chain, reuse_tokens=None)
        try:
            orders = self.control.plan_stores(request, chain.num_tokens, blocks)
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
        """Fill blocks with the longest saved prefix; returns its length in tokens, a multiple of the chunk size.

        Blocks beyond the returned length may have been written to. A chunk that turns out damaged ends the prefix.
        The returned number's `mask` says the same token by token.
        """
        chain = self._chain(tokens, scope)
        self._settle_report()
        hit = self.control.lookup(chain) if self.is_open else 0
        self._check_pages(pages, blocks, hit // self.identity.layout.block_size)
        return HitTokens(self._load(chain, hit, blocks, pages) if hit else self._miss(chain), chain.num_tokens)

    @_in_turn
    def prefetch(self, tokens: Sequence[int], *, scope: ChunkScope = ChunkScope()) -> int:
        """Bring the longest saved prefix up into the memory tier before it is asked for.

        Returns:
            Leading tokens that lie in the memory tier afterwards; 0 without a memory tier. Counts as no lookup.
        """
        chain = self._chain(tokens, scope)
        self._settle_report()
        hit = self.control.lookup(chain) if self.is_open else 0
        if not hit or self.control.memory is None:
            return 0
        nowhere = [-1] * (hit // self.identity.layout.block_size)
        self._load(chain, hit, nowhere, self.data.any_pages(), counted=False)
        entries = (self.control.index.find(chunk.key) for chunk in chain)
        return sum(1 for _ in takewhile(lambda e: e >= 0 and e in self.control.memory, entries)) * chain.chunk_tokens

    @_in_turn
    def pin(self, tokens: Sequence[int], *, scope: ChunkScope = ChunkScope()) -> "Pin":
        """Keep the longest saved prefix from eviction, in every tier that has it, until `unpin`."""
        chain = self._chain(tokens, scope)
        self._settle_report()
        hit = self.control.lookup(chain) if self.is_open else 0
        return Pin(hit, self.control.hold_prefix(chain, hit // chain.chunk_tokens) if hit else ())

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

    @_in_turn
    def clear(self) -> None:
        """Remove every chunk from every tier."""
        if self.is_open:
            self.data.flush()
            self._settle_report()
            self.data.run(self.control.clear())

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
        return [
            TierUse(t.name, len(t), t.used_bytes, t.capacity_bytes, t.high_water_bytes, t.holds)
            for t in self.control.tiers
        ]

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

    @property
    def is_open(self) -> bool:
        return not self._closed and os.getpid() == self._process

    def close(self) -> None:
        """Finish what is queued, within seconds, and release memory, threads and files; twice is fine."""
        if self.is_open:
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
            report = self._carry_out(self.control.plan_loads(request, 0, hit, blocks), pages)
        finally:
            self._end(request)
        loaded = {done.key for done in report if done.request == request and not done.reason}
        return self._prefix_of(chain, hit, loaded)

    def _miss(self, chain: ChunkChain) -> int:
        if self.is_open:
            self._end(self._begin(chain, reuse_tokens=0))
        return 0

    def _chain(self, tokens: Sequence[int], scope: ChunkScope) -> ChunkChain:
        chain = ChunkChain(scope.root(self.identity), self.identity.layout.chunk_tokens, scope)
        return chain.extend(token_array(tokens))

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

    def _check_pages(self, pages: PageTable, blocks: Sequence[int], needed: int) -> None:
        layout, used = self.identity.layout, list(blocks[:needed])
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

    def _prefix_of(self, chain: ChunkChain, hit: int, loaded: set[bytes]) -> int:
        tokens = 0
        while tokens < hit and chain[tokens // chain.chunk_tokens].key in loaded:
            tokens += chain.chunk_tokens
        return tokens

    def _settle_report(self) -> None:
        if self.is_open:
            self.control.apply(self.data.take_report())
