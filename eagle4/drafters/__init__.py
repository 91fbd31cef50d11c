"""Drafting methods, one file each. `DRAFTERS` maps a config name to the function that makes the drafter."""

from eagle4.drafters import bigram, eagle, none, prompt_lookup

DRAFTERS = {
    "none": none.make,
    "bigram": bigram.make,
    "eagle": eagle.make,
    "prompt_lookup": prompt_lookup.make,
}
