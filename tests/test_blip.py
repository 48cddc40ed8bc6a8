"BLIP: parity with transformers, its vocabulary, its folders, and the rest of the library on top of it."
import copy
import json
import pickle
import warnings

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertTokenizer, BlipConfig, BlipForImageTextRetrieval
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

from foco.backbones import load_backbone, unit
from foco.blip import BLIP_CONFIGS, Blip, BlipTokenizer
from foco.counterfactuals import make_counterfactuals
from foco.data.features import encode_cached
from foco.data.pairs import data_source
from foco.train import train
from foco.training.checkpoints import load_foco, load_trained
from foco.training.config import make_config
from foco.training.features import cache_features
from foco.weights import BACKBONES, MissingWeights, build_model, choose_dtype, count_parameters, find_recipe, find_weights

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] a red blue star house on the ##s by sea cafe . , [ ] dec sep cls two".split()
SIZES = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4)
TEXTS = ["A red star.", "two houses by the sea, a blue star on the house", "star", "a unknowable star", "red"]


@pytest.fixture(scope="module")
def literal():
    "transformers' own model, of toy size, larger weights than it starts with so that features differ."
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = BlipConfig(image_text_hidden_size=16, vision_config=dict(**SIZES, num_hidden_layers=3, image_size=48, patch_size=16, initializer_range=.2),
                            text_config=dict(**SIZES, num_hidden_layers=2, vocab_size=len(WORDS) + 2, max_position_embeddings=20, bos_token_id=1, sep_token_id=3, initializer_range=.2))
        model = BlipForImageTextRetrieval(config).eval()
        for name, p in model.named_parameters():
            if name.endswith("bias"): torch.nn.init.normal_(p, std=.1)
    return model


@pytest.fixture
def published(literal, tmp_path):
    "A folder as it lies on the hub."
    folder = tmp_path / "published"
    literal.save_pretrained(folder)
    BlipImageProcessorPil(size={"height": 48, "width": 48}).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def blip(published): return load_backbone(published)


def literal_texts(literal, folder, texts):
    inputs = BertTokenizer.from_pretrained(folder)(texts, padding="max_length", max_length=20, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad(): return unit(literal.text_proj(literal.text_encoder(**inputs).last_hidden_state[:, 0]))


# ---- parity ----

def test_pictures_equal_transformers(blip, literal, pictures):
    pixels = torch.stack([blip.preprocess(p) for p in pictures])
    with torch.no_grad(): tokens = literal.vision_model(pixels).last_hidden_state
    features = blip.encode_pictures(pictures)
    assert (blip.D, blip.P, blip.grid, blip.image_size, blip.n_layers, blip.patch_layer) == (16, 9, (3, 3), (48, 48), 3, 2)
    assert features.global_.dtype == features.patches.dtype == torch.float32
    torch.testing.assert_close(features.global_, unit(literal.vision_proj(tokens[:, 0])), atol=1e-5, rtol=0)
    torch.testing.assert_close(features.patches, unit(literal.vision_proj(tokens[:, 1:])), atol=1e-5, rtol=0)
    assert (features.global_[0] - features.global_[1]).norm() > 1e-2 and (features.patches[0, 0] - features.patches[0, 1]).norm() > 1e-2


def test_texts_equal_transformers(blip, literal, published):
    torch.testing.assert_close(blip.encode_texts(TEXTS), literal_texts(literal, published, TEXTS), atol=1e-5, rtol=0)
    assert (blip.encode_texts(["a red star"]) - blip.encode_texts(["a blue star"])).norm() > 1e-2
    torch.testing.assert_close(*blip.encode_texts(["a red STAR", "A red star"]), atol=1e-6, rtol=0)


def test_score_equals_transformers(blip, literal, published, pictures):
    pixels = torch.stack([blip.preprocess(p) for p in pictures[:2]])
    inputs = BertTokenizer.from_pretrained(published)(TEXTS[:2], padding=True, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad(): score = literal(**inputs, pixel_values=pixels, use_itm_head=False).itm_score
    torch.testing.assert_close(blip.encode_images(pixels).global_ @ blip.encode_texts(TEXTS[:2]).T, score, atol=1e-5, rtol=0)


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_batches_and_padding_make_no_difference(blip, pictures, batch_size):
    whole, parts = blip.encode_pictures(pictures), blip.encode_pictures(pictures, batch_size=batch_size)
    torch.testing.assert_close(parts.global_, whole.global_, atol=1e-5, rtol=0)
    torch.testing.assert_close(parts.patches, whole.patches, atol=1e-5, rtol=0)
    torch.testing.assert_close(blip.encode_texts(TEXTS, batch_size=batch_size), blip.encode_texts(TEXTS), atol=1e-5, rtol=0)


def test_patch_layer(blip, literal, pictures):
    kept, pixels = [], torch.stack([blip.preprocess(p) for p in pictures[:2]])
    hook = literal.vision_model.encoder.layers[1].register_forward_hook(lambda module, args, out: kept.append(out))
    with torch.no_grad(): literal.vision_model(pixels)
    hook.remove()
    at = blip.at_layer(1)
    with torch.no_grad(): expected = unit(literal.vision_proj(literal.vision_model.post_layernorm(kept[0])[:, 1:]))
    torch.testing.assert_close(at.encode_images(pixels).patches, expected, atol=1e-5, rtol=0)
    assert {k for k, v in at.identity.items() if v != blip.identity[k]} == {"patch_layer"}
    with pytest.raises(ValueError, match="has 3 blocks"): blip.at_layer(3)


def test_preprocessing_equals_transformers(blip, pictures):
    theirs = BlipImageProcessorPil(size={"height": 48, "width": 48})(pictures, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(torch.stack([blip.preprocess(p) for p in pictures]), theirs, atol=.02, rtol=0) # one step of 255 is 0.015


def test_other_precision_is_close(published, blip, pictures):
    half = load_backbone(published, dtype="bfloat16")
    assert half.dtype == torch.bfloat16 and torch.bfloat16 in {p.dtype for p in half.model.parameters()}
    features, exact = half.encode_pictures(pictures), blip.encode_pictures(pictures)
    assert features.patches.dtype == torch.float32 and (features.patches * exact.patches).sum(-1).min() > .98
    assert (half.encode_texts(TEXTS) * blip.encode_texts(TEXTS)).sum(-1).min() > .98


# ---- names, random weights ----

def test_names_and_sizes():
    sizes = {name: count_parameters(build_model(find_recipe(name).model_cfg, device="meta")) for name in BLIP_CONFIGS}
    assert 223e6 < sizes["BLIP-base"] < 224e6 and 446e6 < sizes["BLIP-large"] < 448e6
    assert [find_recipe(n).hub for n in BLIP_CONFIGS] == [f"{BACKBONES[n].source}/" for n in BLIP_CONFIGS]
    assert find_recipe("BLIP-base", "itm-flickr").hub == "Salesforce/blip-itm-base-flickr/"
    assert choose_dtype(find_recipe("BLIP-large").model_cfg, torch.device("cpu")) == torch.float32
    with pytest.raises(ValueError, match="Did you mean BLIP-base"): find_recipe("BLIP-Bas")
    with pytest.raises(ValueError, match="Did you mean itm_coco"): find_recipe("BLIP-base", "itm_coca")


def test_random_base():
    before = torch.get_rng_state()
    base = load_backbone("BLIP-base", "random:3", device="cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert (base.name, base.pretrained, base.weights, base.activation) == ("BLIP-base", "random:3", "random:3", "gelu")
    assert (base.D, base.P, base.grid, base.image_size, base.n_layers, base.context_length) == (256, 576, (24, 24), (384, 384), 12, 512)
    features = base.encode_images(torch.randn(2, 3, 384, 384, generator=torch.Generator().manual_seed(0)))
    assert features.patches.shape == (2, 576, 256) and features.global_.shape == (2, 256)
    torch.testing.assert_close(features.patches.norm(dim=-1), torch.ones(2, 576))
    assert (features.global_[0] @ features.global_[1]) < .99 and (features.patches[0, 0] @ features.patches[0, 1]) < .99
    texts = base.encode_texts(["a red star", "a blue house", "a red star"])
    assert texts.shape == (3, 256) and torch.equal(texts[0], texts[2]) and texts[0] @ texts[1] < .999


def test_random_weights_are_seeded_and_private(literal, published):
    before = torch.get_rng_state()
    a, b, c = (load_backbone(published, p) for p in ("random", "random:0", "random:1"))
    half = load_backbone(published, "random", dtype="bfloat16")
    assert torch.equal(torch.get_rng_state(), before) and torch.get_default_dtype() == torch.float32
    state = a.model.state_dict()
    assert all(torch.equal(v, b.model.state_dict()[k]) for k, v in state.items())
    assert not torch.equal(state["vision_proj.weight"], c.model.state_dict()["vision_proj.weight"])
    for k, v in half.model.state_dict().items(): torch.testing.assert_close(v.float(), state[k], atol=1e-3, rtol=1e-2)
    for name, p in a.model.named_parameters(): # the picture tower too, where transformers would start at 1e-10
        if p.ndim > 1: assert .01 < p.std() < .03, name
    assert a.tokenizer.encode("a red star") == [WORDS.index(w) for w in ("a", "red", "star")] # the folder's vocabulary, not a checksum


def test_words_by_checksum(published):
    (published / "vocab.txt").unlink()
    with pytest.raises(MissingWeights, match="has no vocabulary: put vocab.txt or tokenizer.json there"): load_backbone(published)
    random = load_backbone(published, "random")
    assert random.tokenize(["a red star", "a RED star", "a blue star"]).tolist()[0][:5] == [1, *random.tokenizer.encode("a red star"), 2]
    assert random.tokenizer.encode("a red star") == random.tokenizer.encode("A Red  star") != random.tokenizer.encode("a red house")
    again = load_backbone(random.save(published.parent / "saved")) # the folder remembers how words were numbered
    assert torch.equal(again.encode_texts(TEXTS), random.encode_texts(TEXTS))


# ---- texts ----

@pytest.mark.parametrize("mark", ["[SEP]", "[CLS]", "[DEC]", "[PAD]", "[MASK]", "[UNK]", "[ENC]"])
@pytest.mark.parametrize("with_vocabulary", [True, False])
def test_marks_in_a_text_are_text(published, mark, with_vocabulary):
    (published / "vocab.txt").write_text("\n".join([*WORDS, "[DEC]", "[ENC]"]) + "\n", encoding="utf-8") # as if its vocabulary had them
    if not with_vocabulary: (published / "vocab.txt").unlink()
    backbone = load_backbone(published, "random")
    cls, sep = (2, 3) if with_vocabulary else (1, 2)
    ids = backbone.tokenize([f"a {mark} red star", "a red star"])
    assert (ids == sep).sum(1).tolist() == [1, 1] and (ids == cls).sum(1).tolist() == [1, 1] and (ids[0] > 0).sum() > (ids[1] > 0).sum()
    if with_vocabulary: assert max(ids[0].tolist()) < len(WORDS) and 4 not in ids[0]
    n = int((ids[0] > 0).sum())
    assert (ids[0, :n] > 0).all() and not ids[0, n:].any() # no padding in the middle
    assert (backbone.encode_texts([f"a {mark} red star"]) - backbone.encode_texts([f"a {mark} blue star"])).norm() > 1e-4


def test_long_texts_are_cut_once_and_counted(blip):
    long = ["a red star by the sea " * 4 + "house", "blue " * 30]
    with pytest.warns(UserWarning, match="2 of 3 different texts are longer than 20 tokens and were cut; 'a red star .* lost 'a red star by the sea house'") as caught:
        features = blip.encode_texts([*long, "a star", long[0]])
    assert len(caught) == 1 and torch.equal(features[0], features[3])
    with warnings.catch_warnings():
        warnings.simplefilter("error") # exactly full is not too long
        ids = blip.tokenize(["blue " * 18])
    assert ids[0, -1] == 3 and ids.shape == (1, 20)
    torch.testing.assert_close(blip.encode_texts(["blue " * 18])[0], features[1], atol=1e-5, rtol=0)


def test_empty_and_wrong_input(blip):
    assert blip.encode_texts([]).shape == (0, 16) and len(blip.encode_pictures([])) == 0
    assert blip.encode_texts([""], allow_empty=True).isfinite().all() and blip.tokenize([""], allow_empty=True)[0, :3].tolist() == [2, 3, 0]
    with pytest.raises(ValueError, match="text 0 of 1 is empty"): blip.encode_texts([" "])
    with pytest.raises(ValueError, match=r"takes \(B, 3, 48, 48\)"): blip.encode_images(torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize("kind", ["vocab.txt", "tokenizer.json"])
def test_both_kinds_of_vocabulary(published, kind):
    tokenizer = BertTokenizer.from_pretrained(published)
    if kind == "tokenizer.json":
        (published / "vocab.txt").unlink()
        tokenizer.save_pretrained(published)
    blip = load_backbone(published)
    for text in (*TEXTS, "Café , on the SEA ."): assert blip.tokenize([text])[0, :len(tokenizer(text)["input_ids"])].tolist() == tokenizer(text)["input_ids"]
    assert torch.equal(pickle.loads(pickle.dumps(blip.tokenizer))(TEXTS), blip.tokenizer(TEXTS))
    assert isinstance(blip.tokenizer, BlipTokenizer) and isinstance(blip.model, Blip)


# ---- folders and files ----

def test_save_and_load(blip, pictures, tmp_path, literal):
    folder = blip.save(tmp_path / "copy")
    copied = load_backbone(folder)
    assert torch.equal(copied.encode_pictures(pictures).patches, blip.encode_pictures(pictures).patches)
    assert torch.equal(copied.encode_texts(TEXTS), blip.encode_texts(TEXTS))
    assert {k for k in blip.identity if copied.identity[k] != blip.identity[k]} <= {"name", "weights"}
    again = BlipForImageTextRetrieval.from_pretrained(folder) # transformers reads it too
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in literal.state_dict().items())
    assert "/" not in (folder / "config.json").read_text(encoding="utf-8")
    half = load_backbone(blip.save(tmp_path / "half", torch.float16))
    assert (half.encode_texts(TEXTS) - blip.encode_texts(TEXTS)).norm(dim=-1).max() < .02


def test_preprocessing_travels(published, blip):
    path = published / "preprocessor_config.json"
    if not path.exists(): path = published / "processor_config.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**said, "image_mean": [.5, .5, .5], "resample": 2}), encoding="utf-8")
    other = load_backbone(published)
    assert {k for k, v in other.identity.items() if v != blip.identity[k]} == {"preprocess_sha256"}
    assert load_backbone(other.save(published.parent / "copy")).preprocess_sha256 == other.preprocess_sha256
    path.write_text(json.dumps({**said, "size": {"height": 384, "width": 384}}), encoding="utf-8")
    with pytest.raises(ValueError, match="the model takes 48 x 48"): load_backbone(published)


def edit(folder, change):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    change(config)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def test_folders_that_contradict(published, tmp_path):
    with pytest.raises(ValueError, match="does not hold BLIP-base"): load_backbone("BLIP-base", published)
    eight = copy.deepcopy(BLIP_CONFIGS["BLIP-base"])
    eight["text_config"].pop("num_attention_heads") # as published before it was corrected
    (tmp_path / "eight").mkdir()
    (tmp_path / "eight" / "config.json").write_text(json.dumps({"model_type": "blip", **eight}), encoding="utf-8")
    with pytest.raises(ValueError, match="'text heads': 8.*'text heads': 12"): load_backbone("BLIP-base", tmp_path / "eight")
    edit(published, lambda c: (c["text_config"].update(hidden_act="quick_gelu"), c["vision_config"].update(hidden_act="quick_gelu")))
    assert load_backbone(published).activation == "quick_gelu"
    edit(published, lambda c: c["text_config"].update(hidden_act="gelu"))
    with pytest.raises(ValueError, match="activations gelu, quick_gelu"): load_backbone(published)
    edit(published, lambda c: c.update(architectures=["BlipForConditionalGeneration"]))
    with pytest.raises(ValueError, match="this BLIP is a BlipForConditionalGeneration"): load_backbone(published)


def test_activation_reaches_both_towers(published, blip):
    edit(published, lambda c: (c["text_config"].update(hidden_act="quick_gelu"), c["vision_config"].update(hidden_act="quick_gelu")))
    other = load_backbone(published)
    pixels = torch.randn(1, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    assert (other.encode_images(pixels).global_ - blip.encode_images(pixels).global_).norm() > 1e-4
    assert (other.encode_texts(TEXTS) - blip.encode_texts(TEXTS)).norm() > 1e-4


def test_state_dict_is_strict(published, blip):
    state = load_file(published / "model.safetensors")
    older = {**state, "text_encoder.embeddings.position_ids": torch.arange(20)[None]} # transformers kept these once
    (published / "model.safetensors").unlink()
    torch.save(older, published / "pytorch_model.bin")
    assert torch.equal(load_backbone(published).encode_texts(TEXTS), blip.encode_texts(TEXTS))
    for broken, message in (({k: v for k, v in state.items() if k != "vision_proj.bias"}, "1 missing"), ({**state, "extra": torch.ones(1)}, "1 unexpected"),
                            ({**state, "vision_model.embeddings.position_embedding": torch.zeros(1, 5, 32)}, "1 of another shape")):
        save_file(broken, published / "model.safetensors")
        with pytest.raises(ValueError, match=message): load_backbone(published)


def test_vocabulary_of_another_model(published):
    for words, message in ((WORDS[:-1], f"has {len(WORDS) - 1} entries"), (WORDS[::-1], rf"\[PAD\] is number {len(WORDS) - 1}"), (["a"] * 25, "lacks")):
        (published / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
        with pytest.raises(ValueError, match=message): load_backbone(published)


@pytest.fixture
def toy_base(monkeypatch, literal):
    "BLIP-base, as if it were that small."
    monkeypatch.setitem(BLIP_CONFIGS, "BLIP-base", {k: v for k, v in literal.config.to_dict().items() if k in ("image_text_hidden_size", "text_config", "vision_config")})


def test_by_name_from_a_file_a_folder_and_the_cache(toy_base, published, blip, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, name: str(published / name) if repo == "Salesforce/blip-itm-base-coco" else None)
    made = [load_backbone("BLIP-base", p) for p in (None, "itm_coco", published, published / "model.safetensors", f"itm_coco={published / 'model.safetensors'}")]
    for b in made:
        assert b.name == "BLIP-base" and torch.equal(b.encode_texts(TEXTS), blip.encode_texts(TEXTS))
        assert b.preprocess_sha256 == blip.preprocess_sha256 and b.activation == "gelu"
    assert [b.pretrained for b in made] == ["itm_coco", "itm_coco", "local", "local", "itm_coco"]
    assert [b.weights for b in made] == ["hub:Salesforce/blip-itm-base-coco"] * 2 + [blip.weights] * 3
    assert torch.equal(load_backbone("BLIP-base", made[0].save(tmp_path / "copy")).encode_texts(TEXTS), blip.encode_texts(TEXTS))


# ---- missing weights ----

def test_missing_weights_say_what_to_do(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args: None)
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: True)
    with pytest.raises(MissingWeights) as caught: load_backbone("BLIP-large")
    for part in ("BLIP-large (itm_coco)", "model.safetensors from https://huggingface.co/Salesforce/blip-itm-large-coco", "HF_HUB_OFFLINE",
                 "hf download Salesforce/blip-itm-large-coco model.safetensors vocab.txt", 'pretrained="/path/to/folder"', "config.json, model.safetensors and vocab.txt"):
        assert part in str(caught.value)


def test_weights_and_vocabulary_come_from_the_same_repository(monkeypatch, tmp_path, published):
    asked = []
    def metadata(url, timeout):
        asked.append(url.split("/resolve/")[0].rsplit("huggingface.co/")[-1] + " " + url.rsplit("/", 1)[1])
        if url.endswith("model.safetensors"): raise huggingface_hub.errors.EntryNotFoundError("404")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args: None)
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, name: str(tmp_path / name))
    assert find_weights(find_recipe("BLIP-base")).name == "pytorch_model.bin"
    with pytest.raises(FileNotFoundError, match="vocab.txt"): load_backbone("BLIP-base") # found there, as far as this hub knows
    repo = "Salesforce/blip-itm-base-coco"
    assert asked == [f"{repo} model.safetensors", f"{repo} pytorch_model.bin"] * 2 + [f"{repo} vocab.txt"]


# ---- the rest of the library ----

def test_training_and_the_identity_check(blip, published, tmp_path):
    pairs = data_source("toyworld").training_pairs(24)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore") # twenty tokens, many of them unknown: its captions are cut
        training = cache_features(blip, pairs, True, counterfactuals=make_counterfactuals(pairs.decompositions))
    config = make_config(n_images=24, batch_size=8, steps=2, backbone=str(published))
    train(blip, training, config, tmp_path / "run")
    assert load_foco(tmp_path / "run" / "foco", blip).image_mean.shape == (16,)
    _, again = load_trained(tmp_path / "run" / "foco", device="cpu")
    assert again.identity == blip.identity
    with pytest.raises(ValueError, match="trained on another backbone"): load_foco(tmp_path / "run" / "foco", load_backbone(published, "random"))


def test_cached_features(blip, pictures, tmp_path):
    first = encode_cached(blip, pictures, cache=tmp_path, patches=True)
    torch.testing.assert_close(torch.as_tensor(first.patches).float(), blip.encode_pictures(pictures).patches, atol=2e-3, rtol=0)
