"""Runs the checks of `kvflow doctor` in a worker, in the environment in which it runs."""

import logging
import threading
from pathlib import Path
from typing import Any, Final

from kvflow.doctor.checks import CHECKS
from kvflow.doctor.findings import DoctorOptions, Status, run_checks
from kvflow.engines.settings import AdapterSettings

__all__ = ["start_doctor"]

PROBE_S: Final = 30.0

LEVELS: Final[dict[Status, int]] = {
    "ok": logging.INFO,
    "unknown": logging.INFO,
    "warn": logging.WARNING,
    "fail": logging.ERROR,
}


def start_doctor(settings: AdapterSettings, log: logging.Logger, backend_options: dict[str, Any] | None = None) -> None:
    """Examine this host in a thread and log the findings, if the settings say so. Neither waits nor raises.

    The thread ends within a minute, and does not delay the end of the process. The probe transfer runs in processes of
    its own, which inherit user, cgroup, affinity and environment variables of this one.

    Args:
        settings: Settings of the adapter.
        log: Where findings go.
        backend_options: Options of the transport, if not those of the settings.
    """
    if not settings.doctor:
        return
    options = DoctorOptions(
        backend=settings.backend,
        backend_options=settings.backend_options if backend_options is None else backend_options,
        keys=settings.keys,
        socket=Path(settings.admin) if isinstance(settings.admin, str) else None,
        probe_s=PROBE_S,
    )

    def examine() -> None:
        for finding in run_checks(CHECKS, options):
            line = f"{finding.status}: {finding.check}: {finding.cause}"
            log.log(LEVELS[finding.status], "kvflow doctor: %s%s", line, f"; fix: {finding.fix}" if finding.fix else "")

    thread = threading.Thread(target=examine, name="kvflow-doctor", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        log.warning("kvflow doctor: %s", error)
