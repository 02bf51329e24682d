"""The metadata that prefill sends with the cache: the first token, as bytes."""

import msgspec

from kvflow import RemoteProtocolError

__all__ = ["FirstToken", "read_first_token"]


class FirstToken(msgspec.Struct, frozen=True):
    """The token that follows the prompt.

    Attributes:
        token: Token id.
        logprob: Log probability of the token, if the manager provides it.
    """

    token: int
    logprob: float | None = None

    def to_bytes(self) -> bytes:
        """Return the bytes that `read_first_token` parses."""
        return msgspec.json.encode(self)


def read_first_token(metadata: bytes, vocab_size: int) -> FirstToken:
    """Parse the metadata from a prefill server; RemoteProtocolError if it does not contain a token of this model."""
    try:
        first = msgspec.json.decode(metadata, type=FirstToken)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError("metadata is no first token", detail=str(error)) from error
    if not 0 <= first.token < vocab_size:
        raise RemoteProtocolError("first token is not in the vocabulary", token=first.token, vocab_size=vocab_size)
    return first
