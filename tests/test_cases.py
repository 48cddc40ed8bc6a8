"""Faults that users of similar projects met: cases.csv says of each which test tries it, or why it cannot happen here. What no other file tries is tried here."""
import argparse, ast, csv, functools, json, re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from foco.data.cards import load_card
from foco.data.check import check_data
from foco.data.fashioniq import load_fashioniq
from foco.data.metrics import Ranks, metric_values
from foco.evaluate import Result, results_table
from foco.hub import find_model, read_card
from foco.weights import file_sha256, read_weights
from official import OFFICIAL
from test_fashioniq import small

ROOT = Path(__file__).resolve().parents[1]
LISTED = OFFICIAL.parent/"cases.csv"            # the faults themselves, where they are at hand
LAID_ASIDE = ("cannot apply: ", "missing: ")    # how the note of a case without a test begins


def read(path):
    with open(path, encoding="utf-8", newline="") as f: return list(csv.DictReader(f))


CASES = read(Path(__file__).with_name("cases.csv"))
each = pytest.mark.parametrize("case", CASES, ids=lambda c: c["id"])


# ---- the table

@functools.cache
def held(path): # names of tests, or the text of hidden cells
    if path.suffix == ".py": return {n.name for n in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")}
    cells = ["".join(c["source"]) for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    return "\n\n".join(c for c in cells if c.startswith("#| hide"))


def complaint(test, root=ROOT):
    "Say what is wrong with `tests/test_x.py::test_y`, or with `nbs/x.ipynb#what stands in a hidden cell`."
    where, _, name = test.partition("#" if ".ipynb#" in test else "::")
    path = root/where
    if not name or not path.is_file(): return f"{test}: expected a file and, behind :: or #, what to look for in it"
    if name in held(path): return None
    return f"{where} has no test {name}" if path.suffix == ".py" else f"no hidden cell of {where} holds {name!r}"


def test_every_case_stands_once():
    ids = [c["id"] for c in CASES]
    assert list(CASES[0]) == ["id", "what", "test", "note"] and ids == sorted(set(ids)) and all(re.fullmatch(r"C\d{3}", i) for i in ids)
    if not LISTED.is_file(): pytest.skip("the list of faults is not here")
    assert set(ids) == {c["id"] for c in read(LISTED)}


@each
def test_every_case_has_its_test_or_says_why_not(case):
    assert case["what"] and (case["test"] or case["note"].startswith(LAID_ASIDE))
    assert not [wrong for test in filter(None, case["test"].split(" | ")) if (wrong := complaint(test))]


def test_a_test_that_does_not_exist_is_noticed(tmp_path):
    (tmp_path/"test_x.py").write_text("def test_y(): pass\ndef helper(): pass")
    (tmp_path/"x.ipynb").write_text(json.dumps({"cells": [{"cell_type": "code", "source": ["#| hide\n", "test_eq(1, 1)"]}, {"cell_type": "code", "source": "shown = 1"}, {"cell_type": "markdown", "source": "#| hide prose"}]}))
    assert complaint("test_x.py::test_y", tmp_path) is complaint("x.ipynb#test_eq(1, 1)", tmp_path) is None
    for bad in ("test_x.py::test_z", "test_x.py::helper", "test_x.py", "test_none.py::test_y", "x.ipynb#shown = 1", "x.ipynb#prose", "x.ipynb", "none.ipynb#test_eq"): assert complaint(bad, tmp_path), bad


# ---- benchmarks and scores

def test_recall_is_the_share_of_queries():
    "Four queries with one target each, at ranks 1, 3, 6 and 51."
    ranks = Ranks([np.array([r]) for r in (1., 3., 6., 51.)], [None] * 4, [None] * 4)
    assert {k: metric_values(f"R@{k}", ranks).mean() for k in (1, 2, 5, 10, 50, 100)} == {1: .25, 2: .25, 5: .5, 10: .75, 50: .75, 100: 1.}


def test_categories_are_named_with_the_score(tmp_path):
    root = small(tmp_path, n=4, asked=1)
    one, all_ = (load_fashioniq(root, pictures=False, **chosen).protocol for chosen in ({"categories": "shirt"}, {}))
    assert (one["categories"], one["variant"]) == (["shirt"], "categories") and (all_["categories"], all_["variant"]) == (["dress", "shirt", "toptee"], "official")


def test_pictures_without_annotations_are_told_which_branch(tmp_path):
    (tmp_path/"dev").mkdir(); Image.new("RGB", (8, 8)).save(tmp_path/"dev"/"dev-0-0-img0.png")
    report = check_data("cirr", tmp_path, "val")
    assert not report.complete and all(words in str(report) for words in ("cirr/captions/cap.rc2.val.json", "cirr/image_splits/split.rc2.val.json", "git clone -b cirr_dataset"))


def test_cards_say_where_else_to_go():
    cirr, cc3m = load_card("cirr"), load_card("cc3m")
    assert "[backup](" in cirr.text and "pixparse/cc3m-wds" in "\n".join(cc3m.get)
    assert cc3m.counts["hub_copy"]["train"] < cc3m.counts["pairs"]["train"]


def test_the_same_name_with_other_weights_is_another_question(tmp_path):
    one = Result("CIRR", "val", "average", {"R@1": 1.}, {"R@1": [0., 2.]}, {}, 9, 99, "g", "q", {}, "ViT-L-14", "hub:timm/vit_large_patch14_clip_224.openai", "official")
    other = replace(one, method="image only", weights="hub:laion/CLIP-ViT-L-14-laion2B-s32B-b82K")
    with pytest.warns(UserWarning, match="differ in weights and must not be compared"): results_table([one, other])
    one.save(tmp_path)
    with pytest.raises(FileExistsError, match="another weights"): replace(other, method="average").save(tmp_path)


# ---- files

def test_checkpoints_that_hold_settings_are_refused(tmp_path):
    "Settings in a Namespace, as training scripts save them: only a full pickle could read it."
    torch.save({"state_dict": {"w": torch.ones(2)}, "args": argparse.Namespace(lr=.1)}, tmp_path/"epoch_9.pt")
    with pytest.raises(ValueError, match="never runs a pickle.*convert it once to .safetensors"): read_weights(tmp_path/"epoch_9.pt")


@pytest.mark.parametrize("name", ["foco-tiny", "foco-tiny-paper"])
def test_bundled_weights_are_those_of_their_card(name):
    folder = find_model(name)
    card, clip = read_card(folder), folder.parent/"tiny-clip"/"open_clip_model.safetensors"
    assert card["weights_sha256"] == file_sha256(folder/"foco.safetensors") and card["backbone"]["weights"] == f"sha256:{file_sha256(clip)}"
    assert card["negatives per image"] == card["config"]["batch_size"] - 1


# ---- rules for modules: syntax tree -> complaints

OTHERS = ("transformers", "open_clip", "huggingface_hub", "timm", "peft", "accelerate")     # what has broken its users by moving private names
SERVERS = ("http.server", "socketserver", "gradio", "streamlit", "flask", "fastapi", "uvicorn")


def dotted(node): # "a.b.c" of such an expression, else ""
    names = []
    while isinstance(node, ast.Attribute): names.append(node.attr); node = node.value
    return ".".join([node.id, *names[::-1]]) if isinstance(node, ast.Name) else ""


def no_private_imports(tree):
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom) and not n.level and (names := [*n.module.split("."), *(a.name for a in n.names)])[0] in OTHERS:
            if any(re.match(r"_(?!_)", name) for name in names): yield f"line {n.lineno}: {ast.unparse(n)}"
        if isinstance(n, ast.Attribute) and re.match(r"_(?!_)", n.attr) and dotted(n).split(".")[0] in OTHERS: yield f"line {n.lineno}: {ast.unparse(n)}"


def no_text_is_run(tree):
    for n in ast.walk(tree):
        if isinstance(n, ast.Call) and dotted(n.func) in ("eval", "exec", "os.system", "os.popen"): yield f"line {n.lineno}: {dotted(n.func)}"
        if isinstance(n, ast.keyword) and n.arg == "shell": yield f"line {n.value.lineno}: a shell"


def nothing_listens(tree):
    for n in ast.walk(tree):
        modules = [a.name for a in n.names] if isinstance(n, ast.Import) else [n.module] if isinstance(n, ast.ImportFrom) and not n.level else []
        if found := [m for m in modules if m.startswith(SERVERS)]: yield f"line {n.lineno}: {found[0]}"
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and "0.0.0.0" in n.value: yield f"line {n.lineno}: {n.value}"


def no_gpu_is_assumed(tree):
    for n in ast.walk(tree):
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "cuda": yield f"line {n.lineno}: {ast.unparse(n)}; pass a device"


BAD = [(no_private_imports, "from transformers.models.clip.modeling_clip import _build_mask"), (no_private_imports, "from open_clip._x import y"), (no_private_imports, "huggingface_hub._login.x()"),
       (no_text_is_run, "eval(args.prompt)"), (no_text_is_run, "subprocess.run(text, shell=True)"), (nothing_listens, "import http.server"), (nothing_listens, "from gradio import Blocks"),
       (nothing_listens, "launch(server_name='0.0.0.0')"), (no_gpu_is_assumed, "model.cuda(args.gpu)")]


@pytest.fixture(scope="module")
def modules(): return {p.relative_to(ROOT).as_posix(): ast.parse(p.read_text(encoding="utf-8")) for p in (ROOT/"foco").rglob("*.py")}


@pytest.mark.parametrize("rule", dict.fromkeys(r for r, _ in BAD), ids=lambda r: r.__name__)
def test_modules(rule, modules):
    found = [f"{where}, {wrong}" for where, tree in modules.items() for wrong in rule(tree)]
    assert len(modules) > 40 and not found, "\n".join(found)


@pytest.mark.parametrize("rule, text", BAD, ids=lambda x: x.__name__ if callable(x) else "")
def test_every_rule_can_fail(rule, text): assert list(rule(ast.parse(text)))


# ---- the project's files

def test_dependencies_are_bounded_on_both_sides():
    project = pytest.importorskip("tomllib").loads((ROOT/"pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [r for extra, rs in {"": project["dependencies"], **project["optional-dependencies"]}.items() if extra != "dev" for r in rs if not r.startswith("foco[")]
    assert len(asked) > 20 and not [r for r in asked if not re.fullmatch(r"[\w-]+>=[\d.]+,<[\d.]+", r)]


@pytest.mark.parametrize("path", sorted(p for p in (ROOT/"nbs").rglob("*.ipynb") if p.name[0] not in "._"), ids=lambda p: p.relative_to(ROOT/"nbs").as_posix())
def test_notebooks_say_their_language(path):
    "papermill cannot write parameters into a notebook that does not."
    assert json.loads(path.read_text(encoding="utf-8"))["metadata"]["kernelspec"] == {"display_name": "python3", "language": "python", "name": "python3"}


def test_workers_have_one_thread_each():
    assert re.search(r"^export .*\bOMP_NUM_THREADS=1\b", (ROOT/".ci"/"run").read_text(encoding="utf-8"), re.M)
