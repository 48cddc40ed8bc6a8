"""The batch form of both losses equals a literal double loop in float64: values and gradients."""
import math

import pytest
import torch
import torch.nn.functional as F
from foco.aggregate import Aggregator
from foco.backbones import ImageFeatures
from foco.complete import FoCo
from foco.losses import Batch, Objective, Phi, aggregation_loss, completion_loss, draw_pick, total_loss

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
    negatives = "naive" if options.get("naive") else "cross"
    if stage == 1: fast = aggregation_loss(foco.aggregator, batch, phi, negatives)[0]
    else: fast = completion_loss(foco, batch, phi, negatives, options.get("focus", "other"))[0]
    slow = torch.stack([loop(foco, batch, phi, i, stage, **options) for i in range(B)])
    assert (fast - slow).abs().max() < 1e-8
    parameters = [p for p in [*foco.parameters(), *phi.parameters()]]
    for a, b in zip(*(torch.autograd.grad(x.sum(), parameters, allow_unused=True) for x in (fast, slow))):
        assert (a is None) == (b is None)
        if a is not None: assert (a - b).abs().max() < 1e-8


def test_duplicate_captions_are_negatives_of_each_other():
    "The rule as printed: two images with the same caption are not masked."
    batch = make_batch(3, 2)
    batch.c[1], batch.X[1], batch.real[1], batch.pick[1] = batch.c[0], batch.X[0], batch.real[0], batch.pick[0]
    model, phi = Aggregator(D, 4, expand=2).double(), Phi(.2)
    fast = aggregation_loss(model, batch, phi)[0]
    foco = FoCo(D, heads=4, expand=2).double(); foco.aggregator = model
    assert (fast - torch.stack([loop(foco, batch, phi, i, 1) for i in range(3)])).abs().max() < 1e-8


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
