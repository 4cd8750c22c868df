# ruff: noqa: F821 - touch, score and on_evict come with the policy or from _hooks.py
# pyright: reportUndefinedVariable=false
"""The score form as a queue form: a lazy heap of the chunks that may go, lowest score first.

A template like _order.py, whose functions it replaces. An entry of the heap is (score, order, chunk); `order` rises by
one each time a chunk becomes a candidate, so it tells stale entries apart and breaks ties: the chunk that has been a
candidate longest goes first. A score is asked for when a chunk becomes a candidate and again when it is about to go;
if it has risen meanwhile the entry sinks to its new place. The choice is exact if no score falls while its chunk is
not touched.
"""

LEAVES_ONLY = False  # answered when the module is written: only unpinned leaves are candidates


def goes_before(t, score_a, order_a, i):
    return score_a < t[i]._score or (score_a == t[i]._score and order_a < t[i]._order)


def place(t, i, value, order, c):
    t[i]._score = value
    t[i]._order = order
    t[i]._chunk = c


def sift_up(t, i, value, order, c):
    while i > 0:
        up = (i - 1) >> 1
        if not goes_before(t, value, order, up):
            break
        place(t, i, t[up]._score, t[up]._order, int_(t[up]._chunk))
        i = up
    place(t, i, value, order, c)


def sift_down(t, size, value, order, c):
    i = 0
    while True:
        down = 2 * i + 1
        if down >= size:
            break
        if down + 1 < size and goes_before(t, t[down + 1]._score, t[down + 1]._order, down):
            down += 1
        if goes_before(t, value, order, down):
            break
        place(t, i, t[down]._score, t[down]._order, int_(t[down]._chunk))
        i = down
    place(t, i, value, order, c)


def drop_top(r, t):
    r._heap -= 1
    last = r._heap
    sift_down(t, last, t[last]._score, t[last]._order, int_(t[last]._chunk))


def drop_stale(s, r, t):
    """Make room in a full heap. At most one entry for each resident chunk is live, and the heap is larger than that."""
    size = r._heap
    live = 0
    for i in range(size):
        value = t[i]._score
        order = t[i]._order
        c = int_(t[i]._chunk)
        if s[c]._order == order:
            sift_up(t, live, value, order, c)
            live += 1
    r._heap = live


def become_candidate(s, r, t, c):
    if r._heap == len(t):
        drop_stale(s, r, t)
    r._order += 1
    s[c]._order = r._order
    r._heap += 1
    sift_up(t, r._heap - 1, score(s, r, t, c), r._order, c)


def on_hit(s, r, t, c):
    touch(s, r, t, c)
    s[c]._order = 0
    if LEAVES_ONLY:
        if s[c].children == 0:
            become_candidate(s, r, t, c)
    else:
        become_candidate(s, r, t, c)


def on_insert(s, r, t, c):
    on_hit(s, r, t, c)


def on_return(s, r, t, c):
    become_candidate(s, r, t, c)


def on_remove(s, r, t, c):
    s[c]._order = 0


def on_leaf(s, r, t, c):
    if s[c]._order == 0:
        become_candidate(s, r, t, c)


def on_child(s, r, t, c):
    s[c]._order = 0


def evict(s, r, t):
    while r._heap > 0:
        c = int_(t[0]._chunk)
        order = t[0]._order
        if s[c]._order != order:
            drop_top(r, t)
            continue
        if LEAVES_ONLY:  # noqa: SIM102 - answered when the module is written
            if s[c].children > 0 or s[c]._pins > 0:
                s[c]._order = 0
                drop_top(r, t)
                continue
        value = score(s, r, t, c)
        if value > t[0]._score:
            sift_down(t, r._heap, value, order, c)
            continue
        drop_top(r, t)
        s[c]._order = 0
        on_evict(s, r, t, c)
        return c
    return -1
