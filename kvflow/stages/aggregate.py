"""Fifth stage: notices from every engine rank come together here.

They come in band with the bytes, or over the control channel; both end up as the same event, and the core counts them
by engine rank.
"""

from collections.abc import Callable

from kvflow.errors import RemoteProtocolError, Stage
from kvflow.stages.context import StageContext
from kvflow.state.events import NoticeDelivered
from kvflow.wire.codec import decode
from kvflow.wire.messages import Notice

__all__ = ["Aggregate"]


class Aggregate:
    """Takes in-band notices in.

    Args:
        context: Of this rank.
        on_notice: Sees each notice before the core does.
    """

    def __init__(
        self,
        context: StageContext,
        on_notice: Callable[[Notice], None],
    ) -> None:
        self._context = context
        self._on_notice = on_notice

    def take(self, payload: bytes) -> None:
        """Count a notice that the transport has delivered; anybody can have sent it."""
        try:
            notice = _decode_notice(payload)
        except RemoteProtocolError as error:
            self._context.oddities.count("notice_rejected", stage=Stage.AGGREGATE.value, detail=str(error))
            return
        self._on_notice(notice)
        self._context.dispatch(NoticeDelivered(notice))


def _decode_notice(payload: bytes) -> Notice:
    message = decode(payload)
    if not isinstance(message, Notice):
        raise RemoteProtocolError("only notices come in band", message=type(message).__name__)
    return message
