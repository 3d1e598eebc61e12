"""Decode speed of the demo model: this library's caches against transformers' torch model, both in one run on the CPU.

    python benchmarks/decode_speed.py [--new 256] [--out benchmarks/records/decode_speed.json]

Medians of several generations after a warm-up; ratios hold for the machine named in the output only.
"""

import argparse
import json
import os
import platform
import warnings
from pathlib import Path

import jax

import kvqjax as kvq
from kvqjax._timing import median_seconds
from kvqjax.model.loading import locate

PROMPT = "It was late in the evening when the traveller came at last to the house at the end of the road. " * 4
CACHES = ("exact", "kivi:bits=4,window=64", "kivi:bits=2,window=64")


def torch_generate(folder: str, ids: list[int], new: int):
    """A closure that decodes `new` tokens greedily with transformers' torch model and its own cache, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([ids])
    options = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
    return lambda: model.generate(prompt, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    model = kvq.load("demo", dtype="f32")
    ids = model.tokenizer(PROMPT)["input_ids"]
    rows = {}
    for text in CACHES:
        call = {"max_new_tokens": options.new, "capacity": 1024, "eos_ids": (), "stride": options.new}
        seconds = median_seconds(
            lambda text=text, call=call: kvq.generate(model, [ids], kvq.parse(text), **call), options.repeats
        )
        rows[text] = options.new / seconds
    rows["transformers torch"] = options.new / median_seconds(
        torch_generate(str(locate("demo")), ids, options.new), options.repeats
    )
    backend = f"jax {jax.__version__} on {jax.devices()[0].platform}"
    report = {
        "prompt tokens": len(ids),
        "new tokens": options.new,
        "tokens per second": rows,
        "ratio to torch": {name: speed / rows["transformers torch"] for name, speed in rows.items()},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {backend}",
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
