"""ToyWorld is the same on every machine, and its benchmark is what it claims to be."""
import hashlib

import numpy as np
import pytest
from foco.toyworld.benchmark import grounding_examples, load_benchmark, training_pairs
from foco.toyworld.captions import full_plan, say
from foco.toyworld.drawing import draw_array, masks
from foco.toyworld.scenes import Dice, random_scene, split_of


def digest(parts): return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def test_pictures_are_the_same_everywhere():
    assert digest(draw_array(random_scene(Dice(i))).tobytes() for i in range(300)) == "01dfd7e3ccac1c45"


def test_captions_and_decompositions_are_the_same_everywhere():
    said = training_pairs(300).decompositions
    assert digest(repr((d.caption, d.pairs)).encode() for d in said) == "999342321efb87df"


@pytest.mark.parametrize("split, expected", [("val", "57143a43cca2d637"), ("test", "396c62bbd81bd5ea")])
def test_benchmark_is_the_same_everywhere(split, expected):
    bench = load_benchmark(split)
    asked = [repr((q.reference, q.text, q.targets, q.kind)).encode() for q in bench.queries]
    assert digest([*asked, *(s.key.encode() for s in bench.images.scenes)]) == expected


@pytest.mark.parametrize("size", [64, 192])
def test_masks_cover_the_items_that_are_drawn(size):
    for i in range(30):
        scene = random_scene(Dice(i))
        empty = draw_array(type(scene)((), scene.background, (), scene.seed), size).astype(int)
        changed = np.abs(draw_array(scene, size).astype(int) - empty).max(-1) > 0
        seen = masks(scene, size).any(0)
        assert changed[seen].mean() > .95 and seen[changed].mean() > .5 # the outline is changed, too, but not masked


def test_every_right_answer_is_listed_and_only_those():
    bench = load_benchmark("val")
    keys = np.array([s.key for s in bench.images.scenes])
    for q in bench.queries: assert sorted(q.targets) == np.flatnonzero(keys == keys[q.targets[0]]).tolist()


def test_training_never_shows_a_benchmark_meaning():
    trained = {s.key for s in training_pairs(3000).images.scenes}
    for split in ("val", "test"):
        bench = load_benchmark(split)
        assert not trained & {bench.images.scenes[i].key for q in bench.queries for i in (q.reference, *q.targets)}
        assert {split_of(bench.images.scenes[i]) for q in bench.queries for i in (q.reference, *q.targets)} == {split}


def test_captions_of_different_meanings_differ():
    scenes = {random_scene(Dice(i)).key: random_scene(Dice(i)) for i in range(400)}.values()
    said = [say(s, full_plan(s), Dice(0)) for s in scenes]
    assert len(set(said)) == len(said)


def test_a_grounding_text_names_one_item_only():
    where = grounding_examples(100)
    for scene, text, mask in zip(where.images.scenes, where.texts, where.masks):
        mine = [m for m in masks(scene) if (m == mask).all()]
        assert len(mine) == 1 and text
