"""eagle4: speculative decoding in pure-functional JAX, with a price on every guess."""

__version__ = "0.1.0"
