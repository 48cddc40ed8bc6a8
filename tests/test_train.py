"""Training: resume, checkpoints, errors, and every setting switched on once."""
import errno, json, os, signal, subprocess, sys, time
from dataclasses import replace

import pytest
import torch
import foco.hub as hub
import foco.train as T
import foco.training.checkpoints as checkpoints
from foco.backbones import ImageFeatures, load_backbone
from foco.counterfactuals import make_counterfactuals
from foco.data.pairs import data_source
from foco.train import train
from foco.training.checkpoints import CheckpointError, bundled_foco, latest_checkpoint, load_foco, load_trained, read_card
from foco.training.config import make_config
from foco.training.features import LivePictures, cache_features


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
    settings = config(bias="learned", ema=.9, clip=1., schedule="constant", chunk=30)
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
    with pytest.raises(ValueError, match=r"trained with another tau \(0.1, now 0.3\)"): train(backbone, training, config(tau=.3), tmp_path)
    with pytest.raises(ValueError, match="trained with another pairs_sha256"): train(backbone, replace(training, sha256="other"), config(), tmp_path)
    train(backbone, training, config(tau=.3), tmp_path, resume=False)


def test_a_finished_run_is_left_as_it_is(backbone, training, tmp_path):
    _, history = train(backbone, training, config(), tmp_path)
    before, seen = (tmp_path / "foco" / "foco.json").read_bytes(), []
    assert (card := json.loads(before))["images"] == 64 and card["negatives per image"] == 7
    model, again = train(backbone, training, config(), tmp_path, on_log=lambda history, done: seen.append(done))
    assert (tmp_path / "foco" / "foco.json").read_bytes() == before and again == history and seen == [1.]
    assert torch.equal(weights(model), weights(load_foco(tmp_path / "foco", backbone)))


def test_full_disk_leaves_the_last_checkpoint(backbone, training, tmp_path, monkeypatch):
    real, calls = checkpoints.save_file, []
    def full(tensors, path):
        calls.append(path)
        if len(calls) > 3:
            path.write_bytes(b"half a file")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path)
    for module in (hub, checkpoints): monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(CheckpointError, match="No space left.*last complete one is .*stage1-0000002"): train(backbone, training, config(), tmp_path, save_every=2)
    for module in (hub, checkpoints): monkeypatch.setattr(module, "save_file", real)
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
    state = checkpoints.load_file(path)
    checkpoints.save_file({("typo." + k if i == 0 else k): v for i, (k, v) in enumerate(state.items())}, path)
    with pytest.raises(ValueError, match="foco.safetensors does not fit.*typo"): load_foco(tmp_path / "foco", backbone)


@pytest.mark.parametrize("given", [{"form": "infonce"}, {"aggregation_negatives": "naive"}, {"variant": "centred", "completion_negatives": "naive"}, {"variant": "centred", "negative_focus": "own"},
    {"variant": "centred", "contexts": "pooled"}, {"aggregation_in_stage2": False}, {"bias": "none"}, {"bias": "learned"}, {"query": "text"}, {"attention": "dot"}, {"attention": "mask"}, {"completion": "linear"}, {"blocks": 0},
    {"use_background": False}, {"start": "random"}, {"inference_background": False}, {"variant": "centred", "partial_context": 0.}, {"variant": "centred", "visual_mixing": .5}, {"variant": "paper"}, {"expand": 1},
    {"heads": 4}, {"stage1_epochs": .5}, {"weight_decay": 0.}, {"residual": False}, {"counterfactuals": 1}, {"counterfactuals": 0, "completion_in_stage2": True}, {"completion_in_stage2": True},
    {"variant": "centred"}, {"warmup": 0.}, {"schedule": "constant"}, {"clip": .1}, {"ema": .9}, {"precision": "bfloat16"}, {"chunk": 7}, {"chunk": 0}], ids=str)
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
    v_g = training.images.global_[index]
    once, again, other = (training.edits.draw(index, 4, g(s), v_g) for s in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(once, again)) and not torch.equal(once.m, other.m)
    a, b = (training.edits.draw(index, pool, g(s), v_g) for s in (1, 2))
    for x, y in zip(a.m, b.m): assert torch.cdist(x, y).min(1).values.max() < 1e-3 and torch.cdist(y, x).min(1).values.max() < 1e-3
    assert training.edits.draw(index, 2, g(1), v_g).m.shape[1] == 2


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


def command(out, *more, processes=1, **settings):
    "The command line of a small run on two images a step and process."
    given = ["--n-images", "64", "--batch-size", "8", "--steps", "6", "--backbone", "tiny-clip", "--out", str(out), "--overrides", json.dumps(settings), *more]
    return [sys.executable, *(["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] if processes > 1 else []), "-m", "foco.train", *given]


ALONE = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}


def test_killed_and_run_again_equals_uninterrupted(tmp_path):
    "kill -9, as a cluster does it; the files are the same bit for bit."
    settings = dict(bias="learned", ema=.9)
    subprocess.run(command(tmp_path / "whole", "--save-every", "5", "--steps", "60", **settings), env=ALONE, check=True, capture_output=True)
    cut = subprocess.Popen(command(tmp_path / "cut", "--save-every", "5", "--steps", "60", **settings), env=ALONE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.time() + 120
    while time.time() < until and not ((now := latest_checkpoint(tmp_path / "cut")) and now.name > "stage2-0000010"): time.sleep(.02)
    cut.send_signal(signal.SIGKILL); cut.wait()
    assert not (tmp_path / "cut" / "foco").exists() and 10 < read_card(latest_checkpoint(tmp_path / "cut"))["step"] < 60
    subprocess.run(command(tmp_path / "cut", "--save-every", "5", "--steps", "60", **settings), env=ALONE, check=True, capture_output=True)
    whole, again = (checkpoints.load_file(tmp_path / name / "foco" / "foco.safetensors") for name in ("whole", "cut"))
    assert whole.keys() == again.keys() and all(torch.equal(whole[k], again[k]) for k in whole)


def test_two_processes_train_as_one(tmp_path):
    for n in (1, 2): subprocess.run(command(tmp_path / str(n), processes=n, visual_mixing=.5, partial_context=.5, completion_in_stage2=True), env=ALONE, check=True, capture_output=True, timeout=300)
    one, two = (checkpoints.load_file(tmp_path / n / "foco" / "foco.safetensors") for n in "12")
    assert torch.cat([(one[k] - two[k]).abs().flatten() for k in one]).mean() < 2e-5        # a few move more: the size of Adam's first steps is the rate, whatever the gradient's
    a, b = (read_card(tmp_path / n / "foco") for n in "12"); assert b["processes"] == 2 and a["negatives per image"] == b["negatives per image"] == 7      # of the whole batch
    for x, y in zip(a["history"], b["history"], strict=True): assert all(abs(x[k] - y[k]) <= 2e-3 * abs(x[k]) + 1e-5 for k in x if k.endswith(("loss", " min", " max"))), (x, y)
    failed = subprocess.run([*command(tmp_path / "odd", "--start-over", processes=2), "--batch-size", "7"], env=ALONE, capture_output=True, text=True, timeout=300)
    assert failed.returncode and "batch_size=7 cannot be shared evenly by 2 processes" in failed.stderr


def test_a_share_without_counterfactuals(tmp_path):
    "Processes log the same things, whatever is in their share of the batch."
    code = ("import sys, torch, foco.training.config as c, foco.train as t; made = c.TrainConfig.counterfactuals_of\n"
            "c.TrainConfig.counterfactuals_of = lambda self, pairs: [x if n % 4 == 0 else [] for n, x in enumerate(made(self, pairs))]\n"
            "sys.exit(t.main(sys.argv[1:]))")
    options = command(tmp_path, "--batch-size", "4", "--steps", "12")[3:]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--no-python", sys.executable, "-c", code, *options]
    done = subprocess.run(run, env=ALONE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "foco" / "foco.json").exists()


def test_the_command_names_what_is_wrong(tmp_path, capsys):
    base = ["--out", str(tmp_path), "--backbone", "tiny-clip"]
    for more, words in ((["--overrides", '{"batch_sz": 3}'], "did you mean batch_size"), (["--overrides", "[]"], "expected an object"), (["--overrides", '{"seed": 3}'], "has a parameter of its own"), (["--features", "int8"], "say where with cache"),
                        (["--overrides", '{"chunk": "all"}'], "expected int"),  (["--data", "nowhere"], "nowhere"), (["--variant", "best"], "unknown variant"), (["--overrides", "{"], "is not JSON")):
        assert T.main([*base, *more]) == 1 and words in capsys.readouterr().err
    with pytest.raises(SystemExit): T.main(["--backbone", "tiny-clip"])


@pytest.mark.parametrize("features", ["live", "float16", "int8"])
def test_training_from_other_places_equals_training_from_memory(backbone, training, tmp_path, features):
    pairs = data_source("toyworld").training_pairs(64)
    other = cache_features(backbone, pairs, True, counterfactuals=make_counterfactuals(pairs.decompositions), features=features, cache=tmp_path / "cache", workers=1)
    a, b = (train(backbone, t, config(features=f), tmp_path / f)[1] for t, f in ((training, "memory"), (other, features)))
    assert max(abs(x["loss"] / y["loss"] - 1) for x, y in zip(a, b, strict=True)) < (2e-2 if features == "int8" else 2e-3)


def test_ema_is_the_average_of_the_weights(backbone, training, tmp_path):
    plain = replace(config(), steps=3)
    model, _ = train(backbone, training, plain, tmp_path / "plain")
    averaged, _ = train(backbone, training, replace(plain, ema=.5), tmp_path / "ema")
    assert not torch.equal(weights(model), weights(averaged))
    assert torch.equal(weights(load_foco(tmp_path / "ema" / "foco", backbone)), weights(averaged))
    last = checkpoints.load_file(latest_checkpoint(tmp_path / "ema") / "foco.safetensors")
    assert all(torch.equal(last[k], v) for k, v in model.state_dict().items())      # the average does not touch what is trained


def test_clipping_bounds_the_step(backbone, training, tmp_path):
    free, held = (train(backbone, training, config(clip=c), tmp_path / str(c), log_every=1)[1] for c in (None, 1e-3))
    assert free[0]["gradient norm F_Aggr"] == held[0]["gradient norm F_Aggr"] > 1e-3 and free[3]["loss"] != held[3]["loss"]


def test_validation_keeps_the_best(backbone, training, tmp_path):
    scores = iter([3., 7., 5., 2.])
    seen = []
    def validate(model):
        assert not model.training
        seen.append(weights(model).clone()); return {"R@1": next(scores)}
    model, history = train(backbone, training, config(), tmp_path, validate=validate, validate_every=3, log_every=100)
    assert [h["validation R@1"] for h in history if "validation R@1" in h] == [3., 7., 5., 2.]
    assert torch.equal(weights(load_foco(tmp_path / "best", backbone)), seen[1]) and read_card(tmp_path / "best")["best"]["score"] == 7. and read_card(tmp_path / "foco")["best"]["stage"] == 1


def test_tensorboard_gets_the_numbers(backbone, training, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    _, history = train(backbone, training, config(), tmp_path, log_every=2, tracker="tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard")); events.Reload()
    assert [round(e.value, 3) for e in events.Scalars("loss")] == [round(h["loss"], 3) for h in history] and "aggregation negative max" in events.Tags()["scalars"]
    with pytest.raises(ValueError, match="expected 'tensorboard'"): train(backbone, training, config(), tmp_path / "x", tracker="paper")
