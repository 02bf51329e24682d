"""A running request moves from one decode server to another, which has not asked for it, while its text is written."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

import kvflow
from kvflow import blocking
from kvflow.cli.demo.models import LanguageModel
from kvflow.cli.demo.pools import RankPool, rebuild_cache

__all__ = ["Text", "move_request", "take_request_over"]

ROOM: Final = "a request that moves"

MARGIN: Final = 8
"""Tokens that the first server generates while the other one decides, and grants its pages."""

STEP_S: Final = 100e-6


class Text(NamedTuple):
    """What was generated, and how.

    Attributes:
        tokens: All tokens so far.
        is_complete: Nothing follows.
        at_s: When the last one was generated, or when the first one that is generated here was.
        gap_s: Median time between two tokens.
        num_bytes: Bytes that have moved here.
        why: Why the request has not moved, unless it was complete before; else empty.
    """

    tokens: list[int]
    is_complete: bool
    at_s: float
    gap_s: float = 0.0
    num_bytes: int = 0
    why: str = ""


def move_request(
    model: LanguageModel,
    pools: Sequence[RankPool],
    ranks: tuple[Sequence[blocking.PrefillRank], Sequence[blocking.DecodeRank]],
    first: int,
    num_prompt: int,
    num_tokens: int,
) -> Text:
    """Generate a quarter of the tokens, offer the request to the other server, and go on until its pages have left.

    If they do not arrive there, this server goes on: until then it keeps everything that it needs to.

    Args:
        model: The model.
        pools: Pools with the cache of the prompt, for all tokens.
        ranks: Prefill and decode ranks of this server.
        first: The token after the prompt.
        num_prompt: Tokens of the prompt.
        num_tokens: Tokens to generate in all.
    """
    senders, offering = ranks
    cache, tokens, times = rebuild_cache(model, pools, num_prompt), [first], [time.monotonic()]

    def generate() -> int:
        """Generate one more token; return how many tokens have pages."""
        tokens.append(model.step(tokens[-1:], cache))
        times.append(time.monotonic())
        computed = num_prompt + len(tokens) - 1
        for pool in pools:
            pool.write(cache, computed - 1, computed)
        return computed

    computed = num_prompt
    while len(tokens) < num_tokens // 4 and not model.ends_with(tokens):
        computed = generate()
    stop = computed + MARGIN  # the other server grants pages for this many tokens
    ticket = senders[0].ticket(ROOM)
    made = offering[0].ask(lambda rank: rank.offers.make_offer(ticket, to="second", tokens=(0, stop))).result()
    sending = [rank.send(ROOM, defer_lease=True) for rank in senders]
    sent = 0
    try:
        while not model.ends_with(tokens) and computed < stop and made.failure is None:
            _send(sending, pools, sent, computed)
            sent, computed = computed, generate()
        if computed == stop:
            _send(sending, pools, sent, stop, metadata=msgspec.json.encode(tokens))
            _await_arrival(made, sending)
            gaps = [after - before for before, after in itertools.pairwise(times)]
            return Text(tokens, False, times[-1], statistics.median(gaps))
        why = "" if made.failure is None else made.failure.detail
    except (kvflow.OfferDeclined, kvflow.TransferFailed) as error:
        why = str(error)
    for sender in sending:
        sender.abort("the request stays where it is")
    return Text(_complete(model, tokens, cache, num_tokens), True, time.monotonic(), why=why)


def _await_arrival(made: kvflow.MadeOffer, senders: Sequence[blocking.BlockingSender]) -> None:
    """Wait until all pages have arrived; raise OfferDeclined or TransferFailed if they do not."""
    while not made.is_answered:
        time.sleep(STEP_S)
    if made.failure is not None:
        raise kvflow.OfferDeclined("offer is declined", detail=made.failure.detail)
    for sender in senders:
        sender.start_lease()
        sender.wait()
        sender.result()


def _send(
    senders: Sequence[blocking.BlockingSender],
    pools: Sequence[RankPool],
    start: int,
    stop: int,
    metadata: bytes | None = None,
) -> None:
    for sender, pool in zip(senders, pools, strict=True):
        pages: dict[str, Any] = {"kv": pool.pages(start, stop)}
        if metadata is None:
            sender.chunk((start, stop), pages)
        else:
            sender.finish((start, stop), pages, metadata=metadata)


def _complete(model: LanguageModel, tokens: list[int], cache: Any, num_tokens: int) -> list[int]:
    return [*tokens[:-1], *model.generate(tokens[-1], cache, num_tokens - len(tokens) + 1)]


def take_request_over(
    model: LanguageModel,
    pools: Sequence[RankPool],
    ranks: tuple[Sequence[blocking.PrefillRank], Sequence[blocking.DecodeRank]],
    num_tokens: int,
    is_over: Callable[[], bool],
) -> Text | None:
    """Accept an offer, receive its pages, and complete the text; None if the request stays where it is."""
    offered, receiving = ranks
    offers: list[kvflow.ReceivedOffer] = []
    while not offers:
        if is_over():
            return None
        time.sleep(STEP_S)
        offers = offered[0].ask(lambda rank: rank.offers.take_offers()).result()
    (offer,) = offers
    offered[0].ask(lambda _: offer.accept()).result()
    receivers = [
        rank.receive(prefill=offer.ticket, tokens=offer.tokens, pages={"kv": pool.pages(*offer.tokens)})
        for rank, pool in zip(receiving, pools, strict=True)
    ]
    while not all(receiver.is_settled for receiver in receivers):
        time.sleep(STEP_S)
    try:
        handovers = [receiver.result() for receiver in receivers]
    except kvflow.TransferFailed:  # the text has ended there
        return None
    tokens = msgspec.json.decode(handovers[0].metadata, type=list[int])
    cache = rebuild_cache(model, pools, offer.tokens[1])
    if len(tokens) < num_tokens and not model.ends_with(tokens):
        tokens.append(model.step(tokens[-1:], cache))
    at_s = time.monotonic()
    num_bytes = sum(handover.num_bytes for handover in handovers)
    return Text(_complete(model, tokens, cache, num_tokens), True, at_s, num_bytes=num_bytes)
