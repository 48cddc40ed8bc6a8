"""Scores: ties, chance level, files."""
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from foco.backbones import ImageFeatures, feature_stats, load_backbone
from foco.data.benchmark import Benchmark, Query
from foco.evaluate import METRICS, Result, encode_benchmark, evaluate, rank_gallery, slerp, training_free
from foco.toyworld.benchmark import load_benchmark


@pytest.fixture(scope="module")
def world():
    backbone = load_backbone("tiny-clip")
    bench = load_benchmark("val", n_per_kind=4)
    return backbone, bench, *encode_benchmark(backbone, bench)


class Fixed:
    "A composer that returns given features."
    name = "fixed"
    def __init__(self, composed, gallery): self.composed, self.gallery = composed, gallery
    def compose(self, images, texts): return self.composed
    def encode_gallery(self, global_): return self.gallery


def test_constant_features_score_zero(world):
    backbone, bench, references, gallery = world
    G, Q = len(bench.images), len(bench.queries)
    scored = evaluate(Fixed(torch.ones(Q, 3), torch.ones(G, 3)), bench, references, gallery, backbone)
    assert set(scored.result.metrics.values()) == {0.}


def test_perfect_features_score_hundred(world):
    backbone, bench, references, gallery = world
    keys = sorted({s.key for s in bench.images.scenes})
    one_hot = F.one_hot(torch.tensor([keys.index(s.key) for s in bench.images.scenes]), len(keys)).float()
    scored = evaluate(Fixed(one_hot[[q.targets[0] for q in bench.queries]], one_hot), bench, references, gallery, backbone)
    assert all(abs(v - 100) < 1e-9 for v in scored.result.metrics.values())


def test_random_features_score_chance():
    rng = torch.Generator().manual_seed(0)
    G, Q, T = 400, 2000, 3
    queries = [Query(0, "x", tuple((1 + torch.randperm(G - 1, generator=rng)[:T]).tolist())) for _ in range(Q)]
    bench = Benchmark("chance", "val", range(G), [str(i) for i in range(G)], queries)
    ranks = rank_gallery(torch.randn(Q, 32, generator=rng), torch.randn(G, 32, generator=rng), bench)
    expected = 1 - np.prod([(G - 1 - T - i) / (G - 1 - i) for i in range(10)]) # no target among ten draws without replacement
    assert abs(METRICS["R@10"](ranks).mean() - expected) < 3 * (expected * (1 - expected) / Q) ** .5


def test_chunks_do_not_change_ranks(world):
    _, bench, references, gallery = world
    composed = F.normalize(torch.randn(len(bench.queries), gallery.shape[1], dtype=torch.float64), dim=-1)
    one, many = (rank_gallery(composed, gallery.double(), bench, chunk=c) for c in (1, 1000))
    assert all((a == b).all() for a, b in zip(one, many))


def test_reference_is_left_out(world):
    backbone, bench, references, gallery = world
    scored = evaluate(training_free(backbone, feature_stats(references, backbone.encode_texts(["a car"])))[0], bench, references, gallery, backbone)
    kept = replace(bench, exclude_reference=False)
    with_reference = evaluate(training_free(backbone, feature_stats(references, backbone.encode_texts(["a car"])))[0], kept, references, gallery, backbone)
    assert with_reference.result.metrics["R@1"] == 0 # the reference itself is the nearest picture
    assert scored.result.protocol["exclude_reference"] and not with_reference.result.protocol["exclude_reference"]


def test_wrong_number_of_features(world):
    backbone, bench, references, gallery = world
    with pytest.raises(ValueError, match="5 references where the benchmark has 24"): evaluate(Fixed(None, None), bench, references[:5], gallery, backbone)


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
