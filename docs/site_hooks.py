"""What the site needs besides the pages: links to files of the repository, which the site does not have, become their names. Pages without sections give
the place of their table of contents to what their commands print. Whole commands in tables may be broken, unlike names."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)]*)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)
    if not re.search("^##", markdown, re.M):
        page.meta.setdefault("hide", ["toc"])

    def named(link: re.Match[str]) -> str:
        if not posixpath.normpath(posixpath.join(folder, link[2])).startswith("../"):
            return link[0]  # another page
        return link[1] if link[1].startswith("`") else f"`{link[1]}`"

    return _LINK.sub(named, markdown)


def on_page_content(html: str, **_: Any) -> str:
    return re.sub(r"<td><code>(?=(?:phalanx|torchrun) )", '<td><code class="command">', html)
