"""Compiled functions of training: the only place here that calls jax.jit."""

import jax

from eagle4.train import capture, optimise

capture_chunk = jax.jit(capture.chunk, static_argnames=("spec", "taps"))
jit_update = jax.jit(optimise.update, static_argnames=("spec", "train", "steps"), donate_argnames="state")
jit_evaluate = jax.jit(optimise.evaluate, static_argnames=("spec", "steps"))
