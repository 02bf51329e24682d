"""What the gate admits of what clients, routers and directories say."""

import pytest

from kvflow.config import DecodeConfig
from kvflow.control.curve import new_keys
from kvflow.errors import ConfigError
from kvflow.gate.identity import KeyGate, host_denial, ticket_denial
from kvflow.trust import Trust
from kvflow.wire.messages import PeerId, RankId
from kvflow.wire.ticket import Ticket
from tests.support.trusts import new_trust, trusting

TICKET = Ticket(7, "tcp://10.0.0.1:7000", PeerId(RankId("prefill-0", 0), 1), "model")
KEY, STRANGERS_KEY = b"k" * 32, b"s" * 32

ALLOWED = ("10.2.0.0/16", "fd00::/8", "192.168.0.1", "*.prefill.svc", "Prefill-0")


@pytest.mark.parametrize(
    "host",
    ["10.2.3.4", "[fd00::1]", "192.168.0.1", "a.prefill.svc", "A.B.PREFILL.svc", "prefill-0", "10.2.3.4,[fd00::1]"],
)
def test_hosts_that_are_allowed(host: str) -> None:
    assert host_denial(f"tcp://{host}:1", ALLOWED) == ""


@pytest.mark.parametrize(
    "host",
    [
        "10.3.0.1",
        "[::ffff:10.2.3.4]",
        "192.168.0.2",
        "prefill.svc",
        "a.prefill.svc.evil",
        "10.2",
        "167903236",
        "10.3.0.1,a.prefill.svc",
        "a.prefill.svc,10.3.0.1",
    ],
)
def test_hosts_that_are_not_allowed(host: str) -> None:
    assert "is not in `allowed_hosts`" in host_denial(f"tcp://{host}:1", ALLOWED)
    assert host_denial(f"tcp://{host}:1", ()) == "", "by default, any host is"


@pytest.mark.parametrize("rule", ["10.2.0.1/16", "10.2", "", "*", "*.", "a b", "10.0.0.0/33", 5, None])
def test_rules_that_would_match_nothing_are_refused(rule: object) -> None:
    with pytest.raises(ConfigError) as caught:
        DecodeConfig(instance="decode", allowed_hosts=(rule,))  # type: ignore[arg-type]
    assert caught.value.values["setting"] == "allowed_hosts"


@pytest.mark.parametrize("must_be_signed", [True, False])
def test_a_signature_is_checked_even_if_none_is_required(*, must_be_signed: bool) -> None:
    trust = Trust(ticket_keys=(KEY,))
    assert ticket_denial(TICKET.signed([KEY]), trust, must_be_signed=must_be_signed) == ""
    assert "not by a ticket key" in ticket_denial(TICKET.signed([STRANGERS_KEY]), trust, must_be_signed=must_be_signed)
    assert bool(ticket_denial(TICKET, trust, must_be_signed=must_be_signed)) is must_be_signed
    assert bool(ticket_denial(TICKET, Trust.none(), must_be_signed=must_be_signed)) is must_be_signed


def test_signed_tickets_are_required_where_keys_are_used_unless_the_setting_says_otherwise() -> None:
    keys = Trust(*new_keys())
    assert DecodeConfig(instance="decode", trust=keys).needs_signed_tickets
    assert not DecodeConfig(instance="decode", trust=keys, signed_tickets=False).needs_signed_tickets
    assert not DecodeConfig(instance="decode").needs_signed_tickets
    with pytest.raises(ConfigError, match="needs a ticket key"):
        DecodeConfig(instance="decode", signed_tickets=True)


def test_a_key_that_was_locked_out_may_connect_after_a_second() -> None:
    own, other, third = new_trust(), new_trust(), new_trust()
    gate = KeyGate(trusting(own, client=other))
    assert gate.denial(other.public, 0.0) == ""
    gate.lock_out(other.public, 5.0)
    assert "locked out" in gate.denial(other.public, 5.9)
    assert gate.denial(other.public, 6.0) == ""
    assert "not listed" in gate.denial(third.public, 0.0)
    assert gate.denial("", 0.0) == "handshake without a key"
