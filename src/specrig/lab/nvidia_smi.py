"""The stand-in for nvidia-smi that lab hosts with made-up cards can have: `python -m specrig.lab.nvidia_smi` prints it."""

from __future__ import annotations

import json
import sys

from specrig.lab.images import RECIPES
from specrig.plan.catalog import catalog


def script() -> str:
    """The program's text, with the catalog's cards in it."""
    table = {
        pci: {
            "name": f"NVIDIA {gpu.title.removesuffix(' 12 GB').removesuffix(' 16 GB')}",
            "memory": gpu.vram_mib,
            "bar1": gpu.bar1_mib,
            **{key: getattr(gpu.power, key) for key in ("default", "min", "max")},
        }
        for gpu in catalog().gpus.values()
        for pci in gpu.pci_ids
    }
    return (RECIPES / "nvidia-smi").read_text().replace("@CARDS@", json.dumps(table))


if __name__ == "__main__":
    sys.stdout.write(script())
