"""`kvqjax eval`: one table for several caches, JSON with its stamp, files and pictures."""

import dataclasses
import json
import math
import re
from pathlib import Path

import jax
import pytest
from cases import thinned
from commands import run

import kvqjax as kvq
from kvqjax.data.tokens import halves
from kvqjax.eval import windows
from kvqjax.eval.comparison import artifact_folder, kept_path
from kvqjax.eval.labels import new_figure, spread
from kvqjax.eval.plots import PLOTS, draw, series, title_of
from kvqjax.hardware.planner import parameter_shapes
from kvqjax.hardware.prompts import prompt_operations

ROWS = {
    "ppl": [
        {
            "cache": "exact",
            "mode": "m",
            "windows": "w",
            "bits_stored": 16.0,
            "kld": 0.0,
            "context": 32768,
        }
    ],
    "drift": [{"cache": "exact", "steps": 64, "kld": [0.0, 0.1]}],
    "retrieval": [
        {"cache": "exact", "mode": "m", "task": "kv", "length": 64, "by_depth": [1.0, 0.0]},
        {"cache": "exact", "mode": "m", "task": "kv", "length": 128, "by_depth": [0.5]},
    ],
    "copy": [{"cache": "exact", "mode": "m", "kind": "json", "length": 1024, "right": 0.9}],
    "compare": [
        {
            "cache": cache,
            "mode": "m",
            "windows": "w",
            "bits_stored": bits,
            "kld": kld,
            "context": 32768,
        }
        for cache, bits, kld in (
            ("exact", 16.0, 1e-10),
            ("kivi:bits=2", 2.4, 0.2),
            ("kivi", 4.4, 0.01),
            ("higgs", 3, 1),
        )
    ],
    "harness": [{"cache": "exact", "task": "own", "score": 0.4}],
}


@pytest.fixture
def call(capsys, monkeypatch):
    return lambda *words: run(capsys, monkeypatch, *words)


def test_a_report_in_full(call, tmp_path):
    words = [
        "eval",
        "ppl",
        "-m",
        "recall",
        "-c",
        "kivi:bits=2,window=0",
        "--window",
        "64",
        "--tokens",
        "128",
    ]
    words += ["--chunk", "32"]
    code, out, err = call(*words, "--json", "--out", str(tmp_path / "reports"))
    assert code == 0, err
    (row,) = json.loads(out)
    about = row.pop("about")
    assert {"about": about, "rows": [row]} == json.loads(
        (tmp_path / "reports" / "ppl.json").read_text()
    )
    names = {
        "cache",
        "mode",
        "tokens",
        "bits_method",
        "bits_stored",
        "bytes",
        "ppl",
        "ppl_exact",
        "kld",
        "top1",
    }
    assert names <= set(row)
    assert row["cache"] == "kivi:bits=2,window=0"
    assert row["kld"] > 0
    assert about["fingerprint"] == kvq.load("recall").fingerprint
    assert about["data"]["name"] == "synthetic"
    assert len(about["data"]["sha256"]) == 64
    assert (about["seed"], set(about["versions"])) == (0, {"kvqjax", "jax", "jaxlib"})
    assert sum(about["ledger"]["bytes"][row["cache"]].values()) == row["bytes"]


def test_every_mode_with_every_chunk(call, monkeypatch):
    def row(model, ids, method, *, mode, chunk, **options):
        return {
            "cache": str(method),
            "mode": mode,
            "chunk": chunk,
            "windows": options["cut"],
            "bits_stored": 16.0,
        }

    monkeypatch.setattr(windows, "perplexity", row)
    words = [
        "--mode",
        "loop",
        "--mode",
        "prefill",
        "--chunk",
        "1",
        "--chunk",
        "512",
        "--windows",
        "aqua",
        "--json",
    ]
    code, out, err = call("eval", "ppl", "-m", "recall", "-c", "exact", "-c", "kivi:bits=2", *words)
    assert code == 0, err
    got = [(row["cache"], row["mode"], row["chunk"], row["windows"]) for row in json.loads(out)]
    caches, modes = ("exact", "kivi:bits=2"), ("loop", "prefill")
    assert got == [
        (cache, mode, chunk, "aqua") for cache in caches for mode in modes for chunk in (1, 512)
    ]


def test_a_table_carries_the_stamp(call, tmp_path):
    text = tmp_path / "hay.txt"
    text.write_text("Owls sing at night. " * 10)
    words = [
        "eval",
        "retrieval",
        "-m",
        "demo",
        "-c",
        "exact",
        "--task",
        "passkey",
        "--length",
        "64",
        "--samples",
        "2",
    ]
    code, out, err = call(*words, "--depths", "2", "--data", str(text))
    assert code == 0, err
    assert "by depth" in out
    for part in ("kvqjax 0", "seed 0", "hay.txt"):
        assert part in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["harness", "-c", "exact"], "--task"),
        (
            ["ppl", "-m", "recall", "-c", "exact", "--data", "wikitext2", "--folder", "/nowhere"],
            "wiki.test.raw",
        ),
        (["ppl", "-m", "recall", "-c", "exact", "--windows", "round"], "known: gptq"),
        (["ppl", "-c", "exact", "--context", "0"], "--context"),
        (["compare", "--sequences", "0"], "--sequences"),
        (["compare", "-c", "nonsense"], "nonsense"),
    ],
)
def test_bad_input_is_one_line_and_code_2(call, words, message):
    code, out, err = call("eval", *words)
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def drawn(kind, rows):
    """The figure of a report's picture, laid out."""
    pytest.importorskip("matplotlib")
    figure = new_figure(6.4, 4.4)
    PLOTS[kind](figure, rows)
    figure.draw_without_rendering()
    return figure


def test_the_picture_that_compares_caches():
    """A line a method, KL divergence on a log axis, bits at a context that is named, the exact
    cache as a line; names at the lines' ends instead of a legend."""
    figure = drawn("compare", ROWS["compare"])
    (axes,) = figure.axes
    assert axes.get_yscale() == "log"
    assert "32K tokens" in axes.get_xlabel()
    lines = {line.get_label(): line.get_xydata() for line in axes.lines}
    assert set(lines) == {"kivi", "higgs", "exact cache, 16 bits: 0"}
    assert lines["kivi"].tolist() == [[2.4, 0.2], [4.4, 0.01]]
    (low, _), exact = axes.get_ylim(), lines["exact cache, 16 bits: 0"][:, 1]
    assert (exact == low).all()
    assert low < 0.01
    assert not figure.legends
    assert axes.get_legend() is None
    names = {text.get_text(): text for text in axes.texts}
    assert set(names) == {"kivi", "higgs", "exact cache, 16 bits: 0"}
    assert names["kivi"].xy == (4.4, 0.01)


CACHES = [
    f"{name}:group={group}"
    for group in (32, 64, 128)
    for name in ("kivi", "higgs", "kvquant", "uniform")
]


@pytest.mark.parametrize("kind", ["compare", "drift"])
def test_names_cover_neither_each_other_nor_the_curves(kind):
    from matplotlib.text import Text

    setup = {"mode": "m", "windows": "w", "context": 32768, "steps": 64}
    rows = []
    for number, cache in enumerate(CACHES):
        # Every other ends far left.
        curve = [(2.3, 0.2 + number / 100), (4.3, 0.01 + number / 1e4)][: 2 - number % 2]
        kld = [value for _, value in curve]
        if kind == "drift":
            rows.append(setup | {"cache": cache, "kld": kld})
        else:
            rows += [
                setup | {"cache": cache, "bits_stored": bits, "kld": value} for bits, value in curve
            ]
    figure = drawn(kind, rows)
    (axes,) = figure.axes
    boxes = [Text.get_window_extent(text) for text in axes.texts]
    assert len(boxes) >= len(CACHES)
    for number, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:number])
        assert box.x1 <= figure.bbox.x1 + 1
        assert box.x0 >= 0
        for line in axes.lines[: len(CACHES)]:
            assert not box.contains(*axes.transData.transform(line.get_xydata()[-1]))
    styles = {
        (line.get_color(), line.get_marker(), line.get_linestyle())
        for line in axes.lines[: len(CACHES)]
    }
    assert len(styles) == len(CACHES)


@pytest.mark.parametrize("kind", thinned(["compare", "drift"], 4))
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_divergence_that_no_axis_can_show_is_named_below_it(kind, wrong, tmp_path):
    row = ROWS[kind][-1]
    spoilt = row | {"cache": "klt:bits=1", "kld": [0.1, wrong] if kind == "drift" else wrong}
    figure = drawn(kind, [*ROWS[kind], spoilt])
    (axes,) = figure.axes
    note = " ".join(axes.get_xlabel().split())
    assert note.endswith("not drawn where the divergence is infinite or NaN: klt:bits=1")
    heights = [height for line in axes.lines for height in line.get_ydata()]
    assert all(map(math.isfinite, heights))
    assert not any(
        "klt" in line.get_label() and line.get_label().endswith(": 0") for line in axes.lines
    )
    assert "not drawn" not in drawn(kind, ROWS[kind]).axes[0].get_xlabel()
    draw(kind, [spoilt], "title", tmp_path / "one.png")


def test_cells_have_numbers_and_one_colour_bar():
    row = {"mode": "m", "task": "kv", "length": 64, "by_depth": [1.0, 0.25]}
    # Four panels leave two places of their grid empty.
    caches = ("exact", "kivi:bits=2", "kivi", "klt:bits=2")
    figure = drawn("retrieval", [row | {"cache": cache} for cache in caches])
    *panels, bar = figure.axes
    assert [text.get_text() for axes in panels for text in axes.texts] == ["1.0", "0.25"] * 4
    assert bar.get_ylabel() == "share of answers right"
    assert panels[-1].get_xlabel().endswith("(%)")
    assert panels[0].get_ylabel().endswith("(tokens)")


def test_names_move_apart_by_as_little_as_they_must():
    assert spread([5.0, 5.0, 20.0], [4.0] * 3, 0.0, 100.0) == [3, 7, 20]
    assert spread([1.0, 1.0], [4.0] * 2, 0.0, 100.0) == [2, 6]
    assert spread([98.0, 99.0, 50.0], [4.0] * 3, 0.0, 100.0) == [94, 98, 50]


@pytest.mark.parametrize(
    ("model", "text", "title"),
    [
        ("demo", "synthetic", "demo on synthetic: KL divergence by bits stored"),
        ("/", None, "KL divergence by bits stored"),
        ("owner/name", "/home/me/book.txt", "owner/name on book.txt: KL divergence by bits stored"),
    ],
)
def test_a_title_says_model_text_and_what_is_measured(model, text, title):
    assert title_of("compare", model, text).endswith(title)


def test_rows_of_one_line_differ_in_bits_only():
    assert series("kivi:bits=2,window=0") == series("kivi:window=0") == "kivi:window=0"
    assert series("aqua:bits=3,first_bits=3") == "aqua"
    assert series("kivi:key_bits=2,value_bits=4;0-1=exact") == "kivi;0-1=exact"


def test_compare_calibrates_once_and_draws(call, monkeypatch, tmp_path):
    """Table and picture in one command; the second run finds the calibration in the user's cache
    folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)
    words = [
        "eval",
        "compare",
        "-m",
        "recall",
        "-c",
        "exact",
        "-c",
        "kivi:bits=2,window=0,centre=mean",
        "--window",
        "96",
    ]
    words += ["--tokens", "96", "--sequences", "1", "--context", "4096", "--json"]
    code, out, err = call(*words)
    assert code == 0, err
    exact, kivi = json.loads(out)
    assert (exact["cache"], exact["kld"], exact["context"]) == ("exact", 0, 4096)
    assert kivi["kld"] > 0
    assert kivi["bits_stored"] < 4 < exact["bits_stored"]
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    (kept,) = (tmp_path / "xdg" / "kvqjax" / "artifacts").iterdir()
    assert kvq.load_artifact(kept).method == kvq.parse(kivi["cache"])
    monkeypatch.setattr(
        "kvqjax.calibrate.run", lambda *args, **options: pytest.fail("calibrated twice")
    )
    code, out, err = call(*words, "--plot", "again.svg")
    assert code == 0, err
    again = json.loads(out)[1]
    assert again["kld"] == kivi["kld"]
    assert "<svg" in (tmp_path / "again.svg").read_text()


@pytest.mark.nightly
def test_compare_in_python_gives_the_rows_of_the_shell(call, monkeypatch, tmp_path):
    """The same text, figures and calibrations; a table in print, a data frame, and the stamp beside
    the rows."""
    monkeypatch.chdir(tmp_path)
    options = {
        "window": 96,
        "tokens": 96,
        "sequences": 1,
        "context": 4096,
        "store": str(tmp_path / "kept"),
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    caches = ["exact", "kivi:bits=2,window=0,centre=mean"]
    code, out, err = call(
        "eval", "compare", "-m", "recall", "-c", caches[0], "-c", caches[1], *words, "--json"
    )
    assert code == 0, err
    told = []

    def bar(label):
        told.append(label)
        return lambda fraction: None

    rows = kvq.compare("recall", caches, bar=bar, **options)
    printed = [
        {name: value for name, value in row.items() if name != "about"} for row in json.loads(out)
    ]
    assert rows == printed
    assert told == [f"calibrating {rows[1]['cache']}", *(row["cache"] for row in rows)]
    about = json.loads(out)[0]["about"]
    assert {name: value for name, value in rows.about.items() if name != "date"} == {
        name: value for name, value in about.items() if name != "date"
    }
    assert kvq.load("recall").fingerprint in "".join(str(rows).split())
    assert pytest.importorskip("pandas").DataFrame(rows)["kld"].tolist() == [
        row["kld"] for row in rows
    ]
    assert rows._repr_html_().count("<tr>") == 3
    model = kvq.load("recall")
    (alone,) = kvq.compare(model, "exact", **options)
    assert alone == rows[0]
    with pytest.raises(
        kvq.UserError, match="unknown option of compare 'tokns'; did you mean 'tokens'"
    ):
        kvq.compare(model, "exact", tokns=96)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(Path.unlink, marks=pytest.mark.nightly),
        lambda file: file.write_bytes(file.read_bytes()[:40]),
    ],
)
def test_a_kept_calibration_that_is_damaged_is_made_anew(tmp_path, damage):
    model, caches = kvq.load("recall"), ["kivi:bits=2,window=0,centre=mean"]
    options = {"window": 96, "tokens": 96, "sequences": 1, "context": 4096, "store": tmp_path}
    rows = list(kvq.compare(model, caches, **options))
    (folder,) = tmp_path.iterdir()
    damage(folder / "description.json")
    with pytest.warns(UserWarning, match=f"calibrated anew: {folder}"):
        assert list(kvq.compare(model, caches, **options)) == rows
    assert list(kvq.compare(model, caches, **options)) == rows


def test_a_calibration_is_kept_for_its_own_model_and_text(tmp_path):
    model, method = kvq.load("recall"), kvq.parse("kvquant:bits=3")
    paths = {
        kept_path(tmp_path, model, method, "text", None),
        kept_path(tmp_path, model.replace(fingerprint="other"), method, "text", None),
        kept_path(tmp_path, model, kvq.parse("kvquant:bits=2"), "text", None),
        kept_path(tmp_path, model, method, "other text", None),
        kept_path(tmp_path, model, method, "text", 4),
    }
    assert len(paths) == 5
    assert halves("one two three four") == ("one two three", " four")
    assert halves("oneword") == ("one", "word")


def test_where_calibrations_are_kept(monkeypatch, tmp_path):
    """XDG_CACHE_HOME; a relative one is ignored, as its specification asks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert artifact_folder() == tmp_path / "kvqjax" / "artifacts"
    for value in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert artifact_folder() == Path.home() / ".cache" / "kvqjax" / "artifacts"


@pytest.mark.parametrize("kind", thinned(PLOTS, 2))
def test_every_report_has_a_picture(kind, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"{kind}.png"
    draw(kind, ROWS[kind], "title", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(kvq.UserError, match="cannot be written"):
        draw(kind, ROWS[kind], "title", tmp_path / "no" / "folder.png")


@pytest.mark.parametrize("command", ["ppl", "drift"])
def test_a_short_text_is_refused_before_anything_is_said(call, tmp_path, command):
    (tmp_path / "short").write_text("ab12")
    code, out, err = call(
        "eval", command, "-m", "recall", "-c", "exact", "--data", str(tmp_path / "short")
    )
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert "fewer than one window" in err


def test_a_drift_in_chunks_above_its_window_is_refused_before_anything_is_said(call):
    code, out, err = call("eval", "drift", "-m", "recall", "-c", "exact", "--chunk", "16777216")
    assert (code, out) == (2, "")
    assert (
        err
        == "error: chunk=16777216 is more than all 512 steps; say a smaller chunk or a longer window\n"
    )


def test_an_evaluation_says_what_it_will_do(call):
    words = [
        "-m",
        "recall",
        "-c",
        "exact",
        "-c",
        "kivi",
        "--task",
        "kv",
        "--length",
        "64",
        "--samples",
        "1",
    ]
    code, _, err = call("eval", "retrieval", *words)
    assert code == 0
    about = "retrieval of recall through exact, then kivi:bits=2: 64 tokens each; "
    assert re.fullmatch(
        about + "the arithmetic alone takes less than a second on this device\n", err
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_pass_multiplies_with_every_weight_but_a_looked_up_embedding(tied):
    config = dataclasses.replace(kvq.load("recall").config, tied_embeddings=tied)
    shapes = parameter_shapes(config)
    sizes = {name: shapes[name] for name in ("layers", "embed")}
    assert ("head" in parameter_shapes(config)) != tied
    # The head, a matrix of the embedding's size, multiplies in both; the embedding of an untied
    # model does not.
    attention = 4 * config.query_width * config.num_layers  # each token to itself
    assert (
        prompt_operations(config, 0, 1)
        == 2 * sum(leaf.size for leaf in jax.tree.leaves(sizes)) + attention
    )
