"""Workers of engines examine themselves when they start, if they are told to."""

import logging
import threading

import pytest

from kvflow.doctor.findings import DoctorOptions, Finding, fail, ok, warn
from kvflow.engines import doctor
from kvflow.engines.doctor import start_doctor
from kvflow.engines.logs import adapter_logger
from kvflow.engines.settings import AdapterSettings
from kvflow.engines.sglang.settings import read_settings
from kvflow.engines.vllm.options import read_options

LOG = adapter_logger("kvflow-test-doctor")


def test_option_is_off_and_can_be_set() -> None:
    assert not read_options({}).doctor
    assert read_options({"doctor": True}).doctor
    assert not read_settings({}).doctor
    assert read_settings({"KVFLOW_SGLANG": '{"doctor": true}'}).doctor


def test_worker_logs_findings_and_does_not_wait_for_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOG.name)
    goes_on = threading.Event()
    seen: list[DoctorOptions] = []

    def slow_check(options: DoctorOptions) -> list[Finding]:
        seen.append(options)
        goes_on.wait()
        return [ok("well"), warn("few descriptors", "ulimit -n"), fail("no library", "pip install")]

    def broken_check(_: DoctorOptions) -> Finding:
        raise OSError("no /proc")

    monkeypatch.setattr(doctor, "CHECKS", (slow_check, broken_check))
    start_doctor(AdapterSettings(), LOG)
    start_doctor(AdapterSettings(doctor=True, admin="/run/here", keys="/keys"), LOG, {"plugin": "UCX"})
    (thread,) = [one for one in threading.enumerate() if one.name == "kvflow-doctor"]
    assert not caplog.records
    goes_on.set()
    thread.join()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "kvflow doctor: ok: slow check: well"),
        ("WARNING", "kvflow doctor: warn: slow check: few descriptors; fix: ulimit -n"),
        ("ERROR", "kvflow doctor: fail: slow check: no library; fix: pip install"),
        ("INFO", "kvflow doctor: unknown: broken check: the check has failed: OSError: no /proc"),
    ]
    assert (str(seen[0].socket), seen[0].keys, seen[0].backend_options) == ("/run/here", "/keys", {"plugin": "UCX"})


def test_worker_that_may_start_no_thread_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    start_doctor(AdapterSettings(doctor=True), LOG)
    assert caplog.messages == ["kvflow doctor: can't start new thread"]
