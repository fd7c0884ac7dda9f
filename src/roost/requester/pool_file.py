"""A pool that somebody imagines, from a YAML file: nodes, links, and settings of the job. Nothing is measured, nobody is asked.

nodes:
  - {name: desk, memory: 8GB, speed: 2.0, up_mbit: 40, down_mbit: 200, latency_ms: 10}
  - {name: laptop, memory: 4GB, gflops: 50, count: 3}
links:
  - {between: [desk, laptop], mbit: 1000, latency_ms: 0.3}
job:
  micro_batch_size: 8

docs/plan.md has every field.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from roost.config import IDENTIFIER, JobConfig, parse_bytes
from roost.errors import InvalidConfigError
from roost.types import LinkProfile, NodeProfile

MAX_FILE_BYTES = 1 << 18
MAX_DEPTH = 8
MAX_VALUES = 65_536
"""Values and brackets of a file: more than the largest pool and all its links need."""
MAX_LETTERS = 16_384
"""Letters of one value."""
MAX_NODES = 1024
MAX_LINKS = 2000
"""Entries of links."""
MAX_PAIRS = 2_000_000
"""Ordered pairs of nodes that all entries of links stand for."""
DEFAULT_MBIT = 1000.0
"""Up and down, of a node that says nothing: a wired home network."""
DEFAULT_LATENCY_MS = 0.1
"""From a node to the middle of the network: half of what a wired home network has between two machines."""
MOST_MBIT = 1e7
MOST_LATENCY_MS = 1e5
MOST_SPEED = 1e6
MOST_MEMORY = 1 << 50

TOP_FIELDS = ("nodes", "links", "job")
NODE_FIELDS = ("name", "memory", "speed", "gflops", "up_mbit", "down_mbit", "latency_ms", "reliability", "count")
LINK_FIELDS = ("between", "mbit", "latency_ms")
JOB_FIELDS = ("batch_size", "micro_batch_size", "averaging_interval", "min_clusters", "max_clusters", "max_in_flight")
POWER_OF_TEN = re.compile(r"[-+]?[0-9]{1,20}(\.[0-9]{0,20})?[eE][-+]?[0-9]{1,3}")
"""A number that YAML 1.1 takes for text if its dot or the sign of its exponent is missing."""
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml where it is there: it reads the largest file in a second."""
HINT = "Correct the file: docs/plan.md has every field, examples/pool.yaml is an example."


@dataclass(frozen=True, kw_only=True)
class ImaginedNode:
    """A node that is declared, not measured."""

    name: str
    group: str
    """The name of its entry: differs from `name` where the entry has a count."""
    memory_bytes: int
    speed: float | None
    """Relative to the machine that the model was profiled on; None: `flop_per_s` counts."""
    flop_per_s: float | None
    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float
    """One way, from it to the middle of the network; the latency between two nodes is the sum of theirs."""
    reliability: float

    def profile(self, reference_flop_per_s: float) -> NodeProfile:
        """Return its profile, with `speed` relative to a machine of `reference_flop_per_s`, in the precision of the job."""
        flop_per_s = self.flop_per_s if self.speed is None else self.speed * reference_flop_per_s
        assert flop_per_s is not None, "one of the two is set"
        return NodeProfile(
            node_id=self.name,
            address="",
            memory_bytes=self.memory_bytes,
            flop_per_s=flop_per_s,
            matmul_flop_per_s=flop_per_s,
            convolution_flop_per_s=flop_per_s,
            bf16_flop_per_s=flop_per_s,
            device="cpu",
            threads=1,
            emulated=True,
            reliability=self.reliability,
        )


@dataclass(frozen=True, kw_only=True)
class ImaginedLink:
    """A link between two nodes that differs from what their own lines would give."""

    bytes_per_s: float | None
    latency_s: float | None


@dataclass(frozen=True, kw_only=True)
class ImaginedPool:
    """What a pool file says."""

    nodes: tuple[ImaginedNode, ...]
    links: dict[tuple[str, str], ImaginedLink]
    """By the names of both ends, in both orders."""
    settings: dict[str, int]
    """Fields of the job that the file sets."""
    source: str
    """The file, for messages."""

    def node_profiles(self, reference_flop_per_s: float) -> tuple[NodeProfile, ...]:
        """Return the nodes, with speeds relative to a machine of `reference_flop_per_s`."""
        fastest: dict[tuple[str, int], float] = {}
        for ends, link in self.links.items():
            for way, end in enumerate(ends):
                fastest[end, way] = max(fastest.get((end, way), 0.0), link.bytes_per_s or 0.0)
        profiles = []
        for node in self.nodes:
            # A link that is faster than the line, such as one inside a room, widens it.
            up = max(node.up_bytes_per_s, fastest.get((node.name, 0), 0.0))
            down = max(node.down_bytes_per_s, fastest.get((node.name, 1), 0.0))
            profiles.append(dataclasses.replace(node.profile(reference_flop_per_s), up_bytes_per_s=up, down_bytes_per_s=down))
        return tuple(profiles)

    def link_profiles(self) -> tuple[LinkProfile, ...]:
        """Return every link: the slower of uplink and downlink and the sum of latencies, unless the file says otherwise."""
        return tuple(self._link(one, other) for one in self.nodes for other in self.nodes if one is not other)

    def _link(self, source: ImaginedNode, target: ImaginedNode) -> LinkProfile:
        special = self.links.get((source.name, target.name), ImaginedLink(bytes_per_s=None, latency_s=None))
        rate = min(source.up_bytes_per_s, target.down_bytes_per_s) if special.bytes_per_s is None else special.bytes_per_s
        latency = source.latency_s + target.latency_s if special.latency_s is None else special.latency_s
        return LinkProfile(source=source.name, target=target.name, latency_s=latency, bytes_per_s=rate)

    def apply(self, config: JobConfig) -> JobConfig:
        """Return the job with the file's settings. Raises InvalidConfigError if they do not go together."""
        settings: dict[str, Any] = dict(self.settings)
        if "batch_size" in settings:
            # A smaller batch has smaller micro-batches, unless the file says how small.
            settings.setdefault("micro_batch_size", min(config.micro_batch_size, settings["batch_size"]))
        try:
            return dataclasses.replace(config, **settings)
        except InvalidConfigError as error:
            raise InvalidConfigError(f"{self.source}, job: {error.message}", hint=HINT) from error


def load_pool_file(path: Path) -> ImaginedPool:
    """Return what the file says. Raises InvalidConfigError for every mistake, naming file, entry and field."""
    raw = _parse(path)
    file = _Entry(source=str(path), where="the file", fields=raw)
    file.allow(TOP_FIELDS)
    nodes = _all_nodes(file)
    _check_names(file, nodes)
    groups: dict[str, list[str]] = {}
    for node in nodes:
        groups.setdefault(node.group, []).append(node.name)
        if node.group != node.name:
            groups.setdefault(node.name, []).append(node.name)
    return ImaginedPool(nodes=tuple(nodes), links=_all_links(file, groups), settings=_settings(file), source=str(path))


def _parse(path: Path) -> dict[Any, Any]:
    def wrong(what: str) -> InvalidConfigError:
        return InvalidConfigError(f"{path}: {what}", hint=HINT)

    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise wrong(f"the file cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise wrong(f"the file is larger than {MAX_FILE_BYTES} bytes")
    try:
        raw = _load(data, wrong)
    # A value such as a date that does not exist raises ValueError; so do bytes that are no text.
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise wrong(f"the file is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise wrong("the file must have 'nodes:' at its top")
    return raw


def _load(data: bytes, wrong: Any) -> Any:
    """Return what YAML says. Raises what `wrong` makes of tricks, and the errors of yaml."""
    _refuse_tricks(data, wrong)
    loader = LOADER(data)
    try:
        node = loader.get_single_node()
        _refuse_repetition(node, wrong)
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _refuse_tricks(data: bytes, wrong: Any) -> None:
    """Raise an error for too many or too long values, aliases (few bytes that stand for many), deep nesting, and several documents."""
    depth = documents = 0
    for count, event in enumerate(yaml.parse(data, Loader=LOADER)):
        line = event.start_mark.line + 1
        if count > MAX_VALUES:
            raise wrong(f"line {line}: the file has more than {MAX_VALUES} values")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise wrong(f"line {line}: anchors and aliases (& and *) are not taken")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_LETTERS:
            raise wrong(f"line {line}: a value has more than {MAX_LETTERS} letters")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        documents += isinstance(event, yaml.DocumentStartEvent)
        if depth > MAX_DEPTH:
            raise wrong(f"line {line}: nested more than {MAX_DEPTH} deep")
        if documents > 1:
            raise wrong(f"line {line}: a second document (---) begins")


def _refuse_repetition(root: yaml.Node | None, wrong: Any) -> None:
    """Raise an error for a field that is given twice."""
    pending = [root]
    while pending:
        node = pending.pop()
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    raise wrong(f"line {key.start_mark.line + 1}: {key.value!r} is there twice")
                seen.add(str(key.value))
                pending.append(value)
        elif isinstance(node, yaml.SequenceNode):
            pending.extend(node.value)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A mapping of the file, and where it is."""

    source: str
    where: str
    fields: Mapping[Any, Any]

    def error(self, what: str) -> InvalidConfigError:
        return InvalidConfigError(f"{self.source}, {self.where}: {what}", hint=HINT)

    def allow(self, names: tuple[str, ...]) -> None:
        for name in self.fields:
            if name not in names:
                raise self.error(f"unknown field {str(name)[:40]!r}; there are {', '.join(names)}")

    def entries(self, field: str, what: str) -> list[_Entry]:
        """Return the list of mappings in `field`, empty if it is left out."""
        raw = self.fields.get(field)
        if raw is None:
            return []
        if not isinstance(raw, list) or not all(isinstance(item, dict) for item in raw):
            raise self.error(f"'{field}' must be a list with an entry such as '- {{name: value}}' for each {what}")
        return [_Entry(source=self.source, where=_where(field, index, item), fields=item) for index, item in enumerate(raw)]

    def number(self, field: str, default: float | None, *, least: float = 0.0, most: float) -> float | None:
        """Return a number above `least` and at most `most`."""
        if field not in self.fields:
            return default
        value = self.fields[field]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{field} must be a number, not {_shown(value)}{_spelled(value)}")
        # An int of any length compares exactly, where converting it might overflow.
        if not least < value <= most or not math.isfinite(value):
            raise self.error(f"{field} must be above {least:g} and at most {most:g}, not {_shown(value)}")
        return float(value)

    def whole(self, field: str, default: int, *, least: int, most: int) -> int:
        value = self.fields.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{field} must be a whole number, not {_shown(value)}")
        if not least <= value <= most:
            raise self.error(f"{field} must be in {least}..{most}, not {_shown(value)}")
        return value

    def latency_s(self, default: float | None) -> float | None:
        # Unlike everything else a latency may be 0.
        if self.fields.get("latency_ms") == 0 and not isinstance(self.fields["latency_ms"], bool):
            return 0.0
        milliseconds = self.number("latency_ms", None, most=MOST_LATENCY_MS)
        return default if milliseconds is None else milliseconds / 1000

    def bytes_per_s(self, field: str, default: float | None) -> float | None:
        mbit = self.number(field, default, most=MOST_MBIT)
        return None if mbit is None else mbit * 1e6 / 8


def _where(field: str, index: int, item: Mapping[Any, Any]) -> str:
    name = item.get("name")
    return f"{field}[{index}]" + (f" ({name[:64]})" if isinstance(name, str) else "")


def _shown(value: object) -> str:
    try:
        return repr(value)[:60]
    except ValueError:
        # Python writes out no int of thousands of digits.
        return "a very large number"


def _spelled(value: object) -> str:
    """Return how to write a number such as 1e3, which YAML 1.1 takes for text; '' for anything else."""
    if not isinstance(value, str) or POWER_OF_TEN.fullmatch(value) is None or not math.isfinite(float(value)):
        return ""
    number = float(value)
    mantissa, exponent = f"{number:e}".split("e")
    power = f"{mantissa.rstrip('0')}{'0' if mantissa.rstrip('0').endswith('.') else ''}e{int(exponent):+d}"
    return f": write {int(number)} or {power}" if number.is_integer() and abs(number) < 1e15 else f": write {power}"


def _all_nodes(file: _Entry) -> list[ImaginedNode]:
    """Return every node. Counts are summed before any is written out."""
    entries: list[tuple[ImaginedNode, int | None]] = []
    total = 0
    for index, entry in enumerate(file.entries("nodes", "node")):
        node, count = _node(entry, index)
        total += count or 1
        if total > MAX_NODES:
            raise file.error(f"{total} nodes are too many: at most {MAX_NODES}")
        entries.append((node, count))
    if not entries:
        raise file.error("'nodes' must list at least one node")
    nodes: list[ImaginedNode] = []
    for node, count in entries:
        alike = (dataclasses.replace(node, name=f"{node.name}-{number + 1}") for number in range(count or 0))
        nodes.extend((node,) if count is None else alike)
    return nodes


def _node(entry: _Entry, index: int) -> tuple[ImaginedNode, int | None]:
    """Return the node of an entry, and how many there are of it; None: the one, under its own name."""
    entry.allow(NODE_FIELDS)
    name = entry.fields.get("name", f"node-{index + 1}")
    if not isinstance(name, str) or IDENTIFIER.fullmatch(name) is None:
        raise entry.error(f"name must be 1 to 64 letters, digits, '_', '.' or '-', not {_shown(name)}")
    if "speed" in entry.fields and "gflops" in entry.fields:
        raise entry.error("speed and gflops exclude each other: give one")
    gflops = entry.number("gflops", None, most=1e9)
    up, down = entry.bytes_per_s("up_mbit", DEFAULT_MBIT), entry.bytes_per_s("down_mbit", DEFAULT_MBIT)
    latency = entry.latency_s(DEFAULT_LATENCY_MS / 1000)
    reliability = entry.number("reliability", 1.0, most=1.0)
    assert up is not None and down is not None and latency is not None and reliability is not None, "all have defaults"
    count = entry.whole("count", 1, least=1, most=MAX_NODES)
    node = ImaginedNode(
        name=name,
        group=name,
        memory_bytes=_memory(entry),
        speed=entry.number("speed", 1.0, most=MOST_SPEED) if gflops is None else None,
        flop_per_s=None if gflops is None else gflops * 1e9,
        up_bytes_per_s=up,
        down_bytes_per_s=down,
        latency_s=latency,
        reliability=reliability,
    )
    return node, count if "count" in entry.fields else None


def _memory(entry: _Entry) -> int:
    raw = entry.fields.get("memory")
    if raw is None:
        raise entry.error("memory is missing, such as 'memory: 8GB'")
    if isinstance(raw, bool) or not isinstance(raw, int | str):
        raise entry.error(f"memory must be bytes or text such as 8GB, not {_shown(raw)}")
    try:
        # An int beyond that may be too long to be written out in an error.
        size = raw if isinstance(raw, int) and abs(raw) > MOST_MEMORY else parse_bytes(raw)
    except InvalidConfigError as error:
        raise entry.error(f"memory: {error.message}") from error
    if not 0 < size <= MOST_MEMORY:
        raise entry.error(f"memory must be above 0 and at most {MOST_MEMORY} bytes, not {_shown(raw)}")
    return size


def _check_names(file: _Entry, nodes: list[ImaginedNode]) -> None:
    seen: dict[str, str] = {}
    for node in nodes:
        if IDENTIFIER.fullmatch(node.name) is None:
            raise file.error(f"node {node.name!r} has a name of more than 64 letters")
        if node.name in seen:
            raise file.error(f"two nodes have the name {node.name!r}: every node needs a name of its own")
        seen[node.name] = node.group
    for node in nodes:
        if node.group != node.name and node.group in seen:
            raise file.error(f"{node.group!r} names both a node and a group of nodes (with a count)")


def _all_links(file: _Entry, groups: Mapping[str, list[str]]) -> dict[tuple[str, str], ImaginedLink]:
    """Return the links by the names of both ends, in both orders; later entries count. Pairs are summed before any is written out."""
    entries = file.entries("links", "link")
    if len(entries) > MAX_LINKS:
        raise file.error(f"{len(entries)} entries of links are too many: at most {MAX_LINKS}")
    parsed = [_link_entry(entry, groups) for entry in entries]
    pairs = sum(len(groups[one]) * len(groups[other]) * (1 if one == other else 2) for one, other, _ in parsed)
    if pairs > MAX_PAIRS:
        raise file.error(f"the entries of links stand for {pairs} pairs of nodes, counting both ways: at most {MAX_PAIRS}")
    links: dict[tuple[str, str], ImaginedLink] = {}
    for one, other, link in parsed:
        for here in groups[one]:
            for there in groups[other]:
                if here != there:
                    links[here, there] = link
                    # Within a group the other order comes by itself.
                    if one != other:
                        links[there, here] = link
    return links


def _link_entry(entry: _Entry, groups: Mapping[str, list[str]]) -> tuple[str, str, ImaginedLink]:
    entry.allow(LINK_FIELDS)
    between = entry.fields.get("between")
    if not isinstance(between, list) or len(between) != 2:
        raise entry.error(f"between must name two nodes, such as [desk, laptop], not {_shown(between)}")
    for name in between:
        if not isinstance(name, str) or name not in groups:
            raise entry.error(f"between: there is no node {_shown(name)}; there are {_listed(groups)}")
    link = ImaginedLink(bytes_per_s=entry.bytes_per_s("mbit", None), latency_s=entry.latency_s(None))
    if link.bytes_per_s is None and link.latency_s is None:
        raise entry.error("mbit or latency_ms must be given")
    if groups[between[0]] == groups[between[1]] and len(groups[between[0]]) == 1:
        raise entry.error(f"between: {between[0]} has no link to itself")
    return between[0], between[1], link


def _listed(groups: Mapping[str, list[str]]) -> str:
    names = sorted(groups)
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _settings(file: _Entry) -> dict[str, int]:
    raw = file.fields.get("job")
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise file.error("'job' must have fields such as 'micro_batch_size: 8'")
    job = _Entry(source=file.source, where="job", fields=raw)
    job.allow(JOB_FIELDS)
    least = {"max_clusters": 0, "max_in_flight": 0}
    return {name: job.whole(name, 0, least=least.get(name, 1), most=10**9) for name in JOB_FIELDS if name in raw}
