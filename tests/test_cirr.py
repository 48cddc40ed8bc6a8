"""CIRR: the real annotation files where they are at hand, small generated ones everywhere."""
import json, time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from PIL import Image
from foco.data.benchmark import Lists, write_submission
from foco.data.cards import load_card
from foco.data.cirr import check_cirr_submission, load_cirr
from foco.data.metrics import Ranks, metric_values, query_values, rank_targets, score
from official import OFFICIAL

REAL = OFFICIAL/"cirr"
real = pytest.mark.skipif(not REAL.is_dir(), reason="the real annotation files are not here")


def read(path): return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def records(): return read(REAL/"captions"/"cap.rc2.val.json")


@pytest.fixture(scope="module")
def val(): return load_cirr(REAL, pictures=False)


@pytest.fixture(scope="module")
def soft(): return load_cirr(REAL, targets="soft", pictures=False)


@pytest.fixture(scope="module")
def test1(): return load_cirr(REAL, "test1", pictures=False)


@pytest.fixture(scope="module")
def features(val):
    torch.manual_seed(0)
    return [F.normalize(torch.randn(n, 128), dim=-1) for n in (len(val.queries), len(val.ids))]


# ---- the real files

@real
def test_counts(val, test1, records):
    counts = load_card("cirr").counts
    assert (len(val.queries), len(val.ids), len(test1.queries), len(test1.ids)) == (4181, 2297, 4148, 2315)
    assert (counts["queries"], counts["gallery"]) == ({"val": 4181, "test1": 4148}, {"val": 2297, "test1": 2315})
    for b, hidden in ((val, False), (test1, True)):
        assert b.data == "official" and b.hidden == hidden and b.exclude_reference and b.galleries is None and not b.macro
        for q in b.queries: assert len(set(q.subset)) == 6 and q.reference in q.subset
    for q, r in zip(val.queries, records):
        assert (q.id, val.ids[q.reference], q.weights) == (str(r["pairid"]), r["reference"], None)
        assert [val.ids[j] for j in q.targets] == [r["target_hard"]]
        assert q.targets[0] in q.subset and [val.ids[j] for j in q.subset] == r["img_set"]["members"]
    assert (val.metrics, val.averages) == (("R@1", "R@5", "R@10", "R@50", "R_subset@1", "R_subset@2", "R_subset@3"), {"Avg": ("R@5", "R_subset@1")})


@real
def test_blank_and_pasted_captions_stay_queries(val, test1):
    assert [q.id for q in test1.queries if not q.text] == ["27098"] and test1.protocol["blank_captions"] == 1
    assert [q.id for q in val.queries if "Inglês" in q.text] == ["14793"] and val.protocol["blank_captions"] == 0


@real
def test_hard_and_soft_differ_where_they_are_known_to(val, soft, records):
    weights = [w for r in records for w in r["target_soft"].values()]
    assert {w: weights.count(w) for w in set(weights)} == {1.: 4216, .5: 62, .2: 6, -1.: 807}
    assert sum(len(r["target_soft"]) > 1 for r in records) == 645
    without, below = [], []
    for h, s, r in zip(val.queries, soft.queries, records):
        worth = dict(zip(s.targets, s.weights))
        assert s.reference not in worth and h.reference == s.reference and all(w > 0 for w in s.weights)
        if r["target_hard"] not in r["target_soft"]:
            without.append(r)
            assert h.targets[0] not in worth and r["target_soft"][r["reference"]] == 1
        elif worth.get(h.targets[0], -1.) < 1: below.append(r["target_soft"][r["target_hard"]])
    assert len(without) == 37 and sorted(below) == [-1., -1., -1., .2, .5]
    assert [q.weights for q in soft.queries if not q.targets] == [(), (), ()]          # asked, and lost
    assert soft.metrics == tuple(f"R@{k}" for k in (1, 2, 5, 10, 50, 100)) + tuple(f"R_subset@{k}" for k in (1, 2, 3))
    assert soft.averages == val.averages
    assert soft.queries_sha256 != val.queries_sha256 and soft.gallery_sha256 == val.gallery_sha256


@real
def test_best_reachable_recall(val, soft, features):
    for b, best in ((val, 100.), (soft, 100 * 4177 / 4181)):
        first = [q.targets[int(np.argmax(q.weights or (1,)))] if q.targets else q.reference for q in b.queries]
        ranks = rank_targets(features[1][first], features[1], b)
        assert 100 * metric_values("R@1", ranks).mean() == pytest.approx(best)
        ones = [np.ones(len(q.targets)) for q in b.queries]
        everything = Ranks(ones, ones, [q.weights for q in b.queries])
        for m in b.metrics: assert 100 * metric_values(m, everything).mean() == pytest.approx(best)
    assert round(best, 4) == 99.9043


@real
def test_best_reachable_subset_recall_with_soft_targets(soft, features):
    "In 15 of the 37 queries without their hard target, the soft targets lie outside the group."
    worth = [{t: w for t, w in zip(q.targets, q.weights) if t in q.subset} for q in soft.queries]
    assert sum(not w for w in worth) == 18 and sum(max(w.values(), default=0) for w in worth) == 4162
    first = [max(w, key=w.get) if w else q.reference for q, w in zip(soft.queries, worth)]
    values = query_values(soft, rank_targets(features[1][first], features[1], soft))
    for k in (1, 2, 3): assert 99.5 < 100 * values[f"R_subset@{k}"].mean() <= 100 * 4162 / 4181 + 1e-9
    assert round(100 * values["R_subset@1"].mean(), 4) == 99.5456


@real
def test_soft_scoring_equals_the_authors_own(soft, records, features):
    "A literal double of their scoring on every tenth query: reference at the row minimum, best weight among the first K."
    h, v = features
    values = query_values(soft, rank_targets(h, v, soft))
    for i in range(0, len(records), 10):
        r, s = records[i], (v @ h[i]).clone()
        s[soft.queries[i].reference] = s.min()
        ranked = [soft.ids[j] for j in (-s).argsort(stable=True).tolist()]
        group = [n for n in ranked if n in r["img_set"]["members"]]
        for m in soft.metrics:
            k, names = int(m.split("@")[1]), group if "subset" in m else ranked
            assert values[m][i] == max([0., *(w for n, w in r["target_soft"].items() if n in names[:k])]), (m, r["pairid"])


@real
def test_random_and_constant_features(val, soft, features):
    s = score(val, rank_targets(*features, val))
    assert abs(s.metrics["R_subset@1"] - 20) < 2 and s.ci95["R_subset@1"][0] < 20 < s.ci95["R_subset@1"][1]     # 16.7 if the reference stayed
    assert s.metrics["Avg"] == pytest.approx((s.metrics["R@5"] + s.metrics["R_subset@1"]) / 2)
    kept = metric_values("R_subset@1", rank_targets(*features, replace(val, exclude_reference=False)))
    assert abs(100 * kept.mean() - 100 / 6) < 2
    h, v = torch.ones(len(val.queries), 8) / 8 ** .5, torch.ones(len(val.ids), 8) / 8 ** .5
    flat, flat_soft = (query_values(b, rank_targets(h, v, b)) for b in (val, soft))
    assert not any(x.any() for x in flat.values())
    right = np.array([len(set(q.subset) & set(q.targets)) for q in soft.queries])       # of five candidates
    assert (right > 2).sum() == 3 and right.max() == 3
    for m, x in flat_soft.items():
        if m == "R_subset@3": assert (x > 0).tolist() == (right == 3).tolist() and round(100 * x.mean(), 2) == .07
        else: assert not x.any()


@real
def test_a_reference_that_is_nearest_does_no_harm(val, features):
    h, v = features
    near = v[val.references] + .7 * v[[q.targets[0] for q in val.queries]]
    values = query_values(val, rank_targets(F.normalize(near, dim=-1), v, val))
    assert values["R@1"].mean() > .99 and values["R_subset@1"].mean() > .99
    assert query_values(val, rank_targets(F.normalize(near, dim=-1), v, replace(val, exclude_reference=False)))["R@1"].mean() < .01


def memory(key): # kB of this process, as the kernel counts them
    return int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(key + ":")).split()[1])


@real
def test_ranking_is_fast_and_small(val):
    features = [F.normalize(torch.randn(n, 512), dim=-1) for n in (len(val.queries), len(val.ids))]
    seconds = []                                                        # wall clock or time on the processor: another busy process is not our fault
    try: Path("/proc/self/clear_refs").write_text("5")                  # forget the highest use of memory so far
    except OSError: pytest.skip("the kernel does not let a process reset its peak of memory")
    before = memory("VmRSS")
    for _ in range(3):
        wall, busy = time.perf_counter(), time.process_time()
        rank_targets(*features, val)
        seconds += [time.perf_counter() - wall, time.process_time() - busy]
    assert min(seconds) < 1, seconds
    assert memory("VmHWM") - before < 200_000


@real
def test_hidden_labels_point_at_the_submission(test1):
    with pytest.raises(ValueError, match="labels are hidden.*submission"): rank_targets(torch.zeros(4148, 2), torch.zeros(2315, 2), test1)


@pytest.fixture(scope="module")
def demo(): return {m: read(REAL/"demo_files"/f"test1_pred_ranks_{m}.json") for m in ("recall", "recall_subset")}


@real
@pytest.mark.parametrize("metric", ["recall", "recall_subset"])
def test_the_official_demo_files_pass(metric, demo, test1):
    check_cirr_submission(demo[metric], test1)
    check_cirr_submission(dict(reversed(demo[metric].items())), test1)          # the order of keys does not matter


@real
@pytest.mark.parametrize("metric", ["recall", "recall_subset"])
def test_small_corruptions_of_the_demo_files_fail(metric, demo, test1):
    good, q = demo[metric], test1.queries[1000]
    names, reference = good[q.id], test1.ids[q.reference]
    outside = next(n for n in test1.ids if n not in names and n != reference and (metric == "recall" or test1.ids.index(n) not in q.subset))
    one_more = next(n for n in (test1.ids if metric == "recall" else [test1.ids[j] for j in q.subset]) if n not in names and n != reference)
    def with_(*listed): return {**good, q.id: list(listed)}
    def without(key): return {k: v for k, v in good.items() if k != key}
    cases = {"1 pairs are missing": without(q.id),
             "1 pairs are unknown, first '12060'": {**good, "12060": names},
             "version is 'rc1'": {**good, "version": "rc1"},
             "version is None": without("version"),
             "expected a JSON object with metric": {**good, "metric": "Recall"},
             f"{len(names) - 1} ids, expected": with_(*names[:-1]),
             f"{len(names) + 1} ids, expected": with_(*names, one_more),
             "stands twice": with_(*names[:-1], names[0]),
             "is the reference itself": with_(reference, *names[1:]),
             "is not in the": with_(*names[:-1], "dev-0-0-img0"),
             ".png' is not in the": with_(names[0] + ".png", *names[1:]),
             "found ": with_(*names[:-1], 7),
             "found 'x'": {**good, q.id: "x"},
             "expected a JSON object": [good]}
    if metric == "recall_subset": cases["not in the pair's img_set.members"] = with_(*names[:-1], outside)
    for words, bad in cases.items():
        with pytest.raises(ValueError) as error: check_cirr_submission(bad, test1)
        assert words in str(error.value), (words, str(error.value))


@real
def test_the_other_files_metric_does_not_pass(demo, test1):
    with pytest.raises(ValueError, match="50 ids, expected 3|members"): check_cirr_submission({**demo["recall"], "metric": "recall_subset"}, test1)
    with pytest.raises(ValueError, match="3 ids, expected 50"): check_cirr_submission({**demo["recall_subset"], "metric": "recall"}, test1)


@real
def test_writing_gives_the_demo_files_back(demo, test1, tmp_path):
    index = {n: i for i, n in enumerate(test1.ids)}
    lists = Lists(*([np.array([index[n] for n in demo[m][q.id]]) for q in test1.queries] for m in ("recall", "recall_subset")))
    files = write_submission(test1, lists, tmp_path)
    assert [f.name for f in files] == ["test1_pred_ranks_recall.json", "test1_pred_ranks_recall_subset.json"]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    for m, f in zip(("recall", "recall_subset"), files): assert read(f) == demo[m] and f.stat().st_size < 5_000_000
    assert files[0].stat().st_size == (REAL/"demo_files"/files[0].name).stat().st_size


# ---- generated ones

def small(root, split="val", groups=10, targets=True, pictures=(), prefix="cirr/", place="{0}/{1}.png"):
    folder = {"val": "dev", "test1": "test1"}[split]
    members = [[f"{folder}-{g}-{k}-img0" for k in range(6)] for g in range(groups)]
    told = lambda m: {"target_hard": m[1], "target_soft": {m[1]: 1., m[2]: .5, m[3]: -1.}} if targets else {}
    records = [{"pairid": 7 * g, "reference": m[0], **told(m), "caption": f"wish {g}", "img_set": {"id": g, "members": m, "reference_rank": 0}}
               for g, m in enumerate(members)]
    places = {n: "./" + place.format(folder, n) for m in members for n in m}
    for path, content in ((f"captions/cap.rc2.{split}.json", records), (f"image_splits/split.rc2.{split}.json", places)):
        (root/prefix/path).parent.mkdir(parents=True, exist_ok=True)
        (root/prefix/path).write_text(json.dumps(content), encoding="utf-8")
    for g in range(groups) if pictures else ():
        for k in pictures:
            file = root/place.format(folder, members[g][k])
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (20 * g, 20 * k, 9)).save(file)
    return root


@pytest.mark.parametrize("prefix", ["cirr/", "", "."])
@pytest.mark.parametrize("place", ["{0}/{1}.png", "train/34/{1}.png"])
def test_trees(tmp_path, prefix, place):
    b = load_cirr(small(tmp_path, prefix=prefix, place=place, pictures=range(6)))
    assert len(b.ids) == 60 and b.images[7].getpixel((0, 0)) == (20, 20, 9) and b.missing == {} and b.data == "unofficial"


def test_pictures_found_by_name(tmp_path):
    small(tmp_path, prefix="", pictures=range(6))
    (tmp_path/"dev").rename(tmp_path/"img_raw")
    assert load_cirr(tmp_path).images[8].getpixel((0, 0)) == (20, 40, 9)
    Image.new("RGB", (8, 8)).save(tmp_path/"dev-0-0-img0.jpg")
    with pytest.raises(ValueError, match="two different files for picture 'dev-0-0-img0'"): load_cirr(tmp_path)


def test_the_wrong_root_is_explained(tmp_path):
    small(tmp_path/"CIRR", pictures=range(6))
    too_high = r"(?s)no cirr/captions/cap.rc2.val.json below .*Found there: CIRR/.*image_splits.*Fix: pass .*CIRR instead"
    too_low = "60 of 60 pictures are missing.*they lie beside it, so pass .*CIRR"
    with pytest.raises(FileNotFoundError, match=too_high): load_cirr(tmp_path)
    with pytest.raises(FileNotFoundError, match=too_low): load_cirr(tmp_path/"CIRR"/"cirr")
    with pytest.raises(FileNotFoundError, match="no such folder"): load_cirr(tmp_path/"cirr")


BREAK = {"missing": Path.unlink,
         "0 bytes": lambda p: p.write_bytes(b""),
         "HTML": lambda p: p.write_text("<html>404</html>", encoding="utf-8"),
         "truncated": lambda p: p.write_bytes(p.read_bytes()[:50])}

@pytest.mark.parametrize("break_", BREAK.values(), ids=BREAK)
@pytest.mark.parametrize("k, hard, soft_", [(0, 9, 9), (1, 9, 10), (5, 10, 10)], ids=["reference", "target", "look-alike"])
def test_allow_missing(tmp_path, break_, k, hard, soft_):
    small(tmp_path, pictures=range(6))
    break_(tmp_path/"dev"/f"dev-3-{k}-img0.png")
    for targets, queries in (("hard", hard), ("soft", soft_)):
        b = load_cirr(tmp_path, targets=targets, allow_missing=True)
        assert {k: b.missing[k] for k in ("queries", "gallery")} == {"queries": [queries, 10], "gallery": [59, 60]} and b.data == "unofficial"
        left = [q for q in b.queries if q.id == "21"]
        assert [len(q.subset) for q in left] == [5] * (queries == 10)
    if targets == "soft" and k == 1: assert left[0].weights == (.5,)


def test_without_a_soft_target_that_counts_a_query_is_asked_and_lost(tmp_path):
    file = small(tmp_path, pictures=range(6))/"cirr/captions/cap.rc2.val.json"
    told = read(file)
    for g, weights in ((4, {"dev-4-1-img0": -1.}), (6, {"dev-6-0-img0": 1.})):          # nothing positive; the reference alone
        told[g]["target_soft"] = weights
    file.write_text(json.dumps(told), encoding="utf-8")
    (tmp_path/"dev"/"dev-4-1-img0.png").unlink()
    for b in (load_cirr(tmp_path, targets="soft", pictures=False), load_cirr(tmp_path, targets="soft", allow_missing=True)):
        assert [(i, q.weights) for i, q in enumerate(b.queries) if q.targets == ()] == [(4, ()), (6, ())] and not b.hidden
        ranks = rank_targets(torch.eye(60)[:10], torch.eye(60)[:len(b.ids)], b)
        assert all(ranks.gallery[i].shape == ranks.subset[i].shape == (0,) for i in (4, 6))
        assert not any(x[[4, 6]].any() for x in query_values(b, ranks).values())


def test_an_incomplete_benchmark_makes_no_submission(tmp_path):
    small(tmp_path, "test1", targets=False, pictures=range(6))
    (tmp_path/"test1"/"test1-3-0-img0.png").unlink()
    b = load_cirr(tmp_path, "test1", allow_missing=True)
    with pytest.raises(ValueError, match="9 of 10 queries and "): check_cirr_submission({"version": "rc2", "metric": "recall"}, b)


def test_too_large_a_file(tmp_path):
    b = load_cirr(small(tmp_path, "test1", targets=False), "test1", pictures=False)
    names = [n + "x" * 10_000 for n in b.ids]
    good = {"version": "rc2", "metric": "recall", **{q.id: [names[j] for j in range(60) if j != q.reference][:50] for q in b.queries}}
    with pytest.raises(ValueError, match="bytes, expected at most 5,000,000"): check_cirr_submission(good, replace(b, ids=names))


def test_nothing_is_written_when_the_second_file_is_refused(tmp_path):
    b = load_cirr(small(tmp_path, "test1", targets=False), "test1", pictures=False)
    top = [np.array([j for j in range(60) if j != q.reference]) for q in b.queries]
    subset = [np.array(q.subset[1:]) for q in b.queries]
    twice = subset[:-1] + [subset[-1][[0, 0, 1]]]
    with pytest.raises(ValueError, match="recall_subset.*stands twice"): write_submission(b, Lists(top, twice), tmp_path/"out")
    assert not list((tmp_path/"out").iterdir())
    assert len(write_submission(b, Lists(top, subset), tmp_path/"out")) == 2


def test_a_test_split_that_tells_its_targets(tmp_path):
    b = load_cirr(small(tmp_path, "test1"), "test1", pictures=False)
    assert not b.hidden and b.submission is not None
    found = torch.eye(60)[[q.targets[0] for q in b.queries]]
    assert query_values(b, rank_targets(found, torch.eye(60), b))["R@1"].all()


def test_some_targets_only(tmp_path):
    file = small(tmp_path)/"cirr/captions/cap.rc2.val.json"
    told = read(file)
    del told[4]["target_hard"], told[4]["target_soft"]
    file.write_text(json.dumps(told), encoding="utf-8")
    with pytest.raises(ValueError, match="cap.rc2.val.json: 9 of 10 records have targets; expected all of them, or none"):
        load_cirr(tmp_path, pictures=False)


short = st.text(max_size=3)
junk = st.one_of(st.none(), st.booleans(), st.integers(), short, st.lists(short, max_size=2), st.dictionaries(short, st.integers(), max_size=2))

@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["pairid", "reference", "caption", "img_set", "target_hard", "target_soft", None]), junk, st.sampled_from(["hard", "soft"]))
def test_a_damaged_record_is_a_clear_error_or_no_damage(tmp_path_factory, key, value, targets):
    root = small(tmp_path_factory.mktemp("junk"), groups=2)
    file = root/"cirr/captions/cap.rc2.val.json"
    told = read(file)
    told[1] = value if key is None else {**told[1], key: value}
    file.write_text(json.dumps(told), encoding="utf-8")
    try: load_cirr(root, targets=targets, pictures=False)
    except ValueError as error: assert "cap.rc2.val.json" in str(error) and ("record 1" in str(error) or "records have targets" in str(error))
    else: assert key in ("pairid", "caption") or key == "target_soft" and targets == "hard"
