"""`kv_transfer_params`: what routers hand from prefill to decode. Pure.

Both dialects ask prefill first, with `do_remote_decode`. In that of vLLM's NixlConnector a router gives the
`kv_transfer_params` of prefill's reply to decode, unread. They are self-contained: the ticket in them says where the
request was computed, and by which process. In that of the MooncakeConnector a router gives decode a `transfer_id` that
it has made, and the id of prefill's engine, for which it has asked when it started (`kvflow.engines.vllm.bootstrap`).
"""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvflow import Endpoint, KvflowError, ticket_for_room

__all__ = ["Reference", "digest_of", "is_for_decode", "reply", "room_of", "take_reference"]

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


def digest_of(prompt: Sequence[int]) -> str:
    """Name a prompt by its tokens, so that decode takes over no other one."""
    return hashlib.blake2b(array("q", prompt).tobytes(), digest_size=16).hexdigest()


def is_for_decode(params: Mapping[str, Any] | None) -> bool:
    """Say whether prefill is to keep a request for another server."""
    return bool(params and params.get("do_remote_decode"))


def room_of(params: Mapping[str, Any], request_id: str) -> str:
    """Name the room of a request on prefill: as the router says, or by vLLM's own id."""
    return str(params.get(TRANSFER) or request_id)


def take_reference(params: Mapping[str, Any] | None) -> Reference | None:
    """Find out what decode is to receive; None if nothing was computed elsewhere.

    Raises:
        KvflowError: It was, but by a server without kvflow, or what the router gave is incomplete.
    """
    if not params or not params.get("do_remote_prefill"):
        return None
    if TICKET not in params and TRANSFER in params:
        return Reference(Endpoint.parse(str(params.get(ENGINE))), str(params[TRANSFER]), None)
    ticket, prompt = params.get(TICKET), params.get(PROMPT)
    if not isinstance(ticket, Mapping) or not isinstance(prompt, str):
        raise KvflowError("request was not prefilled by a server with kvflow", found=sorted(map(str, params)))
    return Reference(ticket, None, prompt)


def reply(ticket: Mapping[str, object], room: str, *, request_id: str, prompt: Sequence[int]) -> dict[str, Any]:
    """Give what a router is to hand to decode.

    Args:
        ticket: Of any room of this server.
        room: Of the request.
        request_id: vLLM's id of it on prefill.
        prompt: Its tokens, which were computed.
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
        "remote_num_tokens": len(prompt),
        TICKET: own,
        PROMPT: digest_of(prompt),
    }
