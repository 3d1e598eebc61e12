"""A model as one value, and where models come from: bundled, fetched, a folder, a GGUF file, or the
Hugging Face hub.

Configs of common models are shipped as JSON facts (assets/configs), so that planning works offline.
"""

import dataclasses
import math
import os
import re
import sys
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from kvqjax._arguments import check_counts, named
from kvqjax._errors import TooLong, UserError, suggest
from kvqjax._files import FileState, path_of, read_object
from kvqjax._options import named_options
from kvqjax.model.checkpoint import fingerprint, fingerprint_parts
from kvqjax.model.config import ModelConfig
from kvqjax.model.fetch import FETCHED, fetched
from kvqjax.model.gguf_file import is_gguf, read_header
from kvqjax.model.gguf_tokenizer import has_tokenizer
from kvqjax.model.hf_config import read_config
from kvqjax.model.token_bytes import least_tokens
from kvqjax.model.tokenizer import TOKENIZER_FILES, open_tokenizer, tokenizer_files
from kvqjax.model.tokenizer_calls import encoded
from kvqjax.model.weight_codes import CodedWeight
from kvqjax.model.weight_trees import (
    FORMS,
    LayerMatrices,
    Params,
    is_unrolled,
    layers_of,
    stack_of,
    stored_layers,
)
from kvqjax.model.weights import ShardingRule, load_params

_ASSETS = Path(__file__).parents[1] / "assets"
_CONFIGS = _ASSETS / "configs"

BUNDLED = ("demo", "recall")  # models whose weights come with the library
# Models whose configs come with it.
KNOWN = tuple(sorted(file.stem for file in _CONFIGS.glob("*.json")))
CODED_WEIGHTS = {"int8": 8, "int4": 4}  # bits of a code

_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.txt", "*.jinja"]
# Mistral's second copy of the weights, folders of other formats.
_HUB_IGNORED = [
    "consolidated*",
    "*/*",
]
# Options of generation_config.json that draw a token, with their types. Without do_sample they do
# nothing.
_DRAWING = {"temperature": float, "top_k": int, "top_p": float, "min_p": float}


@runtime_checkable
class Placement(Protocol):
    """The part of the rules of a mesh (kvqjax/parallel/sharding.py) that `load` needs: the place of
    a parameter, by its name."""

    def placement(self, name: str) -> NamedSharding: ...


class Model(struct.PyTreeNode):
    """A pytree of the weights and a method's calibrated constants. The rest is static.

    Attributes:
        params: the weights (names in kvqjax/model/decoder.py). Their dtype is the compute dtype.
        constants: the constants of the artifact that was added last.
        others: those of the other artifacts.
        config: the config.
        fingerprint: the checkpoint's digests (kvqjax/model/checkpoint.py); "" for a model that is
            not of a folder.
        folder: the folder, or the GGUF file, with its tokenizer; "" likewise.
        rules: how the model and its caches lie on a mesh of devices (kvqjax/parallel/sharding.py);
            None: on one device.
        calibrated: the methods of `constants` and `others`, in this order.
        tokenizer_files: the states of the tokenizer's files when the model was loaded; (): the
            tokenizer is that of now.
    """

    params: Params
    constants: Any = None
    others: tuple[Any, ...] = ()
    config: ModelConfig = struct.field(pytree_node=False, kw_only=True)
    fingerprint: str = struct.field(pytree_node=False, default="")
    folder: str = struct.field(pytree_node=False, default="")
    rules: Any = struct.field(pytree_node=False, default=None)
    calibrated: tuple[Any, ...] = struct.field(pytree_node=False, default=())
    tokenizer_files: tuple[FileState, ...] = struct.field(pytree_node=False, default=())

    def __repr__(self) -> str:
        config = self.config
        # A tree map may have put something else in the place of arrays.
        leaves = [leaf for leaf in jax.tree.leaves(self.params) if hasattr(leaf, "shape")]
        kinds = ", ".join(dict.fromkeys(str(leaf.dtype) for leaf in leaves)) or "no arrays"
        numbers = sum(math.prod(leaf.shape) for leaf in leaves)
        facts = [f"{config.depth} layers of width {config.width}"]
        if config.recurrent:
            facts.append(f"{config.depth - config.num_layers} of them recurrent")
        facts.append(_heads_text(config))
        facts.append(f"{config.vocab_size} tokens")
        facts.append(f"{numbers:,} numbers in {kinds}")
        if jax.tree.leaves((self.constants, self.others)):
            facts.append("with calibrated constants")
        if self.rules:
            facts.append(f"on a mesh of {self.rules.mesh.size} devices")
        name = Path(self.folder).name or config.architecture
        return f"Model({name}: {', '.join(facts)})"

    def sampling_defaults(self) -> dict[str, Any]:
        """Give the sampling of the checkpoint's generation_config.json, as options of `generate` and
        `stream`. Only what asks for it uses it: `generate(model, prompts,
        **model.sampling_defaults())`."""
        if not self.folder:
            return {}
        return read_sampling(self.folder)

    @property
    def has_tokenizer(self) -> bool:
        """Say whether there is a tokenizer: `generate` on token ids goes without one."""
        if not self.folder:
            return False
        folder = Path(self.folder)
        if is_gguf(folder):
            return has_tokenizer(folder)
        return any((folder / name).exists() for name in TOKENIZER_FILES)

    @property
    def tokenizer(self):
        """The tokenizer of the model's folder, with the calls of a Hugging Face tokenizer
        (kvqjax/model/tokenizer.py). It is loaded at first use and kept outside the pytree."""
        if not self.folder:
            raise UserError("this model has no folder, so it has no tokenizer; pass token ids")
        return open_tokenizer(self.folder, self.tokenizer_files)

    @property
    def weights(self) -> str:
        """How the layers' matrices are kept: "int8", "int4", or their dtype."""
        layers = self.params["layers"]
        if is_unrolled(self.params):
            first = layers_of(self.params, "attention")[0]
            layers = layers[first]
        matrix = stack_of(layers["q"])
        if isinstance(matrix, LayerMatrices):
            matrix = matrix.matrices[0]
        if isinstance(matrix, CodedWeight):
            return matrix.kind
        return str(matrix.dtype)

    def encode(
        self, text: str, add_special_tokens: bool = True, most: int | None = None
    ) -> list[int]:
        """Encode a text: its token ids.

        Args:
            text: the text.
            add_special_tokens: put the tokenizer's own tokens around it.
            most: tokens that there is room for. A text that surely has more is refused before it is
                encoded, which takes seconds for one of megabytes.

        Returns:
            The ids. They may be more than `most`.

        Raises:
            UserError: no text, one that surely has more than `most` tokens, one that the tokenizer
                does not take, or an id that the model lacks: the tokenizer is another model's.
        """
        if not isinstance(text, str):
            raise UserError(f"encode takes one text, not a {type(text).__name__}")
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            reason = "half a surrogate pair, which is what bytes that are not UTF-8 become"
            raise UserError(f"the text has no character at place {error.start}: {reason}") from None
        tokenizer = self.tokenizer
        if most is not None and size > most:  # a token has a byte at least
            least = least_tokens(tokenizer, size)
            if least > most:
                raise TooLong(
                    least,
                    most,
                    f"a prompt of {size} bytes has {least} tokens or more, and {most} fit at most",
                )
        ids = encoded(tokenizer, text, add_special_tokens)
        count = self.config.vocab_size
        if ids and max(ids) >= count:
            raise UserError(
                f"{self.folder}: the tokenizer gives id {max(ids)}, the model has {count} ids; it may be another model's"  # noqa: E501
            )
        return ids

    def with_artifact(self, artifact) -> "Model":
        """Give this model with the artifact's `constants` beside those of artifacts of other
        methods: each cache takes its method's. Raises UserError when the artifact's `fingerprint`
        differs."""
        model_parts = fingerprint_parts(self.fingerprint)
        artifact_parts = fingerprint_parts(artifact.fingerprint)
        for field in dict.fromkeys([*model_parts, *artifact_parts]):
            model_digest = model_parts.get(field, "none")
            artifact_digest = artifact_parts.get(field, "none")
            if model_parts.get(field) != artifact_parts.get(field):
                raise UserError(
                    f"artifact is for another model: fingerprint {field} is {artifact_digest}, "
                    f"the model's is {model_digest}"
                )
        # A newer artifact of the same method takes the older one's place.
        constants_of = dict(zip(self.calibrated, (self.constants, *self.others), strict=False))
        constants_of.pop(artifact.method, None)
        return dataclasses.replace(
            self,
            constants=artifact.constants,
            calibrated=(artifact.method, *constants_of),
            others=tuple(constants_of.values()),
        )


def _heads_text(config: ModelConfig) -> str:
    """Say what heads a model has, in a few words."""
    if config.latent is None:
        return f"{config.num_heads} query and {config.num_kv_heads} KV heads of {config.head_dim}"
    return f"{config.num_heads} query heads on latents of {config.latent} + {config.head_dim - config.latent}"


def read_sampling(folder: str | Path) -> dict[str, Any]:
    """Read how a checkpoint's generation_config.json would sample.

    Returns:
        Options of `generate`: temperature, top_k, top_p and min_p where the file says do_sample,
        and repetition_penalty in any case. A file with `do_sample` alone gives temperature 1. {}
        without the file.

    Raises:
        UserError: for an option that is no number.
    """
    file = Path(folder) / "generation_config.json"
    raw = read_object(file) if file.exists() else {}
    samples = bool(raw.get("do_sample"))
    options: dict[str, Any] = {"temperature": 1.0} if samples else {}
    for name, kind in (_DRAWING | {"repetition_penalty": float}).items():
        value = raw.get(name)
        if value is None or (name in _DRAWING and not samples):
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # JSON spells infinities, and integers beyond any float.
        is_finite = is_number and abs(value) <= sys.float_info.max
        if not is_finite or kind(value) != value:
            raise UserError(f"{file}: {name}={value!r} is not of type {kind.__name__}")
        options[name] = kind(value)
    return options


# --- Where models come from ---


def locate(name: str | Path) -> Path:
    """Find the folder of a model, which is downloaded where only the hub has it.

    Args:
        name: a bundled model ("demo"), one that `kvqjax fetch` brings ("smollm2"), a path
            ("./demo", "model.gguf"), or a hub id ("owner/name", "owner/name/file.gguf"), looked for
            in this order.

    Returns:
        The folder, or the GGUF file.

    Raises:
        UserError: for a name that is none of these, a model that is not installed or not fetched,
            or a failed download.
    """
    if not isinstance(name, str | os.PathLike):
        raise UserError(
            f"model is {named(name)}; wanted a name, the path of a folder or of a .gguf file, or a hub id"
        )
    if name in BUNDLED:
        return _bundled(str(name))
    if name in FETCHED:
        return fetched(str(name))
    folder = path_of(name)
    if folder.is_dir():
        return _single_file(folder)
    hub_file = isinstance(name, str) and re.fullmatch(
        r"(\w[\w.-]*/\w[\w.-]*)/(\w[\w./-]*\.gguf)", name
    )
    if hub_file and ".." not in name and not folder.exists():
        return _download_file(*hub_file.groups())
    if is_gguf(folder):
        read_header(folder)
        return folder
    if folder.exists():
        raise UserError(f"{folder}: a file; wanted the folder of a model, or a .gguf file")
    if isinstance(name, str) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) and ".." not in name:
        return _download(name)
    bundled = ", ".join(BUNDLED)
    raise UserError(
        f"{name}: no such folder, nor a hub id (owner/name) nor a bundled model ({bundled})"
    )


def _single_file(folder: Path) -> Path:
    """Find the one GGUF file of a folder that holds no other model; the folder itself otherwise."""
    if (folder / "config.json").exists():
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        raise UserError(f"{folder}: {len(files)} GGUF files; name one, such as {files[0]}")
    return files[0] if files else folder


def _bundled(name: str) -> Path:
    """Find the folder of a bundled model, of which an installation may lack some."""
    models = [model for model in BUNDLED if (_ASSETS / model / "config.json").exists()]
    if name not in models:
        names = ", ".join(models) or "none"
        raise UserError(f"bundled model {name!r} is not in this installation; it has: {names}")
    return _ASSETS / name


def _download(name: str) -> Path:
    """Download a repository of the hub. Its client keeps what it has downloaded before."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED)
        return Path(folder)
    # The hub client raises its own, its HTTP library's and the system's errors; all of them mean
    # "not reachable".
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{name!r} is no folder here and could not be had from the hub: {reason}"
        ) from error


def _download_file(repository: str, file: str) -> Path:
    """Download one GGUF file of a repository, which may have many."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, file))
    except Exception as error:  # as in `_download`
        reason = " ".join(str(error).split())[:200]
        name = f"{repository}/{file}"
        raise UserError(
            f"{name!r} is no file here and could not be had from the hub: {reason}"
        ) from error


def config_of(name: str) -> ModelConfig:
    """Read a model's config by its name, for planning.

    Args:
        name: a bundled or fetched model, a folder, config.json or GGUF file, a known model
            ("llama-3.1-8b"; of a hub id the part after the slash counts, in any case), or a hub id
            that is downloaded.

    Raises:
        UserError: with the nearest known name for an unknown one, or as `read_config` does.
    """
    path = path_of(name)
    has_weights = name in BUNDLED or name in FETCHED
    if not has_weights and path.suffix == ".json":
        return read_config(path)
    if not has_weights and (path.is_dir() or is_gguf(path)):
        return read_config(locate(name))
    short = name.rpartition("/")[2].lower()
    if not has_weights and short in KNOWN:
        return read_config(_CONFIGS / f"{short}.json")
    if not has_weights and "/" not in name:
        hint = suggest(short, (*BUNDLED, *FETCHED, *KNOWN))
        raise UserError(f"{name}: no such folder and no known model{hint}")
    return read_config(locate(name))


def name_of(model: Model) -> str:
    """Give the argument by which `load` finds a model: a bundled name, its folder or its GGUF file.
    "" if there is none."""
    folder = Path(model.folder)
    return folder.name if folder.parent == _ASSETS else model.folder


# --- Loading ---


def compute_dtype(dtype: Any) -> jnp.dtype:
    """Read a compute policy.

    Args:
        dtype: a short name ("bf16"), a full one, or whatever jnp.dtype reads. None: float32 on the
            CPU backend, bfloat16 elsewhere.

    Raises:
        UserError: for a dtype in which nothing is computed here.
    """
    if dtype is None:
        dtype = "f32" if jax.default_backend() == "cpu" else "bf16"
    full = dtype
    if isinstance(dtype, str):
        full = _DTYPES.get(dtype, dtype)
    try:
        name = jnp.dtype(full).name
    except TypeError:
        name = ""
    if name not in _DTYPES.values():
        names = ", ".join(f"{short} or {name}" for short, name in _DTYPES.items())
        raise UserError(f"dtype {dtype!r} is unknown; known: {names}")
    return jnp.dtype(name)


@named_options
def load(
    name: str | Path,
    *,
    dtype: DTypeLike | None = None,
    sharding: ShardingRule | Placement | None = None,
    weights: str | None = None,
    layers: str | None = None,
    text_only: bool = False,
    rope_length: int | None = None,
) -> Model:
    """Load a model. Code from a checkpoint is never run.

    Args:
        name: a bundled or fetched name, a folder, a GGUF file or a hub id, looked for in this
            order; "./demo" is always a folder.
        dtype: the compute policy: "bfloat16", "float16" (T4), "float32", their short forms "bf16",
            "f16", "f32", or a jnp dtype. None: float32 on the CPU backend, bfloat16 elsewhere.
        sharding: the rules of a mesh (kvqjax.parallel.sharding.rules_for): every host reads only
            what its devices hold. Or `sharding(parameter name)` gives each parameter's placement
            alone (kvqjax.model.weights.load_params).
        weights: "int8" or "int4" keeps the layers' matrices as integers with a scale per 128
            inputs. The compute dtype stays.
        layers: "scan" keeps layers as stacks, which compile fast. "unroll" keeps each by itself,
            which XLA for GPUs reads at half the cost; its caches are stored likewise. "switch"
            keeps each matrix by itself, which XLA for CPUs reads at half the cost, and compiles in
            a third of the time of "unroll" (kvqjax/model/decoder.py).
            None: unroll on GPUs, switch on CPUs but for tiny models, scan on TPUs.
        text_only: load the language part of a checkpoint of pictures and text, which is refused
            otherwise.
        rope_length: how long texts may become. The kinds dynamic and longrope have other
            frequencies for texts longer than the length that the model was first trained on. None:
            texts up to that length. Other kinds of rope ignore it.

    Returns:
        The model.

    Raises:
        UserError: with one line that names the cause.
    """
    compute = compute_dtype(dtype)
    if layers not in (None, *FORMS):
        raise UserError(f"layers={layers!r}; known: {', '.join(FORMS)}")
    if weights is not None and not (isinstance(weights, str) and weights in CODED_WEIGHTS):
        raise UserError(f"weights {named(weights)} is unknown; known: {', '.join(CODED_WEIGHTS)}")
    folder = locate(name)
    check_counts(rope_length=rope_length)
    config = read_config(folder, rope_length)
    if isinstance(sharding, Placement):
        rules = sharding
        place = sharding.placement
    else:
        rules = None
        place = sharding
    bits = CODED_WEIGHTS[weights] if weights else None
    layers = layers or stored_layers(jax.default_backend(), config, compute)
    params = load_params(folder, config, compute, place, bits, layers=layers, text_only=text_only)
    provenance = {"fingerprint": fingerprint(folder, config), "folder": str(folder), "rules": rules}
    return Model(params, config=config, tokenizer_files=tokenizer_files(str(folder)), **provenance)
