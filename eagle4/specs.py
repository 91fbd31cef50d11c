"""Frozen, hashable, validated specs: everything a jitted program may specialise on.

Each spec checks itself when it is made and raises `BadInput` naming the field. They are the single source of the
Hydra schema (`eagle4.conf`), so a typo in a config fails when the config is composed.
"""

from dataclasses import dataclass

from eagle4.errors import require


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: `kind` is none, default, linear, llama3 or yarn; unused fields are ignored by the other kinds.

    `attention_factor` scales cos and sin (YaRN, arXiv 2309.00071 §3.4); None means 0.1·ln(factor) + 1 for yarn.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        kinds = ("none", "default", "linear", "llama3", "yarn")
        require(
            self.kind in kinds, f"rope kind {self.kind!r} is not supported; use one of {', '.join(kinds)}"
        )
        require(self.theta > 0, f"rope theta must be positive, got {self.theta}")
        require(self.factor >= 1, f"rope factor must be at least 1, got {self.factor}")


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer of the Llama, Qwen2 or Qwen3 kind.

    `windows` holds one sliding-window length per layer (0 = full attention); empty means full everywhere.
    """

    family: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-5
    rope: RopeSpec = RopeSpec()
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "ffn_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        ):
            require(getattr(self, name) > 0, f"model {name} must be positive, got {getattr(self, name)}")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"model num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}",
        )
        require(self.head_dim % 2 == 0, f"model head_dim must be even for rope, got {self.head_dim}")
        require(
            len(self.windows) in (0, self.num_layers),
            f"model windows has {len(self.windows)} entries for {self.num_layers} layers",
        )

    def window(self, layer: int) -> int:
        """Sliding-window length of a layer, 0 for full attention."""
        return self.windows[layer] if self.windows else 0


@dataclass(frozen=True)
class SamplingSpec:
    """How logits become the target distribution p. temperature 0 is greedy; top_k 0 and top_p 1 are off.

    `repetition_penalty` divides positive and multiplies negative logits of every token already in prompt or answer
    (CTRL, arXiv 1909.05858 §4.1); `frequency_penalty` subtracts its value once per earlier occurrence in the answer.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.temperature >= 0, f"sampling.temperature must be at least 0, got {self.temperature}")
        require(0 < self.top_p <= 1, f"sampling.top_p must lie in (0, 1], got {self.top_p}; 1 turns it off")
        require(0 <= self.min_p <= 1, f"sampling.min_p must lie in [0, 1], got {self.min_p}")
        require(self.top_k >= 0, f"sampling.top_k must be at least 0 (0 = off), got {self.top_k}")
        require(
            self.repetition_penalty > 0,
            f"sampling.repetition_penalty must be positive, got {self.repetition_penalty}",
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0


@dataclass(frozen=True)
class TreeSpec:
    """The envelope of draft trees: shapes are fixed by it, a round's Plan chooses sizes inside it.

    kind: `chain` (one branch), `static` (the shape given by `paths`, EAGLE arXiv 2401.15077), `dynamic` (EAGLE-2 arXiv
    2406.16858: grow by path probability, keep the best), `sampled` (children drawn without replacement, RSD arXiv
    2402.14160). `nodes` counts the root. `paths` are rank paths: (0, 2) is the third child of the root's first child.
    `buckets` are row counts the target forward is compiled for, besides `nodes` itself: a round runs in the smallest
    that holds its tree. Empty means powers of two; larger ones than `nodes` are not used.
    """

    kind: str = "chain"
    depth: int = 4
    width: int = 1
    children: int = 1
    nodes: int = 5
    paths: tuple[tuple[int, ...], ...] = ()
    buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        kinds = ("chain", "static", "dynamic", "sampled")
        require(self.kind in kinds, f"tree.kind {self.kind!r} is not known; use one of {', '.join(kinds)}")
        require(self.depth >= 0, f"tree.depth must be at least 0, got {self.depth}")
        require(self.width >= 1, f"tree.width must be at least 1, got {self.width}")
        require(self.children >= 1, f"tree.children must be at least 1, got {self.children}")
        require(1 <= self.nodes <= 256, f"tree.nodes must lie in 1..256 (the root counts), got {self.nodes}")
        require(
            all(b >= 1 for b in self.buckets) and tuple(sorted(set(self.buckets))) == self.buckets,
            f"tree.buckets must be increasing positive row counts, got {self.buckets}",
        )

    def row_counts(self) -> tuple[int, ...]:
        """Row counts the target forward is compiled for, increasing, the last one holding the whole tree."""
        counts = self.buckets or tuple(2**i for i in range(9))
        return (*(n for n in counts if n < self.nodes), self.nodes)


@dataclass(frozen=True)
class EagleSpec:
    """One drafter layer of the EAGLE family: what it reads, where it is normed, and which head scores.

    `fusion`: concat2 (EAGLE-1, arXiv 2401.15077: the target's last post-norm hidden state beside the embedding) or
    taps (EAGLE-3, arXiv 2503.01840: residual streams at `taps`, `hidden_states` indices, through fc). `fc_norm`: one
    RMSNorm per tap; `norm_output`: the recurrent state is normed (both: EAGLE-3.1). `norm_before_fc`: one RMSNorm over
    all taps. `norm_before_residual`: the residual starts at the normed state. `draft_vocab`: 0 scores with the
    target's head, V with an own one, fewer with an own head over the ids that the checkpoint lists, or with the
    target's rows for them (`target_rows`, FR-Spec, arXiv 2502.14856). `window`: how many committed positions a draft
    sees, counted from the last (0 = all). `layer` is the layer's shape; None follows the target.
    """

    fusion: str = "taps"
    taps: tuple[int, ...] = ()
    fc_norm: bool = False
    fc_bias: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    draft_vocab: int = 0
    target_rows: bool = False
    window: int = 0
    layer: ModelSpec | None = None

    def __post_init__(self) -> None:
        require(
            self.fusion in ("concat2", "taps"),
            f"eagle.fusion {self.fusion!r} is not known; use concat2 or taps",
        )
        plain = not (self.fc_norm or self.norm_before_fc or self.norm_before_residual or self.norm_output)
        require(
            self.fusion == "taps" or (plain and not self.taps),
            "eagle.fusion=concat2 has no taps and no norms of its own; use fusion=taps, or drop them",
        )
        require(
            not (self.fc_norm and self.norm_before_fc),
            "eagle.fc_norm and eagle.norm_before_fc exclude each other; choose one norm before fc",
        )
        for name in ("draft_vocab", "window"):
            require(getattr(self, name) >= 0, f"eagle.{name} must be at least 0, got {getattr(self, name)}")
        require(
            self.draft_vocab > 0 or not self.target_rows,
            "eagle.target_rows needs eagle.draft_vocab: how many rows",
        )

    @property
    def own_head(self) -> bool:
        """Whether the head's rows are parameters of the drafter."""
        return self.draft_vocab > 0 and not self.target_rows


@dataclass(frozen=True)
class RetrievalSpec:
    """A low-rank head that finds `candidates` tokens with factors of `rank`; the head's own rows then score them.

    `selection`: exact, blocked or strided (eagle4.retrieval.shortlist).
    """

    rank: int = 64
    candidates: int = 256
    selection: str = "exact"

    def __post_init__(self) -> None:
        for name in ("rank", "candidates"):
            require(
                getattr(self, name) >= 1, f"retrieval.{name} must be at least 1, got {getattr(self, name)}"
            )
        kinds = ("exact", "blocked", "strided")
        require(
            self.selection in kinds,
            f"retrieval.selection {self.selection!r} is not known; use one of {', '.join(kinds)}",
        )


@dataclass(frozen=True)
class DrafterSpec:
    """Which drafter, and the numbers it is built from. Fields that a drafter does not read are ignored by it.

    `min_ngram`, `max_ngram`: suffix lengths that prompt lookup tries. `matches`: how many different earlier
    occurrences may branch from the root. `checkpoint`: folder of a trained drafter, which decides `eagle`. `retrieval`:
    find candidates with the checkpoint's low-rank factors instead of scoring the whole head. `full_head`: score the
    target's whole vocabulary where the checkpoint lists the ids that it scores.
    """

    name: str = "none"
    min_ngram: int = 2
    max_ngram: int = 4
    matches: int = 1
    checkpoint: str | None = None
    eagle: EagleSpec | None = None
    retrieval: RetrievalSpec | None = None
    full_head: bool = False

    def __post_init__(self) -> None:
        require(
            1 <= self.min_ngram <= self.max_ngram,
            f"drafter.min_ngram must lie in 1..max_ngram = {self.max_ngram}, got {self.min_ngram}",
        )
        require(self.matches >= 1, f"drafter.matches must be at least 1, got {self.matches}")


@dataclass(frozen=True)
class System:
    """Everything a compiled round specialises on: model and method.

    `policy` is only its name: a policy's numbers travel as data, so sweeping them compiles nothing anew. `taps` are
    the `hidden_states` indices whose features the drafter reads.
    """

    model: ModelSpec
    drafter: DrafterSpec = DrafterSpec()
    tree: TreeSpec = TreeSpec(depth=0, nodes=1)
    policy: str = "fixed"
    verifier: str = "greedy"
    sampling: SamplingSpec = SamplingSpec()
    taps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(
            (self.verifier == "greedy") == self.sampling.greedy,
            f"verifier {self.verifier!r} does not go with sampling.temperature {self.sampling.temperature}: "
            "greedy is for temperature 0, the others for temperature > 0",
        )
        for tap in self.taps:
            require(0 <= tap <= self.model.num_layers, f"tap {tap} is outside 0..{self.model.num_layers}")
