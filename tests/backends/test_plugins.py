"""Transports of other distributions, found by entry point."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvflow
from kvflow.backends import BUILT_IN, Backend, create_backend, known_backends
from kvflow.errors import BackendUnavailable, ConfigError
from tests.support.distributions import build_wheel, unpack
from tests.support.instances import decode_config, make_pool

Install = Callable[..., None]

PIGEON = """
from kvflow.backends.memory import MemoryBackend

class PigeonBackend(MemoryBackend):
    name = "pigeon"

    def __init__(self, *, speed: int = 1) -> None:
        super().__init__()
        self.speed = speed
"""


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that builds and installs a distribution with one module of the same name."""

    def install_and_find(distribution: str, source: str, **entry_points: str) -> None:
        site = tmp_path / f"{distribution}-site"
        unpack(build_wheel(tmp_path, distribution, {f"{distribution}.py": source}, entry_points), site)
        monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(sys.modules, distribution, raising=False)

    return install_and_find


def test_a_plugin_is_found_by_its_name_and_takes_its_options(add: Install) -> None:
    add("pigeon_post", PIGEON, pigeon="pigeon_post:PigeonBackend")
    backend = create_backend("pigeon", {"speed": 3})
    assert (type(backend).__module__, vars(backend)["speed"]) == ("pigeon_post", 3)
    assert known_backends() == sorted([*BUILT_IN, "pigeon"])
    with pytest.raises(ConfigError, match="backend has no such options") as caught:
        create_backend("pigeon", {"wings": 2})
    assert caught.value.values == {"backend": "pigeon", "unknown": ["wings"], "known": ["speed"]}


def test_ranks_find_plugins(add: Install) -> None:
    add("pigeon_post", PIGEON, pigeon="pigeon_post:PigeonBackend")
    config = decode_config("tcp://127.0.0.1:1", backend="pigeon", backend_options={"speed": 2})
    rank = kvflow.DecodeRank(config, make_pool().layout)
    assert rank._backend.name == "pigeon"


def test_an_unknown_name_lists_plugins_among_the_known_ones(add: Install) -> None:
    add("pigeon_post", PIGEON, pigeon="pigeon_post:PigeonBackend", owl="nowhere:Owl")
    with pytest.raises(ConfigError, match="unknown backend") as caught:
        create_backend("raven", {})
    assert caught.value.values == {"backend": "raven", "known": sorted([*BUILT_IN, "owl", "pigeon"])}


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_plugin_that_claims_a_built_in_name_is_refused(add: Install, name: str) -> None:
    """It is not even imported, and other names still work."""
    others = [other for other in BUILT_IN if other != name]
    add("cuckoo", "raise SystemExit('imported')", **{name: "cuckoo:Cuckoo"})
    with pytest.raises(ConfigError, match="built-in") as caught:
        create_backend(name, {})
    assert caught.value.values == {"backend": name, "distributions": ["cuckoo 1.0"]}
    assert known_backends() == sorted(BUILT_IN)
    if "memory" in others:
        assert create_backend("memory", {}).name == "memory"


def test_two_distributions_with_one_name_are_both_named(add: Install) -> None:
    add("pigeon_post", PIGEON, pigeon="pigeon_post:PigeonBackend")
    add("pigeon_express", "raise SystemExit('imported')", pigeon="pigeon_express:Express")
    with pytest.raises(ConfigError, match="several") as caught:
        create_backend("pigeon", {})
    assert caught.value.values == {"backend": "pigeon", "distributions": ["pigeon_express 1.0", "pigeon_post 1.0"]}


def test_a_distribution_that_is_on_the_path_twice_counts_once(add: Install) -> None:
    """For example an editable install next to an ordinary one; the first on the path wins."""
    add("pigeon_post", "raise SystemExit('the second')", pigeon="pigeon_post:PigeonBackend")
    first = Path(sys.path[0])
    first.rename(first.with_name("second-site"))
    sys.path[0] = str(first.with_name("second-site"))
    add("pigeon_post", PIGEON, pigeon="pigeon_post:PigeonBackend")
    assert create_backend("pigeon", {}).name == "pigeon"


@pytest.mark.parametrize(
    ("source", "detail"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def broken(:", "SyntaxError"),
        ("", "AttributeError"),
    ],
    ids=["missing library", "fails", "is no Python", "has no such class"],
)
def test_a_plugin_that_cannot_be_imported_says_why(add: Install, source: str, detail: str) -> None:
    add("pigeon_post", source, pigeon="pigeon_post:PigeonBackend")
    with pytest.raises(BackendUnavailable, match="could not be imported") as caught:
        create_backend("pigeon", {})
    values = caught.value.values
    assert (values["backend"], values["distribution"]) == ("pigeon", "pigeon_post 1.0")
    assert str(values["detail"]).startswith(detail)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("source", ["PigeonBackend = 3", "class PigeonBackend: name = 'pigeon'"])
def test_a_plugin_that_is_no_backend_is_refused(add: Install, source: str) -> None:
    add("pigeon_post", source, pigeon="pigeon_post:PigeonBackend")
    with pytest.raises(BackendUnavailable, match="not a subclass") as caught:
        create_backend("pigeon", {})
    assert caught.value.values == {
        "backend": "pigeon",
        "distribution": "pigeon_post 1.0",
        "object": "pigeon_post:PigeonBackend",
    }


def test_a_plugin_that_lacks_methods_is_refused_and_they_are_named(add: Install) -> None:
    source = """
from kvflow.backends import Backend

def no(self): pass

METHODS = {name: no for name in Backend.__abstractmethods__ if name not in ("view", "watch")}
PigeonBackend = type("PigeonBackend", (Backend,), {"name": "pigeon", **METHODS})
"""
    add("pigeon_post", source, pigeon="pigeon_post:PigeonBackend")
    with pytest.raises(BackendUnavailable, match="backend plugin does not implement all") as caught:
        create_backend("pigeon", {})
    assert caught.value.values["missing"] == ["view", "watch"]


def test_a_plugin_that_calls_itself_something_else_is_refused(add: Install) -> None:
    """Peers compare the name that a backend reports, not the one in the settings."""
    add("pigeon_post", PIGEON, dove="pigeon_post:PigeonBackend")
    with pytest.raises(BackendUnavailable, match="a different name") as caught:
        create_backend("dove", {})
    assert caught.value.values["calls_itself"] == "pigeon"


def test_a_subclass_of_a_built_in_backend_needs_a_name_of_its_own(add: Install) -> None:
    add("pigeon_post", "from kvflow.backends.memory import MemoryBackend", pigeon="pigeon_post:MemoryBackend")
    with pytest.raises(BackendUnavailable, match="a different name"):
        create_backend("pigeon", {})


def test_a_name_that_is_not_declared_costs_no_import_of_any_plugin(add: Install) -> None:
    add("pigeon_post", "raise SystemExit('imported')", pigeon="pigeon_post:PigeonBackend")
    assert "pigeon" in known_backends()
    assert isinstance(create_backend("memory", {}), Backend)
    with pytest.raises(ConfigError):
        create_backend("raven", {})


def test_importing_kvflow_looks_for_no_distribution() -> None:
    script = "import sys, kvflow.prefill, kvflow.decode, kvflow.blocking; print('importlib.metadata' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=100, text=True)
    assert done.stdout == "False\n"
