"""Drafter checkpoints of other projects: read strictly, written so that their loaders find everything."""
