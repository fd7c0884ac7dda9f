"""Changes to a graph's JSON that leave most of it in place, so that what is wrong lies deep inside."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

from roost.capture.ops import ALLOWED_OPS

Raw = dict[str, Any]
_OPS = sorted(ALLOWED_OPS)
_LEAVES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**40, 2**63 - 1, -(2**63), 2**63, 10**30, 0.0, 0.5, -1e300, 1e-300),
    *("", "none", "same", "ij->ji", "import os", "\ud800", "a" * 1000, [], {}, [[]], [1, 2], {"value": 0}, {"value": -1}),
    *({"infinity": 1}, {"infinity": 2}, {"dtype": "float16"}, {"dtype": "int64"}, {"dtype": "bool"}, {"dtype": "x"}),
)


def mutated(raw: Raw, rng: random.Random) -> Raw:
    """Return a changed copy of a graph's JSON; mostly with values numbered as the format wants it."""
    raw = copy.deepcopy(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        rng.choice(_CHANGES)(raw, rng)
    # Last: what follows it may no longer find what it looks for.
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        _change_leaf(raw, rng)
    if rng.random() < 0.8:
        _renumber(raw, rng)
    return raw


def _swap_nodes(raw: Raw, rng: random.Random) -> None:
    nodes = raw["nodes"]
    if len(nodes) > 1:
        a, b = rng.sample(range(len(nodes)), 2)
        nodes[a], nodes[b] = nodes[b], nodes[a]


def _delete_node(raw: Raw, rng: random.Random) -> None:
    if raw["nodes"]:
        del raw["nodes"][rng.randrange(len(raw["nodes"]))]


def _repeat_node(raw: Raw, rng: random.Random) -> None:
    if raw["nodes"]:
        raw["nodes"].insert(rng.randrange(len(raw["nodes"]) + 1), copy.deepcopy(rng.choice(raw["nodes"])))


def _other_operation(raw: Raw, rng: random.Random) -> None:
    if raw["nodes"]:
        node = rng.choice(raw["nodes"])
        same = [op for op in _OPS if op.split(".")[1][:4] == str(node[0])[5:9]]
        node[0] = rng.choice(same or _OPS) if rng.random() < 0.5 else rng.choice(_OPS)


def _change_argument(raw: Raw, rng: random.Random) -> None:
    nodes = [node for node in raw["nodes"] if isinstance(node[1], list) and node[1]]
    if nodes:
        arguments = rng.choice(nodes)[1]
        position = rng.randrange(len(arguments))
        match rng.randrange(4):
            case 0:
                del arguments[position]
            case 1:
                arguments.insert(position, copy.deepcopy(arguments[position]))
            case 2:
                arguments[position] = {"value": rng.randrange(40)}
            case _:
                arguments[position] = copy.deepcopy(rng.choice(_LEAVES))


def _change_tensor(raw: Raw, rng: random.Random) -> None:
    if raw["tensors"]:
        tensor = rng.choice(raw["tensors"])
        shape = tensor[2]
        if isinstance(shape, list) and shape and rng.random() < 0.5:
            shape[rng.randrange(len(shape))] = rng.choice((0, 1, 2, 3, 7, 10**6, -1))
        elif isinstance(shape, list) and rng.random() < 0.5:
            shape.insert(0, rng.choice((1, 2)))
        else:
            tensor[1] = rng.choice(("float64", "float16", "int64", "bool", "uint8"))
            tensor[4] = False if rng.random() < 0.7 else tensor[4]


def _change_leaf(raw: Raw, rng: random.Random) -> None:
    """Replace, delete or repeat something anywhere."""
    places: list[tuple[Any, Any]] = []

    def collect(item: Any) -> None:
        keys = item.keys() if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
        for key in keys:
            places.append((item, key))
            collect(item[key])

    collect(raw)
    holder, key = rng.choice(places)
    match rng.randrange(4):
        case 0 if holder is not raw:
            del holder[key]
        case 1 if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        case 2:
            other, other_key = rng.choice(places)
            if holder is not raw and key in (holder if isinstance(holder, dict) else range(len(holder))):
                holder[key] = (
                    copy.deepcopy(other[other_key]) if other_key in (other if isinstance(other, dict) else range(len(other))) else 0
                )
        case _:
            if holder is not raw or key not in ("nodes", "tensors", "data"):
                holder[key] = copy.deepcopy(rng.choice(_LEAVES))


_CHANGES: tuple[Callable[[Raw, random.Random], None], ...] = (
    _swap_nodes,
    _delete_node,
    _repeat_node,
    _other_operation,
    _change_argument,
    _change_argument,
    _change_tensor,
)


def _renumber(raw: Raw, rng: random.Random) -> None:
    """Number results in order again; references follow, or become ones to some earlier value."""
    numbers: dict[int, int] = {number: number for number in range(len(raw["data"]) + len(raw["tensors"]))}
    following = len(numbers)

    def renumbered(item: Any) -> Any:
        if isinstance(item, list):
            return [renumbered(part) for part in item]
        if isinstance(item, dict) and list(item) == ["value"] and isinstance(item["value"], int) and following:
            known = numbers.get(item["value"])
            return {"value": known if known is not None else rng.randrange(following)}
        return item

    for node in raw["nodes"]:
        if not isinstance(node, list) or len(node) != 5 or not isinstance(node[3], list) or not isinstance(node[2], dict):
            continue
        node[1] = renumbered(node[1])
        node[2] = {name: renumbered(item) for name, item in node[2].items()}
        old = [number for number in node[3] if isinstance(number, int)]
        node[3] = list(range(following, following + len(old)))
        numbers.update(zip(old, node[3], strict=True))
        following += len(old)
    for field in ("loss", "metric"):
        if isinstance(raw[field], int):
            raw[field] = numbers.get(raw[field], following - 1)
