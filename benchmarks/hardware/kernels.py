"""The library's own GPU kernels: right or wrong, then their time against XLA's path, alone and in
whole steps."""

import numpy as np

from benchmarks.hardware.attention import Bench, layer_program, vectors
from benchmarks.hardware.caches import PLAIN, random_tile, target
from benchmarks.hardware.ceilings import on_gpu
from benchmarks.hardware.steps import METHODS as STEP_METHODS
from benchmarks.hardware.steps import SHAPES as STEP_SHAPES
from benchmarks.hardware.steps import TINY, Case, measure_steps
from benchmarks.hardware.timing import relative
from kvqjax.cache.layout import CacheLayout
from kvqjax.kernel_checks.check import check
from kvqjax.kernel_checks.compare import Speed
from kvqjax.kernel_checks.prompt_kernels import PromptKernel, check_prompt_kernel
from kvqjax.kernel_checks.report import SHAPES as CHECKED
from kvqjax.kernel_checks.trial import candidates
from kvqjax.methods import parse
from kvqjax.pallas_kernels.forms import CUDNN

METHODS = (
    "exact",
    "klt:bits=2,heads=own",
    "kivi:bits=2",
    "kivi:bits=4",
    "kivi:bits=2,group=128",
    "kivi:bits=4,group=128",
    "kivi:bits=3,group=128",
    "omniscale:bits=2",
    "omniscale:bits=2,group=128",
    "oscar:bits=2,rotate=hadamard",
    "turboquant:bits=2",
    "turboquant:bits=4",
    "kvarn:bits=2",
    "kvquant:bits=3,outliers=0",
)
SHAPES = ((32768, 8), (131072, 1))
FORMS = {"XLA": PLAIN, "kernel": {"kernels": "pallas"}}
SIZE = 1300  # tokens of the body that is checked, no multiple of a tile


def kernels(log, options) -> None:
    """Check and time each kernel. Of one that is wrong nothing is timed."""
    if not on_gpu():
        log.write({"item": "kernels", "state": "skipped", "short": "no GPU"})
        return
    log.item("check cudnn", _check_cudnn)
    bench = Bench(options)
    for text in METHODS:
        log.item(f"check {text}", lambda: _check(text))  # noqa: B023
        if f"check {text}" not in log.done:
            continue
        tiles = {name: random_tile(text, **form) for name, form in FORMS.items()}
        for context, batch in SHAPES:
            outputs: list[np.ndarray] = []
            for name, form in FORMS.items():
                item = f"{name} {text} {context} x {batch}"

                def measure():
                    return _row(item, text, tiles[name], context, batch, bench, form, outputs)  # noqa: B023

                log.item(item, measure)


def _check_cudnn() -> dict:
    """Do what `kvqjax doctor` does for cuDNN, with its timing: milliseconds for 2048 tokens,
    twice."""
    shape = CHECKED[0]
    verdict = check_prompt_kernel(
        PromptKernel(CUDNN, shape.num_heads, shape.num_kv_heads, shape.head_dim)
    )
    times = f"{verdict.kernel_ms} ms, products {verdict.plain_ms} ms"
    short = f"{verdict.outcome}, error {verdict.error}, {times}, {verdict.note}"
    return {"state": "done" if verdict.outcome == "faster" else "wrong", "short": short}


def _check(text: str) -> dict:
    """Do what `kvqjax doctor` does for one kernel of a layer of Llama-3.1-8B, its timing left
    out."""
    layout = CacheLayout(
        shape=CHECKED[0], method=parse(text), capacity=2048, dtype="bfloat16", target=target()
    )
    kernel = candidates(layout)[0]
    assert kernel is not None
    verdict = check(kernel, target(), "planes", timed=lambda *_: Speed(0.0, 1.0), sizes=(SIZE,))
    # 0: XLA's path, twice
    fine = (
        verdict.outcome in ("faster", "slower") and verdict.error is not None and verdict.error > 0
    )
    short = f"{'right' if fine else verdict.outcome}, error {verdict.error}, {verdict.note}"
    return {
        "state": "done" if fine else "wrong",
        "relative_error": verdict.error,
        "note": verdict.note,
        "short": short,
    }


def _row(
    item: str,
    text: str,
    tile: tuple,
    context: int,
    batch: int,
    bench: Bench,
    form: dict,
    outputs: list,
) -> dict:
    program, arguments, stored = layer_program(text, tile, context, batch, bench, **form)
    q = vectors(batch)[0]
    row = bench.row(item, program, q, arguments, stored, context, batch)
    outputs.append(np.asarray(program(q, *arguments), np.float32))
    row |= {"off": relative(outputs[-1], outputs[0])}
    # The program is the one that was asked for.
    fine = ("mosaic" in program.as_text()) == (form is not PLAIN)
    return row | ({} if fine else {"state": "wrong", "short": f"{row['short']}, another program"})


def kernel_steps(log, options) -> None:
    """Measure whole decode steps through kernels, on a CPU (a dry run) without."""
    form = FORMS["kernel"] if on_gpu() else PLAIN
    cases = [
        Case(text, *place, form)
        for place in (TINY if options.tiny else STEP_SHAPES)[:2]
        for text in STEP_METHODS
    ]
    measure_steps(log, options, [{case.name(): case for case in cases}])
