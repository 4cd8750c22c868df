# ruff: noqa: F821 - on_hit, evict and the rest come with the policy or from _hooks.py
# pyright: reportUndefinedVariable=false
"""The order of one tier's chunks: which chunk goes next, with pins and prefixes kept out of the policies.

A template. workbench.policies.compiled joins it with _hooks.py and the methods of one policy into a module, compiled or
plain. `s[c]` is the record of chunk c, `r` the
record of scalars, `t` the side table. The names in capitals are answered when the module is written; int_() makes every
chunk index the same type, so that each function is compiled once.

A victim is never pinned and never has resident children. A candidate of evict() that may not go is set aside and put
back, through on_return, where evict() took it from: when its last pin or resident child is gone, or when it is hit.
Within a request the policy hears of hits and inserts when the request settles, in touch order; until then what was
hit keeps its old place, and what is new is in no one's order and cannot be a victim.
"""

ABSENT = 0  # not in this tier
ORDERED = 1  # the policy orders it
ASIDE = 2  # taken out by evict(), may not go yet
NEW = 3  # in the tier; the policy hears of it when the request settles
REMOVED = 4  # left the tier on request while the policy still orders it
NO_VICTIM = -1
BROKEN = -2  # evict() named a chunk that is not in its order; r._broken holds it

USES_HITS = USES_LAST_ACCESS = USES_INSERTED = REMOVES = False


def set_aside(s, r, t, c):
    s[c]._state = ASIDE


def put_back(s, r, t, c):
    s[c]._state = ORDERED
    r._held += 1
    on_return(s, r, t, c)


def restore(s, r, t, c):
    """The candidate stays after all: back to where evict() took it from."""
    r._held += 1
    on_return(s, r, t, c)


def become_free(s, r, t, c):
    """Chunk c has lost its last resident child or its last pin: it is a candidate, unless the other holds it."""
    if s[c]._state == ASIDE:
        put_back(s, r, t, c)
    elif s[c]._state == ORDERED:
        on_leaf(s, r, t, c)


def detach(s, r, t, c):
    """Chunk c is no longer in the tier: its parent may be a leaf now."""
    r.size -= 1
    parent = int_(s[c].parent)
    if parent >= 0:
        s[parent].children -= 1
        if s[parent].children == 0 and s[parent]._pins == 0:
            become_free(s, r, t, parent)


def next_candidate(s, r, t, incoming):
    """Take the next chunk that may go out of the order and return it, or NO_VICTIM, or BROKEN.

    The caller then calls take(), set_aside() or restore().
    """
    r.incoming = incoming
    while r._held > 0:
        c = evict(s, r, t)
        if c == NO_VICTIM:
            return NO_VICTIM
        if c < 0 or c >= len(s) or (s[c]._state != ORDERED and s[c]._state != REMOVED):
            r._broken = c
            return BROKEN
        r._held -= 1
        if s[c]._state == REMOVED:
            s[c]._state = ABSENT
            s[c]._next_buried = r._buried  # its index may be used again; the caller collects this list
            r._buried = c
        elif s[c]._pins > 0 or s[c].children > 0:
            set_aside(s, r, t, c)
        else:
            return c
    return NO_VICTIM


def take(s, r, t, c):
    """The candidate leaves the tier."""
    s[c]._state = ABSENT
    detach(s, r, t, c)


def next_victim(s, r, t, incoming):
    """Evict the next chunk that may go and return it, or NO_VICTIM, or BROKEN."""
    c = next_candidate(s, r, t, incoming)
    if c >= 0:
        take(s, r, t, c)
    return c


def enter(s, r, t, c):
    """Chunk c, whose parent is resident or -1, is now in the tier."""
    clear_fields(s, r, t, c)
    s[c]._state = NEW
    r.size += 1
    parent = int_(s[c].parent)
    if parent >= 0:
        s[parent].children += 1
        on_child(s, r, t, parent)


def touch_chunk(s, r, t, c):
    if USES_LAST_ACCESS:
        s[c].last_access = r.now
    if s[c]._state == NEW:
        s[c]._state = ORDERED
        r._held += 1
        if USES_HITS:
            s[c].hits = 0
        if USES_INSERTED:
            s[c].inserted = r.now
        on_insert(s, r, t, c)
        return
    if s[c]._state == ASIDE:
        put_back(s, r, t, c)
    if s[c]._state == ORDERED:
        if USES_HITS:
            s[c].hits += 1
        on_hit(s, r, t, c)


def settle(s, r, t, chunks, start, stop, tail_first):
    """End of a request: the policy hears of chunks[start:stop] in touch order."""
    if tail_first:
        for i in range(stop - 1, start - 1, -1):
            touch_chunk(s, r, t, int_(chunks[i]))
    else:
        for i in range(start, stop):
            touch_chunk(s, r, t, int_(chunks[i]))


def withdraw(s, r, t, c):
    """Remove c on request. Returns 1 if the policy has let go of it, 0 if its index must rest till evict() names it."""
    if s[c]._state == ASIDE:
        put_back(s, r, t, c)
    let_go = 1
    if s[c]._state == ORDERED:
        if REMOVES:
            on_remove(s, r, t, c)
            r._held -= 1
            s[c]._state = ABSENT
        else:
            s[c]._state = REMOVED
            let_go = 0
    else:
        s[c]._state = ABSENT
    detach(s, r, t, c)
    return let_go


def unpin(s, r, t, c):
    """The last pin of c went."""
    s[c]._pins = 0
    if s[c].children == 0:
        become_free(s, r, t, c)


NEXT, TAKE, SET_ASIDE, PUT_BACK, WITHDRAW, UNPIN = range(6)


def act(s, r, t, what, c):
    """One entry for the live engine, so that it compiles once: what to do, with which chunk."""
    if what == NEXT:
        return next_candidate(s, r, t, c)
    if what == TAKE:
        take(s, r, t, c)
    elif what == SET_ASIDE:
        set_aside(s, r, t, c)
    elif what == PUT_BACK:
        put_back(s, r, t, c)
    elif what == WITHDRAW:
        return withdraw(s, r, t, c)
    elif what == UNPIN:
        unpin(s, r, t, c)
    return 0
