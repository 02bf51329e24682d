"""A synchronous engine with two tensor-parallel prefill workers, one of whose requests is preempted.

Each worker has a rank with its own pool, which holds its share of the heads; the scheduler has one page table for all.
That gives three rules, which this file shows:

- Pages are free when *every* worker's sender has `memory` SAFE, or, after `quiesce`, `is_quiesced`.
- After a preemption each worker resumes at its own `resume_at`. The prompt is computed again from its first token,
  whose pages are gone, but each worker offers only what it has not sent. A `resume_at` of None means everything.
- If one sender fails, decode learns of it and tells the other workers; the scheduler need not wait for that, and aborts
  them itself.

In a real engine the workers are processes, and what `Worker` returns travels in the engine's own step results. Run it
with `python -m examples.tensor_parallel`; it needs numpy alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

import kvflow
import kvflow.blocking
from kvflow.blocking import BlockingSender, LoopThread, Memory, Outcome

HEADS, DIM, LAYERS = 4, 8, 2
PAGE, NUM_PAGES = 4, 16
DECODE_PAGE = 8

Pool = dict[str, list[NDArray[np.float32]]]


def new_pool(heads: int, page: int) -> Pool:
    """Return zeroed pages of keys and values."""
    shape = (NUM_PAGES, page, heads, DIM)
    return {name: [np.zeros(shape, np.float32) for _ in range(LAYERS)] for name in ("k", "v")}


def describe(pool: Pool, heads: tuple[int, int]) -> kvflow.KVLayout:
    """Return the layout of a pool that holds some of the heads."""
    return kvflow.layout_from_tensors(pool, axes="page token head dim", heads=heads, fingerprint="example")


def cell(room: int, token: int, head: int, layer: int) -> int:
    """Return what the model computes for a cell; it is different in every one."""
    return ((room * 1_000 + token) * HEADS + head) * LAYERS + layer


class Worker:
    """One tensor-parallel worker: a rank, a pool with its heads, and a sender for each request."""

    def __init__(self, engine_rank: int, num_ranks: int, registry: str | None, loop: LoopThread) -> None:
        self.heads = kvflow.head_range(HEADS, num_ranks, engine_rank)
        self.pool = new_pool(self.heads[1] - self.heads[0], PAGE)
        config = kvflow.PrefillConfig(
            instance="prefill-0",
            engine_rank=engine_rank,
            num_ranks=num_ranks,
            registry=registry,  # None for rank 0, which answers for the instance
            backend="memory",
        )
        self.rank = kvflow.blocking.PrefillRank(config, describe(self.pool, self.heads), loop=loop)
        self.senders: dict[int, BlockingSender] = {}

    def compute(self, room: int, tokens: tuple[int, int], pages: list[int]) -> None:
        """Run the model for some tokens of a prompt, whose first page is that of token 0."""
        for token in range(*tokens):
            for layer in range(LAYERS):
                for index, head in enumerate(range(*self.heads)):
                    for name in ("k", "v"):
                        self.pool[name][layer][pages[token // PAGE], token % PAGE, index] = cell(
                            room, token, head, layer
                        )

    def offer(self, room: int, tokens: tuple[int, int], pages: list[int], *, is_last: bool) -> None:
        """Send tokens, from this worker's own resume point on."""
        sender = self.senders[room]
        start = tokens[0]
        if sender.is_quiesced:  # preempted before
            if sender.resume_at is None:
                return
            start = max(start, sender.resume_at)
        if start < tokens[1]:
            sender.chunk((start, tokens[1]), {"kv": pages[start // PAGE : -(-tokens[1] // PAGE)]})
        if is_last:
            sender.finish((tokens[1], tokens[1]), {}, metadata=b"first token")


@dataclass
class Request:
    """A prompt; its pages are the same on every worker."""

    room: int
    num_tokens: int
    computed: int = 0
    pages: list[int] = field(default_factory=list)


class Scheduler:
    """Computes prompts chunk by chunk on all workers, and owns their page table."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self.free = list(range(NUM_PAGES))

    def start(self, request: Request) -> None:
        """Open the room on every worker."""
        for worker in self.workers:
            worker.senders[request.room] = worker.rank.send(request.room)

    def step(self, request: Request, num_tokens: int) -> None:
        """Compute and offer the next tokens."""
        stop = min(request.computed + num_tokens, request.num_tokens)
        while len(request.pages) * PAGE < stop:
            request.pages.append(self.free.pop())
        for worker in self.workers:
            worker.compute(request.room, (request.computed, stop), request.pages)
            worker.offer(request.room, (request.computed, stop), request.pages, is_last=stop == request.num_tokens)
        request.computed = stop

    def preempt(self, request: Request) -> None:
        """Take the pages back. The request is computed again, unless every worker has sent everything."""
        senders = [worker.senders[request.room] for worker in self.workers]
        for sender in senders:
            sender.quiesce()
        self.wait_for(lambda: all(sender.is_quiesced for sender in senders))
        self.free += request.pages  # `memory` is still HELD: the room is open, but nothing reads the pages
        request.pages = []
        has_sent_all = all(sender.resume_at is None for sender in senders)
        request.computed = request.num_tokens if has_sent_all else 0

    def finish(self, request: Request) -> Outcome:
        """Wait for every worker, and free the pages when no worker's are in use any more."""
        senders = [worker.senders.pop(request.room) for worker in self.workers]
        self.wait_for(lambda: all(sender.outcome is not Outcome.PENDING for sender in senders))
        outcome = next((one.outcome for one in senders if one.outcome is not Outcome.SUCCESS), Outcome.SUCCESS)
        if outcome is not Outcome.SUCCESS:
            for sender in senders:
                sender.abort()  # does nothing to those that have ended
        self.wait_for(lambda: all(sender.memory is Memory.SAFE for sender in senders))
        self.free += request.pages
        return outcome

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Run steps until a condition holds. An engine computes other requests meanwhile."""
        while not condition():
            for worker in self.workers:
                worker.rank.completed()


def main() -> None:
    """Hand three prompts over, the second of which is preempted, and compare every cell."""
    prompts = [Request(room=1, num_tokens=24), Request(room=2, num_tokens=30), Request(room=3, num_tokens=9)]
    target = new_pool(HEADS, DECODE_PAGE)
    free = list(range(NUM_PAGES))
    with LoopThread() as loop:
        first = Worker(0, 2, None, loop)
        with first.rank:
            second = Worker(1, 2, first.rank.endpoint, loop)
            of_decode = kvflow.DecodeConfig(instance="decode-0", backend="memory")
            decode = kvflow.blocking.DecodeRank(of_decode, describe(target, (0, HEADS)), loop=loop)
            with second.rank, decode:
                scheduler = Scheduler([first, second])
                for prompt in prompts:
                    pages = [free.pop() for _ in range(-(-prompt.num_tokens // DECODE_PAGE))]
                    scheduler.start(prompt)
                    ticket = first.rank.ticket(prompt.room)
                    receiver = decode.receive(prefill=ticket, tokens=(0, prompt.num_tokens), pages={"kv": pages})
                    if prompt.room == 2:
                        scheduler.step(prompt, 16)
                        scheduler.preempt(prompt)
                    while prompt.computed < prompt.num_tokens:
                        scheduler.step(prompt, 8)
                    outcome = scheduler.finish(prompt)
                    receiver.until_safe()
                    print(f"room {prompt.room}: {outcome.value}, {receiver.result().metadata!r}")
                    check_pages(target, prompt, pages)
    print(f"{len(scheduler.free)} of {NUM_PAGES} pages are free again")


def check_pages(target: Pool, prompt: Request, pages: list[int]) -> None:
    """Raise ValueError unless decode's pages hold what prefill has computed."""
    for token in range(prompt.num_tokens):
        for layer in range(LAYERS):
            for head in range(HEADS):
                found = target["k"][layer][pages[token // DECODE_PAGE], token % DECODE_PAGE, head]
                if not (found == cell(prompt.room, token, head, layer)).all():
                    raise ValueError(f"room {prompt.room}: token {token}, layer {layer}, head {head} is wrong")


if __name__ == "__main__":
    main()
