"""Every baseline through one harness: training that can be repeated and resumed, every benchmark format, chance."""
import json
from dataclasses import replace

import numpy as np, pytest, torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from foco.backbones import FeatureStats, ImageFeatures, load_backbone
from foco.baselines import ALL, BASELINES, _Again, GRIDS, baseline, baseline_config, load_baseline, main, open_training, read_name, train_baseline
from foco.data.benchmark import reference_rows
from foco.data.shards import epoch_order
from foco.evaluate import evaluate, open_benchmark
from foco.methods.method import Captioned, batch_rows
from foco.toyworld.source import training_pairs
from foco.training.features import LivePictures

TINY = dict(n_images=48, batch_size=12, seen=72)        # 6 steps


@pytest.fixture(scope="module")
def encoder(): return load_backbone("tiny-clip", device="cpu")


@pytest.fixture(scope="module")
def small(encoder): return open_training(baseline_config("pic2word", **TINY), encoder)


def config(name, **more):
    few = {"searle": {"settings": {"n_inverted": 24, "steps": 3}}} if name == "searle" else {}
    return baseline_config(name, **{**TINY, **few.get(name, {}), **more})


def weights(folder): return (folder / "trained" / "foco.safetensors").read_bytes()


@pytest.mark.parametrize("name", BASELINES)
def test_same_seed_same_file_and_a_stopped_run_goes_on_to_it(name, encoder, small, tmp_path):
    train_baseline(config(name), encoder, small, tmp_path / "a", save_every=2)

    class Stop(Exception): pass

    def stop(history, done):
        if done > .6: raise Stop

    with pytest.raises(Stop): train_baseline(config(name), encoder, small, tmp_path / "b", save_every=2, log_every=1, on_log=stop)
    method, history = train_baseline(config(name), encoder, small, tmp_path / "b", save_every=2)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    train_baseline(config(name, seed=1), encoder, small, tmp_path / "c")
    assert weights(tmp_path / "a") != weights(tmp_path / "c")
    again = load_baseline(tmp_path / "a" / "trained", encoder)
    assert all(torch.equal(x, y) for x, y in zip(again.state_dict().values(), method.state_dict().values()))
    card = json.loads((tmp_path / "a" / "trained" / "foco.json").read_text(encoding="utf-8"))
    assert card["method"] == name and card["seconds"] > 0 and card["parameters"] > 0 and card["images"] == 48


def test_another_backbone_or_data_is_refused(encoder, small, tmp_path):
    train_baseline(config("pic2word"), encoder, small, tmp_path)
    other = load_backbone("tiny-clip", "random", device="cpu")
    with pytest.raises(ValueError, match="another backbone"): load_baseline(tmp_path / "trained", other)
    with pytest.raises(ValueError, match="another pairs_sha256"): train_baseline(config("pic2word"), encoder, open_training(config("pic2word", seed=1), encoder), tmp_path)


def test_changed_weights_are_refused(encoder, small, tmp_path):
    train_baseline(config("pic2word"), encoder, small, tmp_path)
    save_file({k: v + 1 for k, v in load_file(tmp_path / "trained" / "foco.safetensors").items()}, tmp_path / "trained" / "foco.safetensors")
    with pytest.raises(ValueError, match="is not the file that foco.json describes"): load_baseline(tmp_path / "trained", encoder)


class Shards(list): # ten pictures in five shards
    sizes = (2,) * 5


def test_pictures_in_shards_are_read_shard_by_shard(monkeypatch):
    monkeypatch.setattr("foco.training.features.epoch_order", lambda sizes, seed, epoch: epoch_order(sizes, seed, epoch, group=1))
    first, second = (batch_rows(10, 4, s, 3, Shards(range(10))).tolist() for s in range(2))
    assert [i // 2 for i in first + second] == [i // 2 for i in np.repeat((first + second)[::2], 2)]    # both of a shard, then both of the next
    twice = _Again(LivePictures(load_backbone("tiny-clip", device="cpu"), Shards(range(10))))
    rows = batch_rows(20, 20, 0, 3, twice.pictures)
    assert sorted(rows.tolist()) == list(range(20)) and len(twice.pictures.sizes) == 10
    assert all(a // 2 == b // 2 for a, b in rows.reshape(-1, 2).tolist())


@pytest.fixture(scope="module")
def formats():
    found = {name: open_benchmark(name, "val", **({"n_per_kind": 10} if name == "edits" else {})) for name in ("edits", "fashioniq", "cirr", "circo", "genecis")}
    return {name: bench if name == "edits" else replace(bench, queries=bench.queries[::6]) for name, bench in found.items()}


def noise(n, P, D, seed):
    g = torch.Generator().manual_seed(seed)
    return ImageFeatures(*(F.normalize(torch.randn(*shape, D, generator=g), dim=-1) for shape in ((n,), (n, P))))


@pytest.mark.parametrize("name", [n for n in ALL if n != "foco"])
def test_every_benchmark_format_and_chance(name, encoder, formats):
    "Pictures of noise: whatever a method makes of them, it finds the target as often as a blind draw."
    torch.manual_seed(0)
    stats = FeatureStats(*torch.zeros(3, encoder.D))
    composer = baseline(name, encoder, stats=stats)
    for bench in formats.values():
        n = len(set(reference_rows(bench)[0].tolist()))
        gallery = noise(len(bench.images), 0, encoder.D, 2).global_
        result = evaluate(composer, bench, noise(n, encoder.P, encoder.D, 1), gallery, encoder).result
        assert set(result.metrics) >= set(bench.metrics) and result.n_queries == len(bench.queries)
        sizes = np.array([len(bench.ids) if bench.galleries is None else len(bench.galleries[q.gallery]) for q in bench.queries])
        metric = next(m for m in bench.metrics if m.startswith("R@"))
        chance = float(np.minimum(1, int(metric[2:]) * np.array([max(1, len(q.targets)) for q in bench.queries]) / sizes).mean())
        slack = 5 * (chance * (1 - chance) / len(sizes)) ** .5 + 2 / len(sizes)
        assert abs(result.metrics[metric] / 100 - chance) < slack, (bench.name, metric, result.metrics[metric], chance)


def test_names_settings_and_grids():
    assert {read_name(n)[0] for n in ALL} >= set(BASELINES) | {"foco"}
    for name, grid in GRIDS.items():
        assert len(grid) == 4 and len({json.dumps(g, sort_keys=True) for g in grid}) == 4, name
        if name in BASELINES:
            for tried in grid: baseline_config(name, **tried)
    with pytest.raises(SystemExit) as stopped: main(["--methods", "lincr"])
    assert stopped.value.code == 2


def test_one_command_for_several(tmp_path, capfd, monkeypatch):
    "Two processes, one method that fails: it is named, the other is finished, the exit code says so."
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    common = ["--seeds", "0", "--out", str(tmp_path / "o"), "--results", str(tmp_path / "r"), "--benchmarks", "genecis:val"]
    overrides = json.dumps({"n_images": 40, "batch_size": 8, "seen": 16})
    assert main(["--methods", "pic2word,foco", *common, "--overrides", overrides]) == 1       # FoCo has no setting `seen`
    said = capfd.readouterr().out
    assert "FAILED" in said and "unknown setting 'seen'" in said
    run = json.loads((tmp_path / "r" / "pic2word-seed0" / "run.json").read_text(encoding="utf-8"))
    assert run["method"] == "Pic2Word" and run["query milliseconds"] > 0 and run["parameters"] > 0
