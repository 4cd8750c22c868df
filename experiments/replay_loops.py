# ruff: noqa: F821 - on_hit, evict, settle and the rest come with the policy and its order
# pyright: reportUndefinedVariable=false
"""Replay loops: a template that workbench.policies.compiled joins with one policy (see workbench/policies/_order.py).

Both return the number of evictions, or a negative number if the policy broke its contract. hits[q] is the number of
blocks of request q that were found, leading[q] the number before the first that was not; victims takes the chunks
evicted, as far as it reaches.
"""

BROKEN = -2

USES_NOW = USES_REQUEST = USES_SIZE = USES_INCOMING = USES_NEXT_USE = False
USES_HITS = USES_LAST_ACCESS = USES_INSERTED = ADMITS = False


def replay_objects(s, r, t, resident, ids, offsets, times, next_use, hits, leading, victims):
    """Every block access on its own, no prefixes: request numbers count accesses."""
    size = 0
    evictions = 0
    capacity = r.capacity
    for q in range(len(offsets) - 1):
        found = 0
        unbroken = -1
        if USES_NOW:
            r.now = times[q]
        for i in range(offsets[q], offsets[q + 1]):
            c = int_(ids[i])
            if USES_REQUEST:
                r.request = i
            if USES_NEXT_USE:
                s[c].next_use = next_use[i]
            if USES_LAST_ACCESS:
                s[c].last_access = times[q]
            if resident[c]:
                found += 1
                if USES_HITS:
                    s[c].hits += 1
                on_hit(s, r, t, c)
                continue
            if unbroken < 0:
                unbroken = found
            if size == capacity:
                if USES_INCOMING:
                    r.incoming = c
                victim = evict(s, r, t)
                if victim < 0 or victim >= len(resident) or resident[victim] == 0:
                    r._broken = victim
                    return BROKEN
                if ADMITS:  # noqa: SIM102 - answered when the module is written
                    if not admit(s, r, t, c, victim):
                        on_return(s, r, t, victim)
                        continue
                resident[victim] = 0
                if evictions < len(victims):
                    victims[evictions] = victim
                evictions += 1
            else:
                size += 1
                if USES_SIZE:
                    r.size = size
            resident[c] = 1
            clear_fields(s, r, t, c)
            if USES_HITS:
                s[c].hits = 0
            if USES_INSERTED:
                s[c].inserted = times[q]
            on_insert(s, r, t, c)
        hits[q] = found
        leading[q] = found if unbroken < 0 else unbroken
    return evictions


def replay_prefixes(s, r, t, ids, offsets, times, next_use, tail_first, hits, victims):
    """Requests whose hit is the contiguous prefix; what a request uses is not evicted for it.

    Only the deepest hit needs a pin: what is above it has a resident child, what is new is in no order yet.
    """
    evictions = 0
    capacity = r.capacity
    for q in range(len(offsets) - 1):
        start = offsets[q]
        stop = min(offsets[q + 1], start + capacity)  # a longer request keeps the prefix that fits
        r.now = times[q]
        r.request = q
        end = start
        while end < stop and s[ids[end]]._state != 0:
            end += 1
        hits[q] = end - start
        if USES_NEXT_USE:
            for i in range(start, stop):
                s[ids[i]].next_use = next_use[i]
        pinned = -1
        if start < end < stop:
            pinned = int_(ids[end - 1])
            s[pinned]._pins = 1
        while end < stop:
            c = int_(ids[end])
            if r.size == capacity:
                victim = next_candidate(s, r, t, c)
                if victim < 0:
                    return victim
                if ADMITS:  # noqa: SIM102
                    if not admit(s, r, t, c, victim):
                        restore(s, r, t, victim)
                        break
                take(s, r, t, victim)
                if evictions < len(victims):
                    victims[evictions] = victim
                evictions += 1
            enter(s, r, t, c)
            end += 1
        if pinned >= 0:
            s[pinned]._pins = 0  # settle() puts it back, if it was set aside
        settle(s, r, t, ids, start, end, tail_first)
    return evictions
