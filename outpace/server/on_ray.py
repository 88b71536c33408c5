"""`outpace serve` as an application of Ray Serve, with several replicas and sessions that stay on one of them.

    serve run outpace.server.on_ray:build target=M draft=auto replicas=2

Each replica loads the models and runs an engine of its own. Ray's proxy receives the requests. Those with the same
header `x-session-id` go to the same replica, whose prefix cache holds their conversation.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from outpace.api.llm import LLM
from outpace.core import registry
from outpace.core.errors import UserError, require
from outpace.core.options import CheckedOptions, help_of, number, whole
from outpace.engine.options import BuildOptions, EngineOptions
from outpace.models.options import LoadOptions
from outpace.server.app import build_app
from outpace.server.options import ServerLimits, ServerOptions
from outpace.server.service import Service

_ROUTER = "ray.serve.experimental.consistent_hash_router"
_PROXY = ("host", "port", "draft_port", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs")  # options of Ray's proxy


@dataclass(frozen=True)
class Placement(CheckedOptions):
    """What Ray starts."""

    replicas: int = whole(1, 1, help="Number of replicas, each with models and an engine of its own.")
    num_cpus: float = number(1.0, 0, help="CPUs that Ray reserves for each.")
    num_gpus: float = number(0.0, 0, help="GPUs that Ray reserves for each.")


def build(args: Mapping[str, Any]) -> Any:
    """Return the Ray Serve application for these arguments, given as values or as texts.

    They are target, draft, the fields of `LoadOptions` and `BuildOptions`, options of methods, drafters and rules, the
    flags of `outpace serve` with underscores, and the fields of `Placement`.
    UserError for an unknown argument or a value that is not allowed.
    """
    require("a server on Ray", "ray")
    from ray import serve

    loading, options, placement = read_arguments(args)
    services: list[Service] = []  # the one of this replica

    def start() -> Any:
        services.append(Service(LLM(**loading), options))
        return build_app(services[0])

    class Outpace:
        def check_health(self) -> None:
            if services[0].is_stuck:
                raise RuntimeError(f"the engine has been stuck for {services[0].thread.step_age:.0f} seconds")

    deployment = serve.deployment(
        serve.ingress(start)(Outpace),
        name="outpace",
        num_replicas=placement.replicas,
        ray_actor_options={"num_cpus": placement.num_cpus, "num_gpus": placement.num_gpus},
        max_ongoing_requests=options.limits.max_queue + loading.get("batch", EngineOptions.batch),
        graceful_shutdown_timeout_s=options.limits.drain,
        health_check_period_s=1.0,
        **_sticky_routing(),
    )
    return deployment.bind()


def read_arguments(args: Mapping[str, Any]) -> tuple[dict[str, Any], ServerOptions, Placement]:
    """Return the arguments of `LLM`, the server's options, and the placement; UserError as for `build`."""
    records = (Placement, ServerOptions, ServerLimits, LoadOptions, BuildOptions)
    hints: dict[Any, dict[str, Any]] = {
        record: {name: get_type_hints(record)[name] for name in help_of(record) if name != "rules"}
        for record in records
    }
    hints[LLM] = {"target": Any, "draft": Any}
    values: dict[Any, dict[str, Any]] = {kind: {} for kind in hints}
    for name, value in args.items():
        if name in _PROXY:
            raise UserError(f"leave out {name}: Ray's proxy takes the requests, see `serve start --help`")
        if kind := next((kind for kind, known in hints.items() if name in known), None):
            values[kind][name] = _converted(name, value, hints[kind][name])
        elif registry.owners(name):
            values[LLM][name] = value
        else:
            registry.check_kept(str(name))
            allowed = [one for known in hints.values() for one in known if one not in _PROXY]
            near = difflib.get_close_matches(str(name), allowed, n=1)
            raise UserError(f"no argument is called {name!r}{f'; did you mean {near[0]!r}?' if near else ''}")
    limits = ServerLimits(**values[ServerLimits])
    options = ServerOptions(limits=limits, **values[ServerOptions])
    if options.rules:
        values[BuildOptions]["rules"] = tuple(options.rules)
    BuildOptions(**values[BuildOptions])  # checks them
    return values[LLM] | values[LoadOptions] | values[BuildOptions], options, Placement(**values[Placement])


def _converted(name: str, value: Any, hint: Any) -> Any:
    """Convert a text to an argument's type, a list from texts with commas between them; UserError if that is not
    possible. Other values are not changed."""
    if hint == list[str] | None:
        value = value.split(",") if isinstance(value, str) else value
        if not isinstance(value, list | tuple):
            raise UserError(f"{name} is {value!r}, it must be a text")
        return list(value)
    if not isinstance(value, str) or hint is Any:
        return value
    try:
        return TypeAdapter(hint).validate_strings(value)
    except ValidationError as error:
        raise UserError(f"{name} is {value!r}: {error.errors()[0]['msg'].lower()}") from None


def _sticky_routing() -> dict[str, Any]:
    """Return the options that keep a session on one replica; none if this version of Ray lacks them."""
    if find_spec("mmh3") is None or find_spec("ray.serve.experimental") is None or find_spec(_ROUTER) is None:
        warnings.warn("Ray's ConsistentHashRouter or mmh3 is missing: sessions may change replicas", stacklevel=3)
        return {}
    from ray.serve.config import RequestRouterConfig

    return {"request_router_config": RequestRouterConfig(request_router_class=f"{_ROUTER}.ConsistentHashRouter")}
