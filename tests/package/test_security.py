"""Nothing that is read is ever run: no pickle, no eval, no code from a hub, no path that leaves its
folder."""

import ast
import importlib.util
import io
import pickle
from pathlib import Path

import numpy as np
import pytest

import kvqjax as kvq
from kvqjax.calibrate.resume import load_state
from kvqjax.model import loading as model_module

ROOTS = [
    Path(importlib.util.find_spec(name).submodule_search_locations[0])
    for name in ("kvqjax", "kvqjax.calibrate", "kvqjax.eval", "kvqjax.pallas_kernels")
]
FILES = sorted({file for root in ROOTS for file in root.rglob("*.py")})
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "torch"}
CALLS = {"eval", "exec", "compile", "__import__"}


def offences(source: str) -> list[str]:
    """What must not stand in the package, with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
            )
            found += [
                f"{node.lineno}: import {name}" for name in names if name.split(".")[0] in MODULES
            ]
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in CALLS:
                found.append(f"{node.lineno}: {node.func.id}()")
            for keyword in node.keywords:
                unsafe = keyword.arg in ("allow_pickle", "trust_remote_code", "shell")
                if unsafe and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ):
                    found.append(f"{node.lineno}: {keyword.arg}")
    return found


def test_no_pickle_no_eval_no_remote_code():
    by_file = {file: offences(file.read_text(encoding="utf-8")) for file in FILES}
    assert {file: lines for file, lines in by_file.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from torch import load",
        "eval('1')",
        "np.load(f, allow_pickle=True)",
        "f(trust_remote_code=x)",
    ],
)
def test_offences_are_seen(line):
    assert offences(line)
    assert len(FILES) > 50


@pytest.mark.parametrize(
    "name",
    [
        "../../etc",
        "owner/..",
        "../owner/name",
        "owner/name/../../x",
        "owner/./x",
        "/etc/x",
        "~/x",
        "owner/.x",
        "a/b..c",
    ],
)
def test_hub_names_that_could_be_paths_are_never_asked_for(name, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked")
    )
    monkeypatch.setattr(Path, "is_dir", lambda self: False)
    monkeypatch.setattr(Path, "exists", lambda self: False)
    with pytest.raises(kvq.UserError, match="no such folder, nor a hub id"):
        kvq.load(name)


def test_only_data_is_asked_of_the_hub(monkeypatch, tmp_path):
    import huggingface_hub

    asked = {}
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **options: asked.update(options) or tmp_path,
    )
    with pytest.raises(kvq.UserError, match=r"no config\.json"):
        kvq.load("owner/name")
    assert set(asked["allow_patterns"]) == set(model_module._HUB_FILES)
    assert not any(
        pattern.endswith((".py", ".bin", ".pt", ".pkl")) for pattern in asked["allow_patterns"]
    )


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was run",))


def test_a_pickle_in_a_calibration_state_is_refused(tmp_path):
    memory = io.BytesIO()
    np.savez(memory, identity=np.asarray("owner"), **{"0": np.asarray([Bomb()], object)})
    (tmp_path / "s.npz").write_bytes(memory.getvalue())
    with pytest.raises(kvq.UserError, match="cannot be read"):
        load_state(tmp_path / "s.npz", "owner", [np.ones(1)])
    (tmp_path / "s.npz").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(kvq.UserError, match="cannot be read"):
        load_state(tmp_path / "s.npz", "owner", [np.ones(1)])
