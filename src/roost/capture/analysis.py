"""What follows from a graph without running it: shared memory, in-place writes, gradients, and which nodes are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from roost.capture.arguments import DTYPES, Argument, DtypeName, references
from roost.capture.graph import Graph, GraphNode
from roost.capture.ops import HIDDEN_WRITES, INTEGER_OUTPUTS, ITEM_BY_ITEM, NO_GRADIENT, RANDOM_IN_TRAINING, RANDOM_OPS
from roost.capture.signatures import bind, signature_of
from roost.types import TensorKind


@dataclass(frozen=True, kw_only=True)
class NodeEffects:
    """What one node does besides computing its results."""

    viewed: tuple[int, ...]
    """Values whose memory a result may share."""
    written: tuple[int, ...]
    """Values it changes in place."""
    hidden: bool
    """True if its writes are the running statistics of a norm, which evaluation does not change."""
    random: bool
    """True if it draws random numbers in training."""


def effects_of(node: GraphNode) -> NodeEffects:
    """Return the effects of `node` when it runs in training."""
    viewed: list[int] = []
    written: list[int] = []
    if node.op.startswith("aten."):
        for parameter, argument in bind(node.op, node.args, dict(node.kwargs)):
            if parameter.viewed:
                viewed.extend(references(argument))
            if parameter.written:
                written.extend(references(argument))
    return NodeEffects(viewed=tuple(viewed), written=tuple(written), hidden=node.op in HIDDEN_WRITES, random=_draws_random(node))


def argument_at(node: GraphNode, position: int) -> Argument:
    """Return the argument at a position of the schema, however it is given; None if it is left out."""
    if position < len(node.args):
        return node.args[position]
    name = signature_of(node.op).parameters[position].name
    return dict(node.kwargs).get(name)


def _draws_random(node: GraphNode) -> bool:
    if node.op in RANDOM_OPS:
        return True
    if node.op not in RANDOM_IN_TRAINING:
        return False
    probability, flag = RANDOM_IN_TRAINING[node.op]
    return bool(argument_at(node, probability)) and (flag is None or argument_at(node, flag) is True)


@dataclass(frozen=True)
class GraphAnalysis:
    """Everything that can be said of a graph; computed when first asked for."""

    graph: Graph

    @cached_property
    def effects(self) -> tuple[NodeEffects, ...]:
        """The effects of every node."""
        return tuple(effects_of(node) for node in self.graph.nodes)

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """For each value the smallest number of a value that may share its memory."""
        parent = list(range(self.graph.values))

        def find(value: int) -> int:
            while parent[value] != value:
                parent[value] = parent[parent[value]]
                value = parent[value]
            return value

        for node, effects in zip(self.graph.nodes, self.effects, strict=True):
            if effects.viewed:
                for value in (*effects.viewed[1:], *node.outputs):
                    low, high = sorted((find(effects.viewed[0]), find(value)))
                    parent[high] = low
        return tuple(find(value) for value in range(len(parent)))

    @cached_property
    def writes(self) -> dict[int, list[int]]:
        """For each memory that is changed in place, the positions of the nodes that do."""
        found: dict[int, list[int]] = {}
        for position, effects in enumerate(self.effects):
            for value in effects.written:
                found.setdefault(self.memory[value], []).append(position)
        return found

    @cached_property
    def members(self) -> dict[int, list[int]]:
        """For each memory that is changed in place, the values that share it."""
        found: dict[int, list[int]] = {memory: [] for memory in self.writes}
        for value, memory in enumerate(self.memory):
            if memory in found:
                found[memory].append(value)
        return found

    @cached_property
    def written_buffers(self) -> frozenset[int]:
        """The memories among `writes` that hold a buffer of the model."""
        return frozenset(memory for memory, values in self.members.items() if self._holds(values, TensorKind.BUFFER))

    @cached_property
    def written_parameters(self) -> frozenset[int]:
        """The memories among `writes` that hold a parameter of the model."""
        return frozenset(memory for memory, values in self.members.items() if self._holds(values, TensorKind.PARAMETER))

    def _holds(self, values: Iterable[int], kind: TensorKind) -> bool:
        records = (self.graph.tensor_of(value) for value in values)
        return any(record is not None and record.kind is kind for record in records)

    @cached_property
    def loss_position(self) -> int:
        """Position of the node that makes the loss."""
        return self.graph.producers[self.graph.loss]

    def changes_buffer(self, position: int) -> bool:
        """Return True if the node changes a buffer of the model in training."""
        return any(self.memory[value] in self.written_buffers for value in self.effects[position].written)

    def skipped_in_evaluation(self, position: int) -> bool:
        """Return True if evaluation leaves the node out: it writes to a buffer, and evaluation changes no state."""
        return self.changes_buffer(position) and not self.effects[position].hidden

    def needed(self, start: int, stop: int, roots: Iterable[int], keep: Callable[[int], bool], skip: Callable[[int], bool]) -> list[int]:
        """Return the positions in start..stop that the values `roots` need or that `keep` holds on to, in order.

        A node that `skip` names does nothing but hand on its first argument.
        """
        values: set[int] = set()
        memories: set[int] = set()

        def need(numbers: Iterable[int]) -> None:
            for number in numbers:
                values.add(number)
                memories.add(self.memory[number])

        need(roots)
        found = []
        for position in range(stop - 1, start - 1, -1):
            node, effects = self.graph.nodes[position], self.effects[position]
            used = any(number in values for number in node.outputs)
            if skip(position):
                if used:
                    found.append(position)
                    need(effects.written[:1])
            elif used or keep(position) or any(self.memory[value] in memories for value in effects.written):
                found.append(position)
                need(node.uses)
        return found[::-1]

    def needed_in_training(self, start: int, stop: int, roots: Iterable[int]) -> list[int]:
        """Return the positions in start..stop that training runs to make `roots`: without what only the metric needs.

        Nodes that change buffers or that draw random numbers before the loss run as they do in the eager model.
        """

        def keep(position: int) -> bool:
            return self.changes_buffer(position) or (self.effects[position].random and position <= self.loss_position)

        return self.needed(start, stop, roots, keep, lambda position: False)

    def needed_in_evaluation(self, start: int, stop: int, roots: Iterable[int]) -> list[int]:
        """Return the positions in start..stop that evaluation runs to make `roots`."""
        return self.needed(start, stop, roots, lambda position: False, self.skipped_in_evaluation)

    @cached_property
    def differentiable(self) -> frozenset[int]:
        """The values through which a gradient flows from the loss to a trainable parameter."""
        return frozenset(self._from_parameters() & self._towards_loss())

    def _from_parameters(self) -> set[int]:
        first = self.graph.data_inputs
        ways = _Ways()
        for node, effects in zip(self.graph.nodes, self.effects, strict=True):
            if node.op in NO_GRADIENT:
                continue
            for uses, outputs in _gradient_paths(node):
                ways.add(uses, outputs)
            for value in effects.written if not effects.hidden else ():
                ways.add(node.uses, self._changed_with(self.memory[value]))
        return ways.reach(first + index for index, tensor in enumerate(self.graph.tensors) if tensor.trainable)

    def _changed_with(self, memory: int) -> tuple[int, ...]:
        if memory not in self._changed:
            self._changed[memory] = tuple(number for number in self.members[memory] if self._may_get_gradient(number))
        return self._changed[memory]

    @cached_property
    def _changed(self) -> dict[int, tuple[int, ...]]:
        return {}

    def _may_get_gradient(self, value: int) -> bool:
        position = self.graph.producers[value]
        return position >= 0 and not self.graph.nodes[position].op.startswith("aten.detach")

    def _towards_loss(self) -> set[int]:
        ways = _Ways()
        for memory, values in self.members.items():
            if memory not in self.written_buffers:
                ways.add(values, tuple(values))
        for node in self.graph.nodes:
            if node.op not in NO_GRADIENT:
                for uses, outputs in _gradient_paths(node):
                    ways.add(outputs, uses)
        return ways.reach([self.graph.loss])


class _Ways:
    """Which values a gradient gets to from which. Every way is walked once, however values depend on each other."""

    def __init__(self) -> None:
        self._targets: list[tuple[int, ...]] = []
        self._from: dict[int, list[int]] = {}
        self._known: dict[int, int] = {}

    def add(self, sources: Iterable[int], targets: tuple[int, ...]) -> None:
        """From any of `sources`, all of `targets` are reached."""
        # Many writes to one memory reach the same tuple of values: it is walked once as well.
        position = self._known.setdefault(id(targets), len(self._targets))
        if position == len(self._targets):
            self._targets.append(targets)
        for source in sources:
            self._from.setdefault(source, []).append(position)

    def reach(self, starts: Iterable[int]) -> set[int]:
        """Return everything that is reached from `starts`, those included."""
        marked = set(starts)
        pending = list(marked)
        walked: set[int] = set()
        while pending:
            for position in self._from.get(pending.pop(), ()):
                if position not in walked:
                    walked.add(position)
                    fresh = set(self._targets[position]) - marked
                    marked |= fresh
                    pending.extend(fresh)
        return marked


def _gradient_paths(node: GraphNode) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return groups of used values and of results, such that a gradient flows from each result of a group to each value of it."""
    if node.op in ITEM_BY_ITEM:
        return [((used,), (output,)) for used, output in zip(node.uses, node.outputs, strict=False)]
    if _makes_integers(node):
        return []
    indices = INTEGER_OUTPUTS.get(node.op, ())
    return [(node.uses, tuple(number for index, number in enumerate(node.outputs) if index not in indices))]


def _makes_integers(node: GraphNode) -> bool:
    for argument in (*node.args, *(value for _, value in node.kwargs)):
        if isinstance(argument, DtypeName) and not DTYPES[argument.name].is_floating_point:
            return True
    return False
