"""Hydra apps: `python -m experiments.<name>`. Thin: they compose configs, call eagle4 and write a run folder."""
