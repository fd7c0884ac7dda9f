from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roost import messages as m
from roost.codec import MAX_STRING, decode, decode_record, encode, encode_record
from roost.config import JobConfig, NamedArguments
from roost.errors import MalformedMessageError
from roost.types import MicroBatch, Peer, Role, TensorSpec

ACTIVATION = m.Activation(
    job_id="job-1",
    source_stage=0,
    micro_batch=MicroBatch(number=3, batch=1, position=0, count=2, samples=4, batch_samples=8, training=True, seed=2**62, lease=5),
    values=(TensorSpec(name="7", dtype="float32", shape=(4, 3)),),
    rng=True,
)


def message_types() -> list[type[m.Message]]:
    return m.Message.__subclasses__()


@pytest.mark.parametrize("kind", message_types(), ids=lambda kind: kind.__name__)
def test_every_message_names_the_roles_that_may_send_it(kind: type[m.Message]) -> None:
    assert kind.senders
    assert kind.senders <= set(Role)


@pytest.mark.parametrize("kind", message_types(), ids=lambda kind: kind.__name__)
def test_every_message_is_keyword_only_and_frozen(kind: type[m.Message]) -> None:
    parameters = kind.__dataclass_params__  # type: ignore[attr-defined]
    assert parameters.frozen
    assert all(field.kw_only for field in dataclasses.fields(kind))


def test_a_message_comes_back_as_it_was_sent() -> None:
    assert decode(encode(ACTIVATION)) == ACTIVATION


def test_optional_and_nested_records_come_back() -> None:
    config = JobConfig(job_id="j", optimizer=NamedArguments(name="AdamW", arguments=(("lr", 0.5), ("betas", (0.9, 0.99)))), samples=3)
    again = decode_record(JobConfig, json.loads(json.dumps(encode_record(config))))
    assert again == config


def changed(path: list[str | int], value: Any) -> bytes:
    raw = json.loads(encode(ACTIVATION))
    target = raw
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return json.dumps(raw).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"type": "Activation"}',
        b'{"type": "Nothing", "body": {}}',
        b'{"type": ["Done"], "body": {}}',
        b'{"type": "Done", "body": {}, "more": 1}',
        b'{"type": "Done", "body": {"unknown": 1}}',
        b'{"type": "Done", "body": []}',
        b'{"type": "__class__", "body": {}}',
        b"[" * 100_000,
        b'{"type": "Done", "body": ' + b"[" * 100_000,
        changed(["body", "rng"], 1),
        changed(["body", "rng"], None),
        changed(["body", "job_id"], 7),
        changed(["body", "job_id"], "x" * (MAX_STRING + 1)),
        changed(["body", "source_stage"], 1.5),
        changed(["body", "source_stage"], True),
        changed(["body", "source_stage"], 2**70),
        changed(["body", "micro_batch", "samples"], 0),
        changed(["body", "micro_batch", "samples"], 9),
        changed(["body", "micro_batch", "position"], 2),
        changed(["body", "values"], "7"),
        changed(["body", "values", 0, "dtype"], "object"),
        changed(["body", "values", 0, "shape"], [-1]),
        changed(["body", "values", 0, "shape"], [1] * 17),
        changed(["body", "values", 0, "shape"], [2**40, 2**40]),
        changed(["body", "values", 0, "shape"], [1.0]),
    ],
)
def test_what_is_not_exactly_a_message_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        decode(data)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused(number: str) -> None:
    data = b'{"type":"Registered","body":{"heartbeat_s":' + number.encode() + b"}}"
    with pytest.raises(MalformedMessageError):
        decode(data)


def test_a_message_with_a_number_that_is_not_finite_is_not_sent() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode(m.Registered(heartbeat_s=float("nan")))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=200, deadline=None)
@given(kind=st.sampled_from(message_types()), body=json_values)
def test_any_json_is_a_message_or_refused(kind: type[m.Message], body: Any) -> None:
    data = json.dumps({"type": kind.__name__, "body": body}).encode()
    try:
        message = decode(data)
    except MalformedMessageError:
        return
    assert decode(encode(message)) == message


@settings(max_examples=200, deadline=None)
@given(kind=st.sampled_from(message_types()), data=st.data())
def test_right_fields_with_wrong_values_are_a_message_or_refused(kind: type[m.Message], data: st.DataObject) -> None:
    body = {name: data.draw(json_values) for name in typing.get_type_hints(kind) if name != "senders"}
    try:
        decode(json.dumps({"type": kind.__name__, "body": body}).encode())
    except MalformedMessageError:
        return


def test_peers_are_records() -> None:
    with pytest.raises(MalformedMessageError, match="expected exactly the fields"):
        decode_record(Peer, {"peer_id": "a"})


@pytest.mark.parametrize("name", ["\ud800", "a\udfffb"])
def test_half_a_surrogate_pair_is_no_text(name: str) -> None:
    with pytest.raises(MalformedMessageError, match="is not a valid str"):
        decode(changed(["body", "values", 0, "name"], name))
    assert decode(changed(["body", "values", 0, "name"], "\U0001f333"))
