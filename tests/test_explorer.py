"""The explorer: what it remembers and finds, typing faster than it can search, and once for real, in JupyterLab in a browser."""
import asyncio, importlib.util, io, json, os, re, shutil, signal, socket, subprocess, sys, time, urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import nbformat, pytest
from PIL import Image

from foco.explorer import Explorer
from foco.galleries.gallery import Gallery
from foco.search import Search, open_composer
from foco.toyworld.benchmark import load_benchmark

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def composer(on_cpu): return open_composer(device="cpu")


@pytest.fixture(scope="module")
def gallery(composer, tmp_path_factory):
    "Drawings as files; one has a name that looks like HTML."
    folder = tmp_path_factory.mktemp("drawings")
    for n, picture in enumerate(load_benchmark("val", 1).images): picture.save(folder/(f"{n:02d}.png" if n else "<b onclick='x'>&.png"))
    return Gallery.build(folder, composer.backbone)


@pytest.fixture
def explorer(gallery, composer, tmp_path): return Explorer(Search(gallery, composer), k=5, starts=4, folder=tmp_path)


# ---- the logic, without widgets

def test_a_trail_leads_back_to_exactly_what_was_seen(explorer):
    seen = []
    for text in ("make it red", "at night", "two more cups"):
        explorer.set_text(text); seen.append((explorer.reference.row, text, explorer.results))
        explorer.follow(explorer.results["row"][1])
    assert [s.text for s in explorer.trail] == [text for _, text, _ in seen] and explorer.text == ""
    for n in (2, 1, 0):
        explorer.back(n); row, text, results = seen[n]
        assert (explorer.reference.row, explorer.text, len(explorer.trail)) == (row, text, n)
        assert explorer.results.equals(results)


def test_another_reference_keeps_the_text_and_a_step_only_if_words_were_there(explorer):
    explorer.set_reference(3); assert explorer.trail == []
    explorer.set_text("at night"); before = explorer.results
    explorer.set_reference(7)
    assert explorer.text == "at night" and [(s.reference.row, s.text) for s in explorer.trail] == [(3, "at night")] and not explorer.results.equals(before)


@pytest.mark.parametrize("how", ["bytes", "file", "name", "row"])
def test_the_same_reference_from_anywhere_finds_the_same_and_never_itself(explorer, gallery, how):
    path = gallery.path(5)
    explorer.set_text("make it red"); expected = Search(gallery, explorer.composers["FoCo"]).query(path, "make it red", k=5)
    explorer.set_reference({"bytes": path.read_bytes(), "file": path, "name": gallery.names[5], "row": 5}[how])
    assert explorer.results["row"].tolist() == expected["row"].tolist() and 5 not in explorer.results["row"].tolist()


def test_export_says_everything_and_never_overwrites(explorer, gallery):
    explorer.set_text("make it red"); explorer.follow(explorer.results["row"][0]); explorer.set_text("at night"); explorer.compare("text only")
    first, second = explorer.export(), explorer.export()
    said = json.loads(first.read_text(encoding="utf-8"))
    assert first != second and said == json.loads(second.read_text(encoding="utf-8"))
    assert said["gallery"]["pictures"] == len(gallery) and said["reference"]["sha256"] == gallery.contents[explorer.reference.row]
    assert said["texts"] == ["at night"] and said["trail"][0]["texts"] == ["make it red"] and said["compared"]["method"] == "text only"
    assert [r["file"] for r in said["results"]] == explorer.results["file"].tolist()


@pytest.mark.parametrize("reference", [3, None])
def test_turns_and_unwanted_texts_are_those_of_a_search(explorer, reference):
    search = Search(explorer.gallery, explorer.composers["FoCo"])
    explorer.set_reference(reference); explorer.set_text("at night"); explorer.then(); explorer.set_text("make it red"); explorer.set_without(["a tree", "a fish"])
    expected = search.query(reference, ["at night", "make it red"], ["a tree", "a fish"], k=5)
    assert explorer.results["row"].tolist() == expected["row"].tolist() and explorer.results["score"].tolist() == pytest.approx(expected["score"].tolist(), abs=1e-5)
    said = json.loads(explorer.export().read_text(encoding="utf-8")); assert (said["texts"], said["without"]) == (["at night", "make it red"], ["a tree", "a fish"])
    row = explorer.follow(explorer.results["row"][0]) is not None and explorer.reference.row
    assert (explorer.text, explorer.turns, explorer.without) == ("", (), ("a tree", "a fish")) and row == expected["row"][0]    # what is unwanted stays so
    explorer.set_without(""); explorer.back(0)
    assert (explorer.text, explorer.turns, explorer.without, explorer.results["row"].tolist()) == ("make it red", ("at night",), ("a tree", "a fish"), expected["row"].tolist())
    assert explorer.take_back()["row"].tolist() == search.query(reference, "at night", ["a tree", "a fish"], k=5)["row"].tolist()


def test_what_fails_changes_nothing(explorer):
    explorer.set_text("make it red"); before = {k: v for k, v in explorer.__dict__.items() if k != "milliseconds"}
    for wrong in (lambda: explorer.set_reference(b"no picture", "x.png"), lambda: explorer.set_method("x"), lambda: explorer.compare("x"), lambda: explorer.set_k(99), lambda: explorer.set_text(None), explorer.take_back):
        with pytest.raises((OSError, ValueError, TypeError)): wrong()
    assert all(explorer.__dict__[k] is v for k, v in before.items())


def test_a_query_takes_less_than_300_milliseconds(explorer):
    explorer.compare("average"); explorer.set_text("at night"); explorer.then(); explorer.set_without("a tree"); took = []
    for n in range(4): begun = time.process_time(); explorer.set_text("make the car red"[:8 + n]); took.append(time.process_time() - begun)
    assert min(took) < .3 # seconds of the processor: other programs may run on this computer


# ---- the widgets, without a browser

def words_of(view): return view.shown.value + view.said.value + view.starts.style.value + view.results.heading.value


def test_many_keys_make_one_search_and_a_press_comes_after_what_was_typed(explorer, monkeypatch):
    asked, ask = [], Explorer.ask
    monkeypatch.setattr(Explorer, "ask", lambda self, method, reference, texts, *more: asked.append(texts) or ask(self, method, reference, texts, *more))
    explorer.show(); view, explorer.delay = explorer.view, .05
    async def type_fast():
        for n in range(1, 9): view.text.value = "at night"[:n]; await asyncio.sleep(.001)
        assert asked == []
        await asyncio.sleep(.3); assert asked == [["at night"]]
        view.text.value = "at night, red"; row = explorer.results["row"][0]
        view.results.buttons[0].click()                     # before the timer has run
        assert asked == [["at night"], ["at night, red"], []] and (explorer.reference.row, explorer.trail[-1].text, view.text.value) == (row, "at night, red", "")
        await asyncio.sleep(.1); assert len(asked) == 3     # and it does not run any more
    asyncio.run(type_fast())


def test_a_search_never_overwrites_what_was_typed_since_it_began(explorer, monkeypatch):
    "In JupyterLab, what is typed may arrive while the search for its beginning runs, in another thread."
    explorer.show(); view, ask = explorer.view, Explorer.ask
    def typed_meanwhile(self, *question): view._drawing = True; view.without.value, view.text.value = "a tree; a fish", "at night"; view._drawing = False; return ask(self, *question) # no timer yet
    monkeypatch.setattr(Explorer, "ask", typed_meanwhile)
    view.text.value = "at"; assert (view.text.value, view.without.value, explorer.text, explorer.without) == ("at night", "a tree; a fish", "at", ())
    monkeypatch.setattr(Explorer, "ask", ask)
    view._ask(); assert (explorer.text, explorer.without) == ("at night", ("a tree", "a fish"))
    explorer.set_without(()); explorer.set_text("make it red"); assert (view.text.value, view.without.value) == ("make it red", "")        # but the widgets follow code


def test_methods_side_by_side_and_sizes(explorer):
    explorer.show(); view = explorer.view
    view.text.value = "make it red"; view.other.value = "text only"; view.k.value = 7
    assert (explorer.other, explorer.k, len(view.results.row.children), len(view.compared.row.children)) == ("text only", 7, 7, 7)
    view.method.value = "average"; assert "does not look" in view.shown.value and explorer.method == "average"
    view.other.value = ""; assert view.compared.box.layout.display == "none"
    explorer.set_method("FoCo"); explorer.set_text("at night"); assert (view.method.value, view.text.value) == ("FoCo", "at night") # the widgets follow code, too


def test_an_upload_a_broken_one_and_names_that_look_like_html(explorer, gallery):
    explorer.show(); view = explorer.view; out = io.BytesIO(); Image.new("RGB", (300, 200), "red").save(out, "png")
    view.upload.value = ({"name": "<i>mine</i>.png", "type": "image/png", "size": 1, "content": memoryview(out.getvalue()), "last_modified": __import__("datetime").datetime.now()},)
    assert explorer.reference.name == "<i>mine</i>.png" and "<i>" not in words_of(view) and "&lt;i&gt;mine" in view.shown.value
    view.upload.value = ({"name": "bad.png", "type": "image/png", "size": 1, "content": memoryview(b"<html>"), "last_modified": __import__("datetime").datetime.now()},)
    assert "bad.png" in view.said.value and 'role="alert"' in view.said.value and explorer.reference.name == "<i>mine</i>.png"
    view.text.value = "<script>alert(1)</script>"; explorer.set_reference(gallery.names[next(n for n, name in enumerate(gallery.names) if "<" in name)])
    assert "<b " not in words_of(view) and "<script" not in words_of(view) and not re.search(r"url\((?!data:image/)|https?:", words_of(view))


def test_everything_can_be_reached_and_has_a_name(explorer):
    explorer.show(); view = explorer.view; explorer.set_text("make it red"); explorer.follow(explorer.results["row"][0])
    buttons = [b for row in (view.starts, view.trail, view.results) for b in row.row.children] + [view.then, view.take_back, view.none, view.save, view.upload]
    assert len(buttons) == 4 + 1 + 5 + 5 and all(b.description and b.tooltip and b.tabbable is not False for b in buttons)
    assert all(w.description and w.tooltip for w in (view.text, view.without, view.method, view.other, view.k)) and view.shown.value.count('alt="') == 1 and 'aria-live="polite"' in view.said.value
    view.save.click(); assert "query-001.json" in view.said.value


def test_a_picture_that_is_gone_leaves_its_button(composer, tmp_path):
    for n in range(4): Image.new("RGB", (40, 40), (60 * n, 0, 0)).save(tmp_path/f"{n}.png")
    explorer = Explorer(Search(Gallery.build(tmp_path, composer.backbone), composer)); explorer.show(); (tmp_path/"3.png").unlink(); explorer._thumbnails.clear()
    explorer.set_text("at night"); assert len(explorer.view.results.row.children) == 3 and explorer._thumb(3) == ""
    explorer.view.results.buttons[explorer.results["row"].tolist().index(3)].click(); assert explorer.view.said.value.count('role="alert"') == 1 and explorer.reference.row == 0
    explorer.picture()


# ---- in a browser

CELL = """import torch; torch.set_num_threads(1)
from foco.explorer import Explorer
from foco.galleries.gallery import Gallery
from foco.galleries.sources import DatasetPictures
from foco.search import Search, open_composer
from foco.toyworld.benchmark import load_benchmark
composer, bench = open_composer(device="cpu"), load_benchmark("val", 1)
gallery = Gallery.build(DatasetPictures([{"picture": p, "name": n} for n, p in zip(bench.ids, bench.images)], names="name"), composer.backbone)
Explorer(Search(gallery, composer))"""
# what JupyterLab itself says on its console, whatever the notebook
NOISE = re.compile(r"favicon|/api/(?:me|contents/.*checkpoints)|/lsp/|Translation|ResizeObserver loop|Error activating plugin: @jupyterlab/|debugger state")


def start_kernel(lab):
    "Wait for the server, and start the notebook's kernel, which imports foco meanwhile."
    for _ in range(600):
        assert lab.server.poll() is None, lab.log.read_text()[-2000:]
        try: urllib.request.urlopen(f"{lab.url}/api/status", timeout=2).close(); break
        except OSError: time.sleep(.1)
    said = json.dumps({"path": "explore.ipynb", "name": "explore.ipynb", "type": "notebook", "kernel": {"name": "python3"}}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{lab.url}/api/sessions", said, {"Content-Type": "application/json"}), timeout=60).close()


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    "JupyterLab on the loopback, with settings of its own, and the kernel of a notebook. Both start with the first test of this file, so that they are there for the last; `None` where it is not installed."
    if importlib.util.find_spec("jupyterlab") is None: yield None; return
    with socket.socket() as s: s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
    tmp_path = tmp_path_factory.mktemp("lab"); (root := tmp_path/"root").mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)], metadata=dict(kernelspec=dict(name="python3", display_name="python3", language="python"))), root/"explore.ipynb")
    (quiet := tmp_path/"settings"/"@jupyterlab"/"apputils-extension").mkdir(parents=True)
    (quiet/"notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    own = {k: str(tmp_path/v) for k, v in dict(JUPYTER_CONFIG_DIR="config", JUPYTER_RUNTIME_DIR="runtime", JUPYTERLAB_SETTINGS_DIR="settings", JUPYTERLAB_WORKSPACES_DIR="workspaces", IPYTHONDIR="ipython", JUPYTER_DATA_DIR="data").items()}
    (spare := tmp_path/"config"/"labconfig").mkdir(parents=True) # extensions that nothing here needs, and that take time to load
    (spare/"page_config.json").write_text(json.dumps({"disabledExtensions": {f"@jupyterlab/{name}-extension": True for name in ("debugger", "extensionmanager", "terminal", "csvviewer", "pdf", "vega5", "mermaid", "workspaces", "hub", "help", "settingeditor")}}))
    (begin := tmp_path/"ipython"/"profile_default"/"startup").mkdir(parents=True); (begin/"0.py").write_text("import foco.explorer") # while the page is loaded
    argv = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0", "--ServerApp.token=", "--ServerApp.password=", "--ServerApp.disable_check_xsrf=True", f"--ServerApp.root_dir={root}"]
    with open(tmp_path/"lab.log", "w") as log: server = subprocess.Popen(argv, cwd=root, stdout=log, stderr=log, start_new_session=True, env={**os.environ, **own, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    lab, pool = SimpleNamespace(url=f"http://127.0.0.1:{port}", server=server, log=tmp_path/"lab.log"), ThreadPoolExecutor(1)
    lab.ready = pool.submit(start_kernel, lab)
    try: yield lab
    finally:
        server.terminate()                                  # stops its kernels, too
        try: server.wait(10)
        except subprocess.TimeoutExpired: os.killpg(server.pid, signal.SIGKILL); server.wait()
        pool.shutdown()


@pytest.fixture(scope="module", autouse=True)
def lab_starts_early(request):
    if any(item.name == "test_in_jupyterlab" for item in request.session.items): request.getfixturevalue("lab")


@pytest.fixture
def page():
    "A page of a headless Chromium that is installed; it reaches the loopback only. `page.errors`, `page.outside` say what went wrong."
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install playwright")
    chromium = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
    if chromium is None: pytest.skip("no Chromium on this computer")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=dict(width=1280, height=1000)); page.errors, page.outside = [], []
        page.on("console", lambda m: page.errors.append(f"{m.text} {m.location.get('url', '')}") if m.type == "error" else None)
        page.on("pageerror", lambda e: page.errors.append(str(e)))
        def guard(route): (route.continue_ if "//127.0.0.1:" in route.request.url or route.request.url.startswith(("data:", "blob:")) else lambda: (page.outside.append(route.request.url), route.abort()))()
        page.route("**/*", guard)
        yield page
        browser.close()


def test_in_jupyterlab(lab, page):
    if lab is None: pytest.skip("JupyterLab is not installed: pip install 'foco[notebooks]'")
    lab.ready.result(120); shots = ROOT/"_out"; shots.mkdir(exist_ok=True)
    page.goto(f"{lab.url}/doc/tree/explore.ipynb", timeout=60_000, wait_until="commit")
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for(timeout=60_000)
    box = page.locator(".foco-explorer")
    page.locator(".jp-Notebook-ExecutionIndicator[data-status='idle']").wait_for(timeout=60_000)   # a cell that is run before the kernel is there is not run, or the kernel is started anew
    page.locator(".jp-Notebook .cm-content").first.click(); page.keyboard.press("Control+Enter"); box.wait_for(timeout=60_000)
    found = box.locator(".foco-thumb", has_text="(")
    results, field, without = found.all_inner_texts, box.get_by_label("Text", exact=True), box.get_by_label("Without")
    reference = lambda name: box.locator("figcaption", has_text=re.compile(f"^{name}$")).first.wait_for(timeout=20_000)
    looks = lambda text: box.locator(f"img[alt='where FoCo looks under “{text}”']").wait_for(timeout=20_000) # what was typed has been searched for
    def until(true):
        for _ in range(200):
            if true(): return
            page.wait_for_timeout(100)
        pytest.fail("it did not come to that")
    def steady(): # the results, once they stay for a moment: what one search changes comes in several messages
        now, same = results(), 0
        while same < 4: page.wait_for_timeout(60); now, same = (now, same + 1) if (new := results()) == now else (new, 0)
        return now
    found.nth(9).wait_for(timeout=20_000); before = results(); assert len(before) == 10
    was = box.locator("figcaption").first.inner_text()

    field.click(); page.keyboard.type("the same on snow", delay=20); looks("the same on snow")
    after = steady(); assert after[:5] != before[:5]
    box.get_by_label("Compare with").select_option("average"); box.get_by_text("Results of average").wait_for(timeout=10_000)
    page.keyboard.press("Tab"); box.get_by_label("Compare with").select_option("nothing"); box.get_by_text("Results of average").wait_for(state="hidden", timeout=10_000)

    # a turn, and something unwanted, by keyboard alone: from the text, Tab leads to "Then…", which leads back into the text
    field.focus(); page.keyboard.press("Tab"); page.keyboard.press("Enter"); box.locator(".foco-turns li", has_text="the same on snow").wait_for(timeout=10_000)
    page.wait_for_function("document.activeElement.matches('.foco-explorer input') && document.activeElement.value == ''")
    page.keyboard.type("add a red car"); looks("add a red car"); before = steady(); assert before != after
    for _ in range(3): page.keyboard.press("Tab")           # over "Then…" and "Take back"
    assert without.evaluate("e => e === document.activeElement"); page.keyboard.type("a tree; a fish")
    until(lambda: results() != before)
    two = steady(); assert two != before; box.screenshot(path=shots/"explorer.png")
    box.get_by_role("button", name="Export query").click(); box.get_by_text("written: query-001.json").wait_for(timeout=10_000)
    said = json.loads((lab.log.parent/"root"/"query-001.json").read_text(encoding="utf-8"))
    assert said["texts"] == ["the same on snow", "add a red car"] and said["without"] == ["a tree", "a fish"] and [r["file"] for r in said["results"]][0] == two[0].split("\n")[1]
    box.get_by_role("button", name="Take back").click(); looks("the same on snow"); assert field.input_value() == "the same on snow" and box.locator(".foco-turns").count() == 0
    without.fill(""); until(lambda: results() == after)

    first = after[0].split("\n")[1]
    box.locator(".foco-thumb", has_text="1  (").first.focus(); page.keyboard.press("Enter"); reference(first); assert field.input_value() == "" # followed, by keyboard
    cut = page.evaluate("""() => [...document.querySelectorAll('.foco-explorer .foco-thumb, .foco-explorer select, .foco-explorer label')].filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)""")
    box.locator(".foco-thumb", has_text="the same on").click(); reference(was); looks("the same on snow")        # the trail
    assert field.input_value() == "the same on snow"; until(lambda: results() == after)
    assert not cut and not page.outside and not [e for e in page.errors if not NOISE.search(e)], (cut, page.outside, page.errors)
