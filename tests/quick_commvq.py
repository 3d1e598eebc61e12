"""CommVQ at a size that trains in seconds."""

from kvqjax import commvq
from kvqjax.calibrate.commvq import Recipe
from kvqjax.calibrate.commvq_em import EMSettings
from kvqjax.calibrate.commvq_values import ValueSettings

METHOD = commvq(bits=2, rounds=4, levels=8, hidden=32, window=32, unit=32, sinks=1)


QUICK = Recipe(
    keys=EMSettings(steps=6, batch=64), values=ValueSettings(steps=120, warmup=5), key_tokens=256
)
