"""A vLLM plug-in that traces events, and changes servers for a measurement.

vLLM finds it by the entry point in `plugin_path`, and runs it in each of its processes. It traces calls of vLLM's own
interfaces, and so works alike with each connector.
"""

import functools
import importlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

__all__ = ["Probe", "activate"]

VARIABLE: Final = "KVFLOW_VLLM_PROBE"
ROOT: Final = Path(__file__).parents[2]
PROGRESS_DELAY_US: Final = 1000


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the plug-in in a server.

    Attributes:
        trace: File for the trace, one JSON object a line; no trace if empty.
        has_agents: Trace also which agents of other processes NIXL is told of, and told to forget.
        wrong_page: While this file exists, kvflow's senders replace the last page of each chunk by another one; only in
            the component that the file names, if it names one.
        lost_drafts: While this file exists, the caches of a draft model are empty once decode has received a request.
        eases_nixl: Create the conditions that NixlConnector needs on few CPUs: NIXL's progress thread naps 1 ms instead
            of busy-waiting, and a worker does not move to the last CPU.
        sleeps: vLLM's processes never spin while they wait for each other, as with kvflow's connector while requests
            move.
    """

    trace: str = ""
    has_agents: bool = False
    wrong_page: str = ""
    lost_drafts: str = ""
    eases_nixl: bool = False
    sleeps: bool = False

    def environment(self) -> dict[str, str]:
        """Return the environment variables that make a server load this plug-in."""
        paths = [str(ROOT), str(Path(__file__).with_name("plugin_path")), os.environ.get("PYTHONPATH", "")]
        return {
            VARIABLE: msgspec.json.encode(self).decode(),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }


@functools.cache
def activate() -> None:
    """Apply the settings to this process."""
    probe = msgspec.json.decode(os.environ.get(VARIABLE, "{}"), type=Probe)
    if probe.eases_nixl:
        _ease_nixl()
    if probe.sleeps:
        importlib.import_module("kvflow.engines.vllm.waiting").sleep_while(lambda: True)
    if probe.wrong_page:
        _send_wrong_pages(Path(probe.wrong_page))
    if probe.lost_drafts:
        _lose_drafts(Path(probe.lost_drafts))
    if probe.trace:
        _note_what_happens(Path(probe.trace), has_agents=probe.has_agents)


def _ease_nixl() -> None:
    api: Any = importlib.import_module("nixl_cu12._api")
    config: Any = api.nixlBind.nixlAgentConfig
    delay: Any = config.pthrDelay
    patient = property(delay.__get__, lambda own, _us: delay.__set__(own, PROGRESS_DELAY_US))
    api.nixlBind.nixlAgentConfig = type("PatientConfig", (config,), {"pthrDelay": patient})
    vars(os)["sched_setaffinity"] = lambda _pid, _cpus: None


def _send_wrong_pages(switch: Path) -> None:
    from kvflow.blocking import BlockingSender  # noqa: PLC0415 - only in processes that change it

    def change(call: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(call)
        def changed(sender: BlockingSender, tokens: Any, pages: Mapping[str, Any], **options: Any) -> None:
            if switch.exists():
                only = switch.read_text()
                pages = {it: _with_a_wrong_one(has) if only in ("", it) else has for it, has in pages.items()}
            call(sender, tokens, pages, **options)

        return changed

    for name in ("chunk", "finish"):
        setattr(BlockingSender, name, change(getattr(BlockingSender, name)))


def _with_a_wrong_one(table: Any) -> Any:
    if table is None:
        return None
    *others, last = table.pages  # the next token depends on this page the most
    return table._replace(pages=[*others, max(0, last - 1)])


def _lose_drafts(switch: Path) -> None:
    def change(connector: Any) -> None:
        register, finished = connector.register_kv_caches, connector.get_transfer_results
        drafts: list[Any] = []

        def register_kv_caches(caches: Mapping[str, Any]) -> None:
            drafts.extend(cache for name, cache in caches.items() if name.startswith("draft_model."))
            register(caches)

        def get_transfer_results(ended: set[str]) -> Any:
            results = finished(ended)
            if results.finished_recving and switch.exists():
                for cache in drafts:
                    cache.zero_()
            return results

        connector.register_kv_caches, connector.get_transfer_results = register_kv_caches, get_transfer_results

    _change_connectors(change)


def _change_connectors(change: Callable[[Any], None]) -> None:
    factory: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    create = factory.create_connector

    def create_connector(*arguments: Any, **options: Any) -> Any:
        connector = create(*arguments, **options)
        change(connector)
        return connector

    factory.create_connector = create_connector


def _note_what_happens(path: Path, *, has_agents: bool) -> None:
    file = path.open("a", buffering=1)

    def note(event: str, requests: list[str], **values: Any) -> None:
        file.write(json.dumps({"at": time.monotonic(), "event": event, "requests": requests, "values": values}) + "\n")

    _note_steps(note)
    _change_connectors(functools.partial(_note_calls, note))
    _note_kvflow(note)
    if has_agents:
        _note_agents(note)


Note = Callable[..., None]


def _note_steps(note: Note) -> None:
    worker: Any = importlib.import_module("vllm.v1.worker.gpu_worker").Worker
    execute, sample = worker.execute_model, worker.sample_tokens
    computed: list[str] = []

    def execute_model(self: Any, scheduled: Any) -> Any:
        computed[:] = list(scheduled.num_scheduled_tokens)
        if computed:
            note("step_began", computed, tokens=scheduled.total_num_scheduled_tokens)
        output = execute(self, scheduled)
        if output is not None and computed:
            note("step_ended", computed)
        return output

    def sample_tokens(self: Any, grammar: Any) -> Any:
        output = sample(self, grammar)
        if computed:
            note("step_ended", computed)
        return output

    worker.execute_model, worker.sample_tokens = execute_model, sample_tokens


def _note_calls(note: Note, connector: Any) -> None:
    matched, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
    finished = connector.get_transfer_results

    def get_num_new_matched_tokens(request: Any, computed: int) -> Any:
        found = matched(request, computed)
        if found[0]:
            note("matched", [request.request_id], tokens=found[0])
        return found

    def update_state_after_alloc(request: Any, blocks: Any, tokens: int) -> None:
        allocated(request, blocks, tokens)
        if tokens:
            note("allocated", [request.request_id], tokens=tokens)

    def get_transfer_results(ended: set[str]) -> Any:
        results = finished(ended)
        if results.finished_sending:
            note("sent", sorted(results.finished_sending))
        if results.finished_recving:
            note("received", sorted(results.finished_recving))
        return results

    connector.get_num_new_matched_tokens = get_num_new_matched_tokens
    connector.update_state_after_alloc = update_state_after_alloc
    connector.get_transfer_results = get_transfer_results


def _note_kvflow(note: Note) -> None:
    from kvflow.blocking import BlockingReceiver  # noqa: PLC0415 - only in processes that change it

    grant, result = BlockingReceiver.grant, BlockingReceiver.result

    def noted_grant(receiver: Any, *arguments: Any, **options: Any) -> None:
        note("granted", [])
        grant(receiver, *arguments, **options)

    def noted_result(receiver: Any) -> Any:
        handover = result(receiver)
        note("brought", [], first_notice_s=handover.first_notice_s, elapsed_s=handover.elapsed_s)
        return handover

    changed: Any = BlockingReceiver
    changed.grant, changed.result = noted_grant, noted_result


def _note_agents(note: Note) -> None:
    """Note which agents NIXL knows; kvflow and NixlConnector use the same class, loaded here as kvflow does."""
    agent: Any = importlib.import_module("kvflow.backends.nixl.library").load().nixl_agent
    add, remove = agent.add_remote_agent, agent.remove_remote_agent

    def add_remote_agent(self: Any, metadata: bytes) -> Any:
        name = add(self, metadata)
        note("agent_added", [name.decode() if isinstance(name, bytes) else name])
        return name

    def remove_remote_agent(self: Any, name: Any) -> None:
        remove(self, name)
        note("agent_removed", [name.decode() if isinstance(name, bytes) else name])

    agent.add_remote_agent, agent.remove_remote_agent = add_remote_agent, remove_remote_agent
