"""Wrong calls of public functions: each gives one line that names the mistake, and what to write
instead."""

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax._options import byte_count

# A call, and what its line says.
MISTAKES = {
    "generate(model, [[1]], max_tokens=3)": "unknown option of generate 'max_tokens'; did you mean 'max_new_tokens'?",
    "generate(model, [[1]], temprature=1.0)": "did you mean 'temperature'?",
    "generate(model, [[1]], do_sample=True)": "generate has no option 'do_sample': sampling is on where temperature",
    "generate(model, [[1]], generation_config=1)": "write **model.sampling_defaults()",
    "generate(model, [[1]], max_length=9)": "max_new_tokens counts the new tokens of a row, capacity all of them",
    "generate(model, [[1]], num_return_sequences=2)": "give the prompt N times",
    "generate(model, [[1]], pad_token_id=0)": "nothing is padded",
    "generate(model, [[1]], eos_token_id=2)": "write eos_ids=[...]",
    "stream(model, [[1]], num_beams=2)": "write beam_search(model, prompts, beams=N)",
    "speculate(model, [[1]], temperature=1.0)": "it is an option of generate and stream",
    "generate(model, [[1]], frequency_penalty='x')": "frequency_penalty='x'; wanted a number",
    "generate(model, [[1]], logit_bias=[1])": "logit_bias=a list; wanted token ids with a number each",
    "generate(model, [[1]], logit_bias={1: 'x'})": "logit_bias of token 1='x'; wanted a number",
    "generate(model, [[1]], stop_token_ids=5)": "stop_token_ids=5; wanted a list of token ids",
    "beam_search(model, [[1]], num_beams=2)": "write beam_search(model, prompts, beams=N)",
    "generate(model, [[1]], chunk=0)": "chunk=0; it must be a whole number of at least 1",
    "generate(model, [[1]], max_new_tokens=2.5)": "max_new_tokens=2.5; it must be a whole number of at least 1",
    "generate(model, [[1]], kvq.kivi)": "the function kivi is no method; wanted its value, such as kivi(bits=2)",
    "generate(model, [[1]], 7)": "7 is no method",
    "generate(model, [[1]], 'kivy')": "unknown method 'kivy'; did you mean 'kivi'?",
    "compare(model, 'some text ' * 20, 'kivi:bits=2')": "wanted a policy such as 'kivi:bits=2', got a text",
    "generate('demo', [[1]])": "model is 'demo'; wanted a Model, such as kvqjax.load('demo')",
    "generate(model, [[1]], cache=5)": "cache is 5; wanted a Cache, such as init_cache gives",
    "generate(model, [[1]], past_key_values=5)": "write generate(model, more, cache=out.cache)",
    "generate(model, [])": "no prompts; wanted a string, or a list",
    "generate(model, 5)": "no prompts; wanted a string, or a list",
    "generate(model, [1, 2])": "prompt 0 is of type int; wanted a string or a list of token ids",
    "generate(model, [[1.5]])": "prompt 0 is of type list; wanted",
    "generate(model, [{'role': 'user', 'content': 'a'}], chat=True)": "messages of one conversation are one prompt",
    "forward(model, [[1, 2], [3, 4]], counts, cache)": "tokens is a list; wanted an array of integers [2, T]",
    "forward(model, 'text', counts, cache)": "model.encode(text) gives the ids of a text, and generate takes text",
    "prefill(model, ['one', 'two'], counts, cache)": "model.encode(text) gives the ids of a text",
    "generate(model, {'input_ids': [1, 2]})": "prompts are of type dict; wanted a string or a list of prompts; pass",
    "generate(model, [b'text'])": "prompt 0 is of type bytes; decode it first",
    "forward(model, tokens, 3, cache)": "counts is 3; wanted an array of integers [2]",
    "forward(model, tokens, jnp.int32(3), cache)": "counts has shape []; wanted [2]",
    "forward(model, tokens[:1], counts, cache)": "tokens has shape [1, 3]; wanted [2, T]: T new tokens for each of",
    "forward(model, tokens[0], counts, cache)": "tokens has shape [3]; wanted [2, T]",
    "forward(model, tokens * 1.0, counts, cache)": "tokens is of type float32; wanted integers [2, T]",
    "forward(model, tokens, counts + 9, cache)": "counts=[11, 11]; each must lie from 0 to the 3 new tokens given",
    "forward(model, tokens, jnp.ones((2, 2), bool), cache)": "counts is a mask of shape [2, 2]; wanted [2, 3]: which",
    "forward(model, tokens, counts > 0, cache)": "counts is of type bool; wanted integers [2]",
    "forward(model, tokens, counts, (0, cache))": "cache is a tuple; wanted a Cache, such as init_cache gives; forward",
    "forward(cache, tokens, counts, model)": "model is a Cache; wanted a Model",
    "forward(other, tokens, counts, cache)": "the cache was made for a model of another config",
    "forward(half, tokens, counts, cache)": "the cache is kept in float32, the model is bfloat16",
    "jax.jit(kvq.forward)(model, tokens[:1], counts, cache)": "tokens has shape [1, 3]; wanted [2, T]",
    "prefill(model, tokens, [1, 1], cache)": "counts is a list; wanted an array of integers [2]",
    "attend(model, tokens, counts[:1], cache)": "counts has shape [1]; wanted [2]",
    "commit(model, cache, [], counts)": "pending is a list; wanted a tuple of 1, a dict of sources for every run",
    "commit(model, cache, ({'k': tokens},), counts)": "pending[0]['k']: shape [2, 3] given, wanted [2, 2, T, 32]",
    "init_cache(model, 'kivi', 0, 8)": "batch=0; it must be a whole number of at least 1",
    "init_cache(model, 'kivi', 2, 8.5)": "capacity=8.5; it must be a whole number of at least 1",
    "init_cache(model, 'kivi', True, 8)": "batch=True; it must be a whole number of at least 1",
    "init_cache(model, 'kivi', 2, max_cache_len=8)": "init_cache has no option 'max_cache_len': write capacity=N",
    "parse({'method': ['kivi']})": "unknown method \"['kivi']\"",
    "parse('a' * 300 + '.json')": "File name too long",
    "parse('k=kivi;k=higgs;v=kivi')": "names the keys or the values twice",
    "parse('omniscale:value_group=0')": "omniscale: group=0; a group has at least 1 channel",
    "parse('higgs:group=0,rope=post,rotate=signs')": "higgs: group=0; a group has at least 1 channel",
    "parse('aqua:backbone=token,group=0')": "aqua: group=0; a group has at least 1 channel",
    "parse('aqua:backbone=channel,group=0')": "aqua: group=0; groups along tokens have 32, 64 or 128 tokens",
    "parse('xquant_cl:accumulator=')": "accumulator=''; known: float32, bfloat16",
    "init_cache(model, 'exact', 2, 8, target='x')": "target='x'; known: cpu, v5e, v5p, v6e, v7x, sm75, sm80",
    "init_cache(model, 'commvq:rounds=0', 2, 8)": "rounds=0; at least 1",
    "init_cache(model, 'xquant:group=0', 2, 8)": "group=0; a group has at least 1 channel",
    "init_cache(model, 'xquant_cl:base=0,protected=0,group=0', 2, 8)": "group=0; a group has at least 1 channel",
    "init_cache(model, 'xquant:latent=true,group=32,value_bits=0', 2, 8)": "bits=0; uniform codes have 1, 2, 3",
    "PagePool(3).take(1.5)": "count=1.5; it must be a whole number of at least 0",
    "PagePool(3).users(3)": "page=3; it must be a whole number from 0 to 2",
    "init_cache('demo', 'kivi', 2, 8)": "model is 'demo'; wanted a Model, such as kvqjax.load('demo'), or a KVShape",
    "init_cache(model.config.alone, 'kivi', 2, 8, sharding=4)": "sharding is 4; wanted the rules of a mesh",
    "load_cache('absent', 'demo')": "model is 'demo'; wanted a Model, such as kvqjax.load('demo'), or a KVShape",
    "load_cache('absent', model.config.alone, sharding=4)": "sharding is 4; wanted the rules of a mesh",
    "save_cache('absent', cache, 'demo')": "model is 'demo'; wanted a Model, such as kvqjax.load('demo'), or a KVShape",
    "layers(cache, counts, within='steps')": "within='steps'; known: chunk, step",
    "layers(cache, counts, constants=artifact)": "constants is a Artifact; wanted those of an artifact, a tuple",
    "dense(cache, 0, constants=5)": "constants is 5; wanted those of an artifact, a tuple of dicts",
    "save_cache('absent', cache, model, constants=artifact)": "write constants=artifact.constants",
    "append(cache, [dict(k=empty, v=empty)] * 2, counts)": "there are no new tokens; wanted at least one a row",
    "row_axes(5)": "cache is 5; wanted a Cache, such as init_cache gives",
    "PagePool(2).take(-1)": "count=-1; it must be a whole number of at least 0",
    "calibrate.from_tensors('klt', 'demo', keys=[], values=[])": "shape is 'demo'; wanted a KVShape",
    "layers(cache, valid=counts)": "valid is int32[2]; wanted a mask, bool[2, T]",
    "calibrate.run(model, 'kivi', 'text')": "kivi:bits=2 needs no calibration",
    "eval.perplexity(model, [1] * 64, 'kivi:bit=2')": "did you mean 'bits'?",
    "eval.drift(model, [1] * 64, 'kivi:bit=2')": "did you mean 'bits'?",
    "eval.retrieval(model, 'kivi:bit=2')": "did you mean 'bits'?",
    "eval.copying(model, 'kivi:bit=2')": "did you mean 'bits'?",
    "Model.encode(model, ['a'])": "encode takes one text, not a list",
    "eval.perplexity(model, 'a text', 'exact')": "it has no tokenizer; pass token ids",
    "eval.perplexity(model, None, 'exact')": "texts is a NoneType; wanted a text, a list of texts, a path",
    "eval.perplexity(model, tokens * 1.0, 'exact')": "texts is of type float32; wanted",
    "eval.drift(model, [1] * 64, 'exact', chunk=65, window=64)": "chunk=65 is more than all 64 steps; say a smaller",
    "eval.drift(model, {'input_ids': [1, 2]}, 'exact')": "texts is a dict; pass texts['input_ids']",
    "eval.drift(model, [[1, 2], ['a']], 'exact')": "texts is a list",
    "eval.retrieval(model, 'exact', task='passkey', hay=5)": "hay is int without text; wanted a text, a path",
    "calibrate.from_tensors('aqua', model, keys=tokens, values=tokens)": "shape is a Model; wanted a KVShape",
    "calibrate.from_tensors('aqua', model.config, keys=[], values=None)": "values is None; wanted an array for every",
    "calibrate.from_tensors('aqua', model.config, keys=3, values=[])": "keys is 3; wanted an array for every layer",
    "calibrate.run(model, 'aqua:predictor=low_rank', [1] * 99)": "rank=256; predictors of 32 channels have a rank",
    "calibrate.run(model, 'kvquant', [1, 99])": "texts has a token id outside 0 .. 49",
    "tune(model, b'text', method='higgs', bits=4)": "texts is a bytes object; decode it first",
    "load(None)": "model is None; wanted a name, the path of a folder",
    "load('a text in the place of a model. ' * 20)": "... (640 characters): File name too long",
    "load('a' * 300 + '.gguf')": "File name too long",
    "load('~nobody-of-this-name/x')": "the home folder is not known",
    "Session.load(model, 'a' * 300)": "File name too long",
    "load_cache('a' * 300, model)": "File name too long",
    "save_cache('a' * 300, cache, model)": "File name too long",
    "generate(model, [[1]], stop=None)": "stop=None; wanted a string, or a list of strings",
    "generate(model, [[1]], seed=2**32)": "seed=4294967296; it must be a whole number from -1 to 4294967295",
    "Session(kvq.load('recall'), seed=-2)": "seed=-2; it must be a whole number",
    "Session(kvq.load('recall'), eos_ids=5)": "eos_ids=5; wanted a list of token ids",
    "speculate(model, [[1]], drafter='gpt2')": "drafter is 'gpt2'; wanted a Model",
    "beam_search(model, [[1]], length_penalty=float('nan'))": "length_penalty=nan; wanted a number that is finite",
    "append(cache, None, counts)": "new is None; wanted what attend_layer returned for every layer",
    "attend_layer(cache, 0, *(jnp.ones((2, 2, n, 16)) for n in (4, 2, 2)), counts, sinks=[1.0])": "sinks is a list",
    "save_cache('absent', cache, other)": "the cache was made for a model of another config",
    "plan('demo', 'exact', memory='16')": "memory='16'; wanted a number",
    "plan('demo', 'exact', memory=float('inf'))": "memory=inf; wanted a number that is finite",
    "plan('demo', 'exact', memory=16, memory_fraction='1')": "memory_fraction='1'; wanted a number",
    "plan('demo', 'exact', device=5)": "device=5; wanted a word or None",
    "plan('demo', 'exact', mesh=5)": "mesh=5; wanted a word or MeshSize",
    # A digit to `str.isdigit`, and none to `int`.
    "plan('demo', 'exact', device='v5e-\u00b2')": "is not known",
    "plan('demo', 'exact', mesh='model=\u00b2')": "is not one of data=N, seq=N, model=N",
    "parse('kivi:bits=2,rotate=signs:\u00b2')": "known: none",
    "eval.perplexity(model, [1] * 64, 'exact', window=2, mode='prefill')": "at least 1 and 3 tokens are needed",
    "eval.perplexity(model, [1] * 64, 'exact', window=2, cut='llama-perplexity')": "wanted 3 tokens at least",
    "load(['demo'])": "model is a list; wanted a name, the path of a folder",
    "load('demo', torch_dtype='bfloat16')": "load has no option 'torch_dtype': write dtype=...",
    "load('demo', dtyp='bfloat16')": "unknown option of load 'dtyp'; did you mean 'dtype'?",
    "load('demo', dtype='float64')": "dtype 'float64' is unknown; known: bf16 or bfloat16, f16 or float16, f32 or",
    "load('demo', dtype=int)": "dtype <class 'int'> is unknown",
}

SCRIPT = """
import json, sys
sys.path.append(".")
import jax, jax.numpy as jnp
import kvqjax as kvq
from kvqjax.cache.artifacts import Artifact
from tiny import tiny
model, other, half = tiny(), tiny(num_layers=1), tiny()
half = half.replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), half.params))
cache, tokens, counts = kvq.init_cache(model, "kivi", 2, 64), jnp.ones((2, 3), int), jnp.full((2,), 2)
artifact, empty = Artifact(kvq.kivi(), ({},), ""), jnp.zeros((2, 0, 32))
said = {}
for call in json.load(sys.stdin):
    try:
        made = eval(call if call.startswith("jax.") else "kvq." + call)
        said[call] = ["nothing", str(list(made))]
    except Exception as error:
        said[call] = [type(error).__name__, str(error)]
json.dump(said, sys.stdout)
"""


def test_a_mistake_gives_one_line_that_names_it():
    """In a process without jaxtyping's check of types, as a user's is."""
    given = {"input": json.dumps(list(MISTAKES)), "capture_output": True, "text": True}
    ended = subprocess.run([sys.executable, "-c", SCRIPT], **given, cwd=Path(__file__).parents[1])
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    wrong = {
        call: said[call]
        for call, message in MISTAKES.items()
        if said[call][0] != "UserError" or message not in said[call][1] or "\n" in said[call][1]
    }
    assert not wrong


def test_a_number_of_bytes_beyond_any_float_is_one_line():
    with pytest.raises(kvq.UserError, match="wanted 1 to"):
        byte_count("9" * 400)


def test_a_right_call_passes():
    """Rows may be empty; numpy arrays of any integers are fine."""
    cache = kvq.init_cache(tiny(), "exact", 2, 64)
    logits, cache = kvq.forward(tiny(), tokens(2, 3), jnp.asarray([3, 0]), cache)
    assert (logits.shape, cache.lengths.tolist()) == ((2, 3, 50), [3, 0])
