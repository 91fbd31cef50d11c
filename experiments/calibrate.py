"""What a forward pass of the target costs on this machine, and how far that is from what the machine can do.

    python -m experiments.calibrate model=smollm2_135m nodes=[1,2,4,8]
    python -m experiments.calibrate method=eagle3_1

Prints a table per batch and context, and leaves calibrate.json and calibrate.png in the run's folder. With a method its
drafter is timed too. costs.json is the cost table of both; it becomes this machine's own, which later runs find.
"""

import json

from omegaconf import DictConfig
from rich.console import Console

from eagle4 import conf, cost_table, forward_cost, report_cost, round_cost, tracking
from eagle4.files import plain, write_atomic
from eagle4.fingerprint import device_fingerprint
from eagle4.harness.hardware import weight_bytes
from eagle4.methods import Method, build_method
from eagle4.specs import SamplingSpec
from eagle4.target.hub import fetch
from eagle4.target.load import Checkpoint, load


def main(config: DictConfig) -> None:
    source, console = conf.build(config.model), Console()
    lists = forward_cost.check_grid(conf.to_plain(config))
    busy = forward_cost.warn_if_busy(console)
    model = load(fetch(source.source), source.dtype)
    method = method_of(config, model)
    calls = round_cost.calls(model, method, lists)
    folder, job = conf.output()
    with tracking.open_run(folder, conf.to_plain(config), conf.build(config.tracking), job) as run:
        limits, seconds, products = forward_cost.measure(model, calls, config.repeats, console)
        forward = forward_cost.forward_rows(model, limits, seconds)
        parts = {point: seconds[point] for point in calls}
        costs, draft = round_cost.measured(parts), round_cost.draft_rows(parts)
        key = cost_table.fingerprint(model, method)
        for path in (folder / "costs.json", cost_table.cached_path(key)):
            cost_table.save(path, costs, key)
        for row in forward:
            run.log({name: value for name, value in row.items() if name != "samples_ms"})
        for row in draft:
            run.log(row)
        read = weight_bytes(model.params)
        result = {
            "model": source.source,
            "device": device_fingerprint(source.dtype),
            "load_average": busy,
            "limits": limits._asdict(),
            "weight_bytes": read,
            "targets": forward_cost.targets(forward),
            "forward": forward,
            "products": products,
        }
        text = json.dumps(plain(result), indent=1, allow_nan=False, ensure_ascii=False)
        write_atomic(folder / "calibrate.json", text + "\n")
        report_cost.plot(forward, folder / "calibrate.png")
        run.summary({**limits._asdict(), "weight_bytes": read})
        run.attach(folder / "calibrate.png")
    report_cost.print_tables(result, console)
    report_cost.print_draft(config.name, draft, console)
    speeds = f"{limits.read_bytes_per_s / 1e9:.1f} GB/s, {limits.flops_per_s / 1e9:.0f} GFLOP/s"
    console.print(
        f"machine: {speeds}; weights {read / 1e6:.0f} MB; limit = max(bytes / bandwidth, flops / peak)",
        style="dim",
        soft_wrap=True,
    )
    console.print(f"{folder}/calibrate.json, calibrate.png, costs.json", style="dim", soft_wrap=True)


def method_of(config: DictConfig, model: Checkpoint) -> Method:
    drafter, tree, policy = (conf.build(config[key]) for key in ("drafter", "tree", "policy"))
    target = model.spec, SamplingSpec(), model.params
    return build_method(config.name, drafter, tree, policy, config.verifier, *target)


if __name__ == "__main__":
    conf.run_app(main, "calibrate")
