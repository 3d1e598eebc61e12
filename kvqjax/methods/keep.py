"""Which tokens a cache keeps when it may not keep all: a policy beside every method, which knows nothing of it.

    streaming:512   the newest 512 tokens that left the window (StreamingLLM, arXiv 2309.17453: sinks + recent)
    h2o:512         the 512 that were attended to most (heavy-hitter oracle, arXiv 2306.14048, section 4)

Sinks and window stay beside them. Tokens are chosen per row for all layers and heads together, keep their positions,
and leave the body by whole groups (kvqjax.cache.eviction)."""

import dataclasses

from kvqjax._arguments import check_fields, named
from kvqjax._errors import UserError

__all__ = ["Keep", "read_keep"]

RULES = ("streaming", "h2o")


@dataclasses.dataclass(frozen=True)
class Keep:
    """`budget` tokens of each row stay in the body, chosen by `rule`."""

    rule: str
    budget: int

    def __post_init__(self):
        check_fields(self)
        if self.rule not in RULES or self.budget < 1:
            raise UserError(f"keep={self}; {_WANTED}")

    def __str__(self) -> str:
        return f"{self.rule}:{self.budget}"


_WANTED = f"wanted a rule ({', '.join(RULES)}) and a count of tokens, such as h2o:512"


def read_keep(text: str | Keep) -> Keep:
    """Read `rule:tokens`. Raises UserError on anything else."""
    if isinstance(text, Keep):
        return text
    if not isinstance(text, str):
        raise UserError(f"keep is {named(text)}; {_WANTED}")
    rule, _, budget = text.partition(":")
    if not budget.isdecimal():
        raise UserError(f"keep={text}; {_WANTED}")
    return Keep(rule, int(budget))
