"""What every transport does with a message that has arrived: check who sent it, run the handler, report what went wrong."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from roost.errors import ForbiddenError, ProtocolError, RoostError, error_from_code
from roost.messages import Failed, Message
from roost.transport.interface import Buffer, Handler, ReceivedBuffer, Sender

logger = logging.getLogger(__name__)

MAX_ERROR_TEXT = 2000
"""Characters of an error's text that travel: enough for a person, and it fits in a gRPC trailer."""


def check_role(sender: Sender, message: Message) -> None:
    """Raise ForbiddenError unless the sender's role may send such a message."""
    if sender.role not in type(message).senders:
        allowed = ", ".join(sorted(type(message).senders))
        raise ForbiddenError(f"{sender.peer_id} is a {sender.role} and sent {type(message).__name__}, which only comes from: {allowed}")


def failed_from(error: RoostError) -> Failed:
    """Return the message that carries `error` to a peer."""
    return Failed(code=error.code, message=error.message[:MAX_ERROR_TEXT], hint=error.hint[:MAX_ERROR_TEXT])


def error_from(failed: Failed) -> RoostError:
    """Return the error that `failed` carries, as its own class."""
    return error_from_code(failed.code, failed.message, failed.hint)


def _unexpected(own_id: str, message: Message, error: Exception) -> ProtocolError:
    what = f"{own_id} failed while it handled {type(message).__name__}: {type(error).__name__}: {error}"
    return ProtocolError(what, hint=f"Read the log of {own_id}: it has the traceback.")


async def deliver(handler: Handler, own_id: str, sender: Sender, message: Message, buffers: list[ReceivedBuffer]) -> ProtocolError | None:
    """Give a one-way message to the handler; return the error to close the stream with if the handler broke."""
    kind = type(message).__name__
    try:
        await handler.on_message(sender, message, buffers)
    except RoostError as error:
        logger.warning(
            "message_dropped node=%s sender=%s message=%s error=%s what=%r", own_id, sender.peer_id, kind, error.code, error.message
        )
    except Exception as error:
        logger.exception("handler_broke node=%s sender=%s message=%s", own_id, sender.peer_id, kind)
        return _unexpected(own_id, message, error)
    return None


async def answer(
    handler: Handler, own_id: str, sender: Sender, message: Message, buffers: list[ReceivedBuffer]
) -> tuple[Message, Sequence[Buffer]]:
    """Return the handler's reply to a call, or a `Failed` with what it raised."""
    kind = type(message).__name__
    try:
        return await handler.on_call(sender, message, buffers)
    except RoostError as error:
        logger.info("call_failed node=%s sender=%s message=%s error=%s what=%r", own_id, sender.peer_id, kind, error.code, error.message)
        return failed_from(error), ()
    except Exception as error:
        logger.exception("handler_broke node=%s sender=%s message=%s", own_id, sender.peer_id, kind)
        return failed_from(_unexpected(own_id, message, error)), ()
