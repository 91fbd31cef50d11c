"""The model whose distribution is kept: weights, forward pass, cache."""
