"""Tasks of lm-evaluation-harness through a compressed cache, in one process.

`CacheLM` shows a model and a cache to the harness as one of its models: every scored token has
passed through the cache. The harness's own models score a whole text in one forward pass, which no
cache takes part in; here the text enters the cache a chunk at a time, and later chunks see earlier
ones compressed. Answers are generated through the cache, behind a prompt that enters it in chunks
too or, as KIVI's authors evaluate, is prefilled exactly.
"""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvqjax._errors import UserError
from kvqjax.cache import CacheLayout
from kvqjax.eval.scores import negative_log_likelihood, through
from kvqjax.generation.decoding import generate
from kvqjax.generation.prompt_ids import bucket, chat_text
from kvqjax.methods import MethodLike, parse
from kvqjax.model.loading import Model
from kvqjax.step.new_cache import empty_cache, planned_layout

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import truncate_tokens
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise UserError(f"the harness needs lm-eval: pip install lm-eval datasets ({error})") from error

SCORED_CHUNK = 32  # tokens of a scored text that enter the cache at a time, where nothing is said
SIDES = ("left", "middle")  # where a text that is too long is cut
EXAMPLE = '{"gsm8k": [0, 1, 2]}'


# --- A model of the harness's


@functools.partial(jax.jit, static_argnames=("layout", "chunk"))
def score_rows(
    model: Model,
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"],
    layout: CacheLayout,
    chunk: int,
) -> tuple[Float[Array, "B N"], Bool[Array, "B N"]]:
    """Compute the log-probability (nats) of the token after each position of each row, and whether
    it is the likeliest. N is T rounded up to whole chunks; entries from position `counts[b] - 1` on
    mean nothing."""

    def score(logits, targets, valid):
        return -negative_log_likelihood(logits[0], targets), logits[0].argmax(-1) == targets

    cache = empty_cache(model, layout, len(tokens))
    values, greedy = through((model,), (cache,), tokens, counts, chunk, score)

    def flat(x):
        return jnp.moveaxis(x, 0, 1).reshape(tokens.shape[0], -1)

    return flat(values), flat(greedy)


class CacheLM(TemplateLM):
    """Show a model and a cache to the harness as one of its models.

    chunk: tokens that enter the cache at a time; None: prompts of answers are prefilled exactly,
    and scored texts, which no other way would pass through the cache, enter SCORED_CHUNK at a time.
    batch: rows at a time. max_length: longest text in tokens, answer included (default: the model's
    positions). cut: what a longer one loses, its beginning ("left", what the harness's own models
    do) or its "middle" (LongBench); `cut_texts` of `texts` were cut.
    kernels: as in `init_cache`."""

    def __init__(
        self,
        model: Model,
        method: MethodLike,
        *,
        chunk: int | None = None,
        batch: int = 8,
        max_length: int | None = None,
        cut: str = "left",
        kernels: str = "auto",
    ) -> None:
        super().__init__()
        if (chunk is not None and chunk < 1) or batch < 1:
            raise UserError(f"chunk={chunk} and batch={batch}; at least 1 is needed")
        if cut not in SIDES:
            raise UserError(f"cut={cut!r}; known: {', '.join(SIDES)}")
        self.model = model
        self.method = parse(method)
        self.chunk = chunk
        self.batch = batch
        self.cut = cut
        self.kernels = kernels
        self.cut_texts = 0
        self.texts = 0
        self.max_length = max_length or model.config.max_position
        self.tokenizer = model.tokenizer

    def mode(self, output_type: str) -> str:
        """Name how the tokens of tasks of one of the harness's output types pass through the
        cache."""
        if self.chunk is None and output_type == "generate_until":
            return "prefill-exact"
        return f"in-the-loop-chunk{self.chunk or SCORED_CHUNK}"

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

    def apply_chat_template(
        self, chat_history: list[dict], add_generation_prompt: bool = True
    ) -> str:
        """Put a conversation through the tokenizer's chat template."""
        end = "answer" if add_generation_prompt else "message"
        return chat_text(self.model, chat_history, end)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Encode a text. Unless told otherwise, special tokens are added as the tokenizer does,
        once. `loglikelihood_rolling` puts the begin token before these ids."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        return self.model.encode(string, add_special_tokens)

    def _fitted(self, ids: list[int], room: int) -> list[int]:
        """Leave out tokens on the side `cut` where there are more than `room`."""
        self.texts += 1
        if len(ids) <= room:
            return ids
        self.cut_texts += 1
        return truncate_tokens(ids, room, self.cut)

    def _loglikelihood_tokens(
        self, requests: Sequence, disable_tqdm: bool = False, **_: Any
    ) -> list:
        """Score continuations.

        Args:
            requests: (texts, context ids, continuation ids). Rows of like length share a batch, and
                a batch is always full: few programs.

        Returns:
            (log-probability, whether greedy decoding gives it) of each continuation.
        """
        most = self.max_length + 1  # the last token is only predicted
        rows = []
        goal_lengths = []
        for _, context, goal in requests:
            goal = goal[-most + 1 :]
            rows.append([*self._fitted(context, most - len(goal)), *goal])
            goal_lengths.append(len(goal))
        longest_first = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
        scores: dict[int, tuple[float, bool]] = {}
        for start in range(0, len(rows), self.batch):
            part = longest_first[start : start + self.batch]
            # Rows that a last batch lacks are two tokens long: one, and one that is predicted.
            counts = np.full(self.batch, 2, np.int32)
            tokens = np.zeros((self.batch, bucket(len(rows[part[0]]))), np.int32)
            for place, number in enumerate(part):
                ids = rows[number]
                tokens[place, : len(ids)] = ids
                counts[place] = len(ids)
            chunk = min(self.chunk or SCORED_CHUNK, tokens.shape[1])
            layout = planned_layout(self.model, self.method, *tokens.shape, kernels=self.kernels)
            values, greedy = score_rows(
                self.model, jnp.asarray(tokens), jnp.asarray(counts), layout, chunk
            )
            values = np.asarray(values)
            greedy = np.asarray(greedy)
            for place, number in enumerate(part):
                # The score of a token stands at the position before it.
                end = len(rows[number]) - 1
                span = slice(max(end - goal_lengths[number], 0), end)
                scores[number] = (float(values[place, span].sum()), bool(greedy[place, span].all()))
        return [scores[number] for number in range(len(rows))]

    def loglikelihood_rolling(self, requests: Sequence, disable_tqdm: bool = False) -> list[float]:
        """Score each whole text, in disjoint windows of `max_length` tokens. As in the
        harness's own models, a text is scored behind the begin token. Where the tokenizer writes
        one itself, it is scored too."""
        options = {
            "prefix_token": self.prefix_token_id,
            "max_seq_len": self.max_length,
            "context_len": 1,
        }
        totals = []
        for request in requests:
            (text,) = request.args
            cut = get_rolling_token_windows(token_list=self.tok_encode(text), **options)
            windows = [(None, *make_disjoint_window(window)) for window in cut]
            scores = self._loglikelihood_tokens(windows)
            totals.append(sum(value for value, _ in scores))
        return totals

    def generate_until(self, requests: Sequence, disable_tqdm: bool = False) -> list[str]:
        """Continue each prompt up to a stop string, greedily unless the task samples. A prompt that
        leaves no room for the answer is cut."""
        # Prompts with the same options share batches.
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            key = json.dumps(request.args[1], sort_keys=True)
            groups.setdefault(key, []).append(number)
        texts: dict[int, str] = {}
        for key, members in groups.items():
            options, stops, new = _generation(json.loads(key))
            room = self.max_length - new
            if room < 1:
                raise UserError(
                    f"{new} new tokens leave no room for a prompt within {self.max_length}"
                )
            ids = {}
            for number in members:
                text = requests[number].args[0]
                ids[number] = self._fitted(self.tok_encode(text), room)
            longest_first = sorted(members, key=lambda number: -len(ids[number]))
            for start in range(0, len(members), self.batch):
                part = longest_first[start : start + self.batch]
                # Only the text is kept: a result holds its cache.
                answers = generate(
                    self.model,
                    [ids[number] for number in part],
                    self.method,
                    chunk=self.chunk,
                    stop=stops,
                    kernels=self.kernels,
                    beyond_trained=True,  # up to max_length, which was asked for
                    **options,
                ).text
                texts |= dict(zip(part, answers, strict=True))
        return [texts[number] for number in range(len(requests))]


def _generation(arguments: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...], int]:
    """Read a task's generation arguments.

    Returns:
        Options of `generate`, the stop strings, and the most new tokens.
    """
    stops = arguments.get("until") or []
    if isinstance(stops, str):
        stops = [stops]
    new = 256
    for alias in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"):
        if alias in arguments:
            new = int(arguments[alias])
            break
    options: dict[str, Any] = {"max_new_tokens": new}
    if arguments.get("do_sample"):
        for name in ("temperature", "top_k", "top_p", "min_p"):
            if name in arguments:
                options[name] = arguments[name]
    return options, tuple(stop for stop in stops if stop), new


# --- Options as lm-eval reads them


def read_metadata(texts: Iterable[str]) -> dict[str, Any]:
    """Read the metadata of tasks from JSON objects and from "key=value", as lm-eval's own option
    takes them. A value is JSON if it can be read as such. Raises UserError."""
    metadata: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if equals and key.strip().isidentifier():
            try:
                metadata[key.strip()] = json.loads(value)
            except ValueError:
                metadata[key.strip()] = value
            continue
        try:
            metadata |= json.loads(text)
        except (TypeError, ValueError) as error:
            raise UserError(f"metadata={text!r}: neither a JSON object nor key=value") from error
    return metadata


def read_samples(text: str | None) -> dict[str, list[int]] | None:
    """Read the samples of each task from the JSON that lm-eval's option of this name takes. Raises
    UserError."""
    if text is None:
        return None
    try:
        samples = json.loads(text)
    except ValueError as error:
        hint = "limit=N takes N samples of every task"
        raise UserError(f"samples={text!r}: not JSON such as {EXAMPLE}; {hint}") from error
    if isinstance(samples, int | float):
        hint = f"limit={text} takes {text} samples of every task"
        raise UserError(f"samples={text}: wanted JSON such as {EXAMPLE}; {hint}")
    if not isinstance(samples, dict) or not all(map(_is_numbers, samples.values())):
        raise UserError(f"samples={text!r}: wanted JSON such as {EXAMPLE}")
    return samples


def _is_numbers(value: Any) -> bool:
    """Say whether a value is a list of numbers of samples."""
    if not isinstance(value, list) or not value:
        return False
    return all(type(number) is int and number >= 0 for number in value)


# --- Running its tasks


def _check_limit(limit: int | float | None) -> int | float | None:
    """Check a number of samples of every task, or below 1 a share of them."""
    if limit is None or 0 < limit < 1:
        return limit
    if limit < 1 or limit != int(limit):
        raise UserError(f"limit={limit:g}; wanted a number of samples, or a share of them below 1")
    return int(limit)


def _manager(include: Path | None, metadata: dict[str, Any], samples: dict[str, list[int]] | None):
    """Make the harness's manager of tasks. It raises UserError for a task whose data cannot be
    loaded, and for one that has fewer samples than `samples` names."""
    from lm_eval.tasks import TaskManager

    class Manager(TaskManager):
        def load(self, task_list):
            try:
                loaded = super().load(task_list)
            # Tasks are programs and data of others: errors of the hub, of `datasets`, of packages
            # that they need.
            except Exception as error:
                names = ", ".join(map(str, task_list))[:100]
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                hint = "download the data where there is a network, or name a task of your own with {include}"
                cause = f"the harness cannot load the data of {names}: {reason}"
                raise UserError(cause, hint, include=None) from error
            for name, numbers in (samples or {}).items():
                task = loaded["tasks"].get(name)
                if task is None:
                    known = ", ".join(loaded["tasks"])
                    raise UserError(f"samples: {name!r} is none of the tasks {known}")
                size = len(task.eval_docs)
                if max(numbers) >= size:
                    raise UserError(
                        f"samples: {name} has {size} samples, numbered from 0; {max(numbers)} was wanted"
                    )
            return loaded

    return Manager(include_path=None if include is None else str(include), metadata=metadata)


def _leaves(task: str, groups: dict[str, list[str]]) -> list[str]:
    """List the tasks that a group and its groups are made of; a task is its own."""
    children = groups.get(task)
    if children is None:
        return [task]
    leaves = []
    for name in children:
        leaves += _leaves(name, groups)
    return leaves


def _rows(lm: CacheLM, report: dict[str, Any]) -> list[dict[str, Any]]:
    """Make a row of each task or group, filter and metric of the harness's report."""
    rows = []
    for task, scores in report["results"].items():
        leaves = _leaves(task, report["group_subtasks"])
        modes = [lm.mode(report["configs"][leaf]["output_type"]) for leaf in leaves]
        samples = sum(report["n-samples"][leaf]["effective"] for leaf in leaves)
        mode = ", ".join(dict.fromkeys(modes))
        for name, value in scores.items():
            metric, _, filter_name = name.partition(",")
            if not isinstance(value, float) or metric.endswith("_stderr"):
                continue
            rows.append(
                {
                    "cache": str(lm.method),
                    "mode": mode,
                    "task": task,
                    "metric": metric,
                    "filter": filter_name,
                    "samples": samples,
                    "score": value,
                    "cut": lm.cut_texts,
                    "texts": lm.texts,
                }
            )
    return rows


def run_harness(
    lm: CacheLM,
    tasks: Sequence[str],
    *,
    shots: int | None = None,
    limit: int | float | None = None,
    samples: dict[str, list[int]] | None = None,
    seed: int = 0,
    include: Path | None = None,
    chat: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Run tasks or groups of the harness, or of YAML files in `include`.

    Args:
        lm: the model and the cache.
        tasks: names of tasks or groups.
        shots: worked examples before each sample; None: the task's own number.
        limit: samples of every task, or below 1 a share of them; None: all.
        samples: which samples of which task, by number, instead of `limit`.
        seed: of everything that is drawn.
        include: a folder with YAML files of more tasks.
        chat: put prompts through the model's chat template.
        metadata: what tasks are told beside where the model's tokenizer is (RULER makes prompts of
            `max_seq_lengths` tokens).

    Returns:
        A row for each task or group, filter and metric. `cut` of a row is how many of the run's
        `texts` were too long.

    Raises:
        UserError: for tasks that are not known, or whose data cannot be had.
    """
    from lm_eval.evaluator import simple_evaluate

    if limit is not None and samples is not None:
        raise UserError("limit and samples exclude each other")
    limit = _check_limit(limit)
    manager = _manager(include, {"tokenizer": lm.model.folder, **(metadata or {})}, samples)
    task_names = manager.match_tasks(list(tasks))
    missing = [name for name in tasks if not manager.match_tasks([name])]
    if missing:
        raise UserError(f"the harness does not know the tasks {', '.join(missing)}")
    report = simple_evaluate(
        model=lm,
        tasks=task_names,
        task_manager=manager,
        num_fewshot=shots,
        limit=limit,
        samples=samples,
        bootstrap_iters=0,
        log_samples=False,
        apply_chat_template=chat,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
    )
    return _rows(lm, report)


def cut_warning(rows: Iterable[dict[str, Any]], length: int) -> str:
    """Return the first line of a report if more than a tenth of a run's texts were cut, else ""."""
    # There are no rows where no metric of a task is a number.
    counts = [(row["cut"], row["texts"]) for row in rows]
    cut, texts = max(counts, key=lambda pair: pair[0] / max(pair[1], 1), default=(0, 0))
    if cut * 10 <= texts:
        return ""
    return f"{cut} of {texts} texts were longer than {length} tokens and were cut: these are not the tasks' own scores"
