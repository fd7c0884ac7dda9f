"""Where a graph may be cut, and the stages that a choice of cuts gives."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from roost.capture.analysis import GraphAnalysis
from roost.capture.graph import Graph
from roost.capture.program import DATA_SOURCE, StageProgram
from roost.capture.schedule import compile_schedule
from roost.capture.signatures import ValueKind
from roost.errors import GraphFormatError
from roost.types import TensorRecord


def legal_cuts(graph: Graph) -> tuple[int, ...]:
    """Return the positions inside the graph where it may be cut, ascending; a cut at c separates nodes before c from c and later.

    A cut may not lie between the making of a value and a later in-place change of its memory, nor between two uses of a
    buffer that training changes, nor after the node that makes the loss.
    """
    return _legal_cuts(GraphAnalysis(graph))


def _legal_cuts(analysis: GraphAnalysis) -> tuple[int, ...]:
    graph = analysis.graph
    blocked = [0] * (len(graph.nodes) + 2)

    def block(first: int, last: int) -> None:
        if first <= last:
            blocked[first] += 1
            blocked[last + 1] -= 1

    uses: dict[int, list[int]] = {}
    for position, node in enumerate(graph.nodes):
        for value in node.uses:
            if analysis.memory[value] in analysis.written_buffers:
                uses.setdefault(analysis.memory[value], []).append(position)
    for memory, positions in analysis.writes.items():
        if memory in uses:
            block(min(uses[memory]) + 1, max(uses[memory]))
        else:
            made = min(graph.producers[value] for value in analysis.members[memory])
            block(made + 1, max(positions))
    block(analysis.loss_position + 1, len(graph.nodes))
    cuts, depth = [], 0
    for position in range(len(graph.nodes)):
        depth += blocked[position]
        if position > 0 and depth == 0:
            cuts.append(position)
    return tuple(cuts)


def cut(graph: Graph, boundaries: Sequence[int]) -> tuple[StageProgram, ...]:
    """Return one program per stage for boundaries [0, c1, ..., number of nodes]. Raises GraphFormatError for an illegal cut."""
    return _Cutter(graph, boundaries).stages()


def tensor_positions(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Return for each tensor that training or evaluation uses the positions, ascending, whose stage needs it, however the graph is cut.

    The stage of the first one owns the tensor. A trainable tensor has that one alone: its values travel to the other stages.
    """
    analysis = GraphAnalysis(graph)
    found: dict[str, list[int]] = {}
    for position in _live(analysis):
        for value in graph.nodes[position].uses:
            record = graph.tensor_of(value)
            if record is not None:
                positions = found.setdefault(record.name, [])
                if not positions or not record.trainable and positions[-1] != position:
                    positions.append(position)
    return {name: tuple(positions) for name, positions in found.items()}


def _roots(graph: Graph) -> list[int]:
    return [graph.loss, *([] if graph.metric is None else [graph.metric])]


def _live(analysis: GraphAnalysis) -> list[int]:
    """Return the positions that training or evaluation runs, ascending."""
    graph = analysis.graph
    nodes = len(graph.nodes)
    return sorted({*analysis.needed_in_training(0, nodes, [graph.loss]), *analysis.needed_in_evaluation(0, nodes, _roots(graph))})


class _Cutter:
    """Decides who owns, sends and receives what for one choice of cuts.

    A stage gets a value from the latest stage before it that has it: the one that made it, or one that uses it. So each stage sends a
    value once, and the gradients come back along the same way, each stage adding its own to what came from later ones: in the order
    in which one process adds them, and therefore with the same rounding.
    """

    def __init__(self, graph: Graph, boundaries: Sequence[int]) -> None:
        self.graph = graph
        self.analysis = GraphAnalysis(graph)
        self.boundaries = tuple(boundaries)
        self.owners: dict[int, int] = {}
        self.holders: dict[int, int] = {}
        """For each value the latest stage that has it so far."""
        self.received: list[dict[int, list[int]]] = []
        self.shared: list[list[TensorRecord]] = []

    def stages(self) -> tuple[StageProgram, ...]:
        self._check()
        self._assign()
        return tuple(self._stage(index) for index in range(len(self.boundaries) - 1))

    def _check(self) -> None:
        bounds, nodes = self.boundaries, len(self.graph.nodes)
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != nodes or any(a >= b for a, b in zip(bounds, bounds[1:], strict=False)):
            raise GraphFormatError(f"graph {self.graph.name!r}: boundaries must ascend from 0 to {nodes}, not {bounds}")
        illegal = set(bounds[1:-1]) - set(_legal_cuts(self.analysis))
        if illegal:
            raise GraphFormatError(f"graph {self.graph.name!r} must not be cut at {min(illegal)}")

    def _stage_of(self, position: int) -> int:
        return bisect_right(self.boundaries, position) - 1

    def _assign(self) -> None:
        """Find for every stage what it receives from whom, which tensors it owns, and which it shares."""
        count = len(self.boundaries) - 1
        self.received = [{} for _ in range(count)]
        self.shared = [[] for _ in range(count)]
        seen: set[tuple[int, int]] = set()
        for position in _live(self.analysis):
            stage = self._stage_of(position)
            for value in self.graph.nodes[position].uses:
                if (stage, value) not in seen:
                    seen.add((stage, value))
                    self._use(stage, value)

    def _use(self, stage: int, value: int) -> None:
        record = self.graph.tensor_of(value)
        if record is not None:
            owner = self.owners.setdefault(value, stage)
            if owner != stage and not record.trainable:
                self.shared[stage].append(record)
                return
            made = owner
        else:
            position = self.graph.producers[value]
            made = self._stage_of(position) if position >= 0 else 0
        source = self.holders.get(value, made)
        self.holders[value] = stage
        if source != stage:
            self.received[stage].setdefault(source, []).append(value)

    def _stage(self, index: int) -> StageProgram:
        graph, analysis = self.graph, self.analysis
        start, stop = self.boundaries[index], self.boundaries[index + 1]
        receives = {source: tuple(sorted(values)) for source, values in sorted(self.received[index].items())}
        if index == 0:
            receives = {DATA_SOURCE: tuple(range(graph.data_inputs))}
        sends = {
            target: tuple(sorted(self.received[target][index]))
            for target in range(index + 1, len(self.received))
            if index in self.received[target]
        }
        incoming = [value for values in receives.values() for value in values]
        outgoing = sorted({value for values in sends.values() for value in values})
        is_last = index == len(self.received) - 1
        train_results = [*outgoing, *([graph.loss] if is_last else [])]
        test_results = [*outgoing, *(dict.fromkeys(_roots(graph)) if is_last else [])]
        trained = analysis.needed_in_training(start, stop, train_results)
        tested = analysis.needed_in_evaluation(start, stop, test_results)
        crossing = {*incoming, *outgoing}
        owned = {value: self._record(value) for value, owner in self.owners.items() if owner == index}
        changed = {analysis.memory[value] for position in trained for value in analysis.effects[position].written}
        return StageProgram(
            index=index,
            start=start,
            stop=stop,
            tensors=tuple(owned.values()),
            shared=tuple(self.shared[index]),
            receives=receives,
            sends=sends,
            differentiable=frozenset(crossing & analysis.differentiable),
            changed_tensors=frozenset(record.name for value, record in owned.items() if analysis.memory[value] in changed),
            changed_values=frozenset(value for value in incoming if analysis.memory[value] in changed),
            draws_random=any(analysis.effects[position].random for position in trained),
            is_last=is_last,
            loss_value=graph.loss if is_last else None,
            metric_value=graph.metric if is_last else None,
            training_schedule=compile_schedule(analysis, trained, received=incoming, results=train_results, training=True),
            evaluation_schedule=compile_schedule(analysis, tested, received=incoming, results=test_results, training=False),
            numbers={value: graph.kinds[value] for value in crossing if graph.kinds[value] is not ValueKind.TENSOR},
        )

    def _record(self, value: int) -> TensorRecord:
        record = self.graph.tensor_of(value)
        assert record is not None
        return record
