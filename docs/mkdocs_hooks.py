"""Adds pages from outside docs/ to the site that mkdocs builds.

The added pages are CONTRIBUTING.md, CHANGELOG.md, scripts/results, and README.md, which becomes the home page.
"""

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).parents[1]
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
OUTSIDE |= {f"scripts/results/{path.name}": f"results/{path.name}" for path in REPOSITORY.glob("scripts/results/*")}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Removes the script that mkdocs' offline plugin loads from the network.

    Only the search on file:// pages needs this script.
    """
    config.extra["polyfills"] = []
    return config


def on_files(files: Files, config: Any) -> Files:
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(REPOSITORY / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Changes each link to a Markdown file of the repository into a link to the file's page on the site.

    A link to a source file is replaced by the link's text.
    """
    here = page.file.src_uri
    source = next((path for path, name in OUTSIDE.items() if name == here), f"docs/{here}")

    def link(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        path = normpath(join(dirname(source), target))
        name = OUTSIDE.get("scripts/results/README.md" if path == "scripts/results" else path)
        name = path.removeprefix("docs/") if name is None and path.startswith("docs/") else name
        if name is None:
            return text
        return f"{image}[{text}]({relpath(name, dirname(here) or '.')}{anchor or ''})"

    return LINK.sub(link, markdown)
