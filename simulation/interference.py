"""Interference of a scenario with messages, writes and notices: holding, losing, repeating and releasing them."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from kvflow.backends.base import NoticeArrived
from kvflow.wire.codec import decode
from simulation.dataplane import SimulatedBackend, Write, cut
from simulation.loop import Process
from simulation.script import ScenarioError
from simulation.world import World

__all__ = ["Interference"]


class _Rule(NamedTuple):
    verb: str
    kind: str
    source: str
    target: str


class Interference:
    """Interferes with what processes of a world exchange.

    Args:
        world: The world.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._rules: list[_Rule] = []
        self._messages: list[Callable[[], None]] = []
        self._latest: dict[tuple[str, str, str], Callable[[], None]] = {}
        self._write_rules: list[tuple[str | None, str | None]] = []
        self._writes: list[Write] = []
        self._notice_rules: list[tuple[str, str]] = []
        self._notices: list[Callable[[], None]] = []
        world.plane.is_prompt = True
        world.network.hold = self._take_message
        world.plane.hold_write = self._take_write
        world.plane.hold_notice = self._take_notice

    def end(self) -> None:
        """Release everything, and hold nothing any more."""
        self.release_messages()
        self.release_notices()
        self.release_writes()

    def message(self, verb: str, kind: str, source: str, target: str) -> None:
        """Hold or drop messages of a kind from now on, or repeat the latest one.

        Raises:
            ScenarioError: There is none to repeat.
        """
        if verb != "repeat":
            self._rules.append(_Rule(verb, kind, source, target))
            return
        found = [
            deliver
            for (name, one, other), deliver in self._latest.items()
            if name == kind and is_meant(source, one) and is_meant(target, other)
        ]
        if not found:
            raise ScenarioError("no such message has been sent", kind=kind, source=source, target=target)
        for deliver in found:
            self._world.loop.call_in(0.0, deliver)

    def release_messages(self) -> None:
        """Deliver held messages in order, and stop holding and dropping messages."""
        self._rules.clear()
        held, self._messages = self._messages, []
        for deliver in held:
            self._world.loop.call_in(0.0, deliver)

    def hold_writes(self, source: str | None, target: str | None) -> None:
        """Stop some writes from landing any further bytes."""
        self._write_rules.append((source, target))

    def hold_no_more_writes(self) -> None:
        """Keep held writes, but hold no others."""
        self._write_rules.clear()

    def release_writes(self) -> None:
        """Release held writes, and hold no more."""
        self._write_rules.clear()
        held, self._writes = self._writes, []
        for write in held:
            self._world.loop.call_in(0.0, self._world.plane.step, write)

    def held_writes(self, verb: str) -> None:
        """Let held writes land in part, fail, be reported as in doubt, or linger: fail now and land later.

        Raises:
            ScenarioError: No write is held.
        """
        if not self._writes:
            raise ScenarioError("no write is being held")
        for write in list(self._writes):
            if verb == "are in doubt":
                self._world.plane.doubt(write)
                continue
            if verb == "linger":
                self._writes.remove(write)
                self._world.plane.linger(write)
                continue
            if verb == "fail":
                write.fails_at = 0
            else:
                write.pieces[:1] = cut(write.pieces[0], 0.5)
            self._writes.remove(write)
            rules, self._write_rules = self._write_rules, []
            self._world.plane.step(write)
            self._write_rules = rules

    def notices(self, verb: str, target: str) -> None:
        """Hold or drop in-band notices to some ranks from now on."""
        self._notice_rules.append((verb, target))

    def release_notices(self) -> None:
        """Deliver held notices, and stop holding and dropping notices."""
        self._notice_rules.clear()
        held, self._notices = self._notices, []
        for deliver in held:
            self._world.loop.call_in(0.0, deliver)

    def _take_message(self, source: Process, target: Process, payload: bytes, deliver: Callable[[], None]) -> bool:
        kind = type(decode(payload)).__name__
        self._latest[kind, source.name, target.name] = deliver
        for rule in self._rules:
            if rule.kind == kind and is_meant(rule.source, source.name) and is_meant(rule.target, target.name):
                if rule.verb == "hold":
                    self._messages.append(deliver)
                self._world.tell(f"  {kind} from {source} to {target} is {'held' if rule.verb == 'hold' else 'lost'}")
                return True
        return False

    def _take_write(self, write: Write) -> bool:
        target = write.peer.partition("@")[0]
        for source_rule, target_rule in self._write_rules:
            if is_meant(source_rule, write.sender.process.name) and is_meant(target_rule, target):
                self._writes.append(write)
                return True
        return False

    def _take_notice(self, write: Write, target: SimulatedBackend) -> bool:
        for verb, rule in self._notice_rules:
            if is_meant(rule, target.process.name):
                if verb == "hold":
                    notice = NoticeArrived(write.notice)
                    self._notices.append(functools.partial(target.process.call, target.deliver, notice))
                return True
        return False


def is_meant(rule: str | None, name: str) -> bool:
    """Return whether a rule applies to a process; a rule that names an instance applies to all of its ranks."""
    return rule is None or rule in (name, name.partition("/")[0])
