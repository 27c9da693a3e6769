"""Every rule the plan is judged by, in the order it is told. A rule is a function that yields findings."""

from collections.abc import Callable, Iterator

from specrig.plan import compat, docker, exposure, idle, memory, pairing, topology, tuning
from specrig.plan.resolve import Host, Service
from specrig.plan.types import Finding

ServiceRule = Callable[[Service], Iterator[Finding]]
HostRule = Callable[[Host, list[Service]], Iterator[Finding]]

SERVICE_RULES: list[ServiceRule] = [
    compat.image_is_pinned,
    compat.image_is_locked,
    compat.engine_fits_device,
    compat.engine_has_the_words,
    compat.engine_reads_the_files,
    compat.engine_is_proven,
    compat.method_exists,
    compat.k_is_sound,
    compat.concurrency_is_low,
    compat.cards_serve,
    compat.parallel_divides,
    topology.cards_can_talk,
    compat.driver_runs_image,
    compat.draft_keeps_graphs,
    pairing.pair_makes_sense,
    pairing.tokenizers_match,
    pairing.vocabularies_meet,
    pairing.it_can_pay,
    pairing.models_are_locked,
    memory.context_is_known,
    memory.it_fits,
    memory.estimate,
    memory.graphs_are_kept,
    memory.cpu_cache_fits,
    exposure.bind_is_safe,
    exposure.engine_takes_a_key,
    exposure.arguments_are_ours,
    exposure.environment_is_clean,
    exposure.notes_are_plain,
    compat.version_is_safe,
    idle.service_fields,
]
HOST_RULES: list[HostRule] = [
    compat.driver_is_consistent,
    topology.bridges_are_there,
    tuning.limits_are_possible,
    compat.driver_module_runs_card,
    compat.driver_source_is_whole,
    compat.driver_branch_is_known,
    memory.cards_are_shared_within_bounds,
    exposure.ports_are_free,
    exposure.key_is_strong,
    exposure.networks_fit_binds,
    exposure.models_lie_apart,
    exposure.mok_password_is_there,
    docker.docker_options_are_typed,
    docker.docker_is_safe,
    docker.docker_data_lies_apart,
    idle.host_fields,
]
