"""The golden command lines: what each profile and variant becomes in each version.

`python -m tests.unit.plan.golden` (from the repository's root, with src on the path) writes golden/*.txt anew; read the
diff before committing it.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specrig.plan import plan_host
from specrig.plan.catalog import profiles
from specrig.plan.render import flags

FOLDER = Path(__file__).with_name("golden")
_OLD, _NEW = (
    ("0.6.4.post1", "0.7.3", "0.8.2", "0.8.5", "0.9.2", "0.10.2"),
    ("0.15.1", "0.19.1", "0.26.0", "0.30.0", "0.31.0", "0.33.0"),
)
VERSIONS = _OLD + _NEW
VARIANT_VERSIONS = ("0.6.4.post1", "0.9.2", "0.16.0", "0.26.0", "0.33.0")
VARIANTS: dict[str, dict[str, Any]] = {
    "off": {},
    "ngram": {"draft": None, "method": "ngram"},
    "heterogeneous": {"vocab": "heterogeneous"},
    "pard": {"draft": {"repo": "amd/PARD-DeepSeek-R1-Distill-Qwen-1.5B"}, "method": "pard"},
    "eagle3": {"draft": {"repo": "thoughtworks/DeepSeek-R1-Distill-Qwen-14B-Eagle3"}, "method": "eagle3"},
}


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """File name (without .txt) and declaration."""
    for name, profile in profiles().items():
        service = profile.services[0]["name"]
        for version in [profile.services[0]["version"]] if name == "cpu_demo" else VERSIONS:
            yield f"{name}@{version}", {"rig_profile": name, "rig_services": [{"name": service, "version": version}]}
    for variant, over in VARIANTS.items():
        for version in VARIANT_VERSIONS:
            item = {"name": "r1-14b", "version": version, **over}
            decl = {"rig_profile": "rtx4090_r1_14b", "rig_services": [item], "rig_speculation": variant != "off"}
            yield f"rtx4090_r1_14b+{variant}@{version}", decl


def text(declaration: dict[str, Any]) -> str:
    """What the file holds: image, environment, command; or the refusals."""
    plan = plan_host("golden", declaration)
    if plan.refusals:
        return "".join(f"refused: {found.code}: {found.cause}\n" for found in plan.refusals)
    service = plan.services[0]
    lines = [service.image, *(f"{key}={value}" for key, value in service.env.items()), " ".join(service.entrypoint)]
    return "\n".join([*lines, *flags(service.argv)]) + "\n"


def main() -> int:
    """Write every file, remove the others."""
    FOLDER.mkdir(exist_ok=True)
    written = {FOLDER / f"{name}.txt": text(declaration) for name, declaration in cases()}
    for path in set(FOLDER.glob("*.txt")) - set(written):
        path.unlink()
    for path, content in written.items():
        path.write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
