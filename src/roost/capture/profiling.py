"""Measures what each piece of a captured model costs: time, operations, and bytes kept and sent."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from roost.capture.cut import cut, legal_cuts
from roost.capture.export import Captured
from roost.capture.graph import Graph
from roost.capture.ops import FREE_OPS
from roost.capture.program import DATA_SOURCE, StageProgram
from roost.types import ModelProfile, UnitProfile

MAX_UNITS = 200
"""More units than this are merged: planning time grows with them, and a finer choice of cuts changes little."""

BUDGET_S = 1.0
"""For each of the three kinds of passes: fewer repeats if they take longer, but at least MIN_REPEATS."""
MIN_REPEATS = 3
SPLIT_STAGES = 4
"""Stages that the model is cut in to see what a stage costs beside its units."""
UPDATE_STEPS = 3
CALL_S = 1e-5
"""What calling an operation costs beside its work, in an estimate: tens of microseconds with autograd on common machines."""
UPDATE_PASSES = 5
"""Tensors of a parameter's size that an update touches: parameter, gradient, new parameter, and two of an optimizer such as AdamW."""
UPDATE_GRADIENT = 1e-3
CACHE_BYTES = 64 << 20
"""Written before each pass: in training, other work has been in the caches since a stage last had its turn."""

_FORWARD, _BACKWARD, _UPDATE = 0, 1, 2
MakeOptimizer = Callable[[list[Parameter]], Optimizer]
MakeContext = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True)
class _UnitCounts:
    """What does not depend on the machine's speed."""

    flop: float
    saved_bytes: int


def profile(
    captured: Captured,
    inputs: tuple[Tensor, ...],
    labels: tuple[Tensor, ...],
    *,
    reference_flop_per_s: float,
    make_optimizer: MakeOptimizer | None = None,
    repeats: int = 9,
    rest_s: float = 0.0,
    computing: MakeContext = nullcontext,
) -> ModelProfile:
    """Return the costs of `captured`, unit by unit, for a micro-batch like `inputs` and `labels`, on one thread.

    Times are CPU time, medians over `repeats` passes after one that warms up and counts (fewer if they take long).
    `rest_s` is slept before each piece of work: nodes that emulate a slower machine by sleeping find their caches cold.
    `computing` makes the context in which forwards run, for their precision.
    Bytes are of the first pass. Nothing is changed: copies of the tensors are used, and random generator and thread count are
    put back.
    """
    graph = captured.graph
    data = (*inputs, *labels)
    programs = cut(graph, [0, *choose_cuts(graph), len(graph.nodes)])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            counts, sizes = _count(captured, programs, data, computing)
            passes = _repeated(lambda: _Pass(captured, programs, data, computing).times(), repeats)

            def in_stages(cuts: Sequence[int]) -> list[float]:
                stages = cut(graph, [0, *cuts, len(graph.nodes)])
                return _totals(_TrainingLoop(captured, stages, data, computing, make_optimizer, rest_s), repeats)

            one = in_stages([])
            several_cuts = _even_cuts(programs, [sum(times) for times in zip(*passes[0], strict=True)])
            several = in_stages(several_cuts)
        steps = _update_times(captured, programs, make_optimizer)
    finally:
        torch.set_num_threads(threads)
    # What several stages take beyond one is what each further stage costs.
    extra = [max(0.0, many - once) / max(1, len(several_cuts)) for once, many in zip(one, several, strict=True)]
    targets = [max(0.0, once - each) for once, each in zip(one, extra, strict=True)]
    forward, backward = (_fitted(_medians([times[way] for times in passes]), targets[way]) for way in (_FORWARD, _BACKWARD))
    updates = _fitted(steps, targets[_UPDATE])
    return ModelProfile(
        name=graph.name,
        micro_batch_size=inputs[0].shape[0],
        reference_flop_per_s=reference_flop_per_s,
        units=tuple(
            _unit(graph, programs, index, counts[index], (forward[index], backward[index], updates[index]), sizes)
            for index in range(len(programs))
        ),
        input_bytes=sum(item.numel() * item.element_size() for item in data),
        stage_s=extra[_FORWARD] + extra[_BACKWARD],
        stage_update_s=extra[_UPDATE],
    )


def estimate(
    captured: Captured,
    inputs: tuple[Tensor, ...],
    labels: tuple[Tensor, ...],
    *,
    reference_flop_per_s: float,
    bytes_per_s: float,
    computing: MakeContext = nullcontext,
) -> ModelProfile:
    """Return the costs of `captured` for a micro-batch like `inputs` and `labels` without running it: for models too large to run here.

    Operations and bytes are counted on tensors without memory; `computing` makes the context in which forwards run. A forward takes
    what its products and convolutions cost at `reference_flop_per_s` and, if that is longer, what reading and writing its values
    costs at `bytes_per_s`, and CALL_S per operation; a backward takes twice that; an update touches UPDATE_PASSES tensors of the
    parameters' size.
    """
    graph = captured.graph
    programs = cut(graph, [0, *choose_cuts(graph), len(graph.nodes)])
    # Not meta tensors: autocast knows nothing of that device.
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), FakeTensorMode():
        data = tuple(_without_memory(item) for item in (*inputs, *labels))
        empty = replace(captured, tensors={name: _without_memory(item) for name, item in captured.tensors.items()})
        counts, sizes = _count(empty, programs, data, computing)
    units = []
    for index, program in enumerate(programs):
        owned = sum(record.nbytes for record in program.tensors if record.trainable)
        moved = sum(record.nbytes for record in (*program.tensors, *program.shared)) + 2 * counts[index].saved_bytes
        calls = sum(node.op not in FREE_OPS for node in graph.nodes[program.start : program.stop])
        forward = max(counts[index].flop / reference_flop_per_s, moved / bytes_per_s) + CALL_S * calls
        seconds = (forward, 2 * forward, UPDATE_PASSES * owned / bytes_per_s)
        units.append(_unit(graph, programs, index, counts[index], seconds, sizes))
    return ModelProfile(
        name=graph.name,
        micro_batch_size=inputs[0].shape[0],
        reference_flop_per_s=reference_flop_per_s,
        units=tuple(units),
        input_bytes=sum(item.numel() * item.element_size() for item in data),
        stage_s=0.0,
        stage_update_s=0.0,
    )


def _repeated(measure: Callable[[], Sequence[Sequence[float]]], repeats: int) -> list[Sequence[Sequence[float]]]:
    """Return what `measure` gives up to `repeats` times, fewer if that takes longer than BUDGET_S."""
    began = time.perf_counter()
    results = [measure()]
    while len(results) < repeats and (len(results) < MIN_REPEATS or time.perf_counter() - began < BUDGET_S):
        results.append(measure())
    return results


def _totals(loop: _TrainingLoop, repeats: int) -> list[float]:
    """Return the seconds of forward, backward and update of a model in stages, all stages together."""
    return _medians([[sum(stages) for stages in times] for times in _repeated(loop.times, repeats)])


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def _fitted(times: Sequence[float], total: float) -> list[float]:
    """Return `times` so that they add up to `total`: less the same overhead from each (never below zero), or else scaled.

    A unit measured alone pays for starting a run and the autograd engine; in a stage, all its units together pay that once.
    """
    if sum(times) <= total:
        return [seconds * total / (sum(times) or 1.0) for seconds in times]
    remaining = sorted(times)
    excess, overhead = sum(remaining) - total, 0.0
    for index, shortest in enumerate(remaining):
        if excess <= 0:
            break
        step = min(shortest - overhead, excess / (len(remaining) - index))
        overhead += step
        excess -= step * (len(remaining) - index)
    return [max(0.0, seconds - overhead) for seconds in times]


def _even_cuts(programs: Sequence[StageProgram], seconds: Sequence[float]) -> list[int]:
    """Return the first graph positions of all stages but the first, if the model is cut in about SPLIT_STAGES even ones."""
    cuts: list[int] = []
    done = 0.0
    for program, before in zip(programs[1:], seconds, strict=False):
        done += before
        if len(cuts) < SPLIT_STAGES - 1 and done >= sum(seconds) * (len(cuts) + 1) / SPLIT_STAGES:
            cuts.append(program.start)
    return cuts


def choose_cuts(graph: Graph, most: int = MAX_UNITS) -> tuple[int, ...]:
    """Return the legal cuts between the units to measure: all of them, or a good selection that makes at most `most` units.

    First cuts before a unit that computes nothing are left out; then, of every run of neighbouring cuts, the one that the
    fewest values cross is kept.
    """
    cuts = list(legal_cuts(graph))
    if len(cuts) < most:
        return tuple(cuts)
    stops = [*cuts[1:], len(graph.nodes)]
    cuts = [start for start, stop in zip(cuts, stops, strict=True) if any(node.op not in FREE_OPS for node in graph.nodes[start:stop])]
    if len(cuts) < most:
        return tuple(cuts)
    crossing = _crossing_counts(graph)
    groups = [cuts[len(cuts) * index // (most - 1) : len(cuts) * (index + 1) // (most - 1)] for index in range(most - 1)]
    return tuple(min(group, key=crossing.__getitem__) for group in groups if group)


def _crossing_counts(graph: Graph) -> list[int]:
    """Return for every position how many node results made before it are used from it on."""
    last = {value: position for position, node in enumerate(graph.nodes) for value in node.uses}
    change = [0] * (len(graph.nodes) + 2)
    for value, position in last.items():
        if value >= graph.first_result:
            change[graph.producers[value] + 1] += 1
            change[position + 1] -= 1
    counts, alive = [], 0
    for step in change:
        alive += step
        counts.append(alive)
    return counts


def _without_memory(tensor: Tensor) -> Tensor:
    """Return a tensor of the same form on the CPU; call it inside FakeTensorMode, where it takes no memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


class _Pass:
    """One forward and backward of all units, each as a stage of its own, on copies of the model's tensors."""

    def __init__(self, captured: Captured, programs: Sequence[StageProgram], data: tuple[Tensor, ...], computing: MakeContext) -> None:
        trainable = {record.name for record in captured.graph.tensors if record.trainable}
        self._programs = programs
        self._data = data
        self._computing = computing
        self._tensors = {name: item.clone().requires_grad_(name in trainable) for name, item in captured.tensors.items()}
        self._device = data[0].device
        self._received: list[dict[int, Tensor]] = []
        self._sent: list[dict[int, Tensor]] = []
        self.owned_storages = {_storage_id(item) for item in self._tensors.values()}
        self.value_bytes: dict[int, int] = {}

    def times(self) -> Sequence[Sequence[float]]:
        """Run forward and backward and return the seconds of each, by unit."""
        other = torch.ones(CACHE_BYTES // 4)
        forward = self.forward(_run)
        other.add_(1)
        return forward, self.backward()

    def _rest(self) -> None:
        """What happens before each piece of work."""

    def forward(self, around: Callable[[Callable[[], dict[int, Tensor]]], dict[int, Tensor]]) -> list[float]:
        """Run every unit inside `around(run)` and return its seconds."""
        seconds = []
        for program in self._programs:
            values = {
                number: self._data[number].clone() if source == DATA_SOURCE else self._sent[source][number].detach()
                for source, numbers in program.receives.items()
                for number in numbers
            }
            own = {record.name: self._tensors[record.name] for record in (*program.tensors, *program.shared)}

            def run(program: StageProgram = program, values: dict[int, Tensor] = values, own: dict[str, Tensor] = own) -> dict[int, Tensor]:
                return program.run(values, own, training=True, device=self._device)

            self._rest()
            begin = time.thread_time()
            with self._computing():
                results = around(run)
            seconds.append(time.thread_time() - begin)
            self._received.append(values)
            self._sent.append(results)
            self.value_bytes.update((number, item.numel() * item.element_size()) for number, item in results.items())
        return seconds

    def backward(self) -> list[float]:
        """Run the backward of every unit, last first, and return its seconds by unit."""
        gradients: list[dict[int, Tensor]] = [{} for _ in self._programs]
        seconds = [0.0] * len(self._programs)
        for program in reversed(self._programs):
            sent, given = self._sent[program.index], gradients[program.index]
            roots = [number for number in given if sent[number].requires_grad]
            starts: list[Tensor | None] = [given[number] for number in roots]
            if program.loss_value is not None:
                roots.append(program.loss_value)
                starts.append(None)
            if not roots:
                continue
            self._rest()
            begin = time.thread_time()
            torch.autograd.backward([sent[number] for number in roots], starts)
            seconds[program.index] = time.thread_time() - begin
            for source, numbers in program.receives.items():
                for number in numbers:
                    gradient = self._received[program.index][number].grad
                    if source != DATA_SOURCE and gradient is not None:
                        known = gradients[source].get(number)
                        gradients[source][number] = gradient if known is None else known + gradient
        return seconds


class _TrainingLoop(_Pass):
    """The model in a few stages, trained for real on copies of its tensors: what units measured one by one have to add up to.

    Kernels and memory behave otherwise in a loop than in a unit that is run alone: fresh gradients, the optimizer's state between
    one forward and the next, and other work in the caches since a stage last had its turn.
    """

    def __init__(
        self,
        captured: Captured,
        programs: Sequence[StageProgram],
        data: tuple[Tensor, ...],
        computing: MakeContext,
        make_optimizer: MakeOptimizer | None,
        rest_s: float,
    ) -> None:
        super().__init__(captured, programs, data, computing)
        self._rest_s = rest_s
        self._other = torch.ones(CACHE_BYTES // 4)
        self._optimizers: list[Optimizer] = []
        for program in programs if make_optimizer is not None else ():
            owned = [cast(Parameter, self._tensors[record.name]) for record in program.tensors if record.trainable]
            if owned and make_optimizer is not None:
                self._optimizers.append(make_optimizer(owned))

    def times(self) -> Sequence[Sequence[float]]:
        """Train on the micro-batch once and return the seconds of forwards, backwards and updates."""
        self._received.clear()
        self._sent.clear()
        forward, backward = self.forward(_run), self.backward()
        updates = []
        for optimizer in self._optimizers:
            self._rest()
            begin = time.thread_time()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            updates.append(time.thread_time() - begin)
        for item in self._tensors.values():
            item.grad = None
        return forward, backward, updates

    def _rest(self) -> None:
        self._other.add_(1)
        time.sleep(self._rest_s)


def _count(
    captured: Captured, programs: Sequence[StageProgram], data: tuple[Tensor, ...], computing: MakeContext
) -> tuple[list[_UnitCounts], dict[int, int]]:
    """Run one pass and return the counts of every unit, and the bytes of every value that crosses between units."""
    counts: list[_UnitCounts] = []
    counting = _Pass(captured, programs, data, computing)

    def around(run: Callable[[], dict[int, Tensor]]) -> dict[int, Tensor]:
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            # Parameters and buffers are in memory anyway.
            if _storage_id(tensor) not in counting.owned_storages:
                kept[_storage_id(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(note, _same), FlopCounterMode(display=False) as counter:
            results = run()
        counts.append(_UnitCounts(flop=float(counter.get_total_flops()), saved_bytes=sum(kept.values())))
        return results

    counting.forward(around)
    counting.backward()
    return counts, counting.value_bytes


def _storage_id(tensor: Tensor) -> int:
    """Return what tells storages apart, on meta as well, where none has an address."""
    return int(tensor.untyped_storage()._cdata)


def _update_times(captured: Captured, programs: Sequence[StageProgram], make_optimizer: MakeOptimizer | None) -> list[float]:
    """Return the seconds of an optimizer step on each unit's trainable tensors alone."""
    if make_optimizer is None:
        return [0.0] * len(programs)
    owned = [
        [Parameter(captured.tensors[record.name].detach().clone()) for record in program.tensors if record.trainable]
        for program in programs
    ]
    return [_step_seconds(unit, make_optimizer) if unit else 0.0 for unit in owned]


def _step_seconds(parameters: list[Parameter], make_optimizer: MakeOptimizer) -> float:
    """Return the seconds of the optimizer's step on some parameters: the median over a few, after one that makes the state."""
    optimizer = make_optimizer(parameters)
    times = []
    for _ in range(1 + UPDATE_STEPS):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, UPDATE_GRADIENT)
        begin = time.thread_time()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.thread_time() - begin)
    return statistics.median(times[1:])


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _run(run: Callable[[], dict[int, Tensor]]) -> dict[int, Tensor]:
    return run()


def _unit(
    graph: Graph,
    programs: Sequence[StageProgram],
    index: int,
    counts: _UnitCounts,
    seconds: tuple[float, float, float],
    sizes: dict[int, int],
) -> UnitProfile:
    program = programs[index]
    crossing = {
        number for earlier in programs[: index + 1] for target, numbers in earlier.sends.items() if target > index for number in numbers
    }
    return UnitProfile(
        start=program.start,
        stop=program.stop,
        label=unit_label(graph, program.start, program.stop),
        forward_s=seconds[_FORWARD],
        backward_s=seconds[_BACKWARD],
        update_s=seconds[_UPDATE],
        forward_flop=counts.flop,
        tensors=program.tensors,
        saved_bytes=counts.saved_bytes,
        crossing_bytes=sum(sizes[number] for number in crossing),
    )


def unit_label(graph: Graph, start: int, stop: int) -> str:
    """Return what a person would call the nodes start..stop: the module of the first that computes, else its operation."""
    nodes = graph.nodes[start:stop]
    computing = [node for node in nodes if node.op not in FREE_OPS] or nodes
    named = [node.label for node in computing if node.label]
    return named[0] if named else computing[0].op.split(".")[1]
