"""Requests that others have computed, all of them or their beginning, and this server receives. Pure."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from kvflow.engines.containment import contained
from kvflow.engines.logs import adapter_logger
from kvflow.engines.priority import priority_class
from kvflow.engines.vllm.dialect import REST, Reference, digest_of, take_prefix, take_reference
from kvflow.engines.vllm.groups import Group
from kvflow.engines.vllm.metadata import GrantOrder, StepOrders, WorkerReport

__all__ = ["ReceivingRequests"]

LOGGER: Final = adapter_logger("vllm.kvflow")

PREFIX_S: Final = 5.0
"""How long a turn may take to be received; if its room or its server is gone, it is computed after that."""


class ReceivingRequests:
    """Announces requests, and decides into which blocks they are received. Arguments as in `ConnectorScheduler`.

    Args:
        orders: Orders of the next step.
        takes_last: The last token of a prompt is received as well, because the first token comes with it.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        orders: StepOrders,
        *,
        is_by_priority: bool,
        num_left_out: int,
        takes_last: bool,
        on_recomputed: Callable[[str, int], object],
    ) -> None:
        self._groups = groups
        self._orders = orders
        self._is_by_priority = is_by_priority
        self._takes_last = takes_last
        self._num_left_out = max(num_left_out, 0 if takes_last else 1)
        self._on_recomputed = on_recomputed
        self._announced: dict[str, int] = {}
        self._taken_over: dict[str, str] = {}
        self._granted: dict[str, int] = {}
        self._leaders: dict[str, str] = {}
        self._followers: dict[str, str] = {}
        self._prefixes: dict[str, int] = {}

    def recompute(self, reason: str, request: Any) -> None:
        """Count the tokens of a prompt that is computed here, although this server takes prompts over."""
        tokens = getattr(request, "prompt_token_ids", None)
        if tokens and not _is_only_to_be_told(request):
            self._on_recomputed(reason, len(tokens))

    def announce(self, request: Any) -> None:
        """Announce a request to prefill; compute it here if it cannot be taken over, or if this raises KvflowError."""
        request_id = request.request_id
        reference = take_reference(request.kv_transfer_params)
        if reference is None:
            self.recompute("not_kept" if request.kv_transfer_params else "no_ticket", request)
            return
        if not request.prompt_token_ids:
            LOGGER.warning("kvflow: %s is computed here: its prompt has no tokens", request_id)
            self._orders.refused.append(reference)
            return
        if self._is_beginning(request, reference, request.kv_transfer_params.get(REST) or ()):
            self._announce(request, reference)
            return
        prompt = digest_of(request)
        if reference.prompt not in (None, prompt) and not _is_only_to_be_told(request):
            LOGGER.warning("kvflow: %s is computed here: its ticket is of another prompt", request_id)
            self.recompute("another_prompt", request)
            return
        self._announce(request, reference._replace(prompt=prompt))

    def announce_prefix(self, request: Any) -> None:
        """Announce the turn before a request, with which its prompt must begin; errors as in `take_prefix`."""
        reference = take_prefix(request.kv_transfer_params)
        if reference is None or reference.num_tokens is None:
            return
        if self._is_beginning(request, reference):
            self._announce(request, reference)
        else:
            LOGGER.info(
                "kvflow: %s is computed here: it does not begin with the turn of its ticket", request.request_id
            )
            self._orders.refused.append(reference)

    def _is_beginning(self, request: Any, reference: Reference, rest: Sequence[int] = ()) -> bool:
        """Return whether a prompt and `rest`, its continuation elsewhere, begin with what a reference is of; note it.

        A reference to exactly the prompt is none to a beginning.
        """
        tokens, stop = [*(request.prompt_token_ids or ()), *rest], reference.num_tokens
        if stop is None or stop >= len(tokens) or reference.prompt != digest_of(request, tokens[:stop]):
            return False
        self._prefixes[request.request_id] = min(stop, len(tokens) - len(rest) - 1)
        return True

    def _announce(self, request: Any, reference: Reference) -> None:
        request_id = request.request_id
        if reference.key in self._leaders:
            self._followers[request_id] = reference.key
            return
        self._leaders[reference.key] = request_id
        self._taken_over[request_id] = reference.key
        self._announced[request_id] = self._prefixes.get(request_id, len(request.prompt_token_ids))
        priority = priority_class(request.priority) if self._is_by_priority else 0
        self._orders.announced[request_id] = reference._replace(priority=priority)

    def is_follower(self, request_id: str) -> bool:
        """Return whether a request waits for another one with the same reference (as with `n` > 1).

        It finds that one's blocks here later.
        """
        if self._followers.get(request_id) in self._leaders:
            return True
        self._followers.pop(request_id, None)
        return False

    def num_elsewhere(self, request: Any, num_computed: int) -> int:
        """Return how many tokens can be received beyond those already here."""
        if request.request_id in self._announced:
            with contained(partial(LOGGER.warning, "kvflow: %s is computed here: %s", request.request_id)):
                count = self._num_received(request) - num_computed
                return count if count > self._takes_last else 0  # the last one alone is computed sooner than received
        return 0

    def _num_received(self, request: Any) -> int:
        """Return how many tokens of a prompt are taken over: the last one only together with the first token."""
        stop = self._prefixes.get(request.request_id)
        return max(len(request.prompt_token_ids) - self._num_left_out, 0) if stop is None else stop

    def allocate(self, request: Any, blocks: Sequence[Sequence[int]], num_elsewhere: int) -> None:
        """Order workers to receive into blocks, or to decline if vLLM wants nothing of what was computed elsewhere.

        Windows must reach back from the first token that is not received.
        """
        request_id = request.request_id
        if request_id not in self._announced:
            return
        del self._announced[request_id]
        if not num_elsewhere:
            self._is_here(request_id)
            self._orders.declined.append(request_id)
            return
        self._granted[request_id] = num_elsewhere
        # Without blocks, workers refuse it: vLLM waits until it is told that the request was not received.
        self._orders.granted[request_id] = GrantOrder(0, num_elsewhere, ())
        with contained(partial(LOGGER.warning, "kvflow: %s has no usable blocks: %s", request_id)):
            stop = self._num_received(request)
            start = stop - num_elsewhere
            timeout_s = PREFIX_S if request_id in self._prefixes else None
            wanted = [
                group.blocks_of(table, max(start, group.first_seen(stop)), stop)
                for group, table in zip(self._groups, blocks, strict=True)
            ]
            self._orders.granted[request_id] = GrantOrder(start, stop, wanted, timeout_s)

    def finish(self, request_id: str, status: str) -> None:
        """Handle the end of a request in vLLM."""
        self._announced.pop(request_id, None)
        self._granted.pop(request_id, None)
        self._followers.pop(request_id, None)
        self._prefixes.pop(request_id, None)
        if request_id in self._taken_over:
            self._orders.given_up[request_id] = status
        self._is_here(request_id)

    def take_received(self, request_ids: Iterable[str]) -> None:
        """Handle requests that have their blocks, or have failed."""
        for request_id in request_ids:
            self._is_here(request_id)

    def _is_here(self, request_id: str) -> None:
        """Let requests continue that waited for this one to be received."""
        if (key := self._taken_over.pop(request_id, None)) is not None:
            del self._leaders[key]

    def take_report(self, report: WorkerReport) -> None:
        """Handle requests that failed, and those that prefill has given back."""
        for request_id, reason in report.failed:  # once for each worker
            if num_tokens := self._granted.pop(request_id, 0):
                self._on_recomputed(reason, num_tokens)
        for request_id in report.returned:
            if num_tokens := self._announced.pop(request_id, 0):
                LOGGER.warning("kvflow: %s is computed here: its blocks were needed for others", request_id)
                self._on_recomputed("given_back", num_tokens)
                self._is_here(request_id)
                self._orders.declined.append(request_id)


def _is_only_to_be_told(request: Any) -> bool:
    """Return whether vLLM has refused a request, and passes on a stand-in only so that prefill is told."""
    return bool(getattr(request, "abort_immediately", False))
