"""What an experiment is run on: the model's weights, the prompts, and where answers end."""

from dataclasses import dataclass

from eagle4.errors import require


@dataclass(frozen=True)
class ModelSource:
    """Where the target's weights come from, and the dtype they run in."""

    source: str
    dtype: str = "float32"

    def __post_init__(self) -> None:
        dtypes = ("float32", "bfloat16", "float16")
        require(
            self.dtype in dtypes, f"model.dtype {self.dtype!r} is not known; use one of {', '.join(dtypes)}"
        )


@dataclass(frozen=True)
class DataSpec:
    """Which prompts: `path` is a file or a list of files, None the packaged one; `limit` None is all of them.

    `turns` is first or all.
    """

    path: str | tuple[str, ...] | None = None
    limit: int | None = None
    max_new_tokens: int = 128
    turns: str = "all"

    def __post_init__(self) -> None:
        paths = self.path if isinstance(self.path, tuple) else (self.path or "",)
        require(
            len(paths) > 0 and all(isinstance(p, str) for p in paths),
            f"data.path must be a file or a list of files, got {self.path!r}",
        )
        require(self.turns in ("first", "all"), f"data.turns {self.turns!r} is not known; use first or all")
        require(
            self.limit is None or self.limit >= 1,
            f"data.limit must be at least 1 (null = all prompts), got {self.limit}",
        )
        require(
            self.max_new_tokens >= 1, f"data.max_new_tokens must be at least 1, got {self.max_new_tokens}"
        )


@dataclass(frozen=True)
class DecodeSpec:
    """Where an answer ends, besides the model's own stop ids: `stops` are strings."""

    stops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(all(self.stops), f"decode.stops must be non-empty strings, got {self.stops}")


@dataclass(frozen=True)
class CostsSpec:
    """Which cost table a policy decides by.

    `table`: None is this machine's own, measured at start if there is none; else the path of a JSON, or
    `hardware:<name>` for a roofline of `configs/hardware/<name>.yaml`. `force` takes a table of another machine, model
    or version. `repeats`: timings a point when one is measured.
    """

    table: str | None = None
    force: bool = False
    repeats: int = 5

    def __post_init__(self) -> None:
        require(
            self.table is None or self.table.strip() not in ("", "hardware:"),
            f"costs.table must be null, a file, or hardware:<name>, got {self.table!r}",
        )
        require(self.repeats >= 1, f"costs.repeats must be at least 1, got {self.repeats}")
