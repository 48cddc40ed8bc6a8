"Maps against the real preprocessing, tables against brute force, figures against their tables."
import ast
import io
import warnings
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_pdf import PdfPages
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image

from foco import visualize
from foco.backbones import load_backbone
from foco.complete import FoCo
from foco.data.benchmark import Benchmark, Query
from foco.visualize import (FONT, GREY, HEAT, PALETTE, SHADE, Gaze, PaperFigure, attention_map, attention_table, background_gaze, background_table,
                            by_kind_table, first_hit, history_table, look, luminance, nine_cells, one_of_each_kind, plot_by_kind, plot_history,
                            plot_scores, plot_similarities, queries_table, query_table, save_figure, scores_table, seen_box, show_attention,
                            show_background, show_queries, show_query, similarities_table, top_results)

SIZES = [(64, 64), (96, 64), (64, 96), (301, 200), (200, 333), (65, 64), (500, 150)]


def softmax(shape, seed=0, sharp=3.):
    x = np.exp(sharp * np.random.default_rng(seed).normal(size=shape))
    return x / x.sum(-1, keepdims=True)


def some_gaze(size=(301, 200), T=2, heads=3, grid=(4, 4), resize="shortest", masks=None, seed=0):
    picture = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    return Gaze(picture, [f"text {t}" for t in range(T)], softmax((T, heads, grid[0] * grid[1]), seed), grid, resize, masks)


@pytest.fixture(scope="module")
def benchmark():
    pictures = [Image.new("RGB", (64, 64), tuple(int(v) for v in c)) for c in np.random.default_rng(1).integers(0, 256, (12, 3))]
    queries = [Query(0, "make it red", (3, 5), ("colour",)), Query(1, "add a star", (7,), ("add",)), Query(2, "make it blue", (1,), ("colour",))]
    return Benchmark("toy", "val", pictures, [f"p{n:02d}" for n in range(12)], queries)


@pytest.fixture(scope="module")
def similarities(): return np.random.default_rng(2).normal(size=(3, 12)).round(1)


# ---- what the model saw

@pytest.mark.parametrize("resize", ["shortest", "longest", "squash"])
@pytest.mark.parametrize("size", SIZES)
def test_seen_box_is_what_preprocessing_keeps(size, resize):
    "A picture whose colours are its coordinates goes through the real preprocessing: patch centres must come from where the box says."
    w, h = size
    x, y = np.meshgrid((np.arange(w) + .5) / w * 255, (np.arange(h) + .5) / h * 255)
    picture = Image.fromarray(np.stack([x, y, np.full_like(x, 128)], -1).round().astype(np.uint8))
    pixels = image_transform_v2(PreprocessCfg(size=(64, 64), mean=(0, 0, 0), std=(1, 1, 1), resize_mode=resize), is_train=False)(picture)
    patches = torch.nn.functional.avg_pool2d(pixels[None], 8)[0].numpy()                    # (3, 8, 8)
    left, top, right, bottom = seen_box(size, (8, 8), resize)
    inside = np.isclose(patches[2], 128 / 255, atol=.01)                                    # no padding in it
    assert inside.any()
    at = (np.arange(8) + .5) / 8
    expected = np.stack(np.meshgrid((left + at * (right - left)) / w, (top + at * (bottom - top)) / h))
    pixel = max(right - left, bottom - top) / 64                                            # of the model's input, in pixels of the picture
    assert np.abs(patches[:2] - expected)[0][inside].max() < 1.1 * pixel / w + .012
    assert np.abs(patches[:2] - expected)[1][inside].max() < 1.1 * pixel / h + .012


@given(st.integers(2, 90), st.integers(2, 90), st.sampled_from([(1, 1), (2, 2), (7, 7), (4, 6)]), st.sampled_from(["shortest", "longest", "squash"]), st.booleans())
@settings(max_examples=80, deadline=None)
def test_maps_keep_the_range_and_mark_the_unseen(w, h, grid, resize, smooth):
    a = softmax(grid[0] * grid[1])
    m, (left, top, right, bottom) = attention_map(a, grid, (w, h), resize, smooth), seen_box((w, h), grid, resize)
    assert m.shape == (h, w)
    x, y = np.arange(w) + .5, np.arange(h) + .5
    seen = ((x > left) & (x < right))[None] & ((y > top) & (y < bottom))[:, None]
    assert (np.isnan(m) == ~seen).all()
    if seen.any(): assert a.min() * a.size - 1e-9 <= np.nanmin(m) and np.nanmax(m) <= a.max() * a.size + 1e-9
    uniform = attention_map(np.full(a.size, 1 / a.size), grid, (w, h), resize, smooth)
    assert np.allclose(uniform[seen], 1)


def test_whole_patches_keep_their_attention():
    a = softmax((5, 64))
    m = attention_map(a, (8, 8), (128, 192))
    assert np.isnan(m[:32]).all() and np.isnan(m[-32:]).all()
    assert np.allclose(m[32:160].reshape(8, 16, 8, 16).mean((1, 3)).ravel(), a.mean(0) * 64)
    assert np.isclose(m[32:160].mean(), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_attention_may_be_any_tensor(dtype):
    a = torch.tensor(softmax((2, 16))).to(dtype).requires_grad_()
    assert np.allclose(attention_map(a, (4, 4), (8, 8)), attention_map(a.detach().double().numpy(), (4, 4), (8, 8)))


@pytest.mark.parametrize("call,message", [
    (lambda: attention_map(softmax(16), (4, 5), (8, 8)), "16 patches does not fit a grid of 4 x 5"),
    (lambda: attention_map(np.ones(16), (4, 4), (8, 8)), "sum to .16.0., expected 1"),
    (lambda: attention_map(np.full(16, np.nan), (4, 4), (8, 8)), "expected 1"),
    (lambda: seen_box((8, 8), (4, 4), "crop"), "resize='crop'"),
    (lambda: Gaze(Image.new("RGB", (8, 8)), ["a"], softmax((2, 1, 4)), (2, 2)), "expected .texts, heads, patches."),
    (lambda: Gaze(Image.new("RGB", (8, 8)), ["a"], softmax((1, 4)), (2, 2)), "expected .texts, heads, patches."),
    (lambda: some_gaze(masks=[None]), "1 masks for 2 texts"),
    (lambda: some_gaze(masks=[None, np.ones((200, 200))]), "does not fit a picture of 200 x 301"),
    (lambda: background_gaze(some_gaze(grid=(1, 1))), "one patch has no background"),
])
def test_bad_attention(call, message):
    with pytest.raises(ValueError, match=message): call()


def test_gaze_turns_a_photo_upright():
    photo = Image.fromarray(np.zeros((20, 40, 4), np.uint8))                                # transparent, taken on its side
    photo.getexif()[0x0112] = 6
    g = Gaze(photo, ["a"], softmax((1, 2, 4)), (2, 2))
    assert g.picture.size == (20, 40) and g.picture.mode == "RGB" and g.map(0).shape == (40, 20)
    assert np.asarray(g.picture).min() == 255


def test_look_is_the_aggregator(benchmark):
    backbone = load_backbone("tiny-clip", device="cpu")
    torch.manual_seed(0)
    foco, texts = FoCo(backbone.D, expand=1), ["a red car", "the moon", "add a star"]
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (70, 100, 4), dtype=np.uint8))
    g = look(foco, backbone, picture, texts)
    images, c = foco.prepare_images(backbone.encode_pictures([picture])), foco.prepare_texts(backbone.encode_texts(texts))
    expected = foco.aggregator(c[None], images, need_attention=True).attention[0]
    for t in range(3):
        assert np.allclose(g.attention[t], expected[:, t].detach(), atol=1e-6)
        assert np.allclose(look(foco, backbone, picture, texts[t:t + 1]).attention[0], g.attention[t], atol=1e-5)
    assert g.grid == backbone.grid and g.resize == "shortest" and np.isnan(g.map(0)).any()
    assert show_attention(g)._repr_png_()
    with pytest.raises(ValueError, match="text 1 of 2 is empty"): look(foco, backbone, picture, ["a", " "])


# ---- tables of attention

def test_attention_table_against_brute_force():
    g = some_gaze((61, 47), masks=[np.tri(47, 61) > 0, None])
    table, total = attention_table(g), 0.
    m, mask = g.map(0), np.tri(47, 61) > 0
    inside, everything, n_inside, n = 0., 0., 0, 0
    for y in range(47):
        for x in range(61):
            if np.isnan(m[y, x]): continue
            everything += m[y, x]; n += 1
            if mask[y, x]: inside += m[y, x]; n_inside += 1
    assert np.isclose(table["attention %"][0], 100 * inside / everything) and np.isclose(table["area %"][0], 100 * n_inside / n)
    assert list(table["region"][:2]) == ["inside the outline", "outside"] and len(table) == 2 + 9   # a text without a mask gets nine cells
    assert np.allclose(table.groupby("text")[["attention %", "area %"]].sum(), 100)


def test_heads_average_to_the_mean():
    table = attention_table(some_gaze(), heads=True)
    assert list(dict.fromkeys(table["head"])) == ["mean", 1, 2, 3]
    shares = table.pivot(index=["text", "region"], columns="head", values="attention %")
    assert np.allclose(shares[[1, 2, 3]].mean(axis=1), shares["mean"], atol=.5)             # exact where pixels cut patches evenly
    even = attention_table(some_gaze((64, 64)), heads=True).pivot(index=["text", "region"], columns="head", values="attention %")
    assert np.allclose(even[[1, 2, 3]].mean(axis=1), even["mean"])


@pytest.mark.parametrize("resize", ["shortest", "longest", "squash"])
@pytest.mark.parametrize("size", SIZES)
def test_nine_cells_cut_the_seen_part(size, resize):
    g = some_gaze(size, resize=resize)
    count, seen = sum(c.astype(int) for c in nine_cells(g).values()), ~np.isnan(g.map(0))
    assert (count[seen] == 1).all()
    named = attention_table(g)
    assert len(named) == 18 and np.allclose(named.groupby("text")["attention %"].sum(), 100)


def test_a_region_that_was_cut_off():
    left = np.zeros((200, 301), bool); left[:, :20] = True
    row = attention_table(some_gaze(), {"left": left}).iloc[0]
    assert row["attention %"] == row["area %"] == 0 and np.isnan(row["times uniform"])


def values_drawn(ax, ramp, top, bottom=0.):
    "Read a map back from a panel of a white picture: there the colour is the ramp's."
    colours, drawn = ramp(np.linspace(0, 1, 256))[:, :3], np.asarray(ax.images[0].get_array())
    return bottom + (top - bottom) * np.abs(drawn.reshape(-1, 1, 3) - colours).sum(-1).argmin(1).reshape(drawn.shape[:2]) / 255


def test_what_is_drawn_is_what_the_tables_say():
    "Attention is read back from the pixels of each panel, summed by region, and compared with the text twin."
    g = replace(some_gaze((64, 48), T=2, heads=2, resize="squash"), picture=Image.new("RGB", (64, 48), "white"))
    regions = {"left": np.arange(64)[None].repeat(48, 0) < 32, "top": np.arange(48)[:, None].repeat(64, 1) < 12}
    def agrees(ax, table, ramp, norm):
        drawn = values_drawn(ax, ramp, norm.vmax, norm.vmin); assert len(table) == 2
        for r in table.itertuples(): assert abs(100 * drawn[regions[r.region]].sum() / drawn.sum() - r._asdict()["share"]) < 1., (r, ax.get_title("center"))
    share = lambda table: table.rename(columns={"attention %": "share"})
    table, bar = share(attention_table(g, regions, heads=True)), lambda fig, n=-1: matplotlib.colors.Normalize(*fig.axes[n].get_ylim())
    fig = show_attention(g, smooth=False)
    for t, ax in enumerate(fig.axes[1:3]): agrees(ax, table[(table["text"] == g.texts[t]) & (table["head"] == "mean")], HEAT, bar(fig))
    fig = show_attention(g, heads=True, smooth=False)
    for n, ax in enumerate(fig.axes[:6]): agrees(ax, table[(table["text"] == g.texts[n // 3]) & (table["head"] == ("mean", 1, 2)[n % 3])], HEAT, bar(fig))
    fig, table = show_background(g, 1, smooth=False), share(background_table(g, regions)).query("text == 'text 1'")
    agrees(fig.axes[1], table[table["weights"] == "attention"], HEAT, bar(fig, 4))
    for ax, ramp, n in ((fig.axes[2], HEAT, 4), (fig.axes[3], SHADE, 5)): agrees(ax, table[table["weights"] == "background"], ramp, bar(fig, n))


def test_background_weights_are_the_papers():
    g = some_gaze()
    a = g.attention.mean(1)
    assert np.allclose(background_gaze(g).attention[:, 0], (1 - a) / (1 - a).sum(-1, keepdims=True))
    table = background_table(g)
    assert list(dict.fromkeys(table["weights"])) == ["attention", "background"] and np.allclose(table.groupby(["weights", "text"])["attention %"].sum(), 100)


# ---- rankings

def literal_ranking(benchmark, row, i):
    "Pictures by falling similarity, the earlier one first if equal, without the reference."
    left = [j for j in range(len(row)) if not (benchmark.exclude_reference and j == benchmark.queries[i].reference)]
    found = []
    while left:
        best = left[0]
        for j in left:
            if row[j] > row[best]: best = j
        found.append(best); left.remove(best)
    return found


@given(st.lists(st.integers(-3, 3), min_size=12, max_size=12), st.integers(0, 2), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_ranking_against_a_literal_one(row, i, k):
    queries = [Query(0, "a", (3, 5)), Query(1, "b", (7,)), Query(2, "c", (1,))]
    b = Benchmark("toy", "val", [None] * 12, [f"p{n}" for n in range(12)], queries)
    expected = literal_ranking(b, row, i)
    index, score = top_results(b, np.array(row, float), i, k)
    assert index.tolist() == expected[:k] and score.tolist() == [row[j] for j in expected[:k]]
    again, _ = top_results(b, np.array(expected), i, k)
    assert again.tolist() == expected[:k]
    assert first_hit(b, np.array(row, float), i) == 1 + min(expected.index(t) for t in queries[i].targets)


def test_the_same_ranking_in_every_form(benchmark, similarities):
    expected = query_table(benchmark, similarities, 1)
    order = np.argsort(-similarities, axis=1, kind="stable")
    scores = np.take_along_axis(similarities, order, 1)
    with torch.inference_mode(): inferred = torch.tensor(similarities) * 1
    for table in (query_table(benchmark, torch.tensor(similarities), 1), query_table(benchmark, inferred, 1), query_table(benchmark, similarities[1], 1),
                  query_table(benchmark, similarities.tolist(), 1), query_table(benchmark, order, 1, scores=scores),
                  query_table(benchmark, torch.tensor(order), 1, scores=torch.tensor(scores)), query_table(benchmark, order[1].tolist(), 1, scores=scores[1])):
        pd.testing.assert_frame_equal(table, expected)
    rough = query_table(benchmark, torch.tensor(similarities).bfloat16(), 1)
    assert rough["score"].between(-9, 9).all()
    assert "p01" not in expected["id"].tolist() and len(query_table(benchmark, similarities, 1, k=99)) == 11


@pytest.mark.parametrize("ranking,i,message", [
    (np.zeros((3, 11)), 0, "11 similarities for a gallery of 12"), (np.zeros((2, 12)), 0, "2 rows for 3 queries"), (np.full(12, np.nan), 0, "12 similarities are nan"),
    (np.array([12]), 0, "outside the gallery of 12"), (np.array([-1]), 0, "outside the gallery of 12"), (np.zeros((3, 12)), 3, "query 3 of 3"),
])
def test_bad_rankings(benchmark, ranking, i, message):
    with pytest.raises(ValueError, match=message): query_table(benchmark, ranking, i)


def test_panels_say_what_the_table_says(benchmark, similarities):
    fig, table = show_queries(benchmark, similarities, k=4), queries_table(benchmark, similarities, k=4)
    assert one_of_each_kind(benchmark) == [0, 1] and set(table["query"]) == {0, 1} and one_of_each_kind(benchmark, 1) == [2, 1]
    panels = [ax for ax in fig.axes if ax.get_title("center")[:1].isdigit()]
    assert [p.get_title("center") for p in panels] == [f"{r.rank} {'✓' if r.right else '✗'} {r.score:.2f}" for r in table.itertuples()]
    for panel, right in zip(panels, table["right"]):                                        # a frame, too: its width as well as its colour
        edge = panel.spines["left"]
        assert (edge.get_linewidth() > 3) == right and edge.get_edgecolor() == matplotlib.colors.to_rgba(PALETTE["blue"] if right else GREY)
    said = " ".join(t.get_text() for ax in fig.axes for t in ax.texts)
    assert "make it red" in said and f"first at rank {first_hit(benchmark, similarities, 0)}" in said


def test_panels_with_few_results_and_other_pictures(benchmark):
    fig = show_query(benchmark, np.array([4, 6]), 0, k=5, pictures=[p.resize((200, 120)) for p in benchmark.images])
    assert [ax.get_title("center") for ax in fig.axes] == ["reference", "", "1 ✗", "2 ✗", "", "", ""]
    assert "none among 2" in fig.axes[1].texts[-1].get_text() and fig.axes[2].images[0].get_array().shape == (120, 200, 3)


# ---- charts

def scores(methods=("image", "text", "FoCo"), metrics=("R@1", "R@10")):
    return pd.DataFrame([{"method": m, "metric": r, "value": 10. * n + 5, "low": 10. * n, "high": 10. * n + 8} for n, m in enumerate(methods) for r in metrics])


def cosines(): return pd.DataFrame([{"method": m, "to": t, "cosine": c} for m in "ab" for t in ("reference", "text", "target") for c in (.1, .2, .9)])


def kinds(): return pd.DataFrame([{"method": m, "kind": k, "metric": "R@1", "value": 10. * n + j} for n, m in enumerate("ba") for j, k in enumerate(("colour", "add"))])


def history(steps=30, second=10):
    log = [{"step": s, "stage": 1, "loss": 9. - s / 10, "aggregation positive": s / 40, "aggregation negative": .1} for s in range(steps)]
    return log + [{"step": s, "stage": 2, "loss": 5., "completion positive": .5, "completion negative": -.2} for s in range(second)]


def test_scores_are_drawn_where_the_table_says():
    fig = plot_scores(scores())
    for ax, metric in zip(fig.axes, ("R@1", "R@10")):
        dots = [(line.get_xdata()[0], line.get_ydata()[0], line.get_marker()) for line in ax.lines if line.get_marker() not in ("None", None)]
        assert dots == [(5, 0, "o"), (15, 1, "o"), (25, 2, "D")] and ax.get_title("left") == metric     # FoCo by shape, not only by colour
    assert [t.get_text() for t in fig.axes[0].get_yticklabels()] == ["image", "text", "FoCo"]
    assert scores_table(scores()).loc["FoCo", "R@1"] == "25.0 [20.0, 28.0]"
    part = scores_table(scores()[1:])
    assert part.loc["image", "R@1"] == "" and list(part.index) == ["image", "text", "FoCo"]
    with pytest.raises(ValueError, match="no column low, high"): plot_scores(scores().drop(columns=["low", "high"]))
    with pytest.raises(ValueError, match="nothing to draw"): plot_scores(scores()[:0])


def test_kinds_keep_their_order_and_their_gaps():
    assert by_kind_table(kinds()).to_numpy().tolist() == [[0, 1], [10, 11]] and list(by_kind_table(kinds()).index) == ["b", "a"]
    assert [t.get_text() for t in plot_by_kind(kinds()).axes[0].texts] == ["0", "1", "10", "11"]
    assert [t.get_text() for t in plot_by_kind(kinds()[:-1]).axes[0].texts] == ["0", "1", "10", "–"]
    plot_by_kind(kinds().assign(value=0.))                                                  # nothing found at all


def test_similarities_show_every_query_and_the_median():
    fig, table = plot_similarities(cosines()), similarities_table(cosines())
    assert len(table) == 6 and (table["median"] == .2).all() and (table["queries"] == 3).all()
    for ax in fig.axes:
        assert sum(len(line.get_xdata()) for line in ax.lines if line.get_marker() == ".") == 6
        assert [t.get_text() for t in ax.texts] == ["0.20", "0.20"]


def test_history_counts_on_and_survives_gaps():
    fig = plot_history(history())
    left, right = fig.axes
    assert left.lines[-1].get_xdata()[-1] == 39 or max(line.get_xdata()[-1] for line in left.lines) == 39
    labels = [t.get_text() for t in right.get_legend().get_texts()]
    assert labels == ["aggregation positive", "aggregation negative", "completion positive", "completion negative"]
    styles = {line.get_label(): line.get_linestyle() for line in right.lines}
    assert styles["aggregation positive"] == "-" and styles["aggregation negative"] == "--"
    table = history_table(history())
    assert table.loc[(2, "completion negative"), "end"] == -.2 and (1, "completion negative") not in table.index
    for log in ([], [{"loss": 1.}], [{"step": 3, "stage": 2, "completion positive": .1}], [{"step": 0, "stage": 1, "loss": 2., "unknown": "x"}]):
        assert len(plot_history(log).axes) == 2
        history_table(log)


def test_a_live_chart_reuses_its_figure():
    fig = plot_history([])
    for n in range(1, 40, 6): assert plot_history(history()[:n], fig) is fig
    assert len(fig.axes) == 2
    plain = matplotlib.figure.Figure()
    assert plot_history(history(), plain) is plain and len(plain.axes) == 2


def test_many_stages_entries_and_methods():
    log = [{"step": s, "stage": 1, "loss": 1.} for s in range(9, 3000, 10)]
    assert len(plot_history(log).axes[0].lines) == 2                                        # long logs: raw values and their mean
    assert len(plot_scores(scores([f"method {n}" for n in range(25)])).axes) == 2


# ---- all figures

@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    "One PDF for all figures: cutting fonts down to the letters that are used costs more than drawing, and is done when it is closed."
    path = tmp_path_factory.mktemp("pages")/"all.pdf"
    with matplotlib.rc_context({"pdf.fonttype": 42}):
        yield (pdf := PdfPages(path))
        with warnings.catch_warnings(): warnings.simplefilter("error"); pdf.close()
    assert path.read_bytes()[:4] == b"%PDF" and path.stat().st_size > 5000


FIGURES = {
    "attention": lambda b, s: show_attention(some_gaze()), "heads": lambda b, s: show_attention(some_gaze(T=2, heads=2), heads=True),
    "outlined": lambda b, s: show_attention(some_gaze(masks=[np.tri(200, 301), None]), smooth=False, top=2),
    "narrow": lambda b, s: show_attention(some_gaze((40, 300))), "many": lambda b, s: show_attention(some_gaze(T=5)),
    "background": lambda b, s: show_background(some_gaze(), 1), "padded": lambda b, s: show_attention(some_gaze(resize="longest")),
    "query": lambda b, s: show_query(b, s, 0), "queries": lambda b, s: show_queries(b, s, k=2), "history": lambda b, s: plot_history(history()),
    "scores": lambda b, s: plot_scores(scores()), "kinds": lambda b, s: plot_by_kind(kinds()), "similarities": lambda b, s: plot_similarities(cosines()),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure(name, benchmark, similarities, pages):
    "One font size, no change of matplotlib's settings, no warning, and it can be drawn as pixels and as a page."
    before = dict(matplotlib.rcParams)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fig = FIGURES[name](benchmark, similarities)
        fig.savefig(png := io.BytesIO(), dpi=50); n = pages.get_pagecount(); pages.savefig(fig)
    assert dict(matplotlib.rcParams) == before and isinstance(fig, PaperFigure) and png.getvalue()[1:4] == b"PNG" and pages.get_pagecount() == n + 1
    sizes = {t.get_fontsize() for t in fig.findobj(matplotlib.text.Text) if t.get_visible() and t.get_text()}
    assert sizes == {FONT}
    width, height = fig.get_size_inches()
    assert width <= 11.5 and height < 12


def test_files_are_reproducible(tmp_path):
    one, two = (save_figure(plot_scores(scores()), tmp_path/"new", n, dpi=50) for n in ("a", "b"))
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in two]
    assert [p.name for p in one] == ["a.pdf", "a.png"] and all(p.stat().st_size > 500 for p in one)
    for bad in ("a/b", "a.png", "../a"):
        with pytest.raises(ValueError, match="expected a bare name"): save_figure(None, tmp_path, bad)


def test_more_is_darker_in_print():
    for ramp in (HEAT, SHADE):
        grey = luminance(ramp(np.linspace(0, 1, 100)))
        assert (np.diff(grey) < 0).all() and grey[0] > .99 and grey[-1] < .4


def test_pyplot_and_seaborn_stay_out():
    "Importing the module must not touch the global state of a reader's pyplot, nor cost seaborn's import."
    tree = ast.parse(Path(visualize.__file__).read_text(encoding="utf-8"))
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names} | {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert "matplotlib" in names and not [n for n in names if "pyplot" in n or "seaborn" in n]
