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
        fixed = name == "cpu_demo" or profile.services[0]["engine"] != "vllm"
        for version in [profile.services[0].get("version", "auto")] if fixed else VERSIONS:
            yield f"{name}@{version}", {"rig_profile": name, "rig_services": [{"name": service, "version": version}]}
    for variant, over in VARIANTS.items():
        for version in VARIANT_VERSIONS:
            item = {"name": "r1-14b", "version": version, **over}
            decl = {"rig_profile": "rtx4090_r1_14b", "rig_services": [item], "rig_speculation": variant != "off"}
            yield f"rtx4090_r1_14b+{variant}@{version}", decl
    for engine in ("llama_cpp", "sglang", "aphrodite", "tensorrt_llm"):
        yield f"rtx4090_r1_14b_{engine}+off", {"rig_profile": f"rtx4090_r1_14b_{engine}", "rig_speculation": False}
    cards = [{"name": "rtx_3090", "count": 2}]
    two = {
        "rig_profile": "rtx4090_r1_14b_llama_cpp",
        "rig_gpus": cards,
        "rig_services": [{"name": "r1-14b", "gpus": [0, 1]}],
    }
    yield "rtx4090_r1_14b_llama_cpp+two_cards", two
    for engine in ("sglang", "tensorrt_llm", "aphrodite"):
        service = [{"name": "r1-14b", "tensor_parallel": 2}]
        two = {"rig_profile": f"rtx4090_r1_14b_{engine}", "rig_gpus": cards, "rig_services": service}
        yield f"rtx4090_r1_14b_{engine}+tp2", two


def text(declaration: dict[str, Any]) -> str:
    """What the file holds: image, environment, command, configuration files; or the refusals."""
    plan = plan_host("golden", declaration)
    if plan.refusals:
        return "".join(f"refused: {found.code}: {found.cause}\n" for found in plan.refusals)
    service = plan.services[0]
    lines = [service.image, *(f"{key}={value}" for key, value in service.env.items()), " ".join(service.entrypoint)]
    files = [f"== {file['path_in_container']}\n{file['content'].rstrip()}" for file in service.files]
    return "\n".join([*lines, *flags(service.argv), *files]) + "\n"


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
