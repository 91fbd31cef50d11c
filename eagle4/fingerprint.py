"""Where numbers come from: the machine, the library versions and the code that produced them."""

import hashlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import eagle4


def device_fingerprint(dtype: str = "float32") -> dict[str, Any]:
    """Identifies the machine and stack that timings were taken on; two equal dicts may share cost tables.

    `dtype` is that of the model's weights, which JAX can't know. `cores` counts those this process may use.
    Starts the JAX backend if it is not running.
    """
    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "device_count": len(devices),
        "cpu_model": _cpu_model(),
        "cores": _cores(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "eagle4": eagle4.__version__,
        "python": platform.python_version(),
        "os": platform.system(),
        "dtype": dtype,
    }


def weights_digest(params: Any) -> str:
    """Tells weights of one architecture apart, whatever dtype they are loaded in: the last row of every tensor counts,
    rounded to bfloat16."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf[-1].astype(jnp.bfloat16)).tobytes())
    return digest.hexdigest()[:16]


def git_commit(path: str | Path) -> dict[str, Any] | None:
    """`{"commit", "dirty"}` of the checkout that holds `path`; None outside git or without a git program.

    Untracked files count as dirty: a new drafter that was never committed changes what a run means.
    """
    commit = _git(path, "rev-parse", "HEAD")
    # An installed package may lie in an ignored environment inside somebody else's checkout.
    if commit is None or _git(path, "check-ignore", str(Path(path).resolve())) is not None:
        return None
    return {"commit": commit, "dirty": bool(_git(path, "status", "--porcelain"))}


def _git(path: str | Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(path), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
