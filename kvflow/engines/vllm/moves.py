"""Running requests that a router moves to another decode server: they stop at the next token, and are kept. Pure."""

from functools import partial
from typing import Any, Final

from kvflow.engines.containment import contained
from kvflow.engines.logs import adapter_logger
from kvflow.engines.vllm.answers import Answers
from kvflow.engines.vllm.dialect import MAX_TOKENS, digest_of, is_one_of_several, moved_room, transfer_room
from kvflow.engines.vllm.held import HeldBlocks

__all__ = ["MovingRequests"]

LOGGER: Final = adapter_logger("vllm.kvflow")

STATEFUL: Final = (
    *("stop", "bad_words", "presence_penalty", "frequency_penalty", "repetition_detection", "thinking_token_budget"),
    *("structured_outputs", "prompt_logprobs"),
)
"""Parameters of sampling that depend on which tokens are of the prompt and which of the answer, or keep a state."""


class MovingRequests:
    """Stops requests of which a router knows the `transfer_id`, and says what another server needs to go on.

    The order to stop one is itself a request. It works when it has been computed, because its answer leaves then: the
    other request never waits for it. If as many requests run as may, it works when it arrives, and makes its own place.

    Args:
        answers: Makes the parameters of answers.
        held: Knows vLLM's pool of blocks.
        is_enabled: What has been computed can be kept here.
        max_running: How many requests vLLM runs at the same time.
    """

    def __init__(self, answers: Answers, held: HeldBlocks, *, is_enabled: bool, max_running: int) -> None:
        self._answers = answers
        self._held = held
        self._is_enabled = is_enabled
        self._max_running = max_running
        self._by_room: dict[str, Any] = {}
        self._waiting: set[str] = set()
        self._running: set[str] = set()
        self._stopped: dict[str, str] = {}
        self._params: dict[str, dict[str, Any]] = {}

    def note(self, request: Any) -> None:
        """Note a request, or obey an order at once if there is no place for it and it is next."""
        if not self._is_enabled:
            return
        request_id, room = request.request_id, transfer_room(request.kv_transfer_params)
        if moved_room(request.kv_transfer_params) is None:
            self._waiting.add(request_id)
            if room is not None and not is_one_of_several(request_id):
                self._by_room[room] = request
        elif len(self._running) >= self._max_running and not self._waiting and self._held.pool.get_num_free_blocks():
            self._params[request_id] = self._stop(request)

    def note_running(self, request_id: str) -> None:
        """Note that a request has blocks."""
        self._waiting.discard(request_id)
        self._running.add(request_id)

    def stop(self, order: Any) -> dict[str, Any] | None:
        """Stop the request that an order names with its next token; return parameters for the server that goes on.

        None if the request has ended, or cannot move.
        """
        return self._params.pop(order.request_id, None) or self._stop(order) or None

    def _stop(self, order: Any) -> dict[str, Any]:
        room = moved_room(order.kv_transfer_params)
        request = self._by_room.get(room or "")
        if room is None or request is None:
            return {}
        params: dict[str, Any] | None = None
        with contained(partial(LOGGER.warning, "kvflow: %s does not move: %s", request.request_id)):
            if reasons := _reasons_to_stay(request, self._answers):
                LOGGER.info("kvflow: %s does not move: %s", request.request_id, ", ".join(reasons))
                return {}
            tokens = request.all_token_ids[:]  # the cache of the next token will not exist here
            params = self._answers.kept(
                room, request_id=request.request_id, num_tokens=len(tokens), prompt=digest_of(request, tokens)
            )
        if params is None:
            return {}
        found = {**params, MAX_TOKENS: request.max_tokens}
        request.max_tokens = request.num_output_tokens + 1
        self._stopped[request.request_id] = room
        return found

    def take_room(self, request: Any) -> str | None:
        """Forget a request that has ended; return its room if it was stopped to be moved."""
        request_id, room = request.request_id, transfer_room(request.kv_transfer_params)
        self._waiting.discard(request_id)
        self._running.discard(request_id)
        if room is not None and self._by_room.get(room) is request:
            del self._by_room[room]
        return self._stopped.pop(request_id, None)


def _reasons_to_stay(request: Any, answers: Answers) -> list[str]:
    """Return why a request would be answered otherwise elsewhere, or cannot be handed over."""
    sampling = request.sampling_params
    reasons = [name for name in STATEFUL if getattr(sampling, name)]
    others = {
        "seed": sampling.seed is not None and sampling.temperature > 0,
        "inputs other than text": bool(request.mm_features) or not request.prompt_token_ids,
        "it has not begun": request.num_output_tokens == 0,
        "it ends with the next token": request.num_output_tokens + 1 >= request.max_tokens,
        "its input is streamed": request.resumable,
        "another connector keeps requests": answers.is_shared or answers.ticket is None,
    }
    return reasons + [name for name, is_so in others.items() if is_so]
