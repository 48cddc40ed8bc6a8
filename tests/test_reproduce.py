"""The chain on tiny notebooks: what is skipped, what runs again and why, failures, interruptions; and the command on the real chain, without running it."""
import json, os, shutil, signal, subprocess, sys, time
from pathlib import Path

import nbformat
import pytest

from foco import chain, reproduce
from foco.chain import Chain, ChainError, Step, wrong_parameters

ROOT = Path(__file__).resolve().parents[1]
TAKE = "import json; json.dump({'number': number, 'name': name, 'rate': rate, 'on': on, 'nothing': nothing}, open(out, 'w'))"


def notebook(path, *cells, tagged=True):
    path.parent.mkdir(parents=True, exist_ok=True)
    made = [nbformat.v4.new_code_cell(c, metadata={"tags": ["parameters"]} if tagged and not i else {}) for i, c in enumerate(cells)]
    made.insert(1, nbformat.v4.new_markdown_cell("## Work"))
    nbformat.write(nbformat.v4.new_notebook(cells=made, metadata={"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}}), path)


@pytest.fixture
def runs(monkeypatch):
    "Count what is started, and replace kernels by a plain exec of the cells: the same files, a tenth of a second."
    started = []
    plain = """
import contextlib, io, json, os, sys, traceback
job = json.loads(sys.argv[1])
nb = json.load(open(job["notebook"]))
os.chdir(job["cwd"]); sys.path.insert(0, "")
names, failed = {"__name__": "nb"}, 0
for cell in [c for c in nb["cells"] if c["cell_type"] == "code"]:
    source = "".join(cell["source"])
    try:
        exec(source, names)
        if "parameters" in cell["metadata"].get("tags", []): names.update(job["parameters"])
    except Exception as e:
        cell["outputs"] = [{"output_type": "error", "ename": type(e).__name__, "evalue": str(e), "traceback": traceback.format_exc().splitlines()}]
        failed = 1
        break
json.dump(nb, open(job["copy"], "w"))
sys.exit(failed)
"""
    real = subprocess.Popen
    def popen(command, **options):
        if command[1:3] == ["-m", "foco.chain"]:
            started.append(Path(json.loads(command[3])["notebook"]).stem)
            command = [sys.executable, "-c", plain, command[3]]
        return real(command, **options)
    monkeypatch.setattr(chain.subprocess, "Popen", popen)
    return started


@pytest.fixture
def project(tmp_path):
    "a -> b -> c, and d alone; a reads given.txt, all write into results/."
    notebook(tmp_path/"nbs"/"a.ipynb", "number = 1\nfail = False", "from foco import lib\nif fail: raise ValueError('no luck')\nimport os; os.makedirs('results', exist_ok=True)\nopen('results/a.txt', 'w').write(str(number) + open('given.txt').read())")
    for here, there in ("ba", "cb"): notebook(tmp_path/"nbs"/f"{here}.ipynb", "pass", f"text = open('results/{there}.txt').read()[:1]\nopen('results/{here}.txt', 'w').write(text)")
    notebook(tmp_path/"nbs"/"d.ipynb", "wait = 0.", "import os, time; time.sleep(wait)\nos.makedirs('results', exist_ok=True); open('results/d.txt', 'w').write('d')")
    (tmp_path/"given.txt").write_text("x")
    (tmp_path/"foco").mkdir()
    for name, text in (("__init__", ""), ("lib", "from .deep import value"), ("deep", "value = 1"), ("other", "")): (tmp_path/"foco"/f"{name}.py").write_text(text)
    return tmp_path


def steps(project, a=None, d=None, **changes):
    def step(name, *needs, **more): return Step(name, f"{name}.ipynb", needs=needs, makes=(f"results/{name}.txt",), minutes=.01, **more)
    return Chain([step("a", parameters=a or {}, reads=("given.txt",), **changes), step("b", "a"), step("c", "b"), step("d", parameters=d or {}, tags=("alone",))], project, project/"_out")


def run(chain, runs, **options):
    "Exit code, what was started, what was said."
    runs.clear()
    said = []
    code = chain.run(say=said.append, **options)
    return code, list(runs), "\n".join(said)


def test_only_what_changed_runs(project, runs):
    assert run(steps(project), runs)[:2] == (0, ["a", "b", "c", "d"])
    assert run(steps(project), runs) == (0, [], "4 up to date")
    assert sorted(p.name for p in (project/"_out"/"notebooks").iterdir()) == [f"{n}.ipynb" for n in "abcd"]
    for path in project.rglob("*"): os.utime(path)                                     # dates mean nothing
    (project/"foco"/"deep.py").write_text('"New docstring."\nvalue = 1   # and a comment')
    (project/"foco"/"other.py").write_text("x = 1")                                    # nothing imports it
    assert run(steps(project), runs)[:2] == (0, [])
    (project/"foco"/"deep.py").write_text("value = 2")                                 # imported by what a imports
    assert steps(project).plan() == {"a": ["module foco.deep has changed"], "b": ["a runs first"], "c": ["b runs first"], "d": []}
    assert run(steps(project), runs)[:2] == (0, ["a"])                                 # b: a made the same again
    assert run(steps(project, a={"number": 2}), runs)[:2] == (0, ["a", "b", "c"])      # a parameter
    assert (project/"results"/"c.txt").read_text() == "2"
    (project/"given.txt").write_text("y")                                              # an input, of which b takes nothing
    assert run(steps(project, a={"number": 2}), runs)[:2] == (0, ["a", "b"])
    (project/"results"/"b.txt").unlink()                                               # a result is gone
    assert run(steps(project, a={"number": 2}), runs)[:2] == (0, ["b"])
    (project/"results"/"c.txt").write_text("9")                                        # a result was edited
    assert run(steps(project, a={"number": 2}), runs)[:2] == (0, ["c"]) and (project/"results"/"c.txt").read_text() == "2"
    (project/"_out"/"notebooks"/"d.ipynb").unlink()                                    # an executed copy is gone
    assert run(steps(project, a={"number": 2}), runs)[:2] == (0, ["d"])


def test_prose_of_a_notebook_is_free_and_its_code_is_not(project, runs):
    run(steps(project), runs)
    nb = nbformat.read(project/"nbs"/"d.ipynb", 4)
    nb.cells[1].source = "## Other words"
    nbformat.write(nb, project/"nbs"/"d.ipynb")
    assert run(steps(project), runs)[1] == []
    nb.cells[2].source += "\nx = 1"
    nbformat.write(nb, project/"nbs"/"d.ipynb")
    assert steps(project).plan()["d"] == ["its notebook has changed"]


def test_only_and_force(project, runs):
    assert run(steps(project), runs, only=["b"])[:2] == (0, ["a", "b"])
    assert run(steps(project), runs, only=["b"], force=True)[:2] == (0, ["b"])         # not what it needs
    assert run(steps(project), runs, only=["alone"])[1] == ["d"] and run(steps(project), runs, only=["[cd]"])[1] == ["c"]
    assert run(steps(project), runs, force=True)[1] == ["a", "b", "c", "d"]
    with pytest.raises(ChainError, match="no step 'alon'; did you mean alone"): steps(project).run(["alon"])


def test_a_failure_names_the_cell_and_stops_only_what_depends_on_it(project, runs):
    code, started, said = run(steps(project, a={"fail": True}), runs)
    assert code == 1 and started == ["a", "d"] and (project/"results"/"d.txt").exists()
    for words in ("a: FAILED", "code cell 2 of a.ipynb, below 'Work'", "from foco import lib", "ValueError: no luck", "a.failed.ipynb", "b: left out, because a failed", "c: left out, because b was left out", "1 ran, 1 failed, 2 left out"):
        assert words in said, words
    assert not list((project/"_out"/"notebooks").glob("a.ipynb"))
    assert run(steps(project), runs)[:2] == (0, ["a", "b", "c"]) and not list(project.rglob("*.failed.ipynb"))    # what failed runs again


def test_a_step_that_does_not_make_what_it_declares_fails(project, runs):
    code, _, said = run(Chain([Step("d", "d.ipynb", makes=("results/e.*",))], project, project/"_out"), runs)
    assert code == 1 and "ran to its end but did not make results/e.*" in said


def test_two_at_a_time_share_the_cores(project, runs):
    notebook(project/"nbs"/"p.ipynb", "name = ''", "import os, time; open(name, 'w').write(os.environ['OMP_NUM_THREADS'])\nwhile not os.path.exists('two' if name == 'one' else 'one'): time.sleep(.01)")
    pair = [Step(n, "p.ipynb", {"name": n}, makes=(n,), timeout=.2) for n in ("one", "two")]       # each waits for the other: one at a time would never end
    code, _, said = run(Chain(pair, project, project/"_out"), runs, jobs=2)
    assert code == 0 and (project/"one").read_text() == str(max(1, chain.cores() // 2))


def test_timeout(project, runs):
    slow = Chain([Step("d", "d.ipynb", {"wait": 60.}, timeout=.01)], project, project/"_out")
    began = time.time()
    code, _, said = run(slow, runs)
    assert code == 1 and time.time() - began < 15 and "its timeout" in said


def test_going_on_and_starting_over(project, runs):
    "After an interruption, and at first, a step may go on with what it left behind; after a change it must not."
    notebook(project/"nbs"/"t.ipynb", "resume = True\nrate = 1\nbreaks = False", "open('t.txt', 'w').write(str(resume))\nif breaks: 1/0")
    def train(**p): return Chain([Step("t", "t.ipynb", p, makes=("t.txt",), resume="resume")], project, project/"_out")
    def resumed(chain, **options): run(chain, runs, **options); return (project/"t.txt").read_text()
    assert resumed(train()) == "True"
    assert resumed(train(rate=2)) == "False"
    assert resumed(train(rate=2), force=True) == "False"
    (project/"t.txt").write_text("edited"); assert resumed(train(rate=2)) == "False"
    assert resumed(train(rate=2, breaks=True)) == "False"      # it breaks off
    assert resumed(train(rate=2, breaks=True)) == "True"       # and goes on
    assert resumed(train(rate=3, breaks=True)) == "False"      # but not with other settings


def test_parameters_are_refused_before_anything_starts(project):
    wrong = wrong_parameters([Step("a", "a.ipynb", {"numbr": 1}), Step("x", "a.ipynb", {"number": "1"}), Step("c", "c.ipynb", {"number": 1}), Step("l", "d.ipynb", {"wait": [1]}),
                              Step("n", "none.ipynb"), Step("m", "foco.decomposers.store", {"n_image": 3, "out": "x"}), Step("r", "d.ipynb", resume="resume"), Step("ok", "d.ipynb", {"wait": 2})], project)
    for complaint, words in zip(wrong, ("'numbr'; did you mean number", "number='1' of a.ipynb is str; expected int", "it has no cell tagged parameters", "wait=[1] of d.ipynb is list", "no notebook", "'n_image'; did you mean n_images", "'resume'"), strict=True):
        assert words in complaint
    notebook(project/"nbs"/"untagged.ipynb", "number = 1", tagged=False)               # what nbdev_clean leaves without its setting
    assert "no cell tagged" in wrong_parameters([Step("u", "untagged.ipynb", {"number": 2})], project)[0]


def test_real_kernels_take_every_parameter_and_name_their_errors(tmp_path):
    "Through papermill: each injected value arrives as it was given; then a failure in a real kernel."
    notebook(tmp_path/"nbs"/"take.ipynb", "number = 1\nname = 'x'\nrate = .5\non = False\nnothing = 'something'\nout = ''", TAKE)
    notebook(tmp_path/"nbs"/"fail.ipynb", "pass", "def f(): raise KeyError('deep')", "f()")
    given = dict(number=-3, name="it's {braces} \\ and \"quotes\" é", rate=1e-5, on=True, nothing=None, out="taken.json")
    said = []
    code = Chain([Step("take", "take.ipynb", given, makes=("taken.json",)), Step("fail", "fail.ipynb")], tmp_path, tmp_path/"_out {x}").run(jobs=2, say=said.append)
    assert json.loads((tmp_path/"taken.json").read_text(encoding="utf-8")) == {k: v for k, v in given.items() if k != "out"}
    assert code == 1 and "code cell 3 of fail.ipynb" in "\n".join(said) and "KeyError: 'deep'" in "\n".join(said)


def test_a_kernel_that_dies_and_a_notebook_that_names_none(tmp_path):
    "Killed as by the system that runs out of memory: no hanging, a failure that names the cell, nothing under the plain name. And the runner says which kernel and language, if the notebook does not."
    notebook(tmp_path/"nbs"/"die.ipynb", "pass", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    notebook(tmp_path/"nbs"/"bare.ipynb", "number = 1", "open('number.txt', 'w').write(str(number))")
    bare = nbformat.read(tmp_path/"nbs"/"bare.ipynb", 4); bare.metadata.clear(); nbformat.write(bare, tmp_path/"nbs"/"bare.ipynb")
    said = []
    chain_ = Chain([Step("die", "die.ipynb"), Step("table", "bare.ipynb", needs=("die",)), Step("bare", "bare.ipynb", {"number": 2}, makes=("number.txt",))], tmp_path, tmp_path/"_out")
    assert chain_.run(jobs=2, say=said.append) == 1 and (tmp_path/"number.txt").read_text() == "2"
    for words in ("die: FAILED", "the last that began was code cell 2 of die.ipynb, below 'Work'", "Kernel died", "table: left out, because die failed", "1 ran, 1 failed, 1 left out"): assert words in "\n".join(said), words
    assert sorted(p.name for p in (tmp_path/"_out"/"notebooks").iterdir()) == ["bare.ipynb", "die.failed.ipynb"]


def test_an_interrupted_run_ends_its_children_and_goes_on(project):
    "As a program, with a real kernel: after a signal no process is left, what was finished stays, the rest runs."
    import psutil
    notebook(project/"nbs"/"d.ipynb", "wait = 60.", "import os, time; open('pid.unfinished', 'w').write(str(os.getpid())); os.rename('pid.unfinished', 'pid'); time.sleep(wait if not os.path.exists('go') else 0); open('d.txt', 'w').write('d')")
    (project/"settings.ini").write_text("")
    program = project/"program.py"
    program.write_text("import sys\nfrom pathlib import Path\nfrom foco import reproduce\nfrom foco.chain import Step\n"
                       "reproduce.toyworld_steps = lambda *a, **k: [Step('m', 'foco.decomposers.store', dict(data='nowhere', out='x'), minutes=.01), Step('d', 'd.ipynb', makes=('d.txt',))]\nsys.exit(reproduce.main(sys.argv[1:]))\n")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    shutil.rmtree(project/"foco")        # the project's own, not the tiny one
    ours = subprocess.Popen([sys.executable, str(program), "--only", "d"], cwd=project, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until = time.time() + 60
    while not (project/"pid").exists() and time.time() < until and ours.poll() is None: time.sleep(.05)
    kernel = int((project/"pid").read_text())
    ours.send_signal(signal.SIGTERM)
    said = ours.communicate(timeout=30)[0]
    assert ours.returncode == 1 and "the same command goes on" in said and not psutil.pid_exists(kernel)
    (project/"go").write_text("")
    again = subprocess.run([sys.executable, str(program), "--only", "d"], cwd=project, env=env, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0 and "did not finish" in again.stdout and (project/"d.txt").exists()


# ---- the command, on the real chain

@pytest.fixture
def here(monkeypatch): monkeypatch.chdir(ROOT/"nbs")       # anywhere in the project


def test_list_and_dry_run(here, capsys, tmp_path):
    assert reproduce.main(["--list", "--out", str(tmp_path/"run")]) == 0
    shown = capsys.readouterr().out
    for name in ("train/default-seed0", "train/paper-seed2", "evaluate/training-free", "evaluate/paper-seed1", "baselines/seed1", "baselines/foco-seed2", "visualize", "performance", "paper/composing", "ablations/centred-seed2", "performance/measure"): assert name in shown
    assert reproduce.main(["--dry-run", "--out", str(tmp_path/"run"), "--only", "evaluate/default-seed0"]) == 0
    assert [l.split()[0] for l in capsys.readouterr().out.splitlines()] == ["step", "train/default-seed0", "evaluate/default-seed0"]
    assert not (tmp_path/"run").exists()        # nothing is written


def test_what_would_have_no_effect_is_refused(here, capsys):
    for argv, words in ((["--backbone", "ViT-L-14"], "--backbone is for --data official"), (["--data", "official"], "needs --root"), (["--data", "official", "--root", ".", "--quick"], "--quick is for"), (["--jobs", "0"], "expected 1 or more")):
        with pytest.raises(SystemExit) as stop: reproduce.main(argv)
        assert stop.value.code == 2 and words in capsys.readouterr().err
    assert reproduce.main(["--only", "trian"]) == 2 and "did you mean train" in capsys.readouterr().err


def test_a_misspelled_parameter_of_the_real_chain_starts_nothing(here, capsys, monkeypatch, tmp_path):
    real = reproduce.toyworld_steps
    monkeypatch.setattr(reproduce, "toyworld_steps", lambda *a, **k: [*real(*a, **k), Step("mine", "05_train.ipynb", {"batch_sz": 4})])
    assert reproduce.main(["--out", str(tmp_path/"run")]) == 2 and "mine: 05_train.ipynb has no parameter 'batch_sz'; did you mean batch_size" in capsys.readouterr().err
    assert not (tmp_path/"run").exists()


def test_everything_that_the_real_data_lack_is_named_at_once(here, capsys, monkeypatch, tmp_path):
    import huggingface_hub
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: True)
    (tmp_path/"data"/"cc3m"/"train").mkdir(parents=True)
    (tmp_path/"data"/"cirr").mkdir()
    assert reproduce.main(["--data", "official", "--root", str(tmp_path/"data"), "--out", str(tmp_path/"run"), "--pretrained", "openai"]) == 2
    said = capsys.readouterr().err
    for words in ("7 things are missing", "weights: nothing on this computer for ViT-L-14", "fashioniq: no such folder", "cirr: val: no cirr/captions/cap.rc2.val.json", "circo: no such folder", "genecis: no such folder", "training pictures: no .tar files", "decompositions: no decomposition store"): assert words in said, words
    assert not (tmp_path/"run").exists()


def test_official_steps_run_where_they_should(tmp_path):
    chain_ = Chain(reproduce.official_steps(str(tmp_path), "BLIP-base", seeds=(0, 1)), ROOT, tmp_path/"run")
    train, score, hidden = (chain_.by[n] for n in ("train/paper-seed1", "evaluate/paper-seed1/circo-val", "evaluate/paper-seed1/circo-test"))
    assert train.parameters["data"] == f"{tmp_path}/cc3m/train" and train.parameters["scale"] == "paper" and train.parameters["seed"] == 1 and f"{tmp_path}/cc3m/pairs" in train.reads
    assert score.parameters["root"] == f"{tmp_path}/circo" and score.parameters["checkpoint"] == train.makes[0] and score.needs == ("train/paper-seed1",)
    assert score.makes == ("results/official/BLIP-base/paper-seed1/CIRCO-val*.json",) and hidden.makes == ("results/official/BLIP-base/paper-seed1/circo-test",)
    assert chain_.by["train/paper-3a-seed0"].parameters["decompositions"] == f"{tmp_path}/cc3m/pairs-rules" and chain_.by["train/paper-3a-seed0"].needs == ("decompose/rules",)


def test_nothing_is_written_outside_the_folders_that_were_named(tmp_path):
    for s in reproduce.toyworld_steps(True, str(tmp_path/"into"), str(tmp_path/"out")):
        assert all(str(m).startswith(str(tmp_path)) for m in s.makes) and all(str(s.parameters.get(k) or tmp_path).startswith(str(tmp_path)) for k in ("out", "figures")), s
