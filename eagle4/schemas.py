"""Hydra schemas made from the frozen specs, one per config group.

A frozen dataclass can't be a Hydra schema and a mutable one can't be jit-static, so each spec gets a mutable twin that
remembers it in `_target_`.
"""

import dataclasses
import functools
import types
import typing
from typing import Any

from omegaconf import MISSING

from eagle4 import tracking
from eagle4.harness.roofline import HardwareSpec
from eagle4.policy_spec import PolicySpec
from eagle4.run_specs import CostsSpec, DataSpec, DecodeSpec, ModelSource
from eagle4.specs import DrafterSpec, EagleSpec, ModelSpec, RetrievalSpec, RopeSpec, SamplingSpec, TreeSpec
from eagle4.train.head import HeadSpec
from eagle4.train.spec import ObjectiveSpec, PhaseSpec, TrainSpec

GROUPS: dict[str, type] = {
    "model": ModelSource,
    "data": DataSpec,
    "sampling": SamplingSpec,
    "drafter": DrafterSpec,
    "tree": TreeSpec,
    "policy": PolicySpec,
    "costs": CostsSpec,
    "hardware": HardwareSpec,
    "decode": DecodeSpec,
    "train": TrainSpec,
    "retrieval": RetrievalSpec,
    "head": HeadSpec,
    "tracking": tracking.TrackingSpec,
}
_NESTED = (EagleSpec, ModelSpec, RopeSpec, ObjectiveSpec, PhaseSpec)
SPECS = {f"{spec.__module__}.{spec.__qualname__}": spec for spec in (*GROUPS.values(), *_NESTED)}


@functools.cache
def schema(spec: type) -> type:
    """The structured-config twin of a frozen spec: same fields and defaults, tuples as lists, and `_target_`.

    Fields without a default become mandatory. Nested specs become nested schemas.
    """
    hints = typing.get_type_hints(spec)
    fields: list[Any] = [("_target_", str, f"{spec.__module__}.{spec.__qualname__}")]
    for field in dataclasses.fields(spec):
        default: Any = MISSING
        if field.default is not dataclasses.MISSING:
            default = dataclasses.field(default_factory=functools.partial(_mutable, field.default))
        fields.append((field.name, _schema_type(hints[field.name]), default))
    twin = dataclasses.make_dataclass(spec.__name__, fields)
    # Jobs in other processes get it by this name: pickled by value a dataclass forgets which fields have defaults.
    twin.__module__, twin.__qualname__ = __name__, f"Schema{spec.__name__}"
    globals()[twin.__qualname__] = twin
    return twin


def _schema_type(kind: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return schema(typing.cast(type, kind))
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return list[_schema_type(arguments[0])]
    if origin in (typing.Union, types.UnionType) and len(arguments) > 2:
        return Any  # a choice of types: checked by the spec itself
    if origin in (typing.Union, types.UnionType) and type(None) in arguments:
        (inner,) = (a for a in arguments if a is not type(None))
        return typing.Optional[_schema_type(inner)]  # noqa: UP045 (OmegaConf reads this form)
    if kind in (int, float, str, bool):
        return kind
    raise TypeError(f"{kind} can't be part of a config; use int, float, str, bool, a spec, or tuples of them")


def _mutable(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _mutable(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return schema(type(value))(**fields)
    return [_mutable(item) for item in value] if isinstance(value, tuple) else value


for _spec in SPECS.values():
    schema(_spec)
