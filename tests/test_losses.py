"""The batch form of both losses equals a literal double loop in float64: values and gradients, in one piece and in many, in one process and in two."""
import json, math, os, subprocess, sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from foco.aggregate import Aggregator
from foco.backbones import ImageFeatures
from foco.complete import FoCo
from foco.losses import Asked, Batch, Objective, Phi, draw_pick, literal_loss, pair_losses, total_loss

D, P = 16, 9


def make_batch(B, K, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    unit = lambda *s: F.normalize(torch.randn(*s, dtype=dtype, generator=g), dim=-1)
    real = torch.arange(K)[None] < torch.randint(1, K + 1, (B, 1), generator=g)
    return Batch(ImageFeatures(unit(B, D), unit(B, P, D)), unit(B, K, D), unit(B, K, D), real, draw_pick(real, g))


def score(cosine, sign, phi): return math.log(1 / (1 + math.exp(-sign * (cosine / phi.tau + phi.b.item())))) # for single numbers only


def loop(foco, batch, phi, i, stage, naive=False, focus="other"):
    "Both losses of image i, one pair at a time, with a log-sigmoid of its own."
    image = batch.images[i]
    log_sigmoid = lambda x: -torch.log1p(torch.exp(-x))
    cosine = lambda u, v: (u * v).sum() / (u.norm() * v.norm())
    seen = lambda c: foco.aggregator(c[None, None], image)
    own, total = batch.c[i, batch.pick[i]], 0.
    for k in range(batch.c.shape[1]):
        if not batch.real[i, k]: continue
        found = seen(batch.c[i, k])
        if stage == 1: total = total - log_sigmoid(cosine(found.local[0, 0], batch.c[i, k]) / phi.tau + phi.b)
        else: total = total - log_sigmoid(cosine(foco.completer(batch.X[i, k][None], found.local[0], found.background[0])[0], batch.images.global_[i]) / phi.tau + phi.b)
    for j in range(len(batch.c)):
        if j == i: continue
        c, X = batch.c[j, batch.pick[j]], batch.X[j, batch.pick[j]]
        if stage == 1: total = total - log_sigmoid(-(cosine(seen(c).local[0, 0], own if naive else c) / phi.tau + phi.b))
        else:
            found = seen(c if focus == "other" else own)
            h = foco.completer(X[None], found.local[0], found.background[0])[0]
            total = total - log_sigmoid(-(cosine(h, batch.images.global_[i if naive else j]) / phi.tau + phi.b))
    return total


@pytest.mark.parametrize("B, K, bias", [(2, 1, "none"), (3, 5, "fixed"), (5, 3, "learned"), (8, 4, "none"), (17, 2, "fixed"), (33, 5, "none")])
@pytest.mark.parametrize("stage, options", [(1, {}), (1, {"naive": True}), (2, {}), (2, {"naive": True}), (2, {"focus": "own"})])
def test_batch_form_equals_double_loop(B, K, bias, stage, options):
    torch.manual_seed(B)
    foco, batch, phi = FoCo(D, heads=4, expand=2).double(), make_batch(B, K, seed=B), Phi(.2, bias, start=-2.).double()
    part, negatives = ("aggregation", "completion")[stage - 1], "naive" if options.get("naive") else "cross"
    objective = Objective(aggregation_negatives=negatives, completion_negatives=negatives, negative_focus=options.get("focus", "other"))
    fast = pair_losses(foco, batch, phi, objective, [part])[0][part]
    slow = torch.stack([loop(foco, batch, phi, i, stage, **options) for i in range(B)])
    assert (fast - slow).abs().max() < 1e-8
    parameters = [p for p in [*foco.parameters(), *phi.parameters()]]
    for a, b in zip(*(torch.autograd.grad(x.sum(), parameters, allow_unused=True) for x in (fast, slow))):
        assert (a is None) == (b is None)
        if a is not None: assert (a - b).abs().max() < 1e-8


@pytest.mark.parametrize("B, K, chunk", [(2, 1, 1), (2, 3, 4), (5, 3, 8), (7, 4, 30), (12, 2, 36)]) # even and uneven, whole rows and less
@pytest.mark.parametrize("options", [{}, {"form": "infonce"}, {"negative_focus": "own"}, {"contexts": "pooled", "bias": "learned"}], ids=str)
def test_pieces_equal_the_literal_sum(B, K, chunk, options): compare_pieces(B, K, chunk, options)


@pytest.mark.parametrize("B, K, chunk", [(17, 5, 100), (33, 2, 20)])
def test_pieces_of_larger_batches(B, K, chunk): compare_pieces(B, K, chunk, {})


def compare_pieces(B, K, chunk, options):
    "Aggregation and completion together; values and gradients."
    torch.manual_seed(B)
    objective = Objective(tau=.2, **options)
    foco, batch, phi = FoCo(D, heads=4, expand=2).double(), make_batch(B, K, seed=B), Phi(.2, objective.bias, start=-2.).double()
    fast, log = total_loss(foco, batch, phi, objective, 2, chunk)
    slow = sum(literal_loss(foco, batch, phi, objective, part, i) for part in ("aggregation", "completion") for i in range(B)) / B
    assert abs(fast - slow) < 1e-8
    parameters = [*foco.parameters(), *phi.parameters()]
    for a, b in zip(*(torch.autograd.grad(x, parameters, allow_unused=True) for x in (fast, slow))):
        assert (a is None) == (b is None)
        if a is not None: assert (a - b).abs().max() < 1e-8
    whole = total_loss(foco, batch, phi, objective, 2)[1]
    assert whole.keys() == log.keys() and all(abs(whole[k] - log[k]) < 1e-10 for k in log)


@pytest.mark.parametrize("model", [dict(residual=True, blocks=3), dict(blocks=0), dict(completion="linear"), dict(attention="dot"), dict(attention="mask"), dict(use_background=False), dict(start="random"), dict(query="text")], ids=str)
def test_pieces_work_with_every_module(model):
    torch.manual_seed(0)
    foco, batch, phi, objective = FoCo(D, heads=4, expand=2, **model).double(), make_batch(6, 3), Phi(.2), Objective(tau=.2)
    if model.get("residual"): torch.nn.init.normal_(foco.completer.out.weight, std=.1)
    slow = sum(literal_loss(foco, batch, phi, objective, part, i) for part in ("aggregation", "completion") for i in range(6)) / 6
    parameters = list(foco.parameters())
    for chunk in (None, 13):
        fast = total_loss(foco, batch, phi, objective, 2, chunk)[0]
        assert abs(fast - slow) < 1e-10
        for a, b in zip(*(torch.autograd.grad(x, parameters, allow_unused=True, retain_graph=True) for x in (fast, slow))):
            assert a is None or b is None or (a - b).abs().max() < 1e-8
            assert (a is None or not a.any()) if b is None else a is not None or not b.any()


def test_memory_is_set_by_the_piece():
    "What autograd keeps for the backward pass does not grow with the number of pairs."
    def kept(B, chunk):
        torch.manual_seed(0)
        foco, batch, phi, sizes, held = FoCo(D, heads=4, expand=2), make_batch(B, 2, dtype=torch.float32), Phi(.2), [], 0
        for p in foco.parameters(): sizes.append(p.data_ptr())
        def pack(x):
            nonlocal held
            if x.data_ptr() not in sizes: held += x.numel() * x.element_size()
            return x
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x): loss = total_loss(foco, batch, phi, Objective(tau=.2), 2, chunk)[0]
        return held if chunk is None else held / max(1, len(list(__import__("foco.losses").losses.piece_slices(B, B, 2, chunk, False))))
    assert kept(32, None) > 3 * kept(16, None)                  # all pairs at once: quadratic
    assert kept(32, 200) < 1.3 * kept(16, 200)                  # in pieces: each as large as before


@pytest.mark.parametrize("precision", ["bfloat16"])
def test_low_precision_keeps_norms_and_losses_in_float32(precision):
    torch.manual_seed(0)
    foco, batch, phi = FoCo(D, heads=4, expand=2), make_batch(8, 3, dtype=torch.float32), Phi(.1)
    exact = total_loss(foco, batch, phi, Objective(tau=.1), 2)[0]
    for chunk in (None, 30):
        with torch.autocast("cpu", getattr(torch, precision)): loss, log = total_loss(foco, batch, phi, Objective(tau=.1), 2, chunk)
        assert loss.dtype == torch.float32 and all(v.dtype == torch.float32 for v in log.values()) and abs(loss - exact) < .02 * exact
        grads = torch.autograd.grad(loss, list(foco.parameters()), allow_unused=True)
        assert all(g.dtype == torch.float32 and torch.isfinite(g).all() for g in grads if g is not None)
    batch.asked = Asked(batch.c, batch.c[:1].expand_as(batch.c), batch.X, batch.real)      # all targets are equal, so none is a negative of another
    o = Objective(tau=.1, counterfactuals=3, completion_in_stage2=False, aggregation_in_stage2=False)
    exact = total_loss(foco, batch, phi, o, 2)[0]
    with torch.autocast("cpu", torch.bfloat16): assert abs(total_loss(foco, batch, phi, o, 2)[0] - exact) < .02 * exact
    with torch.autocast("cpu", torch.bfloat16): focus = foco.aggregator(batch.c, batch.images)
    assert focus.local.dtype == focus.background.dtype == torch.float32 and (focus.local.norm(dim=-1) - 1).abs().max() < 1e-6


def test_compiled_modules_give_the_same_loss():
    if not __import__("shutil").which("g++"): pytest.skip("torch.compile needs a C++ compiler")
    torch.manual_seed(0)
    foco, batch, phi = FoCo(D, heads=4, expand=2), make_batch(6, 3, dtype=torch.float32), Phi(.2)
    plain = torch.autograd.grad(total_loss(foco, batch, phi, Objective(tau=.2), 2, 20)[0], list(foco.parameters()), allow_unused=True)
    foco.aggregator.compile(); foco.completer.compile()
    compiled = torch.autograd.grad(total_loss(foco, batch, phi, Objective(tau=.2), 2, 20)[0], list(foco.parameters()), allow_unused=True)
    assert all((a - b).abs().max() < 1e-4 for a, b in zip(plain, compiled) if a is not None)


TWO = """
import json, os, sys, torch
from dataclasses import replace
sys.path.insert(0, os.environ["TESTS"])
from test_losses import D, make_joined
from foco.complete import FoCo
from foco.losses import Objective, Phi, total_loss
from foco.train import average_gradients, find_world
world = find_world(torch.device("cpu"))
found = []
for seed, (stage, options) in enumerate(json.loads(os.environ["CASES"])):
    torch.manual_seed(0); objective = Objective(tau=.2, **options)
    foco, phi = FoCo(D, heads=4, expand=2, residual=True).double(), Phi(.2, objective.bias, start=-2.).double()
    torch.nn.init.normal_(foco.completer.out.weight, std=.1)
    whole, n = make_joined(8, seed), 8 // world.size
    batch = make_joined(8, seed, slice(world.rank * n, (world.rank + 1) * n))
    if world.size > 1 and whole.mix is not None: batch = replace(batch, before=(whole.images[world.rank * n - 1], whole.c[[world.rank * n - 1]]))
    loss, log = total_loss(foco, batch, phi, objective, stage, chunk=[None, 9][seed % 2], world=world)
    loss.backward(); parameters = [*foco.parameters(), *phi.parameters()]
    average_gradients(parameters, world)
    found.append({"loss": world.gather(loss.detach()[None]).mean().item(), "gradient": torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).tolist(), "questions": 8})
if world.rank == 0: print("FOUND" + json.dumps(found))
"""
CASES = [(1, {}), (1, {"aggregation_negatives": "naive", "form": "infonce"}), (2, {}), (2, {"bias": "learned"}), (2, {"completion_negatives": "naive", "negative_focus": "own"}), (2, {"form": "infonce"}),
         (2, {"counterfactuals": 3, "completion_in_stage2": False}), (2, {"counterfactuals": 3, "contexts": "pooled"})]


def make_joined(B, seed, share=slice(None)):
    "A batch with everything in it, or a share of it."
    g = torch.Generator().manual_seed(100 + seed)
    unit = lambda *s: F.normalize(torch.randn(*s, dtype=torch.float64, generator=g), dim=-1)
    b, asked = make_batch(B, 3, seed), Asked(unit(B, 3, D), unit(B, 3, D), unit(B, 3, D), torch.arange(3)[None] < torch.randint(0, 4, (B, 1), generator=g))
    mix = torch.rand(B, generator=g, dtype=torch.float64)[share] if seed % 3 == 2 else None
    return Batch(b.images[share], b.c[share], b.X[share], b.real[share], b.pick[share], mix, Asked(*(x[share] for x in asked)))


def run_processes(n):
    "Run TWO in n gloo processes; what the first one prints."
    environment = {**os.environ, "TESTS": str(Path(__file__).parent), "CASES": json.dumps(CASES), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(n)] if n > 1 else [sys.executable]
    done = subprocess.run([*command, "-c", TWO] if n == 1 else [*command, "--no-python", sys.executable, "-c", TWO], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(l for l in done.stdout.splitlines() if l.startswith("FOUND"))[5:])


def test_two_processes_give_the_loss_and_gradients_of_one():
    for (stage, options), one, two in zip(CASES, run_processes(1), run_processes(2), strict=True):
        assert abs(one["loss"] - two["loss"]) < 1e-9, (stage, options)
        assert len(one["gradient"]) == len(two["gradient"]) and max(abs(a - b) for a, b in zip(one["gradient"], two["gradient"])) < 1e-9, (stage, options)
        assert max(map(abs, one["gradient"])) > 1e-4


def test_duplicate_captions_are_negatives_of_each_other():
    "The rule as printed: two images with the same caption are not masked."
    batch = make_batch(3, 2)
    batch.c[1], batch.X[1], batch.real[1], batch.pick[1] = batch.c[0], batch.X[0], batch.real[0], batch.pick[0]
    foco, phi = FoCo(D, heads=4, expand=2).double(), Phi(.2)
    for stage, part in ((1, "aggregation"), (2, "completion")):
        fast = pair_losses(foco, batch, phi, Objective(), [part])[0][part]
        assert (fast - torch.stack([loop(foco, batch, phi, i, stage) for i in range(3)])).abs().max() < 1e-8


def test_loss_falls_when_positives_rise_and_negatives_fall():
    phi = Phi(.1)
    u, v = torch.eye(2, dtype=torch.float64)
    for sign in (1, -1):
        near, far = phi(u, F.normalize(u + .5 * v, dim=0), sign), phi(u, F.normalize(.5 * u + v, dim=0), sign)
        assert (near > far) == (sign == 1)
    assert abs(phi(u, u, 1).item() - score(1., 1, phi)) < 1e-12


@pytest.mark.parametrize("options", [{}, {"form": "infonce"}, {"aggregation_negatives": "naive"}, {"completion_negatives": "naive"}, {"negative_focus": "own"},
                                     {"contexts": "pooled"}, {"aggregation_in_stage2": False}, {"bias": "fixed"}, {"bias": "learned"}])
def test_every_option_trains(options):
    torch.manual_seed(0)
    objective = Objective(tau=.2, **options)
    foco, batch = FoCo(D, heads=4, expand=2), make_batch(6, 3, dtype=torch.float32)
    phi = Phi(objective.tau, objective.bias)
    optimizer = torch.optim.Adam([*foco.parameters(), *phi.parameters()], lr=2e-3)
    losses = []
    for _ in range(25):
        loss, log = total_loss(foco, batch, phi, objective, stage=2)
        optimizer.zero_grad(); loss.backward(); optimizer.step(); losses.append(loss.item())
    assert losses[-1] < losses[0] and all(math.isfinite(v) for v in log.values())


def test_ablations_remove_what_they_say():
    batch = make_batch(4, 2, dtype=torch.float32)
    swapped = Batch(ImageFeatures(-batch.images.global_, batch.images.patches), batch.c, batch.X, batch.real, batch.pick)
    for query, blind in (("fused", False), ("text", True)):
        model = Aggregator(D, 4, query=query)
        assert torch.equal(model(batch.c, batch.images).local, model(batch.c, swapped.images).local) == blind
    random_start = FoCo(D, heads=4, start="random", blocks=1)
    assert random_start.completer.token.requires_grad
