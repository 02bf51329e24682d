"""Keys in files, and the lists that are made of them."""

import stat
from dataclasses import replace
from pathlib import Path

import pytest

import kvflow
from kvflow.cli.main import main
from kvflow.errors import ConfigError
from kvflow.keys import make_capability_key, make_keys
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
    with pytest.raises(ConfigError, match="others may read this secret") as caught:
        kvflow.load_trust(path)
    assert caught.value.values["path"] == str(path / name)


@pytest.mark.parametrize("name", ["peers", "registry"])
def test_a_list_that_others_may_write_is_refused(path: Path, name: str) -> None:
    (path / name).write_text("")
    (path / name).chmod(0o646)
    with pytest.raises(ConfigError, match="others may write this list"):
        kvflow.load_trust(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("peers", A),
        ("peers", f"{A[:-1]} decode"),
        ("peers", f"{A.upper()} decode"),
        ("peers", f"decode {A}"),
        ("registry", "no key"),
        ("secret.key", ""),
        ("secret.key", f"{A}\n{B}"),
        ("secret.key", "\udcff"),
        ("capability.key", "no key"),
    ],
)
def test_a_malformed_file_is_refused(path: Path, name: str, text: str) -> None:
    (path / name).write_bytes(text.encode(errors="surrogateescape"))
    (path / name).chmod(0o600)
    with pytest.raises(ConfigError):
        kvflow.load_trust(path)


def test_keys_are_not_overwritten(path: Path) -> None:
    before = kvflow.load_trust(path)
    with pytest.raises(ConfigError, match="cannot be written"):
        make_keys(path)
    assert kvflow.load_trust(path) == before


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`kvflow keys new` makes one"):
        kvflow.load_trust(tmp_path)
    with pytest.raises(ConfigError, match="missing"):
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
    assert main(["keys", "new", path, "--capability"]) == 0
    public = capsys.readouterr().out.strip()
    (tmp_path / "new" / "keys" / "peers").write_text(f"{A} decode\n")
    assert main(["keys", "show", path]) == 0
    assert capsys.readouterr().out == f"{public} (own)\n{A} decode\n"
    assert main(["keys", "new", path]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert len(kvflow.load_capability_key(path)) == 32
