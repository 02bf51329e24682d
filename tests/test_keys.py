"""Key files, and the lists that they contain."""

import multiprocessing
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

import kvflow
from kvflow import keys
from kvflow.cli.main import main
from kvflow.errors import ConfigError
from kvflow.keys import add_peer, add_registry, make_capability_key, make_keys, make_ticket_key, renewed_trust
from kvflow.trust import Trust, TrustedKey

A, B, C = ("a" * 64, "b" * 64, "c" * 64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def test_what_is_made_can_be_read(path: Path) -> None:
    make_capability_key(path)
    (path / "peers").write_text(f"# who may ask\n\n{A} decode-0\n  {B}   any name of *  \n")
    (path / "registry").write_text(f"{C}\n")
    trust = kvflow.load_trust(path)
    assert trust.public == (path / "public.key").read_text().strip()
    assert trust.peers == (TrustedKey(A, "decode-0"), TrustedKey(B, "any name of *"))
    assert (trust.registry, trust.directory) == ((C,), str(path))
    assert trust.capability_keys == (kvflow.load_capability_key(path),)
    assert {stat.S_IMODE((path / name).stat().st_mode) for name in ("secret.key", "capability.key")} == {0o600}


@pytest.mark.parametrize("name", ["secret.key", "capability.key"])
def test_a_secret_that_others_may_read_is_refused(path: Path, name: str) -> None:
    make_capability_key(path)
    (path / name).chmod(0o640)
    kvflow.load_trust(path)
    (path / name).chmod(0o604)
    with pytest.raises(ConfigError, match="secret file is readable by other users") as caught:
        kvflow.load_trust(path)
    assert caught.value.values["path"] == str(path / name)


@pytest.mark.parametrize("name", ["peers", "registry"])
def test_a_list_that_others_may_write_is_refused(path: Path, name: str) -> None:
    (path / name).write_text("")
    (path / name).chmod(0o646)
    with pytest.raises(ConfigError, match="file is writable by other users"):
        kvflow.load_trust(path)
    (path / name).chmod(0o664)
    with pytest.raises(ConfigError, match="file is writable by other users"):
        kvflow.load_trust(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("peers", f"{A}\n"),
        ("peers", f"{A[:-1]} decode\n"),
        ("peers", f"{A.upper()} decode\n"),
        ("peers", f"decode {A}\n"),
        ("peers", f"{A} decode-0\v{B} decode-1\n"),
        ("peers", f"{A} decode-0\u2028{B} decode-1\n"),
        ("peers", f"{A} decode\0\n"),
        ("registry", "no key\n"),
        ("secret.key", "# nothing\n"),
        ("secret.key", f"{A}\n{B}\n"),
        ("secret.key", "\udcff\n"),
        ("capability.key", "no key\n"),
        ("capability.key", "# nothing\n"),
    ],
)
def test_a_malformed_file_is_refused(path: Path, name: str, text: str) -> None:
    (path / name).write_bytes(text.encode(errors="surrogateescape"))
    (path / name).chmod(0o600)
    with pytest.raises(ConfigError):
        kvflow.load_trust(path)


@pytest.mark.parametrize("name", ["secret.key", "peers", "registry", "capability.key"])
@pytest.mark.parametrize("end", [0, -1, -2])
def test_a_file_that_is_cut_short_is_refused(path: Path, name: str, end: int) -> None:
    """Without its last digit, "decode-12" names another instance."""
    make_capability_key(path)
    text = {"peers": f"{A} decode-1\n{B} decode-12\n", "registry": f"{A}\n"}
    whole = text.get(name) or (path / name).read_text()
    (path / name).write_text(whole)
    kvflow.load_trust(path)
    (path / name).write_text(whole[:end])
    with pytest.raises(ConfigError, match="it may be truncated"):
        kvflow.load_trust(path)


def test_a_secret_or_list_that_was_there_does_not_vanish_by_reading_it_again(path: Path) -> None:
    make_capability_key(path)
    (path / "peers").write_text(f"{A} decode\n")
    (path / "registry").write_text(f"{B}\n")
    before = kvflow.load_trust(path)
    for name, why in (
        ("capability.key", "turning capabilities off needs a restart"),
        ("peers", "list has become empty"),
        ("registry", "list has become empty"),
    ):
        held = (path / name).rename(path / "held")
        with pytest.raises(ConfigError, match=why):
            renewed_trust(before, None)
        held.rename(path / name)
    assert renewed_trust(before, None) == before
    with pytest.raises(ConfigError, match="turning capabilities off"):
        renewed_trust(before, replace(before, capability_keys=()))
    assert not renewed_trust(before, replace(before, peers=())).peers, "somebody has said so"


def test_a_pipe_is_refused_and_not_waited_for(path: Path) -> None:
    os.mkfifo(path / "peers", 0o600)
    with pytest.raises(ConfigError, match="regular file"):
        kvflow.load_trust(path)


def test_a_file_that_is_too_long_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "MAX_BYTES", 70)
    (path / "peers").write_text(f"{A} d\n" * 2)
    with pytest.raises(ConfigError, match="too long"):
        kvflow.load_trust(path)


def test_a_file_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "ROOT", os.geteuid())
    kvflow.load_trust(path)
    monkeypatch.setattr(keys, "ROOT", -1)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to another user") as caught:
        kvflow.load_trust(path)
    assert caught.value.values["path"] == str(path / "secret.key")


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_directory_that_others_may_write_is_refused(path: Path, mode: int) -> None:
    path.chmod(mode)
    with pytest.raises(ConfigError, match="directory is writable by other users"):
        kvflow.load_trust(path)


def test_a_mounted_secret_is_taken(path: Path, tmp_path: Path) -> None:
    """Kubernetes mounts links to links, in a sticky directory that all may write."""
    (path / "peers").write_text(f"{A} decode\n")
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    mounted.chmod(0o1777)
    (mounted / "..data").symlink_to(path)
    for name in ("secret.key", "peers"):
        (mounted / name).symlink_to(Path("..data", name))
    assert kvflow.load_trust(mounted).peers == (TrustedKey(A, "decode"),)
    path.chmod(0o777)
    with pytest.raises(ConfigError, match="directory is writable by other users"):
        kvflow.load_trust(mounted)


def test_keys_are_not_overwritten(path: Path) -> None:
    before = kvflow.load_trust(path)
    with pytest.raises(ConfigError, match="already exists"):
        make_keys(path)
    assert kvflow.load_trust(path) == before


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="key file does not exist"):
        kvflow.load_trust(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        kvflow.load_capability_key(tmp_path)


def test_names_of_keys() -> None:
    trust = Trust(A, B, (TrustedKey(A, "d"), TrustedKey(B, "d"), TrustedKey(C, "d"), TrustedKey(C, "e-*")), (B,))
    assert trust.principal(A) == trust.principal(B) != trust.principal(C) != trust.principal("d" * 64)
    assert trust.names_of(trust.principal(C)) == ("d", "e-*")
    assert trust.names_of(trust.principal("d" * 64)) == ()
    assert (trust.keys_of("d"), trust.keys_of("e-7"), trust.keys_of("e")) == ((A, B, C), (C,), ())
    registry, address = trust.for_registry(), trust.for_address("e-1")
    assert registry is not None
    assert address is not None
    assert (registry.servers, address.servers) == ((B,), (C, B))
    assert Trust.none().for_instance("d") is None
    assert trust.keeps(Trust(A, B, trust.peers[:1]))
    assert not Trust(A, B, trust.peers[:1]).keeps(trust)
    moved = replace(trust, peers=(TrustedKey(A, "e"), *trust.peers[1:]))
    assert not moved.keeps(trust), "key that is listed for another instance now"


def test_names_do_not_run_into_each_other() -> None:
    trust = Trust(A, B, (TrustedKey(A, "d\n1 e"), TrustedKey(B, "d"), TrustedKey(B, "e")))
    assert trust.principal(A) != trust.principal(B)


@pytest.mark.parametrize("make", [lambda: Trust(A), lambda: Trust("x", "y"), lambda: Trust(A, B, (), ("x",))])
def test_malformed_keys_are_refused(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "new" / "keys")
    assert main(["keys", "new", path]) == 0
    public = capsys.readouterr().out.strip()
    for _ in range(2):
        assert main(["keys", "trust", path, A, "decode"]) == 0
    assert main(["keys", "trust", path, B, "decode-*"]) == 0
    assert main(["keys", "trust", path, C, "--registry"]) == 0
    assert main(["keys", "show", path]) == 0
    assert capsys.readouterr().out == f"{public} (own)\n{A} decode\n{B} decode-*\n{C} (registry)\n"
    assert main(["keys", "new", path]) == 2
    assert "already exists" in capsys.readouterr().err
    for words in ([A], [A, "decode", "--registry"]):
        with pytest.raises(SystemExit):
            main(["keys", "trust", path, *words])


def test_a_key_for_capabilities_is_added_to_keys_that_are_there(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = kvflow.load_trust(path)
    assert main(["keys", "new", "--capability", str(path)]) == 0
    assert capsys.readouterr().out == ""
    assert kvflow.load_trust(path) == replace(before, capability_keys=(kvflow.load_capability_key(path),))
    assert main(["keys", "new", "--capability", str(path)]) == 2
    assert main(["keys", "new", "--capability", str(path / "router")]) == 0
    assert sorted(found.name for found in (path / "router").iterdir()) == ["capability.key"]


def test_a_list_is_replaced_as_a_whole_and_keeps_what_else_it_says(path: Path) -> None:
    mounted = path / "elsewhere"
    mounted.write_text(f"# decode\n{A} decode-0\n")
    mounted.chmod(0o640)
    (path / "peers").symlink_to("elsewhere")
    before = mounted.stat()
    add_peer(path, B, "decode-1")
    assert mounted.read_text() == f"# decode\n{A} decode-0\n{B} decode-1\n"
    assert mounted.stat().st_mode == before.st_mode
    assert mounted.stat().st_ino != before.st_ino
    assert (path / "peers").is_symlink()
    assert {found.name for found in path.iterdir()} == {".lock", "elsewhere", "peers", "public.key", "secret.key"}


@pytest.mark.parametrize(
    ("key", "instance"), [(A[1:], "d"), ("d", A), (A, ""), (A, " d"), (A, f"d\n{B} e"), (A, "d\0")]
)
def test_what_cannot_be_listed(path: Path, key: str, instance: str) -> None:
    with pytest.raises(ConfigError):
        add_peer(path, key, instance)
    assert not (path / "peers").exists()


def test_a_list_that_is_malformed_or_nowhere_gets_no_key(path: Path) -> None:
    (path / "peers").write_text(f"{A} decode-1")
    with pytest.raises(ConfigError, match="truncated"):
        add_peer(path, B, "decode-2")
    with pytest.raises(ConfigError, match="64 hexadecimal"):
        add_registry(path, "d")
    with pytest.raises(ConfigError, match="cannot be written"):
        add_registry(path / "mistyped", A)


@pytest.mark.parametrize("name", ["secret.key", "capability.key", "ticket.key"])
@pytest.mark.parametrize("spoilt", ["\ufeff{}", "{}\0", "{}\u200b", "{}x", "{} {}", "{}{}"])
def test_no_error_has_a_secret(path: Path, name: str, spoilt: str) -> None:
    make_capability_key(path)
    make_ticket_key(path)
    secret = (path / name).read_text().strip()
    (path / name).write_text(spoilt.format(secret, secret) + "\n")
    with pytest.raises(ConfigError) as caught:
        kvflow.load_trust(path)
    assert secret not in str(caught.value)


def _trust_ten(path: Path, number: int) -> None:
    for key in range(10 * number, 10 * number + 10):
        add_peer(path, f"{key:064x}", f"decode-{key}")


def test_concurrent_processes_lose_no_line(path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_trust_ten, args=(path, number)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len(kvflow.load_trust(path).peers) == 40


def test_a_directory_on_the_way_that_others_may_write_to_is_refused(path: Path) -> None:
    path.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="directory is writable by other users") as caught:
        kvflow.load_trust(path)
    assert caught.value.values["path"] == str(path.parent)
    path.parent.chmod(0o1777)
    kvflow.load_trust(path)
