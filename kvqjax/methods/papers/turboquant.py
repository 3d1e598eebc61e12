"""TurboQuant (arXiv 2504.19874): a random rotation and one scalar grid. In this library it is HIGGS
with grids of one dimension, one scale a head, and its transform in the frame: queries are rotated
instead of cached keys."""

from kvqjax._arguments import check_integer
from kvqjax._errors import UserError
from kvqjax.codecs.centring import centred
from kvqjax.codecs.exact import Exact
from kvqjax.codecs.higgs import Higgs
from kvqjax.codecs.uniform import Uniform
from kvqjax.methods.keys_values import KeysAndValues
from kvqjax.methods.spec import Method, first_layers, method_factory, value_or
from kvqjax.ops.packing.base import PLANE

FORMS = {"paper": 0, "vllm": 2}  # form -> exact layers at each end


@method_factory
def turboquant(
    *,
    bits: int = 4,
    key_bits: int | None = None,
    value_bits: int | None = None,
    form: str = "paper",
    boundary: int | None = None,
    seed: int = 0,
    norm: str = "corrected",
    window: int = 0,
    sinks: int = 0,
    scales: str = "bfloat16",
    centre: str = "auto",
) -> Method:
    """TurboQuant (arXiv 2504.19874), in its form of least squared error. Rotated keys and values
    are divided by their norm, one for each token and head. Their numbers get the nearest points of
    the scalar grid that is best for a normal distribution. Nothing is calibrated.

    `bits` per number, 2 to 4 (`key_bits` and `value_bits` override it). `form="paper"` rotates keys
    and values with random signs (`seed`). `form="vllm"` does as that engine: no signs, values
    unrotated between their minimum and maximum, and `boundary` exact layers at each end (2 there,
    else 0). `norm` as in `higgs`: "corrected" as in that engine, "unbiased" keeps the scores of
    keys. `window` newest and `sinks` first tokens stay exact; `scales` is the dtype of norms;
    `centre` as in `higgs`. With the defaults, Llama-3.1-8B stores 4.125 bits per channel. Raises
    UserError for values that are not listed here.
    """
    if form not in FORMS:
        raise UserError(f"form={form!r}; known: {', '.join(FORMS)}")
    check_integer("seed", seed, 0)
    ends = FORMS[form] if boundary is None else boundary
    grid = {"dim": 1, "group": "head", "dtype": scales, "rotated": True, "norm": norm}
    key = Higgs(bits=value_or(key_bits, bits), **grid)
    if form == "paper":
        value = Higgs(bits=value_or(value_bits, bits), **grid)
        rotations = (f"signs:{seed}", f"signs:{seed}")
    else:
        value = Uniform(bits=value_or(value_bits, bits), along="channels", group=0, dtype=scales)
        rotations = ("hadamard", "none")
    layer = KeysAndValues(
        key=centred(key, centre),
        value=value,
        window=window,
        unit=PLANE,
        unbiased=centre == "auto",
        key_rotation=rotations[0],
        value_rotation=rotations[1],
    )
    exact = KeysAndValues(key=Exact(), value=Exact(), window=window, unit=PLANE)
    overrides = tuple(
        (number, exact)
        for first in first_layers("boundary", ends)
        for number in (first, -1 - first)
    )
    return Method(name="turboquant", layer=layer, sinks=sinks, overrides=overrides, boundary=ends)
