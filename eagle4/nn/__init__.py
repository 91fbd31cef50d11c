"""The pieces a transformer is made of: pure functions of arrays."""
