"""The options of `kvqjax.generate` that the commands which make text have in common."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvqjax._arguments import MOST, MOST_SEED, whole_number
from kvqjax._errors import UserError
from kvqjax._files import decode_text
from kvqjax._options import with_parameters
from kvqjax.cli.common import number
from kvqjax.generation.options import MOST_PENALTY, NO_LIMIT, RANDOM, GenerateOptions

PANEL = {"rich_help_panel": "How tokens are drawn, and what ends a text"}
MOST_FLOAT = 10_000  # temperature, and repetition penalty: far beyond what anybody uses

# Name of a field of `GenerateOptions` -> its type and option here. `eos_ids` is --end of
# `kvqjax generate`.
BEYOND_TRAINED = "let texts become longer than the model was trained for"

OPTIONS: dict[str, Any] = {
    "stop": Annotated[
        list[str], typer.Option("--stop", help="end at this text; repeatable", **PANEL)
    ],
    "stop_token_ids": Annotated[
        list[int],
        number(
            "--stop-token-ids", least=0, most=MOST, help="end at this token; repeatable", **PANEL
        ),
    ],
    "ignore_eos": Annotated[
        bool, typer.Option("--ignore-eos", help="go on after the model's end tokens", **PANEL)
    ],
    "min_tokens": Annotated[
        int,
        number(
            "--min-tokens",
            least=0,
            help="no end token and no --stop before so many tokens",
            **PANEL,
        ),
    ],
    "beyond_trained": Annotated[
        bool, typer.Option("--beyond-trained", help=BEYOND_TRAINED, **PANEL)
    ],
    "seed": Annotated[
        int,
        number(
            "--seed", least=RANDOM, most=MOST_SEED, help="of the draws; -1: one at random", **PANEL
        ),
    ],
    "temperature": Annotated[
        float,
        number(
            "--temperature", least=0, most=MOST_FLOAT, help="0: always the likeliest token", **PANEL
        ),
    ],
    "top_k": Annotated[
        int,
        number(
            "--top-k", least=NO_LIMIT, help="draw from the K likeliest; 0 or -1: from all", **PANEL
        ),
    ],
    "top_p": Annotated[
        float,
        number(
            "--top-p",
            least=0,
            most=1,
            help="draw from the likeliest tokens that together have this probability",
            **PANEL,
        ),
    ],
    "min_p": Annotated[
        float,
        number(
            "--min-p",
            least=0,
            most=1,
            help="leave out tokens less likely than this share of the likeliest",
            **PANEL,
        ),
    ],
    "repetition_penalty": Annotated[
        float,
        number(
            "--repetition-penalty",
            least=0,
            most=MOST_FLOAT,
            help="above 1: tokens that occurred already become less likely",
            **PANEL,
        ),
    ],
    "presence_penalty": Annotated[
        float,
        number(
            "--presence-penalty",
            least=-MOST_PENALTY,
            most=MOST_PENALTY,
            help="taken off the logits of tokens that the answer has",
            **PANEL,
        ),
    ],
    "frequency_penalty": Annotated[
        float,
        number(
            "--frequency-penalty",
            least=-MOST_PENALTY,
            most=MOST_PENALTY,
            help="the same, once for each time that it has them",
            **PANEL,
        ),
    ],
    "logit_bias": Annotated[
        list[str],
        typer.Option(
            "--logit-bias", metavar="ID=NUMBER", help="add to a token's logit; repeatable", **PANEL
        ),
    ],
    "grammar": Annotated[
        str | None,
        typer.Option(
            "--grammar",
            metavar="TEXT",
            help="what texts may be: json, schema:JSON, regex:TEXT or lark:TEXT; :@FILE reads a file",
            **PANEL,
        ),
    ],
}
DEFAULTS = {field.name: field.default for field in dataclasses.fields(GenerateOptions)}
REPEATED = ("stop", "stop_token_ids", "logit_bias")


# Gives a command these options, which are its `**options`.
with_generate_options = with_parameters(
    [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=[] if name in REPEATED else DEFAULTS[name],
            annotation=annotation,
        )
        for name, annotation in OPTIONS.items()
    ]
)


def read_generate_options(words: Mapping[str, Any]) -> dict[str, Any]:
    """Read what a command was given, as `generate` and `Session` take it.

    Raises:
        UserError: an option that cannot be, before any work begins.
    """
    if "" in words["stop"]:
        raise UserError("--stop '' would end every text before its first token")
    options = dict(words) | {
        "stop": tuple(words["stop"]),
        "logit_bias": _biases(words["logit_bias"]),
        "grammar": _grammar(words["grammar"]),
    }
    GenerateOptions(**options)
    return options


def _grammar(text: str | None) -> str | None:
    """Read a grammar, from the file that it names where it names one."""
    kind, _, name = (text or "").partition(":@")
    if not name:
        return text
    path = Path(name)
    try:
        return f"{kind}:{decode_text(path.read_bytes(), name)}"
    except OSError as error:
        raise UserError(f"{path}: not readable: {error.strerror}") from error


def _biases(texts: Sequence[str]) -> dict[int | str, int | float]:
    """Read tokens with numbers."""
    biases: dict[int | str, int | float] = {}
    for text in texts:
        token, _, value = text.partition("=")
        token_id = whole_number(token)
        try:
            bias = float(value)
        except ValueError:
            bias = None
        if token_id is None or bias is None:
            raise UserError(f"--logit-bias {text!r}; wanted ID=NUMBER, such as 50=-100")
        biases[token_id] = bias
    return biases
