"""Configs of common models by name, shipped as JSON facts (assets/configs), so that planning works offline."""

from pathlib import Path

from kvqjax._errors import UserError, suggest
from kvqjax.model.config import ModelConfig
from kvqjax.model.hf_config import read_config
from kvqjax.model.loading import BUNDLED, locate

__all__ = ["KNOWN", "config_of"]

_FOLDER = Path(__file__).parents[1] / "assets" / "configs"

KNOWN = tuple(sorted(file.stem for file in _FOLDER.glob("*.json")))


def config_of(name: str) -> ModelConfig:
    """The config of a bundled model, a folder or config.json, a known model ("llama-3.1-8b"; of a hub id the part after
    the slash counts, in any case), or a hub id that is downloaded. Raises UserError with the nearest known name."""
    path = Path(name).expanduser()
    if path.suffix == ".json" or path.is_dir():
        return read_config(path)
    short = name.rpartition("/")[2].lower()
    if name not in BUNDLED and short in KNOWN:
        return read_config(_FOLDER / f"{short}.json")
    if name not in BUNDLED and "/" not in name:
        raise UserError(f"{name}: no such folder and no known model{suggest(short, (*BUNDLED, *KNOWN))}")
    return read_config(locate(name))
