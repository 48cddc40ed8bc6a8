"""Composing and scoring whole benchmarks, and the files that come of it."""
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from foco.backbones import ImageFeatures, feature_stats, load_backbone
from foco.data.benchmark import reference_rows
from foco.data.metrics import rank_targets, score
from foco.evaluate import Result, compose_queries, encode_benchmark, evaluate, next_different, open_benchmark, reactions, results_table, slerp, training_free
from foco.toyworld.benchmark import load_benchmark


@pytest.fixture(scope="module")
def world():
    backbone = load_backbone("tiny-clip")
    bench = load_benchmark("val", n_per_kind=4)
    return backbone, bench, *encode_benchmark(backbone, bench)


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return tmp_path_factory.mktemp("toyworld")


class Fixed:
    "A composer that returns given features."
    name = "fixed"
    def __init__(self, composed, gallery): self.composed, self.gallery = composed, gallery
    def compose(self, images, texts): return self.composed[:len(texts)]
    def encode_gallery(self, global_): return self.gallery


def test_reference_is_left_out(world):
    backbone, bench, references, gallery = world
    scored = evaluate(training_free(backbone, feature_stats(references, backbone.encode_texts(["a car"])))[0], bench, references, gallery, backbone)
    kept = replace(bench, exclude_reference=False)
    with_reference = evaluate(training_free(backbone, feature_stats(references, backbone.encode_texts(["a car"])))[0], kept, references, gallery, backbone)
    assert with_reference.result.metrics["R@1"] == 0 # the reference itself is the nearest picture
    assert scored.result.protocol["exclude_reference"] and not with_reference.result.protocol["exclude_reference"]


def test_wrong_number_of_features(world):
    backbone, bench, references, gallery = world
    with pytest.raises(ValueError, match="5 references where edits val has 24"): evaluate(Fixed(None, None), bench, references[:5], gallery, backbone)


def test_result_round_trip_and_refusals(world, tmp_path):
    backbone, bench, references, gallery = world
    result = evaluate(Fixed(references.global_, gallery), bench, references, gallery, backbone, seed=4, commit="abc").result
    assert Result.load(result.save(tmp_path)) == result
    with pytest.raises(ValueError): replace(result, metrics={"R@1": float("nan")}).save(tmp_path)
    path = result.save(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"r@1": 5}), encoding="utf-8")
    with pytest.raises(ValueError, match="not a result file"): Result.load(path)


@pytest.mark.parametrize("alpha", [0., .25, .6, 1.])
def test_slerp_against_rotation(alpha):
    angle = torch.tensor(.8, dtype=torch.float64)
    u, v = torch.tensor([[1., 0.]], dtype=torch.float64), torch.stack([angle.cos(), angle.sin()])[None]
    assert torch.allclose(slerp(u, v, alpha), torch.stack([(alpha * angle).cos(), (alpha * angle).sin()])[None])


class Words:
    "A composer whose feature is the text's length and first letter: no reference, no backbone."
    name = "words"
    def compose(self, images, texts): return F.normalize(torch.tensor([[len(t), ord(t[0]), 1.] for t in texts]), dim=-1)
    def encode_gallery(self, global_): return F.normalize(global_[:, :3], dim=-1)


def test_two_ways_of_saying_it_are_averaged(world):
    backbone, bench, references, gallery = world
    said = replace(bench, queries=[replace(q, text="abc", also=("zebra crossing",)) if i % 2 else q for i, q in enumerate(bench.queries)])
    composed = compose_queries(Words(), said, references, batch_size=5)
    one, other = Words().compose(None, ["abc", "zebra crossing"])
    assert torch.allclose(composed[1], F.normalize(one + other, dim=-1)) and torch.allclose(composed[0], Words().compose(None, [bench.queries[0].text])[0])


def test_shared_references_are_encoded_once(world):
    backbone, bench, references, gallery = world
    shared = replace(bench, queries=[replace(q, reference=bench.queries[0].reference, targets=q.targets) for q in bench.queries[:6]])
    refs, _ = encode_benchmark(backbone, shared)
    assert len(refs) == 1
    image_only = training_free(backbone, feature_stats(references, backbone.encode_texts(["a car"])))[0]
    assert torch.allclose(compose_queries(image_only, shared, refs), gallery[[bench.queries[0].reference] * 6], atol=1e-5)


def test_hidden_labels_have_no_score(world):
    backbone, bench, references, gallery = world
    hidden = replace(bench, queries=[replace(q, targets=None) for q in bench.queries])
    with pytest.raises(ValueError, match="labels are hidden.*submission file"): evaluate(Words(), hidden, references, gallery, backbone)


def test_missing_pictures_stay_with_the_score(world, tmp_path):
    backbone, bench, references, gallery = world
    partial = replace(bench, missing={"queries": [24, 25], "gallery": [264, 270]}, data="unofficial")
    result = evaluate(Words(), partial, references, gallery, backbone).result
    assert Result.load(result.save(tmp_path)).missing == partial.missing
    assert "only 24 of 25 queries, 264 of 270 gallery pictures" in results_table([result]).index[0][1]


def test_other_galleries_warn(world):
    backbone, bench, references, gallery = world
    result = evaluate(Words(), bench, references, gallery, backbone).result
    with pytest.warns(UserWarning, match="differ in gallery_sha256 and must not be compared"): results_table([result, replace(result, gallery_sha256="other")])


@pytest.mark.parametrize("name", ["fashioniq", "cirr", "circo", "genecis"])
@pytest.mark.parametrize("split", ["val", "test"])
def test_toyworld_in_the_four_formats(world, name, split, folder):
    "Written in the official formats, read by the official loaders, scored by the official rules."
    backbone = world[0]
    bench = open_benchmark(name, split, folder=folder)
    assert bench.data == "toyworld" and not bench.missing and not bench.hidden and len(bench.queries) >= 200
    assert bench.images[0].size and bench.images[len(bench.ids) - 1].size
    g = torch.Generator().manual_seed(0)                                                    # pictures of noise: their encoding is tested elsewhere
    noise = lambda *shape: F.normalize(torch.randn(*shape, backbone.D, generator=g), dim=-1)
    n = len(set(reference_rows(bench)[0].tolist()))
    references, gallery = ImageFeatures(noise(n), noise(n, 2)), noise(len(bench.images))
    free = training_free(backbone, feature_stats(references, backbone.encode_texts(["a car"])))
    scores = {c.name: evaluate(c, bench, references, gallery, backbone).result.metrics for c in free[:3]}
    flat = Fixed(torch.ones(len(bench.queries) * 2, 3), torch.ones(len(bench.ids), 3))
    assert all(v == 0 for m, v in evaluate(flat, bench, references, gallery, backbone).result.metrics.items() if m.split("@")[-1] in ("1", "5", "10") and not (name == "genecis" and m == "R@10"))
    assert all(0 <= v <= 100 for s in scores.values() for v in s.values())


class Reads(Fixed):
    "A composer that names a picture of the gallery by its number, which is its text."
    def compose(self, images, texts): return self.gallery[[int(t) for t in texts]]


class Sees(Fixed):
    "A composer that gives back the picture."
    def compose(self, images, texts): return images.global_


def shared_by_neighbours(bench, texts=None):
    "Four successive queries have the same text, six the same reference; the last ones share with the first."
    queries = [replace(bench.queries[i], reference=bench.queries[i // 6 % 3].reference, text=str(10 + i // 4 % 5) if texts is None else texts[i], targets=(263,)) for i in range(24)]
    return replace(bench, queries=queries, exclude_reference=False)


def test_reactions_where_neighbours_share_text_and_reference(world):
    "The other text is another one, and so is the other picture."
    bench, eye = shared_by_neighbours(world[1]), torch.eye(len(world[1].ids))
    assert sum(a.text == b.text for a, b in zip(bench.queries, bench.queries[1:])) == 18 and bench.queries[0].text == bench.queries[-1].text
    pictures, _ = reference_rows(bench)
    references, blank = ImageFeatures(eye[pictures], torch.zeros(3, 2, len(eye))), ImageFeatures(eye[200:201], torch.zeros(1, 2, len(eye)))
    assert reactions(Reads(None, eye), bench, references, eye, blank).to_dict() == {"other text": 100, "other picture": 0, "blank picture": 0}
    assert reactions(Sees(None, eye), bench, references, eye, blank).to_dict() == {"other text": 0, "other picture": 100, "blank picture": 100}
    alike = reactions(Reads(None, eye), shared_by_neighbours(world[1], ["7"] * 24), references, eye, blank)
    assert np.isnan(alike["other text"]) and alike["other picture"] == 0    # no other text to give it


def test_next_different_against_a_search():
    rng = np.random.default_rng(0)
    for _ in range(200):
        values = rng.integers(0, 3, rng.integers(1, 9)).tolist()
        after = [[j % len(values) for j in range(i, i + len(values)) if values[j % len(values)] != values[i]] for i in range(len(values))]
        found = next_different([str(v) for v in values])
        assert (found is None and not any(after)) or found.tolist() == [a[0] for a in after]


@pytest.mark.parametrize("name, options, message", [
    ("edits", {"joins": 1}, "edits has no option 'joins'; expected one of n_per_kind, seed"),
    ("genecis", {"task": "focus"}, "genecis has no option 'task'; expected one of tasks, condition, crop"),
    ("genecis", {"allow_missing": "false"}, "allow_missing='false'; expected True or False"),
    ("genecis", {"pictures": 1}, "pictures=1; expected True or False")])
def test_wrong_options_without_a_root(folder, name, options, message):
    with pytest.raises(ValueError, match=message): open_benchmark(name, **options, **({} if name == "edits" else {"folder": folder}))


def test_a_mistake_inside_a_loader_stays_what_it_is(monkeypatch):
    "Only an option that was given is called unknown."
    import foco.toyworld.source as source
    def inner(): pass
    def broken(split, n_per_kind): return inner(keys=1)
    monkeypatch.setattr(source, "load_benchmark", broken)
    with pytest.raises(TypeError, match="keys"): open_benchmark("edits", n_per_kind=1)
