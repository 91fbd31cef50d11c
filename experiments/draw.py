"""Draw the tree of every round of one answer: what was guessed, what was accepted.

python -m experiments.draw method=prompt_lookup_tree 'prompt="Repeat after me: red, green, blue, red, green, blue."'
"""

from html import escape

from omegaconf import DictConfig
from rich.console import Console

from eagle4 import conf, text, tracking
from eagle4.answer import capacity_for, seed_of
from eagle4.errors import BadInput
from eagle4.files import write_atomic
from eagle4.methods import build_method
from eagle4.pricing import with_costs
from eagle4.target.hub import fetch
from eagle4.target.load import load
from eagle4.text import load_text
from eagle4.tree.draw import ascii, drawn, svg
from eagle4.watch import watch


def main(config: DictConfig) -> None:
    if not isinstance(config.prompt, str) or not config.prompt.strip():
        raise BadInput("""prompt must be one text, quoted twice: 'prompt="Red, green, blue."'""")
    if type(config.max_new_tokens) is not int or config.max_new_tokens < 1:
        raise BadInput(f"max_new_tokens must be at least 1, got {config.max_new_tokens}")
    source, sampling = conf.build(config.model), conf.build(config.sampling)
    drafter, tree, policy = (conf.build(config[key]) for key in ("drafter", "tree", "policy"))
    model, console = load(fetch(source.source), source.dtype), Console()
    words = load_text(model.tokenizer)
    parts = (config.name, drafter, tree, policy, config.verifier, model.spec, sampling, model.params)
    method = build_method(*parts)
    ids = text.encode_chat(words, [{"role": "user", "content": config.prompt}])
    capacity = capacity_for([method.system], len(ids), config.max_new_tokens)
    (method,), _ = with_costs(model, [method], conf.build(config.costs), [1], [capacity], console)
    folder, job = conf.output()
    console.print(
        "* = accepted; the root was committed before, and the target's own token is the next root\n"
    )
    page = [f"<!doctype html><meta charset=utf-8><title>{escape(config.name)}</title>"]
    with tracking.open_run(folder, conf.to_plain(config), conf.build(config.tracking), job):
        seed = seed_of(f"{sampling.seed}/{config.prompt}")
        for i, round_ in enumerate(watch(method, words, ids, seed, config.max_new_tokens)):
            tree_of = drawn(*round_, 0, lambda token: text.decode(words, [token]))
            title = f"round {i + 1}: {int(round_[1].num_accepted[0])} accepted"
            console.print(f"[bold]{title}[/]")
            console.print(ascii(*tree_of), markup=False, highlight=False)
            page.append(f"<h3>{title}</h3>{svg(*tree_of)}")
        page.insert(
            1,
            f"<h2>{escape(config.name)}</h2><p>{escape(config.prompt)}</p><p>Green: accepted. Grey: rejected.</p>",
        )
        write_atomic(folder / "rounds.html", "\n".join(page) + "\n")
    console.print(f"{folder}/rounds.html", style="dim", soft_wrap=True)


if __name__ == "__main__":
    conf.run_app(main, "draw")
