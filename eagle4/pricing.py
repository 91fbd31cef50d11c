"""Which cost table a method's rounds are priced by: this machine's own, a file, or a roofline."""

from collections.abc import Mapping, Sequence

from rich.console import Console

from eagle4 import conf, cost_table
from eagle4.cost_table import Source
from eagle4.harness import roofline
from eagle4.harness.costs import CostTable
from eagle4.harness.policies import POLICIES
from eagle4.methods import Method
from eagle4.round_cost import lists_for
from eagle4.run_specs import CostsSpec
from eagle4.target.load import Checkpoint

HARDWARE = "hardware:"


def priced(method: Method) -> bool:
    """Whether the method's policy looks at costs."""
    return POLICIES[method.policy.name](method.policy, method.system.tree).priced


def table_for(
    model: Checkpoint,
    method: Method,
    spec: CostsSpec,
    lists: Mapping[str, Sequence[int]],
    console: Console,
) -> tuple[CostTable, Source]:
    """The table that `spec` names, over the points of `lists` (round_cost.lists_for) if it is made for this. Raises
    BadInput as its reader does."""
    drafter = method.system.drafter
    if spec.table is None:
        return cost_table.cached(model, method, lists, spec.repeats, console)
    if spec.table.startswith(HARDWARE):
        name = spec.table.removeprefix(HARDWARE)
        hardware = conf.build(conf.compose("calibrate", [f"+hardware={name}"]).hardware)
        network = drafter.eagle if drafter.name == "eagle" else None
        table = roofline.table(model.spec, network, drafter.retrieval, hardware, **lists)
        return table, Source("modelled", spec.table)
    return cost_table.read(spec.table, cost_table.fingerprint(model, method), spec.force)


def with_costs(
    model: Checkpoint,
    methods: Sequence[Method],
    spec: CostsSpec,
    batch: Sequence[int],
    context: Sequence[int],
    console: Console,
) -> tuple[list[Method], dict[str, str]]:
    """The methods, those whose policy looks at costs with their table; and for each of those where it is from.

    A table that is named prices every method with a network, so that predictions can be compared.
    """
    found, sources = [], {}
    for method in methods:
        if priced(method) or (spec.table is not None and method.system.drafter.name == "eagle"):
            lists = lists_for(method.system.tree, batch, context)
            table, source = table_for(model, method, spec, lists, console)
            method = method._replace(params=method.params._replace(costs=table))
            sources[method.name] = cost_table.describe(source)
        found.append(method)
    return found, sources
