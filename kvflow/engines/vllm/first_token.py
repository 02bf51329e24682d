"""The token that prefill samples, which travels with the handover, so that decode begins with the second one. Pure.

vLLM can begin with it only if its connectors have `take_first_tokens`, which no release has yet; see docs/vllm.md.
"""

import hashlib
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import msgspec

from kvflow.engines.containment import contained
from kvflow.engines.logs import adapter_logger
from kvflow.engines.vllm.dialect import DIGEST_LENGTH

__all__ = ["FirstTokens", "SampledToken", "split_metadata"]

LOGGER: Final = adapter_logger("vllm.kvflow")

MAX_BYTES: Final = 32_768
"""A token with so many logprobs that they are longer does not travel; decode computes it."""

IRRELEVANT: Final = frozenset({
    "n", "max_tokens", "min_tokens", "stop", "stream_interval", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind", "output_text_buffer_length",
    "flat_logprobs", "skip_clone", "extra_args",
})  # fmt: skip
"""Sampling parameters that do not change the first token; of `min_tokens`, it matters whether there are any.

Routers change some of them on the way to prefill.
"""

OF_ROUTERS: Final = frozenset({"kv_transfer_params", "ec_transfer_params"})


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """A sampled token.

    Attributes:
        token: The token.
        sampling: Digest of everything that decided which token was sampled.
        logprobs: Tokens, their logprobs, and the rank of the sampled one, which comes first. None if the request does
            not ask for them.
    """

    token: int
    sampling: str
    logprobs: tuple[list[int], list[float], int] | None = None


class FirstTokens:
    """Packs the tokens that a prefill server has sampled, and keeps those that a decode server has received.

    Args:
        settings: Settings of the server that change which token is sampled, or its logprobs.
        vocab_size: Number of tokens that the model knows.
    """

    def __init__(self, settings: str, vocab_size: int) -> None:
        self._settings = settings
        self._vocab_size = vocab_size
        self._received: dict[str, bytes] = {}

    def metadata(self, prompt: str, request: Any) -> bytes:
        """Return the metadata of a handover: the digest of its prompt, and the token that its request has sampled."""
        packed = b""
        with contained(partial(LOGGER.warning, "kvflow: %s leaves its first token to decode: %s", request.request_id)):
            packed = self._pack(request)
        return prompt.encode() + packed

    def _pack(self, request: Any) -> bytes:
        tokens, params = list(request.output_token_ids), request.sampling_params
        if len(tokens) != 1 or params is None:
            return b""
        logprobs = None
        if params.num_logprobs is not None:
            if (found := request.last_logprobs) is None:
                return b""
            stop = params.num_logprobs + 1 if params.num_logprobs >= 0 else None  # other requests may ask for more
            values = (found.logprob_token_ids[0][:stop].tolist(), found.logprobs[0][:stop].tolist())
            logprobs = (*values, int(found.sampled_token_ranks[0]))
        packed = msgspec.msgpack.encode(SampledToken(tokens[0], self._digest(params), logprobs))
        return packed if len(packed) <= MAX_BYTES else b""

    def keep(self, packed: Iterable[tuple[str, bytes]]) -> None:
        """Keep the tokens of requests that were received in this step, and drop those of earlier steps."""
        self._received = dict(packed)

    def take_token(self, request: Any) -> SampledToken | None:
        """Return the token of a request, once; None if there is none, or if this server may sample another one."""
        packed = self._received.pop(request.request_id, None)
        if packed is None or request.sampling_params is None or request.resumable:
            return None
        with contained(partial(LOGGER.warning, "kvflow: %s samples its first token: %s", request.request_id)):
            first = msgspec.msgpack.decode(packed, type=SampledToken)
            if 0 <= first.token < self._vocab_size and first.sampling == self._digest(request.sampling_params):
                return first
        return None

    def _digest(self, params: Any) -> str:
        values = {name: value for name, value in msgspec.structs.asdict(params).items() if name not in IRRELEVANT}
        values |= {name: value for name, value in (params.extra_args or {}).items() if name not in OF_ROUTERS}
        values = {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}
        text = repr((sorted(values.items()), params.min_tokens > 0, self._settings))
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def split_metadata(metadata: bytes) -> tuple[str, bytes]:
    """Split the metadata of a handover into the digest of its prompt, and the packed first token, if there is one."""
    return metadata[:DIGEST_LENGTH].decode("ascii", "replace"), metadata[DIGEST_LENGTH:]
