"""The runnable notebooks as papermill runs them: parameters take effect, misspelled ones fail, backbones of any size run."""
import json, os, subprocess, sys
from pathlib import Path

import nbformat
import papermill as pm
import pytest

ROOT = Path(__file__).resolve().parents[1]
TINY = dict(steps=2, batch_size=4, eval_per_kind=1)


def run(name, tmp_path, **parameters):
    "Execute a notebook from the project's root, as the README does; returns the executed copy."
    done = tmp_path / "done.ipynb"
    previous, in_test = Path.cwd(), os.environ.pop("IN_TEST", None)
    try: pm.execute_notebook(ROOT / "nbs" / name, done, parameters, kernel_name="python3", progress_bar=False, cwd=str(ROOT))
    finally:
        if in_test: os.environ["IN_TEST"] = in_test
    assert Path.cwd() == previous
    return nbformat.read(done, 4)


def printed(notebook): return "".join(o.get("text", "") for c in notebook.cells if c.cell_type == "code" for o in c.outputs)


def test_train_notebook_uses_what_it_is_given(tmp_path):
    notebook = run("05_train.ipynb", tmp_path, out=str(tmp_path / "out"), seed=3, overrides='{"tau": 0.07}', **TINY)
    card = json.loads((tmp_path / "out" / "foco" / "foco.json").read_text(encoding="utf-8"))
    assert card["config"]["seed"] == 3 and card["config"]["tau"] == .07 and card["config"]["batch_size"] == 4 and card["steps"] == [2, 2]
    assert '"tau": 0.07' in printed(notebook) # the effective settings are shown
    result = json.loads((tmp_path / "out" / "edits-val.FoCo.json").read_text(encoding="utf-8"))
    assert result["n_queries"] == 6 and result["seed"] == 3 and result["config"]["tau"] == .07 and result["gallery_sha256"]

    notebook = run("06_evaluate.ipynb", tmp_path, checkpoint=str(tmp_path / "out" / "foco"), n_per_kind=2, split="test", out=str(tmp_path / "scores"))
    result = json.loads((tmp_path / "scores" / "edits-test.FoCo.json").read_text(encoding="utf-8"))
    assert result["n_queries"] == 12 and result["split"] == "test"


def test_quality_notebook_measures_a_store(tmp_path):
    from foco.data.pairs import data_source
    from foco.decomposers.rules import Rules
    from foco.decomposers.store import captions_of, decompose_captions
    decompose_captions(captions_of(data_source("toyworld").training_pairs(20)), tmp_path/"pairs", Rules())
    run("decomposers/04_quality.ipynb", tmp_path, stores=json.dumps({"toyworld/mine": str(tmp_path/"pairs")}), out=str(tmp_path/"reports"))
    report = json.loads((tmp_path/"reports"/"toyworld"/"mine.json").read_text(encoding="utf-8"))
    assert report["numbers"]["captions"] == 20 and report["identity"]["decomposer"] == "rules" and "commit" in report
    with pytest.raises(pm.PapermillExecutionError, match="unknown parameter 'store'"): run("decomposers/04_quality.ipynb", tmp_path, store="{}")


def test_performance_notebook_measures_and_shows(tmp_path):
    "All sections in tiny sizes; what was measured is in the file, agrees, and is drawn."
    notebook = run("11_performance.ipynb", tmp_path, measure=True, quick=True, out=str(tmp_path/"results"), figures=str(tmp_path/"figures"))
    [path] = (tmp_path/"results").glob("*.quick.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert set(found) == {"products", "metrics", "search", "latency", "shares", "patches", "losses"}
    for section in found.values(): assert section["rows"] and section["about"]["versions"]["torch"] and section["about"]["processor"] and section["about"]["quick"]
    losses = {(r["form"], r["B"], r["chunk"]): r for r in found["losses"]["rows"]}
    literal = losses["literal", 4, None]
    for form in ("fast", "literal, by image"): assert losses[form, 4, None]["gradient"] == pytest.approx(literal["gradient"], rel=1e-3)
    assert losses["fast", 4, None]["loss"] == pytest.approx(literal["loss"], rel=1e-4) and losses["fast", 8, 32]["loss"] == pytest.approx(losses["fast", 8, None]["loss"], rel=1e-4)
    integers, names = (next(r for r in found["metrics"]["rows"] if r["way"] == way)["scores"] for way in ("integers", "names"))
    assert integers == pytest.approx(names, abs=1e-3)
    assert len(list((tmp_path/"figures").glob("*.pdf"))) == 4 and "no measurement yet" not in printed(notebook) and "QUICK TRY" in printed(notebook)


@pytest.mark.parametrize("name", ["fashioniq", "genecis"]) # the other two: below, and tests/test_evaluate.py
def test_evaluate_notebook_on_an_official_format(tmp_path, name):
    "The root of a benchmark on disk and options of its loader, as for the real ones."
    from foco.toyworld.benchmarks import CATEGORIES_FASHIONIQ, benchmark_root
    options, shown = {"fashioniq": ({"categories": CATEGORIES_FASHIONIQ[:1], "gallery": "val_union"}, "gallery: val_union"), "genecis": ({"tasks": ["change_object"]}, "tasks: ['change_object']")}[name]
    root = benchmark_root(name)
    notebook = run("06_evaluate.ipynb", tmp_path, benchmark=name, root=str(root), split="val", method="average", checkpoint="none", options=json.dumps(options),
                   cache=str(tmp_path / "features"), out=str(tmp_path / "scores"))
    [path] = (tmp_path / "scores").glob("*.json")
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["benchmark"].lower() == name and result["method"] == "average" and result["data"] == "unofficial" and shown in printed(notebook)
    assert any((tmp_path / "features").iterdir())


def test_evaluate_notebook_with_foco_alone(tmp_path):
    "The bundled models without a rival: scores, and nothing to compare them with."
    run("06_evaluate.ipynb", tmp_path, method="foco", n_per_kind=2, also="edits:test", out=str(tmp_path / "scores"))
    assert sorted(p.name for p in (tmp_path / "scores").glob("*.json")) == [f"edits-{split}.FoCo{variant}.json" for split in ("test", "val") for variant in ("-paper", "")]


def test_evaluate_notebook_writes_server_files_for_hidden_labels(tmp_path):
    "A test split without targets gives no score but the files that CIRR's server takes."
    from foco.data.cirr import load_cirr
    from foco.toyworld.benchmarks import write_benchmark
    root = write_benchmark("cirr", tmp_path / "cirr")
    captions = root / "cirr" / "captions" / "cap.rc2.test1.json"
    records = json.loads(captions.read_text(encoding="utf-8"))
    captions.write_text(json.dumps([{k: v for k, v in r.items() if k not in ("target_hard", "target_soft")} for r in records]), encoding="utf-8")
    notebook = run("06_evaluate.ipynb", tmp_path, benchmark="cirr", root=str(root), split="test1", method="foco", out=str(tmp_path / "scores"))
    assert load_cirr(root, "test1").hidden and not list((tmp_path / "scores").glob("*.json"))
    for metric, n in (("recall", 50), ("recall_subset", 3)):
        payload = json.loads((tmp_path / "scores" / "FoCo" / f"test1_pred_ranks_{metric}.json").read_text(encoding="utf-8"))
        assert payload["metric"] == metric and len(payload) == len(records) + 2 and all(len(payload[str(r["pairid"])]) == n for r in records)
    assert "test1_pred_ranks_recall.json for the server" in printed(notebook)


@pytest.mark.parametrize("name, wrong, near", [("05_train.ipynb", "batch_sz", "batch_size"), ("06_evaluate.ipynb", "splits", "split"), ("08_baselines.ipynb", "methd", "method"), ("toyworld/04_tiny_clip.ipynb", "minute", "minutes"), ("paper/01_composing.ipynb", "sead", "seeds"), ("11_performance.ipynb", "section", "sections")])
def test_misspelled_parameter_fails(tmp_path, name, wrong, near):
    with pytest.raises(pm.PapermillExecutionError, match=f"unknown parameter '{wrong}'; did you mean {near}"): run(name, tmp_path, **{wrong: 4})


def test_missing_weights_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(pm.PapermillExecutionError) as error: run("05_train.ipynb", tmp_path, backbone="ViT-G-14", steps=2, batch_size=4, out=str(tmp_path / "out"))
    assert error.value.ename == "MissingWeights"
    for words in ("ViT-bigG-14", "laion2b_s39b_b160k", "open_clip_model.safetensors", "pretrained"): assert words in str(error.value)


def test_vit_b_32_with_random_weights_trains(tmp_path):
    "A real architecture through the same path as the tiny CLIP: 224 pixels, 512 dimensions; no benchmark in a dry run."
    run("05_train.ipynb", tmp_path, backbone="ViT-B-32", pretrained="random", steps=2, batch_size=4, out=str(tmp_path / "out"))
    card = json.loads((tmp_path / "out" / "foco" / "foco.json").read_text(encoding="utf-8"))
    assert card["backbone"]["name"] == "ViT-B-32" and card["backbone"]["weights"].startswith("random")


@pytest.mark.parametrize("name", ["foco.train", "foco.evaluate", "foco.visualize", "foco.toyworld.tiny_clip"])
def test_modules_import_alone(name): subprocess.run([sys.executable, "-c", f"import {name}"], check=True, timeout=120)
