"""What a training run is: phases, objective, optimiser, and how often it looks at itself."""

from dataclasses import dataclass

from eagle4.errors import require

LOSSES = ("soft_ce", "kl", "acceptance")
NORMALISERS = ("valid", "rows", "sequence")


@dataclass(frozen=True)
class PhaseSpec:
    """A stretch of training: optimiser steps, draft steps unrolled in each, and the peak learning rate."""

    steps: int
    unroll: int
    lr: float

    def __post_init__(self) -> None:
        require(self.steps >= 1, f"a phase needs at least 1 step, got {self.steps}")
        require(1 <= self.unroll <= 16, f"unroll must lie in 1..16, got {self.unroll}")
        require(self.lr > 0, f"lr must be positive, got {self.lr}")


@dataclass(frozen=True)
class ObjectiveSpec:
    """What is minimised. Step j of the unrolled drafter counts `step_decay`^j (EAGLE-3, arXiv 2503.01840 §3).

    `loss`: soft_ce (−Σ p log q), kl, or acceptance (−log Σ min(p, q), the chance of acceptance). `candidates`: size of
    the set both distributions are restricted to, 0 for the whole vocabulary; it holds the batch's own tokens, the
    `frequent` most frequent ones and a uniform sample of the rest, which stands for all of it. `feature_weight`:
    smooth L1 to the target's hidden state (EAGLE-1, arXiv 2401.15077 §4.2); `noise`: amplitude of uniform noise on its
    input. `normaliser`: the sum of losses is divided by supervised tokens (valid), all rows (rows), or by supervised
    tokens within each row of the batch first (sequence).
    """

    loss: str = "soft_ce"
    token_weight: float = 1.0
    feature_weight: float = 0.0
    noise: float = 0.0
    step_decay: float = 0.8
    normaliser: str = "valid"
    candidates: int = 2048
    frequent: int = 1024

    def __post_init__(self) -> None:
        require(
            self.loss in LOSSES,
            f"objective.loss {self.loss!r} is not known; use one of {', '.join(LOSSES)}",
        )
        require(
            self.normaliser in NORMALISERS,
            f"objective.normaliser {self.normaliser!r} is not known; use one of {', '.join(NORMALISERS)}",
        )
        for name in ("token_weight", "feature_weight", "noise", "candidates", "frequent"):
            value = getattr(self, name)
            require(value >= 0, f"objective.{name} must be at least 0, got {value}")
        require(0 < self.step_decay <= 1, f"objective.step_decay must lie in (0, 1], got {self.step_decay}")
        require(
            self.token_weight + self.feature_weight > 0,
            "objective.token_weight and objective.feature_weight are both 0: nothing would be learned",
        )


@dataclass(frozen=True)
class TrainSpec:
    """A training run: `batch` packed rows of `length` tokens a step, accumulated `accumulate` times.

    The learning rate of each phase warms up over `warmup` of its steps and falls along a cosine to `final_lr` of its
    peak. `start`: a target layer to copy (−1 the last), or random (`start_layer` null). `start_tap`: the tap that fc
    passes through at the start (−1 the last). `learn_prompts`: prompt tokens are supervised too; the target's own
    distribution after them is as good a teacher, though they are not its words. `share`: the part of the training
    documents that is used. Intervals are in batches; a `decode_every` or `validate_tokens` of 0 turns that look off.
    """

    phases: tuple[PhaseSpec, ...] = (PhaseSpec(400, 1, 3e-3), PhaseSpec(800, 3, 1e-3))
    objective: ObjectiveSpec = ObjectiveSpec()
    length: int = 512
    batch: int = 1
    accumulate: int = 1
    warmup: float = 0.05
    final_lr: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip: float = 0.5
    start_layer: int | None = -1
    start_tap: int = -1
    learn_prompts: bool = False
    share: float = 1.0
    seed: int = 0
    log_every: int = 10
    validate_every: int = 200
    validate_tokens: int = 8192
    decode_every: int = 600
    decode_prompts: int = 8
    save_every: int = 200

    def __post_init__(self) -> None:
        require(len(self.phases) > 0, "train.phases is empty; give at least one phase")
        for name in ("length", "batch", "accumulate", "log_every", "validate_every", "save_every"):
            require(getattr(self, name) >= 1, f"train.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("validate_tokens", "decode_every", "decode_prompts"):
            require(getattr(self, name) >= 0, f"train.{name} must be at least 0, got {getattr(self, name)}")
        for name in ("warmup", "final_lr", "beta1", "beta2"):
            require(
                0 <= getattr(self, name) <= 1, f"train.{name} must lie in [0, 1], got {getattr(self, name)}"
            )
        require(self.clip > 0, f"train.clip must be positive, got {self.clip}")
        require(self.weight_decay >= 0, f"train.weight_decay must be at least 0, got {self.weight_decay}")
        require(0 < self.share <= 1, f"train.share must lie in (0, 1], got {self.share}")

    @property
    def steps(self) -> int:
        """Optimiser steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    @property
    def batches(self) -> int:
        """Batches of all phases."""
        return self.steps * self.accumulate

    @property
    def tokens(self) -> int:
        """Slots of all batches, padding included: what runs of one budget have in common."""
        return self.batches * self.batch * self.length

    def phase_at(self, step: int) -> int:
        """The phase that optimiser step `step` belongs to."""
        for i, phase in enumerate(self.phases):
            step -= phase.steps
            if step < 0:
                return i
        return len(self.phases) - 1
