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
    result = json.loads((tmp_path / "out" / "toyworld-val.FoCo.json").read_text(encoding="utf-8"))
    assert result["n_queries"] == 6 and result["seed"] == 3 and result["config"]["tau"] == .07 and result["gallery_sha256"]

    notebook = run("06_evaluate.ipynb", tmp_path, checkpoint=str(tmp_path / "out" / "foco"), n_per_kind=2, split="test", out=str(tmp_path / "scores"))
    result = json.loads((tmp_path / "scores" / "toyworld-test.FoCo.json").read_text(encoding="utf-8"))
    assert result["n_queries"] == 12 and result["split"] == "test"


@pytest.mark.parametrize("name, wrong, near", [("05_train.ipynb", "batch_sz", "batch_size"), ("06_evaluate.ipynb", "splits", "split"), ("toyworld/04_tiny_clip.ipynb", "minute", "minutes")])
def test_misspelled_parameter_fails(tmp_path, name, wrong, near):
    with pytest.raises(pm.PapermillExecutionError, match=f"unknown parameter '{wrong}'; did you mean {near}"): run(name, tmp_path, **{wrong: 4})


def test_missing_weights_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(pm.PapermillExecutionError) as error: run("05_train.ipynb", tmp_path, backbone="ViT-G-14", out=str(tmp_path / "out"))
    assert error.value.ename == "MissingWeights"
    for words in ("ViT-bigG-14", "laion2b_s39b_b160k", "open_clip_model.safetensors", "pretrained"): assert words in str(error.value)


def test_vit_b_32_with_random_weights_trains(tmp_path):
    "A real architecture through the same path as the tiny CLIP: 224 pixels, 512 dimensions; no benchmark in a dry run."
    run("05_train.ipynb", tmp_path, backbone="ViT-B-32", pretrained="random", steps=2, batch_size=4, out=str(tmp_path / "out"))
    card = json.loads((tmp_path / "out" / "foco" / "foco.json").read_text(encoding="utf-8"))
    assert card["backbone"]["name"] == "ViT-B-32" and card["backbone"]["weights"].startswith("random")


@pytest.mark.parametrize("name", ["foco.train", "foco.evaluate", "foco.visualize", "foco.toyworld.tiny_clip"])
def test_modules_import_alone(name): subprocess.run([sys.executable, "-c", f"import {name}"], check=True, timeout=120)
