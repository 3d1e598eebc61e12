"""Other engines under the same workload: llama.cpp and transformers' continuous batching, in this
process.

llama.cpp is driven as its server drives it: one call computes a token of every row that makes some,
and fills up with tokens of prompts. Its wheel has no server. The driver reserves a request's cells
before it begins, so that none has to make way, and shares the common prefix as cells of one more
sequence: both are more than its server does.
"""

import argparse
import time
from collections import deque
from pathlib import Path

import numpy as np

from benchmarks.serving.workload import Request, Served
from kvqjax.model.config import ModelConfig

BITS = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}  # of a number of a key or value, with its scales
PAGE = 256  # tokens; llama.cpp rounds its cells to this, and transformers' blocks have this size
PIECE = 512  # tokens of one batch, the same as our engine's chunk of a prompt


class _Row:
    """A sequence that is being served."""

    def __init__(self, request: Request, number: int, cells: int, tokens: int):
        self.request, self.number, self.cells, self.held = request, number, cells, tokens
        self.made = 0
        self.first = 0.0  # seconds from the beginning to its first token
        self.last = 0


class Batching:
    """Continuous batching over a context of llama.cpp.

    Args:
        peer: the context, with one sequence more than there are rows, which holds the prefix.
        rows: requests at a time.
        cells: tokens of all sequences together.
        prefix: tokens that prompts may begin with.
        vocabulary: tokens of the model.
    """

    def __init__(self, peer, rows: int, cells: int, prefix: list[int], vocabulary: int):
        self.peer, self.prefix, self.vocabulary = peer, prefix, vocabulary
        self.free = cells - len(prefix)
        self.rows: dict[int, _Row] = {}
        self.numbers = list(range(rows))
        self.home = rows
        self.prefix_held = False
        self.reused = self.steps = self.tokens = 0

    def admit(self, request: Request) -> bool:
        """Begin a request if a sequence and its cells are free."""
        cells = len(request.prompt) - request.shared + request.answer
        if not self.numbers or cells > self.free:
            return False
        number, tokens = self.numbers.pop(), 0
        if request.shared:
            if not self.prefix_held:
                self.peer.feed(np.asarray(self.prefix), 0, self.home)
                self.prefix_held = True
            else:
                self.reused += request.shared
            self.peer.share(self.home, number, request.shared)
            tokens = request.shared
        self.free -= cells
        self.rows[number] = _Row(request, number, cells, tokens)
        return True

    def step(self) -> list[_Row]:
        """Compute one batch, and give the rows that got a token."""
        entries, outputs = [], []
        for row in self.rows.values():
            if row.made:
                outputs.append((row, len(entries)))
                entries.append((row.last, row.held, row.number, True))
                row.held += 1
        for row in self.rows.values():
            missing = len(row.request.prompt) - row.held
            if row.made or missing <= 0:
                continue
            count = min(missing, PIECE - len(entries))
            for place in range(row.held, row.held + count):
                entries.append(
                    (
                        row.request.prompt[place],
                        place,
                        row.number,
                        place + 1 == len(row.request.prompt),
                    )
                )
            row.held += count
            if count == missing:
                outputs.append((row, len(entries) - 1))
        self.peer.compute(entries)
        for row, place in outputs:
            row.last, row.made = self.peer.likeliest(place, self.vocabulary), row.made + 1
            if row.made == row.request.answer:
                self.peer.drop(row.number)
                self.numbers.append(row.number)
                self.free += row.cells
                del self.rows[row.number]
        self.steps += 1
        self.tokens += len(outputs)
        return [row for row, _ in outputs]


def by_llamacpp(
    params: dict,
    config: ModelConfig,
    kind: str,
    requests: list[Request],
    prefix: list[int],
    folder: Path,
    options: argparse.Namespace,
) -> tuple[Served, float]:
    """Serve the workload by llama.cpp.

    Args:
        params: the weights, in any form.
        config: the config of the model.
        kind: of the cache, a key of `BITS`. Its cells take `options.pool` bytes.
        requests: of the workload.
        prefix: tokens that some of the requests begin with.
        folder: for the file of weights that llama.cpp reads.
        options: of the command.

    Returns:
        What it took, and the bits of a number of a key or value.
    """
    from benchmarks.llamacpp.peer import Peer, write_model

    path = folder / "model.gguf"
    if not path.exists():
        write_model(path, params, config)
    cell = 2 * config.num_layers * config.kv_width * BITS[kind] / 8  # bytes
    cells = int(options.pool / cell) // PAGE * PAGE
    peer = Peer(path, kind, cells, options.threads, options.rows + 1)
    batching = Batching(peer, options.rows, cells, prefix, config.vocab_size)
    waiting, first, pace = deque(requests), [], []
    begun = time.perf_counter()
    while waiting or batching.rows:
        now = time.perf_counter() - begun
        while waiting and waiting[0].seconds <= now and batching.admit(waiting[0]):
            waiting.popleft()
        if not batching.rows:
            time.sleep(max(0.0, waiting[0].seconds - now))
            continue
        for row in batching.step():
            now = time.perf_counter() - begun
            if row.made == 1:
                row.first = now
                first.append(now - row.request.seconds)
            if row.made == row.request.answer:
                pace.append((now - row.first) / (row.made - 1))
    seconds = time.perf_counter() - begun
    peer.close()
    running = batching.tokens / batching.steps
    return Served(seconds, first, pace, options.rows, running, batching.reused), BITS[kind]


def by_transformers(
    config: ModelConfig, requests: list[Request], options: argparse.Namespace
) -> tuple[Served, float]:
    """Serve the workload by transformers' continuous batching, with pages of float32 that take
    `options.pool` bytes. Weights are random: no step's time depends on them."""
    import torch
    import transformers
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    torch.set_num_threads(options.threads)
    shape = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        intermediate_size=config.mlp_width,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        tie_word_embeddings=config.tied_embeddings,
        max_position_embeddings=config.max_position,
    )
    model = transformers.LlamaForCausalLM(shape).eval()
    cell = 2 * config.num_layers * config.kv_width * 4  # bytes of float32
    pages = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=options.pool // (cell * PAGE), max_batch_tokens=512
    )
    greedy = transformers.GenerationConfig(
        do_sample=False, eos_token_id=-1, max_new_tokens=options.answer
    )
    first: dict[str, float] = {}  # seconds from the beginning
    pace: list[float] = []
    with model.continuous_batching_context_manager(
        generation_config=greedy, continuous_batching_config=pages
    ) as loop:
        begun = time.perf_counter()
        names = {}
        for request in requests:
            time.sleep(max(0.0, request.seconds - (time.perf_counter() - begun)))
            name = loop.add_request(request.prompt, max_new_tokens=request.answer, streaming=True)
            names[name] = request
        end_count = 0
        while end_count < len(requests):
            result = loop.get_result(timeout=1)
            if result is None:
                continue
            if result.error:
                raise RuntimeError(result.error)
            now = time.perf_counter() - begun
            first.setdefault(result.request_id, now)
            if result.is_finished():
                end_count += 1
                pace.append(
                    (now - first[result.request_id]) / (names[result.request_id].answer - 1)
                )
        seconds = time.perf_counter() - begun
    waits = [at - names[name].seconds for name, at in first.items()]
    return Served(seconds, waits, pace, 0, None, 0), 32.0
