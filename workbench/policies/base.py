"""The form of a policy: one small class, written once, that runs compiled in replay and live in the engine.

Queue form: `on_insert(c)`, `on_hit(c)` and `evict() -> c` over declared per-chunk `fields` and `scalars`.
Score form: `touch(c)` and `score(c) -> float`; the lowest-scored unpinned leaf is evicted first, through a lazy heap.

    @policy
    class Fifo:
        fields = dict(newer="i4")            # one value for each chunk
        scalars = dict(oldest=-1, newest=-1)  # state and settings; settable as keywords: Fifo(oldest=-1)
        def on_hit(self, c): pass
        def on_insert(self, c): ...
        def evict(self): ...                  # called only while at least one chunk is in the order

A chunk `c` is a small integer. Optional methods: `on_remove(c)` (the chunk left without being evicted; by default the
engine skips it when evict() names it later), `on_return(c)` (a candidate that is pinned or has resident children is
put back where evict() took it from; default on_insert), `on_leaf(c)` (c lost its last resident child, or its pins),
`is_ghost(c)` (true while the policy remembers the evicted chunk c; without it a chunk's fields are zero when it is
inserted), `on_evict(c)` (score form: c is about to go), and `admit(c, victim)` (replay only: false keeps the missing
chunk c out and the victim in). A `table` holds what is not per
chunk, such as a sketch: fields like those of chunks, indexed from 0 to self.table_entries - 1, a power of two that is
at least `table_size` for each chunk of capacity and at least `table_min`. `compile = False` keeps a class plain Python,
to step through it in a debugger.
"""

import difflib
import math
from dataclasses import dataclass
from typing import Any

from workbench.errors import CacheError, InvalidInputError

__all__ = [
    "CHUNK_FIELDS",
    "ENGINE_SCALARS",
    "HOOKS",
    "PolicyError",
    "PolicyForm",
    "form_of",
    "policy",
    "registered_policies",
]

# What the engine knows of a chunk; a policy reads it by name (self.depth[c]) and pays only for what it mentions.
CHUNK_FIELDS = {
    "depth": "i4",  # chunks above it in its prefix
    "parent": "i4",  # the chunk right above it, or -1
    "children": "i4",  # resident chunks right below it, in this tier
    "nbytes": "i8",  # stored bytes
    "tokens": "i4",  # tokens it covers
    "recompute_seconds": "f8",  # prefill time that a hit saves
    "load_seconds": "f8",  # time to load it from this tier
    "tenant": "i4",  # who stored it
    "last_access": "f8",  # seconds, of the last insert or hit
    "hits": "i4",  # since it was inserted
    "inserted": "f8",  # seconds
    "key": "i8",  # 64 bits of its identity: the same when the chunk comes back after eviction
    "next_use": "f8",  # number of the next request that uses it, infinity if none does; replay only
}
ENGINE_SCALARS = {
    "now": "f8",  # seconds
    "request": "i8",  # sequence number
    "capacity": "i8",  # chunks the tier holds
    "size": "i8",  # chunks in the tier
    "incoming": "i8",  # inside evict(): the chunk that needs the room, -1 if the engine does not know it
    "table_entries": "i8",  # entries of the side table, a power of two
}
FIELD_TYPES = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8")
QUEUE_METHODS = ("on_hit", "on_insert", "evict")
QUEUE_ONLY = (*QUEUE_METHODS, "on_remove", "on_return", "on_leaf")
SCORE_ONLY = ("touch", "score", "on_evict")
HOOKS = (*QUEUE_ONLY, *SCORE_ONLY, "is_ghost", "admit")
_registered: dict[str, type] = {}


class PolicyError(CacheError):
    """A policy broke its contract: evict() named a chunk that is not in its order, or none while it holds some."""


@dataclass(frozen=True)
class PolicyForm:
    """What `@policy` read from a class.

    Attributes:
        name: Class name.
        fields: Declared per-chunk fields, name -> NumPy type string.
        scalars: Declared scalars, name -> initial value.
        table: Fields of the side table, empty for most policies.
        table_size: Table entries for each chunk of capacity.
        table_min: The fewest table entries.
        scored: True for the score form.
        methods: Method name -> function, inherited ones included.
    """

    name: str
    fields: dict[str, str]
    scalars: dict[str, int | float]
    table: dict[str, str]
    table_size: int
    table_min: int
    scored: bool
    methods: dict[str, Any]


def policy(cls: type) -> type:
    """Check the form of a policy class, give it a constructor from its scalars, and register it by its name.

    Raises:
        InvalidInputError: A method is missing, misnamed or of the other form, a type is unknown, or a declared name
            clashes with one that the engine provides.
    """
    _registered[cls.__name__] = take_form(cls)
    return cls


def take_form(cls: type) -> type:
    """What @policy does, without registering the class."""
    form = _read_form(cls)
    cls.kv_form = form
    if "__init__" not in form.methods:
        cls.__init__ = _set_scalars
    if "__repr__" not in form.methods:
        cls.__repr__ = _show_scalars
    return cls


def form_of(policy_object: Any) -> PolicyForm:
    """The form of a policy class or instance.

    Raises:
        InvalidInputError: It is not a class decorated with @policy.
    """
    cls = policy_object if isinstance(policy_object, type) else type(policy_object)
    if "kv_form" not in vars(cls):
        raise InvalidInputError(f"{cls.__name__} is not a policy: decorate the class with @policy")
    return cls.kv_form


def registered_policies() -> dict[str, type]:
    """Classes decorated in this process, by class name; the newest of a name wins."""
    return dict(_registered)


def _read_form(cls: type) -> PolicyForm:
    methods: dict[str, Any] = {}
    for base in reversed(cls.__mro__[:-1]):
        methods.update({name: f for name, f in vars(base).items() if callable(f) and hasattr(f, "__code__")})
    # A subclass of a policy inherits the constructor that @policy gave its base; that one is not the author's.
    methods = {name: f for name, f in methods.items() if f not in (_set_scalars, _show_scalars)}
    _check_methods(cls.__name__, methods)
    form = PolicyForm(
        name=cls.__name__,
        fields=_declared(cls, "fields"),
        scalars=_declared(cls, "scalars"),
        table=_declared(cls, "table"),
        table_size=int(getattr(cls, "table_size", 1)),
        table_min=int(getattr(cls, "table_min", 1)),
        scored="score" in methods,
        methods=methods,
    )
    _check_names(form)
    _check_types(form)
    return form


def _check_methods(policy_name: str, methods: dict[str, Any]) -> None:
    """One form, whole, with the engine's names and arguments."""
    other = QUEUE_ONLY if "score" in methods else SCORE_ONLY
    mixed = [name for name in other if name in methods]
    missing = [name for name in QUEUE_METHODS if name not in methods]
    for name in methods:
        if name.startswith("on_") and name not in HOOKS:
            meant = difflib.get_close_matches(name, HOOKS, 1)
            hint = f"; did you mean {meant[0]}?" if meant else ""
            raise InvalidInputError(f"policy {policy_name} defines {name}, which the engine never calls{hint}")
    if "score" in methods and mixed:
        raise InvalidInputError(
            f"policy {policy_name} defines score and {', '.join(mixed)}: in the score form the engine keeps the order "
            "itself; define touch and score, or on_hit, on_insert and evict"
        )
    if "score" not in methods and missing:
        raise InvalidInputError(
            f"policy {policy_name} lacks {', '.join(missing)}; it needs on_hit, on_insert and evict, or score"
        )
    if "score" not in methods and mixed:
        raise InvalidInputError(
            f"policy {policy_name} defines {', '.join(mixed)}, which only the score form has; "
            "in the queue form that work belongs in on_hit, on_insert and evict"
        )
    for name in methods.keys() & set(HOOKS):
        wanted = {"evict": (), "admit": ("c", "victim")}.get(name, ("c",))
        code = methods[name].__code__
        if code.co_argcount != 1 + len(wanted) or code.co_kwonlyargcount:
            got = ", ".join(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
            raise InvalidInputError(f"policy {policy_name}: {name}({got}) must take ({', '.join(('self', *wanted))})")


def _declared(cls: type, what: str) -> dict[str, Any]:
    value = getattr(cls, what, {})
    if not isinstance(value, dict):
        example = "dict(head=-1)" if what == "scalars" else 'dict(used="f8")'
        raise InvalidInputError(f"{what} of policy {cls.__name__} must be a dict such as {example}, got {value!r}")
    return dict(value)


def _check_names(form: PolicyForm) -> None:
    names = [*form.fields, *form.scalars, *form.table]
    taken = set(CHUNK_FIELDS) | set(ENGINE_SCALARS) | set(form.methods)
    for name in names:
        if name in taken or names.count(name) > 1 or name.startswith("_") or not name.isidentifier():
            raise InvalidInputError(
                f"policy {form.name} may not declare {name!r}: names are unique, have no leading underscore, and "
                f"differ from its methods and from what the engine provides: {', '.join(sorted(taken))}"
            )


def _check_types(form: PolicyForm) -> None:
    for name, kind in {**form.fields, **form.table}.items():
        if kind not in FIELD_TYPES:
            raise InvalidInputError(
                f"field {name!r} of policy {form.name} has type {kind!r}; types are {', '.join(FIELD_TYPES)}"
            )
    for name, value in form.scalars.items():
        if not isinstance(value, int | float):
            raise InvalidInputError(f"scalar {name!r} of policy {form.name} must be an int or a float, got {value!r}")


def _set_scalars(self: Any, **scalars: float) -> None:
    form = form_of(self)
    unknown = [name for name in scalars if name not in form.scalars]
    if unknown:
        raise InvalidInputError(
            f"policy {form.name} has no setting {unknown[0]!r}; it has {', '.join(form.scalars) or 'none'}"
        )
    for name, default in form.scalars.items():
        setattr(self, name, _as_declared(form, name, scalars.get(name, default)))


def _as_declared(form: PolicyForm, name: str, value: Any) -> int | float:
    wanted = float if isinstance(form.scalars[name], float) else int
    if not isinstance(value, int | float) or math.isnan(value) or (wanted is int and value != int(value)):
        raise InvalidInputError(f"{name} of policy {form.name} must be of type {wanted.__name__}, got {value!r}")
    return wanted(value)


def _show_scalars(self: Any) -> str:
    form = form_of(self)
    changed = [
        f"{name}={getattr(self, name)!r}" for name, default in form.scalars.items() if getattr(self, name) != default
    ]
    return f"{form.name}({', '.join(changed)})"
