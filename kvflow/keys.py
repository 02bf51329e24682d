"""Key files: one directory per process, such as a mounted secret.

`secret.key` contains this process's secret key, and `public.key` the public key for others to list. `peers` has a line
"KEY INSTANCE" for each trusted public key, and `registry` a line "KEY" for each key of the registry. `capability.key`
contains the secrets that sign capabilities, one per line, and `ticket.key` those that sign tickets. Lines that begin
with "#" are comments.

Files may be read while they are being replaced, so files that may be incomplete are rejected: those that do not end
with a newline and, on a reload, lists that have become empty.
"""

import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvflow.checks import check_duration
from kvflow.config import check_trust
from kvflow.control.curve import new_keys, public_key_of
from kvflow.errors import ConfigError
from kvflow.gate.capability import sign
from kvflow.room import RoomId
from kvflow.trust import SECRET_BYTES, Trust, TrustedKey, is_key

__all__ = [
    "add_peer",
    "add_registry",
    "load_capability_key",
    "load_trust",
    "make_capability",
    "make_capability_key",
    "make_keys",
    "make_ticket_key",
    "renewed_trust",
]

SECRET: Final = "secret.key"  # noqa: S105 - a file name
PUBLIC: Final = "public.key"
PEERS: Final = "peers"
REGISTRY: Final = "registry"
CAPABILITY: Final = "capability.key"
TICKET: Final = "ticket.key"
LOCK: Final = ".lock"

MAX_BYTES: Final = 16 * 2**20
SECRET_MODE: Final = 0o600
LIST_MODE: Final = 0o644

ROOT: Final = 0


def load_trust(directory: str | os.PathLike[str]) -> Trust:
    """Read a process's keys and the keys that it trusts.

    Args:
        directory: A key directory, as created by `kvflow keys new`.

    Raises:
        ConfigError: A file is missing, malformed or cut short, others may read a secret, or others may write a file.
    """
    path = Path(directory)
    secrets_found = _lines(path / SECRET, is_secret=True)
    if len(secrets_found) != 1 or not is_key(secrets_found[0]):
        raise ConfigError("key file must contain one key of 64 hexadecimal digits", path=str(path / SECRET))
    return Trust(
        public=public_key_of(secrets_found[0]),
        secret=secrets_found[0],
        peers=tuple(_peer(path / PEERS, line) for line in _lines_if_any(path / PEERS) or ()),
        registry=tuple(_lines_if_any(path / REGISTRY) or ()),
        capability_keys=_shared_secrets(path / CAPABILITY, _lines_if_any(path / CAPABILITY, is_secret=True)),
        ticket_keys=_shared_secrets(path / TICKET, _lines_if_any(path / TICKET, is_secret=True)),
        directory=str(path),
    )


def renewed_trust(before: Trust, trust: Trust | None) -> Trust:
    """Return new keys, by default from the directory of the current ones, if they may replace these without a restart.

    Raises:
        ConfigError: The keys cannot be read, a list has become empty, or the change would switch between plain and
            encrypted transport, or turn capabilities or signatures of tickets off.
    """
    if trust is None:
        trust = _read_again(before)
    check_trust(trust)
    if trust.is_plain is not before.is_plain:
        raise ConfigError("switching between plain and encrypted transport needs a restart", setting="trust")
    if before.capability_keys and not trust.capability_keys:
        raise ConfigError("capability keys are gone; turning capabilities off needs a restart", setting="trust")
    if before.ticket_keys and not trust.ticket_keys:
        raise ConfigError("ticket keys are gone; turning signatures off needs a restart", setting="trust")
    return trust


def _read_again(before: Trust) -> Trust:
    """Read the directory of the current keys again, and refuse lists that have become empty.

    Such a list may be in the middle of being replaced; and without registry keys, any listed key would be accepted as
    the registry's.
    """
    if before.directory is None:
        raise ConfigError("there is no key directory to reload; pass `trust`", setting="trust")
    trust = load_trust(before.directory)
    for name, had, has in ((PEERS, before.peers, trust.peers), (REGISTRY, before.registry, trust.registry)):
        if had and not has:
            path = Path(before.directory, name)
            raise ConfigError("list has become empty; removing every key needs a restart", path=str(path))
    return trust


def make_keys(directory: str | os.PathLike[str]) -> str:
    """Create a key pair in a directory, which is created if necessary and must have none; return the public key."""
    path = Path(directory)
    public, secret = new_keys()
    _make(path / SECRET, f"{secret}\n", SECRET_MODE)
    _make(path / PUBLIC, f"{public}\n", LIST_MODE)
    return public


def make_capability_key(directory: str | os.PathLike[str]) -> None:
    """Create a capability key, shared by the router and all prefill ranks. The directory must have none."""
    _make(Path(directory) / CAPABILITY, f"{secrets.token_hex(SECRET_BYTES)}\n", SECRET_MODE)


def make_ticket_key(directory: str | os.PathLike[str]) -> None:
    """Create a ticket key, shared by all prefill and decode ranks of a deployment. The directory must have none."""
    _make(Path(directory) / TICKET, f"{secrets.token_hex(SECRET_BYTES)}\n", SECRET_MODE)


def add_peer(directory: str | os.PathLike[str], key: str, instance: str) -> None:
    """Add an instance's public key to `peers`; a trailing `*` of the name matches any suffix.

    The file is replaced atomically, so it may be read at any time.
    """
    peer = TrustedKey(key, instance)
    if instance != instance.strip():
        raise ConfigError("name of an instance must not begin or end with a space", instance=instance)
    _add_line(Path(directory) / PEERS, f"{peer.key} {peer.instance}")


def add_registry(directory: str | os.PathLike[str], key: str) -> None:
    """Add a public key of the registry to `registry`, in the same way as `add_peer`."""
    if not is_key(key):
        raise ConfigError("public key must be 64 hexadecimal digits", found=key)
    _add_line(Path(directory) / REGISTRY, key)


def _add_line(path: Path, line: str) -> None:
    """Append a line to a file, unless the file already has it."""
    with _locked(path):
        text = _text_if_any(path) or ""
        _check_line(path, text.count("\n") + 1, line)
        if line not in _lines_of(path, text):
            _replace(path, f"{text}{line}\n")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes from changing the files of a directory inside the block."""
    try:
        lock = os.open(path.resolve().with_name(LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, SECRET_MODE)
    except OSError as error:
        raise ConfigError("key file cannot be written", path=str(path), detail=str(error)) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def load_capability_key(directory: str | os.PathLike[str]) -> bytes:
    """Read the key for signing capabilities: the first one in `capability.key`.

    Raises:
        ConfigError: There is no key, or other users can read the file.
    """
    path = Path(directory) / CAPABILITY
    return _shared_secrets(path, _lines(path, is_secret=True))[0]


def make_capability(key: bytes, room: RoomId, *, prefill: str, decode: str, lifetime_s: float = 600.0) -> str:
    """Sign a capability: permission for a decode instance to receive a room, which its prefill instance can verify.

    Pass it to the decode rank with the request, or put it into the ticket as "capability".

    Args:
        key: From `load_capability_key`.
        room: The router's id of the request.
        prefill: Name of the instance that computes it.
        decode: Name of the instance that may receive it. A trailing `*` matches any suffix.
        lifetime_s: How long the room may be requested; a transfer that has started may take longer.

    Raises:
        ConfigError: An argument is invalid.
    """
    check_duration("lifetime_s", lifetime_s)
    expires_at = time.time() + lifetime_s  # noqa: TID251 - compared on another host
    return sign(key, room, prefill=prefill, decode=decode, expires_at=expires_at)


def _peer(path: Path, line: str) -> TrustedKey:
    key, _, instance = line.partition(" ")
    if not is_key(key) or not instance.strip():
        raise ConfigError('line must have the form "KEY INSTANCE"', path=str(path), line=line)
    return TrustedKey(key, instance.strip())


def _shared_secrets(path: Path, lines: Sequence[str] | None) -> tuple[bytes, ...]:
    """Parse the secrets of a file, which must have at least one; empty if there is no file."""
    if lines is None:
        return ()
    if not lines or not all(map(is_key, lines)):
        raise ConfigError("key file must contain keys of 64 hexadecimal digits", path=str(path))
    return tuple(bytes.fromhex(line) for line in lines)


def _lines(path: Path, *, is_secret: bool = False) -> list[str]:
    """Return the lines of a file that must exist, without comments and blank lines."""
    lines = _lines_if_any(path, is_secret=is_secret)
    if lines is None:
        raise ConfigError("key file does not exist; create it with `kvflow keys new DIRECTORY`", path=str(path))
    return lines


def _lines_if_any(path: Path, *, is_secret: bool = False) -> list[str] | None:
    """Return the lines of a file, without comments and blank lines; None if it does not exist."""
    text = _text_if_any(path, is_secret=is_secret)
    return None if text is None else _lines_of(path, text)


def _lines_of(path: Path, text: str) -> list[str]:
    """Return the lines of a text, without comments and blank lines."""
    lines = [
        (number, line)
        for number, line in enumerate((line.strip() for line in text.split("\n")), 1)
        if line and not line.startswith("#")
    ]
    for number, line in lines:
        _check_line(path, number, line)
    return [line for _, line in lines]


def _check_line(path: Path, number: int, line: str) -> None:
    """Reject characters that make a line look like a different one, or like two. The line may be a secret."""
    for character in line:
        if not character.isprintable():
            shown = f"U+{ord(character):04X}"
            raise ConfigError("character cannot be printed", path=str(path), line=number, character=shown)


def _text_if_any(path: Path, *, is_secret: bool = False) -> str | None:
    """Read a file after checking that no other user could have written or placed it; None if it does not exist."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            _check_file(path, os.fstat(file.fileno()), is_secret=is_secret)
            _check_place(path)
            text = file.read().decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("key file cannot be read", path=str(path), detail=str(error)) from error
    if not text.endswith("\n"):
        raise ConfigError("key file must end with a newline; it may be truncated", path=str(path))
    return text


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without blocking; opening a named pipe would otherwise wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _check_file(path: Path, status: os.stat_result, *, is_secret: bool) -> None:
    """Check that a path is a regular file that other users cannot write to, nor read if it is a secret."""
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError("key file is not a regular file", path=str(path))
    if status.st_size > MAX_BYTES:
        raise ConfigError("key file is too long", path=str(path), num_bytes=status.st_size, maximum=MAX_BYTES)
    if is_secret and mode & stat.S_IRWXO:
        raise ConfigError("secret file is readable by other users; run `chmod o= PATH`", path=str(path), mode=oct(mode))
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError("file is writable by other users; run `chmod go-w PATH`", path=str(path), mode=oct(mode))
    _check_owner(path, status)


def _check_place(path: Path) -> None:
    """Check that no other user can replace a file, the link to it, or a directory on the way to either.

    A mounted secret is a link, in a directory that is sticky and world-writable.
    """
    _check_owner(path, path.lstat())
    for directory in dict.fromkeys([*path.absolute().parents, *path.resolve().parents]):
        status = directory.stat()
        mode = stat.S_IMODE(status.st_mode)
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
            raise ConfigError(
                "directory is writable by other users; run `chmod go-w PATH`", path=str(directory), mode=oct(mode)
            )
        _check_owner(directory, status)


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (ROOT, os.geteuid()):
        raise ConfigError("file or directory belongs to another user", path=str(path), uid=status.st_uid)


def _make(path: Path, text: str, mode: int) -> None:
    """Create a file, and its directory if necessary."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(path, text, mode)
    except FileExistsError as error:
        raise ConfigError("key file already exists", path=str(path)) from error
    except OSError as error:
        raise ConfigError("key file cannot be written", path=str(path), detail=str(error)) from error


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically: readers see either the old or the new content."""
    target = path.resolve()
    beside = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        _write(beside, text, stat.S_IMODE(target.stat().st_mode) if target.exists() else LIST_MODE)
        beside.replace(target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError("key file cannot be written", path=str(path), detail=str(error)) from error


def _write(path: Path, text: str, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
