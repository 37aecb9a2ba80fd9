"""What the site needs besides the pages: links to files of the repository, which the site does not have, become their names."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return _OUTSIDE.sub(lambda link: link[1] if link[1].startswith("`") else f"`{link[1]}`", markdown)
