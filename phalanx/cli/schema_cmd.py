"""`phalanx schema`: the run file's JSON schema, for editors."""

from __future__ import annotations

import json as encoding

from phalanx.cli.output import AsJson, print_json
from phalanx.spec import schema as run_schema


def schema(json: AsJson = False) -> None:
    """Print the JSON schema of run files, for editors that complete and check TOML."""
    if json:
        print_json(run_schema.schema())
    else:
        print(encoding.dumps(run_schema.schema(), indent=2, ensure_ascii=False))
