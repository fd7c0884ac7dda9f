"""Compiles nodes into a list of steps over numbered slots, and executes it.

Everything that can be decided before a run is: constants and references both are slots, so that one `itemgetter` call
collects a step's arguments, and each step knows which slots nobody uses after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from roost.capture.analysis import GraphAnalysis
from roost.capture.arguments import Argument, ValueRef, references, to_torch
from roost.capture.graph import Graph, GraphNode
from roost.capture.ops import CREATES_TENSORS, EVALUATION_SETTINGS
from roost.capture.safe_calls import callable_of
from roost.capture.signatures import ValueKind, signature_of
from roost.errors import GraphFormatError

DEVICE_SLOT = 0

Getter = Callable[[list[Any]], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One call. `gather` collects the positional arguments from the slots."""

    op: str
    call: Callable[..., Any]
    lists: tuple[tuple[int, Getter], ...]
    """Slots to fill with lists of other slots before the call."""
    gather: Getter
    keywords: tuple[tuple[str, int], ...]
    outputs: tuple[int, ...]
    unpack: bool
    frees: tuple[int, ...]
    """Slots that nobody uses after this step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What a stage does in one mode."""

    template: tuple[Any, ...]
    """The slots before a run: constants in place, everything else None."""
    steps: tuple[Step, ...]
    value_slots: tuple[tuple[int, int], ...]
    """(slot, value number) of received values."""
    number_slots: tuple[tuple[int, ValueKind], ...]
    """Slots of received values that are numbers."""
    tensor_slots: tuple[tuple[int, str], ...]
    """(slot, name) of parameters and buffers."""
    results: tuple[tuple[int, int], ...]
    """(value number, slot) of what a run returns."""
    received_leaves: tuple[int, ...]
    """Numbers of received values that carry a gradient."""


def execute(schedule: Schedule, values: Mapping[int, Tensor], tensors: Mapping[str, Tensor], device: torch.device) -> list[tuple[int, Any]]:
    """Run the steps and return (value number, result) for every result. Raises GraphFormatError if a list has another length.

    Tensors that are made from nothing, such as ranges, are made on `device`.
    """
    slots = list(schedule.template)
    for slot, name in schedule.tensor_slots:
        slots[slot] = tensors[name]
    for slot, number in schedule.value_slots:
        slots[slot] = values[number]
    for slot, kind in schedule.number_slots:
        slots[slot] = int(slots[slot]) if kind is ValueKind.INTEGER else float(slots[slot])
    slots[DEVICE_SLOT] = device
    for step in schedule.steps:
        for target, gather in step.lists:
            slots[target] = list(gather(slots))
        if step.keywords:
            result = step.call(*step.gather(slots), **{name: slots[slot] for name, slot in step.keywords})
        else:
            result = step.call(*step.gather(slots))
        if step.unpack:
            if len(result) != len(step.outputs):
                raise GraphFormatError(f"{step.op} returned {len(result)} tensors where the graph has {len(step.outputs)}")
            for slot, item in zip(step.outputs, result, strict=True):
                slots[slot] = item
        else:
            slots[step.outputs[0]] = result
        for slot in step.frees:
            slots[slot] = None
        # Otherwise this name would keep a freed value alive during the next step.
        result = None
    return [(number, slots[slot]) for number, slot in schedule.results]


@dataclass
class _Draft:
    """A schedule being compiled: hands out slots."""

    graph: Graph
    template: list[Any] = field(default_factory=lambda: [None])
    slots: dict[int, int] = field(default_factory=dict)
    constants: dict[tuple[type, Any], int] = field(default_factory=dict)

    def new_slot(self, content: Any = None) -> int:
        self.template.append(content)
        return len(self.template) - 1

    def slot_of(self, value: int) -> int:
        if value not in self.slots:
            self.slots[value] = self.new_slot()
        return self.slots[value]

    def constant(self, argument: Argument) -> int:
        key = (type(argument), repr(argument))
        if key not in self.constants:
            self.constants[key] = self.new_slot(to_torch(argument))
        return self.constants[key]

    def place(self, argument: Argument, lists: list[tuple[int, Getter]]) -> int:
        """Return the slot that will hold `argument`; lists with references are added to `lists`."""
        if isinstance(argument, ValueRef):
            return self.slot_of(argument.value)
        if not any(True for _ in references(argument)):
            return self.constant(argument)
        assert isinstance(argument, tuple)
        parts = [self.place(item, lists) for item in argument]
        target = self.new_slot()
        lists.append((target, _getter(parts)))
        return target


def _getter(slots: Sequence[int]) -> Getter:
    """Return a function that collects `slots` as a tuple."""
    if len(slots) > 1:
        return itemgetter(*slots)
    if not slots:
        return lambda content: ()
    only = slots[0]
    return lambda content: (content[only],)


def compile_schedule(
    analysis: GraphAnalysis,
    positions: Sequence[int],
    *,
    received: Iterable[int],
    results: Iterable[int],
    training: bool,
) -> Schedule:
    """Return the schedule that runs the nodes at `positions`; `received` values come from other stages."""
    graph = analysis.graph
    draft = _Draft(graph)
    available = set(received)
    wanted = list(results)
    nodes = [graph.nodes[position] for position in positions]
    last_use = {value: index for index, node in enumerate(nodes) for value in (*node.outputs, *node.uses)}
    for value in wanted:
        last_use.pop(value, None)
    ending: dict[int, list[int]] = {}
    for value, index in last_use.items():
        ending.setdefault(index, []).append(value)
    steps = []
    for index, (position, node) in enumerate(zip(positions, nodes, strict=True)):
        if not training and analysis.skipped_in_evaluation(position):
            steps.append(_pass_on(draft, node, analysis.effects[position].written[0], ending.get(index, ())))
        else:
            steps.append(_compile_step(draft, node if training else in_evaluation(node), ending.get(index, ())))
    outcome = tuple((value, draft.slot_of(value)) for value in wanted)
    used = draft.slots.items()
    inputs = [(slot, value) for value, slot in used if value in available]
    records = [(slot, graph.tensor_of(value)) for value, slot in used if value not in available]
    return Schedule(
        template=tuple(draft.template),
        steps=tuple(steps),
        value_slots=tuple(inputs),
        number_slots=tuple((slot, graph.kinds[value]) for slot, value in inputs if graph.kinds[value] is not ValueKind.TENSOR),
        tensor_slots=tuple((slot, record.name) for slot, record in records if record is not None),
        results=outcome,
        received_leaves=tuple(value for _, value in inputs if value in analysis.differentiable),
    )


def _compile_step(draft: _Draft, node: GraphNode, ending: Iterable[int]) -> Step:
    lists: list[tuple[int, Getter]] = []
    arguments = [draft.place(item, lists) for item in node.args]
    keywords = [(name, draft.place(item, lists)) for name, item in node.kwargs]
    if node.op in CREATES_TENSORS:
        keywords.append(("device", DEVICE_SLOT))
    return Step(
        op=node.op,
        call=callable_of(node.op),
        lists=tuple(lists),
        gather=_getter(arguments),
        keywords=tuple(keywords),
        outputs=tuple(draft.slot_of(value) for value in node.outputs),
        unpack=signature_of(node.op).unpack,
        frees=tuple(draft.slot_of(value) for value in ending) + tuple(target for target, _ in lists),
    )


def _pass_on(draft: _Draft, node: GraphNode, value: int, ending: Iterable[int]) -> Step:
    return Step(
        op=node.op,
        call=_same,
        lists=(),
        gather=_getter([draft.slot_of(value)]),
        keywords=(),
        outputs=(draft.slot_of(node.outputs[0]),),
        unpack=False,
        frees=tuple(draft.slot_of(ended) for ended in ending),
    )


def _same(value: Any) -> Any:
    return value


def in_evaluation(node: GraphNode) -> GraphNode:
    """Return the node as evaluation runs it: no dropout, and norms use their running statistics if they have them."""
    if node.op not in EVALUATION_SETTINGS:
        return node
    position, setting, condition = EVALUATION_SETTINGS[node.op]
    names = [parameter.name for parameter in signature_of(node.op).parameters]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if condition is not None and given.get(names[condition]) is None:
        return node
    if position < len(node.args):
        args = (*node.args[:position], setting, *node.args[position + 1 :])
        return GraphNode(op=node.op, args=args, kwargs=node.kwargs, outputs=node.outputs, label=node.label)
    if names[position] not in given:
        return node
    kwargs = tuple((name, setting if name == names[position] else value) for name, value in node.kwargs)
    return GraphNode(op=node.op, args=node.args, kwargs=kwargs, outputs=node.outputs, label=node.label)
