"""Keys in files: a directory for each process, such as a mounted secret.

`secret.key` has the own secret key, `public.key` what others list of it. `peers` has a line "KEY INSTANCE" for each
public key that an instance may use, and `registry` one "KEY" for each of the registry. `capability.key` has the secrets
that capabilities are made with, one a line. Lines that begin with "#" say nothing.
"""

import os
import secrets
import stat
import time
from pathlib import Path
from typing import Final

from kvflow.capability import KEY_BYTES, sign
from kvflow.config import check_duration, check_trust
from kvflow.errors import ConfigError
from kvflow.room import RoomId
from kvflow.trust import Trust, TrustedKey, is_key
from kvflow.wire.curve import new_keys, public_key_of

__all__ = ["load_capability_key", "load_trust", "make_capability", "make_capability_key", "make_keys", "renewed_trust"]

SECRET: Final = "secret.key"  # noqa: S105 - a name of a file
PUBLIC: Final = "public.key"
PEERS: Final = "peers"
REGISTRY: Final = "registry"
CAPABILITY: Final = "capability.key"

MAX_BYTES: Final = 16 * 2**20
SECRET_MODE: Final = 0o600


def load_trust(directory: str | os.PathLike[str]) -> Trust:
    """Read the keys of a process, and those it trusts.

    Args:
        directory: See `kvflow keys new`.

    Raises:
        ConfigError: A file is missing or malformed, others may read a secret, or others may write a list.
    """
    path = Path(directory)
    secrets_found = _lines(path / SECRET, is_secret=True)
    if len(secrets_found) != 1 or not is_key(secrets_found[0]):
        raise ConfigError("key file must contain one key of 64 hexadecimal digits", path=str(path / SECRET))
    return Trust(
        public=public_key_of(secrets_found[0]),
        secret=secrets_found[0],
        peers=tuple(_peer(path / PEERS, line) for line in _lines(path / PEERS, is_optional=True)),
        registry=tuple(_lines(path / REGISTRY, is_optional=True)),
        capability_keys=_capability_keys(path / CAPABILITY, is_optional=True),
        directory=str(path),
    )


def renewed_trust(before: Trust, trust: Trust | None) -> Trust:
    """Give the keys to go by from now on.

    Args:
        before: Those until now.
        trust: Those that were given; None to read them again from where the others were read.

    Raises:
        ConfigError: They cannot be read; or plain transport would begin, or end.
    """
    if trust is None:
        if before.directory is None:
            raise ConfigError("there is no key directory to reload; pass `trust`", setting="trust")
        trust = load_trust(before.directory)
    check_trust(trust)
    if trust.is_plain is not before.is_plain:
        raise ConfigError("switching between plain and encrypted transport needs a restart", setting="trust")
    return trust


def make_keys(directory: str | os.PathLike[str]) -> str:
    """Make a key pair, in a directory that is made if it is not there.

    Returns:
        The public key.

    Raises:
        ConfigError: There are keys already, or the files cannot be written.
    """
    path = Path(directory)
    public, secret = new_keys()
    _write(path / SECRET, secret, SECRET_MODE)
    _write(path / PUBLIC, public, 0o644)
    return public


def make_capability_key(directory: str | os.PathLike[str]) -> None:
    """Make a key for capabilities, for the router and all prefill ranks.

    Raises:
        ConfigError: There is one already, or it cannot be written.
    """
    _write(Path(directory) / CAPABILITY, secrets.token_hex(KEY_BYTES), SECRET_MODE)


def load_capability_key(directory: str | os.PathLike[str]) -> bytes:
    """Read the key that capabilities are made with: the first of `capability.key`.

    Raises:
        ConfigError: There is none, or others may read it.
    """
    return _capability_keys(Path(directory) / CAPABILITY)[0]


def make_capability(key: bytes, room: RoomId, *, prefill: str, decode: str, lifetime_s: float = 600.0) -> str:
    """Say that a decode instance may have a room, in a form that its prefill instance believes.

    The decode rank is given it with the request, or finds it in its ticket under the name "capability".

    Args:
        key: From `load_capability_key`.
        room: The router's id of the request.
        prefill: Name of the instance that computes it.
        decode: Name of the instance that may have it. With `*` at its end it stands for every name that begins with the
            rest.
        lifetime_s: How long it may be asked for; a transfer that has begun may last longer.

    Raises:
        ConfigError: An argument is unusable.
    """
    check_duration("lifetime_s", lifetime_s)
    expires_at = time.time() + lifetime_s  # noqa: TID251 - it is compared on another host
    return sign(key, room, prefill=prefill, decode=decode, expires_at=expires_at)


def _peer(path: Path, line: str) -> TrustedKey:
    key, _, instance = line.partition(" ")
    if not is_key(key) or not instance.strip():
        raise ConfigError('line must have the form "KEY INSTANCE"', path=str(path), line=line)
    return TrustedKey(key, instance.strip())


def _capability_keys(path: Path, *, is_optional: bool = False) -> tuple[bytes, ...]:
    lines = _lines(path, is_secret=True, is_optional=is_optional)
    if not all(map(is_key, lines)) or not (lines or is_optional):
        raise ConfigError("key file must contain keys of 64 hexadecimal digits", path=str(path))
    return tuple(bytes.fromhex(line) for line in lines)


def _lines(path: Path, *, is_secret: bool = False, is_optional: bool = False) -> list[str]:
    """Read what a file says."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(MAX_BYTES).decode()
    except FileNotFoundError as error:
        if is_optional:
            return []
        raise ConfigError(
            "key file does not exist; create it with `kvflow keys new DIRECTORY`", path=str(path)
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("key file cannot be read", path=str(path), detail=str(error)) from error
    if is_secret and mode & stat.S_IRWXO:
        raise ConfigError("secret file is readable by other users; run `chmod o= PATH`", path=str(path), mode=oct(mode))
    if mode & stat.S_IWOTH:
        raise ConfigError("file is writable by other users; run `chmod o-w PATH`", path=str(path), mode=oct(mode))
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _write(path: Path, text: str, mode: int) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
            file.write(f"{text}\n")
    except FileExistsError as error:
        raise ConfigError("key file already exists", path=str(path)) from error
    except OSError as error:
        raise ConfigError("key file cannot be written", path=str(path), detail=str(error)) from error
