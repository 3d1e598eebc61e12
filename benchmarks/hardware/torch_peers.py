"""PyTorch's attention on the shapes of `benchmarks.hardware.attention`, in a process without JAX's
memory."""

import statistics

from benchmarks.hardware.log import read_rate

SHAPES = ((131072, 1), (32768, 8), (8192, 1), (32768, 1), (131072, 8))
CLOSE = 0.02  # relative error against float32


def peers(log, options) -> None:
    """Measure decode attention by each backend of scaled_dot_product_attention."""
    try:
        import torch
    except ImportError:
        torch = None
    if torch is None or not torch.cuda.is_available():
        log.write(
            {
                "item": "torch",
                "state": "skipped",
                "short": "no torch" if torch is None else "no GPU",
            }
        )
        return
    rate = read_rate(options.out, options.commit)
    for context, batch in ((512, 1),) if options.tiny else SHAPES:
        for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
            item = f"{name.lower()} {context} x {batch}"
            log.item(item, lambda: _row(torch, name, context, batch, rate))  # noqa: B023


def _row(torch, name: str, context: int, batch: int, rate: float) -> dict:
    from torch.nn import attention
    from torch.nn.functional import scaled_dot_product_attention

    def make(heads, tokens):
        return torch.randn(batch, heads, tokens, 128, device="cuda", dtype=torch.bfloat16)

    q, k, v = make(32, 1) * 0.25, make(8, context), make(8, context)

    def call():
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    with attention.sdpa_kernel(getattr(attention.SDPBackend, name)):
        error = _error(torch, call(), q, k, v)
        us = [1e3 * ms for ms in _milliseconds(torch, call)]
    stored, median = 2 * k.numel() * 2, statistics.median(us)
    row = {
        "min": min(us),
        "median": median,
        "max": max(us),
        "bytes": stored,
        "GB_s": stored / median * 1e-3,
    }
    row |= {"over_bf16": median * 1e3 * rate / stored, "relative_error": error}
    short = f"{median:9.1f} us ({min(us):.1f}..{max(us):.1f}) {row['GB_s']:6.0f} GB/s {row['over_bf16']:5.2f} x bf16"
    return row | {
        "state": "done" if error < CLOSE else "wrong",
        "short": f"{short}, error {error:.1e}",
    }


def _error(torch, got, q, k, v) -> float:
    """Compare the first row with float32 arithmetic."""
    k, v = (x[:1].float() for x in (k, v))
    scores = torch.einsum("bkgd,bksd->bkgs", q[:1].float().reshape(1, 8, 4, 128), k) * 128**-0.5
    want = torch.einsum("bkgs,bksd->bkgd", scores.softmax(-1), v).reshape(1, 32, 1, 128)
    return float((got[:1].float() - want).norm() / want.norm())


def _milliseconds(torch, call, repeats: int = 20) -> list[float]:
    """Put events around single calls. Between two of them more is read than caches hold, so that
    the host is ahead."""
    sweep, spent = torch.randint(0, 255, (2**28,), device="cuda", dtype=torch.uint8), []
    for _ in range(repeats + 5):
        sweep.bitwise_xor_(1)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        spent.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in spent[5:]]
