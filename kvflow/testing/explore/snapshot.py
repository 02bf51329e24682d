"""Copies and fingerprints of object graphs, for the types that cores consist of."""

import copy
import enum
import hashlib
import itertools
import types
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

__all__ = ["copied", "fingerprint"]

ATOMS = (int, float, str, bytes, bool, type(None), enum.Enum, type, types.FunctionType, types.BuiltinFunctionType)


def copied(value: Any, memo: dict[int, Any]) -> Any:  # noqa: C901, PLR0912 - one branch per kind of object
    """Copy an object and everything that it refers to, except immutable parts.

    Args:
        value: Object to copy.
        memo: Objects already copied, by id.
    """
    if isinstance(value, ATOMS):
        return value
    if isinstance(value, np.ndarray):
        return value.copy() if value.flags.writeable else value
    known = memo.get(id(value))
    if known is not None:
        return known
    result: Any
    if isinstance(value, tuple):
        items = [copied(item, memo) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        result = type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    elif isinstance(value, msgspec.Struct) and value.__struct_config__.frozen:
        return value
    elif isinstance(value, types.MethodType):
        result = types.MethodType(value.__func__, copied(value.__self__, memo))
    elif isinstance(value, dict):
        result = memo[id(value)] = type(value)()
        for key, item in value.items():
            result[copied(key, memo)] = copied(item, memo)
    elif isinstance(value, (list, deque)):
        result = memo[id(value)] = type(value)() if isinstance(value, list) else deque(maxlen=value.maxlen)
        result.extend(copied(item, memo) for item in value)
    elif isinstance(value, itertools.count):
        result = itertools.count(_position(value))
    else:
        if isinstance(value, types.MappingProxyType) or not _has_fields(value):
            return value
        is_struct = isinstance(value, msgspec.Struct)
        result = memo[id(value)] = copy.copy(value) if is_struct else object.__new__(type(value))
        put = setattr if is_struct else object.__setattr__
        for name, item in _fields(value):
            put(result, name, copied(item, memo))
        return result
    memo[id(value)] = result
    return result


def fingerprint(value: Any) -> bytes:
    """Return equal bytes for equal graphs, regardless of the identities of their objects."""
    digest = hashlib.blake2b(digest_size=16)
    seen: dict[int, int] = {}
    stack: list[Any] = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, (int, float, str, bytes, bool, type(None))):
            digest.update(repr(item).encode())
        elif isinstance(item, enum.Enum):
            digest.update(item.name.encode())
        elif isinstance(item, (type, types.FunctionType, types.BuiltinFunctionType)):
            digest.update(item.__qualname__.encode())
        elif isinstance(item, types.MethodType):
            digest.update(item.__func__.__qualname__.encode())
        elif isinstance(item, msgspec.Struct) and item.__struct_config__.frozen:
            digest.update(_frozen(item))
        elif isinstance(item, np.ndarray):
            digest.update(item.tobytes())
        elif isinstance(item, itertools.count):
            digest.update(repr(_position(item)).encode())
        else:
            number = seen.get(id(item))
            if number is not None:
                digest.update(b"@%d" % number)
                continue
            seen[id(item)] = len(seen)
            stack.extend(_parts(item, digest))
        digest.update(b";")
    return digest.digest()


_frozen_digests: dict[int, tuple[Any, bytes]] = {}


def _frozen(item: Any) -> bytes:
    """Return the digest of an immutable object, computed once."""
    known = _frozen_digests.get(id(item))
    if known is not None and known[0] is item:
        return known[1]
    result = type(item).__name__.encode() + fingerprint([getattr(item, name) for name in item.__struct_fields__])
    _frozen_digests[id(item)] = (item, result)
    return result


def _parts(item: Any, digest: Any) -> Iterator[Any]:
    digest.update(type(item).__name__.encode())
    if isinstance(item, (tuple, list, deque)):
        digest.update(b"%d" % len(item))
        yield from item
    elif isinstance(item, (dict, OrderedDict, types.MappingProxyType)):
        digest.update(b"%d" % len(item))
        for key, part in item.items():
            yield part
            yield key
    elif _has_fields(item):
        for name, part in _fields(item):
            digest.update(name.encode())
            yield part


def _has_fields(value: Any) -> bool:
    return hasattr(value, "__dict__") or hasattr(type(value), "__slots__") or isinstance(value, msgspec.Struct)


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield name, getattr(value, name)
        return
    for kind in type(value).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if name not in ("__weakref__", "__dict__") and hasattr(value, name):
                yield name, getattr(value, name)
    yield from getattr(value, "__dict__", {}).items()


def _position(count: "itertools.count[int]") -> int:
    return int(repr(count).removeprefix("count(").removesuffix(")"))
