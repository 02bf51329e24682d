"""A rank's line to the registry."""

from contextlib import suppress

import anyio

from kvflow.errors import RemoteProtocolError, Unreachable
from kvflow.observe.logs import BoundLogger
from kvflow.registry.table import is_complete
from kvflow.wire.channel import Dialer
from kvflow.wire.codec import decode_frames, encode
from kvflow.wire.messages import Card, Cards, Lookup, Message, PeerId, Register, Registered, Unregister

__all__ = ["RegistryClient"]

LEASE_S = 9.0
"""How long a card stays after its rank fell silent."""

RENEWALS_PER_LEASE = 3

ROUND_S = 1.0
"""A lookup is repeated this often, so that a registry that was restarted hears of it."""

SHARE_OF_ROUND = 0.8
"""How much of a round the registry may wait."""


class _Question:
    """One lookup that waits for its answer."""

    def __init__(self) -> None:
        self.answered = anyio.Event()
        self.cards: Cards | None = None

    def answer(self, cards: Cards) -> None:
        self.cards = cards
        self.answered.set()


class RegistryClient:
    """Registers one rank and looks up instances. `run` must be running for either to be answered.

    Args:
        endpoint: Address of the registry; it need not be up yet.
        log: Where to say that it is silent.
    """

    def __init__(self, endpoint: str, log: BoundLogger) -> None:
        self._endpoint = endpoint
        self._dialer = Dialer(endpoint)
        self._log = log.bind(registry=endpoint)
        self._is_registered = False
        self._is_withdrawn = False
        self._asked: dict[str, list[_Question]] = {}

    async def run(self) -> None:
        """Take answers, for ever."""
        while True:
            frames = await self._dialer.receive()
            try:
                message = decode_frames(frames)
            except RemoteProtocolError as error:
                self._log.warning("message_rejected", detail=str(error))
                continue
            match message:
                case Registered():
                    if not self._is_registered:
                        self._log.info("registered")
                    self._is_registered = True
                case Cards(instance=instance):
                    for question in self._asked.get(instance, ()):
                        question.answer(message)
                case _:
                    self._log.warning("message_rejected", detail=f"unexpected {type(message).__name__}")

    async def keep_registered(self, card: Card) -> None:
        """Register a rank and renew its lease until it is withdrawn; a silent registry is logged and tried again."""
        while not self._is_withdrawn:
            was_registered, self._is_registered = self._is_registered, False
            self._send(Register(card=card, lease_s=LEASE_S))
            await anyio.sleep(LEASE_S / RENEWALS_PER_LEASE)
            if not self._is_registered:
                self._log.warning("registry_silent", was_registered=was_registered)

    async def lookup(self, instance: str, timeout_s: float) -> tuple[Card, ...]:
        """Find every rank of an instance.

        Returns:
            The cards of engine ranks 0, 1, ... in order.

        Raises:
            Unreachable: The registry did not answer in time, or some rank was not registered in time.
        """
        give_up = anyio.current_time() + timeout_s
        found: Cards | None = None
        while not (found and is_complete(found.cards)) and (left_s := give_up - anyio.current_time()) > 0:
            found = await self._ask(instance, min(left_s, ROUND_S)) or found
        if found is None:
            raise Unreachable("registry did not answer", registry=self._endpoint, timeout_s=timeout_s)
        if not is_complete(found.cards):
            raise Unreachable(
                "instance is not registered, or not all of its ranks are",
                registry=self._endpoint,
                instance=instance,
                registered=[card.peer.rank.engine_rank for card in found.cards],
                needed=found.cards[0].num_ranks if found.cards else "unknown",
                timeout_s=timeout_s,
            )
        return found.cards

    def unregister(self, peer: PeerId) -> None:
        """Tell the registry to forget a rank, and do not register it again."""
        self._is_withdrawn = True
        self._send(Unregister(peer=peer))

    def close(self) -> None:
        """Close the line."""
        self._dialer.close()

    def _send(self, message: Message) -> None:
        with suppress(Unreachable):  # its silence is noticed where the answer is missed
            self._dialer.send(encode(message))

    async def _ask(self, instance: str, round_s: float) -> Cards | None:
        """Ask once. The registry waits for a complete instance, but answers before this side stops waiting."""
        question = _Question()
        questions = self._asked.setdefault(instance, [])
        questions.append(question)
        try:
            self._send(Lookup(instance=instance, timeout_s=round_s * SHARE_OF_ROUND))
            with anyio.move_on_after(round_s):
                await question.answered.wait()
        finally:
            questions.remove(question)
            if not questions:
                del self._asked[instance]
        return question.cards
