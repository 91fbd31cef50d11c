"""The card of a trained drafter: what it is, what it was trained on, how good it is, how to make it again."""

import sys
from typing import Any

from eagle4.train.batches import Packing
from eagle4.train.loop import Setup


def write(setup: Setup, size: Packing, last: dict[str, Any], source: str, name: str) -> str:
    """Markdown. `last` are the run's latest figures by name."""
    train, spec = setup.train, setup.spec
    phases = ", ".join(f"{p.steps} steps × {p.unroll} unrolled at {p.lr:g}" for p in train.phases)
    joint = " ".join(f"{last[k]:.3f}" for k in sorted(last) if k.startswith("validate/joint_"))
    rows = [
        ("target", source),
        ("network", f"{spec.fusion}, taps {list(spec.taps)}" if spec.taps else spec.fusion),
        (
            "data",
            f"{size.documents} answers of the target, {size.tokens} distinct tokens, {size.supervised:.0%} supervised",
        ),
        ("tokens seen", f"{train.tokens} ({train.tokens / size.tokens:.1f} epochs)"),
        ("phases", phases),
        ("training time", f"{last.get('time_s', float('nan')) / 60:.0f} minutes"),
        ("held-out KL", _figure(last, "validate/kl")),
        ("held-out agreement, joint, step 0, 1, …", joint or "not measured"),
        ("held-out τ_sim (chain)", _figure(last, "validate/tau_sim")),
        ("held-out τ, real decode, 8 nodes", _figure(last, "decode/tau")),
        ("command", f"`python -m experiments.train {' '.join(sys.argv[1:])}`"),
    ]
    table = "\n".join(f"| {what} | {value} |" for what, value in rows)
    what = "A drafter for speculative decoding, bfloat16. Use it with drafter.checkpoint=<this folder>."
    return f"# {name}\n\n{what}\n\n| | |\n|---|---|\n{table}\n"


def _figure(last: dict[str, Any], key: str) -> str:
    return f"{last[key]:.3f}" if key in last else "not measured"
