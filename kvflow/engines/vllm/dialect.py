"""`kv_transfer_params`: what routers pass from prefill to decode. Pure.

In both dialects, a router sends a request to prefill first, with `do_remote_decode`. In that of vLLM's NixlConnector,
the router passes the `kv_transfer_params` of prefill's reply to decode unread. They are self-contained: their ticket
identifies where the request was computed, and by which process. In that of the MooncakeConnector, the router gives
decode a `transfer_id` of its own, and the id of prefill's engine, for which it asked when it started
(`kvflow.engines.vllm.bootstrap`).

The NixlConnector's dialect also goes the other way: decode answers with a ticket for what it has computed, and the
router passes that answer to prefill with the next turn of the conversation.
"""

import hashlib
import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvflow import Endpoint, KvflowError, Trust, ticket_for_room

__all__ = [
    "DIGEST_LENGTH",
    "MAX_TOKENS",
    "NOTHING_KEPT",
    "OF_TURN",
    "REST",
    "WITHDRAWN",
    "Reference",
    "add_trace_context",
    "digest_of",
    "has_ticket",
    "is_for_decode",
    "is_for_turns",
    "is_one_of_several",
    "is_question",
    "kept_room",
    "moved_room",
    "own_part",
    "reply",
    "room_of",
    "take_prefix",
    "take_reference",
    "transfer_room",
    "withdrawn_room",
]

MAX_NAME_BYTES: Final = 200
"""Request ids come from clients and routers. An id that is longer, or is not valid text, is hashed."""

TICKET: Final = "kvflow_ticket"
PROMPT: Final = "kvflow_prompt"
TRANSFER: Final = "transfer_id"
ENGINE: Final = "remote_engine_id"
NUM_TOKENS: Final = "remote_num_tokens"
WITHDRAWN: Final = "kvflow_withdrawn"
"""Key of a request to prefill which says that nobody will ask for the room of this `transfer_id`."""

MOVED: Final = "kvflow_moved"
"""Key of a request to decode which says that the request with this `transfer_id` goes on elsewhere."""

KEPT: Final = "kvflow_kept"
"""Key of a request to decode which asks for the parameters of the turn that ended with this `transfer_id`."""

MAX_TOKENS: Final = "kvflow_max_tokens"
"""Key of the answer to it: how many tokens the other request would have had here."""

REST: Final = "kvflow_rest"
"""Key of a moved request: tokens that were computed with it, but that its router has not told to the client."""

NO_BLOCKS: Final = ((0,),)
"""For decode servers with vLLM's NixlConnector. With an empty list, their engines end in an assertion; with one that is
not empty, they ask our port in their own protocol, hear nothing, and fail the request."""

NOTHING_KEPT: Final = {"do_remote_prefill": False, "do_remote_decode": False}
"""Parameters of a reply after which decode computes the request itself."""

OF_TURN: Final = {"do_remote_prefill": False, "do_remote_decode": True, "remote_block_ids": ()}
"""What a router passes to prefill with the next turn; with an empty list, vLLM's NixlConnector computes all of it."""

DIGEST_LENGTH: Final = 32
"""Length of `digest_of` a prompt."""

CHILD: Final = re.compile(r"\d+_(.+)", re.DOTALL)
"""vLLM's id of one of `n` answers to a prompt. The group is the id of the prompt."""

LATER_PROMPT: Final = re.compile(r"cmpl-.*-[1-9]\d*-[0-9a-f]{8}", re.DOTALL)
"""vLLM's id of a prompt of a batch other than the first; its reply contains the ticket of the first alone."""


class Reference(NamedTuple):
    """What decode gets to find a request.

    Attributes:
        prefill: The ticket of its room, or the address of prefill.
        room: Its room; None if the ticket contains it.
        prompt: `digest_of` the prompt that prefill has computed; None if the dialect does not transmit it.
        priority: kvflow's priority class of the request.
        num_tokens: How many tokens it covers; None if that is not known.
    """

    prefill: Mapping[str, object] | Endpoint
    room: str | None
    prompt: str | None
    priority: int = 0
    num_tokens: int | None = None

    @property
    def key(self) -> str:
        """Equal for two requests that take over the same one."""
        return repr((self.prefill, self.room))


def digest_of(request: Any, tokens: Sequence[int] | None = None) -> str:
    """Return a digest of what a request's cache is computed from, so that nobody takes over another cache.

    That is its tokens, by default those of the prompt, and whatever else makes vLLM distinguish equal tokens.
    """
    lora = getattr(request, "lora_request", None)
    features = getattr(request, "mm_features", None) or ()
    if tokens is None:
        tokens = request.prompt_token_ids
    else:
        features = [one for one in features if one.mm_position.offset < len(tokens)]
    rest = [lora.lora_name if lora is not None else "", *(str(one.identifier) for one in features)]
    digest = hashlib.blake2b(array("q", tokens).tobytes(), digest_size=DIGEST_LENGTH // 2)
    digest.update("\0".join(rest).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def is_for_decode(params: Mapping[str, Any] | None) -> bool:
    """Return whether prefill must keep a request for another server."""
    return bool(params and params.get("do_remote_decode"))


def is_for_turns(params: Mapping[str, Any] | None) -> bool:
    """Return whether a router may pass on what decode answers to a request."""
    return bool(params) and not is_for_decode(params) and WITHDRAWN not in (params or ()) and not is_question(params)


def room_of(params: Mapping[str, Any], request_id: str) -> str:
    """Return the room of a request on prefill: the router's id if it sent one, else vLLM's id of its prompt."""
    return _as_room(str(params.get(TRANSFER) or _prompt_id(request_id)))


def has_ticket(request_id: str) -> bool:
    """Return whether vLLM passes the ticket of a request to the router."""
    return LATER_PROMPT.fullmatch(_prompt_id(request_id)) is None


def is_one_of_several(request_id: str) -> bool:
    """Return whether a request is one of `n` answers to a prompt."""
    return CHILD.fullmatch(request_id) is not None


def withdrawn_room(params: Mapping[str, Any] | None) -> str | None:
    """Return the room for which nobody will ask, if the router says so with this request."""
    return _room_in(params, WITHDRAWN)


def is_question(params: Mapping[str, Any] | None) -> bool:
    """Return whether a request is only made for the parameters of its answer."""
    return moved_room(params) is not None or kept_room(params) is not None


def kept_room(params: Mapping[str, Any] | None) -> str | None:
    """Return the room whose turn a router wants to pass on, if it says so with this request."""
    return _room_in(params, KEPT)


def moved_room(params: Mapping[str, Any] | None) -> str | None:
    """Return the room of the request that goes on elsewhere, if the router says so with this request."""
    return _room_in(params, MOVED)


def transfer_room(params: Mapping[str, Any] | None) -> str | None:
    """Return the room by which a router knows a request; None if it has not named it."""
    return _room_in(params, TRANSFER)


def _room_in(params: Mapping[str, Any] | None, key: str) -> str | None:
    transfer = (params or {}).get(key)
    return None if transfer is None else _as_room(str(transfer))


def _prompt_id(request_id: str) -> str:
    child = CHILD.fullmatch(request_id)
    return request_id if child is None else child[1]


def _as_room(name: str) -> str:
    encoded = name.encode("utf-8", "surrogatepass")
    try:
        encoded.decode()
    except UnicodeDecodeError:  # lone surrogates, which JSON may contain
        pass
    else:
        if len(encoded) <= MAX_NAME_BYTES:
            return name
    return hashlib.blake2b(encoded, digest_size=32).hexdigest()


def take_reference(params: Mapping[str, Any] | None) -> Reference | None:
    """Return the reference to what decode must receive; None if nothing was computed elsewhere.

    Raises:
        KvflowError: Prefill does not use kvflow, or the router's parameters are incomplete.
    """
    if not params or not params.get("do_remote_prefill"):
        return None
    if TICKET not in params and TRANSFER in params:
        return Reference(Endpoint.parse(str(params.get(ENGINE))), _as_room(str(params[TRANSFER])), None)
    return _ticket_in(params)


def take_prefix(params: Mapping[str, Any]) -> Reference | None:
    """Return the reference to the turn before, which a prefill server may receive; None if there is none.

    Raises:
        KvflowError: The parameters are incomplete.
    """
    if TICKET not in params:
        return None
    reference = _ticket_in(params)
    if reference.num_tokens is None:
        found = params.get(NUM_TOKENS)
        raise KvflowError("number of tokens is missing or unusable", parameter=NUM_TOKENS, found=found)
    return reference


def _ticket_in(params: Mapping[str, Any]) -> Reference:
    ticket, prompt, num_tokens = params.get(TICKET), params.get(PROMPT), params.get(NUM_TOKENS)
    if not isinstance(ticket, Mapping) or not isinstance(prompt, str):
        raise KvflowError("request was not prefilled by a server with kvflow", found=sorted(map(str, params)))
    is_usable = isinstance(num_tokens, int) and num_tokens > 0
    return Reference(ticket, None, prompt, num_tokens=num_tokens if is_usable else None)


def reply(
    ticket: Mapping[str, object],
    room: str,
    *,
    request_id: str,
    num_tokens: int,
    prompt: str,
    trust: Trust | None = None,
) -> dict[str, Any]:
    """Return the parameters for a router to pass to decode, with a ticket for the room made from any of this server."""
    own = ticket_for_room(ticket, room, trust)
    endpoint = Endpoint.parse(str(own["address"]))
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": own["instance"],
        "remote_request_id": request_id,
        "remote_block_ids": NO_BLOCKS,
        "remote_host": endpoint.host,
        "remote_port": endpoint.port,
        NUM_TOKENS: num_tokens,
        TICKET: own,
        PROMPT: prompt,
    }


def own_part(params: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the parameters from `reply` that no other connector answers with; None if there are none."""
    return {key: params[key] for key in (TICKET, PROMPT) if params and key in params} or None


def add_trace_context(params: Mapping[str, Any] | None, headers: Mapping[str, str] | None) -> None:
    """Add the W3C trace context of a request, if it has one, to the ticket in the parameters from `reply`."""
    traceparent = (headers or {}).get("traceparent")
    if traceparent and params is not None and TICKET in params:
        params[TICKET]["traceparent"] = traceparent
