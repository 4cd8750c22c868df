"""Replay and curves: counts, semantics, touch order, exact curves, costs, speed of the reader and the loops."""

import numpy as np
import pytest

from experiments.curves import chunk_size_sweep, hit_rate_curve, lru_curve
from experiments.replay import replay
from experiments.replay_costs import ReuseCosts
from experiments.replay_tiers import replay_tiers
from experiments.traces import Trace, agent, chat, find_trace, load_trace, rag, zipf
from tests.test_live_policy import random_requests
from workbench.errors import InvalidInputError


def known(name: str) -> Trace:
    try:
        find_trace(name)
    except InvalidInputError as error:
        pytest.skip(str(error))
    return load_trace(name)


def test_three_hit_rates_are_counted_as_named():
    trace = random_requests(0)
    result = replay(trace, "lru", capacity_chunks=10_000)
    seen, hits = set(), []
    for q in range(trace.requests):
        chain = trace.ids[trace.offsets[q] : trace.offsets[q + 1]].tolist()
        hits.append(sum(b in seen for b in chain))
        seen.update(chain)
    assert result.hit_chunks.tolist() == hits and result.evictions == 0
    assert result.hit_rate_by_chunks == sum(hits) / trace.accesses
    assert result.hit_rate == sum(hits) * 16 / trace.input_tokens.sum()
    assert result.hit_rate_by_requests == sum(h > 0 for h in hits) / trace.requests
    row = result.frame().row(0, named=True)
    assert row["policy"] == "Lru()" and row["semantics"] == "prefix" and row["capacity_chunks"] == 10_000


def test_a_partly_filled_last_block_counts_its_tokens_only():
    trace = random_requests(0)
    short = Trace(**{**vars_of(trace), "input_tokens": trace.lengths * 16 - 5})
    result = replay(short, "lru", capacity_chunks=10_000)
    full = result.hit_chunks == short.lengths
    assert (result.hit_tokens[full] == short.input_tokens[full]).all() and full.any()


def vars_of(trace: Trace) -> dict:
    return {name: getattr(trace, name) for name in Trace.__dataclass_fields__}


@pytest.mark.parametrize("name", ["lru", "optimal", "s3fifo", "gittins"])
def test_more_room_never_evicts_more_than_it_stores_and_a_long_request_fits(name):
    trace = agent(sessions=4)
    for capacity in (1, 3, 50):
        result = replay(trace, name, capacity_chunks=capacity, record_victims=True)
        assert result.hit_chunks.max() <= capacity and len(result.victims) == result.evictions


def test_lru_hits_grow_with_size_and_optimal_is_best():
    trace = chat(sessions=60)
    last = 0
    for capacity in (20, 60, 200, 600, 2000):
        lru = replay(trace, "lru", capacity_chunks=capacity).hit_chunks.sum()
        best = replay(trace, "optimal", capacity_chunks=capacity).hit_chunks.sum()
        assert last <= lru <= best
        last = lru


def test_order_within_a_request_matters_where_nothing_else_protects_prefixes():
    trace = chat(sessions=100)
    flat = replay(trace, "lru", capacity_chunks=100, semantics="object")  # block by block, head first
    tail = replay(trace, "lru", capacity_chunks=100)
    assert flat.hit_rate < tail.hit_rate - 0.01
    # With leaves only, LRU hardly sees the order; policies with several queues do.
    one, two = (
        replay(trace, "s3fifo", capacity_chunks=100, touch_order=order, record_victims=True).victims.tolist()
        for order in ("tail_first", "head_first")
    )
    assert one != two


def test_the_curve_is_that_of_replay_at_every_capacity():
    for trace in (chat(sessions=40), rag(requests=300), agent(sessions=6), random_requests(3, requests=400)):
        curve = lru_curve(trace)
        assert curve.hits[-1] == replay(trace, "lru", capacity_chunks=trace.distinct).hit_chunks.sum()
        step = max(1, trace.distinct // 25)
        for capacity in range(curve.longest_request, trace.distinct, step):
            assert curve.hits[capacity] == replay(trace, "lru", capacity_chunks=capacity).hit_chunks.sum()


def test_the_curve_packs_its_places_when_they_run_out():
    trace = random_requests(1, requests=5000, branch=2, depth=4)  # few chunks, many uses: packs again and again
    curve = lru_curve(trace)
    for capacity in (5, 10, 15, 25):
        assert curve.hits[capacity] == replay(trace, "lru", capacity_chunks=capacity).hit_chunks.sum()


def test_what_a_curve_answers():
    curve = lru_curve(chat(sessions=80))
    ceiling = float(curve.hit_rate(10**9))
    need = curve.capacity_for(ceiling / 2)
    assert curve.hit_rate(need) >= ceiling / 2 > curve.hit_rate(need - 1)
    assert curve.capacity_for(ceiling + 0.01) is None
    first, second = curve.tiers(100, 300)
    assert first == curve.hit_rate(100) and first + second == pytest.approx(float(curve.hit_rate(400)))
    assert 0 < curve.knee() < len(curve.hits)
    assert curve.frame()["hit_rate_by_chunks"].is_sorted()


def test_a_grid_runs_in_parallel_and_gives_what_single_runs_give():
    trace = chat(sessions=40)
    done = []
    frame = hit_rate_curve(
        trace, ["lru", "s3fifo"], capacities_chunks=[50, 200], progress=lambda n, total: done.append((n, total))
    )
    assert frame["capacity_chunks"].to_list() == [50, 200, 50, 200] and sorted(done)[-1] == (4, 4)
    for row in frame.iter_rows(named=True):
        name = "lru" if row["policy"] == "Lru()" else "s3fifo"
        single = replay(trace, name, capacity_chunks=row["capacity_chunks"])
        assert row["hit_rate_by_chunks"] == single.hit_rate_by_chunks


def test_chunk_sizes_trade_hits_for_fewer_chunks():
    trace = chat(sessions=60)
    frame = chunk_size_sweep(trace, blocks_per_chunk=(1, 2, 4), capacities_tokens=(20_000,))
    unlimited = frame.filter(frame["capacity_tokens"].is_null())["hit_rate"].to_list()
    assert unlimited == sorted(unlimited, reverse=True)
    assert unlimited[0] == pytest.approx(replay(trace, "lru", capacity_chunks=trace.distinct).hit_rate)


def test_costs_reach_the_policy_and_the_result():
    trace = agent(sessions=10)
    slow, fast = ReuseCosts(load_bytes_per_second=1e9), ReuseCosts(load_bytes_per_second=1e12)
    one = replay(trace, "break_even", capacity_chunks=300, costs=slow)
    two = replay(trace, "break_even", capacity_chunks=300, costs=fast)
    assert one.hit_chunks.sum() != two.hit_chunks.sum()
    assert two.seconds_saved > 0 > one.seconds_saved
    assert replay(trace, "lru", capacity_chunks=300).seconds_saved is None


def test_reuse_costs_follow_the_equation():
    costs = ReuseCosts()
    n, d = 8192, 8192
    flops = 80 * (4 * n**2 * d + 22 * n * d**2)
    assert costs.recompute_seconds(np.array(0), np.array(n)) == pytest.approx(flops / (8 * 312e12))
    assert costs.bytes_per_token == 327_680


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"capacity_chunks": 0}, "at least 1, got 0"),
        ({"capacity_chunks": 2.5}, "at least 1, got 2.5"),
        ({"capacity_chunks": 5, "semantics": "blocks"}, "'prefix' or 'object', got 'blocks'"),
        ({"capacity_chunks": 5, "touch_order": "random"}, "got 'random'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(InvalidInputError, match=message):
        replay(random_requests(0), "lru", **settings)


def test_nothing_to_draw_is_refused():
    with pytest.raises(InvalidInputError, match="at least one policy"):
        hit_rate_curve(random_requests(0), [], capacities_chunks=[1])


# Reference values of the project on public traces.


def test_prefix_hits_on_mooncake():
    trace = known("mooncake_conversation")
    expected = {
        ("lru", 1_000): 0.044530, ("lru", 10_000): 0.211598, ("lru", 30_000): 0.325747, ("lru", 100_000): 0.363688,
        ("lfu", 10_000): 0.131730, ("lfu", 30_000): 0.275955, ("optimal", 1_000): 0.190707,
        ("optimal", 10_000): 0.366412,
    }  # fmt: skip
    for (name, capacity), rate in expected.items():
        assert round(replay(trace, name, capacity_chunks=capacity).hit_rate_by_chunks, 6) == rate, (name, capacity)
    curve = lru_curve(trace)
    assert [round(float(curve.hit_rate(c)), 6) for c in (1_000, 10_000, 30_000)] == [0.044530, 0.211598, 0.325747]


def test_chunk_sizes_on_mooncake():
    frame = chunk_size_sweep(known("mooncake_conversation"), blocks_per_chunk=(1, 2, 4, 8))
    assert [round(rate, 4) for rate in frame["hit_rate"]] == [0.3738, 0.3400, 0.3213, 0.2914]


@pytest.mark.parametrize(
    ("name", "capacities"), [("mooncake_conversation", (1_700, 9_400, 29_000)), ("mooncake_synthetic", (7_000, 12_400))]
)
def test_our_own_policy_leads_on_mooncake(name, capacities):
    trace = known(name)
    others = ("lru", "arc", "s3fifo", "clock", "gdsf", "break_even", "workload_aware", "ttl", "tlru")
    for capacity in capacities:
        ours = replay(trace, "gittins", capacity_chunks=capacity).hit_rate
        best = max(replay(trace, other, capacity_chunks=capacity).hit_rate for other in others)
        assert ours > best + 0.002, f"{name} at {capacity}: {ours:.4f}, best other {best:.4f}"


@pytest.mark.slow
def test_prefix_hits_on_94_million_accesses():
    trace = known("weka_claude_code")
    curve = lru_curve(trace)
    expected = {5_000: 0.063474, 20_000: 0.340830, 50_000: 0.767483, 100_000: 0.922325, 200_000: 0.953145,
                500_000: 0.962637, 1_000_000: 0.963256, 2_000_000: 0.963405}  # fmt: skip
    assert {c: round(float(curve.hit_rate(c)), 6) for c in expected} == expected
    for name, capacity, rate in (("lru", 50_000, 0.767483), ("fifo", 50_000, 0.767469), ("fifo", 200_000, 0.953144)):
        assert round(replay(trace, name, capacity_chunks=capacity).hit_rate_by_chunks, 6) == rate


def test_compiled_replay_is_fast():
    trace = zipf(objects=100_000, accesses=2_000_000)
    best = min(replay(trace, "sieve", capacity_chunks=10_000, semantics="object").seconds for _ in range(3))
    assert trace.accesses / best > 10e6, "plain Python does less than a million a second"


def test_json_lines_are_read_fast(tmp_path):
    from time import thread_time

    from experiments.traces.jsonl import scan_lines

    blocks = ", ".join(str(1_000_000 + i) for i in range(2000))
    line = f'{{"timestamp": 27482, "input_length": 1024000, "output_length": 52, "hash_ids": [{blocks}]}}\n'
    data = np.frombuffer(line.encode() * 500, np.uint8)
    scan_lines(data)
    started = thread_time()
    columns, problems = scan_lines(data)
    rate = len(data) / (thread_time() - started) / 1e6
    assert len(columns["hash_ids"]) == 1_000_000 and not problems
    assert rate > 100, f"{rate:.0f} MB/s"  # 300 and more on a quiet machine


@pytest.mark.vllm
def test_vllms_own_offload_agrees_with_replay():
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    def served(trace: Trace, chunks: int, name: str, module: str | None) -> float:
        manager = CPUOffloadingManager(chunks, cache_policy=name, cache_policy_module_path=module)
        keys = [make_offload_key(b.to_bytes(32, "little"), 0) for b in range(trace.distinct)]
        hits = 0
        for q in range(trace.requests):
            chain = [keys[b] for b in trace.ids[trace.offsets[q] : trace.offsets[q + 1]].tolist()]
            context = ReqContext(req_id=str(q))
            manager.on_new_request(context)
            found = 0
            while found < len(chain) and manager.lookup(chain[found], context) == LookupResult.HIT:
                found += 1
            hits += found
            if found:
                manager.prepare_load(chain[:found], context)
                manager.complete_load(chain[:found], context)
            stored = manager.prepare_store(chain, context)
            if stored is not None and stored.keys_to_store:
                manager.complete_store(stored.keys_to_store, context)
            manager.on_request_finished(context)
        return hits / trace.accesses

    trace = chat(sessions=300)
    capacity = 400
    assert lru_curve(trace).longest_request < capacity
    ours = {name: replay(trace, name, capacity_chunks=capacity).hit_rate_by_chunks for name in ("lru", "sieve")}
    assert abs(served(trace, capacity, "lru", None) - ours["lru"]) < 0.001
    module = "workbench.policies.vllm_offload"
    for name, rate in ours.items():
        assert 0.05 < rate < 0.9 and abs(served(trace, capacity, f"wb_{name}", module) - rate) < 0.001
    # Policies that look at the incoming chunk are not told of it by vLLM, and its order is flat: near, not equal.
    assert (
        abs(
            served(trace, capacity, "wb_arc", module)
            - replay(trace, "arc", capacity_chunks=capacity).hit_rate_by_chunks
        )
        < 0.05
    )


def test_two_exclusive_lru_tiers_are_what_the_curve_says():
    trace = chat(sessions=60)
    curve = lru_curve(trace)
    for first, second in ((300, 600), (200, 1_500)):
        result = replay_tiers(trace, [("lru", first), ("lru", second)])
        rates = result.frame()["hit_rate_by_chunks"].to_list()
        assert rates == pytest.approx(list(curve.tiers(first, second)), abs=1e-12)
        assert result.demoted[0] > 100 and result.promoted[1] > 100 and result.dropped > 50


def test_inclusive_tiers_waste_what_both_hold():
    trace = chat(sessions=60)
    one = replay(trace, "lru", capacity_chunks=300).hit_chunks.sum()
    exclusive = replay_tiers(trace, [("lru", 300), ("s3fifo", 600)]).hit_chunks.sum()
    inclusive = replay_tiers(trace, [("lru", 300), ("s3fifo", 600)], kind="inclusive").hit_chunks
    assert one < inclusive.sum() < exclusive and inclusive[0].sum() == one
    with pytest.raises(InvalidInputError, match="must not be empty"):
        replay_tiers(trace, [])
    with pytest.raises(InvalidInputError, match="uses the future"):
        replay_tiers(trace, [("lru", 10), ("belady", 10)])


def model_tiers(trace: Trace, rooms: tuple[int, ...], inclusive: bool) -> list[int]:
    """Hits of each LRU tier, with sets and a search for the oldest leaf: lists run from the oldest to the newest."""
    tiers: list[list[int]] = [[] for _ in rooms]
    hits = [0] * len(rooms)

    def make_room(k: int, chain: list[int]) -> int | None:
        if len(tiers[k]) < rooms[k]:
            return None
        parents = {int(trace.parent[x]) for x in tiers[k]}
        victim = next(x for x in tiers[k] if x not in parents and x not in chain)
        tiers[k].remove(victim)
        return victim

    def demote(k: int, b: int) -> None:
        if k < len(tiers):
            victim = make_room(k, [])
            tiers[k].append(b)
            if victim is not None:
                demote(k + 1, victim)

    for q in range(trace.requests):
        chain = trace.ids[trace.offsets[q] : trace.offsets[q + 1]].tolist()
        places = [next((k for k, tier in enumerate(tiers) if b in tier), -1) for b in chain]
        for place in places[: places.index(-1) if -1 in places else None]:
            hits[place] += 1
        falling = []
        for k in range(len(tiers) if inclusive else 1):
            for b, place in zip(chain, places, strict=True):
                if not inclusive and place > 0:
                    tiers[place].remove(b)
            told = []
            for b, place in zip(chain, places, strict=True):
                if b not in tiers[k]:
                    if k > 0 and place == 0:
                        continue
                    victim = make_room(k, chain)
                    falling += [victim] if victim is not None else []
                    tiers[k].append(b)
                told.append(b)
            for b in reversed(told):
                tiers[k].remove(b)
                tiers[k].append(b)
        for b in falling if not inclusive else []:
            demote(1, b)
    return hits


@pytest.mark.parametrize("kind", ["exclusive", "inclusive"])
def test_tiers_are_those_of_a_model(kind):
    for seed in range(20):
        trace = random_requests(seed)
        for rooms in ((8, 15), (10, 12, 20)):
            ours = replay_tiers(trace, [("lru", room) for room in rooms], kind=kind)
            assert ours.hit_chunks.sum(axis=1).tolist() == model_tiers(trace, rooms, kind == "inclusive"), (seed, rooms)


@pytest.mark.parametrize("name", ["arc", "s3fifo", "lirs", "gittins", "lfu", "tinylfu", "workload_aware", "two_queues"])
def test_any_policy_in_any_tier_keeps_its_capacity(name):
    trace = agent(sessions=6)
    for kind in ("exclusive", "inclusive"):
        result = replay_tiers(trace, [("lru", 60), (name, 150), (name, 300)], kind=kind)
        assert result.hit_chunks[1:].sum() > 0 and result.dropped > 0
        assert result.hit_chunks.sum() <= replay(trace, "lru", capacity_chunks=trace.distinct).hit_chunks.sum()
