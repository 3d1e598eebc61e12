"""/tokenize and /detokenize: texts as token ids and back, in the form of vLLM's answers."""

from typing import Any

from kvqjax._errors import UserError
from kvqjax.generation.prompt_ids import check_vocabulary
from kvqjax.model.loading import Model
from kvqjax.model.token_bytes import token_bytes
from kvqjax.model.tokenizer_calls import decoded
from kvqjax.serving.engine import Engine
from kvqjax.serving.protocol import TextBody, read_detokenize, read_tokenize
from kvqjax.serving.tools import tools_text


def tokenized(engine: Engine, name: str, raw: bytes) -> dict[str, Any]:
    """Answer /tokenize.

    Args:
        engine: whose tokenizer it is.
        name: of the model, as clients write it.

    Returns:
        The object of the answer: count, max_model_len, tokens, and token_strs, which are the
            vocabulary's spellings.

    Raises:
        UserError: no such body, or a text that the tokenizer does not take.
        NotFound: another model is asked for.
    """
    body, model = read_tokenize(raw, name), engine.model
    _require_tokenizer(model)
    ids = model.encode(_text(model, body), body.add_special_tokens)
    table = token_bytes(model.tokenizer)
    strings = [table.spelling(token) for token in ids] if body.with_strings else None
    return {
        "count": len(ids),
        "max_model_len": engine.capacity,
        "tokens": ids,
        "token_strs": strings,
    }


def _text(model: Model, body: TextBody) -> str:
    if body.messages is not None:
        end = "answer" if body.add_generation_prompt else "message"
        return tools_text(model, body.messages, body.use, end)
    return body.prompt or ""


def detokenized(engine: Engine, name: str, raw: bytes) -> dict[str, Any]:
    """Answer /detokenize.

    Args:
        engine: whose tokenizer it is.
        name: of the model, as clients write it.

    Returns:
        The object of the answer: `prompt`, the text with its special tokens.

    Raises:
        UserError: no such body, or ids that the model lacks.
        NotFound: another model is asked for.
    """
    tokens, model = read_detokenize(raw, name), engine.model
    _require_tokenizer(model)
    if tokens:
        check_vocabulary(model, 0, tokens)
    return {"prompt": decoded(model.tokenizer, tokens, False)}


def _require_tokenizer(model: Model) -> None:
    if not model.has_tokenizer:
        raise UserError("this model has no tokenizer; send token ids to /v1/completions")
