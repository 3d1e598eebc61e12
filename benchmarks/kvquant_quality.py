"""KVQuant on the bundled models: time of calibration, retrieval (Table 2), and joint weight and cache quantisation
(Table 5).

    python benchmarks/kvquant_quality.py --out FOLDER [--text books.txt]

Calibrates 4, 3 and 2 bits with 1 % of outliers by the default recipe, cut to a model's context: `demo` on --text (any
UTF-8 file; by default sentences made by kvqjax.eval.synthetic), `recall` on key-value lines made there, the only text
it knows. Retrieval asks for pass keys and stored values after an exact prefill. The joint table is `demo`'s perplexity
in the loop, chunk 32, with float32, int8 and int4 weights, on the end of --text. Results are kept in
FOLDER/kvquant_quality.json one by one; a run that was killed goes on there.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import kvqjax as kvq
from kvqjax import calibrate
from kvqjax.eval import perplexity, retrieval
from kvqjax.eval.corpora import read_text
from kvqjax.eval.synthetic import key_value_recall

CACHES = ("exact", "kvquant:bits=4", "kvquant", "kvquant:bits=2", "kivi:bits=2")  # kvquant's default is 3 bits, 1 %
TASKS = (("recall", "kv", 512), ("recall", "kv", 1024), ("demo", "passkey", 512), ("demo", "passkey", 1024))
WINDOW = 512


def lines(model, count: int) -> str:
    """Key-value problems with their answers, about `count` tokens."""
    rng, size = np.random.default_rng(0), lambda text: len(model.tokenizer(text)["input_ids"])
    problems = (key_value_recall(rng, 256, size) for _ in range(count // 256 + 1))
    return "".join(problem.prompt + problem.answer for problem in problems)


def artifact(model, name: str, spec: str, text: str, folder: Path, length: int | None):
    """The calibration of one cache, made now or before; its `about` has [wall, CPU] seconds."""
    path = folder / f"{name}-{spec.replace(':', '-')}"
    if not path.exists():
        wall, cpu = time.perf_counter(), time.process_time()
        made = calibrate.run(model, kvq.parse(spec), text, length=length)
        made.about["seconds"] = [time.perf_counter() - wall, time.process_time() - cpu]
        made.save(path)
    return kvq.load_artifact(path)


def known(results: dict, path: Path, key: str, compute: Callable[[], dict]) -> None:
    """Add one row to the results on disk unless it is there."""
    if key not in results:
        results[key] = compute()
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(key, flush=True)


def show(results: dict) -> None:
    groups: dict[tuple, list[dict]] = {}
    for key, row in results.items():
        if key != "about":
            groups.setdefault(tuple(row), []).append(row)
    for names, rows in groups.items():
        table = Table(*names)
        for row in rows:
            table.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()))
        Console(width=150).print(table)


def asked(model, spec: str, name: str, task: str, length: int, samples: int) -> dict:
    row = retrieval(model, kvq.parse(spec), task=task, length=length, samples=samples)
    return {"model": name} | row


def joint(model, constants, spec: str, ids: np.ndarray) -> dict:
    row = perplexity(model.replace(constants=constants), ids, kvq.parse(spec), window=WINDOW, tokens=len(ids))
    chosen = ("cache", "mode", "tokens", "ppl", "bits_method")
    return {"weights": model.weights} | {name: row[name] for name in chosen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", default="synthetic")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--length", type=int, help="tokens of a calibration sequence; by default the recipe's")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the joint table")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "kvquant_quality.json"
    about = {"text": Path(options.text).name, "samples": options.samples, "jax": jax.__version__}
    results = json.loads(path.read_text()) if path.exists() else {"about": about}
    add = functools.partial(known, results, path)
    models = {name: kvq.load(name) for name in ("demo", "recall")}
    text, _ = read_text(options.text, 2**16, 0)
    ids = np.asarray(models["demo"].tokenizer(text[-8 * options.tokens :])["input_ids"][-options.tokens :], np.int32)
    texts = {"demo": text[: len(text) // 2], "recall": lines(models["recall"], 2**15)}
    constants = {}
    for name, model in models.items():
        for spec in CACHES[1:4]:
            made = artifact(model, name, spec, texts[name], options.out, options.length)
            constants[name, spec] = made.constants
            row = {"model": name, "cache": spec, "sequences": made.about["sequences"], "length": made.about["tokens"]}
            row |= dict(zip(("wall s", "CPU s"), made.about["seconds"], strict=True))
            add(f"calibration {name} {spec}", lambda row=row: row)
    for weights in (None, "int8", "int4"):
        for spec in CACHES[:3]:
            model = kvq.load("demo", weights=weights)
            arguments = (model, constants.get(("demo", spec), ()), spec, ids)
            add(f"joint {model.weights} {spec}", functools.partial(joint, *arguments))
    for name, task, length in TASKS:
        for spec in CACHES:
            own = models[name].replace(constants=constants.get((name, spec), ()))
            arguments = (own, spec, name, task, length, options.samples)
            add(f"retrieval {name} {task} {length} {spec}", functools.partial(asked, *arguments))
    show(results)


if __name__ == "__main__":
    main()
