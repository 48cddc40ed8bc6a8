"Parity with open_clip, odd pictures and texts, what a backbone's features depend on."
import copy
import io
import json
import pickle
import warnings
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from foco.backbones import Backbone, ImageFeatures, center, feature_stats, load_backbone, to_rgb, unit
from foco.weights import BACKBONES, count_parameters, file_sha256, find_recipe, load_model, make_tokenizer


def both_paths(backbone, pixels):
    "Global and patch features by open_clip's own `output_tokens` path."
    visual = backbone.model.visual
    try:
        visual.output_tokens = True
        with torch.no_grad(): pooled, tokens = visual(pixels.to(backbone.arithmetic))
    finally: visual.output_tokens = False
    return unit(pooled), unit(tokens @ visual.proj)


# ---- parity ----

def test_features_equal_open_clip(tiny, pictures):
    pixels = torch.stack([tiny.preprocess(p) for p in pictures])
    features, (global_, patches) = tiny.encode_images(pixels), both_paths(tiny, pixels)
    torch.testing.assert_close(features.global_, global_, atol=1e-5, rtol=0)
    torch.testing.assert_close(features.patches, patches, atol=1e-5, rtol=0)
    torch.testing.assert_close(features.global_, tiny.model.encode_image(pixels, normalize=True), atol=1e-5, rtol=0)
    assert tiny.model.visual.output_tokens is False


def test_texts_equal_open_clip(tiny):
    texts = ["a red star", "A Red Star", "two cars on the snow", "a red star", "!!!", "a star!", "", "a red star " * 40]    # "!" is token 0, like the padding that is cut off
    features = tiny.encode_texts(texts, batch_size=3, allow_empty=True)
    with torch.no_grad(): theirs = tiny.model.encode_text(tiny.tokenizer(texts), normalize=True)
    torch.testing.assert_close(features, theirs, atol=1e-5, rtol=0)
    assert torch.equal(features[0], features[1]) and torch.equal(features[0], features[3]) # lower-cased, and encoded once


@pytest.mark.parametrize("batch_size", [1, 4, 13])
def test_batch_size_makes_no_difference(tiny, pictures, batch_size):
    whole, parts = tiny.encode_pictures(pictures), tiny.encode_pictures(iter(pictures), batch_size=batch_size)
    torch.testing.assert_close(parts.global_, whole.global_, atol=1e-5, rtol=0)
    torch.testing.assert_close(parts.patches, whole.patches, atol=1e-4, rtol=0)
    texts = [f"a {colour} car" for colour in ("red", "green", "blue", "white", "black")]
    torch.testing.assert_close(tiny.encode_texts(texts, batch_size=batch_size), tiny.encode_texts(texts), atol=1e-5, rtol=0)


@pytest.mark.parametrize("layer", [0, 1, -2, -1, None])
def test_patch_layer_is_that_blocks_output(tiny, pictures, layer):
    kept, at = [], tiny.at_layer(layer)
    block = tiny.model.visual.transformer.resblocks[-1 if layer is None else layer]
    hook = block.register_forward_hook(lambda module, args, out: kept.append(out))
    pixels = torch.stack([tiny.preprocess(p) for p in pictures[:3]])
    features = at.encode_images(pixels)
    hook.remove()
    with torch.no_grad(): expected = unit(tiny.model.visual.ln_post(kept[0][:, 1:]) @ tiny.model.visual.proj)
    torch.testing.assert_close(features.patches, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(features.global_, tiny.encode_images(pixels).global_, atol=1e-6, rtol=0) # whatever the layer
    assert at.patch_layer == (layer or (0 if layer == 0 else -1)) % tiny.n_layers


def test_average_pooled_tower(pictures):
    recipe = find_recipe("tiny-clip", "random")
    model_cfg = copy.deepcopy(recipe.model_cfg)
    model_cfg["vision_cfg"].update(pool_type="avg", no_ln_pre=True, final_ln_after_pool=True)
    recipe = replace(recipe, model_cfg=model_cfg)
    model, weights = load_model(recipe)
    backbone = Backbone(recipe, model, make_tokenizer(recipe), weights)
    pixels = torch.stack([backbone.preprocess(p) for p in pictures[:2]])
    torch.testing.assert_close(backbone.encode_images(pixels).global_, both_paths(backbone, pixels)[0], atol=1e-5, rtol=0)


# ---- the paper's backbones, with random weights ----

def test_vit_l_14():
    backbone = load_backbone("ViT-L/14", "random", device="cpu", dtype="bfloat16")
    assert (backbone.name, backbone.D, backbone.P, backbone.grid, backbone.activation) == ("ViT-L-14", 768, 256, (16, 16), "quick_gelu")
    assert type(backbone.model.visual.transformer.resblocks[0].mlp.gelu).__name__ == "QuickGELU"
    assert type(backbone.model.transformer.resblocks[0].mlp.gelu).__name__ == "QuickGELU"
    assert backbone.dtype == torch.bfloat16 and {p.dtype for p in backbone.model.visual.transformer.resblocks.parameters()} == {torch.bfloat16} and 427e6 < count_parameters(backbone.model) < 428e6
    pixels = torch.randn(1, 3, 224, 224)
    features, (global_, patches) = backbone.encode_images(pixels), both_paths(backbone, pixels)
    assert features.patches.shape == (1, 256, 768) and features.patches.dtype == torch.float32
    torch.testing.assert_close(features.patches, patches, atol=1e-5, rtol=0)
    torch.testing.assert_close(features.global_, global_, atol=1e-5, rtol=0)
    assert backbone.encode_texts(["a dog"]).shape == (1, 768)


def test_save_and_load(tmp_path, tiny, pictures):
    copied = load_backbone(tiny.save(tmp_path / "copy"))
    assert torch.equal(copied.encode_pictures(pictures).patches, tiny.encode_pictures(pictures).patches)
    assert torch.equal(copied.encode_texts(["a car"]), tiny.encode_texts(["a car"]))
    assert "/" not in (tmp_path / "copy" / "open_clip_config.json").read_text(encoding="utf-8") # no path in it
    (tmp_path / "copy" / "open_clip_config.json").rename(tmp_path / "copy" / "config.json")
    (tmp_path / "copy" / "open_clip_model.safetensors").rename(tmp_path / "copy" / "model.safetensors")
    assert load_backbone(tmp_path / "copy").identity == copied.identity


def test_identity(tiny, tmp_path):
    assert tiny.identity == load_backbone().identity == json.loads(json.dumps(tiny.identity))
    assert set(tiny.identity) == {"name", "pretrained", "weights", "patch_layer", "activation", "preprocess_sha256"}
    assert tiny.weights == "sha256:" + file_sha256(BACKBONES["tiny-clip"].folder / "open_clip_model.safetensors")
    others = [load_backbone(patch_layer=0), load_backbone(pretrained="random"), load_backbone(pretrained="random:1")]
    assert len({json.dumps(b.identity) for b in (tiny, *others)}) == 4
    assert str(tmp_path) not in json.dumps(load_backbone(tiny.save(tmp_path / "copy")).identity)


@pytest.mark.parametrize("change", [dict(mean=[.4, .5, .5]), dict(std=[.3, .3, .3]), dict(interpolation="bilinear"), dict(resize_mode="squash")])
def test_another_preprocessing_is_another_identity(tiny, change):
    recipe = replace(tiny.recipe, preprocess_cfg={**tiny.recipe.preprocess_cfg, **change})
    other = Backbone(recipe, tiny.model, tiny.tokenizer, tiny.weights).identity
    assert {k for k, v in other.items() if v != tiny.identity[k]} == {"preprocess_sha256"}


def test_batches_are_smaller_on_a_cpu(tiny, pictures):
    sizes = []
    with mock.patch.object(Backbone, "encode_images", lambda self, pixels: sizes.append(len(pixels)) or ImageFeatures(torch.zeros(len(pixels), 2), torch.zeros(len(pixels), 1, 2))):
        tiny.encode_pictures(pictures[:1] * 300)
        tiny.encode_pictures(pictures[:1] * 300, batch_size=200)
        elsewhere = tiny.at_layer(None)
        elsewhere.device = torch.device("cuda")
        elsewhere.encode_pictures(pictures[:1] * 300)
    assert sizes == [64, 64, 64, 64, 44, 200, 100, 256, 44]


# ---- pictures and texts ----

ODD = {
    "1-bit": Image.new("1", (30, 20), 1), "grey": Image.new("L", (30, 20), 90), "grey and alpha": Image.new("LA", (30, 20), (90, 10)),
    "palette": Image.effect_noise((30, 20), 50).convert("P"), "CMYK": Image.new("CMYK", (30, 20), (9, 8, 7, 6)), "16 bits": Image.new("I;16", (30, 20), 40_000),
    "32 bits": Image.new("I", (30, 20), 40_000), "one pixel": Image.new("RGB", (1, 1)), "one pixel wide": Image.new("RGB", (1, 400)),
    "panorama": Image.new("RGB", (40_000, 100)), "HSV": Image.new("HSV", (30, 20)),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_pictures_give_finite_pixels(tiny, kind):
    pixels = tiny.preprocess(ODD[kind])
    assert pixels.shape == (3, *tiny.image_size) and pixels.isfinite().all()


def test_transparency_is_white():
    clear, palette = Image.new("RGBA", (4, 4), (255, 0, 0, 0)), Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    palette.info["transparency"] = 1
    for picture in (clear, clear.convert("LA"), palette):
        assert to_rgb(picture).getpixel((1, 1)) == (255, 255, 255)


def test_exif_orientation_is_honoured():
    upright = Image.new("RGB", (6, 4), "red")
    upright.putpixel((0, 0), (0, 0, 255))
    exif = Image.Exif()
    exif[0x0112] = 6 # turn by 90 degrees clockwise to see it upright
    stream = io.BytesIO()
    upright.save(stream, "png", exif=exif)
    turned = to_rgb(Image.open(stream))
    assert turned.size == (4, 6) and turned.getpixel((3, 0)) == (0, 0, 255)


def test_palette_is_converted_before_resizing(tiny):
    checks = Image.fromarray((np.indices((128, 128)).sum(0) % 2 * 255).astype(np.uint8))
    torch.testing.assert_close(tiny.preprocess(checks.convert("P")), tiny.preprocess(checks.convert("RGB")))


def test_gif_uses_its_first_frame():
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(stream, "gif", save_all=True, append_images=[Image.new("RGB", (8, 8), "blue")])
    assert to_rgb(Image.open(stream)).getpixel((0, 0)) == (255, 0, 0)


def test_unreadable_picture_is_named(tiny, pictures, tmp_path):
    pictures[0].save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:2000])
    with pytest.raises(OSError, match="picture 1: "): tiny.encode_pictures([pictures[0], Image.open(tmp_path / "cut.png")])
    with pytest.raises(TypeError, match="picture 0: expected a PIL picture, found PosixPath|WindowsPath"): tiny.encode_pictures([tmp_path / "cut.png"])


def test_empty_input(tiny):
    assert tiny.encode_texts([]).shape == (0, tiny.D) and len(tiny.encode_pictures([])) == 0
    assert tiny.encode_images(torch.zeros(0, 3, *tiny.image_size)).patches.shape == (0, tiny.P, tiny.D)
    with pytest.raises(ValueError, match="text 2 of 3 is empty"): tiny.encode_texts(["a", "b", "\n "])
    with pytest.raises(TypeError, match="text 0 is a NoneType"): tiny.encode_texts([None])
    with pytest.raises(TypeError, match="expected a list of strings"): tiny.encode_texts("a car")


def test_long_texts_are_cut_once_and_counted(tiny):
    long = ["a red star and a blue car " * 20, "a green moon " * 60]
    with pytest.warns(UserWarning, match="2 of 3 different texts are longer than") as caught: features = tiny.encode_texts([*long, "a car", long[0]])
    assert len(caught) == 1 and torch.equal(features[0], features[3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids = tiny.tokenize(long)
    assert (ids[:, -1] == tiny.tokenizer.eot_token_id).all() and (ids == tiny.tokenizer.eot_token_id).sum() == 2
    fits = tiny.tokenizer.decode(ids[1, 1:-1].tolist()).strip()
    with warnings.catch_warnings():
        warnings.simplefilter("error") # exactly full is not too long
        torch.testing.assert_close(tiny.encode_texts([fits])[0], features[1], atol=1e-5, rtol=0)


def test_preprocess_travels_to_workers(tiny, pictures):
    assert torch.equal(pickle.loads(pickle.dumps(tiny.preprocess))(pictures[0]), tiny.preprocess(pictures[0]))


# ---- statistics ----

def test_centring_removes_the_mean(tiny, pictures):
    images = tiny.encode_pictures(pictures)
    stats = feature_stats(images, tiny.encode_texts(["a car", "a star"])).to(torch.float64)
    torch.testing.assert_close(stats.image_mean, images.global_.double().mean(0), atol=1e-6, rtol=0)
    centred = center(images.patches, stats.patch_mean.float())
    torch.testing.assert_close(centred.norm(dim=-1), torch.ones(len(images), tiny.P))
    assert center(torch.ones(3), torch.ones(3)).isfinite().all() # a feature that is its own mean
    with pytest.raises(ValueError, match="do not belong together"): ImageFeatures(torch.zeros(2, 3), torch.zeros(2, 4, 5))
