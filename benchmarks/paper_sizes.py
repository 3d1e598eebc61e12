"""KV-cache sizes of KVQuant's Tables 7 and 8 and AQUA-KV's Table 2 beside the planner's (benchmarks/scale.md).

Arithmetic only. KVQuant is arXiv 2401.18079, taken without sinks; AQUA-KV is arXiv 2501.19392, whose sizes are of a 70B
model at 128K tokens.
"""

from kvqjax.hardware.planner import plan_memory
from kvqjax.methods import parse
from kvqjax.model.loading import config_of

K = 2**10
# table, model, cache, context, batch, the paper's figure in its unit, bytes of that unit
ROWS = [
    ("KVQuant 7", "llama-7b", "exact", 128 * K, 1, 64, 2**30),
    ("KVQuant 7", "llama-7b", "exact", K * K, 1, 512, 2**30),
    ("KVQuant 7", "llama-13b", "exact", 128 * K, 1, 100, 2**30),
    ("KVQuant 7", "llama-30b", "exact", 128 * K, 1, 195, 2**30),
    ("KVQuant 7", "llama-65b", "exact", 128 * K, 4, 1280, 2**30),
    ("KVQuant 7", "llama-7b", "exact", 10**7, 1, 4883, 2**30),
    ("KVQuant 7", "llama-7b", "kvquant:bits=2,outliers=0,sinks=0", 10**7, 1, 610, 2**30),
    ("KVQuant 8", "llama-7b", "kvquant:bits=2,outliers=0,sinks=0", K * K, 1, 64.1, 2**30),
    ("AQUA-KV 2", "llama-3.1-70b", "exact", 128 * K, 1, 40, 2**30),
    ("AQUA-KV 2", "llama-3.1-70b", "aqua:bits=2", 128 * K, 1, 5.7, 2**30),
    ("AQUA-KV 2", "llama-3.1-70b", "aqua:bits=3", 128 * K, 1, 8.1, 2**30),
    ("AQUA-KV 2", "llama-3.1-70b", "aqua:bits=4", 128 * K, 1, 10.9, 2**30),
    ("AQUA-KV 2", "llama-3.1-70b", "higgs:bits=2", 128 * K, 1, 5.1, 2**30),
    ("AQUA-KV 2", "llama-3.1-70b", "higgs:bits=3", 128 * K, 1, 7.6, 2**30),
    ("AQUA-KV 2", "llama-3.1-70b", "higgs:bits=4", 128 * K, 1, 10.6, 2**30),
    ("AQUA-KV 2", "llama-3.1-70b", "kivi:bits=2,group=128", 128 * K, 1, 5.6, 2**30),
    ("AQUA-KV 2", "llama-3.1-70b", "kivi:bits=4,group=128", 128 * K, 1, 10.6, 2**30),
]  # fmt: skip
DENSE_AND_SPARSE = [(bits, outliers) for bits in (4, 3, 2) for outliers in (0, 0.01)]
TABLE_8 = {"llama-7b": (16.0, 17.3, 12.0, 13.3, 8.0, 9.3), "llama-65b": (80, 86.5, 60, 66.5, 40, 46.5)}
ROWS += [
    ("KVQuant 8", model, f"kvquant:bits={bits},outliers={outliers},sinks=0", 128 * K, 1, figure, 2**30)
    for model, figures in TABLE_8.items()
    for (bits, outliers), figure in zip(DENSE_AND_SPARSE, figures, strict=True)
]


def sizes() -> list[list[str]]:
    """The table's rows."""
    rows = []
    for table, model, spec, context, batch, figure, unit in ROWS:
        plan = plan_memory(config_of(model), parse(spec), context, batch)
        cells = [table, model, f"`{spec}`", f"{batch} x {context}", f"{figure:g}", f"{plan.cache / unit:.1f}"]
        rows.append([*cells, f"{(plan.cache + plan.constants) / unit:.1f}", f"{plan.book.bits_stored:.3f}"])
    return rows
