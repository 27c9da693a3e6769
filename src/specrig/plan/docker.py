"""Docker's own settings: of the kind that dockerd takes, without a second owner, and no open API unnoticed."""

import re
from collections.abc import Iterator
from typing import Any

from specrig.plan.declare import show
from specrig.plan.exposure import SYSTEM_DIRECTORIES
from specrig.plan.refusals import finding
from specrig.plan.resolve import Host, Service
from specrig.plan.types import Finding

_KINDS: dict[str, tuple[type, ...]] = {
    "true or false": (bool,),
    "a whole number": (int,),
    "text": (str,),
    "mappings": (dict,),
    "a mapping": (dict,),
}


def _is(kind: str, value: Any) -> bool:
    """Whether a value is of a kind as catalog/docker.yml names them: one of _KINDS, or a list or a mapping of it."""
    if of := re.fullmatch(r"a (list|mapping) of (.+)", kind):
        several, ones = (list, value) if of[1] == "list" else (dict, getattr(value, "values", list)())
        return isinstance(value, several) and all(_is(of[2], one) for one in ones)
    return isinstance(value, _KINDS[kind]) and (kind == "true or false" or not isinstance(value, bool))


def docker_options_are_typed(host: Host, _services: list[Service]) -> Iterator[Finding]:
    """dockerd does not start on a value of the wrong kind; the classic is a number in log-opts."""
    kinds = {key: kind for kind, keys in host.catalog.docker.items() for key in keys}
    for key, value in host.decl.rig_docker_daemon_options.items():
        kind = kinds.get(key)
        if kind is None or value is None or _is(kind, value):
            continue
        path, inner = f"rig_docker_daemon_options.{key}", kind.partition(" of ")[2]
        if inner and isinstance(value, dict | list):  # the one entry that is wrong, rather than "a mapping"
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            name, value = next(((n, one) for n, one in entries if not _is(inner, one)), (None, value))
            if name is not None:
                path, kind = f"{path}[{name}]" if isinstance(name, int) else f"{path}.{name}", inner
        kind = "a mapping" if kind == "mappings" else kind
        quoted = kind == "text" and isinstance(value, bool | int | float)
        fix = f'{path.rpartition(".")[2]}: "{show(value)}"' if quoted else f"{path.rpartition('.')[2]}: {kind}"
        yield finding("DOCKER_OPTION_TYPE", f"{path} is {show(value)}; Docker takes {kind}", fix)


def docker_is_safe(host: Host, _services: list[Service]) -> Iterator[Finding]:
    """Docker's own settings: no second owner for what has a variable, and no open API unnoticed."""
    options = host.decl.rig_docker_daemon_options
    for key in ("data-root", "graph"):
        if key in options:
            yield finding(
                "DOCKER_OPTION_OWNED",
                f"rig_docker_daemon_options sets {key} to {show(options[key])}, which has a variable of its own",
            )
    hosts = options.get("hosts")
    if not isinstance(hosts, list):
        return
    open_to = [one for one in hosts if isinstance(one, str) and one.startswith("tcp://")]
    if open_to and options.get("tlsverify") is not True:
        yield finding(
            "DOCKER_API_EXPOSED",
            f"rig_docker_daemon_options has hosts: {show(open_to[0])} without tlsverify: who reaches it is root on this host",
        )
    if hosts:
        yield finding(
            "DOCKER_HOSTS_TWICE",
            f"rig_docker_daemon_options has hosts ({len(hosts)}), and the packaged docker.service has -H as well",
        )


def docker_data_lies_apart(host: Host, _services: list[Service]) -> Iterator[Finding]:
    """Docker's data and the models are in directories of their own."""
    root, models = host.decl.rig_docker_data_root, host.decl.rig_models_root
    if root is None:
        return
    if root.split("/")[1] in SYSTEM_DIRECTORIES:
        yield finding("DATA_ROOT_INVALID", f"rig_docker_data_root is {root}, and /{root.split('/')[1]} is the system's")
    elif f"{root}/".startswith(f"{models}/") or f"{models}/".startswith(f"{root}/"):
        yield finding("DATA_ROOT_INVALID", f"rig_docker_data_root is {root} and rig_models_root is {models}")
