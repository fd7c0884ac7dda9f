from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_kit import chunk

from roost.config import TransportConfig
from roost.errors import ForbiddenError, MalformedMessageError, MessageTooLargeError
from roost.messages import Message, Ping, StatusRequest, TensorsReply
from roost.transport.framing import MAX_BUFFERS, MAX_FRAME_BYTES, PREFIX, SIZE, Assembler, pack
from roost.transport.interface import Buffer, ReceivedBuffer

LIMITS = TransportConfig(frame_bytes=1024)
SMALL = TransportConfig(max_message_bytes=5000, max_header_bytes=400, frame_bytes=1024)


def assemble(frames: Sequence[bytes], limits: TransportConfig = LIMITS) -> tuple[Message, list[ReceivedBuffer]]:
    assembler = Assembler(limits)
    results = [assembler.feed(frame) for frame in frames]
    assert all(result is None for result in results[:-1])
    assert assembler.idle
    last = results[-1]
    assert last is not None
    return last


@given(st.lists(st.binary(max_size=5000), max_size=6), st.integers(1, 3000))
def test_any_message_survives_any_frame_size(buffers: list[bytes], frame_bytes: int) -> None:
    packed = pack(chunk(3), buffers, LIMITS)
    frames = list(packed.frames(frame_bytes))
    assert all(0 < len(frame) <= frame_bytes for frame in frames)
    assert sum(len(frame) for frame in frames) == packed.nbytes
    message, received = assemble(frames)
    assert message == chunk(3)
    assert [bytes(buffer) for buffer in received] == buffers


def test_a_small_message_is_one_frame() -> None:
    assert len(list(pack(Ping(), [bytes(100), bytes(50)], LIMITS).frames(1024))) == 1


def test_buffers_of_any_shape_are_sent_as_their_bytes() -> None:
    grid = memoryview(bytes(range(24))).cast("B", (2, 3, 4))
    empty = memoryview(bytearray())
    buffers: list[Buffer] = [grid, empty, memoryview(b"abcd").cast("I")]
    _, received = assemble(list(pack(Ping(), buffers, LIMITS).frames(1024)))
    assert [bytes(buffer) for buffer in received] == [bytes(range(24)), b"", b"abcd"]


def test_received_buffers_can_be_written_to() -> None:
    _, received = assemble(list(pack(Ping(), [b"abc"], LIMITS).frames(1024)))
    received[0][0] = 122
    assert bytes(received[0]) == b"zbc"


def test_one_assembler_takes_message_after_message() -> None:
    assembler = Assembler(LIMITS)
    for step in range(3):
        frames = list(pack(chunk(step), [bytes(step * 2000)], LIMITS).frames(1024))
        results = [assembler.feed(frame) for frame in frames]
        assert results[-1] is not None
        assert results[-1][0] == chunk(step)


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=200), max_size=5))
def test_random_bytes_are_refused_and_nothing_else_happens(frames: list[bytes]) -> None:
    assembler = Assembler(SMALL)
    try:
        for frame in frames:
            assert assembler.feed(frame) is None
    except (MalformedMessageError, MessageTooLargeError):
        pass


@settings(max_examples=300)
@given(st.data())
def test_a_message_with_flipped_bytes_is_refused_or_still_a_message(data: st.DataObject) -> None:
    frame = bytearray(b"".join(pack(chunk(1), [bytes(64)], SMALL).frames(1 << 20)))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        result = Assembler(SMALL).feed(bytes(frame))
    except (MalformedMessageError, MessageTooLargeError):
        return
    assert result is None or isinstance(result[0], Message)


@settings(max_examples=200)
@given(st.binary(max_size=300), st.lists(st.integers(0, 2**64 - 1), max_size=4), st.binary(max_size=100))
def test_a_header_with_random_text_is_refused(text: bytes, sizes: list[int], rest: bytes) -> None:
    frame = PREFIX.pack(len(text), len(sizes)) + text + b"".join(SIZE.pack(size) for size in sizes) + rest
    with pytest.raises((MalformedMessageError, MessageTooLargeError)):
        Assembler(SMALL).feed(frame)


def test_bytes_after_the_end_of_a_message_are_refused() -> None:
    frame = b"".join(pack(Ping(), [b"abc"], LIMITS).frames(1024)) + b"x"
    with pytest.raises(MalformedMessageError, match="follow the end"):
        Assembler(LIMITS).feed(frame)


def test_an_empty_frame_is_refused() -> None:
    with pytest.raises(MalformedMessageError):
        Assembler(LIMITS).feed(b"")


@pytest.mark.parametrize(
    "frame",
    [
        PREFIX.pack(401, 0),
        PREFIX.pack(10, MAX_BUFFERS + 1),
        PREFIX.pack(25, 2) + b'{"type":"Ping","body":{}}' + SIZE.pack(2500) + SIZE.pack(2501),
        bytes(MAX_FRAME_BYTES + 1),
    ],
    ids=["header", "count", "sum of sizes", "frame"],
)
def test_what_is_over_a_limit_is_refused_as_soon_as_it_is_declared(frame: bytes) -> None:
    with pytest.raises(MessageTooLargeError):
        Assembler(SMALL).feed(frame)


def test_a_message_may_be_refused_before_its_data_is_taken() -> None:
    def refuse(message: Message) -> None:
        raise ForbiddenError(f"no {type(message).__name__}")

    frames = list(pack(Ping(), [bytes(100_000)], LIMITS).frames(1024))
    with pytest.raises(ForbiddenError, match="no Ping"):
        Assembler(LIMITS, accept=refuse).feed(frames[0])


def test_memory_follows_what_arrives_and_not_what_is_declared() -> None:
    limits = TransportConfig(max_message_bytes=1 << 40)
    frames = pack(TensorsReply(tensors=()), [], limits).head[PREFIX.size :]
    head = PREFIX.pack(len(frames), 1000) + frames + SIZE.pack(1 << 29) * 1000
    tracemalloc.start()
    try:
        Assembler(limits).feed(head + bytes(1000))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_a_sender_refuses_too_many_buffers_and_too_long_a_header() -> None:
    with pytest.raises(MessageTooLargeError, match="buffers"):
        pack(Ping(), [b""] * (MAX_BUFFERS + 1), LIMITS)
    with pytest.raises(MessageTooLargeError, match="header"):
        pack(Ping(), [], TransportConfig(max_header_bytes=10))


def test_bytes_beside_a_message_that_has_none_are_refused_before_they_are_taken() -> None:
    for message in (StatusRequest(), Ping()):
        (frame, *_) = pack(message, [bytes(type(message).max_buffer_bytes + 1)], LIMITS).frames(LIMITS.frame_bytes)
        with pytest.raises(MessageTooLargeError, match="beside it"):
            Assembler(LIMITS).feed(frame)
