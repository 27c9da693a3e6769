"""What is reachable and what is readable: addresses, ports, keys, arguments, environment."""

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from specrig.plan.command import FIELDS, values
from specrig.plan.declare import nearest_word, show
from specrig.plan.dialects import option_accepted, options
from specrig.plan.refusals import finding
from specrig.plan.resolve import Host, Service, excludes
from specrig.plan.types import Finding, GatewayDecl, ServiceDecl

MIN_KEY = 16
TLS_PORT, HTTP_PORT = 443, 8080
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z", re.ASCII)
_SECRET_ENV = re.compile(r"(?:^|_)(?:API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)\Z", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\b(hf_)[A-Za-z0-9]{20,}|\w://[^\s/@:]*:[^\s/]+@")
_FLAG = re.compile(r"--?[A-Za-z]")
_SECRET_FLAGS = ("--api-key", "--hf-token", "--admin-api-key", "--ssl-keyfile-password")
_PARALLEL_FLAGS = ("--pipeline-parallel-size", "--data-parallel-size")
_FORCED_SLOW = "awq"
MASK = "***"
SYSTEM_DIRECTORIES = {"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys", "usr"}


def address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """`text` as an IP address, or None."""
    try:
        return None if "%" in text else ipaddress.ip_address(text)  # a zone may be any text, and Docker takes none
    except ValueError:
        return None


def same_socket(one: tuple[str, int], other: tuple[str, int]) -> bool:
    """Whether two programs that listen on (address, port) would be in each other's way."""
    a, b = address_of(one[0]), address_of(other[0])
    return one[1] == other[1] and (a == b or bool(a and a.is_unspecified) or bool(b and b.is_unspecified))


def gateway_socket(wanted: GatewayDecl) -> tuple[str, int]:
    """(how it speaks TLS, "" for not at all; the port) of a gateway."""
    tls = wanted.tls or ("internal" if wanted.server_name else "")
    return tls, wanted.port or (TLS_PORT if tls else HTTP_PORT)


def reached_here(bind: str) -> str:
    """The address by which a program on the same host reaches what listens on `bind`, as a URL has it."""
    return url_host({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind))  # noqa: S104  compared, not bound


def bind_is_safe(s: Service) -> Iterator[Finding]:
    """Off loopback only with a key that a person chose, and for networks that a person named."""
    if address_of(s.decl.bind) is None:
        yield finding("BIND_INVALID", f"bind is {show(s.decl.bind)}, not an IP address")
    if not is_published(s):
        return
    if s.host.decl.rig_api_key is None:
        yield finding(
            "BIND_EXPOSED_WITHOUT_KEY", f"bind is {s.decl.bind}, reachable from the network, and rig_api_key is not set"
        )
    if not s.host.decl.rig_allow_from and "rig_allow_from" not in s.host.unread:
        yield finding(
            "BIND_EXPOSED_TO_ALL",
            f"bind is {s.decl.bind}, reachable from the network, and rig_allow_from does not say who may come",
        )


def is_published(s: Service) -> bool:
    """Whether the service is bound to an address that other machines may reach."""
    address = address_of(s.decl.bind)
    return address is not None and not address.is_loopback


def networks_fit_binds(host: Host, services: list[Service]) -> Iterator[Finding]:
    """A published address is reached by its own kind of IP only; with networks of the other kind nobody may come."""
    networks = [ipaddress.ip_network(network) for network in host.decl.rig_allow_from]
    for s in services:
        address = address_of(s.decl.bind)
        if (
            address is None
            or not networks
            or not is_published(s)
            or any(n.version == address.version for n in networks)
        ):
            continue
        other = {4: 6, 6: 4}[address.version]
        any_of_other = {4: "0.0.0.0", 6: "::"}[other]  # noqa: S104  # a text for the fix
        yield finding(
            "ALLOW_FROM_FAMILY",
            f"{s.name}: bind is {s.decl.bind}, which IPv{address.version} reaches; rig_allow_from has IPv{other} networks only",
            f"rig_allow_from: an IPv{address.version} network too, or bind: {any_of_other}",
        )


def url_host(address: str) -> str:
    """An address as URLs, and host:port, have it: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address


def published(services: Iterable[Service]) -> list[dict[str, Any]]:
    """Ports that the firewall guards: {bind, port, unit} of every service off loopback."""
    return [
        {"bind": s.decl.bind, "port": s.decl.port, "unit": f"specrig-{s.decl.name}.service"}
        for s in services
        if is_published(s)
    ]


def engine_takes_a_key(s: Service) -> Iterator[Finding]:
    """Some engines have no key, or write it to their log: they stay on loopback, behind the gateway."""
    address = address_of(s.decl.bind)
    if s.engine.key_env or address is None:
        return
    if address.is_loopback:
        yield finding("ENGINE_KEYLESS", f"{s.engine.title} takes no key in secret: every user of the host may ask it")
    else:
        yield finding("ENGINE_KEYLESS_EXPOSED", f"bind is {s.decl.bind}, and {s.engine.title} takes no key in secret")


def key_faults(name: str, key: Any) -> Iterator[str]:
    """What is wrong with a key that a person chose: it is vaulted, or at least long. Its text appears in no message."""
    if isinstance(key, Mapping) and "__ansible_vault" in key:
        return
    if not isinstance(key, str):
        yield f"{name} is {show(key) if not isinstance(key, int | float) else 'a number'}, not text"
    elif len(key) < MIN_KEY:
        yield f"{name} has {len(key)} characters, {MIN_KEY} are the least"
    elif not key.isascii() or any(c.isspace() or not c.isprintable() for c in key):
        yield f"{name} has a space, a control character or a letter beyond ASCII"


def key_is_strong(host: Host, _services: list[Service]) -> Iterator[Finding]:
    """The rig's API key, where a person chose it."""
    if host.decl.rig_api_key is not None:
        yield from (finding("API_KEY_INVALID", fault) for fault in key_faults("rig_api_key", host.decl.rig_api_key))


def mok_password_is_there(host: Host, _services: list[Service]) -> Iterator[Finding]:
    """A key for Secure Boot is put up only with a password that the firmware can be told. Its text appears in no message."""
    driver, password = host.decl.rig_driver, host.decl.rig_mok_password
    if driver is None or driver.mok != "stage" or (isinstance(password, Mapping) and "__ansible_vault" in password):
        return
    if password is None:
        yield finding("MOK_PASSWORD_INVALID", "rig_driver has mok: stage, and rig_mok_password is not set")
    elif not isinstance(password, str):
        yield finding("MOK_PASSWORD_INVALID", "rig_mok_password is not text")
    elif not (8 <= len(password) <= 16 and password.isascii() and password.isprintable()):
        yield finding(
            "MOK_PASSWORD_INVALID",
            f"rig_mok_password has {len(password)} characters, or one beyond plain ASCII; 8 to 16 are taken",
        )


def models_lie_apart(host: Host, _services: list[Service]) -> Iterator[Finding]:
    """Models do not lie below a directory that belongs to the system: the role owns what it creates there."""
    top = host.decl.rig_models_root.split("/")[1]
    if top in SYSTEM_DIRECTORIES:
        yield finding(
            "MODELS_ROOT_INVALID", f"rig_models_root is {host.decl.rig_models_root}, and /{top} is the system's"
        )


def ports_are_free(host: Host, services: list[Service]) -> Iterator[Finding]:
    """Two services can not publish the same port on the same address."""
    taken = {s.decl.port for s in services}
    taken |= {other.port for other in (host.decl.rig_webui, host.decl.rig_gateway) if other and other.port}
    for i, one in enumerate(services):
        for other in services[:i]:
            clash = same_socket((one.decl.bind, one.decl.port), (other.decl.bind, other.decl.port))
            if clash and not excludes(one, other):
                where = f"port {one.decl.port} ({', '.join(dict.fromkeys((other.decl.bind, one.decl.bind)))})"
                free = next(p for p in range(8000, 65536) if p not in taken)
                taken.add(free)  # each gets one of its own
                yield finding(
                    "PORT_CLASH", f"{other.name} and {one.name} both listen on {where}", f"port: {free} for {one.name}"
                )
                break


def _bad_character(text: str) -> bool:
    """Whether it would do something to a terminal or a unit file: control, half a pair, a line or its direction changed."""
    return any(
        ord(c) < 32
        or 127 <= ord(c) < 160
        or 0xD800 <= ord(c) < 0xE000
        or c in "\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
        for c in text
    )


def notes_are_plain(s: Service) -> Iterator[Finding]:
    """What a person reads of a plan is text; its lines may break."""
    texts = [("k_measured_reason", s.decl.k_measured_reason or ""), *(("notes", note) for note in s.decl.notes)]
    for field in dict.fromkeys(name for name, text in texts if _bad_character(re.sub(r"[\n\t]", " ", text))):
        yield finding("CONTROL_CHARACTER", f"{field} holds a control character")


def secret_in(text: str) -> str:
    """What kind of secret a value looks like; "" for none."""
    match = _SECRET_VALUE.search(text)
    return "" if match is None else "a Hugging Face token" if match[1] else "a URL with a password"


def _secret_fix(s: Service, name: str) -> str:
    """Where a secret of this name belongs; "" for the code's own words."""
    word = name.upper().lstrip("-").replace("-", "_")
    if word.startswith("HF_") or "HUGGING" in word:
        return f"leave {name} out; rig_hub_token: it is used while staging only"
    if not word.endswith("API_KEY"):
        return f"leave {name} out: the engine needs no secret but its API key"
    if not s.engine.key_env:
        return f"leave {name} out: {s.engine.title} takes no key in secret; on loopback, the gateway before it asks for one"
    return ""


def leaks(found: Iterable[Finding]) -> bool:
    """Whether one of these says that there is a secret where everybody reads it."""
    return any(one.code in ("SECRET_IN_ARGS", "SECRET_IN_ENV") for one in found)


def masked_env(env: Mapping[str, str]) -> dict[str, str]:
    """The names of a person's own variables, once one of them holds a secret: which one is a guess, so no value is shown."""
    return dict.fromkeys(env, MASK)


def masked_args(words: list[str]) -> list[str]:
    """The same of a person's own arguments: flags without their values."""
    names = [re.split(r"[=\s]", word, maxsplit=1)[0] for word in words]
    return [
        MASK if not name.startswith("--") else name if name == word else f"{name}={MASK}"
        for name, word in zip(names, words, strict=True)
    ]


def secret_value_fix(kind: str) -> str:
    """What to do instead of writing such a value."""
    if kind == "a URL with a password":
        return "a URL without a password: specrig has no place where that one would be kept secret"
    return "leave it out; rig_hub_token: it is used while staging only"


def _owned_fix(s: Service, flag: str) -> str:
    """Which field says what an owned flag would."""
    value = s.speaking.owned.get(flag) or next(
        (name for whole, name in s.speaking.owned.items() if whole.startswith(flag)), ""
    )
    field = FIELDS.get(value, value if value in ServiceDecl.model_fields else "")
    return f"leave {flag} out" + (f", and set the service's {field}" if field else ": no field changes it")


def _judged(s: Service, word: str) -> Iterator[Finding]:
    """The fault of one flag of extra_args, if it has one."""
    speaking, engine = s.speaking, s.decl.engine
    written = word.split("=", 1)[0].split(".", 1)[0]  # --flag.key sets one key of a JSON flag
    flag = speaking.short.get(written, written.replace("_", "-") if written.startswith("--") else written)
    real = flag in speaking.known or flag in options(engine)
    positive = "--" + flag.removeprefix("--no-") if flag.startswith("--no-") else flag

    def names(flags: Iterable[str]) -> bool:
        # argparse takes abbreviations, unless they are options of their own
        return positive in flags or (not real and len(flag) > 4 and any(one.startswith(flag) for one in flags))

    if names(_SECRET_FLAGS) or flag.split(maxsplit=1)[0] in _SECRET_FLAGS:
        flag = flag.split(maxsplit=1)[0]
        cause = f"extra_args has {flag}: every user of the host can read arguments"
        yield finding("SECRET_IN_ARGS", cause, _secret_fix(s, flag))
    elif names(_PARALLEL_FLAGS):
        yield finding(
            "PARALLELISM_UNSUPPORTED", f"extra_args has {flag}: the memory account knows tensor_parallel only"
        )
    elif names(speaking.owned):
        yield finding("FLAG_OWNED", f"extra_args has {show(flag)}, which the plan writes", _owned_fix(s, positive))
    elif not real:
        near = nearest_word(flag, options(engine))
        yield finding("FLAG_UNKNOWN", f"extra_args has {show(flag)}, which no version of {engine} takes{near}")
    elif not speaking.known.get(flag, option_accepted(engine, flag, s.version)):
        yield finding("FLAG_NOT_IN_VERSION", f"extra_args has {show(flag)}, which {engine} {s.version} does not take")


def arguments_are_ours(s: Service) -> Iterator[Finding]:
    """extra_args adds flags; it can not contradict the plan, name removed flags, or carry secrets."""
    if any(_bad_character(word) for word in s.decl.extra_args):
        yield finding("CONTROL_CHARACTER", "extra_args holds a control character")
    if s.decl.extra_args and not s.decl.extra_args[0].startswith("-"):
        yield finding(
            "ARG_POSITIONAL", f"extra_args begins with {show(s.decl.extra_args[0])}, which would be a second model"
        )
    for kind in dict.fromkeys(filter(None, map(secret_in, s.decl.extra_args))):
        cause = f"extra_args has {kind}: every user of the host can read arguments"
        yield finding("SECRET_IN_ARGS", cause, secret_value_fix(kind))
    yield from (found for word in s.decl.extra_args if _FLAG.match(word) for found in _judged(s, word))
    if any(word.replace("_", "-") == "--trust-remote-code" for word in s.decl.extra_args):
        yield finding(
            "REMOTE_CODE", "extra_args has --trust-remote-code: Python from the model's repository runs in the engine"
        )
    words = [part for word in s.decl.extra_args for part in word.split("=", 1)]
    if (
        s.cuda
        and s.decl.engine == "vllm"
        and any(a in ("--quantization", "-q") and b == _FORCED_SLOW for a, b in pairwise(words))
    ):
        yield finding(
            "QUANTIZATION_FORCED", "extra_args has --quantization awq, which picks the slow kernel before 0.27"
        )


def variable_fault(name: str, value: str, secret_fix: str) -> Finding | None:
    """What is wrong with a variable that a person declares, whatever reads it."""
    if not _ENV_NAME.match(name):
        return finding("ENV_NAME_INVALID", f"env has {show(name)}, which is no variable name")
    if _SECRET_ENV.search(name):
        return finding("SECRET_IN_ENV", f"env has {name}: docker inspect shows it to everyone", secret_fix)
    if kind := secret_in(value):
        return finding(
            "SECRET_IN_ENV", f"env {name} has {kind}: docker inspect shows it to everyone", secret_value_fix(kind)
        )
    if _bad_character(value):
        return finding("CONTROL_CHARACTER", f"env {name} holds a control character")
    return None


def environment_is_clean(s: Service) -> Iterator[Finding]:
    """env is for harmless settings: no secrets (anyone with docker inspect reads it), nothing the plan decides."""
    ours = s.speaking.env(values(s))
    for name, value in s.decl.env.items():
        if fault := variable_fault(name, value, _secret_fix(s, name)):
            yield fault
        elif name in s.speaking.owned_env:
            yield finding("ENV_OWNED", f"env has {name}: {s.speaking.owned_env[name]}")
        elif name in ours and value != ours[name]:
            yield finding("ENV_OWNED", f"env sets {name} to {show(value)}, the plan needs {ours[name]}")
