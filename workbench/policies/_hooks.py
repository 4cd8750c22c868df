"""What a policy's methods are when the policy does not have them.

A template, first of those that workbench.policies.compiled joins; a later function of the same name replaces one here.
"""


def on_hit(s, r, t, c):
    raise NotImplementedError


def on_insert(s, r, t, c):
    raise NotImplementedError


def evict(s, r, t):
    raise NotImplementedError


def admit(s, r, t, c, victim):
    return True


def on_return(s, r, t, c):
    on_insert(s, r, t, c)


def on_remove(s, r, t, c):
    pass


def is_ghost(s, r, t, c):
    return False


def touch(s, r, t, c):
    pass


def score(s, r, t, c):
    raise NotImplementedError


def on_evict(s, r, t, c):
    pass


def on_leaf(s, r, t, c):
    """Chunk c became a leaf, or lost its pins; the score form has one."""


def on_child(s, r, t, c):
    """A resident child of c arrived; the score form has one."""
