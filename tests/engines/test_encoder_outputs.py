"""The example of encoder outputs, with a small vision model."""

import contextlib
import functools
import multiprocessing
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import kvflow
from examples.encoder_outputs import (
    Answer,
    EncoderOutputs,
    ItemNotHeld,
    OutOfPages,
    ReceivedOutputs,
    describe_rows,
    new_rows,
)
from kvflow.cli.tasks import open_tasks
from kvflow.state.tables import PeerState
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

WIDTH, PAGE_ROWS, IMAGE_ROWS, IMAGE_TOKEN = 64, 12, 16, 127
FINGERPRINT = "clip"
BACKENDS = ["memory", "nixl", pytest.param("mooncake", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of torch would wait for each other on a busy machine."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@functools.cache
def vision_model() -> Any:
    """Return a model with random weights, whose encoder makes 16 rows of each 32 x 32 image."""
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=32,
                patch_size=8,
                projection_dim=32,
            ),
            text_config=LlamaConfig(
                vocab_size=128,
                hidden_size=WIDTH,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
            ),
            image_token_index=IMAGE_TOKEN,
        )
    ).eval()


def images(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def encode(pixels: torch.Tensor) -> torch.Tensor:
    """Return the rows of an item: what the encoder server computes."""
    return torch.cat(list(vision_model().get_image_features(pixel_values=pixels).pooler_output))


def prompt(num_rows: int) -> torch.Tensor:
    return torch.tensor([[1, 5, 9] + [IMAGE_TOKEN] * num_rows + [7, 11]])


@torch.inference_mode()
def generate(num_rows: int, **inputs: torch.Tensor) -> list[int]:
    """Return the text of a prompt with an image, as tokens."""
    mask = torch.ones_like(prompt(num_rows))
    made = vision_model().generate(attention_mask=mask, max_new_tokens=16, do_sample=False, pad_token_id=0, **inputs)
    return [int(token) for token in made[0, -16:]]


def generate_locally(pixels: torch.Tensor) -> list[int]:
    num_rows = IMAGE_ROWS * len(pixels)
    return generate(num_rows, input_ids=prompt(num_rows), pixel_values=pixels)


def generate_from(rows: torch.Tensor) -> list[int]:
    """Prefill with rows in place of the image's tokens, as a prefill server without an encoder does."""
    tokens = prompt(len(rows))
    embeddings = vision_model().get_input_embeddings()(tokens).detach()
    embeddings[tokens == IMAGE_TOKEN] = rows
    return generate(len(rows), inputs_embeds=embeddings)


@dataclass
class Servers:
    """An encoder server and prefill servers in one process.

    Attributes:
        outputs: What the encoder server holds.
        prefill: What each prefill server receives.
        asked: The hashes that the encoder server was asked for.
    """

    outputs: EncoderOutputs
    prefill: list[ReceivedOutputs]
    asked: list[str]


@asynccontextmanager
async def servers(
    backend: str = "memory", *, pages: int = 32, count: int = 1, **timeouts: float
) -> AsyncIterator[Servers]:
    async with AsyncExitStack() as stack:
        source = new_rows(pages, PAGE_ROWS, WIDTH)
        times = kvflow.Timeouts(**timeouts)
        encoder = kvflow.PrefillConfig(instance="encoder", backend=backend, timeouts=times)
        sending = await stack.enter_async_context(kvflow.PrefillRank(encoder, describe_rows(source, FINGERPRINT)))
        receiving = []
        for number in range(count):
            target = new_rows(pages, PAGE_ROWS, WIDTH)
            config = kvflow.DecodeConfig(instance=f"prefill {number}", backend=backend, timeouts=times)
            rank = kvflow.DecodeRank(config, describe_rows(target, FINGERPRINT))
            receiving.append((await stack.enter_async_context(rank), target))
        tasks = await stack.enter_async_context(open_tasks())
        outputs, asked = EncoderOutputs(sending, source, tasks), list[str]()

        async def ask(content_hash: str) -> Answer:
            asked.append(content_hash)
            return outputs.answer(content_hash)

        yield Servers(outputs, [ReceivedOutputs(rank, pool, tasks, ask) for rank, pool in receiving], asked)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_text_with_received_rows_is_that_of_one_server(backend: str) -> None:
    """Items have different numbers of rows, which fill the last page only in part."""
    items = {f"item {count}": images(count, seed=count) for count in (1, 2, 3)}
    encoded = {content_hash: encode(pixels) for content_hash, pixels in items.items()}
    received = {}
    async with servers(backend) as made:
        for content_hash, rows in encoded.items():
            made.outputs.put(content_hash, rows)
        for content_hash in items:
            received[content_hash] = await made.prefill[0].get(content_hash)
    texts = [generate_from(rows) for rows in received.values()]
    assert texts == [generate_locally(pixels) for pixels in items.values()]
    assert all(torch.equal(received[content_hash], rows) for content_hash, rows in encoded.items())
    wrong = [generate_from(rows.flip(0)) for rows in received.values()]  # the text depends on the rows
    assert not any(text == other for text, other in zip(texts, wrong, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
async def test_several_servers_and_requests_ask_at_once(backend: str) -> None:
    rows = encode(images(2, seed=5))
    async with servers(backend, count=3) as made:
        made.outputs.put("item", rows)
        found: list[torch.Tensor] = []

        async def get(server: ReceivedOutputs) -> None:
            found.append(await server.get("item"))

        async with anyio.create_task_group() as tasks:
            for server in made.prefill * 4:
                tasks.start_soon(get, server)
        assert len(found) == 12
        assert all(torch.equal(one, rows) for one in found)
        assert made.asked == ["item"] * 3  # requests of one server share a transfer


async def test_ranks_of_one_server_share_an_answer() -> None:
    rows = encode(images(2, seed=5))
    async with servers() as made, AsyncExitStack() as stack:
        made.outputs.put("item", rows)
        answer, ranks = made.outputs.answer("item"), list[ReceivedOutputs]()

        async def ask(content_hash: str) -> Answer:
            return answer

        for number in range(2):
            pool = new_rows(4, PAGE_ROWS, WIDTH)
            config = kvflow.DecodeConfig(instance="tp 2", engine_rank=number, num_ranks=2, backend="memory")
            rank = kvflow.DecodeRank(config, describe_rows(pool, FINGERPRINT))
            await stack.enter_async_context(rank)
            ranks.append(ReceivedOutputs(rank, pool, await stack.enter_async_context(open_tasks()), ask))
        found: list[torch.Tensor] = []

        async def get(server: ReceivedOutputs) -> None:
            found.append(await server.get("item"))

        async with anyio.create_task_group() as tasks:
            for one in ranks:
                tasks.start_soon(get, one)
        assert [torch.equal(one, rows) for one in found] == [True, True]


async def test_first_request_leaves_and_the_others_get_the_item() -> None:
    rows = encode(images(1, seed=5))
    async with servers() as made:
        made.outputs.put("item", rows)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.prefill[0].get, "item")
            await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        assert torch.equal(await made.prefill[0].get("item"), rows)


async def test_item_that_was_evicted() -> None:
    """A pool of 4 pages holds two items of 16 rows; the third replaces the one that was asked for least recently."""
    rows = encode(images(1, seed=5))
    async with servers(pages=4) as made:
        made.outputs.put("first", rows)
        made.outputs.put("second", rows + 1)
        assert torch.equal(await made.prefill[0].get("first"), rows)
        await until(lambda: not made.outputs._items["first"].num_rooms)
        made.outputs.put("third", rows + 2)
        with pytest.raises(ItemNotHeld, match="second"):
            await made.prefill[0].get("second")
        for content_hash, more in {"first": 0, "third": 2}.items():
            assert torch.equal(await made.prefill[0].get(content_hash), rows + more)
        with pytest.raises(OutOfPages):
            made.outputs.put("longer than the pool", torch.zeros(4 * PAGE_ROWS + 1, WIDTH))


def can_put(outputs: EncoderOutputs, rows: torch.Tensor) -> bool:
    with contextlib.suppress(OutOfPages):
        outputs.put("other", rows)
    return "other" in outputs


async def test_item_that_is_being_sent_is_not_evicted() -> None:
    """It may be once nobody has come for it."""
    rows = encode(images(1, seed=5))
    async with servers(pages=2, grant_s=0.3) as made:
        made.outputs.put("item", rows)
        made.outputs.answer("item")
        with pytest.raises(OutOfPages):
            made.outputs.put("other", rows)
        assert "item" in made.outputs
        await until(lambda: can_put(made.outputs, rows))
        assert "item" not in made.outputs


def answer_and_wait(parent: Connection) -> None:
    """Be an encoder server that answers, and does not get to sending."""

    async def serve() -> None:
        config = kvflow.PrefillConfig(instance="encoder", backend="nixl", timeouts=kvflow.Timeouts(lease_s=1.0))
        pool = new_rows(8, PAGE_ROWS, WIDTH)
        async with kvflow.PrefillRank(config, describe_rows(pool, FINGERPRINT)) as rank:
            parent.send((rank.ticket("room"), IMAGE_ROWS))
            await anyio.sleep_forever()

    anyio.run(serve)


@pytest.mark.slow
async def test_encoder_that_dies() -> None:
    """A request that waits for it fails with a reason, and its pages can be used again."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=answer_and_wait, args=(there,))
    process.start()
    answer = Answer(*await anyio.to_thread.run_sync(here.recv))
    pool = new_rows(2, PAGE_ROWS, WIDTH)
    config = kvflow.DecodeConfig(instance="prefill", backend="nixl", timeouts=kvflow.Timeouts(lease_s=1.0))

    async def ask(content_hash: str) -> Answer:
        return answer

    async with kvflow.DecodeRank(config, describe_rows(pool, FINGERPRINT)) as rank, open_tasks() as tasks:
        received = ReceivedOutputs(rank, pool, tasks, ask)

        async def get() -> None:
            with pytest.raises(kvflow.TransferFailed) as caught:
                await received.get("item")
            assert caught.value.reason is kvflow.FailureReason.PEER_LOST

        async with anyio.create_task_group() as waiting:
            waiting.start_soon(get)
            await until(lambda: received._rows.num_free == 0)
            await until(lambda: rank.statistics().peers_by_state.get(PeerState.CONNECTED))
            process.kill()
        await until(lambda: received._rows.num_free == 2)
    process.join()


@pytest.mark.parametrize(
    ("pool", "fingerprint", "error"),
    [
        (new_rows(4, PAGE_ROWS, WIDTH), "another model", kvflow.TicketError),
        (new_rows(4, PAGE_ROWS, WIDTH // 2), FINGERPRINT, kvflow.TransferFailed),
        (new_rows(1, PAGE_ROWS, WIDTH), FINGERPRINT, OutOfPages),
    ],
    ids=["another model", "another width", "no pages"],
)
async def test_server_that_cannot_receive(pool: torch.Tensor, fingerprint: str, error: type[Exception]) -> None:
    """The encoder server learns of it at once: its pages are free for the next item."""
    rows = encode(images(1, seed=5))
    async with servers(pages=2) as made:
        made.outputs.put("item", rows)
        config = kvflow.DecodeConfig(instance="other", backend="memory")
        async with kvflow.DecodeRank(config, describe_rows(pool, fingerprint)) as rank, open_tasks() as tasks:

            async def ask(content_hash: str) -> Answer:
                return made.outputs.answer(content_hash)

            received = ReceivedOutputs(rank, pool, tasks, ask)
            with pytest.raises(error):
                await received.get("item")
            await until(lambda: can_put(made.outputs, rows))
            assert received._rows.num_free == len(pool)
