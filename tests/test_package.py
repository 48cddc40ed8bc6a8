"""What people install: a wheel that works alone, an import that costs nothing, extras that say their name, models that can be shared."""
import ast, json, re, shutil, subprocess, sys, zipfile
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard

import foco
from foco.complete import FoCo, FoCoComposer
from foco.hub import BUNDLED, HubError, find_model, model_card, read_card, read_scores

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(p for p in (ROOT/"foco").rglob("*.py") if p.name != "_modidx.py")
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml", "open_clip": "open_clip_torch", "faiss": "faiss-cpu", "huggingface_hub": "huggingface-hub"}
COMES_WITH = {"jinja2": "torch"}


def run(code, where, path, **env):
    "Run Python from another folder, with foco from `path` only."
    import os
    return subprocess.run([sys.executable, "-c", code], cwd=where, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env})


# ---- import foco

def test_import_costs_nothing(tmp_path):
    code = "import sys, time; start = time.time(); import foco; took = time.time() - start; print(took, *sorted({m.split('.')[0] for m in sys.modules}))"
    done = run(code, tmp_path, ROOT)
    assert done.returncode == 0, done.stderr
    took, *loaded = done.stdout.split()
    assert float(took) < 3 and "foco" in loaded and not {"torch", "transformers", "spacy", "seaborn", "matplotlib", "pandas"} & set(loaded)


def test_every_name_at_the_top_is_there():
    from foco.backbones import load_backbone
    assert foco.FoCo is FoCo and foco.FoCoComposer is FoCoComposer and foco.load_backbone is load_backbone and foco.evaluate.evaluate
    for name in foco.__all__: assert getattr(foco, name) is not None and name in dir(foco)
    with pytest.raises(AttributeError, match="foco has no 'Foco'; it offers .*FoCoComposer"): foco.Foco
    with pytest.raises(ImportError): from foco import Foco
    block = next(n for n in ast.parse((ROOT/"foco"/"__init__.py").read_text(encoding="utf-8")).body if isinstance(n, ast.If)) # what type checkers see
    assert {a.name: n.module for n in block.body for a in n.names} == foco._HOMES


# ---- dependencies and extras

def settings(): return pytest.importorskip("tomllib").loads((ROOT/"pyproject.toml").read_text(encoding="utf-8"))["project"]
def names(requirements): return {re.match(r"[\w-]+", r)[0].lower().replace("_", "-") for r in requirements}
def extras_in(text): return set(re.findall(r"pip install '?foco\[(\w+)\]", text))


def third_party(tree):
    "Packages that a module imports, and which of them as soon as it is imported itself."
    found, first = set(), {id(n) for n in tree.body}
    for n in ast.walk(tree):
        modules = [a.name for a in n.names] if isinstance(n, ast.Import) else [n.module] if isinstance(n, ast.ImportFrom) and not n.level else []
        found |= {(m.split(".")[0], id(n) in first) for m in modules}
    return {(m, at_once) for m, at_once in found if m not in sys.stdlib_module_names and m != "foco"}


def test_core_is_what_modules_import_at_once_and_extras_are_the_rest():
    project = settings()
    core, extras = names(project["dependencies"]), {k: names(v) - {"foco"} for k, v in project["optional-dependencies"].items()}
    assert set(extras) >= {"blip", "train", "llm", "search", "paper", "dev"}
    wanted = {}
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        for module, at_once in third_party(ast.parse(text)):
            package = DISTRIBUTIONS.get(module, COMES_WITH.get(module, module)).replace("_", "-")
            wanted.setdefault(package, []).append(path.name)
            if package in core: continue
            homes = {k for k, v in extras.items() if package in v} - {"dev"}
            assert homes, f"{path.name} imports {module}, which pyproject.toml does not list"
            assert not at_once or extras_in(text) & homes, f"{path.name} imports {module} at once; it belongs to {homes}: import it late, or name the extra"
    assert not core - set(wanted) - {"timm"}, "listed, but imported nowhere" # timm: which of open_clip's models there are


def test_messages_name_extras_that_exist():
    project = settings()
    said = {e for path in MODULES for e in extras_in(path.read_text(encoding="utf-8"))}
    assert {"blip", "train", "llm", "paper"} <= said <= set(project["optional-dependencies"])
    dev = next(r for r in project["optional-dependencies"]["dev"] if r.startswith("foco["))
    assert set(re.search(r"\[(.+)\]", dev)[1].split(",")) == set(project["optional-dependencies"]) - {"dev", "docs"} # building the site takes minutes


# ---- the wheel

@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    "Built from a copy, without network, so that nothing is left in the working tree."
    tmp = tmp_path_factory.mktemp("wheel")
    for name in ("foco", "data_cards"): shutil.copytree(ROOT/name, tmp/"source"/name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"): shutil.copy(ROOT/name, tmp/"source"/name)
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-q", "-w", str(tmp), str(tmp/"source")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = tmp.glob("foco-*.whl")
    return path


def test_wheel_holds_what_it_needs_and_nothing_else(wheel):
    assert wheel.name == f"foco-{foco.__version__}-py3-none-any.whl" and wheel.stat().st_size < 20e6
    with zipfile.ZipFile(wheel) as z:
        held = set(z.namelist())
        texts = {n: z.read(n).decode("utf-8") for n in held if n.endswith((".py", ".md", ".json", ".txt", "METADATA"))}
        ours = {p.relative_to(ROOT).as_posix() for p in (ROOT/"foco").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
        assert all(z.read(n) == (ROOT/n).read_bytes() for n in ours)
    cards = {f"foco/data_cards/{p.name}" for p in (ROOT/"data_cards").iterdir() if p.suffix in (".md", ".py")}
    assert {n for n in held if ".dist-info/" not in n} == ours | cards
    assert {"foco/py.typed", "foco/models/tiny-clip/bpe.txt.gz", "foco/models/tiny-clip/open_clip_model.safetensors", "foco/models/tiny-foco-default/foco.safetensors", "foco/models/tiny-foco-default/README.md"} <= held
    assert not [n for n in held if re.search(r"test|\.ipynb|\.(bin|pt|pkl)$", n.removeprefix("foco/"))]
    assert not {n: m for n, text in texts.items() if (m := re.findall(r"(?<![\w.~])/(?:work|root|tmp|home|opt|mnt|Users)/[\w.]+", text))}


ALONE = """
import sys
class Absent: # as if the extras were not installed
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"transformers", "accelerate", "tensorboard", "spacy", "snowballstemmer", "pyarrow", "openai", "faiss", "matplotlib", "seaborn"}: raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from importlib.metadata import distribution
import foco, torch
from foco import FoCo, FoCoComposer, HubError, load_backbone, open_benchmark
print("foco", foco.__file__)
composer, bench = FoCoComposer.from_pretrained("foco-tiny"), open_benchmark("edits", "val", n_per_kind=1)
query = bench.queries[0]
h = composer.compose(composer.backbone.encode_pictures([bench.images[query.reference]]), [query.text])
print("composed", tuple(h.shape), round(h.norm().item(), 4))
def said(f, *args):
    try: f(*args)
    except (ImportError, OSError, ValueError) as e: print(type(e).__name__, e)
    else: print("nothing was said")
said(load_backbone, "BLIP-base", "random"); said(load_backbone, "ViT-B-16-SigLIP", "random"); said(load_backbone, "roberta-ViT-B-32", "random")
said(__import__, "foco.visualize")
from foco.decomposers.rules import Rules
said(Rules)
said(FoCo.from_pretrained, "someone/nothing")
scripts = [e for e in distribution("foco").entry_points if e.group == "console_scripts"]
for script in scripts:
    sys.argv = [script.name, "--help"]
    try: script.load()()
    except SystemExit as e: print(script.name, e.code)
    except ModuleNotFoundError as e: print(script.name, "needs more:", e)
from pathlib import Path
from foco.search import main
Path("drawings").mkdir(); [bench.images[n].save(f"drawings/{n}.png") for n in range(4)]
print("a sheet in HTML:", main(["--gallery", "drawings", "--image", "0.png", "--text", "at night", "-k", "2", "--sheet", "s.html"]), Path("s.html").exists())
print("a sheet in PNG:", main(["--gallery", "drawings", "--text", "at night", "--index", "other", "--sheet", "s.png"]), Path("other").exists())
"""


def test_wheel_works_alone_and_says_which_extra_is_missing(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as z: z.extractall(tmp_path/"installed")
    (tmp_path/"elsewhere").mkdir()
    done = run(ALONE, tmp_path/"elsewhere", tmp_path/"installed", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path/"hub"))
    assert done.returncode == 0, done.stderr[-3000:]
    out = done.stdout
    assert f"foco {tmp_path/'installed'}" in out and "composed (1, 128) 1.0" in out
    for extra, of in (("blip", "a BLIP needs transformers"), ("blip", "roberta-ViT-B-32: its text tower needs transformers"), ("paper", "drawing needs matplotlib"), ("llm", "needs s")):
        assert re.search(rf"ModuleNotFoundError .*{re.escape(of)}.*pip install 'foco\[{extra}\]'", out), (of, out)
    assert "HubError no FoCo 'someone/nothing' on this computer, and none from the hub (" in out and "Traceback" not in out + done.stderr
    assert all(f"{s} 0" in out for s in ("foco_ablations", "foco_baselines", "foco_check_data", "foco_decompose", "foco_index_shards", "foco_reproduce", "foco_search", "foco_train"))
    assert "a sheet in HTML: 0 True" in out and "a sheet in PNG: 1 False" in out and "foco_search: --sheet s.png: drawing needs matplotlib: pip install 'foco[paper]'" in done.stderr


# ---- the models that come with it, and sharing one

@pytest.mark.parametrize("name,run", [("foco-tiny", "default-seed0"), ("foco-tiny-paper", "paper-seed0")])
def test_bundled_card_says_what_was_measured(name, run):
    "If results were measured anew, write the cards anew: model_card(read_card(folder), name, files, 'apache-2.0').save(folder/'README.md')."
    folder, files = find_model(name), sorted((ROOT/"results"/"toyworld"/run).glob("*-test*.json"))
    card = ModelCard.load(folder/"README.md")
    assert len(files) == 5 and card.content.strip() == model_card(read_card(folder), name, files, "apache-2.0").content.strip()
    measured = {(r["benchmark"], k): round(v, 2) for r in read_scores(files, read_card(folder)) for k, v in r["metrics"].items()}
    assert {(r.dataset_config, r.metric_type): r.metric_value for r in card.data.eval_results} == measured


def test_results_of_another_seed_are_refused():
    files = sorted((ROOT/"results"/"toyworld"/"default-seed1").glob("edits-test*.json"))
    with pytest.raises(ValueError, match=r"edits-test.FoCo.json was measured with a model of another training \(seed\)"): read_scores(files, read_card(find_model("foco-tiny")))


@pytest.fixture(scope="module")
def model(): return FoCo.from_pretrained("foco-tiny")


def test_there_and_back_over_a_hub(model, tmp_path, monkeypatch):
    "The hub is a folder here: what is uploaded is what is found."
    class Api:
        def __init__(self, token=None): pass
        def create_repo(self, repo_id, **_): return type("Repo", (), {"repo_id": repo_id})
        def upload_folder(self, *, folder_path, **_): shutil.copytree(folder_path, tmp_path/"hub"); return "a commit"
    monkeypatch.setattr(huggingface_hub.hub_mixin, "HfApi", Api)
    scores = [ROOT/"results"/"toyworld"/"default-seed0"/"edits-test.FoCo.json"]
    assert model.push_to_hub("me/tiny", scores=scores) == "a commit"
    assert {p.name for p in (tmp_path/"hub").iterdir()} == {"foco.json", "foco.safetensors", "README.md"}
    assert 'from_pretrained("me/tiny")' in (tmp_path/"hub"/"README.md").read_text(encoding="utf-8")
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **options: asked.append((repo, options)) or str(tmp_path/"hub"))
    again = FoCo.from_pretrained("me/tiny", revision="v1")
    assert asked[0][0] == "me/tiny" and asked[0][1]["revision"] == "v1" and not any(p.endswith((".bin", ".pt", "*")) for p in asked[0][1]["allow_patterns"])
    assert again.card == model.card and all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())


def test_what_was_changed_or_cut_is_refused(model, tiny, tmp_path):
    model.save_pretrained(tmp_path/"m")
    card, weights = tmp_path/"m"/"foco.json", tmp_path/"m"/"foco.safetensors"
    whole = weights.read_bytes()
    for cut in (0, 4, 100, len(whole)//2, len(whole) - 1):
        weights.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="foco.safetensors is not a readable safetensors file"): FoCo.from_pretrained(tmp_path/"m")
    shutil.copy(find_model("foco-tiny-paper")/"foco.safetensors", weights)
    with pytest.raises(ValueError, match="foco.safetensors does not fit this architecture: .* missing"): FoCo.from_pretrained(tmp_path/"m")
    shutil.copy(find_model("foco-tiny").parent/"tiny-clip"/"open_clip_model.safetensors", weights)
    with pytest.raises(ValueError, match="does not hold a FoCo: it has no image_mean"): FoCo.from_pretrained(tmp_path/"m")
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))                # one bit: the same names, shapes and size
    with pytest.raises(ValueError, match="foco.safetensors is not the file that foco.json describes: its SHA-256 is"): FoCo.from_pretrained(tmp_path/"m")
    weights.write_bytes(whole)
    card.write_text(card.read_text(encoding="utf-8")[:500], encoding="utf-8")
    with pytest.raises(ValueError, match="foco.json is not JSON"): FoCo.from_pretrained(tmp_path/"m")
    with pytest.raises(ValueError, match="trained on another backbone .weights: trained with 'sha256:.*this one has 'random:0'"):
        FoCo.from_pretrained("foco-tiny", backbone=foco.load_backbone("tiny-clip", "random"))
    with pytest.raises(ValueError, match="another backbone .patch_layer"): FoCoComposer(model, tiny.at_layer(1))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.ckpt", "foco.pt", "weights.pkl"])
def test_a_pickle_is_refused_and_never_opened(name, tmp_path, monkeypatch):
    torch_load = []
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: torch_load.append(args))
    (tmp_path/name).write_bytes(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(ValueError, match=f"holds {name}: a pickle, which may run any code"): FoCo.from_pretrained(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **options: str(tmp_path/"empty"))
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo, **options: [name, "config.json"])
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    with pytest.raises(ValueError, match=f"me/pickled on the hub holds {name}: a pickle"): FoCo.from_pretrained("me/pickled")
    assert not torch_load and not hasattr(FoCo, "_load_as_pickle")


def test_a_hub_out_of_reach_is_one_message(model, monkeypatch):
    def refuse(*args, **kwargs): raise ConnectionError("no route to host")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(huggingface_hub.hub_mixin, "HfApi", refuse)
    for call, said in ((lambda: FoCo.from_pretrained("me/tiny"), "hf download me/tiny foco.json foco.safetensors"), (lambda: model.push_to_hub("me/tiny"), "me/tiny was not uploaded")):
        with pytest.raises(HubError, match=said) as e: call()
        assert e.value.__cause__ is None and e.value.__suppress_context__ and "ConnectionError: no route to host" in str(e.value)
    with pytest.raises(FileNotFoundError, match="no FoCo 'foco-tinny': expected foco-tiny or foco-tiny-paper, a folder"): FoCo.from_pretrained("foco-tinny")
