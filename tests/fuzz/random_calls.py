"""Random graphs whose calls fit their schemas: every allowed operation, with tensors and numbers of all kinds and extremes."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from call_templates import TEMPLATES

from roost.capture.graph import FORMAT_VERSION, running_torch_version
from roost.capture.graph_format import from_bytes
from roost.capture.ops import ALLOWED_OPS, SCALAR_OPS, SIZE_OP
from roost.capture.signatures import Parameter, signature_of
from roost.capture.sizes import check_sizes
from roost.errors import GraphFormatError

Raw = dict[str, Any]
Call = tuple[str, list[Any], Raw]

BATCH = 2
SHAPES = ((BATCH, 4), (BATCH,), (BATCH, 4, 8, 8), (BATCH, 5, 4))
"""Of the data inputs of a random graph."""
LIMIT_BYTES = 32 << 20
TRIES = 40
"""Calls that are made up before one is found whose arguments make sense."""
OPS = sorted(ALLOWED_OPS)

_DATA = [
    ["input_0", "float32", [None, 4]],
    ["input_1", "int64", [None]],
    ["input_2", "float32", [None, 4, 8, 8]],
    ["input_3", "float32", [None, 5, 4]],
]
_FLOATS: list[list[int]] = [
    *([], [1], [2], [4], [8], [12], [16], [300], [1, 1], [4, 4], [1, 4], [4, 1], [12, 4], [16, 4], [8, 4], [0, 4], [4, 0]),
    *([2, 4, 8], [1, 2, 4], [2, 2, 4], [2, 5, 4], [5, 2, 4], [4, 4, 3], [4, 1, 3], [4, 4, 4], [2, 0, 4]),
    *([2, 4, 8, 8], [2, 4, 1, 1], [1, 4, 4, 4], [4, 4, 3, 3], [4, 1, 3, 3], [2, 2, 5, 4], [2, 8, 8, 2], [2, 3, 4]),
    *([2, 4], [2, 2, 3], [1, 4, 4, 4, 4], [4, 4, 3, 3, 3], [4, 1, 2, 2, 2]),
]
_OTHERS = [
    *(["float64", [4, 4]], ["float64", [4]], ["bfloat16", [4, 4]], ["bfloat16", [2, 4, 8, 8]], ["float16", [4]], ["float16", [4, 4]]),
    *(["int64", []], ["int64", [2]], ["int64", [4]], ["int64", [4, 4]], ["int64", [2, 5]], ["int64", [2, 8, 8]], ["int64", [1, 4]]),
    *(["int32", [4]], ["int32", [4, 4]], ["int16", [4]], ["int8", [4, 4]], ["uint8", [4]], ["uint8", [2, 4]]),
    *(["bool", [4]], ["bool", [4, 4]], ["bool", [2, 4]], ["bool", []]),
]
_SMALL = (0, 1, 1, 1, 2, 2, 3, 4, 5, 8, -1, -1, -2)
_EXTREME = (2**20, 2**31 - 1, 2**31, 2**40, -(2**20), -(2**31), -(2**40), 7, 16, 64, -7)
_REALS = (0.0, 0.5, 1.0, 2.0, -1.0, 0.1, 1e-8, 1e30, -1e30, 1e-300, {"infinity": 1}, {"infinity": -1})
_WORDS = ("none", "tanh", "floor", "trunc", "same", "valid", "mean", "constant", "reflect", "replicate", "circular", "sum", "ij")
_EQUATIONS = ("ij,jk->ik", "ij,kj->ik", "ij->ji", "ii->i", "ij,ij->", "bij,bjk->bik", "i,j->ij", "...i,...i->...", "ij->", "abcd,abcd->abd")
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")


class RandomGraph:
    """A graph that grows call by call; the loss adds up everything that its calls make, so nothing in it is superfluous."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        # The second one the loss starts from; of the others each graph trains some.
        trained = [index == 1 or rng.random() < 0.4 for index in range(len(_FLOATS))]
        tensors: list[list[Any]] = [
            [f"t{index}.f", "float32", shape, "parameter" if trained[index] else "buffer", trained[index]]
            for index, shape in enumerate(_FLOATS)
        ]
        tensors += [[f"t{len(_FLOATS) + index}.o", dtype, shape, "buffer", False] for index, (dtype, shape) in enumerate(_OTHERS)]
        self._tensors = tensors
        self._calls: list[tuple[str, list[Any], Raw, int]] = []
        self._first = len(_DATA) + len(tensors)
        self._next = self._first
        self._fresh: list[int] = []

    def grow(self, op: str) -> bool:
        """Add a call of `op` whose arguments make sense on shapes alone. Return False if none was found."""
        for _ in range(TRIES):
            args, kwargs = self._arguments(op)
            outputs = self._outputs(op, args)
            self._calls.append((op, args, kwargs, outputs))
            try:
                check_sizes(from_bytes(self.data()), SHAPES, LIMIT_BYTES)
            except GraphFormatError:
                self._calls.pop()
                continue
            if op not in SCALAR_OPS and op != SIZE_OP:
                self._fresh.extend(range(self._next, self._next + outputs))
            self._next += outputs
            return True
        return False

    def data(self) -> bytes:
        """Return the graph's bytes: the calls so far, and a loss."""
        nodes, following = [], self._first
        made: list[int] = []
        for op, args, kwargs, outputs in self._calls:
            numbers = list(range(following, following + outputs))
            nodes.append([op, args, kwargs, numbers, ""])
            following += outputs
            if op not in SCALAR_OPS and op != SIZE_OP:
                made.extend(numbers)

        def add(op: str, args: list[Any], kwargs: Raw | None = None) -> int:
            nonlocal following
            nodes.append([op, args, kwargs or {}, [following], ""])
            following += 1
            return following - 1

        parameter = {"value": len(_DATA) + 1}
        total = add("aten.sum.default", [parameter])
        for number in made:
            real = add("aten.to.dtype", [{"value": number}, {"dtype": "float32"}])
            total = add("aten.add.Tensor", [{"value": total}, {"value": add("aten.sum.default", [{"value": real}])}])
        raw = {
            "format": FORMAT_VERSION,
            "torch": running_torch_version(),
            "name": "random",
            "data": _DATA,
            "inputs": len(_DATA),
            "tensors": self._tensors,
            "nodes": nodes,
            "loss": total,
            "metric": None,
        }
        return json.dumps(raw).encode()

    def _outputs(self, op: str, args: list[Any]) -> int:
        outputs = signature_of(op).outputs
        if outputs is not None:
            return outputs
        sizes = [len(item) for item in args if isinstance(item, list)]
        return self._rng.choice([*sizes, 1, 2, 2, 3, 4, 8]) or 1

    def _arguments(self, op: str) -> tuple[list[Any], Raw]:
        if op in TEMPLATES and self._rng.random() < 0.8:
            return self._from_template(op), {}
        args: list[Any] = []
        kwargs: Raw = {}
        positional = True
        for parameter in signature_of(op).parameters:
            if not parameter.required and self._rng.random() < 0.4:
                positional = False
                continue
            value = self._argument(op, parameter, parameter.type_name)
            if parameter.keyword_only or not positional:
                kwargs[parameter.name] = value
            else:
                args.append(value)
        return args, kwargs

    def _from_template(self, op: str) -> list[Any]:
        """Return the arguments of a call that makes sense, a few of them changed."""
        change = self._rng.choice((0.0, 0.1, 0.3))
        args = [self._filled(item) for item in TEMPLATES[op]]
        for index, parameter in enumerate(signature_of(op).parameters[: len(args)]):
            if self._rng.random() < change and not parameter.keyword_only:
                args[index] = self._argument(op, parameter, parameter.type_name)
            elif isinstance(args[index], list) and self._rng.random() < change:
                position = self._rng.randrange(len(args[index]))
                args[index][position] = self._argument(op, parameter, re.sub(r"^(Optional\[)?List\[|\]+$", "", parameter.type_name))
        return args

    def _filled(self, item: Any) -> Any:
        if isinstance(item, list):
            return [self._filled(part) for part in item]
        if not isinstance(item, str) or "[" not in item:
            return item
        dtype, _, sizes = item.rstrip("]").partition("[")
        wanted = [dtype, [int(size) for size in sizes.split(",") if size]]
        fits = [number for number, tensor in enumerate(self._tensors) if tensor[1:3] == wanted]
        return {"value": len(_DATA) + self._rng.choice(fits)}

    def _argument(self, op: str, parameter: Parameter, kind: str) -> Any:
        rng = self._rng
        if kind.startswith("Optional["):
            return None if rng.random() < 0.3 else self._argument(op, parameter, kind[9:-1])
        if kind.startswith("List["):
            inner = kind[5:-1]
            length = rng.choice((1, 1, 2, 2, 3, 4)) if parameter.name != "params" else rng.choice((4, 4, 2, 8))
            if inner == "int" and rng.random() < 0.3:
                return list(rng.choice(_FLOATS))
            same = self._argument(op, parameter, inner)
            return [same if rng.random() < 0.6 else self._argument(op, parameter, inner) for _ in range(length)]
        if kind == "Tensor":
            return self._tensor()
        return self._literal(kind)

    def _tensor(self) -> Any:
        rng = self._rng
        if self._fresh and rng.random() < 0.4:
            return {"value": rng.choice(self._fresh)}
        if rng.random() < 0.03:
            return rng.choice((0, 1, -1, 2.5))
        return {"value": rng.randrange(self._first)}

    def _literal(self, kind: str) -> Any:
        rng = self._rng
        match kind:
            case "bool":
                return rng.random() < 0.5
            case "int":
                return rng.choice(_EXTREME) if rng.random() < 0.08 else rng.choice(_SMALL)
            case "float":
                return rng.choice(_REALS)
            case "number":
                return rng.choice((*_REALS, *_SMALL, 2**63 - 1, -(2**63), True))
            case "str":
                return rng.choice(_EQUATIONS) if rng.random() < 0.3 else rng.choice(_WORDS)
            case "ScalarType":
                return {"dtype": rng.choice(_DTYPES)}
            case "MemoryFormat":
                return {"memory_format": rng.choice(_FORMATS)}
        return None
