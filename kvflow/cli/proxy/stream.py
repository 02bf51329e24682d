"""The stream of an answer that may go on at another server: what the client sees of each part. Pure."""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

__all__ = ["MovableStream", "is_movable", "split_events"]

CHAT: Final = "/v1/chat/completions"

MOVED: Final = {
    **{"stream": (b"true",), "tools": (b"[]",), "echo": (b"false",), "use_beam_search": (b"false",)},
    **{"include_reasoning": (b"true",), "n": (b"1",), "best_of": (b"1",), "prompt_embeds": (), "suffix": ()},
}
"""Fields of requests, with the only values other than null that a request may have to be moved."""

OF_PROMPT: Final = {
    *("prompt", "max_tokens", "min_tokens", "messages", "max_completion_tokens", "truncate_prompt_tokens", "echo"),
    *("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents"),
    *("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "include_reasoning", "response_format"),
    *("add_special_tokens", "mm_processor_kwargs", "media_io_kwargs", "return_prompt_text", "n", "best_of"),
}
"""Fields that have done their part when the first token is there, or that the next request has of its own."""

ONE_PROMPT: Final = re.compile(rb'\s*("|\[\s*\d)')
"""A text or tokens, but no batch of them."""


def is_movable(path: str, fields: Mapping[str, msgspec.Raw]) -> bool:
    """Return whether a request is for one stream of text, which another server could go on with."""
    values = {name: bytes(fields.get(name, b"null")) for name in (*MOVED, "logprobs")}
    if values["stream"] != b"true" or any(values[name] not in (b"null", *allowed) for name, allowed in MOVED.items()):
        return False
    if path == CHAT:
        return values["logprobs"] in (b"false", b"null")  # otherwise, they are of another form than in completions
    return ONE_PROMPT.match(memoryview(fields.get("prompt", b""))) is not None


def split_events(buffer: bytearray) -> list[bytes]:
    """Take the data of complete events out of a buffer."""
    *events, buffer[:] = buffer.split(b"\n\n")
    return [bytes(event).removeprefix(b"data: ") for event in events]


class MovableStream:
    """What a client has been told, and what another server needs to go on.

    Args:
        path: Path of the request.
        fields: Its encoded fields.

    Attributes:
        num_told: Tokens of the answer whose text the client has; those after them make no text yet.
        limit: How many tokens the answer may have; None until a server has said it.
        finish_reason: Why the current part has ended; None until it has.
    """

    def __init__(self, path: str, fields: Mapping[str, msgspec.Raw]) -> None:
        self._is_chat = path == CHAT
        self._fields = fields
        self._wants_ids = bytes(fields.get("return_token_ids", b"null")) == b"true"
        self._min_tokens = msgspec.json.decode(fields.get("min_tokens", b"null"), type=int | None, strict=False) or 0
        self._prompt: list[int] = []
        self._tokens: list[int] = []
        self._head: dict[str, Any] = {}
        self._pending: list[dict[str, Any]] = []
        self._num_before = 0
        self._offset_before = self._offset = self._offset_told = 0
        self._is_first_part = True
        self._is_text = True
        self._texts: list[str] = []
        self.num_told = 0
        self.limit: int | None = None
        self.finish_reason: str | None = None

    @property
    def text(self) -> str:
        """The text that the client has."""
        return "".join(self._texts)

    @property
    def can_move(self) -> bool:
        """Whether another server could go on: there is a token, and the answer has been nothing but text so far."""
        return self._is_text and self.num_told > 0 and bool(self._prompt) and self.finish_reason is None

    def note_limit(self, count: int) -> None:
        """Note how many tokens the server of the current part may answer with."""
        self.limit = self._num_before + count

    @property
    def is_complete(self) -> bool:
        """Whether the answer has ended by itself, or has as many tokens as it may have."""
        return self.finish_reason != "length" or self.limit is None or len(self._tokens) >= self.limit

    def next_part(self) -> tuple[dict[str, Any], list[int]]:
        """Begin the next part; return the fields of its request, and tokens that follow its prompt.

        These make no text yet. A server that begins in the middle of a character would answer with the text of the
        whole prompt. It is told of them nevertheless, because the ticket covers them.
        """
        told, rest = self._tokens[: self.num_told], self._tokens[self.num_told :]
        self._tokens = told
        self._pending.clear()
        self._num_before, self._offset_before = self.num_told, self._offset_told
        self._is_first_part, self.finish_reason = False, None
        dropped = OF_PROMPT | ({"logprobs", "top_logprobs"} if self._is_chat else set())
        fields: dict[str, Any] = {name: value for name, value in self._fields.items() if name not in dropped}
        fields |= {"prompt": [*self._prompt, *told], "max_tokens": (self.limit or 0) - self.num_told}
        fields |= {"min_tokens": max(0, self._min_tokens - self.num_told), "return_token_ids": True}
        return fields, rest

    def take_chunk(self, chunk: dict[str, Any]) -> list[dict[str, Any]]:
        """Note a chunk of the current server, which it changes; return the chunks that the client gets now."""
        choice = next(iter(chunk.get("choices") or ()), None)
        if self._is_first_part:
            self._head = self._head or {name: chunk.get(name) for name in ("id", "object", "created", "model")}
        else:
            chunk.update(self._head)
        chunk.pop("kv_transfer_params", None)  # for routers
        is_told = True
        if choice is not None:
            is_told = self._take_choice(chunk, choice)
        if (usage := chunk.get("usage")) is not None:
            usage["prompt_tokens"] = len(self._prompt)
            usage["completion_tokens"] += self._num_before
            usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
            if not self._is_first_part:
                usage.pop("prompt_tokens_details", None)  # how much of its own prompt the server had
        self._pending.append(chunk)
        if not is_told:
            return []
        told, self._pending = self._pending, []
        return told

    def _take_choice(self, chunk: dict[str, Any], choice: dict[str, Any]) -> bool:
        """Note the choice of a chunk; return whether the client is told of it, and of those before it."""
        delta = choice.get("delta") or {}
        text, tokens = choice.get("text") or delta.get("content") or "", choice.get("token_ids") or ()
        self._is_text &= delta.keys() <= {"role", "content"} and bool(tokens or not text)
        self._tokens += tokens
        self.finish_reason = choice.get("finish_reason")
        self._take_prompt(chunk)
        self._take_prompt(choice)
        self._take_logprobs(choice)
        if text:
            self._texts.append(text)
            self.num_told, self._offset_told = len(self._tokens), self._offset
        is_over = self.finish_reason is not None and self.is_complete
        if self.finish_reason is not None and not is_over:
            choice["finish_reason"] = None
        if not self._wants_ids and "token_ids" in choice:
            choice["token_ids"] = None
        if self._is_chat and not self._is_first_part:
            choice["delta"] = {"content": choice.pop("text")}
            del choice["prompt_token_ids"]
        if self._is_chat and not is_over:
            choice.pop("stop_reason", None)
        return bool(text) or is_over or not tokens

    def _take_prompt(self, holder: dict[str, Any]) -> None:
        if prompt := holder.get("prompt_token_ids"):
            self._prompt = self._prompt or prompt
            if not (self._wants_ids and self._is_first_part):
                holder["prompt_token_ids"] = None

    def _take_logprobs(self, choice: dict[str, Any]) -> None:
        logprobs = choice.get("logprobs")
        if logprobs and logprobs.get("text_offset"):
            logprobs["text_offset"] = [offset + self._offset_before for offset in logprobs["text_offset"]]
            self._offset = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
