"""Broken engine images for tests: the real engine's image with one layer on it, labelled as what it is, in the lab's registry.

| name | what it does |
|---|---|
| renamed | its parser knows `--max-num-seqs` under another name, as a later version of an engine may |
| dies | starts, says why, and ends with status 1 |
| never | starts, and never opens its port |
"""

from __future__ import annotations

from typing import Any

from specrig.lab import enginesimage, hubhost, images
from specrig.lab.errors import LabError
from specrig.lab.hosts import LABEL

_PYTHON = "/opt/vllm/lib/python3.11/site-packages/vllm"
LAYERS = {
    "renamed": f'RUN sed -i \'s/"--max-num-seqs"/"--max-sequences"/\' {_PYTHON}/engine/arg_utils.py'
    f" && rm {_PYTHON}/engine/__pycache__/arg_utils.*",  # which is used unchecked
    "dies": "RUN printf '#!/bin/sh\\necho \"stand-in: no kernel image is available\" >&2\\nsleep 1\\nexit 1\\n' > /opt/vllm/bin/vllm",
    "never": "RUN printf '#!/bin/sh\\nexec sleep 1000000\\n' > /opt/vllm/bin/vllm",
}


def ensure(client: Any, names: list[str]) -> dict[str, str]:
    """Have these stand-ins in the lab's registry; return {name: image as lab hosts pull it}."""
    enginesimage.ensure(client)
    where = hubhost.ensure(client)
    made = {}
    for name in names:
        exact = images.digest([LAYERS[name], enginesimage.image_tag(images.base_tag("debian-12"))])
        tag = f"{enginesimage.VERSION}-{name}-{exact}"
        if not enginesimage.registry_has(where.registry_local, tag):
            _push(client, where.registry_local, name, tag)
        made[name] = f"{where.registry}/{enginesimage.REPOSITORY}:{tag}"
    return made


def _push(client: Any, registry: str, name: str, tag: str) -> None:
    base = f"{registry}/{enginesimage.REPOSITORY}:{enginesimage.VERSION}"
    target = f"{registry}/{enginesimage.REPOSITORY}"
    dockerfile = f"FROM {base}\nUSER root\n{LAYERS[name]}\nLABEL {LABEL}= specrig.image=1 specrig.stand-in={name}\n"
    with images.context({"Dockerfile": dockerfile.encode()}) as context:
        client.images.build(fileobj=context, custom_context=True, tag=f"{target}:{tag}", rm=True, forcerm=True)
    try:
        for event in client.api.push(target, tag, stream=True, decode=True):
            if "error" in event:
                raise LabError("LAB_PUSH", f"{tag}: {event['error']}", f"docker logs {hubhost.NAME}")
    finally:
        client.images.remove(f"{target}:{tag}")
