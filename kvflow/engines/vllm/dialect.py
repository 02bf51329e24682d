"""`kv_transfer_params`: what routers hand from prefill to decode. Pure.

Both dialects ask prefill first, with `do_remote_decode`. In that of vLLM's NixlConnector a router gives the
`kv_transfer_params` of prefill's reply to decode, unread. They are self-contained: the ticket in them says where the
request was computed, and by which process. In that of the MooncakeConnector a router gives decode a `transfer_id` that
it has made, and the id of prefill's engine, for which it has asked when it started (`kvflow.engines.vllm.bootstrap`).
"""

import hashlib
from array import array
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from kvflow import Endpoint, KvflowError, ticket_for_room

__all__ = ["Reference", "digest_of", "is_for_decode", "reply", "room_of", "take_reference"]

MAX_NAME_BYTES: Final = 200
"""Ids of requests come from clients and routers. A longer one, or one that is no text, is hashed."""

TICKET: Final = "kvflow_ticket"
PROMPT: Final = "kvflow_prompt"
TRANSFER: Final = "transfer_id"
ENGINE: Final = "remote_engine_id"


class Reference(NamedTuple):
    """What decode was told of a request.

    Attributes:
        prefill: The ticket of its room, or where prefill is.
        room: None if the ticket has it.
        prompt: `digest_of` the prompt that prefill has computed; None if the dialect does not say.
    """

    prefill: Mapping[str, object] | Endpoint
    room: str | None
    prompt: str | None

    @property
    def key(self) -> str:
        """The same for two requests that are to take over the same one."""
        return repr((self.prefill, self.room))


def digest_of(request: Any) -> str:
    """Return a name of what a request's cache is computed from, so that decode takes over no other one.

    Args:
        request: vLLM's `Request`: its tokens, and what else vLLM tells equal tokens apart by.
    """
    lora = getattr(request, "lora_request", None)
    features = getattr(request, "mm_features", None) or ()
    rest = [lora.lora_name if lora is not None else "", *(str(one.identifier) for one in features)]
    digest = hashlib.blake2b(array("q", request.prompt_token_ids).tobytes(), digest_size=16)
    digest.update("\0".join(rest).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def is_for_decode(params: Mapping[str, Any] | None) -> bool:
    """Return whether prefill is to keep a request for another server."""
    return bool(params and params.get("do_remote_decode"))


def room_of(params: Mapping[str, Any], request_id: str) -> str:
    """Name the room of a request on prefill: as the router says, or by vLLM's own id."""
    return _as_room(str(params.get(TRANSFER) or request_id))


def _as_room(name: str) -> str:
    encoded = name.encode("utf-8", "surrogatepass")
    try:
        encoded.decode()
    except UnicodeDecodeError:  # lone surrogates, which JSON may bring
        pass
    else:
        if len(encoded) <= MAX_NAME_BYTES:
            return name
    return hashlib.blake2b(encoded, digest_size=32).hexdigest()


def take_reference(params: Mapping[str, Any] | None) -> Reference | None:
    """Find out what decode is to receive; None if nothing was computed elsewhere.

    Raises:
        KvflowError: It was, but by a server without kvflow, or what the router gave is incomplete.
    """
    if not params or not params.get("do_remote_prefill"):
        return None
    if TICKET not in params and TRANSFER in params:
        return Reference(Endpoint.parse(str(params.get(ENGINE))), _as_room(str(params[TRANSFER])), None)
    ticket, prompt = params.get(TICKET), params.get(PROMPT)
    if not isinstance(ticket, Mapping) or not isinstance(prompt, str):
        raise KvflowError("request was not prefilled by a server with kvflow", found=sorted(map(str, params)))
    return Reference(ticket, None, prompt)


def reply(ticket: Mapping[str, object], room: str, *, request_id: str, num_tokens: int, prompt: str) -> dict[str, Any]:
    """Return what a router is to hand to decode.

    Args:
        ticket: Of any room of this server.
        room: Of the request.
        request_id: vLLM's id of it on prefill.
        num_tokens: Of its prompt, which was computed.
        prompt: `digest_of` it.

    Raises:
        KvflowError: The room is not valid, or the ticket is not.
    """
    own = ticket_for_room(ticket, room)
    endpoint = Endpoint.parse(str(own["address"]))
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": own["instance"],
        "remote_request_id": request_id,
        "remote_block_ids": [],
        "remote_host": endpoint.host,
        "remote_port": endpoint.port,
        "remote_num_tokens": num_tokens,
        TICKET: own,
        PROMPT: prompt,
    }
