"""Point the notebooks, and the badges that open them in Colab, at the repository they are published in:

    python examples/colab.py [https://github.com/OWNER/NAME] [BRANCH]

Without an address that of the git remote `origin` counts. Run it again after a move; nothing else knows the address."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/index.md")
BADGE = "<!-- badge -->"  # begins the line that is written here, below the title
COLAB = "https://colab.research.google.com"


def address(text: str) -> str:
    """https address of a GitHub repository, however git spells it."""
    found = re.fullmatch(r"(?:https://github\.com/|git@github\.com:)([\w.-]+)/([\w.-]+?)(?:\.git)?/?", text.strip())
    if not found:
        sys.exit(f"error: {text.strip()!r} is no repository on GitHub, from where Colab opens notebooks")
    return "https://github.com/" + "/".join(found.groups())


def badge(repository: str, branch: str, notebook: str) -> str:
    """The marked line with a badge that opens a notebook."""
    place = repository.removeprefix("https://github.com/")
    link = f"{COLAB}/github/{place}/blob/{branch}/examples/{notebook}"
    return f"{BADGE} [![Open in Colab]({COLAB}/assets/colab-badge.svg)]({link})"


def with_badge(text: str, line: str) -> str:
    """The text with the badge's line: in the place of an earlier one, or below the title."""
    if BADGE in text:
        return re.sub(rf"^{re.escape(BADGE)}.*", lambda _: line, text, flags=re.MULTILINE)
    return re.sub(r"^# .*$", lambda title: f"{title[0]}\n\n{line}", text, count=1, flags=re.MULTILINE)


def point(root: Path, repository: str, branch: str) -> None:
    """Write the address into every notebook, and the badges into notebooks and pages."""
    for path in sorted((root / "examples").glob("*.ipynb")):
        book = json.loads(path.read_text(encoding="utf-8"))
        title = book["cells"][0]
        text = with_badge("".join(title["source"]), badge(repository, branch, path.name))
        title["source"] = text.splitlines(keepends=True)
        for cell in book["cells"]:
            text = "".join(cell["source"])
            text = re.sub(r'^REPOSITORY = ".*?"', f'REPOSITORY = "{repository}"', text, flags=re.MULTILINE)
            cell["source"] = text.splitlines(keepends=True)
        path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for page in PAGES:
        text = (root / page).read_text(encoding="utf-8")
        text = with_badge(text, badge(repository, branch, "quickstart.ipynb"))
        (root / page).write_text(text, encoding="utf-8")


def main(words: list[str]) -> None:
    """Run the command. Its arguments, an address and a branch, may be left out."""
    if words and words[0]:
        given = words[0]
    else:
        command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
        found = subprocess.run(command, capture_output=True, text=True)
        if found.returncode:
            sys.exit("error: give the repository's address; git knows no remote `origin`")
        given = found.stdout
    point(ROOT, address(given), words[1] if len(words) > 1 else "main")


if __name__ == "__main__":
    main(sys.argv[1:])
