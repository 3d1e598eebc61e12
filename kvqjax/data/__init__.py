"""Data for calibration and evaluation: files, folders, saved data sets and the hub as documents and
as token ids."""

from kvqjax.data.corpora import read
from kvqjax.data.documents import Data
from kvqjax.data.tokens import TextLike, data_or_ids, token_ids

__all__ = ["Data", "TextLike", "data_or_ids", "read", "token_ids"]
