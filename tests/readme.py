"""README.md is nbs/index.ipynb, as GitHub and PyPI can show it.

    python tests/readme.py                    write README.md
    python tests/readme.py --check            exit 1 if README.md is not what the notebook gives
    python tests/readme.py --command tests    print the command marked <!-- command: tests -->
"""
import json, posixpath, re, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INDEX, README = ROOT/"nbs"/"index.ipynb", ROOT/"README.md"
NOTE = "<!-- Made from nbs/index.ipynb by tests/readme.py: edit the notebook, not this file. -->\n"


def fence(text, language):
    "A fenced block that is longer than any fence within `text`."
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    text = text.strip("\n").rstrip() # but keep the first line's indent: tables need it
    return f"{ticks}{language}\n{text}\n{ticks}"


def rebase(markdown):
    "Turn links relative to nbs/ into links relative to the root, outside fenced blocks."
    def move(m):
        if re.match(r"\w+:|#|/", m[2]): return m[0]
        return f"{m[1]}{posixpath.normpath(posixpath.join('nbs', m[2]))})"
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.M | re.S)
    return "".join(re.sub(r"(\]\()([^)\s]+)\)", move, p) if i % 2 == 0 else p for i, p in enumerate(parts))


def output_text(output):
    "What an output says in plain text or markdown; pictures and HTML have no place here."
    data = output.get("data", {})
    if "text/markdown" in data: return rebase("".join(data["text/markdown"])).strip()
    text = "".join(output.get("text") or data.get("text/plain") or "")
    return fence(text, "text") if text.strip() else ""


def code_blocks(cell):
    "Source and text outputs of a code cell; nothing for a hidden one."
    lines = "".join(cell["source"]).splitlines()
    directives = [re.sub(r"\W", "", l) for l in lines if re.match(r"\s*#\s*\|", l)]
    source = "\n".join(l for l in lines if not re.match(r"\s*#\s*\|", l)).strip()
    if "hide" in directives or not source: return []
    return [fence(source, "python")] + [t for t in map(output_text, cell["outputs"]) if t]


def render(notebook=INDEX):
    "The text of README.md."
    blocks = [NOTE.strip()]
    for cell in json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "markdown": blocks.append(rebase("".join(cell["source"])).strip())
        if cell["cell_type"] == "code": blocks += code_blocks(cell)
    return "\n\n".join(b for b in blocks if b) + "\n"


def command(name, readme=README):
    "The one command that README.md marks with <!-- command: name -->."
    found = re.findall(rf"<!-- command: {re.escape(name)} -->\s*```\w*\n(.*?)```",
                       Path(readme).read_text(encoding="utf-8"), flags=re.S)
    if len(found) != 1: raise ValueError(f"{readme}: {len(found)} commands marked {name!r}, expected one")
    return found[0].strip()


def main(args):
    "Write, check or quote; returns the exit status."
    if args[:1] == ["--command"] and len(args) == 2: print(command(args[1]))
    elif args == ["--check"]:
        if README.read_text(encoding="utf-8") != render():
            print("README.md is not what nbs/index.ipynb gives: run `python tests/readme.py`", file=sys.stderr)
            return 1
    elif not args: README.write_text(render(), encoding="utf-8")
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
