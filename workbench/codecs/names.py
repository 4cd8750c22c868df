"""What a codec may be called: an object, "int8", or its repr, "int4(group=32)"."""

import ast
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from workbench.codecs.base import Codec
from workbench.errors import InvalidInputError, UnknownNameError

__all__ = ["codec_names", "resolve_codec"]

# Files of this package that are no codec of their own.
_NOT_CODECS = {"base", "names", "quantized", "payload", "symbol_coding"}


def codec_names() -> list[str]:
    """Every codec that comes with the workbench: the names of its files."""
    package = import_module("workbench.codecs")
    return sorted(m.name for m in iter_modules(package.__path__) if m.name not in _NOT_CODECS and m.name[0] != "_")


def resolve_codec(spec: Codec | str, **parameters: Any) -> Codec:
    """A codec from its name, with parameters in brackets or as keywords; an object is returned as it is.

    Raises:
        UnknownNameError: No such codec; the message lists those there are.
        InvalidInputError: Brackets that are not name=value pairs, or a parameter the codec does not have.
    """
    if not isinstance(spec, str):
        return spec
    name, given = _parse(spec)
    if name not in codec_names():
        raise UnknownNameError("codec", name, codec_names())
    module = import_module(f"workbench.codecs.{name}")
    try:
        return getattr(module, module.__all__[0])(**given | parameters)
    except TypeError as error:
        raise InvalidInputError(f"codec {spec!r}: {error}") from error


def _parse(spec: str) -> tuple[str, dict[str, Any]]:
    """("int4", {"group": 32}) of "int4(group=32)"; values are literals, nothing is evaluated."""
    if "(" not in spec:
        return spec, {}
    try:
        call = ast.parse(spec, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError("need name=value pairs in brackets")
        return call.func.id, {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise InvalidInputError(f"{spec!r} names no codec: {error}; write it as in 'int4(group=32)'") from error
