"""Compiled programs are kept between runs, in the user's cache folder."""

import os

import jax
import platformdirs


def keep_compiled() -> None:
    """Turn on JAX's persistent compilation cache, unless the user has chosen one (JAX_COMPILATION_CACHE_DIR)."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(platformdirs.user_cache_path("eagle4") / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
