"""Every policy against a model written apart from it, in plain Python, on random traces: the same victims in order.

Object models return what they evict, access by access. The prefix model looks at every chunk for each eviction.
Policies that draw at random have models that draw the same numbers. 1,000 traces each with `-m slow`.
"""

import math
import random
from collections import OrderedDict, defaultdict, deque
from functools import cache

import numpy as np
import pytest

from experiments.replay import replay
from experiments.replay_costs import ReuseCosts
from experiments.traces import Trace
from tests.test_live_policy import random_requests
from workbench.policies import policy_names

SHORT, LONG = 30, 1000


def objects(seed: int, length: int = 150) -> Trace:
    """Skewed accesses with a drift, so that both recency and frequency matter, in requests of one to six."""
    rng = random.Random(seed)
    ids = [int(rng.paretovariate(0.7)) % 30 + (i // 60) * 3 for i in range(length)]
    dense = {b: i for i, b in enumerate(dict.fromkeys(ids))}
    cuts = [0]
    while cuts[-1] < length:
        cuts.append(min(length, cuts[-1] + rng.randint(1, 6)))
    lengths = np.diff(cuts)
    return Trace(
        name="objects",
        ids=np.array([dense[b] for b in ids], np.int32),
        offsets=np.array(cuts, np.int64),
        block_tokens=16,
        timestamps=np.cumsum([rng.expovariate(0.1) for _ in lengths]),
        input_tokens=lengths * 16,
        output_tokens=np.zeros(len(lengths), np.int64),
        tenants=np.zeros(len(lengths), np.int32),
    )


def model_lru(ids, capacity, trace):
    order, gone = OrderedDict(), []
    for b in ids:
        if b in order:
            order.move_to_end(b)
            continue
        if len(order) == capacity:
            gone.append(order.popitem(last=False)[0])
        order[b] = None
    return gone


def model_fifo(ids, capacity, trace, last=False, touch=False):
    order, gone = OrderedDict(), []
    for b in ids:
        if b in order:
            if touch:
                order.move_to_end(b)
            continue
        if len(order) == capacity:
            gone.append(order.popitem(last=last)[0])
        order[b] = None
    return gone


def model_score(score):
    """Evict the least (score, time of last use); score(uses, floor) is taken at each use."""

    def model(ids, capacity, trace):
        held, gone, floor = {}, [], 0.0
        for now, b in enumerate(ids):
            if b in held:
                uses = held[b][2] + 1
            else:
                uses = 1
                if len(held) == capacity:
                    victim = min(held, key=lambda x: held[x][:2])
                    floor = held[victim][0]
                    del held[victim]
                    gone.append(victim)
            held[b] = (score(uses, floor), now, uses)
        return gone

    return model


def model_clock(ids, capacity, trace):
    queue, marked, gone = deque(), {}, []
    for b in ids:
        if b in marked:
            marked[b] = True
            continue
        if len(queue) == capacity:
            while marked[queue[0]]:
                marked[queue[0]] = False
                queue.rotate(-1)
            gone.append(queue.popleft())
            del marked[gone[-1]]
        queue.append(b)
        marked[b] = False
    return gone


def model_sieve(ids, capacity, trace):
    queue, marked, gone, hand = [], {}, [], None  # oldest first
    for b in ids:
        if b in marked:
            marked[b] = True
            continue
        if len(queue) == capacity:
            i = queue.index(hand) if hand is not None else 0
            while marked[queue[i]]:
                marked[queue[i]] = False
                i = (i + 1) % len(queue)
            hand = queue[i + 1] if i + 1 < len(queue) else None
            gone.append(queue.pop(i))
            del marked[gone[-1]]
        queue.append(b)
        marked[b] = False
    return gone


def model_s3fifo(ids, capacity, trace):
    small_room, ghost_room = int(capacity * 0.1), int(capacity * 0.9)
    small, main, ghost, count, gone = deque(), deque(), OrderedDict(), {}, []

    def evict_main():
        while True:
            b = main.popleft()
            if count[b] == 0:
                return b
            count[b] -= 1
            main.append(b)

    def evict():
        while True:
            if len(main) > capacity - small_room or not small:
                return evict_main()
            while small:
                b = small.popleft()
                if count[b] < 2:
                    ghost[b] = None
                    if len(ghost) > ghost_room:
                        ghost.popitem(last=False)
                    return b
                count[b] = 0
                main.append(b)

    for b in ids:
        if b in count:
            count[b] = min(3, count[b] + 1)
            continue
        returns = ghost.pop(b, 0) is None
        if len(small) + len(main) == capacity:
            gone.append(evict())
            del count[gone[-1]]
        early = not gone and len(small) >= small_room
        (main if returns or early else small).append(b)
        count[b] = 0
    return gone


def model_arc(ids, capacity, trace):
    t1, t2, b1, b2 = OrderedDict(), OrderedDict(), OrderedDict(), OrderedDict()
    p, gone = 0.0, []

    def replace(in_b2):
        if t1 and (len(t1) > p or (in_b2 and len(t1) == p)):
            x = t1.popitem(last=False)[0]
            b1[x] = None
        else:
            x = t2.popitem(last=False)[0]
            b2[x] = None
        gone.append(x)

    for x in ids:
        if x in t1 or x in t2:
            t1.pop(x, 0)
            t2.pop(x, 0)
            t2[x] = None
        elif x in b1:
            p = min(capacity, p + max(len(b2) / len(b1), 1))
            replace(False)
            del b1[x]
            t2[x] = None
        elif x in b2:
            p = max(0, p - max(len(b1) / len(b2), 1))
            replace(True)
            del b2[x]
            t2[x] = None
        else:
            if len(t1) + len(b1) == capacity:
                if len(t1) < capacity:
                    b1.popitem(last=False)
                    replace(False)
                else:
                    gone.append(t1.popitem(last=False)[0])
            elif len(t1) + len(t2) + len(b1) + len(b2) >= capacity:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * capacity:
                    b2.popitem(last=False)
                if len(t1) + len(t2) == capacity:
                    replace(False)
            t1[x] = None
    return gone


def model_two_queues(ids, capacity, trace):
    recent, often, ghost, gone = OrderedDict(), OrderedDict(), OrderedDict(), []
    for b in ids:
        if b in often:
            often.move_to_end(b)
            continue
        if b in recent:
            continue
        returns = ghost.pop(b, 0) is None
        if len(recent) + len(often) == capacity:
            if len(recent) > int(capacity * 0.25) or not often:
                gone.append(recent.popitem(last=False)[0])
                ghost[gone[-1]] = None
                if len(ghost) > int(capacity * 0.5):
                    ghost.popitem(last=False)
            else:
                gone.append(often.popitem(last=False)[0])
        (often if returns else recent)[b] = None
    return gone


def model_belady(ids, capacity, trace):
    held, gone = {}, []  # held: object -> time of its last use
    for i, b in enumerate(ids):
        if b not in held and len(held) == capacity:
            later = ids[i:]
            victim = max(held, key=lambda x: (later.index(x) if x in later else math.inf, -held[x]))
            gone.append(victim)
            del held[victim]
        held[b] = i
    return gone


def model_slru(ids, capacity, trace):
    segments, room, gone = [OrderedDict() for _ in range(4)], max(1, capacity // 4), []
    for b in ids:
        level = next((k for k, segment in enumerate(segments) if b in segment), None)
        if level is None:
            if sum(map(len, segments)) == capacity:
                gone.append(next(segment for segment in segments if segment).popitem(last=False)[0])
            level = next((k for k, segment in enumerate(segments) if len(segment) < room), 0)
            segments[level][b] = None
            continue
        del segments[level][b]
        level = min(3, level + 1)
        falling = level
        while falling > 0 and len(segments[falling]) >= room:
            down = segments[falling].popitem(last=False)[0]
            falling -= 1
            segments[falling][down] = None
            if len(segments[falling]) <= room:
                break
        segments[level][b] = None
    return gone


def model_lirs(ids, capacity, trace):
    """Stack as a list, bottom first; q holds the resident chunks of long distance, oldest first."""
    lir_room, stack_room = max(1, capacity - max(1, int(capacity * 0.01))), int(capacity * 2.0)
    stack, lir, q, ghosts, gone = [], set(), [], [], []

    def prune():
        while stack and stack[0] not in lir:
            if stack[0] in ghosts:
                ghosts.remove(stack[0])
            stack.pop(0)

    def to_top(b):
        if b in stack:
            stack.remove(b)
        stack.append(b)

    def demote():
        prune()
        b = stack.pop(0)
        lir.discard(b)
        q.append(b)
        prune()

    def promote(b):
        lir.add(b)
        to_top(b)
        if len(lir) > lir_room:
            demote()
        prune()

    for b in ids:
        if b in lir:
            to_top(b)
            prune()
        elif b in q and b in stack:
            q.remove(b)
            promote(b)
        elif b in q:
            to_top(b)
            q.remove(b)
            q.append(b)
        else:
            if len(lir) + len(q) == capacity:
                if not q:
                    demote()
                victim = q.pop(0)
                gone.append(victim)
                if victim in stack:
                    ghosts.append(victim)
                    while len(stack) > stack_room and len(ghosts) > 1:
                        stack.remove(ghosts.pop(0))
            if b in ghosts:
                ghosts.remove(b)
                promote(b)
            elif len(lir) < lir_room:
                lir.add(b)
                to_top(b)
            else:
                to_top(b)
                q.append(b)
    return gone


def model_tinylfu(ids, capacity, trace):
    window_room = int(capacity * 0.01)
    main_room = capacity - window_room
    trial_room, safe_room = int(main_room * 0.2), int(main_room * 0.8)
    cells = [0] * max(20, int(14.4 * main_room))
    window, trial, safe, doomed, gone, main_hits = [], [], [], [], [], 0

    def places(b):
        first, step = (b * 25214903917 + 11 >> 16) & 0xFFFFFF, (b * 44485709377909 + 12345 >> 20) & 0xFFFFFF | 1
        return [(first + k * step) % len(cells) for k in range(10)]

    def count(b):
        for i in places(b):
            cells[i] += 1

    def seen(b):
        return min(cells[i] for i in places(b))

    def keep(b):
        (safe if len(trial) >= trial_room and len(safe) < safe_room else trial).append(b)

    def evict():
        if doomed:
            return doomed.pop(0)
        while window:
            new, loser = window.pop(0), None
            if len(trial) + len(safe) < main_room:
                keep(new)
            else:
                loser = new
                old = trial[0] if trial else safe[0]
                if seen(new) > seen(old):
                    (trial if trial else safe).pop(0)
                    keep(new)
                    loser = old
            count(new)
            if loser is not None:
                return loser
        return trial.pop(0) if trial else safe.pop(0)

    for b in ids:
        if b in window or b in doomed:
            (window if b in window else doomed).remove(b)
            window.append(b)
        elif b in trial or b in safe:
            count(b)
            main_hits += 1
            if main_hits >= 32 * main_room:
                main_hits, cells[:] = 0, [n >> 1 for n in cells]
            (trial if b in trial else safe).remove(b)
            safe.append(b)
            if len(safe) > safe_room:
                if len(trial) >= trial_room:
                    doomed.append((trial if trial else [None]).pop(0))
                trial.append(safe.pop(0))
        else:
            if len(window) + len(trial) + len(safe) + len(doomed) == capacity:
                gone.append(evict())
            count(b)
            window.append(b)
    return gone


class Bag:
    """Members in no order, drawn by a 48-bit linear congruential generator."""

    def __init__(self):
        self.members, self.seed = [], 1

    def draw(self):
        self.seed = (self.seed * 25214903917 + 11) % 2**48
        return self.members[(self.seed >> 16) % len(self.members)]

    def remove(self, b):
        i, last = self.members.index(b), self.members.pop()
        if b != last:
            self.members[i] = last


def model_of_draws(choose, use=lambda state, b, now, new, q: None):
    """A policy that draws from all its chunks: choose(bag, state, now, q) names the victim, use() hears of uses."""

    def model(ids, capacity, trace):
        bag, state, gone = Bag(), defaultdict(dict), []
        state["all"]["capacity"], state["all"]["trace"] = capacity, trace
        for now, b in enumerate(ids):
            new = b not in bag.members
            if new and len(bag.members) == capacity:
                gone.append(choose(bag, state, now))
                bag.remove(gone[-1])
            use(state, b, now, new)
            if new:
                bag.members.append(b)
        return gone

    return model


def least_of(draws, value):
    def choose(bag, state, now):
        return min([bag.draw() for _ in range(draws)], key=lambda x: value(state, x, now))  # the first of equals

    return choose


def count_uses(state, b, now, new):
    if new:
        state[b] = {"uses": 0, "since": now}
    state[b]["uses"] += 1
    state[b]["used"] = now


@cache
def costs_at(depth: int) -> tuple[float, float, int]:
    """Seconds to compute and to load a chunk of 16 tokens at this depth, and its bytes."""
    costs, start, tokens = ReuseCosts(), np.array(16 * depth), np.array(16)
    return (
        float(costs.recompute_seconds(start, start + 16)),
        float(costs.load_seconds(tokens)),
        int(costs.nbytes(tokens)),
    )


def choose_marconi(bag, state, now):
    drawn, trace = [bag.draw() for _ in range(64)], state["all"]["trace"]

    def recency(x):
        return 1.0 / (1.0 + now - state[x]["used"])

    def efficiency(x):
        seconds, _, nbytes = costs_at(int(trace.depth[x]))
        return seconds / nbytes

    def scaled(values):
        low, high = min(values), max(values)
        return [(value - low) / (high - low) if high > low else 0.0 for value in values]

    totals = [a + b for a, b in zip(scaled([*map(recency, drawn)]), scaled([*map(efficiency, drawn)]), strict=True)]
    return drawn[totals.index(min(totals))]


def lhd_age(state, b, now):
    return min(127, int(4.0 * math.log2(1.0 + now - state[b]["used"])))


def use_lhd(state, b, now, new):
    known = state["all"]
    known.setdefault("hit", np.zeros((8, 128)))
    known.setdefault("gone", np.zeros((8, 128)))
    if new:
        state[b] = {"kind": 0}
    else:
        age = lhd_age(state, b, now)
        known["hit"][state[b]["kind"], age] += 1
        state[b]["kind"] = 1 + min(6, age * 7 // 128)
    state[b]["used"] = now


def choose_lhd(bag, state, now):
    # These traces are shorter than the 1,024 uses after which it first learns: LRU among 32 drawn.
    return min([bag.draw() for _ in range(32)], key=lambda x: -lhd_age(state, x, now))


def model_workload_aware(ids, capacity, trace):
    held, interval, life, gone = {}, defaultdict(float), defaultdict(float), []
    times = np.repeat(trace.timestamps, trace.lengths).tolist()

    def kind(x):
        return min(15, int(math.log2(1.0 + trace.depth[x])))

    def mean(old, new):
        return new if old == 0.0 else 0.999 * old + (1.0 - 0.999) * new

    def chance(x, now):
        idle = now - held[x]["used"]
        if interval[kind(x)] <= 0.0 or life[kind(x)] <= 0.0:
            return 1.0 / (1.0 + idle)
        rate = 1.0 / interval[kind(x)]
        return math.exp(-rate * idle) * (1.0 - math.exp(-rate * life[kind(x)]))

    for order, (b, now) in enumerate(zip(ids, times, strict=True)):
        if b in held:
            interval[kind(b)] = mean(interval[kind(b)], now - held[b]["used"])
        else:
            if len(held) == capacity:
                oldest = {}
                for x in sorted(held, key=lambda x: held[x]["order"]):
                    oldest.setdefault(kind(x), x)
                victim = min(sorted(oldest.values(), key=kind), key=lambda x: (chance(x, now), -trace.depth[x]))
                life[kind(victim)] = mean(life[kind(victim)], now - held[victim]["since"])
                gone.append(victim)
                del held[victim]
            held[b] = {"since": now}
        held[b].update(used=now, order=order)
    return gone


OBJECT_MODELS = {
    "lru": model_lru,
    "vllm": model_lru,
    "fifo": model_fifo,
    "mru": lambda ids, capacity, trace: model_fifo(ids, capacity, trace, last=True, touch=True),
    "filo": lambda ids, capacity, trace: model_fifo(ids, capacity, trace, last=True),
    "lfu": model_score(lambda uses, floor: uses),
    "gdsf": model_score(lambda uses, floor: floor + uses),
    "sglang_slru": model_score(lambda uses, floor: uses >= 2),
    "clock": model_clock,
    "sieve": model_sieve,
    "s3fifo": model_s3fifo,
    "arc": model_arc,
    "two_queues": model_two_queues,
    "belady": model_belady,
    "slru": model_slru,
    "lirs": model_lirs,
    "tinylfu": model_tinylfu,
    "random": model_of_draws(lambda bag, state, now: bag.draw(), count_uses),
    "hyperbolic": model_of_draws(
        least_of(64, lambda state, x, now: state[x]["uses"] / (now - state[x]["since"] + 1.0)), count_uses
    ),
    "marconi": model_of_draws(choose_marconi, count_uses),
    "lhd": model_of_draws(choose_lhd, use_lhd),
    "workload_aware": model_workload_aware,
}


def object_differences(name: str, seeds: range) -> int:
    """Runs whose victims are not the model's."""
    wrong = evictions = 0
    for seed in seeds:
        trace = random_requests(seed, requests=40) if name == "marconi" else objects(seed)  # its costs need positions
        for capacity in (3, 10, 17):
            ours = replay(trace, name, capacity_chunks=capacity, semantics="object", record_victims=True)
            expected = OBJECT_MODELS[name](trace.ids.tolist(), capacity, trace)
            evictions += len(expected)
            wrong += ours.victims.tolist() != expected
    assert evictions > 25 * len(seeds)
    return wrong


@pytest.mark.parametrize("name", OBJECT_MODELS)
def test_object_victims_are_those_of_a_model(name):
    assert object_differences(name, range(SHORT)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECT_MODELS)
def test_object_victims_are_those_of_a_model_on_1000_traces(name):
    assert object_differences(name, range(LONG)) == 0


@pytest.mark.parametrize("seed", range(5))
def test_belady_misses_least(seed):
    best = replay(objects(seed), "belady", capacity_chunks=8, semantics="object").hit_chunks.sum()
    for name in set(OBJECT_MODELS) - {"belady"}:
        assert best >= replay(objects(seed), name, capacity_chunks=8, semantics="object").hit_chunks.sum()


# Prefix semantics.


class PrefixModel:
    """The least (score, turn as a candidate) of all leaves goes that the request does not use.

    A chunk becomes a candidate when it is used as a leaf, or becomes one; what a request stored or used is told at its
    end. Written with sets and a search through all that is held.

    Args:
        trace, capacity: As in replay.
        touch: touch(record, everything) at each use; a record has uses, depth, request, now, order and so on.
        score: score(record, everything) when a victim is sought.
        gone: gone(record, everything) when one leaves.
        admit: admit(record of the newcomer, record of the victim); false keeps the newcomer and all after it out.
    """

    def __init__(self, trace, capacity, touch, score, gone=lambda x, e: None, admit=None, tail_first=True):
        self.trace, self.capacity, self.tail_first = trace, capacity, tail_first
        self.touch, self.score, self.gone, self.admit = touch, score, gone, admit
        self.held, self.everything, self.victims, self.turns, self.uses = {}, {"floor": 0.0}, [], 0, 0
        self.owner = np.zeros(trace.distinct, int)
        self.owner[trace.ids[::-1]] = np.repeat(trace.tenants, trace.lengths)[::-1]

    def run(self) -> list[int]:
        for q in range(self.trace.requests):
            start, stop = self.trace.offsets[q], self.trace.offsets[q + 1]
            self.request(q, self.trace.ids[start:stop].tolist()[: self.capacity], self.trace.next_use[start:stop])
        return self.victims

    def request(self, q, chain, next_use):
        known = [b for b in chain if b in self.held]
        for b, later in zip(chain, next_use.tolist(), strict=False):
            if b in self.held:
                self.held[b]["next_use"] = later
        for b, later in zip(chain[len(known) :], next_use.tolist()[len(known) :], strict=False):
            if len(self.held) == self.capacity and not self.make_room({"next_use": later}, chain):
                break
            self.held[b] = self.record(b, later)
            above = int(self.trace.parent[b])
            if above >= 0:
                self.held[above]["children"] += 1
        told = [b for b in chain if b in self.held]
        for b in reversed(told) if self.tail_first else told:
            x = self.held[b]
            self.uses += 1
            x.update(uses=x["uses"] + 1, request=q, now=float(self.trace.timestamps[q]), order=self.uses)
            x["born"] = x["born"] or self.uses
            self.touch(x, self.everything)
            self.become_candidate(x)

    def record(self, b, later):
        depth = int(self.trace.depth[b])
        seconds, load, nbytes = costs_at(depth)
        return {
            "id": b, "uses": 0, "born": 0, "children": 0, "turn": 0, "depth": depth, "next_use": later,
            "seconds": seconds, "load": load, "bytes": nbytes, "tenant": int(self.owner[b]),
        }  # fmt: skip

    def become_candidate(self, x):
        self.turns += 1
        x["turn"] = self.turns

    def make_room(self, newcomer, chain) -> bool:
        leaves = [x for x in self.held.values() if x["children"] == 0 and x["id"] not in chain]
        victim = min(leaves, key=lambda x: (self.score(x, self.everything), x["turn"]))
        self.gone(victim, self.everything)
        if self.admit and not self.admit(newcomer, victim):
            self.become_candidate(victim)
            return False
        self.victims.append(victim["id"])
        del self.held[victim["id"]]
        above = self.held.get(int(self.trace.parent[victim["id"]]))
        if above:
            above["children"] -= 1
            if above["children"] == 0:
                self.become_candidate(above)
        return True


def nothing(x, everything):
    pass


def set_to(value):
    def touch(x, everything):
        x["value"] = value(x, everything)

    return touch


def raise_floor(x, everything):
    everything["floor"] = max(everything["floor"], x["value"])


def worth(x, everything):
    saved = x["seconds"] - x["load"]
    return everything["floor"] + x["uses"] * saved / x["bytes"] if saved > 0 else -1.0


def note_reach(x, everything):
    reach = everything.setdefault("reach", defaultdict(int))
    reach[x["tenant"]] = max(reach[x["tenant"]], x["depth"] + 1)


def note_group(x, everything):
    x.setdefault("group", x["request"])
    everything.setdefault("groups", {})[x["group"]] = x["request"]


def value_of(x, everything):
    return x["value"]


PREFIX_MODELS = {
    "lru": dict(touch=nothing, score=lambda x, e: x["order"]),
    "vllm": dict(touch=nothing, score=lambda x, e: x["order"]),
    "fifo": dict(touch=nothing, score=lambda x, e: x["born"]),
    "lfu": dict(touch=nothing, score=lambda x, e: (x["uses"], x["request"])),
    "sglang_slru": dict(touch=nothing, score=lambda x, e: (x["uses"] >= 2, x["request"])),
    "length_aware": dict(touch=nothing, score=lambda x, e: (x["uses"], -x["depth"])),
    "gdsf": dict(touch=set_to(lambda x, e: e["floor"] + x["uses"]), score=value_of, gone=raise_floor),
    "pgdsf": dict(
        touch=set_to(lambda x, e: e["floor"] + x["uses"] * x["seconds"] / 16), score=value_of, gone=raise_floor
    ),
    "break_even": dict(touch=set_to(worth), score=value_of, gone=raise_floor),
    "ttl": dict(touch=set_to(lambda x, e: x["now"] + (3600.0 if x["depth"] < 4 else 300.0)), score=value_of),
    "tlru": dict(
        touch=note_reach,
        score=lambda x, e: (x["depth"] < max(0, e["reach"][x["tenant"]] + 4 - 64), x["request"]),
    ),
    "session_aware": dict(touch=note_group, score=lambda x, e: (e["groups"][x["group"]], -x["depth"])),
    "belady": dict(touch=nothing, score=lambda x, e: -x["next_use"]),
    "optimal": dict(
        touch=nothing, score=lambda x, e: -x["next_use"], admit=lambda new, old: new["next_use"] < old["next_use"]
    ),
}


def prefix_differences(name: str, seeds: range) -> int:
    """Runs whose victims are not the model's."""
    wrong = evictions = 0
    for seed in seeds:
        trace = random_requests(seed)
        for capacity in (8, 20):
            expected = PrefixModel(trace, capacity, **PREFIX_MODELS[name]).run()
            ours = replay(trace, name, capacity_chunks=capacity, record_victims=True).victims.tolist()
            evictions += len(expected)
            wrong += ours != expected
    assert evictions > 10 * len(seeds)
    return wrong


@pytest.mark.parametrize("name", PREFIX_MODELS)
def test_prefix_victims_are_those_of_a_model(name):
    assert prefix_differences(name, range(SHORT)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", PREFIX_MODELS)
def test_prefix_victims_are_those_of_a_model_on_1000_traces(name):
    assert prefix_differences(name, range(LONG)) == 0


# The policy of this project learns from what it saw; a model of it would be a copy. Its promises, on every trace:


def gittins_faults(seeds: range) -> int:
    """Runs that evict what is not held, is used by the request, or has children; or that evict too early."""
    faults = 0
    for seed in seeds:
        trace = random_requests(seed, requests=300)
        for capacity in (8, 20):
            victims = iter(replay(trace, "gittins", capacity_chunks=capacity, record_victims=True).victims.tolist())
            held: set[int] = set()
            for q in range(trace.requests):
                chain = trace.ids[trace.offsets[q] : trace.offsets[q + 1]].tolist()[:capacity]
                for b in chain:
                    if b not in held and len(held) == capacity:
                        gone = next(victims)
                        children = [x for x in held if trace.parent[x] == gone]
                        faults += gone not in held or gone in chain or bool(children)
                        held.discard(gone)
                    held.add(b)
            faults += next(victims, None) is not None
    return faults


def test_gittins_evicts_leaves_that_are_held_and_only_when_full():
    assert gittins_faults(range(SHORT)) == 0


@pytest.mark.slow
def test_gittins_keeps_its_promises_on_1000_traces():
    assert gittins_faults(range(LONG)) == 0


def test_every_policy_has_a_model():
    assert set(policy_names()) - set(OBJECT_MODELS) - set(PREFIX_MODELS) <= {"gittins", "mine"}
