"""What bounds the methods that are slower than the bound on TPUs: units of the chip, from records of schedules and of
rows."""

from benchmarks.step_cost.bound import CLOCKS, NAMES, bandwidth, make_layout, token_bytes
from benchmarks.step_cost.row import Row
from benchmarks.tables import read, table
from kvqjax.hardware.planner import DEVICES
from kvqjax.methods import parse
from kvqjax.methods.roofline import flops_per_token
from kvqjax.model.catalogue import config_of

CHIP, MODEL, CONTEXT, TOKENS = "v6e", "llama-3.1-8b", 32768, 512
# A cache's kernel: its record, its case there, and whether the case counts one KV head.
KERNELS = {
    "kivi:bits=2,group=128": ("tpu_bundles", "k2v2-g128", True),
    "higgs:bits=2": ("latent_bundles", "higgs-8b-2", False),
    "xquant:bits=2": ("latent_bundles", "8b-2", False),
    "aqua:bits=2": ("latent_bundles", "aqua-8b-2", False),
    "commvq:bits=1": ("latent_bundles", "commvq-8b-1", False),
    "kvquant:bits=3,outliers=0": ("tpu_bundles", "nuq3", True),
    "kvquant:bits=3": ("tpu_bundles", "nuq3-o12", True),
}
CHAINS = ("aqua:bits=2", "xquant_cl:bits=2")
UNITS = {"VALU": "vector unit", "MXU": "matrix unit", "XLU": "across lanes", "VLOAD": "loads", "VSTORE": "stores"}
INTRO = f"""## What bounds other methods on a {CHIP}

Cycles for {TOKENS} tokens of a layer. *bf16* is what their bf16 keys and values take the chip's memory, *stored* what
is stored of them. With more bundles than *bf16* attention can't come below 1.0, however few bytes it reads. The shares
are of each unit's slots that the bundles of a schedule fill (`python benchmarks/tpu_bundles.py --chips {CHIP}`, `python
benchmarks/latent_bundles.py --chips {CHIP}`). The fullest unit bounds a kernel; where it is far from full as well, a
schedule waits for results.
"""
CHAINED = f"""
Where layers feed each other, of the rows of {CONTEXT // 1024}K tokens: cycles as above, by XLA's estimates and the
bundles of AQUA-KV's kernel; the least that the matrix unit takes at its peak for keys and values (predictors,
or U, W_k and W_v, of which a step spares W_v by summing values first; not HIGGS' transform or attention); and the least
that the bytes moved take, what flows between layers among them. The rest is the vector unit's: codes to numbers, sums,
rounding, RoPE, and parts of vectors that move to other lanes. AQUA-KV's kernel does most of it beside the products;
XQuant-CL has no kernel, and XLA does one after the other.
"""


def _clock() -> float:
    return CLOCKS[NAMES.get(CHIP, CHIP)]


def _kernels() -> str:
    config, rows = config_of(MODEL), []
    per_byte = TOKENS * _clock() / bandwidth(CHIP)
    for cache, (record, case, one_head) in KERNELS.items():
        found = read(record)[CHIP][case]
        cycles = found["total"] * config.num_kv_heads if one_head else found["bundles"]
        busy = {name: found["busy"][unit] for unit, name in UNITS.items()}
        stored = token_bytes(make_layout(config, parse(cache), CONTEXT, CHIP))
        cells = [f"{cycles:.0f}", f"{per_byte * 4 * config.kv_width:.0f}", f"{per_byte * stored:.0f}"]
        rows.append([f"`{cache}`", *cells, *(f"{share:.2f}" for share in busy.values()), max(busy, key=busy.get)])
    return table(["cache", "bundles", "bf16", "stored", *UNITS.values(), "fullest"], rows)


def _chains(found: dict[Row, dict | None]) -> str:
    config, rows = config_of(MODEL), []
    for cache in CHAINS:
        one = found.get(Row(CHIP, MODEL, cache, CONTEXT, 1))
        if one is None:
            continue
        parts, units = one["full"], config.num_layers * CONTEXT / TOKENS
        cycles = parts["cycles"]["attention"] / units
        product = TOKENS * flops_per_token(parse(cache), config) / config.num_layers
        product *= _clock() / (DEVICES[NAMES.get(CHIP, CHIP)].tflops * 1e12)
        moved = sum(parts["bytes"]["attention"].values()) / units * _clock() / bandwidth(CHIP)
        cells = [f"{x:.0f}" for x in (cycles, product, moved)]
        rows.append([f"`{cache}`", *cells, f"{product / cycles:.2f}", f"{moved / cycles:.2f}"])
    head = ["cache", "attention", "products, least", "bytes, least", "matrix unit's share", "memory's share"]
    return CHAINED + "\n" + table(head, rows) if rows else ""


def limits(found: dict[Row, dict | None]) -> str:
    """The section of the page, from the records of kernels and the rows that are known."""
    return f"{INTRO}\n{_kernels()}{_chains(found)}"
