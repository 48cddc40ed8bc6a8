"""Training: resume, checkpoints, errors, and every setting switched on once."""
import errno, json
from dataclasses import replace

import pytest
import torch
import foco.train as T
from foco.backbones import ImageFeatures, load_backbone
from foco.counterfactuals import make_counterfactuals
from foco.data.pairs import data_source
from foco.train import (CheckpointError, bundled_foco, cache_features, latest_checkpoint, load_foco, load_trained, make_config, train)


@pytest.fixture(scope="module")
def backbone(): return load_backbone("tiny-clip")


@pytest.fixture(scope="module")
def training(backbone):
    pairs = data_source("toyworld").training_pairs(64)
    return cache_features(backbone, pairs, True, counterfactuals=make_counterfactuals(pairs.decompositions))


def config(**given): return make_config(n_images=64, batch_size=8, steps=6, **given)


def weights(model): return torch.cat([p.flatten() for p in model.state_dict().values()])


def test_same_seed_same_model(backbone, training, tmp_path):
    a, b, c = (train(backbone, training, config(seed=s), tmp_path / n)[0] for s, n in ((1, "a"), (1, "b"), (2, "c")))
    assert torch.equal(weights(a), weights(b)) and not torch.equal(weights(a), weights(c))


@pytest.mark.parametrize("stop", [3, 9]) # in stage 1, in stage 2
def test_resumed_equals_uninterrupted(backbone, training, tmp_path, monkeypatch, stop):
    settings = config(bias="learned")
    whole, history = train(backbone, training, settings, tmp_path / "whole", save_every=1, log_every=1)
    real_step, taken = T.train_step, []
    def interrupted(*args):
        if len(taken) == stop: raise KeyboardInterrupt
        taken.append(1); return real_step(*args)
    monkeypatch.setattr(T, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt): train(backbone, training, settings, tmp_path / "cut", save_every=1, log_every=1)
    monkeypatch.setattr(T, "train_step", real_step)
    resumed, again = train(backbone, training, settings, tmp_path / "cut", save_every=1, log_every=1)
    assert torch.equal(weights(whole), weights(resumed))
    assert [h["loss"] for h in history] == [h["loss"] for h in again]


def test_resuming_with_other_settings_is_refused(backbone, training, tmp_path):
    train(backbone, training, config(), tmp_path)
    with pytest.raises(ValueError, match="trained with another tau"): train(backbone, training, config(tau=.3), tmp_path)
    train(backbone, training, config(tau=.3), tmp_path, resume=False)


def test_full_disk_leaves_the_last_checkpoint(backbone, training, tmp_path, monkeypatch):
    real, calls = T.save_file, []
    def full(tensors, path):
        calls.append(path)
        if len(calls) > 3:
            path.write_bytes(b"half a file")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path)
    monkeypatch.setattr(T, "save_file", full)
    with pytest.raises(CheckpointError, match="No space left.*last complete one is .*stage1-0000002"): train(backbone, training, config(), tmp_path, save_every=2)
    monkeypatch.setattr(T, "save_file", real)
    assert latest_checkpoint(tmp_path).name == "stage1-0000002" and not list(tmp_path.glob("*.unfinished"))
    load_foco(latest_checkpoint(tmp_path), backbone)
    train(backbone, training, config(), tmp_path) # resumes


def test_out_that_cannot_be_written(backbone, training, tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(CheckpointError, match="choose a folder"): train(backbone, training, config(), tmp_path / "file" / "out")


def test_non_finite_loss_names_the_images(backbone, training, tmp_path):
    bad = replace(training, images=ImageFeatures(training.images.global_.clone(), training.images.patches.clone()))
    bad.images.global_[5] = float("nan")
    with pytest.raises(FloatingPointError, match=r"stage 1, step \d+. Images of the batch: \[.*\b5\b.*\]"): train(backbone, bad, config(), tmp_path)


def test_checkpoint_of_another_backbone(backbone, training, tmp_path):
    train(backbone, training, config(), tmp_path)
    with pytest.raises(ValueError, match="trained on another backbone.*patch_layer"): load_foco(tmp_path / "foco", backbone.at_layer(0))
    with pytest.raises(ValueError, match="trained on another backbone.*weights"): load_foco(tmp_path / "foco", load_backbone("tiny-clip", pretrained="random"))


def test_misspelled_weights_are_refused(backbone, training, tmp_path):
    train(backbone, training, config(), tmp_path)
    path = tmp_path / "foco" / "foco.safetensors"
    state = T.load_file(path)
    T.save_file({("typo." + k if i == 0 else k): v for i, (k, v) in enumerate(state.items())}, path)
    with pytest.raises(RuntimeError, match="typo"): load_foco(tmp_path / "foco", backbone)


@pytest.mark.parametrize("given", [{"form": "infonce"}, {"aggregation_negatives": "naive"}, {"variant": "centred", "completion_negatives": "naive"}, {"variant": "centred", "negative_focus": "own"},
    {"variant": "centred", "contexts": "pooled"}, {"aggregation_in_stage2": False}, {"bias": "none"}, {"bias": "learned"}, {"query": "text"}, {"attention": "dot"}, {"attention": "mask"}, {"completion": "linear"}, {"blocks": 0},
    {"use_background": False}, {"start": "random"}, {"inference_background": False}, {"variant": "centred", "partial_context": 0.}, {"variant": "centred", "visual_mixing": .5}, {"variant": "paper"}, {"expand": 1},
    {"heads": 4}, {"stage1_epochs": .5}, {"weight_decay": 0.}, {"residual": False}, {"counterfactuals": 1}, {"counterfactuals": 0, "completion_in_stage2": True}, {"completion_in_stage2": True},
    {"variant": "centred"}], ids=str)
def test_every_setting_runs(backbone, training, tmp_path, given):
    model, history = train(backbone, training, replace(config(**given), steps=2), tmp_path, log_every=1)
    assert len(history) == 4 and all(h["loss"] > 0 for h in history)
    assert torch.isfinite(weights(model)).all()


def test_counterfactuals_that_were_not_made(backbone, training, tmp_path):
    with pytest.raises(ValueError, match="this training set has none; pass config.counterfactuals_of"): train(backbone, replace(training, edits=None), config(), tmp_path)


def test_drawing_counterfactuals(training):
    "Deterministic; all of the pool if as many are asked for; never one twice."
    g = lambda seed: torch.Generator().manual_seed(seed)
    index, pool = torch.tensor([3, 5, 8]), training.edits.real.shape[1]
    once, again, other = (training.edits.draw(index, 4, g(s)) for s in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(once, again)) and not torch.equal(once.m, other.m)
    a, b = (training.edits.draw(index, pool, g(s)) for s in (1, 2))
    for x, y in zip(a.m, b.m): assert torch.cdist(x, y).min(1).values.max() < 1e-3 and torch.cdist(y, x).min(1).values.max() < 1e-3
    assert training.edits.draw(index, 2, g(1)).m.shape[1] == 2


def test_wordings_and_k_max_reach_the_counterfactuals(tmp_path):
    pairs = data_source("toyworld").training_pairs(60)
    (tmp_path / "mine.json").write_text(json.dumps({"remove": ["xyzzy {noun}"] * 500}), encoding="utf-8")
    texts = [c.text for found in config(wordings=str(tmp_path / "mine.json")).counterfactuals_of(pairs) for c in found]
    assert sum(t.startswith("xyzzy") for t in texts) > 20
    assert config(counterfactuals=0, completion_in_stage2=True).counterfactuals_of(pairs) is None
    gone = {k: {(i, c.after) for i, found in enumerate(config(k_max=k).counterfactuals_of(pairs)) for c in found if c.kind == "remove"} for k in (None, 1)}
    first = {(i, d.pairs[0][1]) for i, d in enumerate(pairs.decompositions)}
    contexts = {(i, x) for i, d in enumerate(pairs.decompositions) for x in d.contexts}
    assert gone[1] & contexts <= first and not gone[None] & contexts <= first
    with pytest.raises(ValueError, match="nowhere.json' cannot be read"): config(wordings="nowhere.json").counterfactuals_of(pairs)
    (tmp_path / "mine.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="expected a JSON file such as"): config(wordings=str(tmp_path / "mine.json")).counterfactuals_of(pairs)


def test_k_max(backbone):
    pairs = data_source("toyworld").training_pairs(32)
    assert cache_features(backbone, pairs, False, k_max=1).real.sum() == 32


def test_texts_are_encoded_once(backbone):
    pairs = data_source("toyworld").training_pairs(200)
    cached = cache_features(backbone, pairs, False)
    said = [t for d in pairs.decompositions for p in d.pairs for t in p]
    assert len(cached.texts) == len(set(said)) < len(said)
    i, k = 7, 0
    expected = backbone.encode_texts([pairs.decompositions[i].pairs[k][1]])[0]
    assert torch.allclose(cached.texts[cached.X[i, k]], expected, atol=1e-5)


def test_bundled_foco_loads_and_says_how_it_was_made():
    model, backbone = load_trained(bundled_foco())
    card = json.loads((bundled_foco() / "foco.json").read_text(encoding="utf-8"))
    assert card["backbone"]["weights"] == backbone.identity["weights"] and card["commit"] and card["steps"] and card["config"]["seed"] == 0
    assert not model.training
