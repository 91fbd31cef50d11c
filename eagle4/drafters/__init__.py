"""Drafting methods, one file each. `DRAFTERS` maps a config name to the function that makes the drafter."""

from eagle4.drafters import none, prompt_lookup

DRAFTERS = {
    "none": none.make,
    "prompt_lookup": prompt_lookup.make,
}
