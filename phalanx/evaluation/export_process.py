"""The background process that training starts after a save: exports a checkpoint and compares it with the model in training.

    python -m phalanx.evaluation.export_process CHECKPOINT HF_DIR LOGITS PARENT_PID

It runs at the lowest priority and ends with the run. Its last line of output is a JSON object with the result.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from phalanx.host.process_tree import die_with


def main() -> int:
    checkpoint, out, logits, parent = sys.argv[1:5]
    die_with(int(parent))
    os.nice(19)
    import torch

    from phalanx.checkpointing.hf_folder import read_reference
    from phalanx.evaluation.convert import export_checkpoint
    from phalanx.spec.errors import PhalanxError

    torch.set_num_threads(1)  # leaves the cores to the run
    try:
        converted = export_checkpoint(checkpoint, Path(out), reference=read_reference(Path(logits)))
    except PhalanxError as error:
        print(json.dumps({"error": str(error).replace("\n", " ")}))
        return error.exit_code
    assert converted.match is not None
    print(json.dumps(asdict(converted.match)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
