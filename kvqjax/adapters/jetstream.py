"""An engine of JetStream's interface over our caches: what its orchestrator calls to prefill a
prompt, to insert it into a running batch and to decode the batch by one token.

    def step(params, tokens, counts, cache):          # the model: any function over a cache
        return logits, cache                          # [B, V], after each row's last valid token

    engine = CachedEngine(step, shape, "kivi:bits=4", slots=16, capacity=4096,
    max_prefill_length=1024) prefix, first = engine.prefill(params=params, padded_tokens=tokens,
    true_length=37) state = engine.insert(prefix, engine.init_decode_state(), slot=3)
    state, tokens = engine.generate(params, state)

For one of our models `step` is
`lambda model, tokens, counts, cache: kvq.forward(model, tokens, counts, cache, last=True)`, and the
model takes the shape's place.

Names and arguments are those of `jetstream.engine.engine_api`, so that the orchestrator takes this
engine as it takes any other. JetStream itself is imported for its tokenizer alone. Prompts may be
prefilled on one set of devices and
decoded on another: two engines of the same sizes then share the work, and
`get_prefix_destination_sharding` of the second says where a prefix is sent. Every program is
compiled once, `prefill` once for every padded length.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from kvqjax._arguments import check_integer, named
from kvqjax._errors import UserError
from kvqjax.cache import Cache, surgery
from kvqjax.methods import MethodLike
from kvqjax.model.config import KVShape
from kvqjax.model.loading import Model
from kvqjax.step.new_cache import init_cache

__all__ = ["CachedEngine", "DecodeState", "Prefix", "ResultTokens", "SlotData"]

Step = Callable[
    [Any, Int[Array, "B T"], Int[Array, " B"], Cache], tuple[Float[Array, "B V"], Cache]
]
Sampler = Callable[[Float[Array, "B V"]], Int[Array, " B"]]


def __dir__() -> list[str]:
    return __all__


class SlotData(NamedTuple):
    """The tokens that one slot made in one call."""

    tokens: Int[Array, "1 1"] | Int[np.ndarray, "1 1"]
    valid: Int[Array, "1 1"] | Int[np.ndarray, "1 1"]
    lengths: Int[Array, " 1"] | Int[np.ndarray, " 1"]


class ResultTokens(struct.PyTreeNode):
    """Tokens of all slots in one array [slots, 3], which one copy brings to the host: the token,
    whether it is valid (1 or 0), and how many the slot has generated."""

    data: Any
    tokens_idx: tuple[int, int] = struct.field(pytree_node=False, default=(0, 1))
    valid_idx: tuple[int, int] = struct.field(pytree_node=False, default=(1, 2))
    length_idx: tuple[int, int] = struct.field(pytree_node=False, default=(2, 3))
    samples_per_slot: int = struct.field(pytree_node=False, default=1)

    def copy_to_host_async(self) -> None:
        """Begin to copy the array to the host."""
        if isinstance(self.data, jax.Array):
            self.data.copy_to_host_async()

    def convert_to_numpy(self) -> "ResultTokens":
        """The same on the host."""
        return self.replace(data=np.asarray(self.data))

    def get_result_at_slot(self, slot: int) -> SlotData:
        """Give the tokens of slot number `slot`."""
        row = self.data[slot : slot + 1]
        return SlotData(row[:, 0:1], row[:, 1:2], row[:, 2])


class Prefix(struct.PyTreeNode):
    """A prefilled prompt: the arrays of a cache of one row, and the token that follows. It says
    nothing of devices, so that another engine of the same sizes takes it once `jax.device_put` has
    sent it there."""

    arrays: tuple[Any, ...]
    token: Any  # Int[1]


class DecodeState(struct.PyTreeNode):
    """The running batch: the cache of all slots, each one's newest token, which the cache does not
    hold yet, how many it has generated, and whether a prompt was inserted."""

    cache: Cache
    token: Any  # Int[slots]
    generated: Any  # Int[slots]
    used: Any  # Bool[slots]


def greedy(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """The likeliest token of each row."""
    return jnp.argmax(logits, -1).astype(jnp.int32)


def _result(
    token: Int[Array, " B"], valid: Bool[Array, " B"], generated: Int[Array, " B"]
) -> ResultTokens:
    return ResultTokens(jnp.stack([token, valid.astype(jnp.int32), generated], 1))


_result = jax.jit(_result)


class CachedEngine:
    """An engine over compressed caches, with the methods and properties of
    `jetstream.engine.engine_api.Engine`."""

    def __init__(
        self,
        step: Step,
        shape: KVShape | Model,
        method: MethodLike,
        *,
        slots: int,
        capacity: int,
        max_prefill_length: int,
        load: Callable[..., Any] | None = None,
        tokenizer: Any = None,
        mesh: Mesh | None = None,
        batch_axis: Any = None,
        **options: Any,
    ):
        """Make an engine. No array is made before `prefill` or `init_decode_state`.

        Args:
            step: the model over a cache: `step(params, tokens, counts, cache)` gives the logits
                after each row's last valid token, and the cache with the valid tokens. `counts` are
                0 for slots that are free or full.
            shape: the model's KVShape, or one of our models.
            method: how keys and values are stored.
            slots: prompts that are decoded together.
            capacity: the most tokens of a slot, prompt and continuation.
            max_prefill_length: the most tokens of a prompt, at most `capacity`.
            load: what `load_params` calls.
            tokenizer: what `get_tokenizer` returns, JetStream's `TokenizerParameters`.
            mesh: that of the model, as in `kvq.init_cache`.
            batch_axis: the axis, or axes, that split slots. A prefilled prompt is one row and lies
                on all of them.
            options: others of `kvq.init_cache`, such as `head_axis` and `dtype`.

        Raises:
            UserError: sizes that are no whole numbers of at least 1, or a prompt longer than a
                slot.
        """
        self._step, self._load, self._tokenizer, self._mesh = step, load, tokenizer, mesh
        self._slots = check_integer("slots", slots)
        self._capacity = check_integer("capacity", capacity)
        self._longest = check_integer("max_prefill_length", max_prefill_length)
        if self._longest > self._capacity:
            raise UserError(
                f"max_prefill_length={self._longest} is more than capacity={self._capacity}, a slot's room"
            )
        make_cache = functools.partial(init_cache, shape, method, mesh=mesh, **options)
        self._one = functools.partial(make_cache, 1, self._longest)
        self._batch = functools.partial(
            make_cache, self._slots, self._capacity, batch_axis=batch_axis
        )
        self._prefill_program = jax.jit(self._prefill)
        self._insert_program = jax.jit(self._insert, donate_argnames="state")
        self._generate_program = jax.jit(self._generate, donate_argnames="state")

    @functools.cached_property
    def _blank(self) -> Cache:
        """An empty cache of one row; nothing changes it."""
        return self._one()

    def _unpacked(self, prefix: Prefix) -> Cache:
        """Make a prefix a cache that lies as this engine's do."""
        blank, form = jax.tree.flatten(self._blank)
        if [(x.shape, x.dtype) for x in blank] != [(x.shape, x.dtype) for x in prefix.arrays]:
            raise UserError(
                "the prefix is of an engine of another method, other sizes or other splits of a row's tokens"
            )
        return jax.tree.unflatten(form, prefix.arrays)

    def prefill(
        self,
        *,
        params: Any,
        existing_prefix: Prefix | None = None,
        padded_tokens: Int[Array, "*T"] | Int[np.ndarray, "*T"],
        true_length: int,
        sampler: Sampler | None = None,
    ) -> tuple[Prefix, ResultTokens]:
        """Prefill a prompt.

        Args:
            params: the model's.
            existing_prefix: a prefix that the tokens follow. It stays as it is.
            padded_tokens: [T], the prompt's tokens, padded on the right to one of a few lengths.
            true_length: how many of them are the prompt's.
            sampler: picks the next token from logits [1, V]; by default the likeliest.

        Returns:
            The prefix for `insert`, and the token after the prompt.

        Raises:
            UserError: a prompt of no tokens, or one that does not fit `max_prefill_length`.
        """
        count = check_integer("true_length", true_length)
        if padded_tokens.ndim != 1 or count > padded_tokens.shape[0]:
            raise UserError(
                f"padded_tokens is {named(padded_tokens)}; wanted int[T], of at least {count} tokens"
            )
        cache = self._blank if existing_prefix is None else self._unpacked(existing_prefix)
        total = count + (int(np.asarray(cache.lengths)[0]) if existing_prefix is not None else 0)
        if total > self._longest:
            raise UserError(
                f"a prompt of {total} tokens is longer than max_prefill_length={self._longest}"
            )
        logits, cache = self._prefill_program(
            params, jnp.asarray(padded_tokens)[None], jnp.asarray([count]), cache
        )
        token = (sampler or greedy)(logits).reshape(1).astype(jnp.int32)
        return Prefix(tuple(jax.tree.leaves(cache)), token), _result(
            token, jnp.asarray([True]), jnp.asarray([0])
        )

    def _prefill(self, params, tokens, counts, cache: Cache):
        return self._step(params, tokens, counts, cache)

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Put a prefilled prompt into a slot, whatever it held. The state is donated, the prefix
        stays.

        Args:
            prefix: of this engine's `prefill`, or sent here from another engine's.
            decode_state: the running batch.
            slot: which slot, from 0 on.

        Returns:
            The running batch with the prompt.

        Raises:
            UserError: a slot that does not exist, or a prefix of an engine of other sizes.
        """
        number = check_integer("slot", slot, 0, self._slots - 1)
        return self._insert_program(
            self._unpacked(prefix), prefix.token, jnp.int32(number), state=decode_state
        )

    def _insert(self, cache: Cache, token, slot, *, state: DecodeState) -> DecodeState:
        return DecodeState(
            cache=surgery.insert(state.cache, slot, cache),
            token=state.token.at[slot].set(token[0]),
            generated=state.generated.at[slot].set(0),
            used=state.used.at[slot].set(True),
        )

    def generate(
        self, params: Any, decode_state: DecodeState, sampler: Sampler | None = None
    ) -> tuple[DecodeState, ResultTokens]:
        """Decode one token in every slot. The state is donated.

        Args:
            params: the model's.
            decode_state: the running batch.
            sampler: picks the next tokens from logits [slots, V]; by default the likeliest.

        Returns:
            The running batch, and the tokens. Those of slots that are free, or whose room is used
            up, are not valid.
        """
        logits, active, state = self._generate_program(params, state=decode_state)
        token = (sampler or greedy)(logits).reshape(self._slots).astype(jnp.int32)
        return state.replace(token=token), _result(token, active, state.generated)

    def _generate(self, params, *, state: DecodeState):
        active = state.used & (state.cache.lengths < self._capacity)
        counts = active.astype(jnp.int32)
        logits, cache = self._step(params, state.token[:, None], counts, state.cache)
        return logits, active, state.replace(cache=cache, generated=state.generated + counts)

    def free_resource(self, slot: int) -> None:
        """Do nothing: `insert` replaces all that a slot held, and a slot that is not asked for
        costs no room."""

    def load_params(self, *args: Any, **kwargs: Any) -> Any:
        """Call `load` of the constructor. Raises UserError if the engine was made without it."""
        if self._load is None:
            raise UserError(
                "this engine was made without load=, the function that load_params calls"
            )
        return self._load(*args, **kwargs)

    def get_prefix_destination_sharding(self) -> Any:
        """Give the sharding that `jax.device_put(prefix, ...)` needs for this engine."""
        places = tuple(x.sharding for x in jax.tree.leaves(self._blank))
        return Prefix(places, self._blank.lengths.sharding)

    def get_tokenizer(self) -> Any:
        """The `tokenizer` that the engine was made with. Raises UserError where there is none."""
        if self._tokenizer is None:
            raise UserError(
                "this engine was made without tokenizer=, JetStream's TokenizerParameters"
            )
        return self._tokenizer

    def build_tokenizer(self, metadata: Any) -> Any:
        """Make JetStream's tokenizer of its parameters, as its engines do by default."""
        return importlib.import_module("jetstream.engine.token_utils").SentencePieceTokenizer(
            metadata
        )

    def init_decode_state(self, *args: Any, **kwargs: Any) -> DecodeState:
        """Make a batch of free slots."""
        token, generated = (jnp.zeros(self._slots, jnp.int32) for _ in range(2))
        return DecodeState(self._batch(), token, generated, jnp.zeros(self._slots, bool))

    @property
    def max_concurrent_decodes(self) -> int:
        """The number of slots."""
        return self._slots

    @property
    def samples_per_slot(self) -> int:
        """One."""
        return 1

    @property
    def max_prefill_length(self) -> int:
        """The most tokens of a prompt."""
        return self._longest

    @property
    def mesh(self) -> Mesh:
        """The mesh of its caches; without one, that of the one device they lie on."""
        return self._mesh or Mesh(np.asarray(list(self._blank.lengths.devices())), ("device",))

    @property
    def colocated_cpus(self) -> None:
        """None are named."""
        return None
