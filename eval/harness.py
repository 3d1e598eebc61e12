"""lm-evaluation-harness through a compressed cache, in one process: every scored token has passed through the cache.

The harness's own models score a whole text in one forward pass, which no cache takes part in; here the text enters the
cache `chunk` tokens at a time, and later chunks see earlier ones compressed.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvqjax._errors import UserError
from kvqjax.cache import CacheLayout
from kvqjax.eval.through import through
from kvqjax.generation.decoding import generate
from kvqjax.generation.prompt_ids import bucket
from kvqjax.methods import MethodLike, parse
from kvqjax.model.loading import Model
from kvqjax.step.new_cache import empty_cache, planned_layout

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise UserError(f"the harness needs lm-eval: pip install 'kvqjax[eval]' ({error})") from error

__all__ = ["CacheLM", "run_harness", "score_rows"]


@functools.partial(jax.jit, static_argnames=("layout", "chunk"))
def score_rows(
    model: Model, tokens: Int[Array, "B T"], counts: Int[Array, " B"], layout: CacheLayout, chunk: int
) -> tuple[Float[Array, "B N"], Bool[Array, "B N"]]:
    """Log-probability (nats) of the token after each position of each row, and whether it is the likeliest. N is T
    rounded up to whole chunks; entries from position `counts[b] - 1` on mean nothing."""

    def score(logits, targets, valid):
        log_p = jax.nn.log_softmax(logits[0])
        found = jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]
        return found, log_p.argmax(-1) == targets

    cache = empty_cache(model, layout, len(tokens))
    values, greedy = through((model,), (cache,), tokens, counts, chunk, score)
    flat = lambda x: jnp.moveaxis(x, 0, 1).reshape(tokens.shape[0], -1)  # noqa: E731
    return flat(values), flat(greedy)


class CacheLM(TemplateLM):
    """The harness's view of a model and a cache. chunk: tokens that enter the cache at a time, in scoring and in
    prompts; batch: rows at a time; max_length: longest text in tokens (default: the model's positions); kernels: as in
    `init_cache`."""

    def __init__(
        self,
        model: Model,
        method: MethodLike,
        *,
        chunk: int = 32,
        batch: int = 8,
        max_length: int | None = None,
        kernels: str = "auto",
    ) -> None:
        super().__init__()
        if chunk < 1 or batch < 1:
            raise UserError(f"chunk={chunk} and batch={batch}; at least 1 is needed")
        self.model, self.method, self.chunk, self.batch = model, parse(method), chunk, batch
        self.kernels = kernels
        self.max_length = max_length or model.config.max_position
        self.tokenizer = model.tokenizer

    @property
    def eot_token_id(self) -> int:
        if not self.model.config.eos_ids:
            raise UserError("this model has no end token, which the harness needs")
        return self.model.config.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        bos = self.model.config.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.model.folder.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text. Unless told otherwise, special tokens are added as the tokenizer does, once."""
        if add_special_tokens is None:
            add_special_tokens = not (self.tokenizer.bos_token and string.startswith(self.tokenizer.bos_token))
        return self.model.encode(string, add_special_tokens)

    def _loglikelihood_tokens(self, requests: Sequence, disable_tqdm: bool = False, **_: Any) -> list:
        """(log-probability, whether greedy decoding gives it) of each continuation; requests are (texts, context ids,
        continuation ids). Rows of like length share a batch, and a batch is always full: few programs."""
        rows = [([*context, *goal][-(self.max_length + 1) :], len(goal)) for _, context, goal in requests]
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
        found: dict[int, tuple[float, bool]] = {}
        for start in range(0, len(order), self.batch):
            part = order[start : start + self.batch]
            counts = np.full(self.batch, 2, np.int32)
            tokens = np.zeros((self.batch, bucket(len(rows[part[0]][0]))), np.int32)
            for place, number in enumerate(part):
                ids = rows[number][0]
                tokens[place, : len(ids)], counts[place] = ids, len(ids)
            chunk = min(self.chunk, tokens.shape[1])
            layout = planned_layout(self.model, self.method, *tokens.shape, kernels=self.kernels)
            scored = score_rows(self.model, jnp.asarray(tokens), jnp.asarray(counts), layout, chunk)
            values, greedy = (np.asarray(x) for x in scored)
            for place, number in enumerate(part):
                ids, goal = rows[number]
                span = slice(max(len(ids) - 1 - goal, 0), len(ids) - 1)
                found[number] = float(values[place, span].sum()), bool(greedy[place, span].all())
        return [found[number] for number in range(len(rows))]

    def loglikelihood_rolling(self, requests: Sequence, disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text, in disjoint windows of `max_length` tokens."""
        options = {"prefix_token": self.prefix_token_id, "max_seq_len": self.max_length, "context_len": 1}
        totals = []
        for (text,) in (request.args for request in requests):
            cut = get_rolling_token_windows(token_list=self.tok_encode(text), **options)
            windows = [(None, *make_disjoint_window(window)) for window in cut]
            totals.append(sum(value for value, _ in self._loglikelihood_tokens(windows)))
        return totals

    def generate_until(self, requests: Sequence, disable_tqdm: bool = False) -> list[str]:
        """The continuation of each prompt up to a stop string, greedy unless the task samples. Prompts that leave no
        room for the answer lose their beginning."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        texts: dict[int, str] = {}
        for key, members in groups.items():
            options, until, new = _generation(json.loads(key))
            options |= {"kernels": self.kernels}
            room = self.max_length - new
            if room < 1:
                raise UserError(f"{new} new tokens leave no room for a prompt within {self.max_length}")
            ids = {number: self.tok_encode(requests[number].args[0])[-room:] for number in members}
            order = sorted(members, key=lambda number: -len(ids[number]))
            for start in range(0, len(order), self.batch):
                part = order[start : start + self.batch]
                prompts = [ids[number] for number in part]
                made = generate(self.model, prompts, self.method, chunk=self.chunk, stop=until, **options)
                texts |= dict(zip(part, made.text, strict=True))
        return [texts[number] for number in range(len(requests))]


def _generation(given: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...], int]:
    """Our options, the stop strings and the most new tokens from a task's generation arguments."""
    until = given.get("until") or []
    until = (until,) if isinstance(until, str) else tuple(until)
    aliases = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    new = next((int(given[name]) for name in aliases if name in given), 256)
    options: dict[str, Any] = {"max_new_tokens": new}
    if given.get("do_sample"):
        options |= {name: given[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in given}
    return options, tuple(stop for stop in until if stop), new


def run_harness(
    lm: CacheLM, tasks: Sequence[str], *, shots: int | None, limit: int | None, seed: int, include: Path | None
) -> list[dict[str, Any]]:
    """The harness on tasks of its own, or of YAML files in `include`: one row for each task, filter and metric."""
    manager = TaskManager(include_path=None if include is None else str(include))
    known = manager.match_tasks(list(tasks))
    missing = [name for name in tasks if not manager.match_tasks([name])]
    if missing:
        raise UserError(f"the harness does not know the tasks {', '.join(missing)}")
    seeds = {f"{name}_random_seed": seed for name in ("numpy", "torch", "fewshot")} | {"random_seed": seed}
    options = {"num_fewshot": shots, "limit": limit, "bootstrap_iters": 0, "task_manager": manager, **seeds}
    report = simple_evaluate(model=lm, tasks=known, log_samples=False, **options)
    rows = []
    for task, scores in report["results"].items():
        for name, value in scores.items():
            metric, _, kept = name.partition(",")
            if isinstance(value, float) and not metric.endswith("_stderr"):
                samples = report["n-samples"].get(task, {}).get("effective", 0)
                row = {"cache": str(lm.method), "mode": f"in-the-loop-chunk{lm.chunk}", "task": task}
                rows.append(row | {"metric": metric, "filter": kept, "samples": samples, "score": value})
    return rows
