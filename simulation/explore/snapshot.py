"""Copies and fingerprints of object graphs, for the kinds of objects that the cores are made of.

An exploration spends its time here, so what to do with an object is decided once for each type.
"""

import copy
import enum
import functools
import hashlib
import itertools
import operator
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from kvflow.state.timers import Timers

__all__ = ["copied", "fingerprint"]

SCALARS = (int, float, str, bytes, type(None))
NAMED = (type, types.BuiltinFunctionType)

Memo: TypeAlias = dict[int, Any]
Copier: TypeAlias = Callable[[Any, Memo], Any]
Marker: TypeAlias = Callable[[Any], str]
"""Returns all that tells an object without parts from others of its type."""

Divider: TypeAlias = Callable[[Any], tuple[str, Iterable[Any]]]
"""Returns the type of an object and the number or names of its parts, and the parts."""


def copied(value: Any, memo: Memo) -> Any:
    """Copy an object and everything it refers to, except for what cannot change.

    Args:
        value: The object.
        memo: Copies made so far, by id of the original.
    """
    copier = _copier_of(_type_of(value))
    return value if copier is None else copier(value, memo)


def fingerprint(value: Any) -> bytes:
    """Return equal bytes for equal graphs, whatever the identities of their objects are."""
    marks: list[str] = []
    seen: dict[int, int] = {}
    stack: list[Any] = [value]
    while stack:
        item = stack.pop()
        kind = _type_of(item)
        mark = _marker_of(kind)
        if mark is not None:
            marks.append(mark(item))
            continue
        number = seen.get(id(item))
        if number is not None:
            marks.append(f"@{number}")
            continue
        seen[id(item)] = len(seen)
        head, parts = _divider_of(kind)(item)
        marks.append(head)
        stack.extend(parts)
    return hashlib.blake2b(";".join(marks).encode(), digest_size=16).digest()


# Copies ------------------------------------------------------------------------------------------------------------


@functools.cache
def _copier_of(kind: type) -> Copier | None:
    """Return what copies the objects of a type; None if they cannot change."""
    if issubclass(kind, (*SCALARS, *NAMED, enum.Enum, types.MappingProxyType)) or _is_frozen_struct(kind):
        return None
    if issubclass(kind, np.ndarray):
        return lambda array, _: array.copy() if array.flags.writeable else array
    if issubclass(kind, tuple):
        return functools.partial(_copy_tuple, kind._make if hasattr(kind, "_make") else tuple)
    for base, copier in _COPIERS.items():
        if issubclass(kind, base):
            return copier
    if issubclass(kind, msgspec.Struct):
        return functools.partial(_copy_struct, kind.__struct_fields__)
    return functools.partial(_copy_object, _slots(kind)) if _has_fields(kind) else None


def _copy_tuple(make: Callable[[list[Any]], Any], value: tuple[Any, ...], memo: Memo) -> Any:
    known = memo.get(id(value))
    if known is not None:
        return known
    items = [copied(item, memo) for item in value]
    result = value if all(map(operator.is_, items, value)) else make(items)
    memo[id(value)] = result
    return result


def _copy_method(value: types.MethodType, memo: Memo) -> types.MethodType:
    return types.MethodType(value.__func__, copied(value.__self__, memo))


def _copy_dict(value: dict[Any, Any], memo: Memo) -> Any:
    known = memo.get(id(value))
    if known is not None:
        return known
    result = memo[id(value)] = type(value)()
    for key, item in value.items():
        result[copied(key, memo)] = copied(item, memo)
    return result


def _copy_sequence(value: Any, memo: Memo) -> Any:
    known = memo.get(id(value))
    if known is not None:
        return known
    result = memo[id(value)] = deque(maxlen=value.maxlen) if isinstance(value, deque) else type(value)()
    result.extend(copied(item, memo) for item in value)
    return result


def _copy_count(value: "itertools.count[int]", memo: Memo) -> "itertools.count[int]":
    if id(value) not in memo:
        memo[id(value)] = itertools.count(_position(value))
    result: itertools.count[int] = memo[id(value)]
    return result


def _copy_struct(fields: tuple[str, ...], value: Any, memo: Memo) -> Any:
    known = memo.get(id(value))
    if known is not None:
        return known
    result = memo[id(value)] = copy.copy(value)
    for name in fields:
        setattr(result, name, copied(getattr(value, name), memo))
    return result


def _copy_object(slots: tuple[str, ...], value: Any, memo: Memo) -> Any:
    known = memo.get(id(value))
    if known is not None:
        return known
    result = memo[id(value)] = object.__new__(type(value))
    for name in slots:
        if hasattr(value, name):
            object.__setattr__(result, name, copied(getattr(value, name), memo))
    attributes = getattr(value, "__dict__", None)
    if attributes:
        result.__dict__.update({name: copied(item, memo) for name, item in attributes.items()})
    return result


def _copy_function(value: types.FunctionType, _memo: Memo) -> types.FunctionType:
    """Return the function itself. What it encloses would be that of the original, not of the copy."""
    if value.__closure__:
        raise TypeError(f"{value.__qualname__} encloses variables: cores are made of methods")
    return value


_COPIERS: Mapping[type, Copier] = {
    types.FunctionType: _copy_function,
    types.MethodType: _copy_method,
    dict: _copy_dict,
    list: _copy_sequence,
    deque: _copy_sequence,
    itertools.count: _copy_count,
}

# Fingerprints ------------------------------------------------------------------------------------------------------


@functools.cache
def _marker_of(kind: type) -> Marker | None:
    """Return what marks the objects of a type; None if they have parts."""
    for bases, marker in _MARKERS:
        if issubclass(kind, bases):
            return marker
    return _mark_frozen if _is_frozen_struct(kind) else None


def _mark_frozen(item: Any) -> str:
    """Mark something that cannot change, which is worked out once."""
    known = _frozen_marks.get(id(item))
    if known is not None and known[0] is item:
        return known[1]
    mark = type(item).__name__ + fingerprint([getattr(item, name) for name in item.__struct_fields__]).hex()
    _frozen_marks[id(item)] = (item, mark)
    return mark


_frozen_marks: dict[int, tuple[Any, str]] = {}

_MARKERS: tuple[tuple[type | tuple[type, ...], Marker], ...] = (
    (enum.Enum, lambda item: item.name),
    (SCALARS, repr),
    ((*NAMED, types.FunctionType), lambda item: item.__qualname__),
    (types.MethodType, lambda item: item.__func__.__qualname__),
    (np.ndarray, lambda item: item.tobytes().hex()),
    (itertools.count, repr),
)


@functools.cache
def _divider_of(kind: type) -> Divider:
    """Return what divides the objects of a type."""
    name = kind.__name__
    if issubclass(kind, (tuple, list, deque)):
        return lambda item: (f"{name}{len(item)}", item)
    if issubclass(kind, (dict, types.MappingProxyType)):
        return lambda item: (f"{name}{len(item)}", itertools.chain.from_iterable(item.items()))
    if issubclass(kind, msgspec.Struct):
        fields = kind.__struct_fields__
        return lambda item: (name, [getattr(item, field) for field in fields])
    if issubclass(kind, Timers):
        return _divide_timers
    return functools.partial(_divide_object, name, _slots(kind))


def _divide_timers(item: "Timers[Any]") -> tuple[str, list[Any]]:
    """Return what is due, in order. How often each timer was set before makes no difference to what can happen."""
    due = sorted(item._due.values(), key=lambda entry: entry[:2])
    return f"Timers{len(due)}", [part for when, _, key in due for part in (when, key)]


def _divide_object(name: str, slots: tuple[str, ...], item: Any) -> tuple[str, list[Any]]:
    attributes = {slot: getattr(item, slot) for slot in slots if hasattr(item, slot)}
    attributes.update(getattr(item, "__dict__", {}))
    return f"{name}:{','.join(attributes)}", list(attributes.values())


# Types -------------------------------------------------------------------------------------------------------------


_type_of: Final[Callable[[Any], Hashable]] = type


def _is_frozen_struct(kind: type) -> bool:
    return issubclass(kind, msgspec.Struct) and kind.__struct_config__.frozen


def _has_fields(kind: type) -> bool:
    return hasattr(kind, "__slots__") or getattr(kind, "__dictoffset__", 0) != 0


def _slots(kind: type) -> tuple[str, ...]:
    names = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
    return tuple(name for name in names if name not in ("__weakref__", "__dict__"))


def _position(count: "itertools.count[int]") -> int:
    return int(repr(count).removeprefix("count(").removesuffix(")"))
