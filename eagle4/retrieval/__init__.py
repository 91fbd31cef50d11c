"""A head that looks before it scores: low-rank factors find candidates, the head's own rows score them."""
