"""Servers with different transfer backends are told so, whichever of them is kvflow's."""

import pytest

from tests.engines.sglang.processes import Deployment, free_port

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(200)]


def open_both(pair: Deployment, prefill: str, decode: str) -> int:
    """Start both sides with these backends, and begin a request on prefill; return its room."""
    port, room = free_port(), pair.room()
    pair.prefill.tell("open", name="mha", port=port, backend=prefill)
    pair.decode.tell("open", name="mha", port=port, backend=decode)
    pair.prefill.tell("begin", room=room)
    return room


def test_decode_with_nixl_of_sglang(pair: Deployment) -> None:
    """SGLang's client gets SGLang's reason; decode's log says which transport prefill uses."""
    room = open_both(pair, "kvflow", "nixl")
    (line,) = pair.decode.tell("begin", room=room)
    assert "409" in line
    assert "kvflow.transport=nixl (--disaggregation-transfer-backend kvflow)" in line
    assert "decode server another transfer backend" in line
    assert "Could not fetch bootstrap info" in pair.decode.tell("failure", timeout_s=1)


def test_prefill_with_nixl_of_sglang(pair: Deployment) -> None:
    """Both sides fail the request at once."""
    room = open_both(pair, "nixl", "kvflow")
    pair.decode.tell("begin", room=room)
    reason = pair.decode.tell("failure", timeout_s=1)
    assert "backend of SGLang's own, such as nixl" in reason
    assert "this decode server kvflow.transport=nixl" in reason
    assert "decode-side abort" in pair.prefill.tell("failure")


@pytest.mark.parametrize("backend", ["kvflow", "nixl"])
def test_same_backend_on_both_sides(pair: Deployment, backend: str) -> None:
    room = open_both(pair, backend, backend)
    assert pair.decode.tell("begin", room=room) == []
    assert pair.decode.tell("failure", timeout_s=1) == ""
