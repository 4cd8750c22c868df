# ruff: noqa: F821 - next_candidate, enter, settle and the rest come with the policy's order
# pyright: reportUndefinedVariable=false
"""What one tier does in a request: a template that workbench.policies.compiled joins with the policy of that tier.

A chunk's id in the trace is its index in every tier, so a chunk without its parent, which lives in another tier, still
counts as the parent's child. Victims are handed on through arrays: what one tier's evict() names, the next receives.
"""

BROKEN = -2
REMOVED = 4  # of _order.py


def look(s, ids, start, stop, places, tier):
    """places[i] = tier for each chunk that is here and was not found in a faster tier."""
    for i in range(start, stop):
        state = s[ids[i]]._state
        if places[i - start] < 0 and state != 0 and state != REMOVED:
            places[i - start] = tier


def begin(r, now, request):
    r.now = now
    r.request = request


def give(s, r, t, ids, start, stop, places, tier):
    """Chunks found here move to the first tier."""
    for i in range(start, stop):
        if places[i - start] == tier:
            withdraw(s, r, t, int_(ids[i]))


def put(s, r, t, c):
    if s[c]._state == REMOVED:  # the policy still orders it: as if it had never left
        s[c]._state = 1
        r.size += 1
        parent = int_(s[c].parent)
        if parent >= 0:
            s[parent].children += 1
    else:
        enter(s, r, t, c)


def serve(s, r, t, ids, start, stop, places, tier, tail_first, told, victims):
    """The request's own chunks: those found in this tier or a faster one are hits if they are here, the rest enter.

    told is room for the chunks that the policy hears of. Returns the number of victims, or a negative number if the
    policy broke its contract.
    """
    evictions = 0
    count = 0
    last = -1
    for i in range(start, stop):
        c = int_(ids[i])
        if s[c]._state != 0 and s[c]._state != REMOVED:
            last = c
    if last >= 0:
        s[last]._pins = 1
    for i in range(start, stop):
        c = int_(ids[i])
        here = s[c]._state != 0 and s[c]._state != REMOVED
        if not here:
            if tier > 0 and places[i - start] == 0:
                continue  # it was written here once, and evicted
            if r.size == r.capacity:
                victim = next_candidate(s, r, t, c)
                if victim == BROKEN:
                    return BROKEN
                if victim < 0:
                    break
                take(s, r, t, victim)
                victims[evictions] = victim
                evictions += 1
            put(s, r, t, c)
        told[count] = c
        count += 1
    if last >= 0:
        unpin(s, r, t, last)
    settle(s, r, t, told, 0, count, tail_first)
    return evictions


def receive(s, r, t, demoted, count, told, victims):
    """Chunks that fell out of the tier above, the first to fall as the oldest. Returns the number of victims."""
    evictions = 0
    for i in range(count):
        c = int_(demoted[i])
        if r.size == r.capacity:
            victim = next_candidate(s, r, t, c)
            if victim == BROKEN:
                return BROKEN
            if victim < 0:
                victims[evictions] = c  # no room for it: it falls on
                evictions += 1
                continue
            take(s, r, t, victim)
            victims[evictions] = victim
            evictions += 1
        put(s, r, t, c)
        told[0] = c
        settle(s, r, t, told, 0, 1, True)
    return evictions


def mark_held(s, chunks, count, marks):
    """marks[i] = 1 for each chunk that is here."""
    for i in range(count):
        if s[int_(chunks[i])]._state != 0 and s[int_(chunks[i])]._state != REMOVED:
            marks[i] = 1
