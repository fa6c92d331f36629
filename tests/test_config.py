"""The environment variables: what each takes, and errors that name the one that is wrong."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from swiglu_jax import _config, _tuning_cache
from swiglu_jax._candidate import StageCall
from swiglu_jax._measurement import Measurement

CACHE = "SWIGLU_JAX_CACHE_DIR"
FLAGS = {
    "SWIGLU_JAX_FROST_BWD": ("frost_backward", True),
    "SWIGLU_JAX_TUNE": ("tune", True),
    "SWIGLU_JAX_LOG": ("log", False),
}
TAKES = {
    "SWIGLU_JAX_IMPLEMENTATION": ["xla", "fused"],
    "SWIGLU_JAX_TARGET": ["cpu", "sm_80", "sm_90a"],
    CACHE: [],  # tests of its own
} | {name: ["0", "1"] for name in FLAGS}
"""Every variable and what it takes."""

WORDS = ["no", "TRUE", "2", "-1", "None", "auto", "h200", "sm_", "Xla", "fused,xla", "\udcff"]


@pytest.fixture
def read(monkeypatch):
    """Read the configuration of an environment that holds these variables and no others of ours."""

    def reader(**variables: str) -> _config.Config:
        for name in [n for n in os.environ if n.startswith("SWIGLU_JAX_")]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return _config.read_environment()

    return reader


def test_these_are_all_variables():
    source = Path(_config.__file__).read_text()
    assert set(re.findall(r'"(SWIGLU_JAX_\w+)"', source)) == set(TAKES)
    guide = (Path(__file__).parents[1] / "docs" / "guide.md").read_text()
    assert set(re.findall(r"^\| `(SWIGLU_JAX_\w+)`", guide, re.MULTILINE)) == set(TAKES)


@pytest.mark.parametrize("name", TAKES)
def test_an_empty_value_is_none_at_all(read, name):
    assert read(**{name: ""}) == read()


@pytest.mark.parametrize("name", [name for name in TAKES if name != CACHE])
@pytest.mark.parametrize("shape", [" ", "\t", " {}", "{} ", "{}\n", *WORDS])
def test_a_bad_value_is_named_with_what_was_expected(read, name, shape):
    for good in TAKES[name]:
        value = shape.format(good)
        with pytest.raises(ValueError, match=rf"^{name}: expected .* got ") as e:
            read(**{name: value})
        assert repr(value) in str(e.value)


@pytest.mark.parametrize("name", FLAGS)
def test_flags(read, name):
    field, default = FLAGS[name]
    assert getattr(read(), field) is default
    assert [getattr(read(**{name: text}), field) for text in "01"] == [False, True]


@pytest.mark.parametrize("text", TAKES["SWIGLU_JAX_TARGET"])
def test_targets(read, text):
    assert read().target is None
    assert read(SWIGLU_JAX_TARGET=text).target == text


@pytest.mark.parametrize("below", ["", "/a/b"])
@pytest.mark.parametrize("start", ["absolute", "relative", "home"])
def test_the_cache_directory(read, monkeypatch, tmp_path, start, below):
    """A relative one starts from where the process was when it read the variable."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    text = {"absolute": f"{tmp_path}/here", "relative": "here", "home": "~/here"}[start]
    config = read(**{CACHE: text + below})
    assert config.cache_dir == Path(f"{tmp_path}/here{below}")
    assert config.cache_dir.is_absolute()
    assert not config.cache_dir.exists()  # reading makes nothing


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (" ", "white space"),
        ("\n", "white space"),
        (" /tmp/swiglu", "white space"),
        ("/tmp/swiglu ", "white space"),
        ("~nobody-of-that-name", "whose home"),
        ("~nobody-of-that-name/cache", "whose home"),
        (__file__, "is there and no directory"),
        (f"{__file__}/cache", "is there and no directory"),
        (os.devnull, "is there and no directory"),
    ],
)
def test_what_can_be_no_cache_directory(read, value, why):
    with pytest.raises(ValueError, match=rf"^{CACHE}: expected a directory.*{why}") as e:
        read(**{CACHE: value})
    assert repr(value) in str(e.value)


def test_a_relative_cache_directory_where_the_working_directory_is_gone(
    read, monkeypatch, tmp_path
):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ValueError, match=rf"^{CACHE}: expected a directory.*got 'cache'.*is gone"):
        read(**{CACHE: "cache"})


def test_a_cache_directory_that_cannot_be_written_is_taken_and_keeps_nothing(read, caplog):
    """A run without its cache beats no run; each result that is not kept is said."""
    config = read(**{CACHE: "/proc/swiglu_jax"})
    call = StageCall("gate_up", ("h",), "OI", "bfloat16", m=8, h=8, i=8)
    path = _tuning_cache.path_of(config.cache_dir, {}, call)
    assert _tuning_cache.read(path) is None
    with _tuning_cache.turn(config.cache_dir):
        assert not _tuning_cache.write(path, {}, call, Measurement(1.0, ()))
    assert "could not keep a tuning result at /proc/swiglu_jax" in caplog.text


def test_the_default_cache_directory(read, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    at_home = tmp_path / ".cache" / "swiglu_jax"
    assert read(XDG_CACHE_HOME="").cache_dir == at_home
    assert read(XDG_CACHE_HOME="relative").cache_dir == at_home
    assert read(XDG_CACHE_HOME="/caches").cache_dir == Path("/caches/swiglu_jax")


def test_a_user_without_a_home(read, monkeypatch):
    """Can import, and has no cache; who asks for ``~`` is told."""

    def no_home(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(_config.Path, "home", lambda: no_home(None))
    monkeypatch.setattr(_config.Path, "expanduser", no_home)
    assert not read(XDG_CACHE_HOME="").cache_dir.exists()
    with pytest.raises(ValueError, match=rf"^{CACHE}: .* got '~/cache': whose home"):
        read(**{CACHE: "~/cache"})


@pytest.mark.parametrize(
    ("name", "value"), [("SWIGLU_JAX_TUNE", "2"), (CACHE, "~nobody-of-that-name")]
)
def test_import_ends_in_that_error(name, value):
    done = subprocess.run(
        [sys.executable, "-c", "import swiglu_jax"], env=os.environ | {name: value},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith(f"ValueError: {name}: expected ")


def test_a_configuration_cannot_be_changed_later(read):
    with pytest.raises(dataclasses.FrozenInstanceError):
        read().tune = False
