"""llama.cpp holding the weights of a model of ours: the file it reads, its contexts, and what runs
them."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import gguf
import llama_cpp as lib
import numpy as np

from kvqjax.model.config import ModelConfig
from kvqjax.model.weight_trees import unrolled

TYPES = ("f16", "q8_0", "q4_0")  # that are timed beside ours
PIECE = 512  # tokens of one call of its decoder; it computes them at once
_MATRICES = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up",
             "down": "ffn_down"}  # fmt: skip


def _matrix(name: str, matrix: np.ndarray, config: ModelConfig) -> np.ndarray:
    """A matrix as [out, in]. llama.cpp turns neighbouring channels where we turn halves of a
    head."""
    w = np.asarray(matrix, np.float32).T
    if name in "qk":
        w = w.reshape(-1, 2, config.head_dim // 2, w.shape[-1]).swapaxes(1, 2).reshape(w.shape)
    return np.ascontiguousarray(w)


def write_model(path: Path, params: dict, config: ModelConfig) -> None:
    """The float32 weights, in any form, as llama.cpp's file, without a vocabulary."""
    file = gguf.GGUFWriter(str(path), "llama")
    file.add_context_length(2**17)
    file.add_embedding_length(config.width)
    file.add_block_count(config.num_layers)
    file.add_feed_forward_length(config.mlp_width)
    file.add_head_count(config.num_heads)
    file.add_head_count_kv(config.num_kv_heads)
    file.add_rope_dimension_count(config.head_dim)
    file.add_rope_freq_base(config.rope.theta)
    file.add_layer_norm_rms_eps(config.norm_eps)
    file.add_vocab_size(config.vocab_size)
    file.add_tokenizer_model("no_vocab")

    def as_f32(x):
        return np.ascontiguousarray(np.asarray(x, np.float32))

    file.add_tensor("token_embd.weight", as_f32(params["embed"]))
    file.add_tensor("output_norm.weight", as_f32(params["norm"]))
    if "head" in params:  # else the embedding table serves
        file.add_tensor("output.weight", as_f32(np.asarray(params["head"]).T))
    for layer, weights in enumerate(unrolled(params)["layers"]):
        for name, gguf_name in _MATRICES.items():
            file.add_tensor(f"blk.{layer}.{gguf_name}.weight", _matrix(name, weights[name], config))
        for name, gguf_name in {"attn_norm": "attn_norm", "mlp_norm": "ffn_norm"}.items():
            file.add_tensor(f"blk.{layer}.{gguf_name}.weight", as_f32(weights[name]))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


class Peer:
    """A context of llama.cpp with one type of cache and flash attention; holds memory until it is
    closed. A call computes at most `piece` tokens."""

    def __init__(
        self, path: Path, kind: str, room: int, threads: int, rows: int = 1, piece: int = PIECE
    ):
        quiet = lib.llama_log_callback(lambda level, text, user: None)
        lib.llama_log_set(quiet, ctypes.c_void_p(0))
        self._quiet = quiet  # the library calls it later
        self.model = lib.llama_model_load_from_file(
            str(path).encode(), lib.llama_model_default_params()
        )
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = room, piece, piece
        options.n_threads = options.n_threads_batch = threads
        options.n_seq_max, options.kv_unified = rows, True
        options.type_k = options.type_v = getattr(lib, f"GGML_TYPE_{kind.upper()}")
        options.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.context = lib.llama_init_from_model(self.model, options)
        if not self.model or not self.context:
            raise RuntimeError(f"llama.cpp did not make a context of {room} tokens of {kind}")
        self.piece = piece
        self.batch = lib.llama_batch_init(piece, 0, 1)
        self.memory = lib.llama_get_memory(self.context)

    def close(self) -> None:
        """Give its memory back."""
        lib.llama_batch_free(self.batch)
        lib.llama_free(self.context)
        lib.llama_model_free(self.model)

    def feed(self, tokens: np.ndarray, start: int, row: int = 0) -> None:
        """Put tokens behind the first `start` ones of a row, piece by piece."""
        for first in range(0, len(tokens), self.piece):
            piece = tokens[first : first + self.piece]
            self.batch.n_tokens = len(piece)
            for index, token in enumerate(piece):
                self.batch.token[index] = int(token)
                self.batch.pos[index] = start + first + index
                self.batch.n_seq_id[index] = 1
                self.batch.seq_id[index][0] = row
                self.batch.logits[index] = first + index == len(tokens) - 1
            if lib.llama_decode(self.context, self.batch) != 0:
                raise RuntimeError(
                    f"llama.cpp did not decode {len(piece)} tokens at {start + first}"
                )

    def compute(self, entries: list[tuple[int, int, int, bool]]) -> None:
        """Compute one batch of at most `piece` tokens: (token, position, row, whether its logits
        are wanted) each."""
        self.batch.n_tokens = len(entries)
        for index, (token, position, row, has_logits) in enumerate(entries):
            self.batch.token[index] = token
            self.batch.pos[index] = position
            self.batch.n_seq_id[index] = 1
            self.batch.seq_id[index][0] = row
            self.batch.logits[index] = has_logits
        if lib.llama_decode(self.context, self.batch) != 0:
            raise RuntimeError(f"llama.cpp did not decode a batch of {len(entries)} tokens")

    def likeliest(self, index: int, vocabulary: int) -> int:
        """Give the likeliest token behind entry `index` of the last batch."""
        logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(self.context, index), (vocabulary,))
        return int(logits.argmax())

    def share(self, source: int, row: int, tokens: int) -> None:
        """Let a row begin with the first tokens of another, in the same cells."""
        lib.llama_memory_seq_cp(self.memory, source, row, 0, tokens)

    def drop(self, row: int) -> None:
        """Free a row's cells."""
        lib.llama_memory_seq_rm(self.memory, row, -1, -1)

    def logits(self, vocabulary: int) -> np.ndarray:
        """Those of the last token fed."""
        return np.array(
            np.ctypeslib.as_array(lib.llama_get_logits_ith(self.context, -1), (vocabulary,))
        )

    def logits_of_text(self, tokens: np.ndarray, vocabulary: int) -> np.ndarray:
        """Those of every token of a text [T] that goes into the empty cache piece by piece: [T,
        V]."""
        lib.llama_memory_clear(self.memory, True)
        parts = []
        for start in range(0, len(tokens), self.piece):
            piece = tokens[start : start + self.piece]
            self.compute(
                [(int(token), start + index, 0, True) for index, token in enumerate(piece)]
            )
            parts.append(
                np.array(
                    np.ctypeslib.as_array(
                        lib.llama_get_logits(self.context), (len(piece), vocabulary)
                    )
                )
            )
        return np.concatenate(parts)

    def prompt(self, tokens: np.ndarray) -> Callable[[], None]:
        """Make a function that feeds a prompt into the empty cache."""

        def run():
            lib.llama_memory_clear(self.memory, False)
            self.feed(tokens, 0)

        return run

    def steps(self, tokens: int, count: int) -> Callable[[], None]:
        """Make a function that decodes `count` tokens after `tokens` cached ones, the same at each
        call. One row of PIECE tokens is computed and copied until the rows hold `tokens`. One more
        row then shares them all. So a step costs the same as after one long prompt, and filling
        costs little."""
        rows, ids = tokens // PIECE, np.arange(PIECE) % 97
        self.feed(ids, 0, 0)
        size = lib.llama_state_seq_get_size(self.context, 0)
        state = (ctypes.c_uint8 * size)()
        lib.llama_state_seq_get_data(self.context, state, size, 0)
        for row in range(rows):
            if row and lib.llama_state_seq_set_data(self.context, state, size, row) != size:
                raise RuntimeError(f"llama.cpp did not copy {PIECE} tokens to row {row}")
            lib.llama_memory_seq_cp(self.memory, row, rows, -1, -1)

        def run():
            for step in range(count):
                self.feed(ids[:1], PIECE + step, rows)
            lib.llama_memory_seq_rm(self.memory, rows, PIECE, -1)

        return run
