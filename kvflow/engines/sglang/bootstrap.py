"""What SGLang's bootstrap server says about the transport, so that the two sides never wait for each other in vain.

SGLang's rows name no transfer backend. Prefill ranks of kvflow therefore name kvflow's transport in the field
`kv_layout`, which SGLang stores and passes on unread for all models that kvflow serves. Decode ranks of kvflow say in a
header that they are, and the server refuses all others when they ask for the address of a rank.
"""

from typing import Any, Final

from aiohttp import web
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

__all__ = ["HEADER", "KvflowKVBootstrapServer", "name_of_transport", "transport_named_in"]

HEADER: Final = "X-Kvflow-Transport"
MARK: Final = "kvflow.transport="


def name_of_transport(backend: str) -> str:
    """Return the row's name of a transport of kvflow."""
    return MARK + backend


def transport_named_in(row: str | None) -> str | None:
    """Return the transport of kvflow that a row names; None if the ranks use a backend of SGLang's own."""
    return row.removeprefix(MARK) if row is not None and row.startswith(MARK) else None


class KvflowKVBootstrapServer(CommonKVBootstrapServer):
    """SGLang's bootstrap server, which tells a decode rank with another transfer backend why they do not fit."""

    async def _handle_route_get(self, request: web.Request) -> Any:
        is_for_server = request.query.get("target_tp_rank") == "-1"
        if is_for_server or HEADER in request.headers:
            return await super()._handle_route_get(request)
        text = (
            f"this prefill server uses {self.kv_layout} (--disaggregation-transfer-backend kvflow), and the decode "
            "server another transfer backend; start both with the same one"
        )
        return web.Response(text=text, status=409)
