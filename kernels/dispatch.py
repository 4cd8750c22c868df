"""One public operation over several implementations: `op(..., impl="auto" | "reference" | "numba" | "triton")`.

An implementation is the reference itself, or "module:function", imported when it is first chosen, so that
importing an operation loads neither numba nor triton. `op.impls` maps each name to a callable: tests walk it, and a
new implementation is held to the reference unasked.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

__all__ = ["Implementations", "dispatch", "on_gpu"]


class Implementations(Mapping[str, Callable[..., Any]]):
    """Names to callables; those given as "module:function" are imported at first use."""

    def __init__(self, reference: Callable[..., Any], **fast: str):
        self._found: dict[str, Callable[..., Any]] = {"reference": reference}
        self._places = fast

    def __getitem__(self, name: str) -> Callable[..., Any]:
        if name not in self._found:
            if name not in self._places:
                raise KeyError(name)
            module, function = self._places[name].split(":")
            self._found[name] = getattr(import_module(module), function)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(("reference", *self._places))

    def __len__(self) -> int:
        return 1 + len(self._places)


def on_gpu(array: Any) -> bool:
    """Whether an array (NumPy, torch, or anything with `is_cuda`) lies in GPU memory."""
    return bool(getattr(array, "is_cuda", False))


def dispatch(reference: Callable[..., Any], *, check: Callable[..., None], **fast: str) -> Callable[..., Any]:
    """Make the public operation: it takes the reference's arguments and `impl`.

    "auto" takes triton where the first argument lies on a GPU (its `is_cuda`), else numba. A name that is not
    implemented raises ValueError with the names that are. `check` gets the same arguments first, and raises ValueError
    where they do not fit, so that no implementation has to.
    """
    impls = Implementations(reference, **fast)

    @functools.wraps(reference)
    def operation(*args: Any, impl: str = "auto", **options: Any) -> Any:
        if impl == "auto":
            impl = "triton" if on_gpu(args[0]) else "numba"
        if impl not in impls:
            raise ValueError(f"{operation.__name__}: no implementation {impl!r}; there are {', '.join(impls)}")
        check(*args, **options)
        return impls[impl](*args, **options)

    operation.__name__ = reference.__name__.removeprefix("_").removesuffix("_reference")
    operation.impls = impls  # type: ignore[attr-defined]
    return operation
