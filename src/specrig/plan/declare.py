"""From whatever stands in an inventory to typed declarations, every fault a finding with the field's path."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from specrig.host.redact import redact
from specrig.plan.catalog import Catalog, Profile
from specrig.plan.refusals import finding
from specrig.plan.types import Declared, Facts, Finding, HostDecl, ServiceDecl

M = TypeVar("M", bound=BaseModel)
MAX_DEPTH = 12

# The refusal for a value of the right type that its field does not take.
CONSTRAINT_CODES = {
    "name": "SERVICE_NAME_INVALID",
    "served_name": "SERVED_NAME_INVALID",
    "engine": "ENGINE_UNKNOWN",
    "method": "METHOD_UNKNOWN",
    "device": "DEVICE_UNKNOWN",
    "vocab": "VOCAB_MODE_UNKNOWN",
    "repo": "MODEL_NAME_INVALID",
    "file": "MODEL_FILE",
    "revision": "REVISION_NOT_COMMIT",
    "max_model_len": "CONTEXT_INVALID",
    "max_num_seqs": "CONCURRENCY_INVALID",
    "gpu_memory_utilization": "UTIL_INVALID",
    "tensor_parallel": "TP_INVALID",
    "draft_tensor_parallel": "TP_INVALID",
    "port": "PORT_INVALID",
    "branch": "DRIVER_INVALID",
    "version": "DRIVER_INVALID",
    "count": "GPU_COUNT_INVALID",
    "server_name": "GATEWAY_NAME_INVALID",
    "rig_models_root": "MODELS_ROOT_INVALID",
    "rig_hub_endpoint": "HUB_ENDPOINT_INVALID",
    "rig_allow_from": "ALLOW_FROM_INVALID",
    "rig_docker_data_root": "DATA_ROOT_INVALID",
}
_OF_A_DRAFT = ("vocab", "draft_tensor_parallel")
_CONSTRAINTS = ("pattern", "greater_than", "less_than", "literal_error", "finite_number")


def show(value: Any) -> str:
    """A value in a message: short, without a secret that it may hold, and safe for any type."""
    if isinstance(value, bool) or value is None:
        return str(value).lower() if value is not None else "empty"
    if isinstance(value, int):
        return str(value) if abs(value) < 10**30 else "a very large number"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        text = redact(value[:4096])
        text = text if len(text) <= 60 else text[:57] + "…"
        return ascii(text) if not text.isprintable() else f"'{text}'"
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list) else f"a {type(value).__name__}"


def plain(value: Any, depth: int = 0) -> Any:
    """`value` with mappings, sequences and subclasses of builtins (Ansible's tagged values) made builtin.

    Raises RecursionError when it is nested too deep.
    """
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, Mapping):
        return {
            k if type(k) is str else str(k) if isinstance(k, str) else show(k): plain(v, depth + 1)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    for builtin in (str, int, float):
        if isinstance(value, builtin) and not isinstance(value, bool):
            return builtin(value)
    return value


def nearest_word(word: str, known: Iterable[str]) -> str:
    """What may have been meant, for the end of a cause; empty when nothing is near."""
    match = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {match[0]}?" if match else ""


def _path(prefix: str, location: tuple[int | str, ...]) -> str:
    text = prefix
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{shown(part)}" if text else shown(part)
    return text


def shown(part: object) -> str:
    """A key or a name within a path: as it is, unless it is long or would do something to a terminal."""
    text = str(part)
    return text if text.isprintable() and len(text) <= 60 else show(text)


def _said(message: str) -> str:
    """A message of the library within a sentence, in YAML's words; patterns in it keep their capitals."""
    message = re.sub(r"dictionary( or instance of \w+)?", "mapping", message)
    return message[:1].lower() + message[1:]


def _finding(model: type[BaseModel], prefix: str, error: Any) -> Finding:
    location = tuple(part for part in error["loc"] if part not in ("int", "str", "[key]"))
    kind, field = error["type"], next((part for part in reversed(location) if isinstance(part, str)), "")
    path = _path(prefix, location)
    schema = "service.json" if model is ServiceDecl else "host.json"
    hidden = bool({"env", "rig_api_key", "rig_gateway_keys"} & set(location))
    value = "a hidden value" if hidden else show(error.get("input"))
    if kind == "extra_forbidden":
        siblings = model.model_fields if len(location) == 1 else ()
        fix = f"correct the name; docs/schema/{schema} lists them all"
        return finding("UNKNOWN_FIELD", f"{path} is not a field{nearest_word(field, siblings)}", fix)
    if kind == "missing":
        return finding("FIELD_MISSING", f"{path} is missing")
    if kind.endswith("too_long"):
        return finding("TOO_LONG", f"{path} is too long: {_said(error['msg'])}")
    if field == "k" and kind in ("greater_than_equal", "less_than_equal"):
        code = "K_NEGATIVE" if kind.startswith("greater") else "K_TOO_LARGE"
        return finding(code, f"{path} is {value}; it takes 0 to 6, and up to 12 with k_measured_reason")
    context = error.get("ctx", {})
    words = f"{field}: {context['expected'].replace(chr(39), '')}" if "expected" in context else ""
    if any(part in kind for part in _CONSTRAINTS) and field in CONSTRAINT_CODES:
        return finding(CONSTRAINT_CODES[field], f"{path} is {value}: {_said(error['msg'])}", words)
    if any(part in kind for part in _CONSTRAINTS) or kind.endswith("too_short"):
        fix = words or context.get("fix") or f"see docs/schema/{schema} for the range"
        return finding("VALUE_OUT_OF_RANGE", f"{path} is {value}: {_said(error['msg'])}", fix)
    written = f'{field}: "…"' if location[-1:] == (field,) else '"…"'
    fix = _quotes(written, error["input"]) if kind == "string_type" else ""
    return finding("WRONG_TYPE", f"{path} is {value}: {_said(error['msg'].split(',')[0])}", fix)


def _quotes(written: str, value: Any) -> str:
    """The fix for a text that YAML takes for something else; "" for what is no such text."""
    if isinstance(value, bool):
        why = "YAML reads on, off, yes and no as true and false"
    elif isinstance(value, float):
        why = "YAML reads 0.10 as the number 0.1"
    elif isinstance(value, int):
        why = "YAML reads it as a number"
    else:
        return ""
    return f"write it in quotes, {written}; without them {why}"


def parse(model: type[M], value: Any, prefix: str = "") -> tuple[M | None, list[Finding]]:
    """`value` as a `model`, or the findings that say why not."""
    try:
        return model.model_validate(value), []
    except ValidationError as errors:
        found = [_finding(model, prefix, error) for error in errors.errors(include_url=False)]
        return None, list(dict.fromkeys(found))


def host_declaration(declaration: Any) -> tuple[HostDecl, list[Finding], frozenset[str]]:
    """A host's rig_* variables, what is wrong with them, and the names of those that could not be read.

    Such a variable falls back to its default, so that all faults show; a rule about it says nothing.
    """
    if not isinstance(declaration, Mapping):
        found = [finding("NOT_A_MAPPING", f"the host's variables are {show(declaration)}")]
        return HostDecl.model_validate({}), found, frozenset()
    try:
        ours = {k: plain(v) for k, v in declaration.items() if isinstance(k, str) and str(k).startswith("rig_")}
    except RecursionError:
        found = [finding("NESTED_TOO_DEEP", f"a rig_ variable nests deeper than {MAX_DEPTH}")]
        return HostDecl.model_validate({}), found, frozenset()
    decl, found = parse(HostDecl, ours)
    unread = frozenset(str(error["loc"][0]) for error in _errors(HostDecl, ours)) if decl is None else frozenset()
    if decl is None:
        decl = HostDecl.model_validate({k: v for k, v in ours.items() if k not in unread})
    return decl, found, unread


def _errors(model: type[Declared], value: Any) -> list[Any]:
    try:
        model.model_validate(value)
    except ValidationError as errors:
        return list(errors.errors(include_url=False))
    return []


def host_facts(facts: Any) -> tuple[Facts, list[Finding]]:
    """What the host reported. Unreadable facts are a finding and count as none."""
    if facts is None:
        return Facts(), []
    try:
        parsed, found = parse(Facts, plain(facts), "facts")
    except RecursionError:
        parsed, found = None, [finding("NESTED_TOO_DEEP", "facts are nested too deep")]
    if parsed is None:
        return Facts(), [finding("FACTS_INVALID", "; ".join(f.cause for f in found[:3]))]
    return parsed, []


def profile_of(decl: HostDecl, catalog: Catalog) -> tuple[Profile | None, list[Finding]]:
    """The named profile."""
    if decl.rig_profile is None:
        return None, []
    profile = catalog.profiles.get(decl.rig_profile)
    if profile is None:
        cause = f"rig_profile is {show(decl.rig_profile)}{nearest_word(decl.rig_profile, catalog.profiles)}"
        return None, [finding("PROFILE_UNKNOWN", cause, f"rig_profile: one of {', '.join(catalog.profiles)}")]
    return profile, []


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**base, **over}
    method = over.get("method")
    # The base's draft belonged to the base's method, and so did what goes with it.
    gone = {"none": ("draft", *_OF_A_DRAFT, "k"), "ngram": ("draft", *_OF_A_DRAFT)}.get(str(method), ())
    merged = {name: value for name, value in merged.items() if name in over or name not in gone}
    if isinstance(base.get("env"), dict) and isinstance(over.get("env"), dict):
        merged["env"] = {**base["env"], **over["env"]}
    return merged


def service_declarations(decl: HostDecl, profile: Profile | None) -> tuple[list[ServiceDecl], list[Finding]]:
    """The profile's services with the host's own merged over them by name, then the host's new ones."""
    items: dict[Any, dict[str, Any]] = {service["name"]: service for service in (profile.services if profile else [])}
    found: list[Finding] = []
    seen: set[Any] = set()
    for index, item in enumerate(decl.rig_services):
        name = item.get("name")
        name = name if isinstance(name, str) else index
        if name in seen:
            found.append(finding("SERVICE_NAME_DUPLICATE", f"rig_services names {show(name)} twice"))
            continue
        seen.add(name)
        items[name] = _merge(items.get(name, {}), item)
    services = []
    for name, item in items.items():
        service, faults = parse(ServiceDecl, item, f"rig_services[{shown(name)}]")
        if profile and "target" not in item and isinstance(name, str):
            own = ", ".join(service["name"] for service in profile.services)
            faults = [
                replace(fault, fix=f"add it, or use the profile's service: {own}")
                if ".target " in fault.cause
                else fault
                for fault in faults
            ]
        found += faults
        services += [service] if service else []
    if not items and not found:
        found.append(finding("NOTHING_DECLARED", "the host has neither rig_profile nor rig_services"))
    return services, found
