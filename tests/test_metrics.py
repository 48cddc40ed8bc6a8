"""Ranks and scores: chance level, both extremes, lists, the size of the real benchmarks."""
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from foco.data.benchmark import Benchmark, Query
from foco.data.metrics import average_precision_at, bootstrap_interval, metric_values, query_values, rank_lists, rank_targets, score

METRICS = ("R@1", "R@5", "R@10", "mAP@5", "mAP@50", "R_subset@1")


def benchmark(n, queries, **kwargs): return Benchmark("made", "val", range(n), [str(i) for i in range(n)], queries, **kwargs)


def random_benchmark(generator, n, n_queries, **kwargs):
    "Queries with one to four targets, a subset of six, and two galleries that share pictures."
    galleries = [np.arange(0, n * 3 // 4), np.arange(n // 4, n)]
    queries = []
    for i in range(n_queries):
        g = galleries[i % 2]
        picked = g[torch.randperm(len(g), generator=generator)[:9].numpy()].tolist()
        queries.append(Query(picked[0], "x", tuple(picked[1:2 + i % 4]), ("even",) if i % 3 else ("odd", "even"), gallery=i % 2, subset=tuple(picked[:6])))
    return benchmark(n, queries, galleries=galleries, metrics=METRICS, **kwargs)


def literal_rank(similar, q, gallery, t, exclude):
    "Rank by going through the gallery one picture at a time."
    wrong = [g for g in gallery if g not in q.targets and not (exclude and g == q.reference)]
    better = [u for u in q.targets if u in gallery and u != t and (similar[u] > similar[t] or (similar[u] == similar[t] and q.targets.index(u) < q.targets.index(t)))]
    return 1 + sum(similar[g] >= similar[t] for g in wrong) + len(better) if t in gallery else np.inf


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_ranks_and_scores_against_a_literal_reading(seed, exclude):
    generator = torch.Generator().manual_seed(seed)
    bench = random_benchmark(generator, 24, 12, exclude_reference=exclude)
    gallery, composed = ((torch.randn(n, 4, generator=generator) * 2).round() for n in (24, 12))     # whole numbers: many exact ties
    ranks = rank_targets(composed, gallery, bench)
    for i, q in enumerate(bench.queries):
        similar = (gallery @ composed[i]).tolist()
        everything = bench.galleries[q.gallery].tolist()
        expected = [literal_rank(similar, q, everything, t, exclude) for t in q.targets]
        assert ranks.gallery[i].tolist() == expected
        assert ranks.subset[i].tolist() == [literal_rank(similar, q, list(q.subset), t, exclude) for t in q.targets]
        hits = [r + 1 in expected for r in range(50)]
        for k in (5, 50): assert average_precision_at([ranks.gallery[i]], k)[0] == pytest.approx(sum(sum(hits[:j + 1]) / (j + 1) for j in range(k) if hits[j]) / min(len(q.targets), k))


def test_constant_features_score_zero_everywhere():
    bench = random_benchmark(torch.Generator().manual_seed(0), 400, 100)
    for D in (1, 3, 100, 128, 1280):      # sizes at which a matrix product adds up differently at its edges
        v = F.normalize(torch.randn(D, generator=torch.Generator().manual_seed(D)), dim=0)
        ranks = rank_targets(v.expand(100, D).contiguous(), v.expand(400, D).contiguous(), bench)
        assert all(query_values(bench, ranks)[m].sum() == 0 for m in ("R@1", "R@5", "R@10", "mAP@5", "R_subset@1"))


@pytest.mark.parametrize("size", [10, 15])
def test_constant_features_score_zero_in_small_galleries(size):
    galleries = [np.arange(i, i + size) for i in range(50)]
    bench = benchmark(80, [Query(79, "x", (i,), gallery=i) for i in range(50)], galleries=galleries, exclude_reference=False, metrics=("R@1", "R@2", "R@3"))
    for D in (3, 100, 128, 768, 1280):
        v = F.normalize(torch.randn(D, generator=torch.Generator().manual_seed(D)), dim=0)
        ranks = rank_targets(v.expand(50, D).contiguous(), v.expand(80, D).contiguous(), bench)
        assert all(r[0] == size for r in ranks.gallery)


def test_perfect_features_score_hundred():
    bench = benchmark(50, [Query(i, "x", (49 - i,)) for i in range(20)], metrics=("R@1", "R@5", "mAP@5"))
    gallery = torch.eye(50)
    assert set(score(bench, rank_targets(gallery[[49 - i for i in range(20)]], gallery, bench)).metrics.values()) == {100.}


def test_random_features_score_chance():
    rng = torch.Generator().manual_seed(0)
    G, Q, T = 400, 2000, 3
    bench = benchmark(G, [Query(0, "x", tuple((1 + torch.randperm(G - 1, generator=rng)[:T]).tolist())) for _ in range(Q)])
    ranks = rank_targets(torch.randn(Q, 32, generator=rng), torch.randn(G, 32, generator=rng), bench)
    expected = 1 - np.prod([(G - 1 - T - i) / (G - 1 - i) for i in range(10)]) # no target among ten draws without replacement
    assert abs(metric_values("R@10", ranks).mean() - expected) < 3 * (expected * (1 - expected) / Q) ** .5


def test_lists_agree_with_ranks():
    generator = torch.Generator().manual_seed(3)
    bench = random_benchmark(generator, 200, 60)
    gallery, composed = torch.randn(200, 16, generator=generator), torch.randn(60, 16, generator=generator)
    ranks, lists = rank_targets(composed, gallery, bench), rank_lists(composed, gallery, bench, k=30)
    for q, r, s, top, subset in zip(bench.queries, ranks.gallery, ranks.subset, lists.top, lists.subset):
        assert len(top) == 30 and q.reference not in top and q.reference not in subset and sorted([*subset, q.reference]) == sorted(q.subset)
        for t, at, inside in zip(q.targets, r, s):
            assert (top.tolist().index(t) + 1 if t in top else 31) == min(at, 31)
            assert (subset.tolist().index(t) + 1 if t in subset else np.inf) == inside


def test_a_reference_outside_its_gallery_is_no_obstacle():
    bench = benchmark(6, [Query(5, "x", (1,), gallery=0), Query(5, "y", (0,), gallery=0)], galleries=[np.arange(4)])
    assert [r.tolist() for r in rank_targets(torch.eye(6)[[1, 1]], torch.eye(6), bench).gallery] == [[1], [4]]
    assert [t.tolist() for t in rank_lists(torch.eye(6)[[1, 1]], torch.eye(6), bench, 9).top] == [[1, 0, 2, 3]] * 2


def test_wrong_number_of_features():
    bench = benchmark(6, [Query(5, "x", (1,))])
    with pytest.raises(ValueError, match="2 composed features where made val has 1"): rank_targets(torch.eye(6)[:2], torch.eye(6), bench)
    with pytest.raises(ValueError, match="5 gallery features where made val has 6"): rank_lists(torch.eye(6)[:1], torch.eye(6)[:5], bench)


def test_bootstrap_covers_as_often_as_it_says():
    "Of many samples of 200 coin flips, about 95% of the intervals hold the truth."
    flips = np.random.default_rng(0).random((300, 200)) < .3
    held = [low <= .3 <= high for low, high in (bootstrap_interval(f.astype(float), n=500, seed=i) for i, f in enumerate(flips))]
    assert .91 < np.mean(held) < .98
