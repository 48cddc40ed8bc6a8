"Names that do not exist or contradict each other; weights that are missing, wrong, or hostile."
import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings

import huggingface_hub
import open_clip
import pytest
import torch
from safetensors.torch import save_file

from foco.backbones import load_backbone
from foco.weights import (BACKBONES, MissingWeights, build_model, choose_dtype, count_parameters, file_sha256, find_recipe, find_weights, load_model,
                          make_tokenizer, read_weights, save_model)


@pytest.fixture
def bundle(tmp_path):
    return shutil.copytree(BACKBONES["tiny-clip"].folder, tmp_path / "bundle")


@pytest.fixture
def online(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args: None)
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args: None)
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: True)


def edit_config(folder, change):
    path = folder / "open_clip_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    change(config["model_cfg"])
    path.write_text(json.dumps(config), encoding="utf-8")


# ---- names and activations ----

@pytest.mark.parametrize("name, near", [("ViT-L14", "ViT-L-14"), ("vit-g-14", "ViT-G-14"), ("tinyclip", "tiny-clip"), ("ViT-B32", "ViT-B-32")])
def test_unknown_name_has_near_matches(name, near):
    with pytest.raises(ValueError, match=f"Did you mean .*{near}"): load_backbone(name)


def test_other_names_pass_through_or_say_why():
    assert find_recipe("ViT-B-16", "dfn2b").model_cfg["quick_gelu"] is True
    assert find_recipe("ViT-L-14", "laion2b-s32b-b82k").model_cfg["quick_gelu"] is False
    assert find_recipe("ViT-L-14-CLIPA", "datacomp1b").preprocess_cfg["resize_mode"] == "squash"
    with pytest.raises(ValueError, match="say which weights"): load_backbone("ViT-B-16")
    with pytest.raises(ValueError, match="Did you mean openai"): load_backbone("ViT-L-14", "open-ai")
    for name, tag, tower in (("RN50", "openai", "ResNet"), ("ViT-B-16-SigLIP", "webli", "timm"), ("coca_ViT-B-32", "laion2b_s13b_b90k", "attention-pooled")):
        with pytest.raises(ValueError, match=f"image tower is .*{tower}"): load_backbone(name, tag)


def test_vit_g_14_is_big_g():
    recipe = find_recipe("ViT-G-14")
    assert recipe.hub.startswith("laion/CLIP-ViT-bigG-14-laion2B-39B-b160k") and recipe.model_cfg["quick_gelu"] is False
    model = build_model(recipe.model_cfg, torch.bfloat16, device="meta")
    out = model.visual.forward_intermediates(torch.zeros(2, 3, 224, 224, device="meta", dtype=torch.bfloat16), indices=[47], output_fmt="NLC")
    assert (out["image_intermediates"][0] @ model.visual.proj).shape == (2, 256, 1280) and count_parameters(model) > 2.5e9
    assert choose_dtype(recipe.model_cfg, torch.device("cpu")) == torch.bfloat16


@pytest.mark.parametrize("name, pretrained, message", [
    ("ViT-L-14-quickgelu", "laion2b_s32b_b82k", "the name says QuickGELU, the tag laion2b_s32b_b82k says GELU"),
    ("ViT-B-32-quickgelu", "laion2b_s34b_b79k", "the name says QuickGELU"),
])
def test_contradicting_activation_raises(name, pretrained, message):
    with pytest.raises(ValueError, match=message): load_backbone(name, pretrained)


def test_contradicting_folder_raises(bundle):
    edit_config(bundle, lambda cfg: cfg.update(open_clip.get_model_config("ViT-B-32")))
    with pytest.raises(ValueError, match="folder's config says GELU, the tag openai says QuickGELU"): load_backbone("ViT-B-32", f"openai={bundle}")
    with pytest.raises(ValueError, match="folder's config says GELU, the name says QuickGELU"): load_backbone("ViT-B-32-quickgelu", bundle)
    with pytest.raises(ValueError, match="does not hold ViT-L-14"): load_backbone("ViT-L-14", bundle)


def test_contradicting_size_raises(bundle):
    path = bundle / "open_clip_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for size, fits in ((64, True), ([3, 64, 64], True), ([64, 64], True), (224, False), ([64, 96], False)):
        path.write_text(json.dumps({**config, "preprocess_cfg": {**config["preprocess_cfg"], "size": size}}), encoding="utf-8")
        if fits: find_recipe(bundle)
        else:
            with pytest.raises(ValueError, match="the model takes 64"): find_recipe(bundle)


def test_reload_by_path_keeps_the_activation(tmp_path, pictures):
    made = load_backbone("ViT-B-32", "random:5", device="cpu", dtype="bfloat16")
    save_file(made.model.state_dict(), tmp_path / "weights.safetensors")
    again = load_backbone("ViT-B-32", f"openai={tmp_path / 'weights.safetensors'}", device="cpu", dtype="bfloat16")
    assert again.activation == "quick_gelu" and again.pretrained == "openai" and again.weights.startswith("sha256:")
    assert torch.equal(again.encode_pictures(pictures[:2]).patches, made.encode_pictures(pictures[:2]).patches)
    assert torch.equal(again.encode_texts(["a dog"]), made.encode_texts(["a dog"]))
    with pytest.warns(UserWarning, match="does not say which activation"): recipe = find_recipe("ViT-B-32", tmp_path / "weights.safetensors")
    assert recipe.model_cfg["quick_gelu"] is True


# ---- missing weights ----

def test_missing_weights_say_what_to_do(offline):
    with pytest.raises(MissingWeights) as caught: load_backbone("ViT-G-14")
    for part in ("open_clip_model.safetensors", "https://huggingface.co/laion/CLIP-ViT-bigG-14-laion2B-39B-b160k", "hf download laion/",
                 'pretrained="laion2b_s39b_b160k=/path/', "HF_HUB_OFFLINE"):
        assert part in str(caught.value)


def test_missing_parts_of_a_text_tower_from_transformers(offline):
    with pytest.raises(MissingWeights, match="hf download laion/CLIP-ViT-B-32-roberta-base-laion2B-s12B-b32k open_clip_model.safetensors"):
        load_backbone("roberta-ViT-B-32", "laion2b_s12b_b32k", device="cpu")
    with pytest.raises(MissingWeights, match="hf download roberta-base config.json"): load_backbone("roberta-ViT-B-32", "random", device="cpu")
    with pytest.raises(ValueError, match="expected float32"): load_backbone("ViT-L-14", dtype="int8") # before anything is fetched


def test_offline_process_fails_at_once(tmp_path):
    code = "from foco.backbones import load_backbone; load_backbone('ViT-L-14')"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "hf download timm/vit_large_patch14_clip_224.openai" in done.stderr


def test_hub_is_asked_once(online, monkeypatch):
    asked = []
    def refuse(url, timeout): asked.append((url, timeout)); raise ConnectionError("no route to host")
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refuse)
    with pytest.raises(MissingWeights, match="no route to host"): find_weights(find_recipe("ViT-L-14"))
    assert len(asked) == 1 and asked[0][1] <= 5


def test_download_takes_the_first_file_that_exists(online, monkeypatch, tmp_path):
    absent = huggingface_hub.errors.EntryNotFoundError
    def metadata(url, timeout):
        if url.endswith(".safetensors"): raise absent("404")
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, name: str(tmp_path / name))
    assert find_weights(find_recipe("ViT-H-14")) == tmp_path / "open_clip_pytorch_model.bin"


def test_broken_download_is_not_an_absent_file(online, monkeypatch):
    def cut(repo, name): raise huggingface_hub.errors.LocalEntryNotFoundError("connection lost")
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, timeout: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", cut)
    with pytest.raises(MissingWeights, match="connection lost"): find_weights(find_recipe("ViT-L-14"))


def test_cached_weights_need_no_network(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, name: str(tmp_path / name))
    assert find_weights(find_recipe("ViT-H-14")) == tmp_path / "open_clip_model.safetensors"


# ---- files ----

class Malicious:
    def __reduce__(self): return exec, ("raise SystemExit('this ran while the file was read')",)


def test_malicious_pickle_is_refused(tmp_path, bundle):
    torch.save(Malicious(), tmp_path / "zip.pt")
    (tmp_path / "raw.pt").write_bytes(pickle.dumps({"state_dict": Malicious()}, protocol=2))
    torch.save({"weights": [1, 2]}, tmp_path / "list.pt")
    for name, message in (("zip.pt", "refused"), ("raw.pt", "refused"), ("list.pt", "not a state dict")):
        with pytest.raises(ValueError, match=message): load_backbone("tiny-clip", tmp_path / name)
    (bundle / "open_clip_model.safetensors").write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(ValueError, match="not a readable safetensors file"): load_backbone(bundle)


def test_torchscript_is_refused(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), str(tmp_path / "jit.pt"))
        with pytest.raises(ValueError, match="TorchScript"): read_weights(tmp_path / "jit.pt")


def test_state_dict_is_strict(tmp_path, tiny):
    state = {k: v.clone() for k, v in tiny.model.state_dict().items()}
    wide = {**state, "visual.positional_embedding": torch.zeros(10, state["visual.positional_embedding"].shape[1])}
    less = {k: v for k, v in state.items() if k != "visual.proj"}
    for broken, message in ((wide, "1 of another shape"), (less, "1 missing"), ({**state, "extra": torch.ones(1)}, "1 unexpected")):
        save_file(broken, tmp_path / "broken.safetensors")
        with pytest.raises(ValueError, match=message): load_backbone("tiny-clip", tmp_path / "broken.safetensors")
    torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}}, tmp_path / "trained.pt") # open_clip's own checkpoints
    assert torch.equal(load_backbone("tiny-clip", tmp_path / "trained.pt").encode_texts(["a car"]), tiny.encode_texts(["a car"]))


def test_folder_without_its_parts(bundle):
    vocabulary = (bundle / "bpe.txt.gz").read_bytes()
    (bundle / "bpe.txt.gz").unlink()
    with pytest.raises(MissingWeights, match="vocabulary"): load_backbone(bundle)
    (bundle / "bpe.txt.gz").write_bytes(vocabulary)
    edit_config(bundle, lambda cfg: cfg["text_cfg"].update(vocab_size=cfg["text_cfg"]["vocab_size"] + 1))
    with pytest.raises(ValueError, match="does the file end in a line break"): load_backbone(bundle)
    (bundle / "open_clip_model.safetensors").unlink()
    with pytest.raises(MissingWeights, match="no weights"): load_backbone(bundle)
    (bundle / "open_clip_config.json").unlink()
    with pytest.raises(MissingWeights, match="no model in"): load_backbone(bundle)


def test_save_and_load(tmp_path):
    recipe = find_recipe("tiny-clip")
    model, weights = load_model(recipe)
    assert weights == "sha256:" + file_sha256(recipe.path)
    save_model(model, recipe, tmp_path / "full")
    half, _ = load_model(find_recipe(save_model(model, recipe, tmp_path / "half", torch.float16)))
    for name, value in half.state_dict().items(): assert torch.equal(value, model.state_dict()[name].half().float())
    full, halved = ((tmp_path / name / "open_clip_model.safetensors").stat().st_size for name in ("full", "half"))
    assert halved < .6 * full


# ---- building ----

def test_random_weights_are_seeded_and_private():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    a, b, c = (load_backbone(pretrained=p).model.state_dict() for p in ("random", "random:0", "random:1"))
    assert torch.equal(torch.get_rng_state(), before) and torch.get_default_dtype() == torch.float32
    assert all(torch.equal(a[k], b[k]) for k in a) and not torch.equal(a["visual.proj"], c["visual.proj"])
    assert all(v.isfinite().all() for k, v in a.items())
    half = load_backbone(pretrained="random", dtype="bfloat16").model.state_dict()
    for k in a: torch.testing.assert_close(half[k].float(), a[k], atol=1e-3, rtol=1e-2)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a process in /proc")
def test_no_model_in_float32_on_the_way():
    "302 MB of bfloat16 and one tensor at a time in float32 (101 MB); a whole model in float32 would be 605 MB more."
    code = ("import re; from foco.backbones import load_backbone; peak = lambda: int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]); before = peak(); "
            "load_backbone('ViT-B-32', 'random', device='cpu', dtype='bfloat16'); print((peak() - before) // 1024)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert 250 < int(done.stdout) < 500


# ---- vocabularies ----

def test_tokenizer_of_transformers(bundle):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    words = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "red", "star"])}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]").save_pretrained(bundle)
    def change(cfg):
        cfg["text_cfg"].update(hf_tokenizer_name="somebody/elsewhere", pool_type="eos", eos_id=3, context_length=8)
        cfg["text_cfg"].pop("tokenizer_kwargs")
    edit_config(bundle, change)
    backbone = load_backbone(bundle, "random")
    assert backbone.tokenize(["a red star"])[0].tolist() == [2, 4, 5, 6, 3, 0, 0, 0]
    assert backbone.tokenize(["a [SEP] star"])[0].tolist() == [2, 4, 1, 1, 1, 6, 3, 0] # a mark in a text is read as text
    with pytest.warns(UserWarning, match="1 of 2 different texts .* lost 'star'"): ids = backbone.tokenize(["a", "a a a a a a star"])
    assert ids[1].tolist() == [2, 4, 4, 4, 4, 4, 4, 3]


@pytest.mark.parametrize("mark", ["<end_of_text>", "<start_of_text>", "<END_of_text>", "&lt;end_of_text&gt;", "<<end_of_text>>", "<end_of_text"])
def test_marks_in_a_caption_are_words(tiny, mark):
    tokenizer = make_tokenizer(find_recipe("tiny-clip"))
    ids = tokenizer([f"a red {mark} star", "a red star"])
    assert (ids == tokenizer.eot_token_id).sum(1).tolist() == [1, 1] and (ids == tokenizer.sot_token_id).sum(1).tolist() == [1, 1]
    assert torch.equal(ids[1], open_clip.SimpleTokenizer(str(BACKBONES["tiny-clip"].folder / "bpe.txt.gz"), context_length=ids.shape[1])(["a red star"])[0])
    assert not torch.equal(tiny.encode_texts([f"a {mark} red star"]), tiny.encode_texts([f"a {mark} blue star"]))
    assert torch.equal(pickle.loads(pickle.dumps(tokenizer))(["a red star"]), ids[1:])
