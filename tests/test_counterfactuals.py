"""Counterfactuals: wordings that are not the benchmark's, and captions as people write them."""
import os
import re
import time
from pathlib import Path

import pytest
import torch

from foco.backbones import load_backbone
from foco.complete import FoCo
from foco import counterfactuals
from foco.counterfactuals import Lexicon, make_counterfactuals, phrases, say_edit
from foco.decompose import Decomposition
from foco.toyworld import captions as world
from foco.toyworld.benchmark import training_pairs
from foco.toyworld.source import open_benchmark

BENCHMARKS = Path(os.environ.get("FOCO_BENCHMARKS") or Path(__file__).resolve().parents[2] / "shared" / "benchmarks")
CAPTIONS = BENCHMARKS.parent / "captions" / "cc3m_val_captions.txt"
SLOTS = {"NOUN": [w for ws in world._NOUNS.values() for w in ws], "COLOUR": [w for ws in world._COLOUR_WORDS.values() for w in ws], "SIZE": [w for ws in world._SIZE_WORDS.values() for w in ws],
         "PATTERN": [w for ws in world._PATTERN_WORDS.values() for w in ws] + [w for ws in world._PATTERN_TAILS.values() for w in ws], "PLACE": [w for ws in world._PLACES.values() for w in ws]}
SLOT = {word: slot for slot, words in SLOTS.items() for word in words}
WORDS = re.compile(r"\b(" + "|".join(sorted(map(re.escape, SLOT), key=len, reverse=True)) + r")\b")


def wording(text):
    "What is left of a text when names of things, looks and places become slots, and looks disappear into the thing."
    text = re.sub(r"\ban\b", "a", WORDS.sub(lambda m: SLOT[m[0]], text))
    text = re.sub(r"(?:(?:SIZE|COLOUR|PATTERN) )+NOUN(?: PATTERN)?", "NOUN", text)
    return re.sub(r"NOUN PATTERN", "NOUN", text)


def test_wordings_are_not_the_benchmarks():
    "Single words aside, which GeneCIS's format asks for, no way of asking is shared with a benchmark."
    made = make_counterfactuals(training_pairs(4_000).decompositions, 8, double=0)
    ours = {wording(c.text) for found in made for c in found if len(wording(c.text).split()) > 1}
    theirs = {wording(part) for name in ("edits", "fashioniq", "cirr", "circo", "genecis") for q in open_benchmark(name, "val").queries for text in q.texts for part in [text, *text.split(" and ")]}
    assert len(ours) > 200 and len(theirs) > 50
    assert not ours & theirs, sorted(ours & theirs)


def said(text): return re.findall(r"[\w'-]+", text.lower())


@pytest.fixture(scope="module")
def decompositions(): return training_pairs(1_000).decompositions


def test_two_edits_do_not_share_what_they_name(decompositions, monkeypatch):
    "Neither a thing nor a look nor a place of the first edit comes again in the second."
    asked = []
    def remember(edit, *args):
        asked.append(edit)
        return say_edit(edit, *args)
    monkeypatch.setattr(counterfactuals, "say_edit", remember)
    made = [c for found in make_counterfactuals(decompositions, 8, double=1.) for c in found]
    small = set("the a an and in on to of by under against at with".split())
    def named(edit): return {w for words in edit.words.values() for w in said(words)} - small
    doubles = [(first, second) for first, second in zip(asked, asked[1:]) if second.before == first.after != first.before]     # the second edit starts from what the first has made
    for first, second in doubles: assert not named(first) & named(second), (first, second)
    assert len(doubles) > 1_500 and len(made) == 8_000


def test_remove_removes_and_keep_keeps_one(decompositions):
    nouns, seen = set(Lexicon(d.caption for d in decompositions).nouns), {"remove": 0, "keep": 0}
    removed = 0
    for c in (c for found in make_counterfactuals(decompositions, 8, double=0) for c in found):
        if c.kind == "remove":
            gone = nouns & set(said(c.text))
            left, was = ({p.noun for p in phrases(s)} for s in (c.after, c.before))
            assert len(gone) == 1 and not gone & left and len(was - left) >= 1, c
            removed += gone <= was      # in others the caption has another word for it
        if c.kind == "keep":
            kept = {p.noun for p in phrases(c.before)} & {p.noun for p in phrases(c.after)} & nouns & set(said(c.text))
            assert any([p.noun for p in phrases(c.after)].count(noun) == 1 for noun in kept), c
            assert not re.search(r"^there is|(want|:|time|but now) there is|picture of", c.text), c
        seen[c.kind] = seen.get(c.kind, 0) + 1
    assert min(seen.values()) > 100 and removed > .8 * seen["remove"]


def test_as_many_as_asked_for_and_no_two_alike(decompositions):
    made = make_counterfactuals([*decompositions, *decompositions], 8)
    assert all(len(found) == len(set(found)) == 8 for found in made)


@pytest.mark.parametrize("wordings, message", [
    ({"rmove": ["no {noun}"]}, "the kinds are"), ({"remove": ["no {nuon}"]}, "slot 'nuon'; there are: noun, a_noun"), ({"remove": ["no {noun"]}, "expected '}'"), ({"remove": ["no {old}"]}, "there are: noun"),
    ({"replace": ["{a_new}"]}, "slot 'a_new'"), ({"remove": "no {noun}"}, "a list of texts"), ({"remove": [" "]}, "not empty"), ({"add": ["{}"]}, "slot ''"), ({"add": ["{new:d}"]}, "without format"), ({"add": None}, "a list of texts"), ({"remove": 3}, "a list of texts"),
    (["no {noun}"], "is a list; expected kinds")], ids=str)
def test_wrong_wordings_are_refused_before_anything_is_made(wordings, message):
    with pytest.raises(ValueError, match=re.escape(message)): make_counterfactuals([], wordings=wordings)


def test_another_lexicon_is_used(decompositions):
    "One that knows a single noun, and no looks."
    class Boats(Lexicon):
        def __init__(self): super().__init__([]); self.nouns = ["boat"]
    made = [c for found in make_counterfactuals(decompositions[:100], 4, double=0, lexicon=Boats()) for c in found]
    assert {c.kind for c in made} >= {"replace", "only"} and not [c for c in made if c.kind in ("attribute", "place")]
    assert any("boat" in c.after and "boat" not in c.before for c in made if c.kind == "replace")


def test_the_pairs_of_rare_looks_are_not_compared():
    "Fifty thousand looks, most of them said once: comparing all with all would take a billion steps."
    common = [f"a {size} {colour} {noun}" for size in ("big", "small") for colour in ("red", "blue") for noun in map("ball{}".format, range(2_500))]
    began = time.process_time()
    lexicon = Lexicon(common + [f"a big look{i} ball1" for i in range(50_000)])
    assert lexicon.alternatives["red"] == ["blue"] and lexicon.alternatives["big"] == ["small"] and time.process_time() - began < 30


@pytest.mark.parametrize("options", [{}, {"use_background": False}, {"blocks": 0}, {"use_background": False, "blocks": 0}, {"inference_background": False}], ids=str)
def test_an_untrained_residual_model_returns_the_picture(options):
    torch.manual_seed(0)
    backbone = load_backbone("tiny-clip", device="cpu")
    images = backbone.encode_pictures(training_pairs(4).images)
    model = FoCo(backbone.D, None, residual=True, **options).eval()
    texts = torch.nn.functional.normalize(torch.randn(4, 3, backbone.D), dim=-1)
    with torch.no_grad():
        h = model(texts, texts, model.prepare_images(images))
        assert torch.allclose(h, torch.nn.functional.normalize(images.global_, dim=-1)[:, None].expand_as(h), atol=1e-5)
        torch.nn.init.normal_(model.completer.out.weight)
        assert (model(texts, texts, model.prepare_images(images)) - h).abs().max() > .01


def test_the_whole_pipeline_knows_no_toyworld():
    import subprocess, sys
    subprocess.run([sys.executable, "-c", "import sys, foco.train; assert not [m for m in sys.modules if 'toyworld' in m]"], check=True)


@pytest.mark.parametrize("caption", ["", "   ", "!!!", "<PERSON> & <PERSON>", "a", "the of and", "dog", "a {noun} and a {new}", "猫と犬", "A CAR ON THE GRASS", "a car " * 300, "an é́clair 🙂 on a table"])
def test_any_caption_is_survived(caption):
    phrases(caption)
    if caption.strip():
        others = training_pairs(200).decompositions
        made = make_counterfactuals([Decomposition(caption, ((caption, caption),), "test"), *others], 4)
        assert len(made) == 201 and all(len(found) <= 4 for found in made)


def test_capital_letters_are_words_like_others():
    lower = [Decomposition(d.caption, d.pairs, "test") for d in training_pairs(300).decompositions]
    upper = [Decomposition(d.caption.capitalize(), d.pairs, "test") for d in lower]
    assert Lexicon(d.caption for d in lower).nouns == Lexicon(d.caption for d in upper).nouns


@pytest.mark.skipif(not CAPTIONS.exists(), reason="no real captions beside the repository")
def test_real_captions_give_counterfactuals():
    captions = [line.strip() for line in CAPTIONS.read_text(encoding="utf-8").splitlines() if line.strip()]
    lexicon = Lexicon(captions, expected=.5)
    assert {"beach", "background", "street"} <= lexicon.places and {"man", "woman", "dog"} <= set(lexicon.nouns)
    assert lexicon.alternatives["red"] and not Lexicon(captions).alternatives      # what 04_counterfactuals says: there are too few
    made = make_counterfactuals([Decomposition(c, ((c, c),), "test") for c in captions[:2_000]], 4, lexicon=lexicon)
    assert sum(map(bool, made)) > .7 * len(made)
    assert all(c.before != c.after and c.text.strip() for found in made for c in found)
