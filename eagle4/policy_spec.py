"""How much a round may speculate. These numbers travel as data, so a System knows only the policy's name."""

from dataclasses import dataclass

from eagle4.errors import require


@dataclass(frozen=True)
class ReliabilitySpec:
    """What earlier rounds taught about a drafter: sums over nodes by depth and probability bin, over rounds by depth.

    seen, claimed, accepted: nodes, their path probabilities, those that were accepted. tried, won: rounds that had
    accepted up to a level and drafted one more, and those that accepted it. See `eagle4.harness.reliability`.
    """

    seen: tuple[tuple[float, ...], ...]
    claimed: tuple[tuple[float, ...], ...]
    accepted: tuple[tuple[float, ...], ...]
    tried: tuple[float, ...]
    won: tuple[float, ...]


@dataclass(frozen=True)
class PolicySpec:
    """How a round decides how much to speculate: fixed, confidence or marginal (eagle4.harness).

    `depth`, `width`, `children`, `nodes`: the most of each; 0 means the tree envelope's own value. confidence stops
    below the path probability `threshold`. marginal extends while expected tokens per cost reach `tau`, in plain decode
    steps (0 = auto: what this run reaches, at least 1); `rise` raises the bar by that share with every level. `online`:
    path probabilities are corrected by what this run accepted, older rounds counting `forget` times less with each new
    one. `calibration`: a file of what earlier rounds taught (experiments.reliability), or own: the one in the drafter's
    checkpoint if there is one; it decides `reliability`.
    """

    name: str = "fixed"
    depth: int = 0
    width: int = 0
    children: int = 0
    nodes: int = 0
    threshold: float = 0.0
    tau: float = 0.0
    rise: float = 0.0
    online: bool = True
    forget: float = 0.95
    calibration: str | None = None
    reliability: ReliabilitySpec | None = None

    def __post_init__(self) -> None:
        require(0 <= self.threshold <= 1, f"policy.threshold must lie in [0, 1], got {self.threshold}")
        require(
            self.tau == 0 or self.tau >= 0.1,
            f"policy.tau must be at least 0.1 (in plain decode steps) or 0 for auto, got {self.tau}",
        )
        require(self.rise >= 0, f"policy.rise must be at least 0, got {self.rise}")
        require(0 < self.forget < 1, f"policy.forget must lie in (0, 1), got {self.forget}")
