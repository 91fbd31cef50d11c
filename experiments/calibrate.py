"""What a forward pass of the target costs on this machine, and how far that is from what the machine can do.

    python -m experiments.calibrate model=smollm2_135m nodes=[1,2,4,8]

Prints a table per batch and context, and leaves calibrate.json and calibrate.png in the run's folder.
"""

import json

from omegaconf import DictConfig
from rich.console import Console

from eagle4 import conf, forward_cost, report_cost, tracking
from eagle4.files import plain, write_atomic
from eagle4.fingerprint import device_fingerprint
from eagle4.harness.hardware import weight_bytes
from eagle4.target.hub import fetch
from eagle4.target.load import load


def main(config: DictConfig) -> None:
    source, console = conf.build(config.model), Console()
    lists = forward_cost.check_grid(conf.to_plain(config))
    busy = forward_cost.warn_if_busy(console)
    model = load(fetch(source.source), source.dtype)
    forward_cost.check_positions(model.spec, lists["context"][-1], lists["nodes"][-1])
    folder, job = conf.output()
    with tracking.open_run(folder, conf.to_plain(config), conf.build(config.tracking), job) as run:
        limits, forward, products = forward_cost.measure(model, lists, config.repeats, run.log, console)
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
    speeds = f"{limits.read_bytes_per_s / 1e9:.1f} GB/s, {limits.flops_per_s / 1e9:.0f} GFLOP/s"
    console.print(
        f"machine: {speeds}; weights {read / 1e6:.0f} MB; limit = max(bytes / bandwidth, flops / peak)",
        style="dim",
        soft_wrap=True,
    )
    console.print(f"{folder}/calibrate.json, calibrate.png", style="dim", soft_wrap=True)


if __name__ == "__main__":
    conf.run_app(main, "calibrate")
