"""docs/errors.md: every row of its tables is provoked here, and the message is the one that the
page promises."""

import errno
import json
import os
import re
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import repeating, spoiling, tiny

import kvqjax as kvq
from kvqjax._lock import held
from kvqjax.cache.artifacts import Artifact
from kvqjax.calibrate import resume, sequences
from kvqjax.cli.common import require_room
from kvqjax.data import read
from kvqjax.data.corpora import read_text
from kvqjax.eval.plots import check_picture
from kvqjax.eval.windows import windows
from kvqjax.model import locate
from kvqjax.model.config import ExpertConfig, RopeConfig
from kvqjax.model.hf_config import parse_config, read_config
from kvqjax.model.weight_codes import code_weight, place_codes
from kvqjax.parallel.mesh_size import MeshSize
from kvqjax.serving.protocol import read_chat

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| ([^|]+?) \| `(.+)` \|$", PAGE, re.MULTILINE))
SIX = ExpertConfig(count=6, per_token=2, width=24)
LLAMA4 = b"\6\0\0\0\0\0\0\0llama4"  # an architecture in the header of a GGUF file
BY_LENGTH = RopeConfig(kind="dynamic", factor=2.0, original_max_position=256)
CONFIG = json.loads((locate("recall") / "config.json").read_text())


@pytest.fixture(scope="module")
def recall() -> kvq.Model:
    return kvq.load("recall")


def copied(tmp_path: Path, *names: str) -> Path:
    """A folder with these files of the bundled model `recall`."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in names:
        shutil.copy(locate("recall") / name, folder / name)
    return folder


def whole(tmp_path: Path) -> Path:
    return copied(
        tmp_path, "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    )


def offline(tmp_path, monkeypatch, recall):
    import huggingface_hub

    def fail(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    kvq.load("owner/name")


def weights(content: bytes | None):
    """Load a model whose weights are `content`, or lack their last kilobyte."""

    def provoke(tmp_path, monkeypatch, recall):
        file = whole(tmp_path) / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000] if content is None else content)
        kvq.load(file.parent)

    return provoke


def header(entry: dict) -> bytes:
    text = json.dumps({"x": entry}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(64)


def no_json(tmp_path, monkeypatch, recall):
    (tmp_path / "config.json").write_text("{")
    read_config(tmp_path)


def index_outside(tmp_path, monkeypatch, recall):
    folder = copied(tmp_path, "config.json")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "../x.safetensors"}})
    )
    kvq.load(folder)


def missing_shard(tmp_path, monkeypatch, recall):
    folder = copied(tmp_path, "config.json")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "model-00001.safetensors"}})
    )
    kvq.load(folder)


def pickles(tmp_path, monkeypatch, recall):
    folder = copied(tmp_path, "config.json")
    (folder / "pytorch_model.bin").write_bytes(b"")
    kvq.load(folder)


def with_vision(tmp_path, monkeypatch, recall):
    file = whole(tmp_path) / "model.safetensors"
    save_file(load_file(file) | {"vision_tower.x": np.zeros(4, np.float32)}, file)
    kvq.load(file.parent)


def not_fetched(tmp_path, monkeypatch, recall):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kvq.load("smollm2")


def gguf_file(change, installed: bool = True):
    """Load the bundled model `recall` as a GGUF file that was changed, with its decoder or
    without."""

    def provoke(tmp_path, monkeypatch, recall):
        from gguf_files import write_gguf

        file = write_gguf(locate("recall"), tmp_path / "model.gguf", kind="Q8_0")
        file.write_bytes(change(file.read_bytes()))
        if not installed:
            monkeypatch.setitem(sys.modules, "gguf", None)
        kvq.load(file)

    return provoke


def no_tokenizer(tmp_path, monkeypatch, recall):
    _ = kvq.load(copied(tmp_path, "config.json", "model.safetensors")).tokenizer


def foreign_tokenizer(tmp_path, monkeypatch, recall):
    folder = whole(tmp_path)
    shutil.copy(locate("demo") / "tokenizer.json", folder)
    kvq.generate(kvq.load(folder), "It was late in the evening")


def changed_tokenizer(tmp_path, monkeypatch, recall):
    folder = whole(tmp_path)
    model = kvq.load(folder)
    (folder / "chat_template.jinja").write_text("A")
    kvq.generate(model, "ab12")


def long_text(tmp_path, monkeypatch, recall):
    kvq.generate(kvq.load("demo"), "the " * 100_000, capacity=64)


def with_template(template):
    """Generate through a chat template that the tokenizer's settings hold."""

    def provoke(tmp_path, monkeypatch, recall):
        file = whole(tmp_path) / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
        kvq.generate(kvq.load(file.parent), "ab12", chat=True)

    return provoke


def over_four() -> jax.sharding.NamedSharding:
    """A matrix whose inputs four devices share out."""
    return jax.sharding.NamedSharding(
        jax.make_mesh((4,), ("x",)), jax.sharding.PartitionSpec(None, "x")
    )


def broken(model: kvq.Model) -> kvq.Model:
    return model.replace(params=model.params | {"norm": model.params["norm"] * jnp.nan})


def text_file(name: str, content: bytes | None):
    def provoke(tmp_path, monkeypatch, recall):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        read_text(str(tmp_path / name), 10, 0)

    return provoke


def beyond_capacity(tmp_path, monkeypatch, recall):
    cache = kvq.init_cache(tiny(), kvq.exact(), 1, 8)
    pending = tuple({name: jnp.zeros((2, 1, 16, 32)) for name in "kv"} for _ in cache.runs)
    kvq.commit(tiny(), cache, pending, jnp.asarray([9]))


def forwarding(tokens, counts, **other):
    """Feed tokens to a cache of 2 rows, made for a model with other changes."""
    return lambda *_: kvq.forward(
        tiny(), tokens, counts, kvq.init_cache(tiny(**other), "exact", 2, 8)
    )


def infinite_activations(tmp_path, monkeypatch, recall):
    params = recall.params | {"embed": recall.params["embed"] * jnp.inf}
    kvq.calibrate.run(
        recall.replace(params=params), kvq.parse("kvquant:bits=2"), "ab12" * 99, count=1, length=64
    )


def artifact(**changes) -> Artifact:
    given = {
        "method": kvq.kivi(),
        "constants": ({"k": {"low": jnp.ones(2)}},),
        "fingerprint": "config=1,headers=2",
    }
    return Artifact(**(given | changes))


def described(**changes):
    """Load an artifact whose description says something else; None leaves a part out."""

    def provoke(tmp_path, monkeypatch, recall):
        artifact().save(tmp_path / "a")
        file = tmp_path / "a" / "description.json"
        text = json.loads(file.read_text()) | changes
        file.write_text(
            json.dumps({name: value for name, value in text.items() if value is not None})
        )
        kvq.load_artifact(tmp_path / "a")

    return provoke


def file_changed(tmp_path, monkeypatch, recall):
    artifact().save(tmp_path / "a")
    (tmp_path / "a" / "arrays" / "_CHECKPOINT_METADATA").write_bytes(b"x")
    kvq.load_artifact(tmp_path / "a")


def foreign_name(tmp_path, monkeypatch, recall):
    artifact().save(tmp_path / "a")
    monkeypatch.setattr("kvqjax.cache.artifacts.read_arrays", lambda *_: {"../../x": np.ones(2)})
    kvq.load_artifact(tmp_path / "a")


def existing(tmp_path, monkeypatch, recall):
    artifact().save(tmp_path)


def failing(target: str, code: int):
    """Write while the system refuses `target` with this error (tests may run as root, whom no
    permission stops)."""

    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    def provoke(tmp_path, monkeypatch, recall):
        monkeypatch.setattr(target, refuse)
        if "resume" in target:
            resume.save_state(tmp_path / "state.npz", "owner", [np.ones(2)])
        artifact().save(tmp_path / "new")

    return provoke


def other_state(tmp_path, monkeypatch, recall):
    resume.save_state(tmp_path / "s.npz", "one", [np.ones(2)])
    resume.load_state(tmp_path / "s.npz", "two", [np.ones(2)])


def torn_state(tmp_path, monkeypatch, recall):
    (tmp_path / "s.npz").write_bytes(b"PK\x03\x04 torn")
    resume.load_state(tmp_path / "s.npz", "one", [np.ones(2)])


def held_twice(tmp_path, monkeypatch, recall):
    with held(tmp_path / "run"), held(tmp_path / "run"):
        pass


def with_kernels(word: str):
    return lambda *_: kvq.init_cache(tiny(), "kivi:bits=2", 1, 256, kernels=word)


def generating(prompts, **options):
    return lambda tmp_path, monkeypatch, recall: kvq.generate(recall, prompts, **options)


def step(model, cache):
    return kvq.forward(model, jnp.zeros((1, 2), jnp.int32), jnp.asarray([2], jnp.int32), cache)


def repeated_layers(*_):
    cache = kvq.init_cache(tiny(), "exact", 2, 256)
    kvq.fork(jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), cache))


def less_room(*_):
    empty = kvq.init_cache(tiny(), "exact", 1, 256)
    kvq.resize(kvq.forward(tiny(), jnp.ones((1, 3), int), jnp.asarray([3]), empty)[1], 2)


def texts_that_do_not_fit(*_):
    empty = kvq.init_cache(tiny(), "exact", 1, 4)
    cache = kvq.forward(tiny(), jnp.ones((1, 3), int), jnp.asarray([3]), empty)[1]
    kvq.concatenate([cache, cache])


def donated(tmp_path, monkeypatch, recall):
    cache = kvq.init_cache(recall, kvq.exact(), 1, 64)
    jax.jit(step, donate_argnums=1)(recall, cache)
    step(recall, cache)


def gradient(tmp_path, monkeypatch, recall):
    cache = kvq.init_cache(recall, kvq.exact(), 1, 64)
    jax.grad(lambda model: step(model, cache)[0].sum())(recall)


def cache_of(spec: str):
    return lambda tmp_path, monkeypatch, recall: kvq.init_cache(recall, kvq.parse(spec), 1, 64)


def config_with(**changes):
    return lambda tmp_path, monkeypatch, recall: parse_config(CONFIG | changes)


def tuning(method: str = "higgs", bits: float = 2.5, text: str = "ab12 " * 20000, **options):
    return lambda _, __, recall: kvq.tune(recall, text, method=method, bits=bits, **options)


ASKED = {"role": "user", "content": "1 + 2?"}
EARLIER = {"id": "x", "type": "function", "function": {"name": "add", "arguments": "[]"}}
ENDLESS = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}


def tool(name: str, parameters: dict | None = None) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def chatting(**fields):
    body = {"messages": [ASKED], **fields}
    return lambda *_: read_chat(json.dumps(body).encode(), "demo")


CASES = {
    "no such model": lambda tmp_path, *_: kvq.load(tmp_path / "absent"),
    "hub not reachable": offline,
    "unknown dtype": lambda *_: kvq.load("recall", dtype="int8"),
    "unsupported architecture": config_with(architectures=["GPT2LMHeadModel"]),
    "unsupported field": config_with(hidden_act="gelu"),
    "code in the checkpoint": config_with(auto_map={"AutoModelForCausalLM": "x.Y"}),
    "unknown quantisation": config_with(quantization_config={"quant_method": "bitsandbytes"}),
    "vision model": config_with(architectures=["PixtralVisionModel"], vision_config={}),
    "model with a vision part": with_vision,
    "weights as pickles": pickles,
    "shards that are missing": missing_shard,
    "experts that a mesh cannot share out": lambda *_: kvq.shard(
        tiny(experts=SIX), "exact", model=4
    ),
    "4-bit weights that a mesh would cut": lambda *_: place_codes(
        code_weight(jnp.ones((1, 16, 8)), 4), over_four()
    ),
    "text longer than a rope by length was told": lambda *_: kvq.init_cache(
        tiny(rope=BY_LENGTH), "exact", 1, 300
    ),
    "config that is no JSON": no_json,
    "truncated weights": weights(None),
    "weights that are no safetensors": weights(b"\x93" * 999),
    "header that contradicts itself": weights(
        header({"dtype": "F32", "shape": [4], "data_offsets": [0, 8]})
    ),
    "shard index that leaves the folder": index_outside,
    "model that was not fetched": not_fetched,
    "truncated GGUF file": gguf_file(lambda data: data[:-1000]),
    "GGUF file of another architecture": gguf_file(
        lambda data: data.replace(b"\5\0\0\0\0\0\0\0llama", LLAMA4, 1)
    ),
    "GGUF codes without their decoder": gguf_file(lambda data: data, installed=False),
    "no tokenizer": no_tokenizer,
    "tokenizer of another model": foreign_tokenizer,
    "tokenizer's files that changed behind a loaded model": changed_tokenizer,
    "several chat templates": with_template([{"name": "tool_use", "template": "A"}]),
    "template that fails": with_template("{{ raise_exception('roles must alternate') }}"),
    "weights that are not finite": lambda *_: kvq.generate(
        broken(tiny()), [[1, 2, 3]], max_new_tokens=2
    ),
    "misspelt method": cache_of("kivy"),
    "misspelt option": cache_of("kivi:bit=2"),
    "option of another type": cache_of("kivi:window=wide"),
    "impossible width": cache_of("kivi:bits=7"),
    "keys without values": cache_of("k=kivi"),
    "keys alone of a method that caches keys and values together": cache_of("k=xquant;v=kivi"),
    "negative window": cache_of("kivi:window=-1"),
    "window beyond any context": cache_of("kivi:window=2000000000"),
    "method that does not fit the model": cache_of("uniform:group=48"),
    "rotation that does not commute with RoPE": cache_of("kvquant:rotate=hadamard"),
    "head_dim without a Hadamard matrix": lambda *_: kvq.init_cache(
        tiny(head_dim=100), "turboquant", 1, 256
    ),
    "exact layers that leave none to compress": lambda *_: kvq.init_cache(
        tiny(), "turboquant:form=vllm", 1, 256
    ),
    "more layers than models have": cache_of("kivi_star:protected=1000000000"),
    "layer that does not exist": cache_of("exact;9=exact"),
    "misspelt kernels": with_kernels("triton"),
    "kernels that a chip has not": with_kernels("pallas"),
    "kernels of another library": with_kernels("cudnn"),
    "splash attention off TPUs": with_kernels("splash"),
    "misspelt option of a function": generating([[1]], max_tokens=3),
    "another library's option": generating([[1]], do_sample=True),
    "count that is none": generating([[1]], chunk=0),
    "no prompt": generating([]),
    "empty prompt": generating([""]),
    "token outside the vocabulary": generating([[64]]),
    "text beyond what the model was trained for": generating([[1, 2, 3]], max_new_tokens=2048),
    "end token that the model lacks": generating([[1]], eos_ids=[64]),
    "empty stop string": generating([[1]], stop=["a", ""]),
    "text that cannot fit, whatever its tokens are": long_text,
    "prompt beyond the capacity": generating([[1, 2, 3]], capacity=32),
    "tokens for another batch": forwarding(jnp.ones((1, 3), int), jnp.asarray([3])),
    "more tokens counted than given": forwarding(jnp.ones((2, 3), int), jnp.asarray([4, 0])),
    "mask with a gap": forwarding(
        jnp.ones((2, 4), int), jnp.asarray([[1, 1, 0, 1], [0, 1, 1, 1]], bool)
    ),
    "cache of another model": forwarding(jnp.ones((2, 3), int), jnp.asarray([3, 0]), num_layers=1),
    "tokens beyond the capacity": beyond_capacity,
    "empty batch": generating([]),
    "cache changed by tree code along axis 0": repeated_layers,
    "less room than a row needs": less_room,
    "cut through a sliding window's ring": lambda *_: kvq.cut(
        kvq.init_cache(tiny(sliding_window=96), "kivi:bits=2,window=32", 1, 2048), 64
    ),
    "tokens that are to move, with keys stored after RoPE": lambda *_: kvq.drop(
        kvq.init_cache(tiny(), "kivi:bits=2,window=32", 1, 256), 0, 32
    ),
    "texts put behind each other that do not fit": texts_that_do_not_fit,
    "context shift of keys stored after RoPE": lambda *_: kvq.Session(
        kvq.load("recall"), "kivi:bits=2,window=32", context_shift=True
    ),
    "context shift of rows that are too short": lambda *_: kvq.Engine(
        tiny(), "exact", rows=1, capacity=64, context_shift=True
    ),
    "donated cache": donated,
    "gradient through a cache": gradient,
    "keys and values that are not finite": lambda *_: kvq.generate(
        spoiling(), [[1, 2]], max_new_tokens=4
    ),
    "no such file": text_file("absent.txt", None),
    "text that is not UTF-8": text_file("latin.txt", "caf\xe9".encode("latin-1")),
    "UTF-16 without a mark, or no text": text_file("holes.txt", b"abc\0\0"),
    "data without text in them": text_file("data.jsonl", b'{"body": "text"}'),
    "data that are no JSON": text_file("half.jsonl", b'{"text": "a"}\n{"text": '),
    "folder without data": lambda tmp_path, _, __: read(
        (tmp_path / "empty").mkdir() or tmp_path / "empty"
    ),
    "data set by nearly its name": lambda *_: read("wikitext"),
    "neither text nor tokens": lambda _, __, recall: kvq.eval.perplexity(
        recall, [0.5, 1.0], "exact"
    ),
    "model that repeats itself": lambda *_: read("self", model=repeating(), tokens=512),
    "text that is none": lambda _, __, recall: recall.encode("\udce9t\udce9"),
    "empty text": text_file("empty.txt", b" \n"),
    "text too short to evaluate": lambda *_: windows(np.arange(10), 512, 8192),
    "structured text without room": lambda _, __, recall: kvq.eval.copying(
        recall, "exact", length=100
    ),
    "structured text that a tokenizer cannot spell": lambda _, __, recall: kvq.eval.copying(
        recall, "exact", length=512
    ),
    "text too short to calibrate": lambda _, __, recall: sequences(recall, ["ab12ab12ab"], 1, 64),
    "method without its constants": generating([[1, 2, 3]], method=kvq.parse("kvquant")),
    "no sequences to calibrate on": lambda _, __, recall: kvq.calibrate.run(
        recall, kvq.parse("kvquant"), "a", count=0
    ),
    "method that needs none": lambda _, __, recall: kvq.calibrate.run(recall, kvq.kivi(), "ab12"),
    "activations that are not finite": infinite_activations,
    "artifact of another model": lambda _, __, recall: recall.with_artifact(artifact()),
    "folder that is no artifact": lambda tmp_path, *_: kvq.load_artifact(tmp_path / "absent"),
    "description of something else": described(kind="picture"),
    "description with a part missing": described(about=None),
    "stored file that was changed": file_changed,
    "array with a foreign name": foreign_name,
    "output that another run writes": held_twice,
    "folder of another format": described(format=99),
    "output folder that exists": existing,
    "read-only output folder": failing("pathlib.Path.mkdir", errno.EACCES),
    "full disk, artifact": failing("kvqjax.cache.artifacts.ocp.save", errno.ENOSPC),
    "full disk, progress": failing("kvqjax.calibrate.resume.np.savez", errno.ENOSPC),
    "progress of another run": other_state,
    "damaged progress": torn_state,
    "bits that are none": tuning(bits=0),
    "budget below the method's least": tuning(bits=0.5),
    "method without bits": tuning("exact"),
    "method with exceptions": tuning("higgs:bits=2;0=exact"),
    "method whose layers feed each other": tuning("aqua"),
    "sequences too short to tell": tuning(length=32),
    "text too short to tune by": tuning(text="ab12ab12 " * 150, length=256),
    "cache beyond the memory": lambda _, __, recall: require_room(recall, kvq.exact(), 1, 2**30),
    "mesh beyond any machine": lambda *_: MeshSize.parse("data=99999999"),
    "unknown device": lambda *_: kvq.plan("demo", "exact", device="h1000"),
    "device and mesh that differ": lambda *_: kvq.plan(
        "demo", "exact", device="v5e-16", mesh="model=8"
    ),
    "number of tokens that is none": lambda *_: kvq.plan("demo", "exact", context="many"),
    "picture of an unknown kind": lambda tmp_path, *_: check_picture(tmp_path / "picture.docx"),
    "picture in a folder that does not exist": lambda tmp_path, *_: check_picture(
        tmp_path / "absent" / "picture.png"
    ),
    "tool that is none": chatting(tools=[{}]),
    "name that the protocol forbids": chatting(tools=[tool("get weather")]),
    "two tools of one name": chatting(tools=[tool("add"), tool("add")]),
    "arguments that are no object": chatting(tools=[tool("add", {"type": "string"})]),
    "arguments that nothing can meet": chatting(tools=[tool("add", ENDLESS)]),
    "choice that is none": chatting(tools=[tool("add")], tool_choice="any"),
    "choice of a tool that was not offered": chatting(
        tools=[tool("add")], tool_choice={"type": "function", "function": {"name": "sub"}}
    ),
    "choice without tools": chatting(tool_choice="required"),
    "tools beside a grammar": chatting(tools=[tool("add")], grammar="json"),
    "variable of a template that a request says elsewhere": chatting(
        chat_template_kwargs={"tools": []}
    ),
    "answer to a call that no message has": chatting(
        messages=[ASKED, {"role": "tool", "tool_call_id": "x", "content": "3"}]
    ),
    "arguments of an earlier call that are no object": chatting(
        messages=[ASKED, {"role": "assistant", "tool_calls": [EARLIER]}]
    ),
}


def test_the_page_and_the_cases_name_the_same_inputs():
    assert list(ROWS) == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_message_is_the_documented_one(name, tmp_path, monkeypatch, recall):
    with pytest.raises(kvq.UserError) as caught:
        CASES[name](tmp_path, monkeypatch, recall)
    message = str(caught.value)
    wanted = ".+".join(re.escape(part) for part in ROWS[name].split("…"))
    assert re.fullmatch(wanted, message), message
    assert "\n" not in message
