"""Draft trees: topology of a parent list, growth inside a fixed envelope, static presets, drawings."""
