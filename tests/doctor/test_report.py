"""A report holds what helps to find a cause, and no secret."""

import json
import tarfile
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

import kvflow
from kvflow import keys
from kvflow.cli.main import main
from kvflow.doctor.findings import DoctorOptions
from kvflow.doctor.report import without_secrets, write_report
from tests.support.instances import make_pool, prefill_config

BEARER = "Authorization: Bearer sk-0123456789abcdef"


def contents(path: Path) -> dict[str, bytes]:
    """Return the files of an archive by name."""
    found = {}
    with tarfile.open(path) as archive:
        for entry in archive:
            stream = archive.extractfile(entry)
            assert stream is not None
            found[entry.name.removeprefix("kvflow-report/")] = stream.read()
    return found


def make_private(path: Path) -> None:
    """Let no other user write to a directory, as that of keys requires."""
    path.chmod(0o700)


@pytest.mark.anyio
async def test_report_has_what_ranks_say_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, sockets, incidents = tmp_path / "keys", tmp_path / "s", tmp_path / "incidents"
    make_private(tmp_path)
    public = keys.make_keys(place)
    keys.make_capability_key(place)
    keys.make_ticket_key(place)
    keys.add_peer(place, public, "decode")
    capability = keys.make_capability(keys.load_capability_key(place), 7, prefill="prefill", decode="decode")
    secrets = [(place / name).read_text().strip() for name in ("secret.key", "capability.key", "ticket.key")]
    monkeypatch.setenv("KVFLOW_TEST_SECRET", secrets[0])
    monkeypatch.setenv("UCX_TLS", "all")
    incidents.mkdir()
    (incidents / "prefill-0001.kvflow").write_bytes(b"events")
    settings = prefill_config(
        None, trust=keys.load_trust(place), admin=str(sockets), record=tmp_path / "record", backend_options={}
    )
    async with kvflow.PrefillRank(settings, make_pool().layout) as rank:
        ticket = rank.ticket(7)
        log = tmp_path / "engine.log"
        log.write_text(f"{ticket}\ncapability={capability!r}\n{BEARER}\nkey {secrets[1]}\nreceive_failed room=7\n")
        options = DoctorOptions(keys=str(place), socket=sockets, timeout_s=30.0, probe_s=0.0)
        path = tmp_path / "report.tar.gz"
        names = await anyio.to_thread.run_sync(write_report, path, options, [log], incidents)
    assert path.stat().st_mode & 0o777 == 0o600
    found = contents(path)
    assert sorted(found) == sorted(names)
    assert {"doctor.json", "versions.json", "environment.json", "logs/0-engine.log"} <= found.keys()
    assert found["incidents/prefill-0001.kvflow"] == b"events"
    (status,) = [json.loads(data) for name, data in found.items() if name.endswith("-status.json")]
    assert status["instance"] == "prefill"
    assert status["statistics"]["rooms"] == 0
    assert status["settings"]["timeouts"]["lease_s"] == settings.timeouts.lease_s
    assert "trust" not in status["settings"]
    assert any(one["check"] == "key files" for one in json.loads(found["doctor.json"]))
    assert json.loads(found["environment.json"])["UCX_TLS"] == "all"
    assert b"receive_failed room=7" in found["logs/0-engine.log"]
    everything = b"\n".join(found.values()).decode()
    for secret in (*secrets, capability, str(ticket["signature"]), "sk-0123456789abcdef"):
        assert secret not in everything
    assert everything.count("[removed]") >= 5


def test_text_that_is_no_secret_stays() -> None:
    line = "receive_failed room=7 tokens=(0, 8) incarnation=0123456789abcdef detail='capability has expired'"
    assert without_secrets(line) == line


def test_command_writes_a_report_and_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kvflow-report.tar.gz"
    command = ["report", "--output", str(path), "--no-probe", "--socket", str(tmp_path), "--incidents", str(tmp_path)]
    assert main(command) == 0
    assert "look through it before you send it" in capsys.readouterr().out
    assert "doctor.json" in contents(path)
    before = path.read_bytes()
    assert main(command) == 2
    assert "report cannot be written" in capsys.readouterr().err
    assert path.read_bytes() == before
    path.unlink()
    assert main([*command, "--log", str(tmp_path / "none.log")]) == 2
    assert "none.log" in capsys.readouterr().err
    assert not path.exists()
