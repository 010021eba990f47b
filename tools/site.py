"""Hooks of the documentation's site (mkdocs.yml): its home page is the README, links to files that the site does not
have become their paths, and arguments in docstrings become lists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the README as the home page, with its links relative to `docs`."""
    home = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](").replace('src="docs/', 'src="')
    files.append(File.generated(config, "index.md", content=home))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Replace links to source files and results by their paths in the repository."""
    folder = Path(page.file.src_uri).parent

    def resolve(match: re.Match[str]) -> str:
        text, path = match[1], match[2]
        inside = files.get_file_from_path((folder / path).as_posix())
        if "://" in path or path.startswith("mailto:") or inside is not None:
            return match[0]
        name = (Path("docs") / folder / path).as_posix() if page.file.src_uri != "index.md" else path
        name = re.sub(r"(^|/)[^/]+/\.\./", r"\1", name)
        return text if text.strip("`") == name else f"{text} (`{name}`)"

    return LINK.sub(resolve, markdown)


ARGUMENT = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (?=\S)")


class Reference(griffe.Extension):
    """The API as readers call it. Docstrings explain arguments in lines such as `layers: …`, which Markdown would join
    to one paragraph. `LM.run` and its like take what `LM._read_call` takes."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = "\n\n".join(map(_listed, obj.docstring.value.split("\n\n")))

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        if cls.path == "patchclamp.lm.LM":
            for name in ("run", "arun", "stream"):
                cls[name].parameters = cls["_read_call"].parameters
                cls.overloads.pop(name, None)
                cls[name].overloads = None


def _listed(paragraph: str) -> str:
    """The paragraph, with a Markdown list for its lines of arguments."""
    lines = []
    for line in paragraph.split("\n"):
        if name := ARGUMENT.match(line):
            lines.append(f"- **{name[1]}**: {line[name.end() :]}")
        elif lines and lines[-1].startswith(("- ", "    ")) and not line.startswith(" "):
            lines += ["", line]
        else:
            lines.append(line)
    return "\n".join(lines)
